"""A file system that is full, and one that fails: nothing acknowledged is lost, and writing resumes by itself."""

import asyncio
import ctypes
import errno
import json
import os
import resource
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import StartServer
from tests.crash.world import World
from tests.harness import WAIT_SECONDS, RunningServer
from tests.raw import RawClient, seqnos_of, start_at
from tests.replica.sets import wait_until_counted
from upr.cli.admin import main as admin
from upr_client import Client, UprError

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("soon")]

MIB = 2**20
DISK_BYTES = 24 * MIB
LOG_BYTES = 128 * 2**10
"""A limit of files that the server's log stays below, and a journal or a store does not."""
PROBE: list[tuple[bytes, bytes | None]] = [(b"raw", b"r" * 1000)]
_DETACH = 2


def _mount(folder: Path) -> bool:
    """Put a small file system there; False where that is not allowed."""
    options = b"size=%d" % DISK_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"upr", os.fsencode(folder), b"tmpfs", 0, options) == 0:
        return True
    code = ctypes.get_errno()
    assert code in (errno.EPERM, errno.EACCES, errno.ENODEV, errno.ENOSYS), os.strerror(code)
    return False


def _unmount(folder: Path) -> None:
    assert ctypes.CDLL(None).umount2(os.fsencode(folder), _DETACH) == 0


class SmallDisk:
    """A file system of its own, filled to the last byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"
        assert _mount(folder)

    def fill(self, server: RunningServer, left: int = 0) -> None:
        """Take every byte that is left."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (MIB, 4096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self, server: RunningServer) -> None:
        """Give it back."""
        self._ballast.unlink()

    def close(self) -> None:
        """Take the file system away."""
        _unmount(self.folder)


