"""Types of what a client's calls return, named here for annotations: nobody makes one by name."""

from upr_client._async.admin import AsyncAdmin
from upr_client._async.bucket import AsyncBucket
from upr_client._async.changes import AsyncChanges
from upr_client._async.cuts import AsyncCut
from upr_client._async.view import AsyncView
from upr_client._async.writer import AsyncWriter
from upr_client._sync.admin import Admin
from upr_client._sync.bucket import Bucket
from upr_client._sync.changes import Changes
from upr_client._sync.cuts import Cut
from upr_client._sync.view import View
from upr_client._sync.writer import Writer
from upr_client.writes import WriteResult, WriteResults

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncBucket",
    "AsyncChanges",
    "AsyncCut",
    "AsyncView",
    "AsyncWriter",
    "Bucket",
    "Changes",
    "Cut",
    "View",
    "WriteResult",
    "WriteResults",
    "Writer",
]
