"""The LMDB store of one bucket.

Write transactions are made by one thread, and each is bounded by its caller. Read transactions are short:
the bytes leave them as copies, so that no reader keeps old pages alive. The map follows the size of the disk and
takes only addresses, so that "disk full" comes before "map full"; ``map_room`` covers the exceptions.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from upr.storage import keyspace
from upr.storage.blocks import (
    PEEK_BYTES,
    BlockCursor,
    Head,
    Replacement,
    head_of,
    missing_block,
)
from upr.storage.directory import FORMAT, unknown_format
from upr.storage.journal import lost
from upr.storage.keyspace import (
    PRODUCER_GRAIN,
    PRODUCER_SLOT,
    ConsumerRow,
    CutRow,
    PartitionRow,
    ProducerNumbers,
    ProducerRow,
    ProducerSeen,
)
from upr.storage.lmdb_pages import DATA_FILE, check_length, free_bytes, map_bytes
from upr.storage.producer_numbers import (
    Counts,
    Numbers,
    beaten,
    counts_on,
    drop_undone,
    keys_of,
    merged,
    none_counts,
    numbers_of,
    put_back,
    readable,
)
from upr.storage.proof import Proof, make_file, remove_others
from upr_protocol.block import U64
from upr_protocol.errors import DataDamagedError, DataDirectoryError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS


@dataclass(slots=True)
class Counters:
    """Sums since the start; bytes are those of encoded blocks unless said otherwise.

    Attributes:
        ingested_bytes: columns of numbered blocks.
        journalled_bytes: journal records.
        flushed_bytes: blocks stored by flushes.
        merge_input_bytes, merge_output_bytes: blocks that merges read and stored.
        merge_input_rows, merge_output_rows: their rows.
        merge_seconds: working time of compactions.
        purged_tombstones: tombstones dropped.
    """

    ingested_bytes: int = 0
    journalled_bytes: int = 0
    flushed_bytes: int = 0
    merge_input_bytes: int = 0
    merge_output_bytes: int = 0
    merge_input_rows: int = 0
    merge_output_rows: int = 0
    merge_seconds: float = 0.0
    purged_tombstones: int = 0


log = logging.getLogger(__name__)

FORGET_ROWS = 1000
"""Rows of producers that one transaction removes; it takes a few milliseconds."""
_SPARE_READERS = 64
_ASIDE_BYTES = 8 * 2**20
EXTEND_BYTES = 256 * 2**10
"""Bytes of values in one transaction from which on the file is extended first."""
_ZEROS_BYTES = 2 * 2**20
_PROOF = b"clean_shutdown_proof"
_IDENTITY = b"identity"
_QUOTA = b"quota"
_JOINING = b"joining"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a bucket.

    Attributes:
        name: unique in the server.
        version: a random id given when it was created.
        compression: of stored blocks: empty for none, or ``zstd``. Set when it was created.
    """

    name: str
    version: int
    compression: str = ""


