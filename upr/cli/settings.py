"""Settings of ``upr-server`` as people give them: on the command line, in the environment, in a TOML file.

The command line counts before the environment, that before the file, and that before the defaults. Names are those of the
options: ``--tail-bytes``, ``UPR_SERVER_TAIL_BYTES``, and ``tail-bytes`` in the file. Unknown names are refused.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click
from click.core import ParameterSource

from upr.config import OPTIONS, Option, ServerConfig, is_every_address
from upr_cli_kit.options import ADDRESS, FILE, TARGET, NamedPath, Parsed, split_address
from upr_cli_kit.times import duration, size
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import (
    DURATION_SECONDS_MAX,
    QUOTA_BYTES_MAX,
    format_duration,
    format_size,
)

_F = TypeVar("_F", bound=Callable[..., Any])

PREFIX: Final = "UPR_SERVER"
"""Beginning of the names of environment variables."""
# Kubernetes sets them in every container for a service whose name begins with upr-server.
_OF_KUBERNETES: Final = re.compile(rf"{PREFIX}_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
_METAVARS: Final = {
    "address": "HOST:PORT",
    "addresses": "HOST:PORT[,...]",
    "reached": "HOST:PORT",
    "cluster": "etcd://HOST:PORT[,...]/NAME",
}
_DEFAULTS: Final = {one.name: one.default for one in fields(ServerConfig)}


def _checked_cluster(text: str) -> str:
    # It needs numpy, which --help should not load.
    from upr.cluster.registry import Place

    Place.parse(text)
    return text


def _checked_reached(text: str) -> str:
    """Return an address that others are told, which these can call."""
    _, port = split_address(text)
    if not port or is_every_address(text):
        raise InvalidArgumentError(
            f"address is {text}; must be one of this host, and a port from 1 to 65535",
            hint="other servers and clients are told it, and call it",
        )
    return text


def _type_of(name: str, option: Option) -> Any:
    """Return what parses the value of an option that is no flag."""
    low, high = option.low, option.high
    if option.kind == "duration":
        # A number alone is a duration only where the name has the unit.
        return duration(low, high or DURATION_SECONDS_MAX, bare=name.endswith("-seconds"))
    if option.kind == "size":
        return size(int(low), int(high or QUOTA_BYTES_MAX))
    if option.kind == "count":
        return click.IntRange(int(low), None if high is None else int(high))
    if "|" in option.kind:
        return click.Choice(option.kind.split("|"))
    kinds = {"address": ADDRESS, "addresses": TARGET, "directory": NamedPath(), "file": FILE}
    kinds["cluster"] = Parsed("cluster", _checked_cluster)
    kinds["reached"] = Parsed("host:port", _checked_reached)
    return kinds[option.kind]


def _text_of(option: Option, value: object) -> str:
    """Return a value as it is written on the command line; empty for none."""
    if value is None or value == ():
        return ""
    if option.kind == "duration":
        return format_duration(cast("float", value))
    if option.kind == "size":
        return format_size(cast("int", value))
    return ",".join(value) if isinstance(value, tuple) else str(value)


def server_options(function: _F) -> _F:
    """Add all options of the server, and --config."""
    added = []
    for name, (field, option) in OPTIONS.items():
        if option.kind == "flag":
            added.append(click.option(f"--{name}", is_flag=True, help=option.words))
            continue
        text = "" if option.otherwise else _text_of(option, _DEFAULTS[field])
        # A default of None is a value to click, and what is required would never be missed.
        default: dict[str, Any] = {"default": text} if text else {}
        added.append(
            click.option(
                f"--{name}",
                type=_type_of(name, option),
                **default,
                required=field == "data",
                metavar=_METAVARS.get(option.kind),
                show_default=field != "data" and (option.otherwise or True),
                help=option.words,
            )
        )
    config = click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file of these settings, by the names of the options.",
    )
    return reduce(lambda made, add: add(made), [*reversed(added), config], function)


def _unknown(what: str, name: str, names: Iterable[str], more: str = "") -> click.UsageError:
    near = difflib.get_close_matches(name, list(names), 1, cutoff=0.8)
    hint = f"is {near[0]} meant?" if near else "'upr-server --help' lists them"
    return click.UsageError(f"{what} {name} is unknown; {more}{hint}")


def _read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Take the settings of the file for defaults. Raise UsageError for a name or a value that cannot be."""
    known = [f"{PREFIX}_{(one.name or '').upper()}" for one in ctx.command.params]
    for variable in sorted(name for name in os.environ if name.startswith(f"{PREFIX}_")):
        if variable not in known and not _OF_KUBERNETES.fullmatch(variable):
            more = "unset it if it is another program's; "
            raise _unknown("the environment variable", variable, known, more)
        name = variable.removeprefix(f"{PREFIX}_").lower().replace("_", "-")
        if name not in OPTIONS or not os.environ[variable]:
            continue
        option = OPTIONS[name][1]
        if option.once or option.kind != "flag":
            # click would not say where it comes from.
            _checked(variable, name, os.environ[variable])
    if path is None:
        return
    try:
        # TOML has no byte order mark, but editors write one.
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    ctx.obj = path
    ctx.default_map = {}
    for name, value in found.items():
        if name not in OPTIONS:
            raise _unknown(f"{path}: the setting", name, OPTIONS)
        # Templates write nothing for none.
        if value not in ("", []):
            ctx.default_map[name.replace("-", "_")] = _checked(str(path), name, value)


