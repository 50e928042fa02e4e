"""Promotions beside joins: what a server received without its upstream's tables is neither kept nor promised."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_replication import entry
from tests.harness import until
from tests.replica.members import (
    PRODUCER,
    A,
    B,
    Member,
    Start,
    before_it_claims,
    joined,
    leave_alone,
    never,
    start_set,
    write,
)
from tests.storage.closed import Closed
from upr.config import ServerConfig
from upr.engine.recovery import Undo
from upr.replica import following
from upr.replica.inventory import held_of
from upr.replica.ownership import Ownership
from upr.replica.peers import Peers
from upr.replica.replication import Replication
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.upstream_state import UpstreamState
from upr.service.replica_tables import TableFeed
from upr.storage.keyspace import PRODUCER as NUMBERS
from upr.storage.keyspace import ProducerNumbers
from upr.storage.undone import undone_files
from upr_client import AsyncClient
from upr_protocol.errors import BucketGoneError, UnavailableError, UprError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.wire.v1.admin_service_pb2 import ListBucketsResponse


async def start_apart(start: Start) -> list[Member]:
    """Start an owner, and a server that is left alone with the first of two rows; a third one follows on and has both."""
    old, new, third = members = await start_set(start, replicas=2)
    await write(old, 1)
    await until(lambda: third.seqno(A) == 1 == new.seqno(A))
    await joined(new, third)
    await leave_alone(new)
    await write(old, 2)
    # With its number: a call that was lost and began anew may bring the row before that.
    await until(lambda: third.seqno(A) == 2 and third.upstream_state.is_whole)
    return members


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, old: Member, new: Member, came: Callable[[], bool]
) -> None:
    """Have the former owner send rows without the tables to a server that claims, and die then."""
    check_reached = Ownership._check_reached

    async def overtaken(self: Ownership, **how: bool) -> None:
        await check_reached(self, **how)
        if self is not new.ownership or not old.host.bucket.partitions.high.any() or old.stopped:
            return
        with monkeypatch.context() as patch:
            patch.setattr(TableFeed, "_tell", never)
            self.following.begin((old.target,), False, old.ownership.standing.directory)
            await until(came)
            await old.stop()

    monkeypatch.setattr(Ownership, "_check_reached", overtaken)


@pytest.mark.asyncio
async def test_of_other_partitions_than_those_that_are_fetched_nothing_counts_as_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, third = await start_apart(start)
    await leave_alone(third)
    await write(old, 3, B)
    await until(lambda: old.seqno(B) == 1)
    await old.flush()
    meanwhile(monkeypatch, old, new, lambda: new.seqno(A) == 2 and new.seqno(B) == 1)
    await new.ownership.promote()
    assert (new.seqno(A), new.seqno(B)) == (2, 0)
    # It knows the numbers of what it kept, and what it did not keep is applied anew.
    assert (await write(new, 2)).duplicate
    assert not (await write(new, 3, B)).duplicate
    assert int(new.host.bucket.partitions.high[B]) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("rows_of_third", [2, 3])
async def test_a_claim_that_a_join_overtook_ends_with_an_owner(
    start: Start, monkeypatch: pytest.MonkeyPatch, rows_of_third: int
) -> None:
    monkeypatch.setattr(following, "GATHER_SECONDS", 3.0)
    old, new, third = await start_apart(start)
    if rows_of_third == 2:
        await leave_alone(third)
    await write(old, 3)
    if rows_of_third == 3:
        await until(lambda: third.seqno(A) == 3)
        await leave_alone(third)
    meanwhile(monkeypatch, old, new, lambda: new.seqno(A) == 3)

    async def away(*_: object, **__: object) -> None:
        raise UnavailableError("it is away for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(Peers, "ask_promises", away)
        with pytest.raises(UnavailableError):
            await new.ownership.promote()
    # Nobody else may become active, and nobody is there whose tables would come.
    assert not new.ownership.inventory.is_whole
    await new.ownership.promote()
    assert new.seqno(A) == rows_of_third
    assert (await write(new, rows_of_third)).duplicate


@pytest.mark.asyncio
async def test_who_holds_a_part_of_a_stretch_takes_the_rest_of_one_that_has_less(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "GATHER_SECONDS", 3.0)
    old, new, third = await start_apart(start)
    await leave_alone(third)
    await new.begin_join()
    await received(new.host, (A, 1, 4, 9))
    await old.stop()
    await new.ownership.promote()
    assert (new.seqno(A), int(new.host.bucket.partitions.high[A])) == (2, 2)
    assert (await write(new, 2)).duplicate


@pytest.mark.asyncio
async def test_one_out_of_step_is_promoted_by_force_only_and_tells_what_it_may_lack(
    start: Start,
) -> None:
    old, new = await start_set(start)
    # It does not receive the tables, and then a row.
    await new.begin_join()
    async with AsyncClient(old.target) as client:
        await client.bucket().set(b"k", b"v")
    await until(lambda: not new.upstream_state.is_whole)
    await leave_alone(new)
    await old.stop()
    async with AsyncClient(new.target, token="t", retry_seconds=0) as client:
        with pytest.raises(UprError) as refused:
            await client.admin.promote()
        assert refused.value.reason == "NOT_IN_STEP"
        done = await client.admin.promote(force=True)
    assert done.tables == ("default",)


@pytest.mark.asyncio
async def test_what_a_join_brings_while_a_promotion_runs_is_not_kept_without_its_tables(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    # It receives no tables, and no row either.
    await new.begin_join()
    async with AsyncClient(new.target, token="t", retry_seconds=0) as client:
        # Writers would wait for the whole join.
        with pytest.raises(UprError, match="not in step"):
            await client.admin.promote()
        assert old.ownership.active

    async def a_row_comes() -> None:
        async with AsyncClient(old.target) as client:
            await client.bucket().set(b"k", b"v")
        await until(lambda: not new.upstream_state.is_whole)
        await old.stop()

    before_it_claims(monkeypatch, a_row_comes)
    async with AsyncClient(new.target, token="t", retry_seconds=0) as client:
        done = await client.admin.promote()
        assert await client.bucket().get(b"k") is None
    assert done.tables == ()
    assert undone_files(new.catalog._directory.path)


@pytest.mark.asyncio
async def test_a_takeover_waits_until_the_end_of_a_join_is_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await start_set(start)
    await joined(new)
    set_joining = UpstreamState.set_joining

    async def slow(upstream_state: UpstreamState, joining: bool) -> None:
        if not joining and upstream_state.joining is not False:
            await asyncio.sleep(0.3)
        await set_joining(upstream_state, joining)

    monkeypatch.setattr(UpstreamState, "set_joining", slow)
    await leave_alone(new)
    await write(old, 1)
    done = await new.ownership.promote(takeover=True)
    assert (done.records, new.seqno(A)) == (0, 1)
    assert not undone_files(new.catalog._directory.path)
    assert (await write(new, 1)).duplicate


@pytest.mark.asyncio
async def test_a_claim_is_tried_again_where_the_former_owner_is_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing back while another server, which may serve by force, is not heard."""
    old, new, third = await start_set(start, replicas=2)
    await joined(new, third)
    await third.stop()
    row = old.ownership.standing.row
    alone = frozenset({new.ownership.standing.directory})
    row = replace(row, revision=row.revision + 1, counted=alone)
    for one in (old, new):
        await one.ownership.store(lambda standing: standing.learned(row))
    await leave_alone(new)
    await new.begin_join()

    async def nothing(*_: object, **__: object) -> None: ...

    async def away(*_: object, **__: object) -> None:
        raise UnavailableError("it is away for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "_check_reached", nothing)
        patch.setattr(Peers, "ask_promises", away)
        with pytest.raises(UnavailableError):
            await new.ownership.promote()
    await new.ownership.promote()
    assert new.ownership.active


@pytest.mark.asyncio
async def test_what_tables_named_that_are_not_followed_any_more_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "GATHER_SECONDS", 2.0)
    old, new, third = await start_apart(start)
    await leave_alone(third)
    new.upstream_state.begin_tables()
    # Its row did not come.
    new.upstream_state.needed[A] = 3
    await old.stop()
    await new.ownership.promote()
    assert new.seqno(A) == 2


