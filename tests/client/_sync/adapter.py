"""What differs between the tests of the two flavours; by hand in each."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tests.client.key_values import KeyValueServer
from tests.client.scripted import ScriptedServer, Step
from tests.harness import until
from upr_client._sync.changes import Changes

S = TypeVar("S", ScriptedServer, KeyValueServer)


@contextmanager
def serve(
    follow: Sequence[Sequence[Step]] = (), write: Sequence[Sequence[Step]] = ()
) -> Iterator[ScriptedServer]:
    """Run a scripted server on an event loop in a thread of its own."""
    with running(ScriptedServer(follow, write)) as server:
        yield server


@contextmanager
def running(server: S) -> Iterator[S]:
    """Run a server on an event loop in a thread of its own."""
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


def at_once(*work: Callable[[], None]) -> None:
    """Run all of it at the same time, in threads."""
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(one) for one in work]:
            done.result()


def arrived(changes: Changes, count: int) -> None:
    """Wait until so many messages have arrived that were not taken."""
    follow = changes._follow
    assert follow is not None
    asyncio.run(until(lambda: follow._inbox._items.qsize() >= count))
