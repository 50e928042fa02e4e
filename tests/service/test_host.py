"""The bucket's host and the Write call, in one process: what fails beside the main path."""

import asyncio
import errno
import threading
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.service.bucket_state import started
from tests.service.keys import some_keys
from tests.storage.stored_blocks import numbers_of
from upr.config import ServerConfig
from upr.engine.partitions import ACTIVE, REPLICA
from upr.engine.recovery import Undo
from upr.service import key_value as writes_module
from upr.service.buckets import bucket_service as bucket_service_module
from upr.service.buckets import room as room_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.key_value import KeyValueMethods
from upr.service.overload import callers as callers_module
from upr.service.overload.intake import Intake
from upr.service.storage_trouble import Failing
from upr.storage.directory import DataDirectory
from upr.storage.keyspace import (
    PartitionRow,
    ProducerRow,
    producer_key,
    producer_time_key,
)
from upr_protocol.block import Block, build_block
from upr_protocol.errors import (
    AlreadyExistsError,
    DataDirectoryError,
    NoRoomError,
    ShuttingDownError,
    StorageFailedError,
    UprError,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types


def config(folder: Path, **settings: Any) -> ServerConfig:
    return ServerConfig(data=folder, **settings)


def rows(*keys: bytes) -> Block:
    return build_block(list(keys), [b"v" * 100] * len(keys))


@pytest.mark.asyncio
async def test_a_damaged_producer_row_does_not_stop_flushing(folder: Path) -> None:
    host = BucketService(folder, config(folder))
    with host.disk.store._env.begin(write=True) as txn:
        txn.put(producer_key(b"somebody"), b"not a row", db=host.disk.store._producers)
        txn.put(producer_key(b"somebody", 1), b"not a row", db=host.disk.store._producers)
        txn.put(producer_time_key(0, b"somebody"), b"", db=host.disk.store._producer_times)
    assert await host.producers.forget() == 1
    assert host.disk.store.producer_number(b"somebody") == 0
    assert host.disk.store.producer_rows(b"somebody") == {}
    started(host)
    await host.write(rows(b"a"), b"", None, 0)
    assert not any(task.done() for task in host._tasks)
    assert await asyncio.wait_for(host.close(), WAIT_SECONDS)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["panic", "flusher", "compactor"])
async def test_what_no_retry_mends_fails_the_bucket_and_its_health(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    told = asyncio.Event()
    tries = 0

    async def failed() -> None:
        assert host.problem is not None
        told.set()

    async def unexpected(*_: object) -> None:
        raise ValueError("/secret/place")

    def panics(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC: Update of meta page failed")

    host = BucketService(folder, config(folder))
    host.start(failed)
    await host.write(rows(b"a"), b"", None, 0)
    await host.durable(0)
    if way == "panic":
        monkeypatch.setattr(host.disk.store, "put_flush", panics)
        host.flusher.wanted.set()
    elif way == "flusher":
        monkeypatch.setattr(host.flusher, "flush", unexpected)
        host.flusher.wanted.set()
    else:
        monkeypatch.setattr(host.compactor, "_merge", unexpected)
        host.compactor.note([1])
    await asyncio.wait_for(told.wait(), WAIT_SECONDS)
    with pytest.raises(StorageFailedError) as refused:
        await host.write(rows(b"b"), b"", None, 0)
    assert "/secret" not in str(refused.value)
    assert not await asyncio.wait_for(host.close(), WAIT_SECONDS)
    if way == "panic":
        assert tries == 1
        assert "storage failed: no more writes are taken" in caplog.messages


@pytest.mark.asyncio
async def test_a_store_that_fails_at_shutdown_is_not_a_clean_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder)))
    written = await host.write(rows(b"a"), b"", None, 0)
    await host.durable(written.entry)

    def full(*_: Any) -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    monkeypatch.setattr(host.disk.store, "put_flush", full)
    assert not await host.close()


