"""Positions of consumers go to the store: what they acknowledge about once a second, what they save at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import lmdb

from upr import failpoints
from upr.engine.consumers import Consumers
from upr.engine.owners import fenced
from upr.engine.saves import Save, rows_of
from upr.storage.keyspace import ConsumerRow
from upr_protocol.errors import StorageFailedError

log = logging.getLogger(__name__)

SAVE_SECONDS = 1.0
SAVE_ROWS = 4096
"""About as many rows in one transaction."""

Rows = dict[tuple[bytes, int], ConsumerRow | None]


class ConsumerSaver:
    """Stores the changes of one bucket's consumers, one transaction after the other.

    Args:
        consumers: whose.
        write: writes the rows that a function returns, in one transaction; calls it in the store thread.
    """

    def __init__(
        self, consumers: Consumers, write: Callable[[Callable[[], Rows]], Awaitable[None]]
    ) -> None:
        self._consumers = consumers
        self._write = write
        self._one_at_a_time = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._begun: dict[asyncio.Task[None], str] = {}

    async def run(self) -> None:
        """Save about once a second until ``stop``; what fails is tried again."""
        while not self._stopping.is_set():
            try:
                await self.save()
            except (OSError, lmdb.Error) as error:
                log.error(
                    "positions of consumers were not stored, retrying", extra={"error": str(error)}
                )
            try:
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def stop(self) -> None:
        """Have ``run`` return; what is not stored yet is left to one more ``save``."""
        self._stopping.set()

    async def save(self) -> None:
        """Store everything that was acknowledged up to now.

        Raises:
            OSError, lmdb.Error: the store cannot be written; what was not stored is kept for the next time.
        """
        async with self._one_at_a_time:
            while await self._save_some():
                pass

    async def _save_some(self) -> bool:
        changes = self._consumers.take_changes(SAVE_ROWS)
        if changes is None:
            return False
        try:
            await self._write(changes.rows)
        except BaseException:
            self._consumers.put_back(changes)
            raise
        return True

    # Positions that consumers save

    def begin(self, save: Save, ended: Callable[[], None]) -> "asyncio.Task[None]":
        """Take a save and store it, also if nobody waits for the task.

        Args:
            ended: called when it is stored, or was given up.

        The task raises StorageFailedError: nothing of it was stored. And FencedError: its consumer was forgotten.

        Raises:
            TooManyError: see ``Saves.add``; ``ended`` is not called.
        """
        self._consumers.saves.add(save)
        task = asyncio.create_task(self._store(save, ended))
        self._begun[task] = save.name
        task.add_done_callback(self._done)
        return task

    async def _store(self, save: Save, ended: Callable[[], None]) -> None:
        try:
            async with self._one_at_a_time:
                # Whoever has the lock stores for those who wait for it.
                while not save.ended:
                    await self._store_waiting()
        except (OSError, lmdb.Error) as error:
            save.failure = error
        finally:
            ended()
        if save.void:
            raise fenced(f"consumer {save.name!r} was forgotten meanwhile")
        if save.failure is not None:
            raise StorageFailedError(
                f"the positions could not be stored: {save.failure}",
                hint="save them again",
                retriable=True,
            ) from save.failure

    async def _store_waiting(self) -> None:
        while self._consumers.is_removing:
            # Rows of a consumer that was forgotten must not be removed behind those that it writes anew.
            await self._save_some()
        saves = self._consumers.saves
        taken = saves.take(SAVE_ROWS)

        def rows() -> Rows:
            failpoints.hit("positions.before_commit")
            return rows_of(taken)

        try:
            await self._write(rows)
        except BaseException as error:
            saves.failed(taken, error)
            raise
        saves.stored(taken)

    def _done(self, task: "asyncio.Task[None]") -> None:
        del self._begun[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("positions of a consumer were not stored", extra={"error": str(error)})

    async def settled(self, name: str) -> None:
        """Wait for the saves of a consumer that have begun; those that begin later are not waited for."""
        begun = [task for task, owner in self._begun.items() if owner == name]
        if begun:
            await asyncio.wait(begun)

    async def finish(self) -> None:
        """Wait for all saves that have begun."""
        await asyncio.gather(*self._begun, return_exceptions=True)
