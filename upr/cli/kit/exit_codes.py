"""Exit statuses of the commands, and which error ends in which."""

from typing import Final

from upr_protocol.errors import UprError

OK: Final = 0
BAD_ANSWER: Final = 1
"""The question was answered, and the answer is bad: damage was found."""
USAGE: Final = 2
"""Usage, a missing extra, bad configuration, bad input. click's own status."""
NOT_FOUND: Final = 3
REFUSED: Final = 4
"""The server refused: state, storage, limits."""
UNREACHABLE: Final = 5
TIMED_OUT: Final = 6
INTERRUPTED: Final = 130

_BY_REASON: Final = {
    "INVALID_ARGUMENT": USAGE,
    "CORRUPT_BLOCK": BAD_ANSWER,
    "DATA_DAMAGED": BAD_ANSWER,
    "STORAGE_ERROR": BAD_ANSWER,
    "POSITION_DAMAGED": BAD_ANSWER,
    "POSITION_BUCKET": USAGE,
    "DATA_DIRECTORY": USAGE,
    "LISTEN": USAGE,
    "GIT": USAGE,
    "NOT_FOUND": NOT_FOUND,
    "BUCKET_NOT_FOUND": NOT_FOUND,
    "CUT_NOT_FOUND": NOT_FOUND,
    "CONSUMER_NOT_FOUND": NOT_FOUND,
    "UNAVAILABLE": UNREACHABLE,
    "UNKNOWN_OUTCOME": TIMED_OUT,
}


def exit_code_of(error: UprError) -> int:
    """Return the exit status that an error ends a command with."""
    # A deadline that passed is "unavailable" to a program, which may try again; a person wants to know
    # whether nobody was there or somebody was too slow.
    if error.reason == "UNAVAILABLE" and "DEADLINE_EXCEEDED" in error.message:
        return TIMED_OUT
    return _BY_REASON.get(error.reason, REFUSED)
