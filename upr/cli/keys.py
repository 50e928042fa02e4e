"""``upr-cat get``, ``set``, ``delete`` and ``dump``: single keys, and all keys with their values of now."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from upr.cli.load import Durability, durability_option
from upr_cli_kit.options import PARTITION_SET, open_client, server_options
from upr_cli_kit.output import json_option, print_json, verbose_option
from upr_protocol.errors import UprError, shown

if TYPE_CHECKING:
    from upr_client import WriteResult

_F = TypeVar("_F", bound=Callable[..., Any])

_RETRY_SECONDS = 10.0
"""Time for which a write is tried again: somebody waits for it."""
_LINES_AT_ONCE = 1000


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
    """Set KEY to VALUE, or to all of stdin where VALUE is -."""
    data = sys.stdin.buffer.read() if value == "-" else os.fsencode(value)
    with open_client(target, retry_seconds=_RETRY_SECONDS) as client:
        _report(client.bucket(bucket).set(os.fsencode(key), data, durability), as_json)


@click.command("delete")
@click.argument("key")
@_write_options
def delete(key: str, durability: Durability, target: str, bucket: str, as_json: bool) -> None:
    """Delete KEY, whether it exists or not."""
    with open_client(target, retry_seconds=_RETRY_SECONDS) as client:
        _report(client.bucket(bucket).delete(os.fsencode(key), durability), as_json)


def _report(written: "WriteResult", as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "partition": written.partition,
                "seqno": written.seqno,
                "token": str(written.token),
            }
        )
    else:
        print(f"partition {written.partition}, seqno {written.seqno}")


@click.command("dump")
@click.option(
    "--partitions", type=PARTITION_SET, help="Only these, as 0-63,512. [default: all 1024]"
)
@click.option("--key-prefix", default="", help="Only keys that begin with it.")
@verbose_option
@server_options
def dump(partitions: list[int] | None, key_prefix: str, target: str, bucket: str) -> None:
    """Print all keys with their values of now, as lines that 'upr-cat load jsonl' reads.

    Each partition is in a state that it had. All of it is in memory before the first line.
    """
    from upr.cli.jsonl import row_line
    from upr_client import Only

    with open_client(target) as client:
        source = client.bucket(bucket)
        # A server that was never there is a wrong address; one that goes away later is waited for.
        client.admin.partitions(source, [0])
        only = Only(partitions, key_prefix=os.fsencode(key_prefix))
        with source.materialize(only=only, at_markers=True) as view:
            view.ready()
            lines: list[str] = []
            for key, value in view.items():
                lines.append(row_line(key, value))
                if len(lines) == _LINES_AT_ONCE:
                    print("\n".join(lines))
                    lines.clear()
            if lines:
                print("\n".join(lines))
