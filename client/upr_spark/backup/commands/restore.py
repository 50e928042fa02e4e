"""``upr-backup restore``."""

from typing import Any

import click

from upr_spark.backup import exit_codes
from upr_spark.backup.chain import needed
from upr_spark.backup.commands.common import number_at, open_client
from upr_spark.backup.errors import NotEmptyError, RepositoryDamagedError
from upr_spark.backup.options import Address, KeyPrefix, PartitionSet, RestorePoint
from upr_spark.backup.output import (
    Command,
    CommandError,
    Progress,
    json_option,
    print_json,
    verbose_option,
)
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage


@click.command("restore", cls=Command)
@click.option(
    "--target", type=Address(), required=True, envvar="UPR_TARGET", help="HOST:PORT to write to."
)
@click.option("--bucket", help="The bucket to write into; else of the name that was backed up.")
@click.option("--at", type=RestorePoint(), help="A backup's ID, or a time: the last one before it.")
@click.option("--partitions", type=PartitionSet(), help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KeyPrefix(), default=b"", help="Only keys that begin with it.")
@click.option("--into-non-empty", is_flag=True, help="Write also when the bucket holds data.")
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
    as_json: bool,
) -> None:
    """Write the state at a backup, the newest unless --at says which, into an empty bucket."""
    from upr_spark.backup.restore import Restore
    from upr_spark.backup.verify import check_files

    repository = Repository.open(storage)
    damage: list[str] = []
    chain = repository.chain(damage.append)
    number = number_at(chain, at)
    if damage and (not isinstance(at, int) or number > len(chain)):
        raise RepositoryDamagedError(
            damage[0], hint=f"backups 1 to {len(chain)} can be restored, with --at ID"
        )
    wanted = needed(chain, number)
    check_files(storage, {file for manifest in wanted for file in manifest.files})
    progress = Progress()
    with open_client(target) as client:
        work = Restore(
            storage,
            client.bucket(bucket or repository.bucket),
            into_non_empty,
            lambda done, total: progress.show(f"{done} of {total} partitions restored"),
        )
        try:
            done = work.run(chain, number, partitions, key_prefix)
        except NotEmptyError as error:
            raise CommandError(str(error), exit_codes.REFUSED) from error
        finally:
            progress.close()
    if as_json:
        print_json({"id": number, **done._asdict()})
    else:
        click.echo(f"restored backup {number}: {done.keys} keys, {done.data_bytes} bytes")
