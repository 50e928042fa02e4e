"""Handing changes to a function of the application, many at a time."""

import random
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from upr_client import backoff
from upr_client._async.io import Background, Event, Queue, maybe_await, mutex
from upr_client.changes.events import Change, Rollback
from upr_client.changes.options import HandlingOptions
from upr_protocol.errors import HandlerError

Lane = Queue[Change | None]
"""Queue of changes handled one after the other, up to the first None."""


class Handled(Protocol):
    """What is needed of an ``AsyncChanges``."""

    def batches(self) -> Any: ...
    def stop(self) -> None: ...
    def _may_handle(self, change: Change) -> bool: ...
    def _handled(self, change: Change) -> None: ...
    def _not_undone(self) -> None: ...
    async def _call(self, function: Callable[..., Any], *arguments: object) -> Any: ...


class Handling:
    """One ``AsyncChanges.run``."""

    def __init__(
        self, changes: Handled, handler: Callable[[Change], Any], options: HandlingOptions
    ) -> None:
        self._changes = changes
        self._handler = handler
        self._options = options
        self._lanes = [Lane() for _ in range(options.concurrency)]
        self._mutex = mutex()
        self._under_way = 0
        self._begun: dict[int, int] = {}
        self._idle = Event()
        self._idle.set()
        self._leaving = Event()
        self._left: list[Change] = []
        self._failure: tuple[Change, BaseException] | None = None

    async def run(self, left: list[Change]) -> None:
        """Handle everything until the end; raises as ``AsyncChanges.run``.

        Args:
            left: what an earlier one has not handled, because it was cancelled; takes what this one leaves.
        """
        again = sorted(left, key=lambda change: (change.partition, change.seqno))
        left.clear()
        self._left = left
        workers = [Background(partial(self._work, lane), "upr-handler") for lane in self._lanes]
        try:
            self._share(again)
            async for item in self._changes.batches():
                if isinstance(item, Rollback):
                    assert self._options.on_rollback_event is not None
                    try:
                        await self._changes._call(self._options.on_rollback_event, item)
                    except BaseException:
                        self._changes._not_undone()
                        raise
                else:
                    self._share(item.changes)
        finally:
            self._leaving.set()
            for lane in self._lanes:
                lane.put(None)
            for worker in workers:
                await worker.join()
        if self._failure is not None:
            change, error = self._failure
            raise HandlerError(
                f"the handler failed for key {change.key[:60]!r} of partition {change.partition} at seqno "
                f"{change.seqno}: {error!r}",
                hint="fix the handler and run again, and the change is delivered again; or pass dead_letter= to "
                "receive such changes",
            ) from error

    async def drain(self) -> None:
        """Wait until everything that was handed out is handled, or left."""
        await self._idle.wait()
        with self._mutex:
            self._begun.clear()

    def leave(self) -> None:
        """Begin nothing more but what lies below a change of its partition that was begun.

        Without those the position would stay below changes that are handled, and they would come again.
        """
        self._leaving.set()

    def _may_begin(self, change: Change) -> bool:
        with self._mutex:
            newest = self._begun.get(change.partition, 0)
            if self._leaving.is_set() and change.seqno > newest:
                return False
            self._begun[change.partition] = max(newest, change.seqno)
        return self._changes._may_handle(change)

    def _share(self, changes: Iterable[Change]) -> None:
        by_key, count = self._options.order == "key", len(self._lanes)
        for change in changes:
            number = zlib.crc32(change.key) if by_key else change.partition
            with self._mutex:
                self._under_way += 1
                self._idle.clear()
            self._lanes[number % count].put(change)

    async def _work(self, lane: Lane) -> None:
        while (change := await lane.get()) is not None:
            try:
                if self._may_begin(change):
                    await self._handle(change)
            except BaseException as error:
                # Also for a cancelled handler: an ended lane would hold its changes for ever.
                self._fail(change, error)
            finally:
                with self._mutex:
                    if self._leaving.is_set():
                        self._left.append(change)
                    self._under_way -= 1
                    if not self._under_way:
                        self._idle.set()

    async def _handle(self, change: Change) -> None:
        attempt = 0
        while True:
            try:
                await maybe_await(self._handler(change))
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
        self._changes._handled(change)

    async def _give_up(self, change: Change, error: Exception) -> bool:
        """Give a failed change to dead_letter; False without one."""
        if self._options.dead_letter is not None:
            try:
                await maybe_await(self._options.dead_letter(change, error))
                return True
            except Exception as second:
                error = second
        self._fail(change, error)
        return False

    def _fail(self, change: Change, error: BaseException) -> None:
        self._failure = self._failure or (change, error)
        self._leaving.set()
        self._changes.stop()
