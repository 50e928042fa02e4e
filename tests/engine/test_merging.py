"""Which blocks are merged: never across a pin or an incomplete stretch, and neither too often nor too seldom."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.storage.stored_blocks import heads_of
from upr.engine.compaction import (
    BLOCK_COST,
    DIFFERENT_TAILS,
    FAN_IN,
    JOIN_BYTES,
    JOINED_BYTES,
    NEW_ROWS_MIN,
    Backlog,
    hardly_repeats,
    has_few_new,
    plan_join,
    plan_merge,
    plan_reclaim,
    plan_whole,
    segments,
    small_ones,
)
from upr.storage.blocks import BlockHashes, BlockRange, Head, last_complete
from upr_protocol.limits import PARTITIONS

P = 5


def chosen(heads: Sequence[Head], pinned: Sequence[int] = ()) -> tuple[int, int] | None:
    found = plan_merge(P, heads, pinned)
    return None if found is None else (found.start, found.end)


def test_two_equal_neighbours_are_merged_and_one_alone_is_not() -> None:
    assert chosen(heads_of(10)) is None
    assert chosen(heads_of(10, 20)) == (0, 20)


def test_what_is_larger_than_all_behind_it_is_left_alone() -> None:
    large, *small = heads_of(*range(10, 20 + 10 * FAN_IN, 10))
    large = large._replace(size=1 << 20, plain=1 << 20, rows=1000)
    assert chosen([large, *small[:-1]]) is None
    assert chosen([large, *small]) == (10, 10 + 10 * FAN_IN)


def test_as_many_new_rows_are_enough_however_few_bytes_they_have() -> None:
    large, *small = heads_of(20, 30, 39, 40)
    large = large._replace(size=1 << 20, plain=1 << 20)
    assert chosen([large, *small[:-1]]) is None
    assert chosen([large, *small]) == (0, 40)
    few, *more = heads_of(1, NEW_ROWS_MIN, NEW_ROWS_MIN + 1)
    few = few._replace(size=1 << 20, plain=1 << 20)
    assert chosen([few, *more[:-1]]) is None
    assert chosen([few, *more]) == (0, NEW_ROWS_MIN + 1)


def test_what_is_new_is_reclaimed_with_all_that_may_be_merged_with_it() -> None:
    heads = heads_of(10, 20, 30, 40)

    def found(reclaimed: int, pinned: Sequence[int] = (), count: int = 4) -> object:
        one = plan_reclaim(P, heads[:count], pinned, reclaimed)
        return None if one is None else (one.start, one.end)

    assert found(0) == found(30) == (0, 40)
    assert found(40) is None
    assert found(0, count=0) is found(0, count=1) is None
    assert found(0, [20]) == (0, 20)
    assert found(20, [20]) == (20, 40)
    assert found(30, [30]) is None, "one block is all that may be merged"
    heads[3] = heads[3]._replace(horizon=50)
    assert found(0) == (0, 30)


def test_few_new_rows_are_a_hundredth() -> None:
    one = BlockRange(P, tuple(heads_of(990, 999, 1000)))
    assert has_few_new(one, 999)
    assert not has_few_new(one, 990)


def test_no_merge_crosses_a_pin() -> None:
    heads = heads_of(10, 20, 30, 40, 50)
    assert chosen(heads, [20]) == (0, 20)
    assert chosen(heads, [10, 20]) == (20, 50)
    assert chosen(heads, [10, 20, 30, 40]) is None
    # A pin where nothing ends, and one beyond everything or at 0.
    assert chosen(heads, [25]) == (0, 20)
    assert chosen(heads, [50, 60]) == chosen(heads, [0]) == (0, 50)


@pytest.mark.parametrize("pin", range(1, 60, 3))
@pytest.mark.parametrize("other", [7, 30, 44])
def test_segments_tile_the_blocks_and_no_pin_lies_inside_one_of_several(
    pin: int, other: int
) -> None:
    heads = heads_of(10, 20, 30, 40, 50)
    pins = sorted({pin, other})
    found = list(segments(heads, pins))
    assert [head for segment in found for head in segment] == heads
    for segment in found:
        if len(segment) > 1:
            assert not any(segment[0].start < at < segment[-1].end for at in pins)


def test_no_merge_goes_past_the_last_complete_marker() -> None:
    # The last two blocks are the beginning of a stretch that ends at 70.
    heads = heads_of(10, 20, 30, 40, horizons={30: 70, 40: 70})
    assert last_complete(heads) == 20
    assert chosen(heads) == (0, 20)
    assert plan_whole(P, heads, []) is not None
    whole = plan_whole(P, heads, [])
    assert whole is not None
    assert whole.end == 20
    assert chosen(heads_of(10, 20, 30, horizons={10: 70, 20: 70, 30: 70})) is None
    assert plan_whole(P, heads_of(10, horizons={10: 70}), []) is None


def test_a_marker_below_an_earlier_horizon_is_not_complete() -> None:
    # The block that ends at 20 claims to be complete, but the one before it lacks rows that lie up to 30.
    heads = heads_of(10, 20, 30, 40, horizons={10: 30, 40: 90})
    assert last_complete(heads) == 30
    assert last_complete(heads[:2]) == 0
    assert chosen(heads) == (0, 30)
    assert plan_whole(P, heads[:2], []) is None


def test_what_begins_above_0_is_no_whole() -> None:
    heads = heads_of(10, 20, 30)
    whole = plan_whole(P, heads, [20])
    assert whole is not None
    assert (whole.start, whole.end) == (0, 20)
    assert plan_whole(P, heads[1:], []) is None
    assert plan_whole(P, [], []) is None


def test_settled_blocks_count_as_one() -> None:
    heads = heads_of(10, 20, 30)
    assert plan_merge(P, heads, [], [(0, 30)]) is None
    found = plan_merge(P, heads, [], [(0, 20)])
    # What was compared is twice as large as what is behind it.
    assert found is None
    found = plan_merge(P, heads_of(10, 20, 30, 40), [], [(0, 20)])
    assert found is not None
    assert (found.start, found.end) == (0, 40)


def joined(heads: Sequence[Head]) -> tuple[int, int] | None:
    found = small_ones(BlockRange(P, tuple(heads)))
    return None if found is None else (found.start, found.end)


def test_small_neighbours_are_joined_where_there_are_enough_of_them() -> None:
    small = heads_of(*range(10, 10 + 20 * FAN_IN, 10))
    assert joined(small) == (0, small[-1].end)
    assert joined(small[: FAN_IN - 1]) is None
    large = [head._replace(size=JOIN_BYTES, plain=JOIN_BYTES) for head in small]
    assert joined(large) is None
    assert joined([*small[: FAN_IN - 1], *large[FAN_IN - 1 : FAN_IN], *small[FAN_IN:]]) == (
        small[FAN_IN].start,
        small[-1].end,
    )
    packed = [head._replace(plain=JOIN_BYTES) for head in small]
    assert joined(packed) is None


def test_what_is_joined_has_a_limit() -> None:
    fitting = JOINED_BYTES // (JOIN_BYTES - 1)
    assert joined(heads_of(*range(1, 3 * fitting), size=JOIN_BYTES - 1)) == (0, fitting)


def test_small_blocks_behind_those_that_end_inside_a_stretch_are_joined() -> None:
    small = heads_of(*range(10, 10 + 30 * FAN_IN, 10))
    begun = [head._replace(horizon=10**6) for head in small[:FAN_IN]]
    large = small[FAN_IN]._replace(size=JOIN_BYTES, plain=JOIN_BYTES)
    behind = small[FAN_IN + 1 :]
    assert joined([*begun, large]) is None
    assert joined([*begun, large, *behind]) == (behind[0].start, behind[-1].end)


def test_only_what_counts_as_compacted_is_joined_and_never_across_a_pin() -> None:
    heads = heads_of(*range(10, 10 + 20 * FAN_IN, 10))
    end = heads[-1].end

    def joined_of(settled: Sequence[tuple[int, int]], *pinned: int) -> tuple[int, int] | None:
        found = plan_join(P, heads, pinned, settled)
        return None if found is None else (found.start, found.end)

    assert joined_of([(0, end)]) == (0, end)
    assert joined_of([]) is None
    middle = heads[FAN_IN - 1].end
    assert joined_of([(0, middle)]) == (0, middle)
    assert joined_of([(middle, end)]) == (middle, end)
    assert joined_of([(0, end)], middle) == (0, middle)
    assert joined_of([(0, end)], *(head.end for head in heads)) is None


def test_what_is_joined_does_not_end_inside_a_stretch() -> None:
    small = heads_of(*range(10, 10 + 10 * (FAN_IN + 1), 10))
    inside = [*small[:-1], small[-1]._replace(horizon=999)]
    assert joined(inside) == (0, small[FAN_IN - 1].end)
    assert joined(inside[1:]) is None


def test_what_is_superseded_is_counted_by_the_bytes_of_its_blocks() -> None:
    heads = [head._replace(size=1000) for head in heads_of(*range(10, 140, 10))]
    hashes = np.arange(130, dtype=np.uint32)

    def hardly(heads: Sequence[Head], hashes: Sequence[int], missing: int = 0) -> bool:
        back = list(reversed(heads))[: len(heads) - missing]
        row_ends = np.cumsum([head.rows for head in back])
        known = BlockHashes(
            [head.start for head in back],
            [head.end for head in back],
            row_ends,
            np.array(hashes[: row_ends[-1]], np.uint32),
        )
        return hardly_repeats(BlockRange(P, tuple(heads)), known)

    assert hardly(heads, hashes.tolist())
    # The hashes are those of the newest block first: the rows of the oldest one are the last.
    again = [*hashes[:129].tolist(), 0]
    assert not hardly(heads, again), "two of thirteen blocks may be superseded"
    newest = [*heads[:-1], heads[-1]._replace(size=1)]
    assert hardly(newest, again), "1,001 bytes beside 11,000"
    large = [heads[0]._replace(size=1200), *newest[1:]]
    assert not hardly(large, again), "a single row of 130, and more than a tenth of what is left"
    assert not hardly(heads, hashes.tolist(), missing=1), "the oldest block has no hashes"


@dataclass
class Tiers:
    """A partition that is flushed to and merged by the plan, in sizes only.

    ``keys`` is how many different keys there are, each written in turn; None for as many as rows.
    """

    keys: int | None
    row: int = 100
    rows: int = 400
    heads: list[Head] = field(default_factory=list)
    high: int = 0
    rewritten: int = 0
    worst: float = 0.0
    most_blocks: int = 0

    def flush(self) -> None:
        self.heads.append(self.head(self.high, self.high + self.rows))
        self.high += self.rows
        while (found := plan_merge(P, self.heads, [])) is not None:
            first = self.heads.index(found.heads[0])
            assert tuple(self.heads[first : first + len(found.heads)]) == found.heads
            merged = self.head(found.start, found.end)
            self.rewritten += merged.size
            self.heads[first : first + len(found.heads)] = [merged]
        live = self.row * (self.high if self.keys is None else min(self.keys, self.high))
        self.worst = max(self.worst, sum(head.size for head in self.heads) / live)
        self.most_blocks = max(self.most_blocks, len(self.heads))

    def head(self, start: int, end: int) -> Head:
        count = end - start if self.keys is None else min(end - start, self.keys)
        return Head(start, end, end, count, count * self.row, count * self.row)


FLUSHES = 1000


def test_a_row_is_merged_log_of_the_flushes_times() -> None:
    tiers = Tiers(keys=None)
    for _ in range(FLUSHES):
        tiers.flush()
    written = tiers.high * tiers.row
    assert tiers.rewritten <= written * math.log2(FLUSHES)
    # A stretch was merged with less than itself nowhere, so it is far from merging everything each time.
    assert tiers.most_blocks <= math.log2(FLUSHES) + FAN_IN
    assert tiers.worst == 1


@pytest.mark.parametrize("flushes_of_keys", [0.5, 1, 3, 20])
def test_overwritten_rows_take_less_than_the_live_ones(flushes_of_keys: float) -> None:
    tiers = Tiers(keys=int(400 * flushes_of_keys))
    for _ in range(FLUSHES):
        tiers.flush()
    written = tiers.high * tiers.row
    live = tiers.keys * tiers.row if tiers.keys else 0
    blocks = tiers.most_blocks * BLOCK_COST + tiers.rows * tiers.row
    # What is behind the oldest stretch is less than that, and that has each key once.
    assert tiers.worst * live <= 2 * live + blocks
    depth = math.log2(max(live / (tiers.rows * tiers.row), 1)) + 2
    assert tiers.rewritten <= written * depth
    assert tiers.most_blocks <= depth + FAN_IN


def test_every_flush_of_few_rows_does_not_rewrite_everything() -> None:
    """One large old stretch, and flushes of a thousandth of it."""
    tiers = Tiers(keys=None, rows=400_000)
    tiers.flush()
    large = tiers.heads[0].size
    tiers.rows = 400
    for _ in range(900):
        tiers.flush()
    assert tiers.heads[0].size == large
    assert tiers.rewritten < large * math.log2(900)


PLENTY = 2**40


def backlog_of(*waiting: int, share: int = 100) -> Backlog:
    """Return a backlog of partitions that wait, where so many bytes are a partition's share of a tail."""
    backlog = Backlog(share * PARTITIONS)
    for partition in range(PARTITIONS):
        backlog.in_order(partition)
    backlog.waiting = dict.fromkeys(waiting)
    return backlog


