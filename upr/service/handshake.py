"""Hello and GetFailoverLog, and what all calls have in common."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc

from upr.engine.bucket import Bucket
from upr.service.catalog import Catalog, chosen_partitions
from upr_protocol.errors import InvalidArgumentError, TooManyError, UprError
from upr_protocol.failover import check_failover_id
from upr_protocol.handshake import answer_hello
from upr_protocol.limits import OPEN_SECONDS
from upr_protocol.wire import status
from upr_protocol.wire.codec import log_to_messages, problem_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: UprError) -> NoReturn:
    """End a call with a domain error."""
    await context.abort(status.code_of(error), error.message, status.metadata_of(error))


async def read_open(context: Context, kind: str, open_calls: int, limit: int) -> Any:
    """Return the Open of a streaming call, its first message; ``kind`` is how errors call it.

    It must come soon: a call that was not opened is not counted anywhere.

    Raises:
        TooManyError: as many calls of the kind are open as may be.
        InvalidArgumentError: nothing came within OPEN_SECONDS, or something else.
    """
    if open_calls >= limit:
        raise TooManyError(
            f"{open_calls} {kind} calls are open, the limit is {limit}",
            hint="one call carries any number of partitions and writes",
        )
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            first: Any = await context.read()
    except TimeoutError:
        raise InvalidArgumentError(
            f"no Open within {OPEN_SECONDS:.0f} s", hint="Open is the first message of a call"
        ) from None
    if first is grpc.aio.EOF or first.WhichOneof("message") != "open":
        raise InvalidArgumentError(f"the first message of a {kind} call is Open")
    return first.open


def answering(
    method: Callable[[Any, _Request, Context], Awaitable[_Response]],
) -> Callable[[Any, _Request, Context], Awaitable[_Response]]:
    """Have a unary method's domain errors travel as statuses."""

    @wraps(method)
    async def wrapped(self: Any, request: _Request, context: Context) -> _Response:
        try:
            return await method(self, request, context)
        except UprError as error:
            await abort(context, error)

    return wrapped


def hello_answer(bucket: Bucket, asked: wire.HelloPartition, with_log: bool) -> wire.HelloAnswer:
    """Answer step 1 of the handshake for one partition ("Handshakes" of the specification)."""
    table, partition = bucket.partitions, asked.partition
    if not table.serves(partition):
        return wire.HelloAnswer(partition=partition, problem=problem_of(table.refusal(partition)))
    log = table.logs[partition]
    answer = answer_hello(log, asked.failover_id if asked.HasField("failover_id") else None)
    return wire.HelloAnswer(
        partition=partition,
        rollback_seqno=answer.rollback_seqno,
        failover_id=answer.newest_id,
        high_seqno=int(table.high[partition]),
        durable_seqno=int(table.durable[partition]),
        failover_log=log_to_messages(log) if with_log else None,
        rule=answer.rule,
        words=answer.words,
    )


class HandshakeMethods:
    """Hello and GetFailoverLog; Follow is in ``follow``."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    @answering
    async def Hello(self, request: wire.HelloRequest, context: Context) -> wire.HelloResponse:
        """Answer for any number of partitions; one bad partition fails the request, and changes nothing."""
        bucket = self._catalog.of(request).bucket
        if request.partitions:
            chosen_partitions([asked.partition for asked in request.partitions])
        for asked in request.partitions:
            if asked.HasField("failover_id"):
                check_failover_id(asked.failover_id)
        answers = [hello_answer(bucket, asked, request.with_log) for asked in request.partitions]
        return wire.HelloResponse(bucket_version=bucket.identity.version, answers=answers)

    @answering
    async def GetFailoverLog(
        self, request: wire.GetFailoverLogRequest, context: Context
    ) -> wire.GetFailoverLogResponse:
        """Return whole logs, also of partitions that are dead."""
        bucket = self._catalog.find(request.bucket).bucket
        logs = [
            wire.PartitionFailoverLog(
                partition=partition, records=log_to_messages(bucket.partitions.logs[partition])
            )
            for partition in chosen_partitions(request.partitions)
        ]
        return wire.GetFailoverLogResponse(bucket_version=bucket.identity.version, logs=logs)
