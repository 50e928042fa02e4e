"""Changes as Arrow record batches; needs the extra ``upr-stream[arrow]``.

Keys and values are not copied: a block's columns have Arrow's layout already.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from upr_protocol.block import OP_DELETE, Block, Runs, row_seqnos
from upr_protocol.errors import MissingPackageError

if TYPE_CHECKING:
    from upr_client.events import ChangeBatch


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingPackageError(
            f"Arrow needs the package pyarrow: {error}", hint="pip install 'upr-stream[arrow]'"
        ) from error
    return pyarrow


@cache
def schema() -> Any:
    """Return the ``pyarrow.Schema`` of every record batch made here.

    partition int32 (0 to 1023), seqno int64 (1 to 2^48 - 1), deleted bool, key binary, value binary (null for a
    delete, and for everything in a stream of keys only), time timestamp of microseconds in UTC (of the commit).
    The types are signed, and an op is a bool, because Spark takes neither unsigned columns nor dictionaries, and
    pandas makes floats of mixed signs.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    pa = _pyarrow()
    return pa.schema(
        [
            ("partition", pa.int32()),
            ("seqno", pa.int64()),
            ("deleted", pa.bool_()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("time", pa.timestamp("us", tz="UTC")),
        ]
    )


def record_batch(changes: "ChangeBatch | Block") -> Any:
    """Return changes as one ``pyarrow.RecordBatch`` of ``schema()``.

    A numbered block, or a batch of one, is not copied; several blocks are joined by one copy. What the record batch
    shows is kept in memory by it.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    pa = _pyarrow()
    blocks = [changes] if isinstance(changes, Block) else changes.blocks
    blocks = [block for block in blocks if block.rows]
    if not blocks:
        return pa.RecordBatch.from_pylist([], schema())
    return _of_block(pa, blocks[0] if len(blocks) == 1 else _joined(blocks))


def _joined(blocks: list[Block]) -> Block:
    """Return the rows of all blocks, in their order, as one block without a CRC; none of the blocks is empty.

    A partition may have several runs in it, which is no matter here. Many small blocks are joined at a tenth of the
    cost of as many record batches.
    """
    seqnos = times = ops = b""
    if any(block.seqnos for block in blocks):
        seqnos = b"".join(block.seqnos or _offsets_in_runs(block) for block in blocks)
    if any(block.times for block in blocks):
        times = b"".join(block.times or _run_times(block.runs).tobytes() for block in blocks)
    if any(block.ops for block in blocks):
        ops = b"".join(block.ops or bytes(block.rows) for block in blocks)
    with_values = all(block.value_offsets for block in blocks)
    return Block(
        np.concatenate([block.runs for block in blocks]),
        seqnos,
        ops,
        _joined_offsets([block.key_offsets for block in blocks]),
        b"".join([block.keys for block in blocks]),
        _joined_offsets([block.value_offsets for block in blocks]) if with_values else b"",
        b"".join([block.values for block in blocks]) if with_values else b"",
        times,
        0,
    )


def _joined_offsets(columns: list[bytes]) -> bytes:
    parts = [np.frombuffer(column, "<i4") for column in columns]
    lengths = np.concatenate([part[1:] - part[:-1] for part in parts])
    offsets = np.zeros(len(lengths) + 1, "<i4")
    np.cumsum(lengths, out=offsets[1:])
    return offsets.tobytes()


def _offsets_in_runs(block: Block) -> bytes:
    starts = np.repeat(block.runs["start_seqno"], block.runs["count"])
    offsets: npt.NDArray[np.uint32] = (row_seqnos(block) - starts).astype("<u4")
    return offsets.tobytes()


def _run_times(runs: Runs) -> npt.NDArray[np.int64]:
    times: npt.NDArray[np.int64] = np.repeat(runs["time"], runs["count"]).view(np.int64)
    return times


def _of_block(pa: Any, block: Block) -> Any:
    rows, runs = block.rows, block.runs
    counts = runs["count"]
    times = np.frombuffer(block.times, "<i8") if block.times else _run_times(runs)
    deleted, valid, nulls = _ops(pa, block)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.repeat(runs["partition"].astype(np.int32), counts)),
            pa.array(row_seqnos(block).view(np.int64)),
            deleted,
            _binary(pa, rows, block.key_offsets, block.keys),
            _binary(pa, rows, block.value_offsets, block.values, valid, nulls)
            if block.value_offsets
            else pa.nulls(rows, pa.binary()),
            pa.array(times).view(pa.timestamp("us", tz="UTC")),
        ],
        schema=schema(),
    )


def _ops(pa: Any, block: Block) -> tuple[Any, Any, int]:
    """Return which rows are deletes, the bitmap of those that are not (None for all), and how many deletes there are."""
    rows = block.rows
    if not block.ops:
        bits = pa.py_buffer(bytes((rows + 7) // 8))
        return pa.Array.from_buffers(pa.bool_(), rows, [None, bits], 0), None, 0
    deletes = np.frombuffer(block.ops, np.uint8) == OP_DELETE
    bits = pa.py_buffer(np.packbits(deletes, bitorder="little").tobytes())
    valid = pa.py_buffer(np.packbits(~deletes, bitorder="little").tobytes())
    deleted = pa.Array.from_buffers(pa.bool_(), rows, [None, bits], 0)
    return deleted, valid, int(np.count_nonzero(deletes))


def _binary(
    pa: Any, rows: int, offsets: bytes, data: bytes, valid: Any = None, nulls: int = 0
) -> Any:
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), rows, buffers, nulls)
