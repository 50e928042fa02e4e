"""The simulation sees a marker that is kept after a dropped row: else its silence would prove nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import worlds
from upr.storage import blocks as blocks_module
from upr.storage import compact

Fault = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(1, 31)


def keep_the_markers_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of a large merge ends in a marker, though rows newer than it made others go."""
    rebuild = compact.rebuild

    def lying(chunk: Any, rows: Any, run: tuple[int, int, int, int], *rest: Any) -> Any:
        partition, start, end, _ = run
        return rebuild(chunk, rows, (partition, start, end, end), *rest)

    monkeypatch.setattr(compact, "rebuild", lying)


def keep_a_marker_at_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of a merged stretch ends in a marker."""
    stretch = blocks_module.SortedRows.stretch

    def lying(self: Any, *told: Any) -> list[blocks_module.Piece]:
        return [piece._replace(horizon=piece.end) for piece in stretch(self, *told)]

    monkeypatch.setattr(blocks_module.SortedRows, "stretch", lying)


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
