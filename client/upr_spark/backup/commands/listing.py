"""``upr-backup list`` and ``upr-backup info``."""

import click

from upr_spark.backup.chain import Chain, Link
from upr_spark.backup.commands.common import summary
from upr_spark.backup.documents import Json
from upr_spark.backup.manifest import Manifest
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
    """Show all backups that have not expired, oldest first."""
    chain = Repository.open(storage).chain()
    if as_json:
        print_json([_listed(chain, link) for link in chain.links])
        return
    rows = [
        (
            link.number,
            link.kind + (", merged" if link.number in chain.merged else ""),
            time_text(link.cut_time),
            link.rows,
            link.file_bytes,
            link.rollbacks,
        )
        for link in chain.links
    ]
    click.echo(columns(("id", "kind", "as of", "rows", "bytes", "rollbacks"), rows))


def _listed(chain: Chain, link: Link) -> Json:
    base = chain.merged.get(link.number)
    merged = None if base is None else {"rows": base.rows, "bytes": base.file_bytes}
    return {**summary(link), "merged": merged}


@click.command("info", cls=Command)
@click.argument("number", metavar="[ID]", type=click.IntRange(min=1), required=False)
@json_option
@verbose_option
@click.pass_obj
def info(storage: Storage, number: int | None, as_json: bool) -> None:
    """Show one backup, the newest unless ID says which."""
    repository = Repository.open(storage)
    chain = repository.chain()
    manifest = chain.by_number(number or chain.last)
    base = chain.base(manifest.number)
    document = {
        "repository": repository.id,
        "bucket": repository.bucket,
        "bucket_version": repository.bucket_version,
        **_listed(chain, chain.link(manifest.number)),
        "base": f"{base.kind} {base.number}",
        "needs": [*range(base.number, manifest.number + 1)],
    }
    if as_json:
        document["rollback_list"] = [rollback._asdict() for rollback in manifest.rollbacks]
        document["partitions"] = [_partition(manifest, p) for p in manifest.entries]
        print_json(document)
        return
    document["merged"] = "no" if manifest.number not in chain.merged else "yes"
    alone = base.number == manifest.number
    document["needs"] = str(base.number) if alone else f"{base.number} to {manifest.number}"
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
