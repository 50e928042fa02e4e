"""Blocks as plain runs: a message for each row, for people with grpcurl and for languages without an SDK.

How many bytes the messages of a block will have is computed from its columns, so that the credit for them is known
before they are made. A run of more than PLAIN_RUN_BYTES becomes several that share its horizon.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upr_protocol.block import I64, OP_DELETE, U64, Block, row_bounds, row_seqnos
from upr_protocol.rows import block_keys, block_values
from upr_protocol.wire.codec import decode_block
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

PLAIN_RUN_BYTES = 8 * 2**20
MESSAGE_BYTES = 16 * 2**20
"""A message holds plain runs of up to this size together, or one: well below the message limit."""
Tokens = npt.NDArray[np.uint32]
"""Of streams."""
_VARINT_STEPS = np.array([1 << 7 * i for i in range(1, 10)], np.uint64)


_Row = tuple[int, bytes, bytes | None, bool, int]
"""Seqno, key, value, whether it was deleted, time."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One PlainRun to be: rows ``first`` to ``last`` - 1 of a block, which are of its run ``number``.

    Attributes:
        start, end: it tells of the seqnos in (start, end].
        row_bytes: of its rows, with their tags and lengths.
    """

    number: int
    first: int
    last: int
    start: int
    end: int
    row_bytes: int


def plain_bytes_of(block: Block, tokens: Tokens) -> int:
    """Return how many bytes a block's PlainRun messages have together.

    Args:
        tokens: one a run.
    """
    runs = block.runs
    sizes = _row_bytes(block)
    sums = np.concatenate(([0], np.cumsum(sizes)))
    bounds = row_bounds(runs)
    each = np.diff(sums[bounds])
    if (each > PLAIN_RUN_BYTES).any():
        parts = list(_parts(block, sizes))
        head = runs[[part.number for part in parts]].copy()
        head["start_seqno"] = [part.start for part in parts]
        head["end_seqno"] = [part.end for part in parts]
        told = tokens[[part.number for part in parts]]
    else:
        head, told = runs, tokens
    fields = [head[name] for name in ("partition", "start_seqno", "end_seqno", "horizon", "time")]
    return int(sums[-1] + sum(int(_number_bytes(field).sum()) for field in (*fields, told)))


def plain_messages(
    blocks: Sequence[bytes], tokens: bytes, purge_seqnos: bytes = b""
) -> Iterator[bytes]:
    """Yield the FollowResponse messages, encoded, that a frame becomes.

    Args:
        blocks: encoded blocks, not compressed.
        tokens, purge_seqnos: as ``encode_frame`` takes them.

    Raises:
        CorruptBlockError: a block has changed since it was made.
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
    yield wire.FollowResponse(frame=frame).SerializeToString()


def _rows_of(block: Block) -> list[_Row]:
    if not block.rows:
        return []
    return list(
        zip(
            row_seqnos(block).tolist(),
            block_keys(block),
            block_values(block),
            _deletes(block).astype(bool).tolist(),
            _times(block).tolist(),
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
    """Yield what the runs become, in order."""
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
    """Return the bytes of each row in its run: the PlainRow, its tag and its length."""
    if not block.rows:
        return np.zeros(0, np.int64)
    deletes = _deletes(block)
    body = _number_bytes(row_seqnos(block)) + _data_bytes(block.key_offsets)
    if block.value_offsets:
        body += np.where(deletes, 0, _data_bytes(block.value_offsets))
    body += 2 * deletes + _number_bytes(_times(block))
    return 1 + _varint_bytes(body) + body


def _data_bytes(offsets: bytes) -> I64:
    """Return the bytes of a field of bytes in each row, empty or not."""
    lengths = np.diff(np.frombuffer(offsets, "<i4")).astype(np.int64)
    return 1 + _varint_bytes(lengths) + lengths


def _number_bytes(values: U64 | Tokens) -> I64:
    """Return the bytes of a number's field, which is left out for 0."""
    sizes: I64 = np.where(values == 0, 0, 1 + _varint_bytes(values))
    return sizes


def _varint_bytes(values: I64 | U64 | Tokens) -> I64:
    found: I64 = np.searchsorted(_VARINT_STEPS, values.astype(np.uint64), side="right") + 1
    return found


def _deletes(block: Block) -> I64:
    """Return 1 for each delete and 0 for each set."""
    ops = np.frombuffer(block.ops, np.uint8) if block.ops else np.zeros(block.rows, np.uint8)
    deletes: I64 = (ops == OP_DELETE).astype(np.int64)
    return deletes


def _times(block: Block) -> U64:
    """Return when each row was committed."""
    if block.times:
        return np.frombuffer(block.times, "<u8")
    times: U64 = np.repeat(block.runs["time"], block.runs["count"])
    return times
