"""Waiters: who waits until writes are dealt with, by whoever follows."""

from collections.abc import Callable

from upr_client._async.io import Event, now
from upr_protocol.errors import BehindError
from upr_protocol.limits import check_wait


class Waiters:
    """Those who wait for what one follower deals with; from any thread."""

    def __init__(self) -> None:
        self._moved: set[Event] = set()

    def wake(self) -> None:
        """Have all look again."""
        for moved in list(self._moved):
            moved.set()

    async def until_reached(self, is_reached: Callable[[], bool], seconds: float) -> None:
        """Wait until writes are reached, which is asked at first and at each ``wake``.

        Raises:
            BehindError: they were not reached within ``seconds``.
            InvalidArgumentError: the seconds are out of their range.
        """
        check_wait(seconds)
        until, moved = now() + seconds, Event()
        self._moved.add(moved)
        try:
            while not is_reached():
                if await moved.wait(max(until - now(), 0.0)):
                    moved.clear()
                    continue
                raise BehindError(
                    f"a write was not reached within {seconds:g} s",
                    hint="wait for longer; or look at the lag, at whether anything is being followed, and whether the write's "
                    "bucket is the one of that name now",
                )
        finally:
            self._moved.discard(moved)
