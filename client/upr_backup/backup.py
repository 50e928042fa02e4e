"""One backup: at a cut, group by group, committed by one manifest."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from upr_backup.engines.engine import Engine, Finished, Rows
from upr_backup.errors import HistoryChangedError, LockedError, RepositoryDamagedError
from upr_backup.repository.documents import (
    NOT_WRITTEN_HERE,
    Entry,
    FileRef,
    Json,
    Kind,
    Manifest,
    RolledBack,
    check_link,
    now_micros,
)
from upr_backup.repository.listing_cache import EVERY
from upr_backup.repository.lock import Holding
from upr_backup.repository.repository import Attempt, Repository
from upr_backup.rows import grouped
from upr_backup.task import Task, TaskResult, staged_result
from upr_client.admin import CutInfo, Pin
from upr_client.endpoints import Login
from upr_protocol.errors import UprError
from upr_protocol.failover import format_failover_id

GROUPS_MAX: Final = 64
"""About how many groups a backup has at most: each is a file."""

GROUP_SEQNOS: Final = 2_000_000
"""About how many seqnos a group spans at most, while there are fewer than GROUPS_MAX: so much a killed task loses."""

GROUP_SEQNOS_MIN: Final = 100_000
"""Smallest span of seqnos that is worth a file and a task of its own."""

_TASKS_EACH: Final = 2
"""Groups for each place to run them, so that the places end at about the same time."""

PATIENCE_SECONDS: Final = 60.0
"""Longest wait for a server that went away."""

_ATTEMPTS: Final = 4


class Source(Protocol):
    """The server's cuts, as far as a backup needs them; see ``source.ServerSource``."""

    def make_cut(self) -> CutInfo: ...
    def find_cut(self, name: str) -> CutInfo | None: ...
    def renew(self, name: str) -> None: ...
    def release(self, name: str) -> None: ...
    def committed(self, cut_time: int) -> None: ...


