"""``upr-backup init``."""

import time

import click

from upr_spark.backup.commands.common import open_client
from upr_spark.backup.errors import BackupNotFoundError, RepositoryError
from upr_spark.backup.options import Address
from upr_spark.backup.output import Command, note, verbose_option
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage, check_storage


@click.command("init", cls=Command)
@click.option(
    "--target", type=Address(), required=True, envvar="UPR_TARGET", help="HOST:PORT of the server."
)
@click.option("--bucket", default="default", show_default=True, help="The bucket's name.")
@verbose_option
@click.pass_obj
def init(storage: Storage, target: str, bucket: str) -> None:
    """Make a repository for a bucket."""
    if storage.names("chain/"):
        raise RepositoryError(f"there is a repository in {storage.location} already")
    with open_client(target) as client:
        found = [info for info in client.buckets() if info.name == bucket]
    if not found:
        raise BackupNotFoundError(
            f"there is no bucket {bucket!r} at {target}", hint="upr-admin bucket list shows all"
        )
    check_storage(storage)
    made = Repository.create(
        storage, bucket, found[0].version, target, created=round(time.time() * 1e6)
    )
    note(f"made repository {made.id} for bucket {bucket!r} in {storage.location}")
