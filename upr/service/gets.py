"""Get: the newest values of some keys, out of the tail and the store."""

import asyncio
from collections.abc import Sequence

import lmdb
import numpy as np

from upr.service.catalog import Catalog
from upr.service.handshake import Context, answering
from upr.service.host import BucketHost
from upr.storage.lookup import Lookup, StoreSearch, TailSearch
from upr_protocol.errors import (
    DataDamagedError,
    InvalidArgumentError,
    StorageFailedError,
    TooManyError,
)
from upr_protocol.limits import (
    GET_ANSWER_BYTES_MAX,
    GET_CALLS_MAX,
    GET_KEYS_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    PARTITIONS,
)
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.v1 import key_value_service_pb2 as wire

GETS_AT_ONCE = 2
"""Searches that run at the same time; the others wait for their turn."""


class GetMethods:
    """Get.

    Args:
        catalog: the buckets.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._turns = asyncio.Semaphore(GETS_AT_ONCE)
        self._open_gets = 0

    @answering
    async def Get(self, request: wire.GetRequest, context: Context) -> wire.GetResponse:
        """Return the newest value of each key."""
        host = self._catalog.of(request)
        check_keys(request.keys)
        if self._open_gets >= GET_CALLS_MAX:
            raise TooManyError(
                f"{self._open_gets} Gets are open, the limit is {GET_CALLS_MAX}",
                hint="one Get takes many keys; to read much, follow the bucket",
            )
        self._open_gets += 1
        try:
            async with self._turns:
                return await _get(host, list(request.keys))
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"the store cannot be read: {error}", retriable=True
            ) from error
        finally:
            self._open_gets -= 1


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise InvalidArgumentError unless there are 1 to GET_KEYS_MAX keys within their limits."""
    if not 1 <= len(keys) <= GET_KEYS_MAX:
        raise InvalidArgumentError(
            f"a Get of {len(keys)} keys, it takes 1 to {GET_KEYS_MAX}", hint="send several"
        )
    for key in keys:
        if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            raise InvalidArgumentError(
                f"a key of {len(key)} bytes, a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
            )


async def find_newest(host: BucketHost, lookup: Lookup) -> None:
    """Search until every key was found, is known not to be there, or cannot be known.

    What is found is as new as this call, or newer. The tail is looked through as it was in one step, and then the
    store, to which it may have been flushed meanwhile. A key that was not found may have been written once more,
    stored and merged behind the back of the search: where something was stored, what came since is looked through too.
    """
    bucket = host.bucket
    table = bucket.partitions
    for partition in np.flatnonzero(lookup.pending).tolist():
        if not table.serves(partition):
            lookup.fail([partition], table.refusal(partition))
    floors = np.zeros(PARTITIONS, np.uint64)
    while lookup.pending.any():
        stored = table.stored.copy()
        tail = bucket.tail
        in_tail = TailSearch(lookup, tail.range(tail.first, tail.end))
        while not await host.in_reader(in_tail.bite):
            pass
        in_store = StoreSearch(lookup, host.store, floors)
        while not await host.in_reader(in_store.bite):
            pass
        lookup.settle(table.stored == stored)
        floors = stored


async def _get(host: BucketHost, keys: list[bytes]) -> wire.GetResponse:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    lookup = Lookup(list(numbers), GET_ANSWER_BYTES_MAX)
    await find_newest(host, lookup)
    damaged = {
        partition: error
        for partition, error in lookup.problems.items()
        if isinstance(error, DataDamagedError)
    }
    host.found_damaged(damaged)
    response = wire.GetResponse(bucket_version=host.bucket.identity.version)
    ids = host.bucket.partitions.newest_id
    size = 0
    for key in keys:
        number = numbers[key]
        partition = int(lookup.partitions[number])
        newest = lookup.found.get(number)
        size += len(newest.value or b"") if newest is not None else 0
        if number >= lookup.end or (size > GET_ANSWER_BYTES_MAX and len(response.answers)):
            break
        if newest is None and partition in lookup.problems:
            response.answers.add(problem=problem_of(lookup.problems[partition]))
            continue
        response.answers.add(
            value=newest.value if newest is not None else None,
            seqno=newest.seqno if newest is not None else 0,
            failover_id=int(ids[partition]),
        )
    return response
