"""Several endpoints behind one client: which is used now, over which channel, and when another one is tried."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from upr_client._async.adapter import (
    Cancelled,
    Channel,
    cancelled_from_outside,
    mutex,
    now,
    open_channel,
)
from upr_client.endpoints import Token, authorization, moves_on, was_never_sent
from upr_client.messages import call_error
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.wire.channel import CLIENT_OPTIONS
from upr_protocol.wire.v1.admin_service_pb2_grpc import AdminServiceStub
from upr_protocol.wire.v1.change_stream_service_pb2_grpc import ChangeStreamServiceStub
from upr_protocol.wire.v1.key_value_service_pb2_grpc import KeyValueServiceStub

_logger = logging.getLogger("upr_client")

_STREAMS = frozenset({"Follow", "Write"})
_LEAST_SECONDS = 0.001


class Stubs(NamedTuple):
    """The services of one endpoint; their unary calls go to whichever endpoint is the current one then."""

    streams: Any
    keys: Any
    admin: Any
    endpoint: int
    """Its index."""
    connection: int
    """Which of the channels that were opened to it one after the other."""


class Router:
    """The endpoints of a client, one of which is the current one.

    Args:
        endpoints: at least one.
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
        self._raw: dict[int, tuple[Any, Any, Any]] = {}
        self._opened: dict[int, int] = {}
        self._current = 0
        self._mutex = mutex()

    @property
    def current(self) -> int:
        """The index of the current endpoint."""
        return self._current

    def stubs(self) -> Stubs:
        """Return the services of the current endpoint."""
        index = self._current
        self.raw(index)
        streams, keys, admin = (_Service(self, index, number) for number in range(3))
        return Stubs(streams, keys, admin, index, self._opened.get(index, 0))

    def raw(self, index: int) -> tuple[Any, Any, Any]:
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
                )
            return stubs

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Return what goes with every call."""
        return None if self._token is None else authorization(self._token)

    def failed(self, error: UprError, index: int) -> None:
        """Go on to the next endpoint if this one is the current one, and the error says that another may do better."""
        with self._mutex:
            if len(self.endpoints) == 1 or index != self._current or not moves_on(error):
                return
            self._current = (index + 1) % len(self.endpoints)
            following = self.endpoints[self._current]
        _logger.info(
            "%s: %s (%s); going on to %s", self.endpoints[index], error.reason, error, following
        )

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

    def __init__(self, router: Router, index: int, number: int) -> None:
        self._router = router
        self._index = index
        self._number = number

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        router, number = self._router, self._number
        if name in _STREAMS:
            method = getattr(router.raw(self._index)[number], name)
            return lambda requests: method(requests, metadata=router.metadata())

        # The arguments are those of gRPC's own methods.
        async def unary(request: Any, **options: Any) -> Any:
            return await _unary(router, number, name, request, options["timeout"])

        return unary


async def _unary(router: Router, number: int, name: str, request: Any, seconds: float) -> Any:
    """Make a unary call, within so many seconds altogether.

    One that cannot have reached a server is made at each of the other endpoints, once.
    """
    deadline = now() + seconds
    tried = set[int]()
    while True:
        index = router.current
        tried.add(index)
        method = getattr(router.raw(index)[number], name)
        left = max(deadline - now(), _LEAST_SECONDS)
        try:
            return await method(request, timeout=left, metadata=router.metadata())
        except Cancelled:
            # Closing a channel of grpc.aio cancels its calls, as if somebody had cancelled the task.
            if cancelled_from_outside():
                raise
            router.check()
            raise UnavailableError(
                "the connection was given up while the call was under way"
            ) from None
        except grpc.RpcError as error:
            # Closed by another task or thread meanwhile: that is the reason then.
            router.check()
            router.failed(call_error(error), index)
            if router.current in tried or not was_never_sent(error):
                raise
