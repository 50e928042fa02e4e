"""Starting and stopping: refused directories and addresses, clean restarts, damage, health, reflection."""

import asyncio
import json
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import lmdb
import numpy as np
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.raw import RawClient, all_rows, seqnos_of, start_at
from tests.service.keys import some_keys
from tests.storage.stored_blocks import put_rows
from upr.cli.admin import main as admin
from upr.storage.store import Store
from upr_protocol.errors import DataDamagedError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import FAILOVER_LOG_MAX, SEQNO_MAX
from upr_protocol.wire.codec import block_from_message


def refused(folder: Path, *options: str, status: int = 2) -> str:
    """Start a server that must end with a status, and return the one line it said."""
    folder.mkdir(exist_ok=True)
    server = RunningServer(folder, *options)
    server.launch()
    try:
        assert server.wait() == status, server.log_text()
    finally:
        server.close()
    lines = server.log_text().strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_second_server_on_the_same_directory_is_refused(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process()
    (tmp_path / "data").symlink_to(server.data)
    assert "in use by another server" in refused(tmp_path)
    # Who makes the file anew would have a lock that nobody else has.
    (server.data / "lock").unlink()
    (tmp_path / "server.log").unlink()
    assert "in use by another server" in refused(tmp_path)
    for command in (["check"], ["restore-copy", "--yes"]):
        result = CliRunner().invoke(admin, [*command, str(server.data)])
        assert result.exit_code == 2
        assert "is in use by" in result.output


def test_a_port_in_use_is_refused(target: str, tmp_path: Path) -> None:
    line = refused(tmp_path, "--listen", target)
    assert target in line
    assert "in use" in line


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_an_address_that_is_not_loopback_needs_insecure(tmp_path: Path, address: str) -> None:
    assert "--insecure" in refused(tmp_path, "--listen", address)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text("15\n")
    assert "'PG_VERSION'" in refused(tmp_path)
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["PG_VERSION"]
    assert (tmp_path / "data" / "PG_VERSION").read_text() == "15\n"


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    line = refused(tmp_path)
    assert f"{tmp_path / 'data'}" in line
    assert "cannot be used" in line


@pytest.mark.parametrize(
    ("told", "way_out"), [(99, "a newer one"), (2, "restore that into a new directory")]
)
def test_a_directory_of_another_format_is_refused(
    server_process: StartServer, tmp_path: Path, told: int, way_out: str
) -> None:
    server = server_process()
    assert server.terminate() == 0
    mark = server.data / "upr-stream.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "format": told}))
    (tmp_path / "data").symlink_to(server.data)
    line = refused(tmp_path)
    assert f"is {told}; must be 3" in line
    assert way_out in line


def test_a_damaged_journal_is_refused_with_its_place(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process()

    async def write() -> None:
        async with RawClient(server.target) as client:
            writer = await client.writer("")
            for i in range(3):
                await writer.write([(b"key %d" % i, b"value")])

    asyncio.run(write())
    server.kill()
    (segment,) = server.data.glob("buckets/*/journal/*.journal")
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    (tmp_path / "data").symlink_to(server.data)
    line = refused(tmp_path, status=1)
    assert segment.name in line
    assert "damaged" in line


@pytest.mark.asyncio
async def test_a_clean_restart_changes_nothing(server_process: StartServer) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(b"key %d" % i, b"value") for i in range(3000)])
        before = (await client.partitions(), await client.logs())
    for _ in range(2):
        assert server.terminate() == 0
        server.start()
        async with RawClient(server.target) as client:
            assert (await client.partitions(), await client.logs()) == before


def test_closing_its_terminal_stops_it_cleanly_or_not_at_all(server_process: StartServer) -> None:
    server = server_process()
    os.kill(server.pid, signal.SIGHUP)
    assert server.wait() == 0
    assert "stopping" in server.log_text()
    server.start(prefix=("nohup",))
    status = Path(f"/proc/{server.pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    assert int(ignored.split()[1], 16) & 1 << signal.SIGHUP - 1
    assert server.terminate() == 0


@pytest.mark.asyncio
async def test_a_kill_without_a_write_makes_no_record(server_process: StartServer) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(b"key", b"value")])
    assert server.terminate() == 0
    server.start()
    async with RawClient(server.target) as client:
        before = await client.logs()
        follow = await client.follow()
        await follow.start(*(start_at(p) for p in range(1024)))
        await follow.until("frame")
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert await client.logs() == before


