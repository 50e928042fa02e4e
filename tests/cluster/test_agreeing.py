"""An owner relies on the grants of those who are surely counted, and a promise waits for all that was granted."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from upr.replica import agreeing
from upr.replica.agreeing import Agreeing
from upr_protocol.errors import UnavailableError
from upr_protocol.ownership import Row, Standing

A, B, C = "a" * 16, "b" * 16, "c" * 16
OWN = Row(4, 2, A, True, frozenset({B, C}))
LESS = Row(4, 3, A, True, frozenset({B}))


class Answers:
    """Rows of which the outcome of each change is given before."""

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


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "boot_seconds", lambda: 100.0)


def owner(rows: Answers) -> Agreeing:
    """Return one that owns, and was granted by C only."""
    catalog: Any = SimpleNamespace(
        directory_id=A, standing=SimpleNamespace(standing=Standing(A, OWN, 4, A))
    )
    one = Agreeing(rows, catalog, SimpleNamespace())  # type: ignore[arg-type]
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
