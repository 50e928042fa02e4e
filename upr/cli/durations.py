"""Durations as people write them: ``90``, ``30s``, ``5m``, ``1h``, ``2d``."""

import math
from typing import TYPE_CHECKING, Any

import click

from upr_protocol.errors import InvalidArgumentError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # Generic at run time only from click 8.4 on.
    _ParamType = click.ParamType


def parse_duration(text: str) -> float:
    """Return seconds.

    Raises:
        InvalidArgumentError: it is not a positive, finite number with or without one of s, m, h, d.
    """
    stripped = text.strip()
    unit = stripped[-1:].lower()
    number = stripped[:-1] if unit in _UNITS else stripped
    try:
        seconds = float(number) * _UNITS.get(unit, 1)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(
            f"{text!r} is not a duration above 0", hint="for example 90, 30s, 5m, 1h or 2d"
        )
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that gives a whole number; in seconds if none does."""
    for unit, size in reversed(_UNITS.items()):
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds // size)}{unit}"
    return f"{seconds:g}s"


class _Duration(_ParamType):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the value, unless it is a default that is parsed already."""
        if not isinstance(value, str):
            return value
        try:
            return parse_duration(value)
        except InvalidArgumentError as error:
            self.fail(str(error), param, ctx)


DURATION = _Duration()
