"""Positions in SQLite: alone, and in the application's transaction; damage, locks, failures."""

import multiprocessing
import os
import random
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.client.test_positions import at, file_size_limit
from tests.fuzz import damaged
from upr_client import SqlitePositions, UprError, positions
from upr_client.errors import (
    InvalidArgumentError,
    PositionBusyError,
    PositionDamagedError,
    PositionStoreError,
)
from upr_client.testing.positions import positions_to_keep


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


def run(path: Path, statement: str, *arguments: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, arguments)


def test_loading_writes_nothing(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert SqlitePositions(connection).load([1]) == {}
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        assert connection.total_changes == 0


def test_where_the_program_goes_later_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    store = SqlitePositions(path.name)
    store.save({3: at(10)})
    (path.parent / "other").mkdir()
    monkeypatch.chdir(path.parent / "other")
    assert store.load([3]) == {3: at(10)}
    assert not list(Path().iterdir())


def test_consumers_share_a_table_and_tables_a_database(path: Path) -> None:
    stores = [
        SqlitePositions(path),
        SqlitePositions(path, consumer="a"),
        SqlitePositions(path, consumer="Größe 日本"),
        SqlitePositions(path, table="other"),
        SqlitePositions(path, table="select", consumer="a"),
    ]
    for number, store in enumerate(stores):
        assert store.load([1]) == {}
        store.save({1: at(number + 1)})
    assert [store.load([1])[1].seqno for store in stores] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "table",
    ["", "1a", "a b", 'a"b', "a;", "a-b", "täble", "sqlite_x", "SQLITE_x", "a" * 101, "a\n"],
)
def test_a_table_is_named_plainly(path: Path, table: str) -> None:
    with pytest.raises(InvalidArgumentError, match="table is"):
        SqlitePositions(path, table=table)


def test_a_consumer_has_a_name_of_a_consumer(path: Path) -> None:
    for name in ("a\n", "x" * 201, "\udc80"):
        with pytest.raises(InvalidArgumentError, match="consumer"):
            SqlitePositions(path, consumer=name)


@pytest.mark.parametrize("name", ["", ":memory:"])
def test_a_database_that_nobody_could_load_from_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="ends with each transaction"):
        SqlitePositions(name)


def test_a_save_is_on_the_disk_when_it_returns(path: Path) -> None:
    statements: list[str] = []
    real = sqlite3.connect

    def connect(*arguments: object, **options: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = real(*arguments, **options)  # type: ignore[call-overload]
        connection.set_trace_callback(statements.append)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect)
        SqlitePositions(path).save({1: at(1), 2: at(2)})
    assert statements[0] == "PRAGMA synchronous=EXTRA"
    assert statements[1] == "BEGIN IMMEDIATE"
    assert statements[-1] == "COMMIT"
    assert sum(statement.startswith("INSERT") for statement in statements) == 2


@pytest.mark.parametrize("isolation", [None, "", "IMMEDIATE"])
def test_positions_in_the_transaction_of_the_data(path: Path, isolation: str | None) -> None:
    with closing(sqlite3.connect(path, isolation_level=isolation)) as connection:  # type: ignore[arg-type]
        connection.execute("CREATE TABLE data (value)")
        connection.row_factory = sqlite3.Row
        store = SqlitePositions(connection, consumer="c")
        assert store.load([1]) == {}

        def change(value: int) -> None:
            if isolation is None:
                connection.execute("BEGIN")
            connection.execute("INSERT INTO data VALUES (?)", (value,))
            store.save_in(connection, {1: at(value)})

        change(1)
        connection.rollback()
        assert SqlitePositions(path, consumer="c").load([1]) == {}
        change(2)
        assert SqlitePositions(path, consumer="c").load([1]) == {}
        connection.commit()
        assert SqlitePositions(path, consumer="c").load([1]) == {1: at(2)}
        change(3)
        connection.rollback()
        assert store.load([1]) == {1: at(2)}
        assert [tuple(row) for row in connection.execute("SELECT value FROM data")] == [(2,)]


