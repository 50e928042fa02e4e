"""Exit statuses of the commands, and which error ends in which; 10 to 12 are of ``upr-backup`` alone."""

import errno
from typing import Final

from upr_protocol.errors import UprError

OK: Final = 0
BAD_ANSWER: Final = 1
"""The question was answered, and the answer is bad: damage was found. Also an error of the program itself."""
USAGE: Final = 2
"""Usage, a missing extra, bad configuration, bad input. click's own status."""
NOT_FOUND: Final = 3
REFUSED: Final = 4
"""Refused by the server, for its state, storage or limits; or what is to be made is there already, wherever; or a person
was asked, and said no."""
UNREACHABLE: Final = 5
TIMED_OUT: Final = 6
WARNINGS: Final = 10
"""Committed, and there is something to know: the server had rolled back, or a dead partition was left out."""
DAMAGED: Final = 11
"""Data that a repository stores, or that was restored, is not what it should be."""
LOCKED: Final = 12
INTERRUPTED: Final = 130

_BY_REASON: Final = {
    "INVALID_ARGUMENT": USAGE,
    "CORRUPT_BLOCK": BAD_ANSWER,
    "DATA_DAMAGED": BAD_ANSWER,
    "STORAGE_ERROR": BAD_ANSWER,
    "POSITION_BUCKET": USAGE,
    "POSITION_BUSY": USAGE,
    "POSITION_DAMAGED": USAGE,
    "POSITION_STORE": USAGE,
    "DATA_DIRECTORY": USAGE,
    "LISTEN": USAGE,
    "GIT": USAGE,
    "MISSING_PACKAGE": USAGE,
    "IDENTITIES": USAGE,
    "FILE_UNUSABLE": USAGE,
    "CONTEXTS": USAGE,
    "NOT_FOUND": NOT_FOUND,
    "BUCKET_NOT_FOUND": NOT_FOUND,
    "CUT_NOT_FOUND": NOT_FOUND,
    "CONSUMER_NOT_FOUND": NOT_FOUND,
    "UNAVAILABLE": UNREACHABLE,
    "UNKNOWN_OUTCOME": TIMED_OUT,
    "REPOSITORY": USAGE,
    "REPOSITORY_DAMAGED": DAMAGED,
    "LOCKED": LOCKED,
    "EXPORT_FAILED": USAGE,
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


def exit_code_of(error: UprError | OSError) -> int:
    """Return the exit status that an error ends a command with."""
    if isinstance(error, OSError):
        if error.errno == errno.ETIMEDOUT:
            return TIMED_OUT
        if error.errno == errno.EEXIST:
            return REFUSED
        return UNREACHABLE if error.errno in _NOT_REACHED else USAGE
    # A deadline that passed is "unavailable" to a program, which may try again; a person wants to know
    # whether nobody was there or somebody was too slow.
    if error.reason == "UNAVAILABLE" and "DEADLINE_EXCEEDED" in error.message:
        return TIMED_OUT
    cause = error.__cause__
    if error.reason == "WRITE_FAILED" and isinstance(cause, UprError):
        return exit_code_of(cause)
    return _BY_REASON.get(error.reason, REFUSED)
