"""Histories that the simulation recorded, with one thing changed: the fitting validator refuses each."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import guarantees
from tests.guarantees import VALIDATORS
from tests.history import Event, History
from tests.simulation.cutting import CutWorld
from tests.simulation.grouped import GroupWorld
from tests.simulation.networked import NetworkedWorld
from tests.simulation.world import World

SEED = 9
PICKS = 8
Changed = Iterator[tuple[int, list[Event]]]
"""A place in the history, and what to put there instead."""
Change = Callable[[History], Changed]
_recorded: dict[str, History] = {}


@pytest.fixture
def history(tmp_path: Path) -> History:
    if "plain" not in _recorded:
        world = World(tmp_path, SEED)
        world.run(400)
        _recorded["plain"] = world.recorder.history
    return list(_recorded["plain"])


@pytest.fixture
def with_cuts(tmp_path: Path) -> History:
    if "cuts" not in _recorded:
        world = CutWorld(tmp_path, SEED)
        world.run(600)
        _recorded["cuts"] = world.recorder.history
    return list(_recorded["cuts"])


@pytest.fixture
def over_a_network(tmp_path: Path) -> History:
    if "network" not in _recorded:
        world = NetworkedWorld(tmp_path, SEED)
        world.run(400)
        _recorded["network"] = world.recorder.history
    return list(_recorded["network"])


@pytest.fixture
def of_groups(tmp_path: Path) -> History:
    if "groups" not in _recorded:
        world = GroupWorld(tmp_path, SEED)
        world.run(400)
        _recorded["groups"] = world.recorder.history
    return list(_recorded["groups"])


def of(history: History, kind: str) -> Iterator[tuple[int, Event]]:
    return ((i, event) for i, event in enumerate(history) if event["event"] == kind)


def drop_a_row(history: History) -> Changed:
    for i, run in of(history, "run"):
        last = {key: seqno for seqno, key, _ in run["rows"]}
        for at, (seqno, key, value) in enumerate(run["rows"]):
            # Of a run that ends in a marker, so that nothing above it excuses the row.
            if run["horizon"] == run["end"] and last[key] == seqno and value is not None:
                yield i, [{**run, "rows": run["rows"][:at] + run["rows"][at + 1 :]}]


def change_a_value(history: History) -> Changed:
    for i, run in of(history, "run"):
        for at, (seqno, key, _) in enumerate(run["rows"]):
            rows = list(run["rows"])
            rows[at] = (seqno, key, b"another")
            yield i, [{**run, "rows": rows}]


def swap_two_rows(history: History) -> Changed:
    for i, run in of(history, "run"):
        if len(run["rows"]) > 1:
            yield i, [{**run, "rows": [run["rows"][1], run["rows"][0], *run["rows"][2:]]}]


def duplicate_a_run(history: History) -> Changed:
    for i, run in of(history, "run"):
        yield i, [run, run]


def leave_a_run_out(history: History) -> Changed:
    followed = {
        (e["reader"], e["partition"], e["token"], e["start"]) for _, e in of(history, "run")
    }
    for i, run in of(history, "run"):
        if (run["reader"], run["partition"], run["token"], run["end"]) in followed:
            yield i, []


def move_a_marker(history: History) -> Changed:
    for i, marker in of(history, "marker"):
        yield i, [{**marker, "seqno": marker["seqno"] - 1}]


def take_a_marker_below_a_horizon(history: History) -> Changed:
    for i, run in of(history, "run"):
        marker = {"event": "marker", "reader": run["reader"], "partition": run["partition"]}
        yield i, [{**run, "horizon": run["horizon"] + 1}, {**marker, "seqno": run["end"]}]


def forget_a_rollback(history: History) -> Changed:
    for i, start in of(history, "start"):
        if start["answer"] == "rollback":
            told = {"answer": "started", "token": 1, "until": None, "told": None}
            yield i, [{**start, **told}]


def do_no_rollback(history: History) -> Changed:
    kinds = ("start", "anew", "loaded")
    for i, rollback in of(history, "rollback"):
        place = rollback["reader"], rollback["partition"]
        then = (
            e["event"]
            for e in history[i:]
            if e["event"] in kinds and (e["reader"], e["partition"]) == place
        )
        # One that forgets everything has undone it as well.
        if next(then, "start") == "start":
            yield i, []


def undo_less(history: History) -> Changed:
    for i, rollback in of(history, "rollback"):
        yield i, [{**rollback, "to": rollback["to"] + 1}]


def lose_what_was_durable(history: History) -> Changed:
    for i, restart in of(history, "restart"):
        for p, told in restart["partitions"].items():
            if told["durable"] == told["high_after"] > 0:
                less = {**told, "high_after": told["high_after"] - 1}
                yield i, [{**restart, "partitions": {**restart["partitions"], p: less}}]


def drop_a_record(history: History) -> Changed:
    for i, restart in of(history, "restart"):
        for p, told in restart["partitions"].items():
            if told["after"] != told["before"]:
                without = {**told, "after": told["before"]}
                yield i, [{**restart, "partitions": {**restart["partitions"], p: without}}]


def add_a_record(history: History) -> Changed:
    for i, restart in of(history, "restart"):
        for p, told in restart["partitions"].items():
            more = {**told, "after": [*told["after"], (99, told["high_after"])]}
            yield i, [{**restart, "partitions": {**restart["partitions"], p: more}}]


def end_elsewhere(history: History) -> Changed:
    for i, settled in of(history, "settled"):
        for p, high in settled["high"].items():
            yield i, [{**settled, "high": {**settled["high"], p: high - 1}}]


def send_beyond_the_credit(history: History) -> Changed:
    for i, frame in of(history, "frame"):
        yield i, [{**frame, "outstanding": frame["window"]}]


def send_for_another_token(history: History) -> Changed:
    for i, run in of(history, "run"):
        yield i, [{**run, "token": run["token"] + 1}]


def end_without_a_reason(history: History) -> Changed:
    for i, ended in of(history, "ended"):
        yield i, [{**ended, "reason": ""}]


def store_another_id(history: History) -> Changed:
    for i, stored in of(history, "stored"):
        if stored["seqno"]:
            yield i, [{**stored, "id": 99}]


def load_something_else(history: History) -> Changed:
    for i, loaded in of(history, "loaded"):
        yield i, [{**loaded, "seqno": loaded["seqno"] + 1}]


def purge_what_is_young(history: History) -> Changed:
    for i, purge in of(history, "purge"):
        yield i, [{**purge, "age": purge["young"] - 1}]


def drop_a_delete(history: History) -> Changed:
    """One that ended the life of a key, and the run ends in a marker."""
    alive: dict[tuple[str, int], set[bytes]] = {}
    for i, event in enumerate(history):
        place = event.get("reader", ""), event.get("partition", -1)
        if event["event"] in ("anew", "rollback", "loaded"):
            alive[place] = set()
        if event["event"] != "run":
            continue
        keys = alive.setdefault(place, set())
        marked = i + 1 < len(history) and history[i + 1]["event"] == "marker"
        for at, (_, key, value) in enumerate(event["rows"]):
            rows = event["rows"][:at] + event["rows"][at + 1 :]
            if marked and value is None and key in keys and all(row[1] != key for row in rows):
                yield i, [{**event, "rows": rows}]
            (keys.discard if value is None else keys.add)(key)


def call_a_first_write_a_repetition(history: History) -> Changed:
    seen: set[int] = set()
    for i, ack in of(history, "acknowledged"):
        if ack["number"] not in seen:
            yield i, [{**ack, "duplicate": True}]
        seen.add(ack["number"])


def apply_a_repetition(history: History) -> Changed:
    for i, ack in of(history, "acknowledged"):
        if ack["durability"] == "disk" and not ack["duplicate"]:
            higher = [(p, one, start + 1, end + 1) for p, one, start, end in ack["runs"]]
            yield i, [{**ack, "runs": higher}]


def serve_another_cut(history: History) -> Changed:
    for i, read in of(history, "cut_read"):
        if read["outcome"] == "FINISHED":
            yield i, [{**read, "state": {**read["state"], b"more": b"1"}}]


def lose_a_cut_that_is_held(history: History) -> Changed:
    held: set[str] = set()
    for i, event in enumerate(history):
        if event["event"] == "cut_made":
            held.add(event["name"])
        elif event["event"] == "cut_released":
            held.discard(event["name"])
        elif event["event"] == "cut_read" and event["name"] in held:
            yield i, [{**event, "outcome": "SNAPSHOT_GONE"}]


def save_as_another(history: History) -> Changed:
    for i, accepted in of(history, "accepted"):
        if accepted["saves"]:
            yield i, [{**accepted, "owner": "another"}]


def lose_what_is_kept(history: History) -> Changed:
    for i, told in of(history, "told"):
        if any(told["saves"].values()):
            yield i, [{**told, "saves": dict.fromkeys(told["saves"])}]


def hand_in_too_much(history: History) -> Changed:
    for i, handed in of(history, "handed_in"):
        yield i, [{**handed, "seqno": handed["seqno"] + 1, "horizon": handed["horizon"] + 1}]


def start_before_it_is_stored(history: History) -> Changed:
    """The position after a rollback is stored, and a Start was sent before."""
    went_back: set[tuple[str, int]] = set()
    for i, event in enumerate(history):
        place = event.get("reader", ""), event.get("partition", -1)
        if event["event"] == "rollback":
            went_back.add(place)
        elif event["event"] in ("anew", "loaded"):
            went_back.discard(place)
        elif event["event"] == "stored" and place in went_back:
            went_back.discard(place)
            kinds = ("start", "stored", "anew", "loaded")
            then = (
                e["event"]
                for e in history[i + 1 :]
                if e["event"] in kinds and (e["reader"], e["partition"]) == place
            )
            if next(then, "") == "start":
                yield i, []


def forget_the_horizon_of_a_part(history: History) -> Changed:
    for i, stored in of(history, "stored"):
        if stored["horizon"] > stored["seqno"]:
            yield i, [{**stored, "horizon": stored["seqno"]}]


def keep_another_state(history: History) -> Changed:
    for i, marker in of(history, "marker"):
        if "state" in marker:
            yield i, [{**marker, "state": {**marker["state"], b"more": b"1"}}]


CHANGES: list[tuple[str, Change]] = [
    ("no_hole", drop_a_row),
    ("identity", change_a_value),
    ("order", swap_two_rows),
    ("no_hole", duplicate_a_run),
    ("no_hole", leave_a_run_out),
    ("marker_truth", move_a_marker),
    ("marker_truth", take_a_marker_below_a_horizon),
    ("rollback_honesty", forget_a_rollback),
    ("rollback_honesty", do_no_rollback),
    ("rollback_honesty", undo_less),
    ("durability", lose_what_was_durable),
    ("log_sanity", drop_a_record),
    ("log_sanity", add_a_record),
    ("convergence", end_elsewhere),
    ("bounded_memory", send_beyond_the_credit),
    ("liveness", send_for_another_token),
    ("liveness", end_without_a_reason),
    ("positions", store_another_id),
    ("positions", load_something_else),
    ("tombstones", purge_what_is_young),
    ("tombstones", drop_a_delete),
    ("applied_once", call_a_first_write_a_repetition),
    ("applied_once", apply_a_repetition),
]
OVER_A_NETWORK: list[tuple[str, Change]] = [
    ("positions", start_before_it_is_stored),
    ("positions", forget_the_horizon_of_a_part),
    ("marker_truth", keep_another_state),
    ("no_hole", drop_a_row),
    ("liveness", send_for_another_token),
]
OF_GROUPS: list[tuple[str, Change]] = [
    ("ownership", save_as_another),
    ("ownership", lose_what_is_kept),
    ("positions", hand_in_too_much),
]
OF_CUTS: list[tuple[str, Change]] = [
    ("cuts", serve_another_cut),
    ("cuts", lose_a_cut_that_is_held),
]


def check_refused(history: History, name: str, change: Change) -> None:
    validator = getattr(guarantees, name)
    validator(history)
    places = list(change(history))
    assert places, "nothing to change was recorded"
    for at, instead in random.Random(SEED).sample(places, min(PICKS, len(places))):
        changed = [*history[:at], *instead, *history[at + 1 :]]
        with pytest.raises(AssertionError):
            validator(changed)


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=lambda one: getattr(one, "__name__", one))
def test_a_changed_history_is_refused(history: History, name: str, change: Change) -> None:
    check_refused(history, name, change)


@pytest.mark.parametrize(("name", "change"), OF_CUTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_changed_history_of_cuts_is_refused(
    with_cuts: History, name: str, change: Change
) -> None:
    check_refused(with_cuts, name, change)


@pytest.mark.parametrize(
    ("name", "change"), OF_GROUPS, ids=lambda one: getattr(one, "__name__", one)
)
def test_a_changed_history_of_groups_is_refused(
    of_groups: History, name: str, change: Change
) -> None:
    check_refused(of_groups, name, change)


@pytest.mark.parametrize(
    ("name", "change"), OVER_A_NETWORK, ids=lambda one: getattr(one, "__name__", one)
)
def test_a_changed_history_of_a_network_is_refused(
    over_a_network: History, name: str, change: Change
) -> None:
    check_refused(over_a_network, name, change)


def test_a_row_of_which_no_writer_was_told_is_refused(history: History) -> None:
    tried = 0
    for i, ack in of(history, "acknowledged"):
        given = {
            (p, seqno) for p, _, start, end in ack["runs"] for seqno in range(start + 1, end + 1)
        }
        # It is durable, so that whoever gets something at these seqnos from here on gets this.
        later = {(e["partition"], row[0]) for _, e in of(history[i:], "run") for row in e["rows"]}
        if ack["durability"] == "disk" and not ack["duplicate"] and given & later and tried < PICKS:
            tried += 1
            told = [
                e for e in history if e["event"] != "acknowledged" or e["number"] != ack["number"]
            ]
            with pytest.raises(AssertionError, match="nobody wrote"):
                guarantees.identity(told)
    assert tried == PICKS


def test_every_validator_has_its_change() -> None:
    assert {name for name, _ in [*CHANGES, *OF_CUTS, *OF_GROUPS]} == {
        v.__name__ for v in VALIDATORS
    }
