"""Flow of a call, at both ends: credit for bytes on the way, heartbeats, and the end of a silent peer.

The server pulls; one value larger than the whole credit still goes through. An idle server sends heartbeats, the client
answers, silence for three intervals ends the call at either side. The caller has the clock: it passes the time to every
method, in seconds of a monotonic clock.
"""

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import (
    CREDIT_BYTES,
    CREDIT_BYTES_MAX,
    CREDIT_FRAMES,
    CREDIT_RETURN_FRACTION,
    HEARTBEAT_SECONDS_MAX,
    HEARTBEAT_SECONDS_MIN,
    LATE_INTERVALS,
    SILENT_INTERVALS,
    is_number,
)


def check_window(window: int) -> int:
    """Return the window, in bytes, when it is 1 to ``CREDIT_BYTES_MAX``.

    Raises:
        InvalidArgumentError: it is not.
    """
    if not isinstance(window, int) or not 1 <= window <= CREDIT_BYTES_MAX:
        raise InvalidArgumentError(f"credit is {window!r} bytes; must be 1 to {CREDIT_BYTES_MAX}")
    return window


def granted_window(asked: int) -> int:
    """Return the window, in bytes, for the credit_bytes of an Open: 0 means the default, too much the limit."""
    return min(asked or CREDIT_BYTES, CREDIT_BYTES_MAX)


class CreditWindow:
    """Credit at the sender's side of one call.

    Attributes:
        window: bytes that may be outstanding, 1 to ``CREDIT_BYTES_MAX``.
        outstanding: what was sent costs, and was not yet given back, in bytes; above the window only by what a small frame
            costs beyond its size, or while one larger message is out.

    Raises:
        InvalidArgumentError: the window is out of range.
    """

    __slots__ = ("outstanding", "window")

    def __init__(self, window: int = CREDIT_BYTES) -> None:
        self.window = check_window(window)
        self.outstanding = 0

    def may_send(self, size: int) -> bool:
        """Whether ``size`` bytes (0 or more) may be sent now.

        They may if they fit into the free credit, or if less is outstanding than a receiver may hold back before it
        returns credit. Otherwise a value larger than the free credit would wait for a return that never comes.
        """
        left = self.window - self.outstanding
        return size <= left or self.outstanding * CREDIT_RETURN_FRACTION < self.window

    def spend(self, size: int) -> int:
        """Count a frame of ``size`` bytes (0 or more) as sent. Return what it costs: at least a CREDIT_FRAMES-th of the window.

        So a receiver that is slow has few frames before it, and what comes meanwhile goes together in the next one.

        Raises:
            InvalidArgumentError: it is negative or ``may_send`` says no; nothing was changed.
        """
        if size < 0 or not self.may_send(size):
            raise InvalidArgumentError(
                f"{size} bytes do not fit: {self.outstanding} of {self.window} are outstanding"
            )
        cost = max(size, self.window // CREDIT_FRAMES)
        self.outstanding += cost
        return cost

    def give_back(self, size: int) -> None:
        """Count ``size`` bytes (0 or more) as consumed by the peer; more than is outstanding means all of it."""
        self.outstanding = max(self.outstanding - size, 0)


class CreditReturn:
    """Credit at the receiver's side of one call: it gathers consumed bytes up to a quarter of the window, then returns
    them.

    Args:
        window: bytes that the peer may have outstanding, 1 to ``CREDIT_BYTES_MAX``.

    Raises:
        InvalidArgumentError: the window is out of range.
    """

    __slots__ = ("_held", "_window")

    def __init__(self, window: int = CREDIT_BYTES) -> None:
        self._window = check_window(window)
        self._held = 0

    def consumed(self, size: int) -> int:
        """Count ``size`` bytes (0 or more) as consumed; return how many to give back now, 0 for none."""
        self._held += size
        return self.flush() if self._held * CREDIT_RETURN_FRACTION >= self._window else 0

    def flush(self) -> int:
        """Return how many bytes to give back now, also below a quarter of the window; 0 for none.

        Call it with the answer to a heartbeat, so that an idle call has all of its credit.
        """
        held, self._held = self._held, 0
        return held


def check_interval(interval_seconds: float) -> float:
    """Return the heartbeat interval, in seconds, when it is in its limits.

    Raises:
        InvalidArgumentError: it is below 0.05, above 3600 or not a number.
    """
    # Written so that NaN fails it too.
    fits = is_number(interval_seconds)
    if not (fits and HEARTBEAT_SECONDS_MIN <= interval_seconds <= HEARTBEAT_SECONDS_MAX):
        raise InvalidArgumentError(
            f"heartbeat interval is {interval_seconds!r} s; must be {HEARTBEAT_SECONDS_MIN} "
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

    __slots__ = ("_excused", "_heard", "_interval", "_sent")

    def __init__(self, interval_seconds: float, now: float) -> None:
        self._interval = check_interval(interval_seconds)
        self._heard = self._excused = now
        self._sent = now

    def heard(self, now: float) -> None:
        """Record the arrival of any message of the peer."""
        self._heard = max(self._heard, now)

    def excuse(self, until: float) -> None:
        """Take the peer's silence until then, and no longer, for none: what it would answer is still on its way to it."""
        self._excused = until

    def sent(self, now: float) -> None:
        """Record the sending of any message to the peer."""
        self._sent = max(self._sent, now)

    def woke(self, now: float, due: float) -> float:
        """Record the end of a wait that was to end at ``due``; return the seconds of a standstill, 0 for none.

        Who wakes more than an interval late stood still, as its machine did, and has not read yet what came meanwhile:
        that is no silence of the peer's.
        """
        if now - due <= self._interval:
            return 0.0
        self._heard = min(self._heard + (now - due), now)
        return now - due

    def _gone_at(self) -> float:
        return max(self._heard, self._excused) + self._interval * SILENT_INTERVALS

    def heartbeat_due(self, now: float) -> bool:
        """Whether nothing was sent for one interval."""
        # The same sum as in next_deadline, not a difference: rounding must never make a caller that slept until
        # the deadline find that nothing is due.
        return now >= self._sent + self._interval

    def next_deadline(self) -> float:
        """The time at which a heartbeat falls due or the peer counts as gone, whichever is first."""
        return min(self._sent + self._interval, self._gone_at())

    def peer_is_late(self, now: float) -> bool:
        """Whether nothing arrived for an interval and a half."""
        return now >= self._heard + self._interval * LATE_INTERVALS

    def peer_is_gone(self, now: float) -> bool:
        """Whether nothing arrived for three intervals."""
        return now >= self._gone_at()
