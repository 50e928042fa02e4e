"""Options and argument types that several commands share."""

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote

import click
from click.core import ParameterSource

from upr_cli_kit.contexts import CONTEXT_FIELDS, chosen
from upr_protocol.errors import InvalidArgumentError, UnavailableError, UprError
from upr_protocol.failover import check_seqno, parse_failover_id
from upr_protocol.limits import ADMIN_SOCKET, bounded_number, parse_partitions

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.endpoints import Login

_F = TypeVar("_F", bound=Callable[..., Any])

DEFAULT_TARGET = "127.0.0.1:7711"


class NamedPath(click.Path):
    """A path; an empty one, as of a shell variable that is not set, is refused and not "here"."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(path_type=Path, **rules)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("the path is empty; is a variable not set?", param, ctx)
        return super().convert(value, param, ctx)


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 host stands in brackets.

    Raises:
        InvalidArgumentError: it is not of that form, or the port is above 65535.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if (
        not colon
        or not host
        or not (port.isascii() and port.isdigit())
        or (":" in host) > bracketed
    ):
        raise InvalidArgumentError(f"{text!r} is not HOST:PORT", hint="for example 127.0.0.1:7711")
    return host[1:-1] if bracketed else host, bounded_number(port, "port", 65535)


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # Generic at run time only from click 8.4 on.
    _ParamType = click.ParamType


class Parsed(_ParamType):
    """An argument that a function parses; its InvalidArgumentError becomes an error of the usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the value, unless it is a default that is parsed already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidArgumentError as error:
            self.fail(str(error), param, ctx)


def _checked_address(text: str) -> str:
    split_address(text)
    return text


def _checked_target(text: str) -> str:
    for address in text.split(","):
        split_address(address.strip())
    return text


