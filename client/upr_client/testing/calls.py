"""Calls of a scripted server: the state that they share, and its streaming calls, Follow and Write."""

import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import grpc
import numpy as np

from upr_client.testing.memory import Memory, Partition, Row, Run, run_block
from upr_protocol.block import (
    POSITION,
    block_keys,
    block_partitions,
    block_values,
    make_runs,
    without_values,
)
from upr_protocol.errors import (
    BucketGoneError,
    BucketNotFoundError,
    ContentDiffersError,
    InvalidArgumentError,
    OutOfOrderError,
    SnapshotGoneError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import check_failover_id, check_partition, check_seqno
from upr_protocol.flow import CreditWindow, Liveness, granted_window
from upr_protocol.handshake import HandshakeAnswer, answer_start
from upr_protocol.limits import FRAME_BYTES, HEARTBEAT_SECONDS, PARTITIONS, WRITES_IN_FLIGHT_MAX
from upr_protocol.position_table import START
from upr_protocol.wire.codec import (
    block_of_write,
    block_to_message,
    log_to_messages,
    problem_of,
)
from upr_protocol.wire.grpc import code_of, metadata_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2
from upr_protocol.write_places import FIRST_PLACE_NUMBER, place_is_taken, place_of

LONGEST_WAIT_SECONDS: Final = 3600.0


@dataclass(eq=False)
class Call:
    """One call that was made of a scripted server.

    Args:
        method: "Follow", "Write", "Hello" and so on.
        requests: the messages that came, as protobuf messages of ``upr_protocol.wire.v1``; one for a unary call.
        responses: the messages that were sent.
        open: whether it goes on.
    """

    method: str
    requests: list[Any] = field(default_factory=list)
    responses: list[Any] = field(default_factory=list)
    open: bool = True

    def __repr__(self) -> str:
        counts = f"{len(self.requests)} requests, {len(self.responses)} responses"
        return f"<Call {self.method}, {counts}{', open' if self.open else ''}>"

    def requests_of(self, kind: str) -> list[Any]:
        """The requests of a streaming call of one kind: "open", "start", "ack", "write" and so on."""
        return _of(self.requests, kind)

    def responses_of(self, kind: str) -> list[Any]:
        """The responses of a streaming call of one kind: "opened", "frame", "heartbeat", "result" and so on."""
        return _of(self.responses, kind)


def _of(messages: Iterable[Any], kind: str) -> list[Any]:
    return [getattr(one, kind) for one in list(messages) if one.WhichOneof("message") == kind]


class Given(NamedTuple):
    """Result of a producer's write in one partition."""

    number: int
    start_seqno: int
    end_seqno: int
    failover_id: int


class State:
    """State of a scripted server. A user holds ``changed``, and notifies after a change.

    Attributes:
        changed: the lock, and what calls wait for.
        server_id: another one after each restart.
        numbered: whether anything was written since then.
        stalled: whether nothing is said and nothing heard.
        unreachable: whether calls are refused.
        markers_held: how many ``no_markers`` blocks are open.
        answers_to_lose: how many writes are to be applied and not answered.
        streaming: the open Follow and Write calls.
        acknowledged: consumer -> partition -> seqno.
        saved: consumer -> partition -> position.
        generations: consumer -> generation of its ownership.
        answers: producer -> partition -> its newest write there.
        places: producer -> place -> a number of the content that it has.
    """

    def __init__(self, bucket: str) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.bucket = bucket
        self.memory = Memory()
        self.server_id = 1 + secrets.randbelow(2**64 - 1)
        self.stalled = self.unreachable = self.numbered = False
        self.markers_held = self.answers_to_lose = 0
        self.calls: list[Call] = []
        self.streaming: set[StreamingCall] = set()
        self.acknowledged: dict[str, dict[int, int]] = {}
        self.saved: dict[str, dict[int, stream_pb2.Position]] = {}
        self.generations: dict[str, int] = {}
        self.answers: dict[str, dict[int, Given]] = {}
        self.places: dict[str, dict[int, int]] = {}

    def find(self, request: Any) -> Memory:
        """Return the partitions of the bucket that a request names by ``bucket`` and ``bucket_version``.

        Raises:
            BucketNotFoundError: there is none of that name.
            BucketGoneError: it has another version.
        """
        if request.bucket != self.bucket:
            raise BucketNotFoundError(
                f"there is no bucket {request.bucket!r}", hint=f"known: {self.bucket}"
            )
        versioned = "bucket_version" in request.DESCRIPTOR.fields_by_name
        known = request.bucket_version if versioned else 0
        if known and known != self.memory.version:
            raise BucketGoneError(
                f"bucket {self.bucket!r} has version {self.memory.version:016x}, not {known:016x}"
            )
        return self.memory

    def write(
        self, rows: Iterable[tuple[int, bytes, bytes | None]]
    ) -> tuple[dict[int, tuple[int, int]], dict[int, UprError]]:
        """Number (partition, key, value or None) rows, and hand them to followers.

        Returns:
            Partition -> (start seqno, end seqno), and partition -> error for those that are refused.
        """
        parts: dict[int, list[tuple[bytes, bytes | None]]] = {}
        for number, key, value in rows:
            parts.setdefault(number, []).append((key, value))
        applied: dict[int, tuple[int, int]] = {}
        refused: dict[int, UprError] = {}
        for number, part in sorted(parts.items()):
            partition = self.memory[number]
            if partition.refusal is not None:
                refused[number] = partition.refusal
                continue
            applied[number] = partition.write(part, micros(), marker=not self.markers_held)
            self.numbered = True
        self.changed.notify_all()
        return applied, refused

    def chosen(self, numbers: Iterable[int]) -> list[Partition]:
        """Return these partitions, all for none.

        Raises:
            InvalidArgumentError: one is out of range, or there twice.
        """
        asked = list(numbers)
        if len(set(asked)) < len(asked):
            raise InvalidArgumentError("a partition is named twice")
        return [self.memory[check_partition(number)] for number in asked or range(PARTITIONS)]

    def wait_while_stalled(self, gone: Callable[[], bool]) -> None:
        """Wait until messages may be sent again, or ``gone`` says that the peer left."""
        self.changed.wait_for(lambda: not self.stalled or gone())

    def check_reachable(self) -> None:
        """Raise UnavailableError when calls are refused."""
        if self.unreachable:
            raise UnavailableError("the scripted server was made unreachable")


class StreamingCall:
    """One Follow or Write call: a thread that hears, and the handler's own that says.

    Args:
        role: what it does; called under the lock of the state. An error that ``take`` raises ends the call with it.
        requests, context: from gRPC.
    """

    def __init__(
        self,
        role: "FollowCall | WriteCall",
        state: State,
        method: str,
        requests: Iterator[Any],
        context: Any,
    ) -> None:
        self.role = role
        self.state = state
        self.record = Call(method)
        self.half_closed = False
        self._requests = requests
        self._context = context
        self._gone = False
        self._done = False
        self._error: UprError | None = None
        with state.changed:
            state.calls.append(self.record)
            state.streaming.add(self)
            state.changed.notify_all()
        if not context.add_callback(self._leave):
            self._gone = True

    def finish(self) -> None:
        """End the call well, when everything was said."""
        self._done = True

    def fail(self, error: UprError) -> None:
        """End the call with an error, before anything else is said."""
        self._error = self._error or error
        self.state.changed.notify_all()

    def _leave(self) -> None:
        with self.state.changed:
            self._gone = True
            self.state.changed.notify_all()

    def messages(self) -> Iterator[Any]:
        reader = threading.Thread(
            target=self._read, name=f"upr-scripted-{self.record.method.lower()}", daemon=True
        )
        reader.start()
        try:
            while (message := self._next()) is not None:
                self.record.responses.append(message)
                yield message
        finally:
            with self.state.changed:
                self._gone = True
                self.record.open = False
                self.state.streaming.discard(self)
                self.state.changed.notify_all()

    def _next(self) -> Any | None:
        state = self.state
        with state.changed:
            while True:
                if self._gone:
                    return None
                if self._error is None and state.unreachable:
                    self.fail(UnavailableError("the scripted server was made unreachable"))
                if self._error is not None:
                    self._tell_error(self._error)
                    return None
                if state.stalled:
                    self.role.while_stalled()
                    state.changed.wait()
                    continue
                message = self.role.step()
                if message is not None or self._done:
                    return message
                state.changed.wait(max(self.role.wait_seconds(), 0.001))

    def _tell_error(self, error: UprError) -> None:
        self._context.set_code(code_of(error))
        self._context.set_details(error.message)
        self._context.set_trailing_metadata(metadata_of(error))

    def _read(self) -> None:
        state = self.state
        try:
            for request in self._requests:
                with state.changed:
                    self.record.requests.append(request)
                    state.changed.notify_all()
                    state.wait_while_stalled(lambda: self._gone)
                    if self._gone:
                        return
                    try:
                        self.role.take(request)
                    except UprError as error:
                        self.fail(error)
                    state.changed.notify_all()
        except grpc.RpcError:
            return
        finally:
            with state.changed:
                self.half_closed = True
                state.changed.notify_all()


def micros() -> int:
    """Return the time in microseconds since the epoch."""
    return time.time_ns() // 1000


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


class FollowCall:
    """One Follow call; see ``change_stream_service.proto``."""

    def __init__(self, state: State, requests: Iterator[Any], context: Any) -> None:
        self.state = state
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
        # Last, because from now on others see it.
        self.call = StreamingCall(self, state, "Follow", requests, context)

    # Messages of the client.

    def take(self, request: Any) -> None:
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
                self.end_stream(
                    partition, told_problem("STOPPED", "the consumer stopped the stream")
                )
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
        window = granted_window(opening.credit_bytes)
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
                if isinstance(call.role, FollowCall) and call.role is not self:
                    call.role.superseded_by(self.consumer)
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
            self.end_call(told_problem("SUPERSEDED", "another call took over this consumer name"))

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
        self.end_stream(number, told_problem("STOPPED", "the stream was started anew"))
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
            raise InvalidArgumentError(f"Ack is {len(positions)} bytes; must be a multiple of 12")
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
        stream = self._streams.pop(partition, None)
        if stream is not None:
            ended = stream_pb2.EndedStream(
                partition=partition, token=stream.token, seqno=stream.seqno
            )
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
            self.end_stream(partition.number, told_problem("PURGED", words, retriable=True))

    def _say_ended(self, ended: stream_pb2.Ended) -> None:
        self._out.append(stream_pb2.FollowResponse(ended=ended))
        self.state.changed.notify_all()

    # Messages of the server.

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
        if self.call.half_closed or (self._ending is not None and now >= self._close_by):
            self.call.finish()
            return None
        if self._opening is None or self._ending is not None:
            return None
        if self._beat_now or self._liveness.heartbeat_due(now):
            return self._heartbeat(now)
        if self._liveness.peer_is_gone(now):
            words = "the consumer said nothing for three heartbeat intervals"
            self.end_call(told_problem("SILENT", words, retriable=True))
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
            # Turns are fair: a served stream moves behind the others.
            self._streams[number] = self._streams.pop(number)
        if not size:
            return None
        frame.credit_bytes = self._credit.spend(size)
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
            self.end_stream(number, told_problem("SNAPSHOT_GONE", words))
            return None
        return part

    def _finish_stream(self, number: int) -> None:
        self.end_stream(number, told_problem("FINISHED", "the stream reached its end"))

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
        partition, failover_id, seqno, data_id, horizon = record
        one = stream_pb2.StartPartition(
            partition=partition,
            failover_id=failover_id or None,
            seqno=seqno,
            data_id=data_id or None,
            horizon=horizon or None,
        )
        if start.until_now:
            one.until_now = True
        requests.append(one)
    return requests


def _decide(partition: Partition, asked: stream_pb2.StartPartition) -> HandshakeAnswer:
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
        horizon=asked.horizon if asked.HasField("horizon") else None,
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


def _rollback(partition: Partition, answer: HandshakeAnswer) -> stream_pb2.Rollback:
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
        block = run_block(number, [row[:3] for row in told], *run)
        return block_to_message(without_values(block) if opening.keys_only else block)
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


def told_problem(reason: str, words: str, *, retriable: bool = False) -> types_pb2.Problem:
    return types_pb2.Problem(reason=reason, retriable=retriable, message=words)


class WriteCall:
    """One Write call; see ``key_value_service.proto``. What is numbered counts as durable at once."""

    def __init__(self, state: State, requests: Iterator[Any], context: Any) -> None:
        self.state = state
        self._memory: Memory | None = None
        self._producer = ""
        self._carried = 0
        self._refusing: set[int] = set()
        self._out: deque[kv_pb2.WriteResponse] = deque()
        # Last, because from now on others see it.
        self.call = StreamingCall(self, state, "Write", requests, context)

    def take(self, request: Any) -> None:
        """Deal with a request: number a write, or say why not."""
        kind = request.WhichOneof("message")
        if self._memory is None:
            if kind != "open":
                raise InvalidArgumentError("the first message of a Write call is Open")
            self._open(request.open)
        elif kind != "write":
            raise InvalidArgumentError("a message of a Write call that is neither Open nor a write")
        else:
            result = self._write(request.write)
            self._out.append(kv_pb2.WriteResponse(result=result))
            if self.state.answers_to_lose:
                self.state.answers_to_lose -= 1
                self.call.fail(UnavailableError("the answer to a write was lost"))

    def _open(self, opening: kv_pb2.WriteOpen) -> None:
        self._memory = self.state.find(opening)
        self._producer = opening.producer
        given = self.state.answers.get(self._producer, {})
        opened = kv_pb2.WriteOpened(
            bucket_version=self._memory.version,
            last_number=max((one.number for one in given.values()), default=0),
            writes_in_flight=WRITES_IN_FLIGHT_MAX,
        )
        self._out.append(kv_pb2.WriteResponse(opened=opened))

    def _write(self, write: kv_pb2.WriteBlock) -> kv_pb2.WriteResult:
        try:
            if self._producer and write.previous_number != self._carried:
                raise OutOfOrderError(
                    f"write {write.number} names {write.previous_number} as the number before it, "
                    f"this call's last was {self._carried}"
                )
            result = self._applied(write)
        except UprError as error:
            return kv_pb2.WriteResult(number=write.number, refused=problem_of(error))
        self._carried = write.number
        return result

    def _applied(self, write: kv_pb2.WriteBlock) -> kv_pb2.WriteResult:
        assert self._memory is not None
        if self._producer and write.number >= FIRST_PLACE_NUMBER:
            self._check_place(write.number)
        block = block_of_write(write)
        known = self._known(write.number, block.runs["partition"].tolist())
        rows = [
            row
            for row in zip(
                block_partitions(block), block_keys(block), block_values(block), strict=True
            )
            if row[0] not in known
        ]
        applied, refused = self.state.write(row for row in rows if row[0] not in self._refusing)
        for partition in {row[0] for row in rows} & self._refusing:
            refused[partition] = self._memory[partition].refusal or OutOfOrderError(
                f"partition {partition} refused an earlier write of this call"
            )
        told = dict(known)
        for partition, (start, end) in applied.items():
            failover_id = self._memory[partition].log.newest.failover_id
            told[partition] = Given(write.number, start, end, failover_id)
        if self._producer:
            self._refusing |= refused.keys()
            if applied and write.number >= FIRST_PLACE_NUMBER:
                places = self.state.places.setdefault(self._producer, {})
                places.setdefault(place_of(write.number), write.number)
            self.state.answers.setdefault(self._producer, {}).update(
                (partition, told[partition]) for partition in applied
            )
        return _result(write.number, told, refused, duplicate=bool(known) and not applied)

    def _check_place(self, number: int) -> None:
        places = self.state.places.get(self._producer, {})
        place = place_of(number)
        known = [places[place]] if place in places else []
        if place_is_taken(number, places[max(places)] if places else 0, known):
            raise ContentDiffersError(f"place {place} has another content, or was passed over")

    def _known(self, number: int, partitions: list[int]) -> dict[int, Given]:
        """Return what of a write was applied before, and not undone; with seqnos of 0 where a newer one is known."""
        assert self._memory is not None
        known = {}
        given = self.state.answers.get(self._producer, {})
        for partition in partitions:
            one = given.get(partition)
            if one is None or one.number < number:
                continue
            if self._memory[partition].log.id_at(one.end_seqno) == one.failover_id:
                known[partition] = one if one.number == number else Given(number, 0, 0, 0)
        return known

    def step(self) -> Any | None:
        """Answer in order; end when the client has half-closed."""
        if self._out:
            return self._out.popleft()
        if self.call.half_closed:
            self.call.finish()
        return None

    def wait_seconds(self) -> float:
        """There is never anything to say by itself."""
        return LONGEST_WAIT_SECONDS

    def while_stalled(self) -> None:
        """Nothing to be noted: a Write call has no heartbeats."""


def _result(
    number: int, told: dict[int, Given], refused: dict[int, UprError], *, duplicate: bool
) -> kv_pb2.WriteResult:
    given = dict(sorted(told.items()))
    starts, ends = (
        [getattr(one, at) for one in given.values()] for at in ("start_seqno", "end_seqno")
    )
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    return kv_pb2.WriteResult(
        number=number,
        refused=None if given else problem_of(next(iter(refused.values()))),
        runs=make_runs(list(given), counts, starts, ends).tobytes(),
        failover_ids=[one.failover_id for one in given.values()],
        duplicate=duplicate,
        refused_partitions=[
            types_pb2.RefusedPartition(partition=p, problem=problem_of(error))
            for p, error in sorted(refused.items())
        ],
    )
