"""Compaction of blocks: vectorised, the newest row of a key wins; a flush builds its blocks with it too.

The input is encoded blocks in the order of their numbering; the output is encoded blocks of one run each. A result has
the largest horizon of its inputs, so it ends in a marker only if they did. A result larger than a block becomes a
stretch: several runs that share one horizon.

The work is done a chunk (some MiB of input) or a slice (some partitions) at a time: a single call over everything would
hold the interpreter lock and stop the event loop of the process.

Small ranges of several partitions are compacted together, each rewritten completely (``merge_direct``). In a range too
large for that, the keys are compared first, to find the superseded rows. Then only the blocks that lose enough rows are
rewritten, a bounded group at a time, each group in one transaction, oldest first: a crash between two leaves superseded
rows, never a hole. A rewritten block has the range's end as its horizon, because the newer row of a key may be anywhere
up to there. Other blocks keep their horizons and markers.

A tombstone may be purged only when no older row of its key is left: in a compaction from 0, which sees and drops every
older row of the key.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upr.storage.blocks import (
    KEY_OFFSETS,
    KEYS,
    OPS,
    SEQNOS,
    TIMES,
    VALUE_OFFSETS,
    VALUES,
    BlockRange,
    Compress,
    Encoded,
    Head,
    Piece,
    ReadBlocks,
    Replacement,
    SortedRows,
    Sparse,
    cells_of,
    checked,
    column_of,
    each_checked,
    further_cells,
    joined_cells,
    key_hashes,
    keys_of,
    merge_compiled,
    raw_cells,
    tombstones_of,
)
from upr.storage.keyspace import hashes_of
from upr_protocol.block import I64, RUN, U32, U64, Mask, Runs, joined_runs
from upr_protocol.errors import CorruptBlockError, DataDamagedError, UprError
from upr_protocol.limits import BLOCK_COLUMN_BYTES, PARTITIONS
from upr_protocol.wire.codec import further_in, plain_bytes


class PurgeLimits(NamedTuple):
    """Limits of a purge, by partition; seqnos of shape (1024,), times in microseconds since the epoch.

    Attributes:
        passed, old: tombstones at or below the seqno, and of the time or older, may be purged.
        never, very_old: the same for tombstones that streams and consumers no longer hold. No tombstone above ``never``
            may be purged.
    """

    passed: U64
    old: int
    never: U64
    very_old: int

    def going(self, partitions: I64, seqnos: U64, times: I64) -> tuple[Mask, Mask]:
        """Return which tombstones may be purged, and which whether or not readers have passed them; a flag a row."""
        free = (seqnos <= self.never[partitions]) & (times <= self.very_old)
        return free | (seqnos <= self.passed[partitions]) & (times <= self.old), free


@dataclass(frozen=True, slots=True)
class Purge:
    """Tombstones that a compaction of one partition drops.

    Attributes:
        seqno: the newest of them, the new purge seqno.
        held_seqno: the newest of those purged only because every reader has passed them; 0 for none.
        count: how many there are.
    """

    seqno: int
    held_seqno: int
    count: int


def purge_of(seqnos: U64, free: Mask) -> Purge:
    """Return the purge of rows: their seqnos, at least one, and a flag for each that no reader holds."""
    held = seqnos[~free]
    return Purge(int(seqnos.max()), int(held.max()) if len(held) else 0, len(seqnos))


CHUNK_BYTES = 8 * 2**20
CHUNK_ROWS = 2**17
"""Rows of a chunk: by them goes what it takes beside its bytes, in arrays and while it is made."""
SLICE_BYTES = 8 * 2**20
SLICE_PARTITIONS = 128
ALIKE_FRACTION = 0.1
"""Share of rows that repeat a hash above which all keys are compared: to choose those that must be would cost more."""


class Chunk:
    """Consecutive blocks that are merged together.

    Attributes:
        runs: the run tables of the blocks, end to end.
    """

    def __init__(self, blocks: Sequence[Encoded]) -> None:
        self.blocks = blocks
        self.runs = joined_runs([block.runs for block in blocks])
        self._sorted: SortedChunk | None = None

    def sorted(self) -> "SortedChunk":
        """Return the rows, sorted once and kept: a slice takes those of some partitions."""
        if self._sorted is None:
            self._sorted = sort_chunk(self.blocks, self.runs)
        return self._sorted

    def column_bytes(self) -> I64:
        """Return the approximate bytes of each partition's rows and runs, shape (1024,); 0 only without a run."""
        size = sum([plain_bytes(block.data, len(block.data)) for block in self.blocks])
        partitions, counts = self.runs["partition"], self.runs["count"]
        rows = np.bincount(partitions, counts, PARTITIONS)
        runs = np.bincount(partitions, minlength=PARTITIONS) * RUN.itemsize
        sizes: I64 = (rows * (size / max(rows.sum(), 1))).astype(np.int64) + runs
        return sizes


