"""The byte layout of every key and value in the store. Pack and unpack, no I/O.

Numbers in keys are big-endian, so that LMDB's order is theirs; numbers in values are little-endian. Every
value but a block, which has its own checksums, ends in a CRC32C.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from upr_protocol.block import I64, U32, U64
from upr_protocol.errors import DataDamagedError, InvalidArgumentError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.limits import KEY_BYTES_MAX, PARTITIONS, REASON_BYTES_MAX

TABLES = (
    b"meta",
    b"partitions",
    b"blocks",
    b"producers",
    b"replaced",
    b"producer_times",
    b"cuts",
    b"consumers",
    b"aside",
    b"hashes",
)
_CRC = struct.Struct("<I")
_SEALED = 0x48674BC7
"""CRC32C of whatever ends in its own."""
_PARTITION_KEY = struct.Struct(">H")
_BLOCK_KEY = struct.Struct(">HQ")
_ASIDE_KEY = struct.Struct(">HQI")
_PARTITION = struct.Struct("<BQQQQQQQQQHH")
_ENDS = struct.Struct("<QQQ")
_ENDS_AT = struct.calcsize("<BQQQ")
"""Place of stored high, last complete marker and horizon in ``_PARTITION``."""
_RECORD = struct.Struct("<QQQ")
_PRODUCER_SEEN = struct.Struct("<QQ")
_TIME = struct.Struct(">Q")
_CONSUMER = struct.Struct("<BQQQQ")
_CUT = struct.Struct("<QQQH")
_PIN = struct.Struct("<HQQ")
_HASHES = struct.Struct("<IQ")
_HASHES_KIND = 1
HASHES = slice(_HASHES.size, -_CRC.size)
"""Place in a stored row of the hashes of a block's keys, "<u4"."""
HASHED = b"hashed"
"""Key in the table ``meta`` of the last transaction whose program knows the hashes of keys."""


HASHED_BYTES = 2**20
"""Keys that are hashed in one step."""


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """Row of a partition.

    Attributes:
        state: a PartitionState value of the wire.
        epoch: counts changes of the partition's state.
        purge_seqno: tombstones at or below may be gone.
        stored_high: the end of the newest stored block; the tail holds what is above.
        first_commit: journal commits below this number do not count for the partition.
        log: the failover log.
        complete: the last complete marker at or below ``stored_high``: the end of a stored block.
        horizon: the largest horizon of the stored blocks; above ``complete`` when the newest are part of a stretch.
        served_epoch: the epoch in which this server last served the partition; 0 for none.
        reason: why it is in its state, in words, at most REASON_BYTES_MAX; may be empty.
        since: when it entered its state, microseconds since the epoch; 0 if unknown.
        known_high: of a dead partition, the highest seqno that it is known to have had; 0 if none above the stored end
            is known.
    """

    state: int
    epoch: int
    purge_seqno: int
    stored_high: int
    first_commit: int
    log: FailoverLog
    complete: int = 0
    horizon: int = 0
    served_epoch: int = 0
    reason: str = ""
    since: int = 0
    known_high: int = 0


@dataclass(frozen=True, slots=True)
class ProducerRow:
    """Newest number of a producer in one partition, and the seqnos it was given.

    It counts only while the seqnos are on the partition's failover log: otherwise they were undone.

    Attributes:
        failover_id: the id under which the seqnos were given.
        start_seqno, end_seqno: of the run.
    """

    number: int
    failover_id: int
    start_seqno: int
    end_seqno: int


PRODUCER = np.dtype(
    [
        ("partition", "<u2"),
        ("number", "<u8"),
        ("failover_id", "<u8"),
        ("start_seqno", "<u8"),
        ("end_seqno", "<u8"),
    ]
)
"""A ProducerRow and its partition: 34 bytes. From 1024 on, the number of a place: see ``upr.engine.producers``."""
PRODUCER_SLOT = 16
"""Neighbouring partitions of a producer that share a row of the store."""


@dataclass(frozen=True, slots=True)
class ProducerNumbers:
    """Numbers that a producer wrote in some partitions.

    Attributes:
        table: dtype PRODUCER, ascending by partition.
        time: of the newest of its writes, microseconds since the epoch.
    """

    table: npt.NDArray[np.void]
    time: int


@dataclass(frozen=True, slots=True)
class ProducerSeen:
    """Row of a producer, over all partitions; the time is of its last write, in whole PRODUCER_GRAIN since the epoch."""

    last_number: int
    time: int


