"""Writing, against a scripted server."""

import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import (
    ID_A,
    VERSION,
    Abort,
    Expect,
    HalfClosed,
    Heard,
    Hold,
    Step,
    applied,
    write_opened,
    write_refused,
)
from upr_client import AsyncClient
from upr_client.errors import (
    BucketNotFoundError,
    ClosedError,
    InvalidArgumentError,
    NoRoomError,
    PartitionNotActiveError,
    PartlyWrittenError,
    QuotaExceededError,
    UnavailableError,
    UnknownOutcomeError,
)
from upr_client.lowlevel import write_blocks
from upr_client.types import WriteResult
from upr_protocol.block import build_block, build_blocks
from upr_protocol.errors import OutOfOrderError
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import block_from_message
from upr_protocol.wire.v1 import types_pb2

KEY, OTHER = b"key", b"another"
P, Q = partition_of(KEY), partition_of(OTHER)
BEGIN = [Expect("open"), write_opened(), Expect("write")]


@pytest.mark.asyncio
async def test_set_and_delete() -> None:
    script = [*BEGIN, applied(1, (P, 4, 5)), Expect("write"), applied(2, (P, 5, 6)), HalfClosed()]
    async with serve(write=[script]) as server:
        async with AsyncClient(server.target) as client:
            bucket = client.bucket("default", producer="me")
            assert await bucket.set(KEY, b"value") == WriteResult(P, 5, ID_A, VERSION)
            assert await bucket.delete(KEY, "memory") == WriteResult(P, 6, ID_A, VERSION)
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
    counts = [block.rows for block in build_blocks([k for k, _ in rows], [v for _, v in rows])]
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


def carried(heard: Heard) -> list[tuple[int, int, list[int]]]:
    """The number, the number before it, and the partitions of each write of a call."""
    return [
        (
            write.number,
            write.previous_number,
            block_from_message(write.block, numbered=False).runs["partition"].tolist(),
        )
        for write in heard.of("write")
    ]


@pytest.mark.asyncio
async def test_a_refusal_burns_the_number_and_each_write_names_the_one_before_it() -> None:
    first: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 3]
    first += [applied(1, (P, 0, 1)), write_refused(2, NoRoomError("full"))]
    first += [write_refused(3, OutOfOrderError("it follows one that was refused")), HalfClosed()]
    second: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 2]
    second += [applied(4, (P, 1, 2)), applied(5, (P, 2, 3)), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([KEY], [b"%d" % number]) for number in range(3)]
        written = await write_blocks(client.bucket(), blocks)
        assert [run[2] for run in written.runs] == [1, 2, 3]
        calls = [carried(call) for call in server.calls["write"]]
        assert calls == [[(1, 0, [P]), (2, 1, [P]), (3, 2, [P])], [(4, 0, [P]), (5, 4, [P])]]


@pytest.mark.asyncio
async def test_what_was_not_answered_keeps_its_number_and_goes_first() -> None:
    """Behind the refused one nothing was applied, so only what a lost call left open keeps its number."""
    begin: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 3]
    first = [*begin, applied(1, (P, 0, 1)), Abort(UnavailableError("gone"))]
    second = [*begin[:-1], write_refused(2, NoRoomError("full")), Abort(UnavailableError("gone"))]
    third = [
        *begin[:-1],
        applied(2, (P, 1, 2), duplicate=True),
        applied(3, (P, 2, 3)),
        HalfClosed(),
    ]
    async with serve(write=[first, second, third]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([KEY], [b"%d" % number]) for number in range(3)]
        assert len((await write_blocks(client.bucket(), blocks)).runs) == 3
        calls = [carried(call) for call in server.calls["write"]]
        resent = [(2, 0, [P]), (3, 2, [P])]
        assert calls == [[(1, 0, [P]), (2, 1, [P]), (3, 2, [P])], resent, resent]


@pytest.mark.asyncio
async def test_what_was_never_sent_waits_for_what_is_not_resolved() -> None:
    begin: list[Step] = [Expect("open"), write_opened(in_flight=1), Expect("write")]
    first = [*begin, Abort(UnavailableError("gone"))]
    second = [*begin, applied(1, (P, 0, 1)), Expect("write"), applied(2, (P, 1, 2)), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([KEY], [b"%d" % number]) for number in range(2)]
        assert len((await write_blocks(client.bucket(), blocks)).runs) == 2
        calls = [carried(call) for call in server.calls["write"]]
        assert calls == [[(1, 0, [P])], [(1, 0, [P]), (2, 1, [P])]]


