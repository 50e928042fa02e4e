"""Errors: exceptions that carry reason, retriable and hint.

``reason`` is a stable upper-case token, ``retriable`` says whether the same request may succeed later without a change,
``hint`` says what to do. A rollback is not an error but an answer: no
error ever makes a consumer discard data.
"""

from collections.abc import Sequence
from typing import ClassVar

SHOWN_CHARACTERS = 100


def shown(text: str) -> str:
    """Return what a peer sent as errors show it: quoted, and SHOWN_CHARACTERS of it at most."""
    quoted = repr(text[:SHOWN_CHARACTERS])
    if len(text) <= SHOWN_CHARACTERS and len(quoted) <= SHOWN_CHARACTERS:
        return quoted
    return f"{quoted[: SHOWN_CHARACTERS - 3]}..."


class UprError(Exception):
    """Base of every error of this project.

    Args:
        message: what happened, in one line, with the value and the limit where there are any.
        hint: what the reader can do about it; may be empty.
        reason: overrides the class's token, for errors that arrive from a peer.
        retriable: overrides the class's default, for errors that arrive from a peer.
        owner: HOST:PORT of the server that would not refuse, if it is known.
    """

    default_reason: ClassVar[str] = "INTERNAL"
    default_retriable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        reason: str | None = None,
        retriable: bool | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(message)
        self.owner = owner
        self.message = message
        self.hint = hint
        self.reason = self.default_reason if reason is None else reason
        self.retriable = self.default_retriable if retriable is None else retriable

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidArgumentError(UprError):
    """A value is outside its declared range or shape; nothing was changed."""

    default_reason = "INVALID_ARGUMENT"


class CorruptBlockError(InvalidArgumentError):
    """A block's columns, table or CRC contradict each other; nothing of it was used."""

    default_reason = "CORRUPT_BLOCK"


class BucketNotFoundError(UprError):
    """There is no bucket of that name, or it was dropped and created again."""

    default_reason = "BUCKET_NOT_FOUND"


class BucketGoneError(UprError):
    """The bucket was dropped while it was used, or has another version than the one known."""

    default_reason = "BUCKET_GONE"


class AlreadyExistsError(UprError):
    """A bucket or cut of that name exists."""

    default_reason = "ALREADY_EXISTS"


class CutNotFoundError(UprError):
    """There is no cut of that name, or its lease has ended."""

    default_reason = "CUT_NOT_FOUND"


class ConsumerNotFoundError(UprError):
    """There is no consumer of that name."""

    default_reason = "CONSUMER_NOT_FOUND"


class SnapshotGoneError(UprError):
    """The seqno that a stream was to end at exactly is not a marker, or no longer one."""

    default_reason = "SNAPSHOT_GONE"


class PartitionNotActiveError(UprError):
    """The partition takes no writes here: it is replica, pending or dead."""

    default_reason = "PARTITION_NOT_ACTIVE"


class TooFewReplicasError(UprError):
    """Fewer replicas are there than ``replicated(k)`` asks for: the write was not numbered, or the stream not begun."""

    default_reason = "TOO_FEW_REPLICAS"
    default_retriable = True


class BehindError(UprError):
    """A server or a reader does not have yet what it was asked for."""

    default_reason = "BEHIND"
    default_retriable = True


class WriteUndoneError(UprError):
    """A write is not part of its partition's history: a failover undid it."""

    default_reason = "WRITE_UNDONE"


class SeqnoExhaustedError(UprError):
    """The partition has used all 2^48 - 1 seqnos and refuses further writes."""

    default_reason = "SEQNO_EXHAUSTED"


class OutOfOrderError(UprError):
    """A Write's number does not follow the one before it in the same call."""

    default_reason = "WRITE_OUT_OF_ORDER"
    default_retriable = True


class ContentDiffersError(UprError):
    """The place of a write has other content, or was skipped; nothing of the write was applied."""

    default_reason = "CONTENT_DIFFERS"


