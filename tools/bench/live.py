"""Live followers: what 1 to 256 followers of all partitions receive while single keys are written at a steady rate.

The followers are tasks of a few child processes, ``live.py TARGET FOLLOWERS ROWS``, each with a connection of its own.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tests.harness import RunningServer
from tools.bench.children import CHILDREN, STAMP
from tools.bench.common import Figure, server
from tools.bench.cpu import server_cpu
from upr_client import AsyncClient

FOLLOWERS: Final = (1, 8, 64, 256)
RATES: Final = (100, 1000)
SECONDS: Final = 5.0
PROCESSES: Final = 2
LATE_SECONDS: Final = 1.0
"""A change counts as delivered when it comes at most this long after it was written."""
PATIENCE_SECONDS: Final = 90.0
"""Time after which a follower that does not have all changes makes the run fail."""


@dataclass(slots=True)
class _Received:
    """Changes of one follower: the numbers of the writes, microseconds since each was written, and the frames."""

    numbers: list[npt.NDArray[np.int64]]
    delays: list[npt.NDArray[np.int64]]
    rows: int = 0
    frames: int = 0

    def add(self, values: bytes) -> None:
        """Add the values of a block; the rows that are not stamped have empty ones."""
        stamps = np.frombuffer(values, STAMP)
        self.numbers.append(stamps["number"])
        self.delays.append((time.monotonic_ns() - stamps["time"]) // 1000)
        self.rows += len(stamps)


async def _follow(
    target: str, rows: int, ready: asyncio.Queue[None], complete: asyncio.Barrier
) -> _Received:
    received = _Received([], [])
    async with AsyncClient(target) as client, client.bucket().changes() as changes:
        async for batch in changes.batches():
            if not received.frames:
                ready.put_nowait(None)
            received.frames += 1
            for block in batch.blocks:
                received.add(block.values)
            if received.rows >= rows:
                break
        # Those that are complete do not take the processor from the others to close their calls.
        await complete.wait()
    numbers = np.sort(np.concatenate(received.numbers))
    assert np.array_equal(numbers, np.arange(rows)), "a follower lacks changes, or has some twice"
    return received


async def _follow_all(target: str, followers: int, rows: int) -> None:
    """Follow; say when all followers have the first row, and at the end what they received."""
    ready: asyncio.Queue[None] = asyncio.Queue()
    complete = asyncio.Barrier(followers + 1)
    tasks = [asyncio.create_task(_follow(target, rows, ready, complete)) for _ in range(followers)]
    for _ in tasks:
        await ready.get()
    print("ready", flush=True)
    used = time.process_time()
    await complete.wait()
    used, ended = time.process_time() - used, time.monotonic()
    received = await asyncio.gather(*tasks)
    print(f"{sum(one.frames for one in received)} {used} {ended}", flush=True)
    delays = np.concatenate([delay for one in received for delay in one.delays])
    sys.stdout.buffer.write(delays.tobytes())


async def _measure(running: RunningServer, followers: int, rate: int) -> Figure:
    rows = int(SECONDS * rate)
    processes = min(PROCESSES, followers)
    async with AsyncClient(running.target) as client:
        await client.bucket().set(b"warm", b"")
    pipe = asyncio.subprocess.PIPE
    children = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, running.target, str(followers // processes), str(rows)),
            stdout=pipe,
            limit=2**20,
        )
        for _ in range(processes)
    ]
    try:
        async with asyncio.timeout(SECONDS + PATIENCE_SECONDS):
            for child in children:
                assert child.stdout is not None
                assert await child.stdout.readline() == b"ready\n"
            cpu, began = server_cpu(running), time.monotonic()
            producer = await asyncio.create_subprocess_exec(
                *(sys.executable, str(CHILDREN), "produce", running.target),
                *(str(SECONDS), "disk", str(rate)),
            )
            assert await producer.wait() == 0
            cpu = server_cpu(running) - cpu
            answers = [await child.communicate() for child in children]
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
    delays, frames, used, taken = [], 0, 0.0, 0.0
    for told, _ in answers:
        words, _, data = told.partition(b"\n")
        frames += int(words.split()[0])
        used += float(words.split()[1])
        taken = max(taken, float(words.split()[2]) - began)
        delays.append(np.frombuffer(data, np.int64) / 1e3)
    all_delays = np.concatenate(delays)
    p50, p99 = np.percentile(all_delays, (50, 99))
    in_time = np.count_nonzero(all_delays <= LATE_SECONDS * 1e3) / len(all_delays)
    note = (
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, cores {cpu / taken:.2f} + {used / taken:.2f}, "
        f"{frames / taken:,.0f} frames/s"
    )
    return Figure(f"{followers} live followers, {rate}/s", in_time * 100, "%", 100.0, note=note)


def measure_live() -> Iterator[Figure]:
    """Each on a server of its own; the note has the delays, the cores of server + followers, and all frames."""
    for followers in FOLLOWERS:
        for rate in RATES:
            with server() as running:
                yield asyncio.run(_measure(running, followers, rate))


if __name__ == "__main__":
    asyncio.run(_follow_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
