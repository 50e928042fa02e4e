"""``upr-cat get``, ``set``, ``delete`` and ``dump``: single keys, and all keys with their values of now."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click

from upr_cli_kit.options import open_client, partitions_option, server_options
from upr_cli_kit.output import json_option, print_result, verbose_option
from upr_protocol.errors import BucketNotFoundError, PermissionDeniedError, UprError, shown
from upr_protocol.limits import VALUE_BYTES_MAX

if TYPE_CHECKING:
    from upr_client import ChangeBatch, Rollback
    from upr_client.types import Bucket, WriteResult

_F = TypeVar("_F", bound=Callable[..., Any])

Durability = Literal["disk", "memory", "replicated(1)", "replicated(2)", "replicated(3)"]
_RETRY_SECONDS = 10.0
"""Time for which a write is tried again: somebody waits for it."""


@contextmanager
def open_bucket(target: str, name: str, **options: Any) -> "Iterator[Bucket]":
    """Give a bucket; raise UprError where no server can be reached now, or has it."""
    with open_client(target, **options) as client:
        bucket = client.bucket(name)
        # A server that was never there is a wrong address; one that goes away later is waited for.
        try:
            client.admin.partitions(bucket, [0])
        except BucketNotFoundError:
            # A replica may lack what the active server has, to which all that is done with the bucket goes.
            is_active = False
            # Without the role read that is not told; what is done with the bucket ends with the same error then.
            with suppress(PermissionDeniedError):
                is_active = client.admin.topology().active
            if is_active:
                raise
        yield bucket


durability_option = click.option(
    "--durability",
    type=click.Choice(get_args(Durability)),
    default="disk",
    show_default=True,
    help="When the server acknowledges a write.",
)


def _write_options(function: _F) -> _F:
    return durability_option(verbose_option(json_option(server_options(function))))


@click.command("get")
@click.argument("key")
@click.option("--raw", is_flag=True, help="Without a line feed behind the value.")
@click.option("--any", "any_server", is_flag=True, help="From a replica too, which may be behind.")
@verbose_option
@server_options
def get(key: str, raw: bool, any_server: bool, target: str, bucket: str) -> None:
    """Print KEY's value as it is; status 3 without one."""
    with open_client(target) as client:
        read_from = "any" if any_server else "active"
        value = client.bucket(bucket).get(os.fsencode(key), read_from=read_from)
    if value is None:
        raise UprError(
            f"there is no key {shown(key)}",
            hint="it was never set, or is deleted",
            reason="NOT_FOUND",
        )
    sys.stdout.buffer.write(value if raw else value + b"\n")
    sys.stdout.buffer.flush()


@click.command("set")
@click.argument("key")
@click.argument("value")
@_write_options
def set_(
    key: str, value: str, durability: Durability, target: str, bucket: str, as_json: bool
) -> None:
    """Set KEY to VALUE, or to all of stdin where VALUE is -.

    A key or value that begins with - goes behind --: 'upr-cat set -- temperature -5'.
    """
    # One more than a value may have is refused as what it is, however much there is.
    data = sys.stdin.buffer.read(VALUE_BYTES_MAX + 1) if value == "-" else os.fsencode(value)
    with open_bucket(target, bucket, retry_seconds=_RETRY_SECONDS) as source:
        _report(source.set(os.fsencode(key), data, durability), as_json)


@click.command("delete")
@click.argument("key")
@_write_options
def delete(key: str, durability: Durability, target: str, bucket: str, as_json: bool) -> None:
    """Delete KEY, whether it exists or not."""
    with open_bucket(target, bucket, retry_seconds=_RETRY_SECONDS) as source:
        _report(source.delete(os.fsencode(key), durability), as_json)


def _report(written: "WriteResult", as_json: bool) -> None:
    partition, seqno = written.partition, written.seqno
    document = {"partition": partition, "seqno": seqno, "token": str(written.token)}
    print_result(as_json, document, f"partition {partition}, seqno {seqno}")


@click.command("dump")
@partitions_option
@click.option("--key-prefix", default="", help="Only keys that begin with it.")
@verbose_option
@server_options
def dump(partitions: list[int] | None, key_prefix: str, target: str, bucket: str) -> None:
    """Print all keys with their values of now, as lines that 'upr-cat load jsonl' reads.

    Each partition is in a state that it had. All of it is in memory before the first line.
    """
    from upr.cli.cat_commands.row_formats import row_line
    from upr_client import Only

    only = Only(partitions, key_prefix=os.fsencode(key_prefix))
    with (
        open_bucket(target, bucket) as source,
        source.changes(until="now", only=only, on_rollback="restart") as changes,
    ):
        values = values_of(changes.batches())
    # Nothing is followed any more: printing may take long, and a rollback in the middle would leave keys out.
    for rows in values.values():
        sys.stdout.writelines(f"{row_line(key, value)}\n" for key, value in rows.items())


def values_of(batches: "Iterable[ChangeBatch | Rollback]") -> dict[int, dict[bytes, bytes | None]]:
    """Return the keys and values of each partition that changes lead to, where each rollback is one to 0."""
    from upr_client import Rollback

    values: dict[int, dict[bytes, bytes | None]] = {}
    for batch in batches:
        if isinstance(batch, Rollback):
            values.pop(batch.partition, None)
            continue
        for change in batch.changes:
            shown = values.setdefault(change.partition, {})
            if change.op == "delete":
                shown.pop(change.key, None)
            else:
                shown[change.key] = change.value
    return values
