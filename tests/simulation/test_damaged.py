"""Ends of the journal that are lost, with and without proof, and older copies that are put back, under many seeds."""

import os
from collections import Counter
from pathlib import Path

from tests.simulation import worlds

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "30")) // 8
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "0"))


def test_what_is_lost_is_told_and_nothing_is_numbered_twice(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        counts.update(worlds.run("damaged", tmp_path / str(seed), seed).counts)
    for what in (
        "copies",
        "copies put back",
        "crashes",
        "damage: cut",
        "damage: flip",
        "ends lost with proof",
        "ends lost without proof",
        "flushes",
        "partitions dead",
        "rollbacks",
        "starts refused",
    ):
        assert counts[what] > 0, (what, counts)
