"""The process that checks one bucket: ``python -m upr.storage.check.worker JSON``.

LMDB maps the file and trusts its pages, so damaged pages can kill or hang the process that reads them: this one. It
reports its progress and findings to its parent as JSON lines on stdout:

    {"at": [partition or null, words]}   before every step
    {"name": text}                       the bucket's name
    {"finding": {...}}                   see Finding
    {"readable": {partition: ranges}}    replaces earlier ranges of these partitions
    {"unusable": text}                   the format is unknown
    {"end": true}                        everything was checked
"""

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from upr.storage.check.contents import (
    DAMAGE,
    NOTE,
    Ends,
    Finding,
    JournalCheck,
    Report,
    StoreCheck,
    check_cuts,
    check_identity,
    check_partition_rows,
)
from upr.storage.check.trees import check_pages
from upr.storage.keyspace import (
    HASHED,
    TABLES,
    block_key,
    hashes_hold,
    partition_key,
    unpack_block_key,
)
from upr.storage.lmdb_pages import DATA_FILE, PageFile, check_length, map_bytes
from upr_protocol.errors import DataDamagedError, DataDirectoryError

_TICK_SECONDS = 1.0
_BLOCK_KEY_BYTES = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Task of a worker.

    Attributes:
        partitions: which ones, ascending.
        again: whether a worker died before; findings up to the place of its death are not sent again.
    """

    folder: str
    partitions: list[int]
    again: bool = False


Send = Callable[..., None]
"""Function that sends one line, given as keyword arguments; the module's text lists them."""


