"""What a chain of backups means: which rows count at which restore point. Pure: no I/O, no clock, no randomness.

A manifest names for each partition the seqnos (start, end] that its backup added. Where the server had rolled back,
it has a cut as well: rows of earlier backups above the cut do not count from this backup on, and before it they do.
The server sends only the newest version of a key within a range, so the state at a restore point is: of each key the
row with the highest seqno among those that count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Self

from upr_protocol.limits import PARTITIONS
from upr_spark.backup.documents import Json
from upr_spark.backup.errors import BackupNotFoundError, RepositoryDamagedError

Kind = Literal["full", "incremental"]

_KINDS: Final = ("full", "incremental")


@dataclass(frozen=True, slots=True)
class FileRef:
    """A data file.

    Args:
        path: its name in the repository.
        bytes: its size.
        sha256: of its bytes, in hex.
        rows: how many.
    """

    path: str
    bytes: int
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What a backup has of one partition.

    Args:
        start: the backup adds what is above this seqno. In a full backup 0; else the cut if there is one, else the
            end of the backup before.
        end: the marker that it reaches. At or above start.
        cut: rows of earlier backups above it do not count from here on; None: all stay.
        rows: how many rows it adds.
        data_bytes: of their keys and values.
        file: index among the manifest's files; None without rows.
        position: where the next backup goes on, as ``Position.to_json``: failover ids, log and markers; None when
            the partition is empty.
    """

    start: int
    end: int
    cut: int | None
    rows: int
    data_bytes: int
    file: int | None
    position: Json | None


