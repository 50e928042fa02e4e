"""Producer numbers: a retried Write is answered again, not applied again.

A producer has one sequence of rising numbers over all its calls. In each partition the newest applied number decides:
it and all below were applied or given up; all above are new. So two things must never happen in
a call: that a write overtakes one before it, and that a partition takes a write behind one that it refused. Then a
partition has always applied a prefix of the sequence, and refused numbers need no record.

Tail entries record what is in the tail, the store what was flushed; a producer itself is small.

Numbers of places (see ``upr_protocol.write_places``) are for several senders under one name whose content may differ. The
content that has a place is stored like the number of a partition, of "partition" 1024 + place. It stays when what was
applied is undone: then only the same content may come there again.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from upr.engine.tail import Tail, TailEntry
from upr.storage.keyspace import PRODUCER, ProducerNumbers, ProducerRow
from upr_protocol.block import RUN, Runs, joined_runs
from upr_protocol.errors import ContentDiffersError, InvalidArgumentError, OutOfOrderError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS, PRODUCER_BYTES, WRITE_NUMBER_MAX
from upr_protocol.write_places import FIRST_PLACE_NUMBER, place_is_taken, place_number, place_of


@dataclass(slots=True)
class Known:
    """The parts of a Write that were applied before.

    Attributes:
        seen: bool, one a run: whether the partition has taken this number, or a later one.
        runs: those runs with the seqnos given, 0 and 0 where they are not known any more.
        entry: a tail entry with which they are surely durable; -1: they are already.
    """

    seen: npt.NDArray[np.bool_]
    runs: Runs
    entry: int


class Producer:
    """A producer with an open call, or with entries in the tail.

    Attributes:
        last_number: the largest number applied in any partition.
        calls: open Write calls.
        loaded: whether ``last_number`` counts what the store knows.
    """

    __slots__ = ("_entries", "_newest", "_numbers", "calls", "last_number", "loaded", "name")

    def __init__(self, name: bytes) -> None:
        self.name = name
        # Of its writes in the tail, ascending by number, and of the entries that they are in.
        self._numbers, self._entries = array("Q"), array("Q")
        self._newest: npt.NDArray[np.int64] | None = None
        self.last_number = 0
        self.calls = 0
        self.loaded = False

    @property
    def in_tail(self) -> bool:
        return bool(self._entries)

    def applied(self, number: int, runs: Runs, number_in_tail: int) -> None:
        """Record a Write that is in a tail entry, and what it wrote."""
        if number > self.last_number:
            self.last_number = number
            self._numbers.append(number)
            self._entries.append(number_in_tail)
        else:
            at = bisect_right(self._numbers, number)
            self._numbers.insert(at, number)
            self._entries.insert(at, number_in_tail)
        if self._newest is not None:
            self._newest[:, runs["partition"]] = [[number_in_tail], [number]]

    def drop_before(self, first: int) -> None:
        """Drop the tail entries below a number, which are in the store."""
        self._newest = None
        if self._entries:
            keep = np.array(self._entries) >= first
            self._numbers = array("Q", np.array(self._numbers)[keep].tobytes())
            self._entries = array("Q", np.array(self._entries)[keep].tobytes())

    def check_place(self, number: int, stored: Mapping[int, ProducerRow]) -> None:
        """Check that the place of a number is free, or has the content that the number is of.

        Args:
            stored: as in ``known``; needed for a number that is not above the producer's last.

        Raises:
            ContentDiffersError: it has another content, or was passed over.
        """
        place = place_of(number)
        row = stored.get(PARTITIONS + place)
        of_place = [] if row is None else [row.number]
        at = bisect_left(self._numbers, place_number(place, b""))
        of_place += self._numbers[at : at + 1]
        if place_is_taken(number, self.last_number, of_place):
            raise ContentDiffersError(
                f"place {place} of write {number} has another content, or was passed over",
                hint="write this content, and what is behind it, under another name: one with a digest of it is safe",
            )

    def known(
        self, number: int, runs: Runs, tail: Tail, stored: Mapping[int, ProducerRow]
    ) -> Known:
        """Return what of a Write was applied before.

        Args:
            stored: what the store knows of the producer by partition, read since the tail was last shortened.
        """
        partitions = runs["partition"]
        newest = self._newest_of(tail)[:, partitions].tolist()
        seen = np.zeros(len(runs), bool)
        told = runs.copy()
        told["start_seqno"] = told["end_seqno"] = 0
        durable_with = -1
        for i, (partition, entry, applied) in enumerate(
            zip(partitions.tolist(), *newest, strict=True)
        ):
            row = stored.get(partition)
            if applied >= number:
                seen[i] = True
                durable_with = max(durable_with, entry)
            # Also where the tail has older ones: a replica got the number with blocks that it read from a store.
            elif row is not None and row.number >= number:
                seen[i] = True
                if row.number == number:
                    told["start_seqno"][i], told["end_seqno"][i] = row.start_seqno, row.end_seqno
        first, last = bisect_left(self._numbers, number), bisect_right(self._numbers, number)
        for given in self._runs_in(tail, set(self._entries[first:last]), number):
            here = np.minimum(np.searchsorted(given["partition"], partitions), len(given) - 1)
            same = given["partition"][here] == partitions
            for column in ("start_seqno", "end_seqno"):
                told[column][same] = given[column][here[same]]
        return Known(seen, told[seen], durable_with)

    def _runs_in(self, tail: Tail, entries: Iterable[int], number: int) -> Iterator[Runs]:
        """Yield what the writes of a number wrote in entries of the tail."""
        for entry in map(tail.__getitem__, entries):
            for write in entry.writes_of(self.name):
                if write.number == number:
                    yield entry.runs_of(write)

    def _newest_of(self, tail: Tail) -> npt.NDArray[np.int64]:
        """Return for each partition the newest entry with rows of the producer, and its newest number there.

        Both are -1 where the tail has none; shape (2, 1024). Built when a producer retries, and cached until the next
        flush.
        """
        if self._newest is None:
            newest = np.full((2, PARTITIONS), -1, np.int64)
            for number_in_tail in sorted(set(self._entries)):
                entry = tail[number_in_tail]
                own = entry.writes_of(self.name)
                table = joined_runs([entry.runs_of(write) for write in own])
                newest[0, table["partition"]] = number_in_tail
                counts = [len(entry.runs_of(write)) for write in own]
                newest[1, table["partition"]] = np.repeat([write.number for write in own], counts)
            self._newest = newest
        return self._newest


def producer_bytes(name: bytes) -> int:
    """Return about how much memory a producer takes beside its entries in the tail."""
    return PRODUCER_BYTES + len(name)


class ProducerCall:
    """One open Write call of a producer: what it carried so far.

    Attributes:
        producer: shared with its other calls.
        carried: the number of the newest write that the call took, 0 for none.
        refusing: partitions that refused their part of a write. They take nothing more of this call: an older value
            must not come behind a newer one, and a write that was refused must not be below one that was applied.
    """

    __slots__ = ("carried", "producer", "refusing")

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.carried = 0
        self.refusing: set[int] = set()

    @property
    def name(self) -> bytes:
        return self.producer.name

    def check(self, number: int, previous_number: int) -> None:
        """Check that a write follows the one before it.

        Raises:
            InvalidArgumentError: the number is out of its range.
            OutOfOrderError: a write before it is missing, or was refused; it would overtake that one.
        """
        if not 0 < number <= WRITE_NUMBER_MAX:
            raise InvalidArgumentError(f"write number is {number}; must be 1 to 2^63 - 1")
        if previous_number != self.carried:
            raise OutOfOrderError(
                f"write {number} names {previous_number} as the number before it; this call's last was {self.carried}",
                hint="send the refused writes again under new numbers, then the later ones",
            )


class NewestNumbers:
    """Newest producer numbers of consecutive tail entries, oldest first, stored with their rows."""

    def __init__(self, entries: Sequence[TailEntry], logs: Sequence[FailoverLog]) -> None:
        self._logs = logs
        by_name: dict[bytes, list[_Write]] = {}
        times: dict[bytes, int] = {}
        for entry in entries:
            for write in entry.writes:
                runs = write.runs or entry.runs.tobytes()
                by_name.setdefault(write.producer, []).append((write.number, runs))
                times[write.producer] = entry.time
        self._names = list(by_name)
        self._times = list(times.values())
        tables = [_newest_of(several) for several in by_name.values()]
        self._owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        self._table = np.concatenate(tables) if tables else np.zeros(0, PRODUCER)
        self._places = [_places_of(several) for several in by_name.values()]
        order = np.argsort(self._table["partition"], kind="stable")
        self._owners, self._table = self._owners[order], self._table[order]

    def of(self, first: int, last: int, ends: Mapping[int, int]) -> dict[bytes, ProducerNumbers]:
        """Return the rows by producer to store with the partitions first to last - 1, up to these ends.

        A number whose seqnos lie above stays out; what is stored later of the partition brings it.
        """
        if not self._names:
            return {}
        begin, end = np.searchsorted(self._table["partition"], (first, last)).tolist()
        limits = np.zeros(PARTITIONS, np.uint64)
        limits[list(ends)] = list(ends.values())
        table, owners = self._table[begin:end], self._owners[begin:end]
        below = table["end_seqno"] <= limits[table["partition"]]
        table, owners = table[below], owners[below]
        table["failover_id"] = [
            self._logs[partition].id_at(seqno)
            for partition, seqno in zip(
                table["partition"].tolist(), table["end_seqno"].tolist(), strict=True
            )
        ]
        order = np.argsort(owners, kind="stable")
        table, owners = table[order], owners[order]
        edges = [*np.flatnonzero(np.diff(owners, prepend=-1)).tolist(), len(owners)]
        return {
            self._names[owners[a]]: ProducerNumbers(
                np.concatenate((table[a:b], self._places[owners[a]])), self._times[owners[a]]
            )
            for a, b in pairwise(edges)
        }


_Write = tuple[int, bytes]
"""Number of a write, and the table of its runs as bytes: numpy is slow to concatenate records."""


def _newest_of(writes: Sequence[_Write]) -> npt.NDArray[np.void]:
    """Return the newest number in each partition of one producer's writes, ascending by partition."""
    runs = np.frombuffer(b"".join([table for _, table in writes]), RUN)
    counts = [len(table) // RUN.itemsize for _, table in writes]
    numbers = np.repeat(np.array([number for number, _ in writes], np.uint64), counts)
    newest = np.full(PARTITIONS, -1, np.int64)
    newest[runs["partition"]] = np.arange(len(runs))
    newest = newest[newest >= 0]
    runs = runs[newest]
    table = np.zeros(len(runs), PRODUCER)
    table["partition"] = runs["partition"]
    table["number"] = numbers[newest]
    table["start_seqno"] = runs["start_seqno"]
    table["end_seqno"] = runs["end_seqno"]
    return table


def _places_of(writes: Sequence[_Write]) -> npt.NDArray[np.void]:
    """Return the contents of one producer's places as rows of further partitions, ascending."""
    places = {place_of(number): number for number, _ in writes if number >= FIRST_PLACE_NUMBER}
    return np.array(
        [(PARTITIONS + place, number, 0, 0, 0) for place, number in sorted(places.items())],
        PRODUCER,
    )