PRODUCER_GRAIN = 60_000_000
"""Microseconds. A producer that keeps writing moves in the index over time once in this interval."""


_CONSUMER_KIND = 0
"""The only kind of a consumer's row."""
DAMAGED_POSITION = b"\0"
"""Not a message of the wire. It marks a lost position, so that its consumer gets an error and not "no position"."""


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """Row of a consumer in one partition: what it acknowledged or saved.

    Attributes:
        generation: of the ownership at that time.
        failover_id: the id under which it acknowledged; 0 for none.
        seqno: the consumer has everything up to here durably.
        time: when, microseconds since the epoch.
        position: the saved position, as a Position of the wire; empty if it has saved none, DAMAGED_POSITION if it
            cannot be read. None, in a row to write, keeps the stored one.
    """

    generation: int
    failover_id: int
    seqno: int
    time: int
    position: bytes | None = b""


@dataclass(frozen=True, slots=True)
class Pin:
    """Marker that a cut pins in one partition, and the newest failover id at that time."""

    failover_id: int
    seqno: int


@dataclass(frozen=True, slots=True)
class CutRow:
    """Row of a cut: its pins by partition, ascending. Times are microseconds since the epoch, the lease is microseconds."""

    created: int
    expires: int
    lease: int
    pins: Mapping[int, Pin]


def seal(value: bytes, key: bytes) -> bytes:
    """Return the value with a CRC32C of key and value at its end: under the key of another it is detected."""
    return value + _CRC.pack(google_crc32c.value(key + value))


def check_sealed(value: bytes, key: bytes, what: str) -> None:
    """Raise DataDamagedError naming ``what`` unless a value is what ``seal`` returned for this key."""
    if len(value) < 4 or google_crc32c.extend(google_crc32c.value(key), value) != _SEALED:
        raise DataDamagedError(f"{what}: the stored value fails its checksum")


def unseal(value: bytes, key: bytes, what: str) -> bytes:
    """Return the value without its CRC32C, or raise DataDamagedError naming ``what``."""
    check_sealed(value, key, what)
    return value[:-4]


def hashes_hold(told: bytes | None, transaction: int) -> bool:
    """Return whether the last transaction's program knows the hashes of keys; ``told`` is what ``meta`` has of it."""
    return told == seal(transaction.to_bytes(8, "little"), HASHED)


def partition_key(partition: int) -> bytes:
    return _PARTITION_KEY.pack(partition)


def block_key(partition: int, end_seqno: int) -> bytes:
    return _BLOCK_KEY.pack(partition, end_seqno)


def unpack_block_key(key: bytes | memoryview) -> tuple[int, int]:
    partition, end_seqno = _BLOCK_KEY.unpack(key)
    return partition, end_seqno


def pack_hashes(partition: int, start: int, end: int, hashes: U32) -> bytes:
    """Return the stored form of the hashes of a block's keys, one a row; see ``hashes_of``."""
    return seal(_HASHES.pack(_HASHES_KIND, start) + hashes.tobytes(), block_key(partition, end))


def start_of_hashes(key: bytes, value: bytes) -> int:
    """Return the start of the block under a key, whose hashes are ``value[HASHES]``; or raise DataDamagedError."""
    check_sealed(value, key, "hashes of keys")
    if len(value) < _HASHES.size + 4 or len(value) % 4 != _HASHES.size % 4:
        raise DataDamagedError(f"hashes of keys: the stored row has {len(value) - 4} bytes")
    kind, start = _HASHES.unpack_from(value)
    if kind != _HASHES_KIND:
        raise DataDamagedError(f"kind of hashes is {kind}; must be {_HASHES_KIND}")
    return int(start)


def hashes_of(offsets: I64, data: bytes | memoryview) -> U32:
    """Return a hash of each key of a column, 32 bits. The store holds such hashes: they must never change.

    It takes about 4 times HASHED_BYTES of memory, or of the longest key.

    The sum of the key's words of 8 bytes, each times an odd weight of its place. Keys that collide can be forged, so
    equal hashes say that keys may be equal, and different hashes that they are not.

    Args:
        offsets: where each key begins, and the end of the last.
        data: bytes of all keys.
    """
    if len(offsets) < 2:
        return np.zeros(0, np.uint32)
    edges, first, found = offsets - offsets[0], 0, list[U32]()
    while first < len(offsets) - 1:
        last = int(np.searchsorted(edges, edges[first] + HASHED_BYTES, side="right")) - 1
        last = max(last, first + 1)
        low, high = int(offsets[first]), int(offsets[last])
        found.append(_hashes_of(offsets[first : last + 1] - low, data[low:high]))
        first = last
    return found[0] if len(found) == 1 else np.concatenate(found)


