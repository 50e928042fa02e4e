"""The example that mirrors a bucket into SQLite: killed at any moment, it ends equal, each change applied once."""

import importlib.util
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer, wait_until
from tests.model import Row as ModelRow
from tests.model import State, apply, partition_of
from upr_client import (
    Change,
    ChangeBatch,
    Client,
    Position,
    Rollback,
    SqlitePositions,
    UprError,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import resume_after_rollback
from upr_protocol.limits import ADMIN_SOCKET
from upr_protocol.position import MarkerHistory

EXAMPLE = Path(__file__).resolve().parents[2] / "client" / "examples" / "sqlite_mirror.py"
ROUNDS = int(os.environ.get("UPR_MIRROR_ROUNDS", "4"))

# Every applied change is noted, and one that is noted twice is an error in the mirror itself. A change that sets a
# key is a row of the table mirror that no undo row could have brought back; one that overwrites or deletes is an undo
# row. After a rollback the seqnos above are free again, once their position says so.
AUDIT = """
CREATE TABLE audit (partition, seqno, kind, PRIMARY KEY (partition, seqno, kind)) WITHOUT ROWID;
CREATE TABLE undone (partition, seqno, changes);
CREATE TRIGGER audit_set AFTER INSERT ON mirror WHEN NOT EXISTS (
    SELECT 1 FROM undo WHERE partition = NEW.partition AND key = NEW.key AND since = NEW.seqno)
BEGIN
    INSERT INTO audit VALUES (NEW.partition, NEW.seqno, 'set');
END;
CREATE TRIGGER audit_replaced AFTER INSERT ON undo
BEGIN
    SELECT RAISE(ABORT, 'a change was applied to a newer value') WHERE NEW.since >= NEW.until;
    INSERT INTO audit VALUES (NEW.partition, NEW.until, 'replaced');
END;
CREATE TRIGGER audit_position AFTER UPDATE ON upr_positions
BEGIN
    SELECT RAISE(ABORT, 'a position is behind what was applied')
    WHERE json_extract(NEW.position, '$.seqno') >= json_extract(OLD.position, '$.seqno')
    AND json_extract(NEW.position, '$.failover_id') = json_extract(OLD.position, '$.failover_id')
    AND EXISTS (SELECT 1 FROM audit WHERE partition = NEW.partition
        AND seqno > json_extract(NEW.position, '$.seqno'));
    INSERT INTO undone SELECT NEW.partition, json_extract(NEW.position, '$.seqno'), count(*) FROM audit
        WHERE partition = NEW.partition AND seqno > json_extract(NEW.position, '$.seqno')
        HAVING count(*) > 0;
    DELETE FROM audit WHERE partition = NEW.partition AND seqno > json_extract(NEW.position, '$.seqno');
END;
"""


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("sqlite_mirror", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MirrorProcess:
    """The example as a process, pruning often, on a database that audits it."""

    def __init__(self, folder: Path, target: str) -> None:
        self.database = folder / "mirror.db"
        self.log = folder / "mirror.log"
        self.target = target
        self.heard = 0
        self._process: subprocess.Popen[bytes] | None = None
        with closing(load_example().Mirror(str(self.database)).connection) as connection:
            SqlitePositions(connection, consumer="mirror").save({})
            connection.executescript(AUDIT)

    def start(self, *options: str) -> None:
        assert self._process is None
        code = (
            f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); import sqlite_mirror; "
            "sqlite_mirror.PRUNE_EVERY = 10; sys.exit(sqlite_mirror.main())"
        )
        command = [sys.executable, "-c", code, "--target", self.target]
        command += ["--database", str(self.database), "--commit-seconds", "0.02", *options]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.poll() is None, self.words()
            process.kill()
            process.wait()

    def end(self, with_signal: int | None = None) -> int:
        """Wait for the end, and return the exit status."""
        process, self._process = self._process, None
        assert process is not None
        if with_signal is not None:
            process.send_signal(with_signal)
        try:
            return process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, *words: str) -> None:
        """Wait until it has said one of these since the last strike."""
        wait_until(
            lambda: any(word in self.words()[self.heard :] for word in words),
            f"it does not say {words}",
        )

    def wait_for_changes(self) -> None:
        """Wait until it has applied some more."""
        changes = self.count("audit")
        wait_until(lambda: self.count("audit") > changes + 20, "nothing is mirrored")

    def ask(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.database, timeout=WAIT_SECONDS)) as connection:
            return connection.execute(query).fetchall()

    def count(self, table: str) -> int:
        return int(self.ask(f"SELECT count(*) FROM {table}")[0][0])

    def state(self) -> State:
        return dict(self.ask("SELECT key, value FROM mirror"))


