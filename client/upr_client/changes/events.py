"""Events: changes, markers and rollbacks as the application gets them, a delivered batch, and how much of it was consumed."""

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_client.arrow import record_batch
from upr_protocol.block import (
    COMPILED,
    RUN,
    U64,
    Block,
    block_keys,
    block_partitions,
    block_seqnos,
    block_values,
    joined_runs,
    row_bounds,
    row_seqnos,
    select_runs,
)
from upr_protocol.consumer import Delivery
from upr_protocol.errors import ProtocolError
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.codec import joined_blocks
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

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
    """Rollback: the server's history of a partition changed, and everything above ``seqno`` must be undone.

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


def _columns(block: Block) -> tuple[bytes, ...]:
    offsets = (block.key_offsets, block.keys, block.value_offsets, block.values)
    return block.runs.tobytes(), block.seqnos, block.ops, *offsets


def block_changes(block: Block) -> list[Change]:
    """Return a numbered block's rows as changes, in order.

    The compiled function makes them where it is there and the columns fit each other, else ``changes_in_python``.
    """
    if COMPILED is not None:
        changes: list[Change] | None = COMPILED.rows(Change, _OPS, *_columns(block))
        if changes is not None:
            return changes
    return changes_in_python(block)


def block_items(block: Block) -> list[tuple[bytes, bytes | None]]:
    """Return a numbered block's keys and values, in order, made as ``block_changes`` makes rows."""
    if COMPILED is not None:
        items: list[tuple[bytes, bytes | None]] | None = COMPILED.items(*_columns(block))
        if items is not None:
            return items
    return items_in_python(block)


def items_in_python(block: Block) -> list[tuple[bytes, bytes | None]]:
    """As ``block_items``, which this is the reference of."""
    return list(zip(block_keys(block), block_values(block), strict=True))


def changes_in_python(block: Block) -> list[Change]:
    """As ``block_changes``, which this is the reference of."""
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


class ChangeBatch:
    """Batch of the changes of a frame, or of small frames that waited together.

    Args:
        blocks: the numbered blocks, for programs that take the columns as they are. Small ones of ascending partitions
            arrive as one block of several runs.
        delivery: what the state machine made of the frame; None outside of following, where there are no markers.
    """

    __slots__ = ("_changes", "_markers", "blocks", "delivery")

    def __init__(self, blocks: list[Block], *, delivery: Delivery | None = None) -> None:
        self.blocks = blocks
        self.delivery = delivery
        self._markers: list[Marker] | None = None
        self._changes: list[Change] | None = None

    @property
    def markers(self) -> list[Marker]:
        """The snapshot markers that are true for this consumer, in order; made when asked for first."""
        if self._markers is None:
            pairs = [] if self.delivery is None else self.delivery.markers()
            self._markers = list(map(tuple.__new__, repeat(Marker), pairs))
        return self._markers

    @property
    def changes(self) -> list[Change]:
        """The changes, decoded when asked for first; within a partition in the order of their seqnos."""
        if self._changes is None:
            self._changes = []
            for block in self.blocks:
                self._changes += block_changes(block)
        return self._changes

    def items(self) -> list[tuple[bytes, bytes | None]]:
        """Return the changes as key and value, None for a delete: ``state.update(batch.items())`` makes the newest state.

        It is faster than ``changes``, and keeps nothing.
        """
        if len(self.blocks) == 1:
            return block_items(self.blocks[0])
        return [item for block in self.blocks for item in block_items(block)]

    def events(self) -> list[Change | Marker]:
        """The changes with each marker behind what it completes."""
        changes = self.changes
        if self.delivery is None:
            return [*changes]
        bounds = self.bounds()
        events: list[Change | Marker] = []
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
        """Return the number of changes, without decoding them."""
        return sum(block.rows for block in self.blocks)

    def to_arrow(self) -> Any:
        """Return the changes as one ``pyarrow.RecordBatch``; see ``upr_client.arrow.schema`` for its columns.

        Raises:
            MissingPackageError: pyarrow is not installed; it comes with ``upr-stream[arrow]``.
        """
        return record_batch(self)

    def __repr__(self) -> str:
        return f"<ChangeBatch {self.rows} changes, {len(self.markers)} markers>"


