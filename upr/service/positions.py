"""LoadPositions and SavePositions: the positions that consumers keep in the server."""

import asyncio
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from upr.engine.bucket import Bucket
from upr.engine.owners import Hold, fenced
from upr.engine.saves import Save
from upr.service.catalog import check_name, chosen_partitions
from upr.service.cuts import CutMethods
from upr.service.handshake import Context, answering
from upr.service.host import BucketHost, now_micros
from upr.service.leases import micros
from upr_protocol.block import U64
from upr_protocol.errors import (
    InvalidArgumentError,
    PositionDamagedError,
    ShuttingDownError,
    UprError,
)
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.positions import position_from_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

POSITIONS_AT_ONCE = 128
"""Checked in one turn of the event loop, about two milliseconds."""


def loop_micros() -> int:
    """Return the time on the clock of leases, microseconds."""
    return micros(asyncio.get_running_loop().time())


class PositionMethods(CutMethods):
    """LoadPositions and SavePositions, and the calls for cuts and the handshake."""

    @answering
    async def LoadPositions(
        self, request: wire.LoadPositionsRequest, context: Context
    ) -> wire.LoadPositionsResponse:
        """Return what is stored, with every save that had begun when this was asked."""
        host = self._catalog.of(request)
        name = check_name(request.consumer, "consumer")
        partitions = sorted(chosen_partitions(request.partitions))
        await host.acknowledged.settled(name)
        consumer = host.bucket.consumer_positions.get(name)
        response = wire.LoadPositionsResponse(bucket_version=host.bucket.identity.version)
        if consumer is None:
            return response
        damaged = []
        for partition in partitions:
            if (stored := consumer.positions.get(partition)) is None:
                continue
            try:
                position = wire.Position.FromString(stored)
            except DecodeError:
                damaged.append(partition)
            else:
                response.positions.append(position)
        if damaged:
            raise _damaged(name, damaged)
        return response

    @answering
    async def SavePositions(
        self, request: wire.SavePositionsRequest, context: Context
    ) -> wire.SavePositionsResponse:
        """Store what the sender may save; the rest is refused."""
        host = self._catalog.find(request.bucket, request.bucket_version)
        check_name(request.consumer, "consumer")
        if request.member:
            check_name(request.member, "member")
        await _check(request.positions, request.bucket_version, request.generation)
        if host.stopping:
            raise host.gone or ShuttingDownError("the server is stopping", hint="connect again")
        hold, save = _begin(host, request)
        if save is not None:
            await asyncio.shield(save)
        response = wire.SavePositionsResponse()
        for message in (request.positions[i] for i in np.flatnonzero(~hold.allowed).tolist()):
            what = (
                f"partition {message.partition} is not member {request.member!r}'s, or not any more"
            )
            problem = problem_of(fenced(what))
            response.refused_partitions.append(
                types.RefusedPartition(partition=message.partition, problem=problem)
            )
        return response


async def _check(positions: Sequence[wire.Position], bucket_version: int, generation: int) -> None:
    """Check positions and have them say under which generation they are stored."""
    if positions:
        chosen_partitions([message.partition for message in positions])
    for i, message in enumerate(positions):
        position_from_message(message, bucket_version)
        # What this server does not know must not be stored either: its size has no limit.
        message.DiscardUnknownFields()  # type: ignore[no-untyped-call, unused-ignore]
        message.generation = generation
        if i % POSITIONS_AT_ONCE == POSITIONS_AT_ONCE - 1:
            await asyncio.sleep(0)


def _begin(
    host: BucketHost, request: wire.SavePositionsRequest
) -> tuple[Hold, "asyncio.Task[None] | None"]:
    """Decide who may save what, and hand it to the store, in this one step."""
    owners = host.bucket.owners
    partitions = np.array([message.partition for message in request.positions], np.int64)
    hold = owners.hold(
        request.consumer, request.member, request.generation, partitions, loop_micros()
    )
    allowed = [request.positions[i] for i in np.flatnonzero(hold.allowed).tolist()]
    if not allowed:
        return hold, None
    try:
        _check_highs(host.bucket, hold, allowed)
        save = Save(
            request.consumer,
            request.generation,
            hold.partitions,
            _column([message.failover_id for message in allowed]),
            _column([message.seqno for message in allowed]),
            [message.SerializeToString() for message in allowed],
            now_micros(),
        )
        task = host.acknowledged.begin(save, lambda: owners.let_go(hold, loop_micros()))
    except UprError:
        owners.let_go(hold, loop_micros())
        raise
    return hold, task


def _check_highs(bucket: Bucket, hold: Hold, positions: Sequence[wire.Position]) -> None:
    highs = bucket.partitions.high[hold.partitions].tolist()
    for message, high in zip(positions, highs, strict=True):
        if message.seqno > high:
            raise InvalidArgumentError(
                f"the position of partition {message.partition} is at seqno {message.seqno}, its high seqno is {high}",
                hint="save only what was received from this server",
            )


def _column(values: list[int]) -> U64:
    return np.array(values, np.uint64)


def _damaged(name: str, partitions: list[int]) -> PositionDamagedError:
    shown = ", ".join(map(str, partitions[:5])) + (", ..." if len(partitions) > 5 else "")
    return PositionDamagedError(
        f"the stored positions of consumer {name!r} in {len(partitions)} partitions ({shown}) are damaged",
        hint=f"'upr-admin consumers reset {name} --partitions ...' says where it goes on there; its data must fit",
    )
