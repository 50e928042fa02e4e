"""Backups and Spark's source over a set of servers: the active one changes while they read."""

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.conftest import StartServer
from tests.harness import RunningServer, wait_until
from tests.proxy import Proxy
from tests.replica.sets import run, start_set, wait_until_counted, wait_until_equal
from tests.spark.backup_model import InlineEngine
from tests.spark.restoring import content, restored, upr_backup
from tests.spark.test_source import Sink
from upr_backup.backup import Run
from upr_backup.repository import LocalStorage
from upr_backup.repository.documents import Manifest
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Repository
from upr_backup.source import ServerSource, backup_group
from upr_backup.task import Task, TaskResult
from upr_client import Client
from upr_client.errors import UnavailableError
from upr_spark import register
from upr_spark.source.data_source import UprDataSource

ROWS = 6000
"""Of 4 KiB each: more than a server sends ahead."""


def fill(server: RunningServer, value: bytes, rows: int = ROWS) -> None:
    with Client(server.target) as client:
        client.bucket().write_many((b"%d" % n, value * 4096) for n in range(rows))


def take_over(target: RunningServer) -> None:
    done = run("takeover", "--to", target.target)
    assert done.exit_code == 0, done.output


def backup(
    repository: Repository, servers: list[RunningServer], meanwhile: Callable[[], None]
) -> tuple[Manifest, list[str]]:
    """Take a backup, and do something while its first group is read; return what it is, and what was said."""
    target = ",".join(one.target for one in servers)
    left = [meanwhile]
    said: list[str] = []

    def read(task: Task) -> TaskResult:
        def progress(rows: int) -> None:
            if rows and left:
                left.pop()()

        return backup_group(task, progress)

    with Client(target) as client, Lock(repository.storage) as lock:
        source = ServerSource(client, repository)
        done = Run(repository, source, InlineEngine(read), lock, target, say=said.append).backup()
    assert not left
    return done, said


def repository_of(server: RunningServer, folder: Path) -> Repository:
    with Client(server.target) as client:
        (bucket,) = client.admin.buckets()
    return Repository.create(LocalStorage(folder), "default", bucket.version, server.target, 0)


