"""A sole owner whose positions are in the server, against a real one that is killed, restarted, and set back."""

import asyncio
from collections.abc import Callable

import pytest

from tests.harness import RunningServer
from upr_client import AsyncClient, Change, ServerPositions, Tuning

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
