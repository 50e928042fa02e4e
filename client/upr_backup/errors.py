"""Errors of a repository."""

import errno
from typing import Final

from upr_protocol.errors import UprError

_OF_DAMAGE: Final = frozenset(
    {
        # What pyarrow says of bytes that make no sense has no number.
        None,
        errno.EIO,
        errno.EBADMSG,
        errno.EUCLEAN,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
    }
)


def is_damage(error: BaseException) -> bool:
    """Return whether an error of reading is of what is stored, and not of the way there or of this machine."""
    if isinstance(error, OSError):
        return error.errno in _OF_DAMAGE
    return not isinstance(error, MemoryError)


class RepositoryError(UprError):
    """The repository cannot be used: not one, of a newer format, or of another bucket."""

    default_reason = "REPOSITORY"


class RepositoryDamagedError(UprError):
    """What the repository holds fails its checksum, is missing, or contradicts itself."""

    default_reason = "REPOSITORY_DAMAGED"


class BackupNotFoundError(UprError):
    """There is no backup of that number or time."""

    default_reason = "NOT_FOUND"


class NotEmptyError(UprError):
    """The bucket to restore into holds data."""

    default_reason = "NOT_EMPTY"


class MergeRefusedError(UprError):
    """A merge there would leave out what a later backup goes back to."""

    default_reason = "MERGE_REFUSED"


class LockedError(UprError):
    """Another run has the repository, or committed before this one could."""

    default_reason = "LOCKED"
    default_retriable = True


class HistoryChangedError(UprError):
    """The history that a run was reading is not the server's any more; it has to begin again with a new cut."""

    default_reason = "HISTORY_CHANGED"
    default_retriable = True


class StorageNotFoundError(UprError):
    """The bucket of the object store that a location names does not exist."""

    default_reason = "NOT_FOUND"


class StorageRefusedError(UprError):
    """The object store does not do what was asked, and will not without other settings."""

    default_reason = "STORAGE_REFUSED"


class StorageUnreachableError(UprError):
    """The object store cannot be reached, or cannot serve now; a change may have been made or not."""

    default_reason = "UNAVAILABLE"
    default_retriable = True


class StorageTimeoutError(UprError):
    """The object store did not answer in time; a change may have been made or not."""

    default_reason = "STORAGE_TIMED_OUT"
    default_retriable = True
