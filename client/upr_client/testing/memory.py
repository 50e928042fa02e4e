"""The partitions of a scripted server, held in memory: what was written, and what of it is shown.

Two things are kept for each partition. The *history* has every mutation of the branch that is in force, and every
snapshot marker. What is *shown* begins as the same and may be merged and purged. A failover goes back to a marker of
the history, as if to a node that has not merged.
"""

import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from upr_protocol.block import Block, build_block, make_runs, sealed
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.failover import FailoverLog, check_seqno
from upr_protocol.limits import FAILOVER_ID_MAX, FRAME_BYTES

_seqno_of: Final = attrgetter("seqno")
_end_of: Final = attrgetter("end")
_ROW_BYTES: Final = 32


class Row(NamedTuple):
    """One mutation; ``value`` is None for a delete, ``time`` microseconds since the epoch."""

    seqno: int
    key: bytes
    value: bytes | None
    time: int


class Run(NamedTuple):
    """What happened in ``(start, end]``; it ends in a marker exactly when ``horizon`` equals ``end``."""

    start: int
    end: int
    horizon: int
    time: int

    @property
    def is_marker(self) -> bool:
        return self.horizon == self.end


@dataclass(slots=True)
class Branch:
    """Rows and the runs that tile ``(0, high]``, both ascending."""

    rows: list[Row]
    runs: list[Run]

    def copy(self) -> "Branch":
        return Branch(list(self.rows), list(self.runs))

    def cut_above(self, seqno: int) -> None:
        """Drop what is above ``seqno``, where a run ends."""
        del self.rows[bisect_right(self.rows, seqno, key=_seqno_of) :]
        del self.runs[bisect_right(self.runs, seqno, key=_end_of) :]

    def markers(self) -> list[int]:
        """The snapshot markers, ascending; 0 is not among them."""
        return [run.end for run in self.runs if run.is_marker]


