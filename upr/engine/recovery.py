"""Recovery of a bucket at a start: stored rows and journalled commits become partitions and a tail.

A start without the clean-shutdown proof may have lost what was only in memory, and somebody may have seen it.
So every active partition gets a new failover record, at its last complete durable marker, and what lies above
that marker is cut off: kept, it would be a state that never was ("Partition Failover Record" of the
specification).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from upr.engine.partitions import ACTIVE, DEAD, DEAD_HINT, Partitions
from upr.engine.producers import NewestNumbers
from upr.engine.tail import TailEntry
from upr.storage.blocks import Encoded, Head, last_complete
from upr.storage.compact import FlushSlice, make_chunk, merge_slice
from upr.storage.journal import Commit
from upr.storage.keyspace import PartitionRow, ProducerNumbers
from upr_protocol.block import U64, Block, select_runs
from upr_protocol.errors import CorruptBlockError, DataDamagedError, InvalidArgumentError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import FAILOVER_LOG_RECORDS, PARTITIONS
from upr_protocol.wire.codec import decode_block, encode_block


@dataclass(slots=True)
class Recovered:
    """The outcome.

    Attributes:
        partitions: as they are now; ``high`` and ``durable`` do not count the entries yet.
        entries: the tail, oldest first; all of it is durable.
        next_commit: the number of the next journal commit.
        rows, blocks, producers: what must be stored, together with the proof, before anything is served.
        cut_off: by partition the seqno above which stored blocks go in the same transaction.
        highs: where each partition ends now, with its entries, shape (1024,).
        aside: what the journal holds of dead partitions behind the place where it does not continue them, by
            partition, commit and place in there. It must be kept before the rest is stored.
        complete: each partition's last complete marker, of store and entries together.
        notes: what was found and done, in words.
    """

    partitions: Partitions
    entries: list[TailEntry]
    next_commit: int
    highs: U64
    rows: dict[int, PartitionRow] = field(default_factory=dict)
    blocks: list[tuple[int, int, bytes]] = field(default_factory=list)
    cut_off: dict[int, int] = field(default_factory=dict)
    producers: list[tuple[bytes, ProducerNumbers]] = field(default_factory=list)
    aside: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    complete: U64 = field(default_factory=lambda: np.zeros(PARTITIONS, np.uint64))
    notes: list[str] = field(default_factory=list)


def recover(
    stored: Mapping[int, PartitionRow | DataDamagedError],
    heads: Callable[[int], Sequence[Head]],
    commits: Iterable[Commit],
    *,
    proven: U64 | None,
    new_id: Callable[[], int],
    now: int = 0,
    log_records: int = FAILOVER_LOG_RECORDS,
) -> Recovered:
    """Decide what a bucket is after a start.

    Args:
        stored: each partition's row, or why it cannot be read.
        heads: what the stored blocks of a partition say, asked where the partition's row is lost.
        commits: the journal, oldest first.
        proven: where each partition ends according to the clean-shutdown proof, shape (1024,); None without one. One
            that names less than there is counts as none.
        new_id: draws a random failover id.
        now: microseconds since the epoch: when a partition died of which that is found now.
        log_records: how many records a failover log keeps when one is added.
    """
    rows, lost, unreadable = _rows(stored, heads, new_id)
    partitions = Partitions.from_rows(rows)
    dead_before = partitions.state == DEAD
    for partition, error in unreadable.items():
        partitions.kill(partition, error)
    tail = _Replay(partitions, unreadable)
    last_commit = 0
    for commit in commits:
        last_commit = commit.number
        tail.replay(commit)
    contradicted = proven is not None and bool((tail.high > proven).any())
    if contradicted:
        # Something was numbered since it was written: of what may be lost of that nothing is known.
        proven = None
    if proven is not None:
        _check_proven(partitions, tail.high, proven)
    notes = ["the proof of a clean shutdown is contradicted: there is more"] if contradicted else []
    notes += [
        f"partition {p}: {why.message}; it goes on under a new failover id"
        for p, why in lost.items()
        if p not in unreadable
    ]
    notes += [problem.message for problem in partitions.problems.values()]
    next_commit = max(last_commit, int(partitions.first_commit.max()) - 1) + 1
    result = Recovered(
        partitions,
        tail.entries,
        next_commit,
        tail.high,
        aside=tail.aside,
        complete=tail.complete,
        notes=notes,
    )
    # All that the journal has of them is kept aside, so none of it is to be taken for what goes on where they end.
    partitions.first_commit[list(unreadable)] = next_commit
    died = (partitions.state == DEAD) & ~dead_before
    partitions.since[died] = now
    if proven is None:
        _add_records(result, tail.complete, tail.high, new_id, log_records)
    changed = set(range(PARTITIONS)) if proven is None else {*lost, *np.flatnonzero(died).tolist()}
    result.rows = {p: partitions.row(p) for p in sorted(changed)}
    return result


def _rows(
    stored: Mapping[int, PartitionRow | DataDamagedError],
    heads: Callable[[int], Sequence[Head]],
    new_id: Callable[[], int],
) -> tuple[list[PartitionRow], dict[int, DataDamagedError], dict[int, DataDamagedError]]:
    """Return all rows, those that are lost replaced: a new id at 0, never an empty log.

    Returns also which rows are lost, and of which of these partitions the blocks do not tell where they end.
    """
    rows: list[PartitionRow] = []
    lost: dict[int, DataDamagedError] = {}
    unreadable: dict[int, DataDamagedError] = {}
    for partition in range(PARTITIONS):
        row = stored[partition]
        if isinstance(row, DataDamagedError):
            lost[partition] = row
            blocks: Sequence[Head] = ()
            try:
                blocks = heads(partition)
            except DataDamagedError as error:
                unreadable[partition] = error
            high = blocks[-1].end if blocks else 0
            horizon = max((head.horizon for head in blocks), default=0)
            log = FailoverLog.born(new_id(), epoch=1)
            row = PartitionRow(ACTIVE, 1, 0, high, 0, log, last_complete(blocks), horizon)
        rows.append(row)
    return rows, lost, unreadable


def _check_proven(partitions: Partitions, high: U64, proven: U64) -> None:
    """Take what ends below the proof for damaged: an end that is missing was not torn, it is lost."""
    for partition in np.flatnonzero(high < proven).tolist():
        end, told = int(high[partition]), int(proven[partition])
        if partitions.state[partition] != DEAD:
            words = f"partition {partition}: it ends at seqno {end}, the clean-shutdown proof says {told}: {told - end} are missing"
            partitions.kill(partition, DataDamagedError(words, hint=DEAD_HINT))
        partitions.known_high[partition] = max(int(partitions.known_high[partition]), told)


class _Replay:
    """Journalled commits into tail entries, leaving out what is stored or does not count.

    Of a partition that the journal does not continue, everything from there on is kept aside.

    Args:
        broken: partitions of which nothing goes on where the store ends.
    """

    def __init__(self, partitions: Partitions, broken: Iterable[int]) -> None:
        self._table = partitions
        self.entries: list[TailEntry] = []
        self.aside: dict[tuple[int, int, int], bytes] = {}
        self._broken = np.zeros(PARTITIONS, bool)
        self._broken[list(broken)] = True
        self.high: U64 = partitions.stored.copy()
        self.complete: U64 = partitions.complete.copy()
        self._horizon: U64 = partitions.horizon.copy()

    def replay(self, commit: Commit) -> None:
        for place, entry in enumerate(commit.entries):
            try:
                block = decode_block(entry.block)
            except (CorruptBlockError, InvalidArgumentError) as error:
                raise DataDamagedError(
                    f"journal commit {commit.number} holds a damaged block: {error.message}",
                    hint="restore the data directory from a replica or a backup",
                ) from error
            kept = self._keep(block, commit.number, place)
            if kept is not None:
                data = entry.block if kept is block else encode_block(kept)
                time = int(kept.runs["time"].max())
                self.entries.append(
                    TailEntry(
                        kept.runs,
                        data,
                        entry.producer,
                        entry.number,
                        time,
                        commit.number,
                    )
                )

    def _keep(self, block: Block, commit: int, place: int) -> Block | None:
        runs = block.runs
        partitions = runs["partition"]
        live = (runs["end_seqno"] > self.high[partitions]) & (
            self._table.first_commit[partitions] <= commit
        )
        gap = live & (self._broken[partitions] | (runs["start_seqno"] != self.high[partitions]))
        if gap.any():
            self._put_aside(select_runs(block, gap), commit, place)
        live &= ~gap
        if not live.any():
            return None
        kept = select_runs(block, live)
        self._note(kept)
        return kept

    def _put_aside(self, block: Block, commit: int, place: int) -> None:
        """Neither a gap nor an overlap may be served as if it were a history; and nothing of it may be lost."""
        partitions, table = block.runs["partition"], self._table
        for partition in np.unique(partitions).tolist():
            own = partitions == partition
            start, end = (int(block.runs[name][own][-1]) for name in ("start_seqno", "end_seqno"))
            if table.state[partition] != DEAD:
                words = f"partition {partition}: the journal goes on at seqno {start}, the store ends at {self.high[partition]}"
                table.kill(partition, DataDamagedError(words, hint=DEAD_HINT))
            table.known_high[partition] = max(int(table.known_high[partition]), end)
            self._broken[partition] = True
            self.aside[partition, commit, place] = encode_block(select_runs(block, own))

    def _note(self, block: Block) -> None:
        runs = block.runs
        partitions = runs["partition"]
        self.high[partitions] = runs["end_seqno"]
        self._horizon[partitions] = np.maximum(self._horizon[partitions], runs["horizon"])
        # A marker below an earlier run's horizon is not complete: rows missing there lie above it.
        done = self._horizon[partitions] == runs["end_seqno"]
        self.complete[partitions[done]] = runs["end_seqno"][done]


def _add_records(
    result: Recovered, complete: U64, high: U64, new_id: Callable[[], int], log_records: int
) -> None:
    """Give every active partition a new record, and cut off what lies above it."""
    table = result.partitions
    active = np.flatnonzero(table.state == ACTIVE)
    for partition in active.tolist():
        log = table.logs[partition].with_record(
            new_id(), int(complete[partition]), log_records, epoch=int(table.epoch[partition])
        )
        table.set_log(partition, log)
    above = active[high[active] > complete[active]]
    if len(above):
        _cut_off(result, complete, above)
    result.notes.append(
        f"no proof of a clean shutdown: new failover records in {len(active)} partitions"
    )


def accept_loss(
    result: Recovered,
    ends: Mapping[int, tuple[int, int]],
    new_id: Callable[[], int],
    log_records: int = FAILOVER_LOG_RECORDS,
) -> None:
    """Make dead partitions active again, each with a new record at the last complete marker of what is whole.

    What lies above is cut off, in the transaction that stores the outcome.

    Args:
        ends: by partition, where its stored blocks end that follow each other from 0, and their last complete marker.
    """
    table, complete = result.partitions, result.complete
    limit = np.full(PARTITIONS, np.iinfo(np.uint64).max, np.uint64)
    for partition, (end, marker) in ends.items():
        assert table.state[partition] == DEAD, f"partition {partition} is not dead"
        if end != table.stored[partition]:
            # What the journal has goes on where the store does not end.
            complete[partition], limit[partition] = marker, 0
        at = int(complete[partition])
        table.revive(partition)
        # Of what is cut off no tombstone is missing; a consumer in between rolls back to 0.
        table.purge[partition] = min(int(table.purge[partition]), at)
        epoch = int(table.epoch[partition])
        log = table.logs[partition].with_record(new_id(), at, log_records, epoch=epoch)
        table.set_log(partition, log)
    result.entries = list(_up_to(result.entries, limit))
    chosen = np.array(sorted(ends), np.intp)
    _cut_off(result, complete, chosen)
    result.cut_off |= {p: int(complete[p]) for p in ends}
    result.rows |= {p: table.row(p) for p in ends}


def _cut_off(result: Recovered, complete: U64, above: npt.NDArray[np.intp]) -> None:
    """Drop what partitions hold above their last complete marker.

    The journal still has it, so what stays must be stored at once, and the commits so far must not count for
    these partitions any more: otherwise the next start would bring the dropped rows back.
    """
    table = result.partitions
    limit = np.full(PARTITIONS, 0, np.uint64)
    limit[above] = complete[above]
    staying = list(_up_to(result.entries, limit))
    if staying:
        chunks = [make_chunk([Encoded(entry.runs, entry.data) for entry in staying])]
        merged = merge_slice(chunks, FlushSlice(0, PARTITIONS, 0, 1), table.stored)
        result.blocks = [*result.blocks, *merged.blocks]
        # The journal's entries do not count for these partitions any more: their numbers must be stored as well.
        numbers = NewestNumbers(staying, table.logs)
        result.producers += numbers.of(0, PARTITIONS, merged.ends).items()
    # Where the stored blocks end in a stretch, they go above its beginning.
    result.cut_off |= {p: int(complete[p]) for p in above.tolist() if table.stored[p] > complete[p]}
    for column in (
        table.stored,
        table.stored_complete,
        table.stored_horizon,
        table.complete,
        table.horizon,
        table.high,
        table.durable,
        result.highs,
    ):
        column[above] = complete[above]
    table.first_commit[above] = result.next_commit
    limit[:] = np.iinfo(np.uint64).max
    limit[above] = 0
    result.entries = list(_up_to(result.entries, limit))


def _up_to(entries: Iterable[TailEntry], limit: U64) -> Iterable[TailEntry]:
    """Yield the entries without the runs that end above their partition's limit, shape (1024,)."""
    for entry in entries:
        keep = entry.runs["end_seqno"] <= limit[entry.runs["partition"]]
        if keep.all():
            yield entry
        elif keep.any():
            block = select_runs(entry.block(), keep)
            yield replace(entry, runs=block.runs, data=encode_block(block))
