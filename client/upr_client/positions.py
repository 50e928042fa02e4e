"""Position stores: in memory, in a file, in an SQLite database, or in the transaction that changes your data."""

import fcntl
import json
import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from upr_protocol.errors import InvalidArgumentError, PositionDamagedError, UprError
from upr_protocol.failover import check_partition
from upr_protocol.limits import PARTITIONS, check_name
from upr_protocol.position import Position
from upr_protocol.position_table import FORMAT, NEWER_HINT, PositionTable, format_of

POSITION_BYTES_MAX: Final = 64 * 2**10
"""One stored position; with all the markers and records that a server gives it has about 3 KiB."""

_JSON_FORMAT: Final = 1
_FILE_BYTES_MAX: Final = PARTITIONS * POSITION_BYTES_MAX
_LOCK_SECONDS: Final = 5.0
_LOCK_POLL_SECONDS: Final = 0.01
_HINT: Final = (
    "restore the file, together with the data, from a copy; or delete both to start from zero"
)


class PositionStoreError(UprError):
    """A position store cannot be read or written: no folder, no permission, no room."""

    default_reason = "POSITION_STORE"


class PositionBusyError(UprError):
    """Another program uses the place of these positions; nothing was stored.

    Retriable when it only holds a lock on it for the moment; not when it stored positions there meanwhile.
    """

    default_reason = "POSITION_BUSY"


class PositionStore(Protocol):
    """Keeps positions. Your own may keep them beside the data, so that both change in one transaction.

    The asyncio flavour calls it in a thread, one call at a time. ``upr_client.testing.positions`` checks a store.
    """

    def load(self, partitions: Iterable[int]) -> Mapping[int, Position]:
        """Return the positions of those of the partitions that have one.

        Raises:
            PositionDamagedError: what is stored cannot be read.
        """

    def save(self, positions: Mapping[int, Position]) -> None:
        """Store these positions, all of them or none, and keep those of other partitions.

        A consumer gives a dictionary of its own to each call.
        """


class MemoryPositions:
    """Position store in memory: it lasts as long as the object, to resume after closing, not after a crash."""

    def __init__(self, positions: Mapping[int, Position] | None = None) -> None:
        self._mutex = threading.Lock()
        self._table = PositionTable.of(positions or {})

    def load(self, partitions: Iterable[int]) -> Mapping[int, Position]:
        """Return the positions of those of the partitions that have one."""
        wanted = np.fromiter(partitions, np.int64)
        with self._mutex:
            return self._table.only(wanted)

    def save(self, positions: Mapping[int, Position]) -> None:
        """Keep these positions.

        Raises:
            InvalidArgumentError: a partition is out of range.
        """
        added = PositionTable.of(positions)
        # Consumers of other threads may share the object.
        with self._mutex:
            self._table = self._table.updated(added)


