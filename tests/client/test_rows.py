"""Rows made by the compiled module are those that Python makes, whatever the columns hold."""

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.build_rows import SOURCE, compiled
from upr_client.changes import events
from upr_client.changes.events import (
    Change,
    block_changes,
    block_items,
    changes_in_python,
    items_in_python,
)
from upr_protocol.block import RUN, Block, build_block

ROOT = Path(__file__).resolve().parents[2]
ROWS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=9), st.none() | st.binary(max_size=30)),
    min_size=1,
    max_size=30,
)
COLUMNS = ("seqnos", "ops", "key_offsets", "keys", "value_offsets", "values")
Read = Callable[[Block], object]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled module, from the source as it is now."""
    file = compiled(ROOT / SOURCE, tmp_path_factory.mktemp("compiled"))
    if file is None:
        pytest.skip("there is no C compiler, or it has not Python's headers")
    spec = importlib.util.spec_from_file_location("upr_protocol._rows", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def fast(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_rows", module)


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


def outcome(read: Read, block: Block) -> object:
    try:
        return read(block)
    except Exception as error:
        return type(error)


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
    assert outcome(block_changes, block) == outcome(changes_in_python, block)
    assert outcome(block_items, block) == outcome(items_in_python, block)


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


def test_it_can_be_switched_off() -> None:
    code = "from upr_client.changes import events; print(events._rows)"
    environment = {**os.environ, "UPR_PURE_PYTHON": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout == b"None\n"
