"""The Follow call: messages of the client to the call's Follower, and what it yields to the client.

The server pulls: the send loop asks the Follower for the next frame only when the one before was handed to
the transport. A call ends with Ended and then waits for the client's half-close, because a client's write that
meets the end of the call loses messages it had received.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc

from upr import __version__
from upr.engine.bucket import Bucket
from upr.engine.consumers import read_positions
from upr.engine.follower import Follower
from upr.engine.streams import (
    BUCKET_GONE,
    SHUTTING_DOWN,
    SUPERSEDED,
    Answer,
    Ended,
    EndReason,
    FollowOptions,
    FrameOut,
    RolledBack,
    Started,
    StartRequest,
)
from upr.service.catalog import Catalog, check_name
from upr.service.cuts import CutMethods
from upr.service.handshake import Context, abort, read_open
from upr.service.host import BucketHost, now_micros
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
    CONSUMERS_MAX,
    CREDIT_BYTES,
    CREDIT_BYTES_MAX,
    FOLLOW_CALLS_MAX,
    PARTITIONS,
)
from upr_protocol.liveness import Liveness
from upr_protocol.wire.codec import encode_frame, log_to_messages, problem_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

log = logging.getLogger(__name__)

COALESCE_FOLLOWERS = 4
COALESCE_SECONDS = 0.01
COALESCE_BYTES = 64 * 2**10
"""With this many followers, frames smaller than this are held back for up to COALESCE_SECONDS: on two cores
eight followers of single writes cannot be woken for each of them."""
HALF_CLOSE_SECONDS = 5.0
UNSENT_ANSWERS_MAX = 4
SILENT = EndReason("SILENT", True, "the consumer said nothing for three heartbeat intervals")
_POSITION = struct.Struct("<IQ")


class ChangeStreamMethods(CutMethods):
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
        options = FollowOptions(
            check_name(opening.consumer, "consumer") if opening.consumer else "",
            opening.stability == types.STABILITY_MEMORY,
            opening.keys_only,
            peer=context.peer(),
            accept_zstd=opening.accept_zstd,
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
        self._out: deque[wire.FollowResponse] = deque()
        self._half_closed = False
        self._ending: EndReason | None = None
        self._beat_now = False
        self._told_unkept = False
        self._reads: set[asyncio.Task[None]] = set()
        self.follower = Follower(host.bucket, options, credit, self._wake.set)
        old = self._bucket.add_follower(self.follower)
        if old is not None and old.on_superseded is not None:
            old.on_superseded()
        self.follower.on_superseded = lambda: self.end(SUPERSEDED)
        host.users.add(self.bucket_gone)

    def bucket_gone(self, _: BucketGoneError) -> None:
        """The bucket was dropped: end all streams and the call."""
        self.end(BUCKET_GONE)

    def close(self) -> None:
        """Forget the follower."""
        self._host.users.discard(self.bucket_gone)
        self._bucket.remove_follower(self.follower)

    def say(self, message: wire.FollowResponse) -> None:
        """Send a message before everything that is not decided yet."""
        self._out.append(message)
        self._wake.set()

    def end(self, why: EndReason) -> None:
        """End all streams and the call."""
        if self._ending is None:
            self._ending = why
            self.follower.end_all(why)

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
            log.info(
                "follow ended",
                extra={
                    "peer": self._context.peer(),
                    "consumer": self.follower.options.consumer,
                    "reason": self._ending.reason if self._ending else "CLIENT_LEFT",
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
            if not sender.done() and self._liveness.peer_is_gone(loop.time()):
                self.end(SILENT)
                async with asyncio.timeout(HALF_CLOSE_SECONDS):
                    await sender
        sender.result()

    # What the client says

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while (request := await self._context.read()) is not grpc.aio.EOF:
            self._liveness.heard(loop.time())
            if self._ending is not None or not isinstance(request, wire.FollowRequest):
                continue
            try:
                self._take(request)
            except UprError as error:
                self.end(EndReason(error.reason, error.retriable, error.message, error.hint))
            self._wake.set()
            while len(self._out) >= UNSENT_ANSWERS_MAX:
                # Who asks without reading the answers is not listened to until it reads.
                self._sent.clear()
                await self._sent.wait()
        self._half_closed = True
        self._wake.set()

    def _take(self, request: wire.FollowRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "start":
            self._start(request.start.partitions)
        elif kind == "stop":
            self._check_count("Stop", len(request.stop.partitions))
            self.follower.stop(request.stop.partitions)
        elif kind == "credit":
            self.follower.credit.give_back(request.credit.bytes)
        elif kind == "ack":
            self._acknowledge(request.ack.positions)
        elif kind != "pong":
            raise InvalidArgumentError(f"a message of a Follow call of kind {kind}")

    def _start(self, asked: Sequence[wire.StartPartition]) -> None:
        self._check_count("Start", len(asked))
        requests = [
            StartRequest(
                one.partition,
                one.failover_id if one.HasField("failover_id") else None,
                one.seqno,
                one.data_id if one.HasField("data_id") else None,
                one.until_seqno if one.HasField("until_seqno") else None,
                one.until_now,
                one.until_exact if one.HasField("until_exact") else None,
            )
            for one in asked
        ]
        decided = self.follower.start(requests)
        for answer in decided:
            if isinstance(answer, RolledBack) and answer.answer.alarm:
                # Somebody has what this server never gave: an old copy of the data may have been restored.
                log.error(
                    "a consumer is ahead of this server",
                    extra={"partition": answer.partition, "words": answer.answer.words},
                )
        response = wire.FollowResponse(start_answers=wire.StartAnswers())
        for answer in decided:
            _fill_answer(response.start_answers.answers.add(partition=answer.partition), answer)
        self.say(response)
        self._beat_now = True

    @staticmethod
    def _check_count(kind: str, count: int) -> None:
        if count > PARTITIONS:
            raise InvalidArgumentError(f"a {kind} of {count} streams, the limit is {PARTITIONS}")

    def _acknowledge(self, positions: bytes) -> None:
        kept = self.follower.acknowledge(*read_positions(positions), now_micros())
        if not kept and not self._told_unkept:
            self._told_unkept = True
            log.warning(
                "the Acks of a consumer are not kept: too many are registered",
                extra={"consumer": self.follower.options.consumer, "limit": CONSUMERS_MAX},
            )

    # What the server says

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._half_closed:
            self._wake.clear()
            await self._send_control()
            if self._out or self.follower.has_ended:
                # Said while the control messages were being sent: a stream's answer goes before its frames, and
                # its end before the end of the call.
                continue
            if self._ending is not None:
                ended = wire.Ended(problem=_problem(self._ending))
                await self._context.write(wire.FollowResponse(ended=ended))
                return
            frame = self.follower.next_frame()
            if frame is not None:
                await self._send_frame(frame)
                continue
            self._begin_read()
            if self._out or self._wake.is_set():
                await asyncio.sleep(0)
                continue
            await self._idle(loop.time())

    async def _send_control(self) -> None:
        """Send answers, then ends, then a heartbeat if one is due."""
        while self._out:
            await self._context.write(self._out.popleft())
            self._sent.set()
        for ended in self.follower.take_ended():
            await self._context.write(wire.FollowResponse(ended=_ended_message(ended)))
        now = asyncio.get_running_loop().time()
        # By the clock of the last heartbeat, not of the last frame: a consumer that is sent frames for long may
        # have no reason to say anything, and its answer to a heartbeat is what shows that it is there.
        if self._beat_now or self._liveness.heartbeat_due(now):
            self._beat_now = False
            self._liveness.sent(now)
            moved = self.follower.moved_high_seqnos()
            beat = wire.Heartbeat(high_seqnos=b"".join(_POSITION.pack(*one) for one in moved))
            await self._context.write(wire.FollowResponse(heartbeat=beat))

    async def _send_frame(self, frame: FrameOut) -> None:
        raised = b"".join(_POSITION.pack(*one) for one in self.follower.take_purge_seqnos())
        message: Any = encode_frame(frame.blocks, frame.tokens, raised)
        await self._context.write(message)
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
            task = asyncio.create_task(self._read_store(*wanted))
            self._reads.add(task)
            task.add_done_callback(self._reads.discard)

    async def _read_store(self, requests: list[ReadRequest], max_bytes: int) -> None:
        try:
            options = self.follower.options
            results = await self._host.read(
                requests,
                max_bytes,
                keys_only=options.keys_only,
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


def _problem(why: EndReason) -> types.Problem:
    return types.Problem(
        reason=why.reason, retriable=why.retriable, message=why.words, hint=why.hint
    )


def _ended_message(ended: Ended) -> wire.Ended:
    streams = [wire.EndedStream(partition=p, token=token) for p, token in ended.streams]
    return wire.Ended(streams=streams, problem=_problem(ended.why))


def _fill_answer(message: wire.StartAnswer, answer: Answer) -> None:
    """Write an answer into the message where it lies: building it apart would copy it twice."""
    if isinstance(answer, Started):
        started = message.started
        started.token = answer.token
        started.failover_id = answer.failover_id
        started.high_seqno = answer.high_seqno
        started.purge_seqno = answer.purge_seqno
        if answer.until_seqno is not None:
            started.until_seqno = answer.until_seqno
        for record in answer.log or ():
            started.failover_log.add(failover_id=record.failover_id, seqno=record.seqno)
    elif isinstance(answer, RolledBack):
        decision = answer.answer
        message.rollback.rollback_seqno = decision.rollback_seqno or 0
        message.rollback.failover_id = decision.newest_id
        message.rollback.rule = decision.rule
        message.rollback.words = decision.words
        message.rollback.failover_log.extend(log_to_messages(answer.log))
    else:
        message.refused.CopyFrom(problem_of(answer.error))
