"""Closing a client under a call that waits: the call says so, in both flavours."""

import asyncio
import threading

import pytest

from tests.client._async.adapter import running as running_async
from tests.client._sync.adapter import running
from tests.client.key_values import Faults, KeyValueServer
from upr_client import AsyncClient, Client
from upr_client.errors import ClosedError, UnavailableError


@pytest.mark.asyncio
async def test_a_task_learns_that_its_client_was_closed() -> None:
    server = KeyValueServer(Faults(silent=True))
    async with running_async(server):
        client = AsyncClient(server.target)
        waiting = asyncio.create_task(client.bucket().get(b"k"))
        await asyncio.to_thread(server.asked.wait)
        await client.close()
        with pytest.raises(ClosedError, match="the client was closed"):
            await waiting


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    server = KeyValueServer(Faults(silent=True))
    async with running_async(server), AsyncClient(server.target) as client:
        waiting = asyncio.create_task(client.bucket().get(b"k"))
        await asyncio.to_thread(server.asked.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(UnavailableError, match="did not answer in time"):
            await client.bucket().get(b"k", seconds=0.05)


def test_a_thread_learns_that_its_client_was_closed() -> None:
    server = KeyValueServer(Faults(silent=True))
    with running(server):
        client = Client(server.target)
        errors: list[Exception] = []

        def get() -> None:
            try:
                client.bucket().get(b"k")
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=get)
        thread.start()
        server.asked.wait()
        client.close()
        thread.join()
    assert [type(error) for error in errors] == [ClosedError]
