"""Blocks: what goes in comes out, cut-outs tell the same, and a lying block is refused."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model import partition_of as model_partition_of
from upr_client.testing.memory import run_block
from upr_client.writes import write_request
from upr_protocol.block import (
    FEW_ROWS,
    Block,
    block_keys,
    block_ops,
    block_partitions,
    block_seqnos,
    block_values,
    build_block,
    build_blocks,
    check_block,
    join_blocks,
    make_runs,
    row_times,
    sealed,
    select_runs,
    slice_runs,
    without_values,
)
from upr_protocol.errors import CorruptBlockError, InvalidArgumentError
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PARTITIONS,
    VALUE_BYTES_MAX,
)
from upr_protocol.partitioning import partition_of, partitions_of
from upr_protocol.wire import codec
from upr_protocol.wire.codec import (
    block_from_message,
    block_to_message,
    check_encoded,
    column_spans,
    compress_block,
    decode_block,
    decompress_block,
    encode_block,
    encode_columns,
    encode_frame,
    reopen_block,
)
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

Rows = list[tuple[bytes, bytes | None]]
rows_strategy = st.lists(
    st.tuples(st.binary(min_size=1, max_size=12), st.none() | st.binary(max_size=20)),
    min_size=1,
    max_size=60,
)


def slice_above(block: Block, seqno: int) -> Block:
    return slice_runs(block, np.array([seqno], np.uint64))


def numbered(rows: Rows, start: int = 0) -> Block:
    """The block that the server makes of a Write: every partition begins at ``start``."""
    return as_numbered(build_block([k for k, _ in rows], [v for _, v in rows]), start)


def as_numbered(block: Block, start: int) -> Block:
    runs = block.runs.copy()
    runs["start_seqno"] = start
    runs["end_seqno"] = start + runs["count"].astype(np.uint64)
    runs["horizon"] = runs["end_seqno"]
    return replace(block, runs=runs)


def sparse(partition: int, seqnos: list[int], start: int, end: int) -> Block:
    """A stored block of one run that lacks rows."""
    rows = [(s, b"k%d" % s, None if s % 3 == 0 else b"v%d" % s) for s in seqnos]
    times = np.arange(len(seqnos), dtype="<i8").tobytes()
    return sealed(replace(run_block(partition, rows, start, end, end, 1), times=times))


def table(block: Block) -> list[tuple[int, int, bytes, bytes | None]]:
    if not block.rows:
        return []
    columns = (block_partitions, block_seqnos, block_keys, block_values)
    return list(zip(*(column(block) for column in columns), strict=True))


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=50))
def test_partitioning_agrees_with_the_model(keys: list[bytes]) -> None:
    assert [partition_of(k) for k in keys] == [model_partition_of(k) for k in keys]
    assert partitions_of(keys).tolist() == [model_partition_of(k) for k in keys]


def test_partitioning_is_that_of_couchbases_clients() -> None:
    # Known answers, computed with zlib's CRC32 by hand.
    assert [partition_of(k) for k in (b"hello", b"foo", b"Aaron0")] == [528, 115, 654]


@given(rows_strategy)
def test_rows_come_out_by_partition_in_their_order(rows: Rows) -> None:
    block = build_block([k for k, _ in rows], [v for _, v in rows])
    check_block(block, numbered=False)
    found = list(zip(block_keys(block), block_values(block), strict=True))
    assert found == sorted(rows, key=lambda row: model_partition_of(row[0]))
    assert block_partitions(block) == sorted(model_partition_of(k) for k, _ in rows)
    assert block_ops(block) == [1 if v is None else 0 for _, v in found]


@given(rows_strategy, st.integers(0, 2**48 - 100))
def test_encoding_brings_back_the_block(rows: Rows, start: int) -> None:
    block = numbered(rows, start)
    data = encode_block(block)
    check_encoded(data)
    back = decode_block(data)
    assert table(back) == table(block)
    assert back.columns_crc == block.columns_crc
    spans = column_spans(data)
    assert data[slice(*spans[5])] == block.keys
    assert data[slice(*spans.get(7, (0, 0)))] == block.values


@given(
    rows_strategy.map(lambda rows: numbered(rows))
    | st.integers(2, 11).map(lambda above: slice_above(sparse(7, [3, 4, 9], 2, 12), above))
)
def test_the_bytes_of_a_block_are_those_of_the_message(block: Block) -> None:
    message = block_to_message(block).SerializeToString()
    with pytest.MonkeyPatch.context() as patch:
        for least in (0, MESSAGE_BYTES_MAX):
            patch.setattr(codec, "JOIN_BYTES_MIN", least)
            assert encode_block(block) == message
            assert encode_columns(block.runs.tobytes(), block.columns) == message
    assert decompress_block(compress_block(message)) == message
    write = write_request(block, types_pb2.DURABILITY_DISK)
    assert write.write.block.SerializeToString() == message
    assert write == kv_pb2.WriteRequest.FromString(write.SerializeToString())


def with_runs_without_rows(block: Block, partitions: set[int]) -> Block:
    """The block with runs of which all rows are superseded, as a replica or a stream of a key prefix has them."""
    without = make_runs(sorted(partitions - set(block.runs["partition"].tolist())), 0, 10, 13, 13)
    runs = np.concatenate((block.runs, without))
    offsets = np.concatenate([np.arange(1, count + 1) for count in block.runs["count"]])
    runs = runs[np.argsort(runs["partition"])]
    seqnos = block.seqnos or offsets.astype("<u4").tobytes()
    return sealed(replace(block, runs=runs, seqnos=seqnos))


@given(rows_strategy, st.sets(st.integers(0, PARTITIONS - 1), max_size=60), st.data())
def test_a_cut_out_tells_of_its_partitions_what_the_whole_does(
    rows: Rows, without_rows: set[int], data: Any
) -> None:
    block = numbered(rows)
    if without_rows:
        block = with_runs_without_rows(block, without_rows)
    check_block(block)
    keep = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(block.runs), max_size=len(block.runs)))
    )
    if not keep.any():
        return
    cut = select_runs(block, keep)
    check_block(cut)
    kept = set(block.runs["partition"][keep].tolist())
    assert table(cut) == [row for row in table(block) if row[0] in kept]


@given(st.sets(st.integers(11, 60), min_size=1).map(sorted), st.integers(0, 59))
def test_slicing_gives_what_is_above_and_nothing_else(seqnos: list[int], above: int) -> None:
    block = sparse(7, seqnos, 10, 60)
    check_block(block)
    cut = slice_above(block, above)
    check_block(cut)
    assert table(cut) == [row for row in table(block) if row[1] > above]
    assert int(cut.runs["start_seqno"][0]) == max(above, 10)
    assert int(cut.runs["end_seqno"][0]) == int(cut.runs["horizon"][0]) == 60


def test_slicing_a_dense_run() -> None:
    block = numbered([(b"same", b"%d" % i) for i in range(5)], 100)
    assert [row[1] for row in table(slice_above(block, 103))] == [104, 105]


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.none() | st.binary(max_size=9)),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
    st.data(),
)
def test_slicing_several_runs_gives_what_is_above_in_each(
    rows: Rows, with_gaps: bool, data: Any
) -> None:
    block = numbered(rows, 10)
    if with_gaps:
        runs = block.runs.copy()
        runs["end_seqno"] = runs["horizon"] = 10 + 2 * runs["count"].astype(np.uint64)
        offsets = np.concatenate([2 * np.arange(1, count + 1) for count in runs["count"]])
        block = sealed(replace(block, runs=runs, seqnos=offsets.astype("<u4").tobytes()))
        block = with_runs_without_rows(block, data.draw(st.sets(st.integers(0, PARTITIONS - 1))))
    ends = block.runs["end_seqno"].tolist()
    above = np.array([data.draw(st.integers(8, end - 1)) for end in ends], np.uint64)
    cut = slice_runs(block, above)
    check_block(cut)
    limits = dict(zip(block.runs["partition"].tolist(), above.tolist(), strict=True))
    assert table(cut) == [row for row in table(block) if row[1] > limits[row[0]]]
    assert cut.runs["start_seqno"].tolist() == np.maximum(above, 10).tolist()
    assert cut.runs["end_seqno"].tolist() == ends


def test_without_values_keeps_keys_and_ops() -> None:
    block = numbered([(b"a", b"1"), (b"b", None)])
    bare = without_values(block)
    check_block(bare)
    assert block_keys(bare) == block_keys(block)
    assert block_ops(bare) == block_ops(block)
    assert block_values(bare) == [None, None]


@given(rows_strategy, st.data())
def test_any_flipped_bit_is_noticed(rows: Rows, data: Any) -> None:
    encoded = bytearray(encode_block(numbered(rows)))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        block = decode_block(bytes(encoded))
    except (CorruptBlockError, InvalidArgumentError):
        return
    # A flipped tag can name a field that nobody reads, but never change what is read.
    assert table(block) == table(numbered(rows))


@given(st.binary(max_size=400))
def test_any_bytes_give_a_block_or_the_declared_error(data: bytes) -> None:
    for read in (decode_block, check_encoded):
        try:
            read(data)
        except InvalidArgumentError:
            continue


def i4(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def lies() -> list[tuple[str, dict[str, Any], str]]:
    return [
        ("falling key offsets", {"key_offsets": i4(0, 3, 2)}, "fall"),
        ("key offsets past the end", {"key_offsets": i4(0, 1, 9)}, "offsets run from 0 to 9"),
        ("key offsets not from 0", {"key_offsets": i4(1, 1, 2)}, "offsets run from 1"),
        ("too few value offsets", {"value_offsets": i4(0, 2)}, "value offsets take 8 bytes"),
        ("ragged offsets", {"key_offsets": b"\0\0\0"}, "must be a multiple of 4"),
        ("counts that disagree", {"runs": make_runs([1], [3], 0, 3, 3)}, "run table are 3"),
        ("too many ops", {"ops": b"\0\0\0"}, "ops take 3 bytes"),
        ("an unknown op", {"ops": b"\0\7"}, "op is 7"),
        ("a delete with a value", {"ops": b"\1\0"}, "delete carries a value"),
        (
            "a partition out of range",
            {"runs": make_runs([1024], [2], 0, 2, 2)},
            "partition is 1024",
        ),
        ("partitions twice", {"runs": make_runs([1, 1], [1, 1], 0, 1, 1)}, "strictly ascending"),
        ("an end below its start", {"runs": make_runs([1], [2], 5, 4, 5)}, "at or below its start"),
        ("a horizon below the end", {"runs": make_runs([1], [2], 0, 2, 1)}, "horizon is below"),
        ("more rows than seqnos", {"runs": make_runs([1], [2], 0, 1, 1)}, "more rows than seqnos"),
        (
            "rows missing without seqnos",
            {"runs": make_runs([1], [2], 0, 9, 9)},
            "seqnos are missing",
        ),
        ("a seqno of 2^48", {"runs": make_runs([1], [2], 2**48 - 2, 2**48, 2**48)}, str(2**48)),
        ("seqnos that do not rise", {"seqnos": np.array([2, 2], "<u4").tobytes()}, "do not rise"),
        ("a seqno outside", {"seqnos": np.array([1, 3], "<u4").tobytes()}, "outside its run"),
        ("an empty key", {"key_offsets": i4(0, 0, 2)}, "key is 0 bytes"),
    ]


@pytest.mark.parametrize(
    ("what", "change", "words"), lies(), ids=lambda p: p if isinstance(p, str) else ""
)
def test_a_lying_block_is_refused(what: str, change: dict[str, Any], words: str) -> None:
    ends = i4(0, 1, 2)
    honest = Block(make_runs([1], [2], 0, 2, 2), b"", b"", ends, b"ab", ends, b"xy", b"", 0)
    check_block(sealed(honest))
    with pytest.raises(InvalidArgumentError, match=words):
        check_block(sealed(replace(honest, **change)))


@given(
    rows_strategy.filter(lambda rows: len(rows) <= FEW_ROWS),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_few_rows_are_built_as_many_are_and_judged_as_in_python(
    rows: Rows, of_write: bool, chosen: bool, data: Any
) -> None:
    partitions = np.arange(len(rows), 0, -1, dtype=np.uint32) // 2 if chosen else None

    def built() -> Block:
        block = build_block([k for k, _ in rows], [v for _, v in rows], partitions)
        return block if of_write else as_numbered(block, 7)

    def verdict(block: Block) -> str:
        try:
            check_block(block, numbered=not of_write)
        except InvalidArgumentError as error:
            return repr(error)
        return ""

    block = built()
    with mock.patch("upr_protocol.block.FEW_ROWS", 0):
        assert table(built()) == table(block)
        assert (built().columns, built().columns_crc) == (block.columns, block.columns_crc)
    assert not verdict(block)
    what = data.draw(
        st.sampled_from(["runs", "ops", "key_offsets", "value_offsets", "keys", "values"])
    )
    if what == "runs":
        changed: Any = block.runs.copy()
        field = data.draw(
            st.sampled_from(["partition", "count", "start_seqno", "end_seqno", "horizon"])
        )
        numbers = st.sampled_from([0, 1, 2, 7, 8, 9, 1023, 1024, 2**31, 2**32 - 1])
        changed[field][data.draw(st.integers(0, len(changed) - 1))] = data.draw(numbers)
    else:
        changed = bytearray(getattr(block, what) or bytes(len(rows)))
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
        changed = bytes(changed)[: len(changed) - data.draw(st.integers(0, 1))]
    lying = sealed(replace(block, **{what: changed}))
    with mock.patch("upr_protocol.block.COMPILED", None):
        expected = verdict(lying)
    assert verdict(lying) == expected


def test_a_wrong_crc_is_refused() -> None:
    block = numbered([(b"a", b"1")])
    with pytest.raises(CorruptBlockError, match="CRC32C"):
        check_block(replace(block, columns_crc=block.columns_crc ^ 1))
    message = block_to_message(block)
    message.table_crc ^= 1
    with pytest.raises(CorruptBlockError, match="table has CRC32C"):
        block_from_message(message)


def test_bytes_moved_between_columns_are_noticed() -> None:
    # Without the lengths in the CRC the same bytes, cut elsewhere, would pass.
    block = numbered([(b"ab", b"cd")])
    moved = replace(block, keys=b"abc", values=b"d")
    with pytest.raises(CorruptBlockError, match="CRC32C"):
        check_block(moved)


def test_a_block_without_rows_is_cut_like_any_other() -> None:
    runs = make_runs([5], 0, 10, 20, 25, 0)
    block = sealed(Block(runs, b"", b"", i4(0), b"", i4(0), b"", b"", 0))
    cut = slice_above(block, 14)
    run = cut.runs[0]
    assert (int(run["start_seqno"]), int(run["end_seqno"]), int(run["horizon"])) == (14, 20, 25)
    assert cut.rows == 0
    check_block(cut)


def test_a_write_may_not_bring_seqnos() -> None:
    with pytest.raises(InvalidArgumentError, match="server assigns them"):
        check_block(numbered([(b"a", b"1")]), numbered=False)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (b"", b"", "key is 0 bytes"),
        (b"k" * (KEY_BYTES_MAX + 1), b"", "4097 bytes"),
        (b"k", b"v" * (VALUE_BYTES_MAX + 1), "20971521 bytes; must be at most 20971520"),
        ("text", b"", "key is str; must be bytes"),
        (b"k", "text", "value is str; must be bytes"),
    ],
)
def test_rows_out_of_range_are_refused(key: Any, value: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        build_block([b"fine", key], [b"fine", value])


def test_the_largest_row_fits() -> None:
    block = build_block([b"k" * KEY_BYTES_MAX], [b"v" * VALUE_BYTES_MAX])
    check_block(block, numbered=False)
    assert len(encode_block(block)) < 24 * 2**20


@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=8), st.none() | st.binary(max_size=40)),
        max_size=60,
    ),
    st.integers(20, 120),
)
def test_splitting_loses_nothing(rows: Rows, limit: int) -> None:
    keys = [k for k, _ in rows]
    values = [v for _, v in rows]
    first = 0
    for block in build_blocks(keys, values, limit):
        part = rows[first : first + block.rows]
        first += len(part)
        held = zip(block_keys(block), block_values(block), strict=True)
        assert list(held) == sorted(part, key=lambda row: partition_of(row[0]))
        assert sum(len(k) + len(v or b"") + 9 for k, v in part) <= limit or len(part) == 1
    assert first == len(rows)
    assert BLOCK_COLUMN_BYTES == 2**20


def test_a_frame_of_encoded_blocks_is_a_follow_response() -> None:
    blocks = [numbered([(b"a", b"1")]), numbered([(b"b", b"x" * 70_000)])]
    frame = encode_frame([encode_block(b) for b in blocks], np.array([1, 2], "<u4").tobytes(), 0)
    message = wire.FollowResponse.FromString(frame)
    assert [table(block_from_message(b)) for b in message.frame.blocks] == [
        table(b) for b in blocks
    ]
    assert message.frame.tokens == b"\1\0\0\0\2\0\0\0"


@given(st.lists(rows_strategy, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_joined_blocks_have_the_same_rows_and_one_run_a_partition(
    writes: list[Rows], with_values: bool, compiled: bool
) -> None:
    highs: dict[int, int] = {}
    blocks: list[Block] = []
    for time, rows in enumerate(writes, 1):
        block = build_block([k for k, _ in rows], [v for _, v in rows])
        runs = block.runs.copy()
        partitions = runs["partition"].tolist()
        runs["start_seqno"] = [highs.get(partition, 0) for partition in partitions]
        runs["end_seqno"] = runs["start_seqno"] + runs["count"]
        runs["horizon"] = runs["end_seqno"]
        runs["time"] = time
        highs.update(zip(partitions, runs["end_seqno"].tolist(), strict=True))
        block = sealed(replace(block, runs=runs))
        blocks.append(block if with_values else without_values(block))
    with nullcontext() if compiled else mock.patch("upr_protocol.block.COMPILED", None):
        joined = join_blocks(blocks, dated=True)
    check_block(joined)
    expected = sorted((row for block in blocks for row in told(block)), key=lambda row: row[:2])
    assert told(joined) == expected
    assert joined.runs["partition"].tolist() == sorted(highs)
    assert joined.runs["end_seqno"].tolist() == [highs[p] for p in sorted(highs)]
    assert joined.runs["horizon"].tolist() == joined.runs["end_seqno"].tolist()
    assert not joined.runs["start_seqno"].any()
    data = encode_block(joined)
    assert encode_block(decode_block(data)) == data == encode_block(reopen_block(data))


def told(block: Block) -> list[tuple[int, int, bytes, bytes | None, str, int]]:
    return list(
        zip(
            block_partitions(block),
            block_seqnos(block),
            block_keys(block),
            block_values(block),
            block_ops(block),
            row_times(block).tolist(),
            strict=True,
        )
    )
