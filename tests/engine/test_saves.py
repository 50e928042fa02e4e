"""Saves on their way to the store: what counts when, and what they are overtaken by."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.storage.stored_blocks import consumers_of, store_of
from upr.engine import consumers as consumers_module
from upr.engine.consumers import Consumers, Save
from upr.storage.keyspace import DAMAGED_POSITION, ConsumerRow
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
    rows = {key: row for save in taken for key, row in save.rows().items()}
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
    assert (np.flatnonzero(consumer.saved).tolist(), consumer.generation) == ([5, 6], 4)
    assert consumers.limit(IDS)[[5, 6]].tolist() == [8, 9]
    assert consumers.take_changes(100) is None
    # What is acknowledged later leaves the position as it is, also on disk.
    acknowledge(consumers, 5, 10)
    assert changes(consumers) == {(b"c", 5): ConsumerRow(4, 6, 10, 5, None)}
    loaded = Consumers()
    loaded.load([(b"c", 5, ConsumerRow(4, 6, 10, 5, b"8")), (b"c", 6, ConsumerRow(9, 7, 9, 5))])
    assert loaded.newest_generation == 9
    again = loaded.get("c")
    assert again is not None
    assert np.flatnonzero(again.saved).tolist() == [5]


def test_what_a_consumer_says_while_it_saves_counts_more_than_what_it_saves() -> None:
    consumers = Consumers()
    acknowledge(consumers, 5, 8)
    acknowledge(consumers, 6, 8)
    changes(consumers)
    under_way = save((5, 9), (6, 9), (7, 9))
    consumers.saves.add(under_way)
    consumers.saves.take(100)
    # It goes back to 2 in one partition, and acknowledges more in another.
    consumers.started("c", np.array([5]), IDS[[5]], np.array([2], np.uint64))
    acknowledge(consumers, 6, 12)
    consumers.saves.stored([under_way])
    assert consumers.limit(IDS)[5:8].tolist() == [2, 12, 9]
    assert changes(consumers) == {
        (b"c", 5): ConsumerRow(4, 6, 2, 77, None),
        (b"c", 6): ConsumerRow(4, 7, 12, 5, None),
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
    assert changes(consumers) == {(b"c", 5): ConsumerRow(3, 6, 8, 5, None)}


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
    assert consumer.saved[[5, 6]].all()
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
    assert consumer.saved[[5, 6]].tolist() == consumer.known[[5, 6]].tolist() == [False, True]
    consumers.saves.add(save((6, 0), (900, 0), positions=False))
    store(consumers)
    assert consumers.get("c") is None
    assert consumers.take_changes(100) is None


def test_nothing_is_left_of_a_position_that_was_removed() -> None:
    consumers = Consumers()
    consumers.saves.add(save((5, 8), (6, 9)))
    store(consumers)
    consumers.saves.add(save((5, 8), positions=False))
    store(consumers)
    consumer = consumers.get("c")
    assert consumer is not None
    assert (consumer.seqno[5], consumer.failover_id[5], consumer.time[5]) == (0, 0, 0)
    # No row is written of it, which would be there again after the consumer is forgotten.
    consumers.started("c", np.array([5]), IDS[[5]], np.array([0], np.uint64))
    assert changes(consumers) == {}


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
    with pytest.raises(TooManyError, match="must be below 2") as caught:
        consumers.saves.add(save((5, 8), name="c"))
    assert not caught.value.retriable
    consumers.saves.add(save((5, 9), name="b"))
    consumers.saves.add(save((5, 9), name="a"))
    assert len(store(consumers)) == 2


def written(disk: dict[tuple[bytes, int], Any], rows: dict[tuple[bytes, int], Any]) -> None:
    for key, row in rows.items():
        if row is None:
            disk.pop(key, None)
        else:
            disk[key] = row


@pytest.mark.parametrize(("begins", "counts"), [(100, 100), (8, 8), (120, 100)])
def test_a_first_save_counts_although_a_stream_began_meanwhile(begins: int, counts: int) -> None:
    consumers, disk = Consumers(), dict[tuple[bytes, int], Any]()
    under_way = save((5, 100), (6, 100))
    consumers.saves.add(under_way)
    consumers.saves.take(100)
    consumers.started("c", np.array([5]), IDS[[5]], np.array([begins], np.uint64))
    written(disk, under_way.rows())
    consumers.saves.stored([under_way])
    assert consumers.limit(IDS)[[5, 6]].tolist() == [counts, 100]
    written(disk, changes(consumers))
    assert [row.seqno for row in disk.values()] == [counts, 100]
    assert consumers.forget("c")
    written(disk, changes(consumers))
    assert disk == {}


def test_under_another_id_a_stream_says_nothing_of_what_is_being_saved() -> None:
    consumers = Consumers()
    consumers.saves.add(save((5, 100)))
    consumers.started("c", np.array([5]), IDS[[900]], np.array([8], np.uint64))
    store(consumers)
    assert consumers.limit(IDS)[5] == 100


@pytest.mark.parametrize("positions", [True, False])
def test_an_ack_that_was_stored_before_an_older_save_is_stored_again(positions: bool) -> None:
    consumers, disk = Consumers(), dict[tuple[bytes, int], Any]()
    waiting = save((5, 9), positions=positions)
    consumers.saves.add(waiting)
    acknowledge(consumers, 5, 7)
    written(disk, changes(consumers))
    written(disk, store(consumers))
    written(disk, changes(consumers))
    assert disk[b"c", 5].seqno == consumers.limit(IDS)[5] == 7
    assert consumers.forget("c")
    written(disk, changes(consumers))
    assert disk == {}


def test_saved_positions_are_not_kept_in_memory() -> None:
    """A thousand consumers with all partitions may take 64 MiB."""
    consumers = Consumers()
    everything = np.arange(1024)
    seqnos = np.ones(1024, np.uint64)
    tracemalloc.start()
    try:
        for number in range(20):
            positions = [b"%03d" % number * 300 for _ in range(1024)]
            consumers.saves.add(Save(f"c{number}", 1, everything, IDS, seqnos, positions, 1))
            del positions
            taken = consumers.saves.take(4096)
            consumers.saves.stored(taken)
            del taken
        assert tracemalloc.get_traced_memory()[0] < 20 * 64 * 1024
    finally:
        tracemalloc.stop()
    assert consumers.limit(IDS).max() == 1


def test_a_row_without_a_position_keeps_the_one_that_is_stored(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    store.put_consumers({(b"c", 1): ConsumerRow(1, 5, 7, 3, b"saved")})
    store.put_consumers(
        {(b"c", 1): ConsumerRow(2, 5, 9, 4, None), (b"c", 2): ConsumerRow(2, 5, 9, 4, None)}
    )
    assert consumers_of(store) == {
        b"c": {1: ConsumerRow(2, 5, 9, 4, b"saved"), 2: ConsumerRow(2, 5, 9, 4)}
    }
    assert store.saved_positions(b"c", range(1024)) == {1: b"saved"}
    assert store.saved_positions(b"d", range(1024)) == {}
    with store._env.begin(write=True) as txn:
        txn.put(b"c\0\0\1", b"a damaged value", db=store._consumers)
    assert store.saved_positions(b"c", [1]) == {1: DAMAGED_POSITION}
    # That it was lost is not forgotten with the next acknowledgement.
    store.put_consumers({(b"c", 1): ConsumerRow(2, 5, 10, 4, None)})
    assert store.saved_positions(b"c", [1, 2]) == {1: DAMAGED_POSITION}
    store.close()
