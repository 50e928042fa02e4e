"""The journal: append-only segment files, one record a commit, one fsync a record.

A segment begins with a header (magic, format, bucket version, segment number, CRC32C) and holds records:

    magic uint32 | payload length uint32 | commit number uint64 | CRC32C of the payload | CRC32C of the head | payload

A payload is a sequence of entries: producer length uint16, producer, write number uint64, block length
uint32, block. All numbers are little-endian.

A record that is not whole at the very end of the newest segment was torn by a crash; it was never
acknowledged and is cut off. A broken record with anything whole behind it is damage: the journal is refused,
because what was acknowledged behind it can no longer be numbered truthfully.
"""

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from upr import failpoints
from upr_protocol.errors import DataDamagedError, StorageFailedError

_HEADER = struct.Struct("<4sIQQI")
_RECORD = struct.Struct("<4sIQII")
_CRC = struct.Struct("<I")
_SEGMENT_MAGIC = b"UPRJ"
_RECORD_MAGIC = b"\xf5UR\xfa"
_FORMAT = 1
SEGMENT_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One Write as it is journalled: who wrote it, its number, and the numbered block's bytes."""

    producer: bytes
    number: int
    block: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """What one record holds. Commit numbers rise by one from record to record."""

    number: int
    entries: tuple[JournalEntry, ...]

    @property
    def size(self) -> int:
        return sum(len(entry.block) for entry in self.entries)


def encode_record(commit: Commit) -> list[bytes]:
    """Return the record's bytes in pieces, so that large blocks are not copied once more."""
    pieces: list[bytes] = []
    for entry in commit.entries:
        head = struct.pack("<H", len(entry.producer)) + entry.producer
        pieces += (head + struct.pack("<QI", entry.number, len(entry.block)), entry.block)
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    head = _RECORD.pack(_RECORD_MAGIC, sum(map(len, pieces)), commit.number, crc, 0)[:-4]
    return [head + _CRC.pack(google_crc32c.value(head)), *pieces]


def record_bytes(commit: Commit) -> int:
    """Return the size of the record that a commit becomes."""
    heads = sum(len(entry.producer) + 14 for entry in commit.entries)
    return _RECORD.size + heads + commit.size


def _decode_payload(payload: bytes) -> tuple[JournalEntry, ...]:
    entries = []
    at = 0
    while at < len(payload):
        (length,) = struct.unpack_from("<H", payload, at)
        producer = payload[at + 2 : at + 2 + length]
        number, size = struct.unpack_from("<QI", payload, at + 2 + length)
        at += 2 + length + 12
        entries.append(JournalEntry(producer, number, payload[at : at + size]))
        at += size
    return tuple(entries)


def _record_at(data: bytes, at: int) -> tuple[Commit, int] | None:
    """Return the whole record at an offset and where it ends, or None."""
    head = _head_at(data, at)
    if head is None or head.end > len(data):
        return None
    payload = data[at + _RECORD.size : head.end]
    if google_crc32c.value(payload) != head.crc:
        return None
    return Commit(head.number, _decode_payload(payload)), head.end


class _Head(NamedTuple):
    """The head of a record: its commit number, the CRC of its payload, and where it ends."""

    number: int
    crc: int
    end: int


def _head_at(data: bytes, at: int) -> _Head | None:
    """Return the head of a record at an offset, or None when there is none that is whole."""
    if at + _RECORD.size > len(data):
        return None
    magic, length, number, crc, head_crc = _RECORD.unpack_from(data, at)
    if magic != _RECORD_MAGIC or google_crc32c.value(data[at : at + _RECORD.size - 4]) != head_crc:
        return None
    return _Head(number, crc, at + _RECORD.size + length)


@dataclass(slots=True)
class _Segment:
    number: int
    path: Path
    last_commit: int = 0


def _finds_record(data: bytes, at: int) -> bool:
    """Whether there is a whole record anywhere from an offset on."""
    found = data.find(_RECORD_MAGIC, at)
    while found != -1 and _record_at(data, found) is None:
        found = data.find(_RECORD_MAGIC, found + 1)
    return found != -1


def _next_record(data: bytes, at: int) -> int:
    """Return where the next whole record begins behind a broken one, or the end of the data."""
    head = _head_at(data, at)
    if head is not None and head.end < len(data):
        return head.end
    found = data.find(_RECORD_MAGIC, at + 1)
    while found != -1 and _record_at(data, found) is None:
        found = data.find(_RECORD_MAGIC, found + 1)
    return len(data) if found == -1 else found


def _ends_here(data: bytes, at: int) -> bool:
    head = _head_at(data, at)
    return head is not None and head.end <= len(data)


@dataclass(frozen=True, slots=True)
class Inspected:
    """One thing found in the segments by reading them without changing them.

    Attributes:
        path, offset: the segment, and the byte in it.
        commit: a whole record; None for everything else.
        problem: what is damaged, in words.
        torn_bytes: bytes at the very end that a restart cuts off.
        torn_by_kill: whether they look like what a killed process leaves; else the disk lost or changed them.
    """

    path: Path
    offset: int
    commit: Commit | None
    problem: str = ""
    torn_bytes: int = 0
    torn_by_kill: bool = False


