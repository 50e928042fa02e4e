"""Reads of stored blocks for streams: checked, sliced above the reader's seqno, and filtered as the stream asked.

Runs in a reader thread. A partition whose bytes fail their checks gets an error of its own; the others are not
affected.

A stream is shown all rows or those under a key prefix, with or without values, as blocks or as plain runs: a message for
each row, for people with grpcurl and for languages without an SDK. Both take the bytes of the blocks from the credit. A
run of more than PLAIN_RUN_BYTES becomes several that share its horizon. Further columns are in blocks only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upr.storage.blocks import Encoded, binary_cells, check_stored, own_head, raw_cells
from upr.storage.store import ReadRequest, Store
from upr_protocol.block import (
    I64,
    OP_DELETE,
    Block,
    block_keys,
    block_ops,
    block_values,
    row_bounds,
    row_seqnos,
    row_times,
    sealed,
    slice_runs,
    with_cells,
    without_values,
)
from upr_protocol.errors import DataDamagedError, InvalidArgumentError
from upr_protocol.limits import FRAME_PLAIN_BYTES
from upr_protocol.wire.codec import (
    decode_block,
    decompress_block,
    encode_block,
    plain_bytes,
)
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

PLAIN_RUN_BYTES = 8 * 2**20
MESSAGE_BYTES = 16 * 2**20
"""A message holds plain runs of up to this size together, or one: well below the message limit."""
_PLAIN_ROW_BYTES = 40
"""Largest size of a PlainRow besides its key and value: tags and lengths, seqno, time, deleted."""

_Row = tuple[int, bytes, bytes | None, bool, int]
"""Seqno, key, value, whether it was deleted, time."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Planned PlainRun: rows ``first`` to ``last`` - 1 of a block, all of its run ``number``.

    Attributes:
        start, end: it covers the seqnos in (start, end].
        row_bytes: of its rows, with their tags and lengths.
    """

    number: int
    first: int
    last: int
    start: int
    end: int
    row_bytes: int


def plain_messages(
    blocks: Sequence[bytes], tokens: bytes, cost: int, purge_seqnos: bytes = b""
) -> Iterator[bytes]:
    """Yield the encoded FollowResponse messages of a frame.

    Args:
        blocks: encoded blocks, not compressed.
        tokens, cost, purge_seqnos: as ``encode_frame`` takes them.

    Raises:
        CorruptBlockError: a block changed in memory since it was checked.
    """
    told = np.frombuffer(tokens, "<u4").tolist()
    frame = wire.Frame(purge_seqnos=purge_seqnos)
    size = at = 0
    for data in blocks:
        block = decode_block(data)
        rows = _rows_of(block)
        for part in _parts(block, _row_bytes(block)):
            if frame.plain_runs and size + part.row_bytes > MESSAGE_BYTES:
                yield wire.FollowResponse(frame=frame).SerializeToString()
                frame, size = wire.Frame(), 0
            message = frame.plain_runs.add(token=told[at + part.number])
            _fill(message, block.runs[part.number], part, rows[part.first : part.last])
            size += part.row_bytes
        at += len(block.runs)
    frame.credit_bytes = cost
    yield wire.FollowResponse(frame=frame).SerializeToString()


def _rows_of(block: Block) -> list[_Row]:
    if not block.rows:
        return []
    return list(
        zip(
            row_seqnos(block).tolist(),
            block_keys(block),
            block_values(block),
            [op == OP_DELETE for op in block_ops(block)],
            row_times(block).tolist(),
            strict=True,
        )
    )


def _fill(message: wire.PlainRun, run: np.void, part: _Part, rows: Sequence[_Row]) -> None:
    message.partition = int(run["partition"])
    message.start_seqno = part.start
    message.end_seqno = part.end
    message.horizon = int(run["horizon"])
    message.time = int(run["time"])
    for seqno, key, value, deleted, time in rows:
        message.rows.add(seqno=seqno, key=key, value=value, deleted=deleted, time=time)


def _parts(block: Block, sizes: I64) -> Iterator[_Part]:
    """Yield the planned PlainRuns of the runs, in order."""
    bounds = row_bounds(block.runs).tolist()
    sums = np.concatenate(([0], np.cumsum(sizes)))
    for number, run in enumerate(block.runs):
        first, last = bounds[number], bounds[number + 1]
        start, end = int(run["start_seqno"]), int(run["end_seqno"])
        while sums[last] - sums[first] > PLAIN_RUN_BYTES and last - first > 1:
            cut = int(np.searchsorted(sums, sums[first] + PLAIN_RUN_BYTES, side="right")) - 1
            cut = max(cut, first + 1)
            middle = int(row_seqnos(block)[cut - 1])
            yield _Part(number, first, cut, start, middle, int(sums[cut] - sums[first]))
            first, start = cut, middle
        yield _Part(number, first, last, start, end, int(sums[last] - sums[first]))


def _row_bytes(block: Block) -> I64:
    """Return how many bytes each row takes in its run, or a few more."""
    if not block.rows:
        return np.zeros(0, np.int64)
    return _lengths(block.key_offsets) + _lengths(block.value_offsets) + _PLAIN_ROW_BYTES


def _lengths(offsets: bytes) -> I64:
    """Return the length of each cell; 0 for a column that was left out."""
    return np.diff(np.frombuffer(offsets or bytes(8), "<i4")).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Showing:
    """View of a stream on blocks: prefix, values, and whether producers' writes go with them; by default as they are."""

    keys_only: bool = False
    key_prefix: bytes = b""
    writes: bool = False

    @property
    def as_they_are(self) -> bool:
        """Return whether an encoded block can be sent unopened."""
        return not (self.keys_only or self.key_prefix)

    def of(self, block: Block) -> Block:
        """Return the shown part of a block, with a CRC of its own; it keeps all runs."""
        if self.key_prefix:
            block = with_prefix(block, self.key_prefix)
        return without_values(block) if self.keys_only else block


