"""``upr-admin consumers``: who has acknowledged what."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from upr.cli.options import server_options
from upr.cli.output import Group, columns, json_option, print_json, verbose_option
from upr_protocol.errors import UprError
from upr_protocol.failover import format_failover_id

if TYPE_CHECKING:
    from upr_client import ConsumerInfo

_COLUMNS = ("name", "connected", "generation", "partitions", "lag", "last_ack")
_POSITION_COLUMNS = ("name", "partition", "failover_id", "seqno")


@click.group("consumers", cls=Group, invoke_without_command=True)
@click.option("--partitions", is_flag=True, help="Show the position in every partition.")
@server_options
@json_option
@verbose_option
@click.pass_context
def consumers(
    context: click.Context, partitions: bool, target: str, bucket: str, as_json: bool
) -> None:
    """Show the registered consumers, or forget one.

    A consumer with a name is registered by its first acknowledgement. Tombstones that it has not passed are not
    purged before the hold limit.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from upr_client import Client

    with Client(target) as client:
        found = client.bucket(bucket).consumers(with_positions=partitions)
    if as_json:
        print_json([_document(info, partitions) for info in found])
    elif partitions:
        click.echo(columns(_POSITION_COLUMNS, (row for info in found for row in _positions(info))))
    else:
        click.echo(columns(_COLUMNS, map(_row, found)))


def _refuse_options(context: click.Context) -> None:
    """Refuse what stands before a subcommand, which would otherwise ask another server or bucket than was named."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.expose_value:
            raise click.UsageError(
                f"{parameter.opts[-1]} goes behind {context.invoked_subcommand!r}", context
            )


@consumers.command("forget")
@click.argument("name")
@server_options
@verbose_option
def forget(name: str, target: str, bucket: str) -> None:
    """Forget the positions of consumer NAME, so that they hold no purging up any more.

    One that is connected is registered again by its next acknowledgement.
    """
    from upr_client import Client

    with Client(target) as client:
        if not client.bucket(bucket).forget_consumer(name):
            raise UprError(
                f"there is no consumer {name!r}",
                reason="NOT_FOUND",
                hint="'upr-admin consumers' lists them",
            )
    click.echo(f"forgotten: {name}")


def _last_ack(info: "ConsumerInfo") -> str | None:
    if not info.last_ack_time:
        return None
    return datetime.fromtimestamp(info.last_ack_time / 1e6, UTC).isoformat(timespec="seconds")


def _row(info: "ConsumerInfo") -> tuple[object, ...]:
    connected = "yes" if info.connected else "no"
    return (
        info.name,
        connected,
        info.generation,
        info.partitions,
        info.lag,
        _last_ack(info) or "-",
    )


def _positions(info: "ConsumerInfo") -> list[tuple[object, ...]]:
    return [
        (
            info.name,
            partition,
            format_failover_id(at.failover_id) if at.failover_id else "-",
            at.seqno,
        )
        for partition, at in info.positions.items()
    ]


def _document(info: "ConsumerInfo", with_positions: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": info.name,
        "connected": info.connected,
        "generation": info.generation,
        "partitions": info.partitions,
        "lag": info.lag,
        "last_ack_time": info.last_ack_time or None,
        "last_ack": _last_ack(info),
    }
    if with_positions:
        document["positions"] = [
            {
                "partition": partition,
                "failover_id": format_failover_id(at.failover_id) if at.failover_id else None,
                "seqno": at.seqno,
            }
            for partition, at in info.positions.items()
        ]
    return document
