"""Blocks: a table of runs and one set of columns over all their rows; rows packed into them and unpacked again.

The block is the unit of writing, storing, replicating and reading. A run says what happened in one partition
in the range ``(start_seqno, end_seqno]``; rows superseded at or below the run's horizon may be missing, and
the run ends in a snapshot marker exactly when its horizon equals its end ("Snapshot Markers and
Deduplication" of the specification).

The columns travel untouched from the writer to the reader, so the CRC over them is made once, with the
columns, and checked where they are used. What is received is checked whole before anything of it is
used: a lying block changes nothing. Rows are not touched one by one where that can be avoided.

A block may have further columns, of a meaning that is not known here: their cells go with their rows wherever these go.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from upr_protocol.errors import CorruptBlockError, InvalidArgumentError, shown
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    BLOCK_ROWS_MAX,
    CELL_BYTES_MAX,
    FURTHER_COLUMNS_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    PARTITIONS,
    RUN_SPAN_MAX,
    SEQNO_MAX,
    VALUE_BYTES_MAX,
    WRITE_BLOCK_BYTES_MAX,
)
from upr_protocol.partitioning import partition_of, partitions_of

RUN: Final = np.dtype(
    [
        ("partition", "<u4"),
        ("count", "<u4"),
        ("start_seqno", "<u8"),
        ("end_seqno", "<u8"),
        ("horizon", "<u8"),
        ("time", "<u8"),
    ]
)
"""One record of the run table, 40 bytes; ``time`` is microseconds since the epoch."""

OP_SET: Final = 0
OP_DELETE: Final = 1


def _compiled() -> Any:
    """Return the compiled module; None where it is not installed, or switched off."""
    try:
        from upr_protocol import _rows
    except ImportError:
        return None
    # One of another version, left by a build that is not this one's.
    usable = hasattr(_rows, "summary") and not os.environ.get("UPR_PURE_PYTHON")
    return _rows if usable else None


COMPILED: Final = _compiled()
"""Compiled twins of functions in Python, which are their reference; what is out of the ordinary they leave to them."""

Runs = npt.NDArray[np.void]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
SevenColumns = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]
Values = Sequence[bytes | None]
Pairs = list[tuple[bytes, bytes | None]]


class FurtherColumn(NamedTuple):
    """Column that this version carries without knowing what it means; a row without a cell has an empty one.

    Attributes:
        id: 1 to FURTHER_COLUMNS_MAX.
        offsets: int32, rows + 1.
        data: all cells.
    """

    id: int
    offsets: bytes
    data: bytes


Further = tuple[FurtherColumn, ...]


@dataclass(slots=True)
class Block:
    """A run table and its columns; see Block in ``types.proto`` for each column's layout.

    Attributes:
        runs: the table, dtype RUN, ascending by partition, one run a partition.
        seqnos: empty, or a uint32 offset from its run's start a row.
        ops: empty when all rows are sets, or a byte a row.
        key_offsets: int32, rows + 1.
        keys: all keys.
        value_offsets: int32, rows + 1; empty when the values were left out.
        values: all values.
        times: empty, or an int64 a row.
        columns_crc: CRC32C over the columns.
        further: further columns, ascending by id.
    """

    runs: Runs
    seqnos: bytes
    ops: bytes
    key_offsets: bytes
    keys: bytes
    value_offsets: bytes
    values: bytes
    times: bytes
    columns_crc: int
    further: Further = ()
    _column_bytes: int = field(default=-1, init=False, repr=False, compare=False)

    @property
    def rows(self) -> int:
        """How many rows the columns hold."""
        return max(len(self.key_offsets) // 4 - 1, 0)

    @property
    def columns(self) -> SevenColumns:
        """The seven columns, in the order of the wire."""
        return (
            self.seqnos,
            self.ops,
            self.key_offsets,
            self.keys,
            self.value_offsets,
            self.values,
            self.times,
        )

    @property
    def column_bytes(self) -> int:
        """Bytes of all columns together."""
        if self._column_bytes < 0:
            self._column_bytes = sum(map(len, self.columns))
            for column in self.further:
                self._column_bytes += len(column.offsets) + len(column.data)
        return self._column_bytes

    def __repr__(self) -> str:
        return f"<Block {len(self.runs)} runs, {self.rows} rows, {self.column_bytes} bytes>"


_LENGTHS = struct.Struct("<7I")
_FURTHER = struct.Struct("<3I")
FEW_ROWS: Final = 16
"""Rows up to which a loop costs less than arrays: these are slow where the processor did something else before."""
RUN_FIELDS: Final = struct.Struct("<IIQQQQ")
_EDGES = [struct.Struct(f"<{rows + 1}i") for rows in range(FEW_ROWS + 1)]
"""Offsets of a column, by its rows."""


def crc_of_columns(columns: Sequence[bytes], further: Further = ()) -> int:
    """Compute the CRC32C of the seven columns in the order of the wire: their lengths as uint32, then their bytes; and of
    each further one its id and two lengths as uint32, then its bytes.
    """
    crc: int = google_crc32c.value(_LENGTHS.pack(*map(len, columns)))
    for column in columns:
        if column:
            crc = google_crc32c.extend(crc, column)
    for one in further:
        head = _FURTHER.pack(one.id, len(one.offsets), len(one.data))
        crc = google_crc32c.extend(crc, b"".join((head, one.offsets, one.data)))
    return crc


def sealed(block: Block) -> Block:
    """Return the block with the CRC of its columns set."""
    return replace(block, columns_crc=crc_of_columns(block.columns, block.further))


def make_runs(
    partitions: npt.ArrayLike,
    counts: npt.ArrayLike,
    starts: npt.ArrayLike = 0,
    ends: npt.ArrayLike = 0,
    horizons: npt.ArrayLike = 0,
    times: npt.ArrayLike = 0,
) -> Runs:
    """Build a run table from columns of equal length (scalars are repeated)."""
    partitions = np.asarray(partitions)
    runs = np.zeros(partitions.shape, RUN)
    runs["partition"] = partitions
    runs["count"] = counts
    runs["start_seqno"] = starts
    runs["end_seqno"] = ends
    runs["horizon"] = horizons
    runs["time"] = times
    return runs


def row_bounds(runs: Runs) -> I64:
    """Return where each run's rows begin, and the total last: int64, shape ``(len(runs) + 1,)``."""
    bounds = np.zeros(len(runs) + 1, np.int64)
    np.cumsum(runs["count"], out=bounds[1:])
    return bounds


