"""The client of upr-stream: write keys, follow changes, resume exactly.

``Client`` is for threads, ``AsyncClient`` for asyncio; both do the same.
"""

from upr_client._async.bucket import AsyncBucket
from upr_client._async.changes import AsyncChanges
from upr_client._async.client import AsyncClient
from upr_client._async.cuts import AsyncCut
from upr_client._sync.bucket import Bucket
from upr_client._sync.changes import Changes
from upr_client._sync.client import Client
from upr_client._sync.cuts import Cut
from upr_client.bucket_info import BucketInfo
from upr_client.cut_info import CutInfo
from upr_client.events import Change, ChangeBatch, Marker, Rollback
from upr_client.messages import PartitionInfo
from upr_client.positions import FilePositions, MemoryPositions, PositionStore
from upr_client.purge_info import PartitionPurge, PurgeHolder
from upr_client.results import WriteResult, WriteResults
from upr_client.server_info import (
    BucketStatus,
    ConsumerInfo,
    ConsumerPosition,
    ServerStatus,
    StorageInfo,
)
from upr_protocol.consumer import Pin, ProtocolError
from upr_protocol.errors import (
    AlreadyExistsError,
    BucketGoneError,
    BucketNotFoundError,
    ClosedError,
    CorruptBlockError,
    CreditExceededError,
    CutNotFoundError,
    DataDamagedError,
    DataDirectoryError,
    InvalidArgumentError,
    ListenError,
    NoRoomError,
    OutOfOrderError,
    PartitionNotActiveError,
    PositionDamagedError,
    RollbackError,
    SeqnoExhaustedError,
    ShuttingDownError,
    SnapshotGoneError,
    StorageFailedError,
    TooManyError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.position import Position

__all__ = [
    "AlreadyExistsError",
    "AsyncBucket",
    "AsyncChanges",
    "AsyncClient",
    "AsyncCut",
    "Bucket",
    "BucketGoneError",
    "BucketInfo",
    "BucketNotFoundError",
    "BucketStatus",
    "Change",
    "ChangeBatch",
    "Changes",
    "Client",
    "ClosedError",
    "ConsumerInfo",
    "ConsumerPosition",
    "CorruptBlockError",
    "CreditExceededError",
    "Cut",
    "CutInfo",
    "CutNotFoundError",
    "DataDamagedError",
    "DataDirectoryError",
    "FilePositions",
    "InvalidArgumentError",
    "ListenError",
    "Marker",
    "MemoryPositions",
    "NoRoomError",
    "OutOfOrderError",
    "PartitionInfo",
    "PartitionNotActiveError",
    "PartitionPurge",
    "Pin",
    "Position",
    "PositionDamagedError",
    "PositionStore",
    "ProtocolError",
    "PurgeHolder",
    "Rollback",
    "RollbackError",
    "SeqnoExhaustedError",
    "ServerStatus",
    "ShuttingDownError",
    "SnapshotGoneError",
    "StorageFailedError",
    "StorageInfo",
    "TooManyError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UprError",
    "WriteResult",
    "WriteResults",
]
