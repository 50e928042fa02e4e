"""Recovery of a bucket at a start: stored rows and journalled commits become partitions and a tail.

Without the clean-shutdown proof, a crash may have lost rows that were only in memory and that a follower has seen. So
every active partition gets a new failover record at its last complete durable marker. Rows above that marker are
truncated: with them the partition would have a state that never was ("Partition Failover Record" of the
specification).

A record is added even where nothing durable was numbered under the newest one, and that one stays: a follower with
stability ``memory`` may hold rows of it that were lost, and others were told its id. Without it they would be rolled
back to 0 and not to its seqno.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upr.engine.partitions import ACTIVE, DEAD, DEAD_HINT, REPLICA, Partitions, note_markers
from upr.engine.producers import NewestNumbers
from upr.engine.tail import TailEntry
from upr.storage.blocks import Encoded, Head, last_complete
from upr.storage.compact import Chunk, FlushSlice, merge_slice
from upr.storage.journal import Commit
from upr.storage.keyspace import PartitionRow, ProducerNumbers
from upr_protocol.block import U64, Block, select_runs
from upr_protocol.errors import CorruptBlockError, DataDamagedError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import FAILOVER_LOG_RECORDS, PARTITIONS
from upr_protocol.wire.codec import encode_block, reopen_block


@dataclass(frozen=True, slots=True)
class Undo:
    """What a replica undoes in a partition, and the history that it takes over.

    Attributes:
        seqno: everything above the newest marker at or below it goes.
        log, epoch: of the upstream.
        lost: whether the upstream does not have what goes; otherwise it is only received anew.
    """

    seqno: int
    log: FailoverLog
    epoch: int
    lost: bool = True


@dataclass(slots=True)
class Recovered:
    """The outcome.

    Attributes:
        partitions: as they are now; ``high`` and ``durable`` do not count the entries yet.
        entries: the tail, oldest first; all of it is durable.
        next_commit: the number of the next journal commit.
        rows, blocks, producers: stored in one transaction with the proof, before anything is served.
        cut_off: by partition the seqno above which stored blocks are truncated in the same transaction.
        highs: where each partition ends now, with its entries, shape (1024,).
        aside: journal blocks of dead partitions behind the gap, by partition, commit and place in the commit. Store
            them before the rest.
        complete: each partition's last complete marker, of store and entries together.
        undone: the entries, and by partition the ends of the stored blocks, that a rollback removes and nobody else has.
        notes: findings and actions for the log, in words.
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
    undone: tuple[list[TailEntry], dict[int, list[int]]] = field(default_factory=lambda: ([], {}))
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
    replica: bool = False,
    undo: Mapping[int, Undo] | None = None,
    whole: U64 | None = None,
) -> Recovered:
    """Decide the state of a bucket after a start.

    Args:
        stored: each partition's row, or the error of reading it.
        heads: returns the heads of a partition's stored blocks; called where the partition's row is lost.
        commits: the journal, oldest first.
        proven: where each partition ends according to the clean-shutdown proof, shape (1024,); None without one. One
            that names less than there is counts as none.
        new_id: draws a random failover id.
        now: microseconds since the epoch, stored as the time at which a partition died.
        log_records: how many records a failover log keeps when one is added.
        replica: whether the server follows an upstream: what was active is a replica from now on, and gets no record.
        undo: by partition, what is undone; only with ``replica``.
        whole: markers that no stored block may cross, because all above them may be undone, shape (1024,); None for none.
    """
    rows, lost, unreadable = _rows(stored, heads, new_id)
    partitions = Partitions.from_rows(rows)
    demoted = np.flatnonzero(partitions.state == ACTIVE) if replica else np.zeros(0, np.int64)
    partitions.state[demoted] = REPLICA
    if proven is None:
        # What was numbered and not synced is lost: this server cannot tell that nothing is missing.
        partitions.served_epoch[demoted] = 0
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
        # Something was numbered since the proof was written, so the loss is unknown.
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
    # All their journal blocks are kept aside, so that none counts as a continuation of the store.
    partitions.first_commit[list(unreadable)] = next_commit
    died = (partitions.state == DEAD) & ~dead_before
    partitions.since[died] = now
    if proven is None:
        _add_records(result, tail.complete, tail.high, new_id, log_records)
    if undo:
        _undo(result, heads, undo, whole)
    changed = {*lost, *np.flatnonzero(died).tolist(), *demoted.tolist(), *(undo or ())}
    changed = set(range(PARTITIONS)) if proven is None else changed
    result.rows = {p: partitions.row(p) for p in sorted(changed)}
    return result


