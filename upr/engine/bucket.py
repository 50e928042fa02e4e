"""One bucket: numbering, committing, flushing, and the followers to be woken.

Everything here runs to completion in one thread. What must be done to the disk is handed out as a value (a
Commit, a FlushPlan) and reported back when it is done; between the two the bucket goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from upr.engine.beginnings import DurableMarkers
from upr.engine.consumers import Consumers
from upr.engine.cuts import Cut, Cuts
from upr.engine.flush import FlushPlan
from upr.engine.owners import Owners
from upr.engine.partitions import ACTIVE, Partitions
from upr.engine.producers import Producer
from upr.engine.tail import Tail, TailEntry
from upr.storage.journal import Commit
from upr.storage.keyspace import PartitionRow, ProducerRow
from upr.storage.merge import Merged
from upr.storage.store import Identity
from upr_protocol.block import U64, Block, Runs, cut_runs
from upr_protocol.errors import (
    InvalidArgumentError,
    OutOfOrderError,
    SeqnoExhaustedError,
    StorageFailedError,
    TooManyError,
    UprError,
)
from upr_protocol.limits import PARTITIONS, SEQNO_MAX
from upr_protocol.wire.codec import encode_block

if TYPE_CHECKING:
    from upr.engine.follower import Follower

COMMIT_BYTES = 32 * 2**20
"""A commit takes no more than this, so that one fsync stays bounded."""
FLUSH_BYTES = 24 * 2**20
"""A flush takes no more than this at a time: while it works it holds the rows once more."""
PRODUCERS_IN_MEMORY = 256


@dataclass(slots=True)
class Written:
    """The outcome of a Write.

    Attributes:
        runs: what was applied, with the seqnos given.
        failover_ids: uint64, one a run.
        entry: durable when the tail's ``durable`` is above it; -1: durable already.
        duplicate: the number had been applied before.
        refused: why partitions did not take their part.
    """

    runs: Runs
    failover_ids: U64
    entry: int
    duplicate: bool
    refused: dict[int, UprError]


class Bucket:
    """The state of one bucket.

    Args:
        identity: name and version.
        partitions: as recovered.
        next_commit: the number of the next journal commit.
        proven: whether the clean-shutdown proof is on disk; nothing may be numbered while it is.
    """

    def __init__(
        self, identity: Identity, partitions: Partitions, next_commit: int, proven: bool
    ) -> None:
        self.identity = identity
        self.partitions = partitions
        self.tail = Tail()
        self.markers = DurableMarkers(partitions.stored)
        self.proven = proven
        self.failure: StorageFailedError | None = None
        self.followers: set[Follower] = set()
        self.consumers: dict[str, Follower] = {}
        self.consumer_positions = Consumers()
        self.owners = Owners()
        self.cuts = Cuts()
        self._producers: dict[bytes, Producer] = {}
        self._next_commit = next_commit
        self._flush_end: int | None = None
        self.purging: U64 = np.zeros(PARTITIONS, np.uint64)
        """The purge seqno that is being stored, 0 where none is: see ``purging``."""
        self.purge_raises = 0
        """How often purge seqnos were raised, so that followers see at a glance whether to look."""

    # Writing

    def open_producer(self, name: bytes, rows: Mapping[int, ProducerRow] | None) -> Producer:
        """Register a Write call of a producer; ``rows`` is what the store knows, None if it was not asked.

        Raises:
            TooManyError: more producers write at once than can be remembered.
        """
        producer = self._producers.get(name)
        if producer is None:
            self._evict_producers()
            producer = self._producers[name] = Producer()
        if rows is not None:
            producer.load(rows)
        producer.calls += 1
        return producer

    def knows_producer(self, name: bytes) -> bool:
        """Whether the store need not be asked about a producer."""
        producer = self._producers.get(name)
        return producer is not None and producer.loaded

    def _evict_producers(self) -> None:
        if len(self._producers) < PRODUCERS_IN_MEMORY:
            return
        for name, producer in list(self._producers.items()):
            if not producer.calls and producer.last_entry < self.tail.first:
                del self._producers[name]
                return
        raise TooManyError(
            f"{len(self._producers)} producers are writing, the limit is {PRODUCERS_IN_MEMORY}",
            hint="write through fewer clients, or without a producer name",
        )

    def write(
        self, block: Block, producer_name: bytes, producer: Producer | None, number: int, now: int
    ) -> Written:
        """Number a checked, unnumbered block and put it into the tail.

        Args:
            producer: from ``open_producer``; None writes without protection against repetition.
            number: the Write's number, from 1; 0 without a producer.
            now: microseconds since the epoch.

        Raises:
            StorageFailedError: the journal failed; nothing is numbered any more.
            PartitionNotActiveError, SeqnoExhaustedError: no partition of the block could take its part.
        """
        if producer is not None:
            answer = producer.known(number, block.runs)
            if answer is not None:
                return Written(answer.runs, self._ids(answer.runs), answer.entry, True, {})
        if self.failure is not None:
            # Raised again and again it would gather the frames, with their blocks, of everybody who wrote.
            raise self.failure.with_traceback(None)
        assert not self.proven, "the clean-shutdown proof must be gone before anything is numbered"
        block, refused = self._admit(block, producer, number)
        table = self.partitions
        partitions = block.runs["partition"]
        runs = block.runs.copy()
        runs["start_seqno"] = table.high[partitions]
        runs["end_seqno"] = runs["start_seqno"] + runs["count"]
        runs["horizon"] = runs["end_seqno"]
        runs["time"] = now
        data = encode_block(replace(block, runs=runs))
        table.high[partitions] = runs["end_seqno"]
        table.complete[partitions] = runs["end_seqno"]
        entry = TailEntry(runs, data, producer_name, number, now)
        number_in_tail = self.tail.append(entry)
        if producer is not None:
            producer.applied(entry, number_in_tail)
        self._wake(memory=True)
        return Written(runs, table.newest_id[partitions], number_in_tail, False, refused)

    def _admit(
        self, block: Block, producer: Producer | None, number: int
    ) -> tuple[Block, dict[int, UprError]]:
        """Return what of a block can be numbered, and why the rest cannot."""
        table = self.partitions
        partitions = block.runs["partition"]
        active = table.state[partitions] == ACTIVE
        room = table.high[partitions] + block.runs["count"] <= SEQNO_MAX
        if active.all() and room.all():
            return block, {}
        if producer is not None:
            producer.refused(number, partitions[~(active & room)])
        refused: dict[int, UprError] = {}
        for partition in partitions[~active].tolist():
            refused[partition] = table.refusal(partition)
        for partition in partitions[active & ~room].tolist():
            refused[partition] = SeqnoExhaustedError(
                f"partition {partition} is at seqno {table.high[partition]}, the limit is {SEQNO_MAX}",
                hint="create a new bucket and copy the data",
            )
        if len(refused) == len(partitions):
            raise next(iter(refused.values()))
        return cut_runs(block, active & room), refused

    def _ids(self, runs: Runs) -> U64:
        """Return the failover id under which each run's seqnos were given."""
        ids: U64 = self.partitions.newest_id[runs["partition"]]
        for i, (partition, end) in enumerate(
            zip(runs["partition"].tolist(), runs["end_seqno"].tolist(), strict=True)
        ):
            if end:
                ids[i] = self.partitions.logs[partition].id_at(end)
        return ids

    # Committing

    def take_commit(self) -> Commit | None:
        """Return what is to be journalled next; None when nothing is. One commit is out at a time."""
        tail = self.tail
        if tail.taken == tail.end or self.failure is not None:
            return None
        first, size = tail.taken, 0
        end = first
        while end < tail.end and (end == first or size < COMMIT_BYTES):
            size += len(tail[end].data)
            end += 1
        entries = tail.range(first, end)
        commit = Commit(self._next_commit, tuple(entry.journal_entry() for entry in entries))
        for entry in entries:
            entry.commit = commit.number
        tail.taken = end
        self._next_commit += 1
        return commit

    def commit_done(self, commit: Commit) -> None:
        """Take note that a commit is on disk: its rows are durable."""
        self._became_durable(self.tail.mark_durable(len(commit.entries)))
        self._wake(memory=False)

    def _became_durable(self, entries: Sequence[TailEntry]) -> None:
        for entry in entries:
            self.partitions.durable[entry.runs["partition"]] = entry.runs["end_seqno"]
        if entries:
            self.markers.became_durable([entry.runs for entry in entries])

    def fail(self, error: StorageFailedError) -> None:
        """Take no more writes: what the disk holds is not known any more."""
        self.failure = error

    # Flushing

    def begin_flush(self) -> FlushPlan | None:
        """Return the oldest of what the tail holds durably, to be stored, at most about FLUSH_BYTES.

        It ends where a cut was made: no stored block may go across a pin. None when there is nothing or a flush is out.
        """
        tail = self.tail
        if self._flush_end is not None or tail.durable == tail.first:
            return None
        fence = self.cuts.fence_above(tail.first)
        end = tail.durable if fence is None else min(fence, tail.durable)
        self._flush_end = tail.reach(FLUSH_BYTES, end)
        entries = tail.range(tail.first, self._flush_end)
        return FlushPlan(entries, self.partitions.stored.copy(), list(self.partitions.logs))

    def flush_rows(self, merged: Merged) -> dict[int, PartitionRow]:
        """Return the partitions' rows as they must be stored with a merged slice."""
        return {p: self.partitions.row(p, end) for p, end in merged.ends.items()}

    def slice_stored(self, merged: Merged) -> None:
        """Take note that a slice is in the store: the tail's copy of it counts no more."""
        for partition, end in merged.ends.items():
            self.partitions.stored[partition] = end

    def end_flush(self, complete: bool) -> int:
        """Drop what was stored whole, and return the commit number through which the journal can go.

        An incomplete flush drops nothing; the next one begins where it stopped.
        """
        assert self._flush_end is not None
        end, self._flush_end = self._flush_end, None
        if not complete:
            return 0
        through = self.tail[end - 1].commit
        if end < self.tail.end and self.tail[end].commit == through:
            # The rest of the commit is not stored yet.
            through -= 1
        self.tail.drop_before(end)
        return through

    # Cuts

    def create_cut(self, name: str, partitions: Sequence[int], lease: int, now: int) -> Cut:
        """Pin partitions as they are in this step; see ``Cuts.create``.

        Raises:
            StorageFailedError: the journal failed: what is in the tail may never be durable.
        """
        if self.failure is not None:
            # Raised again and again it would gather the frames, with their blocks, of everybody who wrote.
            raise self.failure.with_traceback(None)
        return self.cuts.create(name, partitions, lease, now, self.partitions, self.tail)

    # Following

    def add_follower(self, follower: "Follower", now: int = 0) -> "Follower | None":
        """Register a follower; returns the one that had its consumer name and must end.

        One that names a member takes its seat in the group; an older call of the member ends by itself.

        Args:
            now: as in ``Group``; counts for members only.

        Raises:
            InvalidArgumentError, TooManyError: see ``Owners.open_sole`` and ``Owners.join``.
        """
        options, old = follower.options, None
        if options.member:
            follower.seat = self.owners.join(
                options.consumer,
                options.member,
                options.lease,
                now,
                follower,
                sole_is_open=options.consumer in self.consumers,
            )
        elif options.consumer:
            follower.generation = self.owners.open_sole(options.consumer, self.consumers)
            old = self.consumers.get(options.consumer)
            self.consumers[options.consumer] = follower
        self.followers.add(follower)
        return old

    def remove_follower(self, follower: "Follower", now: int = 0, *, left: bool = False) -> None:
        """Forget a follower; ``left``: a member goes by its own wish, and gives up what it has."""
        self.followers.discard(follower)
        if follower.seat is not None:
            self.owners.close(follower.seat, now, left=left)
        elif self.consumers.get(follower.options.consumer) is follower:
            del self.consumers[follower.options.consumer]

    def _wake(self, *, memory: bool) -> None:
        for follower in self.followers:
            if follower.options.memory == memory:
                follower.wake()

    def recovered(self, entries: Iterable[TailEntry]) -> None:
        """Put journalled entries into the tail at start: they are durable."""
        for entry in entries:
            number = self.tail.append(entry)
            self.partitions.received(entry.runs)
            if entry.producer:
                producer = self._producers.setdefault(entry.producer, Producer())
                producer.applied(entry, number)
        self.tail.taken = self.tail.end
        self._became_durable(self.tail.mark_durable(self.tail.end - self.tail.durable))


def check_number(expected: int | None, number: int) -> int:
    """Return the number that must come next in a Write call.

    Raises:
        InvalidArgumentError: the number is 0 or less than one.
        OutOfOrderError: it does not follow the one before it; applying it would reorder the producer's writes.
    """
    if number < 1 or number >= 2**63:
        raise InvalidArgumentError(f"write number {number}, numbers are 1 to 2^63 - 1")
    if expected is not None and number != expected:
        raise OutOfOrderError(
            f"write number {number}, expected {expected}",
            hint="send the refused write again, then those behind it, with their old numbers",
        )
    return number + 1
