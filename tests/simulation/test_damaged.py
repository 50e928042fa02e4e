"""Ends of the journal that are lost, with and without proof, and older copies that are put back, under many seeds."""

from pathlib import Path

from tests.simulation import worlds


def test_what_is_lost_is_told_and_nothing_is_numbered_twice(tmp_path: Path) -> None:
    counts = worlds.run_all("damaged", tmp_path, worlds.seeds(8))
    worlds.happened(
        counts,
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
    )