def opened(closed: Closed, undo: dict[int, Undo] | None = None) -> BucketService:
    async def failed() -> None: ...

    config = ServerConfig(data=closed.path)
    host = BucketService(closed.bucket, config, replica=True, undo=undo)
    host.start(failed)
    return host


async def received(host: BucketService, *ranges: tuple[int, int, int, int]) -> None:
    for one in map(entry, ranges):
        await host.receive(one.block(), one.data, [])
    await host.journalled(host.bucket.tail.end - 1)


async def closed_again(host: BucketService) -> None:
    host.leave(BucketGoneError("it is opened anew"))
    await host.discard()


def promised(host: BucketService) -> int:
    return int(held_of(host, as_copy=True)["marker"][A])


OLD = FailoverLog((FailoverRecord(9, 0, 1),))


@pytest.mark.asyncio
async def test_what_was_whole_and_is_undone_is_not_whole_after_a_restart(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    host = opened(closed)
    await host.adopt({A: OLD}, {A: 1})
    await received(host, (A, 0, 2, 2), (A, 2, 5, 5))
    assert host.upstream_state is not None
    await host.upstream_state.set_joining(True)
    await host.close()
    new = FailoverLog((FailoverRecord(9, 0, 1), FailoverRecord(10, 2, 2)))
    host = opened(closed, {A: Undo(2, new, 2)})
    assert host.upstream_state is not None
    before = promised(host)
    assert before <= 2
    # Now rows of another branch come, from the store of the upstream.
    await host.upstream_state.set_joining(True)
    await host.adopt({A: new}, {A: 2})
    high = int(host.bucket.partitions.high[A])
    await received(host, (A, high, 5, 5))
    assert promised(host) == before
    await host.close()
    host = opened(closed)
    assert host.upstream_state is not None
    assert (promised(host), host.upstream_state.is_whole) == (before, False)
    await host.close()


@pytest.mark.asyncio
async def test_no_block_that_recovery_makes_crosses_what_is_whole(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    host = opened(closed)
    await host.adopt({A: OLD}, {A: 1})
    host.bucket.may_undo = True
    await received(host, (A, 0, 2, 2))
    assert host.upstream_state is not None
    await host.upstream_state.set_joining(True)
    await received(host, (A, 2, 5, 5), (A, 5, 8, 8))
    await closed_again(host)
    new = FailoverLog((FailoverRecord(9, 0, 1), FailoverRecord(10, 5, 2)))
    host = opened(closed, {A: Undo(5, new, 2)})
    assert promised(host) == 2
    await closed_again(host)
    host = opened(closed, {A: Undo(2, new, 3)})
    assert int(host.bucket.partitions.high[A]) == 2
    await closed_again(host)


def number(at: int) -> ProducerNumbers:
    return ProducerNumbers(np.array([(A, at, 9, at - 1, at)], NUMBERS), 1)


@pytest.mark.asyncio
async def test_what_was_fetched_with_its_tables_is_whole_also_in_the_store(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    host = opened(closed)
    store, counts = host.disk.store, host.bucket.counts
    await host.adopt({A: OLD}, {A: 1})
    await received(host, (A, 0, 1, 1))
    assert host.upstream_state is not None
    await host.upstream_state.set_joining(True)
    await received(host, (A, 1, 2, 2))
    await host.disk.in_store_thread(lambda: store.put_producers([(PRODUCER, number(2))], counts))
    await host.upstream_state.is_whole_up_to({A: 2})
    # Nothing came of it, and the join goes on.
    await received(host, (A, 2, 3, 3))
    await host.disk.in_store_thread(lambda: store.put_producers([(PRODUCER, number(3))], counts))
    assert promised(host) == 2
    await closed_again(host)
    new = FailoverLog((FailoverRecord(9, 0, 1), FailoverRecord(10, 2, 2)))
    host = opened(closed, {A: Undo(2, new, 2)})
    assert int(host.bucket.partitions.high[A]) == 2
    assert host.disk.store.producer_rows(PRODUCER)[A].number == 2
    await closed_again(host)


@pytest.mark.asyncio
async def test_of_two_buckets_of_one_name_the_one_that_was_dropped_keeps_nobody_from_being_active(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who missed the drop has the old one still, with rows; a server can have but one of them."""
    monkeypatch.setattr(following, "GATHER_SECONDS", 0.5)
    old, behind, ahead = await start_set(start, replicas=2)
    match, stays = Replication._match, behind.ownership.following.replication

    async def late(replication: Replication, answer: ListBucketsResponse) -> None:
        if replication is not stays:
            await match(replication, answer)

    def has_its_row(member: Member, version: int) -> bool:
        hosts = {host.bucket.identity.version: host for host in member.catalog.hosts}
        return version in hosts and bool(hosts[version].bucket.markers.seqno.any())

    async with AsyncClient(old.target) as client:
        first = (await client.admin.create_bucket("x")).version
        await client.bucket("x").set(b"a", b"1")
        await until(lambda: has_its_row(ahead, first) and has_its_row(behind, first))
        monkeypatch.setattr(Replication, "_match", late)
        await client.admin.drop_bucket("x")
        second = (await client.admin.create_bucket("x")).version
        await client.bucket("x").set(b"b", b"2")
        await until(lambda: has_its_row(ahead, second))
    await leave_alone(behind)
    await old.stop()
    with pytest.raises(UprError, match="another bucket 'x' is here") as refused:
        await behind.ownership.promote()
    assert refused.value.reason == "NOT_HEARD"
    assert has_its_row(behind, first)
    await ahead.ownership.promote()
    assert has_its_row(ahead, second)
    assert ahead.ownership.active


@pytest.mark.asyncio
async def test_a_drop_that_its_owner_lost_in_a_crash_is_forgotten(start: Start) -> None:
    """The bucket is back there, complete, and the replica has it again."""
    owner, replica = await start_set(start)
    async with AsyncClient(owner.target) as client:
        version = (await client.admin.create_bucket("x")).version
        await until(lambda: replica.names == ["default", "x"])
        await client.admin.drop_bucket("x")
        await until(lambda: list(replica.catalog.gone) == [version])
        assert replica.names == ["default"]
        await owner.catalog.create("x", version=version)
        await until(lambda: replica.names == ["default", "x"])
    assert not replica.catalog.gone
    await until(lambda: replica.ownership.in_step)
    await replica.ownership.promote(takeover=True)
    assert replica.names == ["default", "x"]