def _print(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class _Worker:
    def __init__(self, task: Task, send: Send) -> None:
        self._task = task
        self._send = send
        self._folder = Path(task.folder)
        self._store = self._folder / "store"
        self._partition: int | None = None
        self._ticked = 0.0
        self._seen = 0

    def _report(self, finding: Finding) -> None:
        self._send(finding=finding.to_json())

    def _at(self, words: str, partition: int | None = None) -> None:
        self._partition = partition
        self._send(at=[partition, words])

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked > _TICK_SECONDS:
            self._ticked = now
            self._send(at=[self._partition, ""])

    def run(self) -> None:
        first = not self._task.again
        if first:
            self._at("pages")
            self._check_file()
        self._at("rows")
        with (
            closing(
                lmdb.open(
                    str(self._store),
                    map_size=map_bytes(self._store),
                    max_dbs=len(TABLES) + 2,
                    readonly=True,
                    lock=False,
                    readahead=False,
                )
            ) as self._env,
            self._env.begin() as self._txn,
        ):
            self._check_tables(first)
        self._send(end=True)

    def _check_tables(self, first: bool) -> None:
        quiet: Report = self._report if first else _ignore
        identity, proof = check_identity(self._items, self._folder.name, quiet)
        if identity is not None:
            self._send(name=identity.name)
        rows = check_partition_rows(self._items, quiet)
        pins = check_cuts(self._items, time.time_ns() // 1000, quiet)
        wanted = frozenset(self._task.partitions)
        chosen = {p: row for p, row in rows.items() if p in wanted}
        pins = {p: several for p, several in pins.items() if p in wanted}
        store = StoreCheck(self._items, chosen, pins, self._report)
        self._check_partitions(store)
        self._at("journal")
        version = identity.version if identity is not None else int(self._folder.name, 16)
        journal = JournalCheck(self._folder, version, rows, store, wanted, self._report, self._tick)
        # A start does not accept the proof of a copy, unless it is told that nothing was written to the original since.
        accepted = proof is not None and proof.file.is_there(self._store)
        journal.run(needed=not accepted)
        self._send(readable=store.readable.ranges)
        self._at("what rows say of the data")
        if proof is not None and proof.flushed and journal.holds_more:
            words = "the proof says that everything was stored at shutdown, the journal holds more"
            self._report(Finding(words, file="journal"))
        store.check_rows(proof)

    def _check_file(self) -> None:
        where = f"store/{DATA_FILE}"
        try:
            check_length(self._store)
            with closing(PageFile(self._store / DATA_FILE)) as file:

                def report(words: str, page: int | None, severity: str = DAMAGE) -> None:
                    offset = None if page is None else page * file.page_bytes
                    self._report(Finding(words, severity, file=where, offset=offset))

                check_pages(file, report, partial(report, severity=NOTE), self._tick)
        except DataDamagedError as error:
            self._report(Finding(error.message, file=where))
        except OSError as error:
            self._report(Finding(f"it cannot be read: {error.strerror}", file=where))

    def _table(self, name: bytes) -> Any:
        try:
            return self._env.open_db(name, txn=self._txn, create=False)
        except lmdb.NotFoundError:
            # An older version did not have the table; a lost one is noticed where it is needed.
            return None

    def _items(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        table = self._table(name)
        if table is None:
            return
        with self._txn.cursor(db=table) as cursor:
            try:
                for key, value in cursor:
                    yield bytes(key), bytes(value)
            except lmdb.Error as error:
                self._report(Finding(f"table {name.decode()} cannot be read on: {error}"))

    def _check_partitions(self, store: StoreCheck) -> None:
        table = self._table(b"blocks")
        if table is None:
            self._report(Finding("the table of blocks is missing"))
            store.ends.update({partition: Ends() for partition in self._task.partitions})
            return
        for partition in self._task.partitions:
            self._at("blocks", partition)
            blocks = self._blocks(table, partition)
            store.check_blocks(partition, blocks, self._hashes(partition))
            if partition in store.readable.ranges:
                self._send(readable={partition: store.readable.ranges[partition]})
        self._at("blocks")
        there = self._txn.stat(table)["entries"]
        if len(self._task.partitions) == 1024 and there != self._seen:
            words = (
                f"the table of blocks has {there} entries, {self._seen} are blocks of a partition"
            )
            self._report(Finding(words))

    def _hashes(self, partition: int) -> Iterable[tuple[int, bytes]]:
        """Return the hashes of a partition's keys; none when the next start drops them all."""
        table, meta = self._table(b"hashes"), self._table(b"meta")
        if table is None or meta is None:
            return ()
        told = self._txn.get(HASHED, db=meta)
        if not hashes_hold(told, self._env.info()["last_txnid"]):
            return ()
        return self._rows(table, partition)

    def _blocks(self, table: Any, partition: int) -> Iterator[tuple[int, bytes]]:
        for end, value in self._rows(table, partition):
            self._seen += 1
            yield end, value

    def _rows(self, table: Any, partition: int) -> Iterator[tuple[int, bytes]]:
        prefix = partition_key(partition)
        try:
            with self._txn.cursor(db=table) as cursor:
                more = cursor.set_range(block_key(partition, 0))
                while more and cursor.key()[:2] == prefix:
                    key, value = bytes(cursor.key()), bytes(cursor.value())
                    self._tick()
                    if len(key) == _BLOCK_KEY_BYTES:
                        yield unpack_block_key(key)[1], value
                    more = cursor.next()
        except lmdb.Error as error:
            self._report(Finding(f"its blocks cannot be read on: {error}", partition=partition))


def _ignore(_: Finding) -> None:
    """Do nothing: the worker that died has sent it."""


def check_bucket(task: Task, send: Send) -> None:
    """Check one bucket in this process, and send progress and findings."""
    try:
        _Worker(task, send).run()
    except DataDirectoryError as error:
        send(unusable=str(error))
    except Exception as error:
        # Any exception of the code that reads damaged bytes is a finding of damage.
        send(finding=Finding(f"reading ends here: {type(error).__name__}: {error}").to_json())
        send(end=False)


def main() -> None:
    # No core dump: the map takes some TiB.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    check_bucket(Task(**json.loads(sys.argv[1])), _print)


if __name__ == "__main__":
    main()
