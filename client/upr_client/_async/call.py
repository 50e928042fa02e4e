"""Calls: a client's connection and its endpoints, one bidirectional call with a reader in the background, the Follow call.

Buckets, streams and writers know the connection, and not the client that made it.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt

from upr_client._async.io import (
    Background,
    Cancelled,
    Channel,
    Event,
    Queue,
    RequestQueue,
    cancelled_from_outside,
    mutex,
    now,
    open_channel,
    unary,
)
from upr_client.changes.groups import is_of_group
from upr_client.changes.link import MOMENT_SECONDS, CallState
from upr_client.endpoints import Token, authorization, call_error, moves_on, was_not_done
from upr_protocol.errors import ClosedError, UnavailableError, UprError
from upr_protocol.limits import SERVERS_MAX
from upr_protocol.wire.grpc import CLIENT_OPTIONS
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1.admin_service_pb2_grpc import AdminServiceStub
from upr_protocol.wire.v1.change_stream_service_pb2_grpc import ChangeStreamServiceStub
from upr_protocol.wire.v1.key_value_service_pb2_grpc import KeyValueServiceStub
from upr_protocol.wire.v1.replica_service_pb2_grpc import ReplicaServiceStub

_logger = logging.getLogger("upr_client")

_STREAMS = frozenset({"Follow", "Write"})
_LEAST_SECONDS = 0.001


class Stubs(NamedTuple):
    """The services of one endpoint; their unary calls go to whichever endpoint is the current one then."""

    streams: Any
    keys: Any
    admin: Any
    sets: Any
    endpoint: int
    """Its index."""
    connection: int
    """Number of the channel, among those opened to this endpoint one after the other."""
    any_server: bool
    """Whether it need not be the active server."""


class Router:
    """The endpoints of a client, one of which is the current one; and one, maybe another, that is read from where any
    server may be.

    Args:
        endpoints: at least one, to begin with; servers name others.
        credentials: for TLS; None for plain channels.
        token: sent with every call; None for none.
        channel: the channel to use instead, of the caller's; it is not closed here.
        check: raises ClosedError when the client cannot be used any more.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        credentials: grpc.ChannelCredentials | None,
        token: Token | None,
        channel: Channel | None,
        check: Callable[[], None],
    ) -> None:
        self.endpoints = endpoints
        self.check = check
        self._credentials = credentials
        self._token = token
        self._given = channel
        self._channels: dict[int, Channel] = {}
        self._raw: dict[int, tuple[Any, Any, Any, Any]] = {}
        self._opened: dict[int, int] = {}
        self._current = {False: 0, True: 0}
        self._mutex = mutex()

    def current(self, any_server: bool = False) -> int:
        """Return the index of the current endpoint, or of the one that is read from where any server may be."""
        return self._current[any_server]

    def stubs(self, any_server: bool = False) -> Stubs:
        """Return the services of the endpoint of ``current``."""
        index = self._current[any_server]
        self.raw(index)
        streams, keys, admin, sets = (
            _Service(self, index, number, any_server) for number in range(4)
        )
        return Stubs(streams, keys, admin, sets, index, self._opened.get(index, 0), any_server)

    def raw(self, index: int) -> tuple[Any, Any, Any, Any]:
        """Return gRPC's own stubs of an endpoint; its channel is made when first needed."""
        with self._mutex:
            self.check()
            stubs = self._raw.get(index)
            if stubs is None:
                channel = self._given
                if channel is None:
                    endpoint = self.endpoints[index]
                    channel = open_channel(endpoint, CLIENT_OPTIONS, self._credentials)
                    self._channels[index] = channel
                    self._opened[index] = self._opened.get(index, 0) + 1
                stubs = self._raw[index] = (
                    ChangeStreamServiceStub(channel),
                    KeyValueServiceStub(channel),
                    AdminServiceStub(channel),
                    ReplicaServiceStub(channel),
                )
            return stubs

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Return what goes with every call."""
        return None if self._token is None else authorization(self._token)

    def learn(self, servers: Iterable[str]) -> None:
        """Remember further servers of the set, behind the endpoints that are there.

        Not of a client with a token or a channel of its own: those are for whom it was given.
        """
        with self._mutex:
            if not (self._token or self._given):
                known = dict.fromkeys((*self.endpoints, *filter(None, servers)))
                # The first ones are what the application gave, and indexes must stay.
                self.endpoints = tuple(known)[: max(SERVERS_MAX, len(self.endpoints))]

    def failed(self, error: UprError, index: int, any_server: bool = False) -> bool:
        """Go on to another endpoint if this one is the current one, and the error says that another may do better.

        It is the server that the error names as the active one, else the next endpoint. Return whether it was named.
        """
        self.learn([error.owner])
        with self._mutex:
            owner = error.owner
            named = owner in self.endpoints and owner != self.endpoints[index]
            if index != self._current[any_server] or not moves_on(error):
                return named and self.endpoints[self._current[any_server]] == owner
            if len(self.endpoints) == 1:
                return False
            # One that names itself waits for others, and another may be active meanwhile.
            at = self.endpoints.index(owner) if named else (index + 1) % len(self.endpoints)
            self._current[any_server] = at
        _logger.info(
            "%s: %s (%s); going on to %s",
            self.endpoints[index],
            error.reason,
            error,
            self.endpoints[at],
        )
        return named

    def give_up(self, stubs: Stubs) -> Channel | None:
        """Return the channel behind some stubs, to be closed: the next call opens another one. None when it was given
        up already, or is the caller's.
        """
        with self._mutex:
            if self._opened.get(stubs.endpoint) != stubs.connection:
                return None
            self._raw.pop(stubs.endpoint, None)
            return self._channels.pop(stubs.endpoint, None)

    def take_channels(self) -> list[Channel]:
        """Return the channels that were made, for closing; there are none afterwards."""
        with self._mutex:
            channels = list(self._channels.values())
            self._channels.clear()
            self._raw.clear()
            return channels


class _Service:
    """Stands for a stub. A stream belongs to the endpoint it was asked for; a unary call to the current one."""

    def __init__(self, router: Router, index: int, number: int, any_server: bool) -> None:
        self._router = router
        self._index = index
        self._number = number
        self._any_server = any_server

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        router, number = self._router, self._number
        if name in _STREAMS:
            method = getattr(router.raw(self._index)[number], name)
            return lambda requests: method(requests, metadata=router.metadata())

        # The arguments are those of gRPC's own methods.
        async def unary(request: Any, **options: Any) -> Any:
            return await _unary(router, number, name, request, options["timeout"], self._any_server)

        return unary


async def _unary(
    router: Router, number: int, name: str, request: Any, seconds: float, any_server: bool
) -> Any:
    """Make a unary call, within a total time in seconds.

    One that cannot have reached a server, or was refused by one that is not the active one, or behind, is made at each of
    the other endpoints, once.
    """
    deadline = now() + seconds
    tried = set[int]()
    while True:
        index = router.current(any_server)
        tried.add(index)
        method = getattr(router.raw(index)[number], name)
        left = max(deadline - now(), _LEAST_SECONDS)
        try:
            return await method(request, timeout=left, metadata=router.metadata())
        except Cancelled:
            # Closing a channel of grpc.aio cancels its calls, which looks like a cancelled task.
            if cancelled_from_outside():
                raise
            router.check()
            raise UnavailableError(
                "the connection was given up while the call was under way"
            ) from None
        except grpc.RpcError as error:
            # Closed by another task or thread meanwhile: that is the reason then.
            router.check()
            router.failed(call_error(error), index, any_server)
            if router.current(any_server) in tried or not was_not_done(error):
                raise


class Connection:
    """Connection of a client, shared with its buckets, streams and writers.

    Attributes:
        router: the endpoints.
        connect_timeout, request_timeout, retry_seconds: as ``AsyncClient`` takes them.
        open: of each stream that is open, the function that closes it.
        closed: whether the client was closed.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        credentials: grpc.ChannelCredentials | None,
        token: Token | None,
        channel: Channel | None,
        connect_timeout: float,
        request_timeout: float,
        retry_seconds: float | None,
    ) -> None:
        self.router = Router(endpoints, credentials, token, channel, self.check_usable)
        self.connect_timeout = connect_timeout
        self.request_timeout = request_timeout
        self.retry_seconds = retry_seconds
        self.open: list[Callable[[], Any]] = []
        self.closed = False
        self._process = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether this is another process than the one that made it: a forked one."""
        return self._process != os.getpid()

    def check_usable(self) -> None:
        """Raise ClosedError when nothing can be asked any more."""
        if self.closed:
            raise ClosedError("the client was closed", hint="open a new one")
        self.check_process()

    def check_process(self) -> None:
        """Raise ClosedError in a process that was forked off."""
        if self.is_foreign:
            raise ClosedError(
                "the client was made in another process", hint="open a new one after the fork"
            )

    def stubs(self, any_server: bool = False) -> Stubs:
        """Return the services of the current endpoint, or of the one that is read from where any server may be."""
        self.check_usable()
        return self.router.stubs(any_server)

    async def ask(
        self, method: Callable[..., Any], request: Any, seconds: float | None = None
    ) -> Any:
        """Make a unary call and return the answer; None for the client's ``request_timeout``.

        Raises:
            UprError: it failed, was refused, or took longer.
        """
        try:
            return await unary(
                method, request, self.request_timeout if seconds is None else seconds
            )
        except grpc.RpcError as error:
            raise call_error(error) from error

    def failed(self, error: UprError, stubs: Stubs | None = None) -> bool:
        """Record the loss of a stream, and move to another endpoint if that may do better.

        Args:
            stubs: what the stream was opened with, so that many streams lost at once move the client once.

        Returns:
            Whether the error named the server that is the current one now: it can be asked at once.
        """
        if stubs is None:
            return self.router.failed(error, self.router.current())
        return self.router.failed(error, stubs.endpoint, stubs.any_server)

    async def give_up(self, stubs: Stubs) -> None:
        """The connection behind these stubs is dead though nothing says so: the next call makes another one."""
        channel = self.router.give_up(stubs)
        if channel is not None:
            await channel.close()


class BucketHandle:
    """A bucket as its streams and writers know it.

    Attributes:
        connection: to its server.
        name: the bucket's.
        version: its random id, 0 until the server answered something.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.version = 0

    async def ask(
        self, method: Callable[..., Any], request: Any, seconds: float | None = None
    ) -> Any:
        """As ``Connection.ask``, of a method whose answer tells the bucket's version."""
        answer = await self.connection.ask(method, request, seconds)
        self.version = answer.bucket_version
        return answer


