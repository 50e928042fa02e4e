"""What a stored block says at its beginning: enough to decide what to merge, without reading its columns."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from upr_protocol.block import RUN, Runs
from upr_protocol.errors import DataDamagedError
from upr_protocol.wire.codec import plain_bytes

HEAD_BYTES = 2 + RUN.itemsize
PEEK_BYTES = 128
"""With so many bytes a block also says how large it is when it is not compressed."""
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
        compressed_from: about how many bytes it was compressed from, 0 for one that is not compressed.
    """

    start: int
    end: int
    horizon: int
    rows: int
    size: int
    compressed_from: int = 0

    @property
    def plain(self) -> int:
        """About how many bytes it takes in memory."""
        return max(self.size, self.compressed_from)


def head_of(value: bytes | memoryview, size: int, partition: int, end: int) -> Head:
    """Parse a head out of a value's first PEEK_BYTES; HEAD_BYTES do, but do not tell ``compressed_from``.

    The checksums are not looked at: who uses the columns checks them.

    Raises:
        DataDamagedError: they are no head of a block of the partition that ends at ``end``.
    """
    if len(value) < HEAD_BYTES or value[:2] != _BEGINNING:
        raise DataDamagedError(f"partition {partition}: the block that ends at {end} has no head")
    owner, rows, start, told_end, horizon = _RUN.unpack_from(value, 2)
    plain = plain_bytes(bytes(value), size)
    head = Head(start, told_end, horizon, rows, size, plain if plain != size else 0)
    if owner != partition or told_end != end or not start < end <= horizon:
        raise DataDamagedError(f"partition {partition}: the block that ends at {end} says {head}")
    return head


def own_head(data: bytes, partition: int) -> tuple[Head, Runs]:
    """Return a block's head and its run table.

    Raises:
        DataDamagedError: it is no block of one run of the partition.
    """
    if len(data) < HEAD_BYTES:
        raise DataDamagedError(f"partition {partition}: a stored block of {len(data)} bytes")
    end = _RUN.unpack_from(data, 2)[3]
    return head_of(data, len(data), partition, end), np.frombuffer(data, RUN, 1, 2)


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
    def plain(self) -> int:
        """About how many bytes its blocks take in memory."""
        return sum(head.plain for head in self.heads)

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
