"""A writer that keeps the rules of the wire, and a bucket, over refusals, lost answers, flushes and crashes.

Whatever happens, each part of a write is applied at most once, in the order in which it was submitted; one that is told
to have been applied before was, and one that was refused for good never is.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.buckets import Server
from upr.engine.partitions import ACTIVE, PENDING
from upr.engine.producers import ProducerCall
from upr_protocol.errors import OutOfOrderError

USED = (5, 6, 700)
PARTS = st.sets(st.sampled_from(USED), min_size=1)


@dataclass
class Pending:
    """A write of the client, or what is left of it."""

    id: int
    parts: set[int]
    number: int = 0
    unknown: bool = False


@dataclass
class Answer:
    """What the server answers to a write: taken or not, and the partitions that refused."""

    write: Pending
    taken: bool
    refused: set[int]


class WriterAndBucket(RuleBasedStateMachine):
    """The client's half as ``upr_client`` does it, the server's half itself."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.applied: dict[int, list[tuple[int, int]]] = {p: [] for p in USED}
        """For each partition (seqno, id of the write)."""
        self.failed: set[tuple[int, int]] = set()
        self.pending: list[Pending] = []
        self.submitted = self.last_number = 0
        self.call: ProducerCall | None = None
        self.previous = 0
        self.sent = 0
        self.answers: list[Answer] = []
        self.broken_off = self.broken = False

    # The client

    @rule(parts=PARTS)
    def submit(self, parts: set[int]) -> None:
        self.submitted += 1
        self.pending.append(Pending(self.submitted, parts))

    @precondition(lambda self: self.call is None)
    @rule()
    def connect(self) -> None:
        self.call = self.server.open()
        self.last_number = max(self.last_number, self.call.producer.last_number)
        self.previous = self.sent = 0
        self.answers = []
        self.broken_off = self.broken = False

    @precondition(lambda self: self.call and not self.broken_off and self.sent < len(self.pending))
    @rule(room=st.integers(0, 4))
    def send(self, room: int) -> None:
        assert self.call is not None
        write = self.pending[self.sent]
        self.sent += 1
        if not write.number:
            self.last_number += 1
            write.number = self.last_number
        previous, self.previous = self.previous, write.number
        try:
            self.call.check(write.number, previous)
        except OutOfOrderError:
            self.answers.append(Answer(write, False, set()))
            return
        if room:
            self.answers.append(self.number(write))
        else:
            self.answers.append(Answer(write, False, set()))

    def number(self, write: Pending) -> Answer:
        parts = sorted(write.parts)
        assert self.call is not None
        written = self.server.write(self.call, write.number, parts, b"%d" % write.id)
        for run in written.runs.tolist():
            partition, _, start, end = run[:4]
            known = [one for one, id_ in self.applied[partition] if id_ == write.id]
            if known:
                assert end in (0, *known), "told other seqnos than it was given"
            else:
                assert end == self.server.high(partition) == start + 1
                self.applied[partition].append((end, write.id))
        told = {int(p) for p in written.runs["partition"]}
        assert told | written.refused.keys() == write.parts
        return Answer(write, True, set(written.refused))

    @precondition(lambda self: self.call is not None and self.answers)
    @rule(for_good=st.booleans())
    def hear(self, for_good: bool) -> None:
        answer = self.answers.pop(0)
        write = answer.write
        if answer.taken and for_good:
            self.failed |= {(partition, write.id) for partition in answer.refused}
            answer.refused = set()
        if not answer.taken:
            self.broken = self.broken_off = True
        elif answer.refused:
            write.parts = answer.refused
            self.broken_off = True
        else:
            self.pending.remove(write)
            self.sent -= 1

    @precondition(lambda self: self.call is not None)
    @rule()
    def lose(self) -> None:
        """The connection is lost, with the answers that are on their way."""
        assert self.call is not None
        self.server.bucket.close_producer(self.call)
        self.call = None
        if not self.broken:
            for answer in self.answers:
                answer.write.unknown = True
        for write in reversed(self.pending):
            if write.unknown:
                break
            write.number = 0

    # The server

    @rule(partition=st.sampled_from(USED))
    def change_state(self, partition: int) -> None:
        state = self.server.bucket.partitions.state
        state[partition] = PENDING if state[partition] == ACTIVE else ACTIVE

    @rule()
    def commit(self) -> None:
        self.server.commit()

    @rule(slices=st.integers(0, 3))
    def flush(self, slices: int) -> None:
        self.server.flush(slices)

    @rule()
    def crash(self) -> None:
        if self.call is not None:
            self.lose()
        self.server.crash()
        for partition, given in self.applied.items():
            high = self.server.high(partition)
            self.applied[partition] = [one for one in given if one[0] <= high]

    # What holds

    @invariant()
    def in_order_and_once(self) -> None:
        for partition, given in self.applied.items():
            ids = [id_ for _, id_ in given]
            assert ids == sorted(set(ids)), f"partition {partition}: {ids}"
            assert not {(partition, id_) for id_ in ids} & self.failed, "refused, and applied"

    def teardown(self) -> None:
        """Nothing goes wrong any more: everything that is pending is applied."""
        wanted = [(partition, write.id) for write in self.pending for partition in write.parts]
        for partition in USED:
            self.server.bucket.partitions.state[partition] = ACTIVE
        if self.call is not None:
            self.lose()
        self.connect()
        while self.sent < len(self.pending):
            self.send(1)
        while self.answers:
            assert not self.answers[0].refused
            self.hear(False)
        self.in_order_and_once()
        for partition, id_ in wanted:
            assert id_ in [one for _, one in self.applied[partition]], "never applied"


def _test_case() -> Any:
    case = WriterAndBucket.TestCase
    case.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
    return case


TestWriterAndBucket = _test_case()
