"""Domain values to protobuf and back: the only module that knows both."""

from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from upr_protocol.block import RUN, Block, Runs, check_block, crc_of_columns
from upr_protocol.errors import CorruptBlockError, InvalidArgumentError, UprError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.limits import MESSAGE_BYTES_MAX
from upr_protocol.wire.compression import compress, decompress
from upr_protocol.wire.v1 import types_pb2

FRAME_TAG = b"\x1a"
"""Field 3 (frame) of FollowResponse, length-delimited."""
BLOCK_TAG = b"\x0a"
"""Field 1 (blocks) of Frame, length-delimited."""
TOKENS_TAG = b"\x12"
"""Field 2 (tokens) of Frame, length-delimited."""
PURGE_SEQNOS_TAG = b"\x1a"
"""Field 3 (purge_seqnos) of Frame, length-delimited."""

COMPRESS_BYTES_MIN = 512
"""Columns smaller than this are not compressed: little would be won, and each frame costs its header."""
COMPRESS_FRACTION = 0.85
"""What does not become at least this much smaller stays as it is: its readers would pay for nothing."""

Spans = dict[int, tuple[int, int]]
"""Field number -> (first byte, end)."""
Columns = tuple[bytes, Spans]
"""Bytes, and where in them each column of a block lies; columns that are absent are empty."""

_RUNS, _COLUMNS, _COLUMNS_CRC, _TABLE_CRC, _ZSTD, _ZSTD_CRC = 1, range(2, 9), 9, 10, 11, 12
_LENGTHS_BYTES = 4 * len(_COLUMNS)
_ABSENT = (0, 0)


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
    """Return the block of a message, compressed or not, checked whole.

    Raises:
        CorruptBlockError: a CRC is wrong, columns and table contradict each other, or it cannot be decompressed.
        InvalidArgumentError: a key, value, partition or seqno is out of its range, or what is not numbered yet is
            compressed.
    """
    crc = google_crc32c.value(message.runs)
    if crc != message.table_crc:
        raise CorruptBlockError(
            f"the block's table has CRC32C {crc:08x}, the block says {message.table_crc:08x}"
        )
    columns = (
        message.seqnos,
        message.ops,
        message.key_offsets,
        message.keys,
        message.value_offsets,
        message.values,
        message.times,
    )
    if message.zstd or message.zstd_crc:
        if not numbered:
            raise InvalidArgumentError(
                "a write carries a compressed block", hint="send it as it is"
            )
        if any(columns):
            raise CorruptBlockError("a compressed block has columns")
        _check_zstd_crc(message.columns_crc, message.zstd, message.zstd_crc)
        data, spans = _decompressed(message.zstd)
        columns = tuple(data[slice(*spans[field])] for field in _COLUMNS)  # type: ignore[assignment]
    block = Block(decode_runs(message.runs), *columns, message.columns_crc)
    check_block(block, numbered=numbered)
    return block


def check_plain_bytes(messages: Sequence[types_pb2.Block]) -> None:
    """Raise CorruptBlockError when a frame's compressed blocks have more columns than would fit into a message."""
    lengths = [
        np.frombuffer(m.zstd[:_LENGTHS_BYTES].ljust(_LENGTHS_BYTES, b"\0"), "<u4")
        for m in messages
        if m.zstd
    ]
    size = sum(int(one.sum(dtype=np.int64)) for one in lengths)
    if size > MESSAGE_BYTES_MAX:
        raise CorruptBlockError(
            f"a frame's compressed blocks have {size} bytes of columns, the limit is {MESSAGE_BYTES_MAX}"
        )


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


def column_spans(data: bytes) -> Spans:
    """Return where each field of an encoded Block lies: field number -> (first byte, end).

    For readers that hand the columns on as they lie, without copying each into an object of its own. The
    bytes must come from encode_block or compress_block; fields that are absent are empty, as are the columns of
    a compressed block: see open_columns.

    Raises:
        CorruptBlockError: the bytes are no Block.
    """
    spans: Spans = {}
    at = 0
    try:
        while at < len(data):
            tag = data[at]
            at += 1
            if tag & 7 == 5:
                spans[tag >> 3] = (at, at + 4)
                at += 4
                continue
            length = shift = 0
            while True:
                byte = data[at]
                at += 1
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
                if shift > 28:
                    raise CorruptBlockError(f"{len(data)} bytes are not a block")
            if tag & 7 != 2:
                raise CorruptBlockError(f"{len(data)} bytes are not a block")
            spans[tag >> 3] = (at, at + length)
            at += length
    except IndexError as error:
        raise CorruptBlockError(f"{len(data)} bytes are not a block") from error
    if at > len(data):
        raise CorruptBlockError(f"{len(data)} bytes are not a block")
    return spans


