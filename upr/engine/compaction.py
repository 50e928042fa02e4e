"""Compaction: which stored blocks to compact, and which tombstones may go.

*Blocks*, size-tiered for each partition. A stretch is a range compacted together. When the oldest stretch is no larger
than everything stored after it, in bytes or in rows, the whole partition is compacted, so superseded rows are always
fewer than the oldest stretch: a tombstone has few bytes, and may supersede many. In between, a stretch no larger than all later ones is compacted with them once they are FAN_IN together. A row
is rewritten only after as much data as its stretch was stored behind it: at most about log2(partition / flush) times,
and less often with small flushes. No compaction crosses a pinned seqno, or the last complete marker. A range whose keys
are all different, as their stored hashes tell, counts as compacted as it is; only small blocks in it are joined. While a
quota refuses writes, what fewer rows supersede is compacted as well.

*Backlog*. While flushes follow one another, compaction would take processor and disk from the writers. So a partition
waits until they pause, or until it has its share of a tail in new blocks; of many tails where compaction saves next to
nothing. One of which it is not known what waits does not. On a disk, or with a quota, that leaves less room it waits for less.

*Tombstones*. A purged tombstone informs no reader. So it stays until it is old, and until every stream, registered
consumer and cut has passed it; once it is very old, only cuts hold it. A reader between 0 and the purge seqno restarts
at 0, where it has nothing to delete. While a purge is being stored, streams below its purge seqno read nothing of the
partition: a stream that read rows before the purge, and the rest after it, would keep a key whose tombstone was purged
in between.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from upr.engine.bucket import Bucket
from upr.engine.partitions import ACTIVE
from upr.storage.blocks import BlockHashes, BlockRange, Head, last_complete, stretches
from upr.storage.compact import WORTH_FRACTION, Purge, PurgeLimits, repeated
from upr_protocol.limits import PARTITIONS

FAN_IN = 4
"""Smallest number of stretches compacted together, except to save space: each compaction has a cost for each block it
reads."""
JOIN_BYTES = 64 * 2**10
"""Blocks below it are joined: each has a cost for its readers. A few that one flush of a full tail makes exceed it together."""
JOINED_BYTES = 256 * 2**10
"""Most bytes of what is joined: who looks for a key checks all of a block."""
BLOCK_COST = 1024
"""Bytes added to each block's size, for partly filled pages and the fixed work of a block."""


DIFFERENT_TAILS = 32
"""Tails of new blocks whose keys hardly repeat that wait for compaction. Others wait for one: what is superseded takes
room that the store's file keeps."""
ROOM_SHARE = 0.25
"""Part of the room on the disk that new blocks may take before they are compacted."""
NEW_ROWS_MIN = 16
"""Fewer new rows have no partition compacted for their number: a large value beside counters would be rewritten by each flush."""
RECLAIM_FRACTION = 0.01
"""Part of a range's rows that must be new, and of its bytes that must be superseded, for it to be rewritten at a quota."""


class Cost(NamedTuple):
    """Cost of compacting blocks: their bytes, with BLOCK_COST for each, and their rows."""

    size: int
    rows: int


class Backlog:
    """Backlog of compaction: the partitions that are to be looked at, those first that wait longest.

    Attributes:
        waiting: these partitions.
    """

    def __init__(self, tail_bytes: int) -> None:
        self._tail_bytes = tail_bytes
        self.waiting: dict[int, None] = {}
        self._flushed = [math.inf] * PARTITIONS
        """Cost of what was stored since nothing was to be compacted; without end where nobody knows it."""
        self._repeats: dict[int, bool] = {}

    def flushed(self, partition: int, cost: int) -> None:
        self._flushed[partition] += cost

    def unknown(self, partition: int) -> None:
        """Note that more may be to be compacted than was stored meanwhile."""
        self._flushed[partition] = math.inf

    def in_order(self, partition: int) -> None:
        """Note that nothing was to be compacted."""
        self._flushed[partition] = 0

    def compared(self, partition: int, *, repeats: bool) -> None:
        """Note whether keys of a range repeat, so that its compaction saves WORTH_FRACTION of its bytes."""
        self._repeats[partition] = repeats

    def rewritten(self, partition: int, before: int, after: int) -> None:
        """Note of how many bytes a compaction has made how many."""
        self.compared(partition, repeats=before - after >= WORTH_FRACTION * before)

    def take(self, count: int, room: int | None) -> list[int]:
        """Remove at most so many partitions that are to be looked at now, and return them, ascending.

        Args:
            room: bytes that may be stored; None while no flush is under way, when no partition waits.
        """
        if room is None:
            due = iter(self.waiting)
        else:
            short, long = (self._share(tails, room) for tails in (1, DIFFERENT_TAILS))
            flushed, repeats = self._flushed, self._repeats
            # Keys are dealt to partitions by their hashes, so others are mostly like those that were compared.
            usual = 2 * sum(repeats.values()) >= len(repeats)
            due = (
                p for p in self.waiting if flushed[p] >= (short if repeats.get(p, usual) else long)
            )
        taken = sorted(islice(due, count))
        for partition in taken:
            del self.waiting[partition]
        return taken

    def _share(self, tails: int, room: int) -> float:
        """Return how many new bytes of one partition wait."""
        return min(tails * self._tail_bytes, room * ROOM_SHARE) / PARTITIONS


