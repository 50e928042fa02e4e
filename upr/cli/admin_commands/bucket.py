"""``upr-admin bucket`` and ``purge``: list, create and drop buckets, set their quotas, and drop old tombstones."""

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from upr_cli_kit.options import Parsed, client_option, client_options, partitions_argument
from upr_cli_kit.output import (
    Group,
    Progress,
    columns,
    confirm,
    output_options,
    print_done,
    print_result,
    size_text,
)
from upr_cli_kit.screen import watched_output_options
from upr_cli_kit.times import size
from upr_protocol.errors import BucketGoneError, BucketNotFoundError, InvalidArgumentError
from upr_protocol.limits import PARTITIONS

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.admin import BucketInfo, PartitionPurge


_COLUMNS = ("name", "version", "compression", "mutations", "used", "quota", "problem")
_PURGE_COLUMNS = ("partition", "tombstones", "old_tombstones", "purged", "purge_seqno")
_AT_ONCE = 32
"""Partitions that one call purges."""


def _parse_version(text: str) -> int:
    if len(text) != 16 or not set(text.lower()) <= set("0123456789abcdef"):
        raise InvalidArgumentError(f"{text!r} is not 16 hex digits.")
    return int(text, 16)


@click.group("bucket", cls=Group, bare="list")
def bucket() -> None:
    """List, create and drop buckets, and set their quotas. Alone it is 'bucket list'."""


@bucket.command("list")
@client_option
@watched_output_options
def list_command(client: "Client", as_json: bool) -> None:
    """Show all buckets; those that could not be opened too, with their problem."""
    found = client.admin.buckets()
    print_result(as_json, list(map(_document, found)), columns(_COLUMNS, map(_row, found)))


@bucket.command("create")
@click.argument("name")
@click.option(
    "--compression",
    type=click.Choice(["none", "zstd"]),
    default="none",
    show_default=True,
    help="Of stored blocks; it cannot be changed later.",
)
@click.option(
    "--quota",
    type=size(),
    default=0,
    metavar="SIZE",
    help="Refuse writes when the bucket would take more; 0 for no limit but the disk.",
)
@client_option
@output_options
def create(name: str, compression: str, quota: int, client: "Client", as_json: bool) -> None:
    """Make the empty bucket NAME."""
    made = client.admin.create_bucket(
        name, compression="" if compression == "none" else compression, quota_bytes=quota
    )
    text = f"created: {made.name}, version {made.version:016x}"
    print_result(as_json, _document(made), text)


@bucket.command("quota")
@click.argument("name")
@click.argument("quota", type=size(), metavar="SIZE")
@client_option
@output_options
def quota_command(name: str, quota: int, client: "Client", as_json: bool) -> None:
    """Set the SIZE that the bucket NAME may have, as 10GiB; 0 for no limit but the disk.

    What is there already stays. Beyond the quota writes are refused, but for those that only delete.
    """
    info = client.admin.set_bucket_quota(name, quota)
    limit = size_text(info.quota_bytes) if info.quota_bytes else "none"
    text = f"quota: {info.name}, {limit}; {size_text(info.used_bytes)} used"
    print_result(as_json, _document(info), text)


@bucket.command("drop")
@click.argument("name")
@click.option(
    "--version",
    type=Parsed("version", _parse_version),
    metavar="HEX",
    help="Drop it only if this is its version (16 hex digits, as 'list' shows).",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@client_option
@output_options
def drop(name: str, version: int | None, yes: bool, client: "Client", as_json: bool) -> None:
    """Remove the bucket NAME with all its data.

    Whoever follows it or writes to it is told that it is gone. Without a terminal, --yes is needed. The bucket "default" exists from the start: once
    dropped, it is made anew, empty, when the server is started the next time.
    """
    if not yes:
        version = _confirmed(client, name, version)
    dropped = client.admin.drop_bucket(name, version)
    text = f"{dropped:016x}"
    print_done(as_json, "dropped", name, f"version {text}", version=text)


def _confirmed(client: "Client", name: str, version: int | None) -> int:
    """Ask whether to drop the bucket that is there now, and return its version."""
    info = next((info for info in client.admin.buckets() if info.name == name), None)
    if info is None:
        raise BucketNotFoundError(
            f"there is no bucket {name!r}", hint="'upr-admin bucket list' shows them"
        )
    if version not in (None, info.version):
        raise BucketGoneError(
            f"bucket {name!r} has version {info.version:016x}, not {version:016x}"
        )
    confirm(
        "Drop it? Its data cannot be brought back",
        "drop the bucket",
        f"bucket {name!r}, version {info.version:016x}: {_contents(info)}",
    )
    return info.version


def _contents(info: "BucketInfo") -> str:
    if info.problem is not None:
        return f"damaged: {info.problem.message}"
    return f"{info.mutations} mutations, {size_text(info.used_bytes)}"


def _row(info: "BucketInfo") -> tuple[object, ...]:
    return (
        info.name,
        f"{info.version:016x}",
        info.compression or "none",
        info.mutations,
        size_text(info.used_bytes),
        size_text(info.quota_bytes) if info.quota_bytes else "-",
        info.problem.message if info.problem is not None else "-",
    )


def _document(info: "BucketInfo") -> dict[str, Any]:
    told = {"version": f"{info.version:016x}", "compression": info.compression or "none"}
    return asdict(info) | told


@click.command("purge")
@partitions_argument(metavar="[PARTITION ...]")
@click.option("--dry-run", is_flag=True, help="Change nothing, only say what would go.")
@client_options
@output_options
def purge(
    partitions: list[int] | None, dry_run: bool, client: "Client", bucket: str, as_json: bool
) -> None:
    """Drop deletions that are old enough and that everybody has passed; say who holds the others up.

    Merging does the same by itself now and then. A follower that stood below what was purged, and not at 0, has to
    begin again at 0. Held up by "newest" means: the row at a partition's high seqno always stays.
    """
    chosen = partitions or list(range(PARTITIONS))
    found: list[PartitionPurge] = []
    with closing(Progress("partitions", len(chosen))) as progress:
        for first in range(0, len(chosen), _AT_ONCE):
            part = chosen[first : first + _AT_ONCE]
            found += client.admin.purge(bucket, part, dry_run=dry_run)
            progress.update(first + len(part))
    rows = [[*(getattr(one, name) for name in _PURGE_COLUMNS), _holders(one)] for one in found]
    titles = [*_PURGE_COLUMNS, "held up by"]
    titles[3] = "would go" if dry_run else "purged"
    print_result(as_json, list(map(asdict, found)), columns(titles, rows))


def _holders(one: "PartitionPurge") -> str:
    if one.problem is not None:
        return str(one.problem)
    names = [f"{h.kind} {h.name} at {h.seqno}".replace("  ", " ") for h in one.holders]
    return ", ".join(names + [f"{one.more_holders} more"] * bool(one.more_holders))
