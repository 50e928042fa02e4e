"""Plain starts against the same starts decided one by one: the answers and the streams are the same."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.buckets import commit, flush, write
from upr.engine.bucket import Bucket
from upr.engine.follower import Follower
from upr.engine.partitions import ACTIVE, DEAD, PENDING, REPLICA, Partitions
from upr.engine.streams import FollowOptions, PlainStarts, Started, StartRequest
from upr.storage.keyspace import PartitionRow
from upr.storage.store import Identity
from upr_protocol.errors import InvalidArgumentError, StorageFailedError
from upr_protocol.failover import FailoverLog
from upr_protocol.flow import CreditWindow
from upr_protocol.position_table import START

LOGS = (
    FailoverLog.born(0xA),
    FailoverLog.from_pairs([(0xA, 0), (0xB, 1)]),
    FailoverLog.from_pairs([(0xA, 0), (0xB, 1), (0xC, 3)]),
)
SOME = range(6)


@dataclass(frozen=True)
class Ask:
    failover_id: int
    seqno: int
    data_id: int
    horizon: int


def world(logs: list[int], states: list[int], purges: list[int], highs: list[int]) -> Bucket:
    rows = [PartitionRow(ACTIVE, 1, 0, 0, 0, FailoverLog.born(p + 1000)) for p in range(1024)]
    bucket = Bucket(Identity("b", 1), Partitions.from_rows(rows), 1, proven=False)
    for p in SOME:
        for _ in range(highs[p]):
            write(bucket, p)
    commit(bucket)
    if any(highs):
        flush(bucket)
    for p in SOME:
        if highs[p] % 2:
            write(bucket, p)
        bucket.partitions.set_log(p, LOGS[logs[p]])
        bucket.partitions.purge[p] = purges[p]
        bucket.partitions.state[p] = states[p]
        bucket.partitions.problems.setdefault(p, StorageFailedError("why"))
    commit(bucket)
    return bucket


def six(of: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(of, min_size=6, max_size=6)


IDS = st.sampled_from([0, 0xA, 0xB, 0xC, 0xD])
ASKS = st.lists(
    st.builds(Ask, IDS, st.integers(0, 7), IDS, st.integers(0, 8)), min_size=6, max_size=6
)


# A horizon above the high seqno under the newest id: a failover record is missing.
@example([0] * 6, [ACTIVE] * 6, [0] * 6, [2] * 6, [Ask(0xA, 1, 0xA, 5)] * 6, False, False)
@settings(max_examples=60, deadline=None)
@given(
    six(st.integers(0, 2)),
    six(st.sampled_from([ACTIVE, ACTIVE, REPLICA, PENDING, DEAD])),
    six(st.integers(0, 3)),
    six(st.integers(0, 5)),
    ASKS,
    st.booleans(),
    st.booleans(),
)
def test_the_answers_are_those_of_one_by_one(
    logs: list[int],
    states: list[int],
    purges: list[int],
    highs: list[int],
    asks: list[Ask],
    until_now: bool,
    open_already: bool,
) -> None:
    bucket = world(logs, states, purges, highs)
    table = np.zeros(len(asks), START)
    table["partition"] = SOME
    for name in ("failover_id", "seqno", "data_id", "horizon"):
        table[name] = [getattr(ask, name) for ask in asks]
    both = []
    for _ in range(2):
        follower = Follower(bucket, FollowOptions(), CreditWindow(1 << 20), lambda: None)
        if open_already:
            follower.start([StartRequest(0, None, 0, None)])
        both.append(follower)
    quick, slow = both
    plain = PlainStarts.read(table.tobytes(), until_now)
    opened, others = quick.start_plain(plain)
    answers = {answer.partition: answer for answer in quick.start(others)}
    expected = {a.partition: a for a in slow.start(plain.requests(np.ones(6, bool)))}
    for record in opened:
        told = expected.pop(int(record["partition"]))
        assert isinstance(told, Started)
        assert int(record["failover_id"]) == told.failover_id
        assert int(record["high_seqno"]) == told.high_seqno
        assert int(record["purge_seqno"]) == told.purge_seqno
        assert told.until_seqno == (told.high_seqno if until_now else None)
        assert told.log == (FailoverLog.born(told.failover_id) if record["born"] else None)
    # Tokens differ, as the order of opening does.
    assert [type(answers[p]) for p in sorted(expected)] == [
        type(expected[p]) for p in sorted(expected)
    ]
    for name in ("_seqno", "_horizon", "_id", "_until", "_limit", "_from_store"):
        assert (getattr(quick, name) == getattr(slow, name)).all(), name
    assert ((quick._token != 0) == (slow._token != 0)).all()
    ends = [sorted(p for e in f.take_ended() for p, _, _ in e.streams) for f in both]
    assert ends[0] == ends[1]
    tails = [
        [
            (g.next_entry, g.members.tolist())
            for g in sorted(f._groups._groups, key=lambda g: g.next_entry)
        ]
        for f in both
    ]
    assert tails[0] == tails[1]


def test_most_of_them_are_plain() -> None:
    bucket = world([0] * 6, [ACTIVE] * 6, [0] * 6, [2] * 6)
    follower = Follower(bucket, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    table = np.zeros(1024, START)
    table["partition"] = np.arange(1024)
    opened, others = follower.start_plain(PlainStarts.read(table.tobytes(), False))
    assert (len(opened), others) == (1024, [])
    assert len(set(opened["token"].tolist())) == 1024
    assert opened["born"].all()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"x" * 27, "27 bytes"),
        (b"\0" * 36 * 1025, "at most 1024"),
        (b"\xff" * 36, "partition of a Start is 4294967295"),
        (b"\0" * 72, "twice"),
    ],
)
def test_a_table_that_cannot_be(data: bytes, word: str) -> None:
    with pytest.raises(InvalidArgumentError, match=word):
        PlainStarts.read(data, False)