class FilesMayNotGrow:
    """No file of the server may be larger than a limit: needs no rights, and no byte of the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, server: RunningServer, left: int = 0) -> None:
        """Let files have no more than so many bytes."""
        self._limit(server, left)

    def make_room(self, server: RunningServer) -> None:
        """Lift the limit."""
        self._limit(server, resource.prlimit(server.pid, resource.RLIMIT_FSIZE)[1])

    def _limit(self, server: RunningServer, size: int) -> None:
        hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, hard))

    def close(self) -> None:
        """Nothing is left."""


Disk = SmallDisk | FilesMayNotGrow


def _kinds() -> list[type[SmallDisk] | type[FilesMayNotGrow]]:
    """What can be done here; the names of the tests say what was."""
    with tempfile.TemporaryDirectory() as folder:
        if not _mount(Path(folder)):
            return [FilesMayNotGrow]
        _unmount(Path(folder))
    return [SmallDisk, FilesMayNotGrow]


@pytest.fixture(params=_kinds(), ids=lambda kind: kind.__name__)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A disk that can be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made: Disk = request.param(folder)
    yield made
    made.close()


@asynccontextmanager
async def serving(disk: Disk) -> AsyncIterator[RunningServer]:
    server = RunningServer(disk.folder, "--tail-bytes", str(MIB))
    # Beside the disk, so that it can still say what is wrong.
    server.log = disk.folder.parent / "server.log"
    server.start()
    try:
        yield server
    finally:
        server.close()


async def check_clean(server: RunningServer) -> None:
    """``upr-admin check`` of the stopped server finds nothing."""
    result = await asyncio.to_thread(
        CliRunner().invoke, admin, ["check", str(server.data), "--json"]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert not document["damaged"]
    assert [bucket["findings"] for bucket in document["buckets"]] == [[]]


async def refusal(world: World, producer: str = "") -> str:
    """Why a write is not taken now; empty for one that is."""
    async with RawClient(world.server.target) as client:
        writer = await client.writer(producer)
        result = await writer.write(PROBE)
        if not result.HasField("refused"):
            return ""
        assert result.refused.retriable
        reason: str = result.refused.reason
        return reason


async def until_stuck(disk: Disk, world: World) -> list[str]:
    """Wait until a write meets the full disk; return the producers whose write may become durable yet."""
    unknown: list[str] = []
    async with asyncio.timeout(WAIT_SECONDS):
        if isinstance(disk, SmallDisk):
            # One that was numbered just before the room was gone may be refused by the disk itself. When the room ends in
            # the middle of what LMDB writes, it calls that an I/O error.
            full = "NO_ROOM", "STORAGE_FAILED"
            while (reason := await refusal(world, f"probe {len(unknown)}")) not in full:
                # The journal may have room ahead for a few.
                assert reason in ("UNKNOWN_OUTCOME", "")
                unknown.append(f"probe {len(unknown)}")
            return unknown
        while "storage trouble" not in world.server.log_text():
            assert await read_durable(world) > 0
    return unknown


async def learn(world: World, unknown: list[str]) -> None:
    """Send again what may be durable, and take down where it is."""
    async with RawClient(world.server.target) as client:
        for producer in unknown:
            world.sent(producer, 1, PROBE)
            result = await (await client.writer(producer)).write(PROBE)
            ((partition, (start, end)),) = seqnos_of(result).items()
            (given,) = result.failover_ids
            world.acknowledged(producer, 1, PROBE, [(partition, start, end, given)])


async def read_durable(world: World) -> int:
    """Have a newcomer read what is durable; how many seqnos that is."""
    total = 0
    async with RawClient(world.server.target) as client:
        durable = {p: i.durable_seqno for p, i in enumerate(await client.partitions())}
        follow = await client.follow()
        wanted = [start_at(p, until_seqno=seqno) for p, seqno in durable.items() if seqno]
        assert all(answer.HasField("started") for answer in await follow.start(*wanted))
        blocks, _ = await follow.blocks_until_ended(len(wanted))
        reached = {int(run["partition"]): int(run["end_seqno"]) for b in blocks for run in b.runs}
        for start in wanted:
            assert reached[start.partition] >= start.until_seqno
            total += start.until_seqno
        await follow.close()
    return total


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_full_disk(disk: Disk) -> None:
    async with serving(disk) as server, World(server) as world:
        # Before the first write: the proof of the clean start cannot be taken away.
        disk.fill(server)
        assert await refusal(world) == "NO_ROOM"
        for seed in range(2):
            world.follow()
            world.write(seed=seed).value_bytes = 2000
        assert await refusal(world) == "NO_ROOM"
        assert not any(writer.answered for writer in world.writers)
        disk.make_room(server)
        await world.more_writes(10)

        # In the middle of writing: what is numbered waits, and the rest is refused before it is.
        disk.fill(server, LOG_BYTES)
        unknown = await until_stuck(disk, world)
        written = sum(len(rows) for rows in world.rows)
        # Streams go on: what is durable can be read, and nothing else is to be had.
        assert await read_durable(world) >= written > 0
        answered = [writer.answered for writer in world.writers]
        disk.make_room(server)
        await world.more_writes(2)
        await learn(world, unknown)
        assert all(w.answered > n for w, n in zip(world.writers, answered, strict=True))
        # Nothing is left in the journal of what did not fit.
        await world.restart()
        await world.more_writes(3)
        await world.settle()
        assert await asyncio.to_thread(server.terminate) == 0
        await check_clean(server)


@pytest.mark.asyncio
async def test_killed_on_a_full_disk(disk: Disk) -> None:
    async with serving(disk) as server, World(server) as world:
        world.follow()
        world.write(seed=3).value_bytes = 2000
        await world.more_writes(5)
        disk.fill(server, LOG_BYTES)
        unknown = await until_stuck(disk, world)
        # A limit of the process goes with it.
        room = partial(disk.make_room, server) if isinstance(disk, SmallDisk) else None
        await world.restart(between=room)
        await world.more_writes(5)
        await learn(world, unknown)
        await world.settle()
        assert await asyncio.to_thread(server.terminate) == 0
        await check_clean(server)


@pytest.mark.asyncio
async def test_a_disk_that_fails(server_process: StartServer) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": "journal.before_sync=error:EIO:20"})
    async with World(server) as world:
        follower = world.follow()
        world.write(seed=1)
        with pytest.raises(UprError, match=r"fsync.*Input/output error"):
            await world.more_writes(50)
        async with grpc.aio.insecure_channel(server.target) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with RawClient(server.target) as client:
            writer = await client.writer("")
            assert (await writer.write([(b"a", b"1")])).refused.reason == "STORAGE_FAILED"
        # What was acknowledged before can still be read, and is there after the restart.
        assert await read_durable(world) == sum(len(rows) for rows in world.rows)
        said = len(follower.statuses)
        assert await asyncio.to_thread(server.terminate) == 1
        server.environment = {}
        await asyncio.to_thread(server.start)
        async with RawClient(server.target) as client:
            assert {len(log) for log in await client.logs()} == {2}
        # Which end of its call it saw depends on where it was: on a busy machine also between two calls.
        await world.says(follower, "", said)
        # And of the write whose outcome is unknown, all of it or nothing.
        acknowledged = sum(len(rows) for rows in world.rows)
        assert await read_durable(world) in (
            acknowledged,
            acknowledged + world.writers[0].rows_sent,
        )
    assert await asyncio.to_thread(server.terminate) == 0
    await check_clean(server)


@pytest.mark.skipif(SmallDisk not in _kinds(), reason="no file system may be mounted here")
def test_an_owner_with_a_full_disk_is_taken_over_from(
    server_process: StartServer, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = SmallDisk(folder)
    old = RunningServer(folder, "--tail-bytes", str(MIB))
    old.log = tmp_path / "old.log"
    try:
        old.start()
        new = server_process("--replicate-from", old.target)
        wait_until_counted([old, new], old)
        with Client(old.target) as client:
            client.bucket().set(b"k", b"v", durability="replicated(1)")
            disk.fill(old)
            # A promise fits where nothing else does.
            with Client(new.target) as taken:
                assert taken.admin.promote(takeover=True).lost == ()
            client.bucket().set(b"k", b"w")
            assert client.bucket().get(b"k") == b"w"
    finally:
        old.kill()
        disk.close()
