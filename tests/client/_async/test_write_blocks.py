"""Writing prepared blocks."""

from collections.abc import Callable

import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import ID_A, Expect, HalfClosed, applied, write_opened
from tests.harness import RunningServer
from upr_client import AsyncClient, InvalidArgumentError, PartlyWrittenError, WriteResults
from upr_protocol.partitioning import partition_of
from upr_protocol.rows import build_block

StartServer = Callable[..., RunningServer]

KEY, OTHER = b"key", b"another"
P, Q = sorted((partition_of(KEY), partition_of(OTHER)))


@pytest.mark.asyncio
async def test_blocks_of_a_name_are_applied_once(server_process: StartServer) -> None:
    server = server_process()
    blocks = [build_block([KEY], [b"1"]), build_block([KEY, OTHER], [b"2", None])]
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        first = await bucket.write_blocks(iter(blocks), once="a name")
        assert (first.rows, len(first.runs)) == (3, 3)
        await bucket.set(KEY, b"of somebody else")
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        assert await bucket.write_blocks(blocks, once="a name") == first
        assert await bucket.get(KEY) == b"of somebody else"
        await bucket.write_blocks(blocks, "memory", once="another name")
        assert await bucket.get(KEY) == b"2"
        assert (await bucket.write_blocks(blocks)).rows == 3
        highs = {info.partition: info.high_seqno for info in await bucket.partitions([P, Q])}
        assert highs == {partition_of(KEY): 7, partition_of(OTHER): 3}


@pytest.mark.asyncio
async def test_a_name_begins_at_number_one_whatever_the_server_knows() -> None:
    script = [Expect("open"), write_opened(41), Expect("write"), applied(1, (P, 0, 1))]
    script += [Expect("write"), applied(2, (P, 1, 2)), HalfClosed()]
    key = KEY if partition_of(KEY) == P else OTHER
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([key], [b"%d" % number]) for number in range(2)]
        written = await client.bucket().write_blocks(blocks, once="a name")
        assert written == WriteResults(2, [(P, 0, 1, ID_A), (P, 1, 2, ID_A)])
        heard = server.calls["write"][0]
        assert [open_.producer for open_ in heard.of("open")] == ["a name"]
        assert [write.number for write in heard.of("write")] == [1, 2]
        # The call is over although the client is not.
        assert heard.half_closed


@pytest.mark.asyncio
async def test_an_answer_that_leaves_partitions_out_is_no_success() -> None:
    """So it is when the same write had been refused by the others before."""
    script = [Expect("open"), write_opened(), Expect("write")]
    script += [applied(1, (P, 0, 1), duplicate=True), HalfClosed()]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([KEY, OTHER], [b"", b""])]
        with pytest.raises(PartlyWrittenError, match="1 of its partitions had refused"):
            await client.bucket().write_blocks(blocks, once="a")


@pytest.mark.asyncio
async def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        blocks = [build_block([KEY], [b"1"])]
        for options in ({"once": ""}, {"once": "x" * 201}, {"durability": "none"}):
            with pytest.raises(InvalidArgumentError):
                await client.bucket().write_blocks(blocks, **options)
