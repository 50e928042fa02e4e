"""Retention: backups merged into a base, old ones expired, and what nothing refers to any more removed.

**Merge** makes a base with the newest row of each key and no tombstones. Nothing is replaced or removed by it. Its
document, created once, is the commit: a merge that is killed leaves files that nothing refers to, and begins anew.

**Prune** is the only code that removes what counted once. Whatever it removes can never count again, however long
another run was paused, and whether or not it holds the lock:

- What is before the first number of an expiry, when every restore point from there on has a base from there on, and
  always will. With a full backup as the base it always will. With a merged one a rollback must not go back into it:
  a run that knew of the expiry does not, and when the newest backup's run knew, all runs that did not know find their
  number taken. So it has to be waited for one backup after an expiry. And that base has to serve the newest restore
  point itself: a later merged one, at which nothing expired, is not what those runs spare.
- Data files of a committed number that are not in its manifest.
- Files of an attempt at a merged base, once the attempt is void.
- Journals of restores.

Documents are removed before the files that they name, and the expiries that are replaced before what they kept: the
newest one that counts says at any moment where the chain begins, and nothing before that is looked at. Manifests are
removed oldest first, so that those left are always without a gap.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow.compute as pc

from upr_backup.errors import LockedError, MergeRefusedError
from upr_backup.repository import Storage, Stored
from upr_backup.repository.chain import Chain, Keep, Segment, needed, segments_of, sizes_of
from upr_backup.repository.documents import Entry, Expiry, FileRef, Manifest, now_micros
from upr_backup.repository.lock import Holding
from upr_backup.repository.repository import (
    ASIDE,
    CHAIN,
    DATA,
    EXPIRED,
    MERGED,
    STAGING,
    Repository,
    number_in,
)
from upr_backup.rows import (
    LateCellsError,
    RowsWriter,
    check_files,
    each_group,
    grouped,
    in_order,
    state,
)


def beginning(chain: Chain, oldest: int) -> int | None:
    """Return the newest number that the chain can begin at so that every restore point from ``oldest`` on stays.

    That is a full backup, or one with a merged base, such that the chain from there on is firm. None without.
    """
    for number in range(oldest, chain.first - 1, -1):
        if chain.is_base(number) and chain.begun_at(number).firm:
            return number
    return None


def expire(repository: Repository, chain: Chain, first: int, now: int) -> bool:
    """Let expire what is before ``first``, as ``beginning`` returned it; ``now`` in microseconds. False when it had before."""
    link = chain.link(first)
    bases = [""] if link.kind == "full" else repository.merged_bases(first)
    if not bases:
        # Another run let more expire meanwhile, and it was pruned.
        return False
    return repository.expire(Expiry(first, repository.id, link.sha256, bases[0], now))


LEFT_ALONE: Final = 2
"""The newest backups are not merged unchosen: a failover that is found out later may still roll back into them."""

FILE_BYTES: Final = 2**30
"""About how many bytes of keys and values, of all versions together, go into one file."""


class Folded(NamedTuple):
    """What was written of some partitions: the file, None without rows; and by partition its rows and their bytes."""

    file: FileRef | None
    sizes: Mapping[int, tuple[int, int]]


Fold = Callable[[Mapping[int, Sequence[Segment]], Mapping[int, int], str], Folded]
"""Writes the newest row of each key, deletes left out, into one new file that is durable then.