def _rows(
    stored: Mapping[int, PartitionRow | DataDamagedError],
    heads: Callable[[int], Sequence[Head]],
    new_id: Callable[[], int],
) -> tuple[list[PartitionRow], dict[int, DataDamagedError], dict[int, DataDamagedError]]:
    """Return all rows. A lost row becomes one with a new id at 0, never with an empty log.

    Also return the partitions with lost rows, and those of them whose blocks do not show where they end.
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
    """Treat a partition that ends below the proof as damaged: a crash did not tear its end, a disk lost it."""
    for partition in np.flatnonzero(high < proven).tolist():
        end, told = int(high[partition]), int(proven[partition])
        if partitions.state[partition] != DEAD:
            words = f"partition {partition}: it ends at seqno {end}, the clean-shutdown proof says {told}: {told - end} are missing"
            partitions.kill(partition, DataDamagedError(words, hint=DEAD_HINT))
        partitions.known_high[partition] = max(int(partitions.known_high[partition]), told)


class _Replay:
    """Replay of journalled commits into tail entries, without rows that are stored or void.

    Where the journal does not continue a partition, everything from there on is kept aside.

    Args:
        broken: partitions that no commit continues.
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
        self._time = 0

    def replay(self, commit: Commit) -> None:
        for place, entry in enumerate(commit.entries):
            try:
                # It was checked whole before it was journalled.
                block = reopen_block(entry.block)
            except CorruptBlockError as error:
                raise DataDamagedError(
                    f"journal commit {commit.number} holds a damaged block: {error.message}",
                    hint="restore the data directory from a replica or a backup",
                ) from error
            live = self._live(block, commit.number, place)
            if live.any():
                # Entries are searched by time; what a replica received may be older than what came before it.
                self._time = max(self._time, int(block.runs["time"][live].max()))
                whole = TailEntry(block.runs, entry.block, entry.writes, self._time, commit.number)
                self.entries.append(whole.only(live))
                runs = block.runs[live]
                self.high[runs["partition"]] = runs["end_seqno"]
                note_markers(runs, self.complete, self._horizon)

    def _live(self, block: Block, commit: int, place: int) -> npt.NDArray[np.bool_]:
        """Return which runs of a block continue their partitions."""
        runs = block.runs
        partitions = runs["partition"]
        live = (runs["end_seqno"] > self.high[partitions]) & (
            self._table.first_commit[partitions] <= commit
        )
        gap = live & (self._broken[partitions] | (runs["start_seqno"] != self.high[partitions]))
        if gap.any():
            self._put_aside(select_runs(block, gap), commit, place)
        continuing: npt.NDArray[np.bool_] = live & ~gap
        return continuing

    def _put_aside(self, block: Block, commit: int, place: int) -> None:
        """Keep journal blocks behind a gap or an overlap: they are no history to serve, but must not be lost."""
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


def _add_records(
    result: Recovered, complete: U64, high: U64, new_id: Callable[[], int], log_records: int
) -> None:
    """Give every active partition a new record, and truncate above it."""
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


def _undo(
    result: Recovered,
    heads: Callable[[int], Sequence[Head]],
    undo: Mapping[int, Undo],
    whole: U64 | None,
) -> None:
    """Truncate partitions above the newest marker at or below a seqno, and give them the upstream's log and epoch."""
    table, chosen = result.partitions, np.array(sorted(undo), np.intp)
    blocks = {p: heads(p) for p in undo}
    markers = _markers(result.entries, blocks, undo)
    result.complete[list(markers)] = list(markers.values())
    limit = np.full(PARTITIONS, np.iinfo(np.uint64).max, np.uint64)
    lost = [partition for partition, one in undo.items() if one.lost]
    # What the upstream has too, between the marker and its seqno, is only received anew.
    limit[lost] = [max(markers[partition], undo[partition].seqno) for partition in lost]
    entries = _above(result.entries, limit)
    stored = {p: [head.end for head in blocks[p] if head.end > limit[p]] for p in lost}
    result.undone = entries, {p: ends for p, ends in stored.items() if ends}
    _cut_off(result, result.complete, chosen, whole)
    for partition, one in undo.items():
        table.set_log(partition, one.log)
        table.epoch[partition] = one.epoch
        table.state[partition] = REPLICA
        # No tombstone is missing from the rows that went; a consumer in between rolls back to 0.
        table.purge[partition] = min(int(table.purge[partition]), markers[partition])


