"""No validator is vacuous: each accepts a small good history, and refuses it with one thing wrong."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests import guarantees
from tests.guarantees import VALIDATORS, validate
from tests.history import Event, History

A, B = 0xA1, 0xB2
README = Path(__file__).parents[2] / "protos" / "README.md"


def event(kind: str, **fields: Any) -> Event:
    return {"event": kind, **fields}


def reading(kind: str, **fields: Any) -> Event:
    return event(kind, reader="r", partition=5, **fields)


def write(number: int, *rows: tuple[bytes, bytes | None], start: int, under: int = A) -> History:
    """A write to partition 5, acknowledged at ``memory``."""
    placed = [(5, key, value) for key, value in rows]
    told = {"producer": "w", "number": number}
    runs = [(5, under, start, start + len(rows))]
    ack = event("acknowledged", **told, durability="memory", duplicate=False, runs=runs)
    return [event("sent", **told, rows=placed), ack]


def on_disk(number: int, start: int, end: int, under: int = A, duplicate: bool = False) -> Event:
    told = {"producer": "w", "number": number, "durability": "disk", "duplicate": duplicate}
    return event("acknowledged", **told, runs=[(5, under, start, end)])


def start(seqno: int, known: int | None, newest: int, high: int, **fields: Any) -> Event:
    usual = {"answer": "started", "purge": 0, "token": 1, "until": None}
    question = {"id": known, "seqno": seqno, "data_id": known, "newest": newest, "high": high}
    return reading("start", **{**usual, **question, **fields})


def run(first: int, end: int, *rows: tuple[int, bytes, bytes | None], horizon: int = 0) -> Event:
    place = {"start": first, "end": end, "horizon": horizon or end}
    return reading("run", token=1, rows=list(rows), **place)


def restart(before: list[Any], after: list[Any], high: int, high_after: int) -> Event:
    told = {"before": before, "after": after, "high": high, "durable": high_after}
    told |= {"high_after": high_after, "purge": 0}
    return event("restart", clean=False, partitions={5: told})


def position(kind: str, failover_id: int, seqno: int, markers: list[int]) -> Event:
    ids = {"id": failover_id, "data_id": failover_id}
    return reading(kind, **ids, seqno=seqno, horizon=seqno, markers=markers)


def of_consumer(kind: str, **fields: Any) -> Event:
    return event(kind, consumer="g", **fields)


def kept_in_the_server() -> History:
    """One member hands in seqno 2 and goes; the next is told so, and hands in 3."""
    first, second = "member 1 in call 1", "member 2 in call 2"
    return [
        of_consumer("granted", reader="m1", owner=first, partitions=[5], shared=True),
        {**position("handed_in", A, 1, []), "kept_as": "g", "save": 1, "reader": "m1"},
        of_consumer("accepted", owner=first, saves={5: 1}),
        of_consumer("kept", partition=5, save=1),
        of_consumer("saved", saves={5: 1}),
        of_consumer("granted", reader="m1", owner=first, partitions=[], shared=True),
        of_consumer("granted", reader="m2", owner=second, partitions=[5], shared=True),
        of_consumer("told", owner=second, saves={5: 1}),
        {**position("handed_in", A, 2, []), "kept_as": "g", "save": 2, "reader": "m2"},
        of_consumer("accepted", owner=second, saves={5: 2}),
        of_consumer("kept", partition=5, save=2),
        event("no_owner"),
        of_consumer("told", owner=second, saves={5: 2}),
        of_consumer("forgetting"),
        of_consumer("forgotten"),
        of_consumer("unkept", partition=5),
        of_consumer("told", owner=second, saves={5: None}),
    ]


def good() -> History:
    """Seqnos 1 to 4 under A, of which 1 to 3 are durable at the crash; 4 and 5 under B, 4 a tombstone."""
    return [
        event("opened", logs={5: [(A, 0)]}),
        *write(1, (b"x", b"1"), (b"y", b"1"), start=0),
        on_disk(1, 0, 2),
        reading("hello", id=None, answer="ok", seqno=None, newest=A),
        start(0, None, A, 2),
        event("frame", reader="r", window=100, outstanding=0, bytes=500),
        run(0, 2, (1, b"x", b"1"), (2, b"y", b"1")),
        reading("marker", seqno=2),
        position("stored", A, 2, [2]),
        position("loaded", A, 2, [2]),
        *write(2, (b"x", b"2"), start=2),
        on_disk(2, 2, 3),
        event("cut_made", name="c", pins={5: 3}),
        event(
            "cut_read", name="c", partition=5, outcome="FINISHED", state={b"x": b"2", b"y": b"1"}
        ),
        event("cut_released", name="c"),
        *write(3, (b"x", b"3"), start=3),
        event("tail", bytes=120, limit=100, largest=20),
        # The row at 3 is superseded at 4.
        run(2, 4, (4, b"x", b"3")),
        reading("marker", seqno=4),
        restart([(A, 0)], [(A, 0), (B, 3)], 4, 3),
        reading("hello", id=A, answer="rollback", seqno=3, newest=B),
        start(4, A, B, 3, answer="rollback", told=3),
        reading("rollback", told=3, newest=B, to=2),
        on_disk(2, 2, 3, duplicate=True),
        *write(3, (b"y", None), start=3, under=B),
        on_disk(3, 3, 4, under=B),
        *write(4, (b"x", b"4"), start=4, under=B),
        start(2, B, B, 5, until=5),
        run(2, 4, (3, b"x", b"2"), (4, b"y", None)),
        reading("marker", seqno=4),
        position("stored", B, 4, [2, 4]),
        event("purge", partition=5, seqno=4, age=100, young=10, held=1000),
        run(4, 5, (5, b"x", b"4")),
        reading("marker", seqno=5),
        reading("ended", token=1, reason="FINISHED"),
        event("settled", readers=["r"], high={5: 5}),
    ]


Change = Callable[[History], None]


def at(kind: str, number: int = 0, **changes: Any) -> Change:
    """Change fields of the ``number``-th event of a kind."""

    def change(history: History) -> None:
        [e for e in history if e["event"] == kind][number].update(changes)

    return change


def without(kind: str, number: int = 0) -> Change:
    """Leave an event out."""

    def change(history: History) -> None:
        found = [i for i, e in enumerate(history) if e["event"] == kind]
        del history[found[number]]

    return change


def after(kind: str, number: int, *new: Event) -> Change:
    """Add events behind one."""

    def change(history: History) -> None:
        found = [i for i, e in enumerate(history) if e["event"] == kind]
        history[found[number] + 1 : found[number] + 1] = copy.deepcopy(list(new))

    return change


def both(first: Change, second: Change) -> Change:
    def change(history: History) -> None:
        first(history)
        second(history)

    return change


def told_at_restart(**changes: Any) -> Change:
    def change(history: History) -> None:
        (one,) = [e for e in history if e["event"] == "restart"]
        one["partitions"][5].update(changes)

    return change


def log_of_26(history: History) -> None:
    """26 records before the restart, and none forgotten by it."""
    log = [(i, 0) for i in range(1, 26)]
    at("opened", 0, logs={5: log})(history)
    told_at_restart(before=log, after=[*log, (B, 3)])(history)


OF_OWNERS: list[tuple[str, Change]] = [
    ("saved by a former owner", at("accepted", 1, owner="member 1 in call 1")),
    ("stored when another owns it", after("granted", 2, of_consumer("kept", partition=5, save=1))),
    ("goes back", at("handed_in", 1, seqno=0)),
    ("answered, and not stored", without("kept", 0)),
    ("another place after a restart", at("told", 1, saves={5: 1})),
    ("gone after a restart", at("told", 1, saves={5: None})),
    ("forgotten, and there again", at("told", 2, saves={5: 2})),
]
BAD: list[tuple[str, str, Change]] = [
    ("identity", "another value", at("run", 0, rows=[(1, b"x", b"1"), (2, b"y", b"other")])),
    ("identity", "nobody wrote it", at("run", 3, rows=[(5, b"z", b"4")])),
    ("identity", "two writers told the same", at("acknowledged", 2, runs=[(5, A, 1, 2)])),
    ("order", "rows swapped", at("run", 0, rows=[(2, b"y", b"1"), (1, b"x", b"1")])),
    ("order", "a later write below", at("acknowledged", 2, runs=[(5, A, 0, 1)])),
    ("order", "an earlier write above", after("acknowledged", 4, on_disk(1, 7, 9))),
    ("marker_truth", "a row too few", at("run", 1, rows=[])),
    ("marker_truth", "taken below a horizon", at("run", 0, horizon=3)),
    ("marker_truth", "taken elsewhere", at("marker", 0, seqno=1)),
    ("no_hole", "a run twice", after("run", 3, run(4, 5, (5, b"x", b"4")))),
    ("no_hole", "a run left out", without("run", 2)),
    ("no_hole", "a row that nothing supersedes", at("run", 0, rows=[(1, b"x", b"1")])),
    ("no_hole", "a row below the start", at("run", 3, rows=[(4, b"y", None)])),
    ("durability", "it is gone", told_at_restart(high_after=2)),
    ("durability", "the branch was left below it", told_at_restart(after=[(A, 0), (B, 1)])),
    ("durability", "durable and gone", told_at_restart(durable=4)),
    ("rollback_honesty", "forgotten", at("start", 1, answer="started", told=None)),
    ("rollback_honesty", "told too much", at("start", 1, told=4)),
    ("rollback_honesty", "told for nothing", at("start", 2, answer="rollback", told=0)),
    ("rollback_honesty", "not done", without("rollback")),
    ("rollback_honesty", "not to a marker", at("rollback", 0, to=3)),
    ("rollback_honesty", "nothing undone", at("rollback", 0, to=4)),
    ("rollback_honesty", "further than needed", at("rollback", 0, to=0)),
    ("rollback_honesty", "Hello lies", at("hello", 1, answer="ok", seqno=None)),
    ("log_sanity", "no record", told_at_restart(after=[(A, 0)])),
    ("log_sanity", "two records", told_at_restart(after=[(A, 0), (7, 3), (B, 3)])),
    ("log_sanity", "at the high seqno", told_at_restart(after=[(A, 0), (B, 4)])),
    ("log_sanity", "an id again", told_at_restart(after=[(A, 0), (A, 3)])),
    ("log_sanity", "falling", told_at_restart(before=[(A, 5)], after=[(A, 5), (B, 3)])),
    ("log_sanity", "26 records", log_of_26),
    ("log_sanity", "a record after a clean end", at("restart", 0, clean=True)),
    ("convergence", "not at the end", without("run", 3)),
    ("convergence", "another state", at("run", 3, rows=[(5, b"x", b"5")])),
    ("bounded_memory", "tail", at("tail", 0, bytes=121)),
    ("bounded_memory", "credit", at("frame", 0, outstanding=2**20)),
    ("liveness", "stands still", both(without("ended"), at("settled", 0, high={5: 6}))),
    ("liveness", "ended without a reason", at("ended", 0, reason="")),
    ("liveness", "finished before its end", at("start", 2, until=6)),
    ("liveness", "a stream that is not open", at("run", 3, token=9)),
    ("positions", "between two seqnos that it got", at("stored", 0, seqno=1, horizon=0)),
    ("positions", "ahead of the data", at("stored", 0, seqno=4, horizon=4)),
    ("positions", "a new id with old data", at("stored", 0, id=B)),
    ("positions", "torn", at("loaded", 0, id=B)),
    ("positions", "a marker never taken", at("stored", 1, markers=[3])),
    ("tombstones", "risen from the dead", at("run", 2, rows=[(3, b"x", b"2")])),
    ("tombstones", "a value purged", at("purge", 0, seqno=3)),
    ("tombstones", "too young", at("purge", 0, age=9)),
    ("tombstones", "an open stream had not passed", without("run", 2)),
    ("cuts", "another state", at("cut_read", 0, state={})),
    ("cuts", "gone while held", at("cut_read", 0, outcome="SNAPSHOT_GONE")),
    ("cuts", "written later and below it", at("cut_made", 0, pins={5: 4})),
    ("cuts", "not one instant", at("cut_made", 0, pins={5: 2})),
    ("applied_once", "twice", at("acknowledged", 3, runs=[(5, A, 7, 8)])),
    ("applied_once", "a lost one called a duplicate", at("acknowledged", 6, duplicate=True)),
    ("applied_once", "told other seqnos", at("acknowledged", 5, runs=[(5, A, 1, 2)])),
    ("applied_once", "torn apart", told_at_restart(high_after=1)),
]


def test_the_good_history_is_accepted_by_each() -> None:
    validate(good())


def test_the_empty_history_is_accepted() -> None:
    validate([])


@pytest.mark.parametrize(("name", "what", "change"), BAD, ids=[f"{n}: {w}" for n, w, _ in BAD])
def test_a_bad_one_is_refused(name: str, what: str, change: Change) -> None:
    history = good()
    change(history)
    with pytest.raises(AssertionError):
        getattr(guarantees, name)(history)


@pytest.mark.parametrize("share", [[], [5]])
def test_a_stream_stands_still_only_in_the_share_of_its_member(share: list[int]) -> None:
    history = good()
    of_good = {"reader": "r", "owner": "r in call 1", "shared": True}
    history.insert(-1, of_consumer("granted", partitions=share, **of_good))
    both(without("ended"), at("settled", 0, high={5: 6}))(history)
    with pytest.raises(AssertionError, match="stands still") if share else nullcontext():
        guarantees.liveness(history)


def test_no_validator_is_without_a_bad_history() -> None:
    assert {name for name, _, _ in BAD} | {"ownership"} == {v.__name__ for v in VALIDATORS}


def test_a_good_history_of_owners_is_accepted() -> None:
    guarantees.ownership(kept_in_the_server())


@pytest.mark.parametrize(("what", "change"), OF_OWNERS, ids=[what for what, _ in OF_OWNERS])
def test_a_bad_history_of_owners_is_refused(what: str, change: Change) -> None:
    history = kept_in_the_server()
    change(history)
    with pytest.raises(AssertionError):
        guarantees.ownership(history)


def test_each_has_its_entry_in_the_document() -> None:
    text = README.read_text()
    for validator in VALIDATORS:
        name = validator.__name__.replace("_", " ").capitalize()
        assert f"- **{name}.**" in text, name
