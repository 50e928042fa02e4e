"""Rows of backups as Parquet and as tables: written, read, checked, folded to a state, and compared with a bucket's.

Memory is bounded: rows are written out whenever about 32 MiB are gathered, a restore point is cut into groups of
partitions that fit into memory, and what a bucket holds is folded as it comes.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from upr_backup.errors import BackupNotFoundError, RepositoryDamagedError, is_damage
from upr_backup.repository import Storage
from upr_backup.repository.chain import (
    Chain,
    Segment,
    add_segment,
    needed,
    number_at,
    segments_of,
    sizes_of,
)
from upr_backup.repository.documents import MICROS_MAX, FileRef, Manifest
from upr_backup.repository.repository import Repository
from upr_client import Only, Tuning
from upr_client.arrow import record_batch
from upr_client.changes.events import ChangeBatch
from upr_client.changes.options import Pinned
from upr_client.errors import RollbackError
from upr_client.types import Bucket
from upr_protocol.block import I64
from upr_protocol.limits import (
    CELL_BYTES_MAX,
    FURTHER_COLUMNS_MAX,
    KEY_BYTES_MAX,
    PARTITIONS,
    VALUE_BYTES_MAX,
)
from upr_protocol.partitioning import partition_of, partitions_of
from upr_protocol.wire.cells import block_cells, pack_cells

SCHEMA: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("seqno", pa.int64()),
        ("op", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("further", pa.binary()),
    ]
)
"""Of rows. op is "set" or "delete"; value is null for a delete; time is that of the commit; further are the row's cells of
further columns, see ``upr_protocol.wire.cells``, null without any."""
_NARROW: Final = SCHEMA.remove(SCHEMA.get_field_index("further"))
"""Of a data file without such cells, which earlier releases read too."""

_FLUSH_BYTES: Final = 32 * 2**20
_ROW_GROUP_ROWS: Final = 65_536
_READ_ROWS: Final = 65_536
_FOLD_BYTES: Final = 64 * 2**20
_BUCKET_FOLD_BYTES: Final = 32 * 2**20
"""Less, because what the server sends meanwhile is in memory too."""
_OFFSETS_BYTES: Final = 2**31 - 1
_TAKEN_BYTES: Final = 2**30
_DAMAGE = (OSError, pa.ArrowException)
_FILLED: Final = ("partition", "seqno", "op", "key")
"""Columns that have a value in each row."""
_PLAIN: Final = frozenset({"PLAIN", "RLE", "BIT_PACKED"})
_OP_BYTES: Final = 1024
"""Of a row group's column op, besides two bits a row."""
_CELLS_BYTES_MAX: Final = FURTHER_COLUMNS_MAX * (CELL_BYTES_MAX + 16)
_ROW_BYTES_MAX: Final = VALUE_BYTES_MAX + KEY_BYTES_MAX + _CELLS_BYTES_MAX + 4096
"""Of one row as Parquet, with what describes its page."""
_ROW_GROUP_BYTES_MAX: Final = _TAKEN_BYTES + _ROW_GROUP_ROWS * KEY_BYTES_MAX + _ROW_BYTES_MAX
"""Of the largest row group that is ever written: that of a merged base, whose values are bounded and whose keys are few."""


class LateCellsError(Exception):
    """Rows with cells of further columns came when the file was begun without them: it is gone, and is begun anew."""


