"""Searches in stored blocks: the newest mutations of some keys, and the seqno at which a time was passed.

*Keys.* There is no index over keys: all keys of a block are compared with the wanted ones in one vectorised step, from
the newest block to the oldest. The values in memory are bounded: when they exceed the limit of the answer, the last
keys are dropped from the search with their values, and the answer ends before them.

*Times.* Commit times rise with seqnos unless the clock was set back. So a binary search over heads of blocks finds the
block, and its column of times the row. If the clock was set back, the time is crossed several times, and the search
finds one of the crossings.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from upr.storage.blocks import (
    ABSENT,
    OPS,
    SEQNOS,
    VALUE_OFFSETS,
    VALUES,
    BlockCursor,
    Encoded,
    StoredBlock,
    checked,
    keys_of,
)
from upr.storage.store import Store
from upr_protocol.block import I64, OP_DELETE, RUN, U64, Runs, row_bounds
from upr_protocol.errors import CorruptBlockError, DataDamagedError, UprError
from upr_protocol.limits import PARTITIONS
from upr_protocol.partitioning import partitions_of
from upr_protocol.wire.codec import check_encoded, open_columns

BITE_BYTES = 2 * 2**20
BITE_BLOCKS = 1000
"""Most bytes and blocks searched before other requests have their turn; one block may be larger."""


@dataclass(frozen=True, slots=True)
class Newest:
    """Newest mutation of a key; ``value`` is None for a delete."""

    seqno: int
    value: bytes | None


class Lookup:
    """Lookup of keys and its results. For one thread at a time.

    Args:
        keys: each once, in the order of the answer.
        max_bytes: most bytes of values in the answer; a larger first value is kept.

    Attributes:
        partitions: of each key, int64.
        found: by the key's number.
        problems: errors of partitions that cannot be read.
        end: keys from this number on are not answered.
    """

    def __init__(self, keys: Sequence[bytes], max_bytes: int) -> None:
        self._keys = keys
        self._left = max_bytes
        self.partitions: I64 = partitions_of(keys).astype(np.int64)
        self.found: dict[int, Newest] = {}
        self.problems: dict[int, UprError] = {}
        self.end = len(keys)
        self._open = np.ones(len(keys), bool)

    @property
    def pending(self) -> npt.NDArray[np.bool_]:
        """Return the partitions with keys that are not found yet, bool, shape (1024,)."""
        pending = np.zeros(PARTITIONS, bool)
        pending[self.partitions[self._open]] = True
        return pending

    def fail(self, partitions: Iterable[int], why: UprError) -> None:
        """Fail the keys of partitions that are not found yet."""
        for partition in partitions:
            gone = self._open & (self.partitions == partition)
            if gone.any():
                self.problems[partition] = why
                self._open[gone] = False

    def settle(self, partitions: npt.NDArray[np.bool_]) -> None:
        """End the search in partitions (bool, shape (1024,)): keys not found do not exist."""
        self._open[partitions[self.partitions]] = False

    def search(self, blocks: Sequence[Encoded], among: npt.NDArray[np.bool_]) -> None:
        """Search consecutive blocks, oldest first, for the keys of some partitions.

        Args:
            blocks: checked.
            among: the partitions, bool, shape (1024,).
        """
        counts = [int(block.runs["count"].sum()) for block in blocks]
        blocks = [block for block, count in zip(blocks, counts, strict=True) if count]
        wanted = np.flatnonzero(self._open & among[self.partitions])
        if not blocks or not len(wanted):
            return
        sought = pa.array([self._keys[i] for i in wanted.tolist()], pa.binary())
        keys = keys_of(*blocks)
        matches = pc.fill_null(pc.index_in(keys, value_set=sought), -1).to_numpy()
        rows = np.flatnonzero(matches >= 0)
        numbers = wanted[matches[rows]]
        runs = np.frombuffer(b"".join([block.runs.tobytes() for block in blocks]), RUN)
        run_ends = row_bounds(runs)[1:]
        # A writer may put a key into a partition that is not its own; such a row does not match.
        owners = runs["partition"][np.searchsorted(run_ends, rows, side="right")]
        mine = owners == self.partitions[numbers]
        newest = np.full(len(self._keys), -1, np.int64)
        # For a repeated index numpy keeps the last assignment, which is the newest row of the key.
        newest[numbers[mine]] = rows[mine]
        first_rows = np.cumsum([0, *filter(None, counts)])
        for number in np.flatnonzero(newest >= 0).tolist():
            row = int(newest[number])
            at = int(np.searchsorted(first_rows, row, side="right")) - 1
            self._take(number, blocks[at], row - int(first_rows[at]))

    def _take(self, number: int, block: Encoded, row: int) -> None:
        self._open[number] = False
        if number >= self.end:
            return
        found = _mutation(block, row)
        self.found[number] = found
        self._left -= len(found.value or b"")
        while self._left < 0 and len(self.found) > 1:
            # The values up to the last held key exceed the limit, so the answer ends before that key.
            self.end = max(self.found)
            self._left += len(self.found.pop(self.end).value or b"")
            self._open[self.end :] = False


def _mutation(block: Encoded, row: int) -> Newest:
    data, spans = block.opened()

    def column(field: int, dtype: str) -> npt.NDArray[np.int64]:
        first, end = spans.get(field, ABSENT)
        return np.frombuffer(data, dtype, (end - first) // np.dtype(dtype).itemsize, first)

    bounds = row_bounds(block.runs)
    number = int(np.searchsorted(bounds, row, side="right")) - 1
    offsets, ops = column(SEQNOS, "<u4"), column(OPS, "u1")
    offset = int(offsets[row]) if len(offsets) else row - int(bounds[number]) + 1
    seqno = int(block.runs["start_seqno"][number]) + offset
    if len(ops) and ops[row] == OP_DELETE:
        return Newest(seqno, None)
    edges = column(VALUE_OFFSETS, "<i4")
    first = spans.get(VALUES, ABSENT)[0]
    return Newest(seqno, bytes(data[first + int(edges[row]) : first + int(edges[row + 1])]))


class InTail(Protocol):
    """Tail entry as a search sees it: an encoded block and its run table."""

    runs: Runs
    data: bytes


class TailSearch:
    """Search of the tail's entries of one moment.

    Args:
        blocks: the tail's entries, oldest first.
    """

    def __init__(self, lookup: Lookup, blocks: Sequence[InTail]) -> None:
        self._lookup = lookup
        self._blocks = list(blocks)

    def bite(self) -> bool:
        """Search some entries, from the newest on; return whether the search is done."""
        pending = self._lookup.pending
        good: list[Encoded] = []
        size = passed = 0
        while self._blocks and size < BITE_BYTES and passed < BITE_BLOCKS:
            block = self._blocks.pop()
            passed += 1
            touched = block.runs["partition"]
            if not pending[touched].any():
                continue
            size += len(block.data)
            try:
                good.append(checked(block.data))
            except CorruptBlockError as error:
                self._lookup.search(good[::-1], pending)
                good = []
                self._lookup.fail(touched.tolist(), DataDamagedError(error.message))
        self._lookup.search(good[::-1], pending)
        return not self._blocks or not self._lookup.pending.any()


class StoreSearch:
    """Search of the stored blocks, partition by partition.

    Args:
        floors: blocks at or below these seqnos were searched before, uint64, shape (1024,).
    """

    def __init__(self, lookup: Lookup, store: Store, floors: U64) -> None:
        self._lookup = lookup
        self._store = store
        self._floors = floors
        self._left: list[int] = np.flatnonzero(lookup.pending).tolist()
        self._at: int | None = None

    def bite(self) -> bool:
        """Search some blocks; return whether the search is done.

        Between two bites blocks may be compacted: the search continues with the block that contains its seqno.
        """
        size = 0
        with self._store.look() as cursor:
            while self._left and size < BITE_BYTES:
                partition = self._left[-1]
                try:
                    size += self._step(cursor, partition)
                except (CorruptBlockError, DataDamagedError) as error:
                    why = DataDamagedError(
                        f"partition {partition}: a stored block is damaged: {error.message}",
                        hint="restore the partition from a replica or a backup",
                    )
                    self._lookup.fail([partition], why)
                    self._next_partition()
        return not self._left

    def _step(self, cursor: BlockCursor, partition: int) -> int:
        """Search the next block of a partition, and return its size."""
        if self._at is None:
            self._at = cursor.newest_end(partition)
        if self._at <= self._floors[partition] or not self._lookup.pending[partition]:
            self._next_partition()
            return 0
        there = cursor.containing(partition, self._at)
        block = checked(cursor.data(partition, there.end))
        among = np.zeros(PARTITIONS, bool)
        among[partition] = True
        self._lookup.search([block], among)
        self._at = there.start
        return there.size

    def _next_partition(self) -> None:
        self._left.pop()
        self._at = None


SEARCH_BYTES = 4 * 2**20
SEARCH_PARTITIONS = 64
"""Limits of one bite of a search, which ends with the partition that reaches either."""
_SEQNOS, _TIMES = 2, 8
_ABSENT = (0, 0)
_TIME_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoredBeginning:
    """Result of searching a partition's stored blocks for a time.

    Attributes:
        seqno: the rows at or below it were committed before the time.
        found: whether the next row was committed at or after the time; else ``seqno`` is the end of the stored blocks.
    """

    seqno: int
    found: bool


def search_time(
    store: Store, wanted: Sequence[tuple[int, int]]
) -> list[StoredBeginning | DataDamagedError]:
    """Search for the first of some (partition, time) pairs, and return their results in order.

    One bite, in one short transaction: call it again with the remaining pairs. Times are microseconds since the epoch.
    A partition whose blocks are damaged gets the error.
    """
    found: list[StoredBeginning | DataDamagedError] = []
    size = 0
    with store.look() as cursor:
        for partition, time in wanted[:SEARCH_PARTITIONS]:
            try:
                result, used = _search_partition(cursor, partition, time)
                size += used
            except (CorruptBlockError, DataDamagedError) as error:
                result = DataDamagedError(
                    f"partition {partition}: a stored block is damaged: {error.message}",
                    hint="restore the partition from a replica or a backup",
                )
            found.append(result)
            if size >= SEARCH_BYTES:
                break
    return found


def _search_partition(
    cursor: BlockCursor, partition: int, time: int
) -> tuple[StoredBeginning | DataDamagedError, int]:
    """Return the result, and the bytes read for it."""
    newest = high = cursor.newest_end(partition)
    low = 0
    passed: StoredBlock | None = None
    # Blocks with rows that end at or below low are older than the time, those above high are not.
    while low < high:
        middle = cursor.containing(partition, (low + high) // 2 + 1)
        block: StoredBlock | None = middle
        while block is not None and not _checked_block(block).rows:
            # A block without rows has no time.
            block = cursor.containing(partition, block.end + 1) if block.end < high else None
        if block is not None and block.time < time:
            low = block.end
        else:
            passed = passed if block is None else block
            high = middle.start
    if passed is None:
        return StoredBeginning(newest, False), 0
    data = cursor.data(partition, passed.end)
    return StoredBeginning(_row_below(data, passed, time), True), len(data)


def _checked_block(block: StoredBlock) -> StoredBlock:
    """Return a block with a verified table: a wrong time would misdirect the search unnoticed."""
    if google_crc32c.value(block.table) != block.table_crc:
        raise DataDamagedError(f"the table of the block that ends at {block.end} has changed")
    return block


def _row_below(data: bytes, block: StoredBlock, time: int) -> int:
    """Return the seqno right below a block's first row that was committed at or after the time."""
    check_encoded(data)
    opened, spans = open_columns(data)
    times = np.frombuffer(opened[slice(*spans.get(_TIMES, _ABSENT))], "<i8")
    late = np.flatnonzero(times >= min(time, _TIME_MAX))
    row = int(late[0]) if len(late) else 0
    seqnos = np.frombuffer(opened[slice(*spans.get(_SEQNOS, _ABSENT))], "<u4")
    return block.start + (int(seqnos[row]) - 1 if len(seqnos) else row)
