"""Calls: a client's connection and its endpoints, one bidirectional call with a reader in the background, the Follow call.

Buckets, streams and writers know the connection, and not the client that made it.
"""

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

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
    Semaphore,
    cancelled_from_outside,
    has_ended,
    mutex,
    now,
    open_channel,
)
from upr_client.changes.groups import is_of_group
from upr_client.changes.link import MOMENT_SECONDS, CallState
from upr_client.endpoints import (
    SILENT_REASON,
    Token,
    authorization,
    call_error,
    is_elsewhere,
    was_not_done,
)
from upr_client.server_choice import Route, Servers
from upr_protocol.errors import (
    BehindError,
    BucketGoneError,
    ClosedError,
    InvalidArgumentError,
    UnavailableError,
    UprError,
)
from upr_protocol.limits import CLIENT_GETS, FRAME_BYTES
from upr_protocol.wire.frames import FrameResponse, follower_stub, may_join, one_frame
from upr_protocol.wire.grpc import CLIENT_OPTIONS
from upr_protocol.wire.v1 import admin_service_pb2 as admin_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import types_pb2
from upr_protocol.wire.v1.admin_service_pb2_grpc import AdminServiceStub
from upr_protocol.wire.v1.key_value_service_pb2_grpc import KeyValueServiceStub
from upr_protocol.wire.v1.replica_service_pb2_grpc import ReplicaServiceStub

_logger = logging.getLogger("upr_client")

_STUBS = (follower_stub, KeyValueServiceStub, AdminServiceStub, ReplicaServiceStub)
KEYS = 1
"""Place of the stub for keys in ``_STUBS``."""
_STREAMS = frozenset({"Follow", "Write"})
_LEAST_SECONDS = 0.001
_ACTIVE = types_pb2.PARTITION_STATE_ACTIVE
_THERE_SECONDS = 0.5
"""Longest wait for a server that is only asked whether it is there and active."""


class Stubs(NamedTuple):
    """The services of one endpoint; their unary calls go to whichever endpoint their route has then."""

    connection: "Connection"
    endpoint: str
    route: Route
    held: Any
    """What ``Connection.raw`` returned: it keeps the channel open, also when the endpoint is forgotten meanwhile."""

    @property
    def streams(self) -> Any:
        return _Service(self, 0)

    @property
    def keys(self) -> Any:
        return _Service(self, KEYS)

    @property
    def admin(self) -> Any:
        return _Service(self, 2)

    @property
    def sets(self) -> Any:
        return _Service(self, 3)


