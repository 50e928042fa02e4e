"""Listing, creating and dropping buckets; ``AsyncClient`` calls these."""

from collections.abc import Callable
from typing import Any

import grpc

from upr_client._async.adapter import unary
from upr_client.bucket_info import BucketInfo, bucket_info
from upr_client.messages import call_error, check_name
from upr_protocol.wire.v1 import admin_service_pb2


async def _ask(method: Callable[..., Any], request: Any, seconds: float) -> Any:
    try:
        return await unary(method, request, seconds)
    except grpc.RpcError as error:
        raise call_error(error) from error


async def list_buckets(stub: Any, seconds: float) -> list[BucketInfo]:
    """Return all buckets by name; raises UprError after ``seconds``."""
    answer = await _ask(stub.ListBuckets, admin_service_pb2.ListBucketsRequest(), seconds)
    return [bucket_info(message) for message in answer.buckets]


async def create_bucket(stub: Any, name: str, compression: str, seconds: float) -> BucketInfo:
    """Make a bucket; raises UprError after ``seconds``."""
    request = admin_service_pb2.CreateBucketRequest(
        name=check_name(name, "bucket"), compression=compression
    )
    answer = await _ask(stub.CreateBucket, request, seconds)
    return bucket_info(answer.bucket)


async def drop_bucket(stub: Any, name: str, version: int | None, seconds: float) -> int:
    """Remove a bucket and return its version; raises UprError after ``seconds``."""
    request = admin_service_pb2.DropBucketRequest(name=check_name(name, "bucket"), version=version)
    answer = await _ask(stub.DropBucket, request, seconds)
    return int(answer.bucket_version)
