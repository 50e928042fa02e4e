"""What can go wrong with a repository."""

from upr_protocol.errors import UprError


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


class LockedError(UprError):
    """Another run has the repository, or committed before this one could."""

    default_reason = "LOCKED"
    default_retriable = True


class HistoryChangedError(UprError):
    """The history that a run was reading is not the server's any more; it has to begin again with a new cut."""

    default_reason = "HISTORY_CHANGED"
    default_retriable = True
