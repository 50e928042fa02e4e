"""A cluster in plain words: its owner is killed, stopped, and cut off from etcd, and the servers go on by themselves.

Run by ``tools/dev.py demo --cluster``. A writer writes at ``replicated(1)`` and a follower follows all the time, both with
the SDK; nobody promotes anything. At the end the three servers and the follower are compared with what the writer had
acknowledged, and so is who said in which epoch that it owns.
"""

import argparse
import asyncio
import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.etcd import running_etcd
from tests.harness import ServerFailed
from tests.proxy import DIRECTIONS, Proxy
from tools.demo import WAIT_SECONDS, put_away, say, tell, until
from upr_client import AsyncClient, ChangeBatch, Only, Rollback, Tuning
from upr_client.admin import Topology, topology
from upr_client.testing import ServerProcess
from upr_client.types import AsyncBucket
from upr_protocol.errors import UprError
from upr_protocol.wire.v1 import replica_service_pb2 as wire
from upr_protocol.wire.v1.replica_service_pb2_grpc import ReplicaServiceStub

NAMES = "ABC"
SAFE = "replicated(1)"
"""Durability of the writes and stability of what the follower is shown."""
ROWS = 10
"""Rows of one write."""
KEYS = 1000
PAUSE_SECONDS = 0.02
"""Pause of the writer after each write."""
LOOK_SECONDS = 0.1
"""Pause of who asks a server for its topology."""
HELD_SECONDS = 5.0
"""Time for which a link stays cut after the key behind it is gone: others would have claimed by then."""


@dataclass
class Writer:
    """Writer of the same keys again and again.

    Attributes:
        rows: by key, what was acknowledged last.
        count: acknowledged rows.
        ended: set to end it.
    """

    rows: dict[bytes, bytes] = field(default_factory=dict)
    count: int = 0
    ended: bool = False
    _last: float = field(default_factory=time.monotonic)
    _longest: float = 0.0

    async def run(self, bucket: AsyncBucket) -> None:
        """Write until it is to end."""
        for number in itertools.count():
            if self.ended:
                return
            at = range(number * ROWS, (number + 1) * ROWS)
            rows = [(b"key-%d" % (n % KEYS), b"%d" % n) for n in at]
            await bucket.write_many(rows, SAFE)
            self.rows.update(rows)
            self.count += ROWS
            self._note()
            await asyncio.sleep(PAUSE_SECONDS)

    def _note(self) -> None:
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now

    def pause(self) -> float:
        """Return the longest time without an acknowledgement since this was asked last."""
        found = max(self._longest, time.monotonic() - self._last)
        self._longest = 0.0
        return found


async def state_of(target: str) -> dict[bytes, bytes | None]:
    """Return what one server has, by key."""
    rows: dict[bytes, bytes | None] = {}
    async with (
        AsyncClient(target) as client,
        client.bucket().changes(until="now", read_from="any") as changes,
    ):
        async for batch in changes.batches():
            if isinstance(batch, ChangeBatch):
                rows |= {key: value for _, _, _, key, value in batch.changes}
    return rows


