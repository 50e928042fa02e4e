"""A disk that loses what was not synced, and fails: it stands in for the module ``os`` of the journal.

The real files are what the page cache shows to a process; what is on the medium is kept here. A crash of the process
loses nothing. A power loss leaves of what was not synced a part that the seed chooses: nothing, the beginning, sectors
here and there with zeros or older bytes between them, or a size without its bytes. A name that was made or removed
without its folder being synced is there or not. What was synced is there, exactly.

After a failed fsync the pages count as clean though not all of them were written, as Linux has it: a later fsync
succeeds without them.
"""

import errno
import os
import posix
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from upr.storage.store import Store

SECTORS = (64, 512, 4096)
"""Bytes of a sector, one for each disk; the smallest because the records of the simulation are small."""
CALLS = (
    "open",
    "create",
    "write",
    "fsync",
    "ftruncate",
    "unlink",
    "commit",
    "committed",
)
"""Where something may go wrong: calls of ``os``, and before and after a transaction of the store is durable."""
_PLAIN = ("fstat", "stat", "strerror")


class Killed(BaseException):
    """The process ended here, or the power went: nothing of it runs any more, not even what would clean up."""


@dataclass(slots=True)
class Fault:
    """Something that goes wrong at the n-th of some calls from now.

    Attributes:
        calls: which calls count.
        left: calls until then; it goes wrong at the one that makes this 0.
        error: errno; 0 when the process ends instead.
        power: whether the power goes with the process.
        times: how many calls in a row fail.
    """

    calls: tuple[str, ...]
    left: int
    error: int = 0
    power: bool = False
    times: int = 1


