"""Mutations and changes as JSON lines, CSV and Parquet: what ``load`` reads and ``follow`` prints.

In JSON a key or value that is UTF-8 is a string under ``key`` or ``value``; else its base64 stands under ``key_base64`` or
``value_base64``. In CSV the bytes stand as they are. Where a field is named as the key, the value is a whole row, as a JSON object.
"""

import base64
import binascii
import csv
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, time
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from upr.service.text.lines import json_field
from upr_client import Change, Marker, Rollback
from upr_protocol.block import check_row
from upr_protocol.errors import InvalidArgumentError, MissingPackageError
from upr_protocol.failover import format_failover_id
from upr_protocol.limits import VALUE_BYTES_MAX

Row = tuple[bytes, bytes | None]

LINE_BYTES_MAX = 256 * 2**20
"""A line is refused above this; the largest value takes half of it when every byte needs an escape."""
_READ_BYTES = 4 * 2**20
_FIELDS = frozenset({"key", "key_base64", "value", "value_base64"})
_COLUMNS: Final = ("partition", "seqno", "op", "deleted", "key", "value", "time")
"""Columns of changes as this project writes them; of these only op, deleted, key and value count."""
_PARQUET_ROWS: Final = 1000
_BOM: Final = "\ufeff".encode()
_FLAGS: Final = {"true": True, "false": False}
"""Words of a cell of text for a flag, as in CSV, which has no other cells."""


def change_line(change: Change) -> str:
    """Return a change as a line, without the line feed."""
    partition, seqno, op, key, value = change
    # Joined by hand: a dict through json.dumps takes three times as long, and this is done for every mutation.
    line = f'{{"partition": {partition}, "seqno": {seqno}, "op": "{op}", {json_field("key", key)}'
    if value is not None:
        line = f"{line}, {json_field('value', value)}"
    return f"{line}}}"


def csv_line(change: Change) -> bytes:
    """Return a change as a line of CSV, with the line feed: partition, seqno, op, key, value."""
    partition, seqno, op, key, value = change
    return b"%d,%d,%s,%s,%s\n" % (partition, seqno, op.encode(), _cell(key), _cell(value or b""))


def csv_key_line(change: Change) -> bytes:
    """Return a change of a stream of keys only: as ``csv_line``, without the value, which would look like an empty one."""
    partition, seqno, op, key, _ = change
    return b"%d,%d,%s,%s\n" % (partition, seqno, op.encode(), _cell(key))


def _cell(data: bytes) -> bytes:
    if any(special in data for special in b',"\r\n'):
        return b'"%s"' % data.replace(b'"', b'""')
    return data


def row_line(key: bytes, value: bytes | None) -> str:
    """Return a key and its value as a line that ``parse_line`` takes."""
    field = '"value": null' if value is None else json_field("value", value)
    return f"{{{json_field('key', key)}, {field}}}"


def marker_line(marker: Marker) -> str:
    return f'{{"partition": {marker.partition}, "op": "marker", "seqno": {marker.seqno}}}'


def rollback_line(rollback: Rollback) -> str:
    """Return a rollback as a line: what is above ``seqno`` in the partition did not happen."""
    return json.dumps(
        {
            "partition": rollback.partition,
            "op": "rollback",
            "seqno": rollback.seqno,
            "from_seqno": rollback.from_seqno,
            "old_id": None if rollback.old_id is None else format_failover_id(rollback.old_id),
            "new_id": format_failover_id(rollback.new_id),
            "rule": str(rollback.rule),
            "words": rollback.words,
        }
    )


def batch_lines(changes: Iterable[Change], markers: Iterable[Marker]) -> Iterator[str]:
    """Yield the lines of a batch, each marker right behind the last change at or below it."""
    pending: defaultdict[int, deque[Marker]] = defaultdict(deque)
    for marker in markers:
        pending[marker.partition].append(marker)
    for change in changes:
        waiting = pending.get(change.partition)
        while waiting and waiting[0].seqno < change.seqno:
            yield marker_line(waiting.popleft())
        yield change_line(change)
    for left in pending.values():
        yield from map(marker_line, left)


def _bytes_of(document: dict[str, Any], name: str) -> bytes | None:
    given = [field for field in (name, f"{name}_base64") if field in document]
    if len(given) != 1:
        what = "is missing" if not given else f"and {name}_base64 are both given"
        raise InvalidArgumentError(f'"{name}" {what}')
    value = document[given[0]]
    if value is None and given[0] == "value":
        return None
    if isinstance(value, dict | list) and given[0] == "value":
        return _json_bytes(value)
    if not isinstance(value, str):
        kinds = "a string, an object or null" if given[0] == "value" else "a string"
        raise InvalidArgumentError(f'"{given[0]}" is not {kinds}')
    if given[0] == name:
        return _utf8(value, f'"{name}"', f"give {name}_base64")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgumentError(f'"{given[0]}" is not base64: {error}') from None


