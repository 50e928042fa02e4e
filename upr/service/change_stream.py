"""ChangeStreamService: the handshake, cuts and positions; Follow is in ``follow``."""

import asyncio
import math
from collections.abc import Sequence

import lmdb
import numpy as np
from google.protobuf.message import DecodeError

from upr import __version__
from upr.engine.bucket import Bucket
from upr.engine.consumers import Save
from upr.engine.groups import Hold, fenced
from upr.engine.streams import SHUTTING_DOWN
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.keepers import loop_micros
from upr.service.conversation import check_consumer, chosen_partitions, read_options
from upr.service.follow import FollowCall
from upr.service.overload.callers import Callers, peer_of
from upr.service.overload.frame_rounds import Rounds
from upr.service.overload.gate import read_open
from upr.service.overload.intake import Context, Intake
from upr.service.overload.sending_room import SendingRoom
from upr.service.replica_tables import cut_message
from upr.service.storage_trouble import words_of
from upr_protocol.errors import (
    InvalidArgumentError,
    PositionDamagedError,
    ShuttingDownError,
    StorageFailedError,
    UprError,
    shown,
)
from upr_protocol.failover import check_failover_id
from upr_protocol.flow import CreditWindow, Liveness, granted_window
from upr_protocol.handshake import answer_hello
from upr_protocol.limits import (
    CUT_LEASE_SECONDS,
    CUT_LEASE_SECONDS_MAX,
    READER_SECONDS,
    check_name,
)
from upr_protocol.wire.codec import (
    log_to_messages,
    positions_field,
    positions_from_messages,
    problem_of,
)
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types
from upr_protocol.wire.v1.replica_service_pb2 import SetMember

LOGS_AT_ONCE = 64
"""Failover logs written in one step of the event loop; each may have a thousand records."""


def hello_answer(bucket: Bucket, asked: wire.HelloPartition, with_log: bool) -> wire.HelloAnswer:
    """Answer step 1 of the handshake for one partition ("Handshakes" of the specification)."""
    table, partition = bucket.partitions, asked.partition
    if not table.serves(partition):
        return wire.HelloAnswer(partition=partition, problem=problem_of(table.refusal(partition)))
    log = table.logs[partition]
    answer = answer_hello(log, asked.failover_id if asked.HasField("failover_id") else None)
    return wire.HelloAnswer(
        partition=partition,
        rollback_seqno=answer.rollback_seqno,
        failover_id=answer.newest_id,
        high_seqno=int(table.high[partition]),
        durable_seqno=int(table.durable[partition]),
        failover_log=log_to_messages(log) if with_log else None,
        rule=answer.rule,
        words=answer.words,
    )


def lease_micros(seconds: float) -> int | None:
    """Return a lease in microseconds, at least 1; None for 0, the default. InvalidArgumentError for one out of range."""
    if not 0 <= seconds <= CUT_LEASE_SECONDS_MAX or math.isnan(seconds):
        raise InvalidArgumentError(
            f"lease is {seconds} s; must be above 0 and at most {CUT_LEASE_SECONDS_MAX:.0f}",
            hint="renew it in time for a longer one; 0 means the default",
        )
    return max(round(seconds * 1e6), 1) if seconds else None


POSITIONS_AT_ONCE = 128
"""Positions checked in one step of the event loop, which takes about two milliseconds."""


async def _check_positions(
    positions: Sequence[wire.Position], bucket_version: int, generation: int, log_records: int
) -> None:
    """Check positions and return their stored form: with their generation, and logs no longer than the server's."""
    if positions:
        chosen_partitions([message.partition for message in positions])
    for first in range(0, len(positions), POSITIONS_AT_ONCE):
        some = positions[first : first + POSITIONS_AT_ONCE]
        positions_from_messages(some, bucket_version)
        for message in some:
            # Drop unknown fields, whose size has no limit.
            message.DiscardUnknownFields()  # type: ignore[no-untyped-call, unused-ignore]
            message.generation = generation
            # Keep the newest records, which are last. Older ones than the server's log are of no use.
            del message.failover_log[:-log_records]
        await asyncio.sleep(0)


def _begin_save(
    host: BucketService, request: wire.SavePositionsRequest
) -> tuple[Hold, "asyncio.Task[None] | None"]:
    """Decide which positions the sender may save, and hand them to the store, in this step."""
    host.check_active()
    owners = host.bucket.owners
    partitions = np.array([message.partition for message in request.positions], np.int64)
    hold = owners.hold(
        request.consumer,
        request.member,
        request.generation,
        partitions,
        loop_micros(),
        request.number,
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
            np.array([message.failover_id for message in allowed], np.uint64),
            np.array([message.seqno for message in allowed], np.uint64),
            [message.SerializeToString() for message in allowed],
            host.disk.clock.now(),
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
                f"the position of partition {message.partition} is at seqno {message.seqno}; must be at most its high seqno {high}",
                hint="save only positions received from this server",
            )


