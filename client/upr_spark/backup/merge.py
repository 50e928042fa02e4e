"""Folding the backups up to one into a merged base: the newest row of each key there, and no tombstones.

Nothing is replaced or removed by it. Its document, created once, is the commit: a merge that is killed leaves files that
nothing refers to, and begins anew.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from upr_spark.backup.chain import Chain, Segment, needed, segments_of, sizes_of
from upr_spark.backup.errors import LockedError, MergeRefusedError
from upr_spark.backup.expire import Keep
from upr_spark.backup.manifest import Entry, FileRef, Manifest
from upr_spark.backup.point import grouped
from upr_spark.backup.repository import Repository

LEFT_ALONE: Final = 2
"""The newest backups are not merged unchosen: a failover that is found out later may still roll back into them."""

FILE_BYTES: Final = 2**30
"""About how many bytes of keys and values, of all versions together, go into one file."""


class Folded(NamedTuple):
    """What was written of some partitions: the file, None without rows; and by partition its rows and their bytes."""

    file: FileRef | None
    sizes: Mapping[int, tuple[int, int]]


class Fold(Protocol):
    """Writes the newest row of each key, deletes left out, into one new file that is durable then."""

    def __call__(
        self, counted: Mapping[int, Sequence[Segment]], sizes: Mapping[int, int], path: str
    ) -> Folded:
        """Fold partitions.

        Args:
            counted: by partition, the rows that count.
            sizes: by partition, at most how many bytes they take in memory.
            path: the file's name.

        Raises:
            RepositoryDamagedError: what is to be folded is damaged, or what was written cannot be read back.
        """


class Holding(Protocol):
    """The lock that a run holds."""

    def keep(self, now: bool = False) -> None:
        """Renew it, or raise LockedError."""


def _micros() -> int:
    return round(time.time() * 1e6)


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class Merge:
    """A merge that is being made.

    Args:
        repository: where.
        fold: folds some partitions.
        lock: which is held.
        progress: called with partitions done and partitions in all.
        clock: microseconds since the epoch.
        file_bytes: about how many bytes of all versions go into one file.
    """

    repository: Repository
    fold: Fold
    lock: Holding
    progress: Callable[[int, int], Any] = no_progress
    clock: Callable[[], int] = _micros
    file_bytes: int = FILE_BYTES

    def merge(self, chain: Chain, number: int) -> Manifest:
        """Make a merged base at a backup, and return its manifest.

        Args:
            chain: as the repository has it.
            number: one that ``chosen`` returned.

        Raises:
            RepositoryDamagedError: what is to be folded is damaged.
            LockedError: another run has the repository, or took the files away as those of a dead run.
        """
        started = self.clock()
        wanted = needed(chain, number)
        counted, sizes = segments_of(wanted), sizes_of(wanted)
        name = self.repository.merged_name(number)
        folded = []
        done = 0
        for group in grouped({p: sizes[p] for p in counted}, self.file_bytes):
            self.progress(done, len(counted))
            self.lock.keep()
            path = self.repository.new_merged_name(name)
            folded.append(self.fold({p: counted[p] for p in group}, sizes, path))
            done += len(group)
        self.progress(done, len(counted))
        base = _base(
            chain.by_number(number), chain.link(number).sha256, folded, started, self.clock()
        )
        self.lock.keep(now=True)
        if not self.repository.commit_merged(name, base):
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
        chain: as the repository has it.
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
    """Return the merged base of a backup."""
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
