"""Whether the rows that a task got are all of them.

When what feeds a task fails, Spark closes its half of the connection to the Python worker, and Arrow takes that for
the end of the rows: a writer sees fewer rows, and no error. The task is tried again, so nothing is lost; but rows that
were written at such an end would be applied twice, because the next attempt has others behind them.
"""

import select
import sys
from types import FrameType
from typing import Any, Final

from upr_spark.errors import UprSparkError

_CLOSED: Final[int] = getattr(select, "POLLRDHUP", 0)


def check_all_came() -> None:
    """Call it in a task of Spark, when there are no more rows. Elsewhere, and where it cannot be known, it does nothing.

    Raises:
        UprSparkError: UPR_INPUT_BROKE_OFF, Spark ended the rows because the task had failed.
    """
    frame: FrameType | None = sys._getframe()
    # The stream that the rows came from is nowhere to be had but in the function that runs the worker.
    while frame is not None:
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:
            if _was_closed(frame.f_locals["infile"]):
                raise UprSparkError(
                    "INPUT_BROKE_OFF",
                    "the rows of this task ended because what feeds it failed",
                    hint="the reason is in the other error of the same task; Spark runs it again",
                    retriable=True,
                )
            return
        frame = frame.f_back


def _was_closed(stream: Any) -> bool:
    """Whether the other side of a socket sends nothing more."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):
        return False
    if not _CLOSED:
        return False
    poll = select.poll()
    poll.register(descriptor, _CLOSED)
    return any(event & _CLOSED for _, event in poll.poll(0))
