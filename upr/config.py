"""Settings of a server: the one table of the options of ``upr-server``, and their values.

Only ``service`` and ``cli`` read it; the rest receives values. Command line, environment, file, ``--print-config`` and the
table in OPERATORS.md are made of it in ``cli/settings.py``.
"""

# ruff: noqa: RUF009 (each call makes a field)
import ipaddress
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from upr_protocol.limits import (
    CLOCK_JUMP_SECONDS,
    CONSUMER_SECONDS,
    FAILOVER_LOG_MAX,
    FAILOVER_LOG_MIN,
    FAILOVER_LOG_RECORDS,
    HEARTBEAT_SECONDS,
    HEARTBEAT_SECONDS_MAX,
    HEARTBEAT_SECONDS_MIN,
    PURGE_HOLD_SECONDS,
    READER_SECONDS,
    TOMBSTONE_SECONDS,
    VALUE_BYTES_MAX,
)

TAIL_BYTES = 64 * 2**20
FLUSH_SECONDS = 60.0
_T = TypeVar("_T")


def is_every_address(address: str) -> bool:
    """Return whether the host of HOST:PORT stands for all addresses of a machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_unspecified
    return False


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ``upr-server``.

    Attributes:
        kind: how it is written: address, addresses, cluster, count, directory, duration, file, flag, reached (an address that
            others call) or size; or the words to choose from with "|" in between.
        words: what it does.
        name: without its dashes; empty where it is that of the field.
        low, high: range of a count, of a size in bytes, of a duration in seconds; None for no bound of its own.
        otherwise: what stands for the default in documents where there is no value.
        once: whether it is for one start, so that neither file nor environment may have it.
    """

    kind: str
    words: str
    name: str = ""
    low: float = 0
    high: float | None = None
    otherwise: str = ""
    once: bool = False


