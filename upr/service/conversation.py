"""The conversation of one Follow call without its I/O: the client's messages, and the server's next one.

The shell in ``follow`` hands in each message, and asks for the next one to send only after the transport took the one
before. So only answers wait here. The tests' simulated world drives it too.

Starts that need a search of the store wait (``WaitingStarts``), and later Starts behind them: answers keep the order of
the requests.
"""

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from upr.engine.bucket import Bucket
from upr.engine.consumers import read_positions
from upr.engine.follower import Follower
from upr.engine.streams import (
    SUPERSEDED,
    Answer,
    Ended,
    EndReason,
    FollowOptions,
    FrameOut,
    PlainStarts,
    RolledBack,
    Started,
    StartRequest,
)
from upr.service.buckets.keepers import micros
from upr.storage.directory import HEX_ID
from upr.storage.read import plain_messages
from upr.storage.search import StoredBeginning
from upr_protocol.errors import DataDamagedError, InvalidArgumentError, UprError, shown
from upr_protocol.failover import check_partition
from upr_protocol.flow import CreditWindow, Liveness
from upr_protocol.limits import (
    CONSUMERS_MAX,
    KEY_BYTES_MAX,
    LEASE_SECONDS,
    LEASE_SECONDS_MAX,
    LEASE_SECONDS_MIN,
    NAME_BYTES_MAX,
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
    """Queue of Starts that wait for a time lookup; answered in request order.

    Args:
        answer: answers requests and opens their streams in one step, then stops the given partitions.
    """

    def __init__(self, answer: Callable[[Sequence[StartRequest], Iterable[int]], None]) -> None:
        self._answer = answer
        self._waiting: deque[_Waiting] = deque()
        self._searching = False

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, requests: Sequence[StartRequest]) -> None:
        """Add a Start; it is answered at once unless it, or an earlier one, waits for a search."""
        self._waiting.append(_Waiting(requests))
        self._answer_ready()

    def stop(self, partitions: Iterable[int]) -> None:
        """Stop streams of waiting Starts: each ends right after it opens, before any frame."""
        gone = set(partitions)
        for waiting in self._waiting:
            waiting.stopped |= gone

    def clear(self) -> None:
        """Drop all waiting Starts, because the call ends."""
        self._waiting.clear()

    def next_search(self) -> list[tuple[int, int]] | None:
        """Return the (partition, time) pairs of the next search; None if none is needed, or one runs."""
        if self._searching or not self._waiting:
            return None
        self._searching = True
        return [
            (one.partition, one.from_time)
            for one in self._waiting[0].requests
            if one.needs_search and one.from_time is not None
        ]

    def found(self, results: Sequence[Found]) -> None:
        """Add the results of the search, in the order of its pairs."""
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


REPLICAS_NAME: Final = "replica:"
"""Beginning of the consumer names of registered replicas; the ids of their directories follow."""
_COPIES: Final = {
    types.STABILITY_REPLICATED_1: 1,
    types.STABILITY_REPLICATED_2: 2,
    types.STABILITY_REPLICATED_3: 3,
}


def check_consumer(name: str) -> str:
    """Return the name of a consumer; InvalidArgumentError if it is empty, too long, or one of those of replicas."""
    if name.startswith(REPLICAS_NAME):
        raise InvalidArgumentError(
            f"consumer is {shown(name)}; must not begin with {REPLICAS_NAME!r}, as those of replicas do"
        )
    return check_name(name, "consumer")


def chosen_partitions(partitions: Sequence[int]) -> list[int]:
    """Return the requested partitions, all for none; InvalidArgumentError for one out of range or repeated."""
    if not partitions:
        return list(range(PARTITIONS))
    if len(partitions) > PARTITIONS:
        raise InvalidArgumentError(
            f"partitions named are {len(partitions)}; must be at most {PARTITIONS}"
        )
    chosen = [check_partition(partition) for partition in partitions]
    if len(set(chosen)) != len(chosen):
        raise InvalidArgumentError("a partition is named twice in one request")
    return chosen


