"""Get over real gRPC: the newest values out of tail and store, while others write, flush and merge."""

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import until
from tests.raw import RawClient, error_of
from tests.service.bucket_state import connected
from tests.service.keys import some_keys
from tests.service.test_compression import damage, zstd_server
from tests.service.test_merging import Writer
from tests.storage.stored_blocks import block_of
from upr.engine.partitions import ACTIVE, REPLICA, Partitions
from upr.service import key_value as gets_module
from upr.service.key_value import find_newest, is_here
from upr.storage.blocks import Replacement
from upr.storage.search import Lookup, StoreSearch
from upr_client import AsyncClient
from upr_protocol.errors import (
    BehindError,
    BucketGoneError,
    DataDamagedError,
    WriteUndoneError,
)
from upr_protocol.failover import FailoverLog, WrittenSeqno
from upr_protocol.limits import (
    AT_LEAST_MAX,
    AT_LEAST_SECONDS_MAX,
    GET_CALLS_MAX,
    GET_KEYS_MAX,
    WAITING_GET_BYTES,
    WAITING_GETS_BYTES_MAX,
)
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import key_value_service_pb2 as kv

P = 7


async def refused(client: RawClient, *keys: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get(*keys)
    return caught.value


@pytest.mark.asyncio
@pytest.mark.parametrize("compressed", [False, True])
async def test_it_is_what_was_written_last(server_process: StartServer, compressed: bool) -> None:
    options = ("--tail-bytes", "65536")
    server = zstd_server(server_process) if compressed else server_process(*options)
    writer = Writer(5)
    for part in range(3):
        async with RawClient(server.target) as client:
            writing = await client.writer("")
            for _ in range(25):
                await writer.write(writing)
            ids = {i.partition: i.failover_id for i in await client.partitions()}
            for first in (0, 1000):
                keys = [*writer.keys[first : first + 990], *(b"never %d" % i for i in range(10))]
                answers = await client.get(*keys)
                assert len(answers) == len(keys)
                newest = {
                    row.key: (row.seqno, row.value, ids[p])
                    for p, model in writer.model.items()
                    for row in model.rows
                }
                for key, answer in zip(keys, answers, strict=True):
                    seqno, value, _ = newest.get(key, (0, None, 0))
                    got = answer.value if answer.HasField("value") else None
                    assert (answer.seqno, got) == (seqno, value), key
                    assert key not in newest or answer.failover_id == newest[key][2]
            await writing.close()
        if part < 2:
            assert server.terminate() == 0
            server.start()


@pytest.mark.asyncio
async def test_what_is_not_durable_yet_is_there(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_sync=hold:{hold}"})
    (key,) = some_keys(P, 1)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(key, b"v")], durability=1)
        # The same key may be asked for twice.
        first, second, other = await client.get(key, key, b"other")
        assert (first.value, first.seqno) == (second.value, second.seqno) == (b"v", 1)
        assert (other.HasField("value"), other.seqno) == (False, 0)
        hold.unlink()


@pytest.mark.asyncio
async def test_bad_requests_are_refused(target: str) -> None:
    async with RawClient(target) as client:
        for keys in ((), (b"",), (b"k" * 4097,), (b"k",) * (GET_KEYS_MAX + 1)):
            error = await refused(client, *keys)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(await client.get(*((b"k" * 4096,) * GET_KEYS_MAX))) == GET_KEYS_MAX
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.get(b"k", bucket="none")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.long
@pytest.mark.asyncio
async def test_values_that_do_not_fit_are_asked_for_again(server_process: StartServer) -> None:
    server = server_process()
    keys = [b"key %d" % i for i in range(6)]
    sizes = [20 * 2**20, 7 * 2**20, 7 * 2**20, 2**20, 4 * 2**20, 10]
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for key, size in zip(keys, sizes, strict=True):
            await writer.write([(key, b"v" * size)])
        for _ in range(2):
            left, got = list(keys), []
            rounds = 0
            while left:
                answers = await client.get(*left)
                assert answers
                got += [len(answer.value) for answer in answers]
                left = left[len(answers) :]
                rounds += 1
            assert got == sizes
            assert rounds == 3
            assert server.terminate() == 0
            server.start()


