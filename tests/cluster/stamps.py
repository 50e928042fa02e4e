"""Stamps of a server's answers to writes: made in its process, for tests that compare the answers of several."""

import os
import struct
import time
from typing import Any

from upr.service import key_value


def stamp_answers(path: str) -> None:
    """Append to a file when answers of applied writes are handed over to gRPC: 8 bytes each, a float, of the boot-time clock."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    due = key_value._WriteCall._due

    def stamped(call: Any) -> Any:
        results = due(call)
        if not all(result.HasField("refused") for result in results):
            os.write(file, struct.pack("<d", time.clock_gettime(time.CLOCK_BOOTTIME)))
        return results

    setattr(key_value._WriteCall, "_due", stamped)  # noqa: B010 (mypy knows the method by its type)
