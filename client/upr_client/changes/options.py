"""Options of following: checked once, and turned into what the session and the wire need."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from upr_client.changes.events import RECENT_KEY_BYTES, Change, Rollback
from upr_client.changes.ledger import UNACKNOWLEDGED
from upr_client.positions import PositionStore
from upr_protocol.consumer import Beginning, Consumer
from upr_protocol.errors import HandlerError, InvalidArgumentError
from upr_protocol.failover import check_partition, check_seqno
from upr_protocol.flow import check_interval, check_window
from upr_protocol.handshake import Pin
from upr_protocol.limits import (
    CREDIT_BYTES,
    HEARTBEAT_SECONDS,
    KEY_BYTES_MAX,
    LEASE_SECONDS,
    LEASE_SECONDS_MAX,
    LEASE_SECONDS_MIN,
    PARTITIONS,
    check_name,
    choice,
)
from upr_protocol.position import Position
from upr_protocol.wire.compression import zstd_available
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import types_pb2

Policy = Callable[[Rollback], Any] | Literal["event", "restart", "fail"] | None
Start = Literal["beginning", "now"] | datetime | float
"""Where a consumer begins that has no position; a number is seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesOptions:
    """How to follow; the meanings are those of ``AsyncBucket.changes``.

    Raises:
        InvalidArgumentError: a value is out of its range, or two contradict each other.
    """

    consumer: str = ""
    positions: PositionStore | Literal["server"] | None = None
    group: str = ""
    member: str = ""
    lease_seconds: float = LEASE_SECONDS
    start: Start = "beginning"
    until_now: bool = False
    until: Mapping[int, Pin] | None = None
    stability: str = "disk"
    keys_only: bool = False
    key_prefix: bytes = b""
    acknowledge: str = "auto"
    unacknowledged_max: int = UNACKNOWLEDGED
    on_rollback: Policy = None
    markers_at_record: bool = False
    recent_key_bytes: int = RECENT_KEY_BYTES
    credit_bytes: int = CREDIT_BYTES
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    save_seconds: float = 1.0
    retry_seconds: float | None = None
    on_status: Callable[[str], Any] | None = None
    on_assigned: Callable[[list[int]], Any] | None = None
    on_revoked: Callable[[list[int]], Any] | None = None
    beginning: Beginning = field(init=False, default=None)

    def __post_init__(self) -> None:
        choice(STABILITIES, self.stability, "stability")
        check_window(self.credit_bytes)
        check_interval(self.heartbeat_seconds)
        object.__setattr__(self, "beginning", _beginning(self.start))
        for name in (self.consumer, self.group, self.member):
            if name:
                check_name(name, "consumer")
        if not (
            self.on_rollback in (None, "event", "restart", "fail") or callable(self.on_rollback)
        ):
            raise InvalidArgumentError(
                f'on_rollback is {self.on_rollback!r}, it must be "event", "restart", "fail" or a function'
            )
        if self.acknowledge not in ("auto", "manual"):
            raise InvalidArgumentError(
                f'acknowledge is {self.acknowledge!r}, it must be "auto" or "manual"'
            )
        self._check_ends()
        self._check_owner()
        if not isinstance(self.key_prefix, bytes) or len(self.key_prefix) > KEY_BYTES_MAX:
            raise InvalidArgumentError(f"key_prefix must be bytes, {KEY_BYTES_MAX} at most")
        for name, least in (
            ("save_seconds", 0),
            ("recent_key_bytes", 0),
            ("unacknowledged_max", 1),
        ):
            if not getattr(self, name) >= least:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}, it must be {least} or more"
                )
        if self.retry_seconds is not None and not self.retry_seconds >= 0:
            raise InvalidArgumentError(
                f"retry_seconds is {self.retry_seconds}, it must be 0 or more"
            )

    def _check_ends(self) -> None:
        if self.until is not None and self.until_now:
            raise InvalidArgumentError("until and until_now were given, a stream has one end")
        if self.until is not None and self.start != "beginning":
            raise InvalidArgumentError(
                "until and start were given: a state as of a cut is read from the beginning"
            )
        if self.group and (self.until is not None or self.until_now):
            raise InvalidArgumentError(
                "group was given with an end: what a group shares changes hands, so that none of its members "
                "sees the end",
                hint="follow with a consumer name instead",
            )

    def _check_owner(self) -> None:
        if self.group and (self.consumer or self.positions not in (None, "server")):
            raise InvalidArgumentError(
                "group was given with a consumer or a position store: the group's name is the consumer's, and its "
                "positions are kept in the server"
            )
        if self.member and not self.group:
            raise InvalidArgumentError("member was given without a group")
        if not self.group and (self.on_assigned is not None or self.on_revoked is not None):
            raise InvalidArgumentError("on_assigned or on_revoked was given without a group")
        if self.positions == "server" and not (self.consumer or self.group):
            raise InvalidArgumentError(
                'positions="server" needs a consumer name, under which they are kept'
            )
        if isinstance(self.positions, str) and self.positions != "server":
            raise InvalidArgumentError(
                f'positions is {self.positions!r}, it must be a store, "server" or None'
            )
        if not LEASE_SECONDS_MIN <= self.lease_seconds <= LEASE_SECONDS_MAX:
            raise InvalidArgumentError(
                f"lease_seconds is {self.lease_seconds}, it must be from {LEASE_SECONDS_MIN:g} to "
                f"{LEASE_SECONDS_MAX:g}"
            )

    @property
    def kept_in_server(self) -> bool:
        """Whether the positions are kept in the server."""
        return self.positions == "server" or bool(self.group)

    @property
    def store(self) -> PositionStore | None:
        """The store that is not the server, None for none."""
        return None if self.positions is None or isinstance(self.positions, str) else self.positions

    def session(
        self, partitions: Iterable[int] | None, positions: Mapping[int, Position], bucket: str
    ) -> Consumer:
        """Return the state machine for these partitions; None means all. A member of a group begins with none.

        Raises:
            PositionBucketError: a position is of a bucket of another name.
        """
        followed = range(PARTITIONS) if partitions is None else partitions
        return Consumer(
            () if self.group else followed,
            positions,
            until_now=self.until_now,
            inclusive=self.markers_at_record,
            exact=self.until,
            beginning=self.beginning,
            restart=self.on_rollback == "restart",
            lasting=bool(self.group),
            bucket=bucket,
        )

    def open_message(
        self, bucket: str, version: int | None, heartbeat_seconds: float
    ) -> stream_pb2.Open:
        """Return the first message of a Follow call."""
        return stream_pb2.Open(
            bucket=bucket,
            bucket_version=version,
            consumer=self.group or self.consumer,
            credit_bytes=self.credit_bytes,
            heartbeat_seconds=heartbeat_seconds,
            stability=STABILITIES[self.stability],
            keys_only=self.keys_only,
            accept_zstd=zstd_available(),
            key_prefix=self.key_prefix,
            member=self.member,
            lease_seconds=self.lease_seconds if self.group else 0.0,
        )


