"""One task's rows to the server: a chunk is on its way while the next one is gathered."""

import secrets
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import pyarrow as pa

from upr_client import Bucket
from upr_protocol.errors import PartlyWrittenError, UnknownOutcomeError, UprError
from upr_spark.errors import UprSparkError
from upr_spark.sink.chunks import Chunk, Chunks
from upr_spark.sink.input import check_all_came
from upr_spark.sink.options import SinkOptions
from upr_spark.sink.rows import columns_of


def write_batches(options: SinkOptions, seed: bytes, batches: Iterable[pa.RecordBatch]) -> int:
    """Write record batches in their order, and return how many rows they had.

    Args:
        seed: says who writes, see ``upr_spark.sink.chunks``; the same for every attempt of a task.

    Raises:
        UprSparkError: UPR_INPUT_BROKE_OFF, not all rows came. UPR_BAD_ROW or UPR_ROLLBACK_ROW, and nothing of that record batch was sent, nor of those that
            the task still held; or what the server refused, or UPR_UNKNOWN_OUTCOME.
    """
    chunks = Chunks(seed, options.chunk_bytes, options.block_rows)
    rows = 0
    with _Sender(options) as sender:
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

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._resources = ExitStack()
        self._background = self._resources.enter_context(ThreadPoolExecutor(1, "upr-sink"))
        self._bucket: Bucket | None = None
        self._under_way: Future[None] | None = None
        self._suffix = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        durability = self._options.durability
        try:
            bucket.write_blocks(chunk.blocks, durability, once=chunk.name + self._suffix)
        except PartlyWrittenError:
            # An attempt before this one had partitions refused. What it wrote behind them must not stay the newest:
            # under new names this chunk is applied again, and so is everything that follows.
            self._suffix = f"-{secrets.token_hex(8)}"
            bucket.write_blocks(chunk.blocks, durability, once=chunk.name + self._suffix)
