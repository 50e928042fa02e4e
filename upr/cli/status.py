"""``upr-admin status``: what a server process is and uses."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from upr.cli.options import target_option
from upr.cli.output import (
    columns,
    json_option,
    print_json,
    problem_document,
    size_text,
    verbose_option,
)

if TYPE_CHECKING:
    from upr_client import BucketStatus, ServerStatus

_COLUMNS = (
    "bucket",
    "tail",
    "limit",
    "volatile",
    "streams",
    "from_store",
    "cuts",
    "damaged",
    "problem",
)


@click.command("status")
@target_option
@json_option
@verbose_option
def status(target: str, as_json: bool) -> None:
    """Show memory, open calls, and for each bucket its tail, streams, cuts and damage."""
    from upr_client import Client

    with Client(target) as client:
        found = client.status()
    if as_json:
        print_json(_document(found))
        return
    click.echo(f"server            {found.server_version}, {found.server_id:016x}")
    click.echo(f"uptime            {_duration(found.uptime_seconds)}")
    click.echo(f"anonymous memory  {size_text(found.anonymous_bytes)}")
    click.echo(f"mapped memory     {size_text(found.mapped_bytes)}")
    click.echo(f"follow calls      {found.follow_calls}")
    click.echo(f"write calls       {found.write_calls}")
    click.echo()
    click.echo(columns(_COLUMNS, map(_row, found.buckets)))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}:{minutes:02}:{rest:02}"


def _row(bucket: "BucketStatus") -> tuple[object, ...]:
    return (
        bucket.name,
        size_text(bucket.tail_bytes),
        size_text(bucket.tail_limit_bytes),
        size_text(bucket.volatile_bytes),
        bucket.streams,
        bucket.streams_from_store,
        bucket.cuts,
        bucket.damaged_partitions,
        bucket.problem.message if bucket.problem is not None else "-",
    )


def _document(found: "ServerStatus") -> dict[str, Any]:
    document = asdict(found)
    document["server_id"] = f"{found.server_id:016x}"
    for bucket, told in zip(found.buckets, document["buckets"], strict=True):
        told["version"] = f"{bucket.version:016x}"
        told["problem"] = problem_document(bucket.problem)
    return document
