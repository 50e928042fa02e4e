"""Numbers of producers at a server that joins: if it is used only up to where it was whole, its newest ones up to there count."""

import threading

import pytest

from tests.harness import WAIT_SECONDS, poll, until
from tests.replica.members import (
    PRODUCER,
    A,
    Member,
    Start,
    before_it_claims,
    joined,
    leave_alone,
    never,
    start_set,
    write,
)
from upr.replica.upstream_tables import take_tables
from upr.service.replica_tables import TableFeed
from upr.storage.store import Store
from upr_protocol.block import U64
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


async def start_apart(start: Start, *, flushes: bool) -> list[Member]:
    """Start an owner that has two rows, and leave a server alone that has none, and one that has the first.

    Args:
        flushes: whether that one has it in its store, and not in its tail.
    """
    old, new, third = members = await start_set(start, replicas=2)
    await leave_alone(new)
    await write(old, 1)
    await until(lambda: third.seqno(A) == 1 and third.upstream_state.joining is False)
    if flushes:
        await third.flush()
    await leave_alone(third)
    await write(old, 2)
    await until(lambda: old.seqno(A) == 2)
    # The number comes with the tables, and not with its block.
    await old.flush()
    return members


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
            await never()
        await tell(feed, tables)

    async def numbers() -> set[int]:
        return {row.number for row in (await joins.host.producers.stored(PRODUCER)).values()}

    with monkeypatch.context() as patched:
        patched.setattr(TableFeed, "_tell", all_but_their_end)
        joins.ownership.following.begin((old.target,), False, old.ownership.standing.directory)
        await until(lambda: joins.seqno(A) == 2)
        await poll(numbers, lambda found: found == {2})
        if flushes:
            await joins.flush()
        await old.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("gives", [True, False])
async def test_a_write_is_known_at_the_next_owner_where_a_join_brought_a_newer_one_of_its_producer(
    start: Start, monkeypatch: pytest.MonkeyPatch, gives: bool, flushes: bool
) -> None:
    old, new, third = await start_apart(start, flushes=not flushes)
    if gives:
        await join_in_part(old, third, monkeypatch, flushes=flushes)
        await leave_alone(third)
        owner = new
    else:
        owner = third
        before_it_claims(
            monkeypatch, lambda: join_in_part(old, third, monkeypatch, flushes=flushes)
        )
    await owner.ownership.promote()
    assert owner.seqno(A) == 1
    assert (await write(owner, 1)).duplicate
    assert not (await write(owner, 2)).duplicate


@pytest.mark.asyncio
@pytest.mark.parametrize("gives", [True, False])
async def test_who_lost_its_owner_while_the_end_of_its_join_was_stored_promises_all_of_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    old, new, third = await start_apart(start, flushes=True)
    store = third.host.disk.store
    put, may_return = Store.put_joining, threading.Event()

    def held_up(self: Store, whole: U64 | None) -> None:
        put(self, whole)
        if self is store and whole is None:
            assert may_return.wait(WAIT_SECONDS)

    monkeypatch.setattr(Store, "put_joining", held_up)
    third.ownership.following.begin((old.target,), False, old.ownership.standing.directory)
    await until(lambda: third.seqno(A) == 2 and store.joining() is None)
    assert third.upstream_state.joining is None
    await third.ownership.following.end()
    may_return.set()
    await old.stop()
    owner = new if gives else third
    await owner.ownership.promote()
    assert owner.seqno(A) == 2
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
    await until(lambda: new.seqno(A) == 1)
    await new.flush()
    await leave_alone(new)
    await write(old, 2)
    await until(lambda: old.seqno(A) == 2)
    await old.flush()
    before_it_claims(monkeypatch, lambda: join_in_part(old, third, monkeypatch, flushes=False))
    await third.ownership.promote()
    assert third.seqno(A) == 1
    assert (await write(third, 1)).duplicate


@pytest.mark.asyncio
async def test_a_number_that_was_told_ahead_of_its_rows_gives_way_to_that_of_another_server(
    start: Start,
) -> None:
    old, new, third = await start_set(start, replicas=2)
    await joined(new, third)
    await write(old, 1)
    await until(lambda: new.seqno(A) == 1 == third.seqno(A))
    await third.flush()
    await leave_alone(third)
    await write(old, 2)
    await until(lambda: new.seqno(A) == 2)
    await new.flush()
    await leave_alone(new)
    await write(old, 3)
    await old.flush()
    ((name, numbers),) = old.host.disk.store.producers_after(b"", 10**6)
    await old.stop()
    # The tables came, and the rows were to come behind them.
    await third.begin_join()
    rows = wire.ProducerRows(producer=name, time=numbers.time, table=numbers.table.tobytes())
    await take_tables(third.host, wire.Tables(producers=[rows]))
    await third.ownership.promote()
    assert third.seqno(A) == 2
    assert (await write(third, 2)).duplicate