@pytest.mark.asyncio
async def test_the_failover_log_is_as_long_as_the_server_is_told(
    server_process: StartServer,
) -> None:
    server = server_process("--failover-log-records", "3")
    ids: list[int] = []
    for _ in range(4):
        async with RawClient(server.target) as client:
            writer = await client.writer("")
            await writer.write([(some_keys(12, 1)[0], b"value")])
            ((*_, newest),) = await client.logs(12)
            ids.append(newest[0])
        server.kill()
        server.start()
    async with RawClient(server.target) as client:
        assert [i for i, _ in (await client.logs(12))[0][:2]] == ids[2:]
        assert {len(log) for log in await client.logs()} == {3}


@pytest.mark.long
@pytest.mark.asyncio
async def test_the_longest_failover_logs_fit_everywhere(
    server_process: StartServer,
) -> None:
    server = server_process("--failover-log-records", "1000")
    assert server.terminate() == 0
    first, end = 2**48 - 1100, 2**48 - 50
    longest = FailoverLog.from_pairs((2**64 - 1 - i, first + i) for i in range(FAILOVER_LOG_MAX))
    with closing(Store(next(server.data.glob("buckets/*/store")))) as store:
        rows = {
            p: replace(row, log=longest, stored_high=end, complete=end, horizon=end)
            for p, row in store.partitions().items()
            if not isinstance(row, DataDamagedError)
        }
        put_rows(store, rows)
        store.write_proof(np.full(1024, end, np.uint64))
    server.start()
    everything = dict.fromkeys(range(1024))
    async with RawClient(server.target) as client:
        assert await client.logs() == [longest.to_pairs()] * 1024
        answers = (await client.hello(everything, with_log=True)).answers
        assert {len(answer.failover_log) for answer in answers} == {1000}
        follow = await client.follow()
        started = await follow.start(*map(start_at, everything))
        assert {len(answer.started.failover_log) for answer in started} == {1000}
        await follow.close()


@pytest.mark.asyncio
async def test_a_damaged_block_ends_one_stream_only(server_process: StartServer) -> None:
    server = server_process()
    (bad,), (good,) = some_keys(10, 1), some_keys(11, 1)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        seqnos_of(await writer.write([(bad, b"needle in the store"), (good, b"fine")]))
    assert server.terminate() == 0
    (store,) = server.data.glob("buckets/*/store/data.mdb")
    data = bytearray(store.read_bytes())
    at = data.find(b"needle")
    while at != -1:
        data[at] ^= 1
        at = data.find(b"needle", at + 1)
    store.write_bytes(data)
    server.start()
    async with RawClient(server.target) as client:
        follow = await client.follow()
        await follow.start(start_at(10), start_at(11))
        rows: list[Any] = []
        reason = ""
        while not (rows and reason):
            message = await follow.read()
            if message.HasField("frame"):
                rows += all_rows(map(block_from_message, message.frame.blocks))
            elif message.HasField("ended"):
                assert [s.partition for s in message.ended.streams] == [10]
                reason = message.ended.problem.reason
                assert "partition 10" in message.ended.problem.message
        assert reason == "STORAGE_ERROR"
        assert rows == [(11, 1, good, b"fine")]
        writer = await client.writer("")
        await writer.write([(good, b"more")])
        await follow.until("frame")


