"""Rounds of small frames, and their pace: followers that wait for changes send in rounds, and rounds come less often under load.

A commit wakes every follower, and a frame costs much the same whatever is in it, at both ends. So small frames go out in
rounds, in each of which those who have waited longest send one. The time from one round to the next is a multiple of what
the rounds take: followers leave most of the event loop to others, and what comes in between goes with one frame. What makes
the loop slow makes the rounds longer, or late, which counts as well. A follower alone does not wait.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import islice
from typing import Final

from upr_protocol.limits import ROUND_SECONDS_MAX

SHARE: Final = 4
"""The next round begins this many times a round's duration after it began. In that time frames are handed to gRPC, which
then works for about as long; a client on the same machine takes several times as much for a frame."""
ROUNDS: Final = 4
ROUND_FRAMES: Final = 16
"""In so many rounds all followers have a turn, or in fewer of so many frames: in a round the last one waits for all before it, at
the server and again at a client of many followers, and what is shared is made once a round."""
FULL_SHARE: Final = 3
"""SHARE of rounds of ROUND_FRAMES and more: a follower has a frame in some of them only, and its client time in between."""
TIMER_SECONDS: Final = 0.001
"""Resolution of the event loop's timers: shorter waits, and delays, are none."""


class Pace:
    """Pace of rounds; the caller has the clock. All in seconds; ``interval`` is from the beginning of a round to that of the
    next, 0 to ROUND_SECONDS_MAX.
    """

    def __init__(self) -> None:
        self.interval = 0.0
        self._began = 0.0
        self._late = 0.0
        self._before = 0.0

    def left(self, now: float) -> float:
        """Return the seconds until the next round may begin, 0 for now."""
        left = self._began + self.interval - now
        return left if left > TIMER_SECONDS else 0.0

    def begin(self, now: float, *, waited: bool) -> None:
        """Record the beginning of a round, for which followers waited or not."""
        late = now - self._began - self.interval - TIMER_SECONDS
        self._late = max(late, 0.0) if waited else 0.0
        self._began = now

    def end(self, now: float, frames: int) -> None:
        """Record the end of the round: the interval goes half of the way to what suits it.

        Of the last two rounds the shorter one counts, so that a single pause of the process changes nothing.

        Args:
            frames: sent in the round, at least 1; the first one is for nothing, and the others share the rest.
        """
        taken = (now - self._began + self._late) * (frames - 1) / frames
        steady, self._before = min(taken, self._before), taken
        share = FULL_SHARE if frames >= ROUND_FRAMES else SHARE
        self.interval += (min(steady * share, ROUND_SECONDS_MAX) - self.interval) / 2


class Rounds:
    """Rounds of a server's followers, of which there are ``members``; one alone does not wait.

    In a round those who have waited longest are woken in one turn of the event loop: they stand at the same place then, and can
    share a frame.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self.members = 0
        self._waiting: dict[Callable[[], None], None] = {}
        self._is_open = False
        self._frames = 0

    @property
    def _most(self) -> int:
        return max(ROUND_FRAMES, -(-self.members // ROUNDS))

    def join(self, wake: Callable[[], None]) -> bool:
        """Return whether a frame is to be sent now. If not, ``wake`` is called when the next round begins."""
        if self.members == 1:
            return True
        if not self._is_open:
            loop = asyncio.get_running_loop()
            now = time.monotonic()
            left = self.pace.interval and self.pace.left(now)
            if left and not self._waiting:
                loop.call_later(left, self._begin, loop)
            if left or self._waiting:
                self._waiting[wake] = None
                return False
            self._open(loop, now, waited=False)
        elif self._frames >= self._most:
            self._waiting[wake] = None
            return False
        self._frames += 1
        return True

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        for wake in list(islice(self._waiting, self._most)):
            del self._waiting[wake]
            wake()
        self._open(loop, time.monotonic(), waited=True)

    def _open(self, loop: asyncio.AbstractEventLoop, now: float, *, waited: bool) -> None:
        """Open a round until all who are awake by now have sent."""
        self._is_open = True
        self._frames = 0
        self.pace.begin(now, waited=waited)
        loop.call_soon(self._close, loop)

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_open = False
        now = time.monotonic()
        if self._frames:
            self.pace.end(now, self._frames)
        if self._waiting:
            loop.call_later(self.pace.left(now), self._begin, loop)
