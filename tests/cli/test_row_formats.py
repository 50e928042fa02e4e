"""upr.cli.cat_commands.row_formats: what load reads and follow prints, without a server."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from upr.cli.cat_commands import row_formats
from upr.cli.cat_commands.row_formats import (
    batch_lines,
    change_line,
    marker_line,
    parse_line,
    parse_record,
    read_csv,
    read_parquet,
    read_rows,
    rollback_line,
    row_maker,
)
from upr_client import Change, Marker, Rollback
from upr_protocol.errors import InvalidArgumentError, MissingPackageError


def test_the_lines_are_those_of_the_contract() -> None:
    assert change_line(Change(5, 7, "set", b"k", b"v")) == (
        '{"partition": 5, "seqno": 7, "op": "set", "key": "k", "value": "v"}'
    )
    assert change_line(Change(5, 8, "delete", b"k", None)) == (
        '{"partition": 5, "seqno": 8, "op": "delete", "key": "k"}'
    )
    assert change_line(Change(5, 9, "set", b"\xff", b"\xfe\x00")) == (
        '{"partition": 5, "seqno": 9, "op": "set", "key_base64": "/w==", "value_base64": "/gA="}'
    )
    assert marker_line(Marker(5, 7)) == '{"partition": 5, "op": "marker", "seqno": 7}'
    assert json.loads(rollback_line(Rollback(5, 9, 3, 0x0D39, 0xABC, "next_record", "why"))) == {
        "partition": 5,
        "op": "rollback",
        "seqno": 3,
        "from_seqno": 9,
        "old_id": "0000000000000d39",
        "new_id": "0000000000000abc",
        "rule": "next_record",
        "words": "why",
    }
    lost = json.loads(rollback_line(Rollback(5, 9, 0, None, 0xABC, "new_client", "why")))
    assert lost["old_id"] is None


@pytest.mark.parametrize(
    "text", ["", '"\\\n\r\t', "ü€😀", "\u2028\x85\x1c", "\x00\x7f", "a" * 100_000]
)
def test_what_follow_prints_is_one_line_of_json_and_comes_back(text: str) -> None:
    line = change_line(Change(0, 1, "set", b"k" + text.encode()[:4000], text.encode()))
    assert len(line.splitlines()) == 1
    document = json.loads(line)
    assert document["value"] == text
    row = {name: document[name] for name in document if name.startswith(("key", "value"))}
    assert parse_line(json.dumps(row).encode())[1] == text.encode()


def test_markers_stand_behind_the_last_change_at_or_below_them() -> None:
    changes = [
        Change(1, 1, "set", b"a", b""),
        Change(2, 5, "set", b"b", b""),
        Change(1, 4, "set", b"c", b""),
    ]
    markers = [Marker(1, 3), Marker(2, 5), Marker(1, 4), Marker(9, 8)]
    found = [json.loads(line) for line in batch_lines(changes, markers)]
    assert [(line["partition"], line["op"], line["seqno"]) for line in found[:4]] == [
        (1, "set", 1),
        (2, "set", 5),
        (1, "marker", 3),
        (1, "set", 4),
    ]
    assert {(line["partition"], line["seqno"]) for line in found[4:]} == {(2, 5), (1, 4), (9, 8)}


@pytest.mark.parametrize(
    ("document", "row"),
    [
        ({"key": "k", "value": "v"}, (b"k", b"v")),
        ({"key": "ü", "value": None}, ("ü".encode(), None)),
        ({"key_base64": "/w==", "value_base64": "AA=="}, (b"\xff", b"\0")),
        ({"key": "k", "value": ""}, (b"k", b"")),
        ({"key": "k", "value": {"a": [1, "\u00fc"]}}, (b"k", '{"a":[1,"\u00fc"]}'.encode())),
        ({"key": "k", "value": []}, (b"k", b"[]")),
    ],
)
def test_good_lines(document: dict[str, Any], row: tuple[bytes, bytes | None]) -> None:
    assert parse_line(json.dumps(document).encode()) == row


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"value": "v"}', '"key" is missing'),
        (b'{"key": "k"}', '"value" is missing'),
        (b'{"key": "k", "key_base64": "aw==", "value": null}', "both given"),
        (b'{"key": null, "value": null}', '"key" is not a string'),
        (b'{"key": 5, "value": null}', '"key" is not a string'),
        (b'{"key": "k", "value": 5}', '"value" is not a string, an object or null'),
        (b'{"key": "k", "value": [1e999]}', "not finite"),
        (b'{"key": "k", "value": ["\\ud800"]}', "not UTF-8"),
        (b'{"key": "k", "value_base64": null}', '"value_base64" is not'),
        (b'{"key": "k", "value_base64": "a"}', "is not base64"),
        (b'{"key": "k", "value_base64": "a b="}', "is not base64"),
        (b'{"key": "k", "vlaue": ""}', '"vlaue" is not known'),
        (b'{"key": "", "value": ""}', "key is 0 bytes; must be 1"),
        (b'{"key": "\\ud800", "value": ""}', "surrogate"),
        (json.dumps({"key": "k" * 4097, "value": ""}).encode(), "key is 4097 bytes"),
    ],
)
def test_bad_lines_say_what_is_wrong(line: bytes, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        parse_line(line)


def test_rows_come_in_portions_and_empty_lines_are_passed_over() -> None:
    text = b'{"key":"a","value":"1"}\r\n\n  \n{"key":"b","value":null}'
    rows = [row for portion in read_rows(io.BytesIO(text), "f") for row in portion]
    assert rows == [(b"a", b"1"), (b"b", None)]
    assert list(read_rows(io.BytesIO(b""), "f")) == []


class Pipe(io.BytesIO):
    """Gives a few bytes at a time, as a pipe does."""

    def read1(self, size: int | None = -1, /) -> bytes:
        return super().read1(3)


def test_a_line_may_come_in_pieces() -> None:
    text = b'{"key":"a","value":"1"}\n{"key":"b","value":"2"}\n'
    assert list(read_rows(Pipe(text), "f")) == [[(b"a", b"1")], [(b"b", b"2")]]


def test_a_bad_line_is_named_after_what_precedes_it() -> None:
    rows = read_rows(io.BytesIO(b'{"key":"a","value":"1"}\n\nnonsense\n'), "some.jsonl")
    assert next(rows) == [(b"a", b"1")]
    with pytest.raises(InvalidArgumentError, match=r"^some.jsonl:3: not JSON"):
        next(rows)


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_formats, "LINE_BYTES_MAX", 10)
    with pytest.raises(InvalidArgumentError, match="f:1: a line of more than 10 bytes"):
        list(read_rows(Pipe(b"x" * 100), "f"))


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    lines = b'\xef\xbb\xbf{"key":"a","value":"1"}\n'
    table = b'\xef\xbb\xbf"key","value"\r\n"a","1"\r\n'
    for kind in (io.BytesIO, Pipe):
        assert list(read_rows(kind(lines), "f")) == [[(b"a", b"1")]]
        assert list(read_csv(kind(table), "f", None)) == [[(b"a", b"1")]]


CSV = b'\xef\xbb\xbfop,key,value\r\nset,a,1\r\n\r\ndelete,b,\r\nset,c,"x\ny""\r\n"'


@pytest.mark.parametrize("kind", [io.BytesIO, Pipe])
def test_csv_in_one_piece_and_in_small_ones(kind: type[io.BytesIO]) -> None:
    rows = [row for portion in read_csv(kind(CSV), "f", None) for row in portion]
    assert rows == [(b"a", b"1"), (b"b", None), (b"c", b'x\ny"\r\n')]


def test_a_pipe_that_pauses_holds_no_row_of_csv_back() -> None:
    read, write = os.pipe()
    with open(read, "rb") as stream, open(write, "wb", buffering=0) as end:
        end.write(b"key,value\na,1\nb,2\nc")
        portions = read_csv(stream, "f", None)
        assert next(portions) == [(b"a", b"1"), (b"b", b"2")]
        end.write(b",3\n")
        assert next(portions) == [(b"c", b"3")]


def test_the_column_deleted_of_csv_says_true_or_false() -> None:
    text = b"deleted,key,value\ntrue,a,\nFalse,b,\nfalse,c,1\n"
    assert list(read_csv(io.BytesIO(text), "f", None)) == [
        [(b"a", None), (b"b", b""), (b"c", b"1")]
    ]


class Halves(io.BytesIO):
    """Gives pieces that end inside the quoted cell of a row."""

    def read1(self, size: int | None = -1, /) -> bytes:
        """Two lines: the end of a row and the beginning of the next one."""
        return self.readline() + self.readline()


def test_rows_of_csv_are_not_held_while_pieces_end_inside_the_next_one() -> None:
    portions = read_csv(Halves(b"key,value\n" + b'a,"\n"\n' * 9), "f", None)
    assert [len(portion) for portion in portions] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("text", "key_field", "words"),
    [
        (b"a,b\n", None, r'^f:1: the column "key" is there 0 times'),
        (b"key,value,key\n", None, r'^f:1: the column "key" is there 2 times'),
        (b"key,value,age\n", None, r'^f:1: the column "age" is not known'),
        (b"key,value\n", "id", r'^f:1: the column "id" is there 0 times'),
        (b"key,value\na\n", None, r"^f:2: 1 cells; must be 2"),
        (b"key,value\n,1\n", None, r"^f:2: key is 0 bytes"),
        (b"op,key,value\nput,a,1\n", None, r"^f:2: \"op\" is 'put'"),
        (b"deleted,key,value\nno,a,1\n", None, r"^f:2: .*\"deleted\" 'no'"),
        (b'key,value\na,"1\n', None, r"^f:\d: not CSV"),
        (b"id,v\n7,\xff\n", "id", r"^f:2: text that is not UTF-8"),
        (b"id,v,v\n7,1,2\n", "id", r'^f:1: the column "v" is there 2 times'),
    ],
)
def test_bad_csv_says_what_is_wrong(text: bytes, key_field: str | None, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        list(read_csv(io.BytesIO(text), "f", key_field))


@pytest.mark.parametrize(
    ("columns", "cells", "words"),
    [
        (("deleted", "key", "value"), (False, b"k", None), '"value" is None; must be'),
        (
            ("op", "deleted", "key", "value"),
            ("delete", False, "k", "v"),
            "set or delete, and not both",
        ),
        (
            ("op", "deleted", "key", "value"),
            ("set", True, "k", "v"),
            "set or delete, and not both",
        ),
        (("key", "value"), ("k", 5), '"value" is 5; must be text or bytes'),
        (("key", "value"), (True, b""), '"key" is True; must be text or a whole number'),
    ],
)
def test_bad_cells_say_what_is_wrong(
    columns: tuple[str, ...], cells: tuple[object, ...], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        row_maker(columns, None)(cells)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"id": 1.5}, "must be text or a whole number"),
        ({"id": b"k", "more": b"\xff"}, "not UTF-8"),
        ({"id": 1, "more": float("nan")}, "not finite"),
    ],
)
def test_bad_records_say_what_is_wrong(record: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        row_maker(list(record), "id")(list(record.values()))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[]", "not a JSON object"),
        (b"{}", 'there is no field "id"'),
        (b'{"id": "\\udcff"}', "surrogate"),
        (b'{"id": null}', "must be text or a whole number"),
        (b'{"id": ""}', "key is 0 bytes"),
        (b'{"id": 1, "x": [NaN]}', "NaN is no number"),
    ],
)
def test_bad_objects_say_what_is_wrong(line: bytes, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        parse_record(line, "id")


def test_a_cell_of_parquet_that_cannot_be_read_is_named_after_what_precedes_it(
    tmp_path: Path,
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    file = tmp_path / "f.parquet"
    # The last has nanoseconds, which no time of Python has.
    moments = pa.array([0, 1000, 1001], pa.time64("ns"))
    parquet.write_table(pa.table({"id": ["a", "b", "c"], "at": moments}), file)
    portions = read_parquet(file, "id")
    assert [key for key, _ in next(portions)] == [b"a", b"b"]
    with pytest.raises(InvalidArgumentError, match=r"f.parquet:3: it cannot be read: Nano"):
        next(portions)


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    file = tmp_path / "f.parquet"
    parquet.write_table(pa.table({"key": ["a"] * 50, "value": ["b" * 100] * 50}), file)
    data = file.read_bytes()
    file.write_bytes(data[:40] + b"\xff" * 60 + data[100:])
    with pytest.raises(InvalidArgumentError, match=r"f.parquet:1: it cannot be read: "):
        list(read_parquet(file, None))
    file.write_bytes(data[:-60] + b"\xff" * 40 + data[-20:])
    with pytest.raises(InvalidArgumentError, match=r"f.parquet: not Parquet: "):
        list(read_parquet(file, None))
    with pytest.raises(FileNotFoundError):
        list(read_parquet(tmp_path / "none", None))


def test_parquet_needs_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"needs the package pyarrow.*upr-stream\[arrow"):
        next(read_parquet(Path("f"), None))