def row_seqnos(block: Block) -> U64:
    """Return each row's seqno as uint64, shape ``(rows,)``."""
    starts, counts = block.runs["start_seqno"], block.runs["count"]
    offsets = np.frombuffer(block.seqnos, "<u4")
    if not block.seqnos:
        # A run's rows follow each other; what wraps below 0 wraps back.
        starts = starts - row_bounds(block.runs)[:-1].astype(np.uint64)
        offsets = np.arange(1, block.rows + 1, dtype=np.uint64)
    seqnos: U64 = np.repeat(starts, counts) + offsets
    return seqnos


def row_times(block: Block) -> U64:
    """Return each row's commit time in microseconds since the epoch, shape ``(rows,)``."""
    if block.times:
        return np.frombuffer(block.times, "<u8")
    times: U64 = np.repeat(block.runs["time"], block.runs["count"])
    return times


def check_block(block: Block, *, numbered: bool = True) -> None:
    """Raise unless the block is complete, consistent and within the limits.

    Args:
        numbered: whether the runs must carry seqnos; in a Write they must not.

    Raises:
        CorruptBlockError: the CRC is wrong, or columns and table contradict each other.
        InvalidArgumentError: a key, value, partition or seqno is out of its range.
    """
    columns = block.columns
    crc = crc_of_columns(columns, block.further)
    if crc != block.columns_crc:
        raise CorruptBlockError(
            f"the block's columns have CRC32C {crc:08x}; must be {block.columns_crc:08x}",
            hint="the bytes were damaged on the way or the writer computes the CRC differently",
        )
    look = None if COMPILED is None or block.further else COMPILED.sound
    if look is not None and look(numbered, block.runs.tobytes(), *columns):
        return
    rows = _check_columns(block)
    _check_table(block.runs, rows)
    if numbered:
        _check_numbers(block, rows)
    else:
        _check_unnumbered(block, rows)


