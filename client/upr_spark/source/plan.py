"""Plans of reading: from one offset to the next, what a batch between two of them reads, and the cuts that hold it.

A cut gives the ends: a range that ends at a pin can be read as of its end, today and when it is repeated. So the end of
every batch is a state that the consumer really holds, which is what a rollback may go back to. Cuts are kept until no
partition of the committed offset needs them; a query that ends leaves its newest to its lease, so that it can be started
again.
"""

import heapq
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from upr_protocol.errors import CutNotFoundError
from upr_protocol.failover import format_failover_id
from upr_protocol.handshake import Pin, Rule
from upr_spark.errors import UprSparkError, bad_option
from upr_spark.source.offsets import Entry, Offset, format_partitions, parse_offset
from upr_spark.source.options import LATEST, Rules, Settings
from upr_spark.source.server import LOAD, Answer, CutPoint, bucket_mismatch


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
        return self.end_seqno - self.from_seqno + 1


@dataclass(frozen=True, slots=True)
class Control:
    """What a control row says: everything of the partition above a seqno is void."""

    partition: int
    seqno: int


def has_reached(entry: Entry, pin: Pin) -> bool:
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


def _move(partition: int, entry: Entry, answer: Answer, pin: Pin, rules: Rules) -> Entry | None:
    """Return where a partition goes, None when it stays where it is."""
    if entry.failover_id is None or not (entry.seqno or entry.base):
        # Nothing is held, so there is nothing to undo and nothing was missed.
        at_end = Entry(pin.failover_id, pin.seqno, inexact=_is_inexact(rules, pin.seqno))
        return None if has_reached(entry, pin) else at_end
    # A replica may be late; and a reader that holds nothing may begin above a cut that was made before.
    may_wait = not answer.active or (not entry.holds and entry.seqno <= answer.high)
    if may_wait and pin.seqno < entry.seqno and answer.newest_id == entry.failover_id:
        return None
    if 0 < entry.seqno < answer.purge:
        return _purged(partition, entry, answer, pin, rules)
    if answer.newest_id != entry.failover_id and answer.rule == Rule.UNKNOWN_ID:
        return _lost(partition, entry, pin, rules, Rule.UNKNOWN_ID, answer.words)
    back_to = _back_to(entry, answer, pin)
    if back_to is None or _stays(entry, back_to, rules):
        return _advance(entry, pin, rules)
    return _roll_back(partition, entry, answer, pin, rules, back_to)


def _back_to(entry: Entry, answer: Answer, pin: Pin) -> int | None:
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


def _advance(entry: Entry, pin: Pin, rules: Rules) -> Entry | None:
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
    partition: int, entry: Entry, answer: Answer, pin: Pin, rules: Rules, back_to: int
) -> Entry:
    usable = _usable(entry, back_to, answer.purge)
    base = min(entry.base, back_to)
    if rules.mode == "fail" and entry.holds:
        raise rollback_required(partition, entry, answer, back_to, max([*usable, base]))
    points = usable if rules.mode == "emit" else []
    to = max([*points, base])
    if 0 < to < answer.purge:
        return _purged(partition, entry, answer, pin, rules)
    return _rolled_back(pin, rules, to, base, [point for point in points if base < point])


def _rolled_back(pin: Pin, rules: Rules, to: int, base: int, points: Sequence[int] = ()) -> Entry:
    kept = thinned([point for point in points if point < pin.seqno], pin.seqno, rules.history)
    inexact = _is_inexact(rules, pin.seqno)
    return Entry(pin.failover_id, pin.seqno, kept, to, base, inexact)


def _purged(partition: int, entry: Entry, answer: Answer, pin: Pin, rules: Rules) -> Entry:
    words = f"deletes up to seqno {answer.purge} may be gone"
    return _lost(partition, entry, pin, rules, Rule.BELOW_PURGE, words)


def _lost(partition: int, entry: Entry, pin: Pin, rules: Rules, rule: Rule, words: str) -> Entry:
    if rules.fail_on_data_loss and rules.mode != "reset":
        raise data_loss(partition, entry.seqno, entry.failover_id, rule, words)
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


