"""The bucket: numbers mutations, hands out commits and flushes, and wakes followers.

Everything here runs to completion in one thread. Work for the disk is handed out as a value (a Commit, a FlushPlan) and
reported back when it is done; the bucket serves requests in between.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from upr.engine.consumers import Consumers
from upr.engine.cuts import Cut, Cuts
from upr.engine.groups import OpenFollower, Owners
from upr.engine.partitions import ACTIVE, DEAD, PENDING, REPLICA, Copies, DurableMarkers, Partitions
from upr.engine.producers import Known, NewestNumbers, Producer, ProducerCall, producer_bytes
from upr.engine.streams import HISTORY_CHANGED, NOT_ACTIVE
from upr.engine.tail import Tail, TailEntry
from upr.storage.blocks import Compress, Encoded, check_stored, put_ends
from upr.storage.compact import Chunk, FlushSlice, Merged, chunks_of, merge_slice, plan_slices
from upr.storage.journal import Commit, JournalEntry, NumberedWrite
from upr.storage.keyspace import ProducerNumbers, ProducerRow
from upr.storage.store import Identity
from upr_protocol.block import COMPILED, I64, RUN, U64, Block, Runs, joined_runs, select_runs
from upr_protocol.errors import (
    OutOfOrderError,
    ProtocolError,
    SeqnoExhaustedError,
    StorageFailedError,
    TooFewReplicasError,
    TooManyError,
    UprError,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS, PRODUCER_MEMORY_BYTES, SEQNO_MAX
from upr_protocol.write_places import FIRST_PLACE_NUMBER


@dataclass(slots=True)
class FlushPlan:
    """Plan of a flush. It may run in another thread: it reads entries, which never change, and nothing else of the engine.

    Attributes:
        entries: durable entries from the tail's beginning, oldest first.
        stored, horizon: each partition's stored high and largest stored horizon, uint64, shape (1024,); advanced slice
            by slice.
        logs: the partitions' failover logs when the flush began.
    """

    entries: Sequence[TailEntry]
    stored: U64
    horizon: U64
    logs: Sequence[FailoverLog]
    compress: Compress | None = None
    _chunks: list[Chunk] | None = None
    _producers: NewestNumbers | None = None

    def prepare(self) -> list[FlushSlice]:
        """Return the slices to merge, in order; CorruptBlockError if an entry's bytes changed since they came in."""
        for entry in self.entries:
            check_stored(entry.data)
        self._chunks = list(chunks_of([Encoded(entry.runs, entry.data) for entry in self.entries]))
        self._producers = NewestNumbers(self.entries, self.logs)
        return plan_slices(self._chunks)

    def merge(self, part: FlushSlice) -> Merged:
        """Merge one slice into blocks. Slices are merged in the order in which they were planned."""
        assert self._chunks is not None
        merged = merge_slice(
            self._chunks, part, self.stored, horizon=self.horizon, compress=self.compress
        )
        for partition, end in merged.ends.items():
            self.stored[partition] = end
            self.horizon[partition] = max(int(self.horizon[partition]), merged.horizons[partition])
        return merged

    def producer_rows(self, part: FlushSlice, merged: Merged) -> dict[bytes, ProducerNumbers]:
        assert self._producers is not None
        return self._producers.of(part.first, part.last, merged.ends)


COMMIT_BYTES = 32 * 2**20
"""Most bytes of a commit, so that the time of one fsync is bounded."""
FLUSH_BYTES = 36 * 2**20
"""Most bytes of a flush, because it holds a second copy of the rows."""


@dataclass(slots=True)
class Written:
    """Outcome of a Write.

    Attributes:
        runs: what was applied, with the seqnos given.
        failover_ids: one a run.
        ends: uint64, one a run: what must be stable. Of what was applied at seqnos that are not known any more, the
            high seqno when it was asked, which is not below them.
        entry: durable when the tail's ``durable`` is above it; -1: durable already.
        duplicate: whether the whole Write had been applied before.
        term: in which it was answered, see ``Copies``.
        refused: why partitions did not take their part; when all of them refused, ``runs`` is empty.
    """

    runs: Runs
    failover_ids: list[int]
    ends: U64
    entry: int
    duplicate: bool
    refused: dict[int, UprError]
    term: int


