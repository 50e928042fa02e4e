"""The consumer of one bucket as a pure state machine: starts, answers, frames and positions.

No I/O, clock or wire: a shell passes in the server's messages in their order, and asks for the next action. The state
of all partitions lies in arrays, so a frame costs a few statements whatever its number of runs,
and nothing at all for each mutation.

Source: specification, "Handshakes" and "Snapshot Markers and Deduplication".
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_protocol.block import I64, U64, Block, Mask, joined_runs, select_runs
from upr_protocol.errors import (
    InvalidArgumentError,
    PositionBucketError,
    ProtocolError,
    SnapshotGoneError,
)
from upr_protocol.failover import FailoverLog, check_partition
from upr_protocol.handshake import (
    PendingRollback,
    Pin,
    RollbackAnswer,
    check_complete,
    check_pin,
    decide_rollback,
)
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import MarkerHistories, Position
from upr_protocol.position_table import (
    NO_RECORDS,
    RECORD,
    ROW,
    START,
    UNKNOWN_HORIZON,
    PositionTable,
    Rows,
    log_of_records,
    log_records,
)

ALL_PARTITIONS: Final = range(PARTITIONS)


class State(enum.IntEnum):
    """Where a partition stands."""

    IDLE = 0
    """Not followed."""
    READY = 1
    """A Start may be sent."""
    STARTING = 2
    """A Start was sent, its answer is awaited."""
    LIVE = 3
    """The stream is open."""
    UNDOING = 4
    """The server answered "roll back"; ``undone`` is awaited."""
    DONE = 5
    """Ended for good: finished or stopped."""
    FAILED = 6
    """Ended with an error that a retry does not fix."""


class Fate(enum.Enum):
    """Meaning of an end for its streams."""

    DONE = "done"
    AGAIN = "again"
    FAILED = "failed"


_DONE_REASONS: Final = frozenset({"FINISHED", "STOPPED"})
_FATAL_REASONS: Final = frozenset(
    {
        "SUPERSEDED",
        "BUCKET_NOT_FOUND",
        "INVALID_ARGUMENT",
        "SNAPSHOT_GONE",
    }
)


def fate_of(reason: str) -> Fate:
    """Return the meaning of an Ended with this reason; an unknown reason means: start again."""
    if reason in _DONE_REASONS:
        return Fate.DONE
    return Fate.FAILED if reason in _FATAL_REASONS else Fate.AGAIN


Beginning = Literal["now"] | int | None
"""Beginning of a consumer without data: None for the very beginning, "now", or microseconds since the epoch."""


class StartRequest(NamedTuple):
    """Request to start one partition.

    ``failover_id``, ``data_id`` and ``horizon`` are None when they are not known; ``until_seqno`` and ``until_exact`` are None
    for no such end. ``beginning`` is None for the very beginning, "now", or microseconds since the epoch.
    """

    partition: int
    failover_id: int | None
    seqno: int
    data_id: int | None
    until_seqno: int | None
    until_now: bool
    until_exact: int | None = None
    beginning: Beginning = None
    horizon: int | None = None


@dataclass(slots=True)
class Delivery:
    """The runs of one frame that belong to open streams, in order, over all its blocks.

    Args:
        blocks: the blocks, without runs of streams that had ended.
        partitions: each run's partition.
        ends: each run's end seqno.
        horizons: the position's horizon after each run.
        is_marker: whether the run ends in a marker that is true for this reader.
        folded: the number of acknowledged runs.
    """

    blocks: list[Block]
    partitions: I64
    ends: U64
    horizons: U64
    is_marker: Mask
    folded: int = 0

    def markers(self) -> list[tuple[int, int]]:
        """The (partition, seqno) of the markers, in order."""
        where = self.is_marker
        return list(zip(self.partitions[where].tolist(), self.ends[where].tolist(), strict=True))


def select_blocks(blocks: Sequence[Block], live: Mask) -> list[Block]:
    """Return the blocks with only their live runs, without those that have none; ``live`` has one flag a run."""
    kept = []
    first = 0
    for block in blocks:
        keep = live[first : first + len(block.runs)]
        first += len(block.runs)
        if keep.any():
            kept.append(select_runs(block, keep))
    return kept


def chain_runs(partitions: I64, ends: U64, before: U64, reached: U64) -> None:
    """Let each run that is not its partition's first in the frame continue the one before it, in place."""
    order = np.argsort(partitions, kind="stable")
    again = partitions[order[1:]] == partitions[order[:-1]]
    previous, following = order[:-1][again], order[1:][again]
    before[following] = ends[previous]
    if (reached[previous] > reached[following]).any():
        # One after the other: what the first of three runs reached holds for the third as well.
        for one, other in zip(previous.tolist(), following.tolist(), strict=True):
            reached[other] = max(reached[one], reached[other])


