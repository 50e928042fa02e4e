"""Stored rows under keys that are not their own."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.storage.stored_blocks import numbers_of
from upr.storage import keyspace
from upr.storage.keyspace import (
    ConsumerRow,
    CutRow,
    PartitionRow,
    Pin,
    ProducerRow,
    ProducerSeen,
)
from upr_protocol.errors import DataDamagedError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.limits import REASON_BYTES_MAX

LOG = FailoverLog((FailoverRecord(5, 0, 1), FailoverRecord(6, 8, 2**64 - 1)))
PARTITION = PartitionRow(4, 3, 2, 9, 7, LOG, 8, 12, 2, "a gap", 2**60)
PRODUCER = numbers_of({17: ProducerRow(3, 5, 0, 9)}, 1).table
CONSUMER = ConsumerRow(1, 5, 9, 1, b"position")
CUT = CutRow(1, 2, 1, {3: Pin(5, 9)})
KEYS = [keyspace.producer_key(b"name", slot) for slot in (1, 2)]
CONSUMER_KEYS = [keyspace.consumer_key(b"name", partition) for partition in (3, 4)]
SEEN = ProducerSeen(3, 60_000_000)
SEEN_KEYS = [keyspace.producer_key(name) for name in (b"name", b"other")]

RoundTrip = Callable[[bool], object]
"""Packs a row under its key and unpacks it: under the same key, or under that of another."""


def partition(same: bool) -> object:
    return keyspace.unpack_partition(keyspace.pack_partition(3, PARTITION), 3 if same else 4)


def producer(same: bool) -> object:
    return keyspace.unpack_producer(KEYS[not same], keyspace.pack_producer(KEYS[0], PRODUCER))


def seen(same: bool) -> object:
    packed = keyspace.pack_producer_seen(SEEN_KEYS[0], SEEN)
    return keyspace.unpack_producer_seen(SEEN_KEYS[not same], packed)


def consumer(same: bool) -> object:
    return keyspace.unpack_consumer(
        CONSUMER_KEYS[not same], keyspace.pack_consumer(CONSUMER_KEYS[0], CONSUMER)
    )


def cut(same: bool) -> object:
    return keyspace.unpack_cut(b"a" if same else b"b", keyspace.pack_cut(b"a", CUT))


@pytest.mark.parametrize(
    ("round_trip", "row"),
    [
        (partition, PARTITION),
        (producer, PRODUCER),
        (seen, SEEN),
        (consumer, CONSUMER),
        (cut, CUT),
    ],
)
def test_a_row_under_the_key_of_another_is_damage(round_trip: RoundTrip, row: object) -> None:
    assert round_trip(True) == row
    with pytest.raises(DataDamagedError, match="checksum"):
        round_trip(False)


def test_a_long_reason_is_cut_between_characters() -> None:
    row = replace(PARTITION, reason="x" + "é" * REASON_BYTES_MAX)
    read = keyspace.unpack_partition(keyspace.pack_partition(3, row), 3)
    assert read == replace(row, reason="x" + "é" * (REASON_BYTES_MAX // 2 - 1))


@pytest.mark.parametrize("change", [b"", b"more"])
def test_a_row_of_another_length_is_damage(change: bytes) -> None:
    key = keyspace.partition_key(3)
    body = keyspace.unseal(keyspace.pack_partition(3, PARTITION), key, "row")
    with pytest.raises(DataDamagedError, match="bytes"):
        keyspace.unpack_partition(keyspace.seal(body + change if change else body[:-1], key), 3)
