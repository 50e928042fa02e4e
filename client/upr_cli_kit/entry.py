"""Start of a console script.

Imports nothing outside the standard library before it knows that the extra is installed, so that a plain
``pip install upr-stream`` answers with the extra's name and not with a traceback.
"""

import _thread
import atexit
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

_INTERRUPT_AGAIN_SECONDS: Final = 0.05


def _open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed, before a file or a connection gets their number.

    Reading stdin and writing to stdout fail then, as they should, and what goes to stderr is lost.
    """
    for number, name, access, mode in (
        (0, "stdin", os.O_WRONLY, "r"),
        (1, "stdout", os.O_RDONLY, "w"),
        (2, "stderr", os.O_RDWR, "w"),
    ):
        if getattr(sys, name) is None:
            os.open(os.devnull, access)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _lose_no_interrupt() -> None:
    """Repeat a Ctrl-C that came in the middle of a callback of the interpreter, which nothing can be raised out of."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(_INTERRUPT_AGAIN_SECONDS, _thread.interrupt_main).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook


def _end_before_the_interpreter(status: list[int]) -> None:
    """End the process, after all other exit functions, where the interpreter would be taken apart.

    A thread of a C++ library that asks for the interpreter from then on aborts the process: about one ``upr-backup find``
    in a hundred on a busy machine.
    """

    def end() -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            # The interpreter tells of it.
            return
        os._exit(status[0])

    # Exit functions run in the reverse order of their registration, and nothing else is imported so far.
    atexit.register(end)


def run(program: str, extra: str, needed: Sequence[str], module: str) -> None:
    """Run a program and leave the process with its status.

    Args:
        program: its name, as ``upr-cat``.
        extra: of the distribution, that brings what it needs.
        needed: the modules that the extra brings.
        module: has the program's click command as ``main``.
    """
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: {program} needs {', '.join(missing)}, not installed "
            f"(pip install 'upr-stream[{extra}]')",
            file=sys.stderr,
        )
        sys.exit(2)
    status = [1]
    _end_before_the_interpreter(status)
    _open_standard_streams()
    _lose_no_interrupt()
    # gRPC's C core writes lines of its own to stderr, beside the error that says the same.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        try:
            command = importlib.import_module(module).main
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        command.main(prog_name=program)
    except SystemExit as left:
        status[0] = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
