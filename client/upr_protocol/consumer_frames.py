"""What a consumer does with the runs of one frame before it takes them; see ``consumer``."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64, Block, cut_runs
from upr_protocol.consumer_types import Delivery, Indexes, ProtocolError


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


def delivery_of(
    blocks: Sequence[Block],
    tokens: npt.NDArray[np.integer],
    token: Indexes,
    seqno: U64,
    horizon: U64,
) -> Delivery | None:
    """Return what of a frame belongs to open streams, None when nothing does.

    Args:
        blocks, tokens: the frame's.
        token, seqno, horizon: the reader's, of all 1024 partitions.

    Raises:
        ProtocolError: the tokens do not fit the runs, or a run does not continue its stream.
    """
    runs = blocks[0].runs if len(blocks) == 1 else np.concatenate([b.runs for b in blocks])
    if len(tokens) != len(runs):
        raise ProtocolError(f"a frame of {len(runs)} runs carries {len(tokens)} tokens")
    partitions = runs["partition"].astype(np.int64)
    live = token[partitions] == tokens
    kept = list(blocks)
    if not live.all():
        kept = cut_blocks(blocks, live)
        if not kept:
            return None
        runs, partitions = runs[live], partitions[live]
    ends = runs["end_seqno"].astype(np.uint64)
    before, reached = (
        seqno[partitions],
        np.maximum(horizon[partitions], runs["horizon"]),
    )
    if len(kept) > 1:
        chain_runs(partitions.tolist(), ends, before, reached)
    wrong = runs["start_seqno"] != before
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ProtocolError(
            f"partition {partitions[at]} is at seqno {before[at]}, but the frame goes on at "
            f"{runs['start_seqno'][at]}"
        )
    # The largest horizon since the last marker is at least the run's own, which is at least its end: equal to
    # the end means that both are, so that no row can be missing.
    return Delivery(kept, partitions, ends, reached, reached == ends)
