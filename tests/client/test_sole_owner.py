"""A sole owner whose positions are in the server, against a real one that is killed, restarted, and set back."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.harness import WAIT_SECONDS, RunningServer
from upr_client import AsyncClient, Change, Rollback, ServerPositions, Tuning

StartServer = Callable[..., RunningServer]
ROUNDS = 3
KEYS = [b"key %d" % i for i in range(40)]


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.asyncio
@pytest.mark.parametrize("reset", [False, True])
async def test_an_owner_goes_on_whatever_becomes_of_the_server(
    server_process: StartServer, reset: bool
) -> None:
    """It stores all the time, so that it is refused by a server that does not know it yet, or was just set back."""
    server = server_process()
    seen: dict[bytes, bytes | None] = {}
    moved = asyncio.Event()

    async def follow() -> None:
        async with (
            AsyncClient(server.target, connect_timeout=1.0) as client,
            client.bucket().changes(
                resume=ServerPositions("indexer"),
                tuning=Tuning(save_seconds=0),
                on_rollback="event",
            ) as changes,
        ):
            async for event in changes:
                if isinstance(event, Change):
                    seen[event.key] = event.value
                    moved.set()

    following = asyncio.create_task(follow())
    async with AsyncClient(server.target) as client, asyncio.timeout(250):
        bucket = client.bucket()
        for number in range(ROUNDS):
            value = b"%d" % number
            for key in KEYS:
                await bucket.set(key, value)
            if reset:
                # Everything comes again.
                seen.clear()
                await client.admin.reset_consumer(bucket, "indexer", "beginning")
            else:
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            while any(seen.get(key) != value for key in KEYS):
                moved.clear()
                waiting = asyncio.create_task(moved.wait())
                await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
        high = {
            p.partition: p.high_seqno for p in await client.admin.partitions(bucket) if p.high_seqno
        }
        stored: dict[int, int] = {}
        # Within the time limit above: what was handed out last is stored once it asks for more.
        while stored != high:
            (consumer,) = await client.admin.consumers(bucket, with_positions=True)
            stored = {p: at.seqno for p, at in consumer.positions.items() if at.seqno}
        following.cancel()
        await asyncio.wait({following})


@pytest.mark.asyncio
async def test_what_a_failover_undid_is_rolled_back_before_its_position_is_stored(
    server_process: StartServer,
) -> None:
    """The next server has less than the position, and takes none above its high seqno."""
    active = server_process()
    replica = server_process("--replicate-from", active.target)
    targets = [active.target, replica.target]
    undone: list[Rollback] = []
    async with AsyncClient(targets) as client, asyncio.timeout(WAIT_SECONDS):
        bucket = client.bucket()
        await bucket.set(b"key", b"kept", durability="replicated(1)")
        changes = bucket.changes(
            resume=ServerPositions("indexer"),
            on_rollback=undone.append,
            tuning=Tuning(save_seconds=0),
        )
        async with changes:
            os.kill(replica.pid, signal.SIGSTOP)
            for _ in range(4):
                await bucket.set(b"key", b"undone")
            while not isinstance(event := await anext(changes), Change) or event.seqno < 5:
                pass
            await asyncio.to_thread(active.kill)
            os.kill(replica.pid, signal.SIGCONT)
            async with AsyncClient(replica.target) as other:
                await other.admin.promote(force=True)
                high = (await other.admin.partitions("default", [event.partition]))[0].high_seqno
                assert high < event.seqno
                await other.bucket().set(b"key", b"new")
            while not isinstance(event := await anext(changes), Change) or event.value != b"new":
                pass
    assert [one.partition for one in undone] == [event.partition]
    assert undone[0].seqno <= high
