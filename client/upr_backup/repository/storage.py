"""Storage: names with slashes and bytes that never change, and its form as files below a folder."""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol


class Stored(NamedTuple):
    """An object that is there: its name, its bytes, and when it was written, in seconds since the epoch."""

    name: str
    bytes: int
    written: float


class Sink(Protocol):
    """A new object that is being written; what pyarrow needs of a file, and what was written."""

    size: int

    def write(self, data: bytes) -> int:
        """Append."""

    def finish(self) -> str:
        """Make it durable, and return its SHA-256 in hex."""

    def close(self) -> None:
        """End without a promise; harmless after ``finish``."""


class Storage(Protocol):
    """Named objects.

    Every method may raise OSError. One in an object store may also raise StorageUnreachableError,
    StorageTimeoutError, StorageRefusedError, MissingPackageError or InvalidArgumentError.
    """

    @property
    def location(self) -> str:
        """What ``open_storage`` opens the same storage with, in this process or another."""

    def read(self, name: str) -> bytes:
        """Return a whole object; FileNotFoundError when there is none."""

    def open(self, name: str) -> BinaryIO:
        """Open an object for reading; FileNotFoundError when there is none."""

    def size(self, name: str) -> int:
        """Return an object's bytes; FileNotFoundError when there is none."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object whole and durable; False when there is one of the name, which stays as it is."""

    def create(self, name: str) -> Sink:
        """Begin a new object under a name that nobody else uses; FileExistsError when there is one."""

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with a prefix that is empty or ends in a slash, sorted."""

    def stored(self, prefix: str) -> list[Stored]:
        """Return the objects whose names begin with a prefix that is empty or ends in a slash, sorted by name."""

    def delete(self, name: str) -> None:
        """Remove an object; nothing when there is none."""

    def sweep(self) -> None:
        """Remove what killed processes left half written an hour ago or more."""


_TEMPORARY = ".tmp"
_TEMPORARY_SECONDS = 3600.0


class LocalStorage:
    """Objects as files below a folder. A file appears whole, by a link, or is written under a name of its own.

    Args:
        root: the folder; made with the first object.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.root)

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        return (self.root / name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        return (self.root / name).open("rb")

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return (self.root / name).stat().st_size

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a file by linking one that is whole and synced."""
        temporary = self.root / _TEMPORARY / secrets.token_hex(8)
        _make_folder(temporary.parent)
        path = self.root / name
        _make_folder(path.parent)
        try:
            with _named(temporary), temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        finally:
            with suppress(OSError):
                temporary.unlink()
        _sync_folder(path.parent)
        return True

    def create(self, name: str) -> "LocalSink":
        """Begin a new file."""
        path = self.root / name
        _make_folder(path.parent)
        return LocalSink(path)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder."""
        found = []
        for folder, folders, files in os.walk(self.root / prefix, onerror=_raise_unless_gone):
            below = Path(folder).relative_to(self.root)
            if not below.parts and _TEMPORARY in folders:
                folders.remove(_TEMPORARY)
            found += [(below / file).as_posix() for file in files]
        return sorted(found)

    def stored(self, prefix: str) -> list[Stored]:
        """Return the files below a folder."""
        found = []
        for name in self.names(prefix):
            with suppress(FileNotFoundError):
                status = (self.root / name).stat()
                found.append(Stored(name, status.st_size, status.st_mtime))
        return found

    def delete(self, name: str) -> None:
        """Remove a file, and the folders above that are then empty."""
        path = self.root / name
        path.unlink(missing_ok=True)
        # Not the topmost ones: another process may be about to create a file there.
        with suppress(OSError):
            for folder in path.relative_to(self.root).parents[:-2]:
                (self.root / folder).rmdir()

    def sweep(self) -> None:
        """Remove what killed processes left half written an hour ago or more."""
        with suppress(OSError):
            for path in (self.root / _TEMPORARY).iterdir():
                if time.time() - path.stat().st_mtime > _TEMPORARY_SECONDS:
                    path.unlink()


class LocalSink:
    """A file that is being written.

    Attributes:
        size: bytes written so far.
        closed: whether it was closed; pyarrow asks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._file.closed

    def write(self, data: bytes) -> int:
        """Append."""
        view = memoryview(data)
        self._hash.update(view)
        with _named(self._path):
            self._file.write(view)
        self.size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def finish(self) -> str:
        """Sync the file and its folder."""
        with _named(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        _sync_folder(self._path.parent)
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file."""
        with _named(self._path):
            self._file.close()


def _raise_unless_gone(error: OSError) -> None:
    """Raise why a folder cannot be listed: what is in it must not count as missing."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have errors of an open file, as of a disk that is full, say which one it is."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
