"""Documents of a repository: JSON with a digest, compressed, and the manifests that say what a backup added.

A document is a line ``upr-backup FORMAT SHA256`` and then the JSON text as gzip. The SHA-256 is of the line's first
part and all that is behind the line, so no bit can change unnoticed. ``tail -n +2 FILE | gzip -dc`` shows the text.

A manifest names for each partition the seqnos (start, end] that its backup added. Where the server had rolled back,
it has a cut as well: rows of earlier backups above the cut do not count from this backup on, and before it they do.
"""

import hashlib
import json
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from upr_backup.errors import RepositoryDamagedError, RepositoryError
from upr_protocol.limits import PARTITIONS, SEQNO_MAX


def now_micros() -> int:
    return round(time.time() * 1e6)


Json = dict[str, Any]

FORMAT = 2
"""Of everything in a repository. A program that does not know it must not guess."""

_HEAD: Final = re.compile(rb"(upr-backup ([1-9][0-9]{0,8}) )([0-9a-f]{64})\n")
_FIRST_FORMAT: Final = b'{"content":'
_GZIP: Final = 16 + zlib.MAX_WBITS
_TEXT_BYTES_MAX: Final = 64 * 2**20
"""Of a document that is unpacked: twice what 1024 partitions with failover logs of 1000 records take."""
_COUNT_MAX: Final = 2**60
_NUMBER_MAX: Final = 9_999_999_999
MICROS_MAX: Final = 253_402_214_400_000_000
"""The last day of the year 9999, which is as far as dates go."""


