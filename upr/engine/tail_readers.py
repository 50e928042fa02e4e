"""Tail readers: the streams of one follower that read the tail together.

Followers that stand at the same entry and are shown the same runs in the same way share what was selected for the first
of them, up to the encoded message: see ``Tail.shared``. Entries never change, so it holds as long as it is kept.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field

import numpy as np

from upr.engine.streams import Messages
from upr.engine.tail import WINDOW_BYTES, Tail, TailEntry, join_encoded
from upr.storage.blocks import FEW_RUNS, summary
from upr.storage.journal import NumberedWrite
from upr.storage.read import Showing
from upr_protocol.block import I64, U64, Mask, Runs, joined_runs, select_runs, slice_runs
from upr_protocol.limits import FRAME_BYTES, PARTITIONS
from upr_protocol.wire.codec import encode_block

JOINED_BYTES = 128 * 2**10
"""Most bytes of small blocks that become one."""
ENTRIES_AT_ONCE = 256
"""Entries looked at in one step, so that a tail of tiny writes does not hold the event loop; a window is one."""
SPAN_AT_ONCE = 1024
"""The same with those in windows, which may have to be made."""
WINDOW_MEMBERS_MIN = PARTITIONS // 8
"""Fewer partitions read entry by entry: of a window they would want little."""
_PLACE_BYTES = 40
"""An entry's number, in what is shared and in what it is found by."""
_Pieces = list[tuple[TailEntry, int]]
"""Entries, and windows of them, with the number behind each."""
_State = tuple[U64, U64, U64 | None, U64 | None, U64 | None]
"""Seqnos, horizons, ends and limits of the streams, and what is stable, see ``TailReaders.take``."""


@dataclass(slots=True)
class _Group:
    next_entry: int
    members: Mask = field(default_factory=lambda: np.zeros(PARTITIONS, bool))


@dataclass(slots=True)
class Selection:
    """Blocks of the tail: the entry behind them, their runs, end to end, and their bytes.

    Attributes:
        few: the runs once more as numbers, where they are few.
        joinable: whether it was not tried in vain to make one block of them.
        messages: the frame of the blocks, encoded; see ``FrameOut``, also for ``writes``.
    """

    next_entry: int
    blocks: list[bytes]
    runs: Runs
    size: int
    few: Sequence[tuple[int, ...]] = ()
    joinable: bool = True
    messages: Messages = field(default_factory=dict)
    writes: list[tuple[int, NumberedWrite]] = field(default_factory=list)


@dataclass(slots=True)
class Taken:
    """Selection for a group.

    Attributes:
        beyond: the runs left out because they reach above their stream's limit.
        unstable: those left out because they are not stable yet; their partitions wait.
        first: number of the entry from which they go on.
    """

    group: _Group
    selection: Selection
    beyond: Runs | None = None
    unstable: Runs | None = None
    first: int = 0


class Waiting:
    """Partitions whose next run is not stable at enough replicas yet, each with what it waits for.

    They read nothing, so that none of them holds up the others.
    """

    def __init__(self) -> None:
        self._horizon = np.zeros(PARTITIONS, np.uint64)
        self._entry = np.zeros(PARTITIONS, np.int64)

    def add(self, partitions: I64, horizons: U64, entry: int) -> None:
        """Have partitions wait for seqnos to be stable; then they go on at a tail entry, -1 for the store."""
        # From the newest run on, so that the oldest of a partition stays.
        self._horizon[partitions[::-1]] = horizons[::-1]
        self._entry[partitions] = entry

    def drop(self, partitions: Sequence[int] | I64) -> None:
        self._horizon[partitions] = 0

    def has(self, partition: int) -> bool:
        return bool(self._horizon[partition])

    def take(self, stable: U64) -> tuple[I64, I64]:
        """Remove and return the partitions that need not wait any more, and the entry of each."""
        free = np.flatnonzero((self._horizon > 0) & (self._horizon <= stable))
        self._horizon[free] = 0
        return free, self._entry[free]


