"""Room for what is on its way to clients: what those that take nothing may hold of it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE

import grpc
import pytest
import uvloop

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, pass_turns, poll
from tests.raw import PATIENT, RawClient, RawFollow, start_at
from tests.service.test_received import MIB, sampled, within
from upr.service.overload.sending_room import Sender, SendingRoom
from upr_client import AsyncClient
from upr_protocol.limits import PARTITIONS, SENDING_BYTES
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes

LARGE = 20 * MIB
SILENT = 30
ASKING = """
import asyncio, contextlib, sys
import grpc
from tests.raw import RawClient

async def ask(client):
    while True:
        with contextlib.suppress(grpc.RpcError):
            await client.get(b"large")
            print("asked", flush=True)

async def main():
    await asyncio.gather(*[ask(RawClient(sys.argv[1])) for _ in range(int(sys.argv[2]))])

asyncio.run(main())
"""


class Call:
    """A sender that records what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ended = asyncio.Event()
        self.sender = Sender(lambda: self.told.append("wake"), self.ended.set)


def test_one_message_may_exceed_the_room_and_the_others_wait_in_order() -> None:
    room = SendingRoom()
    first, second, third = Call(), Call(), Call()
    assert room.join(first.sender)
    room.hold(first.sender, SENDING_BYTES + 1)
    assert room.join(first.sender), "who holds something goes on with it"
    assert not room.join(second.sender)
    assert not room.join(third.sender)
    room.hold(first.sender, 0)
    assert (second.told, third.told) == (["wake"], [])
    assert not room.join(first.sender), "it does not overtake"
    assert not room.join(third.sender)
    assert room.join(second.sender)
    # It has nothing to send any more.
    room.pass_on()
    assert third.told == ["wake"]
    assert room.join(third.sender)
    room.hold(third.sender, 1)
    assert first.told == ["wake"], "there is room for one more"


def test_who_was_slow_before_anybody_waited_is_ended_when_two_come_at_once() -> None:
    async def join() -> None:
        room, slow = SendingRoom(), Call()
        room.hold(slow.sender, SENDING_BYTES, sending=True)
        slow.sender.deadline = asyncio.get_running_loop().time()
        assert not room.join(Call().sender)
        assert not room.join(Call().sender)
        async with asyncio.timeout(SILENT):
            await slow.ended.wait()

    uvloop.run(join())


def test_who_is_busy_otherwise_holds_nobody_up() -> None:
    room = SendingRoom()
    first, second, third = Call(), Call(), Call()
    room.hold(first.sender, SENDING_BYTES)
    assert not room.join(second.sender)
    assert not room.join(third.sender)
    second.sender.is_busy = True
    room.hold(first.sender, 0)
    assert room.join(third.sender)
    second.sender.is_busy = False
    assert room.join(second.sender)


def test_who_leaves_gives_its_room_back_and_waits_no_more() -> None:
    room = SendingRoom()
    first, second, third = Call(), Call(), Call()
    room.hold(first.sender, SENDING_BYTES)
    assert not room.join(second.sender)
    assert not room.join(third.sender)
    room.leave(second.sender)
    room.leave(first.sender)
    assert (second.told, third.told, room.held) == ([], ["wake"], 0)


@pytest.mark.asyncio
async def test_who_takes_nothing_is_ended_only_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upr.service.overload.sending_room.SENDING_SECONDS", -SENDING_BYTES)
    room = SendingRoom()
    first, reading, second = Call(), Call(), Call()
    room.hold(reading.sender, 1)
    room.hold(first.sender, SENDING_BYTES, sending=True)
    await pass_turns(3)
    assert not first.ended.is_set()
    assert not room.join(second.sender)
    async with asyncio.timeout(30):
        await first.ended.wait()
    assert not reading.ended.is_set()
    # One whose message is sent only when somebody waits already is ended as well.
    late = Call()
    room.hold(late.sender, 1, sending=True)
    async with asyncio.timeout(30):
        await late.ended.wait()
    assert second.told == []


@pytest.mark.asyncio
async def test_a_standstill_of_the_server_is_no_slowness_of_its_followers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upr.service.overload.sending_room.SENDING_SECONDS", 0.1)
    monkeypatch.setattr("upr.service.overload.sending_room.STANDSTILL_SECONDS", 0.5)
    monkeypatch.setattr(
        "upr.service.overload.sending_room.SENDING_BYTES_A_SECOND", SENDING_BYTES * 1000
    )
    room = SendingRoom()
    first, second = Call(), Call()
    room.hold(first.sender, SENDING_BYTES, sending=True)
    assert not room.join(second.sender)
    time.sleep(1.0)  # noqa: ASYNC251 - the event loop stands still
    for _ in range(3):
        await asyncio.sleep(0)
    assert not first.ended.is_set()
    async with asyncio.timeout(30):
        await first.ended.wait()


START = changes.Start(partitions=[start_at(partition) for partition in range(PARTITIONS)])


async def silent_follows(stack: contextlib.AsyncExitStack, target: str) -> None:
    """Open followers of everything that read nothing, not even Opened; their streams begin at the same time."""
    clients = [await stack.enter_async_context(RawClient(target)) for _ in range(SILENT)]
    calls = [client.changes.Follow() for client in clients]
    opening = changes.FollowRequest(open=changes.Open(bucket="default", heartbeat_seconds=60))
    await asyncio.gather(*[call.write(opening) for call in calls])
    await asyncio.gather(*[call.write(changes.FollowRequest(start=START)) for call in calls])


