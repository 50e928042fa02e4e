"""Room in the map of a store: checked before a mutation is numbered, so that a full map is never met later."""

from upr.storage.store import Store
from upr_protocol.errors import NoRoomError

RESERVE_BYTES = 256 * 2**20
RESERVE_FRACTION = 0.25
"""Kept free in the map, the smaller of the two: a transaction writes anew each page that it touches, and what it
frees can be used only by a later one."""
GROWTH = 2
"""A stored block takes at most about so many times what its rows take in the tail: pages are not filled whole."""


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
