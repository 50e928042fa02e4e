"""``upr-server``: run a server on a data directory."""

import asyncio
import sys
from pathlib import Path

import click

from upr import __version__
from upr.cli.options import ADDRESS, DEFAULT_TARGET, FiniteRange
from upr.cli.output import Command, verbose_option
from upr.config import FLUSH_SECONDS, TAIL_BYTES, ServerConfig
from upr_protocol.limits import (
    HEARTBEAT_SECONDS,
    HEARTBEAT_SECONDS_MAX,
    HEARTBEAT_SECONDS_MIN,
    PURGE_HOLD_SECONDS,
    TOMBSTONE_SECONDS,
)


def _print_versions(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from upr.storage.directory import FORMAT

        click.echo(f"upr-server {__version__}, wire upr.v1, disk format {FORMAT}")
        ctx.exit()


@click.command(
    "upr-server",
    cls=Command,
    context_settings={
        "auto_envvar_prefix": "UPR_SERVER",
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    },
)
@click.option(
    "--data",
    type=click.Path(file_okay=True, path_type=Path),
    required=True,
    help="The data directory; made when it is not there.",
)
@click.option(
    "--listen",
    type=ADDRESS,
    default=DEFAULT_TARGET,
    help="HOST:PORT to listen on; port 0 takes a free one.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Gets the bound address, when the server is ready.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow an address that is not loopback, though nothing is encrypted and anyone may write.",
)
@click.option(
    "--tail-bytes",
    type=click.IntRange(min=1),
    default=TAIL_BYTES,
    help="What is not in the store yet may take this much memory; then writers wait for a flush.",
)
@click.option(
    "--flush-seconds",
    type=FiniteRange(min=0, min_open=True),
    default=FLUSH_SECONDS,
    help="Flush to the store when the tail's oldest commit is this old.",
)
@click.option(
    "--heartbeat-seconds",
    type=FiniteRange(min=HEARTBEAT_SECONDS_MIN, max=HEARTBEAT_SECONDS_MAX),
    default=HEARTBEAT_SECONDS,
    help="Interval of heartbeats to idle consumers, where they ask for none.",
)
@click.option(
    "--tombstone-age",
    type=FiniteRange(min=0),
    default=TOMBSTONE_SECONDS,
    help="Seconds after which a deletion may be purged, when everybody has passed it.",
)
@click.option(
    "--purge-hold",
    type=FiniteRange(min=0),
    default=PURGE_HOLD_SECONDS,
    help="Seconds after which a deletion is purged whoever has not passed it; only a cut holds it longer.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default=None,
    help="How the log on stderr is written. [default: text on a terminal, else json]",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Print the versions of the package, the wire and the disk format.",
)
@verbose_option
def main(
    data: Path,
    listen: str,
    ready_file: Path | None,
    insecure: bool,
    tail_bytes: int,
    flush_seconds: float,
    heartbeat_seconds: float,
    tombstone_age: float,
    purge_hold: float,
    log_format: str | None,
) -> int:
    """Run a server on a data directory, until SIGTERM or Ctrl-C.

    Every option can be given in the environment too, as UPR_SERVER_DATA and so on.
    """
    # grpc, lmdb and pyarrow cost a third of a second, which --help and a wrong option should not pay.
    from upr.service.server import serve

    config = ServerConfig(
        data=data,
        listen=listen,
        ready_file=ready_file,
        insecure=insecure,
        log_format=log_format or ("text" if sys.stderr.isatty() else "json"),
        tail_bytes=tail_bytes,
        flush_seconds=flush_seconds,
        heartbeat_seconds=heartbeat_seconds,
        tombstone_seconds=tombstone_age,
        purge_hold_seconds=purge_hold,
    )
    return asyncio.run(serve(config))
