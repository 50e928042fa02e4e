"""Tail readers: the streams of one follower that read the tail together.

Followers that stand at the same entry and are shown the same runs in the same way share what was selected for the first
of them, up to the encoded message: see ``Tail.shared``. Entries never change, so it holds as long as it is kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upr.engine.streams import Messages
from upr.engine.tail import Tail, TailEntry
from upr.storage.read import Showing
from upr_protocol.block import I64, RUN, U64, Runs, join_blocks, select_runs, slice_runs
from upr_protocol.limits import FRAME_BYTES, PARTITIONS
from upr_protocol.wire.codec import encode_block, open_block

_Mask = npt.NDArray[np.bool_]

EVERYTHING = Showing()
JOINED_BYTES = 128 * 2**10
"""Most bytes of small blocks that become one."""
ENTRIES_AT_ONCE = 256
"""Entries looked at in one step, so that a tail of tiny writes does not hold the event loop."""


@dataclass(slots=True)
class _Group:
    next_entry: int
    members: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(PARTITIONS, bool))


@dataclass(slots=True)
class Selection:
    """Blocks of the tail: the entry behind them, their runs, end to end, and their bytes.

    Attributes:
        messages: the frame of the blocks, encoded; see ``FrameOut``.
    """

    next_entry: int
    blocks: list[bytes]
    runs: Runs
    size: int
    messages: Messages = field(default_factory=dict)


@dataclass(slots=True)
class Taken:
    """Selection for a group; ``beyond`` are the runs left out because they reach above their stream's limit."""

    group: _Group
    selection: Selection
    beyond: Runs | None = None


@dataclass(slots=True)
class _Span:
    """Consecutive entries that are looked at together, and their runs, end to end, as columns."""

    entries: list[TailEntry]
    runs: Runs
    partitions: I64
    starts: U64
    ends: U64

    @classmethod
    def of(cls, entries: list[TailEntry]) -> "_Span":
        runs = _table_of(entries)
        if len(entries) > 1 and (runs["horizon"] != runs["end_seqno"]).any():
            # Whether a stream has reached its end depends on the run before: one entry at a time is exact.
            return cls.of(entries[:1])
        partitions = runs["partition"].astype(np.int64)
        return cls(entries, runs, partitions, runs["start_seqno"].copy(), runs["end_seqno"].copy())


