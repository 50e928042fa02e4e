"""Limits of calls, of each peer and in all; what a peer's expensive calls may take; consumers that are too slow."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, poll, until
from tests.raw import OWN_CONNECTION, RawClient, RawFollow, start_at
from upr.service.overload import callers as callers_module
from upr.service.overload.callers import (
    KEPT_UP_BURST_SECONDS,
    PEER_BURST_SECONDS,
    PEER_SHARE,
    Callers,
    peer_of,
)
from upr_client import AsyncClient
from upr_protocol.errors import TooManyError
from upr_protocol.limits import FOLLOW_CALLS_MAX, OTHER_CALLS_MAX, PARTITIONS, PEER_CALLS
from upr_protocol.wire.grpc import CLIENT_OPTIONS, error_from_call
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes
from upr_protocol.wire.v1 import change_stream_service_pb2_grpc as changes_grpc

MINE = int(FOLLOW_CALLS_MAX * PEER_CALLS)
MIB = 2**20
SOON = {
    "upr.service.follow.HALF_CLOSE_SECONDS": 0.2,
    "upr.service.follow.SLOW_BYTES_A_SECOND": 2**30,
}
"""A server that waits no longer than the reader's time for who takes nothing."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("ipv4:10.1.2.3:4444", "10.1.2.3"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:4444", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:4444", "2001:db8:1:2::/64"),
        ("ipv6:[::ffff:10.1.2.3]:4444", "10.1.2.3"),
        ("ipv6:[fe80::1%eth0]:4444", "fe80::/64"),
        ("unix:", "unix:"),
        ("", ""),
    ],
)
def test_a_peer_is_a_host(address: str, peer: str) -> None:
    assert peer_of(address) == peer


def test_a_peer_cannot_have_all_calls() -> None:
    callers = Callers(Clock())
    with contextlib.ExitStack() as stack:
        for _ in range(MINE):
            stack.callback(callers.open("Follow", "a"))
        with pytest.raises(TooManyError, match=f"open Follow calls of a are {MINE};"):
            callers.open("Follow", "a")
        for _ in range(FOLLOW_CALLS_MAX - MINE):
            stack.callback(callers.open("Follow", "b"))
        with pytest.raises(TooManyError, match=f"open Follow calls are {FOLLOW_CALLS_MAX};"):
            callers.open("Follow", "c")
        stack.callback(callers.open("Write", "a"))
        stack.callback(callers.open("Hello", "a"))
        stack.callback(callers.open("Get", "a"))
        assert callers._open["other", ""] == 2
    assert not callers._open