def test_saving_in_a_transaction_needs_one(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        store = SqlitePositions(connection)
        with pytest.raises(InvalidArgumentError, match="none was begun") as caught:
            store.save_in(connection, {1: at(1)})
        assert "BEGIN" in caught.value.hint
        assert store.load([1]) == {}


def test_save_never_ends_a_transaction_of_the_application(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        store = SqlitePositions(connection)
        store.save({1: at(1)})
        assert not connection.in_transaction
        connection.execute("CREATE TABLE data (value)")
        connection.execute("INSERT INTO data VALUES (1)")
        with pytest.raises(InvalidArgumentError, match="without an open transaction") as caught:
            store.save({1: at(2)})
        assert "save_in" in caught.value.hint
        assert connection.in_transaction
        connection.rollback()
        store.save({1: at(3)})
        assert SqlitePositions(path).load([1]) == {1: at(3)}


def test_a_connection_of_another_thread_or_that_was_closed_is_told(path: Path) -> None:
    connection = sqlite3.connect(path)
    store = SqlitePositions(connection)
    errors: list[UprError] = []

    def save() -> None:
        try:
            store.save({1: at(1)})
        except UprError as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    connection.close()
    save()
    for error in errors:
        assert isinstance(error, InvalidArgumentError)
        assert "check_same_thread=False" in error.hint
    assert len(errors) == 2
    with pytest.raises(InvalidArgumentError, match="cannot be used"):
        SqlitePositions(connection)


DAMAGE = [
    ("UPDATE upr_positions SET crc32 = crc32 + 1 WHERE partition = 2", "CRC32"),
    ("UPDATE upr_positions SET crc32 = 'x' WHERE partition = 2", "CRC32"),
    (
        "UPDATE upr_positions SET position = replace(position, '5', '6') WHERE partition = 2",
        "CRC32",
    ),
    ("UPDATE upr_positions SET position = CAST(x'ff00' AS TEXT) WHERE partition = 2", "CRC32"),
    ("UPDATE upr_positions SET position = '' WHERE partition = 2", "CRC32"),
    ("UPDATE upr_positions SET position = 17 WHERE partition = 2", "CRC32"),
    ("UPDATE upr_positions SET position = zeroblob(65537) WHERE partition = 2", "65536 bytes"),
    ("UPDATE upr_positions SET position = zeroblob(1000000) WHERE partition = 2", "65536 bytes"),
    ("UPDATE upr_positions SET format = 2 WHERE partition = 2", "format 2"),
    ("UPDATE upr_positions SET format = '1' || 'x' WHERE partition = 2", "format"),
    (
        "UPDATE upr_positions SET (crc32, position) = "
        "(SELECT crc32, position FROM upr_positions WHERE consumer = 'c' AND partition = 3) WHERE partition = 2",
        "CRC32",
    ),
    (
        "UPDATE upr_positions SET (crc32, position) = "
        "(SELECT crc32, position FROM upr_positions WHERE consumer = 'd' AND partition = 2) WHERE consumer = 'c'",
        "CRC32",
    ),
]


@pytest.mark.parametrize(("statement", "words"), DAMAGE)
def test_a_damaged_row_is_named_and_concerns_nobody_else(
    path: Path, statement: str, words: str
) -> None:
    store, other = SqlitePositions(path, consumer="c"), SqlitePositions(path, consumer="d")
    store.save({2: at(5), 3: at(6)})
    other.save({2: at(7), 3: at(8)})
    run(path, statement.replace("WHERE partition = 2", "WHERE partition = 2 AND consumer = 'c'"))
    with pytest.raises(PositionDamagedError) as caught:
        store.load(range(1024))
    message = caught.value.message
    assert words in message
    for name in (str(path), "upr_positions", "consumer 'c'", "partition 2"):
        assert name in message
    assert "start it from zero" in caught.value.hint
    assert other.load(range(1024)) == {2: at(7), 3: at(8)}
    if "consumer = 'd'" not in statement:
        assert store.load([3, 4]) == {3: at(6)}
    # The remedy.
    run(path, "DELETE FROM upr_positions WHERE consumer = 'c' AND partition = 2")
    assert 2 not in store.load([2])


def test_a_row_that_is_whole_but_no_position_is_damage(path: Path) -> None:
    store = SqlitePositions(path)
    for text in ("{", "[]", "[" * 60_000, '{"format":2}', '{"format":1}', "NaN"):
        store.save({1: at(1)})
        crc = store._crc32(1, text.encode())
        run(path, "UPDATE upr_positions SET position = ?, crc32 = ?", text, crc)
        with pytest.raises(PositionDamagedError, match=r"partition 1, is damaged"):
            store.load([1])


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"something else" * 1000)
    for call in (
        lambda: SqlitePositions(path).load([1]),
        lambda: SqlitePositions(path).save({1: at(1)}),
    ):
        with pytest.raises(PositionDamagedError, match="damaged or none") as caught:
            call()
        assert str(path) in caught.value.message
        assert "start from zero" in caught.value.hint
    assert path.read_bytes() == b"something else" * 1000


def test_a_table_of_somebody_else_is_left_alone(path: Path) -> None:
    run(path, "CREATE TABLE upr_positions (other)")
    calls: list[Callable[[], object]] = [
        lambda: SqlitePositions(path).load([1]),
        lambda: SqlitePositions(path).save({1: at(1)}),
    ]
    for call in calls:
        with pytest.raises(PositionStoreError, match="upr_positions") as caught:
            call()
        assert "table" in caught.value.hint


def test_a_locked_database_is_told_and_may_be_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "_BUSY_SECONDS", 0.05)
    store = SqlitePositions(path)
    store.save({1: at(1)})
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        calls: list[Callable[[], object]] = [
            lambda: store.save({1: at(2)}),
            lambda: store.load([1]),
        ]
        for call in calls:
            with pytest.raises(PositionBusyError, match="locked") as caught:
                call()
            assert caught.value.retriable
            assert str(path) in caught.value.message
        other.execute("COMMIT")
        assert store.load([1]) == {1: at(1)}
        store.save({1: at(2)})
        with closing(sqlite3.connect(path, timeout=0.05)) as own:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(PositionBusyError):
                SqlitePositions(own).save_in(own, {1: at(3)})
            own.rollback()
            with pytest.raises(PositionBusyError):
                SqlitePositions(own).save({1: at(3)})
            assert not own.in_transaction
    assert store.load([1]) == {1: at(2)}


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "app.db"
    calls: list[Callable[[], object]] = [
        lambda: SqlitePositions(path).load([1]),
        lambda: SqlitePositions(path).save({1: at(1)}),
        lambda: SqlitePositions(tmp_path).save({1: at(1)}),
    ]
    for call in calls:
        with pytest.raises(PositionStoreError, match="unable to open") as caught:
            call()
        assert str(tmp_path) in caught.value.message
        assert not caught.value.retriable


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_a_disk_that_is_full_in_the_middle_changes_nothing(path: Path, journal: str) -> None:
    run(path, f"PRAGMA journal_mode={journal}")
    store = SqlitePositions(path)
    before = {partition: at(5) for partition in range(64)}
    store.save(before)
    largest = positions_to_keep()["the largest of everything"]
    with file_size_limit(path.stat().st_size + 100_000), pytest.raises(PositionStoreError):
        store.save(dict.fromkeys(range(128), largest))
    assert store.load(range(1024)) == before
    store.save({100: at(6)})
    assert store.load(range(1024)) == {**before, 100: at(6)}


