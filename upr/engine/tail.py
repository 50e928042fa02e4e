"""The tail: numbered blocks that are not yet in the store, in the order in which they were numbered.

Small writes that follow each other gather in one entry, the open one, until somebody asks for it, or for the end of the
tail: the committer, when the commit before is on disk; a follower that reads what is not durable; a cut. Then their
blocks become one, so that journal, flush and readers pay for a block once a commit and not once a write. An entry whose
number is known never changes.

A commit may still be small. So readers that are behind are given many small entries as one, a window, which is made
when the first of them comes by.

Entries are numbered from 0 for as long as the process lives; readers remember the number of the next entry
they want, never an entry. Every MARK_EVERY entries, or MARK_RUNS runs, the high seqnos of all partitions are kept, so that the
entry from which a partition must be read is found without looking at all of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upr.storage.blocks import put_ends, summary
from upr.storage.journal import NumberedWrite
from upr_protocol.block import I64, RUN, U64, Block, Runs, join_blocks, joined_runs, select_runs
from upr_protocol.errors import CorruptBlockError
from upr_protocol.limits import BLOCK_COLUMN_BYTES, BLOCK_ROWS_MAX, PARTITIONS, SHARED_BYTES
from upr_protocol.wire.codec import encode_block, reopen_block

MARK_EVERY = 256
MARK_RUNS = 2048
SMALL_BYTES = 8 * 2**10
"""Columns of this size or more are an entry of their own: to join them costs more a row than the entry does, and a
quarter to a half of what a batch of some hundred rows costs otherwise."""
GATHER_MICROS = 100_000
"""Longest time over which writes gather, because their rows are dated alike."""
WINDOW_BYTES = 256 * 2**10
"""Most bytes of the entries that readers are given as one."""
WINDOWS_KEPT = 16
"""Windows that are kept for further readers; 4 MiB together."""
_ENTRY_OVERHEAD_BYTES = 600
_WRITE_OVERHEAD_BYTES = 200
_ROW_OVERHEAD_BYTES = 4
"""The hash of a row's key, in the index that a search makes."""


class Shared:
    """Values that readers of the tail made and others can use: the newest, SHARED_BYTES of them.

    Attributes:
        bytes: about how much memory they hold.
    """

    def __init__(self) -> None:
        self._values: dict[object, tuple[object, int]] = {}
        self.bytes = 0

    def get(self, key: object) -> object:
        found = self._values.get(key)
        return found and found[0]

    def put(self, key: object, value: object, size: int) -> None:
        """Keep a value of about ``size`` bytes; one that exceeds a quarter of SHARED_BYTES is not kept."""
        if size > SHARED_BYTES // 4:
            return
        size += _ENTRY_OVERHEAD_BYTES
        self.bytes += size - self._values.pop(key, (None, 0))[1]
        self._values[key] = value, size
        while self.bytes > SHARED_BYTES:
            self.bytes -= self._values.pop(next(iter(self._values)))[1]


