"""The gate: the gRPC interceptor that receives, counts and charges every call before its method sees it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from upr.service.access.rules import PERMIT, Access, Permit, ended_error
from upr.service.overload.callers import BYTES_A_SECOND, CALL_SECONDS, Callers, peer_of, seconds_of
from upr.service.overload.intake import Context, Intake, abort
from upr.service.storage_trouble import words_of
from upr_protocol.errors import InvalidArgumentError, TooManyError, UprError
from upr_protocol.limits import ANSWERS_BYTES_MAX, REQUEST_BYTES_MAX, SMALL_ANSWER_BYTES

log = logging.getLogger(__name__)


async def read_open(intake: Intake, context: Context, request: Any, kind: str) -> Any:
    """Return the Open of a streaming call, its first message, when the caller may open the call.

    It must come soon, because an idle call occupies one of a bounded number of places.

    Args:
        request: the class of the call's messages.

    Raises:
        InvalidArgumentError: no message came within OPEN_SECONDS, or another one.
        PermissionDeniedError: the caller may not open it.
    """
    raw = await intake.receive(context, REQUEST_BYTES_MAX, "an Open")
    first = parsed(request.FromString, raw or b"", "an Open")
    if first.WhichOneof("message") != "open":
        raise InvalidArgumentError(f"the first message of a {kind} call is Open")
    PERMIT.get().check(first.open)
    return first.open


def parsed(parse: Callable[[bytes], Any], raw: bytes, what: str) -> Any:
    """Return what some bytes are parsed to, or raise InvalidArgumentError."""
    try:
        return parse(raw)
    except DecodeError:
        raise InvalidArgumentError(f"{what} of {len(raw)} bytes cannot be parsed") from None


Opened = list[Callable[[], object]]
"""Functions that close what a call has opened."""
_IN_ORDER = frozenset({"SavePositions"})
"""Methods whose calls reach their handler in the order in which their connection began them.