# As plain integers: of an enum each use is a lookup by name, and some are in loops over 1024 partitions. And numpy asks
# an enum for attributes in Python code, of which it drops whatever is raised there, a KeyboardInterrupt too.
_IDLE, _READY, _STARTING, _LIVE, _UNDOING, _DONE, _FAILED = map(int, State)

_NO_TOKEN: Final = -1
_STATE_AFTER: Final = {
    Fate.DONE: _DONE,
    Fate.AGAIN: _READY,
    Fate.FAILED: _FAILED,
}


class Consumer:
    """Consumer of any number of partitions, over one call and its successors.

    A bucket that was dropped and created again has another version. A position of the old one keeps its version until
    the partition's data is undone: its Start names no id, and any answer to it is a rollback to 0.

    One delivery at a time: after ``frame`` returned one, ``acknowledge`` it before anything else is handed in.

    Args:
        partitions: which to follow, 0 to 1023.
        positions: where to resume; a partition without one is new.
        until_now: whether each partition ends at the seqno current at its first start.
        inclusive: whether a rollback to R may resume at a marker at R itself.
        exact: where partitions end exactly, each at its pin and as of it, or else with SnapshotGoneError.
        beginning: of a partition without data. Earlier rows are never requested, and the seqno of the beginning counts
            as a marker, also for a rollback.
        restart: whether a rollback undoes everything and begins at 0, instead of returning to a marker.
        lasting: whether partitions may be added later, so that having none is not the end.
        bucket: the bucket's name; empty if unknown.

    Raises:
        InvalidArgumentError: a partition is out of range.
        PositionBucketError: a position is of a bucket of another name.
    """

    def __init__(
        self,
        partitions: Iterable[int],
        positions: Mapping[int, Position] | None = None,
        *,
        until_now: bool = False,
        inclusive: bool = False,
        exact: Mapping[int, Pin] | None = None,
        beginning: Beginning = None,
        restart: bool = False,
        lasting: bool = False,
        bucket: str = "",
    ) -> None:
        self.bucket = bucket
        self._version: U64 = np.zeros(PARTITIONS, np.uint64)
        self._seqno: U64 = np.zeros(PARTITIONS, np.uint64)
        self._horizon: U64 = np.zeros(PARTITIONS, np.uint64)
        self._failover: U64 = np.zeros(PARTITIONS, np.uint64)
        self._data: U64 = np.zeros(PARTITIONS, np.uint64)
        self._changed = np.zeros(PARTITIONS, np.bool_)
        self._markers = MarkerHistories()
        self._logs: dict[int, Rows] = {}
        self._born: U64 = np.zeros(PARTITIONS, np.uint64)
        self._begun = np.zeros(PARTITIONS, np.bool_)
        self.partitions = (
            list(partitions)
            if partitions is ALL_PARTITIONS
            else sorted({check_partition(partition) for partition in partitions})
        )
        self.bucket_version = 0
        self._until_now, self._lasting = until_now, lasting
        self._inclusive = inclusive or beginning is not None
        self._beginning, self._restart = beginning, restart
        self._exact = dict(exact or {})
        self._followed = np.array(self.partitions, np.int64)
        self._state = np.zeros(PARTITIONS, np.uint8)
        self._high = np.zeros(PARTITIONS, np.uint64)
        self._token = np.full(PARTITIONS, _NO_TOKEN, np.int64)
        self._stream = np.zeros(PARTITIONS, np.uint64)
        self._target = np.zeros(PARTITIONS, np.uint64)
        self._stale = np.zeros(PARTITIONS, np.int64)
        self._undoing: dict[int, PendingRollback] = {}
        self._open: Delivery | None = None
        # Positions that came with deliveries, and those of them that the server of this call may never have given.
        self._moved = np.zeros(PARTITIONS, np.bool_)
        self._unsure = np.zeros(PARTITIONS, np.bool_)
        self._state[self._followed] = _READY
        self._nameless: I64 = np.zeros(0, np.int64)
        if positions:
            table = PositionTable.among(positions, self.partitions)
            self._set_positions(table)
            if bucket and "" in table.names:
                nameless = table.rows["bucket"] == table.names.index("")
                self._nameless = table.rows["partition"][nameless].astype(np.int64)
        # A set: np.unique imports a module on its first call, which takes longer than the rest of a start.
        versions = set(self._version.tolist()) - {0}
        if len(versions) == 1:
            # Of two versions nothing is known but that one of them at least is void.
            self.bucket_version = versions.pop()

    # Positions, of all partitions as columns.

    def _set_positions(self, table: PositionTable) -> None:
        rows = table.rows
        partitions, seqnos, data_ids = (
            rows["partition"].astype(np.int64),
            rows["seqno"],
            rows["data_id"],
        )
        for index, name in enumerate(table.names):
            if self.bucket and name not in ("", self.bucket):
                first = partitions[rows["bucket"] == index][0]
                raise PositionBucketError(
                    f"bucket of the stored position of partition {first} is {name!r}; must be {self.bucket!r}",
                    hint="keep the positions, and the data, of each bucket in a place of their own",
                )
        # With nothing received an id of data says only that it began at 0; see ``_begin_at``.
        self._begun[partitions] = (seqnos == 0) & (data_ids != 0)
        self._moved[partitions] = self._unsure[partitions] = False
        self._version[partitions] = rows["bucket_version"]
        self._seqno[partitions], self._horizon[partitions] = seqnos, rows["horizon"]
        self._failover[partitions], self._data[partitions] = rows["failover_id"], data_ids
        self._markers.replace(partitions, rows["markers"].astype(np.int64), table.markers)
        self._set_logs(partitions, rows["records"].astype(np.int64), table.records)

    def _set_position(self, partition: int, position: Position) -> None:
        """As ``_set_positions`` for one of this bucket, at a small part of the cost: a node's loss undoes all of them."""
        seqno, data_id, horizon = position.seqno, position.data_id or 0, position.horizon
        self._begun[partition] = seqno == 0 and data_id != 0
        self._moved[partition] = self._unsure[partition] = False
        self._version[partition] = position.bucket_version
        self._seqno[partition] = seqno
        self._horizon[partition] = UNKNOWN_HORIZON if horizon is None else horizon
        self._failover[partition], self._data[partition] = position.failover_id or 0, data_id
        self._markers.put(partition, position.markers)
        self._set_log(partition, position.log)

    def _set_logs(self, partitions: I64, counts: I64, records: Rows) -> None:
        """Take logs of so many records for each of the partitions; a log of one record at 0 is its id."""
        firsts, some = np.cumsum(counts) - counts, counts > 0
        born = counts == 1
        born[some] &= records["seqno"][firsts[some]] == 0
        self._born[partitions] = 0
        self._born[partitions[born]] = records["failover_id"][firsts[born]]
        if self._logs:
            for partition in partitions.tolist():
                self._logs.pop(partition, None)
        for at in np.flatnonzero(some & ~born).tolist():
            self._logs[int(partitions[at])] = records[firsts[at] : firsts[at] + counts[at]]

    def _set_log(self, partition: int, log: FailoverLog | None) -> None:
        self._born[partition] = 0
        self._logs.pop(partition, None)
        if log is not None and len(log) == 1 and not log.newest.seqno:
            self._born[partition] = log.newest.failover_id
        elif log is not None:
            self._logs[partition] = log_records(log)

    def _log(self, partition: int) -> FailoverLog | None:
        if born := int(self._born[partition]):
            return FailoverLog.born(born)
        return log_of_records(self._logs.get(partition, NO_RECORDS))

    def _log_records(self, partition: int) -> Rows:
        if born := int(self._born[partition]):
            return np.array([(born, 0)], RECORD)
        return self._logs.get(partition, NO_RECORDS)

    # Actions.

    @property
    def finished(self) -> bool:
        """Whether every partition ended for good."""
        return not self._lasting and bool(self._state[self._followed].min(initial=_DONE) >= _DONE)

    def state(self, partition: int) -> State:
        return State(int(self._state[partition]))

    @property
    def all_started(self) -> bool:
        """Whether the stream of every partition is open, or came to its end."""
        state = self._state[self._followed]
        return bool(((state == _LIVE) | (state == _DONE)).all())

    def ready(self) -> I64:
        """The partitions for which a Start may be sent."""
        ready: I64 = (self._state == _READY).nonzero()[0]
        return ready

    def starts(self, partitions: Iterable[int]) -> list[StartRequest]:
        """Return what to start for these partitions, all of them ready, and await the answers."""
        wanted = np.fromiter(partitions, np.int64)
        for partition in wanted[self._state[wanted] != _READY].tolist():
            raise InvalidArgumentError(
                f"partition {partition} is {self.state(partition).name}; must be READY"
            )
        records = self._start(wanted)
        if self._beginning is not None:
            # A beginning is chosen by a client that has nothing, so that it names no id either.
            nothing = records["seqno"] == 0
            records["failover_id"][nothing] = records["data_id"][nothing] = 0
        names = ("partition", "failover_id", "seqno", "data_id", "horizon")
        columns = [records[name] for name in names]
        columns += self._target[wanted], self._begun[wanted]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            StartRequest(
                partition,
                failover_id or None,
                seqno,
                data_id or None,
                target or None,
                self._until_now and not target,
                self._exact[partition].seqno if partition in self._exact else None,
                None if seqno or has_begun else self._beginning,
                horizon or None,
            )
            for partition, failover_id, seqno, data_id, horizon, target, has_begun in rows
        ]

    def _start(self, wanted: I64) -> npt.NDArray[np.void]:
        """Return what is held of partitions as records of dtype START, and await the answers.

        An id of 0 is none; a horizon is 0 where it is not known, or nothing is held.
        """
        self._state[wanted] = _STARTING
        known = self._version[wanted] == self.bucket_version
        seqnos, horizons = self._seqno[wanted], self._horizon[wanted]
        records = np.zeros(len(wanted), START)
        records["partition"], records["seqno"] = wanted, seqnos
        records["failover_id"] = self._failover[wanted] * known
        records["data_id"] = self._data[wanted] * known
        records["horizon"] = np.where(
            (seqnos > 0) & (horizons != UNKNOWN_HORIZON), horizons, np.uint64(0)
        )
        return records

    def plain_starts(self, partitions: Iterable[int]) -> npt.NDArray[np.void] | None:
        """As ``starts``, as records of dtype START, all with ``until_now`` or none; None when that does not say all."""
        wanted = np.fromiter(partitions, np.int64)
        if self._exact or self._beginning is not None or self._target[wanted].any():
            return None
        if (self._state[wanted] != _READY).any():
            return None
        return self._start(wanted)

    def follow(self, positions: Mapping[int, Position | None]) -> None:
        """Follow more partitions, each from a position or, with None, as new.

        Raises:
            InvalidArgumentError: one is followed already, or out of range.
            PositionBucketError: a position is of a bucket of another name.
        """
        fresh = Position.fresh(self.bucket_version, self.bucket)
        table = PositionTable.of(positions)
        if new := positions.keys() - table.keys():
            table = table.updated(PositionTable.of(dict.fromkeys(new, fresh)))
        partitions = table.rows["partition"].astype(np.int64)
        for partition in partitions[self._state[partitions] != _IDLE].tolist():
            raise InvalidArgumentError(f"partition {partition} is followed already")
        self._set_positions(table)
        self._high[partitions] = self._target[partitions] = 0
        self._state[partitions] = _READY
        self._list_followed()

    def unfollow(self, partitions: Iterable[int]) -> None:
        """Follow these partitions no more; a rollback that was pending is dropped."""
        self._changed[self._leave(partitions, _IDLE)] = False
        self._list_followed()

    def finish(self, partitions: Iterable[int]) -> None:
        """Take nothing more of these partitions; their positions stay."""
        gone = list(partitions)
        # No Start of theirs is answered any more, and who gives a partition up stores its position first.
        self._unsure[gone] &= self._state[gone] == _UNDOING
        self._leave(gone, _DONE)

    def resume(self, partitions: Iterable[int]) -> None:
        self._state[list(partitions)] = _READY

    def _leave(self, partitions: Iterable[int], state: int) -> list[int]:
        gone = list(partitions)
        self._stale[gone] += self._state[gone] == _STARTING
        self._state[gone], self._token[gone] = state, _NO_TOKEN
        self._undoing = {p: pending for p, pending in self._undoing.items() if p not in gone}
        return gone

    def _list_followed(self) -> None:
        self._followed = np.flatnonzero(self._state != _IDLE)
        self.partitions = self._followed.tolist()

    def abandon(self) -> None:
        """Have the open delivery not be acknowledged any further."""
        self._open = None

    # Answers of the server.

    def opened(self, bucket_version: int) -> None:
        """The call was accepted. Positions of another version of the bucket wait for their rollback to 0."""
        # A caller that was cancelled when the last call was lost may not have reported it.
        self.disconnected()
        if bucket_version != self.bucket_version:
            self._high[:] = 0
        self.bucket_version = bucket_version
        # Another server, or this one after a crash, may lack some of it: what it answers to the Start tells.
        self._unsure[:] = self._moved & (self._state < _DONE)
        followed = self._followed
        self._version[followed[self._version[followed] == 0]] = bucket_version
        for partition in followed[self._version[followed] != bucket_version].tolist():
            self._renew(partition)
        # Positions without a name are this bucket's if they have its version: they are stored with it.
        self._changed[self._nameless[self._version[self._nameless] == bucket_version]] = True
        self._nameless = self._nameless[:0]

    def _renew(self, partition: int) -> None:
        """Make a partition of another version of the bucket new where it has nothing that would have to be undone."""
        if self._seqno[partition] == 0 and self._state[partition] < _DONE:
            self._set_position(partition, Position.fresh(self.bucket_version, self.bucket))
            self._target[partition] = 0
            self._changed[partition] = True

    def disconnected(self) -> None:
        """The call ended: what was open or starting may be started again, in another call."""
        again = (self._state == _STARTING) | (self._state == _LIVE)
        self._state[again] = _READY
        self._token[:] = _NO_TOKEN
        self._stale[:] = 0

    def is_stale(self, partition: int) -> bool:
        """Whether the answer that came answers a Start of before the partition was followed no more; ask once."""
        stale = partition < PARTITIONS and bool(self._stale[partition])
        if stale:
            self._stale[partition] -= 1
        return stale

    def _expect_starting(self, partition: int) -> None:
        if partition >= PARTITIONS or self._state[partition] != _STARTING:
            raise ProtocolError(
                f"the server answered a Start of partition {partition} that was not sent"
            )

    def started(
        self,
        partition: int,
        token: int,
        failover_id: int,
        high_seqno: int,
        until_seqno: int | None,
        log: FailoverLog | None,
        start_seqno: int | None = None,
    ) -> None:
        """A stream is open; ``start_seqno`` says where, for a Start with a beginning.

        Raises:
            ProtocolError: no Start was sent for the partition, or the answer contradicts itself.
            SnapshotGoneError: the exact end lies in a history that was left.
        """
        self._expect_starting(partition)
        if (pin := self._exact.get(partition)) is not None:
            known = self._log(partition) if log is None else log
            try:
                check_pin(partition, pin, failover_id, until_seqno, known)
            except SnapshotGoneError:
                self._state[partition] = _FAILED
                raise
        if not failover_id or (log is not None and log.newest.failover_id != failover_id):
            raise ProtocolError(
                f"Started of partition {partition} names id {failover_id:016x} and the log {log}"
            )
        if self.is_of_another(partition):
            raise ProtocolError(
                f"partition {partition} was started at seqno {self._seqno[partition]} without an id"
            )
        self._state[partition] = _LIVE
        self._unsure[partition] = False
        self._token[partition] = token
        self._stream[partition] = failover_id
        self._high[partition] = max(int(self._high[partition]), high_seqno)
        if self._failover[partition] != failover_id or log is not None:
            self._failover[partition] = failover_id
            self._changed[partition] = True
        if log is not None:
            self._set_log(partition, log)
        if start_seqno is not None and self._beginning is not None:
            self._begin_at(partition, start_seqno, failover_id)
        # Also at 0, in an empty partition: what is written while the connection is lost is not to be missed.
        self._begun[partition] = True
        if self._until_now and until_seqno:
            self._target[partition] = until_seqno

    def started_plain(self, records: npt.NDArray[np.void]) -> None:
        """Streams are open, as these records of dtype STARTED say; all of them, or none with an error.

        Raises:
            ProtocolError: no Start was sent for a partition, or an answer contradicts itself.
        """
        if self._stale.any():
            records = records[[not self.is_stale(p) for p in records["partition"].tolist()]]
        p = records["partition"].astype(np.int64)
        sent = (p < PARTITIONS) & (records["failover_id"] != 0)
        sent &= self._state[np.minimum(p, PARTITIONS - 1)] == _STARTING
        if not sent.all():
            wrong = records[~sent][0]
            raise ProtocolError(
                f"the server started partition {wrong['partition']} under id {int(wrong['failover_id']):016x}: "
                "no Start was sent, or it is no id"
            )
        if np.bincount(p, minlength=1).max() > 1:
            raise ProtocolError("the server started a partition twice")
        ids, born = records["failover_id"].astype(np.uint64), records["born"] != 0
        if (self._version[p] != self.bucket_version).any():
            raise ProtocolError(
                "the server started streams with data of another version of the bucket"
            )
        self._state[p], self._token[p], self._stream[p] = _LIVE, records["token"], ids
        self._unsure[p] = False
        self._high[p] = np.maximum(self._high[p], records["high_seqno"])
        self._changed[p[(self._failover[p] != ids) | born]] = True
        self._failover[p] = ids
        # These logs are the ids at 0; made only when somebody asks.
        self._born[p[born]] = ids[born]
        if self._until_now:
            self._target[p] = records["high_seqno"]

    def _begin_at(self, partition: int, seqno: int, failover_id: int) -> None:
        """Stand at a seqno with nothing, as if everything up to there were known: nothing of it is wanted."""
        if self._seqno[partition]:
            raise ProtocolError(
                f"partition {partition} was started at {self._seqno[partition]}; the answer says {seqno}"
            )
        self._seqno[partition] = self._horizon[partition] = seqno
        self._data[partition] = failover_id
        # At 0 there was no marker.
        self._markers.add(np.array([partition]), np.array([seqno], np.uint64))
        self._changed[partition] = True

    def rollback(self, partition: int, told: RollbackAnswer) -> PendingRollback | None:
        """Handle the answer "roll back". Return the data to undo first; None if there is none.

        With nothing to undo the new id is taken at once and the partition is ready; its position has changed and
        is to be stored before the Start is sent.

        Raises:
            ProtocolError: no Start was sent for the partition, or the answer contradicts itself.
        """
        self._expect_starting(partition)
        try:
            pending, undo = decide_rollback(
                partition,
                self.position(partition),
                self.bucket_version,
                told,
                inclusive=self._inclusive,
                restart=self._restart,
            )
        except InvalidArgumentError as error:
            raise ProtocolError(f"Rollback of partition {partition}: {error.message}") from error
        # After another history the old end may never be reached.
        self._target[partition] = 0
        self._high[partition] = 0
        if not undo:
            self._apply(pending)
            return None
        self._state[partition] = _UNDOING
        self._unsure[partition] = True
        self._undoing[partition] = pending
        return pending

    def is_of_another(self, partition: int) -> bool:
        """Whether a partition's position belongs to another version of the bucket."""
        return bool(self._version[partition] != self.bucket_version)

    def _apply(self, pending: PendingRollback) -> None:
        self._set_position(pending.partition, pending.after)
        self._state[pending.partition] = _READY
        self._changed[pending.partition] = True
        if self.is_of_another(pending.partition):
            # Dropped once more while the application was undoing.
            self._renew(pending.partition)

    @property
    def undoing(self) -> list[PendingRollback]:
        """The rollbacks that wait for ``undone``."""
        return list(self._undoing.values())

    def undone(self, partition: int) -> None:
        """Record that the application undid its data: the new position holds, and must be stored before the next Start.

        Raises:
            InvalidArgumentError: no rollback is pending for the partition.
        """
        pending = self._undoing.pop(partition, None)
        if pending is None:
            raise InvalidArgumentError(f"no rollback is pending for partition {partition}")
        self._apply(pending)

    def refused(self, partition: int, retriable: bool) -> None:
        """A Start was refused; nothing is undone. Retriable: it may be sent again, after a pause.

        Raises:
            ProtocolError: no Start was sent for the partition.
        """
        self._expect_starting(partition)
        self._state[partition] = _READY if retriable else _FAILED

    def ended(self, streams: Sequence[tuple[int, int, int | None]], reason: str) -> list[int]:
        """Streams (partition, token, seqno) ended. Return the partitions that this concerns; old tokens do not count.

        The seqno is where the server says that the stream stood; None where it does not say.

        What ``fate_of(reason)`` says holds for them, with one exception: a stream that finished where a row may
        be missing for this reader is started again, up to its horizon.

        Raises:
            ProtocolError: a stream stood elsewhere than what was received reaches to.
            SnapshotGoneError: such a stream was to end exactly there; what was missed is not to be had.
        """
        concerned = []
        # At the end of a drain that is each partition: a number of numpy's takes many times as long to compare.
        token_of, state_of = self._token.item, self._state.item
        seqno_of, horizon_of = self._seqno.item, self._horizon.item
        for partition, token, seqno in streams:
            if partition >= PARTITIONS or token_of(partition) != token:
                continue
            if state_of(partition) != _LIVE:
                continue
            reached = seqno_of(partition)
            if seqno not in (None, reached):
                raise ProtocolError(
                    f"partition {partition} ended at seqno {seqno}, and what came before reaches {reached}"
                )
            concerned.append(partition)
        state = _STATE_AFTER[fate_of(reason)]
        for partition in concerned:
            self._token[partition] = _NO_TOKEN
            self._state[partition] = state
            if reason != "FINISHED":
                continue
            reached, horizon = seqno_of(partition), horizon_of(partition)
            if partition in self._exact:
                self._state[partition] = _FAILED
                told = None if horizon == UNKNOWN_HORIZON else horizon
                check_complete(partition, reached, told)
                self._state[partition] = _DONE
            elif reached < horizon < UNKNOWN_HORIZON:
                self._target[partition] = horizon
                self._state[partition] = _READY
        return concerned

    def highs(self, partitions: I64, high_seqnos: U64) -> None:
        self._high[partitions] = np.maximum(self._high[partitions], high_seqnos)

    def frame(self, blocks: Sequence[Block], tokens: npt.NDArray[np.integer]) -> Delivery | None:
        """Take the blocks of a frame, each checked. Return what belongs to open streams, None when nothing does.

        Raises:
            ProtocolError: the tokens do not fit the runs, or a run does not continue its stream.
        """
        if self._open is not None:
            raise InvalidArgumentError("the delivery before this one was not acknowledged")
        runs = joined_runs([block.runs for block in blocks])
        if len(tokens) != len(runs):
            raise ProtocolError(f"a frame of {len(runs)} runs carries {len(tokens)} tokens")
        partitions = runs["partition"].astype(np.int64)
        live = self._token[partitions] == tokens
        kept = list(blocks)
        if not live.all():
            kept = select_blocks(blocks, live)
            if not kept:
                return None
            runs, partitions = runs[live], partitions[live]
        ends = runs["end_seqno"].astype(np.uint64)
        before = self._seqno[partitions]
        reached = np.maximum(self._horizon[partitions], runs["horizon"])
        if len(kept) > 1:
            chain_runs(partitions, ends, before, reached)
        wrong = runs["start_seqno"] != before
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ProtocolError(
                f"partition {partitions[at]} is at seqno {before[at]}, but the frame continues at "
                f"{runs['start_seqno'][at]}"
            )
        # The largest horizon since the last marker is at least the run's own, which is at least its end: equal to
        # the end means that both are, so that no row can be missing.
        self._open = Delivery(kept, partitions, ends, reached, reached == ends)
        return self._open

    # Consumption by the application.

    def acknowledge(self, delivery: Delivery) -> None:
        """Record that the application consumed a delivery completely: the positions move."""
        self.acknowledge_part(delivery, len(delivery.partitions))
        self._open = None

    def acknowledge_part(self, delivery: Delivery, runs: int, seqno: int | None = None) -> None:
        """The application has consumed the first ``runs`` runs, and the next one up to ``seqno``."""
        if delivery is not self._open:
            return
        part = slice(delivery.folded, max(runs, delivery.folded))
        delivery.folded = part.stop
        if part.stop > part.start:
            marked = self._move(delivery, part, delivery.ends[part])
            self._markers.add(delivery.partitions[part][marked], delivery.ends[part][marked])
        if seqno is not None and runs < len(delivery.partitions):
            self._move(delivery, slice(runs, runs + 1), np.array([seqno], np.uint64))

    def _move(self, delivery: Delivery, part: slice, seqnos: U64) -> Mask:
        """Move the positions of runs; return which of these end in a marker. Partitions that went meanwhile stay."""
        followed = self._state[delivery.partitions[part]] != _IDLE
        partitions, seqnos = delivery.partitions[part][followed], seqnos[followed]
        # Where a partition is there twice, the last one counts.
        self._seqno[partitions] = seqnos
        self._horizon[partitions] = delivery.horizons[part][followed]
        self._data[partitions] = self._stream[partitions]
        self._changed[partitions] = self._moved[partitions] = True
        self._high[partitions] = np.maximum(self._high[partitions], seqnos)
        return np.asarray(delivery.is_marker[part] & followed)

    # Queries.

    def position(self, partition: int) -> Position:
        """The acknowledged position of a partition that is followed."""
        horizon = int(self._horizon[partition])
        return Position(
            int(self._version[partition]),
            int(self._failover[partition]) or None,
            int(self._data[partition]) or None,
            int(self._seqno[partition]),
            None if horizon == UNKNOWN_HORIZON else horizon,
            self._markers.of(partition),
            self._log(partition),
            self.bucket,
        )

    def seqnos(self, partitions: I64) -> U64:
        """The acknowledged seqnos of partitions, as they are now."""
        return self._seqno[partitions]

    def positions(self, partitions: Sequence[int]) -> PositionTable:
        """The acknowledged positions of partitions that are followed, ascending, as they are now."""
        at = np.array(partitions, np.int64)
        rows = np.zeros(len(at), ROW)
        rows["partition"], rows["bucket_version"] = at, self._version[at]
        rows["failover_id"], rows["data_id"] = self._failover[at], self._data[at]
        rows["seqno"], rows["horizon"] = self._seqno[at], self._horizon[at]
        rows["markers"], markers = self._markers.columns(at)
        if self._logs:
            logs = [self._log_records(partition) for partition in partitions]
            rows["records"] = [len(log) for log in logs]
            records = np.frombuffer(b"".join([log.data for log in logs]), RECORD)
        else:
            born = self._born[at]
            rows["records"] = born != 0
            records = np.zeros(int(np.count_nonzero(born)), RECORD)
            records["failover_id"] = born[born != 0]
        return PositionTable(rows, [self.bucket], markers, records)

    def take_changed(self, *, sure: bool = False) -> list[int]:
        """The partitions whose position changed since this was asked last.

        Args:
            sure: only those whose positions the server of this call has for sure; the others stay changed.
        """
        taken = self._changed > self._unsure if sure else self._changed.copy()
        self._changed &= ~taken
        changed: list[int] = np.flatnonzero(taken).tolist()
        return changed

    def is_unsure(self, partition: int) -> bool:
        """Whether the server of this call may lack some of a partition's position; so until it answered its Start, and until what
        it lacks is undone."""
        return bool(self._unsure[partition])

    def mark_changed(self, partitions: Iterable[int]) -> None:
        """Undo ``take_changed`` for partitions whose position could not be stored."""
        self._changed[list(partitions)] = True

    @property
    def has_changed(self) -> bool:
        """Whether a position changed since ``take_changed``."""
        return bool(self._changed.any())

    @property
    def has_sure_change(self) -> bool:
        """As ``has_changed``, of what ``take_changed`` with ``sure`` takes."""
        return bool((self._changed > self._unsure).any())

    def lag(self) -> dict[int, int]:
        """Return for each partition how many seqnos the server was ahead of the position at its last report."""
        behind = np.maximum(self._high, self._seqno) - self._seqno
        return {partition: int(behind[partition]) for partition in self.partitions}
