"""gRPC at both ends: channel and server options, and domain errors as statuses and back.

The status carries the error's reason, retriable, message and hint as a Problem in trailing metadata; without
it (a proxy, another server) the code alone decides.
"""

import re
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from upr_protocol import errors
from upr_protocol.errors import UprError
from upr_protocol.limits import MESSAGE_BYTES_MAX, STREAM_WINDOW_BYTES
from upr_protocol.wire.codec import problem_of
from upr_protocol.wire.v1 import types_pb2

PROBLEM_KEY = "upr-problem-bin"

_CODES: dict[str, grpc.StatusCode] = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "CORRUPT_BLOCK": grpc.StatusCode.INVALID_ARGUMENT,
    "BUCKET_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "BUCKET_GONE": grpc.StatusCode.FAILED_PRECONDITION,
    "CUT_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "CONSUMER_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "FENCED": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_OWNER": grpc.StatusCode.FAILED_PRECONDITION,
    "POSITION_DAMAGED": grpc.StatusCode.DATA_LOSS,
    "SNAPSHOT_GONE": grpc.StatusCode.FAILED_PRECONDITION,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "PARTITION_NOT_ACTIVE": grpc.StatusCode.FAILED_PRECONDITION,
    "BEHIND": grpc.StatusCode.FAILED_PRECONDITION,
    "WRITE_UNDONE": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_COUNTED": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_JOINED": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_IN_CLUSTER": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_IN_STEP": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_HEARD": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_CONFIRMED": grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_ADVERTISED": grpc.StatusCode.FAILED_PRECONDITION,
    "WRONG_REPLICA_SET": grpc.StatusCode.FAILED_PRECONDITION,
    "SAME_DIRECTORY": grpc.StatusCode.FAILED_PRECONDITION,
    "OLD_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
    "HISTORY_CHANGED": grpc.StatusCode.UNAVAILABLE,
    "TOO_FEW_REPLICAS": grpc.StatusCode.UNAVAILABLE,
    "TOO_MANY": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "TOO_SLOW": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUOTA_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NO_ROOM": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "STORAGE_FAILED": grpc.StatusCode.FAILED_PRECONDITION,
    "DATA_DAMAGED": grpc.StatusCode.DATA_LOSS,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "SHUTTING_DOWN": grpc.StatusCode.UNAVAILABLE,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "UNKNOWN_OUTCOME": grpc.StatusCode.UNKNOWN,
    "UNIMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
}

_CLASSES: dict[str, type[UprError]] = {
    value.default_reason: value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, UprError)
} | {"SUPERSEDED": errors.FencedError}


def code_of(error: UprError) -> grpc.StatusCode:
    """Return the gRPC status code an error travels under; INTERNAL for what is not in the table."""
    return _CODES.get(error.reason, grpc.StatusCode.INTERNAL)


def metadata_of(error: UprError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries the complete error."""
    return ((PROBLEM_KEY, problem_of(error).SerializeToString()),)


def error_of(problem: types_pb2.Problem) -> UprError:
    """Return the error a Problem tells of, as the class its reason belongs to."""
    kind = _CLASSES.get(problem.reason, UprError)
    error = kind(
        problem.message or problem.reason,
        hint=problem.hint,
        reason=problem.reason,
        retriable=problem.retriable,
    )
    error.owner = problem.owner
    return error


_ADDRESS: Final = re.compile(r"(?:ipv[46]:|unix:|errors resolving |failed for )(\S+?):?(?: |$)")
_ANOTHER = "is this the address that the server's --listen says, and not that of another port?"
_CAUSES: Final = (
    ("no such file or directory", "nothing listens there", "is the server running?"),
    ("connection refused", "nothing listens there", "is the server running at this address?"),
    ("errors resolving", "the name of the host is not known", "is it spelled as you mean it?"),
    ("dns resolution failed", "the name of the host is not known", "is it spelled as you mean it?"),
    ("failed parsing http/2", "what listens there is no upr-server", _ANOTHER),
    ("http1.x server", "what listens there is no upr-server", _ANOTHER),
    ("http2 header with status", "what listens there is no upr-server", _ANOTHER),
    ("network is unreachable", "there is no way to it", "is the network up?"),
    ("no route to host", "there is no way to it", "is the network up?"),
    ("certificate has expired", "its certificate has expired", "does the server have a newer one?"),
    (
        "certificate is not yet valid",
        "its certificate is not valid yet",
        "is the clock right here?",
    ),
    (
        "hostname verification check failed",
        "its certificate is for another name",
        "is the target a name or an address that the certificate has?",
    ),
    (
        "failed to create security handshaker",
        "what is given for TLS cannot be used",
        "does --tls-ca have a certificate in PEM, and does --tls-key belong to --tls-cert?",
    ),
    ("certificate_verify_failed", "its certificate is not trusted", "is --tls-ca its authority?"),
    ("wrong_version_number", "what listens there speaks no TLS", "leave TLS out?"),
    (
        ": socket closed",
        "what listens there closes the connection",
        "does it want --tls, or a client's certificate (--tls-cert) that it trusts and that has not expired, or is it full?",
    ),
)
"""Words in gRPC's details of a call that was not made, what they mean, and what to ask oneself."""


_CANCELLED: Final = "the server may have too many calls at once: try again, with fewer"


def _cause_of(details: str) -> tuple[str, str]:
    """Return what gRPC's details mean, and a hint; both empty where it is not known."""
    lower = details.lower()
    for words, cause, hint in _CAUSES:
        if words in lower:
            found = _ADDRESS.search(details)
            where = f"{found[1]}: " if found else ""
            return where.replace("%5B", "[").replace("%5D", "]") + cause, hint
    return "", ""


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
    details = str(error.details() if hasattr(error, "details") else error)
    words = f"{code.name if code else 'error'}: {details}"
    cause, hint = _cause_of(details)
    if code is grpc.StatusCode.CANCELLED and details == code.name:
        # Who cancels a call here gets other words, or none.
        return errors.UnavailableError(words, hint=_CANCELLED)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.UnavailableError(
            cause or words, hint=hint or "is the server running at this address?"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.UnavailableError(words, hint="the server did not answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.TooManyError(words)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.UnauthenticatedError(words)
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return errors.PermissionDeniedError(words)
    # Whatever the code: that is no answer of a server of ours.
    return errors.UnavailableError(cause, hint=hint) if cause else UprError(words)


COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]
CLIENT_OPTIONS: list[tuple[str, int]] = [
    *COMMON,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The SDK reconnects with backoff and jitter of its own; gRPC's would add up to two minutes of silence.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name this is how long one attempt to connect may take: a slow link or a busy host needs it.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Together with the SDK's pause of up to 1 s a server that is back is found within 2 s.
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
    # A channel that is opened instead of a dead one must not find that one's connection again.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *COMMON,
    # Compressed requests are refused: a few KiB would become MESSAGE_BYTES_MAX before anybody can look at them. Nor are
    # they decompressed while the refusal is on its way.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # Most bytes that may arrive for a call that reads nothing: otherwise gRPC derives it from the link, up to many MiB
    # a call.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    # On by default, and then a second server takes a share of the connections without a word.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that vanished without a word is found, also behind a Write call, which has no heartbeat.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Close silent connections, and those without calls, to free their places.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 300_000),
]
