"""SIGKILL of an upstream and of its replicas under load: all of them, and who reads them, come to be the same."""

import asyncio
import contextlib
import random

import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer, poll
from tests.service.test_replicas import in_sync, rows, shown
from upr_client import AsyncClient
from upr_protocol.errors import UprError

pytestmark = [pytest.mark.crash, pytest.mark.long]

KEYS = 300


async def load(target: str, rng: random.Random, until: asyncio.Event) -> int:
    """Write and delete keys at both durabilities until told to stop; returns how many writes were acknowledged."""
    done = 0
    async with AsyncClient(target) as client:
        bucket = client.bucket("default")
        while not until.is_set():
            chosen = {
                b"key %d" % rng.randrange(KEYS): rng.randbytes(rng.choice([5, 500]))
                for _ in range(20)
            }
            mutations = [
                (key, None if rng.random() < 0.2 else value) for key, value in chosen.items()
            ]
            with contextlib.suppress(UprError):
                await bucket.write_many(mutations, durability=rng.choice(["memory", "disk"]))
                done += 1
    return done


@pytest.mark.asyncio
async def test_kills_of_a_chain_under_load(server_process: StartServer) -> None:
    rng = random.Random(1)
    # Flushes, compactions and purges under the writes, so that kills meet them too.
    small = ("--tail-bytes", "60000", "--flush-seconds", "0.2", "--tombstone-age", "0")
    upstream = server_process(*small)
    first = server_process("--replicate-from", upstream.target, *small)
    second = server_process("--replicate-from", first.target, *small)
    servers = [upstream, first, second]
    for replica in (first, second):
        await in_sync(upstream, replica)
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        views = []
        for server in servers:
            client = await stack.enter_async_context(AsyncClient(server.target))
            views.append(
                await stack.enter_async_context(
                    client.bucket("default").materialize(read_from="any")
                )
            )
        writing = asyncio.create_task(load(upstream.target, rng, stop))
        for killed in (upstream, first):
            behind = rng.randrange(500)

            async def is_behind(moved: int = await moves(upstream), more: int = behind) -> bool:
                return await moves(upstream) >= moved + more

            await poll(is_behind)
            killed.kill()
            killed.start()
        stop.set()
        assert await writing
        for replica in (first, second):
            await in_sync(upstream, replica)
        expected = await rows(upstream)
        for server, view in zip(servers, views, strict=True):
            assert await rows(server) == expected

            async def equal(view=view) -> bool:  # type: ignore[no-untyped-def]
                return dict(view.items()) == expected

            await poll(equal)
    for server in servers:
        assert server.terminate() == 0
        assert "fine" in shown("check", str(server.data))


async def moves(server: RunningServer) -> int:
    """Return how many mutations a server has."""
    async with AsyncClient(server.target) as client:
        return sum(info.high_seqno for info in await client.admin.partitions("default"))
