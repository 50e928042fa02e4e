"""Types of what a client's calls return, named here for annotations: nobody makes one by name."""

from upr_client._async.admin import AsyncAdmin as AsyncAdmin
from upr_client._async.bucket import AsyncBucket as AsyncBucket
from upr_client._async.bucket import AsyncCut as AsyncCut
from upr_client._async.changes import AsyncChanges as AsyncChanges
from upr_client._async.view import AsyncView as AsyncView
from upr_client._async.writer import AsyncWriter as AsyncWriter
from upr_client._sync.admin import Admin as Admin
from upr_client._sync.bucket import Bucket as Bucket
from upr_client._sync.bucket import Cut as Cut
from upr_client._sync.changes import Changes as Changes
from upr_client._sync.view import View as View
from upr_client._sync.writer import Writer as Writer
from upr_client.writes import WriteResult as WriteResult
from upr_client.writes import WriteResults as WriteResults

# For help() and the like, which leave out what other modules define.
__all__ = [name for name in dir() if not name.startswith("_")]
