"""Waiting for the network so that Ctrl-C is heard."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


def interruptible(call: Callable[[], _T], halt: Callable[[], Any] | None = None) -> _T:
    """Return what a call returns, or raise what it raises; a signal's handler runs while it is waited for.

    Python runs handlers in the main thread only, and not while that is inside of another library. After a
    KeyboardInterrupt the call goes on in a thread that the end of the process ends.

    Args:
        call: what to call.
        halt: has the call end soon; after a KeyboardInterrupt it is called, and the call is waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="object store", daemon=True)
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        if halt is not None:
            halt()
            thread.join()
        raise
