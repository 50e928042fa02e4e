"""Stored rows under keys that are not their own."""

from collections.abc import Callable

import pytest

from upr.storage import keyspace
from upr.storage.keyspace import ConsumerRow, CutRow, PartitionRow, Pin, ProducerRow
from upr_protocol.errors import DataDamagedError
from upr_protocol.failover import FailoverLog

PARTITION = PartitionRow(1, 1, 0, 9, 0, FailoverLog.born(5))
PRODUCER = ProducerRow(3, 5, 0, 9, 1)
CONSUMER = ConsumerRow(1, 5, 9, 1)
CUT = CutRow(1, 2, 1, {3: Pin(5, 9)})
KEYS = [keyspace.producer_key(b"name", partition) for partition in (3, 4)]

RoundTrip = Callable[[bool], object]
"""Packs a row under its key and unpacks it: under the same key, or under that of another."""


def partition(same: bool) -> object:
    return keyspace.unpack_partition(keyspace.pack_partition(3, PARTITION), 3 if same else 4)


def producer(same: bool) -> object:
    return keyspace.unpack_producer(KEYS[not same], keyspace.pack_producer(KEYS[0], PRODUCER))


def consumer(same: bool) -> object:
    return keyspace.unpack_consumer(KEYS[not same], keyspace.pack_consumer(KEYS[0], CONSUMER))


def cut(same: bool) -> object:
    return keyspace.unpack_cut(b"a" if same else b"b", keyspace.pack_cut(b"a", CUT))


@pytest.mark.parametrize(
    ("round_trip", "row"),
    [(partition, PARTITION), (producer, PRODUCER), (consumer, CONSUMER), (cut, CUT)],
)
def test_a_row_under_the_key_of_another_is_damage(round_trip: RoundTrip, row: object) -> None:
    assert round_trip(True) == row
    with pytest.raises(DataDamagedError, match="checksum"):
        round_trip(False)