@pytest.mark.asyncio
async def test_a_part_that_was_refused_is_sent_again_alone_under_a_new_number() -> None:
    refusal = (Q, PartitionNotActiveError("for now", retriable=True))
    begin: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 2]
    first = [*begin, applied(1, (P, 0, 1), refused=refusal)]
    first += [applied(2, (P, 1, 2), refused=refusal), HalfClosed()]
    second = [*begin, applied(3, (Q, 0, 1)), applied(4, (Q, 1, 2)), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([KEY, OTHER], [b"%d" % number] * 2) for number in range(2)]
        written = await write_blocks(client.bucket(), blocks)
        assert [run[:3] for run in written.runs] == [(P, 0, 1), (Q, 0, 1), (P, 1, 2), (Q, 1, 2)]
        both = sorted((P, Q))
        calls = [carried(call) for call in server.calls["write"]]
        assert calls == [[(1, 0, both), (2, 1, both)], [(3, 0, [Q]), (4, 3, [Q])]]


@pytest.mark.asyncio
async def test_a_part_in_front_of_a_write_of_unknown_outcome_keeps_its_number() -> None:
    """With a number above that write's, that write would be taken for a repetition where it was not applied."""
    refusal = (Q, PartitionNotActiveError("for now", retriable=True))
    begin: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 2]
    first = [*begin, applied(1, (P, 0, 1), refused=refusal), Abort(UnavailableError("gone"))]
    second = [*begin, applied(1, (Q, 0, 1)), applied(2, (P, 1, 2), (Q, 1, 2)), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        blocks = [build_block([KEY, OTHER], [b"%d" % number] * 2) for number in range(2)]
        assert len((await write_blocks(client.bucket(), blocks)).runs) == 4
        both = sorted((P, Q))
        calls = [carried(call) for call in server.calls["write"]]
        assert calls == [[(1, 0, both), (2, 1, both)], [(1, 0, [Q]), (2, 1, both)]]


@pytest.mark.asyncio
async def test_a_part_that_went_on_being_refused_is_told_with_what_was_applied() -> None:
    refusal = (Q, PartitionNotActiveError("for now", retriable=True))
    script = [*BEGIN, applied(1, (P, 0, 1), refused=refusal), HalfClosed()]
    async with (
        serve(write=[script]) as server,
        AsyncClient(server.target, retry_seconds=0.0) as client,
    ):
        bucket = client.bucket()
        with pytest.raises(PartlyWrittenError, match="the rest was applied: for now"):
            await write_blocks(bucket, [build_block([KEY, OTHER], [b"1", b"2"])])


@pytest.mark.asyncio
async def test_what_was_sent_behind_a_refusal_for_good_is_sent_again() -> None:
    first: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 2]
    first += [write_refused(1, InvalidArgumentError("too large"))]
    first += [write_refused(2, OutOfOrderError("it follows one that was refused")), HalfClosed()]
    second = [*BEGIN, applied(3, (P, 0, 1)), HalfClosed()]
    # That is no retry: the server is well.
    async with (
        serve(write=[first, second]) as server,
        AsyncClient(server.target, retry_seconds=0.0) as client,
    ):
        bucket = client.bucket()
        writer = bucket._writer()
        level = types_pb2.DURABILITY_DISK
        writes = [await writer.submit(build_block([KEY], [b"v"]), level) for _ in range(2)]
        with pytest.raises(InvalidArgumentError, match="too large"):
            await writes[0].result()
        assert (await writes[1].result()).T.tolist() == [[P, 0, 1, ID_A]]


@pytest.mark.asyncio
async def test_what_was_refused_behind_another_write_tells_of_that_ones_reason() -> None:
    script: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 2]
    script += [write_refused(1, NoRoomError("full"))]
    script += [write_refused(2, OutOfOrderError("write 2 names 1")), HalfClosed()]
    async with (
        serve(write=[script]) as server,
        AsyncClient(server.target, retry_seconds=0.0) as client,
    ):
        writer = client.bucket()._writer()
        level = types_pb2.DURABILITY_DISK
        writes = [await writer.submit(build_block([KEY], [b"v"]), level) for _ in range(2)]
        with pytest.raises(NoRoomError, match="full"):
            await writes[0].result()
        with pytest.raises(NoRoomError, match="the write was not applied: full"):
            await writes[1].result()


@pytest.mark.asyncio
async def test_a_value_that_the_server_would_refuse_is_not_sent() -> None:
    first: list[Step] = [Expect("open"), write_opened(max_value_bytes=9), Expect("write")]
    first += [applied(1, (P, 0, 1)), Expect("write"), Abort(UnavailableError("gone"))]
    second: list[Step] = [*BEGIN, applied(2, (P, 1, 2)), Expect("write"), applied(3, (P, 2, 3))]
    script = [first, [*second, HalfClosed()]]
    async with serve(write=script) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        await bucket.set(KEY, bytes(9))
        with pytest.raises(InvalidArgumentError, match="10 bytes; must be at most 9 on this"):
            await bucket.set(KEY, bytes(10))
        with pytest.raises(InvalidArgumentError, match="10 bytes; must be at most 9 on this"):
            await bucket.write_many([(KEY, b""), (KEY, bytes(10))])
        await bucket.set(KEY, bytes(9))
        # Another server may take it.
        assert (await bucket.set(KEY, bytes(10))).seqno == 3


