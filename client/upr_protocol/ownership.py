"""Ownership: how the active server of a replica set changes. Values and decisions; no I/O, no clock, no chance.

A set has one owner at a time, the server where its partitions are active. It changes in one way only:

    claim     the row of the set gets the next epoch and a new owner that does not serve yet
    promise   every counted server, and the one that served last, takes nothing from an older epoch any more
    gather    the new owner gets the best of what they hold
    record    a failover record at its last complete marker, unless the one that served last confirms that nothing is
              missing
    serve     the row says so, then the partitions are active

A server is named by the id of its data directory: one whose disk was replaced is another one, with nothing.

The row lives where it can be changed by one at a time. That is a map in a store with compare-and-set, or, without one,
each server of the set: a promise given once an epoch, by all that are counted, is what makes a claim the only one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64, Mask
from upr_protocol.errors import UprError


@dataclass(frozen=True, slots=True)
class Served:
    """The owner that served last, and the epoch in which it did."""

    directory: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Row:
    """Who owns the partitions of a set.

    Attributes:
        epoch: rises with each claim, from 1.
        revision: rises with each change of the row within its epoch; only its owner changes it there.
        owner: directory of the server that claimed the epoch.
        serving: whether the owner began to serve. A claim that failed never does.
        counted: directories whose acknowledgements count. All of them together have everything that was acknowledged.
        previous: while the owner does not serve: the server that served last. It is kept through claims that never served,
            because only a server that really served knows that nothing is missing.
    """

    epoch: int
    revision: int
    owner: str
    serving: bool
    counted: frozenset[str]
    previous: Served | None = None

    @property
    def age(self) -> tuple[int, int]:
        """The order of rows: of two, the one with the larger age holds."""
        return self.epoch, self.revision

    @property
    def served(self) -> Served | None:
        """The owner that served last."""
        return Served(self.owner, self.epoch) if self.serving else self.previous

    def claimed(self, by: str, epoch: int) -> "Row":
        """Return the row with a new owner, that does not serve yet, in a higher epoch."""
        assert epoch > self.epoch, "a claim needs an epoch of its own"
        return Row(epoch, 0, by, False, self.counted, self.served)

    def serves(self, without: Iterable[str] = ()) -> "Row":
        """Return the row whose owner serves.

        The owner counts itself until another has all that it has: two failures one after the other, each healed,
        could lose what was acknowledged between them.

        Args:
            without: directories that an operator gave up; they are not counted any more.
        """
        counted = (self.counted | {self.owner}) - frozenset(without)
        return replace(
            self, revision=self.revision + 1, serving=True, counted=counted, previous=None
        )

    def counting(self, directory: str) -> "Row":
        """Return the row with one more counted."""
        return replace(self, revision=self.revision + 1, counted=self.counted | {directory})

    def forgetting(self, directory: str) -> "Row":
        """Return the row without one that is gone for good; the owner counts itself instead, because it has everything."""
        counted = (self.counted | {self.owner}) - {directory}
        return replace(self, revision=self.revision + 1, counted=counted)

    def without(
        self, directory: str, needed: U64, holding: Mapping[str, U64], stored: Iterable[str]
    ) -> "Row | None":
        """Return the row with one less counted; None while that could lose what was acknowledged.

        Args:
            needed: by partition, what was acknowledged by a counted replica, and what the owner had when it began to
                serve.
            holding: what each server acknowledged, by directory, of the same shape. The owner has everything.
            stored: the directories that have stored this row, so that they know of each other.
        """
        left = self.counted - {directory}
        whole = self.owner in left or any(
            bool((holding[one] >= needed).all()) for one in left if one in holding
        )
        if directory not in self.counted or not left or not whole:
            return None
        if not left - {self.owner} <= set(stored):
            return None
        return replace(self, revision=self.revision + 1, counted=left)

    def shrunk(self, silent: Iterable[str], needed: U64, holding: Mapping[str, U64]) -> "Row":
        """Return the row without one of the counted that say nothing; the owner counts itself where that could lose something.

        One at a time: an owner that does not know whether its last change was made knows then what it may be.

        Args:
            needed, holding: as in ``without``.
        """
        for directory in sorted((self.counted - {self.owner}).intersection(silent)):
            without = self.without(directory, needed, holding, self.counted)
            return without or self.forgetting(directory)
        return self


def first_row(directory: str) -> Row:
    """Return the row of a server that was alone until now: its own owner, and all that is counted."""
    return Row(1, 0, directory, True, frozenset({directory}))


@dataclass(frozen=True, slots=True)
class Standing:
    """What a server has stored of its part in a set. It is durable before anything follows from it.

    Attributes:
        directory: its own.
        row: the newest that it knows.
        promised: the highest epoch that it promised; nothing of an older one is taken or given any more.
        candidate: to whom.
    """

    directory: str
    row: Row
    promised: int = 0
    candidate: str = ""

    @property
    def epoch(self) -> int:
        """The highest epoch that it knows."""
        return max(self.row.epoch, self.promised)

    @property
    def owns(self) -> bool:
        """Whether it may serve as the owner: nobody was promised a higher epoch since."""
        row = self.row
        return row.serving and row.owner == self.directory and row.epoch >= self.promised

    def promise(self, epoch: int, candidate: str) -> "Standing | None":
        """Return what it is after a promise; None when it cannot be given.

        An epoch is promised to one candidate only, and never below another promise or row.
        """
        if epoch < self.promised or epoch < self.row.epoch:
            return None
        taken = self.candidate if epoch == self.promised else ""
        owner = self.row.owner if epoch == self.row.epoch else ""
        if taken not in ("", candidate) or owner not in ("", candidate):
            return None
        return replace(self, promised=epoch, candidate=candidate)

    def learned(self, row: Row) -> "Standing":
        """Return what it is when it hears of a row; older ones change nothing. A promise stays.

        Two owners of one epoch were both forced: neither owns then, until one is promoted.
        """
        if row.epoch == self.row.epoch and row.owner != self.row.owner:
            return self.met(row.epoch + 1)
        if row.age <= self.row.age:
            return self
        if row.epoch < self.promised:
            return replace(self, row=row)
        return replace(self, row=row, promised=row.epoch, candidate=row.owner)

    def met(self, epoch: int) -> "Standing":
        """Return what it is when it meets a higher epoch: no owner any more, even if the epoch was promised to it."""
        if epoch <= self.epoch:
            return self
        return replace(self, promised=epoch, candidate="")

    def claim(self, *, above: int = 0, force: bool = False, basis: Row | None = None) -> Row:
        """Return the row that claims the ownership for this server.

        Args:
            above: an epoch that another promised; the claim goes above it.
            force: whether an operator answers for a server that is not counted.
            basis: the row that is claimed; None for the newest that this server knows.

        Raises:
            UprError: NOT_COUNTED, it may lack what was acknowledged.
        """
        row = self.row if basis is None else basis
        # Who served last had everything, and claims that never served changed nothing since.
        last = row.owner if row.served is None else row.served.directory
        if not force and self.directory not in row.counted | {row.owner, last}:
            raise UprError(
                f"this server ({self.directory}) is not counted, so it may lack what was acknowledged",
                reason="NOT_COUNTED",
                hint="promote one of those that 'upr-admin topology' shows as counted, or use --force",
            )
        return row.claimed(self.directory, max(self.epoch, row.epoch, above) + 1)

    def confirms(self, claim: Row, served: int) -> bool:
        """Return whether this server proves to a candidate that nothing is missing but what it has.

        Args:
            served: the epoch in which this server served last; 0 once it has taken data from another since, or was
                started without the proof of a clean shutdown.
        """
        return bool(served) and claim.previous == Served(self.directory, served)


GRANT_SECONDS = 3.0
"""Time for which a server that gave a grant promises nothing to others."""
GRANTED_SECONDS = 2.5
"""Time for which an owner relies on a grant, from when it asked for it: clocks may differ by a tenth in their rate."""


class Grants:
    """Grants that one server has given, and those that it was given as the owner of its set.

    A grant is a counted server's word that it promises no higher epoch for a while. A change of owner needs the promises
    of all that are counted, so the grant of any of them keeps the owner the only one, without anybody else being asked.
    An owner that counts itself needs none. All times are seconds of the server's own clock, which goes on while a machine
    sleeps.

    Args:
        directory: the server's own.
        free: until when a grant may hold that it gave before it was started.

    Attributes:
        wanted: an epoch that a candidate asks for; 0 for none. Lower ones are granted no more.
        counted: the sets that may be the counted ones: several while it is not known whether a change was made.
    """

    def __init__(self, directory: str, free: float) -> None:
        self.directory = directory
        self.wanted = 0
        self.counted: tuple[frozenset[str], ...] = ()
        self._free = free
        self._asked: dict[str, float] = {}
        self._epoch = 0

    def give(self, epoch: int, owner: str, standing: Standing, now: float) -> bool:
        """Give a grant to an owner, unless another epoch is promised, known or wanted; return whether it is given."""
        if epoch < max(standing.epoch, self.wanted):
            return False
        if epoch == standing.promised and owner != standing.candidate:
            return False
        self._free = now + GRANT_SECONDS
        return True

    def left(self, now: float) -> float:
        """Return for how many seconds a grant that was given still holds; not above 0 when none does."""
        return self._free - now

    def begin(self, row: Row) -> None:
        """Own in the row's epoch from now on: what was given in another one counts no more."""
        self._asked.clear()
        self._epoch, self.counted = row.epoch, (row.counted,)

    def resume(self, row: Row) -> None:
        """Own a row that was stored before a start: the last change of it may have been made and not stored."""
        self.begin(row)
        less = [row.counted - {one} for one in sorted(row.counted)]
        self.counted = (row.counted, *filter(None, less))

    def given(self, directory: str, epoch: int, asked: float) -> None:
        """Take a grant that was asked for at a time."""
        if epoch == self._epoch:
            self._asked[directory] = max(asked, self._asked.get(directory, asked))

    def end(self) -> None:
        """Own no more: nothing that was given counts."""
        self._asked.clear()
        self._epoch = 0

    def holds(self, directory: str, now: float) -> float:
        """Return for how many seconds the owner may rely on a server's grant; not above 0 when it may not."""
        if directory == self.directory:
            return GRANTED_SECONDS
        return self._asked.get(directory, -math.inf) + GRANTED_SECONDS - now

    def serving(self, now: float) -> float:
        """Return for how many seconds nobody else can be the owner; not above 0 when somebody can be."""
        if not self._epoch:
            return 0.0
        longest = (max((self.holds(d, now) for d in one), default=0.0) for one in self.counted)
        return min(longest, default=GRANTED_SECONDS)

    def may_serve(self, now: float) -> bool:
        """Return whether nobody else can be the owner at a time."""
        return self.serving(now) > 0


