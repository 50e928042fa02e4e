"""Following changes: the loop that connects, starts, receives, undoes, stores positions, and calls handlers."""

import logging
import random
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from upr_client import backoff
from upr_client._async.call import BucketHandle, Follow, Stubs
from upr_client._async.io import (
    Background,
    Event,
    Queue,
    Semaphore,
    give_way,
    maybe_await,
    mutex,
    now,
    run_blocking,
)
from upr_client.changes.events import Change, ChangeBatch, Marker, Rollback
from upr_client.changes.ledger import Ledger
from upr_client.changes.link import Clock
from upr_client.changes.options import CONCURRENCY, RETRIES, ChangesOptions, HandlingOptions, failed
from upr_client.changes.session import Following, Step
from upr_client.changes.status import ChangesStatus
from upr_client.endpoints import SILENT_REASON
from upr_protocol.errors import (
    ClosedError,
    FencedError,
    InvalidArgumentError,
    UnavailableError,
    UprError,
)
from upr_protocol.position import Position


class Storing:
    """Where the positions of one ``AsyncChanges`` go.

    Args:
        mutex: guards ``following``.
        say: takes words for people.
        tell: takes what the server is to know once positions are stored.
    """

    def __init__(
        self,
        bucket: BucketHandle,
        options: ChangesOptions,
        following: Following,
        mutex: AbstractContextManager[Any],
        say: Callable[[str], None],
        tell: Callable[[Any], None],
    ) -> None:
        self._bucket = bucket
        self._store = options.store
        self._following = following
        self._mutex = mutex
        self._say = say
        self._tell = tell
        self._turn = Semaphore(1)

    async def save(self) -> None:
        """Store what changed.

        Raises:
            UprError: it could not be stored; what the server may take later is said and not raised.
        """
        self._bucket.connection.check_process()
        await self._turn.take()
        try:
            await self._save()
        finally:
            self._turn.give_back()

    async def _save(self) -> None:
        with self._mutex:
            positions = self._following.begin_save()
        in_server = self._following.ownership is not None
        refused: list[int] = []
        if self._store is None and not in_server:
            positions = {}
        elif positions:
            try:
                if self._store is not None:
                    await run_blocking(self._store.save, positions)
                else:
                    refused = await self._save_in_server(positions)
            except BaseException as error:
                with self._mutex:
                    self._following.not_saved(positions, wait=in_server)
                if in_server and isinstance(error, UprError) and error.retriable:
                    self._say(f"positions were not stored: {error}; trying again")
                    return
                raise
        with self._mutex:
            message = self._following.saved(positions, refused)
        if message is not None:
            self._tell(message)

    async def _save_in_server(self, positions: dict[int, Position]) -> list[int]:
        ownership = self._following.ownership
        assert ownership is not None
        version = self._following.session.bucket_version
        request = ownership.save_request(self._bucket.name, version, positions)
        connection = self._bucket.connection
        answer = await connection.ask(connection.stubs().streams.SavePositions, request)
        return [refused.partition for refused in answer.refused_partitions]

    async def load(self) -> None:
        """Load from the server what is to be loaded.

        Raises:
            UprError: the server did not answer.
        """
        ownership = self._following.ownership
        assert ownership is not None
        version = self._following.session.bucket_version
        request = ownership.load_request(self._bucket.name, version)
        connection = self._bucket.connection
        answer = await connection.ask(connection.stubs().streams.LoadPositions, request)
        with self._mutex:
            self._following.loaded(answer)


Lane = Queue[Change | None]
"""What is handled one after the other, up to the first None."""