def hash_of(key: bytes) -> int:
    """Return the hash of one key, as ``hashes_of``: for one key arrays cost several times as much."""
    words = max(len(key) + 7 >> 3, 1)
    total = len(key) * _PLAIN_WEIGHTS[-1]
    for word, weight in zip(
        struct.unpack(f"<{words}Q", key.ljust(8 * words, b"\0")), _PLAIN_WEIGHTS, strict=False
    ):
        total += (word ^ word >> 32) * weight
    total &= 2**64 - 1
    return (((total ^ total >> 32) * _PLAIN_WEIGHTS[-2]) >> 32) & (2**32 - 1)


def _hashes_of(offsets: I64, data: bytes | memoryview) -> U32:
    lengths = np.diff(offsets)
    # A word at each byte; behind the last there are bytes for its word.
    padded = b"".join((data, bytes(8)))
    longest = int(lengths.max())
    if longest == lengths.min():
        count = max(longest + 7 >> 3, 1)
        table: U64 = np.ndarray((len(lengths), count), "<u8", padded, 0, (longest, 8)).copy()
        table[:, -1] &= _FIRST_BYTES[longest - 8 * (count - 1)]
        table ^= table >> _HALF
        table *= _WEIGHTS[:count]
        sums: U64 = table.sum(axis=1)
    else:
        words = np.maximum(lengths + 7 >> 3, 1)
        ends = np.cumsum(words)
        places = np.arange(ends[-1]) - np.repeat(ends - words, words)
        every: U64 = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
        found = every[np.repeat(offsets[:-1], words) + 8 * places]
        found[ends - 1] &= _FIRST_BYTES[lengths - 8 * (words - 1)]
        found ^= found >> _HALF
        found *= _WEIGHTS[places]
        sums = np.add.reduceat(found, ends - words)
    sums += lengths.astype(np.uint64) * _WEIGHTS[-1]
    sums ^= sums >> _HALF
    hashes: U32 = (sums * _WEIGHTS[-2] >> _HALF).astype(np.uint32)
    return hashes


def _weights(count: int) -> U64:
    """Return odd numbers whose bits look random: the output of splitmix64, which is the same everywhere."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return mixed | np.uint64(1)


_HALF = np.uint64(32)
_WEIGHTS = _weights(KEY_BYTES_MAX // 8 + 2)
_PLAIN_WEIGHTS: list[int] = _WEIGHTS.tolist()
_FIRST_BYTES = np.array([2 ** (8 * count) - 1 for count in range(9)], np.uint64)
"""Masks of the first bytes of a word, by their number."""


def aside_key(partition: int, commit: int, sequence: int) -> bytes:
    """Return the key of a dead partition's block: partition, journal commit, place in the commit."""
    return _ASIDE_KEY.pack(partition, commit, sequence)


def is_aside_key(key: bytes) -> bool:
    return len(key) == _ASIDE_KEY.size and _ASIDE_KEY.unpack(key)[0] < PARTITIONS


def pack_partition(partition: int, row: PartitionRow) -> bytes:
    """Return the stored form of the row, sealed under the partition's key."""
    reason = row.reason.encode()[:REASON_BYTES_MAX]
    head = _PARTITION.pack(
        row.state,
        row.epoch,
        row.served_epoch,
        row.purge_seqno,
        row.stored_high,
        row.complete,
        row.horizon,
        row.first_commit,
        row.since,
        row.known_high,
        len(reason),
        len(row.log),
    )
    records = (_RECORD.pack(r.failover_id, r.seqno, r.epoch) for r in row.log)
    return seal(head + reason + b"".join(records), partition_key(partition))


def unpack_partition(value: bytes, partition: int) -> PartitionRow:
    """Return the row, or raise DataDamagedError."""
    body = unseal(value, partition_key(partition), f"partition {partition}")
    try:
        fields = _PARTITION.unpack_from(body)
        state, epoch, served, purge, stored, complete, horizon, first, since, known = fields[:-2]
        words, count = fields[-2:]
        at = _PARTITION.size + words
        # The limit may cut the last character in two.
        reason = body[_PARTITION.size : at].decode(errors="ignore")
        if len(body) != at + _RECORD.size * count:
            raise DataDamagedError(f"partition {partition}: the stored row has {len(body)} bytes")
        records = _RECORD.iter_unpack(body[at:])
        log = FailoverLog(tuple(FailoverRecord(*record) for record in records))
        return PartitionRow(
            state, epoch, purge, stored, first, log, complete, horizon, served, reason, since, known
        )
    except (struct.error, InvalidArgumentError) as error:
        raise DataDamagedError(
            f"partition {partition}: the stored row is malformed: {error}"
        ) from error


