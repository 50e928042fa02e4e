"""Writing, against a scripted server."""

import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import (
    ID_A,
    VERSION,
    Abort,
    Expect,
    HalfClosed,
    Hold,
    Step,
    applied,
    write_opened,
    write_refused,
)
from upr_client import (
    AsyncClient,
    BucketNotFoundError,
    ClosedError,
    InvalidArgumentError,
    NoRoomError,
    PartitionNotActiveError,
    UnavailableError,
    UnknownOutcomeError,
    WriteResult,
)
from upr_protocol.partitioning import partition_of
from upr_protocol.rows import split_rows
from upr_protocol.wire.codec import block_from_message

KEY = b"key"
P = partition_of(KEY)
BEGIN = [Expect("open"), write_opened(), Expect("write")]


@pytest.mark.asyncio
async def test_set_and_delete() -> None:
    script = [*BEGIN, applied(1, (P, 4, 5)), Expect("write"), applied(2, (P, 5, 6)), HalfClosed()]
    async with serve(write=[script]) as server:
        async with AsyncClient(server.target) as client:
            bucket = client.bucket("default", producer="me")
            assert await bucket.set(KEY, b"value") == WriteResult(P, 5, ID_A)
            assert await bucket.delete(KEY, "memory") == WriteResult(P, 6, ID_A)
            assert bucket.version == VERSION
        heard = server.calls["write"][0]
        [open_] = heard.of("open")
        assert (open_.bucket, open_.producer, open_.HasField("bucket_version")) == (
            "default",
            "me",
            False,
        )
        first, second = heard.of("write")
        assert (first.number, second.number) == (1, 2)
        assert first.durability != second.durability
        block = block_from_message(first.block, numbered=False)
        assert (block.rows, block.keys, block.values) == (1, KEY, b"value")
        assert heard.half_closed


@pytest.mark.asyncio
async def test_numbers_go_on_after_those_the_server_knows_of_the_producer() -> None:
    script = [
        Expect("open"),
        write_opened(41),
        Expect("write"),
        applied(42, (P, 0, 1)),
        HalfClosed(),
    ]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        assert (await client.bucket(producer="me").set(KEY, b"")).seqno == 1


@pytest.mark.asyncio
async def test_many_rows_go_out_in_blocks_without_waiting() -> None:
    rows = [(KEY, b"%4d" % i * 1000) for i in range(3000)]
    counts = [len(keys) for keys, _ in split_rows([k for k, _ in rows], [v for _, v in rows])]
    steps: list[Step] = [Expect("open"), write_opened(), *[Expect("write") for _ in counts]]
    steps += [applied(n, (P, 0, count)) for n, count in enumerate(counts, 1)]
    async with serve(write=[[*steps, HalfClosed()]]) as server:
        async with AsyncClient(server.target) as client:
            results = await client.bucket().write_many(rows)
        blocks = [
            block_from_message(w.block, numbered=False)
            for w in server.calls["write"][0].of("write")
        ]
    assert len(blocks) > 8
    assert [block.rows for block in blocks] == counts
    assert b"".join(block.values for block in blocks) == b"".join(value for _, value in rows)
    assert results.rows == 3000
    assert [run[2] - run[1] for run in results.runs] == [block.rows for block in blocks]


