"""Options as Spark hands them over, names in lower case and values as text, and those of the connection to the server."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from upr_client.endpoints import Login, check_pem, endpoints_of, is_server_name
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.limits import check_name, parse_duration, parse_size
from upr_spark.errors import UprSparkError, bad_option

if TYPE_CHECKING:
    from upr_client import Client


_LOOKUPS: Final = 3
"""Tries of a name server that does not answer."""

SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark adds or takes for itself; no data source minds them."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Args:
        name: as it is written in documents; Spark takes it in any case.
        default: the text that stands for it where it is not given; None for none.
        words: what it does.
        parse: takes the text and returns the value; raises ValueError with what is expected.
        secret: whether the value may not be shown.
    """

    name: str
    default: str | None
    words: str
    parse: Callable[[str], Any]
    secret: bool = False


def read_options(table: Iterable[Option], given: Mapping[str, str]) -> dict[str, Any]:
    """Return the value of every option of a table by its name; None where there is neither value nor default.

    Args:
        given: all options, those of other tables too; names in any case.

    Raises:
        UprSparkError: UPR_BAD_OPTION, a value cannot be read or is out of its range.
    """
    by_name = {name.lower(): value for name, value in given.items()}
    values: dict[str, Any] = {}
    for option in table:
        text = by_name.get(option.name.lower(), option.default)
        if text is None:
            values[option.name] = None
            continue
        try:
            values[option.name] = option.parse(text)
        except (ValueError, UprError) as error:
            shown = None if option.secret else text
            hint = option.words if option.default is None else f"the default is {option.default}"
            raise bad_option(option.name, shown, str(error), hint) from None
    return values


_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("host", "kafka.bootstrap.servers", "target"),
        'the server is named by .option("endpoint", "HOST:PORT")',
    ),
    **dict.fromkeys(
        ("assign", "subscribe", "subscribepattern", "topic"),
        'a bucket is named by .option("bucket", ...)',
    ),
}
"""Hints for options that the commands, or Spark's source and sink of Kafka, have under other names."""


def check_known(
    given: Iterable[str], table: Iterable[Option], renamed: Mapping[str, str] | None = None
) -> None:
    """Refuse options that nothing would look at.

    Args:
        given: names in any case.
        table: what there is.
        renamed: what to say about names, in lower case, that people try.

    Raises:
        UprSparkError: UPR_BAD_OPTION, naming the option and the known ones.
    """
    names = sorted(option.name for option in table)
    known = {name.lower() for name in names} | SPARKS_OWN
    for name in given:
        if name.lower() not in known:
            hints = {**_ELSEWHERE, **(renamed or {})}
            hint = hints.get(name.lower(), f"known are {', '.join(names)}")
            raise bad_option(name, None, "is unknown", hint)


def text(value: str) -> str:
    """Return the text, which must not be empty."""
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def flag(value: str) -> bool:
    words = value.strip().lower()
    if words not in ("true", "false"):
        raise ValueError("must be true or false")
    return words == "true"


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser that takes one of some words, in any case."""

    def parse(value: str) -> str:
        for choice in choices:
            if value.strip().lower() == choice.lower():
                return choice
        raise ValueError(f"must be one of {', '.join(choices)}")

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from low to high."""

    def parse(value: str) -> int:
        words = value.strip()
        number = int(words[:20]) if words.isascii() and words.isdigit() else -1
        if not low <= number <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return number

    return parse


