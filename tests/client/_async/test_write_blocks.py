"""Writing prepared blocks."""

from typing import Any

import numpy as np
import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import (
    ID_A,
    VERSION,
    Expect,
    HalfClosed,
    Step,
    applied,
    write_opened,
    write_refused,
)
from upr_client import AsyncClient
from upr_client._async.block_writer import AsyncBlockWriter
from upr_client.errors import InvalidArgumentError, NoRoomError, PartitionNotActiveError
from upr_client.lowlevel import write_blocks
from upr_client.testing import ScriptedServer
from upr_client.types import WriteResults
from upr_protocol.block import build_block
from upr_protocol.errors import ContentDiffersError, OutOfOrderError
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import types_pb2
from upr_protocol.write_places import place_number

KEY, OTHER = b"key", b"another"
P, Q = partition_of(KEY), partition_of(OTHER)


@pytest.mark.asyncio
async def test_blocks_of_a_name_are_applied_once(target: str) -> None:
    blocks = [build_block([KEY], [b"1"]), build_block([KEY, OTHER], [b"2", None])]
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        first = await write_blocks(bucket, iter(blocks), once="a name")
        assert (first.rows, len(first.runs)) == (3, 3)
        await bucket.set(KEY, b"of somebody else")
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        assert await write_blocks(bucket, blocks, once="a name") == first
        assert await bucket.get(KEY) == b"of somebody else"
        await write_blocks(bucket, blocks, "memory", once="another name")
        assert await bucket.get(KEY) == b"2"
        assert (await write_blocks(bucket, blocks)).rows == 3
        highs = {
            info.partition: info.high_seqno
            for info in await client.admin.partitions(bucket, [P, Q])
        }
        assert highs == {partition_of(KEY): 7, partition_of(OTHER): 3}


@pytest.mark.asyncio
@pytest.mark.parametrize("scripted", [False, True])
async def test_other_blocks_in_a_place_are_refused(target: str, scripted: bool) -> None:
    keys = [b"%d" % number for number in range(50)]
    blocks, other = ([build_block(keys, [value] * 50)] for value in (b"1", b"2"))
    with ScriptedServer() as script:
        target = script.target if scripted else target
        async with AsyncClient(target) as client:
            bucket = client.bucket()
            numbers = [place_number(place, b"first") for place in range(3)]
            for number in (*numbers, *numbers):
                await write_blocks(bucket, blocks, once="a name", first_number=number)
            highs = await client.admin.partitions(bucket)
            for digest in (b"above", b"under"):
                for place in range(3):
                    number = place_number(place, digest)
                    with pytest.raises(ContentDiffersError) as caught:
                        await write_blocks(bucket, other, once="a name", first_number=number)
                    assert not caught.value.retriable
            assert await client.admin.partitions(bucket) == highs
            await write_blocks(bucket, other, once="a name", first_number=place_number(3, b"above"))
            assert await bucket.get(keys[0]) == b"2"


@pytest.mark.asyncio
async def test_a_name_begins_at_number_one_whatever_the_server_knows() -> None:
    script = [Expect("open"), write_opened(41), Expect("write"), applied(1, (P, 0, 1))]
    script += [Expect("write"), applied(2, (P, 1, 2)), HalfClosed()]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([KEY], [b"%d" % number]) for number in range(2)]
        written = await write_blocks(client.bucket(), blocks, once="a name")
        assert written.runs == [(P, 0, 1, ID_A), (P, 1, 2, ID_A)]
        assert (written.rows, written.bucket_version) == (2, VERSION)
        assert written == WriteResults(2, np.array(written.runs, np.uint64).T, VERSION)
        assert written != WriteResults(2, np.array(written.runs[::-1], np.uint64).T, VERSION)
        heard = server.calls["write"][0]
        assert [open_.producer for open_ in heard.of("open")] == ["a name"]
        assert [write.number for write in heard.of("write")] == [1, 2]
        # The call is over although the client is not.
        assert heard.half_closed


