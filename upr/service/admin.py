"""AdminService: operators' calls about buckets, consumers, purges, partitions, the process and its storage."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import lmdb
import numpy as np

from upr import __version__
from upr.engine.bucket import Bucket
from upr.engine.consumers import Consumer, Save
from upr.engine.groups import Group
from upr.engine.partitions import DEAD
from upr.engine.streams import POSITIONS_RESET
from upr.service.access.rules import PERMIT, RULES
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.compactor import Purged
from upr.service.buckets.keepers import is_connected, loop_micros
from upr.service.buckets.upstream_state import UpstreamState
from upr.service.clock import Clock
from upr.service.conversation import chosen_partitions
from upr.service.follow import beginnings
from upr.service.overload.intake import Context
from upr.service.overload.process import BOUNDS_MS, Connections, LoopDelays, memory_bytes
from upr.service.storage_trouble import words_of
from upr.storage import directory, journal
from upr.storage.blocks import stretches
from upr_protocol.errors import (
    BucketGoneError,
    ConsumerNotFoundError,
    DataDamagedError,
    InvalidArgumentError,
    StorageFailedError,
    UprError,
    shown,
)
from upr_protocol.limits import (
    CONNECTIONS_MAX,
    PARTITIONS,
    PURGE_HOLDERS_MAX,
    QUOTA_BYTES_MAX,
    check_name,
)
from upr_protocol.position import Position
from upr_protocol.position_table import PositionTable
from upr_protocol.wire.codec import positions_to_messages, problem_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1.types_pb2 import SetPart


def check_quota(quota_bytes: int) -> int:
    if quota_bytes > QUOTA_BYTES_MAX:
        raise InvalidArgumentError(
            f"quota is {quota_bytes} bytes; must be at most {QUOTA_BYTES_MAX}"
        )
    return quota_bytes


async def _used_bytes(host: BucketService) -> int | UprError:
    """Return the bytes that a bucket's store uses, or why they cannot be read."""
    try:
        return await host.disk.in_reader(host.disk.store.used_bytes)
    except BucketGoneError as error:
        return error
    except lmdb.Error as error:
        return StorageFailedError(f"the store cannot be read: {words_of(error)}")


def _bucket_info(host: BucketService, used: int | UprError) -> admin.BucketInfo:
    bucket = host.bucket
    problem = host.problem or (used if isinstance(used, UprError) else None)
    return admin.BucketInfo(
        name=bucket.identity.name,
        version=bucket.identity.version,
        compression=bucket.identity.compression,
        mutations=int(bucket.partitions.high.sum()),
        # As the quota counts.
        used_bytes=0 if isinstance(used, UprError) else used + bucket.tail.bytes,
        quota_bytes=host.disk.quota.limit,
        problem=problem_of(problem) if problem is not None else None,
    )


_LIST = "/upr.v1.AdminService/ListBuckets"
_STATUS = "/upr.v1.AdminService/GetStatus"
LIST_BYTES = 4 * 2**20
"""Size at which an answer takes no further consumer; one takes up to about 300 KiB."""


def _is_known(name: str, bucket: Bucket) -> bool:
    """Return whether a consumer is registered, has an open call, or saves its first positions."""
    consumers = bucket.consumer_positions
    if name in consumers or name in bucket.consumers or bucket.owners.group(name) is not None:
        return True
    return bool(consumers.saves.of(name))


def _reset(
    name: str,
    bucket: Bucket,
    partitions: Sequence[int],
    seqnos: Mapping[int, int] | None,
    now: int,
) -> tuple[Save, list[wire.Position]]:
    """Return the save that sets positions: to seqnos that are markers, or removes them; and what it is to store.

    Args:
        partitions: ascending.
    """
    table, columns = bucket.partitions, np.array(partitions, np.int64)
    if seqnos is None:
        zeros = np.zeros(len(columns), np.uint64)
        return Save(name, 0, columns, zeros, zeros, None, now), []
    positions = {}
    for partition in partitions:
        seqno, newest = seqnos[partition], int(table.newest_id[partition])
        positions[partition] = Position(
            bucket.identity.version,
            newest,
            newest if seqno else None,
            seqno,
            seqno,
            (seqno,) if seqno else (),
            table.logs[partition],
        )
    at = np.array([seqnos[partition] for partition in partitions], np.uint64)
    save = Save(name, 0, columns, table.newest_id[columns], at, (), now)
    return save, positions_to_messages(PositionTable.of(positions))


