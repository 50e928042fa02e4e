"""The cuts of one bucket and the disk: made durable before they are answered, given up when their lease ends.

Every change is decided on the event loop and handed to the store's thread in the same step, so the store sees the
changes in the order in which they were decided.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import lmdb

from upr import failpoints
from upr.engine.cuts import Cut
from upr.storage.keyspace import CutRow
from upr_protocol.errors import CutNotFoundError, ShuttingDownError, StorageFailedError

if TYPE_CHECKING:
    from upr.service.host import BucketHost

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often leases are looked at."""
_T = TypeVar("_T")


class CutKeeper:
    """Makes, renews, releases and expires the cuts of a bucket.

    Args:
        now: returns microseconds since the epoch.
    """

    def __init__(self, host: "BucketHost", now: Callable[[], int]) -> None:
        self._host = host
        self._cuts = host.bucket.cuts
        self._now = now
        self._work: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    async def create(self, name: str, partitions: Sequence[int], lease: int) -> Cut:
        """Make a cut of this instant, and return it when it and everything up to it are durable.

        Args:
            partitions: ascending, each once.
            lease: microseconds.

        Raises:
            ShuttingDownError: the server is stopping.
            StorageFailedError: journal or store failed; there is no cut.
            CutNotFoundError: somebody released it before it was answered.
            AlreadyExistsError, TooManyError, PartitionNotActiveError: see ``Cuts.create``.
        """
        if self._stopping.is_set():
            raise ShuttingDownError("the server is stopping", hint="connect again")
        cut = self._host.bucket.create_cut(name, partitions, lease, self._now())
        await self._whole(self._make_durable(cut))
        return cut

    async def _make_durable(self, cut: Cut) -> None:
        try:
            await self._host.durable(cut.end_entry - 1)
            self._check_not_released(cut)
            await self._store({cut.name: cut.row()})
            self._check_not_released(cut)
        except BaseException:
            self._cuts.forget(cut)
            raise
        cut.durable = True

    def _check_not_released(self, cut: Cut) -> None:
        if not self._cuts.has(cut):
            raise CutNotFoundError(f"cut {cut.name!r} was released while it was made")

    async def renew(self, name: str, lease: int | None) -> Cut:
        """Have a lease begin anew, and return the cut when that is durable; None for the lease that it has.

        Raises:
            CutNotFoundError: there is none of that name, or its lease has ended.
            StorageFailedError: the store failed; the lease is longer, but perhaps not after a restart.
        """
        cut = self._cuts.renew(name, lease, self._now())
        await self._whole(self._store({name: cut.row()}))
        return cut

    async def release(self, name: str) -> bool:
        """Give a cut up, durably; False when there was none.

        Raises:
            StorageFailedError: the store failed; the cut is still there.
        """
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

    def live(self) -> list[Cut]:
        """Return the cuts whose lease has not ended, oldest first."""
        return self._cuts.live(self._now())

    # In the background

    async def run(self) -> None:
        """Give up what has expired, about once a second, until ``stop``."""
        while not self._stopping.is_set():
            self._expire()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _expire(self) -> None:
        ended = self._cuts.ended(self._now())
        for cut in ended:
            log.info("the lease of a cut has ended", extra={"cut": cut.name})
            self._cuts.forget(cut)
        if ended:
            # A row that stays because this fails is expired at the next start too.
            self._begin(self._store({cut.name: None for cut in ended}))

    def stop(self) -> None:
        """Have ``run`` return; no more cuts are made."""
        self._stopping.set()

    async def finish(self) -> None:
        """Wait for what has begun."""
        await asyncio.gather(*self._work, return_exceptions=True)

    # The store

    async def _store(self, changes: Mapping[str, CutRow | None]) -> None:
        rows = {name.encode(): row for name, row in changes.items()}

        def store() -> None:
            failpoints.hit("cuts.before_commit")
            self._host.store.put_cuts(rows)
            failpoints.hit("cuts.after_commit")

        try:
            await self._host.in_store_thread(store)
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"cuts could not be stored: {error}", hint="see the server's log", retriable=True
            ) from error

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Do something that is not stopped half-way when its caller goes away."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), StorageFailedError):
            log.error("a change of cuts failed", extra={"error": error.message})

    async def _whole(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.shield(self._begin(work))
