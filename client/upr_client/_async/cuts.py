"""Cuts: asking for them, a cut that was made, and one held for a ``with`` block."""

from collections.abc import Iterable, Mapping

from upr_client._async.call import BucketHandle
from upr_client.admin import CutInfo, cut_info, lease_seconds
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.failover import check_partitions
from upr_protocol.handshake import Pin
from upr_protocol.limits import check_name
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


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
