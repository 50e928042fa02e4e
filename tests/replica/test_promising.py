"""A promise, in one process: what a server answers for, and what may come in between."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

from tests.client.certificates import make_certificate
from tests.engine.buckets import bucket
from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.replica.members import A, Start, full, joined, leave_alone, start_set, write
from upr.config import ServerConfig
from upr.engine.partitions import ACTIVE, REPLICA
from upr.replica.fencing import Fencing
from upr.replica.inventory import Promoted, held_of
from upr.replica.links import Channels, Links
from upr.replica.ownership import Ownership
from upr.replica.peers import UNMET_SECONDS, Met, Peers, row_of_message, row_to_message
from upr.replica.replica_service import ReplicaMethods
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog, DamagedBucket
from upr.service.overload.intake import Context
from upr.storage.directory import DataDirectory, Stored
from upr.storage.journal import Commit
from upr_protocol.errors import (
    DataDamagedError,
    InvalidArgumentError,
    NoRoomError,
    PartitionNotActiveError,
    ProtocolError,
    StorageFailedError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.limits import MEMBER_SECONDS, SERVERS_MAX, SET_MEMBERS_MAX
from upr_protocol.ownership import Row, Served
from upr_protocol.wire.v1 import replica_service_pb2 as wire

VERSION = 7
CLAIM = Row(2, 0, "other", False, frozenset(), Served("other", 1))


@pytest_asyncio.fixture
async def ownership(tmp_path: Path) -> AsyncIterator[Ownership]:
    """The part of a replica that holds no bucket and reaches nobody."""

    async def told() -> None:
        pass

    directory = DataDirectory(tmp_path / "data")
    directory.join("1" * 16)
    config = ServerConfig(data=directory.path, replicate_from=("127.0.0.1:1",))
    catalog = Catalog(directory, config)
    catalog.start(told)
    yield Ownership(catalog, config, lambda: "127.0.0.1:2")
    await catalog.close()
    directory.close()


class Contested:
    """The row of a cluster, which another server changes after some readings."""

    dropped: tuple[int, ...] = ()

    def __init__(self, row: Row, theirs: Row, readings: int) -> None:
        self.row, self.theirs, self.readings = row, theirs, readings
        self._pass()

    def _pass(self) -> None:
        if self.readings == 0:
            self.row = self.theirs
        self.readings -= 1

    async def read(self) -> Row:
        row = self.row
        self._pass()
        return row

    async def swap(self, old: Row, new: Row) -> bool:
        is_old = self.row == old
        self.row = new if is_old else self.row
        return is_old


@pytest.mark.asyncio
@pytest.mark.parametrize("readings", [0, 1, 2])
async def test_a_server_whose_turn_it_was_does_not_replace_who_became_active_meanwhile(
    start: Start, readings: int
) -> None:
    """It looked, and another one claimed before its own claim was in the map, which takes a while where etcd is slow."""
    owner, replica = await start_set(start)
    ownership = replica.ownership
    await leave_alone(replica)
    seen = ownership.standing.row
    await owner.stop()
    rows = Contested(seen, seen.claimed("c" * 16, seen.epoch + 1).serves(), readings)
    ownership.fencing = Fencing(rows, replica.catalog, ownership.peers)
    with pytest.raises(UnavailableError, match="another server claims the ownership too"):
        await ownership.promote(seen=seen)
    assert rows.row == rows.theirs
    assert not ownership.active


@pytest.mark.asyncio
@pytest.mark.parametrize("readings", [0, 1, 2, 3])
async def test_an_owner_takes_nothing_back_from_who_became_active_meanwhile(
    start: Start, readings: int
) -> None:
    owner, replica = await start_set(start)
    ownership = owner.ownership
    await asyncio.gather(leave_alone(owner), leave_alone(replica))
    own, other = ownership.standing.directory, replica.ownership.standing.directory
    row = ownership.standing.row.counting(own)
    claimed = row.claimed(other, row.epoch + 1)
    await ownership.promise(claimed.epoch, other, claimed)
    rows = Contested(claimed, claimed.serves(), readings)
    ownership.fencing = Fencing(rows, owner.catalog, ownership.peers)
    with pytest.raises(UnavailableError, match="another server claims the ownership too"):
        await ownership._take_back()
    assert rows.row == rows.theirs
    assert not ownership.active


@pytest.mark.asyncio
async def test_a_promise_waits_for_no_room_of_a_replica(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of what its full disk does not take was acknowledged for it, and it does not become active itself."""
    owner, replica = await start_set(start)
    ownership, host, row = replica.ownership, replica.host, owner.ownership.standing.row

    with monkeypatch.context() as patched:
        patched.setattr(host.disk, "append", full)
        await write(owner, 1)
        await until(lambda: host.bucket.stalled and host.bucket.tail.end > host.bucket.tail.durable)
        assert not ownership.in_step
        await asyncio.gather(leave_alone(owner), leave_alone(replica))
        async with asyncio.timeout(WAIT_SECONDS / 4):
            with pytest.raises(StorageFailedError, match="cannot be written at this server now"):
                await ownership.promise(row.epoch + 1, ownership.standing.directory, row)
            answer = await ownership.promise(row.epoch + 2, "f" * 16, row)
    assert answer is not None
    assert not answer.confirmed
    held = answer.held[host.bucket.identity.version]
    assert (held["marker"][A], held["high"][A]) == (0, 0)
    assert owner.seqno(A) == 1
    await until(lambda: replica.seqno(A) == 1)


