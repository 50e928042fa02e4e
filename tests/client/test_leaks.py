# ruff: noqa: SIM117
"""Leaving in the middle leaves nothing behind, in both flavours; what only one of them can do."""

import asyncio
import signal
import threading
import weakref
from typing import Any

import pytest

from tests.client._async.adapter import serve as serve_async
from tests.client._sync.adapter import serve
from tests.client.scripted import (
    Expect,
    Hold,
    answers,
    applied,
    frame,
    heartbeat,
    opened,
    run_block,
    started,
    write_opened,
)
from upr_client import AsyncClient, Client, Only
from upr_protocol.partitioning import partition_of

FOLLOW = [
    Expect("open"),
    opened(),
    Expect("start"),
    answers(started(1, 7)),
    frame((7, run_block(1, 0, 2))),
    heartbeat(),
    Hold(),
]
P = partition_of(b"k")
WRITE = [Expect("open"), write_opened(), Expect("write"), applied(1, (P, 0, 1)), Hold()]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_bucket_that_did_not_write_goes_with_its_last_user(kind: Any) -> None:
    client = kind("127.0.0.1:1")
    unused = weakref.ref(client.bucket())
    assert unused() is None
    # It may have rows to write when the client is closed.
    bucket = client.bucket()
    bucket.writer()
    assert list(client._connection.writing) == [bucket]


@pytest.mark.asyncio
async def test_no_task_is_left() -> None:
    async with serve_async([FOLLOW] * 2, [WRITE]) as server:
        before = asyncio.all_tasks()
        async with AsyncClient(server.target, request_timeout=1) as client:
            await client.bucket().set(b"k", b"v")
            for _ in range(2):
                async with client.bucket().changes(only=Only([1])) as changes:
                    async for _ in changes:
                        break
        mine = {task for task in asyncio.all_tasks() - before if task.get_name().startswith("upr")}
        assert not mine


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_closes_its_stream() -> None:
    async with serve_async([FOLLOW]) as server, AsyncClient(server.target) as client:
        got = asyncio.Event()

        async def consume() -> None:
            async with client.bucket().changes(only=Only([1])) as changes:
                async for _ in changes.batches():
                    got.set()

        task = asyncio.create_task(consume())
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("upr")]


def test_no_thread_is_left() -> None:
    with serve([FOLLOW] * 2, [WRITE]) as server:
        before = set(threading.enumerate())
        with Client(server.target, request_timeout=1) as client:
            client.bucket().set(b"k", b"v")
            for _ in range(2):
                with client.bucket().changes(only=Only([1])) as changes:
                    for _ in changes:
                        break
        for thread in set(threading.enumerate()) - before:
            # gRPC's own end soon, ours have ended.
            assert not thread.name.startswith("upr")
            thread.join(10)
            assert not thread.is_alive()


def test_ctrl_c_interrupts_a_consumer_that_waits() -> None:
    main = threading.main_thread().ident
    assert main is not None
    with serve([FOLLOW]) as server, Client(server.target) as client:
        with client.bucket().changes(only=Only([1])) as changes:
            batches = changes.batches()
            next(batches)
            interrupt = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))

            def wait() -> None:
                interrupt.start()
                next(batches)

            with pytest.raises(KeyboardInterrupt):
                wait()
            interrupt.join()
