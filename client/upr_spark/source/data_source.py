"""The classes that Spark calls."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from upr_protocol.limits import PARTITIONS
from upr_spark.errors import bad_option
from upr_spark.source.columns import Columns, check_schema, default_schema
from upr_spark.source.offsets import parse_offset
from upr_spark.source.options import Settings, read_settings
from upr_spark.source.plan import Planner, Range, grouped, pin_now, plan_batch, plan_ranges
from upr_spark.source.server import Server
from upr_spark.source.task import RangeReader, Reading, Rows

NAME: Final = "upr"


class UprDataSource(DataSource):
    """Reads and writes a bucket: ``spark.read.format("upr")``, and the same for streams and writers."""

    _pinned: str | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns; pins what is there, so that all actions of one DataFrame see the same."""
        settings = read_settings(self.options)
        if settings.ending == "latest":
            # Spark keeps this object for the life of the DataFrame, and asks for the schema once.
            with closing(Server(settings.connection)) as server:
                self._pinned = pin_now(server, settings).name
        return default_schema(settings.key_text, settings.value_text)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads a batch."""
        settings = read_settings(self.options)
        if settings.starting == "latest":
            raise bad_option(
                "startingOffsets", "latest", "a batch read cannot begin where it ends", "earliest"
            )
        check_schema(schema)
        kind = FilteringReader if settings.pushdown else UprReader
        return kind(settings, schema, self._pinned)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return what plans and reads a stream."""
        settings = read_settings(self.options)
        check_schema(schema)
        if settings.ending != "latest":
            raise bad_option("endingOffsets", None, "a stream has no end", "leave it out")
        return UprStreamReader(settings, schema, self._pinned)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return what writes a batch."""
        from upr_spark.sink import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        """Return what writes a stream."""
        from upr_spark.sink import stream_writer

        return stream_writer(dict(self.options), schema, overwrite)


@dataclass
class Task(InputPartition):
    """What one task reads.

    Args:
        bucket_version: of the bucket that the ranges are of.
        ranges: by partition.
        cut: the cut at which they end; None for none.
    """

    bucket_version: int
    ranges: Sequence[Range]
    cut: str | None


def _read(
    settings: Settings, schema: StructType, task: InputPartition | None, in_batch: bool
) -> Iterator[Any]:
    """Yield the record batches of a task."""
    if not isinstance(task, Task):
        # Spark runs one task when there is nothing to read.
        return
    columns = Columns(schema, task.ranges, settings.include_deletes)
    reading = Reading(task.ranges, settings.rules, in_batch)
    with closing(Server(settings.connection)) as server:
        followed = RangeReader(server, settings, task.bucket_version, task.ranges, task.cut)
        for item in reading.read(followed):
            if isinstance(item, Rows):
                yield columns.rows(item.content, cut_off=item.cut_off)
            else:
                yield columns.control(item)


class UprReader(DataSourceReader):
    """Reads a batch.

    Args:
        settings: of the read.
        schema: the columns wanted.
        pinned: the cut that was made for this DataFrame; None where each action pins what is there.
    """

    def __init__(self, settings: Settings, schema: StructType, pinned: str | None) -> None:
        self._settings = settings
        self._schema = schema
        self._pinned = pinned
        self._wanted: frozenset[int] | None = None

    def partitions(self) -> list[InputPartition]:
        """Return the tasks."""
        settings = self._settings
        with closing(Server(settings.connection)) as server:
            ranges, cut = plan_batch(server, settings, self._pinned)
            version = server.bucket_version
        if self._wanted is not None:
            ranges = [one for one in ranges if one.partition in self._wanted]
        return [Task(version, group, cut) for group in grouped(ranges, settings.tasks)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield Arrow record batches."""
        return _read(self._settings, self._schema, partition, in_batch=True)


class FilteringReader(UprReader):
    """Reads a batch of fewer partitions where conditions allow it."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Take conditions on the column partition, and return the others."""
        wanted = set(range(PARTITIONS))
        for one in filters:
            allowed = _allowed(one)
            if allowed is None:
                yield one
            else:
                wanted &= allowed
        self._wanted = frozenset(wanted)


def _allowed(condition: Filter) -> set[int] | None:
    """Return the partitions that a condition lets through; None when it is about something else."""
    every = range(PARTITIONS)
    if getattr(condition, "attribute", None) != ("partition",):
        return None
    value: Any = getattr(condition, "value", None)
    if isinstance(condition, In):
        return {p for p in every if p in value}
    if type(value) is not int:
        return None
    if isinstance(condition, EqualTo | EqualNullSafe):
        return {p for p in every if p == value}
    if isinstance(condition, LessThan):
        return {p for p in every if p < value}
    if isinstance(condition, LessThanOrEqual):
        return {p for p in every if p <= value}
    if isinstance(condition, GreaterThan):
        return {p for p in every if p > value}
    if isinstance(condition, GreaterThanOrEqual):
        return {p for p in every if p >= value}
    return None


class UprStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads a stream; one object lives as long as a query runs, others are made to read.

    Args:
        settings: of the query.
        schema: the columns wanted.
        pinned: a cut that was made when the schema was asked for, of no use here.
    """

    def __init__(self, settings: Settings, schema: StructType, pinned: str | None) -> None:
        self._settings = settings
        self._schema = schema
        self._pinned = pinned
        self._server: Server | None = None
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_server": None, "_planner": None}

    def _plans(self) -> Planner:
        if self._planner is None:
            self._server = Server(self._settings.connection)
            self._planner = Planner(self._server, self._settings)
            if self._pinned is not None:
                self._server.release(self._pinned)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins."""
        return self._plans().initial()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the run at what is there now."""
        self._plans().prepare_available_now()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much a batch may have."""
        limit = self._settings.max_offsets
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch, ``start`` for none."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._plans().latest(start, rows)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of the batch between two offsets."""
        to = parse_offset(end)
        self._plans().planned(to)
        ranges = plan_ranges(parse_offset(start), to)
        groups = grouped(ranges, self._settings.tasks)
        return [Task(to.bucket_version, group, to.cut) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield Arrow record batches."""
        return _read(self._settings, self._schema, partition, in_batch=False)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: what is committed shows where the next batch begins."""

    def stop(self) -> None:
        """Disconnect. The newest cut stays for its lease, so that the query can be started again."""
        if self._server is not None:
            self._server.close()
