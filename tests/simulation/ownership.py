"""World of a replica set: servers, an operator and faults around ``upr_protocol.ownership``, all from one seed.

Each server holds PARTITIONS partitions as blocks (start, end, horizon, rows); a row is (seqno, key, value, id). What it
decides about ownership it asks the code under test; the rest is as small as it can be. Each server is a process that
crashes, pauses, loses its disk, or is cut off from another; the operator promotes at any time, and at the end, when
all is well again, until there is an owner.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from upr_protocol.errors import UprError
from upr_protocol.ownership import (
    HELD,
    Ask,
    Claim,
    Follow,
    Held,
    Outdated,
    Promise,
    Row,
    Serve,
    Standing,
)

PARTITIONS = 2
Block = tuple[int, int, int, tuple[tuple[int, str, int, int], ...]]


class Violation(Exception):
    """Something that was promised does not hold."""


@dataclass
class Part:
    """A partition of a server: blocks, how many of them are synced, and the log as (id, seqno, epoch)."""

    blocks: list[Block] = field(default_factory=list)
    synced: int = 0
    log: list[tuple[int, int, int]] = field(default_factory=lambda: [(1, 0, 1)])

    def high(self, *, durable: bool = False) -> int:
        blocks = self.blocks[: self.synced] if durable else self.blocks
        return blocks[-1][1] if blocks else 0

    def marker(self, *, durable: bool = False) -> int:
        """Return the last complete marker."""
        found = horizon = 0
        for block in self.blocks[: self.synced] if durable else self.blocks:
            horizon = max(horizon, block[2])
            if horizon <= block[1]:
                found = block[1]
        return found

    def record_at(self, seqno: int) -> tuple[int, int, int]:
        return next((r for r in reversed(self.log) if r[1] < seqno), self.log[0])

    def truncate(self, seqno: int) -> None:
        """Cut off above the newest marker at or below a seqno."""
        horizon = kept = 0
        for i, block in enumerate(self.blocks):
            horizon = max(horizon, block[2])
            if horizon <= block[1] <= seqno:
                kept = i + 1
        self.blocks, self.synced = self.blocks[:kept], kept

    def follow(self, log: list[tuple[int, int, int]]) -> bool:
        """Take over a log, and undo what is not on it; return whether something was undone."""
        ids = [one[0] for one in log]
        undone = False
        if self.log[-1][0] != ids[-1]:
            seqno = 0
            for j, (known, _, _) in reversed(list(enumerate(self.log))):
                if known in ids:
                    i = ids.index(known)
                    nexts = [log[i + 1][1]] if i + 1 < len(log) else []
                    nexts += [self.log[j + 1][1]] if j + 1 < len(self.log) else []
                    seqno = min(nexts, default=1 << 60)
                    break
            if max([self.high(), *(block[2] for block in self.blocks)]) > seqno:
                self.truncate(seqno)
                undone = True
        self.log = list(log)
        return undone


class Server:
    """A server: what is on its disk, and what its process knows."""

    def __init__(self, number: int, row: Row) -> None:
        self.number = number
        self.disks = 0
        self.up, self.paused = True, False
        self.parts = [Part() for _ in range(PARTITIONS)]
        self.standing = Standing(self.directory, row)
        self.served = 0
        self.clean = False
        self.boot = 0
        self.forget()

    @property
    def directory(self) -> str:
        return f"{self.number}.{self.disks}"

    def forget(self) -> None:
        """Lose what only the process knew."""
        self.boot += 1
        self.active = False
        self.claim: Claim | None = None
        self.source: tuple[Server, int, int] | None = None
        self.pieces: list[list[Block]] = [[] for _ in range(PARTITIONS)]
        self.acks: dict[str, list[int]] = {}
        self.stored: dict[str, tuple[int, int]] = {}
        self.settled: frozenset[str] = frozenset()
        self.floor = [0] * PARTITIONS

    def lose_disk(self) -> None:
        self.disks += 1
        self.parts = [Part() for _ in range(PARTITIONS)]
        self.standing = Standing(self.directory, Row(0, 0, "", False, frozenset()))
        self.served = 0

    def held(self) -> Held:
        held = np.zeros(PARTITIONS, HELD)
        for i, part in enumerate(self.parts):
            marker = part.marker(durable=True)
            epoch = part.record_at(marker)[2] if marker else 0
            held[i] = (epoch, part.log[-1][0], marker, part.high(durable=True))
        return held

    def sync(self) -> None:
        for part in self.parts:
            part.synced = len(part.blocks)

    def step_down(self) -> None:
        self.active = False
        self.acks, self.stored = {}, {}


class World:
    """Servers of one set under faults.

    Attributes:
        counts: how often what happened.
    """

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.counts: Counter[str] = Counter()
        number = 3 + (seed % 4 == 0)
        row = Row(1, 1, "0.0", True, frozenset({"1.0", "2.0"}))
        self.servers = [Server(i, row) for i in range(number)]
        first = self.servers[0]
        first.active, first.served = True, 1
        first.settled = row.counted
        self.cut: set[frozenset[int]] = set()
        self.ids, self.values, self.lost = 1, 0, 0
        self.history: list[dict[tuple[int, int], tuple[str, int]]] = [{} for _ in range(PARTITIONS)]
        self.acked: list[set[tuple[int, int]]] = [set() for _ in range(PARTITIONS)]

    # The network.

    def linked(self, a: Server, b: Server) -> bool:
        """Return whether b answers a now."""
        return b.up and not b.paused and frozenset((a.number, b.number)) not in self.cut

    def at(self, directory: str) -> Server | None:
        return next((s for s in self.servers if s.directory == directory), None)

    # Data.

    def write(self, server: Server) -> None:
        if not server.active:
            return
        p = self.r.randrange(PARTITIONS)
        part = server.parts[p]
        seqno, given = part.high() + 1, part.log[-1][0]
        self.values += 1
        key = self.r.choice("abc")
        if (given, seqno) in self.history[p]:
            raise Violation(f"seqno {seqno} of partition {p} was given twice under id {given}")
        self.history[p][given, seqno] = key, self.values
        part.blocks.append((seqno - 1, seqno, seqno, ((seqno, key, self.values, given),)))
        self.counts["writes"] += 1

    def merge(self, part: Part) -> None:
        marker = part.marker(durable=True)
        inside = [b for b in part.blocks[: part.synced] if b[1] <= marker]
        if len(inside) < 2:
            return
        a = self.r.randrange(len(inside) - 1)
        b = min(len(inside) - 1, a + self.r.randint(1, 3))
        blocks = part.blocks[a : b + 1]
        rows = {row[1]: row for block in blocks for row in block[3]}
        merged = (
            blocks[0][0],
            blocks[-1][1],
            max(block[2] for block in blocks),
            tuple(sorted(rows.values())),
        )
        part.blocks[a : b + 1] = [merged]
        part.synced -= b - a

    # Following.

    def upstream(self, server: Server) -> Server | None:
        """Return whom a server follows, None when the stream is broken."""
        if server.source is None:
            return None
        other, boot, epoch = server.source
        gone = other.boot != boot or not self.linked(server, other)
        if gone or (epoch and not (other.active and other.standing.row.epoch == epoch)):
            server.source = None
            return None
        return other

    def join(self, server: Server, other: Server, *, gathering: bool = False) -> None:
        """Follow another server, as far as ownership lets it."""
        if other is server or not self.linked(server, other):
            return
        self.meet(other, server.standing.epoch)
        epoch = other.standing.row.epoch if other.active else 0
        if not gathering and (not other.active or epoch < server.standing.epoch):
            return
        server.served = 0
        if not gathering:
            server.standing = server.standing.learned(other.standing.row)
        for mine, its in zip(server.parts, other.parts, strict=True):
            self.counts["rollbacks"] += mine.follow(its.log)
        server.pieces = [[] for _ in range(PARTITIONS)]
        server.source = other, other.boot, epoch

    def receive(self, server: Server) -> None:
        """Receive the next block of a partition, perhaps in two pieces of one stretch."""
        other = self.upstream(server)
        if other is None:
            return
        p = self.r.randrange(PARTITIONS)
        mine = server.parts[p]
        if not server.pieces[p]:
            block = next((b for b in other.parts[p].blocks if b[1] > mine.high()), None)
            if block is None:
                return
            start, end, horizon = max(block[0], mine.high()), block[1], block[2]
            rows = tuple(row for row in block[3] if row[0] > start)
            if len(rows) > 1 and self.r.random() < 0.6:
                cut = rows[0][0]
                pieces = [(start, cut, horizon, rows[:1]), (cut, end, horizon, rows[1:])]
            else:
                pieces = [(start, end, horizon, rows)]
            server.pieces[p] = [piece for piece in pieces if piece[0] < piece[1]]
        piece = server.pieces[p].pop(0)
        if piece[0] != mine.high():
            raise Violation(f"a gap: {piece[:2]} after {mine.high()}")
        mine.blocks.append(piece)

    def report(self, server: Server) -> None:
        """Tell the owner what this server holds, and hear the row."""
        other = self.upstream(server)
        if other is None or not other.active:
            return
        self.meet(other, server.standing.epoch)
        if not other.active:
            return
        server.standing = server.standing.learned(other.standing.row)
        other.stored[server.directory] = server.standing.row.age
        other.acks[server.directory] = [part.marker(durable=True) for part in server.parts]

    def meet(self, server: Server, epoch: int) -> None:
        """Have a server meet a higher epoch."""
        server.standing = server.standing.met(epoch)
        if server.active and not server.standing.owns:
            self.counts["fenced"] += 1
            server.step_down()

    # Acknowledging, and who is counted.

    def acknowledge(self, server: Server) -> None:
        """Acknowledge at replicated(1) what a counted server has."""
        if not server.active:
            return
        row = server.standing.row
        others = row.counted - {server.directory}
        if all(server.stored.get(one, (0, 0)) >= row.age for one in others):
            # Each of them knows of all the others now: whoever is promoted asks them all.
            server.settled = row.counted
        acks = [server.acks[d] for d in others & server.settled if d in server.acks]
        for p, part in enumerate(server.parts):
            stable = min(max((ack[p] for ack in acks), default=0), part.high(durable=True))
            for seqno in range(1, stable + 1):
                self.acked[p].add((part.record_at(seqno)[0], seqno))
            self.counts["acknowledged"] += stable > 0

    def recount(self, server: Server) -> None:
        """Count one more, or let the owner itself go."""
        if not server.active:
            return
        row = server.standing.row
        for directory in sorted(row.counted):
            # It asks those that are counted whether they know a higher epoch.
            other = self.at(directory)
            if other is not None and self.linked(server, other):
                self.meet(server, other.standing.epoch)
        if not server.active:
            return
        for other in self.servers:
            ack = server.acks.get(other.directory)
            if ack is None or other.directory in row.counted:
                continue
            near = all(
                a >= p.marker(durable=True) - 2 for a, p in zip(ack, server.parts, strict=True)
            )
            if near and self.upstream(other) is server:
                server.standing = server.standing.learned(row.counting(other.directory))
                self.counts["counted"] += 1
                return
        stored = {d for d, age in server.stored.items() if age >= row.age}
        holding = {d: np.array(ack, np.uint64) for d, ack in server.acks.items()}
        needed = np.array(server.floor, np.uint64)
        for p, part in enumerate(server.parts):
            acked = [a[p] for d, a in server.acks.items() if d in row.counted]
            needed[p] = max(int(needed[p]), min(max(acked, default=0), part.high(durable=True)))
        left = row.without(server.directory, needed, holding, stored)
        if left is not None:
            server.standing = server.standing.learned(left)
            self.counts["not counted itself"] += 1

    # Changing the owner.

    def claims(self, server: Server, above: int = 0) -> None:
        basis = server.standing.row
        try:
            row = server.standing.claim(above=above)
        except UprError:
            self.counts["not counted"] += 1
            return
        server.step_down()
        promised = server.standing.promise(row.epoch, server.directory)
        assert promised is not None
        server.standing = promised
        server.claim = Claim(basis, row)
        server.source = None
        self.counts["claims"] += 1

    def ask(self, server: Server, other: Server) -> None:
        """Ask another server, or the claiming one itself, for its promise."""
        claim = server.claim
        assert claim is not None
        if other is not server and not self.linked(server, other):
            return
        known = other.standing.row
        after = other.standing.promise(claim.row.epoch, server.directory)
        if after is None:
            claim.refused(other.standing.row, other.standing.epoch)
            return
        other.standing = after
        if other is not server:
            other.step_down()
            other.claim, other.source = None, None
        other.sync()
        confirmed = other.standing.confirms(claim.row, other.served)
        claim.promised(Promise(other.directory, known, other.held(), confirmed))

    def drive(self, server: Server) -> None:
        """Do the next step of a claim."""
        claim = server.claim
        if claim is None:
            return
        server.sync()
        step = claim.next(server.held())
        if isinstance(step, Ask):
            claim.asked(step.directories)
            for directory in sorted(step.directories, key=lambda _: self.r.random()):
                other = self.at(directory)
                if other is not None:
                    self.ask(server, other)
        elif isinstance(step, Outdated):
            server.claim = None
            server.standing = server.standing.learned(step.row)
            self.claims(server, step.epoch)
        elif isinstance(step, Follow):
            other = self.at(step.directory)
            if other is None or not self.linked(server, other):
                server.claim, server.source = None, None
                self.counts["given up"] += 1
            elif self.upstream(server) is not other:
                self.join(server, other, gathering=True)
            else:
                self.receive(server)
        else:
            self.serve(server, claim, step)

    def serve(self, server: Server, claim: Claim, step: Serve) -> None:
        """Store the row; a crash may come before the rest."""
        server.standing = server.standing.learned(step.row)
        server.claim = None
        if self.r.random() < 0.05:
            self.crash(server)
            return
        for p, part in enumerate(server.parts):
            if not step.record[p]:
                self.counts["clean"] += 1
                continue
            marker = int(step.marker[p])
            part.truncate(marker)
            self.ids += 1
            kept = [one for one in part.log if one[1] <= marker]
            part.log = [*kept, (self.ids, marker, step.row.epoch)]
            self.counts["records"] += 1
        server.served = step.row.epoch
        server.active, server.clean, server.source = True, False, None
        server.acks, server.stored = {}, {}
        server.settled = claim.basis.counted
        server.floor = [part.marker() for part in server.parts]
        self.counts["promotions"] += 1

    # Faults.

    def crash(self, server: Server, *, clean: bool = False, lose: bool = False) -> None:
        if clean:
            server.sync()
        server.clean = clean
        server.up = server.paused = False
        for part in server.parts:
            part.blocks = part.blocks[: part.synced]
        server.forget()
        if lose:
            server.lose_disk()
            self.lost += 1

    def start(self, server: Server) -> None:
        server.up = True
        if not server.clean:
            # Durably: a clean stop of a process that served nothing proves nothing.
            server.served = 0
        row = server.standing.row
        if row.owner == server.directory:
            # Clean or not: it asks first, and claims anew.
            self.claims(server)

    def fault(self, server: Server) -> None:
        f = self.r.random()
        if f < 0.3:
            if server.up:
                self.crash(server, clean=self.r.random() < 0.3)
            else:
                self.start(server)
        elif f < 0.45:
            server.paused = server.up and not server.paused
        elif f < 0.65:
            other = self.r.choice([s for s in self.servers if s is not server])
            self.cut ^= {frozenset((server.number, other.number))}
        elif f < 0.67 and not self.lost and all(s.up for s in self.servers):
            self.crash(server, lose=True)
        elif f < 0.85:
            self.heal()

    def heal(self) -> None:
        self.cut.clear()
        for server in self.servers:
            server.paused = False
            if not server.up:
                self.start(server)

    def operator(self, server: Server) -> None:
        """Promote a server, as somebody would who sees no owner or wants another one."""
        if server.claim is None and not server.active:
            self.counts["operator"] += 1
            self.claims(server)

    def step(self, *, faults: bool = True) -> None:
        server = self.r.choice(self.servers)
        if faults and self.r.random() < 0.02:
            owners = [s for s in self.servers if s.active]
            self.fault(self.r.choice(owners) if owners and self.r.random() < 0.4 else server)
            return
        if not server.up or server.paused:
            return

        def by(chance: float) -> bool:
            return self.r.random() < chance

        if by(0.35):
            self.write(server)
        if by(0.3):
            server.sync()
        if by(0.05):
            self.merge(self.r.choice(server.parts))
        if server.claim is None and by(0.7):
            for _ in range(self.r.randint(1, 6)):
                self.receive(server)
        if by(0.5):
            self.report(server)
        if by(0.4):
            self.acknowledge(server)
        if by(0.1):
            self.recount(server)
        if server.claim is None and not server.active and self.upstream(server) is None:
            self.join(server, self.r.choice(self.servers))
        if by(0.6):
            self.drive(server)
        if server.claim is not None and by(0.01 if faults else 0.002):
            server.claim, server.source = None, None
            self.counts["given up"] += 1
        if faults and by(0.01):
            self.operator(server)

    # The end.

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for i in range(9000):
            if i % 100 == 0:
                # One that died on the way to serve is started again.
                self.heal()
            self.step(faults=False)
            if not any(s.active or s.claim for s in self.servers) and i % 40 == 0:
                self.operator(self.r.choice(self.servers))
            if i > 400 and self.settled():
                break
        else:
            if not self.lost:
                raise Violation(f"no owner at the end: {[s.standing for s in self.servers]}")
            # The only copy may be gone: nobody promotes itself.
            self.counts["no owner: a disk was lost"] += 1
            return
        self.check()

    def settled(self) -> bool:
        owners = [s for s in self.servers if s.active]
        return len(owners) == 1 and all(
            s is owners[0] or self.upstream(s) is owners[0] for s in self.servers
        )

    def check(self) -> None:
        (owner,) = (s for s in self.servers if s.active)
        for p, part in enumerate(owner.parts):
            for given, seqno in sorted(self.acked[p]):
                if seqno > part.high() or part.record_at(seqno)[0] != given:
                    raise Violation(f"lost: acknowledged {seqno} of partition {p}, id {given}")
        for server in self.servers:
            for p, part in enumerate(server.parts):
                marker, truth, held = part.marker(), {}, {}
                for seqno in range(1, marker + 1):
                    key, value = self.history[p][part.record_at(seqno)[0], seqno]
                    truth[key] = value
                for block in part.blocks:
                    if block[1] <= marker:
                        held.update({row[1]: row[2] for row in block[3]})
                if held != truth:
                    raise Violation(f"state of server {server.number} at {marker} is not true")