def test_while_flushes_follow_one_another_a_partition_waits_for_its_share_of_a_tail() -> None:
    backlog = backlog_of(3, 5)
    for partition in (3, 4):
        backlog.flushed(partition, 60)
    assert backlog.take(PARTITIONS, PLENTY) == []
    backlog.flushed(3, 40)
    assert backlog.take(PARTITIONS, PLENTY) == [3]
    assert list(backlog.waiting) == [5]
    # It counts until nothing is to be compacted there.
    backlog.waiting[3] = None
    assert backlog.take(PARTITIONS, PLENTY) == [3]
    backlog.in_order(3)
    backlog.waiting[3] = None
    assert backlog.take(PARTITIONS, PLENTY) == []


def test_where_keys_hardly_repeat_many_tails_wait() -> None:
    backlog = backlog_of(3, 5, 7)
    for partition in (3, 5, 7):
        backlog.flushed(partition, 100 * DIFFERENT_TAILS - 1)
    backlog.compared(3, repeats=False)
    backlog.rewritten(5, 100, 91)
    backlog.rewritten(7, 100, 90)
    assert backlog.take(PARTITIONS, PLENTY) == [7]
    backlog.compared(3, repeats=True)
    backlog.flushed(5, 1)
    assert backlog.take(PARTITIONS, PLENTY) == [3, 5]