def read_options(opening: wire.Open, peer: str, own_set: str) -> FollowOptions:
    """Return the options that an Open asks for.

    Args:
        own_set: the id of the set of servers that this one belongs to.

    Raises:
        InvalidArgumentError: a value is out of range, or goes with no other.
        UprError: WRONG_REPLICA_SET.
    """
    if opening.stability not in types.Stability.values():
        raise InvalidArgumentError(f"stability {opening.stability} is unknown")
    if len(opening.key_prefix) > KEY_BYTES_MAX:
        raise InvalidArgumentError(
            f"key prefix is {len(opening.key_prefix)} bytes; must be at most {KEY_BYTES_MAX}"
        )
    if opening.kind not in wire.FollowKind.values():
        raise InvalidArgumentError(f"kind of a Follow call is {opening.kind}; must be 0 to 3")
    if opening.kind in (wire.FOLLOW_KIND_REPLICA, wire.FOLLOW_KIND_ANONYMOUS_REPLICA):
        return _replica_options(opening, peer, own_set)
    if opening.any_server and opening.consumer:
        raise InvalidArgumentError(
            f"consumer is {shown(opening.consumer)} in a call that any server may serve; must be empty",
            hint="a name is kept by the active server: leave out the name, or any_server",
        )
    member, lease = read_member(opening)
    return FollowOptions(
        check_consumer(opening.consumer) if opening.consumer else "",
        opening.stability == types.STABILITY_MEMORY,
        opening.keys_only,
        peer=peer,
        accept_zstd=opening.accept_zstd and not opening.plain_rows,
        key_prefix=opening.key_prefix,
        plain_rows=opening.plain_rows,
        member=member,
        lease=lease,
        copies=_COPIES.get(opening.stability, 0),
        any_server=opening.any_server,
    )


def _replica_options(opening: wire.Open, peer: str, own_set: str) -> FollowOptions:
    partial = opening.keys_only or opening.key_prefix or opening.plain_rows
    if partial or opening.consumer or opening.member:
        raise InvalidArgumentError(
            "a replica asks for a part of the blocks, or names a consumer; must do neither"
        )
    if not HEX_ID.fullmatch(opening.directory):
        raise InvalidArgumentError(
            f"directory of a replica is {shown(opening.directory)}; must be 16 hex digits"
        )
    if opening.replica_set != own_set:
        raise UprError(
            f"the replica belongs to the set of servers {shown(opening.replica_set)}; this one to {own_set!r}",
            hint="give --replicate-from a server of the same set, or --data an empty directory",
            reason="WRONG_REPLICA_SET",
        )
    anonymous = opening.kind == wire.FOLLOW_KIND_ANONYMOUS_REPLICA
    return FollowOptions(
        "" if anonymous else REPLICAS_NAME + opening.directory,
        memory=True,
        peer=peer,
        accept_zstd=opening.accept_zstd,
        directory=opening.directory,
        address=opening.address[:NAME_BYTES_MAX],
        any_server=True,
    )


def read_member(opening: wire.Open) -> tuple[str, int]:
    """Return the member that an Open names, and its lease in microseconds; "" and 0 for none.

    Raises:
        InvalidArgumentError: the name or the lease is out of range, or there is no consumer.
    """
    lease = opening.lease_seconds
    if not opening.member:
        if lease:
            raise InvalidArgumentError(
                f"lease is {lease} s without a member; must be 0", hint="name a member, or no lease"
            )
        return "", 0
    if not opening.consumer:
        raise InvalidArgumentError(
            f"member {shown(opening.member)} has no consumer; must name its group",
            hint="name the group as the consumer",
        )
    lease = LEASE_SECONDS if lease == 0 else lease
    if math.isnan(lease) or not LEASE_SECONDS_MIN <= lease <= LEASE_SECONDS_MAX:
        raise InvalidArgumentError(
            f"lease is {lease} s; must be {LEASE_SECONDS_MIN:g} to {LEASE_SECONDS_MAX:g}",
            hint="0 means the default",
        )
    return check_name(opening.member, "member"), micros(lease)


log = logging.getLogger(__name__)

SILENT: Final = EndReason("SILENT", True, "the consumer sent nothing for three heartbeat intervals")
_POSITION = struct.Struct("<IQ")
PLAIN_AT_ONCE_BYTES = 32 * 2**10
"""Size from which a frame of plain rows is built message by message, as it is sent."""


@dataclass(slots=True)
class Outgoing:
    """Message to send.

    Args:
        message: a FollowResponse, or an encoded one; for plain rows a lazy iterator of encoded ones.
        frame: the frame that it carries, None for another message.
    """

    message: Any
    frame: FrameOut | None = None


