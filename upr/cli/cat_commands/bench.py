"""``upr-cat bench``: how fast a server takes, shows and finds rows, from where the command runs."""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from upr.cli.cat_commands.keys import Durability, durability_option, open_bucket
from upr_cli_kit.options import server_options
from upr_cli_kit.output import Progress, output_options, print_result
from upr_protocol.errors import UnavailableError
from upr_protocol.limits import VALUE_BYTES_MAX

if TYPE_CHECKING:
    from upr_client.types import Bucket, Changes

_RETRY_SECONDS: Final = 10.0
_PORTION_BYTES: Final = 4 * 2**20
_PORTION_ROWS: Final = 10_000
_SINGLES: Final = 200
"""Writes and reads of one key each, one after the other."""
_RATES: Final = ("rows_written", "rows_followed")


@click.command("bench")
@click.option("--rows", type=click.IntRange(1, 10**8), default=100_000, show_default=True)
@click.option(
    "--value-bytes", type=click.IntRange(0, VALUE_BYTES_MAX), default=100, show_default=True
)
@durability_option
@output_options
@server_options
def bench(
    rows: int, value_bytes: int, durability: Durability, as_json: bool, target: str, bucket: str
) -> None:
    """Write rows, follow them, and set and get single keys; print how long it took.

    All keys begin with 'upr-bench:', and are deleted at the end; their deletions stay until they are purged.
    """
    prefix = b"upr-bench:%s:" % secrets.token_hex(4).encode()
    with (
        open_bucket(target, bucket, retry_seconds=_RETRY_SECONDS) as source,
        _interrupted_by_signals(),
    ):
        written = [range(_SINGLES)]
        try:
            measured = {
                **_measure_rows(source, prefix, rows, value_bytes, durability, written),
                "set_ms": _each(lambda key: source.set(key, b"1", durability), prefix),
                "get_ms": _each(source.get, prefix),
            }
        finally:
            for part in written:
                source.write_many([(_key(prefix, number), None) for number in part], "memory")
    table = [(f"{measured[name]:,.0f}", f"{name.replace('_', ' ')} a second") for name in _RATES]
    for name in ("set", "get"):
        times = measured[f"{name}_ms"]
        words = f"ms for one {name}, 99 of 100 within {times['p99']:.1f} ms"
        table.append((f"{times['median']:.1f}", words))
    document = {"rows": rows, "value_bytes": value_bytes, "durability": durability, **measured}
    print_result(as_json, document, "\n".join(f"{number:>10} {words}" for number, words in table))


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Have the signals that end a process be a Ctrl-C, which leaves time to delete the keys; not those that are ignored."""
    ending = (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _key(prefix: bytes, number: int) -> bytes:
    return b"%s%08d" % (prefix, number)


def _portions(rows: int, row_bytes: int) -> Iterator[range]:
    """Yield the numbers of all rows, in portions of which one is written at a time."""
    count = max(1, min(_PORTION_ROWS, _PORTION_BYTES // row_bytes))
    for first in range(0, rows, count):
        yield range(first, min(first + count, rows))


def _measure_rows(
    bucket: "Bucket",
    prefix: bytes,
    rows: int,
    value_bytes: int,
    durability: Durability,
    written: list[range],
) -> dict[str, Any]:
    """Write the rows while a follower takes them, and return both rates; what may be there is added to ``written``."""
    from upr_client import Only

    # Of bytes that hardly compress, and other ones in each row.
    content = os.urandom(value_bytes + 4096)
    progress = Progress("rows written", rows)
    only = Only(key_prefix=prefix)
    with (
        bucket.changes(start="now", only=only, on_rollback="event") as changes,
        ThreadPoolExecutor(1, "upr-bench-follower") as pool,
    ):
        if not changes.ready(_RETRY_SECONDS):
            raise UnavailableError(f"no stream was started within {_RETRY_SECONDS:g} s")
        following = pool.submit(_take, changes, rows)
        try:
            started = time.monotonic()
            for part in _portions(rows, len(_key(prefix, 0)) + value_bytes):
                written.append(part)
                values = (content[i % 4096 : i % 4096 + value_bytes] for i in part)
                keys = (_key(prefix, number) for number in part)
                bucket.write_many(zip(keys, values, strict=True), durability)
                progress.update(part.stop)
            write_seconds = time.monotonic() - started
            follow_seconds = following.result() - started
        finally:
            changes.stop()
    progress.close()
    return {"rows_written": rows / write_seconds, "rows_followed": rows / follow_seconds}


def _take(changes: "Changes", rows: int) -> float:
    """Take so many rows, and return when the last of them came."""
    from upr_client import Rollback

    taken = 0
    for batch in changes.batches():
        if isinstance(batch, Rollback):
            # Rows that will not come: waiting for them would not end.
            raise UnavailableError("the server lost rows while they were counted")
        taken += sum(block.rows for block in batch.blocks)
        if taken >= rows:
            return time.monotonic()
    raise UnavailableError("the follower ended before it had all rows")


def _each(call: Callable[[bytes], object], prefix: bytes) -> dict[str, float]:
    """Return how many milliseconds a call with one key takes: the median, and what 99 of 100 stay within."""
    took = []
    for number in range(_SINGLES):
        started = time.monotonic()
        call(_key(prefix, number))
        took.append((time.monotonic() - started) * 1000)
    took.sort()
    return {"median": took[_SINGLES // 2], "p99": took[_SINGLES * 99 // 100]}
