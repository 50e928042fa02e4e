"""``upr-admin purge``: drop old tombstones, or see why they stay."""

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from upr_cli_kit.options import PARTITION_SET, client_options, one_list
from upr_cli_kit.output import Progress, columns, output_options, print_json, problem_document
from upr_protocol.limits import PARTITIONS

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.admin import PartitionPurge


_COLUMNS = ("partition", "tombstones", "old_tombstones", "purged", "purge_seqno")
_AT_ONCE = 32


@click.command("purge")
@click.argument("partitions", nargs=-1, type=PARTITION_SET, metavar="[PARTITION ...]")
@click.option("--dry-run", is_flag=True, help="Change nothing, only say what would go.")
@client_options
@output_options
def purge(
    partitions: tuple[list[int], ...], dry_run: bool, client: "Client", bucket: str, as_json: bool
) -> None:
    """Drop deletions that are old enough and that everybody has passed; say who holds the others up.

    Merging does the same by itself now and then. A follower that stood below what was purged, and not at 0, has to
    begin again at 0. Held up by "newest" means: the row at a partition's high seqno always stays.
    """
    chosen = one_list(partitions) or list(range(PARTITIONS))
    found: list[PartitionPurge] = []
    with closing(Progress("partitions", len(chosen))) as progress:
        for first in range(0, len(chosen), _AT_ONCE):
            part = chosen[first : first + _AT_ONCE]
            found += client.admin.purge(bucket, part, dry_run=dry_run)
            progress.update(first + len(part))
    if as_json:
        print_json([_document(one) for one in found])
        return
    rows = [[*(getattr(one, name) for name in _COLUMNS), _holders(one)] for one in found]
    titles = [*_COLUMNS, "held up by"]
    titles[3] = "would go" if dry_run else "purged"
    click.echo(columns(titles, rows))


def _holders(one: "PartitionPurge") -> str:
    if one.problem is not None:
        return str(one.problem)
    names = [f"{h.kind} {h.name} at {h.seqno}".replace("  ", " ") for h in one.holders]
    return ", ".join(names + [f"{one.more_holders} more"] * bool(one.more_holders))


def _document(one: "PartitionPurge") -> dict[str, Any]:
    document = asdict(one)
    document["problem"] = problem_document(one.problem)
    return document
