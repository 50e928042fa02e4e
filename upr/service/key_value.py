"""KeyValueService: writes, numbered as they come in and answered in order as they become durable; gets, from tail and store."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import lmdb
import numpy as np

from upr.engine.bucket import Written
from upr.engine.partitions import ACTIVE, Partitions
from upr.engine.producers import ProducerCall
from upr.service.access.rules import PERMIT
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.overload.callers import Callers, Turns, peer_of
from upr.service.overload.gate import parsed, read_open
from upr.service.overload.intake import LARGE_BYTES, Context, Intake, shed_error
from upr.service.overload.process import SAMPLE_SECONDS, LoopDelays
from upr.service.sight import traces
from upr.service.sight.counts import count_reason, refusals
from upr.service.storage_trouble import words_of
from upr.storage.read import all_begin_with
from upr.storage.search import BITE_BYTES, Lookup, Newest, StoreSearch, TailSearch
from upr_protocol.block import U64, Block, check_row
from upr_protocol.errors import (
    BehindError,
    BucketGoneError,
    DataDamagedError,
    InvalidArgumentError,
    ShuttingDownError,
    StorageFailedError,
    TooManyError,
    UnknownOutcomeError,
    UprError,
    WriteUndoneError,
)
from upr_protocol.failover import WrittenSeqno, format_failover_id
from upr_protocol.limits import (
    AT_LEAST_MAX,
    AT_LEAST_SECONDS_MAX,
    FRAME_BYTES,
    GET_ANSWER_BYTES_MAX,
    GET_CALLS_MAX,
    GET_KEYS_MAX,
    PARTITIONS,
    REPLICATED_SECONDS,
    WAITING_GET_BYTES,
    WAITING_GETS_BYTES_MAX,
    WRITE_OUTCOME_SECONDS,
    WRITE_ROWS_BYTES_MAX,
    WRITES_IN_FLIGHT_MAX,
    check_name,
)
from upr_protocol.wire.codec import block_of_write, problem_of, varint_at
from upr_protocol.wire.v1 import key_value_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

_NOTHING = np.zeros(PARTITIONS, np.uint64)
GETS_AT_ONCE = 2
"""Number of concurrent searches; others wait for their turn."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise InvalidArgumentError unless there are 1 to GET_KEYS_MAX keys within their limits."""
    if not 1 <= len(keys) <= GET_KEYS_MAX:
        raise InvalidArgumentError(
            f"keys of a Get are {len(keys)}; must be 1 to {GET_KEYS_MAX}", hint="send several Gets"
        )
    for key in keys:
        check_row(key, None)


async def find_newest(host: BucketService, lookup: Lookup) -> None:
    """Search until every key is found, does not exist, or is in a partition that cannot be read.

    Results are as new as this call, or newer. The tail is looked through, and then the store up to what it has when
    that is done: a flush drops from the index of the tail what it stored, at any moment. A missing key may have been
    written, flushed and compacted during the search. So partitions with a flush since then are searched again for
    newer rows.
    """
    bucket = host.bucket
    table = bucket.partitions
    for partition in lookup.pending:
        if not table.serves(partition):
            lookup.fail([partition], table.refusal(partition))
    host.disk.check_not_gone()
    in_tail = _tail_search(host, lookup)
    if in_tail.is_quick:
        # Waking a thread takes longer.
        in_tail.bite(BITE_BYTES)
    floors = _NOTHING
    while lookup.pending:
        search = _Search(host, lookup, in_tail, floors)
        while not await host.disk.in_reader(search.bite):
            pass
        if not lookup.pending:
            return
        lookup.settle(table.stored == search.stored)
        floors = search.stored
        in_tail = _tail_search(host, lookup)


def _tail_search(host: BucketService, lookup: Lookup) -> TailSearch:
    tail = host.bucket.tail
    first = max(host.tail_keys.end, tail.first)
    return TailSearch(lookup, host.tail_keys, first, tail.range(first, tail.end))


