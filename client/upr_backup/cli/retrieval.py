"""Commands of ``upr-backup`` that bring a backup back: ``restore``, ``export`` and ``find``."""

import sys
from contextlib import closing
from functools import partial
from typing import Any

import click

from upr_backup.cli.shared import (
    AT_HELP,
    KEY,
    RESTORE_POINT,
    Far,
    open_repository,
    progress_option,
    told_left_out,
)
from upr_backup.errors import BackupNotFoundError
from upr_backup.repository import Storage
from upr_backup.repository.documents import time_text
from upr_cli_kit import exit_codes
from upr_cli_kit.options import PARTITION_SET, TARGET, login_options, open_client, required_target
from upr_cli_kit.output import columns, note, output_options, print_json
from upr_protocol.partitioning import partition_of

_VERIFIED = {
    "equal": "read back, and equal",
    "contained": "read back, and all there",
    "not verified": "not read back",
}


@click.command("restore")
@click.option("--target", type=TARGET, envvar="UPR_TARGET", help="HOST:PORT to write to.")
@login_options
@click.option("--bucket", help="The bucket to write into; else of the name that was backed up.")
@click.option("--create-bucket", is_flag=True, help="Make the bucket when it is not there.")
@click.option("--at", type=RESTORE_POINT, help=AT_HELP)
@click.option("--partitions", type=PARTITION_SET, help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KEY, default=b"", help="Only keys that begin with it.")
@click.option("--into-non-empty", is_flag=True, help="Write also when the bucket holds data.")
@click.option("--no-verify", is_flag=True, help="Do not read the bucket back to compare.")
@click.option(
    "--dry-run", is_flag=True, help="Read and check all, say what would be written, write nothing."
)
@progress_option
@output_options
@click.pass_obj
def restore(
    storage: Storage,
    target: str | None,
    bucket: str | None,
    create_bucket: bool,
    at: Any,
    partitions: list[int] | None,
    key_prefix: bytes,
    into_non_empty: bool,
    no_verify: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the state at a backup, the newest unless --at says which, into an empty bucket.

    Then the bucket is read back and compared, key by key. One that was interrupted is gone on with when it is started
    with the same options.
    """
    from upr_backup.restore import Restore
    from upr_backup.rows import open_point
    from upr_backup.source import go_to_active

    point = open_point(open_repository(storage), at, partitions)
    name = point.repository.bucket if bucket is None else bucket
    with open_client(required_target(target)) as client, closing(Far()) as far:
        go_to_active(client, name)
        is_there = not create_bucket or any(one.name == name for one in client.admin.buckets())
        if not is_there and not dry_run:
            client.admin.create_bucket(name)
            note(f"created: {name}")
        work = Restore(
            point,
            client,
            client.bucket(name),
            key_prefix,
            into_non_empty,
            verify=not no_verify,
            say=note,
            progress=lambda what, done, total: far.show(f"partitions {what}", done, total),
        )
        done = work.look(is_there) if dry_run else work.run()
    number, left_out = point.manifest.number, told_left_out(point)
    if as_json:
        document = {"id": number, **done.written._asdict(), "dry_run": dry_run}
        document |= {"resumed": done.resumed, "verified": done.verified, "left_out": left_out}
        print_json(document)
    elif dry_run:
        click.echo(
            f"would restore backup {number} into {name!r}: {done.written.keys} keys, "
            f"{done.written.data_bytes} bytes; nothing was written"
        )
    else:
        click.echo(
            f"restored: backup {number}, {done.written.keys} keys, {done.written.data_bytes} bytes; "
            f"{_VERIFIED[done.verified]}"
        )


@click.command("export")
@click.option(
    "--format", "kind", type=click.Choice(["parquet", "delta"]), required=True, help="Of the table."
)
@click.option("--to", required=True, metavar="PATH|URL", help="Where it is made.")
@click.option("--at", type=RESTORE_POINT, help=AT_HELP)
@click.option("--partitions", type=PARTITION_SET, help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KEY, default=b"", help="Only keys that begin with it.")
@click.option("--with-deletes", is_flag=True, help="Also deleted keys; they have no value.")
@click.option("--utf8", is_flag=True, help="Keys and values as strings, which all must be UTF-8.")
@click.option("--overwrite", is_flag=True, help="Replace a Delta table that is there.")
@progress_option
@output_options
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
    from upr_backup.export import Export, to_delta, to_parquet
    from upr_backup.rows import open_point

    point = open_point(open_repository(storage), at, partitions)
    with closing(Far()) as far:
        progress = partial(far.show, "partitions written")
        work = Export(point, key_prefix, with_deletes, utf8, progress)
        files = to_parquet(work, to) if kind == "parquet" else None
        if kind == "delta":
            to_delta(work, to, overwrite)
    number, left_out = point.manifest.number, told_left_out(point)
    if as_json:
        document = {"id": number, "format": kind, "to": to, "rows": work.rows}
        document |= {"data_bytes": work.data_bytes, "files": files, "left_out": left_out}
        print_json(document)
    else:
        click.echo(f"exported: backup {number} to {to}, {work.rows} keys, {work.data_bytes} bytes")


@click.command("find")
@click.argument("key", type=KEY)
@click.option("--at", type=RESTORE_POINT, help=f"Print the value there, as it is. {AT_HELP}")
@progress_option
@output_options
@click.pass_obj
def find(storage: Storage, key: bytes, at: Any, as_json: bool) -> int:
    """Show what KEY is at every backup, or with --at its value at one."""
    from upr_backup.rows import open_point, shown, versions

    if not key:
        raise click.UsageError("the key is empty; it must have 1 to 4096 bytes")
    repository = open_repository(storage)
    if at is not None:
        if as_json:
            raise click.UsageError(
                "--at prints the value alone; it does not go together with --json"
            )
        point = open_point(repository, at, [partition_of(key)])
        told_left_out(point)
        found = point.state([partition_of(key)], key).to_pylist()
        value = next((row["value"] for row in found if row["key"] == key), None)
        if value is None:
            raise BackupNotFoundError(f"backup {point.manifest.number} has no key {shown(key)}")
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
        return exit_codes.OK
    damage: list[str] = []
    with closing(Far()) as far:
        chain = repository.chain(damage.append, indexed=True)
        progress = partial(far.show, "backups looked at")
        told = list(versions(repository.storage, chain, key, progress))
    for words in damage:
        note(f"damage: {words}")
    status = exit_codes.DAMAGED if damage else exit_codes.OK
    if not damage and all(version.op == "absent" for version in told):
        raise BackupNotFoundError(f"no backup has the key {shown(key)}")
    if as_json:
        print_json(
            [
                {**one._asdict(), "as_of": time_text(one.as_of), "time": _when(one.time)}
                for one in told
            ]
        )
        return status
    rows = [
        (
            str(one.first) if one.first == one.last else f"{one.first} to {one.last}",
            time_text(one.as_of),
            one.op,
            "" if one.seqno is None else str(one.seqno),
            "" if one.bytes is None else str(one.bytes),
            _when(one.time) or "",
        )
        for one in told
    ]
    click.echo(columns(("backups", "as of", "is", "seqno", "bytes", "written"), rows))
    return status


def _when(micros: int | None) -> str | None:
    return None if micros is None else time_text(micros)