@pytest.mark.asyncio
async def test_a_write_given_up_while_the_proof_goes_leaves_a_clean_shutdown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder)))
    loop = asyncio.get_running_loop()
    cleared = asyncio.Event()
    clear = host._clear_proof_now

    def slow() -> None:
        clear()
        loop.call_soon_threadsafe(task.cancel)
        cleared_by_now()

    def cleared_by_now() -> None:
        loop.call_soon_threadsafe(cleared.set)

    monkeypatch.setattr(host, "_clear_proof_now", slow)
    task = asyncio.create_task(host.write(rows(b"a"), b"", None, 0))
    await cleared.wait()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await host.close()
    again = BucketService(folder, config(folder))
    assert {len(log) for log in again.bucket.partitions.logs} == {1}
    await again.close()


@pytest.mark.asyncio
async def test_a_full_disk_refuses_also_when_the_tail_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder, tail_bytes=1)))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.disk.store, "put_flush", full)
    await host.write(rows(b"a"), b"", None, 0)
    monkeypatch.setattr(room_module, "free_bytes", lambda _: 0)
    with pytest.raises(NoRoomError):
        await asyncio.wait_for(host.write(rows(b"a"), b"", None, 0), 1)
    monkeypatch.undo()
    await host.close()


class Script:
    """A context that reads what the test put in, and keeps what was written."""

    def __init__(self, *messages: Any) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        for message in messages:
            self.messages.put_nowait(message.SerializeToString())
        self.broken = False
        self.begun_reads = 0
        self.lost_reads = 0

    def peer(self) -> str:
        return "test"

    async def read(self) -> Any:
        self.begun_reads += 1
        try:
            return await self.messages.get()
        except asyncio.CancelledError:
            self.lost_reads += 1
            raise

    def has_begun(self, reads: int) -> bool:
        return self.begun_reads == reads

    async def write(self, message: Any) -> None:
        if self.broken:
            raise asyncio.CancelledError
        self.said.put_nowait(message)

    def send(
        self,
        number: int,
        block: Block,
        durability: int = types.DURABILITY_DISK,
        previous: int | None = None,
    ) -> None:
        write = kv.WriteBlock(
            number=number,
            durability=durability,  # type: ignore[arg-type]
            block=block_to_message(block),
            previous_number=number - 1 if previous is None else previous,
        )
        self.messages.put_nowait(kv.WriteRequest(write=write).SerializeToString())


def opening(producer: str) -> kv.WriteRequest:
    return kv.WriteRequest(open=kv.WriteOpen(bucket="default", producer=producer))


@pytest.mark.asyncio
async def test_of_creations_of_one_name_at_once_one_wins(catalog: Catalog) -> None:
    outcomes = await asyncio.gather(
        *(catalog.create("one") for _ in range(3)), return_exceptions=True
    )
    assert sum(isinstance(one, AlreadyExistsError) for one in outcomes) == 2
    assert sum(host.bucket.identity.name == "one" for host in catalog.hosts) == 1
    await catalog.close()


@pytest.mark.asyncio
async def test_a_writer_gone_before_it_was_answered_gives_the_producer_back(
    catalog: Catalog,
) -> None:
    host = started(catalog.find("default"))
    context: Any = Script(opening("p"))
    context.broken = True
    with pytest.raises(asyncio.CancelledError):
        await KeyValueMethods(catalog, Intake()).Write(None, context)
    assert not host.bucket.knows_producer(b"p")
    await host.close()


@pytest.mark.asyncio
async def test_a_writer_that_came_while_the_server_stops_is_told_so(catalog: Catalog) -> None:
    """Its call was not open yet when the others were told, and the stop waited for it in vain."""
    host = started(catalog.find("default"))
    context: Any = Script(opening("p"))
    methods = KeyValueMethods(catalog, Intake())
    methods.shut_down()
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(ShuttingDownError):
            await methods.Write(None, context)
    assert not host.bucket.knows_producer(b"p")
    await host.close()


