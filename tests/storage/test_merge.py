"""Merging for the store, against a fold of the rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import Row, apply, partition_of
from tests.raw import all_rows, check_cells, with_cells
from upr.storage import blocks as blocks_module
from upr.storage import compact
from upr.storage.blocks import Encoded, cells_of
from upr.storage.compact import Chunk, FlushSlice, chunks_of, merge_slice, plan_slices
from upr_client.testing.memory import run_block
from upr_protocol.block import Block, FurtherColumn, build_block, make_runs, sealed
from upr_protocol.wire.codec import decode_block, encode_block

KEYS = [b"k%d" % i for i in range(12)]
Batch = list[tuple[bytes, bytes | None]]
batches_strategy = st.lists(
    st.lists(
        st.tuples(st.sampled_from(KEYS), st.none() | st.binary(max_size=6)), min_size=1, max_size=8
    ),
    min_size=1,
    max_size=12,
)


class Numbering:
    """Numbers blocks as the engine does, and keeps every row."""

    def __init__(self) -> None:
        self.high = np.zeros(1024, np.uint64)
        self.rows: dict[int, list[Row]] = {}
        self.time = 0

    def block(self, batch: Batch) -> Encoded:
        block = with_cells(build_block([k for k, _ in batch], [v for _, v in batch]))
        self.time += 1
        runs = block.runs.copy()
        runs["start_seqno"] = self.high[runs["partition"]]
        runs["end_seqno"] = runs["start_seqno"] + runs["count"]
        runs["horizon"] = runs["end_seqno"]
        runs["time"] = self.time
        self.high[runs["partition"]] = runs["end_seqno"]
        for key, value in batch:
            rows = self.rows.setdefault(partition_of(key), [])
            rows.append(Row(len(rows) + 1, key, value))
        block.runs = runs
        return Encoded(runs, encode_block(block))


def merged_blocks(chunks: Any, stored: Any) -> list[Block]:
    found = []
    for part in plan_slices(chunks):
        merged = merge_slice(chunks, part, stored)
        for partition, end in merged.ends.items():
            stored[partition] = end
        for partition, end, data in merged.blocks:
            block = decode_block(data)
            assert (int(block.runs["partition"][0]), int(block.runs["end_seqno"][0])) == (
                partition,
                end,
            )
            check_cells(block)
            found.append(block)
    return found


def check_partition(blocks: list[Block], rows: list[Row], already: int) -> None:
    """Tiling, marker truth, and the state at the end."""
    at = already
    horizon = 0
    seen: list[Row] = rows[:already]
    for block in blocks:
        run = block.runs[0]
        assert int(run["start_seqno"]) == at
        at = int(run["end_seqno"])
        horizon = max(horizon, int(run["horizon"]))
        seen += [Row(seqno, key, value) for _, seqno, key, value in all_rows([block])]
        if int(run["horizon"]) == at:
            assert horizon == at
            assert apply({}, seen) == apply({}, rows[:at])
    assert at == len(rows)
    assert seen[already:] == sorted(seen[already:])
    assert int(blocks[-1].runs["horizon"][0]) == at


@given(batches_strategy, st.integers(0, 12), st.integers(1, 4))
@settings(max_examples=150)
def test_merging_keeps_the_newest_row_of_each_key(
    batches: list[Batch], already: int, chunk_count: int
) -> None:
    numbering = Numbering()
    early = [numbering.block(batch) for batch in batches[:already]]
    stored = numbering.high.copy()
    late = [numbering.block(batch) for batch in batches[already:]]
    if not late:
        return
    size = -(-len(late) // chunk_count)
    chunks = [Chunk(late[i : i + size]) for i in range(0, len(late), size)]
    # What is stored already may lie in the chunks again, after a flush that stopped half-way.
    if early:
        chunks.insert(0, Chunk(early))
    before = stored.copy()
    by_partition: dict[int, list[Block]] = {}
    for block in merged_blocks(chunks, stored):
        by_partition.setdefault(int(block.runs["partition"][0]), []).append(block)
    assert (stored == numbering.high).all()
    for partition, rows in numbering.rows.items():
        if int(before[partition]) < len(rows):
            check_partition(by_partition[partition], rows, int(before[partition]))
            kept = [key for _, _, key, _ in all_rows(by_partition[partition])]
            assert len(kept) == len(set(kept))
        else:
            assert partition not in by_partition


def test_what_is_larger_than_a_block_becomes_a_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_COLUMN_BYTES", 200)
    numbering = Numbering()
    same = [k for k in (b"x%d" % i for i in range(200_000)) if partition_of(k) == 3][:30]
    blocks = [numbering.block([(key, b"v" * 40)]) for key in same + same[:10]]
    chunk = Chunk(blocks)
    merged = merge_slice([chunk], FlushSlice(0, 1024, 0, 1), np.zeros(1024, np.uint64))
    found = [decode_block(data) for _, _, data in merged.blocks]
    assert len(found) > 3
    assert {int(block.runs["horizon"][0]) for block in found} == {40}
    assert all(int(block.runs["end_seqno"][0]) < 40 for block in found[:-1])
    check_partition(found, numbering.rows[3], 0)
    assert sum(map(check_cells, found)) > 10
    # Offsets have one more number than rows, twice, and in two further columns.
    assert all(block.column_bytes <= 216 or block.rows == 1 for block in found)


def test_cells_that_few_rows_have_take_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_COLUMN_BYTES", 2**16)
    rows = 2**16
    plain = build_block([b"%d" % row for row in range(rows)], [b""] * rows, np.zeros(rows, "u4"))
    cells = b"".join(end.to_bytes(4, "little") for end in (0, 1)), b"c"
    one = build_block([b"k"], [b""], np.zeros(1, "u4"))
    one = replace(one, further=tuple(FurtherColumn(id_, *cells) for id_ in range(1, 17)))
    counts = []
    for block in (one, replace(one, further=())):
        first, last = plain.runs.copy(), block.runs.copy()
        first["end_seqno"] = first["horizon"] = last["start_seqno"] = rows
        last["end_seqno"] = last["horizon"] = rows + 1
        written = [sealed(replace(plain, runs=first)), sealed(replace(block, runs=last))]
        chunk = Chunk([Encoded(w.runs, encode_block(w)) for w in written])
        assert sum(part.nbytes for both in chunk.sorted().further.values() for part in both) < 1000
        merged = merge_slice([chunk], FlushSlice(0, 1024, 0, 1), np.zeros(1024, np.uint64))
        found = [decode_block(data) for _, _, data in merged.blocks]
        assert [len(block.further) for block in found[:-1]] == [0] * (len(found) - 1)
        assert len(found[-1].further) == len(block.further)
        counts.append(len(found))
    assert counts[0] <= counts[1] + 1, "rows without cells have no room taken from them"


def test_one_large_partition_is_stored_in_several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "SLICE_BYTES", 2000)
    numbering = Numbering()
    chunks = [
        Chunk([numbering.block([(b"hot", b"%d" % i * 300)]) for i in range(3)]) for _ in range(5)
    ]
    slices = plan_slices(chunks)
    assert len(slices) > 1
    blocks = merged_blocks(chunks, np.zeros(1024, np.uint64))
    check_partition(blocks, numbering.rows[partition_of(b"hot")], 0)


def test_slices_cover_every_partition_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbering = Numbering()
    chunks = [Chunk([numbering.block([(b"key%d" % i, b"v")]) for i in range(3000)])]
    slices = plan_slices(chunks)
    covered = [p for part in slices for p in range(part.first, part.last)]
    assert covered == list(range(1024))
    assert all(part.last - part.first <= compact.SLICE_PARTITIONS for part in slices)
    blocks = merged_blocks(chunks, np.zeros(1024, np.uint64))
    assert sum(block.rows for block in blocks) == 3000


def test_a_chunk_is_bounded_by_its_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "CHUNK_ROWS", 100)
    numbering = Numbering()
    blocks = [numbering.block([(b"%d" % (i % 7), b"") for i in range(30)]) for _ in range(20)]
    rows = [int(chunk.runs["count"].sum()) for chunk in chunks_of(blocks)]
    assert sum(rows) == 600
    assert max(rows) < 100 + 30


@pytest.mark.parametrize(("size", "copies"), [(blocks_module.COPIED_BYTES + 1, 9), (9, 1)])
def test_only_large_columns_are_copied_one_by_one(
    size: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of Arrow takes as long as to join some KiB."""
    numbering, made = Numbering(), list[int]()
    values = [b"%d" % i * size for i in range(9)]
    opened = [numbering.block([(b"k", v), (b"gone", None), (b"l", b"w")]).opened() for v in values]
    making = blocks_module.binary_cells

    def counted(offsets: Any, data: Any) -> Any:
        made.append(len(offsets) - 1)
        return making(offsets, data)

    monkeypatch.setattr(blocks_module, "binary_cells", counted)
    found = cells_of(opened, blocks_module.VALUE_OFFSETS, blocks_module.VALUES).to_pylist()
    assert sorted(found) == sorted(v for value in values for v in (value, b"", b"w"))
    assert len(made) == copies


