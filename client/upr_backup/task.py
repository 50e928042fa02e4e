"""Tasks of a backup: partitions that one reads up to a cut, what it read, and the record that it leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from upr_backup.repository.documents import (
    NOT_WRITTEN_HERE,
    Entry,
    FileRef,
    Json,
    RolledBack,
    entry_from_json,
    entry_to_json,
    file_from_json,
    rolled_back_from_json,
)
from upr_backup.repository.repository import Repository
from upr_client.admin import CutInfo
from upr_client.endpoints import Login


@dataclass(frozen=True, slots=True)
class Task:
    """What is needed to read a group of partitions, wherever that runs; it travels pickled.

    Args:
        location: of the repository's storage.
        target: addresses of the server.
        index: of the group in the attempt.
        starts: by partition, its entry in the backup before; None to begin at 0.
        cut: where to end; with the pins of the group's partitions.
        patience: how many seconds a server that went away is waited for.
        key: of an encrypted repository.
    """

    location: str
    target: str
    bucket: str
    bucket_version: str
    number: int
    attempt: str
    index: int
    starts: Mapping[int, Entry | None]
    cut: CutInfo
    patience: float
    login: Login = field(default_factory=Login)
    key: bytes | None = field(default=None, repr=False)


class TaskResult(NamedTuple):
    """What was read of a group: its file, None without rows; entries, with file 0 where there are rows; rollbacks."""

    file: FileRef | None
    entries: dict[int, Entry]
    rollbacks: list[RolledBack]

    def to_json(self) -> Json:
        return {
            "file": None if self.file is None else self.file._asdict(),
            "entries": {str(p): entry_to_json(entry) for p, entry in self.entries.items()},
            "rollbacks": [list(rollback) for rollback in self.rollbacks],
        }

    @classmethod
    def from_json(cls, record: Json) -> Self:
        """Return what ``to_json`` gave; one of NOT_WRITTEN_HERE for anything else."""
        return cls(
            None if record["file"] is None else file_from_json(record["file"]),
            {int(p): entry_from_json(entry) for p, entry in record["entries"].items()},
            [rolled_back_from_json(rollback) for rollback in record["rollbacks"]],
        )


def staged_result(
    repository: Repository, number: int, attempt: str, index: int
) -> TaskResult | None:
    """Return what was read of a group whose file is there; None when the group has to be read."""
    record = repository.staged_group(number, attempt, index)
    if record is None:
        return None
    try:
        result = TaskResult.from_json(record)
        size = 0 if result.file is None else repository.storage.size(result.file.path)
    except (FileNotFoundError, *NOT_WRITTEN_HERE):
        # What is not there, or was written by somebody else, is read again.
        return None
    return result if result.file is None or size == result.file.bytes else None


def stage_read(
    repository: Repository, task: Task, read: Callable[[Task, str], TaskResult]
) -> TaskResult:
    """Read a group into a new data file, which ``read`` makes durable, and record it; returns the result that counts,
    which may be another task's.
    """
    own = read(task, repository.new_data_name(task.number))
    repository.stage_group(task.number, task.attempt, task.index, own.to_json())
    # Of two tasks for one group the first one's record stays, and both have to report the same.
    return staged_result(repository, task.number, task.attempt, task.index) or own
