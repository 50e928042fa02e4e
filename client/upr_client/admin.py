"""Operator values: what a server tells of itself, its buckets, partitions, consumers, cuts and purges."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal, TypeVar

from upr_client.changes.status import ChangesStatus, Problem
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.failover import FailoverLog, check_partitions
from upr_protocol.handshake import Pin
from upr_protocol.limits import CUT_LEASE_SECONDS_MAX, QUOTA_BYTES_MAX, check_name, is_number
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import replica_service_pb2 as set_pb2
from upr_protocol.wire.v1 import types_pb2

__all__ = [
    "BucketInfo",
    "BucketStatus",
    "ChangesStatus",
    "ConsumerInfo",
    "ConsumerPosition",
    "CutInfo",
    "FailoverLog",
    "MemberInfo",
    "PartitionInfo",
    "PartitionPurge",
    "Pin",
    "Problem",
    "Promotion",
    "PurgeHolder",
    "ReplicaStatus",
    "ServerStatus",
    "SetMember",
    "SetPart",
    "StorageInfo",
    "TextPortInfo",
    "Topology",
    "UpstreamStatus",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """How a replica follows its upstream.

    Args:
        address: HOST:PORT that it follows, or tries to.
        connected: whether its call to the upstream is open.
        in_step: whether it has the numbers of producers, the positions of consumers and the cuts too.
        lag: mutations that the upstream named and that are not durable on the replica.
        lag_seconds: since it last had everything that the upstream named; 0 while it has.
        problem: why it does not follow now; None while it does.
        undone: mutations that were undone since the server was started.
    """

    address: str
    connected: bool
    in_step: bool
    lag: int
    lag_seconds: float
    problem: UprError | None
    undone: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica that follows a server.

    Args:
        directory: the id of its data directory, 16 hex digits.
        address: HOST:PORT where it can be reached.
        anonymous: whether it is not registered and counts for nothing.
        lag: mutations that it has not acknowledged; 0 of an anonymous one, which acknowledges nothing.
    """

    directory: str
    address: str
    anonymous: bool
    lag: int


