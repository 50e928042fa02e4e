"""Health, beside watchers that do not read."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.harness import WAIT_SECONDS
from tests.service.bucket_state import connected
from upr.service.health import BUCKET, Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Blocked:
    """A context of a call whose transport takes nothing."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def write(self, _: object) -> None:
        self.writing.set()
        await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_a_watcher_that_takes_nothing_keeps_nobody_waiting() -> None:
    """It holds what setting a status waits for: neither a failed bucket nor the end of the server was told."""
    health, blocked = Health(["a", "b"], ["b"]), Blocked()
    watch = asyncio.create_task(
        health.servicer.Watch(health_pb2.HealthCheckRequest(service=""), blocked)
    )
    await blocked.writing.wait()

    async def status(name: str) -> Any:
        answer = await health.servicer.Check(health_pb2.HealthCheckRequest(service=name), None)
        return answer.status

    async with asyncio.timeout(WAIT_SECONDS):
        await health.serving()
        await health.tell(writes=False, buckets={"x": False})
        assert [await status(name) for name in ("", "a", "b", BUCKET + "x")] == [
            NOT_SERVING,
            SERVING,
            NOT_SERVING,
            NOT_SERVING,
        ]
        await health.tell(writes=True, buckets={"x": True})
        assert await status("") == await status(BUCKET + "x") == SERVING
        await health.shut_down()
        assert await status("") == await status("a") == NOT_SERVING
    watch.cancel()


@pytest.mark.asyncio
async def test_a_health_check_is_of_a_name_and_no_more(target: str) -> None:
    """A Watch keeps its request: a thousand of them held a quarter of a gigabyte."""
    async with grpc.aio.insecure_channel(target) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        long = health.Watch(health_pb2.HealthCheckRequest(service="x" * 2000))
        with pytest.raises(grpc.RpcError, match="must be at most 1024"):
            await long.read()
        short = health.Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await short.read()).status == SERVING


@pytest.mark.asyncio
async def test_calls_do_not_pay_for_the_methods_of_health_and_reflection(tmp_path: Path) -> None:
    """gRPC waits anew for each method that is registered by name, with every call of any method."""
    async with connected(tmp_path):
        waiting = [repr(task) for task in asyncio.all_tasks()]
        assert any("AioServer._server_main_loop" in one for one in waiting)
        assert not any("AioServer._request_registered_call" in one for one in waiting)


@pytest.mark.asyncio
async def test_a_method_that_grpc_declares_and_lacks_is_unimplemented(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code says so, and nothing is wrong with the server."""
    monkeypatch.setattr(health.aio.HealthServicer, "Check", health_pb2_grpc.HealthServicer.Check)
    async with connected(tmp_path) as (server, _):
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert refused.value.details() == "this server has no Check"
        assert not [one for one in caplog.records if one.levelname == "ERROR"]
