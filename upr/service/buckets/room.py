"""Room on the disk, in the map of a store, and in memory: checked before a mutation is numbered, so that none is full later.

The disk's reserve is what storing the tails takes at worst, so it grows with them. On a small disk the tails stay small:
a write that finds no room waits until the tail is stored, which gives the journal's part of it back.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb

from upr.engine.tail import Tail
from upr.storage.store import Store
from upr_protocol.errors import NoRoomError, QuotaExceededError, TooManyError
from upr_protocol.limits import SMALL_WAITING_BYTES_MAX, SMALL_WRITE_BYTES, WAITING_BYTES_MAX

RESERVE_BYTES = 256 * 2**20
RESERVE_FRACTION = 0.25
"""Kept free in the map, the smaller of the two: a transaction writes anew each page that it touches, and what it
frees can be used only by a later one."""
GROWTH = 2
"""A stored block takes at most about so many times what its rows take in the tail: pages are not filled whole."""
BUCKET_BYTES = 2 * 2**20
"""What a flush takes besides, however little it stores: pages that it writes anew are free only two transactions later.
And what the end of a bucket takes: a segment of the journal is begun, the proof is written."""
ROOM_AGAIN_BYTES = 2**20
"""From so much room on it is no trouble any more that there was none."""
LOOK_SECONDS = 0.02
"""How old what is known of the disk may be. Asking it for each write took a fifth of a small one's time."""


class DiskRoom:
    """Room of the file system that all buckets of a server share, above the reserve.

    Args:
        path: of the data directory.

    Attributes:
        error: why the disk could not be asked; None when it could.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tails: dict[Tail, Callable[[], None]] = {}
        self._claimed = 0
        self._left = 0
        self._look_at = 0.0
        self.error: OSError | None = None

    def add(self, tail: Tail, wanted: Callable[[], None]) -> None:
        """Reserve what storing a bucket's tail takes; ``wanted`` is called when that would help somebody."""
        self._tails[tail] = wanted
        self.changed()

    def remove(self, tail: Tail) -> None:
        """The bucket is closed or was dropped."""
        self._tails.pop(tail, None)
        self.changed()

    def wanted(self) -> None:
        """Have all tails stored that hold something."""
        for tail, wanted in self._tails.items():
            if tail.bytes:
                wanted()

    def changed(self) -> None:
        """A tail was stored, or files were deleted: what was known is too little."""
        self._look_at = 0.0

    def left(self) -> int:
        """Return how many bytes the tails may grow by; negative when the reserve is touched."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._left = self._bytes() // (1 + GROWTH)
        return self._left

    def take(self, size: int) -> None:
        """So many bytes were added to a tail."""
        self._left -= size

    def above_reserve(self) -> int:
        """Return how many bytes may be written by what is not the journal, and not a flush."""
        return self.left() * (1 + GROWTH)

    @contextmanager
    def claimed(self, size: int) -> Iterator[None]:
        """Keep room for something that is written meanwhile."""
        self._claimed += size
        self.changed()
        try:
            yield
        finally:
            self._claimed -= size
            self.changed()

    def _bytes(self) -> int:
        try:
            room = free_bytes(self._path) - self._claimed
            self.error = None
        except OSError as error:
            self.error = error
            return 0
        for tail in self._tails:
            room -= tail.volatile_bytes + GROWTH * tail.bytes + BUCKET_BYTES
        return room


def free_bytes(path: Path) -> int:
    """Return how many bytes of a file system are free for this process."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def _reserve(store: Store) -> int:
    return min(RESERVE_BYTES, int(store.map_size * RESERVE_FRACTION))


def check_map(store: Store, pending: int, *, is_full: bool) -> None:
    """Raise NoRoomError unless the map of a store takes what waits to be flushed.

    Args:
        pending: bytes of the tail, with what is about to be numbered.
        is_full: whether the last flush found the map full.
    """
    room = (store.map_room() - _reserve(store)) // GROWTH
    if is_full or pending > room:
        raise NoRoomError(
            f"the bucket's store has room for {max(room, 0)} bytes of its map of {store.map_size} bytes, "
            f"{pending} wait to be stored",
            hint="a restart of the server fits the map to the size of the disk; or write to another bucket",
        )


def merge_room(store: Store) -> int:
    """Return how many bytes a merge may add to the map; half of the reserve is left to the flush."""
    return store.map_room() - _reserve(store) // 2


class Quota:
    """What a bucket may take: its store's pages in use and its tail together.

    Attributes:
        limit: in bytes, 0 for none.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.limit = store.quota()
        self._used = store.used_bytes()

    def refresh(self) -> None:
        """Look again at what the store takes; in one of its threads."""
        with suppress(lmdb.Error):
            self._used = self._store.used_bytes()

    def exceeded(self, pending: int) -> bool:
        """Whether the bucket would take more than it may with so many bytes in its tail."""
        return 0 < self.limit < self._used + pending

    def error(self, pending: int) -> QuotaExceededError:
        """Return what a write that exceeds it is told."""
        return QuotaExceededError(
            f"the bucket would take {self._used + pending} bytes, its quota is {self.limit}",
            hint="delete rows, which is allowed, and wait for merging; or 'upr-admin bucket quota' gives it more",
        )


class WaitingRoom:
    """The bytes of the writes that wait to be numbered, in all buckets of a server.

    Attributes:
        large, small: bytes that wait, apart, so that large writes leave small ones their room.
    """

    def __init__(self) -> None:
        self.large = self.small = 0

    @contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """Let a write wait while the body runs.

        Raises:
            TooManyError: too much waits already.
        """
        if size <= SMALL_WRITE_BYTES:
            _check_waiting(self.small, size, SMALL_WAITING_BYTES_MAX)
            self.small += size
        else:
            _check_waiting(self.large, size, WAITING_BYTES_MAX)
            self.large += size
        try:
            yield
        finally:
            if size <= SMALL_WRITE_BYTES:
                self.small -= size
            else:
                self.large -= size


def _check_waiting(held: int, size: int, limit: int) -> None:
    if held + size > limit:
        raise TooManyError(
            f"writes of {held} bytes wait to be numbered, with {size} more they exceed {limit}",
            hint="send it again, after a moment",
        )
