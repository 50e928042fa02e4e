"""Keepers: background workers for the cuts, consumers, members and producers of one bucket.

*Cuts* are durable before they are answered, and released when their lease ends. Every change is decided on the event
loop and handed to the store's thread in the same step, so the store writes them in the order of the decisions.

*Consumers*: acknowledged positions are stored about once a second, saved ones at once. An unused consumer expires, so
that it holds neither purging nor a place. Leases of *members* end on time, whatever their calls do.

*Producers* are loaded from the store when they connect or retry a write; idle ones expire.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from upr import failpoints
from upr.engine.bucket import Bucket
from upr.engine.consumers import Consumers, Save
from upr.engine.cuts import Cut
from upr.engine.groups import NEVER, Owners, fenced
from upr.engine.producers import ProducerCall
from upr.service.buckets.disk_threads import Disk
from upr.service.storage_trouble import PASSING, Failing, Troubles, words_of
from upr.storage.keyspace import ConsumerRow, CutRow, ProducerRow
from upr_protocol.errors import (
    CutNotFoundError,
    ShuttingDownError,
    StorageFailedError,
    TooManyError,
    shown,
)
from upr_protocol.limits import LEASE_SECONDS_MIN, PRODUCER_SECONDS, PRODUCERS_MAX

LEASE_LOOK_SECONDS: Final = 1.0
"""Longest interval between checks of leases. No lease is shorter, so none begins and ends in between."""
assert LEASE_LOOK_SECONDS <= LEASE_SECONDS_MIN

AGAIN_SECONDS: Final = 1.0
TELL_SECONDS: Final = 60.0
"""Pause before work that has ended begins anew, and the least time from one line of the log about it to the next."""
_T = TypeVar("_T")
log = logging.getLogger(__name__)


def micros(seconds: float) -> int:
    """Return a time of the event loop's clock, or a duration, in the engine's microseconds."""
    return round(seconds * 1e6)


def loop_micros() -> int:
    """Return the time on the clock of leases, microseconds."""
    return micros(asyncio.get_running_loop().time())


async def pause(stopping: asyncio.Event, seconds: float | None) -> None:
    """Wait for a time, None for any, or until a worker is to stop."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()


async def lasting(work: Callable[[], Awaitable[None]]) -> None:
    """Do work that lasts as long as the server; begin it anew where memory, or a thread, was not to be had for it."""
    told_at: float | None = None
    while True:
        try:
            return await work()
        except (MemoryError, RuntimeError) as error:
            if told_at is None or time.monotonic() > told_at + TELL_SECONDS:
                log.error("work in the background begins anew", exc_info=error)
                told_at = time.monotonic()
            await asyncio.sleep(AGAIN_SECONDS)


async def finish_even_if_cancelled(task: asyncio.Task[_T]) -> _T:
    """Wait for a task that completes even if the waiting caller is cancelled."""
    # Retrieve the exception, or asyncio logs it as never retrieved.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def end_leases(owners: Owners, stopping: asyncio.Event) -> None:
    """End members' leases on time, also those of members whose call was lost, until ``stopping``."""
    loop = asyncio.get_running_loop()
    while not stopping.is_set():
        owners.tick(micros(loop.time()))
        deadline = owners.deadline
        left = LEASE_LOOK_SECONDS if deadline == NEVER else deadline / 1e6 - loop.time()
        await pause(stopping, min(max(left, 0.001), LEASE_LOOK_SECONDS))


CUT_LOOK_SECONDS = 1.0
"""Interval between checks of leases."""


