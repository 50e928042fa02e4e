"""A server of keys and values in memory, with faults that a test orders. For the tests of both flavours."""

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tests.client.scripted import ID_A, VERSION
from upr_protocol.block import block_keys, block_partitions, block_values, make_runs
from upr_protocol.errors import InvalidArgumentError, OutOfOrderError, UprError
from upr_protocol.wire.codec import block_from_message, problem_of
from upr_protocol.wire.grpc import SERVER_OPTIONS, code_of, metadata_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2
from upr_protocol.wire.v1.key_value_service_pb2_grpc import (
    KeyValueServiceServicer,
    add_KeyValueServiceServicer_to_server,
)


@dataclass
class Faults:
    """What goes wrong, and when.

    Attributes:
        lost: the n-th Write call ends so many writes after its first, the last one applied and not answered.
        refused: write numbers that are refused, once each.
        refused_partitions: partitions that refuse their part of every write, with this error.
        large: a write with a value of so many bytes is refused as a whole, for good.
        unanswered: from this write number on nothing is applied or answered.
        silent: Get answers nothing.
        there: GetPartitions answers so often.
        replica: so often it says that no partition is active.
        gets: errors of the next Gets, one each.
        stopping: every call is refused with this error.
    """

    lost: list[int] = field(default_factory=list)
    refused: dict[int, UprError] = field(default_factory=dict)
    refused_partitions: dict[int, UprError] = field(default_factory=dict)
    large: int = 2**62
    unanswered: int = 2**62
    silent: bool = False
    there: int = 2**62
    replica: int = 0
    gets: list[UprError] = field(default_factory=list)
    stopping: UprError | None = None


class KeyValueServer(KeyValueServiceServicer):
    """Applies what is written, and answers Get and GetPartitions.

    Args:
        faults: none unless given.
        looked: gets the server each time that it is asked for its partitions; several may share one.
        answers_max: so many answers one GetResponse carries.
        tls: private key and certificate chain, in PEM.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        looked: list["KeyValueServer"] | None = None,
        *,
        answers_max: int = 1000,
        tls: tuple[bytes, bytes] | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.looked = [] if looked is None else looked
        self.values: dict[bytes, bytes] = {}
        self.applied: list[tuple[bytes, bytes | None]] = []
        self.writes: list[kv_pb2.WriteBlock] = []
        self.gets: list[kv_pb2.GetRequest] = []
        self.tokens: list[object] = []
        self.calls = 0
        self.asked = threading.Event()
        self.target = ""
        self._answers_max = answers_max
        self._tls = tls
        self._highs = Counter[int]()
        self._done: dict[tuple[str, int], kv_pb2.WriteResult] = {}
        self._server: grpc.aio.Server | None = None

    @property
    def looks(self) -> int:
        """How often it was asked for its partitions."""
        return self.looked.count(self)

    async def start(self, target: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_KeyValueServiceServicer_to_server(self, self._server)
        look = grpc.unary_unary_rpc_method_handler(
            self.GetPartitions,
            request_deserializer=admin_pb2.GetPartitionsRequest.FromString,
            response_serializer=admin_pb2.GetPartitionsResponse.SerializeToString,
        )
        of_admin = {"GetPartitions": look}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("upr.v1.AdminService", of_admin)]
        )
        if self._tls is None:
            port = self._server.add_insecure_port(target)
        else:
            credentials = grpc.ssl_server_credentials([self._tls])
            port = self._server.add_secure_port(target, credentials)
        self.target = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def _begin(self, context: Any) -> None:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        if self.faults.stopping is not None:
            await _abort(context, self.faults.stopping)

    async def Get(self, request: Any, context: Any) -> Any:
        self.gets.append(request)
        await self._begin(context)
        if self.faults.gets:
            await _abort(context, self.faults.gets.pop(0))
        if self.faults.silent:
            self.asked.set()
            await asyncio.Event().wait()
        answers = []
        for key in request.keys[: self._answers_max]:
            problem = self.faults.refused_partitions.get(len(key))
            if problem is not None:
                answers.append(kv_pb2.GetAnswer(problem=problem_of(problem)))
            else:
                answers.append(kv_pb2.GetAnswer(value=self.values.get(key)))
        return kv_pb2.GetResponse(bucket_version=VERSION, answers=answers)

    async def GetPartitions(self, request: Any, context: Any) -> Any:
        self.looked.append(self)
        if self.looks > self.faults.there:
            await asyncio.Event().wait()
        state = types_pb2.PARTITION_STATE_ACTIVE
        if self.looks <= self.faults.replica:
            state = types_pb2.PARTITION_STATE_REPLICA
        infos = [admin_pb2.PartitionInfo(partition=p, state=state) for p in request.partitions]
        return admin_pb2.GetPartitionsResponse(bucket_version=VERSION, partitions=infos)

    async def Write(self, request_iterator: Any, context: Any) -> Any:
        await self._begin(context)
        number = self.calls
        self.calls += 1
        left = self.faults.lost[number] if number < len(self.faults.lost) else None
        opening = (await anext(request_iterator)).open
        last = max((n for name, n in self._done if name == opening.producer), default=0)
        opened = kv_pb2.WriteOpened(bucket_version=VERSION, last_number=last, writes_in_flight=64)
        yield kv_pb2.WriteResponse(opened=opened)
        carried = 0
        async for request in request_iterator:
            write = request.write
            self.writes.append(write)
            if write.number >= self.faults.unanswered:
                await asyncio.Event().wait()
            if write.previous_number == carried:
                result = self._take(opening.producer, write)
            else:
                behind = problem_of(OutOfOrderError("it would overtake what was refused"))
                result = kv_pb2.WriteResult(number=write.number, refused=behind)
            if left == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            left = None if left is None else left - 1
            if not result.HasField("refused") or result.refused_partitions:
                carried = write.number
            yield kv_pb2.WriteResponse(result=result)

    def _take(self, producer: str, write: kv_pb2.WriteBlock) -> kv_pb2.WriteResult:
        known = self._done.get((producer, write.number))
        if known is not None:
            return known
        error = self.faults.refused.pop(write.number, None)
        if error is not None:
            return kv_pb2.WriteResult(number=write.number, refused=problem_of(error))
        block = block_from_message(write.block, numbered=False)
        refused = self.faults.refused_partitions
        keys, values = block_keys(block), block_values(block)
        if max(len(value or b"") for value in values) >= self.faults.large:
            error = InvalidArgumentError("a value is too large for this server")
            return kv_pb2.WriteResult(number=write.number, refused=problem_of(error))
        for partition, key, value in zip(block_partitions(block), keys, values, strict=True):
            if partition not in refused:
                self._apply(key, value)
        rows = [run for run in block.runs.tolist() if run[0] not in refused]
        starts = [self._highs[run[0]] for run in rows]
        ends = [start + run[1] for start, run in zip(starts, rows, strict=True)]
        self._highs.update({run[0]: run[1] for run in rows})
        runs = make_runs([run[0] for run in rows], [run[1] for run in rows], starts, ends)
        result = kv_pb2.WriteResult(
            number=write.number, runs=runs.tobytes(), failover_ids=[ID_A] * len(rows)
        )
        for run in block.runs.tolist():
            if run[0] in refused:
                problem = problem_of(refused[run[0]])
                result.refused_partitions.add(partition=run[0], problem=problem)
        self._done[producer, write.number] = result
        return result

    def _apply(self, key: bytes, value: bytes | None) -> None:
        self.applied.append((key, value))
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value


async def _abort(context: Any, error: UprError) -> None:
    await context.abort(code_of(error), error.message, metadata_of(error))
