"""The link to the server, without I/O: credit and silence of a call, when to try the next one, and what is asked."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_client import backoff
from upr_client.changes.status import Progress
from upr_client.endpoints import SILENT_REASON, moves_on
from upr_protocol.block import POSITION
from upr_protocol.consumer import Consumer
from upr_protocol.errors import BucketGoneError, ProtocolError, UnavailableError, UprError
from upr_protocol.flow import CreditReturn, Liveness
from upr_protocol.limits import (
    CREDIT_BYTES,
    CREDIT_BYTES_MAX,
    HEARTBEAT_SECONDS,
    HEARTBEAT_SECONDS_MAX,
    MESSAGE_SECONDS,
    PARTITIONS,
    SILENT_INTERVALS,
)
from upr_protocol.position_table import PositionTable
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

MOMENT_SECONDS: Final = 0.2
"""Least time before the server counts as silent."""
_PONG: Final = stream_pb2.FollowRequest(pong=stream_pb2.Pong())


class Arrived(NamedTuple):
    """Handling of an arrived message.

    Args:
        answer: to be sent at once, None for nothing.
        half_close: send nothing after this message.
        keep: it waits for the application; else its content was taken in already.
    """

    answer: stream_pb2.FollowRequest | None
    half_close: bool
    keep: bool


class CallState:
    """One call.

    Times are seconds on a clock that does not jump.

    Attributes:
        highs: the high seqnos of the heartbeats, of all 1024 partitions; 0 for none.
        interval: of the heartbeats, seconds.
    """

    def __init__(self, request: stream_pb2.Open, now: float) -> None:
        self.highs: npt.NDArray[np.uint64] = np.zeros(PARTITIONS, np.uint64)
        self._beat_waits = False
        self._credit = CreditReturn(request.credit_bytes or CREDIT_BYTES)
        self.interval = request.heartbeat_seconds or HEARTBEAT_SECONDS
        self._liveness = Liveness(self.interval, now)
        self._arrived_at = now

    def arrived(self, message: stream_pb2.FollowResponse, now: float) -> Arrived:
        """Record a message when it arrives, before the application has time for it."""
        self._liveness.heard(now)
        self._arrived_at = now
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
            raise error_of(message.ended.problem)
        if kind != "opened":
            raise UnavailableError(f"the server's first message is {kind}, not opened")
        granted = message.opened.credit_bytes
        if 0 < granted <= CREDIT_BYTES_MAX:
            self._credit = CreditReturn(granted)
        if message.opened.heartbeat_seconds > 0:
            self.interval = message.opened.heartbeat_seconds
            self._liveness = Liveness(self.interval, now)
        opened: stream_pb2.Opened = message.opened
        return opened

    def taken(self, message: Any) -> stream_pb2.FollowRequest | None:
        """The application took a message. Return the credit that goes back for it, None for nothing."""
        size = 0
        kind = message.WhichOneof("message")
        if kind == "frame":
            size = self._credit.consumed(message.frame.credit_bytes)
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

    def is_late(self, now: float) -> bool:
        """Return whether a heartbeat of the server is late."""
        return self._liveness.peer_is_late(now)

    def check_heard(self, now: float, due: float) -> None:
        """Check that the server is there, after a moment of waiting until ``due`` in which nothing came.

        Raises:
            UnavailableError: it was silent for three heartbeat intervals.
        """
        self._liveness.woke(now, due)
        if self._liveness.peer_is_gone(now):
            raise UnavailableError(
                "the server was silent for three heartbeat intervals", reason=SILENT_REASON
            )

    def answered(self, now: float) -> bool:
        """The server, which was silent, answered another call. Return whether a message may be on its way, on a slow link."""
        may_come = now - self._arrived_at < MESSAGE_SECONDS
        if may_come:
            self._liveness.heard(now)
        return may_come


_DOUBLINGS_MAX: Final = 5
_CALM_SILENCES: Final = 3


_VIOLATIONS_MAX: Final = 5
"""So often in a row, with no frame in between, the protocol may be broken before that is an error."""


class Clock(NamedTuple):
    """Source of time and randomness.

    Args:
        now: seconds on a clock that does not jump.
        wall: seconds since the epoch.
        random: evenly distributed numbers from 0 to 1.
        lease: as ``now``, and it goes on while the machine sleeps, as the server's leases do; None where that is the same.
    """

    now: Callable[[], float]
    wall: Callable[[], float]
    random: Callable[[], float]
    lease: Callable[[], float] | None = None


def boot_seconds() -> float:
    """Return the time since the machine was started, with the time that it slept; elsewhere than on Linux what is next to it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime_ns(clock) / 1e9


