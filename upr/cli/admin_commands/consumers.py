"""``upr-admin consumers``: who follows, how far they are, and who of a group owns what."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import click

from upr_cli_kit.options import client_options, partitions_option
from upr_cli_kit.output import (
    Group,
    columns,
    confirm,
    not_found,
    output_options,
    print_done,
    print_result,
)
from upr_cli_kit.screen import watched_output_options
from upr_cli_kit.times import format_micros, parse_time
from upr_protocol.failover import format_failover_id
from upr_protocol.limits import format_duration

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.admin import ConsumerInfo, ConsumerPosition


_COLUMNS = ("name", "connected", "generation", "members", "partitions", "lag", "last_ack", "ago")
_MEMBER_COLUMNS = ("member", "connected", "owned", "releasing", "lease", "left", "peer")
_POSITION_COLUMNS = (
    "name",
    "partition",
    "member",
    "failover_id",
    "seqno",
    "high_seqno",
    "lag",
    "last_ack",
)


@click.group("consumers", cls=Group, bare="list")
def consumers() -> None:
    """Show the registered consumers and the members of groups; reset or forget one. Alone it is 'consumers list'.

    A consumer with a name is registered by its first acknowledgement, or by the first position that it saves in the
    server. Tombstones that it has not passed are not purged before the hold limit.
    """


@consumers.command("list")
@click.option("--partitions", is_flag=True, help="Show the position in every partition.")
@client_options
@watched_output_options
def list_command(partitions: bool, client: "Client", bucket: str, as_json: bool) -> None:
    """Show all consumers."""
    found = client.admin.consumers(bucket, with_positions=partitions)
    if partitions:
        lines = [columns(_POSITION_COLUMNS, (row for info in found for row in _positions(info)))]
    else:
        lines = [columns(_COLUMNS, map(_row, found))]
        for info in found:
            if info.members:
                lines += ["", f"{info.name}:", _members(info)]
    print_result(as_json, [_document(info, partitions) for info in found], "\n".join(lines))


@consumers.command("show")
@click.argument("name")
@client_options
@watched_output_options
def show(name: str, client: "Client", bucket: str, as_json: bool) -> None:
    """Show consumer NAME: its members, and partition by partition who owns it and where it stands."""
    found = client.admin.consumers(bucket, with_positions=True)
    info = next((info for info in found if info.name == name), None)
    if info is None:
        raise not_found(f"consumer {name!r}", "consumers")
    lines = [columns(_COLUMNS, [_row(info)]), ""]
    if info.members:
        lines += [_members(info), ""]
    lines.append(columns(_POSITION_COLUMNS[1:], (row[1:] for row in _positions(info))))
    print_result(as_json, _document(info, with_positions=True), "\n".join(lines))


@consumers.command("reset")
@click.argument("name")
@click.option(
    "--to",
    "to",
    required=True,
    metavar="beginning|now|TIME",
    help="Where it goes on: TIME as 2026-05-01T12:00:00Z, or '2h ago'.",
)
@partitions_option
@click.option("--create", is_flag=True, help="Store positions also for a name that is not known.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@client_options
@output_options
def reset(
    name: str,
    to: str,
    partitions: list[int] | None,
    create: bool,
    yes: bool,
    client: "Client",
    bucket: str,
    as_json: bool,
) -> None:
    """Set the positions that consumer NAME has stored in the server.

    Its calls end; they connect again and go on from there, and nothing that they had is saved any more. What the
    consumer has made of the data is not undone: fit it to the new positions. Positions that a consumer keeps itself
    are not touched. Without a terminal, --yes is needed.
    """
    place: Literal["beginning", "now"] | datetime = "now" if to == "now" else "beginning"
    words = to
    if to not in ("beginning", "now"):
        place = parse_time(to, datetime.now(UTC))
        words = place.isoformat(timespec="seconds")
    where = "all partitions" if partitions is None else f"{len(partitions)} partitions"
    if not yes:
        confirm(f"Reset {where} of consumer {name!r} to {words}?", "reset the positions")
    stored = client.admin.reset_consumer(bucket, name, place, partitions=partitions, create=create)
    document = {"name": name, "to": words, "positions": _places(stored)}
    text = f"reset: {name}, {where} to {words}; {len(stored)} positions stored"
    print_result(as_json, document, text)


@consumers.command("forget")
@click.argument("name")
@client_options
@output_options
def forget(name: str, client: "Client", bucket: str, as_json: bool) -> None:
    """Forget the positions of consumer NAME, so that they hold no purging up any more.

    One that is connected is registered again by its next acknowledgement, or the next position that it saves.
    """
    if not client.admin.forget_consumer(bucket, name):
        raise not_found(f"consumer {name!r}", "consumers")
    print_done(as_json, "forgotten", name)


def _ago(micros: int) -> str:
    if not micros:
        return "-"
    return format_duration(max(round(time.time() - micros / 1e6), 0))


def _row(info: "ConsumerInfo") -> tuple[object, ...]:
    return (
        info.name,
        "yes" if info.connected else "no",
        info.generation,
        len(info.members),
        info.partitions,
        info.lag,
        format_micros(info.last_ack_time) or "-",
        _ago(info.last_ack_time),
    )


def _members(info: "ConsumerInfo") -> str:
    rows = [
        (
            member.name,
            "yes" if member.peer else "no",
            member.partitions,
            member.releasing,
            f"{member.lease_seconds:g}s",
            f"{member.lease_left_seconds:.1f}s",
            member.peer or "-",
        )
        for member in info.members
    ]
    return columns(_MEMBER_COLUMNS, rows)


def _positions(info: "ConsumerInfo") -> Iterator[tuple[object, ...]]:
    for place in _places(info.positions):
        told = {"name": info.name, **place}
        yield tuple("-" if told[name] is None else told[name] for name in _POSITION_COLUMNS)


def _places(positions: "Mapping[int, ConsumerPosition]") -> list[dict[str, Any]]:
    return [
        {
            "partition": partition,
            "member": at.member or None,
            "failover_id": format_failover_id(at.failover_id) if at.failover_id else None,
            "seqno": at.seqno,
            "high_seqno": at.high_seqno,
            "lag": at.lag,
            "last_ack": format_micros(at.time),
        }
        for partition, at in positions.items()
    ]


def _document(info: "ConsumerInfo", with_positions: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": info.name,
        "connected": info.connected,
        "generation": info.generation,
        "partitions": info.partitions,
        "lag": info.lag,
        "last_ack_time": info.last_ack_time or None,
        "last_ack": format_micros(info.last_ack_time),
        "members": [asdict(member) | {"peer": member.peer or None} for member in info.members],
    }
    if with_positions:
        document["positions"] = _places(info.positions)
    return document