@pytest.mark.asyncio
async def test_a_lost_failover_log_means_a_new_id_at_0(server_process: StartServer) -> None:
    server = server_process()
    (key,) = some_keys(12, 1)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(key, b"1"), (key, b"2")])
        (before,) = await client.logs(12)
        others = await client.logs(11, 13)
    assert server.terminate() == 0
    (store,) = server.data.glob("buckets/*/store")
    env = lmdb.open(str(store), max_dbs=8, map_size=1 << 30)
    with env.begin(write=True) as txn:
        txn.put(b"\x00\x0c", b"not a row", db=env.open_db(b"partitions", txn=txn))
    env.close()
    server.start()
    async with RawClient(server.target) as client:
        (log,) = await client.logs(12)
        assert len(log) == 1
        assert log[0][1] == 0
        assert log[0][0] not in (0, before[0][0])
        assert await client.logs(11, 13) == others
        (info,) = await client.partitions(12)
        assert info.high_seqno == 2
        (hello,) = (await client.hello({12: before[0][0]})).answers
        assert hello.rollback_seqno == 0
        writer = await client.writer("")
        assert seqnos_of(await writer.write([(key, b"3")])) == {12: (2, 3)}


@pytest.mark.asyncio
async def test_the_last_seqno_is_given_and_then_the_partition_refuses_alone(
    server_process: StartServer,
) -> None:
    server = server_process()
    assert server.terminate() == 0
    (store_folder,) = server.data.glob("buckets/*/store")
    store = Store(store_folder)
    end = SEQNO_MAX - 1
    store.put_flush([], {20: (end, end, end)}, {})
    store.close()
    server.start()
    (full,), (other,) = some_keys(20, 1), some_keys(21, 1)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        assert seqnos_of(await writer.write([(full, b"last")])) == {20: (SEQNO_MAX - 1, SEQNO_MAX)}
        refusal = (await writer.write([(full, b"one more")])).refused
        assert (refusal.reason, refusal.retriable) == ("SEQNO_EXHAUSTED", False)
        assert str(SEQNO_MAX) in refusal.message
        mixed = await writer.write([(full, b"one more"), (other, b"fine")])
        assert seqnos_of(mixed) == {21: (0, 1)}
        assert [r.partition for r in mixed.refused_partitions] == [20]
        assert mixed.refused_partitions[0].problem.reason == "SEQNO_EXHAUSTED"


@pytest.mark.asyncio
async def test_health_and_reflection_answer(target: str) -> None:
    services = {
        "upr.v1.AdminService",
        "upr.v1.ChangeStreamService",
        "upr.v1.KeyValueService",
        "grpc.health.v1.Health",
    }
    async with grpc.aio.insecure_channel(target) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "upr.v1.ChangeStreamService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in reflection.ServerReflectionInfo(iter([asked])):
            listed = {s.name for s in answer.list_services_response.service}
            assert services <= listed


@pytest.mark.asyncio
async def test_a_failed_fsync_stops_writes_and_leaves_no_proof(server_process: StartServer) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": "journal.before_sync=error:EIO:2"})
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(b"a", b"1")])
        refusal = (await writer.write([(b"a", b"2")])).refused
        assert refusal.reason == "UNKNOWN_OUTCOME"
        assert "fsync" in refusal.message
        refusal = (await writer.write([(b"a", b"3")])).refused
        assert refusal.reason == "STORAGE_FAILED"
        # Reading goes on.
        follow = await client.follow()
        await follow.start(*(start_at(p, until_now=False) for p in range(1024)))
        await follow.until("frame")
        async with grpc.aio.insecure_channel(server.target) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert server.terminate() == 1
    assert "no more writes are taken" in server.log_text()
    server.environment = {}
    server.start()
    async with RawClient(server.target) as client:
        assert {len(log) for log in await client.logs()} == {2}


@pytest.mark.asyncio
async def test_a_full_disk_delays_what_is_numbered_and_loses_nothing(
    server_process: StartServer,
) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": "journal.half_append=error:ENOSPC:2"})
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(b"a", b"1")])
        seqnos_of(await writer.write([(b"a", b"2")]))
        seqnos_of(await writer.write([(b"b", b"3")]))
    assert "storage trouble" in server.log_text()
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        infos = await client.partitions()
        assert sum(info.high_seqno for info in infos) == 3
