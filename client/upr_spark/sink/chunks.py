"""Rows of a task into chunks, each with a name by which the server knows it when it comes again.

A chunk's name is a digest of who writes (the job or query, its batch, the task's partition), of all chunks of the
task before it, and of its own blocks. So the same chunk sent by another attempt of the task has the same name and is
applied once; and from the first difference on, in content or in order, everything has another name and is applied.
Where a chunk ends depends on the rows alone, and not on the record batches in which Spark hands them over.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from upr_client.arrow import blocks, row_sizes
from upr_protocol.block import Block

_FORMAT: Final = "upr-spark-1"
_LENGTHS: Final = struct.Struct("<6Q")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that are sent together.

    Args:
        name: 1 to 200 bytes of ASCII.
        blocks: at least one.
        rows: of all blocks.
    """

    name: str
    blocks: list[Block]
    rows: int


def seed(*identity: str | int) -> bytes:
    """Return what a task's first chunk goes on from: a digest of who writes."""
    return hashlib.sha256(json.dumps([_FORMAT, *identity]).encode()).digest()


class Chunks:
    """Gathers the rows of one task.

    Args:
        seed: of ``seed``.
        chunk_bytes: what a chunk takes at most, unless it has one row.
        block_rows: rows of a block at most, 1 to 2^18.
    """

    def __init__(self, seed: bytes, chunk_bytes: int, block_rows: int) -> None:
        self._digest = seed
        self._chunk_bytes = chunk_bytes
        self._block_rows = block_rows
        self._keys: list[pa.Array] = []
        self._values: list[pa.Array] = []
        self._bytes = 0

    def add(self, keys: pa.Array, values: pa.Array) -> Iterator[Chunk]:
        """Take rows that were checked, and return the chunks that are full with them."""
        ends = np.cumsum(row_sizes(keys, values))
        first, floor = 0, 0
        while first < len(ends):
            room = self._chunk_bytes - self._bytes
            last = int(np.searchsorted(ends, floor + room, side="right"))
            if last == first and not self._keys:
                last += 1
            if last > first:
                self._keys.append(keys.slice(first, last - first).cast(pa.binary()))
                self._values.append(values.slice(first, last - first).cast(pa.binary()))
                self._bytes += int(ends[last - 1]) - floor
                first, floor = last, int(ends[last - 1])
            if first < len(ends) or self._bytes > self._chunk_bytes:
                yield self._take()

    def rest(self) -> Iterator[Chunk]:
        """Return the chunk of the rows that are left, if there are any."""
        if self._keys:
            yield self._take()

    def _take(self) -> Chunk:
        keys, values = pa.chunked_array(self._keys), pa.chunked_array(self._values)
        self._keys, self._values, self._bytes = [], [], 0
        made = list(blocks(keys, values, block_rows=self._block_rows))
        self._digest = _digest(self._digest, made)
        return Chunk(f"spark-{self._digest[:20].hex()}", made, len(keys))


def _digest(before: bytes, made: list[Block]) -> bytes:
    digest = hashlib.sha256(before)
    for block in made:
        columns = (
            block.runs.tobytes(),
            block.ops,
            block.key_offsets,
            block.keys,
            block.value_offsets,
            block.values,
        )
        digest.update(_LENGTHS.pack(*map(len, columns)))
        for column in columns:
            digest.update(column)
    return digest.digest()
