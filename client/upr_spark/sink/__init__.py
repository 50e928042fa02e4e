"""Writing into a bucket from Spark; needs the extra ``upr-stream[spark]``.

What is promised: every row of a job that succeeded is written, in the order of its task. Rows that Spark hands over
once more (a task that is tried again, two attempts at the same time, a batch of a stream after a crash) are applied
once, as long as they come in the same order, within 24 hours, and while the server's memory for the newest 10,000
producers holds; each 16 MiB of a task's rows take one of them. What comes changed, or later, is applied again: then
the rows that came last are the newest, also of keys that another one wrote meanwhile.
"""

from upr_spark.sink.options import WRITE_OPTIONS
from upr_spark.sink.writers import batch_writer, stream_writer

__all__ = ["WRITE_OPTIONS", "batch_writer", "stream_writer"]
