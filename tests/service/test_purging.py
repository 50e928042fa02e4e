"""Purging and merging under a bucket's host: interrupted, without room, and met by damage."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pytest
import pytest_asyncio

from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.service.keys import some_keys
from upr.config import ServerConfig
from upr.service.admin import AdminMethods, Process
from upr.service.buckets import compactor as compactor_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import create_bucket
from upr.service.storage_trouble import Failing
from upr.storage.blocks import Replacement
from upr.storage.directory import DataDirectory
from upr.storage.keyspace import partition_key
from upr_protocol.block import build_block
from upr_protocol.errors import BucketGoneError, NoRoomError
from upr_protocol.limits import PURGE_HOLDERS_MAX
from upr_protocol.wire.v1 import admin_service_pb2 as admin

P, Q = 9, 11
WITHOUT_TOMBSTONES = 12


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[BucketService]:
    """A bucket whose partition P has a tombstone at 3 that may go; nothing is merged by itself."""
    async with hosting(tmp_path) as made:
        yield made


@asynccontextmanager
async def hosting(folder: Path, compression: str = "") -> AsyncIterator[BucketService]:
    directory = DataDirectory(folder / "data")
    config = ServerConfig(data=folder, tombstone_seconds=1e-6)
    host = BucketService(create_bucket(directory, "default", compression), config)
    for partition in (P, Q):
        gone, kept, last = some_keys(partition, 3)
        await write(host, [(gone, b"v"), (kept, b"v")])
        await write(host, [(gone, None), (last, b"v")])
    yield host
    await host.close()
    directory.close()


async def write(host: BucketService, rows: Sequence[tuple[bytes, bytes | None]]) -> None:
    """Number, commit and flush, without the tasks that would do so."""
    await host.write(build_block([k for k, _ in rows], [v for _, v in rows]), b"", None, 0)
    commit = host.bucket.take_commit()
    assert commit is not None
    await host._append(commit)
    host.bucket.commit_done(commit)
    assert await host.flusher.flush(wanted=True)


def ends(host: BucketService, partition: int = P) -> list[int]:
    return [head.end for head in host.disk.store.heads(partition)]


async def merge(host: BucketService, *partitions: int) -> None:
    async with host.compactor.turn:
        await host.compactor._merge(partitions)


async def purge(host: BucketService, *partitions: int) -> admin.PurgeResponse:
    """Call Purge as gRPC does, of P unless others are given."""
    catalog: Any = SimpleNamespace(find=lambda _: host)
    methods = AdminMethods(catalog, Process(1, lambda: 0, lambda: 0))
    request = admin.PurgeRequest(bucket="default", partitions=partitions or [P])
    return await methods.Purge(request, None)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_partitions_are_purged_in_one_turn_while_compaction_has_much_to_do(
    host: BucketService,
) -> None:
    """Its turns may take seconds, and there may always be another one."""
    compactor, purges = host.compactor, host.bucket.partitions.purge
    async with compactor.turn:
        call = asyncio.create_task(purge(host, P, Q))
        await pass_turns()
        compaction = asyncio.create_task(compactor.turn.acquire())
        await pass_turns()
    assert await compaction
    purged = purges[[P, Q]].tolist()
    compactor.turn.release()
    assert purged == [3, 3]
    assert [one.purged for one in (await call).partitions] == [1, 1]


@pytest.mark.asyncio
async def test_a_purge_whose_caller_leaves_is_not_stopped_half_way(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, go_on = threading.Event(), threading.Event()
    replace = host.disk.store.replace

    def slow(replacements: Sequence[Replacement]) -> None:
        there.set()
        assert go_on.wait(WAIT_SECONDS)
        replace(replacements)

    monkeypatch.setattr(host.disk.store, "replace", slow)
    call = asyncio.create_task(purge(host))
    try:
        assert await asyncio.to_thread(there.wait, WAIT_SECONDS)
        call.cancel()
        await asyncio.wait({call})
        # Until it is stored a reader at 0 would get what the tombstone deletes, and go on behind it.
        assert host.bucket.purging[P] == 3
        assert host.compactor.turn.locked()
    finally:
        go_on.set()
    async with asyncio.timeout(WAIT_SECONDS), host.compactor.turn:
        assert ends(host) == [4]
    assert not host.bucket.purging.any()


@pytest.mark.asyncio
async def test_the_value_under_a_tombstone_that_stays_goes(host: BucketService) -> None:
    partition = 13
    (key,) = some_keys(partition, 1)
    await write(host, [(key, b"v" * 100_000)])
    await write(host, [(key, None)])
    result = await host.compactor.purge(partition, worth=0.01)
    assert (result.tombstones.count, result.purged) == (1, 0)
    assert [holder.kind for holder in result.holders] == ["newest"]
    (head,) = host.disk.store.heads(partition)
    assert (head.rows, head.end) == (1, 2)
    assert head.size < 1000
    # It is not written again and again.
    written = host.disk.counters.merge_output_rows
    await host.compactor.purge(partition, worth=0.01)
    assert host.disk.counters.merge_output_rows == written


@pytest.mark.asyncio
async def test_the_lowest_holders_are_named_and_the_others_counted(host: BucketService) -> None:
    """All names of a thousand in each partition would be more than a message."""
    consumers, ids = host.bucket.consumer_positions, host.bucket.partitions.newest_id
    for seqno in (2, 1):
        for i in range(PURGE_HOLDERS_MAX):
            at = np.array([seqno], np.uint64)
            consumers.acknowledge(f"{seqno} {i:03}", np.array([P]), at, ids[[P]], 5)
    (one,) = (await purge(host)).partitions
    assert (one.old_tombstones, one.purged, one.more_holders) == (1, 0, PURGE_HOLDERS_MAX)
    assert [(h.kind, h.seqno) for h in one.holders] == [("consumer", 1)] * PURGE_HOLDERS_MAX
    assert {h.name for h in one.holders} == {f"1 {i:03}" for i in range(PURGE_HOLDERS_MAX)}
    for i in range(PURGE_HOLDERS_MAX):
        consumers.forget(f"2 {i:03}")
    (one,) = (await purge(host)).partitions
    assert (len(one.holders), one.more_holders) == (PURGE_HOLDERS_MAX, 0)


@pytest.mark.asyncio
async def test_a_shutdown_waits_for_a_purge_whose_caller_left(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    replace = host.disk.store.replace

    def slow(replacements: Sequence[Replacement]) -> None:
        assert goes_on.wait(WAIT_SECONDS)
        replace(replacements)

    monkeypatch.setattr(host.disk.store, "replace", slow)
    call = asyncio.create_task(purge(host))
    await until(host.bucket.purging.any)
    call.cancel()
    await asyncio.wait({call})
    host.compactor.stop()
    finishing = asyncio.create_task(host.compactor.finish())
    await pass_turns()
    is_waiting = not finishing.done()
    goes_on.set()
    await finishing
    assert is_waiting
    assert not host.compactor.turn.locked()
    assert not host.bucket.purging.any()


@pytest.mark.asyncio
async def test_a_purge_waits_for_its_transactions_before_readers_go_on(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    replace = host.disk.store.replace

    def watched(replacements: Sequence[Replacement]) -> None:
        seen.append((int(host.bucket.purging[P]), int(host.bucket.partitions.purge[P])))
        replace(replacements)

    monkeypatch.setattr(host.disk.store, "replace", watched)
    await merge(host, P)
    assert seen == [(3, 3)]
    assert not host.bucket.purging.any()


@pytest.mark.asyncio
async def test_a_purge_without_room_ends_at_once_and_holds_up_no_reader(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.disk.room, "above_reserve", lambda: 0)
    with pytest.raises(NoRoomError, match="room on the disk is 0 bytes"):
        await asyncio.wait_for(host.compactor.purge(P), WAIT_SECONDS)
    assert not host.bucket.purging.any()
    assert ends(host) == [2, 4]


@pytest.mark.asyncio
async def test_a_purge_that_fails_once_its_caller_has_left_disturbs_nobody(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    entered, let = threading.Event(), threading.Event()

    def failing(*_: object) -> None:
        entered.set()
        assert let.wait(WAIT_SECONDS)
        raise BucketGoneError("bucket default was dropped")

    monkeypatch.setattr(host.disk.store, "heads", failing)
    purge = asyncio.create_task(host.compactor.purge(P))
    assert await asyncio.to_thread(entered.wait, WAIT_SECONDS)
    purge.cancel()
    with pytest.raises(asyncio.CancelledError):
        await purge
    let.set()
    await until(lambda: not host.compactor._work)
    await asyncio.sleep(0)
    gc.collect()
    assert unhandled == []


@pytest.mark.asyncio
async def test_a_merge_that_waits_for_room_lets_others_have_their_turn(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compactor_module, "_RETRY_SECONDS", 0.01)
    asked = asyncio.Event()
    size = 0

    def room() -> int:
        asked.set()
        return size

    monkeypatch.setattr(host.disk.room, "above_reserve", room)
    task = asyncio.create_task(host.compactor.run())
    async with asyncio.timeout(WAIT_SECONDS):
        await asked.wait()
        assert (await host.compactor.purge(P, dry_run=True)).purged == 1
        assert ends(host) == [2, 4]
        size = 1 << 40
        await until(lambda: ends(host) == [4])
    host.compactor.stop()
    await task


@pytest.mark.asyncio
async def test_a_damaged_row_of_a_partition_keeps_only_that_one_from_being_merged(
    host: BucketService,
) -> None:
    with host.disk.store._env.begin(write=True) as txn:
        txn.put(partition_key(P), b"not a row", db=host.disk.store._partitions)
    await merge(host, P, Q)
    assert set(host.bucket.partitions.problems) == {P}
    assert (ends(host), ends(host, Q)) == ([2, 4], [4])
    assert P not in host.compactor._backlog.waiting, "it is merged in vain for ever"
    assert not host.bucket.purging.any()


@pytest.mark.asyncio
async def test_who_purges_is_told_that_the_store_cannot_be_written(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> None:
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    monkeypatch.setattr(host.disk.store, "replace", full)
    (answer,) = (await purge(host)).partitions
    assert (answer.problem.reason, answer.problem.retriable) == ("STORAGE_FAILED", True)
    assert not host.bucket.purging.any()


@pytest.mark.asyncio
async def test_little_that_is_much_when_not_compressed_is_not_merged_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(tmp_path, "zstd") as host:
        (key,) = some_keys(P, 1)
        for _ in range(6):
            await write(host, [(key, b"v" * 2**20)])
        monkeypatch.setattr(compactor_module, "BATCH_BYTES", 4 * 2**20)
        whole: list[int] = []
        direct = host.compactor._direct

        async def noted(ranges: Any, limits: Any) -> Any:
            whole.extend(one.plain for one in ranges)
            return await direct(ranges, limits)

        monkeypatch.setattr(host.compactor, "_direct", noted)
        assert sum(head.size for head in host.disk.store.heads(P)) < 2**16
        await merge(host, P, Q)
        assert sum(head.rows for head in host.disk.store.heads(P)) == 3
        assert all(size <= 4 * 2**20 for size in whole)


@pytest.mark.asyncio
async def test_a_sweep_frees_what_few_tombstones_have_below(
    host: BucketService, sweeping: None
) -> None:
    keys = some_keys(Q, 600)
    await write(host, [(key, b"v") for key in keys[:-1]] + [(keys[-1], bytes(10**6))])
    await write(host, [(keys[-1], None)])
    await write(host, [(keys[0], b"the newest row stays")])
    before = host.disk.store.used_bytes()
    async with swept(host):
        await until(lambda: host.disk.store.used_bytes() < before - 10**6 // 2)


@pytest.mark.asyncio
async def test_a_sweep_frees_what_a_few_new_rows_supersede(
    host: BucketService, sweeping: None
) -> None:
    (key,) = some_keys(WITHOUT_TOMBSTONES, 1)
    await write(host, [(key, bytes(10**6))])
    await write(host, [(key, b"small")])
    before = host.disk.store.used_bytes()
    compaction = asyncio.create_task(host.compactor.run())
    async with swept(host):
        await until(lambda: host.disk.store.used_bytes() < before - 10**6 // 2)
    await compaction


@pytest.mark.asyncio
async def test_a_sweep_goes_on_behind_a_partition_without_room(
    host: BucketService, sweeping: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = some_keys(P, 9)[-1]
    await write(host, [(key, bytes(3_000_000))])
    await write(host, [(key, b"small")])
    monkeypatch.setattr(host.disk.room, "above_reserve", lambda: 10**6)
    table = host.bucket.partitions
    async with swept(host):
        await until(lambda: table.purge[Q] == 3)
        await until(lambda: Failing.PURGE in host.disk.troubles)
        # Else who resumes below it rolls back, though nothing was purged.
        assert table.purge[P] == 0


@pytest.mark.asyncio
async def test_the_size_that_a_quota_counts_is_measured_after_compaction(
    host: BucketService,
) -> None:
    key = some_keys(Q, 9)[-1]
    for value in (bytes(10**6), b"small", bytes(2 * 10**6)):
        await write(host, [(key, value)])
    quota = host.disk.quota
    await until(lambda: quota.used == host.disk.store.used_bytes())
    before = quota.used
    await merge(host, Q)
    await until(lambda: quota.used < before)


@pytest.fixture
def sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sweeps follow one another at once."""
    monkeypatch.setattr(compactor_module, "SWEEP_SECONDS_MIN", 0.01)


@asynccontextmanager
async def swept(host: BucketService) -> AsyncIterator[None]:
    sweep = asyncio.create_task(host.compactor.sweep())
    yield
    host.compactor.stop()
    await sweep
