"""GetStatus and GetStorage of a real server, against what was done to it."""

import random
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.harness import poll
from tests.raw import RawClient, start_at
from upr.service.overload import process
from upr_client import AsyncClient
from upr_protocol.partitioning import partition_of

VALUE_BYTES = 500


def anonymous_bytes(pid: int) -> int:
    """Return what the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0]) * 1024


@pytest.mark.asyncio
async def test_the_status_tells_calls_streams_and_memory(server_process: StartServer) -> None:
    server = server_process("--tail-bytes", "1000000")
    async with AsyncClient(server.target) as client, RawClient(server.target) as raw:
        idle = await client.admin.status()
        assert (idle.follow_calls, idle.write_calls) == (0, 0)
        assert idle.server_id
        assert idle.uptime_seconds >= 0
        (bucket,) = idle.buckets
        assert (bucket.name, bucket.tail_bytes, bucket.tail_limit_bytes) == ("default", 0, 10**6)
        assert (bucket.streams, bucket.damaged_partitions, bucket.problem) == (0, 0, None)
        told = anonymous_bytes(server.pid)
        assert abs(idle.anonymous_bytes - told) < 20 * 2**20
        assert idle.mapped_bytes > 2**20
        follow = await raw.follow()
        await follow.start(*(start_at(p) for p in range(10)))
        writer = await raw.writer("")
        await writer.write([(b"a", b"x" * 1000)])
        busy = await client.admin.status()
        assert (busy.follow_calls, busy.write_calls) == (1, 1)
        assert busy.uptime_seconds > idle.uptime_seconds
        assert (busy.server_id, busy.server_version) == (idle.server_id, idle.server_version)
        (bucket,) = busy.buckets
        assert (bucket.streams, bucket.streams_from_store) == (10, 0)
        assert 1000 < bucket.tail_bytes < 3000
        assert bucket.volatile_bytes == 0
        await follow.close()
        await writer.close()
        await poll(client.admin.status, lambda told: not told.follow_calls)
    assert server.terminate() == 0
    server.start()
    async with AsyncClient(server.target) as client:
        assert (await client.admin.status()).server_id != idle.server_id


@pytest.mark.asyncio
async def test_the_storage_is_what_was_written(server_process: StartServer) -> None:
    server = server_process()
    draw = random.Random(1)
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        rows = [(b"key %d" % i, draw.randbytes(VALUE_BYTES)) for i in range(5000)]
        await bucket.write_many(rows)
        fresh = await client.admin.storage(bucket)
        wanted = sum(len(key) + len(value) for key, value in rows)
        assert wanted <= fresh.ingested_bytes < wanted * 1.1
        assert fresh.ingested_bytes < fresh.journalled_bytes < wanted * 1.3
        assert fresh.journalled_bytes <= fresh.journal_bytes < fresh.journalled_bytes + 1000
        assert (fresh.blocks, fresh.rows, fresh.flushed_bytes) == (0, 0, 0)
        assert fresh.tail_bytes > wanted
        factor = fresh.write_amplification
        assert factor is not None
        assert 1 < factor < 1.3
    assert server.terminate() == 0
    server.start()
    async with AsyncClient(server.target) as client:
        stored = await client.admin.storage("default")
        partitions = {partition_of(key) for key, _ in rows}
        assert (stored.blocks, stored.rows) == (len(partitions), 5000)
        assert wanted < stored.block_bytes < wanted * 1.4
        assert stored.unmerged_bytes == 0
        assert (stored.tail_bytes, stored.ingested_bytes, stored.journalled_bytes) == (0, 0, 0)
        assert stored.write_amplification is None
        assert stored.block_bytes <= stored.used_bytes <= stored.file_bytes
        file = next((server.data / "buckets").glob("*/store/data.mdb"))
        assert stored.file_bytes == file.stat().st_size
        assert stored.bucket_version == (await client.admin.status()).buckets[0].version


@pytest.mark.asyncio
async def test_a_second_flush_leaves_something_unmerged(server_process: StartServer) -> None:
    server = server_process("--tail-bytes", "100000")
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        for _ in range(6):
            await bucket.write_many([(b"key %d" % i, b"v" * 100) for i in range(1024)])
        found = await poll(partial(client.admin.storage, bucket), lambda told: told.blocks)
        assert found.flushed_bytes >= found.block_bytes - found.merge_output_bytes
        assert found.unmerged_bytes < found.block_bytes


def test_without_proc_the_memory_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_STATM", tmp_path / "nothing")
    assert process.memory_bytes() == (0, 0)
