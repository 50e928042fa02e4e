"""Options of following: checked once, and turned into what the session and the wire need."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from upr_client.changes.events import RECENT_KEY_BYTES, Change, Rollback
from upr_client.changes.ledger import UNACKNOWLEDGED, UNACKNOWLEDGED_BYTES
from upr_client.endpoints import READ_FROM
from upr_client.positions import PositionStore
from upr_protocol.consumer import ALL_PARTITIONS, Beginning, Consumer
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import check_partition, check_partitions, check_seqno
from upr_protocol.flow import check_interval, check_window
from upr_protocol.handshake import Pin
from upr_protocol.limits import (
    CREDIT_BYTES,
    HEARTBEAT_SECONDS,
    KEY_BYTES_MAX,
    LEASE_SECONDS,
    LEASE_SECONDS_MAX,
    LEASE_SECONDS_MIN,
    check_at_least,
    check_name,
    check_seconds,
    choice,
    is_number,
)
from upr_protocol.position import Position
from upr_protocol.wire.compression import zstd_available
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import types_pb2

STABILITIES: Final = {
    "disk": types_pb2.STABILITY_DISK,
    "memory": types_pb2.STABILITY_MEMORY,
    "replicated(1)": types_pb2.STABILITY_REPLICATED_1,
    "replicated(2)": types_pb2.STABILITY_REPLICATED_2,
    "replicated(3)": types_pb2.STABILITY_REPLICATED_3,
}


@dataclass(frozen=True, slots=True)
class ServerPositions:
    """Positions kept in the server under the consumer's name. Only the newest owner of the name can store them.

    Args:
        name: the consumer's, 1 to 200 bytes of UTF-8 without control characters. A consumer that opens later under
            the same name ends this one with FencedError.

    Raises:
        InvalidArgumentError: the name is out of its range.
    """

    name: str

    def __post_init__(self) -> None:
        check_name(self.name, "consumer")


@dataclass(frozen=True, slots=True)
class Group:
    """Membership in a group of consumers that share all partitions, with positions kept in the server.

    Each partition belongs to one member at a time. What a member has not acknowledged comes again with the next owner.

    Args:
        name: the group's, as a consumer's.
        member: this one's name in the group, unique there; None for a random one. A member that comes back under its
            name within its lease keeps its partitions.
        lease_seconds: 1 to 3600; how long a member's partitions stay its own while the server does not hear from it.
            After that nothing more is handed out until the server assigns partitions again.
        on_assigned: called with partitions that became this member's, before the first change of them; may return a
            dict of positions to go on from instead of those in the server, None where ``start`` counts. Called again for those that an operator
            sets back.
        on_revoked: called with partitions that are this member's no more: after what it acknowledged of them was
            stored and before the next owner begins, or as soon as it is known that they are lost. Where the member is
            closed while ``on_assigned`` runs, when that has ended.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    name: str
    _: KW_ONLY
    member: str | None = None
    lease_seconds: float = LEASE_SECONDS
    on_assigned: Callable[[list[int]], Any] | None = None
    on_revoked: Callable[[list[int]], Any] | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "group")
        if self.member is not None:
            check_name(self.member, "member")
        lease = self.lease_seconds
        if not is_number(lease) or not LEASE_SECONDS_MIN <= lease <= LEASE_SECONDS_MAX:
            raise InvalidArgumentError(
                f"lease_seconds is {lease!r}; must be {LEASE_SECONDS_MIN:g} to {LEASE_SECONDS_MAX:g}"
            )


