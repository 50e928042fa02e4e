"""Where groups are read: in this process, in a pool of local processes, or by Spark."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from upr_spark.backup.documents import Json
from upr_spark.backup.groups import GroupSpec

TICK_SECONDS: Final = 1.0
"""How long an engine may say nothing."""


@dataclass(frozen=True, slots=True)
class Rows:
    """So many rows more were read; 0 is a sign of life."""

    rows: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A group was read, and its record is staged."""

    index: int
    record: Json


class Engine(Protocol):
    """Reads groups with ``backup_group``."""

    @property
    def parallel(self) -> int:
        """About how many groups are read at a time."""

    def run(self, specs: Sequence[GroupSpec]) -> Generator[Rows | Finished, None, None]:
        """Read groups, in any order.

        Yields about every second at least, so that who asks can do what has its time. When the iterator is closed,
        or ends with an error, no group is read any more by this machine.

        Raises:
            UprError: the first group that failed.
        """

    def close(self) -> None:
        """Give up what it holds; doing it twice is harmless."""


class InlineEngine:
    """Reads one group after the other, right here.

    Args:
        backup: reads one, stages and returns its record.
    """

    parallel = 1

    def __init__(self, backup: Callable[[GroupSpec], Json]) -> None:
        self._backup = backup

    def run(self, specs: Sequence[GroupSpec]) -> Generator[Rows | Finished, None, None]:
        """Read groups in their order."""
        for spec in specs:
            yield Rows(0)
            yield Finished(spec.index, self._backup(spec))

    def close(self) -> None:
        """Nothing is held."""
