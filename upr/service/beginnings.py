"""Where streams, and positions that are reset, begin: at a time, or now."""

from collections.abc import Iterable, Sequence

import lmdb

from upr.engine.beginnings import Beginnings
from upr.service.host import BucketHost
from upr.service.starts import Found
from upr.storage.by_time import StoredBeginning, search
from upr_protocol.errors import DataDamagedError


async def search_stored(host: BucketHost, wanted: Sequence[tuple[int, int]]) -> list[Found]:
    """Search the stored blocks for (partition, time) pairs; times are microseconds since the epoch.

    It is done in bites, between which others have their turn with the store. A partition whose blocks are damaged
    gets the error, which the status tells of from then on.

    Raises:
        BucketGoneError: the bucket was dropped.
    """
    results: list[Found] = []
    while len(results) < len(wanted):
        left = wanted[len(results) :]
        try:
            results += await host.in_reader(lambda left=left: search(host.store, left))  # type: ignore[misc]
        except (OSError, lmdb.Error) as error:
            damaged = DataDamagedError(f"the store cannot be read: {error}", retriable=True)
            return [*results, *(damaged for _ in left)]
    host.found_damaged(
        {
            partition: result
            for (partition, _), result in zip(wanted, results, strict=True)
            if isinstance(result, DataDamagedError)
        }
    )
    return results


async def beginnings(
    host: BucketHost, partitions: Iterable[int], time: int | None
) -> dict[int, int]:
    """Return the seqno of each partition above which a client begins that wants what comes from now on, or from a time.

    They are what a Start with from_now or from_time would be told, all of them decided in one step, the last one before
    this returns. No partition's seqno is above its newest complete durable marker.

    Args:
        partitions: 0 to 1023.
        time: microseconds since the epoch; None for now.

    Raises:
        DataDamagedError: a partition's blocks are damaged.
        BucketGoneError: the bucket was dropped.
    """
    chosen = list(partitions)
    found: list[Found] = []
    if time is not None:
        found = await search_stored(host, [(partition, time) for partition in chosen])
    decided = Beginnings(host.bucket.markers.seqno, host.bucket.tail)
    if time is None:
        return {partition: decided.now(partition) for partition in chosen}
    result: dict[int, int] = {}
    for partition, stored in zip(chosen, found, strict=True):
        if not isinstance(stored, StoredBeginning):
            raise stored
        result[partition] = decided.at_time(partition, time, stored)
    return result
