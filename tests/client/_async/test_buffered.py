# ruff: noqa: SIM117, PT012
"""The buffered writer, against a server in memory."""

import os
from collections import defaultdict
from typing import Any

import pytest

from tests.client._async.adapter import running
from tests.client.key_values import Faults, KeyValueServer
from tests.client.scripted import ID_A
from upr_client import AsyncClient
from upr_client._async.io import Event
from upr_client.errors import (
    BucketNotFoundError,
    ClosedError,
    InvalidArgumentError,
    NoRoomError,
    PartitionNotActiveError,
    UnknownOutcomeError,
    UprError,
    WriteFailedError,
)
from upr_client.types import WriteResults
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import types_pb2

FAR_SECONDS = 600.0
Row = tuple[bytes, bytes | None]


def made_rows(count: int, keys: int = 17) -> list[Row]:
    return [(b"%d" % (i % keys), None if i % 5 == 4 else b"v%d" % i) for i in range(count)]


def by_key(rows: list[Row]) -> dict[bytes, list[bytes | None]]:
    history = defaultdict(list)
    for key, value in rows:
        history[key].append(value)
    return history


async def put(writer: Any, row: Row) -> None:
    if row[1] is None:
        await writer.delete(row[0])
    else:
        await writer.set(row[0], row[1])


@pytest.mark.asyncio
async def test_rows_go_out_in_batches_and_in_order() -> None:
    server, rows = KeyValueServer(), made_rows(1000)
    told: list[Row] = []
    seqnos: list[int] = []

    def on_results(batch: list[Row], results: WriteResults) -> None:
        assert len(batch) == results.rows == sum(run[2] - run[1] for run in results.runs)
        assert {run[3] for run in results.runs} == {ID_A}
        told.extend(batch)
        seqnos.extend(run[2] for run in results.runs if run[0] == partition_of(b"0"))

    async with running(server), AsyncClient(server.target) as client:
        writer = client.bucket().writer(
            batch_rows=300, linger_seconds=FAR_SECONDS, on_results=on_results
        )
        async with writer:
            for row in rows:
                await put(writer, row)
    assert told == rows
    assert by_key(server.applied) == by_key(rows)
    assert len(server.writes) == 4
    assert server.calls == 1
    assert seqnos == sorted(seqnos)


@pytest.mark.asyncio
async def test_a_row_lingers_for_others_and_then_goes() -> None:
    arrived = Event()
    server = KeyValueServer()
    async with running(server), AsyncClient(server.target) as client:
        options: dict[str, Any] = {"on_results": lambda rows, results: arrived.set()}
        async with client.bucket().writer(linger_seconds=0.01, **options) as writer:
            await writer.set(b"a", b"1")
            await writer.set(b"b", b"2")
            assert await arrived.wait(30)
            assert server.values == {b"a": b"1", b"b": b"2"}


@pytest.mark.asyncio
async def test_flush_does_not_linger_and_waits() -> None:
    server = KeyValueServer()
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(linger_seconds=FAR_SECONDS) as writer:
            await writer.flush()
            await writer.set(b"a", b"1")
            await writer.flush()
            assert server.values == {b"a": b"1"}
            await writer.delete(b"a")
            await writer.flush()
            assert server.values == {}
    assert len(server.writes) == 2


@pytest.mark.asyncio
async def test_a_batch_is_bounded_in_bytes() -> None:
    server = KeyValueServer()
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(batch_bytes=2000, linger_seconds=FAR_SECONDS) as writer:
            for size in (900, 900, 900, 5000, 10):
                await writer.set(b"k", b"x" * size)
    assert [len(write.block.values) for write in server.writes] == [1800, 900, 5000, 10]


