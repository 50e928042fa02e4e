"""Ledger of what was handed out and is not acknowledged: in any order, and only the contiguous prefix counts.

A partition's position moves to the last change before the first one that is not acknowledged. The ledger lies
between the state machine, whose positions say what was received, and the store, which is to know only what was
dealt with: after a crash everything that was not acknowledged comes again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from upr_client.changes.events import Change, ChangeBatch
from upr_protocol.block import U64, block_seqnos
from upr_protocol.consumer import Delivery
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.position import MarkerHistory, Position

UNACKNOWLEDGED: Final = 100_000
"""Changes that may be handed out and not acknowledged, by default, before no further one is."""
UNACKNOWLEDGED_BYTES: Final = 128 * 2**20
"""Bytes of batches that wait for an acknowledgement, by default, before no further one is handed out."""


@dataclass(slots=True)
class _Source:
    """Batch that was handed out.

    Attributes:
        bytes: of its blocks, all of which are kept while any run waits.
        waiting: how many of its runs wait.
    """

    batch: ChangeBatch
    bytes: int
    waiting: int


@dataclass(slots=True)
class _Run:
    """One run that was handed out.

    Attributes:
        end, horizon, is_marker: as in the delivery.
        seqnos: of its rows, ascending.
        source: what it was handed out with; None when nothing of it waits any more.
        first: where its rows begin there.
        waits: where a row is not acknowledged.
        left: how many are not.
    """

    end: int
    horizon: int
    is_marker: bool
    seqnos: U64
    source: _Source | None
    first: int
    waits: npt.NDArray[np.bool_]
    left: int

    def prefix(self) -> int:
        """The last seqno before the first row that is not acknowledged; 0 when that is the first row."""
        first = int(np.argmax(self.waits))
        return int(self.seqnos[first - 1]) if first else 0

    def row_of(self, change: Change, *, itself: bool = False) -> int | None:
        """The row of a change that waits; None when that place holds another one, of a branch that was undone say.

        Args:
            itself: not of one that is the same and was handed out anew.
        """
        row = int(np.searchsorted(self.seqnos, change.seqno))
        if row == len(self.seqnos) or int(self.seqnos[row]) != change.seqno or not self.waits[row]:
            return None
        if self.source is None:
            return None
        there = self.source.batch.changes[self.first + row]
        return row if there is change or (there == change and not itself) else None

    def forget(self) -> None:
        """Nothing of it waits: of what was handed out only the range is kept."""
        self.seqnos, self.waits, self.source = self.seqnos[:0].copy(), self.waits[:0].copy(), None


@dataclass(slots=True)
class _Partition:
    """Ledger of one partition: the acknowledged position, and the runs above it, without the first ``gone``.

    ``top`` is the highest seqno that was ever handed out.
    """

    seqno: int = 0
    horizon: int | None = 0
    markers: MarkerHistory = field(default_factory=MarkerHistory)
    top: int = 0
    runs: list[_Run] = field(default_factory=list)
    gone: int = 0

    def waiting(self) -> Iterator[_Run]:
        return (self.runs[index] for index in range(self.gone, len(self.runs)))

    def index(self, seqno: int) -> int | None:
        """Return the index of the run that contains a seqno."""
        index = bisect_left(self.runs, seqno, lo=self.gone, key=lambda run: run.end)
        return index if index < len(self.runs) else None

    def find(self, seqno: int) -> _Run | None:
        index = self.index(seqno)
        return None if index is None else self.runs[index]

    def join(self, index: int) -> None:
        """Join a fully acknowledged run with such neighbours, so that few runs pile up behind one waiting row.

        Markers inside are dropped, because a rollback does not need each of them.
        """
        self.runs[index].forget()
        if index + 1 < len(self.runs) and not self.runs[index + 1].left:
            del self.runs[index]
        if index > self.gone and not self.runs[index - 1].left:
            del self.runs[index - 1]

    def advance(self) -> bool:
        """Move up to the first row that is not acknowledged; whether that is a move."""
        before = self.seqno, self.gone
        while self.gone < len(self.runs) and not self.runs[self.gone].left:
            run = self.runs[self.gone]
            self.gone += 1
            self.seqno, self.horizon = run.end, run.horizon
            if run.is_marker:
                self.markers.add(run.end)
        if self.gone < len(self.runs) and (seqno := self.runs[self.gone].prefix()):
            self.seqno, self.horizon = seqno, self.runs[self.gone].horizon
        if self.gone > len(self.runs) // 2:
            # So that taking from the front costs a constant a run.
            del self.runs[: self.gone]
            self.gone = 0
            return True
        return before != (self.seqno, self.gone)


class Ledger:
    """Keeps, for each partition, the runs that were handed out and how far they are acknowledged.

    Attributes:
        outstanding: changes that are handed out and not acknowledged.
        outstanding_bytes: of the batches that have such changes.
    """

    def __init__(self) -> None:
        self.outstanding = self.outstanding_bytes = 0
        self._partitions: dict[int, _Partition] = {}
        self._changed: set[int] = set()

    # Handing out.

    def begin(self, partition: int, position: Position) -> None:
        """Drop the runs handed out of a partition, and continue from a position."""
        top = max(position.seqno, self._drop(partition))
        markers = MarkerHistory(position.markers)
        self._partitions[partition] = _Partition(position.seqno, position.horizon, markers, top)

    def end(self, partitions: Iterable[int]) -> None:
        """Forget what was handed out of partitions that are followed no more."""
        for partition in partitions:
            if partition in self._partitions:
                top = self._drop(partition)
                self._partitions[partition] = _Partition(top=top)
                self._changed.discard(partition)

    def _drop(self, partition: int) -> int:
        old = self._partitions.get(partition)
        if old is None:
            return 0
        for run in old.waiting():
            self._drop_run(run)
        return old.top

    def _drop_run(self, run: _Run) -> None:
        self.outstanding -= run.left
        self._release(run)

    def _release(self, run: _Run) -> None:
        source, run.source = run.source, None
        if source is not None:
            source.waiting -= 1
            if not source.waiting:
                self.outstanding_bytes -= source.bytes

    def hand_out(self, delivery: Delivery, batch: ChangeBatch) -> None:
        """Take down a delivery of partitions that were begun, before it is handed out as a batch."""
        seqnos = np.concatenate([np.asarray(block_seqnos(b), np.uint64) for b in delivery.blocks])
        counts = np.concatenate([block.runs["count"] for block in delivery.blocks])
        bounds = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        columns = (delivery.partitions, delivery.ends, delivery.horizons, delivery.is_marker)
        rows = zip(*(column.tolist() for column in columns), bounds[:-1], bounds[1:], strict=True)
        size = sum(block.column_bytes for block in delivery.blocks)
        source = _Source(batch, size, int(np.count_nonzero(counts)))
        if source.waiting:
            self.outstanding_bytes += size
        for partition, end, horizon, is_marker, first, last in rows:
            waits = np.ones(last - first, np.bool_)
            part = seqnos[first:last]
            waiting = source if last > first else None
            run = _Run(end, horizon, is_marker, part, waiting, first, waits, last - first)
            of = self._partitions[partition]
            of.runs.append(run)
            of.top = max(of.top, end)
            self.outstanding += run.left
            if not run.left:
                self._done(partition, run)

    # Acknowledging.

    def acknowledge(self, change: Change, *, itself: bool = False) -> bool:
        """Take one change as dealt with; False for one that does not wait any more: it was undone by a rollback,
        taken before, or its partition is another member's now.

        Args:
            itself: as in ``waits``.

        Raises:
            InvalidArgumentError: there can be no such change: it lies above everything that was handed out.
        """
        of = self._partitions.get(change.partition)
        run = None if of is None else of.find(change.seqno)
        if of is None or change.seqno > of.top:
            raise InvalidArgumentError(
                f"the change of partition {change.partition} at seqno {change.seqno} was never handed out",
                hint="acknowledge what these changes have yielded",
            )
        if run is None or (row := run.row_of(change, itself=itself)) is None:
            return False
        self._take(change.partition, run, row, row + 1)
        return True

    def waits(self, change: Change) -> bool:
        """Whether this very change waits: one that was handed out anew has its turn behind those before it."""
        of = self._partitions.get(change.partition)
        run = None if of is None else of.find(change.seqno)
        return run is not None and run.row_of(change, itself=True) is not None

    def acknowledge_batch(self, batch: ChangeBatch) -> None:
        """Take everything of a batch as dealt with, but for what does not wait any more."""
        delivery = batch.delivery
        if delivery is None:
            return
        rows = zip(delivery.partitions.tolist(), delivery.ends.tolist(), strict=True)
        for partition, end in rows:
            of = self._partitions.get(partition)
            run = None if of is None else of.find(end)
            if run is not None and run.source is not None and run.source.batch is batch:
                self._take(partition, run, 0, len(run.waits))

    def _take(self, partition: int, run: _Run, first: int, last: int) -> None:
        taken = int(np.count_nonzero(run.waits[first:last]))
        run.waits[first:last] = False
        run.left -= taken
        self.outstanding -= taken
        self._done(partition, run)

    def _done(self, partition: int, run: _Run) -> None:
        of = self._partitions[partition]
        if of.advance():
            self._changed.add(partition)
        if run.left:
            return
        self._release(run)
        if (index := of.index(run.end)) is not None and of.runs[index] is run:
            of.join(index)

    def drop_above(self, partition: int, after: Position) -> None:
        """Forget what was handed out above a position, because the data there was undone.

        What lies at or below it and is not acknowledged still waits.
        """
        of = self._partitions.get(partition)
        if of is None or of.seqno > after.seqno:
            self.begin(partition, after)
        else:
            # A rollback goes to a marker or to 0, never into the middle of a run that was handed out.
            last = None
            while len(of.runs) > of.gone and of.runs[-1].end > after.seqno:
                last = of.runs.pop()
                self._drop_run(last)
            begin = of.runs[-1].end if len(of.runs) > of.gone else of.seqno
            if last is not None and not last.left and begin < after.seqno:
                # Of several that were joined the first ones stay.
                last.end = last.horizon = after.seqno
                last.is_marker = True
                of.runs.append(last)
                of.advance()
        self._changed.add(partition)

    # Queries.

    def position(self, partition: int, received: Position) -> Position:
        """Return what of a received position is acknowledged."""
        of = self._partitions.get(partition)
        if of is None:
            return received
        return replace(received, seqno=of.seqno, horizon=of.horizon, markers=of.markers.as_tuple())

    def take_changed(self) -> set[int]:
        """The partitions whose acknowledged position moved since this was asked last."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def has_changed(self) -> bool:
        return bool(self._changed)

    def waiting(self) -> dict[int, int]:
        """For each partition that has some, how many changes wait for their acknowledgement."""
        counts = {
            partition: sum(run.left for run in of.waiting())
            for partition, of in self._partitions.items()
        }
        return {partition: count for partition, count in counts.items() if count}