def test_partitions_and_positions_that_could_not_be_loaded_are_refused(path: Path) -> None:
    store = SqlitePositions(path)
    for partition in (-1, 1024):
        with pytest.raises(InvalidArgumentError, match="partition"):
            store.save({1: at(1), partition: at(1)})
    assert store.load(range(1024)) == {}
    run(path, "CREATE TABLE IF NOT EXISTS x (y)")
    store.save({1: at(1)})
    run(
        path,
        "INSERT INTO upr_positions SELECT consumer, 5000, format, crc32, position FROM upr_positions",
    )
    assert store.load(range(10_000)) == {1: at(1)}


def test_a_damaged_database_is_never_read_as_other_positions(path: Path) -> None:
    """Bytes that SQLite does not check itself are under the rows' CRCs; whatever it says of others is told in words."""
    kept = {**dict(enumerate(positions_to_keep().values())), 900: at(3)}
    SqlitePositions(path, consumer="mirror").save(kept)
    whole = path.read_bytes()
    rng = random.Random(9)
    noticed = lost = 0
    for _ in range(300):
        path.write_bytes(damaged(whole, rng))
        for rest in path.parent.glob("app.db-*"):
            rest.unlink()
        try:
            found = SqlitePositions(path, consumer="mirror").load(range(1024))
        except UprError:
            noticed += 1
            continue
        # Rows, or all that says where they are, may be gone; what is there is true.
        lost += found != kept
        assert all(kept[partition] == position for partition, position in found.items())
    assert noticed > 40


def test_an_object_is_used_after_a_fork(path: Path) -> None:
    store = SqlitePositions(path)
    store.save({1: at(1)})

    def child() -> None:
        store.save({2: at(2)})

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    store.save({3: at(3)})
    assert store.load(range(1024)) == {1: at(1), 2: at(2), 3: at(3)}
    assert os.listdir(path.parent) == ["app.db"]
