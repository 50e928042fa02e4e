"""The byte layout of every key and value in the store. Pack and unpack, no I/O.

Numbers in keys are big-endian, so that LMDB's order is theirs; numbers in values are little-endian. Every
value but a block, which has its own checksums, ends in a CRC32C.
"""

import struct
from dataclasses import dataclass

import google_crc32c

from upr_protocol.errors import DataDamagedError, InvalidArgumentError
from upr_protocol.failover import FailoverLog, FailoverRecord

_CRC = struct.Struct("<I")
_PARTITION_KEY = struct.Struct(">H")
_BLOCK_KEY = struct.Struct(">HQ")
_PARTITION = struct.Struct("<BQQQQH")
_RECORD = struct.Struct("<QQ")
_PRODUCER = struct.Struct("<QQQQQ")


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


def seal(value: bytes) -> bytes:
    """Return the value with its CRC32C at the end."""
    return value + _CRC.pack(google_crc32c.value(value))


def unseal(value: bytes, what: str) -> bytes:
    """Return the value without its CRC32C, or raise DataDamagedError naming ``what``."""
    if len(value) < 4 or _CRC.unpack(value[-4:])[0] != google_crc32c.value(value[:-4]):
        raise DataDamagedError(f"{what}: the stored value fails its checksum")
    return value[:-4]


def partition_key(partition: int) -> bytes:
    return _PARTITION_KEY.pack(partition)


def block_key(partition: int, end_seqno: int) -> bytes:
    return _BLOCK_KEY.pack(partition, end_seqno)


def unpack_block_key(key: bytes) -> tuple[int, int]:
    partition, end_seqno = _BLOCK_KEY.unpack(key)
    return partition, end_seqno


def pack_partition(row: PartitionRow) -> bytes:
    head = _PARTITION.pack(
        row.state, row.epoch, row.purge_seqno, row.stored_high, row.first_commit, len(row.log)
    )
    return seal(head + b"".join(_RECORD.pack(r.failover_id, r.seqno) for r in row.log))


def unpack_partition(value: bytes, partition: int) -> PartitionRow:
    """Return the row, or raise DataDamagedError."""
    body = unseal(value, f"partition {partition}")
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


def producer_key(producer: bytes, partition: int) -> bytes:
    """The name, a zero byte (no name contains one), the partition."""
    return producer + b"\0" + _PARTITION_KEY.pack(partition)


def unpack_producer_key(key: bytes) -> tuple[bytes, int]:
    return key[:-3], _PARTITION_KEY.unpack(key[-2:])[0]


def pack_producer(row: ProducerRow) -> bytes:
    return seal(
        _PRODUCER.pack(row.number, row.failover_id, row.start_seqno, row.end_seqno, row.time)
    )


def unpack_producer(value: bytes, producer: bytes) -> ProducerRow:
    """Return the row, or raise DataDamagedError."""
    return ProducerRow(*_PRODUCER.unpack(unseal(value, f"producer {producer!r}")))
