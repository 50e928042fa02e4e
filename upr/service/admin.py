"""AdminService: what an operator asks."""

from upr.service.buckets import BucketMethods
from upr.service.catalog import Catalog, chosen_partitions
from upr.service.consumers import ConsumerMethods
from upr.service.handshake import Context, answering
from upr.service.purge_methods import PurgeMethods
from upr.service.status import Process, StatusMethods
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin


class AdminMethods(BucketMethods, ConsumerMethods, PurgeMethods, StatusMethods):
    """All of AdminService.

    Args:
        process: what GetStatus tells of the process.
    """

    def __init__(self, catalog: Catalog, process: Process) -> None:
        self._catalog = catalog
        self._process = process

    @answering
    async def GetPartitions(
        self, request: admin.GetPartitionsRequest, context: Context
    ) -> admin.GetPartitionsResponse:
        """Return the state of partitions."""
        bucket = self._catalog.find(request.bucket).bucket
        table = bucket.partitions
        infos = []
        for partition in chosen_partitions(request.partitions):
            problem = table.problems.get(partition)
            infos.append(
                admin.PartitionInfo(
                    partition=partition,
                    state=int(table.state[partition]),  # type: ignore[arg-type]
                    high_seqno=int(table.high[partition]),
                    durable_seqno=int(table.durable[partition]),
                    purge_seqno=int(table.purge[partition]),
                    failover_id=int(table.newest_id[partition]),
                    problem=problem_of(problem) if problem else None,
                )
            )
        return admin.GetPartitionsResponse(bucket_version=bucket.identity.version, partitions=infos)
