"""Which positions are to be stored, and when. Without I/O: the same in both flavours."""

from collections.abc import Iterable, Mapping
from typing import Final

from upr_client import backoff
from upr_client.changes_options import ChangesOptions
from upr_client.incoming import Clock, Incoming
from upr_client.ledger import Ledger
from upr_client.ownership import Ownership
from upr_protocol.errors import UprError
from upr_protocol.position import Position

_FENCED_SECONDS: Final = 1.0
"""For so long a refusal waits for what the call says about it: a server that was started anew knows of no owner."""


class Saving:
    """What changed since it was stored, what must be stored before a Start, and what could not be stored.

    Args:
        incoming: holds the positions of what was received.
        ledger: moves them back to what was acknowledged; None when asking for more acknowledges.
        ownership: of positions that are kept in the server; None for others.
    """

    def __init__(
        self,
        options: ChangesOptions,
        incoming: Incoming,
        ledger: Ledger | None,
        ownership: Ownership | None,
        clock: Clock,
    ) -> None:
        self._seconds = options.save_seconds
        self._is_of_use = options.store is not None or ownership is not None
        self._incoming = incoming
        self._ledger = ledger
        self._ownership = ownership
        self._clock = clock
        self._saved_at = clock.now()
        self._musts_taken = self._musts_stored = 0
        self._stored: dict[int, Position] = {}
        self._failures = 0
        self._not_before = 0.0
        self._fenced_at: float | None = None

    # When.

    @property
    def has_changed(self) -> bool:
        """Whether a position is not as it was stored last."""
        ledger = self._ledger
        return self._incoming.session.has_changed or (ledger is not None and ledger.has_changed)

    @property
    def must(self) -> bool:
        """Whether a position is to be stored before anything is started: a crash in between must not find the old one."""
        return self._incoming.must_save != self._musts_stored

    def is_due(self, now: float, hurry: bool) -> bool:
        """Whether to store now; ``hurry``: what changed is not to wait for its time."""
        if self._ownership is not None and not self._ownership.may_save:
            return False
        overdue = hurry or now - self._saved_at >= self._seconds
        return now >= self._not_before and (self.must or (self.has_changed and overdue))

    def next_due(self, now: float, hurry: bool) -> float | None:
        """In how many seconds there is something to store, None for not by itself."""
        if not (self.must or (self._is_of_use and self.has_changed)):
            return None
        if self._ownership is not None and not self._ownership.may_save:
            return None
        due = now if self.must or hurry else self._saved_at + self._seconds
        return max(due, self._not_before) - now

    # What.

    def load(self) -> None:
        """The positions were loaded."""
        self._saved_at = self._clock.now()

    def begin(self) -> list[int]:
        """Return the partitions whose positions may have changed; ``stored`` or ``failed`` follows."""
        self._saved_at = self._clock.now()
        # What changes while these are being stored is to be stored too.
        self._musts_taken = self._incoming.must_save
        changed = set(self._incoming.session.take_changed())
        if self._ledger is not None:
            changed |= self._ledger.take_changed()
        return sorted(changed.intersection(self._incoming.session.partitions))

    def news(self, positions: Mapping[int, Position]) -> dict[int, Position]:
        """Return those that are not what was stored last: what is received and not acknowledged moves no position."""
        if self._ledger is None:
            return dict(positions)
        return {p: at for p, at in positions.items() if self._stored.get(p) != at}

    def stored(self, positions: Mapping[int, Position]) -> None:
        """They are stored."""
        self._musts_stored = self._musts_taken
        self._failures, self._not_before, self._fenced_at = 0, 0.0, None
        if self._ledger is not None:
            self._stored.update(positions)
        if self._ownership is not None:
            self._ownership.stored(positions)

    def failed(self, positions: Iterable[int], *, wait: bool = False) -> None:
        """They could not be stored; ``wait``: try again after a pause only, which grows."""
        self._incoming.session.mark_changed(
            set(positions).intersection(self._incoming.session.partitions)
        )
        if wait:
            seconds = backoff.delay(self._failures, self._clock.random())
            self._not_before = self._clock.now() + seconds
            self._failures += 1

    def fenced(self, error: UprError) -> None:
        """The server said that this is no owner any more, and nothing was stored.

        When its positions were set back, or the server was started anew, the call ends and the next one owns again;
        when there is another owner the call ends with that.

        Raises:
            UprError: the error, when the call goes on all the same.
        """
        now = self._clock.now()
        if self._fenced_at is None:
            self._fenced_at = now
        elif now - self._fenced_at >= _FENCED_SECONDS:
            raise error

    def opened(self) -> None:
        """Another call was accepted."""
        self._failures, self._not_before, self._fenced_at = 0, 0.0, None

    def forget(self, partitions: Iterable[int]) -> None:
        """What is stored of these partitions is not known any more."""
        for partition in partitions:
            self._stored.pop(partition, None)
