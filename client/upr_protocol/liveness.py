"""When to send a heartbeat, and when a silent peer is gone.

Source: the project's design, "Following": an idle server sends heartbeats, the client answers, silence for three
intervals ends the call at either side. The clock is the caller's: every method is handed the time, in seconds on
a clock that does not jump.
"""

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import (
    HEARTBEAT_SECONDS_MAX,
    HEARTBEAT_SECONDS_MIN,
    SILENT_INTERVALS,
)


def check_interval(interval_seconds: float) -> float:
    """Return the heartbeat interval, in seconds, when it is in its limits.

    Raises:
        InvalidArgumentError: it is below 0.05, above 3600 or not a number.
    """
    # Written so that NaN fails it too.
    if not HEARTBEAT_SECONDS_MIN <= interval_seconds <= HEARTBEAT_SECONDS_MAX:
        raise InvalidArgumentError(
            f"heartbeat interval is {interval_seconds} s, it must be from {HEARTBEAT_SECONDS_MIN} "
            f"to {HEARTBEAT_SECONDS_MAX}"
        )
    return interval_seconds


class Liveness:
    """The two timers of one side of a call.

    Args:
        interval_seconds: the heartbeat interval, 0.05 to 3600.
        now: when the call began; both timers run from there.

    Raises:
        InvalidArgumentError: the interval is out of range.
    """

    __slots__ = ("_heard", "_interval", "_sent")

    def __init__(self, interval_seconds: float, now: float) -> None:
        self._interval = check_interval(interval_seconds)
        self._heard = now
        self._sent = now

    def heard(self, now: float) -> None:
        """Something arrived from the peer, whatever it was."""
        self._heard = max(self._heard, now)

    def sent(self, now: float) -> None:
        """Something was sent to the peer, whatever it was."""
        self._sent = max(self._sent, now)

    def _heartbeat_at(self) -> float:
        return self._sent + self._interval

    def _gone_at(self) -> float:
        return self._heard + self._interval * SILENT_INTERVALS

    def heartbeat_due(self, now: float) -> bool:
        """Whether nothing was sent for one interval."""
        # The same sum as in next_deadline, not a difference: rounding must never make a caller that slept until
        # the deadline find that nothing is due.
        return now >= self._heartbeat_at()

    def next_deadline(self) -> float:
        """The time at which a heartbeat falls due or the peer counts as gone, whichever is first."""
        return min(self._heartbeat_at(), self._gone_at())

    def peer_is_gone(self, now: float) -> bool:
        """Whether nothing arrived for three intervals."""
        return now >= self._gone_at()
