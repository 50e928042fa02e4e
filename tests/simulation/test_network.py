"""Clients with the SDK's state machine over a network that fails, under many seeds."""

from pathlib import Path

from tests.simulation import worlds


def test_clients_over_a_failing_network_have_what_is_true(tmp_path: Path) -> None:
    counts = worlds.run_all("network", tmp_path, worlds.seeds(10, first=8))
    worlds.happened(
        counts,
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
    )
