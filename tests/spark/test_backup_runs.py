"""What a run leaves behind when it is killed, paused or refused, and how the next one goes on."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.backup_model import InlineEngine, MemoryStorage, ModelSource, World
from upr_backup.backup import Run
from upr_backup.engines import spark as engine_module
from upr_backup.engines import spark_session
from upr_backup.engines.engine import Rows
from upr_backup.errors import (
    HistoryChangedError,
    LockedError,
    RepositoryDamagedError,
    RepositoryError,
)
from upr_backup.repository import LocalStorage
from upr_backup.repository.documents import Entry, seal, unseal
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Repository
from upr_backup.rows import SCHEMA, RowsWriter
from upr_backup.source import ServerSource, read_group
from upr_backup.task import Task, TaskResult, stage_read
from upr_client import Client, Position, Rollback
from upr_client.admin import CutInfo, Pin
from upr_client.changes.events import ChangeBatch
from upr_protocol.errors import UnavailableError

HOLD = (
    "import os, signal, sys\n"
    "from pathlib import Path\n"
    "from upr_backup.repository.lock import Lock\n"
    "from upr_backup.repository import LocalStorage\n"
    "with Lock(LocalStorage(Path(sys.argv[1]))):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
)


def test_the_lock_of_a_killed_process_is_free_before_anybody_waited_for_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=f"process {holder.pid} on"):
            Lock(LocalStorage(tmp_path)).__enter__()
        holder.stdin.close()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        with Lock(LocalStorage(tmp_path)) as lock:
            lock.keep(now=True)


def test_the_lock_of_a_former_process_of_the_same_number_is_free(tmp_path: Path) -> None:
    """A container that is started again has the host's name and the process number that it had."""
    storage = LocalStorage(tmp_path)
    with Lock(storage):
        [name] = storage.names("locks/")
        document = json.loads(storage.read(name))
        assert (document["host"], document["pid"]) == (socket.gethostname(), os.getpid())
        with pytest.raises(LockedError):
            Lock(storage).__enter__()
    other = {**document, "began": "1 another", "expires": time.time() + 600}
    storage.put_if_absent("locks/0000000099.json", json.dumps(other).encode())
    with Lock(storage) as lock:
        lock.keep(now=True)


def test_a_lock_that_could_not_be_released_is_its_holders_at_the_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    lock = Lock(storage)
    put = LocalStorage.put_if_absent

    def refuse(storage: LocalStorage, name: str, data: bytes) -> bool:
        if json.loads(data)["expires"] == 0.0:
            raise OSError("away")
        return put(storage, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "put_if_absent", refuse)
        with lock:
            pass
    with pytest.raises(LockedError):
        Lock(storage).__enter__()
    for _ in range(2):
        with lock:
            lock.keep(now=True)
    with Lock(storage):
        pass


def holds(source: ServerSource, cut: CutInfo) -> bool:
    """Return whether a cut is still there, as it was made."""
    found = source.find_cut(cut.name)
    return found is not None and found.pins == cut.pins


def test_runs_that_are_killed_again_and_again_leave_one_cut(target: str, tmp_path: Path) -> None:
    with Client(target) as client:
        bucket = client.bucket()
        bucket.set(b"key", b"")

        def repository(name: str) -> Repository:
            storage = LocalStorage(tmp_path / name)
            return Repository.create(storage, "default", bucket.version, target, 0)

        one, other = repository("one"), repository("other")
        client.admin.create_cut(bucket, "upr-backup-of-somebody")
        kept = ServerSource(client, other).make_cut()
        # More than a bucket can have: each is made, and its run is killed before it is written down anywhere.
        for _ in range(70):
            cut = ServerSource(client, one).make_cut()
        there = {found.name for found in client.admin.cuts(bucket)}
        assert there == {"upr-backup-of-somebody", kept.name, cut.name}
        assert holds(ServerSource(client, one), cut)
        # A copy of a repository goes on by itself.
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "repository.json").write_bytes(one.storage.read("repository.json"))
        copy = Repository.open(LocalStorage(tmp_path / "copy"))
        assert copy.id == one.id
        ServerSource(client, copy).make_cut()
        assert holds(ServerSource(client, one), cut)