@pytest.mark.asyncio
async def test_an_answer_that_was_lost_is_asked_for_with_the_same_number() -> None:
    first = [*BEGIN, Abort(UnavailableError("gone"))]
    second = [*BEGIN, applied(1, (P, 6, 7), duplicate=True), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        assert (await client.bucket().set(KEY, b"value")).seqno == 7
        calls = server.calls["write"]
        assert [call.of("write")[0].number for call in calls] == [1, 1]
        assert calls[0].of("open")[0].producer == calls[1].of("open")[0].producer
        assert calls[1].of("open")[0].bucket_version == VERSION


@pytest.mark.asyncio
async def test_a_refusal_that_may_pass_is_sent_again_with_the_same_number() -> None:
    first = [*BEGIN, write_refused(1, NoRoomError("full")), HalfClosed()]
    second = [*BEGIN, applied(1, (P, 0, 1)), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        assert (await client.bucket().set(KEY, b"value")).seqno == 1
        assert [call.of("write")[0].number for call in server.calls["write"]] == [1, 1]


@pytest.mark.asyncio
async def test_a_refusal_for_good_is_raised_and_later_writes_go_on() -> None:
    script = [
        *BEGIN,
        write_refused(1, PartitionNotActiveError("a replica")),
        Expect("write"),
        applied(2, (P, 0, 1)),
        HalfClosed(),
    ]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        with pytest.raises(PartitionNotActiveError, match="a replica"):
            await bucket.set(KEY, b"value")
        assert (await bucket.set(KEY, b"value")).seqno == 1


@pytest.mark.asyncio
async def test_a_write_that_was_never_answered_has_an_unknown_outcome() -> None:
    async with (
        serve(write=[[*BEGIN, Abort(UnavailableError("gone"))]]) as server,
        AsyncClient(server.target, retry_seconds=0.0) as client,
    ):
        bucket = client.bucket()
        with pytest.raises(UnknownOutcomeError, match="not answered: gone"):
            await bucket.set(KEY, b"value")


@pytest.mark.asyncio
async def test_a_write_that_was_never_sent_is_unavailable() -> None:
    async with serve() as server, AsyncClient(server.target, retry_seconds=0.05) as client:
        bucket = client.bucket()
        with pytest.raises(UnavailableError, match="the write was not sent: "):
            await bucket.set(KEY, b"value")


@pytest.mark.asyncio
async def test_a_call_that_is_refused_for_good_is_raised() -> None:
    script = [Expect("open"), Abort(BucketNotFoundError("no bucket nosuch"))]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket("nosuch")
        with pytest.raises(BucketNotFoundError, match="nosuch"):
            await bucket.set(KEY, b"value")


@pytest.mark.asyncio
async def test_rows_out_of_range_are_refused_before_anything_is_sent() -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        with pytest.raises(InvalidArgumentError, match="a key of 0 bytes"):
            await bucket.set(b"", b"value")
        with pytest.raises(InvalidArgumentError, match="a key is bytes"):
            await bucket.write_many([(b"k", b"v"), ("k", b"v")])  # type: ignore[list-item]
        with pytest.raises(InvalidArgumentError, match="durability is 'tape'"):
            await bucket.delete(b"k", "tape")
        assert (await bucket.write_many([])).runs == []
        assert server.calls["write"] == []


@pytest.mark.asyncio
async def test_closing_waits_for_answers_and_then_says_so() -> None:
    async with serve(write=[[*BEGIN, applied(1, (P, 0, 1)), Hold()]]) as server:
        client = AsyncClient(server.target, request_timeout=0.05)
        bucket = client.bucket()
        assert (await bucket.set(KEY, b"value")).seqno == 1
        await client.close()
        await client.close()
        with pytest.raises(ClosedError):
            await bucket.set(KEY, b"value")


@pytest.mark.asyncio
async def test_a_server_that_allows_few_outstanding_writes_gets_all_of_them() -> None:
    rows = [(KEY, b"%4d" % i * 1000) for i in range(2000)]
    counts = [len(keys) for keys, _ in split_rows([k for k, _ in rows], [v for _, v in rows])]
    steps: list[Step] = [Expect("open"), write_opened(in_flight=2)]
    for number, count in enumerate(counts, 1):
        # The server does not answer the first before it has heard the second.
        steps += [Expect("write"), *([Expect("write")] if number == 1 else [])]
        steps += [applied(number, (P, 0, count))]
    del steps[-2]
    async with (
        serve(write=[[*steps, HalfClosed()]]) as server,
        AsyncClient(server.target) as client,
    ):
        assert (await client.bucket().write_many(rows)).rows == 2000
        assert len(server.calls["write"][0].of("write")) == len(counts) > 4
