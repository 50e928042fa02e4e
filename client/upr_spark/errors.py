"""Errors that cross Spark: only their text survives the way through the JVM, so the text carries everything.

The first line is ``UPR_<CODE> {json}``; the JSON has at least message, hint and retriable.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Self

from upr_protocol.errors import UprError

_TOKEN: Final = re.compile(r"UPR_([A-Z][A-Z0-9_]*) (?=\{)")


class UprSparkError(UprError):
    """An error of the data source; its text begins with ``UPR_<CODE>`` and one JSON object in the same line.

    Args:
        code: upper-case token, without ``UPR_``.
        message: what happened, in one line.
        hint: what the reader can do about it.
        retriable: whether the same may succeed later without anybody changing anything.
        details: further values for the JSON object, which must be JSON themselves; never secrets.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "",
        retriable: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, reason=code, retriable=retriable)
        self.code = code
        self.details = dict(details or {})

    def __str__(self) -> str:
        document = {
            "message": self.message,
            "hint": self.hint,
            "retriable": self.retriable,
            **self.details,
        }
        return f"UPR_{self.code} {json.dumps(document)}"

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(
            UprSparkError, hint=self.hint, retriable=self.retriable, details=self.details
        )
        return made, (self.code, self.message)

    @classmethod
    def of(cls, error: UprError) -> Self:
        """Return an error of the SDK or the server as one of these; its reason becomes the code."""
        if isinstance(error, cls):
            return error
        return cls(error.reason, error.message, hint=error.hint, retriable=error.retriable)


def bad_option(name: str, value: object, expected: str, hint: str = "") -> UprSparkError:
    """Return the refusal of an option's value.

    Args:
        value: shown in the message; None where it may be a secret.
    """
    shown = "" if value is None else f" {str(value)[:200]!r}"
    return UprSparkError(
        "BAD_OPTION",
        f"option {name}{shown}: {expected}",
        hint=hint,
        details={"option": name},
    )


def bad_schema(column: str, message: str, hint: str) -> UprSparkError:
    """Return the refusal of a schema because of one of its columns."""
    return UprSparkError("BAD_SCHEMA", message, hint=hint, details={"column": column})


def find_error(text: object) -> UprSparkError | None:
    """Return the first ``UPR_<CODE> {json}`` in a text, as Spark wraps it in traces and messages; None if none is there.

    Args:
        text: a text, or an exception, of which the text is taken.
    """
    words = str(text)
    decoder = json.JSONDecoder()
    for match in _TOKEN.finditer(words):
        try:
            document, _ = decoder.raw_decode(words, match.end())
        except ValueError:
            continue
        if isinstance(document, dict):
            return UprSparkError(
                match.group(1),
                str(document.pop("message", "")),
                hint=str(document.pop("hint", "")),
                retriable=document.pop("retriable", False) is True,
                details=document,
            )
    return None
