"""One backup: at a cut, group by group, committed by one manifest."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from upr_spark.backup.chain import (
    Entry,
    FileRef,
    Kind,
    Manifest,
    RolledBack,
    check_link,
    entry_from_json,
    entry_to_json,
    file_from_json,
    file_to_json,
)
from upr_spark.backup.documents import Json
from upr_spark.backup.errors import HistoryChangedError, LockedError
from upr_spark.backup.repository import Attempt, Repository

GROUP_SEQNOS = 2_000_000
"""About how many seqnos a group spans; a group is one file, and what a resumed run need not read again."""

_ATTEMPTS = 4


class PinnedAt(NamedTuple):
    """Where a cut pins a partition: the newest failover id as 16 hex digits ("" for none), and the marker."""

    failover_id: str
    seqno: int


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A cut at the server.

    Args:
        name: unique in the bucket.
        time: when it was made; microseconds since the epoch, by the server's clock.
        pins: of every partition.
    """

    name: str
    time: int
    pins: Mapping[int, PinnedAt]


class GroupResult(NamedTuple):
    """What was read of a group: its file, None without rows; entries, with file 0 where there are rows; rollbacks."""

    file: FileRef | None
    entries: dict[int, Entry]
    rollbacks: list[RolledBack]


class Source(Protocol):
    """The server, as far as a backup needs it."""

    def make_cut(self) -> CutPoint:
        """Pin all partitions at one instant."""

    def find_cut(self, name: str) -> CutPoint | None:
        """Return a cut whose lease has not ended, with a lease that begins anew; None when it is gone."""

    def release(self, name: str) -> None:
        """Give a cut up."""

    def read_group(
        self, starts: Mapping[int, Entry | None], cut: CutPoint, path: str
    ) -> GroupResult:
        """Read partitions up to the cut into a new data file.

        Args:
            starts: by partition, its entry in the backup before; None to begin at 0.
            cut: where to end.
            path: the file's name.

        Raises:
            HistoryChangedError: the cut is gone, or the server rolled back what was being read.
        """


class Holding(Protocol):
    """The lock that a run holds."""

    def keep(self, now: bool = False) -> None:
        """Renew it, or raise LockedError."""


def _micros() -> int:
    return round(time.time() * 1e6)


@dataclass(slots=True)
class Run:
    """A backup that is being taken.

    Args:
        repository: where to.
        source: where from.
        lock: which is held.
        full: whether everything is read anew.
        say: called with a line for people.
        progress: called with groups done and groups in all.
        clock: microseconds since the epoch.
        group_seqnos: about how many seqnos a group spans.
    """

    repository: Repository
    source: Source
    lock: Holding
    full: bool = False
    say: Callable[[str], Any] = lambda words: None
    progress: Callable[[int, int], Any] = lambda done, total: None
    clock: Callable[[], int] = _micros
    group_seqnos: int = GROUP_SEQNOS

    def backup(self) -> Manifest:
        """Take one backup and return its manifest.

        Raises:
            LockedError: another run has the repository, or committed this number.
            HistoryChangedError: the server's history changed again and again meanwhile.
            UprError: the server failed, or the repository is damaged; what was staged is used by the next run.
        """
        failure: HistoryChangedError | None = None
        for _ in range(_ATTEMPTS):
            try:
                return self._try()
            except HistoryChangedError as error:
                self.say(f"{error}; beginning again with a new cut")
                failure = error
        assert failure is not None
        raise failure

    def _try(self) -> Manifest:
        started = self.clock()
        before, parent = self.repository.newest()
        self.repository.clean(before.number if before else 0)
        attempt, cut = self._attempt(before, parent)
        kind: Kind = attempt.plan["kind"]
        base = before.entries if before and kind == "incremental" else {}
        groups: list[list[int]] = attempt.plan["groups"]
        results = []
        for index, group in enumerate(groups):
            self.progress(index, len(groups))
            self.lock.keep()
            try:
                results.append(self._group(attempt, index, {p: base.get(p) for p in group}, cut))
            except HistoryChangedError:
                # So that no later run takes the attempt up again.
                self.source.release(cut.name)
                raise
        self.progress(len(groups), len(groups))
        manifest = Manifest(
            attempt.number,
            kind,
            self.repository.id,
            parent,
            cut.name,
            cut.time,
            started,
            self.clock(),
            *_joined(results, base, cut),
        )
        check_link(before, manifest)
        self.lock.keep(now=True)
        if not self.repository.commit(manifest):
            raise LockedError(
                f"another run committed backup {manifest.number} first; this one changed nothing"
            )
        self.repository.clean(manifest.number)
        self.source.release(cut.name)
        return manifest

    def _attempt(self, before: Manifest | None, parent: str) -> tuple[Attempt, CutPoint]:
        """Return the attempt to go on with, and its cut: one that was interrupted, or a new one."""
        number = before.number + 1 if before else 1
        for attempt in self.repository.attempts(number):
            plan = attempt.plan
            if plan["parent"] != parent or (self.full and plan["kind"] != "full"):
                continue
            cut = self.source.find_cut(plan["cut"])
            if cut is not None and _pins_to_json(cut) == plan["pins"] and cut.time == plan["time"]:
                self.say("going on with an interrupted run, at its cut")
                return attempt, cut
        kind: Kind = "full" if self.full or not before else "incremental"
        base = before.entries if before and kind == "incremental" else {}
        cut = self.source.make_cut()
        plan = {
            "kind": kind,
            "parent": parent,
            "cut": cut.name,
            "time": cut.time,
            "pins": _pins_to_json(cut),
            "groups": split(cut, base, self.group_seqnos),
        }
        return self.repository.stage(number, plan), cut

    def _group(
        self, attempt: Attempt, index: int, starts: Mapping[int, Entry | None], cut: CutPoint
    ) -> GroupResult:
        record = self.repository.staged_group(attempt, index)
        if record is not None:
            result = _result_from_json(record)
            if self._is_there(result.file):
                return result
        path = self.repository.new_data_name(attempt.number)
        result = self.source.read_group(starts, cut, path)
        self.repository.stage_group(attempt, index, _result_to_json(result))
        return result

    def _is_there(self, file: FileRef | None) -> bool:
        try:
            return file is None or self.repository.storage.size(file.path) == file.bytes
        except FileNotFoundError:
            return False


