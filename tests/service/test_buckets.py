"""Several buckets in one server: creating, listing, dropping, and crashes in between."""

import asyncio
import errno
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.raw import RawClient, RawWriter, start_at
from tests.service.bucket_state import folders, folders_are, rows_of, serving
from tests.service.keys import some_keys
from upr import failpoints
from upr.config import ServerConfig
from upr.service.admin import AdminMethods, Process
from upr.service.buckets import compactor as compactor_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.overload import process
from upr.storage.directory import DataDirectory
from upr_client import AsyncClient, Change, Only
from upr_client.errors import (
    AlreadyExistsError,
    BucketGoneError,
    BucketNotFoundError,
    InvalidArgumentError,
    StorageFailedError,
    TooManyError,
)
from upr_protocol.block import build_block
from upr_protocol.limits import BUCKETS_MAX
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1 import admin_service_pb2 as admin

(KEY,) = some_keys(7, 1)


async def reason_of_end(writer: RawWriter) -> str:
    """Read a Write call to its end, and return the reason of the error that it ended with."""
    try:
        while await asyncio.wait_for(writer.call.read(), WAIT_SECONDS) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error_from_call(error).reason
    return ""


# Creating and listing


@pytest.mark.asyncio
async def test_buckets_are_created_listed_and_kept_over_a_restart(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client:
        orders = await client.admin.create_bucket("orders", compression="zstd")
        assert (orders.name, orders.compression, orders.mutations) == ("orders", "zstd", 0)
        assert orders.version
        assert orders.used_bytes > 0
        with pytest.raises(AlreadyExistsError, match="'orders'"):
            await client.admin.create_bucket("orders")
        for name in ("", "a\nb", "x" * 201):
            with pytest.raises(InvalidArgumentError):
                await client.admin.create_bucket(name)
        with pytest.raises(InvalidArgumentError, match="'lz4'"):
            await client.admin.create_bucket("other", compression="lz4")
        await client.bucket("orders").write_many([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
        await client.bucket().set(b"a", b"of default")
    assert server.terminate() == 0
    server.start()
    async with AsyncClient(server.target) as client:
        default, again = await client.admin.buckets()
        assert (default.name, default.mutations) == ("default", 1)
        assert (again.name, again.version, again.compression) == ("orders", orders.version, "zstd")
        assert again.mutations == 3
        assert again.problem is None
        assert await rows_of(client, "orders") == {b"a": b"3", b"b": b"2"}
        assert await rows_of(client, "default") == {b"a": b"of default"}


@pytest.mark.long
@pytest.mark.asyncio
async def test_there_is_room_for_as_many_buckets_as_the_limit_says(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client:
        seconds = []
        for i in range(BUCKETS_MAX - 1):
            began = time.monotonic()
            await client.admin.create_bucket(f"bucket {i:02}")
            seconds.append(time.monotonic() - began)
        assert sorted(seconds)[len(seconds) // 2] < 1.0
        with pytest.raises(TooManyError, match=f"must be below {BUCKETS_MAX}") as caught:
            await client.admin.create_bucket("one more")
        assert not caught.value.retriable
        assert len(await client.admin.buckets()) == BUCKETS_MAX
        await asyncio.gather(
            *(client.bucket(f"bucket {i:02}").set(b"k", b"%d" % i) for i in range(BUCKETS_MAX - 1))
        )
        await client.admin.drop_bucket("bucket 05")
        await client.admin.create_bucket("one more")
    assert server.terminate() == 0
    server.start()
    async with AsyncClient(server.target) as client:
        infos = {info.name: info for info in await client.admin.buckets()}
        assert len(infos) == BUCKETS_MAX
        assert infos["bucket 30"].mutations == 1
        assert infos["one more"].mutations == 0
        assert await rows_of(client, "bucket 30") == {b"k": b"30"}


@pytest.mark.asyncio
@pytest.mark.parametrize("ends_meanwhile", [False, True])
async def test_a_bucket_that_is_opened_anew_meanwhile_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_meanwhile: bool
) -> None:
    directory = DataDirectory(tmp_path / "replica")
    settings = ServerConfig(data=directory.path, replicate_from=("127.0.0.1:1",))
    catalog = Catalog(directory, settings)
    catalog.start(lambda: asyncio.sleep(0))
    await catalog.create("changed", version=7, active=False)
    slow = await catalog.create("slow", version=8, active=False)
    used, opened = slow.disk.store.used_bytes, catalog._opened
    asked, answer, opening, go_on = (threading.Event() for _ in range(4))

    def held(called: threading.Event, event: threading.Event) -> None:
        called.set()
        assert event.wait(WAIT_SECONDS)

    def slow_bytes() -> int:
        held(asked, answer)
        return used()

    def slow_opened(*args: Any) -> BucketService:
        held(opening, go_on)
        return opened(*args)

    monkeypatch.setattr(slow.disk.store, "used_bytes", slow_bytes)
    monkeypatch.setattr(catalog, "_opened", slow_opened)
    methods = AdminMethods(catalog, Process(1, lambda: 0, lambda: 0))

    async def listed() -> list[tuple[str, str]]:
        answer = await methods.ListBuckets(admin.ListBucketsRequest(), None)  # type: ignore[arg-type]
        return [(info.name, info.problem.reason) for info in answer.buckets]

    async def reopen() -> asyncio.Task[BucketService]:
        task = asyncio.create_task(catalog.reopen("changed", {}))
        assert await asyncio.to_thread(opening.wait, WAIT_SECONDS)
        return task

    try:
        # Either it begins while the list is made, or it has begun before and ends.
        reopening = await reopen() if ends_meanwhile else None
        listing = asyncio.create_task(listed())
        assert await asyncio.to_thread(asked.wait, WAIT_SECONDS)
        if reopening is None:
            reopening = await reopen()
        else:
            go_on.set()
            await reopening
        answer.set()
        there = ("changed", "" if ends_meanwhile else "HISTORY_CHANGED")
        assert await asyncio.wait_for(listing, WAIT_SECONDS) == [there, ("slow", "")]
    finally:
        answer.set()
        go_on.set()
    await reopening
    assert await asyncio.wait_for(catalog.close(), WAIT_SECONDS)
    directory.close()


# Dropping


@pytest.mark.asyncio
async def test_a_drop_leaves_the_other_bucket_undisturbed(server_process: StartServer) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client:
        gone = await client.admin.create_bucket("gone")
        kept: list[int] = []
        errors: dict[str, BaseException] = {}
        moved = asyncio.Event()

        async def write(name: str) -> None:
            bucket = client.bucket(name)
            for i in range(10**6):
                await bucket.set(KEY, b"%d" % i)

        async def follow(name: str) -> None:
            async with client.bucket(name).changes(only=Only([7])) as changes:
                async for event in changes:
                    if isinstance(event, Change) and name == "default":
                        kept.append(event.seqno)
                        moved.set()

        async def run(kind: str, name: str) -> None:
            try:
                await (write(name) if kind == "write" else follow(name))
            except Exception as error:
                errors[f"{kind} {name}"] = error

        tasks = [
            asyncio.create_task(run(kind, name))
            for kind in ("write", "follow")
            for name in ("default", "gone")
        ]

        async def more() -> None:
            target = (kept[-1] if kept else 0) + 20
            async with asyncio.timeout(WAIT_SECONDS):
                while not kept or kept[-1] < target:
                    moved.clear()
                    await moved.wait()

        await more()
        assert await client.admin.drop_bucket("gone") == gone.version
        await more()
        await until(lambda: len(errors) >= 2)
        assert isinstance(errors["follow gone"], BucketNotFoundError)
        assert errors["write gone"].reason in ("BUCKET_GONE", "UNKNOWN_OUTCOME")  # type: ignore[attr-defined]
        assert kept == list(range(1, kept[-1] + 1))
        assert errors.keys() == {"follow gone", "write gone"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        default = next(one for one in await client.admin.buckets() if one.name == "default")
        with pytest.raises(BucketNotFoundError, match="no bucket 'gone'"):
            await client.admin.partitions("gone", [1])
        await folders_are(server, [default.version])
    assert server.terminate() == 0
    assert "Traceback" not in server.log_text()


@pytest.mark.asyncio
async def test_streams_and_writes_of_a_dropped_bucket_end_with_its_reason(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    environment = {"UPR_FAILPOINTS": f"journal.before_sync=hold:{hold}"}
    server = server_process(environment=environment)
    block = block_to_message(build_block([KEY], [b"v"]))
    async with RawClient(server.target) as raw, AsyncClient(server.target) as client:
        writer, idle = await raw.writer("p"), await raw.writer("q")
        await writer.write([(KEY, b"1")])
        follow = await raw.follow(bucket="default")
        (answer,) = await follow.start(start_at(7))
        token = answer.started.token
        await follow.until("frame")
        hold.touch()
        await writer.send_block(block, number=2)
        high = 0
        while high < 2:
            high = (await raw.partitions(7))[0].high_seqno
        await client.admin.drop_bucket("default")
        # Numbered, and never to be durable as far as anybody can tell.
        unknown = (await writer.result()).refused
        assert (unknown.reason, unknown.retriable) == ("UNKNOWN_OUTCOME", False)
        assert "dropped" in unknown.message
        await writer.send_block(block, number=3)
        refusal = (await writer.result()).refused
        assert (refusal.reason, refusal.retriable) == ("BUCKET_GONE", False)
        for one in (writer, idle):
            assert await reason_of_end(one) == "BUCKET_GONE"
        streams = (await follow.until("ended")).ended
        assert [(s.partition, s.token) for s in streams.streams] == [(7, token)]
        assert (streams.problem.reason, streams.problem.retriable) == ("BUCKET_GONE", False)
        call = (await follow.until("ended")).ended
        assert (list(call.streams), call.problem.reason) == ([], "BUCKET_GONE")
        await follow.close()
        hold.unlink()
        await folders_are(server, [])
        assert await client.admin.buckets() == []
    assert server.terminate() == 0
    server.start()
    async with AsyncClient(server.target) as client:
        (anew,) = await client.admin.buckets()
        assert (anew.name, anew.mutations) == ("default", 0)
        assert anew.version != writer.opened.bucket_version


@pytest.mark.asyncio
async def test_who_waits_for_room_learns_that_the_bucket_was_dropped(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    failpoints.arm(f"flush.before_commit=hold:{hold}")
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0", tail_bytes=100_000, open_admin=True)
    async with (
        serving(config) as server,
        RawClient(server.address) as raw,
        AsyncClient(server.address) as client,
    ):
        try:
            writer = await raw.writer("p")
            host = server._catalog.find("default")
            block = block_to_message(build_block([KEY], [b"v" * 60_000]))
            for number in range(1, 9):
                await writer.send_block(block, number=number)
            tail = host.bucket.tail
            await until(lambda: bool(host.disk._waiting) and tail.durable == tail.end)
            numbered = tail.end
            assert numbered < 8
            await client.admin.drop_bucket("default")
            results = [await writer.result() for _ in range(8)]
            reasons = [one.refused.reason for one in results]
            assert reasons == [""] * numbered + ["BUCKET_GONE"] * (8 - numbered)
            assert await reason_of_end(writer) == "BUCKET_GONE"
            await until(lambda: not host.users)
        finally:
            # Else the store's thread would never let the server stop.
            failpoints._armed.clear()
            hold.unlink()


@pytest.mark.asyncio
async def test_a_drop_that_failed_keeps_the_name_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(ServerConfig(tmp_path / "data", "127.0.0.1:0", open_admin=True)) as server,
        AsyncClient(server.address) as client,
    ):

        def fail(folder: Path) -> Path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(server._catalog._directory, "drop_bucket", fail)
            with pytest.raises(StorageFailedError, match="could not be renamed"):
                await client.admin.drop_bucket("default")
        (listed,) = await client.admin.buckets()
        assert listed.problem is not None
        # Two folders of one name would be there at the next start.
        with pytest.raises(AlreadyExistsError):
            await client.admin.create_bucket("default")
        assert await client.admin.drop_bucket("default") == listed.version
        await client.admin.create_bucket("default")


@pytest.mark.asyncio
async def test_nothing_keeps_a_dropped_bucket_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A timer would keep it for so long.
    monkeypatch.setattr(compactor_module, "FIRST_LOOK_SECONDS", 1000.0)

    async def told() -> None:
        pass

    directory = DataDirectory(tmp_path / "data")
    catalog = Catalog(directory, ServerConfig(tmp_path / "data"))
    catalog.start(told)
    bucket = weakref.ref(catalog.find("default"))
    # Its tasks have begun.
    await pass_turns()
    assert not catalog.dropped.is_set()
    await catalog.drop("default")
    async with asyncio.timeout(WAIT_SECONDS):
        await catalog.dropped.wait()

    def is_gone() -> bool:
        gc.collect()
        return bucket() is None

    # The watch of the files may be looking at it, or a thread not have let go of it.
    await until(is_gone)
    assert await catalog.close()
    directory.close()


class _Cycle:
    def __init__(self) -> None:
        self.self = self


@pytest.mark.asyncio
async def test_what_a_drop_leaves_is_collected_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DROPPED_SECONDS", 0.0)
    dropped, left = asyncio.Event(), _Cycle()
    found = weakref.ref(left)
    # As a full collection does in a server.
    gc.freeze()
    del left
    collecting = asyncio.create_task(process.collect_garbage(dropped))
    try:
        gc.collect()
        assert found() is not None
        dropped.set()
        async with asyncio.timeout(WAIT_SECONDS):
            await until(lambda: found() is None)
        assert not dropped.is_set()
    finally:
        # As it was before, see ``conftest.py``.
        gc.freeze()
        collecting.cancel()


@pytest.mark.asyncio
async def test_a_drop_of_another_version_drops_nothing(target: str) -> None:
    async with AsyncClient(target) as client:
        (default,) = await client.admin.buckets()
        with pytest.raises(BucketGoneError, match="created again"):
            await client.admin.drop_bucket("default", default.version ^ 1)
        assert await client.admin.buckets() == [default]
        with pytest.raises(BucketNotFoundError):
            await client.admin.drop_bucket("nowhere")
        assert await client.admin.drop_bucket("default", default.version) == default.version
        made = await client.admin.create_bucket("default")
        assert made.version != default.version


@pytest.mark.asyncio
async def test_a_bucket_can_be_dropped_and_created_at_once_again_and_again(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client:
        for _ in range(8):
            outcomes = await asyncio.gather(
                client.admin.drop_bucket("default"),
                client.admin.create_bucket("default"),
                return_exceptions=True,
            )
            if isinstance(outcomes[1], AlreadyExistsError):
                await client.admin.create_bucket("default")
        (info,) = await client.admin.buckets()
        await folders_are(server, [info.version])
        await client.bucket().set(b"a", b"1")
    server.kill()
    server.start()
    async with AsyncClient(server.target) as client:
        assert await rows_of(client, "default") == {b"a": b"1"}


# Crashes


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["before_create", "after_create"])
async def test_killed_while_a_bucket_is_created(server_process: StartServer, where: str) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": f"bucket.{where}=kill:2"})
    # The first one is the default bucket's for ``before_create``, which the start makes.
    async with AsyncClient(server.target) as client:
        if where == "after_create":
            await client.admin.create_bucket("first")
        with pytest.raises(Exception, match=r"(?i)unavailable|closed|reset|refused"):
            await client.admin.create_bucket("second")
    assert server.wait() == -9
    left = folders(server)
    assert any(name.endswith(".new") for name in left) == (where == "before_create")
    server.environment = {}
    server.start()
    async with AsyncClient(server.target) as client:
        infos = {info.name: info for info in await client.admin.buckets()}
        expected = {"default"} if where == "before_create" else {"default", "first", "second"}
        assert infos.keys() == expected
        assert folders(server) == {f"{info.version:016x}" for info in infos.values()}
        if where == "before_create":
            await client.admin.create_bucket("second")
        await client.bucket("second").set(b"a", b"1")


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["before_drop", "after_drop"])
async def test_killed_while_a_bucket_is_dropped(server_process: StartServer, where: str) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": f"bucket.{where}=kill"})
    rows = {b"key %d" % i: b"%d" % i for i in range(500)}
    async with AsyncClient(server.target) as client:
        orders = await client.admin.create_bucket("orders")
        await client.bucket("orders").write_many(list(rows.items()))
        await client.bucket().set(b"a", b"1")
        with pytest.raises(Exception, match=r"(?i)unavailable|closed|reset|refused"):
            await client.admin.drop_bucket("orders")
    assert server.wait() == -9
    dropped = f"{orders.version:016x}.dropped"
    assert (dropped in folders(server)) == (where == "after_drop")
    server.environment = {}
    server.start()
    async with AsyncClient(server.target) as client:
        infos = {info.name: info for info in await client.admin.buckets()}
        assert folders(server) == {f"{info.version:016x}" for info in infos.values()}
        assert await rows_of(client, "default") == {b"a": b"1"}
        if where == "before_drop":
            # Whole, and the same: nobody who was told that it is gone gave anything up.
            assert infos["orders"].version == orders.version
            assert await rows_of(client, "orders") == rows
        else:
            assert infos.keys() == {"default"}
            assert (await client.admin.create_bucket("orders")).mutations == 0
