"""A cluster in the simulation: a few seeds under faults, and what those seldom do, step by step."""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import worlds
from tests.simulation.clustered import ClusterWorld
from tests.simulation.looping import running
from tests.simulation.processes import ServerProcess
from tests.simulation.truth import USED, Violation
from upr.cluster import keeper
from upr.cluster.registry import Map
from upr.engine.partitions import ACTIVE
from upr.replica.inventory import Promoted
from upr.replica.ownership import Ownership
from upr.replica.replica_service import ReplicaMethods
from upr.replica.replication import Replication
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.disk_threads import Disk
from upr.service.replica_tables import TableFeed
from upr.storage.directory import Stored
from upr.storage.journal import Commit
from upr_client import AsyncClient, UprError
from upr_protocol.errors import DataDamagedError, NoRoomError, UnavailableError
from upr_protocol.ownership import Standing, first_row
from upr_protocol.wire.v1.admin_service_pb2 import ListBucketsResponse
from upr_protocol.wire.v1.change_stream_service_pb2 import Tables


def standing(server: ServerProcess) -> Standing:
    assert server.ownership is not None
    return server.ownership.standing


def test_a_cluster_ends_on_one_history_with_all_that_was_promised(tmp_path: Path) -> None:
    for seed in worlds.seeds(30):
        counts = worlds.run("cluster", tmp_path / str(seed), seed).counts
        worlds.happened(counts, "acknowledged at disk", "acknowledged at replicated(1)")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ClusterWorld]:
    """Return a world of three servers, the first of which is active and counts the others only."""
    with worlds.prepared(0):
        found = ClusterWorld(tmp_path / "world", 5, servers=3)
        with found.living():
            found.begin()
            found.until(lambda: counted(found) == {1, 2}, 30, "counted")
            yield found


def counted(world: ClusterWorld, by: int = 0) -> set[int]:
    """Return the numbers of the servers that one of them counts."""
    known = standing(world.servers[by]).row.counted
    running = (s for s in world.servers if s.ownership is not None)
    return {s.number for s in running if standing(s).directory in known}


def active(world: ClusterWorld) -> list[int]:
    """Return the numbers of the servers that may serve."""
    found = []
    for server in world.servers:
        if server.active and server.ownership is not None and server.loop is not None:
            fencing = server.ownership.fencing
            assert fencing is not None
            now = world.elapsed / 1e6 + 1000.0
            if fencing.grants.may_serve(now * world.rates[server.host]):
                found.append(server.number)
    return found


@pytest.mark.long
def test_one_witness_is_not_enough_and_nobody_serves_beside_the_next_owner(
    world: ClusterWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "upr.replica.fencing")
    first, second, third = world.servers
    epoch = standing(first).row.epoch
    # Its key is gone, and the others hear it.
    world.etcd.cut.add(first.host)
    world.pass_time(12.0)
    assert active(world) == [0]
    # Nobody hears it, and its key is there; so it goes on alone.
    world.etcd.heal()
    cuts = world.cut_off(first)
    world.until(lambda: counted(world) == {0}, 30, "the only one that is counted")
    assert active(world) == [0]
    assert standing(first).row.epoch == epoch
    world.net.heal(*cuts)
    world.until(lambda: counted(world) == {1, 2}, 30, "counted again")
    # A third one is promised to nobody before its grant has run out, although it hears the owner.
    world.cut_off(first, second)
    world.pass_time(1.0)
    assert active(world) == [0]
    asked = world.elapsed
    world.order(second)
    world.until(lambda: second.active, 12, "promoted", step=0.05)
    assert world.elapsed - asked > 2_000_000
    world.net.heal()
    # Before that nobody else has all that it has.
    world.until(lambda: counted(world, by=1) == {0, 2}, 30, "counted by the next one")
    # Its key is gone, and nobody hears it.
    world.cut_off(second)
    world.etcd.cut.add(second.host)
    began = world.elapsed
    world.until(lambda: first.active or third.active, 15, "replaced")
    assert world.elapsed - began > 3_000_000
    world.etcd.heal()
    world.net.heal()
    world.settle()
    world.check()
    said = [one.message for one in caplog.records if one.name == "upr.replica.fencing"]
    began_and_ended = (
        "the owner takes and answers nothing",
        "the owner's trouble is over",
    )
    assert tuple(said[-2:]) == began_and_ended