def plan_merge(
    partition: int,
    heads: Sequence[Head],
    pinned: Sequence[int],
    settled: Iterable[tuple[int, int]] = (),
) -> BlockRange | None:
    """Return the next range to compact in a partition; None when its tiers are in order.

    Args:
        heads, settled: see ``stretches``.
        pinned: seqnos that no merge may cross, ascending.
    """
    complete = last_complete(heads)
    mergeable = [head for head in heads if head.end <= complete]
    for segment in segments(mergeable, pinned):
        tiers = stretches(partition, segment, settled)
        first = first_to_merge(_costs(tiers))
        if first is not None:
            chosen = [head for tier in tiers[first:] for head in tier.heads]
            return BlockRange(partition, tuple(chosen))
    return None


def plan_reclaim(
    partition: int, heads: Sequence[Head], pinned: Sequence[int], reclaimed: int
) -> BlockRange | None:
    """Return the oldest range that may be merged and has something new in it; None if there is none.

    Args:
        reclaimed: the seqno through which the partition was reclaimed before.
    """
    complete = last_complete(heads)
    for segment in segments([head for head in heads if head.end <= complete], pinned):
        if len(segment) > 1 and segment[-1].end > reclaimed:
            return BlockRange(partition, tuple(segment))
    return None


def has_few_new(one: BlockRange, seqno: int) -> bool:
    """Return whether fewer than RECLAIM_FRACTION of a range's rows are in blocks above a seqno."""
    new = sum([head.rows for head in one.heads if head.end > seqno])
    return new < RECLAIM_FRACTION * one.rows


def hardly_repeats(one: BlockRange, known: BlockHashes, worth: float = WORTH_FRACTION) -> bool:
    """Return whether what is superseded within a range is at most such a part of the bytes that are alive.

    A block in which any key has the hash of another one counts as superseded, whole: a single value may be most of it.

    Args:
        known: of the range; unless it has all blocks, they must be compared.
    """
    if known.ends != [head.end for head in reversed(one.heads)]:
        return False
    again = repeated(known.hashes)
    if not len(again):
        return True
    before = np.append(0, np.cumsum(np.isin(known.hashes, again)))
    repeats = np.diff(before[np.append(0, known.row_ends)])
    sizes = np.array([head.size for head in reversed(one.heads)])
    superseded = sizes[repeats > 0].sum()
    return bool(superseded <= worth * (sizes.sum() - superseded))


def small_ones(one: BlockRange) -> BlockRange | None:
    """Return neighbours of a range, FAN_IN or more, that are below JOIN_BYTES each, and JOINED_BYTES together."""
    for group in _small_groups(one.heads):
        # What is joined does not end inside a stretch.
        complete = last_complete(group)
        chosen = tuple([head for head in group if head.end <= complete])
        if len(chosen) >= FAN_IN:
            return BlockRange(one.partition, chosen)
    return None


def _small_groups(heads: Sequence[Head]) -> Iterator[list[Head]]:
    group, size = list[Head](), 0
    for head in heads:
        if head.plain >= JOIN_BYTES or size + head.plain > JOINED_BYTES:
            yield group
            group, size = [], 0
        if head.plain < JOIN_BYTES:
            group.append(head)
            size += head.plain
    yield group


def plan_join(
    partition: int,
    heads: Sequence[Head],
    pinned: Sequence[int],
    settled: Iterable[tuple[int, int]],
) -> BlockRange | None:
    """Return the next small blocks to join, within ranges that count as compacted; arguments as of ``plan_merge``."""
    complete = last_complete(heads)
    for segment in segments([head for head in heads if head.end <= complete], pinned):
        for start, end in settled:
            inside = tuple([head for head in segment if start <= head.start and head.end <= end])
            if (found := small_ones(BlockRange(partition, inside))) is not None:
                return found
    return None


def plan_whole(partition: int, heads: Sequence[Head], pinned: Sequence[int]) -> BlockRange | None:
    """Return the longest range that begins at 0 and may be merged, for dropping tombstones."""
    complete = last_complete(heads)
    first = next(segments([h for h in heads if h.end <= complete], pinned), [])
    if not first or first[0].start != 0:
        return None
    return BlockRange(partition, tuple(first))


def segments(heads: Sequence[Head], pinned: Sequence[int]) -> Iterator[list[Head]]:
    """Yield the blocks between pinned seqnos, oldest first.

    A block across a pinned seqno is a segment of its own. There may be one if a restart restored the pin of a released
    cut.
    """
    segment: list[Head] = []
    for head in heads:
        if pinned and segment and any(segment[0].start < pin < head.end for pin in pinned):
            yield segment
            segment = []
        segment.append(head)
    if segment:
        yield segment


