"""Producer numbers: a Write that is sent again is answered again, not applied again.

For each producer and partition the newest number and the seqnos given to it are known ("Writing" in the
design). Within one process the answers of a producer's last writes are remembered whole as well, so that a
pipeline of several writes that is sent again gets each of its answers; after a restart an older number of the
pipeline is known to be applied, but its seqnos are not known any more.

That a partition refused its part of a number is known only while the producer is in memory: later, once a later
number was applied in it, the refused part counts as applied.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upr.engine.tail import TailEntry
from upr.storage.keyspace import ProducerRow
from upr_protocol.block import Runs
from upr_protocol.limits import PARTITIONS, WRITES_IN_FLIGHT_MAX

ANSWERS_KEPT = 2 * WRITES_IN_FLIGHT_MAX


@dataclass(slots=True)
class Answer:
    """What a Write was given: its runs with seqnos, and a tail entry with which it is surely durable."""

    runs: Runs
    entry: int


class Newest:
    """For each partition the newest number of one producer and the seqnos it was given, as columns.

    Attributes, uint64 of shape (1024,): numbers, starts, ends, times.
    """

    __slots__ = ("ends", "numbers", "starts", "times")

    def __init__(self) -> None:
        self.numbers, self.starts, self.ends, self.times = (
            np.zeros(PARTITIONS, np.uint64) for _ in range(4)
        )

    def applied(self, number: int, runs: Runs, time: int) -> None:
        """Take note of a Write that was numbered; numbers only rise."""
        partitions = runs["partition"]
        self.numbers[partitions] = number
        self.starts[partitions] = runs["start_seqno"]
        self.ends[partitions] = runs["end_seqno"]
        self.times[partitions] = time


class Producer:
    """One producer.

    Attributes:
        last_number: the newest number applied anywhere.
        calls: open Write calls.
        last_entry: the tail entry of its newest write.
        loaded: whether what the store knows of it was taken in.
    """

    __slots__ = ("_answers", "_newest", "_refused", "calls", "last_entry", "last_number", "loaded")

    def __init__(self) -> None:
        self._newest = Newest()
        self._answers: OrderedDict[int, Answer] = OrderedDict()
        self._refused: OrderedDict[int, npt.NDArray[np.uint16]] = OrderedDict()
        self.last_number = 0
        self.calls = 0
        self.last_entry = -1
        self.loaded = False

    def applied(self, entry: TailEntry, number_in_tail: int) -> None:
        """Take note of a Write that was numbered, and became the tail's entry of that number."""
        self.last_number = max(self.last_number, entry.number)
        self.last_entry = number_in_tail
        self._newest.applied(entry.number, entry.runs, entry.time)
        refused = self._refused.pop(entry.number, None)
        if refused is not None:
            self.refused(entry.number, np.setdiff1d(refused, entry.runs["partition"]))
        if entry.whole:
            self._answers[entry.number] = Answer(entry.runs, number_in_tail)
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)

    def refused(self, number: int, partitions: npt.NDArray[np.uint16]) -> None:
        """Take note that partitions refused their part of a Write."""
        self._refused[number] = partitions.copy()
        if len(self._refused) > ANSWERS_KEPT:
            self._refused.popitem(last=False)

    def known(self, number: int, runs: Runs) -> Answer | None:
        """Return the answer to a number that was applied already, or None.

        A partition in which the number is not the newest any more gets 0 and 0 as its seqnos. One that refused the
        number and took a later one is left out: an older value must not come behind a newer one.
        """
        answer = self._answers.get(number)
        if answer is not None:
            return answer
        partitions = runs["partition"]
        seen = self._newest.numbers[partitions] >= number
        if not seen.any():
            return None
        refused = self._refused.get(number)
        if refused is not None:
            seen &= ~np.isin(partitions, refused) | (self._newest.numbers[partitions] == number)
        told = runs[seen].copy()
        exact = self._newest.numbers[told["partition"]] == number
        told["start_seqno"] = np.where(exact, self._newest.starts[told["partition"]], 0)
        told["end_seqno"] = np.where(exact, self._newest.ends[told["partition"]], 0)
        # Which entry it became is not known any more; with the producer's newest one it is surely durable.
        return Answer(told, self.last_entry)

    def load(self, rows: Mapping[int, ProducerRow]) -> None:
        """Take in stored rows; what is known already is newer."""
        newest = self._newest
        for partition, row in rows.items():
            if row.number > int(newest.numbers[partition]):
                newest.numbers[partition] = row.number
                newest.starts[partition] = row.start_seqno
                newest.ends[partition] = row.end_seqno
                newest.times[partition] = row.time
                self.last_number = max(self.last_number, row.number)
        self.loaded = True


def newest_of(entries: Iterable[TailEntry]) -> dict[bytes, Newest]:
    """Return what consecutive tail entries make of their producers: what a flush of them must store."""
    producers: dict[bytes, Newest] = {}
    for entry in entries:
        if entry.producer:
            newest = producers.get(entry.producer)
            if newest is None:
                newest = producers[entry.producer] = Newest()
            newest.applied(entry.number, entry.runs, entry.time)
    return producers
