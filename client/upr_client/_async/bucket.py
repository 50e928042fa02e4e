"""One bucket: the handshake's questions, writing, and following."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import grpc

from upr_client._async import admin, cuts
from upr_client._async.adapter import give_way, mutex, unary
from upr_client._async.changes import AsyncChanges
from upr_client._async.cuts import AsyncCut, AsyncHeldCut
from upr_client._async.writer import AsyncWriter, Write
from upr_client.cut_info import CutInfo, Pinned, exact_ends, followed
from upr_client.delivered import ChangesOptions
from upr_client.events import Rollback
from upr_client.messages import (
    DURABILITIES,
    PartitionInfo,
    call_error,
    check_name,
    choice,
    partition_info,
)
from upr_client.positions import PositionStore
from upr_client.purge_info import PartitionPurge
from upr_client.results import WriteResult, WriteResults
from upr_client.server_info import ConsumerInfo, StorageInfo
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import CREDIT_BYTES, HEARTBEAT_SECONDS
from upr_protocol.rows import build_block, build_blocks, check_row
from upr_protocol.wire.codec import log_from_messages
from upr_protocol.wire.v1 import admin_service_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from upr_client._async.client import AsyncClient


class AsyncBucket:
    """A bucket of a server; made by ``AsyncClient.bucket``.

    Attributes:
        name: 1 to 200 bytes of UTF-8.
        version: the bucket's random id, 0 until the server answered something.
    """

    def __init__(self, client: "AsyncClient", name: str, producer: str | None) -> None:
        self._client = client
        self.name = check_name(name, "bucket")
        self.version = 0
        self._producer = check_name(
            secrets.token_hex(16) if producer is None else producer, "producer"
        )
        self._mutex = mutex()
        self._made_writer: AsyncWriter | None = None

    def _check_usable(self) -> None:
        self._client._check_usable()

    # Asking.

    async def _ask(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            answer = await unary(method, request, self._client.request_timeout)
        except grpc.RpcError as error:
            raise call_error(error) from error
        self.version = answer.bucket_version
        return answer

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
        self._check_usable()
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
        answer = await self._ask(self._client._stubs().streams.Hello, request)
        return list(answer.answers)

    async def failover_logs(
        self, partitions: Iterable[int] | None = None
    ) -> dict[int, FailoverLog]:
        """Return the failover logs of these partitions; None means all.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._check_usable()
        request = stream_pb2.GetFailoverLogRequest(bucket=self.name, partitions=partitions or ())
        answer = await self._ask(self._client._stubs().streams.GetFailoverLog, request)
        logs = ((item.partition, log_from_messages(item.records)) for item in answer.logs)
        return {partition: log for partition, log in logs if log is not None}

    async def partitions(self, partitions: Iterable[int] | None = None) -> list[PartitionInfo]:
        """Return the state of these partitions; None means all.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._check_usable()
        request = admin_service_pb2.GetPartitionsRequest(
            bucket=self.name, partitions=partitions or ()
        )
        answer = await self._ask(self._client._stubs().admin.GetPartitions, request)
        return [partition_info(item) for item in answer.partitions]

    async def storage(self) -> StorageInfo:
        """Return what the bucket takes on disk, and what was written since the server was started.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        client = self._client
        return await admin.get_storage(client._stubs().admin, self.name, client.request_timeout)

    async def consumers(self, *, with_positions: bool = False) -> list[ConsumerInfo]:
        """Return the consumers that are registered by their acknowledgements, by name.

        Args:
            with_positions: whether each comes with its position in every partition.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        stub, seconds = self._client._stubs().admin, self._client.request_timeout
        return await admin.list_consumers(stub, self.name, with_positions, seconds)

    async def forget_consumer(self, name: str) -> bool:
        """Forget a consumer's positions, so that they hold no purging up; False when it was not known.

        One that is connected is registered again by its next acknowledgement.

        Raises:
            InvalidArgumentError: the name is out of its range.
            UprError: the call failed or was refused; it is not tried again.
        """
        stub, seconds = self._client._stubs().admin, self._client.request_timeout
        return await admin.forget_consumer(stub, self.name, name, seconds)

    # Cuts.

    def cut(
        self, name: str, *, partitions: Iterable[int] | None = None, lease: float | None = None
    ) -> AsyncHeldCut:
        """Hold a cut for as long as a ``with`` block: made when it is entered, released at its end.

        Give it to ``changes(until=...)``. The arguments and errors are those of ``create_cut``.
        """
        self._check_usable()
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
        self._check_usable()
        return await cuts.create(self, name, partitions, lease)

    async def renew_cut(self, name: str, lease: float | None = None) -> CutInfo:
        """Have a cut's lease begin anew; None for the length that it has.

        Raises:
            CutNotFoundError: there is none of that name, or its lease has ended.
            UprError: the call failed or was refused; it is not tried again.
        """
        self._check_usable()
        return await cuts.renew(self, name, lease)

    async def release_cut(self, name: str) -> bool:
        """Give a cut up; False when there is none of that name.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._check_usable()
        return await cuts.release(self, name)

    async def cuts(self, *, with_pins: bool = False) -> list[CutInfo]:
        """Return the cuts whose lease has not ended, oldest first.

        Raises:
            UprError: the call failed or was refused; it is not tried again.
        """
        self._check_usable()
        return await cuts.list_cuts(self, with_pins)

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
        stub = self._client._stubs().admin
        return await admin.purge(stub, self.name, partitions, dry_run, seconds)

    # Writing.

    def _writer(self) -> AsyncWriter:
        self._check_usable()
        with self._mutex:
            if self._made_writer is None:
                self._made_writer = AsyncWriter(
                    lambda: self._client._stubs().keys.Write,
                    self.name,
                    self._producer,
                    self._client.connect_timeout,
                    self._client.retry_seconds,
                    self._set_version,
                )
            return self._made_writer

    def _set_version(self, version: int) -> None:
        self.version = version

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
        writer = self._writer()
        writes: list[Write] = []
        for block in blocks:
            writes.append(await writer.submit(block, level))
            # What was submitted goes out while the next block is built.
            await give_way()
            if any(write.error is not None for write in writes[-128:]):
                break
        runs = []
        failure: Exception | None = None
        for write in writes:
            try:
                runs += await write.result()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return WriteResults(len(pairs), runs)

    # Following.

    def changes(
        self,
        partitions: Iterable[int] | None = None,
        *,
        consumer: str = "",
        positions: PositionStore | None = None,
        until_now: bool = False,
        until: Pinned | Mapping[int, int] | None = None,
        stability: str = "disk",
        keys_only: bool = False,
        on_rollback: Callable[[Rollback], Any] | Literal["event"] | None = None,
        markers_at_record: bool = False,
        credit_bytes: int = CREDIT_BYTES,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        save_seconds: float = 1.0,
        retry_seconds: float | None = None,
        on_status: Callable[[str], Any] | None = None,
    ) -> AsyncChanges:
        """Follow changes; nothing is sent before the first item is asked for.

        Args:
            partitions: which, 0 to 1023; None means all.
            consumer: who follows; another consumer with the same name ends this one with an error. May be empty.
            positions: where positions are loaded from and stored; None starts from zero and stores nothing.
            until_now: end when everything has arrived that was there at the start, at a snapshot marker of each
                partition.
            until: a cut, or a seqno for each partition: each one is followed exactly to there and shown as of it,
                or SnapshotGoneError is raised. Without ``partitions`` those that it names are followed.
            stability: "disk": only what is durable at the server; "memory": sooner, a crash there may undo it.
            keys_only: leave the values out.
            on_rollback: None: RollbackError is raised, and nothing is changed. A function: called with each
                Rollback, and it returns when the data above is undone. "event": the Rollback is yielded, and
                asking for the next item means that it was undone. After a crash the same may come again.
            markers_at_record: whether a rollback may resume at a marker exactly at the seqno that the server named.
            credit_bytes: how much the server may send ahead, 1 byte to 256 MiB.
            heartbeat_seconds: 0.05 to 3600; silence for three of them is a lost connection.
            save_seconds: how often positions are stored at most, besides after a rollback and at the end.
            retry_seconds: how long to try without hearing from the server; None for ever.
            on_status: called with a line of text for every lost connection and refusal; must not block.

        Raises:
            InvalidArgumentError: a value is out of its range.
            ClosedError: the client was closed.
        """
        self._check_usable()
        ends = exact_ends(until)
        options = ChangesOptions(
            consumer,
            positions,
            until_now,
            stability,
            keys_only,
            on_rollback,
            markers_at_record,
            credit_bytes,
            heartbeat_seconds,
            save_seconds,
            retry_seconds,
            on_status,
            ends,
        )
        return AsyncChanges(self, followed(partitions, ends), options)

    async def _close(self, seconds: float) -> None:
        if self._made_writer is not None:
            await self._made_writer.close(seconds)
