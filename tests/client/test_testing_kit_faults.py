"""What the scripted server of the testing kit does on demand, as a follower sees it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from tests.client.kit import (
    KEYS,
    Event,
    Follow,
    P,
    changes_of,
    fold,
    markers_of,
    values,
    wait_for,
    write_keys,
)
from upr_client import (
    Client,
    Marker,
    MemoryPositions,
    Only,
    Rollback,
    ServerPositions,
    Tuning,
    UprError,
)
from upr_client.errors import DataDamagedError, PartitionNotActiveError, SnapshotGoneError
from upr_client.testing import ScriptedServer, keys_in
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import PARTITIONS
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1.change_stream_service_pb2_grpc import ChangeStreamServiceStub

# Disturbances.


def test_a_stall_is_noticed(server: ScriptedServer, follow: Follow) -> None:
    said: list[str] = []
    write_keys(server, 1)
    follower = follow(tuning=Tuning(heartbeat_seconds=0.1), on_status=said.append)
    follower.take(2)
    server.stall()
    write_keys(server, 1, first=1)

    def resume_later() -> None:
        wait_for(server, lambda: len(server.calls_of("Follow")) >= 2)
        server.resume()

    resumed = threading.Thread(target=resume_later)
    resumed.start()
    assert changes_of(follower.take(2)) == [(2, KEYS[1])]
    resumed.join()
    assert any("silent for three heartbeat intervals" in line for line in said)


def test_a_save_that_is_not_answered_names_the_way_out_once(server: ScriptedServer) -> None:
    """On a slow link the answer is behind what was sent ahead."""
    said: list[str] = []
    write_keys(server, 1)
    patience = Tuning(heartbeat_seconds=60, save_seconds=60)
    options: dict[str, Any] = {
        "resume": ServerPositions("c"),
        "tuning": patience,
        "on_status": said.append,
    }
    with (
        Client(server.target, request_timeout=0.2) as client,
        client.bucket().changes(only=Only([P]), **options) as changes,
    ):
        for _ in range(2):
            next(changes)
        server.stall()
        for _ in range(2):
            changes.save()
        server.resume()
        write_keys(server, 1, first=1)
        next(changes)
    told = [line for line in said if line.startswith("positions were not stored")]
    assert ["credit_bytes" in line for line in told] == [True, False]


def test_a_save_that_meets_no_server_does_not_speak_of_a_slow_link(server: ScriptedServer) -> None:
    said: list[str] = []
    write_keys(server, 1)
    tuning = Tuning(heartbeat_seconds=60, save_seconds=60)
    with Client(server.target) as client:
        options: dict[str, Any] = {"resume": ServerPositions("c"), "on_status": said.append}
        with client.bucket().changes(only=Only([P]), tuning=tuning, **options) as changes:
            for _ in range(2):
                next(changes)
            with server.unreachable():
                changes.save()
    told = [line for line in said if line.startswith("positions were not stored")]
    assert ["credit_bytes" in line for line in told] == [False]


def test_a_cut_connection_loses_nothing(server: ScriptedServer, follow: Follow) -> None:
    follower = follow()
    events: list[Event] = []
    for i in range(5):
        write_keys(server, 1, first=i)
        events += follower.take(2)
        server.disconnect()
    assert changes_of(events) == [(i + 1, KEYS[i]) for i in range(5)]
    starts = [call.requests_of("start")[0].partitions[0] for call in server.calls_of("Follow")]
    assert [start.seqno for start in starts[:5]] == [0, 1, 2, 3, 4]


def test_an_unreachable_server(server: ScriptedServer, follow: Follow) -> None:
    write_keys(server, 1)
    follower = follow()
    follower.take(2)
    followed: list[Event] = []
    taker = threading.Thread(target=lambda: followed.extend(follower.take(2)))
    with server.unreachable():
        write_keys(server, 1, first=1)
        taker.start()
        wait_for(server, lambda: len(server.calls_of("Follow")) >= 3)
    taker.join()
    assert changes_of(followed) == [(2, KEYS[1])]


def test_a_partition_that_is_refused(server: ScriptedServer, follow: Follow) -> None:
    said: list[str] = []

    def on_status(words: str) -> None:
        said.append(words)
        if len(said) == 1:
            server.accept(P)

    write_keys(server, 1)
    server.refuse(P)
    with pytest.raises(PartitionNotActiveError):
        write_keys(server, 1)
    follower = follow(on_status=on_status)
    assert changes_of(follower.take(2)) == [(1, KEYS[0])]
    assert "PARTITION_NOT_ACTIVE" in said[0]
    server.refuse(P, DataDamagedError("a block fails its CRC"))
    server.end(P, "STORAGE_ERROR")
    with pytest.raises(DataDamagedError):
        follower.take(1)


def test_a_write_that_is_partly_refused(server: ScriptedServer) -> None:
    other = keys_in(P + 1)[0]
    server.refuse(P, DataDamagedError("a block fails its CRC"))
    with Client(server.target) as client:
        with pytest.raises(DataDamagedError, match="1 partitions"):
            client.bucket().write_many([(KEYS[0], b"a"), (other, b"b")])
        with pytest.raises(DataDamagedError):
            client.bucket().set(KEYS[0], b"a")
    assert server.state() == {other: b"b"}


def test_ends_of_streams_and_calls(server: ScriptedServer, follow: Follow) -> None:
    said: list[str] = []
    write_keys(server, 1)
    follower = follow(on_status=said.append)
    follower.take(2)
    server.end(P, "STATE_CHANGED", "it moved")
    write_keys(server, 1, first=1)
    assert changes_of(follower.take(2)) == [(2, KEYS[1])]
    assert len(server.calls_of("Follow")) == 1
    assert "STATE_CHANGED (it moved)" in said[0]
    server.end_calls("SHUTTING_DOWN")
    write_keys(server, 1, first=2)
    assert changes_of(follower.take(2)) == [(3, KEYS[2])]
    assert len(server.calls_of("Follow")) == 2
    server.end_calls("SUPERSEDED", retriable=False)
    with pytest.raises(UprError, match="SUPERSEDED") as caught:
        follower.take(1)
    assert caught.value.reason == "SUPERSEDED"


def test_one_owner_of_a_consumer_name(server: ScriptedServer) -> None:
    with Client(server.target) as client:
        write_keys(server, 1)
        with client.bucket().changes(only=Only([P]), consumer="indexer") as first:
            next(first)
            with client.bucket().changes(only=Only([P]), consumer="indexer") as second:
                next(second)
                assert next(first) == Marker(P, 1)
                with pytest.raises(UprError) as caught:
                    next(first)
                assert caught.value.reason == "SUPERSEDED"


# Merging and purging.


def test_deduplication_and_horizons(server: ScriptedServer, follow: Follow) -> None:
    for i in range(6):
        server.write(KEYS[i % 3], b"%d" % i)
    server.deduplicate(P)
    events = follow(until="now").rest()
    assert changes_of(events) == [(4, KEYS[0]), (5, KEYS[1]), (6, KEYS[2])]
    assert markers_of(events) == [6]
    runs = [
        run
        for frame in server.calls_of("Follow")[0].responses_of("frame")
        for block in frame.blocks
        for run in np.frombuffer(block.runs, "<u4,<u4,<u8,<u8,<u8,<u8").tolist()
    ]
    # Partition, count, start, end, horizon: the first of the two is complete at the end of the second only.
    assert [run[:5] for run in runs] == [(P, 2, 0, 5, 6), (P, 1, 5, 6, 6)]


def test_a_rollback_below_a_horizon_is_to_be_undone(server: ScriptedServer, follow: Follow) -> None:
    """The follower stands below the rollback's seqno and yet lacks a row: where it came from it was superseded."""
    server.write(KEYS[0], b"old")
    server.write(KEYS[1], b"b")
    server.write(KEYS[2], b"c")
    server.write(KEYS[0], b"new")
    server.deduplicate(P, runs=3)
    server.hold(P, 2)
    follower = follow()
    events = follower.take(1)
    assert changes_of(events) == [(2, KEYS[1])]
    server.roll_back(P, 3)
    server.release(P)
    [rollback] = follower.take(1)
    assert isinstance(rollback, Rollback)
    assert (rollback.from_seqno, rollback.seqno) == (2, 0)
    events += [rollback, *follower.take(6)]
    assert values(fold(events)) == server.state() == {KEYS[0]: b"old", KEYS[1]: b"b", KEYS[2]: b"c"}


