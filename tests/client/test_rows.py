"""Rows and columns made by the compiled module are those that Python makes, whatever they are made of."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import upr_protocol
from tests.compiled import load
from upr_client import arrow
from upr_client.changes import events
from upr_client.changes.events import (
    Change,
    block_changes,
    block_items,
    changes_in_python,
    items_in_python,
)
from upr_protocol import block as block_module
from upr_protocol.block import (
    ROW_BYTES,
    RUN,
    Block,
    blocks_of_pairs,
    build_block,
    build_blocks,
    check_block,
    join_blocks,
    make_runs,
    pairs_bytes,
    sealed,
)
from upr_protocol.limits import PARTITIONS, WRITE_BLOCK_BYTES_MAX

ROOT = Path(__file__).resolve().parents[2]
ROWS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=9), st.none() | st.binary(max_size=30)),
    min_size=1,
    max_size=30,
)
COLUMNS = ("seqnos", "ops", "key_offsets", "keys", "value_offsets", "values")
Outcome = Callable[[], object]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled module, from the source as it is now."""
    return load("upr_protocol._rows", tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def fast(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (events, arrow, block_module):
        monkeypatch.setattr(user, "COMPILED", module)


def reference(read: Outcome) -> Any:
    """Return the outcome without the compiled module."""
    with pytest.MonkeyPatch.context() as patch:
        for user in (arrow, block_module):
            patch.setattr(user, "COMPILED", None)
        return outcome(read)


@st.composite
def numbered(draw: st.DrawFn) -> Block:
    """A numbered block of a few partitions: dense or with gaps, with or without values."""
    rows = draw(ROWS)
    partitions = draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    block = build_block(
        [key for key, _ in rows], [value for _, value in rows], np.array(partitions, np.uint32)
    )
    runs = block.runs.copy()
    runs["start_seqno"] = draw(st.integers(0, 2**48 - 100))
    block = replace(block, runs=runs)
    if draw(st.booleans()):
        gaps = draw(st.lists(st.integers(1, 2**32 - 1), min_size=len(rows), max_size=len(rows)))
        block = replace(block, seqnos=np.array(gaps, "<u4").tobytes())
    if draw(st.booleans()):
        block = replace(block, value_offsets=b"", values=b"")
    return block


def outcome(read: Outcome) -> object:
    try:
        return read()
    except Exception as error:
        return type(error), str(error)


def numbers(block: Block) -> object:
    return [(one.dtype, one.tolist()) for one in arrow.row_numbers(block)]


# The fixture changes nothing between two examples.
unchanged = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@unchanged
@given(block=numbered())
def test_rows_are_those_of_the_reference(module: Any, fast: None, block: Block) -> None:
    wanted = changes_in_python(block)
    changes = block_changes(block)
    assert changes == wanted
    assert {type(change) for change in changes} == {Change}
    assert list(map(hash, changes)) == list(map(hash, wanted))
    assert [list(map(type, change)) for change in changes] == [
        list(map(type, change)) for change in wanted
    ]
    # By the compiled function itself, and not by the reference behind it.
    arguments = (block.runs.tobytes(), *(getattr(block, name) for name in COLUMNS))
    assert module.rows(Change, ("set", "delete"), *arguments) == wanted
    items = [(change.key, change.value) for change in wanted]
    assert module.items(*arguments) == block_items(block) == items_in_python(block) == items
    assert module.numbers(*arguments[:2], block.rows) is not None
    assert numbers(block) == reference(lambda: numbers(block))


@unchanged
@given(block=numbered(), data=st.data())
def test_columns_that_do_not_fit_give_what_the_reference_gives(
    fast: None, block: Block, data: Any
) -> None:
    name = data.draw(st.sampled_from((*COLUMNS, "runs")))
    column = bytearray(block.runs.tobytes() if name == "runs" else getattr(block, name))
    kind = data.draw(st.sampled_from(("shorter", "longer", "gone", "changed")))
    if name == "runs" or (kind == "changed" and column):
        # Of a run's bytes only those that make no table of millions of rows in the reference.
        places = [4, 5, *range(8, RUN.itemsize)] if name == "runs" else range(len(column))
        at = data.draw(st.sampled_from(places))
        column[at] ^= data.draw(st.integers(1, 255))
    elif kind == "gone":
        column.clear()
    elif kind == "shorter":
        del column[len(column) - data.draw(st.integers(0, len(column))) :]
    else:
        column += data.draw(st.binary(min_size=1, max_size=9))
    changed: Any = np.frombuffer(column, RUN) if name == "runs" else bytes(column)
    block = replace(block, **{name: changed})
    assert outcome(lambda: block_changes(block)) == outcome(lambda: changes_in_python(block))
    assert outcome(lambda: block_items(block)) == outcome(lambda: items_in_python(block))
    assert outcome(lambda: numbers(block)) == reference(lambda: numbers(block))


def test_a_module_that_lacks_a_function_is_not_used(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UPR_PURE_PYTHON", raising=False)
    functions = {name: made for name, made in vars(module).items() if name[0] != "_"}
    monkeypatch.setattr(upr_protocol, "_rows", SimpleNamespace(**functions), raising=False)
    assert block_module._compiled() is not None
    # What a build before this one left.
    del functions["summary"]
    monkeypatch.setattr(upr_protocol, "_rows", SimpleNamespace(**functions), raising=False)
    assert block_module._compiled() is None


class Text(bytes):
    """What is bytes, and not only that."""


LARGE = bytes(20 * 2**20)
KEYS = st.binary(min_size=1, max_size=40) | st.sampled_from([b"k", b"longer", bytes(4096)])
VALUES = st.none() | st.binary(max_size=40) | st.just(b"")
ODD_KEYS: Any = st.sampled_from([b"", bytes(4097), None, "key", bytearray(b"k"), Text(b"k")])
ODD_VALUES: Any = st.sampled_from([LARGE, LARGE + b"1", "value", 7, bytearray(b"v"), Text(b"v")])
ODD_ROWS: Any = st.sampled_from([(b"k",), (b"k", b"v", b"w"), [b"k", b"v"], None, 7])


@st.composite
def written(draw: st.DrawFn) -> list[Any]:
    """Rows to be written, one of which may be out of the ordinary."""
    rows: list[Any] = draw(st.lists(st.tuples(KEYS, VALUES), max_size=40))
    odd = draw(st.none() | st.tuples(ODD_KEYS, VALUES) | st.tuples(KEYS, ODD_VALUES) | ODD_ROWS)
    if odd is not None:
        rows.insert(draw(st.integers(0, len(rows))), odd)
    return rows


def contents(block: Block) -> object:
    return block.runs.tobytes(), block.columns, block.columns_crc


@unchanged
@given(rows=written(), most=st.integers(1, 500))
def test_pairs_are_checked_and_cut_into_blocks_as_by_the_reference(
    module: Any, fast: None, rows: list[Any], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_module, "BLOCK_COLUMN_BYTES", most)
        patch.setattr(build_blocks, "__defaults__", (most,))
        wanted = reference(lambda: pairs_bytes(rows))
        assert outcome(lambda: pairs_bytes(rows)) == wanted
        if not isinstance(wanted, int):
            return
        blocks = list(blocks_of_pairs(rows))
        assert list(map(contents, blocks)) == reference(
            lambda: list(map(contents, blocks_of_pairs(rows)))
        )
    assert sum(len(b.keys) + len(b.values) + ROW_BYTES * b.rows for b in blocks) == wanted
    kinds = {(type(row), *map(type, row)) for row in rows}
    plain = kinds <= {(tuple, bytes, bytes), (tuple, bytes, type(None))}
    assert (module.size(rows) == wanted) == plain
    assert (not rows or module.packed(rows, 0, 2**30) is not None) == plain


@unchanged
@given(rows=written(), data=st.data())
def test_a_block_is_that_of_the_reference(fast: None, rows: list[Any], data: Any) -> None:
    rows = [row for row in rows if isinstance(row, tuple) and len(row) == 2]
    kind = data.draw(st.sampled_from((list, tuple)))
    keys, values = (kind(row[at] for row in rows) for at in (0, 1))
    partitions = None
    if data.draw(st.booleans()):
        chosen = st.lists(st.integers(0, PARTITIONS), min_size=len(rows), max_size=len(rows))
        partitions = np.array(data.draw(chosen), np.uint32)

    def build() -> object:
        return contents(build_block(keys, values, partitions))

    assert outcome(build) == reference(build)


@st.composite
def to_join(draw: st.DrawFn) -> list[Block]:
    """Blocks that may become one, one of which may be damaged."""
    found = []
    with_values, starts = draw(st.booleans()), draw(st.integers(0, 2**48 - 100))
    for _ in range(draw(st.integers(2, 5))):
        rows = draw(ROWS)
        partitions = draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
        keys, values = [key for key, _ in rows], [value for _, value in rows]
        block = build_block(keys, values, np.array(partitions, np.uint32))
        runs = make_runs(block.runs["partition"], block.runs["count"], starts, starts + 9)
        for name in ("end_seqno", "horizon", "time"):
            runs[name] += draw(st.integers(0, 99))
        block = replace(block, runs=runs)
        found.append(block if with_values else replace(block, value_offsets=b"", values=b""))
    return found


def joined(found: list[Block], dated: bool) -> Any:
    return contents(join_blocks(found, dated=dated))


@unchanged
@given(found=to_join(), dated=st.booleans())
def test_blocks_are_joined_as_by_the_reference(
    module: Any, fast: None, found: list[Block], dated: bool
) -> None:
    wanted = reference(lambda: joined(found, dated))
    assert outcome(lambda: joined(found, dated)) == wanted
    told = [(block.runs.tobytes(), *(getattr(block, name) for name in COLUMNS)) for block in found]
    assert module.joined(told, dated) is not None


def damaged(data: st.DataObject, raw: bytes) -> bytes:
    """Return a column that is shorter or longer, or has another byte."""
    column = bytearray(raw)
    kind = data.draw(st.sampled_from(("shorter", "longer", "changed")))
    if kind == "changed" and column:
        column[data.draw(st.integers(0, len(column) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "shorter":
        del column[data.draw(st.integers(0, len(column))) :]
    else:
        column += data.draw(st.binary(min_size=1, max_size=9))
    return bytes(column)


@unchanged
@given(found=to_join(), data=st.data())
def test_what_is_joined_of_damaged_columns_is_what_the_reference_makes(
    module: Any, found: list[Block], data: Any
) -> None:
    told = [[block.runs.tobytes(), *(getattr(block, name) for name in COLUMNS)] for block in found]
    for _ in range(data.draw(st.integers(1, 3))):
        block, at = data.draw(st.sampled_from(told)), data.draw(st.integers(0, 6))
        block[at] = damaged(data, block[at])
    made = module.joined([tuple(block) for block in told], False)
    if made is not None:
        blocks = [
            replace(
                found[0], runs=np.frombuffer(runs, RUN), **dict(zip(COLUMNS, rest, strict=True))
            )
            for runs, *rest in told
        ]
        runs, columns, _ = reference(lambda: joined(blocks, False))
        assert made == (runs, *columns[1:])


@st.composite
def to_judge(draw: st.DrawFn) -> tuple[Block, bool]:
    """A block with nothing wrong, and whether it is numbered."""
    rows = draw(ROWS)
    partitions = draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    keys, values = [key for key, _ in rows], [value for _, value in rows]
    block = build_block(keys, values, np.array(partitions, np.uint32))
    if draw(st.booleans()):
        return block, False
    runs, gap = block.runs.copy(), draw(st.integers(0, 3))
    runs["start_seqno"] = draw(st.integers(0, 2**48 - 1000))
    runs["end_seqno"] = runs["start_seqno"] + runs["count"] * (gap + 1)
    runs["horizon"] = runs["end_seqno"] + draw(st.integers(0, 9))
    block = replace(block, runs=runs)
    if gap or draw(st.booleans()):
        offsets = [number * (gap + 1) for count in runs["count"] for number in range(1, count + 1)]
        block = replace(block, seqnos=np.array(offsets, "<u4").tobytes())
    if draw(st.booleans()):
        block = replace(block, times=bytes(8 * len(rows)))
    if draw(st.booleans()):
        block = replace(block, value_offsets=b"", values=b"")
    return block, True


@unchanged
@given(judged=to_judge(), data=st.data())
def test_a_block_is_judged_as_by_the_reference(
    module: Any, fast: None, judged: tuple[Block, bool], data: Any
) -> None:
    block, is_numbered = judged
    assert module.sound(is_numbered, block.runs.tobytes(), *block.columns) is True
    name = data.draw(st.sampled_from((*COLUMNS, "times", "runs")))
    if name == "runs":
        changed: Any = block.runs.copy()
        field = data.draw(st.sampled_from(list(RUN.fields or ())))
        number = st.sampled_from([0, 1, 2, 5, 1023, 1024, 2**31, 2**32 - 1])
        changed[field][data.draw(st.integers(0, len(changed) - 1))] = data.draw(number)
    else:
        changed = damaged(data, getattr(block, name) or bytes(block.rows))
    lying = sealed(replace(block, **{name: changed}))

    def judge() -> None:
        check_block(lying, numbered=is_numbered)

    wanted = reference(judge)
    assert outcome(judge) == wanted
    # Of a block without rows the reference decides.
    sound = module.sound(is_numbered, lying.runs.tobytes(), *lying.columns)
    assert sound is (wanted is None and lying.rows > 0)


def test_a_block_is_judged_at_each_limit_as_by_the_reference(module: Any) -> None:
    def of(key: int = 1, value: int = 0, rows: int = 1, **runs: int) -> Block:
        table = {"partitions": 0, "starts": 0, "ends": rows, "horizons": rows, **runs}
        offsets = [np.arange(rows + 1, dtype="<i4") * size for size in (key, value)]
        columns = (
            offsets[0].tobytes(),
            bytes(key * rows),
            offsets[1].tobytes(),
            bytes(value * rows),
        )
        made = make_runs(**{of: [number] for of, number in table.items()}, counts=[rows])
        return sealed(Block(made, b"", b"", *columns, b"", 0))

    def wide(more: int) -> Block:
        offsets = np.array([0, 20 * 2**20, WRITE_BLOCK_BYTES_MAX - 2 - 24 + more], "<i4")
        values = bytes(int(offsets[-1]))
        return sealed(replace(of(rows=2), value_offsets=offsets.tobytes(), values=values))

    def spanning(span: int) -> Block:
        block = of(ends=span, horizons=span)
        return sealed(replace(block, seqnos=np.array([7], "<u4").tobytes()))

    for inside, outside in (
        (of(key=4096), of(key=4097)),
        (of(value=20 * 2**20), of(value=20 * 2**20 + 1)),
        (of(rows=2**18), of(rows=2**18 + 1)),
        (of(partitions=1023), of(partitions=1024)),
        (of(horizons=2**48 - 1), of(horizons=2**48)),
        (wide(0), wide(1)),
        (spanning(2**32 - 1), spanning(2**32)),
    ):
        for block, sound in ((inside, True), (outside, False)):
            assert (reference(partial(check_block, block)) is None) is sound
            assert module.sound(True, block.runs.tobytes(), *block.columns) is sound


def test_rows_that_were_packed_or_refused_are_held_no_longer(module: Any) -> None:
    keys, values = [b"key-%d" % i for i in range(300)], [b"value-%d" % i for i in range(300)]
    counts = [sys.getrefcount(one) for one in (keys[0], values[0])]
    for last in (None, 7):
        told: list[Any] = [*values[:-1], last]
        rows = list(zip(keys, told, strict=True))
        made = module.packed(rows, 0, 2**20), module.columns(keys, told, None), module.size(rows)
        assert [one is None for one in made] == [last == 7] * 3
        del rows, told, made
    assert [sys.getrefcount(one) for one in (keys[0], values[0])] == counts


def test_rows_are_not_the_collector_s_business_and_are_freed(fast: None) -> None:
    block = build_block([b"key-%d" % i for i in range(3000)], [b"v"] * 3000)
    changes = block_changes(block)
    assert not any(map(gc.is_tracked, [*changes, *block_items(block)]))
    value = changes[7].value
    before = sys.getrefcount(Change)
    del changes
    assert sys.getrefcount(Change) == before - 3000
    assert value == b"v"


def test_what_is_no_kind_of_tuple_or_no_column_is_refused(module: Any) -> None:
    names, columns = ("set", "delete"), [b""] * 7
    for arguments in (
        (),
        (dict, names, *columns),
        (Change, ["set", "delete"], *columns),
        (Change, names, *columns[1:]),
    ):
        with pytest.raises(TypeError):
            module.rows(*arguments)
    with pytest.raises(TypeError):
        module.items(*columns[1:])
    assert module.rows(Change, names, *columns[1:], memoryview(b"")) is None
    assert module.items(*columns[1:], memoryview(b"")) is None
    for arguments in ((), ([], []), ((), True), ([], 1)):
        with pytest.raises(TypeError):
            module.joined(*arguments)
    for arguments in ((True, *columns), (1, *columns, b"")):
        with pytest.raises(TypeError):
            module.sound(*arguments)
    assert module.sound(True, *columns, memoryview(b"")) is False
    assert module.joined([], True) is module.joined([tuple(columns[1:])], True) is None
    for arguments in ((), ([b"k"], [b"v"])):
        with pytest.raises(TypeError):
            module.columns(*arguments)
    for keys, values, partitions in (([], [], None), ([b"k"], [], None), ([b"k"], [b"v"], b"12 ")):
        assert module.columns(keys, values, partitions) is None
    for arguments in ((), (b"", b""), (b"", b"", "1")):
        with pytest.raises(TypeError):
            module.numbers(*arguments)
    for arguments in ((b"1", b"", 0), (b"", b"1234", 0), (b"", memoryview(b""), 0), (b"", b"", -1)):
        assert module.numbers(*arguments) is None
    for arguments in ((), ([], 0), ([], "0", 1), ([], 0, "1")):
        with pytest.raises(TypeError):
            module.packed(*arguments)
    for first in (-1, 1):
        assert module.packed([(b"k", b"v")], first, 100) is None
    assert module.packed(((b"k", b"v"),), 0, 100) is module.size(((b"k", b"v"),)) is None


def test_it_can_be_switched_off() -> None:
    code = "from upr_protocol import block; print(block.COMPILED)"
    environment = {**os.environ, "UPR_PURE_PYTHON": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout == b"None\n"
