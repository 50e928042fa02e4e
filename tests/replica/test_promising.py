"""A promise, in one process: what a server answers for, and what may come in between."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from tests.client.certificates import make_certificate
from tests.engine.buckets import bucket
from tests.harness import WAIT_SECONDS
from upr.config import ServerConfig
from upr.replica.holding import held_of
from upr.replica.links import Channels, Links
from upr.replica.meeting import Meeting, Met, row_of_message
from upr.replica.owning import Owning
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog, DamagedBucket
from upr.storage.directory import DataDirectory
from upr_protocol.errors import (
    DataDamagedError,
    InvalidArgumentError,
    PartitionNotActiveError,
    ProtocolError,
    UprError,
)
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.limits import MEMBER_SECONDS, SERVERS_MAX, SET_MEMBERS_MAX
from upr_protocol.ownership import Row, Served
from upr_protocol.wire.v1 import replica_service_pb2 as wire

VERSION = 7
CLAIM = Row(2, 0, "other", False, frozenset(), Served("other", 1))


@pytest_asyncio.fixture
async def owning(tmp_path: Path) -> AsyncIterator[Owning]:
    """The part of a replica that holds no bucket and reaches nobody."""

    async def told() -> None:
        pass

    directory = DataDirectory(tmp_path / "data")
    directory.join("1" * 16)
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

    def held_up(*arguments: Any) -> object:
        assert go_on.wait(WAIT_SECONDS)
        return create_now(*arguments)

    monkeypatch.setattr(catalog, "_create_now", held_up)
    # As a replication that is cancelled leaves it.
    creating = asyncio.create_task(catalog.create("some", version=VERSION, active=False))
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
async def test_a_file_that_is_half_there_changes_no_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "upr.replica.links")
    make_certificate(tmp_path)
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    whole = chain.read_bytes()
    channels = Channels(Links(chain, chain, key), 1.0)
    first = channels.to("127.0.0.1:1")
    for half in (whole[:-9], whole[:99], whole.replace(b"A", b"B")):
        chain.write_bytes(half)
        assert channels.to("127.0.0.1:1") is first
        with pytest.raises(UprError, match="cannot be used"):
            channels.to("127.0.0.1:2")
    make_certificate(tmp_path)
    assert channels.to("127.0.0.1:1") is not first
    said = ["changed files cannot be used for links", "files can be used for links again"]
    assert [one.message for one in caplog.records] == said
    await channels.close()


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


@pytest.mark.asyncio
async def test_who_has_promised_takes_nothing_from_the_owner_before(owning: Owning) -> None:
    await owning._follow_owner()
    following = owning._following
    assert following is not None
    assert await owning.promise(2, "other", CLAIM) is not None
    assert following.done()
    await owning._follow_owner()
    assert owning._following is None


@pytest.mark.asyncio
async def test_a_bucket_that_was_to_be_made_is_not_when_the_server_stepped_down_meanwhile(
    owning: Owning,
) -> None:
    catalog = owning._catalog
    catalog.replica = False
    renamed: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
    catalog._renaming["some"] = asyncio.ensure_future(renamed)
    # It waits until the one before it has lost its name.
    creating = asyncio.create_task(catalog.create("some"))
    await asyncio.sleep(0)
    catalog.replica, catalog.owner = True, "127.0.0.1:3"
    del catalog._renaming["some"]
    renamed.set_result(Path())
    with pytest.raises(PartitionNotActiveError) as refused:
        await creating
    assert refused.value.owner == "127.0.0.1:3"
    assert catalog.hosts == []


def member(number: int) -> wire.SetMember:
    return wire.SetMember(directory=f"{number:016x}", address=f"127.0.0.1:{number + 1}")


@pytest.mark.asyncio
async def test_servers_that_are_known_are_bounded_and_forgotten(
    owning: Owning, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, standing = owning.meeting, owning.standing
    meeting.heard_of(map(member, range(200)))
    assert len(meeting.members) == SET_MEMBERS_MAX
    meeting.heard_of([wire.SetMember(directory="nonsense", address="a:1")])
    # One that tells another address of itself is believed, and so is who tells of it while nobody answers there.
    meeting.heard(wire.SetMember(directory=member(1).directory, address="127.0.0.2:1"))
    assert meeting.addresses[member(1).directory] == "127.0.0.2:1"
    meeting.heard_of([wire.SetMember(directory=member(1).directory, address="127.0.0.2:2")])
    assert meeting.addresses[member(1).directory] == "127.0.0.2:2"
    counted = replace(standing, row=Row(1, 1, "", True, frozenset({member(2).directory})))
    # Of two at one address it is the one that is away.
    met = Met(standing.row, 0, True, {})
    meeting.heard(wire.SetMember(directory=member(3).directory, address="127.0.0.2:2"))
    with pytest.raises(InvalidArgumentError, match="must be the directory of one of them"):
        meeting.find("127.0.0.2:2")
    meeting.met[member(1).directory] = met
    assert meeting.find("127.0.0.2:2").directory == member(3).directory
    meeting.met.clear()
    for one in (2, 3):
        meeting._stub(member(one).address)
    owning._catalog.standing = replace(owning._catalog.standing, standing=counted)
    meeting.forget()
    assert len(meeting.members) == SET_MEMBERS_MAX
    # One that tells of itself, or is counted, gets the place of the one that was silent for longest.
    meeting.heard_of([member(1000)])
    meeting.heard(member(1001))
    assert meeting.addresses.keys() >= {member(1001).directory, member(2).directory}
    assert not meeting.addresses.keys() & {member(0).directory, member(1000).directory}
    assert len(meeting.members) == SET_MEMBERS_MAX
    now = time.monotonic() + MEMBER_SECONDS + 1
    monkeypatch.setattr("upr.replica.meeting.time.monotonic", lambda: now)
    meeting.heard(member(1))
    meeting.forget()
    assert meeting.addresses.keys() == {member(1).directory, member(2).directory}
    assert meeting._channels._open.keys() == {member(2).address}
    # Of one that does not answer nobody is told, unless it is counted.
    assert [one.directory for one in meeting.members_to_tell(counted)] == sorted(
        [member(2).directory, standing.directory]
    )
    await meeting.close()


def test_a_row_that_counts_too_many_is_refused() -> None:
    counted = [member(n).directory for n in range(SET_MEMBERS_MAX + 1)]
    assert len(row_of_message(wire.OwnerRow(epoch=1, counted=counted[1:])).counted) == 64
    with pytest.raises(ProtocolError, match="must be at most 64"):
        row_of_message(wire.OwnerRow(epoch=1, counted=counted))


@pytest.mark.asyncio
async def test_who_is_about_to_be_active_names_itself(
    owning: Owning, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, named = owning._catalog, []

    async def claim(**_: object) -> None:
        await owning.store(lambda standing: standing.promise(2, standing.directory))
        named.append(catalog.owner)
        raise PartitionNotActiveError("outdated")

    monkeypatch.setattr(owning, "_claim", claim)
    with pytest.raises(PartitionNotActiveError):
        await owning.promote(force=True, takeover=False)
    assert named == ["127.0.0.1:2"]
    assert catalog.owner == ""


@pytest.mark.asyncio
async def test_a_server_that_does_not_reach_the_counted_ones_may_be_active_no_more(
    owning: Owning,
) -> None:
    assert not owning._catalog.is_newest()
    owning.active = True
    assert owning._catalog.is_newest()
    row = replace(CLAIM, owner=owning.standing.directory, counted=frozenset({"other"}))
    await owning.store(lambda standing: replace(standing, row=row))
    assert not owning._catalog.is_newest()
    meeting = owning.meeting
    meeting.met["other"] = Met(row, 2, True, {})
    meeting._seen["other"] = time.monotonic()
    assert owning._catalog.is_newest()
    # It was stopped since, and goes on.
    meeting._seen["other"] -= 10
    assert not owning._catalog.is_newest()


@pytest.mark.asyncio
async def test_clients_are_told_of_no_more_servers_than_they_keep(owning: Owning) -> None:
    assert owning._catalog.servers() == []
    others = {f"{n:016x}": f"127.0.0.1:{n}" for n in range(10, 70)}
    owning.meeting.addresses.update(others)
    owning._catalog.owner = "127.0.0.1:69"
    told = owning._catalog.servers()
    assert told[:2] == ["127.0.0.1:69", "127.0.0.1:2"]
    assert len(told) == SERVERS_MAX


@pytest.mark.asyncio
async def test_a_grant_of_another_server_at_its_address_is_none(
    owning: Owning, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, answers = owning.meeting, ["other", "emptied"]

    async def grant(request: wire.GrantRequest, **_: float) -> wire.GrantResponse:
        member = wire.SetMember(directory=answers.pop(0))
        return wire.GrantResponse(member=member, granted=True)

    monkeypatch.setattr(meeting, "_stub", lambda address: SimpleNamespace(Grant=grant))
    assert await meeting.ask_grant("other", 2)
    assert not await meeting.ask_grant("other", 2)


def test_what_is_held_is_of_the_epoch_of_its_last_row_and_not_of_the_log() -> None:
    one = bucket()
    one.partitions.set_log(3, FailoverLog((FailoverRecord(1, 0, 3), FailoverRecord(2, 5, 4))))
    one.markers.seqno[3] = 5
    held = held_of(cast(BucketService, SimpleNamespace(bucket=one, following=None)))[3]
    assert (held["epoch"], held["id"], held["marker"]) == (3, 2, 5)
