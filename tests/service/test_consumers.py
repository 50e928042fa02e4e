"""Registered consumers over real gRPC: what is kept over restarts and crashes, and who may say what."""

import asyncio
import struct
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import lmdb
import numpy as np
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, poll, until
from tests.raw import RawClient, RawFollow, start_at
from tests.service.bucket_state import connected, started
from tests.service.test_positions import PARTITION, fill
from upr.config import ServerConfig
from upr.engine.consumers import Consumers
from upr.service import admin as consumer_methods
from upr.service.buckets import keepers as keepers_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.keepers import ConsumerSaver, Rows
from upr.service.storage_trouble import Troubles
from upr_client import AsyncClient as Client
from upr_client import FilePositions
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


def ack(*positions: tuple[int, int]) -> wire.Ack:
    return wire.Ack(positions=b"".join(struct.pack("<IQ", *one) for one in positions))


async def consumers(client: RawClient, *, with_positions: bool = True) -> list[admin.ConsumerInfo]:
    request = admin.ListConsumersRequest(bucket="default", with_positions=with_positions)
    response = await client.admin.ListConsumers(request, timeout=WAIT_SECONDS)
    return list(response.consumers)


async def forget(client: RawClient, name: str) -> bool:
    request = admin.ForgetConsumerRequest(bucket="default", name=name)
    response = await client.admin.ForgetConsumer(request, timeout=WAIT_SECONDS)
    return bool(response.forgotten)


async def seqno_of(client: RawClient, name: str) -> int | None:
    """Return the consumer's position in PARTITION, None without one."""
    for info in await consumers(client):
        for position in info.positions:
            if (info.name, position.partition) == (name, PARTITION):
                return position.seqno
    return None


async def until_seqno(client: RawClient, name: str, seqno: int | None) -> None:
    await poll(partial(seqno_of, client, name), lambda found: found == seqno)


async def following(
    client: RawClient, name: str, seqno: int = 0, failover_id: int | None = None
) -> RawFollow:
    """Open a call and a stream of PARTITION; where there is something to read, read the first frame."""
    follow = await client.follow(consumer=name)
    (answer,) = await follow.start(start_at(PARTITION, seqno, failover_id))
    assert answer.HasField("started"), answer
    if answer.started.high_seqno > seqno:
        await follow.until("frame")
    return follow


