"""The merger's turns: every partition is looked at, however fast others change."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from upr.config import ServerConfig
from upr.service.catalog import create_bucket
from upr.service.host import BucketHost
from upr.service.merger import LOOK_PARTITIONS
from upr.storage.directory import DataDirectory
from upr_protocol.limits import PARTITIONS


@pytest.mark.asyncio
async def test_those_that_wait_longest_are_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = DataDirectory(tmp_path / "data")
    host = BucketHost(create_bucket(directory, "default"), ServerConfig(tmp_path / "data"))
    merger = host.merger
    looked: list[int] = []

    async def look(partitions: Sequence[int]) -> None:
        looked.extend(partitions)
        # As flushes do, that touch every partition again and again.
        merger.note(range(PARTITIONS))
        if len(looked) >= PARTITIONS:
            merger.stop()

    monkeypatch.setattr(merger, "_merge", look)
    await merger.run()
    assert PARTITIONS % LOOK_PARTITIONS == 0
    assert len(looked) == PARTITIONS
    assert sorted(looked) == list(range(PARTITIONS))
    assert await host.close()
    directory.close()
