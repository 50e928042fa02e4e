"""etcd: the four operations of a registry over etcd's API, version 3. No locks and no elections of etcd's are used.

Every call has a deadline, because a server of etcd that was stopped answers nothing and keeps the connection. A call that
fails is not made again here, but the next one goes to the next server. Files of TLS and of the user are read again when they
change.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from upr.cluster.registry import Entry, Found
from upr.cluster.wire import etcd_pb2 as wire
from upr.cluster.wire import etcd_pb2_grpc as stubs
from upr.replica.links import Channels, Links, next_message
from upr.service.access.files import signature
from upr.service.storage_trouble import words_of
from upr_protocol.errors import InvalidArgumentError, UnavailableError, UprError
from upr_protocol.limits import SET_MEMBERS_MAX

_T = TypeVar("_T")

CALL_SECONDS: Final = 2.0
"""Longest wait for an answer."""
RENEWALS: Final = 4
"""Number of times that a lease is kept alive within its length; each try takes no longer than that."""
AGAIN_SECONDS: Final = 0.25
"""Pause before the next server of etcd is asked to keep it alive."""
KEYS_MAX: Final = 4 * SET_MEMBERS_MAX
"""Keys that are read of a cluster."""
_EQUAL, _MOD = 0, 2
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    # In spite of its name this is how long one attempt to connect may take: as long as a call waits for it.
    ("grpc.min_reconnect_backoff_ms", int(CALL_SECONDS * 1000)),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def end_of(prefix: bytes) -> bytes:
    """Return the first key behind all keys with a prefix, which must not end in the largest byte."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def read_user(path: Path) -> tuple[str, str]:
    """Return name and password of the file of a user.

    Raises:
        InvalidArgumentError: it has no NAME:PASSWORD.
        OSError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    name, colon, password = text.strip().partition(":")
    if not (name and colon and password):
        raise InvalidArgumentError(
            "the file of etcd's user has other lines; it must have one line NAME:PASSWORD",
            hint=f"write {path} anew",
        )
    return name, password


class Etcd:
    """Client of etcd.

    Args:
        endpoints: HOST:PORT of its servers.
        ca, cert, key: PEM files; without ``ca`` nothing is encrypted.

    Raises:
        UprError, OSError: a file cannot be read.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        ca: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        user: Path | None = None,
    ) -> None:
        self._endpoints = list(endpoints)
        self._at = 0
        links = Links(ca, cert, key, options=_OPTIONS)
        self._channels = Channels(links, CALL_SECONDS + 1.0)
        self._user = user
        if user is not None:
            read_user(user)
        self._token = ""
        # The file of the user that it was given to.
        self._given: object = None

    async def _shown(self, endpoint: str) -> Any:
        """Return the metadata that show the user of now; None without one."""
        if self._user is None:
            return None
        token, file = self._token, signature([self._user])
        if not token or file != self._given:
            name, password = read_user(self._user)
            asked = wire.AuthenticateRequest(name=name, password=password)
            auth: Any = stubs.AuthStub(self._channels.to(endpoint))
            token = (await auth.Authenticate(asked, timeout=CALL_SECONDS)).token
            self._token, self._given = token, file
        return (("token", token),)

    async def _call(
        self,
        do: Callable[[grpc.aio.Channel, Any], Awaitable[_T]],
        seconds: float = CALL_SECONDS + 0.5,
    ) -> _T:
        """Call the server of etcd that answered last.

        Args:
            do: makes the call, given a channel and metadata.
            seconds: longest time for that, and for showing the user before it.

        Raises:
            UnavailableError: it did not answer, or refused; whether it did anything is not known.
        """
        endpoint = self._endpoints[self._at % len(self._endpoints)]
        try:
            # Beside the deadline of gRPC, so that nothing waits longer.
            async with asyncio.timeout(seconds):
                metadata = await self._shown(endpoint)
                return await do(self._channels.to(endpoint), metadata)
        except TimeoutError:
            words = "no answer in time"
        except grpc.aio.AioRpcError as error:
            words = error.details() or error.code().name
        except (OSError, UprError) as error:
            # A file that is being exchanged.
            words = words_of(error)
        if self._endpoints[self._at % len(self._endpoints)] == endpoint:
            # Another call may have gone on to the next one already.
            self._at += 1
        # It may have run out.
        self._token = ""
        raise UnavailableError(f"etcd at {endpoint}: {words}")

    async def _ask(self, method: Callable[[grpc.aio.Channel], Any], request: object) -> Any:
        """Make a call that has one request and one answer, see ``_call``; ``method`` returns that of a channel."""

        async def do(channel: grpc.aio.Channel, metadata: Any) -> Any:
            return await method(channel)(request, timeout=CALL_SECONDS, metadata=metadata)

        return await self._call(do)

    async def read(self, prefix: bytes) -> Found:
        request = wire.RangeRequest(key=prefix, range_end=end_of(prefix), limit=KEYS_MAX)
        answer = await self._ask(lambda channel: stubs.KVStub(channel).Range, request)
        if answer.more:
            raise UprError(
                f"keys of the cluster in etcd are more than {KEYS_MAX}",
                hint="give the cluster a name that nobody else uses",
            )
        entries = {one.key: Entry(one.value, one.mod_revision) for one in answer.kvs}
        return Found(entries, answer.header.revision)

    async def swap(self, key: bytes, value: bytes, revision: int) -> bool:
        compare = wire.Compare(result=_EQUAL, target=_MOD, key=key, mod_revision=revision)
        return await self._put([compare], wire.PutRequest(key=key, value=value))

    async def _put(self, compare: list[wire.Compare], put: wire.PutRequest) -> bool:
        request = wire.TxnRequest(compare=compare, success=[wire.RequestOp(request_put=put)])
        answer = await self._ask(lambda channel: stubs.KVStub(channel).Txn, request)
        return bool(answer.succeeded)

    async def session(
        self, key: bytes, value: bytes, seconds: int, began: Callable[[], None]
    ) -> None:
        """Keep a key with a lease until that is lost; cancelled, the key stays until the lease ends by itself."""
        request = wire.LeaseGrantRequest(ttl=seconds)
        made = await self._ask(lambda channel: stubs.LeaseStub(channel).LeaseGrant, request)
        await self._put([], wire.PutRequest(key=key, value=value, lease=made.id))
        began()
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + seconds, seconds / RENEWALS
        while loop.time() < until:
            await asyncio.sleep(pause)
            pause = AGAIN_SECONDS
            with contextlib.suppress(UnavailableError):
                if not await self._renew(made.id, seconds / RENEWALS):
                    return
                until, pause = loop.time() + seconds, seconds / RENEWALS

    async def _renew(self, lease: int, seconds: float) -> bool:
        async def do(channel: grpc.aio.Channel, metadata: Any) -> Any:
            stub: Any = stubs.LeaseStub(channel)
            call = stub.LeaseKeepAlive(timeout=seconds, metadata=metadata)
            try:
                await call.write(wire.LeaseKeepAliveRequest(id=lease))
                return await next_message(call)
            finally:
                call.cancel()

        return bool((await self._call(do, seconds)).ttl > 0)

    async def changed(self, prefix: bytes, after: int) -> None:
        begin = wire.WatchCreateRequest(
            key=prefix, range_end=end_of(prefix), start_revision=after + 1
        )

        async def do(channel: grpc.aio.Channel, metadata: Any) -> None:
            watch: Any = stubs.WatchStub(channel)
            call = watch.Watch(metadata=metadata)
            told = None
            try:
                # Not by a deadline of gRPC, whose end etcd tells under several codes, and no change is no failure.
                async with asyncio.timeout(CALL_SECONDS):
                    await call.write(wire.WatchRequest(create_request=begin))
                    while True:
                        told = await next_message(call)
                        if told.events or told.canceled:
                            return
            except TimeoutError:
                # etcd says at once that it watches; one that does not is silent, and the next call goes to another.
                if told is None:
                    raise
            finally:
                call.cancel()

        await self._call(do)

    async def close(self) -> None:
        await self._channels.close()
