"""Options as Spark hands them over: names in lower case, values as text. One table says what there is."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from upr_protocol.errors import UprError
from upr_spark.errors import bad_option

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES: Final = {
    "k": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
}
SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark adds or takes for itself; no data source minds them."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Args:
        name: as it is written in documents; Spark takes it in any case.
        default: the text that stands for it where it is not given; None for none.
        used: where it counts: "batch", "stream", "write", with blanks in between.
        words: what it does.
        parse: takes the text and returns the value; raises ValueError with what is expected.
        secret: whether the value may not be shown.
    """

    name: str
    default: str | None
    used: str
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
            hint = (renamed or {}).get(name.lower(), f"known are {', '.join(names)}")
            raise bad_option(name, None, "there is no option of this name here", hint)


def text(value: str) -> str:
    """Return the text, which must not be empty."""
    if not value.strip():
        raise ValueError("it must not be empty")
    return value.strip()


def flag(value: str) -> bool:
    """Return true or false."""
    words = value.strip().lower()
    if words not in ("true", "false"):
        raise ValueError("it must be true or false")
    return words == "true"


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser that takes one of some words, in any case."""

    def parse(value: str) -> str:
        for choice in choices:
            if value.strip().lower() == choice.lower():
                return choice
        raise ValueError(f"it must be one of {', '.join(choices)}")

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from low to high."""

    def parse(value: str) -> int:
        words = value.strip()
        number = int(words[:20]) if words.isascii() and words.isdigit() else -1
        if not low <= number <= high:
            raise ValueError(f"it must be a whole number from {low} to {high}")
        return number

    return parse


def size(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of bytes, as 4194304, 4m or 4MiB, from low to high bytes."""

    def parse(value: str) -> int:
        words = value.strip().lower()
        digits = words.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = words[len(digits) :].strip()
        factor = 1 if not unit else _SIZES.get(unit, 0)
        number = int(digits[:20]) * factor if digits.isascii() and digits.isdigit() else 0
        if not low <= number <= high or not factor:
            raise ValueError(
                f"it must be {low} to {high} bytes, as a whole number with or without k, m, g behind it"
            )
        return number

    return parse


def duration(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of seconds, as 90, 100ms, 30s, 5m, 1h or 2d, from low to high seconds."""

    def parse(value: str) -> float:
        words = value.strip().lower()
        digits = words.rstrip("abcdefghijklmnopqrstuvwxyz ")
        try:
            seconds = float(digits) * _UNITS.get(words[len(digits) :].strip() or "s", math.nan)
        except ValueError:
            seconds = math.nan
        if not low <= seconds <= high:
            raise ValueError(
                f"it must be {low:g} to {high:g} seconds, as in 90, 100ms, 30s, 5m, 1h or 2d"
            )
        return seconds

    return parse
