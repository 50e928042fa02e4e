"""The readers of the data source against a real server, called as Spark calls them; no JVM."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.service import test_dead_partitions as dead
from upr_client import Bucket, Client
from upr_spark.errors import UprSparkError
from upr_spark.source.data_source import UprDataSource, UprStreamReader
from upr_spark.source.offsets import parse_offset

_ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server; who ends it starts it again."""
    running = RunningServer(tmp_path_factory.mktemp("server")).start()
    yield running
    running.close()


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    """A client for each test."""
    with Client(server.target) as client:
        yield client


@pytest.fixture
def bucket(client: Client, request: pytest.FixtureRequest) -> Bucket:
    """A bucket of its own for each test."""
    client.admin.create_bucket(request.node.name)
    return client.bucket(request.node.name)


def _source(server: RunningServer, bucket: Bucket, /, **options: str) -> UprDataSource:
    given = {"endpoint": server.target, "bucket": bucket.name, "retrytimeout": "20s"}
    return UprDataSource(given | options)


def _stream(server: RunningServer, bucket: Bucket, /, **options: str) -> UprStreamReader:
    source = _source(server, bucket, **options)
    reader = source.streamReader(source.schema())
    assert isinstance(reader, UprStreamReader)
    return reader


def _rows(reader: Any, tasks: list[Any]) -> list[dict[str, Any]]:
    # Tasks and readers go to other processes.
    reader, tasks = pickle.loads(pickle.dumps((reader, tasks)))
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def _through_json(offset: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(offset))
    return read


def _write(bucket: Bucket, first: int, last: int) -> set[bytes]:
    keys = [b"k%d" % number for number in range(first, last)]
    bucket.write_many((key, b"v") for key in keys)
    return set(keys)


