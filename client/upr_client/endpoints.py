"""Endpoints: the servers a client may use, what it shows them, and what their failures mean."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import grpc

from upr_protocol.errors import (
    BehindError,
    InvalidArgumentError,
    PartitionNotActiveError,
    ShuttingDownError,
    UnavailableError,
    UprError,
)
from upr_protocol.wire.grpc import PROBLEM_KEY, error_from_call

Token = str | Path | Callable[[], str]

SILENT_REASON: Final = "SILENT"
"""Of a call that ended because the other side was not heard."""

_MOVES: Final = frozenset(
    {
        UnavailableError.default_reason,
        ShuttingDownError.default_reason,
        PartitionNotActiveError.default_reason,
        BehindError.default_reason,
        SILENT_REASON,
    }
)
_REFUSED: Final = frozenset({PartitionNotActiveError.default_reason, BehindError.default_reason})
"""Reasons of a server that did nothing, and of which another one may do it."""
READ_FROM: Final = {"active": False, "any": True}
"""Words of ``read_from``, and whether any server may be read from then."""
_PORT_MAX: Final = 65535
_SOCKETS: Final = ("unix:", "unix-abstract:")
_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:")
"""Beginnings that gRPC knows, of Unix sockets and of addresses."""
_SERVER_NAME: Final = re.compile(
    r"(?!(?i:unix|unix-abstract|vsock|dns|ipv4|ipv6|xds|google-c2p):)(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})"
)
_NEVER_SENT: Final = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "errors resolving",
)
"""Beginnings of gRPC's details of a call for which there was no connection. Other words only mean that a call is not
made again elsewhere."""


def endpoints_of(target: str | Sequence[str]) -> tuple[str, ...]:
    """Return the endpoints that a target names, in its order and each once.

    Args:
        target: "host:port", several of them with commas in between, or a sequence of them.

    Raises:
        InvalidArgumentError: there is none, or one is not of this form.
    """
    if not isinstance(target, Sequence):
        raise InvalidArgumentError(f"target is {target!r}; must be HOST:PORT, or several")
    parts = target.split(",") if isinstance(target, str) else list(target)
    endpoints = []
    for part in parts:
        endpoint = part.strip() if isinstance(part, str) else ""
        host, colon, port = endpoint.rpartition(":")
        named = endpoint.startswith(_SOCKETS)
        numbered = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= _PORT_MAX
        spoken = not any("\ud800" <= character <= "\udfff" for character in endpoint)
        if not spoken or (not named and not (host and colon and numbered)):
            raise InvalidArgumentError(
                f"endpoint is {part!r}; must be HOST:PORT with a port of 1 to {_PORT_MAX}",
                hint="give several with commas in between, or as a list",
            )
        if "://" in endpoint and not endpoint.startswith((*_SOCKETS, *_SCHEMES)):
            raise InvalidArgumentError(
                f"endpoint is {part!r}; must be HOST:PORT, without a scheme",
                hint=f"give {endpoint.partition('://')[2]!r}; whether it is encrypted is said by tls",
            )
        endpoints.append(endpoint)
    if not endpoints:
        raise InvalidArgumentError(
            "endpoints are empty; must be one or more", hint='give "host:port"'
        )
    return tuple(dict.fromkeys(endpoints))


def is_server_name(text: str) -> bool:
    """Return whether a text is HOST:PORT, as servers name each other: no scheme, no socket's path, not several."""
    found = _SERVER_NAME.fullmatch(text)
    return found is not None and 0 < int(found[1]) <= _PORT_MAX


