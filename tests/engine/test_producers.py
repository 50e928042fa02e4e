"""A producer's numbers in the engine: what is applied, what is known again, and what a call does not take."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.engine.buckets import bucket, partition_rows
from upr.engine.bucket import Bucket, Written
from upr.engine.partitions import ACTIVE, DEAD
from upr.engine.producers import NewestNumbers, ProducerCall
from upr.engine.recovery import recover
from upr.storage.journal import Commit, JournalEntry, NumberedWrite
from upr.storage.keyspace import ProducerRow
from upr.storage.store import Identity
from upr_protocol.block import build_block, make_runs, sealed
from upr_protocol.errors import (
    InvalidArgumentError,
    OutOfOrderError,
    StorageFailedError,
    TooManyError,
)
from upr_protocol.limits import PRODUCER_MEMORY_BYTES, WRITE_NUMBER_MAX
from upr_protocol.wire.codec import encode_block

P, Q = 5, 6
NAME = b"p"


class World:
    """A bucket whose store is a table of producers' numbers, and calls of a producer that writes into it."""

    def __init__(self) -> None:
        self.bucket = bucket()
        self.stored: dict[int, ProducerRow] = {}
        self.call = self.open()

    def open(self) -> ProducerCall:
        """Open another call: what the store knows is the largest number."""
        self.call = self.bucket.open_producer(
            NAME, max((row.number for row in self.stored.values()), default=0)
        )
        return self.call

    def state(self, partition: int, state: int) -> None:
        self.bucket.partitions.state[partition] = state

    def write(self, number: int, partitions: Sequence[int]) -> Written:
        rows = [b"%d" % partition for partition in partitions]
        block = replace(build_block(rows, rows), runs=make_runs(partitions, [1] * len(rows)))
        self.call.check(number, self.call.carried)
        return self.bucket.write(sealed(block), NAME, self.call, number, 1, self.stored)

    def flush(self) -> None:
        """Store everything: the tail is empty afterwards."""
        commit = self.bucket.take_commit()
        if commit is not None:
            self.bucket.commit_done(commit)
        plan = self.bucket.begin_flush()
        assert plan is not None
        for part in plan.prepare():
            merged = plan.merge(part)
            for numbers in plan.producer_rows(part, merged).values():
                for partition, *fields in numbers.table.tolist():
                    self.stored[partition] = ProducerRow(*fields)
            self.bucket.slice_stored(merged)
        self.bucket.end_flush(True)

    def flush_if_any(self) -> None:
        if self.bucket.tail.end > self.bucket.tail.first:
            self.flush()

    def high(self, *partitions: int) -> list[int]:
        return [int(self.bucket.partitions.high[p]) for p in partitions]


def told(written: Written) -> list[tuple[int, int]]:
    return [(int(run["partition"]), int(run["end_seqno"])) for run in written.runs]


# The newest number decides


def test_the_newest_number_of_a_partition_decides() -> None:
    world = World()
    assert told(world.write(5, [P])) == [(P, 1)]
    assert told(world.write(9, [P, Q])) == [(P, 2), (Q, 1)]
    world.open()
    again = [world.write(number, [P]) for number in (5, 9)]
    assert [one.duplicate for one in again] == [True, True]
    assert [told(one) for one in again] == [[(P, 1)], [(P, 2)]]
    assert world.high(P, Q) == [2, 1]


@pytest.mark.parametrize("stored", [False, True])
def test_a_number_need_not_be_known_in_other_partitions(stored: bool) -> None:
    """So a partition that came from another node swallows nothing."""
    world = World()
    world.write(500, [P])
    if stored:
        world.flush()
    world.open()
    written = world.write(41, [Q])
    assert (written.duplicate, told(written)) == (False, [(Q, 1)])


def test_what_was_flushed_is_known_with_its_newest_seqnos() -> None:
    world = World()
    for number in (1, 2, 3):
        world.write(number, [P, Q] if number < 3 else [P])
    world.flush()
    assert world.stored[P] == ProducerRow(3, P + 1, 2, 3)
    world.open()
    assert [told(world.write(n, [P, Q])) for n in (1, 2)] == [[(P, 0), (Q, 0)], [(P, 0), (Q, 2)]]
    assert told(world.write(3, [P])) == [(P, 3)]
    assert world.high(P, Q) == [3, 2]


