"""Rows that are the same in every run, the figures of a measure, and the server."""

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tests.harness import RunningServer
from upr_client import AsyncClient
from upr_client.types import AsyncBucket
from upr_protocol.block import build_block
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.v1 import types_pb2

MUTATIONS: Final = 200_000
KEYS: Final = 50_000
VALUE_BYTES: Final = 128
DELETES: Final = 0.02

Row = tuple[bytes, bytes | None]


class WrongResultError(Exception):
    """What was read is not what was written: the figures beside it mean nothing."""


def zipfian_rows(count: int = MUTATIONS) -> list[Row]:
    """Return mutations of 16-byte keys whose ranks follow Zipf's law with exponent 0.99."""
    draw = np.random.default_rng(1)
    weights = np.arange(1, KEYS + 1) ** -0.99
    chosen = draw.choice(KEYS, count, p=weights / weights.sum()).tolist()
    deleted = (draw.random(count) < DELETES).tolist()
    data = random.Random(1).randbytes(count + VALUE_BYTES)
    return [
        (b"key-%012d" % key, None if gone else data[at : at + VALUE_BYTES])
        for at, (key, gone) in enumerate(zip(chosen, deleted, strict=True))
    ]


def batches(rows: list[Row], size: int) -> list[list[Row]]:
    """Cut the rows, in order."""
    return [rows[at : at + size] for at in range(0, len(rows), size)]


async def write_batches(bucket: AsyncBucket, cut: list[list[Row]], at_once: int) -> None:
    """Write batches, so many of them under way at a time."""
    places = asyncio.Semaphore(at_once)

    async def write(batch: list[Row]) -> None:
        async with places:
            await bucket.write_many(batch)

    await asyncio.gather(*map(write, cut))


async def drain(client: AsyncClient) -> int:
    """Read what is there, as blocks; return the rows."""
    rows = 0
    async with client.bucket().changes(until="now") as changes:
        async for batch in changes.batches():
            rows += batch.rows
    return rows


def encoded(rows: list[Row]) -> types_pb2.Block:
    """Return rows as a block ready to be sent."""
    return block_to_message(build_block([key for key, _ in rows], [value for _, value in rows]))


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; ``share_of_bare`` compares bytes a second with the bare stream beside it."""

    name: str
    value: float
    unit: str
    target: float | None = None
    share_of_bare: float | None = None
    note: str = ""

    def line(self) -> str:
        target = "" if self.target is None else f"{self.target:,.5g}"
        share = "" if self.share_of_bare is None else f"{self.share_of_bare:.0%}"
        value = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.2f}"
        return f"{self.name:<40}{value:>12} {self.unit:<7}{target:>11}{share:>7}  {self.note}"


def say(words: str) -> None:
    """Tell the progress."""
    print(f"bench: {words}", file=sys.stderr, flush=True)


def print_figures(figures: Iterable[Figure], as_json: bool) -> None:
    """Print each figure when it is there, or all of them as one JSON document."""
    found = []
    for figure in figures:
        found.append(figure)
        if as_json:
            say(figure.line())
        else:
            print(figure.line(), flush=True)
    if as_json:
        print(json.dumps([asdict(figure) for figure in found], indent=2))


def process_cpu(pid: int) -> float:
    """Return the seconds that a process has had of processors so far."""
    return _cpu_of(_stat(pid)[11:13])


def tree_cpu(pid: int) -> float:
    """Return the same of a process and all below it, those that ended included."""
    parents: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        # One may end meanwhile.
        with suppress(OSError):
            fields = _stat(int(entry.name))
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
            used[int(entry.name)] = _cpu_of(fields[11:15])
    total, left = 0.0, [pid]
    while left:
        one = left.pop()
        total += used.get(one, 0.0)
        left += parents.get(one, [])
    return total


def _stat(pid: int) -> list[str]:
    # The name, in brackets, may hold blanks.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_of(ticks: list[str]) -> float:
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(*options: str) -> Iterator[RunningServer]:
    """Run a new server on an empty directory, with further options of the command."""
    with tempfile.TemporaryDirectory(prefix="upr-bench-") as folder:
        running = RunningServer(Path(folder), *options).start(prefix=["env"])
        try:
            yield running
        finally:
            running.close()
