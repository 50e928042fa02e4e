"""SIGKILL and SIGSTOP while SDK clients are attached: they come back by themselves and end equal."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.crash.clients import HEARTBEAT_SECONDS
from tests.crash.follower_process import digest
from tests.crash.world import World
from tests.harness import WAIT_SECONDS, poll
from tests.raw import RawClient

pytestmark = [pytest.mark.crash, pytest.mark.long, pytest.mark.usefixtures("soon")]

MIB = 2**20
KILLS = 3
DROPPED_SECONDS = 15.0
"""More than three heartbeat intervals, and half a second for a client to say that it heard; TCP would take longer."""
GROWN_BYTES = 30 * MIB
"""By how much a server may grow that holds 1 MiB of a tail, and as much for a client."""


@pytest.mark.asyncio
async def test_attached_clients_survive_kills(server_process: StartServer) -> None:
    server = server_process("--tail-bytes", "200000")
    async with World(server) as world:
        for _ in range(2):
            world.follow()
            world.follow_in_thread(credit_bytes=5000)
        # This one sees what is not durable, and has to undo what a kill takes back.
        world.follow(stability="memory", recorded=False)
        for seed in range(3):
            world.write(seed=seed)
        for number in range(KILLS):
            await world.more_writes(3 + 4 * (number % 3))
            await world.restart(clean=number == 2)
        await world.more_writes(3)
        await world.settle()
        restarts = [event for event in world.history if event["event"] == "restart"]
        grown = [
            len(e["partitions"][0]["after"]) - len(e["partitions"][0]["before"]) for e in restarts
        ]
        assert grown == [0 if e["clean"] else 1 for e in restarts]
        assert {e["event"] for e in world.history} >= {"run", "marker", "acknowledged", "restart"}
        assert all(len(f.statuses) >= KILLS for f in world.followers)


@pytest.mark.asyncio
async def test_a_server_that_stands_still_and_goes_on(server_process: StartServer) -> None:
    server = server_process("--tail-bytes", "200000")
    async with World(server) as world:
        for _ in range(2):
            world.follow()
            world.follow_in_thread()
            world.write(seed=len(world.writers))
        await world.more_writes(5)
        # Who is between two calls sees no silence: on a busy machine that may be all of them, so again then.
        for _ in range(5):
            said = [len(f.statuses) for f in world.followers]
            os.kill(server.pid, signal.SIGSTOP)
            try:
                for follower, before in zip(world.followers, said, strict=True):
                    await world.says(follower, "did not accept", before)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            # The same process goes on: what it was sent meanwhile and what is sent again is one and the same.
            await world.more_writes(5)
            for follower in world.followers:
                await world.gets_on(follower)
            if any(f.said("silent", b) for f, b in zip(world.followers, said, strict=True)):
                break
        else:
            raise AssertionError("nobody saw the silence")
        await world.settle()
        await poll(world.status, lambda told: told.follow_calls <= len(world.followers))
    async with RawClient(server.target) as client:
        assert {len(log) for log in await client.logs()} == {1}


class Child:
    """A follower in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: list[dict[str, Any]] = []

    async def read(self, kind: str) -> Any:
        """Read on until it says something of a kind."""
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                line = await self._process.stdout.readline()
                assert line, f"the follower ended; it said {self.said[-3:]}"
                self.said.append(json.loads(line))
                if kind in self.said[-1]:
                    return self.said[-1][kind]

    def tell(self, goal: list[int]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(goal).encode() + b"\n")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


@asynccontextmanager
async def child(target: str, credit_bytes: int) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.crash.follower_process"),
        *(target, str(credit_bytes), str(HEARTBEAT_SECONDS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MIB,
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.asyncio
async def test_a_client_that_stands_still_is_dropped_and_comes_back(
    server_process: StartServer,
) -> None:
    server = server_process(
        "--tail-bytes", str(MIB), constants={"upr.service.follow.HALF_CLOSE_SECONDS": 0.5}
    )
    async with World(server) as world, child(server.target, MIB) as stopped:
        healthy = world.follow()
        writer = world.write(seed=1)
        writer.value_bytes = 10_000
        await stopped.read("rows")
        await world.more_writes(3)
        # On a busy machine one may be between two calls.
        before = await poll(world.status, lambda told: told.follow_calls == 2)
        stopped.signal(signal.SIGSTOP)
        try:
            highest = 0
            async with asyncio.timeout(DROPPED_SECONDS):
                while (now := await world.status()).follow_calls > 1:
                    highest = max(highest, now.anonymous_bytes)
                    await asyncio.sleep(0.02)
            # Writing and the other follower go on meanwhile.
            await world.more_writes(20)
            assert highest - before.anonymous_bytes < GROWN_BYTES
            await world.gets_on(healthy, 10)
        finally:
            stopped.signal(signal.SIGCONT)
        await stopped.read("status")
        await world.settle()
        async with RawClient(server.target) as client:
            stopped.tell([info.high_seqno for info in await client.partitions()])
            assert await stopped.read("digest") == digest(healthy.state())
