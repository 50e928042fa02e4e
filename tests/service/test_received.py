"""Anonymous memory of a server under clients that send much, and keep what they sent waiting."""

import asyncio
import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, poll, until
from tests.proxy import Proxy
from tests.raw import RawClient, RawWriter
from upr.service.buckets import keepers as keepers_module
from upr.service.buckets.keepers import lasting
from upr.service.overload import intake as intake_module
from upr.service.overload.intake import Intake, abort
from upr_protocol.block import build_block
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.limits import MESSAGE_BYTES_MAX, RECEIVE_LIMIT_BYTES, RECEIVE_WATCH_BYTES
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types

MIB = 2**20
LIMIT_BYTES = 512 * MIB
VALUE_BYTES = 20 * MIB
SAMPLE_SECONDS = 0.01
MANY = 28
"""Large writes, which would be more than LIMIT_BYTES."""


def anonymous(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@contextmanager
def sampled(pid: int) -> Iterator[list[int]]:
    """Sample a process's anonymous memory while the body runs; yields the samples.

    A thread samples: a client that compresses a request holds its event loop meanwhile.
    """
    samples = [anonymous(pid)]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            samples.append(anonymous(pid))

    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(sample)
        try:
            yield samples
        finally:
            ended.set()
            sampling.result()
    samples.append(anonymous(pid))


def within(samples: list[int]) -> None:
    assert len(samples) > 3
    assert max(samples) < LIMIT_BYTES, f"{max(samples) / MIB:.0f} MiB"


def large(size: int = VALUE_BYTES) -> types.Block:
    return block_to_message(build_block([b"k"], [os.urandom(size)]))


async def clients(stack: AsyncExitStack, target: str, count: int) -> list[RawClient]:
    """Connections of their own, so that each has its own flow control."""
    return [await stack.enter_async_context(RawClient(target)) for _ in range(count)]


async def outcomes(calls: Iterable[Awaitable[Any]]) -> list[UprError]:
    """Wait for all; returns the errors, which must be retriable ones with a reason."""
    found = []
    for one in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(one, grpc.RpcError):
            found.append(error_from_call(one))
        elif isinstance(one, BaseException):
            raise one
    return found


async def ended(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )


async def write_large(writer: RawWriter, block: types.Block) -> kv.WriteResult:
    """Write, and again while it is refused for now."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                await writer.send_block(block)
                message: Any = await writer.call.read()
            except asyncio.InvalidStateError:
                message = grpc.aio.EOF
            if message is grpc.aio.EOF:
                raise await ended(writer.call)
            result: kv.WriteResult = message.result
            if not result.HasField("refused"):
                return result
            assert result.refused.reason == "TOO_MANY", result.refused
            assert result.refused.retriable
            assert result.refused.hint
            await asyncio.sleep(0.05)


async def refusal(writer: RawWriter, block: types.Block) -> str:
    """Write once; returns the reason of a refusal, or of the call's end, and nothing for what was taken, or may be."""
    try:
        await writer.send_block(block)
        message: Any = await writer.call.read()
        if message is grpc.aio.EOF:
            raise await ended(writer.call)
    except asyncio.InvalidStateError:
        return error_from_call(await ended(writer.call)).reason
    except grpc.RpcError as error:
        return error_from_call(error).reason
    reason: str = message.result.refused.reason
    return "" if reason == "UNKNOWN_OUTCOME" else reason


class Peer:
    """The context of a call: it has a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def peer(self) -> str:
        return self.name


def test_who_sends_most_loses_its_calls_first_and_one_message_always_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"large": 100 * MIB, "larger": 150 * MIB, "small": MIB // 2}
    held = RECEIVE_LIMIT_BYTES
    monkeypatch.setattr(intake_module, "memory_bytes", lambda: (held, 0))
    monkeypatch.setattr(intake_module, "received_by_peer", lambda: sizes)
    intake = Intake()
    shed: list[str] = []
    for name in sizes:
        context: Any = Peer(name)
        intake.expect(context, partial(shed.append, name))
    intake.look()
    assert shed == ["larger"], "72 MiB above the mark, and the largest has more"
    held = RECEIVE_WATCH_BYTES + 200 * MIB
    intake.look()
    assert shed == ["larger", "large"]
    sizes["small"] = MESSAGE_BYTES_MAX
    intake.look()
    assert shed == ["larger", "large"], "one message alone passes"


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("left_out", ["RECEIVE_CLOSE_BYTES", "RECEIVE_LIMIT_BYTES"])
async def test_large_writes_that_never_end(server_process: StartServer, left_out: str) -> None:
    """The loop ends calls, and above that a thread closes connections: each is enough without the other."""
    server = server_process(constants={f"upr.service.overload.intake.{left_out}": 2**50})
    block = large()
    with Proxy(server.target) as proxy:
        proxy.stall_after("to server", VALUE_BYTES - MIB)
        async with AsyncExitStack() as stack:
            samples = stack.enter_context(sampled(server.pid))
            calls = [await one.writer() for one in await clients(stack, proxy.target, MANY)]
            writes = [asyncio.ensure_future(call.send_block(block)) for call in calls]

            async def settled() -> bool:
                return bool(proxy.stalled + sum(call.call.done() for call in calls) >= MANY)

            await poll(settled)
            # Who sends less than they is served meanwhile.
            (honest,) = await clients(stack, server.target, 1)
            await write_large(await honest.writer(), large(MIB))
            for write in writes:
                write.cancel()
            await asyncio.gather(*writes, return_exceptions=True)
        assert sum(call.call.done() for call in calls) > MANY // 3
    within(samples)


@pytest.mark.asyncio
async def test_a_tail_that_was_allowed_more_does_not_count_as_what_arrives(
    server_process: StartServer,
) -> None:
    server = server_process(
        # No flush before three fifths of it.
        "--tail-bytes",
        "512MiB",
        # A call that sent much is not read again while too much memory is held.
        constants={"upr.service.overload.intake.CALM_SECONDS": 1000},
    )
    async with RawClient(server.target) as client:
        writer = await client.writer()
        for _ in range(100):
            await writer.send_block(large(2 * MIB))
            assert not (await writer.result()).HasField("refused")
        assert anonymous(server.pid) > RECEIVE_WATCH_BYTES


@pytest.mark.long
@pytest.mark.asyncio
async def test_large_writes_that_wait_for_the_tail(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold the committer"
    hold.touch()
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"})
    block = large()
    async with AsyncExitStack() as stack:
        samples = stack.enter_context(sampled(server.pid))
        calls = [await one.writer() for one in await clients(stack, server.target, MANY)]
        answers = [asyncio.ensure_future(refusal(call, block)) for call in calls]
        # The tail takes four of them, and three wait for it or for their turn.
        first = asyncio.as_completed(answers, timeout=WAIT_SECONDS)
        refused = {await answer for answer in itertools.islice(first, MANY - 7)}
        # On a slow machine the answer to what is in the tail may come first, and connections are closed as well.
        assert refused <= {"TOO_MANY", "UNAVAILABLE", "INTERNAL", ""}
        assert refused != {""}
        hold.unlink()
        told = Counter(await asyncio.gather(*answers))
        assert told[""] <= 7
        # There, some of those in the tail have lost their connection too.
        assert told[""] + told["UNAVAILABLE"] + told["INTERNAL"] >= 4
    within(samples)


@pytest.mark.asyncio
async def test_what_a_flush_frees_goes_back_though_memory_was_returned_just_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tail, returned = 60 * MIB, 0

    def give_back() -> None:
        nonlocal returned
        returned += 1

    # What is freed stays the process's, until it is given back.
    monkeypatch.setattr(intake_module, "memory_bytes", lambda: (130 * MIB, 0))
    monkeypatch.setattr(intake_module, "give_back_freed", give_back)
    intake = Intake(lambda: tail)
    for expected in (1, 1, 2, 2):
        for _ in range(2 * intake_module.QUIET_TICKS):
            await intake._give_back(intake.look())
        assert returned == expected
        if expected == 1:
            tail -= intake_module.GIVE_BACK_BYTES


@pytest.mark.long
@pytest.mark.asyncio
async def test_idle_calls_keep_nothing_of_what_they_have_written(
    server_process: StartServer,
) -> None:
    server = server_process("--flush-seconds", "0.2")
    block = large()
    async with AsyncExitStack() as stack:
        samples = stack.enter_context(sampled(server.pid))
        (client,) = await clients(stack, server.target, 1)
        writers = [await client.writer() for _ in range(7)]
        for writer in writers:
            await write_large(writer, block)
        # What is not in the tail any more has gone back while the calls are still open.
        await until(lambda: anonymous(server.pid) <= 110 * MIB)
        for writer in writers:
            await write_large(writer, large(10))
    within(samples)


@pytest.mark.long
@pytest.mark.asyncio
async def test_names_are_looked_at_before_anything_else_and_never_shown_whole(
    server_process: StartServer,
) -> None:
    server = server_process()
    name = "x" * VALUE_BYTES
    async with AsyncExitStack() as stack:
        samples = stack.enter_context(sampled(server.pid))
        opened = await clients(stack, server.target, 3)

        async def follow(one: RawClient, bucket: str) -> None:
            call = one.changes.Follow()
            await call.write(wire.FollowRequest(open=wire.Open(bucket=bucket)))
            if await call.read() is grpc.aio.EOF:
                raise await ended(call)

        def calls(one: RawClient, bucket: str) -> list[Callable[[], Awaitable[Any]]]:
            return [
                lambda: one.changes.Hello(wire.HelloRequest(bucket=bucket)),
                lambda: one.admin.CreateBucket(admin.CreateBucketRequest(name=bucket)),
                lambda: one.admin.CreateBucket(
                    admin.CreateBucketRequest(name="a", compression=bucket)
                ),
                lambda: one.admin.DropBucket(admin.DropBucketRequest(name=bucket)),
                lambda: one.kv.Get(kv.GetRequest(bucket=bucket, keys=[b"k"])),
                lambda: follow(one, bucket),
            ]

        for size, which in itertools.product((VALUE_BYTES, 5000), range(6)):
            errors = await outcomes([calls(one, name[:size])[which]() for one in opened])
            assert len(errors) == len(opened)
            reasons = {error.reason for error in errors}
            # Too much may be arriving, and who still sends then may be told INTERNAL by its own gRPC.
            assert reasons <= {"INVALID_ARGUMENT"} | (
                {"INTERNAL", "TOO_MANY", "UNAVAILABLE"} if size > 5000 else set()
            )
            for error in errors:
                # A request of such a size is refused before it is parsed.
                assert "x" * (101 if size == 5000 else 2) not in error.message
                assert len(error.message) + len(error.hint) < 400
        (error,) = await outcomes([opened[0].changes.Hello(wire.HelloRequest(bucket=name[:150]))])
        assert (error.reason, "x" * 101 in error.message) == ("BUCKET_NOT_FOUND", False)
        assert "x" * 90 in error.message
    within(samples)


@pytest.mark.asyncio
async def test_what_arrives_is_watched_on_once_there_is_memory_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keepers_module, "AGAIN_SECONDS", 0.0)
    intake, looks, on = Intake(), itertools.count(), asyncio.Event()

    def look() -> int:
        if (number := next(looks)) < 3:
            raise RuntimeError("can't start new thread") if number else MemoryError
        on.set()
        return 0

    monkeypatch.setattr(intake, "look", look)
    task = asyncio.create_task(lasting(intake.watch))
    async with asyncio.timeout(WAIT_SECONDS):
        await on.wait()
    task.cancel()
    (told,) = caplog.records
    assert told.message == "work in the background begins anew"
    # It may be a fault of the server, and nobody else tells where.
    assert told.exc_info


def test_the_thread_watches_on_once_there_is_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, on = itertools.count(), threading.Event()

    def memory() -> tuple[int, int]:
        if not next(looks):
            raise MemoryError
        on.set()
        return 0, 0

    monkeypatch.setattr(intake_module, "memory_bytes", memory)
    with Intake().guarded():
        assert on.wait(WAIT_SECONDS)


@pytest.mark.asyncio
async def test_a_message_that_comes_when_its_call_has_ended_is_taken() -> None:
    """gRPC frees only messages that are taken."""
    arriving: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    taken: list[bytes] = []

    class Read:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def read(self) -> bytes:
            taken.append(await arriving)
            return taken[0]

    context: Any = Read()
    receiving = asyncio.create_task(Intake().receive(context, 10, "a Get"))
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    arriving.set_result(b"late")
    await asyncio.sleep(0)
    assert taken == [b"late"]


@pytest.mark.parametrize("with_cause", [False, True])
@pytest.mark.asyncio
async def test_a_refusal_on_its_way_keeps_nothing_of_the_request(with_cause: bool) -> None:
    class Request:
        pass

    def refused() -> tuple[UprError, weakref.ref[Request]]:
        request = Request()
        try:
            try:
                raise ValueError(request)
            except ValueError as failed:
                raise InvalidArgumentError("it cannot be parsed") from (
                    failed if with_cause else None
                )
        except UprError as error:
            return error, weakref.ref(request)

    error, kept = refused()

    class Context:
        async def abort(self, *_: object) -> None:
            assert kept() is None
            raise grpc.aio.AbortError

    with pytest.raises(grpc.aio.AbortError):
        await abort(Context(), error)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.asyncio
async def test_compressed_requests_are_refused(server_process: StartServer) -> None:
    server = server_process()
    hello = wire.HelloRequest(
        bucket="x" * (16 * MIB), partitions=[wire.HelloPartition(partition=0)]
    )
    async with AsyncExitStack() as stack:
        samples = stack.enter_context(sampled(server.pid))
        opened = await clients(stack, server.target, 8)
        calls = [one.changes.Hello(hello, compression=grpc.Compression.Gzip) for one in opened]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        codes = {error.code() for error in errors if isinstance(error, grpc.aio.AioRpcError)}
        assert len(errors) == 8
        assert codes == {grpc.StatusCode.UNIMPLEMENTED}
        assert (await opened[0].hello({0: None})).answers
    within(samples)
    assert max(samples) - samples[0] < 64 * MIB, "requests were decompressed"
