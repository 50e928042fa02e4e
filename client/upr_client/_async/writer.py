"""Buffered writer: rows gathered into batches for the block writer."""

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Self

from upr_client._async.block_writer import AsyncBlockWriter, Write
from upr_client._async.call import BucketHandle
from upr_client._async.io import Background, Event, give_way, maybe_await, mutex, now
from upr_client.writes import DURABILITIES, Batch, Failures, WriteResults, WriterOptions, none_given
from upr_protocol.block import ROW_BYTES, build_block, check_row
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX, choice

_logger = logging.getLogger("upr_client")


class AsyncWriter:
    """A writer that gathers rows; made by ``AsyncBucket.writer``, used with ``async with``.

    ``set`` and ``delete`` return when the row is taken, and wait while too much is outstanding. Rows are applied in
    the order in which they were taken, also over lost connections. What went wrong with a batch is raised by the
    next call, which then takes nothing itself, by ``flush``, or on leaving the ``with`` block; each failure once.
    Several tasks (or threads, in the other flavour) may use one writer.
    """

    def __init__(
        self,
        bucket: BucketHandle,
        writer: Callable[[], AsyncBlockWriter],
        open_writers: "list[AsyncWriter]",
        options: WriterOptions,
    ) -> None:
        self._bucket = bucket
        self._writer = writer
        self._open_writers = open_writers
        self._options = options
        self._level = DURABILITIES[options.durability]
        self._batch_cells = 2 * options.batch_rows
        self._batch_bytes = options.batch_bytes
        self._outstanding_max = options.max_outstanding_bytes
        self._process = os.getpid()
        self._mutex = mutex()
        # The last of them is open unless it is sealed. Each change of them is one step, which an interrupt does not divide.
        self._gathered: deque[Batch] = deque()
        self._under_way: deque[tuple[Batch, Write | None, UprError | None]] = deque()
        self._outstanding = 0
        # Numbers of batches: the last one that was submitted, and the last one with an outcome.
        self._sent = self._finished = 0
        self._failures = Failures()
        self._entered = False
        self._stopped = False
        self._abandoned = False
        # What ended the sending, where that was no error of a batch.
        self._broken = ""
        self._refusing = True
        """True if the next row is refused: not open, closed, or with a failure to raise."""
        self._waiting: list[Event] = []
        self._wake = Event()
        self._sender: Background | None = None

    # Beginning and end.

    async def __aenter__(self) -> Self:
        self._bucket.connection.check_usable()
        if self._stopped or self._entered:
            raise ClosedError("the writer was used before", hint="ask the bucket for a new one")
        self._entered = True
        self._refusing = False
        self._open_writers.append(self)
        self._see_to_sender()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.close()
            return
        await self._end(self._bucket.connection.request_timeout)
        with self._mutex:
            failure = self._failures.take()
        if failure is not None:
            # The error that ends the block tells more.
            _logger.warning("%s: %s", self._bucket.name, failure)

    async def close(self) -> None:
        """Write everything that was taken, and end. Doing it twice is harmless.

        Raises:
            WriteFailedError: as ``flush``.
        """
        await self._end(None)
        if self._process == os.getpid():
            self._tell_failure()

    async def _end(self, seconds: float | None) -> None:
        """Take nothing more, and wait at most so long for what was taken; what is left then counts as failed."""
        if self._process != os.getpid():
            # Rows accepted before the fork are written by the other process.
            return
        with self._mutex:
            self._stopped = self._refusing = True
            self._seal()
            number = self._begun
        if not self._entered or self._abandoned:
            return
        if await self._until_finished(number, seconds):
            self._wake.set()
            if self._sender is not None:
                await self._sender.join()
        else:
            self._abandon(
                ClosedError(f"no answer arrived within {seconds:.3g} s after the writer was closed")
            )
        if self in self._open_writers:
            self._open_writers.remove(self)

    def _abandon(self, error: UprError) -> None:
        with self._mutex:
            self._abandoned = True
            for batch in [*(item[0] for item in self._under_way), *self._gathered]:
                self._failures.add(batch, error)
            self._sent = self._finished = self._begun
            self._gathered.clear()
            self._under_way.clear()
            self._refusing = True
            self._outstanding = 0
            self._notify()
        self._wake.set()

    # Taking rows.

    async def set(self, key: bytes, value: bytes, durability: str | None = None) -> None:
        """Have one key written; returns when it was taken, which is before it is applied.

        Once taken it is written also if this call is cancelled while it waits for room.

        Args:
            key, value, durability: as in ``AsyncBucket.set``; None for the writer's durability. A batch waits for the
                strongest of its rows.

        Raises:
            InvalidArgumentError: a value is out of its range; the row was not taken.
            WriteFailedError: rows that were taken before failed; this one was not taken.
            ClosedError: the writer or client was closed, or belongs to another process.
        """
        if value is None:
            raise none_given()
        if self._put(key, value, durability):
            await self._make_room()

    async def delete(self, key: bytes, durability: str | None = None) -> None:
        """Have one key deleted, whether it exists or not; as ``set``."""
        if self._put(key, None, durability):
            await self._make_room()

    def _put(self, key: bytes, value: bytes | None, durability: str | None) -> bool:
        """Take a row. Return whether the others should have a turn, or room must be waited for."""
        if self._process != os.getpid():
            self._bucket.connection.check_usable()
        if (
            type(key) is not bytes
            or not 0 < len(key) <= KEY_BYTES_MAX
            or (value is not None and (type(value) is not bytes or len(value) > VALUE_BYTES_MAX))
        ):
            check_row(key, value)
        level = self._level
        if durability is not None:
            level = choice(DURABILITIES, durability, "durability")
        size = len(key) + ROW_BYTES if value is None else len(key) + len(value) + ROW_BYTES
        with self._mutex:
            if self._refusing:
                self._refuse()
            batch = self._gathered[-1] if self._gathered else None
            if batch is None or batch.sealed or batch.bytes + size > self._batch_bytes:
                batch = self._begin()
            if level > batch.level:
                batch.level = level
            batch.cells += (key, value)
            batch.bytes += size
            self._outstanding += size
            if len(batch.cells) >= self._batch_cells:
                self._seal()
                return True
            return self._outstanding > self._outstanding_max

    def _refuse(self) -> None:
        self._tell_failure()
        self._bucket.connection.check_usable()
        if not self._entered:
            raise ClosedError("the writer is not open", hint="use it in a with statement")
        if self._broken:
            raise UprError(self._broken, hint="ask the bucket for a new writer")
        if self._stopped:
            raise ClosedError("the writer was closed", hint="ask the bucket for a new one")

    def _begin(self) -> Batch:
        self._seal()
        batch = Batch(self._begun + 1, now() + self._options.linger_seconds)
        self._gathered.append(batch)
        self._see_to_sender()
        self._wake.set()
        return batch

    def _seal(self) -> None:
        if self._gathered:
            self._gathered[-1].sealed = True
            self._wake.set()

    @property
    def _begun(self) -> int:
        """Return the number of the last batch that was begun; asked for under the mutex."""
        return self._gathered[-1].number if self._gathered else self._sent

    # Waiting.

    async def _make_room(self) -> None:
        await give_way()
        while True:
            with self._mutex:
                if self._outstanding <= self._outstanding_max or self._refusing:
                    return
                self._seal()
                changed = self._changed()
            self._see_to_sender()
            with self._writer().waited_for():
                await changed.wait()

    def _changed(self) -> Event:
        """Return a flag that is set when the next batch is finished, to be asked for under the mutex."""
        event = Event()
        self._waiting.append(event)
        return event

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()

    async def _until_finished(self, number: int, seconds: float | None) -> bool:
        deadline = None if seconds is None else now() + seconds
        while True:
            with self._mutex:
                if self._finished >= number:
                    return True
                changed = self._changed()
            self._see_to_sender()
            left = None if deadline is None else deadline - now()
            if left is not None and left <= 0:
                return False
            with self._writer().waited_for():
                await changed.wait(left)

    async def flush(self) -> None:
        """Send what was taken so far without lingering, and wait until it was applied.

        Raises:
            WriteFailedError: rows failed; it tells how many, the first 100 keys, and the partitions.
            ClosedError: the writer was closed before.
        """
        if self._process != os.getpid():
            self._bucket.connection.check_usable()
        with self._mutex:
            if self._stopped or not self._entered:
                self._refuse()
            self._seal()
            number = self._begun
        await self._until_finished(number, None)
        self._tell_failure()

    def _tell_failure(self) -> None:
        with self._mutex:
            failure = self._failures.take()
            self._refusing = self._stopped or bool(self._failures)
        if failure is not None:
            raise failure

    # In the background.

    def _see_to_sender(self) -> None:
        if self._sender is None or self._sender.has_ended:
            # As of the block writer: who waits for what was taken sees to another sender.
            self._sender = Background(self._run, "upr-batches", self._notify)

    async def _run(self) -> None:
        try:
            while not self._abandoned:
                # First: what happens from here on wakes it again.
                self._wake.clear()
                moved = await self._collect()
                batch = self._take_due()
                if batch is not None:
                    await self._send(batch)
                elif not moved:
                    with self._mutex:
                        if self._stopped and self._finished == self._begun:
                            return
                        due = self._gathered[0].due if self._gathered else None
                    await self._wake.wait(None if due is None else max(due - now(), 0.0))
        except Exception as failure:
            # Waiters must get the error, and whoever comes later.
            with self._mutex:
                self._stopped, self._broken = True, f"writing failed: {failure!r}"
                self._seal()
            self._abandon(UprError(self._broken))

    def _take_due(self) -> Batch | None:
        with self._mutex:
            first = self._gathered[0] if self._gathered else None
            if first is None or not (first.sealed or now() >= first.due):
                return None
            first.sealed = True
            # It stays there until it is under way, so that it is never out of sight.
            return first

    async def _send(self, batch: Batch) -> None:
        write, error = None, None
        try:
            # One is empty where an interrupt came when it was begun.
            if batch.cells:
                block = build_block(batch.keys, batch.cells[1::2])
                write = await self._writer().submit(
                    block, batch.level, self._wake.set, over_quota=True
                )
            # Not before, as whoever is cancelled there has sent nothing.
            if self._options.on_results is None:
                batch.cells[1::2] = [None] * len(batch.keys)
        except UprError as failure:
            error = failure
        with self._mutex:
            if not self._abandoned:
                self._under_way.append((self._gathered.popleft(), write, error))
                self._sent = batch.number
        if write is None:
            self._wake.set()

    async def _collect(self) -> bool:
        """Take in the outcome of the batches at the head that have one; False when there is none."""
        moved = False
        while True:
            with self._mutex:
                if not self._under_way:
                    return moved
                batch, write, error = self._under_way[0]
                if write is not None:
                    if not write.done.is_set():
                        return moved
                    error = write.error
            moved = True
            if (
                write is not None
                and error is None
                and self._options.on_results is not None
                and not batch.told
            ):
                # First: what is cancelled in it is not called again.
                batch.told = True
                results = WriteResults(len(batch.keys), write.applied, self._bucket.version)
                try:
                    await maybe_await(self._options.on_results(batch.rows(), results))
                except Exception as failure:
                    with self._mutex:
                        self._failures.raised(failure)
            with self._mutex:
                if self._abandoned:
                    return moved
                self._under_way.popleft()
                if error is not None:
                    applied = [] if write is None else write.applied[0].tolist()
                    self._failures.add(batch, error, applied)
                self._refusing = self._stopped or bool(self._failures)
                self._outstanding -= batch.bytes
                self._finished = batch.number
                self._notify()
