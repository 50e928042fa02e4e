"""Whole servers as simulated processes: everything that ``upr-server`` runs, on a loop and a network of the simulation.

Nothing of the server is replaced but what is outside of it: the event loop, threads, clocks, chance, and gRPC.
"""

import errno
import functools
import random
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.simulation.calling import Channel, GrpcServer, Net
from tests.simulation.looping import SimulatedLoop, SimulatedWorker, Timeline, running
from upr import failpoints
from upr.cluster.keeper import replicate
from upr.cluster.registry import Registry
from upr.config import ServerConfig
from upr.replica.ownership import Ownership
from upr.replica.replica_service import ReplicaMethods
from upr.service.buckets import disk_threads
from upr.service.buckets.bucket_service import BucketService
from upr.service.clock import Clock
from upr.service.overload import intake, process
from upr.service.overload.callers import Callers
from upr.service.server import Server
from upr.storage.directory import DataDirectory
from upr.storage.journal import Journal
from upr.storage.store import Store

EPOCH_SECONDS = 1_700_000_000


def simulate(patch: pytest.MonkeyPatch, timeline: Timeline, net: Net) -> None:
    """Have clocks, chance, threads and gRPC of the simulation, in servers and in the SDK."""
    _simulate_time(patch, timeline)
    chance = timeline.drawn("chance")
    drawn = SimpleNamespace(
        randbelow=chance.randrange,
        randbits=chance.getrandbits,
        token_hex=lambda size: chance.randbytes(size).hex(),
    )
    for module in [*sys.modules.values()]:
        name = getattr(module, "__name__", "")
        if name.startswith(("upr.", "upr_client.")):
            if getattr(module, "secrets", None) is secrets:
                patch.setattr(module, "secrets", drawn)
            if getattr(module, "random", None) is random:
                patch.setattr(module, "random", chance)
    patch.setattr(disk_threads, "Worker", SimulatedWorker)
    patch.setattr(disk_threads, "WRITER", None)
    patch.setattr(failpoints, "hit", lambda point: running().reach(point))
    patch.setattr(grpc.aio, "insecure_channel", lambda address, options=None: Channel(net, address))
    patch.setattr(grpc.aio, "server", functools.partial(GrpcServer, net))
    # What they look at is this very process, which is not simulated.
    patch.setattr(intake, "memory_bytes", lambda: (0, 0))
    patch.setattr(intake, "TICK_SECONDS", 5.0)
    patch.setattr(process, "SAMPLE_SECONDS", 5.0)
    for kind in (Store, Journal, DataDirectory):
        _close_when_killed(patch, kind)


