"""The client's side of one Follow call without its I/O: what is answered at once, credit, silence. The same in both
flavours; a shell hands in what arrives and sends what it is given.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_client.messages import frame_bytes, high_seqnos
from upr_protocol.credit import CreditReturn
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.limits import CREDIT_BYTES, CREDIT_BYTES_MAX, HEARTBEAT_SECONDS, PARTITIONS
from upr_protocol.liveness import Liveness
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

SILENT_REASON: Final = "SILENT"
"""Of a call that ended because the other side was not heard."""
MOMENT_SECONDS: Final = 0.2
"""What is waited for at least before the server counts as silent."""
_PONG: Final = stream_pb2.FollowRequest(pong=stream_pb2.Pong())


class Arrived(NamedTuple):
    """What to do with a message that arrived.

    Args:
        answer: to be sent at once, None for nothing.
        half_close: nothing is to be sent after this message.
        keep: it waits for the application; else its content was taken in already.
    """

    answer: stream_pb2.FollowRequest | None
    half_close: bool
    keep: bool


class CallState:
    """One call.

    Times are seconds on a clock that does not jump.

    Args:
        request: the Open.
        now: when the call began.

    Attributes:
        highs: the high seqnos that heartbeats told, of all 1024 partitions; 0 for none.
    """

    def __init__(self, request: stream_pb2.Open, now: float) -> None:
        self.highs: npt.NDArray[np.uint64] = np.zeros(PARTITIONS, np.uint64)
        self._beat_waits = False
        self._credit = CreditReturn(request.credit_bytes or CREDIT_BYTES)
        self._liveness = Liveness(request.heartbeat_seconds or HEARTBEAT_SECONDS, now)

    def arrived(self, message: stream_pb2.FollowResponse, now: float) -> Arrived:
        """Take note of a message when it arrives, before the application has time for it."""
        self._liveness.heard(now)
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            partitions, seqnos = high_seqnos(message.heartbeat)
            self.highs[partitions] = np.maximum(self.highs[partitions], seqnos)
            # Of heartbeats that wait only the newest numbers count, and those are kept here.
            keep, self._beat_waits = not self._beat_waits, True
            return Arrived(_PONG, False, keep)
        return Arrived(None, kind == "ended" and not message.ended.streams, True)

    def accepted(self, message: stream_pb2.FollowResponse, now: float) -> stream_pb2.Opened:
        """Return the server's terms out of its first message.

        Raises:
            UprError: the call was refused, or something else came first.
        """
        kind = message.WhichOneof("message")
        if kind == "ended":
            problem = message.ended.problem
            raise UprError(
                problem.message,
                hint=problem.hint,
                reason=problem.reason,
                retriable=problem.retriable,
            )
        if kind != "opened":
            raise UnavailableError(f"the server's first message is {kind}, not opened")
        granted = message.opened.credit_bytes
        if 0 < granted <= CREDIT_BYTES_MAX:
            self._credit = CreditReturn(granted)
        if message.opened.heartbeat_seconds > 0:
            self._liveness = Liveness(message.opened.heartbeat_seconds, now)
        opened: stream_pb2.Opened = message.opened
        return opened

    def taken(self, message: Any) -> stream_pb2.FollowRequest | None:
        """The application took a message. Return the credit that goes back for it, None for nothing."""
        size = 0
        kind = message.WhichOneof("message")
        if kind == "frame":
            size = self._credit.consumed(frame_bytes(message.frame))
        elif kind == "heartbeat":
            self._beat_waits = False
            # Everything received is consumed: the rest too small to be returned alone may be what is missing.
            size = self._credit.flush()
        return stream_pb2.FollowRequest(credit=stream_pb2.Credit(bytes=size)) if size else None

    def patience(self, now: float) -> float:
        """Return how many seconds to wait for the next message at most, before ``check_heard``."""
        self._liveness.sent(now)
        # At least a moment: where the application held up the reader too, silence is its own.
        return max(self._liveness.next_deadline() - now, MOMENT_SECONDS)

    def check_heard(self, now: float) -> None:
        """Check that the server is there, after nothing came in a moment of waiting.

        Raises:
            UnavailableError: it was silent for three heartbeat intervals.
        """
        if self._liveness.peer_is_gone(now):
            raise UnavailableError(
                "the server was silent for three heartbeat intervals", reason=SILENT_REASON
            )
