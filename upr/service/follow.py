"""The Follow call: messages of the client to the call's Follower, and what it yields to the client.

The server pulls: the send loop asks the Follower for the next frame only after the transport took the one before. A
call ends with Ended and then waits for the client's half-close, because gRPC drops received messages when a client
writes to an ended call.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import grpc
import lmdb

from upr.engine.follower import Beginnings
from upr.engine.streams import (
    BUCKET_GONE,
    HISTORY_CHANGED,
    TOO_SLOW,
    EndReason,
    FollowOptions,
    FrameOut,
    too_slow,
)
from upr.service.access.rules import PERMIT
from upr.service.buckets.bucket_service import BucketService
from upr.service.conversation import PLAIN_AT_ONCE_BYTES, Conversation, Found, Outgoing
from upr.service.overload.callers import CHEAP_SECONDS, Callers, peer_of, seconds_of_streams
from upr.service.overload.frame_rounds import Rounds
from upr.service.overload.gate import parsed
from upr.service.overload.intake import Context, Intake, shed_error
from upr.service.overload.sending_room import Sender, SendingRoom
from upr.service.replica_tables import TableFeed
from upr.service.sight import traces
from upr.service.sight.counts import count_reason
from upr.service.storage_trouble import unreadable
from upr.storage.search import StoredBeginning, search_time
from upr.storage.store import ReadRequest
from upr_protocol.errors import (
    BucketGoneError,
    DataDamagedError,
    InvalidArgumentError,
    UprError,
)
from upr_protocol.flow import CreditWindow, Liveness
from upr_protocol.limits import (
    FOLLOW_REQUEST_BYTES_MAX,
    FRAME_BYTES,
    READ_BYTES,
    SENDING_SECONDS,
    SLOW_BYTES_A_SECOND,
)
from upr_protocol.position_table import START
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

log = logging.getLogger(__name__)

SMALL_BYTES = 64 * 2**10
"""A follower whose frames are smaller than this, and hold all that there is, sends them in rounds."""
HALF_CLOSE_SECONDS = 5.0
UNSENT_ANSWERS_MAX = 4
LOST_SECONDS = 0.05


class FollowCall:
    """Open Follow call: a task that receives messages, and the loop that sends."""

    def __init__(
        self,
        host: BucketService,
        context: Context,
        intake: Intake,
        options: FollowOptions,
        credit: CreditWindow,
        liveness: Liveness,
        callers: Callers,
        reader_seconds: float,
        rounds: Rounds,
        rooms: tuple[SendingRoom, SendingRoom],
    ) -> None:
        self._host = host
        self._rounds = rounds
        # The rooms of clients that have not shown that they read, and of those that have.
        self._room, self._room_of_readers = rooms
        self._is_small = self._is_held = self._has_turn = False
        self._callers = callers
        self._peer = peer_of(context.peer())
        # What cheap messages cost since the last turn.
        self._owed = 0.0
        self._reader_seconds = reader_seconds
        self._writing_until = math.inf
        # While frames, and what costs no credit, may be on their way to a client on a slow link.
        self._frames_until = self._others_until = -math.inf
        self._unheard = False
        self._context = context
        self._liveness = liveness
        self._timer: asyncio.TimerHandle | None = None
        self._sending = Sender(self._wake, self._end_slow)
        self._sent = asyncio.Event()
        self._half_closed = False
        self._left = False
        self._reads: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        # Done from when there may be something to send; then another one takes its place.
        self._woken = self._loop.create_future()
        now = self._loop.time()
        self._talk = Conversation(host.bucket, options, credit, liveness, self._wake_up, now)
        self.follower = self._talk.follower
        self.say = self._talk.say
        self.end = self._talk.end
        self._sender: asyncio.Task[None] | None = None
        self._tables: TableFeed | None = None
        if options.is_replica:
            self._tables = TableFeed(host, self.follower, self.say, self._drained, self._wake)
            self._talk.before_frames = self._tables.changed_cuts
        # Bytes that a read under way may bring, and those of the frame that gRPC has.
        self._reserved = self._frame_bytes = 0
        self._cut: UprError | None = None
        self._arriving = intake.expect(context, self._end_at_once)
        self._trace = traces.of_call("upr.start", host.bucket.identity.name, context)
        host.users.add(self.bucket_gone)
        rounds.members += 1

    def _wake_up(self) -> None:
        """Wake the sender, unless it could only send a frame that waits for its round."""
        if not self._is_held or self._talk.is_urgent:
            self._wake()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def _hold(self, may_wait: bool) -> bool:
        """Return whether a frame must wait for its round, or for room."""
        # A replica's writers wait for it.
        may_wait = may_wait and self._is_small and self._tables is None
        in_round = not may_wait or self._rounds.join(self._wake)
        self._has_turn = in_round and self._room.join(self._sending)
        self._is_held = not self._has_turn
        return self._is_held

    def _found_reading(self) -> None:
        """Record that the client reads: it answers what was sent."""
        if self._room is not self._room_of_readers:
            held, is_sending = self._sending.held, self._sending.deadline is not None
            self._room.leave(self._sending)
            self._room = self._room_of_readers
            self._room.hold(self._sending, held, sending=is_sending)
            self._wake()

    def _account(self) -> None:
        """Tell the room what is on its way: what is read, was read, and is sent."""
        size = self._reserved + self.follower.ready_bytes + self._frame_bytes
        self._room.hold(self._sending, size, sending=self._frame_bytes > 0)

    def _end_slow(self) -> None:
        """End the call without further messages, because others wait for the room that its message takes."""
        self._end_at_once(too_slow(SENDING_SECONDS).error())

    def bucket_gone(self, error: BucketGoneError) -> None:
        """End all streams and the call, because the bucket was dropped, or is opened again with another history."""
        reopened = error.reason == HISTORY_CHANGED.reason
        self.end(HISTORY_CHANGED if reopened else BUCKET_GONE)

    def close(self) -> None:
        self._arriving.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._trace is not None:
            self._trace.close()
        self._room.leave(self._sending)
        self._host.users.discard(self.bucket_gone)
        self._rounds.members -= 1
        if self._tables is not None:
            self._tables.close()
        self._talk.close(self._loop.time(), left=self._left)

    async def run(self) -> None:
        """Serve until the client half-closes, goes silent, or the call is ended.

        Raises:
            UprError: too much is arriving, or the client was too slow to receive the reason as Ended.
        """
        reader = asyncio.create_task(self._read())
        sender = self._sender = asyncio.create_task(self._send())
        sender.add_done_callback(lambda _: self._room.leave(self._sending))
        try:
            await self._watch(sender)
            if self._cut is not None:
                raise self._cut
            if not self._half_closed:
                async with asyncio.timeout(HALF_CLOSE_SECONDS):
                    await asyncio.shield(reader)
        except TimeoutError:
            log.info("a consumer did not half-close", extra=self._who)
        finally:
            tasks = [sender, *self._reads]
            if self._arriving.stop(reader):
                tasks.append(reader)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ending = self._talk.ending
            if self._is_too_slow:
                log.warning("a consumer is too slow", extra=self._who)
            why = self._cut or ending
            permit = PERMIT.get(None)
            left = "CREDENTIALS_ENDED" if permit is not None and permit.ended else "CLIENT_LEFT"
            reason = why.reason if why else left
            count_reason(self._host.disk.traffic.ended, reason)
            log.info("follow ended", extra={**self._who, "reason": reason})
        if ending is not None and self._is_too_slow and not self._talk.over:
            # The client sees this status only behind the data that the transport has not sent.
            raise ending.error()

    @property
    def _is_too_slow(self) -> bool:
        why = self._cut or self._talk.ending
        return why is not None and why.reason == TOO_SLOW

    @property
    def _who(self) -> dict[str, str]:
        return {
            "peer": self._context.peer(),
            "bucket": self._host.bucket.identity.name,
            "consumer": self.follower.options.consumer,
        }

    async def _watch(self, sender: asyncio.Task[None]) -> None:
        """Wait for the sender; end the call when the client is silent, or accepts no data.

        Raises:
            TimeoutError: the client accepts nothing, not even the end of the call.
        """
        while not sender.done():
            deadline = min(self._liveness.next_deadline(), self._writing_until)
            # Look again: a write may have begun meanwhile.
            left = min(max(deadline - self._loop.time(), 0.01), self._reader_seconds)
            due = self._loop.time() + left
            await asyncio.wait({sender}, timeout=left)
            now = self._loop.time()
            # Nothing could be sent either while the process stood still.
            self._writing_until += self._liveness.woke(now, due)
            if not sender.done() and self._must_end(now):
                done, _ = await asyncio.wait({sender}, timeout=HALF_CLOSE_SECONDS)
                if not done:
                    raise TimeoutError
        if self._cut is None:
            sender.result()

    def _end_at_once(self, why: UprError | None = None) -> None:
        """End the call without further messages; without a reason, because too much is arriving."""
        self._cut = self._cut or why or shed_error()
        if self._sender is not None:
            self._sender.cancel()

    def _must_end(self, now: float) -> bool:
        """Return whether the client is silent or too slow; if so, end its streams."""
        if now >= self._writing_until:
            self.end(too_slow(self._reader_seconds))
            return True
        # Silence does not count while the server itself does not read.
        return not self._unheard and self._talk.check_heard(now)

    def _shorten_excuse(self) -> None:
        """Excuse a client that was heard for no longer than what it has given no credit back for takes on a slow link."""
        left = self.follower.credit.outstanding / SLOW_BYTES_A_SECOND
        self._frames_until = min(self._frames_until, self._loop.time() + left)
        self._liveness.excuse(max(self._frames_until, self._others_until))

    async def _write(self, message: Any, size: int, *, is_credited: bool = False) -> None:
        """Write a message; allow more time for a large value on a slow link.

        Args:
            is_credited: whether the client gives as much credit back for it.
        """
        now, patience = self._loop.time(), self._reader_seconds
        if size > FRAME_BYTES:
            patience += (size - FRAME_BYTES) / SLOW_BYTES_A_SECOND
        if size >= SMALL_BYTES:
            # Before it is through no heartbeat gets to the client, which so has nothing to say.
            until = now + size / SLOW_BYTES_A_SECOND
            if is_credited:
                self._frames_until = max(self._frames_until, until)
            else:
                self._others_until = max(self._others_until, until)
            self._liveness.excuse(max(self._frames_until, self._others_until))
        self._writing_until = now + patience
        await self._context.write(message)
        self._writing_until = math.inf

    async def _take(self, request: Any) -> None:
        """Handle a message; one about many streams waits for its turn, and so does one behind many others."""
        kind = request.WhichOneof("message")
        seconds = 0.0
        if kind in ("pong", "credit"):
            self._found_reading()
        else:
            seconds = seconds_of_streams(request)
        self._owed += seconds
        if self._owed < CHEAP_SECONDS:
            self._talk.take(request, self._loop.time(), self._host.disk.clock.now())
            return
        owed, self._owed = self._owed, 0.0
        # Writers wait for an Ack, and a lease for a Renew: not for what else this peer asks.
        is_dear = kind in ("start", "stop")
        self._unheard = True
        try:
            await (self._callers.turn if is_dear else self._callers.keep_up)(self._peer, owed)
        finally:
            self._unheard = False
            self._liveness.heard(self._loop.time())
        if is_dear:
            self._callers.turns.charge(owed - seconds)
        with self._callers.charged(self._peer, seconds) if is_dear else nullcontext():
            self._talk.take(request, self._loop.time(), self._host.disk.clock.now())

    def _parsed(self, raw: bytes) -> wire.FollowRequest | None:
        """Parse a message; an invalid or too large one ends the call."""
        try:
            if len(raw) > FOLLOW_REQUEST_BYTES_MAX:
                raise InvalidArgumentError(
                    f"message of a Follow call is {len(raw)} bytes; must be at most {FOLLOW_REQUEST_BYTES_MAX}"
                )
            request: wire.FollowRequest = parsed(
                wire.FollowRequest.FromString, raw, "a message of a Follow call"
            )
        except InvalidArgumentError as error:
            self.end(EndReason.of(error))
            self._wake()
            return None
        return request

    async def _read(self) -> None:
        while (raw := await self._arriving.read()) is not grpc.aio.EOF:
            request = self._parsed(raw)
            # Free a large message before waiting for the next one.
            del raw
            if request is not None:
                if self._trace is not None and request.HasField("start"):
                    start = request.start
                    count = len(start.partitions) + len(start.table) // START.itemsize
                    self._trace.begin(partitions=count)
                await self._take(request)
                self._shorten_excuse()
                del request
            while self._talk.waiting >= UNSENT_ANSWERS_MAX:
                # Back-pressure: read no requests while answers are unsent.
                self._sent.clear()
                await self._sent.wait()
        if self.follower.seat is not None:
            # The loss of a connection reads like a half-close, and cancels this task a moment later.
            await asyncio.sleep(LOST_SECONDS)
        self._left = True
        self._half_closed = True
        self._wake()

    async def _send(self) -> None:
        while not self._half_closed:
            self._woken = self._loop.create_future()
            self._is_held = self._has_turn = False
            saying = self._talk.next_message(self._loop.time(), self._hold)
            if saying is not None:
                has_sent_all = False
                if saying.frame is None:
                    self._sending.is_busy = True
                    await self._write(saying.message, saying.message.ByteSize())
                    self._sending.is_busy = False
                    self._sent.set()
                    if self._trace is not None:
                        _end_start(self._trace, saying.message)
                else:
                    await self._send_frame(saying, saying.frame)
                    # Then there is nothing to look for before somebody wakes this; a replica may lack small tables, and
                    # a Start its search.
                    is_done = self._tables is None and not self._talk.waiting
                    has_sent_all = is_done and self.follower.has_sent_all
                del saying
                if self._talk.over:
                    return
                if has_sent_all:
                    await self._idle()
                continue
            self._account()
            # A turn that no frame used is for reading one: asking again would be behind all others.
            if self._has_turn or self._room.join(self._sending):
                self._begin_read()
            if (wanted := self._talk.starts.next_search()) is not None:
                self._begin(self._search_store(wanted))
            if self._tables is not None and (work := self._tables.next_work()) is not None:
                self._begin(work)
            self._room.pass_on()
            if self._woken.done():
                await asyncio.sleep(0)
                continue
            await self._idle()

    async def _send_frame(self, saying: Outgoing, frame: FrameOut) -> None:
        self._frame_bytes = frame.size
        self._account()
        if self.follower.options.plain_rows:
            await self._send_plain(saying, frame)
        else:
            await self._write(saying.message, frame.size, is_credited=True)
        self._frame_bytes = 0
        self._account()
        traffic = self._host.disk.traffic
        traffic.sent_frames += 1
        traffic.sent_rows += frame.rows
        traffic.sent_bytes += frame.size
        self._is_small = frame.size < SMALL_BYTES
        if not self._is_small:
            # A slow link may keep an answer to a heartbeat behind much data, but it takes the data. Small messages
            # prove nothing: buffers take them even if nobody reads.
            self._liveness.heard(self._loop.time())

    async def _send_plain(self, saying: Outgoing, frame: FrameOut) -> None:
        """Send a frame of plain rows, built one by one; a large frame is built in a thread."""
        small = frame.size < PLAIN_AT_ONCE_BYTES
        while True:
            made = (
                next(saying.message, None)
                if small
                else await asyncio.to_thread(next, saying.message, None)
            )
            if made is None:
                return
            await self._write(made, len(made))

    async def _idle(self) -> None:
        """Wait until a message may be ready, or a heartbeat is due."""
        # Left where it is when that moves away, which is all it does: a timer for each frame costs more than the waiting.
        if self._timer is None:
            due = max(self._liveness.next_deadline(), self._loop.time() + 0.001)
            self._timer = self._loop.call_at(due, self._is_due)
        await self._woken

    def _is_due(self) -> None:
        self._timer = None
        self._wake()

    def _begin_read(self) -> None:
        known = self.follower.unfit_bytes
        wanted = self.follower.next_read()
        if wanted is not None:
            self._reserved = max(wanted[1], known)
            self._account()
            self._begin(self._read_store(*wanted))

    async def _drained(self) -> None:
        """Wait until all that was said is sent."""
        while self._talk.waiting:
            self._sent.clear()
            await self._sent.wait()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    async def _search_store(self, wanted: list[tuple[int, int]]) -> None:
        """Search the store for the beginnings of streams from a time."""
        try:
            self._talk.starts.found(await search_stored(self._host, wanted))
        except BucketGoneError:
            return
        self._wake()

    async def _read_store(self, requests: list[ReadRequest], max_bytes: int) -> None:
        if not await self._host.read_for(self.follower, requests, max_bytes):
            # The call ends, and gives the room back.
            return
        self._reserved = 0
        self._account()
        if self.follower.ready_bytes > READ_BYTES and self._room.exceeds(self._sending):
            # How large a block is shows when it is read, and others may have read one at the same time.
            self.follower.put_back()
            self._account()
        self._wake()


def _end_start(traced: traces.CallTrace, message: Any) -> None:
    if isinstance(message, wire.FollowResponse) and message.HasField("start_answers"):
        answers = message.start_answers.answers
        traced.end(not_started=sum(not one.HasField("started") for one in answers))


async def search_stored(host: BucketService, wanted: Sequence[tuple[int, int]]) -> list[Found]:
    """Search the stored blocks for (partition, time) pairs; times are microseconds since the epoch.

    The search runs in bites, between which others have their turn. A partition with damaged blocks gets the error, and
    the status shows the damage.

    Raises:
        BucketGoneError: the bucket was dropped.
    """
    results: list[Found] = []
    while len(results) < len(wanted):
        left = wanted[len(results) :]
        try:
            results += await host.disk.in_reader(partial(search_time, host.disk.store, left))
        except (OSError, lmdb.Error) as error:
            return [*results, *([unreadable(error)] * len(left))]
    host.compactor.damaged(
        {
            partition: result
            for (partition, _), result in zip(wanted, results, strict=True)
            if isinstance(result, DataDamagedError)
        }
    )
    return results


async def beginnings(
    host: BucketService, partitions: Iterable[int], time: int | None
) -> dict[int, int]:
    """Return the seqno of each partition above which a client begins that wants what comes from now on, or from a time.

    These are the answers to a Start with from_now or from_time, all decided in one step, right before this returns. No
    seqno is above its partition's newest complete durable marker.

    Args:
        time: microseconds since the epoch; None for now.

    Raises:
        DataDamagedError: a partition's blocks are damaged.
        BucketGoneError: the bucket was dropped.
    """
    chosen = list(partitions)
    if time is None:
        return {partition: int(host.bucket.markers.seqno[partition]) for partition in chosen}
    found = await search_stored(host, [(partition, time) for partition in chosen])
    decided = Beginnings(host.bucket.markers.seqno, host.bucket.tail)
    result: dict[int, int] = {}
    for partition, stored in zip(chosen, found, strict=True):
        if not isinstance(stored, StoredBeginning):
            raise stored
        result[partition] = decided.at_time(partition, time, stored)
    return result
