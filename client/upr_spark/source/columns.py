"""The columns of the data source: Spark's schema, Arrow's, and how one becomes the other without touching rows."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from upr_protocol.failover import format_failover_id
from upr_protocol.limits import PARTITIONS
from upr_spark.errors import UprSparkError, bad_schema
from upr_spark.source.plan import Control, Range

_TYPES: Final[dict[str, tuple[type[DataType], ...]]] = {
    "partition": (IntegerType,),
    "seqno": (LongType,),
    "op": (StringType,),
    "key": (BinaryType, StringType),
    "value": (BinaryType, StringType),
    "failover_id": (StringType,),
    "marker": (LongType,),
    "time": (TimestampType,),
}
_ARROW: Final = {
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    StringType: pa.string(),
    BinaryType: pa.binary(),
    TimestampType: pa.timestamp("us", tz="UTC"),
}
_ID_DIGITS: Final = 16


def default_schema(key_text: bool, value_text: bool) -> StructType:
    """Return the schema of the data source, every column nullable, in its order."""
    as_text = {"key": key_text, "value": value_text}
    return StructType(
        [StructField(name, types[as_text.get(name, False)]()) for name, types in _TYPES.items()]
    )


def check_schema(schema: StructType) -> None:
    """Refuse a schema of the user's with a column that there is not; some of the columns, in any order, are fine.

    Raises:
        UprSparkError: UPR_BAD_SCHEMA, naming the column.
    """
    for field in schema.fields:
        name, types = field.name, _TYPES.get(field.name)
        known = ", ".join(f"{name} {types[0]().simpleString()}" for name, types in _TYPES.items())
        if types is None:
            raise bad_schema(
                name, f"column {name}: there is no such column", f"the columns are {known}"
            )
        if not any(type(field.dataType) is kind for kind in types):
            words = " or ".join(kind().simpleString() for kind in types)
            found = field.dataType.simpleString()
            raise bad_schema(name, f"column {name}: it is {words}, not {found}", "or leave it out")
        if not field.nullable:
            raise bad_schema(name, f"column {name}: it may be null", "declare it without NOT NULL")


class Columns:
    """Makes the record batches of one task.

    Args:
        schema: Spark's, checked.
        ranges: what the task reads; at most one a partition.
        include_deletes: whether deletes become rows.
    """

    def __init__(self, schema: StructType, ranges: Iterable[Range], include_deletes: bool) -> None:
        self.schema = pa.schema(
            [pa.field(field.name, _ARROW[type(field.dataType)]) for field in schema.fields]
        )
        self._include_deletes = include_deletes
        self._ends = np.zeros(PARTITIONS, np.int64)
        self._digits = np.zeros(PARTITIONS, f"S{_ID_DIGITS}")
        for one in ranges:
            self._ends[one.partition] = one.end_seqno
            self._digits[one.partition] = format_failover_id(one.end_id).encode()

    def rows(self, changes: pa.RecordBatch, *, cut_off: bool = False) -> pa.RecordBatch:
        """Return mutations as rows.

        Args:
            changes: of ``upr_client.arrow``'s schema.
            cut_off: whether to leave out what lies above the ends.

        Raises:
            UprSparkError: UPR_NOT_UTF8, a key or value is to be text and is none.
        """
        if cut_off:
            ends = self._ends[changes.column("partition").to_numpy()]
            changes = changes.filter(pa.array(changes.column("seqno").to_numpy() <= ends))
        if not self._include_deletes and changes.column("deleted").true_count:
            changes = changes.filter(pc.invert(changes.column("deleted")))
        partitions = changes.column("partition").to_numpy()
        arrays = [self._column(field, changes, partitions) for field in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, field: pa.Field, changes: pa.RecordBatch, partitions: Any) -> pa.Array:
        if field.name == "op":
            return _ops(changes.column("deleted"))
        if field.name == "failover_id":
            return _fixed_text(self._digits[partitions].tobytes(), len(partitions), _ID_DIGITS)
        if field.name == "marker":
            return pa.array(self._ends[partitions])
        column = changes.column(field.name)
        return column if column.type == field.type else _text(field.name, column)

    def control(self, rows: Sequence[Control]) -> pa.RecordBatch:
        partitions = np.array([row.partition for row in rows], np.int32)
        seqnos = np.array([row.seqno for row in rows], np.int64)
        columns = {
            "partition": pa.array(partitions),
            "seqno": pa.array(seqnos),
            "op": _fixed_text(b"rollback" * len(rows), len(rows), 8),
            "failover_id": _fixed_text(self._digits[partitions].tobytes(), len(rows), _ID_DIGITS),
            "marker": pa.array(self._ends[partitions]),
        }
        arrays = [columns.get(field.name, pa.nulls(len(rows), field.type)) for field in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _ops(deleted: pa.Array) -> pa.Array:
    rows = len(deleted)
    if not deleted.true_count:
        return _fixed_text(b"set" * rows, rows, 3)
    return pc.if_else(deleted, pa.scalar("delete"), pa.scalar("set"))


def _fixed_text(data: bytes, rows: int, width: int) -> pa.Array:
    offsets = np.arange(rows + 1, dtype=np.int32) * width
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), rows, buffers, 0)


def _text(name: str, column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        raise UprSparkError(
            "NOT_UTF8",
            f"the column {name} must be text, and a {name} is not UTF-8",
            hint=f"{name}Encoding=binary takes any bytes",
        ) from None
