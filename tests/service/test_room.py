"""Room on the disk and in the tail: checked before a mutation is numbered."""

import asyncio
import errno
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.raw import RawClient, seqnos_of, start_at
from tests.service.bucket_state import serving, started
from upr.config import ServerConfig
from upr.engine.recovery import Undo
from upr.engine.tail import Tail
from upr.service.buckets import room as room_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.room import WaitingRoom
from upr.service.storage_trouble import Failing, Troubles
from upr.storage.directory import DataDirectory
from upr.storage.store import Store
from upr.storage.undone import undone_files
from upr_client.testing.memory import run_block
from upr_protocol.block import Block, build_block
from upr_protocol.errors import NoRoomError, StorageFailedError, TooManyError
from upr_protocol.failover import FailoverLog
from upr_protocol.wire.codec import encode_block
from upr_protocol.wire.v1 import admin_service_pb2 as admin


def test_writes_that_wait_are_bounded_in_bytes_and_small_ones_have_a_room_of_their_own() -> None:
    room = WaitingRoom()
    with ExitStack() as large:
        for _ in range(3):
            large.enter_context(room.waiting(20 * 2**20))
        with pytest.raises(
            TooManyError, match="waiting writes would be 83886080 bytes; must be at most 67108864"
        ) as refused:
            large.enter_context(room.waiting(20 * 2**20))
        assert refused.value.retriable
        with ExitStack() as small:
            for _ in range(192):
                small.enter_context(room.waiting(256 * 2**10))
            with pytest.raises(TooManyError):
                small.enter_context(room.waiting(1))
        with room.waiting(1):
            pass
    # Nothing is left of either.
    with room.waiting(64 * 2**20):
        pass


@pytest.mark.asyncio
async def test_a_full_disk_refuses_writes_before_numbering_and_resumes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 10**9
    monkeypatch.setattr(room_module, "free_bytes", lambda path: room)
    monkeypatch.setattr(room_module, "LOOK_SECONDS", 0)
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0")
    async with serving(config) as server, RawClient(server.address) as client:
        writer = await client.writer("p")
        await writer.write([(b"a", b"1")], number=1)
        follow = await client.follow()
        await follow.start(*(start_at(p) for p in range(1024)))
        await follow.until("frame")
        before = await client.partitions()
        room = room_module.BUCKET_BYTES
        refusal = (await writer.write([(b"a", b"2")], number=2)).refused
        assert (refusal.reason, refusal.retriable) == ("NO_ROOM", True)
        assert "room on the disk is 0 bytes above the reserve" in refusal.message
        # A write behind the refused one may not overtake it.
        writer.previous = 2
        later = (await writer.write([(b"a", b"3")], number=3)).refused
        assert later.reason == "WRITE_OUT_OF_ORDER"
        assert await client.partitions() == before
        room = 10**9
        # A definite refusal burns the number: what was refused comes again under another one.
        writer.previous = 1
        assert list(seqnos_of(await writer.write([(b"a", b"2")], number=4)).values()) == [(1, 2)]
        await follow.until("frame")


@pytest.mark.asyncio
async def test_the_tail_stays_bounded_under_writes(tmp_path: Path) -> None:
    limit = 200_000
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0", tail_bytes=limit)
    largest = 0
    async with serving(config) as server, RawClient(server.address) as client:
        (bucket_host,) = server._catalog.hosts
        writer = await client.writer("")
        for i in range(60):
            await writer.write([(b"key %d" % (i * 100 + j), b"v" * 200) for j in range(100)])
            largest = max(largest, bucket_host.bucket.tail.bytes)
        assert largest < 2 * limit + 100_000
        follow = await client.follow()
        await follow.start(*(start_at(p, until_now=True) for p in range(1024)))
        blocks, _ = await follow.blocks_until_ended(1024)
        assert sum(block.rows for block in blocks) == 6000
        await follow.close()
        assert bucket_host.bucket.tail.first > 0, "nothing was flushed"


def _large_block() -> Block:
    """A block with keys of all slices of a flush."""
    return build_block([b"key %d" % i for i in range(100)], [b"v" * 4096] * 100)


