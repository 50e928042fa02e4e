"""Writers that Spark is given, made on the driver and pickled from there; a task's rows go out in chunks with digests.

A chunk's digest is one of who writes (the job or query, its batch, the task's partition), of all chunks of the task
before it, and of its own blocks. The chunks of a task go to the places of a name, one after the other (see
``upr_protocol.write_places``). So the same chunk sent by another attempt of the task is applied once. From the first
difference on, in content or in order, everything has another digest: the server refuses it there, and it goes to the
places of another name, which the first of these digests makes.
Where a chunk ends depends on the rows alone, and not on the record batches in which Spark hands them over. A chunk is on
its way while the next one is gathered.
"""

import hashlib
import json
import logging
import secrets
import select
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from types import FrameType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from upr_client.arrow import blocks, row_sizes
from upr_client.lowlevel import write_blocks
from upr_client.types import Bucket
from upr_protocol.block import Block
from upr_protocol.errors import ContentDiffersError, UnknownOutcomeError, UprError
from upr_protocol.write_places import PLACE_BLOCKS, PLACES, place_number
from upr_spark.errors import UprSparkError, bad_option
from upr_spark.sink.options import SinkOptions, read_sink_options
from upr_spark.sink.rows import check_named, check_schema, columns_of
from upr_spark.sink.truncation import delete_older, look

_FORMAT: Final = "upr-spark-2"
_BATCHES: Final = 64
"""Batches of a stream that share a name."""
_BATCH_PLACES: Final = PLACES // _BATCHES
"""Places that each of them has there."""
_LENGTHS: Final = struct.Struct("<6Q")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that are sent together.

    Args:
        digest: 32 bytes.
        blocks: 1 to PLACE_BLOCKS.
    """

    digest: bytes
    blocks: list[Block]


Place = tuple[str, int]
"""A name, and a place of it."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a job, or of a batch of a query: the same for all its attempts.

    Args:
        seed: what its first chunk's digest goes on from.
        places: where its chunks go, in their order; without an end.
    """

    seed: bytes
    places: Iterator[Place]


def batch_task(kind: str, write: str, partition: int) -> Task:
    return Task(_identity(kind, write, partition), places(kind, write, partition))


def stream_task(query: str, batch: int, partition: int) -> Task:
    """Return a task of one batch of a query.

    A batch comes when the one before it is done, so the first places of many batches are of one name, in the order of
    the batches. Once the next batch is there, the server takes nothing new for a batch under that name.
    """
    shared = _name("stream", query, partition, batch // _BATCHES)
    first = batch % _BATCHES * _BATCH_PLACES
    identity = ("stream", query, batch, partition)
    few = ((shared, place) for place in range(first, first + _BATCH_PLACES))
    return Task(_identity(*identity), chain(few, places(*identity)))


def places(*identity: str | int) -> Iterator[Place]:
    """Yield the places of as many names as are needed."""
    for number in count():
        name = _name(*identity, number)
        for place in range(PLACES):
            yield name, place


def _name(*identity: str | int) -> str:
    return f"spark-{_identity('name', *identity)[:20].hex()}"


def _identity(*identity: str | int) -> bytes:
    return hashlib.sha256(json.dumps([_FORMAT, *identity]).encode()).digest()


class Chunks:
    """Gathers the rows of one task.

    Args:
        seed: of the task.
        chunk_bytes: what a chunk takes at most, unless it has one row.
        block_rows: rows of a block at most, 1 to 2^18.
    """

    def __init__(self, seed: bytes, chunk_bytes: int, block_rows: int) -> None:
        self._digest = seed
        self._chunk_bytes = chunk_bytes
        self._block_rows = block_rows
        self._keys: list[pa.Array] = []
        self._values: list[pa.Array] = []
        self._bytes = 0

    def add(self, keys: pa.Array, values: pa.Array) -> Iterator[Chunk]:
        """Take rows that were checked, and return the chunks that are full with them."""
        ends = np.cumsum(row_sizes(keys, values))
        first, floor = 0, 0
        while first < len(ends):
            room = self._chunk_bytes - self._bytes
            last = int(np.searchsorted(ends, floor + room, side="right"))
            if last == first and not self._keys:
                last += 1
            if last > first:
                self._keys.append(keys.slice(first, last - first).cast(pa.binary()))
                self._values.append(values.slice(first, last - first).cast(pa.binary()))
                self._bytes += int(ends[last - 1]) - floor
                first, floor = last, int(ends[last - 1])
            if first < len(ends) or self._bytes > self._chunk_bytes:
                yield from self._take()

    def rest(self) -> Iterator[Chunk]:
        if self._keys:
            yield from self._take()

    def _take(self) -> Iterator[Chunk]:
        keys, values = pa.chunked_array(self._keys), pa.chunked_array(self._values)
        self._keys, self._values, self._bytes = [], [], 0
        made = list(blocks(keys, values, block_rows=self._block_rows))
        # With few rows in a block there may be more blocks than a place has.
        for first in range(0, len(made), PLACE_BLOCKS):
            part = made[first : first + PLACE_BLOCKS]
            self._digest = _digest(self._digest, part)
            yield Chunk(self._digest, part)


def _digest(before: bytes, made: list[Block]) -> bytes:
    digest = hashlib.sha256(before)
    for block in made:
        columns = (
            block.runs.tobytes(),
            block.ops,
            block.key_offsets,
            block.keys,
            block.value_offsets,
            block.values,
        )
        digest.update(_LENGTHS.pack(*map(len, columns)))
        for column in columns:
            digest.update(column)
    return digest.digest()


_CLOSED: Final[int] = getattr(select, "POLLRDHUP", 0)


def check_all_came() -> None:
    """Call it in a task of Spark, when there are no more rows. Elsewhere, and where it cannot be known, it does nothing.

    Raises:
        UprSparkError: UPR_INPUT_BROKE_OFF, Spark ended the rows because the task had failed.
    """
    frame: FrameType | None = sys._getframe()
    # The stream that the rows came from is nowhere to be had but in the function that runs the worker.
    while frame is not None:
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:
            if _was_closed(frame.f_locals["infile"]):
                raise UprSparkError(
                    "INPUT_BROKE_OFF",
                    "the rows of this task ended because what feeds it failed",
                    hint="the reason is in the other error of the same task; Spark runs it again",
                    retriable=True,
                )
            return
        frame = frame.f_back


def _was_closed(stream: Any) -> bool:
    """Whether the other side of a socket sends nothing more."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):
        return False
    if not _CLOSED:
        return False
    poll = select.poll()
    poll.register(descriptor, _CLOSED)
    return any(event & _CLOSED for _, event in poll.poll(0))


