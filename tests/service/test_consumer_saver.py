"""The saver of positions over a store that fails and waits."""

import asyncio

import lmdb
import numpy as np
import pytest

from tests.engine.test_saves import IDS, acknowledge, save
from upr.engine.consumers import Consumers, Save
from upr.service.buckets.keepers import ConsumerSaver, Rows
from upr.service.storage_trouble import Failing, Troubles
from upr_protocol.errors import FencedError, StorageFailedError


class Store:
    """Takes rows when it is let; each transaction is one entry."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.transactions = 0
        self.failing: Exception | None = None
        self.may_go = asyncio.Event()
        self.asked = asyncio.Event()
        self.consumers = Consumers()
        self.troubles = Troubles("b", lambda: None)
        self.saver = ConsumerSaver(self.consumers, self.write, self.troubles)
        self.ended: list[Save] = []

    async def write(self, rows: object) -> None:
        assert callable(rows)
        self.asked.set()
        await self.may_go.wait()
        if self.failing is not None:
            raise self.failing
        self.transactions += 1
        for key, row in rows().items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row

    def begin(self, one: Save) -> "asyncio.Task[None]":
        return self.saver.begin(one, lambda: self.ended.append(one))


@pytest.mark.asyncio
async def test_saves_that_wait_share_a_transaction_and_each_is_answered_behind_it() -> None:
    store = Store()
    first = store.begin(save((1, 1)))
    await store.asked.wait()
    others = [store.begin(save((2, i), name=f"c{i}")) for i in range(5)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (first, *others))
    assert store.ended == []
    store.may_go.set()
    await asyncio.gather(first, *others)
    assert (store.transactions, len(store.rows), len(store.ended)) == (2, 6, 6)
    await store.saver.settled("c")


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [lmdb.DiskError("no space"), MemoryError()])
async def test_a_store_that_fails_refuses_all_that_were_in_the_transaction(
    error: Exception,
) -> None:
    store = Store()
    store.failing = error
    tasks = [store.begin(save((1, 1), name=name)) for name in "ab"]
    store.may_go.set()
    for task in tasks:
        with pytest.raises(StorageFailedError, match=r"no space|MemoryError") as caught:
            await task
        assert caught.value.retriable
    assert (len(store.ended), list(store.consumers)) == (2, [])
    assert Failing.POSITIONS in store.troubles
    store.failing = None
    await store.begin(save((1, 2), name="a"))
    assert Failing.POSITIONS not in store.troubles
    assert {key: row and row.seqno for key, row in store.rows.items()} == {(b"a", 1): 2}


@pytest.mark.asyncio
async def test_a_consumer_that_saves_while_it_is_forgotten_leaves_no_row() -> None:
    store = Store()
    under_way = store.begin(save((1, 1)))
    await store.asked.wait()
    assert store.consumers.forget("c")
    forgetting = asyncio.create_task(store.saver.save())
    anew = store.begin(save((2, 5)))
    store.may_go.set()
    with pytest.raises(FencedError, match="was forgotten"):
        await under_way
    await asyncio.gather(forgetting, anew)
    assert list(store.rows) == [(b"c", 2)]


@pytest.mark.asyncio
async def test_rows_of_a_forgotten_consumer_go_before_those_that_it_writes_anew() -> None:
    store = Store()
    store.may_go.set()
    await store.begin(save((1, 1), (2, 1)))
    store.consumers.forget("c")
    await store.begin(save((1, 7)))
    await store.saver.save()
    assert {key: row and row.seqno for key, row in store.rows.items()} == {(b"c", 1): 7}


@pytest.mark.asyncio
async def test_an_older_ack_never_overwrites_a_position_that_is_being_saved() -> None:
    store = Store()
    acknowledge(store.consumers, 1, 3)
    saving = store.begin(save((1, 9)))
    await store.asked.wait()
    acks = asyncio.create_task(store.saver.save())
    store.may_go.set()
    await asyncio.gather(saving, acks)
    row = store.rows[b"c", 1]
    assert row is not None
    assert (row.seqno, row.position) == (9, b"9")


@pytest.mark.asyncio
async def test_settled_waits_for_the_saves_of_its_consumer_only() -> None:
    store = Store()
    store.begin(save((1, 1)))
    await store.asked.wait()
    await store.saver.settled("another")
    settled = asyncio.create_task(store.saver.settled("c"))
    await asyncio.sleep(0)
    assert not settled.done()
    store.may_go.set()
    await settled
    assert int(store.consumers.limit(IDS)[1]) == 1
    await store.saver.finish()


@pytest.mark.parametrize("under_way", [True, False])
@pytest.mark.asyncio
async def test_settled_waits_until_what_was_forgotten_is_gone_from_the_store(
    under_way: bool,
) -> None:
    store = Store()
    store.may_go.set()
    await store.begin(save((1, 1)))
    store.may_go.clear()
    store.asked.clear()
    store.consumers.forget("c")
    forgetting = asyncio.create_task(store.saver.save()) if under_way else None
    if forgetting is not None:
        await store.asked.wait()
    settled = asyncio.create_task(store.saver.settled("c"))
    await store.asked.wait()
    await store.saver.settled("another")
    assert not settled.done()
    assert store.rows
    store.may_go.set()
    await settled
    assert store.rows == {}
    if forgetting is not None:
        await forgetting


@pytest.mark.asyncio
async def test_nothing_is_settled_while_what_was_forgotten_cannot_be_removed() -> None:
    store = Store()
    store.may_go.set()
    await store.begin(save((1, 1)))
    store.consumers.forget("c")
    store.failing = lmdb.DiskError("no space")
    for _ in range(2):
        with pytest.raises(lmdb.DiskError, match="no space"):
            await store.saver.settled("c")
    store.failing = None
    await store.saver.settled("c")
    assert store.rows == {}


@pytest.mark.asyncio
async def test_all_that_waits_is_stored_in_bites() -> None:
    store = Store()
    everything = [(p, 1) for p in range(1024)]
    tasks = [store.begin(save(*everything, name=f"c{i}")) for i in range(9)]
    store.may_go.set()
    await asyncio.gather(*tasks)
    assert (store.transactions, len(store.rows)) == (3, 9 * 1024)
    assert np.all(store.consumers.limit(IDS) == 1)


@pytest.mark.asyncio
async def test_a_save_that_was_refused_is_not_stored_later() -> None:
    store = Store()
    store.may_go.set()
    await store.begin(save((1, 1)))
    store.consumers.forget("c")
    store.failing = lmdb.DiskError("no space")
    with pytest.raises(StorageFailedError, match="no space"):
        await store.begin(save((1, 7), name="refused"))
    assert not store.consumers.saves.of("refused")
    store.failing = None
    await store.begin(save((2, 3), name="other"))
    assert list(store.rows) == [(b"other", 2)]
