"""Following changes: the loop that connects, starts, receives, undoes, stores positions, and calls handlers."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Self

from upr_client._async.call import BucketHandle, Follow, Stubs
from upr_client._async.handling import Handling
from upr_client._async.io import (
    Background,
    Event,
    Semaphore,
    begin_connecting,
    check_callbacks,
    from_anywhere,
    give_way,
    maybe_await,
    mutex,
    now,
    own_thread,
    run_blocking,
)
from upr_client._async.position_storage import STOP_SECONDS, PositionStorage
from upr_client._async.waiters import Waiters
from upr_client.changes.events import Change, ChangeBatch, Marker, Rollback
from upr_client.changes.ledger import Ledger
from upr_client.changes.link import Clock, boot_seconds
from upr_client.changes.options import CONCURRENCY, RETRIES, ChangesOptions, HandlingOptions
from upr_client.changes.session import Following, Step
from upr_client.changes.status import ChangesStatus
from upr_client.endpoints import was_silent
from upr_client.writes import WriteResult, WriteResults, token_of
from upr_protocol.errors import (
    ClosedError,
    FencedError,
    InvalidArgumentError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import WriteToken, check_partition
from upr_protocol.limits import QUIET_SECONDS, check_wait
from upr_protocol.position import Position

_logger = logging.getLogger("upr_client")

POLL_SECONDS: Final = 0.5
"""Longest wait of ``ready`` before it looks again at who receives."""
_RENEWAL_SECONDS: Final = 0.2
"""Interval at which a lease is looked at while the application has its time; leases have a second or more."""


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
            clock=Clock(now, time.time, random.random, boot_seconds),
            bucket=bucket.name,
        )
        self._follow: Follow | None = None
        self._route = bucket.connection.follower(options.any_server)
        self._stubs: Stubs | None = None
        # Whether the call did what it is for.
        self._worked = False
        # Acknowledgements may come from other threads, in the flavour that has threads.
        self._mutex = mutex()
        self._storage = PositionStorage(
            bucket, options, self._following, self._mutex, self._say, self._send
        )
        self._unreported: deque[str] = deque(maxlen=1024)
        self._entered = self._interrupted = False
        # Set by ``stop`` and ``close``: nothing more is handed out.
        self._ending = Event()
        self._end_soon: Callable[[], None] = self._end
        self._closed = False
        self._check_thread = own_thread()
        # Held while something is received, so that ``ready`` does not do so beside an iteration.
        self._receiving = Semaphore(1)
        self._asked = 0
        self._moved = Event()
        self._waiters = Waiters()
        # What the last request for an item ended with.
        self._failure: Exception | None = None
        self._handling: Handling | None = None
        # Handed out to a ``run`` that was cancelled, which did not handle it.
        self._left: list[Change] = []

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
        stored: Mapping[int, Position] = {}
        if store is not None:
            # Loading takes about as long as connecting.
            begin_connecting(self._bucket.connection.raw(self._route.current)[-1])
            stored = await run_blocking(store.load, partitions)
        self._following.load(stored)
        self._entered = True
        self._end_soon = from_anywhere(self._end)
        self._check_thread = own_thread()
        self._bucket.connection.open.append(self._close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Store the positions of what was consumed and end the call. Doing it twice is harmless.

        A member of a group hands its partitions over at once. In a process that was forked off it does nothing. A server
        that keeps the positions may take the client's ``request_timeout``; one that says nothing is then left.
        """
        await self._close(self._bucket.connection.request_timeout)

    async def _close(self, seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        if self._bucket.connection.is_foreign:
            return
        self._ending.set()
        self._waiters.wake()
        if self._close in self._bucket.connection.open:
            self._bucket.connection.open.remove(self._close)
        in_server, until = self._following.ownership is not None, now() + seconds
        try:
            if in_server and self._entered:
                # Before the call ends: its end hands over.
                if not self._interrupted:
                    await self._storage.save_last(seconds)
                self._report()
                await self._tell_revoked(of_all=True)
        finally:
            try:
                left = self._storage.patience(max(until - now(), 0.0))
                await self._drop_call(left if in_server else 0.0)
            finally:
                if self._entered and not in_server:
                    await self.save()
                self._following.taken = None

    def stop(self) -> None:
        """Have the iteration, or ``run``, end soon as if there were nothing more; returns at once.

        What is being handled is handled to its end, positions are stored, and what was received and not handed out
        comes again the next time. From any thread or task, and from a signal handler.
        """
        if not self._closed:
            self._end_soon()

    def _end(self) -> None:
        self._ending.set()
        self._waiters.wake()
        handling, follow = self._handling, self._follow
        if handling is not None:
            handling.leave()
        if follow is not None:
            follow.wake()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the changes were closed", hint="ask the bucket for new ones")
        if not self._entered:
            raise ClosedError("the changes are not open", hint="use them in a with statement")
        self._bucket.connection.check_usable()

    # Queries.

    def position(self, partition: int) -> Position:
        """The position of what was consumed of a partition; it may be newer than the one stored."""
        check_partition(partition)
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
        """Return for each partition by how many seqnos the server is ahead, as of its last report."""
        with self._mutex:
            self._following.acknowledge_part()
            return self._following.session.lag()

    def status(self) -> ChangesStatus:
        """Return progress, rates, and the partitions with problems."""
        with self._mutex:
            self._following.acknowledge_part()
            return self._following.status(self._follow is not None)

    @property
    def generation(self) -> int:
        """The newest generation of the consumer's ownership; 0 where positions are not kept in the server."""
        ownership = self._following.ownership
        return 0 if ownership is None else ownership.generation

    async def reached(self, token: WriteToken | WriteResult | WriteResults, seconds: float) -> None:
        """Wait until what was written is dealt with: received, and then acknowledged, or followed by a further request.

        Another task or thread iterates meanwhile. What is not followed is not waited for; of a group's member that is what
        is another member's by then.

        Args:
            token: the result of a write, or its token.
            seconds: how long to wait at most.

        Raises:
            BehindError: it was not reached in time, or is of another bucket than the one that is followed.
            WriteUndoneError: a failover undid it.
            ClosedError: the changes were closed or stopped, or came to their end.
            UprError: the iteration ended with it.
        """
        writes = token_of(token)

        def is_reached() -> bool:
            with self._mutex:
                self._following.acknowledge_part()
            if self._has(writes):
                return True
            self._check_usable()
            if self._failure is not None:
                raise self._failure
            if self._ending.is_set():
                raise ClosedError("the changes were stopped", hint="ask the bucket for new ones")
            return False

        await self._waiters.until_reached(is_reached, seconds)

    def _has(self, token: WriteToken, complete: Sequence[int] | None = None) -> bool:
        with self._mutex:
            return self._following.has(token, complete)

    # Storing.

    async def save(self) -> None:
        """Store the positions that changed, in one atomic write; nothing without a position store.

        Nothing after a KeyboardInterrupt in the middle of receiving: what it met may be half done, and comes again.

        Raises:
            FencedError: another owner follows under the consumer's name by now, and stores its positions.
        """
        if self._interrupted:
            return
        try:
            await self._storage.save()
        finally:
            self._report()

    # Acknowledging.

    def ack(self, change: Change) -> bool:
        """Take a change as dealt with, in any order; with ``acknowledge="manual"`` only.

        The position moves to the last change before the first one that waits. From any thread; with asyncio from the event loop's only.

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
            self._ledger().acknowledge_batch(batch)
        self._acknowledged()

    def _ledger(self) -> Ledger:
        ledger = self._following.ledger
        if ledger is None:
            raise InvalidArgumentError(
                "acknowledging is automatic here: asking for the next item acknowledges",
                hint='pass acknowledge="manual" to changes()',
            )
        self._check_thread()
        return ledger

    def _acknowledged(self) -> None:
        self._waiters.wake()
        follow = self._follow
        if follow is not None and self._following.waits_for_acknowledgements:
            follow.wake()

    # Iterating.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change | Marker | Rollback:
        following = self._following
        while True:
            if following.ownership is not None and following.taken is not None:
                # First: whoever is cancelled there has taken nothing.
                await self._keep_share()
            taken = following.taken
            event = None if taken is None else taken.next_event()
            if event is not None and self._ending.is_set():
                with self._mutex:
                    following.let_go()
                event = None
            if event is None:
                if await self._next_item() is None:
                    raise StopAsyncIteration
                continue
            with self._mutex:
                if following.ownership is None or following.may_hand_out(event.partition):
                    return event

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
        """Iterate over whole frames, which is many times as fast as change by change.

        Small frames that came while the application was busy are one batch, up to 512 KiB: who is slow gets more at a time.

        With ``on_rollback="event"`` and "restart" a ``Rollback`` comes as an item of its own.
        """
        return AsyncBatches(self)

    async def ready(self, seconds: float | None = None) -> bool:
        """Wait until every partition was started: whatever is written from then on will be handed out.

        With ``start="now"`` that is when now is. It connects by itself, so that it may come before the iteration, and
        beside one of another task or thread it waits for that one to go on. Between two items of its own task's iteration
        it would wait for itself.

        Args:
            seconds: how long to wait at most, about; None for ever.

        Returns:
            False when the time passed, the changes were stopped, or a ``Rollback`` is to be taken by iterating first.

        Raises:
            UprError: as iterating raises.
        """
        if seconds is not None:
            check_wait(seconds, endless=True)
        until = None if seconds is None else now() + seconds
        while True:
            self._check_usable()
            # Before the look at what it tells of, so that nothing is missed in between.
            self._moved.clear()
            with self._mutex:
                if self._following.is_started and not self._ending.is_set():
                    return True
                # What is in hand is not in its position yet: only the task that has it receives and connects again.
                busy = self._asked or self._following.taken is not None
            if self._ending.is_set() or (until is not None and now() >= until):
                return False
            if busy or not await self._receiving.try_take():
                await self._moved.wait(
                    POLL_SECONDS if until is None else min(until - now(), POLL_SECONDS)
                )
                continue
            try:
                if not await self._start(until):
                    return False
            finally:
                self._receiving.give_back()
                self._moved.set()

    async def _start(self, until: float | None) -> bool:
        """Do what comes before the first frame; False when the application has to undo something first."""
        following = self._following
        following.holding = True
        try:
            while not (following.is_started or self._ending.is_set() or self._asked):
                step = await self._next_step()
                left = None if until is None else until - now()
                if left is not None and left <= 0:
                    break
                if step is Step.FINISH or (
                    step is Step.UNDO and self._options.on_rollback in ("event", "restart")
                ):
                    return False
                await self._do(step, left)
        finally:
            following.holding = False
        return True

    async def _next_item(self) -> ChangeBatch | Rollback | None:
        """Return what is handed out next; None at the end."""
        self._check_usable()
        with self._mutex:
            self._asked += 1
            self._failure = None
            follow = self._follow
        try:
            if not await self._receiving.try_take():
                if follow is not None:
                    # Whoever receives in ``ready`` makes room.
                    follow.wake()
                await self._receiving.take()
        finally:
            with self._mutex:
                self._asked -= 1
        try:
            item = await self._go_on()
            if item is None and not self._ending.is_set():
                self._failure = ClosedError(
                    "the changes came to their end", hint="ask the bucket for new ones"
                )
            return item
        except KeyboardInterrupt:
            self._interrupted = self._follow is None or not self._follow.waits
            raise
        except StopAsyncIteration as error:
            # Of a function of the application, or its store: whoever iterates would take it for the end.
            words = "a callback or position store raised what ends an iteration"
            self._failure = RuntimeError(words)
            raise self._failure from error
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._receiving.give_back()
            self._moved.set()
            self._waiters.wake()

    async def _go_on(self) -> ChangeBatch | Rollback | None:
        with self._mutex:
            self._following.acknowledge()
        self._waiters.wake()
        while not self._ending.is_set():
            step = await self._next_step()
            if step is Step.FINISH:
                break
            item = await self._do(step)
            if not self._moved.is_set() and self._following.is_started:
                self._moved.set()
            if item is not None:
                with self._mutex:
                    self._following.hand_out()
                return item
        if self._closed:
            raise ClosedError("the changes were closed")
        if self._handling is not None:
            await self._call(self._handling.drain)
        # First, so that the last acknowledgement still goes over this call.
        await self.save()
        seconds = self._bucket.connection.connect_timeout
        if self._ending.is_set():
            if self._following.ownership is not None:
                # ``close`` ends the call: what is acknowledged until then counts, and a member lets its partitions go
                # before the next owner begins.
                return None
            # What is said last is of use and not needed: a server that hangs holds up nobody who was stopped.
            seconds = min(seconds, STOP_SECONDS)
        await self._drop_call(seconds)
        return None

    async def _next_step(self) -> Step:
        self._report()
        await self._tell_revoked()
        with self._mutex:
            return self._following.next_step(self._follow is not None)

    def _not_undone(self) -> None:
        """Take back a rollback that was handed out and not undone: it comes again."""
        with self._mutex:
            self._following.let_go()

    async def _do(self, step: Step, seconds: float | None = None) -> ChangeBatch | Rollback | None:
        """Do a step; waits for a message no longer than ``seconds``."""
        if step is Step.RECEIVE:
            return await self._receive(seconds)
        if step is Step.UNDO:
            return await self._undo()
        if step is Step.CONNECT:
            await self._connect()
        elif step is Step.LOAD:
            await self._load()
        elif step is Step.SAVE:
            await self._save()
        else:
            with self._mutex:
                given = self._following.let_go_of_share()
            try:
                await self._tell_revoked()
            finally:
                with self._mutex:
                    message = self._following.release(given)
                self._send(message)
        return None

    async def _load(self) -> None:
        try:
            found = await self._storage.load()
        except InvalidArgumentError:
            raise
        except UprError as error:
            await self._lost(error)
            return
        anew: Mapping[int, Position | None] = {} if self._closed else found
        group = self._options.group
        if anew and group is not None and group.on_assigned is not None:
            try:
                given = await self._call(group.on_assigned, sorted(anew)) or {}
                if not given.keys() <= anew.keys():
                    raise InvalidArgumentError(
                        f"on_assigned returned partitions {sorted(given)[:5]}; must be among those it was given"
                    )
            except BaseException:
                with self._mutex:
                    self._following.not_begun(anew)
                raise
            anew = {**anew, **given}
        with self._mutex:
            self._following.begin(anew)
        if self._closed:
            await self._tell_revoked(of_all=True)

    async def _tell_revoked(self, *, of_all: bool = False) -> None:
        with self._mutex:
            revoked = self._following.take_revoked(of_all)
        group = self._options.group
        if revoked and group is not None and group.on_revoked is not None:
            await self._call(group.on_revoked, revoked)

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
            on_rollback_event: takes each rollback; needed with ``on_rollback="event"`` and "restart".

        Raises:
            HandlerError: a change failed and there is no ``dead_letter``, or that failed too; the changes are stopped.
            InvalidArgumentError: a value is out of its range, or nobody takes the rollbacks.
            UprError: as iterating raises.
        """
        self._ledger()
        options = HandlingOptions(concurrency, order, retries, dead_letter, on_rollback_event)
        options.check_rollbacks(self._options.on_rollback)
        check_callbacks(
            handler=handler, dead_letter=dead_letter, on_rollback_event=on_rollback_event
        )
        if self._handling is not None:
            raise InvalidArgumentError(
                "run is under way already; must be called once at a time",
                hint="concurrency= handles several changes at a time",
            )
        self._handling = Handling(self, handler, options)
        try:
            # One that was cancelled, by a timeout for example, may be followed by another.
            await self._handling.run([] if self._ending.is_set() else self._left)
        finally:
            self._handling = None

    def _may_handle(self, change: Change) -> bool:
        with self._mutex:
            return not self._closed and self._following.may_handle(change)

    def _handled(self, change: Change) -> None:
        with self._mutex:
            self._ledger().acknowledge(change, itself=True)
        self._acknowledged()

    async def _undo(self) -> Rollback | None:
        if self._handling is not None:
            await self._call(self._handling.drain)
        policy = self._options.on_rollback
        with self._mutex:
            rollback = self._following.rollback()
            if not callable(policy):
                return self._following.offer(rollback)
        await self._call(policy, rollback)
        with self._mutex:
            self._following.undone(rollback)
        return None

    async def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call what may take the application's time, and renew a member's lease meanwhile."""
        if self._options.group is None:
            return await maybe_await(function(*arguments))
        returned = Event()
        renewing: Background | None = None
        try:
            renewing = Background(partial(self._renew, returned), "upr-lease")
            return await maybe_await(function(*arguments))
        finally:
            returned.set()
            if renewing is not None:
                await renewing.join()

    async def _renew(self, returned: Event) -> None:
        # It ends with the call too, where a KeyboardInterrupt came before anything could say that this has returned.
        while not await returned.wait(_RENEWAL_SECONDS) and self._follow is not None:
            with self._mutex:
                messages = self._following.renewals()[0]
            for message in messages:
                self._send(message)

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
        # A member leaves its group by the half-close: a call that is cancelled keeps its share for a lease.
        leave_seconds = 0.0 if self._following.ownership is None else STOP_SECONDS
        try:
            self._worked = False
            self._stubs = self._bucket.connection.stubs(self._route)
            follow = Follow(self._stubs.streams.Follow, request, self._following.heard)
            self._follow = follow
            opened = await self._opened(follow)
            connection = self._bucket.connection
            connection.learn(opened.servers)
            with self._mutex:
                self._following.opened(opened, self._stubs.endpoint, len(connection.endpoints))
        except UprError as error:
            if self._following.not_opened(error):
                await self._drop_call()
            else:
                await self._lost(error, leave_seconds if self._ending.is_set() else 0.0)
            return
        except BaseException:
            # Cancelled: the accepted call has no owner, so end it.
            await self._drop_call(leave_seconds)
            raise
        # Following goes on in a bucket that was created anew; keys and writes of this object stay with the one before.
        self._bucket.version = self._bucket.version or opened.bucket_version
        # Any server opens a call, also one that then is behind.
        self._worked = not self._options.any_server

    async def _opened(self, follow: Follow) -> Any:
        longest = self._bucket.connection.connect_timeout
        until = now() + longest
        while True:
            seconds = min(max(until - now(), 0.0), QUIET_SECONDS)
            opened = await follow.opened(seconds, self._ending.is_set)
            if opened is not None:
                return opened
            if now() >= until:
                words = f"the server did not accept the call within {longest:g} s"
                raise UnavailableError(words, hint="is it overloaded?")
            await self._look_elsewhere()

    async def _look_elsewhere(self) -> None:
        """Raise the reason to go on at another server, if that is the active one now and this one says nothing."""
        stubs = self._stubs
        if stubs is None or self._options.any_server:
            return
        error = await self._bucket.connection.elsewhere(stubs, self._bucket.name)
        if error is not None:
            raise error

    async def _is_slow(self, follow: Follow, error: UprError) -> bool:
        """Whether only this call is silent: behind a large message on a slow link no heartbeat gets through.

        It may be that only its connection is dead. TCP ends that within ten seconds, as what is asked over it is not
        acknowledged, and gRPC within a minute where something in between acknowledges.
        """
        stubs = self._stubs
        if stubs is None or not was_silent(error) or error.owner:
            return False
        silent = self._bucket.connection.silent
        gone = await self._call(silent, stubs, self._bucket.name, follow.interval)
        return gone is None and follow.answered()

    async def _drop_call(self, finish_seconds: float = 0.0) -> None:
        follow, self._follow = self._follow, None
        if follow is not None:
            await (follow.finish(finish_seconds) if finish_seconds else follow.cancel())

    async def _lost(self, error: UprError, finish_seconds: float = 0.0) -> None:
        """The call is lost: wait before the next one, or raise what trying again does not mend."""
        await self._drop_call(finish_seconds)
        if self._ending.is_set():
            return
        connection, stubs = self._bucket.connection, self._stubs
        longest: float | None = None
        if stubs is not None:
            self._stubs = None
            longest = connection.lost(error, stubs, self._worked)
            if was_silent(error):
                await connection.give_up(stubs)
        with self._mutex:
            seconds = self._following.lost(error, longest)
        self._report()
        await self._ending.wait(seconds)

    async def _receive(self, limit: float | None) -> ChangeBatch | None:
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
            if limit is not None:
                seconds = limit if seconds is None else min(seconds, limit)
            try:
                received = await follow.next(seconds)
                if received is None and follow.is_late:
                    await self._look_elsewhere()
            except UprError as error:
                if not await self._is_slow(follow, error):
                    await self._lost(error)
                return None
            if received is None:
                return None
            with self._mutex:
                outcome = following.take(received, follow.highs())
        self._worked = self._worked or outcome.batch is not None
        if outcome.consumed is not None:
            follow.consumed(outcome.consumed)
        if outcome.lost is not None:
            await self._lost(outcome.lost, outcome.finish_seconds)
        return outcome.batch


class AsyncBatches:
    """Iterates over the batches of an ``AsyncChanges``, and its rollbacks."""

    def __init__(self, changes: AsyncChanges) -> None:
        self._changes = changes

    def __aiter__(self) -> Self:
        return self

    # Any stands for Rollback: only who asked for "event" or "restart" gets one.
    async def __anext__(self) -> ChangeBatch | Any:
        item = await self._changes._next_item()
        if item is None:
            raise StopAsyncIteration
        return item
