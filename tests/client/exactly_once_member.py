"""A member of a group that keeps positions in its own database: ``python -m tests.client.exactly_once_member TARGET DATABASE DIES``.

It inserts the partition and seqno of each change, in one transaction with the position behind it. DIES says where it
kills itself in its third transaction: "before" or "after" the commit; or "never".
"""

import os
import secrets
import signal
import sqlite3
import sys
from typing import Any

from upr_client import Change, Client, Group, Position, Tuning
from upr_client.types import Changes

GROUP = "totals"
LEASE_SECONDS = 2.0
SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS applied (partition INTEGER, seqno INTEGER);
CREATE TABLE IF NOT EXISTS positions (partition INTEGER PRIMARY KEY, owner TEXT NOT NULL, position TEXT);
CREATE TABLE IF NOT EXISTS shares (owner TEXT, what TEXT, partitions INTEGER);
"""


class LostError(Exception):
    """Another member owns the partition by now."""


class Totals:
    """The application: a table of what it applied, and beside it the positions and whose they are."""

    def __init__(self, path: str, dies: str) -> None:
        self.database = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        self.database.executescript(SCHEMA)
        self.owner = secrets.token_hex(8)
        self._dies = dies
        self._transactions = 0

    def claim(self, partitions: list[int]) -> dict[int, Position | None]:
        """Own partitions, so that the owner before can commit nothing more of them; return where they are."""
        found: dict[int, Position | None] = {}
        self.database.execute("BEGIN IMMEDIATE")
        for partition in partitions:
            (text,) = self.database.execute(
                "INSERT INTO positions VALUES (?, ?, NULL) "
                "ON CONFLICT (partition) DO UPDATE SET owner = excluded.owner RETURNING position",
                (partition, self.owner),
            ).fetchone()
            # None: from the beginning. The position that the server has may be ahead of this database.
            found[partition] = text and Position.from_json(text)
        self._note("assigned", partitions)
        self.database.execute("COMMIT")
        return found

    def revoked(self, partitions: list[int]) -> None:
        """Take down that partitions went."""
        self._note("revoked", partitions)

    def _note(self, what: str, partitions: list[int]) -> None:
        row = (self.owner, what, len(partitions))
        self.database.execute("INSERT INTO shares VALUES (?, ?, ?)", row)

    def apply(self, changes: Changes, batch: Any) -> None:
        """Apply a batch and move the positions, in one transaction."""
        self.database.execute("BEGIN IMMEDIATE")
        rows = [(c.partition, c.seqno) for c in batch.changes if isinstance(c, Change)]
        self.database.executemany("INSERT INTO applied VALUES (?, ?)", rows)
        changes.ack_batch(batch)
        for partition in {partition for partition, _ in rows}:
            moved = self.database.execute(
                "UPDATE positions SET position = ? WHERE partition = ? AND owner = ?",
                (changes.position(partition).to_json(), partition, self.owner),
            )
            if moved.rowcount != 1:
                self.database.execute("ROLLBACK")
                raise LostError
        self._transactions += 1
        if self._transactions == 3 and self._dies == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.database.execute("COMMIT")
        if self._transactions == 3 and self._dies == "after":
            os.kill(os.getpid(), signal.SIGKILL)


def main(target: str, path: str, dies: str) -> None:
    """Follow until SIGTERM."""
    totals = Totals(path, dies)
    with Client(target) as client:
        while not follow(client, totals):
            pass


def follow(client: Client, totals: Totals) -> bool:
    """Follow until SIGTERM; False when something was lost, and it is to join again."""
    changes = client.bucket().changes(
        resume=Group(
            GROUP,
            member=totals.owner,
            lease_seconds=LEASE_SECONDS,
            on_assigned=totals.claim,
            on_revoked=totals.revoked,
        ),
        tuning=Tuning(credit_bytes=20_000),
        acknowledge="manual",
    )
    try:
        with changes:
            signal.signal(signal.SIGTERM, lambda *_: changes.stop())
            for batch in changes.batches():
                totals.apply(changes, batch)
    except LostError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
