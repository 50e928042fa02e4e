"""A bucket's quota, and the largest value that a server takes."""

import asyncio
from collections.abc import Awaitable, Iterator

import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, poll
from tests.raw import RawClient, RawWriter
from upr_client import AsyncClient
from upr_client.errors import InvalidArgumentError, QuotaExceededError
from upr_client.types import WriteResult
from upr_protocol.partitioning import partition_of

QUOTA = 4 * 2**20
ROWS = 50


def keys() -> Iterator[bytes]:
    """Keys of one partition, so that their blocks are merged."""
    number = 0
    while True:
        key = b"%d" % number
        number += 1
        if partition_of(key) == 7:
            yield key


async def fill(writer: RawWriter, new: Iterator[bytes]) -> list[bytes]:
    """Write until a write is refused, which must be because of the quota; returns the keys that were taken."""
    taken: list[bytes] = []
    for _ in range(200):
        some = [next(new) for _ in range(ROWS)]
        result = await writer.write([(key, b"v" * 4096) for key in some])
        if result.HasField("refused"):
            assert (result.refused.reason, result.refused.retriable) == ("QUOTA_EXCEEDED", True)
            assert str(QUOTA) in result.refused.message
            return taken
        taken += some
    raise AssertionError("the quota was never met")


async def until_taken(writer: RawWriter, row: tuple[bytes, bytes | None]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        taken = False
        while not taken:
            # Else the refusals take what compaction needs.
            await asyncio.sleep(0.01)
            taken = not (await writer.write([row])).HasField("refused")


@pytest.mark.asyncio
async def test_a_bucket_takes_no_more_than_its_quota(server_process: StartServer) -> None:
    server = server_process("--flush-seconds", "0.2")
    new = keys()
    async with RawClient(server.target) as raw, AsyncClient(server.target) as client:
        other = await client.admin.create_bucket("other", quota_bytes=QUOTA)
        assert (
            other.quota_bytes,
            (await client.admin.set_bucket_quota("default", QUOTA)).quota_bytes,
        ) == (
            QUOTA,
            QUOTA,
        )
        writer = await raw.writer()
        taken = await fill(writer, new)
        assert (await raw.partitions(7))[0].high_seqno == len(taken)
        # What only deletes is taken, and merging makes room of it, once of few rows and once of all.
        large = (b"large", b"v" * 600_000)

        async def is_compacted() -> bool:
            found = await client.admin.storage("default")
            return (found.tail_bytes, found.partitions_to_merge) == (0, 0)

        await poll(is_compacted)
        assert (await writer.write([large])).HasField("refused")
        fifth = [(key, None) for key in taken[::5]]
        assert not (await writer.write(fifth)).HasField("refused")
        await until_taken(writer, large)
        await fill(writer, new)
        assert not (await writer.write([(key, None) for key in taken])).HasField("refused")
        await until_taken(writer, (b"small", b"v" * 100_000))
        await fill(writer, new)
        assert (await client.admin.set_bucket_quota("default", 0)).quota_bytes == 0
        assert not (await writer.write([(taken[0], b"v")])).HasField("refused")
        await client.admin.set_bucket_quota("default", QUOTA)
        with pytest.raises(InvalidArgumentError, match="quota_bytes is -1"):
            await client.admin.set_bucket_quota("default", -1)
    server.kill()
    server.start()
    async with AsyncClient(server.target) as client:
        found = {info.name: info.quota_bytes for info in await client.admin.buckets()}
        assert found == {"default": QUOTA, "other": QUOTA}
        assert {one.quota_bytes for one in (await client.admin.status()).buckets} == {QUOTA}


@pytest.mark.asyncio
async def test_a_value_above_the_server_s_limit_is_refused(server_process: StartServer) -> None:
    server = server_process("--max-value-bytes", "1000")
    async with RawClient(server.target) as raw:
        writer = await raw.writer()
        result = await writer.write([(b"a", b"v"), (b"b", b"v" * 1001)])
        assert result.refused.reason == "INVALID_ARGUMENT"
        assert "1001 bytes; must be at most 1000" in result.refused.message
        assert not result.refused.retriable
        rows = [(b"%d" % number, b"v" * 1000) for number in range(3)]
        assert not (await writer.write(rows)).HasField("refused")
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        await bucket.set(b"a", b"v")
        server.kill()
        server.options = []
        server.start()

        # Nothing else is written, so that no call tells of the new limit.
        async def is_taken() -> bool:
            try:
                await bucket.set(b"a", b"v" * 1001)
            except InvalidArgumentError:
                return False
            return True

        await poll(is_taken)


@pytest.mark.asyncio
async def test_no_delete_waits_for_a_set_that_the_quota_refuses(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client, asyncio.timeout(WAIT_SECONDS):
        bucket = client.bucket()
        await bucket.write_many([(b"old %d" % i, b"v" * 1000) for i in range(100)])
        await client.admin.set_bucket_quota("default", 1)
        mixed: list[Awaitable[object]] = []
        for i in range(100):
            mixed += [bucket.set(b"new %d" % i, b"v"), bucket.delete(b"old %d" % i)]
            mixed += [bucket.write_many([(b"more %d" % i, b"v")])]
        found = await asyncio.gather(*mixed, return_exceptions=True)
        assert {type(one) for one in found[::3] + found[2::3]} == {QuotaExceededError}
        assert {type(one) for one in found[1::3]} == {WriteResult}
