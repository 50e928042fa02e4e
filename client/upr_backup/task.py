"""Tasks of a backup: a group of partitions that one task reads, what it is told, what it read, and the record that it leaves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from upr_backup.repository.documents import (
    Entry,
    FileRef,
    Json,
    RolledBack,
    entry_from_json,
    entry_to_json,
    file_from_json,
    file_to_json,
)
from upr_backup.repository.repository import Attempt, Repository


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
        pins: of every partition but those that are left out.
        left_out: why partitions are not part of it: they are dead at the server.
    """

    name: str
    time: int
    pins: Mapping[int, PinnedAt]
    left_out: Mapping[int, str] = field(default_factory=dict)


class GroupResult(NamedTuple):
    """What was read of a group: its file, None without rows; entries, with file 0 where there are rows; rollbacks."""

    file: FileRef | None
    entries: dict[int, Entry]
    rollbacks: list[RolledBack]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a task needs to read a group, wherever it runs.

    Args:
        location: of the repository's storage.
        target: addresses of the server.
        bucket: its name.
        bucket_version: its random id, 16 hex digits.
        number: of the backup.
        attempt: name of the attempt.
        index: of the group in the attempt.
        starts: by partition, its entry in the backup before; None to begin at 0.
        cut: where to end; with the pins of the group's partitions.
        patience: how many seconds a server that went away is waited for.
    """

    location: str
    target: str
    bucket: str
    bucket_version: str
    number: int
    attempt: str
    index: int
    starts: Mapping[int, Entry | None]
    cut: CutPoint
    patience: float

    def to_json(self) -> Json:
        """Return it as a JSON object."""
        return {
            "location": self.location,
            "target": self.target,
            "bucket": self.bucket,
            "bucket_version": self.bucket_version,
            "number": self.number,
            "attempt": self.attempt,
            "index": self.index,
            "starts": [
                [partition, None if entry is None else entry_to_json(entry)]
                for partition, entry in self.starts.items()
            ],
            "cut": [self.cut.name, self.cut.time, pins_to_json(self.cut)],
            "patience": self.patience,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the group that ``to_json`` gave."""
        name, time, pins = document["cut"]
        return cls(
            document["location"],
            document["target"],
            document["bucket"],
            document["bucket_version"],
            document["number"],
            document["attempt"],
            document["index"],
            {
                partition: None if entry is None else entry_from_json(entry)
                for partition, entry in document["starts"]
            },
            CutPoint(name, time, {partition: PinnedAt(*pin) for partition, *pin in pins}),
            document["patience"],
        )


def pins_to_json(cut: CutPoint) -> list[Any]:
    """Return a cut's pins as a JSON array, in the order of the partitions."""
    return [[partition, *pin] for partition, pin in sorted(cut.pins.items())]


def result_to_json(result: GroupResult) -> Json:
    """Return what was read as a JSON object: the group's record."""
    return {
        "file": None if result.file is None else file_to_json(result.file),
        "entries": {str(p): entry_to_json(entry) for p, entry in result.entries.items()},
        "rollbacks": [list(rollback) for rollback in result.rollbacks],
    }


def result_from_json(record: Json) -> GroupResult:
    """Return what ``result_to_json`` gave."""
    entries: Iterable[tuple[str, Json]] = record["entries"].items()
    return GroupResult(
        None if record["file"] is None else file_from_json(record["file"]),
        {int(p): entry_from_json(entry) for p, entry in entries},
        [RolledBack(*rollback) for rollback in record["rollbacks"]],
    )


def staged_record(repository: Repository, number: int, attempt: str, index: int) -> Json | None:
    """Return the record of a group whose file is there; None when the group has to be read."""
    record = repository.staged_group(Attempt(number, attempt, {}), index)
    if record is None:
        return None
    file = result_from_json(record).file
    try:
        is_there = file is None or repository.storage.size(file.path) == file.bytes
    except FileNotFoundError:
        return None
    return record if is_there else None


def stage_read(
    repository: Repository, spec: GroupSpec, read: Callable[[GroupSpec, str], GroupResult]
) -> Json:
    """Read a group into a new data file and record it; returns the record that counts, which may be another task's.

    Args:
        repository: the one that the group is for.
        spec: the group.
        read: reads it into a file of the name that it is given, and makes that durable.
    """
    own = result_to_json(read(spec, repository.new_data_name(spec.number)))
    repository.stage_group(Attempt(spec.number, spec.attempt, {}), spec.index, own)
    # Of two tasks for one group the first one's record stays, and both have to report the same.
    staged = staged_record(repository, spec.number, spec.attempt, spec.index)
    return own if staged is None else staged
