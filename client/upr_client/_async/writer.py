"""One Write call and its successors: numbers writes, matches answers, and sends again what was not answered."""

import logging
import random
from collections import deque
from collections.abc import Callable

from upr_client import backoff
from upr_client._async.adapter import Background, Event, Places, mutex, now
from upr_client._async.connection import Call
from upr_client._async.routing import Stubs
from upr_client.results import partly_known, partly_refused, result_runs, window_of, write_request
from upr_protocol.block import Block
from upr_protocol.errors import (
    BucketGoneError,
    ClosedError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.limits import WRITES_IN_FLIGHT_MAX
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

_logger = logging.getLogger("upr_client")

Run = tuple[int, int, int, int]


class Write:
    """One write under way."""

    __slots__ = ("done", "error", "number", "on_done", "refused", "request", "runs", "sent")

    def __init__(
        self, request: kv_pb2.WriteRequest, on_done: Callable[[], object] | None = None
    ) -> None:
        self.request = request
        self.on_done = on_done
        self.number = 0
        self.sent = False
        """Whether it may have been applied."""
        self.refused: UprError | None = None
        """The retriable refusal it is to be sent again after."""
        self.runs: list[Run] = []
        self.error: UprError | None = None
        self.done = Event()

    async def result(self) -> list[Run]:
        """Wait for the outcome: the runs that were applied, or the error is raised."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.runs


class AsyncWriter:
    """Writes of one producer into one bucket, in order.

    Args:
        stubs: returns the services of the endpoint to use now.
        failed: is told why a call was lost, and what it was opened with.
        bucket: the bucket's name.
        producer: who writes, for the server to recognise what is sent again.
        connect_seconds: how long the server may take to accept a call.
        retry_seconds: how long to try without any progress; None for ever.
        on_version: is told the bucket's version.
        first_number: of the first write; None for the one after the last that the server knows of the producer.
    """

    def __init__(
        self,
        stubs: Callable[[], Stubs],
        failed: Callable[[UprError, Stubs], None],
        bucket: str,
        producer: str,
        connect_seconds: float,
        retry_seconds: float | None,
        on_version: Callable[[int], None],
        first_number: int | None = None,
    ) -> None:
        self._stubs = stubs
        self._failed = failed
        self._bucket = bucket
        self._producer = producer
        self._connect_seconds = connect_seconds
        self._retry_seconds = retry_seconds
        self._on_version = on_version
        self._mutex = mutex()
        self._pending: dict[int, Write] = {}
        self._order = 0
        self._next_number = first_number
        self._version = 0
        self._window = WRITES_IN_FLIGHT_MAX
        self._room = Places(WRITES_IN_FLIGHT_MAX)
        self._work = Event()
        self._closing = Event()
        self._progress_at = 0.0
        self._runner: Background | None = None
        # Of the call that is open.
        self._call: Call | None = None
        self._accepted = False
        self._opened = Event()
        self._ended = Event()
        self._end: UprError | None = None
        self._unsent: deque[tuple[int, Write]] = deque()
        self._expected: deque[tuple[int, Write]] = deque()

    async def submit(
        self,
        block: Block,
        durability: types_pb2.Durability.ValueType,
        on_done: Callable[[], object] | None = None,
    ) -> Write:
        """Queue a write behind those before it; waits while as many are outstanding as may be.

        Args:
            on_done: called when the outcome is known, in the background; must not block.

        Raises:
            ClosedError: the writer was closed.
        """
        write = Write(write_request(block, durability), on_done)
        await self._room.take()
        with self._mutex:
            if self._closing.is_set():
                # Whoever waits behind gets the place, to see the same.
                self._room.give_back()
                raise ClosedError("the client was closed", hint="open a new one")
            self._add(write)
        return write

    def _add(self, write: Write) -> None:
        if not self._pending:
            self._progress_at = now()
        self._order += 1
        self._pending[self._order] = write
        self._unsent.append((self._order, write))
        self._send_some()
        self._work.set()
        if self._runner is None:
            self._runner = Background(self._run, "upr-writer")

    def _send_some(self) -> None:
        """Send what may be sent now, in order."""
        while self._accepted and self._unsent and len(self._expected) < self._window:
            self._send(*self._unsent.popleft())

    def _send(self, order: int, write: Write) -> None:
        assert self._call is not None
        if not write.number:
            assert self._next_number is not None
            write.number = write.request.write.number = self._next_number
            self._next_number += 1
        write.sent, write.refused = True, None
        self._expected.append((order, write))
        self._call.send(write.request)

    async def close(self, seconds: float) -> None:
        """Wait at most so long for the outstanding answers, then end the call."""
        with self._mutex:
            self._closing.set()
            self._work.set()
            call, runner = self._call, self._runner
        if call is not None:
            await call.finish(seconds if self._expected else min(seconds, 1.0))
        if runner is not None:
            await runner.join()

    # In the background.

    async def _run(self) -> None:
        attempt = 0
        while True:
            await self._work.wait()
            if self._closing.is_set():
                break
            answered_at = self._progress_at
            try:
                stubs = self._stubs()
                error = await self._one_call(stubs)
                if not self._closing.is_set():
                    self._failed(error, stubs)
            except UprError as failure:
                error = failure
            except Exception as failure:
                # A channel closed by its owner, say: whoever waits for a write must learn of it.
                error = UprError(f"writing failed: {failure!r}")
            with self._mutex:
                if self._progress_at != answered_at:
                    attempt = 0
                if not self._pending:
                    if not self._closing.is_set():
                        self._work.clear()
                    continue
                refused = next((w.refused for w in self._pending.values() if w.refused), None)
                error = refused or error
                waited = now() - self._progress_at
                limit = self._retry_seconds
                if not error.retriable or (limit is not None and waited >= limit):
                    self._fail_all(error)
                    self._unsent.clear()
                    if not self._closing.is_set():
                        self._work.clear()
                    continue
            seconds = backoff.delay(attempt, random.random())
            attempt += 1
            _logger.info(
                "%s: writing stopped with %s (%s); again in %.2f s",
                self._bucket,
                error.reason,
                error,
                seconds,
            )
            await self._closing.wait(seconds)
        with self._mutex:
            self._fail_all(ClosedError("the client was closed while the write was under way"))

    async def _one_call(self, stubs: Stubs) -> UprError:
        """Open a call, send what is pending, and stay until it ends. Return why it ended."""
        self._opened.clear()
        self._ended.clear()
        self._end = None
        call = Call(stubs.keys.Write, "upr-write", self._on_message, self._on_end)
        with self._mutex:
            self._call = call
            closing = self._closing.is_set()
        if closing:
            # ``close`` came before there was a call that it could end.
            await call.cancel()
        call.send(
            kv_pb2.WriteRequest(
                open=kv_pb2.WriteOpen(
                    bucket=self._bucket,
                    bucket_version=self._version or None,
                    producer=self._producer,
                )
            )
        )
        if not await self._opened.wait(self._connect_seconds):
            await call.cancel()
            self._end = UnavailableError(
                f"the server did not accept the call within {self._connect_seconds:g} s"
            )
        await self._ended.wait()
        await call.cancel()
        with self._mutex:
            self._call, self._accepted = None, False
            self._expected.clear()
        return self._end or UnavailableError("the server ended the call")

    def _on_end(self, error: UprError | None) -> None:
        with self._mutex:
            self._accepted = False
            self._end = self._end or error
        self._ended.set()
        self._opened.set()

    def _on_message(self, message: kv_pb2.WriteResponse) -> None:
        with self._mutex:
            if message.WhichOneof("message") == "opened":
                self._on_opened(message.opened)
            else:
                self._on_result(message.result)

    def _on_opened(self, opened: kv_pb2.WriteOpened) -> None:
        if self._version not in (0, opened.bucket_version):
            self._break_off(
                BucketGoneError(
                    f"bucket {self._bucket} was dropped and created anew since this writer began",
                    hint="ask the client for the bucket again, to write into the new one",
                )
            )
            return
        self._version = opened.bucket_version
        self._on_version(opened.bucket_version)
        self._window = window_of(opened)
        if self._next_number is None:
            self._next_number = opened.last_number + 1
        self._accepted = not self._closing.is_set()
        self._unsent = deque(self._pending.items())
        self._send_some()
        self._opened.set()

    def _break_off(self, error: UprError) -> None:
        """Send nothing more over this call, and try again with another one if the error allows."""
        self._end = self._end or error
        self._accepted = False
        if self._call is not None:
            self._call.half_close()
        self._opened.set()

    def _on_result(self, result: kv_pb2.WriteResult) -> None:
        if not self._expected or self._expected[0][1].number != result.number:
            self._expected.clear()
            self._break_off(
                UnavailableError(f"the server answered write {result.number} out of turn")
            )
            return
        order, write = self._expected.popleft()
        if result.HasField("refused"):
            self._on_refused(order, write, error_of(result.refused))
            return
        # What was refused before this one cannot be sent again behind it: an older value would win, and by its
        # number it would be taken for a duplicate.
        for earlier, other in list(self._pending.items()):
            if earlier < order and other.refused is not None:
                self._finish(earlier, other.refused)
        write.runs = result_runs(result)
        refused = partly_refused(result.refused_partitions)
        self._finish(order, refused or partly_known(write.request, write.runs))
        self._send_some()

    def _on_refused(self, order: int, write: Write, error: UprError) -> None:
        if not error.retriable:
            self._finish(order, error)
            self._send_some()
            return
        write.refused = error
        write.sent = error.reason == UnknownOutcomeError.default_reason
        self._break_off(error)

    def _finish(self, order: int, error: UprError | None) -> None:
        write = self._pending.pop(order)
        write.error = error
        self._progress_at = now()
        write.done.set()
        if write.on_done is not None:
            write.on_done()
        self._room.give_back()

    def _fail_all(self, error: UprError) -> None:
        for order, write in list(self._pending.items()):
            self._finish(order, self._failure(write, error))

    def _failure(self, write: Write, error: UprError) -> UprError:
        if write.sent:
            return UnknownOutcomeError(
                f"write {write.number} was sent and not answered: {error.message}",
                hint="it may have been applied; read the key, or write again if that does no harm",
            )
        if write.refused is not None:
            return write.refused
        if not error.retriable:
            return error
        return UnavailableError(f"the write was not sent: {error.message}", hint=error.hint)
