"""The client of upr-stream: write keys, follow changes, resume exactly.

``Client`` is for threads, ``AsyncClient`` for asyncio; both do the same. What their calls return is named in
``upr_client.types``, for annotations. Errors are in ``upr_client.errors``, what operators see in
``upr_client.admin``, blocks and the handshake in ``upr_client.lowlevel``.
"""

from upr_client import admin as admin
from upr_client import errors as errors
from upr_client import lowlevel as lowlevel
from upr_client import types as types
from upr_client._async.client import AsyncClient
from upr_client._sync.client import Client
from upr_client.changes.events import Change, ChangeBatch, Marker, Rollback
from upr_client.changes.options import Group, Only, ServerPositions, Tuning
from upr_client.positions import FilePositions, MemoryPositions, PositionStore, SqlitePositions
from upr_protocol.errors import UprError
from upr_protocol.failover import WriteToken
from upr_protocol.position import Position

__all__ = [
    "AsyncClient",
    "Change",
    "ChangeBatch",
    "Client",
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
    "WriteToken",
]