@pytest.mark.asyncio
async def test_a_position_survives_a_clean_restart_and_generations_never_come_again(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        follow = await following(client, "indexer")
        assert await consumers(client) == []
        await follow.send(ack=ack((PARTITION, 7)))
        await until_seqno(client, "indexer", 7)
        (info,) = await consumers(client)
        assert (info.connected, info.partitions, info.lag) == (True, 1, 3)
        assert info.generation == follow.opened.generation
        assert info.last_ack_time > 1_600_000_000_000_000
        ((failover_id, _),) = (await client.logs(PARTITION))[0]
        assert info.positions[0].failover_id == failover_id
        assert not (await consumers(client, with_positions=False))[0].positions
        second = await following(client, "indexer", 7, failover_id)
        await second.send(ack=ack((PARTITION, 8)))
        await until_seqno(client, "indexer", 8)
        generation = second.opened.generation
        assert generation > follow.opened.generation
    assert server.terminate() == 0
    server.start()
    async with RawClient(server.target) as client:
        (info,) = await consumers(client)
        assert (info.name, info.connected, info.generation) == ("indexer", False, generation)
        assert (await client.follow(consumer="another")).opened.generation > generation
        assert [(at.partition, at.failover_id, at.seqno) for at in info.positions] == [
            (PARTITION, failover_id, 8)
        ]


@pytest.mark.asyncio
async def test_a_crash_loses_at_most_what_was_acknowledged_last(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        follow = await following(client, "indexer")
        await follow.send(ack=ack((PARTITION, 6)))
        await until_seqno(client, "indexer", 6)
        # Forgetting another one waits for a save, which stores this position too.
        other = await following(client, "other")
        await other.send(ack=ack((PARTITION, 1)))
        await until_seqno(client, "other", 1)
        assert await forget(client, "other")
        await follow.send(ack=ack((PARTITION, 9)))
        await until_seqno(client, "indexer", 9)
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert await seqno_of(client, "indexer") in (6, 9)
        assert await seqno_of(client, "other") is None


@pytest.mark.asyncio
async def test_positions_are_stored_while_the_server_runs(server_process: StartServer) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        follow = await following(client, "indexer")
        await follow.send(ack=ack((PARTITION, 6)))
        await until_seqno(client, "indexer", 6)
        store = next((server.data / "buckets").glob("*/store"))
        environment = lmdb.open(str(store), readonly=True, max_dbs=16)
        table = environment.open_db(b"consumers", create=False)
        async with asyncio.timeout(WAIT_SECONDS):
            while not _entries(environment, table):
                await consumers(client)
        environment.close()


def _entries(environment: lmdb.Environment, table: Any) -> int:
    with environment.begin() as txn:
        return int(txn.stat(table)["entries"])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("position", "words"),
    [
        ((1024, 1), "partition of an Ack is 1024"),
        ((PARTITION, 2**48), str(2**48)),
        ((PARTITION, 11), "seqno 11, it was sent up to 10"),
    ],
)
async def test_a_wrong_ack_ends_the_call_and_is_not_kept(
    target: str, position: tuple[int, int], words: str
) -> None:
    async with RawClient(target) as client:
        await fill(client, 10)
        follow = await following(client, "indexer")
        await follow.send(ack=ack((PARTITION, 5), position))
        while (message := await follow.read()).WhichOneof("message") != "ended" or (
            message.ended.streams
        ):
            pass
        assert message.ended.problem.reason == "INVALID_ARGUMENT"
        assert words in message.ended.problem.message
        await follow.close()
        assert await consumers(client) == []


@pytest.mark.asyncio
async def test_forget_removes_it_for_good_until_the_next_ack(server_process: StartServer) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        follow = await following(client, "indexer")
        await follow.send(ack=ack((PARTITION, 9)))
        await until_seqno(client, "indexer", 9)
        assert await forget(client, "indexer")
        assert not await forget(client, "indexer")
        assert await consumers(client) == []
        await follow.send(ack=ack((PARTITION, 10)))
        await until_seqno(client, "indexer", 10)
        assert await forget(client, "indexer")
    assert server.terminate() == 0
    server.start()
    async with RawClient(server.target) as client:
        assert await consumers(client) == []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await forget(client, "")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.asyncio
async def test_a_consumer_of_the_sdk_that_reads_to_now_is_registered_at_the_end(
    target: str, tmp_path: Path
) -> None:
    async with Client(target) as client:
        bucket = client.bucket()
        await bucket.write_many([(b"key %d" % i, b"value") for i in range(3000)])
        positions = FilePositions(tmp_path / "positions")
        async with bucket.changes(resume=positions, until="now", consumer="backup") as changes:
            async for _ in changes.batches():
                pass
        (found,) = await client.admin.consumers(bucket)
        assert (found.name, found.partitions, found.lag) == ("backup", 1024, 0)
        assert found.positions == {}
        (found,) = await client.admin.consumers(bucket, with_positions=True)
        assert sum(at.seqno for at in found.positions.values()) == 3000
        assert await client.admin.forget_consumer(bucket, "backup")
        assert not await client.admin.forget_consumer(bucket, "backup")


@pytest.mark.asyncio
async def test_more_consumers_than_are_kept_go_on_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("upr.engine.consumers.CONSUMERS_MAX", 1)
    async with connected(tmp_path) as (_, client):
        await fill(client, 10)
        first = await following(client, "first")
        await first.send(ack=ack((PARTITION, 2)))
        await until_seqno(client, "first", 2)
        second = await following(client, "second")
        for seqno in (1, 2, 3):
            await second.send(ack=ack((PARTITION, seqno)))
        await fill(client, 11)
        await second.until("frame")
        await second.close()
        assert [info.name for info in await consumers(client)] == ["first"]
        await first.close()
    told = [r for r in caplog.records if "are not kept" in r.getMessage()]
    assert len(told) == 1


@pytest.mark.asyncio
async def test_what_could_not_be_stored_is_stored_later() -> None:
    known = Consumers()
    written: Rows = {}
    failing = True

    async def write(rows: object) -> None:
        assert callable(rows)
        if failing:
            raise lmdb.DiskError("no space")
        written.update(rows())

    saver = ConsumerSaver(known, write, Troubles("b", lambda: None))
    known.acknowledge("c", np.array([5]), np.array([8], np.uint64), np.array([6], np.uint64), now=1)
    with pytest.raises(lmdb.DiskError):
        await saver.save()
    failing = False
    await saver.save()
    assert [(key, row.seqno) for key, row in written.items() if row] == [((b"c", 5), 8)]


@pytest.mark.asyncio
async def test_more_consumers_than_go_into_one_message_are_listed_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_methods, "LIST_BYTES", 300)
    names = [f"consumer-{i:03}" for i in range(40)]
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        partitions = np.arange(4)
        for name in names:
            seqnos = np.zeros(4, np.uint64)
            host.bucket.consumer_positions.acknowledge(name, partitions, seqnos, seqnos, 5)
        request = admin.ListConsumersRequest(bucket="default", with_positions=True)
        first = await client.admin.ListConsumers(request, timeout=WAIT_SECONDS)
        assert first.more
        assert 0 < len(first.consumers) < 20
        async with Client(server.address) as sdk:
            found = await sdk.admin.consumers("default", with_positions=True)
            assert [info.name for info in found] == names
            assert all(len(info.positions) == 4 for info in found)