def split(cut: CutPoint, base: Mapping[int, Entry], group_seqnos: int) -> list[list[int]]:
    """Return the partitions that have to be asked for, in groups of consecutive ones.

    One whose newest id and marker are those of the backup before has nothing new, and is left out.
    """
    groups: list[list[int]] = []
    room = 0
    for partition, pin in sorted(cut.pins.items()):
        entry = base.get(partition)
        if _unchanged(entry, pin):
            continue
        size = max(pin.seqno - (entry.end if entry else 0), 1)
        if not groups or room < size:
            groups.append([])
            room = group_seqnos
        groups[-1].append(partition)
        room -= size
    return groups


def _unchanged(entry: Entry | None, pin: PinnedAt) -> bool:
    if entry is None or entry.position is None:
        return pin.seqno == 0
    return entry.end == pin.seqno and entry.position["failover_id"] == pin.failover_id


def _joined(
    results: Sequence[GroupResult], base: Mapping[int, Entry], cut: CutPoint
) -> tuple[tuple[FileRef, ...], dict[int, Entry], tuple[RolledBack, ...]]:
    """Return files, entries of every partition, and rollbacks, of all groups together."""
    files: list[FileRef] = []
    entries: dict[int, Entry] = {}
    for result in results:
        for partition, entry in result.entries.items():
            index = None if entry.file is None else len(files)
            entries[partition] = _with_file(entry, index)
        if result.file is not None:
            files.append(result.file)
    for partition in cut.pins:
        if partition not in entries:
            before = base.get(partition)
            end = before.end if before else 0
            position = before.position if before else None
            entries[partition] = Entry(end, end, None, 0, 0, None, position)
    rollbacks = (rollback for result in results for rollback in result.rollbacks)
    return tuple(files), dict(sorted(entries.items())), tuple(rollbacks)


def _with_file(entry: Entry, file: int | None) -> Entry:
    return Entry(
        entry.start, entry.end, entry.cut, entry.rows, entry.data_bytes, file, entry.position
    )


def _pins_to_json(cut: CutPoint) -> list[Any]:
    return [[p, pin.failover_id, pin.seqno] for p, pin in sorted(cut.pins.items())]


def _result_to_json(result: GroupResult) -> Json:
    return {
        "file": None if result.file is None else file_to_json(result.file),
        "entries": {str(p): entry_to_json(entry) for p, entry in result.entries.items()},
        "rollbacks": [list(rollback) for rollback in result.rollbacks],
    }


def _result_from_json(record: Json) -> GroupResult:
    entries: Iterable[tuple[str, Json]] = record["entries"].items()
    return GroupResult(
        None if record["file"] is None else file_from_json(record["file"]),
        {int(p): entry_from_json(entry) for p, entry in entries},
        [RolledBack(*rollback) for rollback in record["rollbacks"]],
    )