def _check_columns(block: Block) -> int:
    if not block.key_offsets:
        if any(block.columns) or block.further:
            raise CorruptBlockError("the block has columns but no key offsets")
        return 0
    if len(block.key_offsets) % 4:
        raise CorruptBlockError(
            f"key offsets are {len(block.key_offsets)} bytes; must be a multiple of 4"
        )
    rows = block.rows
    if rows > BLOCK_ROWS_MAX:
        raise InvalidArgumentError(
            f"rows of the block are {rows}; must be at most {BLOCK_ROWS_MAX}",
            hint="send several blocks",
        )
    if block.column_bytes > WRITE_BLOCK_BYTES_MAX:
        raise InvalidArgumentError(
            f"columns of the block are {block.column_bytes} bytes; must be at most {WRITE_BLOCK_BYTES_MAX}",
            hint="send several blocks",
        )
    lengths = _check_offsets("key", block.key_offsets, block.keys, rows)
    if rows and (lengths.min() < KEY_BYTES_MIN or lengths.max() > KEY_BYTES_MAX):
        bad = lengths.min() if lengths.min() < KEY_BYTES_MIN else lengths.max()
        raise InvalidArgumentError(
            f"key is {bad} bytes; must be {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        )
    for name, column, width in (
        ("ops", block.ops, 1),
        ("seqnos", block.seqnos, 4),
        ("times", block.times, 8),
    ):
        if column and len(column) != width * rows:
            raise CorruptBlockError(
                f"{name} take {len(column)} bytes; must be {width * rows} for {rows} rows"
            )
    value_lengths = None
    if block.value_offsets:
        value_lengths = _check_offsets("value", block.value_offsets, block.values, rows)
        if rows and value_lengths.max() > VALUE_BYTES_MAX:
            raise InvalidArgumentError(
                f"value is {value_lengths.max()} bytes; must be at most {VALUE_BYTES_MAX}"
            )
    elif block.values:
        raise CorruptBlockError("the block has values but no value offsets")
    if block.ops:
        ops = np.frombuffer(block.ops, np.uint8)
        if ops.max() > OP_DELETE:
            raise InvalidArgumentError(
                f"op is {ops.max()}; must be {OP_SET} (set) or {OP_DELETE} (delete)"
            )
        if value_lengths is not None and value_lengths[ops == OP_DELETE].any():
            raise CorruptBlockError("a delete carries a value")
    if block.further:
        _check_further(block.further, rows)
    return rows


def _check_further(further: Further, rows: int) -> None:
    ids = [0, *(one.id for one in further)]
    if ids[-1] > FURTHER_COLUMNS_MAX or not all(a < b for a, b in pairwise(ids)):
        raise InvalidArgumentError(
            f"ids of further columns are {ids[1:]}; must ascend, from 1 to {FURTHER_COLUMNS_MAX}"
        )
    for one in further:
        lengths = _check_offsets(f"column {one.id}'s", one.offsets, one.data, rows)
        if rows and lengths.max() > CELL_BYTES_MAX:
            raise InvalidArgumentError(
                f"cell of column {one.id} is {lengths.max()} bytes; must be at most {CELL_BYTES_MAX}"
            )


def _check_offsets(name: str, offsets: bytes, data: bytes, rows: int) -> U32:
    if len(offsets) != 4 * (rows + 1):
        raise CorruptBlockError(
            f"{name} offsets take {len(offsets)} bytes; must be {4 * (rows + 1)} for {rows} rows"
        )
    array = np.frombuffer(offsets, "<u4")
    lengths: U32 = array[1:] - array[:-1]
    # Where offsets fall, the length wraps to a large one: then the sum, which does not wrap, is not that of the data.
    if array[0] or int(lengths.sum(dtype=np.int64)) != len(data):
        raise CorruptBlockError(
            f"{name} offsets run from {array[0]} to {array[-1]} over {len(data)} bytes, or fall"
        )
    return lengths


def _check_table(runs: Runs, rows: int) -> None:
    total = int(runs["count"].sum(dtype=np.uint64))
    if total != rows:
        raise CorruptBlockError(
            f"rows of the run table are {total}; must be {rows}, as in the columns"
        )
    partitions = runs["partition"]
    if len(runs) and partitions.max() >= PARTITIONS:
        raise InvalidArgumentError(
            f"partition is {partitions.max()}; must be 0 to {PARTITIONS - 1}"
        )
    if len(runs) > 1 and not (partitions[1:] > partitions[:-1]).all():
        raise CorruptBlockError("the run table is not strictly ascending by partition")


def _check_unnumbered(block: Block, rows: int) -> None:
    runs = block.runs
    if not rows:
        raise InvalidArgumentError("the block has no rows")
    if not runs["count"].all():
        raise CorruptBlockError("a run of a write has no rows")
    if block.seqnos or block.times or runs["start_seqno"].any() or runs["end_seqno"].any():
        raise InvalidArgumentError(
            "a write carries seqnos or times; must be without, the server assigns them"
        )
    if not block.value_offsets:
        raise CorruptBlockError("a write carries no value offsets")


def _check_numbers(block: Block, rows: int) -> None:
    runs = block.runs
    starts, ends, horizons, counts = (
        runs["start_seqno"],
        runs["end_seqno"],
        runs["horizon"],
        runs["count"].astype(np.uint64),
    )
    if not len(runs):
        raise CorruptBlockError("the block has no runs")
    if horizons.max() > SEQNO_MAX:
        raise InvalidArgumentError(f"seqno is {horizons.max()}; must be at most {SEQNO_MAX}")
    if (ends <= starts).any() or (horizons < ends).any():
        raise CorruptBlockError("a run ends at or below its start, or its horizon is below its end")
    spans = ends - starts
    if (counts > spans).any() or spans.max() > RUN_SPAN_MAX:
        raise CorruptBlockError("a run holds more rows than seqnos, or spans 2^32 seqnos or more")
    if not block.seqnos:
        # A run without rows has no seqnos to tell, whatever its span.
        if ((counts != spans) & (counts > 0)).any():
            raise CorruptBlockError(
                "a run holds fewer rows than seqnos, and the rows' seqnos are missing"
            )
        return
    offsets = np.frombuffer(block.seqnos, "<u4")
    if (offsets < 1).any() or (offsets > np.repeat(spans, runs["count"])).any():
        raise CorruptBlockError("a row's seqno lies outside its run")
    inside = np.ones(rows, bool)
    firsts = row_bounds(runs)[:-1]
    inside[firsts[firsts < rows]] = False
    if not (np.diff(offsets.astype(np.int64), prepend=0)[inside] > 0).all():
        raise CorruptBlockError("the seqnos of a run do not rise")


def _take_spans(offsets: bytes, data: bytes, spans: I64) -> tuple[bytes, bytes]:
    """Cut row spans, shape ``(n, 2)``, ascending and none of them empty, out of an offset column and its data."""
    array = np.frombuffer(offsets, "<i4")
    edges = array[spans]
    data = b"".join([data[a:b] for a, b in edges.tolist()])
    steps = np.zeros(len(array), np.int8)
    steps[spans[:, 0]] = 1
    steps[spans[:, 1]] -= 1
    lengths = np.diff(array)[np.cumsum(steps[:-1], dtype=np.int8).view(bool)]
    return offset_column(lengths), data


def _take_rows(block: Block, runs: Runs, spans: I64, seqnos: bytes) -> Block:
    """Build a block of these runs from row spans of another, in order; a span may be empty."""

    def fixed(column: bytes, width: int) -> bytes:
        edges = (width * spans).tolist() if column else []
        return b"".join([column[a:b] for a, b in edges])

    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return sealed(Block(runs, b"", b"", b"", b"", b"", b"", b"", 0))
    key_offsets, keys = _take_spans(block.key_offsets, block.keys, spans)
    value_offsets, values = b"", b""
    if block.value_offsets:
        value_offsets, values = _take_spans(block.value_offsets, block.values, spans)
    further = block.further and with_cells(
        (one.id, *_take_spans(one.offsets, one.data, spans)) for one in block.further
    )
    return sealed(
        Block(
            runs,
            seqnos,
            fixed(block.ops, 1),
            key_offsets,
            keys,
            value_offsets,
            values,
            fixed(block.times, 8),
            0,
            further,
        )
    )


def with_cells(columns: Iterable[tuple[int, bytes, bytes]]) -> Further:
    """Return columns without those whose cells are all empty: id, offsets, data."""
    return tuple([FurtherColumn(*column) for column in columns if column[2]])


def side_by_side(
    blocks: Sequence[tuple[Further, int]],
) -> Iterator[tuple[int, list[FurtherColumn]]]:
    """Yield the id of each further column that one of the blocks has, and that of each block; of empty cells where it has none.

    Args:
        blocks: the further columns of each, and how many rows it has.
    """
    told = [({one.id: one for one in further}, bytes(4 * rows + 4)) for further, rows in blocks]
    for id_ in sorted({one.id for further, _ in blocks for one in further}):
        yield id_, [by_id.get(id_) or FurtherColumn(id_, none, b"") for by_id, none in told]


def joined_runs(tables: Sequence[Runs]) -> Runs:
    """Return run tables end to end, one or more; numpy is slow to concatenate records, and bytes are not."""
    if len(tables) == 1:
        return tables[0]
    return np.frombuffer(b"".join([table.data for table in tables]), RUN)


def select_runs(block: Block, keep: npt.NDArray[np.bool_]) -> Block:
    """Return a block of only the runs where ``keep`` (bool, one a run) is true, with a CRC of its own.

    Adjacent kept runs are copied as one span, so the cost follows the number of gaps, not of rows.
    """
    if keep.all():
        return block
    bounds = row_bounds(block.runs)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], keep, [False]))))
    spans = bounds[edges].reshape(-1, 2)
    seqnos = b""
    if block.seqnos:
        seqnos = b"".join([block.seqnos[a * 4 : b * 4] for a, b in spans.tolist()])
    return _take_rows(block, block.runs[keep], spans, seqnos)