class Bucket:
    """State of one bucket.

    Args:
        next_commit: the number of the next journal commit.
        proven: whether the clean-shutdown proof is on disk; nothing may be numbered while it is.
    """

    def __init__(
        self, identity: Identity, partitions: Partitions, next_commit: int, proven: bool
    ) -> None:
        self.identity = identity
        self.partitions = partitions
        self.tail = Tail()
        self.markers = DurableMarkers(partitions.complete, partitions.horizon)
        self.copies = Copies(self.markers)
        self.waiting_for_copies = 0
        """Number of writes that wait for replicas."""
        self.on_stable: Callable[[], None] = lambda: None
        """Called when more may be stable at replicas, while writes wait for it."""
        self.may_undo = False
        """Whether this server may have to undo what no counted replica has: a flush for age leaves that in the tail."""
        self.proven = proven
        self.failure: StorageFailedError | None = None
        self.on_failure: Callable[[StorageFailedError], None] = self.fail
        """Called when nothing more may be numbered."""
        self.stalled = False
        """Whether the journal cannot be written just now, and is tried again."""
        self.hangs: StorageFailedError | None = None
        """That a write of the journal neither ends nor fails."""
        # In the order in which they came: a set has another one each time.
        self.followers: dict[OpenFollower, None] = {}
        self.consumers: dict[str, OpenFollower] = {}
        self.consumer_positions = Consumers()
        self.owners = Owners()
        self.cuts = Cuts()
        self._producers: dict[bytes, Producer] = {}
        self.producer_memory = 0
        """Approximate bytes of the producers in memory, see PRODUCER_MEMORY_BYTES."""
        self._next_commit = next_commit
        self._flush_end: int | None = None
        self.purging: U64 = np.zeros(PARTITIONS, np.uint64)
        """The purge seqno that is being stored, 0 where none is: see ``purging``."""
        self.purge_raises = 0
        """Number of raises of purge seqnos; a follower compares it to see whether to look at all."""
        self.raised_last = np.zeros(PARTITIONS, np.int64)
        """Number of the last raise of each partition."""

    # Writing

    def open_producer(self, name: bytes, last_number: int | None) -> ProducerCall:
        """Register a Write call of a producer; the caller must call ``close_producer`` at its end.

        Args:
            last_number: the largest in the store, read since the tail was last shortened; None if not read.

        Raises:
            TooManyError: the memory for producers is full.
        """
        producer = self._producers.get(name)
        if producer is None:
            size = producer_bytes(name)
            if self.producer_memory + size > PRODUCER_MEMORY_BYTES:
                raise TooManyError(
                    f"memory of {len(self._producers) + 1} producers would be {self.producer_memory + size} bytes; "
                    f"must be at most {PRODUCER_MEMORY_BYTES}",
                    hint="write through fewer clients, or without a producer name; what is stored needs no memory",
                )
            producer = self._add_producer(name)
        if last_number is not None:
            producer.last_number = max(producer.last_number, last_number)
            producer.loaded = True
        producer.calls += 1
        return ProducerCall(producer)

    def _add_producer(self, name: bytes) -> Producer:
        producer = self._producers[name] = Producer(name)
        self.producer_memory += producer_bytes(name)
        return producer

    def close_producer(self, call: ProducerCall) -> None:
        call.producer.calls -= 1
        self._drop_if_idle(call.producer)

    def _drop_if_idle(self, producer: Producer) -> None:
        if not producer.calls and not producer.in_tail:
            del self._producers[producer.name]
            self.producer_memory -= producer_bytes(producer.name)

    def knows_producer(self, name: bytes) -> bool:
        """Return whether memory has all of a producer, so that the store need not be read."""
        producer = self._producers.get(name)
        return producer is not None and producer.loaded

    def write(
        self,
        block: Block,
        name: bytes,
        call: ProducerCall | None,
        number: int,
        now: int,
        stored: Mapping[int, ProducerRow] | None = None,
        copies: int = 0,
    ) -> Written:
        """Number a checked, unnumbered block and put it into the tail.

        Args:
            name: the producer's, empty for none.
            call: from ``open_producer``; None writes without protection against repetition.
            number: the Write's number, from 1; 0 without a producer.
            now: microseconds since the epoch.
            stored: the producer's rows in the store by partition, read since the tail was last shortened. Needed
                for a number that is not above the producer's last.
            copies: the number of replicas that must be there for it; nothing is numbered with fewer. Partitions refuse
                what was not applied before of a write that was applied in part.

        Raises:
            ContentDiffersError: see ``Producer.check_place``.
            TooFewReplicasError: see ``copies``.
            PartitionNotActiveError: it was applied before, and only the active server knows what replicas have.
            StorageFailedError: the journal failed; nothing is numbered any more.
        """
        known = short = None
        if call is not None and number <= call.producer.last_number:
            known = self.known(call, number, block.runs, stored)
            short = self._check_copies(copies, block.runs, known)
            if known.seen.all():
                call.carried = number
                return self._written(known.runs, known.entry, True, {})
        elif call is not None and number >= FIRST_PLACE_NUMBER:
            call.producer.check_place(number, {})
        if self.failure is not None:
            # Without its traceback: raised again and again, it would keep the frames of all callers, with their blocks.
            raise self.failure.with_traceback(None)
        assert not self.proven, "the clean-shutdown proof must be gone before anything is numbered"
        if known is not None:
            block = select_runs(block, ~known.seen)
        elif copies:
            self._check_copies(copies, block.runs, None)
        block, refused = self._admit(block, call, short)
        if call is not None:
            call.carried = number
        if not len(block.runs):
            runs = block.runs if known is None else known.runs
            return self._written(runs, -1 if known is None else known.entry, True, refused)
        filling = self.tail.make_way(block, now)
        try:
            runs = self._numbered(block.runs, now)
            block = Block(runs, *block.columns, block.columns_crc, block.further)
            entry = self.tail.write(block, name, number, now, filling)
            if call is not None:
                call.producer.applied(number, runs, entry)
        except BaseException as error:
            # It may be numbered and nowhere: what comes behind it would be lost at the next start.
            self.on_failure(StorageFailedError(f"a write was numbered and not kept: {error!r}"))
            raise
        self._wake(memory=True)
        if known is None or not known.seen.any():
            ids = self.partitions.newest_id[runs["partition"]].tolist()
            return Written(runs, ids, runs["end_seqno"], entry, False, refused, self.copies.term)
        runs = np.concatenate((runs, known.runs))
        runs = runs[np.argsort(runs["partition"])]
        return self._written(runs, entry, False, refused)

    def _written(
        self, runs: Runs, entry: int, duplicate: bool, refused: dict[int, UprError]
    ) -> Written:
        ends = runs["end_seqno"]
        ends = np.where(ends == 0, self.partitions.high[runs["partition"]], ends)
        ids = self._ids(runs).tolist()
        return Written(runs, ids, ends, entry, duplicate, refused, self.copies.term)

    # Copies

    def _check_copies(
        self, copies: int, runs: Runs, known: Known | None
    ) -> TooFewReplicasError | None:
        """Check that so many replicas are there for a write; what was applied of it before only waits for them.

        Returns:
            Why the rest of a write that was applied in part must be refused.

        Raises:
            TooFewReplicasError: nothing of it was applied before.
            PartitionNotActiveError: some of it was, and only the active server knows what replicas have.
        """
        if not copies:
            return None
        applied = known is not None and bool(known.seen.any())
        active = self.partitions.state[runs["partition"]] == ACTIVE
        if applied and not active.all():
            raise self.partitions.refusal(int(runs["partition"][~active][0]))
        short = self.copies.shortage(copies)
        if short is not None and not applied and active.any():
            raise short
        return short

    def begin_term(self) -> None:
        """Forget what replicas acknowledged: the bucket became active, or is active no more.

        Where it became active, the replicas' streams begin anew, so that what they acknowledge is of this term. Where it
        is no more, followers that are shown what is stable must go to another server.
        """
        self.copies.begin_term()
        self.may_undo = True
        active = bool((self.partitions.state == ACTIVE).any())
        for follower in list(self.followers):
            if active and follower.options.is_replica:
                follower.end_streams(range(PARTITIONS), HISTORY_CHANGED)
            elif not active and follower.options.copies:
                follower.end_call(NOT_ACTIVE)

    def count(self, counted: frozenset[str], in_step: Collection[str]) -> None:
        """See ``Copies.count``."""
        if self.copies.count(counted, in_step):
            self._wake_stable()

    def acknowledged(self, directory: str, partitions: I64, seqnos: U64) -> None:
        """Take over the complete markers that a registered replica has on disk, of streams of this term."""
        if self.copies.acknowledged(directory, partitions, seqnos):
            self._wake_stable()

    def _wake_stable(self) -> None:
        for follower in self.followers:
            if follower.options.copies:
                follower.wake()
        if self.waiting_for_copies:
            self.on_stable()

    def is_stable(self, written: Written, copies: int) -> bool:
        """Return whether all of a write is stable(copies), since its term began and before that ended."""
        if written.term != self.copies.term:
            return False
        stable = self.copies.stable(copies)[written.runs["partition"]]
        return bool((written.ends <= stable).all())

    # Receiving

    def receive(self, block: Block, data: bytes, writes: Sequence[NumberedWrite]) -> int:
        """Take a block that another server numbered, and return the tail entry that it is.

        Args:
            block: checked; each run continues a partition that is a replica here.
            data: the block, encoded and not compressed.
            writes: of producers, each within the runs of the block.

        Raises:
            ProtocolError: a run does not continue its partition, or that is no replica; nothing is taken.
            StorageFailedError: the journal failed; nothing is taken any more.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        assert not self.proven, "the clean-shutdown proof must be gone before anything is received"
        table, runs = self.partitions, block.runs
        partitions = runs["partition"]
        wrong = (table.state[partitions] != REPLICA) | (
            runs["start_seqno"] != table.high[partitions]
        )
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            partition = int(partitions[at])
            raise ProtocolError(
                f"a run of partition {partition} begins at {runs['start_seqno'][at]}; must begin at"
                f" {table.high[partition]}, in a partition that is a replica here"
            )
        # Not below the entry before it: entries are searched by time.
        time = max(self.tail.newest_time, int(runs["time"].max()))
        if len(self.cuts):
            self.cuts.passed(runs, self.tail.end)
        entry = TailEntry(runs, data, writes, time)
        try:
            number = self._append(entry)
        except BaseException as error:
            # Sent again, what is in the tail in part would be there twice.
            self.on_failure(StorageFailedError(f"a block was received and not kept: {error!r}"))
            raise
        self._wake(memory=True)
        return number

    def _append(self, entry: TailEntry) -> int:
        """Append an entry that was numbered elsewhere, or before a start; return its number."""
        number = self.tail.append(entry)
        self.partitions.received(entry.runs)
        for write in entry.writes:
            producer = self._producers.get(write.producer)
            if producer is None:
                producer = self._add_producer(write.producer)
            producer.applied(write.number, entry.runs_of(write), number)
        return number

    def begin_adopting(self, logs: Mapping[int, FailoverLog], epochs: Mapping[int, int]) -> None:
        """Take over the failover logs and epochs of an upstream; the partitions are pending until they are stored.

        Where the newest id changes, the streams end with HISTORY_CHANGED: what they are sent from now on is of another
        id.
        """
        table = self.partitions
        changed = [p for p, log in logs.items() if log.newest.failover_id != table.newest_id[p]]
        for partition, log in logs.items():
            table.set_log(partition, log)
            table.epoch[partition] = epochs[partition]
        if changed:
            table.state[changed] = PENDING
            for follower in list(self.followers):
                follower.end_streams(changed, HISTORY_CHANGED)

    def loaded_numbers(self, numbers: Mapping[bytes, int]) -> None:
        """Record the largest numbers of producers that were stored from elsewhere."""
        for name, number in numbers.items():
            producer = self._producers.get(name)
            if producer is not None and producer.loaded:
                producer.last_number = max(producer.last_number, number)

    def counts(self, partition: int, failover_id: int, end: int) -> bool:
        """Return whether a stored number of a producer counts: its seqnos are on the failover log as it is now.

        False for a place, which has no seqnos. May be called in another thread.
        """
        return partition < PARTITIONS and bool(
            self.partitions.logs[partition].gave(failover_id, end)
        )

    def adopted(self, partitions: Iterable[int]) -> None:
        """Record that the logs that were taken over are stored."""
        self.partitions.state[list(partitions)] = REPLICA

    def known(
        self,
        call: ProducerCall,
        number: int,
        runs: Runs,
        stored: Mapping[int, ProducerRow] | None,
    ) -> Known:
        """Return the parts of a write that were applied before; ``stored`` as in ``write``.

        A stored row whose seqnos are not on the partition's failover log was undone with them.

        Raises:
            ContentDiffersError: see ``Producer.check_place``.
        """
        assert stored is not None, "the store must be asked about a number that was used before"
        if number >= FIRST_PLACE_NUMBER:
            call.producer.check_place(number, stored)
        valid = {
            p: row for p, row in stored.items() if self.counts(p, row.failover_id, row.end_seqno)
        }
        return call.producer.known(number, runs, self.tail, valid)

    def _numbered(self, runs: Runs, now: int) -> Runs:
        """Give seqnos to the rows of a table, and return it with them."""
        table = self.partitions
        made = None
        if COMPILED is not None:
            # Of more than 500 numbers numpy lets the other threads run in each of these steps, and waits for them.
            made = COMPILED.numbered(runs.tobytes(), now, table.high)
        if made is not None:
            runs = np.frombuffer(made, RUN)
        else:
            runs = runs.copy()
            runs["start_seqno"] = table.high[runs["partition"]]
            runs["end_seqno"] = runs["start_seqno"] + runs["count"]
            runs["horizon"] = runs["end_seqno"]
            runs["time"] = now
        put_ends(runs, table.high, table.complete, table.horizon)
        return runs

    def _admit(
        self, block: Block, call: ProducerCall | None, short: TooFewReplicasError | None
    ) -> tuple[Block, dict[int, UprError]]:
        """Return which runs of a block can be numbered, and the errors of the others; with ``short`` none can."""
        table = self.partitions
        refusing = call.refusing if call is not None else ()
        if (
            COMPILED is not None
            and not refusing
            and short is None
            and COMPILED.admitted(block.runs.tobytes(), ACTIVE, table.state, table.high)
        ):
            return block, {}
        partitions = block.runs["partition"]
        admitted = table.state[partitions] == ACTIVE
        room = table.high[partitions] + block.runs["count"] <= SEQNO_MAX
        if admitted.all() and room.all() and not refusing and short is None:
            return block, {}
        refused: dict[int, UprError] = {}
        if short is not None:
            refused = dict.fromkeys(partitions.tolist(), short)
        for partition in partitions[~admitted].tolist():
            refused[partition] = table.refusal(partition)
        for partition in partitions[admitted & ~room].tolist():
            refused[partition] = SeqnoExhaustedError(
                f"seqno of partition {partition} is {table.high[partition]}; must leave room for the rows below {SEQNO_MAX + 1}",
                hint="create a new bucket and copy the data",
            )
        for partition in partitions.tolist():
            if partition in refusing and partition not in refused:
                refused[partition] = OutOfOrderError(
                    f"partition {partition} refused an earlier write of this call",
                    hint="open another call, and send the refused writes there under new numbers",
                )
        if call is not None:
            call.refusing.update(refused)
        return select_runs(block, ~np.isin(partitions, list(refused))), refused

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
        """Return the next commit for the journal; None if there is none. One commit is pending at a time."""
        tail, entries, size = self.tail, list[JournalEntry](), 0
        # What gathered in memory is encoded here, once for journal, followers and flush.
        end = tail.end
        if tail.taken == end or self.failure is not None:
            return None
        for entry in tail.range(tail.taken, end):
            if size >= COMMIT_BYTES:
                break
            entries.append(JournalEntry(entry.data, entry.writes))
            entry.commit = self._next_commit
            size += len(entry.data)
        commit = Commit(self._next_commit, tuple(entries))
        tail.taken += len(entries)
        self._next_commit += 1
        return commit

    def commit_done(self, commit: Commit) -> None:
        """Record that a commit is on disk: its rows are durable."""
        self._became_durable(self.tail.mark_durable(len(commit.entries)))
        self._wake(memory=False)

    def _became_durable(self, entries: Sequence[TailEntry]) -> None:
        if entries:
            runs = [entry.runs for entry in entries]
            self.markers.became_durable(runs, self.partitions.durable)

    def fail(self, error: StorageFailedError) -> None:
        """Refuse all writes: the state of the disk is unknown."""
        self.failure = error
        for follower in self.followers:
            # Streams that wait for durable rows end.
            follower.wake()

    # Flushing

    def begin_flush(self, *, wanted: bool = True) -> FlushPlan | None:
        """Return a plan to store the oldest durable entries, at most about FLUSH_BYTES.

        It ends at a fence, because no stored block may cross a pin. None when there is nothing to flush, or a flush is
        pending.

        Args:
            wanted: whether room is needed. Otherwise, where ``may_undo`` is set, it ends at what no counted replica has: if
                that is to be undone, it is in the tail as it was written, and the marker before it is near.
        """
        tail = self.tail
        if self._flush_end is not None or tail.durable == tail.first:
            return None
        fence = self.cuts.fence_above(tail.first)
        end = tail.durable if fence is None else min(fence, tail.durable)
        end = tail.reach(FLUSH_BYTES, end)
        if self.may_undo and not wanted:
            end = self._stable_end(end)
            if end == tail.first:
                return None
        self._flush_end = end
        entries = tail.range(tail.first, self._flush_end)
        table = self.partitions
        stored, horizon = table.stored.copy(), table.stored_horizon.copy()
        return FlushPlan(entries, stored, horizon, list(table.logs))

    def flush_ends(self, merged: Merged) -> dict[int, tuple[int, int, int]]:
        """Return each partition's stored end, complete marker and horizon, as they are once a slice is stored."""
        before = self.partitions.stored_complete[list(merged.ends)].tolist()
        return {
            p: (end, merged.markers.get(p) or complete, merged.horizons[p])
            for (p, end), complete in zip(merged.ends.items(), before, strict=True)
        }

    def _stable_end(self, end: int) -> int:
        """Return the number of the first entry below ``end`` that is not stable(1); ``end`` without one."""
        first = self.tail.first
        entries = self.tail.range(first, end)
        runs = joined_runs([entry.runs for entry in entries])
        lacking = runs["horizon"] > self.copies.stable(1)[runs["partition"]]
        if not lacking.any():
            return end
        ends = np.cumsum([len(entry.runs) for entry in entries])
        return first + int(np.searchsorted(ends, int(lacking.argmax()), side="right"))

    def slice_stored(self, merged: Merged) -> None:
        """Record that a slice is in the store: readers use it from now on."""
        table = self.partitions
        told = self.flush_ends(merged)
        rows = np.array(list(told.values()), np.uint64).reshape(-1, 3)
        columns = (table.stored, table.stored_complete, table.stored_horizon)
        for column, numbers in zip(columns, rows.T, strict=True):
            column[list(told)] = numbers

    def end_flush(self, complete: bool) -> int:
        """Drop the entries that are stored completely; return the commit number up to which journal segments can go.

        An incomplete flush drops nothing; the next one begins where it stopped.
        """
        assert self._flush_end is not None
        end, self._flush_end = self._flush_end, None
        if not complete:
            return 0
        through = self.tail[end - 1].commit
        if end < self.tail.end and self.tail[end].commit == through:
            # The commit has entries that are not stored yet.
            through -= 1
        self.tail.drop_before(end)
        for producer in list(self._producers.values()):
            producer.drop_before(end)
            self._drop_if_idle(producer)
        return through

    # Cuts

    def create_cut(
        self, name: str, partitions: Sequence[int], lease: int, now: int, holder: str = ""
    ) -> Cut:
        """Pin partitions as they are in this step; see ``Cuts.create``.

        Raises:
            StorageFailedError: the journal failed, so the tail may never be durable.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        return self.cuts.create(name, partitions, lease, now, self.partitions, self.tail, holder)

    # Following

    def add_follower(self, follower: OpenFollower, now: int = 0) -> OpenFollower | None:
        """Register a follower; return the older one with its consumer name, which must end.

        A follower that names a member takes its seat in the group, which ends an older call of the member.

        Args:
            now: as in ``Group``; counts for members only.

        Raises:
            InvalidArgumentError, TooManyError: see ``Owners.open_sole`` and ``Owners.join``.
            PartitionNotActiveError: it shows what is stable at replicas, which only the active server knows.
        """
        options, old = follower.options, None
        if options.copies and not (self.partitions.state == ACTIVE).any():
            raise self.partitions.refusal(int((self.partitions.state != DEAD).argmax()))
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
        if options.is_replica and options.consumer:
            self.copies.connected[options.directory] += 1
        self.followers[follower] = None
        return old

    def remove_follower(self, follower: OpenFollower, now: int = 0, *, left: bool = False) -> None:
        """Remove a follower; with ``left`` its member leaves the group and frees its partitions."""
        options = follower.options
        if options.is_replica and options.consumer and follower in self.followers:
            self.copies.left(options.directory)
        self.followers.pop(follower, None)
        if follower.seat is not None:
            self.owners.close(follower.seat, now, left=left)
        elif self.consumers.get(options.consumer) is follower:
            del self.consumers[options.consumer]

    def _wake(self, *, memory: bool) -> None:
        for follower in self.followers:
            if follower.options.memory == memory:
                follower.wake()

    def recovered(self, entries: Iterable[TailEntry]) -> None:
        """Append journalled entries to the tail at the start: they are durable."""
        for entry in entries:
            self._append(entry)
        self.tail.taken = self.tail.end
        self._became_durable(self.tail.mark_durable(self.tail.end - self.tail.durable))
