"""Measures that are the same for every store: each yields figures, and compares what it read with what was written."""

import asyncio
import multiprocessing
import shutil
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from tools.bench.common import VALUE_BYTES, Row, WrongResultError, tree_cpu, zipfian_rows
from tools.bench.peers.servers import KINDS, MANY, Running, running
from tools.bench.peers.stores import KeyedStore, Store, Upr, dealt, write_all
from upr_protocol.limits import PARTITIONS
from upr_protocol.partitioning import partition_of

TASKS: Final = {1: 1_000, 16: 8_000, 64: 16_000, 256: 32_000}
"""Tasks that each await one write after the other, and the writes of all of them."""
PER_SECOND: Final = 1_000
TAIL_SECONDS: Final = 5.0
TAIL_LIMIT_SECONDS: Final = 60.0
CONSUMERS: Final = 8
LARGE_ROWS: Final = 10_000_000
OURS: Final = next(iter(KINDS))
OBJECTS: Final = "objects"
ARROW: Final = "Arrow"
"""What changes are read as. Arrow is of this server alone, and compared with what the peers have: objects."""
JOIN_SECONDS: Final = 10.0
RESUMES: Final = 25
KEPT: Final = 10_000
"""Keys that can be read."""
GETS: Final = 2_000
_MILLI: Final = 1e3


@dataclass(frozen=True, slots=True)
class Measured:
    """Figure of one store; ``server_cores`` and ``client_cores`` are those that were busy meanwhile."""

    measure: str
    value: float
    unit: str
    server_cores: float = 0.0
    client_cores: float = 0.0


class Timer:
    """The time and the CPU of both ends, between two moments."""

    def __init__(self, peer: Running) -> None:
        self._peer = peer
        self._server, self._client = tree_cpu(peer.pid), time.process_time()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Return the time since it was made."""
        return time.perf_counter() - self._began

    def figure(self, measure: str, value: float, unit: str) -> Measured:
        """Return a figure with the cores that were busy; children of the measuring process are not in it."""
        seconds = self.seconds()
        return Measured(
            measure,
            value,
            unit,
            (tree_cpu(self._peer.pid) - self._server) / seconds,
            (time.process_time() - self._client) / seconds,
        )


@asynccontextmanager
async def connected(name: str, address: str) -> AsyncIterator[Store]:
    store = KINDS[name].store(address)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


# Writing.


async def _singles(name: str, peer: Running, tasks: int, rows: int) -> Iterator[Measured]:
    value = b"v" * VALUE_BYTES
    delays: list[float] = []

    async def write(store: Store, task: int, count: int) -> None:
        for number in range(count):
            began = time.perf_counter()
            await store.set(b"key-%05d-%06d" % (task, number), value)
            delays.append(time.perf_counter() - began)

    async with connected(name, peer.address) as store:
        # What is sent first meets cold code and connections that are not there yet.
        await asyncio.gather(*(write(store, task, 5) for task in range(tasks)))
        delays.clear()
        timer = Timer(peer)
        await asyncio.gather(*(write(store, task, rows // tasks) for task in range(tasks)))
        rate = timer.figure(f"set, {tasks} tasks", len(delays) / timer.seconds(), "rows/s")
    p50, p99 = np.percentile(delays, (50, 99)) * _MILLI
    name = f"set, {tasks} tasks, "
    return iter([rate, Measured(name + "p50", p50, "ms"), Measured(name + "p99", p99, "ms")])


def singles(name: str) -> Iterator[Measured]:
    """Writes that are awaited one by one, in one process of many tasks."""
    with running(name) as peer:
        for tasks, rows in TASKS.items():
            yield from asyncio.run(_singles(name, peer, tasks, rows))


# In bulk.


def _live(state: Iterable[tuple[bytes, bytes | None]]) -> dict[bytes, bytes]:
    return {key: value for key, value in state if value is not None}


def _digest(live: dict[bytes, bytes]) -> tuple[int, int]:
    """Return what to compare with another process: the number of keys, and a CRC32 of them and their values."""
    return len(live), zlib.crc32(repr(sorted(live.items())).encode())


def _check(rows: list[Row], state: dict[bytes, bytes]) -> None:
    live = _live(dict(rows).items())
    if state != live:
        wrong = sum(state.get(key) != value for key, value in live.items())
        raise WrongResultError(f"{wrong} of {len(live)} keys are wrong, and {len(state)} were read")


class Drained:
    """Changes that were read: folded into objects at once, or Arrow record batches, which are folded when asked for."""

    def __init__(self) -> None:
        self.rows = 0
        self._state: dict[bytes, bytes | None] = {}
        self._arrow: list[pa.RecordBatch] = []

    async def read(self, store: Store, total: int, *, arrow: bool) -> None:
        """Read all changes. The deletions stay as None, which costs no second look at a row."""
        if arrow:
            assert isinstance(store, Upr)
            async for batch in store.arrow():
                self._arrow.append(batch)
                self.rows += batch.num_rows
        else:
            async for rows in store.drain(total):
                self._state.update(rows)
                self.rows += len(rows)

    def live(self) -> dict[bytes, bytes]:
        """Return what was not deleted in the end."""
        for batch in self._arrow:
            keys, values = (batch.column(name).to_pylist() for name in ("key", "value"))
            self._state.update(zip(keys, values, strict=True))
        return _live(self._state.items())


def _forms(name: str) -> Iterator[tuple[bool, str]]:
    """Yield whether it is Arrow, and the form's name."""
    yield False, OBJECTS
    if name == OURS:
        yield True, ARROW


