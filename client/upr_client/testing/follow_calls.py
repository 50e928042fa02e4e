"""The Follow calls of a scripted server."""

import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from upr_client.testing.memory import Partition, Row, Run, block_of
from upr_client.testing.state import State, StreamingCall
from upr_protocol.credit import CreditWindow
from upr_protocol.errors import InvalidArgumentError, SnapshotGoneError, UprError
from upr_protocol.failover import check_failover_id, check_partition, check_seqno
from upr_protocol.handshake import StartAnswer, answer_start
from upr_protocol.limits import CREDIT_BYTES, FRAME_BYTES, HEARTBEAT_SECONDS
from upr_protocol.liveness import Liveness
from upr_protocol.records import POSITION, START
from upr_protocol.wire.codec import block_to_message, log_to_messages, problem_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import types_pb2

HALF_CLOSE_SECONDS: Final = 5.0
_ENTRY: Final = struct.Struct("<IQ")


@dataclass(slots=True)
class Stream:
    """One open stream.

    Attributes:
        token: marks its messages.
        failover_id: the newest when it was opened.
        seqno: it was sent everything up to here.
        horizon: the largest that it was sent, at least the seqno.
        until: it ends at the first marker at or above; None for no end.
        exact: whether ``until`` is an exact end.
        told_purge: the purge seqno that it knows.
    """

    token: int
    failover_id: int
    seqno: int
    horizon: int
    until: int | None
    exact: bool
    told_purge: int

    @property
    def is_done(self) -> bool:
        """Whether it stands at a marker at or above its end."""
        return self.until is not None and self.seqno >= self.until and self.horizon <= self.seqno


