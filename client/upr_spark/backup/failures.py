"""Errors of tasks, as the text that a pipe or a JVM carries, and back again."""

import traceback
from typing import Any, Final

from upr_protocol.errors import UprError
from upr_spark.backup import errors as _all_known  # noqa: F401
from upr_spark.errors import FoundError, UprSparkError, find_error

_OS: Final = "OS_ERROR"
_INTERNAL: Final = "INTERNAL_ERROR"


class TaskError(Exception):
    """A task failed by a mistake of this program; its trace is a note of the exception."""


def to_text(error: BaseException) -> str:
    """Return an error as one line ``UPR_<REASON> {json}``, which ``from_text`` reads."""
    if isinstance(error, UprError):
        details: dict[str, Any] = {"class": type(error).__name__}
        reason, message, hint = error.reason, error.message, error.hint
        return str(
            UprSparkError(reason, message, hint=hint, retriable=error.retriable, details=details)
        )
    if isinstance(error, OSError) and error.errno is not None:
        name = None if error.filename is None else str(error.filename)
        details = {"errno": error.errno, "filename": name}
        return str(UprSparkError(_OS, error.strerror or str(error), details=details))
    trace = "".join(traceback.format_exception(error))
    return str(
        UprSparkError(_INTERNAL, f"{type(error).__name__}: {error}", details={"trace": trace})
    )


def from_text(text: object) -> Exception | None:
    """Return the error that stands anywhere in a text, of the class that it had; None when there is none."""
    found = find_error(text)
    if found is None:
        return None
    if found.code == _OS:
        document = found.document
        return OSError(document["errno"], found.message, document["filename"])
    if found.code == _INTERNAL:
        failed = TaskError(found.message)
        failed.add_note(str(found.document.get("trace", "")))
        return failed
    return _upr_error(found)


def _upr_error(found: FoundError) -> UprError:
    known: list[type[UprError]] = [UprError]
    for one in known:
        known += one.__subclasses__()
    wanted = found.document.get("class")
    kind = next((one for one in known if one.__name__ == wanted), UprError)
    return kind(found.message, hint=found.hint, reason=found.code, retriable=found.retriable)