class CutKeeper:
    """Keeper of cuts: creates, renews, releases and expires those of a bucket.

    Args:
        durable: waits until a tail entry is on disk.
        stored: called when a change is stored.
        stopping: once it is set, new cuts are refused.
    """

    def __init__(
        self,
        disk: Disk,
        bucket: Bucket,
        durable: Callable[[int], Awaitable[None]],
        stored: Callable[[], None],
        stopping: asyncio.Event,
    ) -> None:
        self._stored = stored
        self._disk = disk
        self._bucket = bucket
        self._durable = durable
        self._cuts = bucket.cuts
        self._now = disk.clock.now
        self._work: set[asyncio.Task[Any]] = set()
        self._stopping = stopping

    async def create(
        self, name: str, partitions: Sequence[int], lease: int, holder: str = ""
    ) -> Cut:
        """Create a cut of this instant, and return it when it and everything up to it are durable.

        Args:
            partitions: ascending, each once.
            lease: microseconds.
            holder: the requesting peer.

        Raises:
            ShuttingDownError: the server is stopping.
            StorageFailedError: journal or store failed; there is no cut.
            CutNotFoundError: another call released it before it was answered.
            AlreadyExistsError, TooManyError, PartitionNotActiveError: see ``Cuts.create``.
        """
        if self._stopping.is_set():
            raise ShuttingDownError("the server is stopping", hint="connect again")
        cut = self._bucket.create_cut(name, partitions, lease, self._now(), holder)
        await self._whole(self._make_durable(cut))
        return cut

    async def _make_durable(self, cut: Cut) -> None:
        try:
            await self._durable(cut.end_entry - 1)
            self._check_not_released(cut)
            await self._store({cut.name: cut.row()})
            self._check_not_released(cut)
        except BaseException:
            self._cuts.forget(cut)
            raise
        cut.durable = True

    def _check_not_released(self, cut: Cut) -> None:
        if not self._cuts.has(cut):
            raise CutNotFoundError(f"cut {shown(cut.name)} was released while it was made")

    async def renew(self, name: str, lease: int | None) -> Cut:
        """Renew a lease, and return the cut when that is durable; None keeps the length of the lease.

        Raises:
            CutNotFoundError: there is none of that name, or its lease has ended.
            StorageFailedError: the store failed; the lease is renewed, but perhaps not after a restart.
        """
        cut = self._cuts.renew(name, lease, self._now())
        await self._whole(self._store({name: cut.row()}))
        return cut

    async def release(self, name: str) -> bool:
        """Release a cut, durably; False if there was none. After StorageFailedError it still exists."""
        self._expire()
        cut = self._cuts.remove(name)
        if cut is None:
            return False
        await self._whole(self._give_up(cut))
        return True

    async def _give_up(self, cut: Cut) -> None:
        try:
            await self._store({cut.name: None})
        except StorageFailedError:
            self._cuts.put_back(cut)
            raise
        self._cuts.forget(cut)

    # In the background

    async def run(self) -> None:
        """Release expired cuts, about once a second, until ``stopping``."""
        while not self._stopping.is_set():
            self._expire()
            await pause(self._stopping, CUT_LOOK_SECONDS)

    def _expire(self) -> None:
        ended = self._cuts.ended(self._now())
        for cut in ended:
            told = {"bucket": self._bucket.identity.name, "cut": cut.name}
            log.info("the lease of a cut has ended", extra=told)
            self._cuts.forget(cut)
        if ended:
            # If this fails, the row stays, and expires at the next start as well.
            self._begin(self._store({cut.name: None for cut in ended}))

    async def finish(self) -> None:
        """Wait for changes that have begun."""
        await asyncio.gather(*self._work, return_exceptions=True)

    # The store

    async def _store(self, changes: Mapping[str, CutRow | None]) -> None:
        rows = {name.encode(): row for name, row in changes.items()}

        def store() -> None:
            failpoints.hit("cuts.before_commit")
            self._disk.store.put_cuts(rows)
            failpoints.hit("cuts.after_commit")

        try:
            await self._disk.in_store_thread(store)
        except PASSING as error:
            self._disk.troubles.begins(Failing.CUTS, error)
            raise StorageFailedError(
                f"cuts could not be stored: {words_of(error)}",
                hint="see the server's log",
                retriable=True,
            ) from error
        self._disk.troubles.ends(Failing.CUTS)
        self._stored()

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run to completion even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        # Retrieve the exception, or asyncio logs it as never retrieved.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _whole(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.shield(self._begin(work))


SAVE_SECONDS = 1.0
SAVE_ROWS = 4096
"""Approximate rows in one transaction."""

Rows = dict[tuple[bytes, int], ConsumerRow | None]