class FollowCall(StreamingCall):
    """One Follow call; see ``change_stream_service.proto``."""

    def __init__(self, state: State, requests: Iterator[Any], context: Any) -> None:
        super().__init__(state, "Follow", requests, context)
        self.consumer = ""
        self._opening: stream_pb2.Open | None = None
        self._credit = CreditWindow()
        self._liveness = Liveness(HEARTBEAT_SECONDS, time.monotonic())
        self._streams: dict[int, Stream] = {}
        self._sent: dict[int, tuple[int, int]] = {}
        self._last_token = 0
        self._told_high: dict[int, int] = {}
        self._out: deque[stream_pb2.FollowResponse] = deque()
        self._beat_now = False
        self._ending: types_pb2.Problem | None = None
        self._close_by = 0.0

    # What the client says.

    def take(self, request: Any) -> None:
        """Deal with a request."""
        self._liveness.heard(time.monotonic())
        kind = request.WhichOneof("message")
        if self._opening is None:
            if kind != "open":
                raise InvalidArgumentError("the first message of a Follow call is Open")
            self._open(request.open)
            return
        if self._ending is not None:
            return
        try:
            self._take_further(kind, request)
        except UprError as error:
            self.end_call(problem_of(error))

    def _take_further(self, kind: str, request: Any) -> None:
        if kind == "start":
            self._start([*request.start.partitions, *_plain(request.start)])
        elif kind == "stop":
            for partition in request.stop.partitions:
                self.end_stream(partition, _problem("STOPPED", "the consumer stopped the stream"))
        elif kind == "credit":
            self._credit.give_back(request.credit.bytes)
        elif kind == "ack":
            self._acknowledge(request.ack.positions)
        elif kind != "pong":
            raise InvalidArgumentError(
                f"a message of kind {kind}", hint="the scripted server has no groups"
            )

    def _open(self, opening: stream_pb2.Open) -> None:
        state = self.state
        state.find(opening)
        if opening.member:
            raise InvalidArgumentError(
                "the scripted server has no groups", hint="use ServerProcess for these"
            )
        window = opening.credit_bytes or CREDIT_BYTES
        self._credit = CreditWindow(window)
        interval = opening.heartbeat_seconds or HEARTBEAT_SECONDS
        self._liveness = Liveness(interval, time.monotonic())
        self._opening = opening
        self.consumer = opening.consumer
        generation = 0
        if self.consumer:
            generation = state.generations.get(self.consumer, 0) + 1
            state.generations[self.consumer] = generation
            for call in list(state.streaming):
                if isinstance(call, FollowCall) and call is not self:
                    call.superseded_by(self.consumer)
        opened = stream_pb2.Opened(
            server_id=state.server_id,
            bucket_version=state.memory.version,
            credit_bytes=window,
            heartbeat_seconds=interval,
            server_version="scripted",
            generation=generation,
        )
        self._out.append(stream_pb2.FollowResponse(opened=opened))

    def superseded_by(self, consumer: str) -> None:
        """Another call was opened with this consumer name: end this one if the name is its own."""
        if self.consumer == consumer and self._opening is not None:
            self.end_call(_problem("SUPERSEDED", "another call took over this consumer name"))

    def _start(self, asked: Sequence[stream_pb2.StartPartition]) -> None:
        answers = [self._answer(one) for one in asked]
        message = stream_pb2.FollowResponse(start_answers=stream_pb2.StartAnswers(answers=answers))
        self._out.append(message)
        self._beat_now = True

    def _answer(self, asked: stream_pb2.StartPartition) -> stream_pb2.StartAnswer:
        number = asked.partition
        message = stream_pb2.StartAnswer(partition=number)
        try:
            partition = self.state.memory[check_partition(number)]
            answer = _decide(partition, asked)
            if answer.kind == "started":
                message.started.CopyFrom(self._open_stream(partition, asked))
            else:
                message.rollback.CopyFrom(_rollback(partition, answer))
        except UprError as error:
            message.refused.CopyFrom(problem_of(error))
        return message

    def _open_stream(
        self, partition: Partition, asked: stream_pb2.StartPartition
    ) -> stream_pb2.Started:
        number, seqno, begin = partition.number, asked.seqno, None
        until = _until(partition, asked)
        if asked.WhichOneof("from") is not None:
            if seqno or asked.HasField("failover_id"):
                raise InvalidArgumentError(
                    "from_now and from_time are for a client that has nothing"
                )
            newest = partition.last_marker
            seqno = begin = (
                newest if asked.from_now else min(partition.first_since(asked.from_time), newest)
            )
        self.end_stream(number, _problem("STOPPED", "the stream was started anew"))
        self._last_token += 1
        newest_id = partition.log.newest.failover_id
        exact = asked.HasField("until_exact")
        stream = Stream(self._last_token, newest_id, seqno, seqno, until, exact, partition.purge)
        self._streams[number] = stream
        self._sent[number] = (newest_id, seqno)
        knows_log = asked.HasField("failover_id") and asked.seqno
        started = stream_pb2.Started(
            token=stream.token,
            failover_id=newest_id,
            high_seqno=partition.high,
            purge_seqno=partition.purge,
            until_seqno=until,
            failover_log=() if knows_log else log_to_messages(partition.log),
        )
        if begin is not None:
            started.start_seqno = begin
        return started

    def _acknowledge(self, positions: bytes) -> None:
        if len(positions) % POSITION.itemsize:
            raise InvalidArgumentError(f"an Ack of {len(positions)} bytes, a position takes 12")
        kept = self.state.acknowledged.setdefault(self.consumer, {})
        for number, seqno in np.frombuffer(positions, POSITION).tolist():
            failover_id, sent = self._sent.get(check_partition(number), (0, 0))
            if failover_id != self.state.memory[number].log.newest.failover_id:
                continue
            if seqno > sent:
                raise InvalidArgumentError(
                    f"an Ack of partition {number} at seqno {seqno}, it was sent up to {sent}"
                )
            kept[number] = seqno

    # What is forced.

    def end_stream(self, partition: int, problem: types_pb2.Problem) -> None:
        """End the stream of a partition, if it is open."""
        stream = self._streams.pop(partition, None)
        if stream is not None:
            ended = stream_pb2.EndedStream(partition=partition, token=stream.token)
            self._say_ended(stream_pb2.Ended(streams=[ended], problem=problem))

    def end_call(self, problem: types_pb2.Problem) -> None:
        """End all streams, then the call as a whole."""
        if self._ending is None:
            for partition in list(self._streams):
                self.end_stream(partition, problem)
            self._ending = problem
            self._say_ended(stream_pb2.Ended(problem=problem))
            self._close_by = time.monotonic() + HALF_CLOSE_SECONDS

    def purged(self, partition: Partition) -> None:
        """Tombstones went: end the partition's stream if it is past 0 and has not seen all of them."""
        stream = self._streams.get(partition.number)
        if stream is not None and 0 < stream.seqno < partition.purge:
            words = f"the stream stands at {stream.seqno}, tombstones up to {partition.purge} are purged"
            self.end_stream(partition.number, _problem("PURGED", words, retriable=True))

    def _say_ended(self, ended: stream_pb2.Ended) -> None:
        self._out.append(stream_pb2.FollowResponse(ended=ended))
        self.state.changed.notify_all()

    # What the server says.

    def while_stalled(self) -> None:
        """Silence that was forced is not the client's."""
        self._liveness.heard(time.monotonic())

    def wait_seconds(self) -> float:
        """Until the next heartbeat, or until the client has to half-close."""
        deadline = self._liveness.next_deadline() if self._ending is None else self._close_by
        return deadline - time.monotonic()

    def step(self) -> Any | None:
        """Answers and ends first, then a heartbeat if one is due, then a frame."""
        if self._out:
            return self._out.popleft()
        now = time.monotonic()
        if self._ending is not None:
            if self.half_closed or now >= self._close_by:
                self.finish()
            return None
        if self.half_closed:
            self.finish()
            return None
        if self._opening is None:
            return None
        if self._beat_now or self._liveness.heartbeat_due(now):
            return self._heartbeat(now)
        if self._liveness.peer_is_gone(now):
            words = "the consumer said nothing for three heartbeat intervals"
            self.end_call(_problem("SILENT", words, retriable=True))
            return self._out.popleft()
        return self._frame() or (self._out.popleft() if self._out else None)

    def _heartbeat(self, now: float) -> stream_pb2.FollowResponse:
        self._beat_now = False
        self._liveness.sent(now)
        highs = {number: self.state.memory[number].high for number in self._streams}
        moved = {n: high for n, high in highs.items() if self._told_high.get(n, 0) != high}
        self._told_high.update(moved)
        packed = b"".join(_ENTRY.pack(*one) for one in moved.items())
        return stream_pb2.FollowResponse(heartbeat=stream_pb2.Heartbeat(high_seqnos=packed))

    def _frame(self) -> stream_pb2.FollowResponse | None:
        assert self._opening is not None
        frame = stream_pb2.Frame()
        tokens: list[int] = []
        size = 0
        for number, stream in list(self._streams.items()):
            if stream.is_done:
                self._finish_stream(number)
                continue
            part = self._part(number, stream)
            if part is None:
                continue
            run, rows = part
            message = _message(number, stream, run, rows, self._opening)
            fits = size + message.ByteSize()
            left = self._credit.window - self._credit.outstanding
            if fits > min(FRAME_BYTES, left) if size else not self._credit.may_send(fits):
                break
            size = fits
            if isinstance(message, stream_pb2.PlainRun):
                frame.plain_runs.append(message)
            else:
                frame.blocks.append(message)
                tokens.append(stream.token)
            stream.seqno, stream.horizon = run.end, max(stream.horizon, run.horizon)
            self._sent[number] = (stream.failover_id, run.end)
            # Turns are fair: who was served goes behind the others.
            self._streams[number] = self._streams.pop(number)
        if not size:
            return None
        self._credit.spend(size)
        frame.tokens = np.array(tokens, "<u4").tobytes()
        frame.purge_seqnos = self._raised()
        for number, stream in list(self._streams.items()):
            if stream.is_done:
                self._finish_stream(number)
        return stream_pb2.FollowResponse(frame=frame)

    def _part(self, number: int, stream: Stream) -> tuple[Run, list[Row]] | None:
        assert self._opening is not None
        part = self.state.memory[number].next_part(stream.seqno, self._opening.key_prefix)
        if part is not None and stream.exact and part[0].horizon > (stream.until or 0):
            words = f"partition {number} is not to be had as of seqno {stream.until} any more"
            self.end_stream(number, _problem("SNAPSHOT_GONE", words))
            return None
        return part

    def _finish_stream(self, number: int) -> None:
        self.end_stream(number, _problem("FINISHED", "the stream reached its end"))

    def _raised(self) -> bytes:
        raised = b""
        for number, stream in self._streams.items():
            purge = self.state.memory[number].purge
            if purge > stream.told_purge:
                stream.told_purge = purge
                raised += _ENTRY.pack(number, purge)
        return raised


