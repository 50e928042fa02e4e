"""A restore point that was opened: checked, and cut into groups of partitions that fit into memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upr_spark.backup.chain import Segment, needed, segments_of, sizes_of
from upr_spark.backup.commands.common import number_at
from upr_spark.backup.errors import RepositoryDamagedError
from upr_spark.backup.manifest import Manifest
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage
from upr_spark.backup.tables import state
from upr_spark.backup.verify import check_files

GROUP_BYTES = 32 * 2**20
"""About how much of a backup is in memory at a time; a partition that has more is in memory alone."""


@dataclass(frozen=True, slots=True)
class Point:
    """A restore point, or the part of it that was asked for.

    Args:
        repository: where it is.
        manifest: of its backup.
        counted: by partition, the rows that count.
        sizes: by partition, at most how many bytes its rows take in memory.
        chosen: the partitions that were asked for; None for all.
    """

    repository: Repository
    manifest: Manifest
    counted: Mapping[int, Sequence[Segment]]
    sizes: Mapping[int, int]
    chosen: Sequence[int] | None = None

    def groups(self, group_bytes: int = GROUP_BYTES) -> list[list[int]]:
        """Return the partitions that have rows, ascending, in groups that fit into memory."""
        return grouped({p: self.sizes[p] for p in self.counted}, group_bytes)

    def state(self, group: Sequence[int], key_prefix: bytes = b"") -> Any:
        """Return the newest row of each key of some partitions, deletes included, as ``tables.state`` does."""
        counted = {p: self.counted[p] for p in group if p in self.counted}
        return state(self.repository.storage, counted, key_prefix)


def open_point(storage: Storage, at: Any = None, partitions: Sequence[int] | None = None) -> Point:
    """Open a restore point and read all its files once, so that nothing damaged is used.

    Args:
        storage: the repository's.
        at: a value of ``RestorePoint``; None means the newest.
        partitions: only these; None means all.

    Raises:
        RepositoryError: there is no repository.
        BackupNotFoundError: there is no such backup.
        RepositoryDamagedError: a document or a file is damaged or missing.
    """
    repository = Repository.open(storage)
    damage: list[str] = []
    chain = repository.chain(damage.append)
    number = number_at(chain, at)
    if damage and not (isinstance(at, int) and chain.first <= at <= chain.last):
        there = f"backups {chain.first} to {chain.last} can be used, with --at ID" if chain else ""
        raise RepositoryDamagedError(damage[0], hint=there)
    backups = needed(chain, number)
    counted: Mapping[int, Sequence[Segment]] = segments_of(backups)
    if partitions is not None:
        wanted = set(partitions)
        counted = {p: parts for p, parts in counted.items() if p in wanted}
    check_files(storage, {part.file for parts in counted.values() for part in parts})
    return Point(repository, chain.by_number(number), counted, sizes_of(backups), partitions)


def grouped(sizes: Mapping[int, int], group_bytes: int = GROUP_BYTES) -> list[list[int]]:
    """Return partitions, ascending, in groups of about so many bytes; a larger one comes alone."""
    groups: list[list[int]] = []
    room = 0
    for partition, size in sorted(sizes.items()):
        if not groups or size > room:
            groups.append([])
            room = group_bytes
        groups[-1].append(partition)
        room -= size
    return groups