@dataclass(slots=True)
class _Span:
    """Consecutive entries that are looked at together, the number behind each, and their runs, end to end, as columns."""

    entries: list[TailEntry]
    after: tuple[int, ...]
    runs: Runs
    partitions: I64
    starts: U64
    ends: U64

    @classmethod
    def of(cls, pieces: _Pieces) -> "_Span":
        entries = [entry for entry, _ in pieces]
        runs = joined_runs([entry.runs for entry in entries])
        if len(entries) > 1 and not summary(runs)[1]:
            # Whether a stream has reached its end depends on the run before: one entry at a time is exact.
            return cls.of(pieces[:1])
        after = tuple(after for _, after in pieces)
        partitions = runs["partition"].astype(np.int64)
        starts, ends = runs["start_seqno"].copy(), runs["end_seqno"].copy()
        return cls(entries, after, runs, partitions, starts, ends)


class TailReaders:
    """Groups of partitions that read the tail from the same entry; at most one group an entry.

    Args:
        followers: all that read the tail; what is taken as it is is kept for the others only if there are any.

    Attributes:
        moves: how often a group moved on.
    """

    def __init__(self, tail: Tail, memory: bool, followers: Sized, showing: Showing) -> None:
        self._tail = tail
        self._showing = showing
        self._memory = memory
        self._followers = followers
        self.waiting: Waiting | None = None
        """Those that wait to be stable; None where everything durable is shown."""
        # The one that is furthest behind first.
        self._groups: list[_Group] = []
        self.coming = np.zeros(PARTITIONS, bool)
        """Partitions that join soon, several at once."""
        self.moves = 0

    @property
    def _limit(self) -> int:
        """Return the number of the first entry that may not be shown."""
        return self._tail.end if self._memory else self._tail.durable

    @property
    def at_end(self) -> bool:
        """Whether there is nothing to be taken now."""
        return not self._groups or self._groups[0].next_entry >= self._limit

    def join(self, partitions: Sequence[int] | I64, entry: int) -> None:
        """Let partitions read from an entry on."""
        if not len(partitions):
            return
        at = bisect_left(self._groups, entry, key=lambda group: group.next_entry)
        if at == len(self._groups) or self._groups[at].next_entry != entry:
            self._groups.insert(at, _Group(entry))
        self._groups[at].members[partitions] = True

    def leave(self, partitions: Iterable[int]) -> None:
        gone = list(partitions)
        self.coming[gone] = False
        if self.waiting is not None:
            self.waiting.drop(gone)
        for group in self._groups:
            group.members[gone] = False
        self._groups = [group for group in self._groups if group.members.any()]

    def take_stable(self, stable: U64) -> list[int]:
        """Let partitions read on whose next run is stable now; return those that must look for their place anew."""
        assert self.waiting is not None
        partitions, entries = self.waiting.take(stable)
        in_tail = entries >= self._tail.first
        if in_tail.any():
            # From the first of them on: what each has read already is skipped, and they are one group.
            self.join(partitions[in_tail], int(entries[in_tail].min()))
        lost: list[int] = partitions[~in_tail].tolist()
        return lost

    def take_dropped(self) -> list[int]:
        """Remove and return the partitions whose next entry is not in the tail any more."""
        if not self._groups or self._groups[0].next_entry >= self._tail.first:
            return []
        behind = [group for group in self._groups if group.next_entry < self._tail.first]
        self._groups = self._groups[len(behind) :]
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
        stable: U64 | None = None,
    ) -> Taken | None:
        """Return the next blocks of the group that is furthest behind; None if no group has any.

        Nothing changes until ``commit``. The result may hold no blocks if entries were skipped.

        Args:
            seqno, horizon, until: each stream's state, shape (1024,); ``until`` is None when no stream has an end.
            max_bytes: stop before this is exceeded, but not before the first block.
            limit: the largest horizon that each stream may be sent, shape (1024,); None: no stream has one.
            stable: the largest that each may be sent now; None: what is durable is.
        """
        if not self._groups:
            return None
        group, end = self._groups[0], self._limit
        first = group.next_entry
        if not self._tail.first <= first < end:
            return None
        if len(self._groups) > 1:
            # Stopping where the next group stands lets the two become one.
            end = min(end, self._groups[1].next_entry)
        if end == first + 1 and until is None and limit is None and stable is None:
            whole = self._whole(group, seqno)
            if whole is not None:
                return Taken(group, whole)
        enough = min(end, first + SPAN_AT_ONCE)
        state = (seqno, horizon, until, limit, stable)
        while True:
            span = self._span(group, first, end, state, max_bytes)
            taken = self._select(group, first, span, state, max_bytes)
            selection = taken.selection
            if taken.beyond is not None or taken.unstable is not None:
                return taken
            if selection.blocks or selection.next_entry >= enough or len(span.entries) == 1:
                return taken
            first = selection.next_entry

    def _whole(self, group: _Group, seqno: U64) -> Selection | None:
        """Return the group's next entry if it has few runs, and each is wanted as it is; None to look at it run by run.

        A write that comes alone is this to most followers: it must not cost what a large one does.
        """
        first = group.next_entry
        [entry] = self._tail.range(first, first + 1)
        if len(entry.runs) > FEW_RUNS or not self._showing.as_they_are:
            return None
        few = entry.runs.tolist()
        member, reached = group.members.item, seqno.item
        for partition, _, start, *_ in few:
            if not member(partition) or reached(partition) > start:
                return None
        place, is_shared = (first, self._showing.writes), len(self._followers) > 1
        if is_shared and isinstance(known := self._tail.shared.get(place), Selection):
            return known
        whole = Selection(first + 1, [entry.data], entry.runs, len(entry.data), few)
        if self._showing.writes:
            whole.writes = [(0, write) for write in entry.writes]
        if is_shared:
            self._tail.shared.put(place, whole, 2 * whole.size)
        return whole

    def _span(self, group: _Group, first: int, end: int, state: _State, max_bytes: int) -> _Span:
        """Return entries that together fill a frame for a reader of all partitions, at least one, with their runs."""
        # A window has no writes.
        many = not self._showing.writes and group.members.sum() >= WINDOW_MEMBERS_MIN
        # What suits one reader of everything suits all that stand there: not to be put together for each of them.
        is_common = not _has_bounds(state) and max_bytes >= WINDOW_BYTES
        place = ("span", first, end, many)
        known = self._tail.shared.get(place) if is_common else None
        if isinstance(known, _Span):
            return known
        span = _Span.of(self._fitting(group, first, end, state, max_bytes, many))
        if is_common:
            size = sum([entry.size + _PLACE_BYTES for entry in span.entries])
            self._tail.shared.put(place, span, size)
        return span

    def _fitting(
        self, group: _Group, first: int, end: int, state: _State, max_bytes: int, many: bool
    ) -> _Pieces:
        """Return entries, and with ``many`` windows of them, that together fill a frame: at least one."""
        pieces: _Pieces = []
        size = 0
        while first < end and len(pieces) < ENTRIES_AT_ONCE:
            window = self._tail.window(first) if many else None
            if (
                window is None
                or window[1] > end
                or len(window[0].data) > max_bytes
                or _reaches_beyond(group, window[0].runs, state)
            ):
                window = (self._tail[first], first + 1)
            size += len(window[0].data)
            if pieces and size > FRAME_BYTES:
                break
            pieces.append(window)
            first = window[1]
        return pieces

    def _select(
        self,
        group: _Group,
        first: int,
        span: _Span,
        state: _State,
        max_bytes: int,
    ) -> Taken:
        seqno, horizon, until, limit, stable = state
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
        unstable = None
        if stable is not None:
            # Of several runs of a partition here the horizons rise: behind one that is not stable none is.
            unstable = keep & (runs["horizon"] > stable[partitions])
            keep &= ~unstable
        # A position may lie inside a run: rows up to it are not sent again.
        inside = keep & (starts < above)
        slices = np.where(inside, above, 0) if inside.any() else None
        selection = self._selection(first, span, keep, slices, max_bytes)
        taken = Taken(group, selection)
        if beyond is not None or unstable is not None:
            done = span.after.index(selection.next_entry) + 1
            used = sum(len(entry.runs) for entry in span.entries[:done])
            if beyond is not None and beyond[:used].any():
                taken.beyond = runs[:used][beyond[:used]]
            if unstable is not None and unstable[:used].any():
                taken.unstable, taken.first = runs[:used][unstable[:used]], first
        return taken

    def _selection(
        self, first: int, span: _Span, keep: Mask, above: U64 | None, max_bytes: int
    ) -> Selection:
        """Return the kept runs of a span as they are shown, from as many entries as ``max_bytes`` have room for.

        Args:
            above: for each run the seqno above which it is shown, 0 for all of it; None for all of every run. Only then
                is the selection shared.
        """
        place = (first, span.after, self._showing, keep.tobytes())
        if above is None:
            known = self._tail.shared.get(place)
            if isinstance(known, Selection) and known.size <= max_bytes:
                return self._joined(place, span, known)
        blocks: list[bytes] = []
        writes: list[tuple[int, NumberedWrite]] = []
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
                if self._showing.writes:
                    writes += [(len(blocks), write) for write in _writes(entry, kept, slices)]
                blocks.append(data)
                size += len(data)
            at = used = last
            done += 1
        shown = span.runs[:used]
        if not keep[:used].all():
            shown = shown[keep[:used]]
        selection = Selection(span.after[done - 1], blocks, shown, size, writes=writes)
        if above is None and done == len(span.entries):
            self._share(place, span, selection)
        return selection

    def _share(self, place: object, span: _Span, selection: Selection) -> None:
        # Its bytes, and once more in the message; and what it is found by, which may be the larger part.
        key = len(span.runs) + _PLACE_BYTES * len(span.entries)
        self._tail.shared.put(place, selection, 2 * selection.size + selection.runs.nbytes + key)

    def _joined(self, place: object, span: _Span, known: Selection) -> Selection:
        """Return a shared selection as one block, if that is worth its while.

        Joining small blocks costs about what a client spends on checking them one by one. So it is done for the second
        follower, and all further ones are sent the result.
        """
        if len(known.blocks) < 2 or known.size > JOINED_BYTES or not known.joinable:
            return known
        if self._showing.writes:
            # A write names its block.
            return known
        block = join_encoded(known.blocks)
        if block is None:
            known.joinable = False
            return known
        data = encode_block(block)
        joined = Selection(known.next_entry, [data], block.runs, len(data))
        self._share(place, span, joined)
        return joined

    def commit(self, taken: Taken) -> None:
        """Move the group behind the blocks it took."""
        taken.group.next_entry = taken.selection.next_entry
        if len(self._groups) > 1 and self._groups[1].next_entry == taken.selection.next_entry:
            taken.group.members |= self._groups.pop(1).members
        self.moves += 1
        if taken.unstable is not None:
            assert self.waiting is not None
            partitions = taken.unstable["partition"].astype(np.int64)
            self.leave(partitions.tolist())
            self.waiting.add(partitions, taken.unstable["horizon"], taken.first)