A small request can arrive before a large one that was begun first, and an older position would replace a newer one.
"""


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Gate for every call, those of health and reflection included. It turns domain errors into statuses.

    A call with one request receives it through the intake, and is charged for it. One with many is registered with the
    intake, unless its method takes its messages as bytes and registers itself.

    Args:
        limits: bytes of a request, by the method's last name; REQUEST_BYTES_MAX for the others.
        access: admits each call before anything of it is read, and again when its request is known.
    """

    def __init__(
        self, intake: Intake, callers: Callers, limits: Mapping[str, int], access: Access
    ) -> None:
        self._access = access
        self._intake = intake
        self._callers = callers
        self._limits = limits
        self._handlers: dict[str, Any] = {}
        self._answering: Counter[str] = Counter()
        """Bytes of answers that gRPC has and the clients have not taken, by peer."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = self._handlers.get(details.method)
        if handler is None:
            handler = await continuation(details)
            if handler is None:
                return None
            name = details.method.rpartition("/")[2]
            around = self._streaming if handler.request_streaming else self._receiving
            handler = self._handlers[details.method] = around(name, handler, details.method)
        return handler

    def _receiving(self, name: str, handler: Any, method: str) -> Any:
        """Return the handler of a method with one request. It receives the request itself, so gRPC sees a stream."""
        intake, callers = self._intake, self._callers
        limit = self._limits.get(name, REQUEST_BYTES_MAX)
        serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
        turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

        async def answered(_: object, context: Context, permit: Permit, opened: Opened) -> Any:
            if name in _IN_ORDER:
                turn = turns.get(permit.peer) or turns.setdefault(permit.peer, asyncio.Lock())
                async with turn:
                    request = await arrived(context, permit, opened)
            else:
                request = await arrived(context, permit, opened)
            answer = await serve(request, context)
            if handler.response_streaming:
                return None
            answer = handler.response_serializer(answer)
            if len(answer) > SMALL_ANSWER_BYTES and not self._counts(len(answer), context):
                # The error is kept while the client does not take it either.
                del answer
                raise TooManyError(
                    f"answers that clients have not taken are {self._answering.total()} bytes; must be at most {ANSWERS_BYTES_MAX} with that of this {name}, and half of it for one peer",
                    hint="ask again, for less at a time",
                )
            return answer

        async def arrived(context: Context, permit: Permit, opened: Opened) -> Any:
            raw = await intake.receive(context, limit, name)
            if raw is None:
                raise InvalidArgumentError(f"a {name} without a request")
            request = parsed(handler.request_deserializer, raw, name)
            permit.check(request)
            size = len(raw)
            # Free the message, which may be large, before a long wait for the turn.
            del raw
            peer = peer_of(permit.peer)
            opened.append(callers.open(name, peer))
            seconds = CALL_SECONDS + seconds_of(request) + size / BYTES_A_SECOND
            await callers.pay(peer, seconds, size, context.time_remaining())
            return request

        run = self._admitted(method, answered)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(run, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(run)

    def _counts(self, size: int, context: Context) -> bool:
        """Count a large answer until the client has taken it; False if there is no room for it."""
        peer, held = peer_of(context.peer()), self._answering
        if held[peer] and (
            held.total() + size > ANSWERS_BYTES_MAX or held[peer] + size > ANSWERS_BYTES_MAX // 2
        ):
            return False
        held[peer] += size

        def taken(_: Context) -> None:
            held[peer] -= size
            if not held[peer]:
                del held[peer]

        context.add_done_callback(taken)  # type: ignore[arg-type]  # (the stubs are wrong)
        return True

    def _admitted(
        self, method: str, work: Callable[[Any, Context, Permit, Opened], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """Return what does the work of admitted calls of a method, and ends one whose identity has lost the permit.

        What the work has opened is closed when the client has taken an error's status.
        """

        async def run(requests: Any, context: Context) -> Any:
            task = asyncio.current_task()
            assert task is not None
            try:
                permit = self._access.admit(method, context, task.cancel)
            except UprError as error:
                await abort(context, error)
            PERMIT.set(permit)
            opened: Opened = []
            try:
                try:
                    return await work(requests, context, permit, opened)
                except UprError as error:
                    # Its traceback would hold this frame, which holds it.
                    failure = error.with_traceback(None)
                except (grpc.aio.BaseError, grpc.RpcError):
                    raise
                except NotImplementedError:
                    # So gRPC's services have it for a method that they lack.
                    name = method.rpartition("/")[2]
                    failure = UprError(f"this server has no {name}", reason="UNIMPLEMENTED")
                except Exception as error:
                    # In plain words: gRPC would send the exception, with its paths.
                    log.exception("a call failed", extra={"method": method.rpartition("/")[2]})
                    failure = UprError(words_of(error), hint="see the server's log")
                # Not ended a second time for its permit: nothing more is told than this.
                self._access.left(permit)
                # Here, as the status may be behind much that is unsent.
                await abort(context, failure)
            except asyncio.CancelledError:
                if not permit.ended:
                    raise
                task.uncancel()
            finally:
                self._access.left(permit)
                for close in opened:
                    close()
            await abort(context, ended_error())

        return run

    def _streaming(self, name: str, handler: Any, method: str) -> Any:
        intake, callers = self._intake, self._callers
        serve = handler.stream_stream
        if not asyncio.iscoroutinefunction(serve):
            serve = _writing(serve)

        async def served(messages: Any, context: Context, permit: Permit, opened: Opened) -> None:
            peer = peer_of(permit.peer)
            opened.append(callers.open(name, peer))
            await callers.pay(peer, 2 * CALL_SECONDS)
            await serve(messages, context)

        counted = self._admitted(method, served)

        async def registered(messages: Any, context: Context) -> None:
            task = asyncio.current_task()
            assert task is not None
            arriving = intake.expect(context, task.cancel)
            try:
                await counted(messages, context)
            finally:
                arriving.close()

        return grpc.stream_stream_rpc_method_handler(
            counted if handler.request_deserializer is None else registered,
            handler.request_deserializer,
            handler.response_serializer,
        )


def _writing(method: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Awaitable[None]]:
    async def written(messages: Any, context: Context) -> None:
        async for response in method(messages, context):
            await context.write(response)

    return written