def test_a_part_that_is_missing_is_applied_when_the_write_comes_again() -> None:
    """One part was refused, and the answer was lost: its outcome is not known to the writer."""
    world = World()
    world.state(P, DEAD)
    first = world.write(1, [P, Q])
    assert (list(first.refused), told(first)) == ([P], [(Q, 1)])
    world.state(P, ACTIVE)
    world.open()
    again = world.write(1, [P, Q])
    assert (again.duplicate, again.refused, told(again)) == (False, {}, [(P, 1), (Q, 1)])
    assert again.failover_ids == [P + 1, Q + 1]
    assert world.high(P, Q) == [1, 1]
    world.open()
    assert world.write(1, [P, Q]).duplicate


def test_a_repetition_waits_for_the_entry_that_it_repeats() -> None:
    world = World()
    entries = [world.write(number, [P]).entry for number in range(1, 200)]
    world.open()
    assert world.write(1, [P]).entry >= entries[0]
    world.flush()
    world.open()
    assert world.write(1, [P]).entry < world.bucket.tail.durable


# What a call does not take


def test_a_write_that_does_not_follow_the_one_before_it_is_not_taken() -> None:
    world = World()
    world.write(3, [P])
    for number, previous in ((7, 0), (7, 2), (7, 4)):
        with pytest.raises(OutOfOrderError, match=f"write {number} names {previous} "):
            world.call.check(number, previous)
    world.call.check(7, 3)
    for number in (0, WRITE_NUMBER_MAX + 1):
        with pytest.raises(InvalidArgumentError, match=f"write number is {number}; must be 1 to"):
            world.call.check(number, 3)
    # The number before counts in its call only.
    world.open().check(7, 0)


def test_a_write_that_the_bucket_refused_is_not_carried() -> None:
    world = World()
    world.write(3, [P])
    world.bucket.failure = StorageFailedError("no disk")
    with pytest.raises(StorageFailedError):
        world.write(4, [P])
    assert world.call.carried == 3
    # What was applied before is answered all the same.
    assert world.write(3, [P]).duplicate


def test_a_partition_that_refused_takes_nothing_more_of_the_call() -> None:
    world = World()
    world.state(P, DEAD)
    assert told(world.write(1, [P])) == []
    world.state(P, ACTIVE)
    behind = world.write(2, [P, Q])
    assert {p: type(error) for p, error in behind.refused.items()} == {P: OutOfOrderError}
    assert world.high(P, Q) == [0, 1]
    # A new call has them both, under new numbers or under the old ones.
    world.open()
    assert told(world.write(3, [P])) == [(P, 1)]
    assert told(world.write(4, [P])) == [(P, 2)]


def test_what_was_refused_is_not_taken_for_applied_by_its_number() -> None:
    """All that was sent behind a refusal, in its call or by one sent again, leaves the refused number usable."""
    world = World()
    world.state(P, DEAD)
    world.write(1, [P])
    world.write(2, [P])
    world.state(P, ACTIVE)
    world.write(3, [P])
    world.flush_if_any()
    world.open()
    for number in (1, 2, 3):
        written = world.write(number, [P])
        assert (written.duplicate, told(written)) == (False, [(P, number)])


def test_a_number_that_a_replica_was_told_counts_beside_older_ones_in_its_tail() -> None:
    world = World()
    world.write(4, [P, Q])
    world.stored = {P: ProducerRow(9, P + 1, 1, 2), Q: ProducerRow(3, Q + 1, 0, 1)}
    world.open()
    again = world.write(9, [P, Q])
    assert (again.duplicate, told(again)) == (False, [(P, 2), (Q, 2)])
    assert world.high(P, Q) == [1, 2]
    assert world.write(11, [P]).duplicate is False


# After a rollback


def test_a_stored_number_counts_only_while_its_seqnos_are_on_the_log() -> None:
    world = World()
    for number in (1, 2):
        world.write(number, [P, Q])
    world.flush()
    logs = world.bucket.partitions
    # What lay above 1 in P was undone, and in Q above 2, which is nothing.
    logs.set_log(P, logs.logs[P].with_record(77, 1))
    logs.set_log(Q, logs.logs[Q].with_record(78, 2))
    logs.high[P] = logs.complete[P] = 1
    world.open()
    again = world.write(2, [P, Q])
    assert (again.duplicate, told(again)) == (False, [(P, 2), (Q, 2)])
    assert again.failover_ids == [77, Q + 1]


def test_a_stored_number_from_before_the_oldest_record_of_the_log_counts() -> None:
    """After as many failovers as the log has records the id is not known any more, and the write is still there."""
    world = World()
    world.write(1, [P])
    world.flush()
    log = world.bucket.partitions.logs[P]
    for failover_id in (77, 78):
        log = log.with_record(failover_id, 1, 2)
    assert P + 1 not in log
    world.bucket.partitions.set_log(P, log)
    world.call = world.open()
    assert world.write(1, [P]).duplicate
    world.stored[P] = replace(world.stored[P], end_seqno=2)
    assert not world.write(1, [P]).duplicate