@dataclass(frozen=True, slots=True)
class Only:
    """Filter of what is followed, applied at the server. Seqnos and markers stay as they are.

    Args:
        partitions: which, 0 to 1023; None for all, or for those that ``until`` names. A group shares all of them.
        key_prefix: only the changes whose keys begin with it, at most 4096 bytes.
        keys_only: leave the values out; they are None then.
        stability: "disk": only what is durable at the server; "memory": sooner, and a crash there may undo it;
            "replicated(1)" to "replicated(3)": only what is durable at so many replicas too, so that no promotion undoes
            it. It waits while there are fewer replicas.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    partitions: Iterable[int] | None = None
    _: KW_ONLY
    key_prefix: bytes = b""
    keys_only: bool = False
    stability: str = "disk"

    def __post_init__(self) -> None:
        if self.partitions is not None:
            object.__setattr__(self, "partitions", check_partitions(self.partitions))
        if not isinstance(self.key_prefix, bytes):
            raise InvalidArgumentError(f"key_prefix is {self.key_prefix!r}; must be bytes")
        if len(self.key_prefix) > KEY_BYTES_MAX:
            raise InvalidArgumentError(
                f"key_prefix is {len(self.key_prefix)} bytes; must be at most {KEY_BYTES_MAX}"
            )
        choice(STABILITIES, self.stability, "stability")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes and times of following. The defaults are good for most.

    Args:
        credit_bytes: how much the server may send ahead, 1 byte to 256 MiB, in at most CREDIT_FRAMES frames.
        heartbeat_seconds: 0.05 to 3600; silence for three of them is a lost connection, unless the server answers another call.
        save_seconds: the shortest time between two saves of positions, besides those after a rollback and at the end;
            0 or more.
        retry_seconds: how long to try without hearing from the server, 0 or more; None for ever.
        unacknowledged_max, unacknowledged_bytes: about how many changes may wait for their ``ack`` before no further one
            is handed out, and how many bytes the batches may have that they came in, 1 or more each. In memory changes
            can take twice as much.
        recent_key_bytes: how much of the newest keys is remembered, to name them in a Rollback; 0 or more.
        markers_at_record: whether a rollback may resume at a marker exactly at the seqno that the server named.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    credit_bytes: int = CREDIT_BYTES
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    save_seconds: float = 1.0
    retry_seconds: float | None = None
    unacknowledged_max: int = UNACKNOWLEDGED
    unacknowledged_bytes: int = UNACKNOWLEDGED_BYTES
    recent_key_bytes: int = RECENT_KEY_BYTES
    markers_at_record: bool = False

    def __post_init__(self) -> None:
        check_window(self.credit_bytes)
        check_interval(self.heartbeat_seconds)
        check_seconds(self.save_seconds, "save_seconds")
        if self.retry_seconds is not None:
            check_seconds(self.retry_seconds, "retry_seconds", endless=True)
        for name, least in (
            ("unacknowledged_max", 1),
            ("unacknowledged_bytes", 1),
            ("recent_key_bytes", 0),
        ):
            check_at_least(getattr(self, name), least, name)


class Pinned(Protocol):
    """Whatever has pins: a cut that was made, or one out of a list."""

    @property
    def pins(self) -> Mapping[int, Pin]:
        """The pinned marker of each partition."""


Resume = PositionStore | ServerPositions | Group | None
"""Place that positions are loaded from and stored in."""
Start = Literal["beginning", "now"] | datetime | float
"""Beginning of a partition without a position; a number is seconds since the epoch."""
Until = Pinned | Mapping[int, int] | Literal["now"] | None
"""End of following: a cut, a seqno for each partition, the seqnos at the start, or never."""
Policy = Callable[[Rollback], Any] | Literal["event", "restart", "fail"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesOptions:
    """Options of following; see ``AsyncBucket.changes``.

    Attributes:
        member: the name in the group; empty without one.
        partitions: those to follow; None for all.
        ends: where each partition ends exactly; None for nowhere.
    """

    resume: Resume = None
    start: Start = "beginning"
    until: Until = None
    only: Only = Only()
    tuning: Tuning = Tuning()
    consumer: str = ""
    acknowledge: str = "auto"
    on_rollback: Policy = None
    on_status: Callable[[str], Any] | None = None
    read_from: str = "active"
    beginning: Beginning = field(init=False, default=None)
    member: str = field(init=False, default="")
    partitions: tuple[int, ...] | None = field(init=False, default=None)
    ends: Mapping[int, Pin] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name, kind in (("only", Only), ("tuning", Tuning)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)!r}; must be {kind.__name__}(...)"
                )
        if not (
            self.on_rollback in (None, "event", "restart", "fail") or callable(self.on_rollback)
        ):
            raise InvalidArgumentError(
                f'on_rollback is {self.on_rollback!r}; must be "event", "restart", "fail" or a function'
            )
        choice(READ_FROM, self.read_from, "read_from")
        if self.acknowledge not in ("auto", "manual"):
            raise InvalidArgumentError(
                f'acknowledge is {self.acknowledge!r}; must be "auto" or "manual"'
            )
        object.__setattr__(self, "beginning", _beginning(self.start))
        if self.on_rollback == "restart" and self.beginning is not None:
            raise InvalidArgumentError(
                f'start is {self.start!r}; must be "beginning" with on_rollback="restart"',
                hint='after a restart all of a partition comes again; pass "event" or a function',
            )
        object.__setattr__(self, "ends", _exact_ends(self.until))
        object.__setattr__(self, "partitions", self._followed())
        self._check_resume()

    def _followed(self) -> tuple[int, ...] | None:
        chosen, ends = self.only.partitions, self.ends
        if ends is None:
            return None if chosen is None else tuple(chosen)
        if self.start != "beginning":
            raise InvalidArgumentError(
                f'start is {self.start!r}; must be "beginning" when until is a cut or seqnos',
                hint="a state as of a cut is read from the beginning",
            )
        if chosen is None:
            return tuple(sorted(ends))
        for partition in chosen:
            if partition not in ends:
                raise InvalidArgumentError(
                    f"partition {partition} is to be followed; must be one that until names",
                    hint="follow it in a call of its own",
                )
        return tuple(chosen)

    def _check_resume(self) -> None:
        resume = self.resume
        if self.any_server and (self.consumer or isinstance(resume, ServerPositions | Group)):
            raise InvalidArgumentError(
                f'read_from is {self.read_from!r}; must be "active" for a consumer that the server knows by name',
                hint="only the active server keeps positions, and deletions for consumers that are away",
            )
        if self.consumer:
            check_name(self.consumer, "consumer")
            if isinstance(resume, ServerPositions | Group):
                raise InvalidArgumentError(
                    f"consumer is {self.consumer!r}; must be left out with {type(resume).__name__}, which has the name"
                )
        if isinstance(resume, Group):
            if self.only.partitions is not None:
                raise InvalidArgumentError(
                    f"partitions are {list(self.only.partitions)[:5]}; must be left out with a group, which shares all"
                )
            if self.until is not None:
                raise InvalidArgumentError(
                    f"until is {self.until!r}; must be left out with a group: partitions change hands, so no member "
                    "sees the end",
                    hint="follow with ServerPositions(name) instead",
                )
            object.__setattr__(self, "member", resume.member or secrets.token_hex(8))
        elif not isinstance(resume, ServerPositions | None) and not (
            callable(getattr(resume, "load", None)) and callable(getattr(resume, "save", None))
        ):
            raise InvalidArgumentError(
                f"resume is {resume!r}; must be a position store, ServerPositions(name), Group(name) or None"
            )

    @property
    def group(self) -> Group | None:
        """The group that is shared with others; None for a single consumer."""
        return self.resume if isinstance(self.resume, Group) else None

    @property
    def any_server(self) -> bool:
        """Whether any server may be followed, not the active one only."""
        return READ_FROM[self.read_from]

    @property
    def kept_in_server(self) -> bool:
        return isinstance(self.resume, ServerPositions | Group)

    @property
    def name(self) -> str:
        """The consumer's name at the server, or the group's; may be empty."""
        return (
            self.resume.name if isinstance(self.resume, ServerPositions | Group) else self.consumer
        )

    @property
    def store(self) -> PositionStore | None:
        """The store that is not the server, None for none."""
        return None if isinstance(self.resume, ServerPositions | Group) else self.resume

    @property
    def until_now(self) -> bool:
        """Return whether it ends at the seqnos current at its start."""
        return self.until == "now"

    def session(self, positions: Mapping[int, Position], bucket: str) -> Consumer:
        """Return the state machine of what is followed. A member of a group begins with nothing.

        Raises:
            PositionBucketError: a position is of a bucket of another name.
        """
        followed = ALL_PARTITIONS if self.partitions is None else self.partitions
        return Consumer(
            () if self.group else followed,
            positions,
            until_now=self.until_now,
            inclusive=self.tuning.markers_at_record,
            exact=self.ends,
            beginning=self.beginning,
            restart=self.on_rollback == "restart",
            lasting=self.group is not None,
            bucket=bucket,
        )

    def open_message(
        self, bucket: str, version: int | None, heartbeat_seconds: float
    ) -> stream_pb2.Open:
        return stream_pb2.Open(
            bucket=bucket,
            bucket_version=version,
            consumer=self.name,
            credit_bytes=self.tuning.credit_bytes,
            heartbeat_seconds=heartbeat_seconds,
            stability=STABILITIES[self.only.stability],
            keys_only=self.only.keys_only,
            accept_zstd=zstd_available(),
            key_prefix=self.only.key_prefix,
            member=self.member,
            lease_seconds=self.group.lease_seconds if self.group else 0.0,
            any_server=self.any_server,
        )


def _beginning(start: Start) -> Beginning:
    if start == "beginning":
        return None
    if start == "now":
        return "now"
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidArgumentError(
                f"start is {start}; must have a time zone", hint="for example datetime.now(UTC)"
            )
        start = start.timestamp()
    if isinstance(start, bool) or not isinstance(start, int | float) or not 0 <= start < 2**43:
        raise InvalidArgumentError(
            f'start is {start!r}; must be "beginning", "now", a datetime or seconds since the epoch'
        )
    return int(start * 1_000_000)


def _exact_ends(until: Until) -> dict[int, Pin] | None:
    if until is None or until == "now":
        return None
    if isinstance(until, Mapping):
        ends = {check_partition(p): Pin(None, check_seqno(seqno)) for p, seqno in until.items()}
    elif hasattr(until, "pins"):
        ends = dict(until.pins)
    else:
        raise InvalidArgumentError(
            f'until is {until!r}; must be a cut, a seqno for each partition, "now" or None'
        )
    if not ends:
        raise InvalidArgumentError(
            "until names no partition; must name one or more",
            hint="a listed cut has pins only with with_pins=True",
        )
    return ends


CONCURRENCY: Final = 8
CONCURRENCY_MAX: Final = 1024
RETRIES: Final = 3


@dataclass(frozen=True, slots=True)
class HandlingOptions:
    """Options of handling; see ``AsyncChanges.run``."""

    concurrency: int
    order: Literal["partition", "key"]
    retries: int
    dead_letter: Callable[[Change, Exception], Any] | None
    on_rollback_event: Callable[[Rollback], Any] | None

    def __post_init__(self) -> None:
        whole = is_number(self.concurrency, whole=True)
        if not (whole and 1 <= self.concurrency <= CONCURRENCY_MAX):
            raise InvalidArgumentError(
                f"concurrency is {self.concurrency!r}; must be 1 to {CONCURRENCY_MAX}"
            )
        if self.order not in ("partition", "key"):
            raise InvalidArgumentError(f'order is {self.order!r}; must be "partition" or "key"')
        check_at_least(self.retries, 0, "retries")

    def check_rollbacks(self, policy: Policy) -> None:
        """Raise InvalidArgumentError if rollbacks are events, and nobody takes them."""
        if policy in ("event", "restart") and self.on_rollback_event is None:
            raise InvalidArgumentError(
                f"on_rollback_event is None; with on_rollback={policy!r} it must be a function",
                hint="a rollback that nobody undoes leaves what never happened: pass run(on_rollback_event=...)",
            )
