"""``upr-backup restore``."""

from typing import Any

import click

from upr_spark.backup.commands.common import open_client
from upr_spark.backup.options import Address, KeyPrefix, PartitionSet, RestorePoint
from upr_spark.backup.output import (
    Command,
    Progress,
    json_option,
    note,
    print_json,
    verbose_option,
)
from upr_spark.backup.storage import Storage

_VERIFIED = {
    "equal": "read back, and equal",
    "contained": "read back, and all there",
    "not verified": "not read back",
}


@click.command("restore", cls=Command)
@click.option(
    "--target", type=Address(), required=True, envvar="UPR_TARGET", help="HOST:PORT to write to."
)
@click.option("--bucket", help="The bucket to write into; else of the name that was backed up.")
@click.option("--at", type=RestorePoint(), help="A backup's ID, or a time: the last one before it.")
@click.option("--partitions", type=PartitionSet(), help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KeyPrefix(), default=b"", help="Only keys that begin with it.")
@click.option("--into-non-empty", is_flag=True, help="Write also when the bucket holds data.")
@click.option("--no-verify", is_flag=True, help="Do not read the bucket back to compare.")
@json_option
@verbose_option
@click.pass_obj
def restore(
    storage: Storage,
    target: str,
    bucket: str | None,
    at: Any,
    partitions: list[int] | None,
    key_prefix: bytes,
    into_non_empty: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Write the state at a backup, the newest unless --at says which, into an empty bucket.

    Then the bucket is read back and compared, key by key. One that was interrupted is gone on with when it is started
    with the same options.
    """
    from upr_spark.backup.point import open_point
    from upr_spark.backup.restore import Restore

    point = open_point(storage, at, partitions)
    progress = Progress()
    with open_client(target) as client:
        work = Restore(
            point,
            client.bucket(point.repository.bucket if bucket is None else bucket),
            key_prefix,
            into_non_empty,
            verify=not no_verify,
            say=note,
            progress=lambda what, done, total: progress.show(
                f"{done} of {total} partitions {what}"
            ),
        )
        try:
            done = work.run()
        finally:
            progress.close()
    number = point.manifest.number
    if as_json:
        document = {"id": number, **done.written._asdict()}
        print_json({**document, "resumed": done.resumed, "verified": done.verified})
    else:
        click.echo(
            f"restored backup {number}: {done.written.keys} keys, {done.written.data_bytes} bytes; "
            f"{_VERIFIED[done.verified]}"
        )
