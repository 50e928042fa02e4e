"""Rows into blocks and blocks into rows, without touching them one by one where that can be avoided."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter

import numpy as np

from upr_protocol.block import OP_DELETE, Block, make_runs, row_seqnos, sealed
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    BLOCK_ROWS_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    VALUE_BYTES_MAX,
)
from upr_protocol.partitioning import partitions_of


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


def _check_rows(keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
    if len(keys) != len(values):
        raise InvalidArgumentError(f"{len(keys)} keys, but {len(values)} values")
    try:
        key_lengths = list(map(len, keys))
        value_lengths = [0 if value is None else len(value) for value in values]
        sound = (
            min(key_lengths) >= KEY_BYTES_MIN
            and max(key_lengths) <= KEY_BYTES_MAX
            and max(value_lengths) <= VALUE_BYTES_MAX
            and set(map(type, keys)) == {bytes}
            and set(map(type, values)) <= {bytes, type(None)}
        )
    except TypeError:
        sound = False
    if not sound:
        for key, value in zip(keys, values, strict=True):
            check_row(key, value)


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
    _check_rows(keys, values)
    partitions = partitions_of(keys)
    order = np.argsort(partitions, kind="stable")
    if len(keys) > 1:
        pick = itemgetter(*order.tolist())
        keys, values = pick(keys), pick(values)
    ops = b""
    if None in values:
        ops = bytes([OP_DELETE if value is None else 0 for value in values])
        values = [b"" if value is None else value for value in values]
    touched, counts = np.unique(partitions, return_counts=True)
    key_offsets = np.zeros(len(keys) + 1, "<i4")
    np.cumsum(np.fromiter(map(len, keys), np.int32, len(keys)), out=key_offsets[1:])
    value_offsets = np.zeros(len(keys) + 1, "<i4")
    np.cumsum(np.fromiter(map(len, values), np.int32, len(keys)), out=value_offsets[1:])  # type: ignore[arg-type]
    return sealed(
        Block(
            make_runs(touched, counts),
            b"",
            ops,
            key_offsets.tobytes(),
            b"".join(keys),
            value_offsets.tobytes(),
            b"".join(values),  # type: ignore[arg-type]
            b"",
            0,
        )
    )


def split_rows(
    keys: Sequence[bytes], values: Sequence[bytes | None], column_bytes: int = BLOCK_COLUMN_BYTES
) -> Iterator[tuple[Sequence[bytes], Sequence[bytes | None]]]:
    """Cut rows, in order, into slices whose columns stay within ``column_bytes``, or that have one row."""
    _check_rows(keys, values) if keys else None
    sizes = [
        len(key) + (0 if value is None else len(value)) + 9
        for key, value in zip(keys, values, strict=True)
    ]
    if sum(sizes) <= column_bytes and len(keys) <= BLOCK_ROWS_MAX:
        if keys:
            yield keys, values
        return
    ends = list(accumulate(sizes))
    first = 0
    while first < len(keys):
        floor = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, floor + column_bytes, side="right"))
        last = min(max(last, first + 1), first + BLOCK_ROWS_MAX, len(keys))
        yield keys[first:last], values[first:last]
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
    partitions: list[int] = np.repeat(block.runs["partition"], block.runs["count"]).tolist()
    return partitions


def block_seqnos(block: Block) -> list[int]:
    """Return each row's seqno."""
    seqnos: list[int] = row_seqnos(block).tolist()
    return seqnos


def block_ops(block: Block) -> list[int]:
    """Return each row's op, OP_SET or OP_DELETE."""
    return list(block.ops) if block.ops else [0] * block.rows
