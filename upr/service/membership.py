"""What a Follow call does for the member of a group that it names."""

import math

from upr.engine.follower import Follower
from upr.engine.members import Assignment, Seat
from upr.service.catalog import check_name
from upr.service.leases import micros
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import LEASE_SECONDS, LEASE_SECONDS_MAX, LEASE_SECONDS_MIN, PARTITIONS
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


def read_member(opening: wire.Open) -> tuple[str, int]:
    """Return the member that an Open names, and its lease in microseconds; "" and 0 for none.

    Raises:
        InvalidArgumentError: the name or the lease is out of range, or there is no consumer.
    """
    lease = opening.lease_seconds
    if not opening.member:
        if lease:
            raise InvalidArgumentError(
                f"a lease of {lease} seconds without a member", hint="name a member, or no lease"
            )
        return "", 0
    if not opening.consumer:
        raise InvalidArgumentError(
            f"member {opening.member!r} of no consumer", hint="name the group as the consumer"
        )
    lease = LEASE_SECONDS if lease == 0 else lease
    if math.isnan(lease) or not LEASE_SECONDS_MIN <= lease <= LEASE_SECONDS_MAX:
        raise InvalidArgumentError(
            f"a lease of {lease} seconds, it is {LEASE_SECONDS_MIN:g} to {LEASE_SECONDS_MAX:g}",
            hint="0 means the default",
        )
    return check_name(opening.member, "member"), micros(lease)


class Membership:
    """The part of a call that concerns its member.

    Args:
        seat: of the call.
    """

    def __init__(self, follower: Follower, seat: Seat) -> None:
        self._follower = follower
        self._seat = seat

    def heard(self, now: float) -> None:
        """Any message of the client renews the lease; ``now`` in seconds."""
        self._seat.heard(micros(now))

    def release(self, partitions: list[int], now: float) -> None:
        """The member hands partitions over: their streams end in the same step.

        Raises:
            InvalidArgumentError: they are more than there are.
        """
        if len(partitions) > PARTITIONS:
            raise InvalidArgumentError(
                f"a Release of {len(partitions)} partitions, the limit is {PARTITIONS}"
            )
        owned = self._seat.owned_among(partitions)
        self._follower.stop(owned)
        self._seat.release(owned, micros(now))

    def next_message(self) -> wire.FollowResponse | None:
        """Return the newest Assignment, once; None when there is none that was not told."""
        assignment = self._seat.take_assignment()
        return None if assignment is None else _message(assignment)


def _message(assignment: Assignment) -> wire.FollowResponse:
    return wire.FollowResponse(
        assignment=wire.Assignment(
            generation=assignment.generation,
            owned=assignment.owned,
            to_release=assignment.to_release,
        )
    )
