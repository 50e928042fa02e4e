"""What the compiled modules merge, or find, is to the byte what Python makes of it, whatever it is."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled import load
from tests.raw import with_cells
from upr.storage import blocks as blocks_module
from upr.storage.blocks import (
    BlockCursor,
    BlockRange,
    Encoded,
    checked,
    head_of,
    read_rows,
    rows_of,
)
from upr.storage.compact import Chunk, FlushSlice, Merged, PurgeLimits, merge_direct, merge_slice
from upr.storage.keyspace import _WEIGHTS, block_key, hash_of, pack_hashes, seal
from upr_protocol.block import RUN, Block, FurtherColumn, build_block, make_runs, sealed
from upr_protocol.errors import CorruptBlockError
from upr_protocol.limits import BLOCK_COLUMN_BYTES, PARTITIONS
from upr_protocol.wire.codec import (
    check_encoded,
    column_spans,
    compress_block,
    decode_block,
    encode_block,
)

ALL = FlushSlice(0, PARTITIONS, 0, 1)
P = 700
KEYS = [b"k", b"l", b"8 bytes.", b"9 bytes..", b"a key of 18 bytes.", b"k" * 100]
OLD = 20
STARTS = {0: 0, 5: 2**47, 1023: 7}
TIMES = st.sampled_from([0, OLD, OLD + 1, 2 * OLD, 2 * OLD + 1])
Merge = Callable[..., Any]


CHECKSUMS = ["", "-DCRC_BY_TABLES"]
"""Options of the compiler: on processors without an instruction for checksums these come from tables. One function
makes them for all else, so what is not about them is tried with the first only."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Load a compiled module by its name, once for each option."""

    @cache
    def load_one(name: str, option: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if option:
                patch.setenv("CC", f"cc {option}")
            return load(name, tmp_path_factory.mktemp("compiled"))

    return load_one


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest, loaded: Callable[[str, str], Any]) -> Any:
    return loaded("upr.storage._search", getattr(request, "param", ""))


@pytest.fixture(scope="module")
def merge(request: pytest.FixtureRequest, loaded: Callable[[str, str], Any]) -> Merge:
    found: Merge = loaded("upr.storage._merge", getattr(request, "param", "")).merge
    return found


