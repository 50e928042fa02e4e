"""Domain values to protobuf and back: the only module that knows both.

Many small blocks of one frame are joined into few here: what is paid for each block is then paid once a frame.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import google_crc32c
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from upr_protocol.block import (
    I64,
    OP_SET,
    RUN,
    RUN_FIELDS,
    Block,
    Further,
    FurtherColumn,
    Runs,
    SevenColumns,
    build_block,
    check_block,
    crc_of_columns,
    offset_column,
    row_bounds,
    sealed,
    side_by_side,
    with_cells,
)
from upr_protocol.errors import (
    CorruptBlockError,
    InvalidArgumentError,
    PositionDamagedError,
    ProtocolError,
    UprError,
)
from upr_protocol.failover import (
    FailoverLog,
    FailoverRecord,
    check_failover_id,
    check_partition,
)
from upr_protocol.limits import (
    FAILOVER_LOG_MAX,
    FURTHER_COLUMNS_MAX,
    MARKERS_MAX,
    MESSAGE_BYTES_MAX,
    NAME_BYTES_MAX,
    WRITE_NUMBER_MAX,
    WRITE_ROWS_MAX,
)
from upr_protocol.partitioning import partitions_of
from upr_protocol.position import Position
from upr_protocol.position_table import RECORD, ROW, UNKNOWN_HORIZON, PositionTable
from upr_protocol.wire.compression import compress, decompress
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

_FRAME_TAG = bytes([wire.FollowResponse.FRAME_FIELD_NUMBER << 3 | 2])
_BLOCK_TAG = bytes([wire.Frame.BLOCKS_FIELD_NUMBER << 3 | 2])
_CREDIT_TAG = bytes([wire.Frame.CREDIT_BYTES_FIELD_NUMBER << 3])

COMPRESS_BYTES_MIN = 512
"""Columns smaller than this are not compressed: little would be won, and each frame costs its header."""
COMPRESS_FRACTION = 0.85
"""Largest ratio of the compressed size: what becomes larger stays as it is, as its readers would pay for nothing."""

JOIN_BYTES_MIN = 32 * 1024
"""Columns from this size on are joined to an encoded block here: the message would copy each twice more."""

Spans = dict[int, tuple[int, int]]
"""Field number -> (first byte, end); of further columns, which are last, all fields with their tags."""
Columns = tuple[bytes, Spans]
"""Bytes, and where in them each column of a block lies; columns that are absent are empty."""

_RUNS, _COLUMNS, _COLUMNS_CRC, _TABLE_CRC, _ZSTD, _ZSTD_CRC = 1, range(2, 9), 9, 10, 11, 12
_FURTHER = 13
_FURTHER_TAG = 0x6A
_LENGTHS_BYTES = 4 * (len(_COLUMNS) + 1)
_ZSTD_MAGIC = 0xFD2FB528
_ABSENT = (0, 0)


def count_runs(data: bytes) -> int:
    """Return how many runs a table has, or raise CorruptBlockError when its length is not a multiple of 40."""
    count, rest = divmod(len(data), RUN_FIELDS.size)
    if rest:
        raise CorruptBlockError(
            f"run table is {len(data)} bytes; must be a multiple of {RUN_FIELDS.size}"
        )
    return count


def decode_runs(data: bytes) -> Runs:
    """Return the table, read-only, or raise as ``count_runs``."""
    count_runs(data)
    return np.frombuffer(data, RUN)


def block_to_message(block: Block) -> types_pb2.Block:
    """Return the block as a message, with the CRC of its table."""
    message = types_pb2.Block()
    fill_message(message, block.runs.tobytes(), block.columns, block.columns_crc, block.further)
    return message


def fill_message(
    message: types_pb2.Block, runs: bytes, columns: Sequence[bytes], crc: int, further: Further
) -> None:
    """Make an empty message that of a block, with the CRC of its table.

    For a message within another one: handing a finished one to its constructor copies all columns twice.
    """
    message.runs = runs
    (
        message.seqnos,
        message.ops,
        message.key_offsets,
        message.keys,
        message.value_offsets,
        message.values,
        message.times,
    ) = columns
    message.columns_crc = crc
    message.table_crc = google_crc32c.value(runs)
    for one in further:
        message.further.add(id=one.id, offsets=one.offsets, data=one.data)


def encode_columns(runs: bytes, columns: Sequence[bytes], further: Further = ()) -> bytes:
    """Return what ``encode_block`` does, of the table's bytes, the seven columns in the order of the wire and further ones."""
    return _encode(runs, columns, crc_of_columns(columns, further), further)