_ATTEMPTS: Final = 10
_HISTORY_PAUSE: Final = 0.05
_HOST_CHARACTERS: Final = 60


class ServerPort(Protocol):
    """What a planner needs of a server; see ``server.Server``."""

    @property
    def bucket_version(self) -> int: ...
    def now(self) -> float: ...
    def pause(self, seconds: float) -> None: ...
    def ask(self, ids: Mapping[int, int | None], *, whole: bool) -> dict[int, Answer]: ...
    def begin_at(self, times: Mapping[int, int]) -> dict[int, Pin]: ...
    def make_cut(self, name: str, partitions: Sequence[int], lease: float) -> CutPoint: ...
    def find_cut(self, name: str, lease: float) -> CutPoint | None: ...
    def renew(self, name: str, lease: float) -> bool: ...
    def release(self, name: str) -> None: ...


def random_token() -> str:
    """Return what makes a cut's name its own."""
    return secrets.token_hex(8)


def _cut_name(settings: Settings, token: str) -> str:
    # Drivers share the name of an option's default; the host says whose room it takes at the server.
    return f"{settings.cut_name}-{socket.gethostname()[:_HOST_CHARACTERS]}-{token}"


def starting_offset(server: ServerPort, settings: Settings, cut: CutPoint | None) -> Offset:
    """Return where a query without a checkpoint begins.

    Args:
        cut: for ``latest``.

    Raises:
        UprSparkError: UPR_BAD_OPTION or UPR_BUCKET_MISMATCH, the option startingOffsets does not fit.
    """
    starting, partitions = settings.starting, settings.partitions
    begins: Mapping[int, Pin] = {}
    if isinstance(starting, dict) and "v" in starting:
        offset = parse_offset(starting)
        check_followed(offset, settings, "startingOffsets")
        # Its cuts are of the query that it was taken from, which alone renews and releases them.
        return replace(offset, cut=None, earlier_cut=None)
    answers = server.ask(dict.fromkeys(partitions), whole=False)
    late = {} if cut is None else cut.pins
    if settings.starting_times:
        begins = server.begin_at(settings.starting_times)
    elif starting == "latest":
        begins = late
    elif isinstance(starting, dict):
        for partition, answer in answers.items():
            if starting[str(partition)] > answer.high:
                raise bad_option(
                    "startingOffsets",
                    None,
                    f"partition {partition} begins at {starting[str(partition)]}; must be at most its high seqno {answer.high}",
                    "a seqno that the partition has, or latest",
                )
        seqnos = {p: starting[str(p)] for p in partitions}
        begins = {
            p: late[p] if seqno == LATEST else Pin(answers[p].newest_id, seqno)
            for p, seqno in seqnos.items()
        }
    entries = {p: _holding_nothing(begins.get(p)) for p in partitions}
    name = None if cut is None else cut.name
    return Offset(server.bucket_version, entries, name, anchor=bool(begins))


def _holding_nothing(at: Pin | None) -> Entry:
    if at is None or not at.seqno:
        return Entry(None, 0)
    return Entry(at.failover_id, at.seqno, base=at.seqno)


def check_followed(offset: Offset, settings: Settings, option: str = "partitions") -> None:
    """Refuse an offset of other partitions than those that are followed.

    Raises:
        UprSparkError: UPR_BAD_OPTION.
    """
    if tuple(offset.entries) != settings.partitions:
        raise bad_option(
            option,
            None,
            f"the offset is of partitions {format_partitions(list(offset.entries))}, followed are "
            f"{format_partitions(settings.partitions)}",
            "partitions of a query cannot change: use the ones of the offset, or a new checkpoint",
        )


