"""The tail's limit holds whatever writers and readers do, and a slow reader costs the server nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS
from tests.raw import RawClient, RawFollow, all_rows, start_at
from upr_protocol.block import block_values, build_block
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import block_from_message, block_to_message
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import types_pb2 as types

MIB = 2**20
FOLLOWERS = 5
VALUE_BYTES = 4096
KEYS = 2000
ROWS_IN_WRITE = 250
WRITES = 40
IN_FLIGHT = 16


async def status(client: RawClient) -> admin.GetStatusResponse:
    response: admin.GetStatusResponse = await client.admin.GetStatus(
        admin.GetStatusRequest(), timeout=WAIT_SECONDS
    )
    return response


@asynccontextmanager
async def tail_watched(client: RawClient) -> AsyncIterator[list[admin.GetStatusResponse]]:
    """Ask for the status over and over while the body runs; yields what was answered."""
    seen: list[admin.GetStatusResponse] = []

    async def watch() -> None:
        while True:
            seen.append(await status(client))

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def rows_of_write(number: int) -> list[tuple[bytes, bytes]]:
    filler = b"x" * (VALUE_BYTES - 16)
    first = number * ROWS_IN_WRITE
    return [
        (b"key %d" % (i * 7919 % KEYS), b"%016d" % i + filler)
        for i in range(first, first + ROWS_IN_WRITE)
    ]


async def write_all(client: RawClient) -> tuple[dict[bytes, bytes], int]:
    """Write about 40 MB; returns each key's last value, and the size of the largest write."""
    writer = await client.writer("")
    truth: dict[bytes, bytes] = {}
    largest = 0
    for number in range(WRITES):
        rows = rows_of_write(number)
        truth.update(rows)
        message = block_to_message(build_block([k for k, _ in rows], [v for _, v in rows]))
        largest = max(largest, message.ByteSize())
        await writer.send_block(message)
        if number >= IN_FLIGHT:
            assert not (await writer.result()).HasField("refused")
    for _ in range(IN_FLIGHT):
        assert not (await writer.result()).HasField("refused")
    await writer.close()
    return truth, largest


async def read_to(follow: RawFollow, highs: dict[int, int]) -> dict[bytes, bytes | None]:
    """Read until every partition has reached its high seqno at a marker; returns each key's last value."""
    state: dict[bytes, bytes | None] = {}
    reached = dict.fromkeys(highs, 0)
    behind = {partition for partition, high in highs.items() if high}
    while behind:
        message = await follow.read()
        if not message.HasField("frame"):
            continue
        for block in map(block_from_message, message.frame.blocks):
            for partition, seqno, key, value in all_rows([block]):
                assert partition_of(key) == partition
                assert seqno > reached[partition]
                state[key] = value
            for run in block.runs:
                partition = int(run["partition"])
                reached[partition] = int(run["end_seqno"])
                if int(run["horizon"]) == reached[partition] == highs[partition]:
                    behind.discard(partition)
    return state


@pytest.mark.long
@pytest.mark.asyncio
async def test_stalled_followers_and_large_commits_leave_the_tail_at_its_limit(
    server_process: StartServer,
) -> None:
    limit = 4 * MIB
    server = server_process("--tail-bytes", str(limit))
    async with RawClient(server.target) as client:
        stalled = [await client.follow(heartbeat_seconds=3600) for _ in range(FOLLOWERS)]
        for follow in stalled:
            await follow.start(*(start_at(p) for p in range(1024)))
        before = await status(client)
        assert (before.follow_calls, before.buckets[0].streams) == (FOLLOWERS, FOLLOWERS * 1024)
        async with tail_watched(client) as seen:
            truth, largest = await write_all(client)
        # Of a write the tail holds the bytes, its run table of at most 1024 records twice, and little else.
        allowed = limit + largest + 2 * 1024 * 48 + 1024
        tails = [one.buckets[0].tail_bytes for one in seen]
        assert len(tails) > 20, "the tail was hardly looked at"
        assert max(tails) <= allowed
        assert max(tails) > limit // 4, "the tail never held anything"
        assert {one.buckets[0].tail_limit_bytes for one in seen} == {limit}
        grown = max(one.anonymous_bytes for one in seen) - before.anonymous_bytes
        assert grown < 120 * MIB, f"{grown / MIB:.0f} MiB more than idle"
        assert (await status(client)).buckets[0].streams_from_store > 0

        highs = {info.partition: info.high_seqno for info in await client.partitions()}
        assert sum(highs.values()) == WRITES * ROWS_IN_WRITE
        for follow in stalled:
            assert await read_to(follow, highs) == truth
            follow.call.cancel()


@pytest.mark.asyncio
async def test_a_slow_reader_of_a_hot_key_gets_few_rows_and_only_true_markers(
    server_process: StartServer,
) -> None:
    writes, rows_in_block = 100_000, 500
    key = b"hot"
    partition = partition_of(key)
    server = server_process("--tail-bytes", str(MIB))
    async with RawClient(server.target) as client:
        follow = await client.follow(credit_bytes=2000)
        await follow.start(start_at(partition))
        writer = await client.writer("")
        written = {seqno: b"%0100d" % seqno for seqno in range(1, writes + 1)}
        received = markers = 0
        value: bytes | None = None
        reached = horizon = 0

        async def read_frame() -> None:
            nonlocal received, markers, value, reached, horizon
            message = await follow.read()
            if not message.HasField("frame"):
                return
            for block in map(block_from_message, message.frame.blocks):
                received += block.rows
                value = ([value, *block_values(block)])[-1]
                for run in block.runs:
                    assert int(run["start_seqno"]) <= reached < int(run["end_seqno"])
                    reached = int(run["end_seqno"])
                    horizon = max(horizon, int(run["horizon"]))
                if horizon == reached:
                    markers += 1
                    assert value == written[reached], f"the marker at {reached} is not true"

        for first in range(1, writes, rows_in_block):
            values = [written[seqno] for seqno in range(first, first + rows_in_block)]
            block = build_block([key] * rows_in_block, values)
            await writer.send_block(block_to_message(block), durability=types.DURABILITY_DISK)
            result = await writer.result()
            assert not result.HasField("refused"), result.refused
            if first % (20 * rows_in_block) == 1:
                await read_frame()
        while reached < writes:
            await read_frame()
        assert (reached, horizon, value) == (writes, writes, written[writes])
        assert markers > 5
        assert received < writes // 4, f"{received} rows of {writes} writes"
        await follow.call.done_writing()
        while await follow.call.read() is not grpc.aio.EOF:
            pass