def join_blocks(blocks: Sequence[Block], *, dated: bool = False) -> Block:
    """Return one block of the rows of several, which must all have values or none, and neither seqnos nor times.

    The runs of a partition, each of which begins where the one before ends, become one, with the newest time. Each
    block must have been checked: the CRC is made anew.

    Args:
        dated: whether rows keep the times of their runs; otherwise the newest of their partition counts for all.
    """
    if len(blocks) == 1:
        return blocks[0]
    if COMPILED is not None and not any([block.further for block in blocks]):
        made = COMPILED.joined([(b.runs.tobytes(), *b.columns[:-1]) for b in blocks], dated)
        if made is not None:
            return _block_of(*_compiled_columns(made))
    runs = joined_runs([block.runs for block in blocks])
    order = np.argsort(runs["partition"], kind="stable")
    firsts = row_bounds(runs)[:-1][order]
    runs = runs[order]
    bounds = row_bounds(runs)
    lasts = firsts + np.diff(bounds)
    rows = np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], runs["count"])
    ops = b""
    if any(block.ops for block in blocks):
        told = b"".join([block.ops or bytes(block.rows) for block in blocks])
        ops = np.frombuffer(told, np.uint8)[rows].tobytes()
    keys = _join_cells([(b.key_offsets, b.keys) for b in blocks], firsts, lasts, rows)
    values = b"", b""
    if any(block.value_offsets for block in blocks):
        values = _join_cells([(b.value_offsets, b.values) for b in blocks], firsts, lasts, rows)
    times = np.repeat(runs["time"], runs["count"]).tobytes() if dated else b""
    further: Further = ()
    if any([block.further for block in blocks]):
        further = with_cells(
            (id_, *_join_cells([one[1:] for one in columns], firsts, lasts, rows))
            for id_, columns in side_by_side([(b.further, b.rows) for b in blocks])
        )
    return sealed(Block(_join_runs(runs), b"", ops, *keys, *values, times, 0, further))


