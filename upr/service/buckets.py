"""Listing, creating and dropping buckets."""

import asyncio

import lmdb

from upr.service.catalog import Catalog, DamagedBucket
from upr.service.handshake import Context, answering
from upr.service.host import BucketHost
from upr_protocol.errors import BucketGoneError, StorageFailedError, UprError
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin


class BucketMethods:
    """ListBuckets, CreateBucket and DropBucket."""

    _catalog: Catalog

    @answering
    async def ListBuckets(
        self, request: admin.ListBucketsRequest, context: Context
    ) -> admin.ListBucketsResponse:
        """Return all buckets by name, those that could not be opened too."""
        found = await asyncio.gather(*(_info(host) for host in self._catalog.hosts))
        infos = [info for info in found if info is not None]
        infos += map(_damaged_info, self._catalog.damaged)
        return admin.ListBucketsResponse(buckets=sorted(infos, key=lambda info: info.name))

    @answering
    async def CreateBucket(
        self, request: admin.CreateBucketRequest, context: Context
    ) -> admin.CreateBucketResponse:
        """Make an empty bucket."""
        host = await self._catalog.create(request.name, request.compression)
        info = await _info(host)
        if info is None:
            raise BucketGoneError(f"bucket {request.name!r} was dropped as soon as it was made")
        return admin.CreateBucketResponse(bucket=info)

    @answering
    async def DropBucket(
        self, request: admin.DropBucketRequest, context: Context
    ) -> admin.DropBucketResponse:
        """Remove a bucket with its data; see ``Catalog.drop``."""
        known = request.HasField("version")
        version = await self._catalog.drop(request.name, request.version if known else None)
        return admin.DropBucketResponse(bucket_version=version)


async def _info(host: BucketHost) -> admin.BucketInfo | None:
    """Return what is listed of a bucket; None for one that is dropped meanwhile."""
    bucket = host.bucket
    problem: UprError | None = bucket.failure
    used = 0
    try:
        used = await host.in_reader(host.store.used_bytes)
    except BucketGoneError:
        return None
    except lmdb.Error as error:
        problem = problem or StorageFailedError(f"the store cannot be read: {error}")
    return admin.BucketInfo(
        name=bucket.identity.name,
        version=bucket.identity.version,
        compression=bucket.identity.compression,
        mutations=int(bucket.partitions.high.sum()),
        used_bytes=used,
        problem=problem_of(problem) if problem is not None else None,
    )


def _damaged_info(damaged: DamagedBucket) -> admin.BucketInfo:
    return admin.BucketInfo(
        name=damaged.name, version=damaged.version, problem=problem_of(damaged.problem)
    )
