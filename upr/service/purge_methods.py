"""Purge, for operators."""

from upr.service.catalog import Catalog, chosen_partitions
from upr.service.handshake import Context, answering
from upr.service.purger import purge_partition
from upr_protocol.errors import UprError
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin


class PurgeMethods:
    """Purge, of AdminService."""

    _catalog: Catalog

    @answering
    async def Purge(self, request: admin.PurgeRequest, context: Context) -> admin.PurgeResponse:
        """Purge partitions one after the other; one that is damaged has a problem in the answer."""
        host = self._catalog.find(request.bucket)
        ages = host.merger.ages
        response = admin.PurgeResponse(
            bucket_version=host.bucket.identity.version,
            tombstone_age_seconds=ages.young / 1e6,
            hold_limit_seconds=ages.held / 1e6,
        )
        for partition in sorted(chosen_partitions(request.partitions)):
            if not host.bucket.partitions.stored[partition]:
                continue
            try:
                result = await purge_partition(host, partition, dry_run=request.dry_run)
            except UprError as error:
                response.partitions.add(partition=partition, problem=problem_of(error))
                continue
            if result.tombstones.count:
                message = response.partitions.add(
                    partition=partition,
                    tombstones=result.tombstones.count,
                    old_tombstones=result.tombstones.old,
                    purged=result.purged,
                    purge_seqno=int(host.bucket.partitions.purge[partition]),
                )
                for one in result.holders:
                    message.holders.add(kind=one.kind, name=one.name, seqno=one.seqno)
        return response
