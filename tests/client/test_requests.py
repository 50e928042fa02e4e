"""Requests of a call in asyncio: one after the other, in order, also with interceptors, and at the end of the call."""

import asyncio
import gc
from typing import Any

import grpc.aio
import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import Expect, HalfClosed, applied, write_opened
from tests.harness import pass_turns
from upr_client import AsyncClient
from upr_client._async.call import Call
from upr_client._async.io import RequestQueue
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1.key_value_service_pb2_grpc import KeyValueServiceStub


class FakeCall:
    """What gRPC's call does with requests, of which each is over when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int | None] = []
        self.ends: list[asyncio.Future[None]] = []
        self.seen: list[Exception] = []

    def __call__(self, _: object) -> "FakeCall":
        return self

    async def wait_for_connection(self) -> None:
        """It is there."""

    async def write(self, request: int | None) -> None:
        self.begun.append(request)
        self.ends.append(asyncio.get_running_loop().create_future())
        try:
            await self.ends[-1]
        except Exception as error:
            self.seen.append(error)

    async def done_writing(self) -> None:
        await self.write(None)

    def cancel(self) -> None:
        self.seen.append(Exception("cancelled"))


@pytest.mark.asyncio
async def test_requests_are_written_one_after_the_other_and_the_end_is_the_last() -> None:
    call, requests = FakeCall(), RequestQueue[int]()
    requests.begin(call)
    for number in range(3):
        requests.put(number)
    assert call.begun == [0]
    call.ends[0].set_result(None)
    # Before the loop calls back.
    requests.put(3)
    assert call.begun == [0, 1]
    await pass_turns(2)
    assert call.begun == [0, 1]
    requests.close()
    requests.put(4)
    for number in range(1, 4):
        assert call.begun == [*range(number + 1)]
        call.ends[number].set_result(None)
        await pass_turns(2)
    assert (call.begun, call.seen) == ([0, 1, 2, 3, None], [])


@pytest.mark.asyncio
async def test_of_a_write_that_fails_with_its_call_grpc_makes_no_error() -> None:
    call, requests = FakeCall(), RequestQueue[int]()
    requests.begin(call)
    requests.put(0)
    requests.put(1)
    call.ends[0].set_exception(RuntimeError("the call is over"))
    await pass_turns(2)
    requests.put(2)
    requests.close()
    assert (call.begun, call.seen) == ([0], [])


def troubles_of_the_loop() -> list[Any]:
    """Return a list that gets what the event loop would log."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    return told


@pytest.mark.asyncio
async def test_a_half_close_that_fails_with_its_call_is_no_trouble_of_the_event_loop() -> None:
    told = troubles_of_the_loop()
    call, requests = FakeCall(), RequestQueue[int]()
    requests.begin(call)
    requests.close()
    call.ends.pop().set_exception(RuntimeError("the call is over"))
    await pass_turns(2)
    requests.close()
    del call, requests
    gc.collect()
    assert told == []


class PassOn(grpc.aio.StreamStreamClientInterceptor):
    """Does nothing."""

    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return await continuation(details, requests)


@pytest.mark.asyncio
async def test_a_channel_may_have_interceptors() -> None:
    at = partition_of(b"a")
    script = [Expect("open"), write_opened()]
    for number in (1, 2, 3):
        script += [Expect("write"), applied(number, (at, number - 1, number))]
    async with serve(write=[[*script, HalfClosed()]]) as server:
        channel = grpc.aio.insecure_channel(server.target, interceptors=[PassOn()])
        async with channel, AsyncClient(server.target, channel=channel) as client:
            bucket = client.bucket()
            found = [(await bucket.set(b"a", b"v")).seqno for _ in range(3)]
    assert found == [1, 2, 3]


@pytest.mark.asyncio
@pytest.mark.parametrize("listens", [True, False])
async def test_no_task_of_an_interceptor_is_left_of_a_call_that_is_over(listens: bool) -> None:
    told, ended = troubles_of_the_loop(), asyncio.Event()
    async with serve(write=[[Expect("open")]]) as server:
        target = server.target if listens else "127.0.0.1:1"
        async with grpc.aio.insecure_channel(target, interceptors=[PassOn()]) as channel:
            method = KeyValueServiceStub(channel).Write
            call = Call(method, "test", told.append, lambda _: ended.set())
            call.send(kv_pb2.WriteRequest(open=kv_pb2.WriteOpen()))
            await ended.wait()
            await call.cancel()
    await pass_turns(2)
    del call
    gc.collect()
    await pass_turns(2)
    assert told == []