HELD = np.dtype([("epoch", "<u8"), ("id", "<u8"), ("marker", "<u8"), ("high", "<u8")])
"""Record of a partition at a server, 32 bytes: the last complete durable marker, the epoch of the record under which
the row there was given, the newest failover id, and the high seqno."""
Held = npt.NDArray[Any]
"""One of dtype HELD for each partition of all buckets, in one order at all servers."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer of a server that promised.

    Attributes:
        directory: its own.
        row: the newest that it knew before the claim.
        held: what it holds, all of it durable; all 0 in a partition that it does not have, or cannot give.
        confirmed: see ``Standing.confirms``.
    """

    directory: str
    row: Row
    held: Held
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask these servers for their promise; until they gave it nothing else can be done."""

    directories: frozenset[str]


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow a server that promised, in these partitions, until at least this is held durably.

    Attributes:
        directory: whom.
        partitions: indexes into Held.
        seqnos: by partition.
    """

    directory: str
    partitions: npt.NDArray[np.intp]
    seqnos: U64


@dataclass(frozen=True, slots=True)
class Serve:
    """Store the row, then what is said of the partitions in one transaction, then serve.

    Attributes:
        row: says that this server serves.
        record: partitions that get a record.
        marker: where, for each partition; what lies above is cut off.
    """

    row: Row
    record: Mask
    marker: U64

    def cut_off(self, held: Held) -> Mask:
        """Return the partitions that hold something above their marker, so that it must be cut off."""
        return np.asarray(self.record & (held["high"] > self.marker))


