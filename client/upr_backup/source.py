"""The server as a backup's source: its cuts, and the changes of a group of partitions up to there."""

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from upr_backup.errors import HistoryChangedError, RepositoryDamagedError, RepositoryError
from upr_backup.repository import Storage, open_storage
from upr_backup.repository.documents import Entry, RolledBack, canonical, sha256
from upr_backup.repository.repository import Repository
from upr_backup.rows import LateCellsError, RowsWriter
from upr_backup.task import Task, TaskResult, stage_read
from upr_client import Client, MemoryPositions, Only, Position, Rollback, Tuning
from upr_client.admin import CutInfo
from upr_client.errors import CutNotFoundError, SnapshotGoneError
from upr_client.types import Bucket
from upr_protocol.errors import BucketGoneError, PositionDamagedError, UnavailableError, UprError
from upr_protocol.limits import BACKUP_CUTS_NAME

LEASE_SECONDS: Final = 900.0
"""Of a cut that is read."""
_RENEW_AGAIN_SECONDS: Final = 15.0
_BACK_SECONDS: Final = 30.0
"""Longest wait for a server that was there: it is restarted, or another one of its set is about to be active."""
_ASK_AGAIN_SECONDS: Final = 0.2
_ACTIVE_SECONDS: Final = 5.0
"""Longest search for the active server; what is asked next says what is wrong."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def go_to_active(client: Client, bucket: str) -> None:
    """Have a client ask the active server from now on, where it is found: a replica may lack the bucket and its cuts."""
    with suppress(UprError):
        client.bucket(bucket).get(b"-", seconds=_ACTIVE_SECONDS)


class ServerSource:
    """The cuts of one bucket that are for one repository, which their names begin with.

    One is made only under the repository's lock.
    """

    def __init__(self, client: Client, repository: Repository) -> None:
        self._admin = client.admin
        self._bucket = client.bucket(repository.bucket)
        self._repository = repository
        self._renew_at = 0.0
        # With its place, because a copy of a repository goes on by itself.
        own = sha256(canonical([repository.id, repository.storage.location]))
        self._names = f"{BACKUP_CUTS_NAME}{own[:16]}-"

    def make_cut(self) -> CutInfo:
        """Pin all partitions but dead ones, and give up every other cut that is for the repository.

        Raises:
            RepositoryError: the bucket is not the one of the repository.
            UprError: the server refused, or cannot be reached.
        """
        # A run that was killed, or whose request was answered too late, left one that nobody knows.
        for left in self._cuts():
            if left.name.startswith(self._names):
                self.release(left.name)
        name = f"{self._names}{secrets.token_hex(8)}"
        cut = self._admin.create_cut(self._bucket, name, lease=LEASE_SECONDS)
        version = f"{self._bucket.version:016x}"
        if version != self._repository.bucket_version:
            self.release(cut.name)
            raise self._another(
                f"its version is {version}, here it is {self._repository.bucket_version}"
            )
        self._renewed()
        times = cut.created_time, cut.expires_time, cut.lease_seconds
        return CutInfo(cut.name, *times, cut.pins, cut.left_out)

    def _another(self, why: str) -> RepositoryError:
        return RepositoryError(
            f"the bucket {self._bucket.name!r} at the server is not the one of this repository: {why}",
            hint="a bucket that was created anew needs a repository of its own: upr-backup REPOSITORY init",
        )

    def find_cut(self, name: str) -> CutInfo | None:
        """Return a cut that still holds, renewed."""
        found = [cut for cut in self._cuts(with_pins=True) if cut.name == name]
        if not found:
            return None
        try:
            self._admin.renew_cut(self._bucket, name, LEASE_SECONDS)
        except CutNotFoundError:
            return None
        self._renewed()
        return found[0]

    def _cuts(self, *, with_pins: bool = False) -> list[CutInfo]:
        until = time.monotonic() + _BACK_SECONDS
        while True:
            try:
                return self._admin.cuts(self._bucket, with_pins=with_pins)
            except BucketGoneError as error:
                if error.retriable:
                    raise
                # Of a run that goes on taking backups; its hint is for programs.
                raise self._another(error.message) from error
            except UnavailableError:
                if not self._renew_at or time.monotonic() > until:
                    raise
                time.sleep(_ASK_AGAIN_SECONDS)

    def renew(self, name: str) -> None:
        """Have a cut's lease begin anew when a third of it is over, or raise HistoryChangedError; called all the time."""
        if time.monotonic() < self._renew_at:
            return
        try:
            self._admin.renew_cut(self._bucket, name, LEASE_SECONDS)
            self._renewed()
        except CutNotFoundError as error:
            raise HistoryChangedError(f"the cut is gone: {error.message}") from error
        except UprError:
            # The reader waits for the server as well, and says when it takes too long.
            self._renew_at = time.monotonic() + _RENEW_AGAIN_SECONDS

    def _renewed(self) -> None:
        self._renew_at = time.monotonic() + LEASE_SECONDS / 3

    def release(self, name: str) -> None:
        """Give a cut up; where that fails its lease ends it."""
        with suppress(UprError):
            self._admin.release_cut(self._bucket, name)

    def committed(self, cut_time: int) -> None:
        """Have the server know that the repository has everything up to a cut, made at that time in microseconds, so that
        purging waits for the next backup.
        """
        at = _EPOCH + timedelta(microseconds=cut_time)
        # Without it a backup that comes late reads some partitions anew, and is as right.
        with suppress(UprError):
            self._admin.reset_consumer(
                self._bucket, f"{BACKUP_CUTS_NAME}{self._repository.id}", at, create=True
            )