class Connection:
    """Connection of a client, shared with its buckets, streams and writers: endpoints, their channels, and routes of calls.

    Args:
        endpoints: at least one, to begin with; servers name others.
        credentials: for TLS; None for plain channels.
        token: sent with every call; None for none.
        channel: the channel to use instead, of the caller's; it is not closed here.

    Attributes:
        connect_timeout, request_timeout, retry_seconds: as ``AsyncClient`` takes them.
        active: the route of calls to the active server.
        anywhere: the route of unary calls that any server may answer.
        first: the route of calls about one server, which go to the first endpoint given and to no other.
        open: of each stream that is open, the function that closes it.
        writing: by each bucket object that has written, or has a writer, the function that closes it.
        has_ended: whether the event loop is closed that its channels belong to; nothing is made of another one.
        gets, waiting_gets: places of open Gets, and of those that wait for writes: the server refuses too many.
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
        self.connect_timeout = connect_timeout
        self.request_timeout = request_timeout
        self.retry_seconds = retry_seconds
        # A token, and a channel, are for those that they were given for.
        self._servers = Servers(endpoints, only_given=bool(token or channel))
        self.active, self.anywhere = Route(self._servers), Route(self._servers)
        self.first = Route(Servers(endpoints[:1], only_given=True))
        self.open: list[Callable[[float], Any]] = []
        self.writing: dict[object, Callable[[float], Any]] = {}
        self.closed = False
        self.gets = Semaphore(CLIENT_GETS)
        self.waiting_gets = Semaphore(CLIENT_GETS)
        self._credentials = credentials
        self._token = token
        self._shown: tuple[tuple[str, str], ...] | None = None
        self._given = channel
        self._channels: dict[str, Channel] = {}
        self._raw: dict[str, tuple[Any, ...]] = {}
        self._mutex = mutex()
        self._process = os.getpid()
        self.has_ended: Callable[[], bool] = lambda: False

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
        if self.is_foreign:
            raise ClosedError(
                "the client was made in another process", hint="open a new one after the fork"
            )
        if self.has_ended():
            raise ClosedError(
                "the client belongs to an event loop that is closed",
                hint="open a client in each asyncio.run",
            )

    async def close(self) -> None:
        """Nothing can be asked any more; the channels that were made here are closed."""
        self.closed = True
        if self.is_foreign or self.has_ended():
            # They are the other process's, and a thread that is not there may hold the mutex; or ended with the loop.
            return
        with self._mutex:
            channels = list(self._channels.values())
            self._channels.clear()
            self._raw.clear()
        for channel in channels:
            await channel.close()

    # Endpoints.

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints, in the order in which they are tried."""
        return self._servers.all

    def follower(self, any_server: bool) -> Route:
        """Return the route of a follower; one of any server has its own, because others may not be behind for others."""
        return Route(self._servers, self.anywhere.current) if any_server else self.active

    def stubs(self, route: Route | None = None) -> Stubs:
        """Return the services of the current endpoint of a route; None for that of calls to the active server."""
        route = route or self.active
        endpoint = route.current
        return Stubs(self, endpoint, route, self.raw(endpoint))

    def raw(self, endpoint: str) -> tuple[Any, ...]:
        """Return functions that return gRPC's own stubs of an endpoint, and its channel; all are made when first needed."""
        # Before the mutex: in a forked process a thread that is not there may hold it.
        self.check_process()
        known = self._raw.get(endpoint)
        if known is not None:
            return known
        with self._mutex:
            self.check_usable()
            stubs = self._raw.get(endpoint)
            if stubs is None:
                self.has_ended = has_ended()
                channel = self._given
                if channel is None:
                    channel = open_channel(endpoint, CLIENT_OPTIONS, self._credentials)
                    self._channels[endpoint] = channel
                made = (cache(partial(stub, channel)) for stub in _STUBS)
                stubs = self._raw[endpoint] = (*made, channel)
            return stubs

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Return what carries the token; while its file cannot be used, as when it is just replaced, the one before."""
        if self._token is None:
            return None
        try:
            self._shown = authorization(self._token)
        except InvalidArgumentError:
            if self._shown is None or not isinstance(self._token, Path):
                raise
        return self._shown

    def learn(self, servers: Iterable[str]) -> None:
        """Remember further servers of the set; see ``Servers.learn``."""
        fresh = [one for one in servers if one not in self._servers.all]
        if not fresh:
            return
        with self._mutex:
            before = self._servers.all
            self._servers.learn(fresh)
            if self._servers.all is before:
                return
            # Their channels end with the calls that are under way: each of those holds its own.
            for gone in self._channels.keys() - set(self._servers.all):
                del self._channels[gone], self._raw[gone]

    def worked(self, route: Route, endpoint: str) -> None:
        with self._mutex:
            route.worked(endpoint)

    def failed(self, error: UprError, route: Route, endpoint: str) -> float | None:
        """Go on to another endpoint if that may do better; see ``Route.failed``."""
        self.learn([error.owner])
        with self._mutex:
            pause = route.failed(error, endpoint)
            to = route.current
        if to != endpoint:
            _logger.info("%s: %s (%s); going on to %s", endpoint, error.reason, error, to)
        return pause

    def another(self, route: Route, tried: Collection[str], named: str) -> str | None:
        with self._mutex:
            return route.another(tried, named)

    async def ask(
        self, method: Callable[..., Any], request: Any, seconds: float | None = None
    ) -> Any:
        """Make a unary call and return the answer; None for the client's ``request_timeout``.

        Raises:
            UprError: it failed, was refused, or took longer.
        """
        try:
            timeout = self.request_timeout if seconds is None else seconds
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise call_error(error) from error

    async def unary(
        self, route: Route, number: int, name: str, request: Any, **options: Any
    ) -> Any:
        """Make a unary call; the options are those of gRPC's own methods, and ``each``.

        One that cannot have reached a server, or was refused by one that is not the active one, or behind, is made at each of
        the other endpoints, once. If none of them does it, a refusal is what is raised: that server is there.

        Args:
            number: of the method's stub, in ``_STUBS``.
            timeout: seconds of the call altogether.
            each: seconds of one server, of a call that may be made twice: one that says nothing for so long is left.
        """
        deadline, each = now() + options["timeout"], options.get("each")
        endpoint: str | None = route.current
        tried: set[str] = set()
        refusal: grpc.RpcError | None = None
        while endpoint is not None:
            tried.add(endpoint)
            # With the channel, for as long as the call.
            stubs = self.raw(endpoint)
            left = max(deadline - now(), _LEAST_SECONDS)
            share = left if each is None else min(left, each)
            try:
                answer = await getattr(stubs[number](), name)(
                    request, timeout=share, metadata=self.metadata()
                )
            except Cancelled:
                # Closing a channel of grpc.aio cancels its calls, which looks like a cancelled task.
                if cancelled_from_outside():
                    raise
                self.check_usable()
                raise UnavailableError(
                    "the connection was given up while the call was under way"
                ) from None
            except grpc.RpcError as error:
                # Closed by another task or thread meanwhile: that is the reason then.
                self.check_usable()
                failure, failed = call_error(error), error
            else:
                self.worked(route, endpoint)
                return answer
            if failure.reason != BehindError.default_reason:
                # One that is behind for this call is not for others.
                self.failed(failure, route, endpoint)
            refusal = failed if is_elsewhere(failure) else refusal
            lost = each is not None and failure.reason == UnavailableError.default_reason
            if not (lost or was_not_done(failed)):
                raise failed
            endpoint = self.another(route, tried, failure.owner) if now() < deadline else None
        raise refusal or failed

    def lost(self, error: UprError, stubs: Stubs, worked: bool) -> float | None:
        """Record the loss of a stream, and move to another endpoint if that may do better.

        Args:
            stubs: what the stream was opened with, so that many streams lost at once move the client once.
            worked: whether the stream did what it was for, before.

        Returns:
            The longest pause before the next one, seconds; None for one that grows with the attempts.
        """
        if worked:
            self.worked(stubs.route, stubs.endpoint)
        return self.failed(error, stubs.route, stubs.endpoint)

    async def elsewhere(self, stubs: Stubs, bucket: str) -> UprError | None:
        """Look whether another server is active by now, where one owes an answer: it may stand still, and keep its connections.

        Returns:
            The reason to go on at that one, which it names. None while this server says anything at all, so that a slow
            one is not left, and while no other says that it is active.
        """
        endpoints = dict.fromkeys((stubs.endpoint, *self.endpoints))
        for endpoint in endpoints if len(endpoints) > 1 else ():
            error, is_active = None, False
            try:
                told = await self._ask_there(endpoint, bucket, _THERE_SECONDS)
                is_active = any(one.state == _ACTIVE for one in told.partitions)
            except UprError as failure:
                error = failure
            if endpoint == stubs.endpoint:
                if error is None or error.reason != UnavailableError.default_reason:
                    return None
            elif is_active:
                await self.give_up(stubs)
                words = f"{stubs.endpoint} says nothing, and {endpoint} is active"
                return UnavailableError(words, reason=SILENT_REASON, owner=endpoint)
        return None

    async def silent(self, stubs: Stubs, bucket: str, seconds: float = math.inf) -> UprError | None:
        """Ask a server for anything at all; if it says nothing within so long, ``connect_timeout`` at most, give it up and
        return an error.

        At first over the connection that there is, then over one of its own: behind a large message on a slow link nothing
        else gets through.
        """
        longest = min(seconds, self.connect_timeout)
        first = min(longest / 2, _THERE_SECONDS)
        for ask, part in ((self._ask_there, first), (self._ask_anew, longest - first)):
            try:
                await ask(stubs.endpoint, bucket, part)
            except UprError as error:
                if error.reason == UnavailableError.default_reason:
                    continue
            return None
        await self.give_up(stubs)
        return UnavailableError(f"{stubs.endpoint} says nothing", reason=SILENT_REASON)

    async def _ask_there(self, endpoint: str, bucket: str, seconds: float) -> Any:
        """Ask one server for the state of a partition, which any server tells."""
        one = self.stubs(Route(Servers((endpoint,), only_given=True)))
        return await self.ask(one.admin.GetPartitions, _any_state(bucket), seconds)

    async def _ask_anew(self, endpoint: str, bucket: str, seconds: float) -> Any:
        """As ``_ask_there``, over a new connection; a channel that was given is as it is."""
        if self._given is not None:
            return await self._ask_there(endpoint, bucket, seconds)
        options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        channel = open_channel(endpoint, options, self._credentials)
        method = partial(AdminServiceStub(channel).GetPartitions, metadata=self.metadata())
        try:
            return await self.ask(method, _any_state(bucket), seconds)
        finally:
            await channel.close()

    async def give_up(self, stubs: Stubs) -> None:
        """The connection behind these stubs is dead though nothing says so: the next call makes another one.

        Nothing is done when it was given up already, or is the caller's.
        """
        with self._mutex:
            if self._raw.get(stubs.endpoint) is not stubs.held:
                return
            del self._raw[stubs.endpoint]
            channel = self._channels.pop(stubs.endpoint, None)
        if channel is not None:
            await channel.close()


class _Service:
    """Stands for a stub. A stream belongs to the endpoint it was asked for; a unary call to the one its route has then."""

    def __init__(self, stubs: Stubs, number: int) -> None:
        self._connection = stubs.connection
        self._endpoint = stubs.endpoint
        self._number = number
        self._route = stubs.route

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _STREAMS:
            connection = self._connection
            method = getattr(connection.raw(self._endpoint)[self._number](), name)
            return lambda requests: method(requests, metadata=connection.metadata())
        return partial(self._connection.unary, self._route, self._number, name)


def _any_state(bucket: str) -> admin_pb2.GetPartitionsRequest:
    return admin_pb2.GetPartitionsRequest(bucket=bucket, partitions=[0])


_GONE_HINT: Final = "ask the client for the bucket again, to use the new one"


def of_object(error: UprError) -> UprError:
    """Return the error with the hint for whoever uses a bucket object; that of the server is for followers."""
    if isinstance(error, BucketGoneError):
        error.hint = _GONE_HINT
    return error


class BucketHandle:
    """A bucket as its streams and writers know it; ``version`` is its random id, 0 until the server answered something."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.version = 0

    async def ask(
        self, method: Callable[..., Any], request: Any, seconds: float | None = None
    ) -> Any:
        """As ``Connection.ask``, of a method whose answer tells the bucket's version."""
        try:
            answer = await self.connection.ask(method, request, seconds)
        except BucketGoneError as error:
            # Of a Get with a token it may be the token that is wrong, and the server says so.
            if not getattr(request, "at_least", False):
                of_object(error)
            raise
        if self.version not in (0, answer.bucket_version):
            raise self.gone()
        self.version = answer.bucket_version
        return answer

    def gone(self) -> BucketGoneError:
        """Return the error of a server that answers of another bucket than the one that was used first."""
        return BucketGoneError(
            f"bucket {self.name} was dropped and created again since it was used first",
            hint=_GONE_HINT,
        )