class Call:
    """A bidirectional call.

    The reader runs beside the application and hands over each message, then, exactly once, the end. With grpc.aio
    a write that meets the end of the call loses messages already received; so ``half_close`` is the last thing
    that is ever sent, and everything after it is dropped.

    Args:
        method: the stub's method.
        name: of the reader's task or thread.
        on_message: takes each message, on the reader; must not block.
        on_end: takes the error the call ended with, None for a good end.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        name: str,
        on_message: Callable[[Any], None],
        on_end: Callable[[UprError | None], None],
    ) -> None:
        self._method = method
        self._on_message = on_message
        self._on_end = on_end
        self._requests: RequestQueue[Any] = RequestQueue()
        self._ended = Event()
        self._call = method(self._requests)
        self._reader = Background(self._read, name)

    def send(self, request: Any) -> None:
        """Queue a request; dropped after ``half_close`` or the end."""
        self._requests.put(request)

    def half_close(self) -> None:
        """Send nothing more."""
        self._requests.close()

    async def finish(self, seconds: float) -> None:
        """Half-close and wait for the server's end of the call, at most so long; then cancel."""
        self._requests.close()
        try:
            await self._ended.wait(seconds)
        finally:
            # Does nothing after the end.
            self._call.cancel()
        await self._reader.join()

    async def cancel(self) -> None:
        """End the call at once and wait for the reader's end."""
        self._call.cancel()
        self._requests.close()
        await self._reader.join()

    async def _read(self) -> None:
        error: UprError | None = None
        try:
            async for message in self._call:
                self._on_message(message)
        except grpc.RpcError as failure:
            error = call_error(failure)
        except Cancelled:
            error = UprError("the call was cancelled", reason="CANCELLED", retriable=True)
        except Exception as failure:
            # Nothing reads after this; a bug or a message that cannot be read must not look like silence.
            error = UprError(f"reading the call failed: {failure!r}")
            self._call.cancel()
        finally:
            self._requests.close()
            self._ended.set()
            self._on_end(error)