@pytest.mark.asyncio
async def test_a_batch_waits_for_the_strongest_durability_of_its_rows() -> None:
    server = KeyValueServer()
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(
            durability="memory", linger_seconds=FAR_SECONDS
        ) as writer:
            await writer.set(b"a", b"1")
            await writer.flush()
            await writer.set(b"a", b"2")
            await writer.delete(b"b", durability="disk")
            await writer.set(b"c", b"3", "memory")
        async with client.bucket().writer() as writer:
            await writer.set(b"a", b"1")
    levels = [write.durability for write in server.writes]
    memory, disk = types_pb2.DURABILITY_MEMORY, types_pb2.DURABILITY_DISK
    assert levels == [memory, disk, disk]


@pytest.mark.asyncio
async def test_what_is_outstanding_is_bounded() -> None:
    server, answered = KeyValueServer(), [0]
    most = 0

    def on_results(batch: list[Row], results: WriteResults) -> None:
        answered[0] += len(batch)

    async with running(server), AsyncClient(server.target) as client:
        writer = client.bucket().writer(
            batch_rows=10,
            linger_seconds=FAR_SECONDS,
            max_outstanding_bytes=35 * (1 + 90 + 9),
            on_results=on_results,
        )
        async with writer:
            for taken in range(1, 1001):
                await writer.set(b"k", b"x" * 90)
                most = max(most, taken - answered[0])
    assert answered == [1000]
    assert 10 < most <= 36


@pytest.mark.asyncio
async def test_a_bound_below_a_batch_does_not_wait_for_the_batch_to_fill() -> None:
    server = KeyValueServer()
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(
            linger_seconds=FAR_SECONDS, max_outstanding_bytes=1
        ) as writer:
            for number in range(5):
                await writer.set(b"k", b"%d" % number)
                assert server.values == {b"k": b"%d" % number}
    assert len(server.writes) == 5


@pytest.mark.asyncio
async def test_lost_connections_neither_lose_nor_repeat_nor_reorder() -> None:
    server, rows = KeyValueServer(Faults(lost=[0, 3, 1, 7, 0, 2])), made_rows(2000)
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(batch_rows=50) as writer:
            for row in rows:
                await put(writer, row)
    assert server.calls == 7
    assert by_key(server.applied) == by_key(rows)


@pytest.mark.asyncio
async def test_a_refusal_that_may_pass_reorders_nothing() -> None:
    # All 20 batches are sent at most twice until then: the second number is one of the second time.
    refused: dict[int, Any] = {2: NoRoomError("full"), 21: NoRoomError("full")}
    server, rows = KeyValueServer(Faults(refused=refused)), made_rows(1000)
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(batch_rows=50) as writer:
            for row in rows:
                await put(writer, row)
    assert server.faults.refused == {}
    assert by_key(server.applied) == by_key(rows)


@pytest.mark.asyncio
async def test_a_batch_that_failed_is_told_at_flush_with_its_keys() -> None:
    server = KeyValueServer(Faults(refused={2: PartitionNotActiveError("a replica", hint="ask")}))
    keys = [b"%03d" % number for number in range(450)]
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(batch_rows=150, linger_seconds=FAR_SECONDS) as writer:
            for key in keys[:299]:
                await writer.set(key, b"v")
            with pytest.raises(WriteFailedError, match="149 rows were not written") as caught:
                await writer.flush()
            # Told once; the writer goes on.
            await writer.flush()
            for key in keys[299:]:
                await writer.set(key, b"v")
    error = caught.value
    assert (error.reason, error.retriable, error.hint) == ("WRITE_FAILED", False, "ask")
    assert (error.rows, error.keys) == (149, keys[150:250])
    assert error.partitions == sorted({partition_of(key) for key in keys[150:299]})
    assert isinstance(error.__cause__, PartitionNotActiveError)
    assert server.values.keys() == {*keys[:150], *keys[299:]}


@pytest.mark.asyncio
async def test_partitions_that_refuse_are_told_apart_from_those_that_applied() -> None:
    partition = partition_of(b"5")
    refused: dict[int, Any] = {partition: PartitionNotActiveError("dead")}
    server = KeyValueServer(Faults(refused_partitions=refused))
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(linger_seconds=FAR_SECONDS) as writer:
            for number in range(10):
                await writer.set(b"%d" % number, b"v")
            with pytest.raises(WriteFailedError) as caught:
                await writer.flush()
    assert (caught.value.keys, caught.value.partitions) == ([b"5"], [partition])
    assert len(server.values) == 9