@pytest.mark.asyncio
async def test_a_promotion_at_a_full_disk_takes_the_room_that_is_kept_for_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise frees it, and the journal is tried again a moment later."""
    owner, replica = await start_set(start)
    host, kept = replica.host, replica.catalog._directory.path / "owner.spare"
    append = host.disk.append

    async def full_with_it(commit: Commit) -> int:
        return await (full() if kept.exists() else append(commit))

    assert kept.exists()
    monkeypatch.setattr(host.disk, "append", full_with_it)
    await write(owner, 1)
    await until(lambda: host.bucket.stalled)
    monkeypatch.setattr("upr.storage.directory.free_bytes", lambda _: 0)
    await replica.ownership.promote()
    assert replica.seqno(A) == 1


@pytest.mark.asyncio
async def test_a_promotion_whose_disk_is_full_before_it_has_everything_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others claim only when it does no more."""
    owner, _, behind = await start_set(start, replicas=2)
    await joined(behind)
    await leave_alone(behind)
    monkeypatch.setattr(behind.host.disk, "append", full)
    monkeypatch.setattr("upr.replica.following.GATHER_SECONDS", 0.5)
    await write(owner, 1)
    await owner.stop()
    async with asyncio.timeout(WAIT_SECONDS / 4):
        with pytest.raises(StorageFailedError, match="cannot be written at this server now"):
            await behind.ownership.promote()
    assert not behind.ownership.claiming


