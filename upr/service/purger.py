"""Purging on purpose: for the operator, and now and then by itself where no merge comes by."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import lmdb

from upr.engine.merging import plan_whole
from upr.engine.purging import Holder, holders
from upr.service.merger import REST_SECONDS_MAX
from upr.storage.heads import Head, MergeRange
from upr.storage.large_merge import Examined, RangeTooLargeError, Tombstones, count_tombstones
from upr_protocol.errors import (
    CorruptBlockError,
    DataDamagedError,
    NoRoomError,
    StorageFailedError,
    TooManyError,
    UprError,
)
from upr_protocol.limits import PARTITIONS

if TYPE_CHECKING:
    from upr.service.host import BucketHost

log = logging.getLogger(__name__)

SWEEP_FRACTION = 0.25
SWEEP_SECONDS_MIN = 1.0
SWEEP_SECONDS_MAX = 6 * 3600.0
WORTH_FRACTION = 0.01
"""A sweep writes a partition anew when at least this part of its rows are tombstones that may go."""


@dataclass(slots=True)
class Purged:
    """What became, or would become, of one partition's tombstones."""

    tombstones: Tombstones
    purged: int = 0
    holders: list[Holder] = field(default_factory=list)


async def purge_partition(
    host: "BucketHost", partition: int, *, dry_run: bool = False, worth: float = 0.0
) -> Purged:
    """Drop a partition's old tombstones, as far as everybody has passed them.

    Who gives up waiting does not stop it half-way: what is on its way to the store is not called back, and until
    it is there nobody may read the partition at 0.

    Args:
        dry_run: change nothing.
        worth: do it only if at least this part of the partition's rows would go.

    Raises:
        DataDamagedError, CorruptBlockError: a block is missing or fails its checks.
        TooManyError: the partition has more keys than are compared at once.
        NoRoomError: the disk or the map has no room for what is written anew.
        StorageFailedError: the store could not be written.
    """
    return await host.merger.whole(_purge(host, partition, dry_run, worth))


async def _purge(host: "BucketHost", partition: int, dry_run: bool, worth: float) -> Purged:
    merger, store, bucket = host.merger, host.store, host.bucket
    async with merger.turn:
        pinned = bucket.cuts.pinned(partition)
        old = merger.now() - merger.ages.young

        def look() -> tuple[Tombstones, MergeRange | None]:
            heads: Sequence[Head] = store.heads(partition)
            counted = count_tombstones(partition, heads, store.blocks, old)
            return counted, plan_whole(partition, heads, pinned) if counted.old else None

        tombstones, whole = await merger.in_thread(look)
        if whole is not None and merger.crosses_pin(whole):
            whole = None
        result = Purged(tombstones)
        if whole is not None:
            try:
                examined = await merger.examine(whole)
            except RangeTooLargeError:
                raise TooManyError(
                    f"partition {partition} has {whole.rows} rows, too many to be compared at once",
                    hint="its tombstones stay",
                    retriable=False,
                ) from None
            count = examined.purge.count if examined.purge else 0
            if dry_run:
                result.purged = count
            elif count and count >= worth * tombstones.rows:
                result.purged = await _rewritten(host, whole, examined)
        if tombstones.old:
            result.holders = _holders(host, partition, tombstones.newest_old)
        return result


async def _rewritten(host: "BucketHost", whole: MergeRange, examined: Examined) -> int:
    try:
        return await host.merger.rewrite(whole, examined)
    except (OSError, lmdb.Error) as error:
        raise StorageFailedError(
            f"partition {whole.partition} could not be written: {error}",
            hint="see the server's log",
            retriable=True,
        ) from error


def _holders(host: "BucketHost", partition: int, newest_old: int) -> list[Holder]:
    found = holders(host.bucket, partition, newest_old)
    if newest_old == int(host.bucket.partitions.durable[partition]):
        found.append(Holder("newest", "", newest_old - 1))
    return found


async def sweep(host: "BucketHost") -> None:
    """Purge partitions that have tombstones, until the merger stops, each a few times in the age of a tombstone."""
    interval = SWEEP_FRACTION * host.merger.ages.young / 1e6
    interval = min(max(interval, SWEEP_SECONDS_MIN), SWEEP_SECONDS_MAX)
    seen = [-1] * PARTITIONS
    while await host.merger.rest(interval):
        for partition in range(PARTITIONS):
            if host.merger.stopped:
                return
            started = time.monotonic()
            stored = int(host.bucket.partitions.stored[partition])
            if seen[partition] == stored or partition in host.bucket.partitions.problems:
                continue
            try:
                result = await purge_partition(host, partition, worth=WORTH_FRACTION)
                if result.tombstones.count == result.purged:
                    # Nothing is left to be purged until something new is stored.
                    seen[partition] = stored
            except (DataDamagedError, CorruptBlockError) as error:
                host.merger.damaged({partition: error})
            except NoRoomError as error:
                log.warning("purging waits for room", extra={"error": error.message})
                break
            except (OSError, lmdb.Error, UprError) as error:
                log.error("purging failed", extra={"partition": partition, "error": str(error)})
            await host.merger.rest(min(time.monotonic() - started, REST_SECONDS_MAX))
