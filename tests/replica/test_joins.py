"""Promotions beside joins: what a server received without its upstream's tables is neither kept nor promised."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_replication import entry
from tests.replica.members import Member, Start, leave_alone, start_set, until
from tests.storage.closed import Closed
from upr.config import ServerConfig
from upr.engine.bucket import Written
from upr.engine.recovery import Undo
from upr.replica import owning
from upr.replica.holding import held_of
from upr.replica.owning import Owning
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.following import Following
from upr.service.tables import TableFeed
from upr.storage.keyspace import PRODUCER as NUMBERS
from upr.storage.keyspace import ProducerNumbers
from upr.storage.undone import undone_files
from upr_client import AsyncClient
from upr_protocol.block import build_block, make_runs, sealed
from upr_protocol.errors import BucketGoneError, UnavailableError, UprError
from upr_protocol.failover import FailoverLog, FailoverRecord

A, B = 3, 4
PRODUCER = b"w"


async def write(host: BucketService, number: int, partition: int) -> Written:
    """Write a row with the number of a producer."""
    rows = build_block([b"k%d" % partition], [b"%d" % number], np.array([partition], np.uint32))
    block = sealed(replace(rows, runs=make_runs([partition], 1)))
    stored = await host.producers.stored(PRODUCER)
    last = max((row.number for row in stored.values()), default=0)
    call = host.bucket.open_producer(PRODUCER, last)
    written = await host.write(block, PRODUCER, call, number)
    host.bucket.close_producer(call)
    return written


def bucket_of(member: Member) -> BucketService:
    return member.catalog.find("default")


def at(member: Member, partition: int) -> int:
    """Return the last complete durable marker."""
    return int(bucket_of(member).bucket.markers.seqno[partition])


async def joined(*members: Member) -> None:
    followings = [bucket_of(member).following for member in members]
    await until(lambda: all(f is not None and f.joining is False for f in followings))


async def flushed(host: BucketService) -> None:
    while host.bucket.tail.first < host.bucket.tail.end:
        await host.flush()


async def never_told(_feed: TableFeed, _tables: object) -> None:
    await asyncio.Event().wait()


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, old: Member, new: Member, came: Callable[[], bool]
) -> None:
    """Have the former owner send rows without the tables to a server that claims, and die then."""
    check_reached = Owning._check_reached

    async def overtaken(self: Owning, **how: bool) -> None:
        await check_reached(self, **how)
        if self is not new.owning or not bucket_of(old).bucket.partitions.high.any() or old.stopped:
            return
        with monkeypatch.context() as patch:
            patch.setattr(TableFeed, "_tell", never_told)
            self._follow((old.target,), False, old.owning.standing.directory)
            await until(came)
            await old.stop()

    monkeypatch.setattr(Owning, "_check_reached", overtaken)


@pytest.mark.asyncio
async def test_of_other_partitions_than_those_that_are_fetched_nothing_counts_as_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, third = await start_set(start, replicas=2)
    owner = bucket_of(old)
    await write(owner, 1, A)
    await until(lambda: at(third, A) == 1 == at(new, A))
    await joined(new, third)
    await leave_alone(new)
    await write(owner, 2, A)
    await until(lambda: at(third, A) == 2)
    await leave_alone(third)
    await write(owner, 3, B)
    await until(lambda: at(old, B) == 1)
    await flushed(owner)
    meanwhile(monkeypatch, old, new, lambda: at(new, A) == 2 and at(new, B) == 1)
    await new.owning.promote()
    assert (at(new, A), at(new, B)) == (2, 0)
    # It knows the numbers of what it kept, and what it did not keep is applied anew.
    assert (await write(bucket_of(new), 2, A)).duplicate
    assert not (await write(bucket_of(new), 3, B)).duplicate
    assert int(bucket_of(new).bucket.partitions.high[B]) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("rows_of_third", [2, 3])
async def test_a_claim_that_a_join_overtook_ends_with_an_owner(
    start: Start, monkeypatch: pytest.MonkeyPatch, rows_of_third: int
) -> None:
    monkeypatch.setattr(owning, "GATHER_SECONDS", 3.0)
    old, new, third = await start_set(start, replicas=2)
    owner = bucket_of(old)
    await write(owner, 1, A)
    await until(lambda: at(third, A) == 1 == at(new, A))
    await joined(new, third)
    await leave_alone(new)
    await write(owner, 2, A)
    await until(lambda: at(third, A) == 2)
    if rows_of_third == 2:
        await leave_alone(third)
    await write(owner, 3, A)
    if rows_of_third == 3:
        await until(lambda: at(third, A) == 3)
        await leave_alone(third)
    meanwhile(monkeypatch, old, new, lambda: at(new, A) == 3)

    async def away(*_: object) -> None:
        raise UnavailableError("it is away for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(Owning, "_ask", away)
        with pytest.raises(UnavailableError):
            await new.owning.promote()
    # Nobody else may become active, and nobody is there whose tables would come.
    assert not new.owning.holding.is_whole
    await new.owning.promote()
    assert at(new, A) == rows_of_third
    assert (await write(bucket_of(new), rows_of_third, A)).duplicate


@pytest.mark.asyncio
async def test_who_holds_a_part_of_a_stretch_takes_the_rest_of_one_that_has_less(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owning, "GATHER_SECONDS", 3.0)
    old, new, third = await start_set(start, replicas=2)
    here = bucket_of(new)
    await write(bucket_of(old), 1, A)
    await until(lambda: at(third, A) == 1 == at(new, A))
    await joined(new, third)
    await leave_alone(new)
    await write(bucket_of(old), 2, A)
    await until(lambda: at(third, A) == 2)
    await leave_alone(third)
    assert here.following is not None
    here.following.begin_tables()
    await here.following.set_joining(True)
    part = entry((A, 1, 4, 9))
    await here.receive(part.block(), part.data, [])
    await here.journalled(here.bucket.tail.end - 1)
    await old.stop()
    await new.owning.promote()
    assert (at(new, A), int(bucket_of(new).bucket.partitions.high[A])) == (2, 2)
    assert (await write(bucket_of(new), 2, A)).duplicate


@pytest.mark.asyncio
async def test_one_out_of_step_is_promoted_by_force_only_and_tells_what_it_may_lack(
    start: Start,
) -> None:
    old, new = await start_set(start)
    host = new.catalog.find("default")
    following = host.following
    assert following is not None
    # As if it had not received the tables, and then a row.
    following.begin_tables()
    await following.set_joining(True)
    async with AsyncClient(old.target) as client:
        await client.bucket().set(b"k", b"v")
    await until(lambda: not following.is_whole)
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
    host = new.catalog.find("default")
    following = host.following
    assert following is not None
    # As if it had received no tables yet, and no row either.
    following.begin_tables()
    await following.set_joining(True)
    async with AsyncClient(new.target, token="t", retry_seconds=0) as client:
        # Writers would wait for the whole join.
        with pytest.raises(UprError, match="not in step"):
            await client.admin.promote()
        assert old.owning.active
    check_reached = Owning._check_reached

    async def overtaken(owning: Owning, **how: bool) -> None:
        async with AsyncClient(old.target) as client:
            await client.bucket().set(b"k", b"v")
        await until(lambda: not following.is_whole)
        await old.stop()
        await check_reached(owning, **how)

    monkeypatch.setattr(Owning, "_check_reached", overtaken)
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
    set_joining = Following.set_joining

    async def slow(following: Following, joining: bool) -> None:
        if not joining and following.joining is not False:
            await asyncio.sleep(0.3)
        await set_joining(following, joining)

    monkeypatch.setattr(Following, "set_joining", slow)
    await leave_alone(new)
    await write(bucket_of(old), 1, A)
    done = await new.owning.promote(takeover=True)
    assert (done.records, at(new, A)) == (0, 1)
    assert not undone_files(new.catalog._directory.path)
    assert (await write(bucket_of(new), 1, A)).duplicate


@pytest.mark.asyncio
async def test_a_claim_is_tried_again_where_the_former_owner_is_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing back while another server, which may serve by force, is not heard."""
    old, new, third = await start_set(start, replicas=2)
    await joined(new, third)
    await third.stop()
    row = old.owning.standing.row
    alone = frozenset({new.owning.standing.directory})
    row = replace(row, revision=row.revision + 1, counted=alone)
    for one in (old, new):
        await one.owning.store(lambda standing: standing.learned(row))
    await leave_alone(new)
    following = bucket_of(new).following
    assert following is not None
    following.begin_tables()
    await following.set_joining(True)

    async def nothing(*_: object, **__: object) -> None: ...

    async def away(*_: object) -> None:
        raise UnavailableError("it is away for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(Owning, "_check_reached", nothing)
        patch.setattr(Owning, "_ask", away)
        with pytest.raises(UnavailableError):
            await new.owning.promote()
    await new.owning.promote()
    assert new.owning.active


@pytest.mark.asyncio
async def test_what_tables_named_that_are_not_followed_any_more_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owning, "GATHER_SECONDS", 2.0)
    old, new, third = await start_set(start, replicas=2)
    await write(bucket_of(old), 1, A)
    await until(lambda: at(third, A) == 1 == at(new, A))
    await joined(new, third)
    await leave_alone(new)
    await write(bucket_of(old), 2, A)
    await until(lambda: at(third, A) == 2)
    await leave_alone(third)
    following = bucket_of(new).following
    assert following is not None
    following.begin_tables()
    # Its row did not come.
    following.needed[A] = 3
    await old.stop()
    await new.owning.promote()
    assert at(new, A) == 2


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
    assert host.following is not None
    await host.following.set_joining(True)
    await host.close()
    new = FailoverLog((FailoverRecord(9, 0, 1), FailoverRecord(10, 2, 2)))
    host = opened(closed, {A: Undo(2, new, 2)})
    assert host.following is not None
    before = promised(host)
    assert before <= 2
    # Now rows of another branch come, from the store of the upstream.
    await host.following.set_joining(True)
    await host.adopt({A: new}, {A: 2})
    high = int(host.bucket.partitions.high[A])
    await received(host, (A, high, 5, 5))
    assert promised(host) == before
    await host.close()
    host = opened(closed)
    assert host.following is not None
    assert (promised(host), host.following.is_whole) == (before, False)
    await host.close()


@pytest.mark.asyncio
async def test_no_block_that_recovery_makes_crosses_what_is_whole(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    host = opened(closed)
    await host.adopt({A: OLD}, {A: 1})
    host.bucket.may_undo = True
    await received(host, (A, 0, 2, 2))
    assert host.following is not None
    await host.following.set_joining(True)
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
    assert host.following is not None
    await host.following.set_joining(True)
    await received(host, (A, 1, 2, 2))
    await host.disk.in_store_thread(lambda: store.put_producers([(PRODUCER, number(2))], counts))
    await host.following.is_whole_up_to({A: 2})
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
