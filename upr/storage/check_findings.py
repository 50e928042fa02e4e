"""What a check finds, as values that cross from the checking process to the one that tells."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

DAMAGE = "damage"
NOTE = "note"
"""Lawful, but worth knowing: what the next start will do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One contradiction.

    Attributes:
        what: in words.
        severity: DAMAGE or NOTE.
        partition: None when it is not about one.
        above, end: the seqno range ``(above, end]`` that it is about, None when it is not about one.
        file: the file, as a path below the bucket's folder; empty when it is not about one.
        offset: the byte in that file.
    """

    what: str
    severity: str = DAMAGE
    partition: int | None = None
    above: int | None = None
    end: int | None = None
    file: str = ""
    offset: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Report = Callable[[Finding], None]


@dataclass(slots=True)
class Readable:
    """The seqno ranges ``(above, end]`` of each partition that read fine, ascending and joined."""

    ranges: dict[int, list[list[int]]] = field(default_factory=dict)

    def add(self, partition: int, above: int, end: int) -> None:
        """Add a range that lies behind those that are there."""
        known = self.ranges.setdefault(partition, [])
        if known and known[-1][1] == above:
            known[-1][1] = end
        else:
            known.append([above, end])
