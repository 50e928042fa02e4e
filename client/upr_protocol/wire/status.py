"""Domain errors to gRPC statuses and back: one table for server and SDK.

The status carries the error's reason, retriable, message and hint as a Problem in trailing metadata; without
it (a proxy, another server) the code alone decides.
"""

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from upr_protocol import errors
from upr_protocol.errors import UprError
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.v1 import types_pb2

PROBLEM_KEY = "upr-problem-bin"

_CODES: dict[str, grpc.StatusCode] = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "CORRUPT_BLOCK": grpc.StatusCode.INVALID_ARGUMENT,
    "CREDIT_EXCEEDED": grpc.StatusCode.FAILED_PRECONDITION,
    "BUCKET_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "BUCKET_GONE": grpc.StatusCode.FAILED_PRECONDITION,
    "CUT_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "FENCED": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_OWNER": grpc.StatusCode.FAILED_PRECONDITION,
    "POSITION_DAMAGED": grpc.StatusCode.DATA_LOSS,
    "SNAPSHOT_GONE": grpc.StatusCode.FAILED_PRECONDITION,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "PARTITION_NOT_ACTIVE": grpc.StatusCode.FAILED_PRECONDITION,
    "TOO_MANY": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NO_ROOM": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "STORAGE_FAILED": grpc.StatusCode.FAILED_PRECONDITION,
    "DATA_DAMAGED": grpc.StatusCode.DATA_LOSS,
    "SHUTTING_DOWN": grpc.StatusCode.UNAVAILABLE,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
}

_CLASSES: dict[str, type[UprError]] = {
    value.default_reason: value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, UprError)
}


def code_of(error: UprError) -> grpc.StatusCode:
    """Return the gRPC status code an error travels under; INTERNAL for what is not in the table."""
    return _CODES.get(error.reason, grpc.StatusCode.INTERNAL)


def metadata_of(error: UprError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries the error whole."""
    return ((PROBLEM_KEY, problem_of(error).SerializeToString()),)


def error_of(problem: types_pb2.Problem) -> UprError:
    """Return the error a Problem tells of, as the class its reason belongs to."""
    kind = _CLASSES.get(problem.reason, UprError)
    return kind(
        problem.message or problem.reason,
        hint=problem.hint,
        reason=problem.reason,
        retriable=problem.retriable,
    )


def error_from_call(error: grpc.RpcError) -> UprError:
    """Return the domain error behind a failed call, sync or asyncio."""
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == PROBLEM_KEY and isinstance(value, bytes):
            try:
                return error_of(types_pb2.Problem.FromString(value))
            except DecodeError:
                # Not one of ours, whatever it is: the code alone decides.
                break
    code = error.code() if hasattr(error, "code") else None
    words = f"{code.name if code else 'error'}: {error.details() if hasattr(error, 'details') else error}"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.UnavailableError(words, hint="is the server running at this address?")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.UnavailableError(words, hint="the server did not answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.TooManyError(words)
    return UprError(words)
