"""Pauses before trying again. Pure: the random values and the time are handed in."""

from typing import Final

import numpy as np

from upr_protocol.block import I64
from upr_protocol.limits import PARTITIONS

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 30.0
RECONNECT_SECONDS: Final = 1.0
"""The longest pause before connecting again: a server that is back is found soon, by many clients not all at once."""
LASTING_FIRST_SECONDS: Final = 2.0
LASTING_LONGEST_SECONDS: Final = 300.0
"""Longest pause for problems that an operator must fix; pauses grow up to it."""
_ATTEMPTS_MAX: Final = 32
_CALM_SECONDS: Final = 30.0
"""Time without failure after which the count of failures restarts."""


def delay(
    attempt: int, random: float, *, away: bool = False, longest: float | None = None
) -> float:
    """Return how many seconds to wait: full jitter below a bound that doubles from 0.1 s to 30 s.

    Args:
        attempt: how many attempts failed in a row before this wait, less one; 0 or more.
        random: 0.0 to 1.0, evenly distributed, so that many clients do not come back at once.
        away: whether the server could not be reached, so that trying costs it nothing: the bound is 1 s then.
        longest: the bound, in seconds, whatever the attempts were; None for the one that doubles.
    """
    if longest is not None:
        return random * longest
    bound: float = FIRST_SECONDS * 2 ** min(attempt, _ATTEMPTS_MAX)
    return random * min(LONGEST_SECONDS, bound, RECONNECT_SECONDS if away else bound)


def lasting_delay(attempt: int, random: float) -> float:
    """As ``delay``, where trying again seldom helps: half to all of a bound of 2 s to 5 minutes."""
    bound: float = LASTING_FIRST_SECONDS * 2 ** min(attempt, _ATTEMPTS_MAX)
    return (0.5 + 0.5 * random) * min(LASTING_LONGEST_SECONDS, bound)


class Retries:
    """When each partition may be started again. Times are seconds on a clock that does not jump."""

    def __init__(self) -> None:
        self._attempts = np.zeros(PARTITIONS, np.int64)
        self._due = np.zeros(PARTITIONS, np.float64)

    def failed(self, partition: int, now: float, random: float, *, lasting: bool = False) -> float:
        """A partition was refused or ended, ``lasting`` by what does not pass by itself. Return the seconds to wait."""
        if now - self._due[partition] > _CALM_SECONDS:
            self._attempts[partition] = 0
        attempt = int(self._attempts[partition])
        seconds = lasting_delay(attempt, random) if lasting else delay(attempt, random)
        self._attempts[partition] += 1
        self._due[partition] = now + seconds
        return seconds

    def succeeded(self, partitions: I64) -> None:
        """Partitions brought something: the next failure is a first one."""
        self._attempts[partitions] = 0

    def moved(self) -> None:
        """Another server is asked from now on: what this one refused says nothing of that one."""
        self._attempts[:] = 0
        self._due[:] = 0

    def split(self, partitions: I64, now: float) -> tuple[list[int], float | None]:
        """Return those of the partitions that are due, and the time at which the next other one is (or None)."""
        if not len(partitions):
            return [], None
        due = self._due[partitions]
        waiting = due > now
        if not waiting.any():
            return partitions.tolist(), None
        return partitions[~waiting].tolist(), float(due[waiting].min())