class Planner:
    """Plans one streaming query.

    Args:
        server: the bucket.
        settings: of the query.
        token: gives a text for each cut that makes its name one of its own.
    """

    def __init__(
        self, server: ServerPort, settings: Settings, token: Callable[[], str] = random_token
    ) -> None:
        self._server = server
        self._settings = settings
        self._token = token
        self._held: dict[str, float] = {}
        self._cut: CutPoint | None = None
        self._available_now = False
        self._ended = False
        self._initial: dict[str, Any] | None = None
        self._anchored = True
        self._asked = -settings.poll_seconds
        self._fruitless: dict[int, tuple[int, int]] = {}
        self._highs: dict[int, int] = {}
        self._planned: Offset | None = None

    def prepare_available_now(self) -> None:
        """Have everything end at what is there now."""
        self._available_now = True
        self._cut = self._make_cut()

    def initial(self) -> dict[str, Any]:
        """Return where the query begins; the same each time it is asked."""
        if self._initial is None:
            cut = None
            if self._settings.begins_late:
                cut = self._cut = self._cut or self._make_cut()
            try:
                offset = starting_offset(self._server, self._settings, cut)
            except UprSparkError as error:
                self._give_up(error, None)
                raise
            self._initial = offset.to_json()
            self._anchored = not offset.anchor
        return self._initial

    def planned(self, end: Offset) -> None:
        """Take note that a batch up to ``end`` is in Spark's log."""
        self._anchored = self._anchored or end.anchor

    def latest(self, start: dict[str, Any], limit: int | None) -> dict[str, Any]:
        """Return the end of the batch that begins at ``start``; ``start`` itself when there is nothing to do.

        Raises:
            UprSparkError: as ``next_offset``; UPR_BUCKET_MISMATCH; or what the server refused.
        """
        if self._ended:
            return start
        if not self._anchored and start == self._initial:
            # Spark stores the ends of batches only. Without an empty batch that ends here, a first batch that is
            # interrupted would begin at a later seqno when it is repeated.
            self._anchored = True
            return start
        offset = parse_offset(start)
        check_followed(offset, self._settings)
        self._wait()
        try:
            end = self._next(offset, limit)
        except UprSparkError as error:
            self._give_up(error, offset)
            raise
        self._planned = offset if end is None else end
        return start if end is None else end.to_json()

    def lag(self) -> dict[str, int] | None:
        """Return how far the server was when it was asked last, and how much of that is left behind the newest batch.

        All are numbers over all partitions; None before the server was asked.
        """
        if self._planned is None:
            return None
        left = [
            max(self._highs[partition] - entry.seqno, 0)
            for partition, entry in self._planned.entries.items()
        ]
        return {
            "seqnos": sum(self._highs.values()),
            "behind": sum(left),
            "partitionsBehind": sum(seqnos > 0 for seqnos in left),
        }

    def _next(self, start: Offset, limit: int | None) -> Offset | None:
        """Return the next offset, None when there is nothing to do."""
        for _ in range(_ATTEMPTS):
            answers = self._server.ask(start.ids, whole=False)
            self._highs = {partition: answer.high for partition, answer in answers.items()}
            _check_bucket(self._server, start)
            self._keep(start)
            known = set(self._held)
            cut = None
            if self._has_news(start, answers):
                cut = self._usable_cut(start, answers)
            if cut is None:
                self._end_run(start)
                return None
            told = self._server.ask(start.ids, whole=True)
            if not self._is_outdated(start, cut, told):
                end = next_offset(start, told, cut, self._settings.rules, limit)
                if end is not None:
                    return end
                if self._available_now:
                    self._end_run(start)
                    return None
                if cut.name not in known:
                    # What came after the cut may still be something to read, so it is left out.
                    self._fruitless = {p: (a.newest_id, a.high) for p, a in answers.items()}
                    self._drop(cut, start)
                    return None
            self._drop(cut, start)
            self._server.pause(_HISTORY_PAUSE)
        raise UprSparkError(
            "HISTORY_CHANGING",
            f"the server's history changed {_ATTEMPTS} times while a batch was planned",
            hint="start the query again when the server is up",
            retriable=True,
        )

    def _end_run(self, start: Offset) -> None:
        """Nothing is left to do, which a run with a fixed end does not look at again."""
        # Runs that come every minute, and find nothing, would else leave a cut each.
        if self._available_now:
            self._ended = True
            if self._cut is not None:
                self._drop(self._cut, start)

    def _give_up(self, error: UprSparkError, start: Offset | None) -> None:
        """Leave no cut behind: a query that cannot go on, started again and again, would use all that there may be."""
        if self._cut is not None and not error.retriable:
            self._drop(self._cut, start)

    @staticmethod
    def _is_outdated(start: Offset, cut: CutPoint, answers: Mapping[int, Answer]) -> bool:
        """Whether a pin is not part of what the server has now."""
        return any(
            cut.pins[p].failover_id != answers[p].newest_id or cut.pins[p].seqno > answers[p].high
            for p in start.entries
        )

    def _has_news(self, start: Offset, answers: Mapping[int, Answer]) -> bool:
        """Whether a partition may have to move: there is more of it, or its history is another one."""
        for p, entry in start.entries.items():
            found = answers[p].newest_id, answers[p].high
            is_new = (
                found[1] > 0
                if entry.failover_id is None
                else found != (entry.failover_id, entry.seqno)
            )
            if is_new and self._fruitless.get(p) != found:
                return True
        return False

    def _usable_cut(self, start: Offset, answers: Mapping[int, Answer]) -> CutPoint | None:
        """Return the cut that the next batch ends at; None when everything up to a fixed end was read."""
        cut = self._cut
        if cut is None and start.cut is not None and not self._available_now:
            cut = self._cut = self._server.find_cut(start.cut, self._settings.lease)
        if cut is not None and self._is_outdated(start, cut, answers):
            self._drop(cut, start)
            cut = None
        if cut is not None:
            if not all(has_reached(entry, cut.pins[p]) for p, entry in start.entries.items()):
                return cut
            if self._available_now:
                return None
        self._cut = self._make_cut()
        return self._cut

    def _make_cut(self) -> CutPoint:
        name = _cut_name(self._settings, self._token())
        cut = self._server.make_cut(name, self._settings.partitions, self._settings.lease)
        self._held[name] = self._server.now()
        return cut

    def _drop(self, cut: CutPoint, start: Offset | None) -> None:
        """Plan with a cut no more; it is kept while something that was read lies at it."""
        self._cut = None
        if start is None or cut.name not in (start.cut, start.earlier_cut):
            self._release(cut.name)

    def _keep(self, start: Offset) -> None:
        """Renew the cuts that are needed, and give up the others. ``start`` is committed."""
        needed = {start.cut, start.earlier_cut, self._cut.name if self._cut else None} - {None}
        for name in [name for name in self._held if name not in needed]:
            self._release(name)
        now, lease = self._server.now(), self._settings.lease
        for name in sorted(name for name in needed if name is not None):
            renewed = self._held.get(name)
            if renewed is not None and now - renewed < lease / 3:
                continue
            # One that is gone is not looked for at every call.
            self._held[name] = now
            if not self._server.renew(name, lease) and self._cut and self._cut.name == name:
                self._cut = None

    def _release(self, name: str) -> None:
        self._held.pop(name, None)
        self._server.release(name)

    def _wait(self) -> None:
        # An answer of before would call a stream idle to which something was written since.
        left = self._asked + self._settings.poll_seconds - self._server.now()
        if left > 0:
            self._server.pause(left)
        self._asked = self._server.now()


