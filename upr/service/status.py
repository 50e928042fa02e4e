"""What an operator asks about the process and about a bucket's storage."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from upr import __version__
from upr.service.catalog import Catalog, DamagedBucket
from upr.service.handshake import Context, answering
from upr.service.host import BucketHost, now_micros
from upr.service.memory import memory_bytes
from upr.storage.heads import stretches
from upr_protocol.errors import DataDamagedError
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin

PARTITIONS_AT_ONCE = 32
"""Looked through in one go of a reader thread, so that streams are read for in between."""


@dataclass(frozen=True, slots=True)
class Process:
    """What is known of the server process.

    Attributes:
        server_id: drawn anew at each start.
        follow_calls, write_calls: return how many calls are open.
        began: monotonic seconds.
    """

    server_id: int
    follow_calls: Callable[[], int]
    write_calls: Callable[[], int]
    began: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Contents:
    """What the blocks of a bucket come to; see GetStorageResponse."""

    blocks: int = 0
    rows: int = 0
    block_bytes: int = 0
    unmerged_bytes: int = 0


def look_through(host: BucketHost, first: int, contents: Contents) -> None:
    """Add up what PARTITIONS_AT_ONCE partitions hold, from one on; damaged ones are left out."""
    for partition in range(first, min(first + PARTITIONS_AT_ONCE, PARTITIONS)):
        try:
            heads = host.store.heads(partition)
        except DataDamagedError:
            continue
        settled = host.merger.settled_of(partition, heads)
        sizes = [stretch.size for stretch in stretches(heads, settled)]
        contents.blocks += len(heads)
        contents.rows += sum(head.rows for head in heads)
        contents.block_bytes += sum(sizes)
        contents.unmerged_bytes += sum(sizes) - max(sizes, default=0)


class StatusMethods:
    """GetStatus and GetStorage."""

    _catalog: Catalog
    _process: Process

    @answering
    async def GetStatus(
        self, request: admin.GetStatusRequest, context: Context
    ) -> admin.GetStatusResponse:
        """Return what the process is and uses."""
        anonymous, mapped = memory_bytes()
        buckets = [_bucket_status(host) for host in self._catalog.hosts]
        buckets += map(_damaged_status, self._catalog.damaged)
        return admin.GetStatusResponse(
            server_version=__version__,
            server_id=self._process.server_id,
            uptime_seconds=time.monotonic() - self._process.began,
            anonymous_bytes=anonymous,
            mapped_bytes=mapped,
            follow_calls=self._process.follow_calls(),
            write_calls=self._process.write_calls(),
            buckets=sorted(buckets, key=lambda bucket: bucket.name),
        )

    @answering
    async def GetStorage(
        self, request: admin.GetStorageRequest, context: Context
    ) -> admin.GetStorageResponse:
        """Return what a bucket takes on disk, and what merging did."""
        host = self._catalog.find(request.bucket)
        bucket, counters = host.bucket, host.counters
        contents = Contents()
        for first in range(0, PARTITIONS, PARTITIONS_AT_ONCE):
            await host.in_reader(partial(look_through, host, first, contents))
        used_bytes = await host.in_reader(host.store.used_bytes)
        return admin.GetStorageResponse(
            bucket_version=bucket.identity.version,
            file_bytes=host.store.file_bytes(),
            used_bytes=used_bytes,
            journal_bytes=await host.journal_bytes(),
            tail_bytes=bucket.tail.bytes,
            blocks=contents.blocks,
            rows=contents.rows,
            block_bytes=contents.block_bytes,
            unmerged_bytes=contents.unmerged_bytes,
            ingested_bytes=counters.ingested_bytes,
            journalled_bytes=counters.journalled_bytes,
            flushed_bytes=counters.flushed_bytes,
            merge_input_bytes=counters.merge_input_bytes,
            merge_output_bytes=counters.merge_output_bytes,
            merge_input_rows=counters.merge_input_rows,
            merge_output_rows=counters.merge_output_rows,
            merge_seconds=counters.merge_seconds,
            purged_tombstones=counters.purged_tombstones,
            partitions_to_merge=host.merger.waiting,
            compression=bucket.identity.compression,
        )


def _bucket_status(host: BucketHost) -> admin.BucketStatus:
    bucket = host.bucket
    counts = [follower.stream_counts() for follower in bucket.followers]
    return admin.BucketStatus(
        name=bucket.identity.name,
        version=bucket.identity.version,
        tail_bytes=bucket.tail.bytes,
        tail_limit_bytes=host.tail_limit,
        volatile_bytes=bucket.tail.volatile_bytes,
        streams=sum(streams for streams, _ in counts),
        streams_from_store=sum(from_store for _, from_store in counts),
        cuts=len(bucket.cuts.live(now_micros())),
        damaged_partitions=len(bucket.partitions.problems),
        problem=problem_of(bucket.failure) if bucket.failure is not None else None,
    )


def _damaged_status(damaged: DamagedBucket) -> admin.BucketStatus:
    return admin.BucketStatus(
        name=damaged.name, version=damaged.version, problem=problem_of(damaged.problem)
    )