def test_a_range_without_a_row_is_stored_also_where_its_slice_has_none() -> None:
    """A replica gets one as a block of its own, where all rows of the range were superseded at its upstream."""
    gap = run_block(7, [], 0, 31, 48, 0)
    blocks = merged_blocks(
        [Chunk([Encoded(gap.runs, encode_block(gap))])], np.zeros(1024, np.uint64)
    )
    assert [block.runs.tolist() for block in blocks] == [gap.runs.tolist()]


def test_one_key_in_several_partitions_is_kept_in_each() -> None:
    numbering = Numbering()
    encoded = []
    for partition in (3, 9, 3):
        block = build_block([b"same", b"other"], [b"1", b"2"])
        runs = make_runs([partition], [2], int(numbering.high[partition]))
        runs["end_seqno"] = runs["horizon"] = runs["start_seqno"] + np.uint64(2)
        numbering.high[partition] += np.uint64(2)
        block.runs = runs
        encoded.append(Encoded(runs, encode_block(block)))
    blocks = merged_blocks([Chunk(encoded)], np.zeros(1024, np.uint64))
    found = [(p, seqno, key) for p, seqno, key, _ in all_rows(blocks)]
    assert sorted(found) == [
        (3, 3, b"other"),
        (3, 4, b"same"),
        (9, 1, b"other"),
        (9, 2, b"same"),
    ] or sorted(found) == [(3, 3, b"same"), (3, 4, b"other"), (9, 1, b"same"), (9, 2, b"other")]


