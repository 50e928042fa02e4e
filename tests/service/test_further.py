"""Further columns under a real server: whatever becomes of the rows, each keeps its cells."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.raw import RawClient, RawWriter, cells_for, check_cells, start_at, with_cells
from tests.service.keys import some_keys
from upr_client import AsyncClient, Only
from upr_client.types import AsyncBucket
from upr_protocol.block import FurtherColumn, build_block, sealed
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.v1 import types_pb2 as types

State = dict[bytes, bytes | None]
KEYS = [b"%s %d" % (kind, number) for number in range(150) for kind in (b"even", b"odd")]


def value_of(key: bytes, turn: int, *, plain: bool) -> bytes:
    """Return a value with which a key has no cells, or some, in tests."""
    return next(
        value
        for value in (b"%d %d" % (turn, number) for number in range(1000))
        if plain == (not cells_for(key, value))
    )


async def write(writer: RawWriter, bucket: AsyncBucket, state: State, turn: int) -> None:
    """Write all keys, the rows with cells and those without beside each other in many small writes."""
    writes = []
    for first in range(0, len(KEYS), 6):
        rows: list[tuple[bytes, bytes | None]] = [
            (key, value_of(key, turn, plain=False)) for key in KEYS[first : first + 3]
        ]
        block = with_cells(build_block([k for k, _ in rows], [v for _, v in rows]))
        assert {column.id for column in block.further} <= {2, 9} != set()
        await writer.send_block(block_to_message(block), durability=types.DURABILITY_MEMORY)
        others = [(key, value_of(key, turn, plain=True)) for key in KEYS[first + 3 : first + 6]]
        writes.append(asyncio.ensure_future(bucket.write_many(others)))
        state.update([*rows, *others])
        assert not (await writer.result()).HasField("refused")
    await asyncio.gather(*writes)


async def read(bucket: AsyncBucket, **only: Any) -> tuple[State, int, int]:
    """Return what is there, and how many cells and blocks came."""
    state: State = {}
    cells = blocks = 0
    async with bucket.changes(until="now", only=Only(**only)) as changes:
        async for batch in changes.batches():
            state.update(batch.items())
            blocks += len(batch.blocks)
            if only.get("keys_only"):
                assert not any(block.further for block in batch.blocks)
            else:
                cells += sum(map(check_cells, batch.blocks))
    return state, cells, blocks


async def check(target: str, name: str, state: State, *, merged: bool = False) -> None:
    """Read everything, and parts of it, and compare."""
    newest = sum(len(cells_for(*row)) for row in state.items())
    async with AsyncClient(target) as client:
        bucket = client.bucket(name)
        found, cells, _ = await read(bucket)
        assert found == state
        assert cells == newest if merged else cells >= newest
        some, cells, _ = await read(bucket, key_prefix=b"even")
        assert some == {key: value for key, value in state.items() if key.startswith(b"even")}
        assert cells >= sum(len(cells_for(*row)) for row in some.items()) > 0
        assert (await read(bucket, keys_only=True))[0] == dict.fromkeys(state)


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("compression", ["", "zstd"])
async def test_cells_stay_beside_their_rows(server_process: StartServer, compression: str) -> None:
    server = server_process("--tail-bytes", "65536", "--flush-seconds", "3600")
    state: State = {}
    async with AsyncClient(server.target) as client, RawClient(server.target) as raw:
        await client.admin.create_bucket("b", compression=compression)
        writer = await raw.writer("", bucket="b")
        await write(writer, client.bucket("b"), state, 0)
        await check(server.target, "b", state)
    # What is in the journal only is recovered, and what was recovered is stored by a clean stop.
    server.kill()
    server.start()
    await check(server.target, "b", state)
    assert server.terminate() == 0
    server.start()
    await check(server.target, "b", state, merged=True)
    async with AsyncClient(server.target) as client, RawClient(server.target) as raw:
        writer = await raw.writer("", bucket="b")
        turn = 0
        while not (await client.admin.storage("b")).merge_output_rows:
            turn += 1
            await write(writer, client.bucket("b"), state, turn)
    await check(server.target, "b", state)


@pytest.mark.asyncio
async def test_a_lying_column_is_refused_and_changes_nothing(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        key, other = some_keys(11, 2)
        block = build_block([key, other], [b"1", b"2"])
        good = FurtherColumn(3, b"\0\0\0\0\1\0\0\0\2\0\0\0", b"ab")
        for column, words in (
            (good._replace(id=17), "must ascend, from 1 to 16"),
            (good._replace(data=b"abc"), "run from 0 to 2 over 3 bytes"),
            (good._replace(offsets=b""), "offsets take 0 bytes"),
        ):
            lying = sealed(replace(block, further=(column,)))
            refused = await writer.write_block(lying, number=1, previous=0)
            assert words in refused.refused.message
        damaged = replace(block, further=(good,))
        assert "CRC32C" in (await writer.write_block(damaged, number=1, previous=0)).refused.message
        assert [info.high_seqno for info in await client.partitions(11)] == [0]
        told = sealed(damaged)
        assert not (await writer.write_block(told, number=1, previous=0)).HasField("refused")
        # Plain rows come without them.
        follow = await client.follow(plain_rows=True)
        await follow.start(start_at(11, until_now=True))
        runs, _ = await follow.plain_until_ended(1)
        assert [(row.key, row.value) for run in runs for row in run.rows] == [
            (key, b"1"),
            (other, b"2"),
        ]


@pytest.mark.asyncio
async def test_a_large_write_of_many_columns_is_refused_unparsed(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        message = block_to_message(build_block([b"k"], [b"v" * 2**20]))
        for _ in range(100):
            message.further.add()
        await writer.send_block(message)
        assert "more fields than a block has" in (await writer.result()).refused.message
