"""Arrow columns as blocks to write."""

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upr_client.arrow import blocks, check_columns, row_sizes
from upr_client.errors import InvalidArgumentError
from upr_protocol.block import Block, block_keys, block_values, build_block, check_block
from upr_protocol.limits import BLOCK_COLUMN_BYTES, BLOCK_ROWS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from upr_protocol.partitioning import partition_of, partitions_of, partitions_of_column

BINARY = pa.binary()
Row = tuple[bytes, bytes | None]


def rows_of(block: Block) -> list[Row]:
    check_block(block, numbered=False)
    return list(zip(block_keys(block), block_values(block), strict=True))


def some_rows(count: int, seed: int = 1) -> list[Row]:
    choose = random.Random(seed)
    rows: list[Row] = []
    for number in range(count):
        key = b"%d" % choose.randrange(count // 3 + 1) * choose.randrange(1, 5)
        value = None if choose.random() < 0.1 else b"%d" % number * choose.randrange(9)
        rows.append((key, value))
    return rows


def columns(rows: list[Row], kind: Any = BINARY) -> tuple[Any, Any]:
    return pa.array([k for k, _ in rows], kind), pa.array([v for _, v in rows], kind)


# Partitions


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=60), st.binary(max_size=5))
def test_partitions_of_a_column_are_those_of_its_keys(keys: list[bytes], before: bytes) -> None:
    offsets = np.cumsum([len(before), *map(len, keys)])
    data = np.frombuffer(before + b"".join(keys), np.uint8)
    assert partitions_of_column(offsets, data).tolist() == partitions_of(keys).tolist()


@pytest.mark.parametrize("lengths", [[KEY_BYTES_MAX] * 3, [1, KEY_BYTES_MAX, 7, 4095], [2048]])
def test_partitions_of_the_longest_keys(lengths: list[int]) -> None:
    keys = [random.Random(length).randbytes(length) for length in lengths]
    offsets = np.cumsum([0, *lengths])
    data = np.frombuffer(b"".join(keys), np.uint8)
    assert partitions_of_column(offsets, data).tolist() == partitions_of(keys).tolist()


def test_partitions_of_more_keys_than_are_looked_at_together() -> None:
    keys = [b"%d" % number for number in range(100_000)]
    offsets = np.cumsum([0, *map(len, keys)])
    data = np.frombuffer(b"".join(keys), np.uint8)
    assert (partitions_of_column(offsets, data) == partitions_of(keys)).all()


# Blocks


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=9), st.none() | st.binary(max_size=9)),
        min_size=1,
        max_size=80,
    )
)
def test_one_block_is_what_build_block_makes(rows: list[Row]) -> None:
    [block] = blocks(*columns(rows))
    model = build_block([k for k, _ in rows], [v for _, v in rows])
    assert rows_of(block) == rows_of(model)
    assert (block.runs == model.runs).all()
    assert block == type(block)(block.runs, *[getattr(model, name) for name in COLUMNS])


COLUMNS = (
    "seqnos",
    "ops",
    "key_offsets",
    "keys",
    "value_offsets",
    "values",
    "times",
    "columns_crc",
)


def test_many_blocks_have_every_row_sorted_by_partition_in_its_order() -> None:
    rows = some_rows(5000)
    made = list(blocks(*columns(rows), column_bytes=2000, block_rows=90))
    assert len(made) > 50
    assert all(1 <= block.rows <= 90 and block.column_bytes <= 2000 + 8 for block in made)
    written = [row for block in made for row in rows_of(block)]
    assert written == sorted(rows, key=lambda row: partition_of(row[0]))
    # Most partitions are in one block, unlike rows that are cut before they are sorted.
    assert sum(len(block.runs) for block in made) < 1024 + len(made)


def test_every_kind_of_column_makes_the_same_blocks() -> None:
    rows = [(b"%d" % number, b"v%d" % number if number % 5 else None) for number in range(200)]
    keys, values = columns(rows)
    [model] = blocks(keys, values)
    padded = [(b"before", b"x"), *rows, (b"behind", None)]
    for kind in (BINARY, pa.string(), pa.large_binary(), pa.large_string()):
        whole = [column.cast(kind) for column in columns(padded)]
        sliced = [column.slice(1, 200) for column in whole]
        chunked = [pa.chunked_array([column.slice(0, 70), column.slice(70)]) for column in sliced]
        for one in (sliced, chunked):
            [block] = blocks(*one)
            assert rows_of(block) == rows_of(model)
    assert list(blocks(keys.slice(0, 0), values.slice(0, 0))) == []
    assert list(blocks(pa.chunked_array([], BINARY), pa.chunked_array([], BINARY))) == []


def test_what_lies_below_a_null_is_not_written() -> None:
    values = pa.Array.from_buffers(
        BINARY,
        2,
        [
            pa.py_buffer(b"\x02"),
            pa.py_buffer(np.array([0, 6, 9], "<i4")),
            pa.py_buffer(b"hiddenend"),
        ],
    )
    assert values.to_pylist() == [None, b"end"]
    [block] = blocks(pa.array([b"a", b"b"], BINARY), values)
    assert dict(rows_of(block)) == {b"a": None, b"b": b"end"}
    assert row_sizes(pa.array([b"a", b"b"]), values).tolist() == [10, 13]


def test_a_value_of_the_largest_size_is_a_block_of_its_own() -> None:
    rows: list[Row] = [(b"a", b"1"), (b"b", bytes(VALUE_BYTES_MAX)), (b"c", b"3")]
    made = list(blocks(*columns(rows)))
    assert sorted(block.rows for block in made) in ([1, 2], [1, 1, 1])
    assert {key for block in made for key in block_keys(block)} == {b"a", b"b", b"c"}


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        ([b"a", None], [b"", b""], "the key of row 1 is null"),
        ([b"a", b""], [b"", b""], "key '' is 0 bytes; must be 1 to 4096"),
        ([b"a", b"\xff" * 4097], [b"", b""], f"key {'ff' * 16}... is 4097 bytes"),
        ([b"ab"], [bytes(VALUE_BYTES_MAX + 1)], "value of key 6162 is 20971521 bytes"),
        ([b"ab"], [b"", b""], "values are 2; must be as many as the 1 keys"),
    ],
)
def test_a_bad_row_is_named(keys: list[Any], values: list[Any], words: str) -> None:
    for call in (check_columns, lambda *them: next(blocks(*them))):
        with pytest.raises(InvalidArgumentError) as caught:
            call(pa.array(keys, BINARY), pa.array(values, BINARY))
        assert words in str(caught.value)


def test_what_is_not_binary_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="keys are int64") as caught:
        check_columns(pa.array([1]), pa.array([b""]))
    assert "cast" in caught.value.hint


@pytest.mark.parametrize(
    "limits",
    [
        {"column_bytes": 0},
        {"column_bytes": BLOCK_COLUMN_BYTES + 1},
        {"block_rows": 0},
        {"block_rows": BLOCK_ROWS_MAX + 1},
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(limits))):
        next(blocks(*columns([(b"a", b"b")]), **limits))
