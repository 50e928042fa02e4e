"""Primitives in which the two flavours differ: asyncio here, threads in ``_sync/io.py``, which has the same names. Both are written by hand."""

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from upr_protocol.errors import InvalidArgumentError

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


def has_ended() -> Callable[[], bool]:
    """Return a function that says whether the event loop that runs now is closed; never, where none does."""
    try:
        return asyncio.get_running_loop().is_closed
    except RuntimeError:
        return lambda: False


def mutex() -> AbstractContextManager[Any]:
    """Guards a few statements with nothing awaited in between; on one event loop nothing is needed for that."""
    return nullcontext()


class Event(asyncio.Event):
    """A flag that can be waited for."""

    async def wait(self, seconds: float | None = None) -> bool:  # type: ignore[override]
        """Wait until it is set; False when ``seconds`` passed before."""
        if self.is_set():
            return True
        if seconds is None:
            # A timeout costs ten times the waiting, also one that never comes.
            return await super().wait()
        try:
            async with asyncio.timeout(seconds):
                return await super().wait()
        except TimeoutError:
            return False


class Once:
    """What one caller waits for, once; cheaper than an ``Event``."""

    def __init__(self) -> None:
        self._set: asyncio.Future[None] = asyncio.Future()

    def set(self) -> None:
        # Whoever was cancelled waits no more.
        if not self._set.done():
            self._set.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._set


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
        self._waiting: deque[asyncio.Future[bool]] = deque()
        # Those who were given one, and had no turn of the event loop since.
        self._coming = 0

    async def take(self, seconds: float | None = None) -> bool:
        """Take one; False when none came free in ``seconds``."""
        if self._left and not (self._coming or self._waiting):
            self._left -= 1
            return True
        loop = asyncio.get_running_loop()
        place: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(place)
        if self._left:
            # Behind those who are coming, who have an earlier turn.
            self._left -= 1
            loop.call_soon(self.give_back)
        timer = None if seconds is None else loop.call_later(seconds, self._too_late, place)
        try:
            return await place
        except BaseException:
            if place in self._waiting:
                self._waiting.remove(place)
            elif _is_given(place):
                self.give_back()
            raise
        finally:
            self._coming -= _is_given(place)
            if timer is not None:
                timer.cancel()

    def _too_late(self, place: asyncio.Future[bool]) -> None:
        if place in self._waiting:
            self._waiting.remove(place)
            if not place.done():
                place.set_result(False)

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
                place.set_result(True)
                self._coming += 1
                return
        self._left += 1


def _is_given(place: asyncio.Future[bool]) -> bool:
    return place.done() and not place.cancelled() and place.result()