def _plain(start: stream_pb2.Start) -> list[stream_pb2.StartPartition]:
    """Return the requests of a Start's table one by one."""
    requests = []
    for record in np.frombuffer(start.table, START).tolist():
        partition, failover_id, seqno, data_id = record
        one = stream_pb2.StartPartition(
            partition=partition,
            failover_id=failover_id or None,
            seqno=seqno,
            data_id=data_id or None,
        )
        if start.until_now:
            one.until_now = True
        requests.append(one)
    return requests


def _decide(partition: Partition, asked: stream_pb2.StartPartition) -> StartAnswer:
    if partition.refusal is not None:
        raise partition.refusal
    check_seqno(asked.seqno)
    if asked.HasField("data_id"):
        check_failover_id(asked.data_id)
    return answer_start(
        partition.log,
        failover_id=asked.failover_id if asked.HasField("failover_id") else None,
        seqno=asked.seqno,
        data_id=asked.data_id if asked.HasField("data_id") else None,
        high_seqno=partition.high,
        purge_seqno=partition.purge,
    )


def _until(partition: Partition, asked: stream_pb2.StartPartition) -> int | None:
    kind = asked.WhichOneof("until")
    if kind is None:
        return None
    until: int = partition.high if asked.until_now else getattr(asked, kind)
    if kind == "until_exact":
        there = until == asked.seqno or (until > asked.seqno and partition.is_marker(until))
        if not there:
            raise SnapshotGoneError(
                f"partition {partition.number} cannot be served as of seqno {until}",
                hint="make a new cut and follow to that one",
            )
    return check_seqno(until, "until_seqno")


