"""gRPC channel and server options, set at both ends from here."""

from upr_protocol.limits import MESSAGE_BYTES_MAX

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
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    # A channel that is opened instead of a dead one must not find that one's connection again.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *COMMON,
    # On by default, and then a second server takes a share of the connections without a word.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that vanished without a word is found, also behind a Write call, which has no heartbeat.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]