@dataclass(slots=True)
class SortedChunk:
    """Rows of a chunk, sorted by partition and stable within one.

    Attributes:
        bounds: the first row of each partition, int64, shape (1025,).
        ends, horizons: per partition, of the runs in this chunk; 0 where there is none.
        keys: Arrow binary array.
        hashes: of the keys. ops: uint8. seqnos: uint64. times: int64, microseconds.
        further: cells of further columns by id, of the rows as they came; see ``cells``.
    """

    bounds: I64
    ends: U64
    horizons: U64
    keys: Any
    hashes: U32
    ops: npt.NDArray[np.uint8]
    seqnos: U64
    times: I64
    further: dict[int, Sparse]
    _values: Any
    _places: I64

    def values(self, rows: I64) -> Any:
        """Return the values of some rows, an Arrow binary array.

        They are not sorted with the rest: most may be of rows that are superseded.
        """
        return _taken(self._values, self._places[rows])

    def cells(self, rows: I64) -> dict[int, Sparse]:
        """Return the cells of further columns of some rows, by id and by their places among these."""
        found: dict[int, Sparse] = {}
        for id_, (own, cells) in self.further.items():
            at = np.searchsorted(own, self._places[rows])
            at[at == len(own)] = 0
            there = np.flatnonzero(own[at] == self._places[rows])
            if len(there):
                found[id_] = there, _taken(cells, at[there])
        return found


@dataclass(frozen=True, slots=True)
class FlushSlice:
    """Partitions ``first`` to ``last`` - 1 out of chunks ``first_chunk`` to ``last_chunk`` - 1."""

    first: int
    last: int
    first_chunk: int
    last_chunk: int


@dataclass(slots=True)
class Merged:
    """Result of a slice.

    Attributes:
        blocks: (partition, end_seqno, bytes).
        ends, horizons: each partition's new end, and the largest horizon up to there.
        markers: each partition's last complete marker; none where there is none above what was stored before.
        purges: the dropped tombstones, by partition.
        rows: how many rows the blocks have.
        hashes: of the blocks' keys, in order, as ``keyspace.pack_hashes``.
    """

    blocks: list[tuple[int, int, bytes]]
    ends: dict[int, int]
    purges: dict[int, Purge] = field(default_factory=dict)
    rows: int = 0
    horizons: dict[int, int] = field(default_factory=dict)
    hashes: list[bytes] = field(default_factory=list)
    markers: dict[int, int] = field(default_factory=dict)


def sort_chunk(blocks: Sequence[Encoded], runs: Runs) -> SortedChunk:
    """Sort the rows of consecutive blocks by partition; ``runs`` are their run tables, end to end."""
    block_firsts = np.cumsum([0, *(len(block.runs) for block in blocks[:-1])])
    rows = np.add.reduceat(runs["count"].astype(np.int64), block_firsts)
    total = int(rows.sum())
    counts = runs["count"]
    first_rows = np.cumsum(counts, dtype=np.int64) - counts
    offsets = np.arange(1, total + 1, dtype=np.int64) - np.repeat(first_rows, counts)
    times = np.repeat(runs["time"].astype(np.int64), counts)
    ops = np.zeros(total, np.uint8)
    # What a replica got may have a range of seqnos without a row, and then no offsets of keys.
    opened = [block.opened() for block, count in zip(blocks, rows, strict=True) if count]
    rows = rows[rows > 0]
    for number, dtype, target in (
        (OPS, "u1", ops),
        (SEQNOS, "<u4", offsets),
        (TIMES, "<i8", times),
    ):
        told = [column_of(columns, number) for columns in opened]
        there = np.repeat(np.array([bool(data) for data in told], bool), rows)
        target[there] = np.frombuffer(b"".join(told), dtype)
    seqnos = np.repeat(runs["start_seqno"], counts) + offsets.astype(np.uint64)
    partitions = np.repeat(runs["partition"], counts)
    order = _by_number(partitions)
    keys = _taken(cells_of(opened, KEY_OFFSETS, KEYS), order)
    ends = np.zeros(PARTITIONS, np.uint64)
    horizons = np.zeros(PARTITIONS, np.uint64)
    np.maximum.at(ends, runs["partition"], runs["end_seqno"])
    np.maximum.at(horizons, runs["partition"], runs["horizon"])
    return SortedChunk(
        np.searchsorted(partitions[order], np.arange(PARTITIONS + 1)),
        ends,
        horizons,
        keys,
        hashes_of(*raw_cells(keys)),
        ops[order],
        seqnos[order],
        times[order],
        further_cells(opened, rows),
        cells_of(opened, VALUE_OFFSETS, VALUES),
        order,
    )


