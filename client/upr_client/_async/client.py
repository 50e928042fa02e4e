"""The connection to a server, or to one of several."""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from upr_client._async import admin, buckets
from upr_client._async.adapter import Channel
from upr_client._async.bucket import AsyncBucket
from upr_client._async.routing import Router, Stubs
from upr_client.bucket_info import BucketInfo
from upr_client.endpoints import Token, check_token, credentials_of, endpoints_of
from upr_client.server_info import ServerStatus
from upr_protocol.errors import ClosedError, InvalidArgumentError, UprError

if TYPE_CHECKING:
    from upr_client._async.changes import AsyncChanges


class AsyncClient:
    """A client of one server at a time, over one gRPC channel to each; used with ``async with``.

    Connecting happens by itself when something is asked. One client serves any number of buckets and streams. It
    belongs to the process and, in the asyncio flavour, to the event loop that made it.

    With several endpoints the first one is used until a call finds that it cannot be reached, loses its connection,
    or is told that the server is stopping; then the next one, and after the last the first again. A unary call that
    cannot have reached its server is made once at each of the others; any other is not made again.

    Args:
        target: the server's address, "host:port"; several with commas in between, or as a sequence.
        connect_timeout: seconds that the server may take to accept a stream.
        request_timeout: seconds that a unary call may take.
        retry_seconds: how long writes are tried again without any progress; None for ever.
        tls: None for no encryption; True for TLS with gRPC's root certificates; or credentials, as
            ``grpc.ssl_channel_credentials`` makes them.
        token: sent with every call as ``authorization: Bearer TOKEN``; or a function that returns the one to send
            now, which must not block. Without TLS only to loopback addresses and Unix sockets.
        channel: a gRPC channel of your own instead of one to ``target``; it is not closed with the client. It brings
            its own credentials: ``tls`` and ``token`` cannot be given then.

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
        tls: bool | grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        channel: Channel | None = None,
    ) -> None:
        for name, value in (
            ("connect_timeout", connect_timeout),
            ("request_timeout", request_timeout),
        ):
            if not value > 0:
                raise InvalidArgumentError(f"{name} is {value}, it must be above 0")
        # The target of a channel that was given is only a name to show.
        named = isinstance(target, str) and channel is not None
        endpoints = (str(target),) if named else endpoints_of(target)
        credentials = credentials_of(tls)
        if channel is not None and (len(endpoints) > 1 or tls is not None or token is not None):
            raise InvalidArgumentError(
                "a channel was given, and tls, token or several endpoints besides",
                hint="a channel has one target and its own credentials",
            )
        check_token(token, endpoints, credentials is not None)
        self._router = Router(endpoints, credentials, token, channel, self._check_usable)
        self.connect_timeout = connect_timeout
        self.request_timeout = request_timeout
        self.retry_seconds = retry_seconds
        self._buckets: list[AsyncBucket] = []
        self._changes: list[AsyncChanges] = []
        self._process = os.getpid()
        self._closed = False

    @property
    def target(self) -> str:
        """The endpoint that is used now."""
        return self._router.endpoints[self._router.current]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints, in the order in which they are tried."""
        return self._router.endpoints

    async def __aenter__(self) -> Self:
        self._check_usable()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def _is_foreign(self) -> bool:
        """Whether this is another process than the one that made it: a forked one."""
        return self._process != os.getpid()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the client was closed", hint="open a new one")
        self._check_process()

    def _check_process(self) -> None:
        if self._is_foreign:
            raise ClosedError(
                "the client was made in another process", hint="open a new one after the fork"
            )

    def _stubs(self) -> Stubs:
        self._check_usable()
        return self._router.stubs()

    def _failed(self, error: UprError, stubs: Stubs | None = None) -> None:
        """Take note that a stream was lost, and go on to the next endpoint if another may do better.

        Args:
            stubs: what the stream was opened with, so that many streams lost at once move the client once.
        """
        self._router.failed(error, self._router.current if stubs is None else stubs.endpoint)

    async def _give_up(self, stubs: Stubs) -> None:
        """The connection behind these stubs is dead though nothing says so: the next call makes another one."""
        channel = self._router.give_up(stubs)
        if channel is not None:
            await channel.close()

    def bucket(self, name: str = "default", *, producer: str | None = None) -> AsyncBucket:
        """Return a bucket; nothing is asked of the server yet.

        Keep it: each bucket object writes over a call of its own.

        Args:
            name: 1 to 200 bytes of UTF-8 without control characters.
            producer: who writes through it, as ``name``; random unless given. By it the server recognises a write
                that is sent again, so no two writers may use one at the same time.

        Raises:
            InvalidArgumentError: a name is out of its range.
            ClosedError: the client was closed.
        """
        self._check_usable()
        bucket = AsyncBucket(self, name, producer)
        self._buckets.append(bucket)
        return bucket

    async def status(self) -> ServerStatus:
        """Return what the server process is and uses.

        Raises:
            UprError: the call failed; it is not tried again.
        """
        return await admin.get_status(self._stubs().admin, self.request_timeout)

    async def buckets(self) -> list[BucketInfo]:
        """Return the server's buckets by name.

        Raises:
            UprError: the call failed; it is not tried again.
        """
        return await buckets.list_buckets(self._stubs().admin, self.request_timeout)

    async def create_bucket(self, name: str, compression: str = "") -> BucketInfo:
        """Make an empty bucket.

        Args:
            name: 1 to 200 bytes of UTF-8 without control characters.
            compression: of its stored blocks: "" for none, or "zstd".

        Raises:
            AlreadyExistsError: the name is taken.
            TooManyError: the server has as many buckets as it can have, 32.
            InvalidArgumentError: a value is out of its range.
            UprError: the call failed or was refused; it is not tried again. After a failure it may be there.
        """
        stub = self._stubs().admin
        return await buckets.create_bucket(stub, name, compression, self.request_timeout)

    async def drop_bucket(self, name: str, version: int | None = None) -> int:
        """Remove a bucket with all its data, and return its version.

        Everything that uses it ends with BUCKET_GONE. The bucket ``default`` comes back, empty and with another
        version, when the server is started the next time.

        Args:
            version: if given, a bucket of the name with another version is left alone.

        Raises:
            BucketNotFoundError: there is none of that name.
            BucketGoneError: it has another version.
            UprError: the call failed or was refused; it is not tried again. After a failure it may be gone.
        """
        stub = self._stubs().admin
        return await buckets.drop_bucket(stub, name, version, self.request_timeout)

    def _opened(self, changes: "AsyncChanges") -> None:
        self._changes.append(changes)

    def _gone(self, changes: "AsyncChanges") -> None:
        if changes in self._changes:
            self._changes.remove(changes)

    async def close(self) -> None:
        """End all streams, wait for outstanding writes at most ``request_timeout``, and disconnect.

        Doing it twice is harmless.
        """
        if self._closed:
            return
        if self._is_foreign:
            # Connections and background work belong to the process that made them.
            self._closed = True
            return
        try:
            for changes in list(self._changes):
                await changes.close()
            for bucket in self._buckets:
                await bucket._close(self.request_timeout)
        finally:
            self._closed = True
            for channel in self._router.take_channels():
                await channel.close()
