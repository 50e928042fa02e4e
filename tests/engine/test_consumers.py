"""Registered consumers without a disk: what is taken of their word, and what purging is told."""

import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.buckets import bucket
from tests.storage.stored_blocks import consumers_of, store_of
from upr.engine import consumers as consumers_module
from upr.engine.bucket import Bucket
from upr.engine.consumers import NO_LIMIT, Consumers, Save, read_positions
from upr.engine.follower import Follower
from upr.engine.streams import FollowOptions, Started, StartRequest
from upr.storage.keyspace import DAMAGED_POSITION, ConsumerRow
from upr_protocol.block import I64, U64, build_block, make_runs, sealed
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.flow import CreditWindow
from upr_protocol.limits import CONSUMERS_MAX


def position(partition: int, seqno: int) -> tuple[I64, U64, U64]:
    return np.array([partition]), np.array([seqno], np.uint64), IDS[[partition]]


IDS = np.arange(1, 1025, dtype=np.uint64)


def write(to: Bucket, partition: int, rows: int) -> None:
    block = build_block([b"%06d" % i for i in range(rows)], [b"v"] * rows)
    block = sealed(replace(block, runs=make_runs([partition], [rows])))
    to.write(block, b"", None, 0, 1)


def follower(of: Bucket, name: str) -> Follower:
    options = FollowOptions(name, memory=True)
    made = Follower(of, options, CreditWindow(1 << 20), lambda: None)
    of.add_follower(made)
    return made


def start(of: Follower, partition: int, seqno: int = 0) -> None:
    (answer,) = of.start([StartRequest(partition, partition + 1, seqno, partition + 1)])
    assert isinstance(answer, Started)


def receive(of: Follower) -> None:
    while of.next_frame() is not None:
        pass


def ack(of: Follower, *positions: tuple[int, int], now: int = 7) -> bool:
    data = b"".join(struct.pack("<IQ", *position) for position in positions)
    return of.acknowledge(*read_positions(data), now)


def columns(*pairs: tuple[int, int]) -> tuple[I64, U64]:
    partitions, seqnos = zip(*pairs, strict=True)
    return np.array(partitions, np.int64), np.array(seqnos, np.uint64)


def acknowledge(to: Consumers, name: str, *pairs: tuple[int, int], now: int = 1) -> bool:
    partitions, seqnos = columns(*pairs)
    return to.acknowledge(name, partitions, seqnos, IDS[partitions], now)


def following(of: Bucket, name: str, partition: int, rows: int) -> Follower:
    """Return a follower that was sent some rows of a partition."""
    made = follower(of, name)
    start(made, partition)
    write(of, partition, rows)
    receive(made)
    return made


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"x", "12"),
        (struct.pack("<IQ", 1024, 1), "partition of an Ack is 1024"),
        (struct.pack("<IQ", 2**32 - 1, 1), "partition of an Ack is 4294967295"),
        (struct.pack("<IQ", 5, 2**48), str(2**48)),
        (struct.pack("<IQ", 5, 1) * 1025, "1024"),
    ],
)
def test_an_ack_out_of_range_is_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        read_positions(data)


def test_the_largest_seqno_and_partition_are_in_range() -> None:
    partitions, seqnos = read_positions(struct.pack("<IQ", 1023, 2**48 - 1))
    assert (partitions.tolist(), seqnos.tolist()) == ([1023], [2**48 - 1])


def test_the_first_ack_registers_a_consumer() -> None:
    b = bucket()
    consumer = following(b, "c", 5, 10)
    assert "c" not in b.consumer_positions
    assert (b.consumer_positions.limit(IDS) == NO_LIMIT).all()
    assert ack(consumer, (5, 8))
    limit = b.consumer_positions.limit(b.partitions.newest_id)
    assert limit[5] == 8
    assert (np.delete(limit, 5) == NO_LIMIT).all()
    assert b.consumer_positions.holders(5, 6, below=9) == [("c", 8)]
    assert b.consumer_positions.holders(5, 6, below=8) == []
    assert b.consumer_positions.holders(6, 7, below=9) == []


