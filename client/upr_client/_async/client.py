"""The connection to one server."""

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from upr_client._async import admin, buckets
from upr_client._async.adapter import Channel, mutex, open_channel
from upr_client._async.bucket import AsyncBucket
from upr_client.bucket_info import BucketInfo
from upr_client.server_info import ServerStatus
from upr_protocol.errors import ClosedError, InvalidArgumentError
from upr_protocol.wire.channel import CLIENT_OPTIONS
from upr_protocol.wire.v1.admin_service_pb2_grpc import AdminServiceStub
from upr_protocol.wire.v1.change_stream_service_pb2_grpc import ChangeStreamServiceStub
from upr_protocol.wire.v1.key_value_service_pb2_grpc import KeyValueServiceStub

if TYPE_CHECKING:
    from upr_client._async.changes import AsyncChanges


class Stubs(NamedTuple):
    """The services of one channel."""

    streams: Any
    keys: Any
    admin: Any


class AsyncClient:
    """A client of one server, over one gRPC channel; used with ``async with``.

    Connecting happens by itself when something is asked. One client serves any number of buckets and streams. It
    belongs to the process and, in the asyncio flavour, to the event loop that made it.

    Args:
        target: the server's address, "host:port".
        connect_timeout: seconds that the server may take to accept a stream.
        request_timeout: seconds that a unary call may take.
        retry_seconds: how long writes are tried again without any progress; None for ever.
        channel: a gRPC channel of your own (TLS, say) instead of ``target``; it is not closed with the client.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    def __init__(
        self,
        target: str,
        *,
        connect_timeout: float = 10.0,
        request_timeout: float = 10.0,
        retry_seconds: float | None = 60.0,
        channel: Channel | None = None,
    ) -> None:
        for name, value in (
            ("connect_timeout", connect_timeout),
            ("request_timeout", request_timeout),
        ):
            if not value > 0:
                raise InvalidArgumentError(f"{name} is {value}, it must be above 0")
        self.target = target
        self.connect_timeout = connect_timeout
        self.request_timeout = request_timeout
        self.retry_seconds = retry_seconds
        self._given_channel = channel
        self._channel: Channel | None = None
        self._made_stubs: Stubs | None = None
        self._buckets: list[AsyncBucket] = []
        self._changes: list[AsyncChanges] = []
        self._process = os.getpid()
        self._mutex = mutex()
        self._closed = False

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

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the client was closed", hint="open a new one")
        if self._process != os.getpid():
            raise ClosedError(
                "the client was made in another process", hint="open a new one after the fork"
            )

    def _stubs(self) -> Stubs:
        self._check_usable()
        with self._mutex:
            if self._made_stubs is None:
                channel = self._given_channel
                if channel is None:
                    channel = self._channel = open_channel(self.target, CLIENT_OPTIONS)
                self._made_stubs = Stubs(
                    ChangeStreamServiceStub(channel),
                    KeyValueServiceStub(channel),
                    AdminServiceStub(channel),
                )
            return self._made_stubs

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
        try:
            for changes in list(self._changes):
                await changes.close()
            for bucket in self._buckets:
                await bucket._close(self.request_timeout)
        finally:
            self._closed = True
            channel, self._channel, self._made_stubs = self._channel, None, None
            if channel is not None:
                await channel.close()
