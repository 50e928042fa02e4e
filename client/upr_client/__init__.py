"""The client of upr-stream: write keys, follow changes, resume exactly.

``Client`` is for threads, ``AsyncClient`` for asyncio; both do the same.
"""

from upr_client._async.bucket import AsyncBucket
from upr_client._async.changes import AsyncChanges
from upr_client._async.client import AsyncClient
from upr_client._sync.bucket import Bucket
from upr_client._sync.changes import Changes
from upr_client._sync.client import Client
from upr_client.events import Change, ChangeBatch, Marker, Rollback
from upr_client.messages import PartitionInfo
from upr_client.positions import FilePositions, MemoryPositions, PositionStore
from upr_client.results import WriteResult, WriteResults
from upr_protocol.consumer import ProtocolError
from upr_protocol.errors import (
    BucketNotFoundError,
    ClosedError,
    CorruptBlockError,
    CreditExceededError,
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
    StorageFailedError,
    TooManyError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.position import Position

__all__ = [
    "AsyncBucket",
    "AsyncChanges",
    "AsyncClient",
    "Bucket",
    "BucketNotFoundError",
    "Change",
    "ChangeBatch",
    "Changes",
    "Client",
    "ClosedError",
    "CorruptBlockError",
    "CreditExceededError",
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
    "Position",
    "PositionDamagedError",
    "PositionStore",
    "ProtocolError",
    "Rollback",
    "RollbackError",
    "SeqnoExhaustedError",
    "ShuttingDownError",
    "StorageFailedError",
    "TooManyError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UprError",
    "WriteResult",
    "WriteResults",
]