class RowsWriter:
    """Writes the rows of some partitions into one new data file.

    Args:
        wide: whether it is written with further cells whatever the first rows have; see LateCellsError.

    Attributes:
        rows, data_bytes: by partition, how many rows and bytes of keys, values and cells; int64, shape (1024,).
    """

    def __init__(self, storage: Storage, path: str, *, wide: bool = False) -> None:
        self._storage = storage
        self._wide = wide
        self._path = path
        self._gathered: list[Any] = []
        self._gathered_bytes = 0
        self._sink: Any = None
        self._writer: Any = None
        self.rows: I64 = np.zeros(PARTITIONS, np.int64)
        self.data_bytes: I64 = np.zeros(PARTITIONS, np.int64)

    def add(self, changes: ChangeBatch) -> None:
        batch = record_batch(changes)
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns["op"] = pc.if_else(batch.column("deleted"), "delete", "set")
        columns["further"] = _further_of(changes, batch.num_rows)
        arrays = [columns[name] for name in SCHEMA.names]
        self.add_rows(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))

    def add_rows(self, batch: Any) -> None:
        """Add a record batch of ``SCHEMA``; LateCellsError when it was to be wide."""
        if not batch.num_rows:
            return
        partitions = batch.column("partition").to_numpy()
        lengths = _lengths(batch.column("key")) + _rest_lengths(batch)
        self.rows += np.bincount(partitions, minlength=PARTITIONS)
        # Sums of 64-bit floats are exact up to 2^53, which is far above the bytes of one batch.
        self.data_bytes += np.bincount(partitions, lengths, PARTITIONS).astype(np.int64)
        self._gathered.append(batch)
        self._gathered_bytes += batch.nbytes
        if self._gathered_bytes >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._gathered:
            return
        table = pa.Table.from_batches(self._gathered).combine_chunks()
        self._gathered, self._gathered_bytes = [], 0
        order = pc.sort_indices(table, [("partition", "ascending"), ("seqno", "ascending")])
        if table.column("further").null_count < len(table) and not self._wide:
            if self._writer is not None:
                self._writer.close()
                self.close()
                self._storage.delete(self._path)
                raise LateCellsError
            self._wide = True
        kept = SCHEMA if self._wide else _NARROW
        if self._writer is None:
            self._sink = self._storage.create(self._path)
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._sink, mode="w"),
                kept,
                compression="zstd",
                use_dictionary=["op"],
                write_page_checksum=True,
            )
        self._writer.write_table(
            table.take(order).select(kept.names), row_group_size=_ROW_GROUP_ROWS
        )

    def finish(self) -> FileRef | None:
        """Make the file durable; None when there was no row, and then there is no file."""
        self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        digest = self._sink.finish()
        return FileRef(self._path, self._sink.size, digest, int(self.rows.sum()))

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
        if self._writer is not None:
            # Else pyarrow would write the end of a file that was given up, and complain on stderr.
            self._writer.is_open = False


def read_rows(storage: Storage, file: FileRef, partitions: Iterable[int]) -> Iterable[Any]:
    """Yield record batches of ``SCHEMA`` with a data file's rows of some partitions, by seqno within each.

    Raises:
        RepositoryDamagedError: the file is missing or damaged.
        OSError, UprError: it cannot be reached, or may not be read.
    """
    wanted = pa.array(sorted(partitions), pa.int32())
    low, high = wanted[0].as_py(), wanted[-1].as_py()
    try:
        with storage.open(file.path) as opened:
            parquet = pq.ParquetFile(opened, page_checksum_verification=True)
            _check_parquet(parquet, file)
            for index in range(parquet.num_row_groups):
                if not _overlaps(parquet.metadata.row_group(index).column(0).statistics, low, high):
                    continue
                # Group by group, so that a batch is not larger than what was checked.
                for batch in parquet.iter_batches(_READ_ROWS, [index], use_threads=False):
                    if any(batch.column(name).null_count for name in _FILLED):
                        raise RepositoryDamagedError(f"{file.path} has rows with holes")
                    if parquet.schema_arrow == _NARROW:
                        columns = [*batch.columns, pa.nulls(batch.num_rows, pa.binary())]
                        batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
                    yield batch.filter(pc.is_in(batch.column("partition"), wanted))
    except _DAMAGE as error:
        if not is_damage(error):
            raise
        words = " ".join(str(error).split())[:200]
        raise RepositoryDamagedError(f"{file.path} cannot be read: {words}") from error


def _check_parquet(parquet: Any, file: FileRef) -> None:
    """Check that a file can be one of ours before anything of it is unpacked: a few bytes may unpack to many."""
    metadata = parquet.metadata
    if parquet.schema_arrow not in (SCHEMA, _NARROW):
        raise RepositoryDamagedError(f"{file.path} has other columns")
    if metadata.num_rows != file.rows:
        raise RepositoryDamagedError(
            f"{file.path} has {metadata.num_rows} rows, it was written with {file.rows}"
        )
    for index in range(parquet.num_row_groups):
        group = metadata.row_group(index)
        most = min(group.num_rows * _ROW_BYTES_MAX, _ROW_GROUP_BYTES_MAX)
        if group.total_byte_size > most:
            raise RepositoryDamagedError(
                f"{file.path}: {group.num_rows} rows unpack to {group.total_byte_size} bytes; "
                f"must be at most {most}"
            )
        # A value that is stored once and meant for each row would unpack to more than that.
        for at, name in enumerate(parquet.schema_arrow.names):
            column = group.column(at)
            if name == "op":
                fits = column.total_uncompressed_size <= group.num_rows // 4 + _OP_BYTES
            else:
                fits = _PLAIN.issuperset(column.encodings)
            if not fits:
                raise RepositoryDamagedError(
                    f"{file.path}: the column {name} is not stored as here"
                )


