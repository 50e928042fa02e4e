"""Partitions as the server tells of them: started, rolled back, ended, waiting."""

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from upr_client import backoff
from upr_client.changes.link import Clock
from upr_client.changes.status import Progress
from upr_client.endpoints import is_elsewhere
from upr_protocol.consumer import Consumer, Fate, State, fate_of
from upr_protocol.errors import ProtocolError, UprError
from upr_protocol.handshake import RollbackAnswer
from upr_protocol.position_table import STARTED
from upr_protocol.wire.codec import log_from_messages
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1.types_pb2 import Problem

_ROLLBACKS_MAX: Final = 3
"""Rollbacks of a partition in a row after which its next Start waits."""

_LASTING: Final = frozenset({"PARTITION_NOT_ACTIVE", "DATA_DAMAGED", "STORAGE_ERROR"})
"""Reasons that, if not retriable, make a partition wait for an operator while others continue."""


class PartitionStates:
    """Takes what the server says about partitions.

    Attributes:
        session: the state machine of the partitions.
        retries: when each partition may be started again.
        handshakes: the newest rollback answers: partition, rule, words.
        urgent: count of position changes that must be stored before their Start is sent.
        stuck: partitions that wait for an operator, and why.
        elsewhere: why the last answers refused a partition that another server may start, None where none did.
    """

    def __init__(
        self,
        session: Consumer,
        progress: Progress,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.session = session
        self.retries = backoff.Retries()
        self.handshakes: deque[tuple[int, str, str]] = deque(maxlen=4096)
        self.urgent = 0
        self.stuck: dict[int, UprError] = {}
        self.elsewhere: UprError | None = None
        self._progress = progress
        self._say = say
        self._clock = clock
        self._rollbacks_in_row: dict[int, int] = {}
        self._begun: list[int] = []

    def take_answers(self, message: stream_pb2.StartAnswers) -> UprError | None:
        """Take the answers to Starts; return what cannot be mended by trying again."""
        if message.started:
            if len(message.started) % STARTED.itemsize:
                raise ProtocolError(f"{len(message.started)} bytes of started streams")
            records = np.frombuffer(message.started, STARTED)
            self.session.started_plain(records)
            if self._rollbacks_in_row or self.stuck:
                for partition in records["partition"].tolist():
                    self._rollbacks_in_row.pop(partition, None)
                    self.stuck.pop(partition, None)
        refused: dict[str, list[int]] = {}
        fatal: UprError | None = None
        self.elsewhere = None
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
                if is_elsewhere(refusal := error_of(problem)):
                    self.elsewhere = refusal
                again = problem.retriable or is_lasting(problem)
                self.session.refused(answer.partition, again)
                if again:
                    words = f"{problem.reason} ({problem.message})"
                    if self._wait(answer.partition, problem, refused=True):
                        refused.setdefault(words, []).append(answer.partition)
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
        self.stuck.pop(partition, None)
        if begins is not None:
            # Before any change: after a crash it would begin later, and what lies between would be missed.
            self.urgent += 1
            self._begun.append(partition)

    def take_begun(self) -> list[int]:
        """Return, once, the partitions that were started where they wanted to begin."""
        begun, self._begun = self._begun, []
        return begun

    def _wait(self, partition: int, problem: Problem, *, refused: bool = False) -> bool:
        """Delay a partition's next Start; return whether to report it: a lasting problem is reported once."""
        lasting, now = is_lasting(problem), self._clock.now()
        self.retries.failed(partition, now, self._clock.random(), lasting=lasting)
        is_news = self._progress.failed(partition, problem.reason, problem.message, now)
        if lasting and (refused or not is_news):
            # A stream that was ended gets a second try before the partition is given up.
            self.stuck[partition] = error_of(problem)
        return is_news or not lasting

    def nothing_left(self) -> UprError | None:
        """Return the error if all partitions that have not ended are stuck; else None."""
        waiting = [p for p in self.session.partitions if self.session.state(p) is not State.DONE]
        if not waiting or any(
            p not in self.stuck or self.session.state(p) is not State.READY for p in waiting
        ):
            return None
        first, others = self.stuck[waiting[0]], len(self.session.partitions) - len(waiting)
        words = f"{named(waiting)} cannot be read: {first.message}"
        if others:
            words += "; the others were read to their end"
        return type(first)(words, hint=first.hint, reason=first.reason, retriable=False)

    def _take_rollback(self, partition: int, message: stream_pb2.Rollback) -> None:
        log = log_from_messages(message.failover_log)
        self.stuck.pop(partition, None)
        self.handshakes.append((partition, message.rule, message.words))
        self._progress.rollbacks[message.rule] += 1
        told = RollbackAnswer(
            message.rollback_seqno, message.failover_id, message.rule, message.words, log
        )
        pending = self.session.rollback(partition, told)
        if pending is None:
            self.urgent += 1
        count = self._rollbacks_in_row.get(partition, 0) + 1
        self._rollbacks_in_row[partition] = count
        if count > _ROLLBACKS_MAX:
            self._wait(partition, Problem(reason="ROLLBACK", message=message.words, retriable=True))
            self._say(f"partition {partition} was told to roll back {count} times in a row")

    def take_ended(self, ended: stream_pb2.Ended) -> UprError | None:
        """Take the end of streams; return what cannot be mended by trying again."""
        streams = [
            (one.partition, one.token, one.seqno if one.HasField("seqno") else None)
            for one in ended.streams
        ]
        problem = ended.problem
        partitions = self.session.ended(streams, problem.reason)
        fate = fate_of(problem.reason)
        if fate is Fate.FAILED and partitions:
            return error_of(problem)
        if fate is Fate.AGAIN and partitions:
            said = [partition for partition in partitions if self._wait(partition, problem)]
            if said:
                self._say(
                    f"{named(said)} ended: {problem.reason} ({problem.message}); starting again"
                )
        return None


def is_lasting(problem: Problem) -> bool:
    """Return whether an operator must fix a partition before it can be started again."""
    return not problem.retriable and problem.reason in _LASTING


def named(partitions: list[int]) -> str:
    """Return partitions for people."""
    if len(partitions) == 1:
        return f"partition {partitions[0]}"
    return f"{len(partitions)} partitions ({', '.join(map(str, partitions[:5]))}, ...)"
