"""The disk of one open bucket: the threads that own its journal and store, and their trouble.

One thread owns the journal, but for records that a writer in C writes, one makes the store's write transactions, one
merges what a flush stores, one compares and rebuilds what is compacted, two read. The bucket's background workers are
handed a Disk.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import lmdb

from upr.service.buckets.room import DiskRoom, Quota
from upr.service.clock import Clock
from upr.service.sight.counts import Traffic
from upr.service.storage_trouble import Troubles, words_of
from upr.storage.blocks import compressor
from upr.storage.journal import Commit, Journal, Record
from upr.storage.lmdb_pages import DATA_FILE, RESTORE_HINT
from upr.storage.store import Counters, Store
from upr_protocol.block import COMPILED
from upr_protocol.errors import (
    BucketGoneError,
    DataDamagedError,
    ShuttingDownError,
    StorageFailedError,
)

try:
    from upr.service.buckets._writer import Writer
except ImportError:
    Writer = None  # type: ignore[assignment, misc]

WRITER = None if COMPILED is None else Writer
"""Thread that writes records without the interpreter lock; where it is not compiled, the journal's own thread writes them."""
_READERS = 2
_C = TypeVar("_C")
_T = TypeVar("_T")
_Answer = asyncio.Future[Any]


class Worker:
    """Thread, or several, that run functions for event loops, in the order in which they are asked for.

    Each write waits for the journal's, and an executor's own work takes a tenth of a lone write's time.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._name = name
        self._count = count
        self._work: SimpleQueue[tuple[_Answer, Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._closed = False

    def run(self, call: Callable[[], _T]) -> "asyncio.Future[_T]":
        """Run a function; the future has what it returns. If that is cancelled before its turn it is not run.

        Raises:
            OSError: its thread cannot be started.
        """
        if self._closed:
            raise RuntimeError(f"the {self._name} thread has ended")
        while len(self._threads) < self._count:
            # A daemon, so that a process whose bucket was never closed can end.
            thread = Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # As what else the system lacks for a moment: it is tried again.
                raise OSError(errno.EAGAIN, f"{self._name}: {error}") from error
            self._threads.append(thread)
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._work.put((answer, call))
        return answer

    def close(self) -> None:
        """Run what was asked for and end the threads."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            answer, call = work
            result: Any = None
            error: BaseException | None = None
            if not answer.cancelled():
                try:
                    result = call()
                except BaseException as failure:
                    error = failure
            # The loop of a server that did not wait for the end may be closed.
            with suppress(RuntimeError):
                answer.get_loop().call_soon_threadsafe(_settle, answer, result, error)
            # They hold a commit, and the next one may be long in coming.
            del work, answer, call, result, error


def _settle(answer: _Answer, result: object, error: BaseException | None) -> None:
    if answer.cancelled():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


