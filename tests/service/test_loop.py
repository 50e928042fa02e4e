"""What one callback of the event loop takes, while clients ask for much at once: nobody else is served meanwhile."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.harness import WAIT_SECONDS, RunningServer, wait_until
from tests.raw import RawClient
from upr_client import AsyncClient
from upr_protocol.limits import PARTITIONS
from upr_protocol.position_table import START
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes
from upr_protocol.wire.v1 import key_value_service_pb2 as kv

CALLBACK_SECONDS = 0.05
ATTEMPTS = 2
"""What takes long by itself does so each time; what the machine adds comes and goes."""
USUAL_SECONDS = 0.05
"""Of CPU: what a callback may take on a machine that takes so long for the work of ``slowness``."""
_TABLE = np.zeros(PARTITIONS, START)
_TABLE["partition"] = np.arange(PARTITIONS)
TABLE = _TABLE.tobytes()
WATCH = """
import asyncio.events, atexit, json, os, signal, time
worst = []
run = asyncio.events.Handle._run
def watched(self):
    began = time.thread_time()
    try:
        return run(self)
    finally:
        took = time.thread_time() - began
        if took > 0.02:
            worst.append((took, repr(self)[:400]))
            worst.sort(reverse=True)
            del worst[10:]
asyncio.events.Handle._run = watched
def tell(*_):
    with open(os.environ["UPR_LOOP_TOLD"] + ".new", "w") as file:
        json.dump(worst, file)
    os.replace(os.environ["UPR_LOOP_TOLD"] + ".new", os.environ["UPR_LOOP_TOLD"])
    worst.clear()
signal.signal(signal.SIGUSR1, tell)
"""


class Watched:
    """A server that notes the CPU time of its loop's callbacks."""

    def __init__(self, folder: Path) -> None:
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(WATCH)
        self._told = folder / "told"
        self.server = RunningServer(
            folder,
            "--tombstone-age",
            "0",
            "--purge-hold",
            "0",
            "--flush-seconds",
            "0.2",
            environment={"PYTHONPATH": str(site), "UPR_LOOP_TOLD": str(self._told)},
        )

    async def worst(self) -> list[tuple[float, str]]:
        """Return the longest callbacks since the last call: seconds of CPU, and which."""
        self._told.unlink(missing_ok=True)
        os.kill(self.server.pid, signal.SIGUSR1)
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> list[tuple[float, str]]:
        wait_until(self._told.exists, "the longest callbacks")
        found: list[tuple[float, str]] = json.loads(self._told.read_text())
        return found


async def starts(client: RawClient, clients: list[RawClient]) -> None:
    """Start all partitions, and again, in both forms."""

    async def start(one: RawClient) -> None:
        follow = await one.follow(credit_bytes=1, heartbeat_seconds=60)
        single = [changes.StartPartition(partition=partition) for partition in range(PARTITIONS)]
        asked = [changes.Start(table=TABLE), changes.Start(partitions=single)] * 2
        for ask in asked:
            await follow.send(start=ask)
        left = len(asked)
        while left:
            left -= (await follow.read()).HasField("start_answers")
        follow.call.cancel()

    await asyncio.gather(*map(start, clients))


async def purge(client: RawClient, clients: list[RawClient]) -> None:
    """Force a purge of partitions that every follower reads and has not passed."""
    follows = []
    for one in clients:
        follow = await one.follow(credit_bytes=1, heartbeat_seconds=60)
        await follow.send(start=changes.Start(table=TABLE))
        await follow.until("start_answers")
        follows.append(follow)
    request = admin.PurgeRequest(bucket="default", partitions=range(64))
    await client.admin.Purge(request, timeout=WAIT_SECONDS)
    for follow in follows:
        follow.call.cancel()


async def gets(client: RawClient, clients: list[RawClient]) -> None:
    """Get a thousand keys, of which half are there, from many clients."""
    keys = [b"%d" % number for number in range(500)] + [b"no %d" % i for i in range(500)]
    request = kv.GetRequest(bucket="default", keys=keys)
    await asyncio.gather(
        *(one.kv.Get(request, timeout=WAIT_SECONDS) for one in clients for _ in range(2))
    )


async def asked_by_operators(client: RawClient, clients: list[RawClient]) -> None:
    """Everything that tells of all partitions."""
    for number in range(30):
        request = changes.CreateCutRequest(bucket="default", name=f"{number}", lease_seconds=60)
        await client.changes.CreateCut(request, timeout=WAIT_SECONDS)
    for _ in range(3):
        await client.changes.ListCuts(
            changes.ListCutsRequest(bucket="default", with_partitions=True), timeout=30
        )
        await client.hello(dict.fromkeys(range(PARTITIONS)), with_log=True)
        await client.logs()
        await client.partitions()
    for number in range(30):
        release = changes.ReleaseCutRequest(bucket="default", name=f"{number}")
        await client.changes.ReleaseCut(release, timeout=WAIT_SECONDS)


def slowness() -> float:
    """Return how many times longer than usual this machine takes for some work now, at least 1."""
    took = 0.0
    for _ in range(5):
        began = time.thread_time()
        sum(number * number for number in range(10**6))
        took = max(took, time.thread_time() - began)
    return max(took / USUAL_SECONDS, 1.0)


Load = Callable[[RawClient, list[RawClient]], Awaitable[None]]


async def measured(watched: Watched, load: Awaitable[None]) -> list[tuple[float, str]]:
    """Return the callbacks during a load that took too long."""
    await watched.worst()
    slow = slowness()
    await load
    slow = max(slow, slowness())
    return [one for one in await watched.worst() if one[0] > CALLBACK_SECONDS * slow]


async def run(folder: Path, loads: list[tuple[Load, int]]) -> None:
    """Have so many clients be each load, one after the other."""
    watched = Watched(folder)
    # A fork would not look for sitecustomize.
    server = watched.server.start(prefix=["env"])
    try:
        async with AsyncClient(server.target) as writer:
            rows = [(b"%d" % number, b"x" * 100) for number in range(5000)]
            await writer.bucket().write_many(rows)
            await writer.bucket().write_many([(key, None) for key, _ in rows[:2500]])
            await writer.bucket().write_many(rows[2500:])
        async with AsyncExitStack() as stack:
            client, *clients = [
                await stack.enter_async_context(RawClient(server.target))
                for _ in range(1 + max(count for _, count in loads))
            ]
            for load, count in loads:
                for _ in range(ATTEMPTS):
                    over = await measured(watched, load(client, clients[:count]))
                    if not over:
                        break
                assert not over, (load, over)
    finally:
        server.close()


@pytest.mark.long
@pytest.mark.asyncio
async def test_no_callback_takes_long(tmp_path: Path) -> None:
    await run(tmp_path, [(starts, 50), (gets, 20), (asked_by_operators, 1), (purge, 200)])
