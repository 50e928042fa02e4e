"""What a scripted server knows, and what its streaming calls have in common."""

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from upr_client.testing.memory import Memory, Partition
from upr_protocol.errors import (
    BucketGoneError,
    BucketNotFoundError,
    InvalidArgumentError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import check_partition
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.status import code_of, metadata_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

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


class State:
    """Everything that a scripted server knows. Whoever uses it holds ``changed``, and notifies after a change.

    Attributes:
        changed: the lock, and what calls wait for.
        bucket: the name of the only bucket.
        memory: its partitions.
        server_id: another one after each restart.
        numbered: whether anything was written since then.
        stalled: whether nothing is said and nothing heard.
        unreachable: whether calls are refused.
        markers_held: how many ``no_markers`` blocks are open.
        answers_to_lose: how many writes are to be applied and not answered.
        calls: the record.
        streaming: the open Follow and Write calls.
        acknowledged: consumer -> partition -> seqno.
        saved: consumer -> partition -> position.
        generations: consumer -> generation of its ownership.
        answers: producer -> number -> answer to its write.
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
        self.answers: dict[str, dict[int, Any]] = {}

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
        """Wait until something may be said again, or ``gone`` says that nobody wants to hear it."""
        self.changed.wait_for(lambda: not self.stalled or gone())

    def check_reachable(self) -> None:
        """Raise UnavailableError when calls are refused."""
        if self.unreachable:
            raise UnavailableError("the scripted server was made unreachable")


class StreamingCall(ABC):
    """One Follow or Write call: a thread that hears, and the handler's own that says.

    Args:
        state: of the server.
        method: how the record calls it.
        requests: from gRPC.
        context: from gRPC.
    """

    def __init__(self, state: State, method: str, requests: Iterator[Any], context: Any) -> None:
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

    @abstractmethod
    def take(self, request: Any) -> None:
        """Deal with a request; an error that is raised ends the call with it."""

    @abstractmethod
    def step(self) -> Any | None:
        """Return what is to be said next, None when there is nothing now."""

    def wait_seconds(self) -> float:
        """After how long there may be something to say although nothing changed."""
        return LONGEST_WAIT_SECONDS

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
        """Serve the call."""
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
                    self.while_stalled()
                    state.changed.wait()
                    continue
                message = self.step()
                if message is not None or self._done:
                    return message
                state.changed.wait(max(self.wait_seconds(), 0.001))

    @abstractmethod
    def while_stalled(self) -> None:
        """Take note that nothing is said only because the server stalls."""

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
                        self.take(request)
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
