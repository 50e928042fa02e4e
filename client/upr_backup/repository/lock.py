"""The lock of a repository: it tells a second run at once that it is not alone.

What is committed is right without it: only the creation of a manifest's name counts. Locks are numbered, and both
taking and renewing one means to create the next number, so that of two runs that take over an expired one, one wins.
"""

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

from upr_backup.errors import LockedError
from upr_backup.repository import Storage
from upr_backup.repository.documents import NOT_WRITTEN_HERE, canonical
from upr_protocol.errors import UprError

_FOLDER = "locks/"
_SECONDS = 600.0
_LOOK_SECONDS = 5.0
_HOST_SHOWN = 64
_PID_MAX = 2**31
_LOCK = re.compile(r"locks/([0-9]{10})\.json")


class Holding(Protocol):
    """The lock that a run holds."""

    def keep(self, now: bool = False) -> None:
        """Renew it, or raise LockedError."""


class Lock:
    """Holds a repository for a ``with`` block.

    Args:
        seconds: how long it holds when it is not renewed.
        clock: seconds since the epoch.
    """

    def __init__(
        self, storage: Storage, seconds: float = _SECONDS, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._seconds = seconds
        self._clock = clock
        self._token = secrets.token_hex(8)
        self._number = 0
        self._taken = 0.0
        self._looked = 0.0

    def __enter__(self) -> Self:
        """Take the lock, or raise LockedError where another run has it."""
        for _ in range(8):
            number, holder = self._newest()
            if holder:
                raise LockedError(
                    f"the repository is locked by {holder}",
                    hint=f"wait for that run; a lock is given up {self._seconds:.0f} s after its run was killed, "
                    "or with 'unlock'",
                )
            if self._create(number + 1) and self._newest_number() == self._number:
                self._forget_older()
                return self
        raise LockedError("the repository is locked by another run that began just now")

    def __exit__(self, *_: object) -> None:
        if self._number:
            # Numbers never begin again: a request to delete that arrives late then meets no other run's lock. What
            # was committed stays committed whether this succeeds or not.
            with suppress(OSError, UprError):
                if self._create(self._number + 1, released=True):
                    self._forget_older()

    def force(self) -> str:
        """Release the lock whoever has it, and return who had it, "" for nobody.

        What is committed stays right: the other run finds out within seconds, and before it commits. LockedError where a
        process of this machine has it, which can be ended instead.
        """
        number, holder = self._newest()
        if holder.endswith(f" on {socket.gethostname()[:_HOST_SHOWN]}"):
            raise LockedError(
                f"the repository is locked by {holder}, which runs here",
                hint="end that process: then the lock is free by itself",
            )
        if holder and self._create(number + 1, released=True):
            self._forget_older()
        return holder

    def keep(self, now: bool = False) -> None:
        """Look every few seconds whether the lock is still this one's; renew it when a third of its time has passed, or now.

        Raises:
            LockedError: another run took it over.
        """
        at = self._clock()
        due = now or at - self._taken >= self._seconds / 3
        if not due and abs(at - self._looked) < _LOOK_SECONDS:
            return
        self._looked = at
        if self._newest_number() != self._number or (due and not self._create(self._number + 1)):
            raise LockedError("another run took the repository over: this one was paused too long")
        if due:
            self._forget_older()

    def _create(self, number: int, released: bool = False) -> bool:
        now = self._clock()
        document = {
            "expires": 0.0 if released else now + self._seconds,
            "began": _began(os.getpid()),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": self._token,
        }
        if not self._storage.put_if_absent(_name(number), canonical(document)):
            return False
        self._number, self._taken = number, now
        return True

    def _newest_number(self) -> int:
        numbers = [_LOCK.fullmatch(name) for name in self._storage.names(_FOLDER)]
        return max((int(found[1]) for found in numbers if found), default=0)

    def _newest(self) -> tuple[int, str]:
        """Return the newest lock's number, and who holds it; nobody when it has expired."""
        number = self._newest_number()
        try:
            holder = json.loads(self._storage.read(_name(number)))
            host, pid = str(holder["host"])[:_HOST_SHOWN], int(holder["pid"])
            expires, token, began = float(holder["expires"]), holder["token"], str(holder["began"])
        except (FileNotFoundError, RecursionError, *NOT_WRITTEN_HERE):
            return number, ""
        if not 0 < pid < _PID_MAX or not host.isprintable():
            return number, ""
        # It is this one's own where releasing it failed, or was done and not answered.
        if expires < self._clock() or token == self._token:
            return number, ""
        if host == socket.gethostname() and not _runs(pid, began):
            return number, ""
        return number, f"process {pid} on {host}"

    def _forget_older(self) -> None:
        for name in self._storage.names(_FOLDER):
            if _LOCK.fullmatch(name) and name < _name(self._number):
                self._storage.delete(name)


def _name(number: int) -> str:
    return f"{_FOLDER}{number:010d}.json"


def _began(pid: int) -> str:
    """Return what tells a process from a later one of its number, which in a container is often the same; "" when
    that is not to be had.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name before may hold anything, parentheses included.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else f"{fields[19]} {boot}"


def _runs(pid: int, began: str) -> bool:
    """Return whether a process that began then is still there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return _began(pid) in ("", began)
