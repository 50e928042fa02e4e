"""What of a block a stream is shown: all rows or those under a key prefix, with or without values, in which form."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upr.storage.plain_rows import Tokens, plain_bytes_of
from upr_protocol.block import I64, Block, row_bounds, sealed, without_values


@dataclass(frozen=True, slots=True)
class Showing:
    """What streams are shown; by default blocks as they are."""

    keys_only: bool = False
    key_prefix: bytes = b""
    plain_rows: bool = False

    @property
    def as_they_are(self) -> bool:
        """Whether an encoded block can go out without being looked at."""
        return not (self.keys_only or self.key_prefix or self.plain_rows)

    def of(self, block: Block) -> Block:
        """Return what is shown of a block, with a CRC of its own; every run of it is still there."""
        if self.key_prefix:
            block = with_prefix(block, self.key_prefix)
        return without_values(block) if self.keys_only else block

    def cost(self, block: Block, size: int, tokens: Tokens) -> int:
        """Return the bytes that a shown block takes from the credit.

        Args:
            size: its encoded bytes.
            tokens: of the streams of its runs, one a run.
        """
        return plain_bytes_of(block, tokens) if self.plain_rows else size


def with_prefix(block: Block, prefix: bytes) -> Block:
    """Return a numbered block without the rows whose keys do not begin with the prefix; its runs stay."""
    if not block.rows:
        return block
    keys = _cells(block.key_offsets, block.keys)
    keep = pc.starts_with(keys, pattern=prefix).to_numpy(zero_copy_only=False)
    if keep.all():
        return block
    rows = np.flatnonzero(keep)
    bounds = row_bounds(block.runs)
    kept_below = np.concatenate(([0], np.cumsum(keep)))
    runs = block.runs.copy()
    runs["count"] = kept_below[bounds[1:]] - kept_below[bounds[:-1]]
    if not len(rows):
        return sealed(Block(runs, b"", b"", b"", b"", b"", b"", b"", 0))
    picked = pa.array(rows)
    key_offsets, key_data = _column(keys.take(picked))
    value_offsets, value_data = b"", b""
    if block.value_offsets:
        values = _cells(block.value_offsets, block.values)
        value_offsets, value_data = _column(values.take(picked))
    return sealed(
        replace(
            block,
            runs=runs,
            seqnos=_seqno_offsets(block, bounds)[rows].astype("<u4").tobytes(),
            ops=_taken(block.ops, "u1", rows),
            key_offsets=key_offsets,
            keys=key_data,
            value_offsets=value_offsets,
            values=value_data,
            times=_taken(block.times, "<i8", rows),
        )
    )


def _seqno_offsets(block: Block, bounds: I64) -> I64:
    """Return how far each row's seqno is above its run's start."""
    if block.seqnos:
        return np.frombuffer(block.seqnos, "<u4").astype(np.int64)
    firsts = np.repeat(bounds[:-1], block.runs["count"])
    offsets: I64 = np.arange(1, block.rows + 1, dtype=np.int64) - firsts
    return offsets


def _taken(column: bytes, dtype: str, rows: I64) -> bytes:
    return np.frombuffer(column, dtype)[rows].tobytes() if column else b""


def _cells(offsets: bytes, data: bytes) -> pa.Array:
    count = len(offsets) // 4 - 1
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _column(cells: pa.Array) -> tuple[bytes, bytes]:
    """Return a column's offsets, from 0, and its bytes."""
    _, offset_buffer, data = cells.buffers()
    offsets = np.frombuffer(offset_buffer, "<i4", len(cells) + 1, cells.offset * 4)
    raw = memoryview(data)[offsets[0] : offsets[-1]].tobytes() if data is not None else b""
    return (offsets - offsets[0]).astype("<i4").tobytes(), raw
