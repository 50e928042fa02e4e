"""The marker histories of all partitions, filled a frame at a time.

A frame can end in a thousand markers, and only the newest of them and a few older ones are kept in the end. So
they are gathered as columns, and folded into the histories, thinned as columns too, when somebody asks.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64
from upr_protocol.limits import MARKERS_NEWEST
from upr_protocol.markers import MarkerHistory

Indexes = npt.NDArray[np.int64]

GATHERED_MAX: Final = 2**16
"""Markers gathered before they are folded into the histories."""


class MarkerHistories:
    """What ``MarkerHistory`` is for one partition, for all."""

    def __init__(self) -> None:
        self._histories: dict[int, MarkerHistory] = {}
        self._gathered: list[tuple[Indexes, U64]] = []
        self._count = 0

    def add(self, partitions: Indexes, seqnos: U64) -> None:
        """Add markers, for each partition in rising order and above those it has."""
        if len(partitions):
            self._gathered.append((partitions, seqnos))
            self._count += len(partitions)
            if self._count >= GATHERED_MAX:
                self._fold()

    def replace(self, partition: int, markers: tuple[int, ...]) -> None:
        """Forget a partition's markers and take these."""
        self._fold()
        self._histories[partition] = MarkerHistory(markers)

    def of(self, partition: int) -> tuple[int, ...]:
        """Return a partition's markers, oldest first."""
        self._fold()
        history = self._histories.get(partition)
        return history.as_tuple() if history is not None else ()

    def _fold(self) -> None:
        if not self._gathered:
            return
        partitions = np.concatenate([item[0] for item in self._gathered])
        seqnos = np.concatenate([item[1] for item in self._gathered])
        self._gathered, self._count = [], 0
        # Sorting 16 bits is a radix sort.
        order = np.argsort(partitions.astype(np.uint16), kind="stable")
        partitions, seqnos = _worth_adding(partitions[order], seqnos[order])
        edges = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(partitions)]
        firsts = partitions[edges[:-1]].tolist()
        numbers = seqnos.tolist()
        for partition, start, stop in zip(firsts, edges[:-1], edges[1:], strict=True):
            history = self._histories.setdefault(partition, MarkerHistory())
            history.add_many(numbers[start:stop])


def _worth_adding(partitions: Indexes, seqnos: U64) -> tuple[Indexes, U64]:
    """Thin the markers of many partitions, sorted by both, as ``thin_markers`` does each partition's."""
    lasts = np.flatnonzero(np.diff(partitions, append=-1))
    counts = np.diff(lasts, prepend=-1)
    from_end = np.repeat(lasts, counts) - np.arange(len(partitions))
    distance = np.repeat(seqnos[lasts], counts) - seqnos
    # The exponent is the bit length; seqnos of 48 bits are exact as floats.
    scale = np.frexp(distance.astype(np.float64))[1]
    oldest = (np.diff(scale, prepend=-1) != 0) | (np.diff(partitions, prepend=-1) != 0)
    kept = oldest | (from_end < MARKERS_NEWEST)
    return partitions[kept], seqnos[kept]