class Disk:
    """Journal and store of one open bucket.

    Args:
        tell: called when trouble with the storage begins or ends.
        fail: called when the storage has failed for good.

    Attributes:
        identity: the bucket's, as the store has it.
        gone: set when the bucket is dropped.
        stopping: whether the bucket is being closed.

    Raises:
        DataDirectoryError: the store's format or compression is unknown.
        DataDamagedError: identity or journal are damaged.
    """

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        room: DiskRoom,
        tell: Callable[[], None],
        fail: Callable[[StorageFailedError], None],
    ) -> None:
        self.clock = clock
        self.room = room
        self.counters = Counters()
        self.traffic = Traffic()
        self.gone: BucketGoneError | None = None
        self.stopping = False
        self._fail = fail
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.store = Store(folder / "store")
        try:
            identity = self.store.identity()
            if identity is None:
                raise DataDamagedError(
                    f"{folder / 'store' / DATA_FILE} has no identity of a bucket: it is empty, or was gone",
                    hint=RESTORE_HINT,
                )
            self.identity = identity
            self.troubles = Troubles(identity.name, tell)
            self.compress = compressor(identity.compression)
            self.quota = Quota(self.store)
            self.journal = Journal(folder / "journal", identity.version)
            self._writer = None if WRITER is None else WRITER(folder / "journal")
        except BaseException:
            self.store.close()
            raise
        self._journal_thread = Worker("journal")
        self._journal_turn = asyncio.Lock()
        self._store_thread = Worker("store")
        self._flush_thread = Worker("flush")
        self._merge_thread = Worker("merge")
        self._readers = Worker("reader", _READERS)

    # Threads

    async def in_store_thread(self, call: Callable[[], _T]) -> _T:
        try:
            return await self._in(self._store_thread.run, call)
        except lmdb.PanicError as error:
            # No later transaction of this process would succeed.
            self._fail(StorageFailedError(f"the store has failed: {words_of(error)}"))
            raise

    async def in_flush_thread(self, call: Callable[[], _T]) -> _T:
        return await self._in(self._flush_thread.run, call)

    async def in_merge_thread(self, call: Callable[[], _T]) -> _T:
        return await self._in(self._merge_thread.run, call)

    def in_reader(self, call: Callable[[], _T]) -> Coroutine[Any, Any, _T]:
        """Run a function of a few short transactions in a reader thread."""
        return self._in(self._readers.run, call)

    async def in_journal_thread(self, call: Callable[[], _T]) -> _T:
        async with self._journal_turn:
            return await self._in(self._journal_thread.run, call)

    async def append(self, commit: Commit) -> int:
        """Journal a commit, and return its bytes; see ``Journal.append``. It is cancelled only where the bucket is dropped."""
        async with self._journal_turn:
            record = None if self._writer is None else self.journal.record_of(commit)
            if record is None:
                return await self._in(self._journal_thread.run, lambda: self.journal.append(commit))
            told = await self._in(self._write, record)
            if told[0]:
                # What is left of it is taken back.
                await self._in(self._journal_thread.run, lambda: self.journal.wrote(record, *told))
            else:
                self.journal.wrote(record, *told)
            return record.size

    def _write(self, record: Record) -> "asyncio.Future[tuple[int, float, int]]":
        writer, loop = self._writer, asyncio.get_running_loop()
        assert writer is not None
        answer: asyncio.Future[tuple[int, float, int]] = loop.create_future()

        def written() -> None:
            loop.remove_reader(writer.fileno())
            told = writer.result()
            assert told is not None
            _settle(answer, told, None)

        writer.write(record.fd, record.pieces, record.at)
        loop.add_reader(writer.fileno(), written)
        return answer

    async def _in(self, run: Callable[[_C], Awaitable[_T]], call: _C) -> _T:
        self.check_not_gone()
        result = await run(call)
        # Dropped meanwhile: the read may be incomplete, and the folder renamed.
        self.check_not_gone()
        return result

    def check_not_gone(self) -> None:
        """Raise BucketGoneError once the bucket is dropped."""
        if self.gone is not None:
            # It is raised again and again, and must not keep the frames of all callers.
            raise self.gone.with_traceback(None)

    def check_open(self) -> None:
        """Raise BucketGoneError or ShuttingDownError while the bucket is being closed."""
        if self.stopping:
            self.check_not_gone()
            raise ShuttingDownError("the server is stopping", hint="connect again")

    def refresh_quota(self) -> None:
        """Measure the bucket's size in a reader thread, without waiting for it."""
        self._readers.run(self.quota.refresh)

    # Waiting for changes

    async def next_change(self) -> None:
        """Wait for the next commit, flush, acknowledgement of a replica, or failure."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at_next_change(future)
        try:
            await future
        finally:
            # A caller that gives up must leave nothing behind: the next change may be days away.
            self._waiting.pop(future, None)

    def at_next_change(self, future: asyncio.Future[None]) -> None:
        """Have a future end at the next change, for a caller that does not wait for it by itself."""
        self._waiting[future] = None

    def changed(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Wait for the threads, and close journal and store."""
        self._merge_thread.close()
        self._journal_thread.close()
        if self._writer is not None:
            self._writer.close()
            # And give its descriptor back.
            self._writer = None
        self._flush_thread.close()
        self._store_thread.close()
        self._readers.close()
        self.journal.close()
        self.store.close()