def encode_block(block: Block) -> bytes:
    """Return the block as the bytes of a Block message: what journal, store and frames hold."""
    return _encode(block.runs.tobytes(), block.columns, block.columns_crc, block.further)


def _encode(runs: bytes, columns: Sequence[bytes], columns_crc: int, further: Further) -> bytes:
    if sum(map(len, columns)) >= JOIN_BYTES_MIN:
        told = [types_pb2.FurtherColumn(id=c.id, offsets=c.offsets, data=c.data) for c in further]
        fields = types_pb2.Block(further=told).SerializeToString() if told else b""
        return _join_fields(runs, columns, columns_crc, google_crc32c.value(runs), fields)
    message = types_pb2.Block()
    fill_message(message, runs, columns, columns_crc, further)
    return message.SerializeToString()


_columns_of: Callable[[types_pb2.Block], SevenColumns] = attrgetter(
    "seqnos", "ops", "key_offsets", "keys", "value_offsets", "values", "times"
)


def _further_of(message: types_pb2.Block) -> Further:
    if not (told := message.further):
        return ()
    if len(told) > FURTHER_COLUMNS_MAX:
        raise CorruptBlockError(
            f"further columns of a block are {len(told)}; must be at most {FURTHER_COLUMNS_MAX}"
        )
    return tuple([FurtherColumn(one.id, one.offsets, one.data) for one in told])


def further_in(columns: Columns) -> Further:
    """Return the further columns, not checked; CorruptBlockError when they cannot be read."""
    data, spans = columns
    return _further_of(_message_of(data[slice(*spans[_FURTHER])])) if _FURTHER in spans else ()


def _message_of(data: bytes) -> types_pb2.Block:
    try:
        return types_pb2.Block.FromString(data)
    except DecodeError as error:
        raise CorruptBlockError(f"{len(data)} bytes are not a block") from error


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
            f"the block's table has CRC32C {crc:08x}; must be {message.table_crc:08x}"
        )
    columns, further = _columns_of(message), _further_of(message)
    if message.zstd or message.zstd_crc:
        if not numbered:
            raise InvalidArgumentError(
                "a write carries a compressed block", hint="send it as it is"
            )
        if any(columns) or further:
            raise CorruptBlockError("a compressed block has columns")
        found = _zstd_crc(message.columns_crc, message.zstd)
        _check_crc("compressed columns", found, message.zstd_crc)
        data, spans = _decompressed(message.zstd)
        columns = tuple(data[slice(*spans[field])] for field in _COLUMNS)  # type: ignore[assignment]
        further = further_in((data, spans))
    block = Block(decode_runs(message.runs), *columns, message.columns_crc, further)
    check_block(block, numbered=numbered)
    return block


def block_of_write(write: kv_pb2.WriteBlock) -> Block:
    """Return the unnumbered block of a write, or the one that its rows make; checked whole.

    Raises:
        CorruptBlockError: as ``block_from_message``.
        InvalidArgumentError: the same, or there are too many rows, or a block as well, or a delete has a value.
    """
    rows = write.rows
    if bool(rows) == write.HasField("block"):
        found = "a block and rows" if rows else "neither a block nor rows"
        raise InvalidArgumentError(f"a write has {found}; must have one of them")
    if not rows:
        return block_from_message(write.block, numbered=False)
    if len(rows) > WRITE_ROWS_MAX:
        raise InvalidArgumentError(
            f"a write has {len(rows)} rows; must be at most {WRITE_ROWS_MAX}", hint="send several"
        )
    keys = [row.key for row in rows]
    partitions = partitions_of(keys)
    values: list[bytes | None] = []
    for number, row in enumerate(rows):
        if row.deleted and row.value:
            raise InvalidArgumentError(
                f"row {number} is a delete with a value of {len(row.value)} bytes; must be empty"
            )
        if row.HasField("partition"):
            partitions[number] = check_partition(row.partition)
        values.append(None if row.deleted else row.value)
    return build_block(keys, values, partitions)


