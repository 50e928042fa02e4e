"""Every exit status of ``upr-backup``, and which error ends in which.

0 to 6 and 130 mean what they mean for the other commands of the project.
"""

import errno
from typing import Final

from upr_protocol.errors import UprError

OK: Final = 0
INTERNAL: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
REFUSED: Final = 4
UNREACHABLE: Final = 5
TIMED_OUT: Final = 6
WARNINGS: Final = 10
"""Committed, and there is something to know: the server had rolled back, or a dead partition was left out."""
DAMAGED: Final = 11
"""What is stored, or what was restored, is not what it should be."""
LOCKED: Final = 12
INTERRUPTED: Final = 130

_BY_REASON: Final = {
    "INVALID_ARGUMENT": USAGE,
    "REPOSITORY": USAGE,
    "REPOSITORY_DAMAGED": DAMAGED,
    "POSITION_DAMAGED": DAMAGED,
    "NOT_FOUND": NOT_FOUND,
    "BUCKET_NOT_FOUND": NOT_FOUND,
    "LOCKED": LOCKED,
    "MISSING_PACKAGE": USAGE,
    "EXPORT_FAILED": USAGE,
    "UNAVAILABLE": UNREACHABLE,
    "UNKNOWN_OUTCOME": TIMED_OUT,
    "STORAGE_TIMED_OUT": TIMED_OUT,
    "STORAGE_REFUSED": USAGE,
}

_NOT_REACHED: Final = {
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    # Of a folder whose mount has lost its other end.
    errno.ENOTCONN,
    errno.ESTALE,
}


def exit_code_of_system(error: OSError) -> int:
    """Return the exit status that an error of the operating system ends the command with."""
    if error.errno == errno.ETIMEDOUT:
        return TIMED_OUT
    return UNREACHABLE if error.errno in _NOT_REACHED else USAGE


def exit_code_of(error: UprError) -> int:
    """Return the exit status that an error ends the command with."""
    if error.reason == "UNAVAILABLE" and "DEADLINE_EXCEEDED" in error.message:
        return TIMED_OUT
    cause = error.__cause__
    if error.reason == "WRITE_FAILED" and isinstance(cause, UprError):
        return exit_code_of(cause)
    return _BY_REASON.get(error.reason, REFUSED)
