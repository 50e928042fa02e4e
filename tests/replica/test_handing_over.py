"""What a change of owner carries over, and where it ends when a server does not do its part: servers in one process."""

import asyncio
import errno
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.replica.members import Start, leave_alone, never, start_set
from tests.service.keys import some_keys
from upr.engine.partitions import ACTIVE
from upr.replica import following, ownership, replication
from upr.replica.inventory import Inventory, Promoted, told_once
from upr.replica.ownership import Ownership
from upr.replica.replica_service import ReplicaMethods
from upr.replica.replication import Replication
from upr.replica.upstream_tables import take_tables
from upr.service.buckets import catalog
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.conversation import REPLICAS_NAME
from upr.service.replica_tables import TableFeed, cut_message
from upr.storage.directory import Stored, read_standing
from upr.storage.keyspace import ConsumerRow
from upr_client import AsyncClient
from upr_protocol.errors import StorageFailedError, TooFewReplicasError, UprError
from upr_protocol.ownership import Held, Row
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


@pytest.mark.asyncio
async def test_what_was_saved_and_cut_until_the_old_owner_stepped_down_is_at_the_new_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    named: list[str] = []
    matched, tell, may_tell = Replication.matched, TableFeed._tell, asyncio.Event()

    async def held_up(feed: TableFeed, tables: wire.Tables) -> None:
        await may_tell.wait()
        await tell(feed, tables)

    async def late(self: Replication) -> None:
        # The tables come well behind the list of buckets.
        await matched(self)
        asyncio.get_running_loop().call_later(0.2, may_tell.set)

    monkeypatch.setattr(TableFeed, "_tell", held_up)
    monkeypatch.setattr(Replication, "matched", late)

    async def change() -> None:
        # A client with a token goes to no other server.
        async with AsyncClient(old.target, token="t", retry_seconds=0) as client:
            while True:
                name = str(len(named))
                await client.admin.reset_consumer(
                    "default", name, "now", partitions=[3], create=True
                )
                await client.admin.create_cut("default", name, partitions=[3])
                if named:
                    await client.admin.release_cut("default", named[-1])
                named.append(name)

    changing = asyncio.create_task(change())
    await until(lambda: len(named) > 5)
    await new.ownership.promote(takeover=True)
    with pytest.raises(UprError) as refused:
        await changing
    assert (refused.value.reason, refused.value.retriable) == ("PARTITION_NOT_ACTIVE", True)
    bucket = new.host.bucket
    assert {name for name, _ in bucket.consumer_positions} >= set(named)
    # The next one may have been made, and its answer too late.
    assert named[-1] in {cut.name for cut in bucket.cuts.named}
    assert len(bucket.cuts.named) <= 2


@pytest.mark.long
@pytest.mark.asyncio
async def test_buckets_are_carried_over_as_the_old_owner_has_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    async with AsyncClient(old.target) as client:
        await client.admin.create_bucket("to go")
        await until(lambda: new.names == ["default", "to go"] and new.ownership.in_step)
        # Nobody looks at the list until somebody takes over.
        monkeypatch.setattr(replication, "LIST_SECONDS", 1000.0)
        await until(lambda: new.ownership.following.replication is not None)
        replicating = new.ownership.following.replication
        assert replicating is not None
        await replicating.matched()
        await client.admin.drop_bucket("to go")
        await client.admin.create_bucket("new", quota_bytes=10**6)
        await client.bucket("new").set(b"k", b"v")
    ids = old.catalog.find("new").bucket.partitions.newest_id.tolist()
    done = await new.ownership.promote(takeover=True)
    assert done.records == 0
    assert new.names == ["default", "new"]
    host = new.catalog.find("new")
    assert host.bucket.partitions.newest_id.tolist() == ids
    assert host.disk.quota.limit == 10**6
    async with AsyncClient(new.target) as client:
        assert await client.bucket("new").get(b"k") == b"v"


