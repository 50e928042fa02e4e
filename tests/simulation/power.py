"""The medium under the files of simulated servers: what a loss of power leaves of them.

A process reads the real files. Kept here is what was synced: of a file its size, of a folder its names; and what takes back
a name that was changed since. A transaction of the store is durable when it has been committed, as LMDB has it.
"""

import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

STORE = "store"
"""The folder of LMDB's files, which lose nothing."""


class Medium:
    """The disks of all servers.

    Args:
        counts: how often what happened.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._sizes: dict[int, int] = {}
        # By inode: folders are renamed too.
        self._names: dict[int, set[str]] = {}
        self._changed: dict[int, list[tuple[str, Callable[[], None]]]] = {}

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Have what is synced and renamed noted from now on; nothing reaches the disk of this machine."""
        unlink, rename, pwrite, pwritev = os.unlink, os.rename, os.pwrite, os.pwritev

        def unlinked(path: Any, **more: Any) -> None:
            if not more and not os.path.islink(path) and os.path.isfile(path):
                old = self._forgotten(path)
                self._note(path, lambda: self._restore(path, old))
            unlink(path, **more)

        def renamed(old: Any, new: Any, **more: Any) -> None:
            had = self._forgotten(new) if os.path.isfile(new) else None
            rename(old, new, **more)

            def back() -> None:
                with suppress(FileNotFoundError):
                    rename(new, old)
                self._restore(new, had)

            self._note(new, back)

        def written(write: Callable[..., int]) -> Callable[..., int]:
            # Only the journal has these calls, and its files are open for writes that are synced.
            def wrote(fd: int, *what: Any) -> int:
                size = write(fd, *what)
                self._synced(fd)
                return size

            return wrote

        for name, call in (
            ("fsync", self._synced),
            ("O_DSYNC", 0),
            ("pwrite", written(pwrite)),
            ("pwritev", written(pwritev)),
            ("unlink", unlinked),
            ("rename", renamed),
            ("replace", renamed),
        ):
            patch.setattr(os, name, call)

    def _synced(self, fd: int) -> None:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = set(os.listdir(fd))
            self._changed.pop(found.st_ino, None)
        else:
            self._sizes[found.st_ino] = found.st_size

    def _note(self, path: Any, back: Callable[[], None]) -> None:
        folder, name = os.path.split(path)
        if os.path.basename(folder) != STORE:
            self._changed.setdefault(os.stat(folder).st_ino, []).append((name, back))

    def _forgotten(self, path: Any) -> bytes:
        """Return what is synced of a file whose name goes; its number may be used again."""
        size = self._sizes.pop(os.stat(path).st_ino, 0)
        return Path(path).read_bytes()[:size]

    def _restore(self, path: Any, data: bytes | None) -> None:
        if data is not None:
            with suppress(FileNotFoundError, NotADirectoryError):
                Path(path).write_bytes(data)
                # It was synced before its name went.
                self._sizes[os.stat(path).st_ino] = len(data)

    def lose_power(self, data: Path, rng: random.Random) -> None:
        """Have of the files of a data directory what is synced, and what the seed leaves of the rest."""
        self._counts["power losses"] += 1
        for folder, folders, _ in os.walk(data):
            inode = os.stat(folder).st_ino
            changes = self._changed.pop(inode, [])
            stays = rng.randint(0, len(changes))
            for _, back in reversed(changes[stays:]):
                self._counts["names taken back"] += 1
                back()
            durable = {STORE, *(name for name, _ in changes[:stays])}
            durable |= self._names.get(inode, set())
            for name in sorted({*os.listdir(folder)} - durable):
                if rng.random() < 0.5:
                    self._counts["names lost"] += 1
                    _remove(os.path.join(folder, name))
            names = sorted(os.listdir(folder))
            folders[:] = [n for n in names if n != STORE and os.path.isdir(os.path.join(folder, n))]
            for path in (os.path.join(folder, name) for name in names):
                if os.path.isfile(path):
                    self._lose_bytes(path, rng)

    def _lose_bytes(self, path: str, rng: random.Random) -> None:
        found = os.stat(path)
        synced = min(self._sizes.get(found.st_ino, 0), found.st_size)
        if synced < found.st_size:
            self._counts["files cut off"] += 1
            end = rng.choice((synced, rng.randint(synced, found.st_size), found.st_size))
            os.truncate(path, end)
            if rng.random() < 0.3:
                # A size without its bytes.
                os.truncate(path, found.st_size)
            self._sizes[found.st_ino] = synced


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
