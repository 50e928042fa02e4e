"""A client that speaks the wire by hand, so that tests can say what the SDK never would."""

import asyncio
import zlib
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Self

import grpc
import pytest

from tests.harness import WAIT_SECONDS
from upr_protocol.block import (
    Block,
    FurtherColumn,
    block_keys,
    block_partitions,
    block_seqnos,
    block_values,
    build_block,
    sealed,
)
from upr_protocol.errors import UprError
from upr_protocol.wire.codec import block_from_message, block_to_message, decode_runs
from upr_protocol.wire.grpc import CLIENT_OPTIONS, error_from_call
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import admin_service_pb2_grpc as admin_grpc
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes
from upr_protocol.wire.v1 import change_stream_service_pb2_grpc as changes_grpc
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import key_value_service_pb2_grpc as kv_grpc
from upr_protocol.wire.v1 import types_pb2 as types

OWN_CONNECTION: list[tuple[str, int]] = [("grpc.use_local_subchannel_pool", 1)]
"""Channels with the same target and options share a connection otherwise, and its pause after a failure."""
PATIENT = {"upr_protocol.flow.SILENT_INTERVALS": 300}
"""Constants of a server whose heartbeats come often, and that a busy machine may answer late."""


async def _read(call: Any) -> Any:
    """Return the next message of a call, or ``grpc.aio.EOF``."""
    # Not ``asyncio.wait_for``: in Python 3.11 it swallows the cancellation of a task whose message is just there.
    async with asyncio.timeout(WAIT_SECONDS):
        return await call.read()


class RawClient:
    """Stubs on one channel."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            target, options=[*CLIENT_OPTIONS, *OWN_CONNECTION]
        )
        self.changes: Any = changes_grpc.ChangeStreamServiceStub(self._channel)
        self.kv: Any = kv_grpc.KeyValueServiceStub(self._channel)
        self.admin: Any = admin_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def hello(
        self, partitions: dict[int, int | None], *, with_log: bool = False, bucket: str = "default"
    ) -> changes.HelloResponse:
        asked = [changes.HelloPartition(partition=p, failover_id=i) for p, i in partitions.items()]
        request = changes.HelloRequest(bucket=bucket, partitions=asked, with_log=with_log)
        response: changes.HelloResponse = await self.changes.Hello(request, timeout=WAIT_SECONDS)
        return response

    async def partitions(self, *partitions: int) -> list[admin.PartitionInfo]:
        request = admin.GetPartitionsRequest(bucket="default", partitions=partitions)
        response = await self.admin.GetPartitions(request, timeout=WAIT_SECONDS)
        return list(response.partitions)

    async def logs(self, *partitions: int) -> list[list[tuple[int, int]]]:
        request = changes.GetFailoverLogRequest(bucket="default", partitions=partitions)
        response = await self.changes.GetFailoverLog(request, timeout=WAIT_SECONDS)
        return [[(r.failover_id, r.seqno) for r in log.records] for log in response.logs]

    async def get(self, *keys: bytes, bucket: str = "default") -> list[kv.GetAnswer]:
        request = kv.GetRequest(bucket=bucket, keys=keys)
        response = await self.kv.Get(request, timeout=WAIT_SECONDS)
        return list(response.answers)

    async def writer(self, producer: str = "", **options: Any) -> "RawWriter":
        call = self.kv.Write()
        bucket = options.pop("bucket", "default")
        opening = kv.WriteOpen(bucket=bucket, producer=producer, **options)
        # Of a call that was refused meanwhile reading says why.
        with suppress(grpc.aio.AioRpcError):
            await call.write(kv.WriteRequest(open=opening))
        writer = RawWriter(call)
        writer.opened = (await writer.read()).opened
        return writer

    async def follow(self, **options: Any) -> "RawFollow":
        call = self.changes.Follow()
        opening = changes.Open(bucket=options.pop("bucket", "default"), **options)
        # Of a call that was refused meanwhile reading says why.
        with suppress(grpc.aio.AioRpcError):
            await call.write(changes.FollowRequest(open=opening))
        follow = RawFollow(call)
        follow.opened = (await follow.read()).opened
        return follow


class RawWriter:
    """An open Write call."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.opened = kv.WriteOpened()
        self._number = self.previous = self._taken = 0

    async def read(self) -> kv.WriteResponse:
        message = await _read(self.call)
        if message is grpc.aio.EOF:
            raise EOFError(f"the Write call ended: {await self.call.details()}")
        response: kv.WriteResponse = message
        return response

    async def send(self, write: kv.WriteBlock) -> None:
        await self.call.write(kv.WriteRequest(write=write))

    async def send_block(
        self,
        message: types.Block,
        *,
        number: int | None = None,
        durability: int = types.DURABILITY_DISK,
        previous: int | None = None,
    ) -> None:
        self._number = self._number + 1 if number is None else number
        write = kv.WriteBlock(
            number=self._number,
            durability=durability,  # type: ignore[arg-type]
            block=message,
            previous_number=self.previous if previous is None else previous,
        )
        self.previous = self._number
        await self.send(write)

    async def result(self) -> kv.WriteResult:
        result = (await self.read()).result
        if result.HasField("refused") and not result.refused_partitions:
            self.previous = self._taken
        else:
            self._taken = result.number
        return result

    async def write(
        self, rows: Sequence[tuple[bytes, bytes | None]], **options: Any
    ) -> kv.WriteResult:
        """Send rows as one block and wait for the answer."""
        block = build_block([k for k, _ in rows], [v for _, v in rows])
        return await self.write_block(block, **options)

    async def write_block(self, block: Block, **options: Any) -> kv.WriteResult:
        """Send a block and wait for the answer."""
        await self.send_block(block_to_message(block), **options)
        return await self.result()

    async def close(self) -> None:
        await self.call.done_writing()
        while await _read(self.call) is not grpc.aio.EOF:
            pass