@pytest.mark.asyncio
async def test_a_quota_that_was_begun_before_a_takeover_is_at_the_new_owner(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    disk, go_on = old.host.disk, threading.Event()
    store, waiting = disk.store, disk._store_thread._work
    put_quota, began = store.put_quota, threading.Event()

    def held_up(limit: int) -> None:
        began.set()
        assert go_on.wait(WAIT_SECONDS)
        put_quota(limit)

    monkeypatch.setattr(store, "put_quota", held_up)
    async with AsyncClient(old.target) as client:
        setting = asyncio.create_task(client.admin.set_bucket_quota("default", 10**6))
        await until(began.is_set)
        taking_over = asyncio.create_task(new.ownership.promote(takeover=True))
        # What the old owner stores when it steps down waits behind the quota.
        await until(lambda: taking_over.done() or not (old.ownership.active or waiting.empty()))
        go_on.set()
        await asyncio.gather(setting, taking_over)
    assert new.host.disk.quota.limit == 10**6


@pytest.mark.asyncio
async def test_one_that_followed_another_does_not_serve_as_if_it_had_not(start: Start) -> None:
    """Nobody tells them who is counted: what it has on its disk is all that it knows."""
    first = await start()
    copy = await start(first, anonymous=True)
    folder = first.catalog._directory.path
    await until(lambda: copy.ownership.in_step)
    assert first.ownership.inventory.served() == 1
    await first.stop()
    await copy.ownership.promote(force=True)
    back = await start(copy, data=folder, anonymous=True)
    await until(lambda: back.ownership.in_step)
    assert back.ownership.inventory.served() == 0
    await back.stop()
    again = await start(data=folder)
    await until(lambda: bool(again.ownership.active or again.ownership.waiting))
    assert not again.ownership.active
    assert "nobody knows whether something is missing" in again.ownership.waiting


@pytest.mark.asyncio
@pytest.mark.parametrize("counted", [True, False])
async def test_the_first_owner_follows_nobody_before_another_one_is_promoted(
    start: Start, counted: bool
) -> None:
    old, new = await start_set(start)
    row = old.ownership.standing.row
    if not counted:
        # It knows of nobody who could be promoted without it.
        await leave_alone(new)
        row = replace(row, revision=9, counted=frozenset({row.owner}))
        await old.ownership.store(lambda standing: standing.learned(row))
    await old.stop()
    back = await start(new, data=old.catalog._directory.path)
    await until(lambda: "is told to follow" in back.ownership.waiting)
    assert not back.ownership.active
    assert back.ownership.standing.row.counted == row.counted
    new.ownership._paused = False
    await until(lambda: new.ownership.peers.addresses[row.owner] == back.target)
    done = await new.ownership.promote(takeover=counted, force=not counted)
    assert done.records == 0
    await until(lambda: back.ownership.standing.row.owner == new.ownership.standing.directory)
    await until(lambda: back.ownership.in_step)


@pytest.mark.asyncio
async def test_a_set_whose_servers_all_have_other_addresses_is_whole_again(start: Start) -> None:
    old, replica = await start_set(start)
    await replica.stop()
    await old.stop()
    moved = await start(data=old.catalog._directory.path)
    again = await start(moved, data=replica.catalog._directory.path)
    assert not {moved.target, again.target} & {old.target, replica.target}
    await until(lambda: moved.ownership.active)
    await until(lambda: again.ownership.in_step)
    assert again.ownership.owner_address() == moved.target


@pytest.mark.asyncio
async def test_one_that_was_alone_and_told_to_follow_by_mistake_is_active_again_without_that(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, alone = await start(), await start()
    folder = alone.catalog._directory.path
    async with AsyncClient(alone.target) as client:
        token = await client.bucket().set(b"k", b"v")
    await alone.stop()
    replica = await start(other, data=folder)
    assert not replica.ownership.active
    await replica.stop()
    with monkeypatch.context() as patch:
        patch.setattr(Inventory, "served", lambda _: 0)
        unsure = await start(data=folder)
        await until(lambda: "are a replica's" in unsure.ownership.waiting)
        await unsure.stop()
    again = await start(data=folder)
    await until(lambda: again.ownership.active)
    async with AsyncClient(again.target) as client:
        later = await client.bucket().set(b"k", b"w")
    # No record.
    assert (later.failover_id, later.seqno) == (token.failover_id, token.seqno + 1)


@pytest.mark.asyncio
async def test_an_owner_that_gave_way_in_vain_becomes_active_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    with monkeypatch.context() as patched:
        patched.setattr(old.ownership.inventory, "served", lambda: 0)
        with pytest.raises(UprError) as refused:
            await new.ownership.promote(takeover=True)
    assert refused.value.reason == "NOT_CONFIRMED"
    assert f"{old.target}, if it runs, becomes active again by itself" in refused.value.hint
    await until(lambda: old.ownership.active)
    await until(lambda: new.ownership.standing.row.epoch == 3)
    assert not new.ownership.active
    async with AsyncClient(new.target) as client:
        await client.bucket("default").set(b"k", b"v")


@pytest.mark.asyncio
async def test_what_a_counted_server_does_not_give_is_named_and_given_up_by_force_only(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, third = await start_set(start, replicas=2)
    monkeypatch.setattr(following, "GATHER_SECONDS", 0.3)
    held = third.ownership.inventory.now

    def more(**as_copy: bool) -> dict[int, Held]:
        """What it holds, and rows that it cannot send."""
        told = held(**as_copy)
        for columns in told.values():
            columns["marker"][7] = columns["high"][7] = 50
            columns["epoch"][7] = 1
        return told

    monkeypatch.setattr(third.ownership.inventory, "now", more)
    # The former owner does not confirm, so each of the others counts.
    monkeypatch.setattr(old.ownership.inventory, "served", lambda: 0)
    with pytest.raises(UprError) as refused:
        await new.ownership.promote()
    assert refused.value.reason == "NOT_HEARD"
    assert f"{third.target} has more than is here" in refused.value.message
    assert "bucket 'default' partition 7:" in refused.value.message
    done = await new.ownership.promote(force=True)
    assert new.ownership.active
    assert done.lost == [("default", 7, 0, 50)]


@pytest.mark.asyncio
async def test_one_that_gives_data_takes_no_consumer_and_no_cut_away(start: Start) -> None:
    old, new, third = await start_set(start, replicas=2)
    async with AsyncClient(old.target) as client:
        await client.admin.reset_consumer("default", "both", "now", partitions=[3], create=True)
        await client.admin.create_cut("default", "both", partitions=[3])
        host, other = new.host, third.host

        def has(of: BucketService, name: str) -> bool:
            named = {cut.name for cut in of.bucket.cuts.named}
            return name in named & {one for one, _ in of.bucket.consumer_positions}

        await until(lambda: has(host, "both") and has(other, "both"))
        await leave_alone(new)
        # These come to the one.
        await client.bucket("default").set(b"k", b"v")
        await client.admin.reset_consumer("default", "theirs", "now", partitions=[3], create=True)
        await client.admin.create_cut("default", "theirs", partitions=[3])
        await until(lambda: has(other, "theirs"))
        highs = old.host.bucket.partitions.high
        await until(lambda: bool((other.bucket.markers.seqno == highs).all()))
    await leave_alone(third)
    # These only to the other: the owner dies before it has told them to both.
    (told,) = (await rows_of(host, "both")).values()
    row = wire.ConsumerRow(consumer="both", partition=3, generation=told.generation + 1, time=1)
    alone = wire.ConsumerRow(consumer="ours", partition=4, generation=1, time=1)
    await take_tables(host, wire.Tables(consumers=[row, alone]))
    kept = [cut_message(cut, with_partitions=True) for cut in host.bucket.cuts.named]
    ours = wire.Cut(name="ours", created_time=1, expires_time=1 << 60, lease_seconds=1)
    await take_tables(host, wire.Tables(cuts=wire.Cuts(cuts=[*kept, ours])))
    await old.stop()
    new.ownership._paused = third.ownership._paused = False
    await new.ownership.promote()
    host = new.host
    assert host.bucket.partitions.high.tolist() == highs.tolist()
    names = {name for name, _ in host.bucket.consumer_positions}
    assert names >= {"both", "ours", "theirs"}
    (stored,) = (await rows_of(host, "both")).values()
    assert stored.generation == told.generation + 1
    assert {cut.name for cut in host.bucket.cuts.named} == {"both", "ours", "theirs"}


@pytest.mark.asyncio
async def test_rows_that_came_without_the_numbers_of_their_producers_are_no_copy(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, third = await start_set(start, replicas=2)
    await leave_alone(new)
    # As it is before the promotion: what it takes too much may be undone again, and the bucket opened anew.
    here, partition = new.host.bucket, partition_of(b"k")
    async with AsyncClient(old.target) as client:
        await client.bucket("default").set(b"k", b"1")
        await until(lambda: third.seqno(partition) == 1 and third.upstream_state.joining is False)
        await leave_alone(third)
        await client.bucket("default").set(b"k", b"2")
    # The owner dies before it has told the third what belongs to the second row.
    monkeypatch.setattr(TableFeed, "_tell", never)
    third.ownership._paused = False
    await until(lambda: third.seqno(partition) == 2)
    await leave_alone(third)
    monkeypatch.undo()
    await old.stop()
    new.ownership._paused = third.ownership._paused = False
    await new.ownership.promote()
    assert here.markers.seqno[partition] == new.seqno(partition) == 1
    async with AsyncClient(new.target) as client:
        assert await client.bucket("default").get(b"k") == b"1"
    await until(lambda: third.ownership.in_step)
    assert third.seqno(partition) == 1


async def rows_of(host: BucketService, name: str) -> dict[int, ConsumerRow]:
    rows = await host.disk.in_reader(lambda: host.disk.store.consumer_rows(name.encode(), [3]))
    return {partition: row for partition, row in rows.items() if row is not None}


@pytest.mark.asyncio
async def test_when_one_bucket_does_not_become_active_none_takes_writes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    async with AsyncClient(old.target) as client:
        await client.admin.create_bucket("second")
        await until(lambda: new.names == ["default", "second"] and new.ownership.in_step)
    activate, asked = BucketService.activate, []

    async def fails(host: BucketService, epoch: int, records: dict[int, int]) -> None:
        asked.append(host)
        if len(asked) % 2 == 0:
            raise OSError(errno.ENOSPC, "no room")
        await activate(host, epoch, records)

    with monkeypatch.context() as patched:
        patched.setattr(BucketService, "activate", fails)
        with pytest.raises(StorageFailedError):
            await new.ownership.promote(takeover=True)
        states = [host.bucket.partitions.state for host in new.catalog.hosts]
        assert len(asked) == len(states) == 2
        assert not any((state == ACTIVE).any() for state in states)
    await until(lambda: new.ownership.active)


@pytest.mark.asyncio
async def test_a_replica_that_can_join_nobody_says_so(start: Start) -> None:
    first = await start()
    await first.stop()
    replica = await start(first)
    sets = replica.server._sets
    assert isinstance(sets, ReplicaMethods)
    await until(lambda: first.target in sets.waiting)
    assert [one.reason for one in replica.server._process.problems()] == ["UNAVAILABLE"]


@pytest.mark.asyncio
@pytest.mark.parametrize("why", ["full", "dead"])
async def test_a_healthy_owner_does_not_give_way_to_one_that_could_not_serve_all(
    start: Start, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    old, new = await start_set(start)
    if why == "full":
        monkeypatch.setattr(new.host.disk.room, "left", lambda: -1)
    else:
        new.host.bucket.partitions.kill(7, StorageFailedError("broken"))
    before = old.ownership.standing
    with pytest.raises(UprError) as refused:
        await new.ownership.promote(takeover=True)
    assert refused.value.reason == {"full": "NO_ROOM", "dead": "DATA_DAMAGED"}[why]
    assert "'upr-admin topology'" in refused.value.hint
    assert (old.ownership.active, old.ownership.standing) == (True, before)
    # Nor is it named to one that is drained, and it reads on.
    await until(lambda: not old.ownership.peers.met[new.ownership.standing.directory].in_step)
    async with AsyncClient(old.target) as client:
        with pytest.raises(UprError) as refused:
            await client.admin.drain()
    assert refused.value.reason == "NO_SUCCESSOR"
    assert new.server._sets is not None
    assert new.server._sets.serves
    # Without an owner it is better than nobody.
    await old.stop()
    await new.ownership.promote()
    assert new.ownership.active


@pytest.mark.asyncio
async def test_an_owner_that_met_a_claim_that_went_no_further_becomes_active_again(
    start: Start,
) -> None:
    old, new = await start_set(start)
    # It promised to itself, and was stopped before it asked anybody.
    await new.ownership.store(lambda standing: standing.promise(2, standing.directory))
    await until(lambda: old.ownership.active and old.ownership.standing.row.epoch == 3)


@pytest.mark.asyncio
async def test_an_owner_takes_nothing_back_from_one_that_cannot_be_asked(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    monkeypatch.setattr(ownership, "RESUME_SECONDS", 0.0)
    await leave_alone(old)
    row = old.ownership.standing.row
    # It may serve by force, and have acknowledged writes.
    await old.ownership.promise(4, "f" * 16, row)
    assert not old.ownership._is_left_alone(4)
    await old.ownership.promise(5, new.ownership.standing.directory, row)
    assert old.ownership._is_left_alone(5)


@pytest.mark.asyncio
async def test_one_that_gathered_in_vain_follows_registered_again(start: Start) -> None:
    old, new = await start_set(start)
    await leave_alone(new)
    host, directory = old.host, new.ownership.standing.directory
    # Its call of before ends at the owner a moment later.
    await until(lambda: not old.ownership.peers.registered(directory))
    new.ownership.following.begin((old.target,), True, old.ownership.standing.directory)
    await until(lambda: directory in {one.options.directory for one in host.bucket.followers})
    assert not old.ownership.peers.registered(directory)
    new.ownership._paused = False
    await until(lambda: old.ownership.peers.registered(directory))


@pytest.mark.asyncio
async def test_who_counts_is_stored_before_it_counts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    idle = asyncio.Event()

    async def nothing() -> None:
        idle.set()

    monkeypatch.setattr(old.ownership, "_round", nothing)
    await idle.wait()
    directory, bucket = new.ownership.standing.directory, old.host.bucket
    old.ownership.counted_replicas.known = frozenset()
    await old.ownership.store(lambda standing: standing)
    assert not old.catalog.standing.known
    await old.ownership.counted_replicas.count_copies()
    assert bucket.copies.counted == {directory}
    stored = read_standing(old.catalog._directory.path, "d", replica=False)
    assert stored.known == {directory}
    # Who steps down does not know whom the next owner counts.
    await old.ownership.step_down(fenced=True)
    await old.ownership.store(lambda standing: standing)
    assert not old.catalog.standing.known


@pytest.mark.asyncio
async def test_a_bucket_that_is_dropped_while_its_candidate_promises_ends_no_takeover(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    async with AsyncClient(old.target) as client:
        await client.admin.create_bucket("to go")
        await until(lambda: new.names == ["default", "to go"] and new.ownership.in_step)
        settle, gone = BucketService.settle_tables, new.catalog.find("to go")

        async def late(host: BucketService) -> None:
            if host is gone:
                await client.admin.drop_bucket("to go")
                await until(lambda: new.names == ["default"])
                raise host.disk.gone or AssertionError
            await settle(host)

        monkeypatch.setattr(BucketService, "settle_tables", late)
        done = await new.ownership.promote(takeover=True)
    assert (done.records, new.names, new.ownership.active) == (0, ["default"], True)


@pytest.mark.asyncio
async def test_what_is_dead_here_is_named_at_once_and_given_up_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, third = await start_set(start, replicas=2)
    await leave_alone(new)
    async with AsyncClient(old.target) as client:
        for partition in (7, 8):
            await client.bucket("default").set(some_keys(partition, 1)[0], b"v")
    await until(lambda: bool(third.seqno(7) and third.seqno(8)))
    await leave_alone(third)
    table = new.host.bucket.partitions
    table.kill(7, StorageFailedError("broken"))
    await old.stop()
    new.ownership._paused = third.ownership._paused = False
    # Nobody waits for what cannot come.
    monkeypatch.setattr(following, "GATHER_SECONDS", 1e6)
    with pytest.raises(UprError) as refused:
        async with asyncio.timeout(8):
            await new.ownership.promote()
    assert refused.value.reason == "NOT_HEARD"
    assert f"partition 7: partition 7 is dead here, at {new.target}" in refused.value.message
    done = await new.ownership.promote(force=True)
    assert done.lost == [("default", 7, 0, 1)]
    assert (table.high[7], table.high[8]) == (0, 1)


@pytest.mark.asyncio
async def test_what_is_given_up_is_told_from_where_the_branches_part(start: Start) -> None:
    alone = await start()
    bucket = alone.host.bucket
    table, version = bucket.partitions, bucket.identity.version
    first = table.logs[7].newest.failover_id
    table.set_log(7, table.logs[7].with_record(5, 20, epoch=2))
    table.high[7] = 60
    lost = [(version, 7, 50, first), (version, 7, 50, 5), (version, 7, 50, 6), (1, 7, 50, first)]
    assert alone.ownership.inventory.short_of(lost) == [
        # Above 20 it has rows of another branch, up to 60.
        ("default", 7, 20, 50),
        # Of an id that is not known here all may be another branch; a bucket may not be here.
        ("default", 7, 0, 50),
        (f"{1:016x}", 7, 0, 50),
    ]
    # One partition is told once.
    both = [("default", 7, 20, 50), ("b", 7, 1, 2), ("default", 7, 30, 60)]
    assert told_once(both) == [("b", 7, 1, 2), ("default", 7, 20, 60)]


@pytest.mark.asyncio
async def test_a_bucket_that_a_replica_cannot_make_stops_no_replicated_write_of_another(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)

    async def fails(*_: object, **__: object) -> None:
        raise StorageFailedError("no room")

    monkeypatch.setattr(new.catalog, "create", fails)
    directory = new.ownership.standing.directory
    async with AsyncClient(old.target, retry_seconds=0) as client:
        await client.bucket("default").set(b"k", b"v", durability="replicated(1)")
        await client.admin.create_bucket("second")
        await until(lambda: not new.ownership.in_step)
        await until(lambda: not old.ownership.peers.met[directory].in_step)
        old.ownership.peers.met.clear()
        await until(lambda: directory in old.ownership.peers.met)
        await client.bucket("default").set(b"k", b"w", durability="replicated(1)")
        with pytest.raises(TooFewReplicasError):
            await client.bucket("second").set(b"k", b"v", durability="replicated(1)")


@pytest.mark.asyncio
async def test_a_writer_that_is_sent_to_the_next_owner_is_served_when_that_is_active(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    go_on, serve = asyncio.Event(), Ownership._serve

    async def late(self: Ownership, *arguments: Any) -> Promoted:
        await go_on.wait()
        return await serve(self, *arguments)

    asked, soon = asyncio.Event(), Catalog.check_active_soon

    async def entered(self: Catalog) -> None:
        asked.set()
        await soon(self)

    monkeypatch.setattr(Ownership, "_serve", late)
    monkeypatch.setattr(Catalog, "check_active_soon", entered)
    # On a busy machine a bucket becomes active in more than two seconds.
    monkeypatch.setattr(catalog, "BECOMING_SECONDS", WAIT_SECONDS)
    promoting = asyncio.create_task(new.ownership.promote(takeover=True))
    await until(lambda: not old.ownership.active)
    # It is refused by the one, and tries the other once.
    async with AsyncClient(new.target, retry_seconds=0) as client:
        writing = asyncio.create_task(client.bucket("default").set(b"k", b"v"))
        await asked.wait()
        go_on.set()
        await writing
    await promoting
    assert new.catalog.becoming is None


@pytest.mark.asyncio
async def test_a_replica_that_follows_the_next_owner_is_answered_when_that_is_active(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new, other = await start_set(start, 2)
    go_on, serve = asyncio.Event(), Ownership._serve

    async def late(self: Ownership, *arguments: Any) -> Promoted:
        await go_on.wait()
        return await serve(self, *arguments)

    asked, wait = asyncio.Event(), Catalog.until_became

    async def entered(self: Catalog) -> None:
        asked.set()
        await wait(self)

    monkeypatch.setattr(Ownership, "_serve", late)
    monkeypatch.setattr(Catalog, "until_became", entered)
    promoting = asyncio.create_task(new.ownership.promote(takeover=True))
    directory = new.ownership.standing.directory
    await until(lambda: other.ownership.standing.candidate == directory)
    await other.ownership.following.end()
    other.ownership.following.begin((new.target,), False, directory)
    await asked.wait()
    await pass_turns(10)
    # It takes the time in which the buckets become active.
    assert not new.host.bucket.followers
    go_on.set()
    await promoting
    await until(lambda: len(new.host.bucket.followers) > 0)


@pytest.mark.asyncio
async def test_tables_that_are_given_up_by_force_are_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = await start_set(start)
    monkeypatch.setattr(following, "GATHER_SECONDS", 0.1)
    monkeypatch.setattr(Inventory, "has_tables", lambda *_: False)
    async with AsyncClient(new.target, token="t", retry_seconds=0) as client:
        done = await client.admin.promote(force=True)
    assert done.tables == ("default",)


@pytest.mark.asyncio
async def test_another_owner_at_the_address_of_the_last_one_is_followed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new, third = await start_set(start, replicas=2)
    await new.stop()
    before, directory = third.ownership.following.replication, new.ownership.standing.directory
    assert before is not None
    peers, row = third.ownership.peers, third.ownership.standing.row
    await until(lambda: before.directory == row.owner)
    monkeypatch.setattr(peers, "_remember", lambda *_: None)
    peers.addresses[directory] = peers.addresses[row.owner]
    await third.ownership.learned(
        Row(row.epoch + 1, 0, directory, True, row.counted), row.epoch + 1
    )
    await until(lambda: third.ownership.following.replication not in (None, before))
    assert third.ownership.following.replication is not None
    assert third.ownership.following.replication.directory == directory


@pytest.mark.asyncio
async def test_what_only_one_that_is_forgotten_had_is_not_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, gone, late = await start_set(start, replicas=2)
    host, behind = old.host, late.host
    receive, may_receive, goes = (
        BucketService.receive,
        asyncio.Event(),
        gone.ownership.standing.directory,
    )

    async def held_back(self: BucketService, *block: Any) -> None:
        if self is behind:
            await may_receive.wait()
        await receive(self, *block)

    monkeypatch.setattr(BucketService, "receive", held_back)
    async with AsyncClient(old.target) as client:
        await client.bucket().set(b"k", b"v", durability="replicated(1)")
    peers = old.ownership.peers
    with monkeypatch.context() as patch:
        patch.setattr(old.ownership, "_paused", True)
        await until(lambda: peers.met.pop(goes, None) is None)
        with pytest.raises(UprError, match="must be one that will not come back"):
            # It is not met, and follows.
            await old.ownership.counted_replicas.forget(goes)
    await gone.stop()
    name = f"replica:{goes}"
    await until(lambda: goes not in peers.met and name not in host.bucket.consumers)
    keep, counting = old.catalog.keep_standing, []

    async def kept(stored: Stored) -> None:
        counting.append(goes in host.bucket.copies.counted)
        await keep(stored)

    async def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(old.catalog, "keep_standing", kept)
        patch.setattr(host.acknowledged, "save", full)
        for _ in range(2):
            async with AsyncClient(old.target, retry_seconds=0) as client:
                with pytest.raises(StorageFailedError, match="No space left"):
                    await client.admin.forget_server(gone.target)
    # From before it is stored on: what it acknowledges later is above what the owner is counted for.
    assert counting
    assert not any(counting)
    async with AsyncClient(old.target) as client:
        assert await client.admin.forget_server(gone.target) == goes
    one = late.ownership.standing.directory
    row = old.ownership.standing.row
    assert row.counted == {one, row.owner}
    await until(lambda: peers.met[one].row.age >= row.age)
    await old.ownership.counted_replicas.count()
    assert row.owner in old.ownership.standing.row.counted
    may_receive.set()
    await until(lambda: old.ownership.standing.row.counted == {one})


@pytest.mark.asyncio
async def test_a_round_beside_it_does_not_count_one_that_is_forgotten(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, gone, _ = await start_set(start, replicas=2)
    owner, goes = old.ownership, gone.ownership.standing.directory
    await gone.stop()
    name, bucket = f"replica:{goes}", old.host.bucket
    await until(lambda: goes not in owner.peers.met and name not in bucket.consumers)
    keep, stores, may_store = old.catalog.keep_standing, asyncio.Event(), asyncio.Event()

    async def held_up(stored: Stored) -> None:
        stores.set()
        await may_store.wait()
        await keep(stored)

    monkeypatch.setattr(old.catalog, "keep_standing", held_up)
    forgetting = asyncio.create_task(owner.counted_replicas.forget(goes))
    await stores.wait()
    # Two more are in step: their row is two newer.
    monkeypatch.setattr(owner.peers, "registered", lambda _: True)
    met = next(iter(owner.peers.met.values()))
    owner.peers.met |= {f"{n:016x}": met for n in (1, 2)}
    counting = asyncio.create_task(owner.counted_replicas.count())
    await pass_turns(10)
    may_store.set()
    await asyncio.gather(forgetting, counting)
    assert goes not in owner.standing.row.counted


@pytest.mark.asyncio
async def test_one_that_joins_holds_up_purging_and_is_no_copy(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    host, directory = old.host, new.ownership.standing.directory
    may_tell, tell_all = asyncio.Event(), TableFeed._tell_all

    async def tell_later(self: TableFeed) -> None:
        await may_tell.wait()
        await tell_all(self)

    monkeypatch.setattr(TableFeed, "_tell_all", tell_later)
    await leave_alone(new)
    await until(lambda: not old.ownership.peers.registered(directory))
    new.ownership._paused = False
    async with AsyncClient(old.target) as client:
        written = await client.bucket("default").set(b"key", b"value")
    p, name = written.partition, REPLICAS_NAME + directory

    def held() -> int:
        found = dict(host.bucket.consumer_positions).get(name)
        return 0 if found is None else int(found.seqno[p])

    await until(lambda: held() == written.seqno)
    assert directory in host.bucket.copies.counted
    assert host.bucket.copies.stable(1)[p] == 0
    may_tell.set()
    await until(lambda: bool(host.bucket.copies.stable(1)[p] == written.seqno))


@pytest.mark.asyncio
async def test_a_set_without_a_bucket_changes_its_owner_and_counts_who_has_heard_of_none(
    start: Start,
) -> None:
    old, new = await start_set(start)
    async with AsyncClient(old.target) as client:
        await client.admin.drop_bucket("default")
        await until(lambda: new.names == [])
        assert new.ownership.in_step
        assert old.ownership.peers.met[new.ownership.standing.directory].in_step
        # Nothing else is in the way of a drain, and the former owner confirms that nothing is missing.
        assert await client.admin.drain() == new.target
    await new.ownership.promote(takeover=True)
    assert new.ownership.active
    counted = {old.ownership.standing.directory}
    await until(lambda: new.ownership.standing.row.counted == counted)
    # It has heard of a bucket, and then that there is none.
    async with AsyncClient(new.target) as client:
        await client.admin.create_bucket("next")
        await until(lambda: old.names == ["next"])
        await client.admin.drop_bucket("next")
    await until(lambda: old.names == [] and old.ownership.in_step)
    await new.stop()
    late = await start(new)
    await old.ownership.promote()
    assert old.ownership.active
    # This one heard of no list.
    assert not late.ownership.in_step
    with pytest.raises(UprError, match="joined no set"):
        await late.ownership.promote()


@pytest.mark.asyncio
async def test_a_server_without_a_bucket_confirms_nothing_after_a_restart(start: Start) -> None:
    """What it had may be lost, and the others would drop it."""
    old, new = await start_set(start)
    async with AsyncClient(old.target) as client:
        await client.admin.drop_bucket("default")
    epoch = old.ownership.standing.row.epoch
    assert old.ownership.inventory.served() == epoch
    await old.stop()
    again = await start(data=old.catalog._directory.path)
    assert again.names == []
    assert again.ownership.inventory.served() == 0
    await until(lambda: again.ownership.active)
    assert again.ownership.standing.row.epoch > epoch
    assert not new.ownership.active


@pytest.mark.asyncio
async def test_an_owner_that_claimed_while_it_heard_of_another_goes_on(start: Start) -> None:
    old, new = await start_set(start)
    row, (host,) = old.ownership.standing.row, old.catalog.hosts
    async with old.ownership._storing:
        other = replace(row, epoch=row.epoch + 1, owner=new.ownership.standing.directory)
        learning = asyncio.create_task(old.ownership.learned(other, other.epoch))
        await asyncio.sleep(0)
        assert not host.may_answer
        newer = replace(row, epoch=row.epoch + 2)
        claimed = replace(
            old.ownership.standing, row=newer, promised=newer.epoch, candidate=row.owner
        )
        old.catalog.standing = replace(old.catalog.standing, standing=claimed)
        old.ownership.inventory.serving = newer.epoch
    await learning
    assert old.ownership.active
    assert host.may_answer