class Journal:
    """The segment files of one bucket. Used by one thread at a time.

    Args:
        folder: where the segments lie; made if it does not exist.
        bucket_version: a segment of another bucket version is refused.

    Raises:
        DataDamagedError: a segment is foreign, or broken before its end.
    """

    def __init__(self, folder: Path, bucket_version: int) -> None:
        self._folder = folder
        self._version = bucket_version
        self._fd: int | None = None
        self._size = 0
        self._failed = ""
        folder.mkdir(exist_ok=True)
        self._segments = [_Segment(int(p.stem), p) for p in sorted(folder.glob("*.journal"))]
        self.torn_bytes = 0

    def replay(self, *, needed: bool = False) -> Iterator[Commit]:
        """Yield every commit in order, and cut a torn record off the end. Call once, before append.

        Afterwards there is a segment, durably.

        Args:
            needed: whether a folder without any segment is damage: nothing tells that nothing was in it.
        """
        if needed and not self._segments:
            raise DataDamagedError(
                f"{self._folder} holds no segment, though a start leaves one: what was in it is lost",
                hint="put the journal back; or have 'upr-admin restore-copy' take what the store holds, as another history",
            )
        self._remove_empty()
        last_number = 0
        for position, segment in enumerate(self._segments):
            newest = position == len(self._segments) - 1
            data = segment.path.read_bytes()
            at = last = self._check_header(segment, data, newest)
            while at < len(data):
                found = _record_at(data, at)
                if found is None:
                    self._check_torn(segment, data, at, newest)
                    break
                last = at
                commit, at = found
                if last_number and commit.number != last_number + 1:
                    raise DataDamagedError(
                        f"{segment.path}: commit {commit.number} follows commit {last_number}"
                    )
                last_number = segment.last_commit = commit.number
                yield commit
            if newest:
                self._truncate(segment, data, last, at)
        if not self._segments:
            self._begin_segment()

    def _newest(self) -> _Segment:
        """Return the newest segment that holds more than a header, or the first."""
        filled = (s for s in reversed(self._segments) if s.path.stat().st_size > _HEADER.size)
        return next(filled, self._segments[0])

    def _remove_empty(self) -> None:
        """Remove the segments that were begun and not used: the record before them may be the last, and torn."""
        while self._segments and self._segments[-1] is not self._newest():
            segment = self._segments[-1]
            self._check_header(segment, segment.path.read_bytes(), newest=True)
            os.unlink(segment.path)
            sync_folder(self._folder)
            del self._segments[-1]

    def inspect(self) -> Iterator["Inspected"]:
        """Yield everything in the segments, also what lies behind damage. Changes nothing."""
        newest_number = self._newest().number if self._segments else 0
        for segment in self._segments:
            newest = segment.number >= newest_number
            data = segment.path.read_bytes()
            try:
                at = self._check_header(segment, data, newest)
                torn = data if at == 0 else b""
            except DataDamagedError as error:
                yield Inspected(segment.path, 0, None, error.message)
                at, torn = min(_HEADER.size, len(data)), b""
            while at < len(data) and not torn:
                found = _record_at(data, at)
                if found is not None:
                    yield Inspected(segment.path, at, found[0])
                    at = found[1]
                    continue
                following = _next_record(data, at)
                if newest and following == len(data):
                    torn = data[at:]
                    break
                words = f"{following - at} bytes are no record"
                yield Inspected(segment.path, at, None, words)
                at = following
            if torn:
                # A process that is killed leaves the beginning of a record; anything else the disk did.
                cut = at == 0 or len(torn) < _RECORD.size or _head_at(data, at) is not None
                cut = cut and not _ends_here(data, at)
                yield Inspected(segment.path, at, None, torn_bytes=len(torn), torn_by_kill=cut)

    def _check_header(self, segment: _Segment, data: bytes, newest: bool) -> int:
        if len(data) < _HEADER.size and newest:
            # Torn while the segment was being begun: nothing in it was ever acknowledged.
            return 0
        fields = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (b"", 0, 0, 0, 0)
        magic, version, bucket, number, crc = fields
        if magic != _SEGMENT_MAGIC or google_crc32c.value(data[: _HEADER.size - 4]) != crc:
            if newest and not _finds_record(data, 0):
                # The file's size reached the disk before its bytes did.
                return 0
            raise DataDamagedError(f"{segment.path}: the segment's header is damaged")
        if version != _FORMAT or bucket != self._version or number != segment.number:
            raise DataDamagedError(
                f"{segment.path}: the segment is of format {version}, bucket {bucket:016x}, number {number}"
            )
        return _HEADER.size

    def _check_torn(self, segment: _Segment, data: bytes, at: int, newest: bool) -> None:
        """Raise unless the record at an offset is the last one, torn by a crash."""
        head = _head_at(data, at)
        # A head says where the next record would begin; what the values hold is nobody's business then.
        damaged = head.end < len(data) if head is not None else _finds_record(data, at + 1)
        if damaged or not newest:
            raise DataDamagedError(
                f"{segment.path}: the record at byte {at} is damaged and whole records follow",
                hint="restore the data directory from a replica or a backup",
            )

    def _truncate(self, segment: _Segment, data: bytes, last: int, end: int) -> None:
        """Cut off what is torn, and make durable what is left: it counts as durable from here on.

        Args:
            last, end: where the last whole record begins and ends.
        """
        failpoints.hit("recovery.before_truncate")
        fd = os.open(segment.path, os.O_RDWR)
        try:
            if end < len(data):
                self.torn_bytes = len(data) - end
                os.ftruncate(fd, end)
            # An fsync that failed in an earlier process leaves pages that can be read, are not on disk, and that no
            # later fsync writes. That can be the last record only: nothing is appended behind one.
            os.lseek(fd, last, os.SEEK_SET)
            _write_whole(fd, data[last:end] if end else self._header(segment.number))
            os.fsync(fd)
            # It may have been killed between making or removing a segment and making that durable.
            sync_folder(self._folder)
            self._size = os.lseek(fd, 0, os.SEEK_END)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _header(self, number: int) -> bytes:
        head = _HEADER.pack(_SEGMENT_MAGIC, _FORMAT, self._version, number, 0)[:-4]
        return head + struct.pack("<I", google_crc32c.value(head))

    def _begin_segment(self) -> None:
        failpoints.hit("journal.before_rotate")
        number = self._segments[-1].number + 1 if self._segments else 1
        path = self._folder / f"{number:016d}.journal"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_whole(fd, self._header(number))
            os.fsync(fd)
            sync_folder(self._folder)
        except BaseException:
            os.close(fd)
            # If it stays, it is empty: the next attempt or start removes it.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd
        self._size = _HEADER.size
        self._segments.append(_Segment(number, path))

    def append(self, commit: Commit) -> None:
        """Append one record and fsync it.

        Raises:
            OSError: nothing of the record remains (a full disk); the call may be repeated.
            StorageFailedError: fsync failed, or what was written could not be taken back: what the disk
                holds is unknown, and no later append can be trusted.
        """
        if self._failed:
            raise StorageFailedError(self._failed)
        failpoints.hit("journal.before_append")
        if self._fd is None or self._size >= SEGMENT_BYTES:
            self._begin_segment()
        assert self._fd is not None
        pieces = encode_record(commit)
        try:
            written = self._write(self._fd, pieces)
        except OSError:
            self._take_back(self._fd)
            raise
        try:
            failpoints.hit("journal.before_sync")
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail(f"fsync of the journal failed: {error.strerror or error}")
            raise StorageFailedError(self._failed) from error
        if not os.fstat(self._fd).st_nlink:
            self._fail("the journal was deleted under the server")
            raise StorageFailedError(self._failed)
        failpoints.hit("journal.after_sync")
        self._size += written
        self._segments[-1].last_commit = commit.number

    def _write(self, fd: int, pieces: Sequence[bytes]) -> int:
        data = b"".join(pieces)
        view = memoryview(data)
        half = len(data) // 2
        os.lseek(fd, self._size, os.SEEK_SET)
        at = 0
        while at < len(data):
            if at < half:
                at += os.write(fd, view[at:half])
                failpoints.hit("journal.half_append")
            else:
                at += os.write(fd, view[at:])
        return len(data)

    def _take_back(self, fd: int) -> None:
        try:
            os.ftruncate(fd, self._size)
            # Else it could come back behind a segment that was begun since.
            os.fsync(fd)
        except OSError as error:
            self._fail(f"a half-written journal record cannot be undone: {error.strerror or error}")
            raise StorageFailedError(self._failed) from error

    def lost(self) -> str:
        """Say how the newest segment is not the one that is written any more; empty while it is."""
        if self._fd is None:
            return ""
        mine = os.fstat(self._fd)
        try:
            there = self._segments[-1].path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "the journal was deleted or moved under the server"
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            return "another journal is in the place of the one that was opened"
        return ""

    def _fail(self, words: str) -> None:
        self._failed = words

    @property
    def last_commit(self) -> int:
        """The newest commit number in the segments, 0 if there is none."""
        return max((segment.last_commit for segment in self._segments), default=0)

    @property
    def size(self) -> int:
        """Bytes of all segment files."""
        return sum(s.path.stat().st_size for s in self._segments if s.path.exists())

    def drop_through(self, commit_number: int) -> None:
        """Remove the segments that hold no commit above the number; the newest is kept for appending."""
        failpoints.hit("journal.before_drop")
        while len(self._segments) > 1 and self._segments[0].last_commit <= commit_number:
            self._drop_oldest()
        newest = self._segments[-1] if self._segments else None
        stored = newest is not None and newest.last_commit <= commit_number
        if stored and self._size > _HEADER.size:
            self._begin_segment()
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Remove one segment, durably: were two removed at once, the first could come back without the second."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._segments[0].path)
        sync_folder(self._folder)
        del self._segments[0]

    def close(self) -> None:
        """Close the newest segment."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _write_whole(fd: int, data: bytes) -> None:
    """Write all of it: a call may take less than it was given, and a disk that is full does."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
