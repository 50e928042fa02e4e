"""The one function for a group of partitions, run by every engine."""

from collections.abc import Callable
from typing import Any

from upr_client import Client
from upr_spark.backup.documents import Json
from upr_spark.backup.errors import RepositoryError
from upr_spark.backup.groups import GroupResult, GroupSpec, stage_read
from upr_spark.backup.repository import Repository
from upr_spark.backup.server import read_group
from upr_spark.backup.storage import open_storage


def backup_group(
    spec: GroupSpec,
    progress: Callable[[int], Any] = lambda rows: None,
) -> Json:
    """Read a group over a connection of its own, write and record it; returns the record that counts.

    Args:
        spec: the group.
        progress: called with the rows read since the last call; what it raises ends the reading.

    Raises:
        HistoryChangedError: the cut is gone, or the server rolled back what was being read.
        RepositoryError: there is another repository at the location.
        UprError: the server or the storage failed.
        OSError: the storage failed.
    """
    repository = Repository.open(open_storage(spec.location))
    if repository.bucket_version != spec.bucket_version:
        raise RepositoryError(f"there is another repository in {spec.location} by now")
    with Client(spec.target, retry_seconds=spec.patience) as client:
        bucket = client.bucket(spec.bucket)

        def read(spec: GroupSpec, path: str) -> GroupResult:
            return read_group(bucket, repository.storage, spec, path, progress)

        return stage_read(repository, spec, read)
