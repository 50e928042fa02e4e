"""A consumer whose positions belong to a bucket that was dropped and created again."""

import random
from dataclasses import replace

import pytest

from upr_protocol.consumer import Consumer, State
from upr_protocol.errors import PositionBucketError, ProtocolError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import BUCKET_GONE_RULE, RollbackAnswer
from upr_protocol.position import Position

OLD, NEW, NEWER = 11, 12, 13
LOG = FailoverLog.from_pairs([(5, 0), (6, 3)])
OLD_AT_7 = Position(OLD, 6, 6, 7, 7, (3, 7), LOG)


def rolled(session: Consumer, partition: int, newest_id: int) -> None:
    """Have the server answer the Start, and the application undo."""
    pending = session.rollback(
        partition, RollbackAnswer(0, newest_id, "new_client", "", FailoverLog.born(newest_id))
    )
    assert pending is not None
    assert (pending.seqno, pending.rule) == (0, BUCKET_GONE_RULE)
    session.undone(partition)


def test_only_what_has_something_is_rolled_back() -> None:
    empty = Position(OLD, 6, None, 0, 0, (), LOG)
    session = Consumer([1, 2, 3], {1: OLD_AT_7, 2: empty})
    session.opened(NEW)
    assert session.position(1) == OLD_AT_7
    assert session.position(2) == session.position(3) == Position.fresh(NEW)
    assert session.take_changed() == [2]
    one, two, three = session.starts([1, 2, 3])
    assert (one.seqno, one.failover_id, one.data_id) == (7, None, None)
    assert [(s.seqno, s.failover_id) for s in (two, three)] == [(0, None)] * 2
    rolled(session, 1, 9)
    assert session.position(1) == Position(NEW, 9, None, 0, 0, (), FailoverLog.born(9))
    assert session.take_changed() == [1]


def test_positions_of_two_versions_are_what_a_crash_while_undoing_leaves() -> None:
    session = Consumer([1, 2], {1: OLD_AT_7, 2: Position(NEW, 9, 9, 4, 4, (4,), None)})
    assert session.bucket_version == 0
    session.opened(NEW)
    assert session.position(2).seqno == 4
    one, two = session.starts([1, 2])
    assert (one.failover_id, two.failover_id, two.seqno) == (None, 9, 4)
    rolled(session, 1, 8)
    session.started(2, 70, 9, 4, None, None)
    assert session.state(2) is State.LIVE


def test_a_third_version_while_the_data_of_the_first_is_undone() -> None:
    session = Consumer([1], {1: OLD_AT_7})
    session.opened(NEW)
    session.starts([1])
    pending = session.rollback(1, RollbackAnswer(0, 9, "new_client", "", FailoverLog.born(9)))
    assert pending is not None
    session.disconnected()
    session.opened(NEWER)
    assert session.position(1) == OLD_AT_7
    session.undone(1)
    assert session.position(1) == Position.fresh(NEWER)
    (start,) = session.starts([1])
    assert (start.seqno, start.failover_id) == (0, None)


def test_a_server_that_starts_the_old_position_is_not_believed() -> None:
    session = Consumer([1], {1: OLD_AT_7})
    session.opened(NEW)
    session.starts([1])
    with pytest.raises(ProtocolError, match="without an id"):
        session.started(1, 70, 9, 8, None, FailoverLog.born(9))


@pytest.mark.parametrize("seed", range(30))
def test_no_stored_position_ever_pairs_a_version_with_the_data_of_another(seed: int) -> None:
    """Drops, lost calls and crashes at any time: what is stored names the version that the data is of."""
    rng = random.Random(seed)
    partitions = range(4)
    version, ids, tokens = 1, iter(range(100, 10**6)), iter(range(1, 10**6))
    newest = {p: next(ids) for p in partitions}
    data: dict[int, tuple[int, int]] = {p: (0, 0) for p in partitions}
    stored: dict[int, Position] = {}
    session = Consumer(partitions)
    rollbacks = 0
    for _ in range(300):
        kind = rng.choice(["drop", "lose", "crash", "go", "go", "go", "save"])
        if kind == "drop":
            version += 1
            newest = {p: next(ids) for p in partitions}
            session.disconnected()
        elif kind == "lose":
            session.disconnected()
        elif kind == "crash":
            session = Consumer(partitions, stored)
        elif kind == "save":
            for p in session.take_changed():
                stored[p] = session.position(p)
        else:
            session.opened(version)
            for p in [u.partition for u in session.undoing if rng.random() < 0.7]:
                data[p] = (0, 0)
                session.undone(p)
                stored[p] = session.position(p)
            for start in session.starts(session.ready().tolist()):
                p, log = start.partition, FailoverLog.born(newest[start.partition])
                if start.seqno and start.failover_id != newest[p]:
                    rollbacks += 1
                    assert (
                        session.rollback(p, RollbackAnswer(0, newest[p], "x", "", log)) is not None
                    )
                    continue
                session.started(p, next(tokens), newest[p], start.seqno + 5, None, log)
                assert data[p][1] == 0 or data[p][0] == version
                position = session.position(p)
                # As after a frame that was taken and stored.
                data[p] = (version, position.seqno + 1)
                new = Position(
                    version, newest[p], newest[p], position.seqno + 1, position.seqno + 1, (), log
                )
                session._set_position(p, new)
                stored[p] = new
            session.disconnected()
        for p, position in stored.items():
            assert position.seqno == 0 or position.bucket_version == data[p][0] or data[p][1] == 0
    assert rollbacks


def named(position: Position, bucket: str) -> Position:
    return replace(position, bucket=bucket)


def test_a_position_of_a_bucket_of_another_name_is_refused() -> None:
    for version in (OLD, NEW):
        other = replace(OLD_AT_7, bucket="orders", bucket_version=version)
        with pytest.raises(PositionBucketError, match="'orders'; must be 'people'"):
            Consumer([1], {1: other}, bucket="people")
        session = Consumer([], lasting=True, bucket="people")
        with pytest.raises(PositionBucketError):
            session.follow({1: other})
    # Only the same name with another version is a bucket that was made anew.
    session = Consumer([1], {1: named(OLD_AT_7, "orders")}, bucket="orders")
    session.opened(NEW)
    session.starts([1])
    rolled(session, 1, 9)
    assert session.position(1) == Position(
        NEW, 9, None, 0, 0, (), FailoverLog.born(9), bucket="orders"
    )


def test_a_position_without_a_name_is_completed_once_its_bucket_is_met() -> None:
    session = Consumer([1, 2, 3], {1: OLD_AT_7, 2: OLD_AT_7}, bucket="orders")
    assert session.take_changed() == []
    session.opened(OLD)
    assert session.take_changed() == [1, 2]
    assert session.position(1) == named(OLD_AT_7, "orders")
    session.disconnected()
    session.opened(OLD)
    assert session.take_changed() == []
    # Of another version it may be of another bucket: nothing is said until its data is undone.
    session = Consumer([1], {1: OLD_AT_7}, bucket="orders")
    session.opened(NEW)
    assert session.take_changed() == []
    session.starts([1])
    rolled(session, 1, 9)
    assert session.take_changed() == [1]
