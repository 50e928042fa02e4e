"""Small file systems, filled through the server until it refuses: what was acknowledged is stored by a clean stop."""

import asyncio
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.test_full_disk import check_clean
from tests.harness import RunningServer
from tests.raw import RawClient
from upr_client import AsyncClient, Change, UprError
from upr_client.types import AsyncBucket

pytestmark = [pytest.mark.crash, pytest.mark.long, pytest.mark.usefixtures("soon")]

MIB = 2**20
ROWS = 500
WRITERS = 4


class Disk:
    """A file system of its own of a size: ext4 on a loop device, or a tmpfs."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(mib * MIB)
        made = _done("mkfs.ext4", "-q", "-m", "0", "-F", str(image)) and _done(
            "mount", "-o", "loop", str(image), str(self.folder)
        )
        self.mounted = made or _done(
            "mount", "-t", "tmpfs", "-o", f"size={mib}m", "upr", str(self.folder)
        )

    def close(self) -> None:
        """Take it away."""
        if self.mounted:
            _done("umount", "-l", str(self.folder))


def _done(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    yield made
    made.close()


def value(key: bytes, size: int) -> bytes:
    return random.Random(key).randbytes(size)


async def fill(bucket: AsyncBucket, writer: int, size: int, most: int) -> list[bytes]:
    """Write rows that are never written again until a write is refused; the keys that were acknowledged."""
    acknowledged: list[bytes] = []
    while len(acknowledged) * size < most:
        first = len(acknowledged)
        keys = [b"%d %d" % (writer, first + i) for i in range(max(min(ROWS, MIB // size), 1))]
        try:
            await bucket.write_many([(key, value(key, size)) for key in keys])
        except UprError as error:
            if error.reason != "NO_ROOM":
                raise
            break
        acknowledged += keys
    return acknowledged


async def check_all_there(bucket: AsyncBucket, keys: list[bytes], size: int) -> None:
    missing = set(keys)
    async with bucket.changes(until="now") as changes:
        async for change in changes:
            if isinstance(change, Change) and change.key in missing:
                assert change.value == value(change.key, size)
                missing.discard(change.key)
    assert not missing


def make_room(disk: Disk, ballast: Path, mib: int) -> None:
    """Have a ballast leave so much room."""
    found = os.statvfs(disk.folder)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - mib * MIB)


async def fill_and_stop(disk: Disk, size: int, left: int) -> None:
    """Fill, stop, start, make room and go on.

    Args:
        left: of a larger file system only so many MiB are left free; 0 for all.
    """
    ballast = disk.folder / "ballast"
    if left:
        make_room(disk, ballast, left)
    else:
        ballast.write_bytes(bytes(16 * MIB))
    # It syncs, so that the file system has to find the room.
    server = RunningServer(disk.folder, syncs=True)
    server.log = disk.folder.parent / "server.log"
    server.start()
    try:
        async with AsyncClient(server.target, retry_seconds=1) as client:
            bucket = client.bucket("default")
            # Where nothing could be mounted there is no end to it.
            most = 2**40 if disk.mounted else 64 * MIB // WRITERS
            filled = await asyncio.gather(*(fill(bucket, w, size, most) for w in range(WRITERS)))
            keys = [key for part in filled for key in part]
            stored = len(keys) * size
            if disk.mounted:
                # Not much of the disk is left unused.
                space = os.statvfs(disk.folder)
                assert space.f_bavail * space.f_frsize < max(stored // 2, 32 * MIB)
        assert await asyncio.to_thread(server.terminate) == 0, server.log_text()
        await check_clean(server)
        await asyncio.to_thread(server.start)
        async with RawClient(server.target) as raw:
            assert {len(log) for log in await raw.logs()} == {1}
        async with AsyncClient(server.target) as client:
            bucket = client.bucket("default")
            await check_all_there(bucket, keys, size)
            # With room again writing resumes by itself.
            ballast.unlink()
            more = [b"more %d" % i for i in range(2 * MIB // size or 1)]
            await bucket.write_many([(key, value(key, size)) for key in more])
            await check_all_there(bucket, more, size)
        assert await asyncio.to_thread(server.terminate) == 0, server.log_text()
        await asyncio.to_thread(server.start)
        async with RawClient(server.target) as raw:
            assert {len(log) for log in await raw.logs()} == {1}
        assert await asyncio.to_thread(server.terminate) == 0
    finally:
        server.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("disk", [128], indirect=True)
async def test_a_disk_of_128_mib(disk: Disk) -> None:
    await fill_and_stop(disk, 2000, 0)


@pytest.mark.timeout(900)
@pytest.mark.asyncio
@pytest.mark.parametrize(("disk", "size"), [(1024, 200_000), (4096, 8000)], indirect=["disk"])
async def test_a_disk_of_some_gib(disk: Disk, size: int) -> None:
    await fill_and_stop(disk, size, 60)
