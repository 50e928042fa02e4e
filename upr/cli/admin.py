"""``upr-admin``: look at a server and its data, and manage buckets, cuts and consumers."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from upr import __version__
from upr.cli.admin_commands.accept_loss import accept_loss
from upr.cli.admin_commands.access import context, token
from upr.cli.admin_commands.bucket import bucket, purge
from upr.cli.admin_commands.check import check
from upr.cli.admin_commands.consumers import consumers
from upr.cli.admin_commands.cut import cut
from upr.cli.admin_commands.restore_copy import restore_copy
from upr.cli.admin_commands.status import status, storage, top
from upr.cli.admin_commands.topology import drain, promote, takeover, topology
from upr.cli.admin_commands.undone import undone
from upr_cli_kit.options import FAILOVER_ID, SEQNO, SEQNOS, client_options, partitions_argument
from upr_cli_kit.output import (
    Group,
    add_examples,
    columns,
    output_options,
    print_result,
)
from upr_cli_kit.screen import watched_output_options
from upr_cli_kit.times import format_micros
from upr_protocol.errors import UprError
from upr_protocol.failover import format_failover_id
from upr_protocol.limits import PARTITIONS

if TYPE_CHECKING:
    from upr.service.sight.explanation import ServerSide
    from upr_client import Client

_COLUMNS = ("partition", "state", "high_seqno", "durable_seqno", "purge_seqno", "failover_id")


@click.group("upr-admin", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="upr-admin %(version)s")
def main() -> None:
    """Look at a server and its data, and manage buckets, cuts and consumers.

    'accept-loss', 'check' and 'restore-copy' take the data directory of a stopped server; all others ask a running one.
    """


@main.command("failover-log")
@partitions_argument(metavar="[PARTITION ...]")
@client_options
@watched_output_options
def failover_log(
    partitions: list[int] | None, client: "Client", bucket: str, as_json: bool
) -> None:
    """Show failover logs, oldest record first, of all partitions or of those named (5, or 0-63,512)."""
    from upr.cli.admin_commands.explain import logs_to_json, logs_to_text

    logs = client.admin.failover_logs(bucket, partitions)
    print_result(as_json, logs_to_json(logs), logs_to_text(logs))


@main.command("partitions")
@partitions_argument(metavar="[PARTITION ...]")
@client_options
@watched_output_options
def partitions_command(
    partitions: list[int] | None, client: "Client", bucket: str, as_json: bool
) -> None:
    """Show the state of all partitions or of those named (5, or 0-63,512)."""
    found = client.admin.partitions(bucket, partitions)
    documents = [
        {
            **{column: getattr(info, column) for column in _COLUMNS},
            "failover_id": format_failover_id(info.failover_id) if info.failover_id else None,
            "dead_since": format_micros(info.dead_since),
            "problem": info.problem,
        }
        for info in sorted(found, key=lambda info: info.partition)
    ]
    rows = [
        (
            *list(document.values())[:-2],
            document["dead_since"] or "-",
            document["problem"].message if document["problem"] else "-",
        )
        for document in documents
    ]
    print_result(as_json, documents, columns((*_COLUMNS, "dead_since", "problem"), rows))


@main.command("explain")
@click.argument("partition", type=click.IntRange(0, PARTITIONS - 1))
@click.option(
    "--id", "failover_id", type=FAILOVER_ID, help="The client's failover id; none: it is new."
)
@click.option("--seqno", type=SEQNO, default=0, show_default=True, help="Up to where it has data.")
@click.option("--horizon", type=SEQNO, help="Its horizon; not known when not given.")
@click.option("--markers", type=SEQNOS, default=(), help="Its snapshot markers, as 350,418.")
@click.option(
    "--data-id", type=FAILOVER_ID, help="The id its data was received under. [default: --id]"
)
@click.option(
    "--at-record", is_flag=True, help="It also goes back to a marker at the record itself."
)
@click.option(
    "--log",
    "log_file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=False, path_type=Path),
    help="Take the log from what 'failover-log --json' printed, and ask no server.",
)
@click.option("--high", type=SEQNO, help="The partition's high seqno, with --log.")
@client_options
@output_options
def explain_command(
    partition: int,
    failover_id: int | None,
    seqno: int,
    horizon: int | None,
    markers: tuple[int, ...],
    data_id: int | None,
    at_record: bool,
    log_file: Path | None,
    high: int | None,
    client: "Client",
    bucket: str,
    as_json: bool,
) -> None:
    """Explain what the handshake answers to a client of PARTITION: the answer, the rule, the records, the steps."""
    from upr.cli.admin_commands.explain import read_log, to_text
    from upr.service.sight.explanation import ServerSide, explain, position_of, to_json

    if high is not None and log_file is None:
        raise click.UsageError("--high goes with --log; a server is asked for its own")
    position = position_of(failover_id, data_id, seqno, horizon, markers)
    if log_file is not None:
        server = ServerSide(read_log(log_file, partition), high)
    else:
        server = _ask(client, bucket, partition)
    explanation = explain(partition, position, server, at_record=at_record)
    print_result(as_json, to_json(explanation), to_text(explanation))


def _ask(client: "Client", bucket_name: str, partition: int) -> "ServerSide":
    from upr.service.sight.explanation import ServerSide

    bucket = client.bucket(bucket_name)
    log = client.admin.failover_logs(bucket, [partition])[partition]
    (info,) = client.admin.partitions(bucket, [partition])
    if info.state not in ("active", "replica"):
        raise UprError(
            f"partition {partition} is {info.state} here and answers no handshake",
            reason="PARTITION_NOT_ACTIVE",
        )
    return ServerSide(log, info.high_seqno, info.purge_seqno, info.state == "active")


for command in (accept_loss, bucket, check, consumers, context, cut, purge, restore_copy, status):
    main.add_command(command)
for command in (storage, token, top, drain, promote, takeover, topology, undone):
    main.add_command(command)
add_examples(
    main,
    {
        "": ("status", "top", "consumers --bucket orders", "partitions 0-63 --json"),
        "accept-loss": ("accept-loss /var/lib/upr 5,17 --bucket orders",),
        "bucket": ("bucket", "bucket create orders"),
        "bucket list": ("bucket list", "bucket list --watch 2"),
        "bucket create": ("bucket create orders --compression zstd --quota 10GiB",),
        "bucket quota": ("bucket quota orders 10GiB", "bucket quota orders 0"),
        "bucket drop": ("bucket drop orders --data /var/lib/upr",),
        "check": ("check /var/lib/upr", "check /backup/upr --partitions 0-63"),
        "consumers": ("consumers", "consumers show indexer"),
        "consumers list": ("consumers list --bucket orders", "consumers list --watch 2"),
        "consumers show": ("consumers show indexer", "consumers show indexer --json"),
        "consumers reset": (
            "consumers reset indexer --to beginning --data /var/lib/upr",
            "consumers reset indexer --to '2h ago' --partitions 0-63 --yes",
        ),
        "consumers forget": ("consumers forget indexer --data /var/lib/upr",),
        "context": ("context", "context use production"),
        "context add": (
            "context add production --target db1:7711,db2:7711 --tls-ca ca.pem --token-file token",
        ),
        "context use": ("context use production",),
        "context list": ("context list",),
        "context remove": ("context remove production",),
        "cut": ("cut", "cut create nightly"),
        "cut create": ("cut create nightly --lease 2h --bucket orders",),
        "cut list": ("cut list", "cut list --partitions --json"),
        "cut renew": ("cut renew nightly --lease 1d",),
        "cut release": ("cut release nightly",),
        "explain": (
            "explain 5 --id 1f00ca11ab1e0005 --seqno 434 --markers 350,418",
            "explain 5 --log log.json --high 500",
        ),
        "failover-log": ("failover-log 5", "failover-log 0-63,512 --json"),
        "partitions": ("partitions", "partitions 5 --watch 1"),
        "promote": ("promote --target 127.0.0.1:7712", "promote --target db2:7711 --force"),
        "purge": ("purge --dry-run", "purge 5 --bucket orders"),
        "restore-copy": ("restore-copy /srv/copy-of-upr",),
        "status": ("status", "status --data /var/lib/upr --watch 2"),
        "storage": ("storage --bucket orders",),
        "drain": ("drain --target db1:7711,db2:7711", "drain --target db1:7711 --undo --json"),
        "takeover": ("takeover --to db2:7711",),
        "token": ("token list --tokens /etc/upr/identities",),
        "token add": (
            "token add indexer --role read:orders --tokens /etc/upr/identities",
            "token add web --role write --certificate web.example --tokens /etc/upr/identities",
        ),
        "token list": ("token list --tokens /etc/upr/identities",),
        "token revoke": ("token revoke indexer --tokens /etc/upr/identities",),
        "top": ("top", "top --every 5 --data /var/lib/upr"),
        "topology": ("topology", "topology forget db3:7711"),
        "topology show": ("topology show --target db1:7711,db2:7711",),
        "topology forget": ("topology forget db3:7711 --target db1:7711",),
        "undone": ("undone list /var/lib/upr",),
        "undone list": ("undone list /var/lib/upr", "undone list /var/lib/upr --rows"),
        "undone apply": ("undone apply /var/lib/upr/undone/FILE --if-unchanged",),
    },
)
