"""Merging runs into stored blocks: vectorised, newest row of a key wins.

What goes in are encoded blocks in the order in which they were numbered; what comes out are encoded blocks of
one run each. A merge result has the largest horizon of its inputs, so that it ends in a marker only if they
did; a result larger than a block becomes a stretch, several runs that share one horizon.

The work is done a chunk (some MiB of input) or a slice (some partitions) at a time: a single call over
everything would hold the interpreter for so long that the event loop of the same process stands still.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upr.storage.tombstones import Purge, PurgeLimits, purge_of
from upr_protocol.block import I64, RUN, U64, Block, Runs, make_runs, sealed
from upr_protocol.limits import BLOCK_COLUMN_BYTES, KEY_BYTES_MAX, PARTITIONS, RUN_SPAN_MAX
from upr_protocol.wire.codec import (
    Columns,
    encode_block,
    open_checked,
    open_columns,
    plain_bytes,
)

CHUNK_BYTES = 8 * 2**20
SLICE_BYTES = 8 * 2**20
SLICE_PARTITIONS = 128

Compress = Callable[[bytes], bytes]
"""An encoded block to what is stored of it, as ``compress_block``."""

_SEQNOS, _OPS, _KEY_OFFSETS, _KEYS, _VALUE_OFFSETS, _VALUES, _TIMES = range(2, 9)
_ABSENT = (0, 0)
_WEIGHTS = np.random.default_rng(0).integers(2**63, 2**64 - 1, KEY_BYTES_MAX, np.uint64) | 1


@dataclass(slots=True)
class Encoded:
    """An encoded block and its run table, parsed already because everybody looks at it.

    Attributes:
        columns: where its columns lie, if somebody has looked already.
        cost: what it takes from a stream's credit, where that is not its bytes.
    """

    runs: Runs
    data: bytes
    columns: Columns | None = None
    cost: int | None = None

    @property
    def size(self) -> int:
        """What it takes from a stream's credit."""
        return len(self.data) if self.cost is None else self.cost

    def opened(self) -> Columns:
        """Return where its columns lie."""
        return open_columns(self.data) if self.columns is None else self.columns


def checked(data: bytes) -> Encoded:
    """Return a stored block whose checksums hold; CorruptBlockError when they do not."""
    runs, columns = open_checked(data)
    return Encoded(runs, data, columns)


@dataclass(slots=True)
class Chunk:
    """Rows of some consecutive blocks, sorted by partition, within one in their order.

    Attributes:
        bounds: where each partition's rows begin, int64, shape (1025,).
        ends, horizons: per partition, of the runs in this chunk; 0 where there is none.
        keys, values: Arrow binary arrays.
        ops: uint8. seqnos: uint64. times: int64, microseconds.
    """

    bounds: I64
    ends: U64
    horizons: U64
    keys: Any
    values: Any
    ops: npt.NDArray[np.uint8]
    seqnos: U64
    times: I64

    def column_bytes(self) -> I64:
        """Return about how many bytes each partition's rows take, shape (1024,)."""
        rows = max(len(self.seqnos), 1)
        each = (self.keys.nbytes + self.values.nbytes) / rows + 17
        sizes: I64 = (np.diff(self.bounds) * each).astype(np.int64)
        return sizes


@dataclass(frozen=True, slots=True)
class FlushSlice:
    """Partitions ``first`` to ``last`` - 1 out of chunks ``first_chunk`` to ``last_chunk`` - 1."""

    first: int
    last: int
    first_chunk: int
    last_chunk: int


@dataclass(slots=True)
class Merged:
    """What a slice became.

    Attributes:
        blocks: (partition, end_seqno, bytes).
        ends: each partition's new end.
        purges: the tombstones that were left out, by partition.
        rows: how many rows the blocks have.
    """

    blocks: list[tuple[int, int, bytes]]
    ends: dict[int, int]
    purges: dict[int, Purge] = field(default_factory=dict)
    rows: int = 0


def _binary(offsets: npt.NDArray[np.int32], data: bytes) -> Any:
    return pa.Array.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _field(columns: Columns, field: int) -> bytes:
    data, spans = columns
    first, end = spans.get(field, _ABSENT)
    return data[first:end]


