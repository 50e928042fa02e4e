"""The sink in a real Spark session."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import upr_spark
from tests.conftest import StartServer
from tests.spark.sink_rows import Place, new_place
from upr_spark.errors import find_error


@pytest.fixture
def session(spark: Any) -> Any:
    upr_spark.register(spark)
    return spark


def save(frame: Any, place: Place, mode: str = "append", **more: str) -> None:
    frame.write.format("upr").mode(mode).options(**place.options(**more)).save()


def failure(call: Callable[[], object]) -> Any:
    with pytest.raises(Exception, match="UPR_") as caught:
        call()
    return find_error(caught.value)


@pytest.mark.long
def test_a_batch_is_written_and_overwritten(session: Any, place: Place) -> None:
    numbers = session.range(5000).selectExpr(
        "cast(id as string) key", "cast(id * 2 as string) value"
    )
    save(numbers, place)
    model = {b"%d" % n: b"%d" % (2 * n) for n in range(5000)}
    assert place.state() == model

    few = numbers.where("key in ('17', '18')").selectExpr("key", "concat(value, '!') value")
    error = failure(lambda: save(few, place, "overwrite"))
    assert (error.code, error.retriable) == ("OVERWRITE_REFUSED", False)
    bad = few.selectExpr("key", "if(key = '18', null, value) value").coalesce(1)
    error = failure(lambda: save(bad, place))
    assert (error.code, error.retriable) == ("BAD_ROW", False)
    assert "3138" in error.message
    assert place.state() == model

    save(few, place, "overwrite", allowTruncate="true")
    assert place.state() == {b"17": b"34!", b"18": b"36!"}


def dying_source(folder: str) -> Any:
    """A source whose worker is killed, in the first attempt of each task, when half of the rows are handed over."""
    from pyspark import TaskContext
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(2)]

        def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            attempt = context.attemptNumber()
            Path(folder, f"{partition.value}-{attempt}").touch()
            for number in range(40):
                if attempt == 0 and number == 30:
                    os.kill(os.getpid(), 9)
                first = (partition.value * 40 + number) * 500
                keys = [b"%d" % n for n in range(first, first + 500)]
                values = [key + bytes(200) for key in keys]
                yield pa.record_batch([keys, values], names=["key", "value"])

    class Dying(DataSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def schema(self) -> str:
            return "key binary, value binary"

        def reader(self, schema: Any) -> Reader:
            return Reader()

    return Dying


@pytest.mark.long
def test_a_task_that_spark_tries_again_applies_nothing_twice(
    session: Any, place: Place, tmp_path: Path
) -> None:
    session.dataSource.register(dying_source(str(tmp_path)))
    frame = session.read.format("dying").load()
    save(frame, place, maxInFlightBytes="1m")
    attempts = {path.name for path in tmp_path.iterdir()}
    assert {"0-0", "0-1", "1-0", "1-1"} <= attempts
    assert place.state() == {b"%d" % n: b"%d" % n + bytes(200) for n in range(40_000)}
    assert place.mutations() == 40_000


def test_a_stream_is_followed_into_another_bucket_and_a_repeated_batch_applies_nothing(
    session: Any, server_process: StartServer, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    server = server_process()
    with (
        new_place(server.target) as source,
        new_place(server.target) as place,
        source.opened() as origin,
        place.opened() as copy,
    ):

        def run() -> None:
            read = session.readStream.format("upr").options(**source.options()).load()
            stream = read.writeStream.format("upr").options(
                **place.options(writeMode="apply", checkpointLocation=str(checkpoint))
            )
            query = stream.trigger(availableNow=True).start()
            try:
                assert query.awaitTermination(120)
            finally:
                query.stop()

        origin.write_many([(b"%d" % n, b"1") for n in range(2000)])
        # No key twice in a batch: what is superseded there may be gone when it is read again.
        origin.write_many([(b"%d" % n, b"2" if n % 2 else None) for n in range(2000, 3000)])
        run()
        assert place.state() == source.state()
        count = place.mutations()

        # As if the driver had died when the newest batch was written and that not yet noted.
        newest = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        newest.unlink()
        newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
        copy.set(b"1", b"of another writer")
        origin.write_many([(b"2", b"3"), (b"1999", None)])
        # What came out of the tail comes out of the store now.
        assert server.terminate() == 0
        server.start()
        run()
        assert place.mutations() == count + 3
        assert place.state() == {**source.state(), b"1": b"of another writer"}