class Call:
    """A bidirectional call.

    The reader runs beside the application and hands over each message, then, exactly once, the end. With grpc.aio
    a write that meets the end of the call loses messages already received; so ``half_close`` is the last thing
    that is ever sent, and everything after it is dropped.

    Args:
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
        self._on_message = on_message
        self._on_end = on_end
        self._requests: RequestQueue[Any] = RequestQueue()
        self.send: Callable[[Any], None] = self._requests.put
        """Queue a request; dropped after ``half_close`` or the end."""
        self._ended = Event()
        self._call = self._requests.begin(method)
        self._reader = Background(self._read, name)

    def half_close(self) -> None:
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
        await self._requests.join()


_WAKE = object()


class Follow:
    """One Follow call.

    What the reader gets is bounded by the credit: frames wait until they are taken, and only then is their credit
    given back; of heartbeats only the newest numbers are kept.

    Args:
        on_share: takes each message about a member's share, on the reader; must not block.

    Attributes:
        waits: whether ``next`` waits for a message; so also after an exception that it did not raise itself.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        request: stream_pb2.Open,
        on_share: Callable[[stream_pb2.FollowResponse], None],
    ) -> None:
        self._on_share = on_share
        self._inbox: Queue[Any] = Queue()
        self._told: deque[stream_pb2.FollowResponse] = deque()
        self.waits = False
        self._state = CallState(request, now())
        self._call = Call(method, "upr-follow", self._on_message, self._on_end)
        self._call.send(stream_pb2.FollowRequest(open=request))
        self.send = self._call.send
        self.finish = self._call.finish
        self.cancel = self._call.cancel

    def answered(self) -> bool:
        """As ``CallState.answered``."""
        return self._state.answered(now())

    @property
    def interval(self) -> float:
        """The heartbeat interval, seconds."""
        return self._state.interval

    def _on_message(self, message: stream_pb2.FollowResponse) -> None:
        arrived = self._state.arrived(message, now())
        if arrived.answer is not None:
            self._call.send(arrived.answer)
        if arrived.half_close:
            self._call.half_close()
        if is_of_group(message):
            # Ahead of the frames that wait: a lease must not end because the application is slow.
            self._on_share(message)
            self._told.append(message)
            self._inbox.put(_WAKE)
        elif arrived.keep:
            self._inbox.put(message)

    def _on_end(self, error: UprError | None) -> None:
        self._inbox.put(error or UnavailableError("the server ended the call without a reason"))

    async def opened(self, seconds: float, leaving: Callable[[], bool]) -> stream_pb2.Opened | None:
        """Wait for the server's terms; None when nothing came in ``seconds``.

        Raises:
            UprError: the call was refused, or ``leaving`` became true.
        """
        message: Any = _WAKE
        while message is _WAKE:
            if leaving():
                raise UnavailableError("nobody waits for the call any more")
            message = await self._inbox.get(seconds)
        if message is None:
            return None
        message = self._unless_end(message)
        if message.WhichOneof("message") == "ended":
            # Refused with a reason, as a later Ended of the call.
            await self._call.finish(seconds)
        return self._state.accepted(message, now())

    @staticmethod
    def _unless_end(message: Any) -> Any:
        if isinstance(message, UprError):
            raise message
        return message

    async def next(self, seconds: float | None) -> stream_pb2.FollowResponse | None:
        """Return the next message, None when none came in ``seconds``, or after ``wake``.

        Raises:
            UprError: the call ended, or the server was silent for three heartbeat intervals.
        """
        told = self.told()
        if told is not None:
            return told
        waited = seconds is None or seconds >= MOMENT_SECONDS
        began = now()
        longest = self._state.patience(began)
        seconds = longest if seconds is None else min(seconds, longest)
        self.waits = True
        message = await self._inbox.get(seconds)
        self.waits = False
        if isinstance(message, FrameResponse):
            message = self._with_more(message)
        if message is _WAKE:
            return self.told()
        if message is None:
            if waited:
                self._state.check_heard(now(), began + seconds)
            return None
        given: stream_pb2.FollowResponse = self._unless_end(message)
        return given

    def _with_more(self, message: FrameResponse) -> Any:
        """Return a frame and those right behind it as one, up to FRAME_BYTES: who is slow gets much at a time."""
        room = FRAME_BYTES - message.size
        behind: Any = self._inbox.peek() if room > 0 else None
        if not may_join(behind, room) or not may_join(message, FRAME_BYTES):
            return message
        frames = [message]
        while may_join(behind, room):
            frames.append(self._inbox.take())
            room -= behind.size
            behind = self._inbox.peek()
        return one_frame(frames)

    @property
    def is_late(self) -> bool:
        return self._state.is_late(now())

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
        """As ``CallState.highs``."""
        return self._state.highs
