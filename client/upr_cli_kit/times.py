"""Times and sizes as people write them: durations and sizes of options, and points in time (RFC 3339, or how long ago)."""

from datetime import UTC, datetime, timedelta
from functools import partial

from upr_cli_kit.options import Parsed
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import (
    DURATION_SECONDS_MAX,
    QUOTA_BYTES_MAX,
    parse_duration,
    parse_size,
)


def duration(low: float = 0.0, high: float = DURATION_SECONDS_MAX, *, bare: bool = False) -> Parsed:
    """Return the type of an option that is a duration, in seconds; its arguments are those of ``parse_duration``."""
    return Parsed("duration", partial(parse_duration, low=low, high=high, bare=bare))


def size(low: int = 0, high: int = QUOTA_BYTES_MAX) -> Parsed:
    """Return the type of an option that is a size, in bytes, from low to high."""
    return Parsed("size", partial(parse_size, low=low, high=high))


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
