"""Merging runs into stored blocks: vectorised, newest row of a key wins.

What goes in are encoded blocks in the order in which they were numbered; what comes out are encoded blocks of
one run each. A merge result has the largest horizon of its inputs, so that it ends in a marker only if they
did; a result larger than a block becomes a stretch, several runs that share one horizon.

The work is done a chunk (some MiB of input) or a slice (some partitions) at a time: a single call over
everything would hold the interpreter for so long that the event loop of the same process stands still.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upr_protocol.block import I64, U64, Block, Runs, make_runs, sealed
from upr_protocol.limits import BLOCK_COLUMN_BYTES, PARTITIONS
from upr_protocol.wire.codec import column_spans, encode_block

CHUNK_BYTES = 8 * 2**20
SLICE_BYTES = 8 * 2**20
SLICE_PARTITIONS = 128

_SEQNOS, _OPS, _KEY_OFFSETS, _KEYS, _VALUE_OFFSETS, _VALUES, _TIMES = range(2, 9)


@dataclass(slots=True)
class Encoded:
    """An encoded block and its run table, parsed already because everybody looks at it."""

    runs: Runs
    data: bytes


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
    """What a slice became: blocks as (partition, end_seqno, bytes), and each partition's new end."""

    blocks: list[tuple[int, int, bytes]]
    ends: dict[int, int]


def _binary(offsets: npt.NDArray[np.int32], data: bytes) -> Any:
    return pa.Array.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _gather(blocks: Sequence[Encoded], field: int, data_field: int, rows: Sequence[int]) -> Any:
    lengths = []
    pieces = []
    for block, count in zip(blocks, rows, strict=True):
        spans = column_spans(block.data)
        first, _ = spans[field]
        lengths.append(np.diff(np.frombuffer(block.data, "<i4", count + 1, first)))
        a, b = spans.get(data_field, (0, 0))
        pieces.append(block.data[a:b])
    offsets = np.zeros(sum(rows) + 1, np.int32)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return _binary(offsets, b"".join(pieces))


def make_chunk(blocks: Sequence[Encoded]) -> Chunk:
    """Sort the rows of some consecutive blocks by partition."""
    runs = np.concatenate([block.runs for block in blocks])
    rows = [int(block.runs["count"].sum()) for block in blocks]
    total = sum(rows)
    counts = runs["count"]
    first_rows = np.cumsum(counts, dtype=np.int64) - counts
    offsets = np.arange(1, total + 1, dtype=np.int64) - np.repeat(first_rows, counts)
    times = np.repeat(runs["time"].astype(np.int64), counts)
    ops = np.zeros(total, np.uint8)
    at = 0
    for block, count in zip(blocks, rows, strict=True):
        spans = column_spans(block.data)
        for field, dtype, target in (
            (_OPS, "u1", ops),
            (_SEQNOS, "<u4", offsets),
            (_TIMES, "<i8", times),
        ):
            a, b = spans.get(field, (0, 0))
            if b > a:
                target[at : at + count] = np.frombuffer(block.data, dtype, count, a)
        at += count
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
        _gather(blocks, _KEY_OFFSETS, _KEYS, rows).take(picked),
        _gather(blocks, _VALUE_OFFSETS, _VALUES, rows).take(picked),
        ops[order],
        seqnos[order],
        times[order],
    )


def chunks_of(blocks: Sequence[Encoded]) -> Iterator[Chunk]:
    """Yield the blocks' rows as chunks of about CHUNK_BYTES."""
    first = size = 0
    for i, block in enumerate(blocks):
        size += len(block.data)
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


def merge_slice(chunks: Sequence[Chunk], part: FlushSlice, stored: U64) -> Merged:
    """Merge a slice: drop rows already stored and rows superseded within it, build blocks.

    Args:
        stored: each partition's stored high, shape (1024,): the result begins right above it.
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
    order = rows[np.argsort(partitions[rows], kind="stable")]
    picked = pa.array(order)
    columns = _Columns(
        keys.take(picked), values.take(picked), ops[order], seqnos[order], times[order]
    )
    bounds = np.searchsorted(partitions[order], np.arange(part.first, part.last + 1))
    ends = np.max([c.ends for c, _, _ in used], axis=0)
    horizons = np.max([c.horizons for c, _, _ in used], axis=0)
    merged = Merged([], {})
    for i, partition in enumerate(window.tolist()):
        end = int(ends[partition])
        if end > stored[partition]:
            span = (int(bounds[i]), int(bounds[i + 1]))
            run = (partition, int(stored[partition]), end, int(horizons[partition]))
            merged.blocks += columns.stretch(span, run)
            merged.ends[partition] = end
    return merged


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
        self, rows: tuple[int, int], run: tuple[int, int, int, int]
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield a partition's blocks: one, or a stretch of several that share the horizon."""
        partition, start, end, horizon = run
        first, last = rows
        while True:
            cut = self._fit(first, last)
            run_end = end if cut == last else int(self._seqnos[cut - 1])
            block = self._block((first, cut), (partition, start, run_end, horizon))
            yield partition, run_end, encode_block(block)
            if cut == last:
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