It takes, by partition, the rows that count and at most how many bytes they take in memory; and the file's name. It raises
RepositoryDamagedError when what is to be folded is damaged, or what was written cannot be read back.
"""


@dataclass(slots=True)
class Merge:
    """A merge that is being made.

    Args:
        lock: which is held.
        progress: called with partitions done and partitions in all.
        clock: microseconds since the epoch.
        file_bytes: about how many bytes of all versions go into one file.
    """

    repository: Repository
    fold: Fold
    lock: Holding
    progress: Callable[[int, int], Any] = lambda done, total: None
    clock: Callable[[], int] = now_micros
    file_bytes: int = FILE_BYTES

    def merge(self, chain: Chain, number: int) -> Manifest:
        """Make a merged base at a number that ``chosen`` returned, and return its manifest.

        Raises:
            RepositoryDamagedError: what is to be folded is damaged.
            LockedError: another run has the repository, or took the files away as those of a dead run.
        """
        started = self.clock()
        wanted = needed(chain, number)
        counted, sizes = segments_of(wanted), sizes_of(wanted)
        name = self.repository.merged_name(number)
        folded = []
        groups = grouped({p: sizes[p] for p in counted}, self.file_bytes)
        for group in each_group(groups, self.progress):
            self.lock.keep()
            path = self.repository.new_merged_name(name)
            folded.append(self.fold({p: counted[p] for p in group}, sizes, path))
        base = _base(
            chain.by_number(number), chain.link(number).sha256, folded, started, self.clock()
        )
        self.lock.keep(now=True)
        if not self.repository.commit(base, name):
            raise LockedError(
                f"a prune took the files of this merge away, which took too long; backup {number} is not merged",
                hint="run it again",
            )
        return base


def chosen(
    chain: Chain, to: int | None = None, keep: Keep | None = None, now: int = 0
) -> int | None:
    """Return which backup to merge up to; None when there is a base already where it would be.

    Args:
        to: the one that was asked for.
        keep: else the newest possible one at or before what this keeps; None: but for the newest two.
        now: microseconds since the epoch.

    Raises:
        BackupNotFoundError: there is none of that number.
        MergeRefusedError: a later backup would need what a merge there leaves out.
    """
    if to is not None:
        if chain.is_base(to):
            return None
        if to not in chain.mergeable():
            raise _refused(chain, to)
        return to
    newest = chain.last - LEFT_ALONE
    if keep is not None and chain.links:
        newest = min(newest, keep.oldest(chain, now))
    for number in chain.mergeable():
        if number <= newest:
            return None if chain.is_base(number) else number
    return None


def _refused(chain: Chain, to: int) -> MergeRefusedError:
    ends = {p: entry.end for p, entry in chain.by_number(to).entries.items()}
    later = (link for link in chain.links if link.number > to)
    backup, partition, cut = next(
        (link.number, p, cut)
        for link in later
        for p, cut in link.cuts.items()
        if 0 < cut < ends.get(p, 0)
    )
    possible = list(chain.mergeable())
    near = [
        *[n for n in reversed(possible) if n > to][:1],
        *[n for n in possible if n < to][:1],
    ]
    return MergeRefusedError(
        f"backup {to} cannot be merged: backup {backup} goes back to {cut} in partition {partition}, and a merge "
        f"there leaves out what is below {ends[partition]}",
        hint=f"these can be: {', '.join(map(str, near))}" if near else "take a full backup",
    )


def _base(
    manifest: Manifest, digest: str, folded: Sequence[Folded], started: int, finished: int
) -> Manifest:
    files: list[FileRef] = []
    written: dict[int, tuple[int, int, int]] = {}
    for part in folded:
        if part.file is not None:
            written |= {p: (*size, len(files)) for p, size in part.sizes.items() if size[0]}
            files.append(part.file)
    entries = {}
    for partition, entry in manifest.entries.items():
        rows, data_bytes, file = written.get(partition, (0, 0, None))
        entries[partition] = Entry(0, entry.end, None, rows, data_bytes, file, None)
    return Manifest(
        manifest.number,
        "merged",
        manifest.repository,
        digest,
        manifest.cut_name,
        manifest.cut_time,
        started,
        finished,
        tuple(files),
        entries,
        (),
    )


_GROUP_BYTES: Final = 64 * 2**20
_TAKE_ROWS: Final = 65_536


class FileFold:
    """Folds the Parquet files of a repository.

    Each file is read once for its SHA-256 before anything of it is used, and so is what was written.

    Args:
        keep: called every second or so.
    """

    def __init__(self, storage: Storage, keep: Callable[[], Any]) -> None:
        self._storage = storage
        self._keep = keep
        self._checked: set[FileRef] = set()

    def __call__(
        self,
        counted: Mapping[int, Sequence[Segment]],
        sizes: Mapping[int, int],
        path: str,
        *,
        wide: bool = False,
    ) -> Folded:
        self._check({part.file for parts in counted.values() for part in parts})
        writer = RowsWriter(self._storage, path, wide=wide)
        try:
            for group in grouped({p: sizes[p] for p in counted}, _GROUP_BYTES):
                self._keep()
                self._add(writer, state(self._storage, {p: counted[p] for p in group}))
            file = writer.finish()
        except LateCellsError:
            return self(counted, sizes, path, wide=True)
        finally:
            writer.close()
        if file is not None:
            self._check({file})
        return Folded(file, {p: (int(writer.rows[p]), int(writer.data_bytes[p])) for p in counted})

    def _check(self, files: set[FileRef]) -> None:
        for file in sorted(files - self._checked, key=lambda file: file.path):
            self._keep()
            check_files(self._storage, {file})
        self._checked |= files

    def _add(self, writer: RowsWriter, table: Any) -> None:
        live = table.filter(pc.not_equal(table.column("op"), "delete"))
        order = pc.sort_indices(live, [("partition", "ascending"), ("seqno", "ascending")])
        for part in in_order(live, order, _TAKE_ROWS):
            for batch in part.to_batches():
                writer.add_rows(batch)


_OURS: Final = re.compile(
    r"(chain|expired)/[0-9]{10}\.json"
    r"|aside/[0-9]{10}-[0-9a-f]{16}\.json"
    r"|merged/[0-9]{10}-[0-9a-f]{16}(\.json|/[0-9a-f]{16}\.parquet)"
    r"|data/[0-9]{10}/[0-9a-f]{16}\.parquet"
    r"|staging/[0-9]{10}/[0-9a-f]{16}/[a-z0-9]+\.json"
    r"|journal/[0-9a-f]+/[0-9a-f]+/[a-z0-9]+\.json"
)
_WHATS: Final = ("documents", "data_files", "leftovers")


class Doomed(NamedTuple):
    """An object to remove: its name, its bytes, and which of "documents", "data_files", "leftovers" it is of."""

    name: str
    bytes: int
    what: str


@dataclass(slots=True)
class Plan:
    """What a prune is to remove.

    Attributes:
        first: the number before which everything goes; 0 when nothing has expired for long enough.
        waiting: the number before which everything will go once there is another backup; 0 without.
        voids: names and numbers of the attempts at merged bases that have to be void before.
        doomed: in the order of removing.
    """

    first: int = 0
    waiting: int = 0
    voids: list[tuple[str, int]] = field(default_factory=list)
    doomed: list[Doomed] = field(default_factory=list)

    def doom(self, what: str, objects: Iterable[Stored]) -> None:
        self.doomed += [Doomed(one.name, one.bytes, what) for one in objects]

    def totals(self) -> dict[str, dict[str, int]]:
        """Return how many objects and bytes there are of each kind."""
        totals = {what: {"objects": 0, "bytes": 0} for what in _WHATS}
        for one in self.doomed:
            totals[one.what]["objects"] += 1
            totals[one.what]["bytes"] += one.bytes
        return totals


def plan(repository: Repository, chain: Chain, grace: int, now: int) -> Plan:
    """Return what there is to remove of a repository without damage.

    Args:
        grace: how long what expired, and what killed runs left, stays; microseconds.
        now: microseconds since the epoch.
    """
    made, before = Plan(), now - grace
    chain = _left_chain(made, repository, chain, before)
    storage = repository.storage
    for folder in (EXPIRED, MERGED, CHAIN):
        documents = (one for one in _stored(storage, folder) if one.name.endswith(".json"))
        made.doom("documents", (one for one in documents if number_in(one.name) < made.first))
    left = [*_stored(storage, STAGING), *_stored(storage, ASIDE)]
    left = [one for one in left if number_in(one.name) <= chain.last]
    # Without its journal a restore that was interrupted cannot be gone on with; that is all.
    left += _stored(storage, "journal/")
    made.doom("leftovers", (one for one in left if _is_old(one, before)))
    _plan_data(made, repository, chain, before)
    _plan_merged(made, repository, before)
    return made


def prune(repository: Repository, made: Plan) -> Iterator[Doomed]:
    """Remove what was planned, and yield each object that is gone."""
    committed = tuple(
        f"{name.removesuffix('.json')}/"
        for name, number in made.voids
        if not repository.void_merged(name, number)
    )
    for one in made.doomed:
        if not one.name.startswith(committed):
            repository.storage.delete(one.name)
            yield one


def _left_chain(made: Plan, repository: Repository, chain: Chain, before: int) -> Chain:
    """Note the number before which everything may go, and return the chain that is left."""
    for expiry in reversed(repository.expiries()):
        if expiry.time > before:
            continue
        left = repository.chain_from(expiry) if expiry.number < chain.first else chain
        left = left.begun_at(expiry.number)
        if _is_final(left, expiry):
            made.first = expiry.number
            return left
        if left.firm:
            made.waiting = made.waiting or expiry.number
    return chain


def _is_final(chain: Chain, expiry: Expiry) -> bool:
    """Return whether every restore point that an expiry leaves has a base that it leaves too, now and later."""
    if not chain.links or not chain.firm:
        return False
    return chain.links[0].kind == "full" or chain.links[-1].seen >= expiry.number


def _stored(storage: Storage, folder: str) -> list[Stored]:
    """Return the objects with names as backups and merges give them; what somebody put there stays."""
    return [one for one in storage.stored(folder) if _OURS.fullmatch(one.name)]


def _is_old(one: Stored, before: int) -> bool:
    return one.written * 1e6 <= before


def _plan_data(made: Plan, repository: Repository, chain: Chain, before: int) -> None:
    by_number: dict[int, list[Stored]] = {}
    for one in _stored(repository.storage, DATA):
        by_number.setdefault(number_in(one.name), []).append(one)
    for number, there in sorted(by_number.items()):
        # Those of the next number may be of a run that is under way or is gone on with.
        if number > chain.last:
            continue
        if number < made.first or (number == made.first and chain.link(number).kind != "full"):
            made.doom("data_files", there)
        elif number >= chain.first and len(there) > chain.link(number).files:
            named = {file.path for file in chain.by_number(number).files}
            others = (one for one in there if one.name not in named)
            made.doom("leftovers", (one for one in others if _is_old(one, before)))


def _plan_merged(made: Plan, repository: Repository, before: int) -> None:
    names = {one.name: one for one in _stored(repository.storage, MERGED)}
    attempts: dict[str, list[Stored]] = {}
    for one in names.values():
        folder, _, last = one.name.removeprefix(MERGED).partition("/")
        if last:
            attempts.setdefault(f"{MERGED}{folder}.json", []).append(one)
    for document, files in sorted(attempts.items()):
        number = number_in(document)
        if number < made.first:
            made.doom("data_files", files)
        elif document in names:
            if repository.is_void(document):
                made.doom("leftovers", files)
        elif all(_is_old(one, before) for one in files):
            made.voids.append((document, number))
            made.doom("leftovers", files)
