"""A bucket as a dictionary that is kept up to date."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Self

from upr_client._async.call import BucketHandle
from upr_client._async.changes import AsyncChanges
from upr_client._async.io import Background, Cancelled, Event, mutex
from upr_client._async.waiters import Waiters
from upr_client.changes.events import Change, ChangeBatch, Rollback
from upr_client.changes.options import ChangesOptions, Only
from upr_client.positions import MemoryPositions
from upr_client.writes import WriteResult, WriteResults, token_of
from upr_protocol.block import check_row
from upr_protocol.errors import ClosedError
from upr_protocol.failover import WriteToken, check_partition
from upr_protocol.limits import PARTITIONS, check_wait
from upr_protocol.partitioning import partition_of


class AsyncView:
    """Keys and values of a bucket, in memory and kept up to date; made by ``AsyncBucket.materialize``.

    Used with ``async with``, and read like a dictionary. It has everything that was in the bucket when it was entered
    once ``ready`` returned. After a rollback a partition is read anew and shows nothing before, because what it showed
    may never have happened. When following ended with an error, reading raises that error: it never shows silently
    what is not kept up any more.
    """

    def __init__(
        self,
        bucket: BucketHandle,
        only: Only,
        at_markers: bool,
        on_status: Callable[[str], Any] | None,
        read_from: str,
    ) -> None:
        self._bucket = bucket
        self._only = only
        self._read_from = read_from
        self._on_status = on_status
        self._at_markers = at_markers
        self._shown: list[dict[bytes, bytes | None]] = [{} for _ in range(PARTITIONS)]
        # What no marker has completed yet, where that is waited for.
        self._pending: dict[int, list[Change]] = {}
        # Up to where each partition is shown, and the newest marker of each that is shown.
        self._seqnos = [0] * PARTITIONS
        self._complete = [0] * PARTITIONS
        self._positions = MemoryPositions()
        self._changes: AsyncChanges | None = None
        self._reader: Background | None = None
        self._mutex = mutex()
        self._ready = Event()
        self._waiters = Waiters()
        self._leaving = False
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        self._bucket.connection.check_usable()
        if self._reader is not None:
            raise ClosedError("the view was entered before", hint="ask the bucket for a new one")
        self._reader = Background(self._read, "upr-view")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End following. Doing it twice is harmless, and in a process that was forked off it does nothing."""
        if self._bucket.connection.is_foreign:
            return
        self._leaving = True
        if self._changes is not None:
            self._changes.stop()
        if self._reader is not None:
            await self._reader.join()

    async def _read(self) -> None:
        try:
            await self._follow(until_now=True)
            if not self._leaving:
                self._ready.set()
                await self._follow(until_now=False)
        except Cancelled:
            self._failure = ClosedError("the view was cancelled")
            raise
        except Exception as error:
            self._failure = error
        finally:
            if self._failure is None:
                self._failure = ClosedError(
                    "the view was closed", hint="ask the bucket for a new one"
                )
            self._ready.set()
            self._waiters.wake()

    async def _follow(self, until_now: bool) -> None:
        options = ChangesOptions(
            resume=self._positions,
            until="now" if until_now else None,
            only=self._only,
            on_rollback="restart",
            on_status=self._on_status,
            read_from=self._read_from,
        )
        changes = AsyncChanges(self._bucket, options)
        async with changes:
            self._changes = changes
            if self._leaving:
                return
            async for batch in changes.batches():
                with self._mutex:
                    self._take(batch)
                self._waiters.wake()

    def _take(self, batch: ChangeBatch | Rollback) -> None:
        """Take what came, in the order in which it came within each partition."""
        if isinstance(batch, Rollback):
            self._pending.pop(batch.partition, None)
            self._shown[batch.partition] = {}
            self._seqnos[batch.partition] = self._complete[batch.partition] = 0
            return
        if not self._at_markers:
            for change in batch.changes:
                self._apply(change)
                self._seqnos[change.partition] = change.seqno
            for marker in batch.markers:
                self._seqnos[marker.partition] = self._complete[marker.partition] = marker.seqno
            return
        for event in batch.events():
            if isinstance(event, Change):
                self._pending.setdefault(event.partition, []).append(event)
                continue
            for change in self._pending.pop(event.partition, ()):
                self._apply(change)
            self._seqnos[event.partition] = self._complete[event.partition] = event.seqno

    def _apply(self, change: Change) -> None:
        shown = self._shown[change.partition]
        if change.op == "delete":
            shown.pop(change.key, None)
        else:
            shown[change.key] = change.value

    # Reading.

    async def ready(self, seconds: float | None = None) -> bool:
        """Wait until everything is there that was there at first; False when ``seconds`` passed before.

        Raises:
            UprError: following ended with it.
        """
        self._check()
        if seconds is not None:
            check_wait(seconds, endless=True)
        if not await self._ready.wait(seconds):
            return False
        self._check()
        return True

    async def reached(self, token: WriteToken | WriteResult | WriteResults, seconds: float) -> None:
        """As ``AsyncChanges.reached``, until what was written is shown, or what came after it."""
        writes = token_of(token)

        def is_reached() -> bool:
            self._check()
            changes = self._changes
            with self._mutex:
                return changes is not None and changes._has(writes, self._complete)

        await self._waiters.until_reached(is_reached, seconds)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._reader is None:
            raise ClosedError("the view is not open", hint="use it in a with statement")

    def seqno(self, partition: int) -> int:
        """Up to which seqno a partition is shown.

        Raises:
            InvalidArgumentError: there is no such partition.
        """
        return self._seqnos[check_partition(partition)]

    def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """Return a key's value, or the default; InvalidArgumentError for what cannot be a key."""
        self._check()
        check_row(key, None)
        with self._mutex:
            return self._shown[partition_of(key)].get(key, default)

    def __getitem__(self, key: bytes) -> bytes | None:
        self._check()
        check_row(key, None)
        with self._mutex:
            return self._shown[partition_of(key)][key]

    def __contains__(self, key: object) -> bool:
        self._check()
        return isinstance(key, bytes) and key in self._shown[partition_of(key)]

    def __len__(self) -> int:
        self._check()
        return sum(map(len, self._shown))

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _ in self.items())

    def keys(self) -> Iterator[bytes]:
        """The keys, partition by partition. ``dict(view.items())`` makes a copy also while keys are deleted."""
        return iter(self)

    def values(self) -> Iterator[bytes | None]:
        """The values, in the order of ``keys``."""
        return (value for _, value in self.items())

    def items(self) -> Iterator[tuple[bytes, bytes | None]]:
        """The keys with their values, partition by partition."""
        self._check()
        # A partition's in one step, so that what arrives meanwhile does no harm.
        return chain.from_iterable(list(shown.items()) for shown in self._shown)