def _is_position(data: bytes) -> bool:
    try:
        wire.Position.FromString(data)
    except DecodeError:
        return False
    return True


def _damaged_positions(name: str, partitions: list[int]) -> PositionDamagedError:
    few = ", ".join(map(str, partitions[:5])) + (", ..." if len(partitions) > 5 else "")
    return PositionDamagedError(
        f"the stored positions of consumer {shown(name)} in {len(partitions)} partitions ({few}) are damaged",
        hint=f"'upr-admin consumers reset {name} --partitions ...' sets where it resumes there; its data must match",
    )


class ChangeStreamMethods:
    """Methods of ChangeStreamService.

    Args:
        heartbeat_seconds: for clients that ask for none.
        reader_seconds: longest time that a consumer's connection may accept nothing while data waits.
    """

    def __init__(
        self,
        catalog: Catalog,
        intake: Intake,
        server_id: int,
        heartbeat_seconds: float,
        reader_seconds: float = READER_SECONDS,
        callers: Callers | None = None,
    ) -> None:
        self._catalog = catalog
        self._intake = intake
        self._server_id = server_id
        self._heartbeat_seconds = heartbeat_seconds
        self._reader_seconds = reader_seconds
        self._callers = callers or Callers()
        self._rounds = Rounds()
        self._rooms = SendingRoom(), SendingRoom()
        self._calls: set[FollowCall] = set()
        self._stopping = False

    async def Hello(self, request: wire.HelloRequest, context: Context) -> wire.HelloResponse:
        """Answer for any number of partitions; one invalid partition fails the request, and changes nothing."""
        bucket = self._catalog.of(request).bucket
        if request.partitions:
            chosen_partitions([asked.partition for asked in request.partitions])
        for asked in request.partitions:
            if asked.HasField("failover_id"):
                check_failover_id(asked.failover_id)
        answers = []
        for number, asked in enumerate(request.partitions, 1):
            answers.append(hello_answer(bucket, asked, request.with_log))
            if number % LOGS_AT_ONCE == 0 and request.with_log:
                await asyncio.sleep(0)
        return wire.HelloResponse(bucket_version=bucket.identity.version, answers=answers)

    async def GetFailoverLog(
        self, request: wire.GetFailoverLogRequest, context: Context
    ) -> wire.GetFailoverLogResponse:
        """Return complete logs, also of dead partitions."""
        bucket = self._catalog.find(request.bucket).bucket
        logs = []
        for number, partition in enumerate(chosen_partitions(request.partitions), 1):
            records = log_to_messages(bucket.partitions.logs[partition], with_epochs=True)
            logs.append(wire.PartitionFailoverLog(partition=partition, records=records))
            if number % LOGS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return wire.GetFailoverLogResponse(bucket_version=bucket.identity.version, logs=logs)

    async def CreateCut(
        self, request: wire.CreateCutRequest, context: Context
    ) -> wire.CreateCutResponse:
        """Pin partitions at this instant."""
        self._catalog.check_active()
        host = self._catalog.of(request)
        name = check_name(request.name, "cut")
        lease = lease_micros(request.lease_seconds) or int(CUT_LEASE_SECONDS * 1e6)
        partitions = sorted(chosen_partitions(request.partitions))
        cut = await host.cuts.create(name, partitions, lease, peer_of(context.peer()))
        return wire.CreateCutResponse(
            bucket_version=host.bucket.identity.version,
            cut=cut_message(cut, with_partitions=True),
            left_out=[
                wire.CutLeftOut(partition=partition, problem=problem_of(why))
                for partition, why in cut.left_out.items()
            ],
        )

    async def RenewCut(
        self, request: wire.RenewCutRequest, context: Context
    ) -> wire.RenewCutResponse:
        self._catalog.check_active()
        host = self._catalog.of(request)
        lease = lease_micros(request.lease_seconds)
        cut = await host.cuts.renew(check_name(request.name, "cut"), lease)
        return wire.RenewCutResponse(cut=cut_message(cut, with_partitions=False))

    async def ReleaseCut(
        self, request: wire.ReleaseCutRequest, context: Context
    ) -> wire.ReleaseCutResponse:
        self._catalog.check_active()
        host = self._catalog.of(request)
        released = await host.cuts.release(check_name(request.name, "cut"))
        return wire.ReleaseCutResponse(released=released)

    async def ListCuts(
        self, request: wire.ListCutsRequest, context: Context
    ) -> wire.ListCutsResponse:
        """Return the cuts whose lease has not ended."""
        host = self._catalog.find(request.bucket)
        cuts = []
        for cut in host.bucket.cuts.live(host.disk.clock.now()):
            cuts.append(cut_message(cut, with_partitions=request.with_partitions))
            # A cut of a thousand partitions takes a millisecond, so let others run in between.
            await asyncio.sleep(0)
        return wire.ListCutsResponse(bucket_version=host.bucket.identity.version, cuts=cuts)

    async def LoadPositions(
        self, request: wire.LoadPositionsRequest, context: Context
    ) -> wire.LoadPositionsResponse:
        """Return the stored positions, including every save begun before this call; an absent position stays absent
        after a crash."""
        self._catalog.check_active()
        host = self._catalog.of(request)
        name = check_name(request.consumer, "consumer")
        partitions = sorted(chosen_partitions(request.partitions))
        response = wire.LoadPositionsResponse(bucket_version=host.bucket.identity.version)
        try:
            await host.acknowledged.settled(name)
            consumer = host.bucket.consumer_positions.get(name)
            if consumer is None:
                return response
            wanted = [partition for partition in partitions if consumer.saved[partition]]
            stored = await host.disk.in_reader(
                lambda: host.disk.store.saved_positions(name.encode(), wanted)
            )
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"the positions cannot be read: {words_of(error)}",
                hint="see the server's log",
                retriable=True,
            ) from error
        try:
            # All in one step: as messages of their own they would be copied once more, one by one.
            response.MergeFromString(positions_field(stored.values()))
        except DecodeError:
            damaged = [partition for partition, data in stored.items() if not _is_position(data)]
            raise _damaged_positions(name, damaged) from None
        return response

    async def SavePositions(
        self, request: wire.SavePositionsRequest, context: Context
    ) -> wire.SavePositionsResponse:
        """Store the positions that the sender may save, and refuse the rest."""
        self._catalog.check_active()
        host = self._catalog.find(request.bucket, request.bucket_version)
        check_consumer(request.consumer)
        if request.member:
            check_name(request.member, "member")
        async with host.acknowledged.in_order(request.consumer):
            await _check_positions(
                request.positions,
                request.bucket_version,
                request.generation,
                host.failover_log_records,
            )
            host.disk.check_open()
            hold, save = _begin_save(host, request)
        if save is not None:
            await asyncio.shield(save)
        response = wire.SavePositionsResponse()
        for message in (request.positions[i] for i in np.flatnonzero(~hold.allowed).tolist()):
            what = f"partition {message.partition} is not member {shown(request.member)}'s, or not any more"
            problem = problem_of(fenced(what))
            response.refused_partitions.append(
                types.RefusedPartition(partition=message.partition, problem=problem)
            )
        return response

    async def Follow(self, request_iterator: object, context: Context) -> None:
        """Serve one call; see ``change_stream_service.proto``."""
        call = await self._open(context)
        self._calls.add(call)
        try:
            await call.run()
        finally:
            self._calls.discard(call)
            call.close()

    async def _open(self, context: Context) -> "FollowCall":
        opening = await read_open(self._intake, context, wire.FollowRequest, "Follow")
        window = granted_window(opening.credit_bytes)
        options = read_options(opening, context.peer(), self._catalog.replica_set)
        if options.is_replica and options.consumer:
            self._catalog.check_reachable()
            await self._catalog.check_only(
                SetMember(
                    directory=options.directory,
                    address=options.address,
                    incarnation=opening.incarnation,
                )
            )
            # All of its streams roll back to the new records, which takes longer than to make them active.
            await self._catalog.until_became()
        if self._stopping:
            raise ShuttingDownError(SHUTTING_DOWN.words, hint=SHUTTING_DOWN.hint)
        host = (self._catalog.of if options.is_replica else self._catalog.to_read)(opening)
        interval = opening.heartbeat_seconds or self._heartbeat_seconds
        liveness = Liveness(interval, asyncio.get_running_loop().time())
        call = FollowCall(
            host,
            context,
            self._intake,
            options,
            CreditWindow(window),
            liveness,
            self._callers,
            self._reader_seconds,
            self._rounds,
            self._rooms,
        )
        opened = wire.Opened(
            server_id=self._server_id,
            bucket_version=host.bucket.identity.version,
            credit_bytes=window,
            heartbeat_seconds=interval,
            server_version=__version__,
            generation=call.follower.generation,
            lease_seconds=options.lease / 1e6,
            servers=self._catalog.servers(),
        )
        call.say(wire.FollowResponse(opened=opened))
        return call

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def shut_down(self) -> None:
        """End every stream of every call with its reason."""
        self._stopping = True
        for call in list(self._calls):
            call.end(SHUTTING_DOWN)