def check_encoded(data: bytes) -> bool:
    """Raise CorruptBlockError unless the CRCs in an encoded Block fit its bytes; return whether it is compressed.

    Cheaper than decode_block, for bytes that were checked whole when they came in. A compressed block is not
    decompressed: it has a CRC over its compressed bytes.
    """
    spans = column_spans(data)
    _check_spans(data, spans)
    return _ZSTD in spans


def _check_spans(data: bytes, spans: Spans) -> None:
    table = google_crc32c.value(data[slice(*spans.get(_RUNS, _ABSENT))])
    _check_crc("table", table, _number(data, spans, _TABLE_CRC))
    columns_crc = _number(data, spans, _COLUMNS_CRC)
    if _ZSTD in spans or _ZSTD_CRC in spans:
        zstd = data[slice(*spans.get(_ZSTD, _ABSENT))]
        _check_zstd_crc(columns_crc, zstd, _number(data, spans, _ZSTD_CRC))
        return
    columns = [data[slice(*spans.get(field, _ABSENT))] for field in _COLUMNS]
    _check_crc("columns", crc_of_columns(columns), columns_crc)


def _number(data: bytes, spans: Spans, field: int) -> int:
    first, end = spans.get(field, _ABSENT)
    if end - first > 4:
        raise CorruptBlockError(f"a checksum of {end - first} bytes, it takes 4")
    return int.from_bytes(data[first:end], "little")


def _check_crc(name: str, value: int, told: int) -> None:
    if told != value:
        raise CorruptBlockError(
            f"the block's {name} have CRC32C {value:08x}, the block says {told:08x}"
        )


def _zstd_crc(columns_crc: int, zstd: bytes) -> int:
    crc: int = google_crc32c.value(columns_crc.to_bytes(4, "little"))
    return int(google_crc32c.extend(crc, zstd))


def _check_zstd_crc(columns_crc: int, zstd: bytes, told: int) -> None:
    _check_crc("compressed columns", _zstd_crc(columns_crc, zstd), told)


def _decompressed(zstd: bytes) -> Columns:
    """Decompress field 11, whatever it holds, in no more memory than MESSAGE_BYTES_MAX and some."""
    if len(zstd) <= _LENGTHS_BYTES:
        raise CorruptBlockError(f"a compressed block has {len(zstd)} bytes")
    spans: Spans = {}
    at = 0
    for field, length in zip(
        _COLUMNS, np.frombuffer(zstd, "<u4", len(_COLUMNS)).tolist(), strict=True
    ):
        spans[field] = (at, at + length)
        at += length
    if at > MESSAGE_BYTES_MAX:
        raise CorruptBlockError(
            f"a compressed block has {at} bytes of columns, the limit is {MESSAGE_BYTES_MAX}"
        )
    return decompress(memoryview(zstd)[_LENGTHS_BYTES:], at), spans


def open_columns(data: bytes) -> Columns:
    """Return the bytes in which an encoded block's columns lie, and where: its own unless it is compressed.

    ``data`` must have passed check_encoded.

    Raises:
        CorruptBlockError: the bytes are no Block, or cannot be decompressed.
    """
    return _opened(data, column_spans(data))


def open_checked(data: bytes) -> tuple[Runs, Columns]:
    """Return an encoded block's run table and, as open_columns does, its columns; check_encoded first.

    Raises:
        CorruptBlockError: the bytes are no Block, a CRC is wrong, or it cannot be decompressed.
    """
    spans = column_spans(data)
    _check_spans(data, spans)
    return decode_runs(data[slice(*spans.get(_RUNS, _ABSENT))]), _opened(data, spans)


def _opened(data: bytes, spans: Spans) -> Columns:
    if _ZSTD not in spans:
        return data, spans
    opened, columns = _decompressed(data[slice(*spans[_ZSTD])])
    crc = crc_of_columns([opened[a:b] for a, b in columns.values()])
    _check_crc("columns", crc, _number(data, spans, _COLUMNS_CRC))
    return opened, columns


def is_compressed(data: bytes) -> bool:
    """Whether an encoded block is compressed.

    Raises:
        CorruptBlockError: the bytes are no Block.
    """
    return _ZSTD in column_spans(data)