def _by_number(partitions: npt.NDArray[Any]) -> I64:
    """Return the rows' order by partition, stable. Of 16 bits numpy sorts by radix, which takes a fifth of the time."""
    return np.argsort(partitions.astype(np.uint16), kind="stable")


def _taken(cells: Any, rows: I64) -> Any:
    """Return the cells of some rows; those that are there where these are all, in their order."""
    if len(rows) == len(cells) and (rows[1:] > rows[:-1]).all():
        return cells
    return cells.take(pa.array(rows))


def chunks_of(blocks: Sequence[Encoded]) -> Iterator[Chunk]:
    """Yield the blocks as chunks of about CHUNK_BYTES, and of about CHUNK_ROWS at most."""
    first = size = rows = 0
    for i, block in enumerate(blocks):
        size += plain_bytes(block.data, len(block.data))
        rows += int(block.runs["count"].sum())
        if size >= CHUNK_BYTES or rows >= CHUNK_ROWS or i == len(blocks) - 1:
            yield Chunk(blocks[first : i + 1])
            first, size, rows = i + 1, 0, 0


def plan_slices(chunks: Sequence[Chunk]) -> list[FlushSlice]:
    """Divide the work into slices of at most about SLICE_BYTES and SLICE_PARTITIONS.

    A larger partition becomes several slices, in the order of its chunks. Each is deduplicated by itself, and stored
    before the next.
    """
    sizes = np.array([chunk.column_bytes() for chunk in chunks])
    totals = sizes.sum(axis=0)
    slices: list[FlushSlice] = []
    first, size = 0, 0
    for partition, total in enumerate(totals.tolist()):
        if partition > first and (
            size + total > SLICE_BYTES or partition - first >= SLICE_PARTITIONS
        ):
            slices.append(FlushSlice(first, partition, 0, len(chunks)))
            first, size = partition, 0
        size += total
        if total > SLICE_BYTES:
            slices += _slices_of_one(partition, sizes[:, partition].tolist())
            first, size = partition + 1, 0
    if first < PARTITIONS:
        slices.append(FlushSlice(first, PARTITIONS, 0, len(chunks)))
    # A range without rows is stored too: the next one begins at its end.
    return [s for s in slices if sizes[s.first_chunk : s.last_chunk, s.first : s.last].any()]


def _slices_of_one(partition: int, sizes: Sequence[int]) -> Iterator[FlushSlice]:
    first = size = 0
    for chunk, more in enumerate(sizes):
        if chunk > first and size + more > SLICE_BYTES:
            yield FlushSlice(partition, partition + 1, first, chunk)
            first, size = chunk, 0
        size += more
    yield FlushSlice(partition, partition + 1, first, len(sizes))


def merge_slice(
    chunks: Sequence[Chunk],
    part: FlushSlice,
    stored: U64,
    *,
    horizon: U64 | None = None,
    limits: PurgeLimits | None = None,
    compress: Compress | None = None,
) -> Merged:
    """Merge a slice: drop rows already stored and rows superseded within it, build blocks.

    Args:
        stored: each partition's stored high, shape (1024,): the result begins right above it.
        horizon: the largest stored horizon, shape (1024,). With it, what lies above a partition's last complete marker
            keeps its runs and rows as they came: a replica may get no more of that stretch. None merges all.
        limits: which tombstones to drop, in the partitions whose result begins at 0.
    """
    own = chunks[part.first_chunk : part.last_chunk]
    torn = {} if horizon is None else _torn([c.runs for c in own], part, stored, horizon)
    if not torn:
        blocks = [block.data for c in own for block in c.blocks]
        merged = _merge_blocks(blocks, part, stored, limits, compress, check=False)
        if merged is not None:
            return merged
    return _merge_rows([c.sorted() for c in own], part, stored, torn, limits, compress)


