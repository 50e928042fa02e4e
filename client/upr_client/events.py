"""What a consumer gets: changes, snapshot markers and rollbacks."""

import gc
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_protocol.block import Block
from upr_protocol.consumer_types import Delivery
from upr_protocol.rows import block_keys, block_partitions, block_seqnos, block_values

Op = Literal["set", "delete"]

_OPS: Final = ("set", "delete")


class Change(NamedTuple):
    """One mutation.

    Args:
        partition: 0 to 1023.
        seqno: 1 to 2^48 - 1, rising within the partition.
        op: "set" or "delete".
        key: 1 to 4096 bytes.
        value: 0 to 20 MiB; None for a delete, and for everything in a stream of keys only.
    """

    partition: int
    seqno: int
    op: Op
    key: bytes
    value: bytes | None


class Marker(NamedTuple):
    """A snapshot marker: the partition as received so far is a state that it had, at this seqno."""

    partition: int
    seqno: int


class Rollback(NamedTuple):
    """The server's history of a partition is another one: everything above ``seqno`` is to be undone.

    Args:
        partition: 0 to 1023.
        from_seqno: up to where data was received.
        seqno: up to where it stays; 0 for nothing.
        old_id: the failover id the data belongs to, None when it was lost.
        new_id: the server's newest failover id.
        rule: the rule that decided, as a token.
        words: the same for people.
        keys: the keys that were received above ``seqno``, each once, as far as they are remembered.
        keys_complete: whether those are all. Above ``seqno`` the new history says what they hold, if anything.
    """

    partition: int
    from_seqno: int
    seqno: int
    old_id: int | None
    new_id: int
    rule: str
    words: str
    keys: tuple[bytes, ...] = ()
    keys_complete: bool = False


def block_changes(block: Block) -> list[Change]:
    """Return a numbered block's rows as changes, in order."""
    ops: Iterable[str] = map(_OPS.__getitem__, block.ops) if block.ops else repeat("set")
    collecting = gc.isenabled()
    # Thousands of new objects and none that could be garbage: looking for some meanwhile takes a third of the time.
    gc.disable()
    try:
        rows = zip(
            block_partitions(block),
            block_seqnos(block),
            ops,
            block_keys(block),
            block_values(block),
            strict=False,
        )
        # Change.__new__ is a Python function that is called with five arguments; this makes the same object at
        # more than twice the speed.
        return list(map(tuple.__new__, repeat(Change), rows))
    finally:
        if collecting:
            gc.enable()


def markers_of(pairs: Iterable[tuple[int, int]]) -> list[Marker]:
    """Return (partition, seqno) pairs as markers."""
    return list(map(tuple.__new__, repeat(Marker), pairs))


class ChangeBatch:
    """What one frame brought, or the rollbacks to undo.

    Args:
        blocks: the numbered blocks, for those who take the columns as they are. Small ones of ascending partitions
            arrive as one block of several runs.
        markers: as the property, or a function that makes them.
        rollbacks: with ``on_rollback="event"``: what is to be undone; such a batch has no changes.
        delivery: what the state machine made of the frame; None for rollbacks.
    """

    __slots__ = ("_changes", "_markers", "blocks", "delivery", "rollbacks")

    def __init__(
        self,
        blocks: list[Block],
        markers: list[Marker] | Callable[[], list[Marker]],
        rollbacks: list[Rollback] | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        self.blocks = blocks
        self.delivery = delivery
        self._markers = markers
        self.rollbacks: list[Rollback] = rollbacks or []
        self._changes: list[Change] | None = None

    @property
    def markers(self) -> list[Marker]:
        """The snapshot markers that are true for this consumer, in order; made when asked for first."""
        if callable(self._markers):
            self._markers = self._markers()
        return self._markers

    @property
    def changes(self) -> list[Change]:
        """The changes, decoded when asked for first; within a partition in the order of their seqnos."""
        if self._changes is None:
            self._changes = []
            for block in self.blocks:
                self._changes += block_changes(block)
        return self._changes

    def events(self) -> list["Change | Marker | Rollback"]:
        """The changes with each marker behind what it completes; or the rollbacks."""
        if self.delivery is None:
            return list(self.rollbacks)
        bounds = self.bounds()
        changes = self.changes
        events: list[Change | Marker | Rollback] = []
        first = 0
        # Only markers are put in one by one; the changes between two of them go in at once.
        for at, marker in zip(bounds[self.delivery.is_marker].tolist(), self.markers, strict=True):
            events += changes[first:at]
            events.append(marker)
            first = at
        events += changes[first:]
        return events

    def bounds(self) -> npt.NDArray[np.int64]:
        """Behind how many changes each run ends, one a run."""
        counts = np.concatenate([block.runs["count"] for block in self.blocks])
        return np.cumsum(counts, dtype=np.int64)

    @property
    def rows(self) -> int:
        """How many changes there are, without decoding them."""
        return sum(block.rows for block in self.blocks)

    def to_arrow(self) -> Any:
        """Return the changes as one ``pyarrow.RecordBatch``; see ``upr_client.arrow.schema`` for its columns.

        Raises:
            MissingPackageError: pyarrow is not installed; it comes with ``upr-stream[arrow]``.
        """
        from upr_client.arrow import record_batch

        return record_batch(self)

    def __repr__(self) -> str:
        return (
            f"<ChangeBatch {self.rows} changes, {len(self.markers)} markers, "
            f"{len(self.rollbacks)} rollbacks>"
        )