def first_to_merge(costs: Sequence[Cost]) -> int | None:
    """Return the first stretch that is no larger than all later ones, with FAN_IN together, of what each costs."""
    if not costs:
        return None
    if sum([cost.rows for cost in costs[1:]]) >= max(costs[0].rows, NEW_ROWS_MIN):
        return 0
    behind = sum([cost.size for cost in costs])
    for i, cost in enumerate(costs[:-1]):
        behind -= cost.size
        if cost.size <= behind and (i == 0 or len(costs) - i >= FAN_IN):
            return i
    return None


def is_for_rows(tiers: Sequence[BlockRange]) -> bool:
    """Return whether the stretches of a range are compacted for how many rows are new, though these have fewer bytes than
    the oldest one."""
    first, *later = _costs(tiers)
    return first.size > sum([cost.size for cost in later])


def costs_of(
    partition: int, heads: Sequence[Head], settled: Iterable[tuple[int, int]]
) -> list[Cost]:
    """Return what each stretch of a partition that no seqno is pinned in costs, for ``first_to_merge``."""
    return _costs(stretches(partition, heads, settled))


def _costs(tiers: Sequence[BlockRange]) -> list[Cost]:
    return [cost_of(tier.size, tier.rows, len(tier.heads)) for tier in tiers]


def cost_of(size: int, rows: int, blocks: int = 1) -> Cost:
    """Return what so many bytes and rows in so many blocks cost."""
    return Cost(size + BLOCK_COST * blocks, rows)


@dataclass(frozen=True, slots=True)
class PurgeAges:
    """Ages of tombstones that purging needs, in microseconds.

    Attributes:
        young: no tombstone below this age is purged.
        held: from this age on only cuts hold one.
    """

    young: int
    held: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a tombstone, which has not passed its seqno; kind is ``stream``, ``consumer`` or ``cut``."""

    kind: str
    name: str
    seqno: int


def purge_limits(bucket: Bucket, ages: PurgeAges, now: int) -> PurgeLimits:
    """Return the limits of a purge at ``now``, microseconds since the epoch."""
    # The row at the high seqno stays, which shows the end of the partition. The durable seqno counts as the high seqno,
    # because after a crash it is.
    table = bucket.partitions
    never = table.durable - np.minimum(table.durable, np.uint64(1))
    never = np.minimum(never, bucket.cuts.lowest())
    # A replica purges what its upstream has purged: the upstream knows every consumer that has not passed the rest.
    never = np.where(table.state == ACTIVE, never, np.minimum(never, table.purge))
    passed = np.minimum(never, bucket.consumer_positions.limit(table.newest_id))
    for follower in bucket.followers:
        passed = np.minimum(passed, follower.passed())
    return PurgeLimits(passed, now - ages.young, never, now - ages.held)


def holders(bucket: Bucket, partition: int, below: int) -> list[Holder]:
    """Return the holders that have not passed a seqno of a partition."""
    found = [
        Holder("stream", follower.options.consumer or follower.options.peer, int(seqno))
        for follower in bucket.followers
        if (seqno := follower.passed()[partition]) < below
    ]
    newest = int(bucket.partitions.newest_id[partition])
    found += [
        Holder("consumer", name, seqno)
        for name, seqno in bucket.consumer_positions.holders(partition, newest, below)
    ]
    found += [
        Holder("cut", name, seqno)
        for name, seqno in bucket.cuts.holders(partition)
        if seqno < below
    ]
    return found


def raise_purges(bucket: Bucket, purges: Mapping[int, int]) -> None:
    """Raise the purge seqnos of a replica to those of its upstream, which sends no older tombstones any more."""
    table = bucket.partitions
    raised = [p for p, seqno in purges.items() if seqno > table.purge[p]]
    for partition in raised:
        table.purge[partition] = purges[partition]
    _tell_raised(bucket, raised)


def _tell_raised(bucket: Bucket, partitions: Sequence[int]) -> None:
    if partitions:
        bucket.purge_raises += 1
        bucket.raised_last[list(partitions)] = bucket.purge_raises
        for follower in bucket.followers:
            # The follower ends or rewinds its streams before it does anything else.
            follower.wake()


def begin_purge(
    bucket: Bucket, purges: Mapping[int, Purge], ages: PurgeAges, now: int
) -> dict[int, int]:
    """Raise purge seqnos, before anything is stored, and return those that were raised by partition.

    A reader may have come since the limits were taken; partitions that it holds are left out and must not be purged.
    From here on Start refuses seqnos below, streams between 0 and the purge seqno end, and streams at 0 read nothing
    until ``end_purge``.
    """
    limits = purge_limits(bucket, ages, now)
    raised = {
        partition: purge.seqno
        for partition, purge in purges.items()
        if purge.seqno <= limits.never[partition] and purge.held_seqno <= limits.passed[partition]
    }
    table = bucket.partitions
    for partition, seqno in raised.items():
        table.purge[partition] = max(int(table.purge[partition]), seqno)
        bucket.purging[partition] = table.purge[partition]
    _tell_raised(bucket, list(raised))
    return raised


def end_purge(bucket: Bucket, partitions: Iterable[int]) -> None:
    """Let streams read again: the purge is stored, or was given up."""
    ended = list(partitions)
    if not ended:
        return
    bucket.purging[ended] = 0
    for follower in bucket.followers:
        follower.wake()
