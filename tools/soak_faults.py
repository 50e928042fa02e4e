"""Break a live server's connections and processes at random for a long time, with SDK clients attached.

Run by ``tools/dev.py soak --faults``. Each round begins a world of its own: a server with a small tail, some writers and
followers of both flavours, each through a proxy of its own. Then, one after the other, faults that the seed chooses:
connections that are cut after some bytes, in the handshake or in the middle of a frame; directions that swallow
everything, or are closed; slow and late links; a server that is killed, stopped for a while, or ended in good order. In
between, and at the end, everybody must get on by themselves; at the end all are equal to the reference model, every
write was applied once, and the recorded history fulfils the guarantees.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.crash.clients import reconnect_soon
from tests.crash.world import World
from tests.harness import RunningServer
from tests.proxy import DIRECTIONS, Direction, Proxy
from tools.demo import say, soak_parser

FAULTS_IN_ROUND = 25
FOLLOWERS = 5
WRITERS = 3
LONGEST_STOP_SECONDS = 2.0
LONGEST_HOLE_SECONDS = 2.0


class Round:
    """One world and what is done to it."""

    def __init__(self, world: World, proxies: list[Proxy], seed: int, ends: float) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._proxies = proxies
        self._ends = ends

    async def run(self) -> None:
        """Begin the clients, break things, and have everybody settle."""
        world, rng = self.world, self.rng
        for proxy in self._proxies[:FOLLOWERS]:
            begin = rng.choice((world.follow, world.follow_in_thread))
            in_memory = rng.random() < 0.2
            begin(
                proxy.target,
                recorded=not in_memory,
                stability="memory" if in_memory else "disk",
                credit_bytes=rng.choice((5000, 50_000, 8 * 2**20)),
            )
        for proxy in self._proxies[FOLLOWERS:]:
            world.write(proxy.target, seed=rng.randrange(10**6)).value_bytes = rng.choice(
                (50, 1500)
            )
        faults: list[Callable[[], Awaitable[None]]] = [
            *[self._cut] * 6,
            self._black_hole,
            self._half_close,
            self._slow,
            self._reset,
            *[self._kill] * 2,
            self._stop,
            self._end,
        ]
        await world.more_writes(3)
        for _ in range(FAULTS_IN_ROUND):
            if time.monotonic() >= self._ends:
                break
            fault = rng.choice(faults)
            self.counts[fault.__name__.strip("_").replace("_", " ")] += 1
            await fault()
            if rng.random() < 0.4:
                await world.more_writes(rng.randint(1, 5))
        for proxy in self._proxies:
            proxy.heal()
        await world.more_writes(2)
        await world.settle()
        self.counts["rows"] += sum(map(len, world.rows))
        self.counts["events"] += len(world.history)
        self.counts["connections"] += sum(proxy.accepted for proxy in self._proxies)

    def _some_proxy(self) -> Proxy:
        return self.rng.choice(self._proxies)

    async def _cut(self) -> None:
        direction: Direction = self.rng.choice(DIRECTIONS)
        proxy = self._some_proxy()
        proxy.cut_after(direction, int(10 ** self.rng.uniform(0, 5.5)))
        if self.rng.random() < 0.5:
            proxy.reset()
        await self._something()

    async def _black_hole(self) -> None:
        proxy = self._some_proxy()
        proxy.black_hole(*self.rng.sample(DIRECTIONS, self.rng.randint(1, 2)))
        await asyncio.sleep(self.rng.random() * LONGEST_HOLE_SECONDS)
        proxy.heal()
        if self.rng.random() < 0.5:
            proxy.reset()

    async def _half_close(self) -> None:
        self._some_proxy().half_close(self.rng.choice(DIRECTIONS))
        await self._something()

    async def _slow(self) -> None:
        proxy = self._some_proxy()
        if self.rng.random() < 0.5:
            proxy.limit(10 ** self.rng.uniform(5.7, 7))
        else:
            proxy.delay(self.rng.random() * 0.1)
        await self._something()
        if self.rng.random() < 0.7:
            proxy.heal()

    async def _reset(self) -> None:
        self._some_proxy().reset()

    async def _kill(self) -> None:
        # The second was sent after what came before: something is numbered, so the logs get a record.
        await self.world.more_writes(2)
        await self.world.restart()

    async def _end(self) -> None:
        await self.world.restart(clean=True)

    async def _stop(self) -> None:
        os.kill(self.world.server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.rng.random() * LONGEST_STOP_SECONDS)
        finally:
            os.kill(self.world.server.pid, signal.SIGCONT)

    async def _something(self) -> None:
        """Wait until somebody gets something done."""
        one = self.rng.choice(self.world.writers)
        before = one.answered
        await self.world.moved.until(
            lambda: one.answered > before or time.monotonic() > self._ends, f"{one.name} gets on"
        )


async def one_round(folder: Path, seed: int, ends: float) -> Counter[str]:
    """Run one round on a server of its own; AssertionError for what is not as it must be."""
    server = RunningServer(
        folder, "--tail-bytes", "300000", "--flush-seconds", "2", syncs=True
    ).start()
    try:
        with ExitStack() as stack:
            proxies = [
                stack.enter_context(Proxy(server.target)) for _ in range(FOLLOWERS + WRITERS)
            ]
            async with World(server) as world:
                one = Round(world, proxies, seed, ends)
                await one.run()
        return one.counts
    finally:
        server.close()


def main() -> int:
    """Return 0 when nothing was wrong."""
    options = soak_parser("faults", __doc__).parse_args()
    seed = options.seed
    say(f"faults for {options.minutes} minutes, first seed {seed}")
    reconnect_soon(pytest.MonkeyPatch())
    ends = time.monotonic() + options.minutes * 60
    total: Counter[str] = Counter()
    while time.monotonic() < ends:
        with tempfile.TemporaryDirectory(prefix="upr-soak-") as folder:
            try:
                total += asyncio.run(one_round(Path(folder), seed, ends))
            except Exception as error:
                print(f"VIOLATION (seed {seed}): {error!r}", file=sys.stderr)
                return 1
        total["rounds"] += 1
        say(
            f"seed {seed}: fine; so far "
            + ", ".join(f"{n} {what}" for what, n in sorted(total.items()))
        )
        seed += 1
    say("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
