"""Cuts: what they pin, for how long, where a flush must stop for them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.buckets import bucket, commit, write
from upr.engine.bucket import Bucket, FlushPlan
from upr.engine.cuts import NO_PIN, Cut, Cuts, fences_of
from upr.engine.partitions import DEAD, PENDING
from upr.engine.tail import Tail, TailEntry
from upr.storage.keyspace import CutRow, Pin
from upr_protocol.block import build_block, make_runs, sealed
from upr_protocol.errors import (
    AlreadyExistsError,
    CutNotFoundError,
    PartitionNotActiveError,
    StorageFailedError,
    TooManyError,
)
from upr_protocol.limits import BACKUP_CUTS, BACKUP_CUTS_NAME, CUTS_HALF, CUTS_MAX
from upr_protocol.wire.codec import decode_block, encode_block

HOUR = 3600 * 10**6
A, B, C = 3, 4, 5


def entry(*runs: tuple[int, int, int, int]) -> TailEntry:
    """An entry of runs (partition, start, end, horizon)."""
    partitions, starts, ends, horizons = (list(column) for column in zip(*runs, strict=True))
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    rows = [b"k%d" % seqno for run in runs for seqno in range(run[1], run[2])]
    table = make_runs(partitions, counts, starts, ends, horizons, 1)
    block = sealed(replace(build_block(rows, [b"v"] * len(rows)), runs=table))
    return TailEntry(table, encode_block(block), (), 1)


def flushed(of: Bucket) -> list[tuple[int, int, int]]:
    """Flush once; the blocks as (partition, start, end)."""
    plan = of.begin_flush()
    if plan is None:
        return []
    assert isinstance(plan, FlushPlan)
    blocks = []
    for part in plan.prepare():
        merged = plan.merge(part)
        blocks += [decode_block(data).runs[0] for _, _, data in merged.blocks]
        of.slice_stored(merged)
    of.end_flush(complete=True)
    return [(int(r["partition"]), int(r["start_seqno"]), int(r["end_seqno"])) for r in blocks]


def made(of: Bucket, name: str, *partitions: int, lease: int = HOUR, now: int = 0) -> Cut:
    cut = of.create_cut(name, partitions or range(1024), lease, now)
    cut.durable = True
    return cut


def test_a_cut_names_id_and_last_complete_marker_of_this_instant() -> None:
    b = bucket()
    for _ in range(3):
        write(b, A)
    cut = made(b, "x", A, B, now=7)
    write(b, A)
    assert cut.pins == {A: Pin(A + 1, 3), B: Pin(B + 1, 0)}
    assert (cut.created, cut.expires) == (7, 7 + HOUR)
    assert b.cuts.pinned(A) == (3,)
    # Nothing lies below 0 that could be merged with what is above it; but purging may not pass it.
    assert b.cuts.pinned(B) == ()
    assert b.cuts.pinned(C) == ()
    lowest = b.cuts.lowest()
    assert (int(lowest[A]), int(lowest[B]), int(lowest[C])) == (3, 0, NO_PIN)
    assert b.cuts.holders(A) == [("x", 3)]


def test_in_an_incomplete_stretch_the_last_complete_marker_is_pinned() -> None:
    b = bucket()
    b.recovered([entry((A, 0, 3, 3)), entry((A, 3, 6, 9), (B, 0, 2, 2)), entry((A, 6, 8, 9))])
    cut = made(b, "x", A, B)
    assert (cut.pins[A].seqno, cut.pins[B].seqno) == (3, 2)
    b.recovered([entry((A, 8, 9, 9))])
    assert made(b, "y", A).pins[A].seqno == 9
    # The first flush ends at 3 for the one partition, the second behind 2 for the other.
    assert flushed(b) == [(A, 0, 3)]
    assert flushed(b) == [(A, 3, 6), (A, 6, 8), (B, 0, 2)]
    assert flushed(b) == [(A, 8, 9)]


def test_a_flush_ends_at_each_cut_and_the_rest_goes_with_the_next() -> None:
    b = bucket()
    write(b, A)
    commit(b)
    made(b, "one", A)
    write(b, A)
    write(b, B)
    made(b, "two", A, B)
    write(b, A)
    write(b, B)
    commit(b)
    assert flushed(b) == [(A, 0, 1)]
    assert flushed(b) == [(A, 1, 2), (B, 0, 1)]
    assert flushed(b) == [(A, 2, 3), (B, 1, 2)]
    assert flushed(b) == []


def test_a_released_cut_is_no_fence_any_more() -> None:
    b = bucket()
    write(b, A)
    cut = made(b, "x", A)
    write(b, A)
    commit(b)
    assert b.cuts.remove("x") is cut
    # It has lost its name, but a restart might bring it back: it still holds.
    assert b.cuts.pinned(A) == (1,)
    b.cuts.forget(cut)
    assert b.cuts.pinned(A) == ()
    assert int(b.cuts.lowest()[A]) == NO_PIN
    assert flushed(b) == [(A, 0, 2)]


def test_a_cut_during_a_flush_lets_it_end_where_it_was_to_end() -> None:
    b = bucket()
    write(b, A)
    commit(b)
    plan = b.begin_flush()
    assert plan is not None
    write(b, A)
    made(b, "x", A)
    write(b, A)
    commit(b)
    for part in plan.prepare():
        b.slice_stored(plan.merge(part))
    b.end_flush(complete=True)
    assert flushed(b) == [(A, 1, 2)]
    assert flushed(b) == [(A, 2, 3)]


def test_the_journal_keeps_a_commit_of_which_a_fence_left_a_part_behind() -> None:
    b = bucket()
    write(b, A)
    made(b, "x", A)
    write(b, A)
    taken = b.take_commit()
    assert taken is not None
    assert len(taken.entries) == 2
    b.commit_done(taken)
    plan = b.begin_flush()
    assert plan is not None
    for part in plan.prepare():
        b.slice_stored(plan.merge(part))
    assert b.end_flush(complete=True) == taken.number - 1


@given(
    st.lists(st.dictionaries(st.integers(0, 5), st.integers(1, 3), min_size=1), max_size=20),
    st.data(),
)
def test_fences_separate_every_pin_and_are_one_for_one_instant(
    batches: list[dict[int, int]], data: st.DataObject
) -> None:
    tail = Tail()
    high = dict.fromkeys(range(6), 0)
    instants = []
    for batch in batches:
        instants.append(dict(high))
        runs = []
        for partition, count in sorted(batch.items()):
            runs.append(
                (partition, high[partition], high[partition] + count, high[partition] + count)
            )
            high[partition] += count
        tail.append(entry(*runs))
    instants.append(dict(high))
    at = data.draw(st.integers(0, len(batches)))
    one_instant = data.draw(st.booleans())
    pins = {
        p: instants[at if one_instant else data.draw(st.integers(0, len(batches)))][p]
        for p in range(6)
    }
    seqnos = np.full(1024, NO_PIN, np.uint64)
    seqnos[list(pins)] = list(pins.values())
    fences = fences_of(tail, seqnos)
    if one_instant:
        assert len(fences) <= 1
    bounds = [tail.first, *sorted(fences), tail.end]
    for first, end in itertools.pairwise(bounds):
        joined = [run for one in tail.range(first, end) for run in one.runs]
        for partition, pin in pins.items():
            mine = [run for run in joined if run["partition"] == partition]
            if mine:
                assert not int(mine[0]["start_seqno"]) < pin < int(mine[-1]["end_seqno"])


def test_fences_are_found_again_after_a_restart() -> None:
    b = bucket()
    b.recovered([entry((A, 0, 2, 2)), entry((A, 2, 3, 3), (B, 0, 1, 1)), entry((B, 1, 4, 4))])
    row = CutRow(0, HOUR, HOUR, {A: Pin(A + 1, 2), B: Pin(B + 1, 0)})
    b.cuts.load({b"x": row}, b.tail)
    assert [cut.name for cut in b.cuts.live(0)] == ["x"]
    assert b.cuts.live(0)[0].row() == row
    assert flushed(b) == [(A, 0, 2)]
    assert flushed(b) == [(A, 2, 3), (B, 0, 4)]


def test_leases() -> None:
    b = bucket()
    made(b, "old", A, lease=10, now=0)
    made(b, "new", A, lease=20, now=5)
    assert [cut.name for cut in b.cuts.live(9)] == ["old", "new"]
    assert [cut.name for cut in b.cuts.live(10)] == ["new"]
    with pytest.raises(CutNotFoundError, match="'old'"):
        b.cuts.renew("old", None, 10)
    renewed = b.cuts.renew("new", None, 24)
    assert (renewed.lease, renewed.expires) == (20, 44)
    assert b.cuts.renew("new", 100, 25).expires == 125
    # Until it is forgotten it pins, and its name can be used again at once.
    assert [cut.name for cut in b.cuts.ended(10)] == ["old"]
    made(b, "old", A, lease=10, now=10)
    assert b.cuts.ended(10) == []
    assert len(b.cuts) == 2


def test_a_cut_that_is_not_durable_yet_has_its_name_and_cannot_be_seen() -> None:
    b = bucket()
    cut = b.create_cut("x", [A], 1, 0)
    assert b.cuts.live(0) == []
    assert b.cuts.ended(10) == []
    with pytest.raises(AlreadyExistsError, match="'x'"):
        b.create_cut("x", [A], 1, 10)
    with pytest.raises(CutNotFoundError):
        b.cuts.renew("x", None, 0)
    assert b.cuts.has(cut)
    b.cuts.forget(cut)
    assert not b.cuts.has(cut)
    b.create_cut("x", [A], 1, 10)


def test_a_removed_cut_gets_its_name_again_only_while_it_is_held() -> None:
    of = bucket()
    cut = made(of, "c", A)
    cuts = of.cuts
    assert cuts.remove("c") is cut
    cuts.put_back(cut)
    assert cuts.remove("c") is cut
    # Making it failed while its release was under way: nothing is pinned, and its name is free.
    cuts.forget(cut)
    cuts.put_back(cut)
    made(of, "c", A)


def test_partitions_are_told_once_nothing_pins_their_seqno_any_more() -> None:
    b, told = bucket(), list[list[int]]()
    b.cuts.on_dropped = told.append
    write(b, A)
    write(b, B)
    one, other = made(b, "one", A, B), made(b, "other", B)
    b.cuts.replicated(one.row(), "one", b.tail)
    assert told == []
    b.cuts.forget(other)
    b.cuts.forget(other)
    assert told == []
    b.cuts.forget(b.cuts.named[0])
    assert told == [[A, B]]


def test_what_cannot_be_cut() -> None:
    b = bucket()
    made(b, "x", A)
    with pytest.raises(AlreadyExistsError):
        b.create_cut("x", [A], 1, 0)
    for state, name in ((DEAD, "dead"), (PENDING, "pending")):
        b.partitions.state[B] = state
        with pytest.raises(PartitionNotActiveError, match=f"partition {B} is {name}"):
            b.create_cut("y", [B], 1, 0)
    made(b, "y", A, C)
    for number in range(CUTS_MAX - BACKUP_CUTS - 2):
        made(b, f"more {number}", A)
    with pytest.raises(
        TooManyError,
        match=f"cuts besides those of backups of the bucket are {CUTS_MAX - BACKUP_CUTS};",
    ):
        b.create_cut("z", [A], 1, 0)
    for number in range(BACKUP_CUTS):
        made(b, f"{BACKUP_CUTS_NAME}{number}", A)
    with pytest.raises(TooManyError, match=f"cuts of the bucket are {CUTS_MAX};"):
        b.create_cut(f"{BACKUP_CUTS_NAME}z", [A], 1, 0)
    b.fail(StorageFailedError("gone"))
    with pytest.raises(StorageFailedError):
        b.create_cut("z", [A], 1, 0)


def test_a_cut_goes_on_without_dead_partitions_and_names_them() -> None:
    b = bucket()
    b.partitions.state[B] = DEAD
    cut = b.create_cut("x", [A, B, C], HOUR, 0)
    assert list(cut.pins) == [A, C]
    assert {p: why.message for p, why in cut.left_out.items()} == {B: f"partition {B} is dead here"}


def test_nobody_has_all_cuts() -> None:
    b = bucket()
    for number in range(CUTS_HALF):
        b.create_cut(f"{number}", [A], 1000, 0, "10.0.0.1")
    with pytest.raises(TooManyError, match=rf"cuts of 10\.0\.0\.1 of the bucket are {CUTS_HALF};"):
        b.create_cut("more", [A], 1000, 0, "10.0.0.1")
    b.create_cut("more", [A], 1000, 0, "10.0.0.2")
    for number in range(CUTS_MAX - CUTS_HALF - 1):
        # Its place in the bucket does not depend on who has it; backups have half of them at most.
        b.create_cut(f"{BACKUP_CUTS_NAME}{number}", [A], 1000, 0, "10.0.0.1")
    assert len(b.cuts.live(0)) == 0, "none of them is durable yet"
    with pytest.raises(TooManyError, match=f"cuts of the bucket are {CUTS_MAX};"):
        b.create_cut("last", [A], 1000, 0, "10.0.0.3")
    empty = bucket()
    for number in range(CUTS_HALF):
        empty.create_cut(f"{BACKUP_CUTS_NAME}{number}", [A], 1000, 0, f"10.0.0.{number}")
    with pytest.raises(TooManyError, match=f"cuts of backups of the bucket are {CUTS_HALF};"):
        empty.create_cut(f"{BACKUP_CUTS_NAME}more", [A], 1000, 0, "10.0.0.9")


names = st.sampled_from("abc")
actions = st.lists(
    st.one_of(
        st.tuples(st.just("create"), names, st.integers(1, 5)),
        st.tuples(st.just("renew"), names, st.integers(1, 5)),
        st.tuples(st.just("release"), names, st.just(0)),
        st.tuples(st.just("expire"), st.just(""), st.just(0)),
        st.tuples(st.just("write"), st.just(""), st.just(0)),
    ),
    max_size=40,
)


@given(actions)
def test_names_leases_and_pins_follow_a_model(steps: list[tuple[str, str, int]]) -> None:
    """The model: name -> (expires, pin) of all that have not expired, and the pins still held."""
    b = bucket()
    cuts: Cuts = b.cuts
    model: dict[str, tuple[int, int]] = {}
    held: dict[str, tuple[int, int]] = {}
    for now, (action, name, lease) in enumerate(steps):
        alive = {n: cut for n, cut in model.items() if cut[0] > now}
        if action == "write":
            write(b, A)
        elif action == "expire":
            for cut in cuts.ended(now):
                cuts.forget(cut)
            held = dict(alive)
        elif action == "create" and name in alive:
            with pytest.raises(AlreadyExistsError):
                b.create_cut(name, [A], lease, now)
        elif action == "create":
            made(b, name, A, lease=lease, now=now)
            held[name] = alive[name] = (now + lease, int(b.partitions.high[A]))
        elif action == "renew" and name not in alive:
            with pytest.raises(CutNotFoundError):
                cuts.renew(name, lease, now)
        elif action == "renew":
            cuts.renew(name, lease, now)
            held[name] = alive[name] = (now + lease, alive[name][1])
        elif (gone := cuts.remove(name)) is not None:
            cuts.forget(gone)
            del held[name]
            alive.pop(name, None)
        model = alive
        assert {cut.name: (cut.expires, cut.pins[A].seqno) for cut in cuts.live(now)} == alive
        pins = {pin for _, pin in held.values()}
        assert cuts.pinned(A) == tuple(sorted(pins - {0}))
        assert int(cuts.lowest()[A]) == min(pins, default=NO_PIN)


def test_a_cut_that_could_not_be_forgotten_for_lack_of_memory_is_forgotten_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = bucket()
    write(of, A, b"a")
    made(of, "x", A, lease=1)
    pinned = of.cuts.pinned(A)

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    (ended,), dropped = of.cuts.ended(5), list[list[int]]()
    of.cuts.on_dropped = dropped.append
    for owner, name in ((np, "full"), (of.cuts, "on_dropped")):
        with monkeypatch.context() as without_memory:
            without_memory.setattr(owner, name, fails)
            with pytest.raises(MemoryError):
                of.cuts.forget(ended)
        assert of.cuts.pinned(A) == pinned
        assert of.cuts.ended(5) == [ended]
    of.cuts.forget(ended)
    assert dropped == [[A]]
    assert (of.cuts.ended(5), of.cuts.pinned(A)) == ([], ())
    assert int(of.cuts.lowest()[A]) == NO_PIN