def _merge_blocks(
    blocks: Sequence[bytes],
    part: FlushSlice,
    stored: U64,
    limits: PurgeLimits | None,
    compress: Compress | None,
    *,
    check: bool,
) -> Merged | None:
    """Merge encoded blocks with the compiled module; None where it leaves that to ``_merge_rows``."""
    made = merge_compiled(blocks, (part.first, part.last), stored, limits, check=check)
    if made is None:
        return None
    merged = Merged([], {})
    for partition, end, horizon, rows, data, hashes in made:
        merged.blocks.append((partition, end, data if compress is None else compress(data)))
        merged.hashes.append(hashes)
        merged.rows += rows
        # Of several blocks of a partition the last one counts.
        merged.ends[partition] = merged.markers[partition] = end
        merged.horizons[partition] = horizon
    return merged


def _merge_rows(
    chunks: Sequence[SortedChunk],
    part: FlushSlice,
    stored: U64,
    torn: Mapping[int, "_Torn"],
    limits: PurgeLimits | None,
    compress: Compress | None,
) -> Merged:
    """Return what ``merge_slice`` does; for everything that ``merge_compiled`` leaves to it, and its reference."""
    used = [(c, int(c.bounds[part.first]), int(c.bounds[part.last])) for c in chunks]
    keys = pa.concat_arrays([c.keys.slice(a, b - a) for c, a, b in used])
    seqnos = np.concatenate([c.seqnos[a:b] for c, a, b in used])
    ops = np.concatenate([c.ops[a:b] for c, a, b in used])
    times = np.concatenate([c.times[a:b] for c, a, b in used])
    window = np.arange(part.first, part.last)
    partitions = np.concatenate(
        [np.repeat(window, np.diff(c.bounds[part.first : part.last + 1])) for c, _, _ in used]
    )
    limit = np.full(PARTITIONS, np.iinfo(np.uint64).max, np.uint64)
    limit[list(torn)] = [found.marker for found in torn.values()]
    apart = seqnos > limit[partitions]
    live = seqnos > stored[partitions]
    hashes = np.concatenate([c.hashes[a:b] for c, a, b in used])
    rows = _newest_rows_of(keys, hashes, partitions, live & ~apart)
    if torn:
        rows = np.sort(np.concatenate((rows, np.flatnonzero(live & apart))))
    merged = Merged([], {})
    if limits is not None:
        rows = _purged(rows, (partitions, seqnos, ops, times), stored, limits, merged.purges)
    sorting = _by_number(partitions[rows])
    order = rows[sorting]
    merged.rows = len(order)
    sorted_rows = SortedRows(
        _taken(keys, order),
        hashes[order],
        _values_of(used, rows, sorting),
        ops[order],
        seqnos[order],
        times[order],
        _cells_of(used, order),
    )
    bounds = np.searchsorted(partitions[order], np.arange(part.first, part.last + 1))
    ends = np.max([c.ends for c, _, _ in used], axis=0)
    horizons = np.max([c.horizons for c, _, _ in used], axis=0)
    pieces: list[Piece] = []
    for i, partition in enumerate(window.tolist()):
        end = int(ends[partition])
        if end > stored[partition]:
            start, largest, marker = int(stored[partition]), int(horizons[partition]), end
            ranges = [(start, end, largest)]
            if partition in torn:
                ranges, largest, marker = torn[partition].ranges(start)
            first, last = int(bounds[i]), int(bounds[i + 1])
            for begin, stop, reached in ranges:
                cut = last
                if stop < end:
                    # An integer of Python would have all seqnos converted to floating point.
                    told = np.uint64(stop)
                    cut = first + int(
                        np.searchsorted(sorted_rows.seqnos[first:last], told, side="right")
                    )
                pieces += sorted_rows.stretch((first, cut), (partition, begin, stop, reached))
                first = cut
            merged.ends[partition], merged.horizons[partition] = end, largest
            if marker > start:
                merged.markers[partition] = marker
    merged.blocks, merged.hashes = sorted_rows.blocks(pieces, compress)
    return merged


