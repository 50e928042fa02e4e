"""What tests of several buckets ask of a server and of its data directory, and a server in this process."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from tests.harness import RunningServer, until
from tests.raw import RawClient
from upr.config import ServerConfig
from upr.service.buckets.bucket_service import BucketService
from upr.service.server import Server
from upr_client import AsyncClient, Change, Rollback


async def rows_of(client: AsyncClient, bucket: str) -> dict[bytes, bytes | None]:
    """Everything that a bucket holds now."""
    rows: dict[bytes, bytes | None] = {}
    async with client.bucket(bucket).changes(until="now", read_from="any") as changes:
        async for event in changes:
            assert not isinstance(event, Rollback)
            if isinstance(event, Change):
                rows[event.key] = event.value
    return {key: value for key, value in rows.items() if value is not None}


def folders(server: RunningServer) -> set[str]:
    return {path.name for path in (server.data / "buckets").iterdir()}


def break_journal(server: RunningServer, version: int) -> None:
    """Damage the journal of a stopped server's bucket."""
    (segment,) = server.data.glob(f"buckets/{version:016x}/journal/*.journal")
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)


async def folders_are(server: RunningServer, expected: Iterable[int]) -> None:
    """Wait until the folders of exactly these versions are there."""
    names = {f"{version:016x}" for version in expected}
    await until(lambda: folders(server) == names)


@contextlib.asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[Server]:
    """A server in this process."""
    server = Server(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[Server, RawClient]]:
    """A server in this process, and a client of it."""
    config = ServerConfig(folder / "data", "127.0.0.1:0", open_admin=True)
    async with serving(config) as server, RawClient(server.address) as client:
        yield server, client


def started(host: BucketService) -> BucketService:
    """Start a bucket; that its storage failed is told to nobody."""

    async def failed() -> None:
        pass

    host.start(failed)
    return host
