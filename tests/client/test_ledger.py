"""The ledger of acknowledgements against the plain rule: a position never passes what is not acknowledged."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.test_consumer_model import block_of
from tests.model import Row, Run
from upr_client.changes.events import Change, ChangeBatch
from upr_client.changes.ledger import Ledger
from upr_protocol.consumer import Delivery
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.position import Position

ID = 0xA


def at(seqno: int, horizon: int | None = None, markers: tuple[int, ...] = ()) -> Position:
    return Position(7, ID, ID, seqno, seqno if horizon is None else horizon, markers, None)


def deliver(ledger: Ledger, runs: Sequence[tuple[int, Run]], branch: bytes = b"a") -> list[Change]:
    """Hand out runs of (partition, run); each is a block of its own."""
    blocks = [block_of(partition, run) for partition, run in runs]
    horizons = [run.horizon for _, run in runs]
    ends = [run.end for _, run in runs]
    delivery = Delivery(
        blocks,
        np.array([partition for partition, _ in runs]),
        np.array(ends, np.uint64),
        np.array(horizons, np.uint64),
        np.array([h == e for h, e in zip(horizons, ends, strict=True)]),
    )
    batch = ChangeBatch(blocks, delivery=delivery)
    ledger.hand_out(delivery, batch)
    return batch.changes


def run_of(start: int, rows: Sequence[int], end: int, horizon: int, branch: bytes = b"a") -> Run:
    return Run(start, end, horizon, [Row(s, b"k%d" % s, branch) for s in rows])


def begun(*partitions: int) -> Ledger:
    ledger = Ledger()
    for partition in partitions:
        ledger.begin(partition, at(0))
    return ledger


def test_ten_before_nine_leaves_nine_to_come_again() -> None:
    ledger = begun(3)
    changes = deliver(ledger, [(3, run_of(0, range(1, 11), 10, 10))])
    for change in changes[:8]:
        assert ledger.acknowledge(change)
    assert ledger.acknowledge(changes[9])
    assert ledger.position(3, at(10)).seqno == 8
    assert ledger.outstanding == 1
    assert ledger.acknowledge(changes[8])
    position = ledger.position(3, at(10))
    assert (position.seqno, position.horizon, position.markers) == (10, 10, (10,))
    assert ledger.outstanding == 0
    assert not ledger.acknowledge(changes[8])


@pytest.mark.parametrize("in_one_run", [False, True])
def test_the_position_is_the_current_stream_id_of_facts_that_complete_out_of_order(
    in_one_run: bool,
) -> None:
    # The table in Synapse's document of streams: a writer reserves ids, completes them in any order, and its current
    # id is the largest one with all at or below it completed.
    reserve, complete = "reserve", "complete"
    table = [
        (reserve, [1], 0),
        (complete, [1], 1),
        (reserve, [2, 3], 1),
        (complete, [3], 1),
        (complete, [2], 3),
        (reserve, [4, 5, 6], 3),
        (complete, [5], 3),
        (complete, [4], 5),
        (complete, [6], 6),
    ]
    ledger = begun(3)
    handed: dict[int, Change] = {}
    for action, ids, current in table:
        if action == complete:
            assert ledger.acknowledge(handed[ids[0]])
        else:
            parts = [ids] if in_one_run else [[one] for one in ids]
            runs = [(3, run_of(part[0] - 1, part, part[-1], part[-1])) for part in parts]
            handed |= {change.seqno: change for change in deliver(ledger, runs)}
        assert ledger.position(3, at(9)).seqno == current
    assert ledger.outstanding == 0


def test_an_empty_run_counts_when_everything_before_it_does() -> None:
    ledger = begun(3)
    (one,) = deliver(ledger, [(3, run_of(0, [1], 1, 1)), (3, run_of(1, [], 5, 5))])
    assert ledger.position(3, at(5)).seqno == 0
    assert ledger.acknowledge(one)
    assert ledger.position(3, at(5)).markers == (1, 5)
    deliver(ledger, [(3, run_of(5, [], 9, 9))])
    assert ledger.position(3, at(9)).seqno == 9


def test_what_was_never_handed_out_is_an_error() -> None:
    ledger = begun(3)
    deliver(ledger, [(3, run_of(0, [2], 2, 2))])
    for wrong in (Change(4, 1, "set", b"k", b"v"), Change(3, 3, "set", b"k", b"v")):
        with pytest.raises(InvalidArgumentError, match="never handed out"):
            ledger.acknowledge(wrong)
    assert not ledger.acknowledge(Change(3, 1, "set", b"k", b"v"))
    assert ledger.outstanding == 1


def test_what_was_handed_out_once_is_no_error_when_it_does_not_count_any_more() -> None:
    ledger = begun(3)
    (first, second) = deliver(ledger, [(3, run_of(0, [1], 1, 1)), (3, run_of(1, [2], 2, 2))])
    ledger.drop_above(3, at(1, markers=(1,)))
    assert not ledger.acknowledge(second)
    ledger.end([3, 4])
    assert ledger.outstanding == 0
    assert not ledger.acknowledge(first)
    ledger.begin(3, at(0))
    assert not ledger.acknowledge(second)


def test_a_rollback_drops_what_lies_above_and_keeps_what_waits_below() -> None:
    ledger = begun(3)
    first, second = deliver(ledger, [(3, run_of(0, [1], 1, 1)), (3, run_of(1, [2], 2, 2))])
    ledger.drop_above(3, at(1, markers=(1,)))
    assert ledger.outstanding == 1
    (other,) = deliver(ledger, [(3, run_of(1, [2], 2, 2, b"b"))], b"b")
    assert not ledger.acknowledge(second), "a change of the branch that was undone"
    assert ledger.acknowledge(other)
    assert ledger.position(3, at(2)).seqno == 0
    assert ledger.acknowledge(first)
    assert ledger.position(3, at(2)).seqno == 2


def test_a_rollback_below_what_was_acknowledged_moves_the_position_back() -> None:
    ledger = begun(3)
    for change in deliver(ledger, [(3, run_of(0, [1], 1, 1)), (3, run_of(1, [2], 2, 2))]):
        ledger.acknowledge(change)
    ledger.drop_above(3, at(1, markers=(1,)))
    position = ledger.position(3, at(1, markers=(1,)))
    assert (position.seqno, position.horizon, position.markers) == (1, 1, (1,))
    assert 3 in ledger.take_changed()


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, Run]]:
    """Runs of two partitions, with gaps, empty ones and stretches."""
    reached = {3: 0, 700: 0}
    runs = []
    for _ in range(draw(st.integers(1, 8))):
        partition = draw(st.sampled_from((3, 700)))
        start = reached[partition]
        end = start + draw(st.integers(1, 5))
        rows = draw(st.lists(st.integers(start + 1, end), unique=True))
        horizon = end if draw(st.booleans()) else end + draw(st.integers(1, 3))
        runs.append((partition, run_of(start, sorted(rows), end, horizon)))
        reached[partition] = end
    return runs


@settings(deadline=None, max_examples=60)
@given(histories(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_any_order(runs: list[tuple[int, Run]], rng: object, frames: int) -> None:
    ledger = begun(3, 700)
    waiting: list[Change] = []
    handed: list[tuple[int, Run]] = []
    chance = rng.random  # type: ignore[attr-defined]
    while runs or waiting:
        if runs and (not waiting or chance() < 0.3):
            part, runs = runs[:frames], runs[frames:]
            waiting += deliver(ledger, part)
            handed += part
        else:
            assert ledger.acknowledge(waiting.pop(int(chance() * len(waiting))))
        assert ledger.outstanding == len(waiting)
        assert bool(ledger.outstanding_bytes) == bool(waiting)
        for partition in (3, 700):
            open_seqnos = [c.seqno for c in waiting if c.partition == partition]
            position = ledger.position(partition, at(0))
            ends = [run.end for p, run in handed if p == partition]
            if not open_seqnos:
                assert position.seqno == max(ends, default=0)
                continue
            lowest = min(open_seqnos)
            passed = [s for p, run in handed if p == partition for s in [r.seqno for r in run.rows]]
            passed += [end for end in ends]
            assert position.seqno == max((s for s in passed if s < lowest), default=0)
    assert not ledger.waiting()


def test_what_piles_up_behind_one_change_is_small() -> None:
    ledger = begun(3)
    (first,) = deliver(ledger, [(3, run_of(0, [1], 1, 1))])
    for seqno in range(2, 500):
        empty = seqno % 3 == 0
        rows = [] if empty else [seqno]
        for change in deliver(ledger, [(3, run_of(seqno - 1, rows, seqno, seqno))]):
            assert ledger.acknowledge(change)
    partition = ledger._partitions[3]
    assert len(partition.runs) - partition.gone == 2
    assert partition.runs[-1].source is None
    assert ledger.outstanding == 1
    assert ledger.position(3, at(499)).seqno == 0
    assert ledger.acknowledge(first)
    position = ledger.position(3, at(499))
    assert (position.seqno, position.horizon) == (499, 499)
    assert position.markers[-1] == 499


def test_what_piled_up_is_undone_where_the_rollback_says() -> None:
    ledger = begun(3)
    waits, *rest = deliver(ledger, [(3, run_of(s - 1, [s], s, s)) for s in range(1, 7)])
    for change in reversed(rest):
        ledger.acknowledge(change)
    ledger.drop_above(3, at(4, markers=(1, 4)))
    (other,) = deliver(ledger, [(3, run_of(4, [5], 5, 5, b"b"))])
    assert not ledger.acknowledge(rest[3]), "seqno 5 of the branch that was undone"
    assert ledger.position(3, at(5)).seqno == 0
    ledger.acknowledge(waits)
    # All at and below the marker is acknowledged, and comes no more.
    position = ledger.position(3, at(5))
    assert (position.seqno, position.horizon, position.markers) == (4, 4, (1, 4))
    assert ledger.acknowledge(other)
    assert ledger.position(3, at(5)).seqno == 5
    assert ledger.outstanding == 0


def test_a_batch_counts_in_bytes_while_any_of_its_changes_waits() -> None:
    ledger = begun(3, 4)
    first = deliver(ledger, [(3, run_of(0, [1, 2], 2, 2)), (4, run_of(0, [1], 1, 1))])
    size = ledger.outstanding_bytes
    assert size == sum(block_of(3, run_of(0, range(n), n, n)).column_bytes for n in (2, 1))
    second = deliver(ledger, [(3, run_of(2, [3], 3, 3)), (4, run_of(1, [], 5, 5))])
    assert ledger.outstanding_bytes > size
    ledger.acknowledge(second[0])
    assert ledger.outstanding_bytes == size
    for change in first[:2]:
        ledger.acknowledge(change)
    assert ledger.outstanding_bytes == size
    ledger.acknowledge(first[2])
    assert ledger.outstanding_bytes == 0
    ways: list[Callable[[], None]] = [
        lambda: ledger.drop_above(3, at(3, markers=(3,))),
        lambda: ledger.end([3]),
        lambda: ledger.begin(3, at(3)),
    ]
    for drop in ways:
        ledger.begin(3, at(3))
        deliver(ledger, [(3, run_of(3, [4], 4, 4))])
        assert ledger.outstanding_bytes > 0
        drop()
        assert ledger.outstanding_bytes == 0


def test_a_change_of_another_branch_does_not_wait() -> None:
    ledger = begun(3)
    (old,) = deliver(ledger, [(3, run_of(0, [1], 1, 1))])
    ledger.end([3])
    ledger.begin(3, at(0))
    (new,) = deliver(ledger, [(3, run_of(0, [1], 1, 1, b"b"))])
    assert old != new
    assert not ledger.waits(old)
    assert ledger.waits(new)


def test_a_change_that_was_handed_out_anew_does_not_wait_as_before() -> None:
    ledger = begun(3)
    (old,) = deliver(ledger, [(3, run_of(0, [1], 1, 1))])
    ledger.begin(3, at(0))
    (new,) = deliver(ledger, [(3, run_of(0, [1], 1, 1))])
    assert old == new
    assert not ledger.waits(old)
    assert not ledger.acknowledge(old, itself=True)
    assert ledger.waits(new)
    assert ledger.acknowledge(old), "the application may say so of a copy"
