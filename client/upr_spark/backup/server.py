"""The server as a backup's source: its cut, and its changes up to there."""

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from upr_client import (
    Bucket,
    CutInfo,
    CutNotFoundError,
    MemoryPositions,
    Pin,
    Position,
    Rollback,
    SnapshotGoneError,
)
from upr_client.arrow import record_batch
from upr_protocol.errors import UprError
from upr_protocol.failover import format_failover_id, parse_failover_id
from upr_spark.backup.chain import Entry, RolledBack
from upr_spark.backup.errors import HistoryChangedError, RepositoryError
from upr_spark.backup.repository import Repository
from upr_spark.backup.run import CutPoint, GroupResult, PinnedAt
from upr_spark.backup.storage import Storage
from upr_spark.backup.tables import RowsWriter

_LEASE_SECONDS = 900.0
_RETRY_SECONDS = 60.0


class ServerSource:
    """Reads one bucket.

    Args:
        bucket: the bucket.
        repository: the one that the backup is for.
        progress: called with the rows read since the last call.
    """

    def __init__(self, bucket: Bucket, repository: Repository, progress: Any) -> None:
        self._bucket = bucket
        self._repository = repository
        self._storage: Storage = repository.storage
        self._progress = progress
        self._renewed = 0.0

    def make_cut(self) -> CutPoint:
        """Pin all partitions.

        Raises:
            RepositoryError: the bucket is not the one of the repository.
            UprError: the server refused, or cannot be reached.
        """
        cut = self._bucket.create_cut(f"upr-backup-{secrets.token_hex(8)}", lease=_LEASE_SECONDS)
        version = f"{self._bucket.version:016x}"
        if version != self._repository.bucket_version:
            self.release(cut.name)
            raise RepositoryError(
                f"the bucket {self._bucket.name!r} at the server is not the one of this repository: "
                f"its version is {version}, here it is {self._repository.bucket_version}",
                hint="a bucket that was created anew needs a repository of its own: upr-backup REPOSITORY init",
            )
        self._renewed = time.monotonic()
        return _cut_point(cut)

    def find_cut(self, name: str) -> CutPoint | None:
        """Return a cut that still holds, renewed."""
        found = [cut for cut in self._bucket.cuts(with_pins=True) if cut.name == name]
        if not found:
            return None
        try:
            self._bucket.renew_cut(name, _LEASE_SECONDS)
        except CutNotFoundError:
            return None
        self._renewed = time.monotonic()
        return _cut_point(found[0])

    def release(self, name: str) -> None:
        """Give a cut up; where that fails its lease ends it."""
        with suppress(UprError):
            self._bucket.release_cut(name)

    def read_group(
        self, starts: Mapping[int, Entry | None], cut: CutPoint, path: str
    ) -> GroupResult:
        """Read partitions up to the cut into a new data file."""
        positions = {
            partition: Position.from_json(entry.position)
            for partition, entry in starts.items()
            if entry is not None and entry.position is not None
        }
        writer = RowsWriter(self._storage, path)
        try:
            rollbacks, reached = self._read(writer, starts, positions, cut)
            file = writer.finish()
        except (SnapshotGoneError, CutNotFoundError) as error:
            raise HistoryChangedError(f"the cut is gone: {error.message}") from error
        finally:
            writer.close()
        last = {rollback.partition: rollback for rollback in rollbacks}
        entries = {}
        for partition, entry in starts.items():
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
                reached[partition].to_json(),
            )
        return GroupResult(file, entries, rollbacks)

    def _read(
        self,
        writer: RowsWriter,
        starts: Mapping[int, Entry | None],
        positions: Mapping[int, Position],
        cut: CutPoint,
    ) -> tuple[list[RolledBack], dict[int, Position]]:
        rollbacks: list[RolledBack] = []
        pins = {partition: _pin(cut.pins[partition]) for partition in starts}
        changes = self._bucket.changes(
            list(starts),
            positions=MemoryPositions(positions),
            until=CutInfo(cut.name, cut.time, 0, 0.0, pins),
            on_rollback="event",
            retry_seconds=_RETRY_SECONDS,
        )
        with changes:
            for batch in changes.batches():
                for rollback in batch.rollbacks:
                    rollbacks.append(_checked(rollback, int(writer.rows[rollback.partition])))
                writer.add(record_batch(batch))
                self._progress(batch.rows)
                self._renew(cut)
            reached = changes.positions()
        short = [p for p, pin in pins.items() if reached[p].seqno != pin.seqno]
        if short:
            raise HistoryChangedError(f"partition {short[0]} did not end where the cut is")
        return rollbacks, reached

    def _renew(self, cut: CutPoint) -> None:
        if time.monotonic() - self._renewed < _LEASE_SECONDS / 3:
            return
        # One that cannot be reached now is asked again with the next batch.
        with suppress(UprError):
            self._bucket.renew_cut(cut.name, _LEASE_SECONDS)
            self._renewed = time.monotonic()


def _checked(rollback: Rollback, rows: int) -> RolledBack:
    if rows:
        raise HistoryChangedError(
            f"the server rolled partition {rollback.partition} back to {rollback.seqno} while it was read"
        )
    return RolledBack(rollback.partition, rollback.from_seqno, rollback.seqno, rollback.words)


def _pin(pin: PinnedAt) -> Pin:
    return Pin(parse_failover_id(pin.failover_id) if pin.failover_id else None, pin.seqno)


def _cut_point(cut: Any) -> CutPoint:
    pins = {
        partition: PinnedAt(
            format_failover_id(pin.failover_id) if pin.failover_id else "", pin.seqno
        )
        for partition, pin in cut.pins.items()
    }
    return CutPoint(cut.name, cut.created_time, pins)
