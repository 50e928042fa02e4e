"""Places of a producer: several send under one name what may differ, and each content is applied once, all of it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.buckets import Server
from upr.engine.partitions import ACTIVE, PENDING
from upr.engine.producers import ProducerCall
from upr_protocol.errors import ContentDiffersError
from upr_protocol.write_places import PLACES, place_number
from upr_spark.sink.writers import Place, places

USED = (5, 6, 700)
A, B = b"\x01" * 32, b"\xf1" * 32
"""Two contents: the numbers of B are larger than those of A in the same place."""


# The server's half by itself


@pytest.mark.parametrize("then", ["at once", "committed", "flushed", "crashed", "flushed, crashed"])
@pytest.mark.parametrize(("first", "second"), [(A, B), (B, A)])
def test_a_place_has_the_content_that_came_first(then: str, first: bytes, second: bytes) -> None:
    server = Server()
    call = server.open()
    server.write(call, place_number(0, first), [5, 6])
    server.write(call, place_number(1, A), [5])
    if then != "at once":
        server.commit()
    if "flushed" in then:
        server.flush()
    if "crashed" in then:
        server.crash()
    call = server.open()
    for parts in ([5], [700], [5, 700]):
        with pytest.raises(ContentDiffersError, match=r"place 0 of write .* has another content"):
            server.write(call, place_number(0, second), parts)
    assert (call.carried, server.high(5), server.high(6), server.high(700)) == (0, 2, 1, 0)
    assert server.write(call, place_number(0, first), [5, 6]).duplicate
    # Another block of the same content, which is missing.
    assert not server.write(call, place_number(0, first) + 1, [700]).duplicate
    assert not server.write(call, place_number(2, second), [5]).duplicate
    assert server.high(5) == 3


@pytest.mark.parametrize("flushed", [False, True])
def test_a_place_that_was_passed_over_takes_nothing(flushed: bool) -> None:
    """In a partition that the later place has, it would be taken for applied."""
    server = Server()
    server.write(server.open(), place_number(7, A), [5])
    if flushed:
        server.commit()
        server.flush()
    for place in (0, 6):
        with pytest.raises(ContentDiffersError):
            server.write(server.open(), place_number(place, A), [6])
    assert not server.write(server.open(), place_number(PLACES - 1, B), [5]).duplicate


def test_a_place_keeps_its_content_when_what_was_applied_is_undone() -> None:
    """Else another content would come into the partition that was rolled back, and into no other."""
    server = Server()
    server.write(server.open(), place_number(0, B), [5, 6])
    server.commit()
    server.flush()
    logs = server.bucket.partitions
    logs.set_log(5, logs.logs[5].with_record(77, 0))
    logs.high[5] = logs.complete[5] = 0
    with pytest.raises(ContentDiffersError):
        server.write(server.open(), place_number(0, A), [5, 6])
    server.write(server.open(), place_number(0, B), [5, 6])
    assert (server.high(5), server.high(6)) == (1, 1)


# Attempts of a task, as Spark's sink makes them


@dataclass
class Attempt:
    """One attempt: chunks of one or two blocks. A chunk's digest is one of all chunks up to it."""

    chunks: list[bytes]
    places: Iterator[Place]
    at: int = 0
    place: Place | None = None
    moved: bool = False
    call: ProducerCall | None = None
    block: int = 0

    def lose_call(self) -> None:
        """Send the chunk again, from its first block on."""
        self.call, self.block = None, 0


class Attempts(RuleBasedStateMachine):
    """Attempts with the same rows or others, at the same time or after each other, which break off anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.attempts: list[Attempt] = []
        self.applied: dict[int, list[tuple[bytes, int, int]]] = {p: [] for p in USED}
        self.seqnos: dict[int, list[int]] = {p: [] for p in USED}

    @precondition(lambda self: len(self.attempts) < 3)
    @rule(contents=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def begin(self, contents: list[str]) -> None:
        chunks, digest = [], b""
        for content in contents:
            digest = hashlib.sha256(digest + content.encode()).digest()
            chunks.append(digest)
        self.attempts.append(Attempt(chunks, places("a task")))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), count=st.integers(1, 6))
    def go_on(self, data: Any, count: int) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        for _ in range(count):
            if attempt in self.attempts:
                self.step(attempt)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def break_off(self, data: Any) -> None:
        self.attempts.remove(data.draw(st.sampled_from(self.attempts)))

    def step(self, attempt: Attempt) -> None:
        """Send one block."""
        server, digest = self.server, attempt.chunks[attempt.at]
        if attempt.place is None:
            attempt.place = next(attempt.places)
        name, place = attempt.place
        if attempt.call is None:
            attempt.call = server.open(name.encode())
        parts = sorted({USED[(digest[0] + attempt.block) % 3], USED[digest[1] % 3]})
        before = {p: server.high(p) for p in parts}
        try:
            number = place_number(place, digest) + attempt.block
            written = server.write(attempt.call, number, parts)
        except ContentDiffersError:
            assert not attempt.moved, "refused under a name of its own content"
            assert before == {p: server.high(p) for p in parts}
            attempt.lose_call()
            attempt.places, attempt.place, attempt.moved = places(digest.hex()), None, True
            return
        for p in parts:
            if server.high(p) > before[p]:
                self.applied[p].append((digest, attempt.block, p))
                self.seqnos[p].append(server.high(p))
        if written.refused:
            # The SDK sends it again, under the same number and in a new call.
            attempt.lose_call()
            return
        attempt.block += 1
        if attempt.block == 1 + digest[2] % 2:
            # Acknowledged when it is on disk.
            server.commit()
            attempt.lose_call()
            attempt.place, attempt.moved = None, False
            attempt.at += 1
            if attempt.at == len(attempt.chunks):
                self.attempts.remove(attempt)
                self.check_whole(attempt)

    def check_whole(self, attempt: Attempt) -> None:
        for p in USED:
            wanted = [
                (digest, block, p)
                for digest in attempt.chunks
                for block in range(1 + digest[2] % 2)
                if p in (USED[(digest[0] + block) % 3], USED[digest[1] % 3])
            ]
            assert [one for one in self.applied[p] if one in wanted] == wanted, "in order, and once"

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
        self.server.crash()
        for attempt in self.attempts:
            attempt.lose_call()
        for p in USED:
            kept = sum(seqno <= self.server.high(p) for seqno in self.seqnos[p])
            del self.applied[p][kept:], self.seqnos[p][kept:]

    @invariant()
    def applied_once(self) -> None:
        for given in self.applied.values():
            assert len(set(given)) == len(given)

    def teardown(self) -> None:
        for p in USED:
            self.server.bucket.partitions.state[p] = ACTIVE
        for attempt in list(self.attempts):
            attempt.lose_call()
            while attempt in self.attempts:
                self.step(attempt)
        self.applied_once()


def _test_case() -> Any:
    case = Attempts.TestCase
    case.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
    return case


TestAttempts = _test_case()