def _cells(opened: Sequence[Columns], field: int, data_field: int, rows: Sequence[int]) -> Any:
    """Return the keys or values of several blocks as one Arrow array; ``rows`` is how many each block has."""
    told = np.frombuffer(b"".join([_field(columns, field) for columns in opened]), "<i4")
    # Where one block's offsets end and the next one's begin there is no cell.
    lengths = np.delete(np.diff(told), np.cumsum(np.array(rows) + 1)[:-1] - 1)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return _binary(offsets, b"".join([_field(columns, data_field) for columns in opened]))


def keys_of(*blocks: Encoded) -> Any:
    """Return the keys of blocks, end to end, as an Arrow binary array; of several blocks each must have rows."""
    rows = [int(block.runs["count"].sum()) for block in blocks]
    return _cells([block.opened() for block in blocks], _KEY_OFFSETS, _KEYS, rows)


def key_classes(block: Encoded, count: int) -> I64:
    """Return for each row of a block in which of ``count`` classes its key is; equal keys are in the same."""
    columns = block.opened()
    offsets = np.frombuffer(_field(columns, _KEY_OFFSETS), "<i4")
    data = np.frombuffer(_field(columns, _KEYS), np.uint8)
    if not len(data):
        return np.zeros(0, np.int64)
    places = np.arange(len(data)) - np.repeat(offsets[:-1], np.diff(offsets))
    sums = np.add.reduceat(_WEIGHTS[places] * data, offsets[:-1])
    return ((sums >> np.uint64(32)) % np.uint64(count)).astype(np.int64)


def tombstones_of(block: Encoded) -> tuple[I64, U64, I64]:
    """Return the deletes of a block of one run: row numbers, seqnos, commit times in microseconds."""
    columns = block.opened()
    run = block.runs[0]

    def column(field: int, dtype: str) -> npt.NDArray[Any] | None:
        data = _field(columns, field)
        return np.frombuffer(data, dtype) if data else None

    ops, offsets, times = column(_OPS, "u1"), column(_SEQNOS, "<u4"), column(_TIMES, "<i8")
    rows = np.flatnonzero(ops) if ops is not None else np.zeros(0, np.int64)
    seqnos = rows + 1 if offsets is None else offsets[rows]
    return (
        rows,
        run["start_seqno"] + seqnos.astype(np.uint64),
        np.full(len(rows), run["time"], np.int64) if times is None else times[rows],
    )


def make_chunk(blocks: Sequence[Encoded]) -> Chunk:
    """Sort the rows of some consecutive blocks by partition."""
    # By way of bytes: concatenating tables of many columns is slow.
    runs = np.frombuffer(b"".join([block.runs.tobytes() for block in blocks]), RUN)
    rows = _rows_of(blocks, runs)
    total = sum(rows)
    counts = runs["count"]
    first_rows = np.cumsum(counts, dtype=np.int64) - counts
    offsets = np.arange(1, total + 1, dtype=np.int64) - np.repeat(first_rows, counts)
    times = np.repeat(runs["time"].astype(np.int64), counts)
    ops = np.zeros(total, np.uint8)
    opened = [block.opened() for block in blocks]
    for number, dtype, target in (
        (_OPS, "u1", ops),
        (_SEQNOS, "<u4", offsets),
        (_TIMES, "<i8", times),
    ):
        told = [_field(columns, number) for columns in opened]
        there = np.repeat([bool(data) for data in told], rows)
        target[there] = np.frombuffer(b"".join(told), dtype)
    seqnos = np.repeat(runs["start_seqno"], counts) + offsets.astype(np.uint64)
    partitions = np.repeat(runs["partition"], counts)
    order = np.argsort(partitions, kind="stable")
    picked = pa.array(order)
    ends = np.zeros(PARTITIONS, np.uint64)
    horizons = np.zeros(PARTITIONS, np.uint64)
    np.maximum.at(ends, runs["partition"], runs["end_seqno"])
    np.maximum.at(horizons, runs["partition"], runs["horizon"])
    return Chunk(
        np.searchsorted(partitions[order], np.arange(PARTITIONS + 1)),
        ends,
        horizons,
        _cells(opened, _KEY_OFFSETS, _KEYS, rows).take(picked),
        _cells(opened, _VALUE_OFFSETS, _VALUES, rows).take(picked),
        ops[order],
        seqnos[order],
        times[order],
    )


def _rows_of(blocks: Sequence[Encoded], runs: Runs) -> list[int]:
    """Return how many rows each block has; ``runs`` are all their runs end to end."""
    firsts = np.cumsum([0, *(len(block.runs) for block in blocks[:-1])])
    rows: list[int] = np.add.reduceat(runs["count"].astype(np.int64), firsts).tolist()
    return rows