def _consumer_info(name: str, consumer: Consumer, bucket: Bucket) -> admin.ConsumerInfo:
    group = bucket.owners.group(name)
    return admin.ConsumerInfo(
        name=name,
        connected=is_connected(bucket, name),
        generation=max(consumer.generation, bucket.owners.generation(name)),
        last_ack_time=consumer.last_ack_time,
        partitions=int(consumer.known.sum()),
        lag=int(consumer.behind(bucket.partitions.high).sum()),
        members=[] if group is None else members_of(group),
    )


def members_of(group: Group) -> list[admin.MemberInfo]:
    """Return the members of a group, by name."""
    now = loop_micros()
    found = []
    for member in group:
        left = max(member.expires - now, 0) if member.live else 0
        found.append(
            admin.MemberInfo(
                name=member.name,
                peer=member.seat.call.options.peer if member.seat is not None else "",
                partitions=int(group.owned(member).sum()),
                releasing=int(group.releasing(member).sum()),
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


PARTITIONS_AT_ONCE = 32
"""Partitions read in one task of a reader thread, or purged in one turn, so that others have their turn in between."""


@dataclass(frozen=True, slots=True)
class Process:
    """State of the server process.

    Attributes:
        follow_calls, write_calls: return how many calls are open.
        files: returns what is wrong with the files of TLS and identities that it has, by file; None where nothing is.
        ends: returns when the first certificate in such a file ends, in seconds since the epoch.
        part: returns its part in its set of servers; None for a server that is always alone.
        troubles: returns what is wrong with that, by kind; None where nothing is.
        connections: those to its gRPC port.
        began: monotonic seconds.
    """

    server_id: int
    follow_calls: Callable[[], int]
    write_calls: Callable[[], int]
    text_port: Callable[[], admin.TextPortStatus | None] = lambda: None
    delays: LoopDelays = field(default_factory=LoopDelays)
    clock: Clock = field(default_factory=Clock)
    files: Callable[[], Mapping[str, UprError | None]] = dict
    ends: Callable[[], Mapping[str, float]] = dict
    part: Callable[[], SetPart | None] = lambda: None
    troubles: Callable[[], Mapping[str, UprError | None]] = dict
    connections: Connections = field(default_factory=lambda: Connections(CONNECTIONS_MAX))
    began: float = field(default_factory=time.monotonic)

    def problems(self) -> list[UprError]:
        """Return what is wrong with the server beside its buckets."""
        found = (*self.files().values(), *self.troubles().values(), self.connections.problem)
        return [one for one in found if one is not None]


class Contents:
    """Contents of the store of a bucket, by partition; see GetStorageResponse.

    Attributes:
        blocks, rows, block_bytes, unmerged_bytes: int64, shape (1024,).
    """

    def __init__(self) -> None:
        self.blocks, self.rows, self.block_bytes, self.unmerged_bytes = (
            np.zeros(PARTITIONS, np.int64) for _ in range(4)
        )


def look_through(host: BucketService, first: int, contents: Contents) -> None:
    """Take over what PARTITIONS_AT_ONCE partitions have now, from one on; damaged ones stay as they were."""
    for partition in range(first, min(first + PARTITIONS_AT_ONCE, PARTITIONS)):
        try:
            heads = host.disk.store.heads(partition)
        except DataDamagedError:
            continue
        settled = host.compactor.settled_of(partition, heads)
        sizes = [stretch.size for stretch in stretches(partition, heads, settled)]
        contents.blocks[partition] = len(heads)
        contents.rows[partition] = sum(head.rows for head in heads)
        contents.block_bytes[partition] = sum(sizes)
        contents.unmerged_bytes[partition] = sum(sizes) - max(sizes, default=0)


def replicas_of(bucket: Bucket) -> list[admin.ReplicaStatus]:
    """Return the replicas that follow a bucket, by address."""
    found = []
    for follower in bucket.followers:
        options = follower.options
        if options.is_replica:
            high = bucket.partitions.high
            # One that registers has everything before it until it acknowledges something.
            behind = int(high.sum()) if options.consumer else 0
            consumer = bucket.consumer_positions.get(options.consumer)
            if consumer is not None:
                passed = consumer.passed(bucket.partitions.newest_id)
                behind -= int(np.minimum(passed, high).sum())
            found.append(
                admin.ReplicaStatus(
                    directory=options.directory,
                    address=options.address or options.peer,
                    anonymous=not options.consumer,
                    lag=behind,
                )
            )
    return sorted(found, key=lambda one: (one.address, one.directory))


def _upstream(upstream_state: UpstreamState | None) -> admin.UpstreamStatus | None:
    if upstream_state is None:
        return None
    problem = upstream_state.problem
    return admin.UpstreamStatus(
        address=upstream_state.address,
        connected=upstream_state.connected,
        in_step=upstream_state.connected and upstream_state.in_step,
        lag=upstream_state.lag(),
        lag_seconds=upstream_state.lag_seconds(),
        problem=problem_of(problem) if problem is not None else None,
        undone=upstream_state.undone,
    )


def _bucket_status(host: BucketService) -> admin.BucketStatus:
    bucket, problem = host.bucket, host.problem
    counts = [follower.stream_counts() for follower in bucket.followers]
    return admin.BucketStatus(
        name=bucket.identity.name,
        version=bucket.identity.version,
        tail_bytes=bucket.tail.bytes,
        tail_limit_bytes=host.flusher.tail_limit,
        volatile_bytes=bucket.tail.volatile_bytes,
        streams=sum(streams for streams, _ in counts),
        streams_from_store=sum(from_store for _, from_store in counts),
        cuts=len(bucket.cuts.live(host.disk.clock.now())),
        quota_bytes=host.disk.quota.limit,
        damaged_partitions=len(bucket.partitions.problems),
        problem=problem_of(problem) if problem is not None else None,
        upstream=_upstream(host.upstream_state),
        replicas=replicas_of(bucket),
    )


class AdminMethods:
    """Methods of AdminService."""

    def __init__(self, catalog: Catalog, process: Process) -> None:
        self._catalog = catalog
        self._process = process

    async def ListBuckets(
        self, request: admin.ListBucketsRequest, context: Context
    ) -> admin.ListBucketsResponse:
        """Return the buckets that the caller may see by name, those that could not be opened too."""
        # One for the whole answer: a replica would drop what roles that became wider meanwhile do not list yet.
        caller, roles = PERMIT.get().identity, RULES[_LIST].roles

        def seen() -> list[BucketService]:
            return [h for h in self._catalog.hosts if caller.may(roles, h.bucket.identity.name)]

        used: dict[BucketService, int | UprError] = {}
        # The list is made in one step: a bucket that is opened anew in between would be in it twice, or not at all.
        while asked := [host for host in seen() if host not in used]:
            used |= zip(asked, await asyncio.gather(*map(_used_bytes, asked)), strict=True)
        infos = [_bucket_info(host, used[host]) for host in seen()]
        infos += [
            admin.BucketInfo(name=one.name, version=one.version, problem=problem_of(one.problem))
            for one in self._catalog.damaged
            if caller.may(roles, one.name)
        ]
        return admin.ListBucketsResponse(
            buckets=sorted(infos, key=lambda info: info.name),
            # Only to those that see all buckets: a replica drops what is not listed by a server of its set.
            replica_set=self._catalog.replica_set if caller.may_everywhere(("replicate",)) else "",
            directory=self._catalog.directory_id,
        )

    async def CreateBucket(
        self, request: admin.CreateBucketRequest, context: Context
    ) -> admin.CreateBucketResponse:
        check_quota(request.quota_bytes)
        host = await self._catalog.ordered.create(
            request.name, request.compression, quota=request.quota_bytes
        )
        used = await _used_bytes(host)
        if isinstance(used, BucketGoneError):
            raise BucketGoneError(
                f"bucket {shown(request.name)} was dropped right after its creation"
            )
        return admin.CreateBucketResponse(bucket=_bucket_info(host, used))

    async def SetBucketQuota(
        self, request: admin.SetBucketQuotaRequest, context: Context
    ) -> admin.SetBucketQuotaResponse:
        self._catalog.check_active()
        host = self._catalog.find(request.bucket)
        await host.set_quota(check_quota(request.quota_bytes))
        return admin.SetBucketQuotaResponse(bucket=_bucket_info(host, await _used_bytes(host)))

    async def DropBucket(
        self, request: admin.DropBucketRequest, context: Context
    ) -> admin.DropBucketResponse:
        self._catalog.check_active()
        known = request.HasField("version")
        version = await self._catalog.ordered.drop(request.name, request.version if known else None)
        return admin.DropBucketResponse(bucket_version=version)

    async def ListConsumers(
        self, request: admin.ListConsumersRequest, context: Context
    ) -> admin.ListConsumersResponse:
        """Return the registered consumers and the groups, by name, as many as go into one answer."""
        bucket = self._catalog.find(request.bucket).bucket
        response = admin.ListConsumersResponse(bucket_version=bucket.identity.version)
        registered = dict(bucket.consumer_positions)
        size = 0
        for name in sorted({*registered, *bucket.owners}):
            if name <= request.after:
                continue
            if size >= LIST_BYTES:
                response.more = True
                break
            consumer = registered.get(name, Consumer(0))
            info = response.consumers.add()
            info.CopyFrom(_consumer_info(name, consumer, bucket))
            if request.with_positions:
                group = bucket.owners.group(name)
                owned = set() if group is None else group.owner_names().keys()
                partitions = sorted({*np.flatnonzero(consumer.known).tolist(), *owned})
                info.positions.extend(_positions(name, consumer, bucket, partitions))
                # Let others run in between: a consumer takes a millisecond, and there may be a thousand.
                await asyncio.sleep(0)
            size += info.ByteSize()
        return response

    async def ForgetConsumer(
        self, request: admin.ForgetConsumerRequest, context: Context
    ) -> admin.ForgetConsumerResponse:
        """Forget a consumer, in memory and on disk; one that is connected registers again with its next Ack or save."""
        self._catalog.check_active()
        host = self._catalog.find(request.bucket)
        forgotten = host.bucket.consumer_positions.forget(check_name(request.name, "consumer"))
        if forgotten:
            try:
                await host.acknowledged.save()
            except (OSError, lmdb.Error) as error:
                raise StorageFailedError(
                    f"consumer {shown(request.name)} is forgotten, but its rows could not be removed: {words_of(error)}",
                    hint="the server retries by itself; a restart before that brings the consumer back",
                    retriable=True,
                ) from error
        return admin.ForgetConsumerResponse(forgotten=forgotten)

    async def ResetConsumer(
        self, request: admin.ResetConsumerRequest, context: Context
    ) -> admin.ResetConsumerResponse:
        """Set stored positions, durably, and end the consumer's calls; from this step on its owners are fenced."""
        self._catalog.check_active()
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
                    f"reset of consumer {shown(name)} names no target; must be the beginning, now or a time",
                    hint="to the beginning, now or a time",
                )
        if not request.create and not _is_known(name, bucket):
            raise ConsumerNotFoundError(
                f"there is no consumer {shown(name)}",
                hint="'upr-admin consumers' lists them; 'reset --create' stores positions for a new one",
            )
        host.check_active()
        save, positions = _reset(name, bucket, partitions, seqnos, host.disk.clock.now())
        task = host.acknowledged.begin(save, lambda: None)
        # Check for room first; the stored rows carry the new generation.
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

    async def Purge(self, request: admin.PurgeRequest, context: Context) -> admin.PurgeResponse:
        """Purge partitions, several in a turn between two of compaction's; a damaged one has a problem in the answer."""
        host = self._catalog.find(request.bucket)
        ages = host.compactor.ages
        response = admin.PurgeResponse(
            bucket_version=host.bucket.identity.version,
            tombstone_age_seconds=ages.young / 1e6,
            hold_limit_seconds=ages.held / 1e6,
        )
        stored = host.bucket.partitions.stored
        chosen = [p for p in sorted(chosen_partitions(request.partitions)) if stored[p]]
        results: list[Purged | BaseException] = []
        for first in range(0, len(chosen), PARTITIONS_AT_ONCE):
            # They wait for the turn together, and have it one after the other.
            part = chosen[first : first + PARTITIONS_AT_ONCE]
            purges = [host.compactor.purge(p, dry_run=request.dry_run) for p in part]
            results += await asyncio.gather(*purges, return_exceptions=True)
        for partition, result in zip(chosen, results, strict=True):
            if isinstance(result, UprError):
                response.partitions.add(partition=partition, problem=problem_of(result))
            elif isinstance(result, BaseException):
                raise result
            elif result.tombstones.count:
                message = response.partitions.add(
                    partition=partition,
                    tombstones=result.tombstones.count,
                    old_tombstones=result.tombstones.old,
                    purged=result.purged,
                    purge_seqno=int(host.bucket.partitions.purge[partition]),
                    more_holders=max(len(result.holders) - PURGE_HOLDERS_MAX, 0),
                )
                # A thousand streams that hold all partitions up would be more than a message.
                for one in sorted(result.holders, key=lambda one: one.seqno)[:PURGE_HOLDERS_MAX]:
                    message.holders.add(kind=one.kind, name=one.name, seqno=one.seqno)
        return response

    async def GetStatus(
        self, request: admin.GetStatusRequest, context: Context
    ) -> admin.GetStatusResponse:
        anonymous, mapped = memory_bytes()
        clock, delays = self._process.clock, self._process.delays
        caller, roles = PERMIT.get().identity, RULES[_STATUS].roles
        hosts = [h for h in self._catalog.hosts if caller.may(roles, h.bucket.identity.name)]
        buckets = [_bucket_status(host) for host in hosts]
        buckets += [
            admin.BucketStatus(name=one.name, version=one.version, problem=problem_of(one.problem))
            for one in self._catalog.damaged
            if caller.may(roles, one.name)
        ]
        # They have paths of keys and names of identities.
        problems = self._process.problems() if caller.may_everywhere(("admin",)) else ()
        return admin.GetStatusResponse(
            server_version=__version__,
            server_id=self._process.server_id,
            uptime_seconds=time.monotonic() - self._process.began,
            anonymous_bytes=anonymous,
            mapped_bytes=mapped,
            follow_calls=self._process.follow_calls(),
            write_calls=self._process.write_calls(),
            buckets=sorted(buckets, key=lambda bucket: bucket.name),
            loop_delays=[
                admin.LoopDelay(up_to_seconds=None if bound is None else bound / 1e3, count=count)
                for bound, count in zip((*BOUNDS_MS, None), delays.counts, strict=True)
            ],
            longest_loop_delay_seconds=delays.longest_ms / 1e3,
            clock=admin.ClockStatus(
                off_seconds=clock.off_seconds,
                jumped_seconds=clock.jumped_seconds,
                left_seconds=clock.left_seconds,
            ),
            problems=[problem_of(problem) for problem in problems],
            text_port=self._process.text_port(),
            part=self._process.part(),
            wire=admin.DESCRIPTOR.package,
            disk_format=directory.FORMAT,
            journal_format=journal.FORMAT,
        )

    async def GetStorage(
        self, request: admin.GetStorageRequest, context: Context
    ) -> admin.GetStorageResponse:
        host = self._catalog.find(request.bucket)
        bucket = host.bucket
        contents = Contents()
        for first in range(0, PARTITIONS, PARTITIONS_AT_ONCE):
            await host.disk.in_reader(partial(look_through, host, first, contents))
        used_bytes = await host.disk.in_reader(host.disk.store.used_bytes)
        return admin.GetStorageResponse(
            bucket_version=bucket.identity.version,
            file_bytes=host.disk.store.file_bytes(),
            used_bytes=used_bytes,
            journal_bytes=await host.disk.in_journal_thread(lambda: host.disk.journal.size),
            tail_bytes=bucket.tail.bytes,
            blocks=int(contents.blocks.sum()),
            rows=int(contents.rows.sum()),
            block_bytes=int(contents.block_bytes.sum()),
            unmerged_bytes=int(contents.unmerged_bytes.sum()),
            **asdict(host.disk.counters),
            partitions_to_merge=host.compactor.waiting,
            compression=bucket.identity.compression,
        )

    async def GetPartitions(
        self, request: admin.GetPartitionsRequest, context: Context
    ) -> admin.GetPartitionsResponse:
        bucket = self._catalog.find(request.bucket).bucket
        table = bucket.partitions
        infos = []
        for partition in chosen_partitions(request.partitions):
            problem = table.problems.get(partition)
            infos.append(
                admin.PartitionInfo(
                    partition=partition,
                    state=int(table.state[partition]),  # type: ignore[arg-type]
                    high_seqno=int(table.high[partition]),
                    durable_seqno=int(table.durable[partition]),
                    purge_seqno=int(table.purge[partition]),
                    failover_id=int(table.newest_id[partition]),
                    problem=problem_of(problem) if problem else None,
                    dead_since=int(table.since[partition]) if table.state[partition] == DEAD else 0,
                    epoch=int(table.epoch[partition]),
                    complete_seqno=int(bucket.markers.seqno[partition]),
                )
            )
        return admin.GetPartitionsResponse(bucket_version=bucket.identity.version, partitions=infos)
