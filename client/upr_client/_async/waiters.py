"""Waiters: who waits until writes are dealt with, by whoever follows."""

from collections.abc import Callable

from upr_client._async.io import Event, now
from upr_client.changes.session import Following
from upr_protocol.errors import BehindError, BucketGoneError
from upr_protocol.failover import WriteToken


class Waiters:
    """Those who wait for what one follower deals with; from any thread."""

    def __init__(self) -> None:
        self._moved: set[Event] = set()

    def __len__(self) -> int:
        return len(self._moved)

    def wake(self) -> None:
        """Have all look again."""
        for moved in list(self._moved):
            moved.set()

    async def until_reached(
        self,
        token: WriteToken,
        is_reached: Callable[[], bool],
        following: Callable[[], Following | None],
        seconds: float,
    ) -> None:
        """Wait until writes are reached.

        Args:
            token: of the writes.
            is_reached: asked at first, and at each ``wake``.
            following: asked when the time is over; returns who deals with them, None for nobody yet.

        Raises:
            BehindError: they were not reached within ``seconds``.
            BucketGoneError: nor can they be: what is followed has turned out to be another bucket.
            UprError: ``is_reached`` raised it.
        """
        until, moved = now() + seconds, Event()
        self._moved.add(moved)
        try:
            while not is_reached():
                if await moved.wait(max(until - now(), 0.0)):
                    moved.clear()
                    continue
                who = following()
                if who is not None and who.is_of_other_bucket(token):
                    raise BucketGoneError(
                        "the write is of another bucket than the one that is followed",
                        hint="was its bucket dropped, and created again?",
                    )
                raise BehindError(
                    f"a write was not reached within {seconds:g} s",
                    hint="wait for longer; or look at the lag, and at whether anything is being followed",
                )
        finally:
            self._moved.discard(moved)
