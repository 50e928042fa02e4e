"""Where a stream begins that has nothing and does not want everything: now, or at a time.

Neither needs a search without an end in the engine: the newest markers are kept as commits become durable, and the
tail keeps high seqnos at some of its entries. The stored part of a search for a time is made before, in a reader
thread (``upr.storage.by_time``); what was flushed since makes a stream begin a little earlier, never later.
"""

from collections.abc import Sequence

import numpy as np

from upr.engine.streams import StartRequest
from upr.engine.tail import Tail
from upr.storage.by_time import StoredBeginning
from upr_protocol.block import RUN, U64, Runs


class DurableMarkers:
    """The newest complete marker of each partition that is durable.

    Args:
        stored: each partition's stored high, shape (1024,): all that is durable so far. It must be a marker.

    Attributes:
        seqno: the markers, uint64, shape (1024,).
    """

    def __init__(self, stored: U64) -> None:
        self.seqno = stored.copy()
        self._horizon = stored.copy()
        self._incomplete = False

    def became_durable(self, tables: Sequence[Runs]) -> None:
        """Take note of run tables that are durable from now on, in the order of their numbering."""
        runs = tables[0] if len(tables) == 1 else _joined(tables)
        if not self._incomplete and (runs["horizon"] == runs["end_seqno"]).all():
            # For a repeated index numpy keeps the last assignment, which is the newest run of the partition.
            self.seqno[runs["partition"]] = runs["end_seqno"]
            self._horizon[runs["partition"]] = runs["end_seqno"]
            return
        for table in tables:
            partitions, ends = table["partition"], table["end_seqno"]
            horizons = np.maximum(self._horizon[partitions], table["horizon"])
            self._horizon[partitions] = horizons
            done = horizons == ends
            self.seqno[partitions[done]] = ends[done]
        self._incomplete = bool((self._horizon > self.seqno).any())


class Beginnings:
    """Beginnings as they are decided in one engine step: it must not be kept for a later one.

    Args:
        markers: the partitions' newest complete durable markers, shape (1024,).
    """

    def __init__(self, markers: U64, tail: Tail) -> None:
        self._markers = markers
        self._tail = tail
        self._highs: dict[int, U64] = {}

    def of(self, request: StartRequest) -> int:
        """Return the seqno at which a stream begins that has none."""
        if request.from_time is None:
            return self.now(request.partition)
        assert isinstance(request.stored, StoredBeginning), "the store must have been searched"
        return self.at_time(request.partition, request.from_time, request.stored)

    def now(self, partition: int) -> int:
        """Return the seqno at which a stream from now begins: nothing written after this step is at or below it."""
        return int(self._markers[partition])

    def at_time(self, partition: int, time: int, stored: StoredBeginning) -> int:
        """Return the seqno above which a stream from a time begins.

        As far as commit times rise with the seqnos, no row that is there and was committed at or after the time is at or
        below it. Where the clock was set back it is one of the places at which the time was passed. It is never
        above the newest complete durable marker, which is also what it is where nothing was committed so late.

        Args:
            time: microseconds since the epoch.
            stored: what the search of the store came to, some time before this step.
        """
        seqno = stored.seqno
        if not stored.found:
            highs = self._highs.get(time)
            if highs is None:
                highs = self._highs[time] = self._tail.high_at(self._tail.find_time(time))
            seqno = max(seqno, int(highs[partition]))
        return min(seqno, int(self._markers[partition]))


def _joined(tables: Sequence[Runs]) -> Runs:
    return np.frombuffer(b"".join([table.tobytes() for table in tables]), RUN)
