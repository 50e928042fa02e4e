"""The client of upr-stream: write keys, follow changes, resume exactly.

``Client`` is for threads, ``AsyncClient`` for asyncio; both do the same.
"""

from upr_client._async.bucket import AsyncBucket
from upr_client._async.buffered import AsyncBufferedWriter
from upr_client._async.changes import AsyncBatches, AsyncChanges
from upr_client._async.client import AsyncClient
from upr_client._async.cuts import AsyncCut
from upr_client._async.view import AsyncView
from upr_client._sync.bucket import Bucket
from upr_client._sync.buffered import BufferedWriter
from upr_client._sync.changes import Batches, Changes
from upr_client._sync.client import Client
from upr_client._sync.cuts import Cut
from upr_client._sync.view import View
from upr_client.bucket_info import BucketInfo
from upr_client.cut_info import CutInfo
from upr_client.events import Change, ChangeBatch, Marker, Rollback
from upr_client.messages import PartitionInfo
from upr_client.positions import (
    FilePositions,
    MemoryPositions,
    PositionBusyError,
    PositionStore,
    PositionStoreError,
)
from upr_client.progress import ChangesStatus, Problem
from upr_client.purge_info import PartitionPurge, PurgeHolder
from upr_client.results import WriteResult, WriteResults
from upr_client.server_info import (
    BucketStatus,
    ConsumerInfo,
    ConsumerPosition,
    MemberInfo,
    ServerStatus,
    StorageInfo,
)
from upr_client.sqlite_positions import SqlitePositions
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
    FencedError,
    HandlerError,
    InvalidArgumentError,
    ListenError,
    MissingPackageError,
    NoRoomError,
    NotOwnerError,
    OutOfOrderError,
    PartitionNotActiveError,
    PartlyWrittenError,
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
    WriteFailedError,
)
from upr_protocol.position import Position

__all__ = [
    "AlreadyExistsError",
    "AsyncBatches",
    "AsyncBucket",
    "AsyncBufferedWriter",
    "AsyncChanges",
    "AsyncClient",
    "AsyncCut",
    "AsyncView",
    "Batches",
    "Bucket",
    "BucketGoneError",
    "BucketInfo",
    "BucketNotFoundError",
    "BucketStatus",
    "BufferedWriter",
    "Change",
    "ChangeBatch",
    "Changes",
    "ChangesStatus",
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
    "FencedError",
    "FilePositions",
    "HandlerError",
    "InvalidArgumentError",
    "ListenError",
    "Marker",
    "MemberInfo",
    "MemoryPositions",
    "MissingPackageError",
    "NoRoomError",
    "NotOwnerError",
    "OutOfOrderError",
    "PartitionInfo",
    "PartitionNotActiveError",
    "PartitionPurge",
    "PartlyWrittenError",
    "Pin",
    "Position",
    "PositionBusyError",
    "PositionDamagedError",
    "PositionStore",
    "PositionStoreError",
    "Problem",
    "ProtocolError",
    "PurgeHolder",
    "Rollback",
    "RollbackError",
    "SeqnoExhaustedError",
    "ServerStatus",
    "ShuttingDownError",
    "SnapshotGoneError",
    "SqlitePositions",
    "StorageFailedError",
    "StorageInfo",
    "TooManyError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UprError",
    "View",
    "WriteFailedError",
    "WriteResult",
    "WriteResults",
]