@pytest.mark.asyncio
async def test_who_has_used_up_its_share_waits_and_is_refused_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, slept = Clock(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    callers = Callers(clock)

    async def no_turn() -> None:
        pass

    monkeypatch.setattr(callers.turns, "turn", no_turn)
    for _ in range(10):
        await callers.pay("a", PEER_BURST_SECONDS / 10)
    assert slept == []
    await callers.pay("a", 0.5)
    await callers.pay("a", 0.5)
    assert slept == [pytest.approx(0.5 / PEER_SHARE)]
    await callers.pay("a", 3.0)
    assert slept[-1] == pytest.approx(1.0 / PEER_SHARE)
    slept.clear()
    with pytest.raises(TooManyError, match="more than their share") as refused:
        await callers.pay("a", 0.01)
    assert refused.value.retriable
    assert "wait 10.0 s" in refused.value.hint
    assert slept == [callers_module.REFUSED_SECONDS]
    await callers.pay("b", 0.01)
    clock.now += 5
    slept.clear()
    for options in ({"size": 2 * MIB}, {"within": 6.0}, {"within": 0.5}):
        with pytest.raises(TooManyError):
            await callers.pay("a", 0.01, **options)
    # Its deadline would pass while it waits, or hardly after.
    await callers.pay("a", 0.01, within=7.0)
    # Who is refused hears of it before its deadline, too.
    assert slept == [*2 * [callers_module.REFUSED_SECONDS], pytest.approx(0.4), pytest.approx(5)]
    clock.now += 10_000
    slept.clear()
    for _ in range(10):
        await callers.pay("a", PEER_BURST_SECONDS / 10)
    assert slept == []


@pytest.mark.asyncio
async def test_who_gives_up_waiting_pays_nothing() -> None:
    """Clients with short deadlines, which come again and again, would keep themselves out for good."""
    clock = Clock()
    callers = Callers(clock)
    await callers.pay("a", PEER_BURST_SECONDS + 1)
    for _ in range(100):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(callers.pay("a", 0.5), 0.001)
    clock.now += 1 / PEER_SHARE
    await asyncio.wait_for(callers.pay("a", 0.001), 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("seconds", [2.0, 0.5])
async def test_who_would_wait_beyond_its_deadline_is_told_why(
    server_process: StartServer, seconds: float
) -> None:
    poor = {"dear": (PEER_SHARE, 0.001)}
    server = server_process(constants={"upr.service.overload.callers._RATES": poor})
    request = changes.ListCutsRequest(with_partitions=True)
    async with RawClient(server.target) as client:
        calls = [client.changes.ListCuts(request, timeout=seconds) for _ in range(12)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error_from_call(one) for one in ended if isinstance(one, grpc.RpcError)]
    assert "TOO_MANY" in {one.reason for one in refused}


@pytest.mark.asyncio
async def test_who_waits_for_a_turn_behind_others_is_told_why_before_its_deadline(
    server_process: StartServer,
) -> None:
    # A turn comes an hour after the one before it.
    server = server_process(constants={"upr.service.overload.callers.SHARE": 2e-5})
    request = changes.ListCutsRequest(bucket="default", with_partitions=True)
    async with RawClient(server.target) as client:
        await client.changes.ListCuts(request, timeout=WAIT_SECONDS)
        with pytest.raises(grpc.RpcError) as ended:
            await client.changes.ListCuts(request, timeout=5)
    error = error_from_call(ended.value)
    assert (error.reason, error.retriable) == ("TOO_MANY", True)
    assert "of all peers together" in error.message
    assert error.hint.startswith("wait ")


@contextlib.asynccontextmanager
async def channels(target: str, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    options = [*CLIENT_OPTIONS, *OWN_CONNECTION]
    opened = [grpc.aio.insecure_channel(target, options=options) for _ in range(count)]
    try:
        yield opened
    finally:
        await asyncio.gather(*(channel.close() for channel in opened))


@pytest.mark.asyncio
async def test_what_keeps_calls_going_has_a_share_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, slept = Clock(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    callers = Callers(clock)
    callers._account("a").take(100, clock.now)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await callers.keep_up("a", KEPT_UP_BURST_SECONDS + 0.4)
    assert slept == []
    await callers.keep_up("a", 0.001)
    assert slept == [pytest.approx(0.4 / PEER_SHARE)]
    await callers.keep_up("b", 0.001)
    assert len(slept) == 1


@pytest.mark.asyncio
async def test_calls_that_wait_with_their_open_count(server_process: StartServer) -> None:
    """All of them arrive before one opens: each used to find none open."""
    server = server_process()
    more = 150
    async with channels(server.target, 14) as opened, AsyncClient(server.target) as client:
        stubs = [changes_grpc.ChangeStreamServiceStub(channel) for channel in opened]
        calls = [stubs[i % len(stubs)].Follow() for i in range(MINE + more)]
        # Some of these may be refused already.
        waits = (call.wait_for_connection() for call in calls[::100])
        await asyncio.gather(*waits, return_exceptions=True)

        async def opens(call: Any) -> bool:
            request = changes.FollowRequest(open=changes.Open(bucket="default"))
            try:
                await call.write(request)
                return await call.read() is not grpc.aio.EOF
            except (grpc.RpcError, asyncio.InvalidStateError):
                return False

        results = await asyncio.gather(*map(opens, calls))
        assert sum(results) == MINE
        # Of those that wrote, the client may know only that its write met the end of the call.
        late = stubs[0].Follow()
        async with asyncio.timeout(60):
            assert await late.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        words = f"open Follow calls of 127.0.0.1 are {MINE}; must be below {MINE}"
        assert await late.details() == words
        assert (await client.admin.status()).follow_calls == MINE
        for call in calls:
            call.cancel()
        await poll(client.admin.status, lambda told: not told.follow_calls)
        async with RawClient(server.target) as later:
            await (await later.follow()).close()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["health", "Get"])
async def test_other_calls_are_counted_too(kind: str) -> None:
    """Those of gRPC's own services as well."""
    callers = Callers()
    with contextlib.ExitStack() as stack:
        for _ in range(int(OTHER_CALLS_MAX * PEER_CALLS)):
            stack.callback(callers.open(kind, "a"))
        with pytest.raises(TooManyError, match="open other calls of a are"):
            callers.open("Watch", "a")


async def fill(target: str) -> None:
    """Write more than every buffer between server and client holds."""
    async with AsyncClient(target) as client:
        rows = [(b"%d" % i, os.urandom(MIB)) for i in range(40)]
        for row in rows:
            await client.bucket().write_many([row])


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_consumer_that_takes_nothing_is_ended_whatever_heartbeat_it_asked_for(
    server_process: StartServer,
) -> None:
    server = server_process("--reader-timeout", "1s", "--log-format", "text", constants=SOON)
    await fill(server.target)
    async with RawClient(server.target) as client, AsyncClient(server.target) as asking:
        follow = await client.follow(heartbeat_seconds=3600, credit_bytes=64 * MIB)
        await follow.send(start=starts(range(PARTITIONS)))
        await poll(asking.admin.status, lambda told: told.follow_calls)
        await poll(asking.admin.status, lambda told: not told.follow_calls)
        assert "reason=TOO_SLOW" in server.log_text()
        # Who reads on at last is told why.
        follow.give_credit = False
        with pytest.raises(grpc.RpcError) as ended:
            await read_to_the_end(follow)
        error = error_from_call(ended.value)
        assert error.reason == "TOO_SLOW"
        assert error.retriable
        assert "accepted no data for 1 s" in error.message


async def read_to_the_end(follow: RawFollow) -> None:
    while await asyncio.wait_for(follow.call.read(), 60) is not grpc.aio.EOF:
        pass
    raise AssertionError("the call ended well")


def starts(partitions: Sequence[int]) -> changes.Start:
    return changes.Start(partitions=[start_at(partition) for partition in partitions])


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_consumer_without_credit_that_answers_heartbeats_stays(
    server_process: StartServer,
) -> None:
    server = server_process("--reader-timeout", "0.5s")
    await fill(server.target)
    async with RawClient(server.target) as client:
        follow = await client.follow(heartbeat_seconds=0.2, credit_bytes=2 * MIB)
        follow.give_credit = False
        await follow.send(start=starts(range(PARTITIONS)))
        beats = 0
        # Long after the reader's time is over.
        while beats < 10:
            message = await follow.read()
            assert not message.HasField("ended"), message
            beats += message.HasField("heartbeat")
        await follow.close()


CONSUMER = """
import asyncio, logging, os, signal, sys
from upr_client import AsyncClient, Change, Tuning

tuning = Tuning(credit_bytes=2**26, heartbeat_seconds=60.0)

async def main():
    seen = []
    async with AsyncClient(sys.argv[1]) as client:
        bucket = client.bucket()
        async with bucket.changes(until="now", tuning=tuning) as changes:
            async for change in changes:
                if isinstance(change, Change):
                    if not seen:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    seen.append(change.key.decode())
    print(*seen)

logging.basicConfig(level="INFO")
asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_the_sdk_goes_on_after_it_was_too_slow(server_process: StartServer) -> None:
    server = server_process("--reader-timeout", "0.5s", "--log-format", "text", constants=SOON)
    await fill(server.target)
    consumer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, server.target, stdout=PIPE, stderr=PIPE
    )
    try:
        await until(lambda: "reason=TOO_SLOW" in server.log_text())
        async with asyncio.timeout(90):
            consumer.send_signal(signal.SIGCONT)
            out, errors = await consumer.communicate()
    finally:
        if consumer.returncode is None:
            consumer.kill()
            await consumer.wait()
    assert sorted(map(int, out.split())) == list(range(40))
    assert b"TOO_SLOW" in errors or b"took nothing" in errors


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_call_counts_until_its_client_has_taken_the_end(
    server_process: StartServer,
) -> None:
    places = 5
    server = server_process(
        "--reader-timeout",
        "0.3s",
        constants=SOON | {"upr.service.overload.callers.PEER_CALLS": places / FOLLOW_CALLS_MAX},
    )
    async with contextlib.AsyncExitStack() as stack:
        asking = await stack.enter_async_context(AsyncClient(server.target))
        rows = [(b"%d" % number, os.urandom(MIB)) for number in range(40)]
        for begin in range(0, len(rows), 10):
            await asking.bucket().write_many(rows[begin : begin + 10])
        client = await stack.enter_async_context(RawClient(server.target))

        async def follow_and_read_nothing() -> None:
            # The windows of the connection take what the first one or two are sent.
            for _ in range(2 * places):
                follow = await client.follow(heartbeat_seconds=3600, credit_bytes=64 * MIB)
                await follow.send(start=starts(range(PARTITIONS)))
                await poll(asking.admin.status, lambda told: told.follow_calls)
                # Ended by the server; what was sent is in its memory still.
                await poll(asking.admin.status, lambda told: not told.follow_calls)

        # gRPC's client says the other of a call that ends while it writes.
        words = f"must be below {places}|Internal error from Core"
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            await follow_and_read_nothing()
