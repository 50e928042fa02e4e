"""The server's log on stderr: text for people, JSON lines for machines.

An event is a constant text. Values from outside are fields, quoted where they could pass for another field or line.
While the server serves, an event is written at most EVENTS_A_SECOND times a second, because clients can cause some of
them at will.
"""

import json
import logging
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import datetime

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

VALUE_CHARACTERS = 1000
"""Most characters of a value; a longer one is truncated."""
EVENTS_A_SECOND = 10
"""Lines of one event in a second; a later line gives the number of suppressed ones."""
_SUPPRESSED = "suppressed"


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _PLAIN}


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS else text[:VALUE_CHARACTERS] + "..."


def quoted(value: object) -> str:
    """Return a value as one word; quoted and escaped as in JSON if necessary."""
    text = _cut(str(value))
    if text and text.isprintable() and not any(c in ' ="\\' for c in text):
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else json.dumps(character)[1:-1]


class TextFormatter(logging.Formatter):
    """One line: time, level, event, then name=value; a trace follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        words = [
            self.formatTime(record),
            record.levelname.lower(),
            record.getMessage(),
            *(f"{key}={quoted(value)}" for key, value in _extra(record).items()),
        ]
        text = " ".join(words)
        if not record.exc_info:
            return text
        trace = self.formatException(record.exc_info)
        return f"{text}\n{textwrap.indent(trace, '  ', lambda line: True)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; its time is with the zone, because who collects lines takes one without for UTC."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone()
        fields: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **{
                key: _cut(value) if isinstance(value, str) else value
                for key, value in _extra(record).items()
            },
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=lambda value: _cut(str(value)))


class EventLimit(logging.Filter):
    """Limit of EVENTS_A_SECOND records of each event in a second.

    Attributes:
        on: off before the server serves, so that a start is logged completely.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.on = False
        self._clock = clock
        self._lock = threading.Lock()
        self._passed: dict[tuple[str, str], int] = {}
        self._suppressed: dict[tuple[str, str], tuple[int, int]] = {}
        self._second = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; reports of suppressed ones are always written."""
        if not self.on or hasattr(record, _SUPPRESSED):
            return True
        event = record.name, str(record.msg)
        with self._lock:
            if self._clock() - self._second >= 1:
                self._second = self._clock()
                self._passed.clear()
            passed = self._passed[event] = self._passed.get(event, 0) + 1
            if passed <= EVENTS_A_SECOND:
                return True
            self._suppressed[event] = (record.levelno, self._suppressed.get(event, (0, 0))[1] + 1)
        return False

    def tell_suppressed(self) -> None:
        """Log how many records of each event were suppressed since the last call. Call it every few seconds."""
        with self._lock:
            told, self._suppressed = self._suppressed, {}
        for (name, event), (level, count) in told.items():
            logging.getLogger(name).log(level, event, extra={_SUPPRESSED: count})


def configure(log_format: str) -> EventLimit:
    """Send the log to stderr, as ``text`` or ``json``; without a choice as text on a terminal. Return what limits it."""
    log_format = log_format or ("text" if sys.stderr.isatty() else "json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    limit = EventLimit()
    handler.addFilter(limit)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return limit