def _values_of(used: Sequence[tuple[SortedChunk, int, int]], rows: I64, sorting: I64) -> Any:
    """Return the values of rows, ascending and counted through the parts of the chunks, in the order of a sorting."""
    if len(used) == 1:
        ((chunk, low, _),) = used
        return chunk.values(rows[sorting] + low)
    found, first = [], 0
    for chunk, low, high in used:
        own = slice(*np.searchsorted(rows, (first, first + high - low)))
        found.append(chunk.values(rows[own] - first + low))
        first += high - low
    return _taken(pa.concat_arrays(found), sorting)


def _cells_of(used: Sequence[tuple[SortedChunk, int, int]], rows: I64) -> dict[int, Sparse]:
    """Return the cells of further columns of rows, in any order and counted through the parts of the chunks."""
    found: dict[int, list[Sparse]] = {}
    first = 0
    for chunk, low, high in used:
        last = first + high - low
        if chunk.further:
            own = np.flatnonzero((rows >= first) & (rows < last))
            for id_, (places, cells) in chunk.cells(rows[own] - first + low).items():
                found.setdefault(id_, []).append((own[places], cells))
        first = last
    return joined_cells(found)


class _Torn(NamedTuple):
    """Partition that ends inside a stretch: its last complete marker, or where the store ends if there is none above,
    the runs behind it, oldest first, and the largest horizon."""

    marker: int
    runs: Runs
    horizon: int

    def ranges(self, start: int) -> tuple[list[tuple[int, int, int]], int, int]:
        """Return start, end and horizon of each range to be stored, the largest horizon, and the marker."""
        columns = [self.runs[name].tolist() for name in ("start_seqno", "end_seqno", "horizon")]
        whole = [(start, self.marker, self.marker)] if self.marker > start else []
        return [*whole, *zip(*columns, strict=True)], self.horizon, self.marker


def _torn(tables: Sequence[Runs], part: FlushSlice, stored: U64, horizon: U64) -> dict[int, _Torn]:
    """Return the partitions of a slice that end inside a stretch, of its blocks' run tables."""
    window = slice(part.first, part.last)
    inside = horizon[window] > stored[window]
    # A run that is part of a stretch does not end in a marker of its own.
    if not inside.any() and not any((t["horizon"] != t["end_seqno"]).any() for t in tables):
        return {}
    runs = joined_runs(tables)
    partitions = runs["partition"]
    runs = runs[
        (partitions >= part.first)
        & (partitions < part.last)
        & (runs["end_seqno"] > stored[partitions])
    ]
    partitions = runs["partition"]
    open_ones = (runs["horizon"] != runs["end_seqno"]) | (horizon[partitions] > stored[partitions])
    found: dict[int, _Torn] = {}
    for partition in np.unique(partitions[open_ones]).tolist():
        own = runs[partitions == partition]
        reached = np.maximum.accumulate(np.maximum(own["horizon"], horizon[partition]))
        complete = np.flatnonzero(reached == own["end_seqno"])
        behind = int(complete[-1]) + 1 if len(complete) else 0
        if behind < len(own):
            marker = int(own["end_seqno"][behind - 1] if behind else stored[partition])
            found[partition] = _Torn(marker, own[behind:], int(reached[-1]))
    return found


def rebuild(
    chunk: SortedChunk,
    rows: I64,
    run: tuple[int, int, int, int],
    compress: Compress | None = None,
) -> tuple[list[tuple[int, int, bytes]], list[bytes]]:
    """Build blocks of chosen rows of a chunk of one partition.

    Args:
        rows: row numbers of the chunk, ascending.
        run: partition, start, end and horizon of the resulting stretch.

    Returns:
        (partition, end_seqno, bytes) of each block, and the packed hashes of its keys.
    """
    sorted_rows = SortedRows(
        _taken(chunk.keys, rows),
        chunk.hashes[rows],
        chunk.values(rows),
        chunk.ops[rows],
        chunk.seqnos[rows],
        chunk.times[rows],
        chunk.cells(rows),
    )
    return sorted_rows.blocks(sorted_rows.stretch((0, len(rows)), run), compress)


def _purged(
    rows: I64,
    columns: tuple[I64, U64, npt.NDArray[np.uint8], I64],
    starts: U64,
    limits: PurgeLimits,
    purges: dict[int, Purge],
) -> I64:
    """Return the rows without the purged tombstones, and record these by partition."""
    partitions, seqnos, times = columns[0][rows], columns[1][rows], columns[3][rows]
    going, free = limits.going(partitions, seqnos, times)
    going &= (columns[2][rows] != 0) & (starts[partitions] == 0)
    for partition in np.unique(partitions[going]).tolist():
        of_it = going & (partitions == partition)
        purges[partition] = purge_of(seqnos[of_it], free[of_it])
    staying: I64 = rows[~going]
    return staying


