"""Servers that run from copies of one data directory: the set takes one of them, and the others say so."""

import asyncio
import secrets
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.harness import until
from tests.replica.members import Member, Start, joined, start_set
from upr.cluster.keeper import Keeper
from upr.cluster.registry import Found, Map, Place, Registry
from upr.replica.peers import REFUSED_MAX, Peers
from upr.storage.directory import DataDirectory
from upr_protocol.errors import DataDirectoryError, ProtocolError, UprError
from upr_protocol.wire.v1.replica_service_pb2 import SetMember

pytestmark = pytest.mark.asyncio


def copied(member: Member, tmp_path: Path) -> Path:
    """Return a copy of a server's directory, as programs make it that copy files."""
    data = member.catalog._directory.path
    return shutil.copytree(
        data, tmp_path / "copy", ignore=shutil.ignore_patterns("admin.sock", "lock")
    )


def cloned(member: Member, tmp_path: Path) -> Path:
    """Return a copy that cannot be told from the original, as that of a whole disk."""
    path = copied(member, tmp_path)
    with closing(DataDirectory(path)) as directory:
        directory.check_place(may_be_moved=True)
    return path


def is_refused(member: Member) -> bool:
    return "are two, of which one answers" in member.ownership.waiting


async def test_a_copy_is_not_started_beside_the_original(start: Start, tmp_path: Path) -> None:
    owner, replica = await start_set(start)
    copy = copied(replica, tmp_path)
    with pytest.raises(DataDirectoryError, match="is a copy") as caught:
        await start(owner, data=copy)
    assert "restore-copy" in caught.value.hint
    assert "--data-moved" in caught.value.hint
    with closing(DataDirectory(copy)) as directory:
        directory.check_place(may_be_moved=True)
        directory.check_place(may_be_moved=False)


