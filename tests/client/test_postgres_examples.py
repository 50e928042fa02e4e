"""The examples with PostgreSQL, on a real one, and on a real server that is killed."""

import json
import os
import random
import re
import runpy
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.test_examples import CLIENT, Example, command_of
from tests.conftest import StartServer
from tests.harness import wait_until
from upr_client import Change, Client, Group, Position
from upr_protocol.limits import ADMIN_SOCKET
from upr_protocol.position import MarkerHistory

pytestmark = [pytest.mark.postgres, pytest.mark.long]

GUIDE = (Path(__file__).parents[2] / "client" / "README.md").read_text()


@pytest.fixture(scope="module")
def dsn() -> Iterator[str]:
    """A database of its own, behind a socket in a folder."""
    import psycopg2

    folder = Path(tempfile.mkdtemp(prefix="upr-postgres-"))
    # It refuses to run as root, and Debian's package makes this user.
    user = "postgres" if os.getuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    programs = shutil.which("initdb") or max(
        map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    )
    data = ("-D", str(folder / "data"))
    make = [programs, "-A", "trust", "-U", "postgres", *data]
    subprocess.run(make, user=user, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    settings = ("listen_addresses=", "wal_level=logical", "fsync=off")
    options = [part for setting in settings for part in ("-c", setting)]
    program = str(Path(programs).resolve().with_name("postgres"))
    command = [program, *data, "-k", str(folder), *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, user=user, stdout=log, stderr=log, cwd=folder)
    try:
        address = f"host={folder} user=postgres dbname=postgres"

        def serves() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                psycopg2.connect(address).close()
            except psycopg2.OperationalError:
                return False
            return True

        wait_until(serves, "PostgreSQL")
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        shutil.rmtree(folder)


@contextmanager
def asked(dsn: str) -> Iterator[Any]:
    """Connect, each statement a transaction of its own; yield a cursor."""
    import psycopg2

    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


@pytest.fixture
def run_example(tmp_path: Path) -> Iterator[Callable[[list[str]], Example]]:
    """A function that starts an example; none is left after the test."""
    examples: list[Example] = []

    def run(command: list[str]) -> Example:
        examples.append(Example(tmp_path, command))
        return examples[-1]

    yield run
    for example in examples:
        example.process.kill()
        example.process.communicate()


def mirrored(dsn: str) -> dict[bytes, bytes]:
    with asked(dsn) as database:
        database.execute("SELECT to_regclass('mirror')")
        if database.fetchone() == (None,):
            return {}
        database.execute("SELECT key, value FROM mirror")
        return {bytes(key): bytes(value) for key, value in database}


def test_a_mirror_is_what_the_bucket_is_whatever_is_killed_or_undone(
    server_process: StartServer,
    run_example: Callable[[list[str]], Example],
    tmp_path: Path,
    dsn: str,
) -> None:
    server = server_process()
    command = [*command_of("postgres_mirror.py", server.target), "--dsn", dsn]
    expected: dict[bytes, bytes] = {}
    copied: dict[bytes, bytes] = {}
    copy = tmp_path / "copy"

    def has(rows: dict[bytes, bytes]) -> Callable[[], bool]:
        return lambda: mirrored(dsn) == rows

    with Client(server.target) as client:
        bucket = client.bucket()
        for turn in range(3):
            example = run_example(command)
            if turn == 1:
                example.process.kill()
                example.process.wait()
            expected |= {b"key-%d" % number: b"%d" % turn for number in range(turn, 200, turn + 1)}
            bucket.write_many([*expected.items(), (b"key-7", None)])
            expected.pop(b"key-7", None)
            if turn == 1:
                example = run_example(command)
            example.wait_until(has(expected))
            if turn == 0:
                second = subprocess.run(command, capture_output=True, text=True)
                assert (
                    second.stderr
                    == "postgres_mirror: another program keeps the mirror in this database\n"
                )
                assert second.returncode == 1
            if turn == 1:
                assert server.terminate() == 0
                shutil.copytree(server.data, copy, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
                copied = dict(expected)
                server.start()
            assert example.end(signal.SIGTERM) == 0
        example = run_example(command)
        assert server.terminate() == 0
        shutil.rmtree(server.data)
        shutil.move(copy, server.data)
        server.start()
        example.wait_until(has(copied))
        assert "changes undone" in example.words
        bucket.set(b"key-7", b"again")
        example.wait_until(has(copied | {b"key-7": b"again"}))
        assert example.end(signal.SIGTERM) == 0


def test_a_mirror_keeps_what_a_rollback_brings_back_and_no_more(dsn: str) -> None:
    import psycopg2

    mirror = runpy.run_path(str(CLIENT / "examples" / "postgres_mirror.py"))["Mirror"]
    draw, markers = random.Random(1), MarkerHistory()
    state: dict[bytes, bytes] = {}
    states: dict[int, dict[bytes, bytes]] = {}
    with asked(dsn) as database, closing(psycopg2.connect(dsn)) as connection:
        database.execute("DROP TABLE IF EXISTS changes, positions CASCADE")
        kept = mirror(connection)
        assert not kept.load(range(1024))
        for marker in range(50, 10_001, 50):
            rows = []
            for seqno in range(marker - 49, marker + 1):
                # Some change all the time, and most are written once and deleted.
                number = draw.choice([draw.randrange(5), seqno, seqno - 50])
                key, value = b"%d" % number, b"%d" % seqno
                gone = number == seqno - 50
                rows.append(
                    (1, seqno, "delete", key, None) if gone else (1, seqno, "set", key, value)
                )
                state.pop(key, None)
                if not gone:
                    state[key] = value
            kept.apply(SimpleNamespace(changes=rows))
            markers.add(marker)
            states[marker] = dict(state)
            told = Position(1, 5, 5, marker, marker, markers.as_tuple(), None)
            kept.save({1: told})
        assert mirrored(dsn) == state
        database.execute("SELECT count(*) FROM changes")
        there = set(state.items()).union(*(states[marker].items() for marker in told.markers))
        # Behind each value there may be a delete.
        assert database.fetchone()[0] <= 2 * len(there) + 1000 < 6000
        for marker in reversed(told.markers):
            kept.undo(SimpleNamespace(partition=1, seqno=marker, from_seqno=0))
            connection.commit()
            assert mirrored(dsn) == states[marker]
        database.execute("DROP TABLE changes, positions CASCADE")


def test_a_mirror_is_pruned_over_many_short_runs(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg2

    mirror = runpy.run_path(str(CLIENT / "examples" / "postgres_mirror.py"))["Mirror"]
    monkeypatch.setitem(mirror.save.__globals__, "PRUNE_EVERY", 100)
    random.seed(1)
    with asked(dsn) as database, closing(psycopg2.connect(dsn)) as connection:
        database.execute("DROP TABLE IF EXISTS changes, positions CASCADE")
        for last in range(20, 2001, 20):
            kept = mirror(connection)
            kept.load(range(1024))
            rows = [(1, seqno, "set", b"key", b"") for seqno in range(last - 19, last + 1)]
            kept.apply(SimpleNamespace(changes=rows))
            kept.save({1: Position(1, 5, 5, last, last, (last,), None)})
        database.execute("SELECT count(*), max(seqno) FROM changes")
        count, newest = database.fetchone()
        assert count < 1000
        assert newest == 2000
        database.execute("DROP TABLE changes, positions CASCADE")


def test_a_bucket_has_what_the_tables_have(
    server_process: StartServer, run_example: Callable[[list[str]], Example], dsn: str
) -> None:
    server = server_process()
    command = [*command_of("postgres_capture.py", server.target), "--dsn", dsn]
    large = "large" * 10_000
    with Client(server.target) as client, asked(dsn) as database:
        bucket = client.bucket()

        def kept(key: str) -> Any:
            value = bucket.get(f"public.users/{key}".encode())
            return value and json.loads(value)

        database.execute(
            "CREATE TABLE users (id int PRIMARY KEY, name text, score float8, ok bool, note text)"
        )
        database.execute("ALTER TABLE users ALTER note SET STORAGE EXTERNAL")
        database.execute("INSERT INTO users VALUES (1, 'Ada', 1.5, true, NULL)")
        missing = run_example(command)
        assert missing.end() == 1
        assert "there is no publication 'upr'" in missing.words
        database.execute(
            "CREATE PUBLICATION upr FOR TABLE users WITH (publish = 'insert, update, delete')"
        )
        example = run_example(command)
        example.wait_until(lambda: following(dsn))
        database.execute("UPDATE users SET id = id")
        example.wait_until(lambda: kept('["1"]'))
        assert kept('["1"]') == {"id": 1, "name": "Ada", "score": "1.5", "ok": True, "note": None}
        example.process.kill()
        example.process.wait()
        database.execute("INSERT INTO users SELECT n, 'Name ' || n FROM generate_series(2, 2500) n")
        database.execute("UPDATE users SET id = 3000 WHERE id = 2")
        database.execute("DELETE FROM users WHERE id = 3")
        database.execute("ALTER TABLE users ADD born date")
        database.execute(
            "INSERT INTO users (id, born, note) VALUES (4000, '1815-12-10', %s)", (large,)
        )
        example = run_example(command)
        example.wait_until(lambda: kept('["4000"]'))
        assert kept('["4000"]')["born"] == "1815-12-10"
        assert (kept('["2"]'), kept('["3"]'), kept('["3000"]')["name"]) == (None, None, "Name 2")
        assert kept('["2500"]') is not None
        database.execute("ALTER TABLE users REPLICA IDENTITY FULL")
        database.execute("UPDATE users SET name = 'Grace' WHERE id = 4000")
        example.wait_until(lambda: kept('["4000"]')["name"] == "Grace")
        assert kept('["4000"]')["note"] == large
        assert example.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("name", "columns", "changes", "words"),
    [
        (
            "moved",
            "note text",
            ["INSERT INTO moved VALUES (1, %s)", "UPDATE moved SET id = 2"],
            "a large value of table public.moved was not told; ALTER TABLE public.moved REPLICA IDENTITY FULL",
        ),
        (
            "other",
            "code int NOT NULL UNIQUE",
            [
                "ALTER TABLE other REPLICA IDENTITY USING INDEX other_code_key",
                "INSERT INTO other VALUES (1, 1)",
                "DELETE FROM other",
            ],
            "table public.other does not tell the primary key of what changes; "
            "ALTER TABLE public.other REPLICA IDENTITY DEFAULT",
        ),
        ("dropped", "code int", ["INSERT INTO dropped VALUES (1, 1)", "DROP TABLE dropped"], None),
    ],
)
def test_a_capture_writes_what_it_was_told_and_nothing_else(
    target: str,
    run_example: Callable[[list[str]], Example],
    dsn: str,
    name: str,
    columns: str,
    changes: list[str],
    words: str | None,
) -> None:
    command = [*command_of("postgres_capture.py", target), "--dsn", dsn, "--publication", name]
    with Client(target) as client, asked(dsn) as database:
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, {columns})")
        if columns == "note text":
            database.execute(f"ALTER TABLE {name} ALTER note SET STORAGE EXTERNAL")
        database.execute(
            f"CREATE PUBLICATION {name} FOR TABLE {name} WITH (publish = 'insert, update, delete')"
        )
        database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
        for change in changes:
            database.execute(change, ("large" * 10_000,) if "%s" in change else None)
        example = run_example(command)
        if words is None:
            key = f'public.{name}/["1"]'.encode()
            example.wait_until(lambda: client.bucket().get(key))
            assert example.end(signal.SIGINT) == 0
            return
        assert example.end() == 1
        assert example.words == f"postgres_capture: {words}\n"
        with client.bucket().changes(until="now") as events:
            rows = [event for event in events if isinstance(event, Change)]
        # Neither a row with null in the place of what was not told, nor the delete of a row that never was.
        assert [(row.op, row.key) for row in rows] in ([], [("set", b'public.moved/["1"]')])


def following(dsn: str) -> bool:
    """Return whether somebody reads the slot."""
    with asked(dsn) as database:
        database.execute("SELECT FROM pg_replication_slots WHERE active")
        return bool(database.rowcount)


class Database:
    """The two methods of psycopg that the guide uses, over psycopg2."""

    def __init__(self, dsn: str) -> None:
        import psycopg2

        self.connection = psycopg2.connect(dsn)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.connection:
            yield

    def execute(self, statement: str, arguments: tuple[Any, ...] = ()) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(statement, arguments)
        return cursor


def test_the_guides_member_applies_each_change_once_and_is_fenced(target: str, dsn: str) -> None:
    section = GUIDE.partition("**Exactly once in a group**")[2]
    table, member = (
        found[1]
        for kind in ("sql", "py")
        if (found := re.search(f"```{kind}\n(.*?)```", section, re.S))
    )
    with asked(dsn) as other:
        # Another example has a table of that name.
        other.execute("CREATE SCHEMA member")
    dsn += " options=-csearch_path=member"
    with asked(dsn) as other, Client(target) as client:
        other.execute(table + "; CREATE TABLE sizes (key bytea PRIMARY KEY, size int)")
        bucket = client.bucket()

        def run(apply: Callable[[dict[str, Any], Any], None]) -> None:
            names: dict[str, Any] = {
                "bucket": bucket,
                "database": Database(dsn),
                "secrets": secrets,
            }
            names |= {"Group": Group, "Position": Position}
            names["apply"] = lambda _, changes: apply(names, changes)
            try:
                exec(member, names)
            finally:
                names["database"].connection.close()

        def insert(names: dict[str, Any], changes: Any) -> None:
            # A key that comes twice is an error.
            for change in changes:
                row = (change.key, len(change.value))
                names["database"].execute("INSERT INTO sizes VALUES (%s, %s)", row)
            counted = names["database"].execute("SELECT count(*) FROM sizes").fetchone()
            if counted == (written,):
                names["changes"].stop()

        def insert_too_late(names: dict[str, Any], changes: Any) -> None:
            other.execute("UPDATE positions SET owner = 'another'")
            insert(names, changes)

        for written in (50, 100):
            bucket.write_many((b"key %d" % i, b"value") for i in range(written - 50, written))
            with pytest.raises(RuntimeError, match="another member owns"):
                run(insert_too_late)
            run(insert)
        other.execute("SELECT count(*), sum(size) FROM sizes")
        assert other.fetchone() == (100, 500)
