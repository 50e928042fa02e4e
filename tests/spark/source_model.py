"""A server in memory for the data source's planning and reading.

It writes, deduplicates, purges, rolls back and forgets leases at random, also between two rows of a read.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from upr_client import Rollback
from upr_protocol.errors import SnapshotGoneError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import Pin, answer_hello, answer_start
from upr_spark.source.offsets import Offset
from upr_spark.source.plan import Range
from upr_spark.source.server import Answer, CutPoint

PARTITIONS = 3
KEYS = 4
LEASE = 100.0
VERSION = 7


class Crash(Exception):
    """The driver is gone."""


@dataclass(frozen=True, slots=True)
class Row:
    """One mutation; None for the value of a delete."""

    seqno: int
    key: str
    value: str | None


@dataclass
class Partition:
    """One partition: what was ever written on its branch, and what is left of that."""

    log: FailoverLog
    all_rows: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    high: int = 0
    purge: int = 0
    frozen: bool = False


def newest(rows: Sequence[Row], above: int = 0) -> dict[str, str]:
    """Return the values of the keys whose newest row is above a seqno."""
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.seqno):
        found[row.key] = row
    return {
        row.key: row.value for row in found.values() if row.value is not None and row.seqno > above
    }


@dataclass(frozen=True, slots=True)
class Weather:
    """What may happen in a run.

    Args:
        rollbacks: whether histories change.
        lapses: whether leases end while somebody needs them.
        purges: whether deletes are purged.
        old_copies: whether an older state is served without a failover record.
    """

    rollbacks: bool = True
    lapses: bool = False
    purges: bool = False
    old_copies: bool = False


class ModelServer:
    """The server, as planners ask it."""

    def __init__(self, random: Random, weather: Weather) -> None:
        self.random = random
        self.weather = weather
        self.ids = 0
        self.calm = False
        self.clock = 0.0
        self.partitions = [Partition(FailoverLog.born(self._new_id())) for _ in range(PARTITIONS)]
        self.cuts: dict[str, tuple[CutPoint, float]] = {}
        self.rollbacks = 0
        self.lapses = 0

    # What happens

    def _new_id(self) -> int:
        self.ids += 1
        return self.ids

    def happen(self, chance: float = 0.4) -> None:
        if self.calm or self.random.random() > chance:
            return
        dice = self.random.random()
        at = self.partitions[self.random.randrange(PARTITIONS)]
        if dice < 0.5:
            self.write(at)
        elif dice < 0.8:
            self.deduplicate(at)
        elif dice < 0.87:
            if self.weather.rollbacks:
                self.roll_back(at)
        elif dice < 0.92:
            if self.weather.purges:
                self.purge(at)
        elif dice < 0.96:
            if self.weather.lapses:
                self.lapses += 1
                self.clock += self.random.choice([LEASE / 2, LEASE * 2])
        elif self.weather.old_copies:
            self.serve_old_copy(at)

    def write(self, at: Partition) -> None:
        if at.frozen:
            return
        for _ in range(self.random.randint(1, 3)):
            at.high += 1
            value = None if self.random.random() < 0.3 else f"{at.high}/{self.ids}"
            row = Row(at.high, f"k{self.random.randrange(KEYS)}", value)
            at.all_rows.append(row)
            at.rows.append(row)

    def _pins(self, at: Partition) -> list[int]:
        index = self.partitions.index(at)
        return [cut.pins[index].seqno for cut, _ in self._live().values()]

    def deduplicate(self, at: Partition) -> None:
        """Drop rows that are superseded, where no pin lies between the two."""
        pins = self._pins(at)
        kept = []
        for row in at.rows:
            newer = [r.seqno for r in at.rows if r.key == row.key and r.seqno > row.seqno]
            if not newer or any(row.seqno <= pin < max(newer) for pin in pins):
                kept.append(row)
        at.rows = kept

    def purge(self, at: Partition) -> None:
        """Drop deletes up to a seqno that no pin is below."""
        limit = min([at.high, *self._pins(at)])
        if limit <= at.purge:
            return
        at.purge = self.random.randint(at.purge, limit)
        self.deduplicate(at)
        gone = {row.seqno for row in at.rows if row.value is None and row.seqno <= at.purge}
        older = {
            row.seqno
            for row in at.rows
            if any(r.seqno in gone and r.key == row.key and r.seqno > row.seqno for r in at.rows)
        }
        at.rows = [row for row in at.rows if row.seqno not in gone | older]

    def roll_back(self, at: Partition) -> None:
        """Lose the newest mutations, with a failover record."""
        self.rollbacks += 1
        seqno = self.random.randint(at.purge, at.high)
        self._cut_off(at, seqno)
        at.log = at.log.with_record(self._new_id(), seqno, self.random.choice([2, 25]))
        at.frozen = False

    def serve_old_copy(self, at: Partition) -> None:
        """Lose the newest mutations without one; written is again when somebody has looked."""
        self.rollbacks += 1
        seqno = self.random.randint(max(at.log.newest.seqno, at.purge), at.high)
        if seqno < at.high:
            self._cut_off(at, seqno)
            at.frozen = True

    def _cut_off(self, at: Partition, seqno: int) -> None:
        at.all_rows = [row for row in at.all_rows if row.seqno <= seqno]
        # Another node has deduplicated otherwise; but what was purged is purged everywhere.
        last = {row.key: row.seqno for row in at.all_rows if row.seqno <= at.purge}
        at.rows = [
            row
            for row in at.all_rows
            if row.seqno > at.purge or (row.value is not None and last[row.key] == row.seqno)
        ]
        at.high = seqno

    # What is asked

    @property
    def bucket_version(self) -> int:
        return VERSION

    def now(self) -> float:
        return self.clock

    def pause(self, seconds: float) -> None:
        self.clock += seconds
        self.happen()

    def ask(self, ids: Mapping[int, int | None], *, whole: bool) -> dict[int, Answer]:
        self.happen()
        answers = {}
        for index, failover_id in ids.items():
            at = self.partitions[index]
            told = answer_hello(at.log, failover_id)
            record = at.log.newest.seqno if whole else 0
            answers[index] = Answer(
                told.newest_id,
                at.high,
                told.rollback_seqno,
                told.rule,
                told.words,
                record,
                at.purge if whole else 0,
            )
        return answers

    def thaw(self, end: Offset) -> None:
        """Let old copies be written to again that the query has seen; nobody could, once they have grown."""
        for partition, entry in end.entries.items():
            at = self.partitions[partition]
            at.frozen = at.frozen and entry.seqno > at.high

    def begin_at(self, times: Mapping[int, int]) -> dict[int, Pin]:
        """Every seqno was committed at the time of that number."""
        self.happen()
        begun = {}
        for index, time in times.items():
            at = self.partitions[index]
            seqno = min(max(time - 1, 0), at.high)
            begun[index] = Pin(at.log.newest.failover_id, 0 if seqno < at.purge else seqno)
        return begun

    def make_cut(self, name: str, partitions: Sequence[int], lease: float) -> CutPoint:
        self.happen()
        pins = {
            p: Pin(self.partitions[p].log.newest.failover_id, self.partitions[p].high)
            for p in partitions
        }
        cut = CutPoint(name, pins)
        self.cuts[name] = (cut, self.clock + lease)
        return cut

    def _live(self) -> dict[str, tuple[CutPoint, float]]:
        self.cuts = {name: held for name, held in self.cuts.items() if held[1] > self.clock}
        return self.cuts

    def find_cut(self, name: str, lease: float) -> CutPoint | None:
        return self.cuts[name][0] if self.renew(name, lease) else None

    def renew(self, name: str, lease: float) -> bool:
        self.happen()
        live = self._live()
        if name not in live:
            return False
        live[name] = (live[name][0], self.clock + lease)
        return True

    def release(self, name: str) -> None:
        self.cuts.pop(name, None)


@dataclass
class _Place:
    """A reader's position in one partition, as the SDK keeps it."""

    failover_id: int | None
    data_id: int | None
    seqno: int
    horizon: int


