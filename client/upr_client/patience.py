"""How long a consumer takes silence for slowness."""

from typing import Final

from upr_client.call_state import SILENT_REASON
from upr_protocol.limits import HEARTBEAT_SECONDS_MAX, SILENT_INTERVALS

_DOUBLINGS_MAX: Final = 5
_CALM_SILENCES: Final = 3


class Patience:
    """The heartbeat interval to ask for.

    While a message is on its way nothing else comes, and one that takes longer than three intervals on a slow link
    looks like silence; in the next call it would be sent from its start again, for ever. So the interval doubles
    with every call that ended in silence and brought nothing, up to 32 times its length. It is the first one again
    when something was brought, or when a call held for three times as long as silence may last.

    Args:
        interval: the first one, seconds.
    """

    def __init__(self, interval: float) -> None:
        self._first = interval
        self._doublings = 0
        self._opened_at = 0.0

    @property
    def interval(self) -> float:
        """The interval to ask for, seconds."""
        doubled: float = self._first * 2**self._doublings
        return min(doubled, HEARTBEAT_SECONDS_MAX)

    def opened(self, now: float) -> None:
        """A call was accepted."""
        self._opened_at = now

    def brought(self) -> None:
        """A call brought changes."""
        self._doublings = 0

    def beat(self, now: float) -> None:
        """A call brought a heartbeat."""
        if now - self._opened_at > _CALM_SILENCES * SILENT_INTERVALS * self.interval:
            self._doublings = 0

    def lost(self, reason: str) -> None:
        """A call ended."""
        if reason == SILENT_REASON:
            self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)
