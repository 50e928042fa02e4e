"""A bucket that is damaged or whose storage fails, beside others that are well."""

import errno
from pathlib import Path
from typing import Any

import grpc
import lmdb
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import StartServer
from tests.harness import poll
from tests.service.bucket_state import break_journal, folders_are, rows_of
from upr.config import ServerConfig
from upr.service.buckets.catalog import Catalog, DamagedBucket, create_bucket
from upr.storage.directory import DataDirectory
from upr_client import AsyncClient
from upr_client.errors import AlreadyExistsError, DataDamagedError, StorageFailedError
from upr_protocol.block import build_block
from upr_protocol.errors import DataDirectoryError


@pytest.mark.asyncio
@pytest.mark.parametrize("broken", ["orders", "default"])
async def test_a_damaged_bucket_takes_the_others_not_down(
    server_process: StartServer, broken: str
) -> None:
    server = server_process()
    whole = "default" if broken == "orders" else "orders"
    async with AsyncClient(server.target) as client:
        await client.admin.create_bucket("orders")
        for name in ("default", "orders"):
            for i in range(3):
                await client.bucket(name).set(b"a", b"%d" % i)
        versions = {info.name: info.version for info in await client.admin.buckets()}
    server.kill()
    break_journal(server, versions[broken])
    server.start()
    async with AsyncClient(server.target) as client:
        infos = {info.name: info for info in await client.admin.buckets()}
        assert {name: info.version for name, info in infos.items()} == versions
        told = {bucket.name: bucket for bucket in (await client.admin.status()).buckets}
        assert {name: bucket.version for name, bucket in told.items()} == versions
        assert told[broken].problem is not None
        assert told[whole].problem is None
        problem = infos[broken].problem
        assert infos[whole].problem is None
        assert problem is not None
        assert problem.reason == "DATA_DAMAGED"
        assert await rows_of(client, whole) == {b"a": b"2"}
        for attempt in (
            client.bucket(broken).set(b"a", b"1"),
            client.admin.partitions(broken, [1]),
            client.admin.storage(broken),
            rows_of(client, broken),
        ):
            with pytest.raises(DataDamagedError, match="damaged"):
                await attempt
        with pytest.raises(AlreadyExistsError):
            await client.admin.create_bucket(broken)
        assert "a bucket cannot be opened, and is not served" in server.log_text()
        assert await client.admin.drop_bucket(broken) == versions[broken]
        made = await client.admin.create_bucket(broken)
        await folders_are(server, [made.version, versions[whole]])


@pytest.mark.asyncio
async def test_a_store_whose_name_cannot_be_read_hides_no_bucket(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client:
        await client.admin.create_bucket("orders")
        versions = {info.name: info.version for info in await client.admin.buckets()}
    assert server.terminate() == 0
    file = server.data / "buckets" / f"{versions['default']:016x}" / "store" / "data.mdb"
    file.write_bytes(b"\xff" * 8192 + file.read_bytes()[8192:])
    server.start()
    async with AsyncClient(server.target) as client:
        infos = {info.name: info for info in await client.admin.buckets()}
        nameless = f"{versions['default']:016x}"
        assert infos.keys() == {"orders", nameless}
        # "There is none", or a new one of the name, would have its consumers give up what they have.
        with pytest.raises(DataDamagedError, match="name cannot be read"):
            await client.admin.partitions("default", [1])
        with pytest.raises(DataDamagedError, match="name cannot be read"):
            await client.admin.create_bucket("default")
        await client.bucket("orders").set(b"a", b"1")
        assert await client.admin.drop_bucket(nameless) == versions["default"]
        await client.admin.create_bucket("default")


@pytest.mark.asyncio
async def test_one_bucket_whose_storage_failed_leaves_the_server_healthy(
    server_process: StartServer,
) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": "journal.before_sync=error:EIO:2"})
    async with AsyncClient(server.target) as client, grpc.aio.insecure_channel(server.target) as c:
        stub = health_pb2_grpc.HealthStub(c)

        async def health() -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=""))).status)

        await client.admin.create_bucket("orders")
        await client.bucket("orders").set(b"a", b"1")
        with pytest.raises(Exception, match="fsync"):
            await client.bucket().set(b"a", b"1")
        await client.bucket("orders").set(b"a", b"2")
        assert await health() == health_pb2.HealthCheckResponse.SERVING
        problems = {info.name: info.problem for info in await client.admin.buckets()}
        assert problems["default"] is not None
        assert problems["orders"] is None
        # Now none is left that takes writes; and then there is one again.
        await client.admin.drop_bucket("orders")
        await poll(health, lambda told: told != health_pb2.HealthCheckResponse.SERVING)
        await client.admin.create_bucket("other")
        assert await health() == health_pb2.HealthCheckResponse.SERVING
    assert server.terminate() == 1


def frames_kept(error: BaseException) -> int:
    count, trace = 0, error.__traceback__
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


@pytest.mark.asyncio
async def test_a_problem_that_is_told_again_and_again_keeps_nothing_of_those_who_asked(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "data")
    create_bucket(directory, "orders")
    catalog = Catalog(directory, ServerConfig(data=directory.path))
    host = catalog.find("orders")
    problem = DataDamagedError("damaged")
    catalog._damaged["broken"] = DamagedBucket(host.folder, "broken", 1, True, problem)
    host.bucket.fail(StorageFailedError("the disk failed"))
    failure = host.bucket.failure
    assert failure is not None
    for _ in range(20):
        with pytest.raises(DataDamagedError):
            catalog.find("broken")
        with pytest.raises(StorageFailedError):
            await host.write(build_block([b"a"], [b"1"]), b"", None, 1)
        with pytest.raises(StorageFailedError):
            await host.durable(0)
    assert frames_kept(problem) < 10
    assert frames_kept(failure) < 10
    for one in catalog.hosts:
        one.close_files()
    directory.close()


@pytest.mark.parametrize(
    ("opens", "error"),
    [
        ("check_length", PermissionError(errno.EACCES, "Permission denied")),
        ("lmdb.open", lmdb.ReadonlyError("a/path: Permission denied")),
    ],
)
def test_files_that_the_server_may_not_use_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: str, error: Exception
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        # As of files that another user made.
        raise error

    directory = DataDirectory(tmp_path / "data")
    create_bucket(directory, "default")
    with monkeypatch.context() as patch:
        patch.setattr(f"upr.storage.store.{opens}", refused)
        with pytest.raises(DataDirectoryError, match="cannot be opened: Permission denied") as told:
            Catalog(directory, ServerConfig(tmp_path / "data"))
    assert "user" in told.value.hint
    assert "drop" not in told.value.hint
    directory.close()