@dataclass(frozen=True, slots=True)
class Outdated:
    """The claim failed: there is a newer row, or a higher epoch was promised. Claim again, above it."""

    row: Row
    epoch: int


Step = Ask | Follow | Serve | Outdated


class Claim:
    """One claim, as the server drives it that wants to own.

    Args:
        basis: the newest row that was known before.
        row: claimed above it; see ``Standing.claim``.
    """

    def __init__(self, basis: Row, row: Row) -> None:
        self.row = row
        self.basis = basis
        self._gone: frozenset[str] = frozenset()
        self._asked: frozenset[str] = frozenset()
        self._heard: dict[str, Promise] = {}
        self._outdated: Outdated | None = None

    @property
    def confirmer(self) -> str:
        """The server whose word counts that nothing is missing: the one that served last; "" for none."""
        # A counted server that was given up may have served since, without being known to the others.
        previous = None if self._gone else self.row.previous
        return "" if previous is None else previous.directory

    @property
    def confirmed(self) -> bool:
        """Whether the owner that served last confirms that nothing is missing but what it has."""
        return self._confirmed is not None

    @property
    def missing(self) -> frozenset[str]:
        """The counted servers that have not promised, and were not given up."""
        return self.row.counted - self._gone - set(self._heard)

    def promised(self, promise: Promise) -> None:
        """Take an answer; one that comes again replaces the first."""
        if promise.row.age > self.basis.age:
            # Another one may have served or be counted since, and what it has would be missed.
            self._outdated = Outdated(promise.row, self.row.epoch)
        self._heard[promise.directory] = promise

    def refused(self, row: Row, epoch: int) -> None:
        """Take a refusal: somebody knows a newer row, or promised a higher epoch."""
        self._outdated = Outdated(row, max(epoch, self.row.epoch))

    def asked(self, directories: Iterable[str]) -> None:
        """Take note that servers were asked, whether they answered or not."""
        self._asked |= frozenset(directories)

    def give_up(self, directories: Iterable[str]) -> None:
        """Go on without servers, as an operator ordered; never without the one that claims."""
        self._gone |= frozenset(directories) - {self.row.owner}

    @property
    def _confirmed(self) -> Promise | None:
        """The promise of the owner that served last, when it confirms that nothing is missing."""
        promise = self._heard.get(self.confirmer)
        return promise if promise is not None and promise.confirmed else None

    def next(self, mine: Held) -> Step:
        """Return what is to be done now.

        Args:
            mine: what the claiming server itself holds, all of it durable.
        """
        if self._outdated is not None:
            return self._outdated
        # All of them, also when the server that served last confirms: another one may have served without it meanwhile. That one is
        # asked as well, but not waited for.
        previous = self.row.previous
        last = frozenset() if previous is None else frozenset({previous.directory})
        ask = self.missing | (last - self._asked - set(self._heard))
        if ask:
            return Ask(ask)
        confirmed = self._confirmed
        sure = np.zeros(len(mine), bool) if confirmed is None else confirmed.held["id"] != 0
        best, whose = self._best(mine, confirmed, sure)
        source = self._lacking(mine, best, whose, sure)
        if source is not None:
            return source
        marker = mine["marker"]
        clean = sure.copy()
        for name in ("marker", "high"):
            clean &= (mine[name] == marker) & (best[name] == marker)
        clean &= mine["id"] == best["id"]
        return Serve(self.row.serves(self._gone), ~clean, marker.copy())

    def _best(
        self, mine: Held, confirmed: Promise | None, sure: Mask
    ) -> tuple[Held, npt.NDArray[np.object_]]:
        """Return by partition the best of what is held, and the server that holds it: where it is sure, the one that confirmed.

        The epoch of the row decides, then the marker. A longer branch of an older epoch never wins over a shorter one
        of a newer, nor does a log that was fetched without its data.
        """
        best, who = mine.copy(), np.full(len(mine), self.row.owner, object)
        for directory, promise in sorted(self._heard.items()):
            held = promise.held
            if directory == self.row.owner:
                continue
            better = (held["epoch"] > best["epoch"]) | (
                (held["epoch"] == best["epoch"]) & (held["marker"] > best["marker"])
            )
            best[better], who[better] = held[better], directory
        if confirmed is not None:
            best[sure], who[sure] = confirmed.held[sure], confirmed.directory
        return best, who

    def _lacking(
        self, mine: Held, best: Held, who: npt.NDArray[np.object_], sure: Mask
    ) -> Follow | None:
        """Return the server to follow next, None when nothing of the best is lacking."""
        wanted = np.where(sure, best["high"], best["marker"])
        lacking = (mine["id"] != best["id"]) | (mine["marker"] < best["marker"])
        lacking |= mine["high"] < wanted
        lacking &= who != self.row.owner
        if not lacking.any():
            return None
        directory = str(who[int(np.flatnonzero(lacking)[0])])
        chosen = np.flatnonzero(lacking & (who == directory))
        return Follow(directory, chosen, wanted[chosen])
