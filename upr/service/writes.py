"""The Write call: blocks are numbered as they come in, and answered in order as they become durable."""

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc

from upr.engine.bucket import Written, check_number
from upr.engine.producers import Producer
from upr.service.catalog import Catalog, check_name
from upr.service.gets import GetMethods
from upr.service.handshake import Context, abort, read_open
from upr.service.host import BucketHost
from upr_protocol.errors import (
    BucketGoneError,
    InvalidArgumentError,
    ShuttingDownError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.limits import (
    WRITE_CALLS_MAX,
    WRITE_OUTCOME_SECONDS,
    WRITES_IN_FLIGHT_MAX,
)
from upr_protocol.wire.codec import block_from_message, encode_runs, problem_of
from upr_protocol.wire.v1 import key_value_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

GONE_SECONDS = 0.5
"""So long after its bucket was dropped a call still answers what it is sent, and then it ends: what was on its way
is refused by name and not left without an answer."""
_DURABILITIES = frozenset(types.Durability.values())


@dataclass(slots=True)
class _Pending:
    """A write whose answer is due: numbered, or refused."""

    number: int
    memory: bool
    deadline: float = 0.0
    written: Written | None = None
    error: UprError | None = None


class KeyValueMethods(GetMethods):
    """All of KeyValueService."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._calls: set[_WriteCall] = set()

    async def Write(self, request_iterator: object, context: Context) -> None:
        """Serve one call; see ``key_value_service.proto``."""
        try:
            call = await self._open(context)
        except UprError as error:
            await abort(context, error)
        self._calls.add(call)
        try:
            await call.run()
        except UprError as error:
            await abort(context, error)
        finally:
            self._calls.discard(call)
            call.close()

    async def _open(self, context: Context) -> "_WriteCall":
        opening = await read_open(context, "Write", len(self._calls), WRITE_CALLS_MAX)
        host = self._catalog.of(opening)
        producer, name = None, b""
        if opening.producer:
            name = check_name(opening.producer, "producer").encode()
            producer = await host.open_producer(name)
        call = _WriteCall(host, context, name, producer)
        opened = wire.WriteOpened(
            bucket_version=host.bucket.identity.version,
            last_number=producer.last_number if producer else 0,
            writes_in_flight=WRITES_IN_FLIGHT_MAX,
        )
        try:
            await context.write(wire.WriteResponse(opened=opened))
        except BaseException:
            call.close()
            raise
        return call

    @property
    def open_calls(self) -> int:
        """Open Write calls."""
        return len(self._calls)

    def shut_down(self) -> None:
        """Have every call answer what it took and end."""
        for call in self._calls:
            call.shut_down()


class _WriteCall:
    """One open call: a task that reads and numbers, another that waits and answers."""

    def __init__(
        self, host: BucketHost, context: Context, name: bytes, producer: Producer | None
    ) -> None:
        self._host = host
        self._context = context
        self._name = name
        self._producer = producer
        self._expected: int | None = None
        self._pending: deque[_Pending] = deque()
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        self._read_all = False
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False
        self._gone: BucketGoneError | None = None
        host.users.add(self.bucket_gone)

    async def run(self) -> None:
        """Serve until the client half-closes, the server stops, or the bucket is dropped."""
        self._reader = asyncio.create_task(self._read())
        try:
            await self._answer()
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._gone is not None:
            raise self._gone
        if self._stopping:
            raise ShuttingDownError("the server is stopping", hint="connect again")

    def shut_down(self) -> None:
        """Read no more; what was taken is still answered."""
        self._stopping = True
        self._read_no_more()

    def bucket_gone(self, error: BucketGoneError) -> None:
        """The bucket was dropped: refuse what still comes, for a moment, and end the call.

        What was not numbered is refused with BUCKET_GONE: it never was applied. What was numbered and is not durable
        yet is answered UNKNOWN_OUTCOME: should the server die before the drop is on disk, the bucket will be there
        again, with that write or without it.
        """
        self._gone = error
        asyncio.get_running_loop().call_later(GONE_SECONDS, self._read_no_more)

    def _read_no_more(self) -> None:
        if self._reader is not None:
            self._reader.cancel()

    def close(self) -> None:
        """Give the producer back."""
        self._host.users.discard(self.bucket_gone)
        if self._producer is not None:
            self._producer.calls -= 1

    async def _read(self) -> None:
        try:
            while (request := await self._context.read()) is not grpc.aio.EOF:
                await self._take(request)
                self._changed.set()
                while len(self._pending) >= WRITES_IN_FLIGHT_MAX:
                    # The client's own window is as large: more than that is only held back, not refused.
                    self._answered.clear()
                    await self._answered.wait()
        finally:
            self._read_all = True
            self._changed.set()

    async def _take(self, request: object) -> None:
        """Number one write, or take note of why not."""
        if not isinstance(request, wire.WriteRequest) or request.WhichOneof("message") != "write":
            raise InvalidArgumentError("a message of a Write call that is neither Open nor a write")
        write = request.write
        pending = _Pending(write.number, write.durability == types.DURABILITY_MEMORY)
        try:
            if write.durability not in _DURABILITIES:
                raise InvalidArgumentError(
                    f"durability {write.durability} is unknown, known are 0 to {max(_DURABILITIES)}"
                )
            following = None
            if self._producer is not None:
                following = check_number(self._expected, write.number)
            block = block_from_message(write.block, numbered=False)
            pending.written = await self._host.write(
                block, self._name, self._producer, write.number
            )
            self._expected = following
            pending.deadline = asyncio.get_running_loop().time() + WRITE_OUTCOME_SECONDS
        except UprError as error:
            pending.error = error
            if self._producer is not None and self._expected in (None, write.number):
                # After a definite no the next number may come. Otherwise the refused one will be sent again, and
                # nothing behind it may overtake it.
                self._expected = write.number if error.retriable else write.number + 1
        self._pending.append(pending)

    async def _answer(self) -> None:
        while True:
            if not self._pending:
                if self._read_all:
                    break
                self._changed.clear()
                await self._changed.wait()
                continue
            pending = self._pending[0]
            if pending.written is not None and not pending.memory:
                await self._until_durable(pending, pending.written)
            await self._context.write(wire.WriteResponse(result=_result(pending)))
            self._pending.popleft()
            self._answered.set()
        assert self._reader is not None
        if self._reader.done() and not self._reader.cancelled():
            # An error of the reader itself ends the call with its reason.
            self._reader.result()

    async def _until_durable(self, pending: _Pending, written: Written) -> None:
        if written.entry < self._host.bucket.tail.durable:
            return
        left = max(pending.deadline - asyncio.get_running_loop().time(), 0)
        try:
            async with asyncio.timeout(left):
                await self._host.durable(written.entry)
        except TimeoutError:
            pending.error = UnknownOutcomeError(
                f"write {pending.number} was not durable within {WRITE_OUTCOME_SECONDS:.0f} s; it may become so",
                hint="send it again with its number to learn more",
            )
        except UprError as error:
            pending.error = UnknownOutcomeError(
                f"write {pending.number} may or may not be on disk: {error.message}",
                retriable=False,
            )


def _result(pending: _Pending) -> wire.WriteResult:
    if pending.error is not None:
        return wire.WriteResult(number=pending.number, refused=problem_of(pending.error))
    written = pending.written
    assert written is not None
    return wire.WriteResult(
        number=pending.number,
        runs=encode_runs(written.runs),
        failover_ids=written.failover_ids.tolist(),
        duplicate=written.duplicate,
        refused_partitions=[
            types.RefusedPartition(partition=p, problem=problem_of(e))
            for p, e in written.refused.items()
        ],
    )
