"""The handshake against the reference model, and clients that follow its rules through branching histories."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import ModelBucket, ModelClient, ModelPartition, Run, partition_of
from upr_protocol import position as position_module
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import (
    RollbackAnswer,
    Rule,
    answer_hello,
    answer_start,
    boundary_of,
    older_ids_to_try,
    resume_after_rollback,
)
from upr_protocol.position import Position, thin_markers

A, B, C, X = 0xA, 0xB, 0xC, 0xF
LOG = FailoverLog.from_pairs([(A, 0), (B, 100), (C, 200)])


def start(
    seqno: int,
    failover_id: int | None = C,
    data_id: int | None = None,
    high: int = 300,
    purge: int = 0,
    active: bool = True,
    horizon: int | None = None,
) -> tuple[str, int | None, Rule, bool]:
    answer = answer_start(
        LOG,
        failover_id=failover_id,
        seqno=seqno,
        data_id=data_id,
        high_seqno=high,
        purge_seqno=purge,
        active=active,
        horizon=horizon,
    )
    assert answer.newest_id == C
    assert answer.words
    return answer.kind, answer.rollback_seqno, answer.rule, answer.alarm


def held(seqno: int, horizon: int | None, *markers: int, failover_id: int | None = A) -> Position:
    return Position(0, failover_id, failover_id, seqno, horizon, markers, None)


# The server.


def test_hello() -> None:
    new = answer_hello(LOG, None)
    assert (new.rollback_seqno, new.newest_id, new.rule) == (None, C, Rule.NEW_CLIENT)
    newest = answer_hello(LOG, C)
    assert (newest.rollback_seqno, newest.rule) == (None, Rule.NEWEST_ID)
    older = answer_hello(LOG, A)
    assert (older.rollback_seqno, older.newest_id) == (100, C)
    assert older.rule is Rule.NEXT_RECORD
    assert answer_hello(LOG, B).rollback_seqno == 200
    unknown = answer_hello(LOG, X)
    assert (unknown.rollback_seqno, unknown.rule) == (0, Rule.UNKNOWN_ID)


def test_the_words_have_the_numbers_and_the_ids() -> None:
    words = answer_hello(LOG, A).words
    assert "000000000000000a" in words
    assert "000000000000000b" in words
    assert "100" in words
    answer = answer_start(LOG, failover_id=C, seqno=301, data_id=C, high_seqno=300)
    for number in ("301", "300", "200", "000000000000000c"):
        assert number in answer.words


@pytest.mark.parametrize("failover_id", [0, -1, 2**64])
def test_a_bad_id_is_an_error(failover_id: int) -> None:
    with pytest.raises(InvalidArgumentError):
        answer_hello(LOG, failover_id)
    with pytest.raises(InvalidArgumentError):
        start(0, failover_id)
    with pytest.raises(InvalidArgumentError):
        start(0, C, failover_id)


def test_a_bad_seqno_is_an_error_whatever_the_id() -> None:
    for failover_id in (None, X, A, C):
        for seqno in (-1, 2**48):
            with pytest.raises(InvalidArgumentError):
                start(seqno, failover_id)
    with pytest.raises(InvalidArgumentError, match="high"):
        start(1, high=2**48)
    with pytest.raises(InvalidArgumentError, match="purge"):
        start(1, purge=2**48)


def test_start_under_the_newest_id() -> None:
    assert start(0) == ("started", None, Rule.NEWEST_ID, False)
    assert start(300, data_id=C) == ("started", None, Rule.NEWEST_ID, False)
    assert start(0, None) == ("started", None, Rule.NEW_CLIENT, False)


def test_start_without_an_id_claims_nothing() -> None:
    assert start(1, None) == ("rollback", 0, Rule.NEW_CLIENT, False)


def test_start_with_an_older_id_answers_as_hello() -> None:
    assert start(50, A) == ("rollback", 100, Rule.NEXT_RECORD, False)
    assert start(0, B) == ("rollback", 200, Rule.NEXT_RECORD, False)
    assert start(50, X) == ("rollback", 0, Rule.UNKNOWN_ID, False)


def test_start_checks_under_which_id_the_data_was_received() -> None:
    assert start(100, data_id=A)[0] == "started"
    assert start(101, data_id=A) == ("rollback", 100, Rule.DATA_ABOVE_NEXT_RECORD, False)
    assert start(200, data_id=B)[0] == "started"
    assert start(201, data_id=B) == ("rollback", 200, Rule.DATA_ABOVE_NEXT_RECORD, False)
    assert start(1, data_id=X) == ("rollback", 0, Rule.DATA_ID_UNKNOWN, False)
    assert start(0, data_id=X)[0] == "started"


def test_a_seqno_above_the_high_one() -> None:
    assert start(301, data_id=C) == ("rollback", 200, Rule.ABOVE_HIGH, True)
    assert start(301, data_id=C, active=False) == ("behind", None, Rule.BEHIND, False)


def test_a_horizon_proves_what_a_seqno_proves() -> None:
    # Whoever is told of a horizon was told by a server that had the rows up to there.
    for data_id in (C, None):
        for seqno in (250, 300):
            known = start(seqno, data_id=data_id, horizon=301)
            assert known == start(301, data_id=data_id) == ("rollback", 200, Rule.ABOVE_HIGH, True)
        behind = start(250, data_id=data_id, horizon=301, active=False)
        assert behind == ("behind", None, Rule.BEHIND, False)
        for horizon in (None, 250, 300):
            assert start(250, data_id=data_id, horizon=horizon)[0] == "started"
    # What was not received proves nothing.
    assert start(0, horizon=301)[0] == "started"
    # Rows may be missing that newer ones superseded which came after the histories parted.
    assert start(150, data_id=B, horizon=200)[0] == "started"
    parted = ("rollback", 200, Rule.DATA_ABOVE_NEXT_RECORD, False)
    assert start(150, data_id=B, horizon=201) == start(201, data_id=B) == parted
    with pytest.raises(InvalidArgumentError, match="horizon"):
        start(5, horizon=2**48)
    assert start(300, data_id=C, active=False)[0] == "started"


def test_a_seqno_below_the_purge_seqno() -> None:
    assert start(249, purge=250) == ("rollback", 0, Rule.BELOW_PURGE, False)
    assert start(250, purge=250)[0] == "started"
    assert start(0, purge=250)[0] == "started"


LOGS = st.lists(st.integers(0, 12), max_size=5)
SOME_ID = st.none() | st.integers(1, 8)


@given(LOGS, SOME_ID, SOME_ID, st.integers(0, 14), st.integers(0, 12), st.booleans())
@settings(max_examples=200)
def test_the_server_answers_as_the_model(
    failovers: list[int],
    failover_id: int | None,
    data_id: int | None,
    seqno: int,
    purge: int,
    active: bool,
) -> None:
    model = ModelPartition(1, log_limit=3)
    for new_id, at in enumerate(failovers, start=2):
        while model.high < 12:
            model.write(b"k", b"v")
        model.restart_unclean(at, new_id)
    model.purged = min(purge, model.high)
    log = FailoverLog.from_pairs(model.log)

    hello = answer_hello(log, failover_id)
    assert (
        "ok" if hello.rollback_seqno is None else "rollback",
        hello.rollback_seqno,
        hello.newest_id,
    ) == model.hello(failover_id)
    assert answer_hello(log, failover_id) == hello
    answer = answer_start(
        log,
        failover_id=failover_id,
        seqno=seqno,
        data_id=data_id,
        high_seqno=model.high,
        purge_seqno=model.purged,
        active=active,
    )
    assert (answer.kind, answer.rollback_seqno) == model.start(failover_id, seqno, data_id, active)
    assert answer.newest_id == model.newest_id
    assert (answer.rollback_seqno is not None) == (answer.kind == "rollback")
    assert answer.alarm == (answer.rule == Rule.ABOVE_HIGH)


# The client.


def test_nothing_to_undo_comes_first_also_exactly_there() -> None:
    for horizon in (400, 425, 426):
        point = resume_after_rollback(held(400, horizon, 380), 426)
        assert (point.seqno, point.undo, point.rule) == (400, False, Rule.NOTHING_TO_UNDO)
    point = resume_after_rollback(held(426, 426), 426)
    assert (point.seqno, point.rule) == (426, Rule.NOTHING_TO_UNDO)
    assert resume_after_rollback(held(0, None), 0).rule == Rule.NOTHING_TO_UNDO
    assert resume_after_rollback(held(0, 90), 50).undo is False


def test_a_horizon_above_or_unknown_needs_a_marker() -> None:
    for horizon in (427, None):
        point = resume_after_rollback(held(400, horizon, 350, 380), 426)
        assert (point.seqno, point.undo, point.rule) == (380, True, Rule.MARKER_BEFORE)
    standing = resume_after_rollback(held(400, None, 400), 426)
    assert (standing.seqno, standing.undo) == (400, False)


def test_before_and_at_or_before() -> None:
    position = held(434, 440, 418, 426)
    assert resume_after_rollback(position, 426).seqno == 418
    assert resume_after_rollback(position, 426, inclusive=True).seqno == 426
    assert resume_after_rollback(position, 427).seqno == 426


def test_no_marker_means_from_scratch() -> None:
    point = resume_after_rollback(held(434, 440, 426), 426)
    assert (point.seqno, point.undo, point.rule) == (0, True, Rule.NO_MARKER)
    assert resume_after_rollback(held(434, 440, 426), 0).seqno == 0


def test_a_lost_id_means_from_scratch() -> None:
    lost = held(300, 300, 300, failover_id=None)
    point = resume_after_rollback(lost, 400)
    assert (point.seqno, point.undo, point.rule) == (0, True, Rule.LOST_ID)


def test_a_rollback_is_checked() -> None:
    for seqno in (-1, 2**48):
        with pytest.raises(InvalidArgumentError):
            resume_after_rollback(held(5, 5), seqno)


def test_older_ids_come_with_their_own_next_record() -> None:
    position = replace(held(250, 250), failover_id=C, log=LOG)
    assert older_ids_to_try(position) == [(B, 200), (A, 100)]
    assert older_ids_to_try(replace(position, failover_id=B)) == [(A, 100)]
    assert older_ids_to_try(replace(position, failover_id=A)) == []


def test_a_log_that_cannot_tell_gives_no_older_ids() -> None:
    position = replace(held(250, 250), failover_id=X, log=LOG)
    assert older_ids_to_try(position) == []
    assert older_ids_to_try(replace(position, log=None)) == []
    assert older_ids_to_try(replace(position, failover_id=None)) == []


@pytest.mark.parametrize(
    ("records", "seqno"), [([(A, 0), (B, 100)], 90), ([(A, 0), (B, 80)], 80), ([(A, 0)], 90)]
)
def test_an_older_id_leads_to_where_the_first_of_both_logs_left_it(
    records: list[tuple[int, int]], seqno: int
) -> None:
    own, log = FailoverLog.from_pairs([(A, 0), (X, 90)]), FailoverLog.from_pairs(records)
    position = replace(held(250, 250), failover_id=X, log=own)
    answer = RollbackAnswer(0, log.newest.failover_id, "unknown_id", "", log)
    assert boundary_of(position, answer) == seqno


# Both, through branching histories.


@dataclass
class Rules:
    """What the simulated client does; the variants that are wrong show that the simulation would notice."""

    inclusive: bool = False
    mind_horizon: bool = True
    mind_own_next: bool = True
    refuse_false_markers: bool = True
    undo: bool = True
    limit: Callable[[int], int] = field(default=lambda seqno: seqno)


class World:
    """A partition whose nodes fail and are promoted, and one client that comes and goes."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.ids = count(2)
        self.server = ModelPartition(1, log_limit=self.random.choice([2, 4, 25]))
        self.replicas: list[ModelPartition] = []
        self.client = ModelClient()
        self.position = Position.fresh()
        self.longest_shake = 0

    def run(self) -> None:
        steps = (self.write, self.copy, self.promote, self.crash, self.follow, self.follow)
        for _ in range(20):
            self.random.choice(steps)()
        self.follow(to_the_end=True)

    def write(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            key = self.random.choice([b"a", b"b", b"c"])
            value = b"%d" % self.random.getrandbits(32)
            self.server.write(key, value if self.random.random() < 0.8 else None)

    def copy(self) -> None:
        self.replicas = [self.server.replica(), *self.replicas[:1]]

    def promote(self) -> None:
        if self.replicas:
            self.server = self.replicas.pop(self.random.randrange(len(self.replicas)))
            self.crash()

    def crash(self) -> None:
        high = self.server.high
        marker = self.random.randint(max(0, high - 9), high)
        self.server.restart_unclean(marker, next(self.ids))

    def follow(self, to_the_end: bool = False) -> None:
        if self.random.random() < 0.03:
            self.position = replace(self.position, failover_id=None, data_id=None)
        if self.random.random() < 0.1:
            self.position = replace(self.position, horizon=None)
        self.shake(calm=to_the_end)
        for run in self.present(to_the_end):
            part = None
            if not to_the_end and self.random.random() < 0.4:
                part = self.random.randint(0, len(run.rows))
            self.receive(run, part)
            if part is not None:
                return
        if to_the_end:
            assert self.client.seqno == self.server.high
            assert self.client.state == self.server.state_at(self.server.high)

    def shake(self, calm: bool) -> None:
        for attempt in range(12):
            self.longest_shake = max(self.longest_shake, attempt)
            log = FailoverLog.from_pairs(self.server.log)
            hello = answer_hello(log, self.position.failover_id)
            if self.position.failover_id is None:
                self.go_back(0, log)
            elif hello.rollback_seqno is not None:
                self.roll_back(hello.rollback_seqno, log)
            if not calm and attempt < 5 and self.random.random() < 0.2:
                self.random.choice([self.crash, self.promote, self.write])()
                log = FailoverLog.from_pairs(self.server.log)
            answer = answer_start(
                log,
                failover_id=self.position.failover_id,
                seqno=self.position.seqno,
                data_id=self.position.data_id,
                high_seqno=self.server.high,
            )
            assert not answer.alarm
            if answer.kind == "started":
                return
            assert answer.rollback_seqno is not None
            self.roll_back(answer.rollback_seqno, log)
        raise AssertionError("the handshake does not end")

    def roll_back(self, seqno: int, log: FailoverLog) -> None:
        if seqno == 0 and log.newest.failover_id != self.position.failover_id:
            for older, own_next in older_ids_to_try(self.position):
                again = answer_hello(log, older)
                if again.rollback_seqno != 0:
                    seqno = min(own_next, again.rollback_seqno or own_next)
                    if not self.rules.mind_own_next:
                        seqno = again.rollback_seqno or self.position.seqno
                    break
        position = self.position
        if not self.rules.mind_horizon:
            position = replace(position, horizon=position.seqno)
        point = resume_after_rollback(
            position, self.rules.limit(seqno), inclusive=self.rules.inclusive
        )
        assert point.undo == (point.seqno < position.seqno)
        self.go_back(point.seqno, log)

    def go_back(self, seqno: int, log: FailoverLog) -> None:
        newest = log.newest.failover_id
        if not self.rules.undo:
            self.position = replace(self.position, failover_id=newest, data_id=newest, log=log)
            return
        if seqno < self.client.seqno:
            self.client.undo(seqno)
        given = log if self.random.random() < 0.8 else None
        self.position = self.position.rolled_back(seqno, newest, given)

    def present(self, to_the_end: bool) -> list[Run]:
        above, high = self.position.seqno, self.server.high
        room = range(above + 1, high + 1)
        markers = set(self.random.sample(room, self.random.randint(0, len(room))))
        if to_the_end and room:
            markers.add(high)
        ends: dict[int, int] = {}
        before = above
        for marker in sorted(markers if self.random.random() < 0.5 else sorted(markers)[-1:]):
            inside = range(before + 1, marker)
            for end in self.random.sample(inside, min(len(inside), self.random.randint(0, 2))):
                ends[end] = marker
            ends[marker] = marker
            before = marker
        return self.server.runs(above, ends, lambda row: self.random.random() < 0.4)

    def receive(self, run: Run, rows: int | None) -> None:
        before = self.client.seqno
        if not self.rules.refuse_false_markers and run.horizon == run.end:
            self.client.horizon = 0
        self.client.receive(run, rows)
        if self.client.seqno == before:
            return
        if self.client.seqno in self.client.at_marker:
            assert self.client.state == self.server.state_at(self.client.seqno)
        # Few, so that it is often thinned out where to roll back to.
        with pytest.MonkeyPatch.context() as few:
            few.setattr(position_module, "MARKERS_NEWEST", 3)
            markers = thin_markers(sorted(set(self.client.at_marker) - {0}))
        self.position = replace(
            self.position,
            data_id=self.server.newest_id,
            seqno=self.client.seqno,
            horizon=max(self.client.horizon, self.client.seqno),
            markers=markers,
        )


@pytest.mark.parametrize("inclusive", [False, True])
def test_a_client_that_follows_the_rules_ends_with_the_server_state(inclusive: bool) -> None:
    longest = 0
    for seed in range(500):
        world = World(seed, Rules(inclusive=inclusive))
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, inclusive {inclusive}: {error}") from error
        longest = max(longest, world.longest_shake)
    assert longest >= 1


@pytest.mark.parametrize(
    "rules",
    [
        Rules(mind_horizon=False),
        Rules(mind_own_next=False),
        Rules(refuse_false_markers=False),
        Rules(undo=False),
        Rules(limit=lambda seqno: seqno + 1, inclusive=True),
    ],
    ids=[
        "ignores horizons",
        "ignores its own log",
        "takes false markers",
        "undoes nothing",
        "one too far",
    ],
)
def test_a_client_that_breaks_a_rule_is_noticed(rules: Rules) -> None:
    def run() -> None:
        for seed in range(500):
            World(seed, rules).run()

    with pytest.raises(AssertionError):
        run()


def test_the_model_bucket_is_the_sum_of_its_partitions() -> None:
    bucket = ModelBucket()
    for number in range(300):
        key = b"key-%d" % (number % 200)
        partition, seqno = bucket.write(key, b"%d" % number if number % 7 else None)
        assert partition == partition_of(key)
        assert seqno == bucket.partitions[partition].high
    expected = {b"key-%d" % (number % 200): b"%d" % number for number in range(300)}
    last = {key: number for number, key in enumerate(b"key-%d" % (n % 200) for n in range(300))}
    assert bucket.state() == {key: expected[key] for key, number in last.items() if number % 7}
