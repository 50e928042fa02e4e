"""``upr-backup export``."""

from typing import Any

import click

from upr_spark.backup.options import KeyPrefix, PartitionSet, RestorePoint
from upr_spark.backup.output import Command, Progress, json_option, print_json, verbose_option
from upr_spark.backup.storage import Storage


@click.command("export", cls=Command)
@click.option(
    "--format", "kind", type=click.Choice(["parquet", "delta"]), required=True, help="Of the table."
)
@click.option("--to", required=True, metavar="PATH|URL", help="Where it is made.")
@click.option("--at", type=RestorePoint(), help="A backup's ID, or a time: the last one before it.")
@click.option("--partitions", type=PartitionSet(), help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KeyPrefix(), default=b"", help="Only keys that begin with it.")
@click.option("--with-deletes", is_flag=True, help="Also deleted keys; they have no value.")
@click.option("--utf8", is_flag=True, help="Keys and values as strings, which all must be UTF-8.")
@click.option("--overwrite", is_flag=True, help="Replace a Delta table that is there.")
@json_option
@verbose_option
@click.pass_obj
def export(
    storage: Storage,
    kind: str,
    to: str,
    at: Any,
    partitions: list[int] | None,
    key_prefix: bytes,
    with_deletes: bool,
    utf8: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the state at a backup, the newest unless --at says which, as a table: key, value, partition, seqno, time."""
    if overwrite and kind != "delta":
        raise click.UsageError("--overwrite is for --format delta; give a place that is empty")
    from upr_spark.backup.export import Export, to_delta, to_parquet
    from upr_spark.backup.point import open_point

    point = open_point(storage, at, partitions)
    progress = Progress()
    work = Export(
        point,
        key_prefix,
        with_deletes,
        utf8,
        lambda done, total: progress.show(f"{done} of {total} partitions written"),
    )
    try:
        done = to_parquet(work, to) if kind == "parquet" else to_delta(work, to, overwrite)
    finally:
        progress.close()
    number = point.manifest.number
    if as_json:
        print_json({"id": number, "format": kind, "to": to, **done._asdict()})
    else:
        click.echo(f"exported backup {number} to {to}: {done.rows} keys, {done.data_bytes} bytes")
