"""Cuts as values: what a server says of one, and what it means as the end of following. Both flavours use it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from upr_protocol.consumer import Pin
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import check_partition, check_seqno
from upr_protocol.limits import CUT_LEASE_SECONDS_MAX
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


@dataclass(frozen=True, slots=True)
class CutInfo:
    """A cut as the server told of it. Times are microseconds since the epoch.

    Args:
        name: unique in the bucket.
        created_time: when it was made.
        expires_time: when its lease ends.
        lease_seconds: the lease it was made or last renewed with.
        pins: the pinned marker of each partition, ascending; empty where they were not asked for.
    """

    name: str
    created_time: int
    expires_time: int
    lease_seconds: float
    pins: Mapping[int, Pin]


class Pinned(Protocol):
    """Whatever has pins: a cut that was made, or one out of a list."""

    @property
    def pins(self) -> Mapping[int, Pin]:
        """The pinned marker of each partition."""


def cut_info(message: stream_pb2.Cut) -> CutInfo:
    """Return a cut out of its message."""
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
    if not 0 < lease <= CUT_LEASE_SECONDS_MAX:
        raise InvalidArgumentError(
            f"a lease of {lease} seconds, it is above 0 and the limit is {CUT_LEASE_SECONDS_MAX:.0f}",
            hint="None means the default",
        )
    return lease


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
