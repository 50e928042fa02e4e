"""A server that says what a test wrote down, and notes what it hears.

Scripts are data and not functions, so that one text serves the tests of both flavours. The n-th call of a method
follows the n-th script; a call for which there is none is refused as unavailable.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from upr_client.testing import memory
from upr_protocol.block import Block, make_runs
from upr_protocol.errors import BucketNotFoundError, DataDamagedError, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.position import Position
from upr_protocol.wire.codec import encode_block, encode_frame, problem_of
from upr_protocol.wire.grpc import code_of, metadata_of
from upr_protocol.wire.v1 import admin_service_pb2, types_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1.admin_service_pb2_grpc import (
    AdminServiceServicer,
    add_AdminServiceServicer_to_server,
)
from upr_protocol.wire.v1.change_stream_service_pb2_grpc import (
    ChangeStreamServiceServicer,
    add_ChangeStreamServiceServicer_to_server,
)
from upr_protocol.wire.v1.key_value_service_pb2_grpc import (
    KeyValueServiceServicer,
    add_KeyValueServiceServicer_to_server,
)

VERSION = 0xB0C4E7
ID_A, ID_B = 0xA, 0xB


class Step:
    """One step of a script."""


@dataclass(frozen=True)
class Expect(Step):
    """Wait for the next request of this kind; requests of other kinds before it are noted and passed over."""

    kind: str


@dataclass(frozen=True)
class Send(Step):
    """Say this."""

    message: Any


@dataclass(frozen=True)
class HalfClosed(Step):
    """Wait for the client's half-close, noting what comes before it."""


@dataclass(frozen=True)
class Hold(Step):
    """Say nothing until the client ends the call."""


@dataclass(frozen=True)
class Abort(Step):
    """End the call with an error."""

    error: UprError


@dataclass
class Heard:
    """What one call brought."""

    requests: list[Any] = field(default_factory=list)
    half_closed: bool = False

    def of(self, kind: str) -> list[Any]:
        """The requests of one kind."""
        return [getattr(r, kind) for r in self.requests if r.WhichOneof("message") == kind]


