"""Whole servers that replicate, under faults and changes of owner, a few seeds; a soak does many."""

import os
from collections import Counter
from pathlib import Path

from tests.simulation import worlds

SEEDS = max(int(os.environ.get("UPR_SIMULATION_SEEDS", "30")) // 30, 1)
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "0"))


def test_a_set_of_servers_ends_on_one_history_with_all_that_was_promised(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        counts.update(worlds.run("replicas", tmp_path / str(seed), seed).counts)
    for what in (
        "acknowledged at disk",
        "acknowledged at memory",
        "acknowledged at replicated(1)",
        "markers",
    ):
        assert counts[what] > 0, (what, counts)


def test_a_seed_gives_the_same_run_each_time(tmp_path: Path) -> None:
    """In what is done and when; a few steps of one moment may change places, by the order of sets of objects."""
    runs = []
    for attempt in range(2):
        world = worlds.run("replicas", tmp_path / str(attempt), 12, 12)
        runs.append((world.counts, world.elapsed, world.truth.rows, world.truth.logs))
    assert runs[0] == runs[1]
