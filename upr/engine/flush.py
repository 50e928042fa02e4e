"""From the tail to the store: what a flush takes, slice by slice.

A plan holds the oldest of what the tail held durably when the flush began. ``prepare`` and ``merge`` do the work and may run
in another thread: they read entries, which never change, and nothing else of the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from upr.engine.producers import Newest, newest_of
from upr.engine.tail import TailEntry
from upr.storage.keyspace import ProducerRow
from upr.storage.merge import (
    Chunk,
    Compress,
    Encoded,
    FlushSlice,
    Merged,
    chunks_of,
    merge_slice,
    plan_slices,
)
from upr_protocol.block import U64
from upr_protocol.failover import FailoverLog
from upr_protocol.wire.codec import check_encoded


@dataclass(slots=True)
class FlushPlan:
    """What one flush stores.

    Attributes:
        entries: durable entries from the tail's beginning, oldest first.
        stored: each partition's stored high, uint64, shape (1024,); advanced slice by slice.
        logs: the partitions' failover logs when the flush began.
        compress: what is made of each block before it is stored.
    """

    entries: Sequence[TailEntry]
    stored: U64
    logs: Sequence[FailoverLog]
    compress: Compress | None = None
    _chunks: list[Chunk] | None = None
    _producers: dict[bytes, Newest] | None = None

    def prepare(self) -> list[FlushSlice]:
        """Check and sort the entries' rows, and return the slices to be merged, in order.

        Raises:
            CorruptBlockError: an entry's bytes changed since they were checked when they came in.
        """
        for entry in self.entries:
            check_encoded(entry.data)
        self._chunks = list(chunks_of([Encoded(entry.runs, entry.data) for entry in self.entries]))
        self._producers = newest_of(self.entries)
        return plan_slices(self._chunks)

    def merge(self, part: FlushSlice) -> Merged:
        """Merge one slice into blocks. Slices are merged in the order in which they were planned."""
        assert self._chunks is not None
        merged = merge_slice(self._chunks, part, self.stored, compress=self.compress)
        for partition, end in merged.ends.items():
            self.stored[partition] = end
        return merged

    def producer_rows(
        self, part: FlushSlice, merged: Merged
    ) -> dict[tuple[bytes, int], ProducerRow]:
        """Return what the store must know of producers once the slice is stored.

        A number whose seqnos lie above the slice stays out; a later slice of the partition brings it.
        """
        assert self._producers is not None
        rows: dict[tuple[bytes, int], ProducerRow] = {}
        for name, newest in self._producers.items():
            for partition in (
                part.first + np.flatnonzero(newest.numbers[part.first : part.last])
            ).tolist():
                end = int(newest.ends[partition])
                if end <= merged.ends.get(partition, 0):
                    rows[name, partition] = ProducerRow(
                        int(newest.numbers[partition]),
                        self.logs[partition].id_at(end),
                        int(newest.starts[partition]),
                        end,
                        int(newest.times[partition]),
                    )
        return rows
