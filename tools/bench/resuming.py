"""Coming back: from connect to the first change, in one partition and in all, by where the positions are kept."""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.harness import RunningServer
from tools.bench.common import Figure, WrongResultError, server, zipfian_rows
from tools.bench.cpu import server_cpu
from upr_client import (
    AsyncClient,
    ChangeBatch,
    FilePositions,
    MemoryPositions,
    Only,
    ServerPositions,
    SqlitePositions,
)
from upr_protocol.limits import PARTITIONS
from upr_protocol.partitioning import partition_of

ROUNDS: Final = 40
"""Of each kind; they take turns, so that what else the machine does meets all alike."""
ROWS: Final = 20_000
WRITES: Final = 20
"""Calls that write these rows: each leaves a marker in most partitions."""
NEW: Final = b"key "
"""Keys that are written between two rounds begin so; those that were there before have another beginning."""
WANTED_MS: Final = 15.0
"""Where one partition takes 3."""

Kind = tuple[str, int]
"""Where the positions are kept, and how many partitions are followed."""


class _Round:
    """What rounds of one kind took: milliseconds to the first change, of client and server CPU until then, and of
    ``close``, which stores the positions.
    """

    def __init__(self, running: RunningServer, resume: Any, only: Only) -> None:
        self._running = running
        self.resume = resume
        self.only = only
        self.found: list[tuple[float, float, float, float]] = []

    async def run(self) -> None:
        """Come back once; what comes first must have been written since."""
        ours, theirs = time.process_time(), server_cpu(self._running)
        began = time.perf_counter()
        async with AsyncClient(self._running.target) as client:
            async with client.bucket().changes(resume=self.resume, only=self.only) as changes:
                first = await anext(changes.batches())
                reached = time.perf_counter()
                client_cpu = time.process_time() - ours
                cpu = server_cpu(self._running) - theirs
                # Asking for more is what acknowledges the first batch.
                changes.stop()
                async for _ in changes.batches():
                    pass
            seconds = (reached - began, client_cpu, cpu, time.perf_counter() - reached)
        # From 0 the new keys come behind all the others. Those of the other kinds' turns are new to this one too.
        if not isinstance(first, ChangeBatch) or (
            self.resume is not None
            and not all(change.key.startswith(NEW) for change in first.changes)
        ):
            raise WrongResultError(f"what came first was read before: {first!r:.200}")
        self.found.append(tuple(1e3 * one for one in seconds))  # type: ignore[arg-type]


def _kinds(running: RunningServer, folder: Path, partition: int) -> dict[Kind, _Round]:
    kinds = {}
    for partitions in (1, PARTITIONS):
        only = Only([partition]) if partitions == 1 else Only()
        stores = {
            "no store, from 0": None,
            "memory": MemoryPositions(),
            "file": FilePositions(folder / f"file-{partitions}"),
            "SQLite": SqlitePositions(folder / f"sqlite-{partitions}"),
            "server": ServerPositions(f"bench-{partitions}"),
        }
        for kept, store in stores.items():
            kinds[kept, partitions] = _Round(running, store, only)
    return kinds


async def _measure(running: RunningServer, folder: Path) -> dict[Kind, _Round]:
    rows = zipfian_rows(ROWS)
    # One partition all the time, and each time a new key, so that no row goes before it is read.
    keys = (key for key in (NEW + b"%d" % number for number in count()) if partition_of(key) == 7)
    kinds = _kinds(running, folder, 7)
    async with AsyncClient(running.target) as client:
        bucket = client.bucket()
        for at in range(0, ROWS, ROWS // WRITES):
            await bucket.write_many(rows[at : at + ROWS // WRITES])
        for kind in kinds.values():
            # Everything that is there, so that the store has it.
            async with bucket.changes(resume=kind.resume, only=kind.only, until="now") as changes:
                async for _ in changes.batches():
                    pass
        for _ in range(ROUNDS):
            for kind in kinds.values():
                await bucket.set(next(keys), b"v" * 128)
                await kind.run()
    return kinds


def measure_resuming() -> Iterator[Figure]:
    """Medians; the note has the CPU of client and server, and what ``close`` takes, which stores the positions."""
    with server() as running, tempfile.TemporaryDirectory(prefix="upr-bench-") as folder:
        kinds = asyncio.run(_measure(running, Path(folder)))
    medians = {kind: np.median(one.found, axis=0).tolist() for kind, one in kinds.items()}
    for (kept, partitions), (wall, ours, theirs, close) in medians.items():
        note = f"CPU {ours:.1f} + {theirs:.1f} ms, close {close:.1f} ms"
        if partitions > 1:
            note += f", {wall / medians[kept, 1][0]:.1f} times one partition"
        wanted = WANTED_MS if partitions > 1 and kept == "file" else None
        yield Figure(f"resume of {partitions}, {kept}", wall, "ms", wanted, note=note)
