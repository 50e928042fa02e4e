"""Room on the disk and in the tail: checked before a mutation is numbered."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.raw import RawClient, seqnos_of, start_at
from upr.config import ServerConfig
from upr.service import host
from upr.service.server import Server


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[str]:
    """A server in this process, so that what it sees of the disk can be changed."""
    server = Server(config)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


@pytest.mark.asyncio
async def test_a_full_disk_refuses_writes_before_numbering_and_resumes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 10**9
    monkeypatch.setattr(host, "disk_room", lambda path: room)
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0")
    async with serving(config) as target, RawClient(target) as client:
        writer = await client.writer("p")
        await writer.write([(b"a", b"1")], number=1)
        follow = await client.follow()
        await follow.start(*(start_at(p) for p in range(1024)))
        await follow.until("frame")
        before = await client.partitions()
        room = 10
        refusal = (await writer.write([(b"a", b"2")], number=2)).refused
        assert (refusal.reason, refusal.retriable) == ("NO_ROOM", True)
        assert "room for 10 bytes above the reserve" in refusal.message
        # A write behind the refused one may not overtake it.
        later = (await writer.write([(b"a", b"3")], number=3)).refused
        assert later.reason == "WRITE_OUT_OF_ORDER"
        assert await client.partitions() == before
        room = 10**9
        assert list(seqnos_of(await writer.write([(b"a", b"2")], number=2)).values()) == [(1, 2)]
        await follow.until("frame")


@pytest.mark.asyncio
async def test_the_tail_stays_bounded_under_writes(tmp_path: Path) -> None:
    limit = 200_000
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0", tail_bytes=limit)
    server = Server(config)
    await server.start()
    (bucket_host,) = server._catalog.hosts
    largest = 0
    async with RawClient(server.address) as client:
        writer = await client.writer("")
        for i in range(60):
            await writer.write([(b"key %d" % (i * 100 + j), b"v" * 200) for j in range(100)])
            largest = max(largest, bucket_host.bucket.tail.bytes)
        assert largest < 2 * limit + 100_000
        follow = await client.follow()
        await follow.start(*(start_at(p, until_now=True) for p in range(1024)))
        blocks, _ = await follow.blocks_until_ended(1024)
        assert sum(block.rows for block in blocks) == 6000
        await follow.close()
    assert bucket_host.bucket.tail.first > 0, "nothing was flushed"
    await server.stop()