class Conversation:
    """Conversation of one accepted call, a follower of the bucket until ``close``.

    Args:
        wake: called when a message may be ready.
        now: on the clock of ``liveness``, in seconds.

    Raises:
        InvalidArgumentError, TooManyError: the consumer, or the member, cannot follow; see ``Bucket.add_follower``.

    Attributes:
        ending: why the call ends, None while it does not.
        over: whether Ended was sent, so that only the client's half-close is awaited.
        waiting: the number of answers not sent yet.
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
        self.before_frames: Callable[[], wire.FollowResponse | None] | None = None
        """Returns what must be sent before the next frame, None for nothing."""
        self.follower = Follower(bucket, options, credit, wake)
        self.starts = WaitingStarts(self._answer)
        old = bucket.add_follower(self.follower, micros(now))
        if old is not None:
            old.end_call(SUPERSEDED)
        self.follower.on_end = self.end

    def close(self, now: float = 0.0, *, left: bool = False) -> None:
        """Remove the follower; with ``left`` the client ended the call itself."""
        self._bucket.remove_follower(self.follower, micros(now), left=left and self.ending is None)

    @property
    def waiting(self) -> int:
        return len(self._out) + len(self.starts)

    @property
    def is_urgent(self) -> bool:
        """Return whether something else than a frame is to be sent now."""
        seat = self.follower.seat
        return bool(
            self._out
            or self._beat_now
            or self.ending is not None
            or self.follower.has_ended
            or (seat is not None and seat.has_news)
        )

    def say(self, message: wire.FollowResponse) -> None:
        """Queue a message before all frames and later answers."""
        self._out.append(message)
        self._wake()

    def end(self, why: EndReason) -> None:
        """End all streams and the call."""
        if self.ending is None:
            self.ending = why
            self.starts.clear()
            self.follower.end_all(why)

    # Messages of the client

    def take(self, request: object, now: float, now_micros: int) -> None:
        """Handle a message of the client; an invalid one ends the call.

        Args:
            now: on the clock of ``liveness``.
            now_micros: microseconds since the epoch.
        """
        self.liveness.heard(now)
        if self.ending is not None or not isinstance(request, wire.FollowRequest):
            return
        try:
            if self.follower.seat is not None:
                self.follower.seat.heard(micros(now))
            self._take(request, now, now_micros)
        except UprError as error:
            self.end(EndReason.of(error))
        self._wake()

    def check_heard(self, now: float) -> bool:
        """End the call if the client was silent too long. Return whether it was."""
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
            self.starts.stop(request.stop.partitions)
            self.follower.stop(request.stop.partitions)
        elif kind == "credit":
            self.follower.credit.give_back(request.credit.bytes)
        elif kind == "ack":
            self._acknowledge(request.ack, now_micros)
        elif kind in ("release", "renew"):
            self._take_of_member(request, now)
        elif kind != "pong":
            raise InvalidArgumentError(f"a message of a Follow call of kind {kind}")

    def _start(self, start: wire.Start) -> None:
        self._check_count("Start", len(start.partitions))
        plain = PlainStarts.read(start.table, start.until_now)
        requests = [_request(one) for one in start.partitions]
        told = b""
        if len(self.starts) or any(one.needs_search for one in requests):
            # Answer in the order of the requests.
            requests += plain.requests(np.ones(len(plain.partitions), bool))
        elif len(plain.partitions):
            opened, others = self.follower.start_plain(plain)
            requests += others
            told = opened.tobytes()
        if told:
            self._answer(requests, (), told)
        else:
            self.starts.take(requests)

    def _answer(
        self, requests: Sequence[StartRequest], stopped: Iterable[int], told: bytes = b""
    ) -> None:
        decided = self.follower.start(requests)
        for answer in decided:
            if isinstance(answer, RolledBack):
                tell_alarm(self._bucket.identity.name, answer)
        response = wire.FollowResponse(start_answers=wire.StartAnswers(started=told))
        for answer in decided:
            _fill_answer(response.start_answers.answers.add(partition=answer.partition), answer)
        self.say(response)
        self.follower.stop(stopped)
        self._beat_now = True

    def _take_of_member(self, request: wire.FollowRequest, now: float) -> None:
        seat = self.follower.seat
        if seat is None:
            raise InvalidArgumentError(
                f"a message of kind {request.WhichOneof('message')} in a call that names no member",
                hint="name a member in Open",
            )
        if request.HasField("renew"):
            self.say(wire.FollowResponse(renewed=wire.Renewed(number=request.renew.number)))
        else:
            self._check_count("Release", len(request.release.partitions))
            owned = seat.owned_among(request.release.partitions)
            # Their streams end in the step in which somebody else may own them.
            self.follower.stop(owned)
            seat.release(owned, micros(now))

    @staticmethod
    def _check_count(kind: str, count: int) -> None:
        if count > PARTITIONS:
            raise InvalidArgumentError(
                f"streams of a {kind} are {count}; must be at most {PARTITIONS}"
            )

    def _acknowledge(self, ack: wire.Ack, now_micros: int) -> None:
        positions = read_positions(ack.positions)
        kept = self.follower.acknowledge(*positions, now_micros, is_copy=not ack.joining)
        if not kept and not self._told_unkept:
            self._told_unkept = True
            log.warning(
                "the Acks of a consumer are not kept: too many are registered",
                extra={
                    "bucket": self._bucket.identity.name,
                    "consumer": self.follower.options.consumer,
                    "limit": CONSUMERS_MAX,
                },
            )

    # Messages of the server

    def next_message(
        self, now: float, hold: Callable[[bool], bool] = lambda may_wait: False
    ) -> Outgoing | None:
        """Return what to send next: answers, then ends of streams, then a heartbeat if one is due, then the end of the
        call, then a frame. None when there is nothing to be said now.

        So a stream's answer goes before its frames, and its end before the end of the call.

        Args:
            hold: called before a frame, with whether it may wait for others; returns whether it must wait.
        """
        if self.over:
            return None
        if self._out:
            return Outgoing(self._out.popleft())
        if self.follower.has_ended:
            self._ended.extend(self.follower.take_ended())
        if self._ended:
            return Outgoing(wire.FollowResponse(ended=_ended_message(self._ended.popleft())))
        # With its generation a call that a reset ends would store the positions of before over those that were set.
        seat = self.follower.seat if self.ending is None else None
        if seat is not None and (told := seat.take_assignment()) is not None:
            assignment = wire.Assignment(
                generation=told.generation, owned=told.owned, to_release=told.to_release
            )
            return Outgoing(wire.FollowResponse(assignment=assignment))
        # Counted from the last heartbeat, not the last frame: a consumer that receives frames may have nothing to send,
        # and only its answer to a heartbeat shows that it is alive.
        if self._beat_now or self.liveness.heartbeat_due(now):
            self._beat_now = False
            self.liveness.sent(now)
            moved = self.follower.moved_high_seqnos()
            beat = wire.Heartbeat(high_seqnos=moved.tobytes())
            return Outgoing(wire.FollowResponse(heartbeat=beat))
        if self.ending is not None:
            self.over = True
            last = wire.Ended(problem=problem_of(self.ending.error()))
            return Outgoing(wire.FollowResponse(ended=last))
        if hold(self.follower.may_wait):
            return None
        return self._next_frame()

    def _next_frame(self) -> Outgoing | None:
        if self.before_frames is not None and (first := self.before_frames()) is not None:
            return Outgoing(first)
        frame = self.follower.next_frame()
        if frame is None:
            return None
        raised = b""
        if told := self.follower.take_purge_seqnos():
            raised = b"".join([_POSITION.pack(*one) for one in told])
        plain = self.follower.options.plain_rows
        if plain and frame.size >= PLAIN_AT_ONCE_BYTES:
            return Outgoing(plain_messages(frame.blocks, frame.tokens, frame.cost, raised), frame)
        tokens, cost, message = frame.messages.get(plain, (b"", 0, None))
        if message is None or tokens != frame.tokens or cost != frame.cost or raised:
            encode: Any = plain_messages if plain else encode_frame
            writes = {"writes": frame.writes} if frame.writes else {}
            message = encode(frame.blocks, frame.tokens, frame.cost, raised, **writes)
            if plain:
                message = list(message)
            if not raised:
                frame.messages[plain] = frame.tokens, frame.cost, message
        return Outgoing(iter(message) if plain else message, frame)


def tell_alarm(bucket: str, answer: RolledBack) -> None:
    """Log that a client has rows that this server never sent: an old copy of the data may have been restored."""
    if answer.answer.alarm:
        log.error(
            "a consumer is ahead of this server",
            extra={"bucket": bucket, "partition": answer.partition, "words": answer.answer.words},
        )


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
        epoch=one.epoch,
    )


def _ended_message(ended: Ended) -> wire.Ended:
    message = wire.Ended(problem=problem_of(ended.why.error()))
    # In place: built apart each would be copied.
    for partition, token, seqno in ended.streams:
        message.streams.add(partition=partition, token=token, seqno=seqno)
    return message


def _fill_answer(message: wire.StartAnswer, answer: Answer) -> None:
    """Write an answer into the message in place: building it apart would copy it twice."""
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
        started.epoch = answer.epoch
        for record in answer.log or ():
            started.failover_log.add(
                failover_id=record.failover_id,
                seqno=record.seqno,
                epoch=record.epoch if answer.epoch else 0,
            )
    elif isinstance(answer, RolledBack):
        decision = answer.answer
        message.rollback.rollback_seqno = decision.rollback_seqno or 0
        message.rollback.failover_id = decision.newest_id
        message.rollback.rule = decision.rule
        message.rollback.words = decision.words
        message.rollback.epoch = answer.epoch
        records = log_to_messages(answer.log, with_epochs=bool(answer.epoch))
        message.rollback.failover_log.extend(records)
    else:
        message.refused.CopyFrom(problem_of(answer.error))
