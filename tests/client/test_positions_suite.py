"""The suite for position stores: ours pass it, and each mistake that a store can make is found and named."""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.client.test_positions import file_size_limit
from upr_client import FilePositions, MemoryPositions, Position, PositionStore, SqlitePositions
from upr_client.testing import positions as suite
from upr_client.testing.positions import check_position_store


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite with 64 partitions; that a store of ours takes all of the largest size is tested with each store."""
    monkeypatch.setattr(suite, "PARTITIONS", 64)


def test_memory(few: None) -> None:
    store = MemoryPositions()
    check_position_store(lambda: store)


@contextmanager
def no_power() -> Iterator[None]:
    def crash(*arguments: object) -> None:
        raise OSError("no power")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", crash)
        yield


def test_files(tmp_path: Path, few: None) -> None:
    check_position_store(
        lambda: FilePositions(tmp_path / "one"),
        make_other=lambda: FilePositions(tmp_path / "other"),
        failing=lambda: file_size_limit(2_000),
    )


def test_files_when_a_new_one_cannot_take_the_place_of_the_old(tmp_path: Path, few: None) -> None:
    check_position_store(lambda: FilePositions(tmp_path / "one"), failing=no_power)


@pytest.mark.long
@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_sqlite_by_path(tmp_path: Path, few: None, journal: str) -> None:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={journal}")
    check_position_store(
        lambda: SqlitePositions(path, consumer="a"),
        make_other=lambda: SqlitePositions(path, consumer="b"),
        failing=lambda: file_size_limit(10_000),
    )


def test_sqlite_by_connection(tmp_path: Path, few: None) -> None:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path)) as connection:

        @contextmanager
        def failing() -> Iterator[None]:
            connection.execute(
                "CREATE TRIGGER broken BEFORE UPDATE ON upr_positions WHEN NEW.partition = 50 "
                "BEGIN SELECT RAISE(FAIL, 'broken'); END"
            )
            yield
            connection.execute("DROP TRIGGER broken")

        check_position_store(
            lambda: SqlitePositions(connection),
            make_other=lambda: SqlitePositions(path, table="other"),
            failing=failing,
        )


class InTransactions:
    """As an application that stores positions with its data."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._store = SqlitePositions(connection, consumer="sink")

    def load(self, partitions: Iterable[int]) -> Mapping[int, Position]:
        return self._store.load(partitions)

    def save(self, positions: Mapping[int, Position]) -> None:
        with self._connection:
            self._store.save_in(self._connection, positions)


def test_sqlite_in_transactions_of_the_application(few: None) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        check_position_store(lambda: InTransactions(connection))


class Faulty:
    """A store in a dictionary, with one mistake."""

    def __init__(self, mistake: str) -> None:
        self._positions: dict[int, Position] = {}
        self.mistake = mistake
        self.failing = False

    def load(self, partitions: Iterable[int]) -> dict[int, Position]:
        if self.mistake == "returns all":
            return dict(self._positions)
        if self.mistake == "raises for unknown ones":
            return {p: self._positions[p] for p in partitions}
        if self.mistake == "iterates twice":
            known = {p for p in partitions if p in self._positions}
            return {p: self._positions[p] for p in partitions if p in known}
        if self.mistake == "hands out its own":
            assert self._positions is not None
            return self._positions if set(partitions) >= set(self._positions) else {}
        found = {p: self._positions[p] for p in partitions if p in self._positions}
        if self.mistake == "fresh ones for unknown ones":
            return found or {1: Position.fresh()}
        if self.mistake == "lists for markers":
            return {p: replace(at, markers=list(at.markers)) for p, at in found.items()}  # type: ignore[arg-type]
        if self.mistake == "dictionaries":
            return {p: at.to_json() for p, at in found.items()}  # type: ignore[misc]
        return found

    def save(self, positions: Mapping[int, Position]) -> None:
        if self.mistake == "keeps what it is given":
            self._positions = positions  # type: ignore[assignment]
            return
        if self.mistake == "forgets the others":
            self._positions = {}
        if self.mistake == "only the newest seqno":
            positions = {
                p: at
                for p, at in positions.items()
                if p not in self._positions or at.seqno >= self._positions[p].seqno
            }
        if self.mistake == "bounded":
            positions = dict(list(positions.items())[:60])
        if self.failing and self.mistake == "half":
            self._positions.update(dict(list(positions.items())[: len(positions) // 2]))
            raise OSError("no room")
        if self.failing and self.mistake == "silent":
            return
        self._positions.update({p: self._lossy(at) for p, at in positions.items()})

    def _lossy(self, at: Position) -> Position:
        match self.mistake:
            case "no bucket version":
                return replace(at, bucket_version=0)
            case "no bucket name":
                return replace(at, bucket="")
            case "no data id":
                return replace(at, data_id=at.failover_id)
            case "no failover id":
                return replace(at, failover_id=None)
            case "no horizon":
                return replace(at, horizon=at.seqno)
            case "no markers":
                return replace(at, markers=())
            case "no log":
                return replace(at, log=None)
            case "floats":
                return replace(at, seqno=int(float(at.seqno)), horizon=None, markers=())
            case "small ids":
                return replace(at, failover_id=(at.failover_id or 0) % 2**63 or None)
        return at


MISTAKES = {
    "returns all": "which it should not",
    "raises for unknown ones": None,
    "fresh ones for unknown ones": "nothing was saved",
    "iterates twice": "from an iterator",
    "hands out its own": "position store",
    "keeps what it is given": "position store",
    "lists for markers": "markers of partition",
    "dictionaries": "not a Position",
    "forgets the others": "one of three",
    "only the newest seqno": "of partition",
    "bounded": "all 64 partitions",
    "no bucket version": "bucket_version of partition",
    "no bucket name": "bucket of partition",
    "no data id": "data_id of partition",
    "no failover id": "failover_id of partition",
    "no horizon": "horizon of partition",
    "no markers": "markers of partition",
    "no log": "log of partition",
    "floats": "of partition",
    "small ids": "failover_id of partition",
    "half": "a save failed half-way",
    "silent": "raises nothing",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, few: None) -> None:
    store = Faulty(mistake)

    @contextmanager
    def failing() -> Iterator[None]:
        store.failing = True
        yield
        store.failing = False

    words = MISTAKES[mistake]
    with pytest.raises(AssertionError if words is not None else KeyError, match=words):
        check_position_store(lambda: store, failing=failing)


def test_the_mistakes_are_mistakes(few: None) -> None:
    store = Faulty("")
    check_position_store(lambda: store)


def test_a_store_that_forgets_at_the_end_of_the_program_is_found() -> None:
    with pytest.raises(AssertionError, match="after a restart: load does not return partitions"):
        check_position_store(MemoryPositions)


def test_consumers_that_are_not_apart_are_found(tmp_path: Path, few: None) -> None:
    def make() -> PositionStore:
        return FilePositions(tmp_path / "p")

    with pytest.raises(AssertionError, match="another consumer saved nothing yet"):
        check_position_store(make, make_other=make)


@pytest.mark.long
def test_the_suite_needs_no_test_framework() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom upr_client import MemoryPositions\n"
        "from upr_client.testing import positions\n"
        "from upr_client.testing.positions import check_position_store\n"
        "positions.PARTITIONS = 64\n"
        "store = MemoryPositions()\ncheck_position_store(lambda: store)\n"
        "print('pytest' in sys.modules)\n"
        "try:\n    check_position_store(MemoryPositions)\nexcept AssertionError:\n    print('found')\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\nfound\n"
