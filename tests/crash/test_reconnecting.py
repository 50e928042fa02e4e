"""Fifty clients of all partitions come back at once after a restart."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS
from tests.raw import OWN_CONNECTION, RawClient, RawFollow, seqnos_of, start_at
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import admin_service_pb2_grpc as admin_grpc

pytestmark = [pytest.mark.crash, pytest.mark.long]

MIB = 2**20
CLIENTS = 50
PARTITIONS = 1024
KEYS = 4000
GROWN_BYTES = 160 * MIB
HEALTH_SECONDS = 10.0


async def resume(client: RawClient, logs: list[list[tuple[int, int]]], at: list[int]) -> RawFollow:
    """Resume all partitions over one call, as a client that had everything when the server was killed."""
    follow = await client.follow(heartbeat_seconds=60)
    answers = await follow.start(
        *(start_at(p, at[p], logs[p][-1][0], data_id=logs[p][-1][0]) for p in range(PARTITIONS))
    )
    # One record was added above what they have: they are sent back to it, undo nothing, and resume.
    again = []
    for answer in answers:
        assert answer.HasField("rollback"), answer
        told = answer.rollback
        assert told.rollback_seqno == at[answer.partition]
        again.append(start_at(answer.partition, at[answer.partition], told.failover_id))
    for answer in await follow.start(*again):
        assert answer.HasField("started"), answer
    return follow


@pytest.mark.asyncio
async def test_fifty_clients_of_all_partitions_come_back_at_once(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        seqnos_of(await writer.write([(b"key %d" % n, b"v" * 100) for n in range(KEYS)]))
        logs = await client.logs()
        at = [info.high_seqno for info in await client.partitions()]
    assert sum(at) == KEYS
    server.kill()
    server.start()
    clients = [RawClient(server.target) for _ in range(CLIENTS)]
    took: list[float] = []
    with watched(server.target) as watch:
        began = time.monotonic()

        async def come_back(client: RawClient) -> RawFollow:
            follow = await resume(client, logs, at)
            took.append(time.monotonic() - began)
            return follow

        async with asyncio.timeout(WAIT_SECONDS), RawClient(server.target) as other:
            follows = await asyncio.gather(*map(come_back, clients))
            now = await other.admin.GetStatus(admin.GetStatusRequest(), timeout=WAIT_SECONDS)
            assert (now.follow_calls, now.buckets[0].streams) == (CLIENTS, CLIENTS * PARTITIONS)
            # Nobody is forgotten: each gets what is written now.
            writer = await other.writer("")
            seqnos_of(await writer.write([(b"key 1", b"new")]))
            await asyncio.gather(*(follow.until("frame") for follow in follows))
        for client in clients:
            await client.__aexit__(None, None, None)
    grown = max(watch.memory) - watch.memory[0]
    print(
        f"{CLIENTS} clients were back after {min(took):.1f} to {max(took):.1f} s, "
        f"{len(watch.seconds)} health checks took at most {max(watch.seconds):.2f} s, "
        f"{grown / MIB:.0f} MiB more than {watch.memory[0] / MIB:.0f}"
    )
    assert len(watch.seconds) > 3
    assert max(watch.seconds) < HEALTH_SECONDS
    assert grown < GROWN_BYTES


class Watch:
    """What the server answered meanwhile.

    Attributes:
        seconds: how long each health check took.
        memory: anonymous memory in bytes at each.
    """

    def __init__(self, target: str) -> None:
        self.seconds: list[float] = []
        self.memory: list[int] = []
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self._target = target

    def run(self) -> None:
        """Ask until it is over, in a thread: the clients keep the event loop of this process busy."""
        try:
            with grpc.insecure_channel(self._target, options=OWN_CONNECTION) as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                status: Any = admin_grpc.AdminServiceStub(channel)
                while not self.over.is_set():
                    began = time.monotonic()
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
                    self.seconds.append(time.monotonic() - began)
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                    now = status.GetStatus(admin.GetStatusRequest(), timeout=WAIT_SECONDS)
                    self.memory.append(now.anonymous_bytes)
        except BaseException as error:
            self.failure = error


@contextmanager
def watched(target: str) -> Iterator[Watch]:
    """Watch the server while the body runs."""
    watch = Watch(target)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    while not watch.memory and watch.failure is None:
        time.sleep(0.001)
    try:
        yield watch
    finally:
        watch.over.set()
        thread.join()
    if watch.failure is not None:
        raise watch.failure