def chunks_of(blocks: Sequence[Encoded]) -> Iterator[Chunk]:
    """Yield the blocks' rows as chunks of about CHUNK_BYTES."""
    first = size = 0
    for i, block in enumerate(blocks):
        size += plain_bytes(block.data, len(block.data))
        if size >= CHUNK_BYTES or i == len(blocks) - 1:
            yield make_chunk(blocks[first : i + 1])
            first, size = i + 1, 0


def plan_slices(chunks: Sequence[Chunk]) -> list[FlushSlice]:
    """Cut the work into slices of at most about SLICE_BYTES and SLICE_PARTITIONS.

    A partition that is larger by itself becomes several slices, in the order of its chunks: each of them is
    merged in itself and is stored before the next.
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
    limits: PurgeLimits | None = None,
    compress: Compress | None = None,
) -> Merged:
    """Merge a slice: drop rows already stored and rows superseded within it, build blocks.

    Args:
        stored: each partition's stored high, shape (1024,): the result begins right above it.
        limits: which tombstones to drop, in the partitions whose result begins at 0.
        compress: what is made of each block before it is stored.
    """
    used = [
        (c, int(c.bounds[part.first]), int(c.bounds[part.last]))
        for c in chunks[part.first_chunk : part.last_chunk]
    ]
    keys = pa.concat_arrays([c.keys.slice(a, b - a) for c, a, b in used])
    values = pa.concat_arrays([c.values.slice(a, b - a) for c, a, b in used])
    seqnos = np.concatenate([c.seqnos[a:b] for c, a, b in used])
    ops = np.concatenate([c.ops[a:b] for c, a, b in used])
    times = np.concatenate([c.times[a:b] for c, a, b in used])
    window = np.arange(part.first, part.last)
    partitions = np.concatenate(
        [np.repeat(window, np.diff(c.bounds[part.first : part.last + 1])) for c, _, _ in used]
    )
    rows = _newest_rows(keys, partitions, seqnos > stored[partitions])
    merged = Merged([], {})
    if limits is not None:
        rows = _purged(rows, (partitions, seqnos, ops, times), stored, limits, merged.purges)
    order = rows[np.argsort(partitions[rows], kind="stable")]
    merged.rows = len(order)
    picked = pa.array(order)
    columns = _Columns(
        keys.take(picked), values.take(picked), ops[order], seqnos[order], times[order]
    )
    bounds = np.searchsorted(partitions[order], np.arange(part.first, part.last + 1))
    ends = np.max([c.ends for c, _, _ in used], axis=0)
    horizons = np.max([c.horizons for c, _, _ in used], axis=0)
    for i, partition in enumerate(window.tolist()):
        end = int(ends[partition])
        if end > stored[partition]:
            span = (int(bounds[i]), int(bounds[i + 1]))
            run = (partition, int(stored[partition]), end, int(horizons[partition]))
            merged.blocks += columns.stretch(span, run, compress)
            merged.ends[partition] = end
    return merged


def rebuild(
    chunk: Chunk, rows: I64, run: tuple[int, int, int, int], compress: Compress | None = None
) -> Iterator[Any]:
    """Yield the blocks, as (partition, end_seqno, bytes), of some rows of a chunk of one partition.

    Args:
        rows: row numbers of the chunk, ascending.
        run: partition, start, end and horizon of the stretch that they become.
        compress: what is made of each block before it is stored.
    """
    picked = pa.array(rows)
    columns = _Columns(
        chunk.keys.take(picked),
        chunk.values.take(picked),
        chunk.ops[rows],
        chunk.seqnos[rows],
        chunk.times[rows],
    )
    yield from columns.stretch((0, len(rows)), run, compress)


def _purged(
    rows: I64,
    columns: tuple[I64, U64, npt.NDArray[np.uint8], I64],
    starts: U64,
    limits: PurgeLimits,
    purges: dict[int, Purge],
) -> I64:
    """Return the rows without the tombstones that may go, and note these by partition."""
    partitions, seqnos, times = columns[0][rows], columns[1][rows], columns[3][rows]
    free = limits.free(partitions, seqnos, times)
    going = (columns[2][rows] != 0) & (starts[partitions] == 0)
    going &= free | limits.held(partitions, seqnos, times)
    for partition in np.unique(partitions[going]).tolist():
        of_it = going & (partitions == partition)
        purges[partition] = purge_of(seqnos[of_it], free[of_it])
    staying: I64 = rows[~going]
    return staying


def _newest_rows(keys: Any, partitions: I64, live: npt.NDArray[np.bool_]) -> I64:
    """Return the row numbers, ascending, of each partition's last row of each key among the live ones."""
    candidates = np.flatnonzero(live)
    if len(candidates) < len(live):
        keys = keys.take(pa.array(candidates))
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    codes = _by_partition(codes.astype(np.int64), partitions[candidates])
    newest = np.full(int(codes.max()) + 1 if len(codes) else 0, -1, np.int64)
    # For a repeated index numpy keeps the last assignment, which is the newest row of the key.
    newest[codes] = candidates
    return np.sort(newest)


