"""Positions on the wire: what the server stores of a consumer, and what it gives back."""

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import FAILOVER_LOG_MAX, MARKERS_MAX
from upr_protocol.position import Position
from upr_protocol.wire.codec import log_from_messages, log_to_messages
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


def position_to_message(partition: int, position: Position) -> wire.Position:
    """Return the message of a position; the bucket's version is not in it, the request names that."""
    return wire.Position(
        partition=partition,
        failover_id=position.failover_id,
        data_id=position.data_id,
        seqno=position.seqno,
        horizon=position.horizon,
        markers=position.markers,
        failover_log=log_to_messages(position.log or ()),
    )


def position_from_message(message: wire.Position, bucket_version: int) -> Position:
    """Return the position out of its message.

    Raises:
        InvalidArgumentError: a field is out of range or contradicts another; the partition is not looked at.
    """
    for what, count, limit in (
        ("markers", len(message.markers), MARKERS_MAX),
        ("failover records", len(message.failover_log), FAILOVER_LOG_MAX),
    ):
        if count > limit:
            raise InvalidArgumentError(
                f"the position of partition {message.partition} has {count} {what}, the limit is {limit}"
            )
    return Position(
        bucket_version,
        message.failover_id if message.HasField("failover_id") else None,
        message.data_id if message.HasField("data_id") else None,
        message.seqno,
        message.horizon if message.HasField("horizon") else None,
        tuple(message.markers),
        log_from_messages(message.failover_log),
    )