def test_a_call_without_a_name_is_checked_and_not_registered() -> None:
    b = bucket()
    consumer = following(b, "", 5, 10)
    assert ack(consumer, (5, 8))
    assert not list(b.consumer_positions)
    with pytest.raises(InvalidArgumentError, match=r"11.*up to 10"):
        ack(consumer, (5, 11))


def test_an_ack_above_what_was_sent_names_both_and_takes_nothing() -> None:
    b = bucket()
    consumer = following(b, "c", 5, 10)
    start(consumer, 6)
    write(b, 6, 3)
    with pytest.raises(InvalidArgumentError, match=r"partition 6 at seqno 3.*up to 0"):
        ack(consumer, (5, 8), (6, 3))
    assert "c" not in b.consumer_positions


def test_a_partition_without_a_stream_is_passed_over() -> None:
    b = bucket()
    consumer = following(b, "c", 5, 10)
    assert ack(consumer, (9, 1000))
    assert "c" not in b.consumer_positions
    assert ack(consumer, (9, 1000), (5, 4))
    assert b.consumer_positions.limit(IDS)[9] == NO_LIMIT


def test_a_stream_that_ended_is_still_acknowledged_until_it_is_started_anew() -> None:
    b = bucket()
    write(b, 5, 10)
    consumer = follower(b, "c")
    consumer.start([StartRequest(5, 6, 0, 6, until_now=True)])
    receive(consumer)
    assert consumer.take_ended()
    assert ack(consumer, (5, 10))
    assert b.consumer_positions.limit(IDS)[5] == 10
    # Refused: what the call knew of the partition before does not count any more.
    consumer.start([StartRequest(5, 99, 9, 99)])
    assert ack(consumer, (5, 3))
    assert b.consumer_positions.limit(IDS)[5] == 10


def test_an_ack_under_an_id_that_is_not_the_newest_any_more_is_passed_over() -> None:
    b = bucket()
    consumer = following(b, "c", 5, 10)
    log = b.partitions.logs[5]
    b.partitions.set_log(5, FailoverLog((*log, FailoverRecord(77, 4))))
    assert ack(consumer, (5, 8))
    assert "c" not in b.consumer_positions


def test_a_position_under_an_older_id_counts_as_zero() -> None:
    consumers = Consumers()
    acknowledge(consumers, "c", (5, 8), (6, 9))
    newer = IDS.copy()
    newer[5] = 77
    limit = consumers.limit(newer)
    assert (limit[5], limit[6]) == (0, 9)
    assert consumers.holders(5, 77, below=1) == [("c", 0)]


def test_the_furthest_behind_is_the_limit() -> None:
    consumers = Consumers()
    acknowledge(consumers, "b", (5, 8), (6, 1))
    acknowledge(consumers, "a", (5, 3), (7, 2))
    limit = consumers.limit(IDS)
    assert limit[5:8].tolist() == [3, 1, 2]
    assert consumers.holders(5, 6, below=100) == [("a", 3), ("b", 8)]


def test_the_newest_word_counts_even_if_it_is_lower() -> None:
    b = bucket()
    consumer = following(b, "c", 5, 10)
    assert ack(consumer, (5, 8))
    assert ack(consumer, (5, 6))
    assert b.consumer_positions.limit(IDS)[5] == 6


def test_of_two_calls_under_a_name_only_the_newer_is_heard() -> None:
    b = bucket()
    old = following(b, "c", 5, 10)
    assert ack(old, (5, 8))
    new = follower(b, "c")
    start(new, 5, 8)
    assert ack(old, (5, 10))
    assert b.consumer_positions.limit(IDS)[5] == 8
    assert ack(new, (5, 8))
    ((_, consumer),) = b.consumer_positions
    assert consumer.generation == new.generation == old.generation + 1


