"""What a stored block says at its beginning: enough to decide what to merge, without reading its columns."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from upr_protocol.block import RUN
from upr_protocol.errors import DataDamagedError

HEAD_BYTES = 2 + RUN.itemsize
_RUN = struct.Struct("<IIQQQ")
"""The first five fields of a record of the run table."""
_BEGINNING = b"\x0a" + bytes([RUN.itemsize])
"""An encoded block begins with field 1, its run table; a stored block has one run."""


@dataclass(frozen=True, slots=True)
class Head:
    """One stored block.

    Attributes:
        start, end: it tells of the seqnos in (start, end].
        horizon: see Block.runs.
        rows: how many it has.
        size: encoded bytes.
    """

    start: int
    end: int
    horizon: int
    rows: int
    size: int


def head_of(value: bytes | memoryview, size: int, partition: int, end: int) -> Head:
    """Parse a head out of a value's first HEAD_BYTES.

    The checksums are not looked at: who uses the columns checks them.

    Raises:
        DataDamagedError: they are no head of a block of the partition that ends at ``end``.
    """
    if len(value) < HEAD_BYTES or value[:2] != _BEGINNING:
        raise DataDamagedError(f"partition {partition}: the block that ends at {end} has no head")
    owner, rows, start, told_end, horizon = _RUN.unpack_from(value, 2)
    head = Head(start, told_end, horizon, rows, size)
    if owner != partition or told_end != end or not start < end <= horizon:
        raise DataDamagedError(f"partition {partition}: the block that ends at {end} says {head}")
    return head


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive blocks that were merged, or looked through, together.

    Attributes:
        heads: oldest first.
    """

    heads: tuple[Head, ...]

    @property
    def start(self) -> int:
        return self.heads[0].start

    @property
    def end(self) -> int:
        return self.heads[-1].end

    @property
    def size(self) -> int:
        return sum(head.size for head in self.heads)


def stretches(heads: Sequence[Head], settled: Iterable[tuple[int, int]] = ()) -> list[Stretch]:
    """Group a partition's blocks: those that share a horizon, and those within one settled range.

    Args:
        heads: the partition's blocks, oldest first.
        settled: disjoint ranges (start, end] whose rows were compared with each other.
    """
    ranges = list(settled)
    groups: list[list[Head]] = []
    for head in heads:
        before = groups[-1][-1] if groups else None
        if before is not None and (
            before.horizon == head.horizon
            or any(first <= before.start and head.end <= last for first, last in ranges)
        ):
            groups[-1].append(head)
        else:
            groups.append([head])
    return [Stretch(tuple(group)) for group in groups]


def last_complete(heads: Sequence[Head]) -> int:
    """Return the last seqno at which the blocks end in a complete marker, 0 if there is none."""
    complete = horizon = 0
    for head in heads:
        horizon = max(horizon, head.horizon)
        if horizon == head.end:
            complete = head.end
    return complete


@dataclass(frozen=True, slots=True)
class MergeRange:
    """Neighbouring blocks of a partition to be merged, oldest first; they end in a complete marker."""

    partition: int
    heads: tuple[Head, ...]

    @property
    def start(self) -> int:
        return self.heads[0].start

    @property
    def end(self) -> int:
        return self.heads[-1].end

    @property
    def size(self) -> int:
        return sum(head.size for head in self.heads)

    @property
    def rows(self) -> int:
        return sum(head.rows for head in self.heads)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Blocks that take the place of others of the same partition and range.

    Attributes:
        partition: whose.
        old: ends of the blocks that go.
        new: (end_seqno, bytes) of those that come.
        purge: the purge seqno that must be stored with it; 0 for none.
    """

    partition: int
    old: list[int]
    new: list[tuple[int, bytes]]
    purge: int = 0
