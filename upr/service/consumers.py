"""What an operator asks about registered consumers."""

import asyncio

import lmdb
import numpy as np

from upr.engine.consumers import Consumer
from upr.service.catalog import Catalog, check_name
from upr.service.handshake import Context, answering
from upr_protocol.block import U64
from upr_protocol.errors import StorageFailedError
from upr_protocol.wire.v1 import admin_service_pb2 as admin


class ConsumerMethods:
    """ListConsumers and ForgetConsumer."""

    _catalog: Catalog

    @answering
    async def ListConsumers(
        self, request: admin.ListConsumersRequest, context: Context
    ) -> admin.ListConsumersResponse:
        """Return the registered consumers by name."""
        bucket = self._catalog.find(request.bucket).bucket
        response = admin.ListConsumersResponse(bucket_version=bucket.identity.version)
        for name, consumer in list(bucket.consumer_positions):
            info = _info(name, consumer, bucket.partitions.high)
            info.connected = name in bucket.consumers
            response.consumers.append(info)
            if request.with_positions:
                response.consumers[-1].positions.extend(_positions(consumer))
                # A thousand positions take a millisecond, and there may be a thousand consumers.
                await asyncio.sleep(0)
        return response

    @answering
    async def ForgetConsumer(
        self, request: admin.ForgetConsumerRequest, context: Context
    ) -> admin.ForgetConsumerResponse:
        """Forget a consumer, in memory and on disk; one that is connected registers again with its next Ack."""
        host = self._catalog.find(request.bucket)
        forgotten = host.bucket.consumer_positions.forget(check_name(request.name, "consumer"))
        if forgotten:
            try:
                await host.acknowledged.save()
            except (OSError, lmdb.Error) as error:
                raise StorageFailedError(
                    f"consumer {request.name!r} is forgotten, but its rows could not be removed yet: {error}",
                    hint="the server tries again by itself; until then a restart brings it back",
                    retriable=True,
                ) from error
        return admin.ForgetConsumerResponse(forgotten=forgotten)


def _info(name: str, consumer: Consumer, high: U64) -> admin.ConsumerInfo:
    known = consumer.known
    ahead = np.maximum(high, consumer.seqno) - consumer.seqno
    return admin.ConsumerInfo(
        name=name,
        generation=consumer.generation,
        last_ack_time=consumer.last_ack_time,
        partitions=int(known.sum()),
        lag=int(ahead[known].sum()),
    )


def _positions(consumer: Consumer) -> list[admin.ConsumerPosition]:
    partitions = np.flatnonzero(consumer.known)
    columns = (consumer.failover_id[partitions].tolist(), consumer.seqno[partitions].tolist())
    return [
        admin.ConsumerPosition(partition=partition, failover_id=failover_id, seqno=seqno)
        for partition, failover_id, seqno in zip(partitions.tolist(), *columns, strict=True)
    ]
