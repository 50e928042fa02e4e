"""Replicas: what 0, 1 and 2 of them cost the active server, how far behind they are, and ``replicated(1)`` beside ``disk``.

The rows are the same for all, and what each server has is compared in the end with what was written. Each number of replicas has
two turns, in both orders, after one that does not count. How far it is from the active server to a replica is asked of
both every LOOK_SECONDS, the replica first, so that it is never told too short, in a pass of its own: looks cost both.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Final

import numpy as np

from tests.harness import RunningServer
from tests.replica.sets import state_of, wait_for, wait_until_counted, wait_until_equal
from tools.bench.common import Figure, Row, WrongResultError, batches, server, write_batches
from tools.bench.cpu import server_cpu
from tools.bench.singles import awaited_sets
from upr_client import AsyncClient, Only

REPLICAS: Final = (0, 1, 2)
PASSES: Final = 2
BATCH_ROWS: Final = 2000
CALLS_AT_ONCE: Final = 16
LOOK_SECONDS: Final = 0.1
TASKS: Final = {1: 1_000, 16: 4_000}
"""Tasks that each await one ``set`` after the other, and the rows of all of them in each of four turns."""
DURABILITIES: Final = ("disk", "replicated(1)", "replicated(1)", "disk")
"""Turns: both ways round, so that neither is always the one that comes later."""


@contextmanager
def server_set(replicas: int) -> Iterator[list[RunningServer]]:
    """Run a new active server and counted replicas of it."""
    with ExitStack() as stack:
        servers = [stack.enter_context(server())]
        for _ in range(replicas):
            upstream = servers[0].target
            servers.append(stack.enter_context(server("--replicate-from", upstream)))
        if replicas:
            wait_until_counted(servers, servers[0])
        yield servers


@dataclass(slots=True)
class _Lag:
    """How far a replica is behind: looks at it and at the active server."""

    looks: list[tuple[float, int, int]]
    """When, the durable seqnos of the replica, and then the high seqnos of the active server, over all partitions."""

    @property
    def rows(self) -> int:
        """The most that was seen."""
        return max(high - durable for _, durable, high in self.looks)

    @property
    def seconds(self) -> float:
        """The longest time until the replica was seen to have what the active server had been seen to have."""
        times, durable, highs = map(np.array, zip(*self.looks, strict=True))
        found = np.searchsorted(durable, highs)
        reached = found < len(times)
        return float((times[found[reached]] - times[reached]).max())


async def _looking(servers: list[RunningServer], lags: list[_Lag], done: asyncio.Event) -> None:
    """Look at all servers until the writing is done and the replicas have everything."""
    clients = [AsyncClient(one.target) for one in servers]
    try:
        while True:
            was_done = done.is_set()
            *behind, high = [
                await _seqnos(client, durable=client is not clients[0])
                for client in (*clients[1:], clients[0])
            ]
            now = time.perf_counter()
            for lag, durable in zip(lags, behind, strict=True):
                lag.looks.append((now, durable, high))
            if was_done and all(durable == high for durable in behind):
                return
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        for client in clients:
            await client.close()


async def _seqnos(client: AsyncClient, *, durable: bool) -> int:
    found = await client.admin.partitions("default")
    return sum(one.durable_seqno if durable else one.high_seqno for one in found)


async def _state(target: str) -> dict[bytes, bytes | None]:
    """Return what a server itself shows."""
    state: dict[bytes, bytes | None] = {}
    async with AsyncClient(target) as client:
        only = Only(stability="disk")
        changes = client.bucket().changes(until="now", only=only, read_from="any")
        async with changes:
            async for batch in changes.batches():
                state |= batch.items()
    return state


async def _write(server: RunningServer, rows: list[Row], passes: int) -> float:
    """Write all rows so many times, fsynced; return the seconds."""
    async with AsyncClient(server.target) as client:
        began = time.perf_counter()
        for _ in range(passes):
            await write_batches(client.bucket(), batches(rows, BATCH_ROWS), CALLS_AT_ONCE)
        return time.perf_counter() - began


async def _lags(servers: list[RunningServer], rows: list[Row]) -> list[_Lag]:
    """Write all rows once; return how far the replicas were behind."""
    lags, done = [_Lag([]) for _ in servers[1:]], asyncio.Event()
    looking = asyncio.create_task(_looking(servers, lags, done))
    await _write(servers[0], rows, 1)
    done.set()
    await looking
    return lags


def _check(servers: list[RunningServer], rows: list[Row]) -> None:
    """Raise unless all servers have the same, and of each key a value that was written: the calls are in no order."""
    written: dict[bytes, set[bytes | None]] = {}
    for key, value in rows:
        written.setdefault(key, set()).add(value)
    states = [asyncio.run(_state(one.target)) for one in servers]
    if any(state != states[0] for state in states):
        raise WrongResultError("a replica has not what the active server has")
    if states[0].keys() != written.keys() or any(
        value not in written[key] for key, value in states[0].items()
    ):
        raise WrongResultError("the active server has not what was written")


@dataclass(slots=True)
class _Turn:
    """What was measured of one set."""

    seconds: float
    cpu: list[float]
    """Microseconds a row that each server used, the active one first."""
    lags: list[_Lag]


def _turn(replicas: int, rows: list[Row]) -> _Turn:
    """Write to a new set: PASSES times with nobody looking, and once more for how far the replicas are behind."""
    with server_set(replicas) as servers:
        before = [server_cpu(one) for one in servers]
        seconds = asyncio.run(_write(servers[0], rows, PASSES))
        highs = [high for _, high, _ in state_of(servers[0].target)]
        # Looks at a replica are charged to that one: few, and after the writing.
        for one in servers[1:]:
            wait_for(
                lambda one=one: [durable for *_, durable in state_of(one.target)] == highs,  # type: ignore[misc]
                "a replica to have everything",
            )
        cpu = [
            (server_cpu(one) - then) / (PASSES * len(rows)) * 1e6
            for one, then in zip(servers, before, strict=True)
        ]
        lags = asyncio.run(_lags(servers, rows)) if replicas else []
        _check(servers, rows)
    return _Turn(seconds, cpu, lags)


def measure_replicas(rows: list[Row]) -> Iterator[Figure]:
    """Ingest with 0, 1 and 2 replicas; single writes at ``disk`` and ``replicated(1)`` on one set."""
    # What is measured first meets cold code and a cold disk.
    _turn(1, rows[: len(rows) // 4])
    turns: dict[int, list[_Turn]] = {}
    for replicas in (*REPLICAS, *reversed(REPLICAS)):
        turns.setdefault(replicas, []).append(_turn(replicas, rows))
    rates = {n: PASSES * len(rows) / mean(one.seconds for one in both) for n, both in turns.items()}
    costs: list[float] = []
    for replicas, both in turns.items():
        used = [mean(one) for one in zip(*(turn.cpu for turn in both), strict=True)]
        note = f"CPU a row {used[0]:.2f} us"
        if replicas:
            each = ", ".join(f"{one:.2f}" for one in used[1:])
            lags = [lag for turn in both for lag in turn.lags]
            note += (
                f", at replicas {each}; {rates[replicas] / rates[0]:.2f} times the rate with 0; behind at most"
                f" {max(lag.rows for lag in lags):,} rows, {max(lag.seconds for lag in lags):.2f} s"
            )
        yield Figure(f"ingest, fsynced, {replicas} replicas", rates[replicas], "rows/s", note=note)
        costs.append(used[0])
    more = ", ".join(f"{b - a:.2f}" for a, b in itertools.pairwise(costs))
    cost = (costs[-1] - costs[0]) / REPLICAS[-1]
    yield Figure(
        "CPU of a replica at its upstream", cost, "us/row", note=f"of the first, the second: {more}"
    )
    with server_set(1) as servers:
        yield from _durabilities(servers)


def _durabilities(servers: list[RunningServer]) -> Iterator[Figure]:
    async def turn(tasks: int, rows: int, durability: str) -> list[float]:
        async with AsyncClient(servers[0].target) as client:
            bucket = client.bucket()
            # What is sent first meets cold code.
            await awaited_sets(bucket, tasks, tasks * 10, durability)
            return await awaited_sets(bucket, tasks, rows, durability)

    for tasks, rows in TASKS.items():
        delays: dict[str, list[float]] = {}
        for durability in DURABILITIES:
            delays.setdefault(durability, []).extend(asyncio.run(turn(tasks, rows, durability)))
        found = {
            durability: np.percentile(one, (50, 99)) * 1e3 for durability, one in delays.items()
        }
        for durability, (p50, p99) in found.items():
            ratios = found[durability] / found["disk"]
            note = f"p99 {p99:.2f} ms"
            if durability != "disk":
                note += f"; {ratios[0]:.2f} times disk, p99 {ratios[1]:.2f} times"
            yield Figure(f"set, awaited, {durability}, {tasks} tasks, p50", p50, "ms", note=note)
    wait_until_equal(servers)
    states = [asyncio.run(_state(one.target)) for one in servers]
    keys = {
        b"key-%05d-%06d" % (task, number)
        for tasks, rows in TASKS.items()
        for task in range(tasks)
        for number in range(rows // tasks)
    }
    if states[0] != states[1] or states[0].keys() != keys:
        raise WrongResultError("the replica has not what the active server has")
