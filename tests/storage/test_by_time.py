"""The place in stored blocks where a time was passed, against a look at every row."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import Row
from tests.storage.stored_blocks import block_of, store_of
from upr.storage.search import SEARCH_PARTITIONS, StoredBeginning, search_time
from upr.storage.store import Store
from upr_protocol.block import sealed
from upr_protocol.errors import DataDamagedError
from upr_protocol.wire.codec import compress_block, decode_block, encode_block

P = 7


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = store_of(tmp_path_factory.mktemp("by-time") / "store")
    yield made
    made.close()


def fill(store: Store, blocks: list[tuple[int, int, list[tuple[int, int]]]], kind: str) -> None:
    """Store blocks (start, end, rows) of the partition in the place of all that it has."""
    with store._env.begin(write=True) as txn:
        txn.drop(store._blocks, delete=False)
    encoded = []
    for start, end, rows in blocks:
        made = [Row(seqno, b"key %d" % seqno, b"v" * 600) for seqno, _ in rows]
        newest = max((time for _, time in rows), default=0)
        data = block_of(P, start, made, end=end, time=newest)[2]
        if len({time for _, time in rows}) > 1:
            times = np.array([time for _, time in rows], "<i8").tobytes()
            data = encode_block(sealed(replace(decode_block(data), times=times)))
        encoded.append((P, end, compress_block(data) if kind == "zstd" else data))
    # Neighbours, in whose blocks nothing may be looked for.
    for other in (P - 1, P + 1):
        encoded.append(block_of(other, 0, [Row(1, b"k", b"v")], time=5))
    store.put_flush(encoded, {}, {})


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Blocks whose times rise with the seqnos, with rows that are gone."""
    blocks = []
    end, time = 0, 10
    for _ in range(draw(st.integers(0, 9))):
        start, rows = end, []
        for _ in range(draw(st.integers(1, 5))):
            end += 1
            time += draw(st.sampled_from([0, 0, 1, 7]))
            if draw(st.integers(0, 3)):
                rows.append((end, time))
        blocks.append((start, end, rows))
    return blocks


@settings(max_examples=150)
@given(histories(), st.sampled_from(["", "zstd"]))
def test_it_is_right_below_the_first_row_at_or_after_the_time(
    store: Store, blocks: list[tuple[int, int, list[tuple[int, int]]]], kind: str
) -> None:
    fill(store, blocks, kind)
    rows = [row for _, _, of in blocks for row in of]
    end = blocks[-1][1] if blocks else 0
    newest = max((time for _, time in rows), default=10)
    times = [0, 10, newest, newest + 1, 2**63, 2**64 - 1, *range(11, newest, 3)]
    for time, found in zip(times, search_time(store, [(P, time) for time in times]), strict=True):
        first = next((seqno for seqno, at in rows if at >= time), None)
        expected = (
            StoredBeginning(end, False) if first is None else StoredBeginning(first - 1, True)
        )
        assert found == expected, time


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=9))
def test_where_the_clock_was_set_back_it_is_a_place_where_the_time_was_passed(
    store: Store, times: list[list[int]]
) -> None:
    blocks, end = [], 0
    for block in times:
        blocks.append((end, end + len(block), [(end + i + 1, t) for i, t in enumerate(block)]))
        end += len(block)
    fill(store, blocks, "")
    flat = {seqno: time for _, _, rows in blocks for seqno, time in rows}
    for time in range(1, 22):
        (found,) = search_time(store, [(P, time)])
        assert isinstance(found, StoredBeginning)
        if found.found:
            assert flat[found.seqno + 1] >= time
        else:
            assert found.seqno == end
            assert flat[end] < time or max(times[-1]) < time


def test_a_search_of_many_partitions_is_done_in_bites(store: Store) -> None:
    fill(store, [(0, 2, [(1, 10), (2, 20)])], "")
    wanted = [(P, 15)] * (SEARCH_PARTITIONS + 5)
    assert search_time(store, wanted) == [StoredBeginning(1, True)] * SEARCH_PARTITIONS


@pytest.mark.parametrize("damage", ["time", "times", "gap", "no block"])
def test_damage_is_an_error_of_its_partition(store: Store, damage: str) -> None:
    blocks = [(i * 4, i * 4 + 4, [(i * 4 + j, 10 * i + j) for j in range(1, 5)]) for i in range(8)]
    fill(store, blocks, "")
    key = b"".join((P.to_bytes(2, "big"), (20).to_bytes(8, "big")))
    with store._env.begin(write=True) as txn:
        data = bytearray(txn.get(key, db=store._blocks) or b"")
        if damage == "time":
            data[2 + 32] ^= 0xFF
        elif damage == "times":
            data[-14] ^= 1
        if damage == "gap":
            txn.delete(key, db=store._blocks)
        else:
            txn.put(key, bytes(data) if damage != "no block" else b"?", db=store._blocks)
    found, other = search_time(store, [(P, 42), (P + 1, 5)])
    assert isinstance(found, DataDamagedError)
    assert f"partition {P}" in found.message
    assert other == StoredBeginning(0, True)


def test_an_empty_partition_begins_at_0(tmp_path: Path) -> None:
    empty = store_of(tmp_path / "store")
    assert search_time(empty, [(1023, 0), (0, 9)]) == [StoredBeginning(0, False)] * 2
    empty.close()