class Queue(Generic[T]):
    """Messages from the reader of a call, for one who takes them; bounded by the credit and not by itself."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waits: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        _wake(self._waits)

    async def get(self, seconds: float | None = None) -> T | None:
        """Return the next item, None when none came in ``seconds``."""
        if self._items:
            # A consumer that always finds something must not keep the reader of the call from its turns.
            await asyncio.sleep(0)
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waits = waits = loop.create_future()
            # A third of what ``asyncio.timeout`` costs, and that is paid for each message.
            timer = None if seconds is None else loop.call_later(seconds, _wake, waits)
            try:
                await waits
            finally:
                if timer is not None:
                    timer.cancel()
        return self._items.popleft() if self._items else None

    def peek(self) -> T | None:
        """Return the next item, None when there is none yet; it stays."""
        return self._items[0] if self._items else None

    def take(self) -> T:
        """Return the item that ``peek`` saw."""
        return self._items.popleft()


def _wake(waits: asyncio.Future[None] | None) -> None:
    # Whoever was cancelled waits no more.
    if waits is not None and not waits.done():
        waits.set_result(None)


class RequestQueue(Generic[T]):
    """The requests of a call, written one after the other. Closing it is the half-close.

    A task that writes would be woken for each, and again when it is written. Here whoever puts a request takes the
    steps of gRPC's coroutine, and what that waits for calls back only if there is more to write.
    """

    def __init__(self) -> None:
        # None is the end.
        self._items: deque[T | None] = deque()
        self._closed = False
        self._call: Any = None
        self._writing: Coroutine[asyncio.Future[Any], None, None] | None = None
        self._waits_for: asyncio.Future[Any] | None = None

    def begin(self, method: Callable[[None], Any]) -> Any:
        """Return the call, begun by this."""
        self._call = method(None)
        # Behind it a write waits for nothing but its end: the request is with gRPC by then.
        self._writing = self._call.wait_for_connection()
        self._go_on()
        return self._call

    def put(self, item: T | None) -> None:
        """Add a request; after ``close`` it is dropped."""
        if self._closed:
            return
        self._closed = item is None
        self._items.append(item)
        if self._waits_for is None or self._waits_for.done():
            self._go_on(self._waits_for)
        elif len(self._items) == 1:
            self._waits_for.add_done_callback(self._go_on)

    def close(self) -> None:
        self.put(None)

    def _go_on(self, waited: asyncio.Future[Any] | None = None) -> None:
        """Write what there is, until something must be waited for."""
        if waited is not self._waits_for:
            # Somebody came before the call back.
            return
        if waited is not None and (waited.cancelled() or waited.exception() is not None):
            # The call is over. Of this gRPC would make an error of its own, which hides the one that the reader gets.
            self._closed = True
            return
        self._waits_for = None
        try:
            while self._writing is not None or self._items:
                if self._writing is None:
                    item = self._items.popleft()
                    self._writing = (
                        self._call.done_writing() if item is None else self._call.write(item)
                    )
                try:
                    self._waits_for = self._writing.send(None)
                except StopIteration:
                    self._writing = None
                    continue
                if self._items or self._closed:
                    # Also of the half-close: nobody else would look at its failure.
                    self._waits_for.add_done_callback(self._go_on)
                return
        except (Exception, asyncio.CancelledError):
            # As gRPC does with requests that it cannot take; after the end of the call it does nothing.
            self._closed = True
            self._call.cancel()
            # Of a channel with interceptors a task of gRPC waits for the end of the requests, also when the call is over.
            self._writing = self._call.done_writing()
            with suppress(Exception, asyncio.CancelledError):
                self._writing.send(None)

    async def join(self) -> None:
        """Return at once: no task takes the requests."""


class Background:
    """Something that runs beside the application until it ends by itself.

    At the end of a program's event loop it is cancelled with all tasks, perhaps before it began; ``on_end`` is called
    then too.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self._task = asyncio.get_running_loop().create_task(work(), name=name)
        if on_end is not None:
            self._task.add_done_callback(lambda _: on_end())

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def join(self) -> None:
        await asyncio.wait([self._task])


async def run_blocking(work: Callable[..., T], *arguments: Any) -> T:
    """Run what blocks (files) where it does not hold up anything else; also when cancelled it is done at the end."""

    def done() -> T:
        try:
            return work(*arguments)
        except StopIteration as error:
            # No future takes that one: this would wait for ever.
            raise RuntimeError("a position store raised StopIteration") from error

    task = asyncio.create_task(asyncio.to_thread(done))
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


def own_thread() -> Callable[[], None]:
    """Return what raises InvalidArgumentError in any other thread than this one: nothing is guarded against those here."""
    mine = threading.get_ident()

    def check() -> None:
        if threading.get_ident() != mine:
            raise InvalidArgumentError(
                "ack was called by another thread; must be called by a task of the event loop",
                hint="loop.call_soon_threadsafe(changes.ack, change), or follow with Client",
            )

    return check


async def give_way() -> None:
    """Let what else is ready on the event loop have a turn."""
    await asyncio.sleep(0)


def check_callbacks(**callbacks: Any) -> None:
    """Raise InvalidArgumentError unless each is a function, or None."""
    for what, value in callbacks.items():
        if value is not None and not callable(value):
            raise InvalidArgumentError(f"{what} is {value!r}; must be a function")


async def maybe_await(value: Any) -> Any:
    """Return what an application's callback returned, waited for if it is something to wait for."""
    return await value if inspect.isawaitable(value) else value
