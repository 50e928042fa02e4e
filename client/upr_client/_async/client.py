"""The client: one connection to a server, or to one of several."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc

from upr_client._async.admin import AsyncAdmin
from upr_client._async.bucket import AsyncBucket
from upr_client._async.call import Connection
from upr_client._async.io import Channel, now
from upr_client.endpoints import Token, check_token, credentials_of, endpoints_of
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import check_seconds

_logger = logging.getLogger("upr_client")


class AsyncClient:
    """A client of one server at a time, over one gRPC channel to each; used with ``async with``.

    Connecting happens by itself when something is asked. One client serves any number of buckets and streams. It
    belongs to the process and, in the asyncio flavour, to the event loop that made it.

    With several endpoints the first one is used until a call finds that it cannot be reached, loses its connection,
    or is told that the server is stopping; then the next one, and after the last the first again. A server that is not
    the active one of its set names the one that is, which is used from then on; servers that were named are endpoints too,
    32 together with those given, unless there is a token or a channel. A unary call that did nothing for sure is made once
    at each of the others; any other is not made again.

    Args:
        target: the server's address, "host:port"; several with commas in between, or as a sequence.
        connect_timeout: seconds that the server may take to accept a stream.
        request_timeout: seconds that a unary call may take.
        retry_seconds: how long writes are tried again without any progress; None for ever.
        tls: None for no encryption; True for TLS with gRPC's root certificates; the path of a PEM file with those to
            trust; or credentials, as ``grpc.ssl_channel_credentials`` makes them.
        token: sent with every call as ``authorization: Bearer TOKEN``; the path of a file that has it, which is read
            with each call; or a function that returns the one to send now, which must not block. Without TLS only to loopback addresses and Unix sockets.
        channel: a gRPC channel of your own instead of one to ``target``; it is not closed with the client. It brings
            its own credentials: ``tls`` and ``token`` cannot be given then.

    Attributes:
        admin: what operators ask and order.

    Raises:
        InvalidArgumentError: a value is out of its range, or a token would be sent without encryption.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        connect_timeout: float = 10.0,
        request_timeout: float = 10.0,
        retry_seconds: float | None = 60.0,
        tls: bool | Path | grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        channel: Channel | None = None,
    ) -> None:
        check_seconds(connect_timeout, "connect_timeout", above=True)
        check_seconds(request_timeout, "request_timeout", above=True)
        if retry_seconds is not None:
            check_seconds(retry_seconds, "retry_seconds", endless=True)
        # The target of a channel that was given is only a name to show.
        named = isinstance(target, str) and channel is not None
        endpoints = (str(target),) if named else endpoints_of(target)
        credentials = credentials_of(tls)
        if channel is not None and (len(endpoints) > 1 or tls is not None or token is not None):
            raise InvalidArgumentError(
                "channel is given with tls, token or several endpoints; must be given alone",
                hint="a channel has one target and its own credentials",
            )
        check_token(token, endpoints, credentials is not None)
        self._connection = Connection(
            endpoints, credentials, token, channel, connect_timeout, request_timeout, retry_seconds
        )
        self.admin = AsyncAdmin(self._connection)

    @property
    def target(self) -> str:
        """The endpoint that is used now."""
        return self._connection.active.current

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints, in the order in which they are tried: those given, then those that servers named."""
        return self._connection.endpoints

    async def __aenter__(self) -> Self:
        self._connection.check_usable()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def bucket(self, name: str = "default", *, producer: str | None = None) -> AsyncBucket:
        """Return a bucket; nothing is asked of the server yet.

        Keep it: each bucket object writes over a call of its own, which stays until the client is closed. One that has not
        written costs nothing.

        Args:
            name: 1 to 200 bytes of UTF-8 without control characters.
            producer: who writes through it, as ``name``; random unless given. By it the server recognises a write
                that is sent again, so no two writers may use one at the same time.

        Raises:
            InvalidArgumentError: a name is out of its range.
            ClosedError: the client was closed.
        """
        self._connection.check_usable()
        return AsyncBucket(self._connection, name, producer)

    async def close(self) -> None:
        """End all streams, wait for outstanding writes, and disconnect. Doing it twice is harmless.

        Positions that are kept in the server are stored first. A server that stands still is waited for no longer than
        ``request_timeout`` by all streams together, and as long again by all writes.
        """
        connection = self._connection
        if connection.closed:
            return
        if connection.is_foreign or connection.has_ended():
            # Connections and background work belong to the process, and event loop, that made them.
            connection.closed = True
            return
        failure: Exception | None = None
        try:
            for closes in (list(connection.open), list(connection.writing.values())):
                until = now() + connection.request_timeout
                for close in closes:
                    try:
                        await close(max(until - now(), 0.0))
                    except Exception as error:
                        # The others have positions and rows of their own.
                        if failure is not None:
                            _logger.warning("%s: %s", self.target, error)
                        failure = failure or error
            if failure is not None:
                raise failure
        finally:
            await connection.close()