class Writer:
    """Writes to few keys of few partitions for as long as it is not stopped, whatever happens to the server."""

    def __init__(self, target: str, seed: int) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        candidates = (b"key %d" % number for number in range(100_000))
        self._keys = [key for key in candidates if partition_of(key) % 128 == 5][:300]
        self.batches = 0

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _rows(self) -> list[tuple[bytes, bytes | None]]:
        rng = self._rng
        return [
            (key, None if rng.random() < 0.2 else rng.randbytes(rng.randint(0, 60)))
            for key in rng.choices(self._keys, k=rng.randint(1, 60))
        ]

    def _run(self) -> None:
        while not self._stopping.is_set():
            # Another one after each error: a server that went back to an older copy knows older numbers of producers.
            try:
                with Client(self._target, retry_seconds=1.0) as client:
                    bucket = client.bucket()
                    while not self._stopping.is_set():
                        bucket.write_many(self._rows())
                        self.batches += 1
                        # So that the mirror is never far behind, and is killed near what was just written.
                        self._stopping.wait(0.004)
            except UprError:
                continue

    def wait(self, batches: int) -> None:
        """Wait until so many more were written."""
        goal = self.batches + batches
        wait_until(lambda: self.batches >= goal, "the writer does not get on")


def bucket_state(target: str) -> State:
    state: State = {}
    with Client(target) as client, client.bucket().changes(until="now") as changes:
        for batch in changes.batches():
            apply(state, [ModelRow(c.seqno, c.key, c.value) for c in batch.changes])
    return state


@contextmanager
def mirrored(server: RunningServer, folder: Path) -> Iterator[MirrorProcess]:
    mirror = MirrorProcess(folder, server.target)
    try:
        yield mirror
    finally:
        mirror.close()


def equal_now(mirror: MirrorProcess, server: RunningServer) -> None:
    mirror.start("--until-now")
    assert mirror.end() == 0, mirror.words()
    state = bucket_state(server.target)
    assert state
    assert mirror.state() == state
    assert "Traceback" not in mirror.words()


