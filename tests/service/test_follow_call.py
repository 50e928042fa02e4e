"""The Follow call with a scripted transport: what a consumer that does not read can do to the server."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from tests.harness import WAIT_SECONDS, pass_turns, until
from upr.engine import follower as follower_module
from upr.engine.streams import SHUTTING_DOWN
from upr.service import follow as follow_module
from upr.service.buckets.catalog import Catalog
from upr.service.change_stream import ChangeStreamMethods
from upr.service.conversation import Conversation, Outgoing
from upr.service.overload.callers import CHEAP_SECONDS, Callers
from upr.service.overload.intake import Intake
from upr_protocol.block import POSITION, build_block, make_runs, sealed
from upr_protocol.errors import ShuttingDownError
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types


class Transport:
    """A context: what the consumer says is put in, what it is told waits until it reads."""

    def __init__(self, **opening: Any) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self.told: list[Any] = []
        self._said = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.say(open=wire.Open(bucket="default", **opening))

    def say(self, **message: Any) -> None:
        self._requests.put_nowait(wire.FollowRequest(**message).SerializeToString())

    def half_close(self) -> None:
        self._requests.put_nowait(grpc.aio.EOF)

    @property
    def unread_requests(self) -> int:
        return self._requests.qsize()

    async def read(self) -> Any:
        return await self._requests.get()

    async def write(self, message: Any) -> None:
        await asyncio.sleep(0)
        await self.reading.wait()
        self.told.append(message)
        self._said.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until what was told makes something true."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not happened():
                self._said.clear()
                await self._said.wait()

    def peer(self) -> str:
        return "test"


@pytest.fixture
def methods(catalog: Catalog) -> ChangeStreamMethods:
    return ChangeStreamMethods(catalog, Intake(), 1, 5.0)


def begin(methods: ChangeStreamMethods, transport: Any) -> asyncio.Task[None]:
    return asyncio.create_task(methods.Follow(None, transport))


async def stop(call: asyncio.Task[None]) -> None:
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def starts() -> wire.Start:
    return wire.Start(partitions=[wire.StartPartition(partition=p) for p in range(1024)])


@pytest.mark.long
@pytest.mark.asyncio
async def test_answers_wait_in_bounded_number_for_a_consumer_that_does_not_read(
    methods: ChangeStreamMethods,
) -> None:
    transport = Transport()
    transport.reading.clear()
    call = begin(methods, transport)
    for _ in range(50):
        transport.say(start=starts())
    await pass_turns()
    assert transport.unread_requests > 40, "requests were taken though no answer could be sent"
    transport.reading.set()
    await transport.until(lambda: sum(m.HasField("start_answers") for m in transport.told) == 50)
    await stop(call)


@pytest.mark.asyncio
async def test_many_cheap_messages_wait_for_a_turn_as_one_dear_one_does(
    methods: ChangeStreamMethods, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid: list[float] = []
    turn = Callers.turn

    async def noted(callers: Callers, peer: str, seconds: float) -> None:
        paid.append(seconds)
        await turn(callers, peer, seconds)

    monkeypatch.setattr(Callers, "turn", noted)
    transport = Transport()
    call = begin(methods, transport)
    for partition in range(100):
        transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=partition)]))
        # What keeps the call going is free.
        transport.say(credit=wire.Credit(bytes=1))
    told = transport.told
    await transport.until(
        lambda: sum(len(m.start_answers.answers) for m in told if m.HasField("start_answers")) > 99
    )
    assert len(paid) in (3, 4)
    assert all(CHEAP_SECONDS <= one < 2 * CHEAP_SECONDS for one in paid)
    await stop(call)


@pytest.mark.asyncio
async def test_acknowledgements_do_not_wait_for_what_else_their_peer_asks(
    methods: ChangeStreamMethods, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Callers, "turn", never)
    transport = Transport(consumer="c")
    call = begin(methods, transport)
    transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=0)]))
    position = np.zeros(1, POSITION).tobytes()
    for _ in range(200):
        transport.say(ack=wire.Ack(positions=position))
    await until(lambda: transport.unread_requests == 0)
    for partition in range(100):
        transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=partition)]))
    await pass_turns()
    assert transport.unread_requests > 50
    await stop(call)


@pytest.mark.asyncio
async def test_a_consumer_that_neither_reads_nor_speaks_is_ended(
    methods: ChangeStreamMethods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "HALF_CLOSE_SECONDS", 0.3)
    transport = Transport(heartbeat_seconds=0.05)
    call = begin(methods, transport)
    await transport.until(lambda: bool(transport.told))
    transport.reading.clear()
    # Three silent intervals, and the time that a half-close is waited for.
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.wait([call])
    assert not methods._calls


@pytest.mark.asyncio
async def test_streams_are_ended_before_the_call_whenever_the_server_stops(
    methods: ChangeStreamMethods,
) -> None:
    for turns in range(12):
        transport = Transport()
        call = begin(methods, transport)
        transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=7)]))
        for _ in range(turns):
            await asyncio.sleep(0)
        methods.shut_down()
        started = False
        async with asyncio.timeout(WAIT_SECONDS):
            while not any(m.HasField("ended") and not m.ended.streams for m in transport.told):
                await asyncio.sleep(0)
                if call.done():
                    break
        transport.half_close()
        await asyncio.gather(call, return_exceptions=True)
        started = any(m.HasField("start_answers") for m in transport.told)
        ends = [
            [s.partition for s in m.ended.streams] for m in transport.told if m.HasField("ended")
        ]
        if started:
            assert ends == [[7], []], turns
            assert transport.told[-1].ended.problem.reason == SHUTTING_DOWN.reason
        methods._stopping = False


@pytest.mark.asyncio
async def test_a_call_that_opens_while_the_server_stops_is_ended(
    methods: ChangeStreamMethods,
) -> None:
    transport = Transport()
    opening = transport._requests.get_nowait()
    call = begin(methods, transport)
    await asyncio.sleep(0)
    methods.shut_down()
    transport._requests.put_nowait(opening)
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(ShuttingDownError):
            await call
    assert not transport.told


@pytest.mark.asyncio
async def test_an_idle_server_asks_before_it_gives_a_silent_consumer_up(
    methods: ChangeStreamMethods,
) -> None:
    transport = Transport(heartbeat_seconds=0.05)
    call = begin(methods, transport)
    await transport.until(
        lambda: transport.told[-1:] != [] and transport.told[-1].HasField("ended")
    )
    kinds = [message.WhichOneof("message") for message in transport.told]
    assert kinds[0] == "opened"
    assert kinds[-1] == "ended"
    assert set(kinds[1:-1]) == {"heartbeat"}
    transport.half_close()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_call_goes_on_where_timers_do_not_say_when_they_are_due(
    methods: ChangeStreamMethods, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def timeless(*given: Any, **context: Any) -> Any:
        # As uvloop's timer that is due at once.
        return SimpleNamespace(cancel=call_at(*given, **context).cancel, _source_traceback=None)

    monkeypatch.setattr(loop, "call_at", timeless)
    transport = Transport()
    call = begin(methods, transport)
    for asked in range(1, 4):
        transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=7)]))
        await pass_turns()
        assert not call.done()
        assert sum(m.HasField("start_answers") for m in transport.told) == asked
    await stop(call)


@pytest.mark.asyncio
async def test_a_server_that_stood_still_hears_what_came_meanwhile(
    methods: ChangeStreamMethods,
) -> None:
    transport = Transport(heartbeat_seconds=0.05)
    call = begin(methods, transport)
    await transport.until(lambda: bool(transport.told))
    for _ in range(3):
        # Longer than three intervals, in which the loop does nothing at all; gRPC takes some turns to hand over.
        time.sleep(0.3)  # noqa: ASYNC251
        await pass_turns(10)
        transport.say(pong=wire.Pong())
        kinds = {message.WhichOneof("message") for message in transport.told}
        assert kinds <= {"opened", "heartbeat"}
    await stop(call)


@pytest.mark.asyncio
async def test_a_consumer_that_takes_nothing_is_ended_by_a_busy_server_too(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "HALF_CLOSE_SECONDS", 0.1)
    methods = ChangeStreamMethods(catalog, Intake(), 1, 5.0, reader_seconds=0.5)
    transport = Transport(heartbeat_seconds=0.3)
    call = begin(methods, transport)
    await transport.until(lambda: bool(transport.told))
    transport.reading.clear()
    turns = 0
    while not call.done():
        turns += 1
        assert turns < 35, "only a part of the time counts"
        transport.say(pong=wire.Pong())
        # The loop is late all the time, but by less than an interval.
        time.sleep(0.08)  # noqa: ASYNC251
        await asyncio.sleep(0)
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_small_frame_waits_for_its_round_and_everything_else_does_not(
    methods: ChangeStreamMethods,
) -> None:
    of = methods._catalog.find("default").bucket
    transport = Transport(stability=types.STABILITY_MEMORY)
    call = begin(methods, transport)

    def write(*partitions: int) -> None:
        block = replace(
            build_block([b"k"] * len(partitions), [b"v"] * len(partitions)),
            runs=make_runs(list(partitions), [1] * len(partitions)),
        )
        of.write(sealed(block), b"", None, 0, 1)

    of.proven = False
    transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=p) for p in (1, 2)]))
    await transport.until(lambda: len(of.followers) == 1 and len(transport.told) >= 3)
    write(1)
    await transport.until(lambda: len(frames(transport)) == 1)
    # The next round is far away, for others too.
    assert methods._rounds.members == 1
    methods._rounds.members = 2
    methods._rounds.pace.begin(asyncio.get_running_loop().time(), waited=False)
    methods._rounds.pace.interval = 1000.0
    write(1)
    write(2)
    await pass_turns()
    assert len(frames(transport)) == 1
    transport.say(stop=wire.Stop(partitions=[2]))
    await pass_turns()
    assert ends(transport) == ["STOPPED"]
    assert len(frames(transport)) == 1
    # A stream that opens, with an end or without, is sent what there is.
    transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=2, until_now=True)]))
    await transport.until(lambda: len(frames(transport)) >= 2)
    await transport.until(lambda: "FINISHED" in ends(transport))
    methods.shut_down()
    await transport.until(lambda: ends(transport)[-1:] == [SHUTTING_DOWN.reason])
    transport.half_close()
    await asyncio.gather(call, return_exceptions=True)
    assert methods._rounds.members == 1


@pytest.mark.asyncio
async def test_behind_a_frame_that_held_all_there_was_nothing_is_looked_for(
    methods: ChangeStreamMethods, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = methods._catalog.find("default").bucket
    transport = Transport(stability=types.STABILITY_MEMORY)
    call = begin(methods, transport)
    of.proven = False
    transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=1)]))
    await transport.until(lambda: len(of.followers) == 1 and len(transport.told) >= 3)
    await pass_turns()
    looks: list[float] = []
    look = Conversation.next_message

    def counted(talk: Conversation, now: float, hold: Callable[[bool], bool]) -> Outgoing | None:
        looks.append(now)
        return look(talk, now, hold)

    monkeypatch.setattr(Conversation, "next_message", counted)
    monkeypatch.setattr(follower_module, "FRAME_BYTES", 1)
    block = sealed(replace(build_block([b"k"], [b"v"]), runs=make_runs([1], [1])))
    due = 0

    def is_sent() -> bool:
        return len(frames(transport)) == due

    for entries in (1, 1, 2, 1):
        due += entries
        for _ in range(entries):
            of.write(block, b"", None, 0, 1)
            of.tail.close_open()
        await transport.until(is_sent)
        await pass_turns()
        assert len(looks) == due
    transport.say(stop=wire.Stop(partitions=[1]))
    await transport.until(lambda: ends(transport) == ["STOPPED"])
    await stop(call)


@pytest.mark.asyncio
async def test_the_end_of_the_last_stream_with_an_end_goes_out_behind_its_last_frame(
    methods: ChangeStreamMethods,
) -> None:
    of = methods._catalog.find("default").bucket
    of.proven = False
    block = sealed(replace(build_block([b"k"], [b"v"]), runs=make_runs([1], [1])))
    of.write(block, b"", None, 0, 1)
    # Neither a heartbeat nor credit comes to wake it.
    transport = Transport(stability=types.STABILITY_MEMORY, heartbeat_seconds=3600)
    call = begin(methods, transport)
    transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=1, until_now=True)]))
    await transport.until(lambda: len(frames(transport)) == 1)
    await pass_turns()
    assert ends(transport) == ["FINISHED"]
    await stop(call)


@pytest.mark.asyncio
async def test_a_start_from_a_time_is_searched_for_while_every_look_finds_a_frame(
    methods: ChangeStreamMethods,
) -> None:
    of = methods._catalog.find("default").bucket
    of.proven = False
    transport = Transport(stability=types.STABILITY_MEMORY, heartbeat_seconds=3600)
    call = begin(methods, transport)
    transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=1)]))
    await transport.until(lambda: len(transport.told) >= 3)
    await pass_turns()
    block = sealed(replace(build_block([b"k"], [b"v"]), runs=make_runs([1], [1])))
    transport.reading.clear()
    of.write(block, b"", None, 0, 1)
    await pass_turns()
    # While a frame is on its way, another one is due and the start comes.
    of.write(block, b"", None, 0, 1)
    transport.say(start=wire.Start(partitions=[wire.StartPartition(partition=2, from_time=1)]))
    await pass_turns()
    transport.reading.set()
    await transport.until(lambda: len(frames(transport)) == 2)
    await transport.until(lambda: answers(transport) == 2)
    await stop(call)


def frames(transport: Transport) -> list[bytes]:
    """Frames go out encoded, other messages do not."""
    return [message for message in transport.told if isinstance(message, bytes)]


def ends(transport: Transport) -> list[str]:
    others = [message for message in transport.told if not isinstance(message, bytes)]
    return [m.ended.problem.reason for m in others if m.HasField("ended")]


def answers(transport: Transport) -> int:
    others = [message for message in transport.told if not isinstance(message, bytes)]
    return sum(m.HasField("start_answers") for m in others)