async def _fill(host: BucketService, size: float) -> None:
    """Write large blocks until the tail has so many bytes."""
    while host.bucket.tail.bytes < size:
        await host.write(_large_block(), b"", None, 0)


@pytest.mark.asyncio
async def test_bulk_writes_fill_the_tail_as_slices_are_stored_and_small_ones_do_not_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 2**20
    host = started(BucketService(folder, ServerConfig(folder, tail_bytes=8 * mib)))
    put, slices, go_on = host.disk.store.put_flush, list[int](), threading.Semaphore(0)

    def held(*args: Any) -> None:
        slices.append(len(slices))
        assert go_on.acquire(timeout=WAIT_SECONDS)
        put(*args)

    monkeypatch.setattr(host.disk.store, "put_flush", held)
    large = _large_block()
    small, tail = build_block([b"key"], [b"v"]), host.bucket.tail

    async def all_numbered_but_those_that_wait() -> int:
        before = -1
        while before != (before := sum(task.done() for task in tasks)):
            await pass_turns()
        return before

    async with asyncio.timeout(WAIT_SECONDS):
        # Three fifths of the limit, at which a flush begins.
        await _fill(host, 4.8 * mib)
        await until(lambda: slices)
        began, at = tail.bytes, time.monotonic()
        tasks = [asyncio.create_task(host.write(large, b"", None, 0)) for _ in range(16)]
        numbered = await all_numbered_but_those_that_wait()
        # Two slices are worth a quarter of what was left.
        assert began < tail.bytes < began + (8 * mib - began) / 4 + large.column_bytes + mib // 10
        await host.write(small, b"", None, 0)
        assert await all_numbered_but_those_that_wait() == numbered
        go_on.release(2)
        await until(lambda: len(slices) == 3)
        more = await all_numbered_but_those_that_wait()
        assert numbered < more < 16
        assert host.flusher.busy
        go_on.release(1000)
        await asyncio.gather(*tasks)
        # What several writes wait at once counts once.
        assert 0 < host.disk.traffic.waiting.seconds < time.monotonic() - at
        assert await host.close()


@pytest.mark.asyncio
async def test_bulk_writes_are_taken_up_to_the_whole_limit_while_flushes_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 2**20
    host = started(BucketService(folder, ServerConfig(folder, tail_bytes=8 * mib)))
    tried, go_on, tail = list[int](), threading.Semaphore(0), host.bucket.tail

    def fails(*_: Any) -> None:
        tried.append(len(tried))
        assert go_on.acquire(timeout=WAIT_SECONDS)
        raise OSError(errno.EIO, "no")

    async with asyncio.timeout(WAIT_SECONDS):
        with monkeypatch.context() as patch:
            patch.setattr(host.disk.store, "put_flush", fails)
            await _fill(host, 4.8 * mib)
            await until(lambda: tried)
            go_on.release()
            # It is tried again, and known to fail.
            await until(lambda: len(tried) == 2)
            with pytest.raises(StorageFailedError, match="the tail cannot be stored"):
                await _fill(host, 2 * 8 * mib)
            assert tail.bytes >= 8 * mib
            go_on.release(1000)
        assert await host.close()


def test_the_reserve_is_what_storing_the_tails_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    mib, free = 2**20, 100 * 2**20
    asked = 0
    wanted: list[str] = []

    def free_bytes(path: Path) -> int:
        nonlocal asked
        asked += 1
        return free

    monkeypatch.setattr(room_module, "free_bytes", free_bytes)
    monkeypatch.setattr(room_module, "LOOK_SECONDS", 3600.0)
    disk, tails = room_module.DiskRoom(Path()), {"a": Tail(), "b": Tail()}
    for name, tail in tails.items():
        disk.add(tail, partial(wanted.append, name))
    # A byte of a tail is one in the journal and two in the store.
    assert disk.left() == (100 - 2 * 3) * mib // 3
    tails["a"].bytes, tails["a"].volatile_bytes = 20 * mib, 5 * mib
    disk.changed()
    assert disk.left() == (100 - 2 * 3 - 2 * 20 - 5) * mib // 3
    assert disk.above_reserve() == disk.left() * 3
    # Between two looks what is numbered is counted, and nobody is asked.
    before = asked
    disk.take(mib)
    assert disk.left() == (100 - 2 * 3 - 2 * 20 - 5 - 3) * mib // 3
    assert asked == before
    with disk.claimed(30 * mib):
        assert disk.left() == (100 - 2 * 3 - 2 * 20 - 5 - 30) * mib // 3
    assert disk.left() == (100 - 2 * 3 - 2 * 20 - 5) * mib // 3
    disk.wanted()
    assert wanted == ["a"]
    disk.remove(tails["a"])
    assert disk.left() == (100 - 3) * mib // 3


