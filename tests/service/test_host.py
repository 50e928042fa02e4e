"""The bucket's host and the Write call, in one process: what fails beside the main path."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.service.keys import some_keys
from upr.config import ServerConfig
from upr.service import host as host_module
from upr.service.catalog import Catalog, create_bucket
from upr.service.host import BucketHost
from upr.service.writes import KeyValueMethods
from upr.storage.directory import DataDirectory
from upr.storage.keyspace import PartitionRow, producer_key
from upr_protocol.block import Block
from upr_protocol.errors import (
    DataDirectoryError,
    NoRoomError,
    StorageFailedError,
)
from upr_protocol.rows import build_block
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types

WAIT_SECONDS = 30.0
TURNS = 1000
"""Turns of the loop after which everything that can go on without the disk has gone on."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    directory = DataDirectory(tmp_path / "data")
    yield create_bucket(directory, "default")
    directory.close()


def config(folder: Path, **settings: Any) -> ServerConfig:
    return ServerConfig(data=folder, **settings)


async def started(host: BucketHost) -> BucketHost:
    async def failed() -> None:
        pass

    host.start(failed)
    return host


def rows(*keys: bytes) -> Block:
    return build_block(list(keys), [b"v" * 100] * len(keys))


@pytest.mark.asyncio
async def test_a_damaged_producer_row_does_not_stop_flushing(folder: Path) -> None:
    host = BucketHost(folder, config(folder))
    with host.store._env.begin(write=True) as txn:
        txn.put(producer_key(b"somebody", 1), b"not a row", db=host.store._producers)
    await host.flusher.forget_producers()
    await started(host)
    await host.write(rows(b"a"), b"", None, 0)
    assert not any(task.done() for task in host._tasks)
    assert await asyncio.wait_for(host.close(), WAIT_SECONDS)


@pytest.mark.asyncio
async def test_a_store_that_fails_at_shutdown_is_not_a_clean_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(BucketHost(folder, config(folder)))
    written = await host.write(rows(b"a"), b"", None, 0)
    await host.durable(written.entry)

    def full(*_: Any) -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    monkeypatch.setattr(host.store, "put_flush", full)
    assert not await host.close()


@pytest.mark.asyncio
async def test_a_write_given_up_while_the_proof_goes_leaves_a_clean_shutdown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(BucketHost(folder, config(folder)))
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
    again = BucketHost(folder, config(folder))
    assert {len(log) for log in again.bucket.partitions.logs} == {1}
    await again.close()


@pytest.mark.asyncio
async def test_a_full_disk_refuses_also_when_the_tail_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(BucketHost(folder, config(folder, tail_bytes=1)))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.store, "put_flush", full)
    await host.write(rows(b"a"), b"", None, 0)
    monkeypatch.setattr(host_module, "disk_room", lambda _: 0)
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
            self.messages.put_nowait(message)
        self.broken = False

    async def read(self) -> Any:
        return await self.messages.get()

    async def write(self, message: Any) -> None:
        if self.broken:
            raise asyncio.CancelledError
        self.said.put_nowait(message)

    def send(self, number: int, block: Block, durability: int = types.DURABILITY_DISK) -> None:
        write = kv.WriteBlock(number=number, durability=durability, block=block_to_message(block))  # type: ignore[arg-type]
        self.messages.put_nowait(kv.WriteRequest(write=write))


def opening(producer: str) -> kv.WriteRequest:
    return kv.WriteRequest(open=kv.WriteOpen(bucket="default", producer=producer))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    directory = DataDirectory(tmp_path / "data")
    yield Catalog(directory, config(tmp_path / "data"))
    directory.close()


@pytest.mark.asyncio
async def test_a_writer_gone_before_it_was_answered_gives_the_producer_back(
    catalog: Catalog,
) -> None:
    host = await started(catalog.find("default"))
    context: Any = Script(opening("p"))
    context.broken = True
    with pytest.raises(asyncio.CancelledError):
        await KeyValueMethods(catalog).Write(None, context)
    assert host.bucket._producers[b"p"].calls == 0
    await host.close()


