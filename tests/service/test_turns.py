"""Expensive requests take turns, and what they cost is waited for."""

import asyncio
import time

import pytest
import uvloop

from upr.service.overload.callers import Turns


async def test_who_comes_after_a_charge_waits_for_as_long() -> None:
    turns = Turns()
    await turns.turn()
    turns.charge(0.05)
    began = time.monotonic()
    await turns.turn()
    assert time.monotonic() - began >= 0.045


async def test_nobody_waits_for_a_first_turn() -> None:
    turns = Turns()
    task = asyncio.ensure_future(turns.turn())
    await asyncio.sleep(0)
    assert task.done()


async def test_turns_come_in_the_order_of_asking() -> None:
    turns = Turns()
    came: list[int] = []

    async def take(number: int) -> None:
        await turns.turn()
        came.append(number)
        turns.charge(0.002)

    await asyncio.gather(*map(take, range(10)))
    assert came == list(range(10))


async def test_one_that_gives_up_holds_up_nobody() -> None:
    turns = Turns()
    turns.charge(0.05)
    first = asyncio.ensure_future(turns.turn())
    second = asyncio.ensure_future(turns.turn())
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(20):
        await second


async def test_a_short_wait_for_a_turn_does_not_keep_the_loop_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, sleep = 0, asyncio.sleep

    async def counted(seconds: float) -> None:
        nonlocal waits
        waits += 1
        await sleep(seconds)

    async def take() -> None:
        turns = Turns()
        for _ in range(20):
            turns.charge(0.0004)
            await turns.turn()

    monkeypatch.setattr(asyncio, "sleep", counted)
    # In a thread, because this test has a loop.
    await asyncio.to_thread(uvloop.run, take())
    assert waits <= 2 * 20


pytestmark = pytest.mark.asyncio
