"""When to connect again after a call was lost, and when to give up. Without I/O."""

from collections.abc import Callable
from typing import Final

from upr_client import backoff
from upr_client.incoming import Clock
from upr_client.patience import Patience
from upr_client.progress import Progress
from upr_protocol.consumer import ProtocolError
from upr_protocol.errors import BucketGoneError, UprError

_VIOLATIONS_MAX: Final = 5
"""So often in a row, with no frame in between, the protocol may be broken before that is an error."""


class Reconnecting:
    """What became of the calls so far.

    Args:
        heartbeat_seconds: the interval to ask for at first.
        retry_seconds: how long to try without any progress; None for ever.
        say: takes words for people.
    """

    def __init__(
        self,
        heartbeat_seconds: float,
        retry_seconds: float | None,
        progress: Progress,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._patience = Patience(heartbeat_seconds)
        self._limit = retry_seconds
        self._progress = progress
        self._say = say
        self._clock = clock
        self._attempt = self._violations = 0
        self._any_version = False
        self._heard_at = clock.now()

    @property
    def interval(self) -> float:
        """The heartbeat interval to ask for, seconds."""
        return self._patience.interval

    def version(self, known: int) -> int | None:
        """Return the version of the bucket to ask for, None for whatever has the name; 0 means not known."""
        return None if self._any_version else known or None

    def heard(self) -> None:
        """The server said something."""
        self._heard_at = self._clock.now()

    def answered(self) -> None:
        """Starts were answered."""
        self._attempt = 0

    def beat(self) -> None:
        """A heartbeat came."""
        self._patience.beat(self._clock.now())

    def brought(self) -> None:
        """Changes came."""
        self._attempt = self._violations = 0
        self._patience.brought()

    def opened(self) -> None:
        """A call was accepted."""
        self._any_version = False
        self._patience.opened(self._clock.now())

    def not_opened(self, error: UprError, known: int) -> bool:
        """A call was not accepted. Return whether to open another one at once; ``known`` as for ``version``."""
        # Whatever has the name now: its version tells that everything of the old one is to be undone.
        self._any_version = (
            not self._any_version and bool(known) and error.reason == BucketGoneError.default_reason
        )
        if self._any_version:
            self._say(f"{error}; going on with the new one")
        return self._any_version

    def lost(self, error: UprError) -> float:
        """The call is lost. Return how many seconds to wait before the next one.

        Raises:
            UprError: trying again does not mend it, or was tried for long enough.
        """
        self._patience.lost(error.reason)
        if not error.retriable:
            raise error
        if isinstance(error, ProtocolError):
            self._violations += 1
            if self._violations >= _VIOLATIONS_MAX:
                raise error
        if self._limit is not None and self._clock.now() - self._heard_at >= self._limit:
            raise error
        self._progress.reconnects += 1
        seconds = backoff.delay(self._attempt, self._clock.random())
        self._attempt += 1
        self._say(
            f"the call ended with {error.reason} ({error}); connecting again in {seconds:.2f} s"
        )
        return seconds
