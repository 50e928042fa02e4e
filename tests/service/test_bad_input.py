"""Bad input: an error that names the value and the limit, nothing changed, everybody else goes on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.raw import RawClient, RawFollow, error_of, seqnos_of, start_at
from upr_protocol.block import Block, build_block, make_runs, sealed
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types


def two_rows() -> Block:
    return build_block([b"a", b"b"], [b"1", b"2"])


def i4(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def empty_block() -> Block:
    return Block(make_runs([], []), b"", b"", b"", b"", b"", b"", b"", 0)


def bad_blocks() -> list[tuple[str, types.Block, str]]:
    block = two_rows()
    wrong_crc = block_to_message(block)
    wrong_crc.columns_crc ^= 1
    wrong_table_crc = block_to_message(block)
    wrong_table_crc.table_crc ^= 1
    torn = block_to_message(block)
    torn.keys = torn.keys[:-1]

    def lie(**change: Any) -> types.Block:
        return block_to_message(sealed(replace(block, **change)))

    big = 20 * 2**20 + 1
    return [
        ("wrong CRC", wrong_crc, "CRC32C"),
        ("wrong table CRC", wrong_table_crc, "CRC32C"),
        ("torn column", torn, "CRC32C"),
        ("offsets that fall", lie(key_offsets=i4(0, 3, 2)), "fall"),
        ("counts that disagree", lie(runs=make_runs([1], [9])), "run table are 9"),
        ("empty key", lie(key_offsets=i4(0, 0, 2)), "key is 0 bytes; must be 1 to 4096"),
        (
            "long key",
            lie(key_offsets=i4(0, 1, 4098), keys=b"k" * 4098),
            "4097 bytes; must be 1 to 4096",
        ),
        (
            "long value",
            lie(value_offsets=i4(0, 0, big), values=b"v" * big),
            f"{big} bytes; must be at most 20971520",
        ),
        (
            "partition out of range",
            lie(runs=make_runs([1024], [2])),
            "partition is 1024; must be 0 to 1023",
        ),
        ("no rows", block_to_message(sealed(empty_block())), "no rows"),
        ("seqnos in a write", lie(seqnos=np.array([1, 2], "<u4").tobytes()), "server assigns them"),
    ]


@pytest.mark.asyncio
async def test_bad_writes_are_refused_and_the_call_goes_on(target: str) -> None:
    async with RawClient(target) as client:
        before = await client.partitions()
        writer = await client.writer("careful")
        for number, (what, block, words) in enumerate(bad_blocks(), start=1):
            await writer.send_block(block, number=number)
            result = await writer.result()
            assert result.number == number
            assert result.refused.reason in ("INVALID_ARGUMENT", "CORRUPT_BLOCK"), what
            assert words in result.refused.message, (what, result.refused.message)
            assert not result.refused.retriable
        await writer.send_block(block_to_message(two_rows()), durability=9)
        assert "durability is 9; must be" in (await writer.result()).refused.message
        assert await client.partitions() == before
        result = await writer.write([(b"a", b"1"), (b"b", b"2")])
        assert list(seqnos_of(result).values()) == [(0, 1), (0, 1)]


@pytest.mark.asyncio
async def test_a_block_may_belong_to_partitions_its_keys_do_not_hash_to(
    target: str,
) -> None:
    # The server trusts the writer's partitioning, as Couchbase's does; it checks only that the partition exists.
    async with RawClient(target) as client:
        writer = await client.writer("")
        block = sealed(replace(two_rows(), runs=make_runs([77], [2])))
        await writer.send_block(block_to_message(block))
        assert seqnos_of(await writer.result()) == {77: (0, 2)}


@pytest.mark.asyncio
async def test_a_write_that_misses_the_one_before_it_is_refused(
    target: str,
) -> None:
    async with RawClient(target) as client:
        writer = await client.writer("p")
        await writer.write([(b"a", b"1")], number=1)
        before = await client.partitions()
        result = await writer.write([(b"a", b"3")], number=3, previous=2)
        assert (result.refused.reason, result.refused.retriable) == ("WRITE_OUT_OF_ORDER", True)
        assert "names 2 as the number before it; this call's last was 1" in result.refused.message
        assert await client.partitions() == before
        assert not (await writer.write([(b"a", b"2")], number=12)).HasField("refused")
        assert not (await writer.write([(b"a", b"3")], number=13)).HasField("refused")
        told = (await writer.write([(b"a", b"3")], number=0)).refused.message
        assert "write number is 0; must be 1 to" in told


@pytest.mark.asyncio
async def test_bad_unary_requests(target: str) -> None:
    async with RawClient(target) as client:
        error = await error_of(client.hello({1024: None}))
        assert (error.reason, error.retriable) == ("INVALID_ARGUMENT", False)
        assert "partition is 1024; must be 0 to 1023" in error.message
        error = await error_of(client.hello({5: 0}))
        assert "failover id is 0" in error.message
        error = await error_of(client.hello({5: None}, bucket="nowhere"))
        assert error.reason == "BUCKET_NOT_FOUND"
        twice = [wire.HelloPartition(partition=5)] * 2
        error = await error_of(
            client.changes.Hello(wire.HelloRequest(bucket="default", partitions=twice))
        )
        assert "twice" in error.message
        other = wire.HelloRequest(bucket="default", bucket_version=1)
        error = await error_of(client.changes.Hello(other))
        assert error.reason == "BUCKET_GONE"
        assert "created again" in error.message
        error = await error_of(client.partitions(2000))
        assert "2000" in error.message
        error = await error_of(client.logs(5, 5))
        assert "twice" in error.message


@pytest.mark.asyncio
async def test_a_bad_start_refuses_that_partition_only(target: str) -> None:
    async with RawClient(target) as client:
        follow = await client.follow()
        answers = await follow.start(
            start_at(1024), start_at(5, 2**48), start_at(6, 0, 0), start_at(7), start_at(8, 300)
        )
        assert [a.WhichOneof("answer") for a in answers] == [
            "refused",
            "refused",
            "refused",
            "started",
            "rollback",
        ]
        words = [a.refused.message for a in answers[:3]]
        assert "partition is 1024" in words[0]
        assert f"seqno is {2**48}; must be 0 to {2**48 - 1}" in words[1]
        assert "failover id is 0" in words[2]
        assert all(not a.refused.retriable for a in answers[:3])
        # A client that lost its id but kept data claims a history nobody verified.
        assert answers[4].rollback.rollback_seqno == 0
        writer = await client.writer("")
        await writer.send_block(
            block_to_message(sealed(replace(two_rows(), runs=make_runs([7], [2]))))
        )
        await writer.result()
        frame = await follow.until("frame")
        assert len(frame.frame.blocks) == 1


async def end_of(follow: RawFollow) -> wire.Ended:
    while True:
        message = await follow.read()
        if message.HasField("ended") and not message.ended.streams:
            return message.ended


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"ack": wire.Ack(positions=b"x")}, "INVALID_ARGUMENT"),
        ({"open": wire.Open(bucket="default")}, "INVALID_ARGUMENT"),
        ({}, "INVALID_ARGUMENT"),
    ],
)
async def test_what_makes_no_sense_ends_the_call_with_its_reason(
    target: str, message: dict[str, Any], reason: str
) -> None:
    async with RawClient(target) as client:
        bad, good = await client.follow(), await client.follow()
        await bad.start(start_at(3))
        await good.start(start_at(3))
        await bad.send(**message)
        streams = await bad.until("ended")
        assert [s.partition for s in streams.ended.streams] == [3]
        assert (await end_of(bad)).problem.reason == reason
        await bad.close()
        writer = await client.writer("")
        await writer.send_block(
            block_to_message(sealed(replace(two_rows(), runs=make_runs([3], [2]))))
        )
        await writer.result()
        await good.until("frame")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket": "nowhere"}, "no bucket 'nowhere'"),
        ({"bucket_version": 5}, "created again"),
        ({"heartbeat_seconds": 0.001}, "heartbeat interval is 0.001"),
        ({"stability": 9}, "stability 9"),
        ({"consumer": "x" * 201}, "201 bytes"),
        ({"consumer": "a\nb"}, "control characters"),
    ],
)
async def test_a_bad_open_is_refused(target: str, options: dict[str, Any], words: str) -> None:
    async with RawClient(target) as client:
        error = await error_of(client.follow(**options))
        assert words in error.message


@pytest.mark.asyncio
async def test_a_write_call_must_begin_with_open(target: str) -> None:
    async with RawClient(target) as client:
        call = client.kv.Write()
        await call.write(kv.WriteRequest(write=kv.WriteBlock()))
        error = await error_of(call.read())
        assert "first message of a Write call is Open" in error.message