class SimulatedFile:
    """What the cache and the medium hold of one file.

    Attributes:
        cache: what a process reads.
        medium: what is there after a power loss of all that was synced.
    """

    def __init__(self, sector: int) -> None:
        self.cache = bytearray()
        self.medium = bytearray()
        self._sector = sector
        self._dirty: set[int] = set()
        self._cut: int | None = None
        """The smallest size that it was truncated to since it was synced."""

    def write(self, at: int, data: bytes) -> None:
        """Change the cache."""
        self.cache.extend(bytes(max(at + len(data) - len(self.cache), 0)))
        self.cache[at : at + len(data)] = data
        if data:
            last = (at + len(data) - 1) // self._sector
            self._dirty.update(range(at // self._sector, last + 1))

    def truncate(self, size: int) -> None:
        """Cut the cache off."""
        del self.cache[size:]
        self._cut = size if self._cut is None else min(size, self._cut)
        self._dirty = {page for page in self._dirty if page * self._sector < size}

    def _write_back(self, pages: Iterable[int], to: bytearray) -> None:
        for page in pages:
            first = page * self._sector
            data = self.cache[first : first + self._sector]
            to.extend(bytes(max(first + len(data) - len(to), 0)))
            to[first : first + len(data)] = data

    def some_written_back(self, rng: random.Random) -> None:
        """The system writes some of what is dirty by itself."""
        self._write_back([p for p in sorted(self._dirty) if rng.random() < 0.5], self.medium)

    def sync(self, part: range | None = None) -> None:
        """Have everything on the medium; of a part what is in it, and that it is there, but nothing that was cut off."""
        pages = self._dirty_in(part)
        if part is None:
            if self._cut is not None:
                del self.medium[self._cut :]
            self._write_back(sorted(pages), self.medium)
            del self.medium[len(self.cache) :]
            self.medium.extend(bytes(len(self.cache) - len(self.medium)))
            self._cut = None
        else:
            self._write_back(sorted(pages), self.medium)
            if self._cut is not None:
                self._cut = max(self._cut, part.stop)
        self._dirty -= pages

    def fail_to_sync(self, rng: random.Random, part: range | None = None) -> None:
        """Write some of it, and believe that all is written."""
        self.some_written_back(rng)
        self._dirty -= self._dirty_in(part)

    def _dirty_in(self, part: range | None) -> set[int]:
        if part is None:
            return set(self._dirty)
        first, end = part.start // self._sector, part.stop
        return {page for page in self._dirty if page >= first and page * self._sector < end}

    def lose_power(self, rng: random.Random) -> None:
        """Have of what was not synced what the seed leaves."""
        if self._dirty or self._cut is not None or len(self.cache) > len(self.medium):
            left = self.medium
            if self._cut is not None and rng.random() < 0.5:
                del left[self._cut :]
            how = rng.choice(("nothing", "everything", "beginning", "sectors", "size"))
            dirty = sorted(self._dirty)
            if how == "everything":
                self._write_back(dirty, left)
            elif how == "beginning" and dirty:
                end = rng.randint(dirty[0] * self._sector, len(self.cache))
                torn = self.cache[dirty[0] * self._sector : end]
                left.extend(bytes(max(end - len(left), 0)))
                left[end - len(torn) : end] = torn
            elif how == "sectors":
                chance = rng.random()
                self._write_back([p for p in dirty if rng.random() < chance], left)
            if how == "size" or (how == "sectors" and rng.random() < 0.5):
                left.extend(bytes(max(len(self.cache) - len(left), 0)))
        self.cache = bytearray(self.medium)
        self._dirty, self._cut = set(), None


class SimulatedDisk:
    """The disk under one folder.

    Args:
        folder: durable when the disk is made, with what is in it.
        rng: decides what goes wrong, and what a power loss leaves.

    Attributes:
        power_lost: whether the power went with the process that was killed.
        counts: how often what happened.
    """

    O_DSYNC = posix.O_DSYNC

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder = folder
        self._rng = rng
        self._sector = rng.choice(SECTORS)
        self._names: dict[str, SimulatedFile] = {}
        for path in folder.glob("*"):
            file = self._names[path.name] = SimulatedFile(self._sector)
            file.write(0, path.read_bytes())
            file.sync()
        self._durable_names = dict(self._names)
        self._open: dict[int, SimulatedFile | None] = {}
        """By descriptor; None for the folder."""
        self._syncing: set[int] = set()
        """Descriptors whose writes are synced by the call that writes."""
        self._others: set[int] = set()
        self.faults: list[Fault] = []
        self._dead = False
        self.power_lost = False
        self.counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        # Whatever else the journal may come to use must be simulated first.
        if name.isupper() or name.startswith(("O_", "SEEK_")) or name in _PLAIN:
            return getattr(os, name)
        raise AttributeError(f"the simulated disk has no {name}")

    # What goes wrong

    def _due(self, call: str) -> Fault | None:
        if self._dead:
            raise Killed
        found = None
        for fault in list(self.faults):
            if call in fault.calls:
                fault.left -= 1
                if fault.left <= 0:
                    found = found or fault
                    if fault.left <= 1 - fault.times:
                        self.faults.remove(fault)
        return found

    def _fail(self, fault: Fault, call: str) -> None:
        if not fault.error:
            self._dead = True
            self.power_lost = fault.power
            self._count(f"killed at {call}")
            raise Killed
        self._count(f"{errno.errorcode[fault.error]} of {call}")
        self._count("disk errors")

    def _check(self, call: str) -> None:
        fault = self._due(call)
        if fault is not None:
            self._fail(fault, call)
            raise OSError(fault.error, os.strerror(fault.error))

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def crash(self, *, power: bool) -> None:
        """End the process that has the files open, and with ``power`` the system too; then there may be a new one."""
        for fd in self._open:
            os.close(fd)
        self._open = {}
        self._dead = self.power_lost = False
        self.faults = [fault for fault in self.faults if self._rng.random() < 0.4]
        if power:
            self._count("power losses")
            self._lose_power()

    def _lose_power(self) -> None:
        left: dict[str, SimulatedFile] = {}
        for name in sorted({*self._names, *self._durable_names}):
            file = self._rng.choice([self._names.get(name), self._durable_names.get(name)])
            path = self._folder / name
            path.unlink(missing_ok=True)
            if file is not None:
                file.lose_power(self._rng)
                path.write_bytes(file.cache)
                left[name] = file
        self._names, self._durable_names = left, dict(left)

    def _names_written_back(self) -> None:
        """The system may write the names of a folder by itself."""
        if self._rng.random() < 0.3:
            self._durable_names = dict(self._names)

    # The module

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if self._folder not in (path, path.parent):
            # The store's folder, where the file of a proof is made: the store's transaction fails instead.
            fd = os.open(path, flags, mode)
            self._others.add(fd)
            return fd
        self._check("create" if flags & os.O_CREAT else "open")
        if path == self._folder:
            fd = os.open(path, flags, mode)
            self._open[fd] = None
            return fd
        assert path.parent == self._folder, f"{path} is not simulated"
        fd = os.open(path, flags & ~self.O_DSYNC, mode)
        file = self._names.get(path.name)
        if file is None:
            file = self._names[path.name] = SimulatedFile(self._sector)
        if flags & os.O_TRUNC and file.cache:
            file.truncate(0)
        self._open[fd] = file
        self._syncing.discard(fd)
        if flags & self.O_DSYNC:
            self._syncing.add(fd)
        return fd

    def close(self, fd: int) -> None:
        if fd in self._others:
            self._others.remove(fd)
            os.close(fd)
            return
        if self._dead:
            raise Killed
        if fd in self._open:
            del self._open[fd]
            os.close(fd)

    def pwrite(self, fd: int, data: bytes | memoryview, at: int) -> int:
        fault = self._due("write")
        size = len(data)
        if fault is not None:
            size = self._rng.randrange(size)
        elif self._rng.random() < 0.02:
            # Not an error: the caller has to go on with the rest.
            size = self._rng.randint(1, size)
        file = self._open[fd]
        assert file is not None
        if self._rng.random() < 0.1:
            file.some_written_back(self._rng)
        if size:
            file.write(at, bytes(data[:size]))
            os.pwrite(fd, data[:size], at)
        if fault is not None:
            self._fail(fault, "write")
            if size and self._rng.random() < 0.5:
                # First a short count, then the error.
                self.faults.append(Fault(("write",), 1, fault.error))
            else:
                raise OSError(fault.error, os.strerror(fault.error))
        if fd in self._syncing:
            self.fsync(fd, range(at, at + size))
        return size

    def pwritev(self, fd: int, pieces: Sequence[bytes], at: int) -> int:
        return self.pwrite(fd, b"".join(pieces), at)

    def fsync(self, fd: int, part: range | None = None) -> None:
        if fd in self._others:
            os.fsync(fd)
            return
        fault = self._due("fsync")
        file = self._open[fd]
        if fault is not None:
            if file is not None and fault.error:
                file.fail_to_sync(self._rng, part)
            elif file is None:
                self._names_written_back()
            self._fail(fault, "fsync")
            raise OSError(fault.error, os.strerror(fault.error))
        if file is None:
            self._durable_names = dict(self._names)
        else:
            file.sync(part)

    def ftruncate(self, fd: int, size: int) -> None:
        if fd not in self._open:
            # Of a process that has ended.
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._check("ftruncate")
        file = self._open[fd]
        assert file is not None
        if self._rng.random() < 0.5:
            file.some_written_back(self._rng)
        os.ftruncate(fd, size)
        file.truncate(size)

    def unlink(self, path: Path) -> None:
        self._check("unlink")
        self._names_written_back()
        os.unlink(path)
        self._names.pop(path.name, None)

    # The store

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction of the store, which is durable when it is committed and else leaves nothing."""
        fault = self._due("commit")
        if fault is not None:
            self._fail(fault, "commit")
            if fault.error == errno.ENOSPC:
                raise self._rng.choice((lmdb.MapFullError, lmdb.DiskError))("no room")
            if self._rng.random() < 0.5:
                raise lmdb.Error(os.strerror(fault.error))
            raise OSError(fault.error, os.strerror(fault.error))
        yield
        fault = self._due("committed")
        if fault is not None and not fault.error:
            self._fail(fault, "committed")


class SimulatedStore(Store):
    """A store whose write transactions fail when the disk says so."""

    def __init__(self, folder: Path, disk: SimulatedDisk) -> None:
        super().__init__(folder)
        self._disk = disk


def _failing(name: str) -> Any:
    def call(self: SimulatedStore, *args: Any) -> Any:
        with self._disk.transaction():
            return getattr(Store, name)(self, *args)

    return call


for _name in (
    "clear_proof",
    "write_proof",
    "write_recovery",
    "put_flush",
    "replace",
    "put_cuts",
    "put_consumers",
    "forget_producers",
):
    setattr(SimulatedStore, _name, _failing(_name))
