# ruff: noqa: SIM117
"""Every order of messages that matters, by hand: the channel itself is the test's.

Nothing is timed: the test takes each request and gives each answer itself.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc_testing
import pytest

from tests.client.scripted import (
    ID_A,
    ID_B,
    VERSION,
    answers,
    applied,
    ended,
    frame,
    heartbeat,
    opened,
    rollback,
    run_block,
    started,
    write_opened,
    write_refused,
)
from upr_client import Change, Client, MemoryPositions, Only, Position, Tuning
from upr_client._sync.block_writer import Write
from upr_client.errors import NoRoomError
from upr_protocol.block import build_block
from upr_protocol.errors import ShuttingDownError, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.grpc import code_of, metadata_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

STREAMS = stream_pb2.DESCRIPTOR.services_by_name["ChangeStreamService"]
KEYS = kv_pb2.DESCRIPTOR.services_by_name["KeyValueService"]
KEY = b"key"
P = partition_of(KEY)


@pytest.fixture
def channel() -> Any:
    return grpc_testing.channel([STREAMS, KEYS], grpc_testing.strict_real_time())


class Script:
    """The other end of one call."""

    def __init__(self, rpc: Any) -> None:
        self.rpc = rpc
        rpc.send_initial_metadata(())

    def take(self, kind: str) -> Any:
        """The next request but for acknowledgements, which is of this kind."""
        request = self.rpc.take_request()
        while request.WhichOneof("message") == "ack":
            request = self.rpc.take_request()
        assert request.WhichOneof("message") == kind
        return getattr(request, kind)

    def say(self, *sends: Any) -> None:
        for send in sends:
            self.rpc.send_response(send.message)

    def end(self, error: UprError | None = None) -> None:
        if error is None:
            self.rpc.terminate((), grpc.StatusCode.OK, "")
        else:
            self.rpc.terminate(metadata_of(error), code_of(error), error.message)

    def half_closed(self) -> None:
        """Wait for the half-close; nothing comes before it."""
        self.rpc.requests_closed()


def follow(channel: Any) -> Script:
    """Take a Follow call, and open it."""
    _, rpc = channel.take_stream_stream(STREAMS.methods_by_name["Follow"])
    call = Script(rpc)
    call.take("open")
    call.say(opened())
    return call


def write_call(channel: Any) -> Script:
    _, rpc = channel.take_stream_stream(KEYS.methods_by_name["Write"])
    return Script(rpc)


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Run the application in a thread; what it raises is raised here in the end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


def consumer(
    channel: Any, got: list[Any], partitions: list[int], **options: Any
) -> Callable[[], None]:
    def work() -> None:
        with Client("scripted", channel=channel) as client:
            with client.bucket().changes(**options, only=Only(partitions)) as changes:
                got.extend(changes)

    return work


def seqnos(got: list[Any]) -> list[tuple[int, int]]:
    return [(event.partition, event.seqno) for event in got if isinstance(event, Change)]


def test_one_stream_ends_before_another_is_started(channel: Any) -> None:
    got: list[Any] = []
    with beside(consumer(channel, got, [1, 2])):
        call = follow(channel)
        assert [p.partition for p in call.take("start").partitions] == [1, 2]
        call.say(
            answers(started(1, 10)), frame((10, run_block(1, 0, 1))), ended("FINISHED", (1, 10))
        )
        call.say(
            answers(started(2, 11)), frame((11, run_block(2, 0, 1))), ended("FINISHED", (2, 11))
        )
        call.half_closed()
        call.end()
    assert seqnos(got) == [(1, 1), (2, 1)]


def test_a_rollback_then_a_start_then_a_late_frame_of_the_old_token(channel: Any) -> None:
    log = FailoverLog.born(ID_A)
    store = MemoryPositions({1: Position(VERSION, ID_A, ID_A, 4, 4, (2, 4), log)})
    got: list[Any] = []
    with beside(consumer(channel, got, [1], resume=store, on_rollback=got.append)):
        call = follow(channel)
        call.take("start")
        call.say(answers(started(1, 10)), frame((10, run_block(1, 4, 6))))
        call.say(ended("HISTORY_CHANGED", (1, 10)), frame((10, run_block(1, 6, 9))))
        start = call.take("start").partitions[0]
        assert (start.failover_id, start.seqno) == (ID_A, 6)
        call.say(answers(rollback(1, 5, ID_B, (ID_A, 0), (ID_B, 5))))
        call.say(frame((10, run_block(1, 6, 9))))
        start = call.take("start").partitions[0]
        assert (start.failover_id, start.seqno, start.data_id) == (ID_B, 4, ID_B)
        # Stored before it was sent.
        assert store.load([1])[1].seqno == 4
        assert store.load([1])[1].failover_id == ID_B
        call.say(frame((10, run_block(1, 6, 9))), answers(started(1, 11, ID_B)))
        call.say(
            frame((10, run_block(1, 6, 9)), (11, run_block(1, 4, 5))), ended("FINISHED", (1, 10))
        )
        call.say(ended("FINISHED", (1, 11)))
        call.half_closed()
        call.end()
    assert seqnos([event for event in got if isinstance(event, Change)]) == [(1, 5), (1, 6), (1, 5)]
    assert store.load([1])[1].markers == (2, 4, 5)


def test_an_older_id_of_the_own_log_saves_what_can_be_saved(channel: Any) -> None:
    log = FailoverLog.from_pairs([(ID_A, 0), (ID_B, 6)])
    store = MemoryPositions({1: Position(VERSION, ID_B, ID_B, 9, 9, (3, 6, 9), log)})
    got: list[Any] = []
    with beside(consumer(channel, got, [1], resume=store, on_rollback=got.append)):
        call = follow(channel)
        call.take("start")
        # The server knows A only, and left it at 5: the smaller of that and the own next record, 6.
        call.say(answers(rollback(1, 0, 0xC, (ID_A, 0), (0xC, 5), rule="unknown_id")))
        start = call.take("start").partitions[0]
        assert (start.failover_id, start.seqno) == (0xC, 3)
        call.say(answers(started(1, 11, 0xC)), ended("STOPPED", (1, 11)))
        call.half_closed()
        call.end()
    assert "the older id 000000000000000a is known: back to 5" in got[0].words


def test_nothing_but_the_half_close_follows_the_end_of_a_call(channel: Any) -> None:
    got: list[Any] = []
    with beside(consumer(channel, got, [1], tuning=Tuning(credit_bytes=4))):
        call = follow(channel)
        call.take("start")
        call.say(
            ended("SHUTTING_DOWN"),
            answers(started(1, 10)),
            heartbeat(),
            frame((10, run_block(1, 0, 2))),
        )
        call.half_closed()
        call.end()
        call = follow(channel)
        assert call.take("start").partitions[0].seqno == 0
        call.say(answers(started(1, 10)), frame((10, run_block(1, 0, 2))))
        call.take("credit")
        call.say(ended("FINISHED", (1, 10)))
        call.half_closed()
        call.end()
    assert seqnos(got) == [(1, 1), (1, 2)]


def test_heartbeats_are_answered_while_the_application_is_busy(channel: Any) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with Client("scripted", channel=channel) as client:
            with client.bucket().changes(only=Only([1])) as changes:
                for _ in changes.batches():
                    busy.set()
                    go_on.wait()

    with beside(work):
        call = follow(channel)
        call.take("start")
        call.say(answers(started(1, 10)), frame((10, run_block(1, 0, 2))))
        busy.wait()
        for _ in range(5):
            call.say(heartbeat((1, 9)))
            call.take("pong")
        go_on.set()
        # What the heartbeats brought was kept as one: the rest of the credit is given back once.
        call.take("credit")
        call.say(ended("STOPPED", (1, 10)))
        call.half_closed()
        call.end()


def test_an_interrupted_application_cancels_the_call_and_leaves_no_thread(channel: Any) -> None:
    before = set(threading.enumerate())

    def work() -> None:
        with Client("scripted", channel=channel) as client:
            with client.bucket().changes(only=Only([1])) as changes:
                for _ in changes:
                    raise KeyboardInterrupt

    def serve() -> None:
        with beside(work):
            call = follow(channel)
            call.take("start")
            call.say(answers(started(1, 10)), frame((10, run_block(1, 0, 2))))
            call.rpc.cancelled()

    with pytest.raises(KeyboardInterrupt):
        serve()
    # The thread in which gRPC takes requests ends by itself, once the requests are closed.
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def writes(
    channel: Any, values: list[bytes], outcomes: list[Any], **options: Any
) -> Iterator[list[Write]]:
    """Queue writes of one key in order, and note what becomes of each."""
    queued: list[Write] = []
    ready = threading.Event()

    def work() -> None:
        with Client("scripted", channel=channel, **options) as client:
            writer = client.bucket()._writer()
            for value in values:
                queued.append(writer.submit(build_block([KEY], [value]), types_pb2.DURABILITY_DISK))
            ready.set()
            for write in queued:
                try:
                    outcomes.append(int(write.result()[2, 0]))
                except UprError as error:
                    outcomes.append(error)

    with beside(work):
        ready.wait()
        yield queued


def begin(call: Script, last_number: int = 0, in_flight: int = 64) -> None:
    call.take("open")
    call.say(write_opened(last_number, in_flight))


def numbers(call: Script, count: int) -> list[tuple[int, bytes]]:
    return [(w.number, w.block.values) for w in (call.take("write") for _ in range(count))]


def test_answers_that_were_lost_are_asked_for_in_order(channel: Any) -> None:
    outcomes: list[Any] = []
    with writes(channel, [b"1", b"2", b"3"], outcomes) as queued:
        call = write_call(channel)
        begin(call)
        assert numbers(call, 3) == [(1, b"1"), (2, b"2"), (3, b"3")]
        call.say(applied(1, (P, 0, 1)))
        # This channel forgets what was not read when a call ends.
        queued[0].done.wait()
        call.end(ShuttingDownError("going down"))
        call = write_call(channel)
        begin(call, 2)
        assert numbers(call, 2) == [(2, b"2"), (3, b"3")]
        call.say(applied(2, (P, 1, 2), duplicate=True), applied(3, (P, 2, 3)))
        call.half_closed()
        call.end()
    assert outcomes == [1, 2, 3]


def test_what_was_refused_is_not_sent_again_behind_what_was_applied(channel: Any) -> None:
    outcomes: list[Any] = []
    with writes(channel, [b"older", b"newer"], outcomes):
        call = write_call(channel)
        begin(call)
        numbers(call, 2)
        call.say(write_refused(1, NoRoomError("full")), applied(2, (P, 0, 1)))
        call.half_closed()
        call.end()
    assert isinstance(outcomes[0], NoRoomError)
    assert outcomes[1] == 1


def test_no_more_are_outstanding_than_the_server_allows(channel: Any) -> None:
    outcomes: list[Any] = []
    with writes(channel, [b"1", b"2", b"3", b"4"], outcomes) as queued:
        call = write_call(channel)
        begin(call, in_flight=2)
        assert numbers(call, 2) == [(1, b"1"), (2, b"2")]
        assert [write.number for write in queued] == [1, 2, 0, 0]
        call.say(applied(1, (P, 0, 1)))
        assert numbers(call, 1) == [(3, b"3")]
        assert not queued[3].number
        call.say(applied(2, (P, 1, 2)), applied(3, (P, 2, 3)))
        assert numbers(call, 1) == [(4, b"4")]
        call.say(applied(4, (P, 3, 4)))
        call.half_closed()
        call.end()
    assert outcomes == [1, 2, 3, 4]


def test_an_answer_out_of_turn_ends_the_call(channel: Any) -> None:
    outcomes: list[Any] = []
    with writes(channel, [b"1"], outcomes):
        call = write_call(channel)
        begin(call)
        numbers(call, 1)
        call.say(applied(2, (P, 0, 1)))
        call.half_closed()
        call.end()
        call = write_call(channel)
        begin(call)
        assert numbers(call, 1) == [(1, b"1")]
        call.say(applied(1, (P, 0, 1)))
        call.half_closed()
        call.end()
    assert outcomes == [1]


class ClosedChannel:
    """A channel of the application that refuses every call."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: Any, **options: Any) -> Any:
            raise ValueError("Cannot invoke RPC on closed channel!")

        return lambda *arguments, **options: refuse


def test_a_channel_that_its_owner_closed_is_an_error_of_each_write() -> None:
    channel: Any = ClosedChannel()
    with Client("closed", channel=channel) as client:
        bucket = client.bucket()
        for _ in range(2):
            with pytest.raises(UprError, match="closed channel"):
                bucket.set(KEY, b"value")
