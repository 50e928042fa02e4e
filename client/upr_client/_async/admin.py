"""Operator's calls: the server, its buckets, and a bucket's partitions, consumers, cuts and tombstones."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

from upr_client._async.bucket import (
    AsyncBucket,
    AsyncCut,
    create_cut,
    release_cut,
    renew_cut,
)
from upr_client._async.call import BucketHandle, Connection
from upr_client.admin import (
    BucketInfo,
    ConsumerInfo,
    ConsumerPosition,
    CutInfo,
    PartitionInfo,
    PartitionPurge,
    Promotion,
    ServerStatus,
    StorageInfo,
    Topology,
    check_quota,
    consumer_info,
    consumer_positions,
    cut_info,
    of_message,
    partition_info,
    partition_purge,
    promotion,
    reset_request,
    server_status,
    topology,
)
from upr_protocol.failover import FailoverLog, check_partitions
from upr_protocol.limits import check_name, check_seconds
from upr_protocol.wire.codec import log_from_messages
from upr_protocol.wire.v1 import admin_service_pb2 as wire
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import replica_service_pb2 as set_pb2


class AsyncAdmin:
    """Operators' calls; it is ``AsyncClient.admin``.

    A bucket is given by its name, or as an ``AsyncBucket``: that one learns its version from the answer, and a cut is
    then asked for in no other bucket of the name. No call is tried again; each ends within the client's
    ``request_timeout`` with an answer, or an UprError that says why it failed or was refused. ``status`` and ``promote``
    go to the first of the endpoints given and to no other, wherever reading and writing go; all others to
    ``AsyncClient.target``.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def _call(self, method: str, request: Any, seconds: float | None = None) -> Any:
        stub = getattr(self._connection.stubs().admin, method)
        return await self._connection.ask(stub, request, seconds)

    def _handle(self, bucket: AsyncBucket | str) -> BucketHandle:
        if isinstance(bucket, AsyncBucket):
            return bucket._handle
        return BucketHandle(self._connection, check_name(bucket, "bucket"))

    # The server and its buckets.

    async def status(self) -> ServerStatus:
        """Return what the server process is and uses."""
        stub = self._connection.stubs(self._connection.first).admin.GetStatus
        return server_status(await self._connection.ask(stub, wire.GetStatusRequest()))

    # The set of servers.

    async def topology(self) -> Topology:
        """Return who is active in the server's set, as far as it knows; the client remembers where they are."""
        stub = self._connection.stubs().sets.GetTopology
        found = topology(await self._connection.ask(stub, set_pb2.GetTopologyRequest()))
        if len(found.members) > 1:
            # The address of one that is alone says nothing that the client needs.
            self._connection.learn(member.address for member in found.members)
        return found

    async def promote(
        self, *, force: bool = False, takeover: bool = False, seconds: float = 60.0
    ) -> Promotion:
        """Make the server the active one of its set, and return when it is.

        Args:
            force: go on without those that cannot be reached: what only they have is undone when they come back.
            takeover: only if the server that is active now confirms that nothing is missing.
            seconds: how long it may take.

        Raises:
            UprError: it cannot be promoted; NOT_JOINED, NOT_IN_STEP, NOT_COUNTED, NOT_HEARD or NOT_CONFIRMED. After
                another failure ``topology`` says who is active.
        """
        request = set_pb2.PromoteRequest(force=force, takeover=takeover)
        stub = self._connection.stubs(self._connection.first).sets.Promote
        return promotion(await self._connection.ask(stub, request, seconds))

    async def drain(self, *, undo: bool = False) -> str:
        """Have the server become active no more, until that is undone or it is restarted; for maintenance.

        Args:
            undo: it may become active again.

        Returns:
            HOST:PORT of the server that is to take over, with ``promote(takeover=True)`` there: the counted one in step
            that lacks least. Empty where this one is not active.

        Raises:
            UprError: NO_SUCCESSOR, none can take over; nothing is changed.
        """
        stub = self._connection.stubs(self._connection.first).sets.Drain
        answer = await self._connection.ask(stub, set_pb2.DrainRequest(undo=undo))
        return str(answer.successor.address)

    async def forget_server(self, server: str) -> str:
        """Have the active server count another one no more that will not come back; return its directory.

        If it comes back all the same, and is promoted before it has heard of that, what was acknowledged since may be
        undone.

        Args:
            server: its directory, or HOST:PORT where it was last reached.

        Raises:
            UprError: it is unknown, or STILL_THERE.
        """
        stub = self._connection.stubs().sets.ForgetServer
        request = set_pb2.ForgetServerRequest(server=server)
        answer = await self._connection.ask(stub, request)
        return str(answer.member.directory)

    async def buckets(self) -> list[BucketInfo]:
        """Return the server's buckets by name."""
        answer = await self._call("ListBuckets", wire.ListBucketsRequest())
        return [of_message(BucketInfo, message) for message in answer.buckets]

    async def create_bucket(
        self, name: str, *, compression: str = "", quota_bytes: int = 0
    ) -> BucketInfo:
        """Make an empty bucket.

        After ``UnknownOutcomeError`` or ``UnavailableError`` it may be there: ``buckets`` tells. After any other error it is
        not, or was before.

        Args:
            name: 1 to 200 bytes of UTF-8 without control characters.
            compression: of its stored blocks: "" for none, or "zstd".
            quota_bytes: what it may take; 0 for no limit but the disk. Beyond it writes get QuotaExceededError.

        Raises:
            AlreadyExistsError: the name is taken.
            TooManyError: the server has as many buckets as it can have, 32.
            InvalidArgumentError: a value is out of its range.
        """
        request = wire.CreateBucketRequest(
            name=check_name(name, "bucket"),
            compression=compression,
            quota_bytes=check_quota(quota_bytes),
        )
        return of_message(BucketInfo, (await self._call("CreateBucket", request)).bucket)

    async def set_bucket_quota(self, name: str, quota_bytes: int) -> BucketInfo:
        """Set what a bucket may take in its store and its tail together; what is there already stays.

        Beyond it writes get QuotaExceededError, but for those that only delete.

        Args:
            name: of the bucket.
            quota_bytes: 0 for no limit but the disk.

        Raises:
            BucketNotFoundError: there is none of that name.
        """
        request = wire.SetBucketQuotaRequest(
            bucket=check_name(name, "bucket"), quota_bytes=check_quota(quota_bytes)
        )
        return of_message(BucketInfo, (await self._call("SetBucketQuota", request)).bucket)

    async def drop_bucket(self, name: str, version: int | None = None) -> int:
        """Remove a bucket with all its data, and return its version.

        After ``UnknownOutcomeError``, ``UnavailableError`` or ``StorageFailedError`` it may be gone: ``buckets`` tells.

        Everything that uses it ends with BUCKET_GONE. The bucket ``default`` comes back, empty and with another
        version, when the server is started the next time.

        Args:
            version: if given, a bucket of the name with another version is left alone.

        Raises:
            BucketNotFoundError: there is none of that name.
            BucketGoneError: it has another version.
        """
        request = wire.DropBucketRequest(name=check_name(name, "bucket"), version=version)
        return int((await self._call("DropBucket", request)).bucket_version)

    # One bucket.

    async def partitions(
        self, bucket: AsyncBucket | str, partitions: Iterable[int] | None = None
    ) -> list[PartitionInfo]:
        """Return the state of these partitions; None means all."""
        handle = self._handle(bucket)
        request = wire.GetPartitionsRequest(
            bucket=handle.name, partitions=check_partitions(partitions)
        )
        answer = await handle.ask(self._connection.stubs().admin.GetPartitions, request)
        return [partition_info(item) for item in answer.partitions]

    async def failover_logs(
        self, bucket: AsyncBucket | str, partitions: Iterable[int] | None = None
    ) -> dict[int, FailoverLog]:
        """Return the failover logs of these partitions; None means all."""
        handle = self._handle(bucket)
        request = stream_pb2.GetFailoverLogRequest(
            bucket=handle.name, partitions=check_partitions(partitions)
        )
        answer = await handle.ask(self._connection.stubs().streams.GetFailoverLog, request)
        logs = ((item.partition, log_from_messages(item.records)) for item in answer.logs)
        return {partition: log for partition, log in logs if log is not None}

    async def storage(self, bucket: AsyncBucket | str) -> StorageInfo:
        """Return what the bucket takes on disk, and what was written since the server was started."""
        request = wire.GetStorageRequest(bucket=self._handle(bucket).name)
        return of_message(StorageInfo, await self._call("GetStorage", request))

    async def purge(
        self,
        bucket: AsyncBucket | str,
        partitions: Sequence[int] = (),
        *,
        dry_run: bool = False,
        seconds: float = 600.0,
    ) -> list[PartitionPurge]:
        """Drop tombstones that are old and passed by everybody, now instead of at some later compaction.

        Args:
            partitions: 0 to 1023; none means all.
            dry_run: change nothing; report what a purge would drop, and the holders of the rest.
            seconds: how long to wait at most; every block of the partitions is read.

        Returns:
            The partitions that have a stored tombstone, and those that could not be looked at.

        Raises:
            InvalidArgumentError: a partition or the time is out of its range.
        """
        check_seconds(seconds, "seconds", above=True)
        request = wire.PurgeRequest(
            bucket=self._handle(bucket).name, partitions=partitions, dry_run=dry_run
        )
        answer = await self._call("Purge", request, seconds)
        return [partition_purge(message) for message in answer.partitions]

    # Consumers.

    async def consumers(
        self, bucket: AsyncBucket | str, *, with_positions: bool = False
    ) -> list[ConsumerInfo]:
        """Return the consumers that are registered by what they acknowledged or saved, and the groups, by name.

        Args:
            with_positions: whether each comes with its position in every partition.
        """
        request = wire.ListConsumersRequest(
            bucket=self._handle(bucket).name, with_positions=with_positions
        )
        found: list[ConsumerInfo] = []
        while True:
            answer = await self._call("ListConsumers", request)
            found += [consumer_info(message) for message in answer.consumers]
            if not answer.more or not answer.consumers:
                return found
            request.after = found[-1].name

    async def forget_consumer(self, bucket: AsyncBucket | str, name: str) -> bool:
        """Forget a consumer's positions, so that they hold no purging up; False when it was not known.

        One that is connected is registered again by its next acknowledgement.

        Raises:
            InvalidArgumentError: the name is out of its range.
        """
        request = wire.ForgetConsumerRequest(
            bucket=self._handle(bucket).name, name=check_name(name, "consumer")
        )
        return bool((await self._call("ForgetConsumer", request)).forgotten)

    async def reset_consumer(
        self,
        bucket: AsyncBucket | str,
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
        """
        request = reset_request(self._handle(bucket).name, name, to, partitions, create)
        return consumer_positions((await self._call("ResetConsumer", request)).positions)

    # Cuts.

    async def create_cut(
        self,
        bucket: AsyncBucket | str,
        name: str,
        *,
        partitions: Iterable[int] | None = None,
        lease: float | None = None,
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
        """
        return await create_cut(self._handle(bucket), name, partitions, lease)

    async def renew_cut(
        self, bucket: AsyncBucket | str, name: str, lease: float | None = None
    ) -> CutInfo:
        """Renew a cut's lease; None for the length that it has.

        Raises:
            CutNotFoundError: there is none of that name, or its lease has ended.
        """
        return await renew_cut(self._handle(bucket), name, lease)

    async def release_cut(self, bucket: AsyncBucket | str, name: str) -> bool:
        """Give a cut up; False when there is none of that name."""
        return await release_cut(self._handle(bucket), name)

    async def cuts(self, bucket: AsyncBucket | str, *, with_pins: bool = False) -> list[CutInfo]:
        """Return the cuts whose lease has not ended, oldest first."""
        handle = self._handle(bucket)
        request = stream_pb2.ListCutsRequest(bucket=handle.name, with_partitions=with_pins)
        answer = await handle.ask(self._connection.stubs().streams.ListCuts, request)
        return [cut_info(message) for message in answer.cuts]
