"""Searches in stored blocks: the newest mutations of some keys, and the seqno at which a time was passed.

*Keys.* Blocks are searched from the newest to the oldest. Of most blocks the hashes of their keys are known: in memory
for the tail, in a table of their own for the store. So only the blocks are read that may have a wanted key, and a hash
decides nothing: the keys are compared. A block without hashes is read and compared whole. The values in memory are
bounded: when they exceed the limit of the answer, the last keys are dropped from the search with their values, and the
answer ends before them.

*Times.* Commit times rise with seqnos unless the clock was set back. So a binary search over heads of blocks finds the
block, and its column of times the row. If the clock was set back, the time is crossed several times, and the search
finds one of the crossings.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from upr.storage.blocks import (
    FEW,
    HEAD_BYTES,
    ROWS_AT_ONCE,
    SEQNOS,
    TIMES,
    BlockCursor,
    Encoded,
    StoredBlock,
    StoredRow,
    checked,
    column_of,
    head_of,
    key_hashes,
    keys_of,
    read_rows,
    rows_of,
    rows_with,
)
from upr.storage.keyspace import hash_of, hashes_of
from upr.storage.store import Store
from upr_protocol.block import I64, RUN_FIELDS, U32, U64, Runs
from upr_protocol.errors import CorruptBlockError, DataDamagedError, UprError
from upr_protocol.partitioning import partition_of, partitions_of

BITE_BYTES = 2 * 2**20
BITE_BLOCKS = 1000
"""Most bytes and blocks searched before other requests have their turn; one block may be larger."""
ROW_BYTES = 2**12
"""Cost of taking a row out of a block, in bytes that are checked."""
QUICK_BLOCKS = 8
QUICK_BYTES = 2**18
QUICK_ROWS = 2**19
"""Most blocks and bytes indexed, and rows compared for all keys, in a bite of about a millisecond at most."""


Newest = tuple[int, bytes | None]
"""Seqno and value of a key's newest mutation; None for a delete."""


class Lookup:
    """Lookup of keys and its results. For one thread at a time.

    Args:
        keys: in the order of the answer; one that comes again is looked up once.
        max_bytes: most bytes of values in the answer; a larger first value is kept.

    Attributes:
        numbers: of the keys, from 0 on.
        partitions: of each key.
        found: by the key's number.
        problems: errors of partitions that cannot be read.
        end: keys from this number on are not answered.
    """

    def __init__(self, keys: Sequence[bytes], max_bytes: int) -> None:
        keys = list(dict.fromkeys(keys))
        self.numbers = dict(zip(keys, range(len(keys)), strict=True))
        self._left = max_bytes
        self.found: dict[int, Newest] = {}
        self.problems: dict[int, UprError] = {}
        self.end = len(keys)
        if len(keys) > FEW:
            self.partitions: list[int] = partitions_of(keys).tolist()
            edges = np.cumsum([0, *map(len, keys)])
            self._hashes: list[int] = hashes_of(edges, b"".join(keys)).tolist()
        else:
            self.partitions = list(map(partition_of, keys))
            self._hashes = list(map(hash_of, keys))
        # Of each key 1 as long as it is sought, then 0.
        self._open = bytearray(b"\1") * len(keys)

    @property
    def pending(self) -> list[int]:
        """Return the partitions with keys that are not found yet."""
        return list(dict.fromkeys(compress(self.partitions, self._open)))

    def sought(self, partition: int | None = None) -> set[int]:
        """Return the hashes of the keys that are not found yet: of one partition, or of all."""
        if partition is None:
            return set(compress(self._hashes, self._open))
        return {self._hashes[number] for number in self._open_in(partition)}

    def fail(self, partitions: Iterable[int], why: UprError) -> None:
        """Fail the keys of partitions that are not found yet."""
        for partition in partitions:
            if self._close(partition):
                self.problems[partition] = why

    def settle(self, partitions: npt.NDArray[np.bool_]) -> None:
        """End the search in partitions (bool, shape (1024,)): keys not found do not exist."""
        for partition in self.pending:
            if partitions[partition]:
                self._close(partition)

    def search(self, block: Encoded) -> None:
        """Search all rows of a checked block of one partition, which is newer than those that are searched later."""
        numbers = self._open_in(int(block.runs["partition"][0]))
        if numbers and int(block.runs["count"][0]):
            keys = list(self.numbers)
            wanted = pa.array([keys[number] for number in numbers], pa.binary())
            rows = pc.is_in(keys_of(block), value_set=wanted)
            self.take(rows_of(block, np.flatnonzero(rows.to_numpy(zero_copy_only=False)).tolist()))

    def take(self, rows: Sequence[StoredRow]) -> int:
        """Take what is sought out of rows, the newest first, of a block that is newer than those that are searched later.

        Returns:
            What that cost, in bytes of a block that is checked.
        """
        number_of, partitions, is_open, found = (
            self.numbers.get,
            self.partitions,
            self._open,
            self.found,
        )
        left = self._left
        for partition, seqno, key, value in rows:
            number = number_of(key)
            # A writer may put a key into a partition that is not its own; such a row does not match.
            if number is None or not is_open[number] or partitions[number] != partition:
                continue
            is_open[number] = 0
            found[number] = (seqno, value)
            if value:
                self._left -= len(value)
                if self._left < 0:
                    self._shorten()
        return ROW_BYTES * len(rows) + max(left - self._left, 0)

    def _open_in(self, partition: int) -> list[int]:
        """Return the numbers of a partition's keys that are not found yet."""
        return [number for number in self._numbers_in.get(partition, ()) if self._open[number]]

    def _close(self, partition: int) -> bool:
        """Seek a partition's keys no more; return whether there were any."""
        numbers = self._open_in(partition)
        for number in numbers:
            self._open[number] = 0
        return bool(numbers)

    @cached_property
    def _numbers_in(self) -> dict[int, list[int]]:
        """Numbers of a partition's keys, but for those that were found before it is first looked at."""
        found: dict[int, list[int]] = {}
        for number in compress(range(len(self._open)), self._open):
            found.setdefault(self.partitions[number], []).append(number)
        return found

    def _shorten(self) -> None:
        """End the answer before the last keys that are held, as long as the values up to them exceed the limit."""
        while self._left < 0 and len(self.found) > 1:
            self.end = max(self.found)
            self._left += len(self.found.pop(self.end)[1] or b"")
        self._open[self.end :] = bytes(len(self._open) - self.end)


