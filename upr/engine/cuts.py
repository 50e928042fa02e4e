"""Cuts: markers pinned in many partitions at one instant, under a name and for a lease.

While a cut is held neither flush nor merge crosses its pins, and purging does not pass them. In the tail, where
many partitions share an entry, the instant of a cut is a *fence*: an entry number that no flush goes across.

A pin takes effect before its cut is durable and is dropped only after the row is deleted, so no crash leaves a cut
without its pin.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upr.engine.partitions import Partitions
from upr.engine.tail import Tail
from upr.storage.keyspace import CutRow, Pin
from upr_protocol.block import U64, Runs
from upr_protocol.errors import (
    AlreadyExistsError,
    CutNotFoundError,
    PartitionNotActiveError,
    TooManyError,
    UprError,
    shown,
)
from upr_protocol.limits import BACKUP_CUTS, BACKUP_CUTS_NAME, CUTS_HALF, CUTS_MAX, PARTITIONS

NO_PIN = np.iinfo(np.uint64).max


@dataclass(eq=False, slots=True)
class Cut:
    """A cut. Times are microseconds since the epoch, the lease is microseconds.

    Attributes:
        pins: by partition, ascending.
        end_entry: the pinned rows are in tail entries below this number, or in the store.
        fences: entry numbers that no flush may cross.
        durable: whether it is in the store; until then it is not listed.
        left_out: requested partitions that could not be pinned, and why; not stored.
        holder: the peer that created it; empty for a cut loaded at the start.
    """

    name: str
    created: int
    expires: int
    lease: int
    pins: Mapping[int, Pin]
    end_entry: int = 0
    fences: Sequence[int] = ()
    durable: bool = False
    left_out: Mapping[int, UprError] = field(default_factory=dict)
    holder: str = ""
    seqnos: U64 = field(init=False, repr=False)
    """The pinned seqnos, shape (1024,); NO_PIN in partitions that are not pinned."""

    def __post_init__(self) -> None:
        self.seqnos = np.full(PARTITIONS, NO_PIN, np.uint64)
        self.seqnos[list(self.pins)] = [pin.seqno for pin in self.pins.values()]

    def row(self) -> CutRow:
        return CutRow(self.created, self.expires, self.lease, self.pins)


class Cuts:
    """Cuts of one bucket."""

    def __init__(self) -> None:
        self._named: dict[str, Cut] = {}
        self._held: list[Cut] = []
        self._lowest: U64 = np.full(PARTITIONS, NO_PIN, np.uint64)
        self.changes = 0
        """Number of changes of what ``named`` returns."""
        self.on_dropped: Callable[[list[int]], None] = lambda partitions: None
        """Called with the partitions in which a seqno is pinned no more: what it kept apart may be compacted."""

    @property
    def named(self) -> list[Cut]:
        """Return all cuts that have a name, also those that are not durable yet."""
        return list(self._named.values())

    def __len__(self) -> int:
        """Return how many cuts have a name and are durable, with those whose lease has just ended."""
        return sum(cut.durable for cut in self._named.values())

    # Pins and fences

    def pinned(self, partition: int) -> tuple[int, ...]:
        """Return the seqnos that are pinned in a partition, ascending, each once, without 0."""
        if not self._held:
            return ()
        seqnos = {int(cut.seqnos[partition]) for cut in self._held}
        return tuple(sorted(seqnos - {0, NO_PIN}))

    def lowest(self) -> U64:
        """Return the lowest pinned seqno of each partition, shape (1024,); NO_PIN where there is none."""
        return self._lowest.copy()

    def holders(self, partition: int) -> list[tuple[str, int]]:
        """Return (name, pinned seqno) of the cuts that pin a partition."""
        return [
            (cut.name, cut.pins[partition].seqno) for cut in self._held if partition in cut.pins
        ]

    def fence_above(self, entry: int) -> int | None:
        """Return the first fence above a tail entry's number, None when there is none."""
        fences = [fence for cut in self._held for fence in cut.fences if fence > entry]
        return min(fences, default=None)

    # Changing

    def create(
        self,
        name: str,
        partitions: Sequence[int],
        lease: int,
        now: int,
        table: Partitions,
        tail: Tail,
        holder: str = "",
    ) -> Cut:
        """Pin the last complete marker of partitions in this step; dead partitions are left out.

        Args:
            partitions: ascending, each once.
            lease: microseconds.
            now: microseconds since the epoch.
            holder: the requesting peer.

        Raises:
            AlreadyExistsError: a cut has that name.
            TooManyError: a limit is reached, of the bucket, of the kind of cut or of its holder.
            PartitionNotActiveError: none of the partitions is active or replica.
        """
        if (old := self._named.get(name)) is not None and not self._ended(old, now):
            raise AlreadyExistsError(
                f"there is a cut {shown(name)} already",
                hint="choose another name, or release that one",
            )
        self._check_room(name, holder, now)
        chosen = [p for p in partitions if table.serves(p)]
        left_out = {p: table.refusal(p) for p in partitions if not table.serves(p)}
        if not chosen:
            first = next(iter(left_out.values()))
            raise PartitionNotActiveError(f"cut {shown(name)}: {first.message}", hint=first.hint)
        pins = {p: Pin(int(table.newest_id[p]), int(table.complete[p])) for p in chosen}
        cut = Cut(name, now, now + lease, lease, pins, tail.end, left_out=left_out, holder=holder)
        whole = bool((table.complete[chosen] == table.high[chosen]).all())
        cut.fences = (tail.end,) if whole else fences_of(tail, cut.seqnos)
        if old is not None:
            self.forget(old)
        self._named[name] = cut
        self._hold(cut)
        self.changes += 1
        return cut

    def _check_room(self, name: str, holder: str, now: int) -> None:
        live = [cut for cut in self._named.values() if not self._ended(cut, now)]
        of_backup = name.startswith(BACKUP_CUTS_NAME)
        alike = [cut for cut in live if cut.name.startswith(BACKUP_CUTS_NAME) == of_backup]
        limits = [(len(live), CUTS_MAX, "cuts")]
        if of_backup:
            limits.append((len(alike), CUTS_HALF, "cuts of backups"))
        else:
            limits.append((len(alike), CUTS_MAX - BACKUP_CUTS, "cuts besides those of backups"))
        if holder and not of_backup:
            mine = sum(cut.holder == holder for cut in alike)
            limits.append((mine, CUTS_HALF, f"cuts of {holder}"))
        for count, most, what in limits:
            if count >= most:
                raise TooManyError(
                    f"{what} of the bucket are {count}; must be below {most}",
                    hint="release one that is not needed any more",
                )

    def load(self, rows: Mapping[bytes, CutRow], tail: Tail) -> None:
        """Load the stored cuts at a start, and find their fences in the tail."""
        for name, row in rows.items():
            self.replicated(row, name.decode(), tail)

    def replicated(self, row: CutRow, name: str, tail: Tail) -> None:
        """Take over a cut of the upstream, or what it has become.

        A pin above what was received yet gets its fence when it is passed; see ``passed``.
        """
        old = self._named.get(name)
        cut = Cut(name, row.created, row.expires, row.lease, row.pins, durable=True)
        cut.fences = fences_of(tail, cut.seqnos)
        self._named[name] = cut
        self._hold(cut)
        if old is not None:
            self._drop(old)
        self.changes += 1

    def hold(self, seqnos: U64, tail: Tail) -> Cut:
        """Pin seqnos of what is here already, shape (1024,), without a name until ``forget``; 0 pins nothing."""
        cut = Cut("", 0, 0, 0, {})
        cut.seqnos[seqnos > 0] = seqnos[seqnos > 0]
        cut.fences = fences_of(tail, cut.seqnos)
        self._hold(cut)
        return cut

    def passed(self, runs: Runs, entry: int) -> None:
        """Set fences at an entry that is about to be appended, whose runs begin at pinned seqnos."""
        partitions, starts = runs["partition"], runs["start_seqno"]
        for cut in filter(lambda cut: cut.name, self._held):
            if (cut.seqnos[partitions] == starts).any() and entry not in cut.fences:
                cut.fences = (*cut.fences, entry)

    def renew(self, name: str, lease: int | None, now: int) -> Cut:
        """Renew a cut's lease; None keeps its length. CutNotFoundError where there is none, or its lease has ended."""
        cut = self._named.get(name)
        if cut is None or not cut.durable or self._ended(cut, now):
            raise CutNotFoundError(
                f"there is no cut {shown(name)}, or its lease has ended", hint="make a new one"
            )
        cut.lease = cut.lease if lease is None else lease
        cut.expires = now + cut.lease
        self.changes += 1
        return cut

    def remove(self, name: str) -> Cut | None:
        """Remove a cut from the names and return it, None if there is none. Its pins hold until ``forget``."""
        self.changes += 1
        return self._named.pop(name, None)

    def put_back(self, cut: Cut) -> None:
        """Restore the name of a removed cut, unless another has it or its pins were dropped."""
        if cut in self._held:
            self._named.setdefault(cut.name, cut)
            self.changes += 1

    def forget(self, cut: Cut) -> None:
        """Drop a cut's pins, and then its name: who finds no memory for it does all of it again."""
        self._drop(cut)
        if self._named.get(cut.name) is cut:
            del self._named[cut.name]
            self.changes += 1

    def _drop(self, cut: Cut) -> None:
        if cut not in self._held:
            return
        held = [other for other in self._held if other is not cut]
        none = np.full(PARTITIONS, NO_PIN, np.uint64)
        self._lowest = np.min([none, *(c.seqnos for c in held)], axis=0)
        free = cut.seqnos != NO_PIN
        for other in held:
            # A cut is replaced by what it has become, and the pins of a join rise in few partitions at a time.
            free &= other.seqnos != cut.seqnos
        if free.any():
            self.on_dropped(np.flatnonzero(free).tolist())
        self._held = held

    def _hold(self, cut: Cut) -> None:
        self._held.append(cut)
        self._lowest = np.minimum(self._lowest, cut.seqnos)

    # Queries

    def has(self, cut: Cut) -> bool:
        return self._named.get(cut.name) is cut

    def live(self, now: int) -> list[Cut]:
        """Return the cuts whose lease has not ended, oldest first."""
        found = [cut for cut in self._named.values() if cut.durable and not self._ended(cut, now)]
        return sorted(found, key=lambda cut: (cut.created, cut.name))

    def ended(self, now: int) -> list[Cut]:
        """Return the cuts whose lease has ended and that still have their name."""
        return [cut for cut in self._named.values() if self._ended(cut, now)]

    @staticmethod
    def _ended(cut: Cut, now: int) -> bool:
        return cut.durable and cut.expires <= now


