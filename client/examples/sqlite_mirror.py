"""Mirror a bucket into an SQLite database, each change exactly once.

    python sqlite_mirror.py --target 127.0.0.1:7711 --database mirror.db
    sqlite3 mirror.db "SELECT key, value FROM mirror"

Rows and positions change in the same transactions, so the two agree whenever this program or the machine stops, and
the next start goes on there. A transaction takes in what arrives within a second or so; the SDK ends it, because
``Mirror`` is also where it saves positions. It saves after a rollback too, so that what was undone and the new
position are in one transaction.

A rollback brings back what was overwritten. Therefore the table ``undo`` keeps what the mirror had at the snapshot
markers of the position: the SDK goes back to one of these or to 0.
"""

import argparse
import asyncio
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace

from upr_client import (
    AsyncClient,
    ChangeBatch,
    Position,
    Rollback,
    SqlitePositions,
    Tuning,
    UprError,
)

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS mirror (
    partition INTEGER, key BLOB, value BLOB NOT NULL, seqno INTEGER NOT NULL, PRIMARY KEY (partition, key));
CREATE INDEX IF NOT EXISTS mirror_seqno ON mirror (partition, seqno);
-- The key had this value from the seqno "since" on, and no longer from "until" on.
CREATE TABLE IF NOT EXISTS undo (
    partition INTEGER, key BLOB, value BLOB NOT NULL, since INTEGER NOT NULL, until INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS undo_until ON undo (partition, until);
"""
KEEP = """INSERT INTO undo (partition, key, value, since, until)
    SELECT partition, key, value, seqno, ? FROM mirror WHERE partition = ? AND key = ?"""
DELETE = "DELETE FROM mirror WHERE partition = ? AND key = ?"
SET = "INSERT INTO mirror (partition, key, value, seqno) VALUES (?, ?, ?, ?)"
GO_BACK = (
    "DELETE FROM mirror WHERE partition = :partition AND seqno > :seqno",
    """INSERT INTO mirror (partition, key, value, seqno) SELECT partition, key, value, since
    FROM undo WHERE partition = :partition AND since <= :seqno AND until > :seqno""",
    "DELETE FROM undo WHERE partition = :partition AND until > :seqno",
)
KEPT = "SELECT partition, count(*) FROM undo GROUP BY partition"
PRUNE = """DELETE FROM undo WHERE partition = ? AND NOT EXISTS (
    SELECT 1 FROM json_each(?) AS marker WHERE marker.value >= since AND marker.value < until)"""
PRUNE_EVERY = 1000
"""A partition is pruned when it has so many new rows in the table undo."""


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


class StartAgain(Exception):
    """A partition was emptied and is to be followed from its beginning."""


class Mirror:
    """The tables, and a position store on the same connection."""

    def __init__(self, database: str) -> None:
        # The SDK saves in other threads. One that was cancelled may still be saving when the last one begins.
        self.connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
        self._saving = threading.Lock()
        self.connection.executescript(SCHEMA)
        self._store = SqlitePositions(self.connection, consumer="mirror")
        self._saved: dict[int, Position] = {}
        self._kept: Counter[int] = Counter()
        self._failed = False
        self._changes = self._rollbacks = 0

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            if not self.connection.in_transaction:
                self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
        except BaseException:
            # The rows are gone with it, so the positions past them must not be saved when the stream is closed.
            self._failed = True
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def apply(self, batch: ChangeBatch) -> None:
        """Add changes to the open transaction."""
        with self._transaction() as connection:
            for partition, seqno, _, key, value in batch.changes:
                kept = connection.execute(KEEP, (seqno, partition, key)).rowcount
                if kept:
                    self._kept[partition] += kept
                    connection.execute(DELETE, (partition, key))
                if value is not None:
                    connection.execute(SET, (partition, key, value, seqno))
                self._changes += 1

    def undo(self, rollback: Rollback) -> None:
        """Take a partition back to a marker, in the open transaction."""
        partition, seqno = rollback.partition, rollback.seqno
        say(f"partition {partition}: back from {rollback.from_seqno} to {seqno}")
        self._rollbacks += 1
        saved = self._saved.get(partition, Position.fresh())
        if 0 < seqno <= saved.seqno and seqno not in saved.markers:
            self._empty(partition)
        with self._transaction() as connection:
            for statement in GO_BACK:
                connection.execute(statement, {"partition": partition, "seqno": seqno})

    def _empty(self, partition: int) -> None:
        """Forget a partition: what it had at the marker was pruned."""
        with self._transaction() as connection:
            # What was not committed comes again, in every partition.
            connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            for statement in GO_BACK:
                connection.execute(statement, {"partition": partition, "seqno": 0})
            self._store.save_in(connection, {partition: Position.fresh()})
            connection.execute("COMMIT")
            raise StartAgain(f"partition {partition}: again from its beginning")

    def load(self, partitions: Iterable[int]) -> Mapping[int, Position]:
        """Return what was committed; the SDK calls it at the start."""
        self._failed = False
        self._saved = self._store.load(partitions)
        # What a run before has not pruned: many short ones must not leave ever more.
        self._kept = Counter(dict(self.connection.execute(KEPT)))
        return dict(self._saved)

    def save(self, positions: Mapping[int, Position]) -> None:
        """Commit rows and positions; the SDK calls it when all that was applied is in these positions."""
        with self._saving:
            if self._failed:
                return
            with self._transaction() as connection:
                restorable = {p: self._restorable(p, position) for p, position in positions.items()}
                for partition, position in restorable.items():
                    if self._kept[partition] >= PRUNE_EVERY:
                        connection.execute(PRUNE, (partition, str(list(position.markers))))
                        del self._kept[partition]
                self._store.save_in(connection, restorable)
                connection.execute("COMMIT")
            self._saved.update(restorable)
            say(f"{self._changes} changes, {self._rollbacks} rollbacks")

    def _restorable(self, partition: int, position: Position) -> Position:
        """Return the position without old markers that were not in the one before: their undo rows may be pruned."""
        saved = self._saved.get(partition, Position.fresh())
        known = set(saved.markers)
        markers = tuple(m for m in position.markers if m > saved.seqno or m in known)
        return replace(position, markers=markers)


async def follow(mirror: Mirror, options: argparse.Namespace) -> None:
    """Apply changes until the end, or until cancelled."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        # This cancels where something is awaited, so never between a batch and its position.
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with AsyncClient(options.target) as client:
        changes = client.bucket(options.bucket).changes(
            resume=mirror,
            until="now" if options.until_now else None,
            tuning=Tuning(save_seconds=options.commit_seconds),
            on_rollback=mirror.undo,
            on_status=say,
        )
        async with changes:
            async for batch in changes.batches():
                mirror.apply(batch)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mirror a bucket into an SQLite database.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--database", required=True, help="file; made when it is not there")
    parser.add_argument("--until-now", action="store_true", help="end when everything is mirrored")
    parser.add_argument("--commit-seconds", type=float, default=1.0, help="how often to commit")
    options = parser.parse_args()
    try:
        mirror = Mirror(options.database)
        with closing(mirror.connection):
            while True:
                try:
                    asyncio.run(follow(mirror, options))
                    return 0
                except StartAgain as words:
                    say(words)
    except asyncio.CancelledError:
        say("stopped; the next start goes on here")
        return 0
    except (UprError, sqlite3.Error) as error:
        say(f"sqlite_mirror: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
