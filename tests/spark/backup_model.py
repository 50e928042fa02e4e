"""A server and a storage in memory for backups: one rolls back and deduplicates, the other breaks off at any step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import BinaryIO

from upr_spark.backup.chain import Entry, FileRef, Manifest, RolledBack, segments
from upr_spark.backup.documents import Json, sha256
from upr_spark.backup.errors import HistoryChangedError, LockedError
from upr_spark.backup.repository import Repository
from upr_spark.backup.run import CutPoint, GroupResult, PinnedAt, Run
from upr_spark.backup.storage import Sink

Row = tuple[int, str, str | None]
"""seqno, key, value; None for a delete."""
State = dict[str, str]

PARTITIONS = 3
KEYS = 4


class Crash(Exception):
    """The process is gone."""


class MemoryStorage:
    """Objects in memory. Each step that changes something may be the last one, before or after it had its effect."""

    def __init__(self, random: Random) -> None:
        self.objects: dict[str, bytes] = {}
        self.steps_left = -1
        self._random = random

    def _step(self) -> bool:
        """Return whether this step is the last one; it may also end before its effect."""
        if self.steps_left < 0:
            return False
        self.steps_left -= 1
        if self.steps_left >= 0:
            return False
        if self._random.random() < 0.5:
            raise Crash
        return True

    @property
    def location(self) -> str:
        return "memory"

    def sweep(self) -> None:
        pass

    def read(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def size(self, name: str) -> int:
        return len(self.read(name))

    def open(self, name: str) -> BinaryIO:
        raise NotImplementedError

    def create(self, name: str) -> Sink:
        raise NotImplementedError

    def put_if_absent(self, name: str, data: bytes) -> bool:
        last = self._step()
        made = self.objects.setdefault(name, data) is data
        if last:
            raise Crash
        return made

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))

    def delete(self, name: str) -> None:
        last = self._step()
        self.objects.pop(name, None)
        if last:
            raise Crash


class NoLock:
    """A lock that nobody asks: what is committed must be right without it."""

    def keep(self, now: bool = False) -> None:
        pass


@dataclass
class Partition:
    """One partition: what was ever written on its branch, and what deduplication left of that."""

    log: list[tuple[str, int]]
    all_rows: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    high: int = 0


def newest_state(rows: list[Row]) -> State:
    """Return the state: of each key the row with the highest seqno."""
    newest: dict[str, Row] = {}
    for row in sorted(rows):
        newest[row[1]] = row
    return {key: value for _, key, value in newest.values() if value is not None}


class ModelServer:
    """Writes, cuts, rollbacks and deduplication, all at random.

    Attributes:
        expected: the state of each partition at each cut that was ever made.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ids = 0
        self.partitions = [Partition([(self._new_id(), 0)]) for _ in range(PARTITIONS)]
        self.cuts: dict[str, CutPoint] = {}
        self.expected: dict[str, list[State]] = {}

    def _new_id(self) -> str:
        self.ids += 1
        return f"{self.ids:016x}"

    def write(self) -> None:
        at = self.random.randrange(PARTITIONS)
        partition = self.partitions[at]
        partition.high += 1
        value = None if self.random.random() < 0.3 else f"{partition.high}/{self.ids}"
        row = (partition.high, f"{at}k{self.random.randrange(KEYS)}", value)
        partition.all_rows.append(row)
        partition.rows.append(row)

    def deduplicate(self) -> None:
        """Drop a row that is superseded, where no cut lies between the two."""
        at = self.random.randrange(PARTITIONS)
        rows = self.partitions[at].rows
        pins = [cut.pins[at].seqno for cut in self.cuts.values()]
        for row in rows:
            newer = next((r for r in rows if r[1] == row[1] and r[0] > row[0]), None)
            if newer and not any(row[0] <= pin < newer[0] for pin in pins):
                rows.remove(row)
                return

    def roll_back(self) -> None:
        """Lose a partition's newest mutations; cuts above go with them."""
        at = self.random.randrange(PARTITIONS)
        partition = self.partitions[at]
        seqno = self.random.randint(0, partition.high)
        partition.all_rows = [row for row in partition.all_rows if row[0] <= seqno]
        partition.rows = list(partition.all_rows)
        partition.high = seqno
        partition.log = [record for record in partition.log if record[1] <= seqno]
        partition.log.append((self._new_id(), seqno))
        self.cuts = {n: cut for n, cut in self.cuts.items() if cut.pins[at].seqno <= seqno}

    def make_cut(self) -> CutPoint:
        name = f"cut-{len(self.expected)}"
        pins = {n: PinnedAt(p.log[-1][0], p.high) for n, p in enumerate(self.partitions)}
        self.cuts[name] = CutPoint(name, len(self.expected), pins)
        self.expected[name] = [newest_state(p.all_rows) for p in self.partitions]
        return self.cuts[name]

    def common(self, at: int, failover_id: str) -> int:
        """Return up to where a branch is this partition's history; 0 when it is not known any more."""
        log = self.partitions[at].log
        for index, record in enumerate(log):
            if record[0] == failover_id:
                return log[index + 1][1] if index + 1 < len(log) else self.partitions[at].high
        return 0

    def true_markers(self, at: int, low: int, high: int) -> list[int]:
        """Return the seqnos in (low, high] at which what is sent of it is a whole state."""
        partition = self.partitions[at]
        found = []
        for marker in range(low + 1, high + 1):
            newest: dict[str, Row] = {}
            for row in partition.all_rows:
                if low < row[0] <= marker:
                    newest[row[1]] = row
            if all(row in partition.rows for row in newest.values()):
                found.append(marker)
        return found


