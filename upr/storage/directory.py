"""The data directory: its format, its lock, and the buckets in it.

DIR/upr-stream.json      {"program": "upr-stream", "format": 2}
DIR/lock                 held exclusively by the server that uses the directory
DIR/buckets/<version>/   one bucket, named by its version (16 hex digits): journal/ and store/

A folder <version>.new is being filled, <version>.dropped is being deleted; what a crash leaves of either goes at the
next start, and neither is ever served.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from upr.storage.journal import sync_folder
from upr_protocol.errors import DataDirectoryError

FORMAT = 2
_PROGRAM = "upr-stream"
_MARK = "upr-stream.json"
_NEW_MARK = "upr-stream.json.new"
_NEW = ".new"
_DROPPED = ".dropped"
_VERSION = re.compile("[0-9a-f]{16}")
_OWN = {"lock", _NEW_MARK}
"""What may lie in a directory whose first server was killed before the mark was there."""


def bucket_folders(path: Path) -> list[Path]:
    """Return the folders of a data directory that are served as buckets, by name."""
    buckets = path / "buckets"
    folders = sorted(buckets.iterdir()) if buckets.is_dir() else []
    return [folder for folder in folders if folder.is_dir() and _VERSION.fullmatch(folder.name)]


class DataDirectory:
    """An open, locked data directory; made if it does not exist.

    Raises:
        DataDirectoryError: not writable, in use, of another program or of a newer format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._check_mark()
            self._lock = self._take_lock()
            (path / "buckets").mkdir(exist_ok=True)
            # Each time: the process that made it may have been killed before its name was durable.
            sync_folder(path)
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {path} cannot be used: {error.strerror or error}",
                hint="give --data a directory that this user can write",
            ) from error

    def _check_mark(self) -> None:
        mark = self.path / _MARK
        if not mark.exists():
            others = sorted(p.name for p in self.path.iterdir() if p.name not in _OWN)
            if others:
                raise DataDirectoryError(
                    f"{self.path} holds {others[0]!r} and is not a data directory of {_PROGRAM}",
                    hint="give --data an empty directory, or one that does not exist",
                )
            temporary = self.path / _NEW_MARK
            with temporary.open("w") as file:
                file.write(json.dumps({"program": _PROGRAM, "format": FORMAT}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, mark)
            sync_folder(self.path)
            for parent in self.path.resolve().parents:
                # Those that this process could not read it has not made.
                with contextlib.suppress(PermissionError):
                    sync_folder(parent)
            return
        try:
            text = json.loads(mark.read_text())
            program, version = text["program"], text["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataDirectoryError(f"{mark} is malformed: {error}") from error
        if program != _PROGRAM:
            raise DataDirectoryError(
                f"{self.path} is a data directory of {program!r}, not of {_PROGRAM}"
            )
        if version != FORMAT:
            raise DataDirectoryError(
                f"{self.path} has format {version}, this program knows format {FORMAT}",
                hint="use the program that wrote it, or a newer one",
            )

    def _take_lock(self) -> int:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise DataDirectoryError(
                f"the data directory {self.path} is in use by another server",
                hint="stop that server, or give --data another directory",
            ) from error
        return fd

    def buckets(self) -> Iterator[Path]:
        """Yield the folder of each bucket that was created whole and not dropped."""
        yield from bucket_folders(self.path)

    def remove_leftovers(self) -> list[str]:
        """Delete what a crash left of buckets being created or dropped; returns the names of their folders."""
        left = [
            path
            for path in sorted((self.path / "buckets").iterdir())
            if path.is_dir() and path.suffix in (_NEW, _DROPPED)
        ]
        for path in left:
            shutil.rmtree(path)
        return [path.name for path in left]

    def new_bucket(self, version: int) -> Path:
        """Make a folder for a bucket to be created in; ``bucket_created`` gives it its name."""
        path = self.path / "buckets" / f"{version:016x}{_NEW}"
        path.mkdir()
        return path

    def bucket_created(self, folder: Path) -> Path:
        """Name a folder that was filled whole, durably."""
        for path in (folder / "store", folder / "journal", folder):
            sync_folder(path)
        return self._rename(folder, folder.with_suffix(""))

    def drop_bucket(self, folder: Path) -> Path:
        """Take a bucket's name from its folder, durably; returns the folder, which is left to be deleted."""
        return self._rename(folder, folder.with_suffix(_DROPPED))

    def _rename(self, old: Path, new: Path) -> Path:
        os.rename(old, new)
        sync_folder(new.parent)
        return new

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock)
