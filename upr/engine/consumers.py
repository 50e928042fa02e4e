"""The registered consumers of a bucket: what each of them has acknowledged, partition by partition.

A consumer is registered by its first Ack in a call with a consumer name, or by the first position that it saves
here. A saved position counts, for purging and for whoever asks, from when it is stored (``saves``).

What a consumer acknowledged holds purging up;
what of it is not stored yet is handed out as a value (Changes) and stored by the service. A crash loses the
acknowledgements of the last second: a stored position that is too low only makes purging more careful. One that
is too high, because its consumer had just gone back, can let purging overtake the consumer, which is then rolled
back to 0: right, though costly.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from upr.engine.saves import Save, Saves
from upr.storage.keyspace import ConsumerRow
from upr_protocol.block import I64, U64
from upr_protocol.errors import InvalidArgumentError, TooManyError
from upr_protocol.limits import CONSUMERS_MAX, PARTITIONS, SEQNO_MAX
from upr_protocol.records import POSITION

NO_LIMIT: Final = np.iinfo(np.uint64).max
_Mask = npt.NDArray[np.bool_]


def read_positions(data: bytes) -> tuple[I64, U64]:
    """Return the partitions and seqnos of an Ack.

    Raises:
        InvalidArgumentError: its size is none that positions add up to, or one of them is out of range.
    """
    if len(data) % POSITION.itemsize or len(data) > PARTITIONS * POSITION.itemsize:
        raise InvalidArgumentError(
            f"an Ack of {len(data)} bytes, a position takes {POSITION.itemsize} and there are at most {PARTITIONS}"
        )
    table = np.frombuffer(data, POSITION)
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
        generation: of the ownership under which it acknowledged or saved last.
        known: where it has acknowledged or saved.
        seqno, failover_id: uint64, everything up to this seqno is safe with it, acknowledged under this id.
        time: uint64, when it was acknowledged, microseconds since the epoch.
        dirty: where that is not stored yet.

    And positions: the saved positions by partition, as ``ConsumerRow.position``; all of them are stored.
    """

    generation: int
    known: _Mask = field(default_factory=_no_partition)
    seqno: U64 = field(default_factory=_zeros)
    failover_id: U64 = field(default_factory=_zeros)
    time: U64 = field(default_factory=_zeros)
    dirty: _Mask = field(default_factory=_no_partition)
    positions: dict[int, bytes] = field(default_factory=dict)

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
    written: Mapping[str, tuple[int, I64, U64, U64, U64, list[bytes]]]

    def rows(self) -> dict[tuple[bytes, int], ConsumerRow | None]:
        """Return the rows to be written; None for those to be removed."""
        rows: dict[tuple[bytes, int], ConsumerRow | None] = {}
        for name, partitions in self.removed.items():
            rows.update(dict.fromkeys(((name.encode(), p) for p in partitions.tolist()), None))
        for name, (generation, partitions, ids, seqnos, times, saved) in self.written.items():
            key = name.encode()
            columns = (partitions.tolist(), ids.tolist(), seqnos.tolist(), times.tolist(), saved)
            for partition, *rest in zip(*columns, strict=True):
                rows[key, partition] = ConsumerRow(generation, *rest)
        return rows


class Consumers:
    """All registered consumers of one bucket, at most CONSUMERS_MAX.

    The Acks of a further name are not kept, so that purging may overtake it; its call goes on.
    """

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}
        self._removed: dict[str, _Mask] = {}
        self.saves = Saves(self)

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
                if row.position:
                    consumer.positions[partition] = row.position

    def get(self, name: str) -> Consumer | None:
        """Return a registered consumer."""
        return self._consumers.get(name)

    @property
    def newest_generation(self) -> int:
        """The largest generation of all of them."""
        return max((consumer.generation for consumer in self._consumers.values()), default=0)

    # What consumers do

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
        self.saves.overtaken(name, np.array([partition]))

    def acknowledge(
        self,
        name: str,
        partitions: I64,
        seqnos: U64,
        failover_ids: U64,
        now: int,
        generation: int = 0,
    ) -> bool:
        """Take the newest word of a consumer; False when it is not kept, because there are CONSUMERS_MAX others.

        Args:
            partitions: 0 to 1023; where one is named twice its last seqno counts.
            seqnos, failover_ids: one a partition.
            now: microseconds since the epoch.
            generation: of the consumer's ownership.
        """
        if not len(partitions):
            return True
        consumer = self._consumers.get(name)
        if consumer is None:
            if len(self._consumers) >= CONSUMERS_MAX:
                return False
            consumer = self._consumers[name] = Consumer(generation)
        consumer.generation = max(consumer.generation, generation)
        self.saves.overtaken(name, partitions)
        consumer.known[partitions] = True
        consumer.seqno[partitions] = seqnos
        consumer.failover_id[partitions] = failover_ids
        consumer.time[partitions] = now
        consumer.dirty[partitions] = True
        return True

    def forget(self, name: str) -> bool:
        """Forget a consumer's positions, and those that it is saving; False when it is not registered."""
        consumer = self._consumers.pop(name, None)
        going = self.saves.void(name)
        if consumer is None and not going.any():
            return False
        removed = self._removed.setdefault(name, _no_partition())
        removed |= going if consumer is None else going | consumer.known
        return True

    @property
    def is_removing(self) -> bool:
        """Whether rows of consumers that were forgotten are still to be removed."""
        return bool(self._removed)

    # What is saved

    def check_room(self, names: Set[str]) -> None:
        """Raise TooManyError where consumers that are not registered cannot all be."""
        if len(self._consumers) + len(names - self._consumers.keys()) > CONSUMERS_MAX:
            raise TooManyError(
                f"{len(self._consumers)} consumers are registered, the limit is {CONSUMERS_MAX}",
                hint="'upr-admin consumers forget NAME' lets go of one that is not needed",
                retriable=False,
            )

    def take_saved(self, save: "Save") -> None:
        """Take a save in that is stored: what it says counts from now on."""
        consumer = self._consumers.get(save.name)
        if consumer is None:
            consumer = self._consumers[save.name] = Consumer(save.generation)
        consumer.generation = max(consumer.generation, save.generation)
        # Where the consumer has said something since, that is the newer word on what it has.
        counts = save.partitions[save.newest]
        consumer.dirty[counts] = False
        if save.positions is None:
            consumer.known[counts] = False
            for partition in save.partitions.tolist():
                consumer.positions.pop(partition, None)
            if not consumer.known.any():
                del self._consumers[save.name]
            return
        consumer.known[counts] = True
        consumer.seqno[counts] = save.seqnos[save.newest]
        consumer.failover_id[counts] = save.failover_ids[save.newest]
        consumer.time[counts] = save.time
        consumer.positions.update(zip(save.partitions.tolist(), save.positions, strict=True))

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
        written: dict[str, tuple[int, I64, U64, U64, U64, list[bytes]]] = {}
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
            saved = [consumer.positions.get(partition, b"") for partition in p.tolist()]
            written[name] = (consumer.generation, p, *columns, saved)
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
