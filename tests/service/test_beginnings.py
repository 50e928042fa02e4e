"""Streams from now and from a time, over real gRPC."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer, until
from tests.raw import RawClient, RawFollow, all_rows, start_at
from tests.service.bucket_state import connected
from tests.service.keys import some_keys
from tests.service.test_compression import zstd_server
from upr.service import follow as beginnings_module
from upr.service.clock import Clock
from upr.service.conversation import Found
from upr.service.follow import beginnings
from upr.storage import search as by_time
from upr.storage.store import Store
from upr_protocol.block import Block
from upr_protocol.wire.codec import block_from_message
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

P, Q = 7, 900


def timed(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """(seqno, time) of each row."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        seqnos = [row[1] for row in all_rows([block])]
        times = np.repeat(block.runs["time"], block.runs["count"]).tolist()
        if block.times:
            times = np.frombuffer(block.times, "<i8").tolist()
        found += zip(seqnos, times, strict=True)
    return found


async def read(follow: RawFollow, **options: Any) -> tuple[wire.Started, list[tuple[int, int]]]:
    (answer,) = await follow.start(start_at(P, until_now=True, **options))
    blocks, _ = await follow.blocks_until_ended(1)
    return answer.started, timed(blocks)


async def check_times(client: RawClient) -> None:
    """Begin at every time there is, and right beside it."""
    follow = await client.follow()
    _, rows = await read(follow)
    assert len(rows) >= 25
    high = rows[-1][0]
    times = sorted({time for _, time in rows})
    for time in (0, *times, *(time + 1 for time in times), 2**63, 2**64 - 1):
        while True:
            started, got = await read(follow, from_time=time)
            before, (_, rows) = rows, await read(follow)
            # Else what was superseded was merged away meanwhile.
            if rows == before:
                break
        below = [seqno for seqno, at in rows if at < time]
        assert started.HasField("start_seqno")
        assert started.failover_log
        # Between the two there may be rows that were superseded.
        first = next((seqno for seqno, at in rows if at >= time), high + 1)
        assert (below[-1] if below else 0) <= started.start_seqno < first
        assert got == [row for row in rows if row[1] >= time]
    await follow.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("compressed", [False, True])
async def test_from_every_time_out_of_tail_and_store(
    server_process: StartServer, compressed: bool
) -> None:
    server: RunningServer = zstd_server(server_process) if compressed else server_process()
    keys = some_keys(P, 25)
    for part in range(3):
        async with RawClient(server.target) as client:
            writer = await client.writer("")
            for i in range(8):
                rows = [(keys[(7 * i + j * part) % 25], b"v" * 300) for j in range(3)]
                await writer.write([*rows, (some_keys(Q, 1)[0], b"other")])
            if part:
                # What the first part wrote is stored by now, what this one wrote is in the tail.
                await check_times(client)
        assert server.terminate() == 0
        server.start()
    async with RawClient(server.target) as client:
        await check_times(client)


@pytest.mark.asyncio
async def test_from_now_while_it_is_written_to_misses_nothing(server_process: StartServer) -> None:
    server = server_process("--tail-bytes", "65536")
    keys = some_keys(P, 50)
    async with RawClient(server.target) as client, asyncio.TaskGroup() as tasks:
        done = asyncio.Event()

        async def write() -> None:
            writer = await client.writer("")
            for i in range(10**9):
                await writer.write([(keys[i % 50], b"v" * 500)])
                if done.is_set():
                    return

        tasks.create_task(write())
        for time in (None, 0, None, Clock().now()) * 2:
            (before,) = await client.partitions(P)
            follow = await client.follow()
            chosen = {"from_now": True} if time is None else {"from_time": time}
            (answer,) = await follow.start(start_at(P, **chosen))
            begin = answer.started.start_seqno
            assert begin <= answer.started.high_seqno
            if time is None:
                assert begin >= before.durable_seqno
            at = begin
            while at < begin + 20:
                for message in (await follow.until("frame")).frame.blocks:
                    (run,) = block_from_message(message).runs
                    assert int(run["start_seqno"]) == at
                    at = int(run["end_seqno"])
            await follow.close()
        done.set()


@pytest.mark.asyncio
async def test_a_position_that_was_chosen_goes_on_after_a_restart(
    server_process: StartServer,
) -> None:
    server = server_process()
    (key,) = some_keys(P, 1)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(key, b"v")])
        follow = await client.follow(stability=1)
        (answer,) = await follow.start(start_at(P, from_now=True))
        started = answer.started
        assert started.start_seqno == 1
        await follow.close()
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        hello = await client.hello({P: started.failover_id})
        # It has nothing above what was durable: there is nothing to undo.
        assert hello.answers[0].rollback_seqno >= started.start_seqno
        follow = await client.follow()
        newest = hello.answers[0].failover_id
        (again,) = await follow.start(
            start_at(P, started.start_seqno, newest, data_id=started.failover_id)
        )
        assert again.HasField("started")
        assert not again.started.HasField("start_seqno")
        await follow.close()


