"""``upr-backup prune``."""

import time

import click

from upr_spark.backup.options import Span
from upr_spark.backup.output import (
    Command,
    Progress,
    json_option,
    note,
    print_json,
    verbose_option,
)
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage


@click.command("prune", cls=Command)
@click.option(
    "--grace",
    type=Span(),
    default="24h",
    show_default=True,
    help="How long what expired, and what killed runs left, stays.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@verbose_option
@click.pass_obj
def prune(storage: Storage, grace: int, dry_run: bool, as_json: bool) -> None:
    """Remove from the storage what has expired, and what killed runs and merges left.

    After an expiry that left a merged base it takes one more backup before anything of that can be removed.
    """
    from upr_spark.backup.lock import Lock
    from upr_spark.backup.prune import plan
    from upr_spark.backup.prune import prune as remove

    repository = Repository.open(storage)
    storage.sweep()
    progress = Progress()
    with Lock(storage) as lock:
        made = plan(repository, repository.chain(), grace, round(time.time() * 1e6))
        if not dry_run:
            try:
                for done, _ in enumerate(remove(repository, made), 1):
                    lock.keep()
                    progress.show(f"{done} of {len(made.doomed)} objects removed")
            finally:
                progress.close()
    if made.waiting:
        note(
            f"what is before backup {made.waiting} goes after one more backup: "
            "a run that began before the expiry may still rest on it"
        )
    totals = made.totals()
    if as_json:
        listed = [one._asdict() for one in made.doomed] if dry_run else []
        print_json({"dry_run": dry_run, "first": made.first or None, **totals, "objects": listed})
        return
    if dry_run:
        for one in made.doomed:
            click.echo(one.name)
    words = ", ".join(
        f"{total['objects']} {what.replace('_', ' ')} of {total['bytes']} bytes"
        for what, total in totals.items()
        if total["objects"]
    )
    said = "would remove" if dry_run else "removed"
    note(f"{said} {words}" if words else "there is nothing to remove")
