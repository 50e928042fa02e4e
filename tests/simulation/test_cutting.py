"""Cuts under many seeds: whoever reads to one gets the state as of it, or is told that it is gone."""

import os
from collections import Counter
from pathlib import Path

from tests.simulation import worlds

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "30")) // 8
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "0"))


def test_every_cut_is_served_as_of_it_or_not_at_all(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        counts.update(worlds.run("cuts", tmp_path / str(seed), seed).counts)
    for what in ("crashes", "cuts", "flushes", "direct merges", "purges"):
        assert counts[what] > 0, (what, counts)
    assert counts["exact FINISHED"] > 80 * SEEDS
    assert counts["exact SNAPSHOT_GONE"] > SEEDS / 2
