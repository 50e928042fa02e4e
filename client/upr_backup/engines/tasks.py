"""The internal data source that runs groups as Spark tasks: one input partition a group, one result row each.

It needs neither pandas nor the RDD API. Everything here is imported by executors.
"""

import json
import os
import pickle
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from upr_backup.engines.engine import to_text

NAME: Final = "upr-backup-groups"
OPTION: Final = "groups"

_RETRY_PATIENCE_SECONDS: Final = 5.0


class GroupFailed(Exception):
    """Carries the error of a group through the JVM, as text."""


class GroupsSource(DataSource):
    """Reads groups where Spark puts them. The option ``groups`` holds a list of ``Task``, pickled, in base64."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        """One row a group: its index and its record as JSON."""
        return "group INT, record STRING"

    def reader(self, schema: Any) -> DataSourceReader:
        return _Reader(self.options[OPTION])


class _Reader(DataSourceReader):
    def __init__(self, tasks: str) -> None:
        self._tasks = tasks

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(task) for task in pickle.loads(b64decode(self._tasks))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, str]]:
        """Read a group, stage its record and return it."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from upr_backup.source import backup_group

        context = TaskContext.get()
        # Spark tries a task again whatever its error is, and the first one has waited long enough for the server.
        task = partition.value
        if context is not None and context.attemptNumber() > 0:
            task = replace(task, patience=min(task.patience, _RETRY_PATIENCE_SECONDS))
        try:
            result = backup_group(task)
        except Exception as error:
            raise GroupFailed(to_text(error)) from None
        yield task.index, json.dumps(result.to_json())
