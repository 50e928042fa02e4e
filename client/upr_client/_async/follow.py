"""One Follow call: answers heartbeats at once, and keeps what was received until the application takes it."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_client._async.adapter import Queue, now
from upr_client._async.connection import Call
from upr_client.call_state import MOMENT_SECONDS, CallState
from upr_client.messages import is_of_group
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


class _End(NamedTuple):
    error: UprError | None


_WAKE = object()


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
        self._told: deque[stream_pb2.FollowResponse] = deque()
        self._state = CallState(request, now())
        self._call = Call(method, "upr-follow", self._on_message, self._on_end)
        self._call.send(stream_pb2.FollowRequest(open=request))

    def _on_message(self, message: stream_pb2.FollowResponse) -> None:
        arrived = self._state.arrived(message, now())
        if arrived.answer is not None:
            self._call.send(arrived.answer)
        if arrived.half_close:
            self._call.half_close()
        if is_of_group(message):
            # Ahead of the frames that wait: a lease must not end because the application is slow.
            self._told.append(message)
            self._inbox.put(_WAKE)
        elif arrived.keep:
            self._inbox.put(message)

    def _on_end(self, error: UprError | None) -> None:
        self._inbox.put(_End(error))

    async def opened(self, seconds: float) -> stream_pb2.Opened:
        """Wait for the server's terms.

        Raises:
            UprError: the call was refused, or nothing came in ``seconds``.
        """
        message = await self._inbox.get(seconds)
        while message is _WAKE:
            message = await self._inbox.get(seconds)
        if message is None:
            raise UnavailableError(
                f"the server did not accept the call within {seconds:g} s", hint="is it overloaded?"
            )
        message = self._unless_end(message)
        if message.WhichOneof("message") == "ended":
            # Refused with a reason, as a later Ended of the call.
            await self._call.finish(seconds)
        return self._state.accepted(message, now())

    @staticmethod
    def _unless_end(message: Any) -> Any:
        if not isinstance(message, _End):
            return message
        raise message.error or UnavailableError("the server ended the call without a reason")

    def send(self, request: stream_pb2.FollowRequest) -> None:
        """Queue a request; dropped once the server ended the call."""
        self._call.send(request)

    async def next(self, seconds: float | None) -> stream_pb2.FollowResponse | None:
        """Return the next message, None when none came in ``seconds``, or after ``wake``.

        Raises:
            UprError: the call ended, or the server was silent for three heartbeat intervals.
        """
        told = self.told()
        if told is not None:
            return told
        waited = seconds is None or seconds >= MOMENT_SECONDS
        longest = self._state.patience(now())
        message = await self._inbox.get(longest if seconds is None else min(seconds, longest))
        if message is _WAKE:
            return self.told()
        if message is None:
            if waited:
                self._state.check_heard(now())
            return None
        message = self._unless_end(message)
        credit = self._state.taken(message)
        if credit is not None:
            self._call.send(credit)
        given: stream_pb2.FollowResponse = message
        return given

    def told(self) -> stream_pb2.FollowResponse | None:
        """Return the next message about a member's share, None when there is none; without waiting."""
        return self._told.popleft() if self._told else None

    def wake(self) -> None:
        """Have ``next`` return soon; from any thread."""
        self._inbox.put(_WAKE)

    def highs(self) -> npt.NDArray[np.uint64]:
        """The high seqnos that heartbeats told, of all 1024 partitions; 0 for none."""
        return self._state.highs

    async def finish(self, seconds: float) -> None:
        """Half-close and wait for the server's end of the call, at most so long."""
        await self._call.finish(seconds)

    async def cancel(self) -> None:
        """End the call at once."""
        await self._call.cancel()