def test_a_partition_that_was_not_compared_waits_as_most_of_the_others_do() -> None:
    backlog = backlog_of(3)
    backlog.flushed(3, 100)
    for other in (5, 6, 7):
        backlog.compared(other, repeats=False)
    backlog.compared(8, repeats=True)
    assert backlog.take(PARTITIONS, PLENTY) == []
    for other in (5, 6):
        backlog.compared(other, repeats=True)
    assert backlog.take(PARTITIONS, PLENTY) == [3]


def test_little_room_shortens_the_wait_and_none_ends_it() -> None:
    def taken(flushed: int, room: int) -> bool:
        backlog = backlog_of(3)
        backlog.compared(3, repeats=False)
        backlog.flushed(3, flushed)
        return backlog.take(PARTITIONS, room) == [3]

    # A quarter of the room, dealt to all partitions.
    assert [taken(size, 200 * PARTITIONS) for size in (49, 50)] == [False, True]
    assert taken(0, 0)
    assert taken(0, -PLENTY)


def test_a_partition_does_not_wait_while_nobody_knows_what_is_to_be_compacted_there() -> None:
    """As after a start, or when a cut is released: nothing more may be flushed there."""
    backlog = Backlog(PLENTY)
    backlog.waiting = {3: None}
    assert backlog.take(PARTITIONS, PLENTY) == [3]
    backlog.in_order(3)
    for taken in ([], [3]):
        backlog.waiting = {3: None}
        assert backlog.take(PARTITIONS, PLENTY) == taken
        backlog.unknown(3)


def test_once_flushes_pause_those_that_wait_longest_are_taken() -> None:
    backlog = backlog_of(9, 2, 7, 4)
    assert backlog.take(2, None) == [2, 9]
    assert backlog.take(2, None) == [4, 7]
    assert backlog.take(2, None) == []