def test_a_server_that_was_there_is_waited_for(
    server_process: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_process()
    repository = repository_of(server, tmp_path / "backups")
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            server.start()
        time.sleep(seconds)

    with Client(server.target) as client:
        source = ServerSource(client, repository)
        cut = source.make_cut()
        server.kill()
        monkeypatch.setattr(
            "upr_backup.source.time", SimpleNamespace(monotonic=time.monotonic, sleep=pause)
        )
        found = source.find_cut(cut.name)
        assert found is not None
        assert pauses
        # One that was never there is a wrong address.
        server.kill()
        with pytest.raises(UnavailableError):
            ServerSource(client, repository).make_cut()


@pytest.mark.long
def test_a_backup_goes_on_through_a_takeover_and_a_promotion(
    server_process: StartServer, tmp_path: Path
) -> None:
    first, second = servers = start_set(server_process)
    repository = repository_of(first, tmp_path / "backups")
    fill(first, b"a")
    wait_until_equal(servers)

    taken, said = backup(repository, servers, lambda: take_over(second))
    assert (taken.number, taken.kind, taken.rollbacks, said) == (1, "full", (), [])
    wait_until_counted(servers, second)
    wait_until_equal(servers)

    first.terminate()
    fill(second, b"lost")

    def promote() -> None:
        second.kill()
        first.start()
        done = run("promote", "--force", "--yes", "--target", first.target)
        assert done.exit_code == 0, done.output
        fill(first, b"b", 100)

    # The cut is above what the new active server has, so there is another one.
    taken, said = backup(repository, servers, promote)
    assert (taken.number, taken.kind, len(said)) == (2, "incremental", 1)
    assert "beginning again with a new cut" in said[0]
    now = content(first.target, "default")
    assert restored(tmp_path / "backups", first.target, 2) == now
    assert len(now) == ROWS


def rows_of(reader: Any, tasks: list[Any], meanwhile: Callable[[], None]) -> list[dict[str, Any]]:
    """Read tasks as Spark does, and do something behind the first rows."""
    reader, tasks = pickle.loads(pickle.dumps((reader, tasks)))
    left, found = [meanwhile], []
    for task in tasks:
        for batch in reader.read(task):
            found += batch.to_pylist()
            if left:
                left.pop()()
    return found


def source_of(servers: list[RunningServer], **options: str) -> UprDataSource:
    endpoints = ",".join(one.target for one in servers)
    return UprDataSource({"endpoint": endpoints, "retrytimeout": "30s"} | options)


@pytest.mark.long
def test_a_read_goes_on_through_a_takeover(server_process: StartServer) -> None:
    first, second = servers = start_set(server_process)
    fill(first, b"a")
    wait_until_equal(servers)
    source = source_of(servers)
    reader = source.reader(source.schema())
    rows = rows_of(reader, list(reader.partitions()), lambda: take_over(second))
    assert len(rows) == ROWS
    assert {row["op"] for row in rows} == {"set"}


@pytest.mark.long
def test_a_stream_goes_on_through_a_takeover_and_a_promotion(server_process: StartServer) -> None:
    first, second = servers = start_set(server_process)
    fill(first, b"a")
    wait_until_equal(servers)
    source = source_of(servers, onrollback="emit")
    reader: Any = source.streamReader(source.schema())
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    held: dict[bytes, bytes] = {}

    def take(rows: list[dict[str, Any]]) -> list[int]:
        """Keep what a batch brought; return the seqnos of its rollbacks."""
        controls = [row for row in rows if row["op"] == "rollback"]
        for row in rows:
            if row["op"] == "set":
                held[row["key"]] = row["value"][:1]
        return [row["seqno"] for row in controls]

    def plan() -> list[Any]:
        return list(reader.partitions(start, end))

    assert take(rows_of(reader, plan(), lambda: take_over(second))) == []
    assert held == {b"%d" % n: b"a" for n in range(ROWS)}
    wait_until_counted(servers, second)
    wait_until_equal(servers)

    first.terminate()
    fill(second, b"l")
    start, end = end, reader.latestOffset(end, ReadAllAvailable())

    def promote() -> None:
        second.kill()
        first.start()
        done = run("promote", "--force", "--yes", "--target", first.target)
        assert done.exit_code == 0, done.output
        # Written anew, so that each key has its value of now in what comes behind the rollback.
        fill(first, b"b")

    take(rows_of(reader, plan(), promote))
    start, end = end, reader.latestOffset(end, ReadAllAvailable())
    assert take(rows_of(reader, plan(), lambda: None))
    assert held == {b"%d" % n: b"b" for n in range(ROWS)}
    reader.stop()


def test_a_query_goes_on_at_the_new_active_server(
    spark: Any, server_process: StartServer, tmp_path: Path
) -> None:
    register(spark)
    first, second = servers = start_set(server_process)
    endpoints = ",".join(one.target for one in servers)
    reader = spark.readStream.format("upr").option("endpoint", endpoints)
    reader = reader.options(onRollback="emit", numPartitions=2)
    sink = Sink()
    fill(first, b"a", 500)
    wait_until_equal(servers)
    sink.run(reader, tmp_path / "checkpoint")
    second.terminate()
    fill(first, b"lost", 50)
    sink.run(reader, tmp_path / "checkpoint")
    first.kill()
    second.start()
    done = run("promote", "--force", "--yes", "--target", second.target)
    assert done.exit_code == 0, done.output
    fill(second, b"b", 20)
    sink.run(reader, tmp_path / "checkpoint")
    assert sink.controls
    shown = spark.read.format("upr").option("endpoint", endpoints).load().collect()
    assert set(sink.rows) == {(row.partition, row.seqno) for row in shown}
    assert len({bytes(row.key) for row in shown}) == 500


def test_a_bucket_that_a_replica_still_shows_empty_is_not_restored_into(
    server_process: StartServer, tmp_path: Path
) -> None:
    owner = server_process()
    with Proxy(owner.target) as proxy:
        replica = server_process("--replicate-from", proxy.target, "--anonymous")
        repository_of(owner, tmp_path / "backups")
        with Client(owner.target) as client:
            client.bucket().set(b"key", b"of the backup")
            assert upr_backup(tmp_path / "backups", "backup").exit_code == 0
            client.admin.create_bucket("other")
            with Client(replica.target) as other:
                wait_until(lambda: len(other.admin.buckets()) == 2, "a bucket")
            proxy.black_hole("to server", "to client")
            client.bucket("other").set(b"key", b"newer")
            targets = f"{replica.target},{owner.target}"
            options = ("--bucket", "other", "--target", targets)
            done = upr_backup(tmp_path / "backups", "restore", *options)
            assert (done.exit_code, "holds data in 1 partitions" in done.stderr) == (4, True)
            assert client.bucket("other").get(b"key") == b"newer"


def test_a_replica_without_the_bucket_does_no_harm_among_the_targets(
    server_process: StartServer, tmp_path: Path
) -> None:
    owner = server_process()
    # Nothing listens there.
    replica = server_process("--replicate-from", "127.0.0.1:1", "--anonymous")
    with Client(owner.target) as client:
        client.bucket().set(b"key", b"value")
    targets = ("--target", f"{replica.target},{owner.target}")
    made = ("restore", "--bucket", "restored", "--create-bucket")
    again = (*made, "--into-non-empty")
    for words in (("init",), ("backup",), ("verify", "--against-server"), made, again):
        done = upr_backup(tmp_path / "backups", *words, *targets)
        assert done.exit_code == 0, done.stderr
