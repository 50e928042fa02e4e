"""SDK clients and a server with a bad network between them: whatever breaks, nothing is lost, doubled or out of order."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.conftest import StartServer
from tests.crash.clients import Follower, Writer
from tests.crash.recording import PARTITIONS
from tests.crash.world import World
from tests.harness import WAIT_SECONDS, poll
from tests.proxy import DIRECTIONS, Direction, Proxy

pytestmark = [pytest.mark.crash, pytest.mark.long, pytest.mark.usefixtures("soon")]

# The preface of HTTP/2 has 24 bytes, an Open some 200, a Start of all partitions some 20,000.
TO_SERVER = [0, 1, 23, 24, 60, 150, 400, 1000, 5000, 15_000]
TO_CLIENT = [0, 5, 9, 50, 200, 1000, 9000, 30_000, 60_000, 200_000]
"""Up to the first bytes of the handshake, its middle, its answers, and the middle of frames."""
GROWN_BYTES = 20 * 2**20
"""By how much a server may grow that three followers of a window of 0.5 MB each have left."""
PATIENT_SECONDS = 5.0
"""Between heartbeats of clients that must not take a machine that is busy for a lost connection."""
WRITER_TO_CLIENT = [0, 9, 40, 70, 100, 130, 500, 1500, 4000]


async def cut_again_and_again(
    world: World, proxy: Proxy, client: Follower | Writer, counts: list[tuple[Direction, int]]
) -> None:
    """Cut after each count in turn; in between the client gets something done."""
    for number, (direction, count) in enumerate(counts, 1):
        await world.gets_on(client)
        proxy.cut_after(direction, count)
        await world.moved.until(
            partial(lambda wanted: proxy.cuts == wanted, number),
            f"{client.name} is cut {direction} after {count} bytes",
        )


def cuts_in_turn(to_client: list[int], seed: int) -> list[tuple[Direction, int]]:
    """All counts of both directions, in some order."""
    counts: list[tuple[Direction, int]] = [("to client", count) for count in to_client]
    counts += [("to server", count) for count in TO_SERVER]
    random.Random(seed).shuffle(counts)
    return counts


@asynccontextmanager
async def proxies(world: World, count: int) -> AsyncIterator[list[Proxy]]:
    made = [Proxy(world.server.target) for _ in range(count)]
    for proxy in made:
        proxy.__enter__()
        proxy.on_change = world.moved.tell
    try:
        yield made
    finally:
        for proxy in made:
            proxy.__exit__(None, None, None)


@pytest.mark.asyncio
async def test_connections_that_are_cut_anywhere(server_process: StartServer) -> None:
    server = server_process("--tail-bytes", "200000")
    async with World(server) as world, proxies(world, 5) as through:
        world.follow()
        clients: list[Follower | Writer] = [
            world.follow(through[0].target),
            world.follow_in_thread(through[1].target, credit_bytes=3000),
            world.follow(through[2].target, stability="memory"),
            world.write(through[3].target, seed=3),
            world.write(through[4].target, seed=4),
        ]
        async with asyncio.TaskGroup() as group:
            for at, (proxy, client) in enumerate(zip(through, clients, strict=True)):
                to_client = TO_CLIENT if isinstance(client, Follower) else WRITER_TO_CLIENT
                counts = cuts_in_turn(to_client, at)
                group.create_task(cut_again_and_again(world, proxy, client, counts))
        await world.settle()
        assert [proxy.cuts for proxy in through] == [20, 20, 20, 19, 19]
        assert all(proxy.accepted > 15 for proxy in through)


def hears_nothing(follower: Follower, since: int) -> bool:
    """Whether it knows by its own clock. On a busy machine the server's word that the consumer was silent may still come
    before, or the follower be between two calls, so that it is the next one that hears nothing, or is not taken.
    """
    return follower.said("the server was silent", since) or follower.said(
        "did not accept the call", since
    )


@pytest.mark.asyncio
async def test_directions_that_swallow_everything(server_process: StartServer) -> None:
    server = server_process(
        "--tail-bytes", "500000", constants={"upr.service.follow.HALF_CLOSE_SECONDS": 0.5}
    )
    async with World(server) as world, proxies(world, 4) as through:
        healthy = world.follow()
        deaf = world.follow(through[0].target, credit_bytes=500_000)
        mute = world.follow_in_thread(through[1].target, credit_bytes=500_000)
        lost = world.follow(through[2].target, credit_bytes=500_000)
        writer, unheard = world.write(seed=1), world.write(through[3].target, seed=2)
        await world.more_writes(3)
        await world.moved.until(lambda: all(f.batches for f in world.followers), "all follow")
        # On a busy machine one may be between two calls.
        before = await poll(
            world.status, lambda told: (told.follow_calls, told.write_calls) == (4, 2)
        )
        told = len(deaf.statuses), len(lost.statuses)

        through[0].black_hole("to client")
        through[1].black_hole("to server")
        through[2].black_hole(*DIRECTIONS)
        through[3].black_hole("to client")
        writer.value_bytes = 5000
        # The server can still tell this one why.
        await world.says(mute, "SILENT")
        for follower, since in ((deaf, told[0]), (lost, told[1])):
            await world.moved.until(
                partial(hears_nothing, follower, since), f"{follower.name} hears nothing"
            )
        # The server has its own clock for each call, and does not wait for any of those that say nothing. One of
        # them can be heard, and tries again and again.
        async with asyncio.timeout(WAIT_SECONDS):
            while (await world.status()).follow_calls > 2:
                await world.gets_on(writer)
        await world.gets_on(writer, 30)
        await world.gets_on(healthy)
        assert not lost.has(healthy.reached)
        after = await world.status()
        assert after.anonymous_bytes - before.anonymous_bytes < GROWN_BYTES
        assert after.buckets[0].streams <= 2 * PARTITIONS

        for proxy in through:
            proxy.heal()
        # What was held back may go on, and connections may be gone for good.
        through[1].reset()
        through[3].reset()
        await world.gets_on(unheard, 3)
        await world.settle()


@pytest.mark.asyncio
async def test_slow_links_and_closed_directions(server_process: StartServer) -> None:
    server = server_process("--tail-bytes", "200000")
    async with World(server) as world, proxies(world, 4) as through:
        through[0].limit(300_000)
        through[1].delay(0.03)
        # The window bounds a frame, and so how long one takes.
        patient = {"heartbeat_seconds": PATIENT_SECONDS}
        slow = world.follow(through[0].target, credit_bytes=20_000, **patient)
        late = world.follow_in_thread(through[1].target, **patient)
        closed = world.follow(through[2].target)
        world.write(through[3].target, seed=1)
        world.write(seed=2)
        through[3].delay(0.01)
        await world.more_writes(5)
        for direction in DIRECTIONS:
            accepted = through[2].accepted
            through[2].half_close(direction)
            await world.moved.until(
                partial(lambda old: through[2].accepted > old, accepted), "it comes back"
            )
            await world.gets_on(closed)
        await world.more_writes(5)
        await world.settle()
        # A link that moves is no lost connection.
        assert not slow.said("silent")
        assert not late.said("silent")
