# ruff: noqa: SIM117
"""Acknowledging in any order, positions in the server, where a consumer begins: against a real server."""

import time
from collections.abc import Callable

import pytest

from tests.harness import RunningServer
from tests.service.keys import some_keys
from upr_client import (
    AsyncClient,
    Change,
    ChangeBatch,
    Marker,
    MemoryPositions,
    Only,
    ServerPositions,
    Tuning,
)
from upr_client.errors import FencedError, InvalidArgumentError
from upr_client.types import AsyncChanges

StartServer = Callable[..., RunningServer]
P = 9
KEYS = some_keys(P, 10)


async def changes_of(changes: AsyncChanges) -> list[Change]:
    """Iterate to the end."""
    return [event async for event in changes if isinstance(event, Change)]


async def first_change(changes: AsyncChanges) -> Change:
    async for event in changes:
        if isinstance(event, Change):
            return event
    raise AssertionError("there was none")


@pytest.mark.asyncio
async def test_ten_acknowledged_before_nine_and_nine_comes_again(
    target: str,
) -> None:
    positions = MemoryPositions()
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"value") for key in KEYS)
        async with bucket.changes(
            resume=positions, until="now", only=Only([P]), acknowledge="manual"
        ) as changes:
            events = await changes_of(changes)
            assert [change.seqno for change in events] == list(range(1, 11))
            for change in (*events[:8], events[9]):
                assert changes.ack(change)
            assert not changes.ack(events[9])
            assert changes.position(P).seqno == 8
            assert changes.status().unacknowledged == 1
        async with bucket.changes(
            resume=positions, until="now", only=Only([P]), acknowledge="manual"
        ) as changes:
            again = await changes_of(changes)
            assert [change.seqno for change in again] == [9, 10]
            for change in reversed(again):
                changes.ack(change)
        assert positions.load([P])[P].seqno == 10
        assert positions.load([P])[P].markers == (10,)


@pytest.mark.asyncio
async def test_whole_batches_are_acknowledged_in_any_order(target: str) -> None:
    positions = MemoryPositions()
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        for key in KEYS[:3]:
            await bucket.set(key, b"value")
        changes = bucket.changes(
            resume=positions,
            until="now",
            only=Only([P]),
            # Each block alone in its frame.
            tuning=Tuning(credit_bytes=1),
            acknowledge="manual",
        )
        async with changes:
            batches: list[ChangeBatch] = [batch async for batch in changes.batches()]
            assert [batch.rows for batch in batches] == [1, 1, 1]
            changes.ack_batch(batches[2])
            assert changes.position(P).seqno == 0
            changes.ack_batch(batches[0])
            assert changes.position(P).seqno == 1
            changes.ack_batch(batches[1])
            assert changes.position(P).seqno == 3


@pytest.mark.asyncio
async def test_acknowledging_by_hand_has_to_be_asked_for(target: str) -> None:
    async with AsyncClient(target) as client:
        async with client.bucket().changes(until="now", only=Only([P])) as changes:
            with pytest.raises(InvalidArgumentError, match="automatic"):
                changes.ack(Change(P, 1, "set", b"k", b"v"))


@pytest.mark.asyncio
async def test_positions_are_kept_in_the_server(server_process: StartServer) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"1") for key in KEYS)
        async with bucket.changes(
            resume=ServerPositions("indexer"), until="now", only=Only([P])
        ) as changes:
            assert len(await changes_of(changes)) == 10
        await bucket.set(KEYS[0], b"2")
    server.kill()
    server.start()
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        async with bucket.changes(
            resume=ServerPositions("indexer"), until="now", only=Only([P]), on_rollback="event"
        ) as changes:
            assert [change.seqno for change in await changes_of(changes)] == [11]
        await client.admin.reset_consumer(bucket, "indexer", "beginning")
        async with bucket.changes(
            resume=ServerPositions("indexer"), until="now", only=Only([P])
        ) as changes:
            assert {change.key for change in await changes_of(changes)} == set(KEYS)
            assert changes.position(P).seqno == 11


@pytest.mark.asyncio
async def test_a_former_owner_stores_nothing(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"1") for key in KEYS)
        former = bucket.changes(
            resume=ServerPositions("indexer"), only=Only([P]), acknowledge="manual"
        )
        async with former:
            events = [await first_change(former)]
            async with bucket.changes(
                resume=ServerPositions("indexer"), until="now", only=Only([P])
            ) as changes:
                assert len(await changes_of(changes)) == 10
            former.ack(events[0])
            with pytest.raises(FencedError, match="another owner"):
                await former.save()
            with pytest.raises(FencedError) as ended:
                await changes_of(former)
            assert ended.value.reason == "SUPERSEDED"
        (consumer,) = await client.admin.consumers(bucket, with_positions=True)
        assert consumer.positions[P].seqno == 10


@pytest.mark.asyncio
async def test_from_now_shows_what_is_written_later(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"old") for key in KEYS)
        positions = MemoryPositions()
        async with bucket.changes(
            resume=positions, until="now", only=Only([P]), start="now"
        ) as changes:
            assert await changes_of(changes) == []
        assert positions.load([P])[P].seqno == 10
        await bucket.set(KEYS[3], b"new")
        async with bucket.changes(
            resume=positions, until="now", only=Only([P]), start="now"
        ) as changes:
            assert await changes_of(changes) == [Change(P, 11, "set", KEYS[3], b"new")]


@pytest.mark.asyncio
async def test_from_a_time(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"old") for key in KEYS)
        # The server's clock may differ from this one by a hundredth of a second; upr/service/clock.py.
        between = time.time() + 0.05
        while time.time() < between + 0.05:
            pass
        await bucket.set(KEYS[3], b"new")
        async with bucket.changes(until="now", only=Only([P]), start=between) as changes:
            assert await changes_of(changes) == [Change(P, 11, "set", KEYS[3], b"new")]
        async with bucket.changes(until="now", only=Only([P]), start=1.0) as changes:
            assert len(await changes_of(changes)) == 11
        with pytest.raises(InvalidArgumentError, match="start"):
            bucket.changes(start=-1.0)


@pytest.mark.asyncio
async def test_only_keys_of_a_prefix(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many(
            (b"%s:%d" % (kind, i), b"v%d" % i) for i in range(500) for kind in (b"user", b"order")
        )
        markers = 0
        state = {}
        async with bucket.changes(until="now", only=Only(key_prefix=b"user:")) as changes:
            async for event in changes:
                if isinstance(event, Change):
                    state[event.key] = event.value
                markers += isinstance(event, Marker)
        assert state == {b"user:%d" % i: b"v%d" % i for i in range(500)}
        assert markers >= sum(info.high_seqno > 0 for info in await client.admin.partitions(bucket))


@pytest.mark.asyncio
async def test_the_status_tells_where_it_stands(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"1") for key in KEYS)
        async with bucket.changes(only=Only([P, P + 1])) as changes:
            before = changes.status()
            assert (before.connected, before.partitions, before.changes) == (False, 2, 0)
            assert before.last_progress is None
            await first_change(changes)
            status = changes.status()
            assert (status.connected, status.live, status.changes) == (True, 2, 10)
            assert status.lag == 10, "nothing of the batch was dealt with yet"
            assert status.lag_seconds > 0
            assert status.last_progress is not None
            assert status.changes_per_second == 1.0
            for _ in KEYS[1:]:
                await first_change(changes)
            assert not status.problems
            assert not status.rollbacks