class Handling:
    """One ``AsyncChanges.run``.

    Args:
        handler: takes a change; what it returns is waited for, if that can be.
    """

    def __init__(
        self, changes: "AsyncChanges", handler: Callable[[Change], Any], options: HandlingOptions
    ) -> None:
        self._changes = changes
        self._handler = handler
        self._options = options
        self._lanes = [Lane() for _ in range(options.concurrency)]
        self._mutex = mutex()
        self._under_way = 0
        self._idle = Event()
        self._idle.set()
        self._leaving = Event()
        self._failure: tuple[Change, BaseException] | None = None

    async def run(self) -> None:
        """Handle everything until the end.

        Raises:
            HandlerError: a change could not be handled, and there is nobody to take it.
            UprError: as iterating raises.
        """
        workers = [Background(partial(self._work, lane), "upr-handler") for lane in self._lanes]
        try:
            async for batch in self._changes.batches():
                if batch.rollbacks:
                    await self.drain()
                    await self._tell(batch.rollbacks)
                self._share(batch)
            await self.drain()
        except ClosedError:
            if self._failure is None:
                raise
        finally:
            self._leaving.set()
            for lane in self._lanes:
                lane.put(None)
            for worker in workers:
                await worker.join()
        if self._failure is not None:
            raise failed(*self._failure)

    async def drain(self) -> None:
        """Wait until everything that was handed out is handled."""
        await self._idle.wait()

    async def _tell(self, rollbacks: list[Rollback]) -> None:
        for rollback in rollbacks:
            if self._options.on_rollback_event is not None:
                await maybe_await(self._options.on_rollback_event(rollback))

    def _share(self, batch: ChangeBatch) -> None:
        by_key, count = self._options.order == "key", len(self._lanes)
        for change in batch.changes:
            number = zlib.crc32(change.key) if by_key else change.partition
            with self._mutex:
                self._under_way += 1
                self._idle.clear()
            self._lanes[number % count].put(change)

    async def _work(self, lane: Lane) -> None:
        while (change := await lane.get()) is not None:
            try:
                if not self._leaving.is_set() and self._changes._may_handle(change):
                    await self._handle(change)
            except BaseException as error:
                # Also a handler that was cancelled: a lane that is gone would hold its changes up for ever.
                self._fail(change, error)
            finally:
                with self._mutex:
                    self._under_way -= 1
                    if not self._under_way:
                        self._idle.set()

    async def _handle(self, change: Change) -> None:
        attempt = 0
        while True:
            try:
                await maybe_await(self._handler(change))
                break
            except Exception as error:
                if attempt >= self._options.retries:
                    if await self._give_up(change, error):
                        break
                    return
                seconds = backoff.delay(attempt, random.random())
                attempt += 1
                if await self._leaving.wait(seconds):
                    return
                if not self._changes._may_handle(change):
                    return
        self._changes.ack(change)

    async def _give_up(self, change: Change, error: Exception) -> bool:
        """Give a change that cannot be handled to who takes those; False when nobody does."""
        if self._options.dead_letter is not None:
            try:
                await maybe_await(self._options.dead_letter(change, error))
                return True
            except Exception as second:
                error = second
        self._fail(change, error)
        return False

    def _fail(self, change: Change, error: BaseException) -> None:
        self._failure = self._failure or (change, error)
        self._leaving.set()
        self._changes._stop()


_logger = logging.getLogger("upr_client")