@pytest.mark.long
def test_who_was_restarted_promises_nothing_beside_a_grant_that_it_forgot(
    world: ClusterWorld,
) -> None:
    first, second, third = world.servers
    world.cut_off(first, third)
    world.pass_time(2.0)
    second.kill()
    killed = world.elapsed
    # Neither is heard by the owner, which relies on what it was granted last, and tells them nothing.
    world.cut_off(first)
    second.start()
    world.until(lambda: bool(second.server and second.server._serving), 1, "started", step=0.01)
    world.order(third)
    world.until(lambda: third.active, 12, "promoted", step=0.01)
    assert world.elapsed - killed > 2_500_000
    world.net.heal()
    world.settle()
    world.check()


@pytest.mark.long
def test_an_owner_that_can_store_nothing_more_is_followed_and_confirms_nothing(
    world: ClusterWorld,
) -> None:
    first, *others = world.servers
    addresses = [server.address for server in world.servers]
    stays = world.people.follow("anywhere", "disk", "any", addresses)
    world.until(lambda: stays.newest.keys() == {*USED}, 10, "followed")
    first.fails_at = "journal.before_sync"
    world.etcd.down = True
    world.until(lambda: first.ownership.inventory.failure is not None, 10, "failed")  # type: ignore[union-attr]
    world.pass_time(3.0)
    # While nobody can claim it stays, so that it can be read.
    assert first.active
    cuts = world.cut_off(first)
    world.pass_time(6.0)
    world.etcd.heal()
    world.pass_time(1.5)
    # Nobody who would claim is heard.
    assert first.active
    world.net.heal(*cuts)
    world.until(lambda: any(s.active for s in others), 40, "replaced", step=0.05)
    acknowledged = dict(world.counts)
    for durability in ("disk", "replicated(1)"):
        what = f"acknowledged at {durability}"
        world.until(lambda what=what: world.counts[what] > acknowledged[what], 20, what)  # type: ignore[misc]
    new = next(s for s in others if s.active)
    assert new.bucket is not None
    # What was numbered and is on no disk is numbered again, under another id.
    logs = new.bucket.bucket.partitions.logs
    assert {len(logs[p].to_pairs()) for p in USED} == {2}
    # Who may read anywhere does not stay with one that gets nothing more.
    highs = {p: int(new.bucket.bucket.partitions.high[p]) for p in USED}
    world.until(
        lambda: all(stays.rows[p][-1].seqno >= high for p, high in highs.items()), 20, "elsewhere"
    )
    assert first.ownership is not None
    assert not first.ownership.in_step
    assert world.promoted(first) == world.promoted(first, force=True) == "STORAGE_FAILED"
    first.kill()
    first.start()
    world.settle()
    world.check()


def test_an_owner_on_a_disk_that_hangs_is_followed(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call to the disk fails or ends, and all else goes on."""
    first, *others = world.servers
    acknowledged = world.counts["acknowledged at disk"]
    ends = asyncio.Event()
    append, in_store_thread, keep = Disk.append, Disk.in_store_thread, Catalog.keep_standing

    async def hangs() -> None:
        while running().host == first.host and not ends.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def appends(disk: Disk, commit: Commit) -> int:
        await hangs()
        return await append(disk, commit)

    async def stores(disk: Disk, call: Callable[[], Any]) -> Any:
        await hangs()
        return await in_store_thread(disk, call)

    async def keeps(catalog: Catalog, stored: Stored) -> None:
        await hangs()
        await keep(catalog, stored)

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "append", appends)
        patched.setattr(Disk, "in_store_thread", stores)
        patched.setattr(Catalog, "keep_standing", keeps)
        world.until(lambda: any(s.active for s in others), 40, "replaced")
        assert not first.active
        world.until(lambda: world.counts["acknowledged at disk"] > acknowledged, 20, "written")
        # Its key is there again, and it claims nothing.
        world.pass_time(10.0)
        assert any(s.active for s in others)
        ends.set()
        world.pass_time(1.0)
    world.settle()
    world.check()


def test_an_owner_on_a_slow_disk_stays_that_while_a_large_write_takes_its_time(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All disks are that slow: the next owner would be no better off, and nothing would ever be acknowledged."""
    first, append, outcome = world.servers[0], Disk.append, list[Any]()

    async def appends(disk: Disk, commit: Commit) -> int:
        await asyncio.sleep(sum(len(one.block) for one in commit.entries) / 600_000)
        return await append(disk, commit)

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "append", appends)
        write = lambda client: client.bucket("default").set(b"k", bytes(7_500_000))  # noqa: E731
        world.people.order(write, [first.address], outcome.append)
        world.until(lambda: bool(outcome), 40, "written")
    assert not isinstance(outcome[0], UprError)
    assert first.active


