"""Compressed blocks in the store: merged like others, and read as the reader can take them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.raw import all_rows, is_compressed
from tests.storage.test_merge import Batch, Numbering, batches_strategy
from upr.storage import blocks as blocks_module
from upr.storage import compact
from upr.storage import read as reading
from upr.storage.blocks import Encoded, compressor, keys_of, tombstones_of
from upr.storage.compact import Chunk, FlushSlice, chunks_of, merge_slice, rebuild
from upr.storage.read import ReadResult, Showing, read_blocks
from upr.storage.store import ReadRequest, Store
from upr_protocol.block import build_block, make_runs, sealed
from upr_protocol.errors import DataDirectoryError
from upr_protocol.limits import FRAME_PLAIN_BYTES
from upr_protocol.wire import codec
from upr_protocol.wire.codec import compress_block, decode_block, decompress_block, encode_block

ALL = FlushSlice(0, 1024, 0, 1)


def nothing_stored() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.zeros(1024, np.uint64)


def packed(block: Encoded) -> Encoded:
    return Encoded(block.runs, compress_block(block.data))


def block_of(partition: int, start: int, rows: int, value: bytes, marker: bytes = b"") -> bytes:
    """A stored block of one run in which every seqno is a row of its own key."""
    keys = [b"%06d%s" % (start + i, marker) for i in range(rows)]
    end = start + rows
    block = build_block(keys, [value] * rows)
    return encode_block(
        sealed(replace(block, runs=make_runs([partition], [rows], start, end, end, 1)))
    )


@given(batches_strategy)
@settings(max_examples=60)
def test_compressed_inputs_and_outputs_tell_the_same(batches: list[Batch]) -> None:
    numbering = Numbering()
    blocks = [numbering.block(batch) for batch in batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "COMPRESS_BYTES_MIN", 1)
        patch.setattr(codec, "COMPRESS_FRACTION", 10)
        inputs = [packed(block) for block in blocks]
        merged = merge_slice([Chunk(inputs)], ALL, nothing_stored(), compress=compress_block)
    assert all(is_compressed(block.data) for block in inputs)
    assert all(is_compressed(data) for _, _, data in merged.blocks)
    plain = merge_slice([Chunk(blocks)], ALL, nothing_stored())
    assert merged.ends == plain.ends
    assert [(p, end, decompress_block(data)) for p, end, data in merged.blocks] == plain.blocks


def test_flushed_blocks_are_compressed_and_noise_is_not() -> None:
    rng = np.random.default_rng(1)
    same = [Encoded(decode_block(d).runs, d) for d in (block_of(3, 0, 100, b"same" * 20),)]
    noise = build_block([b"k%d" % i for i in range(100)], [rng.bytes(200) for _ in range(100)])
    runs = make_runs([7], [100], 0, 100, 100, 1)
    same.append(Encoded(runs, encode_block(sealed(replace(noise, runs=runs)))))
    merged = merge_slice([Chunk(same)], ALL, nothing_stored(), compress=compress_block)
    assert {p: is_compressed(data) for p, _, data in merged.blocks} == {3: True, 7: False}


def test_a_stretch_is_cut_by_what_it_has_before_compressing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_COLUMN_BYTES", 20_000)
    data = block_of(3, 0, 1000, b"v" * 100)
    chunk = Chunk([Encoded(decode_block(data).runs, data)])
    for found in (
        merge_slice([chunk], ALL, nothing_stored(), compress=compress_block).blocks,
        rebuild(chunk.sorted(), np.arange(1000), (3, 0, 1000, 1000), compress_block)[0],
    ):
        assert len(found) > 5
        assert all(is_compressed(data) for _, _, data in found)
        blocks = [decode_block(data) for _, _, data in found]
        assert all(block.column_bytes <= 20_100 for block in blocks)
        assert len(all_rows(blocks)) == 1000


def test_keys_and_tombstones_of_a_compressed_block() -> None:
    block = build_block(
        [b"key%04d" % i for i in range(100)],
        [None if i % 10 == 3 else b"v" * 50 for i in range(100)],
    )
    runs = make_runs([5], [100], 40, 140, 140, 9)
    plain = Encoded(runs, encode_block(sealed(replace(block, runs=runs))))
    small = packed(plain)
    assert is_compressed(small.data)
    assert keys_of(small).equals(keys_of(plain))
    found = tombstones_of(small)
    assert len(found[0]) == 10
    for a, b in zip(found, tombstones_of(plain), strict=True):
        assert (a == b).all()


def test_chunks_are_as_large_as_what_they_hold_when_decompressed() -> None:
    blocks = []
    for i in range(40):
        data = compress_block(block_of(i, 0, 1000, b"v" * 1000))
        assert len(data) < 20_000
        blocks.append(Encoded(decode_block(data).runs, data))
    sizes = [int(chunk.column_bytes().sum()) for chunk in chunks_of(blocks)]
    assert len(sizes) > 3
    assert max(sizes) < compact.CHUNK_BYTES + 2**21


def filled(folder: Path, blocks: list[tuple[int, int, bytes]]) -> Store:
    store = Store(folder / "store")
    store.put_flush(blocks, {}, {})
    return store


def rows_of(results: list[ReadResult]) -> list[tuple[int, int, bytes, bytes | None]]:
    assert all(result.error is None for result in results)
    return all_rows(decode_block(block.data) for result in results for block in result.blocks)


def test_readers_get_what_they_can_take(tmp_path: Path) -> None:
    first, second = block_of(7, 0, 50, b"v" * 100), block_of(7, 50, 50, b"v" * 100)
    store = filled(tmp_path, [(7, 50, compress_block(first)), (7, 100, compress_block(second))])

    def read(above: int, **options: Any) -> list[bytes]:
        (result,) = read_blocks(store, [ReadRequest(7, above)], 1 << 20, **options)
        assert result.error is None
        return [block.data for block in result.blocks]

    assert read(0) == [first, second]
    assert read(0, accept_zstd=True) == [compress_block(first), compress_block(second)]
    cut, whole = read(20, accept_zstd=True)
    assert (is_compressed(cut), is_compressed(whole)) == (False, True)
    assert [row[1] for row in all_rows([decode_block(cut)])] == list(range(21, 51))
    for data in read(0, showing=Showing(keys_only=True), accept_zstd=True):
        assert not is_compressed(data)
        assert {row[3] for row in all_rows([decode_block(data)])} == {None}
    store.close()


@pytest.mark.parametrize(
    ("accept_zstd", "keys_only"), [(True, False), (False, False), (True, True)]
)
def test_a_read_decompresses_no_more_than_a_frame_may_hold(
    tmp_path: Path, accept_zstd: bool, keys_only: bool
) -> None:
    rows = 900
    data = [
        (7, rows * (i + 1), compress_block(block_of(7, rows * i, rows, bytes(1000))))
        for i in range(12)
    ]
    store = filled(tmp_path, [*data, (8, 5, block_of(8, 0, 5, b"v"))])
    found = []
    above = 0
    reads = 0
    while above < 12 * rows:
        requests = [ReadRequest(7, above), ReadRequest(8, 0)]
        results = read_blocks(
            store, requests, 512 * 1024, showing=Showing(keys_only), accept_zstd=accept_zstd
        )
        blocks = [decode_block(block.data) for block in results[0].blocks]
        assert blocks
        assert sum(block.column_bytes for block in blocks) <= FRAME_PLAIN_BYTES
        if above + rows * len(blocks) < 12 * rows:
            assert (results[1].blocks, results[1].error) == ([], None)
        found += all_rows(blocks)
        above = int(blocks[-1].runs["end_seqno"][0])
        reads += 1
    assert reads >= 3
    assert [row[1] for row in found] == list(range(1, 12 * rows + 1))
    store.close()


def test_a_block_larger_than_the_limit_goes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "FRAME_PLAIN_BYTES", 10_000)
    blocks = [
        (p, 20, compress_block(block_of(p, 0, 20, bytes(size))))
        for p, size in enumerate((100, 900, 100))
    ]
    store = filled(tmp_path, blocks)
    left = {0: 0, 1: 0, 2: 0}
    taken = []
    while left:
        requests = [ReadRequest(p, above) for p, above in left.items()]
        results = read_blocks(store, requests, 1 << 20, accept_zstd=True)
        assert all(result.error is None for result in results)
        taken.append([result.request.partition for result in results if result.blocks])
        assert taken[-1]
        for partition in taken[-1]:
            del left[partition]
    assert taken == [[0], [1], [2]]
    store.close()


def test_a_damaged_compressed_block_is_an_error_of_its_partition(tmp_path: Path) -> None:
    good = compress_block(block_of(1, 0, 50, b"v" * 100))
    bad = bytearray(compress_block(block_of(2, 0, 50, b"v" * 100)))
    bad[len(bad) // 2] ^= 4
    store = filled(tmp_path, [(1, 50, good), (2, 50, bytes(bad))])
    for accept in (False, True):
        results = read_blocks(
            store,
            [ReadRequest(2, 0), ReadRequest(1, 0)],
            1 << 20,
            accept_zstd=accept,
        )
        assert "damaged" in str(results[0].error)
        assert results[0].blocks == []
        assert len(rows_of(results[1:])) == 50
    store.close()


def test_settings_of_a_bucket() -> None:
    assert compressor("") is None
    assert compressor("zstd") is compress_block
    with pytest.raises(DataDirectoryError, match="'lz4'"):
        compressor("lz4")
