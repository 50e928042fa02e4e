"""What can be asked of a bucket: the handshake's questions, consumers, cuts, purging."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import grpc

from upr_client._async import admin, cuts
from upr_client._async.adapter import unary
from upr_client._async.cuts import AsyncCut, AsyncHeldCut
from upr_client.cut_info import CutInfo
from upr_client.messages import PartitionInfo, call_error, check_name, partition_info
from upr_client.purge_info import PartitionPurge
from upr_client.server_info import ConsumerInfo, ConsumerPosition, StorageInfo
from upr_protocol.failover import FailoverLog
from upr_protocol.wire.codec import log_from_messages
from upr_protocol.wire.v1 import admin_service_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from upr_client._async.client import AsyncClient


class AsyncAsking:
    """The part of ``AsyncBucket`` that asks.

    Attributes:
        name: 1 to 200 bytes of UTF-8.
        version: the bucket's random id, 0 until the server answered something.
    """

    def __init__(self, client: "AsyncClient", name: str) -> None:
        self._client = client
        self.name = check_name(name, "bucket")
        self.version = 0

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
        """Return the consumers that are registered by what they acknowledged or saved, and the groups, by name.

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

    async def reset_consumer(
        self,
        name: str,
        to: Literal["beginning", "now"] | datetime,
        *,
        partitions: Iterable[int] | None = None,
    ) -> dict[int, ConsumerPosition]:
        """Set the positions that a consumer has stored in the server, and return them by partition.

        Its calls end, and what its owners save from what they had before is refused. They connect again and go on
        from the new positions; their data is theirs to fit to it. Positions kept elsewhere are not touched.

        Args:
            name: the consumer. One that is not known is registered, unless it is reset to the beginning.
            to: "beginning": the positions are removed. "now": the newest complete durable marker of each partition.
                A time: right below the first mutation committed at or after it, or as for now where there is none.
            partitions: which, 0 to 1023; None means all.

        Raises:
            InvalidArgumentError: a value is out of its range, or the time has no time zone.
            UprError: the call failed or was refused; it is not tried again.
        """
        stub, seconds = self._client._stubs().admin, self._client.request_timeout
        chosen = () if partitions is None else partitions
        return await admin.reset_consumer(stub, self.name, name, to, chosen, seconds)

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
