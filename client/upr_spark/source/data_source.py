"""The classes that Spark calls."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
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
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from upr_protocol.limits import CLOCK_JUMP_SECONDS, KEY_BYTES_MAX, PARTITIONS
from upr_spark.errors import bad_option
from upr_spark.options import Option
from upr_spark.sink.options import APPLY, WRITE_OPTIONS
from upr_spark.sink.writers import batch_writer, stream_writer
from upr_spark.source.columns import Columns, check_schema, default_schema
from upr_spark.source.offsets import parse_offset
from upr_spark.source.options import READING_OPTIONS, Settings, read_settings
from upr_spark.source.plan import Planner, Range, grouped, pin_now, plan_batch, plan_ranges
from upr_spark.source.server import CutPoint, Server
from upr_spark.source.task import RangeReader, Reading, Rows, renewed

NAME: Final = "upr"


class UprDataSource(DataSource):
    """Reads and writes a bucket: ``spark.read.format("upr")``, and the same for streams and writers."""

    _pinned: CutPoint | None = None

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        """Return the columns; pins what is there, so that all actions of one DataFrame see the same.

        A table is no DataFrame: each query pins what is there then.
        """
        if "provider" in self.options:
            return _table_schema(self.options)
        settings = read_settings(self.options)
        if settings.ends_late:
            settings.connection.check_hosts()
            # Spark keeps this object for the life of the DataFrame, and asks for the schema once.
            with closing(Server(settings.connection)) as server:
                self._pinned = pin_now(server, settings)
        return default_schema(settings.key_text, settings.value_text)

    def reader(self, schema: StructType) -> DataSourceReader:
        settings = read_settings(_options(self.options, schema, WRITE_OPTIONS, READING_OPTIONS))
        if settings.begins_late:
            raise bad_option(
                "startingOffsets",
                None,
                "a batch read cannot begin where it ends",
                "earliest, or -2",
            )
        check_schema(schema)
        kind = FilteringReader if settings.pushdown else UprReader
        return kind(settings, schema, self._pinned)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        settings = read_settings(_options(self.options, schema, WRITE_OPTIONS, READING_OPTIONS))
        check_schema(schema)
        if settings.ending != "latest":
            raise bad_option("endingOffsets", None, "a stream has no end", "leave it out")
        return UprStreamReader(settings, schema, self._pinned)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        options = _options(self.options, schema, READING_OPTIONS, WRITE_OPTIONS)
        return batch_writer(options, schema, overwrite, of_table="endpoint" not in self.options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        # The columns are those of what is read: they do not tell of the table that is written to.
        return stream_writer(self.options, schema, overwrite)


# Spark gives the options of a table to schema() alone, when it is made. So they are kept with its columns.

_KEPT: Final = "upr"
"""Key of the options in the metadata of a table's first column."""
_DECLARED: Final = "option."
"""Beginning of the names under which Spark tells what a CREATE TABLE has as OPTIONS, among its own properties."""


def _table_schema(properties: Mapping[str, str]) -> StructType:
    """Return the columns of a table that is made, with its options."""
    options = {
        name.removeprefix(_DECLARED): value
        for name, value in properties.items()
        if name.startswith(_DECLARED)
    }
    if "token" in options:
        raise bad_option(
            "token", None, "a table would show it", "give a tokenFile, which is read when needed"
        )
    settings = read_settings(_without(options, WRITE_OPTIONS, READING_OPTIONS))
    schema = default_schema(settings.key_text, settings.value_text)
    schema.fields[0].metadata = {_KEPT: json.dumps(options)}
    return schema


def _options(
    given: Mapping[str, str], schema: StructType, other: Iterable[Option], own: Iterable[Option]
) -> dict[str, str]:
    """Return the options of a use; where they name no server, with those of the table that the schema is of.

    Args:
        other, own: those of the other use and of this one.
    """
    options = dict(given)
    if "endpoint" in options or not schema.fields:
        return options
    kept = schema.fields[0].metadata.get(_KEPT)
    if kept is None:
        return options
    table = json.loads(kept)
    # It has the column op, which the other mode refuses.
    table.setdefault("writemode", APPLY)
    return _without(table, other, own) | options


