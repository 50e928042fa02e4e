"""Leases of members end in time, whatever their calls do."""

import asyncio
from typing import Final

from upr.engine.members import NEVER
from upr.engine.owners import Owners
from upr_protocol.limits import LEASE_SECONDS_MIN

LOOK_SECONDS: Final = 1.0
"""At least so often leases are looked at: a lease is never shorter, so that none begins and ends in between."""
assert LOOK_SECONDS <= LEASE_SECONDS_MIN


def micros(seconds: float) -> int:
    """Return a time of the event loop's clock as the engine has it, or a duration."""
    return round(seconds * 1e6)


class LeaseKeeper:
    """Has the leases of a bucket's members end in time, also of those whose call was lost."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Look at the leases when one may have ended, until ``stop``."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            self._owners.tick(micros(loop.time()))
            deadline = self._owners.deadline
            left = LOOK_SECONDS if deadline == NEVER else deadline / 1e6 - loop.time()
            try:
                async with asyncio.timeout(min(max(left, 0.001), LOOK_SECONDS)):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def stop(self) -> None:
        """Have ``run`` return."""
        self._stopping.set()
