"""Checks of a position store, to be run against your own.

    from upr_client.testing.positions import check_position_store

    def test_my_store(tmp_path):
        check_position_store(lambda: MyStore(tmp_path / "positions"))

It needs no test framework: what is wrong is an AssertionError that says so in words.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from upr_client.positions import PositionStore, save_positions
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import (
    FAILOVER_ID_MAX,
    FAILOVER_LOG_MAX,
    MARKERS_MAX,
    NAME_BYTES_MAX,
    PARTITIONS,
    SEQNO_MAX,
)
from upr_protocol.position import Position
from upr_protocol.position_table import PositionTable

MakeStore = Callable[[], PositionStore]


def positions_to_keep() -> dict[str, Position]:
    """Positions at the ends of every field's range, by what is special about them."""
    longest = FailoverLog.from_pairs(
        (FAILOVER_ID_MAX - number, SEQNO_MAX - FAILOVER_LOG_MAX + number)
        for number in range(FAILOVER_LOG_MAX)
    )
    log = FailoverLog.born(7)
    markers = tuple(range(SEQNO_MAX - MARKERS_MAX + 1, SEQNO_MAX + 1))
    newest = longest.newest.failover_id
    return {
        "a fresh one": Position.fresh(),
        "one of everyday": Position(2**63 + 1, 9, 7, 100, 120, (10, 50, 90), log, "default"),
        "one of a bucket with a name of any letters": Position(1, 7, 7, 5, 5, (5,), log, '"ä€𝄞\\'),
        "the largest of everything": Position(
            2**64 - 1,
            newest,
            FAILOVER_ID_MAX,
            SEQNO_MAX,
            SEQNO_MAX,
            markers,
            longest,
            "b" * NAME_BYTES_MAX,
        ),
        "ids and seqnos that a float cannot hold": Position(
            2**53 + 1, 2**53 + 1, 2**63 + 3, 2**47 + 1, 2**47 + 3, (2**47 + 1,), None
        ),
        "one without ids": Position(1, None, None, 5, 5, (5,), None),
        "one whose horizon is not known": Position(1, 7, 7, 5, None, (), log),
        "one rolled back to 0": Position(1, 7, None, 0, 0, (), log),
    }


