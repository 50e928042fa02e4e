"""Expensive requests take turns, and what they cost is waited for."""

import asyncio
import itertools
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
import uvloop

from tests.harness import WAIT_SECONDS, until
from upr.service.overload.callers import ROUND_MESSAGES, LoopRounds, Turns

EVENTS = """
import asyncio, fcntl, sys, termios

import grpc
import uvloop

from upr.service.overload.process import take_events_at_once

CALLS = 1000
taken = []


async def echo(request, context):
    return request


async def main():
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def added(told, take):
        def unread():
            size = fcntl.ioctl(told, termios.FIONREAD, bytes(4))
            return int.from_bytes(size, sys.byteorder)

        def looked():
            before = unread()
            take()
            taken.append(before - unread())

        add_reader(told, looked)

    loop.add_reader = added
    take_events_at_once()
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"Echo": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/s/Echo")
        assert await asyncio.gather(*(ask(b"") for _ in range(CALLS))) == [b""] * CALLS
    await server.stop(None)
    print(max(taken))


uvloop.run(main())
"""
"""Many calls at once; it prints how many wakes of gRPC's thread a round of the loop took at most, or more."""


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


async def test_of_one_peer_so_many_messages_are_taken_in_a_round_in_their_order() -> None:
    rounds, taken = LoopRounds(), list[int]()

    async def take(number: int) -> None:
        await rounds.turn()
        taken.append(number)

    tasks = [asyncio.ensure_future(take(number)) for number in range(3 * ROUND_MESSAGES)]
    await asyncio.sleep(0)
    assert len(taken) == ROUND_MESSAGES
    # One that gives up takes nobody's place.
    given_up = tasks[ROUND_MESSAGES + 1]
    given_up.cancel()
    before = len(taken)
    while len(taken) < len(tasks) - 1:
        await asyncio.sleep(0)
        assert len(taken) - before <= ROUND_MESSAGES
        before = len(taken)
    assert taken == [number for number in range(len(tasks)) if number != ROUND_MESSAGES + 1]


async def test_messages_are_taken_on_after_a_moment_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, loop = LoopRounds(), asyncio.get_running_loop()
    tasks = [asyncio.ensure_future(rounds.turn()) for _ in range(2 * ROUND_MESSAGES)]
    rounds_begun = itertools.count(1)
    call_soon, told = loop.call_soon, list[Any]()

    def without_memory(call: Any, *arguments: Any, **options: Any) -> Any:
        if call == rounds._next and next(rounds_begun) == 2:
            raise MemoryError
        return call_soon(call, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon", without_memory)
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    await until(lambda: bool(told))
    assert isinstance(told[0], MemoryError)
    await rounds.turn()
    for _ in range(5):
        await asyncio.sleep(0)
    assert all(task.done() for task in tasks)


async def test_what_grpc_has_is_taken_as_soon_as_it_comes() -> None:
    """Its thread stood still behind some hundred wakes that the loop took one by one."""
    command = [sys.executable, "-c", EVENTS]
    ask = partial(subprocess.run, command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    told = await asyncio.to_thread(ask)
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) > 1


pytestmark = pytest.mark.asyncio