@pytest.mark.asyncio
async def test_of_many_writers_of_one_host_some_are_served_in_a_round_of_the_loop(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each step of another host's call would wait for all of them."""
    monkeypatch.setattr(callers_module, "ROUND_MESSAGES", 3)
    host = started(catalog.find("default"))
    methods, high = KeyValueMethods(catalog, Intake()), host.bucket.partitions.high
    contexts: list[Any] = [Script(opening(f"p{number}")) for number in range(10)]
    calls = [asyncio.create_task(methods.Write(None, context)) for context in contexts]
    for context in contexts:
        assert (await context.said.get()).HasField("opened")
    # The first of all writes waits for the proof to be removed.
    contexts[0].send(1, build_block([b"k"], [b""]))
    await contexts[0].said.get()
    for context in contexts:
        context.send(1 + (context is contexts[0]), build_block([b"k"], [b""]))
    numbered = [1]
    async with asyncio.timeout(WAIT_SECONDS):
        while numbered[-1] < 1 + len(contexts):
            await asyncio.sleep(0)
            numbered.append(int(high.sum()))
    assert max(np.diff(numbered)) == 3
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await host.close()


@pytest.mark.asyncio
async def test_nothing_overtakes_a_write_that_was_refused_as_a_whole(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(catalog.find("default"))
    key, other = some_keys(3, 2)
    context: Any = Script(opening("p"))
    call = asyncio.create_task(KeyValueMethods(catalog, Intake()).Write(None, context))
    assert (await context.said.get()).HasField("opened")
    free = room_module.BUCKET_BYTES + 2000 * (1 + room_module.GROWTH)
    monkeypatch.setattr(room_module, "free_bytes", lambda _: free)
    monkeypatch.setattr(room_module, "LOOK_SECONDS", 0)
    # The large one does not fit, the small one behind it would.
    context.send(1, build_block([key], [b"v" * 5000]))
    context.send(2, build_block([other], [b"small"]))
    first, second = [(await context.said.get()).result for _ in range(2)]
    assert first.refused.reason == "NO_ROOM"
    assert second.refused.reason == "WRITE_OUT_OF_ORDER", second
    monkeypatch.undo()
    # As the hint says: the refused one again, then those behind it.
    context.send(3, build_block([key], [b"v" * 5000]), previous=0)
    context.send(4, build_block([other], [b"small"]))
    again = [(await context.said.get()).result for _ in range(2)]
    assert [result.duplicate for result in again] == [False, False]
    assert host.bucket.partitions.high[3] == 2
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await host.close()


@pytest.mark.asyncio
async def test_a_repeated_write_is_not_acknowledged_before_the_first_is_durable(
    folder: Path, tmp_path: Path
) -> None:
    host = BucketService(folder, config(folder))
    host.bucket.proven = False
    call = host.bucket.open_producer(b"p", 0)
    # Nothing is committed: the host's loops do not run.
    for number in range(1, 200):
        host.bucket.write(rows(b"a"), b"p", call, number, 1)
    again = host.bucket.write(rows(b"a"), b"p", call, 1, 1, {})
    assert again.duplicate
    assert again.entry >= host.bucket.tail.durable
    host.bucket.fail(StorageFailedError("test over"))
    await host.close()


def test_a_start_cut_short_does_not_spoil_the_directory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "upr-stream.json.new").write_text("{")
    try:
        DataDirectory(tmp_path / "data").close()
    except DataDirectoryError as error:
        raise AssertionError(str(error)) from error


@pytest.mark.asyncio
async def test_writes_wait_when_the_tail_holds_twice_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder, tail_bytes=1000)))
    held = threading.Event()
    put = host.disk.store.put_flush

    def hold(*args: Any) -> None:
        assert held.wait(WAIT_SECONDS)
        put(*args)

    monkeypatch.setattr(host.disk.store, "put_flush", hold)
    tasks = [asyncio.create_task(host.write(rows(b"a"), b"", None, 0)) for _ in range(20)]
    await tasks[0]
    await pass_turns()
    numbered = sum(task.done() for task in tasks)
    assert 0 < numbered < 5
    assert host.bucket.tail.bytes < 4000
    held.set()
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*tasks)
    assert await host.close()


@pytest.mark.asyncio
async def test_nothing_is_numbered_while_the_proof_is_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder)))
    number, proofs = host.bucket.write, []

    def look(*args: Any) -> Any:
        proofs.append(host.disk.store.proof())
        return number(*args)

    monkeypatch.setattr(host.bucket, "write", look)
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(host.write(rows(b"a"), b"", None, 0) for _ in range(5)))
    assert proofs == [None] * 5
    assert await host.close()