def newest_with(hashes: U32, sought: set[int]) -> I64:
    """Return the newest row, ascending, of each hash that is there, and take these hashes out of ``sought``."""
    if len(sought) > FEW:
        rows = rows_with(hashes, sought)[::-1]
        found, at = np.unique(hashes[rows], return_index=True)
        sought.difference_update(found.tolist())
        return np.sort(rows[at])
    newest = []
    for one in list(sought):
        # From the end, in parts: what is written all the time has many rows, and only the last one matters.
        for end in range(len(hashes), 0, -ROWS_AT_ONCE):
            first = max(end - ROWS_AT_ONCE, 0)
            rows = np.flatnonzero(hashes[first:end] == np.uint32(one))
            if len(rows):
                newest.append(first + rows[-1])
                sought.remove(one)
                break
    return np.array(sorted(newest), np.int64)


def places_of(rows: I64, row_ends: I64) -> dict[int, list[int]]:
    """Return the rows of several blocks by the block's place, counted from its first row.

    Args:
        rows: ascending, counted from the first block's first row.
        row_ends: rows of a block and those before it.
    """
    places = np.searchsorted(row_ends, rows, side="right").tolist()
    found: dict[int, list[int]] = {}
    for place, row in zip(places, rows.tolist(), strict=True):
        found.setdefault(place, []).append(row - (int(row_ends[place - 1]) if place else 0))
    return found


class InTail(Protocol):
    """Tail entry as a search sees it: an encoded block and its run table."""

    runs: Runs
    data: bytes


