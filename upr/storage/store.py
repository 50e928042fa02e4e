"""The LMDB store of one bucket.

Write transactions are made by one thread, and each is bounded by its caller. Read transactions are short:
the bytes leave them as copies, so that no reader keeps old pages alive. The map follows the size of the disk and
takes only addresses, so that "disk full" is met before "map full"; where it is not, ``map_room`` tells.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from upr.storage import keyspace
from upr.storage.block_cursor import BlockCursor
from upr.storage.check_pages import check_length
from upr.storage.heads import PEEK_BYTES, Head, Replacement, head_of
from upr.storage.keyspace import ConsumerRow, CutRow, PartitionRow, ProducerRow
from upr_protocol.errors import DataDamagedError, DataDirectoryError
from upr_protocol.limits import PARTITIONS

log = logging.getLogger(__name__)

MAP_BYTES_MIN = 64 * 2**30
MAP_BYTES_USUAL = 3 * 2**40
MAP_BYTES = 16 * 2**40
"""Bounds of a map, see ``map_bytes``. A process has 128 TiB of addresses: BUCKETS_MAX maps of the usual size take 96."""
FORMAT = 2
_MAP_GRAIN = 2**20
_SPARE_READERS = 64
_PROOF = b"clean_shutdown_proof"
_IDENTITY = b"identity"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which bucket this is.

    Attributes:
        name: unique in the server.
        version: a random id given when it was created.
        compression: of stored blocks: empty for none, or ``zstd``. Set when it was created.
    """

    name: str
    version: int
    compression: str = ""


