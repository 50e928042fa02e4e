"""``upr-admin cut``: pin a point in time of a bucket."""

import time
from typing import TYPE_CHECKING, Any

import click

from upr_cli_kit.options import client_options, partitions_option
from upr_cli_kit.output import (
    Group,
    columns,
    note,
    output_options,
    print_done,
    print_result,
    problem_document,
)
from upr_cli_kit.screen import watched_output_options
from upr_cli_kit.times import duration, format_micros
from upr_protocol.errors import CutNotFoundError
from upr_protocol.failover import format_failover_id
from upr_protocol.limits import CUT_LEASE_SECONDS_MAX, format_duration

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.admin import CutInfo
    from upr_client.types import Cut


_COLUMNS = ("name", "created", "expires", "lease", "left")
_PIN_COLUMNS = ("name", "partition", "failover_id", "seqno")
_lease_option = click.option(
    "--lease",
    type=duration(0.001, CUT_LEASE_SECONDS_MAX),
    help="How long it holds without being renewed, as 90s, 1.5h or 2d.",
)


@click.group("cut", cls=Group, bare="list")
def cut() -> None:
    """Pin the bucket as it is at one instant, so that it can be read as of then again and again.

    Alone it is 'cut list'.
    """


@cut.command("create")
@click.argument("name")
@_lease_option
@partitions_option
@client_options
@output_options
def create(
    name: str,
    lease: float | None,
    partitions: list[int] | None,
    client: "Client",
    bucket: str,
    as_json: bool,
) -> None:
    """Make cut NAME of this instant. Everything up to it is on disk when this returns.

    It holds for an hour unless --lease says otherwise, and can be renewed and released. Dead partitions are left out,
    and named.
    """
    made = client.admin.create_cut(bucket, name, partitions=partitions, lease=lease)
    document = _document(made, with_pins=True)
    document["left_out"] = [
        {"partition": partition, **problem_document(why)}
        for partition, why in made.left_out.items()
    ]
    expires = format_micros(made.expires_time)
    text = f"created: {made.name}, {len(made.pins)} partitions pinned until {expires}"
    print_result(as_json, document, text)
    for why in () if as_json else made.left_out.values():
        note(f"warning: left out: {why.message}")


@cut.command("list")
@click.option("--partitions", is_flag=True, help="Show the pinned marker of every partition.")
@client_options
@watched_output_options
def list_command(partitions: bool, client: "Client", bucket: str, as_json: bool) -> None:
    """Show the cuts whose lease has not ended, oldest first."""
    found = client.admin.cuts(bucket, with_pins=partitions)
    documents = [_document(info, with_pins=partitions) for info in found]
    if partitions:
        rows = (
            (one["name"], pin["partition"], pin["failover_id"] or "-", pin["seqno"])
            for one in documents
            for pin in one["partitions"]
        )
        text = columns(_PIN_COLUMNS, rows)
    else:
        text = columns(_COLUMNS, map(_row, found))
    print_result(as_json, documents, text)


@cut.command("renew")
@click.argument("name")
@_lease_option
@client_options
@output_options
def renew(name: str, lease: float | None, client: "Client", bucket: str, as_json: bool) -> None:
    """Have the lease of cut NAME begin anew, with its length or another one."""
    info = client.admin.renew_cut(bucket, name, lease)
    text = f"renewed: {info.name}, pinned until {format_micros(info.expires_time)}"
    print_result(as_json, _document(info, with_pins=False), text)


@cut.command("release")
@click.argument("name")
@client_options
@output_options
def release(name: str, client: "Client", bucket: str, as_json: bool) -> None:
    """Give cut NAME up: what it pinned may be merged away."""
    if not client.admin.release_cut(bucket, name):
        raise CutNotFoundError(
            f"there is no cut {name!r}, or its lease has ended",
            hint="'upr-admin cut list' shows those there are",
        )
    print_done(as_json, "released", name)


def _row(info: "CutInfo") -> tuple[object, ...]:
    left = max(round(info.expires_time / 1e6 - time.time()), 0)
    return (
        info.name,
        format_micros(info.created_time),
        format_micros(info.expires_time),
        format_duration(info.lease_seconds),
        f"{left}s",
    )


def _document(info: "CutInfo | Cut", *, with_pins: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": info.name,
        "created": format_micros(info.created_time),
        "expires": format_micros(info.expires_time),
        "lease_seconds": info.lease_seconds,
    }
    if with_pins:
        document["partitions"] = [
            {
                "partition": partition,
                "failover_id": format_failover_id(pin.failover_id) if pin.failover_id else None,
                "seqno": pin.seqno,
            }
            for partition, pin in info.pins.items()
        ]
    return document