def test_recovery_keeps_the_numbers_of_what_it_keeps() -> None:
    """Partition 5 ends in the middle of a stretch, and is cut off at the marker before it."""

    def encoded(runs: Sequence[tuple[int, int, int, int]]) -> bytes:
        rows = [b"%d" % run[0] for run in runs]
        partitions, starts, ends, horizons = (list(column) for column in zip(*runs, strict=True))
        table = make_runs(partitions, [1] * len(rows), starts, ends, horizons, 5)
        return encode_block(sealed(replace(build_block(rows, rows), runs=table)))

    commits = [
        Commit(
            1, (JournalEntry(encoded([(P, 0, 1, 1), (Q, 0, 1, 1)]), (NumberedWrite(NAME, 1),)),)
        ),
        Commit(
            2, (JournalEntry(encoded([(P, 1, 2, 4), (Q, 1, 2, 2)]), (NumberedWrite(NAME, 2),)),)
        ),
    ]
    ids = iter(range(10**6, 10**7))
    found = recover(partition_rows(), lambda _: [], commits, proven=None, new_id=lambda: next(ids))
    assert {name: n.table.tolist() for name, n in found.producers} == {NAME: [(P, 1, P + 1, 0, 1)]}
    world = World()
    world.bucket = Bucket(Identity("b", 1), found.partitions, found.next_commit, proven=True)
    world.bucket.recovered(found.entries)
    world.bucket.proven = False
    world.stored = {P: ProducerRow(1, P + 1, 0, 1)}
    world.open()
    assert told(world.write(1, [P, Q])) == [(P, 1), (Q, 1)]
    assert world.call.carried == 1
    again = world.write(2, [P, Q])
    # Its part in 5 was cut off with its seqno, the other one is there.
    assert told(again) == [(P, 2), (Q, 2)]
    assert world.high(P, Q) == [2, 2]


# Memory


def test_a_producer_that_is_idle_takes_no_memory() -> None:
    world = World()
    bucket = world.bucket
    world.write(1, [P])
    bucket.close_producer(world.call)
    assert bucket.producer_memory
    # Its write is not stored yet.
    assert bucket.knows_producer(NAME)
    world.flush()
    assert not bucket.knows_producer(NAME)
    assert bucket.producer_memory == 0
    world.open()
    world.flush_if_any()
    assert bucket.knows_producer(NAME)
    bucket.close_producer(world.call)
    assert bucket.producer_memory == 0


def test_producers_take_as_much_memory_as_there_is_for_them_and_no_more() -> None:
    world = World()
    bucket = world.bucket
    calls: list[ProducerCall] = []

    def open_more() -> None:
        for i in range(10**6):
            calls.append(bucket.open_producer(b"p%d" % i, 0))

    with pytest.raises(TooManyError, match=f"must be at most {PRODUCER_MEMORY_BYTES}"):
        open_more()
    assert len(calls) > 10_000
    assert bucket.producer_memory <= PRODUCER_MEMORY_BYTES
    # A second call of the same name needs none.
    bucket.open_producer(b"p1", None)
    bucket.close_producer(calls[0])
    bucket.open_producer(b"q", 0)


def test_the_numbers_of_many_producers_are_sorted_out_by_slice() -> None:
    world = World()
    for i in range(50):
        call = bucket_call = world.bucket.open_producer(b"p%02d" % i, 0)
        rows = [b"k"] * 3
        runs = make_runs([i, 100 + i, 200], [1] * 3)
        block = sealed(replace(build_block(rows, rows), runs=runs))
        for number in (1, 2):
            world.bucket.write(block, call.name, bucket_call, number, 1, {})
    entries = world.bucket.tail.range(0, world.bucket.tail.end)
    numbers = NewestNumbers(entries, world.bucket.partitions.logs)
    ends = {p: int(world.bucket.partitions.high[p]) for p in range(1024)}
    low = numbers.of(0, 100, ends)
    assert {name: n.table.tolist() for name, n in low.items()} == {
        b"p%02d" % i: [(i, 2, i + 1, 1, 2)] for i in range(50)
    }
    ends[200] = 97
    high = numbers.of(200, 1024, ends)
    assert sorted(high) == [b"p%02d" % i for i in range(48)], "the others lie above what is stored"
    assert high[b"p03"].table.tolist() == [(200, 2, 201, 7, 8)]
