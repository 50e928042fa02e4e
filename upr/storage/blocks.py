"""Stored blocks: columns, heads (the run record in front, enough to plan compaction), cursors, compression, building."""

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from upr.storage import keyspace
from upr_protocol.block import (
    COMPILED,
    I64,
    OP_DELETE,
    RUN,
    RUN_FIELDS,
    U32,
    U64,
    FurtherColumn,
    Runs,
    make_runs,
    row_bounds,
)
from upr_protocol.errors import DataDamagedError, DataDirectoryError
from upr_protocol.limits import BLOCK_COLUMN_BYTES, RUN_SPAN_MAX
from upr_protocol.wire.codec import (
    Columns,
    check_encoded,
    column_spans,
    compress_block,
    decode_runs,
    encode_columns,
    further_in,
    open_checked,
    open_columns,
    plain_bytes,
)
from upr_protocol.wire.compression import zstd_available

try:
    from upr.storage._merge import merge
    from upr.storage._search import candidate, opened, rows_at, wanted_rows
except ImportError:
    merge = candidate = opened = rows_at = wanted_rows = None  # type: ignore[assignment]

MERGE, OPENED, CANDIDATE, ROWS_AT, WANTED_ROWS = (
    (None,) * 5 if COMPILED is None else (merge, opened, candidate, rows_at, wanted_rows)
)
"""Compiled twins of merging, ``checked``, ``BlockCursor.candidate``, ``rows_of`` and ``rows_with``; what is out of the
ordinary they leave to these."""
READ_BYTES = 8 * 2**20
"""Blocks of a partition that are read together."""
HASHED_BLOCKS = 1000
"""Blocks whose hashes are looked at in one step."""
FEW = 8
"""Number of hashes up to which one comparison for each is cheaper than a hash table."""
ROWS_AT_ONCE = 2**16
"""Rows compared at once: their hashes, and the result, stay in the processor's cache."""
COPIED_BYTES = 8 * 2**10
"""Columns at least this large on average are copied by Arrow; a call of it costs more than to join smaller ones."""
FEW_RUNS = 16
"""Runs up to which to look at each as plain numbers costs less than arrays, where the processor did something else before."""
HEAD_BYTES = 2 + RUN.itemsize
PEEK_BYTES = 128
"""Bytes in front of a block that also hold its uncompressed size."""
_CHECKSUMS = (b"\x4d", b"\x55")
_BEGINNING = b"\x0a" + bytes([RUN.itemsize])
"""An encoded block begins with field 1, its run table; a stored block has one run."""


class Head(NamedTuple):
    """Head of a stored block.

    Attributes:
        start, end: it covers the seqnos in (start, end].
        horizon: see Block.runs.
        rows: how many it has.
        size: encoded bytes.
        plain: about how many bytes it has in memory: those it was compressed from, or ``size``.
    """

    start: int
    end: int
    horizon: int
    rows: int
    size: int
    plain: int


def head_of(value: bytes | memoryview, size: int, partition: int, end: int) -> Head:
    """Parse a head out of a value's first PEEK_BYTES; HEAD_BYTES do, but do not tell ``plain``.

    It does not verify checksums; users of the columns do.

    Raises:
        DataDamagedError: the bytes are no head of a block of this partition with this end.
    """
    if len(value) < HEAD_BYTES or value[:2] != _BEGINNING:
        raise DataDamagedError(f"partition {partition}: the block that ends at {end} has no head")
    owner, rows, start, told_end, horizon, _ = RUN_FIELDS.unpack_from(value, 2)
    # Columns follow in a block that is not compressed, checksums in one that is.
    compressed = value[HEAD_BYTES : HEAD_BYTES + 1] in _CHECKSUMS
    plain = max(size, plain_bytes(bytes(value), size)) if compressed else size
    head = Head(start, told_end, horizon, rows, size, plain)
    if owner != partition or told_end != end or not start < end <= horizon:
        raise DataDamagedError(f"partition {partition}: the block that ends at {end} says {head}")
    return head


def missing_block(partition: int, end: int) -> DataDamagedError:
    return DataDamagedError(f"partition {partition}: the block that ends at {end} is missing")