@pytest.mark.asyncio
async def test_damage_is_the_answer_of_its_keys_only(server_process: StartServer) -> None:
    server = zstd_server(server_process)
    mine, other = some_keys(P, 20), some_keys(P + 1, 1)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(key, b"v" * 500) for key in (*mine, *other)])
    assert server.terminate() == 0
    (folder,) = server.data.glob("buckets/*")
    damage(folder / "store", P)
    server.start()
    async with RawClient(server.target) as client:
        for _ in range(2):
            bad, good = await client.get(mine[3], *other)
            assert bad.problem.reason == "DATA_DAMAGED"
            assert not bad.HasField("value")
            assert good.value == b"v" * 500
        # What is in the tail is found before the damage is met.
        writer = await client.writer("")
        assert not (await writer.write([(mine[3], b"new")])).HasField("refused")
        (again,) = await client.get(mine[3])
        assert again.value == b"new"


@pytest.mark.asyncio
async def test_a_key_that_is_written_stored_and_merged_behind_the_search_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(P, 4)
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        writer = await client.writer("")
        await host.compactor.turn.acquire()
        await writer.write([(keys[0], b"old")])
        await host.flusher.flush(wanted=True)
        for i in range(40):
            await writer.write([(keys[1], b"%d" % i)])
            await host.flusher.flush(wanted=True)
        bites = 0
        bite = StoreSearch.bite
        reached, go = threading.Event(), threading.Event()

        def held(search: StoreSearch) -> bool:
            nonlocal bites
            bites += 1
            if bites == 2:
                reached.set()
                assert go.wait(20)
            return bite(search)

        monkeypatch.setattr("upr.storage.search.BITE_BYTES", 1)
        monkeypatch.setattr(StoreSearch, "bite", held)
        asking = asyncio.create_task(client.get(keys[0], keys[2]))
        await until(reached.is_set)
        # The newest blocks were looked through; the key moves up there, and goes from below.
        await writer.write([(keys[0], b"new")])
        await host.flusher.flush(wanted=True)
        # As a large merge does, which writes only the blocks anew that lose rows.
        left = block_of(P, 0, [], end=1, horizon=42, time=0)
        await host.disk.in_store_thread(
            lambda: host.disk.store.replace([Replacement(P, [1], [left[1:]])])
        )
        go.set()
        found, missing = await asking
        # Not before: a merge would bring what moved up to where the search stands.
        host.compactor.turn.release()
        assert (found.value, found.seqno) == (b"new", 42)
        assert missing.seqno == 0


@pytest.mark.asyncio
async def test_a_flush_between_tail_and_store_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(P, 3)
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        writer = await client.writer("")
        await writer.write([(keys[0], b"stored")])
        await host.flusher.flush(wanted=True)
        await writer.write([(keys[1], b"in the tail")])
        step = asyncio.Event()
        in_reader = host.disk.in_reader

        async def slowly(call: Callable[[], bool]) -> bool:
            result = await in_reader(call)
            if not step.is_set():
                step.set()
                await host.flusher.flush(wanted=True)
            return result

        monkeypatch.setattr(host.disk, "in_reader", slowly)
        lookup = Lookup(keys, 1000)
        await find_newest(host, lookup)
        assert {i: value for i, (_, value) in lookup.found.items()} == {
            0: b"stored",
            1: b"in the tail",
        }
        assert host.bucket.tail.first == host.bucket.tail.end


@pytest.mark.asyncio
async def test_a_flush_before_the_tail_is_searched_hides_no_newer_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Indexed and searched by a reader thread, which comes late.
    monkeypatch.setattr("upr.storage.search.QUICK_BLOCKS", 0)
    (key,) = some_keys(P, 1)
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        # The block with the older value stays one of its own.
        host.compactor.stop()
        writer = await client.writer("")
        await writer.write([(key, b"old")])
        await host.flusher.flush(wanted=True)
        await writer.write([(key, b"new")])
        in_reader = host.disk.in_reader

        async def late(call: Callable[[], bool]) -> bool:
            await host.flusher.flush(wanted=True)
            return await in_reader(call)

        monkeypatch.setattr(host.disk, "in_reader", late)
        lookup = Lookup([key], 1000)
        await find_newest(host, lookup)
        assert lookup.found[0][1] == b"new"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("limits", "threads"),
    [
        ([], [False, False]),
        # The second search finds an index of all that is there.
        (["storage.search.QUICK_BLOCKS"], [True, False]),
        (["storage.search.QUICK_BYTES"], [True, False]),
        # In the first one there is nothing to compare yet.
        (["storage.search.QUICK_ROWS"], [False, True]),
        (["storage.search.BITE_BYTES", "service.key_value.BITE_BYTES"], [True, True]),
    ],
)
async def test_a_tail_is_searched_in_the_event_loop_if_that_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[str], threads: list[bool]
) -> None:
    for limit in limits:
        monkeypatch.setattr(f"upr.{limit}", 1)
    keys = some_keys(P, 2)
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        writer = await client.writer("")
        for key in keys:
            await writer.write([(key, b"v")])
        in_reader, calls = host.disk.in_reader, list[object]()

        async def noted(call: Callable[[], bool]) -> bool:
            calls.append(call)
            return await in_reader(call)

        monkeypatch.setattr(host.disk, "in_reader", noted)
        for expected in threads:
            calls.clear()
            assert [one.value for one in await client.get(*keys)] == [b"v", b"v"]
            assert bool(calls) is expected


