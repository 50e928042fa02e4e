"""Merging a range of one partition that is too large to be rewritten as a whole.

First the keys alone are compared, so that it is known which rows are superseded. Then only the blocks that lose
enough are written anew, a bounded group at a time, each group in one transaction, oldest first: a crash between
two leaves superseded rows, never a hole. What is written anew has the range's end for its horizon, because the
newer row of a key may lie anywhere up to there; blocks that lose nothing stay, markers and all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upr.storage.heads import Head, MergeRange, Replacement
from upr.storage.merge import (
    Encoded,
    checked,
    key_classes,
    keys_of,
    make_chunk,
    rebuild,
    tombstones_of,
)
from upr.storage.tombstones import Purge, PurgeLimits, purge_of
from upr_protocol.block import I64
from upr_protocol.errors import DataDamagedError
from upr_protocol.limits import BLOCK_COLUMN_BYTES

GROUP_BYTES = 8 * 2**20
GROUP_PLAIN_BYTES = 32 * 2**20
"""Blocks may be compressed, and few bytes become many in memory."""
ROWS_MAX = 2**20
KEYS_BYTES_MAX = 32 * 2**20
"""No more rows or keys than this are compared at once, in memory."""
PASSES_MAX = 16
"""A range with more is looked through so many times at most, each time for a part of the keys."""
WORTH_FRACTION = 0.1
"""Blocks are written anew when at least this part of the range's bytes goes."""
BLOCK_FRACTION = 0.05
"""And then those that lose at least this part of their rows."""
SMALL_BYTES = BLOCK_COLUMN_BYTES // 4
_ASSIGN_ROWS = 2**16
_NO_TOMBSTONES = (np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64))

ReadBlocks = Callable[[int, Sequence[int]], list[bytes]]
"""Partition and ends to the blocks; DataDamagedError when one is not there."""


class RangeTooLargeError(Exception):
    """The range has more keys than are compared."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Which rows of a range stay.

    Attributes:
        partition: whose.
        heads: its blocks, oldest first.
        keep: a flag for each row, one array a block.
        purge: the tombstones among what goes.
    """

    partition: int
    heads: tuple[Head, ...]
    keep: list[npt.NDArray[np.bool_]]
    purge: Purge | None

    @property
    def horizon(self) -> int:
        return max(head.horizon for head in self.heads)

    def groups(self) -> list[range]:
        """Return the groups of neighbouring blocks that are to be written anew, oldest first."""
        groups: list[range] = []
        chosen = self._chosen()
        first = size = plain = 0
        for i, head in enumerate(self.heads):
            full = size + head.size > GROUP_BYTES or plain + head.plain > GROUP_PLAIN_BYTES
            if i > first and (full or not chosen[i]):
                if chosen[first]:
                    groups.append(range(first, i))
                first, size, plain = i, 0, 0
            elif not chosen[first]:
                first, size, plain = i, 0, 0
            size += head.size
            plain += head.plain
        if chosen[first]:
            groups.append(range(first, len(self.heads)))
        return groups

    def _chosen(self) -> list[bool]:
        lost = [len(keep) - int(keep.sum()) for keep in self.keep]
        if self.purge is not None:
            # A key's older rows must go before its tombstone does, however few they are.
            chosen = [n > 0 for n in lost]
        else:
            shares = [n / max(len(keep), 1) for n, keep in zip(lost, self.keep, strict=True)]
            total = sum(head.size for head in self.heads)
            gone = sum(s * head.size for s, head in zip(shares, self.heads, strict=True))
            chosen = [gone >= WORTH_FRACTION * total and s >= BLOCK_FRACTION for s in shares]
        small = [head.plain < SMALL_BYTES for head in self.heads]
        for i in range(1, len(small)):
            if small[i - 1] and small[i]:
                chosen[i - 1] = chosen[i] = True
        return chosen


def examine(chosen: MergeRange, read: ReadBlocks, limits: PurgeLimits | None) -> Examined:
    """Compare the keys of a range.

    Args:
        limits: which tombstones may go, if the range begins at 0; None for none.

    Raises:
        RangeTooLargeError: it has more keys than are compared in PASSES_MAX passes.
        DataDamagedError, CorruptBlockError: a block is missing or fails its checks.
    """
    passes = 1
    while True:
        try:
            keep, tombstones = _compare(chosen, read, passes)
            break
        except RangeTooLargeError:
            passes *= 2
            if passes > PASSES_MAX:
                raise
    purge = None
    if limits is not None and chosen.start == 0:
        purge = _purge(chosen.partition, keep, tombstones, limits)
    bounds = np.cumsum([head.rows for head in chosen.heads])[:-1]
    return Examined(chosen.partition, chosen.heads, np.split(keep, bounds), purge)


