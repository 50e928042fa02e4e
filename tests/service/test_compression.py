"""A bucket whose stored blocks are compressed: who asks gets them so, who does not never does."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer, wait_until
from tests.raw import RawClient, RawFollow, all_rows, is_compressed, start_at
from tests.service.test_follow import fill
from upr.storage import keyspace
from upr.storage.store import Store
from upr_client import Client, Tuning
from upr_client.changes import events
from upr_protocol.block import Block, build_block
from upr_protocol.limits import FRAME_PLAIN_BYTES
from upr_protocol.wire.codec import (
    Tokens,
    block_from_message,
    compress_block,
    encode_block,
    joined_blocks,
)
from upr_protocol.wire.v1 import types_pb2 as types

ROWS: list[tuple[bytes, bytes | None]] = [
    (
        b"user:%05d" % i,
        json.dumps({"name": f"user {i}", "groups": ["a", "b"], "about": "x" * 200}).encode(),
    )
    for i in range(6000)
]


def zstd_server(server_process: StartServer) -> RunningServer:
    """Start a server whose bucket is compressed when it is stored."""
    server = server_process()
    with Client(server.target) as client:
        client.admin.drop_bucket("default")
        client.admin.create_bucket("default", compression="zstd")
    wait_until(lambda: len([*server.data.glob("buckets/*")]) == 1, "the end of the other one")
    return server


def restart(server: RunningServer) -> None:
    """Have all that was written stored."""
    assert server.terminate() == 0
    server.start()


def damage(path: Path, partition: int) -> None:
    """Flip a bit in the middle of a partition's first block."""
    environment = lmdb.open(str(path), max_dbs=16, map_size=2**30)
    blocks = environment.open_db(b"blocks")
    with environment.begin(write=True) as txn, txn.cursor(db=blocks) as cursor:
        assert cursor.set_range(keyspace.partition_key(partition))
        data = bytearray(cursor.value())
        assert is_compressed(bytes(data))
        data[len(data) // 2] ^= 8
        txn.put(cursor.key(), bytes(data), db=blocks)
    environment.close()


async def drain(follow: RawFollow, partitions: range) -> tuple[list[Block], int]:
    """Read partitions to their end; return the blocks, and how many came compressed."""
    await follow.start(*(start_at(p, until_now=True) for p in partitions))
    blocks: list[Block] = []
    compressed = ended = 0
    while ended < len(partitions):
        message = await follow.read()
        if message.HasField("frame"):
            compressed += sum(bool(block.zstd) for block in message.frame.blocks)
            blocks += map(block_from_message, message.frame.blocks)
        elif message.HasField("ended"):
            assert message.ended.problem.reason == "FINISHED"
            ended += len(message.ended.streams)
    return blocks, compressed


@pytest.mark.asyncio
async def test_only_who_asks_gets_compressed_blocks(server_process: StartServer) -> None:
    server = zstd_server(server_process)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write(ROWS)
        # From the tail they are never compressed.
        _, compressed = await drain(await client.follow(accept_zstd=True), range(1024))
        assert compressed == 0
    restart(server)
    async with RawClient(server.target) as client:
        for options, any_compressed in (
            ({}, False),
            ({"accept_zstd": True}, True),
            ({"accept_zstd": True, "keys_only": True}, False),
        ):
            blocks, compressed = await drain(await client.follow(**options), range(1024))
            assert (compressed > 0) == any_compressed
            found = sorted((key, value) for _, _, key, value in all_rows(blocks))
            if "keys_only" in options:
                assert found == sorted((key, None) for key, _ in ROWS)
            else:
                assert found == sorted(ROWS)


@pytest.mark.asyncio
async def test_a_stream_from_the_middle_of_a_compressed_block(server_process: StartServer) -> None:
    server = zstd_server(server_process)
    async with RawClient(server.target) as client:
        await fill(await client.writer(""), 5, 100, 100)
    restart(server)
    async with RawClient(server.target) as client:
        newest = (await client.logs(5))[0][-1][0]
        follow = await client.follow(accept_zstd=True)
        await follow.start(start_at(5, 60, newest, data_id=newest))
        (block,) = (await follow.until("frame")).frame.blocks
        assert not block.zstd
        assert [row[1] for row in all_rows([block_from_message(block)])] == list(range(61, 101))


@pytest.mark.asyncio
async def test_credit_counts_the_bytes_that_are_sent(server_process: StartServer) -> None:
    server = zstd_server(server_process)
    partitions = range(30)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for i in partitions:
            await fill(writer, i, 100, 100)
    restart(server)
    async with RawClient(server.target) as client:
        follow = await client.follow(accept_zstd=True, credit_bytes=2000, heartbeat_seconds=0.2)
        blocks, compressed = await drain(follow, partitions)
        assert compressed == len(partitions)
        assert sum(block.rows for block in blocks) == 100 * len(partitions)
        # Larger than the window: it comes only when not one byte is outstanding any more.
        await fill(await client.writer(""), 40, 1, 5000)
        await follow.start(start_at(40))
        frame = (await follow.until("frame")).frame
        assert frame.credit_bytes == frame.blocks[0].ByteSize() > 5000


def everything(client: Client, credit_bytes: int) -> list[tuple[bytes, bytes | None]]:
    rows: list[tuple[bytes, bytes | None]] = []
    with client.bucket().changes(until="now", tuning=Tuning(credit_bytes=credit_bytes)) as changes:
        for batch in changes.batches():
            rows += [(change.key, change.value) for change in batch.changes]
    return sorted(rows)


@pytest.mark.parametrize("installed", [True, False])
def test_the_sdk_reads_with_and_without_the_library(
    server_process: StartServer, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    server = zstd_server(server_process)
    with Client(server.target) as client:
        client.bucket().write_many(ROWS)
        restart(server)
        if not installed:
            monkeypatch.setitem(sys.modules, "zstandard", None)
        compressed: list[bool] = []

        def decode(messages: Sequence[types.Block], tokens: Tokens) -> tuple[list[Block], Tokens]:
            compressed.extend(bool(message.zstd) for message in messages)
            return joined_blocks(messages, tokens)

        monkeypatch.setattr(events, "joined_blocks", decode)
        assert everything(client, 20_000) == sorted(ROWS)
        assert any(compressed) == installed


def test_compressed_frames_that_wait_are_not_more_together_than_a_frame_may_be(
    server_process: StartServer,
) -> None:
    server = zstd_server(server_process)
    keys = [b"%d" % number for number in range(40)]
    words: list[str] = []
    with Client(server.target) as client:
        bucket = client.bucket()
        for key in keys:
            bucket.set(key, bytes(2**20))
        restart(server)
        with bucket.changes(on_status=words.append) as changes:
            batches = iter(changes.batches())
            found = [change.key for change in next(batches).changes]
            # Each of the others is some MiB, of which few bytes are on the wire.
            time.sleep(1)
            while len(found) < len(keys):
                batch = next(batches)
                assert (
                    sum(len(change.value or b"") for change in batch.changes) <= FRAME_PLAIN_BYTES
                )
                found += [change.key for change in batch.changes]
    assert sorted(found) == sorted(keys)
    assert not [one for one in words if "lost" in one], words


@pytest.mark.asyncio
async def test_a_compressed_write_is_refused(target: str) -> None:
    block = build_block([b"same"] * 100, [b"value" * 20] * 100)
    async with RawClient(target) as client:
        writer = await client.writer("")
        message = types.Block.FromString(compress_block(encode_block(block)))
        assert message.zstd
        await writer.send_block(message)
        refused = (await writer.result()).refused
        assert refused.reason == "INVALID_ARGUMENT"
        assert "compressed" in refused.message
        # The call goes on.
        assert not (await writer.write([(b"key", b"value")])).HasField("refused")


@pytest.mark.asyncio
@pytest.mark.parametrize("accept", [False, True])
async def test_a_damaged_block_ends_its_stream_alone(
    server_process: StartServer, accept: bool
) -> None:
    server = zstd_server(server_process)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for partition in (1, 2, 3):
            await fill(writer, partition, 100, 100)
    assert server.terminate() == 0
    (folder,) = server.data.glob("buckets/*")
    damage(folder / "store", 2)
    server.start()
    async with RawClient(server.target) as client:
        follow = await client.follow(accept_zstd=accept)
        await follow.start(*(start_at(p, until_now=True) for p in (1, 2, 3)))
        blocks, ended = await follow.blocks_until_ended(3)
        reasons = {s.partition: e.problem.reason for e in ended for s in e.streams}
        assert reasons == {1: "FINISHED", 2: "STORAGE_ERROR", 3: "FINISHED"}
        assert {row[0] for row in all_rows(blocks)} == {1, 3}
        # The call goes on.
        await fill(await client.writer(""), 1, 1)
        await follow.start(start_at(1, until_now=True))
        blocks, _ = await follow.blocks_until_ended(1)
        assert len(all_rows(blocks)) == 101


def test_an_unknown_compression_is_refused(server_process: StartServer) -> None:
    server = server_process()
    assert server.terminate() == 0
    (folder,) = server.data.glob("buckets/*")
    store = Store(folder / "store")
    identity = store.identity()
    assert identity is not None
    store.create(replace(identity, compression="lz4"), {})
    store.close()
    before = len(server.log_text())
    server.launch()
    assert server.wait() == 2
    line = server.log_text()[before:]
    assert "'lz4'" in line
    assert "Traceback" not in line