def _utf8(text: str, what: str, hint: str = "") -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{what} has half of a surrogate pair", hint=hint) from None


def _json_bytes(value: object) -> bytes:
    """Return a value as compact JSON; dates as ISO 8601, what else JSON has not as text."""
    try:
        text = json.dumps(
            value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_as_json
        )
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError("text that is not UTF-8 cannot be in JSON") from None
    except ValueError:
        raise InvalidArgumentError("a number is not finite, and JSON has no such") from None


def _as_json(value: object) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError("bytes that are not UTF-8 cannot be in JSON") from None
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number there")


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError("not a JSON object")
    return document


def parse_line(line: bytes) -> Row:
    """Return key and value (None: a delete) of a line; an object or list as value is compact JSON then.

    Raises:
        InvalidArgumentError: it is not such a line, or key or value is out of its limits.
    """
    document = _parse_object(line)
    unknown = sorted(document.keys() - _FIELDS)
    if unknown:
        # Refused and not ignored: a field that this version does not know may change what the line means.
        raise InvalidArgumentError(
            f'the field "{unknown[0]}" is not known',
            hint=f"known are {', '.join(sorted(_FIELDS))}; --key-field loads whole objects",
        )
    key = _bytes_of(document, "key")
    assert key is not None
    value = _bytes_of(document, "value")
    check_row(key, value)
    return key, value


def parse_record(line: bytes, key_field: str) -> Row:
    """Return the key that a field of a JSON object has, and the object as it stands.

    Raises:
        InvalidArgumentError: it is no object with such a field, or key or value is out of its limits.
    """
    document = _parse_object(line)
    if key_field not in document:
        raise InvalidArgumentError(f'there is no field "{key_field}"')
    found, value = document[key_field], line.strip()
    key = _utf8(found, f'"{key_field}"') if isinstance(found, str) else _key(found, key_field)
    check_row(key, value)
    return key, value


def _key(cell: object, name: str) -> bytes:
    if isinstance(cell, bytes):
        return cell
    if isinstance(cell, str):
        # Bytes that are not UTF-8 come out of CSV so.
        return cell.encode(errors="surrogateescape")
    if isinstance(cell, int) and not isinstance(cell, bool):
        return b"%d" % cell
    raise InvalidArgumentError(f'"{name}" is {cell!r:.40}; must be text or a whole number')


def row_maker(columns: Sequence[str], key_field: str | None) -> Callable[[Sequence[Any]], Row]:
    """Return what makes key and value (None: a delete) of the cells of a table's row.

    Args:
        columns: their names.
        key_field: the column of the key, where the value is the whole row as a JSON object; None where the columns
            are those of changes.

    Raises:
        InvalidArgumentError: a column is missing, there twice, or not known.
    """
    # Of two columns of one name a whole row has one.
    needed = ("key", "value") if key_field is None else (key_field, *columns)
    for name in needed:
        if columns.count(name) != 1:
            raise InvalidArgumentError(
                f'the column "{name}" is there {columns.count(name)} times; must be there once',
                hint=f"columns are {', '.join(columns)}; --key-field names the one of the key",
            )
    if key_field is not None:
        return partial(_whole_row, columns, key_field)
    for name in columns:
        if name not in _COLUMNS or columns.count(name) != 1:
            raise InvalidArgumentError(
                f'the column "{name}" is not known, or there twice',
                hint=f"known are {', '.join(_COLUMNS)}; --key-field loads whole rows as JSON objects",
            )
    return partial(_change_row, columns)


def _whole_row(columns: Sequence[str], key_field: str, cells: Sequence[Any]) -> Row:
    record = dict(zip(columns, cells, strict=True))
    key, value = _key(record[key_field], key_field), _json_bytes(record)
    check_row(key, value)
    return key, value


def _change_row(columns: Sequence[str], cells: Sequence[Any]) -> Row:
    record = dict(zip(columns, cells, strict=True))
    key, value, op = _key(record["key"], "key"), record["value"], record.get("op", "")
    deleted = record.get("deleted", op == "delete" if op else value is None)
    if isinstance(deleted, str):
        deleted = _FLAGS.get(deleted.lower(), deleted)
    known = isinstance(deleted, bool) and op in ("", "set", "delete")
    if not known or (op and deleted != (op == "delete")):
        raise InvalidArgumentError(
            f'"op" is {op!r:.20}, "deleted" {deleted!r:.20}; must say set or delete, and not both'
        )
    if deleted:
        value = None
    elif isinstance(value, str):
        value = value.encode(errors="surrogateescape")
    elif not isinstance(value, bytes):
        raise InvalidArgumentError(f'"value" is {value!r:.40}; must be text or bytes')
    check_row(key, value)
    return key, value