class _End(NamedTuple):
    error: UprError | None


_WAKE = object()


class Follow:
    """One Follow call.

    What the reader gets is bounded by the credit: frames wait until they are taken, and only then is their credit
    given back; of heartbeats only the newest numbers are kept.

    Args:
        method: the stub's Follow.
        request: the Open.
    """

    def __init__(self, method: Callable[..., Any], request: stream_pb2.Open) -> None:
        self._inbox: Queue[Any] = Queue()
        self._told: deque[stream_pb2.FollowResponse] = deque()
        self._state = CallState(request, now())
        self._call = Call(method, "upr-follow", self._on_message, self._on_end)
        self._call.send(stream_pb2.FollowRequest(open=request))

    def _on_message(self, message: stream_pb2.FollowResponse) -> None:
        arrived = self._state.arrived(message, now())
        if arrived.answer is not None:
            self._call.send(arrived.answer)
        if arrived.half_close:
            self._call.half_close()
        if is_of_group(message):
            # Ahead of the frames that wait: a lease must not end because the application is slow.
            self._told.append(message)
            self._inbox.put(_WAKE)
        elif arrived.keep:
            self._inbox.put(message)

    def _on_end(self, error: UprError | None) -> None:
        self._inbox.put(_End(error))

    async def opened(self, seconds: float, leaving: Callable[[], bool]) -> stream_pb2.Opened:
        """Wait for the server's terms.

        Raises:
            UprError: the call was refused, nothing came in ``seconds``, or ``leaving`` became true.
        """
        message: Any = _WAKE
        while message is _WAKE:
            if leaving():
                raise UnavailableError("nobody waits for the call any more")
            message = await self._inbox.get(seconds)
        if message is None:
            raise UnavailableError(
                f"the server did not accept the call within {seconds:g} s", hint="is it overloaded?"
            )
        message = self._unless_end(message)
        if message.WhichOneof("message") == "ended":
            # Refused with a reason, as a later Ended of the call.
            await self._call.finish(seconds)
        return self._state.accepted(message, now())

    @staticmethod
    def _unless_end(message: Any) -> Any:
        if not isinstance(message, _End):
            return message
        raise message.error or UnavailableError("the server ended the call without a reason")

    def send(self, request: stream_pb2.FollowRequest) -> None:
        """Queue a request; dropped once the server ended the call."""
        self._call.send(request)

    async def next(self, seconds: float | None) -> stream_pb2.FollowResponse | None:
        """Return the next message, None when none came in ``seconds``, or after ``wake``.

        Raises:
            UprError: the call ended, or the server was silent for three heartbeat intervals.
        """
        told = self.told()
        if told is not None:
            return told
        waited = seconds is None or seconds >= MOMENT_SECONDS
        longest = self._state.patience(now())
        message = await self._inbox.get(longest if seconds is None else min(seconds, longest))
        if message is _WAKE:
            return self.told()
        if message is None:
            if waited:
                self._state.check_heard(now())
            return None
        given: stream_pb2.FollowResponse = self._unless_end(message)
        return given

    def consumed(self, message: stream_pb2.FollowResponse) -> None:
        """Give back the credit of a message that is not kept."""
        credit = self._state.taken(message)
        if credit is not None:
            self._call.send(credit)

    def told(self) -> stream_pb2.FollowResponse | None:
        """Return the next message about a member's share, None without one; does not wait."""
        return self._told.popleft() if self._told else None

    def wake(self) -> None:
        """Have ``next`` return soon; from any thread."""
        self._inbox.put(_WAKE)

    def highs(self) -> npt.NDArray[np.uint64]:
        """Return the high seqnos of the heartbeats, of all 1024 partitions; 0 for none."""
        return self._state.highs

    async def finish(self, seconds: float) -> None:
        """Half-close and wait for the server's end of the call, at most so long."""
        await self._call.finish(seconds)

    async def cancel(self) -> None:
        """End the call at once."""
        await self._call.cancel()