@pytest.mark.asyncio
async def test_only_who_has_nothing_chooses(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        await writer.write([(some_keys(P, 1)[0], b"v")])
        (info,) = await client.partitions(P)
        follow = await client.follow()
        answers = await follow.start(
            start_at(P, 1, info.failover_id, from_now=True),
            start_at(P, 0, info.failover_id, from_time=1),
            start_at(P, 0, from_time=1, data_id=5),
            start_at(1024, from_time=1),
            start_at(Q, from_now=True),
            start_at(P, from_now=False),
        )
        assert [a.refused.reason for a in answers] == ["INVALID_ARGUMENT"] * 4 + ["", ""]
        assert "leave out seqno and id" in answers[0].refused.hint
        assert [a.partition for a in answers] == [P, P, P, 1024, Q, P]
        assert not answers[5].started.HasField("start_seqno")


class HeldSearch:
    """Searches of the store wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = 0
        search = by_time.search_time

        def held(store: Store, wanted: Sequence[tuple[int, int]]) -> list[Found]:
            self.begun += 1
            assert self.go.wait(20)
            return search(store, wanted)

        monkeypatch.setattr(beginnings_module, "search_time", held)


async def said(follow: RawFollow, count: int) -> list[wire.FollowResponse]:
    """The next messages but heartbeats."""
    found: list[wire.FollowResponse] = []
    while len(found) < count:
        message = await follow.read()
        if not message.HasField("heartbeat"):
            found.append(message)
    return found


@pytest.mark.asyncio
async def test_starts_are_answered_in_order_and_a_stop_comes_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldSearch(monkeypatch)
    async with connected(tmp_path) as (_, client):
        writer = await client.writer("")
        await writer.write([(some_keys(p, 1)[0], b"v") for p in (P, Q)])
        follow = await client.follow()
        await follow.start(start_at(1))
        await follow.send(
            start=wire.Start(partitions=[start_at(Q, from_time=0), start_at(P, from_time=0)])
        )
        await follow.send(stop=wire.Stop(partitions=[P, 1]))
        await follow.send(start=wire.Start(partitions=[start_at(3, from_now=True)]))
        (ended,) = await said(follow, 1)
        assert [one.partition for one in ended.ended.streams] == [1]
        await until(lambda: held.begun == 1)
        # Credit and Acks are taken meanwhile.
        await follow.send(pong=wire.Pong())
        held.go.set()
        first, second, stopped, frame = await said(follow, 4)
        assert [a.partition for a in first.start_answers.answers] == [Q, P]
        (other,) = second.start_answers.answers
        assert (other.partition, other.started.start_seqno) == (3, 0)
        assert stopped.ended.problem.reason == "STOPPED"
        token = first.start_answers.answers[1].started.token
        assert [(s.partition, s.token) for s in stopped.ended.streams] == [(P, token)]
        assert [row[0] for row in all_rows(map(block_from_message, frame.frame.blocks))] == [Q]
        await follow.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["leaves", "is superseded", "breaks a rule", "drops the bucket"])
async def test_a_call_that_ends_meanwhile_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    held = HeldSearch(monkeypatch)
    async with connected(tmp_path) as (server, client):
        await client.admin.CreateBucket(admin.CreateBucketRequest(name="b"))
        bucket = server._catalog.find("b").bucket
        follow = await client.follow(bucket="b", consumer="c")
        await follow.send(start=wire.Start(partitions=[start_at(P, from_time=0)]))
        await until(lambda: held.begun == 1)
        if how == "leaves":
            closing = asyncio.create_task(follow.close())
            await until(lambda: not bucket.followers)
            await closing
        else:
            if how == "is superseded":
                await client.follow(bucket="b", consumer="c")
            elif how == "drops the bucket":
                await client.admin.DropBucket(
                    admin.DropBucketRequest(name="b", version=bucket.identity.version)
                )
            else:
                await follow.send(ack=wire.Ack(positions=b"x"))
            (ended,) = await said(follow, 1)
            assert ended.ended.problem.reason in {"SUPERSEDED", "BUCKET_GONE", "INVALID_ARGUMENT"}
            assert not ended.ended.streams
            await follow.close()
        held.go.set()
        assert all(one.stream_counts() == (0, 0) for one in bucket.followers)


@pytest.mark.asyncio
async def test_positions_that_are_reset_begin_where_a_start_would(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        writer = await client.writer("")
        for i in range(6):
            await writer.write([(some_keys(P, 6)[i], b"v")])
            if i == 2:
                await host.flusher.flush(wanted=True)
        _, rows = await read(await client.follow())
        assert await beginnings(host, [P, Q], None) == {P: 6, Q: 0}
        for seqno, time in rows:
            assert await beginnings(host, [Q, P], time) == {Q: 0, P: seqno - 1}
        assert await beginnings(host, range(1024), 2**64 - 1) == {
            p: 6 * (p == P) for p in range(1024)
        }