_BATCH_ATTEMPTS: Final = 5


def pin_now(server: ServerPort, settings: Settings) -> CutPoint:
    """Pin the partitions as they are now, under a new name."""
    name = f"{_cut_name(settings, random_token())}{LOAD}"
    return server.make_cut(name, settings.partitions, settings.load_lease)


def plan_batch(
    server: ServerPort, settings: Settings, pinned: CutPoint | None
) -> tuple[list[Range], str | None]:
    """Return what a batch read reads, and the name of the cut at which it ends.

    Args:
        pinned: the cut that was made when the DataFrame was; None makes one now, where one is needed. One whose lease
            has ended is read as long as the server can show what there was.

    Raises:
        UprSparkError: UPR_SNAPSHOT_GONE, what was pinned is not any more; UPR_BAD_OPTION, startingOffsets or
            endingOffsets do not fit the bucket; UPR_ROLLBACK_REQUIRED or UPR_DATA_LOSS, as the rules say.
    """
    start = starting_offset(server, settings, None)
    _check_bucket(server, start)
    for _ in range(_BATCH_ATTEMPTS):
        cut = _end(server, settings, pinned)
        answers = server.ask(start.ids, whole=True)
        if all(cut.pins[p].failover_id == answers[p].newest_id for p in settings.partitions):
            break
        if pinned is not None:
            raise _gone(f"the server's history changed since the cut {pinned.name!r} was made")
        if cut.name:
            server.release(cut.name)
    else:
        raise _gone("the server's history changes while the read is planned")
    try:
        if settings.ending != "latest":
            _check_order(start, cut)
        end = next_offset(start, answers, cut, settings.rules)
    except UprSparkError:
        if pinned is None and cut.name:
            server.release(cut.name)
        raise
    return ([] if end is None else plan_ranges(start, end)), cut.name or None


