"""The consumer's part of ending exactly at a pin: whether what the server shows is what was pinned."""

from upr_protocol.consumer_types import Pin, ProtocolError
from upr_protocol.errors import SnapshotGoneError
from upr_protocol.failover import FailoverLog, format_failover_id
from upr_protocol.handshake import answer_hello


def check_pin(
    partition: int, pin: Pin, failover_id: int, until_seqno: int | None, log: FailoverLog | None
) -> None:
    """Check the answer to a Start that asked for an exact end.

    Args:
        failover_id, until_seqno: as answered.
        log: the partition's failover log, as far as it is known.

    Raises:
        ProtocolError: the server took no note of the end.
        SnapshotGoneError: the pin lies in a history that was left before it.
    """
    if until_seqno != pin.seqno:
        raise ProtocolError(
            f"partition {partition} was to end exactly at {pin.seqno}, the server ends it at {until_seqno}",
            hint="the server may be older than cuts",
        )
    if log is None or pin.failover_id is None or pin.failover_id == failover_id:
        return
    left_at = answer_hello(log, pin.failover_id).rollback_seqno
    if left_at is not None and left_at < pin.seqno:
        raise SnapshotGoneError(
            f"partition {partition}: seqno {pin.seqno} was pinned under id "
            f"{format_failover_id(pin.failover_id)}, whose history was left at {left_at}",
            hint="make a new cut and follow to that one",
        )


def check_complete(partition: int, seqno: int, horizon: int | None) -> None:
    """Check that a stream that finished at its exact end has missed nothing on the way there.

    Args:
        seqno, horizon: the position; None for a horizon that is not known.

    Raises:
        SnapshotGoneError: it may have: parts of it came from where other rows were left out.
    """
    if horizon is not None and horizon <= seqno:
        return
    where = "later" if horizon is None else f"at {horizon}"
    raise SnapshotGoneError(
        f"partition {partition}: the position at seqno {seqno} is in a range that is complete only {where}",
        hint="follow to a newer cut, or begin the partition again at 0",
    )
