"""``upr-admin undone``: what a replica undid because its upstream has another history."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upr_cli_kit.options import DirectoryPath
from upr_cli_kit.output import Group, columns, json_option, print_json, verbose_option
from upr_cli_kit.times import format_micros

if TYPE_CHECKING:
    from upr.storage.undone import UndoneFile

_COLUMNS = ("file", "bucket", "undone_at", "mutations", "partitions")
_ROW_COLUMNS = ("partition", "seqno", "op", "key", "value_bytes")


@click.group("undone", cls=Group)
@verbose_option
def undone() -> None:
    """Look at the mutations that a replica has undone."""


@undone.command("list")
@click.argument("directory", type=DirectoryPath(), metavar="DIR")
@click.option("--rows", is_flag=True, help="Show each mutation too.")
@json_option
@verbose_option
def list_command(directory: Path, rows: bool, as_json: bool) -> None:
    """Show what was undone in the data directory DIR; its server may be running."""
    from upr.storage.undone import undone_files

    documents = [_document(one, with_rows=rows or as_json) for one in undone_files(directory)]
    if as_json:
        print_json(documents)
        return
    if not documents:
        click.echo("nothing was undone")
        return
    told = [tuple(document[column] for column in _COLUMNS) for document in documents]
    click.echo(columns(_COLUMNS, told))
    for document in documents if rows else ():
        click.echo()
        click.echo(document["file"])
        click.echo(columns(_ROW_COLUMNS, map(_row, document["rows"])))


def _document(one: "UndoneFile", *, with_rows: bool) -> dict[str, Any]:
    count, partitions, kept = 0, set(), []
    for row in one.rows():
        count += 1
        partitions.add(row["partition"])
        if with_rows:
            kept.append(row)
    document: dict[str, Any] = {
        "file": str(one.path),
        "bucket": one.bucket,
        "undone_at": format_micros(one.time),
        "mutations": count,
        "partitions": len(partitions),
    }
    return {**document, "rows": kept} if with_rows else document


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    """Return a mutation for people: its key as Python shows bytes, and the size of its value."""
    value = len(base64.b64decode(row["value"])) if "value" in row else "-"
    return row["partition"], row["seqno"], row["op"], repr(base64.b64decode(row["key"]))[1:], value
