"""Key prefixes and plain rows over real gRPC: from the tail, the store and compressed blocks."""

import itertools
from pathlib import Path

import grpc
import pytest

from tests.conftest import StartServer
from tests.raw import PATIENT, RawClient, RawFollow, all_rows, start_at
from tests.service.keys import some_keys
from tests.service.test_compression import ROWS, zstd_server
from tests.service.test_follow import fill
from tests.service.test_merging import Writer
from upr_protocol.block import build_block
from upr_protocol.limits import CREDIT_BYTES_MAX, MESSAGE_BYTES_MAX
from upr_protocol.wire.codec import block_from_message, block_to_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

P = 7
Rows = list[tuple[int, int, bytes, bytes | None]]


async def blocks_of(client: RawClient, **options: object) -> tuple[Rows, list[wire.Frame], int]:
    """All there is now, row by row, with the frames, and how many streams ended."""
    follow = await client.follow(**options)
    await follow.start(*(start_at(p, until_now=True) for p in range(1024)))
    frames: list[wire.Frame] = []
    ended = 0
    while ended < 1024:
        message = await follow.read()
        if message.HasField("frame"):
            frames.append(message.frame)
        elif message.HasField("ended"):
            assert message.ended.problem.reason == "FINISHED"
            ended += len(message.ended.streams)
    await follow.close()
    blocks = [block_from_message(block) for frame in frames for block in frame.blocks]
    rows: Rows = [
        (r.partition, m.seqno, m.key, plain_value(m)) for r in runs_of(frames) for m in r.rows
    ]
    return rows + all_rows(blocks), frames, ended


def runs_of(frames: list[wire.Frame]) -> list[wire.PlainRun]:
    return [run for frame in frames for run in frame.plain_runs]


def plain_value(row: wire.PlainRow) -> bytes | None:
    return row.value if row.HasField("value") else None