def fences_of(tail: Tail, seqnos: U64) -> tuple[int, ...]:
    """Return the smallest set of fences: between two of them no range of entries crosses a pin.

    Args:
        seqnos: the pinned seqno of each partition, shape (1024,); NO_PIN where there is none.
    """
    tables = [entry.runs for entry in tail.range(tail.first, tail.end)]
    if not tables:
        return ()
    entries = np.repeat(np.arange(tail.first, tail.end), [len(runs) for runs in tables])
    partitions = np.concatenate([runs["partition"] for runs in tables])
    above = np.concatenate([runs["end_seqno"] for runs in tables]) > seqnos[partitions]
    last = np.full(PARTITIONS, -1, np.int64)
    np.maximum.at(last, partitions[~above], entries[~above])
    first = np.full(PARTITIONS, tail.end, np.int64)
    np.minimum.at(first, partitions[above], entries[above])
    return tuple(_separate(last, first, np.flatnonzero((last >= 0) & (seqnos != NO_PIN))))


def _separate(
    last: npt.NDArray[np.int64], first: npt.NDArray[np.int64], left: npt.NDArray[np.intp]
) -> Iterable[int]:
    """Yield numbers so that each partition has one above its ``last`` and not above its ``first``."""
    while len(left):
        fence = int(first[left].min())
        yield fence
        left = left[last[left] >= fence]
