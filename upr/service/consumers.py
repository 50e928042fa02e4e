"""What an operator asks about registered consumers, and has done to them."""

import asyncio
from collections.abc import Mapping, Sequence

import lmdb
import numpy as np

from upr.engine.bucket import Bucket
from upr.engine.consumers import Consumer
from upr.engine.members import Group
from upr.engine.saves import Save
from upr.engine.streams import POSITIONS_RESET
from upr.service.beginnings import beginnings
from upr.service.catalog import Catalog, check_name, chosen_partitions
from upr.service.handshake import Context, answering
from upr.service.host import now_micros
from upr.service.positions import loop_micros
from upr_protocol.errors import InvalidArgumentError, StorageFailedError
from upr_protocol.position import Position
from upr_protocol.wire.positions import position_to_message
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


class ConsumerMethods:
    """ListConsumers, ForgetConsumer and ResetConsumer."""

    _catalog: Catalog

    @answering
    async def ListConsumers(
        self, request: admin.ListConsumersRequest, context: Context
    ) -> admin.ListConsumersResponse:
        """Return the registered consumers and the groups, by name."""
        bucket = self._catalog.find(request.bucket).bucket
        response = admin.ListConsumersResponse(bucket_version=bucket.identity.version)
        registered = dict(bucket.consumer_positions)
        for name in sorted({*registered, *bucket.owners}):
            consumer = registered.get(name, Consumer(0))
            info = response.consumers.add()
            info.CopyFrom(_info(name, consumer, bucket))
            if request.with_positions:
                group = bucket.owners.group(name)
                owned = set() if group is None else group.owner_names().keys()
                partitions = sorted({*np.flatnonzero(consumer.known).tolist(), *owned})
                info.positions.extend(_positions(name, consumer, bucket, partitions))
                # A thousand positions take a millisecond, and there may be a thousand consumers.
                await asyncio.sleep(0)
        return response

    @answering
    async def ForgetConsumer(
        self, request: admin.ForgetConsumerRequest, context: Context
    ) -> admin.ForgetConsumerResponse:
        """Forget a consumer, in memory and on disk; one that is connected registers again with its next Ack or save."""
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

    @answering
    async def ResetConsumer(
        self, request: admin.ResetConsumerRequest, context: Context
    ) -> admin.ResetConsumerResponse:
        """Set stored positions, durably, and end the consumer's calls; from this step on its owners are fenced."""
        host = self._catalog.find(request.bucket)
        bucket, name = host.bucket, check_name(request.name, "consumer")
        partitions = sorted(chosen_partitions(request.partitions))
        seqnos: Mapping[int, int] | None = None
        match request.WhichOneof("to"):
            case "to_time":
                seqnos = await beginnings(host, partitions, request.to_time)
            case "to_now":
                seqnos = await beginnings(host, partitions, None)
            case None:
                raise InvalidArgumentError(
                    f"no place to reset consumer {name!r} to",
                    hint="to the beginning, now or a time",
                )
        save, positions = _reset(name, bucket, partitions, seqnos)
        task = host.acknowledged.begin(save, lambda: None)
        # The room for it comes first, and what is stored tells under which generation.
        save.generation = bucket.owners.reset(name)
        if save.positions is not None:
            for position in positions:
                position.generation = save.generation
            save.positions = [position.SerializeToString() for position in positions]
        sole = bucket.consumers.get(name)
        if sole is not None:
            sole.end_call(POSITIONS_RESET)
        await asyncio.shield(task)
        consumer = bucket.consumer_positions.get(name)
        response = admin.ResetConsumerResponse()
        if consumer is not None:
            known = [partition for partition in partitions if consumer.known[partition]]
            response.positions.extend(_positions(name, consumer, bucket, known))
        return response


def _reset(
    name: str, bucket: Bucket, partitions: Sequence[int], seqnos: Mapping[int, int] | None
) -> tuple[Save, list[wire.Position]]:
    """Return the save that sets positions: to seqnos that are markers, or removes them; and what it is to store."""
    table, columns = bucket.partitions, np.array(partitions, np.int64)
    if seqnos is None:
        zeros = np.zeros(len(columns), np.uint64)
        return Save(name, 0, columns, zeros, zeros, None, now_micros()), []
    positions = []
    for partition in partitions:
        seqno, newest = seqnos[partition], int(table.newest_id[partition])
        position = Position(
            bucket.identity.version,
            newest,
            newest if seqno else None,
            seqno,
            seqno,
            (seqno,) if seqno else (),
            table.logs[partition],
        )
        positions.append(position_to_message(partition, position))
    at = np.array([seqnos[partition] for partition in partitions], np.uint64)
    save = Save(name, 0, columns, table.newest_id[columns], at, (), now_micros())
    return save, positions


def _info(name: str, consumer: Consumer, bucket: Bucket) -> admin.ConsumerInfo:
    known = consumer.known
    ahead = np.maximum(bucket.partitions.high, consumer.seqno) - consumer.seqno
    group = bucket.owners.group(name)
    return admin.ConsumerInfo(
        name=name,
        connected=name in bucket.consumers or (group is not None and group.has_calls),
        generation=max(consumer.generation, bucket.owners.generation(name)),
        last_ack_time=consumer.last_ack_time,
        partitions=int(known.sum()),
        lag=int(ahead[known].sum()),
        members=[] if group is None else _members(group),
    )


def _members(group: Group) -> list[admin.MemberInfo]:
    now = loop_micros()
    found = []
    for member in group:
        partitions, releasing = group.counts(member)
        left = max(member.expires - now, 0) if member.live else 0
        found.append(
            admin.MemberInfo(
                name=member.name,
                peer=member.seat.call.peer if member.seat is not None else "",
                partitions=partitions,
                releasing=releasing,
                lease_seconds=member.lease / 1e6,
                lease_left_seconds=left / 1e6,
            )
        )
    return found


def _positions(
    name: str, consumer: Consumer, bucket: Bucket, partitions: Sequence[int]
) -> list[admin.ConsumerPosition]:
    group = bucket.owners.group(name)
    owners = {} if group is None else group.owner_names()
    columns = (
        consumer.failover_id[partitions].tolist(),
        consumer.seqno[partitions].tolist(),
        consumer.time[partitions].tolist(),
        bucket.partitions.high[partitions].tolist(),
    )
    return [
        admin.ConsumerPosition(
            partition=partition,
            failover_id=failover_id,
            seqno=seqno,
            member=owners.get(partition, ""),
            high_seqno=high,
            time=time,
        )
        for partition, failover_id, seqno, time, high in zip(partitions, *columns, strict=True)
    ]
