"""Growth of a bucket: what sustained ingest of keys that are all different, a restart, drains and gets cost, by the number
of rows.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import grpc.aio
import numpy as np

from tests.harness import RunningServer
from tools.bench.children import bare_calls, bare_server
from tools.bench.common import VALUE_BYTES, Figure, Row, WrongResultError, drain, server
from tools.bench.cpu import Spent, until_idle, watch
from upr_client import AsyncClient
from upr_client.types import AsyncBucket
from upr_protocol.wire.grpc import CLIENT_OPTIONS

SIZES: Final = (200_000, 2_000_000, 10_000_000)
BATCH: Final = 2000
TASKS: Final = 16
"""write_many calls under way at a time; the rows of no more are in memory."""
KEPT: Final = 0.8
"""Target: the rate of the largest bucket as a share of the smallest one's."""
DEARER: Final = 2.0
"""Target: CPU a row of a drain right after a restart, in that of a drain of the tail."""
GETS: Final = 2000
CALLS: Final = 2.0
"""Target: p50 of a get, in bare unary calls of the same run."""
_KEY_BYTES: Final = 16
_DATA: Final = random.Random(1).randbytes(BATCH + VALUE_BYTES)


class _Cost(NamedTuple):
    """Rows, and what they took."""

    rows: int
    spent: Spent

    @property
    def rate(self) -> float:
        return self.rows / self.spent.taken

    @property
    def micros(self) -> float:
        """CPU of both, microseconds a row."""
        return (self.spent.server + self.spent.client) / self.rows * 1e6

    def words(self) -> str:
        shares = (seconds / self.rows * 1e6 for seconds in self.spent[1:])
        return "CPU {:.2f} + {:.2f} us a row".format(*shares)


def _batch(first: int) -> list[Row]:
    return [(b"key-%012d" % (first + at), _DATA[at : at + VALUE_BYTES]) for at in range(BATCH)]


async def _write(bucket: AsyncBucket, firsts: Iterator[int]) -> None:
    for first in firsts:
        await bucket.write_many(_batch(first))


async def _ingest(running: RunningServer, rows: int) -> tuple[_Cost, _Cost]:
    """Write so many new keys, fsynced. Return what all of them cost, and the last tenth."""
    async with AsyncClient(running.target) as client:
        bucket = client.bucket()
        await bucket.set(b"key-%012d" % 0, b"")
        last = rows - rows // 10
        spent = watch(running)
        for part in (range(0, last, BATCH), range(last, rows, BATCH)):
            late = watch(running)
            firsts = iter(part)
            async with asyncio.TaskGroup() as group:
                for _ in range(TASKS):
                    group.create_task(_write(bucket, firsts))
        return _Cost(rows, spent()), _Cost(rows - last, late())


async def _drain(running: RunningServer, rows: int) -> _Cost:
    """Read all blocks; there must be so many rows, besides the first one's older version that may still be there."""
    spent = watch(running)
    async with AsyncClient(running.target) as client:
        found = await drain(client)
    if found not in (rows, rows + 1):
        raise WrongResultError(f"{found} rows were read; {rows} were written")
    return _Cost(rows, spent())


async def _gets(running: RunningServer, bare: str, rows: int) -> tuple[float, float]:
    """Get keys here and there, one after the other; return p50 in milliseconds, and that of a bare unary call."""
    draw = random.Random(2)
    taken = []
    async with (
        AsyncClient(running.target) as client,
        grpc.aio.insecure_channel(bare, options=CLIENT_OPTIONS) as channel,
    ):
        bucket = client.bucket()
        calls = await bare_calls(channel, GETS // 2)
        for _ in range(GETS):
            # The first one was written twice.
            number = draw.randrange(1, rows)
            began = time.perf_counter()
            value = await bucket.get(b"key-%012d" % number)
            taken.append((time.perf_counter() - began) * 1e3)
            at = number % BATCH
            if value != _DATA[at : at + VALUE_BYTES]:
                raise WrongResultError(f"key {number} has another value")
        calls += await bare_calls(channel, GETS // 2)
    return float(np.median(taken)), float(np.median(calls))


def _anonymous(running: RunningServer) -> float:
    """Return the MiB of memory that are the server's alone."""
    status = Path(f"/proc/{running.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


def _measure(rows: int, tail: list[_Cost]) -> Iterator[Figure]:
    """Yield the figures of one size; ``tail`` is what the drain of the smallest bucket cost, and is filled with it."""
    name = f"{rows / 1e6:g} M rows"
    with server() as running:
        cost, late = asyncio.run(_ingest(running, rows))
        yield Figure(f"{name}: ingest, fsynced", cost.rate, "rows/s", note=cost.words())
        yield Figure(f"{name}: the last tenth of it", late.rate, "rows/s", note=late.words())
        yield Figure(f"{name}: memory after it", _anonymous(running), "MiB", note="anonymous")
        if not tail:
            tail.append(asyncio.run(_drain(running, rows)))
            note = tail[0].words()
            yield Figure(f"{name}: drain of the tail", tail[0].rate, "rows/s", note=note)
        spent = watch(running)
        until_idle(running)
        settled = spent()
        note = f"server, {settled.taken:.1f} s"
        yield Figure(f"{name}: settling", settled.server / rows * 1e6, "us/row", note=note)
        began = time.perf_counter()
        assert running.terminate() == 0, running.log_text()
        stopped = time.perf_counter()
        running.start(prefix=["env"])
        note = f"the stop {stopped - began:.2f} s"
        yield Figure(f"{name}: start", time.perf_counter() - stopped, "s", note=note)
        used = sum(file.stat().st_blocks * 512 for file in running.data.rglob("*"))
        live = rows * (_KEY_BYTES + VALUE_BYTES)
        yield Figure(f"{name}: disk, of what is alive", used / live, "x")
        drained = asyncio.run(_drain(running, rows))
        note = drained.words()
        yield Figure(f"{name}: drain after the start", drained.rate, "rows/s", note=note)
        dearer = drained.micros / tail[0].micros
        yield Figure(f"{name}: its CPU, of the tail's", dearer, "x", DEARER)
        with bare_server() as bare:
            p50, call = asyncio.run(_gets(running, bare, rows))
        note = f"{p50:.2f} ms, a bare call {call:.2f}"
        yield Figure(f"{name}: get, p50, in bare calls", p50 / call, "x", CALLS, note=note)


def measure_growth(sizes: tuple[int, ...] = SIZES) -> Iterator[Figure]:
    """Yield the figures of each size, each on a new server, and how much of the smallest one's rate the largest keeps."""
    tail: list[_Cost] = []
    rates = []
    for rows in sizes:
        for figure in _measure(rows, tail):
            if figure.name.endswith("ingest, fsynced"):
                rates.append(figure.value)
            yield figure
    yield Figure("ingest, largest to smallest", rates[-1] / rates[0], "x", KEPT)
