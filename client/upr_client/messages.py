"""Requests out of and answers into the values of the core; the same in both flavours."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from upr_protocol.consumer import ConsumerSession
from upr_protocol.errors import InvalidArgumentError, UnavailableError, UprError
from upr_protocol.limits import NAME_BYTES_MAX
from upr_protocol.records import POSITION
from upr_protocol.wire.status import PROBLEM_KEY, error_from_call, error_of
from upr_protocol.wire.v1 import admin_service_pb2, types_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

T = TypeVar("T")


STABILITIES: Final = {"disk": types_pb2.STABILITY_DISK, "memory": types_pb2.STABILITY_MEMORY}
DURABILITIES: Final = {"disk": types_pb2.DURABILITY_DISK, "memory": types_pb2.DURABILITY_MEMORY}

PLAIN_STARTS: Final = 8
"""From so many partitions on a Start is a table: a few are easier to read one by one."""

_LOST_CODES: Final = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
)
"""What gRPC itself says, besides UNAVAILABLE, when a connection breaks in the middle of a call."""


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """The state of one partition at a server.

    Args:
        partition: 0 to 1023.
        state: "active", "replica", "pending" or "dead".
        high_seqno: the newest seqno given.
        durable_seqno: the highest durable seqno.
        purge_seqno: tombstones at or below it may be gone.
        failover_id: the newest failover id.
        problem: why the partition is dead; None otherwise.
    """

    partition: int
    state: str
    high_seqno: int
    durable_seqno: int
    purge_seqno: int
    failover_id: int
    problem: UprError | None


def partition_info(message: admin_service_pb2.PartitionInfo) -> PartitionInfo:
    """Return a partition's state out of its message."""
    return PartitionInfo(
        message.partition,
        types_pb2.PartitionState.Name(message.state).removeprefix("PARTITION_STATE_").lower(),
        message.high_seqno,
        message.durable_seqno,
        message.purge_seqno,
        message.failover_id,
        error_of(message.problem) if message.HasField("problem") else None,
    )


def call_error(error: grpc.RpcError) -> UprError:
    """Return the domain error behind a failed call; a broken connection is retriable whatever code gRPC gave it."""
    domain = error_from_call(error)
    if type(domain) is not UprError or getattr(error, "code", lambda: None)() not in _LOST_CODES:
        return domain
    trailing: Any = error.trailing_metadata()
    if any(key == PROBLEM_KEY for key, _ in trailing or ()):
        return domain
    return UnavailableError(domain.message, hint="the connection was lost or the server failed")


def check_name(name: str, what: str) -> str:
    """Return the name when it is 1 to 200 bytes of UTF-8 without control characters.

    Raises:
        InvalidArgumentError: it is not.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        # What a shell hands over that is not UTF-8 becomes lone surrogates.
        raise InvalidArgumentError(f"{what} {name[:60]!r} is not UTF-8") from None
    if not 1 <= size <= NAME_BYTES_MAX or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        raise InvalidArgumentError(
            f"{what} {name[:60]!r} of {size} bytes, a name has 1 to {NAME_BYTES_MAX} without control characters"
        )
    return name


def choice(table: Mapping[str, T], name: str, what: str) -> T:
    """Return the value of a name, or raise InvalidArgumentError that lists the names there are."""
    if name not in table:
        raise InvalidArgumentError(f"{what} is {name!r}, known are {', '.join(sorted(table))}")
    return table[name]


def start_message(
    session: ConsumerSession, partitions: Sequence[int], until_now: bool
) -> stream_pb2.FollowRequest:
    """Return a Start of these partitions, all of them ready; many go as a table where that says all."""
    if len(partitions) >= PLAIN_STARTS:
        records = session.plain_starts(partitions)
        if records is not None:
            plain = stream_pb2.Start(table=records.tobytes(), until_now=until_now)
            return stream_pb2.FollowRequest(start=plain)
    start = stream_pb2.Start()
    for request in session.starts(partitions):
        message = start.partitions.add(
            partition=request.partition,
            failover_id=request.failover_id,
            seqno=request.seqno,
            data_id=request.data_id,
        )
        if request.until_exact is not None:
            message.until_exact = request.until_exact
        elif request.until_seqno is not None:
            message.until_seqno = request.until_seqno
        elif request.until_now:
            message.until_now = True
        if request.beginning == "now":
            message.from_now = True
        elif request.beginning is not None:
            message.from_time = request.beginning
    return stream_pb2.FollowRequest(start=start)


def ack_message(positions: Iterable[tuple[int, int]]) -> stream_pb2.FollowRequest:
    """Return an Ack of (partition, seqno) pairs."""
    table = np.array(list(positions), POSITION)
    return stream_pb2.FollowRequest(ack=stream_pb2.Ack(positions=table.tobytes()))


def is_of_group(message: stream_pb2.FollowResponse) -> bool:
    """Whether a message is about a member's share and lease, and not about any stream."""
    return message.WhichOneof("message") in ("assignment", "renewed")


def high_seqnos(
    message: stream_pb2.Heartbeat,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Return the partitions and high seqnos of a Heartbeat; what is out of range is left out."""
    usable = len(message.high_seqnos) // POSITION.itemsize * POSITION.itemsize
    table = np.frombuffer(message.high_seqnos[:usable], POSITION)
    table = table[table["partition"] < 1024]
    return table["partition"].astype(np.int64), table["seqno"].astype(np.uint64)


def frame_bytes(frame: stream_pb2.Frame) -> int:
    """Return what a frame counts against the credit: the bytes of its encoded blocks, without their envelope."""
    return sum(block.ByteSize() for block in frame.blocks)
