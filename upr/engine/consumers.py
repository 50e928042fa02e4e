"""Consumers of a bucket: what each has acknowledged, partition by partition, and the saves of positions under way.

A consumer is registered by its first Ack in a call with a consumer name, or by the first position that it saves
here. A saved position counts, for purging and for whoever asks, from when it is stored (``Saves``: in the order in which
they were decided).

What a consumer acknowledged holds purging up;
what of it is not stored yet is handed out as a value (Changes) and stored by the service. A crash loses the
acknowledgements of the last second: a stored position that is too low only makes purging more careful. One that
is too high, because its consumer had just gone back, can let purging overtake the consumer, which is then rolled
back to 0: right, though costly.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from upr.storage.keyspace import ConsumerRow
from upr_protocol.block import I64, POSITION, U64
from upr_protocol.errors import InvalidArgumentError, TooManyError
from upr_protocol.limits import CONSUMERS_MAX, PARTITIONS, SEQNO_MAX

_Mask = npt.NDArray[np.bool_]


@dataclass(eq=False, slots=True)
class Save:
    """Positions of one consumer that are to be stored together, or removed.

    Attributes:
        partitions: each once, shape (n,).
        failover_ids, seqnos: what they acknowledge, shape (n,).
        positions: as ``ConsumerRow.position``, n of them; None to remove what there is.
        time: when they were handed in, microseconds since the epoch.
        acknowledged: what counts of the seqnos: less where the consumer has gone back since, shape (n,).
        newest: where the consumer has acknowledged nothing since, which counts more, shape (n,).
        under_way: whether it was handed to the store.
        void: whether the consumer was forgotten meanwhile: none of it counts.
        ended: whether it is stored, or given up.
        failure: why it could not be stored.
    """

    name: str
    generation: int
    partitions: I64
    failover_ids: U64
    seqnos: U64
    positions: Sequence[bytes] | None
    time: int
    acknowledged: U64 = field(init=False)
    newest: _Mask = field(init=False)
    under_way: bool = False
    void: bool = False
    ended: bool = False
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.acknowledged = self.seqnos
        self.newest = np.ones(len(self.partitions), bool)

    def rows(self) -> dict[tuple[bytes, int], ConsumerRow | None]:
        """Return what is to be written; None for rows to be removed."""
        key, partitions = self.name.encode(), self.partitions.tolist()
        if self.positions is None:
            return dict.fromkeys(((key, p) for p in partitions), None)
        columns = (partitions, self.failover_ids.tolist(), self.seqnos.tolist(), self.positions)
        return {
            (key, partition): ConsumerRow(self.generation, failover_id, seqno, self.time, position)
            for partition, failover_id, seqno, position in zip(*columns, strict=True)
        }


class _Taker(Protocol):
    def check_room(self, names: Set[str]) -> None: ...
    def take_saved(self, save: Save) -> None: ...


class Saves:
    """The saves of a bucket that are not stored yet.

    Args:
        consumers: takes them in when they are.
    """

    def __init__(self, consumers: _Taker) -> None:
        self._consumers = consumers
        self._waiting: list[Save] = []

    def add(self, save: Save) -> None:
        """Put a save behind those that there are.

        Raises:
            TooManyError: its consumer is not registered, and CONSUMERS_MAX others are.
        """
        if save.positions is not None:
            self._consumers.check_room({save.name, *(other.name for other in self._waiting)})
        self._waiting.append(save)

    def of(self, name: str) -> list[Save]:
        """Return the saves of a consumer."""
        return [save for save in self._waiting if save.name == name]

    def went_back(self, name: str, partitions: I64, newest_ids: U64, seqnos: U64) -> None:
        """A consumer has opened streams: of what it is saving under these ids no more counts than where they begin."""
        for save in self.of(name):
            _, here, there = np.intersect1d(save.partitions, partitions, return_indices=True)
            current = save.failover_ids[here] == newest_ids[there]
            here, there = here[current], there[current]
            save.acknowledged = save.acknowledged.copy()
            save.acknowledged[here] = np.minimum(save.acknowledged[here], seqnos[there])

    def overtaken(self, name: str, partitions: I64) -> None:
        """A consumer has acknowledged in partitions what counts more than what it is saving of them."""
        for save in self._waiting:
            if save.name == name:
                save.newest &= ~np.isin(save.partitions, partitions)

    def void(self, name: str) -> _Mask:
        """Have none of a consumer's saves count; returns the partitions that they may leave rows of."""
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
        """Take note that saves are in the store."""
        self._end(saves)
        for save in saves:
            if not save.void:
                self._consumers.take_saved(save)

    def failed(self, saves: Sequence[Save], why: BaseException) -> None:
        """Give saves up: nothing of them was stored."""
        self._end(saves)
        for save in saves:
            save.failure = why

    def _end(self, saves: Sequence[Save]) -> None:
        for save in saves:
            save.ended = True
        self._waiting = [save for save in self._waiting if not save.ended]