@pytest.mark.asyncio
async def test_who_could_not_step_down_whole_does_it_with_the_next_call_or_round(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, calls = ownership._catalog, list[bool]()
    await catalog.create("some", version=VERSION, active=False)
    host = catalog.find("some")

    async def steps_down(*, fenced: bool) -> None:
        host.bucket.partitions.state[:] = REPLICA
        calls.append(fenced)
        if len(calls) in (1, 3):
            raise OSError("no room")

    host.bucket.partitions.state[:] = ACTIVE
    monkeypatch.setattr(host, "step_down", steps_down)
    with pytest.raises(OSError, match="no room"):
        await ownership.step_down(fenced=False)
    for _ in range(2):
        await ownership.step_down(fenced=False)
    assert len(calls) == 2
    host.bucket.partitions.state[:] = ACTIVE
    with pytest.raises(OSError, match="no room"):
        await ownership.step_down(fenced=False)
    for _ in range(2):
        await ownership._round()
    assert len(calls) == 4


@pytest.mark.asyncio
async def test_nobody_is_active_again_before_it_has_stepped_down_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = await start_set(start)
    ownership, host, calls = owner.ownership, owner.host, list[bool]()
    step_down, met = host.step_down, list[None]()
    meet_all = ownership.peers.meet_all

    async def steps_down(*, fenced: bool) -> None:
        calls.append(fenced)
        await step_down(fenced=fenced)
        if len(calls) == 1:
            raise OSError("no room")

    async def meet(*arguments: Any) -> None:
        await meet_all(*arguments)
        met.append(None)

    monkeypatch.setattr(host, "step_down", steps_down)
    monkeypatch.setattr(ownership.peers, "meet_all", meet)
    # As a promise that is asked of it meanwhile, and that it does not give.
    async with ownership._changing:
        with pytest.raises(OSError, match="no room"):
            await ownership.step_down(fenced=True)
        met.clear()
        await until(lambda: met)
        await pass_turns(100)
    await until(lambda: ownership.active)
    assert len(calls) == 2
    met.clear()
    await until(lambda: len(met) > 1)
    assert ownership.active
    assert len(calls) == 2


@pytest.mark.asyncio
async def test_a_bucket_that_is_being_made_is_promised_too(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, go_on = ownership._catalog, threading.Event()
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
    promising = asyncio.create_task(ownership.promise(2, "other", CLAIM))
    asyncio.get_running_loop().call_soon(go_on.set)
    answer = await asyncio.wait_for(promising, WAIT_SECONDS)
    assert answer is not None
    assert list(answer.held) == [VERSION]


@pytest.mark.asyncio
async def test_one_that_cannot_be_asked_is_left_out_and_told_once(
    ownership: Ownership, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("upr_secret")
    peers = Peers(ownership._catalog, lambda: "127.0.0.1:2", Links(token=file), meets=True)
    peers.addresses["other"] = "127.0.0.1:1"
    file.unlink()
    assert await peers.ask_promises(CLAIM, ["other"]) == {}
    assert await peers.reach(["other"]) == {}
    assert await peers.ask_promises(CLAIM, ["other"]) == {}
    assert [record.call for record in caplog.records] == ["Promise", "Meet"]  # type: ignore[attr-defined]
    assert all("cannot be read" in record.error for record in caplog.records)  # type: ignore[attr-defined]


class Others:
    """The calls of other servers, each of which answers by its address until it is to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ownership: Ownership) -> None:
        self.peers = Peers(ownership._catalog, lambda: "127.0.0.1:2", Links(), meets=True)
        self.errors: dict[str, UprError] = {}
        monkeypatch.setattr(self.peers, "_stub", self._stub)

    def _stub(self, address: str) -> Any:
        def call(name: str, answer: Any) -> Any:
            async def called(*_: object, **__: object) -> Any:
                if name in self.errors:
                    raise self.errors[name]
                (who,) = (d for d, a in self.peers.addresses.items() if a == address)
                return answer(member=wire.SetMember(directory=who, address=address))

            return called

        return SimpleNamespace(
            Meet=call("Meet", wire.MeetResponse), Promise=call("Promise", wire.PromiseResponse)
        )


@pytest.mark.asyncio
async def test_one_that_is_met_and_refuses_to_promise_is_told_once_and_named_with_why(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "upr.replica.peers")
    others = Others(monkeypatch, ownership)
    peers, one, silent = others.peers, member(1), member(2)
    peers.addresses |= {other.directory: other.address for other in (one, silent)}
    peers._seen |= dict.fromkeys(peers.addresses, 0.0)

    async def asked() -> str:
        await peers.ask_promises(CLAIM, [one.directory])
        await peers.reach([one.directory])
        return peers.not_heard([one.directory, silent.directory]).message

    words = "counted servers that cannot be reached"
    both = f"{one.address}, {silent.address}; they may have what is missing here"
    assert await asked() == f"{words}: {both}"
    others.errors["Promise"] = DataDamagedError("it cannot be read")
    for _ in range(3):
        assert f"{words}, or refuse: {one.address} (it cannot be read), " in await asked()
    assert [(r.levelname, r.call) for r in caplog.records] == [("WARNING", "Promise")]  # type: ignore[attr-defined]
    # Also what passes by itself is named, and nothing that is old.
    others.errors["Promise"] = NoRoomError("No space left on device")
    assert f"{one.address} (No space left on device), {silent.address};" in await asked()
    others.errors["Meet"] = UnavailableError("gone")
    assert await asked() == f"{words}: {both}"
    others.errors.clear()
    assert await asked() == f"{words}: {both}"
    assert [(r.levelname, r.call) for r in caplog.records[1:]] == [("INFO", "Promise")]  # type: ignore[attr-defined]
    others.errors["Promise"] = DataDamagedError("it cannot be read")
    await asked()
    peers.drop(one.directory)
    assert not peers._failed
    assert not peers._refusals


@pytest.mark.asyncio
async def test_two_servers_at_one_address_are_told_once(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peers, one, other = ownership.peers, member(1), member(2)
    answering = other

    async def meet(*_: object, **__: object) -> wire.MeetResponse:
        return wire.MeetResponse(member=answering)

    monkeypatch.setattr(peers, "_meets", True)
    monkeypatch.setattr(peers, "_stub", lambda _: SimpleNamespace(Meet=meet))
    peers.heard(one)
    for _ in range(2):
        assert await peers.reach([one.directory]) == {}
    (told,) = caplog.records
    assert f"{other.directory}' answers there, and not {one.directory}" in told.error  # type: ignore[attr-defined]
    assert "two advertise that address" in peers.not_heard([one.directory]).message
    answering = one
    assert (await peers.reach([one.directory])).keys() == {one.directory}


@pytest.mark.asyncio
async def test_a_server_that_follows_and_cannot_be_met_is_told_once(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "upr.replica.peers")
    others, now = Others(monkeypatch, ownership), 100.0
    monkeypatch.setattr("upr.replica.peers.time.monotonic", lambda: now)
    peers, one = others.peers, member(1)
    others.errors["Meet"] = UnavailableError("no certificate fits")
    options = SimpleNamespace(
        is_replica=True, consumer="replica", directory=one.directory, address=one.address
    )
    host = SimpleNamespace(bucket=SimpleNamespace(followers=[SimpleNamespace(options=options)]))
    row = replace(CLAIM, owner=ownership.standing.directory, serving=True)
    owns = replace(ownership.standing, row=row)
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "hosts", [host])
        for seconds in (0.0, UNMET_SECONDS, 1.0, 50.0):
            now += seconds
            await peers.meet_all(owns)
    (told,) = caplog.records
    assert (told.who, told.error) == (one.address, "no certificate fits")  # type: ignore[attr-defined]
    others.errors.clear()
    await peers.meet_all(owns)
    await peers.meet_all(owns)
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.asyncio
async def test_all_are_met_at_once(ownership: Ownership, monkeypatch: pytest.MonkeyPatch) -> None:
    upstreams = [member(1).address, member(2).address]
    peers = Peers(
        ownership._catalog, lambda: "127.0.0.1:2", Links(), meets=True, upstreams=upstreams
    )
    peers.heard(member(3))
    all_asked = asyncio.Barrier(3)

    async def meet(*_: object, **__: object) -> wire.MeetResponse:
        # A server that is cut off holds only itself up.
        await all_asked.wait()
        raise UnavailableError("no answer")

    monkeypatch.setattr(peers, "_stub", lambda _: SimpleNamespace(Meet=meet))
    owner = ownership.standing.directory
    row = replace(CLAIM, owner=owner, serving=True)
    async with asyncio.timeout(WAIT_SECONDS):
        await peers.meet_all(replace(ownership.standing, row=row))
    assert peers.met == {}


@pytest.mark.asyncio
async def test_one_that_answers_nonsense_is_left_out(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = wire.SetMember(directory="other", address="127.0.0.1:1")
    row = wire.OwnerRow(counted=map(str, range(SET_MEMBERS_MAX + 1)))

    async def meet(request: wire.MeetRequest, **_: Any) -> wire.MeetResponse:
        return wire.MeetResponse(member=member, row=row)

    async def promise(request: wire.PromiseRequest, **_: Any) -> wire.PromiseResponse:
        held = [wire.HeldBucket(version=VERSION, partitions=b"none")]
        return wire.PromiseResponse(member=member, promised=True, held=held)

    peers = Peers(ownership._catalog, lambda: "127.0.0.1:2", Links(), meets=True)
    peers.addresses["other"] = member.address
    monkeypatch.setattr(peers, "_stub", lambda _: SimpleNamespace(Meet=meet, Promise=promise))
    assert await peers.reach(["other"]) == {}
    assert await peers.ask_promises(CLAIM, ["other"]) == {}
    told = [one.error for one in caplog.records]  # type: ignore[attr-defined]
    assert [words.split()[0] for words in told] == ["counted", "what"]


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
    for half in (whole[:-9], whole[:99], b"", None, whole.replace(b"A", b"B")):
        if half is None:
            chain.unlink()
        else:
            chain.write_bytes(half)
        assert channels.to("127.0.0.1:1") is first
        with pytest.raises(UprError) as raised:
            channels.to("127.0.0.1:2")
        # It passes by itself: nobody is to be warned of the server that is called.
        assert (raised.value.reason, raised.value.retriable) == ("FILE_UNUSABLE", True)
    make_certificate(tmp_path)
    assert channels.to("127.0.0.1:1") is not first
    said = ["changed files cannot be used for links", "files can be used for links again"]
    assert [one.message for one in caplog.records] == said
    await channels.close()


@pytest.mark.asyncio
async def test_nothing_is_promised_of_a_damaged_bucket(
    ownership: Ownership, tmp_path: Path
) -> None:
    problem = DataDamagedError("it cannot be read")
    ownership._catalog._damaged["some"] = DamagedBucket(tmp_path, "some", VERSION, True, problem)
    with pytest.raises(DataDamagedError, match="'some' is damaged here"):
        await ownership.promise(2, "other", CLAIM)
    assert ownership.standing.promised == 0
    assert await ownership.promise(2, "other", CLAIM, force=True) is not None


@pytest.mark.asyncio
async def test_a_promise_in_between_lets_it_follow_nobody(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ownership.following.end

    async def promises() -> None:
        await end()
        await ownership.store(lambda standing: standing.promise(2, "other"))

    monkeypatch.setattr(ownership.following, "end", promises)
    await ownership._follow_owner()
    assert ownership.following.task is None


@pytest.mark.asyncio
async def test_who_has_promised_takes_nothing_from_the_owner_before(ownership: Ownership) -> None:
    await ownership._follow_owner()
    task = ownership.following.task
    assert task is not None
    assert await ownership.promise(2, "other", CLAIM) is not None
    assert task.done()
    await ownership._follow_owner()
    assert ownership.following.task is None


@pytest.mark.asyncio
async def test_a_bucket_that_was_to_be_made_is_not_when_the_server_stepped_down_meanwhile(
    ownership: Ownership,
) -> None:
    catalog = ownership._catalog
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
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, standing = ownership.peers, ownership.standing
    peers.heard_of(map(member, range(200)))
    assert len(peers.members) == SET_MEMBERS_MAX
    peers.heard_of([wire.SetMember(directory="nonsense", address="a:1")])
    # One that tells another address of itself is believed, and so is who tells of it while nobody answers there.
    peers.heard(wire.SetMember(directory=member(1).directory, address="127.0.0.2:1"))
    assert peers.addresses[member(1).directory] == "127.0.0.2:1"
    peers.heard_of([wire.SetMember(directory=member(1).directory, address="127.0.0.2:2")])
    assert peers.addresses[member(1).directory] == "127.0.0.2:2"
    counted = replace(standing, row=Row(1, 1, "", True, frozenset({member(2).directory})))
    # Of two at one address it is the one that is away.
    met = Met(standing.row, 0, True, {})
    peers.heard(wire.SetMember(directory=member(3).directory, address="127.0.0.2:2"))
    with pytest.raises(InvalidArgumentError, match="must be the directory of one of them"):
        peers.find("127.0.0.2:2")
    peers.met[member(1).directory] = met
    assert peers.find("127.0.0.2:2").directory == member(3).directory
    peers.met.clear()
    for one in (2, 3):
        peers._stub(member(one).address)
    ownership._catalog.standing = replace(ownership._catalog.standing, standing=counted)
    peers.forget()
    assert len(peers.members) == SET_MEMBERS_MAX
    # One that tells of itself, or is counted, gets the place of the one that was silent for longest.
    peers.heard_of([member(1000)])
    peers.heard(member(1001))
    assert peers.addresses.keys() >= {member(1001).directory, member(2).directory}
    assert not peers.addresses.keys() & {member(0).directory, member(1000).directory}
    assert len(peers.members) == SET_MEMBERS_MAX
    now = time.monotonic() + MEMBER_SECONDS + 1
    monkeypatch.setattr("upr.replica.peers.time.monotonic", lambda: now)
    peers.heard(member(1))
    peers.forget()
    assert peers.addresses.keys() == {member(1).directory, member(2).directory}
    assert peers._channels._open.keys() == {member(2).address}
    # Of one that does not answer nobody is told, unless it is counted.
    assert [one.directory for one in peers.members_to_tell(counted)] == sorted(
        [member(2).directory, standing.directory]
    )
    await peers.close()


def test_a_row_that_counts_too_many_is_refused() -> None:
    counted = [member(n).directory for n in range(SET_MEMBERS_MAX + 1)]
    assert len(row_of_message(wire.OwnerRow(epoch=1, counted=counted[1:])).counted) == 64
    with pytest.raises(ProtocolError, match="must be at most 64"):
        row_of_message(wire.OwnerRow(epoch=1, counted=counted))


@pytest.mark.asyncio
async def test_who_is_about_to_be_active_names_itself(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, named = ownership._catalog, []

    async def claim(**_: object) -> None:
        await ownership.store(lambda standing: standing.promise(2, standing.directory))
        named.append(catalog.owner)
        raise PartitionNotActiveError("outdated")

    monkeypatch.setattr(ownership, "_claim", claim)
    with pytest.raises(PartitionNotActiveError):
        await ownership.promote(force=True, takeover=False)
    assert named == ["127.0.0.1:2"]
    assert catalog.owner == ""


@pytest.mark.asyncio
async def test_a_server_that_does_not_reach_the_counted_ones_may_be_active_no_more(
    ownership: Ownership,
) -> None:
    assert not ownership._catalog.is_newest()
    ownership.active = True
    assert ownership._catalog.is_newest()
    row = replace(CLAIM, owner=ownership.standing.directory, counted=frozenset({"other"}))
    await ownership.store(lambda standing: replace(standing, row=row))
    assert not ownership._catalog.is_newest()
    peers = ownership.peers
    peers.met["other"] = Met(row, 2, True, {})
    peers._seen["other"] = time.monotonic()
    assert ownership._catalog.is_newest()
    # It was stopped since, and goes on.
    peers._seen["other"] -= 10
    assert not ownership._catalog.is_newest()


@pytest.mark.asyncio
async def test_clients_are_told_of_no_more_servers_than_they_keep(ownership: Ownership) -> None:
    assert ownership._catalog.servers() == []
    others = {f"{n:016x}": f"127.0.0.1:{n}" for n in range(10, 70)}
    ownership.peers.addresses.update(others)
    ownership._catalog.owner = "127.0.0.1:69"
    told = ownership._catalog.servers()
    assert told[:2] == ["127.0.0.1:69", "127.0.0.1:2"]
    assert len(told) == SERVERS_MAX


@pytest.mark.asyncio
async def test_what_a_server_waits_for_is_logged_once_for_each_reason(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The words name another server of etcd each time."""
    caplog.set_level("INFO", "upr.replica.ownership")
    ends = [UnavailableError(f"etcd at {n}: no answer in time") for n in range(3)]
    errors = iter([*ends, OSError("full"), OSError("full too"), MemoryError(), ends[0], None, None])
    done = asyncio.Event()

    async def one_round() -> None:
        error = next(errors, done)
        if error is done:
            done.set()
        elif isinstance(error, Exception):
            raise error

    monkeypatch.setattr(ownership, "_round", one_round)
    monkeypatch.setattr("upr.replica.ownership.MEET_SECONDS", 0)
    running = asyncio.create_task(ownership.run())
    async with asyncio.timeout(WAIT_SECONDS):
        await done.wait()
    running.cancel()
    told = [getattr(one, "waiting", "") for one in caplog.records]
    assert told == [str(ends[0]), "full", "MemoryError in the server", str(ends[0]), ""]


@pytest.mark.asyncio
async def test_a_grant_of_another_server_at_its_address_is_none(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, answers = ownership.peers, ["other", "emptied"]

    async def grant(request: wire.GrantRequest, **_: float) -> wire.GrantResponse:
        member = wire.SetMember(directory=answers.pop(0))
        return wire.GrantResponse(member=member, granted=True)

    monkeypatch.setattr(peers, "_stub", lambda address: SimpleNamespace(Grant=grant))
    assert await peers.ask_grant("other", 2)
    assert not await peers.ask_grant("other", 2)


def test_what_is_held_is_of_the_epoch_of_its_last_row_and_not_of_the_log() -> None:
    one = bucket()
    one.partitions.set_log(3, FailoverLog((FailoverRecord(1, 0, 3), FailoverRecord(2, 5, 4))))
    one.markers.seqno[3] = 5
    held = held_of(cast(BucketService, SimpleNamespace(bucket=one, upstream_state=None)))[3]
    assert (held["epoch"], held["id"], held["marker"]) == (3, 2, 5)


@pytest.mark.asyncio
async def test_a_forced_promotion_that_fails_leaves_a_server_drained(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ReplicaMethods(ownership._catalog, ownership._config, lambda: "127.0.0.1:2")
    methods._ownership.drained = True

    async def fails(**_: bool) -> Promoted:
        raise UnavailableError("not now")

    async def works(**_: bool) -> Promoted:
        return Promoted(CLAIM)

    monkeypatch.setattr(methods._ownership, "promote", fails)
    with pytest.raises(UnavailableError):
        await methods._promoted(force=True, takeover=False)
    assert methods._ownership.drained
    monkeypatch.setattr(methods._ownership, "promote", works)
    await methods._promoted(force=True, takeover=False)
    assert not methods._ownership.drained


@pytest.mark.asyncio
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("at", ["begin", "promote"])
async def test_a_server_that_is_drained_while_it_is_promoted_stays_drained(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch, force: bool, at: str
) -> None:
    async def step(what: str) -> None:
        if what == at:
            await methods.Drain(wire.DrainRequest(), cast(Context, None))

    async def begin(*_: object, **__: bool) -> None:
        await step("begin")

    async def promoted(**_: bool) -> Promoted:
        await step("promote")
        return Promoted(CLAIM)

    methods = ReplicaMethods(ownership._catalog, ownership._config, lambda: "127.0.0.1:2")
    monkeypatch.setattr(methods, "_cluster", SimpleNamespace(begin=begin))
    monkeypatch.setattr(methods, "_check_not_waiting", lambda: None)
    monkeypatch.setattr(methods, "_successor", lambda: None)
    monkeypatch.setattr(methods._ownership, "promote", promoted)
    await methods._promoted(force=force, takeover=False)
    assert methods._ownership.drained


@pytest.mark.asyncio
async def test_an_owner_without_grants_says_so_and_takes_no_writes(
    ownership: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = ownership._catalog
    catalog.replica = False
    catalog.check_active()
    monkeypatch.setattr(catalog, "may_serve", lambda: False)
    with pytest.raises(PartitionNotActiveError, match="no counted server grants it") as refused:
        catalog.check_active()
    assert refused.value.retriable


@pytest.mark.asyncio
async def test_calls_that_wait_for_a_disk_that_hangs_are_bounded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who calls gives up, and calls again; what was begun for it stays."""
    owner, replica = await start_set(start)
    await leave_alone(owner)
    monkeypatch.setattr("upr.replica.replica_service.WORKS_MAX", 8)
    ends, keep = asyncio.Event(), replica.catalog.keep_standing

    async def hangs(stored: Stored) -> None:
        await ends.wait()
        await keep(stored)

    methods = replica.server._sets
    assert isinstance(methods, ReplicaMethods)
    works, row = methods._works, replace(owner.ownership.standing.row, revision=99)
    request = wire.MeetRequest(
        replica_set=replica.catalog.replica_set,
        member=owner.ownership.peers.member,
        row=row_to_message(row),
        epoch=row.epoch,
    )
    meet = owner.ownership.peers._stub(replica.target).Meet
    with monkeypatch.context() as patched:
        patched.setattr(replica.catalog, "keep_standing", hangs)
        for _ in range(4):
            calls = [meet(request, timeout=0.5) for _ in range(4)]
            found = await asyncio.gather(*calls, return_exceptions=True)
        codes = {one.code() for one in found if isinstance(one, grpc.aio.AioRpcError)}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(works) == 8
        ends.set()
        await until(lambda: not works)
    assert (await meet(request, timeout=WAIT_SECONDS)).row.revision == 99