def test_a_bucket_that_is_created_anew_between_two_turns_is_another_one(
    target: str, tmp_path: Path
) -> None:
    with Client(target) as client:
        bucket = client.bucket()
        bucket.set(b"key", b"")
        storage = LocalStorage(tmp_path)
        source = ServerSource(
            client, Repository.create(storage, "default", bucket.version, target, 0)
        )
        source.release(source.make_cut().name)
        client.admin.drop_bucket("default")
        client.admin.create_bucket("default")
        with pytest.raises(RepositoryError, match="is not the one of this repository") as refused:
            source.make_cut()
        assert "needs a repository of its own" in refused.value.hint


def test_what_is_given_up_says_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    monkeypatch.setattr("upr_backup.rows._FLUSH_BYTES", 1)
    writer = RowsWriter(LocalStorage(tmp_path), "data/1/a.parquet")
    row = {"partition": 1, "seqno": 1, "op": "set", "key": b"k", "value": b"", "time": 0}
    writer.add_rows(pa.RecordBatch.from_pylist([row | {"further": None}], schema=SCHEMA))
    writer.close()
    del writer
    assert complaints == []
    assert not list(tmp_path.rglob("*.parquet"))


class Changes:
    """Batches that were thought out."""

    def __init__(
        self, batches: list[ChangeBatch | Rollback], reached: Mapping[int, Position]
    ) -> None:
        self._batches, self._reached = batches, reached

    def __enter__(self) -> "Changes":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def batches(self) -> list[ChangeBatch | Rollback]:
        return self._batches

    def positions(self) -> Mapping[int, Position]:
        return self._reached


def rolled_back(from_seqno: int, seqno: int) -> Rollback:
    return Rollback(7, from_seqno, seqno, 1, 2, "rule", "words")


def read(tmp_path: Path, *batches: ChangeBatch | Rollback) -> Entry:
    """Read partition 7 from 418 to 450 of a server that sends these batches, and return its entry."""
    start = Entry(0, 418, None, 0, 0, None, None)
    pins = {7: Pin(2, 450)}
    spec = Task(
        "", "", "", "", 2, "attempt", 0, {7: start}, CutInfo("cut", pins=pins), patience=1.0
    )
    reached: Any = SimpleNamespace(seqno=450, to_document=dict)
    bucket: Any = SimpleNamespace(changes=lambda *_, **__: Changes(list(batches), {7: reached}))
    result = read_group(bucket, LocalStorage(tmp_path), spec, "data/x", lambda rows: None)
    return result.entries[7]


def test_a_rollback_after_the_start_begins_anew_even_where_no_row_was_read(tmp_path: Path) -> None:
    once = read(tmp_path, rolled_back(418, 400))
    assert (once.start, once.cut, once.end) == (400, 400, 450)
    twice = read(tmp_path, rolled_back(418, 400), rolled_back(400, 390))
    assert (twice.start, twice.cut) == (390, 390)
    # It had gone on to 430, without a row: (418, 425] of the new history is nowhere.
    with pytest.raises(HistoryChangedError, match="rolled partition 7 back to 425"):
        read(tmp_path, rolled_back(430, 425))
    with pytest.raises(HistoryChangedError, match="rolled partition 7 back to 425"):
        read(tmp_path, rolled_back(418, 400), rolled_back(430, 425))


class Dying:
    """A job whose JVM is killed the first time."""

    died = 0

    def __init__(self, session: Any, specs: list[Task]) -> None:
        self._session = session

    def events(self) -> Iterator[Rows]:
        yield Rows(0)
        if not self.died:
            Dying.died = self._session.dead = True
            raise ConnectionRefusedError(111, "Connection refused")

    def cancel(self) -> None:
        pass


