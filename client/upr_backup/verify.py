"""Verification: damage in a repository, and the newest backup compared with the server, row by row.

For the comparison the server is read up to a cut. Of each key it has the newest row, and the backup has the newest one
up to where it ended. So a row of the server that lies within the backup has to be the backup's, and a row of the backup
has to be the server's unless that has a newer one, or purged it as the deletion that it is. Where the server rolled back
since below what the backup has, the two are different histories, and there is nothing to compare.
"""

import math
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upr_backup.repository.repository import Repository
from upr_backup.rows import (
    BUCKET_SCHEMA,
    Point,
    _file_problem,
    _rows_problem,
    each_group,
    grouped,
    match,
    other_values,
    read_newest,
    shown,
    some_keys,
)
from upr_backup.source import LEASE_SECONDS, ServerSource
from upr_client import Client
from upr_client.lowlevel import hello
from upr_client.types import Cut
from upr_protocol.block import I64, Mask
from upr_protocol.failover import parse_failover_id
from upr_protocol.limits import BACKUP_CUTS_NAME, PARTITIONS


def verify(
    repository: Repository, share: float, progress: Callable[[int, int], Any]
) -> Iterator[str]:
    """Yield everything that is wrong, as one line each.

    Args:
        share: of the data files, 0 to 1, is read, chosen anew each time; the others are looked at for their size.
        progress: called with files done and files in all.

    Raises:
        OSError, UprError: something cannot be reached, or may not be read, which says nothing of damage.
    """
    wrong: list[str] = []
    chain = repository.chain(wrong.append)
    repository.tags(chain, wrong.append)
    yield from wrong
    if not wrong:
        for name in repository.lost_manifests(chain.last):
            yield f"{name} is missing: its data is there"
    total = chain.files
    done = 0
    read = set(random.sample(range(total), math.ceil(total * share)))
    for manifest in chain.rests_on():
        for index, file in enumerate(manifest.files):
            progress(done, total)
            problem = _file_problem(repository.storage, file, done in read)
            if not problem and done in read:
                problem = _rows_problem(repository.storage, manifest, index)
            if problem:
                merged = ", merged" if manifest.kind == "merged" else ""
                yield f"backup {manifest.number}{merged}: {problem}"
            done += 1
    progress(done, total)


_NEWER_ROW_BYTES: Final = 128
"""Of a row that is newer than the backup about its key is kept."""


@dataclass(slots=True)
class Comparison:
    """What came out.

    Attributes:
        partitions, keys: how many of the backup were compared; of its keys those that are not deleted.
        differences: a line for each kind of difference in a group of partitions.
        not_comparable: by partition, why it was left out.
        undecided: keys of the backup that the server does not have, where a deletion that is purged since may be why.
    """

    number: int
    partitions: int = 0
    keys: int = 0
    differences: list[str] = field(default_factory=list)
    not_comparable: dict[int, str] = field(default_factory=dict)
    undecided: int = 0


