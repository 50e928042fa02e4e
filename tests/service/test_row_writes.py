"""Writes of plain rows over real gRPC: what a client sends that makes no blocks."""

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import StartServer
from tests.raw import RawClient, RawWriter, all_rows, seqnos_of, start_at
from tests.service.test_received import sampled
from upr.service.key_value import OUTLINE_FIELDS, outline_of
from upr_protocol.block import build_block
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import WRITE_ROWS_BYTES_MAX, WRITE_ROWS_MAX
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.grpc import CLIENT_OPTIONS
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types

MIB = 2**20
P = 77


def row(key: bytes, value: bytes | None = b"", **options: int) -> kv.WriteRow:
    """A row; None for a delete."""
    return kv.WriteRow(key=key, value=value or b"", deleted=value is None, **options)


async def write(
    writer: RawWriter, *rows: kv.WriteRow, number: int = 0, previous: int = 0
) -> kv.WriteResult:
    await writer.send(kv.WriteBlock(number=number, previous_number=previous, rows=rows))
    return await writer.result()


@pytest.mark.asyncio
async def test_rows_become_what_their_block_would_be(target: str) -> None:
    keys = [b"a", b"b", b"a", b"\0\xff", b"c"]
    values = [b"1", None, b"2", b"", b"v" * 300]
    results = []
    shown = []
    async with RawClient(target) as client:
        await client.admin.CreateBucket(admin.CreateBucketRequest(name="plain"))
        for bucket in ("default", "plain"):
            writer = await client.writer("", bucket=bucket)
            if bucket == "plain":
                result = await write(writer, *map(row, keys, values))
            else:
                await writer.send_block(block_to_message(build_block(keys, values)), number=0)
                result = await writer.result()
            results.append(seqnos_of(result))
            follow = await client.follow(bucket=bucket)
            await follow.start(*(start_at(p, until_now=True) for p in results[-1]))
            blocks, _ = await follow.blocks_until_ended(len(results[-1]))
            shown.append(sorted(all_rows(blocks)))
            answers = await client.get(b"a", b"c", bucket=bucket)
            assert [answer.value for answer in answers] == [b"2", b"v" * 300]
    assert results[0] == results[1]
    assert shown[0] == shown[1]
    assert len(shown[0]) == len(keys)