def _simulate_time(patch: pytest.MonkeyPatch, timeline: Timeline) -> None:
    def seconds() -> float:
        return timeline.now

    def nanoseconds(_clock: int = 0) -> int:
        return int(timeline.now * 1e9)

    clock = SimpleNamespace(
        monotonic=seconds,
        perf_counter=seconds,
        thread_time=seconds,
        process_time=seconds,
        time=lambda: EPOCH_SECONDS + timeline.now,
        time_ns=lambda: EPOCH_SECONDS * 10**9 + nanoseconds(),
        clock_gettime_ns=nanoseconds,
        CLOCK_BOOTTIME=0,
    )
    for module in [*sys.modules.values()]:
        name = getattr(module, "__name__", "")
        if name.startswith(("upr.", "upr_client.")):
            if getattr(module, "time", None) is time:
                patch.setattr(module, "time", clock)
            if getattr(module, "now", None) is time.monotonic:
                patch.setattr(module, "now", seconds)
    patch.setattr(Callers.__init__, "__defaults__", (seconds,))
    clocks: Any = Clock.__init__.__kwdefaults__
    patch.setitem(clocks, "day", lambda: clock.time_ns() // 1000)
    patch.setitem(clocks, "boot", lambda: nanoseconds() // 1000)


def _close_when_killed(patch: pytest.MonkeyPatch, kind: Any) -> None:
    """Have what a process opened closed when it is killed; once, because numbers of files are used again."""
    begin, end = kind.__init__, kind.close
    still_open: dict[int, Any] = {}

    def opened(self: Any, *args: Any, **options: Any) -> None:
        still_open[id(self)] = self
        running().files.append(lambda: self.close())
        begin(self, *args, **options)

    def closed(self: Any) -> None:
        if still_open.pop(id(self), None) is not None:
            end(self)

    patch.setattr(kind, "__init__", opened)
    patch.setattr(kind, "close", closed)


class Died(BaseException):
    """The process ends here: nothing of it runs any more."""


class ServerProcess:
    """One server after another on one host, with one data directory.

    Attributes:
        upstreams: what it is told to follow when it is started.
        registry: of its cluster; None for none.
        settings: others that it is started with.
        loop: of the process that runs; None while there is none.
        disks: how often it got an empty disk.
        dies_at: how the name of the failpoint begins at which the process dies next; empty for none.
        fails_at: the same, of those at which its disk fails until the next start.
    """

    def __init__(
        self, timeline: Timeline, net: Net, folder: Path, number: int, **settings: Any
    ) -> None:
        self._timeline, self._net = timeline, net
        self._folder = folder
        self.settings = settings
        self.number = number
        self.host = f"server {number}"
        self.address = f"127.0.0.1:{7001 + number}"
        self.upstreams: tuple[str, ...] = ()
        self.registry: Registry | None = None
        self.disks = self.boots = 0
        self.dies_at = self.fails_at = ""
        self.loop: SimulatedLoop | None = None
        self.server: Server | None = None

    @property
    def data(self) -> Path:
        return self._folder / f"{self.number}.{self.disks}"

    @property
    def ownership(self) -> Ownership | None:
        """What decides who is active, None while it does not run."""
        if self.server is None:
            return None
        assert isinstance(self.server._sets, ReplicaMethods)
        return self.server._sets._ownership

    @property
    def waiting(self) -> str:
        """What operators are told that it waits for; empty for nothing."""
        if self.server is None or self.server._sets is None:
            return ""
        assert isinstance(self.server._sets, ReplicaMethods)
        return self.server._sets.waiting

    @property
    def active(self) -> bool:
        return self.ownership is not None and self.ownership.active

    @property
    def bucket(self) -> BucketService | None:
        """The bucket that is written to, None while it has none."""
        hosts = [] if self.server is None else self.server._catalog.hosts
        return next((host for host in hosts if host.bucket.identity.name == "default"), None)

    @property
    def died(self) -> bool:
        """Whether it ended at a failpoint, maybe while it began, and nobody has seen it yet."""
        return self.loop is not None and not self.loop.alive

    def start(self) -> None:
        """Begin a process."""
        assert self.loop is None
        self.boots += 1
        self.fails_at = ""
        self.loop = loop = SimulatedLoop(self._timeline, self.host)
        loop.place = self.data.name

        def reach(point: str) -> None:
            if loop.alive and self.dies_at and point.startswith(self.dies_at):
                self.dies_at, loop.alive = "", False
                raise Died
            if self.fails_at and point.startswith(self.fails_at):
                raise OSError(errno.EIO, "the disk fails")

        loop.reach = reach
        loop.create_task(self._run())

    async def _run(self) -> None:
        config = ServerConfig(
            self.data,
            self.address,
            open_admin=True,
            replicate_from=self.upstreams,
            cluster="" if self.registry is None else "etcd://etcd/simulated",
            **self.settings,
        )
        loop = running()
        try:
            part = functools.partial(replicate, registry=self.registry)
            server = self.server = Server(config, None, part)
            await server.start()
        except Exception as error:
            loop.broken = error

    def kill(self) -> None:
        """End the process between two of its steps."""
        if self.loop is not None:
            self.loop.kill()
            self._net.died(self.loop)
            self.loop = self.server = None

    def stop(self, stopped: Callable[[bool], None]) -> None:
        """Ask the process to stop, and tell whether that was clean when it has."""
        loop, server = self.loop, self.server
        assert loop is not None
        assert server is not None

        async def run() -> None:
            clean = await server.stop()
            loop.alive = False
            self._net.died(loop)
            if self.loop is loop:
                self.loop = self.server = None
            stopped(clean)

        loop.create_task(run())

    def pause(self, seconds: float) -> None:
        """Have the process do nothing for a while."""
        if self.loop is not None:
            self.loop.paused_until = self._timeline.now + seconds

    def lose_disk(self, upstreams: tuple[str, ...]) -> None:
        """Go on with an empty data directory, as a replica of others."""
        self.kill()
        self.disks += 1
        self.upstreams = upstreams
