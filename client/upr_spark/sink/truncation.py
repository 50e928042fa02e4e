"""``mode("overwrite")``: when everything is written, the keys that were there before and were not written go.

So nothing is missing at any moment, and a job that fails has deleted nothing. A key that was there when the job began
is known by its newest mutation: it lies at or below the high seqno that its partition had then.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from upr_client import Only
from upr_client.arrow import blocks
from upr_client.lowlevel import hello, write_blocks
from upr_client.types import Bucket
from upr_protocol.errors import BucketGoneError
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.grpc import error_of
from upr_spark.sink.options import SinkOptions

_logger: Final = logging.getLogger("upr_spark")
_ROWS_AT_ONCE: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a bucket was when a job began.

    Args:
        version: of the bucket.
        partitions: partition, failover id and high seqno of those that hold anything.
    """

    version: int
    partitions: tuple[tuple[int, int, int], ...]


def look(options: SinkOptions) -> Beginning:
    """Return where the bucket is now.

    Raises:
        UprError: the server cannot be asked.
    """
    with options.connection.open() as client:
        bucket = client.bucket(options.connection.bucket)
        known = tuple(
            (info.partition, info.failover_id, info.high_seqno)
            for info in client.admin.partitions(bucket)
            if info.high_seqno
        )
        return Beginning(bucket.version, known)


def delete_older(options: SinkOptions, beginning: Beginning) -> int:
    """Delete the keys that were not written since the beginning, and return how many.

    Each partition's keys are read and compared, at most about 2 million mutations at a time. A key that somebody else
    writes between its reading and its deletion is deleted too.

    Raises:
        UprError: it could not be done to the end; every key is deleted or untouched, and doing it again is harmless.
    """
    deleted = 0
    with options.connection.open() as client:
        bucket = client.bucket(options.connection.bucket)
        limits = _limits(bucket, beginning)
        for partitions in _groups(limits):
            keys = _older_keys(bucket, partitions, limits)
            nothing = pa.nulls(len(keys), pa.binary())
            write_blocks(
                bucket, blocks(keys, nothing, block_rows=options.block_rows), options.durability
            )
            deleted += len(keys)
    _logger.info("%s: %d keys that were not written anew are deleted", bucket.name, deleted)
    return deleted


def _limits(bucket: Bucket, beginning: Beginning) -> npt.NDArray[np.int64]:
    """Return up to where each partition's mutations are older than the job: int64, shape (1024,).

    Above the seqno where a new history began since, the numbers were given anew, so there nothing is old.
    """
    limits = np.zeros(PARTITIONS, np.int64)
    if not beginning.partitions:
        return limits
    answers = hello(bucket, {partition: id_ for partition, id_, _ in beginning.partitions})
    if bucket.version != beginning.version:
        raise BucketGoneError(
            f"bucket {bucket.name} was dropped and created anew since the job began",
            hint="nothing was deleted; what the job wrote before is gone, so run it again",
        )
    for (partition, _, high), answer in zip(beginning.partitions, answers, strict=True):
        if answer.HasField("problem"):
            raise error_of(answer.problem)
        stays = answer.rollback_seqno if answer.HasField("rollback_seqno") else high
        limits[partition] = min(high, stays)
    return limits


def _groups(limits: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    """Cut the partitions that may have old keys into groups of about as many rows as fit into memory."""
    group: list[int] = []
    for partition in np.flatnonzero(limits).tolist():
        if group and limits[[*group, partition]].sum() > _ROWS_AT_ONCE:
            yield group
            group = []
        group.append(partition)
    if group:
        yield group


def _older_keys(bucket: Bucket, partitions: list[int], limits: npt.NDArray[np.int64]) -> Any:
    """Return the keys whose newest mutation is a set, and old."""
    parts = []
    # Not only what is durable: a key that the job wrote must not look old.
    with bucket.changes(
        until="now", only=Only(partitions, keys_only=True, stability="memory")
    ) as changes:
        for batch in changes.batches():
            parts.append(batch.to_arrow().select(["partition", "seqno", "deleted", "key"]))
    if not parts:
        return pa.array([], pa.binary())
    table = pa.Table.from_batches(parts)
    # Even for a set, odd for a delete; the newest one of a key is the largest.
    versions = table["seqno"].to_numpy() * 2 + table["deleted"].to_numpy()
    named = pa.table({"key": table["key"], "partition": table["partition"], "version": versions})
    newest = named.group_by("key").aggregate([("version", "max"), ("partition", "max")])
    version = newest["version_max"].to_numpy()
    old = version // 2 <= limits[newest["partition_max"].to_numpy()]
    return newest["key"].filter(pa.array(old & (version % 2 == 0)))