def both(
    merge: Merge, blocks: list[Encoded], part: FlushSlice, most: int, *args: Any, **options: Any
) -> tuple[list[Any], Merged, Merged]:
    """Merge with the module and without it; returns also what the module was asked and answered."""
    told = []

    def watched(*asked: Any) -> Any:
        told.append(merge(*asked))
        return told[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_COLUMN_BYTES", most)
        patch.setattr(blocks_module, "MERGE", watched)
        made = merge_slice([Chunk(blocks)], part, *args, **options)
        patch.setattr(blocks_module, "MERGE", None)
        return told, made, merge_slice([Chunk(blocks)], part, *args, **options)


@st.composite
def numbered(draw: st.DrawFn) -> list[Block]:
    """Blocks of a few partitions, one behind the other: dense or with gaps, some ranges without rows, deletes, and times."""
    highs = dict(STARTS)
    blocks = []
    for _ in range(draw(st.integers(1, 5))):
        owners = sorted(draw(st.sets(st.sampled_from(sorted(highs)), min_size=1)))
        counts = [draw(st.integers(0, 6)) for _ in owners]
        total = sum(counts)
        rows = draw(
            st.lists(
                st.tuples(st.sampled_from(KEYS), st.none() | st.binary(max_size=40)),
                min_size=total,
                max_size=total,
            )
        )
        runs, offsets = np.zeros(len(owners), RUN), list[int]()
        for at, (owner, count) in enumerate(zip(owners, counts, strict=True)):
            most = draw(st.sampled_from([count, count + 3, 2**32 - 1])) if count else 2
            own = sorted(draw(st.sets(st.integers(1, most), min_size=count, max_size=count)))
            start, end = highs[owner], highs[owner] + most
            # Of a stretch that goes on.
            horizon = end + draw(st.sampled_from([0, 0, 5]))
            runs[at] = (owner, count, start, end, horizon, draw(TIMES))
            highs[owner], offsets = end, offsets + own
        block = build_block([k for k, _ in rows], [v for _, v in rows]) if rows else EMPTY
        dense = (runs["count"] == runs["end_seqno"] - runs["start_seqno"]) | (runs["count"] == 0)
        dated = bool(rows) and draw(st.booleans())
        times = draw(st.lists(TIMES, min_size=total, max_size=total)) if dated else []
        ops = bytes([value is None for _, value in rows])
        pairs = [(key, value or b"") for key, value in rows]
        blocks.append(
            sealed(
                replace(
                    block,
                    runs=runs,
                    seqnos=b"" if dense.all() else np.array(offsets, "<u4").tobytes(),
                    ops=ops if any(ops) else b"",
                    key_offsets=edges([key for key, _ in pairs]),
                    keys=b"".join([key for key, _ in pairs]),
                    value_offsets=edges([value for _, value in pairs]),
                    values=b"".join([value for _, value in pairs]),
                    times=np.array(times, "<u8").tobytes(),
                )
            )
        )
    return blocks


def edges(cells: list[bytes]) -> bytes:
    return np.cumsum([0, *map(len, cells)]).astype("<i4").tobytes()


EMPTY = replace(build_block([b"k"], [b"v"]), runs=np.zeros(0, RUN))


def encoded(block: Block) -> Encoded:
    return Encoded(block.runs, encode_block(block))


LIMITS = st.sampled_from([0, 3, 2**48])


def limits_at(passed: int, never: int) -> PurgeLimits:
    table = np.full(PARTITIONS, passed, np.uint64)
    return PurgeLimits(table, OLD, np.full(PARTITIONS, never, np.uint64), 2 * OLD)


@given(
    numbered(),
    st.sampled_from([(0, 1024), (0, 6), (5, 6), (6, 1024), (3, 3)]),
    st.sampled_from([1, 60, 130, BLOCK_COLUMN_BYTES]),
    st.sampled_from([0, 1, 3, 9]),
    st.none() | st.builds(limits_at, LIMITS, LIMITS),
)
@settings(max_examples=200)
def test_the_module_makes_what_python_makes(
    merge: Merge,
    blocks: list[Block],
    window: tuple[int, int],
    most: int,
    stored: int,
    limits: PurgeLimits | None,
) -> None:
    highs = np.zeros(PARTITIONS, np.uint64)
    highs[list(STARTS)] = [start and start + stored for start in STARTS.values()]
    part = FlushSlice(*window, 0, 1)
    if window[0] == window[1]:
        assert merge((), True, *window, most, highs, None) == []
        return
    told, made, reference = both(
        merge, [encoded(b) for b in blocks], part, most, highs, limits=limits
    )
    assert made == reference
    # What is not purged by Python is made by the module.
    assert [answer is None for answer in told] == [bool(reference.purges)]


@given(numbered())
@settings(max_examples=100)
def test_a_flush_keeps_stretches_that_go_on_apart(merge: Merge, blocks: list[Block]) -> None:
    """As Python does it: the module merges only what ends in markers."""
    highs = np.zeros(PARTITIONS, np.uint64)
    complete = all((block.runs["horizon"] == block.runs["end_seqno"]).all() for block in blocks)
    highs[list(STARTS)] = list(STARTS.values())
    told, made, reference = both(
        merge, [encoded(b) for b in blocks], ALL, BLOCK_COLUMN_BYTES, highs, horizon=highs
    )
    assert made == reference
    assert bool(told) or not complete


@given(numbered(), st.data())
@settings(max_examples=150)
def test_damaged_blocks_are_left_to_python(
    merge: Merge, blocks: list[Block], data: st.DataObject
) -> None:
    highs = np.zeros(PARTITIONS, np.uint64)
    sound = tuple([encode_block(block) for block in blocks])
    at = data.draw(st.integers(0, len(sound) - 1))
    damaged = bytearray(sound[at])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] ^= data.draw(st.integers(1, 255))
    del damaged[data.draw(st.integers(1, len(damaged))) :]
    changed = (*sound[:at], bytes(damaged), *sound[at + 1 :])
    if changed != sound:
        assert merge(changed, True, 0, PARTITIONS, 1000, highs, None) is None
    # Without a look at the checksums it is whatever the bytes say, within their bounds.
    merge(changed, False, 0, PARTITIONS, 1000, highs, None)


