"""CreateCut, RenewCut, ReleaseCut and ListCuts."""

import math

from upr.engine.cuts import Cut
from upr.service.catalog import check_name, chosen_partitions
from upr.service.handshake import Context, HandshakeMethods, answering
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import CUT_LEASE_SECONDS, CUT_LEASE_SECONDS_MAX
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


def lease_micros(seconds: float) -> int | None:
    """Return a lease in microseconds, at least 1; None for 0, which stands for the default.

    Raises:
        InvalidArgumentError: it is below 0, above CUT_LEASE_SECONDS_MAX or not a number.
    """
    if not 0 <= seconds <= CUT_LEASE_SECONDS_MAX or math.isnan(seconds):
        raise InvalidArgumentError(
            f"a lease of {seconds} seconds, the limit is {CUT_LEASE_SECONDS_MAX:.0f}",
            hint="give a lease above 0, and renew it in time; 0 means the default",
        )
    return max(round(seconds * 1e6), 1) if seconds else None


def cut_message(cut: Cut, *, with_partitions: bool) -> wire.Cut:
    """Return a cut as the wire has it."""
    message = wire.Cut(
        name=cut.name,
        created_time=cut.created,
        expires_time=cut.expires,
        lease_seconds=cut.lease / 1e6,
    )
    if with_partitions:
        for partition, pin in cut.pins.items():
            message.partitions.add(
                partition=partition, failover_id=pin.failover_id, seqno=pin.seqno
            )
    return message


class CutMethods(HandshakeMethods):
    """The unary calls of ChangeStreamService; Follow is in ``follow``."""

    @answering
    async def CreateCut(
        self, request: wire.CreateCutRequest, context: Context
    ) -> wire.CreateCutResponse:
        """Pin partitions at this instant."""
        host = self._catalog.of(request)
        name = check_name(request.name, "cut")
        lease = lease_micros(request.lease_seconds) or int(CUT_LEASE_SECONDS * 1e6)
        partitions = sorted(chosen_partitions(request.partitions))
        cut = await host.cuts.create(name, partitions, lease)
        return wire.CreateCutResponse(
            bucket_version=host.bucket.identity.version, cut=cut_message(cut, with_partitions=True)
        )

    @answering
    async def RenewCut(
        self, request: wire.RenewCutRequest, context: Context
    ) -> wire.RenewCutResponse:
        """Have a cut's lease begin anew."""
        host = self._catalog.of(request)
        lease = lease_micros(request.lease_seconds)
        cut = await host.cuts.renew(check_name(request.name, "cut"), lease)
        return wire.RenewCutResponse(cut=cut_message(cut, with_partitions=False))

    @answering
    async def ReleaseCut(
        self, request: wire.ReleaseCutRequest, context: Context
    ) -> wire.ReleaseCutResponse:
        """Give a cut up."""
        host = self._catalog.of(request)
        released = await host.cuts.release(check_name(request.name, "cut"))
        return wire.ReleaseCutResponse(released=released)

    @answering
    async def ListCuts(
        self, request: wire.ListCutsRequest, context: Context
    ) -> wire.ListCutsResponse:
        """Return the cuts whose lease has not ended."""
        host = self._catalog.find(request.bucket)
        cuts = [
            cut_message(cut, with_partitions=request.with_partitions) for cut in host.cuts.live()
        ]
        return wire.ListCutsResponse(bucket_version=host.bucket.identity.version, cuts=cuts)
