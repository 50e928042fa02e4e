"""A repository that is written by hand, without a server: what it holds is known row by row."""

from collections.abc import Iterable, Mapping
from itertools import count as count_up
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from upr_backup.repository import LocalStorage, Storage
from upr_backup.repository.chain import Link
from upr_backup.repository.documents import Entry, FileRef, Manifest, seal, sha256
from upr_backup.repository.listing_cache import manifest_name, write_index
from upr_backup.repository.repository import Repository
from upr_backup.rows import SCHEMA, RowsWriter
from upr_protocol.partitioning import partition_of

Rows = list[tuple[bytes, bytes | None]]

HOUR = 3600 * 10**6
BEGIN = 1_780_000_000 * 10**6
"""When the first backup was taken; microseconds since the epoch."""


def position(end: int) -> dict[str, Any]:
    """Return where a partition goes on."""
    return {
        "format": 1,
        "bucket_version": "0" * 15 + "1",
        "failover_id": "00000000000000aa",
        "data_id": "00000000000000aa",
        "seqno": end,
        "horizon": 0,
        "markers": [end],
        "log": [["00000000000000aa", 0]],
    }


def keys(count: int, partitions: int = 8) -> list[bytes]:
    """Return keys that lie in the first few partitions."""
    candidates = (b"key:%d" % n for n in count_up())
    return list(islice((k for k in candidates if partition_of(k) < partitions), count))


class Handmade:
    """A repository and what was put into it.

    Args:
        storage: where.
        partitions: how many the bucket has; few make small manifests.
        key: to encrypt with.

    Attributes:
        repository: opened.
        links: of the backups so far.
    """

    def __init__(self, storage: Storage | Path, partitions: int = 8, **key: Any) -> None:
        where = LocalStorage(storage) if isinstance(storage, Path) else storage
        self.repository = Repository.create(where, "default", 1, "127.0.0.1:1", 0, **key)
        self.links: list[Link] = []
        # Each partition is there from the beginning on.
        self._ends = dict.fromkeys(range(partitions), 0)
        self._parent = sha256(where.read("repository.json"))

    def manifest(
        self, files: Iterable[FileRef], entries: Mapping[int, Entry], hours: float = 1.0
    ) -> Manifest:
        """Return the next backup's manifest.

        Args:
            files: its data files.
            entries: of the partitions that it has; those of before stay as they were.
            hours: since the backup before.
        """
        whole = {p: Entry(e, e, None, 0, 0, None, position(e)) for p, e in self._ends.items()}
        whole |= entries
        number = len(self.links) + 1
        time = self.links[-1].cut_time + round(hours * HOUR) if self.links else BEGIN
        about = (self.repository.id, self._parent, f"cut-{number}", time, time, time)
        kind: Any = "incremental" if self.links else "full"
        return Manifest(number, kind, *about, tuple(files), dict(sorted(whole.items())), ())

    def commit(self, manifest: Manifest) -> bytes:
        """Take note of a manifest as the newest one, and return its document, which is not stored yet."""
        data = seal(manifest.to_json())
        self.links.append(Link.of(manifest, sha256(data)))
        self._parent = self.links[-1].sha256
        self._ends |= {p: entry.end for p, entry in manifest.entries.items()}
        return data

    def backup(self, rows: Rows, hours: float = 1.0) -> Manifest:
        """Add a backup with these rows; a None deletes its key."""
        storage, number = self.repository.storage, len(self.links) + 1
        ends, before = dict(self._ends), self._ends
        columns: list[tuple[Any, ...]] = []
        for key, value in rows:
            partition = partition_of(key)
            ends[partition] += 1
            op = "delete" if value is None else "set"
            columns.append((partition, ends[partition], op, key, value, BEGIN + number, None))
        writer = RowsWriter(storage, self.repository.new_data_name(number))
        if columns:
            by_column = list(zip(*columns, strict=True))
            arrays = [pa.array(c, f.type) for c, f in zip(by_column, SCHEMA, strict=True)]
            writer.add_rows(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
        file = writer.finish()
        entries = {}
        for p, end in ends.items():
            count = end - before[p]
            size = int(writer.data_bytes[p])
            entries[p] = Entry(
                before[p], end, None, count, size, 0 if count else None, position(end)
            )
        manifest = self.manifest([file] if file else [], entries, hours)
        storage.put_if_absent(manifest_name(number), self.commit(manifest))
        return manifest


def many(made: Handmade, count: int) -> dict[str, bytes]:
    """Return the documents of so many backups, by name."""
    documents = {}
    for number in range(1, count + 1):
        file = FileRef(f"data/{number:010d}/{number:016x}.parquet", 1000, "0" * 64, 1)
        entry = Entry(number - 1, number, None, 1, 10, 0, None)
        documents[manifest_name(number)] = made.commit(made.manifest([file], {0: entry}))
    return documents


def write_many(folder: Path, count: int) -> None:
    """Make a repository of so many backups without data files; its index lacks as many as it may."""
    made = Handmade(folder, 1)
    documents = many(made, count)
    (folder / "chain").mkdir(exist_ok=True)
    for name, data in documents.items():
        (folder / name).write_bytes(data)
    sizes = {number: len(data) for number, data in enumerate(documents.values(), 1)}
    write_index(made.repository.storage, made.repository.id, made.links[:-15], sizes)