@pytest.mark.asyncio
async def test_a_bucket_that_is_dropped_before_a_search_begins_is_gone(tmp_path: Path) -> None:
    (key,) = some_keys(P, 1)
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        await (await client.writer("")).write([(key, b"v")])
        await server._catalog.drop("default")
        with pytest.raises(BucketGoneError):
            await find_newest(host, Lookup([key], 1000))


@pytest.mark.asyncio
async def test_a_few_are_searched_for_at_a_time_and_too_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = most = 0
    go = asyncio.Event()

    async def slowly(*_: object) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1

    async with connected(tmp_path) as (server, client):
        monkeypatch.setattr(gets_module, "find_newest", slowly)
        asked = [asyncio.create_task(client.get(b"k")) for _ in range(GET_CALLS_MAX)]
        await until(lambda: server._writes._open_gets == GET_CALLS_MAX)
        error = await refused(client, b"k")
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        go.set()
        await asyncio.gather(*asked)
        assert most == gets_module.GETS_AT_ONCE
        assert len(await client.get(b"k")) == 1


@pytest.mark.asyncio
async def test_a_partition_that_is_dead_says_so(tmp_path: Path) -> None:
    dead, alive = some_keys(P, 1)[0], some_keys(9, 1)[0]
    async with connected(tmp_path) as (server, client):
        writer = await client.writer("")
        await writer.write([(dead, b"v"), (alive, b"v")])
        host = server._catalog.find("default")
        host.bucket.partitions.kill(P, DataDamagedError("its row is gone"))
        gone, there = await client.get(dead, alive)
        assert gone.problem.message == "its row is gone"
        assert not gone.HasField("value")
        assert there.value == b"v"


def wanted(seqno: int, failover_id: int, seconds: float = 30.0, any_server: bool = False) -> Any:
    """Return a Get of a key of P that waits for a write there."""
    return kv.GetRequest(
        bucket="default",
        keys=some_keys(P, 1),
        at_least=[kv.WrittenSeqno(partition=P, failover_id=failover_id, seqno=seqno)],
        wait_seconds=seconds,
        any_server=any_server,
    )


@pytest.mark.asyncio
async def test_it_waits_for_a_write_and_whoever_gives_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        table = host.bucket.partitions
        failover_id = int(table.newest_id[P])
        writer = await client.writer("")
        await writer.write([(some_keys(P, 1)[0], b"1")])
        # As a replica, until the second write has come.
        table.state[P] = REPLICA
        early = await error_of(client.kv.Get(wanted(2, failover_id, 0.01)))
        assert (early.reason, early.retriable) == ("BEHIND", True)
        assert not host.disk._waiting
        waiting = asyncio.ensure_future(client.kv.Get(wanted(2, failover_id)))
        await until(lambda: bool(host.disk._waiting))
        table.state[P] = ACTIVE
        await writer.write([(some_keys(P, 1)[0], b"2")])
        assert (await waiting).answers[0].value == b"2"
        assert server._writes._waiting_bytes == 0
        # Nobody is behind an active server: an id that it does not have was undone, a seqno above its own never given.
        undone = [
            wanted(seqno, one, 0.01, any_server)
            for seqno, one in ((1, failover_id + 1), (3, failover_id), (10**14, failover_id))
            for any_server in (False, True)
        ]
        for request in undone:
            assert (await error_of(client.kv.Get(request))).reason == "WRITE_UNDONE"
        # Unless another server may have become active without its knowledge.
        with monkeypatch.context() as patch:
            patch.setattr(server._catalog, "is_newest", lambda: False)
            for request in undone:
                assert (await error_of(client.kv.Get(request))).reason == "BEHIND"
        for wrong in (
            wanted(0, failover_id),
            wanted(1, 0),
            wanted(1, failover_id, -1),
            wanted(1, failover_id, AT_LEAST_SECONDS_MAX + 1),
            wanted(1, failover_id, math.nan),
        ):
            assert (await error_of(client.kv.Get(wrong))).reason == "INVALID_ARGUMENT"
        many = wanted(1, failover_id)
        many.at_least.extend(list(many.at_least) * AT_LEAST_MAX)
        assert (await error_of(client.kv.Get(many))).reason == "INVALID_ARGUMENT"


