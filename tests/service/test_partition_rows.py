"""What the store knows of a partition, through writes, a flush and a restart: every field, and true markers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.harness import WAIT_SECONDS
from tests.storage.closed import Closed, block_of
from tests.storage.stored_blocks import consumers_of
from upr.config import ServerConfig
from upr.engine.partitions import REPLICA
from upr.engine.tail import TailEntry
from upr.service.buckets.bucket_service import BucketService
from upr.storage.blocks import last_complete
from upr.storage.directory import DataDirectory
from upr.storage.keyspace import ConsumerRow, PartitionRow
from upr_protocol.block import Block, build_block
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import encode_block

NOTHING = np.zeros(1024, np.uint64)
KEY = b"key"
P = partition_of(KEY)
STRETCH = 3
"""A partition that receives parts of a stretch, as a replica will."""


@pytest.fixture
def closed(tmp_path: Path) -> Closed:
    return Closed(tmp_path / "data")


def opened(closed: Closed) -> BucketService:
    host = BucketService(closed.bucket, ServerConfig(data=closed.path))

    async def failed() -> None:
        raise AssertionError("the storage failed")

    host.start(failed)
    return host


async def receive(host: BucketService, *blocks: Block) -> None:
    """Take blocks as they came from elsewhere, and wait until they are durable."""
    for block in blocks:
        number = host.bucket.tail.append(TailEntry(block.runs, encode_block(block), (), 1))
        host.bucket.partitions.received(block.runs)
    host._work.set()
    await asyncio.wait_for(host.durable(number), WAIT_SECONDS)


def row_of(closed: Closed, partition: int) -> PartitionRow:
    store = closed.store()
    row = store.partitions()[partition]
    store.close()
    assert isinstance(row, PartitionRow)
    return row


@pytest.mark.asyncio
async def test_every_field_survives_a_flush_and_a_restart(closed: Closed) -> None:
    log = FailoverLog((FailoverRecord(5, 0, 1), FailoverRecord(6, 2, 4)))
    told = PartitionRow(
        1, 5, 0, 3, 0, log, complete=3, horizon=3, served_epoch=4, reason="as it was", since=77
    )
    resting = replace(told, state=REPLICA, stored_high=6, complete=3, horizon=12)
    store = closed.store()
    highs = NOTHING.copy()
    highs[P], highs[STRETCH] = 3, 6
    store.write_recovery({}, [], {}, highs)
    store.put_flush(
        [
            (P, 3, encode_block(block_of(P, 0, 3))),
            (STRETCH, 3, encode_block(block_of(STRETCH, 0, 3))),
            (STRETCH, 6, encode_block(block_of(STRETCH, 3, 6, horizon=12))),
        ],
        {P: told, STRETCH: resting},
        {},
    )
    consumer = ConsumerRow(1, 6, 2, 5, b"", 3)
    store.put_consumers({(b"replica", P): consumer})
    store.close()
    host = opened(closed)
    await host.write(build_block([KEY], [b"v"]), b"", None, 0)
    assert await host.close()
    assert row_of(closed, P) == replace(told, stored_high=4, complete=4, horizon=4)
    assert row_of(closed, STRETCH) == resting
    host = opened(closed)
    table = host.bucket.partitions
    assert table.logs[P] == log
    assert (table.complete[STRETCH], table.horizon[STRETCH], table.high[STRETCH]) == (3, 12, 6)
    assert host.bucket.markers.seqno[STRETCH] == 3
    assert consumers_of(host.disk.store) == {b"replica": {P: consumer}}
    assert await host.close()


@pytest.mark.asyncio
async def test_a_flush_within_a_stretch_stores_the_true_marker(closed: Closed) -> None:
    store = closed.store()
    row = store.partitions()[STRETCH]
    assert isinstance(row, PartitionRow)
    store.write_recovery({STRETCH: replace(row, state=REPLICA)}, [], {}, NOTHING)
    store.close()
    host = opened(closed)
    # One flush each: up to a marker, a first and a second part of a stretch, and its end.
    blocks = [block_of(STRETCH, *ends, horizon=top) for *ends, top in
              ((0, 2, 2), (2, 4, 9), (4, 6, 9), (6, 9, 9))]  # fmt: skip
    for block, complete in zip(blocks, (2, 2, 2, 9), strict=True):
        await receive(host, block)
        assert await host.close()
        row, horizon = row_of(closed, STRETCH), int(block.runs["horizon"][0])
        end = int(block.runs["end_seqno"][0])
        assert (row.stored_high, row.complete, row.horizon) == (end, complete, horizon)
        host = opened(closed)
        heads = host.disk.store.heads(STRETCH)
        assert last_complete(heads) == complete
        table = host.bucket.partitions
        assert (table.complete[STRETCH], table.horizon[STRETCH]) == (complete, horizon)
        assert host.bucket.markers.seqno[STRETCH] == complete
    assert await host.close()


@pytest.mark.asyncio
async def test_an_unclean_start_within_a_stored_stretch_goes_on_at_its_marker(
    closed: Closed,
) -> None:
    closed.put(block_of(P, 0, 3), block_of(P, 3, 5, horizon=9), block_of(P, 5, 6, horizon=9))
    closed.put(block_of(P + 1, 0, 7))
    host = opened(closed)
    assert [head.end for head in host.disk.store.heads(P)] == [3]
    assert [head.end for head in host.disk.store.heads(P + 1)] == [7]
    written = await host.write(build_block([KEY], [b"v"]), b"", None, 0)
    assert (written.runs["start_seqno"][0], written.runs["end_seqno"][0]) == (3, 4)
    assert await host.close()
    row = row_of(closed, P)
    assert [record.seqno for record in row.log] == [0, 3]
    assert [record.epoch for record in row.log] == [1, 1]
    assert (row.stored_high, row.complete, row.horizon) == (4, 4, 4)


def test_a_directory_keeps_its_id(tmp_path: Path) -> None:
    first = DataDirectory(tmp_path / "a")
    first.close()
    again, other = DataDirectory(tmp_path / "a"), DataDirectory(tmp_path / "b")
    assert len(first.id) == 16
    assert (first.id, first.cluster) == (again.id, again.cluster) != (other.id, "x")
    assert again.id != other.id
    again.close()
    other.close()
