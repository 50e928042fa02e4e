"""One bucket: writing, reading keys, following, and its cuts: one that was made, and one held for a ``with`` block."""

import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from upr_client._async.block_writer import AsyncBlockWriter, Write
from upr_client._async.call import KEYS, BucketHandle, Connection
from upr_client._async.changes import AsyncChanges
from upr_client._async.io import Event, check_callbacks, give_way, mutex, now
from upr_client._async.view import AsyncView
from upr_client._async.writer import AsyncWriter
from upr_client.admin import CutInfo, cut_info, lease_seconds
from upr_client.backoff import delay
from upr_client.changes.options import ChangesOptions, Only, Policy, Resume, Start, Tuning, Until
from upr_client.endpoints import READ_FROM, is_elsewhere, moves_on
from upr_client.writes import (
    BATCH_ROWS,
    DURABILITIES,
    LINGER_SECONDS,
    OUTSTANDING_BYTES,
    Applied,
    AtLeast,
    OnResults,
    WriteResult,
    WriteResults,
    WriterOptions,
    none_given,
    result_columns,
    token_of,
)
from upr_protocol.block import Block, blocks_of_pairs, check_row, pairs_bytes
from upr_protocol.errors import (
    InvalidArgumentError,
    ProtocolError,
    TooManyError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import check_partitions
from upr_protocol.handshake import Pin
from upr_protocol.limits import (
    AT_LEAST_SECONDS_MAX,
    BLOCK_COLUMN_BYTES,
    CLIENT_GETS,
    GET_KEYS_MAX,
    JOINED_BYTES_MAX,
    WRITE_NUMBER_MAX,
    check_name,
    check_seconds,
    choice,
    several,
)
from upr_protocol.partitioning import partitions_of
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

_EVERYTHING: Final = Only()
_DEFAULTS: Final = Tuning()
_WAIT_PART: Final = 0.8
"""Part of the time of a Get in which servers wait for writes; the rest is for their answers."""
_ANSWER_SECONDS: Final = 1.0
"""Time for the answer of a server that waited, beyond its part and beyond the time of the Get."""


class AsyncBucket:
    """A bucket of a server; made by ``AsyncClient.bucket``."""

    def __init__(self, connection: Connection, name: str, producer: str | None) -> None:
        self._connection = connection
        self._handle = BucketHandle(connection, check_name(name, "bucket"))
        self._producer = check_name(
            secrets.token_hex(16) if producer is None else producer, "producer"
        )
        self._mutex = mutex()
        self._made_writer: AsyncBlockWriter | None = None
        self._buffered: list[AsyncWriter] = []

    @property
    def name(self) -> str:
        """1 to 200 bytes of UTF-8."""
        return self._handle.name

    @property
    def version(self) -> int:
        """The bucket's random id, 0 until the server answered something."""
        return self._handle.version

    # Writing.

    def _writer(self) -> AsyncBlockWriter:
        self._connection.check_usable()
        with self._mutex:
            if self._made_writer is None:
                self._have_closed()
                self._made_writer = AsyncBlockWriter(self._handle, self._producer)
            return self._made_writer

    def _have_closed(self) -> None:
        """Have the client close this object. One that only reads needs no closing, and goes with its last user."""
        self._connection.writing[self] = self._close

    async def set(self, key: bytes, value: bytes, durability: str = "disk") -> WriteResult:
        """Write one key.

        Calls that are under way at the same time go together in few messages; each has its own outcome, and those
        of one key are applied in the order in which one task or thread began them. Cancelling one does not undo it.

        Args:
            key: 1 to 4096 bytes.
            value: 0 to 20 MiB.
            durability: "disk": answered when fsynced; "memory": when numbered, lost if the server dies at once;
                "replicated(1)" to "replicated(3)": when fsynced at so many replicas too, so that no promotion undoes it.

        Raises:
            InvalidArgumentError: a value is out of its range; nothing was sent.
            UnknownOutcomeError: the answer was lost, and not to be had within the client's ``retry_seconds``.
            UnavailableError: it was never sent, for as long.
            UprError: the server refused.
        """
        if value is None:
            raise none_given()
        return await self._writer().write_row(key, value, durability)

    async def delete(self, key: bytes, durability: str = "disk") -> WriteResult:
        """Delete one key, whether it exists or not; as ``set``."""
        return await self._writer().write_row(key, None, durability)

    async def write_many(
        self, rows: Iterable[tuple[bytes, bytes | None]], durability: str = "disk"
    ) -> WriteResults:
        """Write many keys, in blocks of about 1 MiB that go out without waiting for each other's answer.

        Calls of up to 512 KiB that are under way at the same time go together, each with its own result. A call that
        is cancelled while it waits for its answer is written all the same. Rows of the same key are applied in order,
        those of other calls that have not returned before or behind them. It is no transaction: when an error is raised,
        some may have been applied. All rows are in memory until it returns.

        Args:
            rows: (key, value); None for the value deletes the key.
            durability: as in ``set``.

        Raises:
            UprError: as in ``set``, the first one; before anything is sent when a row is out of its range.
        """
        level = choice(DURABILITIES, durability, "durability")
        # A copy of many rows costs as much as packing them: only of those that are packed while others are written.
        pairs = several(rows, "rows")
        count, size = len(pairs), pairs_bytes(pairs)
        if 0 < size <= JOINED_BYTES_MAX:
            block = next(blocks_of_pairs(pairs))
            runs = await self._writer().write_rows(block, level)
        else:
            runs = await self._write_all(self._writer(), blocks_of_pairs(list(pairs)), level)
        return WriteResults(count, runs, self.version)

    async def _hello(
        self, partitions: Mapping[int, int | None], with_log: bool
    ) -> list[stream_pb2.HelloAnswer]:
        asked = [
            stream_pb2.HelloPartition(partition=partition, failover_id=failover_id)
            for partition, failover_id in partitions.items()
        ]
        request = stream_pb2.HelloRequest(
            bucket=self.name,
            bucket_version=self.version or None,
            partitions=asked,
            with_log=with_log,
        )
        answer = await self._handle.ask(self._connection.stubs().streams.Hello, request)
        return list(answer.answers)

    async def _write_blocks(
        self, blocks: Iterable[Block], durability: str, once: str | None, first_number: int
    ) -> WriteResults:
        level = choice(DURABILITIES, durability, "durability")
        self._connection.check_usable()
        rows = 0

        def counted() -> Iterable[Block]:
            nonlocal rows
            for block in blocks:
                rows += block.rows
                yield block

        if once is None:
            runs = await self._write_all(self._writer(), counted(), level)
            return WriteResults(rows, runs, self.version)
        name = check_name(once, "name of blocks")
        if type(first_number) is not int or not 1 <= first_number <= WRITE_NUMBER_MAX:
            raise InvalidArgumentError(
                f"first_number is {first_number!r}; must be 1 to {WRITE_NUMBER_MAX}",
                hint="place_number makes one",
            )
        writer = AsyncBlockWriter(self._handle, name, first_number)
        try:
            runs = await self._write_all(writer, counted(), level)
        finally:
            await writer.close(self._connection.request_timeout)
        return WriteResults(rows, runs, self.version)

    async def _write_all(
        self,
        writer: AsyncBlockWriter,
        blocks: Iterable[Block],
        level: types_pb2.Durability.ValueType,
    ) -> Applied:
        writes: list[Write] = []
        for block in blocks:
            writes.append(await writer.submit(block, level))
            # Submitted blocks are sent while the next one is built.
            await give_way()
            if any(write.error is not None for write in writes[-128:]):
                break
        runs = [result_columns([])]
        failure: Exception | None = None
        for write in writes:
            try:
                with writer.waited_for():
                    runs.append(await write.result())
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return np.concatenate(runs, axis=1)

    def writer(
        self,
        *,
        durability: str = "disk",
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BLOCK_COLUMN_BYTES,
        linger_seconds: float = LINGER_SECONDS,
        max_outstanding_bytes: int = OUTSTANDING_BYTES,
        on_results: OnResults | None = None,
    ) -> AsyncWriter:
        """Return a writer that gathers rows and does not wait for each answer; use it with ``async with``.

        It shares the order of this bucket object's own writes, but what it still gathers is not yet among them:
        ``flush`` it before ``set`` of a key that it has taken.

        Args:
            durability: as in ``set``, for rows that say nothing else.
            batch_rows: rows that go out together at most, 1 to 2^18.
            batch_bytes: bytes that go out together at most, 1 to 2^20, unless a single row has more.
            linger_seconds: how long a row may wait for others, 0 or more.
            max_outstanding_bytes: what may be gathered and on its way; a row above it is taken and then waits.
            on_results: called for each batch that was applied whole, in order, with its (key, value) pairs and
                their ``WriteResults``. It must not wait for this writer. What it raises is raised by the next call.

        Raises:
            InvalidArgumentError: a value is out of its range.
            ClosedError: the client was closed.
        """
        self._connection.check_usable()
        check_callbacks(on_results=on_results)
        options = WriterOptions(
            durability, batch_rows, batch_bytes, linger_seconds, max_outstanding_bytes, on_results
        )
        self._have_closed()
        return AsyncWriter(self._handle, self._writer, self._buffered, options)

    # Reading keys.

    async def get(
        self,
        key: bytes,
        *,
        at_least: AtLeast = None,
        read_from: str = "active",
        seconds: float | None = None,
    ) -> bytes | None:
        """Return a key's newest value, durable or not; None when it was never written, or is deleted.

        The server reads the block that has the key, and rules the others out by an index. To look up keys all the time,
        follow the changes and keep them.

        Args:
            at_least: the result of a write, or its token: the value is not older than it. A server that does not have
                it yet waits for it, and another one is asked. Of a token only what is in the key's partition counts.
            read_from: "active": from the active server of a set; "any": from any of them, which may be behind.
            seconds: how long it may take, and one more with ``at_least``; None for the client's ``request_timeout``.

        Raises:
            InvalidArgumentError: the key is not 1 to 4096 bytes, or another value is out of its range.
            BehindError: no server had ``at_least`` in time.
            WriteUndoneError: a failover undid ``at_least``, or no server ever gave it.
            UprError: the call failed or was refused, or the key's partition cannot be read.
        """
        found = await self.get_many([key], at_least=at_least, read_from=read_from, seconds=seconds)
        return found.get(key)

    async def get_many(
        self,
        keys: Iterable[bytes],
        *,
        at_least: AtLeast = None,
        read_from: str = "active",
        seconds: float | None = None,
    ) -> dict[bytes, bytes]:
        """Return the newest values of those of the keys that have one; as ``get``, of which it shares the cost.

        Keys go in requests of at most 1,000, one after the other: the values are not those of one instant. All of
        them are in memory when it returns.

        Args:
            at_least, read_from: as in ``get``.
            seconds: how long each request may take, as in ``get``; None for the client's ``request_timeout``.

        Raises:
            UprError: as ``get``; what was read before is lost.
        """
        self._connection.check_usable()
        any_server = choice(READ_FROM, read_from, "read_from")
        token = None if at_least is None else token_of(at_least)
        asked_for = several(keys, "keys")
        for key in asked_for:
            check_row(key, None)
        if seconds is not None:
            check_seconds(seconds, "seconds", above=True)
        wanted = list(dict.fromkeys(asked_for))
        found: dict[bytes, bytes] = {}
        first = 0
        while first < len(wanted):
            asked = wanted[first : first + GET_KEYS_MAX]
            request = kv_pb2.GetRequest(
                bucket=self.name,
                bucket_version=self.version or None,
                keys=asked,
                any_server=any_server,
            )
            if token is not None:
                request.bucket_version = token.bucket_version
                for written in token.within(set(partitions_of(asked).tolist())):
                    request.at_least.add(**written._asdict())
            answer = await self._get(request, seconds)
            # Fewer than keys: the values of the others did not fit into the message.
            if not 0 < len(answer.answers) <= len(asked):
                raise ProtocolError(f"{len(answer.answers)} answers for {len(asked)} keys")
            for key, one in zip(asked, answer.answers, strict=False):
                # An empty value looks like none.
                if (value := one.value) or one.HasField("value"):
                    found[key] = value
                elif one.HasField("problem"):
                    raise error_of(one.problem)
            first += len(answer.answers)
        return found

    async def _get(self, request: kv_pb2.GetRequest, seconds: float | None) -> kv_pb2.GetResponse:
        """Ask for keys; while no server is the one to answer, or it has too many calls, ask again."""
        connection, attempt, each = self._connection, 0, None
        last: UprError | None = None
        until = now() + (connection.request_timeout if seconds is None else seconds)
        places = connection.waiting_gets if request.at_least else connection.gets
        while True:
            if not await places.take(until - now()):
                raise last or UnavailableError(
                    f"open Gets of the client are {CLIENT_GETS}; must be below that",
                    hint="get_many takes many keys; to read much, follow the bucket",
                )
            left = until - now()
            if request.at_least:
                # A part of the time for each server, so that one that is behind, or silent, leaves some for the others.
                servers = len(connection.endpoints) if request.any_server else 1
                share = max(left * _WAIT_PART / servers, 0.0)
                request.wait_seconds = min(share, AT_LEAST_SECONDS_MAX)
                # So that the end is the server's answer, which says more than that time is over.
                left += _ANSWER_SECONDS
                each = share + _ANSWER_SECONDS
            try:
                route = connection.anywhere if request.any_server else connection.active
                get = partial(connection.unary, route, KEYS, "Get", each=each)
                answer: kv_pb2.GetResponse = await self._handle.ask(get, request, left)
                connection.learn(answer.servers)
                return answer
            except UprError as error:
                if is_elsewhere(error) or (error.retriable and isinstance(error, TooManyError)):
                    last = error
                elif last is None or not moves_on(error):
                    raise
                pause = delay(attempt, random.random(), away=True)
                if now() + pause >= until:
                    raise last from None
            finally:
                places.give_back()
            attempt += 1
            await Event().wait(pause)

    # Following.

    def cut(
        self, name: str, *, partitions: Iterable[int] | None = None, lease: float | None = None
    ) -> "AsyncHeldCut":
        """Hold a cut for as long as a ``with`` block: made when it is entered, released at its end.

        It pins the last complete marker of partitions at one instant. Everything up to the pins is durable, and
        ``changes(until=cut)`` shows exactly that. ``client.admin.create_cut`` makes one that outlives the block; its
        errors are raised here as well.

        Args:
            name, partitions, lease: as there.

        Raises:
            ClosedError: the client was closed.
        """
        self._connection.check_usable()
        return AsyncHeldCut(self._handle, name, partitions, lease)

    def changes(
        self,
        *,
        resume: Resume = None,
        start: Start = "beginning",
        until: Until = None,
        only: Only = _EVERYTHING,
        tuning: Tuning = _DEFAULTS,
        consumer: str = "",
        acknowledge: Literal["auto", "manual"] = "auto",
        on_rollback: Policy = None,
        on_status: Callable[[str], Any] | None = None,
        read_from: str = "active",
    ) -> AsyncChanges:
        """Follow changes; nothing is sent before the first item is asked for.

        Args:
            resume: where positions are loaded from and stored: a position store; ``ServerPositions(name)``;
                ``Group(name)``, which shares the partitions with the group's other members; None starts at ``start``
                and stores nothing.
            start: where a partition without a position begins: "beginning"; "now", after which nothing is missed that
                is written later; or a time (a datetime with a time zone, or seconds since the epoch): right below
                the first mutation committed at or after it. After a rollback to 0 that holds again.
            until: None for no end. "now": what is there at the start, up to a snapshot marker of each partition. A
                cut, or a seqno for each partition: each one is followed exactly to there and shown as of it, or
                SnapshotGoneError is raised. Not with a group.
            only: which partitions and keys, with or without values, and how stable.
            tuning: sizes and times.
            consumer: the name under which deletions are kept for this consumer while it is away, where positions are
                not in the server. Another consumer with the same name ends this one with an error.
            acknowledge: "auto": asking for the next item says that the ones before were dealt with. "manual": ``ack``
                says it, in any order.
            on_rollback: None or "fail": RollbackError is raised, and nothing is changed. A function: called with each
                Rollback, and it returns when the data above is undone. "event": the Rollback is yielded, and
                asking for the next item means that it was undone. "restart": as "event", and always to 0, after which
                everything of the partition comes again. After a crash the same may come again.
            on_status: called with a line of text for every lost connection and refusal; must not block.
            read_from: "active": the active server of a set is followed, whichever that is. "any": any of them, which
                may be behind; not with a consumer's name, and not with positions that are in the server.

        Raises:
            InvalidArgumentError: a value is out of its range, or two contradict each other.
            ClosedError: the client was closed.
        """
        self._connection.check_usable()
        check_same_bucket(until, self.name)
        options = ChangesOptions(
            resume=resume,
            start=start,
            until=until,
            only=only,
            tuning=tuning,
            consumer=consumer,
            acknowledge=acknowledge,
            on_rollback=on_rollback,
            on_status=on_status,
            read_from=read_from,
        )
        group = options.group
        check_callbacks(
            on_status=on_status,
            on_rollback=on_rollback if callable(on_rollback) else None,
            on_assigned=group and group.on_assigned,
            on_revoked=group and group.on_revoked,
        )
        return AsyncChanges(self._handle, options)

    def materialize(
        self,
        *,
        only: Only = _EVERYTHING,
        at_markers: bool = False,
        on_status: Callable[[str], Any] | None = None,
        read_from: str = "active",
    ) -> AsyncView:
        """Return a view of the bucket: a dictionary in memory that is kept up to date, also through rollbacks.

        Args:
            only: which partitions and keys, and how stable; with ``keys_only`` all values are None.
            at_markers: show changes only when a snapshot marker completes them, so that each partition is always in
                a state that it had at the server.
            on_status, read_from: as in ``changes``.
        """
        check_callbacks(on_status=on_status)
        return AsyncView(self._handle, only, at_markers, on_status, read_from)

    async def _close(self, seconds: float) -> None:
        until = now() + seconds
        for buffered in list(self._buffered):
            await buffered._end(max(until - now(), 0.0))
        if self._made_writer is not None:
            await self._made_writer.close(max(until - now(), 0.0))


async def create_cut(
    bucket: BucketHandle, name: str, partitions: Iterable[int] | None, lease: float | None
) -> "AsyncCut":
    """Make a cut; see ``AsyncAdmin.create_cut``."""
    request = stream_pb2.CreateCutRequest(
        bucket=bucket.name,
        bucket_version=bucket.version or None,
        name=check_name(name, "cut"),
        partitions=check_partitions(partitions),
        lease_seconds=lease_seconds(lease),
    )
    answer = await bucket.ask(bucket.connection.stubs().streams.CreateCut, request)
    left_out = {one.partition: error_of(one.problem) for one in answer.left_out}
    return AsyncCut(bucket, cut_info(answer.cut), left_out)


def check_same_bucket(until: object, bucket: str) -> None:
    """Raise InvalidArgumentError when this is a cut of another bucket; other ends name none."""
    other = getattr(until, "bucket", bucket)
    if other != bucket:
        raise InvalidArgumentError(
            f"until is a cut of bucket {other!r}; must be one of {bucket!r}",
            hint="cut() of the same bucket makes one",
        )


async def renew_cut(bucket: BucketHandle, name: str, lease: float | None) -> CutInfo:
    """Renew a cut's lease; see ``AsyncAdmin.renew_cut``."""
    request = stream_pb2.RenewCutRequest(
        bucket=bucket.name,
        bucket_version=bucket.version or None,
        name=check_name(name, "cut"),
        lease_seconds=lease_seconds(lease),
    )
    method = bucket.connection.stubs().streams.RenewCut
    return cut_info((await bucket.connection.ask(method, request)).cut)


async def release_cut(bucket: BucketHandle, name: str) -> bool:
    """Release a cut; see ``AsyncAdmin.release_cut``."""
    request = stream_pb2.ReleaseCutRequest(
        bucket=bucket.name, bucket_version=bucket.version or None, name=check_name(name, "cut")
    )
    method = bucket.connection.stubs().streams.ReleaseCut
    return bool((await bucket.connection.ask(method, request)).released)


class AsyncCut:
    """A cut that was made. It holds until it is released or its lease ends.

    Attributes:
        bucket: the bucket's name.
        name, created_time, lease_seconds, pins: as of ``CutInfo``.
        expires_time: as there, as far as is known here, by the server's clock.
        left_out: the partitions that were asked for and are not part of it, because they are dead, and why.
    """

    def __init__(
        self, bucket: BucketHandle, info: CutInfo, left_out: Mapping[int, UprError]
    ) -> None:
        self._bucket = bucket
        self.bucket = bucket.name
        self.name = info.name
        self.created_time = info.created_time
        self.expires_time = info.expires_time
        self.lease_seconds = info.lease_seconds
        self.pins: Mapping[int, Pin] = info.pins
        self.left_out: Mapping[int, UprError] = left_out

    @property
    def seqnos(self) -> dict[int, int]:
        """The pinned seqno of each partition."""
        return {partition: pin.seqno for partition, pin in self.pins.items()}

    @property
    def ids(self) -> dict[int, int]:
        """The failover id that was newest in each partition when the cut was made."""
        return {partition: pin.failover_id or 0 for partition, pin in self.pins.items()}

    async def renew(self, lease: float | None = None) -> None:
        """Renew the lease, with its length or another one, in seconds.

        Raises:
            CutNotFoundError: it was released, or its lease has ended.
            UprError: the call failed or was refused; it is not tried again.
        """
        info = await renew_cut(self._bucket, self.name, lease)
        self.expires_time = info.expires_time
        self.lease_seconds = info.lease_seconds

    async def release(self) -> bool:
        """Release the cut; False if it no longer existed.

        Raises:
            UprError: the call failed; it is not tried again. The lease ends by itself.
        """
        return await release_cut(self._bucket, self.name)


class AsyncHeldCut:
    """Makes a cut when it is entered and releases it at the end; see ``AsyncBucket.cut``."""

    def __init__(
        self,
        bucket: BucketHandle,
        name: str,
        partitions: Iterable[int] | None,
        lease: float | None,
    ) -> None:
        self._bucket = bucket
        self._arguments = (name, partitions, lease)
        self._cut: AsyncCut | None = None

    async def __aenter__(self) -> AsyncCut:
        self._cut = await create_cut(self._bucket, *self._arguments)
        return self._cut

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cut, self._cut = self._cut, None
        if cut is None:
            return
        try:
            await cut.release()
        except UprError:
            # The earlier error matters more; the lease ends by itself.
            if error is None:
                raise
