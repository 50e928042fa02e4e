"""The server's log on stderr: text for people, JSON lines for machines."""

import json
import logging
import sys

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _PLAIN}


class TextFormatter(logging.Formatter):
    """One line: time, level, event, then name=value."""

    def format(self, record: logging.LogRecord) -> str:
        words = [
            self.formatTime(record),
            record.levelname.lower(),
            record.getMessage(),
            *(f"{key}={value}" for key, value in _extra(record).items()),
        ]
        text = " ".join(words)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure(log_format: str) -> None:
    """Send the log to stderr, as ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
