"""From one offset to the next, and what a batch between two of them reads: values in, values out.

A cut gives the ends: a range that ends at a pin can be read as of its end, today and when it is repeated. So the end of
every batch is a state that the consumer really holds, which is what a rollback may go back to.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from upr_protocol.failover import format_failover_id
from upr_spark.errors import UprSparkError
from upr_spark.source.offsets import Entry, Offset

Mode = Literal["fail", "emit", "reset"]
MODES: Final = ("fail", "emit", "reset")
UNKNOWN_ID: Final = "unknown_id"
BELOW_PURGE: Final = "below_purge"
ABOVE_HIGH: Final = "above_high"


@dataclass(frozen=True, slots=True)
class Rules:
    """What to do about a history that changed.

    Args:
        mode: "fail" raises; "emit" goes back to a point and says so in a row; "reset" begins the partition again.
        fail_on_data_loss: whether a partition that cannot be continued at all raises.
        history: how many earlier ends are kept for each partition.
    """

    mode: Mode = "fail"
    fail_on_data_loss: bool = True
    history: int = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says of one partition, asked with the failover id of an entry.

    Args:
        newest_id: its newest failover id.
        high: its newest seqno.
        rollback: to where data of the id that was asked about goes back; None for nowhere.
        rule, words: which rule of the handshake decided.
        newest_record: the seqno of its newest failover record.
        purge: deletes at or below this seqno may be gone.
        active: False on a replica, which may only be late.
    """

    newest_id: int
    high: int
    rollback: int | None = None
    rule: str = ""
    words: str = ""
    newest_record: int = 0
    purge: int = 0
    active: bool = True


