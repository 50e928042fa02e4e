"""Streams that end exactly at a seqno (``until_exact``): why a partition is not served as of it.

Served is only what is complete at or below that seqno. A run that reaches beyond it, or that lacks rows which
were superseded beyond it, cannot be shown in part: the stream ends instead, and never as of something else.
"""

from upr_protocol.errors import SnapshotGoneError


def no_such_end(partition: int, exact: int, seqno: int, high: int) -> SnapshotGoneError | None:
    """Return why a stream from ``seqno`` to ``exact`` cannot be opened, None when it can."""
    if exact > high:
        return _gone(partition, exact, f"its high seqno is {high}")
    if exact < seqno:
        return _gone(partition, exact, f"the client is at {seqno} already")
    return None


def beyond_end(partition: int, exact: int, at: int, end: int, horizon: int) -> SnapshotGoneError:
    """Return why a run cannot be sent to a stream that stands at ``at``; its horizon is above ``exact``."""
    if end > exact:
        why = f"what is above seqno {at} is merged up to {end}"
    else:
        why = f"what ends at seqno {end} is complete at {horizon} only"
    return _gone(partition, exact, why)


def _gone(partition: int, exact: int, why: str) -> SnapshotGoneError:
    return SnapshotGoneError(
        f"partition {partition} cannot be served as of seqno {exact}: {why}",
        hint="make a new cut and follow to that one",
    )
