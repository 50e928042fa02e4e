"""A consumer whose partitions come and go."""

import numpy as np
import pytest

from tests.client.scripted import run_block
from upr_protocol.consumer import Consumer, State
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import RollbackAnswer
from upr_protocol.position import Position

A = 0xA
LOG = FailoverLog.born(A)
P, Q = 5, 6


def at(seqno: int, *markers: int) -> Position:
    return Position(77, A, A, seqno, seqno, markers, LOG)


def session() -> Consumer:
    found = Consumer((), lasting=True)
    found.opened(77)
    return found


def test_partitions_come_and_go() -> None:
    found = session()
    assert not found.finished
    found.follow({P: at(4, 2), Q: None})
    assert found.partitions == [P, Q]
    assert [(r.partition, r.seqno) for r in found.starts([P, Q])] == [(P, 4), (Q, 0)]
    found.started(P, 1, A, 9, None, None)
    found.unfollow([P])
    assert found.partitions == [Q]
    assert found.state(P) is State.IDLE
    assert not found.finished
    with pytest.raises(InvalidArgumentError, match="already"):
        found.follow({Q: None})
    found.follow({P: at(6)})
    assert found.position(P).seqno == 6
    assert found.position(P).markers == ()


def test_the_answer_to_a_start_of_before_is_told_apart() -> None:
    found = session()
    found.follow({P: at(4)})
    found.starts([P])
    found.unfollow([P])
    found.follow({P: at(6)})
    found.starts([P])
    assert found.is_stale(P), "the answer to the first Start"
    assert not found.is_stale(P)
    found.started(P, 2, A, 9, None, None)
    assert found.state(P) is State.LIVE
    found.unfollow([P])
    assert not found.is_stale(P), "its answer was there"
    found.follow({P: at(6)})
    found.starts([P])
    found.unfollow([P])
    found.disconnected()
    assert not found.is_stale(P), "in another call nothing of that comes"


def test_what_is_to_be_handed_over_keeps_its_position_and_takes_nothing() -> None:
    found = session()
    found.follow({P: at(4, 4)})
    found.starts([P])
    found.started(P, 1, A, 9, None, None)
    found.finish([P])
    assert found.position(P) == at(4, 4)
    assert found.ready().tolist() == []
    found.disconnected()
    assert found.ready().tolist() == []


def test_a_pending_rollback_goes_with_its_partition() -> None:
    found = session()
    found.follow({P: at(4, 2)})
    found.starts([P])
    assert found.rollback(
        P, RollbackAnswer(3, 0xB, "r", "w", FailoverLog.from_pairs([(A, 0), (0xB, 3)]))
    )
    found.unfollow([P])
    assert found.undoing == []
    with pytest.raises(InvalidArgumentError, match="no rollback"):
        found.undone(P)


def test_a_beginning_is_asked_for_where_nothing_is_held() -> None:
    found = Consumer([P, Q], {Q: at(3)}, beginning="now")
    found.opened(77)
    one, other = found.starts([P, Q])
    assert (one.beginning, one.failover_id, one.data_id) == ("now", None, None)
    assert (other.beginning, other.failover_id, other.seqno) == (None, A, 3)
    found.started(P, 1, A, 9, None, LOG, 9)
    position = found.position(P)
    assert (position.seqno, position.horizon, position.markers) == (9, 9, (9,))
    assert (position.failover_id, position.data_id) == (A, A)
    assert P in found.take_changed()


def test_after_a_rollback_to_0_the_beginning_holds_again() -> None:
    found = Consumer([P], {P: at(3, 3)}, beginning=1_000_000)
    found.opened(77)
    found.starts([P])
    pending = found.rollback(
        P, RollbackAnswer(2, 0xB, "r", "w", FailoverLog.from_pairs([(A, 0), (0xB, 2)]))
    )
    assert pending is not None
    found.undone(P)
    (request,) = found.starts([P])
    assert (request.beginning, request.failover_id, request.seqno) == (1_000_000, None, 0)


def test_a_rollback_to_where_it_began_goes_no_further() -> None:
    found = Consumer([P], {P: Position(77, A, A, 5, 5, (3, 5), LOG)}, beginning="now")
    found.opened(77)
    found.starts([P])
    log = FailoverLog.from_pairs([(A, 0), (0xB, 3)])
    pending = found.rollback(P, RollbackAnswer(3, 0xB, "r", "w", log))
    assert pending is not None
    assert pending.seqno == 3


def test_restarting_undoes_everything_whenever_something_is() -> None:
    log = FailoverLog.from_pairs([(A, 0), (0xB, 3)])
    for restart, to in ((False, 2), (True, 0)):
        found = Consumer([P], {P: at(4, 1, 2)}, restart=restart)
        found.opened(77)
        found.starts([P])
        pending = found.rollback(P, RollbackAnswer(3, 0xB, "r", "w", log))
        assert pending is not None
        assert pending.seqno == to
    found = Consumer([P], {P: at(3, 3)}, restart=True)
    found.opened(77)
    found.starts([P])
    assert found.rollback(P, RollbackAnswer(3, 0xB, "r", "w", log)) is None, (
        "nothing was to be undone"
    )


def test_what_is_not_handed_over_after_all_goes_on_where_it_stood() -> None:
    found = session()
    found.follow({P: at(4, 4)})
    found.starts([P])
    found.started(P, 1, A, 9, None, None)
    found.finish([P])
    found.resume([P])
    (request,) = found.starts([P])
    assert (request.seqno, request.failover_id) == (4, A)


def test_a_delivery_moves_nothing_of_a_partition_that_went_meanwhile() -> None:
    found = session()
    found.follow({P: at(4, 4), Q: at(4, 4)})
    found.starts([P, Q])
    for number, partition in enumerate((P, Q)):
        found.started(partition, number, A, 9, None, None)
    found.take_changed()
    delivery = found.frame([run_block(P, 4, 6), run_block(Q, 4, 6)], np.array([0, 1]))
    assert delivery is not None
    found.unfollow([P])
    found.acknowledge(delivery)
    assert found.take_changed() == [Q]
    assert found.position(Q).seqno == 6


def test_what_came_over_another_call_is_unsure_until_the_server_answered_its_start() -> None:
    found = session()
    found.follow({P: None, Q: None})
    for partition in (P, Q):
        found.starts([partition])
        found.started(partition, partition, A, 9, None, LOG)
        found.take_changed()
    delivery = found.frame([run_block(P, 0, 4), run_block(Q, 0, 4)], np.array([P, Q]))
    assert delivery is not None
    found.acknowledge(delivery)
    assert found.has_sure_change
    found.opened(77)
    assert found.has_changed
    assert not found.has_sure_change
    assert found.take_changed(sure=True) == []
    found.starts([P, Q])
    # One server has it all, and lacks some of the other.
    found.started(P, 1, A, 9, None, None)
    assert found.take_changed(sure=True) == [P]
    told = RollbackAnswer(0, 0xB, "no_common_id", "", FailoverLog.born(0xB))
    assert found.rollback(Q, told) is not None
    assert found.is_unsure(Q)
    assert found.take_changed(sure=True) == []
    found.undone(Q)
    assert found.take_changed(sure=True) == [Q]
    # That is to be stored before its next Start, over whichever call.
    found.mark_changed([Q])
    found.opened(77)
    assert found.take_changed(sure=True) == [Q]
