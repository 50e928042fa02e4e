"""Consumers of a bucket: acknowledged positions by partition, and pending saves.

A consumer is registered by its first Ack in a call with a consumer name, or by the first position that it saves
here. A saved position counts, for purging and for readers, once it is stored (``Saves``: in the order in which
they were decided).

Acknowledged positions hold purging. Those not yet stored are handed out as a value (Changes). A crash loses those of the
last second: a stored position that is too low only makes purging more careful. One that is too high, because its
consumer had just rolled back, can let purging overtake the consumer, which then rolls back to 0: correct, but costly.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from upr.storage.keyspace import ConsumerRow
from upr_protocol.block import I64, POSITION, U64, Mask
from upr_protocol.errors import InvalidArgumentError, TooManyError
from upr_protocol.limits import CONSUMERS_MAX, PARTITIONS, SEQNO_MAX


@dataclass(eq=False, slots=True)
class Save:
    """Positions of one consumer, stored or removed in one transaction.

    Attributes:
        partitions: each once, shape (n,).
        failover_ids, seqnos: what they acknowledge, shape (n,).
        positions: as ``ConsumerRow.position``, n of them; None to remove what there is.
        time: when the request arrived, microseconds since the epoch.
        acknowledged: seqnos that count, lower where the consumer has rolled back since, shape (n,).
        newest: where no later acknowledgement of the consumer replaces it, shape (n,).
        under_way: whether the store has begun to write it.
        void: whether the consumer was forgotten since: nothing of the save counts.
        ended: whether it is stored or has failed.
        failure: the error of the store, if it failed.
    """

    name: str
    generation: int
    partitions: I64
    failover_ids: U64
    seqnos: U64
    positions: Sequence[bytes] | None
    time: int
    acknowledged: U64 = field(init=False)
    newest: Mask = field(init=False)
    under_way: bool = False
    void: bool = False
    ended: bool = False
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.acknowledged = self.seqnos
        self.newest = np.ones(len(self.partitions), bool)

    def rows(self) -> dict[tuple[bytes, int], ConsumerRow | None]:
        """Return the rows to write; None for a row to remove."""
        key, partitions = self.name.encode(), self.partitions.tolist()
        if self.positions is None:
            return dict.fromkeys(((key, p) for p in partitions), None)
        columns = (partitions, self.failover_ids.tolist(), self.seqnos.tolist(), self.positions)
        return {
            (key, partition): ConsumerRow(self.generation, failover_id, seqno, self.time, position)
            for partition, failover_id, seqno, position in zip(*columns, strict=True)
        }


class Saves:
    """Pending saves of a bucket, in the order of the decisions; consumers receive one once it is stored."""

    def __init__(self, consumers: "Consumers") -> None:
        self._consumers = consumers
        self._waiting: list[Save] = []

    def add(self, save: Save) -> None:
        """Append a save; TooManyError if its consumer is not registered, and CONSUMERS_MAX others are."""
        if save.positions is not None:
            self._consumers.check_room({save.name, *(other.name for other in self._waiting)})
        self._waiting.append(save)

    def of(self, name: str) -> list[Save]:
        return [save for save in self._waiting if save.name == name]

    def went_back(self, name: str, partitions: I64, newest_ids: U64, seqnos: U64) -> None:
        """Lower what pending saves under these ids count for, to where the consumer has opened streams."""
        for save in self.of(name):
            _, here, there = np.intersect1d(save.partitions, partitions, return_indices=True)
            current = save.failover_ids[here] == newest_ids[there]
            here, there = here[current], there[current]
            save.acknowledged = save.acknowledged.copy()
            save.acknowledged[here] = np.minimum(save.acknowledged[here], seqnos[there])

    def overtaken(self, name: str, partitions: I64) -> None:
        """Record that newer acknowledgements replace pending saves of these partitions."""
        for save in self._waiting:
            if save.name == name:
                save.newest &= ~np.isin(save.partitions, partitions)

    def void(self, name: str) -> Mask:
        """Void a consumer's saves; return the partitions of which they may leave rows."""
        left = np.zeros(PARTITIONS, bool)
        voided = self.of(name)
        for save in voided:
            save.void = True
            left[save.partitions] = True
        self._end([save for save in voided if not save.under_way])
        return left

    def take(self, max_rows: int) -> list[Save]:
        """Return the oldest ones, at most about ``max_rows`` rows of them; ``stored`` or ``failed`` must follow."""
        taken: list[Save] = []
        rows = 0
        for save in self._waiting:
            if rows >= max_rows:
                break
            save.under_way = True
            taken.append(save)
            rows += len(save.partitions)
        return taken

    def stored(self, saves: Sequence[Save]) -> None:
        self._end(saves)
        for save in saves:
            if not save.void:
                self._consumers.take_saved(save)

    def failed(self, saves: Sequence[Save], why: BaseException) -> None:
        """Fail saves of which nothing was stored."""
        self._end(saves)
        for save in saves:
            save.failure = why

    def _end(self, saves: Sequence[Save]) -> None:
        for save in saves:
            save.ended = True
        self._waiting = [save for save in self._waiting if not save.ended]