def size(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of sizes from low to high bytes, as ``upr_protocol.limits`` takes them."""
    return partial(parse_size, low=low, high=high)


def duration(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of durations from low to high seconds, as ``upr_protocol.limits`` takes them."""
    return partial(parse_duration, low=low, high=high)


CONNECTION_OPTIONS: Final = (
    Option("endpoint", None, "HOST:PORT of the server, or several with commas in between", text),
    Option("bucket", "default", "the bucket's name", text),
    Option("tls", "false", "whether the connection is encrypted", flag),
    Option(
        "tls.ca",
        None,
        "PEM file of the certificates to trust, read on the driver's machine; else the usual ones",
        text,
    ),
    Option("tls.cert", None, "PEM file of the client's own certificate", text),
    Option("tls.key", None, "PEM file of the client's private key", text),
    Option("token", None, "bearer token; never shown in an error", text, secret=True),
    Option("tokenFile", None, "file that has the token, read on the driver's machine", text),
    Option(
        "connectTimeout",
        "10s",
        "how long the server may take to accept a stream",
        duration(0.05, 3600),
    ),
    Option("readTimeout", "60s", "how long a single request may take", duration(0.05, 3600)),
    Option(
        "retryTimeout",
        "60s",
        "how long reading and writing is tried again without hearing from a server",
        duration(0.05, 86400),
    ),
)


@dataclass(frozen=True, slots=True)
class Connection:
    """Settings of a client that can be pickled; what is secret is not shown.

    Args:
        endpoint: "host:port", several with commas in between.
        bucket: its name.
        connect_timeout, read_timeout, retry_timeout: seconds.
        login: its token is no file.
    """

    endpoint: str
    bucket: str
    connect_timeout: float
    read_timeout: float
    retry_timeout: float
    login: Login = field(default_factory=Login)

    def open(self) -> "Client":
        """Return a client of its own, to be used with ``with``; it connects when something is asked.

        Raises:
            UprSparkError: UPR_BAD_OPTION, the settings contradict each other.
        """
        from upr_client import Client

        try:
            return Client(
                self.endpoint,
                connect_timeout=self.connect_timeout,
                request_timeout=self.read_timeout,
                retry_seconds=self.retry_timeout,
                **self.login.options,
            )
        except InvalidArgumentError as error:
            option = "token" if "token" in error.message else "endpoint"
            raise bad_option(option, None, error.message, error.hint) from None

    def check_hosts(self) -> None:
        """Refuse names of which none has an address, where gRPC would look for one until retryTimeout is over.

        It is for the driver, before a job begins: tasks go on when a name is gone for a while.

        Raises:
            UprSparkError: UPR_UNAVAILABLE.
        """
        endpoints = endpoints_of(self.endpoint)
        by_proxy = any(name in os.environ for name in ("grpc_proxy", "https_proxy", "http_proxy"))
        if by_proxy or not all(map(is_server_name, endpoints)):
            return
        for attempt in range(_LOOKUPS):
            silent = False
            for one in endpoints:
                try:
                    socket.getaddrinfo(one.rpartition(":")[0].strip("[]"), None)
                    return
                except socket.gaierror as error:
                    silent = silent or error.errno == socket.EAI_AGAIN
            if not silent:
                break
            if attempt < _LOOKUPS - 1:
                time.sleep(1)
        raise UprSparkError(
            "UNAVAILABLE",
            f"no address is known of {', '.join(endpoints)}",
            hint="is the name right, and does this machine know it? The driver and each executor look it up",
            retriable=True,
            details={"option": "endpoint"},
        )


def read_connection(options: Mapping[str, str]) -> Connection:
    """Return the settings that options give; other options are not looked at. Nothing is connected.

    Args:
        options: as Spark gives them; names in any case.

    Raises:
        UprSparkError: UPR_BAD_OPTION, one is missing or bad, or a file cannot be read.
    """
    values = read_options(CONNECTION_OPTIONS, options)
    if values["endpoint"] is None:
        raise bad_option(
            "endpoint",
            None,
            "must be given",
            'for example .option("endpoint", "127.0.0.1:7711"); a table of SQL has its options only where CREATE TABLE '
            "has no list of columns and INSERT INTO has one, and not for streams that write",
        )
    if values["token"] is not None and values["tokenFile"] is not None:
        raise bad_option(
            "tokenFile", None, "token is given too; must be one of the two", "give one of the two"
        )
    if (values["tls.cert"] is None) != (values["tls.key"] is None):
        raise bad_option("tls.cert", None, "tls.cert and tls.key go together")
    for name in ("tls.ca", "tls.cert"):
        if values[name] is not None and not values["tls"]:
            raise bad_option(name, values[name], "needs tls=true")
    connection = Connection(
        values["endpoint"],
        values["bucket"],
        values["connectTimeout"],
        values["readTimeout"],
        values["retryTimeout"],
        Login(
            values["tls"],
            _pem_of(values, "tls.ca", b"CERTIFICATE"),
            _pem_of(values, "tls.cert", b"CERTIFICATE"),
            _pem_of(values, "tls.key", b"PRIVATE KEY"),
            _token(values),
        ),
    )
    connection.open().close()
    try:
        check_name(connection.bucket, "bucket")
    except InvalidArgumentError as error:
        raise bad_option("bucket", connection.bucket, error.message, error.hint) from None
    return connection


def _bytes_of(values: Mapping[str, Any], name: str) -> bytes | None:
    path = values[name]
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise bad_option(
            name,
            path,
            f"the file cannot be read: {error.strerror}",
            "the file is read on the machine of the driver",
        ) from None


def _pem_of(values: Mapping[str, Any], name: str, kind: bytes) -> bytes | None:
    content = _bytes_of(values, name)
    if content is None:
        return None
    try:
        return check_pem(content, "the file", kind)
    except InvalidArgumentError as error:
        raise bad_option(name, values[name], error.message, error.hint) from None


def _token(values: Mapping[str, Any]) -> str | None:
    content = _bytes_of(values, "tokenFile")
    if content is None:
        token: str | None = values["token"]
        return token
    return content.decode("ascii", "replace").strip()
