"""World of a set of servers that replicate: whole servers, the SDK, an operator, and faults, all from one seed.

Servers are killed between any two of their steps and at failpoints, lose what was not synced, are paused, cut off in one
direction or both, stopped cleanly, and lose a disk; replicas are promoted, also in the middle of a snapshot, take over, or are
forced. At the end all is well again, and compared: see ``check``.
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

from tests.raw import cells_for
from tests.simulation.calling import Net
from tests.simulation.looping import SimulatedLoop, Timeline, running
from tests.simulation.people import SAFE, People
from tests.simulation.power import Medium
from tests.simulation.processes import ServerProcess, simulate
from tests.simulation.truth import USED, Truth, Violation
from upr.engine import follower
from upr.engine.bucket import Bucket
from upr_protocol.errors import UnavailableError
from upr_protocol.limits import FRAME_BYTES

STEP_SECONDS = 0.25
SETTLE_SECONDS = 400.0
STABILITIES = ("memory", "disk", SAFE)
DIE_AT = (
    "journal.",
    "flush.",
    "merge.",
    "recovery.",
    "promote.",
    "proof.",
    "positions.",
    "shutdown.",
)
"""How the names of failpoints begin at which servers die."""


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
        self.medium = Medium(counts)
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
        self._frame_bytes = self.rng.choice((FRAME_BYTES, 300))
        self._faults = self.rng.choice((0.03, 0.08, 0.15))
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
        self._received: Callable[[Bucket], None] = lambda _: None
        self._deaf: SimulatedLoop | None = None
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
            self.medium.watch(patch)
            self.truth.watch(patch)
            patch.setattr(follower, "FRAME_BYTES", self._frame_bytes)
            patch.setattr(follower, "READ_BYTES", self._frame_bytes)
            receive = Bucket.receive

            def received(bucket: Bucket, *what: Any) -> Any:
                if running() is self._deaf:
                    raise UnavailableError("the rest is lost on the way")
                outcome = receive(bucket, *what)
                self._received(bucket)
                return outcome

            patch.setattr(Bucket, "receive", received)
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
            at = list(itertools.accumulate(self.rng.randint(15, 40) for _ in range(3)))
            do = [self._fail_over, self._take_over, self._fail_over_in_a_stretch]
            self.rng.shuffle(do)
            for step in range(steps):
                if step in at:
                    do[at.index(step)]()
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
                s.ownership and (s.ownership.standing, s.ownership.waiting),
            )
            for s in self.servers
        ]

    # The beginning

    def start(self) -> None:
        """Start the servers, without anybody who writes or follows."""
        first = self.servers[0]
        first.start()
        self.make_first(first)
        self.until(lambda: first.active, 10, "active")
        for server in self.servers[1:]:
            server.start()
        self.until(lambda: self.in_step(first), 60, "in step")

    def make_first(self, first: ServerProcess) -> None:
        """Have the first server be active, where it is not by itself; here nothing."""

    def begin(self) -> None:
        self.start()
        addresses = [server.address for server in self.servers]
        first = self.rng.randrange(6)
        for number, durability in enumerate(STABILITIES):
            turn = (first + number) % len(addresses)
            self.people.write(durability, addresses[turn:] + addresses[:turn])
        for number in range(first, first + 3):
            read_from = "any" if number % 2 else "active"
            stability = STABILITIES[number % 3]
            turn = number % len(addresses)
            one = self.people.follow(
                f"follower {number}", stability, read_from, addresses[turn:] + addresses[:turn]
            )
            self.people.followers.append(one)

    def in_step(self, owner: ServerProcess) -> bool:
        """Whether a server is active, and all others follow it and are in step."""
        if not owner.active or owner.ownership is None:
            return False
        directory = owner.ownership.standing.directory
        return all(
            s is owner
            or (
                s.ownership is not None
                and s.ownership.in_step
                # The replica of a replica hears of no owner.
                and s.ownership.standing.row.owner in (directory, "")
                and s.bucket is not None
                and s.bucket.upstream_state is not None
                and s.bucket.upstream_state.connected
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
        self._bury()
        if rng.random() > self._faults:
            return
        server = rng.choice(owners) if owners and rng.random() < 0.5 else rng.choice(self.servers)
        other = rng.choice([s for s in self.servers if s is not server])
        kind = rng.random()
        if kind < 0.17:
            self._crash(server)
        elif kind < 0.25:
            server.dies_at = rng.choice(DIE_AT)
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

    def _fail_over_in_a_stretch(self) -> None:
        """Have a replica fall behind what is in the tail, and promote it while it catches up."""
        owner = next((s for s in self.servers if s.active), None)
        others = [s for s in self.servers if s is not owner and s.bucket is not None]
        if owner is None or not others or self.people.operating:
            return
        behind = self.rng.choice(others)
        cuts = self.cut_off(owner, behind)
        self.pass_time(self.rng.choice((1.0, 3.0)))
        if owner.loop is not None and owner.bucket is not None:
            owner.loop.create_task(owner.bucket.flusher.flush(wanted=True))
        self.pass_time(0.5)
        self.net.lose(owner.host, behind.host)
        self.net.reset(owner.host, behind.host)
        self.net.heal(*cuts)
        if self.stops_in_a_stretch(owner, behind, self.rng.randint(1, 4)):
            self.counts["cut off in a stretch"] += 1
            self._crash(owner, at_once=True)
            # It is not in step.
            self._promote(behind, force=True)

    def stops_in_a_stretch(self, owner: ServerProcess, behind: ServerProcess, parts: int) -> bool:
        """Let time pass until a server has so many parts of a snapshot; its upstream is dead then, and the rest is lost.

        Returns: whether it came to that.
        """
        found = 0

        def received(bucket: Bucket) -> None:
            nonlocal found
            table = bucket.partitions
            if running() is behind.loop and (table.high[USED] > table.complete[USED]).any():
                found += 1
                if found == parts and owner.loop is not None:
                    self.net.lose(owner.host, behind.host)
                    owner.loop.alive, self._deaf = False, behind.loop

        self._received = received
        for _ in range(200):
            if found < parts:
                self.pass_time(0.02)
        self._received, self._deaf = lambda _: None, None
        return found >= parts

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

    def _crash(self, server: ServerProcess, *, at_once: bool = False) -> None:
        if server.loop is None:
            return
        if not at_once:
            # Between any two steps of the moment that comes.
            self._timeline.run(self._timeline.now + self.rng.random() * STEP_SECONDS / 2)
        self._killed(server)

    def _killed(self, server: ServerProcess) -> None:
        self.counts["crashes"] += 1
        server.kill()
        if self.rng.random() < 0.5:
            self.medium.lose_power(server.data, self.rng)
        self._in(self.rng.choice((0.5, 3.0, 8.0)), lambda: self._start(server))

    def _bury(self) -> None:
        """Have servers that died at a failpoint be killed, and started again later."""
        for server in self.servers:
            if server.died:
                self.counts["died at a failpoint"] += 1
                self._killed(server)

    def no_more_deaths(self) -> None:
        """Have no server die at a failpoint any more; who did is started again later."""
        for server in self.servers:
            server.dies_at = ""
        self._bury()

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
        # Also where it ends at once: one that is dead looks as it did when it died.
        self.no_more_deaths()
        began = self._timeline.now
        at = 0
        while not any(self.in_step(server) for server in self.servers):
            waited = self._timeline.now - began
            if waited > SETTLE_SECONDS:
                raise Violation(f"no owner at the end: {self._where()}")
            self.pass_time()
            self.no_more_deaths()
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
                if force and not self._disks_lost:
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
        there = {s.ownership.standing.directory for s in self.servers if s.ownership is not None}
        assert owner.ownership is not None
        if not owner.ownership.standing.row.counted <= there:
            self.counts["given up"] += 1
            self.order(owner, force=True, takeover=False)
            self.until(lambda: not self.people.operating, 40, "answered")
            self.until(lambda: self.in_step(owner), 60, "in step again")

    def _check_acknowledged(self, logs: Sequence[Any]) -> None:
        """Nothing acknowledged is missing; what was at ``disk`` only may be, and is kept aside then."""
        undone = {server.data.name: self._undone(server) for server in self.servers}
        kept = set().union(*undone.values())
        deleted: dict[tuple[int, bytes, str], int] = {}
        for (p, _, seqno), one in self.truth.rows.items():
            if one.row.value is None:
                place = p, one.row.key, one.place
                deleted[place] = max(deleted.get(place, 0), seqno)
        for writer in self.people.writers:
            for told in writer.acknowledged:
                p, given, seqno = told
                numbered = self.truth.rows[told]
                if logs[p].gave(given, seqno):
                    continue
                self.counts[f"undone at {writer.durability}"] += 1
                if writer.durability == SAFE:
                    if not self.truth.may_be_lost(*told):
                        raise Violation(f"lost: {numbered}, acknowledged to {writer.name}")
                    self.counts["lost by force"] += 1
                # A disk that was lost has taken it along.
                there = undone.get(numbered.place)
                if writer.durability == "memory" or there is None:
                    continue
                if seqno <= self.truth.received_anew.get((p, numbered.place), 0):
                    # Who undid it then is another one, which had it too.
                    there = {key: max(u.get(key, 0) for u in undone.values()) for key in kept}
                # A deletion behind it may have been purged there.
                purged = deleted.get((p, numbered.row.key, numbered.place), 0)
                if max(there.get((p, numbered.row.key), 0), purged) < seqno:
                    raise Violation(
                        f"undone and not kept: {numbered}, acknowledged to {writer.name}"
                    )

    def _undone(self, server: ServerProcess) -> dict[tuple[int, bytes], int]:
        """Return the largest seqno that a server has undone of each key."""
        written = {(p, *one.row) for (p, _, _), one in self.truth.rows.items()}
        found: dict[tuple[int, bytes], int] = {}
        for file in (server.data / "undone").glob("*.jsonl"):
            for line in file.read_text().splitlines()[1:]:
                row = json.loads(line)
                key, value = base64.b64decode(row["key"]), row.get("value")
                value = None if value is None else base64.b64decode(value)
                place = row["partition"], key
                told = row.get("further", {}).items()
                cells = {int(id_): base64.b64decode(cell) for id_, cell in told}
                if (row["partition"], row["seqno"], key, value) not in written or (
                    cells != cells_for(key, value)
                ):
                    raise Violation(f"kept what nobody wrote: {row}")
                found[place] = max(found.get(place, 0), row["seqno"])
        return found