def write_batches(options: SinkOptions, task: Task, batches: Iterable[pa.RecordBatch]) -> int:
    """Write record batches in their order, and return how many rows they had.

    Args:
        task: says who writes, see ``upr_spark.sink.writers``.

    Raises:
        UprSparkError: UPR_INPUT_BROKE_OFF, not all rows came. UPR_BAD_ROW or UPR_ROLLBACK_ROW, and nothing of that record batch was sent, nor of those that
            the task still held; or what the server refused, or UPR_UNKNOWN_OUTCOME.
    """
    chunks = Chunks(task.seed, options.chunk_bytes, options.block_rows)
    rows = 0
    with _Sender(options, task.places) as sender:
        for batch in batches:
            if batch.num_rows:
                rows += batch.num_rows
                for chunk in chunks.add(*columns_of(batch, options.mode)):
                    sender.send(chunk)
        check_all_came()
        for chunk in chunks.rest():
            sender.send(chunk)
        sender.finish()
    return rows


class _Sender:
    """Sends one chunk at a time, in the background. It connects when there is something to send."""

    def __init__(self, options: SinkOptions, places: Iterator[Place]) -> None:
        self._options = options
        self._places = places
        self._resources = ExitStack()
        self._background = self._resources.enter_context(ThreadPoolExecutor(1, "upr-sink"))
        self._bucket: Bucket | None = None
        self._under_way: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def send(self, chunk: Chunk) -> None:
        """Wait until the chunk before was written, and send this one: two of them would overtake each other."""
        self.finish()
        if self._bucket is None:
            connection = self._options.connection
            client = self._resources.enter_context(connection.open())
            self._bucket = client.bucket(connection.bucket)
        self._under_way = self._background.submit(self._write, self._bucket, chunk)

    def finish(self) -> None:
        """Wait until everything that was sent was written.

        Raises:
            UprSparkError: it was not, or that is not known.
        """
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            under_way.result()
        except UnknownOutcomeError as error:
            error.hint = (
                "Spark runs the task again; what was written already is not applied a second time"
            )
            raise UprSparkError.of(error) from None
        except UprError as error:
            raise UprSparkError.of(error) from None

    def _write(self, bucket: Bucket, chunk: Chunk) -> None:
        try:
            self._write_to_next_place(bucket, chunk)
        except ContentDiffersError:
            # Another attempt had other rows: what it wrote stays, and these are written as well.
            self._places = places(chunk.digest.hex())
            self._write_to_next_place(bucket, chunk)

    def _write_to_next_place(self, bucket: Bucket, chunk: Chunk) -> None:
        name, place = next(self._places)
        write_blocks(
            bucket,
            chunk.blocks,
            self._options.durability,
            once=name,
            first_number=place_number(place, chunk.digest),
        )


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
        of_table: whether the options are those of a table of SQL.
    """

    def __init__(self, options: SinkOptions, *, overwrite: bool, of_table: bool) -> None:
        self._options = options
        self._of_table = of_table
        self._write_id = options.write_id or secrets.token_hex(16)
        self._kind = "batch" if options.write_id is None else "named"
        self._beginning = None
        if overwrite:
            try:
                self._beginning = look(options)
            except UprError as error:
                raise UprSparkError.of(error) from None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRows:
        """Write the rows of one task.

        Raises:
            UprSparkError: see ``upr_spark.sink.writers``.
        """
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        rows = map(check_named, iterator) if self._of_table else iterator
        return TaskRows(
            write_batches(self._options, batch_task(self._kind, self._write_id, partition), rows)
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
            UprSparkError: see ``upr_spark.sink.writers``.
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
            write_batches(self._options, stream_task(query, int(batch), partition), iterator)
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


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool, *, of_table: bool = False
) -> BatchWriter:
    """Return the writer of a batch job.

    Args:
        options: as Spark gives them.
        schema: of the rows.
        overwrite: whether the mode is "overwrite".
        of_table: whether the options came with the columns of a table of SQL.

    Raises:
        UprSparkError: UPR_BAD_OPTION, UPR_BAD_SCHEMA, UPR_OVERWRITE_REFUSED; for an overwrite also what the server
            answered, which is asked where its bucket is. UPR_UNAVAILABLE, no host has an address.
    """
    read = read_sink_options(options, streaming=False)
    check_schema(schema, read.mode, ignore_extra=read.ignore_extra)
    if overwrite and of_table:
        # Without a row nothing would show whether the options are those of the table that was meant.
        raise UprSparkError(
            _REFUSED,
            f"a table of SQL cannot be overwritten: bucket {read.connection.bucket}",
            hint='write a DataFrame with mode("overwrite") and the options endpoint and allowTruncate',
        )
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
    read.connection.check_hosts()
    return BatchWriter(read, overwrite=overwrite, of_table=of_table)


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
