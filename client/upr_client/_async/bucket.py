"""One bucket: asking, writing, reading keys, cuts, and following."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal

from upr_client._async.call import BucketHandle, Connection
from upr_client._async.changes import AsyncChanges
from upr_client._async.io import give_way, mutex
from upr_client._async.view import AsyncView
from upr_client._async.writer import AsyncBufferedWriter, AsyncWriter, Write
from upr_client.admin_values import (
    ConsumerInfo,
    ConsumerPosition,
    CutInfo,
    PartitionInfo,
    PartitionPurge,
    StorageInfo,
    consumer_info,
    consumer_positions,
    cut_info,
    lease_seconds,
    partition_info,
    partition_purge,
    reset_request,
    storage_info,
)
from upr_client.changes.events import RECENT_KEY_BYTES
from upr_client.changes.ledger import UNACKNOWLEDGED
from upr_client.changes.options import ChangesOptions, Pinned, Policy, Start, exact_ends, followed
from upr_client.positions import PositionStore
from upr_client.writing import (
    BATCH_ROWS,
    DURABILITIES,
    LINGER_SECONDS,
    OUTSTANDING_BYTES,
    OnResults,
    WriteResult,
    WriteResults,
    WriterOptions,
)
from upr_protocol.block import Block, build_block, build_blocks, check_row
from upr_protocol.errors import InvalidArgumentError, ProtocolError, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import Pin
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    CREDIT_BYTES,
    GET_KEYS_MAX,
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    check_name,
    choice,
)
from upr_protocol.wire.codec import log_from_messages
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import admin_service_pb2, types_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2


class AsyncCut:
    """A cut that was made; see ``AsyncBucket.create_cut``. It holds until it is released or its lease ends.

    Attributes:
        name: unique in the bucket.
        created_time: when it was made, microseconds since the epoch.
        expires_time: when its lease ends, as far as is known here, microseconds since the epoch by the server's
            clock.
        lease_seconds: the lease it was made or last renewed with.
        pins: the pinned marker of each partition, ascending.
        left_out: the partitions that were asked for and are not part of it, because they are dead, and why.
    """

    def __init__(
        self, bucket: "AsyncBucket", info: CutInfo, left_out: Mapping[int, UprError]
    ) -> None:
        self._bucket = bucket
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
        """Have the lease begin anew, with its length or another one, in seconds.

        Raises:
            CutNotFoundError: it was released, or its lease has ended.
            UprError: the call failed or was refused; it is not tried again.
        """
        info = await self._bucket.renew_cut(self.name, lease)
        self.expires_time = info.expires_time
        self.lease_seconds = info.lease_seconds

    async def release(self) -> bool:
        """Give the cut up; False when it was gone already.

        Raises:
            UprError: the call failed; it is not tried again. The lease ends by itself.
        """
        return await self._bucket.release_cut(self.name)


class AsyncHeldCut:
    """Makes a cut when it is entered and releases it at the end; see ``AsyncBucket.cut``."""

    def __init__(
        self,
        bucket: "AsyncBucket",
        name: str,
        partitions: Iterable[int] | None,
        lease: float | None,
    ) -> None:
        self._bucket = bucket
        self._arguments = (name, partitions, lease)
        self._cut: AsyncCut | None = None

    async def __aenter__(self) -> AsyncCut:
        name, partitions, lease = self._arguments
        self._cut = await self._bucket.create_cut(name, partitions=partitions, lease=lease)
        return self._cut

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cut, self._cut = self._cut, None
        if cut is None:
            return
        try:
            await cut.release()
        except UprError:
            # What went wrong before tells more; the lease ends by itself.
            if error is None:
                raise


class AsyncBucket:
    """A bucket of a server; made by ``AsyncClient.bucket``."""

    def __init__(self, connection: Connection, name: str, producer: str | None) -> None:
        self._connection = connection
        self._handle = BucketHandle(connection, check_name(name, "bucket"))
        self._producer = check_name(
            secrets.token_hex(16) if producer is None else producer, "producer"
        )
        self._mutex = mutex()
        self._made_writer: AsyncWriter | None = None
        self._buffered: list[AsyncBufferedWriter] = []

    @property
    def name(self) -> str:
        """1 to 200 bytes of UTF-8."""
        return self._handle.name

    @property
    def version(self) -> int:
        """The bucket's random id, 0 until the server answered something."""
        return self._handle.version

    # Asking.

    async def hello(
        self, partitions: Mapping[int, int | None], *, with_log: bool = False
    ) -> list[stream_pb2.HelloAnswer]:
        """Ask for any number of partitions at once whether a history may be continued.

        Args:
            partitions: for each partition the failover id that was newest when last connected; None for new.
            with_log: whether each answer carries the whole failover log.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._connection.check_usable()
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

    async def failover_logs(
        self, partitions: Iterable[int] | None = None
    ) -> dict[int, FailoverLog]:
        """Return the failover logs of these partitions; None means all.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._connection.check_usable()
        request = stream_pb2.GetFailoverLogRequest(bucket=self.name, partitions=partitions or ())
        answer = await self._handle.ask(self._connection.stubs().streams.GetFailoverLog, request)
        logs = ((item.partition, log_from_messages(item.records)) for item in answer.logs)
        return {partition: log for partition, log in logs if log is not None}

    async def partitions(self, partitions: Iterable[int] | None = None) -> list[PartitionInfo]:
        """Return the state of these partitions; None means all.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._connection.check_usable()
        request = admin_service_pb2.GetPartitionsRequest(
            bucket=self.name, partitions=partitions or ()
        )
        answer = await self._handle.ask(self._connection.stubs().admin.GetPartitions, request)
        return [partition_info(item) for item in answer.partitions]

    async def storage(self) -> StorageInfo:
        """Return what the bucket takes on disk, and what was written since the server was started.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        request = admin_service_pb2.GetStorageRequest(bucket=self.name)
        method = self._connection.stubs().admin.GetStorage
        return storage_info(await self._connection.ask(method, request))

    async def consumers(self, *, with_positions: bool = False) -> list[ConsumerInfo]:
        """Return the consumers that are registered by what they acknowledged or saved, and the groups, by name.

        Args:
            with_positions: whether each comes with its position in every partition.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        request = admin_service_pb2.ListConsumersRequest(
            bucket=self.name, with_positions=with_positions
        )
        method = self._connection.stubs().admin.ListConsumers
        found: list[ConsumerInfo] = []
        while True:
            answer = await self._connection.ask(method, request)
            found += [consumer_info(message) for message in answer.consumers]
            if not answer.more or not answer.consumers:
                return found
            request.after = found[-1].name

    async def forget_consumer(self, name: str) -> bool:
        """Forget a consumer's positions, so that they hold no purging up; False when it was not known.

        One that is connected is registered again by its next acknowledgement.

        Raises:
            InvalidArgumentError: the name is out of its range.
            UprError: the call failed or was refused; it is not tried again.
        """
        method = self._connection.stubs().admin.ForgetConsumer
        request = admin_service_pb2.ForgetConsumerRequest(
            bucket=self.name, name=check_name(name, "consumer")
        )
        answer = await self._connection.ask(method, request)
        return bool(answer.forgotten)

    async def reset_consumer(
        self,
        name: str,
        to: Literal["beginning", "now"] | datetime,
        *,
        partitions: Iterable[int] | None = None,
        create: bool = False,
    ) -> dict[int, ConsumerPosition]:
        """Set the positions that a consumer has stored in the server, and return them by partition.

        Its calls end, and what its owners save from what they had before is refused. They connect again and go on
        from the new positions; their data is theirs to fit to it. Positions kept elsewhere are not touched.

        Args:
            name: the consumer.
            to: "beginning": the positions are removed. "now": the newest complete durable marker of each partition.
                A time: right below the first mutation committed at or after it, or as for now where there is none.
            partitions: which, 0 to 1023; None means all.
            create: whether one that is not known is registered, unless it is reset to the beginning.

        Raises:
            InvalidArgumentError: a value is out of its range, or the time has no time zone.
            ConsumerNotFoundError: nothing is known of that name.
            UprError: the call failed or was refused; it is not tried again.
        """
        method = self._connection.stubs().admin.ResetConsumer
        chosen = () if partitions is None else partitions
        request = reset_request(self.name, name, to, chosen, create)
        answer = await self._connection.ask(method, request)
        return consumer_positions(answer.positions)

    # Cuts.

    def cut(
        self, name: str, *, partitions: Iterable[int] | None = None, lease: float | None = None
    ) -> AsyncHeldCut:
        """Hold a cut for as long as a ``with`` block: made when it is entered, released at its end.

        Give it to ``changes(until=...)``. The arguments and errors are those of ``create_cut``.
        """
        self._connection.check_usable()
        return AsyncHeldCut(self, name, partitions, lease)

    async def create_cut(
        self, name: str, *, partitions: Iterable[int] | None = None, lease: float | None = None
    ) -> AsyncCut:
        """Pin the last complete marker of partitions at one instant, until it is released or its lease ends.

        Everything up to the pins is durable when it returns, and ``changes(until=cut)`` shows exactly that.

        Args:
            name: 1 to 200 bytes of UTF-8, unique in the bucket while the lease lasts.
            partitions: which, 0 to 1023; None means all.
            lease: seconds; None means an hour.

        Raises:
            AlreadyExistsError: a cut of that name is there.
            TooManyError: the bucket has as many cuts as it may have.
            PartitionNotActiveError: a partition is dead or pending; name the others.
            UprError: the call failed or was refused; it is not tried again.
        """
        self._connection.check_usable()
        request = stream_pb2.CreateCutRequest(
            bucket=self.name,
            bucket_version=self.version or None,
            name=check_name(name, "cut"),
            partitions=partitions or (),
            lease_seconds=lease_seconds(lease),
        )
        answer = await self._handle.ask(self._connection.stubs().streams.CreateCut, request)
        left_out = {one.partition: error_of(one.problem) for one in answer.left_out}
        return AsyncCut(self, cut_info(answer.cut), left_out)

    async def renew_cut(self, name: str, lease: float | None = None) -> CutInfo:
        """Have a cut's lease begin anew; None for the length that it has.

        Raises:
            CutNotFoundError: there is none of that name, or its lease has ended.
            UprError: the call failed or was refused; it is not tried again.
        """
        self._connection.check_usable()
        request = stream_pb2.RenewCutRequest(
            bucket=self.name,
            bucket_version=self.version or None,
            name=check_name(name, "cut"),
            lease_seconds=lease_seconds(lease),
        )
        answer = await self._connection.ask(self._connection.stubs().streams.RenewCut, request)
        return cut_info(answer.cut)

    async def release_cut(self, name: str) -> bool:
        """Give a cut up; False when there is none of that name.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._connection.check_usable()
        request = stream_pb2.ReleaseCutRequest(
            bucket=self.name, bucket_version=self.version or None, name=check_name(name, "cut")
        )
        answer = await self._connection.ask(self._connection.stubs().streams.ReleaseCut, request)
        return bool(answer.released)

    async def cuts(self, *, with_pins: bool = False) -> list[CutInfo]:
        """Return the cuts whose lease has not ended, oldest first.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._connection.check_usable()
        request = stream_pb2.ListCutsRequest(bucket=self.name, with_partitions=with_pins)
        answer = await self._handle.ask(self._connection.stubs().streams.ListCuts, request)
        return [cut_info(message) for message in answer.cuts]

    async def purge(
        self, partitions: Sequence[int] = (), *, dry_run: bool = False, seconds: float = 600.0
    ) -> list[PartitionPurge]:
        """Drop tombstones that are old and passed by everybody, now instead of at some later merge.

        Args:
            partitions: 0 to 1023; none means all.
            dry_run: change nothing, only say what would go and who holds the others up.
            seconds: how long to wait at most; every block of the partitions is read.

        Returns:
            The partitions that have a stored tombstone, and those that could not be looked at.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        method = self._connection.stubs().admin.Purge
        request = admin_service_pb2.PurgeRequest(
            bucket=self.name, partitions=partitions, dry_run=dry_run
        )
        answer = await self._connection.ask(method, request, seconds)
        return [partition_purge(message) for message in answer.partitions]

    # Writing.

    def _writer(self) -> AsyncWriter:
        self._connection.check_usable()
        with self._mutex:
            if self._made_writer is None:
                self._made_writer = self._new_writer(self._producer)
            return self._made_writer

    def _new_writer(self, producer: str, first_number: int | None = None) -> AsyncWriter:
        return AsyncWriter(
            self._connection.stubs,
            self._connection.failed,
            self.name,
            producer,
            self._connection.connect_timeout,
            self._connection.retry_seconds,
            self._set_version,
            first_number,
        )

    def _set_version(self, version: int) -> None:
        self._handle.version = version

    async def set(self, key: bytes, value: bytes, durability: str = "disk") -> WriteResult:
        """Write one key.

        Args:
            key: 1 to 4096 bytes.
            value: 0 to 20 MiB.
            durability: "disk": answered when fsynced; "memory": when numbered, lost if the server dies at once.

        Raises:
            InvalidArgumentError: a value is out of its range; nothing was sent.
            UnknownOutcomeError: the answer was lost, and not to be had within the client's ``retry_seconds``.
            UnavailableError: it was never sent, for as long.
            UprError: the server refused.
        """
        return await self._write_one(key, value, durability)

    async def delete(self, key: bytes, durability: str = "disk") -> WriteResult:
        """Delete one key, whether it exists or not; as ``set``."""
        return await self._write_one(key, None, durability)

    async def _write_one(self, key: bytes, value: bytes | None, durability: str) -> WriteResult:
        level = choice(DURABILITIES, durability, "durability")
        check_row(key, value)
        write = await self._writer().submit(build_block([key], [value]), level)
        partition, _, end_seqno, failover_id = (await write.result())[0]
        return WriteResult(partition, end_seqno, failover_id)

    async def write_many(
        self, rows: Iterable[tuple[bytes, bytes | None]], durability: str = "disk"
    ) -> WriteResults:
        """Write many keys, in blocks of about 1 MiB that go out without waiting for each other's answer.

        Rows of the same key are applied in order. It is no transaction: when an error is raised, some may have
        been applied. All rows are in memory until it returns.

        Args:
            rows: (key, value); None for the value deletes the key.
            durability: as in ``set``.

        Raises:
            UprError: as in ``set``, the first one; before anything is sent when a row is out of its range.
        """
        level = choice(DURABILITIES, durability, "durability")
        pairs = list(rows)
        blocks = build_blocks([key for key, _ in pairs], [value for _, value in pairs])
        return WriteResults(len(pairs), await self._write_all(self._writer(), blocks, level))

    async def write_blocks(
        self,
        blocks: Iterable[Block],
        durability: str = "disk",
        *,
        once: str | None = None,
        first_number: int = 1,
    ) -> WriteResults:
        """Write prepared blocks, in their order, without waiting for each one's answer; else as ``write_many``.

        Args:
            blocks: without seqnos, as ``upr_client.arrow.blocks`` makes them.
            durability: as in ``set``.
            once: a name for exactly these blocks, as that of a bucket. Whoever writes the same blocks under it again,
                also from another process, at the same time or after a failure, has them applied once altogether.
                Other blocks must have another name: one with a digest of the content is safe. The server
                remembers a name for 24 hours, and with ``producer`` names the newest 10,000.
            first_number: with ``once``, of the first block. ``upr_protocol.places.place_number`` makes one for blocks
                that are a part of a sequence under the name, at most 4096; then other blocks are refused.

        Raises:
            InvalidArgumentError: a value is out of its range.
            ContentDiffersError: the place has other blocks; nothing was applied.
            PartlyWrittenError: partitions refused their part when the blocks were written under the name before.
            UprError: as in ``set``, the first one.
        """
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
            return WriteResults(rows, runs)
        writer = self._new_writer(check_name(once, "name of blocks"), first_number)
        try:
            runs = await self._write_all(writer, counted(), level)
        finally:
            await writer.close(self._connection.request_timeout)
        return WriteResults(rows, runs)

    async def _write_all(
        self, writer: AsyncWriter, blocks: Iterable[Block], level: types_pb2.Durability.ValueType
    ) -> list[tuple[int, int, int, int]]:
        writes: list[Write] = []
        for block in blocks:
            writes.append(await writer.submit(block, level))
            # What was submitted goes out while the next block is built.
            await give_way()
            if any(write.error is not None for write in writes[-128:]):
                break
        runs: list[tuple[int, int, int, int]] = []
        failure: Exception | None = None
        for write in writes:
            try:
                runs += await write.result()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return runs

    def writer(
        self,
        *,
        durability: str = "disk",
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BLOCK_COLUMN_BYTES,
        linger_seconds: float = LINGER_SECONDS,
        max_outstanding_bytes: int = OUTSTANDING_BYTES,
        on_results: OnResults | None = None,
    ) -> AsyncBufferedWriter:
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
        options = WriterOptions(
            durability, batch_rows, batch_bytes, linger_seconds, max_outstanding_bytes, on_results
        )
        return AsyncBufferedWriter(self._handle, self._writer, self._buffered, options)

    # Reading keys.

    async def get(self, key: bytes, *, seconds: float | None = None) -> bytes | None:
        """Return a key's newest value, durable or not; None when it was never written, or is deleted.

        For convenience: the server has no index over keys. A key that was written lately comes from memory; for any
        other its partition is read backwards down to the key's newest mutation, or to the beginning when there is
        none. To look up many keys again and again, follow the changes and keep them.

        Args:
            seconds: how long it may take; None for the client's ``request_timeout``.

        Raises:
            InvalidArgumentError: the key is not 1 to 4096 bytes.
            UprError: the call failed or was refused, or the key's partition cannot be read.
        """
        return (await self.get_many([key], seconds=seconds)).get(key)

    async def get_many(
        self, keys: Iterable[bytes], *, seconds: float | None = None
    ) -> dict[bytes, bytes]:
        """Return the newest values of those of the keys that have one; as ``get``, of which it shares the cost.

        Keys go in requests of at most 1,000, one after the other: the values are not those of one instant. All of
        them are in memory when it returns.

        Args:
            seconds: how long each request may take; None for the client's ``request_timeout``.

        Raises:
            UprError: as ``get``; what was read before is lost.
        """
        self._connection.check_usable()
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            check_row(key, None)
        found: dict[bytes, bytes] = {}
        first = 0
        while first < len(wanted):
            asked = wanted[first : first + GET_KEYS_MAX]
            request = kv_pb2.GetRequest(
                bucket=self.name, bucket_version=self.version or None, keys=asked
            )
            answer = await self._handle.ask(self._connection.stubs().keys.Get, request, seconds)
            # Fewer than keys: the values of the others did not fit into the message.
            if not 0 < len(answer.answers) <= len(asked):
                raise ProtocolError(f"{len(answer.answers)} answers for {len(asked)} keys")
            for key, one in zip(asked, answer.answers, strict=False):
                if one.HasField("problem"):
                    raise error_of(one.problem)
                if one.HasField("value"):
                    found[key] = one.value
            first += len(answer.answers)
        return found

    # Following.

    def changes(
        self,
        partitions: Iterable[int] | None = None,
        *,
        consumer: str = "",
        positions: PositionStore | Literal["server"] | None = None,
        group: str = "",
        member: str = "",
        lease_seconds: float = LEASE_SECONDS,
        start: Start = "beginning",
        until_now: bool = False,
        until: Pinned | Mapping[int, int] | None = None,
        stability: str = "disk",
        keys_only: bool = False,
        key_prefix: bytes = b"",
        acknowledge: Literal["auto", "manual"] = "auto",
        unacknowledged_max: int = UNACKNOWLEDGED,
        on_rollback: Policy = None,
        markers_at_record: bool = False,
        recent_key_bytes: int = RECENT_KEY_BYTES,
        credit_bytes: int = CREDIT_BYTES,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        save_seconds: float = 1.0,
        retry_seconds: float | None = None,
        on_status: Callable[[str], Any] | None = None,
        on_assigned: Callable[[list[int]], Any] | None = None,
        on_revoked: Callable[[list[int]], Any] | None = None,
    ) -> AsyncChanges:
        """Follow changes; nothing is sent before the first item is asked for.

        Args:
            partitions: which, 0 to 1023; None means all. Not with a group, which shares all of them.
            consumer: who follows; another consumer with the same name ends this one with an error. May be empty.
            positions: where positions are loaded from and stored: a store; "server", under the consumer's name, where
                a former owner can store nothing any more; None starts at ``start`` and stores nothing.
            group: the name of a group of consumers that share the partitions, with positions kept in the server. Each
                partition is one member's at a time; what it has not acknowledged comes again with the next one.
            member: this one's name in the group, unique there; random unless given. One that comes back under its
                name within its lease keeps its partitions.
            lease_seconds: 1 to 3600; how long a member's partitions stay its own while it is not heard of. When it
                has ended, nothing more is handed out here until the server gives partitions anew.
            start: where a partition without a position begins: "beginning"; "now", after which nothing is missed that
                is written later; or a time (a datetime with a time zone, or seconds since the epoch): right below
                the first mutation committed at or after it. After a rollback to 0 that holds again.
            until_now: end when everything has arrived that was there at the start, at a snapshot marker of each
                partition.
            until: a cut, or a seqno for each partition: each one is followed exactly to there and shown as of it,
                or SnapshotGoneError is raised. Without ``partitions`` those that it names are followed.
            stability: "disk": only what is durable at the server; "memory": sooner, a crash there may undo it.
            keys_only: leave the values out.
            key_prefix: only the changes whose keys begin with it, at most 4096 bytes.
            acknowledge: "auto": asking for the next item says that the ones before were dealt with. "manual": ``ack``
                says it, in any order.
            unacknowledged_max: about how many changes may wait for their ``ack`` before no further one is yielded.
            on_rollback: None or "fail": RollbackError is raised, and nothing is changed. A function: called with each
                Rollback, and it returns when the data above is undone. "event": the Rollback is yielded, and
                asking for the next item means that it was undone. "restart": as "event", and always to 0, after which
                everything of the partition comes again. After a crash the same may come again.
            markers_at_record: whether a rollback may resume at a marker exactly at the seqno that the server named.
            recent_key_bytes: how much of the newest keys is remembered, to name them in a Rollback.
            credit_bytes: how much the server may send ahead, 1 byte to 256 MiB.
            heartbeat_seconds: 0.05 to 3600; silence for three of them is a lost connection.
            save_seconds: how often positions are stored at most, besides after a rollback and at the end.
            retry_seconds: how long to try without hearing from the server; None for ever.
            on_status: called with a line of text for every lost connection and refusal; must not block.
            on_assigned: of a member of a group: called with partitions that became its own, before the first change
                of them; may return a dict of positions to go on from instead of those in the server. Called again
                for those that an operator sets back.
            on_revoked: called with partitions that are its own no more: after what it acknowledged of them was
                stored and before the next owner begins, or as soon as it is known that they are lost.

        Raises:
            InvalidArgumentError: a value is out of its range, or two contradict each other.
            ClosedError: the client was closed.
        """
        self._connection.check_usable()
        ends = exact_ends(until)
        options = ChangesOptions(
            consumer=consumer,
            positions=positions,
            group=group,
            member=member or (secrets.token_hex(8) if group else ""),
            lease_seconds=lease_seconds,
            start=start,
            until_now=until_now,
            until=ends,
            stability=stability,
            keys_only=keys_only,
            key_prefix=key_prefix,
            acknowledge=acknowledge,
            unacknowledged_max=unacknowledged_max,
            on_rollback=on_rollback,
            markers_at_record=markers_at_record,
            recent_key_bytes=recent_key_bytes,
            credit_bytes=credit_bytes,
            heartbeat_seconds=heartbeat_seconds,
            save_seconds=save_seconds,
            retry_seconds=retry_seconds,
            on_status=on_status,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
        )
        if group and partitions is not None:
            raise InvalidArgumentError(
                "partitions were given with a group, which shares all of them",
                hint="leave partitions out",
            )
        return AsyncChanges(self._handle, followed(partitions, ends), options)

    def materialize(
        self,
        partitions: Iterable[int] | None = None,
        *,
        key_prefix: bytes = b"",
        at_markers: bool = False,
        stability: str = "disk",
        on_status: Callable[[str], Any] | None = None,
    ) -> AsyncView:
        """Return a view of the bucket: a dictionary in memory that is kept up to date, also through rollbacks.

        Args:
            partitions: which, 0 to 1023; None means all.
            key_prefix: only keys that begin with it.
            at_markers: show changes only when a snapshot marker completes them, so that each partition is always in
                a state that it had at the server.
            stability, on_status: as in ``changes``.

        Raises:
            InvalidArgumentError: a value is out of its range.
        """
        options = {"key_prefix": key_prefix, "stability": stability, "on_status": on_status}
        return AsyncView(self._handle, partitions, at_markers, options)

    async def _close(self, seconds: float) -> None:
        for buffered in list(self._buffered):
            await buffered._end(seconds)
        if self._made_writer is not None:
            await self._made_writer.close(seconds)
