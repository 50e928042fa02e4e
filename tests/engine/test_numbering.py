"""Numbering of a write: the compiled functions and what they stand for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.buckets import bucket
from upr.engine import bucket as bucket_module
from upr.engine.partitions import ACTIVE, DEAD, REPLICA
from upr.storage import blocks as blocks_module
from upr_protocol.block import COMPILED, build_block, make_runs, sealed
from upr_protocol.limits import PARTITIONS, SEQNO_MAX

needs_compiler = pytest.mark.skipif(COMPILED is None, reason="the module was not compiled")
TABLES = ("high", "complete", "horizon")


@needs_compiler
@given(
    touched=st.dictionaries(st.integers(0, PARTITIONS - 1), st.integers(1, 3), min_size=1),
    highs=st.lists(st.integers(0, 9) | st.integers(SEQNO_MAX - 3, SEQNO_MAX), min_size=1),
    states=st.lists(st.sampled_from([ACTIVE, ACTIVE, ACTIVE, REPLICA, DEAD]), min_size=1),
)
def test_a_write_is_numbered_alike_with_and_without_the_compiled_functions(
    touched: dict[int, int], highs: list[int], states: list[int]
) -> None:
    partitions = sorted(touched)
    counts = [touched[p] for p in partitions]
    rows = sum(counts)
    block = build_block([b"k"] * rows, [b"v"] * rows, np.repeat(partitions, counts).astype("u4"))
    found = []
    for compiled in (COMPILED, None):
        b = bucket()
        table = b.partitions
        table.high[partitions] = np.resize(highs, len(partitions))
        table.state[partitions] = np.resize(states, len(partitions))
        with pytest.MonkeyPatch.context() as patch:
            for module in (bucket_module, blocks_module):
                patch.setattr(module, "COMPILED", compiled)
            written = b.write(block, b"", None, 0, 77)
            entries = b.tail.range(0, b.tail.end)
        refused = {p: (error.reason, error.message) for p, error in written.refused.items()}
        told = [written.runs.tolist(), written.failover_ids, written.ends.tolist(), refused]
        kept = [getattr(table, name).tolist() for name in TABLES]
        found.append((told, kept, [entry.data for entry in entries]))
    assert found[0] == found[1]
    refused = found[0][0][3]
    given_up = {
        p
        for p, high, state in zip(
            partitions,
            np.resize(highs, len(partitions)),
            np.resize(states, len(partitions)),
            strict=True,
        )
        if state != ACTIVE or int(high) + touched[p] > SEQNO_MAX
    }
    assert set(refused) == given_up


def test_rows_and_markers_of_runs_are_told_with_and_without_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = make_runs([1, 2, 3], [4, 0, 2**32 - 1], 0, [4, 9, 7], [4, 9, 7])
    torn = make_runs([1, 2, 3], [4, 5, 6], 0, [4, 9, 7], [4, 9, 8])
    for module in (COMPILED, None):
        monkeypatch.setattr(blocks_module, "COMPILED", module)
        assert blocks_module.summary(whole) == (2**32 + 3, True)
        assert blocks_module.summary(torn) == (15, False)
        assert blocks_module.summary(torn[:2]) == (9, True)
        assert blocks_module.summary(torn[:0]) == (0, True)


@needs_compiler
def test_what_is_no_table_of_runs_is_left_to_the_reference() -> None:
    module: Any = COMPILED
    highs, states = np.zeros(PARTITIONS, np.uint64), np.full(PARTITIONS, ACTIVE, np.uint8)
    beyond = make_runs([PARTITIONS], [1]).tobytes()
    for runs in (
        b"",
        b"1",
        beyond,
        memoryview(beyond),
        make_runs([1, PARTITIONS], [1, 1]).tobytes(),
    ):
        assert module.admitted(runs, ACTIVE, states, highs) is False
        assert module.numbered(runs, 1, highs) is None
        assert module.put_ends(runs, highs) is False
        assert module.summary(runs) is None
    assert not highs.any()
    runs = make_runs([1], [2], 3, 5, 5, 7).tobytes()
    for wrong in (highs[:-1], np.zeros(PARTITIONS, np.uint8)):
        for function, arguments in (
            (module.admitted, (ACTIVE, states, wrong)),
            (module.numbered, (1, wrong)),
            (module.put_ends, (wrong,)),
        ):
            with pytest.raises(ValueError, match="another size"):
                function(runs, *arguments)
    with pytest.raises(ValueError, match="another size"):
        module.admitted(runs, ACTIVE, highs, highs)
    highs.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        module.put_ends(runs, highs)
    for odd in ((), (runs,), (runs, "1", highs), (runs, -1, highs), (runs, 2**64, highs)):
        with pytest.raises((TypeError, OverflowError)):
            module.numbered(*odd)
    with pytest.raises(TypeError):
        module.admitted(runs)
    assert module.put_ends() is False
    block = sealed(replace(build_block([b"k"], [b"v"]), runs=make_runs([PARTITIONS], [1])))
    with pytest.raises(IndexError):
        bucket().write(block, b"", None, 0, 1)