@dataclass(eq=False)
class ConsumerSaver:
    """Saver of one bucket's consumers: stores their changes, one transaction after the other.

    Args:
        _write: writes the rows that a function returns, in one transaction; calls it in the store thread.
    """

    _consumers: Consumers
    _write: Callable[[Callable[[], Rows]], Awaitable[None]]
    _troubles: Troubles
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _removing: Collection[str] = ()
    _begun: dict[asyncio.Task[None], str] = field(default_factory=dict)
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def run(self, stopping: asyncio.Event) -> None:
        """Save about once a second until ``stopping``, and retry failures; unsaved changes need one more ``save`` then."""
        while not stopping.is_set():
            # Failed changes are kept for the retry, and the trouble is recorded.
            with suppress(*PASSING):
                await self.save()
            await pause(stopping, SAVE_SECONDS)

    async def save(self) -> None:
        """Store everything that was acknowledged up to now.

        Raises:
            OSError, lmdb.Error, MemoryError: the store cannot be written; unsaved changes are kept for the next time.
        """
        async with self._one_at_a_time:
            while await self._save_some():
                pass

    async def _save_some(self) -> bool:
        changes = self._consumers.take_changes(SAVE_ROWS)
        if changes is None:
            return False
        self._removing = changes.removed
        try:
            await self._put(changes.rows)
        except BaseException:
            self._consumers.put_back(changes)
            raise
        finally:
            self._removing = ()
        return True

    # Positions that consumers save

    def in_order(self, name: str) -> asyncio.Lock:
        """Return the lock that keeps a consumer's saves in the order of arrival, though each takes several steps."""
        turns = self._turns.get(name)
        if turns is None:
            turns = self._turns[name] = asyncio.Lock()
        return turns

    def begin(self, save: Save, ended: Callable[[], None]) -> "asyncio.Task[None]":
        """Add a save and store it, also if the caller does not wait for the task.

        Args:
            ended: called when it is stored or has failed.

        The task raises StorageFailedError if nothing was stored, and FencedError if its consumer was forgotten.

        Raises:
            TooManyError: see ``Saves.add``; ``ended`` is not called.
        """
        self._consumers.saves.add(save)
        task = asyncio.create_task(self._store(save, ended))
        self._begun[task] = save.name
        task.add_done_callback(self._done)
        return task

    async def _store(self, save: Save, ended: Callable[[], None]) -> None:
        try:
            async with self._one_at_a_time:
                # The holder of the lock stores the saves of all tasks that wait for it.
                while not save.ended:
                    await self._store_waiting()
        except PASSING as error:
            self._give_up(save, error)
        except BaseException as error:
            self._give_up(save, error)
            raise
        finally:
            ended()
        if save.void:
            raise fenced(f"consumer {shown(save.name)} was forgotten meanwhile")
        if save.failure is not None:
            raise StorageFailedError(
                f"the positions could not be stored: {words_of(save.failure)}",
                hint="save them again",
                retriable=True,
            ) from save.failure

    def _give_up(self, save: Save, why: BaseException) -> None:
        """Give a save up for good: it may have failed while it waited, before the store got it."""
        save.failure = why
        if not save.ended:
            self._consumers.saves.failed([save], why)

    async def _store_waiting(self) -> None:
        while self._consumers.is_removing:
            # Remove rows of a forgotten consumer first, or the removal would hit rows that it writes again.
            await self._save_some()
        saves = self._consumers.saves
        taken = saves.take(SAVE_ROWS)

        def rows() -> Rows:
            failpoints.hit("positions.before_commit")
            # The later of two rows with one key counts.
            return {key: row for save in taken for key, row in save.rows().items()}

        try:
            await self._put(rows)
        except BaseException as error:
            saves.failed(taken, error)
            raise
        saves.stored(taken)

    async def _put(self, rows: Callable[[], Rows]) -> None:
        try:
            await self._write(rows)
        except PASSING as error:
            self._troubles.begins(Failing.POSITIONS, error)
            raise
        self._troubles.ends(Failing.POSITIONS)

    def _done(self, task: "asyncio.Task[None]") -> None:
        del self._begun[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StorageFailedError):
            log.error("positions of a consumer were not stored", extra={"error": str(error)})

    async def settled(self, name: str) -> None:
        """Wait for a consumer's pending saves, and for the removal of its forgotten rows from the store.

        Raises:
            OSError, lmdb.Error, MemoryError: the removal fails; after a crash the rows would be back.
        """
        begun = [task for task, owner in self._begun.items() if owner == name]
        if begun:
            await asyncio.wait(begun)
        if name in self._removing or self._consumers.is_forgetting(name):
            async with self._one_at_a_time:
                while self._consumers.is_forgetting(name):
                    await self._save_some()

    async def finish(self) -> None:
        """Wait for all saves that have begun."""
        await asyncio.gather(*self._begun, return_exceptions=True)


