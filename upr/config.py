"""What a server can be told. Only ``service`` and ``cli`` read it; the rest receives values."""

from dataclasses import dataclass
from pathlib import Path

from upr_protocol.limits import HEARTBEAT_SECONDS, PURGE_HOLD_SECONDS, TOMBSTONE_SECONDS

TAIL_BYTES = 64 * 2**20
FLUSH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The settings of one server.

    Attributes:
        data: the data directory; made if it does not exist.
        listen: HOST:PORT; port 0 takes a free one.
        ready_file: gets the bound address, HOST:PORT and a newline, once the server serves.
        insecure: allows a listen address that is not loopback.
        log_format: ``text`` or ``json``.
        tail_bytes: what the tail may hold; a flush begins before, and writers wait when it is reached.
        flush_seconds: the tail is flushed when its oldest write is older than this.
        heartbeat_seconds: the default interval for clients that ask for none.
        tombstone_seconds: the age from which tombstones may be purged.
        purge_hold_seconds: the age from which neither streams nor consumers hold them up.
    """

    data: Path
    listen: str = "127.0.0.1:7711"
    ready_file: Path | None = None
    insecure: bool = False
    log_format: str = "text"
    tail_bytes: int = TAIL_BYTES
    flush_seconds: float = FLUSH_SECONDS
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    tombstone_seconds: float = TOMBSTONE_SECONDS
    purge_hold_seconds: float = PURGE_HOLD_SECONDS