def _compare(
    chosen: MergeRange, read: ReadBlocks, passes: int
) -> tuple[npt.NDArray[np.bool_], tuple[Any, ...]]:
    """Return a flag for each row, whether it is its key's newest; and the tombstones, as ``tombstones_of``."""
    keep = np.zeros(chosen.rows, bool)
    found = [_NO_TOMBSTONES]
    for number in range(passes):
        keys, rows = [], []
        first = size = taken = 0
        for block in _each(chosen.partition, chosen.heads, read):
            column = keys_of(block)
            mine = np.arange(len(column))
            if passes > 1:
                mine = np.flatnonzero(key_classes(block, passes) == number)
                column = column.take(pa.array(mine))
            size += column.nbytes
            taken += len(column)
            if size > KEYS_BYTES_MAX or taken > ROWS_MAX:
                raise RangeTooLargeError
            keys.append(column)
            rows.append(mine + first)
            if number == 0:
                deleted, seqnos, times = tombstones_of(block)
                found.append((deleted + first, seqnos, times))
            first += int(block.runs[0]["count"])
        if first != chosen.rows:
            raise DataDamagedError(
                f"partition {chosen.partition}: the blocks up to {chosen.end} have {first} rows, their heads say {chosen.rows}"
            )
        keep[np.concatenate(rows)[_newest(pa.concat_arrays(keys))]] = True
    return keep, tuple(np.concatenate(columns) for columns in zip(*found, strict=True))


def _purge(
    partition: int, keep: npt.NDArray[np.bool_], tombstones: tuple[Any, ...], limits: PurgeLimits
) -> Purge | None:
    """Take the tombstones that may go out of what is kept, and sum them up."""
    rows, seqnos, times = (column[keep[tombstones[0]]] for column in tombstones)
    where = np.full(len(rows), partition)
    free = limits.free(where, seqnos, times)
    going = free | limits.held(where, seqnos, times)
    if not going.any():
        return None
    keep[rows[going]] = False
    return purge_of(seqnos[going], free[going])


@dataclass(frozen=True, slots=True)
class Tombstones:
    """How many stored tombstones a partition has, superseded ones included.

    Attributes:
        count: all.
        old: those of a time or older.
        newest_old: the highest seqno among these, 0 for none.
        rows: rows of any kind.
    """

    count: int
    old: int
    newest_old: int
    rows: int


def count_tombstones(
    partition: int, heads: Sequence[Head], read: ReadBlocks, old: int
) -> Tombstones:
    """Count the tombstones of a partition's blocks.

    Args:
        old: microseconds since the epoch.

    Raises:
        DataDamagedError, CorruptBlockError: a block is missing or fails its checks.
    """
    count = old_ones = newest = 0
    for block in _each(partition, heads, read):
        _, seqnos, times = tombstones_of(block)
        count += len(seqnos)
        aged = seqnos[times <= old]
        old_ones += len(aged)
        newest = max(newest, int(aged.max()) if len(aged) else 0)
    return Tombstones(count, old_ones, newest, sum(head.rows for head in heads))


def _each(partition: int, heads: Sequence[Head], read: ReadBlocks) -> Iterator[Encoded]:
    """Yield blocks, checked, holding no more than a group of them."""
    first = size = 0
    for i, head in enumerate(heads):
        size += head.size
        if size >= GROUP_BYTES or i == len(heads) - 1:
            for data in read(partition, [h.end for h in heads[first : i + 1]]):
                yield checked(data)
            first, size = i + 1, 0


def _newest(keys: Any) -> npt.NDArray[np.bool_]:
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    newest: I64 = np.full(int(codes.max()) + 1 if len(codes) else 0, -1, np.int64)
    for first in range(0, len(codes), _ASSIGN_ROWS):
        # In pieces: one assignment of a million rows would hold the interpreter for too long.
        piece = codes[first : first + _ASSIGN_ROWS]
        newest[piece] = np.arange(first, first + len(piece))
    keep = np.zeros(len(codes), bool)
    keep[newest] = True
    return keep


def rewrite_group(
    examined: Examined,
    group: range,
    read: ReadBlocks,
    compress: Callable[[bytes], bytes] | None = None,
) -> Replacement:
    """Write one group of blocks without the rows that go.

    Raises:
        DataDamagedError, CorruptBlockError: a block is missing or fails its checks, or is not what was examined.
    """
    heads = [examined.heads[i] for i in group]
    blocks = list(_each(examined.partition, heads, read))
    keep = np.concatenate([examined.keep[i] for i in group])
    chunk = make_chunk(blocks)
    if len(chunk.seqnos) != len(keep):
        raise DataDamagedError(
            f"partition {examined.partition}: the blocks up to {heads[-1].end} changed while they were merged"
        )
    run = (examined.partition, heads[0].start, heads[-1].end, examined.horizon)
    new = [(end, data) for _, end, data in rebuild(chunk, np.flatnonzero(keep), run, compress)]
    return Replacement(
        examined.partition,
        [head.end for head in heads],
        new,
        examined.purge.seqno if examined.purge else 0,
    )
