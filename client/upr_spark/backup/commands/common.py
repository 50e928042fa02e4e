"""What several commands share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from upr_spark.backup.chain import Manifest
from upr_spark.backup.documents import Json
from upr_spark.backup.errors import BackupNotFoundError
from upr_spark.backup.output import time_text

if TYPE_CHECKING:
    from upr_client import Client


def open_client(target: str) -> "Client":
    """Return a client that waits for a server that went away, up to a minute."""
    from upr_client import Client

    return Client(target, retry_seconds=60.0)


def number_at(chain: Sequence[Manifest], at: Any) -> int:
    """Return the number of a restore point: None means the newest; else a value of ``RestorePoint``."""
    if at is None:
        return len(chain)
    if isinstance(at, int):
        return at
    before = [manifest.number for manifest in chain if manifest.cut_time <= at[0]]
    if not before:
        raise BackupNotFoundError(
            f"there is no backup from {time_text(at[0])} or before", hint="'list' shows all"
        )
    return max(before)


def summary(manifest: Manifest) -> Json:
    """Return what is shown of a backup in listings."""
    return {
        "id": manifest.number,
        "kind": manifest.kind,
        "as_of": time_text(manifest.cut_time),
        "started": time_text(manifest.started),
        "finished": time_text(manifest.finished),
        "rows": manifest.rows,
        "files": len(manifest.files),
        "bytes": manifest.file_bytes,
        "rollbacks": len(manifest.rollbacks),
    }
