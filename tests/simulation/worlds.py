"""The simulated worlds by name, and what each needs to be run anywhere."""

import functools
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lmdb
import pytest

from tests.simulation.clustered import ClusterWorld
from tests.simulation.cutting import CutWorld
from tests.simulation.damaged import DamagedWorld
from tests.simulation.dropped import DroppedWorld
from tests.simulation.faulty import FaultyWorld
from tests.simulation.grouped import GroupWorld
from tests.simulation.networked import NetworkedWorld
from tests.simulation.replicas import ReplicasWorld
from tests.simulation.world import World
from upr.storage import blocks as blocks_module
from upr.storage import compact, journal
from upr_protocol.limits import BLOCK_COLUMN_BYTES

SIZES = ((BLOCK_COLUMN_BYTES, compact.GROUP_BYTES), (120, 500), (1, 1))
"""Bytes of blocks and of groups, one pair a seed: usual, some rows each, one row each."""


class Runnable(Protocol):
    """A world, made of a folder that is not there yet and a seed.

    Attributes:
        counts: how often what happened.
        elapsed: microseconds that have passed since it began.
    """

    counts: dict[str, int]

    @property
    def elapsed(self) -> int: ...

    def run(self, steps: int) -> None:
        """Live for so many steps, and then until everybody has what is true."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of world, and how many steps the default tests give it."""

    world: Callable[[Path, int], Runnable]
    steps: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a world; ``showed`` is the fault that it once showed, ``seen_by`` a test that shows that too, step by step."""

    world: str
    seed: int
    steps: int
    showed: str
    seen_by: str = ""


def corpus() -> list[Run]:
    """Return the runs that once showed a fault."""
    files = sorted(Path(__file__).with_name("corpus").glob("*.toml"))
    return [Run(**run) for file in files for run in tomllib.loads(file.read_text())["run"]]


KINDS = {
    "plain": Kind(World, 400),
    "cuts": Kind(CutWorld, 600),
    "faulty": Kind(FaultyWorld, 400),
    "network": Kind(NetworkedWorld, 500),
    "dropped": Kind(DroppedWorld, 500),
    "groups": Kind(GroupWorld, 500),
    "damaged": Kind(DamagedWorld, 500),
    "replicas": Kind(ReplicasWorld, 120),
    "cluster": Kind(ClusterWorld, 120),
}


def kind_of(seed: int) -> str:
    """Return the name of the world that a soak makes of a seed."""
    return list(KINDS)[seed // len(SIZES) % len(KINDS)]


def use_sizes(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Have blocks and groups of the sizes of a seed."""
    block, group = SIZES[seed % len(SIZES)]
    patch.setattr(blocks_module, "BLOCK_COLUMN_BYTES", block)
    patch.setattr(compact, "GROUP_BYTES", group)
    patch.setattr(blocks_module, "READ_BYTES", group)
    patch.setattr(compact, "SMALL_BYTES", block // 4)


@contextmanager
def prepared(seed: int) -> Iterator[None]:
    """Have the sizes of a seed, and take back what a world changes of the journal."""
    with pytest.MonkeyPatch.context() as patch:
        use_sizes(patch, seed)
        # No world loses what a transaction wrote, so none has to wait for the disk of this machine.
        patch.setattr(lmdb, "open", functools.partial(lmdb.open, sync=False))
        patch.setattr(journal, "os", journal.os)  # type: ignore[attr-defined]
        patch.setattr(journal, "SEGMENT_BYTES", journal.SEGMENT_BYTES)
        # Records are small, and the simulated disk copies all of a file at each loss of power.
        patch.setattr(journal, "ROOM_BYTES", 2**14)
        yield


def run(name: str, folder: Path, seed: int, steps: int | None = None) -> Any:
    """Run a world to its end, and return it; by default with as many steps as its kind has."""
    steps = KINDS[name].steps if steps is None else steps
    with prepared(seed):
        world = KINDS[name].world(folder, seed)
        try:
            world.run(steps)
        except BaseException:
            print(f"failing: world {name}, seed {seed}, {steps} steps")
            raise
    return world


def seeds(share: int, first: int = 0, usual: int = 30) -> range:
    """Return the seeds of a test: one of so many of those that the environment asks for, and at least one."""
    count = max(int(os.environ.get("UPR_SIMULATION_SEEDS", usual)) // share, 1)
    first = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", first))
    return range(first, first + count)


def run_all(name: str, folder: Path, chosen: range) -> Counter[str]:
    """Run a world with each of the seeds, and return how often what happened."""
    counts: Counter[str] = Counter()
    for seed in chosen:
        counts.update(run(name, folder / str(seed), seed).counts)
    return counts


def happened(counts: Mapping[str, int], *whats: str) -> None:
    """Require that all of this happened: runs in which it did not prove nothing."""
    for what in whats:
        assert counts[what] > 0, (what, counts)