class _Search:
    """Search of the tail, and then of the blocks that are in the store above some floors, seqnos of shape (1024,).

    Attributes:
        stored: the ends up to which the store is searched, shape (1024,); the floors until the tail is done.
    """

    def __init__(
        self, host: BucketService, lookup: Lookup, in_tail: TailSearch, floors: U64
    ) -> None:
        self._store = host.disk.store
        self._lookup = lookup
        self._in_tail = in_tail
        self._floors = floors
        self._in_store: StoreSearch | None = None
        # As it is when it is copied: the loop changes it while threads search.
        self._stored_now = host.bucket.partitions.stored
        self.stored = floors

    def bite(self) -> bool:
        """Take a bite of tail or store, for most keys of both; return whether the search is done."""
        if self._in_store is None:
            if not self._in_tail.bite():
                return False
            self.stored = self._stored_now.copy()
            self._in_store = StoreSearch(self._lookup, self._store, self._floors, self.stored)
        return self._in_store.bite()


def written_seqnos(request: wire.GetRequest) -> list[WrittenSeqno]:
    """Return what a Get is to wait for; InvalidArgumentError if it is too much, or out of range."""
    if len(request.at_least) > AT_LEAST_MAX:
        raise InvalidArgumentError(
            f"writes of a Get are {len(request.at_least)}; must be at most {AT_LEAST_MAX}"
        )
    if not 0 <= request.wait_seconds <= AT_LEAST_SECONDS_MAX:
        raise InvalidArgumentError(
            f"wait_seconds is {request.wait_seconds}; must be 0 to {AT_LEAST_SECONDS_MAX:g}"
        )
    return [
        WrittenSeqno(one.partition, one.failover_id, one.seqno).check() for one in request.at_least
    ]


def is_here(table: Partitions, one: WrittenSeqno, *, newest: bool) -> bool:
    """Return whether a write is here, as a part of a complete state.

    Args:
        newest: whether no other server can be the active one.

    Raises:
        WriteUndoneError: it was undone, or never given.
        BehindError: that cannot be told here: another server knows, or this one later.
    """
    log, active = table.logs[one.partition], bool(table.state[one.partition] == ACTIVE)
    given = log.gave(one.failover_id, one.seqno)
    never = bool(given) and active and one.seqno > table.high[one.partition]
    if (given is None or never) and not (active and newest):
        # It may be of a failover that this server has not heard of.
        raise _behind(table, one)
    if never:
        raise WriteUndoneError(
            f"seqno {one.seqno} of partition {one.partition} was never given, or is lost: the newest is {table.high[one.partition]}",
            hint="read the key, and write again what is still wanted",
        )
    return one.is_in(log, int(table.complete[one.partition]), newest=True)


def _behind(table: Partitions, one: WrittenSeqno) -> BehindError:
    return BehindError(
        f"partition {one.partition} is at {table.complete[one.partition]} under {format_failover_id(int(table.newest_id[one.partition]))} "
        f"here; must have {one.seqno} of {format_failover_id(one.failover_id)}",
        hint="ask another server, or later",
        owner=table.owner,
    )


async def until_written(
    host: BucketService,
    writes: list[WrittenSeqno],
    seconds: float,
    check: Callable[[], bool],
) -> None:
    """Wait until the bucket has all writes; those that were found are taken out of the list.

    Args:
        check: raises what ends the waiting, where it does; returns whether no other server can be the active one.

    Raises:
        BehindError: it does not have one within ``seconds``.
        WriteUndoneError: one was undone.
        BucketGoneError, ShuttingDownError: the bucket is being closed.
        UprError: ``check`` raised it.
    """
    table, loop = host.bucket.partitions, asyncio.get_running_loop()
    until = loop.time() + seconds
    while writes:
        if is_here(table, writes[-1], newest=check()):
            # Not looked at again: a history that changes closes the bucket.
            writes.pop()
            continue
        host.disk.check_open()
        try:
            async with asyncio.timeout_at(until):
                await host.disk.next_change()
        except TimeoutError:
            raise _behind(table, writes[-1]) from None


_ABSENT: Newest = (0, None)


def _answer(host: BucketService, lookup: Lookup, keys: Sequence[bytes]) -> wire.GetResponse:
    if lookup.problems:
        host.compactor.damaged(
            {
                partition: error
                for partition, error in lookup.problems.items()
                if isinstance(error, DataDamagedError)
            }
        )
    response = wire.GetResponse(bucket_version=host.bucket.identity.version)
    ids = host.bucket.partitions.newest_id.item
    answers, found = response.answers, lookup.found
    size = 0
    for key in keys:
        number = lookup.numbers[key]
        partition = lookup.partitions[number]
        seqno, value = found.get(number, _ABSENT)
        if value:
            size += len(value)
        if number >= lookup.end or (size > GET_ANSWER_BYTES_MAX and len(answers)):
            break
        # Field by field takes less than all in one call.
        answer = answers.add()
        if not seqno and partition in lookup.problems:
            answer.problem.CopyFrom(problem_of(lookup.problems[partition]))
            continue
        if value is not None:
            answer.value = value
        answer.seqno = seqno
        answer.failover_id = ids(partition)
    return response


