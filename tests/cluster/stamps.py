"""Stamps of a server's answers to writes: made in its process, for tests that compare the answers of several."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STAMP = np.dtype([("at", "<f8"), ("epoch", "<u8")])
"""Record of an answer, 16 bytes: the boot-time clock, which all processes of a machine share, and the epoch of the owner."""


def boot_seconds() -> float:
    """Return the time of the clock that the stamps are of."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def stamp_answers(path: str) -> None:
    """Append to a file when answers of applied writes are handed over to gRPC."""
    from upr.service import key_value

    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    due = key_value._WriteCall._due

    def stamped(call: Any) -> Any:
        results = due(call)
        now = boot_seconds()
        if any(not result.HasField("refused") for result in results):
            # The one that it promised to another may be higher by now.
            epoch = int(call._host.bucket.partitions.served_epoch.max())
            os.write(file, np.array((now, epoch), STAMP).tobytes())
        return results

    setattr(key_value._WriteCall, "_due", stamped)  # noqa: B010 (mypy knows the method by its type)


def stamps_of(path: Path) -> npt.NDArray[Any]:
    """Return what a server has stamped so far, in order."""
    return np.fromfile(path, STAMP)


def check_one_owner(stamps: Sequence[npt.NDArray[Any]]) -> None:
    """Raise AssertionError unless one server answered in each epoch, and none after the first answer of a newer one.

    Args:
        stamps: those of each server.
    """
    whose = np.repeat(np.arange(len(stamps)), [len(one) for one in stamps])
    told = np.concatenate(stamps)
    order = np.argsort(told["at"], kind="stable")
    told, whose = told[order], whose[order]
    late = np.flatnonzero(np.maximum.accumulate(told["epoch"]) > told["epoch"])
    assert not late.size, (
        f"{len(late)} answers of an older owner behind a newer one's: {told[late[:3]]}"
    )
    for epoch in np.unique(told["epoch"]):
        owners = np.unique(whose[told["epoch"] == epoch])
        assert len(owners) == 1, f"servers {owners} answered in epoch {epoch}"