def _lengths(column: Any) -> I64:
    """Return the bytes of each cell of a binary column, 0 for null."""
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    found: I64 = lengths.astype(np.int64)
    return found


def _rest_lengths(table: Any) -> I64:
    """Return the bytes of each row's value and further cells."""
    return _lengths(table.column("value")) + _lengths(table.column("further"))


def _overlaps(statistics: Any, low: int, high: int) -> bool:
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min <= high and statistics.max >= low)


def state(
    storage: Storage,
    counted: Mapping[int, Sequence[Segment]],
    key_prefix: bytes = b"",
) -> Any:
    """Return the newest row of each key, deletes included, as a table of ``SCHEMA``; it is all in memory.

    Args:
        counted: by partition, the rows that count.

    Raises:
        RepositoryDamagedError: a file is missing or damaged.
        OSError, UprError: one cannot be reached, or may not be read.
    """
    return _folded(_counted_rows(storage, counted, key_prefix), SCHEMA)


def _counted_rows(
    storage: Storage, counted: Mapping[int, Sequence[Segment]], key_prefix: bytes
) -> Iterator[Any]:
    files: dict[str, tuple[FileRef, dict[int, Segment]]] = {}
    for partition, parts in counted.items():
        for part in parts:
            files.setdefault(part.file.path, (part.file, {}))[1][partition] = part
    for file, parts_of in files.values():
        lows, highs = np.zeros(PARTITIONS, np.int64), np.zeros(PARTITIONS, np.int64)
        for partition, part in parts_of.items():
            lows[partition], highs[partition] = part.low, part.high
        for batch in read_rows(storage, file, parts_of):
            partitions = batch.column("partition").to_numpy()
            seqnos = batch.column("seqno").to_numpy()
            counts = pa.array((seqnos > lows[partitions]) & (seqnos <= highs[partitions]))
            if key_prefix:
                counts = pc.and_(counts, pc.starts_with(batch.column("key"), key_prefix))
            yield batch.filter(counts)


Keep = Callable[[Any], Any]


def _folded(
    batches: Iterable[Any], schema: Any, keep: Keep = lambda table: table, most: int = _FOLD_BYTES
) -> Any:
    """Return the newest row of each key of what ``keep`` leaves of record batches, as a table.

    Of what is superseded only as much as the newest rows, or ``most`` bytes, is in memory at a time.
    """
    folded = pa.Table.from_batches([], schema)
    gathered: list[Any] = []
    size, limit = 0, most
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size > limit:
            folded = newest(pa.concat_tables([folded, keep(pa.Table.from_batches(gathered))]))
            gathered, size = [], 0
            limit = max(most - folded.nbytes, folded.nbytes)
    return newest(pa.concat_tables([folded, keep(pa.Table.from_batches(gathered, schema))]))


def newest(table: Any) -> Any:
    """Return of each key the row with the highest seqno. A key is in one partition only."""
    if not table.num_rows:
        return table
    tops = table.group_by("key").aggregate([("seqno", "max"), ("partition", "min")])
    wanted = _number(tops.column("partition_min"), tops.column("seqno_max"))
    numbers = _number(table.column("partition"), table.column("seqno"))
    return table.filter(pc.is_in(numbers, value_set=wanted.combine_chunks()))


def _number(partitions: Any, seqnos: Any) -> Any:
    """Return one number for partition and seqno: 10 and 48 bits."""
    return pc.add(pc.shift_left(pc.cast(partitions, pa.int64()), 48), seqnos)


