"""Whole servers that replicate, under faults and changes of owner, a few seeds; a soak does many."""

from pathlib import Path

import pytest

from tests.simulation import worlds


def test_a_set_of_servers_ends_on_one_history_with_all_that_was_promised(tmp_path: Path) -> None:
    counts = worlds.run_all("replicas", tmp_path, worlds.seeds(30))
    worlds.happened(
        counts,
        "acknowledged at disk",
        "acknowledged at memory",
        "acknowledged at replicated(1)",
        "cells",
        "markers",
    )


@pytest.mark.long
def test_a_seed_gives_the_same_run_each_time(tmp_path: Path) -> None:
    """In what is done and when; a few steps of one moment may change places, by the order of sets of objects."""
    runs = []
    for attempt in range(2):
        world = worlds.run("replicas", tmp_path / str(attempt), 12, 12)
        runs.append((world.counts, world.elapsed, world.truth.rows, world.truth.logs))
    assert runs[0] == runs[1]
