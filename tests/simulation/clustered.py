"""World of a cluster: the set of servers of ``replicas`` without an operator, and an etcd that fails in its own ways.

Besides what happens to servers there, buckets are created and dropped, and etcd is away, cannot be reached by some, or makes a change of which the answer is
lost, at once or later. Clocks of servers differ in their rate. What is checked beyond ``replicas``: an owner that may
serve is never older than one that might before, and the cluster mends itself.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.looping import SimulatedLoop, Timeline, running
from tests.simulation.processes import ServerProcess
from tests.simulation.replicas import STEP_SECONDS, ReplicasWorld
from tests.simulation.truth import Violation
from upr.cluster.registry import Entry, Found, Map
from upr.engine.bucket import Bucket
from upr.replica import fencing
from upr.replica.fencing import Fencing
from upr_client import AsyncClient, UprError
from upr_protocol.errors import UnavailableError

CALL_SECONDS = 2.0
HEAL_SECONDS = 90.0
ORDERS = 16
"""Answers and orders of buckets in a run; each bucket takes what a whole one takes."""
REFUSALS = ("PARTITION_NOT_ACTIVE", "ALREADY_EXISTS", "BUCKET_NOT_FOUND")
"""Reasons for which an order changed nothing; of the last two it is known besides whether there is such a bucket."""


class FakeEtcd:
    """An etcd of the simulation: one store, that all servers reach in their own way.

    Attributes:
        down: whether nobody reaches it.
        cut: hosts that do not reach it.
        lossy: how many of the answers to changes are lost, 0.0 to 1.0.
        late: seconds after which a change is made whose answer is lost; 0 where none is.
        swaps: changes that were asked for.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._rng = timeline.drawn("etcd")
        self._loop = SimulatedLoop(timeline, "etcd")
        self._entries: dict[bytes, Entry] = {}
        self._ends: dict[bytes, float] = {}
        self._revision = 1
        self.down = False
        self.cut: set[str] = set()
        self.lossy = 0.0
        self.late = 0.0
        self.swaps = 0

    def heal(self) -> None:
        """Have everybody reach it; leases begin anew, as after a restart."""
        self.down, self.lossy, self.late = False, 0.0, 0.0
        self.cut.clear()
        for key in self._ends:
            self._ends[key] = self._timeline.now + 5.0

    def lose(self) -> None:
        """Have nothing of what was kept."""
        self._entries.clear()
        self._ends.clear()
        self._revision += 1

    def delete(self, end: str) -> None:
        """Have no key that ends so; its lease lives on."""
        for key in [key for key in self._entries if key.endswith(end.encode())]:
            del self._entries[key]
            self._revision += 1

    def put_back(self, value: bytes) -> None:
        """Have the map as it once was."""
        (key,) = (key for key in self._entries if key.endswith(b"/map"))
        self._set(key, value)

    async def _reach(self) -> None:
        await asyncio.sleep(0.001 + self._rng.random() * 0.01)
        if self.down or running().host in self.cut:
            await asyncio.sleep(CALL_SECONDS * self._rng.choice((0.01, 1.0)))
            raise UnavailableError("etcd is away")
        if not self.down:
            for key in [k for k, end in self._ends.items() if end < self._timeline.now]:
                self._entries.pop(key, None)
                del self._ends[key]
                self._revision += 1

    def _set(self, key: bytes, value: bytes) -> None:
        self._revision += 1
        self._entries[key] = Entry(value, self._revision)

    def values(self, end: str) -> list[bytes]:
        """Return the values of the keys that end so."""
        return [one.value for key, one in self._entries.items() if key.endswith(end.encode())]

    async def read(self, prefix: bytes) -> Found:
        """See ``Registry``."""
        await self._reach()
        found = {key: one for key, one in self._entries.items() if key.startswith(prefix)}
        return Found(found, self._revision)

    def _swap(self, key: bytes, value: bytes, revision: int) -> bool:
        known = self._entries.get(key)
        if self.down or (known.revision if known else 0) != revision:
            return False
        self._set(key, value)
        return True

    async def swap(self, key: bytes, value: bytes, revision: int) -> bool:
        """See ``Registry``."""
        self.swaps += 1
        await self._reach()
        if self.late:
            self._loop.call_later(self.late, self._swap, key, value, revision)
            raise UnavailableError("no answer of etcd")
        if self._rng.random() < self.lossy:
            kind = self._rng.random()
            if kind < 0.4:
                self._swap(key, value, revision)
            elif kind < 0.8:
                # On its way for a while.
                later = self._rng.random() * 6.0
                self._loop.call_later(later, self._swap, key, value, revision)
            raise UnavailableError("no answer of etcd")
        return self._swap(key, value, revision)

    async def session(
        self, key: bytes, value: bytes, seconds: int, began: Callable[[], None]
    ) -> None:
        """See ``Registry``."""
        await self._reach()
        self._set(key, value)
        self._ends[key] = self._timeline.now + seconds
        began()
        while key in self._ends:
            await asyncio.sleep(seconds / 4)
            try:
                await self._reach()
            except UnavailableError:
                continue
            if key in self._ends:
                self._ends[key] = self._timeline.now + seconds

    async def changed(self, prefix: bytes, after: int) -> None:
        """See ``Registry``."""
        for _ in range(10):
            await self._reach()
            if self._revision > after:
                return
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """See ``Registry``."""


