"""The flusher: it moves the tail to the store, slice by slice, when the tail is large or old."""

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import zip_longest

import lmdb

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.bucket import Bucket, FlushPlan
from upr.service.buckets.disk_threads import Disk
from upr.service.storage_trouble import PASSING, Failing
from upr.storage.compact import FlushSlice, Merged
from upr.storage.keyspace import ProducerNumbers

FLUSH_FRACTION = 0.6
"""Part of the tail's limit at which a flush begins, so that it ends before writers must wait."""
_RETRY_SECONDS = 0.25
_Slice = tuple[Merged, dict[bytes, ProducerNumbers]]


class Flusher:
    """Flusher of one bucket: stores the durable part of the tail, slice by slice.

    Args:
        stored: called with the blocks of a slice that was stored: partition, end_seqno, bytes.
        dropped: called with the number of the tail's first entry after entries were dropped.

    Attributes:
        wanted: set to request a flush now.
        busy: whether a flush runs.
        map_full: whether the last flush failed because the store's map was full.
    """

    def __init__(
        self,
        disk: Disk,
        bucket: Bucket,
        config: ServerConfig,
        stored: Callable[[Iterable[tuple[int, int, bytes]]], None],
        dropped: Callable[[int], None],
    ) -> None:
        self._disk = disk
        self._bucket = bucket
        self._store = disk.store
        self._stored = stored
        self._dropped = dropped
        self._tail_bytes = config.tail_bytes
        self._flush_seconds = config.flush_seconds
        self.wanted = asyncio.Event()
        self.busy = False
        self.map_full = False
        self._gave_up = False
        self._flushed = 0
        self._kept = 0
        """Bytes of the tail's limit that are not for large writes yet."""

    @property
    def tail_limit(self) -> int:
        """Most bytes of the tail: the configured limit, or less on a small disk."""
        return min(self._tail_bytes, self._bucket.tail.bytes + max(self._disk.room.left(), 0))

    @property
    def large_limit(self) -> int:
        """Size of the tail in bytes at which writes above SMALL_WRITE_BYTES wait; the others wait at the whole limit.

        What is left of the limit when a flush begins is handed out as slices are stored. So a bulk load waits often and
        briefly, and a small write beside it hardly ever. Where flushes fail, writes are refused at the whole limit.
        """
        kept = 0 if Failing.FLUSH in self._disk.troubles else self._kept
        return self._tail_bytes - kept

    @property
    def begin_bytes(self) -> float:
        return self.tail_limit * FLUSH_FRACTION

    async def run(self) -> None:
        """Flush on request or when the tail is old, until the bucket is closed."""
        while not self._disk.stopping and not self._gave_up:
            removes_again = Failing.SEGMENTS in self._disk.troubles
            try:
                left = max(self._flush_seconds - self._age(), 0.01)
                if removes_again:
                    left = min(left, _RETRY_SECONDS)
                async with asyncio.timeout(min(left, self._flush_seconds)):
                    await self.wanted.wait()
            except TimeoutError:
                if not self.wanted.is_set() and self._age() < self._flush_seconds:
                    if removes_again:
                        await self._remove_dropped()
                    continue
            # Also a request that came as the time was up.
            wanted = self.wanted.is_set()
            self.wanted.clear()
            if not self._disk.stopping:
                flushed = await self._flush_or_retry(wanted=wanted)
                # If nothing may be flushed yet, wait for the next request instead of spinning.
                if flushed and self._is_large:
                    self.wanted.set()

    @property
    def _is_large(self) -> bool:
        tail = self._bucket.tail
        return tail.bytes >= self.begin_bytes and tail.first != tail.durable

    def _age(self) -> float:
        """Return the age of the tail's oldest entry in seconds, at most the time since the last flush; 0 for none.

        What a replica receives may have been written long ago.
        """
        tail = self._bucket.tail
        if tail.first == tail.durable:
            return 0.0
        age = (self._disk.clock.now() - max(tail[tail.first].time, self._flushed)) / 1e6
        # The entry is from the future: the clock was set back before a start. Flush, because it may take hours to catch
        # up.
        return age if age >= 0 else self._flush_seconds

    async def _flush_or_retry(self, *, wanted: bool) -> bool:
        """Flush, and return whether there was something to flush."""
        try:
            flushed = await self.flush(wanted=wanted)
            self._flushed = self._disk.clock.now()
            self.map_full = False
            self._disk.troubles.ends(Failing.FLUSH)
            return flushed
        except PASSING as error:
            self.map_full = isinstance(error, lmdb.MapFullError)
            self._disk.troubles.begins(Failing.FLUSH, error)
            self._disk.changed()
            if self._bucket.failure is not None:
                self._gave_up = True
                return False
            await asyncio.sleep(_RETRY_SECONDS)
            self.wanted.set()
            return False

    async def flush(self, *, wanted: bool) -> bool:
        """Store the durable part of the tail, and drop it; False if there was none. See ``Bucket.begin_flush``."""
        plan = self._bucket.begin_flush(wanted=wanted)
        if plan is None:
            await self._remove_dropped()
            return False
        plan.compress = self._disk.compress
        complete = False
        began = time.monotonic()
        self.busy = True
        # What the flush before has left goes while the first slice is merged.
        left = asyncio.create_task(self._remove_dropped())
        try:
            try:
                await self._flush_slices(plan)
                complete = True
            finally:
                through = self._bucket.end_flush(complete)
                self._dropped(self._bucket.tail.first)
                await left
            try:
                await self._disk.in_journal_thread(lambda: self._disk.journal.drop_through(through))
            finally:
                # The next flush does not wait for it.
                if not self._is_large:
                    await self._remove_dropped()
        finally:
            self.busy = False
            # Journal segments were removed: what waits for room may have it.
            self._disk.room.changed()
            self._disk.changed()
        self._disk.traffic.flushes.add(time.monotonic() - began)
        self._disk.refresh_quota()
        return True

    async def _remove_dropped(self) -> None:
        """Remove dropped journal segments; those that cannot be are tried again. Their rows are stored, so nothing else fails."""
        try:
            await self._disk.in_store_thread(self._disk.journal.remove_dropped)
            self._disk.troubles.ends(Failing.SEGMENTS)
        except OSError as error:
            # The folder of a dropped bucket is renamed meanwhile.
            if self._disk.gone is None:
                self._disk.troubles.begins(Failing.SEGMENTS, error)

    async def _flush_slices(self, plan: FlushPlan) -> None:
        """Store slice by slice; while one is written the next one is merged."""
        parts = await self._disk.in_flush_thread(plan.prepare)
        ahead: asyncio.Task[_Slice] | None = None
        left = max(self._tail_bytes - self._bucket.tail.bytes, 0)
        try:
            for number, (part, following) in enumerate(zip_longest(parts, parts[1:]), 1):
                # With one slice ahead of what is stored a bulk load would wait for each, and a processor for it.
                self._kept = left - left * min(number + 1, len(parts)) // len(parts)
                self._disk.changed()
                merged, producers = await (ahead or self._merge(plan, part))
                ahead = None
                if following is not None:
                    ahead = asyncio.create_task(self._merge(plan, following))
                await self._store_slice(merged, producers)
        finally:
            self._kept = 0
            if ahead is not None and not ahead.cancel() and not ahead.cancelled():
                # It failed as well; asyncio would tell of an error that nobody asked for.
                ahead.exception()
            # Its traceback has this frame, and with it the plan.
            ahead = None

    async def _merge(self, plan: FlushPlan, part: FlushSlice) -> _Slice:
        def merge() -> _Slice:
            merged = plan.merge(part)
            return merged, plan.producer_rows(part, merged)

        return await self._disk.in_flush_thread(merge)

    async def _store_slice(self, merged: Merged, producers: dict[bytes, ProducerNumbers]) -> None:
        ends = self._bucket.flush_ends(merged)

        def store() -> None:
            failpoints.hit("flush.before_commit")
            self._store.put_flush(
                merged.blocks, ends, producers, merged.hashes, self._bucket.counts
            )
            failpoints.hit("flush.after_commit")

        await self._disk.in_store_thread(store)
        self._bucket.slice_stored(merged)
        self._stored(merged.blocks)
        self._disk.counters.flushed_bytes += sum(len(block) for _, _, block in merged.blocks)
        failpoints.hit("flush.between_slices")
