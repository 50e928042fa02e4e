"""Looking for damage in a repository."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from upr_protocol.limits import PARTITIONS
from upr_protocol.partitioning import partitions_of
from upr_spark.backup.errors import RepositoryDamagedError, is_damage
from upr_spark.backup.manifest import FileRef, Manifest
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage
from upr_spark.backup.tables import read_rows

_CHUNK = 2**20
_MERGED = {"full": "", "incremental": "", "merged": ", merged"}


def verify(
    repository: Repository, full: bool, progress: Callable[[int, int], Any]
) -> Iterator[str]:
    """Yield everything that is wrong, as one line each.

    Args:
        repository: it was opened, so its own document is right.
        full: whether every data file is read, and not only looked at for its size.
        progress: called with files done and files in all.

    Raises:
        OSError, UprError: something cannot be reached, or may not be read, which says nothing of damage.
    """
    wrong: list[str] = []
    chain = repository.chain(wrong.append)
    yield from wrong
    if not wrong:
        for name in repository.lost_manifests(chain):
            yield f"{name} is missing: its data is there"
    total = chain.files
    done = 0
    for manifest in chain.rests_on():
        for index, file in enumerate(manifest.files):
            progress(done, total)
            problem = _file_problem(repository.storage, file, full)
            if not problem and full:
                problem = _rows_problem(repository.storage, manifest, index)
            if problem:
                yield f"backup {manifest.number}{_MERGED[manifest.kind]}: {problem}"
            done += 1
    progress(done, total)


def check_files(storage: Storage, files: set[FileRef]) -> None:
    """Check that data files are as they were written.

    Raises:
        RepositoryDamagedError: one is not, or is missing.
        OSError, UprError: one cannot be reached, or may not be read.
    """
    for file in sorted(files, key=lambda file: file.path):
        problem = _file_problem(storage, file, True)
        if problem:
            raise RepositoryDamagedError(
                problem, hint="upr-backup REPOSITORY verify --full tells all that is damaged"
            )


def _file_problem(storage: Storage, file: FileRef, full: bool) -> str:
    try:
        size = storage.size(file.path)
        if size != file.bytes:
            return f"{file.path} has {size} bytes, it was written with {file.bytes}"
        if full and _sha256(storage, file) != file.sha256:
            return f"{file.path} is damaged: its SHA-256 is not the one it was written with"
    except FileNotFoundError:
        return f"{file.path} is missing"
    except OSError as error:
        if not is_damage(error):
            raise
        return f"{file.path} cannot be read: {error.strerror or error}"
    return ""


def _sha256(storage: Storage, file: FileRef) -> str:
    digest = hashlib.sha256()
    with storage.open(file.path) as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _rows_problem(storage: Storage, manifest: Manifest, index: int) -> str:
    """Return what is wrong with a file's rows: not those that the manifest tells, or not in order."""
    file = manifest.files[index]
    entries = {p: entry for p, entry in manifest.entries.items() if entry.file == index}
    rows = np.zeros(PARTITIONS, np.int64)
    # The seqno that each partition has reached; from the beginning of its range on.
    reached = np.zeros(PARTITIONS, np.int64)
    for partition, entry in entries.items():
        reached[partition] = entry.start
    try:
        for batch in read_rows(storage, file, range(PARTITIONS)):
            partitions = batch.column("partition").to_numpy()
            seqnos = batch.column("seqno").to_numpy()
            if (partitions_of(batch.column("key").to_pylist()) != partitions).any():
                return f"{file.path} has a key in a partition that it does not belong to"
            for partition in np.unique(partitions).tolist():
                own = seqnos[partitions == partition]
                if (np.diff(own, prepend=reached[partition]) <= 0).any():
                    return f"{file.path}: the seqnos of partition {partition} do not rise"
                reached[partition] = own[-1]
            rows += np.bincount(partitions, minlength=PARTITIONS)
    except RepositoryDamagedError as error:
        return str(error)
    for partition in range(PARTITIONS):
        known = entries.get(partition)
        if rows[partition] != (known.rows if known else 0):
            return f"{file.path} has {rows[partition]} rows of partition {partition}, the manifest says {known.rows if known else 0}"
        if known is not None and reached[partition] > known.end:
            return f"{file.path} has rows of partition {partition} above {known.end}"
    return ""