class Partition:
    """One partition.

    Attributes:
        high: the newest seqno.
        purge: tombstones at or below it are gone.
        refusal: why it is refused, None when it is not.
        held: streams are sent nothing above this seqno; None for no limit.
    """

    __slots__ = ("_history", "_shown", "held", "high", "log", "number", "purge", "refusal")

    def __init__(self, number: int) -> None:
        self.number = number
        self.log = FailoverLog.born(new_id())
        self.high = self.purge = 0
        self.refusal: UprError | None = None
        self.held: int | None = None
        self._history = Branch([], [])
        self._shown = Branch([], [])

    # Writing.

    def write(
        self, rows: Sequence[tuple[bytes, bytes | None]], now: int, *, marker: bool
    ) -> tuple[int, int]:
        """Number mutations, (key, value or None), as one run. Return (start seqno, end seqno).

        Without a marker the run says that it is complete at the next seqno only, which is given by the next write
        or by ``add_marker``.
        """
        start, end = self.high, self.high + len(rows)
        check_seqno(end, f"seqno of partition {self.number}")
        run = Run(start, end, end if marker else end + 1, now)
        numbered = [Row(start + 1 + i, key, value, now) for i, (key, value) in enumerate(rows)]
        for branch in (self._history, self._shown):
            branch.rows += numbered
            branch.runs.append(run)
        self.high = end
        return start, end

    def add_marker(self, now: int) -> int:
        """Complete everything so far: a seqno of which no row is shown, as of one that was superseded."""
        end = check_seqno(self.high + 1, f"seqno of partition {self.number}")
        for branch in (self._history, self._shown):
            branch.runs.append(Run(self.high, end, end, now))
        self.high = end
        return end

    @property
    def ends_in_marker(self) -> bool:
        """Whether everything so far is complete; an empty partition is."""
        return not self._history.runs or self._history.runs[-1].is_marker

    @property
    def last_marker(self) -> int:
        """The newest snapshot marker, 0 when there is none."""
        return next((run.end for run in reversed(self._history.runs) if run.is_marker), 0)

    # Failing over, merging, purging.

    def roll_back(self, seqno: int) -> int:
        """Drop what is above a marker of the history, or above 0, and add a failover record. Return its id.

        Raises:
            InvalidArgumentError: the seqno is none of these.
        """
        markers = [0, *self._history.markers()]
        if seqno not in markers:
            near = max(marker for marker in markers if marker <= max(seqno, 0))
            raise InvalidArgumentError(
                f"partition {self.number} has no snapshot marker at {seqno}, and a history changes at one only",
                hint=f"the one before it is {near}",
            )
        self._history.cut_above(seqno)
        self._shown = self._history.copy()
        self.high, self.purge = seqno, 0
        self.log = self.log.with_record(new_id(), seqno)
        return self.log.newest.failover_id

    def lose_log(self) -> None:
        """Forget the failover log: a new id at 0."""
        self.log = FailoverLog.born(new_id())

    def merge(self, runs: int) -> None:
        """Drop superseded rows below the newest marker, in as many runs, of which only the last ends in a marker."""
        end = self.last_marker
        rows, above = self._split(end)
        newest = {row.key: row for row in rows}
        kept = sorted(newest.values(), key=_seqno_of)
        self._show(kept, end, runs, above)

    def purge_to(self, seqno: int) -> int:
        """Merge, and drop the tombstones at or below a seqno but for the newest row. Return the purge seqno."""
        self.merge(1)
        end = self.last_marker
        rows, above = self._split(end)
        kept = [r for r in rows if r.value is not None or r.seqno > seqno or r.seqno == self.high]
        gone = {row.seqno for row in rows} - {row.seqno for row in kept}
        if gone:
            self.purge = max(self.purge, *gone)
            self._show(kept, end, 1, above)
        return self.purge

    def _split(self, seqno: int) -> tuple[list[Row], Branch]:
        """Return the shown rows up to a seqno, and what is above it."""
        shown = self._shown
        at_row = bisect_right(shown.rows, seqno, key=_seqno_of)
        at_run = bisect_right(shown.runs, seqno, key=_end_of)
        return shown.rows[:at_row], Branch(shown.rows[at_row:], shown.runs[at_run:])

    def _show(self, rows: list[Row], end: int, runs: int, above: Branch) -> None:
        """Show these rows as ``(0, end]`` in at most so many runs that share one horizon."""
        time = max((row.time for row in rows), default=0)
        size = max(-(-len(rows) // runs), 1)
        ends = [row.seqno for row in rows[size - 1 :: size]][: runs - 1]
        bounds = sorted({0, *ends, end})
        stretch = [Run(a, b, end, time) for a, b in pairwise(bounds)]
        self._shown = Branch(rows + above.rows, stretch + above.runs)

    # Reading.

    def next_part(self, seqno: int, prefix: bytes) -> tuple[Run, list[Row]] | None:
        """Return what comes above a seqno, at most about FRAME_BYTES of it; None when there is nothing.

        A part of a run that is not its last is no marker. Rows without the prefix are left out.
        """
        shown = self._shown
        at = bisect_right(shown.runs, seqno, key=_end_of)
        if at == len(shown.runs):
            return None
        run = shown.runs[at]._replace(start=seqno)
        rows: list[Row] = []
        size = 0
        first = bisect_right(shown.rows, seqno, key=_seqno_of)
        for row in shown.rows[first : bisect_right(shown.rows, run.end, key=_seqno_of)]:
            size += _ROW_BYTES + len(row.key) + len(row.value or b"")
            if rows and size > FRAME_BYTES:
                run = run._replace(end=rows[-1].seqno, horizon=max(run.horizon, run.end))
                break
            rows.append(row)
        if self.held is not None and run.end > self.held:
            return None
        return run, [row for row in rows if row.key.startswith(prefix)]

    def newest(self, key: bytes) -> Row | None:
        """Return the newest mutation of a key, None when there is none."""
        return next((row for row in reversed(self._shown.rows) if row.key == key), None)

    def first_since(self, time: int) -> int:
        """Return the seqno right below the first mutation at or after a time, else the newest marker."""
        for run in self._shown.runs:
            if run.time >= time:
                return run.start
        return self.last_marker

    def is_marker(self, seqno: int) -> bool:
        """Whether what is shown is complete at a seqno."""
        return seqno == 0 or seqno in self._shown.markers()

    def state(self) -> dict[bytes, bytes]:
        """Return the keys and values as of the newest seqno."""
        last = {row.key: row.value for row in self._history.rows}
        return {key: value for key, value in last.items() if value is not None}


class Memory:
    """All partitions of a bucket, made when they are asked for."""

    def __init__(self) -> None:
        self.version = new_id()
        self._partitions: dict[int, Partition] = {}

    def __getitem__(self, number: int) -> Partition:
        if number not in self._partitions:
            self._partitions[number] = Partition(number)
        return self._partitions[number]

    def __iter__(self) -> Iterator[Partition]:
        """The partitions that were asked for, ascending."""
        return iter([self._partitions[number] for number in sorted(self._partitions)])


def new_id() -> int:
    """Return a random id, 1 to 2^64 - 1."""
    return 1 + secrets.randbelow(FAILOVER_ID_MAX)


def run_block(
    partition: int,
    rows: Sequence[tuple[int, bytes, bytes | None]],
    start: int,
    end: int,
    horizon: int,
    time: int = 0,
) -> Block:
    """Return a block of one run; a row is a seqno, a key and a value, None for a delete."""
    table = make_runs([partition], [len(rows)], [start], [end], [horizon], [time])
    if not rows:
        return sealed(Block(table, b"", b"", b"", b"", b"", b"", b"", 0))
    seqnos, keys, values = zip(*rows, strict=True)
    block = build_block(keys, values, np.full(len(rows), partition, np.uint32))
    offsets = (np.array(seqnos, np.int64) - start).astype("<u4")
    dense = len(rows) == end - start
    return sealed(replace(block, runs=table, seqnos=b"" if dense else offsets.tobytes()))