def held_journal(host: BucketService, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have no commit appended until the event is set."""
    held = threading.Event()
    append = host.disk.journal.append

    def hold(commit: Any) -> int:
        assert held.wait(WAIT_SECONDS)
        written: int = append(commit)
        return written

    monkeypatch.setattr(host.disk.journal, "append", hold)
    monkeypatch.setattr(host.disk.journal, "record_of", lambda _: None)
    return held


@pytest.mark.asyncio
@pytest.mark.parametrize("together", [False, True])
async def test_answers_wait_for_the_disk_in_order(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    host = started(catalog.find("default"))
    held = held_journal(host, monkeypatch)
    asked = kv.WriteOpen(bucket="default", results_together=together)
    context: Any = Script(kv.WriteRequest(open=asked))
    call = asyncio.create_task(KeyValueMethods(catalog, Intake()).Write(None, context))
    assert (await context.said.get()).HasField("opened")
    context.send(1, rows(b"a"), types.DURABILITY_MEMORY)
    assert (await context.said.get()).result.number == 1
    context.send(2, rows(b"a"))
    context.send(3, rows(b"a"), types.DURABILITY_MEMORY)
    await until(lambda: sum(host.bucket.partitions.high.tolist()) == 3)
    await pass_turns()
    assert context.said.empty(), "a disk write, or one behind it, was answered before the fsync"
    assert sum(host.bucket.partitions.high.tolist()) == 3
    held.set()
    async with asyncio.timeout(WAIT_SECONDS):
        messages = [await context.said.get() for _ in range(1 if together else 2)]
    told = [result for message in messages for result in message.results.results]
    told = told if together else [message.result for message in messages]
    assert [result.number for result in told] == [2, 3]
    assert context.said.empty()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await host.close()


@pytest.mark.asyncio
async def test_an_answer_that_is_not_due_is_not_told_with_one_that_is(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(catalog.find("default"))
    entered, held = threading.Semaphore(0), threading.Semaphore(0)
    append = host.disk.journal.append

    def hold(commit: Any) -> int:
        entered.release()
        assert held.acquire(timeout=WAIT_SECONDS)
        written: int = append(commit)
        return written

    monkeypatch.setattr(host.disk.journal, "append", hold)
    monkeypatch.setattr(host.disk.journal, "record_of", lambda _: None)
    asked = kv.WriteOpen(bucket="default", results_together=True)
    context: Any = Script(kv.WriteRequest(open=asked))
    call = asyncio.create_task(KeyValueMethods(catalog, Intake()).Write(None, context))
    assert (await context.said.get()).HasField("opened")
    context.send(1, rows(b"a"))
    # The second is numbered while the first is on its way to the disk, and so goes there after it.
    assert await asyncio.to_thread(entered.acquire, timeout=WAIT_SECONDS)
    context.send(2, rows(b"a"))
    await until(lambda: sum(host.bucket.partitions.high.tolist()) == 2)
    for number in (1, 2):
        held.release()
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await context.said.get()).result.number == number
        await pass_turns()
        assert context.said.empty()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await host.close()


@pytest.mark.asyncio
async def test_the_answer_to_a_repeated_write_waits_for_the_disk_too(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(catalog.find("default"))
    held = held_journal(host, monkeypatch)
    calls, contexts = [], []
    for _ in range(2):
        context: Any = Script(opening("p"))
        calls.append(asyncio.create_task(KeyValueMethods(catalog, Intake()).Write(None, context)))
        assert (await context.said.get()).HasField("opened")
        context.send(1, rows(b"a"))
        contexts.append(context)
        # The third is begun when the write is numbered, or found to be there.
        await until(partial(context.has_begun, 3))
    assert sum(host.bucket.partitions.high.tolist()) == 1
    await pass_turns()
    early = [not context.said.empty() for context in contexts]
    held.set()
    async with asyncio.timeout(WAIT_SECONDS):
        told = [(await context.said.get()).result for context in contexts]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await host.close()
    assert early == [False, False], "it was answered before the fsync of the first"
    assert [result.duplicate for result in told] == [False, True]


@pytest.mark.asyncio
async def test_what_recovery_decided_is_stored_before_anything_is_served(folder: Path) -> None:
    host = BucketService(folder, config(folder))
    host.disk.store.clear_proof()
    host.close_files()
    host = BucketService(folder, config(folder))
    rows_now = host.disk.store.partitions()
    proof = host.disk.store.proof()
    host.close_files()
    assert proof
    for partition, log in enumerate(host.bucket.partitions.logs):
        row = rows_now[partition]
        assert isinstance(row, PartitionRow)
        assert len(log) == 2
        assert row.log == log


@pytest.mark.asyncio
async def test_a_disk_that_is_full_at_the_first_write_refuses_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder)))
    clear = host.disk.store.clear_proof

    def full() -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    monkeypatch.setattr(host.disk.store, "clear_proof", full)
    with pytest.raises(NoRoomError, match="No space left"):
        await host.write(rows(b"a"), b"", None, 0)
    assert host.bucket.tail.end == 0
    monkeypatch.setattr(host.disk.store, "clear_proof", clear)
    await host.durable((await host.write(rows(b"a"), b"", None, 0)).entry)
    assert await host.close()


@pytest.mark.asyncio
async def test_producers_that_cannot_be_forgotten_do_not_end_flushing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = BucketService(folder, config(folder))
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def full(*_: Any) -> int:
        loop.call_soon_threadsafe(asked.set)
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    monkeypatch.setattr(host.disk.store, "forget_producers", full)
    started(host)
    await asyncio.wait_for(asked.wait(), WAIT_SECONDS)
    await host.durable((await host.write(rows(b"a"), b"", None, 0)).entry)
    host.flusher.wanted.set()
    while host.bucket.tail.first != host.bucket.tail.end:
        await asyncio.wait_for(host.disk.next_change(), WAIT_SECONDS)
    assert host.bucket.failure is None
    assert await host.close()


@pytest.mark.asyncio
async def test_what_was_numbered_and_not_stored_leaves_no_proof(folder: Path) -> None:
    host = BucketService(folder, config(folder))
    host.disk.store.clear_proof()
    host.bucket.proven = False
    # Its loops do not run, so that it is never committed.
    host.bucket.write(rows(b"a"), b"", None, 0, 1)
    assert not await host.close()
    again = BucketService(folder, config(folder))
    again.close_files()
    assert all(len(log) == 2 for log in again.bucket.partitions.logs)


@pytest.mark.asyncio
async def test_a_bucket_that_failed_leaves_no_proof_though_all_is_stored(folder: Path) -> None:
    host = started(BucketService(folder, config(folder)))
    written = await host.write(rows(b"a"), b"", None, 0)
    await host.durable(written.entry)
    assert await host.flusher.flush(wanted=True)
    host.bucket.fail(StorageFailedError("a task of the bucket failed"))
    assert not await host.close()
    again = BucketService(folder, config(folder))
    again.close_files()
    assert all(len(log) == 2 for log in again.bucket.partitions.logs)


@pytest.mark.asyncio
async def test_a_cut_is_held_until_no_restart_can_bring_it_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder)))
    await host.durable((await host.write(rows(b"a"), b"", None, 0)).entry)
    partition = int(np.flatnonzero(host.bucket.partitions.high)[0])
    await host.cuts.create("c", [partition], 10**9)
    there, go_on = threading.Event(), threading.Event()
    put = host.disk.store.put_cuts

    def slow(changes: Any) -> None:
        there.set()
        assert go_on.wait(WAIT_SECONDS)
        put(changes)

    monkeypatch.setattr(host.disk.store, "put_cuts", slow)
    release = asyncio.create_task(host.cuts.release("c"))
    try:
        assert await asyncio.to_thread(there.wait, WAIT_SECONDS)
        assert host.bucket.cuts.pinned(partition) == (1,)
    finally:
        go_on.set()
    assert await release
    assert host.bucket.cuts.pinned(partition) == ()
    assert await host.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["shed", "shut_down", "cancelled"])
async def test_a_call_that_ends_leaves_its_read_to_grpc(catalog: Catalog, ending: str) -> None:
    """A read that is cancelled never frees the message that had come for it."""
    host = started(catalog.find("default"))
    methods = KeyValueMethods(catalog, Intake())
    context: Any = Script(opening(""))
    call = asyncio.create_task(methods.Write(None, context))
    assert (await context.said.get()).HasField("opened")
    context.send(1, rows(b"k"))
    assert (await context.said.get()).result.number == 1
    (served,) = methods._calls
    if ending == "cancelled":
        call.cancel()
    else:
        getattr(served, ending)()
    await asyncio.gather(call, return_exceptions=True)
    assert context.lost_reads == 0
    # It comes too late, and is neither numbered nor answered.
    context.send(2, rows(b"k"))
    await pass_turns()
    assert not context.messages.qsize()
    assert context.said.empty()
    assert int(host.bucket.partitions.high.max()) == 1
    await host.close()


class CountedTurns:
    """Turns that are given at once, and remember what was charged."""

    def __init__(self) -> None:
        self.charged: list[float] = []

    async def turn(self) -> None:
        pass

    def charge(self, seconds: float) -> None:
        self.charged.append(seconds)


@pytest.mark.long
@pytest.mark.asyncio
async def test_large_writes_take_turns_and_smaller_ones_do_while_the_loop_is_late(
    catalog: Catalog,
) -> None:
    """Else four writers of large values leave those who write a row each a few of their writes a second."""
    host = started(catalog.find("default"))
    methods = KeyValueMethods(catalog, Intake())
    turns: Any = CountedTurns()
    methods.bulk = turns
    calls, contexts = [], []
    for _ in range(2):
        context: Any = Script(opening(""))
        calls.append(asyncio.create_task(methods.Write(None, context)))
        assert (await context.said.get()).HasField("opened")
        contexts.append(context)

    async def charged(value_bytes: int) -> int:
        """Write a value twice; how often a turn was charged. The second is read when the first has had its turn."""
        before = len(turns.charged)
        for number in (1, 2):
            contexts[0].send(number, build_block([b"k"], [bytes(value_bytes)]))
            assert (await contexts[0].said.get()).result.number == number
        return len(turns.charged) - before

    assert await charged(100 * 2**10) == 0
    assert await charged(2 * 2**20) >= 1
    assert turns.charged[0] >= 2 * 2**20 * writes_module.BYTE_SECONDS
    methods.delays.recent = 2 * writes_module.LATE_SECONDS
    assert await charged(100 * 2**10) >= 1
    await charged(100)
    assert await charged(100) == 0
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await host.close()


class HeldTurns:
    """Turns that nobody gets before ``given`` is set."""

    def __init__(self) -> None:
        self.given = asyncio.Event()

    async def turn(self) -> None:
        await self.given.wait()

    def charge(self, seconds: float) -> None:
        pass


@pytest.mark.asyncio
async def test_a_large_write_waits_for_its_turn_before_it_is_numbered_and_few_may_wait(
    catalog: Catalog,
) -> None:
    """Else each of sixty new calls has its first large write sent to all followers at once."""
    host = started(catalog.find("default"))
    methods = KeyValueMethods(catalog, Intake())
    turns: Any = HeldTurns()
    methods.bulk = turns
    block = build_block([b"k"], [bytes(15 * 2**20)])
    calls, contexts = [], []
    for _ in range(6):
        context: Any = Script(opening(""))
        calls.append(asyncio.create_task(methods.Write(None, context)))
        assert (await context.said.get()).HasField("opened")
        contexts.append(context)
    contexts[0].send(1, rows(b"small"))
    assert len((await contexts[0].said.get()).result.runs) > 0
    for context in contexts:
        context.send(2, block)
    answers = [asyncio.ensure_future(context.said.get()) for context in contexts]
    while len([one for one in answers if one.done()]) < 2:
        await asyncio.wait(
            [one for one in answers if not one.done()], return_when="FIRST_COMPLETED"
        )
    for one in answers:
        if one.done():
            refused = one.result().result.refused
            assert (refused.reason, refused.retriable) == ("TOO_MANY", True)
    assert int(host.bucket.partitions.high.sum()) == 1
    turns.given.set()
    results = [one.result for one in await asyncio.gather(*answers)]
    assert sum(result.HasField("refused") for result in results) == 2
    assert int(host.bucket.partitions.high.sum()) == 5
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await host.close()


@pytest.mark.asyncio
async def test_a_thread_that_cannot_be_started_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder)))
    with monkeypatch.context() as patch:

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        host.compactor.note([1])
        with pytest.raises(StorageFailedError, match="can't start new thread"):
            await host.write(rows(b"a"), b"", None, 0)
        await until(lambda: Failing.MERGE in host.disk.troubles)
    await host.durable((await host.write(rows(b"a"), b"", None, 0)).entry)
    await until(lambda: Failing.MERGE not in host.disk.troubles)
    assert await host.close()


@pytest.mark.asyncio
async def test_a_server_that_was_fenced_acknowledges_again_once_it_is_promoted(
    folder: Path,
) -> None:
    host = started(BucketService(folder, config(folder)))
    await host.step_down(fenced=True)
    await host.activate(2, {})
    written = await host.write(rows(b"a"), b"", None, 0)
    await asyncio.wait_for(host.durable(written.entry), WAIT_SECONDS)
    assert await asyncio.wait_for(host.close(), WAIT_SECONDS)


@pytest.mark.asyncio
async def test_what_is_active_numbers_in_its_own_epoch_until_it_steps_down(folder: Path) -> None:
    host = started(BucketService(folder, config(folder)))
    table = host.bucket.partitions
    host.promised = lambda: 5
    host.raise_epoch()
    assert set(table.epoch.tolist()) == {1}
    stepping = asyncio.create_task(host.step_down(fenced=True))
    await asyncio.sleep(0)
    # In the same step, and on disk afterwards.
    assert (set(table.state.tolist()), set(table.epoch.tolist())) == ({REPLICA}, {5})
    await stepping
    stored = host.disk.store.partitions().values()
    assert {row.epoch for row in stored if isinstance(row, PartitionRow)} == {5}
    assert await asyncio.wait_for(host.close(), WAIT_SECONDS)


@pytest.mark.asyncio
async def test_states_that_could_not_be_stored_are_stored_by_the_next_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, config(folder)))

    def states() -> set[int]:
        stored = host.disk.store.partitions().values()
        return {row.state for row in stored if isinstance(row, PartitionRow)}

    def full(*_: Any) -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(host.disk.store, "put_logs", full)
        with pytest.raises(lmdb.DiskError):
            await host.step_down(fenced=False)
    assert states() == {ACTIVE}
    await host.step_down(fenced=False)
    assert states() == {REPLICA}
    assert await asyncio.wait_for(host.close(), WAIT_SECONDS)


@pytest.mark.asyncio
async def test_an_active_partition_takes_over_no_log(folder: Path) -> None:
    host = started(BucketService(folder, config(folder)))
    table = host.bucket.partitions
    before = table.logs[3]
    with pytest.raises(UprError, match="active or dead"):
        await host.adopt({3: FailoverLog.born(7, epoch=9)}, {3: 9})
    assert (table.state[3], table.logs[3], table.epoch[3]) == (ACTIVE, before, 1)
    assert await asyncio.wait_for(host.close(), WAIT_SECONDS)


@pytest.mark.asyncio
async def test_an_undo_takes_producers_numbers_along_or_finds_no_room_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told() -> None:
        pass

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    directory = DataDirectory(tmp_path / "replica")
    catalog = Catalog(directory, config(directory.path, replicate_from=("127.0.0.1:1",)))
    catalog.start(told)
    host = await catalog.create("some", version=7, active=False)
    undo = {p: Undo(0, FailoverLog.born(7, epoch=9), 9) for p in (3, 4, 20)}
    # On the log that is taken over, and on none.
    given = {3: 5, 4: 7, 20: 5, 21: 5}
    rows, now = {p: ProducerRow(1, id_, 0, 1) for p, id_ in given.items()}, host.disk.clock.now()
    told_of = numbers_of(rows, now)
    host.disk.store.put_producers([(b"p", told_of), (b"q", told_of)], lambda *_: False)
    with monkeypatch.context() as patch:
        patch.setattr(bucket_service_module, "write_undone", full)
        with pytest.raises(StorageFailedError, match="could be undone") as refused:
            await catalog.reopen("some", undo)
    assert refused.value.retriable
    again = catalog.find("some")
    assert again is not host
    assert (again.bucket.partitions.epoch[3], catalog.damaged) == (1, [])
    assert again.disk.store.producer_rows(b"q").keys() == given.keys()
    # The next call asks again.
    again = await catalog.reopen("some", undo)
    assert again.bucket.partitions.epoch[3] == 9
    for name in (b"p", b"q"):
        assert again.disk.store.producer_rows(name).keys() == {4, 21}
    assert await asyncio.wait_for(catalog.close(), WAIT_SECONDS)
    directory.close()
