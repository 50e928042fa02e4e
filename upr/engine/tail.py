"""The tail: numbered blocks that are not yet in the store, in the order in which they were numbered.

Entries are numbered from 0 for as long as the process lives; readers remember the number of the next entry
they want, never an entry. Every MARK_EVERY entries, or MARK_RUNS runs, the high seqnos of all partitions are kept, so that the
entry from which a partition must be read is found without looking at all of them.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from upr.storage.journal import JournalEntry
from upr_protocol.block import U64, Block, Runs
from upr_protocol.limits import PARTITIONS, SHARED_BYTES
from upr_protocol.wire.codec import decode_block

MARK_EVERY = 256
MARK_RUNS = 2048
_ENTRY_OVERHEAD_BYTES = 600


class Shared:
    """Values that readers of the tail made and others can use: the newest, SHARED_BYTES of them.

    Attributes:
        bytes: about how much memory they hold.
    """

    def __init__(self) -> None:
        self._values: dict[object, tuple[object, int]] = {}
        self.bytes = 0

    def get(self, key: object) -> object:
        """Return the value of a key, None if there is none."""
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
        producer, number: who wrote it; empty and 0 without a producer.
        time: when it was numbered, microseconds since the epoch.
        commit: the journal commit it belongs to, 0 while none was taken.
    """

    runs: Runs
    data: bytes
    producer: bytes
    number: int
    time: int
    commit: int = 0

    @property
    def size(self) -> int:
        return len(self.data) + self.runs.nbytes + _ENTRY_OVERHEAD_BYTES

    def block(self) -> Block:
        """Parse the bytes and verify them again, because they may have been in memory for long."""
        return decode_block(self.data)

    def journal_entry(self) -> JournalEntry:
        return JournalEntry(self.producer, self.number, self.data)


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
        self.shared = Shared()

    @property
    def end(self) -> int:
        """The number that the next entry will get."""
        return self.first + len(self._entries)

    def __getitem__(self, number: int) -> TailEntry:
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

    def append(self, entry: TailEntry) -> int:
        """Add an entry and return its number."""
        number = self.end
        size = entry.size
        self._entries.append(entry)
        self._appended += size
        self._sums.append(self._appended)
        self._high[entry.runs["partition"]] = entry.runs["end_seqno"]
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
        self.durable += count
        self.volatile_bytes = self._appended - self._size_through(self.durable)
        return entries

    def find(self, partition: int, seqno: int) -> int:
        """Return an entry number at or below the first entry with rows above ``seqno``.

        At most MARK_EVERY entries too early; readers skip runs that end at or below their seqno.
        """
        if seqno >= int(self._high[partition]):
            return self.end
        mark = bisect_left(self._marks, True, key=lambda m: bool(m[1][partition] > seqno))
        return max(self._marks[mark - 1][0], self.first) if mark else self.first

    def find_time(self, time: int) -> int:
        """Return the number of the first entry that was numbered at or after a time, ``end`` if there is none.

        Args:
            time: microseconds since the epoch.
        """
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
