"""The sink's writers, driven as Spark drives them, against a real server."""

import dataclasses
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.harness import RunningServer
from tests.spark.sink_rows import (
    APPLY,
    UPSERT,
    Place,
    as_task,
    batches,
    refusal,
    some_rows,
)
from upr_client.errors import PartitionNotActiveError
from upr_client.testing import ScriptedServer
from upr_client.types import Bucket
from upr_protocol.partitioning import partition_of
from upr_spark.sink.writers import Chunks, batch_writer, stream_writer

StartServer = Callable[..., RunningServer]

QUERY = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "7"}
SMALL = {"maxInFlightBytes": "1m"}
"""Chunks of half a MiB, so that a task has several."""


# What is written


@pytest.mark.parametrize("more", [{}, SMALL, {"batchRows": "97", "durability": "memory"}])
def test_upsert_keeps_the_last_value_of_each_key(place: Place, more: dict[str, str]) -> None:
    rows = some_rows(20_000, keys=701)
    writer = batch_writer(place.options(**more), UPSERT, overwrite=False)
    done = writer.write(batches(rows, 3000))
    writer.commit([done, None])
    assert done.rows == 20_000
    assert place.state() == dict(rows)
    assert place.mutations() == 20_000


def test_text_is_written_as_utf8(place: Place) -> None:
    schema = StructType([StructField("value", StringType()), StructField("key", StringType())])
    batch = pa.record_batch([pa.array(["ü", ""]), pa.array(["schlüssel", "b"])], ["value", "key"])
    large = batch.cast(pa.schema([("value", pa.large_string()), ("key", pa.large_string())]))
    writer = batch_writer(place.options(), schema, overwrite=False)
    writer.write(iter([batch, large]))
    assert place.state() == {"schlüssel".encode(): "ü".encode(), b"b": b""}
    assert place.mutations() == 4


def test_apply_obeys_op_and_takes_what_the_source_gives(place: Place) -> None:
    kinds = {
        "partition": (IntegerType(), pa.int32()),
        "seqno": (LongType(), pa.int64()),
        "op": (StringType(), pa.string()),
        "key": (BinaryType(), pa.binary()),
        "value": (BinaryType(), pa.binary()),
        "failover_id": (StringType(), pa.string()),
        "marker": (LongType(), pa.int64()),
        "time": (TimestampType(), pa.timestamp("us", "UTC")),
    }
    schema = StructType([StructField(name, kind) for name, (kind, _) in kinds.items()])
    rows = [("set", b"a", b"1"), ("set", b"b", b"1"), ("delete", b"a", None)]
    # What a delete carries besides its key is of no use.
    rows += [("set", b"c", b""), ("delete", b"b", b"old"), ("set", b"a", b"2")]
    arrays = {name: pa.nulls(len(rows), kind) for name, (_, kind) in kinds.items()}
    for name, column in zip(("op", "key", "value"), zip(*rows, strict=True), strict=True):
        arrays[name] = pa.array(column, kinds[name][1])
    writer = batch_writer(place.options(writeMode="apply"), schema, overwrite=False)
    writer.write(iter([pa.record_batch(arrays)]))
    assert place.state() == {b"a": b"2", b"c": b""}
    assert place.mutations() == 6


def test_a_task_without_rows_needs_no_server() -> None:
    writer = batch_writer({"endpoint": "127.0.0.1:1"}, UPSERT, overwrite=False)
    assert writer.write(iter([])).rows == 0
    writer.abort([None, None])


# What is refused


def schema_of(*fields: tuple[str, Any]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields])


KEY, VALUE, OP = ("key", BinaryType()), ("value", BinaryType()), ("op", StringType())


@pytest.mark.parametrize("make", [batch_writer, stream_writer])
@pytest.mark.parametrize(
    ("schema", "more", "column"),
    [
        (schema_of(VALUE), {}, "key"),
        (schema_of(KEY), {}, "value"),
        (schema_of(KEY, KEY, VALUE), {}, "key"),
        (schema_of(KEY, VALUE), {"writeMode": "apply"}, "op"),
        (schema_of(KEY, ("value", DoubleType())), {}, "value"),
        (schema_of(KEY, VALUE, ("op", BinaryType())), {"writeMode": "apply"}, "op"),
        (schema_of(KEY, VALUE, OP), {}, "op"),
        (schema_of(KEY, VALUE, ("colour", StringType())), {}, "colour"),
        (schema_of(("Key", BinaryType()), VALUE), {}, "key"),
    ],
)
def test_a_schema_is_refused_when_the_writer_is_made(
    make: Any, schema: StructType, more: dict[str, str], column: str
) -> None:
    error = refusal(lambda: make({"endpoint": "127.0.0.1:1", **more}, schema, False))
    assert (error.code, error.details["column"], error.retriable) == ("BAD_SCHEMA", column, False)
    assert column in error.message


