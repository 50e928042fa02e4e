"""Room on the disk, in the map of a store, and in memory: checked before a mutation is numbered, because a numbered
mutation must be stored.

The disk's reserve is the worst case of storing the tails, so it grows with them. On a small disk the tails stay small:
a write without room waits for a flush, which frees the journal's copy of the tail.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb

from upr.engine.tail import Tail
from upr.storage.journal import ROOM_BYTES
from upr.storage.lmdb_pages import free_bytes
from upr.storage.store import Store
from upr_protocol.errors import NoRoomError, QuotaExceededError, TooManyError
from upr_protocol.limits import SMALL_WAITING_BYTES_MAX, SMALL_WRITE_BYTES, WAITING_BYTES_MAX

RESERVE_BYTES = 256 * 2**20
RESERVE_FRACTION = 0.25
"""Kept free in the map, the smaller of the two: a transaction writes anew each page that it touches, and what it
frees can be used only by a later one."""
GROWTH = 2
"""Largest ratio of a stored block to its rows in the tail: pages are partly filled."""
BUCKET_BYTES = 2 * 2**20 + ROOM_BYTES
"""Room that a flush takes besides, however little it stores: pages that it writes anew are free only two transactions later.
What the journal makes room for ahead. And what the end of a bucket takes: a segment of the journal is begun, the proof is written."""
ROOM_AGAIN_BYTES = 2**20
"""Room at which the trouble "no room" ends."""
LOOK_SECONDS = 0.02
"""Longest age of the measured free space. Asking for each write took a fifth of a small write's time."""


class DiskRoom:
    """Room of the file system that all buckets of a server share, above the reserve.

    Attributes:
        error: the error of measuring the disk; None if it worked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tails: dict[Tail, Callable[[], None]] = {}
        self._claimed = 0
        self._left = 0
        self._look_at = 0.0
        self.error: OSError | None = None

    def add(self, tail: Tail, wanted: Callable[[], None]) -> None:
        """Reserve room for storing a bucket's tail; ``wanted`` is called when a flush would free room for a writer."""
        self._tails[tail] = wanted
        self.changed()

    def remove(self, tail: Tail) -> None:
        """Remove the reserve of a closed or dropped bucket."""
        self._tails.pop(tail, None)
        self.changed()

    def wanted(self) -> None:
        """Request a flush of all tails that are not empty."""
        for tail, wanted in self._tails.items():
            if tail.bytes:
                wanted()

    def changed(self) -> None:
        """Measure again: a tail was stored, or files were deleted."""
        self._look_at = 0.0

    def left(self) -> int:
        """Return by how many bytes the tails may grow; negative if the reserve is in use."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._left = self._bytes() // (1 + GROWTH)
        return self._left

    def take(self, size: int) -> None:
        """Record bytes added to a tail."""
        self._left -= size

    def above_reserve(self) -> int:
        """Return the bytes above the reserve, for writers other than journal and flush."""
        return self.left() * (1 + GROWTH)

    @contextmanager
    def claimed(self, size: int) -> Iterator[None]:
        """Reserve room while the body writes."""
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


def _reserve(store: Store) -> int:
    return min(RESERVE_BYTES, int(store.map_size * RESERVE_FRACTION))


def check_map(store: Store, pending: int, *, is_full: bool) -> None:
    """Raise NoRoomError unless the map of a store has room for the pending rows.

    Args:
        pending: bytes of the tail and of the write about to be numbered.
        is_full: whether the last flush found the map full.
    """
    room = (store.map_room() - _reserve(store)) // GROWTH
    if is_full or pending > room:
        raise NoRoomError(
            f"room in the store's map of {store.map_size} bytes is {max(room, 0)} bytes; "
            f"must be {pending} to store the tail",
            hint="restart the server, which fits the map to the size of the disk; or write to another bucket",
        )


def merge_room(store: Store) -> int:
    """Return how many bytes a compaction may add to the map; half of the reserve is for flushes."""
    return store.map_room() - _reserve(store) // 2


class Quota:
    """Quota of a bucket, on its store's pages in use and its tail together; ``limit`` is in bytes, 0 for none; ``used`` as
    it was measured last.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.limit = store.quota()
        self.used = store.used_bytes()

    def refresh(self) -> None:
        """Measure the store again; call in one of its threads."""
        with suppress(lmdb.Error):
            self.used = self._store.used_bytes()

    def exceeded(self, pending: int) -> bool:
        """Return whether the bucket would exceed its quota with this many bytes in its tail."""
        return 0 < self.limit < self.used + pending

    def error(self, pending: int) -> QuotaExceededError:
        return QuotaExceededError(
            f"size of the bucket would be {self.used + pending} bytes; must be at most its quota {self.limit}",
            hint="delete rows, and wait for compaction; or raise the quota with 'upr-admin bucket quota'",
        )


class WaitingRoom:
    """Bytes of the writes that wait to be numbered, in all buckets of a server.

    Small writes are counted apart, so that large ones leave room for them.
    """

    def __init__(self) -> None:
        self._held = {True: 0, False: 0}

    @contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """Let a write wait while the body runs; TooManyError if too many bytes wait."""
        small = size <= SMALL_WRITE_BYTES
        limit = SMALL_WAITING_BYTES_MAX if small else WAITING_BYTES_MAX
        if self._held[small] + size > limit:
            raise TooManyError(
                f"waiting writes would be {self._held[small] + size} bytes; must be at most {limit}",
                hint="retry after a moment",
            )
        self._held[small] += size
        try:
            yield
        finally:
            self._held[small] -= size
