"""Saves on their way to the store: what counts when, and what they are overtaken by."""

from typing import Any

import numpy as np
import pytest

from upr.engine import consumers as consumers_module
from upr.engine.consumers import Consumers
from upr.engine.saves import Save, rows_of
from upr.storage.keyspace import ConsumerRow
from upr_protocol.errors import TooManyError

IDS = np.arange(1, 1025, dtype=np.uint64)


def save(
    *pairs: tuple[int, int], name: str = "c", positions: bool = True, generation: int = 4
) -> Save:
    partitions = np.array([p for p, _ in pairs], np.int64)
    seqnos = np.array([seqno for _, seqno in pairs], np.uint64)
    stored = [b"%d" % seqno for _, seqno in pairs] if positions else None
    return Save(name, generation, partitions, IDS[partitions], seqnos, stored, 77)


def acknowledge(to: Consumers, partition: int, seqno: int, name: str = "c") -> None:
    partitions = np.array([partition])
    to.acknowledge(name, partitions, np.array([seqno], np.uint64), IDS[partitions], 5, 3)


def store(consumers: Consumers, max_rows: int = 4096) -> dict[tuple[bytes, int], Any]:
    """Store what waits; return the rows."""
    taken = consumers.saves.take(max_rows)
    rows = rows_of(taken)
    consumers.saves.stored(taken)
    return rows


def changes(consumers: Consumers) -> dict[tuple[bytes, int], Any]:
    found = consumers.take_changes(4096)
    return {} if found is None else found.rows()


def test_a_save_counts_from_when_it_is_stored() -> None:
    consumers = Consumers()
    consumers.saves.add(save((5, 8), (6, 9)))
    assert consumers.get("c") is None
    rows = store(consumers)
    assert rows == {
        (b"c", 5): ConsumerRow(4, 6, 8, 77, b"8"),
        (b"c", 6): ConsumerRow(4, 7, 9, 77, b"9"),
    }
    consumer = consumers.get("c")
    assert consumer is not None
    assert (consumer.positions, consumer.generation) == ({5: b"8", 6: b"9"}, 4)
    assert consumers.limit(IDS)[[5, 6]].tolist() == [8, 9]
    assert consumers.take_changes(100) is None
    # What is acknowledged later leaves the position as it is, also on disk.
    acknowledge(consumers, 5, 10)
    assert changes(consumers) == {(b"c", 5): ConsumerRow(4, 6, 10, 5, b"8")}
    loaded = Consumers()
    loaded.load({b"c": {5: ConsumerRow(4, 6, 10, 5, b"8"), 6: ConsumerRow(9, 7, 9, 5)}})
    assert loaded.newest_generation == 9
    again = loaded.get("c")
    assert again is not None
    assert again.positions == {5: b"8"}


def test_what_a_consumer_says_while_it_saves_counts_more_than_what_it_saves() -> None:
    consumers = Consumers()
    acknowledge(consumers, 5, 8)
    acknowledge(consumers, 6, 8)
    changes(consumers)
    under_way = save((5, 9), (6, 9), (7, 9))
    consumers.saves.add(under_way)
    consumers.saves.take(100)
    # It goes back to 2 in one partition, and acknowledges more in another.
    consumers.started("c", 5, int(IDS[5]), 2)
    acknowledge(consumers, 6, 12)
    consumers.saves.stored([under_way])
    assert consumers.limit(IDS)[5:8].tolist() == [2, 12, 9]
    assert changes(consumers) == {
        (b"c", 5): ConsumerRow(4, 6, 2, 5, b"9"),
        (b"c", 6): ConsumerRow(4, 7, 12, 5, b"9"),
    }


def test_a_save_that_failed_leaves_everything_as_it_was() -> None:
    consumers = Consumers()
    acknowledge(consumers, 5, 8)
    one = save((5, 9))
    consumers.saves.add(one)
    consumers.saves.failed(consumers.saves.take(100), OSError("no room"))
    assert (one.ended, str(one.failure)) == (True, "no room")
    assert consumers.saves.take(100) == []
    assert consumers.limit(IDS)[5] == 8
    assert changes(consumers) == {(b"c", 5): ConsumerRow(3, 6, 8, 5)}


def test_of_two_saves_the_later_one_is_stored() -> None:
    consumers = Consumers()
    consumers.saves.add(save((5, 8), (6, 8)))
    consumers.saves.add(save((5, 3), generation=5))
    assert store(consumers) == {
        (b"c", 5): ConsumerRow(5, 6, 3, 77, b"3"),
        (b"c", 6): ConsumerRow(4, 7, 8, 77, b"8"),
    }
    consumer = consumers.get("c")
    assert consumer is not None
    assert consumer.positions == {5: b"3", 6: b"8"}
    assert consumers.limit(IDS)[[5, 6]].tolist() == [3, 8]


def test_a_transaction_stays_bounded() -> None:
    consumers = Consumers()
    for i in range(5):
        consumers.saves.add(save(*((p, i) for p in range(10)), name=f"c{i}"))
    sizes = []
    while rows := store(consumers, 15):
        sizes.append(len(rows))
    assert sizes == [20, 20, 10]
    assert len(list(consumers)) == 5


def test_positions_are_removed_and_with_the_last_one_the_consumer() -> None:
    consumers = Consumers()
    consumers.saves.add(save((5, 8), (6, 9)))
    store(consumers)
    consumers.saves.add(save((5, 0), positions=False))
    assert store(consumers) == {(b"c", 5): None}
    consumer = consumers.get("c")
    assert consumer is not None
    assert (consumer.positions, consumer.known[[5, 6]].tolist()) == ({6: b"9"}, [False, True])
    consumers.saves.add(save((6, 0), (900, 0), positions=False))
    store(consumers)
    assert consumers.get("c") is None
    assert consumers.take_changes(100) is None


def test_a_consumer_that_is_forgotten_takes_what_it_is_saving_with_it() -> None:
    consumers = Consumers()
    under_way, waiting = save((5, 8)), save((6, 9))
    consumers.saves.add(under_way)
    assert consumers.saves.take(1) == [under_way]
    consumers.saves.add(waiting)
    assert consumers.forget("c")
    assert (waiting.void, waiting.ended, under_way.ended) == (True, True, False)
    consumers.saves.stored([under_way])
    assert consumers.get("c") is None
    # The row that was under way is there by now.
    assert changes(consumers) == {(b"c", 5): None, (b"c", 6): None}
    assert not consumers.forget("c")
    assert not consumers.is_removing


def test_a_further_consumer_is_refused_before_anything_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumers_module, "CONSUMERS_MAX", 2)
    consumers = Consumers()
    acknowledge(consumers, 5, 8, name="a")
    consumers.saves.add(save((5, 8), name="b"))
    with pytest.raises(TooManyError, match="the limit is 2") as caught:
        consumers.saves.add(save((5, 8), name="c"))
    assert not caught.value.retriable
    consumers.saves.add(save((5, 9), name="b"))
    consumers.saves.add(save((5, 9), name="a"))
    assert len(store(consumers)) == 2
