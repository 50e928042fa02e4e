"""A process that may open few files: sockets that say nothing take neither the store's descriptors nor the clients'."""

import asyncio
import gc
import operator
import os
import resource
import socket
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.harness import RunningServer, poll
from tests.raw import RawClient
from upr.config import ServerConfig
from upr.service.buckets.bucket_service import BucketService
from upr.service.overload import process
from upr.storage.store import Store
from upr_protocol.errors import ListenError
from upr_protocol.limits import BUCKETS_MAX, CONNECTIONS_MAX
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types

FILES = 128
SILENT = 300
SEGMENT_BYTES = 16 * 2**20
FULL = "there are too many connections: new ones are closed"


def limit_to(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))


def test_connections_leave_what_the_store_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for files in (256, 1024, 4096, 2**20):
        limit_to(monkeypatch, files + open_now)
        buckets = process.buckets_max()
        left = files - process.connections_max(1)
        assert left >= buckets * process.BUCKET_DESCRIPTORS
        assert process.connections_max(1) <= CONNECTIONS_MAX
    assert process.connections_max(1) == CONNECTIONS_MAX
    assert process.buckets_max() == BUCKETS_MAX
    limit_to(monkeypatch, 128)
    assert process.buckets_max() == 4
    limit_to(monkeypatch, open_now + 30)
    with pytest.raises(ListenError, match=r"must be at least \d+"):
        process.connections_max(1)


@pytest.mark.parametrize("others", [0, 160, 168, 170, 176])
def test_the_limit_that_is_asked_for_is_enough(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 20)
    limit_to(monkeypatch, 100)
    with pytest.raises(ListenError, match="must be at least") as refused:
        process.connections_max(1, others + 60)
    least = int(str(refused.value).partition("at least ")[2].partition(" ")[0])
    for files in range(least, least + 200):
        limit_to(monkeypatch, files)
        assert process.connections_max(1, others + 60) >= process.CONNECTIONS_MIN
    limit_to(monkeypatch, least - 1)
    with pytest.raises(ListenError, match=f"is {least - 1}; must be at least {least} "):
        process.connections_max(1, others + 60)


@pytest.fixture
def few_files(tmp_path: Path) -> RunningServer:
    """A server that may open FILES files; not started."""
    return RunningServer(tmp_path, "--flush-seconds", "0.3")


def silent_sockets(target: str, count: int) -> list[socket.socket]:
    host, _, port = target.rpartition(":")
    found = []
    for _ in range(count):
        one = socket.socket()
        one.settimeout(10)
        one.connect((host, int(port)))
        found.append(one)
    return found


@pytest.mark.asyncio
async def test_silent_sockets_stop_neither_a_writer_nor_the_flush(
    few_files: RunningServer,
) -> None:
    server = few_files
    server.start(prefix=("prlimit", f"--nofile={FILES}:{FILES}"))
    try:
        async with RawClient(server.target) as client:
            writer = await client.writer()
            await writer.write([(b"before", b"1")])
            silent = await asyncio.to_thread(silent_sockets, server.target, SILENT)
            async with RawClient(server.target) as refused:
                with pytest.raises(Exception, match=r"UNAVAILABLE|DEADLINE"):
                    await refused.changes.Hello(_hello(), timeout=2)
            # Two segments of the journal, and flushes of them: each opens files.
            for number in range(3 * SEGMENT_BYTES // 2**20):
                result = await writer.write([(b"%d" % number, os.urandom(2**20))])
                assert not result.HasField("refused"), result
            async with asyncio.timeout(30):
                while not (await client.admin.GetStorage(_storage())).flushed_bytes:
                    pass
                (problem,) = await poll(partial(_problems, client))
            assert problem.message.startswith("connections are ")
            assert "; must be below " in problem.message
            assert server.log_text().count(FULL) == 1
            for one in silent:
                one.close()
            # The server refuses connections until it has seen that some of the silent ones are closed.
            async with RawClient(server.target) as later, asyncio.timeout(30):
                request = kv.GetRequest(bucket="default", keys=[b"before"])
                answer = await later.kv.Get(request, timeout=30, wait_for_ready=True)
                await poll(partial(_problems, later), operator.not_)
            assert answer.answers[0].value == b"1"
            assert server.log_text().count("connections have room again") == 1
            await writer.close()
        assert server.terminate() == 0
        assert "error" not in server.log_text()
    finally:
        server.close()


def test_the_soft_limit_of_open_files_is_raised(few_files: RunningServer) -> None:
    server = few_files
    server.start(prefix=("prlimit", "--nofile=64:1024"))
    try:
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == ["1024", "1024"]
    finally:
        server.close()


def test_a_start_with_too_few_files_says_what_it_needs(few_files: RunningServer) -> None:
    server = few_files
    server.launch(prefix=("prlimit", "--nofile=32:32"))
    assert server.wait() == 2
    assert "the limit of open files is 32; must be at least" in server.log_text()
    assert "ulimit -n" in server.log_text()


@pytest.mark.long
def test_nothing_is_imported_once_the_server_serves(few_files: RunningServer) -> None:
    """Without a descriptor an import fails, and with it the flush that wanted it."""
    script = """
import asyncio, sys, threading
from pathlib import Path
from upr.config import ServerConfig
from upr.service.server import Server
from upr_client import Client
known = set()
def use(target):
    with Client(target) as client:
        for name, compression in (("default", ""), ("small", "zstd")):
            if name != "default":
                client.admin.create_bucket(name, compression=compression)
            bucket = client.bucket(name)
            for round in range(6):
                bucket.write_many([(b"%d" % i, None if (i + round) % 3 else b"x" * 90) for i in range(3000)])
            bucket.get_many([b"1", b"2"])
async def main(data):
    server = Server(ServerConfig(data=data, listen="127.0.0.1:0", flush_seconds=0.05, tombstone_seconds=0))
    await server.start()
    known.update(sys.modules)
    await asyncio.to_thread(use, server.address)
    # What it does by itself, flushes, merges and purges, has its turns: nothing says that none is left.
    await asyncio.sleep(1)
    assert await server.stop()
asyncio.run(main(Path(sys.argv[1])))
# What the client needs does not count.
later = {name for name in set(sys.modules) - known if not name.startswith(("upr_client", "grpc."))}
print(sorted(later))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(few_files.folder / "data")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


def _hello() -> changes.HelloRequest:
    return changes.HelloRequest(bucket="default", partitions=[changes.HelloPartition(partition=0)])


async def _problems(client: RawClient) -> list[types.Problem]:
    return list((await client.admin.GetStatus(admin.GetStatusRequest())).problems)


def _storage() -> admin.GetStorageRequest:
    return admin.GetStorageRequest(bucket="default")


def test_what_could_not_be_opened_leaves_no_descriptor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    with closing(Store(folder / "store")) as store:
        store.clear_proof()
    monkeypatch.setattr(Store, "write_recovery", full)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        # Behind the journal: what is open of it would keep the room of segments that are removed later, too.
        with pytest.raises(lmdb.DiskError):
            BucketService(folder, ServerConfig(data=folder))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
