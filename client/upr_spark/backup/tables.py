"""Rows as Parquet: writing what a stream brings, reading what counts, and folding it to a state.

Memory is bounded: rows are written out whenever about 32 MiB are gathered.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from upr_protocol.limits import PARTITIONS
from upr_spark.backup.chain import Segment
from upr_spark.backup.errors import RepositoryDamagedError, is_damage
from upr_spark.backup.manifest import FileRef
from upr_spark.backup.storage import Storage

SCHEMA: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("seqno", pa.int64()),
        ("op", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("time", pa.timestamp("us", tz="UTC")),
    ]
)
"""Of every data file. op is "set" or "delete"; value is null for a delete; time is that of the commit."""

_FLUSH_BYTES: Final = 32 * 2**20
_ROW_GROUP_ROWS: Final = 65_536
_READ_ROWS: Final = 65_536
_FOLD_BYTES: Final = 64 * 2**20
_OFFSETS_BYTES: Final = 2**31 - 1
_TAKEN_BYTES: Final = 2**30
_DAMAGE = (OSError, pa.ArrowException)


class RowsWriter:
    """Writes the rows of some partitions into one new data file.

    Attributes:
        rows, data_bytes: by partition, how many rows and bytes of keys and values; int64, shape (1024,).
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._gathered: list[Any] = []
        self._gathered_bytes = 0
        self._sink: Any = None
        self._writer: Any = None
        self.rows: npt.NDArray[np.int64] = np.zeros(PARTITIONS, np.int64)
        self.data_bytes: npt.NDArray[np.int64] = np.zeros(PARTITIONS, np.int64)

    def add(self, batch: Any) -> None:
        """Add a record batch of ``upr_client.arrow.schema()``."""
        op = pc.if_else(batch.column("deleted"), "delete", "set")
        columns = [batch.column(name) for name in ("key", "value", "time")]
        first = [batch.column("partition"), batch.column("seqno"), op]
        self.add_rows(pa.RecordBatch.from_arrays([*first, *columns], schema=SCHEMA))

    def add_rows(self, batch: Any) -> None:
        """Add a record batch of ``SCHEMA``."""
        if not batch.num_rows:
            return
        partitions = batch.column("partition").to_numpy()
        lengths = pc.add(
            pc.binary_length(batch.column("key")),
            pc.fill_null(pc.binary_length(batch.column("value")), 0),
        ).to_numpy()
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
        if self._writer is None:
            self._sink = self._storage.create(self._path)
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._sink, mode="w"),
                SCHEMA,
                compression="zstd",
                use_dictionary=["op"],
                write_page_checksum=True,
            )
        self._writer.write_table(table.take(order), row_group_size=_ROW_GROUP_ROWS)

    def finish(self) -> FileRef | None:
        """Make the file durable; None when there was no row, and then there is no file."""
        self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        digest = self._sink.finish()
        return FileRef(self._path, self._sink.size, digest, int(self.rows.sum()))

    def close(self) -> None:
        """Leave no file open."""
        if self._sink is not None:
            self._sink.close()


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
            if parquet.schema_arrow != SCHEMA:
                raise RepositoryDamagedError(f"{file.path} has other columns")
            groups = [
                index
                for index in range(parquet.num_row_groups)
                if _overlaps(parquet.metadata.row_group(index).column(0).statistics, low, high)
            ]
            if not groups:
                return
            for batch in parquet.iter_batches(_READ_ROWS, groups, use_threads=False):
                yield batch.filter(pc.is_in(batch.column("partition"), wanted))
    except _DAMAGE as error:
        if not is_damage(error):
            raise
        raise RepositoryDamagedError(f"{file.path} cannot be read: {_short(error)}") from error


def _overlaps(statistics: Any, low: int, high: int) -> bool:
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min <= high and statistics.max >= low)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def state(
    storage: Storage,
    counted: Mapping[int, Sequence[Segment]],
    key_prefix: bytes = b"",
) -> Any:
    """Return the newest row of each key, deletes included, as a table of ``SCHEMA``; it is all in memory.

    Of what is superseded only as much as the newest rows, or ``_FOLD_BYTES``, is in memory at a time.

    Args:
        storage: where the data files are.
        counted: by partition, the rows that count.
        key_prefix: only keys that begin with it.

    Raises:
        RepositoryDamagedError: a file is missing or damaged.
        OSError, UprError: one cannot be reached, or may not be read.
    """
    files: dict[str, tuple[FileRef, dict[int, Segment]]] = {}
    for partition, parts in counted.items():
        for part in parts:
            files.setdefault(part.file.path, (part.file, {}))[1][partition] = part
    batches: list[Any] = []
    gathered, limit = 0, _FOLD_BYTES
    for file, parts_of in files.values():
        lows, highs = np.zeros(PARTITIONS, np.int64), np.zeros(PARTITIONS, np.int64)
        for partition, part in parts_of.items():
            lows[partition], highs[partition] = part.low, part.high
        for batch in read_rows(storage, file, parts_of):
            partitions = batch.column("partition").to_numpy()
            seqnos = batch.column("seqno").to_numpy()
            counts = pa.array((seqnos > lows[partitions]) & (seqnos <= highs[partitions]))
            if key_prefix:
                counts = pc.and_(counts, _begins_with(batch.column("key"), key_prefix))
            batches.append(batch.filter(counts))
            gathered += batches[-1].nbytes
            if gathered > limit:
                batches = newest(pa.Table.from_batches(batches, SCHEMA)).to_batches()
                gathered = sum(batch.nbytes for batch in batches)
                limit = max(_FOLD_BYTES, 2 * gathered)
    return newest(pa.Table.from_batches(batches, SCHEMA))


def _begins_with(keys: Any, prefix: bytes) -> Any:
    heads = pc.binary_slice(keys, 0, len(prefix))
    return pc.equal(heads, pa.scalar(prefix, pa.binary()))


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
    """Yield a table's rows in another order, in tables of so many rows, or of one GiB of values.

    Args:
        table: with a column value, binary.
        order: the rows' numbers, an array.
        rows: 1 or more.
    """
    schema, source = table.schema, takeable(table)
    lengths = pc.fill_null(pc.binary_length(table.column("value")), 0).to_numpy()
    ends = np.cumsum(lengths.astype(np.int64)[order.to_numpy()])
    first = 0
    while first < len(order):
        floor = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, floor + _TAKEN_BYTES, side="right"))
        last = min(max(last, first + 1), first + rows)
        yield source.take(order.slice(first, last - first)).cast(schema)
        first = last
