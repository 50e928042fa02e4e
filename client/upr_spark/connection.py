"""How the data source reaches its server: options of reading and writing alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from upr_protocol.errors import InvalidArgumentError
from upr_spark.errors import UprSparkError, bad_option
from upr_spark.options import Option, duration, flag, read_options, text

if TYPE_CHECKING:
    import grpc

    from upr_client import Client

_EVERYWHERE: Final = "batch stream write"
CONNECTION_OPTIONS: Final = (
    Option(
        "endpoint",
        None,
        _EVERYWHERE,
        "HOST:PORT of the server, or several with commas in between",
        text,
    ),
    Option("bucket", "default", _EVERYWHERE, "the bucket's name", text),
    Option("tls", "false", _EVERYWHERE, "whether the connection is encrypted", flag),
    Option(
        "tls.ca",
        None,
        _EVERYWHERE,
        "PEM file of the certificates to trust, read on the driver's machine; else the usual ones",
        text,
    ),
    Option("tls.cert", None, _EVERYWHERE, "PEM file of the client's own certificate", text),
    Option("tls.key", None, _EVERYWHERE, "PEM file of the client's private key", text),
    Option("token", None, _EVERYWHERE, "bearer token; never shown in an error", text, secret=True),
    Option(
        "tokenFile",
        None,
        _EVERYWHERE,
        "file that has the token, read on the driver's machine",
        text,
    ),
    Option(
        "connectTimeout",
        "10s",
        _EVERYWHERE,
        "how long the server may take to accept a stream",
        duration(0.05, 3600),
    ),
    Option(
        "readTimeout",
        "60s",
        _EVERYWHERE,
        "how long a single request may take",
        duration(0.05, 3600),
    ),
    Option(
        "retryTimeout",
        "60s",
        _EVERYWHERE,
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
        tls: whether to encrypt.
        ca, cert, key: PEM bytes, or None.
        token: or None.
    """

    endpoint: str
    bucket: str
    connect_timeout: float
    read_timeout: float
    retry_timeout: float
    tls: bool = False
    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

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
                tls=self._credentials(),
                token=self.token,
            )
        except InvalidArgumentError as error:
            option = "token" if "token" in error.message else "endpoint"
            raise bad_option(option, None, error.message, error.hint) from None

    def _credentials(self) -> "bool | grpc.ChannelCredentials":
        if not self.tls or not (self.ca or self.cert):
            return self.tls
        import grpc

        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


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
            "it must be given",
            'for example .option("endpoint", "127.0.0.1:7070")',
        )
    if values["token"] is not None and values["tokenFile"] is not None:
        raise bad_option("tokenFile", None, "token is given besides", "give one of the two")
    if (values["tls.cert"] is None) != (values["tls.key"] is None):
        raise bad_option("tls.cert", None, "tls.cert and tls.key go together")
    for name in ("tls.ca", "tls.cert"):
        if values[name] is not None and not values["tls"]:
            raise bad_option(name, values[name], "it needs tls to be true")
    connection = Connection(
        values["endpoint"],
        values["bucket"],
        values["connectTimeout"],
        values["readTimeout"],
        values["retryTimeout"],
        values["tls"],
        _bytes_of(values, "tls.ca"),
        _bytes_of(values, "tls.cert"),
        _bytes_of(values, "tls.key"),
        _token(values),
    )
    _check(connection)
    return connection


def _check(connection: Connection) -> None:
    from upr_client.messages import check_name

    connection.open().close()
    try:
        check_name(connection.bucket, "bucket")
    except InvalidArgumentError as error:
        raise bad_option("bucket", connection.bucket, error.message, error.hint) from None


def _bytes_of(values: Mapping[str, Any], name: str) -> bytes | None:
    path = values[name]
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(name, path, error) from None


def _token(values: Mapping[str, Any]) -> str | None:
    content = _bytes_of(values, "tokenFile")
    if content is None:
        token: str | None = values["token"]
        return token
    return content.decode("ascii", "replace").strip()


def _unreadable(name: str, path: str, error: OSError) -> UprSparkError:
    return bad_option(
        name,
        path,
        f"the file cannot be read: {error.strerror}",
        "the file is read on the machine of the driver",
    )