@pytest.mark.asyncio
async def test_a_first_write_that_is_refused_for_now_keeps_its_place(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(catalog.find("default"))
    key, other = some_keys(3, 2)
    context: Any = Script(opening("p"))
    call = asyncio.create_task(KeyValueMethods(catalog).Write(None, context))
    assert (await context.said.get()).HasField("opened")
    monkeypatch.setattr(host_module, "disk_room", lambda _: 2000)
    # The large one does not fit, the small one behind it would.
    context.send(1, build_block([key], [b"v" * 5000]))
    context.send(2, build_block([other], [b"small"]))
    first, second = [(await context.said.get()).result for _ in range(2)]
    assert first.refused.reason == "NO_ROOM"
    assert second.refused.reason == "WRITE_OUT_OF_ORDER", second
    monkeypatch.undo()
    # As the hint says: the refused one again, then those behind it.
    context.send(1, build_block([key], [b"v" * 5000]))
    context.send(2, build_block([other], [b"small"]))
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
    host = BucketHost(folder, config(folder))
    host.bucket.proven = False
    producer = host.bucket.open_producer(b"p", {})
    # Nothing is committed: the host's loops do not run.
    for number in range(1, 200):
        host.bucket.write(rows(b"a"), b"p", producer, number, 1)
    again = host.bucket.write(rows(b"a"), b"p", producer, 1, 1)
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
async def test_after_a_failed_fsync_no_proof_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(BucketHost(folder, config(folder)))
    written = await host.write(rows(b"a"), b"", None, 0)
    await host.durable(written.entry)

    def failed(*_: Any) -> None:
        raise StorageFailedError("fsync failed")

    monkeypatch.setattr(host.journal, "append", failed)
    written = await host.write(rows(b"a"), b"", None, 0)
    with pytest.raises(StorageFailedError):
        await host.durable(written.entry)
    proofs: list[int] = []
    monkeypatch.setattr(host.store, "write_proof", lambda: proofs.append(1))
    assert not await host.close()
    assert not proofs


@pytest.mark.asyncio
async def test_writes_wait_when_the_tail_holds_twice_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(BucketHost(folder, config(folder, tail_bytes=1000)))
    held = threading.Event()
    put = host.store.put_flush

    def hold(*args: Any) -> None:
        assert held.wait(WAIT_SECONDS)
        put(*args)

    monkeypatch.setattr(host.store, "put_flush", hold)
    tasks = [asyncio.create_task(host.write(rows(b"a"), b"", None, 0)) for _ in range(20)]
    await tasks[0]
    for _ in range(TURNS):
        await asyncio.sleep(0)
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
    host = await started(BucketHost(folder, config(folder)))
    number, proofs = host.bucket.write, []

    def look(*args: Any) -> Any:
        proofs.append(host.store.proof())
        return number(*args)

    monkeypatch.setattr(host.bucket, "write", look)
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(host.write(rows(b"a"), b"", None, 0) for _ in range(5)))
    assert proofs == [False] * 5
    assert await host.close()