async def test_the_original_is_no_copy_where_the_system_tells_no_birth_times(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, replica = await start_set(start)
    data, copy = replica.catalog._directory.path, copied(replica, tmp_path)
    await replica.stop()
    # As in containers whose runtime does not know the call.
    monkeypatch.setattr("upr.storage.directory.birth_of", lambda _: 0)
    for path, is_copy in ((data, False), (copy, True)):
        with closing(DataDirectory(path)) as directory:
            if is_copy:
                with pytest.raises(DataDirectoryError, match="is a copy"):
                    directory.check_place(may_be_moved=False)
            else:
                directory.check_place(may_be_moved=False)


async def test_a_copy_that_was_made_another_server_joins(start: Start, tmp_path: Path) -> None:
    owner, replica = await start_set(start)
    copy = copied(replica, tmp_path)
    with closing(DataDirectory(copy)) as directory:
        directory.is_another()
    third = await start(owner, data=copy)
    await joined(third)
    both = {one.ownership.standing.directory for one in (replica, third)}
    await until(lambda: len(both) == 2 and owner.ownership.standing.row.counted == both)


async def test_a_clone_of_the_owner_does_not_serve(start: Start, tmp_path: Path) -> None:
    owner, _ = await start_set(start)
    clone = await start(data=cloned(owner, tmp_path))
    await until(lambda: is_refused(clone))
    assert owner.ownership.active
    assert not clone.ownership.active
    with pytest.raises(UprError) as caught:
        await clone.ownership.promote()
    assert caught.value.reason == "SAME_DIRECTORY"
    data = clone.catalog._directory.path
    await owner.stop()
    await clone.stop()
    # The original is gone: the other one takes its place.
    again = await start(data=data)
    await until(lambda: again.ownership.active)


async def test_an_owner_whose_clone_was_taken_steps_down(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, replica = await start_set(start)
    at = Peers._at

    async def cut_off(self: Peers, address: str, directory: str) -> str | None:
        return None if address == owner.target else await at(self, address, directory)

    monkeypatch.setattr(Peers, "_at", cut_off)
    clone = await start(data=cloned(owner, tmp_path))
    await until(lambda: clone.ownership.active and is_refused(owner))
    assert not owner.ownership.active
    own = owner.ownership.standing.directory
    assert replica.ownership.peers.addresses[own] == clone.target


async def test_an_owner_steps_down_for_an_epoch_that_it_did_not_claim(start: Start) -> None:
    owner, _ = await start_set(start)
    row = owner.ownership.standing.row
    newer = replace(row, epoch=row.epoch + 1)
    await owner.ownership.learned(newer, newer.epoch)
    assert not owner.ownership.active
    # Nobody else is there that claimed it.
    await until(lambda: owner.ownership.active)
    assert owner.ownership.standing.row.epoch > newer.epoch


async def test_a_clone_of_a_replica_does_not_count_in_its_place(
    start: Start, tmp_path: Path
) -> None:
    owner, replica = await start_set(start)
    clone = await start(owner, data=cloned(replica, tmp_path))
    await until(lambda: is_refused(clone) and clone.upstream_state.problem is not None)
    assert clone.upstream_state.problem is not None
    assert clone.upstream_state.problem.reason == "SAME_DIRECTORY"
    assert replica.upstream_state.connected
    # It may lack what that one acknowledged, which may come back.
    await replica.stop()
    own = replica.ownership.standing.directory
    await until(lambda: own not in owner.ownership.peers.met)
    with pytest.raises(UprError, match="are two"):
        await owner.ownership.peers.check_only(clone.ownership.peers.member)
    assert not owner.host.bucket.copies.connected[own]


async def test_a_server_that_moved_is_taken_again(start: Start) -> None:
    owner, replica = await start_set(start)
    data = replica.catalog._directory.path
    await replica.stop()
    moved = await start(owner, data=data)
    assert moved.target != replica.target
    await joined(moved)
    own = moved.ownership.standing.directory
    await until(lambda: owner.ownership.peers.addresses[own] == moved.target)
    assert moved.ownership.peers.same_directory is None


async def test_refused_servers_are_remembered_and_told_up_to_a_number(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    owner, replica = await start_set(start)
    peers = owner.ownership.peers
    own = owner.ownership.standing.directory
    for directory in (own, replica.ownership.standing.directory):
        caplog.clear()
        for _ in range(REFUSED_MAX + 3):
            claimed = SetMember(
                directory=directory, address="127.0.0.1:1", incarnation=secrets.token_hex(8)
            )
            with pytest.raises(UprError, match="are two"):
                await peers.check_only(claimed)
        assert len(peers._refused[directory]) == REFUSED_MAX
        told = [one for one in caplog.records if "one data directory" in one.msg]
        assert len(told) == REFUSED_MAX
    with pytest.raises(ProtocolError, match="must be 16 hex digits"):
        await peers.check_only(SetMember(directory=own, incarnation="x" * 2**20))


async def test_who_meets_nobody_shows_its_token_at_no_address_that_a_caller_names(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start()
    peers, asked = server.ownership.peers, list[str]()
    monkeypatch.setattr(peers, "_meets", False)
    monkeypatch.setattr(type(peers._links), "open", lambda _, address: asked.append(address))
    for _ in range(2):
        await peers.check_only(
            SetMember(directory="0" * 16, address="127.0.0.1:1", incarnation=secrets.token_hex(8))
        )
    assert not asked


async def test_a_server_goes_on_when_the_map_is_deleted_while_it_looks(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, replica = await start_set(start)
    place = Place.parse("etcd://127.0.0.1:1/x")
    keeper = Keeper(replica.catalog, cast(Registry, None), place, lambda: replica.target)
    keeper._read_at = asyncio.get_running_loop().time()
    keeper._found = Found({}, 1)
    keeper._map = Map(replica.catalog.replica_set, replica.ownership.standing.row)

    async def deleted(self: Peers, address: str) -> None:
        keeper._map = None

    monkeypatch.setattr(Peers, "check_alone", deleted)
    # What it raised but UprError would end the part that the server takes in its cluster.
    await keeper._look(replica.ownership)
    assert keeper._map is None


async def test_a_clone_that_found_the_original_stays_refused_without_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start()
    peers = server.ownership.peers
    there: list[str | None] = ["0" * 16]

    async def found(self: Peers, address: str, directory: str) -> str | None:
        return there[0]

    monkeypatch.setattr(Peers, "_at", found)
    with pytest.raises(UprError, match="are two"):
        await peers.check_alone("127.0.0.1:1")
    # The machine of the original is started again, which has what it acknowledged meanwhile.
    there[0] = None
    with pytest.raises(UprError, match="are two"):
        await peers.check_alone("")
    peers.check_taken(force=True)
    await peers.check_alone("")
