"""What a consumer does with the runs of one frame before it takes them; see ``consumer``."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64, Block, cut_runs


def cut_blocks(blocks: Sequence[Block], live: npt.NDArray[np.bool_]) -> list[Block]:
    """Return the blocks with only their live runs, without those that have none; ``live`` has one flag a run."""
    kept = []
    first = 0
    for block in blocks:
        keep = live[first : first + len(block.runs)]
        first += len(block.runs)
        if keep.any():
            kept.append(cut_runs(block, keep))
    return kept


def chain_runs(partitions: list[int], ends: U64, before: U64, reached: U64) -> None:
    """Let each run that is not its partition's first in the frame continue the one before it, in place."""
    last: dict[int, int] = {}
    for index, partition in enumerate(partitions):
        previous = last.get(partition)
        if previous is not None:
            before[index] = ends[previous]
            if reached[previous] > reached[index]:
                reached[index] = reached[previous]
        last[partition] = index
