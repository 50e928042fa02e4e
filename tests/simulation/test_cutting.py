"""Cuts under many seeds: whoever reads to one gets the state as of it, or is told that it is gone."""

from pathlib import Path

from tests.simulation import worlds


def test_every_cut_is_served_as_of_it_or_not_at_all(tmp_path: Path) -> None:
    seeds = worlds.seeds(8)
    counts = worlds.run_all("cuts", tmp_path, seeds)
    worlds.happened(counts, "crashes", "cuts", "flushes", "direct merges", "purges")
    assert counts["exact FINISHED"] > 80 * len(seeds)
    assert counts["exact SNAPSHOT_GONE"] > len(seeds) / 2