def _newest_rows_of(keys: Any, hashes: U32, partitions: I64, live: Mask) -> I64:
    """Return the row numbers, ascending, of each partition's last row of each key among the live ones."""
    candidates = np.flatnonzero(live)
    alike = candidates[_alike(partitions[candidates], hashes[candidates])]
    if not len(alike):
        return candidates
    codes = _taken(keys, alike).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    codes = _by_partition(codes.astype(np.int64), partitions[alike])
    newest = np.zeros(int(codes.max()) + 1, np.int64)
    # For a repeated index numpy keeps the last assignment, which is the newest row of the key.
    newest[codes] = alike
    keep = live.copy()
    keep[alike] = False
    keep[newest] = True
    return np.flatnonzero(keep)


def _alike(partitions: I64, hashes: U32) -> Mask:
    """Return which rows may have the key of another one in their partition: the hash is that of another one."""
    told = partitions.astype(np.uint64) << np.uint64(32) | hashes
    again = repeated(told)
    if len(again) > ALIKE_FRACTION * len(told):
        return np.ones(len(told), bool)
    return np.isin(told, again)


def repeated(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers that are there more than once, ascending, each once less than it is there."""
    ordered: npt.NDArray[Any] = np.sort(numbers)
    again: npt.NDArray[Any] = ordered[1:][ordered[1:] == ordered[:-1]]
    return again


def _by_partition(codes: I64, partitions: I64) -> I64:
    """Return the key codes, made distinct where writers put one key into several partitions.

    Clients that partition by key never do so, but the server accepts the writer's partition as it is.
    """
    owner = np.zeros(int(codes.max()) + 1 if len(codes) else 0, np.int64)
    owner[codes] = partitions
    if (owner[codes] == partitions).all():
        return codes
    unique: I64 = np.unique(codes * PARTITIONS + partitions, return_inverse=True)[1]
    return unique


@dataclass(slots=True)
class Direct:
    """Result of compacting small ranges.

    Attributes:
        replacements: one a partition.
        purges: the dropped tombstones, by partition.
        rows: rows of all new blocks.
        damaged: partitions with a block that is missing or fails its checks; they are left as they are.
    """

    replacements: list[Replacement] = field(default_factory=list)
    purges: dict[int, Purge] = field(default_factory=dict)
    rows: int = 0
    damaged: dict[int, UprError] = field(default_factory=dict)


def merge_direct(
    ranges: Sequence[BlockRange],
    read: ReadBlocks,
    limits: PurgeLimits | None,
    compress: Compress | None = None,
) -> Direct:
    """Compact ranges of different partitions, ascending by partition, a few MiB in total.

    Args:
        limits: of purging, applied to ranges that begin at 0; None purges nothing.
    """
    result = Direct()
    found: dict[int, list[bytes]] = {}
    starts = np.zeros(PARTITIONS, np.uint64)
    for one in ranges:
        starts[one.partition] = one.start
        try:
            found[one.partition] = read(one.partition, [head.end for head in one.heads])
        except DataDamagedError as error:
            result.damaged[one.partition] = error
    merged = _merge_found(found, starts, limits, compress, result.damaged)
    new: dict[int, list[tuple[int, bytes]]] = {partition: [] for partition in found}
    hashes: dict[int, list[bytes]] = {partition: [] for partition in found}
    for (partition, end, data), of_block in zip(merged.blocks, merged.hashes, strict=True):
        new[partition].append((end, data))
        hashes[partition].append(of_block)
    result.purges, result.rows = merged.purges, merged.rows
    for one in ranges:
        if (partition := one.partition) in found:
            purge = merged.purges.get(partition)
            old, seqno = [head.end for head in one.heads], purge.seqno if purge else 0
            made = Replacement(partition, old, new[partition], seqno, hashes[partition])
            result.replacements.append(made)
    return result


def _merge_found(
    found: dict[int, list[bytes]],
    starts: U64,
    limits: PurgeLimits | None,
    compress: Compress | None,
    damaged: dict[int, UprError],
) -> Merged:
    """Merge blocks by partition. Partitions with one that fails its checks are moved to ``damaged``."""
    if not found:
        return Merged([], {})
    part = FlushSlice(min(found), max(found) + 1, 0, 1)
    blocks = list(chain.from_iterable(found.values()))
    merged = _merge_blocks(blocks, part, starts, limits, compress, check=True)
    if merged is not None:
        return merged
    sound: dict[int, list[Encoded]] = {}
    for partition, own in found.items():
        try:
            sound[partition] = [checked(data) for data in own]
        except CorruptBlockError as error:
            damaged[partition] = error
    for partition in found.keys() - sound.keys():
        del found[partition]
    if not sound:
        return Merged([], {})
    chunk = Chunk(list(chain.from_iterable(sound.values()))).sorted()
    return _merge_rows([chunk], part, starts, {}, limits, compress)


GROUP_BYTES = 8 * 2**20
GROUP_PLAIN_BYTES = 32 * 2**20
"""Most decompressed bytes of a group: compressed blocks may be much larger in memory."""
ROWS_MAX = 2**20
KEYS_BYTES_MAX = 32 * 2**20
"""Most rows, and most bytes of keys, compared in one pass, in memory."""
PASSES_MAX = 16
"""Most passes over a larger range, each for a part of the keys."""
WORTH_FRACTION = 0.1
"""Blocks are rewritten when at least this part of the range's bytes is dropped."""
BLOCK_FRACTION = 0.05
"""Of these, the blocks are rewritten that lose at least this part of their bytes."""
SMALL_BYTES = BLOCK_COLUMN_BYTES // 4
_ASSIGN_ROWS = 2**16
_NO_TOMBSTONES = (np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64))