RECENT_KEY_BYTES: Final = 4 * 2**20
"""Bytes of key columns that are remembered, by default."""


class RecentKeys:
    """A ring of the key columns received last, over all partitions.

    It refers to the columns as they came, so that a frame costs a constant whatever its number of rows.

    Args:
        limit: bytes of key columns that are kept; 0 keeps nothing.
    """

    def __init__(self, limit: int = RECENT_KEY_BYTES) -> None:
        self._limit = limit
        self._blocks: deque[Block] = deque()
        self._bytes = 0
        self._forgotten = np.zeros(PARTITIONS, np.uint64)
        # Made when a rollback asks, of use until more is received.
        self._runs: _RunsByPartition | None = None

    def add(self, blocks: list[Block]) -> None:
        self._settle()
        for block in blocks:
            if not block.rows:
                continue
            # Not with ``replace``, which costs a lone row more than its checks do.
            keys, crc = (block.key_offsets, block.keys), block.columns_crc
            bare = Block(block.runs, block.seqnos, block.ops, *keys, b"", b"", b"", crc)
            self._blocks.append(bare)
            self._bytes += _size(bare)
        while self._blocks and self._bytes > self._limit:
            old = self._blocks.popleft()
            self._bytes -= _size(old)
            self._forget(old)

    def _forget(self, block: Block) -> None:
        runs, some = block.runs, block.runs["count"] > 0
        partitions, ends = runs["partition"][some].astype(np.int64), runs["end_seqno"][some]
        # At once for all: a partition may be there twice.
        np.maximum.at(self._forgotten, partitions, ends.astype(np.uint64, copy=False))

    def begin(self, partitions: npt.NDArray[np.int64], seqnos: U64) -> None:
        """Partitions, each there once, begin at seqnos: what was received up to there before is not known."""
        self._forgotten[partitions] = np.maximum(self._forgotten[partitions], seqnos)

    def above(self, partition: int, seqno: int) -> tuple[tuple[bytes, ...], bool]:
        """Return the keys of a partition received above a seqno, each once and the first one first, and whether that is
        all: others may have been received too long ago.
        """
        found: dict[bytes, None] = {}
        for block, run in self._by_partition().above(partition, seqno):
            first, last = row_bounds(block.runs)[run : run + 2].tolist()
            # One offset more than keys.
            ends = np.frombuffer(block.key_offsets, "<i4", last - first + 1, first * 4)
            if block.runs["start_seqno"][run] < seqno:
                later = row_seqnos(block)[first:last] > np.uint64(seqno)
                rows = np.flatnonzero(later).tolist()
            else:
                rows = list(range(last - first))
            found.update((block.keys[ends[row] : ends[row + 1]], None) for row in rows)
        return tuple(found), int(self._forgotten[partition]) <= seqno

    def drop_above(self, partition: int, seqno: int) -> None:
        """Drop the keys above the seqno to which a partition rolled back."""
        self._by_partition().drop(partition, seqno)
        self._forgotten[partition] = min(int(self._forgotten[partition]), seqno)

    def _by_partition(self) -> "_RunsByPartition":
        if self._runs is None:
            self._runs = _RunsByPartition(self._blocks)
        return self._runs

    def _settle(self) -> None:
        """Let go of what was dropped."""
        if self._runs is not None:
            self._blocks = deque(self._runs.left())
            self._bytes = sum(map(_size, self._blocks))
            self._runs = None


