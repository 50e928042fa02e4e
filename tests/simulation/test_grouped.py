"""Positions that are kept in the server, of groups and of owners that take them from each other, under many seeds."""

import os
from collections import Counter
from pathlib import Path

from tests.simulation import worlds

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "30")) // 15
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "3"))


def test_what_is_kept_in_the_server_is_its_owners(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        counts.update(worlds.run("groups", tmp_path / str(seed), seed).counts)
    for what in (
        "answered FENCED",
        "assignments",
        "clients died",
        "crashes",
        "forgets",
        "ghosts",
        "owners paused",
        "positions kept",
        "positions loaded",
        "raised SUPERSEDED",
        "resets",
        "rollbacks told",
        "saves refused in part",
    ):
        assert counts[what] > 0, (what, counts)
