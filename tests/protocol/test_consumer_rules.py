"""Single rules of the consumer's state machine that the model runs do not single out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from upr_protocol.block import Block, build_block, make_runs, sealed
from upr_protocol.consumer import Consumer, State
from upr_protocol.errors import ProtocolError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import BUCKET_GONE_RULE, RollbackAnswer
from upr_protocol.position import Position
from upr_protocol.position_table import PositionTable

A, B, C, D = 0xA, 0xB, 0xC, 0xD
P = 7
VERSION, NEW_VERSION = 11, 12
LOG = FailoverLog.from_pairs([(A, 0), (B, 3)])
AT_3 = Position(VERSION, A, A, 3, 3, (3,), FailoverLog.born(A))


def block(start: int, end: int) -> Block:
    rows = range(start, end)
    built = build_block([b"%d" % i for i in rows], [b"v"] * len(rows))
    return sealed(replace(built, runs=make_runs([P], len(rows), start, end, end, 1)))


def live(token: int, failover_id: int, position: Position) -> Consumer:
    session = Consumer([P], {P: position})
    session.opened(VERSION)
    session.starts([P])
    session.started(P, token, failover_id, 9, None, LOG)
    return session


def test_data_is_of_the_id_of_the_stream_that_brought_it() -> None:
    session = live(1, B, replace(AT_3, failover_id=B, log=LOG))
    assert (session.position(P).failover_id, session.position(P).data_id) == (B, A)
    delivery = session.frame([block(3, 5)], np.array([1]))
    assert delivery is not None
    session.acknowledge_part(delivery, 0, 4)
    assert (session.position(P).seqno, session.position(P).data_id) == (4, B)
    session.acknowledge(delivery)
    assert (session.position(P).seqno, session.position(P).data_id) == (5, B)


def test_a_whole_delivery_changes_the_id_of_the_data_too() -> None:
    session = live(1, B, replace(AT_3, failover_id=B, log=LOG))
    delivery = session.frame([block(3, 5)], np.array([1]))
    assert delivery is not None
    session.acknowledge(delivery)
    assert (session.position(P).seqno, session.position(P).data_id) == (5, B)


def test_the_end_of_a_stream_that_was_replaced_ends_nothing() -> None:
    session = live(1, B, replace(AT_3, failover_id=B, log=LOG))
    session.disconnected()
    session.starts([P])
    session.started(P, 2, B, 9, None, None)
    assert session.ended([(P, 1, None)], "STOPPED") == []
    assert session.state(P) is State.LIVE
    assert session.ended([(P, 2, 3)], "FINISHED") == [P]
    assert session.state(P) is State.DONE


def test_a_stream_that_ended_above_what_came_of_it_is_no_end() -> None:
    session = live(1, B, replace(AT_3, failover_id=B, log=LOG))
    with pytest.raises(ProtocolError, match=r"ended at seqno 4.* reaches 3"):
        session.ended([(P, 1, 4)], "FINISHED")
    assert session.state(P) is State.LIVE


def test_a_position_of_a_dropped_bucket_goes_back_to_0_whatever_is_answered() -> None:
    session = Consumer([P], {P: AT_3})
    session.opened(NEW_VERSION)
    session.starts([P])
    pending = session.rollback(P, RollbackAnswer(3, B, "next_record", "", LOG))
    assert pending is not None
    assert (pending.from_seqno, pending.seqno, pending.rule) == (3, 0, BUCKET_GONE_RULE)


def test_a_run_that_does_not_go_on_where_the_partition_stands_is_refused() -> None:
    for start in (2, 4):
        session = live(1, B, replace(AT_3, failover_id=B, log=LOG))
        with pytest.raises(
            ProtocolError, match=f"is at seqno 3, but the frame continues at {start}"
        ):
            session.frame([block(start, 6)], np.array([1]))


def test_an_older_id_that_the_server_knows_saves_what_can_be_saved() -> None:
    own = FailoverLog.from_pairs([(A, 0), (B, 3), (C, 6)])
    session = Consumer([P], {P: Position(VERSION, C, C, 8, 8, (2, 5, 8), own)})
    session.opened(VERSION)
    session.starts([P])
    server = FailoverLog.from_pairs([(A, 0), (B, 3), (D, 4)])
    pending = session.rollback(P, RollbackAnswer(0, D, "unknown_id", "", server))
    assert pending is not None
    assert pending.seqno == 2


def test_starts_tell_the_horizon_where_it_is_known() -> None:
    positions = {
        p: Position(VERSION, A, A, seqno, horizon, (), FailoverLog.born(A))
        for p, (seqno, horizon) in enumerate(((5, 9), (5, 5), (5, None), (0, 0)))
    }
    told = [9, 5, None, None]
    session = Consumer(positions, positions)
    session.opened(VERSION)
    assert [request.horizon for request in session.starts(positions)] == told
    session = Consumer(positions, positions)
    session.opened(VERSION)
    records = session.plain_starts(positions)
    assert records is not None
    assert records["horizon"].tolist() == [horizon or 0 for horizon in told]


@pytest.mark.parametrize("extra", [5000, "meta"])
def test_what_a_store_returns_beyond_what_was_asked_is_not_looked_at(extra: Any) -> None:
    for kept in ({P: AT_3, extra: AT_3}, {extra: AT_3}):
        session = Consumer([P], kept)
        assert session.position(P).seqno == (3 if P in kept else 0)
        assert session.positions([P]).keys() == {P}


UNDONE = {
    "to a marker": Position(VERSION, A, A, 9, 9, (0, 2, 5, 9), FailoverLog.born(A)),
    "with more markers than stay": Position(VERSION, A, A, 999, 999, tuple(range(936, 1000)), LOG),
    "to 0": Position(VERSION, A, A, 4, None, (), None),
}


@pytest.mark.parametrize("name", UNDONE)
def test_undoing_takes_the_position_of_the_rollback_without_a_table(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 1,024 partitions are undone one by one, and a table of one each took a quarter of a second."""
    at = UNDONE[name]
    session = Consumer([P, P + 1], {P: at, P + 1: AT_3})
    session.opened(VERSION)
    session.starts([P])
    pending = session.rollback(
        P, RollbackAnswer(at.seqno - 1, D, "", "", FailoverLog.from_pairs([(A, 0), (D, 2)]))
    )
    assert pending is not None

    def none(*_: object) -> None:
        raise AssertionError("a table was made")

    with monkeypatch.context() as patch:
        patch.setattr(PositionTable, "of", none)
        session.undone(P)
    expected = {P: replace(pending.after, markers=tuple(m for m in pending.after.markers if m))}
    assert session.position(P) == expected[P]
    assert session.positions([P]) == expected
    assert session.positions([P + 1]) == {P + 1: AT_3}
    # As if it had been loaded.
    assert Consumer([P], expected).starts([P]) == session.starts([P])


def test_an_empty_partition_of_a_dropped_bucket_is_new_without_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Begun at 0 under an id, and with what was received since then undone.
    session = Consumer([P], {P: Position(VERSION, A, A, 0, 0, (), FailoverLog.born(A))})
    monkeypatch.delattr(PositionTable, "of")
    session.opened(NEW_VERSION)
    assert session.position(P) == Position.fresh(NEW_VERSION)
    assert session.take_changed() == [P]
