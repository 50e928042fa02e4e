"""Status of following: how far it is, how fast, and what holds it up."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_protocol.consumer import Consumer, Delivery, State
from upr_protocol.limits import PARTITIONS

_WINDOW_SECONDS: Final = 10


class Problem(NamedTuple):
    """Problem of a partition that makes no progress.

    Args:
        reason: a stable token.
        words: what the server said.
        attempts: how often in a row it was tried.
        since: seconds ago that it began.
    """

    reason: str
    words: str
    attempts: int
    since: float


@dataclass(frozen=True, slots=True)
class ChangesStatus:
    """A snapshot of following.

    Args:
        connected: whether there is a call.
        bucket_version: 0 until the server answered.
        partitions: how many are followed.
        live: how many of them have an open stream.
        finished: how many have reached their end.
        changes: changes received since the beginning.
        changes_per_second: over the last ten seconds.
        unacknowledged: changes handed out and not acknowledged; with ``acknowledge="manual"`` only.
        lag: mutations that the server is ahead, over all partitions, as of its last report.
        lag_seconds: the age of the newest change received of the partition that is furthest behind; 0.0 when none is. One of
            which nothing was received yet is left out, however far behind it is: ``lag`` has it.
        last_progress: seconds since the last change or marker came; None when none did.
        reconnects: calls that were lost.
        rollbacks: how many there were, by the server's rule.
        problems: partitions without progress, and why; they are retried.
        member, generation, owned: of a member of a group: its name, the newest generation, how many partitions
            are its own.
    """

    connected: bool
    bucket_version: int
    partitions: int
    live: int
    finished: int
    changes: int
    changes_per_second: float
    unacknowledged: int
    lag: int
    lag_seconds: float
    last_progress: float | None
    reconnects: int
    rollbacks: Mapping[str, int]
    problems: Mapping[int, Problem]
    member: str = ""
    generation: int = 0
    owned: int = 0


class Progress:
    """Counts. Times are seconds on a clock that does not jump, unless they are said to be the wall's."""

    def __init__(self) -> None:
        self.changes = 0
        self.reconnects = 0
        self.rollbacks: Counter[str] = Counter()
        # In these ``since`` is the moment on that clock; ``status`` makes seconds ago of it.
        self._problems: dict[int, Problem] = {}
        self._last: float | None = None
        self._recent: deque[tuple[int, int]] = deque()
        self._committed: npt.NDArray[np.int64] = np.zeros(PARTITIONS, np.int64)

    def received(self, delivery: Delivery, now: float) -> None:
        rows = sum(block.rows for block in delivery.blocks)
        self.changes += rows
        self._last = now
        if not self._recent or self._recent[-1][0] != int(now):
            self._recent.append((int(now), 0))
        self._recent[-1] = (int(now), self._recent[-1][1] + rows)
        while self._recent[0][0] < now - _WINDOW_SECONDS - 1:
            self._recent.popleft()
        for block in delivery.blocks:
            # The last run of a partition counts, and it is the newest.
            self._committed[block.runs["partition"]] = block.runs["time"]
        if self._problems:
            self.mended(set(delivery.partitions.tolist()))

    def failed(self, partition: int, reason: str, words: str, now: float) -> bool:
        """A partition was refused, or its stream ended; it will be tried again. Return whether that is news."""
        old = self._problems.get(partition)
        attempts, since = (0, now) if old is None else (old.attempts, old.since)
        self._problems[partition] = Problem(reason, words, attempts + 1, since)
        return old is None or old.reason != reason

    def mended(self, partitions: set[int]) -> None:
        """Record that partitions progress again, or are no longer followed."""
        for partition in partitions & self._problems.keys():
            del self._problems[partition]

    def status(self, session: Consumer, now: float, wall: float, **others: Any) -> ChangesStatus:
        """Return a snapshot; ``wall``: seconds since the epoch, ``others``: fields of ``ChangesStatus``."""
        states = [session.state(partition) for partition in session.partitions]
        lag = session.lag()
        behind = [p for p, ahead in lag.items() if ahead and self._committed[p]]
        ages = [wall - int(self._committed[p]) / 1e6 for p in behind]
        recent = sum(rows for second, rows in self._recent if second >= now - _WINDOW_SECONDS)
        problems = {
            partition: problem._replace(since=now - problem.since)
            for partition, problem in self._problems.items()
            if session.state(partition) not in (State.LIVE, State.DONE)
        }
        return ChangesStatus(
            bucket_version=session.bucket_version,
            partitions=len(states),
            live=states.count(State.LIVE),
            finished=states.count(State.DONE),
            changes=self.changes,
            changes_per_second=recent / _WINDOW_SECONDS,
            lag=sum(lag.values()),
            lag_seconds=max([0.0, *ages]),
            last_progress=None if self._last is None else now - self._last,
            reconnects=self.reconnects,
            rollbacks=dict(self.rollbacks),
            problems=problems,
            **others,
        )
