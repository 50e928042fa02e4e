"""Domain values to protobuf and back: the only module that knows both."""

from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from upr_protocol.block import RUN, Block, Runs, check_block, crc_of_columns
from upr_protocol.errors import CorruptBlockError, UprError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.wire.v1 import types_pb2

FRAME_TAG = b"\x1a"
"""Field 3 (frame) of FollowResponse, length-delimited."""
BLOCK_TAG = b"\x0a"
"""Field 1 (blocks) of Frame, length-delimited."""
TOKENS_TAG = b"\x12"
"""Field 2 (tokens) of Frame, length-delimited."""


def encode_runs(runs: Runs) -> bytes:
    """Return the table's bytes, 40 a run."""
    return runs.tobytes()


def decode_runs(data: bytes) -> Runs:
    """Return the table, read-only, or raise CorruptBlockError when its length is not a multiple of 40."""
    if len(data) % RUN.itemsize:
        raise CorruptBlockError(f"a run table of {len(data)} bytes, a run takes {RUN.itemsize}")
    return np.frombuffer(data, RUN)


def block_to_message(block: Block) -> types_pb2.Block:
    """Return the block as a message, with the CRC of its table."""
    runs = encode_runs(block.runs)
    return types_pb2.Block(
        runs=runs,
        seqnos=block.seqnos,
        ops=block.ops,
        key_offsets=block.key_offsets,
        keys=block.keys,
        value_offsets=block.value_offsets,
        values=block.values,
        times=block.times,
        columns_crc=block.columns_crc,
        table_crc=google_crc32c.value(runs),
    )


def encode_block(block: Block) -> bytes:
    """Return the block as the bytes of a Block message: what journal, store and frames hold."""
    return block_to_message(block).SerializeToString()


def block_from_message(message: types_pb2.Block, *, numbered: bool = True) -> Block:
    """Return the block of a message, checked whole.

    Raises:
        CorruptBlockError: a CRC is wrong, or columns and table contradict each other.
        InvalidArgumentError: a key, value, partition or seqno is out of its range.
    """
    crc = google_crc32c.value(message.runs)
    if crc != message.table_crc:
        raise CorruptBlockError(
            f"the block's table has CRC32C {crc:08x}, the block says {message.table_crc:08x}"
        )
    block = Block(
        decode_runs(message.runs),
        message.seqnos,
        message.ops,
        message.key_offsets,
        message.keys,
        message.value_offsets,
        message.values,
        message.times,
        message.columns_crc,
    )
    check_block(block, numbered=numbered)
    return block


def decode_block(data: bytes) -> Block:
    """Return the block in the bytes of a Block message, checked whole.

    Raises:
        CorruptBlockError: the bytes are no Block, a CRC is wrong, or its parts contradict each other.
        InvalidArgumentError: a key, value, partition or seqno is out of its range.
    """
    try:
        message = types_pb2.Block.FromString(data)
    except DecodeError as error:
        raise CorruptBlockError(f"{len(data)} bytes are not a block") from error
    return block_from_message(message)


def column_spans(data: bytes) -> dict[int, tuple[int, int]]:
    """Return where each field of an encoded Block lies: field number -> (first byte, end).

    For readers that hand the columns on as they lie, without copying each into an object of its own. The
    bytes must come from encode_block; fields that are absent are empty.

    Raises:
        CorruptBlockError: the bytes are no Block.
    """
    spans: dict[int, tuple[int, int]] = {}
    at = 0
    try:
        while at < len(data):
            tag = data[at]
            at += 1
            if tag & 7 == 5:
                spans[tag >> 3] = (at, at + 4)
                at += 4
                continue
            if tag & 7 != 2:
                raise CorruptBlockError(f"{len(data)} bytes are not a block")
            length = shift = 0
            while True:
                byte = data[at]
                at += 1
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            spans[tag >> 3] = (at, at + length)
            at += length
    except IndexError as error:
        raise CorruptBlockError(f"{len(data)} bytes are not a block") from error
    return spans


def check_encoded(data: bytes) -> None:
    """Raise CorruptBlockError unless the CRCs in an encoded Block fit its bytes.

    Cheaper than decode_block, for bytes that were checked whole when they came in.
    """
    spans = column_spans(data)
    columns = [data[slice(*spans.get(field, (0, 0)))] for field in range(2, 9)]
    crc = crc_of_columns(columns)
    table = google_crc32c.value(data[slice(*spans.get(1, (0, 0)))])
    for name, value, field in (("columns", crc, 9), ("table", table, 10)):
        told = int.from_bytes(data[slice(*spans.get(field, (0, 0)))], "little")
        if told != value:
            raise CorruptBlockError(
                f"the block's {name} have CRC32C {value:08x}, the block says {told:08x}"
            )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_frame(blocks: Sequence[bytes], tokens: bytes) -> bytes:
    """Return a FollowResponse with a frame of encoded blocks.

    The blocks' bytes go in as they are: building the message object would copy each column twice.

    Args:
        blocks: what encode_block returned, one or several.
        tokens: a uint32 a run over all blocks, little-endian.
    """
    parts: list[bytes] = []
    for block in blocks:
        parts += (BLOCK_TAG, _varint(len(block)), block)
    parts += (TOKENS_TAG, _varint(len(tokens)), tokens)
    return b"".join((FRAME_TAG, _varint(sum(map(len, parts))), *parts))


def log_to_messages(log: Iterable[FailoverRecord]) -> list[types_pb2.FailoverRecord]:
    """Return a log's records, oldest first, as messages."""
    return [types_pb2.FailoverRecord(failover_id=r.failover_id, seqno=r.seqno) for r in log]


def log_from_messages(messages: Iterable[types_pb2.FailoverRecord]) -> FailoverLog | None:
    """Return the log of messages, or None for none; InvalidArgumentError when it contradicts itself."""
    records = tuple(FailoverRecord(m.failover_id, m.seqno) for m in messages)
    return FailoverLog(records) if records else None


def problem_of(error: UprError) -> types_pb2.Problem:
    """Return an error as a message."""
    return types_pb2.Problem(
        reason=error.reason, retriable=error.retriable, message=error.message, hint=error.hint
    )