def plain_bytes(beginning: bytes, size: int) -> int:
    """Return about how many bytes an encoded block has when it is not compressed.

    A hint for planning, taken from what the block says of itself: nothing is checked.

    Args:
        beginning: the block's first bytes; of a block of one run 128 are enough.
        size: all its bytes.
    """
    at, length, shift = 1, 0, 0
    while at < len(beginning) and shift <= 28:
        length |= (beginning[at] & 0x7F) << shift
        shift += 7
        at += 1
        if beginning[at - 1] < 0x80:
            break
    at += length
    for tag in (b"\x4d", b"\x55"):
        if beginning[at : at + 1] == tag:
            at += 5
    if beginning[at : at + 1] != b"\x5a":
        return size
    at += 1
    while at < len(beginning) and beginning[at] >= 0x80:
        at += 1
    lengths = beginning[at + 1 : at + 1 + _LENGTHS_BYTES]
    if len(lengths) < _LENGTHS_BYTES:
        return size
    return int(np.frombuffer(lengths, "<u4").sum(dtype=np.int64)) + at


def compress_block(data: bytes) -> bytes:
    """Return an encoded block compressed, or the very same object where that is not worth its while.

    Args:
        data: what encode_block returned.

    Raises:
        CorruptBlockError: the bytes are no Block.
        ImportError: ``zstandard`` is not installed.
    """
    spans = column_spans(data)
    view = memoryview(data)
    columns = [view[slice(*spans.get(field, _ABSENT))] for field in _COLUMNS]
    lengths = np.array([len(column) for column in columns], "<u4")
    size = int(lengths.sum())
    if _ZSTD in spans or not COMPRESS_BYTES_MIN <= size <= MESSAGE_BYTES_MAX:
        return data
    zstd = lengths.tobytes() + compress(b"".join(columns))
    columns_crc = _number(data, spans, _COLUMNS_CRC)
    parts = (
        *_bytes_field(_RUNS, view[slice(*spans.get(_RUNS, _ABSENT))]),
        _fixed_field(_COLUMNS_CRC, columns_crc),
        _fixed_field(_TABLE_CRC, _number(data, spans, _TABLE_CRC)),
        *_bytes_field(_ZSTD, zstd),
        _fixed_field(_ZSTD_CRC, _zstd_crc(columns_crc, zstd)),
    )
    if sum(map(len, parts)) > COMPRESS_FRACTION * len(data):
        return data
    return b"".join(parts)


def decompress_block(data: bytes) -> bytes:
    """Return an encoded block as encode_block made it: the same bytes that were compressed, if they were.

    Raises:
        CorruptBlockError: the bytes are no Block, a CRC is wrong, or it cannot be decompressed.
    """
    check_encoded(data)
    opened, columns = open_columns(data)
    if opened is data:
        return data
    spans = column_spans(data)
    view = memoryview(opened)
    parts = [*_bytes_field(_RUNS, memoryview(data)[slice(*spans.get(_RUNS, _ABSENT))])]
    for field, span in columns.items():
        parts += _bytes_field(field, view[slice(*span)])
    for field in (_COLUMNS_CRC, _TABLE_CRC):
        parts.append(_fixed_field(field, _number(data, spans, field)))
    return b"".join(parts)


# A field that is empty or 0 is left out, as protobuf does: the bytes are those of its own encoder.


def _bytes_field(field: int, value: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    return (bytes([field << 3 | 2]), _varint(len(value)), value) if len(value) else ()


def _fixed_field(field: int, value: int) -> bytes:
    return bytes([field << 3 | 5]) + value.to_bytes(4, "little") if value else b""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_frame(blocks: Sequence[bytes], tokens: bytes, purge_seqnos: bytes = b"") -> bytes:
    """Return a FollowResponse with a frame of encoded blocks.

    The blocks' bytes go in as they are: building the message object would copy each column twice.

    Args:
        blocks: what encode_block returned, one or several.
        tokens: a uint32 a run over all blocks, little-endian.
        purge_seqnos: 12 bytes a partition, see Frame.
    """
    parts: list[bytes] = []
    for block in blocks:
        parts += (BLOCK_TAG, _varint(len(block)), block)
    parts += (TOKENS_TAG, _varint(len(tokens)), tokens)
    if purge_seqnos:
        parts += (PURGE_SEQNOS_TAG, _varint(len(purge_seqnos)), purge_seqnos)
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
