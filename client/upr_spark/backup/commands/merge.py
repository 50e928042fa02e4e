"""``upr-backup merge``."""

import time

import click

from upr_spark.backup.commands.common import keep_options, keep_or_none, summary
from upr_spark.backup.output import (
    Command,
    Progress,
    json_option,
    print_json,
    verbose_option,
)
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage


@click.command("merge", cls=Command)
@click.option("--to", type=click.IntRange(min=1), metavar="ID", help="Fold everything up to this.")
@keep_options
@json_option
@verbose_option
@click.pass_obj
def merge(
    storage: Storage,
    to: int | None,
    keep_last: int | None,
    keep_within: int | None,
    as_json: bool,
) -> None:
    """Fold all backups up to one into a base, from which it and later ones are restored faster.

    Without --to it is the newest possible one, but for the newest two; with --keep-last or --keep-within the newest
    possible one that lets 'expire' with the same options drop what is before. Nothing is removed or replaced.
    """
    from upr_spark.backup.fold import FileFold
    from upr_spark.backup.lock import Lock
    from upr_spark.backup.merge import Merge, chosen

    keep = keep_or_none(keep_last, keep_within)
    if to is not None and keep is not None:
        raise click.UsageError("--to does not go together with --keep-last and --keep-within")
    repository = Repository.open(storage)
    storage.sweep()
    progress = Progress()
    with Lock(storage) as lock:
        chain = repository.chain()
        number = chosen(chain, to, keep, round(time.time() * 1e6))
        base = None
        if number is not None:
            work = Merge(
                repository,
                FileFold(storage, lock.keep),
                lock,
                lambda done, total: progress.show(f"{done} of {total} partitions merged"),
            )
            try:
                base = work.merge(chain, number)
            finally:
                progress.close()
    if as_json:
        print_json({"merged": None if base is None else summary(base)})
    elif base is not None:
        click.echo(f"merged backup {number}: {base.rows} rows, {base.file_bytes} bytes")
    else:
        click.echo("there is nothing to merge" if to is None else f"backup {to} is a base already")