def takeable(table: Any) -> Any:
    """Return a table that rows can be taken of, however large it is; binary columns may come back as large_binary.

    Taking joins the chunks of a column first, and offsets of 32 bits do not reach beyond 2 GiB.
    """
    if table.nbytes <= _OFFSETS_BYTES:
        return table
    fields = [
        pa.field(field.name, pa.large_binary() if field.type == pa.binary() else field.type)
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)).combine_chunks()


def in_order(table: Any, order: Any, rows: int) -> Iterable[Any]:
    """Yield a table's rows in another order, in tables of so many rows, or of one GiB of values and cells.

    Args:
        table: with columns value and further, binary.
        order: the rows' numbers, an array.
        rows: 1 or more.
    """
    schema, source = table.schema, takeable(table)
    ends = np.cumsum(_rest_lengths(table)[order.to_numpy()])
    first = 0
    while first < len(order):
        floor = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, floor + _TAKEN_BYTES, side="right"))
        last = min(max(last, first + 1), first + rows)
        yield source.take(order.slice(first, last - first)).cast(schema)
        first = last


GROUP_BYTES = 32 * 2**20
"""About how much of a backup is in memory at a time; a partition that has more is in memory alone."""


@dataclass(frozen=True, slots=True)
class Point:
    """A restore point, or the part of it that was asked for.

    Args:
        counted: by partition, the rows that count.
        sizes: by partition, at most how many bytes its rows take in memory.
        chosen: the partitions that were asked for; None for all.
    """

    repository: Repository
    manifest: Manifest
    counted: Mapping[int, Sequence[Segment]]
    sizes: Mapping[int, int]
    chosen: Sequence[int] | None = None

    @property
    def left_out(self) -> dict[int, int]:
        """Partitions that are older than the backup, which was taken without them; up to which seqno they are there."""
        return {
            p: self.manifest.entries[p].end
            for p in self.manifest.left_out
            if self.chosen is None or p in self.chosen
        }

    def groups(self, group_bytes: int = GROUP_BYTES) -> list[list[int]]:
        """Return the partitions that have rows, ascending, in groups that fit into memory."""
        return grouped({p: self.sizes[p] for p in self.counted}, group_bytes)

    def state(self, group: Sequence[int], key_prefix: bytes = b"") -> Any:
        """Return the state of some partitions, as the function ``state`` does."""
        counted = {p: self.counted[p] for p in group if p in self.counted}
        return state(self.repository.storage, counted, key_prefix)


def open_point(
    repository: Repository, at: Any = None, partitions: Sequence[int] | None = None
) -> Point:
    """Open a restore point and read all its files once, so that nothing damaged is used.

    Args:
        at: a number, the microseconds of a time in a tuple, or the name of a tag; None means the newest.
        partitions: only these; None means all.

    Raises:
        BackupNotFoundError: there is no such backup.
        RepositoryDamagedError: a document or a file is damaged or missing.
    """
    tag = repository.tag(at) if isinstance(at, str) else None
    at = tag.number if tag else at
    try:
        chain, number, backups = _needed(repository, at, indexed=True)
    except RepositoryDamagedError:
        # It may be the index that is not right.
        chain, number, backups = _needed(repository, at, indexed=False)
    if tag and chain.link(number).sha256 != tag.sha256:
        raise BackupNotFoundError(
            f"the backup that the tag was given to is gone: backup {number} is another one",
            hint="'repair' set it aside",
        )
    storage = repository.storage
    counted: Mapping[int, Sequence[Segment]] = segments_of(backups)
    if partitions is not None:
        wanted = set(partitions)
        counted = {p: parts for p, parts in counted.items() if p in wanted}
    check_files(storage, {part.file for parts in counted.values() for part in parts})
    return Point(repository, chain.by_number(number), counted, sizes_of(backups), partitions)


def _needed(
    repository: Repository, at: Any, *, indexed: bool
) -> tuple[Chain, int, Sequence[Manifest]]:
    chain = repository.usable(at, indexed=indexed)
    number = number_at(chain, at)
    return chain, number, needed(chain, number)


class Version(NamedTuple):
    """What a key is at some backups, one after the other.

    Args:
        first, last: numbers of the backups.
        as_of: when the first of them was taken; microseconds since the epoch.
        op: "set", "delete", or "absent" where no row of it counts.
        seqno, bytes, time: of its newest row: the value's length, and when it was committed, in microseconds; None
            where there is none.
    """

    first: int
    last: int
    as_of: int
    op: str
    seqno: int | None
    bytes: int | None
    time: int | None


