"""Changes of owner under faults, many seeds: nothing acknowledged is lost, and every server ends on one history."""

from collections import Counter

from tests.simulation import worlds
from tests.simulation.ownership import World

STEPS = 900


def test_no_change_of_owner_loses_what_was_acknowledged() -> None:
    counts: Counter[str] = Counter()
    for seed in worlds.seeds(1):
        world = World(seed)
        try:
            world.run(STEPS)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        counts += world.counts
    worlds.happened(
        counts,
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
    )
