"""``upr-cat``: follow changes, read and write keys, load mutations, and measure."""

import click

from upr import __version__
from upr.cli.bench import bench
from upr.cli.follow import follow
from upr.cli.keys import delete, dump, get, set_
from upr.cli.load import load
from upr_cli_kit.output import Group, verbose_option


@click.group("upr-cat", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="upr-cat %(version)s")
@verbose_option
def main() -> None:
    """Follow changes, read and write keys, load mutations, or measure a server."""


for command in (follow, get, set_, delete, dump, load, bench):
    main.add_command(command)
