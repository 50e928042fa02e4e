"""Readers at every seqno, over any sequence of lawful merges, against the reference model."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model import ModelPartition, Row, State, apply
from tests.raw import all_rows
from tests.storage.stored_blocks import (
    Change,
    check_reader,
    ends_of,
    filled,
    read_above,
    store_of,
    stored_rows,
)
from upr.engine.compaction import segments
from upr.storage import blocks as blocks_module
from upr.storage import compact
from upr.storage.blocks import BlockRange, Head, last_complete
from upr.storage.compact import examine, merge_direct, rewrite_group
from upr.storage.store import Store
from upr_protocol.block import Block, slice_runs

P, Q = 5, 6
KEYS = [b"k%d" % i for i in range(7)]
PARTITIONS_USED = (P, Q, 1000)
changes_strategy = st.lists(
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([None, b"", b"x" * 9])), max_size=9),
    min_size=1,
    max_size=9,
)


class Readers:
    """Every reader of one partition: what each position could have, and with which horizon, it may go on with."""

    def __init__(self, model: ModelPartition) -> None:
        self.model = model
        self.known: dict[int, list[tuple[State, int]]] = {0: [({}, 0)]}

    def see(self, blocks: list[Block]) -> None:
        """Have all of them go on to the end, and remember where they could have stopped."""
        for at, kept in list(self.known.items()):
            rest = [block for block in blocks if int(block.runs["end_seqno"][0]) > at]
            for state, horizon in kept:
                check_reader(cut_above(rest, at), self.model, at, state, horizon)
        at = horizon = 0
        state = {}
        for block in blocks:
            beyond = max(horizon, int(block.runs["horizon"][0]))
            part = dict(state)
            for _, seqno, key, value in all_rows([block]):
                # It may stop between two rows of a block as well.
                self._stop(seqno, apply(part, [Row(seqno, key, value)]), beyond)
            at, state, horizon = check_reader([block], self.model, at, state, horizon)
            self._stop(at, state, horizon)

    def _stop(self, seqno: int, state: State, horizon: int) -> None:
        kept = self.known.setdefault(seqno, [])
        if (state, horizon) not in kept:
            kept.append((dict(state), horizon))


def cut_above(blocks: list[Block], seqno: int) -> list[Block]:
    return [slice_runs(blocks[0], np.array([seqno], np.uint64)), *blocks[1:]] if blocks else []


def check_positions(store: Store, partition: int, model: ModelPartition) -> None:
    """From N means above N, at every N, and tiling."""
    rows = stored_rows(store, partition)
    for seqno in range(model.high):
        found = [Row(*row[1:]) for row in all_rows(read_above(store, partition, seqno))]
        assert found == [row for row in rows if row.seqno > seqno]
    for head in store.heads(partition):
        for row in model.rows[head.start : head.end]:
            newer = any(r.key == row.key for r in model.rows[row.seqno : head.horizon])
            assert row in rows or newer, f"{row} is lost"


def lawful_ranges(heads: list[Head], pins: list[int], data: Any) -> BlockRange | None:
    segment = data.draw(st.sampled_from(list(segments(heads, pins))), "segment")
    last = data.draw(st.integers(1, len(segment)), "last")
    first = data.draw(st.integers(0, last - 1), "first")
    chosen = segment[first:last]
    if last_complete(heads[: heads.index(chosen[-1]) + 1]) != chosen[-1].end:
        return None
    return BlockRange(P, tuple(chosen))


@pytest.mark.long
@given(st.lists(changes_strategy, min_size=3, max_size=3), st.data())
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_reader_goes_on_rightly_after_every_merge(
    tmp_path_factory: pytest.TempPathFactory,
    histories: list[list[list[Change]]],
    data: Any,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_COLUMN_BYTES", data.draw(st.sampled_from([1, 90, 300])))
        size = data.draw(st.sampled_from([1, 400, 1 << 20]))
        patch.setattr(compact, "GROUP_BYTES", size)
        patch.setattr(blocks_module, "READ_BYTES", size)
        patch.setattr(compact, "SMALL_BYTES", data.draw(st.sampled_from([0, 160, 1 << 20])))
        for name in ("WORTH_FRACTION", "BLOCK_FRACTION"):
            patch.setattr(compact, name, data.draw(st.sampled_from([0.0001, 0.3])))
        store = store_of(tmp_path_factory.mktemp("merging") / "store")
        try:
            merge_at_random(store, histories, data)
        finally:
            store.close()


def merge_at_random(store: Store, histories: list[list[list[Change]]], data: Any) -> None:
    models = {}
    for partition, blocks in zip(PARTITIONS_USED, histories, strict=True):
        models[partition] = filled(store, partition, *(block for block in blocks if block))
    used = [p for p in PARTITIONS_USED if models[p].high]
    readers = {p: Readers(models[p]) for p in used}
    pins = {p: data.draw(st.lists(st.integers(1, models[p].high), max_size=2)) for p in used}
    for p in used:
        ends = ends_of(store, p)
        pins[p] = sorted({min(end for end in ends if end >= pin) for pin in pins[p]})
        readers[p].see(read_above(store, p, 0))
    for _ in range(data.draw(st.integers(1, 5), "steps")):
        ranges = []
        for p in used:
            found = lawful_ranges(store.heads(p), pins[p], data)
            if found is not None:
                ranges.append(BlockRange(p, found.heads))
        if ranges and data.draw(st.booleans(), "direct"):
            merged = merge_direct(ranges, store.blocks, None)
            assert not merged.damaged
            store.replace(merged.replacements)
        else:
            for one in ranges:
                examined = examine(one, store.blocks, None)
                for group in examined.groups():
                    store.replace([rewrite_group(examined, group, store.blocks)])
                    readers[one.partition].see(read_above(store, one.partition, 0))
        for p in used:
            readers[p].see(read_above(store, p, 0))
            check_positions(store, p, models[p])
            assert all(pin in ends_of(store, p) for pin in pins[p]), "a merge went across a pin"
            pinned = [head for head in store.heads(p) if head.end in pins[p]]
            assert all(head.horizon == head.end for head in pinned), "a pin is no marker any more"
