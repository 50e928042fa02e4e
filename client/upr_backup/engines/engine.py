"""Engines: what reads the groups of a backup, what it tells meanwhile, and errors of tasks as text and back again."""

import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

# So that every class is known whose name a text may have.
from upr_backup import errors as _all_known  # noqa: F401
from upr_backup.task import Task, TaskResult
from upr_protocol.errors import UprError
from upr_spark.errors import UprSparkError, find_error

TICK_SECONDS: Final = 1.0
"""Longest silence of an engine."""


@dataclass(frozen=True, slots=True)
class Rows:
    """So many rows more were read; 0 is a sign of life."""

    rows: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A group was read, and its record is staged."""

    index: int
    result: TaskResult


class Engine(Protocol):
    """Reads groups with ``backup_group``."""

    @property
    def parallel(self) -> int:
        """About how many groups are read at a time."""

    def run(self, tasks: Sequence[Task]) -> Generator[Rows | Finished, None, None]:
        """Read groups, in any order.

        Yields about every second at least, so that the caller can do what is due meanwhile. When the iterator is closed,
        or ends with an error, no group is read any more by this machine.

        Raises:
            UprError: the first group that failed.
        """

    def close(self) -> None:
        """Give up what it holds; doing it twice is harmless."""


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
        return OSError(found.details["errno"], found.message, found.details["filename"])
    if found.code == _INTERNAL:
        failed = TaskError(found.message)
        failed.add_note(str(found.details.get("trace", "")))
        return failed
    return _upr_error(found)


def _upr_error(found: UprSparkError) -> UprError:
    known: list[type[UprError]] = [UprError]
    for one in known:
        known += one.__subclasses__()
    wanted = found.details.get("class")
    kind = next((one for one in known if one.__name__ == wanted), UprError)
    return kind(found.message, hint=found.hint, reason=found.code, retriable=found.retriable)
