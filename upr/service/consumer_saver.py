"""What consumers acknowledged goes to the store about once a second, and whole at shutdown."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import lmdb

from upr.engine.consumers import Consumers
from upr.storage.keyspace import ConsumerRow

log = logging.getLogger(__name__)

SAVE_SECONDS = 1.0
SAVE_ROWS = 4096
"""About as many rows in one transaction."""

Rows = dict[tuple[bytes, int], ConsumerRow | None]


class ConsumerSaver:
    """Stores the changes of one bucket's consumers.

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
        """Store everything that changed up to now.

        Raises:
            OSError, lmdb.Error: the store cannot be written; what was not stored is kept for the next time.
        """
        async with self._one_at_a_time:
            while (changes := self._consumers.take_changes(SAVE_ROWS)) is not None:
                try:
                    await self._write(changes.rows)
                except BaseException:
                    self._consumers.put_back(changes)
                    raise
