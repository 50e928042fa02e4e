"""A server and a storage in memory for backups: one rolls back and deduplicates, the other breaks off at any step."""

import io
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from upr_backup.backup import Run
from upr_backup.engines.engine import Finished, Rows
from upr_backup.errors import HistoryChangedError, LockedError
from upr_backup.repository import Stored
from upr_backup.repository.chain import Chain, Keep, Segment, needed, segments_of
from upr_backup.repository.documents import Entry, FileRef, Json, RolledBack, sha256
from upr_backup.repository.repository import Repository, number_in
from upr_backup.repository.storage import Sink
from upr_backup.retention import Folded, Merge, beginning, chosen, expire, plan, prune
from upr_backup.task import Task, TaskResult, stage_read
from upr_client.admin import CutInfo, Pin

Row = tuple[int, str, str | None]
"""seqno, key, value; None for a delete."""
State = dict[str, str]

PARTITIONS = 3
KEYS = 4


class InlineEngine:
    """An engine that reads one group after the other, right here; ``backup`` reads and stages one."""

    parallel = 1

    def __init__(self, backup: Callable[[Task], TaskResult]) -> None:
        self._backup = backup

    def run(self, tasks: Sequence[Task]) -> Generator[Rows | Finished, None, None]:
        for task in tasks:
            yield Rows(0)
            yield Finished(task.index, self._backup(task))

    def close(self) -> None:
        pass


class Crash(Exception):
    """The process is gone."""


class MemoryStorage:
    """Objects in memory. Each step that changes something may be the last one, before or after it had its effect."""

    def __init__(self, random: Random) -> None:
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, float] = {}
        self.now = 0.0
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

    def open(self, name: str) -> io.BufferedReader:
        raise NotImplementedError

    def create(self, name: str) -> Sink:
        raise NotImplementedError

    def put_if_absent(self, name: str, data: bytes) -> bool:
        last = self._step()
        made = self.objects.setdefault(name, data) is data
        self.written.setdefault(name, self.now)
        if last:
            raise Crash
        return made

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))

    def stored(self, prefix: str) -> list[Stored]:
        return [
            Stored(name, len(self.objects[name]), self.written[name]) for name in self.names(prefix)
        ]

    def is_empty(self) -> bool:
        return not self.objects

    def delete(self, name: str) -> None:
        last = self._step()
        self.objects.pop(name, None)
        self.written.pop(name, None)
        if last:
            raise Crash


class NoLock:
    """A lock that nobody asks: what is committed must be right without it. Whoever renews it may be paused there."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def keep(self, now: bool = False) -> None:
        self._world.pause(0.06 if now else 0.02, now)


@dataclass
class Partition:
    """One partition: what was ever written on its branch, and what deduplication left of that."""

    log: list[tuple[str, int]]
    all_rows: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    high: int = 0


def newest_rows(rows: list[Row]) -> list[Row]:
    """Return of each key the row with the highest seqno."""
    return list({row[1]: row for row in sorted(rows)}.values())


def newest_state(rows: list[Row]) -> State:
    return {key: value for _, key, value in newest_rows(rows) if value is not None}


class ModelServer:
    """Writes, cuts, rollbacks and deduplication, all at random.

    Attributes:
        expected: the state of each partition at each cut that was ever made.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ids = 0
        self.partitions = [Partition([(self._new_id(), 0)]) for _ in range(PARTITIONS)]
        self.cuts: dict[str, CutInfo] = {}
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

    def make_cut(self) -> CutInfo:
        name = f"cut-{len(self.expected)}"
        pins = {n: Pin(int(p.log[-1][0], 16), p.high) for n, p in enumerate(self.partitions)}
        self.cuts[name] = CutInfo(name, len(self.expected), pins=pins)
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

    def make_cut(self) -> CutInfo:
        # A copy of the repository in another place would leave them.
        if self._server.random.random() < 0.7:
            self._server.cuts.clear()
        return self._server.make_cut()

    def find_cut(self, name: str) -> CutInfo | None:
        return self._server.cuts.get(name)

    def renew(self, name: str) -> None:
        if name not in self._server.cuts:
            raise HistoryChangedError("the cut is gone")

    def release(self, name: str) -> None:
        self._server.cuts.pop(name, None)

    def committed(self, cut_time: int) -> None:
        pass

    def read_group(self, spec: Task, path: str) -> TaskResult:
        cut = spec.cut
        rows: list[tuple[int, Row]] = []
        entries, rollbacks = {}, []
        for at, entry in spec.starts.items():
            self._world.disturb()
            if cut.name not in self._server.cuts:
                raise HistoryChangedError("the cut is gone")
            entries[at], own, rollback = self._read(at, entry, cut.pins[at].seqno)
            rows += [(at, row) for row in own]
            rollbacks += [rollback] if rollback else []
        if not rows:
            return TaskResult(None, entries, rollbacks)
        data = json.dumps(rows).encode()
        self._storage.put_if_absent(path, data)
        return TaskResult(FileRef(path, len(data), sha256(data), len(rows)), entries, rollbacks)

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


def rows_of(storage: MemoryStorage, at: int, parts: Iterable[Segment]) -> list[Row]:
    """Return the rows of a partition that count."""
    rows: list[Row] = []
    for part in parts:
        rows += [
            (row[0], row[1], row[2])
            for owner, row in json.loads(storage.read(part.file.path))
            if owner == at and part.low < row[0] <= part.high
        ]
    return rows