def _join_runs(runs: Runs) -> Runs:
    """Return one run for the neighbours of each partition."""
    partitions = runs["partition"]
    first = np.flatnonzero(np.concatenate(([True], partitions[1:] != partitions[:-1])))
    joined: Runs = runs[np.append(first[1:], len(runs)) - 1]
    joined["start_seqno"] = runs["start_seqno"][first]
    joined["count"] = np.add.reduceat(runs["count"], first)
    joined["time"] = np.maximum.reduceat(runs["time"], first)
    return joined


def _join_cells(
    columns: Sequence[tuple[bytes, bytes]], firsts: I64, lasts: I64, rows: I64
) -> tuple[bytes, bytes]:
    """Join offset columns and their data, with the rows in another order.

    Args:
        firsts, lasts: the rows, over all columns, that stay together; from the first to before the last.
        rows: the same, one by one.
    """
    offsets = np.frombuffer(b"".join([told for told, _ in columns]), "<i4")
    ends = np.cumsum([len(told) // 4 for told, _ in columns])[:-1]
    # Where one block's offsets end and the next one's begin there is no cell.
    lengths = np.delete(np.diff(offsets), ends - 1)
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=edges[1:])
    data = b"".join([data for _, data in columns])
    spans = zip(edges[firsts].tolist(), edges[lasts].tolist(), strict=True)
    return offset_column(lengths[rows]), b"".join([data[a:b] for a, b in spans])


def slice_runs(block: Block, above: U64) -> Block:
    """Return what a block tells above a seqno of each run's own: ``(seqno, end_seqno]`` and those of its rows.

    Args:
        above: one a run, below its end; a run at or above its seqno stays complete.
    """
    starts = block.runs["start_seqno"]
    inside = np.flatnonzero(above > starts).tolist()
    if not inside:
        return block
    bounds = row_bounds(block.runs)
    spans = np.stack([bounds[:-1], bounds[1:]], axis=1)
    runs = block.runs.copy()
    offsets = np.frombuffer(block.seqnos, "<u4").copy()
    for index in inside:
        first, last = spans[index].tolist()
        offset = int(above[index]) - int(starts[index])
        if block.seqnos:
            first += int(np.searchsorted(offsets[first:last], offset, side="right"))
            offsets[first:last] -= np.uint32(offset)
        else:
            # Dense, or without any row at all.
            first = min(first + offset, last)
        spans[index, 0] = first
        runs["start_seqno"][index] = above[index]
        runs["count"][index] = last - first
    seqnos = b"".join([offsets[a:b].tobytes() for a, b in spans.tolist()]) if block.seqnos else b""
    return _take_rows(block, runs, spans, seqnos)


def without_values(block: Block) -> Block:
    """Return the block with its values and further columns left out, for a stream of keys only."""
    return sealed(replace(block, value_offsets=b"", values=b"", further=()))


ROW_BYTES: Final = 9
"""Bytes of a row besides key and value: an op and two offsets."""


def check_row(key: bytes, value: bytes | None) -> int:
    """Return what a row takes in the columns of a block, bytes.

    Raises:
        InvalidArgumentError: key or value (None: a delete) is not bytes, or out of its range.
    """
    if not isinstance(key, bytes):
        raise InvalidArgumentError(
            f"key is {type(key).__name__}; must be bytes", hint="encode it first"
        )
    size = len(key)
    if not KEY_BYTES_MIN <= size <= KEY_BYTES_MAX:
        raise InvalidArgumentError(
            f"key is {size} bytes; must be {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        )
    if value is None:
        return size + ROW_BYTES
    if not isinstance(value, bytes):
        raise InvalidArgumentError(
            f"value is {type(value).__name__}; must be bytes, or None for a delete",
            hint="encode it first",
        )
    more = len(value)
    if more > VALUE_BYTES_MAX:
        raise InvalidArgumentError(
            f"value is {more} bytes; must be at most {VALUE_BYTES_MAX}",
            hint="store it elsewhere and write a reference",
        )
    return size + more + ROW_BYTES


def check_value(size: int, limit: int, what: str = "value") -> None:
    """Raise InvalidArgumentError if a value of so many bytes is above the --max-value-bytes of a server."""
    if size > limit:
        raise InvalidArgumentError(
            f"{what} is {size} bytes; must be at most {limit} on this server",
            hint="store it elsewhere, or in parts; --max-value-bytes sets the limit",
        )


def check_values(block: Block, limit: int) -> None:
    """Raise as ``check_value`` for the largest value of a block within the protocol's limits."""
    if block.column_bytes > limit < VALUE_BYTES_MAX:
        sizes = np.diff(np.frombuffer(block.value_offsets, "<i4"))
        if sizes.max(initial=0) > limit:
            row = int(sizes.argmax())
            start, end = np.frombuffer(block.key_offsets, "<i4")[row : row + 2]
            key = shown(block.keys[start:end].decode(errors="backslashreplace"))
            check_value(int(sizes[row]), limit, f"value of the key {key}")


def check_rows(keys: Sequence[bytes], values: Values) -> I64:
    """Return what each row takes in the columns of a block, bytes.

    Raises:
        InvalidArgumentError: a key or value is not bytes, or out of its range.
    """
    if len(keys) != len(values):
        raise InvalidArgumentError(
            f"values are {len(values)}; must be as many as the {len(keys)} keys"
        )
    plain = set(map(type, keys)) <= {bytes} and set(map(type, values)) <= {bytes, type(None)}
    if plain and keys:
        plain = (
            min(map(len, keys)) >= KEY_BYTES_MIN
            and max(map(len, keys)) <= KEY_BYTES_MAX
            and max(map(len, filter(None, values)), default=0) <= VALUE_BYTES_MAX
        )
    if not plain:
        for key, value in zip(keys, values, strict=True):
            check_row(key, value)
    return _lengths(keys) + _lengths(_without_none(values)) + ROW_BYTES


def _lengths(cells: Sequence[bytes]) -> I64:
    return np.fromiter(map(len, cells), np.int64, len(cells))


def _without_none(values: Values) -> Sequence[bytes]:
    """Return the values, that of a delete empty."""
    return [value or b"" for value in values] if None in values else cast("Sequence[bytes]", values)


def build_block(keys: Sequence[bytes], values: Values, partitions: U32 | None = None) -> Block:
    """Build one unnumbered block for a Write of what ``pack_rows`` takes."""
    return _block_of(*pack_rows(keys, values, partitions))


def pack_rows(
    keys: Sequence[bytes], values: Values, partitions: U32 | None = None
) -> tuple[bytes, SevenColumns]:
    """Return the table and the columns of an unnumbered block: rows sorted by partition, their order kept within it.

    Args:
        keys: 1 to BLOCK_ROWS_MAX keys of 1 to 4096 bytes.
        values: as many values of 0 to 20 MiB; None deletes the key.
        partitions: of each row, 0 to 1023; None: those of the keys.

    Raises:
        InvalidArgumentError: a key or value is not bytes, or out of its range.
    """
    if not keys:
        raise InvalidArgumentError("rows of a write are 0; must be at least 1")
    if COMPILED is not None:
        chosen = None if partitions is None else partitions.astype("<u2").tobytes()
        if (made := COMPILED.columns(keys, values, chosen)) is not None:
            return _compiled_columns(made)
    if len(keys) == len(values) <= FEW_ROWS:
        return _pack_few(keys, values, None if partitions is None else partitions.tolist())
    check_rows(keys, values)
    return _pack_sorted(keys, values, partitions)


def _compiled_columns(made: Any) -> tuple[bytes, SevenColumns]:
    """Return table and columns of what a compiled function made: the same without the seqnos."""
    runs, ops, key_offsets, keys, value_offsets, values, times = made
    return runs, (b"", ops, key_offsets, keys, value_offsets, values, times)


def _block_of(runs: bytes, columns: SevenColumns) -> Block:
    return Block(np.frombuffer(runs, RUN), *columns, crc_of_columns(columns))


def _pack_few(
    keys: Sequence[bytes], values: Values, chosen: Sequence[int] | None
) -> tuple[bytes, SevenColumns]:
    """As ``pack_rows``, without arrays."""
    for key, value in zip(keys, values, strict=True):
        check_row(key, value)
    partitions = [partition_of(key) for key in keys] if chosen is None else chosen
    order = sorted(range(len(keys)), key=partitions.__getitem__)
    ops = (
        bytes(OP_DELETE if values[row] is None else OP_SET for row in order)
        if None in values
        else b""
    )
    cells = [keys[row] for row in order], [values[row] or b"" for row in order]
    edges = [_EDGES[len(order)].pack(0, *accumulate(map(len, column))) for column in cells]
    counts = [(one, partitions.count(one)) for one in sorted(set(partitions))]
    runs = b"".join([RUN_FIELDS.pack(*run, 0, 0, 0, 0) for run in counts])
    return runs, (b"", ops, edges[0], b"".join(cells[0]), edges[1], b"".join(cells[1]), b"")


def pairs_bytes(pairs: Pairs) -> int:
    """Return what rows, each a key and a value, take in the columns of blocks.

    Raises:
        InvalidArgumentError: a row is no pair, or a key or value is not bytes, or out of its range.
    """
    if COMPILED is not None and (size := COMPILED.size(pairs)) is not None:
        return int(size)
    try:
        keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("a row is no pair; must be a key and a value") from error
    return int(check_rows(keys, values).sum())


def blocks_of_pairs(pairs: Pairs) -> Iterator[Block]:
    """Build what ``build_blocks`` does, of keys and values, each when the one before was taken."""
    first = 0
    while COMPILED is not None and first < len(pairs):
        made = COMPILED.packed(pairs, first, BLOCK_COLUMN_BYTES)
        if made is None:
            break
        block = _block_of(*_compiled_columns(made))
        first += block.rows
        yield block
    rest = pairs[first:]
    yield from build_blocks([key for key, _ in rest], [value for _, value in rest])


def build_blocks(
    keys: Sequence[bytes], values: Values, column_bytes: int = BLOCK_COLUMN_BYTES
) -> Iterator[Block]:
    """Build blocks of rows, in order, whose columns stay within ``column_bytes``, or that have one row.

    All rows are checked before the first.

    Raises:
        InvalidArgumentError: a key or value is not bytes, or out of its range.
    """
    for first, last in row_slices(check_rows(keys, values), column_bytes, BLOCK_ROWS_MAX):
        yield build_block(keys[first:last], values[first:last])


def _pack_sorted(
    keys: Sequence[bytes], values: Values, chosen: U32 | None
) -> tuple[bytes, SevenColumns]:
    # Sorting 16 bits is a radix sort.
    partitions = (partitions_of(keys) if chosen is None else chosen).astype(np.uint16)
    order = np.argsort(partitions, kind="stable")
    if len(keys) > 1:
        pick = itemgetter(*order.tolist())
        keys, values = pick(keys), pick(values)
    counts = np.bincount(partitions)
    touched = counts.nonzero()[0]
    ops = b""
    if None in values:
        ops = bytes([OP_DELETE if value is None else OP_SET for value in values])
    sets = _without_none(values)
    edges = offset_column(_lengths(keys)), offset_column(_lengths(sets))
    columns = b"", ops, edges[0], b"".join(keys), edges[1], b"".join(sets), b""
    return make_runs(touched, counts[touched]).tobytes(), columns


def offset_column(lengths: npt.NDArray[np.signedinteger]) -> bytes:
    """Return the offsets of cells of these lengths: int32, one more than cells."""
    offsets = np.zeros(len(lengths) + 1, "<i4")
    lengths.cumsum(out=offsets[1:])
    return offsets.tobytes()


def row_slices(sizes: I64, size_max: int, rows_max: int) -> Iterator[tuple[int, int]]:
    """Slice rows, in order: as many as stay within ``size_max`` and ``rows_max``, or a single larger one.

    Args:
        sizes: of each row, in bytes.
    """
    ends = np.cumsum(sizes)
    first = 0
    while first < len(ends):
        floor = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, floor + size_max, side="right"))
        last = min(max(last, first + 1), first + rows_max, len(ends))
        yield first, last
        first = last