@pytest.mark.asyncio
async def test_a_row_may_name_its_partition(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("")
        own = partition_of(b"b")
        rows = [row(b"a", b"1", partition=P), row(b"b", b"2"), row(b"c", None, partition=P)]
        rows.append(row(b"d", partition=0))
        result = await write(writer, *rows)
        assert seqnos_of(result) == {0: (0, 1), P: (0, 2), own: (0, 1)}
        follow = await client.follow(plain_rows=True)
        await follow.start(start_at(P, until_now=True))
        runs, _ = await follow.plain_until_ended(1)
        assert [(r.seqno, r.key, r.value, r.deleted) for run in runs for r in run.rows] == [
            (1, b"a", b"1", False),
            (2, b"c", b"", True),
        ]


@pytest.mark.asyncio
async def test_numbers_count_whether_rows_or_a_block_carry_them(
    target: str,
) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("p")
        first = await write(writer, row(b"a", b"1"), number=5)
        second = await write(writer, row(b"a", b"2"), number=6, previous=5)
        late = await write(writer, row(b"a", b"3"), number=9, previous=8)
        assert late.refused.reason == "WRITE_OUT_OF_ORDER"
        again = await client.writer("p")
        for rows, number, previous, told in (
            (True, 5, 0, seqnos_of(first)),
            (False, 6, 5, seqnos_of(second)),
            (True, 7, 6, {partition_of(b"a"): (2, 3)}),
        ):
            if rows:
                result = await write(again, row(b"a", b"1"), number=number, previous=previous)
            else:
                block = block_to_message(build_block([b"a"], [b"2"]))
                await again.send_block(block, number=number, previous=previous)
                result = await again.result()
            assert result.duplicate == (number < 7)
            assert seqnos_of(result) == told


def bad_rows() -> list[tuple[list[kv.WriteRow], str]]:
    return [
        ([], "neither a block nor rows"),
        ([row(b"")], "key is 0 bytes; must be 1 to 4096"),
        ([row(b"k" * 4097)], "key is 4097 bytes"),
        ([row(b"k", b"v" * (20 * MIB + 1))], "must be at most 20971520"),
        ([row(b"k", partition=1024)], "partition is 1024; must be 0 to 1023"),
        ([row(b"k"), kv.WriteRow(key=b"k", value=b"v", deleted=True)], "row 1 is a delete"),
        ([row(b"k")] * (WRITE_ROWS_MAX + 1), f"10001 rows; must be at most {WRITE_ROWS_MAX}"),
        ([row(b"k", b"v" * (MIB // 2))] * 2, f"must be at most {WRITE_ROWS_BYTES_MAX}"),
    ]


@pytest.mark.asyncio
async def test_bad_rows_are_refused_and_the_call_goes_on(target: str) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("careful")
        for number, (rows, words) in enumerate(bad_rows(), start=1):
            result = await write(writer, *rows, number=number)
            assert result.number == number
            assert result.refused.reason == "INVALID_ARGUMENT"
            assert words in result.refused.message
            assert not result.refused.retriable
        both = kv.WriteBlock(number=50, rows=[row(b"k")])
        both.block.CopyFrom(block_to_message(build_block([b"k"], [b"v"])))
        await writer.send(both)
        assert "a block and rows" in (await writer.result()).refused.message
        # The largest of each that are taken.
        value = b"v" * (20 * MIB)
        assert not (await write(writer, row(b"k" * 4096, value), number=60)).HasField("refused")
        many = [row(b"%d" % i, b"v" * 90) for i in range(WRITE_ROWS_MAX)]
        result = await write(writer, *many, number=61, previous=60)
        assert sum(end - start for start, end in seqnos_of(result).values()) == WRITE_ROWS_MAX


def test_a_number_of_ten_bytes_is_as_large_as_parsing_says() -> None:
    """A number above 64 bits cannot be answered: the call would end with an error of the server."""
    raw = kv.WriteRequest(write=kv.WriteBlock(number=2**64 - 1)).SerializeToString()
    assert raw.endswith(b"\xff\x01")
    raw = raw[:-1] + b"\x7f"
    number = kv.WriteRequest.FromString(raw).write.number
    assert outline_of(raw).number == number == 2**64 - 1


@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.binary(max_size=300), max_size=4),
    st.booleans(),
    st.integers(0, 2**64 - 1),
)
def test_an_outline_says_what_parsing_would(
    number: int, keys: list[bytes], with_block: bool, previous: int
) -> None:
    write = kv.WriteBlock(
        number=number,
        previous_number=previous,
        durability=types.DURABILITY_DISK,
        rows=map(row, keys),
    )
    if with_block:
        write.block.CopyFrom(block_to_message(build_block([b"k"], [b"v" * 200])))
    raw = kv.WriteRequest(write=write).SerializeToString()
    assert outline_of(raw) == (number, len(keys) > 1)
    # A message may come in parts, which count together.
    more = kv.WriteRequest(write=kv.WriteBlock(rows=[row(b"k")])).SerializeToString()
    assert outline_of(raw + more).has_many_rows == bool(keys)
    for cut in range(1, len(raw) if not with_block and not keys else 1):
        with pytest.raises(InvalidArgumentError):
            outline_of(raw[:cut])


def test_no_more_than_some_fields_are_looked_at() -> None:
    many = kv.WriteRequest(write=kv.WriteBlock(number=3, previous_number=1)).SerializeToString()
    assert outline_of(many * (OUTLINE_FIELDS // 3)) == (3, False)
    assert outline_of(many * OUTLINE_FIELDS).has_many_rows


@pytest.mark.asyncio
async def test_what_is_large_and_has_rows_is_not_parsed(server_process: StartServer) -> None:
    server = server_process()
    opening = kv.WriteRequest(open=kv.WriteOpen(bucket="default"))
    # Number 7, and empty rows: as objects they would take several hundred MiB.
    body = b"\x08\x07" + b"\x2a\x00" * (11 * MIB)
    async with grpc.aio.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel:
        call: Any = channel.stream_stream("/upr.v1.KeyValueService/Write")()
        await call.write(opening.SerializeToString())
        await call.read()
        with sampled(server.pid) as samples:
            await call.write(b"\x12" + encode_varint(len(body)) + body)
            result = kv.WriteResponse.FromString(await call.read()).result
            assert (result.number, result.refused.reason) == (7, "INVALID_ARGUMENT")
            assert f"must be at most {WRITE_ROWS_BYTES_MAX}" in result.refused.message
        assert max(samples) - samples[0] < 128 * MIB
        # What is no message at all ends the call.
        await call.write(b"\x12" + b"\xff" * (2 * MIB))
        with pytest.raises(grpc.aio.AioRpcError, match="no such message") as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def encode_varint(value: int) -> bytes:
    head = []
    while value > 0x7F:
        head.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*head, value])
