"""A bucket with its disk: the threads that journal, flush and read, around the engine on the event loop.

The engine decides on the loop, one thread does, and the outcome is reported back on the loop. One thread owns
the journal, one makes the store's write transactions, two read.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import lmdb

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.bucket import Bucket, Written
from upr.engine.producers import Producer
from upr.engine.recovery import recover
from upr.service.consumer_saver import ConsumerSaver
from upr.service.cut_keeper import CutKeeper
from upr.service.flusher import Flusher
from upr.service.leases import LeaseKeeper
from upr.service.merger import Merger
from upr.service.purger import sweep
from upr.service.room import check_map, merge_room
from upr.storage.compression import compressor
from upr.storage.counters import Counters
from upr.storage.journal import Commit, Journal, record_bytes
from upr.storage.reading import ReadResult, read_blocks
from upr.storage.showing import Showing
from upr.storage.store import Identity, ReadRequest, Store
from upr_protocol.block import Block
from upr_protocol.errors import (
    BucketGoneError,
    NoRoomError,
    ShuttingDownError,
    StorageFailedError,
    TooManyError,
    UprError,
)
from upr_protocol.limits import (
    DISK_RESERVE_BYTES,
    DISK_RESERVE_FRACTION,
    FAILOVER_ID_MAX,
)

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25
_PRODUCER_WAIT_SECONDS = 5.0
_READERS = 2
_T = TypeVar("_T")


def new_failover_id() -> int:
    """Draw a failover id: 64 random bits, never 0."""
    return 1 + secrets.randbelow(FAILOVER_ID_MAX)


def now_micros() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


def disk_room(path: Path) -> int:
    """Return how many bytes may be written before the reserve is touched; negative inside it."""
    disk = os.statvfs(path)
    reserve = min(DISK_RESERVE_BYTES, int(disk.f_blocks * disk.f_frsize * DISK_RESERVE_FRACTION))
    return disk.f_bavail * disk.f_frsize - reserve


class BucketHost:
    """One open bucket.

    Args:
        folder: its folder in the data directory.
        config: tail and flush settings.

    Raises:
        DataDirectoryError: the store is of a newer format, or its compression is unknown here.
        DataDamagedError: identity or journal are damaged.
    """

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self.folder = folder
        self._config = config
        self.tail_limit = config.tail_bytes
        self.gone: BucketGoneError | None = None
        """Set once the bucket was dropped."""
        self.users: set[Callable[[BucketGoneError], None]] = set()
        """Called, each once, when the bucket is dropped: the calls that are open."""
        self.store = Store(folder / "store")
        try:
            self._open(folder, config)
        except BaseException:
            self.store.close()
            raise

    def _open(self, folder: Path, config: ServerConfig) -> None:
        identity = self.store.identity()
        if identity is None:
            raise StorageFailedError(f"{folder} holds a store without an identity")
        self.compress = compressor(identity.compression)
        self.journal = Journal(folder / "journal", identity.version)
        self.counters = Counters()
        self.bucket = self._recover(identity)
        positions = self.bucket.consumer_positions
        positions.load(self.store.consumers())
        # The clock, too, because not every generation that was given was stored.
        self.bucket.owners.begin_above(max(now_micros(), positions.newest_generation))
        self.bucket.cuts.load(self.store.cuts(), self.bucket.tail)
        self._journal_thread = ThreadPoolExecutor(1, "journal")
        self._store_thread = ThreadPoolExecutor(1, "store")
        self._readers = ThreadPoolExecutor(_READERS, "reader")
        self.acknowledged = ConsumerSaver(
            self.bucket.consumer_positions,
            lambda rows: self._in(self._store_thread, lambda: self.store.put_consumers(rows())),
        )
        self.cuts = CutKeeper(self, now_micros)
        self.leases = LeaseKeeper(self.bucket.owners)
        self.flusher = Flusher(self, config, now_micros)
        self.merger = Merger(self, config, now_micros, self._merge_room)
        self._work = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._clearing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.stopping = False
        self._on_failure: Callable[[], Awaitable[None]] | None = None

    def _recover(self, identity: Identity) -> Bucket:
        proven = self.store.proof()
        result = recover(
            self.store.partitions(),
            self.store.newest_block_end,
            self.journal.replay(),
            proven=proven,
            new_id=new_failover_id,
        )
        if result.rows:
            failpoints.hit("recovery.before_records")
            self.store.write_recovery(result.rows, result.blocks)
            failpoints.hit("recovery.after_records")
        for note in result.notes:
            log.warning("recovery", extra={"bucket": identity.name, "note": note})
        bucket = Bucket(identity, result.partitions, result.next_commit, proven=True)
        bucket.recovered(result.entries)
        return bucket

    def start(self, on_failure: Callable[[], Awaitable[None]]) -> None:
        """Begin committing and flushing; ``on_failure`` is awaited when the journal has failed."""
        self._on_failure = on_failure
        self._tasks = [
            asyncio.create_task(self._commit_loop(), name="committer"),
            asyncio.create_task(self.flusher.run(), name="flusher"),
            asyncio.create_task(self.merger.run(), name="merger"),
            asyncio.create_task(sweep(self), name="purger"),
            asyncio.create_task(self.acknowledged.run(), name="saver of consumers"),
            asyncio.create_task(self.cuts.run(), name="keeper of cuts"),
            asyncio.create_task(self.leases.run(), name="keeper of leases"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Without its committer or flusher the bucket must not go on as if it had them."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self.gone is None:
            log.critical("a task of the bucket failed", exc_info=error)
            self.bucket.fail(StorageFailedError(f"the {task.get_name()} failed: {error!r}"))
            self.changed()

    # Writing

    async def write(
        self, block: Block, name: bytes, producer: Producer | None, number: int
    ) -> Written:
        """Number a block as soon as there is room for it.

        Raises:
            NoRoomError: the disk is down to its reserve.
            ShuttingDownError: the server is stopping.
            BucketGoneError: the bucket was dropped; nothing is numbered.
            StorageFailedError, PartitionNotActiveError, SeqnoExhaustedError: see Bucket.write.
        """
        bucket = self.bucket
        if self.gone is not None:
            raise self.gone
        if producer is not None and producer.known(number, block.runs) is not None:
            # Answering a write again numbers nothing: neither room nor the proof is touched.
            return bucket.write(block, name, producer, number, now_micros())
        while not self.stopping and bucket.failure is None:
            if bucket.proven:
                await self._clear_proof()
            elif bucket.tail.bytes >= self.tail_limit:
                self._check_room(block)
                self.flusher.wanted.set()
                await self._next_change()
            else:
                break
        if self.stopping:
            raise self.gone or ShuttingDownError("the server is stopping", hint="connect again")
        self._check_room(block)
        written = bucket.write(block, name, producer, number, now_micros())
        self.counters.ingested_bytes += block.column_bytes
        self._work.set()
        return written

    def _check_room(self, block: Block) -> None:
        needed = block.column_bytes + block.runs.nbytes
        room = disk_room(self.folder) - self.bucket.tail.volatile_bytes
        if needed > room:
            raise NoRoomError(
                f"the disk has room for {max(room, 0)} bytes above the reserve, the write needs {needed}",
                hint="free some space; writing resumes by itself",
            )
        check_map(self.store, self.bucket.tail.bytes + needed, is_full=self.flusher.map_full)

    def _merge_room(self) -> int:
        return min(disk_room(self.folder), merge_room(self.store))

    async def _clear_proof(self) -> None:
        """Remove the proof once, for all who wait; who gives up waiting does not stop it half-way."""
        if self._clearing is None:
            self._clearing = asyncio.create_task(self._clear_proof_for_all())
        await asyncio.shield(self._clearing)

    async def _clear_proof_for_all(self) -> None:
        try:
            await self._in(self._store_thread, self._clear_proof_now)
            self.bucket.proven = False
        except (OSError, lmdb.Error) as error:
            raise NoRoomError(
                f"nothing can be numbered: the store could not be written: {error}",
                hint="free some space; writing resumes by itself",
            ) from error
        finally:
            self._clearing = None

    def _clear_proof_now(self) -> None:
        failpoints.hit("proof.before_clear")
        self.store.clear_proof()
        failpoints.hit("proof.after_clear")

    async def open_producer(self, name: bytes) -> Producer:
        """Return a producer, with what the store knows of it.

        Raises:
            TooManyError: more producers than can be remembered have open calls.
            DataDamagedError: what the store knows of it is damaged.
            BucketGoneError: the bucket was dropped.
        """
        deadline = time.monotonic() + _PRODUCER_WAIT_SECONDS
        while True:
            # Asked again after each wait: another call may have written under the name, and be forgotten again.
            rows = None
            if not self.bucket.knows_producer(name):
                rows = await self._in(self._store_thread, lambda: self.store.producer(name))
            if self.gone is not None:
                raise self.gone
            try:
                return self.bucket.open_producer(name, rows)
            except TooManyError:
                # Producers whose writes are stored can be forgotten.
                if self.bucket.tail.first == self.bucket.tail.end or time.monotonic() > deadline:
                    raise
                self.flusher.wanted.set()
                await self._next_change()

    async def durable(self, entry: int) -> None:
        """Wait until a tail entry is on disk.

        Raises:
            StorageFailedError: it never will be, as far as this process can tell.
            BucketGoneError: the bucket was dropped meanwhile.
        """
        while self.bucket.tail.durable <= entry:
            if self.gone is not None:
                raise self.gone
            if self.bucket.failure is not None:
                raise self.bucket.failure.with_traceback(None)
            await self._next_change()

    async def _next_change(self) -> None:
        """Wait for the next commit, flush or failure."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # Committing

    async def _commit_loop(self) -> None:
        while True:
            commit = self.bucket.take_commit()
            if commit is None:
                self._work.clear()
                if self.stopping:
                    return
                await self._work.wait()
                continue
            if not await self._append(commit):
                return
            self.bucket.commit_done(commit)
            self.counters.journalled_bytes += record_bytes(commit)
            if self.bucket.tail.bytes >= self.flusher.begin_bytes:
                self.flusher.wanted.set()
            self.changed()

    async def _append(self, commit: Commit) -> bool:
        """Journal a commit; a full disk is waited for, because what is numbered is never withdrawn."""
        while True:
            try:
                await self._in(self._journal_thread, lambda: self.journal.append(commit))
                return True
            except StorageFailedError as error:
                await self._fail(error)
                return False
            except OSError as error:
                log.error("journal append failed, retrying", extra={"error": str(error)})
                if self.stopping:
                    await self._fail(
                        StorageFailedError(f"the journal could not be written: {error}")
                    )
                    return False
                self.flusher.wanted.set()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _fail(self, error: StorageFailedError) -> None:
        log.critical("storage failed: no more writes are taken", extra={"error": str(error)})
        self.bucket.fail(error)
        self.changed()
        if self._on_failure is not None:
            await self._on_failure()

    async def flush(self) -> bool:
        """Store what the tail holds durably, and drop it; False when there was nothing."""
        return await self.flusher.flush()

    # Reading

    async def read(
        self,
        requests: Sequence[ReadRequest],
        max_bytes: int,
        *,
        showing: Showing,
        accept_zstd: bool = False,
    ) -> list[ReadResult]:
        """Read stored blocks in a reader thread; partitions that are found damaged are told by the status."""
        results = await self._in(
            self._readers,
            lambda: read_blocks(
                self.store,
                requests,
                max_bytes,
                keys_only=showing.keys_only,
                key_prefix=showing.key_prefix,
                plain_rows=showing.plain_rows,
                accept_zstd=accept_zstd,
            ),
        )
        self.found_damaged({r.request.partition: r.error for r in results if r.error is not None})
        return results

    def found_damaged(self, failed: Mapping[int, UprError]) -> None:
        """Take note of partitions whose stored blocks could not be read, for the status and the log."""
        known = self.bucket.partitions.problems
        # Its streams are started again and again: once is enough for the log.
        self.merger.damaged({p: error for p, error in failed.items() if p not in known})

    async def in_store_thread(self, call: Callable[[], _T]) -> _T:
        """Run something in the thread that makes the store's transactions."""
        return await self._in(self._store_thread, call)

    async def in_reader(self, call: Callable[[], _T]) -> _T:
        """Have a reader thread do what takes one short transaction, or a few."""
        return await self._in(self._readers, call)

    async def in_journal_thread(self, call: Callable[[], _T]) -> _T:
        """Run something in the thread that owns the journal."""
        return await self._in(self._journal_thread, call)

    async def journal_bytes(self) -> int:
        """Return the bytes of the journal's segments."""
        return await self._in(self._journal_thread, lambda: self.journal.size)

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        if self.gone is not None:
            raise self.gone
        result = await asyncio.get_running_loop().run_in_executor(pool, call)
        if self.gone is not None:
            # What was read may be half of it; and its folder may have another name already.
            raise self.gone
        return result

    # Stopping

    def leave(self, error: BucketGoneError) -> None:
        """The bucket was dropped: nothing of it is numbered, stored or read from this step on.

        Whoever uses it or waits for it is given the error. ``discard`` is to follow.
        """
        self.gone = error
        self.stopping = True
        self.merger.stop()
        for task in self._tasks:
            task.cancel()
        for tell in list(self.users):
            tell(error)
        self.changed()

    async def discard(self) -> None:
        """Close without storing anything, after ``leave``: the data goes away."""
        clearing = [self._clearing] if self._clearing is not None else []
        await asyncio.gather(*self._tasks, *clearing, return_exceptions=True)
        await self.merger.finish()
        # A merge may take seconds to come to its end, and other buckets use the loop.
        await asyncio.to_thread(self.close_files)

    def close_files(self) -> None:
        """Wait for the threads and close journal and store; what is in memory is lost."""
        self.merger.close()
        for pool in (self._journal_thread, self._store_thread, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self.journal.close()
        self.store.close()

    async def close(self) -> bool:
        """Commit and flush everything, prove that it was done, and close; False when that was not possible."""
        self.stopping = True
        if self._clearing is not None:
            await asyncio.gather(self._clearing, return_exceptions=True)
        self._work.set()
        self.flusher.wanted.set()
        self.acknowledged.stop()
        self.merger.stop()
        self.cuts.stop()
        self.leases.stop()
        self.changed()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.merger.finish()
        await self.cuts.finish()
        await self.acknowledged.finish()
        clean = False
        try:
            clean = await self._finish()
        except (OSError, lmdb.Error, UprError) as error:
            log.error("shutdown is not clean", extra={"error": str(error)})
        finally:
            self.close_files()
        return clean

    async def _finish(self) -> bool:
        tail = self.bucket.tail
        if self.bucket.failure is not None:
            return False
        failpoints.hit("shutdown.before_flush")
        while await self.flush():
            pass
        if tail.first != tail.end:
            # Something was numbered and could not be stored: nothing may claim that this shutdown was clean.
            return False
        await self.acknowledged.save()
        failpoints.hit("shutdown.before_proof")
        await self._in(self._store_thread, self.store.write_proof)
        failpoints.hit("shutdown.after_proof")
        return True