FORGET_SECONDS = 60.0
"""Interval between searches for expired producers. Without any, a search reads one entry of an index."""
_PAUSE_SECONDS = 0.02
"""Pause between two transactions that remove producers, so that flushes and first writes have their turn."""
_WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProducerKeeper:
    """Keeper of producers: opens those of a bucket, and expires them. ``_flush`` requests a flush."""

    _disk: Disk
    _bucket: Bucket
    _flush: Callable[[], None]
    _stopping: asyncio.Event

    async def open(self, name: bytes) -> ProducerCall:
        """Return a call of a producer, loaded from the store if necessary.

        Raises:
            TooManyError: the memory for producers is full.
            DataDamagedError: its rows in the store are damaged.
            BucketGoneError: the bucket was dropped.
        """
        disk, bucket = self._disk, self._bucket
        deadline = time.monotonic() + _WAIT_SECONDS
        asked_at = bucket.tail.end
        while True:
            first, last = bucket.tail.first, None
            if not bucket.knows_producer(name):
                last = await disk.in_reader(lambda: disk.store.producer_number(name))
            if first != bucket.tail.first and not bucket.knows_producer(name):
                # Read again if the tail was shortened meanwhile: its rows may be in the store now.
                continue
            disk.check_not_gone()
            try:
                return bucket.open_producer(name, last)
            except TooManyError:
                # A flush helps: producers whose writes are stored need no memory. One that was refused must not have
                # the tail flushed again and again while others write.
                if bucket.tail.first >= asked_at or time.monotonic() > deadline:
                    raise
                self._flush()
                await disk.next_change()

    async def stored(self, name: bytes) -> dict[int, ProducerRow]:
        """Return a producer's rows in the store by partition; what it wrote here since then is in the tail."""
        disk, tail = self._disk, self._bucket.tail
        while True:
            first = tail.first
            rows = await disk.in_reader(lambda: disk.store.producer_rows(name))
            if tail.first == first:
                return rows

    async def run(self) -> None:
        """Expire idle producers, until ``stopping``."""
        while not self._stopping.is_set():
            try:
                await self.forget()
                self._disk.troubles.ends(Failing.PRODUCERS)
            except PASSING as error:
                # Expiry can wait: the next round retries.
                self._disk.troubles.begins(Failing.PRODUCERS, error)
            await pause(self._stopping, FORGET_SECONDS)

    async def forget(self) -> int:
        """Expire idle producers, and the oldest above PRODUCERS_MAX; return how many.

        In bounded transactions with pauses, so that others wait for at most one of them.
        """
        store = self._disk.store
        before = self._disk.clock.before(PRODUCER_SECONDS * 1_000_000)
        count, more = 0, True
        while more and not self._stopping.is_set():
            gone = await self._disk.in_store_thread(
                lambda: store.forget_producers(before, PRODUCERS_MAX)
            )
            count, more = count + gone.names, gone.more
            if more:
                await pause(self._stopping, _PAUSE_SECONDS)
        if count:
            told = {"bucket": self._bucket.identity.name, "count": count}
            log.info("producers forgotten", extra=told)
        return count


EXPIRY_LOOKS: Final = 10
"""Checks within the time of expiry; at least one an hour."""
EXPIRY_LOOK_SECONDS_MAX: Final = 3600.0


async def expire_consumers(
    disk: Disk, bucket: Bucket, seconds: float, rest: Callable[[float], Awaitable[bool]]
) -> None:
    """Expire unused consumers, until ``rest`` returns False; the next save removes their rows."""
    while await rest(min(seconds / EXPIRY_LOOKS, EXPIRY_LOOK_SECONDS_MAX)):
        before, names = disk.clock.before(int(seconds * 1e6)), [*bucket.consumers, *bucket.owners]
        used = {name for name in names if is_connected(bucket, name)}
        for name in bucket.consumer_positions.expire(before, disk.clock.now(), used):
            log.info(
                "a consumer is forgotten, nobody has used it for long",
                extra={"bucket": bucket.identity.name, "consumer": name, "seconds": int(seconds)},
            )


def is_connected(bucket: Bucket, consumer: str) -> bool:
    """Return whether a consumer, or a member of it, has an open call."""
    group = bucket.owners.group(consumer)
    return consumer in bucket.consumers or (group is not None and group.has_calls)
