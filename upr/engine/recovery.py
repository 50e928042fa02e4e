"""What a bucket is after a start: stored rows and journalled commits become partitions and a tail.

A start without the clean-shutdown proof may have lost what was only in memory, and somebody may have seen it.
So every active partition gets a new failover record, at its last complete durable marker, and what lies above
that marker is cut off: kept, it would be a state that never was ("Partition Failover Record" of the
specification).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from upr.engine.partitions import ACTIVE, DEAD, Partitions
from upr.engine.tail import TailEntry
from upr.storage.journal import Commit
from upr.storage.keyspace import PartitionRow
from upr.storage.merge import Encoded, FlushSlice, make_chunk, merge_slice
from upr_protocol.block import U64, Block, cut_runs
from upr_protocol.errors import CorruptBlockError, DataDamagedError, InvalidArgumentError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.codec import decode_block, encode_block


@dataclass(slots=True)
class Recovered:
    """The outcome.

    Attributes:
        partitions: as they are now; ``high`` and ``durable`` do not count the entries yet.
        entries: the tail, oldest first; all of it is durable.
        next_commit: the number of the next journal commit.
        rows, blocks: what must be stored, together with the proof, before anything is served.
        notes: what was found and done, in words.
    """

    partitions: Partitions
    entries: list[TailEntry]
    next_commit: int
    rows: dict[int, PartitionRow] = field(default_factory=dict)
    blocks: list[tuple[int, int, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def recover(
    stored: Mapping[int, PartitionRow | DataDamagedError],
    newest_block_end: Callable[[int], int],
    commits: Iterable[Commit],
    *,
    proven: bool,
    new_id: Callable[[], int],
) -> Recovered:
    """Decide what a bucket is after a start.

    Args:
        stored: each partition's row, or why it cannot be read.
        newest_block_end: asked for partitions whose row is lost.
        commits: the journal, oldest first.
        proven: whether the clean-shutdown proof was there.
        new_id: draws a random failover id.
    """
    rows, lost = _rows(stored, newest_block_end, new_id)
    partitions = Partitions.from_rows(rows)
    tail = _Replay(partitions)
    last_commit = 0
    for commit in commits:
        last_commit = commit.number
        tail.replay(commit)
    notes = [
        f"partition {p}: {why.message}; it goes on under a new failover id"
        for p, why in lost.items()
    ]
    notes += [problem.message for problem in partitions.problems.values()]
    next_commit = max(last_commit, int(partitions.first_commit.max()) - 1) + 1
    result = Recovered(partitions, tail.entries, next_commit, notes=notes)
    if not proven:
        _add_records(result, tail.complete, tail.high, new_id)
    changed = set(lost) if proven else set(range(PARTITIONS))
    result.rows = {p: partitions.row(p) for p in sorted(changed)}
    return result


def _rows(
    stored: Mapping[int, PartitionRow | DataDamagedError],
    newest_block_end: Callable[[int], int],
    new_id: Callable[[], int],
) -> tuple[list[PartitionRow], dict[int, DataDamagedError]]:
    """Return all rows, those that are lost replaced: a new id at 0, never an empty log."""
    rows: list[PartitionRow] = []
    lost: dict[int, DataDamagedError] = {}
    for partition in range(PARTITIONS):
        row = stored[partition]
        if isinstance(row, DataDamagedError):
            lost[partition] = row
            row = PartitionRow(
                ACTIVE, 1, 0, newest_block_end(partition), 0, FailoverLog.born(new_id())
            )
        rows.append(row)
    return rows, lost


class _Replay:
    """Journalled commits into tail entries, leaving out what is stored or does not count."""

    def __init__(self, partitions: Partitions) -> None:
        self._table = partitions
        self.entries: list[TailEntry] = []
        self.high: U64 = partitions.stored.copy()
        self.complete: U64 = partitions.stored.copy()
        self._horizon: U64 = partitions.stored.copy()

    def replay(self, commit: Commit) -> None:
        for entry in commit.entries:
            try:
                block = decode_block(entry.block)
            except (CorruptBlockError, InvalidArgumentError) as error:
                raise DataDamagedError(
                    f"journal commit {commit.number} holds a damaged block: {error.message}",
                    hint="restore the data directory from a replica or a backup",
                ) from error
            kept = self._keep(block, commit.number)
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
                        whole=kept is block,
                    )
                )

    def _keep(self, block: Block, commit: int) -> Block | None:
        runs = block.runs
        partitions = runs["partition"]
        live = (
            (runs["end_seqno"] > self.high[partitions])
            & (self._table.first_commit[partitions] <= commit)
            & (self._table.state[partitions] != DEAD)
        )
        gap = live & (runs["start_seqno"] != self.high[partitions])
        for partition, start in zip(
            partitions[gap].tolist(), runs["start_seqno"][gap].tolist(), strict=True
        ):
            # Neither a gap nor an overlap may be served as if it were a history.
            why = DataDamagedError(
                f"partition {partition}: the journal goes on at seqno {start}, the store ends at {self.high[partition]}",
                hint="restore the partition from a replica or a backup",
            )
            self._table.kill(partition, why)
        live &= ~gap
        if not live.any():
            return None
        kept = cut_runs(block, live)
        self._note(kept)
        return kept

    def _note(self, block: Block) -> None:
        runs = block.runs
        partitions = runs["partition"]
        self.high[partitions] = runs["end_seqno"]
        self._horizon[partitions] = np.maximum(self._horizon[partitions], runs["horizon"])
        # A marker below an earlier run's horizon is not complete: rows missing there lie above it.
        done = self._horizon[partitions] == runs["end_seqno"]
        self.complete[partitions[done]] = runs["end_seqno"][done]


def _add_records(result: Recovered, complete: U64, high: U64, new_id: Callable[[], int]) -> None:
    """Give every active partition a new record, and cut off what lies above it."""
    table = result.partitions
    active = np.flatnonzero(table.state == ACTIVE)
    for partition in active.tolist():
        log = table.logs[partition].with_record(new_id(), int(complete[partition]))
        table.set_log(partition, log)
    above = active[high[active] > complete[active]]
    if len(above):
        _cut_off(result, complete, above)
    result.notes.append(
        f"no proof of a clean shutdown: new failover records in {len(active)} partitions"
    )


def _cut_off(result: Recovered, complete: U64, above: npt.NDArray[np.intp]) -> None:
    """Drop what partitions hold above their last complete marker.

    The journal still has it, so what stays must be stored at once, and the commits so far must not count for
    these partitions any more: otherwise the next start would bring the dropped rows back.
    """
    table = result.partitions
    limit = np.full(PARTITIONS, 0, np.uint64)
    limit[above] = complete[above]
    staying = [Encoded(entry.runs, entry.data) for entry in _up_to(result.entries, limit)]
    if staying:
        chunks = [make_chunk(staying)]
        merged = merge_slice(chunks, FlushSlice(0, PARTITIONS, 0, 1), table.stored)
        result.blocks = merged.blocks
    table.stored[above] = complete[above]
    table.complete[above] = complete[above]
    table.horizon[above] = complete[above]
    table.high[above] = complete[above]
    table.durable[above] = complete[above]
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
            block = cut_runs(entry.block(), keep)
            yield replace(entry, runs=block.runs, data=encode_block(block), whole=False)
