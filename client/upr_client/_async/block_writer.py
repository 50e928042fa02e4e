"""Block writer: one call on which writes are numbered, sent in order, answered, and sent again after a lost connection."""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from upr_client import backoff
from upr_client._async.call import BucketHandle, Call, Stubs, of_object
from upr_client._async.io import (
    Background,
    Cancelled,
    Event,
    NextTurn,
    Once,
    Semaphore,
    mutex,
    now,
)
from upr_client.endpoints import moves_on
from upr_client.writes import (
    DURABILITIES,
    Applied,
    Bundle,
    Gathering,
    Group,
    Row,
    WriteResult,
    is_behind,
    not_applied,
    part_of,
    partly_refused,
    partly_written,
    result_columns,
    write_request,
)
from upr_protocol.block import Block, check_row, check_value, check_values
from upr_protocol.errors import (
    ClosedError,
    InvalidArgumentError,
    OutOfOrderError,
    PermissionDeniedError,
    QuotaExceededError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.limits import (
    GATHERED_ROWS_MAX,
    QUIET_SECONDS,
    VALUE_BYTES_MAX,
    WRITES_IN_FLIGHT_MAX,
    choice,
)
from upr_protocol.wire.codec import count_runs
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

T = TypeVar("T")
_logger = logging.getLogger("upr_client")


@dataclass(eq=False, slots=True)
class Write:
    """One write under way.

    Attributes:
        group: the single writes that it consists of; None for a block.
        over_quota: whether it is tried again over the bucket's quota too.
        number: 0 while it has none: it gets one when it is sent.
        unknown: whether a call ended, or was answered, without its outcome: then its number stays.
        refused: the retriable refusal after which it, or the rest of it, is sent again.
        failed: why partitions refused their part for good.
        problems: of each partition that refused its part, why it did so last.
        results: the answers that tell of partitions which applied their part.
    """

    request: kv_pb2.WriteRequest
    on_done: Callable[[], object] | None = None
    group: Group | None = None
    over_quota: bool = False
    number: int = 0
    unknown: bool = False
    refused: UprError | None = None
    failed: UprError | None = None
    problems: dict[int, types_pb2.Problem] = field(default_factory=dict)
    results: list[kv_pb2.WriteResult] = field(default_factory=list)
    error: UprError | None = None
    done: Event = field(default_factory=Event)

    @property
    def applied(self) -> Applied:
        return result_columns(self.results)

    async def result(self) -> Applied:
        """Wait for the outcome: the runs that were applied, or the error is raised."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.applied


class AsyncBlockWriter:
    """Writes of one producer into one bucket, in order.

    Args:
        producer: name of the writer, by which the server recognises retries.
        first_number: of the first write; None for the one after the last that the server knows of the producer. With
            it a number is a write's place: it stays also after a refusal, and when a write fails all behind it do.
    """

    def __init__(
        self, bucket: BucketHandle, producer: str, first_number: int | None = None
    ) -> None:
        self._bucket = bucket
        self._connection = bucket.connection
        self._producer = producer
        self._mutex = mutex()
        self._gathering = Gathering()
        self._next_turn = NextTurn(self._send_begun)
        self._under_way: list[Group] = []
        self._pending: dict[int, Write] = {}
        self._order = 0
        self._next_number = first_number
        self._places = first_number is not None
        self._version = 0
        self._window = WRITES_IN_FLIGHT_MAX
        self._room = Semaphore(WRITES_IN_FLIGHT_MAX)
        self._row_room = Semaphore(GATHERED_ROWS_MAX)
        self._work = Event()
        self._closing = Event()
        self._progress_at = 0.0
        self._runner: Background | None = None
        self._waiters = 0
        """How many tasks wait for an outcome; of threads, which nobody cancels, it need not be exact."""
        # Of the call that is open.
        self._call: Call | None = None
        self._accepted = False
        self._value_bytes_max = VALUE_BYTES_MAX
        self._opened = Event()
        self._ended = Event()
        self._end: UprError | None = None
        self._unsent: deque[tuple[int, Write]] = deque()
        self._expected: deque[tuple[int, Write]] = deque()
        self._previous = 0
        """The number sent last, and of the write that the server took last, both 0 for none."""
        self._taken = 0
        self._broken = False
        """True if a write was refused completely: then this call applied nothing behind it."""
        self._dead: UprError | None = None
        """Why a sequence of places goes no further."""

    async def submit(
        self,
        block: Block,
        durability: types_pb2.Durability.ValueType,
        on_done: Callable[[], object] | None = None,
        over_quota: bool = False,
    ) -> Write:
        """Queue a write behind those before it; waits while as many are outstanding as may be.

        Args:
            on_done: called when the outcome is known, in the background; must not block.
            over_quota: as of ``Write``.

        Raises:
            ClosedError: the writer was closed.
        """
        write = Write(write_request(block, durability), on_done, over_quota=over_quota)
        await self._room.take()
        with self._mutex:
            try:
                self._start()
                # What was begun before must not come behind it.
                self._send_groups(everything=True)
            except BaseException:
                # Pass the place on, so that the next waiter sees the same error.
                self._room.give_back()
                raise
            self._add(write)
        return write

    async def write_row(self, key: bytes, value: bytes | None, durability: str) -> WriteResult:
        """Write one row, together with what others write at the same time.

        It goes out at once unless a group of its kind is under way, and waits before it is taken while
        GATHERED_ROWS_MAX rows are unanswered. Whoever is cancelled later only waits no more: the row is written all
        the same.

        Raises:
            InvalidArgumentError: a value is out of its range.
            ClosedError: the writer was closed.
            UprError: why this row was not written, or may not have been.
        """
        level = choice(DURABILITIES, durability, "durability")
        done = Once()
        row = Row(key, value, check_row(key, value), done.set)
        check_value(len(value or b""), self._value_bytes_max)
        # Those who were cancelled must not pile up behind a slow server.
        await self._row_room.take()
        self._gather(self._row_room, self._gathering.add, row, level)
        # As ``waited_for``, without what that costs each row.
        self._waiters += 1
        try:
            await done.wait()
        finally:
            self._waiters -= 1
        return _given(row.outcome)

    async def write_rows(self, rows: Block, durability: types_pb2.Durability.ValueType) -> Applied:
        """Write a block of at most BLOCK_COLUMN_BYTES, together with what others write at the same time.

        As ``write_row``, but that it waits as ``submit`` does.
        """
        check_values(rows, self._value_bytes_max)
        done = Once()
        bundle = Bundle(rows, done.set)
        # In one queue with blocks: of writes of one key that wait the first goes first.
        await self._room.take()
        self._gather(self._room, self._gathering.add_bundle, bundle, durability)
        with self.waited_for():
            await done.wait()
        return _given(bundle.outcome)

    def _gather(
        self,
        room: Semaphore,
        add: Callable[[T, types_pb2.Durability.ValueType], object],
        what: T,
        durability: types_pb2.Durability.ValueType,
    ) -> None:
        """Have something that has room added to what gathers; its caller waits for its outcome."""
        with self._mutex:
            try:
                self._start()
                add(what, durability)
            except BaseException:
                # As in ``submit``.
                room.give_back()
                raise
        # A message costs more than a turn of the loop: those who are about to write come along.
        self._next_turn.ask()

    def _start(self) -> None:
        """See that the runner runs, before anything is taken: without it what is taken waits for ever."""
        if self._closing.is_set():
            raise ClosedError("the client was closed", hint="open a new one")
        if self._runner is None or self._runner.has_ended:
            self._runner = Background(self._run, "upr-writer", self._on_run_end)

    def _send_begun(self) -> None:
        with self._mutex:
            try:
                self._start()
                self._send_groups()
            except Exception:
                # Rows of which no write could be made were told so.
                return

    def _send_groups(self, *, everything: bool = False) -> None:
        failed: BaseException | None = None
        while (group := self._gathering.take(None if everything else self._under_way)) is not None:
            try:
                write = Write(group.request(), group=group)
            except BaseException as failure:
                # Nothing else would end the waiting of these rows, nor send the groups behind them.
                self._tell(group, [], {}, UprError(f"the write could not be made: {failure!r}"))
                failed = failed or failure
            else:
                self._add(write)
        if failed is not None:
            raise failed

    def _tell(
        self,
        group: Group,
        results: list[kv_pb2.WriteResult],
        refused: dict[int, types_pb2.Problem],
        error: UprError | None,
    ) -> None:
        """Tell the callers of a group their outcome, and give their room back."""
        group.tell(results, refused, error, self._version)
        room = self._room if group.kind.most else self._row_room
        for _ in group.callers:
            room.give_back()

    def _add(self, write: Write) -> None:
        if not self._pending:
            self._progress_at = now()
        group = write.group
        if group is not None:
            self._under_way.append(group)
        # Each caller has a place in the order, for when its group is split.
        self._order += 1 if group is None else len(group.callers)
        self._pending[self._order] = write
        if self._dead is not None:
            self._finish(self._order, self._dead)
            return
        self._unsent.append((self._order, write))
        self._send_some()
        self._work.set()

    def _send_some(self) -> None:
        """Send what may be sent now, in order."""
        while self._accepted and self._unsent and len(self._expected) < self._window:
            self._send(*self._unsent.popleft())

    def _send(self, order: int, write: Write) -> None:
        assert self._call is not None
        message = write.request.write
        if not write.number:
            assert self._next_number is not None
            write.number = message.number = self._next_number
            self._next_number += 1
        write.refused = None
        message.previous_number = self._previous
        self._previous = write.number
        self._expected.append((order, write))
        self._call.send(write.request)

    async def close(self, seconds: float) -> None:
        """Wait at most so long for the outstanding answers, then end the call."""
        with self._mutex:
            with suppress(Exception):
                # Rows of which no write could be made were told so.
                self._send_groups(everything=True)
            # What the window did not take is not sent any more: behind the half-close it would be dropped unseen.
            self._accepted = False
            self._closing.set()
            self._work.set()
            call, runner = self._call, self._runner
        if call is not None:
            await call.finish(seconds if self._expected else min(seconds, 1.0))
        if runner is not None:
            await runner.join()

    # In the background.

    async def _run(self) -> None:
        try:
            await self._write()
        except Cancelled:
            if self._call is not None:
                await self._call.cancel()
            raise

    def _on_run_end(self) -> None:
        """Leave the call with which the runner ended: with the writer, or cancelled with all tasks, as at the end of a program.

        Then whoever waits, or comes later, has another runner. Without them it would be in the way of the program's end.
        """
        with self._mutex:
            self._leave_call()
            if self._closing.is_set():
                self._fail_all(ClosedError("the client was closed while the write was under way"))
            elif self._pending and self._waiters:
                self._start()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """See to it that what is pending goes on while the body waits for it."""
        with self._mutex:
            self._waiters += 1
            if self._pending and not self._closing.is_set():
                self._start()
        try:
            yield
        finally:
            with self._mutex:
                self._waiters -= 1

    async def _write(self) -> None:
        attempt, away = 0, False
        while True:
            await self._work.wait()
            if self._closing.is_set():
                break
            answered_at = self._progress_at
            longest: float | None = None
            try:
                stubs = self._connection.stubs()
                error = await self._one_call(stubs)
                if not self._closing.is_set():
                    longest = self._connection.lost(error, stubs, self._progress_at != answered_at)
            except UprError as failure:
                error = failure
            except Exception as failure:
                # For example a channel closed by its owner: waiters for writes must get the error.
                error = UprError(f"writing failed: {failure!r}")
            with self._mutex:
                if self._progress_at != answered_at:
                    attempt = 0
                if not self._pending:
                    if not self._closing.is_set():
                        self._work.clear()
                    continue
                refused = next((w.refused for w in self._pending.values() if w.refused), None)
                why = refused or error
                waited = now() - self._progress_at
                limit = self._connection.retry_seconds
                # The call ended for what was refused in front of these, and the server is well.
                behind = is_behind(error) and self._progress_at != answered_at
                late = limit is not None and waited >= limit and not behind
                if late or not why.retriable:
                    self._fail_all(why)
                    if not self._closing.is_set():
                        self._work.clear()
                    continue
            if behind:
                longest = 0.0
            # What a server said of a write before says nothing of how this call ended.
            if moves_on(error) is not away:
                # How often others could not be reached says nothing of what this one refuses.
                attempt, away = 0, not away
            seconds = backoff.delay(attempt, random.random(), away=away, longest=longest)
            attempt += longest is None
            if limit is not None:
                # The last try comes when the time is over, not long after.
                seconds = max(min(seconds, limit - waited), 0.0)
            _logger.info(
                "%s: writing stopped with %s (%s); again in %.2f s",
                self._bucket.name,
                why.reason,
                why,
                seconds,
            )
            await self._closing.wait(seconds)

    async def _one_call(self, stubs: Stubs) -> UprError:
        """Open a call, send what is pending, and stay until it ends. Return why it ended."""
        self._opened.clear()
        self._ended.clear()
        self._end, self._broken = None, False
        self._previous = self._taken = 0
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
                    bucket=self._bucket.name,
                    bucket_version=self._version or self._bucket.version or None,
                    producer=self._producer,
                    results_together=True,
                )
            )
        )
        longest = self._connection.connect_timeout
        if not await self._until(self._opened, stubs, longest):
            await call.cancel()
            self._end = UnavailableError(f"the server did not accept the call within {longest:g} s")
        await self._until(self._ended, stubs)
        await call.cancel()
        with self._mutex:
            self._leave_call()
        return self._end or UnavailableError("the server ended the call")

    def _leave_call(self) -> None:
        self._call, self._accepted = None, False
        # The next server may have another limit.
        self._value_bytes_max = VALUE_BYTES_MAX
        self._renumber()

    async def _until(self, event: Event, stubs: Stubs, seconds: float | None = None) -> bool:
        """Wait for an event of the call, at most so long; the call ends when its server is silent, and another is active or
        ``retry_seconds`` are over."""
        until = None if seconds is None else now() + seconds
        while True:
            left = None if until is None else max(until - now(), 0.0)
            if await event.wait(QUIET_SECONDS if left is None else min(left, QUIET_SECONDS)):
                return True
            if left == 0.0:
                return False
            with self._mutex:
                waited = now() - self._progress_at if self._pending else 0.0
            if waited < QUIET_SECONDS or self._closing.is_set():
                continue
            error = await self._connection.elsewhere(stubs, self._bucket.name)
            limit = self._connection.retry_seconds
            if error is None and limit is not None and waited >= limit:
                # Else its writes would wait until gRPC notices that the connection is dead.
                error = await self._connection.silent(stubs, self._bucket.name)
            if error is not None and self._call is not None:
                with self._mutex:
                    # How the call ended because its connection was given up says less.
                    self._end, self._accepted = error, False
                await self._call.cancel()

    def _renumber(self) -> None:
        """After a call: what it may have applied keeps its number, the rest of what is pending gets new ones.

        What is in front of a write of unknown outcome keeps its own as well: a new one would be above that write's,
        and the server would take that write for a repetition.
        """
        if not self._broken:
            for _, write in self._expected:
                write.unknown = True
        self._expected.clear()
        if self._places:
            return
        for write in reversed(self._pending.values()):
            if write.unknown:
                break
            write.number = 0

    def _on_end(self, error: UprError | None) -> None:
        with self._mutex:
            self._accepted = False
            self._end = self._end or (error and of_object(error))
        self._ended.set()
        self._opened.set()

    def _on_message(self, message: kv_pb2.WriteResponse) -> None:
        with self._mutex:
            kind = message.WhichOneof("message")
            if kind == "opened":
                self._on_opened(message.opened)
            else:
                for result in message.results.results if kind == "results" else [message.result]:
                    self._on_result(result)
                # Those who were told, and write again, come along.
                self._next_turn.ask()

    def _on_opened(self, opened: kv_pb2.WriteOpened) -> None:
        # Also where only its object has read from the bucket before.
        if {self._version, self._bucket.version} - {0, opened.bucket_version}:
            self._break_off(self._bucket.gone())
            return
        self._version = self._bucket.version = opened.bucket_version
        self._connection.learn(opened.servers)
        self._window = min(opened.writes_in_flight or WRITES_IN_FLIGHT_MAX, WRITES_IN_FLIGHT_MAX)
        # What is refused in a group costs those beside it a call, or several.
        self._value_bytes_max = opened.max_value_bytes or VALUE_BYTES_MAX
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
            self._break_off(
                UnavailableError(f"the server answered write {result.number} out of turn")
            )
            return
        # First: of a table that cannot be read the outcome stays unknown.
        has_runs = count_runs(result.runs) > 0
        order, write = self._expected.popleft()
        if result.HasField("refused") and not result.refused_partitions:
            self._on_refused(order, write, of_object(error_of(result.refused)))
            return
        self._taken = write.number
        if self._broken:
            # A server that took it all the same: what was refused must not come behind it any more.
            for earlier, other in list(self._pending.items()):
                if earlier < order and other.refused is not None:
                    self._finish(earlier, other.refused)
        if has_runs:
            write.results.append(result)
        again = []
        if refused := result.refused_partitions:
            again = [one for one in refused if one.problem.retriable]
            failed = [one for one in refused if not one.problem.retriable]
            write.problems |= {one.partition: one.problem for one in refused}
            if failed:
                write.failed = write.failed or partly_refused(
                    failed, applied=bool(write.results or again)
                )
        if again:
            write.request = part_of(write.request, {one.partition for one in again})
            write.refused = error_of(again[0].problem)
            self._break_off(write.refused)
        else:
            self._finish(order, write.failed)
            if write.failed is not None and self._places:
                self._fail_behind(write.failed)
            self._send_some()

    def _fail_behind(self, error: UprError) -> None:
        """Fail the writes behind a failed place: a retry of the same writes resumes with that one."""
        self._break_off(error)
        self._renumber()
        self._fail_all(error)

    def _on_refused(self, order: int, write: Write, error: UprError) -> None:
        """The call did not take a write, so it refuses those that were sent behind it as well."""
        if error.reason == UnknownOutcomeError.default_reason:
            write.unknown = True
        else:
            self._broken = True
        # Whoever waits for a write can free room, which takes other writes; a Writer has nothing else to do.
        over_quota = not write.over_quota and isinstance(error, QuotaExceededError)
        if error.retriable and not over_quota:
            write.refused = error
            self._break_off(error)
            return
        if self._broken and write.unknown:
            # Refused this time: an earlier call may have applied it.
            error = self._failure(write, error)
        behind = bool(self._expected)
        if write.group is None or not self._split(order, write, error):
            # Where a partition refused its part only for now, this is what became of it.
            write.problems = {p: why for p, why in write.problems.items() if not why.retriable}
            self._finish(order, error)
        if self._places:
            self._fail_behind(error)
        elif behind:
            self._break_off(OutOfOrderError("an earlier write was refused; this one is retried"))
        else:
            # What is sent from here on names the last one that was taken, and so may be applied.
            self._previous, self._broken = self._taken, False
            self._send_some()

    def _split(self, order: int, write: Write, error: UprError) -> bool:
        """Send a group that was refused for good again as two if one row may be the reason; False if it cannot be."""
        assert write.group is not None
        count = len(write.group.callers)
        # Any other reason would refuse each part as well, one lost call after the other.
        if not isinstance(error, InvalidArgumentError | PermissionDeniedError):
            return False
        if write.unknown or write.results or write.problems or count == 1:
            return False
        first, second = write.group.split(count // 2)
        parts = []
        for place, group in ((order, second), (order - count + count // 2, first)):
            parts.append((place, Write(group.request(), group=group)))
        # Only now, when nothing can fail any more: what is not pending is never told.
        del self._pending[order]
        self._pending.update(parts)
        self._unsent.extendleft(parts)
        self._pending = dict(sorted(self._pending.items()))
        self._under_way.remove(write.group)
        self._under_way += (first, second)
        self._progress_at = now()
        return True

    def _finish(self, order: int, error: UprError | None) -> None:
        write = self._pending.pop(order)
        write.error = error
        self._progress_at = now()
        write.done.set()
        if write.on_done is not None:
            write.on_done()
        if write.group is None:
            self._room.give_back()
            return
        self._under_way.remove(write.group)
        # What is refused only for now may have been applied by a later attempt of unknown outcome.
        refused = {
            p: why for p, why in write.problems.items() if not (write.unknown and why.retriable)
        }
        self._tell(write.group, write.results, refused, error)

    def _fail_all(self, error: UprError) -> None:
        self._dead = error if self._places else None
        for order, write in list(self._pending.items()):
            self._finish(order, self._failure(write, error))
        self._unsent.clear()
        # What waits for its turn would be tried no longer than what is in front of it.
        while (group := self._gathering.take()) is not None:
            self._tell(group, [], {}, not_applied(error))

    def _failure(self, write: Write, error: UprError) -> UprError:
        if write.unknown:
            return UnknownOutcomeError(
                f"write {write.number} was sent and not answered: {error.message}",
                hint="read the key to see whether it was applied, or write again if that does no harm",
            )
        if write.failed is not None:
            return write.failed
        if write.refused is not None and not is_behind(write.refused):
            if not write.results:
                return write.refused
            return partly_written(write.refused)
        return not_applied(error)


def _given(outcome: T | UprError | None) -> T:
    """Return an outcome that was told, or raise it."""
    if isinstance(outcome, UprError):
        raise outcome
    assert outcome is not None
    return outcome
