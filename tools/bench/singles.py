"""Single writes, each awaited, by 1 to 256 tasks of a process: their rate, CPU at both ends, and a bare unary call beside them."""

import asyncio
import time
from collections.abc import Iterator
from typing import Final

import grpc.aio
import numpy as np

from tests.harness import RunningServer
from tools.bench.children import bare_calls, bare_server
from tools.bench.common import VALUE_BYTES, Figure, server
from tools.bench.cpu import watch
from upr_client import AsyncClient
from upr_client.types import AsyncBucket
from upr_protocol.wire.grpc import CLIENT_OPTIONS

TASKS: Final = {1: 2_000, 16: 10_000, 64: 30_000, 256: 60_000}
"""Tasks that each await one ``set`` after the other, and the rows of all of them."""
BARE_CALLS: Final = 500


async def awaited_sets(
    bucket: AsyncBucket, tasks: int, rows: int, durability: str = "disk"
) -> list[float]:
    """Write rows in tasks that each await one ``set`` after the other; return how long each took, in seconds."""
    value = b"v" * VALUE_BYTES
    delays: list[float] = []

    async def write(task: int) -> None:
        for number in range(rows // tasks):
            began = time.perf_counter()
            await bucket.set(b"key-%05d-%06d" % (task, number), value, durability)
            delays.append(time.perf_counter() - began)

    await asyncio.gather(*map(write, range(tasks)))
    return delays


async def _measure(running: RunningServer, bare: str, tasks: int, rows: int) -> Figure:
    async with (
        AsyncClient(running.target) as client,
        grpc.aio.insecure_channel(bare, options=CLIENT_OPTIONS) as channel,
    ):
        bucket = client.bucket()
        await awaited_sets(bucket, tasks, tasks * 10)
        await bare_calls(channel, 3)
        floors = await bare_calls(channel, BARE_CALLS)
        spent = watch(running)
        delays = await awaited_sets(bucket, tasks, rows)
        taken, *used = spent()
        p50, p99 = np.percentile(delays, (50, 99)) * 1e3
        floor = float(np.median(floors + await bare_calls(channel, BARE_CALLS)))
    server_row, client_row = (seconds / len(delays) * 1e6 for seconds in used)
    note = f"p50 {p50:.1f} ms, {p50 / floor:.1f} bare calls of {floor:.2f} ms, p99 {p99:.1f} ms, CPU a row {server_row:.0f} + {client_row:.0f} us"
    rate = len(delays) / taken
    return Figure(f"set, awaited, fsynced, {tasks} tasks", rate, "rows/s", note=note)


def measure_singles() -> Iterator[Figure]:
    """Each on a server of its own; the note has the delays, and the CPU of the server and of the client."""
    for tasks, rows in TASKS.items():
        with bare_server() as bare, server() as running:
            yield asyncio.run(_measure(running, bare, tasks, rows))
