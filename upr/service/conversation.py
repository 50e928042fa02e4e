"""The conversation of one Follow call without its I/O: what the client's messages mean, and what it is told next.

The shell in ``follow`` hands in each message and asks for the next one to send only when the one before was handed
to the transport: nothing but answers waits here. The tests' simulated world drives it too.

Starts whose beginning must be looked for in the store wait (``WaitingStarts``), and those that came behind them: they
are answered in the order of the requests.
"""

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from upr.engine.bucket import Bucket
from upr.engine.consumers import read_positions
from upr.engine.follower import Follower, PlainStarts
from upr.engine.groups import Assignment, Seat
from upr.engine.streams import (
    SUPERSEDED,
    Answer,
    Ended,
    EndReason,
    FollowOptions,
    FrameOut,
    RolledBack,
    Started,
    StartRequest,
)
from upr.service.buckets.keepers import micros
from upr.storage.read import plain_messages
from upr.storage.search import StoredBeginning
from upr_protocol.errors import DataDamagedError, InvalidArgumentError, UprError, shown
from upr_protocol.flow import CreditWindow, Liveness
from upr_protocol.limits import (
    CONSUMERS_MAX,
    LEASE_SECONDS,
    LEASE_SECONDS_MAX,
    LEASE_SECONDS_MIN,
    PARTITIONS,
    check_name,
)
from upr_protocol.wire.codec import encode_frame, log_to_messages, problem_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

Found = StoredBeginning | DataDamagedError


@dataclass(slots=True)
class _Waiting:
    requests: Sequence[StartRequest]
    stopped: set[int] = field(default_factory=set)


class WaitingStarts:
    """The Starts of one call that are not answered yet.

    Args:
        answer: decides on requests, opens their streams and says so, in one step; then stops the partitions given.
    """

    def __init__(self, answer: Callable[[Sequence[StartRequest], Iterable[int]], None]) -> None:
        self._answer = answer
        self._waiting: deque[_Waiting] = deque()
        self._searching = False

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, requests: Sequence[StartRequest]) -> None:
        """Take a Start; it is answered at once unless it, or one before it, waits for a search."""
        self._waiting.append(_Waiting(requests))
        self._answer_ready()

    def stop(self, partitions: Iterable[int]) -> None:
        """Have the streams that are not open yet end as soon as they are, before anything is sent of them."""
        gone = set(partitions)
        for waiting in self._waiting:
            waiting.stopped |= gone

    def clear(self) -> None:
        """Answer none of them: the call ends."""
        self._waiting.clear()

    def next_search(self) -> list[tuple[int, int]] | None:
        """Return the (partition, time) pairs to be searched for in the store; None when nothing is to be, or is."""
        if self._searching or not self._waiting:
            return None
        self._searching = True
        return [
            (one.partition, one.from_time)
            for one in self._waiting[0].requests
            if one.needs_search and one.from_time is not None
        ]

    def found(self, results: Sequence[Found]) -> None:
        """Take what the search came to, in the order of what was asked for."""
        self._searching = False
        if not self._waiting:
            return
        left = iter(results)
        first = self._waiting[0]
        first.requests = [
            replace(one, stored=next(left)) if one.needs_search else one for one in first.requests
        ]
        self._answer_ready()

    def _answer_ready(self) -> None:
        while self._waiting and not any(one.needs_search for one in self._waiting[0].requests):
            ready = self._waiting.popleft()
            self._answer(ready.requests, ready.stopped)


def read_member(opening: wire.Open) -> tuple[str, int]:
    """Return the member that an Open names, and its lease in microseconds; "" and 0 for none.

    Raises:
        InvalidArgumentError: the name or the lease is out of range, or there is no consumer.
    """
    lease = opening.lease_seconds
    if not opening.member:
        if lease:
            raise InvalidArgumentError(
                f"a lease of {lease} seconds without a member", hint="name a member, or no lease"
            )
        return "", 0
    if not opening.consumer:
        raise InvalidArgumentError(
            f"member {shown(opening.member)} of no consumer", hint="name the group as the consumer"
        )
    lease = LEASE_SECONDS if lease == 0 else lease
    if math.isnan(lease) or not LEASE_SECONDS_MIN <= lease <= LEASE_SECONDS_MAX:
        raise InvalidArgumentError(
            f"a lease of {lease} seconds, it is {LEASE_SECONDS_MIN:g} to {LEASE_SECONDS_MAX:g}",
            hint="0 means the default",
        )
    return check_name(opening.member, "member"), micros(lease)