@dataclass(frozen=True, slots=True)
class TailPart:
    """Consecutive entries of the tail with the hashes of their keys.

    Attributes:
        first: number of the first entry.
        entries: oldest first.
        row_ends: rows in an entry and those before it.
        hashes: of the rows' keys, 4 bytes each.
        damaged: numbers of entries that failed their checks, ascending; they have no rows here.
    """

    first: int
    entries: list[InTail]
    row_ends: I64
    hashes: U32
    damaged: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.entries)

    @classmethod
    def of(cls, first: int, entries: list[InTail]) -> "TailPart":
        """Check entries, and build their part."""
        good: list[Encoded] = []
        counts, damaged = [], []
        for number, entry in enumerate(entries, first):
            try:
                good.append(checked(entry.data))
                counts.append(int(entry.runs["count"].sum()))
            except CorruptBlockError:
                damaged.append(number)
                counts.append(0)
        hashes = [key_hashes(block) for block in good] or [np.zeros(0, np.uint32)]
        return cls(first, entries, np.cumsum(counts), np.concatenate(hashes), damaged)

    def joined(self, after: "TailPart") -> "TailPart":
        """Return this part and the one after it as one."""
        ends = np.concatenate((self.row_ends, after.row_ends + len(self.hashes)))
        hashes = np.concatenate((self.hashes, after.hashes))
        entries = self.entries + after.entries
        return TailPart(self.first, entries, ends, hashes, self.damaged + after.damaged)

    def from_entry(self, number: int) -> "TailPart":
        """Return the part without the entries below a number."""
        gone = number - self.first
        if gone <= 0:
            return self
        rows = int(self.row_ends[gone - 1])
        damaged = [one for one in self.damaged if one >= number]
        # A copy, because a view would keep what it leaves out.
        hashes = self.hashes[rows:].copy()
        return TailPart(number, self.entries[gone:], self.row_ends[gone:] - rows, hashes, damaged)

    def candidates(self, sought: set[int], *, newest: bool) -> list[tuple[InTail, list[int]]]:
        """Return entries that may have keys of some hashes, newest first, and which of their rows.

        Damaged entries are among them, without rows.

        Args:
            newest: only the newest row of each hash, which is taken out of ``sought``.
        """
        rows = (newest_with if newest else rows_with)(self.hashes, sought)
        found: dict[int, list[int]] = {number - self.first: [] for number in self.damaged}
        found.update(places_of(rows, self.row_ends))
        return [(self.entries[place], found[place]) for place in sorted(found, reverse=True)]


