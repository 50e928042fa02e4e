"""What is true in a set of servers: everything that was ever numbered, by the id under which it was, and every history.

It is taken down where the engine numbers a write and where it takes over a log, whichever server that is, and is never
asked of a server again.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.model import Row, State, apply, partition_of
from tests.raw import all_rows
from tests.simulation.looping import running
from upr.engine.bucket import Bucket
from upr.engine.partitions import Partitions
from upr.engine.tail import Tail
from upr_protocol.failover import FailoverLog

KEYS = [b"key%d" % i for i in range(8)]
USED = sorted({partition_of(key) for key in KEYS})
Log = tuple[tuple[int, int], ...]


class Violation(Exception):
    """Something that was promised does not hold."""


class Numbered(NamedTuple):
    """A mutation as it was numbered.

    Args:
        write: producer, number, and which of its rows.
        epoch: of the server's partition then.
    """

    row: Row
    write: tuple[bytes, int, int]
    epoch: int


class Truth:
    """Everything that was numbered in partitions USED.

    Attributes:
        forced: above all epochs once a promotion was forced, and 0 before; nothing is promised to ``replicated(k)`` any more.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int], Numbered] = {}
        self.logs: dict[tuple[int, int], Log] = {}
        self.forced = 0
        self._states: dict[tuple[int, int], tuple[int, State]] = {}
        self._owners: dict[int, str] = {}
        self._numbering: Bucket | None = None

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Take down what engines do from now on."""
        patch.setattr(Bucket, "_numbered", self._before(Bucket._numbered))
        write, set_log, from_rows = Tail.write, Partitions.set_log, Partitions.from_rows

        def written(tail: Tail, block: Any, producer: bytes, number: int, now: int) -> int:
            self._numbered(block, producer, number)
            return write(tail, block, producer, number, now)

        def log_set(table: Partitions, partition: int, log: FailoverLog) -> None:
            set_log(table, partition, log)
            self._logged(partition, log)

        def opened(rows: Any) -> Partitions:
            table = from_rows(rows)
            for partition in USED:
                self._logged(partition, table.logs[partition])
            return table

        patch.setattr(Tail, "write", written)
        patch.setattr(Partitions, "set_log", log_set)
        patch.setattr(Partitions, "from_rows", staticmethod(opened))

    def _before(self, number: Callable[..., Any]) -> Callable[..., Any]:
        def numbered(bucket: Bucket, runs: Any, now: int) -> Any:
            self._numbering = bucket
            return number(bucket, runs, now)

        return numbered

    def _numbered(self, block: Any, producer: bytes, number: int) -> None:
        bucket, self._numbering = self._numbering, None
        assert bucket is not None
        table = bucket.partitions
        for at, (p, seqno, key, value) in enumerate(all_rows([block])):
            given, epoch = int(table.newest_id[p]), int(table.epoch[p])
            if (p, given, seqno) in self.rows:
                raise Violation(f"seqno {seqno} of partition {p} was given twice under id {given}")
            owner = self._owners.setdefault(epoch, running().host)
            if owner != running().host and epoch > self.forced:
                raise Violation(f"{owner} and {running().host} are active in epoch {epoch}")
            write = producer, number, at
            self.rows[p, given, seqno] = Numbered(Row(seqno, key, value), write, epoch)

    def _logged(self, partition: int, log: FailoverLog) -> None:
        if partition in USED:
            pairs = tuple(log.to_pairs())
            known = self.logs.setdefault((partition, pairs[-1][0]), pairs)
            if known != pairs:
                raise Violation(f"partition {partition}: one id, two histories: {known}, {pairs}")

    def history(self, partition: int, newest: int, seqno: int, above: int = 0) -> list[Numbered]:
        """Return what a partition is made of above one seqno up to another, in the history of an id."""
        log = self.logs[partition, newest]
        found, at = [], len(log) - 1
        for one in range(seqno, above, -1):
            while at and log[at][1] >= one:
                at -= 1
            numbered = self.rows.get((partition, log[at][0], one))
            if numbered is None:
                raise Violation(f"nobody wrote seqno {one} of partition {partition}, {log}")
            found.append(numbered)
        return found[::-1]

    def state(self, partition: int, newest: int, seqno: int) -> State:
        """Return what a partition is at a seqno, in the history of an id."""
        # Most ask for the newest: from the state that was asked for last it is not far.
        at, known = self._states.get((partition, newest), (0, {}))
        if at > seqno:
            at, known = 0, {}
        rows = [one.row for one in self.history(partition, newest, seqno, at)]
        state = apply(dict(known), rows)
        self._states[partition, newest] = seqno, state
        return dict(state)

    def check_once(self, partition: int, newest: int, seqno: int) -> None:
        """Raise if a mutation of a write is there twice."""
        writes = Counter(one.write for one in self.history(partition, newest, seqno))
        for write, count in writes.items():
            if count > 1:
                raise Violation(f"partition {partition}: {write} was applied {count} times")