def test_purging(server: ScriptedServer, follow: Follow) -> None:
    positions = MemoryPositions()
    write_keys(server, 2)
    follower = follow(resume=positions)
    follower.take(4)
    server.hold(P, 2)
    server.delete(KEYS[0])
    server.write(KEYS[2], b"c")
    assert server.purge(P) == 3
    server.release(P)
    events = follower.take(4)
    assert isinstance(events[0], Rollback)
    assert (events[0].seqno, events[0].rule) == (0, "below_purge")
    assert changes_of(events) == [(2, KEYS[1]), (4, KEYS[2])]
    assert markers_of(events) == [4]
    [started, again] = [
        answer.started
        for message in server.calls_of("Follow")[0].responses_of("start_answers")
        for answer in message.answers
        if answer.HasField("started")
    ]
    assert (started.purge_seqno, again.purge_seqno) == (0, 3)


def test_a_cut_that_is_merged_away(server: ScriptedServer, follow: Follow) -> None:
    write_keys(server, 4)
    assert changes_of(follow(only=Only(), until={P: 2}).rest()) == [(1, KEYS[0]), (2, KEYS[1])]
    server.deduplicate(P)
    with pytest.raises(SnapshotGoneError):
        follow(only=Only(), until={P: 2}).rest()


# What was acknowledged, and what only the wire has.


