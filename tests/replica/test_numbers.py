"""Numbers of producers at a server that joins: if it is used only up to where it was whole, its newest ones up to there count."""

import asyncio
import threading

import pytest

from tests.harness import WAIT_SECONDS, poll
from tests.replica.members import Member, Start, leave_alone, start_set, until
from upr.engine.bucket import Written
from upr.replica.owning import Owning
from upr.replica.tables import take_tables
from upr.service.buckets.bucket_service import BucketService
from upr.service.tables import TableFeed
from upr.storage.store import Store
from upr_protocol.block import U64, build_block
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

KEY = b"k"
P = partition_of(KEY)


def host_of(member: Member) -> BucketService:
    return member.catalog.find("default")


def seqno(member: Member) -> int:
    return int(host_of(member).bucket.markers.seqno[P])


async def write(member: Member, number: int) -> Written:
    """Write one row under a producer's number, in a call of its own."""
    host = host_of(member)
    call = await host.producers.open(b"w")
    try:
        return await host.write(build_block([KEY], [b"%d" % number]), b"w", call, number)
    finally:
        host.bucket.close_producer(call)


async def joined(*members: Member) -> None:
    for following in [host_of(member).following for member in members]:
        assert following is not None
        await until(lambda f=following: f.in_step and f.joining is False)  # type: ignore[misc]


async def flush(member: Member) -> None:
    host = host_of(member)
    while host.bucket.tail.first < host.bucket.tail.end:
        await host.flusher.flush(wanted=True)


async def join_in_part(
    old: Member, joins: Member, monkeypatch: pytest.MonkeyPatch, *, flushes: bool
) -> None:
    """Have a server follow the owner until it has row and number of the second write; then the owner dies.

    Args:
        flushes: whether what it had before goes from its tail to its store behind that number.
    """
    tell = TableFeed._tell

    async def all_but_their_end(feed: TableFeed, tables: wire.Tables) -> None:
        if tables.complete:
            await asyncio.Event().wait()
        await tell(feed, tables)

    async def numbers() -> set[int]:
        return {row.number for row in (await host_of(joins).producers.stored(b"w")).values()}

    with monkeypatch.context() as patched:
        patched.setattr(TableFeed, "_tell", all_but_their_end)
        joins.owning._follow((old.target,), False, old.owning.standing.directory)
        await until(lambda: seqno(joins) == 2)
        await poll(numbers, lambda found: found == {2})
        if flushes:
            await flush(joins)
        await old.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("gives", [True, False])
async def test_a_write_is_known_at_the_next_owner_where_a_join_brought_a_newer_one_of_its_producer(
    start: Start, monkeypatch: pytest.MonkeyPatch, gives: bool, flushes: bool
) -> None:
    old, new, third = await start_set(start, replicas=2)
    following = host_of(third).following
    assert following is not None
    await leave_alone(new)
    await write(old, 1)
    await until(lambda: seqno(third) == 1 and following.joining is False)
    if not flushes:
        await flush(third)
    await leave_alone(third)
    await write(old, 2)
    await until(lambda: seqno(old) == 2)
    # The number comes with the tables, and not with its block.
    await flush(old)
    if gives:
        await join_in_part(old, third, monkeypatch, flushes=flushes)
        await leave_alone(third)
        owner = new
    else:
        owner, check_reached = third, Owning._check_reached

        async def overtaken(owning: Owning, **how: bool) -> None:
            await join_in_part(old, third, monkeypatch, flushes=flushes)
            await check_reached(owning, **how)

        monkeypatch.setattr(Owning, "_check_reached", overtaken)
    await owner.owning.promote()
    assert seqno(owner) == 1
    assert (await write(owner, 1)).duplicate
    assert not (await write(owner, 2)).duplicate


@pytest.mark.asyncio
@pytest.mark.parametrize("gives", [True, False])
async def test_who_lost_its_owner_while_the_end_of_its_join_was_stored_promises_all_of_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    old, new, third = await start_set(start, replicas=2)
    following, store = host_of(third).following, host_of(third).disk.store
    assert following is not None
    await leave_alone(new)
    await write(old, 1)
    await until(lambda: seqno(third) == 1 and following.joining is False)
    await flush(third)
    await leave_alone(third)
    await write(old, 2)
    await until(lambda: seqno(old) == 2)
    await flush(old)
    put, may_return = Store.put_joining, threading.Event()

    def held_up(self: Store, whole: U64 | None) -> None:
        put(self, whole)
        if self is store and whole is None:
            assert may_return.wait(WAIT_SECONDS)

    monkeypatch.setattr(Store, "put_joining", held_up)
    third.owning._follow((old.target,), False, old.owning.standing.directory)
    await until(lambda: seqno(third) == 2 and store.joining() is None)
    assert following.joining is None
    await third.owning.follow_nobody()
    may_return.set()
    await old.stop()
    owner = new if gives else third
    await owner.owning.promote()
    assert seqno(owner) == 2
    assert (await write(owner, 2)).duplicate


@pytest.mark.asyncio
async def test_what_was_cut_off_leaves_no_number_ahead_of_what_another_server_gives(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, third = await start_set(start, replicas=2)
    await joined(new, third)
    # It has nothing of the producer yet.
    await leave_alone(third)
    await write(old, 1)
    await until(lambda: seqno(new) == 1)
    await flush(new)
    await leave_alone(new)
    await write(old, 2)
    await until(lambda: seqno(old) == 2)
    await flush(old)
    check_reached = Owning._check_reached

    async def overtaken(owning: Owning, **how: bool) -> None:
        await join_in_part(old, third, monkeypatch, flushes=False)
        await check_reached(owning, **how)

    monkeypatch.setattr(Owning, "_check_reached", overtaken)
    await third.owning.promote()
    assert seqno(third) == 1
    assert (await write(third, 1)).duplicate


@pytest.mark.asyncio
async def test_a_number_that_was_told_ahead_of_its_rows_gives_way_to_that_of_another_server(
    start: Start,
) -> None:
    old, new, third = await start_set(start, replicas=2)
    await joined(new, third)
    await write(old, 1)
    await until(lambda: seqno(new) == 1 == seqno(third))
    await flush(third)
    await leave_alone(third)
    await write(old, 2)
    await until(lambda: seqno(new) == 2)
    await flush(new)
    await leave_alone(new)
    await write(old, 3)
    await flush(old)
    ((name, numbers),) = host_of(old).disk.store.producers_after(b"", 10**6)
    await old.stop()
    # The tables came, and the rows were to come behind them.
    host = host_of(third)
    assert host.following is not None
    host.following.begin_tables()
    await host.following.set_joining(True)
    rows = wire.ProducerRows(producer=name, time=numbers.time, table=numbers.table.tobytes())
    await take_tables(host, wire.Tables(producers=[rows]))
    await third.owning.promote()
    assert seqno(third) == 2
    assert (await write(third, 2)).duplicate
