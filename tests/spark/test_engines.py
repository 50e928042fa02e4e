"""The engines of ``upr-backup``: they read the same, and what is killed takes nothing along."""

import dataclasses
import errno
import importlib.util
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RunningServer, wait_until
from tests.proxy import Proxy
from tests.spark.backup_process import (
    Backup,
    alive,
    children,
    staged,
    stored_rows,
    told,
    workers,
)
from tests.spark.restoring import content, document, restored, taken, upr_backup
from upr_backup.backup import GROUP_SEQNOS, GROUP_SEQNOS_MIN, group_size, split
from upr_backup.engines import spark_session
from upr_backup.engines.engine import Finished, TaskError, from_text, to_text
from upr_backup.engines.local import LocalEngine
from upr_backup.errors import HistoryChangedError, LockedError
from upr_backup.repository import open_storage
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Repository
from upr_backup.task import Task
from upr_client import Client
from upr_client.admin import CutInfo, Pin
from upr_protocol.errors import (
    InvalidArgumentError,
    MissingPackageError,
    UnavailableError,
    UprError,
)

ROWS = 12_000
POOL = ("--processes", "2", "--group-seqnos", "300")
"""About forty groups."""
SPARK = ("--engine", "spark", "--group-seqnos", "1000")


@pytest.fixture
def server(server_process: Callable[..., RunningServer], tmp_path: Path) -> RunningServer:
    """A server with rows, and a repository for it in ``repository``."""
    running = server_process()
    with Client(running.target) as client:
        client.bucket().write_many((b"key:%d" % n, b"%d" % n) for n in range(1000, ROWS))
        client.bucket().write_many((b"key:%d" % n, None) for n in range(1000))
    assert upr_backup(tmp_path / "repository", "init", "--target", running.target).exit_code == 0
    return running


def paused(running: RunningServer, backup: Backup) -> None:
    """Stop the server in the middle of a run, so that the run stays there."""
    backup.until_staged(2)
    os.kill(running.pid, signal.SIGSTOP)
    assert len(staged(backup.repository)) < 30, "the run was over before it could be stopped"


def test_all_read_the_same(server: RunningServer, tmp_path: Path) -> None:
    repository, other = tmp_path / "repository", tmp_path / "other"
    upr_backup(other, "init", "--target", server.target)
    one = taken(repository, "--processes", "1")
    many = taken(other, *POOL)
    assert one["rows"] == many["rows"] == ROWS
    assert (one["files"], many["files"]) == (1, many["files"])
    assert many["files"] > 30
    assert stored_rows(repository) == stored_rows(other)
    assert upr_backup(other, "verify", "--full").stdout == "all is well\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "engine", [POOL, pytest.param(SPARK, marks=[pytest.mark.spark, pytest.mark.long])]
)
def test_a_killed_driver_takes_its_workers_along(
    server: RunningServer, tmp_path: Path, engine: tuple[str, ...]
) -> None:
    repository = tmp_path / "repository"
    with Backup(repository, *engine) as backup:
        paused(server, backup)
        everything = children(backup.pid)
        assert engine == SPARK or len(workers(backup.pid)) == 2
        backup.kill()
        wait_until(lambda: not alive(everything), "the end of the workers")
    kept = staged(repository)
    os.kill(server.pid, signal.SIGCONT)
    with Client(server.target) as client:
        # After the cut of the killed run: the run that goes on with it does not have this.
        client.bucket().set(b"later", b"")
    # Whichever engine goes on.
    done = upr_backup(repository, "backup", "--json", "--processes", "1")
    assert done.exit_code == 0, done.stderr
    assert "going on with an interrupted run" in done.stderr
    assert document(done)["rows"] == ROWS
    assert len(kept) >= 2
    assert len(stored_rows(repository)) == ROWS, "what a killed worker left is gone"
    assert taken(repository)["rows"] == 1
    assert restored(repository, server.target, 2) == content(server.target)
    with Client(server.target) as client:
        assert client.admin.cuts("default") == []