class AgainstServer:
    """Compares the newest backup, whole, with the bucket that it was taken of."""

    def __init__(self, point: Point, client: Client, progress: Callable[[int, int], Any]) -> None:
        self._point = point
        self._admin = client.admin
        self._bucket = client.bucket(point.repository.bucket)
        self._progress = progress
        self._cuts = ServerSource(client, point.repository)
        self._ends = np.zeros(PARTITIONS, np.int64)
        for partition, entry in point.manifest.entries.items():
            self._ends[partition] = entry.end

    def run(self) -> Comparison:
        """Compare all partitions.

        Raises:
            UprError: the server failed, or its history changed while it was read.
            RepositoryDamagedError: a file cannot be read.
        """
        found = Comparison(self._point.manifest.number)
        cut = self._admin.create_cut(
            self._bucket, f"{BACKUP_CUTS_NAME}{secrets.token_hex(8)}", lease=LEASE_SECONDS
        )
        try:
            found.not_comparable = self._not_comparable(cut)
            chosen = [p for p in self._point.manifest.entries if p not in found.not_comparable]
            for group in each_group(self._groups(chosen, cut), self._progress):
                self._group(group, cut, found)
            found.partitions = len(chosen)
        finally:
            self._cuts.release(cut.name)
        return found

    def _not_comparable(self, cut: Cut) -> dict[int, str]:
        """Return the partitions whose history is not the backup's, and why."""
        repository, entries = self._point.repository, self._point.manifest.entries
        version = f"{self._bucket.version:016x}"
        if version != repository.bucket_version:
            why = f"the bucket is another one: its version is {version}, that of the repository {repository.bucket_version}"
            return dict.fromkeys(entries, why)
        ids = {
            p: parse_failover_id(entry.position["failover_id"])
            for p, entry in entries.items()
            if entry.position is not None and entry.position["failover_id"]
        }
        found = {p: why.message for p, why in cut.left_out.items()}
        for answer in hello(self._bucket, ids) if ids else ():
            p, end = answer.partition, int(self._ends[answer.partition])
            if answer.HasField("problem"):
                found[p] = str(answer.problem.message)
            elif answer.HasField("rollback_seqno") and answer.rollback_seqno < end:
                found[p] = _rolled_back(
                    end, f"the server's history is another one from {answer.rollback_seqno} on"
                )
            elif p not in cut.pins or cut.pins[p].seqno < end:
                found[p] = _rolled_back(end, "the server ends before that")
        return dict(sorted(found.items()))

    def _groups(self, chosen: Sequence[int], cut: Cut) -> list[list[int]]:
        """Return the partitions that have rows on either side, in groups that fit into memory."""
        sizes = {}
        for partition in chosen:
            newer = cut.pins[partition].seqno - int(self._ends[partition])
            size = newer * _NEWER_ROW_BYTES + self._point.sizes.get(partition, 0)
            if size or partition in self._point.counted:
                sizes[partition] = size
        return grouped(sizes)

    # One group.

    def _group(self, group: Sequence[int], cut: Cut, found: Comparison) -> None:
        mine = self._point.state(group)
        theirs = read_newest(
            self._bucket,
            group,
            until=cut,
            keep=self._without_newer_values,
            on_rows=lambda _: self._cuts.renew(cut.name),
        )
        purged = self._purged(group)
        found.keys += int(_flags(pc.not_equal(mine.column("op"), "delete")).sum())
        names = f"partitions {group[0]} to {group[-1]}"
        for words, table, rows in self._compare(mine, theirs, purged, found):
            if len(rows):
                some = ", ".join(map(shown, some_keys(table, rows)))
                found.differences.append(f"{names}: {len(rows)} keys {words}; for example {some}")

    def _without_newer_values(self, table: Any) -> Any:
        """Drop the values and further cells of rows above the backup's end: nothing is compared with them, and they may be many."""
        newer = pa.array(self._above(table))
        for name in ("value", "further"):
            left = pc.if_else(newer, pa.scalar(None, pa.binary()), table.column(name))
            table = table.set_column(BUCKET_SCHEMA.get_field_index(name), name, left)
        return table

    def _above(self, table: Any) -> Mask:
        above: Mask = _numbers(table, "seqno") > self._ends[_numbers(table, "partition")]
        return above

    def _purged(self, group: Sequence[int]) -> I64:
        """Return up to where deletions may be gone from the server, by partition; int64, shape (1024,)."""
        purged = np.zeros(PARTITIONS, np.int64)
        for info in self._admin.partitions(self._bucket, group):
            purged[info.partition] = info.purge_seqno
        return purged

    def _compare(
        self, mine: Any, theirs: Any, purged: I64, found: Comparison
    ) -> Iterator[tuple[str, Any, I64]]:
        """Yield what is different: words, and the rows of a table."""
        both, rows, gone, new = match(mine, theirs)
        my_partitions, my_seqnos = _numbers(mine, "partition"), _numbers(mine, "seqno")
        my_deleted = _flags(pc.equal(mine.column("op"), "delete"))
        their_seqnos, their_deleted = _numbers(theirs, "seqno"), _flags(theirs.column("deleted"))
        ends, newer = self._ends[my_partitions], self._above(theirs)

        yield "have rows above where the backup ended", mine, np.flatnonzero(my_seqnos > ends)
        # Of keys that both have: within the backup, so the same row.
        within = ~newer[rows]
        same_seqno = my_seqnos[both] == their_seqnos[rows]
        same_op = my_deleted[both] == their_deleted[rows]
        yield "have another seqno than at the server", mine, both[within & ~same_seqno]
        exact = within & same_seqno
        yield "are deleted in one and not in the other", mine, both[exact & ~same_op]
        compared = exact & same_op & ~my_deleted[both]
        different = other_values(mine, theirs, both[compared], rows[compared])
        yield "have another value than at the server", mine, different
        cells = other_values(mine, theirs, both[compared], rows[compared], "further")
        yield "have other further cells than at the server", mine, cells

        # Of keys that only the backup has: a deletion that was purged, or one that came later and was purged.
        deleted, purged_at = my_deleted[gone], purged[my_partitions[gone]]
        may_be_gone = purged_at > ends[gone]
        found.undecided += int((~deleted & may_be_gone).sum())
        yield "are not at the server", mine, gone[~deleted & ~may_be_gone]
        lost = deleted & (purged_at < my_seqnos[gone])
        yield "have a deletion that is not at the server", mine, gone[lost]

        # Of keys that only the server has. A merged backup has no deletions beneath which nothing is left.
        yield "are not in the backup", theirs, new[~newer[new] & ~their_deleted[new]]


def _rolled_back(end: int, why: str) -> str:
    return f"rolled back since: the backup has {end}, and {why}; the next backup will say so"


def _numbers(table: Any, name: str) -> I64:
    column: I64 = table.column(name).to_numpy().astype(np.int64)
    return column


def _flags(column: Any) -> Mask:
    flags: Mask = column.combine_chunks().to_numpy(zero_copy_only=False).astype(np.bool_)
    return flags