def test_extra_columns_may_be_ignored(place: Place) -> None:
    schema = schema_of(KEY, VALUE, ("colour", StringType()))
    more = {"IGNOREEXTRACOLUMNS": "true"}
    writer = batch_writer(place.options(**more), schema, overwrite=False)
    writer.write(iter([pa.record_batch({"colour": ["red"], "key": [b"a"], "value": [b"1"]})]))
    assert place.state() == {b"a": b"1"}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"writeMode": "insert"}, "writeMode"),
        ({"durability": "replicated"}, "durability"),
        ({"batchRows": "0"}, "batchRows"),
        ({"maxInFlightBytes": "100"}, "maxInFlightBytes"),
        ({"maxInFlightBytes": "2GiB"}, "maxInFlightBytes"),
        ({"allowTruncate": "maybe"}, "allowTruncate"),
        ({"writeModus": "apply"}, "writeModus"),
        ({"endpoint": ""}, "endpoint"),
    ],
)
def test_bad_options_are_refused_when_the_writer_is_made(more: dict[str, str], name: str) -> None:
    for make in (batch_writer, stream_writer):
        given = {"endpoint": "127.0.0.1:1", **more}
        error = refusal(lambda make=make, given=given: make(given, UPSERT, False))
        assert (error.code, error.details["option"]) == ("BAD_OPTION", name)


BAD_ROWS = [
    ("upsert", (b"\xab\xcd", None), "BAD_ROW", "value of key abcd is null"),
    ("upsert", (None, b"1"), "BAD_ROW", "the key of row 3 is null"),
    ("upsert", (b"", b"1"), "BAD_ROW", "key '' is 0 bytes; must be 1 to 4096"),
    ("upsert", (b"k" * 4097, b"1"), "BAD_ROW", f"key {'6b' * 16}... is 4097 bytes"),
    ("upsert", (b"big", bytes(20 * 2**20 + 1)), "BAD_ROW", "value of key 626967 is 20971521"),
    ("apply", ("set", b"\xab", None), "BAD_ROW", "value of key ab is null and its op is set"),
    ("apply", ("put", b"\xab", b"1"), "BAD_ROW", "op of key ab is 'put'"),
    ("apply", ("delete", None, None), "BAD_ROW", "the key of row 3 is null"),
    ("apply", ("rollback", None, None), "ROLLBACK_ROW", "newer rows of its partition never"),
]


@pytest.mark.parametrize(("mode", "row", "code", "words"), BAD_ROWS)
def test_a_bad_row_is_named_and_nothing_is_written(
    place: Place, mode: str, row: Any, code: str, words: str
) -> None:
    good: Any = ("set", b"good", b"1") if mode == "apply" else (b"good", b"1")
    schema = APPLY if mode == "apply" else UPSERT
    writer = batch_writer(place.options(writeMode=mode), schema, overwrite=False)
    error = refusal(lambda: writer.write(batches([good, good, good, row, good])))
    assert (error.code, error.retriable) == (code, False)
    assert words in error.message
    assert place.mutations() == 0


# What comes again


@pytest.mark.parametrize("more", [{}, SMALL])
def test_a_task_that_is_tried_again_applies_nothing_twice(
    place: Place, more: dict[str, str]
) -> None:
    rows = some_rows(20_000, keys=15_000)
    writer = batch_writer(place.options(**more), UPSERT, overwrite=False)
    writer.write(batches(rows))
    with place.opened() as bucket:
        bucket.set(b"3", b"of another writer")
    # As it comes to an executor, and in other record batches.
    again = pickle.loads(pickle.dumps(writer))
    assert again.write(batches(rows, 777)).rows == 20_000
    assert place.state() == {**dict(rows), b"3": b"of another writer"}
    assert place.mutations() == 20_001


def test_an_attempt_that_broke_off_is_gone_on_with(place: Place) -> None:
    rows = some_rows(20_000)
    writer = batch_writer(place.options(**SMALL), UPSERT, overwrite=False)

    def breaks_off() -> Iterator[pa.RecordBatch]:
        yield from batches(rows[:15_000])
        raise ConnectionResetError("the executor's other half is gone")

    with pytest.raises(ConnectionResetError):
        writer.write(breaks_off())
    assert 0 < place.mutations() <= 15_000
    writer.write(batches(rows))
    assert place.state() == dict(rows)
    assert place.mutations() == 20_000


