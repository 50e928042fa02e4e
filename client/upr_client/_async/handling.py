"""Changes handed to a function, many at a time, in order where it counts, tried again, and acknowledged."""

import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from upr_client import backoff
from upr_client._async.adapter import Background, Event, Queue, mutex, settle
from upr_client.events import Change, ChangeBatch, Rollback
from upr_client.handling import HandlingOptions, failed
from upr_protocol.errors import ClosedError

if TYPE_CHECKING:
    from upr_client._async.changes import AsyncChanges


Lane = Queue[Change | None]
"""What is handled one after the other, up to the first None."""


class Handling:
    """One ``AsyncChanges.run``.

    Args:
        handler: takes a change; what it returns is waited for, if that can be.
    """

    def __init__(
        self, changes: "AsyncChanges", handler: Callable[[Change], Any], options: HandlingOptions
    ) -> None:
        self._changes = changes
        self._handler = handler
        self._options = options
        self._lanes = [Lane() for _ in range(options.concurrency)]
        self._mutex = mutex()
        self._under_way = 0
        self._idle = Event()
        self._idle.set()
        self._leaving = Event()
        self._failure: tuple[Change, BaseException] | None = None

    async def run(self) -> None:
        """Handle everything until the end.

        Raises:
            HandlerError: a change could not be handled, and there is nobody to take it.
            UprError: as iterating raises.
        """
        workers = [Background(partial(self._work, lane), "upr-handler") for lane in self._lanes]
        try:
            async for batch in self._changes.batches():
                if batch.rollbacks:
                    await self.drain()
                    await self._tell(batch.rollbacks)
                self._share(batch)
            await self.drain()
        except ClosedError:
            if self._failure is None:
                raise
        finally:
            self._leaving.set()
            for lane in self._lanes:
                lane.put(None)
            for worker in workers:
                await worker.join()
        if self._failure is not None:
            raise failed(*self._failure)

    async def drain(self) -> None:
        """Wait until everything that was handed out is handled."""
        await self._idle.wait()

    async def _tell(self, rollbacks: list[Rollback]) -> None:
        for rollback in rollbacks:
            if self._options.on_rollback_event is not None:
                await settle(self._options.on_rollback_event(rollback))

    def _share(self, batch: ChangeBatch) -> None:
        by_key, count = self._options.order == "key", len(self._lanes)
        for change in batch.changes:
            number = zlib.crc32(change.key) if by_key else change.partition
            with self._mutex:
                self._under_way += 1
                self._idle.clear()
            self._lanes[number % count].put(change)

    async def _work(self, lane: Lane) -> None:
        while (change := await lane.get()) is not None:
            try:
                if not self._leaving.is_set() and self._changes._may_handle(change):
                    await self._handle(change)
            except BaseException as error:
                # Also a handler that was cancelled: a lane that is gone would hold its changes up for ever.
                self._fail(change, error)
            finally:
                with self._mutex:
                    self._under_way -= 1
                    if not self._under_way:
                        self._idle.set()

    async def _handle(self, change: Change) -> None:
        attempt = 0
        while True:
            try:
                await settle(self._handler(change))
                break
            except Exception as error:
                if attempt >= self._options.retries:
                    if await self._give_up(change, error):
                        break
                    return
                seconds = backoff.delay(attempt, random.random())
                attempt += 1
                if await self._leaving.wait(seconds):
                    return
                if not self._changes._may_handle(change):
                    return
        self._changes.ack(change)

    async def _give_up(self, change: Change, error: Exception) -> bool:
        """Give a change that cannot be handled to who takes those; False when nobody does."""
        if self._options.dead_letter is not None:
            try:
                await settle(self._options.dead_letter(change, error))
                return True
            except Exception as second:
                error = second
        self._fail(change, error)
        return False

    def _fail(self, change: Change, error: BaseException) -> None:
        self._failure = self._failure or (change, error)
        self._leaving.set()
        self._changes._stop()
