"""Measure a real server on this machine: see README.md beside this file.

The table goes to stdout line by line, or with ``--json`` one document at the end; progress goes to stderr.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc.aio

from tests.harness import RunningServer
from tools.bench.children import bare_server, bare_stream
from tools.bench.common import (
    MUTATIONS,
    Figure,
    Row,
    batches,
    encoded,
    print_figures,
    say,
    server,
    write_batches,
    zipfian_rows,
)
from tools.bench.delays import measure_latency, measure_starts
from tools.bench.gets import measure_gets
from tools.bench.growth import measure_growth
from tools.bench.live import measure_live
from tools.bench.merging import measure_merging
from tools.bench.replicas import measure_replicas
from tools.bench.resuming import measure_resuming
from tools.bench.secure import measure_secure
from tools.bench.singles import measure_singles
from tools.bench.values import measure_values
from upr_client import AsyncClient
from upr_protocol.limits import WRITES_IN_FLIGHT_MAX
from upr_protocol.wire.grpc import CLIENT_OPTIONS
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types
from upr_protocol.wire.v1.key_value_service_pb2_grpc import KeyValueServiceStub

BATCH_SIZES: Final = (500, 2000, 8000)
CALLS_AT_ONCE: Final = 16
"""write_many calls under way at a time."""
DRAINS: Final = 5
BARE_MESSAGES: Final = {256: 256, 512: 128}
"""KiB of a message, and how many: 64 MiB."""


# Writing.


async def ingest(target: str, rows: list[Row], size: int) -> float:
    """Write all rows through the SDK, fsynced, CALLS_AT_ONCE batches under way. Return rows a second."""
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.set(b"warm", b"")
        cut = batches(rows, size)
        began = time.perf_counter()
        await write_batches(bucket, cut, CALLS_AT_ONCE)
        return len(rows) / (time.perf_counter() - began)


async def ingest_encoded(target: str, rows: list[Row], size: int) -> float:
    """Send blocks that were encoded before, fsynced: what the server takes. Return rows a second."""
    requests = [
        kv.WriteRequest(
            write=kv.WriteBlock(
                number=number,
                durability=types.DURABILITY_DISK,
                block=encoded(batch),
                previous_number=number - 1,
            )
        )
        for number, batch in enumerate(batches(rows, size), 1)
    ]
    async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
        stub: Any = KeyValueServiceStub(channel)
        call = stub.Write()
        await call.write(kv.WriteRequest(open=kv.WriteOpen(bucket="default", producer="encoded")))
        await call.read()
        began = time.perf_counter()
        answered = 0
        for sent, request in enumerate(requests):
            if sent - answered == WRITES_IN_FLIGHT_MAX:
                await call.read()
                answered += 1
            await call.write(request)
        for _ in range(answered, len(requests)):
            result = (await call.read()).result
            assert not result.HasField("refused"), result
        taken = time.perf_counter() - began
        await call.done_writing()
        return len(rows) / taken


def measure_ingest(rows: list[Row]) -> Iterator[Figure]:
    """Each on a server of its own, so that no flush of the one before is in the way."""
    targets = {500: 250_000.0}
    for size in BATCH_SIZES:
        for name, write in (("write_many", ingest), ("pre-encoded", ingest_encoded)):
            with server() as running:
                rate = asyncio.run(write(running.target, rows, size))
            target = targets.get(size, 700_000.0) if write is ingest else None
            yield Figure(f"ingest, fsynced, {name}, {size} rows", rate, "rows/s", target)


# Draining.


async def drain(target: str, decode: bool) -> tuple[float, float, int]:
    """Follow all partitions up to now. Return rows and bytes a second after the first frame, and all rows."""
    async with AsyncClient(target) as client, client.bucket().changes(until="now") as changes:
        rows = late = size = 0
        began = time.perf_counter()
        async for batch in changes.batches():
            if not rows:
                began = time.perf_counter()
            else:
                late += batch.rows
                size += sum(block.column_bytes + block.runs.nbytes for block in batch.blocks)
            rows += len(batch.changes) if decode else batch.rows
        taken = time.perf_counter() - began
        return late / taken, size / taken, rows


async def bare(target: str, kib: int) -> float:
    """Receive messages over bare gRPC. Return bytes a second after the first one."""
    count = BARE_MESSAGES[kib]
    taken, _ = await bare_stream(target, count, kib * 1024)
    return (count - 1) * kib * 1024 / taken


def measure_drain(running: RunningServer, source: str, bare_target: str) -> Iterator[Figure]:
    """Alternate blocks, named tuples and the bare stream, and take medians."""
    floor: list[float] = []
    found: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    for _ in range(DRAINS):
        floor += [asyncio.run(bare(bare_target, kib)) for kib in BARE_MESSAGES]
        for decode, results in found.items():
            results.append(asyncio.run(drain(running.target, decode)))
    speed = statistics.median(floor)
    targets = {"tail": 1_500_000.0, "store": 2_000_000.0}
    yield Figure(f"bare gRPC stream, beside the {source}", speed / 1e6, "MB/s")
    for decode, results in found.items():
        rate, size, rows = map(statistics.median, zip(*results, strict=True))
        what, target = ("named tuples", targets[source]) if decode else ("blocks", None)
        yield Figure(
            f"drain from the {source} to {what}",
            rate,
            "rows/s",
            target,
            size / speed,
            f"{rows} rows",
        )


def measure_reading(rows: list[Row]) -> Iterator[Figure]:
    """From the tail, and after a clean restart from the store."""
    with bare_server() as bare_target, server() as running:
        asyncio.run(ingest_encoded(running.target, rows, 2000))
        yield from measure_drain(running, "tail", bare_target)
        yield from measure_starts(running, "tail")
        assert running.terminate() == 0, running.log_text()
        running.start()
        yield from measure_drain(running, "store", bare_target)
        yield from measure_starts(running, "store")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument(
        "--only",
        choices=(
            *("ingest", "singles", "reading", "get", "resume", "latency", "live", "merging"),
            *("growth", "values", "secure", "replicas"),
        ),
        help="a part of it",
    )
    options = parser.parse_args()
    say(f"{MUTATIONS} mutations")
    rows = zipfian_rows()
    parts: dict[str, Callable[[], Iterator[Figure]]] = {
        "ingest": lambda: measure_ingest(rows),
        "singles": measure_singles,
        "reading": lambda: measure_reading(rows),
        "get": measure_gets,
        "resume": measure_resuming,
        "latency": measure_latency,
        "live": measure_live,
        "merging": measure_merging,
        "values": measure_values,
        "growth": measure_growth,
        "secure": lambda: measure_secure(rows),
        "replicas": lambda: measure_replicas(rows),
    }
    chosen = [part for name, part in parts.items() if options.only in (None, name)]
    if not options.json:
        print(f"{'measure':<40}{'value':>12} {'unit':<7}{'target':>11}{'bare':>7}")
    print_figures((figure for part in chosen for figure in part()), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