def test_acknowledged_positions(server: ScriptedServer, follow: Follow) -> None:
    write_keys(server, 3)
    follower = follow(consumer="indexer", resume=MemoryPositions(), tuning=Tuning(save_seconds=0))
    follower.take(6)
    write_keys(server, 1, first=3)
    follower.take(1)
    wait_for(server, lambda: server.positions("indexer").get(P) == 3)
    assert server.positions() == {}


@contextmanager
def raw_follow(
    server: ScriptedServer, opening: stream_pb2.Open, *starts: stream_pb2.StartPartition
) -> Iterator[Iterator[Any]]:
    with grpc.insecure_channel(server.target) as channel:
        done = threading.Event()

        def requests() -> Iterator[stream_pb2.FollowRequest]:
            yield stream_pb2.FollowRequest(open=opening)
            yield stream_pb2.FollowRequest(start=stream_pb2.Start(partitions=starts))
            done.wait()

        call: Any = ChangeStreamServiceStub(channel).Follow(requests())

        def messages() -> Iterator[Any]:
            for message in call:
                if message.WhichOneof("message") == "ended" and not message.ended.streams:
                    done.set()
                yield message

        told = messages()
        try:
            yield told
        finally:
            done.set()
            assert [m for m in told if m.WhichOneof("message") == "frame"] == []


def frames(messages: Iterator[Any]) -> Iterator[Any]:
    return (m.frame for m in messages if m.WhichOneof("message") == "frame")


def test_plain_rows_and_a_prefix(server: ScriptedServer) -> None:
    server.write_many([(KEYS[0], b"a"), (KEYS[1], None), (KEYS[2], b"c")])
    opening = stream_pb2.Open(bucket="default", plain_rows=True, key_prefix=KEYS[1])
    with raw_follow(server, opening, stream_pb2.StartPartition(partition=P)) as messages:
        [run] = next(frames(messages)).plain_runs
        assert (run.start_seqno, run.end_seqno, run.horizon, run.token) == (0, 3, 3, 1)
        assert [(row.seqno, row.key, row.deleted) for row in run.rows] == [(2, KEYS[1], True)]
        assert not run.rows[0].HasField("value")