class Membership:
    """The part of a call that concerns its member.

    Args:
        seat: of the call.
    """

    def __init__(self, follower: Follower, seat: Seat) -> None:
        self._follower = follower
        self._seat = seat

    def heard(self, now: float) -> None:
        """Any message of the client renews the lease; ``now`` in seconds."""
        self._seat.heard(micros(now))

    def release(self, partitions: list[int], now: float) -> None:
        """The member hands partitions over: their streams end in the same step.

        Raises:
            InvalidArgumentError: they are more than there are.
        """
        if len(partitions) > PARTITIONS:
            raise InvalidArgumentError(
                f"a Release of {len(partitions)} partitions, the limit is {PARTITIONS}"
            )
        owned = self._seat.owned_among(partitions)
        self._follower.stop(owned)
        self._seat.release(owned, micros(now))

    def next_message(self) -> wire.FollowResponse | None:
        """Return the newest Assignment, once; None when there is none that was not told."""
        assignment = self._seat.take_assignment()
        return None if assignment is None else _assignment_message(assignment)


def _assignment_message(assignment: Assignment) -> wire.FollowResponse:
    return wire.FollowResponse(
        assignment=wire.Assignment(
            generation=assignment.generation,
            owned=assignment.owned,
            to_release=assignment.to_release,
        )
    )


log = logging.getLogger(__name__)

SILENT: Final = EndReason("SILENT", True, "the consumer said nothing for three heartbeat intervals")
_POSITION = struct.Struct("<IQ")


class Outgoing(NamedTuple):
    """What is to be sent.

    Args:
        message: a FollowResponse, or an encoded one; of plain rows an iterator of encoded ones, each of which takes
            its time.
        frame: the frame that it carries, None for another message.
    """

    message: Any
    frame: FrameOut | None = None


