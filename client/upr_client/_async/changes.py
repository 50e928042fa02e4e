"""Following changes: the loop that connects, starts, receives, undoes and stores positions."""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from upr_client import backoff
from upr_client._async.adapter import Event, now, run_blocking, settle
from upr_client._async.follow import Follow
from upr_client.delivered import ChangesOptions, Taken, batch_of, decode_frame, rollback_of
from upr_client.events import Change, ChangeBatch, Marker, Rollback
from upr_client.messages import ack_message, start_message
from upr_protocol.consumer import Fate, PendingRollback, ProtocolError, fate_of
from upr_protocol.errors import (
    BucketGoneError,
    ClosedError,
    InvalidArgumentError,
    RollbackError,
    UprError,
)
from upr_protocol.position import Position
from upr_protocol.wire.codec import log_from_messages
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from upr_client._async.bucket import AsyncBucket

_logger = logging.getLogger("upr_client")

_VIOLATIONS_MAX = 5
"""So often in a row, with no frame in between, the protocol may be broken before that is an error."""
_ROLLBACKS_MAX = 3
"""So often in a row a partition may be told to roll back before its next Start waits."""


class AsyncChanges:
    """The changes of a bucket; made by ``AsyncBucket.changes``, used with ``async with`` and then iterated.

    A position moves past what was yielded when the next item is asked for.
    """

    def __init__(
        self, bucket: "AsyncBucket", partitions: Iterable[int] | None, options: ChangesOptions
    ) -> None:
        self._bucket = bucket
        self._options = options
        self._session = options.session(partitions, {})
        self._follow: Follow | None = None
        self._retries = backoff.Retries()
        self._taken: Taken | None = None
        self._offered: list[int] = []
        self._rollbacks_in_row: dict[int, int] = {}
        self._entered = False
        self._closing = Event()
        self._closed = False
        self._attempt = 0
        self._violations = 0
        self._progress_at = now()
        self._saved_at = now()
        self._must_save = False
        self._any_version = False
        self.handshakes: deque[tuple[int, str, str]] = deque(maxlen=4096)
        """The newest rollback answers: partition, rule, words."""

    # Beginning and end.

    async def __aenter__(self) -> Self:
        self._bucket._check_usable()
        if self._closed:
            raise ClosedError("the changes were closed", hint="ask the bucket for new ones")
        store = self._options.positions
        if store is not None:
            partitions = self._session.partitions
            self._session = self._options.session(
                partitions, await run_blocking(store.load, partitions)
            )
        self._entered = True
        self._progress_at = self._saved_at = now()
        self._bucket._client._opened(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the call and store the positions of what was consumed. Doing it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._bucket._client._gone(self)
        try:
            await self._drop_call()
        finally:
            if self._entered:
                await self.save()
            self._taken = None

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the changes were closed", hint="ask the bucket for new ones")
        if not self._entered:
            raise ClosedError("the changes are not open", hint="use them in a with statement")
        self._bucket._check_usable()

    # What can be asked.

    def position(self, partition: int) -> Position:
        """The position of what was consumed of a partition; it may be newer than the one stored."""
        self._acknowledge_part()
        return self._session.position(partition)

    def positions(self) -> dict[int, Position]:
        """The positions of all partitions that are followed."""
        self._acknowledge_part()
        return {
            partition: self._session.position(partition) for partition in self._session.partitions
        }

    def lag(self) -> dict[int, int]:
        """For each partition, by how many seqnos the server is ahead, as far as it told."""
        self._acknowledge_part()
        return self._session.lag()

    async def save(self) -> None:
        """Store the positions that changed, in one atomic write; nothing without a position store."""
        self._acknowledge_part()
        self._saved_at = now()
        changed = self._session.take_changed()
        store = self._options.positions
        if store is None or not changed:
            return
        positions = {partition: self._session.position(partition) for partition in changed}
        try:
            await run_blocking(store.save, positions)
        except BaseException:
            self._session.mark_changed(changed)
            raise
        if self._follow is not None:
            self._follow.send(ack_message((p, at.seqno) for p, at in positions.items()))

    # Iterating.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change | Marker | Rollback:
        while True:
            taken = self._taken
            if taken is not None and (event := taken.next_event()) is not None:
                return event
            if await self._next_batch() is None:
                raise StopAsyncIteration

    def batches(self) -> "AsyncBatches":
        """Iterate over whole frames, which is many times as fast as change by change."""
        return AsyncBatches(self)

    def _acknowledge_part(self) -> None:
        if self._taken is not None and self._taken.delivery is not None:
            self._session.acknowledge_part(self._taken.delivery, *self._taken.consumed())

    def _acknowledge(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None and taken.delivery is not None:
            self._session.acknowledge(taken.delivery)
        offered, self._offered = self._offered, []
        for partition in offered:
            self._session.rolled_back(partition)
            self._must_save = True

    async def _next_batch(self) -> ChangeBatch | None:
        self._check_usable()
        self._acknowledge()
        while not self._session.finished:
            if self._session.undoing:
                batch = await self._undo(self._session.undoing)
                if batch is not None:
                    return batch
            if self._follow is None and not await self._connect():
                continue
            wait = await self._start_due()
            message = await self._receive(wait)
            batch = await self._take(message) if message is not None else None
            if batch is not None:
                return batch
        # First, so that the last acknowledgement still goes over this call.
        await self.save()
        await self._drop_call(self._bucket._client.connect_timeout)
        return None

    # The call.

    def _say(self, words: str) -> None:
        _logger.info("%s: %s", self._bucket.name, words)
        if self._options.on_status is not None:
            self._options.on_status(words)

    async def _connect(self) -> bool:
        version = None if self._any_version else self._session.bucket_version or None
        request = self._options.open_message(self._bucket.name, version)
        try:
            self._follow = Follow(self._bucket._client._stubs().streams.Follow, request)
            opened = await self._follow.opened(self._bucket._client.connect_timeout)
        except UprError as error:
            if error.reason == BucketGoneError.default_reason and version is not None:
                # Whatever has the name now: its version tells that everything of the old one is to be undone.
                await self._drop_call()
                self._any_version = True
                self._say(f"{error}; going on with the new one")
            else:
                self._any_version = False
                await self._lost(error)
            return False
        self._any_version = False
        self._session.opened(opened.bucket_version)
        self._bucket.version = opened.bucket_version
        return True

    async def _drop_call(self, finish_seconds: float = 0.0) -> None:
        follow, self._follow = self._follow, None
        if follow is None:
            return
        if finish_seconds:
            await follow.finish(finish_seconds)
        else:
            await follow.cancel()

    async def _lost(self, error: UprError, finish_seconds: float = 0.0) -> None:
        """The call is lost: wait before the next one, or raise what trying again does not mend."""
        await self._drop_call(finish_seconds)
        self._session.disconnected()
        if self._closed:
            raise ClosedError("the changes were closed")
        if not error.retriable:
            raise error
        if isinstance(error, ProtocolError):
            self._violations += 1
            if self._violations >= _VIOLATIONS_MAX:
                raise error
        limit = self._options.retry_seconds
        if limit is not None and now() - self._progress_at >= limit:
            raise error
        seconds = backoff.delay(self._attempt, random.random())
        self._attempt += 1
        self._say(
            f"the call ended with {error.reason} ({error}); connecting again in {seconds:.2f} s"
        )
        if await self._closing.wait(seconds):
            raise ClosedError("the changes were closed")

    async def _start_due(self) -> float | None:
        """Start what may be started. Return after how many seconds there is more to do, None for not by itself."""
        if self._must_save or (
            self._session.has_changed and now() - self._saved_at >= self._options.save_seconds
        ):
            # Before the Start with a new id: a crash in between must not find the old position.
            await self.save()
            self._must_save = False
        due, next_due = self._retries.split(self._session.ready(), now())
        if due and self._follow is not None:
            self._follow.send(start_message(self._session.starts(due)))
        waits = []
        if next_due is not None:
            waits.append(next_due - now())
        if self._options.positions is not None and self._session.has_changed:
            waits.append(self._saved_at + self._options.save_seconds - now())
        return max(min(waits), 0.0) if waits else None

    async def _receive(self, seconds: float | None) -> stream_pb2.FollowResponse | None:
        assert self._follow is not None
        try:
            message = await self._follow.next(seconds)
        except UprError as error:
            await self._lost(error)
            return None
        if message is not None:
            self._progress_at = now()
        return message

    # What a message means.

    async def _take(self, message: stream_pb2.FollowResponse) -> ChangeBatch | None:
        kind = message.WhichOneof("message")
        fatal: UprError | None = None
        try:
            if kind == "frame":
                return self._take_frame(message.frame)
            if kind == "start_answers":
                fatal = self._take_answers(message.start_answers.answers)
            elif kind == "heartbeat" and self._follow is not None:
                self._session.highs(np.arange(1024), self._follow.highs())
            elif kind == "ended" and message.ended.streams:
                fatal = self._take_ended(message.ended)
            elif kind == "opened":
                raise ProtocolError("the server said opened twice")
        except InvalidArgumentError as error:
            # What the server sent is out of range, or damaged on the way: nothing of it was used.
            await self._lost(ProtocolError(error.message))
            return None
        except ProtocolError as error:
            await self._lost(error)
            return None
        if fatal is not None:
            raise fatal
        if kind == "ended" and not message.ended.streams:
            await self._call_ended(error_of(message.ended.problem))
        return None

    def _take_frame(self, frame: stream_pb2.Frame) -> ChangeBatch | None:
        delivery = self._session.frame(*decode_frame(frame))
        if delivery is None:
            return None
        self._attempt = self._violations = 0
        self._retries.succeeded(delivery.partitions)
        batch = batch_of(delivery)
        self._taken = Taken(batch, delivery)
        return batch

    def _take_answers(self, answers: Iterable[stream_pb2.StartAnswer]) -> UprError | None:
        self._attempt = 0
        refused: dict[str, list[int]] = {}
        fatal: UprError | None = None
        for answer in answers:
            partition = answer.partition
            kind = answer.WhichOneof("answer")
            if kind == "started":
                started = answer.started
                until = started.until_seqno if started.HasField("until_seqno") else None
                log = log_from_messages(started.failover_log)
                self._session.started(
                    partition, started.token, started.failover_id, started.high_seqno, until, log
                )
                self._rollbacks_in_row.pop(partition, None)
            elif kind == "rollback":
                self._take_rollback(partition, answer.rollback)
            elif kind == "refused":
                problem = answer.refused
                self._session.refused(partition, problem.retriable)
                if problem.retriable:
                    refused.setdefault(f"{problem.reason} ({problem.message})", []).append(
                        partition
                    )
                    self._retries.failed(partition, now(), random.random())
                else:
                    fatal = fatal or error_of(problem)
            else:
                raise ProtocolError(f"the answer for partition {partition} is empty")
        for words, partitions in refused.items():
            self._say(f"{_named(partitions)} refused: {words}; asking again after a pause")
        return fatal

    def _take_rollback(self, partition: int, message: stream_pb2.Rollback) -> None:
        log = log_from_messages(message.failover_log)
        self.handshakes.append((partition, message.rule, message.words))
        pending = self._session.rollback(
            partition, message.rollback_seqno, message.failover_id, message.rule, message.words, log
        )
        if pending is None:
            self._must_save = True
        count = self._rollbacks_in_row.get(partition, 0) + 1
        self._rollbacks_in_row[partition] = count
        if count > _ROLLBACKS_MAX:
            self._retries.failed(partition, now(), random.random())
            self._say(f"partition {partition} was told to roll back {count} times in a row")

    def _take_ended(self, ended: stream_pb2.Ended) -> UprError | None:
        streams = [(stream.partition, stream.token) for stream in ended.streams]
        partitions = self._session.ended(streams, ended.problem.reason)
        fate = fate_of(ended.problem.reason)
        if fate is Fate.FAILED and partitions:
            return error_of(ended.problem)
        if fate is Fate.AGAIN and partitions:
            for partition in partitions:
                self._retries.failed(partition, now(), random.random())
            self._say(
                f"{_named(partitions)} ended: {ended.problem.reason} ({ended.problem.message}); starting again"
            )
        return None

    async def _call_ended(self, error: UprError) -> None:
        self._session.disconnected()
        if self._session.finished:
            return
        error.retriable = fate_of(error.reason) is not Fate.FAILED
        # The half-close was sent when the message arrived; the server ends the call then.
        await self._lost(error, finish_seconds=1.0)

    async def _undo(self, pending: list[PendingRollback]) -> ChangeBatch | None:
        rollbacks = [rollback_of(item) for item in pending]
        policy: Callable[[Rollback], Any] | str | None = self._options.on_rollback
        if policy is None:
            first = rollbacks[0]
            raise RollbackError(
                f"{len(rollbacks)} partitions must roll back, the first is {first.partition}, from seqno "
                f"{first.from_seqno} to {first.seqno}: {first.words}",
                hint='undo the data above and go on: pass on_rollback=a function or "event"',
            )
        if not callable(policy):
            self._offered = [rollback.partition for rollback in rollbacks]
            batch = ChangeBatch([], [], rollbacks)
            self._taken = Taken(batch, None)
            return batch
        for rollback in rollbacks:
            await settle(policy(rollback))
            self._session.rolled_back(rollback.partition)
            self._must_save = True
        return None


class AsyncBatches:
    """Iterates over the frames of an ``AsyncChanges``."""

    def __init__(self, changes: AsyncChanges) -> None:
        self._changes = changes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeBatch:
        batch = await self._changes._next_batch()
        if batch is None:
            raise StopAsyncIteration
        return batch


def _named(partitions: list[int]) -> str:
    if len(partitions) == 1:
        return f"partition {partitions[0]}"
    return f"{len(partitions)} partitions ({', '.join(map(str, partitions[:5]))}, ...)"