BYTE_SECONDS = 1 / 100e6
FRAME_BYTE_SECONDS = 1 / 150e6
RUN_SECONDS = 6e-6
"""Least cost of a write's byte, of a byte for each follower, and of a run for each follower. The next large write waits
for that time, and the loop is free for small writes."""
LATE_WAIT_SECONDS = 1.0
"""Longest wait of a large write for the loop to be on time."""
SLOW_SECONDS = 1.0
"""Time after which a write that is not durable is waited for with a deadline of its own."""
BULK_BYTES = 32 * 2**10
LATE_SECONDS = 0.05
"""Delay of the loop above which writes of BULK_BYTES take turns; writes of LARGE_BYTES always do."""
GONE_SECONDS = 0.5
"""Time after a drop of the bucket in which a call still answers, so that writes on their way get an error and not
silence."""
_WRITE_TAG = wire.WriteRequest.WRITE_FIELD_NUMBER << 3 | 2
_NUMBER_TAG = wire.WriteBlock.NUMBER_FIELD_NUMBER << 3
_BLOCK_TAG = wire.WriteBlock.BLOCK_FIELD_NUMBER << 3 | 2
_ROWS_TAG = wire.WriteBlock.ROWS_FIELD_NUMBER << 3 | 2
_NUMBER_BITS = 70
OUTLINE_FIELDS = 64
"""Fields of an encoded write and its block that are looked at; with FURTHER_COLUMNS_MAX they are fewer."""
_MEMORY = -1
_COPIES = {
    types.DURABILITY_UNSPECIFIED: 0,
    types.DURABILITY_MEMORY: _MEMORY,
    types.DURABILITY_DISK: 0,
    types.DURABILITY_REPLICATED_1: 1,
    types.DURABILITY_REPLICATED_2: 2,
    types.DURABILITY_REPLICATED_3: 3,
}
"""Replicas that must have a write before it is acknowledged; _MEMORY if not even this server's disk must."""


@dataclass(slots=True)
class _Pending:
    """Write with a pending answer: numbered, or refused; ``copies`` as in _COPIES."""

    number: int
    copies: int = 0
    deadline: float = 0.0
    written: Written | None = None
    error: UprError | None = None