def _markers(
    entries: Iterable[TailEntry],
    blocks: Mapping[int, Sequence[Head]],
    undo: Mapping[int, Undo],
) -> dict[int, int]:
    """Return the newest complete marker of each partition at or below the seqno that is undone to."""
    found = dict.fromkeys(undo, 0)
    horizons = dict.fromkeys(undo, 0)

    def passed(partition: int, end: int, horizon: int) -> None:
        horizons[partition] = max(horizons[partition], horizon)
        if horizons[partition] == end <= undo[partition].seqno:
            found[partition] = end

    for partition, own in blocks.items():
        for head in own:
            passed(partition, head.end, head.horizon)
    for entry in entries:
        columns = [entry.runs[name].tolist() for name in ("partition", "end_seqno", "horizon")]
        for partition, end, horizon in zip(*columns, strict=True):
            if partition in undo:
                passed(partition, end, horizon)
    return found


def accept_loss(
    result: Recovered,
    ends: Mapping[int, tuple[int, int]],
    new_id: Callable[[], int],
    log_records: int = FAILOVER_LOG_RECORDS,
) -> None:
    """Make dead partitions active again, each with a new record at its last complete marker before the gap.

    Rows above are truncated in the transaction that stores the outcome.

    Args:
        ends: by partition, the end of its gapless stored blocks from 0, and their last complete marker.
    """
    table, complete = result.partitions, result.complete
    limit = np.full(PARTITIONS, np.iinfo(np.uint64).max, np.uint64)
    for partition, (end, marker) in ends.items():
        assert table.state[partition] == DEAD, f"partition {partition} is not dead"
        if end != table.stored[partition]:
            # The journal continues from another seqno than the store's end.
            complete[partition], limit[partition] = marker, 0
        at = int(complete[partition])
        table.revive(partition)
        # No tombstone is missing from the truncated rows; a consumer in between rolls back to 0.
        table.purge[partition] = min(int(table.purge[partition]), at)
        epoch = int(table.epoch[partition])
        log = table.logs[partition].with_record(new_id(), at, log_records, epoch=epoch)
        table.set_log(partition, log)
    result.entries = list(_up_to(result.entries, limit))
    chosen = np.array(sorted(ends), np.intp)
    _cut_off(result, complete, chosen)
    result.cut_off |= {p: int(complete[p]) for p in ends}
    result.rows |= {p: table.row(p) for p in ends}


def _cut_off(
    result: Recovered, complete: U64, above: npt.NDArray[np.intp], whole: U64 | None = None
) -> None:
    """Truncate partitions above their last complete marker; no block of what remains crosses ``whole``.

    The journal still has these rows. So the remaining rows must be stored at once, and the commits so far must not
    count for these partitions; otherwise the next start would restore the truncated rows.
    """
    table = result.partitions
    limit = np.full(PARTITIONS, 0, np.uint64)
    limit[above] = complete[above]
    stored = table.stored.copy()
    for part in (limit if whole is None else np.minimum(limit, whole), limit):
        staying = _above(_up_to(result.entries, part), stored)
        if staying:
            chunks = [Chunk([Encoded(entry.runs, entry.data) for entry in staying])]
            merged = merge_slice(chunks, FlushSlice(0, PARTITIONS, 0, 1), stored)
            stored[list(merged.ends)] = list(merged.ends.values())
            result.blocks = [*result.blocks, *merged.blocks]
            # The journal no longer counts for these partitions, so their producers' numbers must be stored as well.
            numbers = NewestNumbers(staying, table.logs)
            result.producers += numbers.of(0, PARTITIONS, merged.ends).items()
    # If the stored blocks end inside a stretch, truncate above its beginning.
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
        if keep.any():
            yield entry.only(keep)


def _above(entries: Iterable[TailEntry], limit: U64) -> list[TailEntry]:
    """Return what ``_up_to`` leaves out."""
    return [
        entry.only(keep)
        for entry in entries
        if (keep := entry.runs["end_seqno"] > limit[entry.runs["partition"]]).any()
    ]
