"""The types of the command's arguments."""

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from upr_protocol.limits import KEY_BYTES_MAX, PARTITIONS

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # Generic at run time only from click 8.4 on.
    _ParamType = click.ParamType


_AGO = re.compile(r"(\d{1,9})\s*(s|m|h|d)\s+ago")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(\d{1,6})\s*(s|m|h|d)|0")
_PART = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


class PartitionSet(_ParamType):
    """``0-63,512``: partitions, ascending, each once."""

    name = "partitions"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text."""
        if not isinstance(value, str):
            return value
        chosen: set[int] = set()
        for part in value.split(","):
            found = _PART.fullmatch(part.strip())
            if found is None:
                self.fail(f"{part.strip()!r} is not a partition or a range; for example 0-63,512")
            low, high = int(found[1]), int(found[2] or found[1])
            if not low <= high < PARTITIONS:
                self.fail(f"{part.strip()} is not within 0 to {PARTITIONS - 1}")
            chosen.update(range(low, high + 1))
        return sorted(chosen)


class RestorePoint(_ParamType):
    """A backup's number, as int, or a time, as microseconds since the epoch in a one-element tuple."""

    name = "id|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text."""
        if not isinstance(value, str):
            return value
        text = value.strip()
        if text.isascii() and text.isdigit() and len(text) <= 10:
            return int(text)
        try:
            ago = _AGO.fullmatch(text)
            if ago is not None:
                moment = datetime.now(UTC) - timedelta(seconds=int(ago[1]) * _SECONDS[ago[2]])
            else:
                moment = datetime.fromisoformat(text)
            if moment.tzinfo is not None:
                moment = moment.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{text!r} is neither a backup's number nor a time; for example 12, 2026-05-01T12:00:00Z or '2h ago'"
            )
        if moment.tzinfo is None:
            self.fail(f"{text!r} says no offset from UTC; for example 2026-05-01T12:00:00Z")
        return (round(moment.timestamp() * 1e6),)


class Span(_ParamType):
    """``30d``: a span of time, as microseconds."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text."""
        if not isinstance(value, str):
            return value
        found = _SPAN.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is no span of time; for example 30d, 24h, 90m or 0")
        return int(found[1] or 0) * _SECONDS[found[2] or "s"] * 1_000_000


class KeyPrefix(_ParamType):
    """The beginning of keys, in UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return its bytes."""
        data = value.encode(errors="surrogateescape") if isinstance(value, str) else value
        if len(data) > KEY_BYTES_MAX:
            self.fail(f"it has {len(data)} bytes, the limit is {KEY_BYTES_MAX}")
        return data


class Address(_ParamType):
    """``HOST:PORT``."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the form."""
        host, colon, port = str(value).rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
            self.fail(f"{value!r} is not HOST:PORT; for example 127.0.0.1:7711")
        return value