class AsyncChanges:
    """The changes of a bucket; made by ``AsyncBucket.changes``, used with ``async with`` and then iterated.

    A position moves past what was yielded when the next item is asked for; with ``acknowledge="manual"`` past what
    was acknowledged.
    """

    def __init__(self, bucket: BucketHandle, options: ChangesOptions) -> None:
        self._bucket = bucket
        self._options = options
        self._following = Following(
            options,
            say=self._say,
            clock=Clock(now, time.time, random.random),
            bucket=bucket.name,
        )
        self._follow: Follow | None = None
        self._stubs: Stubs | None = None
        # Acknowledgements may come from other threads, in the flavour that has threads.
        self._mutex = mutex()
        self._storing = Storing(
            bucket, options, self._following, self._mutex, self._say, self._send
        )
        self._unreported: deque[str] = deque(maxlen=1024)
        self._entered = False
        self._closing = Event()
        self._closed = False
        self._before_undo: Callable[[], Any] | None = None

    @property
    def handshakes(self) -> deque[tuple[int, str, str]]:
        """The newest rollback answers: partition, rule, words."""
        return self._following.handshakes

    # Beginning and end.

    async def __aenter__(self) -> Self:
        self._bucket.connection.check_usable()
        if self._closed:
            raise ClosedError("the changes were closed", hint="ask the bucket for new ones")
        store = self._options.store
        partitions = self._following.session.partitions
        self._following.load({} if store is None else await run_blocking(store.load, partitions))
        self._entered = True
        self._bucket.connection.open.append(self.close)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Store the positions of what was consumed and end the call. Doing it twice is harmless.

        A member of a group hands its partitions over at once. In a process that was forked off it does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._bucket.connection.is_foreign:
            return
        self._closing.set()
        if self.close in self._bucket.connection.open:
            self._bucket.connection.open.remove(self.close)
        in_server = self._following.ownership is not None
        try:
            if in_server and self._entered:
                # Before the call ends: its end hands over.
                await self._last_save()
            await self._drop_call(self._bucket.connection.connect_timeout if in_server else 0.0)
        finally:
            if self._entered and not in_server:
                await self.save()
            self._following.taken = None

    async def _last_save(self) -> None:
        try:
            await self.save()
        except FencedError as error:
            # The other owner goes on from what was stored before.
            self._say(str(error))

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the changes were closed", hint="ask the bucket for new ones")
        if not self._entered:
            raise ClosedError("the changes are not open", hint="use them in a with statement")
        self._bucket.connection.check_usable()

    # What can be asked.

    def position(self, partition: int) -> Position:
        """The position of what was consumed of a partition; it may be newer than the one stored."""
        with self._mutex:
            self._following.acknowledge_part()
            return self._following.position(partition)

    def positions(self) -> dict[int, Position]:
        """The positions of all partitions that are followed."""
        with self._mutex:
            self._following.acknowledge_part()
            following = self._following
            return {p: following.position(p) for p in following.session.partitions}

    def lag(self) -> dict[int, int]:
        """For each partition, by how many seqnos the server is ahead, as far as it told."""
        with self._mutex:
            self._following.acknowledge_part()
            return self._following.session.lag()

    def status(self) -> ChangesStatus:
        """Return how far following is, how fast it goes, and which partitions cannot go on."""
        with self._mutex:
            self._following.acknowledge_part()
            return self._following.status(self._follow is not None)

    @property
    def generation(self) -> int:
        """The newest generation of the consumer's ownership; 0 where positions are not kept in the server."""
        ownership = self._following.ownership
        return 0 if ownership is None else ownership.generation

    # Storing.

    async def save(self) -> None:
        """Store the positions that changed, in one atomic write; nothing without a position store.

        Raises:
            FencedError: another owner follows under the consumer's name by now, and stores its positions.
        """
        try:
            await self._storing.save()
        finally:
            self._report()

    # Acknowledging.

    def ack(self, change: Change) -> bool:
        """Take a change as dealt with, in any order and from any task; with ``acknowledge="manual"`` only.

        The position moves to the last change before the first one that is not acknowledged.

        Returns:
            False for a change that does not wait any more: it was acknowledged before, a rollback undid it, or its
            partition went to another member of the group.

        Raises:
            InvalidArgumentError: the change was never handed out, or acknowledging is automatic.
        """
        with self._mutex:
            waited = self._ledger().acknowledge(change)
        self._acknowledged()
        return waited

    def ack_batch(self, batch: ChangeBatch) -> None:
        """Take all changes of a batch as dealt with, as ``ack``.

        Raises:
            InvalidArgumentError: acknowledging is automatic.
        """
        with self._mutex:
            ledger = self._ledger()
            ledger.acknowledge_batch(batch)
        self._acknowledged()

    def _ledger(self) -> Ledger:
        ledger = self._following.ledger
        if ledger is None:
            raise InvalidArgumentError(
                "acknowledging is automatic here: asking for the next item acknowledges",
                hint='pass acknowledge="manual" to changes()',
            )
        return ledger

    def _acknowledged(self) -> None:
        follow = self._follow
        if follow is not None and self._following.waits_for_acknowledgements:
            follow.wake()

    # Iterating.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change | Marker | Rollback:
        following = self._following
        while True:
            taken = following.taken
            event = None if taken is None else taken.next_event()
            if event is None:
                if await self._next_batch() is None:
                    raise StopAsyncIteration
                self._hand_out()
                continue
            if following.ownership is None:
                return event
            await self._keep_share()
            with self._mutex:
                if following.may_hand_out(event.partition):
                    return event

    def _hand_out(self) -> None:
        with self._mutex:
            self._following.hand_out()

    async def _keep_share(self) -> None:
        """Renew a member's lease, and learn what is its own, while the application has not asked for more."""
        follow, following = self._follow, self._following
        if follow is None:
            return
        while (message := follow.told()) is not None:
            with self._mutex:
                outcome = following.take(message, follow.highs())
            if outcome.lost is not None:
                await self._lost(outcome.lost)
                return
        with self._mutex:
            messages, awaiting = following.renewals()
        for request in messages:
            follow.send(request)
        if awaiting:
            await give_way()

    def batches(self) -> "AsyncBatches":
        """Iterate over whole frames, which is many times as fast as change by change."""
        return AsyncBatches(self)

    async def _next_batch(self) -> ChangeBatch | None:
        self._check_usable()
        with self._mutex:
            self._following.acknowledge()
        while True:
            self._report()
            if self._closing.is_set():
                raise ClosedError("the changes were closed")
            with self._mutex:
                step = self._following.next_step(self._follow is not None)
            if step is Step.FINISH:
                break
            batch = None
            if step is Step.RECEIVE:
                batch = await self._receive()
            elif step is Step.UNDO:
                batch = await self._undo()
            elif step is Step.CONNECT:
                await self._connect()
            elif step is Step.LOAD:
                await self._load()
            elif step is Step.SAVE:
                await self._save()
            else:
                with self._mutex:
                    message = self._following.release()
                self._send(message)
            if batch is not None:
                return batch
        # First, so that the last acknowledgement still goes over this call.
        await self.save()
        await self._drop_call(self._bucket.connection.connect_timeout)
        return None

    async def _load(self) -> None:
        try:
            await self._storing.load()
        except InvalidArgumentError:
            raise
        except UprError as error:
            await self._lost(error)

    async def _save(self) -> None:
        try:
            await self.save()
        except FencedError as error:
            with self._mutex:
                self._following.fenced(error)

    async def run(
        self,
        handler: Callable[[Change], Any],
        *,
        concurrency: int = CONCURRENCY,
        order: Literal["partition", "key"] = "partition",
        retries: int = RETRIES,
        dead_letter: Callable[[Change, Exception], Any] | None = None,
        on_rollback_event: Callable[[Rollback], Any] | None = None,
    ) -> None:
        """Hand each change to a function and acknowledge it when that returned; needs ``acknowledge="manual"``.

        A rollback is told when everything that was handed out before it is handled. What waits behind a change that
        fails is handled meanwhile, but the position stays before it.

        Args:
            handler: takes a change; what it returns is waited for, if that can be.
            concurrency: how many are handled at a time, 1 to 1024.
            order: "partition": those of a partition one after the other. "key": those of a key.
            retries: how often a change is tried again, after growing pauses, when the handler raises.
            dead_letter: takes a change that failed as often, and its error; it then counts as handled.
            on_rollback_event: with ``on_rollback="event"`` or "restart": takes each rollback.

        Raises:
            HandlerError: a change failed and there is no ``dead_letter``, or that failed too; the changes are closed.
            InvalidArgumentError: a value is out of its range.
            UprError: as iterating raises.
        """
        self._ledger()
        options = HandlingOptions(
            concurrency=concurrency,
            order=order,
            retries=retries,
            dead_letter=dead_letter,
            on_rollback_event=on_rollback_event,
        )
        handling = Handling(self, handler, options)
        self._before_undo = handling.drain
        try:
            await handling.run()
        finally:
            self._before_undo = None

    def _may_handle(self, change: Change) -> bool:
        with self._mutex:
            ended = self._closing.is_set() or self._following.has_lapsed
            return not ended and self._ledger().waits(change)

    def _stop(self) -> None:
        """Have the iteration end with ClosedError; from any task."""
        self._closing.set()
        follow = self._follow
        if follow is not None:
            follow.wake()

    async def _undo(self) -> ChangeBatch | None:
        if self._before_undo is not None:
            await self._before_undo()
        policy = self._options.on_rollback
        with self._mutex:
            rollbacks = self._following.rollbacks()
            if not callable(policy):
                return self._following.offer(rollbacks)
        for rollback in rollbacks:
            await maybe_await(policy(rollback))
            with self._mutex:
                self._following.rolled_back(rollback)
        return None

    # The call.

    def _say(self, words: str) -> None:
        _logger.info("%s: %s", self._bucket.name, words)
        self._unreported.append(words)

    def _report(self) -> None:
        """Tell the application what was said: between two steps, because it may raise, wait, or ask something."""
        while self._unreported:
            words = self._unreported.popleft()
            if self._options.on_status is not None:
                self._options.on_status(words)

    def _send(self, message: Any) -> None:
        follow = self._follow
        if follow is not None:
            follow.send(message)

    async def _connect(self) -> None:
        request = self._following.open_message(self._bucket.name)
        try:
            self._stubs = self._bucket.connection.stubs()
            self._follow = follow = Follow(self._stubs.streams.Follow, request)
            if self._closing.is_set():
                raise ClosedError("the changes were closed")
            opened = await follow.opened(self._bucket.connection.connect_timeout)
            with self._mutex:
                self._following.opened(opened)
        except UprError as error:
            if self._following.not_opened(error):
                await self._drop_call()
            else:
                await self._lost(error)
            return
        except BaseException:
            # Cancelled: nobody knows that this call was accepted.
            await self._drop_call()
            raise
        self._bucket.version = opened.bucket_version

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
        connection, stubs = self._bucket.connection, self._stubs
        if stubs is not None:
            self._stubs = None
            connection.failed(error, stubs)
            if error.reason == SILENT_REASON and isinstance(error, UnavailableError):
                await connection.give_up(stubs)
        if self._closed:
            raise ClosedError("the changes were closed")
        with self._mutex:
            seconds = self._following.lost(error)
        self._report()
        if await self._closing.wait(seconds):
            raise ClosedError("the changes were closed")

    async def _receive(self) -> ChangeBatch | None:
        follow, following = self._follow, self._following
        if follow is None:
            # Closed by another thread.
            return None
        with self._mutex:
            outcome = following.take_held(follow.highs())
            messages, seconds = following.due() if outcome is None else ([], None)
        for message in messages:
            follow.send(message)
        if outcome is None:
            try:
                received = await follow.next(seconds)
            except UprError as error:
                await self._lost(error)
                return None
            if received is None:
                return None
            with self._mutex:
                outcome = following.take(received, follow.highs())
        if outcome.lost is not None:
            await self._lost(outcome.lost, outcome.finish_seconds)
        return outcome.batch


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
        self._changes._hand_out()
        return batch