def check_position_store(
    make_store: MakeStore,
    *,
    make_other: MakeStore | None = None,
    failing: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    """Check that a store keeps positions as a consumer needs them.

    Args:
        make_store: gives a store on a place that is empty when this begins. Called again it gives the store
            as after a restart of the program, with what was stored; for a store that lives in memory, the
            same object. Positions are left in the place.
        make_other: gives the store of another consumer, whose positions are kept in the same place but apart;
            empty too. None: not checked.
        failing: gives a context in which every save, of stores made before or inside, fails half-way (the
            disk is full, say). None: not checked that a failed save stores nothing.

    Raises:
        AssertionError: the store does something else; in words.
    """
    _check_empty(make_store)
    _check_fields(make_store)
    _check_others_are_kept(make_store)
    _check_given_and_taken(make_store)
    _check_newer_and_older(make_store)
    _check_large(make_store)
    if make_other is not None:
        _check_apart(make_store, make_other)
    if failing is not None:
        _check_all_or_nothing(make_store, failing)


def _at(seqno: int) -> Position:
    return Position(3, 7, 7, seqno, seqno + 1, (seqno,) if seqno else (), FailoverLog.born(7))


def _save(store: PositionStore, positions: Mapping[int, Position]) -> None:
    """Save in the way of a consumer, which has its positions in a table."""
    save_positions(store, PositionTable.of(positions))


def _require(holds: bool, words: str) -> None:
    # Not an assert statement: those are left out under python -O.
    if not holds:
        raise AssertionError(f"position store: {words}")


def _compare(found: Mapping[int, Position], expected: Mapping[int, Position], when: str) -> None:
    missing = sorted(set(expected) - set(found))
    _require(not missing, f"{when}: load does not return partitions {missing[:10]}")
    more = sorted(set(found) - set(expected))
    _require(not more, f"{when}: load returns partitions {more[:10]}, which it should not")
    for partition, wanted in expected.items():
        got = found[partition]
        _require(
            isinstance(got, Position),
            f"{when}: load returns {type(got).__name__} for partition {partition}, not a Position",
        )
        for field in fields(Position):
            value, other = getattr(wanted, field.name), getattr(got, field.name)
            _require(
                value == other and type(value) is type(other),
                f"{when}: {field.name} of partition {partition} was saved as {value!r} and loaded as {other!r}",
            )


def _expect(
    make_store: MakeStore, asked: Iterable[int], expected: Mapping[int, Position], when: str
) -> None:
    _compare(make_store().load(asked), expected, when)


def _check_empty(make_store: MakeStore) -> None:
    _expect(make_store, range(PARTITIONS), {}, "nothing was saved yet")
    _expect(make_store, [], {}, "nothing was saved and nothing asked for")
    _save(make_store(), {})
    _expect(make_store, range(PARTITIONS), {}, "no position was saved")


def _check_fields(make_store: MakeStore) -> None:
    for name, position in positions_to_keep().items():
        for partition in (0, PARTITIONS - 1):
            store = make_store()
            store.load([partition])
            _save(store, {partition: position})
            expected = {partition: position}
            _compare(store.load([partition]), expected, f"{name}, in the same object")
            _expect(make_store, [partition], expected, f"{name}, after a restart")


def _check_others_are_kept(make_store: MakeStore) -> None:
    _save(make_store(), {1: _at(1), 2: _at(2), 3: _at(3)})
    store = make_store()
    # As a consumer of some of the partitions does.
    store.load([2])
    _save(store, {2: _at(20)})
    after = {1: _at(1), 2: _at(20), 3: _at(3)}
    _expect(make_store, [1, 2, 3], after, "one of three partitions was saved again")
    _save(make_store(), {4: _at(4)})
    after[4] = _at(4)
    _expect(make_store, [1, 2, 3, 4], after, "a fourth was saved without loading first")
    _expect(make_store, [3], {3: _at(3)}, "one of four is asked for")
    _expect(make_store, [3, 500], {3: _at(3)}, "one that was saved and one that was not")
    _expect(make_store, iter([4, 1]), {1: _at(1), 4: _at(4)}, "partitions come from an iterator")
    _expect(make_store, [], {}, "nothing is asked for")


def _check_given_and_taken(make_store: MakeStore) -> None:
    store = make_store()
    given = {10: _at(1), 11: _at(1)}
    store.save(given)
    given[10] = _at(99)
    del given[11]
    expected = {10: _at(1), 11: _at(1)}
    _compare(store.load([10, 11]), expected, "the mapping given to save was changed afterwards")
    taken = store.load([10, 11])
    if isinstance(taken, dict):
        taken.clear()
    _compare(store.load([10, 11]), expected, "what load returned was changed afterwards")


def _check_newer_and_older(make_store: MakeStore) -> None:
    store = make_store()
    store.load([20])
    # A rollback stores a lower seqno, and that one counts.
    for seqno in (5, 6, 1_000_000, 2, 0, 2**40, 7):
        _save(store, {20: _at(seqno)})
        _compare(store.load([20]), {20: _at(seqno)}, f"saved again, now at seqno {seqno}")
        _expect(make_store, [20], {20: _at(seqno)}, f"at seqno {seqno}, after a restart")
        store = make_store()
        store.load([20])


def _check_large(make_store: MakeStore) -> None:
    largest = positions_to_keep()["the largest of everything"]
    store = make_store()
    store.load(range(PARTITIONS))
    _save(store, dict.fromkeys(range(PARTITIONS), largest))
    _expect(
        make_store,
        range(PARTITIONS),
        dict.fromkeys(range(PARTITIONS), largest),
        f"all {PARTITIONS} partitions with the largest positions",
    )
    small = {partition: _at(partition) for partition in range(PARTITIONS)}
    _save(store, small)
    _expect(make_store, range(PARTITIONS), small, "all of them smaller again")


def _check_apart(make_store: MakeStore, make_other: MakeStore) -> None:
    store, other = make_store(), make_other()
    _compare(other.load(range(PARTITIONS)), {}, "another consumer saved nothing yet")
    _save(store, {30: _at(1), 31: _at(1)})
    _save(other, {30: _at(2)})
    _expect(make_store, [30, 31], {30: _at(1), 31: _at(1)}, "another consumer saved as well")
    _expect(make_other, range(PARTITIONS), {30: _at(2)}, "two consumers saved")


def _check_all_or_nothing(
    make_store: MakeStore, failing: Callable[[], AbstractContextManager[Any]]
) -> None:
    before = {partition: _at(1) for partition in range(PARTITIONS)}
    _save(make_store(), before)
    store = make_store()
    store.load(range(PARTITIONS))
    with failing():
        try:
            _save(store, {partition: _at(2) for partition in range(PARTITIONS)})
        except Exception:
            pass
        else:
            raise AssertionError("position store: a save that fails half-way raises nothing")
    _expect(make_store, range(PARTITIONS), before, "a save failed half-way")
    after = {**before, 5: _at(3)}
    _save(store, {5: _at(3)})
    _expect(make_store, range(PARTITIONS), after, "a save succeeded after one that failed")
