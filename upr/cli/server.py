"""``upr-server``: run a server on a data directory."""

import gc
import os
from importlib.metadata import version
from typing import Any

import click

from upr import __version__
from upr.cli.settings import PREFIX, config_lines, config_of, server_options
from upr_cli_kit.output import Command, add_examples, verbose_option


def _print_versions(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from upr.storage import directory, journal
        from upr_protocol.wire.v1 import admin_service_pb2

        click.echo(
            f"upr-server {__version__}, wire {admin_service_pb2.DESCRIPTOR.package}, "
            f"disk format {directory.FORMAT}, journal format {journal.FORMAT}"
        )
        ctx.exit()


def _set_up_grpc() -> None:
    """Choose how gRPC works in this process, before it is loaded."""
    # Else each refusal of its own is a line on stderr, as often as a client wants.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Since 1.80 a message goes through a pool of threads: without it a lone write takes a twelfth less time and CPU. A
    # later version may not know these names any more, and says so on stderr.
    if (1, 80) <= tuple(map(int, version("grpcio").split(".")[:2])) <= (1, 85):
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


@click.command(
    "upr-server",
    cls=Command,
    context_settings={
        "auto_envvar_prefix": PREFIX,
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    },
)
@server_options
@click.option(
    "--print-config",
    is_flag=True,
    allow_from_autoenv=False,
    help="Print all settings and where each comes from, as a file for --config, and end.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    allow_from_autoenv=False,
    expose_value=False,
    callback=_print_versions,
    help="Print the versions of the package, the wire and the formats on disk.",
)
@verbose_option
@click.pass_context
def main(ctx: click.Context, /, print_config: bool, **values: Any) -> int:
    """Run a server on a data directory, until SIGTERM or Ctrl-C.

    The settings can be given in the environment too, as UPR_SERVER_DATA and so on, and in the file of --config.
    """
    config = config_of(values)
    if print_config:
        for line in config_lines(ctx, config):
            click.echo(line)
        return 0
    _set_up_grpc()
    # Looking for garbage among what is imported finds none, and takes a tenth of the start.
    gc.disable()
    # grpc, lmdb and pyarrow cost a third of a second, which --help and a wrong option should not pay.
    import uvloop

    from upr.cluster.keeper import replicate
    from upr.service.server import serve

    gc.enable()
    return uvloop.run(serve(config, replicate))


add_examples(
    main,
    {
        "": (
            "--data /var/lib/upr",
            "--data /var/lib/upr --listen 127.0.0.1:7711 --http 127.0.0.1:9711",
            "--data /var/lib/replica --listen 127.0.0.1:7712 --replicate-from 127.0.0.1:7711",
            "--data /var/lib/upr --print-config > server.toml",
        )
    },
)
