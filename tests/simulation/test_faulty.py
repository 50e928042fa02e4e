"""Lost power, errors of the disk and a clock that jumps, under many seeds."""

from pathlib import Path

from tests.simulation import worlds


def test_what_was_acknowledged_survives_whatever_the_disk_does(tmp_path: Path) -> None:
    seeds = worlds.seeds(10, first=33)
    counts = worlds.run_all("faulty", tmp_path, seeds)
    worlds.happened(
        counts,
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
    )
    calls = ("write", "fsync", "commit", "committed")
    worlds.happened(counts, *(f"killed at {call}" for call in calls))
    assert counts["disk errors"] > 6 * len(seeds)
