"""The Write calls of a scripted server."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from upr_client.testing.memory import Memory
from upr_client.testing.state import State, StreamingCall
from upr_protocol.block import make_runs
from upr_protocol.errors import InvalidArgumentError, OutOfOrderError, UnavailableError, UprError
from upr_protocol.limits import WRITES_IN_FLIGHT_MAX
from upr_protocol.rows import block_keys, block_partitions, block_values
from upr_protocol.wire.codec import block_from_message, encode_runs, problem_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2


class WriteCall(StreamingCall):
    """One Write call; see ``key_value_service.proto``. What is numbered counts as durable at once."""

    def __init__(self, state: State, requests: Iterator[Any], context: Any) -> None:
        super().__init__(state, "Write", requests, context)
        self._memory: Memory | None = None
        self._producer = ""
        self._expected: int | None = None
        self._out: deque[kv_pb2.WriteResponse] = deque()

    def take(self, request: Any) -> None:
        """Deal with a request: number a write, or say why not."""
        kind = request.WhichOneof("message")
        if self._memory is None:
            if kind != "open":
                raise InvalidArgumentError("the first message of a Write call is Open")
            self._open(request.open)
        elif kind != "write":
            raise InvalidArgumentError("a message of a Write call that is neither Open nor a write")
        else:
            result = self._write(request.write)
            self._out.append(kv_pb2.WriteResponse(result=result))
            if self.state.answers_to_lose:
                self.state.answers_to_lose -= 1
                self.fail(UnavailableError("the answer to a write was lost"))

    def _open(self, opening: kv_pb2.WriteOpen) -> None:
        self._memory = self.state.find(opening)
        self._producer = opening.producer
        opened = kv_pb2.WriteOpened(
            bucket_version=self._memory.version,
            last_number=max(self.state.answers.get(self._producer, {}), default=0),
            writes_in_flight=WRITES_IN_FLIGHT_MAX,
        )
        self._out.append(kv_pb2.WriteResponse(opened=opened))

    def _write(self, write: kv_pb2.WriteBlock) -> kv_pb2.WriteResult:
        number = write.number
        try:
            if self._producer and self._expected not in (None, number):
                raise OutOfOrderError(f"write number {number}, expected {self._expected}")
            result = self._applied(write)
            self._expected = number + 1
            return result
        except UprError as error:
            if self._expected in (None, number):
                # After a definite no the next number may come; else the refused one is sent again first.
                self._expected = number if error.retriable else number + 1
            return kv_pb2.WriteResult(number=number, refused=problem_of(error))

    def _applied(self, write: kv_pb2.WriteBlock) -> kv_pb2.WriteResult:
        known = self.state.answers.setdefault(self._producer, {}) if self._producer else {}
        if write.number in known:
            again = kv_pb2.WriteResult()
            again.CopyFrom(known[write.number])
            again.duplicate = True
            return again
        block = block_from_message(write.block, numbered=False)
        rows = zip(block_partitions(block), block_keys(block), block_values(block), strict=True)
        applied, refused = self.state.write(rows)
        if not applied:
            raise next(iter(refused.values()))
        table = make_runs(
            list(applied),
            [end - start for start, end in applied.values()],
            [start for start, _ in applied.values()],
            [end for _, end in applied.values()],
        )
        assert self._memory is not None
        result = kv_pb2.WriteResult(
            number=write.number,
            runs=encode_runs(table),
            failover_ids=[self._memory[p].log.newest.failover_id for p in applied],
            refused_partitions=[
                types_pb2.RefusedPartition(partition=p, problem=problem_of(error))
                for p, error in refused.items()
            ],
        )
        known[write.number] = result
        return result

    def step(self) -> Any | None:
        """Answer in order; end when the client has half-closed."""
        if self._out:
            return self._out.popleft()
        if self.half_closed:
            self.finish()
        return None

    def while_stalled(self) -> None:
        """Nothing to be noted: a Write call has no heartbeats."""
