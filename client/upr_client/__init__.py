"""The client of upr-stream: write keys, follow changes, resume exactly.

``Client`` is for threads, ``AsyncClient`` for asyncio; both do the same. Errors are in ``upr_client.errors``, what
operators see in ``upr_client.admin``, blocks and the handshake in ``upr_client.lowlevel``.
"""

from upr_client._async.admin import AsyncAdmin
from upr_client._async.bucket import AsyncBucket
from upr_client._async.changes import AsyncChanges
from upr_client._async.client import AsyncClient
from upr_client._async.cuts import AsyncCut
from upr_client._async.view import AsyncView
from upr_client._async.writer import AsyncWriter
from upr_client._sync.admin import Admin
from upr_client._sync.bucket import Bucket
from upr_client._sync.changes import Changes
from upr_client._sync.client import Client
from upr_client._sync.cuts import Cut
from upr_client._sync.view import View
from upr_client._sync.writer import Writer
from upr_client.changes.events import Change, ChangeBatch, Marker, Rollback
from upr_client.changes.options import Group, Only, ServerPositions, Tuning
from upr_client.positions import FilePositions, MemoryPositions, PositionStore, SqlitePositions
from upr_client.writing import WriteResult, WriteResults
from upr_protocol.errors import UprError
from upr_protocol.failover import WriteToken
from upr_protocol.position import Position

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncBucket",
    "AsyncChanges",
    "AsyncClient",
    "AsyncCut",
    "AsyncView",
    "AsyncWriter",
    "Bucket",
    "Change",
    "ChangeBatch",
    "Changes",
    "Client",
    "Cut",
    "FilePositions",
    "Group",
    "Marker",
    "MemoryPositions",
    "Only",
    "Position",
    "PositionStore",
    "Rollback",
    "ServerPositions",
    "SqlitePositions",
    "Tuning",
    "UprError",
    "View",
    "WriteResult",
    "WriteResults",
    "WriteToken",
    "Writer",
]