@pytest.mark.parametrize("column", ["key_offsets", "value_offsets", "seqnos", "ops", "times"])
def test_columns_that_contradict_each_other_are_left_to_python(merge: Merge, column: str) -> None:
    rows = 4
    runs = make_runs([3], [rows], 0, rows, rows, 1)
    block = replace(build_block([b"a", b"b", b"c", b"d"], [b"v"] * rows), runs=runs)
    block = replace(
        block,
        seqnos=np.arange(1, 5).astype("<u4").tobytes(),
        ops=bytes(rows),
        times=bytes(8 * rows),
    )
    highs = np.zeros(PARTITIONS, np.uint64)

    def answer(told: Block) -> Any:
        return merge((encode_block(sealed(told)),), True, 0, PARTITIONS, 1000, highs, None)

    assert answer(block)
    own = getattr(block, column)

    def changed(column_bytes: bytes) -> Block:
        told = copy(block)
        setattr(told, column, column_bytes)
        return told

    assert answer(changed(own[:-1])) is None
    assert answer(changed(own + own[-8:])) is None
    if column.endswith("offsets"):
        for wrong in (
            [0, 1, 2, 3, 2**31 - 1],
            [0, 3, 2, 3, 4],
            [-1, 1, 2, 3, 4],
            [1, 1, 2, 3, 4],
            [0, 1, 2, 3, 3],
        ):
            assert answer(changed(np.array(wrong, "<i4").tobytes())) is None
    if column == "seqnos":
        for wrong in ([1, 3, 2, 4], [1, 2, 2, 4], [0, 1, 2, 3], [1, 2, 3, 5]):
            assert answer(changed(np.array(wrong, "<u4").tobytes())) is None
    assert answer(replace(block, runs=make_runs([1024], [rows], 0, rows, rows, 1))) is None
    for start, end, horizon, count in (
        (0, 9, 9, rows + 1),
        (0, 3, 3, rows),
        (4, 4, 4, rows),
        (0, 9, 8, rows),
        (0, 2**32, 2**32, rows),
        (2**48 - 5, 2**48, 2**48, rows),
    ):
        runs = make_runs([3], [count], start, end, horizon, 1)
        assert answer(replace(block, runs=runs)) is None


def test_fields_that_are_cut_or_there_twice_are_left_to_python(merge: Merge) -> None:
    runs = make_runs([3], [1], 0, 1, 1, 1)
    data = encode_block(sealed(replace(build_block([b"k"], [b"v"]), runs=runs)))
    highs = np.zeros(PARTITIONS, np.uint64)
    assert merge((data,), False, 0, PARTITIONS, 1000, highs, None)
    # Its last field has five bytes.
    for wrong in (data[:-1], data[:-4], data + data[-5:], data + b"\x00", data + b"\x5a\x00"):
        assert merge((wrong,), False, 0, PARTITIONS, 1000, highs, None) is None


def test_what_is_compressed_or_has_further_columns_is_left_to_python(merge: Merge) -> None:
    runs = make_runs([3], [9], 0, 9, 9, 1)
    block = sealed(replace(build_block([b"%d" % i for i in range(9)], [b"v" * 90] * 9), runs=runs))
    cells = with_cells(block)
    assert cells.further
    highs = np.zeros(PARTITIONS, np.uint64)
    for data in (compress_block(encode_block(block)), encode_block(cells)):
        assert merge((data,), True, 0, PARTITIONS, 1000, highs, None) is None
        told, made, reference = both(
            merge, [Encoded(runs, data)], ALL, BLOCK_COLUMN_BYTES, highs, limits=None
        )
        assert told == [None]
        assert made == reference


def test_a_block_reaches_as_far_as_its_offsets(merge: Merge) -> None:
    """A row at the last seqno that an offset can tell is in the block that ends there."""
    far = 2**32 - 1
    runs = make_runs([3], [2], 0, far, far, 1)
    first = replace(build_block([b"a", b"b"], [b"v"] * 2), runs=runs)
    first = sealed(replace(first, seqnos=np.array([1, far], "<u4").tobytes()))
    runs = make_runs([3], [1], far, far + 1, far + 1, 1)
    last = sealed(replace(build_block([b"c"], [b"v"]), runs=runs))
    told, made, reference = both(
        merge, [encoded(first), encoded(last)], ALL, 1000, np.zeros(PARTITIONS, np.uint64)
    )
    assert told != [None]
    assert made == reference
    assert [(end, decode_block(data).rows) for _, end, data in made.blocks] == [
        (far, 2),
        (far + 1, 1),
    ]


