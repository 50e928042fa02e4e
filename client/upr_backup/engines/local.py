"""Groups in a pool of processes of this machine; one group at a time in this process.

A worker ends by itself when its pipe to the driver does, so that it never outlives a driver that was killed. A group
whose worker was killed is read again by another one, once.
"""

import os
import queue
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from upr_backup.engines.engine import TICK_SECONDS, Finished, Rows, from_text, to_text
from upr_backup.task import Task
from upr_protocol.errors import UprError

_DEATHS_MAX: Final = 2
_STOP_SECONDS: Final = 5.0
_END_SECONDS: Final = 2.0
"""For workers to remove what they were writing."""
_TELL_SECONDS: Final = 0.2


class WorkerKilledError(UprError):
    """A group's worker process was killed, as often as it was tried."""

    default_reason = "WORKER_KILLED"
    default_retriable = True


class LocalEngine:
    """Reads groups in so many processes at a time, 1 or more; one alone is read in a thread of this process."""

    def __init__(self, processes: int) -> None:
        self.parallel = processes
        self._idle: list[_Worker] = []

    def run(self, tasks: Sequence[Task]) -> Generator[Rows | Finished, None, None]:
        """Read groups, in their order as far as there is room."""
        if min(self.parallel, len(tasks)) == 1:
            yield from _in_thread(tasks)
        else:
            yield from self._in_pool(tasks)

    def _in_pool(self, tasks: Sequence[Task]) -> Generator[Rows | Finished, None, None]:
        waiting = deque(tasks)
        busy: dict[Any, tuple[_Worker, Task]] = {}
        deaths: Counter[int] = Counter()
        try:
            while waiting or busy:
                while waiting and len(busy) < self.parallel:
                    was_idle = bool(self._idle)
                    worker = self._idle.pop() if was_idle else _Worker()
                    if worker.begin(waiting[0]):
                        busy[worker.pipe] = worker, waiting.popleft()
                    elif not was_idle:
                        _count(deaths, worker, waiting[0])
                ready = wait(list(busy), TICK_SECONDS)
                if not ready:
                    yield Rows(0)
                for pipe in ready:
                    worker, task = busy[pipe]
                    event = worker.event()
                    if event is None:
                        del busy[pipe]
                        _count(deaths, worker, task)
                        waiting.appendleft(task)
                    elif isinstance(event, Exception):
                        raise event
                    else:
                        if isinstance(event, Finished):
                            del busy[pipe]
                            self._idle.append(worker)
                        yield event
        finally:
            for worker, _ in busy.values():
                worker.pipe.close()
            # All at a time: each removes the file that it was writing.
            until = time.monotonic() + _END_SECONDS
            for worker, _ in busy.values():
                worker.kill(max(until - time.monotonic(), 0.0))

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


def _count(deaths: Counter[int], worker: "_Worker", task: Task) -> None:
    """Count the death of a group's worker; WorkerKilledError when there were too many."""
    deaths[task.index] += 1
    if deaths[task.index] == _DEATHS_MAX:
        raise WorkerKilledError(
            f"the process that read group {task.index} was killed ({worker.end()}), and so was another one before",
            hint="if the machine is short of memory, take fewer --processes; the next run goes on from here",
        )


class _Worker:
    """A process that reads groups, one at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe: Connection[Any, Any]
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other,), daemon=True)
        # Started with the first process, it would unblock the signal.
        resource_tracker.ensure_running()
        # A Ctrl-C at the terminal is for the driver, which then ends the workers; the mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # The worker's own end must be the only one, or its death would not be seen.
        other.close()

    def begin(self, task: Task) -> bool:
        """Have a group read; False when the process is gone."""
        try:
            self.pipe.send(task)
        except OSError:
            self.kill()
            return False
        return True

    def event(self) -> Rows | Finished | Exception | None:
        """Return what it tells; None when the process is gone."""
        try:
            event = self.pipe.recv()
        except (EOFError, OSError):
            self.kill()
            return None
        if isinstance(event, str):
            return from_text(event) or RuntimeError(event)
        assert isinstance(event, Rows | Finished)
        return event

    def end(self) -> str:
        """Return how the process ended, in words."""
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    def kill(self, patience: float = 0.0) -> None:
        """End it; with patience it has so many seconds to end by itself, as it does when its pipe was closed."""
        if patience:
            self._process.join(patience)
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _work(pipe: "Connection[Any, Any]") -> None:
    """Read groups until the driver is gone; what a worker process does."""
    from upr_backup.source import backup_group

    # Raised out of what is being read, so that its half-written file goes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, tasks), daemon=True).start()
    while True:
        task = tasks.get()
        told: Finished | str
        try:
            gathered = Gathered(lambda rows: pipe.send(Rows(rows)))
            told = Finished(task.index, backup_group(task, gathered.add))
            gathered.tell()
        except Exception as error:
            told = to_text(error)
        # Where the driver is gone, this process ends by itself.
        with suppress(OSError):
            pipe.send(told)


def _receive(pipe: "Connection[Any, Any]", tasks: "queue.SimpleQueue[Task]") -> None:
    while True:
        try:
            tasks.put(pipe.recv())
        except (EOFError, OSError):
            # The driver is gone: nothing that this process does counts any more.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            time.sleep(_END_SECONDS)
            os._exit(1)


class Gathered:
    """Counts rows, and tells of them a few times a second: of those since the last time."""

    def __init__(self, told: Callable[[int], Any]) -> None:
        self._told = told
        self._rows = 0
        self._told_at = 0.0

    def add(self, rows: int) -> None:
        self._rows += rows
        if time.monotonic() - self._told_at >= _TELL_SECONDS:
            self.tell()

    def tell(self) -> None:
        rows, self._rows, self._told_at = self._rows, 0, time.monotonic()
        self._told(rows)


class _StoppedError(Exception):
    """Nobody waits for the groups any more."""


def _in_thread(tasks: Sequence[Task]) -> Generator[Rows | Finished, None, None]:
    from upr_backup.source import backup_group

    events: queue.SimpleQueue[Rows | Finished | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def tell(rows: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        events.put(Rows(rows))

    def work() -> None:
        try:
            for task in tasks:
                gathered = Gathered(tell)
                result = backup_group(task, gathered.add)
                gathered.tell()
                events.put(Finished(task.index, result))
        except BaseException as error:
            events.put(error)
        events.put(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            try:
                event = events.get(timeout=TICK_SECONDS)
            except queue.Empty:
                yield Rows(0)
                continue
            if event is None:
                return
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        stopped.set()
        thread.join(_STOP_SECONDS)
