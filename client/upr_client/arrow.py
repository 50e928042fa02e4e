"""Changes as Arrow record batches, and Arrow columns as blocks to write; needs the extra ``upr-stream[arrow]``.

Keys and values of changes are not copied: a block's columns have Arrow's layout already.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from upr_protocol.block import (
    COMPILED,
    I64,
    OP_DELETE,
    ROW_BYTES,
    U64,
    Block,
    joined_runs,
    make_runs,
    offset_column,
    row_seqnos,
    row_slices,
    row_times,
    sealed,
)
from upr_protocol.errors import InvalidArgumentError, MissingPackageError
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    BLOCK_ROWS_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    VALUE_BYTES_MAX,
)
from upr_protocol.partitioning import partitions_of_column

_SORTED_BYTES: Final = 64 * 2**20
_KEY_BYTES_SHOWN: Final = 16


class HasBlocks(Protocol):
    """A ``ChangeBatch``, as far as it is needed here; that module imports this one."""

    blocks: list[Block]


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingPackageError(
            f"Arrow needs the package pyarrow: {error}", hint="pip install 'upr-stream[arrow]'"
        ) from error
    return pyarrow


@cache
def schema() -> Any:
    """Return the ``pyarrow.Schema`` of every record batch made here.

    partition int32 (0 to 1023), seqno int64 (1 to 2^48 - 1), deleted bool, key binary, value binary (null for a
    delete, and for everything in a stream of keys only), time timestamp of microseconds in UTC (of the commit).
    The types are signed, and an op is a bool, because Spark takes neither unsigned columns nor dictionaries, and
    pandas makes floats of mixed signs.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    pa = _pyarrow()
    return pa.schema(
        [
            ("partition", pa.int32()),
            ("seqno", pa.int64()),
            ("deleted", pa.bool_()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("time", pa.timestamp("us", tz="UTC")),
        ]
    )


def record_batch(changes: HasBlocks | Block) -> Any:
    """Return changes as one ``pyarrow.RecordBatch`` of ``schema()``.

    A numbered block, or a batch of one, is not copied; several blocks are joined by one copy. What the record batch
    shows is kept in memory by it.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    pa = _pyarrow()
    blocks = [changes] if isinstance(changes, Block) else changes.blocks
    blocks = [block for block in blocks if block.rows]
    if not blocks:
        return pa.RecordBatch.from_pylist([], schema())
    return _of_block(pa, blocks[0] if len(blocks) == 1 else _joined(blocks))


def _joined(blocks: list[Block]) -> Block:
    """Return the rows of all blocks, in their order, as one block without a CRC; none of the blocks is empty.

    A partition may have several runs in it, which is no matter here. Many small blocks are joined at a tenth of the
    cost of as many record batches.
    """
    seqnos = times = ops = b""
    if any(block.seqnos for block in blocks):
        seqnos = b"".join(block.seqnos or _offsets_in_runs(block) for block in blocks)
    if any(block.times for block in blocks):
        times = b"".join(row_times(block).tobytes() for block in blocks)
    if any(block.ops for block in blocks):
        ops = b"".join(block.ops or bytes(block.rows) for block in blocks)
    with_values = all(block.value_offsets for block in blocks)
    return Block(
        joined_runs([block.runs for block in blocks]),
        seqnos,
        ops,
        _joined_offsets([block.key_offsets for block in blocks]),
        b"".join([block.keys for block in blocks]),
        _joined_offsets([block.value_offsets for block in blocks]) if with_values else b"",
        b"".join([block.values for block in blocks]) if with_values else b"",
        times,
        0,
    )


def _joined_offsets(columns: list[bytes]) -> bytes:
    parts = [np.frombuffer(column, "<i4") for column in columns]
    return offset_column(np.concatenate([part[1:] - part[:-1] for part in parts]))


def _offsets_in_runs(block: Block) -> bytes:
    starts = np.repeat(block.runs["start_seqno"], block.runs["count"])
    offsets: npt.NDArray[np.uint32] = (row_seqnos(block) - starts).astype("<u4")
    return offsets.tobytes()


def _of_block(pa: Any, block: Block) -> Any:
    rows = block.rows
    partitions, seqnos, times = row_numbers(block)
    deleted, valid, nulls = _ops(pa, block)
    return pa.RecordBatch.from_arrays(
        [
            _numbers(pa, pa.int32(), partitions),
            _numbers(pa, pa.int64(), seqnos),
            deleted,
            _binary(pa, rows, block.key_offsets, block.keys),
            _binary(pa, rows, block.value_offsets, block.values, valid, nulls)
            if block.value_offsets
            else pa.nulls(rows, pa.binary()),
            _numbers(pa, pa.timestamp("us", tz="UTC"), times),
        ],
        schema=schema(),
    )


def row_numbers(block: Block) -> tuple[npt.NDArray[np.uint32], U64, U64]:
    """Return each row's partition, seqno and time, shape ``(rows,)`` each.

    The compiled function makes them where it is there and the run table fits the columns.
    """
    if COMPILED is not None:
        made = COMPILED.numbers(block.runs.tobytes(), block.seqnos, block.rows)
        if made is not None:
            partitions, seqnos, times = made
            seqnos, times = (np.frombuffer(one, "<u8") for one in (seqnos, block.times or times))
            return np.frombuffer(partitions, "<u4"), seqnos, times
    runs = block.runs
    return np.repeat(runs["partition"], runs["count"]), row_seqnos(block), row_times(block)


def _numbers(pa: Any, kind: Any, numbers: npt.NDArray[Any]) -> Any:
    """Return numbers as Arrow; ``pa.array`` would import what takes longer than all of the first batch."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)], 0)


def _ops(pa: Any, block: Block) -> tuple[Any, Any, int]:
    """Return which rows are deletes, the bitmap of those that are not (None for all), and how many deletes there are."""
    rows = block.rows
    if not block.ops:
        bits = pa.py_buffer(bytes((rows + 7) // 8))
        return pa.Array.from_buffers(pa.bool_(), rows, [None, bits], 0), None, 0
    deletes = np.frombuffer(block.ops, np.uint8) == OP_DELETE
    bits = np.packbits(deletes, bitorder="little")
    deleted = pa.Array.from_buffers(pa.bool_(), rows, [None, pa.py_buffer(bits)], 0)
    return deleted, pa.py_buffer(~bits), int(np.count_nonzero(deletes))


def _binary(
    pa: Any, rows: int, offsets: bytes, data: bytes, valid: Any = None, nulls: int = 0
) -> Any:
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), rows, buffers, nulls)


def check_columns(keys: Any, values: Any) -> None:
    """Check rows that are to be written, all at once.

    Args:
        keys, values: ``pyarrow.Array`` or ``ChunkedArray`` of binary or string, also the large ones, of one length;
            a value that is null deletes its key.

    Raises:
        InvalidArgumentError: a key is null, or a key or value is out of its range; it names the first one.
        MissingPackageError: pyarrow is not installed.
    """
    pa = _pyarrow()
    for name, column in (("keys", keys), ("values", values)):
        kind = column.type
        if not (
            pa.types.is_binary(kind)
            or pa.types.is_string(kind)
            or pa.types.is_large_binary(kind)
            or pa.types.is_large_string(kind)
        ):
            raise InvalidArgumentError(f"{name} are {kind}", hint="cast them to binary or string")
    if len(keys) != len(values):
        raise InvalidArgumentError(
            f"values are {len(values)}; must be as many as the {len(keys)} keys"
        )
    key_lengths, value_lengths = _lengths(keys), _lengths(values)
    bad = np.flatnonzero((key_lengths < KEY_BYTES_MIN) | (key_lengths > KEY_BYTES_MAX))
    if len(bad):
        row = int(bad[0])
        if not keys[row].is_valid:
            raise InvalidArgumentError(f"the key of row {row} is null")
        raise InvalidArgumentError(
            f"key {_shown(keys[row])} is {key_lengths[row]} bytes; must be "
            f"{KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        )
    large = np.flatnonzero(value_lengths > VALUE_BYTES_MAX)
    if len(large):
        row = int(large[0])
        raise InvalidArgumentError(
            f"value of key {_shown(keys[row])} is {value_lengths[row]} bytes; must be at most {VALUE_BYTES_MAX}",
            hint="store it elsewhere and write a reference",
        )


def _shown(key: Any) -> str:
    """Return a key in hex, without what is behind its first bytes."""
    data = key.as_buffer().to_pybytes()
    more = "..." if len(data) > _KEY_BYTES_SHOWN else ""
    return data[:_KEY_BYTES_SHOWN].hex() + more if data else "''"


def _lengths(column: Any) -> I64:
    """Return each row's bytes, 0 for null: int64, shape ``(rows,)``."""
    import pyarrow.compute as pc

    lengths = pc.binary_length(column)
    if lengths.null_count:
        lengths = pc.fill_null(lengths, 0)
    told: I64 = lengths.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return told


def row_sizes(keys: Any, values: Any) -> I64:
    """Return what each row takes in a block: int64, shape ``(rows,)``; the arguments are those of ``check_columns``."""
    return _lengths(keys) + _lengths(values) + ROW_BYTES


def blocks(
    keys: Any,
    values: Any,
    *,
    column_bytes: int = BLOCK_COLUMN_BYTES,
    block_rows: int = BLOCK_ROWS_MAX,
) -> Iterator[Block]:
    """Build the blocks that write these rows, for ``Bucket.write_blocks``, without an object for each row.

    Rows are sorted by partition, 64 MiB of them at a time, so that a block has few partitions. The rows of a key
    keep their order, through all blocks.

    Args:
        keys, values: as ``check_columns`` takes them; all are checked before the first block.
        column_bytes: what a block takes at most, unless it has one row; 1 to 2^20.
        block_rows: rows of a block at most, 1 to 2^18.

    Raises:
        InvalidArgumentError: a key or value, or a limit, is out of its range.
        MissingPackageError: pyarrow is not installed.
    """
    for name, limit, largest in (
        ("column_bytes", column_bytes, BLOCK_COLUMN_BYTES),
        ("block_rows", block_rows, BLOCK_ROWS_MAX),
    ):
        if not 1 <= limit <= largest:
            raise InvalidArgumentError(f"{name} is {limit}; must be 1 to {largest}")
    check_columns(keys, values)
    pa = _pyarrow()
    for first, last in row_slices(row_sizes(keys, values), _SORTED_BYTES, len(keys)):
        part_keys, part_values = (
            _plain(pa, column.slice(first, last - first)) for column in (keys, values)
        )
        yield from _sorted_blocks(pa, part_keys, part_values, column_bytes, block_rows)


def _plain(pa: Any, column: Any) -> Any:
    """Return a column as one array of binary."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            # Some versions of pyarrow return chunks here.
            column = pa.concat_arrays(column.chunks)
    return column.cast(pa.binary())


def _sorted_blocks(
    pa: Any, keys: Any, values: Any, column_bytes: int, block_rows: int
) -> Iterator[Block]:
    offsets, data = _buffers(keys)
    partitions = partitions_of_column(offsets.astype(np.int64), np.frombuffer(data, np.uint8))
    # Sorting 16 bits is a radix sort.
    order = np.argsort(partitions, kind="stable")
    partitions = partitions[order]
    ops = None
    if values.null_count:
        ops = values.is_null().to_numpy(zero_copy_only=False)[order].astype(np.uint8) * OP_DELETE
    rows = pa.array(order)
    key_offsets, key_data = _buffers(keys.take(rows))
    value_offsets, value_data = _buffers(values.take(rows))
    sizes = np.diff(key_offsets).astype(np.int64) + np.diff(value_offsets) + ROW_BYTES
    for first, last in row_slices(sizes, column_bytes, block_rows):
        part = partitions[first:last]
        bounds = np.concatenate(([0], np.flatnonzero(part[1:] != part[:-1]) + 1, [len(part)]))
        block_ops = b""
        if ops is not None and ops[first:last].any():
            block_ops = ops[first:last].tobytes()
        key_part = key_offsets[first : last + 1]
        value_part = value_offsets[first : last + 1]
        yield sealed(
            Block(
                make_runs(part[bounds[:-1]], np.diff(bounds)),
                b"",
                block_ops,
                (key_part - key_part[0]).tobytes(),
                bytes(key_data[key_part[0] : key_part[-1]]),
                (value_part - value_part[0]).tobytes(),
                bytes(value_data[value_part[0] : value_part[-1]]),
                b"",
                0,
            )
        )


def _buffers(column: Any) -> tuple[npt.NDArray[np.int32], memoryview]:
    """Return the offsets, rows + 1 of them, and the data that they point into."""
    _, offsets, data = column.buffers()
    count = len(column) + 1
    told = (
        np.frombuffer(offsets, "<i4", count, 4 * column.offset) if offsets else np.zeros(1, "<i4")
    )
    return told, memoryview(data if data is not None else b"")