EVERYTHING = Showing()


def with_prefix(block: Block, prefix: bytes) -> Block:
    """Return a numbered block without the rows whose keys do not begin with the prefix; its runs stay."""
    if not block.rows:
        return block
    keys = binary_cells(np.frombuffer(block.key_offsets, "<i4"), block.keys)
    keep = pc.starts_with(keys, pattern=prefix).to_numpy(zero_copy_only=False)
    if keep.all():
        return block
    rows = np.flatnonzero(keep)
    bounds = row_bounds(block.runs)
    kept_below = np.concatenate(([0], np.cumsum(keep)))
    runs = block.runs.copy()
    runs["count"] = kept_below[bounds[1:]] - kept_below[bounds[:-1]]
    if not len(rows):
        return sealed(Block(runs, b"", b"", b"", b"", b"", b"", b"", 0))
    offsets = row_seqnos(block) - np.repeat(block.runs["start_seqno"], block.runs["count"])
    picked = pa.array(rows)

    def cells(offsets: bytes, data: bytes) -> tuple[bytes, bytes]:
        taken = raw_cells(binary_cells(np.frombuffer(offsets, "<i4"), data).take(picked))
        return taken[0].astype("<i4").tobytes(), bytes(taken[1])

    key_offsets, key_data = cells(block.key_offsets, block.keys)
    value_offsets, value_data = b"", b""
    if block.value_offsets:
        value_offsets, value_data = cells(block.value_offsets, block.values)
    return sealed(
        replace(
            block,
            runs=runs,
            seqnos=offsets[rows].astype("<u4").tobytes(),
            ops=_taken(block.ops, "u1", rows),
            key_offsets=key_offsets,
            keys=key_data,
            value_offsets=value_offsets,
            values=value_data,
            times=_taken(block.times, "<i8", rows),
            further=with_cells((one.id, *cells(one.offsets, one.data)) for one in block.further),
        )
    )


