"""What the rest needs of a storage: names with slashes, bytes that never change."""

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
