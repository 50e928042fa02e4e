"""The server's clock: it dates rows, and measures ages and leases.

It begins at the day's clock and goes on with the time that passes (the boot-time clock, which counts the time that a
machine sleeps), so a step of the day's clock makes nothing older or younger. It follows the day's clock by a hundredth
of the time that passes, so that its times stay close where the two differ a little.

Across restarts only the day's clock can tell how long the server was away. It is compared with the newest time that was
stored: a server that was away for more than ``jump_seconds``, and a day's clock that was set forward, look the same. So
then nothing gets older by the difference before the server has run for ``jump_seconds``: until then an operator may
set the day's clock right. While that is back behind the server's clock by more than a jump, the difference never counts.
"""

import asyncio
import json
import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from upr import failpoints
from upr.service.storage_trouble import words_of
from upr.storage.directory import DataDirectory
from upr.storage.journal import replace_durably
from upr_protocol.limits import CLOCK_JUMP_SECONDS

log = logging.getLogger(__name__)

CLOCK: Final = "clock"
"""The file's name."""
_SECOND: Final = 1_000_000
_SLEW: Final = 100
"""Largest correction, as a part of the time that passes."""
_CLOSE: Final = 10_000
"""Smallest difference that is corrected; microseconds."""
STORES_A_JUMP: Final = 10
"""Number of times that the clock is stored within ``jump_seconds``."""
_FILE_BYTES_MAX: Final = 4096


def _day() -> int:
    return time.time_ns() // 1000 + failpoints.number("clock.day") * _SECOND


def _boot() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


@dataclass(frozen=True, slots=True)
class Known:
    """Time as the server before stored it. All in microseconds, of this clock, since the epoch.

    Attributes:
        time: the newest time that was stored.
        since: the time of the newest jump, 0 for none.
        jump: the size of that jump.
        left: remaining run time until the jump counts as time that passed.
    """

    time: int
    since: int = 0
    jump: int = 0
    left: int = 0