@pytest.mark.asyncio
async def test_answers_wait_for_the_disk_in_order(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(catalog.find("default"))
    held = threading.Event()
    append = host.journal.append

    def hold(commit: Any) -> None:
        assert held.wait(WAIT_SECONDS)
        append(commit)

    monkeypatch.setattr(host.journal, "append", hold)
    context: Any = Script(opening(""))
    call = asyncio.create_task(KeyValueMethods(catalog).Write(None, context))
    assert (await context.said.get()).HasField("opened")
    context.send(1, rows(b"a"), types.DURABILITY_MEMORY)
    assert (await context.said.get()).result.number == 1
    context.send(2, rows(b"a"))
    context.send(3, rows(b"a"), types.DURABILITY_MEMORY)
    while sum(host.bucket.partitions.high.tolist()) < 3:
        await asyncio.to_thread(int)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert context.said.empty(), "a disk write, or one behind it, was answered before the fsync"
    assert sum(host.bucket.partitions.high.tolist()) == 3
    held.set()
    async with asyncio.timeout(WAIT_SECONDS):
        assert [(await context.said.get()).result.number for _ in range(2)] == [2, 3]
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await host.close()


@pytest.mark.asyncio
async def test_the_answer_to_a_repeated_write_waits_for_the_disk_too(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(catalog.find("default"))
    held = threading.Event()
    append = host.journal.append

    def hold(commit: Any) -> None:
        assert held.wait(WAIT_SECONDS)
        append(commit)

    monkeypatch.setattr(host.journal, "append", hold)
    calls, contexts = [], []
    for _ in range(2):
        context: Any = Script(opening("p"))
        calls.append(asyncio.create_task(KeyValueMethods(catalog).Write(None, context)))
        assert (await context.said.get()).HasField("opened")
        context.send(1, rows(b"a"))
        contexts.append(context)
        while sum(host.bucket.partitions.high.tolist()) < 1:
            await asyncio.to_thread(int)
    for _ in range(TURNS):
        await asyncio.sleep(0)
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
    host = BucketHost(folder, config(folder))
    host.store.clear_proof()
    host.close_files()
    host = BucketHost(folder, config(folder))
    rows_now = host.store.partitions()
    proof = host.store.proof()
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
    host = await started(BucketHost(folder, config(folder)))
    clear = host.store.clear_proof

    def full() -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    monkeypatch.setattr(host.store, "clear_proof", full)
    with pytest.raises(NoRoomError, match="No space left"):
        await host.write(rows(b"a"), b"", None, 0)
    assert host.bucket.tail.end == 0
    monkeypatch.setattr(host.store, "clear_proof", clear)
    await host.durable((await host.write(rows(b"a"), b"", None, 0)).entry)
    assert await host.close()


@pytest.mark.asyncio
async def test_producers_that_cannot_be_forgotten_do_not_end_flushing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = BucketHost(folder, config(folder))
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def full(*_: Any) -> int:
        loop.call_soon_threadsafe(asked.set)
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    monkeypatch.setattr(host.store, "forget_producers", full)
    await started(host)
    await asyncio.wait_for(asked.wait(), WAIT_SECONDS)
    await host.durable((await host.write(rows(b"a"), b"", None, 0)).entry)
    host.flusher.wanted.set()
    while host.bucket.tail.first != host.bucket.tail.end:
        await asyncio.wait_for(host._next_change(), WAIT_SECONDS)
    assert host.bucket.failure is None
    assert await host.close()


@pytest.mark.asyncio
async def test_what_was_numbered_and_not_stored_leaves_no_proof(folder: Path) -> None:
    host = BucketHost(folder, config(folder))
    host.store.clear_proof()
    host.bucket.proven = False
    # Its loops do not run, so that it is never committed.
    host.bucket.write(rows(b"a"), b"", None, 0, 1)
    assert not await host.close()
    again = BucketHost(folder, config(folder))
    again.close_files()
    assert all(len(log) == 2 for log in again.bucket.partitions.logs)


@pytest.mark.asyncio
async def test_a_bucket_that_failed_leaves_no_proof_though_all_is_stored(folder: Path) -> None:
    host = await started(BucketHost(folder, config(folder)))
    written = await host.write(rows(b"a"), b"", None, 0)
    await host.durable(written.entry)
    assert await host.flush()
    host.bucket.fail(StorageFailedError("a task of the bucket failed"))
    assert not await host.close()
    again = BucketHost(folder, config(folder))
    again.close_files()
    assert all(len(log) == 2 for log in again.bucket.partitions.logs)


@pytest.mark.asyncio
async def test_a_cut_is_held_until_no_restart_can_bring_it_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await started(BucketHost(folder, config(folder)))
    await host.durable((await host.write(rows(b"a"), b"", None, 0)).entry)
    partition = int(np.flatnonzero(host.bucket.partitions.high)[0])
    await host.cuts.create("c", [partition], 10**9)
    there, go_on = threading.Event(), threading.Event()
    put = host.store.put_cuts

    def slow(changes: Any) -> None:
        there.set()
        assert go_on.wait(WAIT_SECONDS)
        put(changes)

    monkeypatch.setattr(host.store, "put_cuts", slow)
    release = asyncio.create_task(host.cuts.release("c"))
    try:
        assert await asyncio.to_thread(there.wait, WAIT_SECONDS)
        assert host.bucket.cuts.pinned(partition) == (1,)
    finally:
        go_on.set()
    assert await release
    assert host.bucket.cuts.pinned(partition) == ()
    assert await host.close()
