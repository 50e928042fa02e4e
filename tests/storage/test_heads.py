"""What a stored block says at its beginning, and which blocks belong together."""

from pathlib import Path

import pytest

from tests.model import Row
from tests.storage.stored_blocks import block_of, heads_of, put, rows_of, store_of
from upr.storage.blocks import HEAD_BYTES, BlockRange, Head, head_of, last_complete, stretches
from upr_protocol.errors import DataDamagedError
from upr_protocol.wire.codec import compress_block

P = 5


@pytest.mark.parametrize("zstd", [False, True])
def test_a_head_is_read_without_the_columns(zstd: bool) -> None:
    rows = [Row(i, b"key%d" % i, b"x" * 500) for i in (12, 15, 19)]
    _, end, data = block_of(P, 10, rows, end=20, horizon=33)
    if zstd:
        data = compress_block(data)
    assert head_of(data[:HEAD_BYTES], len(data), P, end) == Head(
        10, 20, 33, 3, len(data), len(data)
    )


@pytest.mark.parametrize(
    ("partition", "end", "cut"),
    [(P + 1, 3, HEAD_BYTES), (P, 4, HEAD_BYTES), (P, 3, HEAD_BYTES - 1), (P, 3, 0)],
)
def test_a_head_of_another_block_is_damage(partition: int, end: int, cut: int) -> None:
    _, _, data = block_of(P, 0, rows_of(1, (b"a", b""), (b"b", b""), (b"c", b"")))
    with pytest.raises(DataDamagedError, match=f"partition {partition}"):
        head_of(data[:cut], len(data), partition, end)


def test_bytes_that_are_no_block_are_damage() -> None:
    with pytest.raises(DataDamagedError):
        head_of(b"\0" * HEAD_BYTES, 100, P, 3)


def test_a_partitions_heads_are_its_own_and_in_order(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    for partition in (P - 1, P, P + 1):
        put(store, block_of(partition, 0, rows_of(1, (b"a", b"v"))))
    put(store, block_of(P, 1, rows_of(2, (b"b", b"v"), (b"c", b"v"))))
    assert [(head.start, head.end, head.rows) for head in store.heads(P)] == [(0, 1, 1), (1, 3, 2)]
    assert len(store.heads(P + 1)) == 1
    assert store.heads(P + 2) == []
    # 256 blocks' ends differ in more than their last byte.
    for i in range(3, 600):
        put(store, block_of(P, i, rows_of(i + 1, (b"d", b"v"))))
    assert [head.end for head in store.heads(P)] == [1, *range(3, 601)]
    store.close()


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_gap_or_an_overlap_is_damage(tmp_path: Path, start: int) -> None:
    store = store_of(tmp_path / "store")
    put(store, block_of(P, 0, rows_of(1, (b"a", b"v"), (b"b", b"v"))))
    put(store, block_of(P, start, rows_of(4, (b"c", b"v"))))
    with pytest.raises(DataDamagedError, match=f"begins at {start}, the one before it ends at 2"):
        store.heads(P)
    store.close()


def test_a_first_block_that_does_not_begin_at_0_is_damage(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    put(store, block_of(P, 1, rows_of(2, (b"a", b"v"))))
    with pytest.raises(DataDamagedError):
        store.heads(P)
    store.close()


def test_blocks_that_share_a_horizon_are_one_stretch() -> None:
    found = stretches(P, heads_of(1, 2, 3, 4, 5, horizons={2: 4, 3: 4}))
    assert [(one.start, one.end, one.size) for one in found] == [(0, 1, 1), (1, 4, 3), (4, 5, 1)]


def test_what_lies_in_a_settled_range_is_one_stretch() -> None:
    found = stretches(P, heads_of(1, 2, 3, 4, 5), [(0, 2), (2, 4)])
    assert [(one.start, one.end) for one in found] == [(0, 2), (2, 4), (4, 5)]
    # A block that reaches beyond the range was not looked through with it.
    assert len(stretches(P, heads_of(2, 4), [(0, 3)])) == 2


def test_the_last_complete_marker_is_at_or_above_every_horizon_before_it() -> None:
    assert last_complete([]) == 0
    assert last_complete(heads_of(3, 5)) == 5
    assert last_complete(heads_of(3, 5, horizons={5: 9})) == 3
    assert last_complete(heads_of(3, 5, 7, horizons={3: 7})) == 7
    assert last_complete(heads_of(3, 5, 7, horizons={3: 6})) == 7
    assert last_complete(heads_of(3, 5, horizons={3: 9})) == 0


def test_a_range_sums_up_its_blocks() -> None:
    one = BlockRange(P, tuple(heads_of(3, 5, 9, size=10)[1:]))
    assert (one.start, one.end, one.size, one.rows) == (3, 9, 20, 6)
