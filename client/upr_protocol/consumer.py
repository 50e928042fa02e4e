"""The consumer of one bucket as a pure state machine: what to start, what an answer means, what a frame adds.

No I/O, clock or wire: a shell hands in what the server said, in the order in which it said it, and asks what to
do. The state of all partitions lies in arrays, so a frame costs a few statements whatever its number of runs,
and nothing at all for each mutation.

Source: specification, "Handshakes" and "Snapshot Markers and Deduplication"; the project's design, "Handshake",
"Following" and the invariant "A position has a horizon".
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64, Block, cut_runs
from upr_protocol.consumer_types import (
    Delivery,
    Fate,
    Indexes,
    PendingRollback,
    ProtocolError,
    StartRequest,
    State,
    fate_of,
)
from upr_protocol.errors import BucketNotFoundError, InvalidArgumentError
from upr_protocol.failover import FailoverLog, check_partition, format_failover_id
from upr_protocol.handshake import (
    answer_hello,
    boundary,
    older_ids_to_try,
    resume_after_rollback,
)
from upr_protocol.histories import MarkerHistories
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position

__all__ = [
    "ConsumerSession",
    "Delivery",
    "Fate",
    "PendingRollback",
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

_UNKNOWN_HORIZON: Final = 2**64 - 1
_NO_TOKEN: Final = -1
_STATE_AFTER: Final = {
    Fate.DONE: _DONE,
    Fate.AGAIN: _READY,
    Fate.FAILED: int(State.FAILED),
}


class ConsumerSession:
    """Follows any number of partitions over one call and its successors.

    One delivery at a time: after ``frame`` returned one, ``acknowledge`` it before anything else is handed in.

    Args:
        partitions: which to follow, 0 to 1023.
        positions: where to go on; a partition without one is new.
        until_now: whether each partition ends at what is there when it is started first.
        inclusive: whether a rollback to R may resume at a marker at R itself.

    Raises:
        InvalidArgumentError: a partition is out of range, or two positions are of different buckets.
    """

    def __init__(
        self,
        partitions: Iterable[int],
        positions: Mapping[int, Position] | None = None,
        *,
        until_now: bool = False,
        inclusive: bool = False,
    ) -> None:
        self.partitions = sorted({check_partition(partition) for partition in partitions})
        self.bucket_version = 0
        self._until_now = until_now
        self._inclusive = inclusive
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
        self._logs: dict[int, FailoverLog | None] = {}
        self._markers = MarkerHistories()
        self._undoing: dict[int, PendingRollback] = {}
        self._open: Delivery | None = None
        self._state[self._followed] = _READY
        for partition in self.partitions if positions else ():
            position = (positions or {}).get(partition)
            if position is not None:
                self._check_version(position)
                self._set_position(partition, position)

    def _check_version(self, position: Position) -> None:
        version = position.bucket_version
        if version and self.bucket_version not in (0, version):
            raise InvalidArgumentError(
                f"positions of bucket versions {self.bucket_version:016x} and {version:016x} are mixed",
                hint="give each bucket a position store of its own",
            )
        self.bucket_version = self.bucket_version or version

    def _set_position(self, partition: int, position: Position) -> None:
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
        columns = (self._failover, self._seqno, self._data, self._target)
        rows = zip(wanted.tolist(), *(column[wanted].tolist() for column in columns), strict=True)
        return [
            StartRequest(
                partition,
                failover_id or None,
                seqno,
                data_id or None,
                target or None,
                self._until_now and not target,
            )
            for partition, failover_id, seqno, data_id, target in rows
        ]

    # What the server said.

    def opened(self, bucket_version: int) -> None:
        """The call was accepted.

        Raises:
            BucketNotFoundError: the bucket is another one than the positions belong to.
        """
        if self.bucket_version and bucket_version != self.bucket_version:
            raise BucketNotFoundError(
                f"the bucket has version {bucket_version:016x}, the positions belong to version "
                f"{self.bucket_version:016x}: it was dropped and created again",
                hint="delete the stored positions and the data derived from it, and start from zero",
                retriable=False,
            )
        self.bucket_version = bucket_version

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
        """
        self._expect_starting(partition)
        if not failover_id or (log is not None and log.newest.failover_id != failover_id):
            raise ProtocolError(
                f"Started of partition {partition} names id {failover_id:016x} and the log {log}"
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
            target, tried = self._older(position, rollback_seqno, log)
            resume = resume_after_rollback(position, target, inclusive=self._inclusive)
            after = position.rolled_back(resume.seqno, newest_id, log)
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
            if reason == "FINISHED" and self._seqno[partition] < horizon < _UNKNOWN_HORIZON:
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
            kept = _cut(blocks, live)
            if not kept:
                return None
            runs, partitions = runs[live], partitions[live]
        ends = runs["end_seqno"].astype(np.uint64)
        before, reached = (
            self._seqno[partitions],
            np.maximum(self._horizon[partitions], runs["horizon"]),
        )
        if len(kept) > 1:
            _chain(partitions.tolist(), ends, before, reached)
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
            self.bucket_version,
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


def _cut(blocks: Sequence[Block], live: npt.NDArray[np.bool_]) -> list[Block]:
    kept = []
    first = 0
    for block in blocks:
        keep = live[first : first + len(block.runs)]
        first += len(block.runs)
        if keep.any():
            kept.append(cut_runs(block, keep))
    return kept


def _chain(partitions: list[int], ends: U64, before: U64, reached: U64) -> None:
    """Let each run that is not its partition's first in the frame continue the one before it, in place."""
    last: dict[int, int] = {}
    for index, partition in enumerate(partitions):
        previous = last.get(partition)
        if previous is not None:
            before[index] = ends[previous]
            if reached[previous] > reached[index]:
                reached[index] = reached[previous]
        last[partition] = index