class RangeTooLargeError(Exception):
    """The range has more keys than PASSES_MAX passes can compare."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of comparing the keys of a range: the rows that stay.

    Attributes:
        heads: the range's blocks, oldest first.
        keep: a flag for each row, one array a block.
        lost: which part of each block's bytes older rows of keys have; a single value may be most of them.
        purge: the tombstones among the dropped rows.
    """

    partition: int
    heads: tuple[Head, ...]
    keep: list[Mask]
    lost: list[float]
    purge: Purge | None

    @property
    def horizon(self) -> int:
        return max(head.horizon for head in self.heads)

    def loses(self, fraction: float) -> bool:
        """Return whether older rows of keys have such a part of the bytes."""
        total = sum(head.size for head in self.heads)
        gone = sum(s * head.size for s, head in zip(self.lost, self.heads, strict=True))
        return bool(gone >= fraction * total)

    def groups(self, worth: float = WORTH_FRACTION) -> list[range]:
        """Return the groups of neighbouring blocks to rewrite, oldest first, if such a part of the bytes is dropped."""
        groups: list[range] = []
        chosen = self._chosen(worth)
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

    def _chosen(self, worth: float) -> list[bool]:
        if self.purge is not None:
            # A key's older rows must be dropped before its tombstone, however few they are.
            chosen = [not keep.all() for keep in self.keep]
        else:
            saves = self.loses(worth)
            chosen = [saves and s >= min(worth, BLOCK_FRACTION) for s in self.lost]
        small = [head.plain < SMALL_BYTES for head in self.heads]
        for i in range(1, len(small)):
            if small[i - 1] and small[i]:
                chosen[i - 1] = chosen[i] = True
        return chosen


def examine(chosen: BlockRange, read: ReadBlocks, limits: PurgeLimits | None) -> Examined:
    """Find the newest row of each key in a range.

    Args:
        limits: of purging, applied if the range begins at 0; None purges nothing.

    Raises:
        RangeTooLargeError: it has more keys than are compared in PASSES_MAX passes.
        DataDamagedError, CorruptBlockError: a block is missing or fails its checks.
    """
    passes = 1
    while True:
        try:
            keep, lost, tombstones = _compare(chosen, read, passes)
            break
        except RangeTooLargeError:
            passes *= 2
            if passes > PASSES_MAX:
                raise
    purge = None
    if limits is not None and chosen.start == 0:
        purge = _purge(chosen.partition, keep, tombstones, limits)
    bounds = np.cumsum([head.rows for head in chosen.heads])[:-1]
    return Examined(chosen.partition, chosen.heads, np.split(keep, bounds), lost, purge)