@dataclass(frozen=True, slots=True)
class PinPoint:
    """A pinned marker: the id that was newest when it was pinned, and its seqno."""

    failover_id: int
    seqno: int


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A cut: its name, and the pin of each partition."""

    name: str
    pins: Mapping[int, PinPoint]


@dataclass(frozen=True, slots=True)
class Range:
    """What a batch reads of one partition: rows above ``from_seqno`` up to ``end_seqno``, as of the latter.

    Args:
        end_id: the branch; everything up to ``from_seqno`` is part of it too.
        rollback: the seqno of the control row that comes first; None for none.
    """

    partition: int
    from_seqno: int
    end_id: int
    end_seqno: int
    rollback: int | None = None

    @property
    def weight(self) -> int:
        """How much work it is, about."""
        return self.end_seqno - self.from_seqno + 1


@dataclass(frozen=True, slots=True)
class Control:
    """What a control row says: everything of the partition above a seqno is void."""

    partition: int
    seqno: int


def has_news(entry: Entry, answer: Answer) -> bool:
    """Whether a partition may have to move: there is more of it, or its history is another one."""
    if entry.failover_id is None:
        return answer.high > 0
    return answer.newest_id != entry.failover_id or answer.high != entry.seqno


def has_reached(entry: Entry, pin: PinPoint) -> bool:
    """Whether a partition stands at a pin."""
    if pin.seqno == 0 and entry.seqno == 0:
        return entry.failover_id in (None, pin.failover_id)
    return entry.seqno == pin.seqno and entry.failover_id == pin.failover_id


def next_offset(
    start: Offset,
    answers: Mapping[int, Answer],
    cut: CutPoint,
    rules: Rules,
    limit: int | None = None,
) -> Offset | None:
    """Return the end of the batch that begins at ``start``; None when nothing moves.

    Args:
        answers: asked with the ids of ``start``, after the cut was made; each newest id is that of the pin.
        limit: how many seqnos to advance by at most. Partitions advance whole, and at least one does.

    Raises:
        UprSparkError: UPR_ROLLBACK_REQUIRED or UPR_DATA_LOSS, the rules say to stop here.
    """
    moves: dict[int, Entry] = {}
    for partition, entry in start.entries.items():
        moved = _move(partition, entry, answers[partition], cut.pins[partition], rules)
        if moved is not None:
            moves[partition] = moved
    chosen = _within(limit, start, moves)
    if not chosen:
        return None
    entries = {
        partition: moves[partition] if partition in chosen else entry.settled()
        for partition, entry in start.entries.items()
    }
    whole = all(has_reached(entry, cut.pins[p]) for p, entry in entries.items())
    earlier = start.earlier_cut if start.cut == cut.name else start.cut
    return Offset(start.bucket_version, entries, cut.name, None if whole else earlier)


def _within(limit: int | None, start: Offset, moves: Mapping[int, Entry]) -> set[int]:
    if limit is None:
        return set(moves)
    chosen: set[int] = set()
    used = 0
    # What has to be undone goes first: it is wrong as long as it stands.
    for partition in sorted(moves, key=lambda p: (moves[p].rollback is None, p)):
        entry = moves[partition]
        begin = start.entries[partition].seqno if entry.rollback is None else entry.rollback
        cost = max(entry.seqno - begin, 0)
        if not chosen or used + cost <= limit:
            chosen.add(partition)
            used += cost
    return chosen


def _move(
    partition: int, entry: Entry, answer: Answer, pin: PinPoint, rules: Rules
) -> Entry | None:
    """Return where a partition goes, None when it stays where it is."""
    if entry.failover_id is None or not (entry.seqno or entry.base):
        # Nothing is held, so there is nothing to undo and nothing was missed.
        at_end = Entry(pin.failover_id, pin.seqno, inexact=_is_inexact(rules, pin.seqno))
        return None if has_reached(entry, pin) else at_end
    if not answer.active and pin.seqno < entry.seqno and answer.newest_id == entry.failover_id:
        return None
    if 0 < entry.seqno < answer.purge:
        words = f"deletes up to seqno {answer.purge} may be gone"
        return _lost(partition, entry, replace(answer, words=words), pin, rules, BELOW_PURGE)
    if answer.newest_id != entry.failover_id and answer.rule == UNKNOWN_ID:
        return _lost(partition, entry, answer, pin, rules, UNKNOWN_ID)
    back_to = _back_to(entry, answer, pin)
    if back_to is None or _stays(entry, back_to, rules):
        return _advance(entry, pin, rules)
    return _roll_back(partition, entry, answer, pin, rules, back_to)


def _back_to(entry: Entry, answer: Answer, pin: PinPoint) -> int | None:
    back_to = None if answer.newest_id == entry.failover_id else answer.rollback
    if pin.seqno < entry.seqno:
        # The same id with less than was read under it: an old copy is served, and a record is missing.
        back_to = min(answer.newest_record, entry.seqno if back_to is None else back_to)
    return back_to


def _stays(entry: Entry, back_to: int, rules: Rules) -> bool:
    """Whether what is held is part of the new history, all of it and as it was."""
    if not entry.holds:
        return entry.seqno <= back_to
    return entry.seqno <= back_to and not entry.inexact and rules.mode != "reset"


def _advance(entry: Entry, pin: PinPoint, rules: Rules) -> Entry | None:
    if has_reached(entry, pin):
        return None
    if pin.seqno == entry.seqno:
        return replace(entry.settled(), failover_id=pin.failover_id)
    points: tuple[int, ...] = ()
    if rules.mode != "reset":
        own = (entry.seqno,) if entry.holds and not entry.inexact else ()
        points = thinned((*own, *entry.points), pin.seqno, rules.history)
    inexact = _is_inexact(rules, pin.seqno)
    return Entry(pin.failover_id, pin.seqno, points, None, entry.base, inexact)


def _is_inexact(rules: Rules, seqno: int) -> bool:
    # Only "reset" may read what is not pinned any more, and it never relies on it.
    return rules.mode == "reset" and seqno > 0


def _usable(entry: Entry, back_to: int, purge: int) -> list[int]:
    if entry.inexact:
        return []
    points = (entry.seqno, *entry.points) if entry.holds else ()
    return [point for point in points if point <= back_to and point >= purge]


def _roll_back(
    partition: int, entry: Entry, answer: Answer, pin: PinPoint, rules: Rules, back_to: int
) -> Entry:
    usable = _usable(entry, back_to, answer.purge)
    base = min(entry.base, back_to)
    if rules.mode == "fail" and entry.holds:
        raise rollback_required(partition, entry, answer, back_to, max([*usable, base]))
    points = usable if rules.mode == "emit" else []
    to = max([*points, base])
    if 0 < to < answer.purge:
        words = f"deletes up to seqno {answer.purge} may be gone"
        return _lost(partition, entry, replace(answer, words=words), pin, rules, BELOW_PURGE)
    return _rolled_back(pin, rules, to, base, [point for point in points if base < point])


def _rolled_back(
    pin: PinPoint, rules: Rules, to: int, base: int, points: Sequence[int] = ()
) -> Entry:
    kept = thinned([point for point in points if point < pin.seqno], pin.seqno, rules.history)
    inexact = _is_inexact(rules, pin.seqno)
    return Entry(pin.failover_id, pin.seqno, kept, to, base, inexact)


def _lost(
    partition: int, entry: Entry, answer: Answer, pin: PinPoint, rules: Rules, rule: str
) -> Entry:
    if rules.fail_on_data_loss and rules.mode != "reset":
        raise data_loss(partition, entry.seqno, entry.failover_id, rule, answer.words)
    return _rolled_back(pin, rules, 0, 0)


def thinned(points: Sequence[int], seqno: int, limit: int) -> tuple[int, ...]:
    """Return at most ``limit`` of falling points: near ``seqno`` they stay dense, farther away they thin out."""
    kept = list(points)
    while len(kept) > limit:
        # The one goes whose neighbours are nearest to each other, seen from the end.
        ahead = [seqno, *kept]
        behind = [*kept[1:], 0]
        widths = [
            (ahead[at] - behind[at]) / (seqno - behind[at] + 1) if at else 2.0
            for at in range(len(kept))
        ]
        del kept[widths.index(min(widths))]
    return tuple(kept)


def plan_ranges(start: Offset, end: Offset) -> list[Range]:
    """Return what the batch between two offsets reads; the same for the same offsets.

    Raises:
        UprSparkError: UPR_BAD_OFFSET, they are not of one query.
    """
    if end.anchor:
        return []
    ranges = []
    for partition, to in end.entries.items():
        entry = start.entries.get(partition)
        if entry is None or (to.rollback is None and to.seqno < entry.seqno):
            raise UprSparkError(
                "BAD_OFFSET",
                f"a batch does not continue the one before it in partition {partition}",
                hint="the checkpoint was mixed with another one: restore it from a copy, or begin with a new one",
            )
        if to.failover_id is None:
            continue
        begin, row = entry.seqno, None
        if to.rollback is not None:
            # Where nothing was held there is nothing to undo, and rows of mutations only.
            begin, row = to.rollback, to.rollback if entry.holds else None
        if row is not None or to.seqno > begin:
            ranges.append(Range(partition, begin, to.failover_id, to.seqno, row))
    return ranges


def grouped(ranges: Sequence[Range], count: int) -> list[list[Range]]:
    """Return at most ``count`` groups of about the same weight, none empty, each by partition."""
    groups: list[list[Range]] = [[] for _ in range(min(count, len(ranges)))]
    lightest = [(0, index) for index in range(len(groups))]
    for one in sorted(ranges, key=lambda r: (-r.weight, r.partition)):
        weight, index = heapq.heappop(lightest)
        groups[index].append(one)
        heapq.heappush(lightest, (weight + one.weight, index))
    return [sorted(group, key=lambda r: r.partition) for group in groups]


def rollback_required(
    partition: int, entry: Entry, answer: Answer, back_to: int, point: int
) -> UprSparkError:
    """Return the error of mode "fail" for a partition that has to go back."""
    old = None if entry.failover_id is None else format_failover_id(entry.failover_id)
    return UprSparkError(
        "ROLLBACK_REQUIRED",
        f"partition {partition} was read up to seqno {entry.seqno}, of which the server keeps only what is at or "
        f"below {back_to}",
        hint="restart with onRollback=emit, which undoes and goes on; or with onRollback=reset, which reads the "
        "partition again; or with a new checkpoint and an empty target",
        details={
            "partition": partition,
            "seqno": entry.seqno,
            "old_id": old,
            "new_id": format_failover_id(answer.newest_id),
            "rollback_seqno": back_to,
            "newest_point": point,
        },
    )


def data_loss(
    partition: int, seqno: int, failover_id: int | None, rule: str, words: str
) -> UprSparkError:
    """Return the error for a partition that cannot be continued from anywhere but 0."""
    return UprSparkError(
        "DATA_LOSS",
        f"partition {partition} cannot be continued from seqno {seqno}: {words}",
        hint="restart with failOnDataLoss=false, which reads such partitions again from the beginning, with "
        "onRollback=reset, or with a new checkpoint",
        details={
            "partition": partition,
            "seqno": seqno,
            "old_id": None if failover_id is None else format_failover_id(failover_id),
            "rule": rule,
        },
    )