def block_keys(block: Block) -> list[bytes]:
    """Return each row's key."""
    keys = block.keys
    ends = np.frombuffer(block.key_offsets, "<i4").tolist()
    return [keys[a:b] for a, b in pairwise(ends)]


def block_values(block: Block) -> list[bytes | None]:
    """Return each row's value; None for a delete, and for every row when the values were left out."""
    if not block.value_offsets:
        return [None] * block.rows
    data = block.values
    ends = np.frombuffer(block.value_offsets, "<i4").tolist()
    values: list[bytes | None] = [data[a:b] for a, b in pairwise(ends)]
    if block.ops:
        for row in np.flatnonzero(np.frombuffer(block.ops, np.uint8) == OP_DELETE).tolist():
            values[row] = None
    return values


def block_partitions(block: Block) -> list[int]:
    """Return each row's partition."""
    runs = block.runs
    if len(runs) == 1:
        return [int(runs["partition"][0])] * block.rows
    partitions: list[int] = np.repeat(runs["partition"], runs["count"]).tolist()
    return partitions


def block_seqnos(block: Block) -> list[int]:
    """Return each row's seqno."""
    runs = block.runs
    if len(runs) == 1 and not block.seqnos:
        first = int(runs["start_seqno"][0]) + 1
        return list(range(first, first + block.rows))
    seqnos: list[int] = row_seqnos(block).tolist()
    return seqnos


def block_ops(block: Block) -> list[int]:
    """Return each row's op, OP_SET or OP_DELETE."""
    return list(block.ops) if block.ops else [0] * block.rows


POSITION: Final = np.dtype([("partition", "<u4"), ("seqno", "<u8")])
"""One record of Ack.positions, Heartbeat.high_seqnos and Frame.purge_seqnos, 12 bytes."""