@pytest.mark.asyncio
async def test_a_failure_is_told_by_the_next_call_which_takes_nothing() -> None:
    arrived = Event()
    server = KeyValueServer(Faults(refused={1: PartitionNotActiveError("a replica")}))
    async with running(server), AsyncClient(server.target) as client:
        options: dict[str, Any] = {"on_results": lambda rows, results: arrived.set()}
        async with client.bucket().writer(linger_seconds=0.0, batch_rows=1, **options) as writer:
            # The second one may find the failure of the first already.
            await writer.set(b"a", b"1")
            with pytest.raises(WriteFailedError, match="a replica"):
                for _ in range(10_000):
                    await writer.set(b"b", b"2")
                    await arrived.wait(0.01)
            await writer.set(b"c", b"3")
    assert (b"c", b"3") in server.applied
    assert (b"a", b"1") not in server.applied


@pytest.mark.asyncio
async def test_a_failure_is_told_on_leaving() -> None:
    server = KeyValueServer(Faults(refused={1: BucketNotFoundError("no bucket")}))
    async with running(server), AsyncClient(server.target) as client:
        with pytest.raises(WriteFailedError, match="1 rows were not written"):
            async with client.bucket().writer() as writer:
                await writer.set(b"a", b"1")
        with pytest.raises(ClosedError, match="the writer was closed"):
            await writer.set(b"a", b"1")


@pytest.mark.asyncio
async def test_an_outcome_that_is_not_known_is_told() -> None:
    server = KeyValueServer(Faults(lost=[0]))
    async with running(server), AsyncClient(server.target, retry_seconds=0.0) as client:
        with pytest.raises(WriteFailedError) as caught:
            async with client.bucket().writer() as writer:
                await writer.set(b"a", b"1")
    assert isinstance(caught.value.__cause__, UnknownOutcomeError)
    assert caught.value.retriable


@pytest.mark.asyncio
async def test_what_the_callback_raises_is_told() -> None:
    def on_results(rows: list[Row], results: WriteResults) -> None:
        raise ZeroDivisionError("of the application")

    server = KeyValueServer()
    async with running(server), AsyncClient(server.target) as client:
        async with client.bucket().writer(on_results=on_results) as writer:
            await writer.set(b"a", b"1")
            with pytest.raises(ZeroDivisionError):
                await writer.flush()
    assert server.values == {b"a": b"1"}


@pytest.mark.asyncio
async def test_an_error_in_the_block_is_not_held_up(caplog: pytest.LogCaptureFixture) -> None:
    server = KeyValueServer(Faults(unanswered=2))
    async with running(server):
        async with AsyncClient(server.target, request_timeout=1) as client:

            async def fail() -> None:
                async with client.bucket().writer(batch_rows=1) as writer:
                    await writer.set(b"a", b"1")
                    await writer.set(b"b", b"2")
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "1 rows were not written, or may not have been: no answer arrived within 1 s" in warning
    assert server.values == {b"a": b"1"}


@pytest.mark.asyncio
async def test_closing_the_client_writes_what_was_taken() -> None:
    server = KeyValueServer()
    async with running(server):
        client = AsyncClient(server.target)
        writer = client.bucket().writer(linger_seconds=FAR_SECONDS)
        await writer.__aenter__()
        await writer.set(b"a", b"1")
        await client.close()
        assert server.values == {b"a": b"1"}
        with pytest.raises(ClosedError, match="the client was closed"):
            await writer.set(b"a", b"2")
        with pytest.raises(ClosedError, match="the client was closed"):
            await writer.flush()
        await writer.close()


