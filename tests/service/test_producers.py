"""Producers and the store: many of them, what is known of one that comes back, and who is forgotten."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.harness import WAIT_SECONDS
from tests.service.bucket_state import started
from tests.storage.stored_blocks import numbers_of
from upr.config import ServerConfig
from upr.service.buckets.bucket_service import BucketService
from upr.storage.keyspace import (
    PRODUCER_GRAIN,
    ProducerNumbers,
    ProducerRow,
    producer_time_key,
)
from upr.storage.lmdb_pages import DATA_FILE
from upr.storage.store import FORGET_ROWS, Store
from upr_protocol.block import Block, build_block
from upr_protocol.errors import ContentDiffersError, TooManyError
from upr_protocol.limits import PRODUCER_SECONDS, PRODUCERS_MAX, WRITE_CALLS_MAX
from upr_protocol.partitioning import partition_of
from upr_protocol.write_places import place_number

DAY = PRODUCER_SECONDS * 1_000_000


@pytest_asyncio.fixture
async def host(folder: Path) -> AsyncIterator[BucketService]:
    host = started(BucketService(folder, ServerConfig(data=folder)))
    yield host
    await host.close()


def row(key: bytes) -> Block:
    return build_block([key], [b"v"])


def numbers(time: int, *partitions: int, number: int = 1) -> ProducerNumbers:
    return numbers_of({p: ProducerRow(number, 1, 0, 1) for p in partitions}, time)


@pytest.mark.asyncio
async def test_a_thousand_connected_writers_that_are_idle_lock_nobody_out(
    host: BucketService,
) -> None:
    calls = []
    for i in range(WRITE_CALLS_MAX):
        name = b"%032x" % i
        calls.append(await host.producers.open(name))
        await host.write(row(b"a"), name, calls[-1], 1)
    another = await host.producers.open(b"one more")
    assert not (await host.write(row(b"a"), b"one more", another, 1)).duplicate
    assert host.bucket.tail.first == 0, "a flush was asked for"


@pytest.mark.asyncio
async def test_who_comes_back_knows_what_was_written_and_stored(host: BucketService) -> None:
    first = await host.producers.open(b"p")
    for number in (3, 7):
        await host.durable((await host.write(row(b"a"), b"p", first, number)).entry)
    host.bucket.close_producer(first)
    while await host.flusher.flush(wanted=True):
        pass
    assert not host.bucket.knows_producer(b"p")

    again = await host.producers.open(b"p")

    assert again.producer.last_number == 7
    told = [await host.write(row(b"a"), b"p", again, number) for number in (3, 7, 8)]
    assert [one.duplicate for one in told] == [True, True, False]
    assert [int(one.runs["end_seqno"][0]) for one in told] == [0, 2, 3]
    assert told[0].entry == told[1].entry == -1


@pytest.mark.asyncio
async def test_the_content_of_a_place_is_stored(host: BucketService) -> None:
    first = await host.producers.open(b"p")
    numbers = [place_number(place, b"first") for place in (0, 1023)]
    for number in numbers:
        await host.durable((await host.write(row(b"a"), b"p", first, number)).entry)
    host.bucket.close_producer(first)
    while await host.flusher.flush(wanted=True):
        pass
    assert set(host.disk.store.producer_rows(b"p")) == {partition_of(b"a"), 1024, 1024 + 1023}

    again = await host.producers.open(b"p")

    for digest in (b"above", b"under"):
        for place in (0, 5, 1023):
            with pytest.raises(ContentDiffersError):
                await host.write(row(b"b"), b"p", again, place_number(place, digest))
    assert [(await host.write(row(b"a"), b"p", again, n)).duplicate for n in numbers] == [True] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("asked", ["opens", "sends again"])
async def test_what_was_flushed_while_the_store_was_asked_is_not_missed(
    host: BucketService, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await host.producers.open(b"p")
    reading, go_on = threading.Event(), threading.Event()
    read = {"opens": "producer_number", "sends again": "producer_rows"}[asked]
    real = getattr(Store, read)

    def slow(store: Store, name: bytes) -> object:
        found = real(store, name)
        reading.set()
        assert go_on.wait(WAIT_SECONDS)
        return found

    monkeypatch.setattr(Store, read, slow)
    written = await host.write(row(b"a"), b"p", other, 5)
    if asked == "opens":
        # As after a start: the tail tells of a producer that the store has not been asked about.
        other.producer.loaded = False
        task: asyncio.Task[object] = asyncio.create_task(host.producers.open(b"p"))
    else:
        task = asyncio.create_task(host.producers.stored(b"p"))
    await asyncio.to_thread(reading.wait, WAIT_SECONDS)
    await host.durable(written.entry)
    host.bucket.close_producer(other)
    while await host.flusher.flush(wanted=True):
        pass
    assert not host.bucket.knows_producer(b"p")
    go_on.set()
    found = await asyncio.wait_for(task, WAIT_SECONDS)
    if isinstance(found, dict):
        assert [stored.number for stored in found.values()] == [5]
    else:
        assert found.producer.last_number == 5  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_who_finds_no_memory_waits_for_a_flush(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr.engine.bucket.PRODUCER_MEMORY_BYTES", 5000)
    for i in range(20):
        name = b"loader %d" % i
        call = await asyncio.wait_for(host.producers.open(name), WAIT_SECONDS)
        await host.durable((await host.write(row(b"a"), name, call, 1)).entry)
        host.bucket.close_producer(call)

    async def stay() -> None:
        for i in range(20):
            await host.producers.open(b"stays %d" % i)

    with pytest.raises(TooManyError, match="must be at most 5000"):
        await stay()


@pytest.mark.asyncio
async def test_who_is_refused_has_the_tail_flushed_a_few_times_at_most(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much others write meanwhile."""
    monkeypatch.setattr("upr.engine.bucket.PRODUCER_MEMORY_BYTES", 5000)
    flush, flushes = host.flusher.flush, 0

    async def counted(*, wanted: bool) -> bool:
        nonlocal flushes
        flushes += 1
        return await flush(wanted=wanted)

    async def others() -> None:
        while True:
            await host.write(row(b"a"), b"", None, 0)
            await asyncio.sleep(0)

    async def stay() -> None:
        for i in range(20):
            await host.producers.open(b"stays %d" % i)

    monkeypatch.setattr(host.flusher, "flush", counted)
    await host.write(row(b"a"), b"", None, 0)
    writing = asyncio.create_task(others())
    try:
        with pytest.raises(TooManyError, match="must be at most 5000"):
            await stay()
    finally:
        writing.cancel()
    # The first one may begin before the newest entry is durable, and the last one behind the one that helped.
    assert 1 <= flushes <= 3