def versions(
    storage: Storage, chain: Chain, key: bytes, progress: Callable[[int, int], Any]
) -> Iterator[Version]:
    """Yield what a key is at each restore point, oldest first; points at which it is the same come together.

    Args:
        key: 1 to 4096 bytes.
        progress: called with points done and in all.

    Raises:
        RepositoryDamagedError: a document or a file is damaged or missing.
    """
    partition = partition_of(key)
    rows_in: dict[str, list[Any]] = {}
    parts: list[Segment] = []
    base = 0
    known: Version | None = None
    for done, link in enumerate(chain.links):
        progress(done, len(chain.links))
        wanted = [link.number]
        if chain.base_number(link.number) != base:
            parts, base = [], chain.base_number(link.number)
            wanted = list(range(base, link.number + 1))
        for number in wanted:
            manifest = chain.base(number) if number == base else chain.by_number(number)
            if partition in manifest.entries:
                add_segment(parts, manifest, partition)
        for part in parts:
            if part.file.path not in rows_in:
                rows_in[part.file.path] = list(_rows_of(storage, part.file, partition, key))
        counted = (row for p in parts for row in rows_in[p.file.path] if p.low < row[1] <= p.high)
        newest_row = max(counted, key=lambda row: row[1], default=("absent", None, None, None))
        if known is not None and known[3:] == newest_row:
            known = known._replace(last=link.number)
            continue
        if known is not None:
            yield known
        known = Version(link.number, link.number, link.cut_time, *newest_row)
    if known is not None:
        yield known


def _rows_of(
    storage: Storage, file: FileRef, partition: int, key: bytes
) -> Iterable[tuple[Any, ...]]:
    """Yield op, seqno, length of the value and time of a key's rows in a file."""
    for batch in read_rows(storage, file, [partition]):
        own = batch.filter(pc.equal(batch.column("key"), pa.scalar(key, pa.binary())))
        lengths = pc.binary_length(own.column("value"))
        times = pc.cast(own.column("time"), pa.int64())
        columns = (own.column("op"), own.column("seqno"), lengths, times)
        for row in zip(*(column.to_pylist() for column in columns), strict=True):
            if row[0] not in ("set", "delete") or not 0 <= (row[3] or 0) <= MICROS_MAX:
                raise RepositoryDamagedError(f"{file.path} has a row that was not written here")
            yield row


def grouped(sizes: Mapping[int, int], group_bytes: int = GROUP_BYTES) -> list[list[int]]:
    """Return partitions, ascending, in groups of about so many bytes, or whatever sizes count; a larger one comes alone."""
    groups: list[list[int]] = []
    room = 0
    for partition, size in sorted(sizes.items()):
        if not groups or size > room:
            groups.append([])
            room = group_bytes
        groups[-1].append(partition)
        room -= size
    return groups


def each_group(
    groups: Sequence[Sequence[int]], progress: Callable[[int, int], Any]
) -> Iterator[Sequence[int]]:
    """Yield groups, and tell before each and at the end how many partitions are done, and how many there are."""
    total, done = sum(map(len, groups)), 0
    for group in groups:
        progress(done, total)
        yield group
        done += len(group)
    if total:
        progress(total, total)


BUCKET_SCHEMA: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("seqno", pa.int64()),
        ("deleted", pa.bool_()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("further", pa.binary()),
    ]
)
"""Of what is read back. value is null for a delete; further as in ``SCHEMA``."""

_SLICE_ROWS: Final = 65_536
_RETRY_SECONDS: Final = 60.0
_ATTEMPTS: Final = 5
_SHOWN: Final = 3
_SHOWN_BYTES: Final = 32


def read_newest(
    bucket: Bucket,
    partitions: Iterable[int],
    until: Pinned | None = None,
    keep: Keep = lambda table: table,
    on_rows: Callable[[int], Any] = lambda rows: None,
) -> Any:
    """Return the newest row of each key of some partitions, deletes included, as a table of ``SCHEMA``.

    Args:
        until: where to end; None means at what is there now.
        keep: takes a table of ``SCHEMA`` and returns what is to be kept of it. It must keep or drop a key's
            rows together, or from the older ones on.
        on_rows: called with the rows read since the last call.

    Raises:
        UprError: the server failed, or its history changed again and again.
    """
    chosen = sorted(partitions)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            # Closed before an error goes on to the caller, who releases the cut that is read.
            with closing(_bucket_rows(bucket, chosen, until, on_rows)) as batches:
                return _folded(batches, BUCKET_SCHEMA, keep, _BUCKET_FOLD_BYTES)
        except RollbackError:
            # A server that restarted may have undone what was read; the state is then read anew.
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError


