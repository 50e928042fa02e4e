"""A few hundred steps of the engine's world under each of many seeds."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulation import worlds
from upr.engine import tail
from upr.engine.tail import TailEntry


def test_every_seed_ends_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    join = tail.join_entries

    def joined(entries: Sequence[TailEntry]) -> TailEntry | None:
        window = join(entries)
        counts["windows"] += window is not None
        return window

    monkeypatch.setattr(tail, "join_entries", joined)
    counts += worlds.run_all("plain", tmp_path, worlds.seeds(1, first=3, usual=4))
    worlds.happened(
        counts,
        "cells",
        "crashes",
        "clean restarts",
        "flushes",
        "rollbacks",
        "store reads",
        "duplicates",
        "writes that gathered",
        "windows",
        "direct merges",
        "large merges",
        "purges",
        "forced purges",
        "acknowledged",
        "begun anew",
        "readers died",
        "PURGED",
        "FINISHED",
        "STOPPED",
    )


@pytest.mark.long
@pytest.mark.parametrize(("name", "seed"), [("plain", 1), ("faulty", 2)])
def test_a_seed_gives_the_same_run_each_time(tmp_path: Path, name: str, seed: int) -> None:
    runs = []
    for attempt in range(2):
        world = worlds.run(name, tmp_path / f"{seed}-{attempt}", seed)
        runs.append((world.counts, {p: m.rows for p, m in world.model.items()}))
    assert runs[0] == runs[1]