def test_a_start_below_the_position_brings_it_down_in_the_same_step() -> None:
    b = bucket()
    assert ack(following(b, "c", 5, 10), (5, 8))
    again = follower(b, "c")
    start(again, 5, 9)
    assert b.consumer_positions.limit(IDS)[5] == 8
    start(again, 5, 2)
    assert b.consumer_positions.limit(IDS)[5] == 2
    # Of another consumer and of one without a name nothing is known.
    start(follower(b, "d"), 5, 1)
    start(follower(b, ""), 5, 1)
    assert b.consumer_positions.holders(5, 6, below=99) == [("c", 2)]


def test_a_name_beyond_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers_module, "CONSUMERS_MAX", 2)
    b = bucket()
    for name in ("a", "b"):
        acknowledge(b.consumer_positions, name, (5, 1))
    third = following(b, "third", 5, 10)
    assert not ack(third, (5, 3))
    assert "third" not in b.consumer_positions
    assert b.consumer_positions.forget("a")
    assert ack(third, (5, 3))


def rows_of(consumers: Consumers, max_rows: int = 1 << 20) -> dict[tuple[bytes, int], object]:
    changes = consumers.take_changes(max_rows)
    return {} if changes is None else dict(changes.rows())


def test_what_is_not_stored_is_handed_out_once_and_loaded_again() -> None:
    consumers = Consumers()
    acknowledge(consumers, "c", (5, 8), (6, 9), now=11)
    (_, consumer), *_ = consumers
    consumer.generation = 2
    rows = rows_of(consumers)
    assert rows == {
        (b"c", 5): ConsumerRow(2, 6, 8, 11, None),
        (b"c", 6): ConsumerRow(2, 7, 9, 11, None),
    }
    assert consumers.take_changes(100) is None
    acknowledge(consumers, "c", (6, 10), now=12)
    assert rows_of(consumers) == {(b"c", 6): ConsumerRow(2, 7, 10, 12, None)}

    loaded = Consumers()
    loaded.load(
        [
            (b"c", 5, ConsumerRow(2, 6, 8, 11)),
            (b"c", 6, ConsumerRow(3, 7, 10, 12)),
            (b"d", 1, DAMAGED),
        ]
    )
    assert loaded.limit(IDS)[[1, 5, 6]].tolist() == [0, 8, 10]
    assert loaded.take_changes(100) is None
    (_, consumer), _ = loaded
    assert (consumer.generation, consumer.last_ack_time) == (3, 12)


DAMAGED = ConsumerRow(0, 0, 0, 0, DAMAGED_POSITION)


def test_a_transaction_stays_bounded_and_nothing_is_lost() -> None:
    consumers = Consumers()
    partitions = np.arange(1024)
    for i in range(10):
        consumers.acknowledge(f"c{i}", partitions, partitions.astype(np.uint64), IDS, 1)
    rows: dict[tuple[bytes, int], object] = {}
    while found := rows_of(consumers, 3000):
        assert len(found) <= 3000 + 1024
        assert not rows.keys() & found.keys()
        rows |= found
    assert len(rows) == 10 * 1024


def test_what_could_not_be_stored_is_handed_out_again() -> None:
    consumers = Consumers()
    acknowledge(consumers, "c", (5, 8))
    changes = consumers.take_changes(100)
    assert changes is not None
    acknowledge(consumers, "c", (5, 9))
    consumers.put_back(changes)
    assert rows_of(consumers) == {(b"c", 5): ConsumerRow(0, 6, 9, 1, None)}


def test_forget_removes_the_rows_and_a_later_ack_registers_anew() -> None:
    consumers = Consumers()
    acknowledge(consumers, "c", (5, 8), (6, 9))
    assert consumers.forget("c")
    assert not consumers.forget("c")
    assert (consumers.limit(IDS) == NO_LIMIT).all()
    acknowledge(consumers, "c", (6, 10))
    changes = consumers.take_changes(100)
    assert changes is not None
    assert changes.rows() == {(b"c", 5): None, (b"c", 6): None}
    consumers.put_back(changes)
    assert rows_of(consumers) == {(b"c", 5): None, (b"c", 6): None}
    assert rows_of(consumers) == {(b"c", 6): ConsumerRow(0, 7, 10, 1, None)}


