"""``upr-cat``: follow changes, read and write keys, load mutations, and measure."""

import click

from upr import __version__
from upr.cli.cat_commands.bench import bench
from upr.cli.cat_commands.follow import follow
from upr.cli.cat_commands.keys import delete, dump, get, set_
from upr.cli.cat_commands.load import load
from upr_cli_kit.output import Group, add_examples


@click.group("upr-cat", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="upr-cat %(version)s")
def main() -> None:
    """Follow changes, read and write keys, load mutations, or measure a server."""


for command in (follow, get, set_, delete, dump, load, bench):
    main.add_command(command)
add_examples(
    main,
    {
        "": ("set user:1 Ada", "get user:1", "follow --from-now"),
        "follow": (
            "follow --until-now",
            "follow --position /var/lib/app/position --bucket orders",
            "follow --from-time '2h ago' --key-prefix user: -f '%o %k\\n'",
        ),
        "get": ("get user:1", "get user:1 --raw > value"),
        "set": ("set user:1 Ada", "set -- temperature -5", "set picture - < picture.png"),
        "delete": ("delete user:1",),
        "dump": ("dump > keys.jsonl", "dump --key-prefix user: --bucket orders"),
        "load": ("load jsonl keys.jsonl", "load git ."),
        "load jsonl": ("load jsonl keys.jsonl", "load jsonl - < keys.jsonl"),
        "load csv": ("load csv people.csv --key-field id",),
        "load parquet": ("load parquet people.parquet --key-field id",),
        "bench": ("bench", "bench --rows 1000 --bucket scratch --json"),
        "load git": ("load git .", "load git ~/src/project --bucket project"),
    },
)
