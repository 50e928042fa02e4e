"""The values that a consumer's state machine takes and gives; see ``consumer``."""

import enum
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64, Block
from upr_protocol.errors import UprError
from upr_protocol.position import Position

Indexes = npt.NDArray[np.int64]


class ProtocolError(UprError):
    """The server broke the protocol: what it sent does not continue the stream. Nothing of it was used."""

    default_reason = "PROTOCOL"
    default_retriable = True


class State(enum.IntEnum):
    """Where a partition stands."""

    IDLE = 0
    """Not followed."""
    READY = 1
    """A Start may be sent."""
    STARTING = 2
    """A Start was sent, its answer is awaited."""
    LIVE = 3
    """The stream is open."""
    UNDOING = 4
    """The server said to roll back; ``rolled_back`` is awaited."""
    DONE = 5
    """Ended for good: finished or stopped."""
    FAILED = 6
    """Ended with an error that trying again does not mend."""


class Fate(enum.Enum):
    """What an end means for its streams."""

    DONE = "done"
    AGAIN = "again"
    FAILED = "failed"


_DONE: Final = frozenset({"FINISHED", "STOPPED"})
_FATAL: Final = frozenset(
    {
        "SUPERSEDED",
        "BUCKET_NOT_FOUND",
        "INVALID_ARGUMENT",
        "CREDIT_EXCEEDED",
        "SNAPSHOT_GONE",
    }
)


def fate_of(reason: str) -> Fate:
    """Return what an Ended with this reason means; a reason that is not known means: start again."""
    if reason in _DONE:
        return Fate.DONE
    return Fate.FAILED if reason in _FATAL else Fate.AGAIN


Beginning = Literal["now"] | int | None
"""Where a consumer that has nothing begins: None at the very beginning; "now"; or at a time, microseconds since the
epoch."""


class Pin(NamedTuple):
    """Where a partition is to end exactly.

    Args:
        failover_id: the id that was newest when the seqno was the last complete marker; None: not known.
        seqno: that marker; 0 for an empty partition.
    """

    failover_id: int | None
    seqno: int


class StartRequest(NamedTuple):
    """From where to start one partition.

    ``failover_id`` and ``data_id`` are None when they are not known; ``until_seqno`` and ``until_exact`` are None
    for no such end. ``beginning`` is None for the very beginning, "now", or microseconds since the epoch.
    """

    partition: int
    failover_id: int | None
    seqno: int
    data_id: int | None
    until_seqno: int | None
    until_now: bool
    until_exact: int | None = None
    beginning: Beginning = None


@dataclass(frozen=True, slots=True)
class PendingRollback:
    """Data that has to be undone before the partition may be started again.

    Args:
        partition: 0 to 1023.
        from_seqno: the position's seqno; everything above ``seqno`` is to be undone.
        seqno: the marker to go back to, or 0.
        old_id: the id that the server was asked with; None when it was lost.
        new_id: the server's newest id.
        rule: which rule of the server decided, as a token.
        words: both sides' decisions in words.
        after: the position to store once the data is undone.
    """

    partition: int
    from_seqno: int
    seqno: int
    old_id: int | None
    new_id: int
    rule: str
    words: str
    after: Position


@dataclass(slots=True)
class Delivery:
    """The runs of one frame that belong to open streams, in order, over all its blocks.

    Args:
        blocks: the blocks, without the runs that came too late.
        partitions: each run's partition.
        ends: each run's end seqno.
        horizons: the position's horizon after each run.
        is_marker: whether the run ends in a marker that is true for this reader.
        folded: how many runs were acknowledged.
    """

    blocks: list[Block]
    partitions: Indexes
    ends: U64
    horizons: U64
    is_marker: npt.NDArray[np.bool_]
    folded: int = field(default=0)

    def markers(self) -> list[tuple[int, int]]:
        """The (partition, seqno) of the markers, in order."""
        where = self.is_marker
        return list(zip(self.partitions[where].tolist(), self.ends[where].tolist(), strict=True))
