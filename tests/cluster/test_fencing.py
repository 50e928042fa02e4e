"""An owner relies on the grants of those who are surely counted, and a promise waits for all that was granted."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from upr.replica import fencing
from upr.replica.fencing import Fencing
from upr_protocol.errors import UnavailableError
from upr_protocol.limits import PARTITIONS
from upr_protocol.ownership import (
    GRANT_SECONDS,
    GRANTED_SECONDS,
    HELD,
    Row,
    Standing,
)

A, B, C = "a" * 16, "b" * 16, "c" * 16
OWN = Row(4, 2, A, True, frozenset({B, C}))
LESS = Row(4, 3, A, True, frozenset({B}))


class Answers:
    """Rows of which the outcome of each change is given before."""

    dropped: tuple[int, ...] = ()

    def __init__(self, *outcomes: bool | UnavailableError) -> None:
        self.outcomes = [*outcomes]

    async def read(self) -> Row:
        return OWN

    async def swap(self, old: Row, new: Row) -> bool:
        outcome = self.outcomes.pop(0)
        await asyncio.sleep(0)
        if isinstance(outcome, UnavailableError):
            raise outcome
        return outcome


class Clock:
    """The boot-time clock of a server."""

    now = 100.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fencing, "boot_seconds", lambda: clock.now)
    return clock


def started(standing: Standing, rows: Answers, peers: Any, *hosts: Any) -> Fencing:
    catalog: Any = SimpleNamespace(
        directory_id=A,
        standing=SimpleNamespace(standing=standing),
        hosts=list(hosts),
        replica=False,
    )
    return Fencing(rows, catalog, peers)


def owner(rows: Answers) -> Fencing:
    """Return one that owns, and was granted by C only."""
    one = started(Standing(A, OWN, 4, A), rows, SimpleNamespace())
    one.begin(OWN, resumed=False)
    one.grants.given(C, 4, 100.0)
    assert one.may_serve()
    return one


@pytest.mark.asyncio
async def test_a_claim_on_top_of_a_change_does_not_say_that_it_was_not_made() -> None:
    one = owner(Answers(UnavailableError("lost"), False, False))
    for _ in range(3):
        with pytest.raises(UnavailableError):
            await one.next_row(OWN, lambda: LESS)
        assert not one.may_serve()


@pytest.mark.asyncio
async def test_a_change_that_is_not_stored_here_is_made_again_before_another_one() -> None:
    one = owner(Answers(True, True))
    assert await one.next_row(OWN, lambda: LESS) == LESS
    assert await one.next_row(OWN, lambda: OWN) == LESS
    assert not one.may_serve()


@pytest.mark.asyncio
async def test_a_change_that_ends_in_another_epoch_says_nothing_of_that() -> None:
    one = owner(Answers(True))
    ending = asyncio.create_task(one.next_row(OWN, lambda: LESS))
    await asyncio.sleep(0)
    one.begin(Row(6, 1, A, True, frozenset({C})), resumed=False)
    with contextlib.suppress(UnavailableError):
        await ending
    assert one.grants.counted == (frozenset({C}),)


@pytest.mark.asyncio
async def test_no_grant_is_given_while_any_promise_is_about_to_be() -> None:
    one = owner(Answers())
    async with one.freed(5, released=True):
        async with one.freed(6, released=True):
            pass
        assert not one.give(4, A)
    assert one.give(4, A)


def test_a_server_that_may_have_forgotten_a_grant_promises_nothing_for_its_time() -> None:
    """It has not been asked for one since, either."""
    one = started(Standing(A, OWN, 4, B), Answers(), SimpleNamespace())
    assert one.grants.left(100.0) == GRANT_SECONDS
    assert one.unasked_seconds == 0
    # One that knows of no owner was never counted.
    new = started(Standing(A, Row(0, 0, "", False, frozenset())), Answers(), SimpleNamespace())
    assert new.grants.left(100.0) <= 0


@pytest.mark.asyncio
async def test_a_grant_counts_from_when_it_was_asked_for(clock: Clock) -> None:
    async def ask_grant(directory: str, epoch: int) -> bool:
        clock.now += 1.0
        return True

    one = started(Standing(A, OWN, 4, A), Answers(), SimpleNamespace(ask_grant=ask_grant))
    one.begin(OWN, resumed=False)
    await one._ask(B)
    assert one.granted_seconds(B) == GRANTED_SECONDS - 1.0


@pytest.mark.parametrize(
    ("begun_at", "id_there", "counted"), [(5, 9, {B}), (6, 9, {A, B}), (5, 8, {A, B})]
)
def test_who_lacks_what_the_owner_began_with_is_not_counted_alone(
    clock: Clock, begun_at: int, id_there: int, counted: set[str]
) -> None:
    """Nothing of it was acknowledged in this epoch: the owner was restarted, and C is silent since.

    Rows of another history are none of the owner's.
    """
    held = np.zeros(PARTITIONS, HELD)
    held["marker"], held["id"] = 5, id_there
    copies = SimpleNamespace(stable=lambda k: np.zeros(PARTITIONS, np.uint64))
    host = SimpleNamespace(
        bucket=SimpleNamespace(
            identity=SimpleNamespace(version=7),
            copies=copies,
            partitions=SimpleNamespace(newest_id=np.full(PARTITIONS, 9, np.uint64)),
        )
    )
    peers = SimpleNamespace(met={B: SimpleNamespace(held={7: held})})
    one = started(Standing(A, OWN, 4, A), Answers(), peers, host)
    one.begin(OWN, resumed=False)
    assert one.silent(OWN) == set()
    clock.now += fencing.SILENT_SECONDS + 0.1
    one._seen[B] = clock.now
    floor = {7: np.full(PARTITIONS, begun_at, np.uint64)}
    assert one.shrunk(OWN, floor).counted == counted
