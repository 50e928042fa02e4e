"""More producers than are remembered at once: whose turn it is, and what is known of them then."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from upr.config import ServerConfig
from upr.engine.bucket import PRODUCERS_IN_MEMORY
from upr.service.catalog import create_bucket
from upr.service.host import BucketHost
from upr.storage.directory import DataDirectory
from upr.storage.keyspace import ProducerRow
from upr_protocol.block import Block
from upr_protocol.errors import TooManyError
from upr_protocol.rows import build_block

WAIT_SECONDS = 30.0


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[BucketHost]:
    async def failed() -> None:
        pass

    directory = DataDirectory(tmp_path / "data")
    folder = create_bucket(directory, "default")
    host = BucketHost(folder, ServerConfig(data=folder))
    host.start(failed)
    yield host
    await host.close()
    directory.close()


def row(key: bytes) -> Block:
    return build_block([key], [b"v"])


@pytest.mark.asyncio
async def test_more_short_writers_than_are_remembered_take_turns(host: BucketHost) -> None:
    for i in range(PRODUCERS_IN_MEMORY + 5):
        name = b"loader %d" % i
        try:
            producer = await asyncio.wait_for(host.open_producer(name), WAIT_SECONDS)
        except TooManyError as error:
            raise AssertionError(f"nobody writes, and still: {error}") from error
        await host.write(row(b"a"), name, producer, 1)
        producer.calls -= 1


@pytest.mark.asyncio
async def test_who_waited_to_be_remembered_knows_what_was_written_meanwhile(
    host: BucketHost,
) -> None:
    others = [await host.open_producer(b"other %d" % i) for i in range(PRODUCERS_IN_MEMORY)]
    await host.write(row(b"a"), b"other 0", others[0], 1)
    waiting = asyncio.create_task(host.open_producer(b"waits"))
    while not host._waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    # Another call of that name came, wrote, and was forgotten.
    block = row(b"a")
    partition = int(block.runs["partition"][0])
    host.store.put_flush([], {}, {(b"waits", partition): ProducerRow(1, 1, 0, 1, 1)})
    others[1].calls -= 1

    producer = await asyncio.wait_for(waiting, WAIT_SECONDS)

    assert producer.known(1, block.runs) is not None
