"""``upr-backup backup``."""

import click

from upr_spark.backup import exit_codes
from upr_spark.backup.commands.common import open_client, summary
from upr_spark.backup.options import Address
from upr_spark.backup.output import (
    Command,
    Progress,
    json_option,
    note,
    print_json,
    time_text,
    verbose_option,
)
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage

_SHOWN_ROLLBACKS = 5


@click.command("backup", cls=Command)
@click.option("--full", is_flag=True, help="Read everything anew.")
@click.option("--target", type=Address(), envvar="UPR_TARGET", help="HOST:PORT; else as with init.")
@json_option
@verbose_option
@click.pass_obj
def backup(storage: Storage, full: bool, target: str | None, as_json: bool) -> int:
    """Take a backup: of what is new, or of everything when there is none yet.

    An interrupted run is gone on with while its cut holds, which is 15 minutes.
    """
    from upr_spark.backup.lock import Lock
    from upr_spark.backup.run import Run
    from upr_spark.backup.server import ServerSource

    repository = Repository.open(storage)
    storage.sweep()
    progress = Progress()
    read = [0, 0, 0]

    lock = Lock(storage)

    def rows(count: int) -> None:
        lock.keep()
        read[0] += count
        progress.show(f"{read[0]} rows read, {read[1]} of {read[2]} groups done")

    def groups(done: int, total: int) -> None:
        read[1:] = [done, total]

    with lock, open_client(target or repository.target) as client:
        source = ServerSource(client.bucket(repository.bucket), repository, rows)
        run = Run(repository, source, lock, full, say=note, progress=groups)
        try:
            manifest = run.backup()
        finally:
            progress.close()
    if as_json:
        print_json(summary(manifest))
    else:
        click.echo(
            f"backup {manifest.number}: {manifest.kind}, {manifest.rows} rows, {manifest.file_bytes} bytes, "
            f"as of {time_text(manifest.cut_time)}"
        )
    if not manifest.rollbacks:
        return exit_codes.OK
    for rollback in manifest.rollbacks[:_SHOWN_ROLLBACKS]:
        note(
            f"warning: partition {rollback.partition} was rolled back from {rollback.from_seqno} to "
            f"{rollback.seqno}: {rollback.words}"
        )
    if len(manifest.rollbacks) > _SHOWN_ROLLBACKS:
        note(f"warning: {len(manifest.rollbacks)} partitions in all were, see 'info'")
    return exit_codes.WARNINGS
