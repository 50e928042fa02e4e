"""Groups as tasks of Spark, on this machine or a cluster."""

import json
import pickle
import queue
import threading
from base64 import b64encode
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from upr_backup.engines import spark_session as spark_jvm
from upr_backup.engines.engine import TICK_SECONDS, Finished, Rows, from_text
from upr_backup.repository import open_storage
from upr_backup.repository.repository import Repository
from upr_backup.task import Task, TaskResult, staged_result
from upr_protocol.errors import UprError


class SparkEngine:
    """Reads groups in Spark tasks.

    The session is started with the first group; a run that finds nothing new starts none. A task that failed or was
    lost with its executor is tried again by Spark; what it staged before is used.

    Args:
        master: None for ``local[*,4]``, or, under spark-submit, for what that was told.

    Raises:
        MissingPackageError: there is no pyspark, or no Java.
        InvalidArgumentError: the master is none.
    """

    def __init__(self, master: str | None, settings: Mapping[str, str]) -> None:
        spark_jvm.check_installed()
        if master is None and not spark_jvm.is_submitted():
            master = spark_jvm.DEFAULT_MASTER
        self._master = None if master is None else spark_jvm.checked_master(master)
        self._settings = dict(settings)
        self._session: Any = None
        self._is_own = False
        self.parallel = spark_jvm.cores_of(self._master)

    def run(self, tasks: Sequence[Task]) -> Generator[Rows | Finished, None, None]:
        """Read groups in one job. What is finished is known from what tasks staged, and at the end from the job."""
        if self._session is not None and not spark_jvm.is_alive(self._session):
            self.close()
        if self._session is None:
            self._session = spark_jvm.active_session()
            self._is_own = self._session is None
        if self._session is None:
            self._session = spark_jvm.start_session(self._master, self._settings)
        try:
            job = _Job(self._session, tasks)
            try:
                yield from job.events()
            finally:
                job.cancel()
        except Exception as error:
            own = isinstance(error, UprError) and not isinstance(error, spark_jvm.SparkError)
            if own or spark_jvm.is_alive(self._session):
                raise
            raise spark_jvm.SparkError(
                "Spark's JVM ended, or its cluster stopped the application",
                hint="if it was short of memory, give it more; the next run goes on from here",
                retriable=True,
            ) from error

    def close(self) -> None:
        """End the session and its JVM, unless it was there before."""
        session, self._session = self._session, None
        if session is not None and self._is_own:
            spark_jvm.end_session(session)


class _Job:
    """The groups of one run, collected by a thread."""

    def __init__(self, session: Any, tasks: Sequence[Task]) -> None:
        from upr_backup.engines.tasks import NAME, OPTION, GroupsSource

        self._context = session.sparkContext
        self._group = f"upr-backup-{tasks[0].attempt}"
        self._repository = Repository.open(open_storage(tasks[0].location), tasks[0].key)
        self._pending = {task.index: task for task in tasks}
        self._tasks_done = 0
        self._ended: queue.SimpleQueue[list[Any] | BaseException] = queue.SimpleQueue()
        session.dataSource.register(GroupsSource)
        text = b64encode(pickle.dumps(list(tasks))).decode()
        try:
            self._frame = session.read.format(NAME).option(OPTION, text).load()
        except Exception as error:
            raise _reported(error) from error
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        try:
            self._context.setJobGroup(self._group, "upr-backup", interruptOnCancel=False)
            self._ended.put(self._frame.collect())
        except BaseException as error:
            self._ended.put(error)

    def events(self) -> Generator[Rows | Finished, None, None]:
        """Yield what is finished, and how it ended."""
        while True:
            try:
                ended = self._ended.get(timeout=TICK_SECONDS)
            except queue.Empty:
                yield Rows(0)
                yield from self._staged()
                continue
            if isinstance(ended, BaseException):
                raise _reported(ended) from ended
            for index, record in ended:
                if self._pending.pop(index, None) is not None:
                    yield from _finished(index, TaskResult.from_json(json.loads(record)))
            return

    def _staged(self) -> Generator[Rows | Finished, None, None]:
        """Yield the groups whose records have appeared, when Spark says that more tasks are done."""
        tracker = self._context.statusTracker()
        done = 0
        for number in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(number)
            stages = (
                [] if info is None else [tracker.getStageInfo(stage) for stage in info.stageIds]
            )
            done += sum(stage.numCompletedTasks for stage in stages if stage is not None)
        if done == self._tasks_done:
            return
        self._tasks_done = done
        for index, task in list(self._pending.items()):
            result = staged_result(self._repository, task.number, task.attempt, index)
            if result is not None:
                del self._pending[index]
                yield from _finished(index, result)

    def cancel(self) -> None:
        if self._thread.is_alive():
            # Where the JVM is gone nothing runs.
            with suppress(Exception):
                self._context.cancelJobGroup(self._group)
            self._thread.join(TICK_SECONDS)


def _finished(index: int, result: TaskResult) -> Generator[Rows | Finished, None, None]:
    yield Rows(sum(entry.rows for entry in result.entries.values()))
    yield Finished(index, result)


def _reported(error: BaseException) -> BaseException:
    """Return what a failure of the job is to the user."""
    if not isinstance(error, Exception):
        return error
    known = from_text(error)
    if known is not None:
        return known
    if isinstance(error, UprError):
        return error
    return spark_jvm.SparkError(
        f"the Spark job failed: {spark_jvm.words_of(error)}",
        hint="what is staged is used by the next run",
    )
