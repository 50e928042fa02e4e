"""The disk of one open bucket: its journal and store, the threads that own them, and their trouble.

One thread owns the journal, one makes the store's write transactions, two read. The bucket's background workers are
handed a Disk.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import lmdb

from upr.service.buckets.room import DiskRoom, Quota
from upr.service.clock import Clock
from upr.service.trouble import Troubles, words_of
from upr.storage.blocks import compressor
from upr.storage.journal import Journal
from upr.storage.store import Counters, Store
from upr_protocol.errors import BucketGoneError, StorageFailedError

_READERS = 2
_T = TypeVar("_T")


class Disk:
    """Journal and store of one open bucket.

    Args:
        folder: the bucket's in the data directory.
        clock: the server's.
        room: on the disk, which all buckets share.
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
        self.gone: BucketGoneError | None = None
        self.stopping = False
        self._fail = fail
        self._waiting: list[asyncio.Future[None]] = []
        self.store = Store(folder / "store")
        try:
            identity = self.store.identity()
            if identity is None:
                raise StorageFailedError(f"{folder} holds a store without an identity")
            self.identity = identity
            self.troubles = Troubles(identity.name, tell)
            self.compress = compressor(identity.compression)
            self.quota = Quota(self.store)
            self.journal = Journal(folder / "journal", identity.version)
        except BaseException:
            self.store.close()
            raise
        self._journal_thread = ThreadPoolExecutor(1, "journal")
        self._store_thread = ThreadPoolExecutor(1, "store")
        self._readers = ThreadPoolExecutor(_READERS, "reader")

    # Threads

    async def in_store_thread(self, call: Callable[[], _T]) -> _T:
        """Run a function in the thread that makes the store's transactions."""
        try:
            return await self._in(self._store_thread, call)
        except lmdb.PanicError as error:
            # No later transaction of this process would succeed.
            self._fail(StorageFailedError(f"the store has failed: {words_of(error)}"))
            raise

    async def in_reader(self, call: Callable[[], _T]) -> _T:
        """Run a function of a few short transactions in a reader thread."""
        return await self._in(self._readers, call)

    async def in_journal_thread(self, call: Callable[[], _T]) -> _T:
        """Run a function in the thread that owns the journal."""
        return await self._in(self._journal_thread, call)

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        if self.gone is not None:
            raise self.gone
        result = await asyncio.get_running_loop().run_in_executor(pool, call)
        if self.gone is not None:
            # The bucket was dropped meanwhile: the read may be incomplete, and the folder renamed.
            raise self.gone
        return result

    def refresh_quota(self) -> None:
        """Measure the bucket's size in a reader thread, without waiting for it."""
        asyncio.get_running_loop().run_in_executor(self._readers, self.quota.refresh)

    # Waiting for changes

    async def next_change(self) -> None:
        """Wait for the next commit, flush or failure."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def changed(self) -> None:
        """Wake all that wait for a change."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def journal_dropped(self) -> None:
        """Wake all that wait for room: journal segments were removed."""
        self.room.changed()
        self.changed()

    def claim_room(self, size: int) -> AbstractContextManager[None]:
        """Reserve room on the disk while the body writes."""
        return self.room.claimed(size)

    def close(self) -> None:
        """Wait for the threads, and close journal and store."""
        for pool in (self._journal_thread, self._store_thread, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self.journal.close()
        self.store.close()
