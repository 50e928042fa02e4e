"""World of a set of servers that replicate: whole servers, the SDK, an operator, and faults, all from one seed.

Servers are killed between any two of their steps, paused, cut off in one direction or both, stopped cleanly, and lose a disk;
replicas are promoted, take over, or are forced. The power never fails, so that what was written stays. At the end all is
well again, and compared: see ``check``.
"""

import base64
import heapq
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulation.calling import Net
from tests.simulation.looping import Timeline
from tests.simulation.people import SAFE, People
from tests.simulation.processes import ServerProcess, simulate
from tests.simulation.truth import USED, Truth, Violation

STEP_SECONDS = 0.25
SETTLE_SECONDS = 400.0
STABILITIES = ("memory", "disk", SAFE)


class Heard(logging.Handler):
    """The errors that servers log with a stack: something happened that was not thought of."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and self.error is None:
            self.error = record.exc_info[1]


class ReplicasWorld:
    """One run.

    Args:
        upstreams: whom each server but the first is told to follow, by number; drawn if it is not given.

    Attributes:
        counts: how often what happened.
        elapsed: microseconds that have passed since the world began.
        outcome: of the newest promotion: why it was refused, empty if it was not.
    """

    def __init__(self, folder: Path, seed: int, upstreams: Sequence[int] | None = None) -> None:
        counts: Counter[str] = Counter()
        self.counts: dict[str, int] = counts
        self.truth = Truth()
        self._heard = Heard()
        self._timeline = timeline = Timeline(seed)
        self.net = Net(timeline)
        self.rng = timeline.drawn("world")
        settings = {
            "tail_bytes": self.rng.choice((20_000, 200_000)),
            "flush_seconds": self.rng.choice((0.5, 3.0)),
            "tombstone_seconds": 2.0,
            "purge_hold_seconds": 6.0,
        }
        folder.mkdir()
        # A star, or a chain.
        drawn = [
            0 if self.rng.random() < 0.7 else at for at in range(self.rng.choice((1, 2, 2, 2, 3)))
        ]
        upstreams = drawn if upstreams is None else upstreams
        self.servers = [
            ServerProcess(timeline, self.net, folder, number, **settings)
            for number in range(1 + len(upstreams))
        ]
        for server, at in zip(self.servers[1:], upstreams, strict=True):
            server.upstreams = (self.servers[at].address,)
        self.people = People(timeline, self.net, self.truth, counts)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.outcome = ""
        self._without_owner = 0.0
        self._disks_lost = 0

    @property
    def elapsed(self) -> int:
        return int((self._timeline.now - 1000.0) * 1e6)

    @contextmanager
    def living(self) -> Iterator[None]:
        """Have simulated time, chance, threads and gRPC while the body runs; nothing of the world is left after it."""
        logger = logging.getLogger("upr")
        with pytest.MonkeyPatch.context() as patch:
            simulate(patch, self._timeline, self.net)
            self.truth.watch(patch)
            self.patched(patch)
            logger.addHandler(self._heard)
            try:
                yield
            finally:
                logger.removeHandler(self._heard)
                for server in self.servers:
                    server.kill()
                self._timeline.close()

    def patched(self, patch: pytest.MonkeyPatch) -> None:
        """Change more of the servers; here nothing."""

    def run(self, steps: int) -> None:
        """Live for so many steps under faults, and then until all is well."""
        with self.living():
            self.begin()
            for step in range(steps):
                if step == steps // 3:
                    self._fail_over()
                elif step == 2 * steps // 3:
                    self._take_over()
                self._fault()
                self.pass_time()
            self.settle()
            self.check()

    def pass_time(self, seconds: float = STEP_SECONDS) -> None:
        """Let time pass."""
        until = self._timeline.now + seconds
        while self._later and self._later[0][0] <= until:
            when, _, do = heapq.heappop(self._later)
            self._timeline.run(when)
            do()
        self._timeline.run(until)
        if self._heard.error is not None:
            raise Violation("a server logged an error") from self._heard.error

    def _in(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self._timeline.now + seconds, next(self._numbers), do))

    def until(
        self, what: Callable[[], bool], seconds: float, words: str, step: float = STEP_SECONDS
    ) -> None:
        """Let time pass in steps until something is so; a violation if that takes longer than ``seconds``."""
        until = self._timeline.now + seconds
        while not what():
            if self._timeline.now > until:
                raise Violation(f"not {words} within {seconds:g} s: {self._where()}")
            self.pass_time(step)

    def _where(self) -> list[Any]:
        return [
            (
                s.host,
                s.loop is not None,
                s.active,
                s.owning and (s.owning.standing, s.owning.waiting),
            )
            for s in self.servers
        ]

    # The beginning

    def start(self) -> None:
        """Start the servers, without anybody who writes or follows."""
        first = self.servers[0]
        first.start()
        self.until(lambda: first.active, 10, "active")
        for server in self.servers[1:]:
            server.start()
        self.until(lambda: self.in_step(first), 60, "in step")

    def begin(self) -> None:
        self.start()
        addresses = [server.address for server in self.servers]
        for number, durability in enumerate((*STABILITIES, SAFE)):
            turn = number % len(addresses)
            self.people.write(durability, addresses[turn:] + addresses[:turn])
        for number in range(5):
            read_from = "any" if number > 2 else "active"
            stability = STABILITIES[number % 3]
            turn = number % len(addresses)
            follower = self.people.follow(
                f"follower {number}", stability, read_from, addresses[turn:] + addresses[:turn]
            )
            self.people.followers.append(follower)

    def in_step(self, owner: ServerProcess) -> bool:
        """Whether a server is active, and all others follow it and are in step."""
        if not owner.active or owner.owning is None:
            return False
        directory = owner.owning.standing.directory
        return all(
            s is owner
            or (
                s.owning is not None
                and s.owning.in_step
                # The replica of a replica hears of no owner.
                and s.owning.standing.row.owner in (directory, "")
                and s.bucket is not None
                and s.bucket.following is not None
                and s.bucket.following.connected
            )
            for s in self.servers
        )

    # Faults

    def _fault(self) -> None:
        rng = self.rng
        owners = [s for s in self.servers if s.active]
        self._without_owner = 0.0 if owners else self._without_owner + STEP_SECONDS
        if self._without_owner > 4 and not self.people.operating and rng.random() < 0.2:
            self._promote(rng.choice(self.servers))
        if rng.random() > 0.08:
            return
        server = rng.choice(owners) if owners and rng.random() < 0.5 else rng.choice(self.servers)
        other = rng.choice([s for s in self.servers if s is not server])
        kind = rng.random()
        if kind < 0.25:
            self._crash(server)
        elif kind < 0.32:
            self._stop(server)
        elif kind < 0.45:
            self.counts["pauses"] += 1
            server.pause(rng.choice((0.3, 2.0, 8.0)))
        elif kind < 0.65:
            self._cut(server, other)
        elif kind < 0.72:
            self.counts["resets"] += 1
            self.net.reset(server.host, other.host)
        elif kind < 0.75:
            self._lose_disk(server)
        elif not self.people.operating:
            force = rng.random() < 0.06
            self._promote(server, force=force, takeover=not force and rng.random() < 0.6)

    def _fail_over(self) -> None:
        """Have the active server write what nobody else gets, and crash; then another is promoted."""
        owner = next((s for s in self.servers if s.active), None)
        if owner is None:
            return
        others = [s for s in self.servers if s is not owner]
        cuts = self.cut_off(owner)

        def crash() -> None:
            self._crash(owner)
            self.net.heal(*cuts)
            self._promote(self.rng.choice(others))

        self._in(1.5, crash)

    def _take_over(self) -> None:
        others = [s for s in self.servers if not s.active and s.loop is not None]
        if others and not self.people.operating:
            self._promote(self.rng.choice(others), takeover=True)

    def cut_off(self, server: ServerProcess, *others: ServerProcess) -> list[tuple[str, str]]:
        """Have nothing pass between a server and others, all by default; return what is cut."""
        chosen = others or [s for s in self.servers if s is not server]
        cuts = [pair for s in chosen for pair in ((server.host, s.host), (s.host, server.host))]
        self.net.cuts.update(cuts)
        return cuts

    def _crash(self, server: ServerProcess) -> None:
        if server.loop is None:
            return
        self.counts["crashes"] += 1
        # Between any two steps of the moment that comes.
        self._timeline.run(self._timeline.now + self.rng.random() * STEP_SECONDS / 2)
        server.kill()
        self._in(self.rng.choice((0.5, 3.0, 8.0)), lambda: self._start(server))

    def _start(self, server: ServerProcess) -> None:
        if server.loop is None:
            server.start()

    def _stop(self, server: ServerProcess) -> None:
        if server.loop is None or server.server is None or not server.server._serving:
            return

        def stopped(clean: bool) -> None:
            self.counts["clean stops" if clean else "stops"] += 1
            self._in(self.rng.choice((0.5, 3.0)), lambda: self._start(server))

        server.stop(stopped)

    def _cut(self, server: ServerProcess, other: ServerProcess) -> None:
        self.counts["cuts of links"] += 1
        a, b = server.host, other.host
        cuts = self.rng.choice(([(a, b)], [(b, a)], [(a, b), (b, a)]))
        if self.rng.random() < 0.3:
            # From all others, but not from clients.
            cuts = self.cut_off(server)
        self.net.cuts.update(cuts)
        self._in(self.rng.choice((1.0, 4.0, 12.0)), lambda: self.net.heal(*cuts))

    def _lose_disk(self, server: ServerProcess) -> None:
        if self._disks_lost or not all(s.loop for s in self.servers):
            return
        self._disks_lost += 1
        self.counts["lost disks"] += 1
        server.lose_disk(tuple(s.address for s in self.servers if s is not server))
        self._in(1.0, lambda: self._start(server))

    def _promote(
        self, server: ServerProcess, *, force: bool = False, takeover: bool = False
    ) -> None:
        if force:
            # Whatever comes of it: an owner may be active before its answer is lost.
            self.truth.forced = 1 << 62
        self.order(server, force=force, takeover=takeover)

    def promoted(self, server: ServerProcess, *, force: bool = False) -> str:
        """Promote a server, and return the reason of a refusal, empty for none."""
        self.order(server, force=force)
        self.until(lambda: not self.people.operating, 40, "answered")
        return self.outcome

    def order(self, server: ServerProcess, *, force: bool = False, takeover: bool = False) -> None:
        """Order a promotion, and do not wait for its outcome."""
        kind = "forced promotions" if force else "takeovers" if takeover else "promotions"

        def ended(reason: str) -> None:
            self.outcome = reason
            self.counts[f"{kind}: {reason}" if reason else kind] += 1

        self.people.promote(server.address, force=force, takeover=takeover, ended=ended)

    # The end

    def settle(self) -> None:
        """Mend everything, and wait until one server is active and all others follow it."""
        self.net.heal()
        began = self._timeline.now
        at = 0
        while not any(self.in_step(server) for server in self.servers):
            waited = self._timeline.now - began
            if waited > SETTLE_SECONDS:
                raise Violation(f"no owner at the end: {self._where()}")
            self.pass_time()
            for server in self.servers:
                if waited > 15 and server.loop is None:
                    server.start()
            owners = [s for s in self.servers if s.active]
            self._without_owner = 0.0 if owners else self._without_owner + STEP_SECONDS
            if self._without_owner > 6 and waited > 20 and not self.people.operating:
                self._without_owner = 0.0
                at += 1
                force = waited > 150
                self.counts["forced at the end"] += force
                if force and not (self._disks_lost or self.truth.forced):
                    raise Violation(f"nobody can be promoted: {self._where()}")
                self._promote(self.servers[at % len(self.servers)], force=force)
        self.pass_time(3.0)
        for writer in self.people.writers:
            writer.stopping = True
        self.until(lambda: all(w.done for w in self.people.writers), 60, "the end of all writers")
        self.until(lambda: any(map(self.in_step, self.servers)), 60, "in step at the end")

    def _highs(self, server: ServerProcess) -> np.ndarray[Any, Any]:
        assert server.bucket is not None
        return server.bucket.bucket.partitions.durable[USED]

    def check(self) -> None:
        (owner,) = (s for s in self.servers if s.active)
        self.until(
            lambda: all((self._highs(s) == self._highs(owner)).all() for s in self.servers),
            60,
            "equal",
        )
        assert owner.bucket is not None
        table = owner.bucket.bucket.partitions
        ends = {p: (int(table.newest_id[p]), int(table.high[p])) for p in USED}
        states = {p: self.truth.state(p, *end) for p, end in ends.items()}
        for p, end in ends.items():
            self.truth.check_once(p, *end)
        self._check_acknowledged(table.logs)
        self._give_up_lost_disks(owner)
        readers = [
            self.people.follow(f"reader of {s.host}", "disk", "any", [s.address])
            for s in self.servers
        ]
        self.until(lambda: all(reader.done for reader in readers), 60, "read")
        for reader in (*readers, *self.people.followers):
            self.until(
                lambda r=reader: all(r.state(p) == states[p] for p in USED),  # type: ignore[misc]
                90,
                f"with what is there: {reader.name}",
            )

    def _give_up_lost_disks(self, owner: ServerProcess) -> None:
        """Have an active server go on without directories that are gone for good: nobody is rolled back by that."""
        there = {s.owning.standing.directory for s in self.servers if s.owning is not None}
        assert owner.owning is not None
        if not owner.owning.standing.row.counted <= there:
            self.counts["given up"] += 1
            self.order(owner, force=True, takeover=False)
            self.until(lambda: not self.people.operating, 40, "answered")
            self.until(lambda: self.in_step(owner), 60, "in step again")

    def _check_acknowledged(self, logs: Sequence[Any]) -> None:
        """Nothing acknowledged is missing; what was at ``disk`` only may be, and is kept aside then."""
        undone = self._undone()
        for writer in self.people.writers:
            for place in writer.acknowledged:
                p, given, seqno = place
                numbered = self.truth.rows[place]
                if logs[p].gave(given, seqno) or numbered.epoch < self.truth.forced:
                    continue
                self.counts[f"undone at {writer.durability}"] += 1
                if writer.durability == SAFE:
                    raise Violation(f"lost: {numbered}, acknowledged to {writer.name}")
                kept = undone.get((p, numbered.row.key), 0)
                if writer.durability == "disk" and kept < seqno and not self._disks_lost:
                    raise Violation(
                        f"undone and not kept: {numbered}, acknowledged to {writer.name}"
                    )

    def _undone(self) -> dict[tuple[int, bytes], int]:
        """Return the largest seqno that servers have undone of each key."""
        found: dict[tuple[int, bytes], int] = {}
        for server in self.servers:
            for file in (server.data / "undone").glob("*.jsonl"):
                for line in file.read_text().splitlines()[1:]:
                    row = json.loads(line)
                    place = row["partition"], base64.b64decode(row["key"])
                    found[place] = max(found.get(place, 0), row["seqno"])
        return found