async def read_values(follow: RawFollow, count: int) -> None:
    """Read until so many large values were received."""
    while count:
        message = await follow.read()
        if message.HasField("heartbeat"):
            await follow.send(pong=changes.Pong())
        assert not message.HasField("ended"), message
        count -= sum(len(block.values) == LARGE for block in message.frame.blocks)


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("stored", [False, True], ids=["tail", "store"])
async def test_followers_that_take_nothing_hold_little_and_keep_nobody_up(
    server_process: StartServer, stored: bool
) -> None:
    server = server_process()
    async with AsyncClient(server.target) as writing:
        for number in range(3):
            await writing.bucket().set(b"key-%d" % number, os.urandom(LARGE))
    if stored:
        assert server.terminate() == 0
        server.start()
    async with contextlib.AsyncExitStack() as stack:
        samples = stack.enter_context(sampled(server.pid))
        await silent_follows(stack, server.target)
        client = await stack.enter_async_context(RawClient(server.target))
        follow = await client.follow(credit_bytes=64 * MIB)
        await follow.send(start=START)
        await read_values(follow, 3)
        await follow.close()
    within(samples)


@pytest.mark.asyncio
async def test_many_that_read_the_store_at_once_all_come_to_their_end(
    server_process: StartServer,
) -> None:
    constants = {"upr.service.overload.sending_room.SENDING_BYTES": 64 * 2**10}
    server = server_process(constants=constants)
    rows = [(b"%d" % number, bytes(4000)) for number in range(400)]
    async with AsyncClient(server.target) as writing:
        await writing.bucket().write_many(rows)
    assert server.terminate() == 0
    server.start()

    async def drained() -> int:
        async with (
            AsyncClient(server.target) as client,
            client.bucket().changes(until="now") as found,
        ):
            return sum([batch.rows async for batch in found.batches()])

    async with asyncio.timeout(WAIT_SECONDS):
        counts = await asyncio.gather(*(drained() for _ in range(12)))
    assert counts == [len(rows)] * 12


async def answer_heartbeats(follow: RawFollow, late: asyncio.Event) -> None:
    """Answer heartbeats for ever; tell when three more came in a row: everything else that was due has been sent."""
    beats = 0
    while True:
        message = await follow.read()
        assert not message.HasField("ended"), message
        beats = beats + 1 if message.HasField("heartbeat") else 0
        if beats:
            await follow.send(pong=changes.Pong())
        if beats and beats % 3 == 0:
            late.set()


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("count", "size"),
    [(3, 13 * MIB), pytest.param(70, 400 * 1024, marks=pytest.mark.long)],
)
async def test_consumers_that_give_no_credit_keep_nobody_up(
    server_process: StartServer, count: int, size: int
) -> None:
    """They answer heartbeats; what waits for their credit takes no room."""
    server = server_process(constants=PATIENT)
    async with AsyncClient(server.target) as writing:
        bucket = writing.bucket()
        for number in range(4):
            await bucket.set(b"key", b"%d" % number + os.urandom(size))
        await bucket.set(b"another key", b"value")
    partition, other = partition_of(b"key"), partition_of(b"another key")
    assert partition != other
    assert server.terminate() == 0
    server.start()
    async with RawClient(server.target) as client, asyncio.TaskGroup() as group:
        paused = []
        for _ in range(count):
            follow = await client.follow(credit_bytes=MIB, heartbeat_seconds=0.5)
            follow.give_credit = False
            await follow.send(start=changes.Start(partitions=[start_at(partition)]))
            late = asyncio.Event()
            paused.append((group.create_task(answer_heartbeats(follow, late)), late))
        # Each gets what its credit allows, and is alive.
        for _, late in paused:
            await late.wait()
        follow = await client.follow()
        await follow.send(start=changes.Start(partitions=[start_at(other)]))
        while not (await follow.read()).HasField("frame"):
            pass
        for _, late in paused:
            late.clear()
        for task, late in paused:
            await late.wait()
            task.cancel()


@pytest.mark.long
@pytest.mark.asyncio
async def test_answers_that_clients_do_not_take_are_bounded(server_process: StartServer) -> None:
    server = server_process()
    async with AsyncClient(server.target) as client, RawClient(server.target) as raw:
        await client.bucket().set(b"large", os.urandom(15 * MIB))
        await client.bucket().set(b"small", b"value")

        async def refused() -> str:
            try:
                await raw.get(b"large")
            except grpc.RpcError as error:
                return error_from_call(error).reason
            return ""

        with sampled(server.pid) as samples:
            asking = await asyncio.create_subprocess_exec(
                sys.executable, "-c", ASKING, server.target, str(SILENT), stdout=PIPE
            )
            try:
                assert asking.stdout is not None
                await asking.stdout.readline()
                asking.send_signal(signal.SIGSTOP)
                assert await poll(refused) == "TOO_MANY"
                # Small answers are given all the same.
                assert [answer.value for answer in await raw.get(b"small")] == [b"value"]
            finally:
                asking.kill()
                await asking.wait()
            await poll(refused, lambda reason: not reason)
        within(samples)
