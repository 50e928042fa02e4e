"""``upr-backup list`` and ``upr-backup info``."""

import click

from upr_spark.backup.chain import Manifest, needed
from upr_spark.backup.commands.common import summary
from upr_spark.backup.documents import Json
from upr_spark.backup.output import (
    Command,
    columns,
    json_option,
    print_json,
    time_text,
    verbose_option,
)
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage


@click.command("list", cls=Command)
@json_option
@verbose_option
@click.pass_obj
def list_command(storage: Storage, as_json: bool) -> None:
    """Show all backups, oldest first."""
    chain = Repository.open(storage).chain()
    if as_json:
        print_json([summary(manifest) for manifest in chain])
        return
    rows = [
        (m.number, m.kind, time_text(m.cut_time), m.rows, m.file_bytes, len(m.rollbacks))
        for m in chain
    ]
    click.echo(columns(("id", "kind", "as of", "rows", "bytes", "rollbacks"), rows))


@click.command("info", cls=Command)
@click.argument("number", metavar="[ID]", type=click.IntRange(min=1), required=False)
@json_option
@verbose_option
@click.pass_obj
def info(storage: Storage, number: int | None, as_json: bool) -> None:
    """Show one backup, the newest unless ID says which."""
    repository = Repository.open(storage)
    chain = repository.chain()
    wanted = needed(chain, number or len(chain))
    manifest = wanted[-1]
    document = {
        "repository": repository.id,
        "bucket": repository.bucket,
        "bucket_version": repository.bucket_version,
        **summary(manifest),
        "needs": [m.number for m in wanted],
    }
    if as_json:
        document["rollback_list"] = [rollback._asdict() for rollback in manifest.rollbacks]
        document["partitions"] = [_partition(manifest, p) for p in manifest.entries]
        print_json(document)
        return
    document["needs"] = ", ".join(str(m.number) for m in wanted)
    click.echo(columns(("field", "value"), ((k, str(v)) for k, v in document.items())))
    if manifest.rollbacks:
        rows = [(r.partition, r.from_seqno, r.seqno, r.words) for r in manifest.rollbacks]
        click.echo("\n" + columns(("partition", "had", "kept", "why"), rows))


def _partition(manifest: Manifest, partition: int) -> Json:
    entry = manifest.entries[partition]
    failover_id = entry.position["failover_id"] if entry.position else None
    return {
        "partition": partition,
        "from": entry.start,
        "to": entry.end,
        "cut": entry.cut,
        "rows": entry.rows,
        "failover_id": failover_id,
    }
