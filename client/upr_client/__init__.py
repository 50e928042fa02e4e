"""The client of upr-stream: write keys, follow changes, resume exactly.

``Client`` is for threads, ``AsyncClient`` for asyncio; both do the same. Errors are in ``upr_client.errors``, what
operators see in ``upr_client.admin``, blocks and the handshake in ``upr_client.lowlevel``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_NAMES = {
    "upr_client._async.admin": "AsyncAdmin",
    "upr_client._async.bucket": "AsyncBucket",
    "upr_client._async.changes": "AsyncChanges",
    "upr_client._async.client": "AsyncClient",
    "upr_client._async.cuts": "AsyncCut",
    "upr_client._async.view": "AsyncView",
    "upr_client._async.writer": "AsyncWriter",
    "upr_client._sync.admin": "Admin",
    "upr_client._sync.bucket": "Bucket",
    "upr_client._sync.changes": "Changes",
    "upr_client._sync.client": "Client",
    "upr_client._sync.cuts": "Cut",
    "upr_client._sync.view": "View",
    "upr_client._sync.writer": "Writer",
    "upr_client.changes.events": "Change ChangeBatch Marker Rollback",
    "upr_client.changes.options": "Group Only ServerPositions Tuning",
    "upr_client.positions": "FilePositions MemoryPositions PositionStore SqlitePositions",
    "upr_client.writing": "WriteResult WriteResults",
    "upr_protocol.errors": "UprError",
    "upr_protocol.failover": "WriteToken",
    "upr_protocol.position": "Position",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    # A server, a command and a program of one flavour load what they use.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