def check_plain_bytes(messages: Sequence[types_pb2.Block]) -> None:
    """Raise CorruptBlockError when a frame's compressed blocks have more columns than would fit into a message."""
    size = sum(sum(_lengths_in(m.zstd[:_LENGTHS_BYTES])) for m in messages if m.zstd)
    if size > MESSAGE_BYTES_MAX:
        raise CorruptBlockError(
            f"columns of a frame's compressed blocks are {size} bytes; must be at most {MESSAGE_BYTES_MAX}"
        )


def decode_block(data: bytes) -> Block:
    """Return the block in the bytes of a Block message, checked whole.

    Raises:
        CorruptBlockError: the bytes are no Block, a CRC is wrong, or its parts contradict each other.
        InvalidArgumentError: a key, value, partition or seqno is out of its range.
    """
    return block_from_message(_message_of(data))


def reopen_block(data: bytes) -> Block:
    """Return the block in the bytes of a Block message that was checked whole before; its CRCs are checked again.

    Raises:
        CorruptBlockError: the bytes changed, or are compressed.
    """
    message = _message_of(data)
    if message.zstd:
        raise CorruptBlockError("the block is compressed")
    further = _check_crcs(message)
    return Block(decode_runs(message.runs), *_columns_of(message), message.columns_crc, further)


def column_spans(data: bytes) -> Spans:
    """Return where each field of an encoded Block lies: field number -> (first byte, end).

    For readers that hand the columns on as they lie, without a copy of each. The bytes must come from encode_block or
    compress_block; fields that are absent are empty, as are the columns of a compressed block: see open_columns.

    Raises:
        CorruptBlockError: the bytes are no Block.
    """
    spans: Spans = {}
    at = further = 0
    try:
        while at < len(data):
            tag = data[at]
            if tag == _FURTHER_TAG:
                spans.setdefault(_FURTHER, (at, len(data)))
                further += 1
            elif further or tag >> 3 in spans:
                raise IndexError
            if further > FURTHER_COLUMNS_MAX:
                raise IndexError
            at += 1
            if tag & 7 == 5:
                spans[tag >> 3] = (at, at + 4)
                at += 4
                continue
            length, at = varint_at(data, at)
            if tag & 7 != 2:
                raise IndexError
            if not further:
                spans[tag >> 3] = (at, at + length)
            at += length
        if at > len(data):
            raise IndexError
    except IndexError as error:
        raise CorruptBlockError(f"{len(data)} bytes are not a block") from error
    return spans


