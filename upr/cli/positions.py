"""The position store that ``upr-cat follow --position`` uses."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from upr_client import FilePositions, Position


class StartAnew:
    """A position file whose content is passed over and replaced by the first save."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: FilePositions | None = None

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        """Return no positions, whatever the file holds."""
        return {}

    def save(self, positions: Mapping[int, Position]) -> None:
        """Replace the file at the first call, and write to it like any other from then on."""
        if self._store is None:
            self._path.unlink(missing_ok=True)
            self._store = FilePositions(self._path)
        self._store.save(positions)


def position_store(path: Path | None, from_start: bool) -> FilePositions | StartAnew | None:
    """Return where positions are kept; None for nowhere."""
    if path is None:
        return None
    return StartAnew(path) if from_start else FilePositions(path)