def seqnos_of(result: kv.WriteResult) -> dict[int, tuple[int, int]]:
    """Return partition -> (start_seqno, end_seqno) of an answered write."""
    assert not result.HasField("refused"), result.refused
    runs = decode_runs(result.runs)
    return {int(r["partition"]): (int(r["start_seqno"]), int(r["end_seqno"])) for r in runs}


class RawFollow:
    """An open Follow call that gives credit back for each frame."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.opened = changes.Opened()
        self.give_credit = True

    async def read(self) -> changes.FollowResponse:
        message = await _read(self.call)
        if message is grpc.aio.EOF:
            raise EOFError(f"the Follow call ended: {await self.call.details()}")
        if message.HasField("frame") and self.give_credit:
            await self._answer(credit=changes.Credit(bytes=message.frame.credit_bytes))
        if message.HasField("heartbeat"):
            await self._answer(pong=changes.Pong())
        response: changes.FollowResponse = message
        return response

    async def send(self, **message: Any) -> None:
        await self.call.write(changes.FollowRequest(**message))

    async def _answer(self, **message: Any) -> None:
        # The server may have ended the call meanwhile: what it said before is read first.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.send(**message)

    async def start(self, *partitions: changes.StartPartition) -> list[changes.StartAnswer]:
        await self.send(start=changes.Start(partitions=partitions))
        answers = await self.until("start_answers")
        return list(answers.start_answers.answers)

    async def until(self, kind: str) -> changes.FollowResponse:
        """Read on, passing over heartbeats only, to a message that must be of this kind."""
        while True:
            message = await self.read()
            found = message.WhichOneof("message")
            if found == kind:
                return message
            assert found == "heartbeat", f"expected {kind}, got {message}"

    async def blocks_until_ended(self, streams: int) -> tuple[list[Block], list[changes.Ended]]:
        """Read frames until as many streams have ended."""
        blocks: list[Block] = []
        ended: list[changes.Ended] = []
        while streams > 0:
            message = await self.read()
            if message.HasField("frame"):
                blocks += map(block_from_message, message.frame.blocks)
            elif message.HasField("ended"):
                ended.append(message.ended)
                streams -= len(message.ended.streams)
        return blocks, ended

    async def plain_until_ended(
        self, streams: int
    ) -> tuple[list[changes.PlainRun], list[changes.Ended]]:
        """Read frames of plain rows until as many streams have ended."""
        runs: list[changes.PlainRun] = []
        ended: list[changes.Ended] = []
        while streams > 0:
            message = await self.read()
            if message.HasField("frame"):
                assert not message.frame.blocks
                assert not message.frame.tokens
                runs += message.frame.plain_runs
            elif message.HasField("ended"):
                ended.append(message.ended)
                streams -= len(message.ended.streams)
        return runs, ended

    async def close(self) -> None:
        await self.call.done_writing()
        while await _read(self.call) is not grpc.aio.EOF:
            pass


def start_at(
    partition: int, seqno: int = 0, failover_id: int | None = None, **options: Any
) -> changes.StartPartition:
    """A StartPartition; without an id for a new client."""
    return changes.StartPartition(
        partition=partition, seqno=seqno, failover_id=failover_id, **options
    )


async def error_of(call: Awaitable[Any]) -> UprError:
    """Return the error with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_call(caught.value)


def is_compressed(block: bytes) -> bool:
    """Return whether an encoded block is compressed."""
    return bool(types.Block.FromString(block).zstd)


def all_rows(blocks: Iterable[Block]) -> list[tuple[int, int, bytes, bytes | None]]:
    """Return (partition, seqno, key, value) of every row."""
    rows: list[tuple[int, int, bytes, bytes | None]] = []
    for block in blocks:
        if block.rows:
            rows += zip(
                block_partitions(block),
                block_seqnos(block),
                block_keys(block),
                block_values(block),
                strict=True,
            )
    return rows


def cells_for(key: bytes, value: bytes | None) -> dict[int, bytes]:
    """Return the cells of further columns that tests give a row: half of the rows have none, and each its own."""
    told = key + b"=" + (value or b"")
    kind = zlib.crc32(told) % 4
    return {id_: b"%d" % id_ + told for id_ in (2, 9)[: kind - 1]} if kind > 1 else {}


def with_cells(block: Block) -> Block:
    """Return a block with the cells that its rows have in tests."""
    rows = list(map(cells_for, block_keys(block), block_values(block)))
    further = []
    for id_ in sorted({id_ for cells in rows for id_ in cells}):
        column = [cells.get(id_, b"") for cells in rows]
        ends = [0, *accumulate(map(len, column))]
        offsets = b"".join(end.to_bytes(4, "little") for end in ends)
        further.append(FurtherColumn(id_, offsets, b"".join(column)))
    return sealed(replace(block, further=tuple(further)))


def all_cells(block: Block) -> list[dict[int, bytes]]:
    """Return the cells of each row that are not empty."""
    rows: list[dict[int, bytes]] = [{} for _ in range(block.rows)]
    for column in block.further:
        ends = [
            int.from_bytes(column.offsets[at : at + 4], "little")
            for at in range(0, len(column.offsets), 4)
        ]
        for row, (first, last) in zip(rows, pairwise(ends), strict=True):
            if first < last:
                row[column.id] = column.data[first:last]
    return rows


def check_cells(block: Block) -> int:
    """Check that each row of a block has the cells that it has in tests; return how many that are."""
    rows = all_cells(block)
    assert (
        rows == list(map(cells_for, block_keys(block), block_values(block)))
        if block.rows
        else not rows
    )
    return sum(map(len, rows))