def is_local(endpoint: str) -> bool:
    """Return whether an endpoint is on this machine: a loopback address or a Unix socket."""
    if endpoint.startswith(_SOCKETS):
        return True
    host = endpoint.rpartition(":")[0].rpartition("/")[2]
    for scheme in _SCHEMES:
        host = host.removeprefix(scheme)
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path, what: str) -> bytes:
    """Return the content of a file of credentials; nothing of it is in errors."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"{what} cannot be read: {error.strerror}", hint=f"is {path} there, and yours to read?"
        ) from None


def check_pem(content: bytes, what: str, kind: bytes) -> bytes:
    """Return the content of a PEM file; gRPC would take another for a server that cannot be reached, and try again.

    Raises:
        InvalidArgumentError: it has none of that kind; nothing of it is in the error.
    """
    if kind + b"-----" not in content:
        raise InvalidArgumentError(
            f"{what} is not in PEM; must have a line -----BEGIN {kind.decode()}-----",
            hint="is it another file, or in DER? openssl converts it",
        )
    return content


def _read_pem(path: Path | None, what: str, kind: bytes) -> bytes | None:
    return None if path is None else check_pem(_read(path, what), f"{what} in {path}", kind)


def token_from(path: Path) -> str:
    """Return the token in a file, without blanks around it.

    Raises:
        InvalidArgumentError: the file cannot be read.
    """
    return _read(path, "the file of the token").decode("ascii", "replace").strip()


def credentials_of(
    tls: bool | Path | grpc.ChannelCredentials | None,
) -> grpc.ChannelCredentials | None:
    """Return what channels are opened with: None for plain ones; ``True`` trusts gRPC's root certificates, and a path
    those of a PEM file alone.

    Raises:
        InvalidArgumentError: it is none of these, or the file cannot be read.
    """
    if tls is None or tls is False:
        return None
    if tls is True:
        return grpc.ssl_channel_credentials()
    if isinstance(tls, Path):
        return Login.of(True, tls, None, None, None).credentials
    if not isinstance(tls, grpc.ChannelCredentials):
        raise InvalidArgumentError(
            f"tls is {type(tls).__name__}; must be None, True, a Path or grpc.ChannelCredentials",
            hint="grpc.ssl_channel_credentials(root_certificates=...) makes them from PEM bytes",
        )
    return tls


def check_token(token: Token | None, endpoints: Sequence[str], encrypted: bool) -> None:
    """Raise InvalidArgumentError when a token would go over a network for everybody to read."""
    if token is None:
        return
    if isinstance(token, str | Path):
        authorization(token)
    elif not callable(token):
        raise InvalidArgumentError(
            f"token is {type(token).__name__}; must be None, a str, a Path or a function that returns one"
        )
    open_to_all = [endpoint for endpoint in endpoints if not is_local(endpoint)]
    if open_to_all and not encrypted:
        raise InvalidArgumentError(
            f"a token would be sent to {open_to_all[0]} without encryption",
            hint="pass tls=True, or credentials; without TLS a token goes to loopback addresses only",
        )


def authorization(token: Token) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries a token; a file or a function is asked for the token of now.

    Raises:
        InvalidArgumentError: the token is empty or has other characters than visible ASCII ones, or its file cannot be
            read.
    """
    if isinstance(token, Path):
        value = token_from(token)
    else:
        value = token if isinstance(token, str) else token()
    if not isinstance(value, str) or not value or not all("!" <= c <= "~" for c in value):
        # Nothing of the value: it ends up in logs.
        what = f"the token in {token}" if isinstance(token, Path) else "token"
        why = "is empty" if value == "" else "has other characters"
        raise InvalidArgumentError(f"{what} {why}; must be one or more visible ASCII characters")
    return (("authorization", f"Bearer {value}"),)


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials of a client that can be pickled; none of them is shown.

    Attributes:
        tls: whether to encrypt.
        ca, cert, key: PEM bytes, or None.
        token: as a client takes it, but no function.
    """

    tls: bool = False
    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    token: str | Path | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        tls: bool,
        ca: Path | None,
        cert: Path | None,
        key: Path | None,
        token: str | Path | None,
    ) -> "Login":
        """Return the login that files make; those of TLS mean TLS.

        Raises:
            InvalidArgumentError: a file cannot be read, or is no PEM, or one of ``cert`` and ``key`` is missing.
        """
        if (cert is None) != (key is None):
            raise InvalidArgumentError(
                "one of certificate and key is missing; must be both or none",
                hint="the certificate and its key are files of their own",
            )
        return cls(
            bool(tls or ca or cert),
            _read_pem(ca, "the authority's certificate", b"CERTIFICATE"),
            _read_pem(cert, "the certificate", b"CERTIFICATE"),
            _read_pem(key, "the key", b"PRIVATE KEY"),
            token,
        )

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """What channels are opened with; None for plain ones."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert) if self.tls else None

    @property
    def is_secret(self) -> bool:
        """Whether it shows who calls, and so is for the server alone that it was given for."""
        return self.token is not None or self.cert is not None

    @property
    def options(self) -> dict[str, Any]:
        """The options ``tls`` and ``token`` of a client."""
        return {"tls": self.credentials, "token": self.token}

    def packed(self) -> "Login":
        """Return it for another machine, with the token itself."""
        token = self.token
        return replace(self, token=token_from(token)) if isinstance(token, Path) else self


def was_silent(error: UprError) -> bool:
    """Return whether this side ended a call because it did not hear the server."""
    return error.reason == SILENT_REASON and isinstance(error, UnavailableError)


def moves_on(error: UprError) -> bool:
    """Whether another endpoint may do better: this one cannot be reached, is stopping, behind, or not the active one."""
    return error.reason in _MOVES


def is_elsewhere(error: UprError) -> bool:
    """Whether a server did nothing because another one is to do it: it is not the active one, or is behind."""
    return error.retriable and error.reason in _REFUSED


def was_not_done(error: grpc.RpcError) -> bool:
    """Whether a failed call did nothing for sure, so that it may be made elsewhere without doing it twice.

    It cannot have reached a server, or was refused by one that is not the active one, or behind.
    """
    if is_elsewhere(call_error(error)):
        return True
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if code is None or details is None or code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return str(details() or "").startswith(_NEVER_SENT)


_LOST_CODES: Final = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
)
"""Status codes of gRPC itself, besides UNAVAILABLE, for a connection that breaks during a call."""


def took_too_long(error: UprError) -> bool:
    """Return whether a call ended because no answer came in its time, and not for what was answered, or as nobody was there."""
    code = getattr(error.__cause__, "code", lambda: None)()
    return code is grpc.StatusCode.DEADLINE_EXCEEDED


def call_error(error: grpc.RpcError) -> UprError:
    """Return the domain error behind a failed call; a broken connection is retriable whatever code gRPC gave it."""
    domain = error_from_call(error)
    if type(domain) is not UprError or getattr(error, "code", lambda: None)() not in _LOST_CODES:
        return domain
    trailing: Any = error.trailing_metadata()
    if any(key == PROBLEM_KEY for key, _ in trailing or ()):
        return domain
    return UnavailableError(domain.message, hint="the connection was lost or the server failed")