@pytest.mark.parametrize("seconds", [0, 4])
def test_who_claims_in_vain_lets_others_claim(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    first, second, third = world.servers
    # The one whose turn is first cannot serve, and does not know that.
    one, other = sorted((second, third), key=lambda server: standing(server).directory)
    serve = Ownership._serve

    async def fails(ownership: Ownership, *how: Any) -> Promoted:
        if ownership.standing.directory == standing(one).directory:
            await asyncio.sleep(seconds)
            raise OSError(errno.ENOSPC, "full")
        return await serve(ownership, *how)

    with monkeypatch.context() as patched:
        patched.setattr(Ownership, "_serve", fails)
        first.kill()
        world.until(lambda: standing(other).row.epoch < standing(other).promised, 20, "claimed")
        assert standing(other).candidate == standing(one).directory
        world.until(lambda: other.active, 40, "active")
    first.start()
    world.settle()
    world.check()


def test_a_takeover_waits_for_an_owner_whose_disk_is_slow(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than its grants hold: without its word what it has in memory only would be undone."""
    first, second, _ = world.servers
    append = Disk.append

    async def slow(disk: Disk, commit: Commit) -> int:
        if running().host == first.host:
            await asyncio.sleep(5.0)
        return await append(disk, commit)

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "append", slow)
        world.pass_time(6.0)
        world.order(second, takeover=True)
        world.until(lambda: not world.people.operating, 40, "answered")
    assert world.outcome == ""
    assert second.active
    assert second.bucket is not None
    # Nothing was missing, so there is no record.
    logs = second.bucket.bucket.partitions.logs
    assert {len(logs[p].to_pairs()) for p in USED} == {1}
    world.settle()
    world.check()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), DataDamagedError("a block is damaged")]
)
def test_who_serves_by_the_map_and_cannot_lets_others_claim(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It would claim again at once, and each claim says for a moment that it serves."""
    first, second, third = world.servers
    one, other = sorted((second, third), key=lambda server: standing(server).directory)
    activate, tried = BucketService.activate, list[float]()

    async def fails(host: BucketService, *how: Any) -> None:
        if running().host == one.host:
            tried.append(world.elapsed)
            raise error
        await activate(host, *how)

    with monkeypatch.context() as patched:
        patched.setattr(BucketService, "activate", fails)
        first.kill()
        world.until(lambda: other.active, 30, "active")
    assert len(tried) < 5
    first.start()
    world.settle()
    world.check()
    assert one.ownership is not None
    assert not one.ownership.inventory.cannot_serve


@pytest.mark.long
def test_a_change_that_etcd_makes_later_is_not_taken_for_none(world: ClusterWorld) -> None:
    """The owner does not hear whether a server is counted no more, and that one alone would grant it to go on."""
    first, second, third = world.servers
    for writer in world.people.writers:
        # So that the third one has all that there is, and may be counted alone.
        writer.stopping = True
    world.pass_time(3.0)
    world.cut_off(first, second)
    asked = world.etcd.swaps
    world.etcd.late = 6.0
    world.until(lambda: world.etcd.swaps > asked, 20, "asked")
    world.net.heal()
    world.cut_off(first, third)
    # From the second one, which may be counted no more, it hears again.
    world.pass_time(3.2)
    assert active(world) == []
    world.etcd.heal()
    world.net.heal()
    world.settle()
    world.check()


def buckets(server: ServerProcess) -> dict[int, str]:
    """Return the names of a server's buckets but the one that is written to, by version."""
    assert server.server is not None
    return {v: name for v, name in server.server._catalog.versions.items() if name != "default"}


def ordered(world: ClusterWorld, *, drops: bool = False) -> None:
    """Have a bucket created or dropped, and wait for the answer."""
    world.order_bucket("some", drops=drops)
    world.until(lambda: not world.ordering, 20, "answered", step=0.05)


@pytest.mark.long
def test_a_bucket_is_there_once_it_is_created_and_gone_once_it_is_dropped(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever owns: what the last owner alone did is done by the next one before it serves."""
    caplog.set_level(logging.INFO, "upr.cluster.keeper")

    def lost(owner: ServerProcess) -> ServerProcess:
        """Lose an owner, and return who follows it, in the moment in which it does."""
        owner.kill()
        others = [s for s in world.servers if s is not owner and s.loop is not None]
        world.until(lambda: any(s.active for s in others), 20, "replaced", step=0.01)
        return next(s for s in others if s.active)

    first = world.servers[0]
    epoch = standing(first).row.epoch
    world.cut_off(first)
    with monkeypatch.context() as patch:
        # An owner that lives for longer sets the map right.
        patch.setattr(keeper, "MATCH_SECONDS", 1e9)
        ordered(world)
        assert len(world.created) == 1
        second = lost(first)
    assert buckets(second) == world.created
    # Not both claimed when the owner's key was gone.
    assert [one.message for one in caplog.records].count("this server claims") == 1
    assert standing(second).row.epoch == epoch + 1
    world.pass_time(2.0)
    assert second.active
    assert second.server is not None
    assert all((h.bucket.partitions.state == ACTIVE).all() for h in second.server._catalog.hosts)
    world.net.heal()
    third = 3 - second.number
    world.until(lambda: counted(world, second.number) == {third}, 40, "counted")
    # Etcd does it when the answer is lost already.
    world.etcd.late = 2.0
    ordered(world, drops=True)
    assert not world.dropped
    assert world.counts["drops: UNKNOWN_OUTCOME"] == 1
    world.etcd.late = 0.0
    world.until(lambda: not buckets(second), 20, "dropped")
    ordered(world)
    assert len(world.created) == 1, world.counts
    first.start()
    # It has one of that name that was dropped.
    world.until(lambda: counted(world, second.number) == {0, third}, 40, "counted")
    world.until(lambda: world.in_step(second), 30, "in step")
    assert buckets(first) == world.created
    world.cut_off(second)
    ordered(world, drops=True)
    assert len(world.dropped) == 1
    assert buckets(lost(second)) == {}
    world.net.heal()
    second.start()
    world.settle()
    world.check()


def test_who_missed_that_a_bucket_was_made_anew_keeps_nobody_from_being_the_owner(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the old one and the new one, which have one name, a server can have but one."""
    first, *others = world.servers
    # Whose turn is first has seen no drop, and only the map tells it.
    behind, ahead = sorted(others, key=lambda server: standing(server).directory)
    ordered(world)
    world.until(lambda: buckets(ahead) == buckets(behind) == world.created, 20, "there")
    for server in (ahead, behind):
        world.until(lambda server=server: server.ownership.in_step, 20, "in step")  # type: ignore[misc]
    outcome: list[int | UprError] = []

    async def write(client: AsyncClient) -> int:
        return (await client.bucket("some").set(b"k", b"v")).seqno

    def has_the_row(server: ServerProcess) -> bool:
        assert server.server is not None
        markers = server.server._catalog.find("some").bucket.markers.seqno
        return bool(markers.any())

    world.people.order(write, [first.address], outcome.append)
    world.until(lambda: has_the_row(ahead) and has_the_row(behind), 20, "written")
    match = Replication._match

    async def late(replication: Replication, answer: ListBucketsResponse) -> None:
        if running().host != behind.host:
            await match(replication, answer)

    with monkeypatch.context() as patched:
        patched.setattr(Replication, "_match", late)
        ordered(world, drops=True)
        ordered(world)
        world.until(lambda: buckets(ahead) == world.created, 20, "made anew")
        world.people.order(write, [first.address], outcome.append)
        world.until(lambda: has_the_row(ahead), 20, "written")
        assert outcome == [1, 1]
        first.kill()
    assert buckets(behind).keys() == world.dropped
    world.until(lambda: behind.active, 15, "replaced")
    assert has_the_row(behind)
    first.start()
    world.settle()
    world.check()


@pytest.mark.long
def test_an_owner_is_followed_while_nobody_has_joined_its_newest_bucket(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replicas have received nothing of it, and all of the others."""
    first, *others = world.servers
    tell = TableFeed._tell

    async def held_up(feed: TableFeed, tables: Tables) -> None:
        if running() is first.loop and feed._host.bucket.identity.name == "new":
            await asyncio.Event().wait()
        await tell(feed, tables)

    def joins(server: ServerProcess) -> bool:
        hosts = [] if server.server is None else server.server._catalog.hosts
        upstream_states = [host.upstream_state for host in hosts if len(hosts) == 2]
        return any(one is not None and one.joining is not False for one in upstream_states)

    with monkeypatch.context() as patch:
        patch.setattr(TableFeed, "_tell", held_up)
        world.order_bucket("new", drops=False)
        world.until(lambda: all(map(joins, others)), 10, "joining")
        first.kill()
    world.until(lambda: any(s.active for s in others), 20, "replaced")
    world.until(lambda: not world.ordering, 40, "answered")
    first.start()
    world.settle()
    world.check()


@pytest.mark.long
def test_an_old_copy_of_the_map_takes_nothing_from_its_owner(world: ClusterWorld) -> None:
    def known() -> Map:
        (data,) = world.etcd.values("/map")
        return Map.decode(data)

    first, second, third = world.servers
    ordered(world)
    old = known()
    ordered(world, drops=True)
    ordered(world)
    world.etcd.put_back(old.encode())
    assert first.server is not None
    methods = first.server._sets
    assert isinstance(methods, ReplicaMethods)
    assert isinstance(methods._cluster, keeper.Keeper)
    # As after a restart: it has heard of no drop.
    methods._cluster.buckets._dropped = ()
    catalog = first.server._catalog
    world.until(
        lambda: {b.version: b.name for b in known().buckets} == catalog.versions, 20, "set right"
    )
    assert buckets(first) == world.created
    # One that was dropped while the row stayed as it is.
    old = known()
    ordered(world, drops=True)
    world.etcd.put_back(old.encode())
    world.until(lambda: not known().buckets[1:], 10, "set right")
    assert known().row == old.row
    assert buckets(first) == {}
    ordered(world)
    # An older row besides, with more that are counted, and a bucket that was dropped.
    old = known()
    world.cut_off(first, third)
    world.until(lambda: counted(world) == {1}, 30, "counted no more")
    ordered(world, drops=True)
    world.etcd.put_back(old.encode())
    world.until(lambda: known().row == standing(first).row, 10, "set right")
    assert not world.dropped & {b.version for b in known().buckets}
    # Nobody claims by it, but who owned.
    first.kill()
    world.etcd.put_back(old.encode())
    world.until(lambda: "it is an old copy" in second.waiting, 20, "told")
    world.net.heal()
    first.start()
    world.settle()
    # Nobody was active who knew that it was dropped.
    world.dropped.clear()
    world.check()


@pytest.mark.long
def test_by_an_old_copy_with_the_newest_row_that_it_knows_one_follows_and_the_others_undo(
    world: ClusterWorld,
) -> None:
    """Nobody is there who knows better: neither the owner, nor any server that was counted since."""
    first, second, third = world.servers
    world.cut_off(first, third)
    world.until(lambda: counted(world) == {1}, 30, "counted alone")
    world.pass_time(1.0)
    old = world.etcd.values("/map")[0]
    world.net.heal()
    world.cut_off(second)
    world.etcd.cut.add(second.host)
    world.until(lambda: counted(world) == {2}, 60, "counted instead")
    world.pass_time(1.0)
    first.kill()
    third.kill()
    world.etcd.put_back(old)
    world.net.heal()
    world.etcd.cut.clear()
    told: list[str] = []

    def until(is_so: Callable[[], bool], words: str) -> None:
        """Wait for something while followers say, each once, that they were rolled back."""
        while not is_so():
            try:
                world.until(is_so, 60, words)
            except Violation as violation:
                told.append(str(violation))
                if "was rolled back" not in told[-1]:
                    raise

    until(lambda: second.active, "active by it")
    first.start()
    third.start()
    # What they acknowledged since is undone, and kept.
    until(lambda: bool(world._undone(first)) and told != [], "undone")


def test_a_first_server_that_is_killed_behind_the_map_makes_what_that_has(tmp_path: Path) -> None:
    with worlds.prepared(0):
        world = ClusterWorld(tmp_path / "world", 5, servers=2)
        first = world.servers[0]
        with world.living():
            first.start()
            first.dies_at = "bucket."
            world.make_first(first)
            world.until(lambda: first.died, 10, "dead")
            world.no_more_deaths()
            world.until(lambda: first.bucket is not None and first.waiting == "", 30, "made")


@pytest.mark.long
def test_a_bucket_that_cannot_be_made_is_told_as_that(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = world.servers[0].server
    assert server is not None
    assert server._sets is not None

    def full(*_: object) -> None:
        raise NoRoomError("no room", hint="free some")

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "_create_now", full)
        ordered(world)
        assert world.counts["creations: UNKNOWN_OUTCOME"] == 1
        world.until(lambda: server._process.problems() != [], 10, "told")
        (problem,) = server._process.problems()
        assert (problem.reason, problem.hint) == ("NO_ROOM", "free some")
        assert "bucket 'some' cannot be made: no room" in problem.message
        # It takes its part, and serves.
        assert [kind for kind, error in server._sets.troubles.items() if error] == ["buckets"]
        assert world.servers[0].waiting == ""
    world.until(lambda: server._process.problems() == [], 10, "made")
    assert list(buckets(world.servers[0]).values()) == ["some"]


def test_no_order_claims_the_map_of_another_set(world: ClusterWorld) -> None:
    second = world.servers[1]
    (data,) = world.etcd.values("/map")
    other = replace(Map.decode(data), replica_set="0" * 16)
    world.etcd.put_back(other.encode())
    assert world.promoted(second, force=True) == "WRONG_REPLICA_SET"
    world.order(second, takeover=True)
    world.until(lambda: not world.people.operating, 40, "answered")
    assert world.outcome == "WRONG_REPLICA_SET"
    world.order_bucket("some", drops=False)
    world.pass_time(3.0)
    assert not world.created
    assert world.etcd.values("/map") == [other.encode()]
    assert active(world) == [0]


def test_an_owner_that_is_given_the_cluster_of_another_set_takes_nothing_there(
    world: ClusterWorld,
) -> None:
    """Its own row is the newer one, as in an old copy of its map. The others there must not tell clients of it."""
    first = world.servers[0]
    directory = standing(first).directory
    first.kill()
    (data,) = world.etcd.values("/map")
    other = replace(Map.decode(data), replica_set="0" * 16, row=first_row("f" * 16))
    world.etcd.put_back(other.encode())
    first.start()
    world.until(lambda: "is the set of servers 0000000000000000" in first.waiting, 20, "told")
    world.pass_time(6.0)
    assert world.etcd.values("/map") == [other.encode()]
    assert active(world) == []
    assert world.etcd.values(directory) == []


@pytest.mark.long
def test_what_only_an_emptied_server_had_is_given_up_by_force(world: ClusterWorld) -> None:
    """It waits for an owner, to join its set, and the others know its address as that of the one that is gone."""
    first, second, _ = world.servers
    world.cut_off(first)
    world.until(lambda: counted(world) == {0}, 30, "the only one that is counted")
    first.lose_disk(())
    world.net.heal()
    first.start()
    world.pass_time(10.0)
    assert active(world) == []
    directory = standing(second).row.owner
    assert f"{first.address} (directory {directory})" in second.waiting
    assert "'upr-admin promote --force'" in second.waiting
    assert world.promoted(second) == "NOT_COUNTED"
    assert world.promoted(second, force=True) == ""
    world.until(lambda: world.in_step(second), 30, "followed")
    assert [server.waiting for server in world.servers] == ["", "", ""]


@pytest.mark.long
def test_a_drained_server_follows_no_owner_and_a_lost_map_is_made_by_who_serves(
    world: ClusterWorld,
) -> None:
    def drained(server: ServerProcess, *, undo: bool = False) -> str:
        """Drain a server, and return the reason of a refusal or who is to take over."""
        outcome: list[int | UprError] = []
        ports = {int(s.address.rpartition(":")[2]): s.host for s in world.servers}

        async def do(client: AsyncClient) -> int:
            return int((await client.admin.drain(undo=undo)).rpartition(":")[2] or 0)

        world.people.order(do, [server.address], outcome.append)
        world.until(lambda: bool(outcome), 30, "answered")
        (answer,) = outcome
        return answer.reason if isinstance(answer, UprError) else ports.get(answer, "")

    first, second, third = world.servers
    assert drained(second) == ""
    # The others hear of it when they meet it next.
    world.pass_time(1.0)
    assert drained(first) == third.host
    world.order(third, takeover=True)
    world.until(lambda: third.active and counted(world, by=2) == {0, 1}, 40, "taken over")
    # All others are drained.
    assert drained(third) == "NO_SUCCESSOR"
    assert world.promoted(first) == "DRAINED"
    epoch = standing(third).row.epoch
    # What etcd had is gone. One that is new makes no map, which would keep the others out.
    world.cut_off(third)
    world.etcd.cut |= {third.host}
    world.etcd.lose()
    first.lose_disk(())
    first.start()
    world.pass_time(8.0)
    assert world.etcd.values("/map") == []
    world.net.heal()
    world.etcd.cut.clear()
    # Without the directory that is gone.
    world.until(lambda: len(standing(third).row.counted) == 2, 60, "counted no more")
    world.until(lambda: counted(world, by=2) == {0, 1}, 40, "counted again")
    assert standing(third).row.epoch == epoch
    third.kill()
    # The second one is still drained; the first one, restarted, is not.
    world.until(lambda: first.active, 20, "replaced")
    first.kill()
    world.until(lambda: "'upr-admin drain --undo'" in second.waiting, 20, "told")
    assert not second.active
    assert drained(second, undo=True) == ""
    third.start()
    first.start()
    world.settle()
    world.check()


def test_what_keeps_a_server_from_claiming_is_told_for_as_long_as_it_lasts(
    world: ClusterWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "upr.cluster.keeper")
    first, second, third = world.servers
    first.kill()
    second.kill()
    world.until(lambda: third.waiting != "", 20, "told")
    for _ in range(40):
        assert second.address in third.waiting
        assert "'upr-admin promote --force'" in third.waiting
        world.pass_time()
    assert third.server is not None
    (problem,) = third.server._process.problems()
    assert (problem.reason, "promote --force" in problem.hint) == ("NOT_HEARD", True)
    second.start()
    world.until(lambda: second.active or third.active, 20, "replaced")
    world.pass_time(1.0)
    assert third.waiting == ""
    told = [
        one for one in caplog.records if getattr(one, "part", "") == "taking part in the cluster"
    ]
    assert [one.levelname for one in told] == ["WARNING", "INFO"]


def test_who_loses_a_race_of_claims_has_no_trouble(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "upr.cluster.keeper")
    first, second, third = world.servers
    monkeypatch.setattr(keeper, "TURN_SECONDS", 0.0)
    first.kill()
    world.until(lambda: second.active or third.active, 20, "replaced")
    said = [one.message for one in caplog.records if one.name == "upr.cluster.keeper"]
    assert said.count("this server claims") == 2
    assert said.count("another server claimed first") == 1
    assert "part of the cluster fails" not in said


def test_who_claimed_in_vain_is_not_said_to_be_gone(
    world: ClusterWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    second = world.servers[1]

    async def fails(*_: object) -> None:
        raise UnavailableError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "_drive", fails)
        assert world.promoted(second) == "UNAVAILABLE"
    # Or the one before, that takes it back.
    world.until(lambda: active(world) != [], 20, "active")
    claims = [one for one in caplog.records if one.message == "this server claims"]
    assert {one.back for one in claims} == {True}  # type: ignore[attr-defined]


def test_the_trouble_with_a_session_ends_when_the_key_is_there_again(
    world: ClusterWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "upr.cluster.keeper")
    _, second, _ = world.servers

    def told() -> list[str]:
        session = "the session with etcd"
        return [one.levelname for one in caplog.records if getattr(one, "part", "") == session]

    # For longer than the lease.
    world.etcd.cut.add(second.host)
    world.until(lambda: told() == ["WARNING"], 20, "told")
    world.etcd.heal()
    world.until(lambda: told() == ["WARNING", "INFO"], 20, "told that it goes on")
    assert second.server is not None
    world.until(lambda: second.server._process.problems() == [], 20, "without a problem")  # type: ignore[union-attr]


def test_a_server_that_was_restarted_without_the_cluster_counts_no_more(
    world: ClusterWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in step, and grants nothing: counted, it would be counted no more a moment later, again and again."""
    first, second, _ = world.servers
    second.kill()
    second.registry, second.upstreams = None, (first.address,)
    second.start()
    world.until(lambda: second.ownership is not None, 20, "started")
    world.until(lambda: counted(world) == {2}, 20, "counted no more")
    asked = world.etcd.swaps
    world.pass_time(10.0)
    assert second.ownership is not None
    assert second.ownership.in_step
    assert (counted(world), world.etcd.swaps) == ({2}, asked)
    told = [one for one in caplog.records if getattr(one, "call", "") == "Grant"]
    assert ["--cluster is not given" in one.error for one in told] == [True]  # type: ignore[attr-defined]
    second.kill()
    second.registry, second.upstreams = world.etcd, ()
    second.start()
    world.until(lambda: counted(world) == {1, 2}, 20, "counted again")


def test_a_key_that_was_deleted_is_set_again(
    world: ClusterWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for an owner that seems to be dead: any pause of it would end its epoch."""
    first = world.servers[0]
    directory = standing(first).directory
    for _ in range(2):
        world.until(lambda: world.etcd.values(directory) != [], 20, "there")
        caplog.clear()
        world.etcd.delete(directory)
        world.until(lambda: world.etcd.values(directory) != [], 3, "there again")
        world.pass_time(8.0)
        assert world.etcd.values(directory) != []
        told = [one for one in caplog.records if "was deleted in etcd" in one.message]
        assert len(told) == 1
    assert active(world) == [0]


def test_a_new_server_says_that_a_cluster_is_given_up_and_stores_nothing_of_it(
    world: ClusterWorld,
) -> None:
    first = world.servers[0]
    world.people.writers.clear()
    for server in world.servers:
        server.lose_disk(())
    world.etcd.delete("nodes/")
    first.start()
    world.until(lambda: "no counted server of the cluster" in first.waiting, 20, "told")
    assert "delete the keys in etcd that begin with /upr/simulated/" in first.waiting
    assert world.promoted(first, force=True) == "NOT_HEARD"
    assert standing(first).row.epoch == 0
    world.etcd.lose()
    # As a new one under another name, too, of which the epochs begin anew.
    world._newest = 0, ""
    world.until(lambda: "no map" in first.waiting, 20, "told that there is none")
    assert world.promoted(first) == ""
    assert active(world) == [0]


def test_an_old_copy_of_the_map_that_names_a_server_that_is_there_is_told(
    world: ClusterWorld,
) -> None:
    """Nobody claims by it, and its owner is not active: only who was active last sets it right."""
    first, second, third = world.servers
    (old,) = world.etcd.values("/map")
    world.order(second, takeover=True)
    world.until(lambda: second.active and counted(world, by=1) == {0, 2}, 30, "taken over")
    row = standing(second).row
    world.until(lambda: standing(first).row == standing(third).row == row, 20, "known")
    second.kill()
    world.etcd.put_back(old)
    for server in (first, third):
        world.until(lambda s=server: "it is an old copy" in s.waiting, 20, "told")  # type: ignore[misc]
    world.pass_time(5.0)
    assert "it is an old copy" in first.waiting
    assert active(world) == []
    second.start()
    world.settle()
    world.check()
    assert first.waiting == ""