def canonical(value: object) -> bytes:
    """Return the one text of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(content: Json) -> bytes:
    """Return a document with its format and the SHA-256 of all its bytes."""
    packed = zlib.compress(canonical(content), wbits=_GZIP)
    head = b"upr-backup %d " % FORMAT
    return head + sha256(head + packed).encode() + b"\n" + packed


def unseal(data: bytes, name: str) -> Json:
    """Return the content of a document that ``seal`` made.

    Raises:
        RepositoryDamagedError: a byte is not as it was written.
        RepositoryError: it is of another format.
    """
    head = _HEAD.match(data)
    if head is None:
        # The first format was JSON, and compressed nothing.
        if data.startswith(_FIRST_FORMAT):
            raise _other_format(name, 1)
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document")
    packed = data[head.end() :]
    if sha256(head[1] + packed).encode() != head[3]:
        raise RepositoryDamagedError(f"{name} is damaged: its SHA-256 does not fit its content")
    if int(head[2]) != FORMAT:
        raise _other_format(name, int(head[2]))
    try:
        content = json.loads(_unpacked(packed))
    except (ValueError, zlib.error, RecursionError) as error:
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document") from error
    if not isinstance(content, dict):
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document")
    return content


def _unpacked(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    text = unpacker.decompress(packed, _TEXT_BYTES_MAX)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("more, or less, than one whole text")
    return text


def _other_format(name: str, found: int) -> RepositoryError:
    return RepositoryError(
        f"{name} has format {found}, this program reads {FORMAT}",
        hint="use the program that wrote it, or a newer one",
    )


Kind = Literal["full", "incremental", "merged"]

_PARENT: Final = re.compile(r"[0-9a-f]{64}(\+[0-9]{1,10})?")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = re.compile(r"(data/[0-9]{10}|merged/[0-9]{10}-[0-9a-f]{16})/[0-9a-f]{16}\.parquet")
"""The only names that a manifest may give to what is read."""


class FileRef(NamedTuple):
    """A data file: its name in the repository, its size, the SHA-256 of its bytes in hex, and how many rows it has."""

    path: str
    bytes: int
    sha256: str
    rows: int


class Entry(NamedTuple):
    """What a backup has of one partition.

    Args:
        start: the backup adds what is above this seqno. In a full backup 0; else the cut if there is one, else the
            end of the backup before.
        end: the marker that it reaches. At or above start.
        cut: rows of earlier backups above it do not count from here on; None: all stay.
        rows: how many rows it adds.
        data_bytes: of their keys and values.
        file: index among the manifest's files; None without rows.
        position: where the next backup goes on, as ``Position.to_document``: failover ids, log and markers; None when
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
    """A rollback that the server demanded of a backup: from up to where the chain had data to up to where that stays."""

    partition: int
    from_seqno: int
    seqno: int
    words: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed backup, or a merged base: the state at one, without history.

    Args:
        number: 1 for the first of a repository.
        parent: SHA-256 of the manifest before, or of the repository's own document; behind it "+57" when the run knew
            that what is before 57 has expired. Of a merged base: SHA-256 of the manifest of its number.
        cut_name: of the cut it was taken at.
        cut_time: when that was made, by the server's clock; microseconds since the epoch.
        started, finished: by this machine's clock; microseconds since the epoch.
        entries: of every partition.
        rollbacks: what the server rolled back since the backup before.
        left_out: why partitions were left out: dead at the server, they are as they were in the backup before.
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
    left_out: Mapping[int, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.entries.values())

    @property
    def file_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def parent_sha256(self) -> str:
        return self.parent.partition("+")[0]

    @property
    def seen(self) -> int:
        """The first number that had not expired when its run began, as far as the run knew; 0 when none had."""
        return int(self.parent.partition("+")[2] or 0)

    def without_positions(self) -> Self:
        """Return it without the positions, which are most of it in memory."""
        entries = {p: entry._replace(position=None) for p, entry in self.entries.items()}
        return replace(self, entries=entries)

    def to_json(self) -> Json:
        return {
            "number": self.number,
            "kind": self.kind,
            "repository": self.repository,
            "parent": self.parent,
            "cut": {"name": self.cut_name, "time": self.cut_time},
            "started": self.started,
            "finished": self.finished,
            "files": [file._asdict() for file in self.files],
            "partitions": {str(p): entry_to_json(entry) for p, entry in self.entries.items()},
            "rollbacks": [list(rollback) for rollback in self.rollbacks],
            "left_out": {str(p): words for p, words in self.left_out.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], name: str) -> Self:
        """Return the manifest that ``to_json`` gave; RepositoryDamagedError for anything else."""
        try:
            manifest = cls(
                number_from_json(content["number"], "number", _NUMBER_MAX, 1),
                content["kind"],
                text_from_json(content["repository"], "repository"),
                text_from_json(content["parent"], "parent"),
                text_from_json(content["cut"]["name"], "the cut's name"),
                number_from_json(content["cut"]["time"], "the cut's time", MICROS_MAX),
                number_from_json(content["started"], "started", MICROS_MAX),
                number_from_json(content["finished"], "finished", MICROS_MAX),
                tuple(file_from_json(file) for file in content["files"]),
                {int(p): entry_from_json(e) for p, e in sorted(content["partitions"].items())},
                tuple(rolled_back_from_json(rollback) for rollback in content["rollbacks"]),
                # A repository may have manifests of before there was this field.
                {
                    int(p): text_from_json(words, "left_out")
                    for p, words in content.get("left_out", {}).items()
                },
            )
            wrong = _what_is_wrong(manifest)
        except NOT_WRITTEN_HERE as error:
            raise RepositoryDamagedError(f"{name} is no manifest: {_short(error)}") from error
        if wrong:
            raise RepositoryDamagedError(f"{name} is no manifest: {wrong}")
        return manifest


@dataclass(frozen=True, slots=True)
class Expiry:
    """What is before a number has expired.

    Args:
        number: the first that stays.
        sha256: of the manifest of that number, so that the chain can be checked from there on.
        base: the name of the merged base that what stays rests on; "" when the backup is a full one.
        time: when it was decided, by this machine's clock; microseconds since the epoch.
    """

    number: int
    repository: str
    sha256: str
    base: str
    time: int

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], name: str) -> Self:
        """Return the expiry that ``to_json`` gave; RepositoryDamagedError for anything else."""
        try:
            number_from_json(content["number"], "number", _NUMBER_MAX, 1)
            number_from_json(content["time"], "time", MICROS_MAX)
            for text in ("repository", "sha256", "base"):
                text_from_json(content[text], text)
            return cls(*(content[one.name] for one in fields(cls)))
        except NOT_WRITTEN_HERE as error:
            raise RepositoryDamagedError(f"{name} is no expiry: {_short(error)}") from error


_ENTRY: Final = ("from", "to", "cut", "rows", "data_bytes", "file", "position")
"""Fields of an entry in JSON."""


