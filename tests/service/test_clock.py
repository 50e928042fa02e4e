"""A clock that is set back while the bucket is served."""

import asyncio
from pathlib import Path

import pytest

from upr.config import ServerConfig
from upr.service import host as host_module
from upr.service.catalog import create_bucket
from upr.service.host import BucketHost
from upr.storage.directory import DataDirectory
from upr_protocol.rows import build_block

HOUR = 3_600_000_000
WAIT_SECONDS = 30.0


@pytest.mark.asyncio
async def test_a_clock_set_back_does_not_put_the_flush_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = DataDirectory(tmp_path / "data")
    folder = create_bucket(directory, "default")
    clock = [100 * HOUR]
    monkeypatch.setattr(host_module, "now_micros", lambda: clock[0])
    host = BucketHost(folder, ServerConfig(data=tmp_path / "data", flush_seconds=0.05))

    async def failed() -> None:
        pass

    host.start(failed)
    written = await host.write(build_block([b"a"], [b"v"]), b"", None, 0)
    clock[0] -= 2 * HOUR
    await host.durable(written.entry)
    async with asyncio.timeout(WAIT_SECONDS):
        while host.bucket.tail.first <= written.entry:
            await host._next_change()
    assert await host.close()
    directory.close()