class ClusterWorld(ReplicasWorld):
    """One run.

    Attributes:
        etcd: of the cluster.
        rates: seconds of a host's own clock in a second.
        created: names of the buckets that must be there, by version.
        dropped: versions that must be nowhere.
    """

    def __init__(self, folder: Path, seed: int, servers: int | None = None) -> None:
        number = servers or (3 if seed % 3 else 2 + seed % 2 * 2)
        super().__init__(folder, seed, [0] * (number - 1))
        self.etcd = FakeEtcd(self._timeline)
        self._newest = 0, ""
        rng = self._timeline.drawn("clocks")
        self.rates = {server.host: rng.uniform(0.96, 1.04) for server in self.servers}
        self._min_copies = self._timeline.drawn("copies").choice((0, 0, 1))
        for server in self.servers:
            server.upstreams, server.registry = (), self.etcd
            server.settings["min_copies"] = self._min_copies
        self.created: dict[int, str] = {}
        self.dropped: set[int] = set()
        self._ordering = 0
        # Names of which it is not known whether there is a bucket.
        self._doubtful: set[str] = set()

    def patched(self, patch: pytest.MonkeyPatch) -> None:
        """Have clocks of different rates, and look at each answer to whether an owner may serve."""
        patch.setattr(
            fencing, "boot_seconds", lambda: self._timeline.now * self.rates[running().host]
        )
        may_serve = Fencing.may_serve

        def looked(one: Fencing) -> bool:
            answer = may_serve(one)
            standing = one._catalog.standing.standing
            if answer and not one._catalog.replica:
                own, newest = (standing.row.epoch, running().place), self._newest
                # Who is forced goes on without those who grant another one to serve.
                forced = any(change.forced for change in self.truth.changes)
                if not forced and (own < newest if own[0] != newest[0] else own != newest):
                    raise Violation(f"{own} serves after {newest}")
                self._newest = own
            return answer

        patch.setattr(Fencing, "may_serve", looked)
        write = Bucket.write

        def written(bucket: Bucket, *what: Any) -> Any:
            outcome = write(bucket, *what)
            numbered = not outcome.duplicate and len(outcome.runs) > len(outcome.refused)
            if self._min_copies and numbered and not self._counted_followers(bucket):
                raise Violation(f"{running().host} numbered a write that no replica will have")
            return outcome

        patch.setattr(Bucket, "write", written)

    def _counted_followers(self, bucket: Bucket) -> set[str]:
        """Return the counted servers that follow a bucket of the server that runs."""
        (server,) = (s for s in self.servers if s.host == running().host)
        following = {f.options.directory for f in bucket.followers if f.options.consumer}
        return following & server.ownership.standing.row.counted if server.ownership else set()

    def make_first(self, first: ServerProcess) -> None:
        """Make the map, by order: no new server does so by itself."""
        self.until(lambda: bool(first.server and first.server._serving), 10, "started")
        self.promoted(first)

    # Faults

    def _fault(self) -> None:
        rng = self.rng
        if rng.random() < 0.02:
            kind = rng.random()
            if kind < 0.4:
                self.counts["outages of etcd"] += 1
                self.etcd.down = True
            elif kind < 0.7:
                self.counts["cuts from etcd"] += 1
                self.etcd.cut.add(rng.choice(self.servers).host)
            else:
                self.counts["losses of etcd"] += 1
                self.etcd.lossy = 0.5
            self._in(rng.choice((1.0, 4.0, 12.0)), self.etcd.heal)
        if rng.random() < 0.08 and self._ordering < ORDERS:
            self.order_bucket(f"extra {rng.randrange(2)}", drops=rng.random() < 0.5)
            if rng.random() < 0.2:
                rng.choice(self.servers).dies_at = "bucket."
        if rng.random() < 0.01:
            self.fail_disk(rng.choice(self.servers), rng.choice((1.0, 10.0, 20.0)))
        self._without_owner = 0.0
        super()._fault()

    def fail_disk(self, server: ServerProcess, seconds: float) -> None:
        """Have nothing that a server journals become durable; some time later it is killed, and begins again."""
        self.counts["failed disks"] += server.loop is not None
        server.fails_at = "journal.before_sync"
        self._in(seconds, lambda: self._end_failure(server))

    def _end_failure(self, server: ServerProcess) -> None:
        if server.fails_at:
            self._crash(server)

    @property
    def ordering(self) -> bool:
        """Whether an order is not answered yet."""
        return self._ordering % 2 == 1

    def order_bucket(self, name: str, *, drops: bool) -> None:
        """Have a bucket created or dropped, and remember what was answered; one after the other."""
        if self.ordering:
            return
        self._ordering += 1
        before = [version for version, known in self.created.items() if known == name]
        if drops:
            for version in before:
                # Until it is answered it may be either.
                del self.created[version]

        async def do(client: AsyncClient) -> int:
            if drops:
                return await client.admin.drop_bucket(name)
            return (await client.admin.create_bucket(name)).version

        def ended(outcome: int | UprError) -> None:
            self._ordering += 1
            word = "drops" if drops else "creations"
            if isinstance(outcome, UprError):
                self.counts[f"{word}: {outcome.reason}"] += 1
                if outcome.reason not in REFUSALS:
                    self._doubtful.add(name)
                elif name not in self._doubtful:
                    if outcome.reason in REFUSALS[-2:] and drops is bool(before):
                        raise Violation(
                            f"{word} of {name}: {outcome.reason}, and {before} was there"
                        )
                    self.created |= dict.fromkeys(before, name)
                return
            self.counts[word] += 1
            self._doubtful.discard(name)
            if before and (not drops or before != [outcome]):
                raise Violation(f"{word} of {name} gave {outcome}, and {before} was there")
            if drops:
                self.dropped.add(outcome)
            else:
                self.created[outcome] = name

        self.people.order(do, [server.address for server in self.servers], ended)

    def check(self) -> None:
        """Each server has the buckets that the map has; all that were created, and none that was dropped."""
        data = next(iter(self.etcd.values("/map")))
        known = {one.version: one.name for one in Map.decode(data).buckets}
        self.until(
            lambda: all(s.server and s.server._catalog.versions == known for s in self.servers),
            30,
            f"with the buckets {known}",
        )
        if not self.created.items() <= known.items():
            raise Violation(f"created and gone: {self.created}, there are {known}")
        if self.dropped & known.keys():
            raise Violation(f"dropped and there: {self.dropped & known.keys()}")
        super().check()

    def _promote(
        self, server: ServerProcess, *, force: bool = False, takeover: bool = False
    ) -> None:
        """Have the operator take over at times, and seldom force one; who is active is not his business otherwise."""
        if takeover or (force and self.rng.random() < 0.3):
            super()._promote(server, force=force, takeover=takeover)

    def _lose_disk(self, server: ServerProcess) -> None:
        super()._lose_disk(server)
        server.upstreams = ()

    def settle(self) -> None:
        """Mend everything, and wait until the cluster has an owner that all follow."""
        self.net.heal()
        self.etcd.heal()
        self.no_more_deaths()
        for server in self.servers:
            self._end_failure(server)
        self.until(lambda: all(server.loop for server in self.servers), 15, "started")
        began = self._timeline.now
        while not any(map(self.in_step, self.servers)):
            if self._timeline.now - began > HEAL_SECONDS:
                if not self._disks_lost:
                    raise Violation(f"no owner by itself: {self._where()}")
                # Only who is gone for good may have what is missing.
                self.counts["forced at the end"] += 1
                alive = [s for s in self.servers if s.ownership and s.ownership.standing.epoch]
                self.order(self.rng.choice(alive), force=True)
                self.until(lambda: not self.people.operating, 40, "answered")
                began = self._timeline.now
            self.pass_time(STEP_SECONDS)
        super().settle()