class ModelSource:
    """The model server as a run sees it; something may happen before each partition is read."""

    def __init__(self, server: ModelServer, storage: MemoryStorage, world: "World") -> None:
        self._server = server
        self._storage = storage
        self._world = world

    def make_cut(self) -> CutPoint:
        return self._server.make_cut()

    def find_cut(self, name: str) -> CutPoint | None:
        return self._server.cuts.get(name)

    def release(self, name: str) -> None:
        self._server.cuts.pop(name, None)

    def read_group(
        self, starts: Mapping[int, Entry | None], cut: CutPoint, path: str
    ) -> GroupResult:
        rows: list[tuple[int, Row]] = []
        entries, rollbacks = {}, []
        for at, entry in starts.items():
            self._world.disturb()
            if cut.name not in self._server.cuts:
                raise HistoryChangedError("the cut is gone")
            entries[at], own, rollback = self._read(at, entry, cut.pins[at].seqno)
            rows += [(at, row) for row in own]
            rollbacks += [rollback] if rollback else []
        if not rows:
            return GroupResult(None, entries, rollbacks)
        data = json.dumps(rows).encode()
        self._storage.put_if_absent(path, data)
        return GroupResult(FileRef(path, len(data), sha256(data), len(rows)), entries, rollbacks)

    def _read(
        self, at: int, entry: Entry | None, pin: int
    ) -> tuple[Entry, list[Row], RolledBack | None]:
        position: Json = (entry.position if entry else None) or {
            "failover_id": "",
            "seqno": 0,
            "markers": [],
        }
        seqno, markers = position["seqno"], list(position["markers"])
        start, rollback = seqno, None
        limit = self._server.common(at, position["failover_id"])
        if seqno > limit or seqno > pin:
            markers = [m for m in markers if m <= min(limit, pin)]
            start = max(markers, default=0)
            rollback = RolledBack(at, seqno, start, "model")
        rows = [r for r in self._server.partitions[at].rows if start < r[0] <= pin]
        found = self._server.true_markers(at, start, pin)
        markers += [m for m in found if m == pin or self._server.random.random() < 0.5]
        newest = {
            "failover_id": self._server.partitions[at].log[-1][0],
            "seqno": pin,
            "markers": markers,
        }
        cut = rollback.seqno if rollback else None
        file = 0 if rows else None
        return Entry(start, pin, cut, len(rows), 0, file, newest), rows, rollback


class World:
    """A server, a repository, and runs that end at any step."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.server = ModelServer(self.random)
        self.storage = MemoryStorage(self.random)
        self.commits = self.crashes = self.rolled_back = self.beaten = 0
        self._depth = 0
        self.repository = Repository.create(self.storage, "b", 1, "t", 0)

    def disturb(self) -> None:
        """Let something happen at the server, or let another run overtake this one."""
        chance = self.random.random()
        if chance < 0.25:
            self.server.write()
        elif chance < 0.45:
            self.server.deduplicate()
        elif chance < 0.52:
            self.server.roll_back()
        elif chance < 0.55 and self.server.cuts:
            self.server.cuts.pop(self.random.choice(sorted(self.server.cuts)))
        elif chance < 0.57 and not self._depth:
            self._depth = 1
            fuse, self.storage.steps_left = self.storage.steps_left, -1
            self.run()
            self._depth, self.storage.steps_left = 0, fuse

    def between(self) -> None:
        """Let things happen at the server between two runs."""
        for _ in range(self.random.randrange(10)):
            self.server.write()
        for _ in range(self.random.randrange(5)):
            self.server.deduplicate()
        if self.random.random() < 0.3:
            self.server.roll_back()
        for _ in range(self.random.randrange(3)):
            self.server.write()

    def run(self, steps: int = -1) -> None:
        """Take a backup with a process that is gone after so many steps."""
        if steps >= 0:
            self.storage.steps_left = steps
        source = ModelSource(self.server, self.storage, self)
        full = self.random.random() < 0.15
        try:
            repository = Repository.open(self.storage)
            run = Run(repository, source, NoLock(), full, clock=lambda: 0, group_seqnos=3)
            manifest = run.backup()
            self.commits += 1
            self.rolled_back += len(manifest.rollbacks)
        except Crash:
            self.crashes += 1
        except LockedError:
            self.beaten += 1
        except HistoryChangedError:
            pass
        if not self._depth:
            self.storage.steps_left = -1

    def check(self, chain: list[Manifest], number: int) -> None:
        """Check that a restore point is the state at its cut, in every partition."""
        counted = segments(chain, number)
        expected = self.server.expected[chain[number - 1].cut_name]
        for at in range(PARTITIONS):
            rows: list[Row] = []
            for part in counted.get(at, []):
                stored = json.loads(self.storage.read(part.file.path))
                rows += [
                    (row[0], row[1], row[2])
                    for owner, row in stored
                    if owner == at and part.low < row[0] <= part.high
                ]
            assert newest_state(rows) == expected[at], (number, at)
