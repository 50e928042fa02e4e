"""Cuts of a bucket: markers pinned at one instant, so that the data up to them can be read again and again."""

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from upr_client._async.adapter import unary
from upr_client.cut_info import CutInfo, cut_info, lease_seconds
from upr_client.messages import call_error, check_name
from upr_protocol.consumer import Pin
from upr_protocol.errors import UprError
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

if TYPE_CHECKING:
    from upr_client._async.asking import AsyncAsking


class AsyncCut:
    """A cut that was made; see ``AsyncBucket.create_cut``. It holds until it is released or its lease ends.

    Attributes:
        name: unique in the bucket.
        created_time: when it was made, microseconds since the epoch.
        expires_time: when its lease ends, as far as is known here, microseconds since the epoch by the server's
            clock.
        lease_seconds: the lease it was made or last renewed with.
        pins: the pinned marker of each partition, ascending.
    """

    def __init__(self, bucket: "AsyncAsking", info: CutInfo) -> None:
        self._bucket = bucket
        self.name = info.name
        self.created_time = info.created_time
        self.expires_time = info.expires_time
        self.lease_seconds = info.lease_seconds
        self.pins: Mapping[int, Pin] = info.pins

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
        info = await renew(self._bucket, self.name, lease)
        self.expires_time = info.expires_time
        self.lease_seconds = info.lease_seconds

    async def release(self) -> bool:
        """Give the cut up; False when it was gone already.

        Raises:
            UprError: the call failed; it is not tried again. The lease ends by itself.
        """
        return await release(self._bucket, self.name)


class AsyncHeldCut:
    """Makes a cut when it is entered and releases it at the end; see ``AsyncBucket.cut``."""

    def __init__(
        self,
        bucket: "AsyncAsking",
        name: str,
        partitions: Iterable[int] | None,
        lease: float | None,
    ) -> None:
        self._bucket = bucket
        self._arguments = (name, partitions, lease)
        self._cut: AsyncCut | None = None

    async def __aenter__(self) -> AsyncCut:
        self._cut = await create(self._bucket, *self._arguments)
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


async def _ask(bucket: "AsyncAsking", method: Callable[..., Any], request: Any) -> Any:
    try:
        return await unary(method, request, bucket._client.request_timeout)
    except grpc.RpcError as error:
        raise call_error(error) from error


async def create(
    bucket: "AsyncAsking", name: str, partitions: Iterable[int] | None, lease: float | None
) -> AsyncCut:
    """Make a cut; see ``AsyncBucket.create_cut``."""
    request = stream_pb2.CreateCutRequest(
        bucket=bucket.name,
        bucket_version=bucket.version or None,
        name=check_name(name, "cut"),
        partitions=partitions or (),
        lease_seconds=lease_seconds(lease),
    )
    answer = await _ask(bucket, bucket._client._stubs().streams.CreateCut, request)
    bucket.version = answer.bucket_version
    return AsyncCut(bucket, cut_info(answer.cut))


async def renew(bucket: "AsyncAsking", name: str, lease: float | None) -> CutInfo:
    """Have a cut's lease begin anew; see ``AsyncBucket.renew_cut``."""
    request = stream_pb2.RenewCutRequest(
        bucket=bucket.name,
        bucket_version=bucket.version or None,
        name=check_name(name, "cut"),
        lease_seconds=lease_seconds(lease),
    )
    answer = await _ask(bucket, bucket._client._stubs().streams.RenewCut, request)
    return cut_info(answer.cut)


async def release(bucket: "AsyncAsking", name: str) -> bool:
    """Give a cut up; see ``AsyncBucket.release_cut``."""
    request = stream_pb2.ReleaseCutRequest(
        bucket=bucket.name, bucket_version=bucket.version or None, name=check_name(name, "cut")
    )
    answer = await _ask(bucket, bucket._client._stubs().streams.ReleaseCut, request)
    return bool(answer.released)


async def list_cuts(bucket: "AsyncAsking", with_pins: bool) -> list[CutInfo]:
    """Return the cuts of a bucket; see ``AsyncBucket.cuts``."""
    request = stream_pb2.ListCutsRequest(bucket=bucket.name, with_partitions=with_pins)
    answer = await _ask(bucket, bucket._client._stubs().streams.ListCuts, request)
    bucket.version = answer.bucket_version
    return [cut_info(message) for message in answer.cuts]