def own_head(data: bytes, partition: int) -> tuple[Head, Runs]:
    """Return a block's head and its run table; DataDamagedError if it is no block of one run of the partition."""
    if len(data) < HEAD_BYTES:
        raise DataDamagedError(f"partition {partition}: a stored block of {len(data)} bytes")
    end = RUN_FIELDS.unpack_from(data, 2)[3]
    return head_of(data, len(data), partition, end), np.frombuffer(data, RUN, 1, 2)


def rows_in(data: bytes) -> int:
    """Return how many rows a block of one run has that was just made."""
    return int(RUN_FIELDS.unpack_from(data, 2)[1])


class BlockRange(NamedTuple):
    """Neighbouring blocks of a partition, oldest first: compacted or compared together, or to be compacted."""

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
        return sum([head.size for head in self.heads])

    @property
    def plain(self) -> int:
        """Return the approximate bytes of its blocks in memory."""
        return sum([head.plain for head in self.heads])

    @property
    def rows(self) -> int:
        return sum([head.rows for head in self.heads])


def stretches(
    partition: int, heads: Sequence[Head], settled: Iterable[tuple[int, int]] = ()
) -> list[BlockRange]:
    """Group a partition's blocks: those that share a horizon, and those within one settled range.

    Args:
        heads: the partition's blocks, oldest first.
        settled: disjoint ranges (start, end] whose rows were compared with each other.
    """
    ranges = list(settled)
    groups: list[list[Head]] = []
    # Of the block before: its horizon, and where the settled range ends in which it is.
    horizon, within = -1, 0
    for head in heads:
        if head.horizon == horizon or head.end <= within:
            groups[-1].append(head)
        else:
            groups.append([head])
        horizon = head.horizon
        if ranges and head.start >= within:
            within = max([last for first, last in ranges if first <= head.start < last], default=0)
    return [BlockRange(partition, tuple(group)) for group in groups]


def summary(runs: Runs) -> tuple[int, bool]:
    """Return how many rows runs have, and whether each ends in a snapshot marker."""
    told = None if COMPILED is None else COMPILED.summary(runs.tobytes())
    if told is None:
        told = int(runs["count"].sum()), bool((runs["horizon"] == runs["end_seqno"]).all())
    return told


def put_ends(runs: Runs, *tables: U64) -> None:
    """Note where runs end, in tables with an item for each partition; of a partition's several runs the last one counts."""
    if COMPILED is not None and COMPILED.put_ends(runs.tobytes(), *tables):
        return
    # For a repeated index numpy keeps the last assignment.
    partitions, ends = runs["partition"], runs["end_seqno"]
    for table in tables:
        table[partitions] = ends


def last_complete(heads: Sequence[Head]) -> int:
    """Return the last seqno at which the blocks end in a complete marker, 0 if there is none."""
    complete = horizon = 0
    for head in heads:
        horizon = max(horizon, head.horizon)
        if horizon == head.end:
            complete = head.end
    return complete


@dataclass(frozen=True, slots=True)
class Replacement:
    """Replacement of blocks by others of the same partition and range.

    Attributes:
        old: ends of the removed blocks.
        new: (end_seqno, bytes) of the new blocks.
        purge: the purge seqno that must be stored with it; 0 for none.
        hashes: of the new blocks' keys, as ``keyspace.pack_hashes``; blocks without any are read by every search.
    """

    partition: int
    old: list[int]
    new: list[tuple[int, bytes]]
    purge: int = 0
    hashes: Sequence[bytes] = ()