@pytest.mark.parametrize("limits", [(9, OLD, 0, 0), (0, 0, 9, OLD)])
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_tombstone_at_its_limits_is_left_to_python(
    merge: Merge, limits: tuple[int, int, int, int], beyond: int
) -> None:
    passed, old, never, very_old = limits
    tables = [np.full(PARTITIONS, seqno, np.uint64) for seqno in (passed, never)]
    runs = make_runs([3], [9], 0, 9, 9, OLD + beyond)
    rows = [b"%d" % i for i in range(9)]
    block = sealed(replace(build_block(rows, [b"v"] * 8 + [None]), runs=runs))
    for start, purged in ((0, not beyond), (1, False)):
        highs = np.full(PARTITIONS, start, np.uint64)
        told, made, reference = both(
            merge,
            [encoded(block)],
            ALL,
            1000,
            highs,
            limits=PurgeLimits(tables[0], old, tables[1], very_old),
        )
        assert made == reference
        assert bool(made.purges) == purged
        assert (told == [None]) == purged


@pytest.mark.parametrize("merge", CHECKSUMS, indirect=True)
@pytest.mark.parametrize("most", [3 * 30 - 1, 3 * 30])
def test_a_block_has_as_many_bytes_as_it_may(merge: Merge, most: int) -> None:
    runs = make_runs([3], [4], 0, 4, 4, 1)
    # Rows of 30 bytes with their offsets.
    block = sealed(replace(build_block([b"%d" % i for i in range(4)], [b"v" * 8] * 4), runs=runs))
    highs = np.zeros(PARTITIONS, np.uint64)
    _, made, reference = both(merge, [encoded(block)], ALL, most, highs)
    assert made == reference
    assert [end for _, end, _ in made.blocks] == ([3, 4] if most == 90 else [2, 4])


def test_a_damaged_block_stops_its_own_partition_only(
    merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "MERGE", merge)
    stored = {}
    for partition in (3, 5):
        rows = [(b"a", b"1"), (b"b", b"other")]
        runs = make_runs([partition], [2], 0, 2, 2, 1)
        block = build_block([key for key, _ in rows], [value for _, value in rows])
        stored[partition] = encode_block(sealed(replace(block, runs=runs)))
    stored[3] = stored[3].replace(b"other", b"0ther")
    heads = {p: head_of(data, len(data), p, 2) for p, data in stored.items()}
    ranges = [BlockRange(p, (head,)) for p, head in heads.items()]
    found = merge_direct(ranges, lambda partition, ends: [stored[partition]], None)
    assert set(found.damaged) == {3}
    assert [one.partition for one in found.replacements] == [5]


def forged(count: int) -> list[bytes]:
    """Return different keys of one hash."""
    first, second = (int(weight) for weight in _WEIGHTS[:2])
    keys = []
    for number in range(1, count + 1):
        rest = (12345 - number * first) * pow(second, -1, 2**64) % 2**64
        keys.append(b"".join([(x ^ x >> 32).to_bytes(8, "little") for x in (number, rest)]))
    assert {hash_of(key) for key in keys} == {hash_of(keys[0])}
    return keys


def test_keys_of_one_hash_are_left_to_python_before_they_take_long(merge: Merge) -> None:
    keys = forged(3000)
    runs = make_runs([3], [3000], 0, 3000, 3000, 1)
    block = sealed(replace(build_block(keys, [b""] * 3000), runs=runs))
    highs = np.zeros(PARTITIONS, np.uint64)
    told, made, reference = both(merge, [encoded(block)], ALL, BLOCK_COLUMN_BYTES, highs)
    assert told == [None]
    assert made == reference
    assert made.rows == 3000
    few = sealed(replace(build_block(keys[:9], [b""] * 9), runs=make_runs([3], [9], 0, 9, 9, 1)))
    told, made, reference = both(merge, [encoded(few), encoded(few)], ALL, 1000, highs)
    assert told != [None]
    assert made == reference
    assert made.rows == 9


def test_arguments_of_another_kind_are_refused(merge: Merge) -> None:
    highs = np.zeros(PARTITIONS, np.uint64)
    wrong: tuple[Any, ...]
    for wrong in (
        ([], True, 0, 1, 1, highs, None),
        ((), 1, 0, 1, 1, highs, None),
        ((), True, 0, 1, 1, highs),
        ((), True, 0, 1, 1, highs, [highs, 1, highs, 1]),
        ((), True, "0", 1, 1, highs, None),
        ((), True, 0, 1, 1, None, None),
        ((), True, 0, 1, 1, highs, (highs, 1, highs)),
    ):
        with pytest.raises(TypeError):
            merge(*wrong)
    with pytest.raises(ValueError, match="not one uint64"):
        merge((), True, 0, 1, 1, highs[:5], None)
    with pytest.raises(ValueError, match="not one uint64"):
        merge((), True, 0, 1, 1, highs, (highs, 1, highs[:5], 1))
    for other in (highs.astype(np.int64), highs.astype(float), highs.astype(">u8")):
        with pytest.raises(ValueError, match="not one uint64"):
            merge((), True, 0, 1, 1, other, None)
    for window in ((-1, 1), (2, 1), (0, PARTITIONS + 1)):
        assert merge((), True, *window, 1, highs, None) is None
    assert merge((bytearray(b""),), True, 0, 1, 1, highs, None) is None


