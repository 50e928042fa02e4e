"""One Follow call: answers heartbeats at once, and keeps what was received until the application takes it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_client._async.adapter import Queue, now
from upr_client._async.connection import Call
from upr_client.messages import frame_bytes, high_seqnos
from upr_protocol.credit import CreditReturn
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.limits import CREDIT_BYTES, CREDIT_BYTES_MAX, HEARTBEAT_SECONDS, PARTITIONS
from upr_protocol.liveness import Liveness
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

_MOMENT_SECONDS = 0.2
_PONG = stream_pb2.FollowRequest(pong=stream_pb2.Pong())


class _End(NamedTuple):
    error: UprError | None


class Follow:
    """One Follow call.

    What the reader gets is bounded by the credit: frames wait until they are taken, and only then is their credit
    given back; of heartbeats only the newest numbers are kept.

    Args:
        method: the stub's Follow.
        request: the Open.
    """

    def __init__(self, method: Callable[..., Any], request: stream_pb2.Open) -> None:
        self._inbox: Queue[Any] = Queue()
        self._highs = np.zeros(PARTITIONS, np.uint64)
        self._beat_waits = False
        self._credit = CreditReturn(request.credit_bytes or CREDIT_BYTES)
        self._liveness = Liveness(request.heartbeat_seconds or HEARTBEAT_SECONDS, now())
        self._call = Call(method, "upr-follow", self._on_message, self._on_end)
        self._call.send(stream_pb2.FollowRequest(open=request))

    def _on_message(self, message: stream_pb2.FollowResponse) -> None:
        self._liveness.heard(now())
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            self._call.send(_PONG)
            partitions, seqnos = high_seqnos(message.heartbeat)
            self._highs[partitions] = np.maximum(self._highs[partitions], seqnos)
            if self._beat_waits:
                return
            self._beat_waits = True
        elif kind == "ended" and not message.ended.streams:
            self._call.half_close()
        self._inbox.put(message)

    def _on_end(self, error: UprError | None) -> None:
        self._inbox.put(_End(error))

    async def opened(self, seconds: float) -> stream_pb2.Opened:
        """Wait for the server's terms.

        Raises:
            UprError: the call was refused, or nothing came in ``seconds``.
        """
        message = await self._inbox.get(seconds)
        if message is None:
            raise UnavailableError(
                f"the server did not accept the call within {seconds:g} s", hint="is it overloaded?"
            )
        message = self._unless_end(message)
        kind = message.WhichOneof("message")
        if kind == "ended":
            # Refused with a reason, as a later Ended of the call.
            await self._call.finish(seconds)
        elif kind != "opened":
            raise UnavailableError(f"the server's first message is {kind}, not opened")
        else:
            granted = message.opened.credit_bytes
            if 0 < granted <= CREDIT_BYTES_MAX:
                self._credit = CreditReturn(granted)
            if message.opened.heartbeat_seconds > 0:
                self._liveness = Liveness(message.opened.heartbeat_seconds, now())
            opened: stream_pb2.Opened = message.opened
            return opened
        problem = message.ended.problem
        raise UprError(
            problem.message, hint=problem.hint, reason=problem.reason, retriable=problem.retriable
        )

    @staticmethod
    def _unless_end(message: Any) -> Any:
        if not isinstance(message, _End):
            return message
        raise message.error or UnavailableError("the server ended the call without a reason")

    def send(self, request: stream_pb2.FollowRequest) -> None:
        """Queue a request; dropped once the server ended the call."""
        self._call.send(request)

    async def next(self, seconds: float | None) -> stream_pb2.FollowResponse | None:
        """Return the next message, None when none came in ``seconds``.

        Raises:
            UprError: the call ended, or the server was silent for three heartbeat intervals.
        """
        waited = seconds is None or seconds >= _MOMENT_SECONDS
        self._liveness.sent(now())
        # At least a moment: where the application held up the reader too, silence is its own.
        longest = max(self._liveness.next_deadline() - now(), _MOMENT_SECONDS)
        message = await self._inbox.get(longest if seconds is None else min(seconds, longest))
        if message is None:
            if waited and self._liveness.peer_is_gone(now()):
                raise UnavailableError("the server was silent for three heartbeat intervals")
            return None
        message = self._unless_end(message)
        kind = message.WhichOneof("message")
        if kind == "frame":
            self._give_back(self._credit.consumed(frame_bytes(message.frame)))
        elif kind == "heartbeat":
            self._beat_waits = False
            # Everything received is consumed: the rest too small to be returned alone may be what is missing.
            self._give_back(self._credit.flush())
        told: stream_pb2.FollowResponse = message
        return told

    def _give_back(self, size: int) -> None:
        if size:
            self._call.send(stream_pb2.FollowRequest(credit=stream_pb2.Credit(bytes=size)))

    def highs(self) -> npt.NDArray[np.uint64]:
        """The high seqnos that heartbeats told, of all 1024 partitions; 0 for none."""
        return self._highs

    async def finish(self, seconds: float) -> None:
        """Half-close and wait for the server's end of the call, at most so long."""
        await self._call.finish(seconds)

    async def cancel(self) -> None:
        """End the call at once."""
        await self._call.cancel()
