"""Primitives in which the two flavours differ: asyncio here, threads in ``_sync/io.py``, which has the same names. Both are written by hand."""

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

T = TypeVar("T")

Channel = grpc.aio.Channel
Cancelled = asyncio.CancelledError
"""Exception of a reader, besides grpc.RpcError, when its own side cancels the call."""


def cancelled_from_outside() -> bool:
    """Return whether the running task was cancelled, and not only a call that it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


now: Callable[[], float] = time.monotonic


def open_channel(
    target: str, options: list[tuple[str, int]], credentials: grpc.ChannelCredentials | None
) -> Channel:
    """Return a channel, without TLS when there are no credentials; nothing is connected yet."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def begin_connecting(channel: Channel) -> None:
    """Have a channel connect before its first call, where gRPC does so without a thread."""
    channel.get_state(try_to_connect=True)


def mutex() -> AbstractContextManager[Any]:
    """Guards a few statements with nothing awaited in between; on one event loop nothing is needed for that."""
    return nullcontext()


class Event:
    """A flag that can be waited for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set; False when ``seconds`` passed before."""
        if self._event.is_set():
            return True
        if seconds is None:
            # A timeout costs ten times the waiting, also one that never comes.
            return await self._event.wait()
        try:
            async with asyncio.timeout(seconds):
                return await self._event.wait()
        except TimeoutError:
            return False


class Once:
    """What one caller waits for, once; cheaper than an ``Event``."""

    def __init__(self) -> None:
        self._set: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        # Whoever was cancelled waits no more.
        if not self._set.done():
            self._set.set_result(None)

    async def wait(self) -> None:
        await self._set


class NextTurn:
    """Has ``work`` done once in the next turn of the event loop, however often it is asked for before."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._asked = False

    def ask(self) -> None:
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._do)
            self._asked = True

    def _do(self) -> None:
        self._asked = False
        self._work()


class Semaphore:
    """So many may be taken at a time; who waits gets the next one in turn."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        if self._left:
            self._left -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except BaseException:
            if place in self._waiting:
                self._waiting.remove(place)
            elif not place.cancelled():
                self.give_back()
            raise

    async def try_take(self) -> bool:
        """Take one if there is one at once."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            # Those who were cancelled wait no more.
            if not place.done():
                place.set_result(None)
                return
        self._left += 1


class Queue(Generic[T]):
    """Messages from the reader of a call; bounded by the credit and not by itself."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._filled.set()

    async def get(self, seconds: float | None = None) -> T | None:
        """Return the next item, None when none came in ``seconds``."""
        if self._items:
            # A consumer that always finds something must not keep the reader of the call from its turns.
            await asyncio.sleep(0)
        while not self._items:
            self._filled.clear()
            if not await self._filled.wait(seconds):
                return None
        return self._items.popleft()


class RequestQueue(Generic[T]):
    """The requests of a call, handed to gRPC as an iterator. Closing it is the half-close."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, item: T) -> None:
        """Add a request; after ``close`` it is dropped."""
        if not self._closed:
            self._items.append(item)
            self._filled.set()

    def close(self) -> None:
        self._closed = True
        self._filled.set()

    def __aiter__(self) -> "RequestQueue[T]":
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._filled.clear()
            await self._filled.wait()
        return self._items.popleft()

    async def join(self) -> None:
        """Return at once: the task that takes the requests ends with the call."""


class Background:
    """Something that runs beside the application until it ends by itself."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._task = asyncio.get_running_loop().create_task(work(), name=name)

    async def join(self) -> None:
        await asyncio.wait([self._task])


async def run_blocking(work: Callable[..., T], *arguments: Any) -> T:
    """Run what blocks (files) where it does not hold up anything else; also when cancelled it is done at the end."""
    task = asyncio.create_task(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # The thread cannot be stopped: what comes next must not run beside it.
        await asyncio.wait({task})
        raise


def from_anywhere(work: Callable[[], object]) -> Callable[[], None]:
    """Return what has ``work`` done soon on this event loop, from any thread or signal handler."""
    loop = asyncio.get_running_loop()

    def soon() -> None:
        # The loop of a program that has ended is closed; there is nothing left to do then.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(work)

    return soon


async def give_way() -> None:
    """Let what else is ready on the event loop have a turn."""
    await asyncio.sleep(0)


async def maybe_await(value: Any) -> Any:
    """Return what an application's callback returned, waited for if it is something to wait for."""
    return await value if inspect.isawaitable(value) else value