def tiles(frames: list[wire.Frame]) -> dict[int, list[tuple[int, int, int]]]:
    """The (start, end, horizon) of each partition's runs, which continue each other."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for frame in frames:
        for block in map(block_from_message, frame.blocks):
            for run in block.runs:
                numbers = tuple(int(run[n]) for n in ("start_seqno", "end_seqno", "horizon"))
                found.setdefault(int(run["partition"]), []).append(numbers)  # type: ignore[arg-type]
        for plain in frame.plain_runs:
            numbers = (plain.start_seqno, plain.end_seqno, plain.horizon)
            found.setdefault(plain.partition, []).append(numbers)
    for runs in found.values():
        assert [start for start, _, _ in runs] == [0, *(end for _, end, _ in runs[:-1])]
    return found


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["tail", "zstd", "merged"])
async def test_every_way_of_showing_shows_the_same_history(
    server_process: StartServer, kind: str
) -> None:
    options = ("--tail-bytes", "65536") if kind == "merged" else ()
    # After the start nothing is merged: all that is read is compared with what was read first.
    late = {"upr.service.buckets.compactor.FIRST_LOOK_SECONDS": 1e9}
    server = (
        zstd_server(server_process) if kind == "zstd" else server_process(*options, constants=late)
    )
    async with RawClient(server.target) as client:
        writing = await client.writer("")
        if kind == "merged":
            writer = Writer(1)
            for _ in range(40):
                await writer.write(writing)
            prefixes = [b"key-1", b"none"]
        else:
            await writing.write(ROWS[:3000])
            await writing.write([(key, None) for key, _ in ROWS[:300]])
            prefixes = [b"user:001", b"none"]
        await writing.close()
    if kind != "tail":
        assert server.terminate() == 0
        server.start()
    async with RawClient(server.target) as client:
        whole, frames, _ = await blocks_of(client)
        assert len(whole) > 300
        told = tiles(frames)
        ways = [(b"", False), (prefixes[0], False), (prefixes[0], True), (prefixes[1], False)]
        for plain, (prefix, keys_only) in itertools.product((False, True), ways):
            shown = {"key_prefix": prefix, "keys_only": keys_only, "plain_rows": plain}
            rows, frames, _ = await blocks_of(client, **shown, accept_zstd=True)
            expected = [row for row in whole if row[2].startswith(prefix)]
            if keys_only:
                expected = [(*row[:3], None) for row in expected]
            assert sorted(rows) == sorted(expected), shown
            assert not any(block.zstd for f in frames for block in f.blocks) or not (
                prefix or keys_only or plain
            )
            assert {p: runs[-1] for p, runs in tiles(frames).items()} == {
                p: runs[-1] for p, runs in told.items()
            }
            if plain:
                assert not any(frame.blocks or frame.tokens for frame in frames)
                deletes = {
                    (r.partition, m.seqno) for r in runs_of(frames) for m in r.rows if m.deleted
                }
                gone = {row[:2] for row in whole if row[3] is None and row[2].startswith(prefix)}
                assert deletes == gone
                assert all(m.time > 10**15 for r in runs_of(frames) for m in r.rows)


@pytest.mark.asyncio
async def test_a_prefix_shows_the_state_as_of_a_cut(server_process: StartServer) -> None:
    server = server_process()
    keys = some_keys(P, 6)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for key in keys[:4]:
            await writer.write([(key, b"before")])
        request = wire.CreateCutRequest(bucket="default", name="c", partitions=[P])
        (pin,) = (await client.changes.CreateCut(request)).cut.partitions
        await writer.write([(key, b"after") for key in keys])
    for _ in range(2):
        async with RawClient(server.target) as client:
            for plain in (False, True):
                follow = await client.follow(key_prefix=keys[2], plain_rows=plain)
                (answer,) = await follow.start(start_at(P, until_exact=pin.seqno))
                assert answer.started.until_seqno == 4
                if plain:
                    runs, (ended,) = await follow.plain_until_ended(1)
                    rows = [(m.key, m.value) for run in runs for m in run.rows]
                else:
                    blocks, (ended,) = await follow.blocks_until_ended(1)
                    rows = [(key, value or b"") for _, _, key, value in all_rows(blocks)]
                assert ended.problem.reason == "FINISHED"
                assert rows == [(keys[2], b"before")]
                await follow.close()
        assert server.terminate() == 0
        server.start()


@pytest.mark.asyncio
async def test_a_prefix_longer_than_a_key_is_refused(target: str) -> None:
    async with RawClient(target) as client:
        (await client.follow(key_prefix=b"k" * 4096)).call.cancel()
        call = client.changes.Follow()
        opening = wire.Open(bucket="default", key_prefix=b"k" * 4097)
        await call.write(wire.FollowRequest(open=opening))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "4096" in (await call.details())


async def frames_of(follow: RawFollow, give_credit: bool) -> tuple[list[wire.Frame], bool]:
    """Read on until a stream ends; without credit, or until three heartbeats came without a frame between them.

    Returns:
        The frames, and whether it has ended.
    """
    follow.give_credit = give_credit
    frames: list[wire.Frame] = []
    beats = 0
    while give_credit or beats < 3:
        message = await follow.read()
        if message.HasField("ended"):
            return frames, True
        beats = beats + 1 if message.HasField("heartbeat") else 0
        if message.HasField("frame"):
            frames.append(message.frame)
    return frames, False


@pytest.mark.asyncio
async def test_plain_rows_cost_the_credit_what_their_blocks_do(server_process: StartServer) -> None:
    server = server_process(constants=PATIENT)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for rows in (1, 3, 40, 200, 7):
            await fill(writer, P, rows, size=20)
        for _ in range(2):
            # From the tail, then from the store, where it is one block.
            costs = []
            for plain in (False, True):
                follow = await client.follow(
                    plain_rows=plain, credit_bytes=2000, heartbeat_seconds=0.1
                )
                await follow.send(credit=wire.Credit(bytes=0))
                await follow.start(start_at(P, until_now=True))
                frames, ended = await frames_of(follow, False)
                assert sum(frame.credit_bytes for frame in frames[:-1]) < 2000
                # More than is outstanding is all of it.
                await follow.send(credit=wire.Credit(bytes=2**64 - 1))
                if not ended:
                    frames += (await frames_of(follow, True))[0]
                costs.append(sum(frame.credit_bytes for frame in frames))
                if plain:
                    assert [m.seqno for run in runs_of(frames) for m in run.rows][-1] == 251
                else:
                    assert costs == [sum(b.ByteSize() for frame in frames for b in frame.blocks)]
                await follow.close()
            assert costs[0] == costs[1]
            assert server.terminate() == 0
            server.start()


@pytest.mark.asyncio
async def test_a_window_above_the_limit_is_granted_up_to_it(target: str) -> None:
    async with RawClient(target) as client:
        follow = await client.follow(credit_bytes=2**63)
        assert follow.opened.credit_bytes == CREDIT_BYTES_MAX


@pytest.mark.long
@pytest.mark.asyncio
async def test_what_is_large_comes_in_messages_within_the_limit(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process()
    tiny = 2**18
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        # 23.9 MiB of columns in many rows of one partition are more as plain rows than a message may have.
        await fill(writer, P, 200_000, size=105)
        await fill(writer, P + 1, tiny, size=0)
        key = some_keys(P + 2, 1)[0]
        await writer.send_block(block_to_message(build_block([key], [b"v" * (20 * 2**20)])))
        await writer.result()
        for _ in range(2):
            follow = await client.follow(plain_rows=True)
            await follow.start(*(start_at(p, until_now=True) for p in (P, P + 1, P + 2)))
            seqnos: dict[int, int] = {P: 0, P + 1: 0, P + 2: 0}
            rows = ended = cost = 0
            while ended < 3:
                message = await follow.read()
                if message.HasField("ended"):
                    ended += len(message.ended.streams)
                if message.HasField("frame"):
                    assert message.ByteSize() < MESSAGE_BYTES_MAX
                    cost += message.frame.credit_bytes
                    for run in message.frame.plain_runs:
                        assert run.start_seqno == seqnos[run.partition]
                        seqnos[run.partition] = run.end_seqno
                        rows += len(run.rows)
            assert rows == 200_000 + tiny + 1
            # The bytes of the blocks: keys, values, and offsets of eight bytes a row.
            assert cost > 200_000 * (105 + 8) + tiny * 8 + 20 * 2**20
            assert seqnos == {P: 200_000, P + 1: tiny, P + 2: 1}
            await follow.close()
            assert server.terminate() == 0
            server.start()