def _without(
    options: Mapping[str, str], other: Iterable[Option], own: Iterable[Option]
) -> dict[str, str]:
    names = {one.name.lower() for one in other} - {one.name.lower() for one in own}
    return {name: value for name, value in options.items() if name.lower() not in names}


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
    if "value" not in schema.names:
        settings = replace(settings, include_values=False)
    lease = settings.load_lease if in_batch else settings.lease
    columns = Columns(schema, task.ranges, settings.include_deletes)
    reading = Reading(task.ranges, settings.rules, in_batch)
    server = Server(settings.connection)
    # Closed before the renewing ends: it may wait for an answer.
    with renewed(server, task.cut, lease), closing(server):
        followed = RangeReader(server, settings, task.bucket_version, task.ranges)
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

    def __init__(self, settings: Settings, schema: StructType, pinned: CutPoint | None) -> None:
        self._settings = settings
        self._schema = schema
        self._pinned = pinned
        self._wanted: frozenset[int] | None = None

    def partitions(self) -> list[InputPartition]:
        settings = self._settings
        settings.connection.check_hosts()
        with closing(Server(settings.connection)) as server:
            ranges, cut = plan_batch(server, settings, self._pinned)
            version = server.bucket_version
        if self._wanted is not None:
            ranges = [one for one in ranges if one.partition in self._wanted]
        return [Task(version, group, cut) for group in grouped(ranges, settings.tasks)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(self._settings, self._schema, partition, in_batch=True)


class FilteringReader(UprReader):
    """Reads less where conditions allow it: fewer partitions, keys with a prefix, or what is not too old."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Take conditions on the column partition, and return the others, which Spark looks at again."""
        wanted = set(range(PARTITIONS))
        settings = self._settings
        for one in filters:
            allowed = _allowed(one)
            if allowed is not None:
                wanted &= allowed
                continue
            prefix = _prefix(one)
            if prefix.startswith(settings.key_prefix):
                settings = replace(settings, key_prefix=prefix)
            elif not settings.key_prefix.startswith(prefix):
                wanted = set()
            settings = _with_beginning(settings, one)
            yield one
        self._wanted = frozenset(wanted)
        self._settings = settings


def _prefix(condition: Filter) -> bytes:
    """Return what keys begin with that a condition lets through; nothing when it is about something else."""
    if getattr(condition, "attribute", None) != ("key",) or not isinstance(
        condition, EqualTo | EqualNullSafe | StringStartsWith
    ):
        return b""
    value: Any = condition.value
    prefix = value.encode() if isinstance(value, str) else value
    return prefix[:KEY_BYTES_MAX] if isinstance(prefix, bytes) else b""


def _with_beginning(settings: Settings, condition: Filter) -> Settings:
    """Return settings that leave out what a condition on the time calls too old.

    Times of commits go back where a server takes over whose clock is behind. So an hour more is read: a server complains
    about a clock that differs by more.
    """
    if settings.ending != "latest":
        # A partition could begin behind the end that is named for it.
        return settings
    if getattr(condition, "attribute", None) != ("time",) or not isinstance(
        condition, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual
    ):
        return settings
    value: Any = condition.value
    if settings.starting != "earliest" or not isinstance(value, datetime) or value.tzinfo is None:
        return settings
    moment = max(0, int((value.timestamp() - CLOCK_JUMP_SECONDS) * 1_000_000))
    since = {p: max(moment, settings.starting_times.get(p, 0)) for p in settings.partitions}
    return replace(settings, starting_times=since)


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

    def __init__(self, settings: Settings, schema: StructType, pinned: CutPoint | None) -> None:
        self._settings = settings
        self._schema = schema
        self._pinned = pinned
        self._server: Server | None = None
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_server": None, "_planner": None}

    def _plans(self) -> Planner:
        if self._planner is None:
            self._settings.connection.check_hosts()
            self._server = Server(self._settings.connection)
            self._planner = Planner(self._server, self._settings)
            if self._pinned is not None:
                self._server.release(self._pinned.name)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:
        return self._plans().initial()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the run at what is there now."""
        self._plans().prepare_available_now()

    def getDefaultReadLimit(self) -> ReadLimit:
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
        return _read(self._settings, self._schema, partition, in_batch=False)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return what a query's progress shows as its latest offset: how much there is, and how much of it is left."""
        return None if self._planner is None else self._planner.lag()

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: what is committed shows where the next batch begins."""

    def stop(self) -> None:
        """Disconnect. The newest cut stays for its lease, so that the query can be started again."""
        if self._server is not None:
            self._server.close()