class NoRoomError(UprError):
    """The disk is down to its reserve; the write was refused before it was numbered."""

    default_reason = "NO_ROOM"
    default_retriable = True


class QuotaExceededError(UprError):
    """The bucket has reached its quota; the write was refused before it was numbered."""

    default_reason = "QUOTA_EXCEEDED"
    default_retriable = True


class StorageFailedError(UprError):
    """The disk failed under the server; it takes no more writes until it is restarted."""

    default_reason = "STORAGE_FAILED"


class DataDamagedError(UprError):
    """Stored bytes fail their checksum or contradict each other."""

    default_reason = "DATA_DAMAGED"


class DataDirectoryError(UprError):
    """The data directory cannot be used: foreign, newer format, locked or not writable."""

    default_reason = "DATA_DIRECTORY"


class ListenError(UprError):
    """The address to listen on is malformed, in use or not allowed."""

    default_reason = "LISTEN"


class UnknownOutcomeError(UprError):
    """The answer to a write, or to an order for a bucket, was lost; it may or may not have been applied."""

    default_reason = "UNKNOWN_OUTCOME"
    default_retriable = True


class PartlyWrittenError(UprError):
    """A retried write had been applied before, except in the partitions that refused it then."""

    default_reason = "PARTLY_WRITTEN"


class WriteFailedError(UprError):
    """Rows that a buffered writer had taken were not written, or may not have been.

    The error of the first batch that failed is its ``__cause__``; with UNKNOWN_OUTCOME there, rows may have been
    written.

    Args:
        rows: their number.
        keys: the first 100 of their keys.
        partitions: those that the rows belong to, ascending.
    """

    default_reason = "WRITE_FAILED"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        reason: str | None = None,
        retriable: bool | None = None,
        rows: int = 0,
        keys: Sequence[bytes] = (),
        partitions: Sequence[int] = (),
    ) -> None:
        super().__init__(message, hint=hint, reason=reason, retriable=retriable)
        self.rows = rows
        self.keys = list(keys)
        self.partitions = list(partitions)


class ShuttingDownError(UprError):
    """The server is stopping."""

    default_reason = "SHUTTING_DOWN"
    default_retriable = True


class TooManyError(UprError):
    """A bounded resource (streams, calls, producers) is used up."""

    default_reason = "TOO_MANY"
    default_retriable = True


class UnauthenticatedError(UprError):
    """The server knows neither the token nor the certificate of the caller, or got none."""

    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(UprError):
    """The caller has no role for this, whether or not what it asked for is there."""

    default_reason = "PERMISSION_DENIED"


class UnavailableError(UprError):
    """The server cannot be reached, or the connection was lost."""

    default_reason = "UNAVAILABLE"
    default_retriable = True


class RollbackError(UprError):
    """The server asked for a rollback and the consumer's policy is to fail."""

    default_reason = "ROLLBACK"


class PositionDamagedError(UprError):
    """A stored position cannot be read or contradicts itself."""

    default_reason = "POSITION_DAMAGED"


class PositionBucketError(UprError):
    """A stored position is of a bucket of another name; nothing was undone or stored."""

    default_reason = "POSITION_BUCKET"


class FencedError(UprError):
    """The consumer, or the partition, has a newer owner; nothing was stored."""

    default_reason = "FENCED"


class NotOwnerError(UprError):
    """A member of a group started a partition that it does not own, or was asked to release."""

    default_reason = "NOT_OWNER"
    default_retriable = True


class MissingPackageError(UprError):
    """Something needs a package that is not installed."""

    default_reason = "MISSING_PACKAGE"


class HandlerError(UprError):
    """A handler of the application failed for a change at every retry; nothing later was acknowledged."""

    default_reason = "HANDLER_FAILED"


class ClosedError(UprError):
    """The client, stream or writer was used after it was closed."""

    default_reason = "CLOSED"


class ProtocolError(UprError):
    """The server broke the protocol: what it sent does not continue the stream. Nothing of it was used."""

    default_reason = "PROTOCOL"
    default_retriable = True