class Reconnecting:
    """Reconnecting: outcomes of the calls so far, the time of the next, and the heartbeat interval to ask for.

    While a message is on its way nothing else comes, and one that takes longer on a slow link than either side waits for
    looks like silence; in the next call it would be sent from its start again, for ever. So the interval doubles
    with every call that ended in silence and brought nothing, up to 32 times its length. It is the first one again
    when something was brought, or when a call held for three times as long as silence may last.

    Args:
        heartbeat_seconds: the first interval.
        retry_seconds: how long to try without any progress; None for ever.
    """

    def __init__(
        self,
        heartbeat_seconds: float,
        retry_seconds: float | None,
        progress: Progress,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._first_interval = heartbeat_seconds
        self._doublings = 0
        self._opened_at = 0.0
        self._limit = retry_seconds
        self._progress = progress
        self._say = say
        self._clock = clock
        self._attempt = self._violations = 0
        self._rounds = 0
        self._left: set[str] = set()
        self._stays_until = clock.now()
        self._any_version = False
        self._heard_at = clock.now()

    @property
    def interval(self) -> float:
        """The heartbeat interval to ask for, seconds."""
        doubled: float = self._first_interval * 2**self._doublings
        return min(doubled, HEARTBEAT_SECONDS_MAX)

    def version(self, known: int) -> int | None:
        """Return the version of the bucket to ask for, None for whatever has the name; 0 means not known."""
        return None if self._any_version else known or None

    def heard(self) -> None:
        self._heard_at = self._clock.now()

    def answered(self) -> None:
        self._attempt = 0

    def all_started(self) -> None:
        self._rounds = 0
        self._left.clear()
        self._stays_until = self._clock.now()

    def leaves(self, endpoint: str, servers: int) -> bool:
        """A partition is behind at a server that need not be this one. Return whether to leave it for the next of so many.

        Each of the others is tried at once. If the partition is behind there too, or they are away, it waits alone where
        the call is by then, so that the others are followed; after growing times all are tried again.
        """
        if servers == 1 or self._clock.now() < self._stays_until:
            return False
        met = endpoint in self._left
        self._left.add(endpoint)
        if not met and len(self._left) < servers:
            return True
        self._left.clear()
        seconds = backoff.lasting_delay(self._rounds, self._clock.random())
        self._stays_until = self._clock.now() + seconds
        self._rounds += 1
        return False

    def beat(self) -> None:
        held = self._clock.now() - self._opened_at
        if held > _CALM_SILENCES * SILENT_INTERVALS * self.interval:
            self._doublings = 0

    def brought(self) -> None:
        self._attempt = self._violations = self._doublings = 0

    def opened(self) -> None:
        self._any_version = False
        self._opened_at = self._clock.now()

    def not_opened(self, error: UprError, known: int) -> bool:
        """A call was not accepted. Return whether to open another one at once; ``known`` as for ``version``."""
        # Accept any bucket of that name: its version shows that all data of the old one must be undone.
        self._any_version = (
            not self._any_version and bool(known) and error.reason == BucketGoneError.default_reason
        )
        if self._any_version:
            self._say(f"{error}; going on with the new one")
        return self._any_version

    def lost(self, error: UprError, longest: float | None = None) -> float:
        """The call is lost. Return how many seconds to wait before the next one.

        Args:
            longest: the longest such pause, seconds; None for one that grows with the attempts.

        Raises:
            UprError: trying again does not mend it, or was tried for long enough.
        """
        if error.reason == SILENT_REASON:
            self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)
        if not error.retriable:
            raise error
        if isinstance(error, ProtocolError):
            self._violations += 1
            if self._violations >= _VIOLATIONS_MAX:
                raise error
        if self._limit is not None and self._clock.now() - self._heard_at >= self._limit:
            raise error
        self._progress.reconnects += 1
        chance, away = self._clock.random(), moves_on(error)
        seconds = backoff.delay(self._attempt, chance, away=away, longest=longest)
        self._attempt += longest is None
        at = f" at {error.owner}" if longest is not None else ""
        self._say(
            f"the call ended with {error.reason} ({error}); connecting again{at} in {seconds:.2f} s"
        )
        return seconds


def high_seqnos(
    message: stream_pb2.Heartbeat,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Return the partitions and high seqnos of a Heartbeat; what is out of range is left out."""
    usable = len(message.high_seqnos) // POSITION.itemsize * POSITION.itemsize
    table = np.frombuffer(message.high_seqnos[:usable], POSITION)
    table = table[table["partition"] < 1024]
    return table["partition"].astype(np.int64), table["seqno"].astype(np.uint64)


PLAIN_STARTS: Final = 8
"""Number of partitions from which a Start is a table; a few are easier to read one by one."""


def start_message(
    session: Consumer, partitions: Sequence[int], until_now: bool
) -> stream_pb2.FollowRequest:
    """Return a Start of these partitions, all of them ready; many go as a table where that says all."""
    if len(partitions) >= PLAIN_STARTS:
        records = session.plain_starts(partitions)
        if records is not None:
            plain = stream_pb2.Start(table=records.tobytes(), until_now=until_now)
            return stream_pb2.FollowRequest(start=plain)
    start = stream_pb2.Start()
    for request in session.starts(partitions):
        message = start.partitions.add(
            partition=request.partition,
            failover_id=request.failover_id,
            seqno=request.seqno,
            data_id=request.data_id,
            horizon=request.horizon,
        )
        if request.until_exact is not None:
            message.until_exact = request.until_exact
        elif request.until_seqno is not None:
            message.until_seqno = request.until_seqno
        elif request.until_now:
            message.until_now = True
        if request.beginning == "now":
            message.from_now = True
        elif request.beginning is not None:
            message.from_time = request.beginning
    return stream_pb2.FollowRequest(start=start)


def ack_message(positions: PositionTable) -> stream_pb2.FollowRequest:
    table = positions.rows[["partition", "seqno"]].astype(POSITION)
    return stream_pb2.FollowRequest(ack=stream_pb2.Ack(positions=table.tobytes()))