def _bucket_rows(
    bucket: Bucket,
    partitions: list[int],
    until: Pinned | None,
    on_rows: Callable[[int], Any],
) -> Generator[Any]:
    following = bucket.changes(
        until="now" if until is None else until,
        only=Only(partitions),
        tuning=Tuning(retry_seconds=_RETRY_SECONDS),
    )
    with following as changes:
        for batch in changes.batches():
            if not batch.rows:
                continue
            rows = record_batch(batch)
            columns = [rows.column(name) for name in BUCKET_SCHEMA.names[:-1]]
            columns.append(_further_of(batch, rows.num_rows))
            on_rows(batch.rows)
            yield pa.RecordBatch.from_arrays(columns, schema=BUCKET_SCHEMA)


def _further_of(changes: ChangeBatch, rows: int) -> Any:
    if not any(block.further for block in changes.blocks):
        return pa.nulls(rows, pa.binary())
    cells = chain.from_iterable(map(block_cells, changes.blocks))
    return pa.array(map(pack_cells, cells), pa.binary())


class Differences(NamedTuple):
    """How what is there differs from what should be: how many keys, and some of them. Other further cells are a difference."""

    missing: int
    different: int
    unexpected: int
    examples: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.different or self.unexpected)

    def words(self) -> str:
        kinds = (
            (self.missing, "missing"),
            (self.different, "with another value or other further cells"),
            (self.unexpected, "that should not be there"),
        )
        counts = ", ".join(f"{count} {what}" for count, what in kinds if count)
        return f"keys {counts}; for example {', '.join(map(shown, self.examples))}"


def shown(key: bytes) -> str:
    """Return a key for people: as text where it is printable ASCII, else in hex, and not all of it when it is long."""
    head = key[:_SHOWN_BYTES]
    more = "..." if len(key) > _SHOWN_BYTES else ""
    if head.isascii() and head.decode("ascii", "replace").isprintable():
        return repr(head.decode()) + more
    return "0x" + head.hex() + more


def match(first: Any, second: Any) -> tuple[I64, I64, I64, I64]:
    """Compare the keys of two tables, in any order of rows; a key is in each at most once.

    Returns:
        Row numbers: of the keys that both have, in one order, in the first and in the second; and of those that only the
        first, and only the second has.
    """
    keys, others = _columns(first, second, "key")
    at = pc.index_in(keys, value_set=others)
    there = at.is_valid().to_numpy(zero_copy_only=False)
    rows = at.drop_null().to_numpy(zero_copy_only=False).astype(np.int64)
    alone = np.ones(len(others), np.bool_)
    alone[rows] = False
    return np.flatnonzero(there), rows, np.flatnonzero(~there), np.flatnonzero(alone)


def other_values(first: Any, second: Any, rows: I64, other_rows: I64, column: str = "value") -> I64:
    """Return those of the first table's rows whose value, or other column, is not that of the second table's row."""
    values, others = (pc.fill_null(one, b"") for one in _columns(first, second, column))
    different = [np.zeros(0, np.int64)]
    for at in range(0, len(rows), _SLICE_ROWS):
        part = slice(at, at + _SLICE_ROWS)
        theirs = others.take(pa.array(other_rows[part]))
        same = pc.equal(values.take(pa.array(rows[part])), theirs)
        different.append(rows[part][~same.to_numpy(zero_copy_only=False)])
    return np.concatenate(different)


def _columns(first: Any, second: Any, name: str) -> list[Any]:
    """Return a column of both tables as an array each; with offsets of 64 bits where 32 do not reach."""
    columns = first.column(name), second.column(name)
    wide = max(int(column.nbytes) for column in columns) > _OFFSETS_BYTES
    return [
        (pc.cast(column, pa.large_binary()) if wide else column).combine_chunks()
        for column in columns
    ]


