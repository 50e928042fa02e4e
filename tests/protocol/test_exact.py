"""A consumer that follows exactly to a pin: it ends there, as of it, or with SnapshotGoneError."""

from dataclasses import replace

import numpy as np
import pytest

from upr_protocol.block import Block, build_block, make_runs, sealed
from upr_protocol.consumer import Consumer, Fate, State, fate_of
from upr_protocol.errors import ProtocolError, SnapshotGoneError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import Pin, RollbackAnswer
from upr_protocol.position import Position

A, B = 0xA, 0xB
P, TOKEN = 7, 1


def log(*records: tuple[int, int]) -> FailoverLog:
    made = FailoverLog.born(records[0][0])
    for failover_id, seqno in records[1:]:
        made = made.with_record(failover_id, seqno)
    return made


def session(pin: Pin, position: Position | None = None) -> Consumer:
    made = Consumer([P], {P: position} if position else {}, exact={P: pin})
    made.opened(1)
    return made


def block(start: int, end: int, horizon: int) -> Block:
    rows = range(start, end)
    runs = make_runs([P], end - start, start, end, horizon, 1)
    built = build_block([b"%d" % i for i in rows], [b"v"] * len(rows))
    return sealed(replace(built, runs=runs))


def receive(to: Consumer, *runs: tuple[int, int, int]) -> None:
    for run in runs:
        delivery = to.frame([block(*run)], np.array([TOKEN]))
        assert delivery is not None
        to.acknowledge(delivery)


def test_every_start_carries_the_end_also_after_a_lost_call_and_a_rollback() -> None:
    s = session(Pin(A, 5))
    (start,) = s.starts([P])
    assert (start.until_exact, start.until_seqno, start.until_now) == (5, None, False)
    s.started(P, TOKEN, A, 9, 5, log((A, 0)))
    receive(s, (0, 3, 3))
    s.disconnected()
    (start,) = s.starts([P])
    assert (start.seqno, start.until_exact) == (3, 5)
    pending = s.rollback(P, RollbackAnswer(2, B, "RULE", "words", log((A, 0), (B, 2))))
    assert pending is not None
    s.undone(P)
    (start,) = s.starts([P])
    assert (start.seqno, start.failover_id, start.until_exact) == (0, B, 5)


def test_it_ends_at_its_pin() -> None:
    s = session(Pin(A, 5))
    s.starts([P])
    s.started(P, TOKEN, A, 9, 5, log((A, 0)))
    receive(s, (0, 3, 5), (3, 5, 5))
    assert s.ended([(P, TOKEN, None)], "FINISHED") == [P]
    assert s.state(P) is State.DONE
    assert s.finished


@pytest.mark.parametrize("horizon", [6, None])
def test_a_position_inside_a_range_is_not_as_of_the_pin(horizon: int | None) -> None:
    position = Position(1, A, A, 3, horizon, (), log((A, 0)))
    s = session(Pin(A, 3), position)
    s.starts([P])
    s.started(P, TOKEN, A, 9, 3, None)
    with pytest.raises(SnapshotGoneError, match="partition 7: the position at seqno 3"):
        s.ended([(P, TOKEN, None)], "FINISHED")
    assert s.state(P) is State.FAILED


def test_a_server_that_takes_no_note_of_the_end_breaks_the_protocol() -> None:
    for told in (None, 6):
        s = session(Pin(A, 5))
        s.starts([P])
        with pytest.raises(ProtocolError, match="exactly at 5"):
            s.started(P, TOKEN, A, 9, told, log((A, 0)))
        s.disconnected()
        assert s.ready().tolist() == [P]


@pytest.mark.parametrize(
    ("pin", "gone"),
    [
        (Pin(A, 5), True),
        (Pin(A, 4), False),
        (Pin(B, 9), False),
        (Pin(None, 9), False),
        (Pin(0xC, 1), True),
        (Pin(0xC, 0), False),
    ],
)
def test_a_pin_in_a_history_that_was_left_before_it_is_gone(pin: Pin, gone: bool) -> None:
    s = session(pin)
    s.starts([P])
    answered = log((A, 0), (B, 4))
    if not gone:
        s.started(P, TOKEN, B, 9, pin.seqno, answered)
        return
    with pytest.raises(SnapshotGoneError, match="history was left"):
        s.started(P, TOKEN, B, 9, pin.seqno, answered)
    # It is not tried again by itself.
    s.disconnected()
    assert s.state(P) is State.FAILED


def test_the_end_of_a_stream_with_snapshot_gone_is_not_tried_again() -> None:
    assert fate_of("SNAPSHOT_GONE") is Fate.FAILED
    s = session(Pin(A, 5))
    s.starts([P])
    s.started(P, TOKEN, A, 9, 5, log((A, 0)))
    assert s.ended([(P, TOKEN, None)], "SNAPSHOT_GONE") == [P]
    assert s.state(P) is State.FAILED
