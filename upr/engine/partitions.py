"""The 1024 partitions of a bucket as columns: what changes with every write is a numpy array."""

from collections.abc import Iterable

import numpy as np

from upr.storage.keyspace import PartitionRow
from upr_protocol.block import Runs
from upr_protocol.errors import PartitionNotActiveError, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS

ACTIVE, REPLICA, PENDING, DEAD = 1, 2, 3, 4
STATE_NAMES = {ACTIVE: "active", REPLICA: "replica", PENDING: "pending", DEAD: "dead"}


class Partitions:
    """State, seqnos and logs of all partitions.

    Attributes, each of shape (1024,):
        state: uint8, one of ACTIVE, REPLICA, PENDING, DEAD.
        high: uint64, the newest seqno given.
        durable: uint64, the highest seqno that is on disk.
        complete: uint64, the last complete marker: the high seqno, unless the newest runs are part of a stretch.
        horizon: uint64, the largest horizon received; where it is above ``high`` a stretch is incomplete.
        stored: uint64, the end of the newest stored block; the tail is exactly what lies above.
        purge: uint64, tombstones at or below may be gone.
        newest_id: uint64, the newest failover id.
        epoch, first_commit: uint64, see PartitionRow.
    """

    def __init__(self) -> None:
        self.state = np.zeros(PARTITIONS, np.uint8)
        self.high, self.durable, self.stored, self.purge, self.newest_id = (
            np.zeros(PARTITIONS, np.uint64) for _ in range(5)
        )
        self.complete, self.horizon = (np.zeros(PARTITIONS, np.uint64) for _ in range(2))
        self.epoch, self.first_commit = (np.zeros(PARTITIONS, np.uint64) for _ in range(2))
        self.logs: list[FailoverLog] = []
        self.problems: dict[int, UprError] = {}

    @classmethod
    def from_rows(cls, rows: Iterable[PartitionRow]) -> "Partitions":
        """Build from the 1024 stored rows in order; high, durable and complete are what is stored."""
        table = cls()
        for partition, row in enumerate(rows):
            table.state[partition] = row.state
            table.epoch[partition] = row.epoch
            table.purge[partition] = row.purge_seqno
            table.stored[partition] = row.stored_high
            table.first_commit[partition] = row.first_commit
            table.newest_id[partition] = row.log.newest.failover_id
            table.logs.append(row.log)
        table.high[:] = table.stored
        table.durable[:] = table.stored
        table.complete[:] = table.stored
        table.horizon[:] = table.stored
        return table

    def received(self, runs: Runs) -> None:
        """Take note of runs that continue their partitions, each partition at most once, whole or part of a stretch."""
        partitions, ends = runs["partition"], runs["end_seqno"]
        self.high[partitions] = ends
        self.horizon[partitions] = np.maximum(self.horizon[partitions], runs["horizon"])
        done = self.horizon[partitions] == ends
        self.complete[partitions[done]] = ends[done]

    def row(self, partition: int, stored_high: int | None = None) -> PartitionRow:
        """Return what is to be stored of a partition, with another stored high if one is given."""
        return PartitionRow(
            int(self.state[partition]),
            int(self.epoch[partition]),
            int(self.purge[partition]),
            int(self.stored[partition]) if stored_high is None else stored_high,
            int(self.first_commit[partition]),
            self.logs[partition],
        )

    def set_log(self, partition: int, log: FailoverLog) -> None:
        """Replace a partition's failover log."""
        self.logs[partition] = log
        self.newest_id[partition] = log.newest.failover_id

    def kill(self, partition: int, why: UprError) -> None:
        """Make a partition dead: it answers only GetFailoverLog and its state."""
        self.state[partition] = DEAD
        self.problems[partition] = why

    def serves(self, partition: int) -> bool:
        """Whether streams may be opened."""
        return bool(self.state[partition] in (ACTIVE, REPLICA))

    def refusal(self, partition: int) -> UprError:
        """Return why a partition takes no writes or serves no streams."""
        if partition in self.problems:
            return self.problems[partition]
        state = STATE_NAMES[int(self.state[partition])]
        return PartitionNotActiveError(
            f"partition {partition} is {state} here", hint="ask the server where it is active"
        )
