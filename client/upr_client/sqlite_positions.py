"""Positions in an SQLite database: by themselves, or in the transaction that changes your data."""

import json
import os
import re
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from upr_client.messages import check_name
from upr_client.positions import (
    POSITION_BYTES_MAX,
    PositionBusyError,
    PositionStoreError,
    position_text,
)
from upr_protocol.errors import InvalidArgumentError, PositionDamagedError, UprError
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position

_FORMAT: Final = 1
_BUSY_SECONDS: Final = 5.0
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_DAMAGED_CODES: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BUSY_CODES: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


class SqlitePositions:
    """Keeps positions in a table of an SQLite database, which is made when it is needed first.

    Given a path it opens the database for each ``load`` and ``save``; a save is one transaction of its own, on the
    disk when it returns. Given your connection it uses that one. Then ``save_in`` stores positions in your
    transaction, beside the data that they belong to, and both are there after a crash or neither is; ``save`` is
    still a transaction of its own, and refused while one of yours is open.

    The asyncio flavour calls stores in other threads, so open your connection with ``check_same_thread=False``.

    Args:
        database: path of a database, or an open connection; it is never closed here.
        consumer: whose positions, so that several consumers can share a table; 0 to 200 bytes of UTF-8 without
            control characters. One consumer of a name at a time.
        table: a letter or underscore and then up to 99 letters, digits and underscores.

    Raises:
        InvalidArgumentError: an argument is out of its range.
    """

    def __init__(
        self,
        database: str | os.PathLike[str] | sqlite3.Connection,
        *,
        consumer: str = "",
        table: str = "upr_positions",
    ) -> None:
        if not _TABLE.fullmatch(table) or table.lower().startswith("sqlite_"):
            raise InvalidArgumentError(
                f"table is {table[:120]!r}, it must be a letter or underscore and then up to 99 letters, digits and "
                "underscores, and not begin with sqlite_"
            )
        self._consumer = check_name(consumer, "consumer") if consumer else ""
        self._table = table
        self._mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        if isinstance(database, sqlite3.Connection):
            self._connection = database
            self._path = "of your connection"
            with self._told():
                found = _cursor(database).execute("PRAGMA database_list").fetchone()
            self._path = found[2] or ":memory:"
            return
        self._path = os.fspath(database)
        if self._path in ("", ":memory:"):
            raise InvalidArgumentError(
                f"the database {self._path!r} would end with each transaction",
                hint="pass an open connection, or use MemoryPositions",
            )

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        """Return the positions of those of the partitions that have one; none without a table.

        Raises:
            PositionDamagedError: the database, or the row of one of the partitions, is damaged.
            PositionBusyError: the database was locked for 5 seconds (with your connection, for its timeout).
            PositionStoreError: it cannot be read.
            InvalidArgumentError: your connection cannot be used here.
        """
        wanted = set(partitions)
        with self._mutex, self._opened() as connection:
            rows = self._rows(connection)
        return {row[0]: self._position(*row) for row in rows if row[0] in wanted}

    def save(self, positions: Mapping[int, Position]) -> None:
        """Store these positions in a transaction of its own.

        Raises:
            InvalidArgumentError: a partition is out of range, a position too large to be stored, your connection
                cannot be used here, or a transaction is open on it.
            PositionDamagedError: the database is damaged.
            PositionBusyError: it was locked for 5 seconds (with your connection, for its timeout).
            PositionStoreError: it cannot be written.
        """
        rows = self._to_rows(positions)
        with self._mutex, self._opened() as connection:
            if connection.in_transaction:
                raise InvalidArgumentError(
                    "positions were to be saved while a transaction of yours is open",
                    hint="commit it first, or store the positions in it with save_in",
                )
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._write(connection, rows)
                connection.execute("COMMIT")
            except BaseException:
                # Some failures have rolled it back already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def save_in(self, connection: sqlite3.Connection, positions: Mapping[int, Position]) -> None:
        """Store these positions in the open transaction of a connection, and leave committing to you.

        After an error roll the transaction back: some of the positions may be in it. A commit that fails, or a
        rollback of yours, leaves the positions as they were; do not go on with the same changes then, because they
        are ahead of what is stored.

        Raises:
            InvalidArgumentError: as in ``save``, or the connection commits each statement by itself and no
                transaction was begun.
            PositionDamagedError, PositionBusyError, PositionStoreError: as in ``save``.
        """
        rows = self._to_rows(positions)
        by_itself = (
            connection.isolation_level is None or getattr(connection, "autocommit", 0) is True
        )
        if by_itself and not connection.in_transaction:
            raise InvalidArgumentError(
                "positions were to be saved in a transaction, but none was begun",
                hint='execute "BEGIN" on the connection first',
            )
        with self._told():
            self._write(connection, rows)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._told():
            if self._connection is not None:
                yield self._connection
                return
            # Opened anew each time: an open database must not come along into a forked process.
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                # FULL, and the folder as well where the journal is a file that is deleted: without that a power
                # failure can undo the last transaction.
                connection.execute("PRAGMA synchronous=EXTRA")
                yield connection
            finally:
                connection.close()

    def _rows(self, connection: sqlite3.Connection) -> list[tuple[Any, Any, Any, Any]]:
        cursor = _cursor(connection)
        cursor.execute("SELECT 1 FROM sqlite_master WHERE lower(name) = ?", (self._table.lower(),))
        if cursor.fetchone() is None:
            return []
        # As a blob, because text that is no UTF-8 would be an error without the row's name.
        return cursor.execute(
            "SELECT partition, format, crc32, CAST(substr(position, 1, ?) AS BLOB) "
            f'FROM "{self._table}" WHERE consumer = ? AND partition BETWEEN 0 AND ?',
            (POSITION_BYTES_MAX + 1, self._consumer, PARTITIONS - 1),
        ).fetchall()

    def _to_rows(self, positions: Mapping[int, Position]) -> list[tuple[str, int, int, int, str]]:
        rows = []
        for partition, position in positions.items():
            text = position_text(partition, position)
            crc = self._crc32(partition, text.encode())
            rows.append((self._consumer, int(partition), _FORMAT, crc, text))
        return rows

    def _write(
        self, connection: sqlite3.Connection, rows: list[tuple[str, int, int, int, str]]
    ) -> None:
        connection.execute(
            f'CREATE TABLE IF NOT EXISTS "{self._table}" (consumer TEXT NOT NULL, partition INTEGER NOT NULL, '
            "format INTEGER NOT NULL, crc32 INTEGER NOT NULL, position TEXT NOT NULL, "
            "PRIMARY KEY (consumer, partition)) WITHOUT ROWID"
        )
        connection.executemany(
            f'INSERT INTO "{self._table}" (consumer, partition, format, crc32, position) VALUES (?, ?, ?, ?, ?) '
            "ON CONFLICT (consumer, partition) DO UPDATE SET "
            "format = excluded.format, crc32 = excluded.crc32, position = excluded.position",
            rows,
        )

    def _position(self, partition: int, stored_format: Any, crc: Any, text: Any) -> Position:
        if type(stored_format) is not int or stored_format != _FORMAT:
            raise self._damaged(
                partition, f"it has format {stored_format!r}, this program reads {_FORMAT}"
            )
        if not isinstance(text, bytes) or len(text) > POSITION_BYTES_MAX:
            raise self._damaged(partition, f"it is not a text of up to {POSITION_BYTES_MAX} bytes")
        if crc != self._crc32(partition, text):
            raise self._damaged(partition, "its CRC32 does not fit its content")
        try:
            return Position.from_json(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise self._damaged(partition, f"it is not JSON ({error})") from error
        except PositionDamagedError as error:
            raise self._damaged(partition, error.message) from error

    def _crc32(self, partition: int, text: bytes) -> int:
        # With the key, so that a row that got under another one's key is found.
        return zlib.crc32(b"%b\0%d\0%d\0%b" % (self._consumer.encode(), partition, _FORMAT, text))

    @property
    def _place(self) -> str:
        return f"database {self._path}, table {self._table}"

    def _damaged(self, partition: int, what: str) -> PositionDamagedError:
        return PositionDamagedError(
            f"{self._place}: the position of consumer {self._consumer!r}, partition {partition}, is damaged: {what}",
            hint="restore the database, together with the data, from a copy; or delete the row and what the consumer "
            "has of the partition, to start it from zero",
        )

    def _none(self, error: Exception) -> PositionDamagedError:
        return PositionDamagedError(
            f"{self._place}: the database is damaged or none ({error})",
            hint="restore it, together with the data, from a copy; or delete both to start from zero",
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._error(error) from error
        except UnicodeDecodeError as error:
            # Names in the schema, and SQLite's own words about them.
            raise self._none(error) from error

    def _error(self, error: sqlite3.Error) -> UprError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _BUSY_CODES:
            return PositionBusyError(
                f"{self._place}: locked by another connection ({error})",
                hint="keep other transactions short, or give the positions a database of their own",
                retriable=True,
            )
        if code in _DAMAGED_CODES:
            return self._none(error)
        if isinstance(error, sqlite3.ProgrammingError):
            return InvalidArgumentError(
                f"{self._place}: the connection cannot be used ({error})",
                hint="it must be open, and made with check_same_thread=False for the asyncio flavour",
            )
        return PositionStoreError(
            f"{self._place}: it cannot be read or written ({error})",
            hint="it needs an existing folder, permission to write there, room on the disk, and a table that "
            "nobody else uses",
        )


def _cursor(connection: sqlite3.Connection) -> sqlite3.Cursor:
    """Return a cursor whose rows are tuples, whatever those of the connection are."""
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor
