# ruff: noqa: SIM117
"""Unary calls, closing, and what an application does wrong, against a scripted server."""

import os
from pathlib import Path

import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import (
    BEGIN,
    ID_A,
    ID_B,
    VERSION,
    Abort,
    Expect,
    HalfClosed,
    Hold,
    answers,
    ended,
    frame,
    rollback,
    run_block,
    started,
)
from upr_client import (
    AsyncClient,
    Change,
    FilePositions,
    MemoryPositions,
    Only,
    Position,
    Rollback,
    Tuning,
)
from upr_client.admin import PartitionInfo
from upr_client.errors import (
    BucketNotFoundError,
    ClosedError,
    DataDamagedError,
    InvalidArgumentError,
    UnavailableError,
)
from upr_client.lowlevel import hello
from upr_protocol.failover import FailoverLog


@pytest.mark.asyncio
async def test_hello_asks_for_many_partitions_at_once() -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        bucket = client.bucket("default")
        first, second = await hello(bucket, {3: None, 700: ID_A}, with_log=True)
        assert (first.partition, first.HasField("rollback_seqno")) == (3, False)
        assert (second.partition, second.rollback_seqno, second.failover_id) == (700, 3, ID_B)
        assert len(second.failover_log) == 1
        assert bucket.version == VERSION
        await hello(bucket, {3: ID_A})
    asked, again = server.hellos
    assert [p.HasField("failover_id") for p in asked.partitions] == [False, True]
    assert not asked.HasField("bucket_version")
    assert (again.bucket_version, again.with_log) == (VERSION, False)


@pytest.mark.asyncio
async def test_failover_logs_and_states() -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        assert await client.admin.failover_logs(bucket, [7]) == {
            7: FailoverLog.from_pairs([(ID_A, 0), (ID_B, 7)])
        }
        assert len(await client.admin.failover_logs(bucket)) == 1024
        [info] = await client.admin.partitions(bucket)
        assert isinstance(info, PartitionInfo)
        assert (info.partition, info.state, info.high_seqno, info.durable_seqno) == (
            7,
            "dead",
            9,
            8,
        )
        assert isinstance(info.problem, DataDamagedError)


@pytest.mark.asyncio
async def test_an_error_of_the_server_arrives_as_what_it_is() -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        bucket = client.bucket("nosuch")
        with pytest.raises(BucketNotFoundError) as caught:
            await client.admin.partitions(bucket)
    assert (caught.value.message, caught.value.hint) == ("there is no bucket nosuch", "make it")


@pytest.mark.asyncio
async def test_a_server_that_is_not_there_is_named_at_once() -> None:
    async with serve() as server:
        target = server.target
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        with pytest.raises(UnavailableError):
            await client.admin.partitions(bucket)


@pytest.mark.asyncio
async def test_values_out_of_range_are_refused_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match="connect_timeout"):
        AsyncClient("localhost:1", connect_timeout=0)
    async with AsyncClient("localhost:1") as client:
        with pytest.raises(InvalidArgumentError, match="bucket"):
            client.bucket("")
        with pytest.raises(InvalidArgumentError, match="producer"):
            client.bucket("b", producer="p" * 201)
        with pytest.raises(InvalidArgumentError, match="resume is 'server'"):
            client.bucket("b").changes(resume="server")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="lease is '1h' s; must be above 0"):
            await client.admin.create_cut("b", "c", lease="1h")  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_no_partitions_are_not_all_of_them() -> None:
    async with AsyncClient("localhost:1") as client:
        admin = client.admin
        with pytest.raises(
            InvalidArgumentError, match="partitions is empty; must name one or more"
        ):
            await admin.reset_consumer("b", "c", "beginning", partitions=[])
        with pytest.raises(InvalidArgumentError, match="partitions is empty"):
            await admin.partitions("b", [])
        with pytest.raises(InvalidArgumentError, match="partitions is empty"):
            await admin.failover_logs("b", iter([]))
        with pytest.raises(InvalidArgumentError, match="partitions is empty"):
            await admin.create_cut("b", "c", partitions=())
        with pytest.raises(InvalidArgumentError, match="partitions is empty"):
            async with client.bucket("b").cut("c", partitions=[]):
                pass
        with pytest.raises(InvalidArgumentError, match="partitions is 7; must be several"):
            await admin.partitions("b", 7)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_after_a_fork_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncClient("localhost:1") as client:
        bucket = client.bucket()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ClosedError, match="another process"):
                await bucket.set(b"k", b"v")


@pytest.mark.asyncio
async def test_closing_the_client_ends_its_streams() -> None:
    script = [*BEGIN, answers(started(1, 7)), frame((7, run_block(1, 0, 2))), Hold()]
    store = MemoryPositions()
    async with serve([script]) as server:
        client = AsyncClient(server.target)
        changes = client.bucket().changes(resume=store, only=Only([1]))
        await changes.__aenter__()
        batch = await anext(changes.batches())
        assert len(batch.changes) == batch.rows == 2
        await client.close()
        with pytest.raises(ClosedError):
            await anext(changes.batches())
    # What was yielded last was not consumed; the id that the server named is stored all the same.
    stored = store.load([1])[1]
    assert (stored.seqno, stored.failover_id) == (0, ID_A)


@pytest.mark.asyncio
async def test_an_error_of_the_application_goes_through_and_loses_nothing(tmp_path: Path) -> None:
    script = [*BEGIN, answers(started(1, 7)), frame((7, run_block(1, 0, 4))), Hold()]
    store = FilePositions(tmp_path / "positions")
    async with serve([script]) as server, AsyncClient(server.target) as client:

        async def fail_at_three() -> None:
            async with client.bucket().changes(resume=store, only=Only([1])) as changes:
                async for event in changes:
                    assert event.seqno < 3, "this one cannot be indexed"

        with pytest.raises(AssertionError, match="cannot be indexed"):
            await fail_at_three()
    assert FilePositions(tmp_path / "positions").load([1])[1].seqno == 2


@pytest.mark.asyncio
async def test_an_undo_that_fails_is_asked_for_again() -> None:
    log = FailoverLog.born(ID_A)
    position = Position(VERSION, ID_A, ID_A, 8, 8, (3, 8), log, bucket="default")
    script = [*BEGIN, answers(rollback(1, 5, ID_B, (ID_A, 0), (ID_B, 5)))]
    script += [
        Expect("start"),
        answers(started(1, 7, ID_B)),
        ended("FINISHED", (1, 7)),
        HalfClosed(),
    ]
    asked: list[Rollback] = []

    async def undo(item: Rollback) -> int:
        asked.append(item)
        if len(asked) == 1:
            raise OSError("the disk is full")
        return len(asked)

    def undo_plainly(item: Rollback) -> object:
        return undo(item)

    store = MemoryPositions({1: position})
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            resume=store, only=Only([1]), on_rollback=undo_plainly
        ) as changes:
            with pytest.raises(OSError, match="disk is full"):
                await anext(changes)
            assert changes.position(1) == position
            assert [event async for event in changes] == []
            assert changes.position(1).seqno == 3
    assert asked[0] == asked[1]


@pytest.mark.asyncio
async def test_the_end_named_at_first_holds_after_a_lost_connection() -> None:
    first = [
        *BEGIN,
        answers(started(1, 7, until=4)),
        frame((7, run_block(1, 0, 2))),
        Abort(UnavailableError("gone")),
    ]
    second = [
        *BEGIN,
        answers(started(1, 7, until=4)),
        frame((7, run_block(1, 2, 4))),
        ended("FINISHED", (1, 7)),
        HalfClosed(),
    ]
    async with serve([first, second]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(until="now", only=Only([1])) as changes:
            seqnos = [event.seqno async for event in changes if isinstance(event, Change)]
    assert seqnos == [1, 2, 3, 4]
    start = server.calls["follow"][1].of("start")[0].partitions[0]
    assert (start.WhichOneof("until"), start.until_seqno) == ("until_seqno", 4)


@pytest.mark.asyncio
async def test_positions_are_stored_every_save_seconds() -> None:
    script = [
        *BEGIN,
        answers(started(1, 7)),
        frame((7, run_block(1, 0, 2))),
        # Comes when the position after the first frame was stored.
        Expect("ack"),
        frame((7, run_block(1, 2, 4))),
        Expect("ack"),
        ended("STOPPED", (1, 7)),
        HalfClosed(),
    ]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        store = MemoryPositions()
        async with client.bucket().changes(
            resume=store, only=Only([1]), tuning=Tuning(save_seconds=0.01)
        ) as changes:
            async for _ in changes.batches():
                pass
    assert store.load([1])[1].seqno == 4
    acks = [ack.positions for ack in server.calls["follow"][0].of("ack")]
    assert acks[-1] == (1).to_bytes(4, "little") + (4).to_bytes(8, "little")


@pytest.mark.asyncio
async def test_all_partitions_over_one_call() -> None:
    numbers = range(1024)
    script = [
        *BEGIN,
        answers(*(started(p, p + 1, until=1) for p in numbers)),
        frame(*((p + 1, run_block(p, 0, 1)) for p in numbers)),
        ended("FINISHED", *((p, p + 1) for p in numbers)),
        HalfClosed(),
    ]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(until="now", only=Only(keys_only=True)) as changes:
            async for batch in changes.batches():
                assert [change.partition for change in batch.changes] == list(numbers)
                assert len(batch.markers) == sum(len(block.runs) for block in batch.blocks) == 1024
        assert {position.seqno for position in changes.positions().values()} == {1}
    assert server.calls["follow"][0].of("open")[0].keys_only
