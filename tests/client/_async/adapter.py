"""What differs between the tests of the two flavours; by hand in each."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from tests.client.key_values import KeyValueServer
from tests.client.scripted import ScriptedServer, Step
from tests.harness import until
from upr_client._async.changes import AsyncChanges

S = TypeVar("S", ScriptedServer, KeyValueServer)


@asynccontextmanager
async def serve(
    follow: Sequence[Sequence[Step]] = (), write: Sequence[Sequence[Step]] = ()
) -> AsyncIterator[ScriptedServer]:
    """Run a scripted server on the test's event loop."""
    async with running(ScriptedServer(follow, write)) as server:
        yield server


@asynccontextmanager
async def running(server: S) -> AsyncIterator[S]:
    """Run a server on the test's event loop."""
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def at_once(*work: Callable[[], Awaitable[None]]) -> None:
    """Run all of it at the same time, as tasks."""
    await asyncio.gather(*(one() for one in work))


async def arrived(changes: AsyncChanges, count: int) -> None:
    """Wait until so many messages have arrived that were not taken."""
    follow = changes._follow
    assert follow is not None
    await until(lambda: len(follow._inbox._items) >= count)