class KeyValueMethods:
    """Methods of KeyValueService.

    Attributes:
        bulk: turns of the calls with large writes.
    """

    def __init__(
        self,
        catalog: Catalog,
        intake: Intake,
        delays: LoopDelays | None = None,
        callers: Callers | None = None,
    ) -> None:
        self._intake = intake
        self._catalog = catalog
        self._turns = asyncio.Semaphore(GETS_AT_ONCE)
        self._open_gets = self._waiting_bytes = 0
        self.callers = callers or Callers()
        self.bulk = Turns()
        self.delays = delays or LoopDelays()
        self._calls: set[_WriteCall] = set()
        self._stopping = False

    async def Get(self, request: wire.GetRequest, context: Context) -> wire.GetResponse:
        """Return the newest value of each key."""
        check_keys(request.keys)
        try:
            host = self._catalog.to_read(request)
            if request.at_least:
                await self._until_written(host, request)
                host = self._catalog.to_read(request)
            if self._open_gets >= GET_CALLS_MAX:
                raise TooManyError(
                    f"open Gets are {self._open_gets}; must be below {GET_CALLS_MAX}",
                    hint="one Get takes many keys; to read much, follow the bucket",
                )
            self._open_gets += 1
            try:
                async with self._turns:
                    lookup = Lookup(request.keys, GET_ANSWER_BYTES_MAX)
                    await find_newest(host, lookup)
                    response = _answer(host, lookup, request.keys)
            finally:
                self._open_gets -= 1
            if not request.any_server:
                self._catalog.check_active()
            response.servers.extend(self._catalog.servers())
            return response
        except BucketGoneError as error:
            raise self._catalog.not_here(error) from None
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"the store cannot be read: {words_of(error)}", retriable=True
            ) from error

    async def _until_written(self, host: BucketService, request: wire.GetRequest) -> None:
        writes = written_seqnos(request)
        size = request.ByteSize() + WAITING_GET_BYTES
        if self._waiting_bytes + size > WAITING_GETS_BYTES_MAX:
            raise TooManyError(
                f"Gets that wait would be {self._waiting_bytes + size} bytes; must be at most {WAITING_GETS_BYTES_MAX}",
                hint="ask again, or another server",
            )
        self._waiting_bytes += size

        def check() -> bool:
            if not request.any_server:
                self._catalog.check_active()
            return self._catalog.is_newest()

        try:
            await until_written(host, writes, request.wait_seconds, check)
        finally:
            self._waiting_bytes -= size

    async def Write(self, request_iterator: object, context: Context) -> None:
        """Serve one call; see ``key_value_service.proto``."""
        call = await self._open(context)
        self._calls.add(call)
        try:
            await call.run()
        finally:
            self._calls.discard(call)
            call.close()

    async def _open(self, context: Context) -> "_WriteCall":
        await self.callers.open_write(peer_of(context.peer()))
        opening = await read_open(self._intake, context, wire.WriteRequest, "Write")
        await self._catalog.check_active_soon()
        host = self._catalog.of(opening)
        producer = None
        if opening.producer:
            name = PERMIT.get().producer(check_name(opening.producer, "producer"))
            producer = await host.producers.open(name)
        call = _WriteCall(self, host, context, self._intake, producer, opening.results_together)
        opened = wire.WriteOpened(
            bucket_version=host.bucket.identity.version,
            last_number=producer.producer.last_number if producer else 0,
            writes_in_flight=WRITES_IN_FLIGHT_MAX,
            max_value_bytes=host.max_value_bytes,
            servers=self._catalog.servers(),
        )
        try:
            await context.write(wire.WriteResponse(opened=opened))
            if self._stopping:
                # The call was not registered yet when the others were ended.
                raise ShuttingDownError("the server is stopping", hint="connect again")
        except BaseException:
            call.close()
            raise
        return call

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def shut_down(self) -> None:
        """End every call after it has answered the writes it received."""
        self._stopping = True
        for call in self._calls:
            call.shut_down()


