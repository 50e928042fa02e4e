"""Primitives in which the two flavours differ: threads here, asyncio in ``_async/io.py``, which has the same names. Both are written by hand.

Python raises a KeyboardInterrupt between any two steps of the main thread. A lock that code in Python takes, as
``threading.Condition`` does, may stay locked then for ever, and with it the reader of a call. What other threads use as
well is made of steps of the interpreter's own C code here, each of which is done or not.
"""

import _thread
import contextlib
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import grpc

from upr_protocol.errors import InvalidArgumentError

T = TypeVar("T")

_USE_ASYNC = "nobody would wait for it: use AsyncClient, or a plain function"

Channel = grpc.Channel


class Cancelled(BaseException):
    """Never raised here: a reader whose own side cancels the call sees grpc.RpcError."""


def cancelled_from_outside() -> bool:
    """Whether somebody cancelled the running task; threads are not cancelled."""
    return False


now: Callable[[], float] = time.monotonic


def open_channel(
    target: str, options: list[tuple[str, int]], credentials: grpc.ChannelCredentials | None
) -> Channel:
    """Return a channel, without TLS when there are no credentials; nothing is connected yet."""
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def begin_connecting(channel: Channel) -> None:
    """Have a channel connect before its first call, where gRPC does so without a thread."""


def has_ended() -> Callable[[], bool]:
    """Return a function that says whether what a connection depends on is gone; threads depend on nothing."""
    return lambda: False


def mutex() -> AbstractContextManager[Any]:
    """Guards a few statements against the other threads."""
    return threading.RLock()


class Event:
    """A flag that can be waited for."""

    def __init__(self) -> None:
        self._is_set = False
        # A locked lock for each that waits.
        self._waiting: deque[_thread.LockType] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for woken in self._waiting.copy():
            # Another thread may have released it, in a ``set`` of its own.
            with contextlib.suppress(RuntimeError):
                woken.release()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set; False when ``seconds`` passed before."""
        if self._is_set:
            return True
        woken = _thread.allocate_lock()
        woken.acquire()
        self._waiting.append(woken)
        try:
            # Looked at after the lock can be found, so that no ``set`` is missed.
            return self._is_set or woken.acquire(timeout=-1 if seconds is None else max(seconds, 0))
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(woken)


Once = Event
"""Event that one caller waits for, once; in the other flavour that is cheaper."""


class NextTurn:
    """Has ``work`` done; threads have no turns, so it is done at once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def ask(self) -> None:
        self._work()


class Semaphore:
    """So many may be taken at a time."""

    def __init__(self, count: int) -> None:
        self._places: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._places.put(None)

    def take(self, seconds: float | None = None) -> bool:
        """Take one; False when none came free in ``seconds``."""
        try:
            longest = threading.TIMEOUT_MAX
            self._places.get(timeout=None if seconds is None else min(max(seconds, 0), longest))
        except Empty:
            return False
        return True

    def try_take(self) -> bool:
        """Take one if there is one at once."""
        try:
            self._places.get_nowait()
        except Empty:
            return False
        return True

    def give_back(self) -> None:
        self._places.put(None)


class Queue(Generic[T]):
    """Messages from the reader of a call; bounded by the credit and not by itself."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._seen: deque[T] = deque()

    def put(self, item: T) -> None:
        self._items.put(item)

    def get(self, seconds: float | None = None) -> T | None:
        """Return the next item, None when none came in ``seconds``."""
        if self._seen:
            return self.take()
        try:
            return self._items.get(timeout=None if seconds is None else max(seconds, 0))
        except Empty:
            return None

    def peek(self) -> T | None:
        """Return the next item, None when there is none yet; it stays."""
        try:
            if not self._seen:
                self._seen.append(self._items.get_nowait())
            return self._seen[0]
        except Empty:
            return None

    def take(self) -> T:
        """Return the item that ``peek`` saw."""
        return self._seen.popleft()


class RequestQueue(Generic[T]):
    """The requests of a call, handed to gRPC as an iterator. Closing it is the half-close."""

    def __init__(self) -> None:
        # None is the end.
        self._items: SimpleQueue[T | None] = SimpleQueue()
        self._closed = False
        self._taker: threading.Thread | None = None

    def begin(self, method: Callable[[Any], Any]) -> Any:
        """Return the call, begun by this."""
        return method(self)

    def put(self, item: T) -> None:
        """Add a request; after ``close`` it is dropped."""
        if not self._closed:
            self._items.put(item)

    def close(self) -> None:
        self._closed = True
        self._items.put(None)

    def __iter__(self) -> "RequestQueue[T]":
        return self

    def __next__(self) -> T:
        self._taker = threading.current_thread()
        item = self._items.get()
        if item is None:
            # For whoever asks again; what was put behind the end is never reached.
            self._items.put(None)
            raise StopIteration
        return item

    def join(self) -> None:
        """Wait for the end of gRPC's thread that takes the requests, after ``close``.

        It holds a lock of the call in its last steps. At the end of the process a thread stops where it is, and what
        gRPC does then, when the call is freed, would wait for that lock for ever.
        """
        if self._taker is not None:
            self._taker.join()


class Background:
    """Something that runs beside the application until it ends by itself."""

    def __init__(
        self, work: Callable[[], None], name: str, on_end: Callable[[], object] | None = None
    ) -> None:
        # Not asked of the thread: that calls itself ended where an interrupt meets the question.
        self.has_ended = False
        known: SimpleQueue[bool] = SimpleQueue()

        def run() -> None:
            if not known.get():
                return
            try:
                work()
            finally:
                self.has_ended = True
                if on_end is not None:
                    on_end()

        # A daemon, so that a program that ends without closing its client is not held up.
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            self._thread.start()
            known.put(True)
        except BaseException:
            # An interrupt, while it waited for the thread to be there: of that nobody knows, and another one does its work.
            known.put(False)
            raise

    def join(self) -> None:
        """Wait for its end."""
        if self._thread is not threading.current_thread():
            self._thread.join()


def run_blocking(work: Callable[..., T], *arguments: Any) -> T:
    """Run what blocks (files); here that is simply so."""
    return work(*arguments)


def from_anywhere(work: Callable[[], object]) -> Callable[[], None]:
    """Return what has ``work`` done soon, from any thread or signal handler."""

    def soon() -> None:
        # On a thread of its own: what a signal handler interrupts may hold the locks that the work needs.
        _thread.start_new_thread(work, ())

    return soon


def own_thread() -> Callable[[], None]:
    """Return what raises InvalidArgumentError in a thread that may not call; here all may."""
    return lambda: None


def give_way() -> None:
    """Let others have a turn; threads have theirs anyway."""


def check_callbacks(**callbacks: Any) -> None:
    """Raise InvalidArgumentError unless each is a function that is done when it returns, or None."""
    for what, value in callbacks.items():
        if value is not None and not callable(value):
            raise InvalidArgumentError(f"{what} is {value!r}; must be a function")
        if inspect.iscoroutinefunction(value):
            raise InvalidArgumentError(f"{what} is {value!r}; must not be async", hint=_USE_ASYNC)


def maybe_await(value: Any) -> Any:
    """Return what an application's callback returned, when it is done: nobody would run the rest."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise InvalidArgumentError(
            f"a callback returned {value!r}; must be done when it returns", hint=_USE_ASYNC
        )
    return value
