"""``upr-backup``: take, look at, check and restore incremental backups of a bucket."""

from importlib.metadata import PackageNotFoundError, version

import click

from upr_spark.backup.commands import backup, init, listing, restore, verify
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
    """Take, look at, check and restore incremental backups of a bucket. REPOSITORY is a folder."""
    ctx.obj = open_storage(repository)


main.add_command(init.init)
main.add_command(backup.backup)
main.add_command(listing.list_command)
main.add_command(listing.info)
main.add_command(verify.verify_command)
main.add_command(restore.restore)