def test_a_new_jvm_is_started_for_one_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    ended: list[Any] = []

    def start(*_: object) -> Any:
        started.append(SimpleNamespace(dead=False))
        return started[-1]

    fakes = {
        "check_installed": lambda: None,
        "active_session": lambda: None,
        "start_session": start,
        "is_alive": lambda session: not session.dead,
        "end_session": ended.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(spark_session, name, fake)
    monkeypatch.setattr(engine_module, "_Job", Dying)
    engine = engine_module.SparkEngine("local[1]", {})
    with pytest.raises(spark_session.SparkError, match="JVM ended") as failed:
        list(engine.run([]))
    assert failed.value.retriable
    assert list(engine.run([])) == list(engine.run([])) == [Rows(0)]
    assert (len(started), ended) == (2, started[:1])
    engine.close()
    assert ended == started


class Lost:
    """A lock that another run has taken over."""

    def keep(self, now: bool = False) -> None:
        if now:
            raise LockedError("another run took the repository over")


class Overtaken:
    """A lock that is lost unseen right before the commit, to a run that commits.

    Args:
        other: takes a backup.
    """

    def __init__(self, other: Callable[[], Any]) -> None:
        self._other = other

    def keep(self, now: bool = False) -> None:
        if now:
            self._other()


class Held:
    """A lock that nobody else wants."""

    def keep(self, now: bool = False) -> None:
        pass


class Quiet(World):
    """A world in which nothing happens while it is read."""

    def disturb(self) -> None:
        pass


def begun(seed: int) -> tuple[Quiet, ModelSource, list[str]]:
    """Return a world with something to read, a source of it, and a list that gets the cuts that are made."""
    world = Quiet(seed)
    for _ in range(20):
        world.server.write()
    made: list[str] = []

    class Source(ModelSource):
        def make_cut(self) -> CutInfo:
            cut = super().make_cut()
            made.append(cut.name)
            return cut

    storage: MemoryStorage = world.storage
    return world, Source(world.server, storage, world), made


def test_a_run_that_lost_its_lock_does_not_make_a_new_cut() -> None:
    world, source, made = begun(1)

    def gone(spec: Task) -> TaskResult:
        raise HistoryChangedError("the cut is gone")

    with pytest.raises(LockedError):
        Run(world.repository, source, InlineEngine(gone), Lost()).backup()
    assert len(made) == 1


def test_a_run_whose_number_was_taken_changes_nothing() -> None:
    world, source, made = begun(4)
    engine = InlineEngine(lambda spec: stage_read(world.repository, spec, source.read_group))

    def other() -> None:
        world.server.write()
        Run(world.repository, source, engine, Held(), restart=True).backup()

    with pytest.raises(LockedError, match="another run committed backup 1 first"):
        Run(world.repository, source, engine, Overtaken(other)).backup()
    chain = world.check_all()
    assert (len(chain), chain.by_number(1).cut_name) == (1, made[1])


def test_what_was_read_for_another_chain_is_not_gone_on_with() -> None:
    world, source, made = begun(5)
    right = InlineEngine(lambda spec: stage_read(world.repository, spec, source.read_group))

    def fails(spec: Task) -> TaskResult:
        raise UnavailableError("away")

    def left() -> None:
        with pytest.raises(UnavailableError):
            Run(world.repository, source, InlineEngine(fails), Held()).backup()

    left()
    assert Run(world.repository, source, right, Held()).backup().cut_name == made[0]
    world.server.write()
    left()
    [name] = world.storage.names("staging/")
    plan = unseal(world.storage.read(name), name)
    # As one that did not know what has expired since.
    world.storage.objects[name] = seal({**plan, "parent": plan["parent"] + "+1"})
    assert Run(world.repository, source, right, Held()).backup().cut_name == made[2]
    world.check_all()


def test_what_does_not_continue_the_chain_is_not_gone_on_with() -> None:
    world, source, made = begun(2)

    def wrong(spec: Task) -> TaskResult:
        result = stage_read(world.repository, spec, source.read_group)
        later = {p: entry._replace(start=entry.start + 1) for p, entry in result.entries.items()}
        return result._replace(entries=later)

    with pytest.raises(RepositoryDamagedError, match="goes on from"):
        Run(world.repository, source, InlineEngine(wrong), Held()).backup()
    assert world.server.cuts == {}
    right = InlineEngine(lambda spec: stage_read(world.repository, spec, source.read_group))
    assert Run(world.repository, source, right, Held()).backup().cut_name == made[1]
    world.check_all()


def test_restarting_gives_up_what_was_there_once() -> None:
    world, source, made = begun(3)

    def fails(spec: Task) -> TaskResult:
        if spec.index == 1:
            raise UnavailableError("away")
        return stage_read(world.repository, spec, source.read_group)

    said: list[str] = []
    run = Run(
        world.repository, source, InlineEngine(fails), Held(), group_seqnos=3, say=said.append
    )
    for restart, cuts in ((False, 1), (True, 2)):
        run.restart = restart
        with pytest.raises(UnavailableError):
            run.backup()
        assert len(made) == cuts
    # The next turn of a loop.
    with pytest.raises(UnavailableError):
        run.backup()
    assert len(made) == 2
    assert said == ["going on with an interrupted run, at its cut"]