class Clock:
    """The time, in microseconds since the epoch. It never goes back while the server runs.

    Args:
        known: of the server before this one; None where there was none.
        jump_seconds: a longer absence counts as a step of the day's clock, until the server has run for as long.
        day, boot: return the day's clock and the boot-time clock in microseconds.
    """

    def __init__(
        self,
        known: Known | None = None,
        *,
        jump_seconds: float = CLOCK_JUMP_SECONDS,
        day: Callable[[], int] = _day,
        boot: Callable[[], int] = _boot,
    ) -> None:
        self.jump_seconds = jump_seconds
        self._day, self._boot = day, boot
        self._limit = int(jump_seconds * _SECOND)
        self._slew = 0
        self._told_off = self._denied = False
        today, self._booted = day(), boot()
        self._at = today if known is None else max(today, known.time)
        self._since = self._jump = self._left = 0
        if known is not None:
            self._go_on(known, today)

    def _go_on(self, known: Known, today: int) -> None:
        if known.left > 0:
            self._since, self._jump, self._left = known.since, known.jump, known.left
        gap = self._at - known.time
        if gap > self._limit:
            self._since, self._jump, self._left = self._at, self._jump + gap, self._limit
            log.warning(
                "the day's clock is far ahead of the newest time that was stored: nothing gets older by that until"
                " the server has run for a while",
                extra={"ahead_seconds": gap // _SECOND, "run_seconds": self.jump_seconds},
            )
        self._look(today)

    def now(self) -> int:
        passed = self._boot() - self._booted
        if passed >= _SECOND:
            self._at, self._booted = self._after(passed), self._booted + passed
            self._look(self._day())
            if self._left and not self._denied:
                self._count_down(passed)
            passed = 0
        return self._after(passed)

    def _after(self, passed: int) -> int:
        return self._at + passed + self._slew * min(passed, _SECOND) // _SLEW

    def _count_down(self, passed: int) -> None:
        self._left = max(self._left - passed, 0)
        if not self._left:
            log.warning(
                "the time that the server was away, by the day's clock, counts from now on",
                extra={"seconds": self._jump // _SECOND},
            )
            self._since = self._jump = 0

    def _look(self, today: int) -> None:
        off = today - self._at
        self._slew = 0 if abs(off) < _CLOSE else 1 if off > 0 else -1
        # The day's clock was ahead; there was no absence.
        self._denied = off < -self._limit
        if (abs(off) > self._limit) is self._told_off:
            return
        self._told_off = not self._told_off
        ahead = {"ahead_seconds": off // _SECOND}
        if self._told_off:
            log.warning("the day's clock is far from the server's clock", extra=ahead)
        else:
            log.warning("the day's clock is near the server's again", extra=ahead)

    def before(self, age: int) -> int:
        """Return the time an age of microseconds ago: rows of that time, or earlier, have the age."""
        moment = self.now() - age
        # Only times from before the jump are younger by it.
        return moment - self._jump if moment < self._since else moment

    def until(self, expires: int, lease: int) -> int:
        """Return the end of a lease of microseconds whose stored end an earlier server wrote."""
        now = self.now()
        if not self._left or expires - lease >= self._since:
            return expires
        late = expires + self._jump
        return late if self._denied else min(late, max(expires, now + self._left))

    @property
    def off_seconds(self) -> float:
        """Return by how many seconds the day's clock is ahead, if that is more than a jump; else 0."""
        return (self._day() - self.now()) / _SECOND if self._told_off else 0.0

    @property
    def jumped_seconds(self) -> float:
        """Return the seconds of the newest jump while it does not count yet; else 0."""
        self.now()
        return self._jump / _SECOND

    @property
    def left_seconds(self) -> float:
        """Return the remaining run time in seconds until the jump counts."""
        return self._left / _SECOND

    def known(self) -> Known:
        """Return the state to store for the next start."""
        return Known(self.now(), self._since, self._jump, self._left)


def read_clock(path: Path) -> Known | None:
    """Return the stored state; None without a file. A damaged file counts as an absence of unknown length."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_FILE_BYTES_MAX))
        crc = document.pop("crc32")
        values = {name: document[name] for name in asdict(Known(0))}
        if crc != _crc(document) or not all(type(v) is int and v >= 0 for v in values.values()):
            raise ValueError("its CRC32 does not fit")
        return Known(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning(
            "the stored time cannot be read", extra={"file": path.name, "error": str(error)}
        )
        return Known(0)


def write_clock(path: Path, known: Known) -> None:
    """Store the state, durably; raises OSError."""
    document: dict[str, Any] = asdict(known)
    replace_durably(path, json.dumps({**document, "crc32": _crc(document)}) + "\n")


def _crc(document: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document, sort_keys=True).encode()):08x}"


class ClockKeeper:
    """The clock of a server, and its file in the data directory: written at the start, now and then, and at the stop."""

    def __init__(self, directory: DataDirectory, jump_seconds: float) -> None:
        self._directory = directory
        self._path = directory.path / CLOCK
        self._failing = False
        self.clock = Clock(read_clock(self._path), jump_seconds=jump_seconds)
        # Store before anything is dated: the next start must not mistake a later time for the start of this one.
        self.store()

    async def run(self) -> None:
        """Store the time until cancelled."""
        while True:
            await asyncio.sleep(self.clock.jump_seconds / STORES_A_JUMP)
            known = self.clock.known()
            await asyncio.to_thread(self._store, known)

    def store(self) -> None:
        """Store the time; without it, the next start may take its absence for longer than it was."""
        self._store(self.clock.known())

    def _store(self, known: Known) -> None:
        if self._directory.lost():
            return
        try:
            write_clock(self._path, known)
        except OSError as error:
            if not self._failing:
                log.warning("the time cannot be stored", extra={"error": words_of(error)})
            self._failing = True
        else:
            if self._failing:
                log.info("the time can be stored again")
            self._failing = False
