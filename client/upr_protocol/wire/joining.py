"""Many small blocks of one frame into few: what is paid for each block is paid once a frame."""

from collections.abc import Sequence

import google_crc32c
import numpy as np
import numpy.typing as npt

from upr_protocol.block import (
    I64,
    OP_SET,
    RUN,
    Block,
    Runs,
    check_block,
    crc_of_columns,
    row_bounds,
    sealed,
)
from upr_protocol.errors import CorruptBlockError
from upr_protocol.wire.codec import block_from_message, check_plain_bytes, decode_runs
from upr_protocol.wire.v1 import types_pb2

Messages = Sequence[types_pb2.Block]
Tokens = npt.NDArray[np.uint32]


JOINED_BYTES_MAX = 16 * 2**10
"""Values of a block that is joined with others: copying larger ones costs more than it spares."""


def joined_blocks(messages: Messages, tokens: Tokens) -> tuple[list[Block], Tokens]:
    """Return the blocks of a frame, checked whole and small ones joined, and the token of each run.

    Stored blocks may come in another order than they were sent in, each with its token; those of one partition
    stay in theirs.

    Args:
        tokens: uint32, one a run over all messages.

    Raises:
        CorruptBlockError, InvalidArgumentError: as ``block_from_message`` and ``check_plain_bytes``.
    """
    check_plain_bytes(messages)
    stored = all(len(message.runs) == RUN.itemsize for message in messages)
    if not stored or len(messages) == 1 or len(tokens) != len(messages):
        return [block_from_message(message) for message in messages], tokens
    order, groups = _groups(messages)
    blocks = [
        block_from_message(group[0]) if len(group) == 1 else _joined(group) for group in groups
    ]
    return blocks, tokens[order]


def _groups(messages: Messages) -> tuple[list[int], list[list[types_pb2.Block]]]:
    """Return in which order to take blocks of one run, and which neighbours in it become one block.

    First goes the first block of each partition, then the second ones: in a block partitions ascend.
    """
    partitions = [int.from_bytes(message.runs[:4], "little") for message in messages]
    seen: dict[int, int] = {}
    levels = []
    for partition in partitions:
        levels.append(seen.get(partition, 0))
        seen[partition] = levels[-1] + 1
    order = sorted(range(len(messages)), key=lambda i: (levels[i], partitions[i]))
    groups: list[list[types_pb2.Block]] = []
    before: tuple[int, bool] | None = None
    for i in order:
        message = messages[i]
        # A compressed block has no offsets here, and is not joined.
        small = bool(message.key_offsets) and len(message.values) <= JOINED_BYTES_MAX
        kind = (levels[i], bool(message.value_offsets)) if small else None
        if kind is not None and kind == before:
            groups[-1].append(message)
        else:
            groups.append([message])
        before = kind
    return order, groups


def _joined(messages: Messages) -> Block:
    """Join blocks of one run each, of ascending partitions."""
    for message in messages:
        _check_crcs(message)
    runs = decode_runs(b"".join([message.runs for message in messages]))
    rows = np.array([len(m.key_offsets) // 4 - 1 for m in messages], np.int64)
    if (rows != runs["count"]).any():
        raise CorruptBlockError("a run table does not count the rows that the columns hold")
    key_offsets, keys = _join_data([m.key_offsets for m in messages], [m.keys for m in messages])
    value_offsets, values = b"", b""
    if messages[0].value_offsets:
        value_offsets, values = _join_data(
            [m.value_offsets for m in messages], [m.values for m in messages]
        )
    ops = _join_fixed([m.ops for m in messages], np.full(rows.sum(), OP_SET, np.uint8), rows)
    times = _join_fixed([m.times for m in messages], np.repeat(runs["time"], rows), rows)
    seqnos = _join_seqnos(messages, runs, rows)
    block = Block(runs, seqnos, ops, key_offsets, keys, value_offsets, values, times, 0)
    block = sealed(block)
    check_block(block)
    return block


def _check_crcs(message: types_pb2.Block) -> None:
    columns = crc_of_columns(
        (
            message.seqnos,
            message.ops,
            message.key_offsets,
            message.keys,
            message.value_offsets,
            message.values,
            message.times,
        )
    )
    crcs = (columns, google_crc32c.value(message.runs), 0)
    if crcs != (message.columns_crc, message.table_crc, message.zstd_crc):
        raise CorruptBlockError(
            "a block's columns or table do not have the CRC32C that the block says",
            hint="the bytes were damaged on the way or the writer computes the CRC differently",
        )


def _join_data(offsets: list[bytes], data: list[bytes]) -> tuple[bytes, bytes]:
    """Join Arrow columns: the offsets of each block begin anew at 0."""
    if any(len(column) % 4 for column in offsets):
        raise CorruptBlockError("offsets take a number of bytes that is not a multiple of 4")
    joined = np.frombuffer(b"".join(offsets), "<i4")
    lasts = np.cumsum([len(column) // 4 for column in offsets]) - 1
    firsts = np.concatenate(([0], lasts[:-1] + 1))
    if joined[firsts].any() or (joined[lasts] != [len(column) for column in data]).any():
        raise CorruptBlockError("offsets do not run from 0 to the length of their data")
    lengths = np.delete(np.diff(joined, prepend=0), firsts)
    result = np.zeros(len(lengths) + 1, "<i4")
    np.cumsum(lengths, out=result[1:])
    return result.tobytes(), b"".join(data)


def _join_fixed(columns: list[bytes], absent: npt.NDArray[np.generic], rows: I64) -> bytes:
    """Join columns of fixed width; where one is empty its rows get what ``absent`` holds for them."""
    if not any(columns):
        return b""
    width = absent.itemsize
    there = np.array([bool(column) for column in columns])
    if (there & (rows * width != [len(column) for column in columns])).any():
        raise CorruptBlockError("a column's length does not fit the number of rows")
    if not there.all():
        absent = absent.copy()
        absent[np.repeat(there, rows)] = np.frombuffer(b"".join(columns), absent.dtype)
        return absent.tobytes()
    return b"".join(columns)


def _join_seqnos(messages: Messages, runs: Runs, rows: I64) -> bytes:
    columns = [message.seqnos for message in messages]
    if not any(columns):
        return b""
    spans = runs["end_seqno"] - runs["start_seqno"]
    dense = np.array([not column for column in columns])
    if (dense & (rows > 0) & (rows.astype(np.uint64) != spans)).any():
        raise CorruptBlockError(
            "a run holds fewer rows than seqnos, and the rows' seqnos are missing"
        )
    firsts = np.repeat(row_bounds(runs)[:-1], rows)
    counted = (np.arange(1, rows.sum() + 1) - firsts).astype("<u4")
    return _join_fixed(columns, counted, rows)
