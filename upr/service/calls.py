"""Calls: parts that the methods of all services share: opening messages, chosen partitions."""

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from upr.service.access.rules import PERMIT
from upr.service.buckets.keepers import micros
from upr.service.overload.intake import Context, Intake
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import check_partition
from upr_protocol.limits import PARTITIONS, REQUEST_BYTES_MAX


def chosen_partitions(partitions: Sequence[int]) -> list[int]:
    """Return the requested partitions, all for none; InvalidArgumentError for one out of range or repeated."""
    if not partitions:
        return list(range(PARTITIONS))
    if len(partitions) > PARTITIONS:
        raise InvalidArgumentError(
            f"partitions named are {len(partitions)}; must be at most {PARTITIONS}"
        )
    chosen = [check_partition(partition) for partition in partitions]
    if len(set(chosen)) != len(chosen):
        raise InvalidArgumentError("a partition is named twice in one request")
    return chosen


async def read_open(intake: Intake, context: Context, request: Any, kind: str) -> Any:
    """Return the Open of a streaming call, its first message, when the caller may open the call.

    It must come soon, because an idle call occupies one of a bounded number of places.

    Args:
        request: the class of the call's messages.

    Raises:
        InvalidArgumentError: no message came within OPEN_SECONDS, or another one.
        PermissionDeniedError: the caller may not open it.
    """
    raw = await intake.receive(context, REQUEST_BYTES_MAX, "an Open")
    first = parsed(request, raw or b"", "an Open")
    if first.WhichOneof("message") != "open":
        raise InvalidArgumentError(f"the first message of a {kind} call is Open")
    PERMIT.get().check(first.open)
    return first.open


def parsed(request: Any, raw: bytes, what: str) -> Any:
    """Return the message of a class in some bytes, or raise InvalidArgumentError."""
    try:
        return request.FromString(raw)
    except DecodeError:
        raise InvalidArgumentError(f"{what} of {len(raw)} bytes cannot be parsed") from None


def loop_micros() -> int:
    """Return the time on the clock of leases, microseconds."""
    return micros(asyncio.get_running_loop().time())
