"""Write the changes of PostgreSQL's tables into a bucket, in the order in which they were committed, each at least once.

    psql postgresql:///app -c "CREATE PUBLICATION upr FOR TABLE users, orders WITH (publish = 'insert, update, delete')"
    python postgres_capture.py --target 127.0.0.1:7711 --dsn postgresql:///app --publication upr

The database needs wal_level = logical, and each table a primary key, which its REPLICA IDENTITY has: DEFAULT, or FULL. A row
is the key ``schema.table/["1"]``, with the columns of the primary key, and its value a JSON object. The replication slot of
the publication's name keeps what was not yet written: it moves when the server has acknowledged the changes. Rows that were
there before the slot are not told; an UPDATE that changes nothing has them told: UPDATE users SET id = id. A TRUNCATE is not
told either: the keys stay.

Something large that an UPDATE leaves alone is not told by PostgreSQL, unless the table has REPLICA IDENTITY FULL: it is an error.
An error about what was committed comes again at each start. To pass it over, mend its cause, then SELECT
pg_drop_replication_slot('upr'), start again, and have the rows told. What was deleted meanwhile stays in the bucket.
"""

import argparse
import json
import select
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg2
from psycopg2.extras import LogicalReplicationConnection

from upr_client import Client, UprError
from upr_client.types import Bucket

ROWS_MAX = 1000
"""Rows of a write."""
FEEDBACK_SECONDS = 5.0
PRIMARY_KEY = """SELECT a.attname FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
    WHERE i.indisprimary AND n.nspname || '.' || c.relname = %s"""
_NUMBERS: dict[int, Callable[[str], object]] = {16: "t".__eq__, 20: int, 21: int, 23: int}
"""Conversions of texts to JSON, by the type's number; texts of all other types stay as they are."""

Row = tuple[bytes, bytes | None]
Column = tuple[str, int, bool]
"""Its name, its type's number, and whether it is of the key."""


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


class CaptureError(Exception):
    """The database is not as it must be."""


class Table:
    """A table as a Relation message tells of it.

    Attributes:
        name: with its schema.
    """

    def __init__(self, name: str, columns: list[Column]) -> None:
        self.name, self.columns = name, columns
        if not any(of_key for _, _, of_key in columns):
            raise CaptureError(f"table {name} has no primary key")

    def key(self, texts: list[str | None]) -> bytes:
        parts = [t for t, (_, _, of_key) in zip(texts, self.columns, strict=True) if of_key]
        return f"{self.name}/{json.dumps(parts, ensure_ascii=False)}".encode()

    def row(self, texts: list[str | None]) -> Row:
        """Return the key and the value of a row."""
        value = {
            name: text if text is None else _NUMBERS.get(kind, str)(text)
            for text, (name, kind, _) in zip(texts, self.columns, strict=True)
        }
        return self.key(texts), json.dumps(value, ensure_ascii=False).encode()


