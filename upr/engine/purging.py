"""Which tombstones may go, and what must be done so that nobody is left with what they deleted.

A tombstone that is gone can tell nobody any more. So it stays until it is old, and until every stream,
registered consumer and cut has passed it; when it is very old, streams and consumers hold it no longer. A reader
between 0 and the purge seqno begins again at 0: at 0 there is nothing to be deleted.

While a purge is being stored, streams below its purge seqno read nothing of the partition: one that read the
rows before, and goes on behind them afterwards, would keep a key whose tombstone went in between.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from upr.engine.bucket import Bucket
from upr.storage.tombstones import Purge, PurgeLimits
from upr_protocol.block import U64


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
    bucket.purge_raises += bool(raised)
    partitions = np.array(list(raised), np.int64)
    seqnos = np.array(list(raised.values()), np.uint64)
    for follower in bucket.followers:
        follower.purge_begins(partitions, seqnos)
    return raised


def end_purge(bucket: Bucket, partitions: Iterable[int]) -> None:
    """Let streams read on: what was to be dropped is gone, or stays."""
    ended = list(partitions)
    if not ended:
        return
    bucket.purging[ended] = 0
    for follower in bucket.followers:
        follower.wake()
