"""What differs between the tests of the two flavours; by hand in each."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.client.scripted import ScriptedServer, Step


@contextmanager
def serve(
    follow: Sequence[Sequence[Step]] = (), write: Sequence[Sequence[Step]] = ()
) -> Iterator[ScriptedServer]:
    """Run a scripted server on an event loop in a thread of its own."""
    server = ScriptedServer(follow, write)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="scripted-server")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
