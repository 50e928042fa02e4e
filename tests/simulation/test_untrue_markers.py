"""The simulation sees a marker that is kept after a dropped row: else its silence would prove nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import worlds
from upr.storage import compact

Fault = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(1, 31)


def keep_the_markers_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of a large merge ends in a marker, though rows newer than it made others go."""
    rebuild = compact.rebuild

    def lying(chunk: Any, rows: Any, run: tuple[int, int, int, int], *rest: Any) -> Iterator[Any]:
        partition, start, end, _ = run
        return iter(rebuild(chunk, rows, (partition, start, end, end), *rest))

    monkeypatch.setattr(compact, "rebuild", lying)


def keep_a_marker_at_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of a merged stretch ends in a marker."""
    block = compact._Columns._block

    def lying(self: Any, rows: tuple[int, int], run: tuple[int, int, int, int]) -> Any:
        partition, start, end, _ = run
        return block(self, rows, (partition, start, end, end))

    monkeypatch.setattr(compact._Columns, "_block", lying)


@pytest.mark.parametrize("fault", [keep_the_markers_of_groups, keep_a_marker_at_every_block])
def test_a_marker_kept_after_a_dropped_row_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    fault(monkeypatch)

    def run() -> None:
        for seed in SEEDS:
            worlds.run("plain", tmp_path / str(seed), seed)

    with pytest.raises(AssertionError, match="is wrong at marker"):
        run()