def with_ends(value: bytes, partition: int, stored_high: int, complete: int, horizon: int) -> bytes:
    """Return the stored form of a row with other ends, or raise DataDamagedError; the rest is not taken apart."""
    key = partition_key(partition)
    body = unseal(value, key, f"partition {partition}")
    ends = _ENDS.pack(stored_high, complete, horizon)
    return seal(body[:_ENDS_AT] + ends + body[_ENDS_AT + len(ends) :], key)


def producer_key(producer: bytes, slot: int | None = None) -> bytes:
    """Return the name, a zero byte (no name contains one) and the slot; without a slot the key of its ProducerSeen."""
    return producer + (b"\0" if slot is None else b"\0" + _PARTITION_KEY.pack(slot))


def producer_slot(key: bytes) -> int | None:
    """Return the slot of a producer's key; None for the one of its ProducerSeen."""
    return None if len(key) < 4 or key[-3] else int(_PARTITION_KEY.unpack(key[-2:])[0])


def pack_producer(key: bytes, table: npt.NDArray[np.void]) -> bytes:
    """Pack a producer's numbers in the partitions of one slot; see PRODUCER."""
    return seal(table.tobytes(), key)


def unpack_producer(key: bytes, value: bytes) -> npt.NDArray[np.void]:
    """Return the table of a slot, or raise DataDamagedError."""
    what = f"producer {key[:-3]!r}"
    body = unseal(value, key, what)
    if not body or len(body) % PRODUCER.itemsize:
        raise DataDamagedError(f"{what}: the stored row has {len(body)} bytes")
    table = np.frombuffer(body, PRODUCER)
    partitions = table["partition"]
    slot = _PARTITION_KEY.unpack(key[-2:])[0]
    if (partitions // PRODUCER_SLOT != slot).any() or (partitions[1:] <= partitions[:-1]).any():
        raise DataDamagedError(f"{what}: the stored row has partitions that are not its own")
    return table


def pack_producer_seen(key: bytes, row: ProducerSeen) -> bytes:
    return seal(_PRODUCER_SEEN.pack(row.last_number, row.time), key)


def unpack_producer_seen(key: bytes, value: bytes) -> ProducerSeen:
    """Return the row, or raise DataDamagedError."""
    what, size = f"producer {key[:-1]!r}", _PRODUCER_SEEN.size
    body = unseal(value, key, what)
    if len(body) != size:
        raise DataDamagedError(f"{what}: the stored row has {len(body)} bytes, not {size}")
    return ProducerSeen(*_PRODUCER_SEEN.unpack(body))


def producer_time_key(time: int, producer: bytes) -> bytes:
    """Return the key in the index over time, whose values are empty."""
    return _TIME.pack(time) + producer


def unpack_producer_time_key(key: bytes) -> tuple[int, bytes]:
    return _TIME.unpack(key[:8])[0], key[8:]


def consumer_key(consumer: bytes, partition: int) -> bytes:
    """Return the name, a zero byte (no name contains one) and the partition."""
    return consumer + b"\0" + _PARTITION_KEY.pack(partition)


def unpack_consumer_key(key: bytes) -> tuple[bytes, int]:
    return key[:-3], _PARTITION_KEY.unpack(key[-2:])[0]


def is_consumer_key(key: bytes) -> bool:
    """Return whether a key has a consumer's name, in UTF-8, and a partition."""
    if len(key) < 4 or key[-3] or unpack_consumer_key(key)[1] >= PARTITIONS:
        return False
    try:
        key[:-3].decode()
    except UnicodeDecodeError:
        return False
    return True


def pack_consumer(key: bytes, row: ConsumerRow) -> bytes:
    head = _CONSUMER.pack(_CONSUMER_KIND, row.generation, row.failover_id, row.seqno, row.time)
    assert row.position is not None
    return seal(head + row.position, key)


def unpack_consumer(key: bytes, value: bytes) -> ConsumerRow:
    """Return the row, or raise DataDamagedError."""
    what = f"consumer {key[:-3]!r}"
    body = unseal(value, key, what)
    if len(body) < _CONSUMER.size:
        raise DataDamagedError(f"{what}: the stored row has {len(body)} bytes")
    _, generation, failover_id, seqno, time = _CONSUMER.unpack_from(body)
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
