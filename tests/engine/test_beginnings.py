"""Streams that begin now or at a time: nothing that was committed later is missed."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.buckets import MINE, OTHER, bucket, commit, write
from tests.engine.test_cuts import entry
from tests.raw import all_rows
from tests.storage.stored_blocks import store_of
from upr.engine.bucket import Bucket, FlushPlan
from upr.engine.follower import Beginnings, Follower
from upr.engine.partitions import DurableMarkers
from upr.engine.streams import (
    Answer,
    FollowOptions,
    Refused,
    RolledBack,
    Started,
    StartRequest,
)
from upr.engine.tail import GATHER_MICROS, MARK_EVERY
from upr.storage.compact import FlushSlice
from upr.storage.read import read_blocks
from upr.storage.search import StoredBeginning, search_time
from upr.storage.store import Store
from upr_protocol.block import build_block, make_runs, sealed
from upr_protocol.errors import DataDamagedError
from upr_protocol.flow import CreditWindow
from upr_protocol.wire.codec import decode_block

WINDOW = 1 << 22
APART = GATHER_MICROS + 1
"""Microseconds: writes so far apart are dated each by itself."""


def following(
    of: Bucket, request: StartRequest, *, memory: bool = False
) -> tuple[Follower, Answer]:
    follower = Follower(of, FollowOptions(memory=memory), CreditWindow(WINDOW), lambda: None)
    of.add_follower(follower)
    (answer,) = follower.start([request])
    return follower, answer


def from_now(partition: int = MINE, **options: object) -> StartRequest:
    return replace(StartRequest(partition, None, 0, None, from_now=True), **options)  # type: ignore[arg-type]


def seqnos(follower: Follower, store: Store | None = None) -> list[int]:
    """What the stream is sent until there is nothing more."""
    found = []
    while True:
        frame = follower.next_frame()
        if frame is not None:
            found += [row[1] for row in all_rows(map(decode_block, frame.blocks))]
            follower.credit.give_back(frame.cost)
            continue
        wanted = follower.next_read()
        if wanted is None:
            return found
        assert store is not None
        follower.feed(read_blocks(store, *wanted))


@pytest.mark.parametrize("memory", [False, True])
def test_from_now_is_the_newest_durable_marker(memory: bool) -> None:
    b = bucket()
    write(b, MINE)
    write(b, MINE)
    commit(b)
    write(b, MINE)
    follower, answer = following(b, from_now(), memory=memory)
    assert isinstance(answer, Started)
    assert (answer.start_seqno, answer.high_seqno) == (2, 3)
    assert answer.log is b.partitions.logs[MINE]
    assert seqnos(follower) == ([3] if memory else [])
    write(b, MINE)
    commit(b)
    assert seqnos(follower) == ([4] if memory else [3, 4])


def test_from_now_of_an_empty_partition_is_0_and_is_told() -> None:
    _, answer = following(bucket(), from_now())
    assert isinstance(answer, Started)
    assert answer.start_seqno == 0


def test_another_start_is_not_told_where_it_begins() -> None:
    b = bucket()
    write(b, MINE)
    _, answer = following(b, StartRequest(MINE, None, 0, None))
    assert isinstance(answer, Started)
    assert answer.start_seqno is None


def test_from_now_inside_a_stretch_is_the_marker_below_it() -> None:
    b = bucket()
    b.recovered([entry((MINE, 0, 2, 2)), entry((MINE, 2, 4, 6), (OTHER, 0, 3, 3))])
    _, answer = following(b, from_now())
    assert isinstance(answer, Started)
    assert (answer.start_seqno, answer.high_seqno) == (2, 4)
    b.recovered([entry((MINE, 4, 6, 6))])
    _, answer = following(b, from_now())
    assert isinstance(answer, Started)
    assert answer.start_seqno == 6


@pytest.mark.parametrize("has", [{"seqno": 1}, {"failover_id": MINE + 1}, {"data_id": MINE + 1}])
@pytest.mark.parametrize("chosen", [{"from_now": True}, {"from_time": 5}])
def test_who_has_something_does_not_choose(has: dict[str, int], chosen: dict[str, int]) -> None:
    b = bucket()
    write(b, MINE)
    commit(b)
    request = replace(StartRequest(MINE, None, 0, None), **has, **chosen)  # type: ignore[arg-type]
    assert not request.needs_search
    follower, answer = following(b, request)
    assert isinstance(answer, Refused)
    assert (answer.error.reason, answer.error.retriable) == ("INVALID_ARGUMENT", False)
    assert seqnos(follower) == []


def test_the_ends_are_looked_at_from_where_it_begins() -> None:
    b = bucket()
    for _ in range(5):
        write(b, MINE)
    commit(b)
    for end in ({"until_now": True}, {"until_seqno": 3}, {"until_exact": 5}):
        follower, answer = following(b, from_now(**end))
        assert isinstance(answer, Started)
        assert [one.why.reason for one in follower.take_ended()] == ["FINISHED"], end
    _, answer = following(b, from_now(until_exact=4))
    assert isinstance(answer, Refused)
    assert answer.error.reason == "SNAPSHOT_GONE"


@pytest.mark.parametrize(("found", "begins"), [(2, 0), (3, 0), (4, 4), (5, 5)])
def test_from_a_time_nobody_begins_between_0_and_the_purge_seqno(found: int, begins: int) -> None:
    b = bucket()
    for _ in range(5):
        write(b, MINE)
    commit(b)
    b.partitions.purge[MINE] = 4
    request = StartRequest(MINE, None, 0, None, from_time=0, stored=StoredBeginning(found, True))
    follower, answer = following(b, request)
    assert isinstance(answer, Started)
    assert (answer.start_seqno, answer.purge_seqno) == (begins, 4)
    # As after a lost call, with what it was told and nothing more.
    resumed = StartRequest(MINE, MINE + 1, begins, MINE + 1 if begins else None)
    (answer,) = follower.start([resumed])
    assert isinstance(answer, Started)
    (again,) = Follower(b, FollowOptions(), CreditWindow(9), lambda: None).start(
        [StartRequest(MINE, MINE + 1, 2, MINE + 1)]
    )
    assert isinstance(again, RolledBack)


def test_a_search_that_came_upon_damage_is_a_refusal() -> None:
    b = bucket()
    error = DataDamagedError("a bit has flipped")
    _, answer = following(b, StartRequest(MINE, None, 0, None, from_time=0, stored=error))
    assert isinstance(answer, Refused)
    assert answer.error is error


@pytest.mark.parametrize("seed", range(40))
def test_durable_markers_are_the_complete_ones(seed: int) -> None:
    rng = random.Random(seed)
    high: dict[int, int] = dict.fromkeys(range(4), 0)
    horizon = dict(high)
    expected = dict(high)
    markers, durable = DurableMarkers(*np.zeros((2, 1024), np.uint64)), np.zeros(1024, np.uint64)
    for _ in range(30):
        tables = []
        for _ in range(rng.randint(1, 4)):
            runs = []
            for partition in sorted(rng.sample(range(4), rng.randint(1, 3))):
                end = high[partition] + rng.randint(1, 5)
                # A stretch goes on until its horizon is reached, sometimes a little further.
                told = max(end, horizon[partition]) + rng.choice([0, 0, 0, 4]) * (seed % 3 > 0)
                runs.append((partition, high[partition], end, rng.choice([end, told])))
                high[partition] = end
                horizon[partition] = max(horizon[partition], runs[-1][3])
                if horizon[partition] == end:
                    expected[partition] = end
            columns = [list(column) for column in zip(*runs, strict=True)]
            tables.append(make_runs(columns[0], 1, *columns[1:]))
        markers.became_durable(tables, durable)
        assert durable[:4].tolist() == list(high.values())
        assert {p: int(markers.seqno[p]) for p in range(4)} == expected


# From a time


def put(to: Bucket, partition: int, rows: int, now: int) -> None:
    block = sealed(
        replace(
            build_block([b"%d" % random.getrandbits(2) for _ in range(rows)], [b"v"] * rows),
            runs=make_runs([partition], [rows]),
        )
    )
    to.write(block, b"", None, 0, now)


@dataclass
class World:
    """A bucket and its store, changed step by step; a flush can stop between any two of them."""

    store: Store
    rng: random.Random
    bucket: Bucket = field(default_factory=bucket)
    now: int = 100
    times: dict[int, list[int]] = field(default_factory=lambda: {MINE: [], OTHER: []})
    plan: FlushPlan | None = None
    parts: list[FlushSlice] = field(default_factory=list)

    def step(self) -> None:
        kind = self.rng.choice(["write"] * 6 + ["commit"] * 3 + ["flush", "slice", "many"])
        if kind in ("write", "many"):
            for _ in range(MARK_EVERY // 2 if kind == "many" else 1):
                self.now += self.rng.choice([0, 1, 5]) * APART
                partition, rows = self.rng.choice([MINE, MINE, OTHER]), self.rng.randint(1, 3)
                put(self.bucket, partition, rows, self.now)
                self.times[partition] += [self.now] * rows
        elif kind == "commit":
            commit(self.bucket)
        elif self.plan is None:
            self.plan = self.bucket.begin_flush()
            self.parts = self.plan.prepare() if self.plan else []
        elif self.parts:
            merged = self.plan.merge(self.parts.pop(0))
            self.store.put_flush(merged.blocks, self.bucket.flush_ends(merged), {})
            self.bucket.slice_stored(merged)
        else:
            self.plan = None
            self.bucket.end_flush(complete=True)

    def first_at(self, partition: int, time: int) -> int:
        """The seqno right below the first mutation at or after a time; the high seqno where there is none."""
        times = self.times[partition]
        return next((i for i, at in enumerate(times) if at >= time), len(times))


@pytest.mark.parametrize("seed", range(4))
def test_from_a_time_misses_nothing_and_is_exact_without_a_flush(seed: int, tmp_path: Path) -> None:
    random.seed(seed)
    world = World(store_of(tmp_path / "store"), random.Random(seed))
    b = world.bucket
    for _ in range(40):
        world.step()
        partition = world.rng.choice([MINE, OTHER])
        time = 100 + world.rng.randint(-5 * APART, world.now + 5 * APART) // APART * APART
        (found,) = search_time(world.store, [(partition, time)])
        assert isinstance(found, StoredBeginning)
        stored = b.partitions.stored.copy()
        for _ in range(world.rng.choice([0, 0, 0, 2, 5])):
            world.step()
        request = StartRequest(partition, None, 0, None, from_time=time, stored=found)
        follower, answer = following(b, request, memory=bool(seed % 2))
        assert isinstance(answer, Started)
        begin = answer.start_seqno
        assert begin is not None
        exact = min(world.first_at(partition, time), int(b.markers.seqno[partition]))
        if b.partitions.stored[partition] == stored[partition] == 0:
            assert begin == exact
        elif found.found:
            # Rows that were superseded in the stored blocks may have been the first.
            assert begin == min(found.seqno, int(b.markers.seqno[partition]))
        else:
            assert begin <= exact
        shown = b.partitions.high if seed % 2 else b.partitions.durable
        kept = set(seqnos(follower, world.store))
        assert all(seqno > begin for seqno in kept)
        # The newest row is never superseded.
        newest = int(shown[partition])
        assert newest in kept or newest <= begin
        b.remove_follower(follower)
        whole, _ = following(b, StartRequest(partition, None, 0, None), memory=True)
        below = [seqno for seqno in seqnos(whole, world.store) if seqno <= begin]
        assert all(world.times[partition][seqno - 1] < time for seqno in below)
        b.remove_follower(whole)
    world.store.close()


def test_what_was_flushed_between_search_and_start_makes_it_begin_earlier(tmp_path: Path) -> None:
    world = World(store_of(tmp_path / "store"), random.Random(1))
    b = world.bucket
    put(b, MINE, 2, 10)
    b.tail.close_open()
    put(b, MINE, 2, 20)
    (found,) = search_time(world.store, [(MINE, 15)])
    assert found == StoredBeginning(0, False)
    commit(b)
    assert Beginnings(b.markers.seqno, b.tail).at_time(MINE, 15, found) == 2
    plan = b.begin_flush()
    assert plan is not None
    for part in plan.prepare():
        merged = plan.merge(part)
        world.store.put_flush(merged.blocks, b.flush_ends(merged), {})
        b.slice_stored(merged)
    # The tail still holds it.
    assert Beginnings(b.markers.seqno, b.tail).at_time(MINE, 15, found) == 2
    b.end_flush(complete=True)
    assert Beginnings(b.markers.seqno, b.tail).at_time(MINE, 15, found) == 0
    (again,) = search_time(world.store, [(MINE, 15)])
    assert isinstance(again, StoredBeginning)
    assert Beginnings(b.markers.seqno, b.tail).at_time(MINE, 15, again) >= 2
    world.store.close()


def test_rows_that_gathered_are_dated_alike_and_none_is_missed(tmp_path: Path) -> None:
    world = World(store_of(tmp_path / "store"), random.Random(1))
    b = world.bucket
    begin = 1_000_000
    for step in (0, GATHER_MICROS, GATHER_MICROS + 1):
        put(b, MINE, 2, begin + step)
    commit(b)
    assert [entry.time - begin for entry in b.tail.range(0, b.tail.end)] == [GATHER_MICROS, APART]
    (found,) = search_time(world.store, [(MINE, 0)])
    assert isinstance(found, StoredBeginning)
    at_time = Beginnings(b.markers.seqno, b.tail).at_time
    assert [at_time(MINE, begin + step, found) for step in (0, 1, APART)] == [0, 0, 4]
    world.store.close()


def test_a_time_that_is_to_come_is_now() -> None:
    b = bucket()
    write(b, MINE)
    commit(b)
    write(b, MINE)
    nothing = StoredBeginning(0, False)
    beginnings = Beginnings(b.markers.seqno, b.tail)
    assert beginnings.at_time(MINE, 2**64 - 1, nothing) == b.markers.seqno[MINE] == 1
    assert beginnings.at_time(OTHER, 2**64 - 1, nothing) == 0
