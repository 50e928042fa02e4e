"""One bucket: the handshake's questions, writing, and following."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from upr_client._async import reads
from upr_client._async.adapter import give_way, mutex
from upr_client._async.asking import AsyncAsking
from upr_client._async.buffered import AsyncBufferedWriter
from upr_client._async.changes import AsyncChanges
from upr_client._async.view import AsyncView
from upr_client._async.writer import AsyncWriter, Write
from upr_client.batching import (
    BATCH_ROWS,
    LINGER_SECONDS,
    OUTSTANDING_BYTES,
    OnResults,
    WriterOptions,
)
from upr_client.changes_options import ChangesOptions, Policy, Start
from upr_client.cut_info import Pinned, exact_ends, followed
from upr_client.ledger import UNACKNOWLEDGED
from upr_client.messages import (
    DURABILITIES,
    check_name,
    choice,
)
from upr_client.positions import PositionStore
from upr_client.recent_keys import RECENT_KEY_BYTES
from upr_client.results import WriteResult, WriteResults
from upr_protocol.block import Block
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    CREDIT_BYTES,
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
)
from upr_protocol.rows import build_block, build_blocks, check_row
from upr_protocol.wire.v1 import types_pb2

if TYPE_CHECKING:
    from upr_client._async.client import AsyncClient


class AsyncBucket(AsyncAsking):
    """A bucket of a server; made by ``AsyncClient.bucket``.

    Attributes:
        name: 1 to 200 bytes of UTF-8.
        version: the bucket's random id, 0 until the server answered something.
    """

    def __init__(self, client: "AsyncClient", name: str, producer: str | None) -> None:
        super().__init__(client, name)
        self._producer = check_name(
            secrets.token_hex(16) if producer is None else producer, "producer"
        )
        self._mutex = mutex()
        self._made_writer: AsyncWriter | None = None
        self._buffered: list[AsyncBufferedWriter] = []

    # Writing.

    def _writer(self) -> AsyncWriter:
        self._check_usable()
        with self._mutex:
            if self._made_writer is None:
                self._made_writer = self._new_writer(self._producer)
            return self._made_writer

    def _new_writer(self, producer: str, first_number: int | None = None) -> AsyncWriter:
        return AsyncWriter(
            self._client._stubs,
            self._client._failed,
            self.name,
            producer,
            self._client.connect_timeout,
            self._client.retry_seconds,
            self._set_version,
            first_number,
        )

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
        return WriteResults(len(pairs), await self._write_all(self._writer(), blocks, level))

    async def write_blocks(
        self, blocks: Iterable[Block], durability: str = "disk", *, once: str | None = None
    ) -> WriteResults:
        """Write prepared blocks, in their order, without waiting for each one's answer; else as ``write_many``.

        Args:
            blocks: without seqnos, as ``upr_client.arrow.blocks`` makes them.
            durability: as in ``set``.
            once: a name for exactly these blocks, as that of a bucket. Whoever writes the same blocks under it again,
                also from another process, at the same time or after a failure, has them applied once altogether.
                Other blocks must have another name: one with a digest of the content is safe. The server
                remembers a name for 24 hours, and with ``producer`` names the newest 10,000.

        Raises:
            InvalidArgumentError: a value is out of its range.
            PartlyWrittenError: partitions refused their part when the blocks were written under the name before.
            UprError: as in ``set``, the first one.
        """
        level = choice(DURABILITIES, durability, "durability")
        self._check_usable()
        rows = 0

        def counted() -> Iterable[Block]:
            nonlocal rows
            for block in blocks:
                rows += block.rows
                yield block

        if once is None:
            runs = await self._write_all(self._writer(), counted(), level)
            return WriteResults(rows, runs)
        writer = self._new_writer(check_name(once, "name of blocks"), 1)
        try:
            runs = await self._write_all(writer, counted(), level)
        finally:
            await writer.close(self._client.request_timeout)
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
        self._check_usable()
        options = WriterOptions(
            durability, batch_rows, batch_bytes, linger_seconds, max_outstanding_bytes, on_results
        )
        return AsyncBufferedWriter(self, options)

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
        return (await reads.get_many(self, [key], seconds)).get(key)

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
        self._check_usable()
        return await reads.get_many(self, keys, seconds)

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

        Raises:
            InvalidArgumentError: a value is out of its range, or two contradict each other.
            ClosedError: the client was closed.
        """
        self._check_usable()
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
        )
        if group and partitions is not None:
            raise InvalidArgumentError(
                "partitions were given with a group, which shares all of them",
                hint="leave partitions out",
            )
        return AsyncChanges(self, followed(partitions, ends), options)

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
        return AsyncView(self, partitions, at_markers, options)

    async def _close(self, seconds: float) -> None:
        for buffered in list(self._buffered):
            await buffered._end(seconds)
        if self._made_writer is not None:
            await self._made_writer.close(seconds)
