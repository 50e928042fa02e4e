"""Storage: names with slashes and bytes that never change, and its form as files below a folder."""

import errno
import hashlib
import io
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from upr_backup.errors import RepositoryDamagedError

READ_BYTES_MAX: Final = 64 * 2**20
"""Largest object that is read whole. Documents are far below; what is larger was not written by this program."""


class Stored(NamedTuple):
    """An object that is there: its name, its bytes, and when it was written, in seconds since the epoch."""

    name: str
    bytes: int
    written: float


class Sink(Protocol):
    """A new object that is being written, as pyarrow needs a file; and how many bytes were written so far."""

    size: int

    @property
    def closed(self) -> bool:
        """Whether it was closed; pyarrow asks."""

    def write(self, data: bytes) -> int:
        """Append."""

    def finish(self) -> str:
        """Make it durable, and return its SHA-256 in hex."""

    def close(self) -> None:
        """Give the object up unless it is finished."""


class ObjectReader(io.RawIOBase):
    """The bytes of an object, in any order.

    Args:
        read: returns bytes from a position on, so many at most; none at the end or behind it.
    """

    def __init__(
        self,
        size: int,
        read: Callable[[int, int], Any],
        close: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()
        self._size = size
        self._read = read
        self._close = close
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._close()
        super().close()

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = memoryview(self._read(self._at, view.nbytes))
        view[: data.nbytes] = data
        self._at += data.nbytes
        return data.nbytes


class Storage(Protocol):
    """Named objects.

    Every method may raise OSError. One in an object store may also raise StorageUnreachableError,
    StorageTimeoutError, StorageRefusedError, MissingPackageError or InvalidArgumentError.
    """

    @property
    def location(self) -> str:
        """What ``open_storage`` opens the same storage with, in this process or another."""

    def read(self, name: str) -> bytes:
        """Return a whole object of at most READ_BYTES_MAX bytes; FileNotFoundError when there is none."""

    def open(self, name: str) -> io.BufferedReader:
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

    def is_empty(self) -> bool:
        """Return whether there is no object, and nothing of anybody else's."""

    def delete(self, name: str) -> None:
        """Remove an object; nothing when there is none."""

    def sweep(self) -> None:
        """Remove what killed processes left half written an hour ago or more."""


_TEMPORARY = ".tmp"
_TEMPORARY_SECONDS = 3600.0
_NOBODYS = {_TEMPORARY, "lost+found"}
# Without waiting: a FIFO in a file's place would be waited for until somebody writes to it.
_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class LocalStorage:
    """Objects as files below a folder. A file appears whole, by a link, or is written under a name of its own.

    Whoever wrote the folder is not trusted: only plain files are read, and no link is followed below it. It is made with
    the first object.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = str(root)
        self._root = self.location.rstrip("/")

    def read(self, name: str) -> bytes:
        with self._plain(name) as file:
            data = file.read(READ_BYTES_MAX + 1)
        check_size(name, len(data))
        return data

    def open(self, name: str) -> io.BufferedReader:
        return self._plain(name)

    def _plain(self, name: str) -> io.BufferedReader:
        path = self._inside(name)
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise _not_plain(name)
        return os.fdopen(os.open(path, _PLAIN), "rb")

    def size(self, name: str) -> int:
        status = os.lstat(self._inside(name))
        if not stat.S_ISREG(status.st_mode):
            raise _not_plain(name)
        return status.st_size

    def _inside(self, name: str) -> str:
        """Return the path of a name, which must not lead out of the folder."""
        path = self._root
        *folders, last = name.split("/")
        for folder in folders:
            path = f"{path}/{folder}"
            if folder in ("", ".", "..") or os.path.islink(path):
                raise _not_plain(path.removeprefix(f"{self._root}/"))
        if last == "..":
            raise _not_plain(name)
        return f"{path}/{last}"

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a file by linking one that is whole and synced."""
        temporary = Path(self._inside(f"{_TEMPORARY}/{secrets.token_hex(8)}"))
        _make_folder(temporary.parent)
        path = Path(self._inside(name))
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
        path = Path(self._inside(name))
        _make_folder(path.parent)
        return LocalSink(path)

    def names(self, prefix: str) -> list[str]:
        found = []
        top = self._inside(prefix).rstrip("/") or "/"
        for folder, folders, files in os.walk(top, onerror=_raise_unless_gone):
            below = folder[len(self._root) + 1 :]
            if not below and _TEMPORARY in folders:
                folders.remove(_TEMPORARY)
            found += [f"{below}/{file}" if below else file for file in files]
        return sorted(found)

    def stored(self, prefix: str) -> list[Stored]:
        found = []
        for name in self.names(prefix):
            with suppress(FileNotFoundError):
                status = os.lstat(f"{self._root}/{name}")
                found.append(Stored(name, status.st_size, status.st_mtime))
        return found

    def is_empty(self) -> bool:
        """Return whether there is no file, folder or link, but for what a file system or a killed run left."""
        try:
            found = set(os.listdir(self.root)) - _NOBODYS
        except FileNotFoundError:
            return True
        # A folder for locks is left where the storage was tried, and not found good enough.
        return not found or (found == {"locks"} and not self.names("locks/"))

    def delete(self, name: str) -> None:
        """Remove a file, and the folders above that are then empty."""
        path = Path(self._inside(name))
        path.unlink(missing_ok=True)
        # Not the topmost ones: another process may be about to create a file there.
        with suppress(OSError):
            for folder in path.relative_to(self.root).parents[:-2]:
                (self.root / folder).rmdir()

    def sweep(self) -> None:
        with suppress(OSError):
            # Others may have put folders and links there, which stay; a link in the folder's place is an error.
            for one in os.scandir(self._inside(f"{_TEMPORARY}/")):
                is_old = time.time() - one.stat(follow_symlinks=False).st_mtime > _TEMPORARY_SECONDS
                if is_old and one.is_file(follow_symlinks=False):
                    os.unlink(one.path)


class LocalSink:
    """A file that is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._finished = False
        self.size = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        self._hash.update(view)
        with _named(self._path):
            self._file.write(view)
        self.size += view.nbytes
        return view.nbytes

    def finish(self) -> str:
        """Sync the file and its folder."""
        with _named(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        _sync_folder(self._path.parent)
        self._finished = True
        return self._hash.hexdigest()

    def close(self) -> None:
        """Remove the file unless it is finished: on a full disk it would take the room that the next run needs."""
        if self._finished:
            return
        self._finished = True
        # What cannot be written any more was told of by what wrote it, and is not wanted.
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink()


def check_size(name: str, size: int) -> None:
    """Raise RepositoryDamagedError where an object is larger than what is read whole."""
    if size > READ_BYTES_MAX:
        raise RepositoryDamagedError(
            f"{name} is damaged: it has more than {READ_BYTES_MAX} bytes, which no document has"
        )


def _not_plain(name: str) -> RepositoryDamagedError:
    return RepositoryDamagedError(
        f"{name} is not used: it leads out of the repository, or is no plain file",
        hint="a repository has plain files and folders only, and no links",
    )


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
