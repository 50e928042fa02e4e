"""Costs and savings of compaction, on overwrites and on keys that are all different."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np

from tools.bench.common import Figure, Row, batches, server, zipfian_rows
from upr.config import TAIL_BYTES
from upr_client import AsyncClient
from upr_client.admin import StorageInfo

ZIPFIAN = 2_000_000
UNIQUE = 1_000_000
BATCH = 4_000
IN_FLIGHT = 8
SETTLED_SECONDS = 120.0


def unique_rows(count: int) -> list[Row]:
    """Return mutations of as many keys, shaped as the zipfian ones."""
    data = np.random.default_rng(2).bytes(count + 128)
    return [(b"one-%012d" % i, data[i : i + 128]) for i in range(count)]


def live_bytes(rows: list[Row]) -> int:
    """Return the bytes of the keys and values that are left when all was written."""
    return sum(len(key) + len(value) for key, value in dict(rows).items() if value is not None)


async def _load(target: str, rows: list[Row]) -> AsyncIterator[StorageInfo]:
    """Write everything and yield what the store says meanwhile, last when all is merged."""
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        places = asyncio.Semaphore(IN_FLIGHT)

        async def write(batch: list[Row]) -> None:
            async with places:
                await bucket.write_many(batch)

        async with asyncio.TaskGroup() as group:
            for number, batch in enumerate(batches(rows, BATCH)):
                await places.acquire()
                places.release()
                group.create_task(write(batch))
                if number % 50 == 49:
                    yield await client.admin.storage(bucket)
        async with asyncio.timeout(SETTLED_SECONDS):
            while True:
                found = await client.admin.storage(bucket)
                if not found.partitions_to_merge and not found.tail_bytes:
                    break
                # Only the server knows when it is done, and does not tell.
                await asyncio.sleep(0.2)
        yield found


async def _measure(target: str, name: str, rows: list[Row]) -> list[Figure]:
    seen = [found async for found in _load(target, rows)]
    last, live = seen[-1], live_bytes(rows)
    worst = max(found.used_bytes for found in seen)
    return [
        Figure(
            f"merging, {name}",
            last.merge_input_rows / max(last.merge_seconds, 1e-9),
            "rows/s",
            note=f"{last.merge_input_rows:,} rows in {last.merge_seconds:.1f} s beside writing",
        ),
        Figure(
            f"write amplification, {name}",
            last.write_amplification or 0.0,
            "x",
            note="journal, flush and merges, of what was ingested",
        ),
        Figure(
            f"pages in use at most, {name}",
            worst / 2**20,
            "MiB",
            target=(2 * live + TAIL_BYTES) / 2**20,
            note=f"in the end {last.used_bytes / 2**20:.0f}, of it alive {live / 2**20:.0f}; "
            f"file {last.file_bytes / 2**20:.0f}",
        ),
    ]


def measure_merging() -> Iterator[Figure]:
    """Yield throughput, write amplification and space for both kinds of keys."""
    for name, rows in (("zipfian", zipfian_rows(ZIPFIAN)), ("unique", unique_rows(UNIQUE))):
        with server("--flush-seconds", "1") as running:
            yield from asyncio.run(_measure(running.target, name, rows))