class Conversation:
    """One call that was accepted. It is a follower of the bucket from here on, until ``close``.

    Args:
        liveness: of the call; times are seconds on its clock.
        wake: called when there may be something to send.
        now: on the clock of ``liveness``.

    Raises:
        InvalidArgumentError, TooManyError: the consumer, or the member, cannot follow; see ``Bucket.add_follower``.

    Attributes:
        follower: its streams.
        ending: why the call ends, None while it does not.
        over: the end of the call was said: the client's half-close is awaited.
        waiting: how many answers wait to be found, or to be sent.
    """

    def __init__(
        self,
        bucket: Bucket,
        options: FollowOptions,
        credit: CreditWindow,
        liveness: Liveness,
        wake: Callable[[], None],
        now: float = 0.0,
    ) -> None:
        self.ending: EndReason | None = None
        self.over = False
        self.liveness = liveness
        self._bucket = bucket
        self._out: deque[wire.FollowResponse] = deque()
        self._ended: deque[Ended] = deque()
        self._beat_now = False
        self._told_unkept = False
        self._wake = wake
        self.follower = Follower(bucket, options, credit, wake)
        self._starts = WaitingStarts(self._answer)
        old = bucket.add_follower(self.follower, micros(now))
        if old is not None:
            old.end_call(SUPERSEDED)
        self.follower.on_end = self.end
        seat = self.follower.seat
        self._member = None if seat is None else Membership(self.follower, seat)

    def close(self, now: float = 0.0, *, left: bool = False) -> None:
        """Forget the follower; ``left``: the client ended the call by its own wish."""
        self._bucket.remove_follower(self.follower, micros(now), left=left and self.ending is None)

    @property
    def waiting(self) -> int:
        """How many answers wait to be found, or to be sent."""
        return len(self._out) + len(self._starts)

    def say(self, message: wire.FollowResponse) -> None:
        """Send a message before everything that is not decided yet."""
        self._out.append(message)
        self._wake()

    def end(self, why: EndReason) -> None:
        """End all streams and the call."""
        if self.ending is None:
            self.ending = why
            self._starts.clear()
            self.follower.end_all(why)

    # What the client says

    def take(self, request: object, now: float, now_micros: int) -> None:
        """Take a message of the client; what cannot be taken ends the call.

        Args:
            now: on the clock of ``liveness``.
            now_micros: microseconds since the epoch.
        """
        self.liveness.heard(now)
        if self.ending is not None or not isinstance(request, wire.FollowRequest):
            return
        try:
            if self._member is not None:
                self._member.heard(now)
            self._take(request, now, now_micros)
        except UprError as error:
            self.end(EndReason(error.reason, error.retriable, error.message, error.hint))
        self._wake()

    def check_heard(self, now: float) -> bool:
        """End the call when the client went silent. Return whether it did."""
        gone = self.liveness.peer_is_gone(now)
        if gone:
            self.end(SILENT)
        return gone

    def _take(self, request: wire.FollowRequest, now: float, now_micros: int) -> None:
        kind = request.WhichOneof("message")
        if kind == "start":
            self._start(request.start)
        elif kind == "stop":
            self._check_count("Stop", len(request.stop.partitions))
            self._starts.stop(request.stop.partitions)
            self.follower.stop(request.stop.partitions)
        elif kind == "credit":
            self.follower.credit.give_back(request.credit.bytes)
        elif kind == "ack":
            self._acknowledge(request.ack.positions, now_micros)
        elif kind in ("release", "renew"):
            self._take_of_member(request, now)
        elif kind != "pong":
            raise InvalidArgumentError(f"a message of a Follow call of kind {kind}")

    def _start(self, start: wire.Start) -> None:
        self._check_count("Start", len(start.partitions))
        plain = PlainStarts.read(start.table, start.until_now)
        requests = [_request(one) for one in start.partitions]
        told = b""
        if len(self._starts) or any(one.needs_search for one in requests):
            # In the order in which they were asked.
            requests += plain.requests(np.ones(len(plain.partitions), bool))
        elif len(plain.partitions):
            opened, others = self.follower.start_plain(plain)
            requests += others
            told = opened.tobytes()
        if told:
            self._answer(requests, (), told)
        else:
            self._starts.take(requests)

    def next_search(self) -> list[tuple[int, int]] | None:
        """Return the (partition, time) pairs to be searched for in the store next; None when nothing is to be."""
        return self._starts.next_search()

    def found(self, results: Sequence[Found]) -> None:
        """Take what the search came to: the Starts that waited for it are answered."""
        self._starts.found(results)

    def _answer(
        self, requests: Sequence[StartRequest], stopped: Iterable[int], told: bytes = b""
    ) -> None:
        decided = self.follower.start(requests)
        for answer in decided:
            if isinstance(answer, RolledBack) and answer.answer.alarm:
                # Somebody has what this server never gave: an old copy of the data may have been restored.
                log.error(
                    "a consumer is ahead of this server",
                    extra={"partition": answer.partition, "words": answer.answer.words},
                )
        response = wire.FollowResponse(start_answers=wire.StartAnswers(started=told))
        for answer in decided:
            _fill_answer(response.start_answers.answers.add(partition=answer.partition), answer)
        self.say(response)
        self.follower.stop(stopped)
        self._beat_now = True

    def _take_of_member(self, request: wire.FollowRequest, now: float) -> None:
        if self._member is None:
            raise InvalidArgumentError(
                f"a message of kind {request.WhichOneof('message')} in a call that names no member",
                hint="name a member in Open",
            )
        if request.HasField("renew"):
            self.say(wire.FollowResponse(renewed=wire.Renewed(number=request.renew.number)))
        else:
            self._member.release(list(request.release.partitions), now)

    @staticmethod
    def _check_count(kind: str, count: int) -> None:
        if count > PARTITIONS:
            raise InvalidArgumentError(f"a {kind} of {count} streams, the limit is {PARTITIONS}")

    def _acknowledge(self, positions: bytes, now_micros: int) -> None:
        kept = self.follower.acknowledge(*read_positions(positions), now_micros)
        if not kept and not self._told_unkept:
            self._told_unkept = True
            log.warning(
                "the Acks of a consumer are not kept: too many are registered",
                extra={"consumer": self.follower.options.consumer, "limit": CONSUMERS_MAX},
            )

    # What the server says

    def next_message(self, now: float) -> Outgoing | None:
        """Return what to send next: answers, then ends of streams, then a heartbeat if one is due, then the end of the
        call, then a frame. None when there is nothing to be said now.

        So a stream's answer goes before its frames, and its end before the end of the call.
        """
        if self.over:
            return None
        if self._out:
            return Outgoing(self._out.popleft())
        if not self._ended:
            self._ended.extend(self.follower.take_ended())
        if self._ended:
            return Outgoing(wire.FollowResponse(ended=_ended_message(self._ended.popleft())))
        if self._member is not None and (message := self._member.next_message()) is not None:
            return Outgoing(message)
        # By the clock of the last heartbeat, not of the last frame: a consumer that is sent frames for long may
        # have no reason to say anything, and its answer to a heartbeat is what shows that it is there.
        if self._beat_now or self.liveness.heartbeat_due(now):
            self._beat_now = False
            self.liveness.sent(now)
            moved = self.follower.moved_high_seqnos()
            beat = wire.Heartbeat(high_seqnos=moved.tobytes())
            return Outgoing(wire.FollowResponse(heartbeat=beat))
        if self.ending is not None:
            self.over = True
            ended = wire.Ended(problem=_problem(self.ending))
            return Outgoing(wire.FollowResponse(ended=ended))
        return self._next_frame()

    def _next_frame(self) -> Outgoing | None:
        frame = self.follower.next_frame()
        if frame is None:
            return None
        raised = b"".join(_POSITION.pack(*one) for one in self.follower.take_purge_seqnos())
        if self.follower.options.plain_rows:
            return Outgoing(plain_messages(frame.blocks, frame.tokens, raised), frame)
        return Outgoing(encode_frame(frame.blocks, frame.tokens, raised), frame)


