"""A promise, in one process: what a server answers for, and what may come in between."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.harness import WAIT_SECONDS
from upr.config import ServerConfig
from upr.replica.links import Links
from upr.replica.meeting import Meeting
from upr.replica.owning import Owning
from upr.service.buckets.catalog import Catalog, DamagedBucket
from upr.storage.directory import DataDirectory
from upr_protocol.errors import DataDamagedError
from upr_protocol.ownership import Row, Served

VERSION = 7
CLAIM = Row(2, 0, "other", False, frozenset(), Served("other", 1))


@pytest_asyncio.fixture
async def owning(tmp_path: Path) -> AsyncIterator[Owning]:
    """The part of a replica that holds no bucket and reaches nobody."""

    async def told() -> None:
        pass

    directory = DataDirectory(tmp_path / "data")
    config = ServerConfig(data=directory.path, replicate_from=("127.0.0.1:1",))
    catalog = Catalog(directory, config)
    catalog.start(told)
    yield Owning(catalog, config, lambda: "127.0.0.1:2")
    await catalog.close()
    directory.close()


@pytest.mark.asyncio
async def test_a_bucket_that_is_being_made_is_promised_too(
    owning: Owning, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, go_on = owning._catalog, threading.Event()
    create_now = catalog._create_now

    def held_up(name: str, compression: str, version: int) -> object:
        assert go_on.wait(WAIT_SECONDS)
        return create_now(name, compression, version)

    monkeypatch.setattr(catalog, "_create_now", held_up)
    # As a replication that is cancelled leaves it.
    creating = asyncio.create_task(catalog.create("some", version=VERSION))
    await asyncio.sleep(0)
    assert catalog._creating
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    promising = asyncio.create_task(owning.promise(2, "other", CLAIM))
    asyncio.get_running_loop().call_soon(go_on.set)
    answer = await asyncio.wait_for(promising, WAIT_SECONDS)
    assert answer is not None
    assert list(answer.held) == [VERSION]


@pytest.mark.asyncio
async def test_one_that_cannot_be_asked_is_left_out_and_told_once(
    owning: Owning, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("upr_secret")
    meeting = Meeting(owning._catalog, lambda: "127.0.0.1:2", Links(token=file), meets=True)
    meeting.addresses["other"] = "127.0.0.1:1"
    file.unlink()
    assert await meeting.ask_promises(CLAIM, ["other"]) == {}
    assert await meeting.reach(["other"]) == {}
    (record,) = caplog.records
    assert "cannot be read" in record.error  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_nothing_is_promised_of_a_damaged_bucket(owning: Owning, tmp_path: Path) -> None:
    problem = DataDamagedError("it cannot be read")
    owning._catalog._damaged["some"] = DamagedBucket(tmp_path, "some", VERSION, True, problem)
    with pytest.raises(DataDamagedError, match="'some' is damaged here"):
        await owning.promise(2, "other", CLAIM)
    assert owning.standing.promised == 0
    assert await owning.promise(2, "other", CLAIM, force=True) is not None


@pytest.mark.asyncio
async def test_a_promise_in_between_lets_it_follow_nobody(
    owning: Owning, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow_nobody = owning.follow_nobody

    async def promises() -> None:
        await follow_nobody()
        await owning.store(lambda standing: standing.promise(2, "other"))

    monkeypatch.setattr(owning, "follow_nobody", promises)
    await owning._follow_owner()
    assert owning._following is None
