"""The compactor: compaction in the background, a bounded piece at a time; purges for the operator, and a periodic sweep.

One thread compares and rebuilds, the store's thread makes the transactions, and between two pieces the compactor
rests for as long as the piece took, so that writers and readers keep at least half of the processor. While flushes follow
one another it leaves partitions alone for some time, and then rests less the more blocks have gathered.

The sweep visits partitions that compaction does not.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import lmdb
import numpy as np

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.bucket import Bucket
from upr.engine.compaction import (
    JOIN_BYTES,
    RECLAIM_FRACTION,
    Backlog,
    Cost,
    Holder,
    PurgeAges,
    begin_purge,
    cost_of,
    costs_of,
    end_purge,
    first_to_merge,
    hardly_repeats,
    has_few_new,
    holders,
    is_for_rows,
    plan_join,
    plan_merge,
    plan_reclaim,
    plan_whole,
    purge_limits,
    small_ones,
)
from upr.service.buckets.disk_threads import Disk
from upr.service.buckets.keepers import finish_even_if_cancelled, pause
from upr.service.buckets.room import merge_room
from upr.service.storage_trouble import PASSING, Failing, words_of
from upr.storage.blocks import (
    BlockRange,
    Head,
    Replacement,
    Tombstones,
    count_tombstones,
    rows_in,
    stretches,
)
from upr.storage.compact import (
    WORTH_FRACTION,
    Direct,
    Examined,
    Purge,
    PurgeLimits,
    RangeTooLargeError,
    examine,
    merge_direct,
    rewrite_group,
)
from upr_protocol.errors import (
    CorruptBlockError,
    DataDamagedError,
    NoRoomError,
    StorageFailedError,
    TooManyError,
    UprError,
)
from upr_protocol.limits import PARTITIONS

log = logging.getLogger(__name__)

LOOK_PARTITIONS = 128
DIRECT_BYTES = 2 * 2**20
"""Ranges up to this are rewritten whole; in larger ones the keys are compared first."""
BATCH_BYTES = 8 * 2**20
"""Ranges with more bytes than this, when they are not compressed, are not rewritten whole either."""
HASHES_RANGE_BYTES = 128 * 2**10
"""Smaller ranges are compacted without a look at their hashes, which would cost as much."""
HASHES_BYTES = 4 * 2**20
"""Hashes that tell of a range whether it is worth compacting; in one that has more the keys are compared."""
REST_SECONDS_MAX = 0.05
RECLAIM_SECONDS = 60.0
"""For this long after a write was refused for the quota, what is flushed is reclaimed too."""
QUIET_SECONDS = 0.25
"""Flushes follow one another while blocks are stored at shorter intervals."""
HASTE_BLOCKS = 24
"""With so many blocks in a range it is not rested at all: flushes make them faster than they are merged."""
FIRST_LOOK_SECONDS = 5.0
"""After the start, all partitions are looked at; those that are flushed before are looked at at once."""
_RETRY_SECONDS = 1.0
_T = TypeVar("_T")


SWEEP_FRACTION = 0.25
SWEEP_SECONDS_MIN = 1.0
SWEEP_SECONDS_MAX = 6 * 3600.0
SWEEP_ROWS_FRACTION = 0.01
"""A sweep writes a partition anew when at least this part of its rows are tombstones that may go."""


@dataclass(slots=True)
class Purged:
    """Result of a purge, or of a dry run, for one partition."""

    tombstones: Tombstones
    purged: int = 0
    holders: list[Holder] = field(default_factory=list)


class Compactor:
    """Keeps the tiers of a bucket's partitions in order, and drops tombstones where that may be done.

    Attributes:
        ages: how old tombstones must be.
        turn: held while something is merged, by ``run`` or by the purger.
        flushing: returns whether a flush runs: its slices may be long in coming.
    """

    def __init__(self, disk: Disk, bucket: Bucket, config: ServerConfig) -> None:
        self._disk = disk
        self._bucket = bucket
        self._store = disk.store
        self.ages = PurgeAges(
            int(config.tombstone_seconds * 1e6), int(config.purge_hold_seconds * 1e6)
        )
        self._backlog = Backlog(config.tail_bytes)
        self._flushed_at = -math.inf
        self._wanted = asyncio.Event()
        self._stopped = asyncio.Event()
        self._first_look: asyncio.TimerHandle | None = None
        self._settled: dict[int, list[tuple[int, int]]] = {}
        self._costs: dict[int, list[Cost]] = {}
        """What the stretches of partitions cost in which nothing was to be compacted when they were looked at."""
        self._reclaim_until = -math.inf
        self._reclaiming: set[int] = set()
        # A sweep leaves what is worth it at a quota.
        self._reclaimed = {
            worth: np.zeros(PARTITIONS, np.uint64) for worth in (WORTH_FRACTION, RECLAIM_FRACTION)
        }
        """The seqno through which each partition was reclaimed, by the part of its bytes that had to be superseded."""
        self._worth = WORTH_FRACTION
        """That part, of what is looked at and rewritten now."""
        self._compared: set[int] = set()
        """Partitions whose range is not rewritten before its keys were compared, however small it is."""
        self._looked = dict[int, int]()
        """The seqno through which the look of now has reclaimed each partition, by ``_worth``."""
        self._without_room: set[int] = set()
        self._stored_at_start = bucket.partitions.stored.copy()
        self.turn = asyncio.Lock()
        self.flushing: Callable[[], bool] = lambda: False
        self._work: set[asyncio.Task[Any]] = set()
        self._leisure = 1.0
        bucket.cuts.on_dropped = self._look_again

    @property
    def waiting(self) -> int:
        """How many partitions are to be looked at."""
        return len(self._backlog.waiting)

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def note(self, partitions: Iterable[int]) -> None:
        problems = self._bucket.partitions.problems
        for partition in partitions:
            # What is known of it may be out of date.
            self._costs.pop(partition, None)
            if partition not in problems:
                self._backlog.waiting[partition] = None
        if self._backlog.waiting:
            self._wanted.set()

    def reclaim(self) -> None:
        """Compact where few new rows may supersede much as well, now and for RECLAIM_SECONDS: the bucket is at its quota."""
        self._reclaim_until = time.monotonic() + RECLAIM_SECONDS
        self._reclaim_now()

    def _reclaim_now(self) -> None:
        reclaimed = self._reclaimed[self._worth_now()]
        new = np.flatnonzero(self._bucket.partitions.stored > reclaimed).tolist()
        self._reclaiming.update(new)
        self.note(new)

    def _worth_now(self) -> float:
        at_quota = time.monotonic() < self._reclaim_until
        return RECLAIM_FRACTION if at_quota else WORTH_FRACTION

    def _look_again(self, partitions: Collection[int]) -> None:
        """Have partitions looked at of which it is not known what is to be compacted."""
        for partition in partitions:
            self._backlog.unknown(partition)
            for reclaimed in self._reclaimed.values():
                reclaimed[partition] = 0
        self.note(partitions)

    def flushed(self, blocks: Iterable[tuple[int, int, bytes]]) -> None:
        """Note new blocks (partition, end_seqno, bytes). Partitions in which they leave nothing to compact are not looked
        at: to read the heads of all their blocks costs more than to flush a block."""
        self._flushed_at = time.monotonic()
        changed: dict[int, list[Cost] | None] = {}
        for partition, _, data in blocks:
            cost = cost_of(len(data), rows_in(data))
            self._backlog.flushed(partition, cost.size)
            costs = changed[partition] = self._costs.get(partition)
            if costs is not None:
                costs.append(cost)
        if self._flushed_at < self._reclaim_until:
            self._reclaiming.update(changed)
            self.note(changed)
            return
        pinned = self._bucket.cuts.pinned
        self.note(
            partition
            for partition, costs in changed.items()
            if costs is None or pinned(partition) or first_to_merge(costs) is not None
        )

    async def run(self) -> None:
        # Work left by an earlier process is not urgent: clients that waited for the server come first.
        loop = asyncio.get_running_loop()
        self._first_look = loop.call_later(FIRST_LOOK_SECONDS, self.note, range(PARTITIONS))
        while not self.stopped:
            partitions = self._backlog.take(LOOK_PARTITIONS, self._room())
            if not partitions:
                self._wanted.clear()
                await pause(self._wanted, QUIET_SECONDS if self.waiting else None)
                continue
            try:
                async with self.turn:
                    await self._merge(partitions)
                if not self._without_room:
                    self._disk.troubles.ends(Failing.MERGE)
            except (*PASSING, NoRoomError) as error:
                self._disk.troubles.begins(Failing.MERGE, error)
                if isinstance(error, lmdb.PanicError):
                    return
                lacks_room = isinstance(error, NoRoomError)
                self._look_again(self._without_room if lacks_room else partitions)
                await self.rest(_RETRY_SECONDS)

    @property
    def _is_quiet(self) -> bool:
        return not self.flushing() and time.monotonic() - self._flushed_at >= QUIET_SECONDS

    def _room(self) -> int | None:
        """Return the bytes that the bucket may still store; None while flushes do not follow one another."""
        if self._is_quiet:
            return None
        room, quota = self._disk.room.above_reserve(), self._disk.quota
        return min(room, quota.limit - quota.used) if quota.limit else room

    def stop(self) -> None:
        """Make ``run`` return after the current piece."""
        self._stopped.set()
        self._wanted.set()
        if self._first_look is not None:
            # It would keep all of a dropped bucket.
            self._first_look.cancel()

    async def finish(self) -> None:
        """Wait for what has begun, after ``stop``."""
        await asyncio.gather(*self._work, return_exceptions=True)

    async def rest(self, seconds: float) -> bool:
        """Wait for a time, or until ``stop``; False then."""
        await pause(self._stopped, seconds)
        return not self._stopped.is_set()

    async def _rest_after(self, started: float) -> None:
        seconds = min(time.monotonic() - started, REST_SECONDS_MAX)
        await self.rest(seconds * self._leisure)

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        """Run something in the thread that compares and rebuilds."""
        started = time.monotonic()
        try:
            return await self._disk.in_merge_thread(call)
        finally:
            self._disk.counters.merge_seconds += time.monotonic() - started

    def damaged(self, problems: Mapping[int, UprError]) -> None:
        """Record partitions, for the status and the log, and leave them as they are: they are merged with nothing."""
        known = self._bucket.partitions.problems
        for partition, error in problems.items():
            # Their frames hold all that was merged beside it.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._backlog.waiting.pop(partition, None)
            self._costs.pop(partition, None)
            self._without_room.discard(partition)
            # Once: clients restart its streams again and again.
            if partition not in known:
                known[partition] = error
                told = {"bucket": self._bucket.identity.name, "error": error.message}
                log.error("a partition is damaged", extra=told)

    # Choosing

    async def _merge(self, partitions: Sequence[int]) -> None:
        # Once: what is chosen for a quota is rewritten so, also when writes are no longer refused.
        self._worth = self._worth_now()
        self._looked.clear()
        pins = {p: self._bucket.cuts.pinned(p) for p in partitions}
        ranges, problems, costs = await self.in_thread(lambda: self._look(pins))
        self.damaged(problems)
        # What was flushed meanwhile has them looked at again.
        waiting = self._backlog.waiting
        self._costs.update((p, found) for p, found in costs.items() if p not in waiting)
        reclaimed = self._reclaimed[self._worth]
        for partition, seqno in self._looked.items():
            if partition not in waiting:
                reclaimed[partition] = seqno
        for partition in set(partitions).difference(one.partition for one in ranges):
            self._backlog.in_order(partition)
        crossed = [one.partition for one in ranges if self.crosses_pin(one)]
        ranges = [one for one in ranges if one.partition not in crossed]
        self._look_again(crossed)
        small, large = list[BlockRange](), list[BlockRange]()
        for one in ranges:
            compared = one.partition in self._compared
            (small if _is_direct(one) and not compared else large).append(one)
        self._compared.clear()
        blocks = sum([len(one.heads) for one in small]) / max(len(small), 1)
        self._leisure = 1.0 if self._is_quiet else max(1.0 - blocks / HASTE_BLOCKS, 0.0)
        refused = await self._merge_small(small) | await self._merge_all_large(large)
        self.note(one.partition for one in ranges)
        self._without_room.difference_update(partitions)
        self._without_room.update(refused)
        for error in refused.values():
            raise error

    def crosses_pin(self, one: BlockRange) -> bool:
        """Whether a range goes across a cut: one made since it was chosen, with a flush behind it."""
        return any(one.start < pin < one.end for pin in self._bucket.cuts.pinned(one.partition))

    def _look(
        self, pins: Mapping[int, Sequence[int]]
    ) -> tuple[list[BlockRange], dict[int, UprError], dict[int, list[Cost]]]:
        ranges = []
        problems: dict[int, UprError] = {}
        costs: dict[int, list[Cost]] = {}
        for partition, pinned in pins.items():
            if self.stopped:
                break
            try:
                heads = self._store.heads(partition)
            except DataDamagedError as error:
                problems[partition] = error
                continue
            found = self._range(partition, heads, pinned)
            if found is not None:
                ranges.append(found)
            elif not pinned:
                costs[partition] = costs_of(partition, heads, self.settled_of(partition, heads))
        return ranges, problems, costs

    def _range(
        self, partition: int, heads: Sequence[Head], pinned: Sequence[int]
    ) -> BlockRange | None:
        """Return what to compact: a range that loses rows by it, or small blocks of one that hardly does."""
        if partition not in self._settled:
            self._settled[partition] = self._settled_at_start(partition, heads)
        while (
            found := plan_merge(partition, heads, pinned, self.settled_of(partition, heads))
        ) is not None:
            # Blocks that are all joined if their keys are different are written anew either way.
            if small_ones(found) == found:
                return found
            for_rows = found.plain >= JOIN_BYTES and is_for_rows(
                stretches(partition, found.heads, self.settled_of(partition, heads))
            )
            if found.plain < HASHES_RANGE_BYTES and not for_rows:
                return found
            repeats = self._repeats(found)
            if repeats and for_rows and _is_direct(found):
                # What is new has few bytes, and the hashes tell of whole blocks: one of large values may have a counter.
                repeats = self._loses(found, WORTH_FRACTION)
            self._backlog.compared(partition, repeats=repeats)
            if repeats:
                return found
            self._settle(found)
        if partition in self._reclaiming:
            self._reclaiming.discard(partition)
            if (found := self._to_reclaim(partition, heads, pinned)) is not None:
                if self._worth == RECLAIM_FRACTION:
                    # Behind a cut there may be more; a sweep has time for that.
                    self._reclaiming.add(partition)
                return found
        return plan_join(partition, heads, pinned, self.settled_of(partition, heads))

    def _to_reclaim(
        self, partition: int, heads: Sequence[Head], pinned: Sequence[int]
    ) -> BlockRange | None:
        worth = self._worth
        through = int(self._reclaimed[worth][partition])
        while (found := plan_reclaim(partition, heads, pinned, through)) is not None:
            before, through = through, found.end
            self._looked[partition] = through
            oldest = stretches(partition, found.heads, self.settled_of(partition, heads))[0]
            few = has_few_new(found, max(before, oldest.end))
            # Where there are too many hashes for a look, all keys are read.
            if (few and 4 * found.rows > HASHES_BYTES) or not self._repeats(found, worth):
                continue
            if few or worth == WORTH_FRACTION:
                self._compared.add(partition)
            elif _is_direct(found) and not self._loses(found, worth):
                continue
            return found
        self._looked[partition] = heads[-1].end if heads else 0
        return None

    def _loses(self, one: BlockRange, fraction: float) -> bool:
        """Return whether older rows of keys have such a part of a small range's bytes."""
        try:
            return examine(one, self._store.blocks, None).loses(fraction)
        except (RangeTooLargeError, DataDamagedError, CorruptBlockError):
            # Compaction tells it.
            return True

    def _repeats(self, one: BlockRange, worth: float = WORTH_FRACTION) -> bool:
        """Return whether compacting a range may save such a part of its bytes, as its stored hashes tell."""
        with self._store.look() as cursor:
            known = cursor.hashes(one.partition, one.end, one.start, HASHES_BYTES)
        return not hardly_repeats(one, known, worth)

    def settled_of(self, partition: int, heads: Sequence[Head]) -> list[tuple[int, int]]:
        """Return the ranges that were compared as a whole; a large partition counts as one until it is looked at."""
        known = self._settled.get(partition)
        if known is None:
            before = self._before_start(partition, heads)
            known = [] if _is_direct(before) else [(0, before.end)]
        return known

    def _before_start(self, partition: int, heads: Sequence[Head]) -> BlockRange:
        at_start = self._stored_at_start[partition]
        return BlockRange(partition, tuple([head for head in heads if head.end <= at_start]))

    def _settled_at_start(self, partition: int, heads: Sequence[Head]) -> list[tuple[int, int]]:
        """Return the ranges that count as compared though nobody knows what was, in processes before this one.

        A large partition does, unless its hashes show that keys repeat: to compare its keys all of it would be read.
        """
        whole = self.settled_of(partition, heads)
        if not whole:
            return whole
        before = self._before_start(partition, heads)
        with self._store.look() as cursor:
            known = cursor.hashes(partition, before.end, 0, HASHES_BYTES)
        repeats = len(known.ends) == len(before.heads) and not hardly_repeats(before, known)
        return [] if repeats else whole

    def _settle(self, one: BlockRange) -> None:
        inside = self._settled.get(one.partition, [])
        outside = [r for r in inside if r[1] <= one.start or r[0] >= one.end]
        self._settled[one.partition] = [*outside, (one.start, one.end)]

    # Merging

    async def _merge_small(self, ranges: Sequence[BlockRange]) -> dict[int, NoRoomError]:
        """Compact ranges in batches; return the partitions for which there was no room, which take no others along."""
        refused = {}
        batches = deque(_batches(ranges))
        while batches and not self.stopped:
            started, batch = time.monotonic(), batches.popleft()
            try:
                with self._claim_room(batch):
                    await self._merge_batch(batch)
            except NoRoomError as error:
                if len(batch) == 1:
                    refused[batch[0].partition] = error
                batches.extendleft([one] for one in batch[::-1] if len(batch) > 1)
            await self._rest_after(started)
        return refused

    async def _merge_all_large(self, ranges: Sequence[BlockRange]) -> dict[int, NoRoomError]:
        refused = {}
        for one in ranges:
            if not self.stopped:
                try:
                    await self._merge_large(one)
                except NoRoomError as error:
                    refused[one.partition] = error
        return refused

    async def _merge_batch(self, ranges: Sequence[BlockRange]) -> None:
        limits = purge_limits(self._bucket, *self._when())
        direct = await self._direct(ranges, limits)
        raised = self._begin_purge(direct.purges)
        refused = direct.purges.keys() - raised.keys()
        await self._finish_batch(ranges, direct, raised, refused)
        if refused:
            # A new reader has not passed these tombstones: they stay for now.
            left = [one for one in ranges if one.partition in refused]
            direct = await self._direct(left, None)
            await self._finish_batch(left, direct, {}, set())

    async def _direct(self, ranges: Sequence[BlockRange], limits: PurgeLimits | None) -> Direct:
        compress = self._disk.compress
        return await self.in_thread(
            lambda: merge_direct(ranges, self._store.blocks, limits, compress)
        )

    async def _finish_batch(
        self,
        ranges: Sequence[BlockRange],
        direct: Direct,
        raised: Mapping[int, int],
        refused: set[int],
    ) -> None:
        self.damaged(direct.damaged)
        chosen = [one for one in direct.replacements if one.partition not in refused]
        done = {one.partition for one in chosen}
        try:
            await self._replace(chosen)
        except DataDamagedError:
            done = await self._replace_singly(chosen)
        finally:
            end_purge(self._bucket, raised)
        self._count_input([one for one in ranges if one.partition in done])
        sizes = {one.partition: one.size for one in ranges}
        for one in chosen:
            size = sum([len(data) for _, data in one.new])
            self._backlog.rewritten(one.partition, sizes[one.partition], size)
        self._disk.counters.merge_output_rows += direct.rows
        self._disk.counters.purged_tombstones += sum(
            direct.purges[p].count for p in raised if p in done
        )

    async def _replace_singly(self, replacements: Sequence[Replacement]) -> set[int]:
        """Find out of which partition something is damaged; the others do not suffer for it."""
        done = set()
        for one in replacements:
            try:
                await self._replace([one])
                done.add(one.partition)
            except DataDamagedError as error:
                self.damaged({one.partition: error})
        return done

    async def _merge_large(self, one: BlockRange) -> None:
        try:
            await self.rewrite(one, await self.examine(one), self._worth)
            self._settle(one)
        except RangeTooLargeError:
            log.warning(
                "a range has too many keys to be merged",
                extra={
                    "bucket": self._bucket.identity.name,
                    "partition": one.partition,
                    "rows": one.rows,
                    "bytes": one.size,
                },
            )
            self._settle(one)
        except (DataDamagedError, CorruptBlockError) as error:
            self.damaged({one.partition: error})

    async def examine(self, one: BlockRange) -> Examined:
        limits = purge_limits(self._bucket, *self._when())
        return await self.in_thread(lambda: examine(one, self._store.blocks, limits))

    async def rewrite(
        self, one: BlockRange, examined: Examined, worth: float = WORTH_FRACTION
    ) -> int:
        """Write what lost enough anew, with ``worth`` as of its groups; returns how many tombstones went.

        Raises:
            NoRoomError: the disk or the map has no room for it; some of it may be done.
            DataDamagedError, CorruptBlockError: a block is missing or fails its checks.
        """
        purges = {one.partition: examined.purge} if examined.purge else {}
        if purges:
            # A purge seqno that was raised stays, and has who resumes below it roll back.
            for group in examined.groups(worth):
                self._check_room([_range_of(examined, group)])
        raised = self._begin_purge(purges)
        if purges and not raised:
            examined = await self.in_thread(lambda: examine(one, self._store.blocks, None))
        try:
            for group in examined.groups(worth):
                if self.stopped:
                    return 0
                started = time.monotonic()
                await self._rewrite_group(examined, group)
                await self._rest_after(started)
        finally:
            end_purge(self._bucket, raised)
            self.note([one.partition])
        purged = examined.purge.count if examined.purge else 0
        self._disk.counters.purged_tombstones += purged
        return purged

    async def _rewrite_group(self, examined: Examined, group: range) -> None:
        one = _range_of(examined, group)
        compress = self._disk.compress
        with self._claim_room([one]):
            new = await self.in_thread(
                lambda: rewrite_group(examined, group, self._store.blocks, compress)
            )
            await self._replace([new])
        self._count_input([one])
        kept = sum(int(np.count_nonzero(examined.keep[i])) for i in group)
        self._disk.counters.merge_output_rows += kept

    def _when(self) -> tuple[PurgeAges, int]:
        """Return the ages that count at this moment, and the moment."""
        now, before = self._disk.clock.now(), self._disk.clock.before
        return PurgeAges(now - before(self.ages.young), now - before(self.ages.held)), now

    def _begin_purge(self, purges: Mapping[int, Purge]) -> dict[int, int]:
        return begin_purge(self._bucket, purges, *self._when()) if purges else {}

    async def _replace(self, replacements: Sequence[Replacement]) -> None:
        def store() -> None:
            failpoints.hit("merge.before_commit")
            self._store.replace(replacements)
            failpoints.hit("merge.after_commit")

        await self._disk.in_store_thread(store)
        self._disk.refresh_quota()
        self._disk.counters.merge_output_bytes += sum(
            len(data) for one in replacements for _, data in one.new
        )

    def _claim_room(self, ranges: Sequence[BlockRange]) -> AbstractContextManager[None]:
        """Claim room for what is to be compacted: a merge needs it before it gives any back, and leaves the reserve to the flush.

        It is not waited for here: readers at 0 wait for a purge to end, and others for their ``turn``.
        """
        return self._disk.room.claimed(self._check_room(ranges))

    def _check_room(self, ranges: Sequence[BlockRange]) -> int:
        """Return how much room it takes to compact ranges; NoRoomError if there is less."""
        room = min(self._disk.room.above_reserve(), merge_room(self._store))
        size = sum([one.size for one in ranges])
        # Rows may be compressed to less than the hashes of their keys, which are 4 bytes each.
        needed = 2 * size + 4 * sum([one.rows for one in ranges])
        if room < needed:
            raise NoRoomError(
                f"room on the disk is {max(room, 0)} bytes above the reserve; must be {needed} to compact {size} bytes",
                hint="free some space; compaction resumes by itself",
            )
        return needed

    def _count_input(self, ranges: Sequence[BlockRange]) -> None:
        counters = self._disk.counters
        counters.merge_input_bytes += sum([one.size for one in ranges])
        counters.merge_input_rows += sum([one.rows for one in ranges])

    # Purging

    async def purge(self, partition: int, *, dry_run: bool = False, worth: float = 0.0) -> Purged:
        """Drop a partition's old tombstones that every reader has passed, and the values under those that stay.

        It runs to completion even if the caller is cancelled: the store may be writing already, and until that is done
        no stream may read the partition at 0.

        Args:
            dry_run: change nothing.
            worth: do it only if at least this part of the partition's rows would go.

        Raises:
            DataDamagedError, CorruptBlockError: a block is missing or fails its checks.
            TooManyError: the partition has more keys than are compared at once.
            NoRoomError: the disk or the map has no room for what is written anew.
            StorageFailedError: the store could not be written.
        """
        task = asyncio.create_task(self._purge(partition, dry_run, worth))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return await finish_even_if_cancelled(task)

    async def _purge(self, partition: int, dry_run: bool, worth: float) -> Purged:
        async with self.turn:
            pinned = self._bucket.cuts.pinned(partition)
            # The newest time of a tombstone that is old enough, microseconds since the epoch.
            old = self._disk.clock.before(self.ages.young)

            def look() -> tuple[Tombstones, BlockRange | None]:
                heads: Sequence[Head] = self._store.heads(partition)
                counted = count_tombstones(partition, heads, self._store.blocks, old)
                return counted, plan_whole(partition, heads, pinned) if counted.old else None

            tombstones, whole = await self.in_thread(look)
            if whole is not None and self.crosses_pin(whole):
                whole = None
            result = Purged(tombstones)
            if whole is not None:
                try:
                    examined = await self.examine(whole)
                except RangeTooLargeError:
                    raise TooManyError(
                        f"partition {partition} has {whole.rows} rows, too many to be compared at once",
                        hint="its tombstones stay",
                        retriable=False,
                    ) from None
                count = examined.purge.count if examined.purge else 0
                if dry_run:
                    result.purged = count
                # The newest tombstone of a partition stays; the values that are under it need not.
                elif (
                    count >= worth * tombstones.rows or examined.loses(WORTH_FRACTION)
                    if count
                    else examined.groups()
                ):
                    result.purged = await self._rewritten(whole, examined)
            if tombstones.old:
                result.holders = self._holders(partition, tombstones.newest_old)
            return result

    async def _rewritten(self, whole: BlockRange, examined: Examined) -> int:
        try:
            return await self.rewrite(whole, examined)
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"partition {whole.partition} could not be written: {words_of(error)}",
                hint="see the server's log",
                retriable=True,
            ) from error

    def _holders(self, partition: int, newest_old: int) -> list[Holder]:
        found = holders(self._bucket, partition, newest_old)
        if newest_old == int(self._bucket.partitions.durable[partition]):
            found.append(Holder("newest", "", newest_old - 1))
        return found

    async def sweep(self) -> None:
        """Purge and reclaim partitions that compaction does not visit, each a few times within a tombstone's age, until
        the compactor stops."""
        interval = SWEEP_FRACTION * self.ages.young / 1e6
        interval = min(max(interval, SWEEP_SECONDS_MIN), SWEEP_SECONDS_MAX)
        # Of a partition of which nothing is stored nothing is purged.
        seen = [0] * PARTITIONS
        while await self.rest(interval):
            failed = False
            self._reclaim_now()
            for partition in range(PARTITIONS):
                if self.stopped:
                    return
                started = time.monotonic()
                stored = int(self._bucket.partitions.stored[partition])
                if seen[partition] == stored or partition in self._bucket.partitions.problems:
                    continue
                try:
                    result = await self.purge(partition, worth=SWEEP_ROWS_FRACTION)
                    if result.tombstones.count == result.purged:
                        # Nothing is left to be purged until something new is stored.
                        seen[partition] = stored
                except (DataDamagedError, CorruptBlockError) as error:
                    self.damaged({partition: error})
                except (*PASSING, NoRoomError, StorageFailedError) as error:
                    self._disk.troubles.begins(Failing.PURGE, error)
                    failed = True
                except UprError as error:
                    told = {"bucket": self._bucket.identity.name, "partition": partition}
                    log.error("purging failed", extra={**told, "error": str(error)})
                await self.rest(min(time.monotonic() - started, REST_SECONDS_MAX))
            if not failed:
                self._disk.troubles.ends(Failing.PURGE)


def _is_direct(one: BlockRange) -> bool:
    """Whether a range is rewritten whole; small blocks may be compressed, and be too much in memory."""
    return one.size <= DIRECT_BYTES and one.plain <= BATCH_BYTES


def _range_of(examined: Examined, group: range) -> BlockRange:
    return BlockRange(examined.partition, tuple([examined.heads[i] for i in group]))


def _batches(ranges: Sequence[BlockRange]) -> Iterator[list[BlockRange]]:
    """Yield ranges, ascending by partition, in pieces of about BATCH_BYTES, counted as they are in memory."""
    batch: list[BlockRange] = []
    size = 0
    for one in ranges:
        plain = one.plain
        if batch and size + plain > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += plain
    if batch:
        yield batch