def _compare(
    chosen: BlockRange, read: ReadBlocks, passes: int
) -> tuple[Mask, list[float], tuple[Any, ...]]:
    """Return a flag for each row that is the newest of its key; which part of each block's bytes the others have; and the
    tombstones, as ``tombstones_of``."""
    keep = np.zeros(chosen.rows, bool)
    ends = np.cumsum([head.rows for head in chosen.heads])
    lost = np.zeros(len(ends))
    totals = list[int]()
    found = [_NO_TOMBSTONES]
    for number in range(passes):
        keys, rows, sizes = [], [], []
        first = size = taken = 0
        for block in each_checked(chosen.partition, chosen.heads, read):
            column, own = keys_of(block), _row_bytes(block)
            mine = np.arange(len(column))
            if passes > 1:
                mine = np.flatnonzero(key_hashes(block) % np.uint32(passes) == number)
                column = column.take(pa.array(mine))
            size += column.nbytes
            taken += len(column)
            if size > KEYS_BYTES_MAX or taken > ROWS_MAX:
                raise RangeTooLargeError
            keys.append(column)
            rows.append(mine + first)
            sizes.append(own[mine])
            if number == 0:
                totals.append(int(own.sum()))
                deleted, seqnos, times = tombstones_of(block)
                found.append((deleted + first, seqnos, times))
            first += int(block.runs[0]["count"])
        if first != chosen.rows:
            raise DataDamagedError(
                f"partition {chosen.partition}: the blocks up to {chosen.end} have {first} rows, their heads say {chosen.rows}"
            )
        newest, places = _newest(pa.concat_arrays(keys)), np.concatenate(rows)
        keep[places[newest]] = True
        owners = np.searchsorted(ends, places[~newest], side="right")
        lost += np.bincount(owners, np.concatenate(sizes)[~newest], len(ends))
    shares: list[float] = (lost / np.maximum(totals, 1)).tolist()
    return keep, shares, tuple(np.concatenate(columns) for columns in zip(*found, strict=True))


def _row_bytes(block: Encoded) -> npt.NDArray[np.int32]:
    """Return about how many bytes each row of a block has."""
    columns = block.opened()
    offsets = [column_of(columns, field) for field in (KEY_OFFSETS, VALUE_OFFSETS)]
    offsets += [one.offsets for one in further_in(columns)]
    lengths = [np.diff(np.frombuffer(told, "<i4")) for told in offsets]
    sizes: npt.NDArray[np.int32] = sum(lengths[1:], lengths[0]) + 4 * len(lengths)
    return sizes


def _purge(
    partition: int, keep: Mask, tombstones: tuple[Any, ...], limits: PurgeLimits
) -> Purge | None:
    """Clear the flags of the tombstones that may be purged, and return them as a Purge."""
    rows, seqnos, times = (column[keep[tombstones[0]]] for column in tombstones)
    going, free = limits.going(np.full(len(rows), partition), seqnos, times)
    if not going.any():
        return None
    keep[rows[going]] = False
    return purge_of(seqnos[going], free[going])


def _newest(keys: Any) -> Mask:
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    newest: I64 = np.full(int(codes.max()) + 1 if len(codes) else 0, -1, np.int64)
    for first in range(0, len(codes), _ASSIGN_ROWS):
        # In pieces: one assignment of a million rows would hold the interpreter lock too long.
        piece = codes[first : first + _ASSIGN_ROWS]
        newest[piece] = np.arange(first, first + len(piece))
    keep = np.zeros(len(codes), bool)
    keep[newest] = True
    return keep


def rewrite_group(
    examined: Examined,
    group: range,
    read: ReadBlocks,
    compress: Compress | None = None,
) -> Replacement:
    """Rewrite one group of blocks without the dropped rows.

    Raises:
        DataDamagedError, CorruptBlockError: a block is missing, fails its checks, or changed since it was examined.
    """
    heads = [examined.heads[i] for i in group]
    blocks = list(each_checked(examined.partition, heads, read))
    keep = np.concatenate([examined.keep[i] for i in group])
    chunk = Chunk(blocks).sorted()
    if len(chunk.seqnos) != len(keep):
        raise DataDamagedError(
            f"partition {examined.partition}: the blocks up to {heads[-1].end} changed while they were merged"
        )
    run = (examined.partition, heads[0].start, heads[-1].end, examined.horizon)
    new, hashes = rebuild(chunk, np.flatnonzero(keep), run, compress)
    return Replacement(
        examined.partition,
        [head.end for head in heads],
        [(end, data) for _, end, data in new],
        examined.purge.seqno if examined.purge else 0,
        hashes,
    )