def _checked(where: str, name: str, value: object) -> object:
    """Return a value of the file or the environment as the command line would give it."""
    _, option = OPTIONS[name]
    if option.once:
        raise click.UsageError(
            f"{where}: {name} is for one start; give --{name} on the command line"
        )
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise click.UsageError(f"{where}: {name} is {value!r}; must be true or false")
        return value
    if option.kind == "addresses" and isinstance(value, list):
        value = ",".join(map(str, value))
    numbers = option.kind in ("count", "duration", "size")
    if isinstance(value, bool) or not isinstance(value, str | int | float if numbers else str):
        what = "a text or a number" if numbers else "a text, in quotes"
        raise click.UsageError(f"{where}: {name} is {value!r}; must be {what}")
    text = str(value)
    try:
        _type_of(name, option).convert(text, None, None)
    except click.BadParameter as error:
        raise click.UsageError(f"{where}: {name}: {error.message}") from None
    except ValueError:
        raise click.UsageError(f"{where}: {name} is {text!r}; must be without null bytes") from None
    return text


def config_of(values: dict[str, Any]) -> ServerConfig:
    """Return the settings of a command's parameters, by the names that click gives them."""
    given: dict[str, Any] = {}
    for name, (field, option) in OPTIONS.items():
        value = values[name.replace("-", "_")]
        if value is not None:
            many = option.kind == "addresses"
            given[field] = tuple(map(str.strip, value.split(","))) if many else value
    return ServerConfig(**given)


def config_lines(ctx: click.Context, config: ServerConfig) -> Iterator[str]:
    """Yield all settings as a file that ``--config`` takes, each with its origin."""
    for name, (field, option) in OPTIONS.items():
        parameter = name.replace("-", "_")
        origin = {
            ParameterSource.COMMANDLINE: f"--{name}",
            ParameterSource.ENVIRONMENT: f"{PREFIX}_{parameter.upper()}",
            ParameterSource.DEFAULT_MAP: str(ctx.obj),
        }.get(ctx.get_parameter_source(parameter) or ParameterSource.DEFAULT, "default")
        value = getattr(config, field)
        if option.once:
            yield f"# {name}: {'given, for this start alone' if value else 'none'}"
        elif option.kind == "flag":
            yield f"{name} = {str(value).lower()}  # {origin}"
        elif text := _text_of(option, value):
            # JSON's strings are TOML's, but for what is not ASCII.
            yield f"{name} = {json.dumps(text, ensure_ascii=False)}  # {origin}"
        else:
            yield f"# {name}: {option.otherwise or 'none'}"