def _option(default: _T, kind: str, words: str, **more: Any) -> _T:
    """Return a field with a default that is an option; ``more`` as in Option."""
    return field(default=default, metadata={"option": Option(kind, words, **more)})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of one server; an address of "" and a file of None are not given."""

    data: Path = field(
        metadata={
            "option": Option(
                "directory",
                "The data directory; made when it is not there.",
                otherwise="must be given",
            )
        }
    )
    listen: str = _option(
        "127.0.0.1:7711", "address", "HOST:PORT to listen on; port 0 takes a free one."
    )
    http: str = _option(
        "",
        "address",
        "HOST:PORT for a page in the browser, /metrics (Prometheus), /healthz and /readyz; port 0 takes a free one, which the log tells.",
    )
    text: str = _option(
        "",
        "address",
        "HOST:PORT to serve changes as lines on, for netcat and small tools; port 0 takes a free one.",
    )
    ready_file: Path | None = _option(
        None, "file", "Gets the bound address, HOST:PORT and a newline, when the server is ready."
    )
    require_data: bool = _option(
        False,
        "flag",
        "Refuse to start unless the data directory is there, with a bucket in it: its volume may not be mounted.",
    )
    data_moved: bool = _option(
        False,
        "flag",
        "For one start after the data directory was copied: nothing was written to the original after its clean stop.",
        once=True,
    )
    insecure: bool = _option(
        False,
        "flag",
        "Allow an address that is not loopback without TLS and identities: anyone may write.",
    )
    tls_cert: Path | None = _option(
        None,
        "file",
        "PEM file of the server's certificate, with those between it and its authority. Read again when it changes."
        " Towards other servers of its set it is the client's.",
    )
    tls_key: Path | None = _option(None, "file", "PEM file of its key.")
    tls_client_ca: Path | None = _option(
        None,
        "file",
        "PEM file of authorities: every client must show a certificate of one of them.",
    )
    tokens: Path | None = _option(
        None,
        "file",
        "File of identities with their roles, as 'upr-admin token' writes it. Read again when it changes.",
    )
    open_admin: bool = _option(
        False,
        "flag",
        "Without identities, let anyone who can connect drop a bucket, forget or reset a consumer, and say who is active"
        " in the set.",
    )
    tail_bytes: int = _option(
        TAIL_BYTES,
        "size",
        "What is not in the store yet may take this much memory; then writers wait for a flush, which begins before.",
        low=1,
    )
    max_value_bytes: int = _option(
        VALUE_BYTES_MAX, "size", "Refuse writes with a larger value.", high=VALUE_BYTES_MAX
    )
    flush_seconds: float = _option(
        FLUSH_SECONDS,
        "duration",
        "Flush to the store when the tail's oldest commit is this old.",
        low=0.001,
    )
    heartbeat_seconds: float = _option(
        HEARTBEAT_SECONDS,
        "duration",
        "Interval of heartbeats to idle consumers, where they ask for none.",
        low=HEARTBEAT_SECONDS_MIN,
        high=HEARTBEAT_SECONDS_MAX,
    )
    reader_seconds: float = _option(
        READER_SECONDS,
        "duration",
        "End a consumer whose connection takes nothing for so long while something waits.",
        name="reader-timeout",
        low=0.1,
    )
    tombstone_seconds: float = _option(
        TOMBSTONE_SECONDS,
        "duration",
        "Age from which a deletion may be purged, when everybody has passed it.",
        name="tombstone-age",
    )
    purge_hold_seconds: float = _option(
        PURGE_HOLD_SECONDS,
        "duration",
        "Age from which a deletion is purged whoever has not passed it; only a cut holds it longer.",
        name="purge-hold",
    )
    consumer_seconds: float = _option(
        CONSUMER_SECONDS,
        "duration",
        "Forget a registered consumer that nobody has used for so long.",
        name="consumer-expiry",
        low=1,
    )
    failover_log_records: int = _option(
        FAILOVER_LOG_RECORDS,
        "count",
        "Records that the failover log of a partition keeps; who comes back with an older id begins again at 0.",
        low=FAILOVER_LOG_MIN,
        high=FAILOVER_LOG_MAX,
    )
    clock_jump_seconds: float = _option(
        CLOCK_JUMP_SECONDS,
        "duration",
        "A longer absence may be a step of the day's clock, and counts once the server has run for so long.",
        name="clock-jump",
        low=1,
    )
    replicate_from: tuple[str, ...] = _option(
        (),
        "addresses",
        "Be a replica: keep what the server there has. Further addresses are tried when it cannot be reached.",
    )
    advertise: str = _option(
        "",
        "reached",
        "HOST:PORT where the other servers of its set, and their clients, reach this server.",
        otherwise="the address it listens on",
    )
    anonymous: bool = _option(
        False,
        "flag",
        "As a replica, do not register with the upstream: hold nothing up there, and count for nothing.",
    )
    cluster: str = _option(
        "",
        "cluster",
        "etcd://HOST:PORT[,HOST:PORT...]/NAME: the servers of the cluster NAME say by themselves who is active.",
    )
    cluster_ca: Path | None = _option(
        None,
        "file",
        "PEM file of the authorities of etcd's certificates: etcd is called with TLS, with --tls-cert where that is given.",
    )
    cluster_user: Path | None = _option(
        None, "file", "File with NAME:PASSWORD of the user of etcd.", name="cluster-user-file"
    )
    min_copies: int = _option(
        0,
        "count",
        "Take writes only while so many counted replicas are connected and in step.",
        high=3,
    )
    peer_ca: Path | None = _option(
        None,
        "file",
        "PEM file of the authorities of the other servers of the set: they are called with TLS, with --tls-cert.",
    )
    peer_token: Path | None = _option(
        None,
        "file",
        "File of the token that is shown to the other servers of the set; it needs the role replicate there.",
        name="peer-token-file",
    )
    log_format: str = _option(
        "",
        "text|json",
        "How the log on stderr is written.",
        otherwise="text on a terminal, else json",
    )

    @property
    def encrypted(self) -> bool:
        """Whether anything is said of TLS."""
        return bool(self.tls_cert or self.tls_key or self.tls_client_ca)

    @property
    def is_unreachable(self) -> bool:
        """Whether no other server can be told where this one is: it listens on every address, and advertises none."""
        return is_every_address(self.listen) and not self.advertise

    @property
    def meets(self) -> bool:
        """Whether it takes part in who is active in its set: not where any caller could say that another server is."""
        return self.open_admin or self.tokens is not None or self.tls_client_ca is not None


OPTIONS: dict[str, tuple[str, Option]] = {
    one.metadata["option"].name or one.name.replace("_", "-"): (one.name, one.metadata["option"])
    for one in fields(ServerConfig)
}
"""Field and option by the option's name, in the order of the documents."""
