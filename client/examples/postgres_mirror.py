"""Keep a bucket in a table of PostgreSQL, each change exactly once.

    python postgres_mirror.py --target 127.0.0.1:7711 --dsn postgresql:///app
    psql postgresql:///app -c "SELECT key, value FROM mirror"

Changes and positions are written in the same transactions, so the two agree whenever this program, the database or the
server stops, and the next start goes on there. The table ``changes`` keeps what was overwritten and was there at a snapshot
marker of the position: a rollback goes back to one of these or to 0, and deletes what is above it. The view ``mirror`` has the
newest value of each key. Of two programs with one database the second one ends at once.
"""

import argparse
import asyncio
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg2
from psycopg2.extras import execute_values

from upr_client import AsyncClient, ChangeBatch, Position, Rollback, UprError

SCHEMA = """
CREATE TABLE IF NOT EXISTS changes (
    partition int, seqno bigint, key bytea NOT NULL, value bytea, PRIMARY KEY (partition, seqno));
CREATE INDEX IF NOT EXISTS changes_key ON changes (partition, key, seqno DESC);
CREATE TABLE IF NOT EXISTS positions (partition int PRIMARY KEY, position text NOT NULL);
CREATE OR REPLACE VIEW mirror AS SELECT key, value, partition, seqno FROM (
    SELECT DISTINCT ON (partition, key) * FROM changes ORDER BY partition, key, seqno DESC) AS newest
    WHERE value IS NOT NULL;
"""
INSERT = "INSERT INTO changes VALUES %s"
SAVE = "INSERT INTO positions VALUES %s ON CONFLICT (partition) DO UPDATE SET position = excluded.position"
UNDO = "DELETE FROM changes WHERE partition = %s AND seqno > %s"
# What is not the newest of its key and was there at no marker, and deletes of what is not kept. The oldest marker of a position
# is the first one ever: what is above it cannot be kept as a whole.
PRUNE = """DELETE FROM changes USING (
    SELECT seqno, seen AND bool_or(seen AND value IS NOT NULL) OVER (PARTITION BY key ORDER BY seqno) AS kept FROM (
        SELECT key, seqno, value, until IS NULL OR EXISTS (
            SELECT FROM unnest(%s::bigint[]) AS marker WHERE marker >= seqno AND marker < until) AS seen FROM (
            SELECT key, seqno, value, lead(seqno) OVER (PARTITION BY key ORDER BY seqno) AS until
            FROM changes WHERE partition = %s) AS spans) AS looked_at) AS told
    WHERE changes.partition = %s AND changes.seqno = told.seqno AND NOT told.kept"""
LOCK = "SELECT pg_try_advisory_lock(hashtext('upr mirror'))"
PRUNE_EVERY = 1000
"""Changes of a partition after which what no rollback can bring back is deleted."""


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


class InUseError(Exception):
    """Another program keeps this database's mirror."""


class StartAgain(Exception):
    """A partition was emptied and is to be followed from its beginning."""


class Mirror:
    """The tables, and a position store on the same connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._failed = False
        self._saved: dict[int, Position] = {}
        self._changes = 0
        self._unpruned: Counter[int] = Counter()
        with self._transaction() as cursor:
            cursor.execute(LOCK)
            if not cursor.fetchone()[0]:
                raise InUseError("another program keeps the mirror in this database")
            cursor.execute(SCHEMA)
        connection.commit()

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Give a cursor in the open transaction, or a new one; an error ends it."""
        try:
            with self._connection.cursor() as cursor:
                yield cursor
        except BaseException:
            # The rows are gone with it, so the positions past them must not be saved when the stream is closed.
            self._failed = True
            self._connection.rollback()
            raise

    def apply(self, batch: ChangeBatch) -> None:
        """Add changes to the open transaction."""
        rows = [(partition, seqno, key, value) for partition, seqno, _, key, value in batch.changes]
        if rows:
            with self._transaction() as cursor:
                execute_values(cursor, INSERT, rows, page_size=1000)
            self._changes += len(rows)
            self._unpruned.update(row[0] for row in rows)

    def undo(self, rollback: Rollback) -> None:
        """Delete what did not happen, in the open transaction."""
        saved = self._saved.get(rollback.partition, Position.fresh())
        if 0 < rollback.seqno <= saved.seqno and rollback.seqno not in saved.markers:
            self._empty(rollback.partition)
        with self._transaction() as cursor:
            cursor.execute(UNDO, (rollback.partition, rollback.seqno))
            undone = cursor.rowcount
        say(f"partition {rollback.partition}: back to {rollback.seqno}, {undone} changes undone")

    def _empty(self, partition: int) -> None:
        """Forget a partition: what it had at the marker was pruned."""
        # What was not committed comes again, in every partition.
        self._connection.rollback()
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM changes WHERE partition = %s", (partition,))
            cursor.execute("DELETE FROM positions WHERE partition = %s", (partition,))
            self._connection.commit()
            raise StartAgain(f"partition {partition}: again from its beginning")

    def load(self, partitions: Iterable[int]) -> Mapping[int, Position]:
        """Return what was committed; the SDK calls it at the start."""
        self._failed = False
        wanted = set(partitions)
        with self._transaction() as cursor:
            cursor.execute("SELECT partition, position FROM positions")
            self._saved = {p: Position.from_json(text) for p, text in cursor if p in wanted}
        self._connection.commit()
        # Somewhere in between, so that many short runs do not leave ever more.
        self._unpruned = Counter({p: random.randrange(PRUNE_EVERY) for p in wanted})
        return dict(self._saved)

    def save(self, positions: Mapping[int, Position]) -> None:
        """Commit rows and positions; the SDK calls it when all that was applied is in these positions."""
        if self._failed:
            return
        with self._transaction() as cursor:
            kept = {p: self._restorable(p, one) for p, one in positions.items()}
            rows = [(partition, one.to_json()) for partition, one in kept.items()]
            execute_values(cursor, SAVE, rows, page_size=1024)
            for partition, one in kept.items():
                if self._unpruned[partition] >= PRUNE_EVERY:
                    cursor.execute(PRUNE, (list(one.markers), partition, partition))
                    del self._unpruned[partition]
            self._connection.commit()
        self._saved.update(kept)
        say(f"{self._changes} changes")

    def _restorable(self, partition: int, position: Position) -> Position:
        """Return the position without old markers that were not in the one before: their rows may be pruned."""
        saved = self._saved.get(partition, Position.fresh())
        markers = (m for m in position.markers if m > saved.seqno or m in saved.markers)
        return replace(position, markers=tuple(markers))


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
            on_rollback=mirror.undo,
            on_status=say,
        )
        async with changes:
            async for batch in changes.batches():
                mirror.apply(batch)


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep a bucket in a table of PostgreSQL.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--dsn", required=True, help="of the database, as psql takes it")
    parser.add_argument("--until-now", action="store_true", help="end when everything is there")
    options = parser.parse_args()
    try:
        with closing(psycopg2.connect(options.dsn)) as connection:
            mirror = Mirror(connection)
            while True:
                try:
                    asyncio.run(follow(mirror, options))
                    return 0
                except StartAgain as words:
                    say(words)
    except asyncio.CancelledError:
        say("stopped; the next start goes on here")
    except (UprError, InUseError, psycopg2.Error) as error:
        say(f"postgres_mirror: {str(error).partition(chr(10))[0]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
