"""The clean-shutdown proof: nothing was numbered since it was written. It names the end of each partition and a file
beside it.

It holds where each partition ended. Store and journal together must reach that at a start. This tells a lost or damaged
end of the journal from one that a crash tore.

It names a file created with it, by inode and birth time. No tool that copies files can set them, and changes of owner
and mode keep them. So a copy, whose original may have served newer data since, is not proven. Only a snapshot of the
whole volume keeps both.
"""

import ctypes
import os
import secrets
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from upr.storage.journal import sync_folder
from upr_protocol.block import U64
from upr_protocol.errors import DataDamagedError
from upr_protocol.limits import PARTITIONS

_HEAD = struct.Struct("<BQQQ")
_HIGHS = np.dtype("<u8")
_FILE = "proof-{:016x}"
_AT_FDCWD, _NO_FOLLOW, _WITH_BIRTH = -100, 0x100, 0x800
_STATX_BYTES = 256
_STATX_MASK, _STATX_BIRTH = struct.Struct("=I"), struct.Struct("=64x16xqI")
"""Linux's struct statx: the mask of filled fields at byte 0, the birth time as seconds and nanoseconds at byte 80."""


@dataclass(frozen=True, slots=True)
class ProofFile:
    """File that a proof names.

    Attributes:
        token: random; its name ends in it.
        inode: its number in the file system.
        birth: its birth time, nanoseconds since the epoch; 0 if the file system has none.
    """

    token: int
    inode: int
    birth: int

    def path(self, folder: Path) -> Path:
        return folder / _FILE.format(self.token)

    def is_there(self, folder: Path) -> bool:
        """Return whether the folder has this file itself, not a copy."""
        try:
            found = _stat(self.token, folder)
        except FileNotFoundError:
            return False
        if found.birth and self.birth and found.birth != self.birth:
            return False
        return found.inode == self.inode


def _stat(token: int, folder: Path) -> ProofFile:
    path = folder / _FILE.format(token)
    return ProofFile(token, path.lstat().st_ino, birth_of(path))


def birth_of(path: Path) -> int:
    """Return a file's birth time, nanoseconds since the epoch; 0 if the system has none."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return 0
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), _NO_FOLLOW, _WITH_BIRTH, found):
        return 0
    if not _STATX_MASK.unpack_from(found)[0] & _WITH_BIRTH:
        return 0
    seconds, nanoseconds = _STATX_BIRTH.unpack_from(found)
    return int(seconds * 10**9 + nanoseconds)


def make_file(folder: Path) -> ProofFile:
    """Create a file for a proof, durably."""
    token = secrets.randbits(64)
    with (folder / _FILE.format(token)).open("x") as file:
        file.write(
            "The clean-shutdown proof of this bucket names this file. A copy of it proves nothing.\n"
        )
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    return _stat(token, folder)


def remove_others(folder: Path, kept: ProofFile) -> None:
    for path in folder.glob("proof-*"):
        if path != kept.path(folder):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Proof:
    """Proof: the state of a bucket when its last mutation was numbered.

    Attributes:
        highs: each partition's newest seqno, uint64, shape (1024,).
        flushed: whether the store had everything, so that the journal is not needed.
        file: the file created with it.
        moved: whether it was accepted without that file; never stored.
    """

    highs: U64
    flushed: bool
    file: ProofFile
    moved: bool = False

    def pack(self) -> bytes:
        """Return the stored form, without a checksum."""
        file = self.file
        head = _HEAD.pack(self.flushed, file.token, file.inode, file.birth)
        return head + self.highs.astype(_HIGHS).tobytes()

    @classmethod
    def unpack(cls, body: bytes) -> "Proof":
        """Return the proof, or raise DataDamagedError."""
        if len(body) != _HEAD.size + _HIGHS.itemsize * PARTITIONS:
            raise DataDamagedError(f"the clean-shutdown proof has {len(body)} bytes")
        flushed, *file = _HEAD.unpack_from(body)
        highs = np.frombuffer(body, _HIGHS, offset=_HEAD.size).astype(np.uint64)
        return cls(highs, bool(flushed), ProofFile(*file))

    def at(self, folder: Path, *, may_be_moved: bool) -> "Proof | None":
        """Return the proof if it holds for the data in a folder, None if the data was copied there.

        Args:
            may_be_moved: whether to accept a copy, because the operator states that nothing was written to the original
                since.
        """
        if self.file.is_there(folder):
            return self
        return replace(self, moved=True) if may_be_moved else None