class ModelFold:
    """Folds the files of the model; something may happen before each partition."""

    def __init__(self, storage: MemoryStorage, world: "World") -> None:
        self._storage = storage
        self._world = world

    def __call__(
        self, counted: Mapping[int, Sequence[Segment]], sizes: Mapping[int, int], path: str
    ) -> Folded:
        rows: list[tuple[int, Row]] = []
        for at, parts in counted.items():
            self._world.pause(0.03)
            newest = newest_rows(rows_of(self._storage, at, parts))
            rows += [(at, row) for row in newest if row[2] is not None]
        written = {at: (sum(1 for owner, _ in rows if owner == at), 0) for at in counted}
        if not rows:
            return Folded(None, written)
        data = json.dumps(rows).encode()
        self._storage.put_if_absent(path, data)
        return Folded(FileRef(path, len(data), sha256(data), len(rows)), written)


class World:
    """A server, a repository, and runs that end at any step."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.server = ModelServer(self.random)
        self.storage = MemoryStorage(self.random)
        self.commits = self.crashes = self.rolled_back = self.beaten = 0
        self.merges = self.voided = self.expired = self.pruned = self.waited = 0
        # The oldest restore point that no expiry may take away, and the newest one that was seen.
        self.kept, self.newest = 1, 0
        # What overtakes the next run right before its commit.
        self.ambush: Sequence[Callable[[], None]] = ()
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
        else:
            self.pause(0.05)

    def pause(self, chance: float, before_commit: bool = False) -> None:
        """Let other runs overtake this one, with some probability."""
        overtaking: Sequence[Callable[[], None]] = ()
        if before_commit and self.ambush and not self._depth:
            overtaking, self.ambush = self.ambush, ()
        elif not self._depth and self.random.random() < chance:
            runs = (self.run, self.run, self.merge, self.expire, self.prune)
            overtaking = [self.random.choice(runs) for _ in range(self.random.randint(1, 4))]
        if overtaking:
            self._depth = 1
            fuse, self.storage.steps_left = self.storage.steps_left, -1
            for run in overtaking:
                run()
            self._depth, self.storage.steps_left = 0, fuse

    def tick(self) -> int:
        """Return the time in microseconds, which goes on with each cut."""
        self.storage.now = len(self.server.expected) / 1e6
        return len(self.server.expected)

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
        source = ModelSource(self.server, self.storage, self)
        full = self.random.random() < 0.05

        def backup() -> None:
            repository = Repository.open(self.storage)
            engine = InlineEngine(lambda spec: stage_read(repository, spec, source.read_group))
            run = Run(repository, source, engine, NoLock(self), full=full, group_seqnos=3)
            run.clock = self.tick
            manifest = run.backup()
            self.commits += 1
            self.rolled_back += len(manifest.rollbacks)

        with suppress(HistoryChangedError):
            self._process(backup, steps)

    def _process(self, work: Callable[[], None], steps: int) -> None:
        if steps >= 0:
            self.storage.steps_left = steps
        self.tick()
        try:
            work()
        except Crash:
            self.crashes += 1
        except LockedError:
            self.beaten += 1
        finally:
            if not self._depth:
                self.storage.steps_left = -1

    def merge(self, steps: int = -1) -> None:
        """Merge up to some backup."""

        def merge() -> None:
            repository = Repository.open(self.storage)
            chain = repository.chain()
            to = self.random.randint(chain.first, chain.last) if chain else 0
            keep = self.random.choice((None, Keep(2, None), Keep(None, 4)))
            number = chosen(chain, None, keep, self.tick())
            if self.random.random() < 0.5 and to in chain.mergeable() and not chain.is_base(to):
                number = to
            if number is None:
                return
            fold = ModelFold(self.storage, self)
            Merge(repository, fold, NoLock(self), clock=self.tick, file_bytes=150).merge(
                chain, number
            )
            self.merges += 1

        try:
            self._process(merge, steps)
        except FileNotFoundError as error:
            missing = str(error)
        else:
            return
        # It may only be what was pruned while the merge was paused.
        assert number_in(missing) <= self.repository.chain().first

    def expire(self, steps: int = -1) -> None:
        """Let old restore points go."""

        def decide() -> None:
            repository = Repository.open(self.storage)
            chain = repository.chain()
            if not chain:
                return
            keep = Keep(*self.random.choice(((1, None), (3, None), (None, 3), (2, 5))))
            oldest = keep.oldest(chain, self.tick())
            first = beginning(chain, oldest)
            if first is None or first == chain.first:
                return
            self.pause(0.2)
            self.kept = max(self.kept, oldest)
            self.expired += expire(repository, chain, first, self.tick())

        self._process(decide, steps)

    def prune(self, steps: int = -1) -> None:
        """Remove what is not needed any more."""

        def remove() -> None:
            repository = Repository.open(self.storage)
            lock = NoLock(self)
            grace = self.random.choice((0, 0, 0, 4))
            made = plan(repository, repository.chain(), grace, self.tick())
            self.waited += made.waiting > 0
            self.voided += len(made.voids)
            lock.keep(now=True)
            for _ in prune(repository, made):
                self.pruned += 1
                lock.keep()

        self._process(remove, steps)

    def check_all(self) -> Chain:
        """Check every restore point, that none is missing, and that all that they may rest on is there."""
        chain = self.repository.chain()
        assert chain.first <= self.kept
        assert chain.last >= self.newest
        self.newest = chain.last
        for link in chain.links:
            self.check(chain, link.number)
        for manifest in chain.rests_on():
            for file in manifest.files:
                assert file.path in self.storage.objects
        return chain

    def check(self, chain: Chain, number: int) -> None:
        """Check that a restore point is the state at its cut, in every partition."""
        counted = segments_of(needed(chain, number))
        expected = self.server.expected[chain.by_number(number).cut_name]
        for at in range(PARTITIONS):
            rows = rows_of(self.storage, at, counted.get(at, ()))
            assert newest_state(rows) == expected[at], (number, at)