@pytest.mark.asyncio
async def test_gets_that_wait_are_bounded_and_keep_no_other_from_searching(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        request = wanted(1, int(host.bucket.partitions.newest_id[P]))
        host.bucket.partitions.state[P] = REPLICA
        count = WAITING_GETS_BYTES_MAX // (request.ByteSize() + WAITING_GET_BYTES)
        asked = [asyncio.ensure_future(client.kv.Get(request)) for _ in range(count)]
        await until(lambda: len(host.disk._waiting) == count)
        assert (await error_of(client.kv.Get(request))).reason == "TOO_MANY"
        assert await client.get(b"k")
        host.bucket.partitions.state[P] = ACTIVE
        await (await client.writer("")).write([(some_keys(P, 1)[0], b"v")])
        assert {one.answers[0].value for one in await asyncio.gather(*asked)} == {b"v"}


@pytest.mark.asyncio
async def test_a_client_has_its_gets_take_turns(server_process: StartServer) -> None:
    async with AsyncClient(server_process().target, request_timeout=60) as client:
        bucket = client.bucket()
        token = await bucket.set(b"k", b"v")
        for at_least in (None, token):
            asked = (bucket.get(b"k", at_least=at_least) for _ in range(1500))
            assert await asyncio.gather(*asked) == [b"v"] * 1500


@pytest.mark.asyncio
async def test_a_token_of_another_bucket_does_not_have_anybody_begin_again(target: str) -> None:
    async with AsyncClient(target) as client:
        await client.admin.create_bucket("another")
        token = (await client.bucket("another").set(b"k", b"v")).token
        with pytest.raises(BucketGoneError, match="or the token is of another bucket") as caught:
            await client.bucket().get(b"k", at_least=token)
        assert caught.value.hint == "ask with a token of a write into this bucket"


@pytest.mark.asyncio
async def test_a_change_of_role_ends_the_waiting(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        catalog = server._catalog
        host = catalog.find("default")
        failover_id = int(host.bucket.partitions.newest_id[P])
        host.bucket.partitions.state[P] = REPLICA
        requests = (wanted(5, failover_id, any_server=True), wanted(5, failover_id))
        waiting = [asyncio.ensure_future(client.kv.Get(one)) for one in requests]
        await until(lambda: len(host.disk._waiting) == 2)
        catalog.replica = True
        await host.step_down(fenced=False)
        assert (await error_of(waiting[1])).reason == "PARTITION_NOT_ACTIVE"
        assert not waiting[0].done()
        catalog.replica = False
        await host.activate(2, {P: 0})
        # It was promoted without the write.
        assert (await error_of(waiting[0])).reason == "WRITE_UNDONE"


@pytest.mark.asyncio
async def test_a_replica_says_of_no_bucket_that_it_is_gone(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        catalog = server._catalog
        host = catalog.find("default")
        request = wanted(5, int(host.bucket.partitions.newest_id[P]), any_server=True)
        request.bucket_version = host.bucket.identity.version
        newer = kv.GetRequest()
        newer.CopyFrom(request)
        newer.bucket_version ^= 1
        assert (await error_of(client.kv.Get(newer))).reason == "BUCKET_GONE"
        catalog.replica, catalog.owner = True, "active:1"
        host.bucket.partitions.state[P] = REPLICA
        waiting = asyncio.ensure_future(client.kv.Get(request))
        await until(lambda: bool(host.disk._waiting))
        host.leave(BucketGoneError("opened anew", reason="HISTORY_CHANGED", retriable=True))
        for asking in (waiting, client.kv.Get(newer)):
            error = await error_of(asking)
            assert (error.reason, error.owner, error.retriable) == ("BEHIND", "active:1", True)
        opening = wire.Open(bucket="default", bucket_version=newer.bucket_version, any_server=True)
        with pytest.raises(BehindError):
            catalog.to_read(opening)


def test_a_write_within_a_stretch_that_is_not_whole_is_not_here() -> None:
    table = Partitions()
    table.logs = [FailoverLog.born(0xA)] * 1024
    table.newest_id[:] = 0xA
    one = WrittenSeqno(P, 0xA, 5)
    table.state[P], table.high[P], table.complete[P], table.horizon[P] = REPLICA, 7, 4, 9
    assert not is_here(table, one, newest=True)
    table.complete[P] = 5
    assert is_here(table, one, newest=True)
    # What the id is, only the active server knows.
    with pytest.raises(BehindError):
        is_here(table, WrittenSeqno(P, 0xB, 3), newest=True)
    table.state[P] = ACTIVE
    with pytest.raises(WriteUndoneError):
        is_here(table, WrittenSeqno(P, 0xB, 3), newest=True)
