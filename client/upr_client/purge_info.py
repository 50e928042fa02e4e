"""What a purge did, or would do; the same in both flavours."""

from dataclasses import dataclass

from upr_protocol.errors import UprError
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin


@dataclass(frozen=True, slots=True)
class PurgeHolder:
    """One that has not passed a tombstone yet.

    Args:
        kind: ``stream``, ``consumer`` or ``cut``; ``newest`` for the row at the high seqno, which always stays.
        name: its name; of a stream without a consumer name, where it calls from.
        seqno: it has everything up to here.
    """

    kind: str
    name: str
    seqno: int


@dataclass(frozen=True, slots=True)
class PartitionPurge:
    """One partition's tombstones.

    Args:
        partition: 0 to 1023.
        tombstones: how many are stored, superseded ones included.
        old_tombstones: those of them that are old enough.
        purged: those that went, or would go.
        purge_seqno: tombstones at or below may be gone.
        holders: who has not passed the old ones.
        problem: why the partition could not be looked at; None otherwise.
    """

    partition: int
    tombstones: int
    old_tombstones: int
    purged: int
    purge_seqno: int
    holders: tuple[PurgeHolder, ...]
    problem: UprError | None


def partition_purge(message: admin.PartitionPurge) -> PartitionPurge:
    """Return what a message tells of a partition."""
    return PartitionPurge(
        message.partition,
        message.tombstones,
        message.old_tombstones,
        message.purged,
        message.purge_seqno,
        tuple(PurgeHolder(one.kind, one.name, one.seqno) for one in message.holders),
        error_of(message.problem) if message.HasField("problem") else None,
    )
