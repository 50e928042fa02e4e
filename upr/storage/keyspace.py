"""The byte layout of every key and value in the store. Pack and unpack, no I/O.

Numbers in keys are big-endian, so that LMDB's order is theirs; numbers in values are little-endian. Every
value but a block, which has its own checksums, ends in a CRC32C.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import google_crc32c

from upr_protocol.errors import DataDamagedError, InvalidArgumentError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.limits import PARTITIONS

_CRC = struct.Struct("<I")
_PARTITION_KEY = struct.Struct(">H")
_BLOCK_KEY = struct.Struct(">HQ")
_PARTITION = struct.Struct("<BQQQQH")
_RECORD = struct.Struct("<QQ")
_PRODUCER = struct.Struct("<QQQQQ")
_CONSUMER = struct.Struct("<QQQQ")
_CUT = struct.Struct("<QQQH")
_PIN = struct.Struct("<HQQ")


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """What the store knows of a partition.

    Attributes:
        state: a PartitionState value of the wire.
        epoch: counts changes of the partition's state.
        purge_seqno: tombstones at or below may be gone.
        stored_high: the end of the newest stored block; the tail holds what is above.
        first_commit: journal commits below this number do not count for the partition.
        log: the failover log.
    """

    state: int
    epoch: int
    purge_seqno: int
    stored_high: int
    first_commit: int
    log: FailoverLog


@dataclass(frozen=True, slots=True)
class ProducerRow:
    """The newest number of a producer in one partition, and what it was given.

    Attributes:
        number: the Write's number.
        failover_id: the id under which the seqnos were given.
        start_seqno: the run's start.
        end_seqno: the run's end.
        time: commit time, microseconds since the epoch.
    """

    number: int
    failover_id: int
    start_seqno: int
    end_seqno: int
    time: int


DAMAGED_POSITION = b"\0"
"""No message of the wire: whoever asks for the position must be told that it was lost, not that there is none."""


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """What a consumer acknowledged, or saved, in one partition.

    Attributes:
        generation: of the consumer's ownership then.
        failover_id: the id under which it acknowledged; 0 for none.
        seqno: everything up to here is safe with the consumer.
        time: when, microseconds since the epoch.
        position: the position that it saved, as a Position of the wire; empty when it has saved none, and
            DAMAGED_POSITION when what was stored cannot be read.
    """

    generation: int
    failover_id: int
    seqno: int
    time: int
    position: bytes = b""


@dataclass(frozen=True, slots=True)
class Pin:
    """The marker that a cut pins in one partition, and the id that was newest when it was made."""

    failover_id: int
    seqno: int


@dataclass(frozen=True, slots=True)
class CutRow:
    """A cut: pins under one name and for a lease. Times are microseconds since the epoch.

    Attributes:
        created: when it was made.
        expires: when its lease ends.
        lease: the lease it was made or last renewed with, microseconds.
        pins: by partition, ascending.
    """

    created: int
    expires: int
    lease: int
    pins: Mapping[int, Pin]


def seal(value: bytes, key: bytes) -> bytes:
    """Return the value with a CRC32C at its end, which is over its key as well.

    So a value is found out that lies under another one's key.
    """
    return value + _CRC.pack(google_crc32c.value(key + value))


def unseal(value: bytes, key: bytes, what: str) -> bytes:
    """Return the value without its CRC32C, or raise DataDamagedError naming ``what``."""
    if len(value) < 4 or _CRC.unpack(value[-4:])[0] != google_crc32c.value(key + value[:-4]):
        raise DataDamagedError(f"{what}: the stored value fails its checksum")
    return value[:-4]


def partition_key(partition: int) -> bytes:
    return _PARTITION_KEY.pack(partition)


def block_key(partition: int, end_seqno: int) -> bytes:
    return _BLOCK_KEY.pack(partition, end_seqno)


def unpack_block_key(key: bytes) -> tuple[int, int]:
    partition, end_seqno = _BLOCK_KEY.unpack(key)
    return partition, end_seqno


def pack_partition(partition: int, row: PartitionRow) -> bytes:
    head = _PARTITION.pack(
        row.state, row.epoch, row.purge_seqno, row.stored_high, row.first_commit, len(row.log)
    )
    records = (_RECORD.pack(r.failover_id, r.seqno) for r in row.log)
    return seal(head + b"".join(records), partition_key(partition))


def unpack_partition(value: bytes, partition: int) -> PartitionRow:
    """Return the row, or raise DataDamagedError."""
    body = unseal(value, partition_key(partition), f"partition {partition}")
    try:
        state, epoch, purge, stored, first, count = _PARTITION.unpack_from(body)
        records = [
            _RECORD.unpack_from(body, _PARTITION.size + _RECORD.size * i) for i in range(count)
        ]
        log = FailoverLog(tuple(FailoverRecord(*record) for record in records))
        return PartitionRow(state, epoch, purge, stored, first, log)
    except (struct.error, InvalidArgumentError) as error:
        raise DataDamagedError(
            f"partition {partition}: the stored row is malformed: {error}"
        ) from error


def _fields(layout: struct.Struct, value: bytes, key: bytes, what: str) -> tuple[int, ...]:
    body = unseal(value, key, what)
    if len(body) != layout.size:
        raise DataDamagedError(f"{what}: the stored row has {len(body)} bytes, not {layout.size}")
    return layout.unpack(body)


def producer_key(producer: bytes, partition: int) -> bytes:
    """The name, a zero byte (no name contains one), the partition."""
    return producer + b"\0" + _PARTITION_KEY.pack(partition)


def unpack_producer_key(key: bytes) -> tuple[bytes, int]:
    return key[:-3], _PARTITION_KEY.unpack(key[-2:])[0]


def pack_producer(key: bytes, row: ProducerRow) -> bytes:
    return seal(
        _PRODUCER.pack(row.number, row.failover_id, row.start_seqno, row.end_seqno, row.time), key
    )


def unpack_producer(key: bytes, value: bytes) -> ProducerRow:
    """Return the row, or raise DataDamagedError."""
    return ProducerRow(*_fields(_PRODUCER, value, key, f"producer {key[:-3]!r}"))


def consumer_key(consumer: bytes, partition: int) -> bytes:
    """The name, a zero byte (no name contains one), the partition."""
    return producer_key(consumer, partition)


def unpack_consumer_key(key: bytes) -> tuple[bytes, int]:
    return unpack_producer_key(key)


def is_consumer_key(key: bytes) -> bool:
    """Whether a key names a consumer, in UTF-8, and one of the partitions."""
    if len(key) < 4 or key[-3] or unpack_consumer_key(key)[1] >= PARTITIONS:
        return False
    try:
        key[:-3].decode()
    except UnicodeDecodeError:
        return False
    return True


def pack_consumer(key: bytes, row: ConsumerRow) -> bytes:
    head = _CONSUMER.pack(row.generation, row.failover_id, row.seqno, row.time)
    return seal(head + row.position, key)


def unpack_consumer(key: bytes, value: bytes) -> ConsumerRow:
    """Return the row, or raise DataDamagedError."""
    what = f"consumer {key[:-3]!r}"
    body = unseal(value, key, what)
    if len(body) < _CONSUMER.size:
        raise DataDamagedError(f"{what}: the stored row has {len(body)} bytes")
    generation, failover_id, seqno, time = _CONSUMER.unpack_from(body)
    return ConsumerRow(generation, failover_id, seqno, time, body[_CONSUMER.size :])


def pack_cut(name: bytes, row: CutRow) -> bytes:
    head = _CUT.pack(row.created, row.expires, row.lease, len(row.pins))
    pins = (_PIN.pack(p, pin.failover_id, pin.seqno) for p, pin in row.pins.items())
    return seal(head + b"".join(pins), name)


def unpack_cut(name: bytes, value: bytes) -> CutRow:
    """Return the row, or raise DataDamagedError."""
    body = unseal(value, name, f"cut {name!r}")
    try:
        created, expires, lease, count = _CUT.unpack_from(body)
        pins = {
            partition: Pin(failover_id, seqno)
            for partition, failover_id, seqno in _PIN.iter_unpack(body[_CUT.size :])
        }
    except struct.error as error:
        raise DataDamagedError(f"cut {name!r}: the stored row is malformed: {error}") from error
    if len(pins) != count:
        raise DataDamagedError(f"cut {name!r}: {len(pins)} pins, the row says {count}")
    return CutRow(created, expires, lease, pins)
