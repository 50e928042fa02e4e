"""The data directory: its format, its lock, the buckets in it, and the server's part in a set of servers.

DIR/lock                 held exclusively by the server that uses the directory; so is DIR itself
DIR/upr-stream.json      {"program": "upr-stream", "format": 3, "directory": "<16 hex digits>", "cluster": "<the same>",
                         "place": [<inode>, <birth time>]}
DIR/owner.json           the part in a set; not there while a server is alone
DIR/buckets/<version>/   one bucket, named by its version (16 hex digits): journal/ and store/

A folder <version>.new is being filled, <version>.dropped is being deleted; the next start deletes what a crash left of
either, and neither is ever served. ``directory`` is a random id drawn when the directory is created;
``cluster`` is the id of the set of servers that it belongs to; the first of them draws it. ``place`` is that of DIR,
by which a copy is known; a directory of before has none.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from upr.storage.journal import replace_durably, sync_folder
from upr.storage.lmdb_pages import free_bytes
from upr.storage.proof import birth_of
from upr_protocol.errors import DataDirectoryError
from upr_protocol.ownership import Row, Standing, first_row

FORMAT = 3
_PROGRAM = "upr-stream"
_MARK = "upr-stream.json"
_NEW_MARK = f"{_MARK}.new"
_NEW = ".new"
_DROPPED = ".dropped"
HEX_ID = re.compile("[0-9a-f]{16}")
"""Form of the id of a directory, and of a bucket's version in names."""
_OWN = {"lock", _NEW_MARK}
"""Names allowed in a directory whose first server was killed before it wrote the mark."""


def unknown_format(what: str, told: Any, must: int = FORMAT) -> DataDirectoryError:
    """Return the error for a format on disk that this program does not know."""
    if isinstance(told, int) and told < must:
        hint = "serve it with the version that wrote it, take a backup with upr-backup, and restore that into a new directory"
    else:
        hint = "use the program that wrote it, or a newer one"
    return DataDirectoryError(f"format of {what} is {told}; must be {must}", hint=hint)


def bucket_folders(path: Path) -> list[Path]:
    """Return the folders of a data directory that are served as buckets, by name."""
    return [folder for folder in _in_buckets(path) if _is_bucket(folder)]


def not_buckets(path: Path) -> list[str]:
    """Return the names of what lies among the buckets of a data directory and is none, nor the leftover of a crash."""
    found = _in_buckets(path)
    return [one.name for one in found if not _is_bucket(one) and one.suffix not in (_NEW, _DROPPED)]


def _in_buckets(path: Path) -> list[Path]:
    buckets = path / "buckets"
    if buckets.exists() and not buckets.is_dir():
        raise DataDirectoryError(
            f"{buckets} is a file; must be the folder of the buckets",
            hint="put the folder back from a copy of this directory",
        )
    return sorted(buckets.iterdir()) if buckets.is_dir() else []


def _is_bucket(folder: Path) -> bool:
    return folder.is_dir() and HEX_ID.fullmatch(folder.name) is not None