class FilePositions:
    """Position store in one file, replaced atomically: a crash leaves the old file or the new one.

    One consumer a file. Two objects that use one file at the same time do not destroy it: the second one to save is
    told that the file is not what it loaded. The file ``<path>.tmp`` beside it is this object's too, and while it
    saves it holds a lock (flock) on the folder.

    Args:
        path: of the file; its folder must exist. Of a symbolic link it is the file that it leads to now.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # A link would be replaced, and the file that it leads to would stay as it was.
        self._path = Path(os.path.realpath(path))
        self._mutex = threading.Lock()
        self._known: PositionTable | None = None
        self._data: bytes | None = None

    def load(self, partitions: Iterable[int]) -> Mapping[int, Position]:
        """Return the positions of those of the partitions that have one; none without a file.

        A file of the format before, which was JSON, is read too; the next save replaces it by one of this format.

        Raises:
            PositionDamagedError: the file is damaged or of another format, also of a newer one.
            PositionStoreError: it cannot be read, or its folder is missing or cannot be written.
        """
        with self._mutex:
            data = self._read()
            self._check_folder()
            self._known, self._data = self._parse(data), data
            return self._known.only(np.fromiter(partitions, np.int64))

    def save(self, positions: Mapping[int, Position]) -> None:
        """Store these positions; returns when they are on the disk.

        Raises:
            InvalidArgumentError: a partition is out of range, or a position too large to be stored.
            PositionBusyError: the file is not what this object loaded or saved last, so it is used by another
                object or program; or another one is saving, and goes on with that for 5 seconds.
            PositionDamagedError: the file that holds the other positions is damaged.
            PositionStoreError: it cannot be written; the old file is untouched.
        """
        added = PositionTable.of(positions)
        sizes = added.sizes()
        if len(sizes):
            largest = int(sizes.argmax())
            _check_size(int(added.rows["partition"][largest]), int(sizes[largest]))
        with self._mutex, self._locked_folder() as folder:
            data = self._read()
            if self._known is None:
                self._known, self._data = self._parse(data), data
            elif data != self._data:
                raise PositionBusyError(
                    f"{self._path} is not the file that was loaded or saved here last",
                    hint="give each consumer a file of its own; after you changed the file yourself, restart the consumer",
                )
            table = self._known.updated(added)
            encoded = table.encode()
            self._replace(encoded)
            # Before the folder is synced: if that fails, the next save meets the new file all the same.
            self._known, self._data = table, encoded
            self._sync(folder)

    def _check_folder(self) -> None:
        """A consumer that cannot save should learn it before it handles anything."""
        os.close(self._open_folder())
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            denied = OSError("no permission, or a read-only disk")
            raise self._failed("its folder cannot be written", denied)

    def _open_folder(self) -> int:
        try:
            return os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self._failed("its folder cannot be opened", error) from error

    @contextmanager
    def _locked_folder(self) -> Iterator[int]:
        # The folder and not the file, because a lock belongs to what is opened and not to its name.
        folder = self._open_folder()
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(folder):
                if time.monotonic() > deadline:
                    raise PositionBusyError(
                        f"{self._path.parent} was locked by another program for {_LOCK_SECONDS:g} s",
                        hint="positions cannot be saved while it holds the lock (flock) on the folder",
                        retriable=True,
                    )
                time.sleep(_LOCK_POLL_SECONDS)
            yield folder
        finally:
            os.close(folder)

    def _replace(self, data: bytes) -> None:
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise self._failed("it cannot be written", error) from error

    def _sync(self, folder: int) -> None:
        try:
            os.fsync(folder)
        except OSError as error:
            raise self._failed("its folder cannot be written", error) from error

    def _read(self) -> bytes | None:
        try:
            with open(self._path, "rb") as file:
                data = file.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("it cannot be read", error) from error
        if len(data) > _FILE_BYTES_MAX:
            raise self._damaged(f"it has more than {_FILE_BYTES_MAX} bytes")
        return data

    def _parse(self, data: bytes | None) -> PositionTable:
        if data is None:
            return PositionTable.of({})
        if data[:1] == b"{":
            return PositionTable.of(self._parse_json(data))
        if (found := format_of(data)) > FORMAT:
            # Not damaged: nobody should be told to delete it.
            raise PositionDamagedError(
                f"{self._path} has format {found}; must be at most {FORMAT}", hint=NEWER_HINT
            )
        try:
            return PositionTable.decode(data)
        except PositionDamagedError as error:
            raise self._damaged(error.message) from error

    def _parse_json(self, data: bytes) -> dict[int, Position]:
        """Read the format before."""
        try:
            document = json.loads(data)
            stored_format, crc = document["format"], document["crc32"]
            texts = {
                int(partition): json.dumps(value, sort_keys=True, separators=(",", ":"))
                for partition, value in document["positions"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"it is not a file of positions ({error!r})") from error
        if type(stored_format) is not int or stored_format != _JSON_FORMAT:
            raise self._damaged(
                f"it has format {stored_format!r}, this program reads {_JSON_FORMAT} as JSON"
            )
        body = ",\n".join(f'"{partition}":{texts[partition]}' for partition in sorted(texts))
        if crc != f"{zlib.crc32(body.encode()):08x}":
            raise self._damaged("its CRC32 does not fit its content")
        if not all(0 <= partition < PARTITIONS for partition in texts):
            raise self._damaged("it names a partition that does not exist")
        return {partition: self._position(partition, text) for partition, text in texts.items()}

    def _position(self, partition: int, text: str) -> Position:
        try:
            return Position.from_json(text)
        except PositionDamagedError as error:
            raise self._damaged(f"partition {partition}: {error.message}") from error

    def _damaged(self, what: str) -> PositionDamagedError:
        return PositionDamagedError(f"{self._path} is damaged: {what}", hint=_HINT)

    def _failed(self, what: str, error: OSError) -> PositionStoreError:
        return PositionStoreError(
            f"the file of positions {self._path}: {what}: {error.strerror or error}",
            hint="it needs an existing folder, permission to write there, and room on the disk",
        )


def save_positions(store: PositionStore, positions: Mapping[int, Position]) -> None:
    """Save as a consumer does: a store of the application's own gets a dictionary, which is its to keep.

    Ours take a table as it is. Not by ``isinstance``: a class that derives from one of ours may do anything with it.
    """
    store.save(positions if type(store) in (FilePositions, MemoryPositions) else dict(positions))


def _check_size(partition: int, size: int) -> None:
    if size > POSITION_BYTES_MAX:
        raise InvalidArgumentError(
            f"position of partition {partition} is {size} bytes; must be at most {POSITION_BYTES_MAX}",
            hint="thin its markers with upr_protocol.position.thin_markers",
        )


def _try_lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: what the other one saved is still noticed, only not at the same instant.
        return True
    return True


_SQLITE_FORMAT: Final = 1
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
                f"table is {table[:120]!r}; must be a letter or underscore and then up to 99 letters, digits and "
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
                f"the database {self._path!r} ends with each transaction",
                hint="pass an open connection, or use MemoryPositions",
            )
        # It is opened each time, and the program may be in another folder by then.
        self._path = os.path.abspath(self._path)

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
            PositionDamagedError, PositionBusyError: as in ``load``.
            PositionStoreError: they cannot be written.
        """
        rows = self._to_rows(positions)
        with self._mutex, self._opened() as connection:
            if connection.in_transaction:
                raise InvalidArgumentError(
                    "save needs a connection without an open transaction; one is open",
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
                "save_in needs an open transaction; none was begun",
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
            # Open it each time: an open database must not pass into a forked process.
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
            text = position.to_json()
            _check_size(check_partition(partition), len(text))
            crc = self._crc32(partition, text.encode())
            rows.append((self._consumer, int(partition), _SQLITE_FORMAT, crc, text))
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
        if type(stored_format) is not int or stored_format != _SQLITE_FORMAT:
            raise self._damaged(
                partition, f"it has format {stored_format!r}, this program reads {_SQLITE_FORMAT}"
            )
        if not isinstance(text, bytes) or len(text) > POSITION_BYTES_MAX:
            raise self._damaged(partition, f"it is not a text of up to {POSITION_BYTES_MAX} bytes")
        if crc != self._crc32(partition, text):
            raise self._damaged(partition, "its CRC32 does not fit its content")
        try:
            return Position.from_json(text)
        except PositionDamagedError as error:
            raise self._damaged(partition, error.message) from error

    def _crc32(self, partition: int, text: bytes) -> int:
        # With the key, so that a row that got under another one's key is found.
        return zlib.crc32(
            b"%b\0%d\0%d\0%b" % (self._consumer.encode(), partition, _SQLITE_FORMAT, text)
        )

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
