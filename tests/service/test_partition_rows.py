"""What the store knows of a partition, through writes, a flush and a restart: every field, and true markers."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.harness import WAIT_SECONDS
from tests.raw import all_rows
from tests.storage.closed import Closed, block_of
from tests.storage.stored_blocks import consumers_of
from upr.config import ServerConfig
from upr.engine.partitions import ACTIVE, REPLICA
from upr.engine.tail import TailEntry
from upr.service.buckets.bucket_service import BucketService
from upr.storage.blocks import last_complete
from upr.storage.directory import DataDirectory
from upr.storage.keyspace import ConsumerRow, PartitionRow
from upr_protocol.block import Block, build_block, make_runs, sealed
from upr_protocol.errors import BucketGoneError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import decode_block, encode_block

NOTHING = np.zeros(1024, np.uint64)
KEY = b"key"
P = partition_of(KEY)
STRETCH = 3
"""A partition that receives parts of a stretch, as a replica will."""


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
    store.write_recovery({P: told, STRETCH: resting}, [], {}, highs)
    store.put_flush(
        [
            (P, 3, encode_block(block_of(P, 0, 3))),
            (STRETCH, 3, encode_block(block_of(STRETCH, 0, 3))),
            (STRETCH, 6, encode_block(block_of(STRETCH, 3, 6, horizon=12))),
        ],
        {P: (3, 3, 3), STRETCH: (6, 3, 12)},
        {},
    )
    consumer = ConsumerRow(1, 6, 2, 5, b"")
    store.put_consumers({(b"replica", P): consumer})
    store.close()
    host = opened(closed)
    await host.write(build_block([KEY], [b"v"]), b"", None, 0)
    assert await host.close()
    assert closed.row(P) == replace(told, stored_high=4, complete=4, horizon=4)
    assert closed.row(STRETCH) == resting
    host = opened(closed)
    table = host.bucket.partitions
    assert table.logs[P] == log
    assert (table.complete[STRETCH], table.horizon[STRETCH], table.high[STRETCH]) == (3, 12, 6)
    assert host.bucket.markers.seqno[STRETCH] == 3
    assert consumers_of(host.disk.store) == {b"replica": {P: consumer}}
    assert await host.close()


def test_a_flush_leaves_what_a_promotion_stored_meanwhile(closed: Closed) -> None:
    store = closed.store()
    row = store.partitions()[P]
    assert isinstance(row, PartitionRow)
    log = row.log.with_record(9, 0, 10, epoch=7)
    store.put_logs({P: (ACTIVE, 7, 1, log)}, served=7)
    store.put_flush([], {P: (3, 2, 5)}, {})
    store.close()
    row = replace(row, state=ACTIVE, epoch=7, purge_seqno=1, log=log, served_epoch=7)
    assert closed.row(P) == replace(row, stored_high=3, complete=2, horizon=5)


def follow_stretch(closed: Closed) -> None:
    """Have STRETCH be a replica's."""
    store = closed.store()
    row = store.partitions()[STRETCH]
    assert isinstance(row, PartitionRow)
    store.write_recovery({STRETCH: replace(row, state=REPLICA)}, [], {}, NOTHING)
    store.close()


@pytest.mark.asyncio
async def test_a_flush_within_a_stretch_stores_the_true_marker(closed: Closed) -> None:
    follow_stretch(closed)
    host = opened(closed)
    # One flush each: up to a marker, a first and a second part of a stretch, and its end.
    blocks = [block_of(STRETCH, *ends, horizon=top) for *ends, top in
              ((0, 2, 2), (2, 4, 9), (4, 6, 9), (6, 9, 9))]  # fmt: skip
    for block, complete in zip(blocks, (2, 2, 2, 9), strict=True):
        await receive(host, block)
        assert await host.close()
        row, horizon = closed.row(STRETCH), int(block.runs["horizon"][0])
        end = int(block.runs["end_seqno"][0])
        assert (row.stored_high, row.complete, row.horizon) == (end, complete, horizon)
        host = opened(closed)
        heads = host.disk.store.heads(STRETCH)
        assert last_complete(heads) == complete
        table = host.bucket.partitions
        assert (table.complete[STRETCH], table.horizon[STRETCH]) == (complete, horizon)
        assert host.bucket.markers.seqno[STRETCH] == complete
    assert await host.close()


CATCH_UP = ((0, 2, 2), (2, 6, 12), (6, 7, 7), (7, 9, 12), (9, 12, 12))
"""Start, end and horizon of what a replica receives: a marker, then a stretch with a run inside that has a marker of its own."""


def part_of(start: int, end: int, horizon: int) -> Block:
    """Rows of three keys, which supersede each other across markers and within the stretch."""
    rows = range(start + 1, end + 1)
    keys, values = [b"key %d" % (row % 3) for row in rows], [b"%d" % row for row in rows]
    run = make_runs([STRETCH], len(keys), start, end, horizon, 1)
    return sealed(
        replace(build_block(keys, values, np.full(len(keys), STRETCH, np.uint32)), runs=run)
    )


async def state_at_marker(host: BucketService) -> dict[bytes, bytes | None]:
    """The rows of store and tail at or below the last complete marker, folded."""
    bucket, marker = host.bucket, int(host.bucket.partitions.complete[STRETCH])

    def stored() -> tuple[int, list[Block]]:
        ends = [head.end for head in host.disk.store.heads(STRETCH)]
        blocks = [decode_block(data) for data in host.disk.store.blocks(STRETCH, ends)]
        return (ends[-1] if ends else 0), blocks

    # In the store's thread: a merge between the two looks would take blocks away.
    end, blocks = await host.disk.in_store_thread(stored)
    blocks += [e.block() for e in bucket.tail.range(bucket.tail.first, bucket.tail.end)
               if int(e.runs["end_seqno"][0]) > end]  # fmt: skip
    return {key: value for _, seqno, key, value in all_rows(blocks) if seqno <= marker}


async def kill(host: BucketService) -> None:
    host.leave(BucketGoneError("killed"))
    await host.discard()


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("received", range(1, len(CATCH_UP) + 1))
async def test_no_flush_and_no_restart_of_a_catch_up_loses_a_marker(
    closed: Closed, received: int
) -> None:
    follow_stretch(closed)
    begun = shutil.copytree(closed.path, closed.path.with_name("begun"))
    told = CATCH_UP[:received]
    horizon = max(top for _, _, top in told)
    marker = max(
        end for i, (_, end, _) in enumerate(told) if end == max(t for *_, t in told[: i + 1])
    )
    rows = {b"key %d" % (row % 3): b"%d" % row for row in range(1, marker + 1)}
    for mask in range(2**received):
        shutil.rmtree(closed.path)
        shutil.copytree(begun, closed.path)
        host = opened(closed)
        host.disk.store.clear_proof()
        for i, (start, end, top) in enumerate(told):
            await receive(host, part_of(start, end, top))
            if mask >> i & 1:
                assert await host.flusher.flush(wanted=True)
        for _ in range(2):
            table = host.bucket.partitions
            found = (
                table.complete[STRETCH],
                table.horizon[STRETCH],
                host.bucket.markers.seqno[STRETCH],
            )
            assert found == (marker, horizon, marker), f"flushes {mask:b}"
            assert await state_at_marker(host) == rows, f"flushes {mask:b}"
            await kill(host)
            host = opened(closed)
        await kill(host)


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
    row = closed.row(P)
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