def test_from_now_and_from_a_time(server: ScriptedServer) -> None:
    write_keys(server, 2)
    for begin in ({"from_now": True}, {"from_time": 2**62}):
        start = stream_pb2.StartPartition(partition=P, **begin)
        with raw_follow(server, stream_pb2.Open(bucket="default"), start) as messages:
            told = next(m for m in messages if m.WhichOneof("message") == "start_answers")
            assert told.start_answers.answers[0].started.start_seqno == server.high_seqno(P)
            server.write(KEYS[2], b"later")
            assert KEYS[2] in next(frames(messages)).blocks[0].keys
    start = stream_pb2.StartPartition(partition=P, from_time=1)
    with raw_follow(server, stream_pb2.Open(bucket="default"), start) as messages:
        assert next(frames(messages)).blocks[0].keys == KEYS[0]
        next(frames(messages))
        next(frames(messages))
        next(frames(messages))


def test_a_silent_client_is_ended(server: ScriptedServer) -> None:
    opening = stream_pb2.Open(bucket="default", heartbeat_seconds=0.05)
    with raw_follow(server, opening, stream_pb2.StartPartition(partition=P)) as messages:
        ends = [m.ended for m in messages if m.WhichOneof("message") == "ended"]
    assert [(len(end.streams), end.problem.reason) for end in ends] == [
        (1, "SILENT"),
        (0, "SILENT"),
    ]


def test_positions_in_the_server(server: ScriptedServer) -> None:
    opening = stream_pb2.Open(bucket="default", consumer="indexer")
    with raw_follow(server, opening) as messages, grpc.insecure_channel(server.target) as channel:
        opened = next(messages).opened
        stub: Any = ChangeStreamServiceStub(channel)
        position = stream_pb2.Position(partition=P, seqno=5, horizon=5, markers=[3, 5])

        def save(generation: int) -> list[Any]:
            request = stream_pb2.SavePositionsRequest(
                bucket="default",
                bucket_version=opened.bucket_version,
                consumer="indexer",
                generation=generation,
                positions=[position],
            )
            return list(stub.SavePositions(request).refused_partitions)

        def load(*partitions: int) -> list[Any]:
            request = stream_pb2.LoadPositionsRequest(
                bucket="default", consumer="indexer", partitions=partitions
            )
            return list(stub.LoadPositions(request).positions)

        assert load() == []
        assert save(opened.generation) == []
        assert load() == load(P, 9) == [position]
        assert load(9) == []
        assert server.positions("indexer") == {P: 5}
        [refused] = save(opened.generation - 1)
        assert (refused.partition, refused.problem.reason) == (P, "FENCED")


# The kit itself.


def test_nothing_is_left_behind() -> None:
    before = set(threading.enumerate())
    with ScriptedServer() as server:
        write_keys(server, 1)
        client = Client(server.target)
        changes = client.bucket().changes(only=Only([P]))
        changes.__enter__()
        next(changes)
    with pytest.raises(UprError, match="stopped"):
        server.start()
    server.stop()
    changes.close()
    client.close()
    left = {thread for thread in set(threading.enumerate()) - before if "scripted" in thread.name}
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)


def test_waiting_in_vain(server: ScriptedServer) -> None:
    with pytest.raises(TimeoutError):
        server.wait_for(lambda: server.calls, seconds=0.01)


def test_keys_of_a_partition() -> None:
    for partition in (0, P, PARTITIONS - 1):
        keys = keys_in(partition, 3, prefix=b"user:")
        assert len(set(keys)) == 3
        assert {partition_of(key) for key in keys} == {partition}
    assert keys_in(P, 0) == []
    with pytest.raises(InvalidArgumentError):
        keys_in(PARTITIONS)
