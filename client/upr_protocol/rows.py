"""Rows into blocks and blocks into rows, without touching them one by one where that can be avoided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import is_, itemgetter
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from upr_protocol.block import I64, OP_DELETE, OP_SET, Block, make_runs, row_seqnos, sealed
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    BLOCK_ROWS_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    VALUE_BYTES_MAX,
)
from upr_protocol.partitioning import partitions_of

_ROW_BYTES: Final = 9
"""What a row takes besides key and value: an op and two offsets."""


def check_row(key: bytes, value: bytes | None) -> None:
    """Raise InvalidArgumentError unless key and value (None: a delete) are bytes within the limits."""
    if not isinstance(key, bytes):
        raise InvalidArgumentError(
            f"a key is bytes, not {type(key).__name__}", hint="encode it first"
        )
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise InvalidArgumentError(
            f"a key of {len(key)} bytes, a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        )
    if value is not None and not isinstance(value, bytes):
        raise InvalidArgumentError(
            f"a value is bytes, or None for a delete, not {type(value).__name__}",
            hint="encode it first",
        )
    if value is not None and len(value) > VALUE_BYTES_MAX:
        raise InvalidArgumentError(
            f"a value of {len(value)} bytes, the limit is {VALUE_BYTES_MAX}",
            hint="store it elsewhere and write a reference",
        )


@dataclass(slots=True)
class _Rows:
    """Checked rows as columns.

    Attributes:
        keys, values: the rows; the value of a delete is empty.
        key_lengths, value_lengths: int64, one a row.
        deletes: bool, one a row; None when there is no delete.
    """

    keys: Sequence[bytes]
    values: Sequence[bytes]
    key_lengths: I64
    value_lengths: I64
    deletes: npt.NDArray[np.bool_] | None


def _check_rows(keys: Sequence[bytes], values: Sequence[bytes | None]) -> _Rows:
    if len(keys) != len(values):
        raise InvalidArgumentError(f"{len(keys)} keys, but {len(values)} values")
    rows = None
    if set(map(type, keys)) <= {bytes} and set(map(type, values)) <= {bytes, type(None)}:
        rows = _columns_of(keys, values)
    if rows is None:
        for key, value in zip(keys, values, strict=True):
            check_row(key, value)
        # Subclasses of bytes, then.
        rows = _columns_of(keys, values)
        assert rows is not None
    return rows


def _columns_of(keys: Sequence[bytes], values: Sequence[bytes | None]) -> _Rows | None:
    """Return the rows, None when a key or value is out of its range."""
    count = len(keys)
    deletes = None
    if None in values:
        deletes = np.fromiter(map(is_, values, repeat(None)), np.bool_, count)
        values = list(values)
        for row in np.flatnonzero(deletes).tolist():
            values[row] = b""
    sets = cast("Sequence[bytes]", values)
    key_lengths = np.fromiter(map(len, keys), np.int64, count)
    value_lengths = np.fromiter(map(len, sets), np.int64, count)
    if count and (
        key_lengths.min() < KEY_BYTES_MIN
        or key_lengths.max() > KEY_BYTES_MAX
        or value_lengths.max() > VALUE_BYTES_MAX
    ):
        return None
    return _Rows(keys, sets, key_lengths, value_lengths, deletes)


def build_block(keys: Sequence[bytes], values: Sequence[bytes | None]) -> Block:
    """Build one unnumbered block for a Write: rows sorted by partition, their order kept within it.

    Args:
        keys: 1 to BLOCK_ROWS_MAX keys of 1 to 4096 bytes.
        values: as many values of 0 to 20 MiB; None deletes the key.

    Raises:
        InvalidArgumentError: a key or value is not bytes, or out of its range.
    """
    if not keys:
        raise InvalidArgumentError("a write needs at least one row")
    return _sorted_block(_check_rows(keys, values), 0, len(keys))


def build_blocks(
    keys: Sequence[bytes], values: Sequence[bytes | None], column_bytes: int = BLOCK_COLUMN_BYTES
) -> Iterator[Block]:
    """Build the blocks of ``split_rows``, one when the one before was taken; all rows are checked before the first.

    Raises:
        InvalidArgumentError: a key or value is not bytes, or out of its range.
    """
    rows = _check_rows(keys, values)
    for first, last in _cuts(rows, column_bytes):
        yield _sorted_block(rows, first, last)


def _sorted_block(rows: _Rows, first: int, last: int) -> Block:
    count = last - first
    part = slice(first, last)
    keys, values = rows.keys, rows.values
    if count < len(keys):
        keys, values = keys[part], values[part]
    # Sorting 16 bits is a radix sort.
    partitions = partitions_of(keys).astype(np.uint16)
    order = np.argsort(partitions, kind="stable")
    if count > 1:
        pick = itemgetter(*order.tolist())
        keys, values = pick(keys), pick(values)
    counts = np.bincount(partitions)
    touched = np.flatnonzero(counts)
    ops = b""
    if rows.deletes is not None and rows.deletes[part].any():
        ops = np.where(rows.deletes[part][order], OP_DELETE, OP_SET).astype(np.uint8).tobytes()
    return sealed(
        Block(
            make_runs(touched, counts[touched]),
            b"",
            ops,
            _offsets(rows.key_lengths[part][order]),
            b"".join(keys),
            _offsets(rows.value_lengths[part][order]),
            b"".join(values),
            b"",
            0,
        )
    )


def _offsets(lengths: I64) -> bytes:
    offsets = np.zeros(len(lengths) + 1, "<i4")
    np.cumsum(lengths, out=offsets[1:])
    return offsets.tobytes()


def split_rows(
    keys: Sequence[bytes], values: Sequence[bytes | None], column_bytes: int = BLOCK_COLUMN_BYTES
) -> Iterator[tuple[Sequence[bytes], Sequence[bytes | None]]]:
    """Cut rows, in order, into slices whose columns stay within ``column_bytes``, or that have one row."""
    for first, last in _cuts(_check_rows(keys, values), column_bytes):
        yield keys[first:last], values[first:last]


def _cuts(rows: _Rows, column_bytes: int) -> Iterator[tuple[int, int]]:
    ends = np.cumsum(rows.key_lengths + rows.value_lengths + _ROW_BYTES)
    first = 0
    while first < len(ends):
        floor = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, floor + column_bytes, side="right"))
        last = min(max(last, first + 1), first + BLOCK_ROWS_MAX, len(ends))
        yield first, last
        first = last


def block_keys(block: Block) -> list[bytes]:
    """Return each row's key."""
    keys = block.keys
    ends = np.frombuffer(block.key_offsets, "<i4").tolist()
    return [keys[a:b] for a, b in pairwise(ends)]


