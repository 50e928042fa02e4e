"""``upr-admin undone``: what a replica undid because its upstream has another history."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upr_cli_kit.options import NamedPath, check_of_target, login, open_client, target_option
from upr_cli_kit.output import Group, columns, output_options, print_result
from upr_cli_kit.times import format_micros
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.limits import GET_KEYS_MAX

if TYPE_CHECKING:
    from upr.storage.undone import UndoneFile
    from upr_protocol.wire.cells import Cells

_COLUMNS = ("file", "bucket", "undone_at", "mutations", "partitions")
_SECONDS = 30.0
"""Longest wait for a Get."""
_HOPS = 3
"""Number of servers that are asked in turn who is active."""
_ROW_COLUMNS = ("partition", "seqno", "op", "key", "value_bytes")


@click.group("undone", cls=Group)
def undone() -> None:
    """Look at the mutations that a replica has undone, and put them back."""


@undone.command("list")
@click.argument("directory", type=NamedPath(), metavar="DIR")
@click.option("--rows", is_flag=True, help="Show each mutation too.")
@output_options
def list_command(directory: Path, rows: bool, as_json: bool) -> None:
    """Show what was undone in the data directory DIR; its server may be running."""
    from upr.storage.directory import read_mark
    from upr.storage.undone import undone_files

    # Anything else would have nothing in it that was undone.
    read_mark(directory)
    documents = [_document(one, with_rows=rows or as_json) for one in undone_files(directory)]
    told = [tuple(document[column] for column in _COLUMNS) for document in documents]
    lines = [columns(_COLUMNS, told)]
    for document in documents if rows else ():
        lines += ["", document["file"], columns(_ROW_COLUMNS, map(_row, document["rows"]))]
    print_result(as_json, documents, "\n".join(lines))


@undone.command("apply")
@click.argument("file", type=NamedPath(exists=True, dir_okay=False))
@click.option(
    "--if-unchanged",
    is_flag=True,
    required=True,
    help="Leave out the keys that anybody has written since.",
)
@target_option
@output_options
def apply_command(file: Path, if_unchanged: bool, target: str, as_json: bool) -> None:
    """Write the mutations in FILE again, of each key the newest, to the server that is active now.

    A key is looked at right before it is written, not in one step with it. Applying a file once more changes nothing.
    """
    from upr.storage.undone import read_undone
    from upr_client.lowlevel import write_blocks
    from upr_protocol.partitioning import partition_of
    from upr_protocol.wire.cells import blocks_with_cells

    one = read_undone(file)
    if one.folder:
        raise InvalidArgumentError(
            f"{file.name} names a bucket that is kept whole, in {one.folder}; must be a file of mutations",
            hint="move that folder to DIR/buckets/ of a new data directory, named by its version, and serve that",
        )
    newest: dict[bytes, tuple[int, bytes | None, Cells]] = {}
    for row in one.rows():
        value = base64.b64decode(row["value"]) if row["op"] == "set" else None
        cells = {int(id_): base64.b64decode(c) for id_, c in row.get("further", {}).items()}
        newest[base64.b64decode(row["key"])] = (row["partition"], value, cells)
    # The server looks for a key in the partition that it computes.
    mine = {key: told for key, told in newest.items() if partition_of(key) == told[0]}
    written = changed = 0
    with open_client(target) as client:
        bucket = client.bucket(one.bucket)
        left = list(mine)
        while left:
            seqnos = _newest_seqnos(target, one, left[:GET_KEYS_MAX])
            keys, left = left[: len(seqnos)], left[len(seqnos) :]
            free = [key for key in keys if seqnos[key] <= one.markers.get(partition_of(key), 0)]
            values, cells_of = [mine[key][1] for key in free], [mine[key][2] for key in free]
            write_blocks(bucket, blocks_with_cells(free, values, cells_of))
            written, changed = written + len(free), changed + len(keys) - len(free)
    elsewhere = len(newest) - len(mine)
    document = {"written": written, "changed_since": changed, "elsewhere": elsewhere}
    text = f"{written} keys written; {changed} left out, which were written since"
    if elsewhere:
        text += f"\n{elsewhere} left out, which are not in the partition of their key"
    print_result(as_json, document, text)


def _newest_seqnos(target: str, one: "UndoneFile", keys: Sequence[bytes]) -> dict[bytes, int]:
    """Return the seqno of the newest mutation of each key, 0 for none; at least of the first key.

    Raises:
        UprError: no active server is found or answers, it has another bucket of that name, or a partition cannot be read.
    """
    import grpc

    from upr_client.endpoints import authorization
    from upr_protocol.wire.grpc import CLIENT_OPTIONS, error_from_call, error_of
    from upr_protocol.wire.v1 import key_value_service_pb2 as kv
    from upr_protocol.wire.v1.key_value_service_pb2_grpc import KeyValueServiceStub

    active, mine = _active_server(target), login()
    shown = None if mine.token is None else authorization(mine.token)
    with (
        grpc.insecure_channel(active, options=CLIENT_OPTIONS)
        if mine.credentials is None
        else grpc.secure_channel(active, mine.credentials, options=CLIENT_OPTIONS)
    ) as channel:
        try:
            # Seqnos of another bucket of the name say nothing of what was written since.
            request = kv.GetRequest(bucket=one.bucket, bucket_version=one.version, keys=keys)
            stub = KeyValueServiceStub(channel)
            answers = stub.Get(request, timeout=_SECONDS, metadata=shown).answers
        except grpc.RpcError as error:
            refused = error_from_call(error)
            if refused.reason == "BUCKET_GONE":
                refused.hint = "the mutations are of the old one; 'undone list --rows' shows them"
            raise refused from error
    for answer in answers:
        if answer.HasField("problem"):
            raise error_of(answer.problem)
    return {key: answer.seqno for key, answer in zip(keys, answers, strict=False)}


def _active_server(target: str) -> str:
    """Return HOST:PORT of the server that says of itself that it is active.

    Raises:
        UprError: there is none, or it is none of the target, and credentials would go there.
    """
    asked = target
    for _ in range(_HOPS):
        with open_client(asked) as client:
            found = client.admin.topology()
        if found.active and "," not in asked:
            return asked
        asked = next((one.address for one in found.members if one.active and one.address), target)
        if asked != target:
            hint = f"give --target {asked} if that is one of yours"
            check_of_target(asked, target, "the active server", hint)
    raise UprError(
        "no server of the target says that it is active",
        hint="upr-admin topology shows who is; give its address with --target",
    )


def _document(one: "UndoneFile", *, with_rows: bool) -> dict[str, Any]:
    count, partitions, kept = one.mutations, set(), []
    for row in one.rows():
        count += 1
        partitions.add(row["partition"])
        if with_rows:
            kept.append(row)
    document: dict[str, Any] = {
        "file": str(one.path.parent / one.folder if one.folder else one.path),
        "bucket": one.bucket,
        "undone_at": format_micros(one.time),
        "mutations": count,
        "partitions": one.partitions or len(partitions),
    }
    return {**document, "rows": kept} if with_rows else document


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    """Return a mutation for people: its key as Python shows bytes, and the size of its value."""
    value = len(base64.b64decode(row["value"])) if "value" in row else "-"
    return row["partition"], row["seqno"], row["op"], repr(base64.b64decode(row["key"]))[1:], value
