"""Child process of ``ServerProcess``: the server, and a thread that ends it with its parent.

Started by its path and not as a module, and with the standard library only, so that nothing of the SDK is loaded.
The arguments are the number of an open pipe, of which the parent holds the other end, and those of ``upr.cli``.
"""

import os
import runpy
import signal
import sys
import threading


def _end_with_parent(pipe: int) -> None:
    # A pipe and not PR_SET_PDEATHSIG: that one fires when the thread ends that started the process.
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run ``python -m upr.cli`` with the arguments behind the first."""
    pipe = int(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(pipe,), name="parent", daemon=True).start()
    sys.argv[:] = ["upr.cli", *sys.argv[2:]]
    runpy.run_module("upr.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
