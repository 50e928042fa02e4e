"""The consumer of one bucket as a pure state machine: what to start, what an answer means, what a frame adds.

No I/O, clock or wire: a shell hands in what the server said, in the order in which it said it, and asks what to
do. The state of all partitions lies in arrays, so a frame costs a few statements whatever its number of runs,
and nothing at all for each mutation.

Source: specification, "Handshakes" and "Snapshot Markers and Deduplication"; the project's design, "Handshake",
"Following" and the invariant "A position has a horizon".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64, Block
from upr_protocol.consumer_frames import chain_runs, cut_blocks
from upr_protocol.consumer_types import (
    Delivery,
    Fate,
    Indexes,
    PendingRollback,
    Pin,
    ProtocolError,
    StartRequest,
    State,
    fate_of,
)
from upr_protocol.errors import InvalidArgumentError, SnapshotGoneError
from upr_protocol.exact import check_complete, check_pin
from upr_protocol.failover import FailoverLog, check_partition, format_failover_id
from upr_protocol.handshake import answer_hello, boundary, older_ids_to_try, resume_after_rollback
from upr_protocol.histories import MarkerHistories
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position

__all__ = [
    "BUCKET_GONE_RULE",
    "ConsumerSession",
    "Delivery",
    "Fate",
    "PendingRollback",
    "Pin",
    "ProtocolError",
    "StartRequest",
    "State",
    "fate_of",
]

# As plain integers: of an enum each use is a lookup by name, and some are in loops over 1024 partitions.
_READY: Final = int(State.READY)
_STARTING: Final = int(State.STARTING)
_LIVE: Final = int(State.LIVE)
_DONE: Final = int(State.DONE)

BUCKET_GONE_RULE: Final = "bucket_gone"
"""The rule of a rollback whose reason is that the bucket was dropped and created anew."""

_UNKNOWN_HORIZON: Final = 2**64 - 1
_NO_TOKEN: Final = -1
_STATE_AFTER: Final = {
    Fate.DONE: _DONE,
    Fate.AGAIN: _READY,
    Fate.FAILED: int(State.FAILED),
}


class ConsumerSession:
    """Follows any number of partitions over one call and its successors.

    A bucket that was dropped and created anew has another version. A position of the old one keeps its version until
    the partition's data is undone: its Start names no id, and any answer to it is a rollback to 0.

    One delivery at a time: after ``frame`` returned one, ``acknowledge`` it before anything else is handed in.

    Args:
        partitions: which to follow, 0 to 1023.
        positions: where to go on; a partition without one is new.
        until_now: whether each partition ends at what is there when it is started first.
        inclusive: whether a rollback to R may resume at a marker at R itself.
        exact: where partitions end exactly, each at its pin and as of it, or else with SnapshotGoneError.

    Raises:
        InvalidArgumentError: a partition is out of range.
    """

    def __init__(
        self,
        partitions: Iterable[int],
        positions: Mapping[int, Position] | None = None,
        *,
        until_now: bool = False,
        inclusive: bool = False,
        exact: Mapping[int, Pin] | None = None,
    ) -> None:
        self.partitions = sorted({check_partition(partition) for partition in partitions})
        self.bucket_version = 0
        self._until_now = until_now
        self._inclusive = inclusive
        self._exact = dict(exact or {})
        self._followed = np.array(self.partitions, np.int64)
        self._state = np.zeros(PARTITIONS, np.uint8)
        self._seqno = np.zeros(PARTITIONS, np.uint64)
        self._horizon = np.zeros(PARTITIONS, np.uint64)
        self._high = np.zeros(PARTITIONS, np.uint64)
        self._token = np.full(PARTITIONS, _NO_TOKEN, np.int64)
        self._failover = np.zeros(PARTITIONS, np.uint64)
        self._data = np.zeros(PARTITIONS, np.uint64)
        self._stream = np.zeros(PARTITIONS, np.uint64)
        self._target = np.zeros(PARTITIONS, np.uint64)
        self._changed = np.zeros(PARTITIONS, np.bool_)
        self._version = np.zeros(PARTITIONS, np.uint64)
        self._logs: dict[int, FailoverLog | None] = {}
        self._markers = MarkerHistories()
        self._undoing: dict[int, PendingRollback] = {}
        self._open: Delivery | None = None
        self._state[self._followed] = _READY
        for partition in self.partitions if positions else ():
            position = (positions or {}).get(partition)
            if position is not None:
                self._set_position(partition, position)
        versions = np.unique(self._version[self._version != 0])
        if len(versions) == 1:
            # Of two versions nothing is known but that one of them at least is void.
            self.bucket_version = int(versions[0])

    def _set_position(self, partition: int, position: Position) -> None:
        self._version[partition] = position.bucket_version
        self._seqno[partition] = position.seqno
        self._horizon[partition] = (
            _UNKNOWN_HORIZON if position.horizon is None else position.horizon
        )
        self._failover[partition] = position.failover_id or 0
        self._data[partition] = position.data_id or 0
        self._markers.replace(partition, position.markers)
        self._logs[partition] = position.log

    # What to do.

    @property
    def finished(self) -> bool:
        """Whether every partition ended for good."""
        return bool(self._state[self._followed].min(initial=_DONE) >= _DONE)

    def state(self, partition: int) -> State:
        """Where a partition stands."""
        return State(int(self._state[partition]))

    def ready(self) -> Indexes:
        """The partitions for which a Start may be sent."""
        return np.flatnonzero(self._state == _READY)

    def starts(self, partitions: Iterable[int]) -> list[StartRequest]:
        """Return what to start for these partitions, all of them ready, and await the answers."""
        wanted = np.fromiter(partitions, np.int64)
        for partition in wanted[self._state[wanted] != _READY].tolist():
            raise InvalidArgumentError(
                f"partition {partition} is {self.state(partition).name}, not READY"
            )
        self._state[wanted] = _STARTING
        known = self._version[wanted] == self.bucket_version
        ids = (column[wanted] * known for column in (self._failover, self._data))
        columns = (next(ids), self._seqno[wanted], next(ids), self._target[wanted])
        rows = zip(wanted.tolist(), *(column.tolist() for column in columns), strict=True)
        ends = self._exact
        return [
            StartRequest(
                partition,
                failover_id or None,
                seqno,
                data_id or None,
                target or None,
                self._until_now and not target,
                ends[partition].seqno if partition in ends else None,
            )
            for partition, failover_id, seqno, data_id, target in rows
        ]

    # What the server said.

    def opened(self, bucket_version: int) -> None:
        """The call was accepted. Positions of another version of the bucket wait for their rollback to 0."""
        if bucket_version != self.bucket_version:
            self._high[:] = 0
        self.bucket_version = bucket_version
        followed = self._followed
        self._version[followed[self._version[followed] == 0]] = bucket_version
        for partition in followed[self._version[followed] != bucket_version].tolist():
            self._renew(partition)

    def _renew(self, partition: int) -> None:
        """Make a partition of another version of the bucket new where it has nothing that would have to be undone."""
        if self._seqno[partition] == 0 and self._state[partition] < _DONE:
            self._set_position(partition, Position.fresh(self.bucket_version))
            self._target[partition] = 0
            self._changed[partition] = True

    def disconnected(self) -> None:
        """The call ended: what was open or starting may be started again, in another call."""
        again = (self._state == _STARTING) | (self._state == _LIVE)
        self._state[again] = _READY
        self._token[:] = _NO_TOKEN

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
    ) -> None:
        """A stream is open.

        Raises:
            ProtocolError: no Start was sent for the partition, or the answer contradicts itself.
            SnapshotGoneError: the exact end lies in a history that was left.
        """
        self._expect_starting(partition)
        if (pin := self._exact.get(partition)) is not None:
            known = self._logs.get(partition) if log is None else log
            try:
                check_pin(partition, pin, failover_id, until_seqno, known)
            except SnapshotGoneError:
                self._state[partition] = State.FAILED
                raise
        if not failover_id or (log is not None and log.newest.failover_id != failover_id):
            raise ProtocolError(
                f"Started of partition {partition} names id {failover_id:016x} and the log {log}"
            )
        if self._is_of_another(partition):
            raise ProtocolError(
                f"partition {partition} was started at seqno {self._seqno[partition]} without an id"
            )
        self._state[partition] = _LIVE
        self._token[partition] = token
        self._stream[partition] = failover_id
        self._high[partition] = max(int(self._high[partition]), high_seqno)
        if self._failover[partition] != failover_id or log is not None:
            self._failover[partition] = failover_id
            self._changed[partition] = True
        if log is not None:
            self._logs[partition] = log
        if self._until_now and until_seqno:
            self._target[partition] = until_seqno

    def rollback(
        self,
        partition: int,
        rollback_seqno: int,
        newest_id: int,
        rule: str,
        words: str,
        log: FailoverLog | None,
    ) -> PendingRollback | None:
        """The server said to roll back. Return what has to be undone first, None when nothing has.

        With nothing to undo the new id is taken at once and the partition is ready; its position has changed and
        is to be stored before the Start is sent.

        Raises:
            ProtocolError: no Start was sent for the partition, or the answer contradicts itself.
        """
        self._expect_starting(partition)
        position = self.position(partition)
        try:
            if self._is_of_another(partition):
                rollback_seqno, rule = 0, BUCKET_GONE_RULE
                words = (
                    f"the bucket was dropped and created anew: the data is of version {position.bucket_version:016x}, "
                    f"the bucket of version {self.bucket_version:016x}"
                )
                position = replace(position, log=None)
            target, tried = self._older(position, rollback_seqno, log)
            resume = resume_after_rollback(position, target, inclusive=self._inclusive)
            after = position.rolled_back(resume.seqno, newest_id, log)
            after = replace(after, bucket_version=self.bucket_version)
        except InvalidArgumentError as error:
            raise ProtocolError(f"Rollback of partition {partition}: {error.message}") from error
        # After another history the old end may never be reached.
        self._target[partition] = 0
        self._high[partition] = 0
        pending = PendingRollback(
            partition,
            position.seqno,
            resume.seqno,
            position.failover_id,
            newest_id,
            rule,
            f"{words}{tried}; {resume.words}",
            after,
        )
        if not resume.undo:
            self._apply(pending)
            return None
        self._state[partition] = State.UNDOING
        self._undoing[partition] = pending
        return pending

    def _is_of_another(self, partition: int) -> bool:
        """Whether a partition's position belongs to another version of the bucket."""
        return bool(self._version[partition] != self.bucket_version)

    @staticmethod
    def _older(position: Position, rollback_seqno: int, log: FailoverLog | None) -> tuple[int, str]:
        """Where to roll back to when the newest id is not known to the server but an older one may be.

        The answer carries the whole log that decided, so what Hello would say to an older id is known here.
        """
        if rollback_seqno or log is None or position.failover_id in log:
            return rollback_seqno, ""
        for older_id, own_next in older_ids_to_try(position):
            if older_id in log:
                target = boundary(answer_hello(log, older_id).rollback_seqno, own_next)
                return (
                    target,
                    f"; the older id {format_failover_id(older_id)} is known: back to {target}",
                )
        return rollback_seqno, ""

    def _apply(self, pending: PendingRollback) -> None:
        self._set_position(pending.partition, pending.after)
        self._state[pending.partition] = State.READY
        self._changed[pending.partition] = True
        if self._is_of_another(pending.partition):
            # Dropped once more while the application was undoing.
            self._renew(pending.partition)

    @property
    def undoing(self) -> list[PendingRollback]:
        """The rollbacks that wait for ``rolled_back``."""
        return list(self._undoing.values())

    def rolled_back(self, partition: int) -> None:
        """The application undid its data: the new position holds, and is to be stored before a Start is sent.

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
        self._state[partition] = State.READY if retriable else State.FAILED

    def ended(self, streams: Sequence[tuple[int, int]], reason: str) -> list[int]:
        """Streams (partition, token) ended. Return the partitions that this concerns; old tokens do not count.

        What ``fate_of(reason)`` says holds for them, with one exception: a stream that finished where a row may
        be missing for this reader is started again, up to its horizon.

        Raises:
            SnapshotGoneError: such a stream was to end exactly there; what was missed is not to be had.
        """
        concerned = [
            partition
            for partition, token in streams
            if partition < PARTITIONS
            and self._token[partition] == token
            and self._state[partition] == _LIVE
        ]
        state = _STATE_AFTER[fate_of(reason)]
        for partition in concerned:
            self._token[partition] = _NO_TOKEN
            self._state[partition] = state
            horizon = int(self._horizon[partition])
            if reason == "FINISHED" and partition in self._exact:
                self._state[partition] = State.FAILED
                told = None if horizon == _UNKNOWN_HORIZON else horizon
                check_complete(partition, int(self._seqno[partition]), told)
                self._state[partition] = _DONE
            elif reason == "FINISHED" and self._seqno[partition] < horizon < _UNKNOWN_HORIZON:
                self._target[partition] = horizon
                self._state[partition] = _READY
        return concerned

    def highs(self, partitions: Indexes, high_seqnos: U64) -> None:
        """The server's high seqnos moved."""
        self._high[partitions] = np.maximum(self._high[partitions], high_seqnos)

    def frame(self, blocks: Sequence[Block], tokens: npt.NDArray[np.integer]) -> Delivery | None:
        """Take the blocks of a frame, each checked. Return what belongs to open streams, None when nothing does.

        Raises:
            ProtocolError: the tokens do not fit the runs, or a run does not continue its stream.
        """
        if self._open is not None:
            raise InvalidArgumentError("the delivery before this one was not acknowledged")
        runs = blocks[0].runs if len(blocks) == 1 else np.concatenate([b.runs for b in blocks])
        if len(tokens) != len(runs):
            raise ProtocolError(f"a frame of {len(runs)} runs carries {len(tokens)} tokens")
        partitions = runs["partition"].astype(np.int64)
        live = self._token[partitions] == tokens
        kept = list(blocks)
        if not live.all():
            kept = cut_blocks(blocks, live)
            if not kept:
                return None
            runs, partitions = runs[live], partitions[live]
        ends = runs["end_seqno"].astype(np.uint64)
        before, reached = (
            self._seqno[partitions],
            np.maximum(self._horizon[partitions], runs["horizon"]),
        )
        if len(kept) > 1:
            chain_runs(partitions.tolist(), ends, before, reached)
        wrong = runs["start_seqno"] != before
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ProtocolError(
                f"partition {partitions[at]} is at seqno {before[at]}, but the frame goes on at "
                f"{runs['start_seqno'][at]}"
            )
        # The largest horizon since the last marker is at least the run's own, which is at least its end: equal to
        # the end means that both are, so that no row can be missing.
        self._open = Delivery(kept, partitions, ends, reached, reached == ends)
        return self._open

    # What the application has consumed.

    def acknowledge(self, delivery: Delivery) -> None:
        """The application has consumed a delivery whole: the positions move."""
        self.acknowledge_part(delivery, len(delivery.partitions))
        self._open = None

    def acknowledge_part(self, delivery: Delivery, runs: int, seqno: int | None = None) -> None:
        """The application has consumed the first ``runs`` runs, and the next one up to ``seqno``."""
        if delivery is not self._open:
            return
        part = slice(delivery.folded, max(runs, delivery.folded))
        partitions, ends = delivery.partitions[part], delivery.ends[part]
        delivery.folded = part.stop
        if len(partitions):
            # Where a partition is there twice, the last one counts.
            self._seqno[partitions] = ends
            self._horizon[partitions] = delivery.horizons[part]
            self._data[partitions] = self._stream[partitions]
            self._changed[partitions] = True
            self._high[partitions] = np.maximum(self._high[partitions], ends)
            marked = delivery.is_marker[part]
            self._markers.add(partitions[marked], ends[marked])
        if seqno is not None and runs < len(delivery.partitions):
            partition = int(delivery.partitions[runs])
            self._seqno[partition] = seqno
            self._horizon[partition] = delivery.horizons[runs]
            self._data[partition] = self._stream[partition]
            self._changed[partition] = True

    # What is known.

    def position(self, partition: int) -> Position:
        """The acknowledged position of a partition that is followed."""
        horizon = int(self._horizon[partition])
        return Position(
            int(self._version[partition]),
            int(self._failover[partition]) or None,
            int(self._data[partition]) or None,
            int(self._seqno[partition]),
            None if horizon == _UNKNOWN_HORIZON else horizon,
            self._markers.of(partition),
            self._logs.get(partition),
        )

    def take_changed(self) -> list[int]:
        """The partitions whose position changed since this was asked last."""
        changed: list[int] = np.flatnonzero(self._changed).tolist()
        self._changed[:] = False
        return changed

    def mark_changed(self, partitions: Iterable[int]) -> None:
        """Undo ``take_changed`` for partitions whose position could not be stored."""
        self._changed[list(partitions)] = True

    @property
    def has_changed(self) -> bool:
        """Whether a position changed since ``take_changed``."""
        return bool(self._changed.any())

    def lag(self) -> dict[int, int]:
        """For each partition, how many seqnos the server was ahead of the position when it told last."""
        behind = np.maximum(self._high, self._seqno) - self._seqno
        return {partition: int(behind[partition]) for partition in self.partitions}