def read_group(
    bucket: Bucket,
    storage: Storage,
    task: Task,
    path: str,
    progress: Callable[[int], Any],
    *,
    wide: bool = False,
) -> TaskResult:
    """Read partitions up to their cut into a new data file.

    Args:
        path: the file's name.
        progress: called with the rows read since the last call.
        wide: whether the file has further cells whatever the first rows have.

    Raises:
        HistoryChangedError: the cut is gone, or the server rolled back what was being read.
        UprError, OSError: the server or the storage failed.
    """
    writer = RowsWriter(storage, path, wide=wide)
    try:
        rollbacks, reached = _read(bucket, writer, task, progress)
        file = writer.finish()
    except (SnapshotGoneError, CutNotFoundError) as error:
        raise HistoryChangedError(f"the cut is gone: {error.message}") from error
    except LateCellsError:
        return read_group(bucket, storage, task, path, progress, wide=True)
    finally:
        writer.close()
    last = {rollback.partition: rollback for rollback in rollbacks}
    entries = {}
    for partition, entry in task.starts.items():
        begun = entry.end if entry else 0
        cut_at = last[partition].seqno if partition in last else None
        rows = int(writer.rows[partition])
        entries[partition] = Entry(
            begun if cut_at is None else cut_at,
            reached[partition].seqno,
            cut_at,
            rows,
            int(writer.data_bytes[partition]),
            0 if rows else None,
            reached[partition].to_document(),
        )
    return TaskResult(file, entries, rollbacks)


def _read(
    bucket: Bucket,
    writer: RowsWriter,
    task: Task,
    progress: Callable[[int], Any],
) -> tuple[list[RolledBack], Mapping[int, Position]]:
    try:
        positions = {
            partition: Position.from_document(entry.position)
            for partition, entry in task.starts.items()
            if entry is not None and entry.position is not None
        }
    except PositionDamagedError as error:
        raise RepositoryDamagedError(f"backup {task.number - 1}: {error.message}") from error
    rollbacks: list[RolledBack] = []
    # Up to where the chain's data stays.
    stays = {p: entry.end if entry else 0 for p, entry in task.starts.items()}
    changes = bucket.changes(
        resume=MemoryPositions(positions),
        until=task.cut,
        only=Only(list(task.starts)),
        tuning=Tuning(retry_seconds=task.patience),
        on_rollback="event",
    )
    with changes:
        for batch in changes.batches():
            if isinstance(batch, Rollback):
                rollbacks.append(_checked(batch, stays[batch.partition]))
                stays[batch.partition] = batch.seqno
                continue
            writer.add(batch)
            progress(batch.rows)
        reached = changes.positions()
    short = [p for p, pin in task.cut.pins.items() if reached[p].seqno != pin.seqno]
    if short:
        raise HistoryChangedError(f"partition {short[0]} did not end where the cut is")
    return rollbacks, reached


def _checked(rollback: Rollback, stays: int) -> RolledBack:
    # Also where nothing but seqnos was read: what the new history has in their place would be lost.
    if rollback.from_seqno != stays:
        raise HistoryChangedError(
            f"the server rolled partition {rollback.partition} back to {rollback.seqno} while it was read"
        )
    return RolledBack(rollback.partition, rollback.from_seqno, rollback.seqno, rollback.words)


def backup_group(
    task: Task,
    progress: Callable[[int], Any] = lambda rows: None,
) -> TaskResult:
    """Read a group over a connection of its own, write and record it; returns the result that counts.

    Args:
        progress: called with the rows read since the last call; what it raises ends the reading.

    Raises:
        HistoryChangedError: the cut is gone, or the server rolled back what was being read.
        RepositoryError: there is another repository at the location.
        UprError, OSError: the server or the storage failed.
    """
    repository = Repository.open(open_storage(task.location), task.key)
    if repository.bucket_version != task.bucket_version:
        raise RepositoryError(f"there is another repository in {task.location} by now")
    with Client(task.target, retry_seconds=task.patience, **task.login.options) as client:
        bucket = client.bucket(task.bucket)
        return stage_read(
            repository,
            task,
            lambda task, path: read_group(bucket, repository.storage, task, path, progress),
        )
