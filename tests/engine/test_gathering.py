"""Small writes that become one entry of the tail: what each was told holds, for readers, producers, cuts and recovery."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.buckets import bucket, commit, partition_rows
from tests.engine.test_producers import NAME, P, Q, World
from tests.raw import all_cells, all_rows
from upr.engine import tail as tail_module
from upr.engine.bucket import Bucket
from upr.engine.follower import Follower
from upr.engine.partitions import ACTIVE, DEAD, Partitions
from upr.engine.recovery import recover
from upr.engine.streams import FollowOptions, Started, StartRequest
from upr.engine.tail import GATHER_MICROS, MARK_EVERY, SMALL_BYTES, WINDOW_BYTES, Shared
from upr.storage.journal import Commit
from upr_protocol.block import (
    FurtherColumn,
    block_partitions,
    block_seqnos,
    build_block,
    make_runs,
    sealed,
)
from upr_protocol.errors import StorageFailedError
from upr_protocol.flow import CreditWindow
from upr_protocol.limits import BLOCK_COLUMN_BYTES
from upr_protocol.wire.codec import decode_block


def put(to: Bucket, key: bytes, value: bytes | None = b"v", now: int = 1) -> None:
    to.write(build_block([key], [value]), b"", None, 0, now)


def taken(of: Bucket) -> Commit:
    """Take the next commit, and have it done."""
    found = of.take_commit()
    assert found is not None
    of.commit_done(found)
    return found


def follow(of: Bucket, *, memory: bool = False) -> Follower:
    follower = Follower(of, FollowOptions(memory=memory), CreditWindow(1 << 23), lambda: None)
    of.add_follower(follower)
    answers = follower.start([StartRequest(p, None, 0, None) for p in range(1024)])
    assert all(isinstance(answer, Started) for answer in answers)
    return follower


def blocks_of(follower: Follower) -> list[bytes]:
    found: list[bytes] = []
    while (frame := follower.next_frame()) is not None:
        found += frame.blocks
        follower.credit.give_back(frame.cost)
    return found


def rows_of(blocks: list[bytes]) -> list[Any]:
    """The rows of each partition, in their order."""
    return sorted((tuple(row) for row in all_rows(map(decode_block, blocks))), key=lambda r: r[0])


def dates_of(blocks: list[bytes]) -> dict[tuple[int, int], int]:
    """When each row was committed, by partition and seqno."""
    dates: dict[tuple[int, int], int] = {}
    for block in map(decode_block, blocks):
        told = (
            np.frombuffer(block.times, "<i8")
            if block.times
            else np.repeat(block.runs["time"], block.runs["count"])
        )
        places = zip(block_partitions(block), block_seqnos(block), strict=True)
        dates |= dict(zip(places, told.tolist(), strict=True))
    return dates


def test_what_gathers_is_one_entry_one_block_and_one_part_of_a_frame() -> None:
    b = bucket()
    rng = random.Random(1)
    rows = [
        (b"%d" % rng.randrange(40), rng.choice([None, b"", b"x" * rng.randrange(9)]))
        for _ in range(300)
    ]
    for at in range(0, 300, 3):
        keys, values = zip(*rows[at : at + 3], strict=True)
        b.write(build_block(keys, values), b"", None, 0, 1)
    (entry,) = taken(b).entries
    whole = bucket()
    keys, values = zip(*rows, strict=True)
    whole.write(build_block(keys, values), b"", None, 0, 1)
    (expected,) = taken(whole).entries
    assert entry.block == expected.block, "the rows are those of one write of all of them"
    assert blocks_of(follow(b)) == [entry.block]


def test_a_large_write_is_an_entry_of_its_own_and_keeps_its_checksum() -> None:
    b = bucket()
    put(b, b"before")
    large = build_block([b"large"], [b"v" * SMALL_BYTES])
    b.write(large, b"", None, 0, 1)
    put(b, b"behind")
    entries = taken(b).entries
    assert [decode_block(entry.block).keys for entry in entries] == [b"before", b"large", b"behind"]
    assert decode_block(entries[1].block).columns_crc == large.columns_crc


def test_an_entry_has_at_most_the_columns_of_a_block() -> None:
    b = bucket()
    for number in range(2 * BLOCK_COLUMN_BYTES // SMALL_BYTES + 5):
        put(b, b"%d" % number, b"v" * (SMALL_BYTES - 100))
    sizes = [decode_block(entry.block).column_bytes for entry in taken(b).entries]
    assert len(sizes) == 3
    assert max(sizes) <= BLOCK_COLUMN_BYTES


def test_an_entry_has_no_more_empty_cells_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail_module, "BLOCK_COLUMN_BYTES", 30_000)
    b = bucket()
    rows = [(b"%d" % row, b"") for row in range(100)]
    plain = build_block([key for key, _ in rows], [value for _, value in rows])
    cells = b"".join(end.to_bytes(4, "little") for end in (0, 1)), b"c"
    single = build_block([b"k"], [b"v"])
    for number in (1, 2, 3, 4, 5, 6):
        b.write(plain, b"", None, 0, 1)
        of_it = tuple(FurtherColumn(id_, *cells) for id_ in range(number, 2 * number))
        b.write(sealed(replace(single, further=of_it)), b"", None, 0, 1)
        promised = b.tail.bytes
    b.tail.close_open()
    assert b.tail.bytes <= promised, "room for the entry was taken before"
    blocks = [decode_block(entry.block) for entry in taken(b).entries]
    assert max(block.column_bytes for block in blocks) <= 30_000
    assert len(blocks) == 2
    # Columns 1; 2 and 3; 3 to 5; and so on.
    assert sum(len(of_row) for block in blocks for of_row in all_cells(block)) == 21


def test_empty_cells_of_an_entry_that_is_closed_do_not_count() -> None:
    b = bucket()
    cells = b"".join(end.to_bytes(4, "little") for end in (0, 1)), b"c"
    single = build_block([b"k"], [b"v"])
    further = tuple(FurtherColumn(id_, *cells) for id_ in range(1, 17))
    b.write(sealed(replace(single, further=further)), b"", None, 0, 1)
    b.tail.close_open()
    before = b.tail.bytes
    # With 16 columns these rows would be large enough for an entry of their own.
    b.write(build_block([b"%d" % row for row in range(150)], [b""] * 150), b"", None, 0, 1)
    put(b, b"behind")
    assert b.tail.bytes - before < 150 * (4 + 2 * 40 + 40)
    assert len(taken(b).entries) == 2


def test_a_cut_ends_a_gathering_and_is_exact() -> None:
    b = bucket()
    put(b, b"k")
    cut = b.create_cut("cut", range(1024), 100, 1)
    put(b, b"k")
    first, second = (decode_block(entry.block) for entry in taken(b).entries)
    partition = int(first.runs["partition"][0])
    assert cut.seqnos[partition] == 1 == first.runs["end_seqno"][0] == second.runs["start_seqno"][0]
    plan = b.begin_flush()
    assert plan is not None
    assert len(plan.entries) == 1, "a flush does not cross it"


def test_a_follower_of_memory_ends_a_gathering_and_misses_nothing() -> None:
    b = bucket()
    follower = follow(b, memory=True)
    for expected in (1, 2, 3):
        put(b, b"k")
        assert [row[1] for row in rows_of(blocks_of(follower))] == [expected]
    put(b, b"k")
    put(b, b"k")
    assert [row[1] for row in rows_of(blocks_of(follower))] == [4, 5]
    assert len(taken(b).entries) == 4


def test_a_stream_that_starts_at_the_end_gets_what_gathers_later() -> None:
    b = bucket()
    put(b, b"k")
    partition = int(np.flatnonzero(b.partitions.high)[0])
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    newest = int(b.partitions.newest_id[partition])
    follower.start([StartRequest(partition, newest, 1, newest)])
    put(b, b"k")
    commit(b)
    assert [row[1] for row in rows_of(blocks_of(follower))] == [2]


# Producers


def restarted(world: World, commits: list[Commit]) -> World:
    """The same partitions after a crash that left these commits."""
    found = recover(
        partition_rows(),
        lambda _: (),
        commits,
        proven=None,
        new_id=iter(range(5000, 9000)).__next__,
        now=5,
    )
    again = World()
    again.bucket = Bucket(world.bucket.identity, found.partitions, found.next_commit, proven=False)
    again.bucket.recovered(found.entries)
    again.open()
    return again


@pytest.mark.parametrize("crash", [False, True])
def test_each_write_of_an_entry_is_known_with_its_own_seqnos(crash: bool) -> None:
    world = World()
    for number, partitions in ((1, [P]), (2, [P, Q]), (3, [Q])):
        world.write(number, partitions)
    other = world.bucket.open_producer(b"other", 0)
    rows = sealed(replace(build_block([b"k"], [b"v"]), runs=make_runs([Q], [1])))
    world.bucket.write(rows, b"other", other, 2, 1, {})
    found = taken(world.bucket)
    (entry,) = found.entries
    assert [(write.producer, write.number) for write in entry.writes] == [
        (NAME, 1), (NAME, 2), (NAME, 3), (b"other", 2),
    ]  # fmt: skip
    if crash:
        world = restarted(world, [found])
    world.open()
    told = {}
    for number, partitions in ((1, [P]), (2, [P, Q]), (3, [Q])):
        written = world.write(number, partitions)
        assert written.duplicate
        told[number] = written.runs[["partition", "start_seqno", "end_seqno"]].tolist()
    assert told == {1: [(P, 0, 1)], 2: [(P, 1, 2), (Q, 0, 1)], 3: [(Q, 1, 2)]}
    assert not world.write(4, [P]).duplicate


def test_a_part_that_was_refused_is_not_in_the_entry_and_comes_again() -> None:
    world = World()
    world.write(1, [P, Q])
    world.state(Q, DEAD)
    assert set(world.write(2, [P, Q]).refused) == {Q}
    world.state(Q, ACTIVE)
    found = taken(world.bucket)
    world = restarted(world, [found])
    written = world.write(2, [P, Q])
    assert not written.duplicate
    assert written.runs[["partition", "start_seqno", "end_seqno"]].tolist() == [
        (P, 1, 2),
        (Q, 1, 2),
    ]
    assert int(world.bucket.partitions.high[P]) == 2


def test_a_write_is_known_while_its_entry_still_gathers() -> None:
    world = World()
    world.write(1, [P])
    world.open()
    assert world.write(1, [P]).duplicate
    world.write(2, [P])
    assert len(taken(world.bucket).entries) == 2


def test_an_entry_of_which_a_partition_is_stored_keeps_the_writes_in_the_others() -> None:
    world = World()
    world.write(1, [P])
    world.write(2, [Q])
    found = taken(world.bucket)
    rows = partition_rows()
    rows[P] = replace(rows[P], stored_high=1, complete=1, horizon=1)
    result = recover(
        rows,
        lambda _: (),
        [found],
        proven=None,
        new_id=iter(range(5000, 9000)).__next__,
        now=5,
    )
    (entry,) = result.entries
    assert entry.runs["partition"].tolist() == [Q]
    assert [write.number for write in entry.writes] == [2]
    assert Partitions.from_rows(list(rows.values())).stored[P] == 1


# Windows


def many_commits(count: int, apart: int) -> Bucket:
    b = bucket()
    for number in range(count):
        put(b, b"key %d" % (number % 700), b"%d" % number * 9, now=1 + number * apart)
        commit(b)
    return b


@pytest.mark.parametrize("apart", [0, 1, GATHER_MICROS])
def test_who_is_behind_gets_single_commits_as_bulk(
    apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = many_commits(3000, apart)
    blocks = blocks_of(follow(b))
    monkeypatch.setattr(tail_module, "join_entries", lambda _: None)
    b.tail._windows.clear()
    b.tail.shared = Shared()
    single = blocks_of(follow(b))
    assert len(single) == 3000
    assert len(blocks) < 3000 / 7
    assert max(map(len, blocks)) <= WINDOW_BYTES
    assert rows_of(blocks) == rows_of(single)
    assert dates_of(blocks) == dates_of(single)


@pytest.mark.parametrize("end", ["until_exact", "until_seqno"])
def test_a_window_does_not_reach_beyond_the_end_of_a_stream(end: str) -> None:
    b = many_commits(3000, 1)
    # One without an end, whose windows do.
    assert len(blocks_of(follow(b))) < 3000 / 7
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 23), lambda: None)
    ends = {p: int(high // 2) for p, high in enumerate(b.partitions.high) if high > 1}
    for p, until in ends.items():
        follower.start([replace(StartRequest(p, None, 0, None), **{end: until})])  # type: ignore[arg-type]
    assert {row[0]: row[1] for row in rows_of(blocks_of(follower))} == ends
    assert {ended.why.reason for ended in follower.take_ended()} == {"FINISHED"}


def test_a_window_that_changed_in_memory_is_not_made() -> None:
    b = many_commits(900, 1)
    entry = b.tail[3]
    entry.data = entry.data[:-20] + bytes([entry.data[-20] ^ 1]) + entry.data[-19:]
    assert b.tail.window(0) is None
    assert b.tail.window(b.tail._bounds[1]) is not None


@pytest.mark.parametrize("every", [1, 30])
def test_a_window_has_no_more_empty_cells_than_bytes(every: int) -> None:
    b = bucket()
    further = tuple(FurtherColumn(id_, bytes(4 * 50) + b"\1\0\0\0", b"c") for id_ in range(1, 17))
    rows = build_block([b"%d" % row for row in range(50)], [b""] * 50, np.zeros(50, "u4"))
    for number in range(900):
        cells = further if number % every == 0 else ()
        b.write(sealed(replace(rows, further=cells)), b"", None, 0, 1)
        commit(b)
    assert len(b.tail._bounds) > 1
    window = b.tail.window(0)
    assert (window is not None) == (every == 1)


def test_a_window_goes_with_its_entries() -> None:
    b = many_commits(900, 1)
    window = b.tail.window(0)
    assert window is not None
    b.tail.drop_before(5)
    assert b.tail.window(0) is None
    assert b.tail.window(window[1]) is not None
    # Between the oldest entry and the first window that is whole.
    oldest = b.tail[5].runs[0]
    at = np.array([oldest["partition"]], np.int64)
    for seqno in (oldest["start_seqno"], 0):
        assert [entry for entry, _ in b.tail.find(at, np.array([seqno], np.uint64))] == [5]


def test_readers_begin_where_each_partition_goes_on() -> None:
    b = bucket()
    for number in range(3 * MARK_EVERY):
        # Of its own, so that it is an entry: partition 1 in all, 2 up to the middle, 3 in the last.
        of = [1, *([2] * (number < 400)), *([3] * (number == 3 * MARK_EVERY - 1))]
        rows = build_block(
            [b"%d-%d" % (partition, number) for partition in of],
            [bytes(SMALL_BYTES)] * len(of),
            np.array(of, "u4"),
        )
        b.write(rows, b"", None, 0, 1)
        commit(b)
    partitions = np.array([1] * 6 + [2] * 4 + [3], np.int64)
    seqnos = np.array([0, 1, 255, 300, 700, 768, 0, 255, 399, 400, 0], np.uint64)
    found = list(b.tail.find(partitions, seqnos))
    assert sum(len(those) for _, those in found) == len(partitions)
    at = {(int(p), int(seqno)): 0 for p, seqno in zip(partitions, seqnos, strict=True)}
    for p, seqno in at:
        [(at[p, seqno], _)] = b.tail.find(np.array([p]), np.array([seqno], np.uint64))
    together = sorted((entry, p) for entry, those in found for p in those.tolist())
    assert together == sorted((entry, p) for (p, _), entry in at.items())
    firsts = {key: key[1] if key[0] < 3 else b.tail.end - 1 for key in at}
    firsts[1, 768] = firsts[2, 400] = b.tail.end
    for key, entry in at.items():
        assert firsts[key] - 2 * MARK_EVERY < entry <= firsts[key], key


def no_memory(*_: object) -> Any:
    raise MemoryError


def test_a_write_for_which_there_is_no_memory_is_not_numbered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = bucket()
    put(b, b"first")
    with monkeypatch.context() as patch:
        patch.setattr(tail_module, "join_blocks", no_memory)
        with pytest.raises(MemoryError):
            # What gathered is made an entry before it.
            put(b, b"second", now=2 + GATHER_MICROS)
    assert b.partitions.high.sum() == 1
    put(b, b"second", now=3 + GATHER_MICROS)
    commit(b)
    runs = [run for entry in b.tail.range(0, b.tail.end) for run in entry.runs.tolist()]
    assert len(runs) == b.partitions.high.sum() == 2


def test_nothing_is_numbered_above_what_was_numbered_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b, told = bucket(), list[StorageFailedError]()

    def fail(error: StorageFailedError) -> None:
        told.append(error)
        b.fail(error)

    b.on_failure = fail
    with monkeypatch.context() as patch:
        patch.setattr(b.tail, "_grow", no_memory)
        with pytest.raises(MemoryError):
            put(b, b"first")
    with pytest.raises(StorageFailedError):
        put(b, b"second")
    assert [error.message for error in told] == ["a write was numbered and not kept: MemoryError()"]
    assert b.partitions.high.sum() == 1