class Cluster:
    """One run: three servers, by name, each with a link of its own to etcd, a writer and a follower."""

    def __init__(self, folder: Path, etcd: str, links: dict[str, Proxy]) -> None:
        self._etcd, self._links = etcd, links
        self.servers = {
            name: ServerProcess(folder / name, ["--cluster", f"etcd://{links[name].target}/demo"])
            for name in NAMES
        }
        self._known: dict[str, Topology] = {}
        # By epoch, who said that it is active.
        self._owners: dict[int, set[str]] = {}
        self._writer = Writer()
        self._shown: dict[bytes, bytes | None] = {}
        self._rollbacks = 0
        self._tasks: list[asyncio.Task[None]] = []

    # What is known

    async def _watch(self, name: str) -> None:
        """Ask one server again and again who is active; a client of the SDK would go to another one."""
        async with grpc.aio.insecure_channel(self.servers[name].target) as channel:
            stub: Any = ReplicaServiceStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.GetTopology(wire.GetTopologyRequest(), timeout=1.0)
                    found = self._known[name] = topology(answer)
                    if found.active:
                        self._owners.setdefault(found.epoch, set()).add(name)
                await asyncio.sleep(LOOK_SECONDS)

    @property
    def _owner(self) -> str:
        """The server that said that it is active, in the newest epoch."""
        epoch = max(self._owners, default=0)
        return min(self._owners.get(epoch, {""}))

    def _counts(self, *names: str) -> bool:
        """Return whether the owner counts just these."""
        known = self._known.get(self._owner)
        if known is None or not known.active:
            return False
        counted = {member.address for member in known.members if member.counted}
        return counted == {self.servers[name].target for name in names}

    def _others(self) -> list[str]:
        return [name for name in NAMES if name != self._owner]

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is so; what ended a task of the background is raised."""

        def holds() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return condition()

        await until(holds)

    # The story

    async def run(self) -> bool:
        """Tell all of it; return whether it ended well."""
        await self._start("A")
        async with AsyncClient(self.servers["A"].target) as client:
            await client.admin.promote()
        await self._until(lambda: self._owner == "A")
        await asyncio.gather(*map(self._start, NAMES[1:]))
        await self._until(lambda: self._counts("B", "C"))
        say(f"etcd      at {self._etcd} keeps who the owner is, and nothing else")
        for name, server in self.servers.items():
            role = "is the owner" if name == self._owner else "follows it, and is counted"
            say(f"{name}         at {server.target} {role}")
        targets = [server.target for server in self.servers.values()]
        async with AsyncClient(targets, retry_seconds=WAIT_SECONDS) as client:
            writing = asyncio.create_task(self._writer.run(client.bucket()))
            self._tasks += [writing, asyncio.create_task(self._follow(client.bucket()))]
            say(
                f"writer    writes at {SAFE}: on disk at the owner and at another one, then acknowledged"
            )
            say("follower  follows at the same, so it is never shown what could be undone")
            await self._written()
            await self._kill()
            await self._stop()
            await self._cut()
            self._writer.ended = True
            await writing
            self._tasks.remove(writing)
            return await self._compare()

    async def close(self) -> None:
        """Leave nothing behind."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        put_away(*self.servers.values())

    async def _start(self, name: str) -> None:
        await asyncio.to_thread(self.servers[name].start)
        self._tasks.append(asyncio.create_task(self._watch(name)))

    async def _follow(self, bucket: AsyncBucket) -> None:
        def undo(rollback: Rollback) -> None:
            self._rollbacks += 1
            say(f"follower  {rollback.words}")

        tuning = Tuning(retry_seconds=WAIT_SECONDS)
        async with bucket.changes(
            only=Only(stability=SAFE), tuning=tuning, on_rollback=undo
        ) as changes:
            async for batch in changes.batches():
                if isinstance(batch, ChangeBatch):
                    self._shown |= {key: value for _, _, _, key, value in batch.changes}

    async def _written(self) -> None:
        """Wait until more was acknowledged."""
        before = self._writer.count
        await self._until(lambda: self._writer.count > before)

    async def _next_owner(self, old: str, began: float) -> None:
        """Wait until another server owns and takes writes, and tell how long that took."""
        await self._until(lambda: self._owner != old)
        took, epoch = time.monotonic() - began, max(self._owners)
        say(f"{self._owner}         is the owner in epoch {epoch}, after {took:.1f} s")
        await self._written()
        say(f"writer    goes on by itself; it waited {self._writer.pause():.1f} s")

    async def _comes_back(self, old: str, words: str, began: float) -> None:
        await self._until(lambda: self._counts(*self._others()))
        say(
            f"{old}         {words} {self._owner}, and is counted again after {time.monotonic() - began:.1f} s"
        )
        self._writer.pause()

    async def _kill(self) -> None:
        old, began = self._owner, time.monotonic()
        self._writer.pause()
        self.servers[old].kill()
        say(f"{old}         SIGKILL to process {self.servers[old].pid}")
        say(
            "cluster   waits for two witnesses: its key in etcd ends, and it asks nobody for a grant"
        )
        await self._next_owner(old, began)
        began = time.monotonic()
        await asyncio.to_thread(self.servers[old].start)
        await self._comes_back(old, "was started again: it follows", began)

    async def _stop(self) -> None:
        old, began = self._owner, time.monotonic()
        self.servers[old].pause()
        say(f"{old}         SIGSTOP: it stands still, and does not know it")
        await self._next_owner(old, began)
        began = time.monotonic()
        self.servers[old].resume()
        say(f"{old}         SIGCONT: the grants that it had have run out, so it answers no write")
        await self._until(lambda: not self._known[old].active)
        await self._comes_back(old, "follows", began)

    async def _cut(self) -> None:
        owner, epoch = self._owner, max(self._owners)
        (witness, *_) = self._others()
        self._links[owner].black_hole(*DIRECTIONS)
        say(
            f"{owner}         its link to etcd is cut; those to {' and '.join(self._others())} are whole"
        )
        await self._until(lambda: not self._has_key(owner, witness))
        say(f"etcd      has the key of {owner} no more: one witness says that it is gone")
        # It is time itself that shows it: nobody claims.
        await asyncio.sleep(HELD_SECONDS)
        await self._written()
        if (self._owner, max(self._owners)) != (owner, epoch):
            raise UprError(f"{self._owner} claimed although {owner} was heard")
        say(
            f"{owner}         still is the owner, because the others hear it and grant it; the writer waited"
            f" {self._writer.pause():.1f} s at most"
        )
        self._links[owner].heal()
        await self._until(lambda: self._has_key(owner, witness))
        say(f"{owner}         has its link and its key again")

    def _has_key(self, name: str, at: str) -> bool:
        """Return whether a server sees the key of another one in etcd."""
        target = self.servers[name].target
        return any(one.has_key for one in self._known[at].members if one.address == target)

    async def _compare(self) -> bool:
        """Compare all that is there, print the result, and return whether it is as was promised."""
        rows, epochs = self._writer.rows, sorted(self._owners)

        def is_even() -> bool:
            members = self._known[self._owner].members
            return self._shown == rows and all(one.in_step and not one.lag for one in members)

        with contextlib.suppress(UprError):
            # What differs is told below.
            await self._until(is_even)
        states = {name: await state_of(one.target) for name, one in self.servers.items()}
        states["the follower"] = self._shown
        wrong = [name for name, state in states.items() if state != rows]
        several = [epoch for epoch in epochs if len(self._owners[epoch]) > 1]
        for epoch in several:
            say(
                f"RESULT    epoch {epoch} had SEVERAL owners: {', '.join(sorted(self._owners[epoch]))}"
            )
        if wrong:
            say(f"RESULT    {', '.join(wrong)} DIFFER from what was acknowledged")
        if self._rollbacks:
            say(f"RESULT    the follower was ROLLED BACK {self._rollbacks} times")
        if wrong or several or self._rollbacks:
            return False
        say(
            f"RESULT    A, B, C and the follower have all {len(rows)} keys as they were acknowledged last"
        )
        say(
            f"RESULT    none of {self._writer.count} rows written at {SAFE} is lost, and nothing was undone"
        )
        told = ", ".join(f"{min(self._owners[epoch])} in {epoch}" for epoch in epochs)
        say(f"RESULT    each epoch had one owner: {told}")
        return True


async def demonstrate(folder: Path) -> bool:
    """Run it in a folder; return whether it ended well."""
    with contextlib.ExitStack() as stack:
        try:
            (etcd,) = stack.enter_context(running_etcd(folder / "etcd")).endpoints
        except ServerFailed as error:
            raise UprError(str(error)) from None
        links = {name: stack.enter_context(Proxy(etcd)) for name in NAMES}
        story = Cluster(folder, etcd, links)
        try:
            return await story.run()
        finally:
            await story.close()


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if shutil.which("etcd") is None:
        print(
            "error: there is no etcd; install it (on Debian and Ubuntu: apt-get install etcd-server)",
            file=sys.stderr,
        )
        return 2
    return tell(demonstrate)


if __name__ == "__main__":
    sys.exit(main())
