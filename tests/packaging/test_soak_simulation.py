"""tools/soak_simulation.py: what it makes of a violation, and of lines that were reached."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import worlds
from tools import soak_simulation
from tools.soak_simulation import ROOT, Outcome, fewer_steps, not_reached, statements


@pytest.mark.parametrize("fails_from", [0, 1, 2, 137, 399, 400])
def test_the_fewest_steps_are_found_in_few_tries(fails_from: int) -> None:
    tried = []

    def run(seed: int, steps: int) -> Outcome:
        tried.append(steps)
        return Outcome("plain", seed, steps, {}, 0, "wrong" if steps >= fails_from else "")

    found = fewer_steps(5, 400, run)
    assert (found.seed, found.steps, found.violation) == (5, fails_from, "wrong")
    assert len(tried) <= 11


def test_what_does_not_happen_again_is_said_to() -> None:
    found = fewer_steps(5, 400, lambda seed, steps: Outcome("plain", seed, steps, {}, 0))
    assert (found.steps, found.violation) == (400, "")


def test_statements_that_were_not_reached_are_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "part.py").write_text(
        'def f(a: int) -> int:\n    """Words."""\n    if a:\n        a += 1\n        a += 2\n'
        "    b = (\n        a\n    )\n    return b\n"
    )
    (tmp_path / "some" / "none.py").write_text("def g() -> int:\n    return 1\n")
    monkeypatch.setattr(soak_simulation, "ROOT", tmp_path)
    monkeypatch.setattr(soak_simulation, "LOOKED_AT", ("some",))
    file = tmp_path / "some" / "part.py"
    assert sorted(statements(file)) == [(3, 3), (4, 4), (5, 5), (6, 8), (9, 9)]
    reached = {("some/part.py", line) for line in (3, 7, 9)}
    assert not_reached(reached) == {"some/none.py": [(0, 0)], "some/part.py": [(4, 5)]}


@pytest.mark.long
def test_known_seeds_come_first_and_a_violation_names_its_world() -> None:
    known = [worlds.Run("plain", 7, 3, ""), worlds.Run("nowhere", 8, 3, "")]
    soak = soak_simulation.Soak(known, 0, 2, "plain")
    found = soak.run(0)
    assert found is not None
    assert (found.world, found.seed, soak.seeds) == ("nowhere", 8, 2)


@pytest.mark.long
def test_one_seed_runs_in_no_minutes() -> None:
    command = [sys.executable, "-m", "tools.soak_simulation", "--minutes", "0", "--seed", "3"]
    done = subprocess.run(
        [*command, "--steps", "30"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert " 1 seeds, " in done.stdout
    assert done.stdout.endswith("no violation\n")
