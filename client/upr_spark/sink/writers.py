"""The writers that Spark is given. They are made on the driver, and pickled from there."""

import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from upr_protocol.errors import UprError
from upr_spark.errors import UprSparkError, bad_option
from upr_spark.sink.chunks import seed
from upr_spark.sink.options import SinkOptions, read_sink_options
from upr_spark.sink.rows import check_schema
from upr_spark.sink.sending import write_batches
from upr_spark.sink.truncating import delete_older, look

_logger: Final = logging.getLogger("upr_spark")
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
_REFUSED: Final = "OVERWRITE_REFUSED"


@dataclass(frozen=True)
class TaskRows(WriterCommitMessage):
    """What a task says when it is done.

    Args:
        rows: how many it wrote.
    """

    rows: int


class BatchWriter(DataSourceArrowWriter):
    """Writes the rows of one batch job; see ``batch_writer``.

    Args:
        options: read and checked.
        overwrite: whether the keys that are not written are to be deleted at the end.
    """

    def __init__(self, options: SinkOptions, *, overwrite: bool) -> None:
        self._options = options
        self._write_id = options.write_id or secrets.token_hex(16)
        self._named = options.write_id is not None
        self._beginning = None
        if overwrite:
            try:
                self._beginning = look(options)
            except UprError as error:
                raise UprSparkError.of(error) from None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRows:
        """Write the rows of one task.

        Raises:
            UprSparkError: see ``upr_spark.sink.sending``.
        """
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        kind = "named" if self._named else "batch"
        return TaskRows(
            write_batches(self._options, seed(kind, self._write_id, partition), iterator)
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done: count the rows, and with ``mode("overwrite")`` delete the keys that were not written.

        Raises:
            UprSparkError: not all of them could be deleted; every row is written.
        """
        _tell(self._options, messages, "written")
        if self._beginning is None:
            return
        try:
            delete_older(self._options, self._beginning)
        except UprError as error:
            told = UprSparkError.of(error)
            told.message = (
                "all rows are written, but not all keys that were there before are deleted: "
                f"{told.message}"
            )
            raise told from None

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job failed; what its tasks wrote stays."""
        _tell(self._options, messages, "written by a job that failed, which stay")


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of the batches of one query; see ``stream_writer``."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRows:
        """Write the rows of one task of one batch.

        Raises:
            UprSparkError: see ``upr_spark.sink.sending``.
        """
        context = TaskContext.get()
        query = batch = partition = None
        if context is not None:
            query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
            partition = context.partitionId()
        if query is None or batch is None or partition is None:
            raise UprSparkError(
                "NO_BATCH_ID",
                f"Spark does not tell the task its query and batch ({_QUERY_ID} is {query}, {_BATCH_ID} is {batch}), "
                "so a batch that comes again would not be recognised",
                hint="write from foreachBatch with the option writeId, and report this with your version of Spark",
            )
        return TaskRows(
            write_batches(self._options, seed("stream", query, batch, partition), iterator)
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """All tasks of a batch are done: count the rows."""
        _tell(self._options, messages, f"written by batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """A batch failed; what its tasks wrote stays, and is not applied again when the batch is run again."""
        _tell(self._options, messages, f"written by batch {batchId}, which failed; they stay")


def _tell(options: SinkOptions, messages: list[WriterCommitMessage | None], words: str) -> None:
    rows = sum(message.rows for message in messages if isinstance(message, TaskRows))
    _logger.info("%s: %d rows %s", options.connection.bucket, rows, words)


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """Return the writer of a batch job.

    Args:
        options: as Spark gives them.
        schema: of the rows.
        overwrite: whether the mode is "overwrite".

    Raises:
        UprSparkError: UPR_BAD_OPTION, UPR_BAD_SCHEMA, UPR_OVERWRITE_REFUSED; for an overwrite also what the server
            answered, which is asked where its bucket is.
    """
    read = read_sink_options(options, streaming=False)
    check_schema(schema, read.mode, ignore_extra=read.ignore_extra)
    if overwrite and not read.allow_truncate:
        raise UprSparkError(
            _REFUSED,
            f'mode("overwrite") would delete every key of bucket {read.connection.bucket} that the job does not write',
            hint='write with mode("append"), which sets the keys that are written and leaves the others; or, to have '
            "the others deleted, set allowTruncate to true",
        )
    if overwrite and read.write_id is not None:
        raise bad_option(
            "writeId",
            read.write_id,
            'with mode("overwrite") a job that is run again would take the rows it wrote before for old ones, and '
            "delete them",
            "leave it out: an overwrite may be run again as often as you like",
        )
    return BatchWriter(read, overwrite=overwrite)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """Return the writer of a streaming query.

    Args:
        options: as Spark gives them.
        schema: of the rows.
        overwrite: whether the output mode is "complete".

    Raises:
        UprSparkError: UPR_BAD_OPTION, UPR_BAD_SCHEMA, UPR_OVERWRITE_REFUSED.
    """
    read = read_sink_options(options, streaming=True)
    check_schema(schema, read.mode, ignore_extra=read.ignore_extra)
    if overwrite:
        raise UprSparkError(
            _REFUSED,
            'outputMode("complete") would replace all keys with every batch',
            hint='write the result from foreachBatch with mode("append") and the option writeId: that sets the keys it has',
        )
    return StreamWriter(read)
