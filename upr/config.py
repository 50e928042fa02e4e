"""Settings of a server. Only ``service`` and ``cli`` read it; the rest receives values."""

from dataclasses import dataclass
from pathlib import Path

from upr_protocol.limits import (
    CLOCK_JUMP_SECONDS,
    CONSUMER_SECONDS,
    FAILOVER_LOG_RECORDS,
    HEARTBEAT_SECONDS,
    PURGE_HOLD_SECONDS,
    READER_SECONDS,
    TOMBSTONE_SECONDS,
    VALUE_BYTES_MAX,
)

TAIL_BYTES = 64 * 2**20
FLUSH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The settings of one server.

    Attributes:
        data: the data directory; made if it does not exist.
        listen: HOST:PORT; port 0 takes a free one.
        http: HOST:PORT of metrics and health over HTTP; empty for none.
        text: HOST:PORT of the text port; empty for none.
        ready_file: gets the bound address, HOST:PORT and a newline, once the server serves.
        insecure: allows a listen address that is not loopback.
        log_format: ``text`` or ``json``.
        max_value_bytes: writes with a larger value are refused.
        tail_bytes: what the tail may hold; a flush begins before, and writers wait when it is reached.
        flush_seconds: the tail is flushed when its oldest write is older than this.
        heartbeat_seconds: the default interval for clients that ask for none.
        reader_seconds: a consumer whose connection takes nothing for so long, while something waits, is ended.
        tombstone_seconds: the age from which tombstones may be purged.
        purge_hold_seconds: the age from which neither streams nor consumers hold them up.
        consumer_seconds: a consumer that nobody has used for so long is forgotten.
        failover_log_records: how many records a failover log keeps.
        clock_jump_seconds: an absence beyond this may be a step of the day's clock.
        data_moved: whether this start takes the word of a clean-shutdown proof that was copied with the data.
        require_data: the data directory must be there already, with a bucket in it.
        replicate_from: HOST:PORT of the upstreams that a replica tries in turn; none for a server that is no replica.
        advertise: HOST:PORT where other servers of a set reach this one; empty for the address that it listens on.
        anonymous: whether a replica is not registered with its upstream, and counts for nothing there.
        tls_cert, tls_key: PEM files of the server's certificate and its key; None for no encryption. Towards other
            servers of its set it is the client's certificate.
        tls_client_ca: PEM file of the authorities of clients' certificates, which every client must show then.
        tokens: the file of identities; None for none.
        open_admin: whether anyone may drop a bucket, or take part in who is active, where there are no identities.
        peer_ca: PEM file of the authorities of the other servers' certificates; None for links without encryption.
        peer_token: file of the token that is shown to the other servers.
    """

    data: Path
    listen: str = "127.0.0.1:7711"
    http: str = ""
    text: str = ""
    ready_file: Path | None = None
    insecure: bool = False
    log_format: str = "text"
    tail_bytes: int = TAIL_BYTES
    max_value_bytes: int = VALUE_BYTES_MAX
    flush_seconds: float = FLUSH_SECONDS
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    reader_seconds: float = READER_SECONDS
    tombstone_seconds: float = TOMBSTONE_SECONDS
    purge_hold_seconds: float = PURGE_HOLD_SECONDS
    consumer_seconds: float = CONSUMER_SECONDS
    failover_log_records: int = FAILOVER_LOG_RECORDS
    clock_jump_seconds: float = CLOCK_JUMP_SECONDS
    require_data: bool = False
    data_moved: bool = False
    replicate_from: tuple[str, ...] = ()
    advertise: str = ""
    anonymous: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    open_admin: bool = False
    peer_ca: Path | None = None
    peer_token: Path | None = None

    @property
    def encrypted(self) -> bool:
        """Whether anything is said of TLS."""
        return bool(self.tls_cert or self.tls_key or self.tls_client_ca)

    @property
    def is_unreachable(self) -> bool:
        """Whether no other server can be told where this one is: it listens on every address, and advertises none."""
        host = self.listen.rpartition(":")[0].strip("[]")
        return host in ("0.0.0.0", "::") and not self.advertise

    @property
    def meets(self) -> bool:
        """Whether it takes part in who is active in its set: not where any caller could say that another server is."""
        return self.open_admin or self.tokens is not None or self.tls_client_ca is not None