def all_begin_with(block: Block, prefixes: Sequence[bytes]) -> bool:
    """Return whether each key of a block begins with one of some prefixes, of which there is at least one."""
    if not block.rows:
        return True
    keys = binary_cells(np.frombuffer(block.key_offsets, "<i4"), block.keys)
    found = [pc.starts_with(keys, pattern=prefix) for prefix in prefixes]
    return bool(pc.all(reduce(pc.or_, found)).as_py())


def _taken(column: bytes, dtype: str, rows: I64) -> bytes:
    return np.frombuffer(column, dtype)[rows].tobytes() if column else b""


@dataclass(slots=True)
class ReadResult:
    """Result of one request: blocks that continue exactly above its seqno, or an error.

    Neither blocks nor an error: the byte limit was reached before this request.
    """

    request: ReadRequest
    blocks: list[Encoded] = field(default_factory=list)
    error: DataDamagedError | None = None


@dataclass(slots=True)
class _Reading:
    """Remaining limits of one read: bytes to send, and bytes of blocks that were decompressed or cut."""

    showing: Showing
    accept_zstd: bool
    send_bytes: int
    plain_bytes: int

    @property
    def is_full(self) -> bool:
        return self.send_bytes <= 0 or self.plain_bytes <= 0

    def takes_compressed(self, size: int) -> bool:
        """Count a block's decompressed bytes; False if it must wait for the next read."""
        if self.plain_bytes < min(size, FRAME_PLAIN_BYTES):
            self.plain_bytes = 0
            return False
        self.plain_bytes -= size
        return True


def read_blocks(
    store: Store,
    requests: Sequence[ReadRequest],
    max_bytes: int,
    *,
    showing: Showing = EVERYTHING,
    accept_zstd: bool = False,
) -> list[ReadResult]:
    """Read, check and slice blocks for several partitions in one short transaction.

    A read ends with the block that reaches ``max_bytes`` of encoded blocks as sent, or FRAME_PLAIN_BYTES of blocks that
    were cut. It ends before a compressed block that would take the decompressed ones above FRAME_PLAIN_BYTES, unless that
    is alone.

    Args:
        showing: which part of the blocks is returned.
        accept_zstd: return a compressed block as stored if the stream wants all of it; otherwise decompress it.
    """
    reading = _Reading(showing, accept_zstd, max_bytes, FRAME_PLAIN_BYTES)
    results = [ReadResult(request) for request in requests]
    with store.look() as cursor:
        for result in results:
            request = result.request
            try:
                found = cursor.above(request.partition, request.above)
                result.blocks = list(_continue_from(request, found, reading))
                if not result.blocks and not reading.is_full:
                    raise DataDamagedError("it is missing")
            except (InvalidArgumentError, DataDamagedError) as error:
                result.error = DataDamagedError(
                    f"partition {request.partition}: a stored block above seqno {request.above} is damaged: {error.message}",
                    hint="restore the partition from a replica or a backup",
                )
            if reading.is_full:
                break
    return results


def _continue_from(
    request: ReadRequest, found: Iterable[bytes], reading: _Reading
) -> Iterable[Encoded]:
    at = request.above
    for data in found:
        # All checks passed before it was stored, so verifying the CRCs is enough.
        compressed = check_stored(data)
        head, runs = own_head(data, request.partition)
        if head.start > at or head.end <= at:
            raise DataDamagedError(
                f"the block tells of seqnos {head.start} to {head.end}, after {at}"
            )
        if compressed and not reading.takes_compressed(plain_bytes(data, len(data))):
            return
        if head.start == at and reading.showing.as_they_are:
            if compressed and not reading.accept_zstd:
                data = decompress_block(data)
            block = Encoded(runs, data)
        else:
            if not compressed:
                reading.plain_bytes -= len(data)
            cut = reading.showing.of(slice_runs(decode_block(data), np.array([at], np.uint64)))
            data = encode_block(cut)
            block = Encoded(cut.runs, data)
        reading.send_bytes -= block.size
        yield block
        if reading.is_full:
            return
        at = head.end
