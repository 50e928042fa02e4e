"""The Follow call: messages of the client to the call's Follower, and what it yields to the client.

The server pulls: the send loop asks the Follower for the next frame only when the one before was handed to
the transport. A call ends with Ended and then waits for the client's half-close, because a client's write that
meets the end of the call loses messages it had received.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc

from upr import __version__
from upr.engine.bucket import Bucket
from upr.engine.streams import BUCKET_GONE, SHUTTING_DOWN, FollowOptions, FrameOut
from upr.service.beginnings import search_stored
from upr.service.catalog import Catalog, check_name
from upr.service.conversation import Conversation, Saying
from upr.service.handshake import Context, abort, read_open
from upr.service.host import BucketHost, now_micros
from upr.service.membership import read_member
from upr.service.positions import PositionMethods
from upr.storage.store import ReadRequest
from upr_protocol.credit import CreditWindow
from upr_protocol.errors import (
    BucketGoneError,
    DataDamagedError,
    InvalidArgumentError,
    ShuttingDownError,
    UprError,
)
from upr_protocol.limits import (
    CREDIT_BYTES,
    CREDIT_BYTES_MAX,
    FOLLOW_CALLS_MAX,
    KEY_BYTES_MAX,
)
from upr_protocol.liveness import Liveness
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

log = logging.getLogger(__name__)

COALESCE_FOLLOWERS = 4
COALESCE_SECONDS = 0.01
COALESCE_BYTES = 64 * 2**10
"""With this many followers, frames smaller than this are held back for up to COALESCE_SECONDS: on two cores
eight followers of single writes cannot be woken for each of them."""
HALF_CLOSE_SECONDS = 5.0
PLAIN_AT_ONCE_BYTES = 32 * 2**10
"""Frames of plain rows from this size on are made in a thread."""
UNSENT_ANSWERS_MAX = 4
LOST_SECONDS = 0.05


class ChangeStreamMethods(PositionMethods):
    """All of ChangeStreamService.

    Args:
        server_id: drawn anew at each start of the server.
        heartbeat_seconds: for clients that ask for none.
    """

    def __init__(self, catalog: Catalog, server_id: int, heartbeat_seconds: float) -> None:
        super().__init__(catalog)
        self._server_id = server_id
        self._heartbeat_seconds = heartbeat_seconds
        self._calls: set[_FollowCall] = set()
        self._stopping = False

    async def Follow(self, request_iterator: object, context: Context) -> None:
        """Serve one call; see ``change_stream_service.proto``."""
        try:
            call = await self._open(context)
        except UprError as error:
            await abort(context, error)
        self._calls.add(call)
        try:
            await call.run()
        finally:
            self._calls.discard(call)
            call.close()

    async def _open(self, context: Context) -> "_FollowCall":
        opening = await read_open(context, "Follow", len(self._calls), FOLLOW_CALLS_MAX)
        if self._stopping:
            raise ShuttingDownError(SHUTTING_DOWN.words, hint=SHUTTING_DOWN.hint)
        host = self._catalog.of(opening)
        if opening.stability not in types.Stability.values():
            raise InvalidArgumentError(f"stability {opening.stability} is unknown")
        window = opening.credit_bytes or CREDIT_BYTES
        if window > CREDIT_BYTES_MAX:
            raise InvalidArgumentError(f"credit of {window} bytes, the limit is {CREDIT_BYTES_MAX}")
        member, lease = read_member(opening)
        options = FollowOptions(
            check_name(opening.consumer, "consumer") if opening.consumer else "",
            opening.stability == types.STABILITY_MEMORY,
            opening.keys_only,
            peer=context.peer(),
            accept_zstd=opening.accept_zstd and not opening.plain_rows,
            key_prefix=_checked_prefix(opening.key_prefix),
            plain_rows=opening.plain_rows,
            member=member,
            lease=lease,
        )
        interval = opening.heartbeat_seconds or self._heartbeat_seconds
        liveness = Liveness(interval, asyncio.get_running_loop().time())
        call = _FollowCall(host, context, options, CreditWindow(window), liveness)
        opened = wire.Opened(
            server_id=self._server_id,
            bucket_version=host.bucket.identity.version,
            credit_bytes=window,
            heartbeat_seconds=interval,
            server_version=__version__,
            generation=call.follower.generation,
            lease_seconds=lease / 1e6,
        )
        call.say(wire.FollowResponse(opened=opened))
        return call

    @property
    def open_calls(self) -> int:
        """Open Follow calls."""
        return len(self._calls)

    def shut_down(self) -> None:
        """End every stream of every call with its reason."""
        self._stopping = True
        for call in list(self._calls):
            call.end(SHUTTING_DOWN)


def _checked_prefix(prefix: bytes) -> bytes:
    if len(prefix) > KEY_BYTES_MAX:
        raise InvalidArgumentError(
            f"a key prefix of {len(prefix)} bytes, a key has at most {KEY_BYTES_MAX}"
        )
    return prefix


class _FollowCall:
    """One open call: a task that takes the client's messages, and the loop that sends."""

    def __init__(
        self,
        host: BucketHost,
        context: Context,
        options: FollowOptions,
        credit: CreditWindow,
        liveness: Liveness,
    ) -> None:
        self._host = host
        self._bucket: Bucket = host.bucket
        self._context = context
        self._liveness = liveness
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()
        self._half_closed = False
        self._left = False
        self._reads: set[asyncio.Task[None]] = set()
        now = asyncio.get_running_loop().time()
        self._talk = Conversation(host.bucket, options, credit, liveness, self._wake.set, now)
        self.follower = self._talk.follower
        self.say = self._talk.say
        self.end = self._talk.end
        host.users.add(self.bucket_gone)

    def bucket_gone(self, _: BucketGoneError) -> None:
        """The bucket was dropped: end all streams and the call."""
        self.end(BUCKET_GONE)

    def close(self) -> None:
        """Forget the follower."""
        self._host.users.discard(self.bucket_gone)
        self._talk.close(asyncio.get_running_loop().time(), left=self._left)

    async def run(self) -> None:
        """Serve until the client half-closes, goes silent, or the call is ended."""
        reader = asyncio.create_task(self._read())
        sender = asyncio.create_task(self._send())
        try:
            await self._watch(sender)
            if not self._half_closed:
                async with asyncio.timeout(HALF_CLOSE_SECONDS):
                    await asyncio.shield(reader)
        except TimeoutError:
            log.info("a consumer did not half-close", extra={"peer": self._context.peer()})
        finally:
            tasks = (reader, sender, *self._reads)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ending = self._talk.ending
            log.info(
                "follow ended",
                extra={
                    "peer": self._context.peer(),
                    "consumer": self.follower.options.consumer,
                    "reason": ending.reason if ending else "CLIENT_LEFT",
                },
            )

    async def _watch(self, sender: asyncio.Task[None]) -> None:
        """Wait for the sender; end the call when the client goes silent, also while a write to it waits.

        Raises:
            TimeoutError: the client takes nothing any more, not even that the call ended.
        """
        loop = asyncio.get_running_loop()
        while not sender.done():
            left = max(self._liveness.next_deadline() - loop.time(), 0.01)
            await asyncio.wait({sender}, timeout=left)
            if not sender.done() and self._talk.check_heard(loop.time()):
                async with asyncio.timeout(HALF_CLOSE_SECONDS):
                    await sender
        sender.result()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while (request := await self._context.read()) is not grpc.aio.EOF:
            self._talk.take(request, loop.time(), now_micros())
            while self._talk.waiting >= UNSENT_ANSWERS_MAX:
                # Who asks without reading the answers is not listened to until it reads.
                self._sent.clear()
                await self._sent.wait()
        if self.follower.seat is not None:
            # The loss of a connection reads like a half-close, and cancels this task a moment later.
            await asyncio.sleep(LOST_SECONDS)
        self._left = True
        self._half_closed = True
        self._wake.set()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._half_closed:
            self._wake.clear()
            saying = self._talk.next_message(loop.time())
            if saying is not None:
                if isinstance(saying.message, Iterator):
                    await self._send_plain(saying)
                else:
                    await self._context.write(saying.message)
                self._sent.set()
                if saying.frame is not None:
                    await self._frame_sent(saying.frame)
                if self._talk.over:
                    return
                continue
            self._begin_read()
            self._begin_search()
            if self._wake.is_set():
                await asyncio.sleep(0)
                continue
            await self._idle(loop.time())

    async def _send_plain(self, saying: Saying) -> None:
        """Send a frame of plain rows, made one by one: many of them apart from the loop."""
        assert saying.frame is not None
        small = saying.frame.size < PLAIN_AT_ONCE_BYTES
        while True:
            made = (
                next(saying.message, None)
                if small
                else await asyncio.to_thread(next, saying.message, None)
            )
            if made is None:
                return
            await self._context.write(made)

    async def _frame_sent(self, frame: FrameOut) -> None:
        if frame.size >= COALESCE_BYTES:
            # A slow link may keep an answer to a heartbeat behind much data, but it takes the data. Small messages
            # prove nothing: buffers take them even if nobody reads.
            self._liveness.heard(asyncio.get_running_loop().time())
        if len(self._bucket.followers) >= COALESCE_FOLLOWERS and frame.size < COALESCE_BYTES:
            await asyncio.sleep(COALESCE_SECONDS)

    async def _idle(self, now: float) -> None:
        """Wait until there may be something to send, or a heartbeat is due."""
        left = max(self._liveness.next_deadline() - now, 0.001)
        try:
            async with asyncio.timeout(left):
                await self._wake.wait()
        except TimeoutError:
            self._wake.set()

    def _begin_read(self) -> None:
        wanted = self.follower.next_read()
        if wanted is not None:
            self._begin(self._read_store(*wanted))

    def _begin_search(self) -> None:
        wanted = self._talk.next_search()
        if wanted is not None:
            self._begin(self._search_store(wanted))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    async def _search_store(self, wanted: list[tuple[int, int]]) -> None:
        """Find where the streams of a Start begin that want what comes from a time on."""
        try:
            self._talk.found(await search_stored(self._host, wanted))
        except BucketGoneError:
            return
        self._wake.set()

    async def _read_store(self, requests: list[ReadRequest], max_bytes: int) -> None:
        try:
            options = self.follower.options
            results = await self._host.read(
                requests,
                max_bytes,
                showing=options.showing,
                accept_zstd=options.accept_zstd,
            )
            self.follower.feed(results)
        except BucketGoneError:
            return
        except Exception as error:
            log.exception("a read of the store failed")
            damaged = DataDamagedError(f"the store cannot be read: {error}", retriable=True)
            self.follower.read_failed(damaged, requests)
        self._wake.set()
