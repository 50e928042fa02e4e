"""Follow over real gRPC: options, ends and their reasons, credit, heartbeats."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS
from tests.raw import PATIENT, RawClient, RawFollow, RawWriter, all_rows, seqnos_of, start_at
from tests.service.keys import some_keys
from upr_protocol.block import block_keys, block_ops, block_values, build_block, make_runs, sealed
from upr_protocol.limits import CREDIT_BYTES, CREDIT_FRAMES
from upr_protocol.wire.codec import block_from_message, block_to_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types


async def fill(writer: RawWriter, partition: int, rows: int, size: int = 10) -> None:
    """Write rows of ``size`` bytes into a partition as one block."""
    block = build_block([b"%06d" % i for i in range(rows)], [b"v" * size] * rows)
    block = sealed(replace(block, runs=make_runs([partition], [rows])))
    await writer.send_block(block_to_message(block))
    assert partition in seqnos_of(await writer.result())


@pytest.mark.asyncio
async def test_all_1024_partitions_over_one_hello_and_one_follow(
    target: str,
) -> None:
    async with RawClient(target) as client:
        hello = await client.hello(dict.fromkeys(range(1024)))
        assert [a.partition for a in hello.answers] == list(range(1024))
        ids = [a.failover_id for a in hello.answers]
        assert len(set(ids)) == 1024
        writer = await client.writer("")
        rows = [(b"key %d" % i, b"value") for i in range(5000)]
        await writer.write(rows)
        follow = await client.follow()
        answers = await follow.start(
            *(start_at(p, 0, i, until_now=True) for p, i in enumerate(ids))
        )
        assert [a.partition for a in answers] == list(range(1024))
        assert len({a.started.token for a in answers}) == 1024
        blocks, _ = await follow.blocks_until_ended(1024)
        assert sorted((k, v) for _, _, k, v in all_rows(blocks)) == sorted(rows)
        await follow.close()


@pytest.mark.asyncio
async def test_a_follower_of_some_partitions_gets_only_those(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        follow = await client.follow()
        await follow.start(*(start_at(p) for p in range(0, 1024, 3)))
        await writer.write([(b"key %d" % i, b"value") for i in range(3000)])
        seen: set[int] = set()
        rows = 0
        infos = {i.partition: i.high_seqno for i in await client.partitions()}
        while rows < sum(high for p, high in infos.items() if p % 3 == 0):
            frame = (await follow.until("frame")).frame
            for block in map(block_from_message, frame.blocks):
                rows += block.rows
                seen |= set(block.runs["partition"].tolist())
            assert len(frame.tokens) == 4 * sum(len(b.runs) // 40 for b in frame.blocks)
        assert all(p % 3 == 0 for p in seen)


@pytest.mark.asyncio
async def test_keys_only_leaves_the_values_out_from_memory_and_store(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        key, other = some_keys(9, 2)
        await writer.write([(key, b"value"), (other, b"value"), (other, None)])
    for _ in range(2):
        async with RawClient(server.target) as client:
            follow = await client.follow(keys_only=True)
            await follow.start(start_at(9, until_now=True))
            blocks, _ = await follow.blocks_until_ended(1)
            assert all(block.value_offsets == b"" for block in blocks)
            assert {key, other} == {k for block in blocks for k in block_keys(block)}
            assert [v for block in blocks for v in block_values(block)] in ([None] * 3, [None] * 2)
            assert [o for block in blocks for o in block_ops(block)][-1] == 1
            await follow.close()
        # A clean restart flushes, so that the second round reads the store.
        assert server.terminate() == 0
        server.start()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("until", "seqno", "last"), [(5, 0, 6), (6, 0, 6), (7, 0, 9), (4, 4, 4), (2, 4, 4), (1, 0, 3)]
)
async def test_until_ends_at_the_first_marker_at_or_above(
    target: str, until: int, seqno: int, last: int
) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        for _ in range(3):
            await fill(writer, 2, 3)
        failover_id = (await client.logs(2))[0][0][0]
        follow = await client.follow()
        start = start_at(2, seqno, failover_id, until_seqno=until)
        (answer,) = await follow.start(start)
        assert answer.started.until_seqno == until
        blocks, ended = await follow.blocks_until_ended(1)
        assert [r[1] for r in all_rows(blocks)] == list(range(seqno + 1, last + 1))
        assert ended[0].problem.reason == "FINISHED"
        await follow.close()


@pytest.mark.asyncio
async def test_stop_and_start_again_tell_streams_apart(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        await fill(writer, 4, 10)
        follow = await client.follow()
        (first,) = await follow.start(start_at(4))
        await follow.send(stop=wire.Stop(partitions=[4, 5]))
        blocks, ended = await follow.blocks_until_ended(1)
        assert ended[0].problem.reason == "STOPPED"
        assert [s.token for s in ended[0].streams] == [first.started.token]
        (second,) = await follow.start(start_at(4, until_now=True))
        assert second.started.token != first.started.token
        more = await follow.until("frame")
        assert more.frame.tokens == second.started.token.to_bytes(4, "little")
        del blocks


@pytest.mark.asyncio
async def test_a_second_call_of_the_same_consumer_ends_the_first(
    target: str,
) -> None:
    async with RawClient(target) as client:
        first = await client.follow(consumer="indexer")
        await first.start(start_at(1), start_at(2))
        other = await client.follow(consumer="another")
        await other.start(start_at(1))
        second = await client.follow(consumer="indexer")
        await second.start(start_at(1))
        _, ended = await first.blocks_until_ended(2)
        assert ended[0].problem.reason == "SUPERSEDED"
        assert not ended[0].problem.retriable
        whole = await first.until("ended")
        assert (len(whole.ended.streams), whole.ended.problem.reason) == (0, "SUPERSEDED")
        await first.close()
        writer = await client.writer("")
        await fill(writer, 1, 1)
        await second.until("frame")
        await other.until("frame")


@pytest.mark.asyncio
@pytest.mark.parametrize("plain", [False, True])
async def test_a_client_that_is_slow_gets_few_frames_with_much_in_each(
    target: str, plain: bool
) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        follow = await client.follow(plain_rows=plain)
        follow.give_credit = False
        await follow.start(start_at(1))
        for _ in range(CREDIT_FRAMES + 100):
            await fill(writer, 1, 1)
        costs: list[int] = []
        while sum(costs) < CREDIT_BYTES:
            costs.append((await follow.until("frame")).frame.credit_bytes)
        assert len(costs) == CREDIT_FRAMES
        await follow.send(credit=wire.Credit(bytes=costs[0]))
        frame = (await follow.until("frame")).frame
        ends = [run.end_seqno for run in frame.plain_runs]
        ends += [run["end_seqno"] for data in frame.blocks for run in block_from_message(data).runs]
        assert max(ends) == CREDIT_FRAMES + 100
        await follow.close()


async def frames_without_credit(follow: RawFollow, most: int) -> int:
    """Read frames, giving no credit back, until half of it is used and then nothing comes; return their bytes."""
    sent = 0
    beats = 0
    while beats < 3 or sent <= most // 2:
        message = await follow.read()
        if message.HasField("frame"):
            size = sum(len(b.SerializeToString()) for b in message.frame.blocks)
            assert message.frame.credit_bytes == size
            sent += size
            beats = 0
        elif message.HasField("heartbeat"):
            beats += 1
    assert sent <= most
    return sent


@pytest.mark.asyncio
@pytest.mark.parametrize("stored", [False, True])
async def test_the_server_stays_within_the_credit(
    server_process: StartServer, stored: bool
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for i in range(40):
            await fill(writer, i, 100, 100)
    if stored:
        assert server.terminate() == 0
        server.start()
    window = 100_000
    async with RawClient(server.target) as client:
        follow = await client.follow(credit_bytes=window, heartbeat_seconds=0.1)
        follow.give_credit = False
        await follow.start(*(start_at(p) for p in range(40)))
        sent = await frames_without_credit(follow, window)
        await follow.send(credit=wire.Credit(bytes=sent))
        await frames_without_credit(follow, window)


@pytest.mark.asyncio
@pytest.mark.parametrize("stored", [False, True])
async def test_one_value_larger_than_the_credit_goes_through_alone(
    server_process: StartServer, stored: bool
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await fill(writer, 8, 1, 500_000)
        await fill(writer, 8, 1, 500_000)
        await fill(writer, 9, 1, 500_000)
    if stored:
        assert server.terminate() == 0
        server.start()
    async with RawClient(server.target) as client:
        follow = await client.follow(credit_bytes=1000, heartbeat_seconds=0.1)
        follow.give_credit = False
        await follow.start(start_at(8), start_at(9))
        frames = 2 if stored else 3
        for _ in range(frames):
            frame = await follow.until("frame")
            assert len(frame.frame.blocks) == 1
            beat = await follow.until("heartbeat")
            assert beat.HasField("heartbeat")
            await follow.send(credit=wire.Credit(bytes=frame.frame.credit_bytes))


@pytest.mark.asyncio
async def test_heartbeats_tell_the_high_seqnos_that_moved(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        await fill(writer, 3, 7)
        follow = await client.follow(heartbeat_seconds=0.1)
        await follow.start(start_at(3), start_at(4))
        # The first one comes right after the answers, so that the lag is known before any row.
        told = (await follow.until("heartbeat")).heartbeat.high_seqnos
        assert (int.from_bytes(told[:4], "little"), int.from_bytes(told[4:12], "little")) == (3, 7)
        await follow.until("frame")
        assert (await follow.until("heartbeat")).heartbeat.high_seqnos == b""


@pytest.mark.asyncio
async def test_a_silent_consumer_is_ended(target: str) -> None:
    async with RawClient(target) as client:
        call = client.changes.Follow()
        await call.write(
            wire.FollowRequest(open=wire.Open(bucket="default", heartbeat_seconds=0.1))
        )
        message = await call.read()
        while not message.HasField("ended"):
            message = await call.read()
            assert message is not grpc.aio.EOF
        assert message.ended.problem.reason == "SILENT"


@pytest.mark.asyncio
async def test_a_consumer_that_has_taken_a_large_value_is_silent_after_three_intervals(
    target: str,
) -> None:
    """While the value is on its way over a slow link nothing else is: that it came ends this time."""
    async with RawClient(target) as client:
        writer = await client.writer("")
        # At 64 KiB/s it takes two minutes.
        await fill(writer, 1, 1, 8_000_000)
        follow = await client.follow(heartbeat_seconds=0.1)
        await follow.start(start_at(1))
        await follow.until("frame")
        await follow.until("heartbeat")
        # It answers nothing from now on.
        async with asyncio.timeout(WAIT_SECONDS):
            message = await follow.call.read()
            while not message.HasField("ended"):
                message = await follow.call.read()
        assert message.ended.problem.reason == "SILENT"


@pytest.mark.asyncio
async def test_a_consumer_that_reads_nothing_is_ended_while_a_write_to_it_waits(
    server_process: StartServer,
) -> None:
    server = server_process(constants={"upr.service.follow.HALF_CLOSE_SECONDS": 0.2})
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for _ in range(20):
            await fill(writer, 1, 10, 100_000)
        follow = await client.follow(heartbeat_seconds=0.1, credit_bytes=2**27)
        await follow.send(start=wire.Start(partitions=[start_at(1)]))
        while '"SILENT"' not in server.log_text() and "reason=SILENT" not in server.log_text():
            # The writer's answers keep this client's connection busy while the stream is not read.
            await fill(writer, 2, 1)
        other = await client.follow()
        await other.start(start_at(2))
        await other.until("frame")


@pytest.mark.asyncio
async def test_disk_followers_see_only_what_is_durable(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    held = {"UPR_FAILPOINTS": f"journal.before_sync=hold:{hold}"}
    server = server_process(environment=held, constants=PATIENT)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await fill(writer, 6, 1)
        disk = await client.follow(heartbeat_seconds=0.1)
        memory = await client.follow(heartbeat_seconds=0.1, stability=types.STABILITY_MEMORY)
        for follow in (disk, memory):
            await follow.start(start_at(6))
            await follow.until("frame")
        hold.touch()
        block = sealed(replace(build_block([b"x"], [b"y"]), runs=make_runs([6], [1])))
        await writer.send_block(block_to_message(block), durability=types.DURABILITY_MEMORY)
        await writer.result()
        await memory.until("frame")
        for _ in range(3):
            await disk.until("heartbeat")
        hold.unlink()
        await disk.until("frame")


@pytest.mark.asyncio
async def test_streams_end_with_a_reason_when_the_server_stops(server_process: StartServer) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await fill(writer, 1, 5)
        follow = await client.follow()
        await follow.start(start_at(1), start_at(2))
        await follow.until("frame")
        stopping = asyncio.create_task(asyncio.to_thread(server.terminate))
        _, ended = await follow.blocks_until_ended(2)
        assert ended[0].problem.reason == "SHUTTING_DOWN"
        assert ended[0].problem.retriable
        whole = await follow.until("ended")
        assert whole.ended.problem.reason == "SHUTTING_DOWN"
        await follow.close()
        assert await stopping == 0
