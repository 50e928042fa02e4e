"""Reading single keys; ``AsyncBucket`` calls this."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpc

from upr_client._async.adapter import unary
from upr_client.messages import call_error
from upr_protocol.consumer import ProtocolError
from upr_protocol.limits import GET_KEYS_MAX
from upr_protocol.rows import check_row
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2

if TYPE_CHECKING:
    from upr_client._async.bucket import AsyncBucket


async def get_many(
    bucket: "AsyncBucket", keys: Iterable[bytes], seconds: float | None
) -> dict[bytes, bytes]:
    """Return the values of those keys that have one; see ``AsyncBucket.get_many``."""
    wanted = list(dict.fromkeys(keys))
    for key in wanted:
        check_row(key, None)
    found: dict[bytes, bytes] = {}
    first = 0
    while first < len(wanted):
        asked = wanted[first : first + GET_KEYS_MAX]
        answers = await _ask(bucket, asked, seconds)
        # Fewer than keys: the values of the others did not fit into the message.
        if not 0 < len(answers) <= len(asked):
            raise ProtocolError(f"{len(answers)} answers for {len(asked)} keys")
        for key, answer in zip(asked, answers, strict=False):
            if answer.HasField("problem"):
                raise error_of(answer.problem)
            if answer.HasField("value"):
                found[key] = answer.value
        first += len(answers)
    return found


async def _ask(
    bucket: "AsyncBucket", keys: list[bytes], seconds: float | None
) -> list[kv_pb2.GetAnswer]:
    client = bucket._client
    request = kv_pb2.GetRequest(
        bucket=bucket.name, bucket_version=bucket.version or None, keys=keys
    )
    try:
        answer = await unary(
            client._stubs().keys.Get,
            request,
            client.request_timeout if seconds is None else seconds,
        )
    except grpc.RpcError as error:
        raise call_error(error) from error
    bucket.version = answer.bucket_version
    return list(answer.answers)
