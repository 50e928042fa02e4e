"""Restore: a restore point written into a bucket, and compared with what is then there.

A group of partitions is written as a whole, and recorded in a journal. Writing one again does no harm: a key gets the
same value. So a restore that was killed is gone on with group by group, after a look at whether what the bucket holds
is its own. When all are written, each group is read back and compared with the backup, key by key.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import pyarrow.compute as pc

from upr_backup.errors import NotEmptyError, RepositoryDamagedError
from upr_backup.repository import Storage
from upr_backup.repository.documents import NOT_WRITTEN_HERE, Json, canonical, seal, sha256
from upr_backup.repository.repository import group_name, staged
from upr_backup.rows import (
    BUCKET_SCHEMA,
    GROUP_BYTES,
    Differences,
    Point,
    data_bytes,
    differences,
    each_group,
    live,
    only_keys,
    read_newest,
)
from upr_client import Client
from upr_client.arrow import blocks
from upr_client.lowlevel import write_blocks
from upr_client.types import Bucket
from upr_protocol.block import Block
from upr_protocol.errors import UprError
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.cells import blocks_with_cells, unpack_cells

_FOLDER = "journal/"


class Journal:
    """The journal of one attempt, this run's or a resumed one: the partitions of each group, and which groups are done."""

    def __init__(
        self, storage: Storage, folder: str, groups: Sequence[Sequence[int]], resumed: bool
    ) -> None:
        self._storage = storage
        self._folder = folder
        self.groups = groups
        self.resumed = resumed
        self._writable = True

    @classmethod
    def find(cls, storage: Storage, what: Json) -> Self | None:
        """Return the journal of an attempt that did not end, at the same ``what``; None when there is none."""
        folder = _folder(what)
        names = set(storage.names(folder))
        for name in sorted(names):
            attempt = name.removesuffix("plan.json")
            if attempt == name or f"{attempt}ended.json" in names:
                continue
            plan = staged(storage, name)
            if plan is not None and plan.get("what") == what and _are_groups(plan.get("groups")):
                return cls(storage, attempt, plan["groups"], True)
        return None

    @classmethod
    def begin(
        cls,
        storage: Storage,
        what: Json,
        groups: Sequence[Sequence[int]],
        say: Callable[[str], Any],
    ) -> Self:
        """Begin one; where the repository cannot be written that is said, and nothing is recorded."""
        journal = cls(storage, f"{_folder(what)}{secrets.token_hex(8)}/", groups, False)
        journal._put("plan.json", {"what": what, "groups": [list(group) for group in groups]}, say)
        return journal

    def record(self, index: int, document: Json, say: Callable[[str], Any]) -> None:
        self._put(group_name(index), document, say)

    def recorded(self) -> dict[int, Json]:
        """Return what was recorded, by the groups' numbers."""
        found = {}
        for index in range(len(self.groups)):
            document = staged(self._storage, self._folder + group_name(index))
            if document is not None:
                found[index] = document
        return found

    def end(self) -> None:
        """Let no later run go on with it."""
        with suppress(OSError, UprError):
            self._storage.put_if_absent(f"{self._folder}ended.json", seal({}))
            names = self._storage.names(self._folder)
            # That it ended stays known until the plan is gone.
            for name in sorted(names, key=lambda name: (name.endswith("ended.json"), name)):
                self._storage.delete(name)

    def _put(self, name: str, document: Json, say: Callable[[str], Any]) -> None:
        if not self._writable:
            return
        try:
            self._storage.put_if_absent(self._folder + name, seal(document))
        except (OSError, UprError) as error:
            self._writable = False
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            say(
                f"warning: the repository takes no journal ({words}): a restore that is interrupted begins anew"
            )


def _folder(what: Json) -> str:
    return f"{_FOLDER}{sha256(canonical(what))[:32]}/"


def _are_groups(groups: Any) -> bool:
    """Return whether this is a list of lists of partitions, each in it at most once."""
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        return False
    partitions = [p for group in groups for p in group]
    known = all(type(p) is int and 0 <= p < PARTITIONS for p in partitions)
    return known and len(set(partitions)) == len(partitions)


def _blocks(rows: Any) -> Iterator[Block]:
    """Build the blocks that write a state: rows with further cells in blocks of their own."""
    if rows.column("further").null_count == len(rows):
        yield from blocks(rows.column("key"), rows.column("value"))
        return
    with_cells = pc.is_valid(rows.column("further"))
    plain, others = rows.filter(pc.invert(with_cells)), rows.filter(with_cells)
    yield from blocks(plain.column("key"), plain.column("value"))
    keys, values, cells = (others.column(n).to_pylist() for n in ("key", "value", "further"))
    yield from blocks_with_cells(keys, values, [unpack_cells(packed) for packed in cells])