async def _bulk(name: str, peer: Running, rows: list[Row], of: str = "") -> Iterator[Measured]:
    lanes = dealt(rows)
    timer = Timer(peer)
    async with connected(name, peer.address) as store:
        await write_all(store, lanes)
        ingest = timer.figure(f"bulk ingest{of}", len(rows) / timer.seconds(), "rows/s")
    drains = []
    for arrow, form in _forms(name):
        drained, timer = Drained(), Timer(peer)
        async with connected(name, peer.address) as store:
            await drained.read(store, len(rows), arrow=arrow)
            rate = drained.rows / timer.seconds()
            drains.append(timer.figure(f"drain{of} to {form}", rate, "rows/s"))
        _check(rows, drained.live())
    return iter([ingest, *drains])


def _consume(name: str, address: str, total: int, arrow: bool, pipe: Connection) -> None:
    """Drain once when told to, in a process of its own, and say when asked what came of it."""
    drained = Drained()

    async def consume() -> None:
        async with connected(name, address) as store:
            await drained.read(store, total, arrow=arrow)
            pipe.send(drained.rows)

    pipe.send("ready")
    pipe.recv()
    asyncio.run(consume())
    # Not in the time, which goes on until all are done.
    pipe.recv()
    pipe.send(_digest(drained.live()))


def _consumers(name: str, peer: Running, rows: list[Row], arrow: bool, form: str) -> Measured:
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for _ in range(CONSUMERS):
            here, there = spawn.Pipe()
            work = (name, peer.address, len(rows), arrow, there)
            process = spawn.Process(target=_consume, args=work)
            process.start()
            # The other end is the child's alone, so that its death ends the waiting, with EOFError.
            there.close()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        timer = Timer(peer)
        for pipe in pipes:
            pipe.send("go")
        rate = sum([pipe.recv() for pipe in pipes]) / timer.seconds()
        figure = timer.figure(f"{CONSUMERS} consumers to {form}, all of them", rate, "rows/s")
        for pipe in pipes:
            pipe.send("check")
        found = [pipe.recv() for pipe in pipes]
    finally:
        for pipe in pipes:
            # Who still waits ends too.
            pipe.close()
        for process in processes:
            process.join(JOIN_SECONDS)
            process.kill()
    wanted = _digest(_live(dict(rows).items()))
    if wrong := [one for one in found if one != wanted]:
        raise WrongResultError(
            f"keys and checksum of {len(wrong)} of {CONSUMERS} consumers are not {wanted}; the first has {wrong[0]}"
        )
    return figure


def bulk(name: str) -> Iterator[Measured]:
    """The workload of all benchmarks written in bulk, and read from the beginning by one and by eight."""
    rows = zipfian_rows()
    with running(name) as peer:
        yield from asyncio.run(_bulk(name, peer, rows))
        for arrow, form in _forms(name) if MANY not in KINDS[name].lacks else ():
            yield _consumers(name, peer, rows, arrow, form)


def large(name: str) -> Iterator[Measured]:
    """The same workload, of so many rows that the store is busy with older ones while it is written."""
    rows = zipfian_rows(LARGE_ROWS)
    with running(name) as peer:
        yield from asyncio.run(_bulk(name, peer, rows, f" of {LARGE_ROWS:,} rows"))


# One row at a time, from end to end.


def _produce(name: str, address: str) -> None:
    """Write at a steady rate, each value with the time at which it was handed to the client."""

    async def produce() -> None:
        async with connected(name, address) as store:
            tasks = set[asyncio.Task[None]]()
            began = time.monotonic()
            for number in range(int(TAIL_SECONDS * PER_SECOND)):
                late = began + number / PER_SECOND - time.monotonic()
                if late > 0:
                    await asyncio.sleep(late)
                value = time.monotonic_ns().to_bytes(8, "little") + bytes(VALUE_BYTES - 8)
                task = asyncio.create_task(store.set(b"key-%012d" % number, value))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

    asyncio.run(produce())