def _end(server: ServerPort, settings: Settings, pinned: CutPoint | None) -> CutPoint:
    named: Mapping[int, Pin] = {}
    if isinstance(settings.ending, dict):
        named = _named_ends(server, settings, settings.ending)
    if not settings.ends_late:
        return CutPoint("", named)
    if pinned is None:
        pinned = pin_now(server, settings)
    else:
        server.renew(pinned.name, settings.load_lease)
    return CutPoint(pinned.name, {**pinned.pins, **named})


def _named_ends(
    server: ServerPort, settings: Settings, ending: Mapping[str, object]
) -> dict[int, Pin]:
    """Return the ends that the option names, under the newest ids."""
    if "v" in ending:
        offset = parse_offset(ending)
        check_followed(offset, settings, "endingOffsets")
        _check_bucket(server, offset)
        ids = offset.ids
        seqnos = {p: entry.seqno for p, entry in offset.entries.items()}
    else:
        seqnos = {int(p): int(str(seqno)) for p, seqno in ending.items() if seqno != LATEST}
        ids = dict.fromkeys(seqnos)
    answers = server.ask(ids, whole=False)
    for partition, answer in answers.items():
        seqno = seqnos[partition]
        if answer.rollback is not None and answer.rollback < seqno:
            raise _gone(f"partition {partition}: seqno {seqno} was undone: {answer.words}")
        if answer.high < seqno:
            raise bad_option(
                "endingOffsets",
                None,
                f"partition {partition} ends at {seqno}; must be at most its high seqno {answer.high}",
                f"the newest failover id is {format_failover_id(answer.newest_id)}",
            )
    return {p: Pin(answers[p].newest_id, seqno) for p, seqno in seqnos.items()}


def _check_order(start: Offset, cut: CutPoint) -> None:
    for partition, entry in start.entries.items():
        if entry.seqno > cut.pins[partition].seqno:
            raise bad_option(
                "endingOffsets",
                None,
                f"partition {partition} ends at {cut.pins[partition].seqno}, and begins at {entry.seqno}",
            )


def _check_bucket(server: ServerPort, offset: Offset) -> None:
    if not server.bucket_version:
        server.ask({next(iter(offset.entries)): None}, whole=False)
    if server.bucket_version != offset.bucket_version:
        raise bucket_mismatch(
            f"the offset is of a bucket of version {offset.bucket_version:016x}, the server's has "
            f"{server.bucket_version:016x}"
        )


def _gone(words: str) -> UprSparkError:
    return UprSparkError(
        "SNAPSHOT_GONE",
        words,
        hint="load() again, which pins what is there then; leaseTtl says how long that holds without being read",
        details={"reason": CutNotFoundError.default_reason},
    )