@pytest.mark.asyncio
async def test_closing_the_client_tells_what_it_could_not_write() -> None:
    server = KeyValueServer(Faults(unanswered=1))
    async with running(server):
        client = AsyncClient(server.target, request_timeout=0.3)
        with pytest.raises(WriteFailedError, match="1 rows were not written"):
            async with client.bucket().writer() as writer:
                await writer.set(b"a", b"1")
                await client.close()


@pytest.mark.asyncio
async def test_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    server = KeyValueServer()
    async with running(server), AsyncClient(server.target) as client:
        bucket = client.bucket()
        writer = bucket.writer()
        with pytest.raises(ClosedError, match="use it in a with statement"):
            await writer.set(b"a", b"1")
        with pytest.raises(ClosedError, match="use it in a with statement"):
            await writer.flush()
        async with writer:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: -1)
                with pytest.raises(ClosedError, match="another process"):
                    await writer.set(b"a", b"1")
                with pytest.raises(ClosedError, match="another process"):
                    await writer.flush()
                with pytest.raises(ClosedError, match="another process"):
                    bucket.writer()
                # Leaves the other process's rows alone.
                await writer.close()
            await writer.set(b"a", b"1")
            wrong: Any = "text"
            with pytest.raises(InvalidArgumentError, match="must be bytes"):
                await writer.set(wrong, b"")
            with pytest.raises(InvalidArgumentError, match="must be bytes, or None"):
                await writer.set(b"k", wrong)
            none: Any = None
            for one in (writer, bucket):
                with pytest.raises(InvalidArgumentError, match="value is None; must be bytes"):
                    await one.set(b"a", none)
            with pytest.raises(InvalidArgumentError, match="key is 4097 bytes"):
                await writer.delete(b"k" * 4097)
            with pytest.raises(InvalidArgumentError, match="durability is 'tape'"):
                await writer.delete(b"k", "tape")
        await writer.close()
        with pytest.raises(ClosedError, match="used before"):
            await writer.__aenter__()
    assert server.applied == [(b"a", b"1")]


@pytest.mark.asyncio
async def test_what_ended_the_sending_is_told_to_whoever_comes_later() -> None:
    def fail() -> None:
        raise OverflowError("a bug")

    async with running(KeyValueServer()) as server, AsyncClient(server.target) as client:
        writer = client.bucket().writer(linger_seconds=FAR_SECONDS)
        async with writer:
            writer._take_due = fail  # type: ignore[method-assign]
            await writer.set(b"k", b"v")
            with pytest.raises(WriteFailedError, match=r"1 rows .*a bug"):
                await writer.flush()
            for _ in range(2):
                with pytest.raises(
                    UprError, match=r"writing failed: OverflowError.* for a new writer"
                ):
                    await writer.set(b"k", b"v")


@pytest.mark.asyncio
async def test_options_out_of_range() -> None:
    async with AsyncClient("localhost:1") as client:
        bucket = client.bucket()
        options: dict[str, Any]
        for options, words in (
            ({"durability": "tape"}, "durability is 'tape'"),
            ({"batch_rows": 0}, "batch_rows is 0; must be 1 to 262144"),
            ({"batch_bytes": 2**20 + 1}, "batch_bytes is 1048577; must be 1 to 1048576"),
            ({"max_outstanding_bytes": 0}, "must be 1 or more"),
            ({"max_outstanding_bytes": float("nan")}, "max_outstanding_bytes is nan; must be 1"),
            ({"batch_rows": "many"}, "batch_rows is 'many'; must be 1 to 262144"),
            ({"linger_seconds": "1s"}, "linger_seconds is '1s'; must be 0 or more"),
            ({"linger_seconds": -1.0}, "linger_seconds is -1.0"),
            ({"linger_seconds": float("nan")}, "linger_seconds is nan"),
            ({"linger_seconds": 1e10}, "linger_seconds is 10000000000.0; .* at most 1000000000"),
            ({"on_results": 7}, "on_results is 7; must be a function"),
        ):
            with pytest.raises(InvalidArgumentError, match=words):
                bucket.writer(**options)
