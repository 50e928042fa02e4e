"""Primitives in which the two flavours differ: threads here, asyncio in ``_async/io.py``, which has the same names. Both are written by hand."""

import _thread
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import grpc

T = TypeVar("T")

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


def mutex() -> AbstractContextManager[Any]:
    """Guards a few statements against the other threads."""
    return threading.RLock()


class Event:
    """A flag that can be waited for."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set; False when ``seconds`` passed before."""
        return self._event.wait(seconds)


Once = Event
"""Event that one caller waits for, once; in the other flavour that is cheaper."""


class NextTurn:
    """Has ``work`` done; threads have no turns, so it is done at once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def ask(self) -> None:
        """Do it."""
        self._work()


class Semaphore:
    """So many may be taken at a time."""

    def __init__(self, count: int) -> None:
        self._places = threading.Semaphore(count)

    def take(self) -> None:
        self._places.acquire()

    def try_take(self) -> bool:
        """Take one if there is one at once."""
        return self._places.acquire(blocking=False)

    def give_back(self) -> None:
        self._places.release()


class Queue(Generic[T]):
    """Messages from the reader of a call; bounded by the credit and not by itself."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = threading.Condition()

    def put(self, item: T) -> None:
        with self._filled:
            self._items.append(item)
            self._filled.notify()

    def get(self, seconds: float | None = None) -> T | None:
        """Return the next item, None when none came in ``seconds``."""
        with self._filled:
            if not self._filled.wait_for(lambda: self._items, seconds):
                return None
            return self._items.popleft()


class RequestQueue(Generic[T]):
    """The requests of a call, handed to gRPC as an iterator. Closing it is the half-close."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = threading.Condition()
        self._closed = False

    def put(self, item: T) -> None:
        """Add a request; after ``close`` it is dropped."""
        with self._filled:
            if not self._closed:
                self._items.append(item)
                self._filled.notify()

    def close(self) -> None:
        with self._filled:
            self._closed = True
            self._filled.notify_all()

    def __iter__(self) -> "RequestQueue[T]":
        return self

    def __next__(self) -> T:
        with self._filled:
            self._filled.wait_for(lambda: self._items or self._closed)
            if not self._items:
                raise StopIteration
            return self._items.popleft()


class Background:
    """Something that runs beside the application until it ends by itself."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        # A daemon, so that a program that ends without closing its client is not held up.
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

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


def give_way() -> None:
    """Let others have a turn; threads have theirs anyway."""


def maybe_await(value: Any) -> Any:
    """Return what an application's callback returned; here nothing is to be waited for."""
    return value


def unary(method: Callable[..., T], request: object, seconds: float) -> T:
    """Call a unary method."""
    return method(request, timeout=seconds)