def _has_bounds(state: _State) -> bool:
    """Return whether a stream has an end, a limit, or waits for what is stable."""
    return any([bound is not None for bound in state[2:]])


def _reaches_beyond(group: _Group, runs: Runs, state: _State) -> bool:
    """Return whether a run ends above where a stream of the group ends, or above what it may be sent."""
    if not _has_bounds(state):
        return False
    _, _, until, limit, stable = state
    partitions = runs["partition"]
    beyond = np.zeros(len(runs), bool)
    if until is not None:
        beyond |= runs["end_seqno"] > until[partitions]
    if limit is not None:
        beyond |= runs["horizon"] > limit[partitions]
    if stable is not None:
        beyond |= runs["horizon"] > stable[partitions]
    return bool((beyond & group.members[partitions]).any())


def _writes(entry: TailEntry, kept: Mask, above: U64 | None) -> Iterable[NumberedWrite]:
    """Return the producers' writes of what is shown of an entry; see ``_selected``."""
    if kept.all() and above is None:
        return entry.writes
    partitions = entry.runs["partition"][kept]
    floor = np.full(PARTITIONS, np.iinfo(np.uint64).max, np.uint64)
    floor[partitions] = 0 if above is None else above[kept]
    shown = []
    for write in entry.writes:
        runs = entry.runs_of(write)
        runs = runs[runs["end_seqno"] > floor[runs["partition"]]]
        if len(runs):
            shown.append(write._replace(runs=runs.tobytes()))
    return shown


def _selected(
    entry: TailEntry,
    kept: Mask,
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
