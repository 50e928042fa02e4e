"""Purging: nobody is left with what a tombstone deleted, and nobody begins anew without need."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.buckets import MINE, OTHER, bucket, commit
from tests.model import Row, State, apply
from tests.raw import all_rows
from tests.storage.stored_blocks import block_of, put, rows_of, store_of, whole_range
from upr.engine.bucket import Bucket
from upr.engine.compaction import PurgeAges, begin_purge, end_purge, holders, purge_limits
from upr.engine.follower import Follower
from upr.engine.streams import Answer, FollowOptions, RolledBack, Started, StartRequest
from upr.storage.blocks import Replacement
from upr.storage.compact import Direct, Purge, PurgeLimits, merge_direct
from upr.storage.read import ReadResult, read_blocks
from upr.storage.store import Store
from upr_protocol.block import I64, U64, build_block, make_runs, sealed
from upr_protocol.errors import DataDamagedError
from upr_protocol.flow import CreditWindow
from upr_protocol.handshake import Rule
from upr_protocol.wire.codec import decode_block

AGES = PurgeAges(young=100, held=1000)
WRITTEN = 10_000
"""When all rows were written."""
OLD = WRITTEN + 100
VERY_OLD = WRITTEN + 1000
ID = MINE + 1
HISTORY = rows_of(1, (b"gone", b"v"), (b"kept", b"v"), (b"gone", None), (b"last", b"v"))
"""The key that is deleted at 3 was set at 1."""


class World:
    """A bucket whose partition MINE has HISTORY stored, in blocks that end at 2 and 4."""

    def __init__(self, folder: Path) -> None:
        self.store = store_of(folder)
        put(
            self.store,
            block_of(MINE, 0, HISTORY[:2], time=WRITTEN),
            block_of(MINE, 2, HISTORY[2:], time=WRITTEN),
        )
        self.bucket = bucket()
        for column in (
            self.bucket.partitions.stored,
            self.bucket.partitions.high,
            self.bucket.partitions.durable,
            self.bucket.partitions.complete,
        ):
            column[MINE] = 4

    def merged(self, now: int) -> Direct:
        limits = purge_limits(self.bucket, AGES, now)
        return merge_direct([whole_range(self.store, MINE)], self.store.blocks, limits)

    def store_merged(self, merged: Direct) -> None:
        self.store.replace(merged.replacements)
        end_purge(self.bucket, merged.purges)

    def purge(self, now: int) -> dict[int, int]:
        merged = self.merged(now)
        raised = begin_purge(self.bucket, merged.purges, AGES, now)
        if raised:
            self.store_merged(merged)
        return raised

    def follower(self, window: int = 1 << 20, name: str = "") -> "Reader":
        return Reader(self, window, name)

    def deletes(self) -> list[int]:
        blocks = self.store.blocks(MINE, [head.end for head in self.store.heads(MINE)])
        return [
            seqno for _, seqno, _, value in all_rows(map(decode_block, blocks)) if value is None
        ]


class Reader:
    """A follower of MINE and what it has, its reads of the store in the hands of the test."""

    def __init__(self, world: World, window: int, name: str) -> None:
        self.world = world
        options = FollowOptions(consumer=name, peer="somewhere")
        self.engine = Follower(world.bucket, options, CreditWindow(window), lambda: None)
        world.bucket.add_follower(self.engine)
        self.state: State = {}
        self.rows: list[Row] = []

    def start(self, seqno: int = 0) -> Answer:
        known = ID if seqno else None
        (answer,) = self.engine.start([StartRequest(MINE, known, seqno, known)])
        return answer

    def read(self, max_blocks: int | None = None) -> list[ReadResult]:
        wanted = self.engine.next_read()
        assert wanted is not None, "it wants to read nothing"
        found = read_blocks(self.world.store, *wanted)
        return [ReadResult(one.request, one.blocks[:max_blocks], one.error) for one in found]

    def take_frame(self) -> bool:
        frame = self.engine.next_frame()
        if frame is None:
            return False
        self.engine.credit.give_back(frame.cost)
        for block in map(decode_block, frame.blocks):
            rows = [Row(*row[1:]) for row in all_rows([block])]
            self.rows += rows
            apply(self.state, rows)
        return True

    def finish(self) -> None:
        while True:
            if self.take_frame():
                continue
            wanted = self.engine.next_read()
            if wanted is None:
                return
            self.engine.feed(read_blocks(self.world.store, *wanted))

    def ends(self) -> list[str]:
        return [ended.why.reason for ended in self.engine.take_ended()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "store")
    yield made
    made.store.close()


RIGHT = {b"kept": b"v", b"last": b"v"}


# Streams at 0


def test_a_read_in_flight_when_a_purge_begins_is_dropped(world: World) -> None:
    reader = world.follower()
    assert isinstance(reader.start(), Started)
    in_flight = reader.read(max_blocks=1)
    assert world.purge(OLD) == {MINE: 3}
    reader.engine.feed(in_flight)
    assert not reader.take_frame(), "what was read before the purge is sent after it"
    reader.finish()
    assert reader.state == RIGHT
    assert reader.ends() == []


def test_a_read_in_flight_of_a_stream_that_was_stopped_is_not_given_to_the_next(
    world: World,
) -> None:
    reader = world.follower()
    reader.start()
    in_flight = reader.read(max_blocks=1)
    reader.engine.stop([MINE])
    merged = world.merged(OLD)
    assert begin_purge(world.bucket, merged.purges, AGES, OLD) == {MINE: 3}
    assert isinstance(reader.start(), Started)
    reader.engine.feed(in_flight)
    assert not reader.take_frame()
    world.store_merged(merged)
    reader.finish()
    assert reader.state == RIGHT


def test_blocks_fed_and_not_sent_when_a_purge_begins_are_dropped(world: World) -> None:
    reader = world.follower()
    reader.start()
    reader.engine.feed(reader.read(max_blocks=1))
    assert world.purge(OLD) == {MINE: 3}
    assert not reader.take_frame(), "what was fed before the purge is sent after it"
    reader.finish()
    assert reader.state == RIGHT
    assert reader.ends() == []


def test_a_stream_at_0_reads_nothing_until_the_purge_is_stored(world: World) -> None:
    reader = world.follower()
    merged = world.merged(OLD)
    assert begin_purge(world.bucket, merged.purges, AGES, OLD) == {MINE: 3}
    # Both one that was there and one that comes now.
    reader.start()
    assert reader.engine.next_read() is None
    world.store_merged(merged)
    reader.finish()
    assert reader.state == RIGHT


def test_a_stream_at_0_that_reads_the_tail_goes_to_the_store_when_a_purge_begins(
    world: World,
) -> None:
    """What is stored stays in the tail until its flush is complete."""
    table = world.bucket.partitions
    for column in (table.stored, table.high, table.durable, table.complete):
        column[MINE] = 0
    reader = world.follower(window=1)
    reader.start()
    # In two blocks: the reader must not get the first of them and then what the purge left of the second.
    for rows in (HISTORY[:2], HISTORY[2:]):
        runs = make_runs([MINE], [len(rows)])
        block = build_block([row.key for row in rows], [row.value for row in rows])
        world.bucket.write(sealed(replace(block, runs=runs)), b"", None, 0, WRITTEN)
    commit(world.bucket)
    table.stored[MINE] = 4
    merged = world.merged(OLD)
    assert begin_purge(world.bucket, merged.purges, AGES, OLD) == {MINE: 3}
    assert not reader.take_frame(), "it reads what is being purged"
    assert reader.engine.next_read() is None
    world.store_merged(merged)
    assert reader.engine.next_read() is not None
    assert not reader.take_frame(), "it reads the tail, not the store"


def test_a_purge_of_one_partition_does_not_hold_up_another(world: World) -> None:
    put(world.store, block_of(OTHER, 0, rows_of(1, (b"k", b"v"))))
    for column in (world.bucket.partitions.stored, world.bucket.partitions.high):
        column[OTHER] = 1
    reader = world.follower()
    reader.start()
    reader.engine.start([StartRequest(OTHER, None, 0, None)])
    begin_purge(world.bucket, world.merged(OLD).purges, AGES, OLD)
    wanted = reader.engine.next_read()
    assert wanted is not None
    assert [request.partition for request in wanted[0]] == [OTHER]


def test_a_stream_at_the_purge_seqno_or_above_reads_on(world: World) -> None:
    reader = world.follower()
    reader.start(3)
    begin_purge(world.bucket, world.merged(OLD).purges, AGES, OLD)
    assert reader.engine.next_read() is not None
    assert reader.ends() == []


def test_a_stream_that_began_behind_a_purge_holds_up_the_next_also_below_it(world: World) -> None:
    purges = world.merged(OLD).purges
    begin_purge(world.bucket, purges, AGES, OLD)
    # The store failed, so that blocks still end below the purge seqno.
    end_purge(world.bucket, purges)
    reader = world.follower()
    reader.start()
    reader.engine.feed(reader.read(max_blocks=1))
    assert reader.take_frame()
    assert int(reader.engine.passed()[MINE]) == 2 < int(world.bucket.partitions.purge[MINE])


def test_a_failed_read_leaves_nothing_behind(world: World) -> None:
    reader = world.follower()
    reader.start()
    reader.read()
    world.purge(OLD)
    reader.engine.read_failed(DataDamagedError("no"), [])
    reader.engine.feed(reader.read())
    assert reader.take_frame(), "a read made after the purge is dropped"


# Very old tombstones


def test_a_very_old_tombstone_ends_the_streams_below_it(world: World) -> None:
    below, at, above = (world.follower() for _ in range(3))
    for reader, seqno in ((below, 2), (at, 3), (above, 4)):
        assert isinstance(reader.start(seqno), Started)
    assert world.purge(VERY_OLD) == {MINE: 3}
    assert below.ends() == ["PURGED"]
    assert (at.ends(), above.ends()) == ([], [])
    answer = below.start(2)
    assert isinstance(answer, RolledBack)
    assert (answer.answer.rollback_seqno, answer.answer.rule) == (0, Rule.BELOW_PURGE)
    assert isinstance(below.start(), Started)
    below.finish()
    assert below.state == RIGHT


def test_a_stream_that_ends_with_purged_sends_nothing_that_it_had_read(world: World) -> None:
    reader = world.follower()
    reader.start(2)
    reader.engine.feed(reader.read())
    assert world.purge(VERY_OLD) == {MINE: 3}
    assert not reader.take_frame()
    assert reader.ends() == ["PURGED"]


def test_the_purge_seqno_is_told_once_to_streams_that_stay(world: World) -> None:
    stays, comes = world.follower(), world.follower()
    stays.start(4)
    assert stays.engine.take_purge_seqnos() == []
    world.purge(OLD)
    assert stays.engine.take_purge_seqnos() == [(MINE, 3)]
    assert stays.engine.take_purge_seqnos() == []
    answer = comes.start()
    assert isinstance(answer, Started)
    assert answer.purge_seqno == 3
    assert comes.engine.take_purge_seqnos() == []


def test_the_last_frame_of_a_stream_that_ends_tells_the_purge_seqno_too(world: World) -> None:
    """What is missing in it is explained by nothing else."""
    reader = world.follower()
    (answer,) = reader.engine.start([StartRequest(MINE, None, 0, None, until_now=True)])
    assert isinstance(answer, Started)
    assert answer.purge_seqno == 0
    world.purge(OLD)
    reader.engine.feed(reader.read())
    assert reader.take_frame()
    assert reader.ends() == ["FINISHED"]
    assert reader.engine.take_purge_seqnos() == [(MINE, 3)]
    assert reader.engine.take_purge_seqnos() == []


# Who holds a tombstone up


def stream_at_2(world: World) -> None:
    world.follower().start(2)


def consumer_at_2(world: World) -> None:
    positions = world.bucket.consumer_positions
    positions.acknowledge("c", *position(2, ID), 1)


def consumer_under_an_older_id(world: World) -> None:
    positions = world.bucket.consumer_positions
    positions.acknowledge("c", *position(4, ID + 1), 1)


def cut_at_2(world: World) -> None:
    complete = world.bucket.partitions.complete
    complete[MINE] = 2
    world.bucket.create_cut("c", [MINE], 1000, 0)
    complete[MINE] = 4


def deleted_at_the_high_seqno(world: World) -> None:
    for column in (world.bucket.partitions.high, world.bucket.partitions.durable):
        column[MINE] = 3


def what_follows_is_not_durable(world: World) -> None:
    world.bucket.partitions.durable[MINE] = 3


def position(seqno: int, failover_id: int) -> tuple[I64, U64, U64]:
    return (
        np.array([MINE]),
        np.array([seqno], np.uint64),
        np.array([failover_id], np.uint64),
    )


UNTIL_VERY_OLD = (stream_at_2, consumer_at_2, consumer_under_an_older_id)
FOR_EVER = (cut_at_2, deleted_at_the_high_seqno, what_follows_is_not_durable)


@pytest.mark.parametrize("hold", [*UNTIL_VERY_OLD, *FOR_EVER])
def test_a_tombstone_is_held_up(world: World, hold: object) -> None:
    assert callable(hold)
    hold(world)
    assert world.purge(OLD) == {}
    assert world.deletes() == [3]
    assert int(world.bucket.partitions.purge[MINE]) == 0


@pytest.mark.parametrize("hold", FOR_EVER)
def test_a_very_old_tombstone_is_held_up_too(world: World, hold: object) -> None:
    assert callable(hold)
    hold(world)
    assert world.purge(VERY_OLD) == {}
    assert world.deletes() == [3]


@pytest.mark.parametrize("hold", UNTIL_VERY_OLD)
def test_a_very_old_tombstone_is_held_up_by_neither_stream_nor_consumer(
    world: World, hold: object
) -> None:
    assert callable(hold)
    hold(world)
    assert world.purge(VERY_OLD - 1) == {}
    assert world.purge(VERY_OLD) == {MINE: 3}
    assert world.deletes() == []


@pytest.mark.parametrize("hold", [*UNTIL_VERY_OLD, *FOR_EVER])
def test_whoever_comes_after_the_limits_were_taken_is_seen(world: World, hold: object) -> None:
    assert callable(hold)
    merged = world.merged(OLD)
    assert set(merged.purges) == {MINE}
    hold(world)
    assert begin_purge(world.bucket, merged.purges, AGES, OLD) == {}
    assert int(world.bucket.partitions.purge[MINE]) == 0
    assert not world.bucket.purging.any()


@pytest.mark.parametrize("hold", FOR_EVER)
def test_whoever_comes_before_a_very_old_tombstone_goes_is_seen(world: World, hold: object) -> None:
    assert callable(hold)
    merged = world.merged(VERY_OLD)
    hold(world)
    assert begin_purge(world.bucket, merged.purges, AGES, VERY_OLD) == {}


def test_a_young_tombstone_stays(world: World) -> None:
    assert world.purge(OLD - 1) == {}
    assert world.deletes() == [3]
    assert world.purge(OLD) == {MINE: 3}
    assert world.deletes() == []


def test_a_partition_that_is_held_up_does_not_hold_up_another(world: World) -> None:
    stream_at_2(world)
    world.bucket.partitions.durable[OTHER] = world.bucket.partitions.high[OTHER] = 9
    purges = {MINE: Purge(3, 3, 1), OTHER: Purge(8, 8, 1)}
    assert begin_purge(world.bucket, purges, AGES, OLD) == {OTHER: 8}


def test_only_what_goes_because_all_have_passed_is_checked_against_them() -> None:
    """A very old tombstone at 9 may go; of those that need everybody to have passed, 3 is the newest."""
    b = bucket()
    b.partitions.durable[MINE] = b.partitions.high[MINE] = 20
    follower = Follower(b, FollowOptions(), CreditWindow(1), lambda: None)
    b.add_follower(follower)
    follower.start([StartRequest(MINE, ID, 5, ID)])
    assert begin_purge(b, {MINE: Purge(9, 6, 2)}, AGES, OLD) == {}
    assert begin_purge(b, {MINE: Purge(9, 5, 2)}, AGES, OLD) == {MINE: 9}


def test_a_purge_seqno_is_never_lowered() -> None:
    b = bucket()
    b.partitions.durable[MINE] = b.partitions.high[MINE] = 20
    begin_purge(b, {MINE: Purge(9, 9, 1)}, AGES, OLD)
    end_purge(b, [MINE])
    begin_purge(b, {MINE: Purge(4, 4, 1)}, AGES, OLD)
    assert int(b.partitions.purge[MINE]) == 9


def test_those_who_hold_are_named(world: World) -> None:
    stream_at_2(world)
    consumer_under_an_older_id(world)
    cut_at_2(world)
    found = {(one.kind, one.name, one.seqno) for one in holders(world.bucket, MINE, 3)}
    assert found == {("stream", "somewhere", 2), ("consumer", "c", 0), ("cut", "c", 2)}
    assert [one.kind for one in holders(world.bucket, MINE, 2)] == ["consumer"]


def test_limits_of_an_empty_bucket_let_nothing_go() -> None:
    limits = purge_limits(bucket(), AGES, VERY_OLD)
    assert isinstance(limits, PurgeLimits)
    assert not limits.never.any()


def test_a_crash_does_not_make_a_purged_tombstone_the_newest_row(tmp_path: Path) -> None:
    """The row behind it is in memory only."""
    store = store_of(tmp_path / "store")
    b = bucket()
    write_delete(b)
    commit(b)
    write_delete(b)
    assert int(b.partitions.high[MINE]) == 2
    limits = purge_limits(b, AGES, VERY_OLD)
    assert (int(limits.never[MINE]), int(limits.passed[MINE])) == (0, 0)
    commit(b)
    assert int(purge_limits(b, AGES, VERY_OLD).never[MINE]) == 1
    store.close()


def write_delete(to: Bucket) -> None:
    block = sealed(replace(build_block([b"k"], [None]), runs=make_runs([MINE], [1])))
    to.write(block, b"", None, 0, WRITTEN)


def test_a_purge_and_a_flush_that_crosses_it_keep_both_seqnos(tmp_path: Path) -> None:
    """The flush made its row before the purge began and stores it before the purge is stored."""
    store: Store = store_of(tmp_path / "store")
    b = bucket()
    for _ in range(4):
        write_delete(b)
    commit(b)
    plan = b.begin_flush()
    assert plan is not None
    (part,) = plan.prepare()
    merged = plan.merge(part)
    stored = b.flush_ends(merged)
    assert begin_purge(b, {MINE: Purge(2, 2, 1)}, AGES, VERY_OLD) == {MINE: 2}
    store.put_flush(merged.blocks, stored, {})
    ends = [head.end for head in store.heads(MINE)]
    store.replace([Replacement(MINE, ends, [(end, d) for _, end, d in merged.blocks], 2)])
    row = store.partitions()[MINE]
    assert (row.stored_high, row.purge_seqno) == (4, 2)  # type: ignore[union-attr]
    store.close()