def test_two_attempts_at_the_same_time_apply_everything_once(place: Place) -> None:
    rows = some_rows(30_000, keys=25_000)
    writer = batch_writer(place.options(**SMALL), UPSERT, overwrite=False)
    together = threading.Barrier(2)
    done = []

    def attempt(size: int) -> None:
        together.wait()
        done.append(writer.write(batches(rows, size)).rows)

    threads = [threading.Thread(target=attempt, args=(size,)) for size in (900, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [30_000, 30_000]
    assert place.state() == dict(rows)
    assert place.mutations() == 30_000


@pytest.mark.parametrize("changed", ["first", "last", "order", "fewer"])
def test_an_attempt_with_other_rows_is_applied_from_the_first_difference_on(
    place: Place, changed: str
) -> None:
    """The keys come again and again, so that what is applied too little or in another order shows."""
    rows = some_rows(20_000, keys=9000)
    writer = batch_writer(place.options(**SMALL), UPSERT, overwrite=False)
    writer.write(batches(rows))
    other = list(rows)
    if changed == "first":
        other[0] = (other[0][0], b"X" + other[0][1][1:])
    elif changed == "last":
        other[-1] = (other[-1][0], b"X" + other[-1][1][1:])
    elif changed == "order":
        other.reverse()
    else:
        other = other[1:]
    writer.write(batches(other))
    assert place.state() == {**dict(rows), **dict(other)}
    applied = place.mutations() - 20_000
    assert applied == len(other) if changed != "last" else 0 < applied < 10_000


def test_other_tasks_jobs_and_batches_are_no_repetition(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows(10)
    given = place.options()
    as_task(monkeypatch, 1)
    writer = batch_writer(given, UPSERT, overwrite=False)
    writer.write(batches(rows))
    as_task(monkeypatch, 2)
    writer.write(batches(rows))
    assert place.mutations() == 20
    batch_writer(given, UPSERT, overwrite=False).write(batches(rows))
    assert place.mutations() == 30
    for partition, properties, expected in (
        (2, QUERY, 40),
        (2, QUERY, 40),
        (1, QUERY, 50),
        (2, {**QUERY, "streaming.sql.batchId": "8"}, 60),
        (2, {**QUERY, "sql.streaming.queryId": "r"}, 70),
        (2, QUERY, 70),
    ):
        as_task(monkeypatch, partition, **properties)
        # A query that was started again has a writer of its own.
        stream_writer(given, UPSERT, overwrite=False).write(batches(rows))
        assert place.mutations() == expected


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names that were used to write."""
    used: set[str] = set()
    write = Bucket._write_blocks

    def noting(bucket: Bucket, blocks: Any, durability: str, once: str, number: int) -> Any:
        used.add(once)
        return write(bucket, blocks, durability, once, number)

    monkeypatch.setattr(Bucket, "_write_blocks", noting)
    return used


def with_small_chunks(writer: Any, size: int) -> Any:
    """The writer, with chunks of so many bytes instead of at least half a MiB."""
    writer._options = dataclasses.replace(writer._options, chunk_bytes=size)
    return writer


def test_a_task_of_many_chunks_has_one_name(place: Place, names: set[str]) -> None:
    rows = some_rows(500, keys=200)
    writer = with_small_chunks(batch_writer(place.options(), UPSERT, overwrite=False), 2300)
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    assert len(list(Chunks(b"", 2300, 100).add(*columns))) > 20
    for _ in range(2):
        writer.write(batches(rows))
    assert (len(names), place.mutations()) == (1, 500)
    # Rows in another order take one more, however many chunks differ.
    for _ in range(2):
        writer.write(batches(rows[::-1]))
    assert (len(names), place.mutations()) == (2, 1000)
    assert place.state() == {**dict(rows), **dict(rows[::-1])}


def test_the_batches_of_a_query_share_names(
    place: Place, monkeypatch: pytest.MonkeyPatch, names: set[str]
) -> None:
    writer = with_small_chunks(stream_writer(place.options(), UPSERT, overwrite=False), 2300)
    for batch in (*range(10), 9, 8):
        as_task(
            monkeypatch, 0, **{"sql.streaming.queryId": "q", "streaming.sql.batchId": f"{batch}"}
        )
        writer.write(batches(some_rows(60, tag=batch)))
    assert (len(names), place.mutations()) == (1, 600)
    # Batches that are larger have one of their own besides.
    rows = some_rows(500, tag=50)
    as_task(monkeypatch, 0, **{"sql.streaming.queryId": "q", "streaming.sql.batchId": "50"})
    for _ in range(2):
        writer.write(batches(rows))
    assert (len(names), place.mutations()) == (2, 1100)


@pytest.mark.parametrize("more", [0, 60])
def test_a_query_that_goes_back_with_other_rows_has_them_all_applied(
    place: Place, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """Its checkpoint was put back, say: later batches under the name are there already."""
    writer = with_small_chunks(stream_writer(place.options(), UPSERT, overwrite=False), 2300)
    rows = {batch: some_rows(60, tag=batch) for batch in (1, 2)}
    other = [*rows[1], *some_rows(more, tag=3)] if more else rows[1][::-1]
    for batch, given in ((1, rows[1]), (2, rows[2]), (1, other)):
        as_task(
            monkeypatch, 0, **{"sql.streaming.queryId": "q", "streaming.sql.batchId": f"{batch}"}
        )
        writer.write(batches(given))
    # The chunks that are the same are known.
    assert place.state() == {**dict(rows[2]), **dict(other[60:] or other)}
    if not more:
        assert place.mutations() == 180


def test_few_rows_in_a_block_make_more_chunks(place: Place) -> None:
    rows = some_rows(1000, size=1, keys=900)
    writer = batch_writer(place.options(batchRows="1"), UPSERT, overwrite=False)
    for _ in range(2):
        writer.write(batches(rows))
    assert place.state() == dict(rows)
    assert place.mutations() == 1000


def test_a_write_with_a_name_is_applied_once_also_by_another_job(place: Place) -> None:
    rows = some_rows(10)
    for name, expected in (("load 1", 10), ("load 1", 10), ("load 2", 20)):
        writer = batch_writer(place.options(writeId=name), UPSERT, overwrite=False)
        assert writer.write(batches(rows)).rows == 10
        assert place.mutations() == expected
    error = refusal(lambda: stream_writer(place.options(writeId="x"), UPSERT, overwrite=False))
    assert (error.code, error.details["option"]) == ("BAD_OPTION", "writeId")


def test_a_stream_that_is_not_told_its_batch_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream_writer(place.options(), UPSERT, overwrite=False)
    as_task(monkeypatch, 0, **{"sql.streaming.queryId": "q"})
    assert refusal(lambda: writer.write(batches(some_rows(3)))).code == "NO_BATCH_ID"
    assert place.mutations() == 0


def test_what_partitions_refused_is_applied_by_the_next_attempt() -> None:
    rows = some_rows(20_000, keys=9000)
    refusing = partition_of(rows[7000][0])
    with ScriptedServer() as server:
        writer = batch_writer({"endpoint": server.target, **SMALL}, UPSERT, overwrite=False)
        server.refuse(refusing, PartitionNotActiveError("dead", hint="ask"))
        error = refusal(lambda: writer.write(batches(rows)))
        assert error.code == "PARTITION_NOT_ACTIVE"
        server.accept(refusing)
        assert writer.write(batches(rows)).rows == 20_000
        assert server.state() == dict(rows)
        assert Place(server.target).mutations() == 20_000


# Rows that end too early


@pytest.mark.parametrize("closed", [False, True])
def test_rows_that_end_because_their_source_failed_are_not_all_written(
    place: Place, closed: bool
) -> None:
    """To Arrow the end of a broken input is like any other, so the connection itself is looked at."""
    rows = some_rows(10_000)
    writer = batch_writer(place.options(**SMALL), UPSERT, overwrite=False)
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:

        def main(infile: Any) -> int:
            return writer.write(batches(rows)).rows

        if not closed:
            theirs.send(b"what is behind the rows")
            assert main(stream) == 10_000
            return
        theirs.shutdown(socket.SHUT_WR)
        error = refusal(lambda: main(stream))
    assert (error.code, error.retriable) == ("INPUT_BROKE_OFF", True)
    whole = place.mutations()
    assert 0 < whole < 10_000
    # What was written before are chunks that every attempt has.
    assert writer.write(batches(rows)).rows == 10_000
    assert place.mutations() == 10_000


# A server that fails


@pytest.mark.crash
def test_a_server_that_is_killed_in_the_middle_of_a_task_is_gone_on_with(
    server_process: StartServer,
) -> None:
    server = server_process()
    place = Place(server.target)
    rows = some_rows(30_000, keys=20_000)

    def killing() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(rows)):
            if number == 15:
                server.kill()
                server.start()
            yield batch

    writer = batch_writer(place.options(**SMALL), UPSERT, overwrite=False)
    assert writer.write(killing()).rows == 30_000
    assert place.state() == dict(rows)
    assert place.mutations() == 30_000


def test_an_outcome_that_is_not_known_is_told() -> None:
    with ScriptedServer() as server:
        given = {"endpoint": server.target, "retryTimeout": "200ms"}
        writer = batch_writer(given, UPSERT, overwrite=False)
        server.lose_answers(1_000_000)
        error = refusal(lambda: writer.write(batches(some_rows(3))))
        assert (error.code, error.retriable) == ("UNKNOWN_OUTCOME", True)
        assert server.state() == dict(some_rows(3))


def test_a_server_that_cannot_be_reached_is_told() -> None:
    given = {"endpoint": "127.0.0.1:1", "retryTimeout": "100ms", "connectTimeout": "1s"}
    writer = batch_writer(given, UPSERT, overwrite=False)
    error = refusal(lambda: writer.write(batches(some_rows(3))))
    assert (error.code, error.retriable) == ("UNAVAILABLE", True)