@pytest.mark.asyncio
async def test_a_consumer_that_nobody_uses_is_forgotten_after_a_time(
    server_process: StartServer,
) -> None:
    server = server_process("--consumer-expiry", "1s", "--log-format", "text")
    async with RawClient(server.target) as client:
        await fill(client, 10)
        stays = await following(client, "stays")
        await stays.send(ack=ack((PARTITION, 5)))
        goes = await following(client, "goes")
        await goes.send(ack=ack((PARTITION, 5)))
        await until_seqno(client, "goes", 5)
        await goes.close()
        await until_seqno(client, "goes", None)
        assert "nobody has used it for long" in server.log_text()
        assert "consumer=goes" in server.log_text()
        # Who is connected uses it, whatever it says.
        assert await seqno_of(client, "stays") == 5
        assert "consumer=stays" not in server.log_text()
    assert server.terminate() == 0
    server.start()
    async with RawClient(server.target) as client:
        assert [info.name for info in await consumers(client)] in ([], ["stays"])


@pytest.mark.asyncio
async def test_a_consumer_that_cannot_be_removed_is_told_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise lmdb.DiskError(f"{tmp_path}: No space left on device")

    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        seqnos = np.zeros(1, np.uint64)
        host.bucket.consumer_positions.acknowledge("c", np.arange(1), seqnos, seqnos, 5)
        with monkeypatch.context() as failing:
            failing.setattr(host.disk.store, "put_consumers", fail)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await forget(client, "c")
        words = caught.value.details() or ""
        assert "No space left on device" in words
        assert str(tmp_path) not in words


@pytest.mark.asyncio
async def test_expiry_of_consumers_and_cuts_goes_on_after_a_moment_without_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers_module, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(keepers_module, "CUT_LOOK_SECONDS", 0.01)
    host = BucketService(folder, ServerConfig(data=folder, consumer_seconds=0.01))
    looks: Counter[str] = Counter()

    def failing(owner: object, name: str) -> None:
        work = getattr(owner, name)

        def look(*arguments: Any) -> Any:
            looks[name] += 1
            if looks[name] == 1:
                raise MemoryError
            return work(*arguments)

        monkeypatch.setattr(owner, name, look)

    failing(host.bucket.consumer_positions, "expire")
    failing(host.bucket.cuts, "ended")
    started(host)
    await until(lambda: host.problem is not None or min(looks["expire"], looks["ended"]) > 1)
    assert host.problem is None
    assert await host.close()