def unpack_identity(body: bytes, what: str) -> Identity:
    """Return the identity of a bucket; ``what`` is its store, in the words of an error.

    Raises:
        DataDirectoryError: the store has another format than this program knows.
        DataDamagedError: it is malformed.
    """
    try:
        text = json.loads(body)
        if text["format"] != FORMAT:
            raise unknown_format(f"{what}, {text.get('name')!r}", text["format"])
        return Identity(text["name"], int(text["version"], 16), text.get("compression", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise DataDamagedError(f"the bucket's identity is malformed: {error}") from error


class Forgotten(NamedTuple):
    """Number of expired producers, and whether more remain."""

    names: int
    more: bool


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One partition's backfill: blocks that tell of what is above a seqno."""

    partition: int
    above: int


class Store:
    """LMDB environment of one bucket.

    Args:
        folder: made if it does not exist.
        size: of the map in bytes, for tests; as ``map_bytes`` says by default.

    Attributes:
        map_size: of the map in bytes; it stays as it is.

    Raises:
        DataDirectoryError: the environment is none, or its map finds no address space.
        DataDamagedError: its file is no LMDB file, or shorter than it says.
    """

    def __init__(self, folder: Path, size: int | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        check_length(folder)
        try:
            self._env = lmdb.open(
                str(folder),
                map_size=map_bytes(folder) if size is None else size,
                max_dbs=16,
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
            self._tables = {name: self._env.open_db(name) for name in keyspace.TABLES}
            self._meta = self._tables[b"meta"]
            self._partitions = self._tables[b"partitions"]
            self._blocks = self._tables[b"blocks"]
            self._producers = self._tables[b"producers"]
            self._replaced = self._tables[b"replaced"]
            self._producer_times = self._tables[b"producer_times"]
            self._cuts = self._tables[b"cuts"]
            self._consumers = self._tables[b"consumers"]
            self._aside = self._tables[b"aside"]
            self._hashes = self._tables[b"hashes"]
            self._hashes_hold = True
            # What is left in the map, and after how many transactions that was so: to ask for each write takes longer.
            self._writes, self._map_room = 0, (-1, 0)
            self._drop_old_hashes()
            self._page = int(self._env.stat()["psize"])
            self.map_size = int(self._env.info()["map_size"])
        except lmdb.Error as error:
            self._env.close()
            raise DataDamagedError(f"{folder}: the store is damaged: {error}") from error
        self._file = (folder / DATA_FILE).stat()
        self._extended_to = 0
        self._whole: U64 | None = None
        # Whether a damaged one matters is for who follows with it.
        with suppress(DataDamagedError):
            self._whole = self.joining()

    def _drop_old_hashes(self) -> None:
        """Drop the hashes of keys if a program that does not know them wrote after them: they may be of other blocks."""
        with self._env.begin() as txn:
            if not txn.stat(self._hashes)["entries"] or keyspace.hashes_hold(
                txn.get(keyspace.HASHED, db=self._meta), self._env.info()["last_txnid"]
            ):
                return
        told = {"folder": str(self._folder)}
        try:
            with self._writing() as txn:
                txn.drop(self._hashes, delete=False)
            log.warning("the index of keys is dropped: it is out of date", extra=told)
        except lmdb.Error as error:
            # Dropping takes pages, which a full disk may not have. All but the index can be used.
            self._hashes_hold = False
            told["error"] = str(error)
            log.warning("the index of keys is not used: it cannot be dropped", extra=told)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Begin a write transaction, which vouches for the hashes of keys."""
        try:
            with self._env.begin(write=True) as txn:
                yield txn
                if self._hashes_hold:
                    told = keyspace.seal(txn.id().to_bytes(8, "little"), keyspace.HASHED)
                    txn.put(keyspace.HASHED, told, db=self._meta)
        finally:
            self._writes += 1

    def _extend(self, values: Iterable[bytes]) -> None:
        """Extend the file by zeros where the next transaction puts large values, if it finds no free pages for them.

        LMDB writes adjacent pages by one call, and Linux takes folios as large as a call for what is new in the file. A
        virtual machine may have to get such memory from its host: to copy there takes 15 times as long as to write zeros in
        the 64 KiB pieces of sendfile, and then the data over them. For the store's thread: nobody else moves the end.
        """
        # Large values have pages of their own, of which the last one is half full on average; others share pages.
        half = self._page // 2
        size = sum([len(value) + half for value in values if len(value) > half])
        # A Python that was built for an old C library has no memfd_create.
        if size < EXTEND_BYTES or not hasattr(os, "memfd_create"):
            return
        used = self._end()
        first, end = max(used, self._extended_to), min(used + size, self.map_size)
        if end <= first:
            return
        # The transaction may do without.
        with suppress(OSError), (self._folder / DATA_FILE).open("r+b", buffering=0) as file:
            # On a nearly full disk others need what the zeros would take until they are given up.
            if free_bytes(file.fileno()) < 2 * (end - first):
                return
            if os.path.samestat(os.fstat(file.fileno()), self._file):
                _write_zeros(file, first, end)
                self._extended_to = end

    def lost(self) -> str:
        """Return how the environment's file was lost, in words; empty if it was not."""
        return lost(self._folder / DATA_FILE, self._file, "store")

    def close(self) -> None:
        self._env.close()

    def create(self, identity: Identity, rows: Mapping[int, PartitionRow]) -> None:
        """Write identity, partitions and a clean-shutdown proof into an empty store, in one transaction."""
        with self._proving(np.zeros(PARTITIONS, np.uint64), flushed=True) as txn:
            text = {
                "format": FORMAT,
                "name": identity.name,
                "version": f"{identity.version:016x}",
                "compression": identity.compression,
            }
            txn.put(_IDENTITY, keyspace.seal(json.dumps(text).encode(), _IDENTITY), db=self._meta)
            self._put_partitions(txn, rows)

    def identity(self) -> Identity | None:
        """Return the bucket's identity, None for an empty store; or raise as ``unpack_identity``."""
        body = self._told(_IDENTITY, f"{self._folder}: identity")
        return None if body is None else unpack_identity(body, f"the store {self._folder}")

    def _told(self, key: bytes, what: str) -> bytes | None:
        """Return what the table ``meta`` has under a key, None for nothing; or raise DataDamagedError."""
        with self._env.begin() as txn:
            value = txn.get(key, db=self._meta)
        return None if value is None else keyspace.unseal(bytes(value), key, what)

    def quota(self) -> int:
        """Return the quota in bytes, 0 for none."""
        return int.from_bytes(self._told(_QUOTA, "the quota") or b"", "little")

    def put_quota(self, quota: int) -> None:
        with self._writing() as txn:
            txn.put(_QUOTA, keyspace.seal(quota.to_bytes(8, "little"), _QUOTA), db=self._meta)

    def joining(self) -> U64 | None:
        """Return up to which seqnos the small tables are whole, shape (1024,); None where nothing came since they were."""
        body = self._told(_JOINING, "the join") or b"0"
        # An older version stored that it joins, and not from where.
        seqnos = np.frombuffer(body[1:].ljust(8 * PARTITIONS, b"\0"), "<u8")
        return None if body == b"0" else seqnos

    def put_joining(self, whole: U64 | None) -> None:
        """Store up to which seqnos the small tables are whole, durably; None for all that is here."""
        body = b"0" if whole is None else b"1" + whole.astype("<u8").tobytes()
        with self._writing() as txn:
            txn.put(_JOINING, keyspace.seal(body, _JOINING), db=self._meta)
            if whole is None or self._whole is None:
                txn.drop(self._replaced, delete=False)
        self._whole = whole

    def partitions(self) -> dict[int, PartitionRow | DataDamagedError]:
        """Return every partition's row, or the error of reading it."""
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

    def proof(self, *, may_be_moved: bool = False) -> Proof | None:
        """Return the clean-shutdown proof: nothing was numbered since it was written. None without one.

        Args:
            may_be_moved: whether to accept a proof that was copied here with the data.
        """
        try:
            body = self._told(_PROOF, "the clean-shutdown proof")
            if body is None:
                return None
            proof = Proof.unpack(body).at(self._folder, may_be_moved=may_be_moved)
            if proof is None:
                raise DataDamagedError(
                    "the directory is a copy, which proves nothing of its original since"
                )
            return proof
        except DataDamagedError as error:
            # A proof that cannot be trusted proves nothing: the next start makes new records.
            log.error(
                "a proof is not accepted",
                extra={"folder": str(self._folder), "error": error.message},
            )
            return None

    def clear_proof(self) -> None:
        """Remove the proof, durably. Must be done before the first mutation is numbered."""
        with self._writing() as txn:
            txn.delete(_PROOF, db=self._meta)

    def write_proof(self, highs: U64) -> None:
        """Write a proof, durably; ``highs`` as in Proof."""
        with self._proving(highs, flushed=True):
            pass

    @contextmanager
    def _proving(self, highs: U64, *, flushed: bool) -> Iterator[Any]:
        """Begin a transaction that ends with a new proof."""
        file = make_file(self._folder)
        try:
            with self._writing() as txn:
                yield txn
                value = keyspace.seal(Proof(highs, flushed, file).pack(), _PROOF)
                txn.put(_PROOF, value, db=self._meta)
        except BaseException:
            file.path(self._folder).unlink(missing_ok=True)
            raise
        # After the commit, because until then the old proof names another file.
        remove_others(self._folder, file)

    def write_recovery(
        self,
        rows: Mapping[int, PartitionRow],
        blocks: Iterable[tuple[int, int, bytes]],
        cut_off: Mapping[int, int],
        highs: U64,
        producers: Iterable[tuple[bytes, ProducerNumbers]] = (),
        accepted: Iterable[int] = (),
        released: Iterable[bytes] = (),
        undone: Collection[int] = (),
    ) -> None:
        """Write the rows and blocks made at recovery, and a proof, in one transaction.

        Args:
            highs: where each partition ends now, in store and journal together, shape (1024,).
            cut_off: by partition the seqno above which stored blocks are removed in it.
            accepted: partitions whose aside blocks are removed.
            released: names of the cuts to remove.
            undone: further partitions in which producers' numbers go whose seqnos are not on the log.
        """
        logs = {p: row.log for p, row in rows.items()}
        # The log of what is cut off may be the one that gave it.
        counts = counts_on(logs, highs)
        with self._proving(highs, flushed=False) as txn:
            for partition, seqno in cut_off.items():
                first = keyspace.block_key(partition, seqno + 1)
                self._remove_from(txn, self._blocks, first)
                self._remove_from(txn, self._hashes, first)
            for partition, end, block in blocks:
                txn.put(keyspace.block_key(partition, end), block, db=self._blocks)
                txn.delete(keyspace.block_key(partition, end), db=self._hashes)
            for name, numbers in producers:
                self._put_producer(txn, name, numbers, counts)
            drop_undone(txn, self._producers, {*cut_off, *undone}, counts_on(logs))
            put_back(txn, self._producers, self._replaced, {*cut_off, *undone}, counts)
            self._put_partitions(txn, rows)
            for partition in accepted:
                first = keyspace.aside_key(partition, 0, 0)
                self._remove_from(txn, self._aside, first)
            for name in released:
                txn.delete(name, db=self._cuts)

    @staticmethod
    def _remove_from(txn: Any, database: Any, first: bytes) -> None:
        """Remove what a partition has from a key on."""
        with txn.cursor(db=database) as cursor:
            more = cursor.set_range(first)
            while more and cursor.key().startswith(first[:2]):
                more = cursor.delete() and bool(cursor.key())

    def put_aside(self, blocks: Mapping[tuple[int, int, int], bytes]) -> None:
        """Keep blocks of dead partitions aside, by partition, commit and place in the commit. Idempotent.

        Durable when it returns, in transactions of about _ASIDE_BYTES.
        """
        left = list(blocks.items())
        while left:
            size = 0
            with self._writing() as txn:
                while left and size < _ASIDE_BYTES:
                    key, block = left.pop()
                    txn.put(keyspace.aside_key(*key), block, db=self._aside)
                    size += len(block)

    def aside(self, partition: int) -> Iterator[bytes]:
        """Yield a partition's aside blocks, in journal order."""
        first = keyspace.aside_key(partition, 0, 0)
        with self._env.begin() as txn, txn.cursor(db=self._aside) as cursor:
            more = cursor.set_range(first)
            while more and cursor.key().startswith(first[:2]):
                yield bytes(cursor.value())
                more = cursor.next()

    def put_flush(
        self,
        blocks: Iterable[tuple[int, int, bytes]],
        ends: Mapping[int, tuple[int, int, int]],
        producers: Mapping[bytes, ProducerNumbers],
        hashes: Sequence[bytes] = (),
        counts: Counts = none_counts,
    ) -> None:
        """Store blocks (partition, end_seqno, bytes) and where their partitions end now, in one transaction.

        Args:
            ends: stored high, last complete marker and horizon. The rest of a row stays: promotions write it too.
            hashes: as in ``Replacement``.
            counts: of the stored numbers that are larger; by default none does.
        """
        items = [(keyspace.block_key(p, end), block) for p, end, block in blocks]
        self._extend([*(block for _, block in items), *hashes])
        with self._writing() as txn:
            with txn.cursor(db=self._blocks) as cursor:
                cursor.putmulti(items)
            with txn.cursor(db=self._hashes) as cursor:
                cursor.putmulti([(key, one) for (key, _), one in zip(items, hashes, strict=False)])
            with txn.cursor(db=self._partitions) as cursor:
                keys = {keyspace.partition_key(partition): partition for partition in ends}
                before = dict(cursor.getmulti(list(keys)))
                cursor.putmulti(
                    [
                        (key, keyspace.with_ends(before.get(key, b""), partition, *ends[partition]))
                        for key, partition in keys.items()
                    ]
                )
            for name, numbers in producers.items():
                self._put_producer(txn, name, numbers, counts)

    def put_logs(
        self,
        changes: Mapping[int, tuple[int, int, int, FailoverLog]],
        served: int | None = None,
    ) -> None:
        """Change state, epoch, purge seqno and failover log of partitions, durably, in one transaction.

        The rest of each row stays: a flush may have written a newer one than the caller has seen.

        Args:
            served: the epoch in which they are served from now on, with small tables that are whole; 0 for not served, None
                leaves the one that is there.

        Raises:
            DataDamagedError: a row cannot be read; nothing is changed.
        """
        with self._writing() as txn:
            if served:
                txn.put(_JOINING, keyspace.seal(b"0", _JOINING), db=self._meta)
                # What replaced it may be of rows that never came.
                counts = counts_on({p: changed[-1] for p, changed in changes.items()})
                put_back(txn, self._producers, self._replaced, changes, counts)
                txn.drop(self._replaced, delete=False)
            for partition, (state, epoch, purge, log) in changes.items():
                row = self._partition(txn, partition)
                row = dataclasses.replace(
                    row,
                    state=state,
                    epoch=epoch,
                    purge_seqno=max(purge, row.purge_seqno),
                    log=log,
                    served_epoch=row.served_epoch if served is None else served,
                )
                self._put_partitions(txn, {partition: row})
        if served:
            self._whole = None

    def _partition(self, txn: Any, partition: int) -> PartitionRow:
        row = bytes(txn.get(keyspace.partition_key(partition), db=self._partitions) or b"")
        return keyspace.unpack_partition(row, partition)

    def _put_partitions(self, txn: Any, rows: Mapping[int, PartitionRow]) -> None:
        for partition, row in rows.items():
            key = keyspace.partition_key(partition)
            txn.put(key, keyspace.pack_partition(partition, row), db=self._partitions)

    @contextmanager
    def look(self) -> Iterator[BlockCursor]:
        """Open a cursor over the blocks in one read transaction, which must be short."""
        with self._env.begin(buffers=True) as txn:
            # Its end closes its cursors.
            hashes = txn.cursor(db=self._hashes) if self._hashes_hold else None
            yield BlockCursor(txn.cursor(db=self._blocks), hashes)

    def heads(self, partition: int) -> list[Head]:
        """Return the heads of a partition's blocks, oldest first, or raise as ``heads_until_damage`` has it."""
        heads, damage = self.heads_until_damage(partition)
        if damage is not None:
            raise damage
        return heads

    def heads_until_damage(self, partition: int) -> tuple[list[Head], DataDamagedError | None]:
        """Return the heads before the first damaged block, and its error: the block is none, or does not continue the one before."""
        heads: list[Head] = []
        prefix = keyspace.partition_key(partition)
        with self._env.begin(buffers=True) as txn, txn.cursor(db=self._blocks) as cursor:
            before = 0
            for key, value in cursor.iternext() if cursor.set_range(prefix) else ():
                owner, end = keyspace.unpack_block_key(key)
                if owner != partition:
                    break
                try:
                    head = head_of(bytes(value[:PEEK_BYTES]), len(value), partition, end)
                except DataDamagedError as error:
                    return heads, error
                if head.start != before:
                    return heads, DataDamagedError(
                        f"partition {partition}: a stored block begins at {head.start}, the one before it ends at {before}"
                    )
                heads.append(head)
                before = end
        return heads, None

    def blocks(self, partition: int, ends: Iterable[int]) -> list[bytes]:
        """Return a partition's blocks with these end seqnos, or raise DataDamagedError."""
        with self.look() as cursor:
            return [cursor.data(partition, end) for end in ends]

    def replace(self, replacements: Sequence[Replacement]) -> None:
        """Replace blocks by compacted ones and raise the purge seqnos, in one transaction.

        Raises:
            DataDamagedError: a compacted block is missing, or the row of a partition whose purge seqno rises is
                damaged; nothing is changed.
        """
        new = [block for one in replacements for _, block in one.new]
        self._extend([*new, *(hashes for one in replacements for hashes in one.hashes)])
        with self._writing() as txn:
            for one in replacements:
                for end in one.old:
                    if not txn.delete(keyspace.block_key(one.partition, end), db=self._blocks):
                        raise missing_block(one.partition, end)
                    txn.delete(keyspace.block_key(one.partition, end), db=self._hashes)
                for end, block in one.new:
                    txn.put(keyspace.block_key(one.partition, end), block, db=self._blocks)
                for (end, _), hashes in zip(one.new, one.hashes, strict=False):
                    txn.put(keyspace.block_key(one.partition, end), hashes, db=self._hashes)
                if one.purge:
                    self._raise_purge(txn, one.partition, one.purge)

    def _raise_purge(self, txn: Any, partition: int, seqno: int) -> None:
        """Change the stored row: a flush may have written a newer one than the compaction has seen."""
        row = self._partition(txn, partition)
        if seqno > row.purge_seqno:
            row = dataclasses.replace(row, purge_seqno=seqno)
            self._put_partitions(txn, {partition: row})

    def file_bytes(self) -> int:
        """Return the size of the environment's file, which never shrinks."""
        return (self._folder / DATA_FILE).stat().st_size

    def used_bytes(self) -> int:
        """Return the bytes of the file's pages in use; LMDB reuses the others."""
        with self._env.begin() as txn:
            stats = [self._env.stat(), *(txn.stat(db) for db in self._tables.values())]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return int(pages * stats[0]["psize"])

    def _end(self) -> int:
        """Return where the last page that LMDB has ever used ends, in the file and in the map."""
        return int(self._env.info()["last_pgno"] + 1) * self._page

    def map_room(self) -> int:
        """Return a low estimate of the bytes that still fit into the map.

        Half of the free pages inside the file count, and only when the map is more than half full: values larger than a
        page need adjacent free pages.
        """
        writes, room = self._map_room
        if writes != self._writes:
            # Before it is measured: a transaction may end meanwhile.
            writes = self._writes
            end = self._end()
            room = self.map_size - end
            if room <= end:
                room += max(end - self.used_bytes(), 0) // 2
            self._map_room = writes, room
        return room

    def producer_number(self, name: bytes) -> int:
        """Return the largest stored number of a producer, 0 for none; DataDamagedError if it cannot be read."""
        key = keyspace.producer_key(name)
        with self._env.begin() as txn:
            value = txn.get(key, db=self._producers)
        return keyspace.unpack_producer_seen(key, bytes(value)).last_number if value else 0

    def producer_rows(self, name: bytes) -> dict[int, ProducerRow]:
        """Return a producer's rows by partition; DataDamagedError if one cannot be read."""
        rows = {}
        with self._env.begin() as txn, txn.cursor(db=self._producers) as cursor:
            for key in keys_of(cursor, name):
                table = keyspace.unpack_producer(key, bytes(cursor.value()))
                for partition, *fields in table.tolist():
                    rows[partition] = ProducerRow(*fields)
        return rows

    def producers_after(
        self, name: bytes, max_bytes: int, *, replaced: bool = False
    ) -> list[tuple[bytes, ProducerNumbers]]:
        """Return the numbers of the producers behind a name, by name: about ``max_bytes``; damaged rows are left out.

        Args:
            replaced: whether to return those that a join replaced, and not those that are there now.
        """
        found: list[tuple[bytes, ProducerNumbers]] = []
        size, database = 0, self._replaced if replaced else self._producers
        with self._env.begin() as txn, txn.cursor(db=database) as cursor:
            # Each key is the name, a zero byte and what no name begins with.
            more = cursor.set_range(name + b"\1")
            while more and size < max_bytes:
                name, _, _ = bytes(cursor.key()).partition(b"\0")
                seen = self._seen(txn, keyspace.producer_key(name))
                table = numbers_of(cursor, name)
                if seen is not None and len(table):
                    found.append((name, ProducerNumbers(table, seen.time)))
                size += table.nbytes + len(name)
                more = cursor.set_range(name + b"\1")
        return found

    def put_producers(self, rows: Iterable[tuple[bytes, ProducerNumbers]], counts: Counts) -> None:
        """Store numbers of producers, durably, but those for which a larger one counts."""
        with self._writing() as txn:
            for name, numbers in rows:
                if len(numbers.table):
                    self._put_producer(txn, name, numbers, counts)

    def drop_ahead(self, logs: Mapping[int, FailoverLog], ends: U64) -> None:
        """Drop the numbers of producers whose rows are not here, durably; what a join replaced by them is back.

        Args:
            logs: of the partitions in which they go.
            ends: where each partition ends, shape (1024,).
        """
        counts = counts_on(logs, ends)
        with self._writing() as txn:
            drop_undone(txn, self._producers, logs, counts)
            put_back(txn, self._producers, self._replaced, logs, counts)

    def _put_producer(
        self, txn: Any, name: bytes, numbers: ProducerNumbers, counts: Counts
    ) -> None:
        table = numbers.table
        slots = table["partition"] // PRODUCER_SLOT
        edges = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
        for begin, end in pairwise(edges):
            key, part = keyspace.producer_key(name, int(slots[begin])), table[begin:end]
            old = readable(keyspace.unpack_producer, key, txn.get(key, db=self._producers))
            if old is not None:
                newest = merged(old, part, counts)
                if self._whole is not None:
                    self._keep(txn, key, beaten(old, part, newest, self._whole, counts), counts)
                part = newest
            txn.put(key, keyspace.pack_producer(key, part), db=self._producers)
        key, time = keyspace.producer_key(name), numbers.time - numbers.time % PRODUCER_GRAIN
        last, seen = int(table["number"].max()), self._seen(txn, key)
        if seen is not None:
            last, time = max(last, seen.last_number), max(time, seen.time)
        if seen is None or time != seen.time:
            if seen is not None:
                txn.delete(keyspace.producer_time_key(seen.time, name), db=self._producer_times)
            txn.put(keyspace.producer_time_key(time, name), b"", db=self._producer_times)
        row = ProducerSeen(last, time)
        if row != seen:
            txn.put(key, keyspace.pack_producer_seen(key, row), db=self._producers)

    def _keep(self, txn: Any, key: bytes, part: Numbers, counts: Counts) -> None:
        """Keep numbers of a slot that a join replaces, but those for which a larger one is kept."""
        if len(part):
            old = readable(keyspace.unpack_producer, key, txn.get(key, db=self._replaced))
            part = part if old is None else merged(old, part, counts)
            txn.put(key, keyspace.pack_producer(key, part), db=self._replaced)

    def _seen(self, txn: Any, key: bytes) -> ProducerSeen | None:
        return readable(keyspace.unpack_producer_seen, key, txn.get(key, db=self._producers))

    def cuts(self) -> dict[bytes, CutRow]:
        """Return the cuts by name, without damaged ones, whose pins are unknown."""
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
        with self._writing() as txn:
            for name, row in changes.items():
                if row is None:
                    txn.delete(name, db=self._cuts)
                else:
                    txn.put(name, keyspace.pack_cut(name, row), db=self._cuts)

    def consumers(self) -> Iterator[tuple[bytes, int, ConsumerRow]]:
        """Yield the consumers' rows with name and partition, in that order, in one read transaction.

        A damaged row counts as a position at 0, without an id: it holds purging until its consumer acknowledges again
        or is forgotten, and no consumer can begin from it. A row with a damaged key is left out: it could never be
        forgotten.
        """
        with self._env.begin() as txn, txn.cursor(db=self._consumers) as cursor:
            for key, value in cursor:
                if not keyspace.is_consumer_key(bytes(key)):
                    log.error(
                        "a position is lost", extra={"error": f"{bytes(key)!r} is no consumer"}
                    )
                    continue
                name, partition = keyspace.unpack_consumer_key(bytes(key))
                yield name, partition, self._consumer(bytes(key), bytes(value))

    @staticmethod
    def _consumer(key: bytes, value: bytes) -> ConsumerRow:
        try:
            return keyspace.unpack_consumer(key, value)
        except DataDamagedError as error:
            log.error("a position is lost", extra={"error": error.message})
            return ConsumerRow(0, 0, 0, 0, keyspace.DAMAGED_POSITION)

    def consumer_rows(
        self, consumer: bytes, partitions: Iterable[int]
    ) -> dict[int, ConsumerRow | None]:
        """Return a consumer's rows in some partitions; None where there is none."""
        found: dict[int, ConsumerRow | None] = {}
        with self._env.begin() as txn:
            for partition in partitions:
                key = keyspace.consumer_key(consumer, partition)
                value = txn.get(key, db=self._consumers)
                found[partition] = None if value is None else self._consumer(key, bytes(value))
        return found

    def saved_positions(self, consumer: bytes, partitions: Iterable[int]) -> dict[int, bytes]:
        """Return a consumer's saved positions by partition, see ``ConsumerRow.position``."""
        rows = self.consumer_rows(consumer, partitions).items()
        return {p: row.position for p, row in rows if row is not None and row.position}

    def put_consumers(self, rows: Mapping[tuple[bytes, int], ConsumerRow | None]) -> None:
        """Write positions, and remove those that map to None, in one transaction."""
        with self._writing() as txn:
            for (name, partition), row in rows.items():
                key = keyspace.consumer_key(name, partition)
                if row is None:
                    txn.delete(key, db=self._consumers)
                    continue
                if row.position is None:
                    value = txn.get(key, db=self._consumers)
                    stored = None if value is None else self._consumer(key, bytes(value))
                    row = dataclasses.replace(row, position=stored.position if stored else b"")
                txn.put(key, keyspace.pack_consumer(key, row), db=self._consumers)

    def forget_producers(self, before: int, keep: int) -> Forgotten:
        """Remove producers last seen before a time (microseconds), and the oldest above ``keep`` names.

        One transaction of about FORGET_ROWS rows and at most one name more; none when there is nothing to do. All rows of
        a name go together.
        """
        with self._env.begin() as txn:
            if self._oldest(txn, before, keep) is None:
                return Forgotten(0, False)
        names = rows = 0
        with self._writing() as txn:
            while (key := self._oldest(txn, before, keep)) is not None:
                if rows >= FORGET_ROWS:
                    return Forgotten(names, True)
                with txn.cursor(db=self._producer_times) as cursor:
                    # By its place: a key that the disk changed may not be found, and would be the oldest for ever.
                    cursor.first()
                    cursor.delete()
                rows += 2
                time, name = keyspace.unpack_producer_time_key(key)
                seen = self._seen(txn, keyspace.producer_key(name))
                if seen is not None and seen.time > time:
                    # Its numbers are needed: the entry has no checksum, and is made again as it was.
                    key = keyspace.producer_time_key(seen.time, name)
                    txn.put(key, b"", db=self._producer_times)
                    continue
                txn.delete(keyspace.producer_key(name), db=self._producers)
                for database in (self._producers, self._replaced):
                    with txn.cursor(db=database) as cursor:
                        for old in list(keys_of(cursor, name)):
                            txn.delete(old, db=database)
                            rows += 1
                names += 1
        return Forgotten(names, False)

    def _oldest(self, txn: Any, before: int, keep: int) -> bytes | None:
        """Return the oldest entry of the index over time if it has expired."""
        with txn.cursor(db=self._producer_times) as cursor:
            if not cursor.first():
                return None
            key = bytes(cursor.key())
        time, _ = keyspace.unpack_producer_time_key(key)
        old = time + PRODUCER_GRAIN <= before
        return key if old or txn.stat(self._producer_times)["entries"] > keep else None


def _write_zeros(file: FileIO, first: int, end: int) -> None:
    """Write zeros to the end of a file, 64 KiB at a time; of a full disk they take nothing."""
    with open(os.memfd_create("zeros"), "r+b", buffering=0) as zeros:
        zeros.truncate(_ZEROS_BYTES)
        at = file.seek(first)
        try:
            while at < end:
                most = min(end - at, _ZEROS_BYTES)
                at += os.sendfile(file.fileno(), zeros.fileno(), 0, most)
        except OSError:
            file.truncate(first)
            raise
