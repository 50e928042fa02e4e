"""Times as people write them: durations (``90``, ``30s``, ``1h``), and points in time (RFC 3339, or how long ago)."""

import math
from datetime import UTC, datetime, timedelta

from upr_cli_kit.options import Parsed
from upr_protocol.errors import InvalidArgumentError

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def parse_duration(text: str) -> float:
    """Return seconds.

    Raises:
        InvalidArgumentError: it is not a positive, finite number with or without one of s, m, h, d.
    """
    stripped = text.strip()
    unit = stripped[-1:].lower()
    number = stripped[:-1] if unit in UNIT_SECONDS else stripped
    try:
        seconds = float(number) * UNIT_SECONDS.get(unit, 1)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(
            f"{text!r} is not a duration above 0", hint="for example 90, 30s, 5m, 1h or 2d"
        )
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that gives a whole number; in seconds if none does."""
    for unit, size in reversed(UNIT_SECONDS.items()):
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds // size)}{unit}"
    return f"{seconds:g}s"


DURATION = Parsed("duration", parse_duration)

_AGO = "ago"
_HINT = "for example 2026-05-01T12:00:00Z, or '2h ago'"


def parse_time(text: str, now: datetime) -> datetime:
    """Return the point in time that a text names, with its time zone.

    Args:
        text: ``2026-05-01T12:00:00Z`` or with another offset, or a duration and ``ago``.
        now: with a time zone.

    Raises:
        InvalidArgumentError: it is neither, it has no offset, or it lies before 1970.
    """
    stripped = text.strip()
    try:
        if stripped.lower().endswith(_AGO):
            moment = now - timedelta(seconds=parse_duration(stripped[: -len(_AGO)]))
        else:
            moment = datetime.fromisoformat(stripped)
        if moment.tzinfo is not None:
            # Some times at the ends of the calendar have no equal in UTC.
            moment.astimezone(UTC)
    except (ValueError, OverflowError, InvalidArgumentError):
        raise InvalidArgumentError(f"{text!r} is no time", hint=_HINT) from None
    if moment.tzinfo is None:
        raise InvalidArgumentError(f"{text!r} says no offset from UTC", hint=_HINT)
    if moment < datetime.fromtimestamp(0, UTC):
        raise InvalidArgumentError(f"{text!r} lies before 1970", hint=_HINT)
    return moment


def format_micros(micros: int) -> str | None:
    """Return microseconds since the epoch in RFC 3339, in UTC and whole seconds; None for 0."""
    if not micros:
        return None
    return datetime.fromtimestamp(micros / 1e6, UTC).isoformat(timespec="seconds")
