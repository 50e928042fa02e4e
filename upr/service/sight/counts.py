"""Counts that operators see: what a bucket took and gave, how long its disk took, and what was refused.

All are sums since the start. Each changes once for a message, a call or a commit, and never for a row.
"""

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

BOUNDS_SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Upper bounds of the parts of a histogram of durations; the last part has no bound."""
REASONS_MAX: Final = 64
"""Reasons that are counted apart; further ones count as OTHER, because a reason can come from another server."""
OTHER: Final = "OTHER"


class Durations:
    """Histogram of durations in the parts of BOUNDS_SECONDS, and their sum."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.seconds += seconds


class Waiting:
    """Time during which at least one call waited."""

    def __init__(self) -> None:
        self._ended = self._since = 0.0
        self._calls = 0

    @property
    def seconds(self) -> float:
        return self._ended + (time.monotonic() - self._since if self._calls else 0.0)

    def __enter__(self) -> None:
        if not self._calls:
            self._since = time.monotonic()
        self._calls += 1

    def __exit__(self, *exc: object) -> None:
        if self._calls == 1:
            self._ended = self.seconds
        self._calls -= 1


@dataclass(slots=True)
class Traffic:
    """What one bucket took and gave.

    Attributes:
        written_rows: rows of the writes that were taken, of a replica those that it received.
        writes: answered writes by outcome: ``applied``, ``duplicate`` or ``refused``.
        sent_frames, sent_rows, sent_bytes: what was handed to the transport for followers; bytes as credit counts them.
        ended: Follow calls by the reason of their end.
        commits: time from handing a commit to the journal until it is durable.
        syncs: the part of it that writing and syncing the journal took.
        flushes: time to store a part of the tail.
        waiting: time during which writes waited for room in the tail or on the disk.
    """

    written_rows: int = 0
    writes: Counter[str] = field(
        default_factory=lambda: Counter({"applied": 0, "duplicate": 0, "refused": 0})
    )
    sent_frames: int = 0
    sent_rows: int = 0
    sent_bytes: int = 0
    ended: Counter[str] = field(default_factory=lambda: Counter({"CLIENT_LEFT": 0, "TOO_SLOW": 0}))
    commits: Durations = field(default_factory=Durations)
    syncs: Durations = field(default_factory=Durations)
    flushes: Durations = field(default_factory=Durations)
    waiting: Waiting = field(default_factory=Waiting)


def count_reason(counter: Counter[str], reason: str) -> None:
    """Count a reason; as OTHER when there are REASONS_MAX others."""
    counter[reason if reason in counter or len(counter) < REASONS_MAX else OTHER] += 1


refusals: Final[Counter[str]] = Counter(
    dict.fromkeys(
        (
            *("INVALID_ARGUMENT", "TOO_MANY", "NO_ROOM", "QUOTA_EXCEEDED"),
            *("STORAGE_FAILED", "PARTITION_NOT_ACTIVE", "DATA_DAMAGED", "UNKNOWN_OUTCOME"),
        ),
        0,
    )
)
"""Refused calls and writes of this process, by reason. Those that an alarm may look at begin at 0."""
