"""Seeds that once showed a fault: the short ones are run again here, but for those whose fault another test shows by itself,
all of them by the soak before it goes on to new ones.

A soak prints the lines to be added to a file of ``corpus``. A seed shows what it showed for as long as the world takes
the same decisions from it; whoever changes a world finds others by breaking the code again.
"""

from pathlib import Path

import pytest

from tests.simulation import worlds

STEPS = 40
"""Most steps of a run that is short: a step of a world with replicas takes a tenth of a second."""


@pytest.mark.long
@pytest.mark.parametrize(
    "run",
    [run for run in worlds.corpus() if run.steps <= STEPS and not run.seen_by],
    ids=lambda run: f"{run.world}-{run.seed}",
)
def test_what_was_found_once_is_right(tmp_path: Path, run: worlds.Run) -> None:
    worlds.run(run.world, tmp_path / "world", run.seed, run.steps)
