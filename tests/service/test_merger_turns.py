"""The compactor's turns: every partition is looked at, however fast others change."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from upr.config import ServerConfig
from upr.service.buckets import compactor as compactor_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.compactor import LOOK_PARTITIONS
from upr_protocol.limits import PARTITIONS


@pytest.mark.asyncio
async def test_those_that_wait_longest_are_looked_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = BucketService(folder, ServerConfig(folder))
    compactor = host.compactor
    looked: list[int] = []

    async def look(partitions: Sequence[int]) -> None:
        looked.extend(partitions)
        # As flushes do, that touch every partition again and again.
        compactor.note(range(PARTITIONS))
        if len(looked) >= PARTITIONS:
            compactor.stop()

    monkeypatch.setattr(compactor, "_merge", look)
    monkeypatch.setattr(compactor_module, "FIRST_LOOK_SECONDS", 0.0)
    await compactor.run()
    assert PARTITIONS % LOOK_PARTITIONS == 0
    assert len(looked) == PARTITIONS
    assert sorted(looked) == list(range(PARTITIONS))
    assert await host.close()