class TailKeys:
    """Index of the keys in a tail, made by searches, so that a bucket that is only written to pays nothing.

    The event loop and reader threads extend it, and the flush drops from it what it drops from the tail.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._floor = 0
        self.parts: list[TailPart] = []
        """Oldest first, without a gap. A list is never changed, but replaced."""

    @property
    def end(self) -> int:
        """Return the number of the first entry behind the index."""
        parts = self.parts
        return parts[-1].end if parts else self._floor

    def extend(self, first: int, entries: Sequence[InTail]) -> bool:
        """Add some entries behind the end; return whether all are in the index.

        Args:
            first: number of the first one.
            entries: consecutive.
        """
        parts = before = self.parts
        at = max(first, parts[-1].end if parts else self._floor)
        new: list[InTail] = []
        size = 0
        for entry in entries[at - first :]:
            new.append(entry)
            size += len(entry.data)
            if size >= BITE_BYTES or len(new) >= BITE_BLOCKS:
                break
        if not new:
            return True
        parts = parts if parts and parts[-1].end == at else []
        part = TailPart.of(at, new)
        # A part is at least twice as large as the one after it, so that there are few.
        while parts and len(parts[-1].entries) < 2 * len(part.entries):
            part = parts[-1].joined(part)
            parts = parts[:-1]
        with self._lock:
            # Else another thread or the flush was faster, and the next call tries again.
            if self.parts is before:
                self.parts = [*parts, part]
        return self.end >= first + len(entries)

    def drop_before(self, number: int) -> None:
        """Drop the entries below a number, which are in the store."""
        with self._lock:
            self._floor = number
            self.parts = [part.from_entry(number) for part in self.parts if part.end > number]


class TailSearch:
    """Search of the tail of one moment.

    Args:
        keys: the index of the tail.
        first: number of the first of some entries that reach from the index's end, or below, to the tail's end.
        entries: these.
    """

    def __init__(
        self, lookup: Lookup, keys: TailKeys, first: int, entries: Sequence[InTail]
    ) -> None:
        self._lookup = lookup
        self._keys = keys
        self._first = first
        self._entries = entries
        self._left: list[tuple[InTail, list[int]]] | None = None
        self._matched: set[int] = set()

    @property
    def is_quick(self) -> bool:
        """Whether the first bite takes about a millisecond at most, if it searches no more than BITE_BYTES."""
        if len(self._entries) > QUICK_BLOCKS:
            return False
        size = rows = 0
        for entry in self._entries:
            size += len(entry.data)
        for part in self._keys.parts:
            rows += len(part.hashes)
        return size <= QUICK_BYTES and rows * len(self._lookup.numbers) <= QUICK_ROWS

    def bite(self, most: float = inf) -> bool:
        """Index or search some entries, from the newest on; return whether the search is done.

        Args:
            most: bytes of an entry, which goes to the next bite if it has more.
        """
        if self._left is None:
            if not self._keys.extend(self._first, self._entries):
                return False
            sought = self._lookup.sought()
            self._matched = set(sought)
            self._left = self._places(sought, newest=True)
            self._matched -= sought
        size = 0
        while self._left and size < BITE_BYTES:
            entry, rows = self._left[-1]
            if len(entry.data) > most:
                break
            self._left.pop()
            try:
                # One with rows in the index passed its checks when it was indexed; a damaged one has none.
                found = read_rows(entry.data, rows, check=not rows)
            except CorruptBlockError as error:
                partitions = entry.runs["partition"].tolist()
                self._lookup.fail(partitions, DataDamagedError(error.message))
                continue
            size += self._lookup.take(found) if rows else len(entry.data)
        if not self._left and self._matched:
            # The newest row of a hash was of another key: look at all its rows.
            again = self._matched & self._lookup.sought()
            self._matched = set()
            self._left = self._places(again, newest=False) if again else []
        return not self._left

    def _places(self, sought: set[int], *, newest: bool) -> list[tuple[InTail, list[int]]]:
        """Return the entries to look at, and their rows; the newest entry is the last."""
        found: list[tuple[InTail, list[int]]] = []
        for part in reversed(self._keys.parts):
            found += part.candidates(sought, newest=newest)
        return found[::-1]


class StoreSearch:
    """Search of the stored blocks, partition by partition.

    Args:
        floors: blocks at or below these seqnos were searched before, uint64, shape (1024,).
        ends: those above are not searched; each is the end of a block, the newest one by now or before.
    """

    def __init__(self, lookup: Lookup, store: Store, floors: U64, ends: U64) -> None:
        self._lookup = lookup
        self._store = store
        self._floors = floors
        self._ends = ends
        self._left: list[int] | None = None
        self._at: int | None = None

    def bite(self) -> bool:
        """Search some blocks; return whether the search is done.

        Between two bites blocks may be compacted: the search continues with the block that contains its seqno.
        """
        if self._left is None:
            self._left = self._lookup.pending
        if not self._left:
            return True
        size = 0
        with self._store.look() as cursor:
            while self._left and size < BITE_BYTES:
                partition = self._left[-1]
                try:
                    size += self._search_partition(cursor, partition, BITE_BYTES - size)
                except (CorruptBlockError, DataDamagedError) as error:
                    self._lookup.fail([partition], _damaged(partition, error))
                    self._next_partition()
        return not self._left

    def _search_partition(self, cursor: BlockCursor, partition: int, most: int) -> int:
        """Search the next blocks of a partition, of some bytes or more; return what was read."""
        lookup, floor = self._lookup, self._floors.item(partition)
        size = 0
        if self._at is None:
            self._at = self._ends.item(partition)
        while self._at > floor and (sought := lookup.sought(partition)):
            if size >= most:
                return size
            found, looked_at = cursor.candidate(partition, self._at, floor, BITE_BYTES, sought)
            size += looked_at
            if found is None:
                end = cursor.containing(partition, self._at).end
                size += self._search_whole(cursor, partition, end)
                continue
            start, end, count, rows = found
            if rows:
                data = cursor.mapped(partition, end)
                run = (partition, count, start, end)
                if len(data) < HEAD_BYTES or RUN_FIELDS.unpack_from(data, 2)[:4] != run:
                    size += self._search_whole(cursor, partition, end)
                    continue
                size += len(data) + lookup.take(read_rows(data, rows, check=True))
            self._at = start
        self._next_partition()
        return size

    def _search_whole(self, cursor: BlockCursor, partition: int, end: int) -> int:
        data = cursor.data(partition, end)
        # A block under another one's key would send the search up again, or past blocks that were not searched.
        head = head_of(data, len(data), partition, end)
        self._lookup.search(checked(data))
        self._at = head.start
        return len(data)

    def _next_partition(self) -> None:
        assert self._left is not None
        self._left.pop()
        self._at = None


def _damaged(partition: int, error: UprError) -> DataDamagedError:
    return DataDamagedError(
        f"partition {partition}: a stored block is damaged: {error.message}",
        hint="restore the partition from a replica or a backup",
    )


SEARCH_BYTES = 4 * 2**20
SEARCH_PARTITIONS = 64
"""Limits of one bite of a search, which ends with the partition that reaches either."""
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
                result = _damaged(partition, error)
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
        while block is not None and not block.rows:
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


def _row_below(data: bytes, block: StoredBlock, time: int) -> int:
    """Return the seqno right below a block's first row that was committed at or after the time."""
    columns = checked(data).opened()
    times = np.frombuffer(column_of(columns, TIMES), "<i8")
    late = np.flatnonzero(times >= min(time, _TIME_MAX))
    row = int(late[0]) if len(late) else 0
    seqnos = np.frombuffer(column_of(columns, SEQNOS), "<u4")
    return block.start + (int(seqnos[row]) - 1 if len(seqnos) else row)
