"""Reading for streams: what must be there and is not is an error of that partition alone."""

from pathlib import Path

import pytest

from tests.service.test_vectors_live import run_of
from upr.storage.read import read_blocks
from upr.storage.store import ReadRequest, Store
from upr_protocol.block import RUN
from upr_protocol.limits import FRAME_PLAIN_BYTES


def test_a_missing_block_is_an_error_of_its_partition(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.put_flush([(7, 20, run_of(7, 10, 20, 20)), (8, 5, run_of(8, 0, 5, 5))], {}, {})
    requests = [ReadRequest(7, 0), ReadRequest(8, 0), ReadRequest(9, 0), ReadRequest(8, 3)]
    results = read_blocks(store, requests, 1 << 20)
    # 7 has a gap before its first block, 9 has none at all.
    assert [len(result.blocks) for result in results] == [0, 1, 0, 1]
    assert [result.error is not None for result in results] == [True, False, True, False]
    assert "partition 9" in str(results[2].error)
    assert int(results[3].blocks[0].runs["start_seqno"][0]) == 3
    store.close()


def test_requests_behind_the_byte_limit_wait_for_their_turn(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.put_flush([(p, 5, run_of(p, 0, 5, 5)) for p in range(3)], {}, {})
    results = read_blocks(store, [ReadRequest(p, 0) for p in range(3)], 1)
    assert [(len(r.blocks), r.error) for r in results] == [(1, None), (0, None), (0, None)]
    store.close()


@pytest.mark.parametrize("place", ["table", "keys", "last byte"])
def test_a_flipped_bit_is_an_error_of_its_partition(tmp_path: Path, place: str) -> None:
    whole = run_of(7, 0, 20, 20)
    data = bytearray(whole)
    # In the table it is the time: every other number of it is looked at by itself.
    at = {"table": 2 + RUN.itemsize - 8, "keys": len(data) // 2, "last byte": len(data) - 1}[place]
    data[at] ^= 1
    store = Store(tmp_path / "store")
    store.put_flush([(7, 20, bytes(data)), (8, 5, run_of(8, 0, 5, 5))], {}, {})
    requests = [ReadRequest(7, 0), ReadRequest(8, 0)]
    results = read_blocks(store, requests, 1 << 20)
    assert [len(result.blocks) for result in results] == [0, 1]
    assert results[0].error is not None
    assert "CRC32C" in str(results[0].error)
    store.close()


def test_a_read_is_limited_by_what_it_sends_and_by_what_it_cuts(tmp_path: Path) -> None:
    """Who is a little behind gets a little of each of many large blocks, and few reads do for all."""
    rows, partitions = 20_000, 64
    size = len(run_of(0, 0, rows, rows))
    store = Store(tmp_path / "store")
    blocks = [(p, rows, run_of(p, 0, rows, rows)) for p in range(partitions)]
    store.put_flush(blocks, {}, {})
    requests = [ReadRequest(p, rows - 10) for p in range(partitions)]
    results = read_blocks(store, requests, size // 2)
    cut = sum(len(result.blocks) for result in results)
    assert (cut - 1) * size < FRAME_PLAIN_BYTES <= cut * size < FRAME_PLAIN_BYTES + size
    assert [int(r.blocks[0].runs["count"][0]) for r in results[:cut]] == [10] * cut
    assert not any(result.blocks or result.error for result in results[cut:])
    # Those that are sent whole count as they are.
    whole = read_blocks(store, [ReadRequest(p, 0) for p in range(partitions)], 3 * size)
    assert [len(result.blocks) for result in whole] == [1, 1, 1, *([0] * (partitions - 3))]
    store.close()
