"""The journal: append-only segment files, one record a commit, one fsync a record.

A segment begins with a header (magic, format, bucket version, segment number, CRC32C) and holds records:

    magic uint32 | payload length uint32 | commit number uint64 | CRC32C of the payload | CRC32C of the head | payload

A payload is a sequence of entries, and an entry a block with the producers' writes in it. The entry of one write is:
producer length uint16, producer, write number uint64, block length uint32, block. Without a producer, length and number
are 0. The entry of a block that several writes became has a table of them in front: 0xffff uint16, number of writes
uint32, for each of them producer length, producer, write number and length uint32 of its run table, that table; then
block length and block. All numbers are little-endian.

Segments of format 1 have no tables of writes. They are read, but nothing is appended to them.

Zeros behind the last record of a segment are room: they are written ahead of small records, as a sync takes half as long
again where it has to record a new end, or that blocks are in use now. A restart and a clean close cut them off.

An incomplete record at the end of the newest segment was torn by a crash. It was never acknowledged, and is truncated.
A broken record with a complete one behind it is damage: the journal is refused, because acknowledged writes behind it
would get wrong seqnos.
"""

import contextlib
import errno
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from upr import failpoints
from upr_protocol.errors import DataDamagedError, DataDirectoryError, StorageFailedError

_HEADER = struct.Struct("<4sIQQI")
_RECORD = struct.Struct("<4sIQII")
_CRC = _SIZE = struct.Struct("<I")
_LENGTH = struct.Struct("<H")
_NUMBER = struct.Struct("<Q")
_SEGMENT_MAGIC = b"UPRJ"
_SEGMENT_NAME = re.compile("[0-9]{16}")
_RECORD_MAGIC = b"\xf5UR\xfa"
FORMAT = 2
_FORMATS_READ = (1, 2)
_TABLE = 0xFFFF
"""In the place of a producer's length, which is at most 200."""
SEGMENT_BYTES = 16 * 2**20
ROOM_BYTES = 2**20
"""Most room that is made at once."""
ROOM_RECORD_BYTES = 64 * 2**10
"""Size of a record from which no room is made for it, as the time of its sync goes with its bytes; and the least room."""
PIECES_MAX = 1024
"""Most pieces that one call of Linux writes."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TICK_NANOSECONDS = 20 * 10**6
"""More than the step in which Linux before 6.13 counts the times of files."""


class NumberedWrite(NamedTuple):
    """Write of a producer in a block.

    Attributes:
        producer, number: whose, and which one.
        runs: the table of what it wrote, as bytes; empty: all runs of the block.
    """

    producer: bytes
    number: int
    runs: bytes = b""


class JournalEntry(NamedTuple):
    """Journal entry: the bytes of a numbered block, and the producers' writes in it.

    One write without runs of its own is the whole block.
    """

    block: bytes
    writes: Sequence[NumberedWrite] = ()


class Commit(NamedTuple):
    """Contents of one record. Commit numbers rise by one from record to record."""

    number: int
    entries: tuple[JournalEntry, ...]


def _entry_head(entry: JournalEntry) -> bytes:
    """Return the writes of an entry as they lie in front of its block."""
    if not entry.writes:
        return _name(b"", 0)
    producer, number, runs = entry.writes[0]
    if len(entry.writes) == 1 and not runs:
        return _name(producer, number)
    heads = [
        _name(write.producer, write.number) + _SIZE.pack(len(write.runs)) + write.runs
        for write in entry.writes
    ]
    return _LENGTH.pack(_TABLE) + _SIZE.pack(len(heads)) + b"".join(heads)


def _name(producer: bytes, number: int) -> bytes:
    return _LENGTH.pack(len(producer)) + producer + _NUMBER.pack(number)


class Record(NamedTuple):
    """Record of a commit, and where it is to be written: ``size`` bytes at an offset of a file."""

    number: int
    fd: int
    pieces: tuple[bytes, ...]
    at: int
    size: int


def encode_record(commit: Commit) -> tuple[bytes, ...]:
    """Return a record in pieces: its head, then the head and the block of each entry."""
    pieces: list[bytes] = []
    for entry in commit.entries:
        pieces += (_entry_head(entry) + _SIZE.pack(len(entry.block)), entry.block)
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    head = _RECORD.pack(_RECORD_MAGIC, sum(map(len, pieces)), commit.number, crc, 0)[:-4]
    return (head + _CRC.pack(google_crc32c.value(head)), *pieces)


def _decode_payload(payload: bytes) -> tuple[JournalEntry, ...]:
    entries = []
    at = 0
    while at < len(payload):
        (length,) = _LENGTH.unpack_from(payload, at)
        writes: list[NumberedWrite] = []
        if length == _TABLE:
            (count,) = _SIZE.unpack_from(payload, at + 2)
            at += 2 + _SIZE.size
            for _ in range(count):
                write, at = _named_at(payload, at)
                (size,) = _SIZE.unpack_from(payload, at)
                at += _SIZE.size + size
                writes.append(write._replace(runs=payload[at - size : at]))
        else:
            write, at = _named_at(payload, at)
            writes += [write] if length else []
        (size,) = _SIZE.unpack_from(payload, at)
        at += _SIZE.size + size
        entries.append(JournalEntry(payload[at - size : at], tuple(writes)))
    return tuple(entries)


def _named_at(payload: bytes, at: int) -> tuple[NumberedWrite, int]:
    """Return the producer and number at an offset, and where they end."""
    (length,) = _LENGTH.unpack_from(payload, at)
    end = at + _LENGTH.size + length
    (number,) = _NUMBER.unpack_from(payload, end)
    return NumberedWrite(payload[at + _LENGTH.size : end], number), end + _NUMBER.size


def _record_at(data: bytes, at: int) -> tuple[Commit, int] | None:
    """Return the complete record at an offset and its end, or None."""
    head = _head_at(data, at)
    if head is None or head.end > len(data):
        return None
    payload = data[at + _RECORD.size : head.end]
    if google_crc32c.value(payload) != head.crc:
        return None
    try:
        return Commit(head.number, _decode_payload(payload)), head.end
    except struct.error:
        # A value may hold what looks like a record, up to its checksums.
        return None


class _Head(NamedTuple):
    """Head of a record: its commit number, the CRC of its payload, and its end."""

    number: int
    crc: int
    end: int


def _head_at(data: bytes, at: int) -> _Head | None:
    """Return the intact head of a record at an offset, or None."""
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


def _segment_of(path: Path) -> _Segment:
    if not _SEGMENT_NAME.fullmatch(path.stem):
        # Left out, a segment that somebody renamed would be missed without a word.
        raise DataDirectoryError(
            f"{path} is no segment of this journal; its name must be 16 digits",
            hint="move it out of the folder; or rename it back, if it was renamed",
        )
    return _Segment(int(path.stem), path)


def _find_record(data: bytes, at: int) -> int:
    """Return where the first complete record from an offset on begins, -1 if there is none."""
    found = data.find(_RECORD_MAGIC, at)
    while found != -1 and _record_at(data, found) is None:
        found = data.find(_RECORD_MAGIC, found + 1)
    return found


def _next_record(data: bytes, at: int) -> int:
    """Return the offset of the next complete record behind a broken one, or the end of the data.

    An intact head gives it. Bytes inside values may look like a record, so then they are not searched.
    """
    head = _head_at(data, at)
    if head is not None:
        return min(head.end, len(data))
    found = _find_record(data, at + 1)
    return len(data) if found == -1 else found


@dataclass(frozen=True, slots=True)
class Inspected:
    """Item of an inspection of the segments: a commit or a problem.

    Attributes:
        path, offset: the segment, and the byte in it.
        commit: of a complete record; None for a problem.
        problem: the damage, in words.
        torn_bytes: bytes at the end that a restart truncates.
        torn_by_kill: whether a killed process leaves such bytes; otherwise the disk lost or changed them.
    """

    path: Path
    offset: int
    commit: Commit | None
    problem: str = ""
    torn_bytes: int = 0
    torn_by_kill: bool = False


class Journal:
    """Segment files of one bucket. For one thread at a time, but for ``remove_dropped``.

    Args:
        folder: of the segments; created if it does not exist.
        bucket_version: a segment of another bucket version is refused.

    Attributes:
        write_seconds: what writing and syncing the last record took.

    Raises:
        DataDamagedError: a segment is foreign, or broken before its end.
        DataDirectoryError: a file is no segment, or one is of an unknown format.
    """

    def __init__(self, folder: Path, bucket_version: int) -> None:
        self._folder = folder
        self._version = bucket_version
        self._fd: int | None = None
        self._size = self._room_end = 0
        # Nothing is appended to a segment of an older format: a program that knows only that format would misread it.
        self._full = False
        self._failed = ""
        self._last_folder_time = 0
        folder.mkdir(exist_ok=True)
        self._segments = [_segment_of(path) for path in sorted(folder.glob("*.journal"))]
        self._dropped: list[Path] = []
        self.torn_bytes = 0
        self.write_seconds = 0.0

    def replay(self, *, needed: bool = False) -> Iterator[Commit]:
        """Yield every commit in order, and truncate a torn record at the end. Call once, before append.

        Afterwards a segment exists, durably.

        Args:
            needed: whether a folder without segments is damage, because no proof says that it was empty.
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
            end = _end_of(data)
            while at < end:
                found = _record_at(data, at)
                if found is None:
                    if not newest or _next_record(data, at) < end:
                        raise DataDamagedError(
                            f"{segment.path}: the record at byte {at} is damaged and whole records follow",
                            hint="restore the data directory from a replica or a backup",
                        )
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
                self.torn_bytes = max(end - at, 0)
                self._truncate(segment, data, last, at)
        if not self._segments:
            self._begin_segment()

    def _newest(self) -> _Segment:
        """Return the newest segment that holds more than a header, or the first."""
        filled = (s for s in reversed(self._segments) if _is_filled(s.path))
        return next(filled, self._segments[0])

    def _remove_empty(self) -> None:
        """Remove unused segments at the end: the record before them may be the last one, and torn."""
        while self._segments and self._segments[-1] is not self._newest():
            segment = self._segments[-1]
            self._check_header(segment, segment.path.read_bytes(), newest=True)
            os.unlink(segment.path)
            sync_folder(self._folder)
            del self._segments[-1]

    def inspect(self) -> Iterator["Inspected"]:
        """Yield everything in the segments, also behind damage. Changes nothing."""
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
            whole, data = data, data[: _end_of(data)]
            while at < len(data) and not torn:
                # The last record may end with zeros of its own.
                found = _record_at(whole, at)
                if found is not None:
                    yield Inspected(segment.path, at, found[0])
                    at = found[1]
                    continue
                # As it may be the next one, which is whole all the same.
                following = min(_next_record(whole, at), len(data))
                if newest and following == len(data):
                    torn = data[at:]
                    break
                words = f"{following - at} bytes are no record"
                yield Inspected(segment.path, at, None, words)
                at = following
            if torn:
                # A killed process leaves a prefix of a record, and perhaps room; anything else comes from the disk.
                head = _head_at(data, at)
                prefix = at == 0 or len(torn) < _RECORD.size
                cut = prefix if head is None else head.end > len(data) and head.end != len(whole)
                yield Inspected(segment.path, at, None, torn_bytes=len(torn), torn_by_kill=cut)

    def _check_header(self, segment: _Segment, data: bytes, newest: bool) -> int:
        if len(data) < _HEADER.size and newest:
            # Torn while the segment was created: nothing in it was acknowledged.
            return 0
        fields = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (b"", 0, 0, 0, 0)
        magic, version, bucket, number, crc = fields
        if magic != _SEGMENT_MAGIC or google_crc32c.value(data[: _HEADER.size - 4]) != crc:
            if newest and _find_record(data, 0) == -1:
                # The file's size reached the disk before its bytes did.
                return 0
            raise DataDamagedError(f"{segment.path}: the segment's header is damaged")
        if version not in _FORMATS_READ:
            # No damage. Taken for damage, good data would be thrown away.
            raise DataDirectoryError(
                f"{segment.path}: the segment is of format {version}; must be {' or '.join(map(str, _FORMATS_READ))}",
                hint="use the program that wrote it, or a newer one",
            )
        if bucket != self._version or number != segment.number:
            raise DataDamagedError(
                f"{segment.path}: the segment is of bucket {bucket:016x} and has number {number}"
            )
        return _HEADER.size

    def _truncate(self, segment: _Segment, data: bytes, last: int, end: int) -> None:
        """Truncate room and torn record, and make the rest durable, as it counts as that from here on.

        Args:
            last, end: the begin and end of the last complete record.
        """
        failpoints.hit("recovery.before_truncate")
        fd = os.open(segment.path, os.O_RDWR | os.O_DSYNC)
        try:
            if end < len(data):
                os.ftruncate(fd, end)
            # A failed sync of an earlier process leaves pages that can be read, are not on disk, and that no later
            # one writes; a killed process, pages that are not on disk yet. Only the last record can have such pages:
            # each is synced before the next. So write it again.
            kept = data[last:end] if end else self._header(segment.number)
            _write_whole(fd, kept, last)
            # And have no byte of what was cut off come back behind newer records.
            os.fsync(fd)
            # The process before may have been killed between creating or removing a segment and the sync of the folder.
            sync_folder(self._folder)
            self._size = self._room_end = last + len(kept)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._full = end > 0 and _HEADER.unpack_from(data)[1] != FORMAT

    def _header(self, number: int) -> bytes:
        head = _HEADER.pack(_SEGMENT_MAGIC, FORMAT, self._version, number, 0)[:-4]
        return head + _CRC.pack(google_crc32c.value(head))

    def _begin_segment(self) -> None:
        failpoints.hit("journal.before_rotate")
        number = self._segments[-1].number + 1 if self._segments else 1
        path = self._folder / f"{number:016d}.journal"
        # Each write is synced by the call that writes.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DSYNC, 0o644)
        try:
            _write_whole(fd, self._header(number), 0)
            sync_folder(self._folder)
        except BaseException:
            os.close(fd)
            # If this fails, the segment is empty: the next attempt or start removes it.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        self.close()
        self._fd = fd
        self._full = False
        self._size = self._room_end = _HEADER.size
        self._segments.append(_Segment(number, path))

    def append(self, commit: Commit) -> int:
        """Append one record, fsync it, and return its size in bytes.

        Raises:
            OSError, MemoryError: the disk is full, or there is no memory for it, and nothing of the record remains; the caller may retry.
            StorageFailedError: it could not be written, or a partial record not be removed: the state of the disk is
                unknown, and every later append fails too.
        """
        if self._failed:
            raise StorageFailedError(self._failed)
        failpoints.hit("journal.before_append")
        if not self._has_segment:
            self._begin_segment()
        record = self._record(commit)
        began, failed = time.perf_counter(), 0
        try:
            if not self._has_room(record):
                self._make_room(record.fd)
            self._write(record)
            failpoints.hit("journal.before_sync")
        except OSError as error:
            failed = error.errno or errno.EIO
        except MemoryError:
            self._take_back(record.fd)
            raise
        self.wrote(record, failed, time.perf_counter() - began, self._folder_time())
        failpoints.hit("journal.after_sync")
        return record.size

    def record_of(self, commit: Commit) -> Record | None:
        """Return the record of a commit, for who writes it as ``append`` does and calls ``wrote``; None where ``append`` has more
        to do.
        """
        if self._failed or not self._has_segment or failpoints.any_armed("journal."):
            return None
        record = self._record(commit)
        return record if self._has_room(record) else None

    def wrote(self, record: Record, failed: int, seconds: float, folder_time: int) -> None:
        """Count a record as appended, or raise as ``append`` does.

        Args:
            failed: an errno; 0 for none.
            seconds: what it took.
            folder_time: when the folder was changed last, nanoseconds since the epoch; -1 where it cannot be asked.
        """
        if failed in _FULL:
            self._take_back(record.fd)
            raise OSError(failed, os.strerror(failed))
        if failed:
            self._failed = f"write or fsync of the journal failed: {os.strerror(failed)}"
            raise StorageFailedError(self._failed)
        self.write_seconds = seconds
        if self._folder_has_changed(folder_time) and not os.fstat(record.fd).st_nlink:
            self._failed = "the journal was deleted under the server"
            raise StorageFailedError(self._failed)
        self._size += record.size
        self._segments[-1].last_commit = record.number

    @property
    def _has_segment(self) -> bool:
        return self._fd is not None and not self._full and self._size < SEGMENT_BYTES

    def _record(self, commit: Commit) -> Record:
        assert self._fd is not None
        pieces = encode_record(commit)
        return Record(commit.number, self._fd, pieces, self._size, sum(map(len, pieces)))

    def _has_room(self, record: Record) -> bool:
        return record.at + record.size < self._room_end or record.size >= ROOM_RECORD_BYTES

    def _folder_time(self) -> int:
        try:
            return os.stat(self._folder).st_mtime_ns
        except OSError:
            return -1

    def _folder_has_changed(self, told: int) -> bool:
        """Return whether files came or went in the folder since this was asked last; ``told`` is the time of its last change.

        To ask for the segment's own state after each sync makes the next one a third longer: Linux gives a file whose
        times were asked for a new time with the next write, and a sync writes it.
        """
        before = self._last_folder_time
        # A change right after another one may get the same time: within a step, a second where the file system has no less.
        step = TICK_NANOSECONDS if told % 10**9 else 2 * 10**9
        self._last_folder_time = told if time.time_ns() - told > step else 0
        return told != before or told < 0

    def _make_room(self, fd: int) -> None:
        # As much as there is already, so that a journal of few small records is written twice at most.
        room = min(max(self._size, ROOM_RECORD_BYTES), ROOM_BYTES)
        try:
            _write_whole(fd, bytes(room), self._size)
            self._room_end = self._size + room
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # Records are appended without it. Of a full disk ext4 took all that was left, which others need.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)

    def _write(self, record: Record) -> None:
        """Write a record, durably. By one call where it can be: behind each this thread waits for the interpreter lock."""
        fd, at = record.fd, record.at
        armed = failpoints.is_armed("journal.half_append")
        written = 0 if armed else os.pwritev(fd, record.pieces[:PIECES_MAX], at)
        if written == record.size:
            return
        rest = memoryview(b"".join(record.pieces))[written:]
        half = len(rest) // 2 if armed else 0
        _write_whole(fd, rest[:half], at + written)
        failpoints.hit("journal.half_append")
        _write_whole(fd, rest[half:], at + written + half)

    def _take_back(self, fd: int) -> None:
        try:
            os.ftruncate(fd, self._size)
            self._room_end = self._size
            # Otherwise it could reappear in front of a segment created since.
            os.fsync(fd)
        except OSError as error:
            self._failed = (
                f"a half-written journal record cannot be undone: {error.strerror or error}"
            )
            raise StorageFailedError(self._failed) from error

    def lost(self) -> str:
        """Return how the newest segment was lost (deleted or replaced), in words; empty if it was not."""
        if self._fd is None:
            return ""
        return lost(self._segments[-1].path, os.fstat(self._fd), "journal")

    @property
    def size(self) -> int:
        """Return the bytes of all segment files."""
        size = 0
        for path in [*self._dropped, *(segment.path for segment in self._segments)]:
            # It may be removed at this moment.
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def drop_through(self, commit_number: int) -> None:
        """Drop the segments without commits above the number, for ``remove_dropped``; the newest stays for appending."""
        failpoints.hit("journal.before_drop")
        while len(self._segments) > 1 and self._segments[0].last_commit <= commit_number:
            self._dropped.append(self._segments.pop(0).path)
        newest = self._segments[-1] if self._segments else None
        stored = newest is not None and newest.last_commit <= commit_number
        if stored and self._size > _HEADER.size:
            self._begin_segment()
            self._dropped.append(self._segments.pop(0).path)

    def remove_dropped(self) -> None:
        """Remove the files of dropped segments. For another thread than that of the rest: commits would wait meanwhile."""
        while self._dropped:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._dropped[0])
            # Durably, one by one and oldest first: of two removed at once a crash could bring back the first alone.
            sync_folder(self._folder)
            del self._dropped[0]

    def close(self) -> None:
        if self._fd is not None:
            if not self._failed:
                # What room is left is no damage.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            os.close(self._fd)
            self._fd = None


