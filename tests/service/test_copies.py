"""The Write call at ``replicated(k)``, in one process: what an answer waits for, and what ends the waiting."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.service.bucket_state import started
from tests.service.test_host import Script, opening, rows
from upr.service import key_value
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.key_value import KeyValueMethods
from upr.service.overload.intake import Intake
from upr.storage.journal import Commit
from upr_protocol.errors import StorageFailedError
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types

ONE = f"{1:016x}"
REPLICATED = types.DURABILITY_REPLICATED_1


@dataclass
class World:
    """A bucket with a counted replica, and Write calls."""

    host: BucketService
    methods: KeyValueMethods
    calls: list[asyncio.Task[None]]

    async def call(self) -> Any:
        context: Any = Script(opening(f"p{len(self.calls)}"))
        self.calls.append(asyncio.create_task(self.methods.Write(None, context)))
        assert (await context.said.get()).HasField("opened")
        return context

    def acknowledge(self, key: bytes) -> None:
        """The replica has the first row of a key's partition on its disk."""
        told = np.array([partition_of(key)], np.int64), np.array([1], np.uint64)
        self.host.bucket.acknowledged(ONE, *told)


async def answer(context: Any) -> kv.WriteResult:
    async with asyncio.timeout(WAIT_SECONDS):
        found: kv.WriteResult = (await context.said.get()).result
        return found


async def settled(world: World, numbered: int) -> None:
    """Wait until so many rows are durable, and all that follows from it has happened."""
    await until(lambda: sum(world.host.bucket.partitions.durable.tolist()) >= numbered)
    await pass_turns()


@pytest_asyncio.fixture
async def world(catalog: Catalog) -> AsyncIterator[World]:
    host = started(catalog.find("default"))
    host.bucket.copies.connected[ONE] += 1
    host.bucket.count(frozenset({ONE}), {ONE})
    world = World(host, KeyValueMethods(catalog, Intake()), [])
    yield world
    for call in world.calls:
        call.cancel()
    await asyncio.gather(*world.calls, return_exceptions=True)
    await host.close()


@pytest.mark.asyncio
async def test_a_write_is_answered_when_it_is_stable_and_another_does_not_wait_for_it(
    world: World,
) -> None:
    slow, fast, disk = [await world.call() for _ in range(3)]
    slow.send(1, rows(b"slow"), REPLICATED)
    fast.send(1, rows(b"fast"), REPLICATED)
    disk.send(1, rows(b"disk"))
    assert (await answer(disk)).runs
    await settled(world, 3)
    assert slow.said.empty()
    assert fast.said.empty()
    world.acknowledge(b"fast")
    assert (await answer(fast)).runs
    await pass_turns()
    assert slow.said.empty()
    # Durable here long before it is its turn.
    slow.send(2, rows(b"late"), REPLICATED)
    await settled(world, 4)
    world.acknowledge(b"slow")
    assert (await answer(slow)).number == 1
    await pass_turns()
    assert slow.said.empty()
    world.acknowledge(b"late")
    assert (await answer(slow)).number == 2


@pytest.mark.asyncio
async def test_what_is_not_acknowledged_in_time_is_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value, "REPLICATED_SECONDS", 0.05)
    call = await world.call()
    call.send(1, rows(b"k"), REPLICATED)
    told = await answer(call)
    assert (told.refused.reason, told.refused.retriable) == ("UNKNOWN_OUTCOME", True)
    assert "durable here and at 1 of the counted replicas within" in told.refused.message
    # Sent again it is told what became of it.
    world.acknowledge(b"k")
    call.send(1, rows(b"k"), REPLICATED, previous=1)
    again = await answer(call)
    assert again.duplicate
    assert not again.HasField("refused")


