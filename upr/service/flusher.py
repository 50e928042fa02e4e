"""From the tail to the store: when, and in which steps."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import lmdb

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.flush import FlushPlan
from upr.storage.keyspace import ProducerRow
from upr.storage.merge import FlushSlice, Merged
from upr_protocol.limits import PRODUCER_SECONDS, PRODUCERS_MAX

if TYPE_CHECKING:
    from upr.service.host import BucketHost

log = logging.getLogger(__name__)

FLUSH_FRACTION = 0.75
"""A flush begins at this part of the tail's limit, so that it is done before writers have to wait."""
_RETRY_SECONDS = 0.25
_FORGET_SECONDS = 3600.0


class Flusher:
    """Stores what the tail holds durably, slice by slice.

    Attributes:
        wanted: set by whoever wants a flush now.
        begin_bytes: the tail's size from which one is wanted.
        map_full: whether the last one failed because the store's map has no room.

    Args:
        now: returns microseconds since the epoch.
    """

    def __init__(self, host: "BucketHost", config: ServerConfig, now: Callable[[], int]) -> None:
        self._host = host
        self._bucket = host.bucket
        self._store = host.store
        self._now = now
        self._flush_seconds = config.flush_seconds
        self.wanted = asyncio.Event()
        self.begin_bytes = config.tail_bytes * FLUSH_FRACTION
        self.map_full = False

    async def run(self) -> None:
        """Flush when it is wanted or the tail is old, until the host stops."""
        forget_at = 0.0
        while not self._host.stopping:
            if time.monotonic() >= forget_at:
                forget_at = time.monotonic() + _FORGET_SECONDS
                await self._forget_or_leave()
            try:
                async with asyncio.timeout(self._seconds_to_flush()):
                    await self.wanted.wait()
            except TimeoutError:
                if not self._tail_is_old():
                    continue
            self.wanted.clear()
            if not self._host.stopping:
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
        age = (self._now() - tail[tail.first].time) / 1e6
        # From the future: the clock was set back, and hours may pass until it is there again.
        return age if age >= 0 else self._flush_seconds

    async def _flush_or_retry(self) -> None:
        try:
            await self.flush()
            self.map_full = False
        except (OSError, lmdb.Error) as error:
            self.map_full = isinstance(error, lmdb.MapFullError)
            log.error("flush failed, retrying", extra={"error": str(error)})
            await asyncio.sleep(_RETRY_SECONDS)
            self.wanted.set()

    async def flush(self) -> bool:
        """Store what the tail holds durably, slice by slice, and drop it; False when there was nothing."""
        plan = self._bucket.begin_flush()
        if plan is None:
            return False
        plan.compress = self._host.compress
        complete = False
        try:
            for part in await self._host.in_store_thread(plan.prepare):
                await self._flush_slice(plan, part)
            complete = True
        finally:
            through = self._bucket.end_flush(complete)
            self._host.changed()
        await self._host.in_journal_thread(lambda: self._host.journal.drop_through(through))
        return True

    async def _flush_slice(self, plan: FlushPlan, part: FlushSlice) -> None:
        def merge() -> tuple[Merged, dict[tuple[bytes, int], ProducerRow]]:
            merged = plan.merge(part)
            return merged, plan.producer_rows(part, merged)

        merged, producers = await self._host.in_store_thread(merge)
        rows = self._bucket.flush_rows(merged)

        def store() -> None:
            failpoints.hit("flush.before_commit")
            self._store.put_flush(merged.blocks, rows, producers)
            failpoints.hit("flush.after_commit")

        await self._host.in_store_thread(store)
        self._bucket.slice_stored(merged)
        self._host.merger.note(merged.ends)
        self._host.counters.flushed_bytes += sum(len(block) for _, _, block in merged.blocks)
        failpoints.hit("flush.between_slices")

    async def _forget_or_leave(self) -> None:
        try:
            await self.forget_producers()
        except (OSError, lmdb.Error) as error:
            # There is no hurry: what stays is forgotten the next time.
            log.error("producers were not forgotten", extra={"error": str(error)})

    async def forget_producers(self) -> None:
        """Forget the producers that have not written for long, and the oldest above PRODUCERS_MAX."""
        before = self._now() - PRODUCER_SECONDS * 1_000_000
        gone = await self._host.in_store_thread(
            lambda: self._store.forget_producers(before, PRODUCERS_MAX)
        )
        if gone:
            log.info("producers forgotten", extra={"count": gone})
