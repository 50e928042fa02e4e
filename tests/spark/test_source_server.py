"""The readers of the data source against a real server, called as Spark calls them; no JVM."""

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, LessThan, StringStartsWith
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.conftest import StartServer
from tests.harness import RunningServer, wait_until
from tests.service import test_dead_partitions as dead
from upr_client import Client
from upr_client.types import Bucket
from upr_protocol.limits import BACKUP_CUTS_NAME, CUTS_HALF
from upr_protocol.partitioning import partition_of
from upr_spark.errors import UprSparkError
from upr_spark.source import data_source
from upr_spark.source.data_source import FilteringReader, UprDataSource, UprStreamReader
from upr_spark.source.offsets import parse_offset
from upr_spark.source.task import RangeReader

_ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server; who ends it starts it again."""
    running = RunningServer(tmp_path_factory.mktemp("server")).start()
    yield running
    running.close()


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.target) as client:
        yield client


def _source(server: RunningServer, bucket: Bucket, /, **options: str) -> UprDataSource:
    given = {"endpoint": server.target, "bucket": bucket.name, "retrytimeout": "20s"}
    return UprDataSource({**given, "numpartitions": "2", **options})


def _stream(server: RunningServer, bucket: Bucket, /, **options: str) -> UprStreamReader:
    source = _source(server, bucket, **options)
    reader = source.streamReader(source.schema())
    assert isinstance(reader, UprStreamReader)
    return reader


def _rows(reader: Any, tasks: Sequence[Any]) -> list[dict[str, Any]]:
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


@pytest.mark.long
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
    # Without its cut it is read as long as nothing was merged over it.
    assert {row["key"] for row in _rows(reader, reader.partitions())} == keys
    bucket.write_many((key, b"later") for key in sorted(keys))
    server.terminate()
    server.start()
    with pytest.raises(UprSparkError) as raised:
        _rows(reader, reader.partitions())
    assert raised.value.code == "SNAPSHOT_GONE"
    assert "load()" in raised.value.hint


@pytest.mark.long
def test_loads_take_the_place_of_those_that_nobody_reads(
    server: RunningServer, client: Client, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = _write(bucket, 0, 100)
    client.admin.create_cut(bucket, "mine")
    reader = _stream(server, bucket)
    end = reader.latestOffset(reader.initialOffset(), _ALL)
    monkeypatch.setattr("upr_spark.source.server.UNUSED_SECONDS", 1000.0)
    first = _source(server, bucket, leasename="nightly")
    schema = first.schema()
    # One machine has half of a bucket's cuts.
    while len(client.admin.cuts(bucket)) < CUTS_HALF:
        _source(server, bucket).schema()
    with pytest.raises(UprSparkError) as raised:
        _source(server, bucket, retrytimeout="50ms").schema()
    assert raised.value.code == "TOO_MANY"
    kept = {cut.name for cut in client.admin.cuts(bucket)}

    monkeypatch.setattr("upr_spark.source.server.UNUSED_SECONDS", 0.0)
    for _ in range(3):
        last = _source(server, bucket)
        last.schema()
        client.admin.create_cut(bucket, f"{BACKUP_CUTS_NAME}{len(kept)}", lease=1)
        client.admin.release_cut(bucket, f"{BACKUP_CUTS_NAME}{len(kept)}")
    # So do streams.
    more = _write(bucket, 100, 110)
    assert len(_rows(reader, reader.partitions(end, reader.latestOffset(end, _ALL)))) == len(more)
    left = {cut.name for cut in client.admin.cuts(bucket)}
    gone = kept - left
    assert len(gone) == 4
    assert all(name.startswith("upr-spark-") and name.endswith("-load") for name in gone)
    assert {
        row["key"] for row in _rows(last.reader(schema), last.reader(schema).partitions())
    } == keys
    with pytest.raises(UprSparkError) as raised:
        # Those of other names stay.
        _source(server, bucket, leasename="weekly", retrytimeout="50ms").schema()
    assert raised.value.code == "TOO_MANY"
    reader.stop()


def test_a_task_renews_its_cut_also_while_nobody_asks_for_rows(
    server: RunningServer, client: Client, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(bucket, 0, 100)
    monkeypatch.setattr("upr_spark.source.task.UNUSED_SECONDS", 0.03)
    source = _source(server, bucket, numpartitions="1")
    reader = source.reader(source.schema())
    (task,) = reader.partitions()
    rows: Any = reader.read(task)
    next(rows)

    def ends() -> int:
        (cut,) = client.admin.cuts(bucket)
        return cut.expires_time

    before = ends()
    wait_until(lambda: ends() > before, "a renewed cut")
    rows.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "upr-renew"]


def test_a_batch_begins_at_a_time(server: RunningServer, client: Client, bucket: Bucket) -> None:
    old = _write(bucket, 0, 1000)
    newest = max(row["time"] for row in _read(server, bucket))
    moment = newest + timedelta(microseconds=1)
    new = _write(bucket, 1000, 1100)

    # One that has both.
    one = min({partition_of(key) for key in new} & {partition_of(key) for key in old})
    everything = _read(server, bucket)
    after = _read(
        server, bucket, startingoffsetsbytimestamp=json.dumps({one: moment.timestamp() * 1000})
    )
    assert len(after) < len(everything)
    of_one = [row for row in everything if row["partition"] == one]
    assert len(everything) - len(after) == len([r for r in of_one if r["key"] in old])
    begun = _read(server, bucket, startingtimestamp=moment.isoformat())
    assert {row["key"] for row in begun} == new
    source = _source(server, bucket, startingtimestamp="2100-01-01T00:00:00Z")
    reader = source.reader(source.schema())
    _write(bucket, 1100, 3000)
    assert _rows(reader, list(reader.partitions())) == []
    ends = json.dumps({one: min(row["seqno"] for row in of_one) - 1, 3: -1})
    left = _read(server, bucket, endingoffsets=ends)
    assert {row["partition"] for row in everything} - {row["partition"] for row in left} == {one}


def _read(server: RunningServer, bucket: Bucket, **options: str) -> list[dict[str, Any]]:
    source = _source(server, bucket, **options)
    reader = source.reader(source.schema())
    return _rows(reader, list(reader.partitions()))


def test_what_conditions_leave_out_is_not_sent(
    server: RunningServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = _write(bucket, 0, 300)
    used = []
    real = RangeReader

    def spied(server: Any, settings: Any, *rest: Any) -> Any:
        used.append(settings)
        return real(server, settings, *rest)

    monkeypatch.setattr(data_source, "RangeReader", spied)
    source = _source(server, bucket, filterpushdown="true", keyprefix="k1")
    schema = source.schema()
    now = datetime.now(UTC)

    def read(*conditions: Any) -> set[bytes]:
        reader = source.reader(schema)
        assert isinstance(reader, FilteringReader)
        left = list(reader.pushFilters(list(conditions)))
        assert left == [one for one in conditions if one.attribute != ("partition",)]
        return {row["key"] for row in _rows(reader, list(reader.partitions()))}

    mine = {key for key in keys if key.startswith(b"k1")}
    assert read() == mine
    assert read(EqualTo(("key",), b"k17")) == {key for key in mine if key.startswith(b"k17")}
    assert read(StringStartsWith(("key",), "k12"), StringStartsWith(("key",), "k1")) == {
        key for key in mine if key.startswith(b"k12")
    }
    assert read(StringStartsWith(("key",), "k2")) == set()
    assert read(StringStartsWith(("value",), "k2")) == mine
    hour = timedelta(hours=1)
    assert read(GreaterThan(("time",), now - hour)) == mine
    assert used[-1].starting_times == dict.fromkeys(range(1024), used[-1].starting_times[0])
    # An hour more is read, for a server whose clock is behind.
    assert read(GreaterThan(("time",), now + hour / 2)) == mine
    assert read(GreaterThan(("time",), now + 2 * hour)) == set()
    assert read(LessThan(("time",), now - 2 * hour)) == mine

    # A beginning behind the end that is named would be refused.
    ending = _source(server, bucket, filterpushdown="true", endingoffsets='{"5": 0}')
    reader = ending.reader(schema)
    assert isinstance(reader, FilteringReader)
    late = GreaterThan(("time",), now + 2 * hour)
    assert list(reader.pushFilters([late])) == [late]
    assert _rows(reader, list(reader.partitions())) != []

    assert all(one.include_values for one in used)
    narrow = StructType([StructField("key", StringType())])
    rows = _rows(source.reader(narrow), list(source.reader(narrow).partitions()))
    assert {row["key"].encode() for row in rows} == mine
    assert not used[-1].include_values


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
