"""The 1024 partitions of a bucket as columns: what changes with every write is a numpy array."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from upr.storage.blocks import put_ends, summary
from upr.storage.keyspace import PartitionRow
from upr_protocol.block import I64, U64, Runs, joined_runs
from upr_protocol.errors import (
    DataDamagedError,
    PartitionNotActiveError,
    TooFewReplicasError,
    UprError,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS, SEQNO_BITS

ACTIVE, REPLICA, PENDING, DEAD = 1, 2, 3, 4
DEAD_HINT = (
    "restore it from a backup, or 'upr-admin accept-loss' has it go on without what is missing"
)
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
        stored_complete, stored_horizon: uint64, what ``complete`` and ``horizon`` were there.
        purge: uint64, tombstones at or below may be gone.
        newest_id: uint64, the newest failover id.
        epoch, first_commit, served_epoch, since, known_high: uint64, see PartitionRow.
        owner: HOST:PORT of the server where they are active, as far as it is known; empty where they are active here.
        reasons: why a partition is in its state, in words; only where that needs an explanation.
    """

    def __init__(self) -> None:
        self.state = np.zeros(PARTITIONS, np.uint8)
        self.high, self.durable, self.stored, self.purge, self.newest_id = (
            np.zeros(PARTITIONS, np.uint64) for _ in range(5)
        )
        self.complete, self.horizon = (np.zeros(PARTITIONS, np.uint64) for _ in range(2))
        self.stored_complete, self.stored_horizon = (
            np.zeros(PARTITIONS, np.uint64) for _ in range(2)
        )
        self.epoch, self.first_commit, self.served_epoch, self.since, self.known_high = (
            np.zeros(PARTITIONS, np.uint64) for _ in range(5)
        )
        self.reasons: dict[int, str] = {}
        self.logs: list[FailoverLog] = []
        self.problems: dict[int, UprError] = {}
        self.owner = ""
        self._records: tuple[U64, U64] | None = None

    @classmethod
    def from_rows(cls, rows: Iterable[PartitionRow]) -> "Partitions":
        """Build from the 1024 stored rows in order; high, durable, complete and horizon are what is stored."""
        table = cls()
        for partition, row in enumerate(rows):
            table.state[partition] = row.state
            table.epoch[partition] = row.epoch
            table.purge[partition] = row.purge_seqno
            table.stored[partition] = row.stored_high
            table.first_commit[partition] = row.first_commit
            table.stored_complete[partition] = row.complete
            table.stored_horizon[partition] = row.horizon
            table.served_epoch[partition] = row.served_epoch
            table.since[partition] = row.since
            table.known_high[partition] = row.known_high
            if row.reason:
                table.reasons[partition] = row.reason
            if row.state == DEAD:
                words = row.reason or f"partition {partition} is dead"
                table.problems[partition] = DataDamagedError(words, hint=DEAD_HINT)
            table.newest_id[partition] = row.log.newest.failover_id
            table.logs.append(row.log)
        table.high[:] = table.stored
        table.durable[:] = table.stored
        table.complete[:] = table.stored_complete
        table.horizon[:] = table.stored_horizon
        return table

    def received(self, runs: Runs) -> None:
        """Record runs that continue their partitions, each partition at most once, complete or part of a stretch."""
        self.high[runs["partition"]] = runs["end_seqno"]
        note_markers(runs, self.complete, self.horizon)

    def row(self, partition: int) -> PartitionRow:
        return PartitionRow(
            int(self.state[partition]),
            int(self.epoch[partition]),
            int(self.purge[partition]),
            int(self.stored[partition]),
            int(self.first_commit[partition]),
            self.logs[partition],
            int(self.stored_complete[partition]),
            int(self.stored_horizon[partition]),
            int(self.served_epoch[partition]),
            self.reasons.get(partition, ""),
            int(self.since[partition]),
            int(self.known_high[partition]),
        )

    def set_log(self, partition: int, log: FailoverLog) -> None:
        self.logs[partition] = log
        self.newest_id[partition] = log.newest.failover_id
        self._records = None

    def epochs_at(self, seqnos: U64) -> U64:
        """Return the epoch under whose record each partition's row at a seqno was given, shape (1024,); 0 at 0."""
        if self._records is None:
            flat = [
                (partition << SEQNO_BITS | record.seqno, record.epoch)
                for partition, log in enumerate(self.logs)
                for record in log.records
            ]
            places, epochs = np.array(flat, np.uint64).T
            self._records = places, epochs
        places, epochs = self._records
        begins = np.arange(PARTITIONS, dtype=np.uint64) << np.uint64(SEQNO_BITS)
        # The newest record below the seqno, as FailoverLog.id_at has it; before the oldest one, that one.
        found = np.searchsorted(places, begins | seqnos) - 1
        found = np.maximum(found, np.searchsorted(places, begins))
        return np.where(seqnos > 0, epochs[found], np.uint64(0))

    def kill(self, partition: int, why: UprError) -> None:
        """Make a partition dead: it answers only GetFailoverLog and its state. The reason is part of its row."""
        self.state[partition] = DEAD
        self.problems[partition] = why
        self.reasons[partition] = why.message

    def revive(self, partition: int) -> None:
        self.state[partition] = ACTIVE
        self.epoch[partition] += 1
        self.since[partition] = self.known_high[partition] = 0
        self.problems.pop(partition, None)
        self.reasons.pop(partition, None)

    def serves(self, partition: int) -> bool:
        """Return whether streams may be opened."""
        return bool(self.state[partition] in (ACTIVE, REPLICA))

    def refusal(self, partition: int) -> UprError:
        """Return the error for writes to, and streams of, a partition that is not active."""
        if partition in self.problems:
            return self.problems[partition]
        state = STATE_NAMES[int(self.state[partition])]
        return PartitionNotActiveError(
            f"partition {partition} is {state} here",
            hint="ask the server where it is active",
            retriable=True,
            owner=self.owner,
        )


