"""Changes of owner under faults, many seeds: nothing acknowledged is lost, and every server ends on one history."""

import os
from collections import Counter

from tests.simulation.owning import World

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "30"))
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "0"))
STEPS = 900


def test_no_change_of_owner_loses_what_was_acknowledged() -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        world = World(seed)
        try:
            world.run(STEPS)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        counts += world.counts
    for what in (
        "acknowledged",
        "claims",
        "clean",
        "counted",
        "fenced",
        "given up",
        "not counted",
        "not counted itself",
        "operator",
        "promotions",
        "records",
        "rollbacks",
    ):
        assert counts[what] > 0, (what, counts)