Verified = Literal["equal", "contained", "not verified"]
Ends = dict[int, int]


class Written(NamedTuple):
    """What a restore wrote: keys with a value, deletes, and the bytes of keys and values."""

    keys: int
    deletes: int
    data_bytes: int


def _sum(parts: Iterable[Written]) -> Written:
    return Written(*map(sum, zip(Written(0, 0, 0), *parts, strict=True)))


def _counted(table: Any) -> Written:
    """Return what a restore writes of a state."""
    alive = live(table)
    return Written(alive.num_rows, table.num_rows - alive.num_rows, data_bytes(alive))


@dataclass(frozen=True, slots=True)
class Restored:
    """Outcome of a restore.

    Args:
        written: what the bucket has of the backup, whichever run wrote it.
        resumed: whether an interrupted run was gone on with.
        verified: "equal": the bucket was read back and holds the backup's keys, values and further cells, and no others.
            "contained": it holds the backup's, and none that was deleted. Else it was not asked for.
    """

    written: Written
    resumed: bool
    verified: Verified


@dataclass(slots=True)
class Restore:
    """One restore.

    Args:
        into_non_empty: whether the bucket may hold data. Keys deleted at the restore point are then deleted, other
            keys stay.
        verify: whether the bucket is read back and compared.
        say: called with a line for people.
        progress: called with what is done, and partitions done and in all.
        group_bytes: about how much is in memory at a time.
    """

    point: Point
    client: Client
    bucket: Bucket
    key_prefix: bytes = b""
    into_non_empty: bool = False
    verify: bool = True
    say: Callable[[str], Any] = lambda words: None
    progress: Callable[[str, int, int], Any] = lambda what, done, total: None
    group_bytes: int = GROUP_BYTES
    _highs: Ends = field(default_factory=dict)

    def run(self) -> Restored:
        """Write, compare, and return what came of it.

        Raises:
            NotEmptyError: the bucket holds data that is not an interrupted run's of this restore.
            RepositoryDamagedError: a file cannot be read, or the bucket does not hold what was written.
            UprError: the server failed or refused; the next run of the same goes on.
        """
        journal, done = self._interrupted()
        if journal is None:
            journal = Journal.begin(
                self.point.repository.storage,
                self._what(),
                self.point.groups(self.group_bytes),
                self.say,
            )
        else:
            self.say(
                f"going on with an interrupted restore: {len(done)} of {len(journal.groups)} groups are there"
            )
        self._write(journal, done)
        if self.verify:
            self._compare(journal)
        journal.end()
        how: Verified = "contained" if self.into_non_empty else "equal"
        return Restored(
            _sum(done.values()),
            journal.resumed,
            how if self.verify else "not verified",
        )

    def look(self, is_there: bool) -> Restored:
        """Read and check everything, and return what ``run`` would write; nothing is written. Raises as ``run``.

        Args:
            is_there: whether the bucket exists; else it counts as empty.
        """
        journal = self._interrupted()[0] if is_there else None
        groups = self.point.groups(self.group_bytes)
        written = [
            _counted(self.point.state(group, self.key_prefix))
            for group in each_group(groups, partial(self.progress, "read"))
        ]
        return Restored(_sum(written), journal is not None, "not verified")

    def _interrupted(self) -> tuple[Journal | None, dict[int, Written]]:
        """Check that the bucket holds nothing but what an interrupted run wrote; returns its journal, None without,
        and the groups that are done.
        """
        found = self.client.admin.partitions(self.bucket)
        if any(info.state in ("replica", "pending") for info in found):
            # A replica that is behind shows what is full as empty. Where a read goes, the next question goes too.
            self.bucket.get(self.key_prefix or b"-")
            found = self.client.admin.partitions(self.bucket)
        self._highs = {info.partition: info.high_seqno for info in found}
        journal = self._found_journal()
        if journal is None:
            self._refuse(p for p, high in self._highs.items() if high)
            return None, {}
        done = self._done(journal)
        self._check_own(journal.groups, done)
        return journal, done

    def _what(self) -> Json:
        """Return all that makes a restore the same one."""
        return {
            "repository": self.point.repository.id,
            "number": self.point.manifest.number,
            "cut": self.point.manifest.cut_name,
            "bucket_version": f"{self.bucket.version:016x}",
            "partitions": None if self.point.chosen is None else list(self.point.chosen),
            "key_prefix": self.key_prefix.hex(),
            "into_non_empty": self.into_non_empty,
        }

    def _found_journal(self) -> Journal | None:
        try:
            found = Journal.find(self.point.repository.storage, self._what())
        except PermissionError:
            return None
        if found is None:
            return None
        # More where a merge meanwhile left nothing of a partition; with fewer something would not be restored.
        planned = {p for group in found.groups for p in group}
        return found if planned.issuperset(self.point.counted) else None

    # What is there already.

    def _done(self, journal: Journal) -> dict[int, Written]:
        """Return the groups that were written, and whose partitions nobody wrote to since."""
        done = {}
        for index, record in journal.recorded().items():
            try:
                ends = {int(p): end for p, end in record["ends"].items()}
                counts = (int(record[name]) for name in Written._fields)
                whole = ends.keys() == set(journal.groups[index])
                if whole and ends.items() <= self._highs.items():
                    done[index] = Written(*counts)
            except NOT_WRITTEN_HERE:
                # It is written once more.
                continue
        return done

    def _check_own(self, groups: Sequence[Sequence[int]], done: Mapping[int, Any]) -> None:
        """Check that what the bucket holds besides the groups that are done was written by this very restore."""
        planned = {p for group in groups for p in group}
        self._refuse(p for p, high in self._highs.items() if high and p not in planned)
        if self.into_non_empty:
            return
        for index, group in enumerate(groups):
            used = [p for p in group if self._highs.get(p)]
            if index in done or not used:
                continue
            expected = live(self.point.state(used, self.key_prefix))
            found = read_newest(self.bucket, used)
            foreign = found.num_rows - live(found).num_rows
            against = differences(live(found), expected)
            if foreign or against.missing or against.different:
                self._refuse(used)

    def _refuse(self, used: Iterable[int]) -> None:
        """Raise NotEmptyError where partitions hold data that they should not."""
        count = len(list(used))
        if count and not self.into_non_empty:
            raise NotEmptyError(
                f"the bucket {self.bucket.name!r} holds data in {count} partitions that this restore did not write",
                hint="restore into an empty one, or say --into-non-empty: then keys of the backup replace those there",
            )

    # Writing.

    def _write(self, journal: Journal, done: dict[int, Written]) -> None:
        groups = each_group(journal.groups, partial(self.progress, "restored"))
        for index, group in enumerate(groups):
            if index not in done:
                done[index], ends = self._write_group(group)
                record = {**done[index]._asdict(), "ends": {str(p): end for p, end in ends.items()}}
                journal.record(index, record, self.say)

    def _write_group(self, group: Sequence[int]) -> tuple[Written, Ends]:
        """Write the state of some partitions, and return where they end then; 0 where the server forgot it."""
        table = self.point.state(group, self.key_prefix)
        alive = live(table)
        rows = table if self.into_non_empty else alive
        ends = {p: self._highs.get(p, 0) for p in group}
        if rows.num_rows:
            for partition, _, end, _ in write_blocks(self.bucket, _blocks(rows)).runs:
                ends[partition] = end
        return _counted(table), ends

    # Comparing.

    def _compare(self, journal: Journal) -> None:
        if not self.into_non_empty:
            self._compare_rest(journal)
        for group in each_group(journal.groups, partial(self.progress, "compared")):
            self._end_if(self._difference(group), journal, f"{group[0]} to {group[-1]}")

    def _difference(self, group: Sequence[int]) -> Differences:
        expected = self.point.state(group, self.key_prefix)
        if not self.into_non_empty:
            return differences(live(expected), live(read_newest(self.bucket, group)))
        found = read_newest(self.bucket, group, keep=only_keys(expected.column("key")))
        return differences(live(expected), live(found))

    def _compare_rest(self, journal: Journal) -> None:
        """Check that partitions of which the backup has nothing hold nothing."""
        planned = {p for group in journal.groups for p in group}
        rest = [p for p in self._highs if p not in planned]
        if not rest:
            return
        found = live(read_newest(self.bucket, rest))
        unexpected = differences(BUCKET_SCHEMA.empty_table(), found)
        self._end_if(unexpected, journal, "that the backup has nothing of")

    def _end_if(self, found: Differences, journal: Journal, which: str) -> None:
        """Raise RepositoryDamagedError where partitions differ, and end the journal."""
        if found:
            # What is wrong is not mended by going on.
            journal.end()
            raise RepositoryDamagedError(
                f"the bucket {self.bucket.name!r} does not hold what was restored: in partitions {which} are "
                f"{found.words()}",
                hint="did somebody else write meanwhile?",
            )