def note_markers(runs: Runs, complete: U64, horizon: U64) -> None:
    """Move the last complete markers and largest horizons, shape (1024,), by runs, each partition at most once."""
    partitions, ends = runs["partition"], runs["end_seqno"]
    horizons = np.maximum(horizon[partitions], runs["horizon"])
    horizon[partitions] = horizons
    # A marker below an earlier run's horizon is not complete: rows missing there lie above it.
    done = horizons == ends
    complete[partitions[done]] = ends[done]


class DurableMarkers:
    """The newest complete marker of each partition that is durable.

    Args:
        complete, horizon: each partition's last complete marker and largest horizon of all that is durable so far,
            shape (1024,).

    Attributes:
        seqno: the markers, uint64, shape (1024,).
    """

    def __init__(self, complete: U64, horizon: U64) -> None:
        self.seqno = complete.copy()
        self._horizon = horizon.copy()
        self._incomplete = bool((horizon > complete).any())

    def became_durable(self, tables: Sequence[Runs], durable: U64) -> None:
        """Take note of run tables that are durable from now on, in the order of their numbering.

        Args:
            durable: each partition's durable high seqno, which moves.
        """
        runs = joined_runs(tables)
        if not self._incomplete and summary(runs)[1]:
            put_ends(runs, durable, self.seqno, self._horizon)
            return
        put_ends(runs, durable)
        for table in tables:
            note_markers(table, self.seqno, self._horizon)
        self._incomplete = bool((self._horizon > self.seqno).any())


class Copies:
    """What counted replicas have on disk of a bucket that is active here, and what is stable by that.

    A seqno is stable(k) when it is at or below a complete marker that is durable here and at k counted replicas. Only
    what they acknowledged in this term counts: a replica may have undone since what it acknowledged to an older owner.

    Attributes:
        counted: directories of the replicas that count. Each server that could be promoted knows that they do.
        ready: those of them that are in step in this bucket, or about to be. Only what they acknowledge counts.
        term: rises whenever the bucket becomes active, or is active no more.
        connected: the number of open calls by directory, of registered replicas.
        fallen: directories of replicas that have less now than they acknowledged in this term.
    """

    def __init__(self, markers: DurableMarkers) -> None:
        self._markers = markers
        self.counted: frozenset[str] = frozenset()
        self.ready: frozenset[str] = frozenset()
        self.term = 0
        self.connected: Counter[str] = Counter()
        self.fallen: set[str] = set()
        self._acknowledged: dict[str, U64] = {}
        self._largest: dict[int, U64] = {}

    def begin_term(self) -> None:
        """Forget what was acknowledged, and count nobody: the bucket became active, or is active no more."""
        self.term += 1
        self.fallen.clear()
        self._acknowledged.clear()
        self.count(frozenset(), frozenset())

    def count(self, counted: frozenset[str], in_step: Collection[str]) -> bool:
        """Take over which replicas are counted; return whether that changed what is stable."""
        self.ready = counted.intersection(in_step)
        if counted == self.counted:
            return False
        self.counted = counted
        self._largest.clear()
        for directory in self._acknowledged.keys() - counted - self.connected.keys():
            del self._acknowledged[directory]
        return True

    def left(self, directory: str) -> None:
        self.connected[directory] -= 1
        if not self.connected[directory]:
            del self.connected[directory]
            if directory not in self.counted:
                self._acknowledged.pop(directory, None)

    def started(self, directory: str, partition: int, seqno: int) -> None:
        """Take note of where a replica begins: it may have undone what is above."""
        known = self._acknowledged.get(directory)
        if known is not None and known[partition] > seqno:
            known[partition] = seqno
            self.fallen.add(directory)
            self._largest.clear()

    def acknowledged(self, directory: str, partitions: I64, seqnos: U64) -> bool:
        """Take over markers that are durable at a replica; return whether they may make something stable."""
        known = self._acknowledged.get(directory)
        if known is None:
            known = self._acknowledged[directory] = np.zeros(PARTITIONS, np.uint64)
        known[partitions] = np.maximum(known[partitions], seqnos)
        if directory not in self.counted:
            return False
        self._largest.clear()
        return True

    def stable(self, copies: int) -> U64:
        """Return what is stable(k), shape (1024,); 0 where fewer replicas have acknowledged anything."""
        largest = self._largest.get(copies)
        if largest is None:
            told = [self._acknowledged[one] for one in self.counted if one in self._acknowledged]
            if len(told) < copies:
                largest = np.zeros(PARTITIONS, np.uint64)
            else:
                largest = np.sort(np.stack(told), axis=0)[-copies]
            self._largest[copies] = largest
        return np.minimum(self._markers.seqno, largest)

    def unknown(self, copies: int, partition: int) -> bool:
        """Return whether there is something in a partition, and fewer than so many replicas acknowledged any of it."""
        return bool(self._markers.seqno[partition]) and not self.stable(copies)[partition]

    def shortage(self, copies: int) -> TooFewReplicasError | None:
        """Return why a write is refused; None when so many counted replicas are in step, and connected."""
        there = sum(1 for directory in self.ready if directory in self.connected)
        if there >= copies:
            return None
        return TooFewReplicasError(
            f"counted replicas that are connected and in step are {there}; must be at least {copies}",
            hint="start replicas, also counted ones that are away: new ones count when those know of them;"
            " 'upr-admin topology' shows all, and 'upr-admin topology forget' takes out counted ones that will not"
            " come back",
        )