@dataclass(slots=True)
class TailEntry:
    """One numbered block.

    Attributes:
        runs: its run table.
        data: its encoded bytes, which journal, frames and flush use as they are.
        writes: of producers, in the order in which they were numbered. One without runs of its own is the whole block.
        time: when the newest of it was numbered, microseconds since the epoch.
        commit: the journal commit it belongs to, 0 while none was taken.
    """

    runs: Runs
    data: bytes
    writes: Sequence[NumberedWrite]
    time: int
    commit: int = 0
    _by_producer: dict[bytes, list[NumberedWrite]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def writes_of(self, producer: bytes) -> Sequence[NumberedWrite]:
        """Return a producer's writes; of all at once, because after a restart each of them asks."""
        if self._by_producer is None:
            self._by_producer = {}
            for write in self.writes:
                self._by_producer.setdefault(write.producer, []).append(write)
        return self._by_producer.get(producer, ())

    @property
    def size(self) -> int:
        rows, _ = summary(self.runs)
        writes = sum([len(write.runs) + _WRITE_OVERHEAD_BYTES for write in self.writes])
        overhead = _ENTRY_OVERHEAD_BYTES + rows * _ROW_OVERHEAD_BYTES
        return len(self.data) + self.runs.nbytes + overhead + writes

    def block(self) -> Block:
        """Parse the bytes. Their CRCs are verified again, because they may have been in memory for long."""
        return reopen_block(self.data)

    def runs_of(self, write: NumberedWrite) -> Runs:
        """Return the table of what one of the writes wrote."""
        return np.frombuffer(write.runs, RUN) if write.runs else self.runs

    def only(self, keep: npt.NDArray[np.bool_]) -> "TailEntry":
        """Return the entry of the runs where ``keep``, one a run, is true."""
        if keep.all():
            return self
        block = select_runs(self.block(), keep)
        kept = np.zeros(PARTITIONS, bool)
        kept[block.runs["partition"]] = True
        writes = [write._replace(runs=_of_partitions(write.runs, kept)) for write in self.writes]
        alone = len(self.writes) == 1 and not self.writes[0].runs
        return TailEntry(
            block.runs,
            encode_block(block),
            self.writes if alone else [write for write in writes if write.runs],
            self.time,
            self.commit,
        )


def _of_partitions(runs: bytes, kept: npt.NDArray[np.bool_]) -> bytes:
    table = np.frombuffer(runs, RUN)
    data: bytes = table[kept[table["partition"]]].tobytes()
    return data


def join_encoded(encoded: Sequence[bytes]) -> Block | None:
    """Return encoded blocks as one; None if not each is all rows of complete runs, or bytes have changed.

    None too where empty cells of further columns would take more than the blocks do.
    """
    try:
        blocks = [reopen_block(data) for data in encoded]
    except CorruptBlockError:
        # Each block by itself ends only the streams that read it.
        return None
    if len({bool(block.value_offsets) for block in blocks}) > 1:
        return None
    if any(block.seqnos or block.times for block in blocks):
        return None
    if any(block.further for block in blocks):
        ids = {column.id for block in blocks for column in block.further}
        missing = sum(block.rows * (len(ids) - len(block.further)) for block in blocks)
        if 4 * missing > sum(map(len, encoded)):
            return None
    runs = joined_runs([block.runs for block in blocks])
    ends, times = runs["end_seqno"], runs["time"]
    if (runs["horizon"] != ends).any() or (runs["count"] != ends - runs["start_seqno"]).any():
        return None
    # A row has the same time for every reader, joined or not.
    return join_blocks(blocks, dated=bool((times != times[0]).any()))


def join_entries(entries: Sequence[TailEntry]) -> TailEntry | None:
    """As ``join_encoded``, of entries."""
    block = join_encoded([entry.data for entry in entries])
    return (
        None if block is None else TailEntry(block.runs, encode_block(block), (), entries[-1].time)
    )


class Tail:
    """The entries from ``first`` to ``end`` - 1.

    Attributes:
        first: number of the oldest entry.
        taken: entries below this number were handed to the committer.
        durable: entries below this number are in the journal, fsynced.
        bytes: about how much memory the entries hold.
        volatile_bytes: the part of it that is not durable yet.
        shared: what its readers share.
    """

    def __init__(self) -> None:
        self._entries: list[TailEntry] = []
        # For each entry the size of it and all before it, so that no sum is taken over thousands of small ones.
        self._sums: list[int] = []
        self._appended = 0
        self._high = np.zeros(PARTITIONS, np.uint64)
        self._marks: list[tuple[int, U64]] = []
        self.first = self.taken = self.durable = 0
        self.bytes = 0
        self.volatile_bytes = 0
        self._unmarked_runs = 0
        # The open entry: its blocks, numbered, the writes in it, its size, columns, rows and ids of further columns, and
        # when it was begun.
        self._open: list[Block] = []
        self._writes: list[NumberedWrite] = []
        self._open_size = self._open_columns = self._open_rows = 0
        self._open_ids: set[int] = set()
        self._opened = self._newest = 0
        # Where windows begin, ascending; the size through the newest of them; the windows made last, None: not possible.
        self._bounds = [0]
        self._bound_size = 0
        self._windows: dict[int, TailEntry | None] = {}
        self.shared = Shared()

    @property
    def end(self) -> int:
        """The number that the next entry will get; what is numbered later has it, or a larger one."""
        if self._open:
            self.close_open()
        return self.first + len(self._entries)

    @property
    def newest_time(self) -> int:
        """When the newest row was numbered, microseconds since the epoch; 0 without any."""
        self.close_open()
        return self._entries[-1].time if self._entries else 0

    def __getitem__(self, number: int) -> TailEntry:
        if number == self.first + len(self._entries):
            self.close_open()
        return self._entries[number - self.first]

    def range(self, first: int, end: int) -> list[TailEntry]:
        """Return the entries from one number up to before another."""
        return self._entries[first - self.first : end - self.first]

    def reach(self, max_bytes: int, end: int) -> int:
        """Return the number, at most ``end``, behind the oldest entries that ``max_bytes`` have room for.

        At least one entry lies below it unless ``end`` is ``first``.
        """
        before = self._appended - self.bytes
        fitting = bisect_right(self._sums, before + max_bytes)
        return min(self.first + max(fitting, 1), end)

    def _size_through(self, number: int) -> int:
        """Return the size of all entries ever appended below a number that is not below ``first``."""
        if number == self.first:
            return self._appended - self.bytes
        return self._sums[number - self.first - 1]

    def make_way(self, block: Block, now: int) -> int:
        """Close the open entry unless a block may join it; return the bytes of the empty cells that it takes to join it.

        Before the block is numbered, because there may be no memory for it.

        Args:
            now: microseconds since the epoch, never below that of the block before.
        """
        columns, rows, filling = block.column_bytes, block.rows, 0
        if self._open and (block.further or self._open_ids):
            filling = self._filling(block)
        if self._open and (
            columns + filling >= SMALL_BYTES
            or self._open_columns + columns + filling > BLOCK_COLUMN_BYTES
            or self._open_rows + rows > BLOCK_ROWS_MAX
            or now - self._opened > GATHER_MICROS
        ):
            self.close_open()
            filling = 0
        return filling

    def write(self, block: Block, producer: bytes, number: int, now: int, filling: int) -> int:
        """Add a numbered block and return the number of the entry that it is in, or will be.

        Args:
            producer, number: whose write it is; empty and 0 without a producer.
            now, filling: see ``make_way``.
        """
        columns, rows = block.column_bytes + filling, block.rows
        if not self._open:
            self._opened = now
            self._open_size = self._open_columns = self._open_rows = 0
            self._open_ids = set()
        self._open.append(block)
        if block.further:
            self._open_ids.update([column.id for column in block.further])
        if producer:
            self._writes.append(NumberedWrite(producer, number, block.runs.tobytes()))
        self._newest = now
        self._open_columns += columns
        self._open_rows += rows
        # At least what the entry will have, so that room that is promised is there.
        overhead = _WRITE_OVERHEAD_BYTES + _ENTRY_OVERHEAD_BYTES + rows * _ROW_OVERHEAD_BYTES
        self._grow(columns + 2 * block.runs.nbytes + overhead)
        entry = self.first + len(self._entries)
        if columns >= SMALL_BYTES:
            self.close_open()
        return entry

    def _filling(self, block: Block) -> int:
        """Return the bytes of the empty cells that it takes to join a block with the open entry."""
        own = {column.id for column in block.further}
        missing = len(own - self._open_ids) * self._open_rows
        return 4 * (missing + len(self._open_ids - own) * block.rows)

    def close_open(self) -> None:
        """Make an entry of what has gathered; what is numbered later comes into another one."""
        if not self._open:
            return
        block = join_blocks(self._open)
        writes = tuple(self._writes)
        if len(self._open) == 1:
            writes = tuple([NumberedWrite(write.producer, write.number) for write in writes])
        entry = TailEntry(block.runs, encode_block(block), writes, self._newest)
        self._open, self._writes = [], []
        self._grow(-self._open_size)
        self.append(entry)

    def _grow(self, size: int) -> None:
        """Count bytes of the open entry."""
        self._open_size += size
        self._appended += size
        self.bytes += size
        self.volatile_bytes += size

    def append(self, entry: TailEntry) -> int:
        """Add an entry and return its number."""
        number = self.end
        size = entry.size
        self._entries.append(entry)
        self._appended += size
        self._sums.append(self._appended)
        put_ends(entry.runs, self._high)
        self.bytes += size
        self.volatile_bytes += size
        self._unmarked_runs += len(entry.runs)
        if (number + 1) % MARK_EVERY == 0 or self._unmarked_runs >= MARK_RUNS:
            self._unmarked_runs = 0
            self._marks.append((number + 1, self._high.copy()))
        return number

    def mark_durable(self, count: int) -> list[TailEntry]:
        """Record that the next ``count`` entries are on disk, and return them."""
        entries = self.range(self.durable, self.durable + count)
        for number in range(self.durable, self.durable + count):
            if self._sums[number - self.first] - self._bound_size > WINDOW_BYTES:
                # Before the entry that would not fit; one that is too large is a window alone.
                if number > self._bounds[-1]:
                    self._bounds.append(number)
                self._bound_size = self._size_through(number)
        self.durable += count
        self.volatile_bytes = self._appended - self._size_through(self.durable)
        return entries

    def window(self, number: int) -> tuple[TailEntry, int] | None:
        """Return neighbouring entries as one, and the number behind them, where a window begins at a number.

        None where none does, or its entries are not small, or cannot be joined. It has no writes: it is for readers only.
        """
        at = bisect_left(self._bounds, number)
        if self._bounds[at : at + 1] != [number] or at + 1 == len(self._bounds):
            return None
        end = self._bounds[at + 1]
        if number < self.first or end - number < max(WINDOW_BYTES // SMALL_BYTES, 2):
            return None
        if number not in self._windows:
            if len(self._windows) == WINDOWS_KEPT:
                del self._windows[next(iter(self._windows))]
            self._windows[number] = join_entries(self.range(number, end))
        window = self._windows[number]
        return None if window is None else (window, end)

    def find(self, partitions: I64, seqnos: U64) -> Iterator[tuple[int, I64]]:
        """Yield entry numbers, each with the partitions whose first rows above their seqno lie in that entry or a later one.

        At most MARK_EVERY entries and a window too early; readers skip runs that end at or below their seqno. A number may
        come again.
        """
        # First, as this puts the newest rows into an entry.
        end = self.end
        read = seqnos >= self._high[partitions]
        if read.any():
            yield end, partitions[read]
        # By halving, all at once: most readers have read as far in all partitions.
        halves = [(0, len(self._marks), np.flatnonzero(~read))]
        while halves:
            low, high, those = halves.pop()
            if not len(those):
                continue
            if low == high:
                yield self._begin_at(low), partitions[those]
                continue
            middle = (low + high) // 2
            above = self._marks[middle][1][partitions[those]] > seqnos[those]
            halves += [(low, middle, those[above]), (middle + 1, high, those[~above])]

    def _begin_at(self, mark: int) -> int:
        """Return where readers begin that have read up to the mark before this one."""
        entry = max(self._marks[mark - 1][0], self.first) if mark else self.first
        # Readers that begin where a window does can be given it, and go on together.
        window = bisect_right(self._bounds, entry)
        return max(self._bounds[window - 1], self.first) if window else self.first

    def find_time(self, time: int) -> int:
        """Return the number of the first entry committed at ``time``, microseconds since the epoch, or later; ``end`` if there is none."""
        self.close_open()
        return self.first + bisect_left(self._entries, time, key=lambda entry: entry.time)

    def high_at(self, number: int) -> U64:
        """Return each partition's newest seqno in the entries below a number, shape (1024,).

        0 where there is none in them; a partition's entries that were dropped may count or not.
        """
        mark = bisect_right(self._marks, number, key=lambda m: m[0])
        first, high = self.first, np.zeros(PARTITIONS, np.uint64)
        if mark and self._marks[mark - 1][0] >= self.first:
            first, high = self._marks[mark - 1][0], self._marks[mark - 1][1].copy()
        for entry in self.range(first, number):
            high[entry.runs["partition"]] = entry.runs["end_seqno"]
        return high

    def drop_before(self, number: int) -> None:
        """Drop the entries below a number, which are in the store."""
        gone = number - self.first
        self.bytes = self._appended - self._size_through(number)
        del self._entries[:gone], self._sums[:gone]
        self.first = number
        self._marks = [mark for mark in self._marks if mark[0] > number]
        # The newest bound stays, also below: the next one is counted from it.
        self._bounds = [*(b for b in self._bounds[:-1] if b >= number), self._bounds[-1]]
        self._windows = {b: window for b, window in self._windows.items() if b >= number}
        self.shared = Shared()
