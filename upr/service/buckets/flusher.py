"""The flusher: when the tail goes to the store, and in which steps."""

import asyncio
import logging
from collections.abc import Callable, Iterable

import lmdb

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.bucket import Bucket, FlushPlan
from upr.service import trouble
from upr.service.buckets.disk import Disk
from upr.storage.compact import FlushSlice, Merged
from upr.storage.keyspace import ProducerNumbers

log = logging.getLogger(__name__)

FLUSH_FRACTION = 0.75
"""A flush begins at this part of the tail's limit, so that it is done before writers have to wait."""
_RETRY_SECONDS = 0.25


class Flusher:
    """Stores what the tail holds durably, slice by slice.

    Args:
        stored: called with the partitions of a slice that was stored.

    Attributes:
        wanted: set by whoever wants a flush now.
        busy: whether one is being made, up to the journal's giving back what was stored.
        map_full: whether the last one failed because the store's map has no room.
    """

    def __init__(
        self,
        disk: Disk,
        bucket: Bucket,
        config: ServerConfig,
        stored: Callable[[Iterable[int]], None],
    ) -> None:
        self._disk = disk
        self._bucket = bucket
        self._store = disk.store
        self._stored = stored
        self._tail_bytes = config.tail_bytes
        self._flush_seconds = config.flush_seconds
        self.wanted = asyncio.Event()
        self.busy = False
        self.map_full = False
        self._gave_up = False

    @property
    def tail_limit(self) -> int:
        """What the tail may hold: what the server was told, and less on a small disk."""
        return min(self._tail_bytes, self._bucket.tail.bytes + max(self._disk.room.left(), 0))

    @property
    def begin_bytes(self) -> float:
        """The tail's size from which a flush is wanted."""
        return self.tail_limit * FLUSH_FRACTION

    async def run(self) -> None:
        """Flush when it is wanted or the tail is old, until the bucket is closed."""
        while not self._disk.stopping and not self._gave_up:
            try:
                async with asyncio.timeout(self._seconds_to_flush()):
                    await self.wanted.wait()
            except TimeoutError:
                if not self._tail_is_old():
                    continue
            self.wanted.clear()
            if not self._disk.stopping:
                await self._flush_or_retry()
                tail = self._bucket.tail
                if tail.bytes >= self.begin_bytes and tail.first != tail.durable:
                    # With nothing durable yet, the committer asks for the next one: to go on here would be to spin.
                    self.wanted.set()

    def _seconds_to_flush(self) -> float:
        tail = self._bucket.tail
        if tail.first == tail.durable:
            return self._flush_seconds
        return min(max(self._flush_seconds - self._age(), 0.01), self._flush_seconds)

    def _tail_is_old(self) -> bool:
        tail = self._bucket.tail
        if tail.first == tail.durable:
            return False
        return self._age() >= self._flush_seconds

    def _age(self) -> float:
        """Return the age of the tail's oldest entry in seconds."""
        tail = self._bucket.tail
        age = (self._disk.clock.now() - tail[tail.first].time) / 1e6
        # From the future: the clock was set back before a start, and hours may pass until it is there again.
        return age if age >= 0 else self._flush_seconds

    async def _flush_or_retry(self) -> None:
        try:
            await self.flush()
            self.map_full = False
            self._disk.troubles.ends(trouble.FLUSH)
        except (OSError, lmdb.Error) as error:
            self.map_full = isinstance(error, lmdb.MapFullError)
            self._disk.troubles.begins(trouble.FLUSH, error)
            self._disk.changed()
            if self._bucket.failure is not None:
                self._gave_up = True
                return
            await asyncio.sleep(_RETRY_SECONDS)
            self.wanted.set()

    async def flush(self) -> bool:
        """Store what the tail holds durably, slice by slice, and drop it; False when there was nothing."""
        plan = self._bucket.begin_flush()
        if plan is None:
            return False
        plan.compress = self._disk.compress
        complete = False
        self.busy = True
        try:
            try:
                for part in await self._disk.in_store_thread(plan.prepare):
                    await self._flush_slice(plan, part)
                complete = True
            finally:
                through = self._bucket.end_flush(complete)
            await self._disk.in_journal_thread(lambda: self._disk.journal.drop_through(through))
        finally:
            self.busy = False
            self._disk.journal_dropped()
        await self._disk.in_store_thread(self._disk.quota.refresh)
        return True

    async def _flush_slice(self, plan: FlushPlan, part: FlushSlice) -> None:
        def merge() -> tuple[Merged, dict[bytes, ProducerNumbers]]:
            merged = plan.merge(part)
            return merged, plan.producer_rows(part, merged)

        merged, producers = await self._disk.in_store_thread(merge)
        rows = self._bucket.flush_rows(merged)

        def store() -> None:
            failpoints.hit("flush.before_commit")
            self._store.put_flush(merged.blocks, rows, producers)
            failpoints.hit("flush.after_commit")

        await self._disk.in_store_thread(store)
        self._bucket.slice_stored(merged)
        self._stored(merged.ends)
        self._disk.counters.flushed_bytes += sum(len(block) for _, _, block in merged.blocks)
        failpoints.hit("flush.between_slices")