class _WriteCall:
    """Open Write call: one task reads and numbers, another waits and answers."""

    def __init__(
        self,
        methods: KeyValueMethods,
        host: BucketService,
        context: Context,
        intake: Intake,
        producer: ProducerCall | None,
        together: bool,
    ) -> None:
        self._methods = methods
        self._host = host
        self._context = context
        self._peer = peer_of(context.peer())
        self._rounds = methods.callers.rounds(self._peer)
        self._producer = producer
        self._together = together
        self._permit = PERMIT.get()
        self._pending: deque[_Pending] = deque()
        self._idle: asyncio.Future[None] | None = None
        """Ends when there may be something to answer; None while that is looked for, or answered."""
        self._timer: asyncio.TimerHandle | None = None
        self._answered = asyncio.Event()
        self._read_all = False
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False
        self._gone: BucketGoneError | None = None
        self._shed = False
        self._arriving = intake.expect(context, self.shed)
        self._trace = traces.of_call("upr.write", host.bucket.identity.name, context)
        host.users.add(self.bucket_gone)

    async def run(self) -> None:
        """Serve until the client half-closes, the server stops, or the bucket is dropped."""
        self._reader = asyncio.create_task(self._read())
        try:
            await self._answer()
        finally:
            if self._read_no_more():
                await asyncio.gather(self._reader, return_exceptions=True)
            # Its exception would keep the last frame, with a block, and through it this call.
            self._reader = None
        if self._gone is not None:
            raise self._gone
        if self._shed:
            raise shed_error()
        if self._stopping:
            raise ShuttingDownError("the server is stopping", hint="connect again")

    def shut_down(self) -> None:
        """Stop reading; received writes are still answered."""
        self._stopping = True
        self._read_no_more()
        self._host.give_up_copies()

    def shed(self) -> None:
        """Stop reading, because too much is arriving; received writes are still answered."""
        self._shed = True
        self._read_no_more()

    def bucket_gone(self, error: BucketGoneError) -> None:
        """Refuse writes for a moment, because the bucket was dropped, then end the call.

        A write that was not numbered gets BUCKET_GONE: it was never applied. A numbered write that is not durable gets
        UNKNOWN_OUTCOME: if the server dies before the drop is durable, the bucket will be back, with that write or
        without it.
        """
        self._gone = error
        asyncio.get_running_loop().call_later(GONE_SECONDS, self._read_no_more)

    def _read_no_more(self) -> bool:
        """End the reader; False if it ends only with the call."""
        if self._reader is None or self._arriving.stop(self._reader):
            return True
        self._all_is_read()
        return False

    def _all_is_read(self) -> None:
        self._read_all = True
        self._go_on()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._arriving.close()
        if self._trace is not None:
            self._trace.close()
        self._host.users.discard(self.bucket_gone)
        if self._producer is not None:
            self._host.bucket.close_producer(self._producer)

    async def _read(self) -> None:
        try:
            while (raw := await self._receive()) is not None:
                size = len(raw)
                await self._rounds.turn()
                if self._trace is not None:
                    self._trace.begin(bytes=size)
                takes_turn = self._takes_turn(size)
                pending = await self._refused_turn(raw) if takes_turn else None
                if pending is None:
                    pending, block = self._taken(raw)
                    # Free a large message before waiting for the next one.
                    del raw
                    if block is not None:
                        if takes_turn:
                            readers = len(self._host.bucket.followers)
                            self._methods.bulk.charge(len(block.runs) * (1 + readers) * RUN_SECONDS)
                        await self._number(pending, block)
                    del block
                else:
                    del raw
                self._pending.append(pending)
                self._look()
                while len(self._pending) >= WRITES_IN_FLIGHT_MAX:
                    # Clients use the same window; more is delayed, not refused.
                    self._answered.clear()
                    await self._answered.wait()
                if size >= LARGE_BYTES:
                    await self._arriving.calm()
                if takes_turn and pending.written is None:
                    # Charge it although it is refused, because receiving it was work.
                    await self._turn(size * BYTE_SECONDS)
        finally:
            self._all_is_read()

    async def _receive(self) -> bytes | None:
        """Return the next message; None after the last."""
        raw: Any = await self._arriving.read()
        if raw is grpc.aio.EOF:
            return None
        if len(raw) >= LARGE_BYTES:
            self._methods.callers.large_write(self._peer, len(raw))
        if self._shed:
            return None
        message: bytes = raw
        return message

    def _takes_turn(self, size: int) -> bool:
        """Return whether a write of this size must take a turn."""
        methods = self._methods
        late = size >= BULK_BYTES and methods.delays.recent > LATE_SECONDS
        return (size >= LARGE_BYTES or late) and (
            bool(self._host.bucket.followers) or methods.open_calls > 1
        )

    async def _turn(self, seconds: float) -> None:
        """Wait for a turn, and then for the loop to be on time, up to LATE_WAIT_SECONDS."""
        await self._methods.bulk.turn()
        # Charge before any wait: otherwise all waiting writes would continue together.
        self._methods.bulk.charge(seconds)
        delays, until = self._methods.delays, time.monotonic() + LATE_WAIT_SECONDS
        while delays.recent > LATE_SECONDS and time.monotonic() < until:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._methods.bulk.charge(SAMPLE_SECONDS)

    async def _refused_turn(self, raw: bytes) -> _Pending | None:
        """Wait for a write's turn before parsing it, which copies it; return a refusal if too much waits."""
        readers = len(self._host.bucket.followers)
        try:
            with self._host.waiting_room.waiting(len(raw)):
                await self._turn(len(raw) * (BYTE_SECONDS + readers * FRAME_BYTE_SECONDS))
            return None
        except TooManyError as error:
            return _Pending(outline_of(raw).number, error=error.with_traceback(None))

    def _taken(self, raw: bytes) -> tuple[_Pending, Block | None]:
        """Parse a write and its block; None if it is refused."""
        if len(raw) > WRITE_ROWS_BYTES_MAX and (outline := outline_of(raw)).has_many_rows:
            error = InvalidArgumentError(
                f"a write of several rows, or more fields than a block has, is {len(raw)} bytes; must be at most {WRITE_ROWS_BYTES_MAX}",
                hint="send several writes, or blocks",
            )
            return _Pending(outline.number, error=error), None
        request = parsed(wire.WriteRequest.FromString, raw, "a message of a Write call")
        if request.WhichOneof("message") != "write":
            raise InvalidArgumentError("a message of a Write call that is neither Open nor a write")
        write = request.write
        pending = _Pending(write.number, _COPIES.get(write.durability, 0))
        try:
            if write.durability not in _COPIES:
                raise InvalidArgumentError(
                    f"durability is {write.durability}; must be 0 to {max(_COPIES)}"
                )
            if self._gone is not None:
                raise self._gone
            if self._producer is not None:
                self._producer.check(write.number, write.previous_number)
            block = block_of_write(write)
            prefixes = self._permit.identity.prefixes
            if prefixes and not all_begin_with(block, prefixes):
                raise self._permit.refused_keys()
            return pending, block
        except UprError as error:
            # The call does not carry this write, so it refuses later writes that name it as predecessor.
            pending.error = error.with_traceback(None)
            return pending, None

    async def _number(self, pending: _Pending, block: Block) -> None:
        """Number one write, or record its error."""
        producer = self._producer
        name = b"" if producer is None else producer.name
        try:
            pending.written = await self._host.write(
                block, name, producer, pending.number, max(pending.copies, 0)
            )
        except UprError as error:
            # Its traceback would keep the block until the answer is sent.
            pending.error = error.with_traceback(None)
            return
        seconds = REPLICATED_SECONDS if pending.copies > 0 else WRITE_OUTCOME_SECONDS
        pending.deadline = asyncio.get_running_loop().time() + seconds

    def _look(self) -> None:
        """Have the oldest write answered: at the next change of the disk if it waits for that, else at once."""
        if self._idle is None:
            return
        if not self._awaits_commit(self._pending[0]):
            self._go_on()
            return
        self._host.disk.at_next_change(self._idle)
        if self._timer is None:
            # For many writes together: a timer for each costs more than all else of its waiting.
            self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._is_slow)

    def _awaits_commit(self, pending: _Pending) -> bool:
        """Return whether a write waits for the journal and nothing else, and what ends that is still to come."""
        disk, bucket = self._host.disk, self._host.bucket
        if pending.copies > 0 or self._is_durable(pending) or not self._host.may_answer:
            return False
        if disk.gone is not None or bucket.failure is not None:
            return False
        return pending.deadline - asyncio.get_running_loop().time() > SLOW_SECONDS

    def _is_slow(self) -> None:
        self._timer = None
        self._go_on()

    def _go_on(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _wait(self) -> None:
        """Wait until there may be something to answer, for a write that is pending SLOW_SECONDS at most."""
        self._idle = asyncio.get_running_loop().create_future()
        if self._pending:
            self._look()
        await self._idle
        self._idle = None

    async def _answer(self) -> None:
        while True:
            if not self._pending:
                if self._read_all:
                    break
                await self._wait()
                continue
            pending = self._pending[0]
            if not self._is_durable(pending):
                await self._wait()
                if pending.written is not None and not self._is_durable(pending):
                    await self._until_durable(pending, pending.written)
            results = self._due()
            if not results:
                continue
            if len(results) == 1:
                await self._context.write(wire.WriteResponse(result=results[0]))
            else:
                together = wire.WriteResults(results=results)
                await self._context.write(wire.WriteResponse(results=together))
            for result in results:
                self._pending.popleft()
                self._count(result)
            self._answered.set()
        assert self._reader is not None
        if self._reader.done() and not self._reader.cancelled():
            # An error of the reader itself ends the call with its reason.
            self._reader.result()

    def _count(self, result: wire.WriteResult) -> None:
        refused = result.HasField("refused")
        if refused:
            count_reason(refusals, result.refused.reason)
        if self._trace is not None:
            self._trace.end(result.refused.reason if refused else "", number=result.number)
        outcome = "refused" if refused else "duplicate" if result.duplicate else "applied"
        self._host.disk.traffic.writes[outcome] += 1

    def _due(self) -> list[wire.WriteResult]:
        """Return the first result, and those behind it that are due as well, as far as one message should hold them.

        Nothing is returned when another server may be the active one by now.
        """
        results = [_result(self._pending[0])]
        size = 0
        for pending in itertools.islice(self._pending, 1, None):
            size += results[-1].ByteSize()
            if not self._together or not self._is_durable(pending) or size >= FRAME_BYTES:
                break
            results.append(_result(pending))
        # Last, because a process may stand still at any moment, and what was looked at before is old then.
        if self._host.may_answer or all(one.HasField("refused") for one in results):
            return results
        return []

    def _is_durable(self, pending: _Pending) -> bool:
        """Return whether a write is where it is to be before it is acknowledged, and this server may say so; a refused one
        is nowhere.
        """
        written, bucket = pending.written, self._host.bucket
        if written is None:
            return True
        if pending.copies != _MEMORY and written.entry >= bucket.tail.durable:
            return False
        return self._host.may_answer and (
            pending.copies <= 0 or bucket.is_stable(written, pending.copies)
        )

    async def _until_durable(self, pending: _Pending, written: Written) -> None:
        left = max(pending.deadline - asyncio.get_running_loop().time(), 0)
        try:
            async with asyncio.timeout(left):
                await self._host.durable(written.entry)
                if pending.copies > 0:
                    await self._host.replicated(written, pending.copies)
                await self._host.until_answered(written)
        except TimeoutError:
            seconds, where = WRITE_OUTCOME_SECONDS, "durable"
            if pending.copies > 0:
                seconds = REPLICATED_SECONDS
                where = f"durable here and at {pending.copies} of the counted replicas"
            pending.error = UnknownOutcomeError(
                f"write {pending.number} was not {where} within {seconds:.0f} s; it may become so",
                hint="send it again with its number to learn the outcome",
            )
        except UnknownOutcomeError as error:
            pending.error = error.with_traceback(None)
        except UprError as error:
            pending.error = UnknownOutcomeError(
                f"write {pending.number} may or may not be on disk: {error.message}",
                retriable=error.retriable,
            )


class Outline(NamedTuple):
    """What can be told of an encoded WriteRequest without parsing it.

    Args:
        number: of the write; 0 for none, or none among the first fields.
        has_many_rows: whether there are several rows, or more fields than are looked at.
    """

    number: int
    has_many_rows: bool


def outline_of(raw: bytes) -> Outline:
    """Return the outline of a message.

    Parsing a large write only to refuse it would copy all of it, and make an object of each row.

    Raises:
        InvalidArgumentError: the bytes are no such message.
    """
    number = rows = looked = 0
    # What is within: 0 a request, 1 its write, 2 the block of that, whose further columns are objects too.
    spans = [(0, len(raw), 0)]
    try:
        while spans:
            at, end, level = spans.pop()
            while at < end:
                if (looked := looked + 1) > OUTLINE_FIELDS:
                    return Outline(number, True)
                tag, at = varint_at(raw, at, _NUMBER_BITS)
                value, after = _value_at(raw, at, tag & 7)
                if level == 1 and tag == _NUMBER_TAG:
                    number = value
                elif level == 1 and tag == _ROWS_TAG:
                    rows += 1
                elif (level, tag) in ((0, _WRITE_TAG), (1, _BLOCK_TAG)):
                    spans.append((after - value, after, level + 1))
                at = after
            if at > end:
                raise IndexError
    except IndexError:
        raise InvalidArgumentError(
            f"a message of a Write call of {len(raw)} bytes is no such message"
        ) from None
    return Outline(number, rows > 1)


def _value_at(raw: bytes, at: int, kind: int) -> tuple[int, int]:
    """Return a field's number, or how many bytes it has, and where it ends; IndexError for an unknown wire type."""
    if kind in (1, 5):
        return 0, at + (8 if kind == 1 else 4)
    if kind not in (0, 2):
        raise IndexError
    value, at = varint_at(raw, at, _NUMBER_BITS)
    return value, at + (value if kind == 2 else 0)


def _result(pending: _Pending) -> wire.WriteResult:
    if pending.error is not None:
        return wire.WriteResult(number=pending.number, refused=problem_of(pending.error))
    written = pending.written
    assert written is not None
    result = wire.WriteResult(
        number=pending.number,
        runs=written.runs.tobytes(),
        failover_ids=written.failover_ids,
        duplicate=written.duplicate,
    )
    for partition, error in written.refused.items():
        result.refused_partitions.add(partition=partition, problem=problem_of(error))
        if not result.runs:
            # Nothing was applied: the first reason is that of the whole.
            result.duplicate = False
            if not result.HasField("refused"):
                result.refused.CopyFrom(problem_of(error))
    return result
