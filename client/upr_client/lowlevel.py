"""Low-level calls on a bucket of either flavour: prepared blocks, and the handshake's question.

With an ``AsyncBucket`` each function returns an awaitable of what it returns with a ``Bucket``.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from upr_protocol.block import Block, FurtherColumn, build_block, build_blocks, sealed
from upr_protocol.write_places import place_number

__all__ = [
    "Block",
    "FurtherColumn",
    "build_block",
    "build_blocks",
    "hello",
    "place_number",
    "sealed",
    "write_blocks",
]

Answers = TypeVar("Answers", covariant=True)
Results = TypeVar("Results", covariant=True)


class AnyBucket(Protocol[Answers, Results]):
    """A ``Bucket`` or an ``AsyncBucket``: of either flavour is what it returns."""

    def _hello(self, partitions: Mapping[int, int | None], with_log: bool) -> Answers: ...

    def _write_blocks(
        self, blocks: Iterable[Block], durability: str, once: str | None, first_number: int
    ) -> Results: ...


def hello(
    bucket: AnyBucket[Answers, object],
    partitions: Mapping[int, int | None],
    *,
    with_log: bool = False,
) -> Answers:
    """Ask for any number of partitions at once whether a history may be continued: a list of ``HelloAnswer``.

    Args:
        bucket: whose.
        partitions: for each partition the failover id that was newest when last connected; None for new.
        with_log: whether each answer carries the whole failover log.

    Raises:
        UprError: the call failed or was refused; it is not tried again.
    """
    return bucket._hello(partitions, with_log)


def write_blocks(
    bucket: AnyBucket[object, Results],
    blocks: Iterable[Block],
    durability: str = "disk",
    *,
    once: str | None = None,
    first_number: int = 1,
) -> Results:
    """Write prepared blocks, in their order, without waiting for each one's answer; else as ``Bucket.write_many``.

    Args:
        bucket: whose.
        blocks: without seqnos, as ``upr_client.arrow.blocks`` and ``build_blocks`` make them.
        durability: as in ``Bucket.set``.
        once: a name for exactly these blocks, as that of a bucket. Whoever writes the same blocks under it again,
            also from another process, at the same time or after a failure, has them applied once altogether.
            Other blocks must have another name: one with a digest of the content is safe. The server
            remembers a name for 24 hours, and with ``producer`` names the newest 10,000.
        first_number: with ``once``, of the first block. ``place_number`` makes one for blocks that are a part of a
            sequence under the name, at most 4096; then other blocks are refused.

    Raises:
        InvalidArgumentError: a value is out of its range.
        ContentDiffersError: the place has other blocks; nothing was applied.
        PartlyWrittenError: partitions refused their part when the blocks were written under the name before.
        UprError: as in ``Bucket.set``, the first one.
    """
    return bucket._write_blocks(blocks, durability, once, first_number)
