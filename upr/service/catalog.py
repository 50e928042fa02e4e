"""The buckets of one server, by name."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from upr.config import ServerConfig
from upr.engine.partitions import ACTIVE
from upr.service.host import BucketHost, new_failover_id
from upr.storage.directory import DataDirectory
from upr.storage.journal import Journal
from upr.storage.keyspace import PartitionRow
from upr.storage.store import Identity, Store
from upr_protocol.errors import BucketNotFoundError, InvalidArgumentError
from upr_protocol.failover import FailoverLog, check_partition
from upr_protocol.limits import NAME_BYTES_MAX, PARTITIONS

DEFAULT_BUCKET = "default"


def check_name(name: str, what: str) -> str:
    """Return a name of 1 to 200 bytes of UTF-8 without control characters, or raise InvalidArgumentError."""
    size = len(name.encode())
    if not 1 <= size <= NAME_BYTES_MAX:
        raise InvalidArgumentError(f"{what} name of {size} bytes, it has 1 to {NAME_BYTES_MAX}")
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        raise InvalidArgumentError(f"{what} name {name!r} holds control characters")
    return name


def create_bucket(directory: DataDirectory, name: str) -> Path:
    """Make a bucket: every partition active, born with one failover record at 0."""
    identity = Identity(check_name(name, "bucket"), 1 + secrets.randbelow(2**64 - 1))
    folder = directory.new_bucket(identity.version)
    store = Store(folder / "store")
    rows = {
        partition: PartitionRow(ACTIVE, 1, 0, 0, 0, FailoverLog.born(new_failover_id()))
        for partition in range(PARTITIONS)
    }
    store.create(identity, rows)
    store.close()
    Journal(folder / "journal", identity.version).close()
    return directory.bucket_created(folder)


class Catalog:
    """Opens every bucket of a data directory; the bucket ``default`` exists from the start.

    Raises:
        DataDirectoryError, DataDamagedError: a bucket cannot be opened.
    """

    def __init__(self, directory: DataDirectory, config: ServerConfig) -> None:
        self._hosts: dict[str, BucketHost] = {}
        for folder in directory.buckets():
            self._add(BucketHost(folder, config))
        if DEFAULT_BUCKET not in self._hosts:
            self._add(BucketHost(create_bucket(directory, DEFAULT_BUCKET), config))

    def _add(self, host: BucketHost) -> None:
        self._hosts[host.bucket.identity.name] = host

    @property
    def hosts(self) -> list[BucketHost]:
        """All open buckets."""
        return list(self._hosts.values())

    def find(self, name: str, version: int | None = None) -> BucketHost:
        """Return a bucket.

        Raises:
            BucketNotFoundError: there is none of that name, or it has another version.
        """
        host = self._hosts.get(name)
        if host is None:
            raise BucketNotFoundError(
                f"there is no bucket {name!r}", hint=f"known: {', '.join(sorted(self._hosts))}"
            )
        known = host.bucket.identity.version
        if version is not None and version != known:
            raise BucketNotFoundError(
                f"bucket {name!r} has version {known:016x}, not {version:016x}: it was created anew",
                hint="what was known of the old one is void; begin from 0",
            )
        return host

    def of(self, request: Any) -> BucketHost:
        """Return the bucket that a request names by ``bucket`` and, if it knows it, ``bucket_version``.

        Raises:
            BucketNotFoundError: see ``find``.
        """
        known = request.HasField("bucket_version")
        return self.find(request.bucket, request.bucket_version if known else None)


def chosen_partitions(partitions: Sequence[int]) -> list[int]:
    """Return the partitions asked for, all for none; InvalidArgumentError for one out of range or repeated."""
    if not partitions:
        return list(range(PARTITIONS))
    if len(partitions) > PARTITIONS:
        raise InvalidArgumentError(f"{len(partitions)} partitions named, there are {PARTITIONS}")
    chosen = [check_partition(partition) for partition in partitions]
    if len(set(chosen)) != len(chosen):
        raise InvalidArgumentError("a partition is named twice in one request")
    return chosen