def held_journal(world: World, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the journal wait before each commit until the event is set."""
    journal, written = world.host.disk.journal, threading.Event()
    append = journal.append

    def append_late(commit: Commit) -> int:
        written.wait(WAIT_SECONDS)
        return append(commit)

    monkeypatch.setattr(journal, "append", append_late)
    monkeypatch.setattr(journal, "record_of", lambda _: None)
    return written


@pytest.mark.asyncio
async def test_what_is_not_durable_in_time_is_unknown_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value, "SLOW_SECONDS", 0.02)
    monkeypatch.setattr(key_value, "WRITE_OUTCOME_SECONDS", 0.05)
    written = held_journal(world, monkeypatch)
    call = await world.call()
    call.send(1, rows(b"k"))
    try:
        told = await asyncio.wait_for(answer(call), 10)
    finally:
        written.set()
    assert told.refused.reason == "UNKNOWN_OUTCOME"
    assert "was not durable within" in told.refused.message


@pytest.mark.asyncio
@pytest.mark.parametrize("why", ["late", "failed", "stepped down"])
async def test_what_no_commit_will_make_durable_is_told_at_once_of_all_writes(
    world: World, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(key_value, "SLOW_SECONDS", 0.02 if why == "late" else WAIT_SECONDS)
    if why == "late":
        monkeypatch.setattr(key_value, "WRITE_OUTCOME_SECONDS", 0.05)
    written = held_journal(world, monkeypatch)
    call = await world.call()
    for number in range(1, 9):
        call.send(number, rows(b"%d" % number), previous=number - 1)
    await until(lambda: int(world.host.bucket.partitions.high.sum()) == 8)
    try:
        await pass_turns()
        if why == "failed":
            world.host.fail(StorageFailedError("the disk is gone"))
        elif why == "stepped down":
            written.set()
            await world.host.step_down(fenced=True)
        if why == "late":
            monkeypatch.setattr(key_value, "SLOW_SECONDS", WAIT_SECONDS)
        told = [await answer(call) for _ in range(8)]
    finally:
        written.set()
    assert [one.refused.reason for one in told] == ["UNKNOWN_OUTCOME"] * 8


@pytest.mark.asyncio
async def test_a_server_that_stops_waits_for_no_replica(world: World) -> None:
    call = await world.call()
    call.send(1, rows(b"k"), REPLICATED)
    await settled(world, 1)
    world.methods.shut_down()
    told = await answer(call)
    assert told.refused.reason == "UNKNOWN_OUTCOME"
    assert "stopping" in told.refused.message


@pytest.mark.asyncio
async def test_a_request_for_a_flush_that_comes_when_the_time_is_up_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flusher, asked = world.host.flusher, asyncio.Queue[bool]()

    async def flush(*, wanted: bool) -> bool:
        asked.put_nowait(wanted)
        flusher._flush_seconds = 3600
        return True

    looks = itertools.count()

    def age() -> float:
        # Looked at before the wait, and again when its time is up.
        if next(looks) == 1:
            flusher.wanted.set()
        return 0.0

    monkeypatch.setattr(flusher, "flush", flush)
    monkeypatch.setattr(flusher, "_age", age)
    flusher._flush_seconds = 0.0
    task = asyncio.create_task(flusher.run())
    async with asyncio.timeout(WAIT_SECONDS):
        assert await asked.get()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_server_that_may_have_to_undo_flushes_nothing_for_age(world: World) -> None:
    bucket = world.host.bucket
    await world.host.write(rows(b"k"), b"", None, 0)
    await settled(world, 1)
    assert not bucket.may_undo
    await world.host.step_down(fenced=True)
    assert bucket.begin_flush(wanted=False) is None
    # Active again, until it is known who is counted.
    await world.host.activate(2, {})
    assert bucket.begin_flush(wanted=False) is None
    bucket.may_undo = False
    assert bucket.begin_flush(wanted=False) is not None
    bucket.end_flush(complete=False)


@pytest.mark.asyncio
async def test_nothing_is_answered_as_replicated_by_a_server_that_stepped_down(
    world: World,
) -> None:
    call = await world.call()
    call.send(1, rows(b"k"), REPLICATED)
    await settled(world, 1)
    await world.host.step_down(fenced=False)
    told = await answer(call)
    assert told.refused.reason == "UNKNOWN_OUTCOME"
    assert "stepped down" in told.refused.message
    assert "the server that is active" in told.refused.hint
    # What replicas acknowledge from now on is not told to it.
    world.host.bucket.count(frozenset({ONE}), {ONE})
    world.acknowledge(b"k")
    call.send(1, rows(b"k"), REPLICATED, previous=1)
    assert (await answer(call)).refused.reason == "PARTITION_NOT_ACTIVE"