def _by_partition(codes: I64, partitions: I64) -> I64:
    """Return the codes, told apart where writers put one key into several partitions.

    Nobody who partitions by the key does so, but the server takes the writer's word for the partition.
    """
    owner = np.zeros(int(codes.max()) + 1 if len(codes) else 0, np.int64)
    owner[codes] = partitions
    if (owner[codes] == partitions).all():
        return codes
    unique: I64 = np.unique(codes * PARTITIONS + partitions, return_inverse=True)[1]
    return unique


class _Columns:
    """Merged rows of several partitions, from which blocks are cut."""

    def __init__(
        self, keys: Any, values: Any, ops: npt.NDArray[np.uint8], seqnos: U64, times: I64
    ) -> None:
        self._key_offsets, self._keys = _raw(keys)
        self._value_offsets, self._values = _raw(values)
        self._ops, self._seqnos, self._times = ops, seqnos, times

    def stretch(
        self,
        rows: tuple[int, int],
        run: tuple[int, int, int, int],
        compress: Compress | None = None,
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield a partition's blocks: one, or a stretch of several that share the horizon."""
        partition, start, end, horizon = run
        first, last = rows
        while True:
            cut = self._fit(first, last)
            run_end = end if cut == last else int(self._seqnos[cut - 1])
            if run_end - start > RUN_SPAN_MAX:
                run_end = start + RUN_SPAN_MAX
                reached = np.searchsorted(self._seqnos[first:cut], np.uint64(run_end), side="right")
                cut = first + int(reached)
            data = encode_block(self._block((first, cut), (partition, start, run_end, horizon)))
            yield partition, run_end, data if compress is None else compress(data)
            if run_end == end:
                return
            first, start = cut, run_end

    def _fit(self, first: int, last: int) -> int:
        """Return how far a block that begins at a row reaches within BLOCK_COLUMN_BYTES."""
        size = (
            self._key_offsets[first : last + 1]
            + self._value_offsets[first : last + 1]
            + 21 * np.arange(last - first + 1)
        )
        cut = first + int(np.searchsorted(size, size[0] + BLOCK_COLUMN_BYTES, side="right")) - 1
        return min(max(cut, first + 1), last)

    def _block(self, rows: tuple[int, int], run: tuple[int, int, int, int]) -> Block:
        first, last = rows
        partition, start, end, horizon = run
        count = last - first
        seqnos = self._seqnos[first:last]
        times = self._times[first:last]
        ops = self._ops[first:last]
        key_offsets = self._key_offsets[first : last + 1]
        value_offsets = self._value_offsets[first : last + 1]
        dense = count == end - start
        time = int(times.max()) if count else 0
        return sealed(
            Block(
                make_runs([partition], count, start, end, horizon, time),
                b"" if dense else (seqnos - np.uint64(start)).astype("<u4").tobytes(),
                ops.tobytes() if ops.any() else b"",
                (key_offsets - key_offsets[0]).astype("<i4").tobytes(),
                self._keys[key_offsets[0] : key_offsets[-1]],
                (value_offsets - value_offsets[0]).astype("<i4").tobytes(),
                self._values[value_offsets[0] : value_offsets[-1]],
                times.astype("<i8").tobytes() if count and (times != time).any() else b"",
                0,
            )
        )


def _raw(array: Any) -> tuple[I64, bytes]:
    """Return a binary array's offsets, from 0 and as int64, and its bytes."""
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, "<i4", len(array) + 1, array.offset * 4)
    raw = memoryview(data)[offsets[0] : offsets[-1]].tobytes() if data is not None else b""
    return (offsets - offsets[0]).astype(np.int64), raw
