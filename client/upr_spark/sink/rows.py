"""Rows to be written: which columns and values may be. Nothing here looks at one row after the other."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, StringType, StructType

from upr_client.arrow import check_columns
from upr_protocol.errors import InvalidArgumentError
from upr_spark.errors import UprSparkError, bad_schema
from upr_spark.sink.options import APPLY

IGNORED: Final = frozenset({"partition", "seqno", "failover_id", "marker", "time"})
"""Columns of the source that say where a row was; the server that is written to gives its own."""
_OPS: Final = pa.array(["set", "delete", None])
_KEY_BYTES_SHOWN: Final = 16


def check_schema(schema: StructType, mode: str, *, ignore_extra: bool) -> None:
    """Refuse a schema that cannot be written.

    Raises:
        UprSparkError: UPR_BAD_SCHEMA, naming the column.
    """
    needed = ["key", "value", *(["op"] if mode == APPLY else [])]
    names = [field.name for field in schema.fields]
    for name in needed:
        if names.count(name) != 1:
            raise bad_schema(
                name,
                f"writeMode={mode} needs one column {name}; there are {names.count(name)}",
                f"the columns are {', '.join(names) or 'none'}; rename one with withColumnRenamed",
            )
    for field in schema.fields:
        if field.name in needed:
            kinds = (StringType,) if field.name == "op" else (BinaryType, StringType)
            if not isinstance(field.dataType, kinds):
                raise bad_schema(
                    field.name,
                    f"column {field.name} is {field.dataType.simpleString()}; must be "
                    + " or ".join(kind.typeName() for kind in kinds),
                    f'cast it, as in .withColumn("{field.name}", col("{field.name}").cast("string"))',
                )
        elif field.name not in IGNORED and not ignore_extra:
            hint = f'drop it with .drop("{field.name}"), or set ignoreExtraColumns to true'
            if field.name == "op":
                hint = f"set writeMode to apply, which obeys it; or {hint}"
            raise bad_schema(
                field.name, f"column {field.name} has no meaning here with writeMode={mode}", hint
            )


def check_named(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows that are for the table whose options came with their first column, and refuse others.

    Where an INSERT INTO names no columns, and what it takes has the same ones, Spark gives them as they are: with the
    options of the table that was read.

    Raises:
        UprSparkError: UPR_BAD_ROW, they may be for another table.
    """
    if batch.column(0).null_count < batch.num_rows:
        raise _bad_row(
            f"the column {batch.schema.names[0]} of a table of SQL is given; must be left out",
            "name the columns, as in INSERT INTO t (key, value, op) SELECT key, value, op FROM ...; a DataFrame is written "
            "with an endpoint of its own",
        )
    return batch


def columns_of(batch: pa.RecordBatch, mode: str) -> tuple[pa.Array, pa.Array]:
    """Return the keys and values to be written, both of binary or string; a null value deletes its key.

    Raises:
        UprSparkError: UPR_BAD_ROW, a row cannot be written; UPR_ROLLBACK_ROW, a row tells of a rollback.
    """
    keys, values = batch.column("key"), batch.column("value")
    if mode == APPLY:
        values = _obeyed(keys, values, batch.column("op"))
    elif values.null_count:
        raise _bad_row(
            f"the value of key {_first(keys, values.is_null())} is null; must be bytes with writeMode=upsert",
            "leave such rows out with .where('value is not null'); to delete their keys set writeMode to apply and "
            "give them op = 'delete'",
        )
    try:
        check_columns(keys, values)
    except InvalidArgumentError as error:
        raise _bad_row(
            error.message, error.hint or "leave such rows out with .where(...)"
        ) from None
    return keys, values


def _obeyed(keys: pa.Array, values: pa.Array, ops: pa.Array) -> pa.Array:
    """Return the values, null where the key is to be deleted."""
    known = pc.is_in(ops, value_set=_OPS)
    if not pc.all(known, min_count=0).as_py():
        _refuse_op(keys, ops, pc.invert(known))
    # INSERT INTO a table gives null for the columns that it does not name.
    deletes = pc.fill_null(pc.equal(ops, "delete"), False)
    missing = pc.and_(values.is_null(), pc.invert(deletes))
    if pc.any(missing, min_count=0).as_py():
        raise _bad_row(
            f"the value of key {_first(keys, missing)} is null and its op is set",
            "was it read with includeValue=false? Only a row with op = 'delete' has no value",
        )
    return pc.if_else(deletes, pa.scalar(None, values.type), values)


def _refuse_op(keys: pa.Array, ops: pa.Array, unknown: pa.Array) -> None:
    op = ops.filter(unknown)[0].as_py()
    if op == "rollback":
        raise UprSparkError(
            "ROLLBACK_ROW",
            "a row with op = 'rollback' says that newer rows of its partition never happened; this sink holds the "
            "newest value of each key only and cannot bring back the older ones",
            hint="read with onRollback=reset and leave those rows out with .where(\"op <> 'rollback'\"): the partition "
            "is read again from its beginning, and only keys that the undone rows had created stay, to be deleted by "
            "you; or read with onRollback=fail and decide when it happens",
        )
    raise _bad_row(
        f"the op of key {_first(keys, unknown)} is {str(op)[:60]!r}; must be set or delete",
        "map it, or leave such rows out with .where(\"op in ('set', 'delete')\")",
    )


def _first(keys: pa.Array, chosen: pa.Array) -> str:
    """Return the first of the chosen keys in hex, without what is behind its first bytes."""
    key = keys.filter(chosen)[0]
    if not key.is_valid:
        return "null"
    data: bytes = key.as_buffer().to_pybytes()
    return data[:_KEY_BYTES_SHOWN].hex() + ("..." if len(data) > _KEY_BYTES_SHOWN else "")


def _bad_row(message: str, hint: str) -> UprSparkError:
    return UprSparkError("BAD_ROW", message, hint=hint)