def test_times_stay_with_their_rows() -> None:
    numbering = Numbering()
    chunk = Chunk([numbering.block([(b"a%d" % (i % 3), b"v")]) for i in range(9)])
    merged = merge_slice([chunk], FlushSlice(0, 1024, 0, 1), np.zeros(1024, np.uint64))
    for _, _, data in merged.blocks:
        block = decode_block(data)
        times = (
            np.frombuffer(block.times, "<i8").tolist()
            if block.times
            else [int(block.runs["time"][0])]
        )
        # The newest row of each of the three keys was written at 7, 8 or 9.
        assert set(times) <= {7, 8, 9}


def test_a_delete_behind_a_set_stays_a_delete() -> None:
    numbering = Numbering()
    same = [k for k in (b"x%d" % i for i in range(200_000)) if partition_of(k) == 3][:3]
    block = numbering.block([(same[0], b"v"), (same[1], None), (same[2], b"v")])
    merged = merge_slice([Chunk([block])], FlushSlice(0, 1024, 0, 1), np.zeros(1024, np.uint64))
    found = [decode_block(data) for _, _, data in merged.blocks]
    assert [value for *_, value in all_rows(found)] == [b"v", None, b"v"]


def test_a_merge_has_the_largest_horizon_of_its_inputs() -> None:
    runs = [make_runs([3], 2, 0, 2, 9, 1), make_runs([3], 2, 2, 4, 4, 1)]
    blocks = []
    for run, keys in zip(runs, [[b"a", b"b"], [b"a", b"c"]], strict=True):
        block = with_cells(build_block(keys, [b"v"] * 2))
        block.runs = run
        blocks.append(Encoded(run, encode_block(block)))
    for chunks in ([Chunk(blocks)], [Chunk([block]) for block in blocks]):
        (merged,) = merged_blocks(chunks, np.zeros(1024, np.uint64))
        run = merged.runs[0]
        assert (int(run["end_seqno"]), int(run["horizon"])) == (4, 9)