NOT_WRITTEN_HERE: Final = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions that are raised where a document that somebody else wrote is taken apart."""


def number_from_json(value: object, name: str, high: int, low: int = 0) -> int:
    """Return an integer in a range; ValueError for anything else, also for a bool or 1.0."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.40}; must be an integer from {low} to {high}")
    return value


def text_from_json(value: object, name: str) -> str:
    """Return a text; ValueError for anything else. What would change a terminal comes back as an escape."""
    if type(value) is not str:
        raise ValueError(f"{name} is {str(value)[:40]}; must be a text")
    return value if value.isprintable() else value.encode("unicode_escape").decode()


def _short(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)[:200]


def file_from_json(document: Mapping[str, Any]) -> FileRef:
    """Return the data file whose ``_asdict`` this was; one of NOT_WRITTEN_HERE for any other, or one outside of a repository."""
    file = FileRef(*(document[name] for name in FileRef._fields))
    if type(file.path) is not str or not _FILE.fullmatch(file.path):
        raise ValueError(f"{str(file.path)[:60]!r} is no name of a data file")
    if type(file.sha256) is not str or not _DIGEST.fullmatch(file.sha256):
        raise ValueError(f"the SHA-256 of {file.path} is {str(file.sha256)[:70]!r}")
    number_from_json(file.bytes, "a file's bytes", _COUNT_MAX)
    number_from_json(file.rows, "a file's rows", _COUNT_MAX, 1)
    return file


def rolled_back_from_json(values: Any) -> RolledBack:
    """Return the rollback that was stored as a list; one of NOT_WRITTEN_HERE for anything else."""
    found = RolledBack(*values)
    number_from_json(found.partition, "a partition", PARTITIONS - 1)
    number_from_json(found.from_seqno, "a seqno", SEQNO_MAX)
    number_from_json(found.seqno, "a seqno", SEQNO_MAX)
    return found._replace(words=text_from_json(found.words, "why it was rolled back"))


def entry_to_json(entry: Entry) -> Json:
    return dict(zip(_ENTRY, entry, strict=True))


def entry_from_json(document: Mapping[str, Any]) -> Entry:
    """Return the entry that ``entry_to_json`` gave; one of NOT_WRITTEN_HERE for anything else."""
    entry = Entry(*(document[name] for name in _ENTRY))
    number_from_json(entry.end, "to", SEQNO_MAX)
    number_from_json(entry.start, "from", entry.end)
    number_from_json(entry.rows, "rows", entry.end - entry.start)
    number_from_json(entry.data_bytes, "data_bytes", _COUNT_MAX)
    if entry.cut is not None:
        number_from_json(entry.cut, "cut", SEQNO_MAX)
    if entry.file is not None:
        number_from_json(entry.file, "file", _COUNT_MAX)
    if entry.position is not None:
        text_from_json(entry.position["failover_id"], "failover_id")
        if not all(type(marker) is int for marker in entry.position["markers"]):
            raise ValueError("a marker is no integer")
    return entry


def _what_is_wrong(manifest: Manifest) -> str:
    if manifest.kind not in get_args(Kind):
        return f"kind is {manifest.kind!r:.80}"
    if not _PARENT.fullmatch(manifest.parent):
        return f"parent is {manifest.parent!r:.80}"
    for partition, entry in manifest.entries.items():
        if not 0 <= partition < PARTITIONS:
            return f"it names partition {partition}"
        if (entry.file is None) != (entry.rows == 0):
            return f"partition {partition} has {entry.rows} rows and file {entry.file}"
        if entry.file is not None and not 0 <= entry.file < len(manifest.files):
            return f"partition {partition} names file {entry.file}"
        if manifest.kind == "merged" and (entry.start, entry.cut) != (0, None):
            return f"partition {partition} does not begin at 0"
    for partition in manifest.left_out:
        if partition not in manifest.entries or manifest.entries[partition].rows:
            return f"partition {partition} was left out, and has rows"
    if manifest.rows != sum(file.rows for file in manifest.files):
        return "its files have other rows than its partitions"
    return ""


def check_link(before: Manifest | None, manifest: Manifest) -> None:
    """Raise RepositoryDamagedError where a manifest does not continue the one before it, in every partition."""
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


def time_text(micros: int) -> str:
    """Return microseconds since the epoch in RFC 3339, in UTC."""
    return datetime.fromtimestamp(micros / 1e6, UTC).isoformat(timespec="milliseconds")
