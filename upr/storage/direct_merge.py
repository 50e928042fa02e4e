"""Merging small ranges of several partitions at once, each rewritten as a whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from upr.storage.heads import MergeRange, Replacement
from upr.storage.large_merge import ReadBlocks
from upr.storage.merge import FlushSlice, checked, make_chunk, merge_slice
from upr.storage.tombstones import Purge, PurgeLimits
from upr_protocol.errors import CorruptBlockError, DataDamagedError, UprError
from upr_protocol.limits import PARTITIONS


@dataclass(slots=True)
class Direct:
    """What ranges became.

    Attributes:
        replacements: one a partition.
        purges: the tombstones that are left out, by partition.
        rows: how many rows all the new blocks have.
        damaged: partitions of which a block is missing or fails its checks; nothing of theirs is merged.
    """

    replacements: list[Replacement] = field(default_factory=list)
    purges: dict[int, Purge] = field(default_factory=dict)
    rows: int = 0
    damaged: dict[int, UprError] = field(default_factory=dict)


def merge_direct(
    ranges: Sequence[MergeRange],
    read: ReadBlocks,
    limits: PurgeLimits | None,
    compress: Callable[[bytes], bytes] | None = None,
) -> Direct:
    """Merge ranges of different partitions, ascending by partition, some MiB together.

    Args:
        limits: which tombstones may go, in ranges that begin at 0; None for none.
    """
    result = Direct()
    blocks = []
    starts = np.zeros(PARTITIONS, np.uint64)
    merged_ranges = []
    for one in ranges:
        try:
            blocks += [checked(data) for data in read(one.partition, [h.end for h in one.heads])]
        except (DataDamagedError, CorruptBlockError) as error:
            result.damaged[one.partition] = error
            continue
        starts[one.partition] = one.start
        merged_ranges.append(one)
    if not merged_ranges:
        return result
    window = FlushSlice(merged_ranges[0].partition, merged_ranges[-1].partition + 1, 0, 1)
    merged = merge_slice([make_chunk(blocks)], window, starts, limits=limits, compress=compress)
    new: dict[int, list[tuple[int, bytes]]] = {one.partition: [] for one in merged_ranges}
    for partition, end, data in merged.blocks:
        new[partition].append((end, data))
    result.purges, result.rows = merged.purges, merged.rows
    for one in merged_ranges:
        purge = merged.purges.get(one.partition)
        result.replacements.append(
            Replacement(
                one.partition,
                [head.end for head in one.heads],
                new[one.partition],
                purge.seqno if purge else 0,
            )
        )
    return result
