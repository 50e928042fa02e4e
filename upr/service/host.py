"""A bucket with its disk: the threads that journal, flush and read, around the engine on the event loop.

The engine decides on the loop, one thread does, and the outcome is reported back on the loop. One thread owns
the journal, one makes the store's write transactions, two read.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import lmdb

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.bucket import Bucket, Written
from upr.engine.flush import FlushPlan
from upr.engine.producers import Producer
from upr.engine.recovery import recover
from upr.storage.journal import Commit, Journal
from upr.storage.keyspace import ProducerRow
from upr.storage.merge import FlushSlice, Merged
from upr.storage.reading import ReadResult, read_blocks
from upr.storage.store import Identity, ReadRequest, Store
from upr_protocol.block import Block
from upr_protocol.errors import (
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
    PRODUCER_SECONDS,
    PRODUCERS_MAX,
)

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25
_FORGET_SECONDS = 3600.0
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
        DataDirectoryError: the store is of a newer format.
        DataDamagedError: identity or journal are damaged.
    """

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self.folder = folder
        self._config = config
        self.store = Store(folder / "store")
        identity = self.store.identity()
        if identity is None:
            raise StorageFailedError(f"{folder} holds a store without an identity")
        self.journal = Journal(folder / "journal", identity.version)
        self.bucket = self._recover(identity)
        self._journal_thread = ThreadPoolExecutor(1, "journal")
        self._store_thread = ThreadPoolExecutor(1, "store")
        self._readers = ThreadPoolExecutor(_READERS, "reader")
        self._work = asyncio.Event()
        self._flush_wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._clearing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
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
            asyncio.create_task(self._flush_loop(), name="flusher"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Without its committer or flusher the bucket must not go on as if it had them."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.critical("a task of the bucket failed", exc_info=error)
            self.bucket.fail(StorageFailedError(f"the {task.get_name()} failed: {error!r}"))
            self._changed()

    # Writing

    async def write(
        self, block: Block, name: bytes, producer: Producer | None, number: int
    ) -> Written:
        """Number a block as soon as there is room for it.

        Raises:
            NoRoomError: the disk is down to its reserve.
            ShuttingDownError: the server is stopping.
            StorageFailedError, PartitionNotActiveError, SeqnoExhaustedError: see Bucket.write.
        """
        bucket = self.bucket
        if producer is not None and producer.known(number, block.runs) is not None:
            # Answering a write again numbers nothing: neither room nor the proof is touched.
            return bucket.write(block, name, producer, number, now_micros())
        while not self._stopping and bucket.failure is None:
            if bucket.proven:
                await self._clear_proof()
            elif bucket.tail.bytes >= 2 * self._config.tail_bytes:
                self._check_room(block)
                self._flush_wanted.set()
                await self._next_change()
            else:
                break
        if self._stopping:
            raise ShuttingDownError("the server is stopping", hint="connect again")
        self._check_room(block)
        written = bucket.write(block, name, producer, number, now_micros())
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

    async def _clear_proof(self) -> None:
        """Remove the proof once, for all who wait; who gives up waiting does not stop it half-way."""
        if self._clearing is None:
            self._clearing = asyncio.create_task(self._clear_proof_for_all())
        await asyncio.shield(self._clearing)

    async def _clear_proof_for_all(self) -> None:
        try:
            await self._in(self._store_thread, self._clear_proof_now)
            self.bucket.proven = False
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
        """
        rows = None
        if not self.bucket.knows_producer(name):
            rows = await self._in(self._store_thread, lambda: self.store.producer(name))
        deadline = time.monotonic() + _PRODUCER_WAIT_SECONDS
        while True:
            try:
                return self.bucket.open_producer(name, rows)
            except TooManyError:
                # Producers whose writes are stored can be forgotten.
                if self.bucket.tail.first == self.bucket.tail.end or time.monotonic() > deadline:
                    raise
                self._flush_wanted.set()
                await self._next_change()

    async def durable(self, entry: int) -> None:
        """Wait until a tail entry is on disk.

        Raises:
            StorageFailedError: it never will be, as far as this process can tell.
        """
        while self.bucket.tail.durable <= entry:
            if self.bucket.failure is not None:
                raise self.bucket.failure
            await self._next_change()

    async def _next_change(self) -> None:
        """Wait for the next commit, flush or failure."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _changed(self) -> None:
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
                if self._stopping:
                    return
                await self._work.wait()
                continue
            if not await self._append(commit):
                return
            self.bucket.commit_done(commit)
            if self.bucket.tail.bytes >= self._config.tail_bytes:
                self._flush_wanted.set()
            self._changed()

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
                if self._stopping:
                    await self._fail(
                        StorageFailedError(f"the journal could not be written: {error}")
                    )
                    return False
                self._flush_wanted.set()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _fail(self, error: StorageFailedError) -> None:
        log.critical("storage failed: no more writes are taken", extra={"error": str(error)})
        self.bucket.fail(error)
        self._changed()
        if self._on_failure is not None:
            await self._on_failure()

    # Flushing

    async def _flush_loop(self) -> None:
        forget_at = 0.0
        while not self._stopping:
            if time.monotonic() >= forget_at:
                forget_at = time.monotonic() + _FORGET_SECONDS
                await self._forget_producers()
            try:
                await asyncio.wait_for(self._flush_wanted.wait(), self._seconds_to_flush())
            except TimeoutError:
                if not self._tail_is_old():
                    continue
            self._flush_wanted.clear()
            if not self._stopping:
                await self._flush_or_retry()

    def _seconds_to_flush(self) -> float:
        tail = self.bucket.tail
        if tail.first == tail.durable:
            return self._config.flush_seconds
        age = (now_micros() - tail[tail.first].time) / 1e6
        return min(max(self._config.flush_seconds - age, 0.01), self._config.flush_seconds)

    def _tail_is_old(self) -> bool:
        tail = self.bucket.tail
        if tail.first == tail.durable:
            return False
        return now_micros() - tail[tail.first].time >= self._config.flush_seconds * 1e6

    async def _flush_or_retry(self) -> None:
        try:
            await self.flush()
        except (OSError, lmdb.Error) as error:
            log.error("flush failed, retrying", extra={"error": str(error)})
            await asyncio.sleep(_RETRY_SECONDS)
            self._flush_wanted.set()

    async def flush(self) -> bool:
        """Store what the tail holds durably, slice by slice, and drop it; False when there was nothing."""
        plan = self.bucket.begin_flush()
        if plan is None:
            return False
        complete = False
        try:
            for part in await self._in(self._store_thread, plan.prepare):
                await self._flush_slice(plan, part)
            complete = True
        finally:
            through = self.bucket.end_flush(complete)
            self._changed()
        await self._in(self._journal_thread, lambda: self.journal.drop_through(through))
        return True

    async def _flush_slice(self, plan: FlushPlan, part: FlushSlice) -> None:
        def merge() -> tuple[Merged, dict[tuple[bytes, int], ProducerRow]]:
            merged = plan.merge(part)
            return merged, plan.producer_rows(part, merged)

        merged, producers = await self._in(self._store_thread, merge)
        rows = self.bucket.flush_rows(merged)

        def store() -> None:
            failpoints.hit("flush.before_commit")
            self.store.put_flush(merged.blocks, rows, producers)
            failpoints.hit("flush.after_commit")

        await self._in(self._store_thread, store)
        self.bucket.slice_stored(merged)
        failpoints.hit("flush.between_slices")

    async def _forget_producers(self) -> None:
        before = now_micros() - PRODUCER_SECONDS * 1_000_000
        gone = await self._in(
            self._store_thread, lambda: self.store.forget_producers(before, PRODUCERS_MAX)
        )
        if gone:
            log.info("producers forgotten", extra={"count": gone})

    # Reading

    async def read(
        self, requests: Sequence[ReadRequest], max_bytes: int, *, keys_only: bool
    ) -> list[ReadResult]:
        """Read stored blocks in a reader thread."""
        return await self._in(
            self._readers,
            lambda: read_blocks(self.store, requests, max_bytes, keys_only=keys_only),
        )

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    # Stopping

    async def close(self) -> bool:
        """Commit and flush everything, prove that it was done, and close; False when that was not possible."""
        self._stopping = True
        if self._clearing is not None:
            await self._clearing
        self._work.set()
        self._flush_wanted.set()
        self._changed()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        clean = False
        try:
            clean = await self._finish()
        except (OSError, lmdb.Error, UprError) as error:
            log.error("shutdown is not clean", extra={"error": str(error)})
        finally:
            for pool in (self._journal_thread, self._store_thread, self._readers):
                pool.shutdown(wait=True)
            self.journal.close()
            self.store.close()
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
        failpoints.hit("shutdown.before_proof")
        await self._in(self._store_thread, self.store.write_proof)
        failpoints.hit("shutdown.after_proof")
        return True
