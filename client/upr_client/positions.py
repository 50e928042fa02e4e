"""Where a consumer's positions are kept."""

import fcntl
import json
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from upr_protocol.errors import InvalidArgumentError, PositionDamagedError, UprError
from upr_protocol.failover import check_partition
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position

POSITION_BYTES_MAX: Final = 64 * 2**10
"""One stored position; with all the markers and records that a server gives it has about 3 KiB."""

_FORMAT: Final = 1
_FILE_BYTES_MAX: Final = PARTITIONS * POSITION_BYTES_MAX
_LOCK_SECONDS: Final = 5.0
_LOCK_POLL_SECONDS: Final = 0.01
_HINT: Final = (
    "restore the file, together with the data, from a copy; or delete both to start from zero"
)


class PositionStoreError(UprError):
    """Where positions are kept cannot be read or written: no folder, no permission, no room."""

    default_reason = "POSITION_STORE"


class PositionBusyError(UprError):
    """Another program uses the place of these positions; nothing was stored.

    Retriable when it only holds a lock on it for the moment; not when it stored positions there meanwhile.
    """

    default_reason = "POSITION_BUSY"


class PositionStore(Protocol):
    """Keeps positions. Your own may keep them beside the data, so that both change in one transaction.

    The asyncio flavour calls it in a thread, one call at a time. ``upr_client.testing.positions`` checks a store.
    """

    def load(self, partitions: Iterable[int]) -> Mapping[int, Position]:
        """Return the positions of those of the partitions that have one.

        Raises:
            PositionDamagedError: what is stored cannot be read.
        """

    def save(self, positions: Mapping[int, Position]) -> None:
        """Store these positions, all of them or none, and keep those of other partitions."""


class MemoryPositions:
    """Keeps positions as long as the object lives: to go on after closing, not after a crash."""

    def __init__(self, positions: Mapping[int, Position] | None = None) -> None:
        self._positions = dict(positions or {})

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        """Return the positions of those of the partitions that have one."""
        return {p: self._positions[p] for p in partitions if p in self._positions}

    def save(self, positions: Mapping[int, Position]) -> None:
        """Keep these positions.

        Raises:
            InvalidArgumentError: a partition is out of range.
        """
        for partition in positions:
            check_partition(partition)
        self._positions.update(positions)


