"""A few hundred steps of the engine's world under each of many seeds."""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.world import World
from upr.storage import large_merge, merge
from upr_protocol.limits import BLOCK_COLUMN_BYTES

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "60"))
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "0"))
STEPS = 400
# Seeds that once failed stay here.
KEPT: list[int] = []
SIZES = ((BLOCK_COLUMN_BYTES, large_merge.GROUP_BYTES), (120, 500), (1, 1))
"""Bytes of blocks and of groups, one pair a seed: usual, some rows each, one row each."""


def use_sizes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    block, group = SIZES[seed % len(SIZES)]
    monkeypatch.setattr(merge, "BLOCK_COLUMN_BYTES", block)
    monkeypatch.setattr(large_merge, "GROUP_BYTES", group)
    monkeypatch.setattr(large_merge, "SMALL_BYTES", block // 4)


def test_every_seed_ends_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for seed in [*KEPT, *range(FIRST_SEED, FIRST_SEED + SEEDS)]:
        use_sizes(monkeypatch, seed)
        world = World(tmp_path / str(seed), seed)
        try:
            world.run(STEPS)
        except BaseException:
            print(f"failing seed: {seed}")
            raise
        counts.update(world.counts)
    # A run in which none of this happened proves nothing.
    for what in (
        "crashes",
        "clean restarts",
        "flushes",
        "rollbacks",
        "store reads",
        "duplicates",
        "direct merges",
        "large merges",
        "purges",
        "forced purges",
        "acknowledged",
        "begun anew",
        "readers died",
        "PURGED",
        "FINISHED",
        "STOPPED",
    ):
        assert counts[what] > 0, (what, counts)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_gives_the_same_run_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    use_sizes(monkeypatch, seed)
    runs = []
    for attempt in range(2):
        world = World(tmp_path / f"{seed}-{attempt}", seed)
        world.run(STEPS)
        runs.append((world.counts, {p: m.rows for p, m in world.model.items()}))
    assert runs[0] == runs[1]
