"""What differs between the tests of the two flavours; by hand in each."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.client.scripted import ScriptedServer, Step


@asynccontextmanager
async def serve(
    follow: Sequence[Sequence[Step]] = (), write: Sequence[Sequence[Step]] = ()
) -> AsyncIterator[ScriptedServer]:
    """Run a scripted server on the test's event loop."""
    server = ScriptedServer(follow, write)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
