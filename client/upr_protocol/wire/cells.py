"""Cells of further columns by row, for files that hold rows one by one: as dictionaries, and as bytes.

The bytes of a row's cells are an encoded Block with nothing but a FurtherColumn for each of them: its id and the cell as
its data, without offsets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from google.protobuf.message import DecodeError

from upr_protocol.block import (
    ROW_BYTES,
    Block,
    Further,
    FurtherColumn,
    build_block,
    offset_column,
    row_slices,
    sealed,
)
from upr_protocol.errors import CorruptBlockError
from upr_protocol.limits import BLOCK_COLUMN_BYTES, BLOCK_ROWS_MAX
from upr_protocol.partitioning import partitions_of
from upr_protocol.wire.v1 import types_pb2

Cells = Mapping[int, bytes]
"""The cells of a row by the id of their column, without the empty ones."""


def block_cells(block: Block) -> list[Cells]:
    """Return each row's cells."""
    rows: list[dict[int, bytes]] = [{} for _ in range(block.rows)]
    for column in block.further:
        edges = pairwise(np.frombuffer(column.offsets, "<i4").tolist())
        for row, (first, last) in zip(rows, edges, strict=True):
            if first < last:
                row[column.id] = column.data[first:last]
    return [*rows]


def columns_of(rows: Sequence[Cells]) -> Further:
    columns = []
    for id_ in sorted({id_ for cells in rows for id_ in cells}):
        cells = [row.get(id_, b"") for row in rows]
        lengths = np.fromiter(map(len, cells), np.int64, len(cells))
        columns.append(FurtherColumn(id_, offset_column(lengths), b"".join(cells)))
    return tuple(columns)


def blocks_with_cells(
    keys: Sequence[bytes], values: Sequence[bytes | None], rows: Sequence[Cells]
) -> Iterator[Block]:
    """Build the blocks that write rows and their cells; a value of None deletes the key.

    Raises:
        InvalidArgumentError: a key or value is out of its range.
    """
    # A block keeps the order of rows that are sorted by partition.
    order = np.argsort(partitions_of(keys), kind="stable")
    sizes = [
        len(key) + len(value or b"") + ROW_BYTES + sum(map(len, cells.values())) + 4 * len(cells)
        for key, value, cells in zip(keys, values, rows, strict=True)
    ]
    for first, last in row_slices(np.array(sizes)[order], BLOCK_COLUMN_BYTES, BLOCK_ROWS_MAX):
        part = order[first:last].tolist()
        block = build_block([keys[row] for row in part], [values[row] for row in part])
        yield sealed(replace(block, further=columns_of([rows[row] for row in part])))


def pack_cells(cells: Cells) -> bytes | None:
    """Return a row's cells as bytes, None without any."""
    told = [types_pb2.FurtherColumn(id=id_, data=cell) for id_, cell in sorted(cells.items())]
    return types_pb2.Block(further=told).SerializeToString() if told else None


def unpack_cells(data: bytes | None) -> Cells:
    """Return the cells of a row that ``pack_cells`` made bytes of.

    Raises:
        CorruptBlockError: it did not.
    """
    if data is None:
        return {}
    try:
        message = types_pb2.Block.FromString(data)
    except DecodeError as error:
        raise CorruptBlockError(f"{len(data)} bytes are not the cells of a row") from error
    return {one.id: one.data for one in message.further}
