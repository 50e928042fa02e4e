"""State of a bucket that follows an upstream."""

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from upr.engine.bucket import Bucket
from upr.engine.cuts import Cut
from upr.service.buckets.disk_threads import Disk
from upr_protocol.block import U64
from upr_protocol.errors import UprError
from upr_protocol.limits import PARTITIONS


class UpstreamState:
    """How a bucket follows its upstream, as operators see it.

    Attributes:
        address: HOST:PORT that it follows, or tries to.
        connected: whether its streams are open.
        joining: whether rows may have come without what the small tables say of them; stored, so it outlives a crash. None
            where it may be stored otherwise.
        whole: while ``joining`` is not False: up to which seqnos nothing of the small tables is missing, shape (1024,).
        is_partial: whether it follows in some partitions only, so that it is not in step with its upstream.
        tables: whether the upstream has sent all of its small tables.
        rows: while it sends them: by consumer, in which partitions it sent a row, shape (1024,).
        told: how many changes of them it has sent; see Tables.changes.
        needed: the seqnos that they name, shape (1024,).
        refused: the partitions that the upstream does not send, and why.
        undone: mutations that were undone since the server was started.
        problem: why it does not follow now; None while it does.
        highs: the newest seqnos that the upstream named, shape (1024,).
    """

    def __init__(self, bucket: Bucket, disk: Disk, undone: int = 0) -> None:
        self._bucket = bucket
        self._disk = disk
        self.address = ""
        self.connected = False
        self.is_partial = False
        stored = disk.store.joining()
        self.joining: bool | None = stored is not None
        self._wanted = self.joining
        self.whole = np.zeros(PARTITIONS, np.uint64)
        self._held: Cut | None = None
        if stored is not None:
            # What was not durable is gone, and a part may be undone since.
            whole = np.minimum(stored, bucket.partitions.complete)
            if (whole < stored).any():
                # What comes in its place is of the join, after the next start too.
                disk.store.put_joining(whole)
            self._hold(whole)
        self.begin_tables()
        self.refused: dict[int, UprError] = {}
        self.undone = undone
        self.problem: UprError | None = None
        self.highs = np.zeros(PARTITIONS, np.uint64)
        self._level = time.monotonic()

    def begin_tables(self) -> None:
        """The upstream tells its small tables from their beginning."""
        self.tables, self.told = False, 0
        self.needed = np.zeros(PARTITIONS, np.uint64)
        self.rows: dict[str, npt.NDArray[np.bool_]] = {}

    async def set_joining(self, joining: bool) -> None:
        """Store whether rows may come without what the small tables say of them.

        What is whole by then stays as it is meanwhile: it is all that this server may be relied on for.

        Raises:
            OSError, lmdb.Error: it cannot be stored.
        """
        was_wanted, self._wanted = self._wanted, joining
        if self.joining == joining:
            return
        if joining and not was_wanted:
            # Also where it is not known whether the end of the last join was stored: it had come.
            self._hold(self._bucket.partitions.complete.copy())
        # A call that is cancelled here does not know what is stored: the next one stores in any case.
        self.joining = None
        whole, store = self.whole if joining else None, self._disk.store
        await self._disk.in_store_thread(lambda: store.put_joining(whole))
        if self._wanted != joining:
            # Another call stores the opposite behind this one, and what is whole stays pinned until then.
            return
        self.joining = joining
        if not joining:
            self.release()
        self._disk.changed()

    async def end_join(self) -> bool:
        """Store that the join has come to its end, if it has; return whether that was to be stored.

        Raises:
            OSError, lmdb.Error: it cannot be stored.
        """
        ends = self.in_step and self.joining is not False
        if ends:
            await self.set_joining(False)
        return ends

    async def is_whole_up_to(self, seqnos: Mapping[int, int]) -> None:
        """Store that in these partitions nothing of the small tables is missing up to a seqno, as a server told them.

        Raises:
            OSError, lmdb.Error: it cannot be stored.
        """
        if self.joining is not False:
            whole, store = self.whole.copy(), self._disk.store
            partitions = list(seqnos)
            whole[partitions] = np.maximum(whole[partitions], list(seqnos.values()))
            self._hold(whole)
            await self._disk.in_store_thread(lambda: store.put_joining(whole))

    def _hold(self, whole: U64) -> None:
        held, self.whole = self._held, whole
        self._held = self._bucket.cuts.hold(whole, self._bucket.tail)
        if held is not None:
            self._bucket.cuts.forget(held)

    def release(self) -> None:
        """Let merges and purges go on: all that is here is whole, or follows no upstream any more."""
        if self._held is not None:
            self._bucket.cuts.forget(self._held)
            self._held = None

    @property
    def is_whole(self) -> bool:
        """Whether the small tables lack nothing of what is complete here, in step or not."""
        return self.joining is False or bool((self._bucket.partitions.complete <= self.whole).all())

    @property
    def has_tables(self) -> bool:
        """Whether it has the small tables of its upstream, and durably every seqno that they name."""
        durable = self._bucket.partitions.durable
        return self.tables and bool((durable >= self.needed).all())

    @property
    def in_step(self) -> bool:
        """Whether it follows in all partitions and has the small tables."""
        return self.has_tables and not self.is_partial

    def lag(self) -> int:
        """Return how many mutations that the upstream named are not durable here."""
        durable = self._bucket.partitions.durable
        return int((np.maximum(self.highs, durable) - durable).sum())

    def named(self, partitions: npt.NDArray[np.int64], seqnos: U64) -> None:
        """Note the newest seqnos of partitions that the upstream names, and whether all that it named before is here."""
        self._is_level()
        self.highs[partitions] = np.maximum(self.highs[partitions], seqnos)

    def lag_seconds(self) -> float:
        """Return the seconds since it last had everything that the upstream named, while connected; 0 while it has."""
        return 0.0 if self._is_level() else time.monotonic() - self._level

    def _is_level(self) -> bool:
        """Return whether all that the upstream named is here, and note the time at which it is."""
        level = self.connected and not self.lag()
        if level:
            self._level = time.monotonic()
        return level
