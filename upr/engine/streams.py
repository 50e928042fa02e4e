"""What is said about streams: how they are asked for, what the answer is, what they send, why they end."""

from dataclasses import dataclass
from typing import Final

from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import StartAnswer


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """What all streams of a call have in common."""

    consumer: str = ""
    memory: bool = False
    keys_only: bool = False
    peer: str = ""
    accept_zstd: bool = False


@dataclass(slots=True)
class StartRequest:
    """One partition of a Start; at most one of the ends, of which the last one given here counts."""

    partition: int
    failover_id: int | None
    seqno: int
    data_id: int | None
    until_seqno: int | None = None
    until_now: bool = False
    until_exact: int | None = None


@dataclass(slots=True)
class Started:
    """An open stream."""

    partition: int
    token: int
    failover_id: int
    high_seqno: int
    purge_seqno: int
    until_seqno: int | None
    log: FailoverLog | None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The client must roll back first."""

    partition: int
    answer: StartAnswer
    log: FailoverLog


@dataclass(frozen=True, slots=True)
class Refused:
    """No stream, and nothing to undo."""

    partition: int
    error: UprError


@dataclass(frozen=True, slots=True)
class EndReason:
    """Why streams end: a stable token, whether to start them again, and words."""

    reason: str
    retriable: bool
    words: str
    hint: str = ""


FINISHED: Final = EndReason("FINISHED", False, "the stream reached its end")
STOPPED: Final = EndReason("STOPPED", False, "the consumer stopped the stream")
SUPERSEDED: Final = EndReason(
    "SUPERSEDED",
    False,
    "another call took over this consumer name",
    "give each consumer its own name",
)


BUCKET_GONE: Final = EndReason(
    "BUCKET_GONE",
    False,
    "the bucket was dropped",
    "if it is created anew, begin from 0 with its new version",
)
SHUTTING_DOWN: Final = EndReason("SHUTTING_DOWN", True, "the server is stopping", "connect again")


def purged(partition: int, at: int, seqno: int) -> EndReason:
    """Return why a stream that purging has overtaken ends; started again it is told to roll back to 0."""
    return EndReason(
        "PURGED",
        True,
        f"partition {partition} stands at {at}, tombstones up to {seqno} are purged",
        "begin the partition again at 0",
    )


@dataclass(frozen=True, slots=True)
class Ended:
    """Streams, as (partition, token), that ended."""

    streams: list[tuple[int, int]]
    why: EndReason


@dataclass(frozen=True, slots=True)
class FrameOut:
    """Encoded blocks, the token of each run in them, and the bytes that count against the credit."""

    blocks: list[bytes]
    tokens: bytes
    size: int


Answer = Started | RolledBack | Refused
