"""The keys received last: what a rollback concerns, as far as it is known."""

from collections import deque
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from upr_protocol.block import Block, cut_runs
from upr_protocol.rows import block_keys, block_partitions, block_seqnos

RECENT_KEY_BYTES: Final = 4 * 2**20
"""Bytes of key columns that are remembered, by default."""


class KeysAbove(NamedTuple):
    """Which keys were received above a seqno.

    Args:
        keys: each once, the one received first first.
        complete: whether that is all of them; else some were received too long ago.
    """

    keys: tuple[bytes, ...]
    complete: bool


class RecentKeys:
    """A ring of the key columns received last, over all partitions.

    It refers to the columns as they came, so that a frame costs a constant whatever its number of rows.

    Args:
        limit: bytes of key columns that are kept; 0 keeps nothing.
    """

    def __init__(self, limit: int = RECENT_KEY_BYTES) -> None:
        self._limit = limit
        self._blocks: deque[Block] = deque()
        self._bytes = 0
        self._forgotten: dict[int, int] = {}

    def add(self, blocks: list[Block]) -> None:
        """Remember the keys of blocks that were received."""
        for block in blocks:
            if not block.rows:
                continue
            bare = replace(block, value_offsets=b"", values=b"", times=b"")
            self._blocks.append(bare)
            self._bytes += _size(bare)
        while self._blocks and self._bytes > self._limit:
            old = self._blocks.popleft()
            self._bytes -= _size(old)
            self._forget(old)

    def _forget(self, block: Block) -> None:
        runs = block.runs[block.runs["count"] > 0]
        for partition, end in zip(
            runs["partition"].tolist(), runs["end_seqno"].tolist(), strict=True
        ):
            self._forgotten[partition] = max(self._forgotten.get(partition, 0), end)

    def begin(self, partition: int, seqno: int) -> None:
        """A partition begins at a seqno: what was received up to there before is not known."""
        self._forgotten[partition] = max(self._forgotten.get(partition, 0), seqno)

    def above(self, partition: int, seqno: int) -> KeysAbove:
        """Return the keys of a partition received above a seqno."""
        found: dict[bytes, None] = {}
        for block in self._blocks:
            if not (block.runs["partition"] == partition).any():
                continue
            chosen = np.asarray(block_partitions(block)) == partition
            chosen &= np.asarray(block_seqnos(block), np.uint64) > np.uint64(seqno)
            if chosen.any():
                keys = list(block_keys(block))
                found.update((keys[row], None) for row in np.flatnonzero(chosen).tolist())
        return KeysAbove(tuple(found), self._forgotten.get(partition, 0) <= seqno)

    def rolled_back(self, partition: int, seqno: int) -> None:
        """A partition went back to a seqno: what lies above it concerns nobody any more."""
        kept: deque[Block] = deque()
        for block in self._blocks:
            of_it = (block.runs["partition"] == partition) & (block.runs["end_seqno"] > seqno)
            if not of_it.any():
                kept.append(block)
                continue
            # Runs are not cut in two: a rollback goes to the end of one.
            self._bytes -= _size(block)
            if not of_it.all():
                rest = cut_runs(block, ~of_it)
                self._bytes += _size(rest)
                kept.append(rest)
        self._blocks = kept
        if self._forgotten.get(partition, 0) > seqno:
            self._forgotten[partition] = seqno


def _size(block: Block) -> int:
    return len(block.keys) + len(block.key_offsets) + len(block.seqnos) + block.runs.nbytes