def read_rows(
    stream: IO[bytes], name: str, parse: Callable[[bytes], Row] = parse_line
) -> Iterator[list[Row]]:
    """Yield the rows of a file of JSON lines, in portions as they come in: a pipe that pauses holds nothing back.

    Empty lines are passed over. What precedes a bad line is yielded before the error is raised.

    Raises:
        InvalidArgumentError: a line is bad; with the name, the line's number from 1, and what is wrong.
    """
    number = 0
    for lines in _lines(stream, name):
        rows: list[Row] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                rows.append(parse(line))
            except InvalidArgumentError as error:
                if rows:
                    yield rows
                raise _located(error, f"{name}:{number}") from None
        if rows:
            yield rows


def _located(error: InvalidArgumentError, place: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{place}: {error.message}", hint=error.hint)


def _lines(stream: IO[bytes], name: str) -> Iterator[list[bytes]]:
    """Yield the lines of a file, without their line feeds and a byte order mark before them, as they come in."""
    number = 0
    parts: list[bytes] = []
    held = 0
    while True:
        data: bytes = stream.read1(_READ_BYTES)  # type: ignore[attr-defined]
        lines = data.split(b"\n")
        if data and len(lines) == 1:
            parts.append(data)
            held += len(data)
            if held > LINE_BYTES_MAX:
                raise InvalidArgumentError(
                    f"{name}:{number + 1}: a line of more than {LINE_BYTES_MAX} bytes"
                )
            continue
        # At the end of the file what has no line feed is a line as well.
        lines[0] = b"".join([*parts, lines[0]])
        if not number:
            lines[0] = lines[0].removeprefix(_BOM)
        parts = [lines.pop()] if data else []
        held = len(parts[0]) if parts else 0
        number += len(lines)
        yield lines
        if not data:
            return


def read_csv(stream: IO[bytes], name: str, key_field: str | None) -> Iterator[list[Row]]:
    """Yield the rows of a file of CSV with a line of names, as ``read_rows`` does.

    Raises:
        InvalidArgumentError: a row is bad, or the names are.
    """
    csv.field_size_limit(VALUE_BYTES_MAX)
    left = held = 0
    rows: list[Row] = []

    def texts() -> Iterator[str]:
        nonlocal left, held
        for lines in _lines(stream, name):
            left, held = len(lines), len(rows)
            for line in lines:
                left -= 1
                yield line.decode(errors="surrogateescape") + "\n"

    reader = csv.reader(texts(), strict=True)
    make: Callable[[Sequence[Any]], Row] | None = None
    columns: list[str] = []
    try:
        for cells in reader:
            if not cells:
                pass
            elif make is None:
                columns, make = cells, row_maker(cells, key_field)
            elif len(cells) != len(columns):
                raise InvalidArgumentError(f"{len(cells)} cells; must be {len(columns)}")
            else:
                rows.append(make(cells))
            # Rows are held over where a piece of the file ends inside the next one.
            if rows and (held or not left):
                yield rows
                rows, held = [], 0
    except (csv.Error, InvalidArgumentError) as error:
        if rows:
            yield rows
        if isinstance(error, csv.Error):
            error = InvalidArgumentError(f"not CSV: {error}")
        raise _located(error, f"{name}:{reader.line_num}") from None
    if rows:
        yield rows


def read_parquet(path: Path, key_field: str | None) -> Iterator[list[Row]]:
    """Yield the rows of a Parquet file.

    Raises:
        MissingPackageError: pyarrow is not installed.
        InvalidArgumentError: it is no Parquet, or a row or column is bad; with the row's number from 1.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingPackageError(
            f"Parquet needs the package pyarrow: {error}", hint="pip install 'upr-stream[arrow]'"
        ) from error
    number = 0
    rows: list[Row] = []
    make: Callable[[Sequence[Any]], Row] | None = None
    try:
        with parquet.ParquetFile(path) as file:
            make = row_maker(file.schema_arrow.names, key_field)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for cells in _cells(batch):
                    number += 1
                    rows.append(make(cells))
                yield rows
                rows = []
    except InvalidArgumentError as error:
        if rows:
            yield rows
        raise _located(error, f"{path}:{number}" if number else f"{path}") from None
    except (ArrowException, OSError, OverflowError, ValueError) as error:
        if rows:
            yield rows
        if isinstance(error, OSError) and error.errno is not None:
            raise  # Of the file system: pyarrow has none for what the file holds.
        if make is None:
            raise InvalidArgumentError(f"{path}: not Parquet: {error}") from None
        raise InvalidArgumentError(f"{path}:{number + 1}: it cannot be read: {error}") from None


def _cells(batch: Any) -> Iterable[Sequence[Any]]:
    try:
        return zip(*(column.to_pylist() for column in batch.columns), strict=True)
    except (OverflowError, ValueError):
        # One has no value in Python, as nanoseconds. Those before it are read one by one.
        rows = range(batch.num_rows)
        return ([column[row].as_py() for column in batch.columns] for row in rows)