def varint_at(data: bytes, at: int, bits: int = 35) -> tuple[int, int]:
    """Return the number at an offset, and where it ends.

    Args:
        bits: those that its bytes may hold: 35 for a length, 70 for any number, of which those above 64 do not count.

    Raises:
        IndexError: there is none.
    """
    value = 0
    for shift in range(0, bits, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise IndexError


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
        found = _zstd_crc(columns_crc, zstd)
        _check_crc("compressed columns", found, _number(data, spans, _ZSTD_CRC))
        return
    columns = [data[slice(*spans.get(field, _ABSENT))] for field in _COLUMNS]
    _check_crc("columns", crc_of_columns(columns, further_in((data, spans))), columns_crc)


def _number(data: bytes, spans: Spans, field: int) -> int:
    first, end = spans.get(field, _ABSENT)
    if end - first > 4:
        raise CorruptBlockError(f"checksum is {end - first} bytes; must be 4")
    return int.from_bytes(data[first:end], "little")


def _check_crc(name: str, value: int, told: int) -> None:
    if told != value:
        raise CorruptBlockError(f"the block's {name} have CRC32C {value:08x}; must be {told:08x}")


def _zstd_crc(columns_crc: int, zstd: bytes) -> int:
    crc: int = google_crc32c.value(columns_crc.to_bytes(4, "little"))
    return int(google_crc32c.extend(crc, zstd))


def _lengths_in(zstd: bytes) -> list[int]:
    """Return the lengths of columns, those of further ones as one, that field 11 begins with."""
    told = zstd[:_LENGTHS_BYTES].ljust(_LENGTHS_BYTES, b"\0")
    *lengths, last = np.frombuffer(told, "<u4").tolist()
    return lengths if last == _ZSTD_MAGIC else [*lengths, last]


def _decompressed(zstd: bytes) -> Columns:
    """Decompress field 11, whatever it holds, in no more memory than MESSAGE_BYTES_MAX and some."""
    if len(zstd) <= _LENGTHS_BYTES:
        raise CorruptBlockError(f"a compressed block has {len(zstd)} bytes")
    spans: Spans = {}
    at = 0
    lengths = _lengths_in(zstd)
    for field, length in zip((*_COLUMNS, _FURTHER), lengths, strict=False):
        spans[field] = (at, at + length)
        at += length
    opened = decompress(memoryview(zstd)[4 * len(lengths) :], at)
    # Each further column becomes an object when it is parsed, also one of two bytes.
    if not column_spans(opened[slice(*spans.get(_FURTHER, _ABSENT))]).keys() <= {_FURTHER}:
        raise CorruptBlockError("a compressed block has other fields among its further columns")
    return opened, spans


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
    told = [opened[slice(*columns[field])] for field in _COLUMNS]
    crc = crc_of_columns(told, further_in((opened, columns)))
    _check_crc("columns", crc, _number(data, spans, _COLUMNS_CRC))
    return opened, columns


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
    return sum(_lengths_in(lengths)) + at


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
    if _FURTHER in spans:
        columns.append(view[slice(*spans[_FURTHER])])
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
    spans = column_spans(data)
    _check_spans(data, spans)
    opened, columns = _opened(data, spans)
    if opened is data:
        return data
    view = memoryview(opened)
    return _join_fields(
        data[slice(*spans.get(_RUNS, _ABSENT))],
        [view[slice(*columns[field])] for field in _COLUMNS],
        _number(data, spans, _COLUMNS_CRC),
        _number(data, spans, _TABLE_CRC),
        view[slice(*columns.get(_FURTHER, _ABSENT))],
    )


# A field that is empty or 0 is left out, as protobuf does: the bytes are those of its own encoder.


def _join_fields(
    runs: bytes,
    columns: Sequence[bytes | memoryview],
    columns_crc: int,
    table_crc: int,
    further: bytes | memoryview,
) -> bytes:
    parts = [*_bytes_field(_RUNS, runs)]
    for field, column in zip(_COLUMNS, columns, strict=True):
        parts += _bytes_field(field, column)
    crcs = _fixed_field(_COLUMNS_CRC, columns_crc), _fixed_field(_TABLE_CRC, table_crc)
    return b"".join((*parts, *crcs, further))


def _bytes_field(field: int, value: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    return (bytes([field << 3 | 2]), _varint(len(value)), value) if len(value) else ()


def _fixed_field(field: int, value: int) -> bytes:
    return bytes([field << 3 | 5]) + value.to_bytes(4, "little") if value else b""


def _varint(value: int) -> bytes:
    if value <= 0x3FFF:
        # Nearly all.
        two = value & 0x7F | 0x80 | value >> 7 << 8
        return value.to_bytes(1, "little") if value <= 0x7F else two.to_bytes(2, "little")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_frame(
    blocks: Sequence[bytes],
    tokens: bytes,
    cost: int,
    purge_seqnos: bytes = b"",
    writes: Sequence[tuple[int, tuple[bytes, int, bytes]]] = (),
) -> bytes:
    """Return a FollowResponse with a frame of encoded blocks.

    The blocks' bytes go in as they are: building the message object would copy each column twice, and costs a lone row
    more than all other bytes of its frame.

    Args:
        blocks: what encode_block returned, one or several.
        tokens: a uint32 a run over all blocks, little-endian.
        cost: what it takes of the credit, in bytes.
        purge_seqnos: 12 bytes a partition, see Frame.
        writes: for a replica: the number of a block, from 0, and a write in it: producer, number, run table.
    """
    parts: list[bytes | memoryview] = []
    for block in blocks:
        parts += (_BLOCK_TAG, _varint(len(block)), block)
    parts += _bytes_field(wire.Frame.TOKENS_FIELD_NUMBER, tokens)
    parts += _bytes_field(wire.Frame.PURGE_SEQNOS_FIELD_NUMBER, purge_seqnos)
    if cost:
        parts += (_CREDIT_TAG, _varint(cost))
    if writes:
        rest = wire.Frame()
        for number_of_block, (producer, number, runs) in writes:
            rest.producer_writes.add(
                block=number_of_block, producer=producer, number=number, runs=runs
            )
        parts.append(rest.SerializeToString())
    return b"".join((_FRAME_TAG, _varint(sum(map(len, parts))), *parts))


def producer_writes(
    messages: Iterable[wire.ProducerWrite], blocks: Sequence[Block]
) -> list[list[tuple[bytes, int, bytes]]]:
    """Return the producers' writes of each block of a frame: producer, number, run table.

    Raises:
        ProtocolError: a number or name is out of range, or a write is not within the runs of its block.
    """
    found: list[list[tuple[bytes, int, bytes]]] = [[] for _ in blocks]
    for message in messages:
        name, number = message.producer, message.number
        if message.block >= len(blocks) or not 0 < number <= WRITE_NUMBER_MAX:
            raise ProtocolError(
                f"write {number} in block {message.block} of a frame of {len(blocks)}; must be 1 to 2^63 - 1, in one of them"
            )
        if not 0 < len(name) <= NAME_BYTES_MAX or b"\0" in name:
            raise ProtocolError(
                f"producer's name is {len(name)} bytes; must be 1 to {NAME_BYTES_MAX} without a zero byte"
            )
        _check_inside(decode_runs(message.runs), blocks[message.block].runs)
        found[message.block].append((name, number, message.runs))
    return found


def _check_inside(runs: Runs, whole: Runs) -> None:
    """Raise ProtocolError unless runs, ascending by partition, lie within those of a block."""
    partitions, told = runs["partition"], whole["partition"]
    at = np.minimum(np.searchsorted(told, partitions), len(told) - 1)
    inside = (told[at] == partitions) & (runs["start_seqno"] < runs["end_seqno"])
    inside &= runs["end_seqno"] > whole["start_seqno"][at]
    inside &= runs["end_seqno"] <= whole["end_seqno"][at]
    if not inside.all() or (partitions[1:] <= partitions[:-1]).any():
        raise ProtocolError("a producer's write is not within the runs of its block")


def log_to_messages(
    log: Iterable[FailoverRecord], *, with_epochs: bool = False
) -> list[types_pb2.FailoverRecord]:
    """Return a log's records, oldest first, as messages; replicas and operators are told their epochs."""
    return [
        types_pb2.FailoverRecord(
            failover_id=r.failover_id, seqno=r.seqno, epoch=r.epoch if with_epochs else 0
        )
        for r in log
    ]


def log_from_messages(messages: Iterable[types_pb2.FailoverRecord]) -> FailoverLog | None:
    """Return the log of messages, or None for none; InvalidArgumentError when it contradicts itself."""
    records = tuple(FailoverRecord(m.failover_id, m.seqno, m.epoch) for m in messages)
    return FailoverLog(records) if records else None


def problem_of(error: UprError) -> types_pb2.Problem:
    return types_pb2.Problem(
        reason=error.reason,
        retriable=error.retriable,
        message=error.message,
        hint=error.hint,
        owner=error.owner,
    )


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
    several = 1 < len(messages) == len(tokens)
    if not several or any(len(message.runs) != RUN.itemsize for message in messages):
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
    told = [_check_crcs(message) for message in messages]
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
    further: Further = ()
    if any(told):
        further = with_cells(
            (id_, *_join_data([one.offsets for one in found], [one.data for one in found]))
            for id_, found in side_by_side(list(zip(told, rows.tolist(), strict=True)))
        )
    block = Block(runs, seqnos, ops, key_offsets, keys, value_offsets, values, times, 0, further)
    block = sealed(block)
    check_block(block)
    return block


def _check_crcs(message: types_pb2.Block) -> Further:
    """Check the checksums of a block that is not compressed, and return its further columns."""
    further = _further_of(message)
    columns = crc_of_columns(_columns_of(message), further)
    crcs = (columns, google_crc32c.value(message.runs), 0)
    if crcs != (message.columns_crc, message.table_crc, message.zstd_crc):
        raise CorruptBlockError(
            "a block's columns or table do not have the CRC32C that the block says",
            hint="the bytes were damaged on the way or the writer computes the CRC differently",
        )
    return further


def _join_data(offsets: list[bytes], data: list[bytes]) -> tuple[bytes, bytes]:
    """Join Arrow columns: the offsets of each block begin anew at 0."""
    if any(len(column) % 4 for column in offsets):
        raise CorruptBlockError("bytes of offsets are not a multiple of 4")
    joined = np.frombuffer(b"".join(offsets), "<i4")
    lasts = np.cumsum([len(column) // 4 for column in offsets]) - 1
    firsts = np.concatenate(([0], lasts[:-1] + 1))
    if joined[firsts].any() or (joined[lasts] != [len(column) for column in data]).any():
        raise CorruptBlockError("offsets do not run from 0 to the length of their data")
    lengths = np.delete(np.diff(joined, prepend=0), firsts)
    return offset_column(lengths), b"".join(data)


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


def positions_to_messages(table: PositionTable) -> list[wire.Position]:
    """Return the messages of positions; the bucket's version is not in them, the request names that."""
    markers, records = table.markers.tolist(), table.records.tolist()
    messages, marker, record = [], 0, 0
    for row in table.rows.tolist():
        partition, _, more, logged, _, failover_id, data_id, seqno, horizon = row
        messages.append(
            wire.Position(
                partition=partition,
                failover_id=failover_id or None,
                data_id=data_id or None,
                seqno=seqno,
                horizon=None if horizon == UNKNOWN_HORIZON else horizon,
                markers=markers[marker : marker + more],
                failover_log=[
                    types_pb2.FailoverRecord(failover_id=failover_id, seqno=seqno)
                    for failover_id, seqno in records[record : record + logged]
                ],
            )
        )
        marker += more
        record += logged
    return messages


def positions_from_messages(
    messages: Sequence[wire.Position], bucket_version: int
) -> PositionTable:
    """Return the positions out of their messages, without the name of the bucket.

    Raises:
        InvalidArgumentError: a field is out of range or contradicts another, or a partition is there twice.
    """
    rows = []
    markers: list[int] = []
    records: list[tuple[int, int]] = []
    for m in sorted(messages, key=attrgetter("partition")):
        log = [(record.failover_id, record.seqno) for record in m.failover_log]
        _check_counts(m.partition, len(m.markers), len(log))
        ids = m.failover_id, m.data_id
        if (m.HasField("failover_id") and not ids[0]) or (m.HasField("data_id") and not ids[1]):
            check_failover_id(0)
        horizon = UNKNOWN_HORIZON
        if m.HasField("horizon") and (horizon := m.horizon) == UNKNOWN_HORIZON:
            # Out of range as well, but the table would take it for none.
            position_from_message(m, bucket_version)
        counts = len(m.markers), len(log)
        rows.append((m.partition, 0, *counts, bucket_version, *ids, m.seqno, horizon))
        markers += m.markers
        records += log
    table = PositionTable(
        np.array(rows, ROW), [""], np.array(markers, np.uint64), np.array(records, RECORD)
    )
    try:
        table.check()
    except PositionDamagedError as error:
        for message in messages:
            # Names the value and its range.
            position_from_message(message, bucket_version)
        raise InvalidArgumentError(error.message) from error
    return table


def _check_counts(partition: int, markers: int, records: int) -> None:
    for what, count, limit in (
        ("markers", markers, MARKERS_MAX),
        ("failover records", records, FAILOVER_LOG_MAX),
    ):
        if count > limit:
            raise InvalidArgumentError(
                f"{what} in the position of partition {partition} are {count}; must be at most {limit}"
            )


def positions_field(positions: Iterable[bytes]) -> bytes:
    """Return encoded positions as the field of LoadPositionsResponse that holds them."""
    return b"".join(part for one in positions for part in _bytes_field(2, one))


def position_from_message(message: wire.Position, bucket_version: int) -> Position:
    """Return the position out of its message.

    Raises:
        InvalidArgumentError: a field is out of range or contradicts another; the partition is not looked at.
    """
    _check_counts(message.partition, len(message.markers), len(message.failover_log))
    return Position(
        bucket_version,
        message.failover_id if message.HasField("failover_id") else None,
        message.data_id if message.HasField("data_id") else None,
        message.seqno,
        message.horizon if message.HasField("horizon") else None,
        tuple(message.markers),
        log_from_messages(message.failover_log),
    )