class RolledBack(NamedTuple):
    """A rollback that a backup was told of.

    Args:
        partition: 0 to 1023.
        from_seqno: up to where the chain had data.
        seqno: up to where it stays.
        words: why.
    """

    partition: int
    from_seqno: int
    seqno: int
    words: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed backup.

    Args:
        number: 1 for the first of a repository.
        kind: a full one needs none before it.
        repository: the repository's id.
        parent: SHA-256 of the manifest before, or of the repository's own document.
        cut_name: of the cut it was taken at.
        cut_time: when that was made, by the server's clock; microseconds since the epoch.
        started, finished: by this machine's clock; microseconds since the epoch.
        files: the data files.
        entries: of every partition.
        rollbacks: what the server rolled back since the backup before.
    """

    number: int
    kind: Kind
    repository: str
    parent: str
    cut_name: str
    cut_time: int
    started: int
    finished: int
    files: tuple[FileRef, ...]
    entries: Mapping[int, Entry]
    rollbacks: tuple[RolledBack, ...]

    @property
    def rows(self) -> int:
        """How many rows it adds."""
        return sum(entry.rows for entry in self.entries.values())

    @property
    def file_bytes(self) -> int:
        """The size of its data files."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> Json:
        """Return it as a JSON object."""
        return {
            "number": self.number,
            "kind": self.kind,
            "repository": self.repository,
            "parent": self.parent,
            "cut": {"name": self.cut_name, "time": self.cut_time},
            "started": self.started,
            "finished": self.finished,
            "files": [file_to_json(file) for file in self.files],
            "partitions": {str(p): entry_to_json(entry) for p, entry in self.entries.items()},
            "rollbacks": [list(rollback) for rollback in self.rollbacks],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], name: str) -> Self:
        """Return the manifest that ``to_json`` gave.

        Raises:
            RepositoryDamagedError: a field is missing or makes no sense.
        """
        try:
            manifest = cls(
                content["number"],
                content["kind"],
                content["repository"],
                content["parent"],
                content["cut"]["name"],
                content["cut"]["time"],
                content["started"],
                content["finished"],
                tuple(file_from_json(file) for file in content["files"]),
                {int(p): entry_from_json(e) for p, e in sorted(content["partitions"].items())},
                tuple(RolledBack(*rollback) for rollback in content["rollbacks"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RepositoryDamagedError(f"{name} is no manifest: {error!r}") from error
        wrong = _what_is_wrong(manifest)
        if wrong:
            raise RepositoryDamagedError(f"{name} is no manifest: {wrong}")
        return manifest


class Segment(NamedTuple):
    """Rows that count: those of a partition with ``low < seqno <= high`` in one file."""

    file: FileRef
    low: int
    high: int


def file_to_json(file: FileRef) -> Json:
    """Return a data file as a JSON object."""
    return {"path": file.path, "bytes": file.bytes, "sha256": file.sha256, "rows": file.rows}


def file_from_json(document: Mapping[str, Any]) -> FileRef:
    """Return the data file that ``file_to_json`` gave."""
    return FileRef(document["path"], document["bytes"], document["sha256"], document["rows"])


def entry_to_json(entry: Entry) -> Json:
    """Return a partition's entry as a JSON object."""
    return {
        "from": entry.start,
        "to": entry.end,
        "cut": entry.cut,
        "rows": entry.rows,
        "data_bytes": entry.data_bytes,
        "file": entry.file,
        "position": entry.position,
    }


def entry_from_json(document: Mapping[str, Any]) -> Entry:
    """Return the entry that ``entry_to_json`` gave."""
    return Entry(
        document["from"],
        document["to"],
        document["cut"],
        document["rows"],
        document["data_bytes"],
        document["file"],
        document["position"],
    )


def _what_is_wrong(manifest: Manifest) -> str:
    if manifest.kind not in _KINDS:
        return f"kind is {manifest.kind!r}"
    for partition, entry in manifest.entries.items():
        if not 0 <= partition < PARTITIONS:
            return f"it names partition {partition}"
        if not 0 <= entry.start <= entry.end:
            return f"partition {partition} has a range from {entry.start} to {entry.end}"
        if (entry.file is None) != (entry.rows == 0):
            return f"partition {partition} has {entry.rows} rows and file {entry.file}"
        if entry.file is not None and not 0 <= entry.file < len(manifest.files):
            return f"partition {partition} names file {entry.file}"
    if manifest.rows != sum(file.rows for file in manifest.files):
        return "its files have other rows than its partitions"
    return ""


def check_link(before: Manifest | None, manifest: Manifest) -> None:
    """Check that a manifest continues the one before it, in every partition.

    Raises:
        RepositoryDamagedError: it does not.
    """
    what = f"backup {manifest.number}"
    if manifest.number != (before.number if before else 0) + 1:
        raise RepositoryDamagedError(f"{what} does not follow the backup before it")
    if before is None and manifest.kind != "full":
        raise RepositoryDamagedError(f"{what} is the first one and not full")
    for partition, entry in manifest.entries.items():
        reached = 0
        if before is not None and manifest.kind == "incremental":
            reached = before.entries[partition].end if partition in before.entries else 0
        cut = reached if entry.cut is None else entry.cut
        if entry.start != cut or cut > reached:
            raise RepositoryDamagedError(
                f"{what}: partition {partition} goes on from {entry.start}, but the backup before reaches {reached}"
            )
    if before is not None and set(before.entries) != set(manifest.entries):
        raise RepositoryDamagedError(f"{what} has other partitions than the backup before it")


def needed(chain: Sequence[Manifest], number: int) -> Sequence[Manifest]:
    """Return the backups that a restore point rests on: from the newest full one at or before it.

    Raises:
        BackupNotFoundError: there is none of that number.
    """
    if not 1 <= number <= len(chain):
        there = f"there are 1 to {len(chain)}" if chain else "there is none yet"
        raise BackupNotFoundError(f"there is no backup {number}", hint=there)
    first = max(m.number for m in chain[:number] if m.kind == "full")
    return chain[first - 1 : number]


def segments(chain: Sequence[Manifest], number: int) -> dict[int, list[Segment]]:
    """Return for each partition the rows that count at a restore point, in the order of their seqnos.

    Args:
        chain: all backups, from 1 on.
        number: of the restore point.

    Raises:
        BackupNotFoundError: there is none of that number.
    """
    counted: dict[int, list[Segment]] = {}
    for manifest in needed(chain, number):
        for partition, entry in manifest.entries.items():
            parts = counted.setdefault(partition, [])
            if entry.cut is not None:
                parts[:] = [
                    part._replace(high=min(part.high, entry.cut))
                    for part in parts
                    if part.low < entry.cut
                ]
            if entry.file is not None:
                parts.append(Segment(manifest.files[entry.file], entry.start, entry.end))
    return {partition: parts for partition, parts in counted.items() if parts}