class FilePositions:
    """Keeps positions in one file, replaced whole: a crash leaves the old file or the new one.

    One consumer a file. Two objects that use one file at the same time do not destroy it: the second one to save is
    told that the file is not what it loaded. The file ``<path>.tmp`` beside it is this object's too, and while it
    saves it holds a lock (flock) on the folder.

    Args:
        path: of the file; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._mutex = threading.Lock()
        self._known: dict[int, str] | None = None
        self._data: bytes | None = None

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        """Return the positions of those of the partitions that have one; none without a file.

        Raises:
            PositionDamagedError: the file is damaged or of another format.
            PositionStoreError: it cannot be read.
        """
        with self._mutex:
            data = self._read()
            texts = self._parse(data)
            positions = {p: self._position(p, texts[p]) for p in partitions if p in texts}
            self._known, self._data = texts, data
            return positions

    def save(self, positions: Mapping[int, Position]) -> None:
        """Store these positions; returns when they are on the disk.

        Raises:
            InvalidArgumentError: a partition is out of range, or a position too large to be stored.
            PositionBusyError: the file is not what this object loaded or saved last, so it is used by another
                object or program; or another one is saving, and goes on with that for 5 seconds.
            PositionDamagedError: the file that holds the other positions is damaged.
            PositionStoreError: it cannot be written; the old file is untouched.
        """
        added = {int(p): position_text(p, position) for p, position in positions.items()}
        with self._mutex, self._locked_folder() as folder:
            data = self._read()
            if self._known is None:
                self._known, self._data = self._parse(data), data
            elif data != self._data:
                raise PositionBusyError(
                    f"{self._path} is not the file that was loaded or saved here last",
                    hint="give each consumer a file of its own; if it was you who changed the file, start again",
                )
            texts = {**self._known, **added}
            document = _document(texts)
            self._replace(document)
            # Before the folder is synced: if that fails, the next save meets the new file all the same.
            self._known, self._data = texts, document
            self._sync(folder)

    @contextmanager
    def _locked_folder(self) -> Iterator[int]:
        # The folder and not the file, because a lock belongs to what is opened and not to its name.
        try:
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self._failed("its folder cannot be opened", error) from error
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(folder):
                if time.monotonic() > deadline:
                    raise PositionBusyError(
                        f"{self._path.parent} was locked by another program for {_LOCK_SECONDS:g} s",
                        hint="positions cannot be saved while it holds the lock (flock) on the folder",
                        retriable=True,
                    )
                time.sleep(_LOCK_POLL_SECONDS)
            yield folder
        finally:
            os.close(folder)

    def _replace(self, data: bytes) -> None:
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise self._failed("it cannot be written", error) from error

    def _sync(self, folder: int) -> None:
        try:
            os.fsync(folder)
        except OSError as error:
            raise self._failed("its folder cannot be written", error) from error

    def _read(self) -> bytes | None:
        try:
            with open(self._path, "rb") as file:
                data = file.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("it cannot be read", error) from error
        if len(data) > _FILE_BYTES_MAX:
            raise self._damaged(f"it has more than {_FILE_BYTES_MAX} bytes")
        return data

    def _parse(self, data: bytes | None) -> dict[int, str]:
        if data is None:
            return {}
        try:
            document = json.loads(data)
            stored_format, crc, positions = (
                document["format"],
                document["crc32"],
                document["positions"],
            )
            texts = {int(partition): _compact(value) for partition, value in positions.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"it is not a file of positions ({error!r})") from error
        if type(stored_format) is not int or stored_format != _FORMAT:
            raise self._damaged(f"it has format {stored_format!r}, this program reads {_FORMAT}")
        if crc != _crc32(texts):
            raise self._damaged("its CRC32 does not fit its content")
        if not all(0 <= partition < PARTITIONS for partition in texts):
            raise self._damaged("it names a partition that does not exist")
        return texts

    def _position(self, partition: int, text: str) -> Position:
        try:
            return Position.from_json(json.loads(text))
        except PositionDamagedError as error:
            raise self._damaged(f"partition {partition}: {error.message}") from error

    def _damaged(self, what: str) -> PositionDamagedError:
        return PositionDamagedError(f"{self._path} is damaged: {what}", hint=_HINT)

    def _failed(self, what: str, error: OSError) -> PositionStoreError:
        return PositionStoreError(
            f"the file of positions {self._path}: {what}: {error.strerror or error}",
            hint="it needs an existing folder, permission to write there, and room on the disk",
        )


def position_text(partition: int, position: Position) -> str:
    """Return a position as one line of JSON, of at most ``POSITION_BYTES_MAX`` ASCII characters.

    Raises:
        InvalidArgumentError: the partition is out of range, or the text would be larger.
    """
    check_partition(partition)
    text = _compact(position.to_json())
    if len(text) > POSITION_BYTES_MAX:
        raise InvalidArgumentError(
            f"the position of partition {partition} has {len(text)} bytes as JSON, the limit is {POSITION_BYTES_MAX}",
            hint="thin its markers, upr_protocol.markers.thin_markers",
        )
    return text


def _try_lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: what the other one saved is still noticed, only not at the same instant.
        return True
    return True


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _body(texts: Mapping[int, str]) -> str:
    return ",\n".join(f'"{partition}":{texts[partition]}' for partition in sorted(texts))


def _crc32(texts: Mapping[int, str]) -> str:
    return f"{zlib.crc32(_body(texts).encode()):08x}"


def _document(texts: Mapping[int, str]) -> bytes:
    head = f'"format":{_FORMAT},"crc32":"{_crc32(texts)}"'
    return f'{{{head},"positions":{{\n{_body(texts)}\n}}}}\n'.encode()
