"""Where a consumer's positions are kept."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from upr_protocol.errors import PositionDamagedError
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position

_FORMAT: Final = 1
_HINT: Final = (
    "restore the file, together with the data, from a copy; or delete both to start from zero"
)


class PositionStore(Protocol):
    """Keeps positions. Your own may keep them beside the data, so that both change in one transaction.

    The asyncio flavour calls it in a thread, one call at a time.
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
        """Keep these positions."""
        self._positions.update(positions)


class FilePositions:
    """Keeps positions in one file, replaced whole: a crash leaves the old file or the new one.

    One consumer a file; the file ``<path>.tmp`` beside it is this object's too.

    Args:
        path: of the file; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._texts: dict[int, str] | None = None

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        """Return the positions of those of the partitions that have one; none without a file.

        Raises:
            PositionDamagedError: the file is damaged or of another format.
            OSError: it cannot be read.
        """
        self._texts = texts = self._read()
        return {p: Position.from_json(json.loads(texts[p])) for p in partitions if p in texts}

    def save(self, positions: Mapping[int, Position]) -> None:
        """Store these positions; returns when they are on the disk.

        Raises:
            PositionDamagedError: the file that holds the other positions is damaged.
            OSError: it cannot be written; the old file is untouched.
        """
        texts = dict(self._read() if self._texts is None else self._texts)
        for partition, position in positions.items():
            texts[partition] = _compact(position.to_json())
        self._write(_document(texts))
        self._texts = texts

    def _write(self, data: bytes) -> None:
        temporary = self._path.with_name(self._path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self) -> dict[int, str]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
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
        if stored_format != _FORMAT:
            raise self._damaged(f"it has format {stored_format!r}, this program reads {_FORMAT}")
        if crc != _crc32(texts):
            raise self._damaged("its CRC32 does not fit its content")
        if not all(0 <= partition < PARTITIONS for partition in texts):
            raise self._damaged("it names a partition that does not exist")
        return texts

    def _damaged(self, what: str) -> PositionDamagedError:
        return PositionDamagedError(f"{self._path} is damaged: {what}", hint=_HINT)


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _body(texts: Mapping[int, str]) -> str:
    return ",\n".join(f'"{partition}":{texts[partition]}' for partition in sorted(texts))


def _crc32(texts: Mapping[int, str]) -> str:
    return f"{zlib.crc32(_body(texts).encode()):08x}"


def _document(texts: Mapping[int, str]) -> bytes:
    head = f'"format":{_FORMAT},"crc32":"{_crc32(texts)}"'
    return f'{{{head},"positions":{{\n{_body(texts)}\n}}}}\n'.encode()
