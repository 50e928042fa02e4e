"""Delays: end to end at a steady rate, starting all partitions, going on in one."""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import numpy as np

from tests.harness import RunningServer
from tools.bench.children import CHILDREN
from tools.bench.common import Figure, server
from upr_client import AsyncClient, Client, MemoryPositions, Only, Position
from upr_client.lowlevel import hello
from upr_protocol.limits import PARTITIONS

STARTS: Final = 15
RESUMES: Final = 25
LATENCY_SECONDS: Final = 5.0


async def follow_latency(target: str, durability: str) -> tuple[float, float]:
    """Follow what another process writes. Return the median and the 99th percentile in milliseconds."""
    async with AsyncClient(target) as client:
        changes = client.bucket().changes(only=Only(stability=durability))
        delays: list[int] = []
        async with changes:
            arguments = ["produce", target, str(LATENCY_SECONDS), durability]
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(CHILDREN), *arguments
            )
            wanted = int(LATENCY_SECONDS * 1000) + 1
            rows = 0
            async for batch in changes.batches():
                for change in batch.changes:
                    if change.value:
                        sent = int.from_bytes(change.value[:8], "little")
                        delays.append(time.monotonic_ns() - sent)
                rows += batch.rows
                if rows >= wanted:
                    break
            await process.wait()
        # What was sent first met cold code.
        p50, p99 = np.percentile(delays[len(delays) // 10 :], (50, 99)) / 1e6
        return float(p50), float(p99)


def measure_latency() -> Iterator[Figure]:
    """End to end at 1,000 writes a second, on a new server each."""
    for durability, targets in (("memory", (0.6, 4.0)), ("disk", (1.25, 5.0))):
        with server() as running:
            results = asyncio.run(follow_latency(running.target, durability))
        for name, value, target in zip(("p50", "p99"), results, targets, strict=True):
            yield Figure(f"end to end at 1,000/s, {durability}, {name}", value, "ms", target)


# Starting.


async def start_all(target: str) -> float:
    """Connect, ask Hello for all partitions, start them, wait for the first frame. Return seconds."""
    began = time.perf_counter()
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await hello(bucket, dict.fromkeys(range(PARTITIONS)))
        async with bucket.changes() as changes:
            await anext(changes.batches())
            return time.perf_counter() - began


async def newest_positions(target: str, partitions: range) -> dict[int, Position]:
    """Return where a consumer stands that has everything but the last mutation."""
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        answers = await hello(bucket, dict.fromkeys(partitions))
        version = bucket.version
    return {
        a.partition: Position(
            version, a.failover_id, a.failover_id, a.high_seqno - 1, a.high_seqno, (), None
        )
        for a in answers
        if a.high_seqno > 1
    }


async def resume_async(target: str, at: dict[int, Position]) -> float:
    """Connect and go on in one partition from a stored position. Return seconds until the first frame."""
    began = time.perf_counter()
    async with (
        AsyncClient(target) as client,
        client.bucket().changes(resume=MemoryPositions(at), only=Only(at)) as changes,
    ):
        await anext(changes.batches())
        return time.perf_counter() - began


def resume_sync(target: str, at: dict[int, Position]) -> float:
    """As ``resume_async``, with the client for threads."""
    began = time.perf_counter()
    with (
        Client(target) as client,
        client.bucket().changes(resume=MemoryPositions(at), only=Only(at)) as changes,
    ):
        next(changes.batches())
        return time.perf_counter() - began


def measure_starts(running: RunningServer, source: str) -> Iterator[Figure]:
    """Medians in milliseconds, each time over a connection of its own."""

    async def repeat(action: Callable[[], Awaitable[float]], times: int) -> list[float]:
        return [await action() for _ in range(times)]

    target = running.target
    seconds = asyncio.run(repeat(lambda: start_all(target), STARTS))
    name = f"connect, Hello, Start of {PARTITIONS}, {source}"
    yield Figure(name, statistics.median(seconds) * 1e3, "ms", 10.0)
    at = dict(list(asyncio.run(newest_positions(target, range(PARTITIONS))).items())[:1])
    seconds = asyncio.run(repeat(lambda: resume_async(target, at), RESUMES))
    yield Figure(f"resume of one, asyncio, {source}", statistics.median(seconds) * 1e3, "ms", 3.0)
    seconds = [resume_sync(target, at) for _ in range(RESUMES)]
    yield Figure(f"resume of one, sync, {source}", statistics.median(seconds) * 1e3, "ms", 5.0)
