"""Positions that are kept in the server, of groups and of owners that take them from each other, under many seeds."""

from pathlib import Path

from tests.simulation import worlds


def test_what_is_kept_in_the_server_is_its_owners(tmp_path: Path) -> None:
    counts = worlds.run_all("groups", tmp_path, worlds.seeds(15, first=12))
    worlds.happened(
        counts,
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
    )