@given(numbered(), st.data())
@settings(max_examples=100)
def test_a_block_is_opened_as_python_does(
    module: Any, blocks: list[Block], data: st.DataObject
) -> None:
    whole = encode_block(data.draw(st.sampled_from(blocks)))
    assert module.opened(memoryview(whole)) == module.opened(whole) == column_spans(whole)
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    for other in (changed, whole[:at], whole + whole[:at]):
        spans = module.opened(other)
        if spans is not None:
            assert spans == column_spans(other)
            check_encoded(other)


@pytest.mark.parametrize("module", CHECKSUMS, indirect=True)
@pytest.mark.parametrize("size", [*range(3060, 3085), 2 * 3072 + 1, 100_000])
def test_columns_of_any_size_have_their_checksum(module: Any, size: int) -> None:
    value = np.random.default_rng(size).bytes(size)
    runs = make_runs([3], [1], 0, 1, 1, 1)
    whole = encode_block(sealed(replace(build_block([b"k"], [value]), runs=runs)))
    assert module.opened(whole) == column_spans(whole)
    for place in (0, size // 2, size - 1):
        wrong = bytearray(whole)
        wrong[whole.index(value) + place] ^= 1
        assert module.opened(bytes(wrong)) is None


def test_what_is_not_for_the_module_is_not_opened(module: Any) -> None:
    block = sealed(replace(build_block([b"k"], [b"v" * 600]), runs=make_runs([3], [1], 0, 1, 1, 1)))
    whole = encode_block(block)
    assert module.opened(compress_block(whole)) is None
    assert module.opened(encode_block(with_cells(block))) is None
    assert module.opened(encode_block(replace(block, columns_crc=block.columns_crc ^ 1))) is None
    with pytest.raises(TypeError):
        module.opened(7)


FAR = st.sampled_from([2**15, 2**31 + 1, 2**32 - 1])
"""Hashes whose low bits are those of others."""


@given(numbered(), st.data())
@settings(max_examples=200)
def test_rows_are_those_that_python_reads(
    module: Any, blocks: list[Block], data: st.DataObject
) -> None:
    whole = encode_block(data.draw(st.sampled_from(blocks)))
    total = checked(whole).runs["count"].sum()
    rows = sorted(data.draw(st.sets(st.integers(0, int(total) - 1)))) if total else []
    expected = rows_of(checked(whole), rows)
    for check in (False, True):
        assert module.rows_at(memoryview(whole), rows, check) == expected
        assert module.rows_at(whole, [*rows, int(total)], check) is None
    assert [row[:2] for row in expected] == [
        (run["partition"], run["start_seqno"] + number) for run, number in numbers_at(whole, rows)
    ]
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    for other in (changed, whole[:at]):
        told = module.rows_at(other, rows, True)
        if told is not None:
            assert told == rows_of(checked(other), rows)
        # What was not checked may say anything, and is read within its bounds.
        module.rows_at(other, rows, False)


def numbers_at(whole: bytes, rows: list[int]) -> list[tuple[Any, int]]:
    """The run and the number in it of each row, the last row first."""
    block = decode_block(whole)
    owners = np.repeat(np.arange(len(block.runs)), block.runs["count"])
    numbers = np.concatenate([np.arange(1, n + 1) for n in block.runs["count"]])
    if block.seqnos:
        numbers = np.frombuffer(block.seqnos, "<u4")
    return [(block.runs[owners[row]], int(numbers[row])) for row in reversed(rows)]


def test_rows_of_what_is_not_for_the_module_are_left_to_python(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "ROWS_AT", module.rows_at)
    runs = make_runs([3], [3], 0, 3, 3, 1)
    block = sealed(replace(build_block([b"k", b"m", b"l"], [b"v" * 600, b"", None]), runs=runs))
    further = (FurtherColumn(17, edges([b"", b"x", b""]), b"x"),)
    whole = encode_block(block)
    others = compress_block(whole), encode_block(sealed(replace(block, further=further)))
    assert [module.rows_at(other, [0, 2], True) for other in others] == [None, None]
    for one in (whole, *others):
        assert read_rows(one, [0, 2], check=True) == [(3, 3, b"l", None), (3, 1, b"k", b"v" * 600)]
    assert read_rows(whole, [1], check=True) == [(3, 2, b"m", b"")]
    with pytest.raises(CorruptBlockError):
        read_rows(whole.replace(b"v" * 600, b"w" * 600), [0], check=True)
    wrong: list[Any] = [(0,), ["0"], 0]
    for rows in wrong:
        with pytest.raises(TypeError):
            module.rows_at(whole, rows, True)
    for row in (-1, 2**64):
        with pytest.raises(OverflowError):
            module.rows_at(whole, [row], True)


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("rows", [0, 5, 150_000])
def test_rows_are_found_by_all_bits_of_their_hashes(
    count: int, rows: int, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought = {number << 16 | 7 for number in range(count)}
    hashes = np.random.default_rng(rows).integers(0, 40, rows, np.uint32)
    hashes *= 2**16
    hashes += 7
    hashes[1::2] += 1
    expected = [row for row, one in enumerate(hashes.tolist()) if one in sought]
    for wanted_rows in (module.wanted_rows, None):
        monkeypatch.setattr(blocks_module, "WANTED_ROWS", wanted_rows)
        assert blocks_module.rows_with(hashes, sought).tolist() == expected


HASHES = st.lists(st.integers(0, 3) | FAR, max_size=5)


@given(
    st.lists(HASHES, min_size=1, max_size=6),
    st.sampled_from(["", "crc", "short", "kind", "none", "end"]),
    st.integers(0, 5),
    st.integers(0, 60),
    st.sampled_from([1, 40, 10**6]),
    st.sets(st.integers(0, 20) | FAR, min_size=1),
    st.sampled_from([2, 1000]),
)
@settings(max_examples=200)
def test_a_hash_is_found_where_python_finds_it(
    module: Any,
    blocks: list[list[int]],
    damage: str,
    damaged: int,
    above: int,
    most: int,
    sought: set[int],
    at_once: int,
) -> None:
    rows = {}
    for number, hashes in enumerate(blocks):
        start, end = 10 * number, 10 * number + 10
        value = pack_hashes(P, start, end, np.array(hashes, "<u4"))
        if number == damaged:
            wrong = {
                "": value,
                "crc": value[:-1] + bytes([value[-1] ^ 1]),
                "short": seal(value[:-6], block_key(P, end)),
                "kind": seal(b"\2" + value[1:-4], block_key(P, end)),
                "none": b"",
                "end": pack_hashes(P, start - 1, end, np.array(hashes, "<u4")) if start else value,
            }
            value = wrong[damage]
        rows[block_key(P, end)] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "HASHED_BLOCKS", at_once)
        for end in (10 * len(blocks), 10, 5):
            patch.setattr(blocks_module, "CANDIDATE", module.candidate)
            made = BlockCursor(None, Rows(rows)).candidate(P, end, above, most, sought)
            patch.setattr(blocks_module, "CANDIDATE", None)
            assert made == BlockCursor(None, Rows(rows)).candidate(P, end, above, most, sought)


class Rows:
    """Cursor over a table, as LMDB's."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = sorted(rows.items())
        self._at = 0

    def set_key(self, key: bytes) -> bool:
        self._at = next((at for at, row in enumerate(self._rows) if row[0] == key), -1)
        return self._at >= 0

    def prev(self) -> bool:
        self._at -= 1
        return self._at >= 0

    def key(self) -> memoryview:
        return memoryview(self._rows[self._at][0])

    def value(self) -> memoryview:
        return memoryview(self._rows[self._at][1])

    def iterprev(self) -> Iterator[tuple[memoryview, memoryview]]:
        for key, value in self._rows[self._at :: -1]:
            yield memoryview(key), memoryview(value)


@pytest.mark.parametrize("row", [7, (), (b"k",), (7, b"v"), (b"k", 7)])
def test_what_is_no_row_of_hashes_is_a_wrong_argument(module: Any, row: Any) -> None:
    with pytest.raises(TypeError):
        module.candidate(iter([row]), P, 10, 0, 1000, 1000, b"\1\0\0\0")


def test_an_error_of_the_cursor_ends_the_search(module: Any) -> None:
    def torn() -> Iterator[tuple[bytes, bytes]]:
        yield block_key(P, 10), pack_hashes(P, 5, 10, np.array([2], "<u4"))
        raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        module.candidate(torn(), P, 10, 0, 1000, 1000, b"\1\0\0\0")
