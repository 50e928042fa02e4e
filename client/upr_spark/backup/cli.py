"""``upr-backup``: take, look at, check and restore incremental backups of a bucket."""

from importlib.metadata import PackageNotFoundError, version

import click

from upr_spark.backup.commands import (
    backup,
    expire,
    export,
    init,
    listing,
    merge,
    prune,
    restore,
    verify,
)
from upr_spark.backup.output import Group, verbose_option
from upr_spark.backup.storage import open_storage


def _version() -> str:
    try:
        return version("upr-stream")
    except PackageNotFoundError:
        return "unknown"


@click.group("upr-backup", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="upr-backup %(version)s")
@click.argument("repository")
@verbose_option
@click.pass_context
def main(ctx: click.Context, repository: str) -> None:
    """Take, look at, check and restore incremental backups of a bucket.

    REPOSITORY is a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; credentials and
    endpoint of an object store come from the environment or the machine's role.
    """
    ctx.obj = open_storage(repository)


main.add_command(init.init)
main.add_command(backup.backup)
main.add_command(listing.list_command)
main.add_command(listing.info)
main.add_command(verify.verify_command)
main.add_command(restore.restore)
main.add_command(export.export)
main.add_command(merge.merge)
main.add_command(expire.expire)
main.add_command(prune.prune)