class Reader:
    """The messages of pgoutput (chapter "Logical Replication Message Formats" of PostgreSQL's manual)."""

    def __init__(self, keys: Callable[[str], list[str]]) -> None:
        self._keys = keys
        self._tables: dict[int, Table] = {}
        self._data, self._at = b"", 0

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(f">{form}")
        return value

    def _text(self) -> str:
        end = self._data.index(0, self._at)
        text, self._at = self._data[self._at : end].decode(), end + 1
        return text

    def _with_primary_key(self, name: str, identity: bytes, columns: list[Column]) -> list[Column]:
        """Return the columns of a table where what an old row tells is not the primary key."""
        keys = self._keys(name)
        if identity == b"i" and any(column in keys and not told for column, _, told in columns):
            raise CaptureError(
                f"table {name} does not tell the primary key of what changes; ALTER TABLE {name} REPLICA IDENTITY DEFAULT"
            )
        return [(column, kind, column in keys) for column, kind, _ in columns]

    def _tuple(self, table: Table, old: list[str | None] | None = None) -> list[str | None]:
        texts: list[str | None] = []
        for place in range(self._take("h")):
            kind = self._take("c")
            if kind == b"t":
                size = self._take("i")
                texts.append(self._data[self._at : self._at + size].decode())
                self._at += size
            elif kind == b"n":
                texts.append(None)
            elif old is not None:
                texts.append(old[place])
            else:
                raise CaptureError(
                    f"a large value of table {table.name} was not told; ALTER TABLE {table.name} REPLICA IDENTITY FULL"
                )
        return texts

    def rows(self, data: bytes) -> Iterator[Row]:
        """Yield what a message says: keys with their values, None for a row that is gone."""
        self._data, self._at = data, 1
        if data[:1] == b"R":
            number, name = self._take("I"), f"{self._text()}.{self._text()}"
            identity, columns = self._take("c"), []
            for _ in range(self._take("h")):
                told = bool(self._take("b"))
                column, kind, _ = self._text(), self._take("I"), self._take("i")
                columns.append((column, kind, told))
            if identity != b"d":
                columns = self._with_primary_key(name, identity, columns)
            self._tables[number] = Table(name, columns)
        elif data[:1] in b"IUD":
            table = self._tables[self._take("I")]
            kind, old, whole = self._take("c"), None, False
            if kind != b"N":
                old = self._tuple(table)
                # Of a key alone (K) the other columns are not told.
                whole = kind == b"O"
                kind = b"" if data[:1] == b"D" else self._take("c")
            new = table.row(self._tuple(table, old if whole else None)) if kind else None
            if old is not None and (new is None or new[0] != table.key(old)):
                yield table.key(old), None
            if new is not None:
                yield new


def ask(dsn: str, query: str, *values: str) -> list[Any]:
    """Return the first column of what a query finds."""
    with closing(psycopg2.connect(dsn)) as database, database.cursor() as cursor:
        cursor.execute(query, values)
        return [row[0] for row in cursor]


def capture(replication: Any, bucket: Bucket, dsn: str, name: str) -> None:
    """Write what is committed, for ever; the slot of the publication's name is made where it is not there."""
    if not ask(dsn, "SELECT 1 FROM pg_publication WHERE pubname = %s", name):
        raise CaptureError(f"there is no publication {name!r}; CREATE PUBLICATION makes it")
    cursor = replication.cursor()
    if not ask(dsn, "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", name):
        cursor.create_replication_slot(name, output_plugin="pgoutput")
    options = {"proto_version": "1", "publication_names": name}
    cursor.start_replication(slot_name=name, decode=False, options=options)
    reader, rows = Reader(lambda table: ask(dsn, PRIMARY_KEY, table)), list[Row]()
    while True:
        message = cursor.read_message()
        if message is None:
            # What other tables wrote need not be kept.
            cursor.send_feedback(flush_lsn=0 if rows else cursor.wal_end)
            select.select([replication], [], [], FEEDBACK_SECONDS)
            continue
        rows += reader.rows(message.payload)
        commits = message.payload[:1] == b"C"
        if len(rows) >= ROWS_MAX or (commits and rows):
            bucket.write_many(rows)
            rows.clear()
        if commits:
            # Where the transaction ends; the message has where its last part begins before that.
            cursor.send_feedback(flush_lsn=struct.unpack_from(">Q", message.payload, 10)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the changes of PostgreSQL into a bucket.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--dsn", required=True, help="of the database, as psql takes it")
    parser.add_argument("--publication", required=True, help="its name, and that of the slot")
    options = parser.parse_args()
    try:
        kind = LogicalReplicationConnection
        connection = psycopg2.connect(options.dsn, connection_factory=kind)
        with closing(connection), Client(options.target) as client:
            capture(connection, client.bucket(options.bucket), options.dsn, options.publication)
    except KeyboardInterrupt:
        say("stopped; the next start goes on here")
    except (UprError, CaptureError, psycopg2.Error) as error:
        say(f"postgres_capture: {str(error).partition(chr(10))[0]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
