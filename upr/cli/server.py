"""``upr-server``: run a server on a data directory."""

import asyncio
import os
import sys
from pathlib import Path

import click

from upr import __version__
from upr.config import FLUSH_SECONDS, TAIL_BYTES, ServerConfig
from upr_cli_kit.options import ADDRESS, DEFAULT_TARGET, TARGET, DirectoryPath, FiniteRange
from upr_cli_kit.output import Command, verbose_option
from upr_protocol.limits import (
    CLOCK_JUMP_SECONDS,
    CONSUMER_SECONDS,
    FAILOVER_LOG_MAX,
    FAILOVER_LOG_MIN,
    FAILOVER_LOG_RECORDS,
    HEARTBEAT_SECONDS,
    HEARTBEAT_SECONDS_MAX,
    HEARTBEAT_SECONDS_MIN,
    PURGE_HOLD_SECONDS,
    READER_SECONDS,
    TOMBSTONE_SECONDS,
    VALUE_BYTES_MAX,
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
    type=DirectoryPath(),
    required=True,
    help="The data directory; made when it is not there.",
)
@click.option(
    "--data-moved",
    is_flag=True,
    help="For one start after the data directory was copied: nothing was written to the original after its clean stop.",
)
@click.option(
    "--require-data",
    is_flag=True,
    help="Refuse to start unless the data directory is there, with a bucket in it: its volume may not be mounted.",
)
@click.option(
    "--listen",
    type=ADDRESS,
    default=DEFAULT_TARGET,
    help="HOST:PORT to listen on; port 0 takes a free one.",
)
@click.option(
    "--http",
    type=ADDRESS,
    help="HOST:PORT for a page in the browser, /metrics (Prometheus), /healthz and /readyz; port 0 takes a free one, which the log tells.",
)
@click.option(
    "--text",
    type=ADDRESS,
    help="HOST:PORT to serve changes as lines on, for netcat and small tools; port 0 takes a free one. [default: none]",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Gets the bound address, when the server is ready.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow an address that is not loopback without TLS and identities: anyone may write.",
)
@click.option(
    "--tls-cert",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file of the server's certificate, with those between it and its authority. Read again when it changes.",
)
@click.option(
    "--tls-key", type=click.Path(dir_okay=False, path_type=Path), help="PEM file of its key."
)
@click.option(
    "--tls-client-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file of authorities: every client must show a certificate of one of them.",
)
@click.option(
    "--tokens",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of identities with their roles, as 'upr-admin token' writes it. Read again when it changes.",
)
@click.option(
    "--open-admin",
    is_flag=True,
    help="Without identities, let anyone who can connect drop a bucket, forget or reset a consumer, and say who is active in the set.",
)
@click.option(
    "--tail-bytes",
    type=click.IntRange(min=1),
    default=TAIL_BYTES,
    help="What is not in the store yet may take this much memory; then writers wait for a flush.",
)
@click.option(
    "--max-value-bytes",
    type=click.IntRange(0, VALUE_BYTES_MAX),
    default=VALUE_BYTES_MAX,
    help="Refuse writes with a larger value.",
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
    "--reader-timeout",
    type=FiniteRange(min=0.1),
    default=READER_SECONDS,
    help="Seconds after which a consumer is ended whose connection takes nothing while something waits.",
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
    "--consumer-expiry",
    type=FiniteRange(min=1),
    default=CONSUMER_SECONDS,
    help="Seconds after which a registered consumer is forgotten that nobody has used.",
)
@click.option(
    "--failover-log-records",
    type=click.IntRange(min=FAILOVER_LOG_MIN, max=FAILOVER_LOG_MAX),
    default=FAILOVER_LOG_RECORDS,
    help="Records that the failover log of a partition keeps; who comes back with an older id begins again at 0.",
)
@click.option(
    "--clock-jump",
    type=FiniteRange(min=1),
    default=CLOCK_JUMP_SECONDS,
    help="Seconds: a longer absence may be a step of the day's clock, and counts once the server has run for so long.",
)
@click.option(
    "--replicate-from",
    type=TARGET,
    metavar="HOST:PORT[,...]",
    help="Be a replica: keep what the server there has. Further addresses are tried when it cannot be reached.",
)
@click.option(
    "--advertise",
    type=ADDRESS,
    metavar="HOST:PORT",
    show_default="the address it listens on",
    help="Where the other servers of its set, and their clients, reach this server.",
)
@click.option(
    "--anonymous",
    is_flag=True,
    help="As a replica, do not register with the upstream: hold nothing up there, and count for nothing.",
)
@click.option(
    "--peer-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file of the authorities of the other servers of the set: they are called with TLS, with --tls-cert.",
)
@click.option(
    "--peer-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the token that is shown to the other servers of the set; it needs the role replicate there.",
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
    require_data: bool,
    data_moved: bool,
    listen: str,
    http: str | None,
    text: str | None,
    ready_file: Path | None,
    insecure: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    tokens: Path | None,
    open_admin: bool,
    tail_bytes: int,
    max_value_bytes: int,
    flush_seconds: float,
    heartbeat_seconds: float,
    reader_timeout: float,
    tombstone_age: float,
    purge_hold: float,
    consumer_expiry: float,
    failover_log_records: int,
    clock_jump: float,
    replicate_from: str | None,
    advertise: str | None,
    anonymous: bool,
    peer_ca: Path | None,
    peer_token_file: Path | None,
    log_format: str | None,
) -> int:
    """Run a server on a data directory, until SIGTERM or Ctrl-C.

    Every option can be given in the environment too, as UPR_SERVER_DATA and so on.
    """
    # Before gRPC is loaded: else each refusal of its own is a line on stderr, as often as a client wants.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # grpc, lmdb and pyarrow cost a third of a second, which --help and a wrong option should not pay.
    from upr.replica.methods import ReplicaMethods
    from upr.service.server import serve

    config = ServerConfig(
        data=data,
        require_data=require_data,
        data_moved=data_moved,
        listen=listen,
        http=http or "",
        text=text or "",
        ready_file=ready_file,
        insecure=insecure,
        log_format=log_format or ("text" if sys.stderr.isatty() else "json"),
        tail_bytes=tail_bytes,
        max_value_bytes=max_value_bytes,
        flush_seconds=flush_seconds,
        heartbeat_seconds=heartbeat_seconds,
        reader_seconds=reader_timeout,
        tombstone_seconds=tombstone_age,
        purge_hold_seconds=purge_hold,
        consumer_seconds=consumer_expiry,
        failover_log_records=failover_log_records,
        clock_jump_seconds=clock_jump,
        replicate_from=tuple(map(str.strip, replicate_from.split(","))) if replicate_from else (),
        advertise=advertise or "",
        anonymous=anonymous,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        tokens=tokens,
        open_admin=open_admin,
        peer_ca=peer_ca,
        peer_token=peer_token_file,
    )
    return asyncio.run(serve(config, ReplicaMethods))
