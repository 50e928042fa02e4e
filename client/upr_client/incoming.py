"""What a message of the server comes to, for the partitions that are followed. Without I/O."""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from upr_client import backoff
from upr_client.delivered import decode_frame
from upr_client.progress import Progress
from upr_protocol.consumer import ConsumerSession, Delivery, Fate, ProtocolError, fate_of
from upr_protocol.errors import UprError
from upr_protocol.records import STARTED
from upr_protocol.wire.codec import log_from_messages
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

_ROLLBACKS_MAX: Final = 3
"""So often in a row a partition may be told to roll back before its next Start waits."""


class Clock(NamedTuple):
    """Where time and chance come from.

    Args:
        now: seconds on a clock that does not jump.
        wall: seconds since the epoch.
        random: evenly distributed numbers from 0 to 1.
    """

    now: Callable[[], float]
    wall: Callable[[], float]
    random: Callable[[], float]


class Incoming:
    """Takes what the server says about partitions.

    Args:
        say: takes words for people.

    Attributes:
        session: the state machine of the partitions.
        retries: when each partition may be started again.
        handshakes: the newest rollback answers: partition, rule, words.
        must_save: how often a position changed that is to be stored before its Start is sent.
    """

    def __init__(
        self,
        session: ConsumerSession,
        progress: Progress,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.session = session
        self.retries = backoff.Retries()
        self.handshakes: deque[tuple[int, str, str]] = deque(maxlen=4096)
        self.must_save = 0
        self._progress = progress
        self._say = say
        self._clock = clock
        self._rollbacks_in_row: dict[int, int] = {}
        self._begun: list[int] = []

    def take_frame(self, frame: stream_pb2.Frame) -> Delivery | None:
        """Take a frame; None when nothing in it belongs to an open stream."""
        delivery = self.session.frame(*decode_frame(frame))
        if delivery is not None:
            self.retries.succeeded(delivery.partitions)
            self._progress.received(delivery, self._clock.now())
        return delivery

    def take_answers(self, message: stream_pb2.StartAnswers) -> UprError | None:
        """Take the answers to Starts; return what cannot be mended by trying again."""
        if message.started:
            if len(message.started) % STARTED.itemsize:
                raise ProtocolError(f"{len(message.started)} bytes of started streams")
            records = np.frombuffer(message.started, STARTED)
            self.session.started_plain(records)
            if self._rollbacks_in_row:
                for partition in records["partition"].tolist():
                    self._rollbacks_in_row.pop(partition, None)
        refused: dict[str, list[int]] = {}
        fatal: UprError | None = None
        for answer in message.answers:
            if self.session.is_stale(answer.partition):
                continue
            kind = answer.WhichOneof("answer")
            if kind == "started":
                self._take_started(answer.partition, answer.started)
            elif kind == "rollback":
                self._take_rollback(answer.partition, answer.rollback)
            elif kind == "refused":
                problem = answer.refused
                self.session.refused(answer.partition, problem.retriable)
                if problem.retriable:
                    words = f"{problem.reason} ({problem.message})"
                    refused.setdefault(words, []).append(answer.partition)
                    self._wait(answer.partition, problem.reason, problem.message)
                else:
                    fatal = fatal or error_of(problem)
            else:
                raise ProtocolError(f"the answer for partition {answer.partition} is empty")
        for words, partitions in refused.items():
            self._say(f"{named(partitions)} refused: {words}; asking again after a pause")
        return fatal

    def _take_started(self, partition: int, started: stream_pb2.Started) -> None:
        until = started.until_seqno if started.HasField("until_seqno") else None
        begins = started.start_seqno if started.HasField("start_seqno") else None
        log = log_from_messages(started.failover_log)
        self.session.started(
            partition, started.token, started.failover_id, started.high_seqno, until, log, begins
        )
        self._rollbacks_in_row.pop(partition, None)
        if begins is not None:
            # Before any change: after a crash it would begin later, and what lies between would be missed.
            self.must_save += 1
            self._begun.append(partition)

    def take_begun(self) -> list[int]:
        """Return, once, the partitions that were started where they wanted to begin."""
        begun, self._begun = self._begun, []
        return begun

    def _wait(self, partition: int, reason: str, words: str) -> None:
        self.retries.failed(partition, self._clock.now(), self._clock.random())
        self._progress.failed(partition, reason, words, self._clock.now())

    def _take_rollback(self, partition: int, message: stream_pb2.Rollback) -> None:
        log = log_from_messages(message.failover_log)
        self.handshakes.append((partition, message.rule, message.words))
        self._progress.rollbacks[message.rule] += 1
        pending = self.session.rollback(
            partition, message.rollback_seqno, message.failover_id, message.rule, message.words, log
        )
        if pending is None:
            self.must_save += 1
        count = self._rollbacks_in_row.get(partition, 0) + 1
        self._rollbacks_in_row[partition] = count
        if count > _ROLLBACKS_MAX:
            self._wait(partition, "ROLLBACK", message.words)
            self._say(f"partition {partition} was told to roll back {count} times in a row")

    def take_ended(self, ended: stream_pb2.Ended) -> UprError | None:
        """Take the end of streams; return what cannot be mended by trying again."""
        streams = [(stream.partition, stream.token) for stream in ended.streams]
        problem = ended.problem
        partitions = self.session.ended(streams, problem.reason)
        fate = fate_of(problem.reason)
        if fate is Fate.FAILED and partitions:
            return error_of(problem)
        if fate is Fate.AGAIN and partitions:
            for partition in partitions:
                self._wait(partition, problem.reason, problem.message)
            self._say(
                f"{named(partitions)} ended: {problem.reason} ({problem.message}); starting again"
            )
        return None


def named(partitions: list[int]) -> str:
    """Return partitions for people."""
    if len(partitions) == 1:
        return f"partition {partitions[0]}"
    return f"{len(partitions)} partitions ({', '.join(map(str, partitions[:5]))}, ...)"