@pytest.mark.asyncio
async def test_blocks_of_a_name_keep_their_numbers_when_they_are_refused() -> None:
    """They are places: who sends the same blocks under the name must give them the same."""
    begin: list[Step] = [Expect("open"), write_opened(), Expect("write"), Expect("write")]
    full, behind = NoRoomError("full"), OutOfOrderError("it follows one that was refused")
    first = [*begin, write_refused(1, full), write_refused(2, behind), HalfClosed()]
    refusal = (Q, PartitionNotActiveError("for now", retriable=True))
    second = [
        *begin,
        applied(1, (P, 0, 1), refused=refusal),
        write_refused(2, behind),
        HalfClosed(),
    ]
    third = [*begin, applied(1, (Q, 0, 1)), applied(2, (P, 1, 2), (Q, 1, 2)), HalfClosed()]
    async with (
        serve(write=[first, second, third]) as server,
        AsyncClient(server.target) as client,
    ):
        blocks = [build_block([KEY, OTHER], [b"%d" % number] * 2) for number in range(2)]
        assert len((await write_blocks(client.bucket(), blocks, once="a")).runs) == 4
        numbers = [[w.number for w in call.of("write")] for call in server.calls["write"]]
        assert numbers == [[1, 2], [1, 2], [1, 2]]


@pytest.mark.asyncio
async def test_behind_a_block_of_a_name_that_failed_none_is_sent() -> None:
    """Applied without it, the later one would make it count as applied when all are sent again."""
    refusal = (Q, PartitionNotActiveError("dead"))
    script: list[Step] = [Expect("open"), write_opened(), Expect("write")]
    script += [applied(1, (P, 0, 1), refused=refusal), HalfClosed()]
    async with serve(write=[script] * 2) as server, AsyncClient(server.target) as client:
        writer = AsyncBlockWriter(client.bucket()._handle, "a name", 1)
        level = types_pb2.DURABILITY_DISK
        first = await writer.submit(build_block([KEY, OTHER], [b"", b""]), level)
        with pytest.raises(PartitionNotActiveError, match="the rest was applied: dead"):
            await first.result()
        second = await writer.submit(build_block([OTHER], [b""]), level)
        with pytest.raises(PartitionNotActiveError):
            await second.result()
        await writer.close(1.0)
        assert len(server.calls["write"]) == 1


@pytest.mark.asyncio
async def test_blocks_of_a_name_go_on_where_partitions_had_refused() -> None:
    """Another process sends the same blocks: what is missing is applied, in order, and nothing twice."""
    key, other = KEY, OTHER
    blocks = [build_block([key, other], [b"%d" % number] * 2) for number in range(3)]
    with ScriptedServer() as server:
        server.refuse(partition_of(other), PartitionNotActiveError("dead"))
        async with AsyncClient(server.target) as client:
            with pytest.raises(PartitionNotActiveError):
                await write_blocks(client.bucket(), blocks, once="a name")
            server.accept(partition_of(other))
            await client.bucket().set(key, b"of somebody else")
            written = await write_blocks(client.bucket(), blocks, once="a name")
        assert written.rows == 6
        assert server.state() == {key: b"of somebody else", other: b"2"}
        assert [run[2] - run[1] for run in written.runs if run[0] == partition_of(other)] == [
            1,
            1,
            1,
        ]


@pytest.mark.asyncio
async def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    async with AsyncClient("127.0.0.1:1", retry_seconds=1) as client:
        blocks = [build_block([KEY], [b"1"])]
        bad: list[dict[str, Any]] = [{"once": ""}, {"once": "x" * 201}, {"durability": "none"}]
        bad += [{"once": "n", "first_number": number} for number in (0, -1, 2**63, "1", None)]
        for options in bad:
            with pytest.raises(InvalidArgumentError):
                await write_blocks(client.bucket(), blocks, **options)
