"""Trouble with a bucket's storage: logged once when it begins and once when it ends, and shown while it lasts."""

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import lmdb

from upr_protocol.errors import DataDamagedError, NoRoomError, StorageFailedError, UprError

log = logging.getLogger(__name__)


class Failing(StrEnum):
    """What fails. The metrics name it as here, in lower case; the log by the value."""

    JOURNAL = "the journal cannot be written"
    PROOF = "the clean-shutdown proof cannot be removed"
    FLUSH = "the tail cannot be stored"
    SEGMENTS = "journal segments cannot be removed"
    ROOM = "writes are refused for lack of room"
    MERGE = "blocks cannot be compacted"
    PURGE = "tombstones cannot be purged"
    POSITIONS = "positions of consumers cannot be stored"
    CUTS = "cuts cannot be stored"
    FILES = "its files cannot be looked at"
    PRODUCERS = "producers cannot be forgotten"


PASSING: Final = (OSError, lmdb.Error, MemoryError)
"""Errors with which nothing was stored, and which may pass: what failed is tried again, or refused."""
_UNSEEN: Final = frozenset({Failing.SEGMENTS, Failing.MERGE, Failing.PURGE, Failing.PRODUCERS})
"""Operations that no call fails for, or waits for."""
_OF_WRITES: Final = frozenset({Failing.JOURNAL, Failing.PROOF, Failing.FLUSH, Failing.ROOM})
"""Operations that writes fail for, or wait for."""


_FULL: Final = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def words_of(error: BaseException) -> str:
    """Return an error in words for clients: without paths of this machine."""
    if isinstance(error, UprError):
        return error.message
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, lmdb.Error):
        # The text is "what: why", and "what" can be a path.
        return str(error).rsplit(": ", 1)[-1]
    return f"{type(error).__name__} in the server"


def unreadable(error: BaseException) -> DataDamagedError:
    """Return the error of what cannot be read because of another one; it may pass."""
    return DataDamagedError(f"the store cannot be read: {words_of(error)}", retriable=True)


def is_full(error: BaseException) -> bool:
    if isinstance(error, lmdb.MapFullError | lmdb.DiskError | NoRoomError):
        return True
    return words_of(error).startswith(_FULL)


@dataclass(slots=True)
class Trouble:
    """Trouble: one operation that fails now. It has no error, whose traceback would keep what the operation held.

    Attributes:
        words, full: the newest error in words for clients, and whether it means a lack of room.
        since: when it began, seconds since the epoch.
        began: the same on the monotonic clock.
    """

    what: Failing
    words: str
    full: bool
    since: float
    began: float

    def problem(self) -> UprError:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        words = f"{self.what}, since {since}: {self.words}"
        if self.full:
            return NoRoomError(words, hint="free some space; writing resumes by itself")
        return StorageFailedError(words, hint="see the server's log", retriable=True)


class Troubles:
    """Troubles of one bucket's storage, which may pass; ``changed`` is called when one begins or ends.

    Attributes:
        begun, ended: how often each began and ended.
    """

    def __init__(self, bucket: str, changed: Callable[[], None]) -> None:
        self._bucket = bucket
        self._changed = changed
        self._now: dict[Failing, Trouble] = {}
        self.begun: Counter[Failing] = Counter()
        self.ended: Counter[Failing] = Counter()

    def __contains__(self, what: Failing) -> bool:
        return what in self._now

    def begins(self, what: Failing, error: BaseException) -> None:
        words, full = words_of(error), is_full(error)
        known = self._now.get(what)
        if known is not None:
            known.words, known.full = words, full
            return
        self.begun[what] += 1
        self._now[what] = Trouble(what, words, full, time.time(), time.monotonic())
        log.error(
            "storage trouble",
            extra={"bucket": self._bucket, "trouble": what, "error": str(error) or repr(error)},
        )
        self._changed()

    def ends(self, what: Failing) -> None:
        known = self._now.pop(what, None)
        if known is None:
            return
        self.ended[what] += 1
        seconds = round(time.monotonic() - known.began, 1)
        log.warning(
            "storage trouble is over",
            extra={"bucket": self._bucket, "trouble": what, "seconds": seconds},
        )
        self._changed()

    def problem_of(self, what: Failing) -> UprError:
        return self._now[what].problem()

    def problem(self) -> UprError | None:
        """Return the gravest problem, of equal ones the one that lasts longest; None without one.

        Compaction needs more room than writes, so that as a disk fills what hurts nobody begins first.
        """
        found = self._now.values()
        gravest = min(
            found, key=lambda t: (t.what not in _OF_WRITES, t.what in _UNSEEN), default=None
        )
        return None if gravest is None else gravest.problem()

    @property
    def only_unseen(self) -> bool:
        """Whether all operations that fail are such as no call fails for, or waits for."""
        return self._now.keys() <= _UNSEEN
