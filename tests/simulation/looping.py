"""Simulated time: event loops of processes that one timeline runs, handle by handle, in an order that the seed chooses.

Each process has a loop of its own, so that it can be killed between any two of its steps: what it had not done is never
done, and nothing of it cleans up. One that is paused goes on later, with everything that was due meanwhile. What asyncio
gives to a thread is a step of its own too, some time later.
"""

import asyncio
import heapq
import itertools
import logging
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")
STEP_SECONDS = 2e-5
"""Time that a step takes, so that a process that never waits does not stop the clock."""
_CANCELS_MAX = 20
_CANCEL_SECONDS = 30.0


class Timeline:
    """The time of all processes, in seconds, and what happens when.

    Args:
        seed: decides how long everything takes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 1000.0
        self.steps = 0
        self._due: list[tuple[float, float, int, SimulatedLoop, events.Handle]] = []
        self._numbers = itertools.count()
        self.loops: list[SimulatedLoop] = []

    def drawn(self, *names: object) -> random.Random:
        """Return what decides for one thing alone: what others draw does not change it."""
        return random.Random(f"{self.seed} {names}")

    def at(self, when: float, loop: "SimulatedLoop", handle: events.Handle) -> None:
        """Have a loop run a handle."""
        when = max(when, self.now)
        heapq.heappush(self._due, (when, when, next(self._numbers), loop, handle))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._due and self._due[0][0] <= until:
            when, first, number, loop, handle = heapq.heappop(self._due)
            if not loop.alive:
                loop.left.append(handle)
                continue
            if handle.cancelled():
                continue
            if loop.paused_until > when:
                # In the order in which it was due.
                heapq.heappush(self._due, (loop.paused_until, first, number, loop, handle))
                continue
            self.now = max(self.now, when)
            self.steps += 1
            loop.run_one(handle)
            if loop.broken is not None and not loop.is_over:
                raise loop.broken
        self.now = max(self.now, until)

    def close(self) -> None:
        """Cancel everything that the processes left, also of those that were killed: it counts for nobody any more."""
        logging.disable()
        try:
            for loop in self.loops:
                loop.alive, loop.paused_until, loop.is_over = True, 0.0, True
                for handle in loop.left:
                    self.at(self.now, loop, handle)
            for _ in range(_CANCELS_MAX):
                tasks = [task for loop in self.loops for task in asyncio.all_tasks(loop._as_loop)]
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                self.run(self.now + _CANCEL_SECONDS)
        finally:
            logging.disable(logging.NOTSET)


class SimulatedLoop:
    """Event loop of one process, with what asyncio uses of one.

    Attributes:
        host: where it runs; what is cut is between hosts.
        alive: whether it runs anything more.
        paused_until: when it goes on.
        files: called to close what the process has open, when it is killed.
        broken: an error that nobody expected.
        left: what it did not do before it was killed.
        is_over: whether the world has ended, so that no error counts.
        place: the disk of the process.
        reach: called with the name of each failpoint.
    """

    def __init__(self, timeline: Timeline, host: str) -> None:
        self.timeline = timeline
        self.host = host
        self.alive = True
        self.paused_until = 0.0
        self.files: list[Callable[[], None]] = []
        self.broken: BaseException | None = None
        self.left: list[events.Handle] = []
        self._as_loop: Any = self
        self.is_over = False
        self.place = ""
        self.reach: Callable[[str], None] = lambda _: None
        self._takes = timeline.drawn(host, len(timeline.loops))
        timeline.loops.append(self)

    def run_one(self, handle: events.Handle) -> None:
        """Run a handle as the running loop."""
        events._set_running_loop(self._as_loop)
        try:
            handle._run()
        finally:
            events._set_running_loop(None)

    def kill(self) -> None:
        """End the process at once: nothing of it runs any more."""
        self.alive = False
        for close in self.files:
            # Closed already, or just being opened.
            with suppress(Exception):
                close()
        self.files.clear()

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self.timeline.now

    def handle(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.Handle:
        """Return something to be done on this loop."""
        return events.Handle(callback, args, self._as_loop, context)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.Handle:
        handle = self.handle(callback, *args, context=context)
        self.timeline.at(self.timeline.now + STEP_SECONDS, self, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> events.TimerHandle:
        handle = events.TimerHandle(when, callback, args, self._as_loop, context)
        self.timeline.at(when, self, handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> events.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """Do nothing: it is left out when it is due."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self._as_loop)

    def create_task(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[T]":
        return asyncio.Task(coroutine, loop=self._as_loop, name=name, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self.alive

    def is_closed(self) -> bool:
        return not self.alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the first error that came out of a step, or of a task that nobody waits for."""
        error = context.get("exception")
        if self.alive and isinstance(error, Exception) and self.broken is None:
            self.broken = error

    # Threads.

    def thread_seconds(self) -> float:
        """Return how long something takes in a thread."""
        return self._takes.choice((0.0002, 0.001, 0.001, 0.004, 0.02)) * (
            0.5 + self._takes.random()
        )

    def run_in_executor(
        self, executor: Any, work: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        answer: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if answer.cancelled():
                return
            settle = done(answer, lambda: work(*args))
            self.call_later(self.thread_seconds() / 4, settle)

        self.call_later(self.thread_seconds(), run)
        return answer


def running() -> SimulatedLoop:
    """Return the loop of the process that runs now."""
    loop: Any = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


def done(answer: "asyncio.Future[T]", work: Callable[[], T]) -> Callable[[], None]:
    """Do something, and return what tells its outcome."""
    try:
        result = work()
    except Exception as error:
        failure = error
        return lambda: None if answer.cancelled() else answer.set_exception(failure)
    return lambda: None if answer.cancelled() else answer.set_result(result)


class SimulatedWorker:
    """Threads that run functions in the order in which they are asked for: stands in for ``Worker`` of the disk."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._name = name
        self._work: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._idle = count
        self._closed = False

    def run(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        if self._closed:
            raise RuntimeError(f"the {self._name} thread has ended")
        loop = running()
        answer: asyncio.Future[T] = loop.create_future()
        self._work.append((answer, call))
        if self._idle:
            self._idle -= 1
            loop.call_later(loop.thread_seconds(), self._next, loop)
        return answer

    def _next(self, loop: SimulatedLoop) -> None:
        if self._work:
            self._do(loop)
        if self._work:
            loop.call_later(loop.thread_seconds(), self._next, loop)
        else:
            self._idle += 1

    def _do(self, loop: SimulatedLoop) -> None:
        answer, call = self._work.popleft()
        if not answer.cancelled():
            loop.call_later(loop.thread_seconds() / 4, done(answer, call))

    def close(self) -> None:
        """Run what was asked for."""
        self._closed = True
        loop = running()
        while self._work:
            self._do(loop)