class _RunsByPartition:
    """The runs of blocks by partition, oldest first.

    A change of owner rolls all partitions back, one after the other, and there may be thousands of blocks: none is looked at
    but those of the partition.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = list(blocks)
        tables = [block.runs for block in self._blocks] or [np.zeros(0, RUN)]
        self._firsts = np.cumsum([0, *map(len, tables)])
        runs = joined_runs(tables)
        self._order = np.argsort(runs["partition"], kind="stable")
        self._ends = runs["end_seqno"][self._order]
        self._at = np.searchsorted(runs["partition"][self._order], np.arange(PARTITIONS + 1))
        self._kept = np.ones(len(runs), bool)

    def _above(self, partition: int, seqno: int) -> npt.NDArray[np.int64]:
        part = slice(self._at[partition], self._at[partition + 1])
        found = self._order[part][self._ends[part] > np.uint64(seqno)]
        return found[self._kept[found]]

    def above(self, partition: int, seqno: int) -> Iterator[tuple[Block, int]]:
        """Yield the runs of a partition that end above a seqno: the block, and which of its runs."""
        found = self._above(partition, seqno)
        numbers = np.searchsorted(self._firsts, found, side="right") - 1
        within = found - self._firsts[numbers]
        for number, run in zip(numbers.tolist(), within.tolist(), strict=True):
            yield self._blocks[number], run

    def drop(self, partition: int, seqno: int) -> None:
        """Drop the runs of a partition that end above a seqno; none is cut in two, as a rollback goes to the end of one."""
        self._kept[self._above(partition, seqno)] = False

    def left(self) -> Iterator[Block]:
        """Yield the blocks without what was dropped."""
        for number, block in enumerate(self._blocks):
            kept = self._kept[self._firsts[number] : self._firsts[number + 1]]
            if kept.any():
                yield select_runs(block, kept)


def _size(block: Block) -> int:
    return len(block.keys) + len(block.key_offsets) + len(block.seqnos) + block.runs.nbytes


def decode_frame(frame: stream_pb2.Frame) -> tuple[list[Block], npt.NDArray[np.uint32]]:
    """Return a frame's blocks, checked and with small ones joined, and the token of each run.

    Raises:
        InvalidArgumentError: a block is damaged or out of its limits.
        ProtocolError: there is no block, or the tokens cannot be read.
    """
    if not frame.blocks or len(frame.tokens) % 4:
        raise ProtocolError(
            f"a frame of {len(frame.blocks)} blocks with {len(frame.tokens)} bytes of tokens"
        )
    return joined_blocks(frame.blocks, np.frombuffer(frame.tokens, "<u4"))


class HandedOut:
    """A batch or a rollback that was handed to the application, and how much of it was consumed one by one."""

    __slots__ = ("_bounds", "_count", "_events", "delivery", "item")

    def __init__(self, item: ChangeBatch | Rollback) -> None:
        self.item = item
        self.delivery = None if isinstance(item, Rollback) else item.delivery
        self._events: Sequence[Change | Marker | Rollback] | None = None
        self._bounds: npt.NDArray[np.int64] | None = None
        self._count = 0

    def next_event(self) -> Change | Marker | Rollback | None:
        """Return the next event, None when there is none left; what was returned before it is consumed."""
        if self._events is None:
            if isinstance(self.item, Rollback):
                self._events = [self.item]
            else:
                self._events = self.item.events()
                if self.delivery is not None:
                    self._bounds = self.item.bounds() + np.cumsum(self.delivery.is_marker)
        count = self._count
        if count == len(self._events):
            return None
        self._count = count + 1
        return self._events[count]

    @property
    def has_more(self) -> bool:
        """Return whether the application takes events one by one, and more remain."""
        return self._events is not None and self._count < len(self._events)

    def consumed(self) -> tuple[int, int | None]:
        """Return how many runs were consumed, and the seqno reached in the next one; the newest event does not
        count."""
        done = self._count - 1
        if self._events is None or self._bounds is None or done <= 0:
            return 0, None
        runs = int(np.searchsorted(self._bounds, done, side="right"))
        first = int(self._bounds[runs - 1]) if runs else 0
        last = self._events[done - 1]
        return runs, last.seqno if done > first else None