@dataclass(frozen=True, slots=True)
class BucketStatus:
    """One bucket at this moment.

    Args:
        tail_bytes: about how much memory the tail holds.
        tail_limit_bytes: the tail's limit; writers wait when it is reached.
        volatile_bytes: the part of the tail that is not durable yet.
        streams_from_store: those of them that read from the store now.
        cuts: cuts whose lease has not ended.
        damaged_partitions: partitions with damaged blocks.
        problem: why no writes are taken; None otherwise.
        quota_bytes: what its store and its tail may take; 0 for no such limit.
        upstream: of a replica: how it follows; None of another server.
        replicas: those that follow here, by address.
    """

    name: str
    version: int
    tail_bytes: int
    tail_limit_bytes: int
    volatile_bytes: int
    streams: int
    streams_from_store: int
    cuts: int
    damaged_partitions: int
    problem: UprError | None
    quota_bytes: int = 0
    upstream: UpstreamStatus | None = None
    replicas: tuple[ReplicaStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPortInfo:
    """The text port of a server.

    Args:
        address: where it listens, HOST:PORT.
        too_slow: connections that were ended since the start, because they took nothing while something waited.
    """

    address: str
    connections: int
    too_slow: int


@dataclass(frozen=True, slots=True)
class SetPart:
    """The part of a server in its set of servers. Times are seconds.

    Args:
        cluster: the name of its cluster; empty without one.
        state: "owner"; "replica", which follows one; "claiming", about to become the owner; or "waiting".
        counted: how many servers are counted, as far as it knows.
        owner_seconds: since it heard first of the owner that it knows, or since its start; 0 while it knows none.
        owner_changes: how often it heard of another owner since its start.
        etcd_seconds: in a cluster, since etcd answered it, or since its start.
        grant_seconds: of a cluster's owner, how long it may take and answer without another grant; 0 when it may not.
    """

    cluster: str
    state: str
    counted: int
    owner_seconds: float
    owner_changes: int
    etcd_seconds: float
    grant_seconds: float


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server process.

    Args:
        server_id: another one after each start.
        uptime_seconds: since it began to serve.
        anonymous_bytes: memory that the process really holds.
        mapped_bytes: pages of files, which the kernel takes back when it needs them.
        follow_calls, write_calls: how many are open.
        loop_delays: how late its event loop was, as a histogram: (up to how many seconds, samples); None for the last.
        clock_off_seconds: by how much the day's clock is ahead of the server's, which counts the time that passes; 0 as
            long as that is less than an hour.
        clock_jumped_seconds: how long the server was away before its start, by the day's clock, while nothing gets
            older by that because the clock may have been set forward; 0 for nothing.
        clock_left_seconds: how long it is still to run until that counts.
        problems: what is wrong with it beside its buckets.
        text_port: its text port, None without one.
        wire: the wire that it speaks, as ``upr.v1``; empty from a server that does not tell it.
        disk_format, journal_format: of its data directory, and of the journals that it writes; 0 likewise.
        part: its part in its set of servers; None from a server that does not tell it.
    """

    server_version: str
    server_id: int
    uptime_seconds: float
    anonymous_bytes: int
    mapped_bytes: int
    follow_calls: int
    write_calls: int
    buckets: tuple[BucketStatus, ...]
    loop_delays: tuple[tuple[float | None, int], ...] = ()
    longest_loop_delay_seconds: float = 0.0
    clock_off_seconds: float = 0.0
    clock_jumped_seconds: float = 0.0
    clock_left_seconds: float = 0.0
    problems: tuple[UprError, ...] = ()
    text_port: TextPortInfo | None = None
    wire: str = ""
    disk_format: int = 0
    journal_format: int = 0
    part: SetPart | None = None


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Use of the disk by a bucket. The counters count since the server was started.

    Args:
        file_bytes: size of the store's file; it never shrinks.
        used_bytes: its pages in use; the rest is free for what comes.
        journal_bytes: the journal's segments.
        tail_bytes: about how much memory the tail holds.
        blocks, rows, block_bytes: what is stored, superseded rows included.
        unmerged_bytes: so much of block_bytes is in blocks beside the largest of those that were compacted together, of each partition.
        ingested_bytes: columns of the blocks that were numbered.
        journalled_bytes, flushed_bytes: written to the journal, and to the store by flushes.
        merge_input_*, merge_output_*: read and stored by merges.
        merge_seconds: time that merges worked.
        compression: of stored blocks: empty for none, or zstd.
    """

    bucket_version: int
    file_bytes: int
    used_bytes: int
    journal_bytes: int
    tail_bytes: int
    blocks: int
    rows: int
    block_bytes: int
    unmerged_bytes: int
    ingested_bytes: int
    journalled_bytes: int
    flushed_bytes: int
    merge_input_bytes: int
    merge_output_bytes: int
    merge_input_rows: int
    merge_output_rows: int
    merge_seconds: float
    purged_tombstones: int
    partitions_to_merge: int
    compression: str

    @property
    def write_amplification(self) -> float | None:
        """Bytes written for each byte that writers sent; None when they sent nothing since the start."""
        if not self.ingested_bytes:
            return None
        written = self.journalled_bytes + self.flushed_bytes + self.merge_output_bytes
        return written / self.ingested_bytes


@dataclass(frozen=True, slots=True)
class ConsumerPosition:
    """Position that a consumer acknowledged, or saved in the server, in one partition.

    Args:
        failover_id: the id under which it did; 0 for none.
        seqno: everything up to here is safe with it.
        member: the owner of the partition in a group; empty without one.
        time: when it acknowledged or saved, microseconds since the epoch; 0 when it has not yet.
    """

    failover_id: int
    seqno: int
    member: str = ""
    high_seqno: int = 0
    time: int = 0

    @property
    def lag(self) -> int:
        """Mutations up to the high seqno."""
        return max(self.high_seqno - self.seqno, 0)


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member of a group.

    Args:
        peer: where it calls from; empty while it has no call open.
        partitions: how many are its own.
        releasing: how many of them it was asked to release.
        lease_seconds: the length of its lease.
        lease_left_seconds: when that ends unless it says something; 0 when it has ended.
    """

    name: str
    peer: str
    partitions: int
    releasing: int
    lease_seconds: float
    lease_left_seconds: float


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """One registered consumer, or a group that is not registered yet.

    Args:
        connected: whether a call under this name is open.
        generation: of its ownership: it rises with every call, and with every change of what a member owns.
        last_ack_time: when it acknowledged or saved last, microseconds since the epoch; 0 for not yet.
        partitions: how many have a position.
        lag: mutations between its positions and the high seqnos of those partitions.
        positions: by partition, ascending; empty when not asked for. With them, at seqno 0 and time 0, come partitions
            that a member owns and has said nothing of.
        members: by name; none when it is no group.
    """

    name: str
    connected: bool
    generation: int
    last_ack_time: int
    partitions: int
    lag: int
    positions: Mapping[int, ConsumerPosition]
    members: tuple[MemberInfo, ...] = ()


def of_message(kind: type[T], message: Any, **others: object) -> T:
    """Return a value of the fields that a message has under the same names, and of ``others``."""
    names = dict.fromkeys(one.name for one in fields(kind))  # type: ignore[arg-type]
    if "problem" in names:
        others["problem"] = error_of(message.problem) if message.HasField("problem") else None
    return kind(**{name: getattr(message, name) for name in names if name not in others}, **others)


def _optional(kind: type[T], message: Any, name: str) -> T | None:
    return of_message(kind, getattr(message, name)) if message.HasField(name) else None


def server_status(message: admin.GetStatusResponse) -> ServerStatus:
    return of_message(
        ServerStatus,
        message,
        buckets=tuple(map(_bucket_status, message.buckets)),
        loop_delays=tuple(
            (part.up_to_seconds if part.HasField("up_to_seconds") else None, part.count)
            for part in message.loop_delays
        ),
        clock_off_seconds=message.clock.off_seconds,
        clock_jumped_seconds=message.clock.jumped_seconds,
        clock_left_seconds=message.clock.left_seconds,
        problems=tuple(map(error_of, message.problems)),
        text_port=_optional(TextPortInfo, message, "text_port"),
        part=_optional(SetPart, message, "part"),
    )


def _bucket_status(message: admin.BucketStatus) -> BucketStatus:
    return of_message(
        BucketStatus,
        message,
        upstream=_optional(UpstreamStatus, message, "upstream"),
        replicas=tuple(of_message(ReplicaStatus, one) for one in message.replicas),
    )


def consumer_info(message: admin.ConsumerInfo) -> ConsumerInfo:
    return of_message(
        ConsumerInfo,
        message,
        positions=consumer_positions(message.positions),
        members=tuple(of_message(MemberInfo, one) for one in message.members),
    )


def consumer_positions(
    messages: Iterable[admin.ConsumerPosition],
) -> dict[int, ConsumerPosition]:
    return {
        at.partition: ConsumerPosition(at.failover_id, at.seqno, at.member, at.high_seqno, at.time)
        for at in messages
    }


def reset_request(
    bucket: str,
    name: str,
    to: Literal["beginning", "now"] | datetime,
    partitions: Iterable[int] | None,
    create: bool,
) -> admin.ResetConsumerRequest:
    """Return the request of ``reset_consumer``."""
    request = admin.ResetConsumerRequest(
        bucket=bucket,
        name=check_name(name, "consumer"),
        partitions=check_partitions(partitions),
        create=create,
    )
    if isinstance(to, datetime):
        if to.tzinfo is None or to.timestamp() < 0:
            raise InvalidArgumentError(
                f"to is {to}; must have a time zone and be after 1970",
                hint="for example datetime.now(timezone.utc) - timedelta(hours=2)",
            )
        request.to_time = round(to.timestamp() * 1e6)
    elif to == "beginning":
        request.to_beginning = True
    elif to == "now":
        request.to_now = True
    else:
        raise InvalidArgumentError(
            f"to is {to!r}; must be 'beginning', 'now' or a datetime with a time zone"
        )
    return request


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """One bucket.

    Args:
        name: its name; of a bucket whose name cannot be read its version, 16 hex digits.
        version: its random id, another one whenever a bucket of the name is created.
        compression: of stored blocks: empty for none, or zstd.
        mutations: how many were ever numbered.
        used_bytes: pages of its store in use.
        problem: why it is not served or takes no writes; None when all is well.
        quota_bytes: what its store and its tail may take; 0 for no such limit.
    """

    name: str
    version: int
    compression: str
    mutations: int
    used_bytes: int
    problem: UprError | None
    quota_bytes: int = 0


def check_quota(quota_bytes: int) -> int:
    """Return a bucket's quota, or raise InvalidArgumentError."""
    if not isinstance(quota_bytes, int) or not 0 <= quota_bytes <= QUOTA_BYTES_MAX:
        raise InvalidArgumentError(
            f"quota_bytes is {quota_bytes!r}; must be 0 to {QUOTA_BYTES_MAX}", hint="0 is for none"
        )
    return quota_bytes


@dataclass(frozen=True, slots=True)
class PurgeHolder:
    """One that has not passed a tombstone yet.

    Args:
        kind: ``stream``, ``consumer`` or ``cut``; ``newest`` for the row at the high seqno, which always stays.
        name: its name; of a stream without a consumer name, where it calls from.
        seqno: it has everything up to here.
    """

    kind: str
    name: str
    seqno: int


@dataclass(frozen=True, slots=True)
class PartitionPurge:
    """One partition's tombstones.

    Args:
        partition: 0 to 1023.
        tombstones: how many are stored, superseded ones included.
        old_tombstones: those of them that are old enough.
        purged: those that went, or would go.
        purge_seqno: tombstones at or below may be gone.
        holders: streams, consumers and cuts that have not passed the old ones, at most 20, the lowest first.
        problem: why the partition could not be looked at; None otherwise.
        more_holders: how many more there are.
    """

    partition: int
    tombstones: int
    old_tombstones: int
    purged: int
    purge_seqno: int
    holders: tuple[PurgeHolder, ...]
    problem: UprError | None
    more_holders: int = 0


def partition_purge(message: admin.PartitionPurge) -> PartitionPurge:
    holders = tuple(of_message(PurgeHolder, one) for one in message.holders)
    return of_message(PartitionPurge, message, holders=holders)


@dataclass(frozen=True, slots=True)
class CutInfo:
    """Cut as the server describes it. Times are microseconds since the epoch.

    Args:
        name: unique in the bucket.
        created_time: when it was made.
        expires_time: when its lease ends.
        lease_seconds: the lease it was made or last renewed with.
        pins: the pinned marker of each partition, ascending; empty where they were not asked for.
        left_out: the partitions that could not be pinned because they are dead, and why; known only where the cut was made.
    """

    name: str
    created_time: int = 0
    expires_time: int = 0
    lease_seconds: float = 0.0
    pins: Mapping[int, Pin] = field(default_factory=dict)
    left_out: Mapping[int, UprError] = field(default_factory=dict)


def cut_info(message: stream_pb2.Cut) -> CutInfo:
    return CutInfo(
        message.name,
        message.created_time,
        message.expires_time,
        message.lease_seconds,
        {one.partition: Pin(one.failover_id, one.seqno) for one in message.partitions},
    )


def lease_seconds(lease: float | None) -> float:
    """Return a lease as requests carry it, 0 for None: the server's choice; InvalidArgumentError out of its range."""
    if lease is None:
        return 0.0
    if not (is_number(lease) and 0 < lease <= CUT_LEASE_SECONDS_MAX):
        raise InvalidArgumentError(
            f"lease is {lease!r} s; must be above 0 and at most {CUT_LEASE_SECONDS_MAX:.0f}",
            hint="None means the default",
        )
    return lease


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """The state of one partition at a server.

    Args:
        partition: 0 to 1023.
        state: "active", "replica", "pending" or "dead".
        high_seqno: the newest seqno given.
        purge_seqno: tombstones at or below it may be gone.
        problem: why the partition is dead, or what is damaged of it; None otherwise.
        dead_since: when it died, microseconds since the epoch; 0 when it is not dead, or that was not noted.
    """

    partition: int
    state: str
    high_seqno: int
    durable_seqno: int
    purge_seqno: int
    failover_id: int
    problem: UprError | None
    dead_since: int = 0


def partition_info(message: admin.PartitionInfo) -> PartitionInfo:
    state = types_pb2.PartitionState.Name(message.state).removeprefix("PARTITION_STATE_").lower()
    return of_message(PartitionInfo, message, state=state)


@dataclass(frozen=True, slots=True)
class SetMember:
    """One server of a set, as the server that was asked knows it.

    Args:
        directory: the id of its data directory; a server whose disk was replaced is another one.
        address: HOST:PORT where it was last reached; empty if that is not known.
        active: whether it is the owner of the newest epoch that is known.
        counted: whether a promotion must hear it: it may have what others lack.
        reached: whether it answered when it was last asked.
        in_step: whether it can be promoted without losing more than its lag.
        lag: mutations that the owner has and that were not durable there; only an owner knows it of others.
        drained: whether it is not to become active.
        epoch: the highest that it knew when it was last asked; 0 of a server that tells it not.
        claiming: whether it was about to become active then.
        has_key: in a cluster, whether etcd had its key, which says that it runs, when it answered last: ``SetPart.etcd_seconds``.
        grant_seconds: of a counted one, how long its grant still holds at a cluster's owner, which alone knows it.
    """

    directory: str
    address: str
    active: bool
    counted: bool
    reached: bool
    in_step: bool
    lag: int
    drained: bool = False
    epoch: int = 0
    claiming: bool = False
    has_key: bool = False
    grant_seconds: float = 0.0

    @property
    def state(self) -> str:
        """What it is: "owner", "claiming", "drained", "replica"; "away" when it did not answer; "owner, away" or "owner, drained"."""
        if not self.reached:
            return "owner, away" if self.active else "away"
        if self.active:
            return "owner, drained" if self.drained else "owner"
        return "claiming" if self.claiming else "drained" if self.drained else "replica"


@dataclass(frozen=True, slots=True)
class Topology:
    """Which server of a set is active, as far as one of them knows.

    Args:
        replica_set: the id of the set; empty while the server has joined none.
        directory: of the server that answered.
        active: whether that one is active.
        epoch: counts the changes of the owner; 0 while it has heard of none.
        promised: the highest epoch that it promised; above ``epoch`` a change is under way, or was given up.
        members: the servers that it knows.
        waiting: what it waits for before it serves or follows, or what else keeps it from its part in its cluster, in words;
            empty for nothing.
        candidate: address, or directory, of the server that ``promised`` was promised to; empty if that is not known.
        claiming: whether that one is still about to become active.
        former: address, or directory, of the server that the newest row names: it was active last.
        part: of the server that answered; None from one that does not tell it.
    """

    replica_set: str
    directory: str
    active: bool
    epoch: int
    promised: int
    members: tuple[SetMember, ...]
    waiting: str
    candidate: str = ""
    claiming: bool = False
    former: str = ""
    part: SetPart | None = None

    @property
    def owner(self) -> SetMember | None:
        """The active server; None if none is known."""
        return next((member for member in self.members if member.active), None)


def topology(message: set_pb2.GetTopologyResponse) -> Topology:
    """Return a topology out of its message."""
    row = message.row
    known = {one.member.directory: one for one in message.members}
    # One that is counted may be one whose address nobody told.
    for directory in {*row.counted, row.owner} - {"", *known}:
        known[directory] = set_pb2.MemberStatus(member=set_pb2.SetMember(directory=directory))
    serving = message.promised <= row.epoch
    names = {directory: one.member.address or directory for directory, one in known.items()}
    members = [
        of_message(
            SetMember,
            one,
            directory=directory,
            address=one.member.address,
            # A server of itself knows better than its row: it may wait for others before it serves.
            active=message.active
            if directory == message.directory
            else serving and directory == row.owner,
            counted=directory in row.counted,
        )
        for directory, one in sorted(known.items())
    ]
    return of_message(
        Topology,
        message,
        epoch=row.epoch,
        members=tuple(members),
        candidate=names.get(message.candidate, message.candidate),
        former=names.get(row.owner, row.owner),
        part=_optional(SetPart, message, "part"),
    )


@dataclass(frozen=True, slots=True)
class Promotion:
    """A promotion that was done.

    Args:
        epoch: in which the server is active.
        records: partitions that got a failover record; 0 when nothing can be missing.
        without: addresses, or directories, of counted servers that were given up.
        lost: of partitions whose former owner was known to have more: bucket, partition, the seqno where it ends here,
            and the one up to which the former owner was known to have everything.
        tables: buckets whose newest small tables were given up, with ``force``: positions of consumers, cuts, and numbers
            of producers, without which a write that is sent again may be applied twice.
    """

    epoch: int
    records: int
    without: tuple[str, ...]
    lost: tuple[tuple[str, int, int, int], ...]
    tables: tuple[str, ...] = ()


def promotion(message: set_pb2.PromoteResponse) -> Promotion:
    return Promotion(
        message.row.epoch,
        message.records,
        tuple(one.address or one.directory for one in message.without),
        tuple((one.bucket, one.partition, one.seqno, one.high_seqno) for one in message.lost),
        tuple(message.tables),
    )