def _parse_seqno(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise InvalidArgumentError(f"seqno is {text!r}, it must be an integer") from None
    return check_seqno(number)


def _parse_seqnos(text: str) -> tuple[int, ...]:
    return tuple(_parse_seqno(part.strip()) for part in text.split(",") if part.strip())


PARTITION_SET = Parsed("partitions", parse_partitions)
ADDRESS = Parsed("host:port", _checked_address)
TARGET = Parsed("host:port", _checked_target)
"""One or several addresses of a server, with commas between."""
SEQNO = Parsed("seqno", _parse_seqno)
SEQNOS = Parsed("seqnos", _parse_seqnos)
FAILOVER_ID = Parsed("id", parse_failover_id)


def _one_list(
    context: click.Context, parameter: click.Parameter, sets: Iterable[Iterable[int]]
) -> list[int] | None:
    """Return the partitions of several arguments, ascending, each once; None when none was named."""
    return sorted(set().union(*sets)) or None


partitions_argument = functools.partial(
    click.argument, "partitions", nargs=-1, type=PARTITION_SET, callback=_one_list
)
partitions_option = click.option(
    "--partitions", type=PARTITION_SET, help="Which, as 5 or 0-63,512. [default: all]"
)
_LOGIN = "upr.login"
FILE = NamedPath(dir_okay=False)
_CONTEXT_OPTION = click.option(
    "--context", envvar="UPR_CONTEXT", help="Instead of --target: see 'upr-admin context'."
)
_LOGIN_OPTIONS = (
    click.option(
        "--tls", is_flag=True, envvar="UPR_TLS", help="Encrypt, and trust the usual authorities."
    ),
    click.option(
        "--tls-ca", type=FILE, envvar="UPR_TLS_CA", help="PEM file of the authorities to trust."
    ),
    click.option("--tls-cert", type=FILE, envvar="UPR_TLS_CERT", help="PEM file to be known by."),
    click.option("--tls-key", type=FILE, envvar="UPR_TLS_KEY", help="PEM file of its key."),
    click.option(
        "--token-file",
        type=FILE,
        envvar="UPR_TOKEN_FILE",
        help="File of the token; UPR_TOKEN in the environment is the token itself.",
    ),
)


def _with_login(function: _F, *more: Callable[[Any], Any], current: bool) -> _F:
    """Add options, --context, and those of TLS and the token, for ``login`` and ``open_client``.

    Args:
        more: options that stand before the others.
        current: whether the current context counts where neither a target nor a context is given.
    """

    @functools.wraps(function)
    def command(
        *arguments: Any, context: str | None, data: Path | None = None, **options: Any
    ) -> Any:
        source = click.get_current_context().get_parameter_source
        has_target = "target" in options
        given = {name: options.pop(name, None) for name in CONTEXT_FIELDS}
        typed = {
            name
            for name in (*given, "data", "context")
            if source(name) is ParameterSource.COMMANDLINE
        }
        if typed & {"target", "data", "context"}:
            # What is typed counts, and not what the environment says instead of it.
            data = data if "data" in typed else None
            context = context if "context" in typed else None
        is_given = source("target") is not ParameterSource.DEFAULT
        token = os.environ.get("UPR_TOKEN")
        if data is not None:
            if "target" in typed or context or (is_given and "data" not in typed):
                raise click.UsageError("--data goes without --target and --context")
            given = {**dict.fromkeys(given), "tls": False, "target": _admin_socket(data)}
            token = None
        elif context and "target" in typed:
            raise click.UsageError("--context has a target; give one of the two")
        elif (context or (current and not is_given)) and (found := chosen(context)):
            # Of the environment nothing is added: a token is for the server that it was given for.
            given = {name: given[name] if name in typed else found.get(name) for name in given}
            token = None
        target = given.pop("target")
        if has_target:
            options["target"] = target
        from upr_client.endpoints import Login

        files = (given["tls_ca"], given["tls_cert"], given["tls_key"])
        login = Login.of(bool(given["tls"]), *files, given["token_file"] or token or None)
        click.get_current_context().meta[_LOGIN] = login
        return function(*arguments, **options)

    added = (*more, _CONTEXT_OPTION, *_LOGIN_OPTIONS)
    return cast("_F", functools.reduce(lambda f, add: add(f), reversed(added), command))


def login_options(function: _F) -> _F:
    """Add --context and the options of TLS and the token.

    A context counts where it is named; its target then too, for a command with --target on which none is typed.
    """
    return _with_login(function, current=False)


def required_target(target: str | None) -> str:
    """Return the target that was given, or that of a context; a usage error for none."""
    if target is None:
        hint = "or --context"
        raise click.MissingParameter(hint, param_hint="'--target'", param_type="option")
    return target


def login() -> "Login":
    found: Login = click.get_current_context().meta[_LOGIN]
    return found


def open_client(target: str, **options: Any) -> "Client":
    """Return a client with the credentials of the command that runs."""
    from upr_client import Client

    return Client(target, **login().options, **options)


def check_of_target(address: str, target: str, what: str, hint: str) -> None:
    """Raise where a server names an address that ``target`` does not, and credentials would go there.

    Args:
        what: who is said to be there.
    """
    from upr_client.endpoints import endpoints_of

    if login().is_secret and address not in endpoints_of(target):
        raise UprError(
            f"{what} is said to be {address}, which --target does not name; credentials go nowhere else",
            reason="NOT_OF_TARGET",
            hint=hint,
        )


def target_option(function: _F) -> _F:
    """Add --target and --data, --context and the options of TLS and the token."""
    target = click.option(
        "--target",
        type=TARGET,
        default=DEFAULT_TARGET,
        show_default=True,
        envvar="UPR_TARGET",
        show_envvar=True,
        help="HOST:PORT of the server.",
    )
    data = click.option(
        "--data",
        type=NamedPath(),
        envvar="UPR_DATA",
        help="Instead of --target: the data directory of a server here, whose owner may do everything.",
    )
    return _with_login(function, target, data, current=True)


def _admin_socket(data: Path) -> str:
    """Return the address of the admin socket of the server of a data directory."""
    path = (data / ADMIN_SOCKET).absolute()
    if not path.exists():
        raise UnavailableError(
            f"there is no admin socket {path}",
            hint="is the server of this data directory running, and does its log speak of the socket?",
        )
    return f"unix:{quote(str(path))}"


_bucket_option = click.option(
    "--bucket", default="default", show_default=True, help="The bucket's name."
)


def server_options(function: _F) -> _F:
    return target_option(_bucket_option(function))


def client_option(function: _F) -> _F:
    """Add --target, and call the command with a ``client`` of that server instead, which is closed behind it."""

    @functools.wraps(function)
    def command(*arguments: Any, target: str, **options: Any) -> Any:
        with open_client(target) as client:
            return function(*arguments, client=client, **options)

    return cast("_F", target_option(command))


def client_options(function: _F) -> _F:
    """As ``client_option``, and add --bucket."""
    return client_option(_bucket_option(function))