@dataclass(slots=True)
class Run:
    """A backup that is being taken.

    Args:
        lock: which is held.
        target, login: addresses of the server and the credentials there, for the tasks.
        full: whether everything is read anew.
        skip_unchanged: whether no backup is taken where nothing changed since the last one.
        restart: whether what an unfinished run left is given up; False from then on.
        say: called with a line for people.
        progress: called with rows read since the last call, groups done and groups in all, about every second.
        clock: microseconds since the epoch.
        group_seqnos: about how many seqnos a group spans; None for as many as suit the engine.
        patience: how many seconds a server that went away is waited for.

    Attributes:
        skipped: whether the last call of ``backup`` found nothing new, and took none.
    """

    repository: Repository
    source: Source
    engine: Engine
    lock: Holding
    target: str = ""
    login: Login = field(default_factory=Login)
    full: bool = False
    restart: bool = False
    say: Callable[[str], Any] = lambda words: None
    progress: Callable[[int, int, int], Any] = lambda rows, done, total: None
    clock: Callable[[], int] = now_micros
    group_seqnos: int | None = None
    patience: float = PATIENCE_SECONDS
    skip_unchanged: bool = False
    skipped: bool = field(default=False, init=False)

    def backup(self) -> Manifest:
        """Take one backup and return its manifest; where it was skipped, that of the backup before.

        Raises:
            LockedError: another run has the repository, or committed this number.
            HistoryChangedError: the server's history changed again and again meanwhile.
            UprError: the server failed, or the repository is damaged; what was staged is used by the next run.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._try()
            except HistoryChangedError as error:
                if attempt == _ATTEMPTS:
                    raise
                self.say(f"{error}; beginning again with a new cut")
                # Making one takes the cut of whoever has the repository now.
                self.lock.keep(now=True)
        raise AssertionError

    def _try(self) -> Manifest:
        started = self.clock()
        before, parent = self.repository.newest()
        if before is not None:
            self.repository.clean(before.number)
        attempt, cut = self._attempt(before, parent)
        self.skipped = attempt is None
        if attempt is None:
            assert before is not None
            self.source.committed(cut.created_time)
            self.source.release(cut.name)
            return before
        kind: Kind = attempt.plan["kind"]
        base = before.entries if before and kind == "incremental" else {}
        try:
            results = self._read(attempt, base, cut)
            manifest = Manifest(
                attempt.number,
                kind,
                self.repository.id,
                parent,
                cut.name,
                cut.created_time,
                started,
                self.clock(),
                *_joined(results, base, cut),
                {p: why.message for p, why in cut.left_out.items()},
            )
            check_link(before, manifest)
            # Groups that an earlier run staged are whatever the repository has by now.
            manifest = Manifest.from_json(manifest.to_json(), "what was read and staged")
        except (HistoryChangedError, RepositoryDamagedError):
            # So that no later run takes the attempt up again.
            self.source.release(cut.name)
            raise
        self.lock.keep(now=True)
        if not self.repository.commit(manifest):
            raise LockedError(
                f"another run committed backup {manifest.number} first; this one changed nothing"
            )
        self.source.committed(cut.created_time)
        self.source.release(cut.name)
        # What cannot be cleaned now, the next run cleans: this backup is committed.
        with suppress(OSError, UprError):
            self.repository.clean(manifest.number)
        if manifest.number % EVERY == 0:
            with suppress(OSError, UprError):
                self.repository.write_index()
        return manifest

    def _attempt(self, before: Manifest | None, parent: str) -> tuple[Attempt | None, CutInfo]:
        """Return the attempt to go on with, and its cut: one that was interrupted, or a new one; None to skip it."""
        number = before.number + 1 if before else 1
        for attempt in [] if self.restart else self.repository.attempts(number):
            plan = attempt.plan
            if plan.get("parent") != parent or (self.full and plan.get("kind") != "full"):
                continue
            cut = self._cut_of(plan, before)
            if cut is not None:
                self.say("going on with an interrupted run, at its cut")
                return attempt, cut
        kind: Kind = "full" if self.full or not before else "incremental"
        base = before.entries if before and kind == "incremental" else {}
        cut = self.source.make_cut()
        groups = split(cut, base, self.group_seqnos, self.engine.parallel)
        self.restart = False
        if self.skip_unchanged and base and not groups and not cut.left_out:
            return None, cut
        plan = {
            "kind": kind,
            "parent": parent,
            "cut": cut.name,
            "time": cut.created_time,
            "pins": _pins(cut),
            "left_out": {str(p): why.message for p, why in cut.left_out.items()},
            "groups": groups,
        }
        return self.repository.stage(number, plan), cut

    def _cut_of(self, plan: Json, before: Manifest | None) -> CutInfo | None:
        """Return the cut of an interrupted run; None when it is gone, or the plan is not one for it."""
        try:
            cut = self.source.find_cut(plan["cut"])
            if cut is None or [_pins(cut), cut.created_time] != [plan["pins"], plan["time"]]:
                return None
            base = before.entries if before and plan["kind"] == "incremental" else {}
            known = sorted(p for group in split(cut, base, None, 1) for p in group)
            if sorted(p for group in plan["groups"] for p in group) != known:
                return None
            left_out = {int(p): UprError(str(why)) for p, why in plan.get("left_out", {}).items()}
        except NOT_WRITTEN_HERE:
            return None
        return replace(cut, left_out=left_out)

    def _read(self, attempt: Attempt, base: Mapping[int, Entry], cut: CutInfo) -> list[TaskResult]:
        """Return what was read of each group, now or by the run that was interrupted."""
        groups: list[list[int]] = attempt.plan["groups"]
        results: dict[int, TaskResult] = {}
        tasks = []
        for index, group in enumerate(groups):
            result = staged_result(self.repository, attempt.number, attempt.name, index)
            if result is None:
                tasks.append(self._task(attempt, index, {p: base.get(p) for p in group}, cut))
            else:
                results[index] = result
        if tasks:
            self.progress(0, len(results), len(groups))
            with closing(self.engine.run(tasks)) as events:
                for event in events:
                    self.lock.keep()
                    self.source.renew(cut.name)
                    if isinstance(event, Finished):
                        results[event.index] = event.result
                    rows = event.rows if isinstance(event, Rows) else 0
                    self.progress(rows, len(results), len(groups))
        return [results[index] for index in range(len(groups))]

    def _task(
        self, attempt: Attempt, index: int, starts: Mapping[int, Entry | None], cut: CutInfo
    ) -> Task:
        repository = self.repository
        pins = {partition: cut.pins[partition] for partition in starts}
        return Task(
            repository.storage.location,
            self.target,
            repository.bucket,
            repository.bucket_version,
            attempt.number,
            attempt.name,
            index,
            starts,
            replace(cut, pins=pins, left_out={}),
            self.patience,
            self.login,
            repository.key,
        )


def split(
    cut: CutInfo, base: Mapping[int, Entry], group_seqnos: int | None, parallel: int
) -> list[list[int]]:
    """Return the partitions that have to be asked for, in groups of consecutive ones.

    One whose newest id and marker are those of the backup before has nothing new, and is left out.

    Args:
        base: the entries of that backup; none for a full one.
        group_seqnos: about how many seqnos a group spans; None to choose.
        parallel: how many groups are read at a time.
    """
    sizes = {}
    for partition, pin in sorted(cut.pins.items()):
        entry = base.get(partition)
        if not _unchanged(entry, pin):
            sizes[partition] = max(pin.seqno - (entry.end if entry else 0), 1)
    if group_seqnos is None:
        group_seqnos = group_size(sum(sizes.values()), parallel)
    return grouped(sizes, group_seqnos)


def group_size(seqnos: int, parallel: int) -> int:
    """Return about how many seqnos a group spans, of so many in all with so many groups read at a time."""
    size = max(GROUP_SEQNOS_MIN, -(-seqnos // (_TASKS_EACH * parallel)))
    return max(min(size, GROUP_SEQNOS), -(-seqnos // GROUPS_MAX))


def _unchanged(entry: Entry | None, pin: Pin) -> bool:
    if entry is None or entry.position is None:
        return pin.seqno == 0
    return entry.end == pin.seqno and entry.position["failover_id"] == _id(pin)


def _id(pin: Pin) -> str:
    return format_failover_id(pin.failover_id) if pin.failover_id else ""


def _pins(cut: CutInfo) -> list[Any]:
    """Return a cut's pins as a plan has them."""
    return [[partition, _id(pin), pin.seqno] for partition, pin in sorted(cut.pins.items())]


def _joined(
    results: Sequence[TaskResult], base: Mapping[int, Entry], cut: CutInfo
) -> tuple[tuple[FileRef, ...], dict[int, Entry], tuple[RolledBack, ...]]:
    """Return files, entries of every partition, and rollbacks, of all groups together."""
    files: list[FileRef] = []
    entries: dict[int, Entry] = {}
    for result in results:
        for partition, entry in result.entries.items():
            index = None if entry.file is None else len(files)
            entries[partition] = entry._replace(file=index)
        if result.file is not None:
            files.append(result.file)
    for partition in (*cut.pins, *cut.left_out):
        if partition not in entries:
            # Nothing new, or left out: what earlier backups have stays, and a later one goes on from there.
            before = base.get(partition)
            end = before.end if before else 0
            position = before.position if before else None
            entries[partition] = Entry(end, end, None, 0, 0, None, position)
    rollbacks = (rollback for result in results for rollback in result.rollbacks)
    return tuple(files), dict(sorted(entries.items())), tuple(rollbacks)
