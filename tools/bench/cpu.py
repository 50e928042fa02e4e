"""CPU of the server, in microseconds a row, beside that of another commit (``dev.py bench cpu --against REV``), or scraped
once a second beside one without HTTP (``--http``). Of coming back and of starting all partitions that of the SDK as well, each
time that this is done.

Wall times on a busy machine mean little; the CPU that a process used moves far less. The two trees run in turn, each
with its own SDK and wire, so that a drift of the machine's speed meets both.
"""

import argparse
import asyncio
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.harness import RunningServer
from tools.bench.common import batches, say, server, zipfian_rows
from upr_client import AsyncClient, MemoryPositions

ROOT: Final = Path(__file__).resolve().parents[2]
PASSES: Final = 4
"""Ingests of all rows: with the last ones a flush and compaction run."""
DRAINS: Final = 4
SINGLES: Final = 3000
TURNS: Final = (0, 1, 1, 0, 1, 0, 0, 1)
"""Who runs each load next, the server that is scraped or the other: an even drift of the machine's speed, and one that
slows down, meet both alike; and each goes first as often."""
IDLE_SECONDS: Final = 0.6
IDLE_SHARE: Final = 0.03
"""Share of a core that a server uses when it is idle."""
OPENINGS: Final = 40
"""Connections that start all partitions."""
TASKS: Final = 16