def _request(one: wire.StartPartition) -> StartRequest:
    return StartRequest(
        one.partition,
        one.failover_id if one.HasField("failover_id") else None,
        one.seqno,
        one.data_id if one.HasField("data_id") else None,
        one.until_seqno if one.HasField("until_seqno") else None,
        one.until_now,
        one.until_exact if one.HasField("until_exact") else None,
        one.from_now,
        one.from_time if one.HasField("from_time") else None,
        horizon=one.horizon if one.HasField("horizon") else None,
    )


def _problem(why: EndReason) -> types.Problem:
    return types.Problem(
        reason=why.reason, retriable=why.retriable, message=why.words, hint=why.hint
    )


def _ended_message(ended: Ended) -> wire.Ended:
    streams = [wire.EndedStream(partition=p, token=token) for p, token in ended.streams]
    return wire.Ended(streams=streams, problem=_problem(ended.why))


def _fill_answer(message: wire.StartAnswer, answer: Answer) -> None:
    """Write an answer into the message where it lies: building it apart would copy it twice."""
    if isinstance(answer, Started):
        started = message.started
        started.token = answer.token
        started.failover_id = answer.failover_id
        started.high_seqno = answer.high_seqno
        started.purge_seqno = answer.purge_seqno
        if answer.until_seqno is not None:
            started.until_seqno = answer.until_seqno
        if answer.start_seqno is not None:
            started.start_seqno = answer.start_seqno
        for record in answer.log or ():
            started.failover_log.add(failover_id=record.failover_id, seqno=record.seqno)
    elif isinstance(answer, RolledBack):
        decision = answer.answer
        message.rollback.rollback_seqno = decision.rollback_seqno or 0
        message.rollback.failover_id = decision.newest_id
        message.rollback.rule = decision.rule
        message.rollback.words = decision.words
        message.rollback.failover_log.extend(log_to_messages(answer.log))
    else:
        message.refused.CopyFrom(problem_of(answer.error))
