"""Seeds that once showed a fault: each is run again, with the steps with which it was found.

A soak prints the lines to be added to a file of ``corpus``. A seed shows what it showed for as long as the world takes
the same decisions from it; whoever changes a world finds others by breaking the code again.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import worlds

CORPUS = Path(__file__).with_name("corpus")
RUNS: list[dict[str, Any]] = [
    run for file in sorted(CORPUS.glob("*.toml")) for run in tomllib.loads(file.read_text())["run"]
]


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['world']}-{run['seed']}")
def test_what_was_found_once_is_right(tmp_path: Path, run: dict[str, Any]) -> None:
    assert set(run) == {"world", "seed", "steps", "showed"}
    worlds.run(run["world"], tmp_path / "world", run["seed"], run["steps"])