def _seen(key: bytes, value: bytes) -> int:
    """Return when a producer's row was written, 0 for one that is damaged: it is of no use to anybody."""
    try:
        return keyspace.unpack_producer(key, value).time
    except DataDamagedError:
        return 0


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One partition's backfill: blocks that tell of what is above a seqno.

    Attributes:
        token: of the stream that they are for: plain rows carry it, and cost as much credit as they have bytes.
    """

    partition: int
    above: int
    token: int = 0


def map_bytes(folder: Path) -> int:
    """Return how large to make the map of the environment in a folder, in bytes.

    It takes addresses and neither memory nor disk, and is set at each open: twice the file system, so that "disk full"
    is met first and the file system can grow while the server runs. That is cut at MAP_BYTES_USUAL, or at the size of
    a larger file system, so that a server's maps fit beside each other; at least MAP_BYTES_MIN, at most MAP_BYTES,
    and never less than the file that is there.
    """
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize
    wanted = max(MAP_BYTES_MIN, min(2 * size, max(MAP_BYTES_USUAL, size)))
    file = folder / "data.mdb"
    there = file.stat().st_size if file.exists() else 0
    return max(min(wanted, MAP_BYTES), -(-there // _MAP_GRAIN) * _MAP_GRAIN)


class Store:
    """One bucket's LMDB environment.

    Args:
        folder: made if it does not exist.
        size: of the map in bytes, for tests; as ``map_bytes`` says by default.

    Raises:
        DataDirectoryError: the environment is of a newer format, or is none; or its map finds no address space.
        DataDamagedError: its file is no LMDB file, or shorter than it says.
    """

    def __init__(self, folder: Path, size: int | None = None) -> None:
        folder.mkdir(exist_ok=True)
        check_length(folder)
        try:
            self._env = lmdb.open(
                str(folder),
                map_size=map_bytes(folder) if size is None else size,
                max_dbs=8,
                max_readers=_SPARE_READERS,
                readahead=False,
                max_spare_txns=4,
            )
        except lmdb.MemoryError as error:
            raise DataDirectoryError(
                f"{folder}: there are no {size or map_bytes(folder)} bytes of address space left for its map",
                hint="lift the limit of the process (ulimit -v), or drop buckets; the map takes addresses, not memory",
            ) from error
        except lmdb.Error as error:
            raise DataDirectoryError(f"{folder}: cannot be opened as a store: {error}") from error
        try:
            self._meta = self._env.open_db(b"meta")
            self._partitions = self._env.open_db(b"partitions")
            self._blocks = self._env.open_db(b"blocks")
            self._producers = self._env.open_db(b"producers")
            self._cuts = self._env.open_db(b"cuts")
            self._consumers = self._env.open_db(b"consumers")
            self._page = int(self._env.stat()["psize"])
        except lmdb.Error as error:
            self._env.close()
            raise DataDamagedError(f"{folder}: the store is damaged: {error}") from error
        self._folder = folder

    def close(self) -> None:
        """Close the environment; what was committed is on disk already."""
        self._env.close()

    def create(self, identity: Identity, rows: Mapping[int, PartitionRow]) -> None:
        """Write identity, partitions and a clean-shutdown proof into an empty store, in one transaction."""
        with self._env.begin(write=True) as txn:
            text = {
                "format": FORMAT,
                "name": identity.name,
                "version": f"{identity.version:016x}",
                "compression": identity.compression,
            }
            txn.put(_IDENTITY, keyspace.seal(json.dumps(text).encode(), _IDENTITY), db=self._meta)
            self._put_partitions(txn, rows)
            txn.put(_PROOF, keyspace.seal(b"created", _PROOF), db=self._meta)

    def identity(self) -> Identity | None:
        """Return the bucket's identity; None for an empty store.

        Raises:
            DataDirectoryError: the store's format is newer than this program's.
            DataDamagedError: the identity fails its checksum.
        """
        with self._env.begin() as txn:
            value = txn.get(_IDENTITY, db=self._meta)
        if value is None:
            return None
        text = json.loads(keyspace.unseal(bytes(value), _IDENTITY, f"{self._folder}: identity"))
        if text["format"] != FORMAT:
            raise DataDirectoryError(
                f"{self._folder}: the store has format {text['format']}, this program knows {FORMAT}",
                hint="use the program that wrote it, or a newer one",
            )
        return Identity(text["name"], int(text["version"], 16), text.get("compression", ""))

    def partitions(self) -> dict[int, PartitionRow | DataDamagedError]:
        """Return every partition's row, or why it cannot be read."""
        rows: dict[int, PartitionRow | DataDamagedError] = {}
        with self._env.begin() as txn:
            for partition in range(PARTITIONS):
                value = txn.get(keyspace.partition_key(partition), db=self._partitions)
                try:
                    if value is None:
                        raise DataDamagedError(f"partition {partition}: its row is missing")
                    rows[partition] = keyspace.unpack_partition(bytes(value), partition)
                except DataDamagedError as error:
                    rows[partition] = error
        return rows

    def proof(self) -> bool:
        """Whether the clean-shutdown proof is there: nothing was numbered since it was written."""
        with self._env.begin() as txn:
            value = txn.get(_PROOF, db=self._meta)
        if value is None:
            return False
        try:
            keyspace.unseal(bytes(value), _PROOF, "proof")
        except DataDamagedError:
            # A proof that cannot be trusted proves nothing: the next start makes new records.
            return False
        return True

    def clear_proof(self) -> None:
        """Remove the proof, durably. Must be done before the first mutation is numbered."""
        with self._env.begin(write=True) as txn:
            txn.delete(_PROOF, db=self._meta)

    def write_proof(self) -> None:
        """State, durably, that nothing was numbered that is not in the store."""
        with self._env.begin(write=True) as txn:
            txn.put(_PROOF, keyspace.seal(b"clean", _PROOF), db=self._meta)

    def write_recovery(
        self, rows: Mapping[int, PartitionRow], blocks: Iterable[tuple[int, int, bytes]]
    ) -> None:
        """Write the rows and blocks made at recovery, and the proof, in one transaction."""
        with self._env.begin(write=True) as txn:
            for partition, end, block in blocks:
                txn.put(keyspace.block_key(partition, end), block, db=self._blocks)
            self._put_partitions(txn, rows)
            txn.put(_PROOF, keyspace.seal(b"recovered", _PROOF), db=self._meta)

    def put_flush(
        self,
        blocks: Iterable[tuple[int, int, bytes]],
        rows: Mapping[int, PartitionRow],
        producers: Mapping[tuple[bytes, int], ProducerRow],
    ) -> None:
        """Store blocks (partition, end_seqno, bytes) with the rows that say so, in one transaction."""
        with self._env.begin(write=True) as txn:
            items = [(keyspace.block_key(p, end), block) for p, end, block in blocks]
            with txn.cursor(db=self._blocks) as cursor:
                cursor.putmulti(items)
            self._put_partitions(txn, rows)
            for (name, partition), row in producers.items():
                key = keyspace.producer_key(name, partition)
                txn.put(key, keyspace.pack_producer(key, row), db=self._producers)

    def _put_partitions(self, txn: Any, rows: Mapping[int, PartitionRow]) -> None:
        for partition, row in rows.items():
            txn.put(
                keyspace.partition_key(partition),
                keyspace.pack_partition(partition, row),
                db=self._partitions,
            )

    def read(self, requests: Sequence[ReadRequest], max_bytes: int) -> list[list[bytes] | None]:
        """Return stored blocks for each request until ``max_bytes`` are reached.

        The first block of a partition may begin at or below ``above``. Every request that was reached gets
        at least one block if there is one; those behind the limit get None.
        """
        results: list[list[bytes] | None] = [None for _ in requests]
        left = max_bytes
        with self._env.begin() as txn, txn.cursor(db=self._blocks) as cursor:
            for i, request in enumerate(requests):
                found = results[i] = []
                prefix = keyspace.partition_key(request.partition)
                more = cursor.set_range(keyspace.block_key(request.partition, request.above + 1))
                while more and left > 0 and cursor.key().startswith(prefix):
                    value = bytes(cursor.value())
                    found.append(value)
                    left -= len(value)
                    more = cursor.next()
                if left <= 0:
                    break
        return results

    @contextmanager
    def look(self) -> Iterator[BlockCursor]:
        """Look into the blocks as they are now, in one read transaction, which must be short."""
        with self._env.begin(buffers=True) as txn, txn.cursor(db=self._blocks) as cursor:
            yield BlockCursor(cursor)

    def heads(self, partition: int) -> list[Head]:
        """Return what a partition's blocks say at their beginning, oldest first.

        Raises:
            DataDamagedError: one of them is no block, or does not go on where the one before it ends.
        """
        heads: list[Head] = []
        prefix = keyspace.partition_key(partition)
        with self._env.begin(buffers=True) as txn, txn.cursor(db=self._blocks) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key()[:2] == prefix:
                _, end = keyspace.unpack_block_key(bytes(cursor.key()))
                value = cursor.value()
                head = head_of(bytes(value[:PEEK_BYTES]), len(value), partition, end)
                if head.start != (heads[-1].end if heads else 0):
                    raise DataDamagedError(
                        f"partition {partition}: a stored block begins at {head.start}, the one before it ends at {heads[-1].end if heads else 0}"
                    )
                heads.append(head)
                more = cursor.next()
        return heads

    def blocks(self, partition: int, ends: Iterable[int]) -> list[bytes]:
        """Return the blocks of a partition that end at these seqnos.

        Raises:
            DataDamagedError: one is not there.
        """
        found = []
        with self._env.begin() as txn:
            for end in ends:
                value = txn.get(keyspace.block_key(partition, end), db=self._blocks)
                if value is None:
                    raise DataDamagedError(
                        f"partition {partition}: the block that ends at {end} is missing"
                    )
                found.append(bytes(value))
        return found

    def replace(self, replacements: Iterable[Replacement]) -> None:
        """Put merged blocks in the place of others, with the purge seqnos that it takes, in one transaction.

        Raises:
            DataDamagedError: a block that was merged is not there any more, or the row of a partition whose purge
                seqno rises is damaged; nothing is changed.
        """
        with self._env.begin(write=True) as txn:
            for one in replacements:
                for end in one.old:
                    if not txn.delete(keyspace.block_key(one.partition, end), db=self._blocks):
                        raise DataDamagedError(
                            f"partition {one.partition}: the block that ends at {end} is missing"
                        )
                for end, block in one.new:
                    txn.put(keyspace.block_key(one.partition, end), block, db=self._blocks)
                if one.purge:
                    self._raise_purge(txn, one.partition, one.purge)

    def _raise_purge(self, txn: Any, partition: int, seqno: int) -> None:
        """Change the row that is there: a flush may have stored a newer one than the engine last told of."""
        key = keyspace.partition_key(partition)
        row = keyspace.unpack_partition(bytes(txn.get(key, db=self._partitions) or b""), partition)
        if seqno > row.purge_seqno:
            row = dataclasses.replace(row, purge_seqno=seqno)
            txn.put(key, keyspace.pack_partition(partition, row), db=self._partitions)

    def file_bytes(self) -> int:
        """Return the size of the environment's file, which never shrinks."""
        return (self._folder / "data.mdb").stat().st_size

    def used_bytes(self) -> int:
        """Return the bytes of the file's pages that are in use; the others are free for what comes."""
        databases = (
            self._meta,
            self._partitions,
            self._blocks,
            self._producers,
            self._cuts,
            self._consumers,
        )
        with self._env.begin() as txn:
            stats = [self._env.stat(), *(txn.stat(db) for db in databases)]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return int(pages * stats[0]["psize"])

    def map_room(self) -> int:
        """Return about how many bytes the map can still take, counted low.

        Of the free pages inside the file half are counted, and only when the map is more than half full: what is
        larger than a page needs free pages in a row.
        """
        info = self._env.info()
        end = int(info["last_pgno"] + 1) * self._page
        behind = int(info["map_size"]) - end
        if behind > end:
            return behind
        return behind + max(end - self.used_bytes(), 0) // 2

    @property
    def map_size(self) -> int:
        """The map's size in bytes."""
        return int(self._env.info()["map_size"])

    def newest_block_end(self, partition: int) -> int:
        """Return the end_seqno of a partition's newest stored block, 0 if there is none."""
        with self._env.begin() as txn, txn.cursor(db=self._blocks) as cursor:
            if not cursor.set_range(keyspace.partition_key(partition + 1)):
                found = cursor.last()
            else:
                found = cursor.prev()
            if found:
                owner, end = keyspace.unpack_block_key(cursor.key())
                if owner == partition:
                    return end
        return 0

    def producer(self, name: bytes) -> dict[int, ProducerRow]:
        """Return a producer's rows by partition."""
        rows = {}
        prefix = name + b"\0"
        with self._env.begin() as txn, txn.cursor(db=self._producers) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix) and len(cursor.key()) == len(prefix) + 2:
                _, partition = keyspace.unpack_producer_key(cursor.key())
                rows[partition] = keyspace.unpack_producer(
                    bytes(cursor.key()), bytes(cursor.value())
                )
                more = cursor.next()
        return rows

    def cuts(self) -> dict[bytes, CutRow]:
        """Return the cuts by name; damaged ones are left out: what they pinned is not known any more."""
        rows = {}
        with self._env.begin() as txn, txn.cursor(db=self._cuts) as cursor:
            for key, value in cursor:
                name = bytes(key)
                try:
                    rows[name] = keyspace.unpack_cut(name, bytes(value))
                except DataDamagedError as error:
                    log.error("a cut is lost", extra={"error": error.message})
        return rows

    def put_cuts(self, changes: Mapping[bytes, CutRow | None]) -> None:
        """Write cuts, and remove those that map to None, in one transaction."""
        with self._env.begin(write=True) as txn:
            for name, row in changes.items():
                if row is None:
                    txn.delete(name, db=self._cuts)
                else:
                    txn.put(name, keyspace.pack_cut(name, row), db=self._cuts)

    def consumers(self) -> dict[bytes, dict[int, ConsumerRow]]:
        """Return the consumers' rows by name and partition.

        A damaged row counts as a position at 0, under no id: it holds purging up until its consumer
        acknowledges anew or is forgotten, and is no position to begin from. One whose key is damaged is left out: nobody could forget it.
        """
        rows: dict[bytes, dict[int, ConsumerRow]] = {}
        with self._env.begin() as txn, txn.cursor(db=self._consumers) as cursor:
            for key, value in cursor:
                if not keyspace.is_consumer_key(bytes(key)):
                    log.error(
                        "a position is lost", extra={"error": f"{bytes(key)!r} is no consumer"}
                    )
                    continue
                name, partition = keyspace.unpack_consumer_key(bytes(key))
                try:
                    row = keyspace.unpack_consumer(bytes(key), bytes(value))
                except DataDamagedError as error:
                    log.error("a position is lost", extra={"error": error.message})
                    row = ConsumerRow(0, 0, 0, 0, keyspace.DAMAGED_POSITION)
                rows.setdefault(name, {})[partition] = row
        return rows

    def put_consumers(self, rows: Mapping[tuple[bytes, int], ConsumerRow | None]) -> None:
        """Write positions, and remove those that map to None, in one transaction."""
        with self._env.begin(write=True) as txn:
            for (name, partition), row in rows.items():
                key = keyspace.consumer_key(name, partition)
                if row is None:
                    txn.delete(key, db=self._consumers)
                else:
                    txn.put(key, keyspace.pack_consumer(key, row), db=self._consumers)

    def forget_producers(self, before: int, keep: int) -> int:
        """Remove producers last seen before a time (microseconds), and the oldest above ``keep`` names.

        Returns how many names were removed. One transaction; at most 10,000 names.
        """
        newest: dict[bytes, int] = {}
        with self._env.begin(write=True) as txn:
            with txn.cursor(db=self._producers) as cursor:
                for key, value in cursor:
                    name, _ = keyspace.unpack_producer_key(bytes(key))
                    newest[name] = max(newest.get(name, 0), _seen(bytes(key), bytes(value)))
            by_age = sorted(newest, key=newest.__getitem__)
            gone = {name for name in by_age if newest[name] < before} | set(
                by_age[: max(len(by_age) - keep, 0)]
            )
            for name in gone:
                for partition in range(PARTITIONS):
                    txn.delete(keyspace.producer_key(name, partition), db=self._producers)
        return len(gone)