_TABLE_CRC = 10


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Stored block without its columns; of its checksums that of the run table is verified.

    Attributes:
        start, end: it covers the seqnos in (start, end].
        rows: how many it has.
        time: when the newest of them was committed, microseconds since the epoch; 0 without rows.
    """

    start: int
    end: int
    rows: int
    time: int


class BlockHashes(NamedTuple):
    """Hashes of neighbouring stored blocks' keys.

    Attributes:
        starts, ends: of the blocks, newest first.
        row_ends: rows of a block and of those before it.
        hashes: one a row, of all the blocks.
    """

    starts: list[int]
    ends: list[int]
    row_ends: I64
    hashes: U32


Candidate = tuple[int, int, int, list[int]]
"""Start and end of a stored block that may have a key, number of its rows, and which of them may have it, ascending."""


def rows_with(hashes: U32, sought: set[int]) -> I64:
    """Return the rows, ascending, whose hashes are among some."""
    if len(sought) > FEW:
        if WANTED_ROWS is not None:
            return np.frombuffer(
                WANTED_ROWS(hashes, array("I", sorted(sought)).tobytes()), np.int64
            )
        wanted = np.fromiter(sought, np.uint32, len(sought))
        # Most rows are ruled out by half of their bits, at a quarter of what a hash table takes.
        near = np.zeros(2**16, bool)
        near[wanted & 0xFFFF] = True
        starts = range(0, len(hashes), ROWS_AT_ONCE)
        parts = [
            np.flatnonzero(near[hashes[at : at + ROWS_AT_ONCE] & 0xFFFF]) + at for at in starts
        ]
        rows: I64 = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        found = pc.is_in(pa.array(hashes[rows]), value_set=pa.array(wanted))
        return rows.compress(found.to_numpy(zero_copy_only=False))
    either = np.zeros(len(hashes), bool)
    for one in sought:
        either |= hashes == np.uint32(one)
    return np.flatnonzero(either)


class BlockCursor:
    """Cursor over the blocks of one read transaction, for the thread that began it.

    Args:
        cursor: over the blocks, of a transaction with buffers.
        hashes: over the hashes of their keys, of the same transaction; None if they cannot be used.
    """

    def __init__(self, cursor: Any, hashes: Any) -> None:
        self._cursor = cursor
        self._hashes = hashes

    def newest_end(self, partition: int) -> int:
        """Return the end of a partition's newest block, 0 if it has none."""
        cursor = self._cursor
        above = cursor.set_range(keyspace.partition_key(partition + 1))
        if cursor.prev() if above else cursor.last():
            owner, end = keyspace.unpack_block_key(bytes(cursor.key()))
            return end if owner == partition else 0
        return 0

    def containing(self, partition: int, seqno: int) -> StoredBlock:
        """Return the block that contains a seqno.

        Raises:
            DataDamagedError: there is none, it is no block of one run of the partition, or its run table has changed.
            CorruptBlockError: its bytes are no block.
        """
        cursor = self._cursor
        owner = -1
        if cursor.set_range(keyspace.block_key(partition, seqno)):
            owner, end = keyspace.unpack_block_key(bytes(cursor.key()))
        if owner != partition:
            raise DataDamagedError(f"the block that tells of seqno {seqno} is missing")
        value = cursor.value()
        head = head_of(bytes(value[:HEAD_BYTES]), len(value), partition, end)
        if head.start >= seqno:
            raise DataDamagedError(f"the block that tells of seqno {seqno} is missing")
        first, last = column_spans(value).get(_TABLE_CRC, ABSENT)
        if google_crc32c.value(bytes(value[2:HEAD_BYTES])) != int.from_bytes(
            value[first:last], "little"
        ):
            # A wrong time would misdirect a search unnoticed.
            raise DataDamagedError(f"the table of the block that ends at {end} has changed")
        return StoredBlock(head.start, end, head.rows, RUN_FIELDS.unpack_from(value, 2)[5])

    def hashes(self, partition: int, end: int, above: int, most: int) -> BlockHashes:
        """Return the hashes of neighbouring blocks, newest first, from the block that ends at a seqno on.

        They end before a block whose hashes are not there or fail their checksum: that block must be read.

        Args:
            above: blocks that end at or below are not needed.
            most: bytes; more blocks follow when their hashes reach it.
        """
        starts, ends, found = list[int](), list[int](), list[bytes]()
        size = 0
        for start, last, value in self._hashed(partition, end, above):
            starts.append(start)
            ends.append(last)
            found.append(value[keyspace.HASHES])
            size += len(value)
            if size >= most:
                break
        row_ends = np.cumsum([len(hashes) // 4 for hashes in found], dtype=np.int64)
        return BlockHashes(starts, ends, row_ends, np.frombuffer(b"".join(found), "<u4"))

    def candidate(
        self, partition: int, end: int, above: int, most: int, sought: set[int]
    ) -> tuple[Candidate | None, int]:
        """Return the first block, from the one that ends at a seqno down, that may have a key of some hashes.

        If that is none of those that ``hashes`` returns, it is the last of them, without rows; None if there are none.
        With it is returned how many bytes were looked at.
        """
        if CANDIDATE is not None and self._hashes is not None:
            at = self._hashes.set_key(keyspace.block_key(partition, end))
            stored = self._hashes.iterprev() if at else iter(())
            wanted = array("I", sorted(sought)).tobytes()
            told, size = CANDIDATE(stored, partition, end, above, most, HASHED_BLOCKS, wanted)
            return told, size
        found: Candidate | None = None
        size = 0
        for start, last, value in self._hashed(partition, end, above):
            hashes = np.frombuffer(value[keyspace.HASHES], "<u4")
            # Most blocks have none, which takes arrays longer to say than a set, or bytes.
            if len(sought) > FEW:
                has_some = not sought.isdisjoint(hashes.tolist())
            else:
                has_some = any(one.to_bytes(4, "little") in value for one in sought)
            rows = rows_with(hashes, sought).tolist() if has_some else []
            found = start, last, len(hashes), rows
            size += len(value)
            if rows or size >= most:
                break
        return found, size

    def _hashed(self, partition: int, end: int, above: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield start, end and row of hashes of neighbouring blocks, HASHED_BLOCKS of them; see ``hashes``."""
        cursor, key = self._hashes, keyspace.block_key(partition, end)
        more = cursor is not None and cursor.set_key(key)
        left = HASHED_BLOCKS
        while more and left and end > above and cursor.key() == key:
            value = bytes(cursor.value())
            try:
                start = keyspace.start_of_hashes(key, value)
            except DataDamagedError:
                return
            yield start, end, value
            key, end = keyspace.block_key(partition, start), start
            more = cursor.prev()
            left -= 1

    def data(self, partition: int, end: int) -> bytes:
        """Return a copy of the block that ends at a seqno; DataDamagedError if there is none."""
        return bytes(self.mapped(partition, end))

    def mapped(self, partition: int, end: int) -> Any:
        """As ``data``, where it lies: a view that must not be looked at after the transaction."""
        if not self._cursor.set_key(keyspace.block_key(partition, end)):
            raise missing_block(partition, end)
        return self._cursor.value()

    def above(self, partition: int, seqno: int) -> Iterator[bytes]:
        """Yield copies of a partition's blocks above a seqno, which may lie inside the first one."""
        prefix = keyspace.partition_key(partition)
        more = self._cursor.set_range(keyspace.block_key(partition, seqno + 1))
        while more and self._cursor.key()[:2] == prefix:
            yield bytes(self._cursor.value())
            more = self._cursor.next()


COMPRESSIONS = ("", "zstd")
"""Values of ``Identity.compression``."""

Compress = Callable[[bytes], bytes]
"""Function of an encoded block that returns its stored form, as ``compress_block``."""


def compressor(compression: str) -> Compress | None:
    """Return the function applied to each block before it is stored, None for none.

    Raises:
        DataDirectoryError: the compression is unknown, or its library is not installed.
    """
    if compression not in COMPRESSIONS:
        raise DataDirectoryError(
            f"the bucket's blocks are compressed with {compression!r}, known is zstd",
            hint="it was made by a newer release: run that",
        )
    if not compression:
        return None
    if not zstd_available():
        raise DataDirectoryError(
            "the bucket's blocks are compressed with zstd, and zstandard is not installed",
            hint="install upr-stream[server]",
        )
    return compress_block


SEQNOS, OPS, KEY_OFFSETS, KEYS, VALUE_OFFSETS, VALUES, TIMES = range(2, 9)
ABSENT = (0, 0)

Sparse = tuple[I64, Any]
"""Cells of a further column that are not empty: their rows, ascending, and an Arrow binary array. Most rows have none, and
offsets for all of them, in 16 columns, would take many times what was written."""


@dataclass(slots=True)
class Encoded:
    """Encoded block with its parsed run table, which every user needs.

    Attributes:
        columns: the places of its columns, if they were parsed.
    """

    runs: Runs
    data: bytes
    columns: Columns | None = None

    @property
    def size(self) -> int:
        """Return its cost in credit."""
        return len(self.data)

    def opened(self) -> Columns:
        return open_columns(self.data) if self.columns is None else self.columns


def checked(data: bytes) -> Encoded:
    """Return a stored block whose checksums hold; CorruptBlockError when they do not. It may be a view: see ``BlockCursor.mapped``."""
    spans = None if OPENED is None else OPENED(data)
    if spans is not None:
        return Encoded(decode_runs(data[slice(*spans.get(1, ABSENT))]), data, (data, spans))
    data = bytes(data)
    runs, columns = open_checked(data)
    return Encoded(runs, data, columns)


def check_stored(data: bytes) -> bool:
    """Check a stored block's checksums as ``check_encoded``; return whether it is compressed."""
    return (OPENED is None or OPENED(data) is None) and check_encoded(data)


StoredRow = tuple[int, int, bytes, bytes | None]
"""Partition, seqno, key and value of a row; None for a delete."""
_EDGES = struct.Struct("<ii")


def rows_of(block: Encoded, rows: Sequence[int]) -> list[StoredRow]:
    """Return some rows of a block, given in ascending order, the last one first."""
    (data, spans), runs = block.opened(), block.runs
    # These may be empty.
    seqnos, ops = column_of((data, spans), SEQNOS), column_of((data, spans), OPS)
    key_edges, keys = spans.get(KEY_OFFSETS, ABSENT)[0], spans.get(KEYS, ABSENT)[0]
    value_edges, values = spans.get(VALUE_OFFSETS, ABSENT)[0], spans.get(VALUES, ABSENT)[0]
    bounds = row_bounds(runs)
    found = []
    for row in reversed(rows):
        at = int(np.searchsorted(bounds, row, side="right")) - 1
        offset = int(np.frombuffer(seqnos, "<u4")[row]) if seqnos else row - int(bounds[at]) + 1
        first, end = _EDGES.unpack_from(data, key_edges + 4 * row)
        key, value = bytes(data[keys + first : keys + end]), None
        if not ops or ops[row] != OP_DELETE:
            first, end = _EDGES.unpack_from(data, value_edges + 4 * row)
            value = bytes(data[values + first : values + end])
        found.append(
            (int(runs["partition"][at]), int(runs["start_seqno"][at]) + offset, key, value)
        )
    return found


def read_rows(data: bytes, rows: list[int], *, check: bool) -> list[StoredRow]:
    """Return some rows of an encoded block as ``rows_of``, once its checksums are verified; or raise CorruptBlockError.

    Args:
        check: False if that was done before; it need not be done again then.
    """
    told = None if ROWS_AT is None else ROWS_AT(data, rows, check)
    return rows_of(checked(data), rows) if told is None else told


def binary_cells(offsets: npt.NDArray[np.int32], data: bytes | memoryview) -> Any:
    """Return a column of keys or values as an Arrow binary array."""
    return pa.Array.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def column_of(columns: Columns, field: int) -> bytes:
    data, spans = columns
    first, end = spans.get(field, ABSENT)
    return data[first:end]


def cells_of(opened: Sequence[Columns], field: int, data_field: int) -> Any:
    """Return the keys or values of several blocks as one Arrow array; of several each must have rows."""
    edges = [column_of(columns, field) for columns in opened]
    places = [spans.get(data_field, ABSENT) for _, spans in opened]
    if sum(end - first for first, end in places) >= COPIED_BYTES * len(opened) > 0:
        # Arrow copies them without the interpreter lock.
        return pa.concat_arrays(
            [
                binary_cells(np.frombuffer(own, "<i4"), memoryview(data)[slice(*place)])
                for own, (data, _), place in zip(edges, opened, places, strict=True)
            ]
        )
    told = np.frombuffer(b"".join(edges), "<i4")
    # Where one block's offsets end and the next one's begin there is no cell.
    ends = np.cumsum(np.array([len(own) // 4 for own in edges], np.int64))
    lengths = np.delete(np.diff(told), ends[:-1] - 1)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return binary_cells(offsets, b"".join([column_of(columns, data_field) for columns in opened]))


def further_cells(opened: Sequence[Columns], rows: I64) -> dict[int, Sparse]:
    """Return the cells of further columns of several blocks by id; ``rows`` are those of each."""
    found: dict[int, list[Sparse]] = {}
    firsts = np.cumsum(rows) - rows
    for columns, first in zip(opened, firsts.tolist(), strict=True):
        for one in further_in(columns):
            offsets = np.frombuffer(one.offsets, "<i4")
            own = np.flatnonzero(offsets[1:] > offsets[:-1])
            if len(own):
                # Between two cells that are not empty there are only empty ones.
                cells = binary_cells(np.append(offsets[own], offsets[-1:]), one.data)
                found.setdefault(one.id, []).append((first + own, cells))
    return joined_cells(found)


def joined_cells(found: Mapping[int, Sequence[Sparse]]) -> dict[int, Sparse]:
    """Return the parts of columns as one each, by id, ascending; no two parts have a row in common."""
    joined = {}
    for id_, parts in sorted(found.items()):
        rows = np.concatenate([own for own, _ in parts])
        cells = pa.concat_arrays([own for _, own in parts])
        if (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows)
            rows, cells = rows[order], cells.take(pa.array(order))
        joined[id_] = rows, cells
    return joined


def keys_of(*blocks: Encoded) -> Any:
    """Return the keys of blocks, end to end, as an Arrow binary array; of several blocks each must have rows."""
    return cells_of([block.opened() for block in blocks], KEY_OFFSETS, KEYS)


def key_hashes(block: Encoded) -> U32:
    """Return the hash of each row's key."""
    columns = block.opened()
    offsets = np.frombuffer(column_of(columns, KEY_OFFSETS), "<i4")
    return keyspace.hashes_of(offsets.astype(np.int64), column_of(columns, KEYS))


def tombstones_of(block: Encoded) -> tuple[I64, U64, I64]:
    """Return the deletes of a block of one run: row numbers, seqnos, commit times in microseconds."""
    columns = block.opened()
    run = block.runs[0]

    def column(field: int, dtype: str) -> npt.NDArray[Any] | None:
        data = column_of(columns, field)
        return np.frombuffer(data, dtype) if data else None

    ops, offsets, times = column(OPS, "u1"), column(SEQNOS, "<u4"), column(TIMES, "<i8")
    rows = np.flatnonzero(ops) if ops is not None else np.zeros(0, np.int64)
    seqnos = rows + 1 if offsets is None else offsets[rows]
    return (
        rows,
        run["start_seqno"] + seqnos.astype(np.uint64),
        np.full(len(rows), run["time"], np.int64) if times is None else times[rows],
    )


ReadBlocks = Callable[[int, Sequence[int]], list[bytes]]
"""Function of partition and ends that returns the blocks; DataDamagedError if one is missing."""


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Counts of a partition's stored tombstones, superseded ones included.

    Attributes:
        count: all.
        old: those of a time or older.
        newest_old: the highest seqno among these, 0 for none.
        rows: rows of any kind.
    """

    count: int
    old: int
    newest_old: int
    rows: int


def count_tombstones(
    partition: int, heads: Sequence[Head], read: ReadBlocks, old: int
) -> Tombstones:
    """Count the tombstones of a partition's blocks.

    Args:
        old: microseconds since the epoch.

    Raises:
        DataDamagedError, CorruptBlockError: a block is missing or fails its checks.
    """
    count = old_ones = newest = 0
    for block in each_checked(partition, heads, read):
        _, seqnos, times = tombstones_of(block)
        count += len(seqnos)
        aged = seqnos[times <= old]
        old_ones += len(aged)
        newest = max(newest, int(aged.max()) if len(aged) else 0)
    return Tombstones(count, old_ones, newest, sum(head.rows for head in heads))


def each_checked(partition: int, heads: Sequence[Head], read: ReadBlocks) -> Iterator[Encoded]:
    """Yield checked blocks, with at most READ_BYTES of them in memory."""
    first = size = 0
    for i, head in enumerate(heads):
        size += head.size
        if size >= READ_BYTES or i == len(heads) - 1:
            for data in read(partition, [h.end for h in heads[first : i + 1]]):
                yield checked(data)
            first, size = i + 1, 0


class Piece(NamedTuple):
    """Run of a block that is to be built, and how many rows it has."""

    partition: int
    rows: int
    start: int
    end: int
    horizon: int

    @property
    def dense(self) -> bool:
        """Whether each of its seqnos has a row."""
        return self.rows == self.end - self.start


Made = tuple[int, int, int, int, bytes, bytes]
"""Partition, end, horizon, number of rows, bytes, and packed hashes of the keys of a block."""


def merge_compiled(
    blocks: Iterable[bytes],
    window: tuple[int, int],
    stored: U64,
    limits: tuple[U64, int, U64, int] | None,
    *,
    check: bool,
) -> list[Made] | None:
    """Merge some partitions' rows, without the interpreter lock: the newest of a key stays, and all become blocks.

    Args:
        blocks: encoded, in the order of their numbering.
        window: the first partition, and the one behind the last.
        stored: each partition's stored high, shape (1024,): the new blocks begin right above it.
        check: whether to verify the blocks' checksums.
        limits: ``passed``, ``old``, ``never`` and ``very_old`` of PurgeLimits.

    Returns:
        None if that is not for the compiled module: there is none, a tombstone may be purged, a block is compressed or has
        further columns, or one is not sound.
    """
    if MERGE is None:
        return None
    made: list[Made] | None = MERGE(
        tuple(blocks), check, *window, BLOCK_COLUMN_BYTES, stored, limits
    )
    return made


class SortedRows:
    """Rows of several partitions, ascending by partition and seqno, from which blocks are built.

    Args:
        keys, values: Arrow binary arrays.
        hashes: of the keys. ops: uint8. seqnos: uint64. times: int64, microseconds.
        further: cells of further columns by id, ascending.
    """

    def __init__(
        self,
        keys: Any,
        hashes: U32,
        values: Any,
        ops: npt.NDArray[np.uint8],
        seqnos: U64,
        times: I64,
        further: Mapping[int, Sparse],
    ) -> None:
        self._key_offsets, self._keys = raw_cells(keys)
        self._value_offsets, self._values = raw_cells(values)
        self._hashes, self._ops, self._times = hashes, ops, times
        self.seqnos = seqnos
        self._further = [(id_, rows, *raw_cells(cells)) for id_, (rows, cells) in further.items()]

    def stretch(self, rows: tuple[int, int], run: tuple[int, int, int, int]) -> list[Piece]:
        """Return a partition's pieces: one, or a stretch of several that share the horizon."""
        partition, start, end, horizon = run
        first, last = rows
        pieces = []
        while True:
            cut = self._fit(first, last)
            run_end = end if cut == last else int(self.seqnos[cut - 1])
            if run_end - start > RUN_SPAN_MAX:
                run_end = start + RUN_SPAN_MAX
                reached = np.searchsorted(self.seqnos[first:cut], np.uint64(run_end), side="right")
                cut = first + int(reached)
            pieces.append(Piece(partition, cut - first, start, run_end, horizon))
            if run_end == end:
                return pieces
            first, start = cut, run_end

    def _fit(self, first: int, last: int) -> int:
        """Return the end row of a block that begins at a row and fits BLOCK_COLUMN_BYTES."""
        keys, values = self._key_offsets, self._value_offsets
        # More rows do not fit, whatever they have.
        last = min(last, first + BLOCK_COLUMN_BYTES // 21 + 1)
        cells = [(*np.searchsorted(o[1], (first, last)), o[1], o[2]) for o in self._further]
        cells = [one for one in cells if one[0] < one[1]]
        each = 21 + 4 * len(cells)
        whole = keys[last] - keys[first] + values[last] - values[first] + each * (last - first)
        whole += sum([offsets[high] - offsets[low] for low, high, _, offsets in cells])
        if whole <= BLOCK_COLUMN_BYTES:
            return last
        counts = np.arange(last - first + 1)
        size = keys[first : last + 1] + values[first : last + 1] + 21 * counts
        for low, high, rows, offsets in cells:
            own = rows[low:high] - first
            size += np.cumsum(_spread(own, offsets[low : high + 1], last - first))
            # A block has offsets of a column for all its rows, as soon as one of them has a cell.
            size += np.where(counts > own[0], 4 * counts, 0)
        cut = first + int(np.searchsorted(size, size[0] + BLOCK_COLUMN_BYTES, side="right")) - 1
        return min(max(cut, first + 1), last)

    def blocks(
        self, pieces: Sequence[Piece], compress: Compress | None
    ) -> tuple[list[tuple[int, int, bytes]], list[bytes]]:
        """Build a block of each piece, and pack the hashes of its keys; the pieces have all rows between them, in order."""
        if not pieces:
            return [], []
        partitions, counts, starts, ends, horizons = (
            np.array(column, np.int64) for column in zip(*pieces, strict=True)
        )
        filled = np.flatnonzero(counts)
        firsts = np.cumsum(counts) - counts
        times = np.zeros(len(pieces), np.int64)
        has_ops, has_times = np.zeros((2, len(pieces)), bool)
        if len(filled):
            edges = firsts[filled]
            times[filled] = np.maximum.reduceat(self._times, edges)
            has_ops[filled] = np.logical_or.reduceat(self._ops, edges)
            differs = self._times != np.repeat(times, counts)
            has_times[filled] = np.logical_or.reduceat(differs, edges)
        table = make_runs(partitions, counts, starts, ends, horizons, times).tobytes()
        seqnos = (self.seqnos.astype(np.int64) - np.repeat(starts, counts)).astype("<u4").tobytes()
        key_edges = _edges(self._key_offsets, firsts, counts)
        value_edges = _edges(self._value_offsets, firsts, counts)
        ops, times_of_rows = self._ops.tobytes(), self._times.astype("<i8").tobytes()
        bounds = np.append(firsts, len(self.seqnos))
        keys, values = self._key_offsets[bounds].tolist(), self._value_offsets[bounds].tolist()
        further = [
            (id_, rows, offsets, data, np.searchsorted(rows, bounds).tolist())
            for id_, rows, offsets, data in self._further
        ]
        blocks: list[tuple[int, int, bytes]] = []
        hashes: list[bytes] = []
        flags = zip(has_ops.tolist(), has_times.tolist(), strict=True)
        first = 0
        for i, (piece, (own_ops, own_times)) in enumerate(zip(pieces, flags, strict=True)):
            last = first + piece.rows
            cells = slice(4 * (first + i), 4 * (last + i + 1))
            data = encode_columns(
                table[RUN.itemsize * i : RUN.itemsize * (i + 1)],
                (
                    b"" if piece.dense else seqnos[4 * first : 4 * last],
                    ops[first:last] if own_ops else b"",
                    key_edges[cells],
                    bytes(self._keys[keys[i] : keys[i + 1]]),
                    value_edges[cells],
                    bytes(self._values[values[i] : values[i + 1]]),
                    times_of_rows[8 * first : 8 * last] if own_times else b"",
                ),
                tuple(
                    [
                        _column(id_, rows[a:b] - first, offsets[a : b + 1], data, piece.rows)
                        for id_, rows, offsets, data, at in further
                        if (a := at[i]) < (b := at[i + 1])
                    ]
                ),
            )
            mine = self._hashes[first:last]
            hashes.append(keyspace.pack_hashes(piece.partition, piece.start, piece.end, mine))
            if compress is not None:
                data = compress(data)
            blocks.append((piece.partition, piece.end, data))
            first = last
        return blocks, hashes


def _edges(offsets: I64, firsts: I64, counts: I64) -> bytes:
    """Return the offsets of each piece's cells, from 0, as "<i4": one more than rows for each piece."""
    entries = counts + 1
    rows = np.arange(entries.sum()) - np.repeat(np.arange(len(counts)), entries)
    own: I64 = offsets[rows] - np.repeat(offsets[firsts], entries)
    return own.astype("<i4").tobytes()


def _spread(rows: I64, offsets: I64, count: int) -> I64:
    """Return 0, and the length of the cell of each of ``count`` rows, of cells that only some of them have."""
    lengths = np.zeros(count + 1, np.int64)
    lengths[rows + 1] = np.diff(offsets)
    return lengths


def _column(id_: int, rows: I64, offsets: I64, data: memoryview, count: int) -> FurtherColumn:
    """Return the column of a block of ``count`` rows, of cells that only some of them have."""
    edges = np.cumsum(_spread(rows, offsets, count))
    return FurtherColumn(id_, edges.astype("<i4").tobytes(), bytes(data[offsets[0] : offsets[-1]]))


def raw_cells(array: Any) -> tuple[I64, memoryview]:
    """Return a binary array's offsets, from 0 and as int64, and its bytes, which are not copied."""
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, "<i4", len(array) + 1, array.offset * 4)
    raw = memoryview(b"" if data is None else data)[offsets[0] : offsets[-1]]
    return (offsets - offsets[0]).astype(np.int64), raw