def test_a_stream_goes_on_through_a_crash_of_the_server(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    keys = _write(bucket, 0, 2000)
    reader = _stream(server, bucket)
    start = reader.initialOffset()
    end = _through_json(reader.latestOffset(start, _ALL))
    server.kill()
    server.start()

    assert {row["key"] for row in _rows(reader, reader.partitions(start, end))} == keys

    more = _write(bucket, 2000, 2010)
    later = _through_json(reader.latestOffset(end, _ALL))
    rows = _rows(reader, reader.partitions(end, later))
    assert {row["key"] for row in rows} == more
    assert {row["op"] for row in rows} == {"set"}
    # Idle partitions know the new history too.
    logs = client.admin.failover_logs(bucket)
    for partition, entry in parse_offset(later).entries.items():
        assert entry.failover_id in (None, logs[partition].newest.failover_id)
    assert reader.latestOffset(later, _ALL) is later
    reader.stop()


def test_one_cut_serves_limited_batches_also_of_the_query_that_comes_after(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    keys = _write(bucket, 0, 1000)
    reader, limit = _stream(server, bucket), ReadMaxRows(600)
    start = reader.initialOffset()
    first = _through_json(reader.latestOffset(start, limit))
    assert len(client.admin.cuts(bucket)) == 1

    _write(bucket, 1000, 1100)
    again = _stream(server, bucket)
    second = _through_json(again.latestOffset(first, limit))

    assert second["c"] == first["c"]
    found = [_rows(again, again.partitions(a, b)) for a, b in ((start, first), (first, second))]
    assert [len(rows) <= 600 for rows in found] == [True, True]
    assert {row["key"] for rows in found for row in rows} == keys
    third = _through_json(again.latestOffset(second, limit))
    assert len(_rows(again, again.partitions(second, third))) == 100
    again.latestOffset(third, limit)
    assert [cut.name for cut in client.admin.cuts(bucket)] == [third["c"]]
    reader.stop()
    again.stop()


def test_a_cut_that_is_gone_is_replaced_for_what_is_left(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    _write(bucket, 0, 1000)
    reader, limit = _stream(server, bucket), ReadMaxRows(600)
    start = reader.initialOffset()
    first = _through_json(reader.latestOffset(start, limit))
    reader.stop()
    client.admin.release_cut(bucket, first["c"])

    again = _stream(server, bucket)
    second = _through_json(again.latestOffset(first, limit))

    assert second["c"] != first["c"]
    steps = ((start, first), (first, second))
    assert sum(len(_rows(again, again.partitions(a, b))) for a, b in steps) == 1000
    again.stop()


def test_what_is_merged_across_an_end_is_read_as_it_is_now_by_reset_only(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    keys = _write(bucket, 0, 2000)
    readers = {mode: _stream(server, bucket, onrollback=mode) for mode in ("emit", "fail", "reset")}
    start = readers["reset"].initialOffset()
    end = _through_json(readers["reset"].latestOffset(start, _ALL))
    for cut in client.admin.cuts(bucket):
        client.admin.release_cut(bucket, cut.name)
    bucket.write_many((b"k%d" % number, b"later") for number in range(1000))
    # A clean stop stores everything, each partition merged into one block.
    server.terminate()
    server.start()

    for mode in ("emit", "fail"):
        with pytest.raises(UprSparkError) as raised:
            _rows(readers[mode], readers[mode].partitions(start, end))
        assert raised.value.code == "SNAPSHOT_GONE"
        assert "onRollback=reset" in raised.value.hint
    reader = readers["reset"]
    rows = _rows(reader, reader.partitions(start, end))
    assert all(row["seqno"] <= row["marker"] for row in rows)
    assert {row["value"] for row in rows} == {b"v"}
    assert len(rows) == 1000
    later = _through_json(reader.latestOffset(end, _ALL))
    rows += _rows(reader, reader.partitions(end, later))
    state = {row["key"]: row["value"] for row in rows}
    assert state.keys() == keys
    assert sum(value == b"later" for value in state.values()) == 1000
    for one in readers.values():
        one.stop()


def test_a_batch_says_when_what_it_pinned_is_gone(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    keys = _write(bucket, 0, 500)
    source = _source(server, bucket, numpartitions="3")
    schema = source.schema()
    assert len(_rows(source.reader(schema), list(source.reader(schema).partitions()))) == 500
    _write(bucket, 500, 600)

    reader = source.reader(schema)
    tasks = list(reader.partitions())
    assert len(tasks) == 3
    assert {row["key"] for row in _rows(reader, tasks)} == keys
    for cut in client.admin.cuts(bucket):
        client.admin.release_cut(bucket, cut.name)
    with pytest.raises(UprSparkError) as raised:
        reader.partitions()
    assert raised.value.code == "SNAPSHOT_GONE"
    assert "load()" in raised.value.hint


def test_what_does_not_belong_together_is_refused(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    _write(bucket, 0, 100)
    reader = _stream(server, bucket)
    start = reader.initialOffset()
    end = reader.latestOffset(start, _ALL)

    with pytest.raises(UprSparkError) as raised:
        _stream(server, bucket, partitions="0-9").latestOffset(end, _ALL)
    assert raised.value.details["option"] == "partitions"

    client.admin.create_bucket("other")
    for option in ("startingoffsets", "endingoffsets"):
        source = _source(server, bucket, bucket="other", **{option: json.dumps(end)})
        with pytest.raises(UprSparkError) as raised:
            source.reader(source.schema()).partitions()
        assert raised.value.code == "BUCKET_MISMATCH"
    with pytest.raises(UprSparkError) as raised:
        _stream(server, bucket, bucket="other").latestOffset(end, _ALL)
    assert raised.value.code == "BUCKET_MISMATCH"

    client.admin.drop_bucket("other")
    with pytest.raises(UprSparkError) as raised:
        _stream(server, bucket, bucket="missing").initialOffset()
    assert raised.value.code == "BUCKET_NOT_FOUND"
    reader.stop()


def test_a_planned_batch_of_a_bucket_that_is_made_anew_is_refused(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    client.admin.create_bucket("other")
    _write(client.bucket("other"), 0, 100)
    reader = _stream(server, bucket, bucket="other", onrollback="reset")
    start = reader.initialOffset()
    tasks = reader.partitions(start, reader.latestOffset(start, _ALL))
    client.admin.drop_bucket("other")
    client.admin.create_bucket("other")
    _write(client.bucket("other"), 0, 100)

    with pytest.raises(UprSparkError) as raised:
        _rows(reader, tasks)
    assert raised.value.code == "BUCKET_MISMATCH"
    with pytest.raises(UprSparkError) as raised:
        reader.latestOffset(_through_json(start), _ALL)
    assert raised.value.code == "BUCKET_MISMATCH"
    reader.stop()


def test_keys_and_values_can_be_text(server: RunningServer, bucket: Bucket) -> None:
    bucket.write_many([("ключ".encode(), "värde".encode()), (b"gone", None)])
    source = _source(server, bucket, keyencoding="utf8", valueencoding="utf8")
    schema = source.schema()
    rows = _rows(source.reader(schema), list(source.reader(schema).partitions()))
    assert {(row["key"], row["value"], row["op"]) for row in rows} == {
        ("ключ", "värde", "set"),
        ("gone", None, "delete"),
    }

    bucket.set(b"\xff", b"")
    narrow = StructType([StructField("key", StringType())])
    with pytest.raises(UprSparkError) as raised:
        _rows(source.reader(narrow), list(_source(server, bucket).reader(narrow).partitions()))
    assert raised.value.code == "NOT_UTF8"


def test_a_schema_may_have_some_of_the_columns_and_no_others(
    server: RunningServer, bucket: Bucket
) -> None:
    source = _source(server, bucket)
    for field, named in (
        (StructField("cas", LongType()), "cas"),
        (StructField("seqno", StringType()), "seqno"),
        (StructField("seqno", LongType(), nullable=False), "seqno"),
    ):
        for make in (source.reader, source.streamReader):
            with pytest.raises(UprSparkError) as raised:
                make(StructType([field]))
            assert raised.value.code == "BAD_SCHEMA"
            assert raised.value.details["column"] == named
    _write(bucket, 0, 10)
    reader = source.reader(StructType([StructField("marker", LongType())]))
    rows = _rows(reader, list(reader.partitions()))
    assert [set(row) for row in rows] == [{"marker"}] * 10


def test_a_batch_can_begin_and_end_at_seqnos(
    server: RunningServer, client: Client, bucket: Bucket
) -> None:
    _write(bucket, 0, 3000)
    with bucket.cut("held", partitions=[3, 4]) as cut:
        _write(bucket, 3000, 4000)
        source = _source(
            server,
            bucket,
            partitions="3,4",
            startingoffsets='{"3": 1, "4": 0}',
            endingoffsets=json.dumps(cut.seqnos),
        )
        reader = source.reader(source.schema())
        rows = _rows(reader, list(reader.partitions()))
    expected = {(3, seqno) for seqno in range(2, cut.seqnos[3] + 1)}
    expected |= {(4, seqno) for seqno in range(1, cut.seqnos[4] + 1)}
    assert {(row["partition"], row["seqno"]) for row in rows} == expected
    assert client.admin.cuts(bucket) == []

    for name, value in (("startingoffsets", '{"3": 1000}'), ("endingoffsets", '{"3": 1000}')):
        source = _source(server, bucket, partitions="3", **{name: value})
        with pytest.raises(UprSparkError) as raised:
            source.reader(source.schema()).partitions()
        assert raised.value.details["option"].lower() == name


def test_a_server_that_cannot_be_reached_is_named_without_secrets() -> None:
    options = {"endpoint": "127.0.0.1:1", "retrytimeout": "50ms", "token": "s3cret"}

    with pytest.raises(UprSparkError) as raised:
        UprDataSource(options).schema()
    assert raised.value.code == "UNAVAILABLE"
    assert raised.value.retriable
    assert "s3cret" not in str(raised.value)


def test_discovery_imports_nothing_heavy() -> None:
    program = (
        "import sys, pyspark_upr, upr_spark; pyspark_upr.DefaultSource.name();"
        "print([m for m in ('grpc', 'pyarrow', 'numpy', 'upr_client') if m in sys.modules])"
    )

    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, check=True, text=True, timeout=60)

    assert done.stdout.strip() == "[]"


def test_a_dead_partition_is_an_error_that_names_it_and_the_others_can_be_read(
    server_process: StartServer,
) -> None:
    running = dead.with_a_gap(server_process)
    running.start()
    options = {"endpoint": running.target, "bucket": "default", "retrytimeout": "20s"}
    with pytest.raises(UprSparkError, match=f"partition {dead.P}: the journal goes on") as caught:
        _batch_of(options)
    assert "UPR_DATA_DAMAGED" in str(caught.value)
    others = ",".join(f"{first}-{last}" for first, last in ((0, dead.P - 1), (dead.P + 1, 1023)))
    assert _batch_of({**options, "partitions": others})


def _batch_of(options: dict[str, str]) -> object:
    source = UprDataSource(options)
    return source.reader(source.schema()).partitions()
