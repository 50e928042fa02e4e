"""What a server tells of its buckets; the same in both flavours."""

from dataclasses import dataclass

from upr_protocol.errors import UprError
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """One bucket.

    Args:
        name: its name; of a bucket whose name cannot be read its version, 16 hex digits.
        version: its random id, another one whenever a bucket of the name is created.
        compression: of stored blocks: empty for none, or zstd.
        mutations: how many were ever numbered.
        used_bytes: pages of its store in use.
        problem: why it is not served or takes no writes; None when all is well.
    """

    name: str
    version: int
    compression: str
    mutations: int
    used_bytes: int
    problem: UprError | None


def bucket_info(message: admin.BucketInfo) -> BucketInfo:
    """Return one bucket out of its message."""
    return BucketInfo(
        message.name,
        message.version,
        message.compression,
        message.mutations,
        message.used_bytes,
        error_of(message.problem) if message.HasField("problem") else None,
    )
