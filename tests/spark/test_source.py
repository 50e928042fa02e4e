"""The data source in Spark, against real server processes."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql.datasource import DataSourceRegistration

from tests.cli.test_check import run_admin
from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.spark.test_guide import EXAMPLES as GUIDE_EXAMPLES
from upr_client import Change, Client
from upr_client.types import Bucket
from upr_protocol.failover import format_failover_id
from upr_protocol.limits import ADMIN_SOCKET
from upr_protocol.partitioning import partition_of
from upr_spark import register
from upr_spark.errors import UprSparkError, find_error

_QUERY_SECONDS = 90


@pytest.fixture
def read(spark: Any, shared_server: RunningServer, bucket: Bucket) -> Callable[..., Any]:
    """A function that gives a reader of the bucket; it takes options."""
    register(spark)

    def reader(stream: bool = False, **options: Any) -> Any:
        made = spark.readStream if stream else spark.read
        made = made.format("upr").option("endpoint", shared_server.target)
        made = made.option("bucket", bucket.name)
        return made.options(**{"numPartitions": 2} | options)

    return reader


def _fill(bucket: Bucket, count: int = 3000) -> None:
    # No key twice: a flush in between would take the older row away.
    bucket.write_many([(b"k%d" % n, b"v%d" % n) for n in range(count)])
    bucket.write_many([(b"k%d" % n, None if n % 2 else b"") for n in range(count, 8 * count // 7)])


def _changes(bucket: Bucket) -> list[Change]:
    with bucket.changes(until="now") as changes:
        return [change for batch in changes.batches() for change in batch.changes]


def _drained(bucket: Bucket) -> set[tuple[Any, ...]]:
    return {(c.partition, c.seqno, c.op, c.key, c.value) for c in _changes(bucket)}


def _shown(rows: list[Any]) -> list[tuple[Any, ...]]:
    def plain(value: Any) -> Any:
        return None if value is None else bytes(value)

    return [(r.partition, r.seqno, r.op, plain(r.key), plain(r.value)) for r in rows]


@contextlib.contextmanager
def _refused() -> Iterator[list[UprSparkError]]:
    """Collect the error of this project that Spark wraps."""
    found: list[UprSparkError] = []
    with pytest.raises(Exception, match="UPR_") as raised:
        yield found
    error = find_error(raised.value)
    assert error is not None
    found.append(error)


def test_a_batch_shows_what_the_sdk_drains_and_every_action_the_same(
    spark: Any,
    shared_server: RunningServer,
    client: Client,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _fill(bucket)
    expected = _drained(bucket)
    # Another session has nothing registered: Spark finds the source by itself, and would warn of a second one.
    session = spark.newSession()
    monkeypatch.setattr(DataSourceRegistration, "register", None)
    register(session)
    reader = session.read.format("upr").option("endpoint", shared_server.target)
    reader = reader.options(bucket=bucket.name, numPartitions=3)
    frame = reader.load()

    rows = frame.collect()
    bucket.write_many([(b"k%d" % n, b"later") for n in range(3000)])

    assert len(rows) == len(expected)
    assert set(_shown(rows)) == expected
    assert set(_shown(frame.collect())) == expected
    logs = client.admin.failover_logs(bucket)
    highs: dict[int, int] = {}
    for row in rows:
        highs[row.partition] = max(highs.get(row.partition, 0), row.seqno)
    for row in rows[::100]:
        assert row.failover_id == format_failover_id(logs[row.partition].newest.failover_id)
        assert row.marker == highs[row.partition]
        assert row.time is not None
    assert [field.simpleString() for field in frame.schema] == [
        "partition:int",
        "seqno:bigint",
        "op:string",
        "key:binary",
        "value:binary",
        "failover_id:string",
        "marker:bigint",
        "time:timestamp",
    ]
    reader = reader.schema("value binary, key string")
    assert {(row.key, bytes(row.value)) for row in reader.load().collect() if row.value} == {
        (c.key.decode(), c.value) for c in _changes(bucket) if c.value
    }


@pytest.mark.long
def test_what_is_not_wanted_is_left_out(
    spark: Any, bucket: Bucket, read: Callable[..., Any]
) -> None:
    _fill(bucket, 2000)
    expected = _drained(bucket)

    sets = read(includeDeletions=False, includeValue=False, keyPrefix="k1").load().collect()
    assert {(r.partition, r.seqno) for r in sets} == {
        (p, s) for p, s, op, key, _ in expected if op == "set" and key.startswith(b"k1")
    }
    assert all(row.value is None for row in sets)

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(filterPushdown=True, numPartitions=8).load()
        narrowed = frame.filter("partition in (3, 4, 900) and partition < 500 and seqno > 1")
        assert set(_shown(narrowed.collect())) == {
            row for row in expected if row[0] in (3, 4) and row[1] > 1
        }
        # Each partition is a task of its own; conditions that are not pushed down leave eight.
        assert narrowed.rdd.getNumPartitions() == 2
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.long
def test_bad_options_are_refused_before_anything_is_read(read: Callable[..., Any]) -> None:
    with _refused() as found:
        read(onRollback="ignore").load()
    assert found[0].code == "BAD_OPTION"
    assert found[0].details["option"] == "onRollback"
    with _refused() as found:
        read(onRollbak="emit").load()
    assert "onRollback" in found[0].hint


class Sink:
    """Keeps rows by partition and seqno, and undoes what control rows say.

    Args:
        die_at: a seqno; the first batch with it is taken, and then fails before Spark can commit it.
        also: another one that takes each batch.
    """

    def __init__(
        self, die_at: int | None = None, also: Callable[[Any, int], None] | None = None
    ) -> None:
        self.rows: dict[tuple[int, int], tuple[str, bytes]] = {}
        self.controls: list[tuple[int, int]] = []
        self.batches: list[int] = []
        self.sizes: list[int] = []
        self.die_at = die_at
        self._also = also

    def take(self, frame: Any, batch: int) -> None:
        """Take one batch; one that comes again is applied again."""
        rows = frame.collect()
        self.batches.append(batch)
        self.sizes.append(len(rows))
        for row in rows:
            if row.op == "rollback":
                self.controls.append((row.partition, row.seqno))
                gone = [k for k in self.rows if k[0] == row.partition and k[1] > row.seqno]
                for key in gone:
                    del self.rows[key]
        for row in rows:
            if row.op != "rollback":
                self.rows[row.partition, row.seqno] = (row.failover_id, bytes(row.key))
        if self._also is not None:
            self._also(frame, batch)
        if self.die_at is not None and any(row.seqno == self.die_at for row in rows):
            self.die_at = None
            raise RuntimeError("dies between the log of ends and the log of commits")

    def run(self, reader: Any, checkpoint: Path) -> None:
        """Run a query over everything that is there."""
        writer = reader.load().writeStream.foreachBatch(self.take).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        try:
            assert query.awaitTermination(_QUERY_SECONDS)
        finally:
            query.stop()


def test_a_stream_takes_all_in_limited_batches_and_goes_on_from_its_checkpoint(
    client: Client, bucket: Bucket, read: Callable[..., Any], tmp_path: Path
) -> None:
    _fill(bucket, 2000)
    sink = Sink()
    options = {"maxOffsetsPerTrigger": 900, "leaseName": "nightly", "partitions": "0-511"}

    sink.run(read(stream=True, **options), tmp_path / "checkpoint")

    expected = {(p, s) for p, s, _, _, _ in _drained(bucket) if p < 512}
    assert set(sink.rows) == expected
    assert len(sink.batches) >= 2
    assert max(sink.sizes) <= 900
    assert sink.controls == []
    assert [cut.name.partition("-")[0] for cut in client.admin.cuts(bucket)] == ["nightly"]

    bucket.write_many([(b"new%d" % n, b"") for n in range(100)])
    before = len(sink.batches)
    sink.run(read(stream=True, **options), tmp_path / "checkpoint")

    again = {(p, s) for p, s, _, _, _ in _drained(bucket) if p < 512}
    assert set(sink.rows) == again
    assert again > expected
    assert sum(sink.sizes[before:]) == len(again - expected)


@pytest.mark.long
def test_latest_begins_at_what_is_there(
    bucket: Bucket, read: Callable[..., Any], tmp_path: Path
) -> None:
    _fill(bucket, 100)
    sink = Sink()
    sink.run(read(stream=True, startingOffsets="latest"), tmp_path / "checkpoint")
    assert (sink.rows, sink.batches) == ({}, [0])

    bucket.set(b"new", b"1")
    # The offset of the checkpoint counts from now on, whatever the option says.
    sink.run(read(stream=True, startingOffsets="earliest"), tmp_path / "checkpoint")

    assert [key for _, key in sink.rows.values()] == [b"new"]


# The specification's example.


def _keys(partition: int, count: int) -> list[bytes]:
    found: list[bytes] = []
    number = 0
    while len(found) < count:
        key = b"key%d" % number
        if partition_of(key) == partition:
            found.append(key)
        number += 1
    return found


@pytest.mark.long
def test_a_query_goes_back_to_418_when_the_server_goes_on_from_426(
    spark: Any, server_process: StartServer, tmp_path: Path
) -> None:
    """Read up to 434 in batches that end at 418 and 434; the server loses what is above 426.

    A cut makes durable everything that a batch ends at, so no query ever ends at a seqno that a crash of the same
    server can lose: holding the committer does not bring it about. What does is a server that comes back older: its
    directory is copied at 426, and after the query has read up to 434 the copy takes its place, opened by
    ``upr-admin restore-copy``, which adds the failover record at 426.

    The batch that ends at 434 is taken by the sink, and the query dies before Spark has logged its commit, so that the
    same batch is first repeated against a server that has lost most of it.

    The guide's jobs keep two Delta tables in step meanwhile.
    """
    register(spark)
    running = server_process()
    keys = _keys(5, 450)
    old = tmp_path / "old"

    def reader(**options: Any) -> Any:
        made = spark.readStream.format("upr").option("endpoint", running.target)
        return made.options(partitions="5", **options)

    def write(first: int, last: int) -> None:
        with Client(running.target) as client:
            client.bucket().write_many([(key, b"") for key in keys[first - 1 : last]])

    merge, keep = (
        example.replace("127.0.0.1:7711", running.target).replace("/lake", str(tmp_path))
        for example in GUIDE_EXAMPLES
        if "DeltaTable" in example
    )
    names: dict[str, Any] = {"spark": spark}
    exec(keep.partition("reader =")[0], names)
    sink = Sink(die_at=434, also=names["keep"])
    checkpoint = tmp_path / "checkpoint"
    write(1, 418)
    sink.run(reader(), checkpoint)
    assert max(sink.rows) == (5, 418)
    write(419, 426)
    running.terminate()
    shutil.copytree(running.data, old, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
    running.start()
    write(427, 434)
    with pytest.raises(Exception, match="dies between"):
        sink.run(reader(), checkpoint)
    assert max(sink.rows) == (5, 434)
    exec(merge, names)
    assert len(_delta(tmp_path / "newest")) == 434
    (old_id,) = {failover_id for failover_id, _ in sink.rows.values()}

    running.kill()
    shutil.rmtree(running.data)
    shutil.move(old, running.data)
    assert run_admin("restore-copy", "--yes", running.data).exit_code == 0
    running.start()
    with Client(running.target) as client:
        log = client.admin.failover_logs("default", [5])[5]
        client.bucket().write_many([(key, b"new") for key in keys[440:450]])
    assert [record.seqno for record in log] == [0, 426]

    with _refused() as found:
        sink.run(reader(), checkpoint)
    assert found[0].code == "ROLLBACK_REQUIRED"
    assert found[0].details["rollback_seqno"] == 426
    assert found[0].details["old_id"] == old_id
    assert found[0].details["newest_point"] == 418
    sink.run(reader(onRollback="emit"), checkpoint)

    assert sink.controls == [(5, 418)]
    assert sorted(sink.rows) == [(5, seqno) for seqno in range(1, 437)]
    new_id = format_failover_id(log.newest.failover_id)
    for (_, seqno), (failover_id, key) in sink.rows.items():
        # What was common stays; above 426 there is nothing but the new branch.
        assert failover_id == (old_id if seqno <= 418 else new_id)
        assert key == (keys[seqno - 1] if seqno <= 426 else keys[440 + seqno - 427])
    exec(merge, names)
    newest = {row["key"]: (row["seqno"], row["value"]) for row in _delta(tmp_path / "newest")}
    with Client(running.target) as client:
        assert newest == {c.key: (c.seqno, c.value) for c in _changes(client.bucket())}
    history = _delta(tmp_path / "history")
    assert len(history) == len(sink.rows)
    assert {(5, row["seqno"]): (row["failover_id"], row["key"]) for row in history} == sink.rows
    # The same rows, read once more from the beginning, and under the new branch.
    exec(keep, names)
    again = _delta(tmp_path / "history")
    assert len(again) == len(history)
    assert {(5, row["seqno"]): (new_id, row["key"]) for row in history} == {
        (5, row["seqno"]): (row["failover_id"], row["key"]) for row in again
    }


def _delta(table: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(table).to_pyarrow_table().to_pylist()
    return rows
