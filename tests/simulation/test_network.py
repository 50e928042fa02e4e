"""Clients with the SDK's state machine over a network that fails, under many seeds."""

import os
from collections import Counter
from pathlib import Path

from tests.simulation import worlds

SEEDS = int(os.environ.get("UPR_SIMULATION_SEEDS", "30")) // 10
FIRST_SEED = int(os.environ.get("UPR_SIMULATION_FIRST_SEED", "3"))


def test_clients_over_a_failing_network_have_what_is_true(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        counts.update(worlds.run("network", tmp_path / str(seed), seed).counts)
    for what in (
        "black holes to the client",
        "black holes to the server",
        "clients closed",
        "clients died",
        "clients died undoing",
        "clients finished",
        "clock jumps",
        "cuts of connections",
        "cut over the network FINISHED",
        "FINISHED over the network",
        "frames over the network",
        "ghosts",
        "hellos",
        "intruders",
        "lost SHUTTING_DOWN",
        "raised SUPERSEDED",
        "rollbacks told",
        "rollbacks with nothing to undo",
        "saves failed",
        "silence noticed by clients",
        "SILENT calls",
        "superseded ghosts",
        "undone",
    ):
        assert counts[what] > 0, (what, counts)