class Disaster:
    """Kills mirror and server, and brings the server back from an older copy of its directory."""

    def __init__(self, server: RunningServer, mirror: MirrorProcess, seed: int) -> None:
        self.rng = random.Random(seed)
        self._server = server
        self._mirror = mirror
        self._copies: list[Path] = []

    def strike(self, kind: str) -> None:
        server, mirror = self._server, self._mirror
        if kind in ("mirror", "both"):
            mirror.kill()
        if kind != "mirror":
            server.kill()
            mirror.heard = len(mirror.words())
            if kind == "copy" and self._copies:
                shutil.rmtree(server.data)
                shutil.copytree(
                    self.rng.choice(self._copies),
                    server.data,
                    ignore=shutil.ignore_patterns(ADMIN_SOCKET),
                )
            elif len(self._copies) < 3 or self.rng.random() < 0.3:
                copy = server.folder / f"copy {len(self._copies) % 3}"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(server.data, copy, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
                self._copies = [*self._copies, copy][-3:]
            server.start()
        if kind in ("mirror", "both"):
            mirror.heard = len(mirror.words())
            mirror.start()


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_each_change_is_applied_once_whatever_is_killed(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process("--tail-bytes", "300000")
    with mirrored(server, tmp_path) as mirror, Writer(server.target, 1) as writer:
        disaster = Disaster(server, mirror, 2)
        rng = disaster.rng
        mirror.start()
        mirror.wait_for(" changes, ")
        disaster.strike("server")
        for number in range(ROUNDS):
            kind = (
                "copy" if number < 2 else rng.choice(["mirror", "mirror", "server", "both", "copy"])
            )
            if number < 2:
                mirror.wait_for_changes()
            elif rng.random() < 0.8:
                # Otherwise what is killed has hardly begun.
                mirror.wait_for(" changes, ")
            writer.wait(rng.randint(0, 20))
            disaster.strike(kind)
            if kind == "copy" and rng.random() < 0.7:
                # Sooner or later in the middle of going back.
                mirror.wait_for("back from", " changes, ")
                disaster.strike("mirror")
        mirror.kill()
        writer.__exit__()
        equal_now(mirror, server)
        assert mirror.count("undone") > 0, "no rollback undid anything"
        assert mirror.count("audit") > 0


@pytest.mark.long
def test_a_signal_ends_it_cleanly(
    shared_server: RunningServer, target: str, tmp_path: Path
) -> None:
    with mirrored(shared_server, tmp_path) as mirror, Writer(target, 3) as writer:
        for number in (signal.SIGINT, signal.SIGTERM):
            mirror.start()
            mirror.wait_for_changes()
            assert mirror.end(number) == 0, mirror.words()
        writer.__exit__()
        equal_now(mirror, shared_server)


def test_what_is_wrong_is_said_in_words(tmp_path: Path) -> None:
    mirror = MirrorProcess(tmp_path, "127.0.0.1:1")
    connection = sqlite3.connect(mirror.database)
    SqlitePositions(connection, consumer="mirror").save({3: Position.fresh()})
    connection.execute("UPDATE upr_positions SET crc32 = crc32 + 1")
    connection.commit()
    connection.close()
    mirror.start("--until-now")
    assert mirror.end() == 1
    assert "consumer 'mirror', partition 3, is damaged" in mirror.words()
    assert "Traceback" not in mirror.words()


# The tables alone, against the states at all markers.


class Stream:
    """One partition as the SDK hands it to the mirror; remembers the state at every marker."""

    def __init__(self, mirror: Any) -> None:
        self.mirror = mirror
        self.history = MarkerHistory()
        self.states: dict[int, State] = {0: {}}
        self.state: State = {}
        self.seqno = 0
        self.failover_id = 1

    def position(self) -> Position:
        return Position(
            9,
            self.failover_id,
            self.failover_id,
            self.seqno,
            self.seqno,
            self.history.as_tuple(),
            FailoverLog.born(self.failover_id),
        )

    def run(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        changes = []
        for key, value in rows:
            self.seqno += 1
            changes.append(Change(5, self.seqno, "delete" if value is None else "set", key, value))
            apply(self.state, [ModelRow(self.seqno, key, value)])
        batch = ChangeBatch([])
        batch._changes = changes
        self.mirror.apply(batch)
        self.history.add(self.seqno)
        self.states[self.seqno] = dict(self.state)

    def save(self) -> None:
        self.mirror.save({5: self.position()})

    def roll_back(self, seqno: int) -> None:
        resume = resume_after_rollback(self.position(), seqno)
        if not resume.undo:
            return
        self.mirror.undo(Rollback(5, self.seqno, resume.seqno, 1, 2, "rule", "words"))
        self._go_to(resume.seqno)
        self.save()

    def start_again(self) -> None:
        """Do what the SDK does after the mirror emptied the partition."""
        assert self.mirror.load([5]) == {5: Position.fresh()}
        self._go_to(0)

    def _go_to(self, seqno: int) -> None:
        self.seqno = seqno
        self.failover_id += 1
        self.history = MarkerHistory(at for at in self.history.as_tuple() if at <= seqno)
        self.state = dict(self.states[seqno])
        self.states = {at: state for at, state in self.states.items() if at <= seqno}


def table(mirror: Any) -> State:
    return dict(mirror.connection.execute("SELECT key, value FROM mirror WHERE partition = 5"))


@pytest.mark.parametrize("seed", range(40))
def test_rollbacks_bring_back_what_was_there(seed: int) -> None:
    rng = random.Random(seed)
    example = load_example()
    example.PRUNE_EVERY = rng.choice([1, 7, 1000])
    mirror = example.Mirror(":memory:")
    stream = Stream(mirror)
    keys = [b"k%d" % number for number in range(8)]
    weights = (8, rng.choice([0, 2, 8]), rng.choice([0.1, 1]), rng.choice([0, 0.5]))
    kinds = rng.choices(["run", "save", "back", "reopen"], weights, k=400)
    with closing(mirror.connection):
        for kind in kinds:
            if kind == "run":
                picked = rng.choices(keys, k=rng.randint(1, 6))
                stream.run([(k, None if rng.random() < 0.2 else rng.randbytes(3)) for k in picked])
            elif kind == "save":
                stream.save()
            elif kind == "reopen":
                stream.save()
                stream.history = MarkerHistory(mirror.load([5])[5].markers)
                mirror._kept.clear()
            else:
                try:
                    stream.roll_back(rng.randint(0, stream.seqno + 1))
                except example.StartAgain:
                    stream.start_again()
            assert table(mirror) == stream.state


def test_a_partition_starts_again_when_its_marker_was_not_in_the_last_position() -> None:
    """The SDK thins old markers out anew for each position, so one that was left out may be there again."""
    example = load_example()
    mirror = example.Mirror(":memory:")
    stream = Stream(mirror)
    with closing(mirror.connection):
        for number in range(4):
            stream.run([(b"k%d" % key, b"%d" % number) for key in range(3)])
        whole = stream.position()
        assert whole.markers == (3, 6, 9, 12)
        mirror.save({5: replace(whole, markers=(3, 9, 12))})
        stream.run([(b"new", b"value")])
        mirror.save({5: stream.position()})
        assert mirror.load([5])[5].markers == (3, 9, 12, 13)
        with pytest.raises(example.StartAgain):
            stream.roll_back(8)
        stream.start_again()
        assert table(mirror) == {}
        stream.run([(b"new", b"value")])
        stream.save()
        assert table(mirror) == stream.state == {b"new": b"value"}


def test_the_undo_table_stays_small() -> None:
    example = load_example()
    example.PRUNE_EVERY = 100
    mirror = example.Mirror(":memory:")
    stream = Stream(mirror)
    with closing(mirror.connection):
        for number in range(3000):
            stream.run([(b"hot", b"%d" % number), (b"key %d" % (number % 7), b"v")])
            stream.save()
        (rows,) = mirror.connection.execute("SELECT count(*) FROM undo").fetchone()
        # Eight keys at 64 markers, and what came since the last pruning.
        assert rows <= 8 * 64 + 100
        stream.roll_back(stream.seqno)
        assert table(mirror) == stream.state


def test_the_undo_table_stays_small_over_many_short_runs(tmp_path: Path) -> None:
    example = load_example()
    example.PRUNE_EVERY = 100
    mirror = example.Mirror(str(tmp_path / "db"))
    stream = Stream(mirror)
    for run in range(100):
        if run:
            mirror.connection.close()
            stream.mirror = mirror = example.Mirror(str(tmp_path / "db"))
        mirror.load([5])
        for number in range(20):
            stream.run([(b"hot", b"%d" % number)])
        stream.save()
    with closing(mirror.connection):
        (rows,) = mirror.connection.execute("SELECT count(*) FROM undo").fetchone()
        assert rows <= 64 + 100
        stream.roll_back(stream.seqno - 30)
        assert table(mirror) == stream.state


def test_after_a_failure_nothing_more_is_saved(tmp_path: Path) -> None:
    example = load_example()
    mirror = example.Mirror(str(tmp_path / "db"))
    stream = Stream(mirror)
    with closing(mirror.connection):
        stream.run([(b"a", b"1")])
        stream.save()
        stored = mirror.load([5])
        stream.run([(b"b", b"1")])
        with pytest.raises(sqlite3.Error):
            stream.run([(b"c", "not bytes".encode), (b"d", b"")])  # type: ignore[list-item]
        # The SDK saves once more when the stream is closed.
        stream.save()
        assert mirror.load([5]) == stored
        assert table(mirror) == {b"a": b"1"}
