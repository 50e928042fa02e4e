"""Further columns: their cells go with their rows, and a lying one is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.test_block import Rows, as_numbered
from tests.raw import all_cells, all_rows, cells_for, check_cells, with_cells
from upr_client.testing.memory import run_block
from upr_client.writes import write_request
from upr_protocol.block import (
    Block,
    FurtherColumn,
    build_block,
    check_block,
    crc_of_columns,
    join_blocks,
    make_runs,
    sealed,
    select_runs,
    slice_runs,
    without_values,
)
from upr_protocol.errors import CorruptBlockError, InvalidArgumentError, UprError
from upr_protocol.limits import CELL_BYTES_MAX, FURTHER_COLUMNS_MAX
from upr_protocol.wire.cells import (
    block_cells,
    blocks_with_cells,
    columns_of,
    pack_cells,
    unpack_cells,
)
from upr_protocol.wire.codec import (
    block_from_message,
    block_to_message,
    check_encoded,
    column_spans,
    compress_block,
    decode_block,
    decompress_block,
    encode_block,
    further_in,
    joined_blocks,
    open_checked,
    plain_bytes,
    reopen_block,
)
from upr_protocol.wire.v1 import types_pb2

rows_strategy = st.lists(
    st.tuples(st.binary(min_size=1, max_size=6), st.none() | st.binary(max_size=9)),
    min_size=1,
    max_size=30,
)
PAIR: Rows = [(b"k1", b"v"), (b"k2", None), (b"k3", b"v3"), (b"k4", b"")]


def numbered(rows: Rows, partitions: int = 3, start: int = 0) -> Block:
    """A block of rows that are spread over some partitions, with the cells of the tests."""
    chosen = np.arange(len(rows), dtype=np.uint32) % partitions
    block = with_cells(build_block([k for k, _ in rows], [v for _, v in rows], chosen))
    return as_numbered(block, start)


def many(column: int, size: int, rows: int) -> Block:
    """A block of rows that each have a cell of one column."""
    block = build_block(
        [b"k%06d" % row for row in range(rows)], [b"v"] * rows, np.zeros(rows, "u4")
    )
    offsets = (np.arange(rows + 1) * size).astype("<i4").tobytes()
    further = (FurtherColumn(column, offsets, b"c" * (size * rows)),)
    runs = make_runs([0], [rows], 0, rows, rows)
    return sealed(replace(block, runs=runs, further=further))


@given(rows_strategy, st.data())
def test_cells_go_with_their_rows_where_runs_and_rows_are_left_out(rows: Rows, data: Any) -> None:
    block = numbered(rows)
    check_cells(block)
    keep = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(block.runs), max_size=len(block.runs)))
    )
    kept = select_runs(block, keep)
    check_cells(kept)
    above = np.array(
        [data.draw(st.integers(0, end - 1)) for end in kept.runs["end_seqno"].tolist()], np.uint64
    )
    sliced = slice_runs(kept, above) if len(kept.runs) else kept
    if len(sliced.runs):
        check_block(sliced)
    check_cells(sliced)
    left = [row for row in all_rows([block]) if row in all_rows([sliced])]
    assert left == all_rows([sliced])
    assert not without_values(block).further
    check_block(without_values(block))


@given(st.lists(rows_strategy, min_size=1, max_size=4), st.booleans())
def test_cells_go_with_their_rows_where_blocks_become_one(parts: list[Rows], dated: bool) -> None:
    high, blocks = 0, []
    for rows in parts:
        blocks.append(numbered(rows, 1, high))
        high += len(rows)
    joined = join_blocks(blocks, dated=dated)
    check_block(joined)
    assert check_cells(joined) == sum(map(check_cells, blocks))
    assert all_rows([joined]) == all_rows(blocks)


@given(st.lists(rows_strategy, min_size=1, max_size=5))
def test_cells_go_with_their_rows_where_a_frame_s_blocks_become_one(parts: list[Rows]) -> None:
    blocks = []
    for partition, rows in enumerate(parts):
        told = [(seqno, *row) for seqno, row in enumerate(rows, 1)]
        block = run_block(partition, told, 0, len(told), len(told), 1)
        blocks.append(with_cells(block))
    messages = [block_to_message(block) for block in blocks]
    (joined,), _ = joined_blocks(messages, np.zeros(len(messages), np.uint32))
    assert check_cells(joined) == sum(map(check_cells, blocks))


@given(rows_strategy, st.booleans())
def test_encoding_brings_back_the_cells(rows: Rows, large: bool) -> None:
    block = numbered(rows, 1)
    if large:
        block = many(5, 40, 2000)
    data = encode_block(block)
    assert data == block_to_message(block).SerializeToString()
    assert not check_encoded(data)
    packed = compress_block(data)
    if large:
        assert packed is not data
        assert len(packed) < len(data) / 5
        assert abs(plain_bytes(packed[:128], len(packed)) - len(data)) < 200
    for one in (data, packed):
        back = decode_block(one)
        assert (back.further, back.columns_crc) == (block.further, block.columns_crc)
        assert further_in(open_checked(one)[1]) == block.further
        assert decompress_block(one) == data
        again = types_pb2.Block.FromString(one)
        assert block_from_message(again).further == block.further
    assert reopen_block(data).further == block.further
    assert (13 in column_spans(data)) == bool(block.further)
    assert write_request(block, types_pb2.DURABILITY_DISK).write.block == block_to_message(block)


@pytest.mark.parametrize("rows", [4, 2000])
def test_the_checksum_covers_ids_lengths_and_bytes(rows: int) -> None:
    block = many(5, 10, rows)
    (column,) = block.further
    for other in (
        column._replace(id=6),
        column._replace(data=b"C" + column.data[1:]),
        column._replace(offsets=column.offsets[:4] + b"\x09" + column.offsets[5:]),
    ):
        lying = replace(block, further=(other,))
        for refuse in (
            check_block,
            lambda b: decode_block(encode_block(b)),
            lambda b: check_encoded(encode_block(b)),
        ):
            with pytest.raises(CorruptBlockError, match="CRC32C"):
                refuse(lying)
    with pytest.raises(CorruptBlockError, match="CRC32C"):
        reopen_block(encode_block(replace(block, further=())))
    # That of a block without them is what it always was.
    assert crc_of_columns(block.columns) != block.columns_crc
    assert crc_of_columns(block.columns, ()) == crc_of_columns(block.columns)


def column(id_: int, *lengths: int) -> FurtherColumn:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype("<i4").tobytes()
    return FurtherColumn(id_, offsets, b"c" * sum(lengths))


GOOD = column(1, 0, 3)
LIES: list[tuple[tuple[FurtherColumn, ...], type[UprError], str]] = [
    ((column(0, 1, 1),), InvalidArgumentError, "ids of further columns are"),
    (
        (column(FURTHER_COLUMNS_MAX + 1, 1, 1),),
        InvalidArgumentError,
        r"\[17\]; must ascend, from 1 to 16",
    ),
    ((GOOD, GOOD), InvalidArgumentError, "must ascend"),
    ((column(2, 1, 1), GOOD), InvalidArgumentError, "must ascend"),
    ((column(1, 1),), CorruptBlockError, "column 1's offsets take 8 bytes; must be 12"),
    ((GOOD._replace(offsets=b""),), CorruptBlockError, "offsets take 0 bytes"),
    ((GOOD._replace(data=b"cccc"),), CorruptBlockError, "run from 0 to 3 over 4 bytes"),
    ((column(1, 4, -1),), CorruptBlockError, "or fall"),
    ((column(1, CELL_BYTES_MAX + 1, 0),), InvalidArgumentError, "must be at most 65536"),
    (tuple(column(n, 1, 1) for n in range(1, 19)), CorruptBlockError, "are 18; must be at most 16"),
]
"""Further columns of a block of two rows; why they are refused."""


@pytest.mark.parametrize(("further", "kind", "words"), LIES)
def test_a_lying_column_is_refused(
    further: tuple[FurtherColumn, ...], kind: type[UprError], words: str
) -> None:
    block = build_block([b"a", b"b"], [b"1", b"2"])
    lying = sealed(replace(block, further=further))
    with pytest.raises(kind, match=words):
        block_from_message(block_to_message(lying), numbered=False)


def test_as_many_and_as_large_columns_as_there_may_be() -> None:
    block = build_block([b"a"], [b""])
    further = tuple(column(n, CELL_BYTES_MAX) for n in range(1, FURTHER_COLUMNS_MAX + 1))
    block = sealed(replace(block, further=further))
    back = block_from_message(block_to_message(block), numbered=False)
    assert back.further == further
    assert back.column_bytes == FURTHER_COLUMNS_MAX * (CELL_BYTES_MAX + 8) + 1 + 16


def test_columns_without_rows_are_refused() -> None:
    empty = Block(make_runs([1], [0], 0, 3, 3), b"", b"", b"", b"", b"", b"", b"", 0, (GOOD,))
    with pytest.raises(CorruptBlockError, match="no key offsets"):
        check_block(sealed(empty))


@given(rows_strategy)
def test_cells_by_row_become_columns_again(rows: Rows) -> None:
    block = numbered(rows)
    cells = block_cells(block)
    assert cells == all_cells(block)
    assert columns_of(cells) == block.further
    assert [unpack_cells(pack_cells(row)) for row in cells] == cells
    keys, values = [k for k, _ in rows], [v for _, v in rows]
    built = list(blocks_with_cells(keys, values, list(map(cells_for, keys, values))))
    assert sum(map(check_cells, built)) == sum(map(len, cells))
    assert sum(one.rows for one in built) == len(rows)


def test_what_are_not_packed_cells_is_refused() -> None:
    assert pack_cells({}) is None
    with pytest.raises(CorruptBlockError, match="3 bytes are not the cells of a row"):
        unpack_cells(b"\x0a\xff\xff")
