# ruff: noqa: SIM117
"""Storing positions while other things go on: one call of the store at a time, and none forgotten."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Literal

import numpy as np
import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import (
    ID_A,
    ID_B,
    VERSION,
    Expect,
    Hold,
    answers,
    frame,
    opened,
    rollback,
    run_block,
    started,
)
from tests.client.scripted import (
    Step as Said,
)
from upr_client import AsyncClient, Change, MemoryPositions, Only, Position, Tuning
from upr_client._async.io import run_blocking
from upr_client.changes.link import Clock
from upr_client.changes.options import ChangesOptions
from upr_client.changes.session import Following, Step
from upr_protocol.failover import FailoverLog
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

NO_HIGHS = np.zeros(1024, np.uint64)


class SlowStore(MemoryPositions):
    """Stores when it is let, and counts how many calls of it run at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let = threading.Event(), threading.Event()
        self.running = self.most = 0

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        return {}

    def save(self, positions: Mapping[int, Position]) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.entered.set()
        assert self.let.wait(10)
        super().save(positions)
        self.running -= 1


def two_rows() -> list[Said]:
    """A Follow call that is sent two rows of partition 1, and is held open."""
    return [
        Expect("open"),
        opened(),
        Expect("start"),
        answers(started(1, 7)),
        frame((7, run_block(1, 0, 2))),
        Hold(),
    ]


@pytest.mark.asyncio
async def test_a_save_waits_for_the_one_that_is_going_on() -> None:
    store = SlowStore()
    async with serve([two_rows()]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            resume=store, only=Only([1]), tuning=Tuning(save_seconds=3600)
        ) as changes:
            assert (await anext(changes)).seqno == 1
            assert (await anext(changes)).seqno == 2
            first = asyncio.create_task(changes.save())
            await asyncio.to_thread(store.entered.wait, 10)
            second = asyncio.create_task(changes.save())
            # What it was asked to store is stored only when the first one is done.
            done, _ = await asyncio.wait({second}, timeout=0.05)
            assert not done
            store.let.set()
            await asyncio.gather(first, second)
    assert store.most == 1


@pytest.mark.asyncio
async def test_it_connects_while_positions_are_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)

        class Loads(MemoryPositions):
            def load(self, partitions: Iterable[int]) -> dict[int, Position]:
                listening.accept()[0].close()
                return {}

        port = listening.getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            async with client.bucket().changes(resume=Loads()):
                pass


class OwnStore:
    """An application's: what it is given it joins, copies and writes as a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[int, Position] = {}
        self.text = ""

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        return dict(self.kept)

    def save(self, positions: Mapping[int, Position]) -> None:
        assert isinstance(positions, dict)
        self.text = json.dumps(positions, default=Position.to_json)
        self.kept = self.kept | positions
        # It is its own.
        positions.clear()


class OfOurs(MemoryPositions):
    """May look at what it is given as well."""

    def save(self, positions: Mapping[int, Position]) -> None:
        assert isinstance(positions, dict)
        super().save(positions.copy())


@pytest.mark.parametrize("acknowledge", ["auto", "manual"])
@pytest.mark.parametrize("make", [OwnStore, OfOurs])
@pytest.mark.asyncio
async def test_a_store_of_the_application_is_given_dictionaries(
    make: Callable[[], OwnStore | OfOurs], acknowledge: Literal["auto", "manual"]
) -> None:
    store = make()
    async with serve([two_rows()]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            resume=store, only=Only([1]), acknowledge=acknowledge
        ) as changes:
            for _ in range(2):
                change = await anext(changes)
                if acknowledge == "manual":
                    assert isinstance(change, Change)
                    changes.ack(change)
            await changes.save()
    assert store.load([1])[1].seqno > 0


@pytest.mark.asyncio
async def test_a_save_that_is_cancelled_is_over_when_the_waiting_is() -> None:
    entered, let, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert let.wait(10)
        done.set()

    task = asyncio.create_task(run_blocking(work))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    finished, _ = await asyncio.wait({task}, timeout=0.05)
    assert not finished
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


def following(*, stored: bool = True, save_seconds: float = 3600) -> Following:
    """Two partitions, each at 8 under ID_A, of which a Start was sent."""
    options = ChangesOptions(
        resume=MemoryPositions() if stored else None,
        only=Only([1, 2]),
        tuning=Tuning(save_seconds=save_seconds),
        on_rollback=lambda _: None,
    )
    clock = Clock(count(1).__next__, lambda: 1.0, lambda: 0.5)
    made = Following(options, say=lambda _: None, clock=clock)
    log = FailoverLog.from_pairs([(ID_A, 0)])
    made.load({p: Position(VERSION, ID_A, ID_A, 8, 8, (8,), log) for p in (1, 2)})
    made.opened(wire.Opened(bucket_version=VERSION))
    messages, _ = made.due()
    assert len(messages) == 1
    return made


def test_a_rollback_during_a_save_is_stored_before_the_start_too() -> None:
    made = following()
    made.take(answers(rollback(1, 8, ID_B, (ID_A, 0), (ID_B, 8))).message, NO_HIGHS)
    assert made.next_step(True) is Step.SAVE
    positions = made.begin_save()
    assert list(positions) == [1]
    # While these are being stored, another partition is told the same.
    made.take(answers(rollback(2, 8, ID_B, (ID_A, 0), (ID_B, 8))).message, NO_HIGHS)
    made.saved(positions)
    assert made.next_step(True) is Step.SAVE
    positions = made.begin_save()
    assert list(positions) == [2]
    # As long as it is not stored, nothing is started.
    assert made.next_step(True) is Step.SAVE
    made.saved(positions)
    assert made.next_step(True) is Step.RECEIVE


def test_what_could_not_be_stored_is_stored_before_the_start() -> None:
    made = following()
    made.take(answers(rollback(1, 8, ID_B, (ID_A, 0), (ID_B, 8))).message, NO_HIGHS)
    made.not_saved(made.begin_save())
    assert made.next_step(True) is Step.SAVE
    assert list(made.begin_save()) == [1]


def test_positions_that_nothing_stores_are_not_made() -> None:
    for stored, step, partitions in ((True, Step.SAVE, [1, 2]), (False, Step.RECEIVE, [])):
        made = following(stored=stored, save_seconds=0.1)
        made.session.mark_changed([1, 2])
        assert made.next_step(True) is step
        assert list(made.begin_save()) == partitions