_CANNOT_LOCK = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of locking a directory on file systems without such locks; the lock of the file must be enough then."""


def lock_directory(path: Path, *, make: bool) -> list[int]:
    """Lock a data directory, by its file ``lock`` and itself, and return the descriptors that hold it.

    Both, because the file may be deleted while a server runs: another process could create and lock a new one.

    Args:
        make: whether to create a missing file.

    Raises:
        BlockingIOError: another process holds one of the two.
    """
    held: list[int] = []
    try:
        held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
        if make or (path / "lock").exists():
            flags = os.O_RDWR | os.O_CREAT if make else os.O_RDONLY
            held.append(os.open(path / "lock", flags | os.O_CLOEXEC, 0o644))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        for fd in held:
            os.close(fd)
        raise
    return held


def read_mark(path: Path) -> tuple[str, str]:
    """Return the id of a data directory, and its cluster; DataDirectoryError if it is none of this program and format."""
    mark = path / _MARK
    try:
        text = json.loads(mark.read_text())
        program, version = text["program"], text["format"]
        if program != _PROGRAM:
            raise DataDirectoryError(
                f"{path} is a data directory of {program!r}, not of {_PROGRAM}"
            )
        if version != FORMAT:
            raise unknown_format(f"the data directory {path}", version)
        own, cluster = text["directory"], text["cluster"]
        if not HEX_ID.fullmatch(own) or not isinstance(cluster, str):
            raise ValueError(f"directory is {own!r}, cluster is {cluster!r}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DataDirectoryError(f"{path} is not a data directory: {_MARK} is not there") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataDirectoryError(f"{mark} is malformed: {error}") from error
    return own, cluster


class DataDirectory:
    """An open, locked data directory; created if it does not exist.

    Args:
        must_exist: whether it must exist with a bucket in it.

    Attributes:
        id: random, 16 hex digits, drawn at its creation.
        cluster: the set of servers that it belongs to; empty for none.

    Raises:
        DataDirectoryError: not writable, in use, of another program or of another format; or not there.
    """

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        self.path = path
        try:
            if must_exist and not ((path / _MARK).exists() and bucket_folders(path)):
                raise DataDirectoryError(
                    f"there is no data directory with a bucket in it at {path}",
                    hint="is its volume mounted? Without --require-data a new one is made",
                )
            path.mkdir(parents=True, exist_ok=True)
            self.id, self.cluster = self._read_mark()
            # Raises where they are no folder, which mkdir would tell worse.
            bucket_folders(path)
            self._lock = lock_directory(path, make=True)
            (path / "buckets").mkdir(exist_ok=True)
            # At every start: the process that created it may have been killed before its name was durable.
            sync_folder(path)
        except BlockingIOError as error:
            raise DataDirectoryError(
                f"the data directory {path} is in use by another server",
                hint="stop that server, or give --data another directory",
            ) from error
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {path} cannot be used: {error.strerror or error}",
                hint="give --data a directory that this user can write",
            ) from error

    def _read_mark(self) -> tuple[str, str]:
        mark = self.path / _MARK
        if not mark.exists():
            others = sorted(p.name for p in self.path.iterdir() if p.name not in _OWN)
            if others:
                raise DataDirectoryError(
                    f"{self.path} holds {others[0]!r} and is not a data directory of {_PROGRAM}",
                    hint="give --data an empty directory, or one that does not exist",
                )
            own = self._write_mark("")
            for parent in self.path.resolve().parents:
                # An unreadable entry is not of this program.
                with contextlib.suppress(PermissionError):
                    sync_folder(parent)
            return own, ""
        return read_mark(self.path)

    def _write_mark(self, cluster: str, own: str = "") -> str:
        """Write the mark of the directory, durably, and return its id, by default a new one."""
        own = own or secrets.token_hex(8)
        text = {
            "program": _PROGRAM,
            "format": FORMAT,
            "directory": own,
            "cluster": cluster,
            "place": self._place(),
        }
        replace_durably(self.path / _MARK, json.dumps(text) + "\n")
        return own

    def _place(self) -> list[int]:
        """Return inode and birth time of the directory, 0 where it has none. A file system that is copied whole keeps both."""
        path = self.path.resolve()
        return [path.stat().st_ino, birth_of(path)]

    def check_place(self, *, may_be_moved: bool) -> None:
        """Raise if the directory was copied here and has a part in a set of servers; else remember that it is here.

        The set knows a server by the id of its directory, so a copy would act and count as the original.

        Args:
            may_be_moved: whether to accept a copy, because the operator states that the original is used no more.

        Raises:
            DataDirectoryError: it is a copy.
        """
        found = self._place()
        inode, birth = _place_of(json.loads((self.path / _MARK).read_text()))
        # Some file systems give other inodes after each mount; where there are birth times, they tell. A container may have
        # none where its host had.
        is_copy = birth != found[1] if birth and found[1] else inode not in (0, found[0])
        if is_copy and not may_be_moved and (self.path / OWNER_FILE).exists():
            raise DataDirectoryError(
                f"the data directory {self.path} is a copy of that of server {self.id} of a set; must be the original",
                hint="'upr-admin restore-copy DIR' makes it another server, which then joins the set; give --data-moved for"
                " one start if it was moved here, and nothing was written to the original after its stop",
            )
        if [inode, birth] != found:
            # On a full disk the server starts without.
            with contextlib.suppress(OSError):
                self._write_mark(self.cluster, self.id)

    def join(self, cluster: str) -> None:
        """Belong to a set of servers from now on, durably."""
        self._write_mark(cluster, self.id)
        self.cluster = cluster

    def is_another(self) -> None:
        """Draw a new id, durably, because others may know the old id with other data."""
        self.id = self._write_mark(self.cluster)

    def lost(self) -> str:
        """Return how the directory was lost (deleted, moved or unmounted), in words; empty if it was not."""
        try:
            held, here = os.fstat(self._lock[0]), os.stat(self.path)
            os.stat(self.path / _MARK)
        except (FileNotFoundError, NotADirectoryError):
            return "the data directory was deleted, moved or unmounted under the server"
        if not os.path.samestat(held, here):
            return "another directory is in the place of the data directory that was opened"
        return ""

    def buckets(self) -> Iterator[Path]:
        """Yield the folder of each bucket that was created completely and not dropped."""
        yield from bucket_folders(self.path)

    def remove_leftovers(self) -> list[str]:
        """Delete leftovers of a crash: of buckets that were being created or dropped, and torn files of what was undone.

        Returns: the names of the buckets' folders.
        """
        left = [
            path
            for path in sorted((self.path / "buckets").iterdir())
            if path.is_dir() and path.suffix in (_NEW, _DROPPED)
        ]
        for path in left:
            shutil.rmtree(path)
        for path in (self.path / "undone").glob("*.new"):
            path.unlink()
        return [path.name for path in left]

    def new_bucket(self, version: int) -> Path:
        """Create a folder for a new bucket; ``bucket_created`` gives it its final name."""
        path = self.path / "buckets" / f"{version:016x}{_NEW}"
        path.mkdir()
        return path

    def bucket_created(self, folder: Path) -> Path:
        """Give a complete folder its final name, durably."""
        for path in (folder / "store", folder / "journal", folder):
            sync_folder(path)
        try:
            return self._rename(folder, folder.with_suffix(""))
        except OSError:
            # Without the name there is no bucket: its creator gets an error, and may create another of that name.
            with contextlib.suppress(OSError):
                os.rename(folder.with_suffix(""), folder)
            raise

    def drop_bucket(self, folder: Path) -> Path:
        """Take a bucket's name from its folder, durably; return the folder, which the caller deletes.

        A failed drop can be retried.
        """
        return self._rename(folder, folder.with_suffix(_DROPPED))

    def _rename(self, old: Path, new: Path) -> Path:
        try:
            os.rename(old, new)
        except FileNotFoundError:
            # An earlier try may have renamed the folder, and failed after that.
            if not new.exists():
                raise
        sync_folder(new.parent)
        return new

    def close(self) -> None:
        for fd in self._lock:
            os.close(fd)


def _place_of(mark: Any) -> tuple[int, int]:
    """Return inode and birth time that a mark tells, 0 for what it does not."""
    told = mark.get("place")
    is_place = isinstance(told, list) and len(told) == 2 and all(type(one) is int for one in told)
    return (told[0], told[1]) if is_place else (0, 0)


OWNER_FILE = "owner.json"
_OWNER_FORMAT = 1
_SPARE_FILE = "owner.spare"
_SPARE_BYTES = 4 * 2**20
"""Room for a change of owner on a disk that others have filled: this file, and the partitions of a dozen buckets."""
NO_ROW = Row(0, 0, "", False, frozenset())
"""The row of a server that has not heard of any."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored.

    Attributes:
        addresses: HOST:PORT of the servers of the set, by directory, where they were last reached.
        known: of the owner: the counted servers of which all counted ones have stored that they count.
    """

    standing: Standing
    addresses: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()

    @property
    def alone(self) -> bool:
        """Whether this server owns, and nobody else was counted: it need not ask anybody before it serves."""
        standing = self.standing
        return standing.owns and standing.row.counted <= {standing.directory}


def read_standing(folder: Path, directory: str, *, replica: bool, meets: bool = True) -> Stored:
    """Return what is stored in a data directory; without the file a server is alone, or a replica that knows nobody.

    Args:
        replica: whether the server was started as a replica. One that is the owner stays it.
        meets: whether it can ask which server was promoted since. Where it cannot, the first owner follows the server
            that it was started with.

    Raises:
        DataDirectoryError: the file is malformed, or of another format.
    """
    path = folder / OWNER_FILE
    try:
        text = json.loads(path.read_text())
        if text["format"] != _OWNER_FORMAT:
            raise unknown_format(OWNER_FILE, text["format"], _OWNER_FORMAT)
        row: Any = text["row"]
        epoch, revision, promised = map(_epoch, (row["epoch"], row["revision"], text["promised"]))
        known = Row(epoch, revision, row["owner"], epoch > 0, frozenset(row["counted"]))
        standing = Standing(directory, known, promised, text["candidate"])
        if replica and not meets and standing.owns and known.epoch == 1:
            standing = replace(standing, row=NO_ROW)
        # A file of before this was stored has none.
        sure = known.counted.intersection(text.get("known", ()))
        return Stored(standing, dict(text["addresses"]), sure)
    except FileNotFoundError:
        return Stored(Standing(directory, NO_ROW if replica else first_row(directory)))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataDirectoryError(
            f"{path} is malformed: {type(error).__name__}: {error}",
            hint="put it back from a copy of this directory; or let an empty directory join the set",
        ) from error


def _epoch(told: Any) -> int:
    if type(told) is not int or not 0 <= told < 2**63:
        raise ValueError(f"epoch, revision or promise is {told!r}; must be 0 to 2^63 - 1")
    return told


def write_standing(folder: Path, stored: Stored) -> None:
    """Store it durably; raises as ``replace_durably``."""
    standing, row = stored.standing, stored.standing.row
    text = {
        "format": _OWNER_FORMAT,
        "row": {
            "epoch": row.epoch,
            "revision": row.revision,
            "owner": row.owner,
            "counted": sorted(row.counted),
        },
        "promised": standing.promised,
        "candidate": standing.candidate,
        "addresses": dict(sorted(stored.addresses.items())),
        "known": sorted(stored.known),
    }
    words = json.dumps(text, indent=1) + "\n"
    if free_bytes(folder) < _SPARE_BYTES:
        # Without the promise of this server no other one may be able to own.
        (folder / _SPARE_FILE).unlink(missing_ok=True)
    replace_durably(folder / OWNER_FILE, words)
    keep_spare(folder)


def keep_spare(folder: Path) -> None:
    """Keep room for what must be stored on a disk that is full, if there is enough of it now."""
    path = folder / _SPARE_FILE
    if path.exists() or free_bytes(folder) < 2 * _SPARE_BYTES:
        return
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, _SPARE_BYTES)
    except OSError:
        path.unlink(missing_ok=True)
