"""Named places where a test may delay, fail or kill the process. Off unless the environment arms one.

``UPR_FAILPOINTS="name=action;name=action"``, with the actions

* ``kill`` or ``kill:N``: SIGKILL the process at the first, or the N-th, time the place is reached;
* ``hold:PATH``: block the calling thread for as long as the file PATH exists, and write the name there;
* ``error:CODE`` or ``error:CODE:N``: raise OSError with that errno name, always or only at the N-th time;
* ``error-while:CODE:PATH``: the same for as long as the file PATH exists.

``name=number:PATH``, for a name of NUMBERS, has the number in the file PATH added there, 0 without the file.

Another name than those of NAMES and NUMBERS is refused, so that a test cannot arm a place that no longer exists.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable

NAMES = frozenset(
    {
        "bucket.before_create",
        "bucket.after_create",
        "bucket.before_drop",
        "bucket.after_drop",
        "journal.before_append",
        "journal.half_append",
        "journal.before_sync",
        "journal.after_sync",
        "journal.before_rotate",
        "journal.before_drop",
        "flush.before_commit",
        "flush.after_commit",
        "flush.between_slices",
        "merge.before_commit",
        "merge.after_commit",
        "recovery.before_aside",
        "recovery.before_records",
        "recovery.after_records",
        "recovery.before_truncate",
        "restore.before_forget",
        "restore.before_records",
        "restore.after_records",
        "accept.before_commit",
        "accept.after_commit",
        "cuts.before_commit",
        "cuts.after_commit",
        "positions.before_commit",
        "proof.before_clear",
        "proof.after_clear",
        "promote.after_claim",
        "promote.after_promises",
        "promote.after_row",
        "promote.before_partitions",
        "promote.after_partitions",
        "shutdown.before_flush",
        "shutdown.before_proof",
        "shutdown.after_proof",
    }
)

NUMBERS = frozenset({"clock.day"})
"""Seconds by which the day's clock is ahead."""

_HOLD_POLL_SECONDS = 0.005
_armed: dict[str, Callable[[], None]] = {}
_numbers: dict[str, str] = {}


def _action(name: str, spec: str) -> Callable[[], None]:
    kind, _, rest = spec.partition(":")
    hits = 0
    if kind == "hold":
        path = rest

        def hold() -> None:
            with contextlib.suppress(FileNotFoundError), open(path, "r+") as file:
                file.write(name)
            while os.path.exists(path):
                time.sleep(_HOLD_POLL_SECONDS)

        return hold
    if kind == "kill":
        nth = int(rest or 1)

        def kill() -> None:
            nonlocal hits
            hits += 1
            if hits == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        return kill
    if kind in ("error", "error-while"):
        code_name, _, when = rest.partition(":")
        code = getattr(errno, code_name)

        def fail() -> None:
            nonlocal hits
            hits += 1
            fails = not when or hits == int(when) if kind == "error" else os.path.exists(when)
            if fails:
                raise OSError(code, f"{os.strerror(code)} (failpoint {name})")

        return fail
    raise ValueError(f"failpoint {name}: unknown action {spec!r}")


def arm(specification: str) -> None:
    """Arm what ``UPR_FAILPOINTS`` would; raises ValueError for an unknown name or action."""
    for part in filter(None, specification.split(";")):
        name, _, spec = part.partition("=")
        if name in NUMBERS and spec.startswith("number:"):
            _numbers[name] = spec.removeprefix("number:")
            continue
        if name not in NAMES:
            raise ValueError(f"unknown failpoint {name!r}; known: {', '.join(sorted(NAMES))}")
        _armed[name] = _action(name, spec)


def is_armed(name: str) -> bool:
    """Return whether a test wants something at a place, for those that take time to come by."""
    return name in _armed


def any_armed(beginning: str) -> bool:
    """Return whether a test wants something at a place whose name begins so."""
    return any(name.startswith(beginning) for name in _armed)


def hit(name: str) -> None:
    """Do what is armed at this place; nothing when nothing is."""
    if _armed:
        action = _armed.get(name)
        if action is not None:
            action()


def number(name: str) -> int:
    """Return the number that is armed at this place; 0 when none is."""
    path = _numbers.get(name)
    if path is None or not os.path.exists(path):
        return 0
    with open(path) as file:
        return int(file.read() or 0)


arm(os.environ.get("UPR_FAILPOINTS", ""))
