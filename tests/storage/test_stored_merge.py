"""Merging what is stored: whoever reads on from anywhere ends with the right state."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.model import ModelPartition, Row
from tests.raw import all_rows
from tests.storage.stored_blocks import (
    TIME,
    Change,
    block_of,
    check_reader,
    ends_of,
    filled,
    limits_of,
    put,
    put_rows,
    read_above,
    rows_of,
    stored_rows,
    whole_range,
)
from upr.storage import blocks as blocks_module
from upr.storage import compact
from upr.storage.blocks import BlockRange, Replacement, checked, tombstones_of
from upr.storage.compact import (
    BLOCK_FRACTION,
    WORTH_FRACTION,
    Examined,
    Purge,
    PurgeLimits,
    RangeTooLargeError,
    examine,
    merge_direct,
    rewrite_group,
)
from upr.storage.store import Store
from upr_protocol.errors import CorruptBlockError, DataDamagedError
from upr_protocol.limits import RUN_SPAN_MAX
from upr_protocol.wire.codec import compress_block, decode_block

P, Q = 5, 6


def rewrite_all(store: Store, examined: Examined) -> None:
    for group in examined.groups():
        store.replace([rewrite_group(examined, group, store.blocks)])


def check_from_0(store: Store, partition: int, model: ModelPartition) -> None:
    assert check_reader(read_above(store, partition, 0), model, 0, {}, 0)[0] == model.high


# Direct


def test_a_direct_merge_keeps_the_newest_row_of_each_key(store: Store) -> None:
    model = filled(store, P, [(b"a", b"1"), (b"b", b"1")], [(b"a", b"2")], [(b"c", None)])
    other = filled(store, Q, [(b"a", b"1")], [(b"a", None)])
    merged = merge_direct([whole_range(store, P), whole_range(store, Q)], store.blocks, None)
    assert merged.rows == 4
    store.replace(merged.replacements)
    assert ends_of(store, P) == [4]
    assert stored_rows(store, P) == model.rows[1:]
    assert stored_rows(store, Q) == other.rows[1:]


def test_neighbours_of_a_range_stay(store: Store) -> None:
    overwrites: list[list[Change]] = [[(b"a", b"%d" % i)] for i in range(5)]
    model = filled(store, P, *overwrites)
    heads = store.heads(P)
    merged = merge_direct([BlockRange(P, tuple(heads[1:4]))], store.blocks, None)
    store.replace(merged.replacements)
    assert ends_of(store, P) == [1, 4, 5]
    assert [row.seqno for row in stored_rows(store, P)] == [1, 4, 5]
    check_from_0(store, P, model)


def test_a_damaged_block_stops_its_own_partition_only(store: Store) -> None:
    filled(store, P, [(b"a", b"1")], [(b"a", b"2")])
    filled(store, Q, [(b"a", b"1")], [(b"a", b"2")])
    (_, end, data) = block_of(P, 1, rows_of(2, (b"a", b"other")))
    put(store, (P, end, data.replace(b"other", b"0ther")))
    merged = merge_direct([whole_range(store, P), whole_range(store, Q)], store.blocks, None)
    assert set(merged.damaged) == {P}
    assert [one.partition for one in merged.replacements] == [Q]


def test_a_range_that_has_lost_every_row_is_a_block_without_rows(store: Store) -> None:
    filled(store, P, [(b"a", None)], [(b"b", None)], [(b"c", b"1")])
    merged = merge_direct([BlockRange(P, tuple(store.heads(P)[:2]))], store.blocks, limits_of(2))
    store.replace(merged.replacements)
    (first, _) = store.heads(P)
    assert (first.start, first.end, first.horizon, first.rows) == (0, 2, 2, 0)
    assert [row.seqno for row in stored_rows(store, P)] == [3]
    assert len(read_above(store, P, 1)) == 2


@pytest.mark.parametrize("zstd", [False, True])
def test_a_run_does_not_span_more_seqnos_than_offsets_have_room_for(
    store: Store, zstd: bool
) -> None:
    """A few keys that were overwritten for years."""
    far = 5 * (RUN_SPAN_MAX // 2)
    rows = [Row(2, b"a", b"1"), Row(far, b"b", b"2"), Row(far + 1, b"c", b"3")]
    spans = [(0, 2), (2, RUN_SPAN_MAX), (RUN_SPAN_MAX, 2 * RUN_SPAN_MAX), (2 * RUN_SPAN_MAX, far)]
    for start, end in [*spans, (far, far + 1)]:
        inside = [row for row in rows if start < row.seqno <= end]
        put(store, block_of(P, start, inside, end=end))
    compress = compress_block if zstd else None
    merged = merge_direct([whole_range(store, P)], store.blocks, None, compress)
    store.replace(merged.replacements)
    assert stored_rows(store, P) == rows
    assert {head.horizon for head in store.heads(P)} == {far + 1}
    found = [Row(*row[1:]) for row in all_rows(read_above(store, P, 2))]
    assert found == rows[1:]


# Tombstones


def test_a_tombstone_goes_with_all_that_is_older_of_its_key(store: Store) -> None:
    filled(store, P, [(b"a", b"1"), (b"b", b"1")], [(b"a", None)], [(b"c", b"1")])
    merged = merge_direct([whole_range(store, P)], store.blocks, limits_of(3))
    assert merged.purges == {P: Purge(3, 3, 1)}
    assert [one.purge for one in merged.replacements] == [3]
    store.replace(merged.replacements)
    assert [row.key for row in stored_rows(store, P)] == [b"b", b"c"]
    assert store.partitions()[P].purge_seqno == 3  # type: ignore[union-attr]


def test_a_tombstone_in_a_range_that_does_not_begin_at_0_stays(store: Store) -> None:
    model = filled(store, P, [(b"a", b"1")], [(b"b", b"1")], [(b"a", None)], [(b"c", b"1")])
    above = BlockRange(P, tuple(store.heads(P)[1:]))
    direct = merge_direct([above], store.blocks, limits_of(4))
    assert direct.purges == {}
    examined = examine(above, store.blocks, limits_of(4))
    assert examined.purge is None
    store.replace(direct.replacements)
    check_from_0(store, P, model)
    assert [row.value for row in stored_rows(store, P) if row.key == b"a"] == [b"1", None]


LIMITS = {
    "passed": (limits_of(3), True),
    "not passed": (limits_of(2), False),
    "young": (limits_of(3, old=TIME - 1), False),
    "very old": (limits_of(2, never=3, very_old=TIME), True),
    "very old and pinned": (limits_of(2, never=2, very_old=TIME), False),
    "nearly very old": (limits_of(2, never=3, very_old=TIME - 1), False),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("which", LIMITS)
def test_a_tombstone_goes_when_its_limits_say_so(store: Store, which: str, large: bool) -> None:
    limits, goes = LIMITS[which]
    filled(store, P, [(b"a", b"1")], [(b"b", b"1"), (b"a", None)], [(b"b", b"2")])
    if large:
        purge = examine(whole_range(store, P), store.blocks, limits).purge
    else:
        purge = merge_direct([whole_range(store, P)], store.blocks, limits).purges.get(P)
    held = 0 if which == "very old" else 3
    assert purge == (Purge(3, held, 1) if goes else None)


def test_the_purge_seqno_is_the_newest_that_goes_and_held_the_newest_that_must_be_passed(
    store: Store,
) -> None:
    filled(store, P, [(b"a", None), (b"b", None)], [(b"c", None), (b"d", b"1")])
    # At 1 and 2 they are very old, what is at 3 was written later.
    put(store, block_of(P, 0, rows_of(1, (b"a", None), (b"b", None)), time=TIME - 50))
    for limits, wanted in (
        (limits_of(3, very_old=TIME - 50), Purge(3, 3, 3)),
        (limits_of(2, never=3, very_old=TIME - 50), Purge(2, 0, 2)),
        (limits_of(3, old=TIME - 1, very_old=TIME - 50), Purge(2, 0, 2)),
    ):
        assert merge_direct([whole_range(store, P)], store.blocks, limits).purges == {P: wanted}
        assert examine(whole_range(store, P), store.blocks, limits).purge == wanted


def test_a_superseded_tombstone_is_no_purge(store: Store) -> None:
    filled(store, P, [(b"a", None)], [(b"a", b"1")])
    assert merge_direct([whole_range(store, P)], store.blocks, limits_of(2)).purges == {}
    assert examine(whole_range(store, P), store.blocks, limits_of(2)).purge is None


def test_tombstones_of_a_merged_block_have_their_own_times(store: Store) -> None:
    put(store, block_of(P, 0, rows_of(1, (b"a", None)), time=7))
    put(store, block_of(P, 1, rows_of(2, (b"b", b"")), time=8))
    put(store, block_of(P, 2, rows_of(3, (b"c", None)), time=9))
    store.replace(merge_direct([whole_range(store, P)], store.blocks, None).replacements)
    (data,) = store.blocks(P, [3])
    rows, seqnos, times = tombstones_of(checked(data))
    assert (rows.tolist(), seqnos.tolist(), times.tolist()) == ([0, 2], [1, 3], [7, 9])


# Large


def many(first: int, count: int) -> list[Change]:
    return [(b"k%d" % i, b"v") for i in range(first, first + count)]


def test_with_a_purge_older_rows_of_its_key_go_first_however_few_they_are(
    store: Store, tiny: pytest.MonkeyPatch
) -> None:
    count = int(2 / BLOCK_FRACTION)
    blocks = [[(b"a", b"1"), *many(0, count)], many(100, count), [*many(200, count), (b"a", None)]]
    model = filled(store, P, *blocks, many(300, count))
    tiny.setattr(compact, "GROUP_BYTES", 1)
    tiny.setattr(blocks_module, "READ_BYTES", 1)
    limits = limits_of(model.high - 1)
    examined = examine(whole_range(store, P), store.blocks, limits)
    assert examined.purge is not None
    assert list(examined.groups()) == [range(0, 1), range(2, 3)]
    transactions = [rewrite_group(examined, group, store.blocks) for group in examined.groups()]
    assert [one.purge for one in transactions] == [examined.purge.seqno] * 2
    store.replace([transactions[0]])
    # A crash here leaves the tombstone and nothing that it deletes.
    assert [row.value for row in stored_rows(store, P) if row.key == b"a"] == [None]
    assert store.partitions()[P].purge_seqno == examined.purge.seqno  # type: ignore[union-attr]
    check_from_0(store, P, model)
    store.replace([transactions[1]])
    assert b"a" not in {row.key for row in stored_rows(store, P)}
    check_from_0(store, P, model)


def test_blocks_that_lose_little_stay_as_they_are(store: Store, tiny: pytest.MonkeyPatch) -> None:
    count = 40
    lost = int(count * 3 * WORTH_FRACTION) + 4
    blocks = [many(0, count), many(100, count), [*many(0, lost), *many(200, count)]]
    model = filled(store, P, *blocks)
    before = store.blocks(P, ends_of(store, P))
    examined = examine(whole_range(store, P), store.blocks, None)
    assert list(examined.groups()) == [range(0, 1)]
    rewrite_all(store, examined)
    heads = store.heads(P)
    assert store.blocks(P, [head.end for head in heads[-2:]]) == before[1:]
    # What was written anew lacks rows whose newer ones lie anywhere up to the range's end.
    assert {head.horizon for head in heads[:-2]} == {model.high}
    check_from_0(store, P, model)


def test_nothing_is_written_when_too_little_goes(store: Store, tiny: pytest.MonkeyPatch) -> None:
    filled(store, P, many(0, 40), many(100, 40), many(0, 4))
    assert list(examine(whole_range(store, P), store.blocks, None).groups()) == []


@pytest.mark.parametrize("passes", [1, 2])
def test_what_a_block_loses_is_counted_by_its_bytes(
    passes: int, store: Store, tiny: pytest.MonkeyPatch
) -> None:
    """Every version of one large value among many small ones would stay, as it is one row of each block."""
    count = int(2 / BLOCK_FRACTION)
    if passes > 1:
        tiny.setattr(compact, "ROWS_MAX", 3 * count)
    blocks = [[(b"large", b"%d" % i * 9 * count), *many(100 * i, count)] for i in range(4)]
    model = filled(store, P, *blocks)
    examined = examine(whole_range(store, P), store.blocks, None)
    # Of the row, of which there is one in so many, with its cells or without.
    assert [0.2 < share < 0.8 for share in examined.lost] == [True, True, True, False]
    rewrite_all(store, examined)
    assert len([row for row in stored_rows(store, P) if row.key == b"large"]) == 1
    check_from_0(store, P, model)


def test_small_neighbours_are_joined(store: Store, tiny: pytest.MonkeyPatch) -> None:
    tiny.setattr(compact, "SMALL_BYTES", 300)
    model = filled(store, P, many(0, 40), many(100, 1), many(200, 1), many(300, 40), many(400, 1))
    examined = examine(whole_range(store, P), store.blocks, None)
    assert list(examined.groups()) == [range(1, 3)]
    rewrite_all(store, examined)
    assert ends_of(store, P) == [40, 42, 82, 83]
    check_from_0(store, P, model)


def test_what_is_rewritten_in_groups_is_a_stretch_up_to_the_end_of_the_range(
    store: Store, tiny: pytest.MonkeyPatch
) -> None:
    model = filled(store, P, *(many(0, 15) + many(100 * i, 15) for i in range(1, 5)), many(1000, 5))
    inside = BlockRange(P, tuple(store.heads(P)[:4]))
    examined = examine(inside, store.blocks, None)
    assert len(examined.groups()) > 1
    for group in examined.groups():
        new = rewrite_group(examined, group, store.blocks)
        for _, data in new.new:
            assert int(decode_block(data).runs["horizon"][0]) == 120
        store.replace([new])
        check_from_0(store, P, model)
    stretch = [head for head in store.heads(P) if head.end <= 90]
    assert [row.seqno for row in stored_rows(store, P)][:15] == list(range(16, 31))
    assert len(stretch) > 3 * 2
    assert max(head.rows for head in stretch) < 15
    # The newest block lost nothing and is what it was.
    assert [head.horizon for head in store.heads(P)] == [*(120 for _ in stretch), 120, 125]


@pytest.mark.parametrize("horizon", [30, 20])
def test_a_horizon_beyond_the_range_is_kept(
    store: Store, tiny: pytest.MonkeyPatch, horizon: int
) -> None:
    """A pin that came back from the dead can end a range inside a stretch."""
    rows = [Row(i, b"k%d" % i, b"v") for i in range(1, 31)]
    put(store, block_of(P, 0, rows[:10], horizon=30), block_of(P, 10, rows[10:20], horizon=horizon))
    first = whole_range(store, P)
    for merged in (
        merge_direct([first], store.blocks, None).replacements[0],
        rewrite_group(examine(first, store.blocks, None), range(2), store.blocks),
    ):
        assert {int(decode_block(data).runs["horizon"][0]) for _, data in merged.new} == {30}


def test_a_range_with_too_many_keys_is_not_compared(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store, P, many(0, 10), many(20, 10))
    monkeypatch.setattr(compact, "PASSES_MAX", 1)
    monkeypatch.setattr(compact, "ROWS_MAX", 19)
    with pytest.raises(RangeTooLargeError):
        examine(whole_range(store, P), store.blocks, None)
    monkeypatch.setattr(compact, "ROWS_MAX", 20)
    examine(whole_range(store, P), store.blocks, None)
    monkeypatch.setattr(compact, "KEYS_BYTES_MAX", 50)
    with pytest.raises(RangeTooLargeError):
        examine(whole_range(store, P), store.blocks, None)


@pytest.mark.parametrize("limit", [("ROWS_MAX", 60), ("KEYS_BYTES_MAX", 1200)])
def test_too_many_keys_for_one_look_are_compared_in_several(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    rng = np.random.default_rng(1)
    keys = [b"%d" % i * (1 + i % 7) for i in range(150)]
    blocks: list[list[Change]] = [
        [(keys[i], None if i % 5 == 0 else b"%d" % n) for i in rng.integers(0, 150, 40)]
        for n in range(8)
    ]
    model = filled(store, P, *blocks, [(b"last", b"v")])
    limits = limits_of(model.high - 1)
    whole = whole_range(store, P)
    at_once = examine(whole, store.blocks, limits)
    looks: list[int] = []

    def read(partition: int, ends: Sequence[int]) -> list[bytes]:
        looks.append(len(ends))
        return store.blocks(partition, ends)

    monkeypatch.setattr(compact, *limit)
    in_parts = examine(whole, read, limits)
    assert len(looks) >= 4, "all was compared at once"
    assert at_once.purge is not None
    assert in_parts.purge == at_once.purge
    assert [k.tolist() for k in in_parts.keep] == [k.tolist() for k in at_once.keep]
    rewrite_all(store, in_parts)
    check_from_0(store, P, model)
    monkeypatch.setattr(compact, limit[0], limit[1] // 20)
    with pytest.raises(RangeTooLargeError):
        examine(whole_range(store, P), store.blocks, None)


def test_blocks_that_are_much_when_not_compressed_are_rewritten_a_few_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 16
    for at in range(8):
        _, end, data = block_of(P, at, [Row(at + 1, b"same", b"v" * size)])
        packed = compress_block(data)
        assert len(packed) < size // 100
        put(store, (P, end, packed))
    assert all(size < head.plain < size + 1000 for head in store.heads(P))
    assert whole_range(store, P).plain > 8 * size > 100 * whole_range(store, P).size
    monkeypatch.setattr(compact, "GROUP_PLAIN_BYTES", 3 * size)
    assert examine(whole_range(store, P), store.blocks, None).groups() == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]


def test_blocks_that_changed_since_they_were_compared_are_not_rewritten(store: Store) -> None:
    filled(store, P, [(b"a", b"1")], [(b"a", b"2")])
    examined = examine(whole_range(store, P), store.blocks, None)
    put(store, block_of(P, 0, [], end=1))
    with pytest.raises(DataDamagedError, match="changed while"):
        rewrite_group(examined, range(2), store.blocks)
    put(store, (P, 2, block_of(P, 1, rows_of(2, (b"a", b"other")))[2].replace(b"other", b"0ther")))
    with pytest.raises(CorruptBlockError):
        examine(whole_range(store, P), store.blocks, None)


# Storing


def test_replacing_a_block_that_is_not_there_changes_nothing(store: Store) -> None:
    filled(store, P, [(b"a", b"1")], [(b"a", b"2")])
    filled(store, Q, [(b"a", b"1")], [(b"a", b"2")])
    good = merge_direct([whole_range(store, P)], store.blocks, None).replacements[0]
    new = block_of(Q, 0, rows_of(1, (b"x", b"")), end=2)[2]
    bad = Replacement(Q, [1, 7], [(2, new)], purge=2)
    before = [store.blocks(p, ends_of(store, p)) for p in (P, Q)]
    rows = store.partitions()
    with pytest.raises(DataDamagedError, match="ends at 7 is missing"):
        store.replace([good, bad])
    assert [store.blocks(p, ends_of(store, p)) for p in (P, Q)] == before
    assert store.partitions() == rows


def test_a_replacement_stores_its_purge_seqno_and_lowers_nothing(store: Store) -> None:
    filled(store, P, [(b"a", b"1")], [(b"a", b"2")])
    rows = store.partitions()
    row = rows[P]
    assert not isinstance(row, DataDamagedError)
    put_rows(store, {P: replace(row, stored_high=9, purge_seqno=4)})
    for seqno, wanted in ((0, 4), (3, 4), (4, 4), (6, 6)):
        data = store.blocks(P, [1])[0]
        store.replace([Replacement(P, [1], [(1, data)], purge=seqno)])
        found = store.partitions()[P]
        assert found == replace(row, stored_high=9, purge_seqno=wanted)


# Everything at random


def test_limits_are_by_partition() -> None:
    limits = limits_of(5)
    limits.passed[Q] = 1
    where, seqnos = np.array([P, Q]), np.array([3, 3], np.uint64)
    times = np.array([TIME, TIME])
    assert isinstance(limits, PurgeLimits)
    assert limits.going(where, seqnos, times)[0].tolist() == [True, False]
