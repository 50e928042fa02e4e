"""The registered consumers of a bucket: what each of them has acknowledged, partition by partition.

A consumer is registered by its first Ack in a call with a consumer name. What it acknowledged holds purging up;
what of it is not stored yet is handed out as a value (Changes) and stored by the service. A crash loses the
acknowledgements of the last second: a stored position that is too low only makes purging more careful. One that
is too high, because its consumer had just gone back, can let purging overtake the consumer, which is then rolled
back to 0: right, though costly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from upr.storage.keyspace import ConsumerRow
from upr_protocol.block import I64, U64
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import CONSUMERS_MAX, PARTITIONS, SEQNO_MAX

NO_LIMIT: Final = np.iinfo(np.uint64).max
_POSITION: Final = np.dtype([("partition", "<u4"), ("seqno", "<u8")])
_Mask = npt.NDArray[np.bool_]


def read_positions(data: bytes) -> tuple[I64, U64]:
    """Return the partitions and seqnos of an Ack.

    Raises:
        InvalidArgumentError: its size is none that positions add up to, or one of them is out of range.
    """
    if len(data) % _POSITION.itemsize or len(data) > PARTITIONS * _POSITION.itemsize:
        raise InvalidArgumentError(
            f"an Ack of {len(data)} bytes, a position takes {_POSITION.itemsize} and there are at most {PARTITIONS}"
        )
    table = np.frombuffer(data, _POSITION)
    partitions, seqnos = table["partition"].astype(np.int64), table["seqno"].astype(np.uint64)
    if (partitions >= PARTITIONS).any():
        worst = int(partitions.max())
        raise InvalidArgumentError(
            f"an Ack of partition {worst}, partitions are 0 to {PARTITIONS - 1}"
        )
    if (seqnos > SEQNO_MAX).any():
        worst = int(seqnos.max())
        raise InvalidArgumentError(f"an Ack of seqno {worst}, the largest seqno is {SEQNO_MAX}")
    return partitions, seqnos


def _zeros() -> U64:
    return np.zeros(PARTITIONS, np.uint64)


def _no_partition() -> _Mask:
    return np.zeros(PARTITIONS, bool)


@dataclass(slots=True)
class Consumer:
    """One registered consumer.

    Attributes, each but the first of shape (1024,):
        generation: how many calls were opened under the name since it was registered, the registering one included.
        known: where it has a position.
        seqno, failover_id: uint64, everything up to this seqno is safe with it, acknowledged under this id.
        time: uint64, when it was acknowledged, microseconds since the epoch.
        dirty: where the position is not stored yet.
    """

    generation: int
    known: _Mask = field(default_factory=_no_partition)
    seqno: U64 = field(default_factory=_zeros)
    failover_id: U64 = field(default_factory=_zeros)
    time: U64 = field(default_factory=_zeros)
    dirty: _Mask = field(default_factory=_no_partition)

    @property
    def last_ack_time(self) -> int:
        """When it acknowledged last, microseconds since the epoch."""
        return int(self.time.max())

    def passed(self, newest_id: U64) -> U64:
        """Return up to which seqno it has passed each partition; NO_LIMIT where it has no position.

        A position acknowledged under an id that is not the newest counts as 0.
        """
        passed = np.where(self.failover_id == newest_id, self.seqno, np.uint64(0))
        passed[~self.known] = NO_LIMIT
        return passed


@dataclass(frozen=True, slots=True)
class Changes:
    """Copies of what is to be stored: positions by name, and partitions whose rows are to be removed."""

    removed: Mapping[str, I64]
    written: Mapping[str, tuple[int, I64, U64, U64, U64]]

    def rows(self) -> dict[tuple[bytes, int], ConsumerRow | None]:
        """Return the rows to be written; None for those to be removed."""
        rows: dict[tuple[bytes, int], ConsumerRow | None] = {}
        for name, partitions in self.removed.items():
            rows.update(dict.fromkeys(((name.encode(), p) for p in partitions.tolist()), None))
        for name, (generation, partitions, ids, seqnos, times) in self.written.items():
            key = name.encode()
            columns = (partitions.tolist(), ids.tolist(), seqnos.tolist(), times.tolist())
            for partition, failover_id, seqno, time in zip(*columns, strict=True):
                rows[key, partition] = ConsumerRow(generation, failover_id, seqno, time)
        return rows


class Consumers:
    """All registered consumers of one bucket, at most CONSUMERS_MAX.

    The Acks of a further name are not kept, so that purging may overtake it; its call goes on.
    """

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}
        self._removed: dict[str, _Mask] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._consumers

    def __iter__(self) -> Iterator[tuple[str, Consumer]]:
        """Yield (name, consumer), by name."""
        return iter(sorted(self._consumers.items()))

    def load(self, rows: Mapping[bytes, Mapping[int, ConsumerRow]]) -> None:
        """Take in the stored rows, at start."""
        for key, by_partition in rows.items():
            consumer = Consumer(max(row.generation for row in by_partition.values()))
            self._consumers[key.decode("utf-8", "surrogateescape")] = consumer
            for partition, row in by_partition.items():
                consumer.known[partition] = True
                consumer.seqno[partition] = row.seqno
                consumer.failover_id[partition] = row.failover_id
                consumer.time[partition] = row.time

    # What consumers do

    def opened(self, name: str) -> None:
        """Count a call under a name; the number is stored with the next write of the consumer's rows."""
        consumer = self._consumers.get(name)
        if consumer is not None:
            consumer.generation += 1

    def started(self, name: str, partition: int, newest_id: int, seqno: int) -> None:
        """Have the position come down to where a stream was opened, if it is above: its consumer went back."""
        consumer = self._consumers.get(name)
        if (
            consumer is not None
            and int(consumer.failover_id[partition]) == newest_id
            and int(consumer.seqno[partition]) > seqno
        ):
            consumer.seqno[partition] = seqno
            consumer.dirty[partition] = True

    def acknowledge(
        self, name: str, partitions: I64, seqnos: U64, failover_ids: U64, now: int
    ) -> bool:
        """Take the newest word of a consumer; False when it is not kept, because there are CONSUMERS_MAX others.

        Args:
            partitions: 0 to 1023; where one is named twice its last seqno counts.
            seqnos, failover_ids: one a partition.
            now: microseconds since the epoch.
        """
        if not len(partitions):
            return True
        consumer = self._consumers.get(name)
        if consumer is None:
            if len(self._consumers) >= CONSUMERS_MAX:
                return False
            consumer = self._consumers[name] = Consumer(1)
        consumer.known[partitions] = True
        consumer.seqno[partitions] = seqnos
        consumer.failover_id[partitions] = failover_ids
        consumer.time[partitions] = now
        consumer.dirty[partitions] = True
        return True

    def forget(self, name: str) -> bool:
        """Forget a consumer's positions; False when it is not registered."""
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return False
        removed = self._removed.get(name)
        self._removed[name] = consumer.known if removed is None else removed | consumer.known
        return True

    # What purging asks

    def limit(self, newest_id: U64) -> U64:
        """Return up to which seqno all consumers have passed each partition; NO_LIMIT where nobody has a position.

        Args:
            newest_id: each partition's newest failover id, uint64, shape (1024,).

        Returns:
            uint64, shape (1024,).
        """
        limit = np.full(PARTITIONS, NO_LIMIT, np.uint64)
        for consumer in self._consumers.values():
            np.minimum(limit, consumer.passed(newest_id), out=limit)
        return limit

    def holders(self, partition: int, newest_id: int, below: int) -> list[tuple[str, int]]:
        """Return, by name, the consumers that have not passed a seqno, each with the seqno that it has passed.

        Args:
            newest_id: the partition's newest failover id.
            below: consumers at or above this seqno are left out.
        """
        found = []
        for name, consumer in self:
            if not consumer.known[partition]:
                continue
            current = int(consumer.failover_id[partition]) == newest_id
            seqno = int(consumer.seqno[partition]) if current else 0
            if seqno < below:
                found.append((name, seqno))
        return found

    # What is to be stored

    @property
    def changed(self) -> bool:
        """Whether something is not stored yet."""
        return bool(self._removed) or any(c.dirty.any() for c in self._consumers.values())

    def take_changes(self, max_rows: int) -> Changes | None:
        """Return, once, what is not stored yet, at most about ``max_rows`` rows; None when everything is.

        Removed rows come first and alone for a name, so that what is written after a Forget stays. At most one of
        the results may be under way at a time.
        """
        left = max_rows
        removed: dict[str, I64] = {}
        written: dict[str, tuple[int, I64, U64, U64, U64]] = {}
        while self._removed and left > 0:
            name, mask = self._removed.popitem()
            removed[name] = np.flatnonzero(mask)
            left -= len(removed[name])
        for name, consumer in self._consumers.items():
            if left <= 0:
                break
            if name in self._removed or name in removed or not consumer.dirty.any():
                continue
            p = np.flatnonzero(consumer.dirty)
            columns = (consumer.failover_id[p], consumer.seqno[p], consumer.time[p])
            written[name] = (consumer.generation, p, *columns)
            consumer.dirty[p] = False
            left -= len(p)
        return Changes(removed, written) if removed or written else None

    def put_back(self, changes: Changes) -> None:
        """Count changes as not stored again: storing them failed."""
        for name, partitions in changes.removed.items():
            mask = self._removed.setdefault(name, _no_partition())
            mask[partitions] = True
        for name, (_, partitions, *_) in changes.written.items():
            consumer = self._consumers.get(name)
            if consumer is not None:
                # It may have been forgotten and registered anew meanwhile, with fewer partitions.
                consumer.dirty[partitions] |= consumer.known[partitions]
