"""A bucket that is dropped and made anew under its name while clients follow it, under many seeds."""

import os
from collections import Counter
from pathlib import Path

from tests.simulation import worlds

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "30")) // 10
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "0"))


def test_clients_of_a_dropped_bucket_come_to_have_the_new_one_alone(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        counts.update(worlds.run("dropped", tmp_path / str(seed), seed).counts)
    for what in (
        "BUCKET_GONE at an Open",
        "BUCKET_GONE over the network",
        "buckets made anew",
        "clients died",
        "crashes without a bucket",
        "dropped buckets there again",
        "raised BUCKET_NOT_FOUND",
        "undone for a new version",
    ):
        assert counts[what] > 0, (what, counts)