def _rollback(partition: Partition, answer: StartAnswer) -> stream_pb2.Rollback:
    return stream_pb2.Rollback(
        rollback_seqno=answer.rollback_seqno or 0,
        failover_id=answer.newest_id,
        rule=answer.rule,
        words=answer.words,
        failover_log=log_to_messages(partition.log),
    )


def _message(
    number: int, stream: Stream, run: Run, rows: Iterable[Row], opening: stream_pb2.Open
) -> stream_pb2.PlainRun | types_pb2.Block:
    """Return what a frame holds of a run."""
    told = list(rows)
    if not opening.plain_rows:
        return block_to_message(block_of(number, run, told, keys_only=opening.keys_only))
    return stream_pb2.PlainRun(
        partition=number,
        token=stream.token,
        start_seqno=run.start,
        end_seqno=run.end,
        horizon=run.horizon,
        time=run.time,
        rows=[
            stream_pb2.PlainRow(
                seqno=row.seqno,
                key=row.key,
                value=None if opening.keys_only else row.value,
                deleted=row.value is None,
                time=row.time,
            )
            for row in told
        ],
    )


def _problem(reason: str, words: str, *, retriable: bool = False) -> types_pb2.Problem:
    return types_pb2.Problem(reason=reason, retriable=retriable, message=words)