def rows_of(saves: Sequence[Save]) -> dict[tuple[bytes, int], ConsumerRow | None]:
    """Return the rows of several saves; of two of the same the later one counts."""
    rows: dict[tuple[bytes, int], ConsumerRow | None] = {}
    for save in saves:
        rows.update(save.rows())
    return rows


NO_LIMIT: Final = np.iinfo(np.uint64).max


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
        time: uint64, when it was acknowledged, microseconds since the epoch; now and then also when it was in use.
        dirty: where that is not stored yet.

        saved: where it has saved a position: the store has it, memory has not.
    """

    generation: int
    known: _Mask = field(default_factory=_no_partition)
    seqno: U64 = field(default_factory=_zeros)
    failover_id: U64 = field(default_factory=_zeros)
    time: U64 = field(default_factory=_zeros)
    dirty: _Mask = field(default_factory=_no_partition)
    saved: _Mask = field(default_factory=_no_partition)

    @property
    def last_ack_time(self) -> int:
        """When it acknowledged last, or was seen in use; microseconds since the epoch. 0 when that is not known."""
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
                rows[key, partition] = ConsumerRow(generation, failover_id, seqno, time, None)
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

    def get(self, name: str) -> Consumer | None:
        """Return a registered consumer."""
        return self._consumers.get(name)

    @property
    def newest_generation(self) -> int:
        """The largest generation of all of them."""
        return max((consumer.generation for consumer in self._consumers.values()), default=0)

    # What consumers do

    def started(self, name: str, partitions: I64, newest_ids: U64, seqnos: U64) -> None:
        """Have positions come down to where streams were opened, if they are above: their consumer went back.

        So too those that it is saving: what they say is stored, and counts from there.
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

    def expire(self, before: int, now: int, used: Container[str]) -> list[str]:
        """Forget the consumers of which nothing was heard since a time, and return their names.

        Those that are in use count as heard of now and then, durably: when they go, their time begins.

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
            # Of rows that are damaged nothing is known, and a position that is being saved is used.
            elif 0 < last < before and not self.saves.of(name):
                gone.append(name)
        for name in gone:
            self.forget(name)
        return gone

    @property
    def is_removing(self) -> bool:
        """Whether rows of consumers that were forgotten are still to be removed."""
        return bool(self._removed)

    def is_forgetting(self, name: str) -> bool:
        """Whether rows of one that was forgotten are still to be removed."""
        return name in self._removed

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
        # Where the consumer has said something since, that is the newer word on what it has, and is to be stored
        # again: its row was overwritten.
        counts, overtaken = save.partitions[save.newest], save.partitions[~save.newest]
        consumer.dirty[overtaken] = consumer.known[overtaken]
        consumer.dirty[counts] = False
        if save.positions is None:
            consumer.known[counts] = False
            consumer.saved[save.partitions] = False
            if not consumer.known.any():
                del self._consumers[save.name]
            return
        # From here on it has a row in each of them, whatever was said since.
        consumer.known[save.partitions] = True
        consumer.seqno[counts] = save.acknowledged[save.newest]
        consumer.dirty[counts] = (save.acknowledged < save.seqnos)[save.newest]
        consumer.failover_id[counts] = save.failover_ids[save.newest]
        consumer.time[counts] = save.time
        consumer.saved[save.partitions] = True

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
