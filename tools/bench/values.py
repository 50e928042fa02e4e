"""Values of 128 bytes to 1 MiB: what a MB costs both ends when it is written and when it is read from the tail, beside a bare stream."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from tests.harness import RunningServer
from tools.bench.children import bare_server, bare_stream
from tools.bench.common import (
    Figure,
    Row,
    WrongResultError,
    batches,
    drain,
    server,
    write_batches,
)
from tools.bench.cpu import watch
from upr_client import AsyncClient

SIZES: Final = {"128 B": 128, "1 KiB": 2**10, "16 KiB": 2**14, "1 MiB": 2**20}
TOTAL: Final = 40 * 2**20
"""Bytes of values that are written of each size."""
BATCH: Final = 2**20
OPTIONS: Final = ("--flush-seconds", "3600")
"""Of the server: everything stays in the tail, which is not made larger, as the server ends calls when it holds much."""
AT_ONCE: Final = 4


def _rows(size: int) -> list[Row]:
    data = random.Random(size).randbytes(size + TOTAL // size)
    return [(b"key-%012d" % at, data[at : at + size]) for at in range(TOTAL // size)]


async def _timed(
    running: RunningServer, what: str, mb: float, work: Callable[[], Awaitable[Any]]
) -> Figure:
    spent = watch(running)
    await work()
    taken, served, client = spent()
    note = f"CPU a MB: server {served * 1e3 / mb:.1f} + client {client * 1e3 / mb:.1f} ms"
    return Figure(what, mb / taken, "MB/s", note=note)


async def _measure(running: RunningServer, name: str, size: int) -> Iterator[Figure]:
    rows = _rows(size)
    mb = sum(len(key) + len(value or b"") for key, value in rows) / 1e6
    count = 0

    async def read_all() -> None:
        nonlocal count
        async with AsyncClient(running.target) as client:
            count = await drain(client)

    async with AsyncClient(running.target) as client:
        bucket = client.bucket()
        cut = batches(rows, max(BATCH // size, 1))
        first, rest = cut[:2], cut[2:]
        await write_batches(bucket, first, AT_ONCE)
        share = len(rest) / len(cut)
        written = await _timed(
            running,
            f"write, values of {name}",
            mb * share,
            lambda: write_batches(bucket, rest, AT_ONCE),
        )
    read = await _timed(running, f"drain to blocks, values of {name}", mb, read_all)
    if count != len(rows):
        raise WrongResultError(f"{count} rows were read; must be {len(rows)}")
    return iter([written, read])


async def _bare(target: str) -> Figure:
    count = TOTAL // BATCH
    taken, spent = await bare_stream(target, count, BATCH)
    mb = (count - 1) * BATCH / 1e6
    return Figure(
        "bare gRPC stream, messages of 1 MiB",
        mb / taken,
        "MB/s",
        note=f"CPU a MB: client {spent * 1e3 / mb:.1f} ms",
    )


def measure_values() -> Iterator[Figure]:
    """Each size on a server of its own, and the bare stream behind it."""
    with bare_server() as bare:
        for name, size in SIZES.items():
            with server(*OPTIONS) as running:
                yield from asyncio.run(_measure(running, name, size))
            yield asyncio.run(_bare(bare))