def lost(path: Path, opened: os.stat_result, what: str) -> str:
    """Return how a file was lost since it was opened (deleted or replaced), in words; empty if it was not."""
    try:
        here = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"the {what} was deleted or moved under the server"
    if not os.path.samestat(opened, here):
        return f"another {what} is in the place of the one that was opened"
    return ""


def _write_whole(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all bytes at an offset: one call may write less, as on a nearly full disk."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view, at = view[written:], at + written


def _is_filled(path: Path) -> bool:
    """Return whether a segment has more than its header and room."""
    with path.open("rb") as file:
        file.seek(_HEADER.size)
        # A record begins with no zero, but of a torn one the beginning may be missing.
        return bool(file.read(1).strip(b"\0") or file.read().strip(b"\0"))


def _end_of(data: bytes) -> int:
    """Return where a segment's room begins, or earlier by the zeros that its last record ends with."""
    return len(data.rstrip(b"\0"))


def replace_durably(path: Path, text: str | Iterable[str], *, private: bool = False) -> None:
    """Write a text file whole, durably: after a crash it is the old one or the new one.

    Args:
        text: whole, or in parts.
        private: whether a new file is its owner's alone; one that is there keeps its owner and mode.

    Raises:
        OSError: it could not be written; the old one is still there.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        mode = 0o600 if private else 0o666
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            if private and path.exists():
                # A server of another user goes on reading it.
                found = path.stat()
                os.fchown(file.fileno(), found.st_uid, found.st_gid)
                os.fchmod(file.fileno(), found.st_mode & 0o777)
            file.writelines((text,) if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
