"""What an operator asks of a server; ``AsyncClient`` and ``AsyncBucket`` call these."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

import grpc

from upr_client._async.adapter import unary
from upr_client.messages import call_error, check_name
from upr_client.purge_info import PartitionPurge, partition_purge
from upr_client.server_info import (
    ConsumerInfo,
    ConsumerPosition,
    ServerStatus,
    StorageInfo,
    consumer_info,
    consumer_positions,
    reset_request,
    server_status,
    storage_info,
)
from upr_protocol.wire.v1 import admin_service_pb2


async def _ask(method: Callable[..., Any], request: Any, seconds: float) -> Any:
    try:
        return await unary(method, request, seconds)
    except grpc.RpcError as error:
        raise call_error(error) from error


async def get_status(stub: Any, seconds: float) -> ServerStatus:
    """Return what the server process is and uses; raises UprError after ``seconds``."""
    request = admin_service_pb2.GetStatusRequest()
    return server_status(await _ask(stub.GetStatus, request, seconds))


async def get_storage(stub: Any, bucket: str, seconds: float) -> StorageInfo:
    """Return what a bucket takes on disk; raises UprError after ``seconds``."""
    request = admin_service_pb2.GetStorageRequest(bucket=bucket)
    return storage_info(await _ask(stub.GetStorage, request, seconds))


async def list_consumers(
    stub: Any, bucket: str, with_positions: bool, seconds: float
) -> list[ConsumerInfo]:
    """Return the registered consumers by name; raises UprError after ``seconds``."""
    request = admin_service_pb2.ListConsumersRequest(bucket=bucket, with_positions=with_positions)
    answer = await _ask(stub.ListConsumers, request, seconds)
    return [consumer_info(message) for message in answer.consumers]


async def forget_consumer(stub: Any, bucket: str, name: str, seconds: float) -> bool:
    """Have a consumer forgotten; False when it is not known. Raises UprError after ``seconds``."""
    request = admin_service_pb2.ForgetConsumerRequest(
        bucket=bucket, name=check_name(name, "consumer")
    )
    answer = await _ask(stub.ForgetConsumer, request, seconds)
    return bool(answer.forgotten)


async def reset_consumer(
    stub: Any,
    bucket: str,
    name: str,
    to: Literal["beginning", "now"] | datetime,
    partitions: Iterable[int],
    seconds: float,
) -> dict[int, ConsumerPosition]:
    """Set a consumer's stored positions, and return them by partition; raises UprError after ``seconds``."""
    request = reset_request(bucket, name, to, partitions)
    answer = await _ask(stub.ResetConsumer, request, seconds)
    return consumer_positions(answer.positions)


async def purge(
    stub: Any, bucket: str, partitions: Sequence[int], dry_run: bool, seconds: float
) -> list[PartitionPurge]:
    """Purge partitions, or say what would go; raises UprError after ``seconds``."""
    request = admin_service_pb2.PurgeRequest(bucket=bucket, partitions=partitions, dry_run=dry_run)
    answer = await _ask(stub.Purge, request, seconds)
    return [partition_purge(message) for message in answer.partitions]