def some_keys(table: Any, rows: I64) -> list[bytes]:
    keys = table.column("key")
    return [keys[row].as_py() for row in rows[:_SHOWN].tolist()]


def differences(expected: Any, found: Any) -> Differences:
    """Compare two tables with columns key, value and further, in any order of rows; a key is in each at most once."""
    both, there, missing, unexpected = match(expected, found)
    different = np.union1d(
        *[other_values(expected, found, both, there, name) for name in ("value", "further")]
    )
    examples = some_keys(expected, missing) + some_keys(expected, different)
    examples += some_keys(found, unexpected)
    counts = len(missing), len(different), len(unexpected)
    return Differences(*counts, tuple(examples[:_SHOWN]))


def live(table: Any) -> Any:
    """Return the rows of a table with a column value that are no deletes."""
    return table.filter(pc.is_valid(table.column("value")))


def only_keys(keys: Any) -> Keep:
    """Return what keeps the rows of these keys, for ``read_newest``."""
    wanted = keys.combine_chunks()
    return lambda table: table.filter(pc.is_in(table.column("key"), value_set=wanted))


def data_bytes(table: Any) -> int:
    return sum(int(_lengths(table.column(name)).sum()) for name in ("key", "value"))


def check_files(storage: Storage, files: set[FileRef]) -> None:
    """Raise RepositoryDamagedError where a data file is not as it was written; OSError or UprError where one cannot be read."""
    for file in sorted(files, key=lambda file: file.path):
        problem = _file_problem(storage, file, True)
        if problem:
            raise RepositoryDamagedError(
                problem, hint="upr-backup REPOSITORY verify --full tells all that is damaged"
            )


def _file_problem(storage: Storage, file: FileRef, full: bool) -> str:
    try:
        size = storage.size(file.path)
        if size != file.bytes:
            return f"{file.path} has {size} bytes, it was written with {file.bytes}"
        if full:
            with storage.open(file.path) as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != file.sha256:
                return f"{file.path} is damaged: its SHA-256 is not the one it was written with"
    except FileNotFoundError:
        return f"{file.path} is missing"
    except RepositoryDamagedError as error:
        return error.message
    except OSError as error:
        if not is_damage(error):
            raise
        return f"{file.path} cannot be read: {error.strerror or error}"
    return ""


def _rows_problem(storage: Storage, manifest: Manifest, index: int) -> str:
    """Return what is wrong with a file's rows: not those that the manifest tells, or not in order."""
    file = manifest.files[index]
    entries = {p: entry for p, entry in manifest.entries.items() if entry.file == index}
    rows = np.zeros(PARTITIONS, np.int64)
    # The seqno that each partition has reached; from the beginning of its range on.
    reached = np.zeros(PARTITIONS, np.int64)
    for partition, entry in entries.items():
        reached[partition] = entry.start
    try:
        for batch in read_rows(storage, file, range(PARTITIONS)):
            partitions = batch.column("partition").to_numpy()
            seqnos = batch.column("seqno").to_numpy()
            deleted = pc.equal(batch.column("op"), "delete")
            known = pc.or_(deleted, pc.equal(batch.column("op"), "set"))
            if not pc.all(
                pc.and_(known, pc.equal(deleted, pc.is_null(batch.column("value"))))
            ).as_py():
                return f"{file.path} has a row that is neither a set nor a delete"
            if (partitions_of(batch.column("key").to_pylist()) != partitions).any():
                return f"{file.path} has a key in a partition that it does not belong to"
            for partition in np.unique(partitions).tolist():
                own = seqnos[partitions == partition]
                if (np.diff(own, prepend=reached[partition]) <= 0).any():
                    return f"{file.path}: the seqnos of partition {partition} do not rise"
                reached[partition] = own[-1]
            rows += np.bincount(partitions, minlength=PARTITIONS)
    except RepositoryDamagedError as error:
        return str(error)
    for partition in range(PARTITIONS):
        known = entries.get(partition)
        if rows[partition] != (known.rows if known else 0):
            return f"{file.path} has {rows[partition]} rows of partition {partition}, the manifest says {known.rows if known else 0}"
        if known is not None and reached[partition] > known.end:
            return f"{file.path} has rows of partition {partition} above {known.end}"
    return ""
