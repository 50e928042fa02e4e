"""Lost power, errors of the disk and a clock that jumps, under many seeds."""

import os
from collections import Counter
from pathlib import Path

from tests.simulation import worlds

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "30")) // 10
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "5"))


def test_what_was_acknowledged_survives_whatever_the_disk_does(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        counts.update(worlds.run("faulty", tmp_path / str(seed), seed).counts)
    for what in (
        "appends repeated",
        "clean stops",
        "clock jumps",
        "crashes",
        "cuts",
        "duplicates",
        "failed storages",
        "flushes",
        "flushes repeated",
        "leases ended",
        "power losses",
        "purges",
        "records that were there after all",
        "starts that failed",
        "writes refused",
    ):
        assert counts[what] > 0, (what, counts)
    for call in ("write", "fsync", "commit", "committed"):
        assert counts[f"killed at {call}"] > 0, (call, counts)
    assert counts["disk errors"] > 6 * SEEDS
