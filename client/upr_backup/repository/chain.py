"""Chains of backups: which rows count at which restore point. Pure: no clock, no randomness.

The server sends only the newest version of a key within a range, so the state at a restore point is: of each key the
row with the highest seqno among those that count.

A restore point rests on a base at or before it: a full backup, or a merged one, which holds the newest row of each key
at its number and nothing older. So a later cut below a merged base's end, and above 0, would need rows that are not in
it: whether a merged base serves a restore point is computed from the cuts between the two. A cut at 0 needs nothing of
the base, and from then on no cut of that partition does.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Self

from upr_backup.errors import BackupNotFoundError, RepositoryDamagedError
from upr_backup.repository.documents import FileRef, Kind, Manifest, time_text

_ROW_BYTES: Final = 64


class Segment(NamedTuple):
    """Rows that count: those of a partition with ``low < seqno <= high`` in one file."""

    file: FileRef
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Link:
    """What is kept in memory of a committed backup: how many files and rollbacks it has, and its cuts by partition.

    Its SHA-256 is that of the manifest's document.
    """

    number: int
    kind: Kind
    cut_time: int
    started: int
    finished: int
    rows: int
    file_bytes: int
    files: int
    rollbacks: int
    cuts: Mapping[int, int]
    seen: int
    sha256: str

    @classmethod
    def of(cls, manifest: Manifest, digest: str = "") -> Self:
        return cls(
            manifest.number,
            manifest.kind,
            manifest.cut_time,
            manifest.started,
            manifest.finished,
            manifest.rows,
            manifest.file_bytes,
            len(manifest.files),
            len(manifest.rollbacks),
            {p: e.cut for p, e in manifest.entries.items() if e.cut is not None},
            manifest.seen,
            digest,
        )


class Chain:
    """The restore points of a repository, oldest first. Their numbers may begin above 1: earlier ones have expired.

    Only links are in memory; a manifest that is asked for is loaded.

    Args:
        links: ascending, without a gap.
        load: returns the manifest of a number among them.
        merged: merged bases, by number; those of restore points are kept.
    """

    def __init__(
        self,
        links: Sequence[Link],
        load: Callable[[int], Manifest],
        merged: Mapping[int, Manifest] | None = None,
    ) -> None:
        self.links = links
        self.merged = {m: base for m, base in (merged or {}).items() if self._has(m)}
        self._load = load
        self._bases, self._firm = _bases(links, self.merged)

    @property
    def first(self) -> int:
        """The oldest number; 1 without backups."""
        return self.links[0].number if self.links else 1

    @property
    def last(self) -> int:
        """The newest number; 0 without backups."""
        return self.links[-1].number if self.links else 0

    def __len__(self) -> int:
        return len(self.links)

    def by_number(self, number: int) -> Manifest:
        """Return the manifest of a number; raises as ``link``, and RepositoryDamagedError when it cannot be read any more."""
        return self._load(self.link(number).number)

    def link(self, number: int) -> Link:
        """Return the link of a number; BackupNotFoundError when there is none, or it has expired."""
        if not self._has(number):
            if not number and not self.links:
                # It is the newest that is asked for.
                raise BackupNotFoundError("there is no backup yet", hint="'backup' takes one")
            there = f"there are {self.first} to {self.last}" if self.links else "there is none yet"
            if 1 <= number < self.first:
                raise BackupNotFoundError(f"backup {number} has expired", hint=there)
            raise BackupNotFoundError(f"there is no backup {number}", hint=there)
        return self.links[number - self.first]

    def base(self, number: int) -> Manifest:
        """Return the newest base that serves a restore point: a full backup's manifest, or a merged one.

        Raises:
            BackupNotFoundError: there is no backup of that number, or it has expired.
            RepositoryDamagedError: no base serves it.
        """
        base = self.base_number(number)
        return self.merged[base] if base in self.merged else self._load(base)

    def base_number(self, number: int) -> int:
        """Return the number of that base; raises what ``base`` raises."""
        self.link(number)
        base = self._bases[number]
        if base is None:
            raise RepositoryDamagedError(
                f"backup {number} cannot be restored: no full backup and no merged one is beneath it"
            )
        return base

    def is_base(self, number: int) -> bool:
        return number in self.merged or self.link(number).kind == "full"

    @property
    def whole(self) -> bool:
        """Whether each restore point has a base."""
        return None not in self._bases.values()

    @property
    def firm(self) -> bool:
        """Whether it is whole, and stays so when backups are added that do not go back into the first one.

        That is when the newest restore point can do with the base at the first one, or with a full backup.
        """
        return self.whole and self._firm

    def begun_at(self, number: int) -> "Chain":
        """Return the chain without what is before a number."""
        return Chain(
            [link for link in self.links if link.number >= number], self._load, self.merged
        )

    def mergeable(self) -> Iterable[int]:
        """Yield, newest first, the numbers at which a merged base serves all later backups up to the next full one."""
        # By partition, above which end a base must not be.
        bounds: dict[int, int] = {}
        for link in reversed(self.links):
            entries = self._load(link.number).entries if bounds else {}
            if all(entries[p].end <= bound for p, bound in bounds.items() if p in entries):
                yield link.number
            if link.kind == "full":
                bounds = {}
            for partition, cut in link.cuts.items():
                if cut:
                    bounds[partition] = min(cut, bounds.get(partition, cut))
                else:
                    bounds.pop(partition, None)

    def rests_on(self) -> Iterable[Manifest]:
        """Yield every backup and merged base that a restore point may rest on; not a first one that is only merged."""
        for link in self.links:
            if link.number in self.merged:
                yield self.merged[link.number]
            if self._counts(link):
                yield self._load(link.number)

    @property
    def files(self) -> int:
        """How many files there are in all that ``rests_on`` yields."""
        own = sum(link.files for link in self.links if self._counts(link))
        return own + sum(len(base.files) for base in self.merged.values())

    def _counts(self, link: Link) -> bool:
        return link.number > self.first or link.kind == "full" or self.first not in self.merged

    def _has(self, number: int) -> bool:
        return bool(self.links) and self.first <= number <= self.last


def _bases(
    links: Sequence[Link], merged: Mapping[int, Manifest]
) -> tuple[dict[int, int | None], bool]:
    """Return for each number the newest base that serves it, None without; and whether the last one needs no merged
    base but one at the first number.
    """
    found: dict[int, int | None] = {}
    full: int | None = None
    # Merged bases since the full one that still serve, with the partitions of which nothing in them counts any more.
    serving: list[tuple[Manifest, set[int]]] = []
    for link in links:
        if link.kind == "full":
            full, serving = link.number, []
        elif link.cuts:
            serving = [
                (base, gone | {p for p, cut in link.cuts.items() if not cut})
                for base, gone in serving
                if _serves(base, gone, link.cuts)
            ]
        if link.number in merged:
            serving.append((merged[link.number], set()))
        found[link.number] = serving[-1][0].number if serving else full
    first = bool(serving) and serving[0][0].number == links[0].number
    return found, full is not None or first


def _serves(base: Manifest, gone: set[int], cuts: Mapping[int, int]) -> bool:
    return all(
        not cut or p in gone or p not in base.entries or base.entries[p].end <= cut
        for p, cut in cuts.items()
    )


def needed(chain: Chain, number: int) -> Sequence[Manifest]:
    """Return what a restore point rests on, without positions: a base at or before it, and the backups after that.

    Raises as ``Chain.base``.
    """
    base = chain.base(number)
    later = range(base.number + 1, number + 1)
    # One after the other: with their positions they would not all fit into memory.
    return [base.without_positions(), *(chain.by_number(n).without_positions() for n in later)]


def segments_of(wanted: Iterable[Manifest]) -> dict[int, list[Segment]]:
    """Return for each partition the rows that count, in the order of their seqnos, of what ``needed`` gave."""
    counted: dict[int, list[Segment]] = {}
    for manifest in wanted:
        for partition in manifest.entries:
            add_segment(counted.setdefault(partition, []), manifest, partition)
    return {partition: parts for partition, parts in counted.items() if parts}


def add_segment(parts: list[Segment], manifest: Manifest, partition: int) -> None:
    """Have what counts of a partition at one backup be what counts at the next one."""
    entry = manifest.entries[partition]
    if entry.cut is not None:
        parts[:] = [
            part._replace(high=min(part.high, entry.cut)) for part in parts if part.low < entry.cut
        ]
    if entry.file is not None:
        parts.append(Segment(manifest.files[entry.file], entry.start, entry.end))


def sizes_of(wanted: Iterable[Manifest]) -> dict[int, int]:
    """Return for each partition at most how many bytes its rows take in memory, of what ``needed`` gave."""
    sizes: dict[int, int] = {}
    for manifest in wanted:
        for partition, entry in manifest.entries.items():
            size = entry.data_bytes + entry.rows * _ROW_BYTES
            sizes[partition] = sizes.get(partition, 0) + size
    return sizes


@dataclass(frozen=True, slots=True)
class Keep:
    """Which restore points are to stay: those that one of these keeps, and the newest in any case.

    Args:
        last: so many of the newest, 1 or more; None: not by number.
        within: those not older than so many microseconds; None: not by age.
        grid: by "hourly", "daily", "weekly" and "monthly", of how many of the newest hours, days, weeks and months that
            have a backup the last one stays; in UTC.
        pinned: numbers that somebody wants to stay.
    """

    last: int | None
    within: int | None
    grid: Mapping[str, int] = field(default_factory=dict)
    pinned: Collection[int] = ()

    def oldest(self, chain: Chain, now: int) -> int:
        """Return the oldest number that stays, of a chain that is not empty; now in microseconds since the epoch."""
        kept = {chain.last}
        if self.last is not None:
            kept.add(max(chain.last - self.last + 1, chain.first))
        if self.within is not None:
            kept.update(link.number for link in chain.links if link.cut_time >= now - self.within)
        for unit, count in self.grid.items():
            # The last backup of each period: a later one takes the place of those before.
            periods = {_period(unit, link.cut_time): link.number for link in chain.links}
            kept.update(sorted(periods.values())[-count:])
        kept.update(number for number in self.pinned if number >= chain.first)
        return min(kept)


PERIODS: Final = {"hourly": "%Y%m%d%H", "daily": "%Y%m%d", "weekly": "%G%V", "monthly": "%Y%m"}
"""Periods of a grid: how ``strftime`` tells one from the next."""


def _period(unit: str, micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime(PERIODS[unit])


def number_at(chain: Chain, at: Any) -> int:
    """Return the number of a restore point: ``at`` is None for the newest, a number, or the microseconds of a time in a tuple."""
    if at is None:
        return chain.last
    if isinstance(at, int):
        return at
    before = [link.number for link in chain.links if link.cut_time <= at[0]]
    if not before:
        raise BackupNotFoundError(
            f"there is no backup from {time_text(at[0])} or before", hint="'list' shows all"
        )
    return max(before)