@pytest.mark.asyncio
async def test_what_a_quota_refuses_is_told_at_once_to_who_waits_and_a_writer_tries_again() -> None:
    full = QuotaExceededError("over its quota")
    first: list[Step] = [*BEGIN, write_refused(1, full)]
    first += [Expect("write"), write_refused(2, full), Expect("write"), write_refused(3, full)]
    script = [[*first, HalfClosed()], [*BEGIN, applied(4, (P, 0, 1)), HalfClosed()]]
    async with serve(write=script) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        with pytest.raises(QuotaExceededError, match="over its quota"):
            await bucket.set(KEY, b"value")
        # As a large ``write_many``.
        with pytest.raises(QuotaExceededError, match="over its quota"):
            await write_blocks(bucket, [build_block([KEY], [b"value"])])
        async with bucket.writer() as writer:
            await writer.set(KEY, b"value")
        assert [len(call.of("write")) for call in server.calls["write"]] == [3, 1]


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
async def test_a_write_after_a_refusal_for_good_keeps_its_number_when_its_answer_is_lost() -> None:
    """It may have been applied: under another number it would be applied twice."""
    first = [*BEGIN, write_refused(1, InvalidArgumentError("too large")), Expect("write")]
    second = [*BEGIN, applied(2, (P, 0, 1), duplicate=True), HalfClosed()]
    script = [[*first, Abort(UnavailableError("gone"))], second]
    async with (
        serve(write=script) as server,
        AsyncClient(server.target, retry_seconds=5.0) as client,
    ):
        bucket = client.bucket()
        with pytest.raises(InvalidArgumentError, match="too large"):
            await bucket.set(KEY, b"value")
        assert (await bucket.set(KEY, b"value")).seqno == 1
        calls = [[write.number for write in heard.of("write")] for heard in server.calls["write"]]
        assert calls == [[1, 2], [2]]


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
async def test_a_write_that_was_not_answered_and_then_refused_has_an_unknown_outcome() -> None:
    """A server that was started again with a lower --max-value-bytes, say, does not look whether it applied it."""
    first = [*BEGIN, Abort(UnavailableError("gone"))]
    second = [*BEGIN, write_refused(1, InvalidArgumentError("too large")), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        with pytest.raises(UnknownOutcomeError, match="not answered: too large"):
            await bucket.set(KEY, b"value")


@pytest.mark.asyncio
async def test_a_pause_does_not_outlast_the_time_of_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upr_client.backoff.delay", lambda *_, **__: 1e6)
    refused = [*BEGIN, Abort(NoRoomError("the disk is full"))]
    async with (
        serve(write=[refused, refused]) as server,
        AsyncClient(server.target, retry_seconds=0.1) as client,
    ):
        bucket = client.bucket()
        with pytest.raises(UnknownOutcomeError, match="the disk is full"):
            await bucket.set(KEY, b"value")


@pytest.mark.asyncio
async def test_a_write_that_was_never_sent_is_unavailable() -> None:
    async with serve() as server, AsyncClient(server.target, retry_seconds=0.05) as client:
        bucket = client.bucket()
        with pytest.raises(UnavailableError, match="the write was not applied: "):
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
        with pytest.raises(InvalidArgumentError, match="key is 0 bytes"):
            await bucket.set(b"", b"value")
        with pytest.raises(InvalidArgumentError, match="must be bytes"):
            await bucket.write_many([(b"k", b"v"), ("k", b"v")])  # type: ignore[list-item]
        for rows in ([(b"k", b"v", b"w")], [b"k"], {b"key": b"v"}, [7]):
            with pytest.raises(InvalidArgumentError, match="must be a"):
                await bucket.write_many(rows)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="durability is 'tape'"):
            await bucket.delete(b"k", "tape")
        assert (await bucket.write_many([])).runs == []
        assert server.calls["write"] == []


@pytest.mark.asyncio
async def test_closing_waits_for_answers_and_then_says_so() -> None:
    async with serve(write=[[*BEGIN, applied(1, (P, 0, 1)), Hold()]]) as server:
        client = AsyncClient(server.target, request_timeout=1)
        bucket = client.bucket()
        assert (await bucket.set(KEY, b"value")).seqno == 1
        await client.close()
        await client.close()
        with pytest.raises(ClosedError):
            await bucket.set(KEY, b"value")


@pytest.mark.asyncio
async def test_a_server_that_allows_few_outstanding_writes_gets_all_of_them() -> None:
    rows = [(KEY, b"%4d" % i * 1000) for i in range(2000)]
    counts = [block.rows for block in build_blocks([k for k, _ in rows], [v for _, v in rows])]
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