class TailReaders:
    """Groups of partitions that read the tail from the same entry; at most one group an entry.

    Attributes:
        moves: how often a group moved on.
    """

    def __init__(self, tail: Tail, memory: bool, showing: Showing = EVERYTHING) -> None:
        self._tail = tail
        self._showing = showing
        self._memory = memory
        self._groups: list[_Group] = []
        self.moves = 0

    @property
    def _limit(self) -> int:
        """Return the number of the first entry that may not be shown."""
        return self._tail.end if self._memory else self._tail.durable

    @property
    def at_end(self) -> bool:
        """Whether there is nothing to be taken now."""
        limit = self._limit
        return all(group.next_entry >= limit for group in self._groups)

    def join(self, partitions: Sequence[int] | I64, entry: int) -> None:
        """Let partitions read from an entry on."""
        if not len(partitions):
            return
        for group in self._groups:
            if group.next_entry == entry:
                group.members[partitions] = True
                return
        group = _Group(entry)
        group.members[partitions] = True
        self._groups.append(group)

    def leave(self, partitions: Iterable[int]) -> None:
        """Remove partitions."""
        gone = list(partitions)
        for group in self._groups:
            group.members[gone] = False
        self._groups = [group for group in self._groups if group.members.any()]

    def take_dropped(self) -> list[int]:
        """Remove and return the partitions whose next entry is not in the tail any more."""
        behind = [group for group in self._groups if group.next_entry < self._tail.first]
        if not behind:
            return []
        self._groups = [group for group in self._groups if group.next_entry >= self._tail.first]
        members = np.logical_or.reduce([group.members for group in behind])
        dropped: list[int] = np.flatnonzero(members).tolist()
        return dropped

    def take(
        self,
        seqno: U64,
        horizon: U64,
        until: U64 | None,
        max_bytes: int,
        limit: U64 | None = None,
    ) -> Taken | None:
        """Return the next blocks of the group that is furthest behind; None if no group has any.

        Nothing changes until ``commit``. The result may hold no blocks if entries were skipped.

        Args:
            seqno, horizon, until: each stream's state, shape (1024,); ``until`` is None when no stream has an end.
            max_bytes: stop before this is exceeded, but not before the first block.
            limit: the largest horizon that each stream may be sent, shape (1024,); None: no stream has one.
        """
        self._merge_groups()
        waiting = [g for g in self._groups if self._tail.first <= g.next_entry < self._limit]
        if not waiting:
            return None
        group = min(waiting, key=lambda g: g.next_entry)
        others = [g.next_entry for g in self._groups if g.next_entry > group.next_entry]
        # Stopping where the next group stands lets the two become one.
        end = min(self._limit, group.next_entry + ENTRIES_AT_ONCE, *others)
        first = group.next_entry
        while True:
            span = self._span(first, end)
            taken = self._select(group, first, span, (seqno, horizon, until, limit), max_bytes)
            selection = taken.selection
            if taken.beyond is not None:
                return taken
            if selection.blocks or selection.next_entry == end or len(span.entries) == 1:
                return taken
            first = selection.next_entry

    def _span(self, first: int, end: int) -> _Span:
        """Return entries that together fill a frame for a reader of all partitions: at least one."""
        known = self._tail.shared.get((first, end))
        if isinstance(known, _Span):
            return known
        last, size = first + 1, len(self._tail[first].data)
        while last < end and (size := size + len(self._tail[last].data)) <= FRAME_BYTES:
            last += 1
        span = _Span.of(self._tail.range(first, last))
        self._tail.shared.put((first, end), span, sum(entry.size for entry in span.entries))
        return span

    def _select(
        self,
        group: _Group,
        first: int,
        span: _Span,
        state: tuple[U64, U64, U64 | None, U64 | None],
        max_bytes: int,
    ) -> Taken:
        seqno, horizon, until, limit = state
        runs, partitions, starts = span.runs, span.partitions, span.starts
        above = seqno[partitions]
        keep = group.members[partitions] & (span.ends > above)
        if until is not None:
            keep &= (starts < until[partitions]) | (horizon[partitions] > starts)
        beyond = None
        if limit is not None:
            # A later run of such a stream begins at or above its end: only the first one reaches beyond.
            beyond = keep & (runs["horizon"] > limit[partitions])
            keep &= ~beyond
        # A position may lie inside a run: rows up to it are not sent again.
        inside = keep & (starts < above)
        slices = np.where(inside, above, 0) if inside.any() else None
        selection = self._selection(first, span, keep, slices, max_bytes)
        taken = Taken(group, selection)
        if beyond is not None:
            used = sum(len(entry.runs) for entry in span.entries[: selection.next_entry - first])
            if beyond[:used].any():
                taken.beyond = runs[:used][beyond[:used]]
        return taken

    def _selection(
        self, first: int, span: _Span, keep: _Mask, above: U64 | None, max_bytes: int
    ) -> Selection:
        """Return the kept runs of a span as they are shown, from as many entries as ``max_bytes`` have room for.

        Args:
            above: for each run the seqno above which it is shown, 0 for all of it; None for all of every run. Only then
                is the selection shared.
        """
        place = (first, len(span.entries), self._showing, keep.tobytes())
        if above is None:
            known = self._tail.shared.get(place)
            if isinstance(known, Selection) and known.size <= max_bytes:
                return self._joined(place, known)
        blocks: list[bytes] = []
        size = at = used = done = 0
        for entry in span.entries:
            last = at + len(entry.runs)
            kept = keep[at:last]
            if kept.any():
                slices = None if above is None else above[at:last]
                if slices is not None and not slices.any():
                    slices = None
                data = _selected(entry, kept, self._showing, slices)
                if blocks and size + len(data) > max_bytes:
                    break
                blocks.append(data)
                size += len(data)
            at = used = last
            done += 1
        selection = Selection(first + done, blocks, span.runs[:used][keep[:used]], size)
        if above is None and done == len(span.entries):
            self._tail.shared.put(place, selection, 2 * size + selection.runs.nbytes)
        return selection

    def _joined(self, place: object, known: Selection) -> Selection:
        """Return a shared selection as one block, if that is worth its while.

        Joining small blocks costs about what a client spends on checking them one by one. So it is done for the second
        follower, and all further ones are sent the result.
        """
        if len(known.blocks) < 2 or known.size > JOINED_BYTES:
            return known
        block = join_blocks([open_block(data) for data in known.blocks])
        data = encode_block(block)
        joined = Selection(known.next_entry, [data], block.runs, len(data))
        self._tail.shared.put(place, joined, 2 * joined.size + block.runs.nbytes)
        return joined

    def commit(self, taken: Taken) -> None:
        """Move the group behind the blocks it took."""
        taken.group.next_entry = taken.selection.next_entry
        self.moves += 1

    def _merge_groups(self) -> None:
        if len(self._groups) < 2:
            return
        by_entry: dict[int, _Group] = {}
        for group in self._groups:
            same = by_entry.setdefault(group.next_entry, group)
            if same is not group:
                same.members |= group.members
        self._groups = list(by_entry.values())


def _table_of(entries: list[TailEntry]) -> Runs:
    """Return the tables end to end; numpy is slow to concatenate records, and bytes are not."""
    if len(entries) == 1:
        return entries[0].runs
    return np.frombuffer(b"".join([entry.runs.tobytes() for entry in entries]), RUN)


def _selected(
    entry: TailEntry,
    kept: npt.NDArray[np.bool_],
    showing: Showing,
    above: U64 | None,
) -> bytes:
    """Return an entry's bytes as they are, or a cut-out of what is to be shown.

    Args:
        above: for each run the seqno above which it is shown; None shows all runs completely.
    """
    if above is None and kept.all() and showing.as_they_are:
        return entry.data
    block = select_runs(entry.block(), kept)
    if above is not None:
        block = slice_runs(block, above[kept])
    return encode_block(showing.of(block))