class ModelFollower:
    """Follows ranges as the SDK and the server do it together."""

    def __init__(self, server: ModelServer, ranges: Sequence[Range]) -> None:
        self._server = server
        self._ranges = {one.partition: one for one in ranges}
        self._places = {
            one.partition: _Place(
                one.end_id if one.from_seqno else None, one.end_id, one.from_seqno, one.from_seqno
            )
            for one in ranges
        }

    def reached(self, partition: int) -> int:
        return self._places[partition].seqno

    def ask(self, ids: Mapping[int, int | None]) -> dict[int, Answer]:
        return self._server.ask(ids, whole=True)

    def follow(self, partitions: Sequence[int], *, exact: bool) -> Generator[Any]:
        for partition in partitions:
            yield from self._one(partition, exact)

    def _one(self, index: int, exact: bool) -> Iterator[Any]:
        at, place, end = (
            self._server.partitions[index],
            self._places[index],
            self._ranges[index].end_seqno,
        )
        log, purge = None, at.purge
        target = end if exact else max(at.high, place.seqno)
        while True:
            self._server.happen(0.2)
            if (
                log is not at.log
                or at.high < place.seqno
                or (purge < at.purge and 0 < place.seqno < at.purge)
            ):
                # The stream was ended with the history that it was opened in, or by purging.
                told = self._start(index, exact, end)
                if told is not None:
                    yield told
                    place = self._places[index] = _Place(None, None, 0, 0)
                    continue
                log, purge = at.log, at.purge
            if not exact:
                target = min(target, at.high)
            if place.seqno >= target:
                if exact and place.horizon > place.seqno:
                    raise SnapshotGoneError("incomplete at its end")
                return
            if exact:
                self._check_whole(at, place.seqno, end)
            above = [row for row in at.rows if place.seqno < row.seqno <= target]
            taken = above[: self._server.random.randint(1, 3)]
            reached = taken[-1].seqno if len(taken) < len(above) else target
            hidden = [
                self._superseded_at(at, row)
                for row in at.all_rows
                if place.seqno < row.seqno <= reached and row not in at.rows
            ]
            place.horizon = max([reached, place.horizon if place.horizon > reached else 0, *hidden])
            place.seqno, place.data_id = reached, at.log.newest.failover_id
            if taken:
                yield [(index, row) for row in taken], self._ranges[index]

    def _superseded_at(self, at: Partition, row: Row) -> int:
        newer = [r.seqno for r in at.all_rows if r.key == row.key and r.seqno > row.seqno]
        # A purged delete has nothing above it; it counts as complete.
        return min([r for r in newer if any(k.seqno == r for k in at.rows)], default=row.seqno)

    def _check_whole(self, at: Partition, seqno: int, end: int) -> None:
        if end > at.high:
            raise SnapshotGoneError(f"high seqno is {at.high}")
        kept = {row.seqno for row in at.rows}
        for row in at.all_rows:
            if seqno < row.seqno <= end and row.seqno not in kept:
                newer = [r for r in at.all_rows if r.key == row.key and row.seqno < r.seqno <= end]
                purged = row.value is None and row.seqno <= at.purge
                if not newer and not purged:
                    raise SnapshotGoneError(f"{row.seqno} was superseded above {end}")

    def _start(self, index: int, exact: bool, end: int) -> Rollback | None:
        """Start a stream; return what has to be undone, None when it is open."""
        at, place = self._server.partitions[index], self._places[index]
        answer = answer_start(
            at.log,
            failover_id=place.failover_id,
            seqno=place.seqno,
            data_id=place.data_id,
            high_seqno=at.high,
            purge_seqno=at.purge,
        )
        if answer.kind == "rollback":
            back_to = answer.rollback_seqno or 0
            if max(place.seqno, place.horizon) > back_to:
                return Rollback(
                    index,
                    place.seqno,
                    back_to,
                    place.data_id,
                    answer.newest_id,
                    answer.rule,
                    answer.words,
                )
        place.failover_id = answer.newest_id
        if place.seqno == 0:
            place.data_id = None
        if not exact:
            return None
        left_at = answer_hello(at.log, self._ranges[index].end_id).rollback_seqno
        if left_at is not None and left_at < end:
            raise SnapshotGoneError(f"history was left at {left_at}")
        return None