@pytest.mark.asyncio
async def test_who_finds_no_room_waits_for_the_tail_to_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "LOOK_SECONDS", 0)
    room = 10**9
    monkeypatch.setattr(room_module, "free_bytes", lambda path: room)
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0")
    async with serving(config) as server, RawClient(server.address) as client:
        writer = await client.writer("")
        await writer.write([(b"a", b"v" * 300_000)])
        # With the tail as it is nothing fits; once it is stored there is room for as much again.
        room = room_module.BUCKET_BYTES + 3 * 310_000
        for _ in range(3):
            assert not (await writer.write([(b"a", b"v" * 300_000)])).HasField("refused")
        status = await client.admin.GetStatus(admin.GetStatusRequest(), timeout=30)
        assert status.buckets[0].tail_limit_bytes < 500_000


def test_of_several_troubles_the_gravest_is_the_problem() -> None:
    troubles = Troubles("b", lambda: None)
    full = OSError(errno.ENOSPC, "No space left on device")
    seen = []
    # As a disk fills: what hurts nobody needs most room, and begins first.
    for what in (Failing.MERGE, Failing.PURGE, Failing.POSITIONS, Failing.ROOM, Failing.FLUSH):
        troubles.begins(what, full)
        problem = troubles.problem()
        assert problem is not None
        seen.append(problem.message.partition(",")[0])
    assert seen == [Failing.MERGE, Failing.MERGE, Failing.POSITIONS, Failing.ROOM, Failing.ROOM]
    for what in (Failing.ROOM, Failing.FLUSH, Failing.POSITIONS, Failing.MERGE, Failing.PURGE):
        troubles.ends(what)
    assert troubles.problem() is None


@pytest.mark.asyncio
async def test_tries_to_undo_that_find_no_room_leave_no_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Store.write_recovery

    def full(*arguments: Any, undone: Any = (), **more: Any) -> None:
        # By then what is undone is in a file.
        if undone:
            raise lmdb.DiskError("mdb_txn_commit: No space left on device")
        write(*arguments, **more)

    directory = DataDirectory(tmp_path / "replica")
    catalog = Catalog(directory, ServerConfig(directory.path, replicate_from=("127.0.0.1:1",)))
    catalog.start(partial(asyncio.sleep, 0))
    host = await catalog.create("some", version=7, active=False)
    await host.adopt({3: FailoverLog.born(7, epoch=1)}, {3: 1})
    block = run_block(3, [(1, b"k", b"v")], 0, 1, 1)
    await host.receive(block, encode_block(block), [])
    undo = {3: Undo(0, FailoverLog.born(9, epoch=2), 2)}
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write_recovery", full)
        for _ in range(2):
            with pytest.raises(StorageFailedError, match="could be undone"):
                await catalog.reopen("some", undo)
            assert catalog.find("some").bucket.partitions.high[3] == 1
            assert undone_files(directory.path) == []
    await catalog.reopen("some", undo)
    assert len(undone_files(directory.path)) == 1
    assert await asyncio.wait_for(catalog.close(), WAIT_SECONDS)
    directory.close()


@pytest.mark.asyncio
async def test_a_new_bucket_takes_no_room_from_the_others(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 2**20
    monkeypatch.setattr(room_module, "free_bytes", lambda path: room)
    monkeypatch.setattr(room_module, "LOOK_SECONDS", 0)
    catalog.start(partial(asyncio.sleep, 0))
    others = catalog.find("default")
    while len(catalog.hosts) == 1:
        room += 2**20
        with suppress(NoRoomError):
            await catalog.create("new")
    await others.write(build_block([b"k"], [b"v"]), b"", None, 0)
    room = 2**30
    assert await asyncio.wait_for(catalog.close(), WAIT_SECONDS)