def _beginning(start: Start) -> Beginning:
    if start == "beginning":
        return None
    if start == "now":
        return "now"
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidArgumentError(
                f"start is {start}, a time without a time zone", hint="give it one, UTC say"
            )
        start = start.timestamp()
    if isinstance(start, bool | str) or not 0 <= start < 2**43:
        raise InvalidArgumentError(
            f'start is {start!r}, it must be "beginning", "now", a datetime or seconds since the epoch'
        )
    return int(start * 1_000_000)


CONCURRENCY: Final = 8
CONCURRENCY_MAX: Final = 1024
RETRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlingOptions:
    """The meanings are those of ``AsyncChanges.run``.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    concurrency: int = CONCURRENCY
    order: Literal["partition", "key"] = "partition"
    retries: int = RETRIES
    dead_letter: Callable[[Change, Exception], Any] | None = None
    on_rollback_event: Callable[[Rollback], Any] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidArgumentError(
                f"concurrency is {self.concurrency}, it must be from 1 to {CONCURRENCY_MAX}"
            )
        if self.order not in ("partition", "key"):
            raise InvalidArgumentError(f'order is {self.order!r}, it must be "partition" or "key"')
        if self.retries < 0:
            raise InvalidArgumentError(f"retries is {self.retries}, it must be 0 or more")


def failed(change: Change, error: BaseException) -> HandlerError:
    """Return the error that ends the handling."""
    raised = HandlerError(
        f"the handler failed for key {change.key[:60]!r} of partition {change.partition} at seqno {change.seqno}: "
        f"{error!r}",
        hint="mend the handler and go on, the change comes again; or pass dead_letter= to take such changes",
    )
    raised.__cause__ = error
    return raised


class Pinned(Protocol):
    """Whatever has pins: a cut that was made, or one out of a list."""

    @property
    def pins(self) -> Mapping[int, Pin]:
        """The pinned marker of each partition."""


def exact_ends(until: Pinned | Mapping[int, int] | None) -> dict[int, Pin] | None:
    """Return where partitions are to end exactly; None for nowhere.

    Args:
        until: something with pins, or a seqno for each partition.

    Raises:
        InvalidArgumentError: a partition or seqno is out of its range, or there is none.
    """
    if until is None:
        return None
    if isinstance(until, Mapping):
        ends = {check_partition(p): Pin(None, check_seqno(seqno)) for p, seqno in until.items()}
    else:
        ends = dict(until.pins)
    if not ends:
        raise InvalidArgumentError(
            "until names no partition", hint="a listed cut has pins only with with_pins=True"
        )
    return ends


def followed(partitions: Iterable[int] | None, ends: Mapping[int, Pin] | None) -> list[int] | None:
    """Return the partitions to follow; those that have an exact end where none are named.

    Raises:
        InvalidArgumentError: a partition is named that has no end although others have.
    """
    if ends is None:
        return None if partitions is None else list(partitions)
    if partitions is None:
        return sorted(ends)
    chosen = list(partitions)
    for partition in chosen:
        if partition not in ends:
            raise InvalidArgumentError(
                f"partition {partition} is to be followed, but until does not name it",
                hint="follow it in a call of its own",
            )
    return chosen


STABILITIES: Final = {"disk": types_pb2.STABILITY_DISK, "memory": types_pb2.STABILITY_MEMORY}