# Who is forgotten


def count_of(store: Store) -> int:
    with store._env.begin() as txn:
        return int(txn.stat(store._producer_times)["entries"])


def test_the_time_of_a_producer_is_that_of_its_last_write(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for time in (DAY, 3 * DAY, 2 * DAY):
        store.put_flush([], {}, {b"p": numbers(time, 5, 1000)})
    store.put_flush([], {}, {b"old": numbers(DAY, *range(1024))})
    assert count_of(store) == 2
    assert store.forget_producers(DAY, 10) == (0, False)
    assert store.forget_producers(DAY + PRODUCER_GRAIN, 10) == (1, False)
    assert store.producer_number(b"old") == 0
    assert store.producer_rows(b"old") == {}
    assert list(store.producer_rows(b"p")) == [5, 1000]
    assert store.forget_producers(4 * DAY, 10) == (1, False)
    with store._env.begin() as txn:
        counts = [txn.stat(db)["entries"] for db in (store._producers, store._producer_times)]
    assert counts == [0, 0]
    store.close()


def test_the_newest_names_stay_and_each_transaction_is_bounded(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = {b"%d" % i: numbers(i * PRODUCER_GRAIN, *range(0, 1024, 16)) for i in range(60)}
    store.put_flush([], {}, names)
    gone = []
    while (one := store.forget_producers(0, 20)).names:
        gone.append(one)
    assert sum(one.names for one in gone) == 40
    assert [one.more for one in gone] == [True, True, False]
    # 64 rows a name, its time and what is known of it as a whole.
    assert max(one.names for one in gone) * 66 < FORGET_ROWS + 66
    assert count_of(store) == 20
    assert store.producer_rows(b"39") == {}
    assert len(store.producer_rows(b"40")) == 64
    store.close()


def test_an_entry_that_the_disk_changed_does_not_keep_the_others_from_being_forgotten(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    store.put_flush([], {}, {name: numbers(DAY, 5) for name in (b"alfa", b"bravo", b"charlie")})
    store.close()
    key = producer_time_key(DAY, b"alfa")
    data = (tmp_path / DATA_FILE).read_bytes()
    assert data.count(key) == 1
    # It stays where it is, and a search by key goes past it.
    (tmp_path / DATA_FILE).write_bytes(data.replace(key, key.replace(b"alfa", b"qlfa")))
    store = Store(tmp_path)
    assert store.forget_producers(2 * DAY, 10) == (3, False)
    assert count_of(store) == 0
    store.close()


def test_an_entry_that_the_disk_made_older_has_no_producer_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_flush([], {}, {name: numbers(3 * DAY, 5) for name in (b"alfa", b"bravo")})
    store.close()
    key = producer_time_key(3 * DAY, b"alfa")
    data = (tmp_path / DATA_FILE).read_bytes()
    assert data.count(key) == 1
    (tmp_path / DATA_FILE).write_bytes(data.replace(key, producer_time_key(DAY, b"alfa")))
    store = Store(tmp_path)
    assert store.forget_producers(2 * DAY, 10) == (0, False)
    assert list(store.producer_rows(b"alfa")) == [5]
    assert store.forget_producers(4 * DAY, 10) == (2, False)
    assert count_of(store) == 0
    store.close()


def test_a_later_write_adds_to_what_is_stored_of_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_flush([], {}, {b"p": numbers(1, 3, 17, 18, number=4)})
    store.put_flush([], {}, {b"p": numbers(2, 4, 18, number=9)})
    found = {p: stored.number for p, stored in store.producer_rows(b"p").items()}
    assert found == {3: 4, 4: 9, 17: 4, 18: 9}
    assert store.producer_number(b"p") == 9
    assert store.producer_number(b"q") == 0
    assert store.producer_rows(b"") == {}
    store.close()


def test_a_larger_number_that_counts_is_not_replaced(tmp_path: Path) -> None:
    """A replica was told it of what it read from a store; its tail has older ones, which are flushed later."""
    store = Store(tmp_path)
    store.put_flush([], {}, {b"p": numbers(1, 3, 17, 18, number=9)})

    def counts(partition: int, failover_id: int, end: int) -> bool:
        return partition != 17

    store.put_flush([], {}, {b"p": numbers(2, 3, 4, 17, number=4)}, counts=counts)
    found = {p: stored.number for p, stored in store.producer_rows(b"p").items()}
    assert found == {3: 9, 4: 4, 17: 4, 18: 9}
    store.close()


@pytest.mark.asyncio
async def test_a_number_that_was_told_during_a_flush_is_not_replaced(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given by a new owner, whose log was taken over while the flush went on."""
    call = await host.producers.open(b"p")
    written = await host.write(row(b"a"), b"p", call, 4)
    await host.durable(written.entry)
    partition, table = partition_of(b"a"), host.bucket.partitions
    put_flush = Store.put_flush

    def told_before(store: Store, *flushed: Any) -> None:
        table.set_log(partition, table.logs[partition].with_record(77, 1))
        told = numbers_of({partition: ProducerRow(9, 77, 1, 2)}, 1)
        store.put_producers([(b"p", told)], host.bucket.counts)
        put_flush(store, *flushed)

    monkeypatch.setattr(Store, "put_flush", told_before)
    assert await host.flusher.flush(wanted=True)
    assert host.disk.store.producer_rows(b"p")[partition].number == 9


@pytest.mark.asyncio
async def test_a_first_write_waits_for_one_transaction_of_forgetting_at_most(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are to be forgotten: what the store's thread does between two of them is counted."""
    for begin in range(0, 3000, 1000):
        names = {b"%032x" % i: numbers(1, 3, 700) for i in range(begin, begin + 1000)}
        host.disk.store.put_flush([], {}, names)
    order: list[str] = []
    forget, clear = Store.forget_producers, host._clear_proof_now

    def counted(store: Store, before: int, keep: int) -> object:
        order.append("forget")
        return forget(store, before, keep)

    def cleared() -> None:
        order.append("first write")
        clear()

    monkeypatch.setattr(Store, "forget_producers", counted)
    monkeypatch.setattr(host, "_clear_proof_now", cleared)
    forgetting = asyncio.create_task(host.producers.forget())
    while not order:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await host.write(row(b"a"), b"", None, 0)
    assert await asyncio.wait_for(forgetting, WAIT_SECONDS) == 3000
    assert order.index("first write") <= 2
    assert order.count("forget") > 10


@pytest.mark.asyncio
async def test_ten_thousand_names_are_remembered(folder: Path) -> None:
    host = BucketService(folder, ServerConfig(data=folder))
    now = host.disk.clock.now()
    for begin in range(0, PRODUCERS_MAX + 500, 500):
        names = {
            b"%d" % i: numbers(now + i * PRODUCER_GRAIN, i % 1024)
            for i in range(begin, begin + 500)
        }
        host.disk.store.put_flush([], {}, names)
    assert await host.producers.forget() == 500
    assert count_of(host.disk.store) == PRODUCERS_MAX
    assert host.disk.store.producer_number(b"499") == 0
    call = await host.producers.open(b"500")
    assert call.producer.last_number == 1
    host.bucket.close_producer(call)
    await host.close()