NO_LIMIT: Final = np.iinfo(np.uint64).max


def read_positions(data: bytes) -> tuple[I64, U64]:
    """Return the partitions and seqnos of an Ack; InvalidArgumentError if it is malformed, or one is out of range."""
    if len(data) % POSITION.itemsize or len(data) > PARTITIONS * POSITION.itemsize:
        raise InvalidArgumentError(
            f"Ack is {len(data)} bytes; must be a multiple of {POSITION.itemsize}, for at most {PARTITIONS} positions"
        )
    table = np.frombuffer(data, POSITION)
    partitions, seqnos = table["partition"].astype(np.int64), table["seqno"].astype(np.uint64)
    if (partitions >= PARTITIONS).any():
        worst = int(partitions.max())
        raise InvalidArgumentError(f"partition of an Ack is {worst}; must be 0 to {PARTITIONS - 1}")
    if (seqnos > SEQNO_MAX).any():
        worst = int(seqnos.max())
        raise InvalidArgumentError(f"seqno of an Ack is {worst}; must be at most {SEQNO_MAX}")
    return partitions, seqnos


def _zeros() -> U64:
    return np.zeros(PARTITIONS, np.uint64)


def _no_partition() -> Mask:
    return np.zeros(PARTITIONS, bool)


@dataclass(slots=True)
class Consumer:
    """A registered consumer.

    Attributes, each but the first of shape (1024,):
        generation: the ownership under which it last acknowledged or saved.
        known: where it has acknowledged or saved.
        seqno, failover_id: uint64, the acknowledged seqno, and the id under which it was acknowledged.
        time: uint64, when it was acknowledged or last seen in use, microseconds since the epoch.
        dirty: where these are not stored yet.
        saved: where it has saved a position, which only the store holds.
    """

    generation: int
    known: Mask = field(default_factory=_no_partition)
    seqno: U64 = field(default_factory=_zeros)
    failover_id: U64 = field(default_factory=_zeros)
    time: U64 = field(default_factory=_zeros)
    dirty: Mask = field(default_factory=_no_partition)
    saved: Mask = field(default_factory=_no_partition)

    @property
    def last_ack_time(self) -> int:
        """Return the newest ``time``; 0 if unknown."""
        return int(self.time.max())

    def forget(self, partitions: I64 | Sequence[int]) -> None:
        """Know nothing of partitions: what is left there would be told, and stored when a stream begins below it."""
        self.known[partitions] = False
        self.seqno[partitions] = self.failover_id[partitions] = self.time[partitions] = 0

    def passed(self, newest_id: U64) -> U64:
        """Return up to which seqno it has passed each partition, shape (1024,); NO_LIMIT where it has no position.

        A position acknowledged under an id that is not the newest counts as 0.
        """
        passed = np.where(self.failover_id == newest_id, self.seqno, np.uint64(0))
        passed[~self.known] = NO_LIMIT
        return passed

    def behind(self, high: U64) -> U64:
        """Return how many mutations it has not acknowledged in each partition; 0 where it has no position."""
        return np.where(self.known, np.maximum(high, self.seqno) - self.seqno, np.uint64(0))


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to store: copies of positions by name, and partitions whose rows go."""

    removed: Mapping[str, I64]
    written: Mapping[str, tuple[int, I64, U64, U64, U64]]

    def rows(self) -> dict[tuple[bytes, int], ConsumerRow | None]:
        """Return the rows to write; None for a row to remove."""
        rows: dict[tuple[bytes, int], ConsumerRow | None] = {}
        for name, partitions in self.removed.items():
            rows.update(dict.fromkeys(((name.encode(), p) for p in partitions.tolist()), None))
        for name, (generation, partitions, ids, seqnos, times) in self.written.items():
            key = name.encode()
            columns = (partitions.tolist(), ids.tolist(), seqnos.tolist(), times.tolist())
            for partition, failover_id, seqno, time in zip(*columns, strict=True):
                rows[key, partition] = ConsumerRow(generation, failover_id, seqno, time, None)
        return rows


class Consumers:
    """Registered consumers of one bucket, at most CONSUMERS_MAX.

    Acks of further names are not kept, so purging may overtake them; their calls continue.
    """

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}
        self._removed: dict[str, Mask] = {}
        self.saves = Saves(self)

    def __contains__(self, name: str) -> bool:
        return name in self._consumers

    def __iter__(self) -> Iterator[tuple[str, Consumer]]:
        """Yield (name, consumer), by name."""
        return iter(sorted(self._consumers.items()))

    def load(self, rows: Iterable[tuple[bytes, int, ConsumerRow]]) -> None:
        """Take in the stored rows with their names and partitions, at start."""
        for key, partition, row in rows:
            name = key.decode("utf-8", "surrogateescape")
            consumer = self._consumers.get(name)
            if consumer is None:
                consumer = self._consumers[name] = Consumer(0)
            consumer.generation = max(consumer.generation, row.generation)
            consumer.known[partition] = True
            consumer.seqno[partition] = row.seqno
            consumer.failover_id[partition] = row.failover_id
            consumer.time[partition] = row.time
            consumer.saved[partition] = bool(row.position)

    def replicated(self, name: str, rows: Mapping[int, ConsumerRow | None]) -> None:
        """Take in rows by partition that came from the upstream and are stored; None for one that is gone."""
        key = name.encode()
        self.load((key, partition, row) for partition, row in rows.items() if row is not None)
        consumer = self._consumers.get(name)
        if consumer is not None:
            gone = [partition for partition, row in rows.items() if row is None]
            consumer.saved[gone] = False
            consumer.forget(gone)
            consumer.dirty[list(rows)] = False
            if not consumer.known.any():
                del self._consumers[name]

    def get(self, name: str) -> Consumer | None:
        return self._consumers.get(name)

    @property
    def newest_generation(self) -> int:
        """Return the largest generation of all consumers."""
        return max((consumer.generation for consumer in self._consumers.values()), default=0)

    # Acknowledgements and expiry

    def started(self, name: str, partitions: I64, newest_ids: U64, seqnos: U64) -> None:
        """Lower positions to where streams were opened: their consumer rolled back.

        Pending saves too: they are stored as they are, and count for less.
        """
        self.saves.went_back(name, partitions, newest_ids, seqnos)
        consumer = self._consumers.get(name)
        if consumer is None:
            return
        current = consumer.failover_id[partitions] == newest_ids
        above = current & (consumer.seqno[partitions] > seqnos)
        consumer.seqno[partitions[above]] = seqnos[above]
        consumer.dirty[partitions[above]] = True

    def acknowledge(
        self,
        name: str,
        partitions: I64,
        seqnos: U64,
        failover_ids: U64,
        now: int,
        generation: int = 0,
    ) -> bool:
        """Record an Ack; False when it is not kept, because there are CONSUMERS_MAX others.

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

    def expire(self, before: int, now: int, used: Container[str]) -> list[str]:
        """Expire the consumers that are idle since a time, and return their names.

        Consumers in use get a fresh stored time now and then, so that their expiry counts from when they leave.

        Args:
            before, now: microseconds since the epoch.
            used: names that are in use now.
        """
        gone = []
        for name, consumer in self._consumers.items():
            last = consumer.last_ack_time
            if name in used:
                if last < (before + now) // 2:
                    one = np.flatnonzero(consumer.known)[:1]
                    consumer.time[one], consumer.dirty[one] = now, True
            # A consumer with damaged rows has no known time; one with a pending save is in use.
            elif 0 < last < before and not self.saves.of(name):
                gone.append(name)
        for name in gone:
            self.forget(name)
        return gone

    @property
    def is_removing(self) -> bool:
        """Return whether rows of forgotten consumers are still in the store."""
        return bool(self._removed)

    def is_forgetting(self, name: str) -> bool:
        """Return whether rows of this forgotten consumer are still in the store."""
        return name in self._removed

    # Saves

    def check_room(self, names: Set[str]) -> None:
        """Raise TooManyError where consumers that are not registered cannot all be."""
        if len(self._consumers) + len(names - self._consumers.keys()) > CONSUMERS_MAX:
            raise TooManyError(
                f"consumers of the bucket are {len(self._consumers)}; must be below {CONSUMERS_MAX}",
                hint="drop one that is not needed with 'upr-admin consumers forget NAME'",
                retriable=False,
            )

    def take_saved(self, save: "Save") -> None:
        """Apply a stored save: it counts from now on."""
        consumer = self._consumers.get(save.name)
        if consumer is None:
            consumer = self._consumers[save.name] = Consumer(save.generation)
        consumer.generation = max(consumer.generation, save.generation)
        # A later acknowledgement counts more. The save has overwritten its row, so it must be stored again.
        counts, overtaken = save.partitions[save.newest], save.partitions[~save.newest]
        consumer.dirty[overtaken] = consumer.known[overtaken]
        consumer.dirty[counts] = False
        if save.positions is None:
            consumer.forget(counts)
            consumer.saved[save.partitions] = False
            if not consumer.known.any():
                del self._consumers[save.name]
            return
        # The store now has a row in each of these partitions, so a later removal must cover them.
        consumer.known[save.partitions] = True
        consumer.seqno[counts] = save.acknowledged[save.newest]
        consumer.dirty[counts] = (save.acknowledged < save.seqnos)[save.newest]
        consumer.failover_id[counts] = save.failover_ids[save.newest]
        consumer.time[counts] = save.time
        consumer.saved[save.partitions] = True

    # Limits for purging

    def limit(self, newest_id: U64) -> U64:
        """Return up to which seqno all consumers have passed each partition, as ``Consumer.passed``."""
        limit = np.full(PARTITIONS, NO_LIMIT, np.uint64)
        for consumer in self._consumers.values():
            np.minimum(limit, consumer.passed(newest_id), out=limit)
        return limit

    def holders(self, partition: int, newest_id: int, below: int) -> list[tuple[str, int]]:
        """Return, by name, the consumers that have passed less than ``below``, each with the seqno that it has passed."""
        found = []
        for name, consumer in self:
            current = int(consumer.failover_id[partition]) == newest_id
            seqno = int(consumer.seqno[partition]) if current else 0
            if consumer.known[partition] and seqno < below:
                found.append((name, seqno))
        return found

    # Changes to store

    def take_changes(self, max_rows: int) -> Changes | None:
        """Return changes to store, each once, at most about ``max_rows`` rows; None when there are none.

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
        """Take changes back that could not be stored."""
        for name, partitions in changes.removed.items():
            mask = self._removed.setdefault(name, _no_partition())
            mask[partitions] = True
        for name, (_, partitions, *_) in changes.written.items():
            consumer = self._consumers.get(name)
            if consumer is not None:
                # The consumer may have been forgotten and registered again since, with fewer partitions.
                consumer.dirty[partitions] |= consumer.known[partitions]