@pytest.mark.long
def test_a_group_whose_worker_is_killed_is_read_again_once(
    server: RunningServer, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"

    def kill_one(backup: Backup, known: set[int]) -> int:
        """Kill a worker of the pool, of those that are not known; returns which."""
        killed = (set(workers(backup.pid)) - known).pop()
        os.kill(killed, signal.SIGKILL)
        return killed

    with Backup(repository, *POOL) as backup:
        paused(server, backup)
        at_pause = len(staged(repository))
        pool = set(workers(backup.pid))
        known = set(pool)

        def goes_on() -> bool:
            return not backup.running or bool(set(workers(backup.pid)) - known)

        kills = [kill_one(backup, set())]
        wait_until(goes_on, "another worker")
        while backup.running:
            kills.append(kill_one(backup, known))
            known.add(kills[-1])
            wait_until(goes_on, "another worker")
        code, stdout, stderr = backup.end()
        # The first may have finished its group just before, and told of it: then it was killed between two groups.
        assert len(kills) == 2 or (len(kills) == 3 and len(staged(repository)) > at_pause)
        assert (code, stdout, len(told(stderr))) == (4, "", 1)
        assert "was killed (signal 9)" in stderr
        wait_until(lambda: not alive(list(pool)), "the end of the workers")
    before = len(staged(repository))
    os.kill(server.pid, signal.SIGCONT)
    with Backup(repository, "--json", *POOL) as backup:
        backup.until_staged(before + 1)
        os.kill(server.pid, signal.SIGSTOP)
        killed = kill_one(backup, set())
        wait_until(lambda: killed not in workers(backup.pid), "its end")
        os.kill(server.pid, signal.SIGCONT)
        code, stdout, stderr = backup.end()
    assert (code, told(stderr)) == (0, ["going on with an interrupted run, at its cut"])
    assert json.loads(stdout)["rows"] == ROWS


def test_an_interrupted_pool_says_one_word(server: RunningServer, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    with Backup(repository, *POOL) as backup:
        paused(server, backup)
        everything = children(backup.pid)
        backup.interrupt()
        code, stdout, stderr = backup.end()
        assert (code, stdout, told(stderr)) == (130, "", ["interrupted"])
        wait_until(lambda: not alive(everything), "the end of the workers")
    os.kill(server.pid, signal.SIGCONT)
    # What was staged can be given up.
    done = upr_backup(repository, "backup", "--json", "--restart")
    assert (done.exit_code, told(done.stderr)) == (0, [])
    assert document(done)["rows"] == ROWS
    with Client(server.target) as client:
        assert client.admin.cuts("default") == []


@pytest.mark.long
def test_a_server_that_goes_away_is_one_line(server: RunningServer, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    with Backup(repository, "--retry-seconds", "1", *POOL) as backup:
        backup.until_staged(2)
        server.kill()
        code, stdout, stderr = backup.end()
    assert (code, stdout, len(told(stderr))) == (5, "", 1), stderr
    assert told(stderr)[0].startswith("error: ")
    server.start()
    assert taken(repository, "--processes", "1")["rows"] == ROWS


@pytest.mark.long
def test_a_loop_outlives_the_server(server: RunningServer, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    manifests = repository / "chain"

    def committed(count: int) -> Callable[[], bool]:
        return lambda: manifests.is_dir() and len(list(manifests.glob("*.json"))) >= count

    server.kill()
    with Backup(repository, "--every", "1s", "--retry-seconds", "0", "--processes", "1") as backup:
        # From the second turn on a server that is away is waited for before one fails.
        wait_until(lambda: "trying again" in backup.words(), "a turn without the server")
        server.start()
        wait_until(committed(1), "a backup with the server again")
        server.kill()
        server.start()
        count = len(list(manifests.glob("*.json")))
        wait_until(committed(count + 1), "a backup after a restart")
        backup.interrupt()
        code, stdout, stderr = backup.end()
    assert code == 130
    assert stdout.startswith("backup 1: full")
    assert stderr.endswith("interrupted\n")
    allowed = ("; trying again in 1 s", "beginning again", "going on", "interrupted")
    assert [line for line in told(stderr) if not any(words in line for words in allowed)] == []


def specs_of(server: RunningServer, repository: Path, wrong: bool = False) -> list[Task]:
    """Return two groups up to now; or with a cut that is nowhere."""
    opened = Repository.open(open_storage(str(repository)))
    with Client(server.target) as client:
        cut = client.admin.create_cut("default", "cut")
        client.admin.release_cut("default", "cut")
    pins = {p: Pin(pin.failover_id, pin.seqno + 1000 * wrong) for p, pin in cut.pins.items()}
    return [
        Task(
            str(repository),
            server.target,
            "default",
            opened.bucket_version,
            1,
            "attempt",
            index,
            dict.fromkeys(group),
            CutInfo("cut", cut.created_time, pins={p: pins[p] for p in group}),
            1.0,
        )
        for index, group in enumerate((range(512), range(512, 1024)))
    ]


def pool_of_this_process() -> set[int | None]:
    """Return the workers; what else is there are servers of the tests."""
    children = multiprocessing.active_children()
    return {child.pid for child in children if isinstance(child, SpawnProcess)}


@pytest.mark.long
def test_a_pool_is_kept_and_ends_with_its_engine(server: RunningServer, tmp_path: Path) -> None:
    specs = specs_of(server, tmp_path / "repository")
    engine = LocalEngine(2)
    done = [event for event in engine.run(specs) if isinstance(event, Finished)]
    assert {event.index for event in done} == {0, 1}
    pool = pool_of_this_process()
    assert len(pool) == 2
    again = [dataclasses.replace(spec, attempt="other") for spec in specs]
    assert len([event for event in engine.run(again) if isinstance(event, Finished)]) == 2
    assert pool_of_this_process() == pool
    # A record that is there is what is reported, whoever wrote it.
    repeated = {e.index: e.result for e in engine.run(specs) if isinstance(e, Finished)}
    assert repeated == {event.index: event.result for event in done}
    with pytest.raises(HistoryChangedError, match="the cut is gone"):
        list(engine.run(specs_of(server, tmp_path / "repository", wrong=True)))
    engine.close()
    assert pool_of_this_process() == set()


def test_who_stops_listening_stops_the_pool(server: RunningServer, tmp_path: Path) -> None:
    specs = specs_of(server, tmp_path / "repository")
    engine = LocalEngine(2)
    os.kill(server.pid, signal.SIGSTOP)
    events = engine.run(specs)
    next(events)
    assert len(pool_of_this_process()) == 2
    events.close()
    assert pool_of_this_process() == set()
    os.kill(server.pid, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_a_pool_that_is_stopped_leaves_no_half_written_file(
    server: RunningServer, tmp_path: Path, killed: bool
) -> None:
    """On a full disk they would take the room that the next run needs, and prune does not know of them."""
    with Client(server.target) as client:
        for n in range(90):
            client.bucket().set(b"large:%d" % n, os.urandom(2**20))
    repository = tmp_path / "repository"
    with Proxy(server.target) as proxy:
        # In the middle of what each of them reads, and behind what it has in memory before it writes.
        proxy.stall_after("to client", 38 * 2**20)
        target = f"--target={proxy.target}"
        with Backup(repository, "--processes=2", "--group-seqnos=7000", target) as backup:

            def written() -> list[int]:
                return [path.stat().st_size for path in (repository / "data").rglob("*.parquet")]

            wait_until(lambda: [size > 2**20 for size in written()] == [True, True], backup.words)
            everything = children(backup.pid)
            if killed:
                backup.kill()
            else:
                backup.interrupt()
                code, stdout, stderr = backup.end()
                assert (code, stdout, told(stderr)) == (130, "", ["interrupted"])
            wait_until(lambda: not alive(everything), "the end of the workers")
            assert written() == []
            assert len(told(backup.words())) == (not killed)


def test_a_lost_lock_is_noticed_within_seconds(tmp_path: Path) -> None:
    now = [1000.0]
    storage = open_storage(str(tmp_path))
    with Lock(storage, 600, lambda: now[0]) as lock:
        lock.keep()
        # Another run took it over, by a clock that goes ahead.
        with Lock(storage, 600, lambda: now[0] + 3600):
            now[0] += 6
            with pytest.raises(LockedError, match="took the repository over"):
                lock.keep()


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("away", hint="look"),
        HistoryChangedError("it is 'gone'\nand more {}"),
        LockedError("ünlocked", reason="ODD", retriable=False),
    ],
)
def test_an_error_comes_back_as_it_was(error: Any) -> None:
    back = from_text(f"org.apache.spark.SparkException: x\n\tat y UPR_NO {to_text(error)}\n at z")
    assert isinstance(back, UprError)
    assert type(back) is type(error)
    assert (back.message, back.hint, back.reason, back.retriable) == (
        error.message,
        error.hint,
        error.reason,
        error.retriable,
    )


def test_other_errors_come_back_too() -> None:
    back = from_text(to_text(OSError(errno.ENOSPC, "No space left", "/data/x")))
    assert isinstance(back, OSError)
    assert (back.errno, back.strerror, back.filename) == (errno.ENOSPC, "No space left", "/data/x")
    wrong = from_text(to_text(ZeroDivisionError("by zero")))
    assert isinstance(wrong, TaskError)
    assert str(wrong) == "ZeroDivisionError: by zero"
    assert from_text("nothing of ours") is None


def test_groups_suit_what_there_is_and_who_reads() -> None:
    assert group_size(0, 4) == GROUP_SEQNOS_MIN
    assert group_size(50_000, 4) == GROUP_SEQNOS_MIN
    assert group_size(4_000_000, 4) == 500_000
    assert group_size(100_000_000, 2) == GROUP_SEQNOS
    assert group_size(1_000_000_000, 2) == 15_625_000
    pins = {p: Pin(None, 4_000) for p in range(1024)}
    for parallel in (1, 2, 4, 16):
        groups = split(CutInfo("c", pins=pins), {}, None, parallel)
        assert sorted(p for group in groups for p in group) == list(range(1024))
        assert 2 * parallel <= len(groups) <= 66


def test_masters_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spark_session.checked_master("local") == "local[1,4]"
    assert spark_session.checked_master("local[3]") == "local[3,4]"
    assert spark_session.checked_master("local[*,2]") == "local[*,2]"
    assert spark_session.checked_master("spark://h:1") == "spark://h:1"
    assert (spark_session.cores_of("local[3,4]"), spark_session.cores_of("yarn")) == (3, 16)
    for wrong in ("", "local[", "local[0x]", "http://h"):
        with pytest.raises(InvalidArgumentError, match="no Spark master"):
            spark_session.checked_master(wrong)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(MissingPackageError, match="Java 17"):
        spark_session.check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="needs pyspark"):
        spark_session.check_installed()


def test_the_server_keeps_deletions_for_the_next_backup(
    server_process: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """As long as a consumer may hold purging up, which is days: the repository is one."""
    repository = tmp_path / "repository"
    running = server_process("--tombstone-age", "0")
    upr_backup(repository, "init", "--target", running.target)
    with Client(running.target) as client:
        client.bucket().write_many((b"%d" % n, b"") for n in range(3000))
    taken(repository)
    with Client(running.target) as client:
        client.bucket().write_many((b"%d" % n, None) for n in range(3000))
    running.terminate()
    running.start()
    with Client(running.target) as client:
        [consumer] = client.admin.consumers("default")
        assert consumer.name.startswith("upr-backup-")
        assert sum(one.purged for one in client.admin.purge("default", range(64))) == 0
    assert taken(repository)["rollbacks"] == 0
    with Client(running.target) as client:
        client.admin.purge("default", range(64))
        # By the server itself, or by what was just asked for.
        purged = [one.purge_seqno > 0 for one in client.admin.partitions("default", range(64))]
        assert sum(purged) > 32


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(300)
def test_spark_tells_why_a_task_failed(server: RunningServer, tmp_path: Path, spark: Any) -> None:
    specs = specs_of(server, tmp_path / "repository")
    specs = [dataclasses.replace(one, bucket="gone") for one in specs]
    from upr_backup.engines.spark import SparkEngine

    engine = SparkEngine(None, {})
    with pytest.raises(Exception, match="gone") as failed:
        list(engine.run(specs))
    assert getattr(failed.value, "reason", None) == "BUCKET_NOT_FOUND"
    engine.close()
    assert spark.range(3).count() == 3, "a session that was there before stays"
