"""Mutations and changes as JSON lines: what ``load jsonl`` reads and ``follow`` prints.

A key or value that is UTF-8 is a string under ``key`` or ``value``; else its base64 stands under ``key_base64`` or
``value_base64``.
"""

import base64
import binascii
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import IO, Any

from upr.service.text.lines import json_field
from upr_client import Change, Marker, Rollback
from upr_protocol.block import check_row
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import format_failover_id

Row = tuple[bytes, bytes | None]

LINE_BYTES_MAX = 256 * 2**20
"""A line is refused above this; the largest value takes half of it when every byte needs an escape."""
_READ_BYTES = 4 * 2**20
_FIELDS = frozenset({"key", "key_base64", "value", "value_base64"})


def change_line(change: Change) -> str:
    """Return a change as a line, without the line feed."""
    partition, seqno, op, key, value = change
    # Joined by hand: a dict through json.dumps takes three times as long, and this is done for every mutation.
    line = f'{{"partition": {partition}, "seqno": {seqno}, "op": "{op}", {json_field("key", key)}'
    if value is not None:
        line = f"{line}, {json_field('value', value)}"
    return f"{line}}}"


def row_line(key: bytes, value: bytes | None) -> str:
    """Return a key and its value as a line that ``parse_line`` takes."""
    field = '"value": null' if value is None else json_field("value", value)
    return f"{{{json_field('key', key)}, {field}}}"


def marker_line(marker: Marker) -> str:
    """Return a snapshot marker as a line."""
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
    text, encoded = document.get(name), document.get(f"{name}_base64")
    given = [field for field in (name, f"{name}_base64") if field in document]
    if len(given) != 1:
        what = "is missing" if not given else f"and {name}_base64 are both given"
        raise InvalidArgumentError(f'"{name}" {what}')
    value = text if given[0] == name else encoded
    if value is None and given[0] == "value":
        return None
    if not isinstance(value, str):
        kinds = "a string or null" if given[0] == "value" else "a string"
        raise InvalidArgumentError(f'"{given[0]}" is not {kinds}')
    if given[0] == name:
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f'"{name}" has half of a surrogate pair', hint=f"give {name}_base64"
            ) from None
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgumentError(f'"{given[0]}" is not base64: {error}') from None


def parse_line(line: bytes) -> Row:
    """Return key and value (None: a delete) of a line.

    Raises:
        InvalidArgumentError: it is not such a line, or key or value is out of its limits.
    """
    try:
        document = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError("not a JSON object")
    unknown = sorted(document.keys() - _FIELDS)
    if unknown:
        # Refused and not ignored: a field that this version does not know may change what the line means.
        raise InvalidArgumentError(
            f'the field "{unknown[0]}" is not known', hint=f"known are {', '.join(sorted(_FIELDS))}"
        )
    key = _bytes_of(document, "key")
    assert key is not None
    value = _bytes_of(document, "value")
    check_row(key, value)
    return key, value


def read_rows(stream: IO[bytes], name: str) -> Iterator[list[Row]]:
    """Yield the rows of a file, in portions as they come in: a pipe that pauses holds nothing back.

    Empty lines are passed over. What precedes a bad line is yielded before the error is raised.

    Args:
        stream: the file, or a pipe.
        name: how errors call it.

    Raises:
        InvalidArgumentError: a line is bad; with the name, the line's number from 1, and what is wrong.
    """
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
        parts = [lines.pop()] if data else []
        held = len(parts[0]) if parts else 0
        rows: list[Row] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                rows.append(parse_line(line))
            except InvalidArgumentError as error:
                if rows:
                    yield rows
                raise InvalidArgumentError(
                    f"{name}:{number}: {error.message}", hint=error.hint
                ) from None
        if rows:
            yield rows
        if not data:
            return