def server_cpu(running: RunningServer) -> float:
    """Return the seconds that the server's threads have run so far."""
    total = 0
    for task in Path(f"/proc/{running.pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


class Spent(NamedTuple):
    """Seconds of time, of the server's CPU and of this process's."""

    taken: float
    server: float
    client: float


def watch(running: RunningServer) -> Callable[[], Spent]:
    """Return a function that tells what was spent from now on."""

    def now() -> Spent:
        return Spent(time.perf_counter(), server_cpu(running), time.process_time())

    began = now()
    return lambda: Spent(*(b - a for a, b in zip(began, now(), strict=True)))


async def _ingest(target: str, passes: int = PASSES) -> int:
    rows = zipfian_rows()
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        places = asyncio.Semaphore(TASKS)

        async def write(batch: list[tuple[bytes, bytes | None]]) -> None:
            async with places:
                await bucket.write_many(batch)

        for _ in range(passes):
            await asyncio.gather(*map(write, batches(rows, 2000)))
    return passes * len(rows)


async def _singles(target: str) -> int:
    async with AsyncClient(target) as client:
        bucket = client.bucket()

        async def write(task: int) -> None:
            for number in range(SINGLES // TASKS):
                await bucket.set(b"key-%d-%d" % (task, number), b"v" * 128)

        await asyncio.gather(*map(write, range(TASKS)))
    return SINGLES // TASKS * TASKS


def _to_now(client: AsyncClient, store: MemoryPositions | None = None) -> Any:
    bucket: Any = client.bucket()
    # The tree that is compared may have the SDK from before ``until="now"``.
    if "until_now" in inspect.signature(bucket.changes).parameters:
        return bucket.changes(until_now=True, positions=store)
    return bucket.changes(until="now", resume=store)


async def _drain(target: str) -> int:
    rows = 0
    async with AsyncClient(target) as client:
        for _ in range(DRAINS):
            async with _to_now(client) as changes:
                async for batch in changes.batches():
                    rows += batch.rows
    return rows


async def _write_few(target: str) -> None:
    async with AsyncClient(target) as client:
        await client.bucket().write_many((b"key-%d" % number, b"value") for number in range(4000))


async def _start(target: str) -> None:
    """Connect and start all partitions at 0, up to the first frame."""
    for _ in range(OPENINGS):
        async with AsyncClient(target) as client, client.bucket().changes() as changes:
            await anext(changes.batches())


async def _resume(target: str, store: MemoryPositions) -> None:
    """Connect and start all partitions where the positions are, which is the end but for the first time."""
    for _ in range(OPENINGS):
        async with AsyncClient(target) as client, _to_now(client, store) as changes:
            async for _ in changes.batches():
                pass


@contextmanager
def _scraped() -> Iterator[tuple[str, ...]]:
    """Scrape a server once a second while the body runs; yield the options that it needs for that."""
    # The tree that is compared may not have it.
    from tests.service.pages import ask

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            # Between two servers there is none.
            with suppress(OSError):
                ask(address, "/metrics")

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield "--http", address
    finally:
        over.set()
        thread.join()


def until_idle(running: RunningServer) -> None:
    """Wait until a server has ended what it does by itself: flushes, compaction."""
    used = -1.0
    while (now := server_cpu(running)) - used > IDLE_SHARE * IDLE_SECONDS:
        used = now
        time.sleep(IDLE_SECONDS)


def measure_scraped() -> tuple[dict[str, float], dict[str, float]]:
    """Return the CPU of a server that is scraped and of one that has no HTTP, in turn: microseconds a row, by load."""
    found: tuple[dict[str, float], dict[str, float]] = {}, {}
    with ExitStack() as opened:
        options = opened.enter_context(_scraped())
        pair = [opened.enter_context(server(*options)), opened.enter_context(server())]

        def run(name: str, load: Callable[[str], Coroutine[Any, Any, int]], times: int = 1) -> None:
            seconds, rows = [0.0, 0.0], [0, 0]
            for one in TURNS * times:
                began = server_cpu(pair[one])
                rows[one] += asyncio.run(load(pair[one].target))
                until_idle(pair[one])
                seconds[one] += server_cpu(pair[one]) - began
            for of, used, count in zip(found, seconds, rows, strict=True):
                of[name] = used / count * 1e6

        run("ingest", _ingest)
        run("drain, tail", _drain)
        run("single set", _singles, 2)
        for running in pair:
            assert running.terminate() == 0, running.log_text()
            running.start()
            until_idle(running)
        run("drain, store", _drain)
    return found


def measure() -> dict[str, float]:
    """Run each load once on a new server. Return its CPU in microseconds a row, by load."""
    found: dict[str, float] = {}
    with server() as running:
        # First, while there is hardly a row, so that the figures are those of the Starts.
        store = MemoryPositions()
        asyncio.run(_write_few(running.target))
        asyncio.run(_resume(running.target, store))
        for name, opening in (("start", _start), ("resume", partial(_resume, store=store))):
            spent = watch(running)
            asyncio.run(opening(running.target))
            _, found[f"{name} of 1,024"], found[f"{name} of 1,024, SDK"] = (
                seconds / OPENINGS * 1e6 for seconds in spent()
            )
        # As much as a tail holds: what a larger load leaves in it depends on when it was flushed.
        asyncio.run(_ingest(running.target, passes=1))
        loads = (("drain, tail", _drain), ("ingest", _ingest), ("single set", _singles))
        for name, load in loads:
            began = server_cpu(running)
            rows = asyncio.run(load(running.target))
            # What a load leaves to be flushed and compacted is not the next one's.
            until_idle(running)
            found[name] = (server_cpu(running) - began) / rows * 1e6
        assert running.terminate() == 0, running.log_text()
        running.start()
        began = server_cpu(running)
        rows = asyncio.run(_drain(running.target))
        found["drain, store"] = (server_cpu(running) - began) / rows * 1e6
    return found


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="upr-bench-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _measure_tree(tree: Path) -> dict[str, float]:
    """Measure the code of a tree, in a process that imports nothing of this one."""
    path = os.pathsep.join((str(tree), str(tree / "client")))
    done = subprocess.run(
        [sys.executable, __file__, "--once"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _pair_of_trees(there: Path, run: int) -> tuple[dict[str, float], dict[str, float]]:
    if run % 2:
        other = _measure_tree(there)
        return _measure_tree(ROOT), other
    return _measure_tree(ROOT), _measure_tree(there)


def compare(
    pair: Callable[[int], tuple[dict[str, float], dict[str, float]]], runs: int
) -> dict[str, dict[str, float]]:
    """Return, by load, the medians of both and the median of the ratios of the pairs.

    Args:
        pair: runs both, the one first in runs of even number and the other in the odd ones; returns their CPU by load.
    """
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for run in range(runs):
        pairs.append(pair(run))
        say(f"pair {run + 1} of {runs}: {pairs[-1]}")
    return {
        load: {
            "one": statistics.median(one[load] for one, _ in pairs),
            "other": statistics.median(other[load] for _, other in pairs),
            "ratio": statistics.median(one[load] / other[load] for one, other in pairs),
        }
        for load in pairs[0][0]
    }


def main() -> int:
    reader = argparse.ArgumentParser(prog="tools/dev.py bench cpu", description=__doc__)
    reader.add_argument("--against", default="HEAD~1", help="a commit (default: the one before)")
    reader.add_argument("--http", action="store_true", help="scraped, against not; this tree alone")
    reader.add_argument("--runs", type=int, default=10, help="pairs of runs (default: 10)")
    reader.add_argument("--json", action="store_true", help="one JSON document")
    reader.add_argument("--once", action="store_true", help="this tree alone, once, as JSON")
    options = reader.parse_args()
    if options.once:
        print(json.dumps(measure()))
        return 0
    if options.http:
        names = ("scraped", "without HTTP")
        found = compare(lambda _: measure_scraped(), options.runs)
    else:
        names = ("here", options.against[:12])
        with _checkout(options.against) as tree:
            found = compare(partial(_pair_of_trees, tree), options.runs)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{'CPU, us a row or time':<24}{names[0]:>9}{names[1]:>14}{'ratio':>8}")
    for load, row in found.items():
        print(f"{load:<24}{row['one']:>9.2f}{row['other']:>14.2f}{row['ratio']:>8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
