"""What several commands share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from upr_spark.backup.chain import Chain, Link
from upr_spark.backup.documents import Json
from upr_spark.backup.errors import BackupNotFoundError
from upr_spark.backup.expire import Keep
from upr_spark.backup.manifest import Manifest
from upr_spark.backup.options import Span
from upr_spark.backup.output import time_text

if TYPE_CHECKING:
    from upr_client import Client


_F = TypeVar("_F", bound=Callable[..., Any])


def open_client(target: str) -> "Client":
    """Return a client that waits for a server that went away, up to a minute."""
    from upr_client import Client

    return Client(target, retry_seconds=60.0)


def keep_options(function: _F) -> _F:
    """Add --keep-last and --keep-within."""
    last = click.option(
        "--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep so many of the newest."
    )
    within = click.option("--keep-within", type=Span(), help="Keep what is not older, as 30d.")
    return last(within(function))


def keep_or_none(last: int | None, within: int | None) -> Keep | None:
    """Return what the two options say; None when neither was given."""
    return None if last is None and within is None else Keep(last, within)


def number_at(chain: Chain, at: Any) -> int:
    """Return the number of a restore point: None means the newest; else a value of ``RestorePoint``."""
    if at is None:
        return chain.last
    if isinstance(at, int):
        return at
    before = [link.number for link in chain.links if link.cut_time <= at[0]]
    if not before:
        raise BackupNotFoundError(
            f"there is no backup from {time_text(at[0])} or before", hint="'list' shows all"
        )
    return max(before)


def summary(backup: Manifest | Link) -> Json:
    """Return what is shown of a backup in listings."""
    link = Link.of(backup) if isinstance(backup, Manifest) else backup
    return {
        "id": link.number,
        "kind": link.kind,
        "as_of": time_text(link.cut_time),
        "started": time_text(link.started),
        "finished": time_text(link.finished),
        "rows": link.rows,
        "files": link.files,
        "bytes": link.file_bytes,
        "rollbacks": link.rollbacks,
    }
