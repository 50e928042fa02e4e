"""The streams of one Follow call: how they are opened and closed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from upr.engine.beginnings import Beginnings
from upr.engine.bucket import Bucket
from upr.engine.exact import no_such_end
from upr.engine.groups import TailGroups
from upr.engine.members import Seat
from upr.engine.partitions import ACTIVE
from upr.engine.plain_starts import PlainStarts
from upr.engine.streams import (
    FINISHED,
    LEASE_ENDED,
    STOPPED,
    Answer,
    Ended,
    EndReason,
    FollowOptions,
    Refused,
    RolledBack,
    Started,
    StartRequest,
)
from upr.storage.merge import Encoded
from upr_protocol.block import U64
from upr_protocol.credit import CreditWindow
from upr_protocol.errors import NotOwnerError, UprError
from upr_protocol.failover import FailoverLog, check_failover_id, check_partition, check_seqno
from upr_protocol.handshake import answer_start
from upr_protocol.limits import PARTITIONS
from upr_protocol.records import STARTED

NO_END: Final = np.iinfo(np.uint64).max


class OpenStreams:
    """Which partitions have a stream, and where each of them stands.

    Args:
        wake: called when there may be something to send again.
    """

    def __init__(
        self, bucket: Bucket, options: FollowOptions, credit: CreditWindow, wake: Callable[[], None]
    ) -> None:
        self.options = options
        self.credit = credit
        self.wake = wake
        self.on_end: Callable[[EndReason], None] | None = None
        """Called when the engine ends the call as a whole."""
        self.generation = 0
        """Of the ownership of the consumer, for a call that names one and no member."""
        self.seat: Seat | None = None
        """The place in its group of a call that names a member."""
        self._bucket = bucket
        self._table = bucket.partitions
        self._token = np.zeros(PARTITIONS, np.uint32)
        self._last_token = 0
        self._seqno: U64 = np.zeros(PARTITIONS, np.uint64)
        self._horizon: U64 = np.zeros(PARTITIONS, np.uint64)
        self._id: U64 = np.zeros(PARTITIONS, np.uint64)
        self._until: U64 = np.full(PARTITIONS, NO_END, np.uint64)
        self._limit: U64 = np.full(PARTITIONS, NO_END, np.uint64)
        self._from_store: npt.NDArray[np.bool_] = np.zeros(PARTITIONS, bool)
        self._groups = TailGroups(bucket.tail, options.memory, options.showing)
        self._ready: list[tuple[int, int, Encoded]] = []
        self._reading = False
        self._turn = 0
        self._told_high: U64 = np.zeros(PARTITIONS, np.uint64)
        self._told_purge: U64 = np.zeros(PARTITIONS, np.uint64)
        self._seen_raises = 0
        self._stale: set[int] = set()
        self._ended: list[Ended] = []

    # Starting and ending

    def start(self, requests: Sequence[StartRequest]) -> list[Answer]:
        """Decide on each request, and open what may be opened, in this one step ("Handshake", step 3)."""
        beginnings = Beginnings(self._bucket.markers.seqno, self._bucket.tail)
        return [self._start(request, beginnings) for request in requests]

    def _start(self, request: StartRequest, beginnings: Beginnings) -> Answer:
        table = self._table
        partition = request.partition
        try:
            check_partition(partition)
            check_seqno(request.seqno)
            if request.until_seqno is not None:
                check_seqno(request.until_seqno, "until_seqno")
            if request.until_exact is not None:
                check_seqno(request.until_exact, "until_exact")
            for failover_id in (request.failover_id, request.data_id):
                if failover_id is not None:
                    check_failover_id(failover_id)
            request.check_beginning()
        except UprError as error:
            return Refused(partition, error)
        if not table.serves(partition):
            return Refused(partition, table.refusal(partition))
        if self.seat is not None and not self.seat.may_start(partition):
            return Refused(partition, _not_owner(partition, self.options.member))
        if self._token[partition]:
            self._end([partition], STOPPED)
        self._id[partition] = 0
        log, high = table.logs[partition], int(table.high[partition])
        answer = answer_start(
            log,
            failover_id=request.failover_id,
            seqno=request.seqno,
            data_id=request.data_id,
            high_seqno=high,
            purge_seqno=int(table.purge[partition]),
            active=bool(table.state[partition] == ACTIVE),
        )
        if answer.kind == "rollback":
            return RolledBack(partition, answer, log)
        if answer.kind == "behind":
            behind = UprError(answer.words, reason="BEHIND", retriable=True, hint="try again later")
            return Refused(partition, behind)
        if request.chooses_beginning:
            request = replace(request, seqno=beginnings.of(request))
        if request.until_exact is not None:
            gone = no_such_end(partition, request.until_exact, request.seqno, high)
            if gone is not None:
                return Refused(partition, gone)
        return self._open(request, log, high)

    def start_plain(self, asked: PlainStarts) -> tuple[npt.NDArray[np.void], list[StartRequest]]:
        """Open, in this one step, those of many streams of which nothing is to be said but that they are open.

        Returns:
            What is to be said of them, dtype STARTED; and the other requests, for ``start``.
        """
        table, tail = self._table, self._bucket.tail
        plain = asked.plain(table) & (self._token[asked.partitions] == 0)
        if self.seat is not None:
            plain[:] = False
        p, seqnos = asked.partitions[plain], asked.seqnos[plain]
        tokens = self._last_token + 1 + np.arange(len(p))
        self._last_token += len(p)
        highs = table.high[p]
        self._token[p], self._seqno[p], self._id[p] = tokens, seqnos, table.newest_id[p]
        self._horizon[p], self._told_purge[p] = seqnos, table.purge[p]
        self._until[p] = highs if asked.until_now else NO_END
        self._limit[p] = NO_END
        name = self.options.consumer
        if name and name in self._bucket.consumer_positions:
            for partition, newest_id, seqno in zip(
                p.tolist(), table.newest_id[p].tolist(), seqnos.tolist(), strict=True
            ):
                self._bucket.consumer_positions.started(name, partition, newest_id, seqno)
        in_store, caught_up = seqnos < table.stored[p], seqnos >= highs
        self._from_store[p] = in_store
        self._groups.join(p[caught_up & ~in_store], tail.end)
        for partition in p[~caught_up & ~in_store].tolist():
            self._attach(partition)
        if asked.until_now:
            self._end(p[highs <= seqnos].tolist(), FINISHED)
        told = np.zeros(len(p), STARTED)
        told["partition"], told["token"], told["failover_id"] = p, tokens, table.newest_id[p]
        told["high_seqno"], told["purge_seqno"] = highs, table.purge[p]
        told["born"] = asked.needs_log[plain]
        return told, asked.requests(~plain)

    def _open(self, request: StartRequest, log: FailoverLog, high: int) -> Started:
        partition = request.partition
        until = high if request.until_now else request.until_seqno
        if (exact := request.until_exact) is not None:
            until = exact
        self._last_token += 1
        self._token[partition] = self._last_token
        self._seqno[partition] = request.seqno
        self._id[partition] = log.newest.failover_id
        if self.options.consumer:
            positions = self._bucket.consumer_positions
            name, newest_id = self.options.consumer, log.newest.failover_id
            positions.started(name, partition, newest_id, request.seqno)
        self._horizon[partition] = request.seqno
        self._told_purge[partition] = self._table.purge[partition]
        self._until[partition] = NO_END if until is None else until
        self._limit[partition] = NO_END if exact is None else exact
        self._attach(partition)
        if until is not None and until <= request.seqno:
            self._end([partition], FINISHED)
        return Started(
            partition,
            self._last_token,
            log.newest.failover_id,
            high,
            int(self._table.purge[partition]),
            until,
            log if request.seqno == 0 or request.failover_id is None else None,
            request.seqno if request.chooses_beginning else None,
        )

    def _attach(self, partition: int) -> None:
        """Have a stream read on where its seqno lies: in the store, or in the tail."""
        seqno = int(self._seqno[partition])
        if seqno < int(self._table.stored[partition]):
            self._from_store[partition] = True
            return
        self._from_store[partition] = False
        self._groups.join([partition], self._bucket.tail.find(partition, seqno))

    def stop(self, partitions: Iterable[int]) -> None:
        """End streams at the consumer's wish; what is not open is passed over."""
        self._end([p for p in partitions if 0 <= p < PARTITIONS], STOPPED)

    def take_away(self, partitions: Sequence[int]) -> None:
        """End the streams of partitions that are not the member's any more."""
        self._end(partitions, LEASE_ENDED)
        self.wake()

    def end_call(self, why: EndReason) -> None:
        """End every open stream, and have the call ended."""
        self.end_all(why)
        if self.on_end is not None:
            self.on_end(why)

    def end_all(self, why: EndReason) -> None:
        """End every open stream."""
        self._end(np.flatnonzero(self._token).tolist(), why)
        self.wake()

    def _end(self, partitions: Iterable[int], why: EndReason) -> None:
        streams = self._close(partitions)
        if streams:
            self._ended.append(Ended(streams, why))

    def _close(self, partitions: Iterable[int]) -> list[tuple[int, int]]:
        """Close the open ones among streams, and return them as (partition, token): their ends are to be told."""
        streams = [(p, int(self._token[p])) for p in dict.fromkeys(partitions) if self._token[p]]
        if not streams:
            return []
        gone = [p for p, _ in streams]
        self._token[gone] = 0
        self._limit[gone] = NO_END
        self._from_store[gone] = False
        self._groups.leave(gone)
        self._ready = [item for item in self._ready if self._token[item[0]] == item[1]]
        return streams

    @property
    def has_ended(self) -> bool:
        """Whether ends wait to be told."""
        return bool(self._ended)

    def take_ended(self) -> list[Ended]:
        """Return, once, the ends that are to be told, oldest first."""
        ended, self._ended = self._ended, []
        return ended


def _not_owner(partition: int, member: str) -> NotOwnerError:
    return NotOwnerError(
        f"partition {partition} is not member {member!r}'s to start", hint="wait for an Assignment"
    )
