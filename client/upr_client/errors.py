"""Errors: every one that the SDK raises. All are ``UprError``."""

from upr_client.positions import PositionBusyError as PositionBusyError
from upr_client.positions import PositionStoreError as PositionStoreError
from upr_protocol.errors import AlreadyExistsError as AlreadyExistsError
from upr_protocol.errors import BehindError as BehindError
from upr_protocol.errors import BucketGoneError as BucketGoneError
from upr_protocol.errors import BucketNotFoundError as BucketNotFoundError
from upr_protocol.errors import ClosedError as ClosedError
from upr_protocol.errors import ConsumerNotFoundError as ConsumerNotFoundError
from upr_protocol.errors import ContentDiffersError as ContentDiffersError
from upr_protocol.errors import CorruptBlockError as CorruptBlockError
from upr_protocol.errors import CutNotFoundError as CutNotFoundError
from upr_protocol.errors import DataDamagedError as DataDamagedError
from upr_protocol.errors import DataDirectoryError as DataDirectoryError
from upr_protocol.errors import FencedError as FencedError
from upr_protocol.errors import HandlerError as HandlerError
from upr_protocol.errors import InvalidArgumentError as InvalidArgumentError
from upr_protocol.errors import ListenError as ListenError
from upr_protocol.errors import MissingPackageError as MissingPackageError
from upr_protocol.errors import NoRoomError as NoRoomError
from upr_protocol.errors import NotOwnerError as NotOwnerError
from upr_protocol.errors import OutOfOrderError as OutOfOrderError
from upr_protocol.errors import PartitionNotActiveError as PartitionNotActiveError
from upr_protocol.errors import PartlyWrittenError as PartlyWrittenError
from upr_protocol.errors import PermissionDeniedError as PermissionDeniedError
from upr_protocol.errors import PositionBucketError as PositionBucketError
from upr_protocol.errors import PositionDamagedError as PositionDamagedError
from upr_protocol.errors import ProtocolError as ProtocolError
from upr_protocol.errors import QuotaExceededError as QuotaExceededError
from upr_protocol.errors import RollbackError as RollbackError
from upr_protocol.errors import SeqnoExhaustedError as SeqnoExhaustedError
from upr_protocol.errors import ShuttingDownError as ShuttingDownError
from upr_protocol.errors import SnapshotGoneError as SnapshotGoneError
from upr_protocol.errors import StorageFailedError as StorageFailedError
from upr_protocol.errors import TooFewReplicasError as TooFewReplicasError
from upr_protocol.errors import TooManyError as TooManyError
from upr_protocol.errors import UnauthenticatedError as UnauthenticatedError
from upr_protocol.errors import UnavailableError as UnavailableError
from upr_protocol.errors import UnknownOutcomeError as UnknownOutcomeError
from upr_protocol.errors import UprError as UprError
from upr_protocol.errors import WriteFailedError as WriteFailedError
from upr_protocol.errors import WriteUndoneError as WriteUndoneError

# For help() and the like, which leave out what other modules define.
__all__ = [name for name in dir() if not name.startswith("_")]