async def _tail(name: str, peer: Running) -> Iterator[Measured]:
    total = int(TAIL_SECONDS * PER_SECOND)
    delays = list[int]()
    keys = set[bytes]()
    process = multiprocessing.get_context("spawn").Process(
        target=_produce, args=(name, peer.address)
    )
    async with asyncio.timeout(TAIL_LIMIT_SECONDS), connected(name, peer.address) as store:
        changes = store.follow()
        assert await anext(changes) == []
        process.start()
        timer: Timer | None = None
        async for rows in changes:
            now = time.monotonic_ns()
            # Not before the first: a Python process takes a second to begin.
            timer = timer or Timer(peer)
            for key, value in rows:
                assert value is not None
                delays.append(now - int.from_bytes(value[:8], "little"))
                keys.add(key)
            if len(keys) == total:
                break
        assert timer is not None
        reached = timer.figure("end to end, rate reached", total / timer.seconds(), "rows/s")
    await asyncio.to_thread(process.join)
    if len(delays) != len(keys):
        raise WrongResultError(f"{len(keys)} rows were written, and {len(delays)} came")
    p50, p99 = np.percentile(delays[len(delays) // 10 :], (50, 99)) / 1e6
    what = f"end to end at {PER_SECOND:,}/s, "
    return iter([reached, Measured(what + "p50", p50, "ms"), Measured(what + "p99", p99, "ms")])


def tail(name: str) -> Iterator[Measured]:
    """One process writes single rows, this one follows: from the call until the change is in hand."""
    with running(name) as peer:
        yield from asyncio.run(_tail(name, peer))


# Coming back.


async def _resume(name: str, peer: Running, folder: Path) -> Measured:
    keys = list[bytes]()
    for partition in range(PARTITIONS):
        number = 0
        while partition_of(b"%d-%d" % (partition, number)) != partition:
            number += 1
        keys.append(b"%d-%d" % (partition, number))
    async with connected(name, peer.address) as store:
        await write_all(store, dealt([(key, b"old") for key in keys]))
        await store.remember(str(folder / "stored"))
        await write_all(store, dealt([(key, b"new") for key in keys]))
    delays = []
    timer = Timer(peer)
    for number in range(RESUMES):
        # A consumer may move on in its file.
        stored = folder / str(number)
        shutil.copyfile(folder / "stored", stored)
        began = time.perf_counter()
        async with connected(name, peer.address) as store:
            rows = await store.resume(str(stored))
            delays.append(time.perf_counter() - began)
        # What lies before the place where it was is no coming back.
        wrong = [row for row in rows if row[1] != b"new"]
        if wrong or not rows:
            raise WrongResultError(f"{len(rows)} rows came first; wrong ones are {wrong[:3]}")
    p50 = float(np.median(delays)) * _MILLI
    return timer.figure("resume, from connect to the first change, p50", p50, "ms")


def resume(name: str) -> Iterator[Measured]:
    """A consumer whose position is stored in a file connects again; this server's has 1,024 partitions."""

    with running(name) as peer, tempfile.TemporaryDirectory() as folder:
        yield asyncio.run(_resume(name, peer, Path(folder)))


# Reading a key.


async def _gets(name: str, peer: Running) -> Iterator[Measured]:
    rows = [
        (key, key * (VALUE_BYTES // len(key))) for key in (b"key-%012d" % n for n in range(KEPT))
    ]
    asked = np.random.default_rng(1).integers(0, KEPT, GETS).tolist()
    delays: list[float] = []
    found: list[Row] = []
    async with connected(name, peer.address) as store:
        assert isinstance(store, KeyedStore)
        await store.keep(rows)
        for number in asked[: GETS // 10]:
            await store.get(rows[number][0])
        timer = Timer(peer)
        for number in asked:
            key = rows[number][0]
            began = time.perf_counter()
            value = await store.get(key)
            delays.append(time.perf_counter() - began)
            found.append((key, value))
        p50, p99 = np.percentile(delays, (50, 99)) * _MILLI
        figure = timer.figure("get, p50", float(p50), "ms")
    if wrong := [one for one, number in zip(found, asked, strict=True) if one != rows[number]]:
        raise WrongResultError(f"{len(wrong)} of {GETS} answers are wrong; the first is {wrong[0]}")
    return iter([figure, Measured("get, p99", float(p99), "ms")])


def gets(name: str) -> Iterator[Measured]:
    """One key after the other, each written a moment before: from the tail of this server."""
    with running(name) as peer:
        yield from asyncio.run(_gets(name, peer))


MEASURES: Final = {"singles": singles, "bulk": bulk, "tail": tail, "resume": resume, "get": gets}
LONG: Final = {"large": large}
"""Measures that take some minutes a store, so that they are taken only when they are asked for."""
