"""Compaction: which stored blocks to compact, and which tombstones may go.

*Blocks*, size-tiered for each partition. A stretch is what was merged together. Whenever the oldest stretch is no larger
than all that was stored after it, everything is merged, so what can be superseded is less than the oldest stretch. In
between, a stretch that is no larger than all behind it is merged with that as soon as these are FAN_IN together: a row
is merged again only after as much as its stretch was stored behind it, about log2(partition / flush) times at most, and
less often than that where flushes are small. No merge goes across a pinned seqno, or past the last complete marker.

*Tombstones*. A tombstone that is gone can tell nobody any more. So it stays until it is old, and until every stream,
registered consumer and cut has passed it; when it is very old, streams and consumers hold it no longer. A reader
between 0 and the purge seqno begins again at 0: at 0 there is nothing to be deleted. While a purge is being stored,
streams below its purge seqno read nothing of the partition: one that read the rows before, and goes on behind them
afterwards, would keep a key whose tombstone went in between.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from upr.engine.bucket import Bucket
from upr.storage.blocks import Head, MergeRange, Stretch, last_complete, stretches
from upr.storage.compact import Purge, PurgeLimits
from upr_protocol.block import U64

FAN_IN = 4
"""Fewer stretches than this are not merged, but for space: each merge costs something for each block it reads."""
BLOCK_COST = 1024
"""Counted on top of each block's bytes: the pages that it does not fill and the work that it makes anyway."""


def plan_merge(
    partition: int,
    heads: Sequence[Head],
    pinned: Sequence[int],
    settled: Iterable[tuple[int, int]] = (),
) -> MergeRange | None:
    """Return what to merge next in a partition, None when its tiers are in order.

    Args:
        heads: its stored blocks, oldest first.
        pinned: seqnos that no merge may cross, ascending.
        settled: see ``stretches``.
    """
    complete = last_complete(heads)
    mergeable = [head for head in heads if head.end <= complete]
    for segment in segments(mergeable, pinned):
        tiers = stretches(segment, settled)
        first = _first_to_merge(tiers)
        if first is not None:
            chosen = [head for tier in tiers[first:] for head in tier.heads]
            return MergeRange(partition, tuple(chosen))
    return None


def plan_whole(partition: int, heads: Sequence[Head], pinned: Sequence[int]) -> MergeRange | None:
    """Return the longest range that begins at 0 and may be merged, for dropping tombstones."""
    complete = last_complete(heads)
    first = next(segments([h for h in heads if h.end <= complete], pinned), [])
    if not first or first[0].start != 0:
        return None
    return MergeRange(partition, tuple(first))


def segments(heads: Sequence[Head], pinned: Sequence[int]) -> Iterator[list[Head]]:
    """Yield the blocks between pinned seqnos, oldest first.

    A block across a pinned seqno, which there may be if the pin came back from the dead, is a segment of its own.
    """
    segment: list[Head] = []
    for head in heads:
        if segment and any(segment[0].start < pin < head.end for pin in pinned):
            yield segment
            segment = []
        segment.append(head)
    if segment:
        yield segment


def _first_to_merge(tiers: Sequence[Stretch]) -> int | None:
    """Return the first stretch that is no larger than all behind it, and has enough behind it."""
    behind = sum(_cost(tier) for tier in tiers)
    for i, tier in enumerate(tiers[:-1]):
        cost = _cost(tier)
        behind -= cost
        if cost <= behind and (i == 0 or len(tiers) - i >= FAN_IN):
            return i
    return None


def _cost(tier: Stretch) -> int:
    return tier.size + BLOCK_COST * len(tier.heads)


@dataclass(frozen=True, slots=True)
class PurgeAges:
    """How old tombstones must be, in microseconds.

    Attributes:
        young: below this age none goes.
        held: from this age on only cuts hold one up.
    """

    young: int
    held: int


@dataclass(frozen=True, slots=True)
class Holder:
    """One that has not passed a seqno: kind is ``stream``, ``consumer`` or ``cut``."""

    kind: str
    name: str
    seqno: int


def purge_limits(bucket: Bucket, ages: PurgeAges, now: int) -> PurgeLimits:
    """Return what may be purged at this moment.

    Args:
        now: microseconds since the epoch.
    """
    never = _below_high(bucket)
    never = np.minimum(never, bucket.cuts.lowest())
    passed = np.minimum(never, _passed_by_all(bucket))
    return PurgeLimits(passed, now - ages.young, never, now - ages.held)


def _below_high(bucket: Bucket) -> U64:
    """The row at the high seqno is never removed: it is what shows how far the partition got.

    What is not durable does not count: after a crash the durable seqno is the high seqno.
    """
    high = bucket.partitions.durable
    return high - np.minimum(high, np.uint64(1))


def _passed_by_all(bucket: Bucket) -> U64:
    limit = bucket.consumer_positions.limit(bucket.partitions.newest_id)
    for follower in bucket.followers:
        limit = np.minimum(limit, follower.passed())
    return limit


def holders(bucket: Bucket, partition: int, below: int) -> list[Holder]:
    """Return who has not passed a seqno of a partition."""
    found = [
        Holder("stream", follower.name, int(seqno))
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


def begin_purge(
    bucket: Bucket, purges: Mapping[int, Purge], ages: PurgeAges, now: int
) -> dict[int, int]:
    """Raise purge seqnos, before anything is stored, and return those that were raised by partition.

    Somebody may have come since the limits were taken; partitions where that matters are left out, and
    nothing of theirs may be purged. From here on Start refuses what is below, streams between 0 and the purge
    seqno end, and those at 0 read nothing until ``end_purge``.
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
    if raised:
        bucket.purge_raises += 1
        bucket.raised_last[list(raised)] = bucket.purge_raises
        for follower in bucket.followers:
            # It sees to its streams before it does anything else.
            follower.wake()
    return raised


def end_purge(bucket: Bucket, partitions: Iterable[int]) -> None:
    """Let streams read on: what was to be dropped is gone, or stays."""
    ended = list(partitions)
    if not ended:
        return
    bucket.purging[ended] = 0
    for follower in bucket.followers:
        follower.wake()