def test_an_ack_of_all_partitions_does_not_work_position_by_position() -> None:
    b = bucket()
    consumer = follower(b, "c")
    for partition in range(1024):
        start(consumer, partition)
    data = b"".join(struct.pack("<IQ", p, 0) for p in range(1024))
    best = min(_seconds(lambda: consumer.acknowledge(*read_positions(data), 1)) for _ in range(20))
    assert best < 0.001, f"an Ack of 1024 positions took {best * 1e6:.0f} us"


def _seconds(work: object) -> float:
    assert callable(work)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def test_the_limit_over_all_consumers_is_found_in_time() -> None:
    consumers = Consumers()
    partitions = np.arange(1024)
    for i in range(CONSUMERS_MAX):
        consumers.acknowledge(f"c{i}", partitions, np.full(1024, i + 1, np.uint64), IDS, 1)
    assert (consumers.limit(IDS) == 1).all()


def test_a_write_that_failed_gives_no_position_to_one_that_registered_anew() -> None:
    """A row at 0 that nobody acknowledged would hold purging up for days."""
    of = Consumers()
    of.acknowledge("c", *position(1, 5), 1)
    of.acknowledge("c", *position(2, 5), 1)
    changes = of.take_changes(100)
    assert changes is not None
    of.forget("c")
    of.acknowledge("c", *position(2, 6), 1)
    of.put_back(changes)
    removed, written = of.take_changes(100), of.take_changes(100)
    assert removed is not None
    assert set(removed.rows()) == {(b"c", 1), (b"c", 2)}
    assert written is not None
    assert set(written.rows()) == {(b"c", 2)}


@pytest.mark.parametrize("key", [b"a\0\x80\x01", b"\xff\0\0\x01", b"a", b"abcd", b"\0\0\1"])
def test_a_row_whose_key_is_damaged_is_left_out(tmp_path: Path, key: bytes) -> None:
    """Who could not be named could neither be listed nor forgotten."""
    store = store_of(tmp_path / "store")
    row = ConsumerRow(1, 5, 7, 3)
    store.put_consumers({(b"c", 1): row})
    with store._env.begin(write=True) as txn:
        txn.put(key, b"some value", db=store._consumers)
        txn.put(b"d\0\0\2", b"a damaged value", db=store._consumers)
    assert consumers_of(store) == {b"c": {1: row}, b"d": {2: DAMAGED}}
    Consumers().load(store.consumers())
    store.close()


def registered(*times: tuple[str, int]) -> Consumers:
    known = Consumers()
    for name, time_ in times:
        known.load(
            [
                (name.encode(), 5, ConsumerRow(1, 6, 7, time_)),
                (name.encode(), 6, ConsumerRow(1, 7, 7, 1)),
            ]
        )
    return known


def test_one_that_is_in_use_has_its_time_to_go_from_then_also_after_a_restart() -> None:
    known = registered(("used", 100), ("fresh", 900), ("unused", 100))
    assert known.expire(500, 1000, {"used", "fresh"}) == ["unused"]
    changes = known.take_changes(100)
    assert changes is not None
    rows = {key: row and row.time for key, row in changes.rows().items()}
    assert rows == {(b"unused", 5): None, (b"unused", 6): None, (b"used", 5): 1000}
    # Its call has ended for a moment; nothing is to be stored again and again while it is in use.
    assert known.expire(501, 1001, set()) == []
    assert known.expire(502, 1002, {"used"}) == []
    assert known.take_changes(100) is None
    assert known.expire(1001, 1501, {"fresh"}) == ["used"]


def test_one_that_is_saving_or_whose_rows_are_damaged_does_not_expire() -> None:
    known = registered(("saving", 100))
    known.load([(b"damaged", 5, ConsumerRow(0, 0, 0, 0, DAMAGED_POSITION))])
    columns = (np.array([5]), np.array([6], np.uint64), np.array([8], np.uint64))
    known.saves.add(Save("saving", 2, *columns, [b"8"], 1000))
    assert known.expire(500, 1000, set()) == []
    assert {name for name, _ in known} == {"saving", "damaged"}