class _Unscripted(ChangeStreamServiceServicer, KeyValueServiceServicer, AdminServiceServicer):
    """Refuses the methods for which there are no scripts."""

    async def _refuse(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")

    CreateCut = RenewCut = ReleaseCut = ListCuts = _refuse
    LoadPositions = SavePositions = Get = ResetConsumer = _refuse
    GetStatus = GetStorage = Purge = ListConsumers = ForgetConsumer = _refuse
    ListBuckets = CreateBucket = DropBucket = SetBucketQuota = _refuse


class ScriptedServer(_Unscripted):
    """Follows scripts.

    Attributes:
        state: that GetPartitions tells; None where that answers nothing.
    """

    def __init__(self, follow: Sequence[Sequence[Step]], write: Sequence[Sequence[Step]]) -> None:
        self._scripts = {"follow": list(follow), "write": list(write)}
        self.calls: dict[str, list[Heard]] = defaultdict(list)
        self.hellos: list[stream_pb2.HelloRequest] = []
        self.target = ""
        self.state: types_pb2.PartitionState.ValueType | None = types_pb2.PARTITION_STATE_DEAD
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        add_ChangeStreamServiceServicer_to_server(self, self._server)
        add_KeyValueServiceServicer_to_server(self, self._server)
        add_AdminServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.target = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def _play(
        self, name: str, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        number = len(self.calls[name])
        heard = Heard()
        self.calls[name].append(heard)
        scripts = self._scripts[name]
        if number >= len(scripts):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no script for this call")
        for step in scripts[number]:
            match step:
                case Send(message):
                    yield message
                case Abort(error):
                    await context.abort(code_of(error), error.message, metadata_of(error))
                case Hold():
                    await asyncio.Event().wait()
                case _:
                    await self._hear(step, requests, heard)

    @staticmethod
    async def _hear(step: Step, requests: AsyncIterator[Any], heard: Heard) -> None:
        async for request in requests:
            heard.requests.append(request)
            if isinstance(step, Expect) and request.WhichOneof("message") == step.kind:
                return
        heard.half_closed = True
        assert isinstance(step, HalfClosed), f"half-close instead of {step}"

    async def Follow(self, request_iterator: Any, context: Any) -> Any:
        async for message in self._play("follow", request_iterator, context):
            yield message

    async def Write(self, request_iterator: Any, context: Any) -> Any:
        async for message in self._play("write", request_iterator, context):
            yield message

    async def Hello(self, request: Any, context: Any) -> Any:
        self.hellos.append(request)
        answers = [
            stream_pb2.HelloAnswer(
                partition=item.partition,
                rollback_seqno=3 if item.HasField("failover_id") else None,
                failover_id=ID_B,
                failover_log=log_messages((ID_B, 3)) if request.with_log else (),
            )
            for item in request.partitions
        ]
        return stream_pb2.HelloResponse(bucket_version=VERSION, answers=answers)

    async def GetFailoverLog(self, request: Any, context: Any) -> Any:
        logs = [
            stream_pb2.PartitionFailoverLog(partition=p, records=log_messages((ID_A, 0), (ID_B, p)))
            for p in request.partitions or range(1024)
        ]
        return stream_pb2.GetFailoverLogResponse(bucket_version=VERSION, logs=logs)

    async def GetPartitions(self, request: Any, context: Any) -> Any:
        if request.bucket != "default":
            error = BucketNotFoundError(f"there is no bucket {request.bucket}", hint="make it")
            await context.abort(code_of(error), error.message, metadata_of(error))
        if self.state is None:
            return await asyncio.Event().wait()
        info = admin_service_pb2.PartitionInfo(
            partition=7,
            state=self.state,
            high_seqno=9,
            durable_seqno=8,
            failover_id=ID_A,
            problem=problem_of(DataDamagedError("a block fails its CRC")),
        )
        return admin_service_pb2.GetPartitionsResponse(bucket_version=VERSION, partitions=[info])


# What a server may say.


def opened(
    *, version: int = VERSION, heartbeat_seconds: float = 5.0, credit_bytes: int = 0
) -> Send:
    return Send(
        stream_pb2.FollowResponse(
            opened=stream_pb2.Opened(
                server_id=1,
                bucket_version=version,
                heartbeat_seconds=heartbeat_seconds,
                credit_bytes=credit_bytes,
            )
        )
    )


def log_messages(*records: tuple[int, int]) -> list[types_pb2.FailoverRecord]:
    return [types_pb2.FailoverRecord(failover_id=i, seqno=s) for i, s in records]


def started(
    partition: int,
    token: int,
    failover_id: int = ID_A,
    *,
    high: int = 0,
    until: int | None = None,
    log: Sequence[tuple[int, int]] = (),
) -> stream_pb2.StartAnswer:
    return stream_pb2.StartAnswer(
        partition=partition,
        started=stream_pb2.Started(
            token=token,
            failover_id=failover_id,
            high_seqno=high,
            until_seqno=until,
            failover_log=log_messages(*log),
        ),
    )


def rollback(
    partition: int, seqno: int, failover_id: int, *log: tuple[int, int], rule: str = "next_record"
) -> stream_pb2.StartAnswer:
    return stream_pb2.StartAnswer(
        partition=partition,
        rollback=stream_pb2.Rollback(
            rollback_seqno=seqno,
            failover_id=failover_id,
            rule=rule,
            words=f"roll back to {seqno}",
            failover_log=log_messages(*log),
        ),
    )


def refused(partition: int, error: UprError) -> stream_pb2.StartAnswer:
    return stream_pb2.StartAnswer(partition=partition, refused=problem_of(error))


def answers(*items: stream_pb2.StartAnswer) -> Send:
    return Send(stream_pb2.FollowResponse(start_answers=stream_pb2.StartAnswers(answers=items)))


def key_of(partition: int, seqno: int) -> bytes:
    return b"%d/%d" % (partition, seqno)


def run_block(
    partition: int,
    start: int,
    end: int,
    horizon: int | None = None,
    seqnos: Sequence[int] | None = None,
) -> Block:
    """A block of one run; each row's key and value follow from its seqno, and a multiple of 5 is a delete."""
    told = range(start + 1, end + 1) if seqnos is None else seqnos
    rows = [(s, key_of(partition, s), None if s % 5 == 0 else b"v%d" % s) for s in told]
    return memory.run_block(partition, rows, start, end, end if horizon is None else horizon, 1)


def frame(*runs: tuple[int, Block]) -> Send:
    """A frame of (token, block of one run) pairs."""
    tokens = np.array([token for token, _ in runs], "<u4").tobytes()
    blocks = [encode_block(block) for _, block in runs]
    encoded = encode_frame(blocks, tokens, sum(map(len, blocks)))
    return Send(stream_pb2.FollowResponse.FromString(encoded))


def ended(reason: str, *streams: tuple[int, int], message: str = "") -> Send:
    return Send(
        stream_pb2.FollowResponse(
            ended=stream_pb2.Ended(
                streams=[stream_pb2.EndedStream(partition=p, token=t) for p, t in streams],
                problem=types_pb2.Problem(reason=reason, message=message or reason.lower()),
            )
        )
    )


def heartbeat(*highs: tuple[int, int]) -> Send:
    table = np.array(list(highs), [("partition", "<u4"), ("seqno", "<u8")])
    return Send(
        stream_pb2.FollowResponse(heartbeat=stream_pb2.Heartbeat(high_seqnos=table.tobytes()))
    )


def write_opened(
    last_number: int = 0, in_flight: int = 64, version: int = VERSION, max_value_bytes: int = 0
) -> Send:
    return Send(
        kv_pb2.WriteResponse(
            opened=kv_pb2.WriteOpened(
                bucket_version=version,
                last_number=last_number,
                writes_in_flight=in_flight,
                max_value_bytes=max_value_bytes,
            )
        )
    )


def applied(
    number: int,
    *runs: tuple[int, int, int],
    duplicate: bool = False,
    refused: tuple[int, UprError] | None = None,
) -> Send:
    """The answer to a write with (partition, start_seqno, end_seqno) runs, and a partition that refused its part."""
    table = make_runs(
        [r[0] for r in runs],
        [r[2] - r[1] for r in runs],
        [r[1] for r in runs],
        [r[2] for r in runs],
    )
    return Send(
        kv_pb2.WriteResponse(
            result=kv_pb2.WriteResult(
                number=number,
                runs=table.tobytes(),
                failover_ids=[ID_A] * len(runs),
                duplicate=duplicate,
                refused_partitions=[]
                if refused is None
                else [
                    types_pb2.RefusedPartition(partition=refused[0], problem=problem_of(refused[1]))
                ],
            )
        )
    )


def write_refused(number: int, error: UprError) -> Send:
    return Send(
        kv_pb2.WriteResponse(result=kv_pb2.WriteResult(number=number, refused=problem_of(error)))
    )


BEGIN = [Expect("open"), opened(), Expect("start")]
"""Steps in front of the answers to a Start."""
END = [ended("FINISHED", (1, 7)), HalfClosed()]


def at(seqno: int, *markers: int, failover_id: int = ID_A, horizon: int | None = None) -> Position:
    """A position under one failover id, with a log of that alone."""
    return Position(
        VERSION,
        failover_id,
        failover_id,
        seqno,
        seqno if horizon is None else horizon,
        markers,
        FailoverLog.from_pairs([(failover_id, 0)]),
        bucket="default",
    )