def block_values(block: Block) -> list[bytes | None]:
    """Return each row's value; None for a delete, and for every row when the values were left out."""
    if not block.value_offsets:
        return [None] * block.rows
    data = block.values
    ends = np.frombuffer(block.value_offsets, "<i4").tolist()
    values: list[bytes | None] = [data[a:b] for a, b in pairwise(ends)]
    if block.ops:
        for row in np.flatnonzero(np.frombuffer(block.ops, np.uint8) == OP_DELETE).tolist():
            values[row] = None
    return values


def block_partitions(block: Block) -> list[int]:
    """Return each row's partition."""
    runs = block.runs
    if len(runs) == 1:
        return [int(runs["partition"][0])] * block.rows
    partitions: list[int] = np.repeat(runs["partition"], runs["count"]).tolist()
    return partitions


def block_seqnos(block: Block) -> list[int]:
    """Return each row's seqno."""
    runs = block.runs
    if len(runs) == 1 and not block.seqnos:
        first = int(runs["start_seqno"][0]) + 1
        return list(range(first, first + block.rows))
    seqnos: list[int] = row_seqnos(block).tolist()
    return seqnos


def block_ops(block: Block) -> list[int]:
    """Return each row's op, OP_SET or OP_DELETE."""
    return list(block.ops) if block.ops else [0] * block.rows
