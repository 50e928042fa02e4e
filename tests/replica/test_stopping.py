"""The stop of a server that takes part in a set."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.harness import WAIT_SECONDS, until
from tests.replica.members import (
    Start,
    before_it_claims,
    full,
    joined,
    leave_alone,
    start_set,
    write,
)
from upr.service import server
from upr_client import AsyncClient
from upr_client.errors import UprError


@pytest.mark.asyncio
async def test_a_promotion_ends_with_its_server(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the stop it would take the ownership from who has it, for a server that is gone."""
    old, new = await start_set(start)
    await joined(new)
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.1)
    began, go_on = asyncio.Event(), asyncio.Event()

    async def held_up() -> None:
        began.set()
        await go_on.wait()

    before_it_claims(monkeypatch, held_up)
    async with AsyncClient(new.target) as client:
        promoting = asyncio.create_task(client.admin.promote(takeover=True))
        await began.wait()
        await new.stop()
        go_on.set()
        with pytest.raises(UprError):
            await promoting
    await until(lambda: not new.ownership.claiming)
    assert new.ownership.standing.promised == old.ownership.standing.promised == 1
    assert new.ownership.following.task is None
    assert old.ownership.active


@pytest.mark.asyncio
async def test_a_stop_waits_for_no_promotion_that_waits_for_the_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = await start_set(start)
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr("upr.replica.replica_service._CANCEL_SECONDS", 0.1)
    began = asyncio.Event()

    async def held_up() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    before_it_claims(monkeypatch, held_up)
    async with AsyncClient(new.target) as client:
        promoting = asyncio.create_task(client.admin.promote())
        await began.wait()
        async with asyncio.timeout(30):
            await new.stop()
        with pytest.raises(UprError):
            await promoting


@pytest.mark.asyncio
async def test_a_stop_waits_for_no_step_down_that_waits_for_the_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after what was cancelled, and the journal fails only once the stop has come to that."""
    owner, replica = await start_set(start)
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.1)
    ownership, host = owner.ownership, owner.host
    await leave_alone(replica)
    store, began = ownership.store, asyncio.Event()

    async def held_up(*arguments: Any) -> object:
        began.set()
        await asyncio.sleep(WAIT_SECONDS)
        return await store(*arguments)

    monkeypatch.setattr(host.disk, "append", full)
    await write(owner, 1)
    await until(lambda: host.bucket.stalled)
    monkeypatch.setattr(ownership, "store", held_up)
    # A higher epoch is met.
    replica.catalog.standing = replace(
        replica.catalog.standing, standing=replica.ownership.standing.met(9)
    )
    await began.wait()
    owner.stopped = True
    async with asyncio.timeout(30):
        assert not await owner.server.stop()
    replicating = owner.server._replicating
    assert replicating is not None
    await until(replicating.done)
