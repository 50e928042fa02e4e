# ruff: noqa: SIM117, ASYNC110
"""The buffered writer under many hands: tasks, threads, processes, cancellation. What only one flavour can do."""

import asyncio
import os
import subprocess
import sys
import threading
from collections import defaultdict

import pytest

from tests.client._async.adapter import running as running_async
from tests.client._sync.adapter import running
from tests.client.key_values import Faults, KeyValueServer
from upr_client import AsyncClient, Client

FAR_SECONDS = 600.0


def check_orders(server: KeyValueServer, writers: int, rows: int) -> None:
    """Each writer wrote ``rows`` rising numbers to a key of its own and to one that all share."""
    history = defaultdict(list)
    for key, value in server.applied:
        assert value is not None
        history[key].append(value)
    for writer in range(writers):
        numbers = [b"%d" % number for number in range(rows)]
        assert history[b"own-%d" % writer] == numbers
        mine = b"%d " % writer
        shared = [value for value in history[b"shared"] if value.startswith(mine)]
        assert shared == [mine + number for number in numbers]


@pytest.mark.asyncio
async def test_many_tasks_over_lost_connections() -> None:
    server = KeyValueServer(Faults(lost=[5, 0, 11, 2]))
    async with running_async(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(batch_rows=40, max_outstanding_bytes=5000) as writer:

            async def write(task: int) -> None:
                for number in range(500):
                    await writer.set(b"own-%d" % task, b"%d" % number)
                    await writer.set(b"shared", b"%d %d" % (task, number))

            await asyncio.gather(*(write(task) for task in range(8)))
    assert server.calls == 5
    check_orders(server, 8, 500)


def test_many_threads_over_lost_connections() -> None:
    server = KeyValueServer(Faults(lost=[5, 0, 11, 2]))
    with running(server), Client(server.target) as client:
        errors: list[Exception] = []
        with client.bucket().writer(batch_rows=40, max_outstanding_bytes=5000) as writer:

            def write(thread: int) -> None:
                try:
                    for number in range(500):
                        writer.set(b"own-%d" % thread, b"%d" % number)
                        writer.set(b"shared", b"%d %d" % (thread, number))
                        if number % 100 == thread:
                            writer.flush()
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert errors == []
    check_orders(server, 8, 500)


@pytest.mark.asyncio
async def test_a_row_is_written_also_when_its_call_is_cancelled() -> None:
    server = KeyValueServer(Faults(unanswered=2))
    async with running_async(server):
        async with AsyncClient(server.target, request_timeout=1, retry_seconds=None) as client:
            bucket = client.bucket()
            async with bucket.writer(
                linger_seconds=FAR_SECONDS, max_outstanding_bytes=30
            ) as writer:
                await writer.set(b"a", b"1")
                await writer.flush()
                await writer.set(b"b", b"1")
                waiting = asyncio.create_task(writer.set(b"c", b"x" * 30))
                while writer._outstanding < 30:
                    await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                # The connection breaks, and the next one answers.
                server.faults.unanswered = 2**62
                await server.stop()
                await server.start(server.target)
    assert server.values == {b"a": b"1", b"b": b"1", b"c": b"x" * 30}


@pytest.mark.asyncio
async def test_no_task_is_left() -> None:
    server = KeyValueServer()
    async with running_async(server):
        async with AsyncClient(server.target) as client:
            async with client.bucket().writer() as writer:
                await writer.set(b"a", b"1")
        assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("upr")]


_FORKED = """
import os, sys, threading
from upr_client import Client
from upr_client.errors import ClosedError
from upr_client.lowlevel import hello, write_blocks

def refused(call):
    try:
        call()
    except ClosedError as error:
        return "another process" in str(error)
    return False

client = Client(sys.argv[1])
admin = client.admin
bucket = client.bucket()
bucket.set(b"k", b"before")
writer = bucket.writer(linger_seconds=600.0).__enter__()
writer.set(b"k", b"parent")
changes = bucket.changes(until="now")
held, forked = threading.Event(), threading.Event()

def hold():
    with client._connection._mutex:
        held.set()
        forked.wait()

# In the child this thread is not there, and the lock is held for ever.
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    calls = [
        lambda: bucket.set(b"k", b"v"), lambda: bucket.delete(b"k"), lambda: bucket.write_many([(b"k", b"v")]),
        lambda: bucket.get(b"k"), lambda: bucket.get_many([b"k"]), lambda: hello(bucket, {0: None}),
        lambda: write_blocks(bucket, []), lambda: bucket.writer(), lambda: bucket.cut("c"), lambda: bucket.changes(),
        lambda: admin.failover_logs(bucket), lambda: admin.partitions(bucket), lambda: admin.storage(bucket),
        lambda: admin.consumers(bucket), lambda: admin.forget_consumer(bucket, "c"),
        lambda: admin.reset_consumer(bucket, "c", "now"), lambda: admin.create_cut(bucket, "c"),
        lambda: admin.renew_cut(bucket, "c"), lambda: admin.release_cut(bucket, "c"),
        lambda: admin.cuts(bucket), lambda: admin.purge(bucket),
        lambda: changes.__enter__(), lambda: writer.set(b"k", b"child"), lambda: writer.delete(b"k"),
        lambda: writer.flush(), lambda: client.bucket(), lambda: admin.status(), lambda: admin.buckets(),
        lambda: admin.create_bucket("b"), lambda: admin.drop_bucket("b"), lambda: client.__enter__(),
    ]
    failed = [number for number, call in enumerate(calls) if not refused(call)]
    writer.__exit__(None, None, None)
    client.close()
    print(f"child {failed}", flush=True)
    os._exit(0)
forked.set()
assert os.waitpid(child, 0)[1] == 0
writer.__exit__(None, None, None)
with client.bucket().changes(until="now") as changes:
    print("parent", [event.value for event in changes if hasattr(event, "value")], flush=True)
client.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_so_at_every_entrance(
    target: str,
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FORKED, target],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.splitlines() == ["child []", "parent [b'before', b'parent']"], run.stderr
    assert run.returncode == 0
