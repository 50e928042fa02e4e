"""Exports: both formats hold the state at the backup, and nothing half done is left where they go."""

import errno
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from obstore.store import MemoryStore

from tests.spark.restoring import Source, document, small_groups, source, upr_backup
from upr_backup import export as export_module
from upr_backup.repository.object_store import ObjectStorage
from upr_backup.repository.storage import LocalSink
from upr_client import Change, Client
from upr_protocol.partitioning import partition_of

LITTER_AGE = 7200


@pytest.fixture(autouse=True)
def many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    small_groups(monkeypatch, 60_000)


def export(made: Source, kind: str, to: Path, *options: str) -> Any:
    """Run the command, with what it says as JSON."""
    return upr_backup(
        made.repository, "export", "--format", kind, "--to", str(to), "--json", *options
    )


def read(kind: str, to: Path) -> Any:
    """Return an exported table, as a reader that knows nothing of us reads it."""
    if kind == "parquet":
        return pq.read_table(to)
    return pa.table(DeltaTable(to).to_pyarrow_table())


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_table_is_the_state_at_the_backup(made: Source, kind: str, tmp_path: Path) -> None:
    to = tmp_path / "deep" / "table"
    done = export(made, kind, to)
    assert done.exit_code == 0, done.stderr
    table = read(kind, to)
    state = made.points[1]
    told = document(done)
    assert (told["id"], told["rows"]) == (2, len(state))
    assert told["data_bytes"] == sum(len(k) + len(v) for k, v in state.items())
    assert table.schema.names == ["key", "value", "partition", "seqno", "time"]
    assert table.schema.field("key").type in (pa.binary(), pa.large_binary(), pa.binary_view())
    keys = table.column("key").to_pylist()
    assert len(keys) == len(state)
    assert dict(zip(keys, table.column("value").to_pylist(), strict=True)) == state
    assert table.column("partition").to_pylist() == [partition_of(key) for key in keys]
    with Client(made.server.target) as client, client.bucket().changes(until="now") as changes:
        seqnos = {event.key: event.seqno for event in changes if isinstance(event, Change)}
    assert table.column("seqno").to_pylist() == [seqnos[key] for key in keys]
    age = datetime.now(UTC) - min(table.column("time").to_pylist())
    assert 0 < age.total_seconds() < 86_400
    # One that is there is refused, and stays.
    again = export(made, kind, to)
    assert (again.exit_code, "already" in again.stderr) == (4, True)
    assert read(kind, to).equals(table)
    assert not [path for path in to.parent.iterdir() if path != to]


@pytest.mark.long
def test_what_is_chosen(made: Source, tmp_path: Path) -> None:
    options = ["--partitions", "0-511", "--key-prefix", "key:", "--with-deletes", "--utf8"]
    done = export(made, "parquet", tmp_path / "chosen", *options)
    assert done.exit_code == 0, done.stderr
    table = read("parquet", tmp_path / "chosen")
    assert table.schema.field("key").type == pa.string()
    expected: dict[str, str | None] = {}
    for number in range(3000):
        key = b"key:%d" % number
        if partition_of(key) < 512:
            value = made.points[1].get(key)
            expected[key.decode()] = None if value is None else value.decode()
    assert None in expected.values()
    assert dict(zip(*(table.column(n).to_pylist() for n in ("key", "value")), strict=True)) == (
        expected
    )
    assert table.num_rows == len(expected)
    first = export(made, "parquet", tmp_path / "first", "--at", "1")
    assert document(first)["rows"] == 3000
    nothing = export(made, "parquet", tmp_path / "nothing", "--key-prefix", "no such key")
    assert document(nothing)["rows"] == 0
    assert read("parquet", tmp_path / "nothing").schema.names == table.schema.names


def test_a_delta_table_is_replaced_in_one_commit(made: Source, tmp_path: Path) -> None:
    to = tmp_path / "table"
    assert export(made, "delta", to, "--at", "1").exit_code == 0
    assert export(made, "delta", to, "--overwrite", "--utf8").exit_code == 0
    table = DeltaTable(to)
    assert table.version() == 1
    assert pa.table(table.to_pyarrow_table()).num_rows == len(made.points[1])
    assert pa.table(DeltaTable(to, version=0).to_pyarrow_table()).num_rows == 3000


@pytest.mark.long
@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_what_is_no_text_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with source(tmp_path / "source") as made:
        for row, words in (
            ((b"\xff\x00key", b"text"), "the key 0xff006b6579 is not UTF-8"),
            ((b"key:0", b"\xfe"), "the value of key 'key:0' is not UTF-8"),
        ):
            made.write([row])
            made.backup()
            to = tmp_path / f"table-{len(made.points)}"
            done = export(made, kind, to, "--utf8")
            assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
            # Nothing is left that keeps the next one from it.
            assert export(made, kind, to).exit_code == 0
            assert read(kind, to).num_rows == len(made.state)
            made.write([(row[0], None)])


def test_no_room_and_no_permission_are_one_line(
    made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "table"
    real = LocalSink.write
    for number in (errno.ENOSPC, errno.EACCES):
        calls: list[int] = []

        def failing(self: LocalSink, data: bytes, code: int = number, seen: Any = calls) -> int:
            seen.append(1)
            if len(seen) > 12:
                raise OSError(code, os.strerror(code))
            return real(self, data)

        with monkeypatch.context() as patched:
            patched.setattr(LocalSink, "write", failing)
            done = export(made, "parquet", to)
        assert (done.exit_code, os.strerror(number) in done.stderr) == (2, True), done.stderr
        assert list(tmp_path.iterdir()) == []
    assert export(made, "parquet", to).exit_code == 0


def test_bad_input_is_one_line(made: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_bytes(b"")
    cases: list[tuple[list[str], int, str]] = [
        (["--format", "parquet", "--to", str(tmp_path / "full")], 4, "already"),
        (["--format", "parquet", "--to", str(tmp_path / "file")], 4, "already"),
        (["--format", "parquet", "--to", str(tmp_path / "file" / "x")], 4, "File exists"),
        (["--format", "delta", "--to", "nowhere://x/y"], 2, "nowhere"),
        (["--format", "delta", "--to", str(made.repository)], 4, "is a repository"),
        (["--format", "parquet", "--to", str(tmp_path / "x"), "--at", "9"], 3, "no backup 9"),
    ]
    for arguments, code, words in cases:
        done = upr_backup(made.repository, "export", *arguments)
        assert (done.exit_code, words in done.stderr) == (code, True), (arguments, done.stderr)
    assert (tmp_path / "full" / "mine").exists()
    assert not (tmp_path / "x").exists()


def test_a_killed_export_keeps_nobody_from_it(made: Source, tmp_path: Path) -> None:
    to = tmp_path / "table"
    program = (
        "import os, signal\n"
        "from upr_backup import export, rows as point\n"
        "grouped = point.grouped\n"
        "point.grouped = lambda sizes, _: grouped(sizes, 60_000)\n"
        "real = export._write_part\n"
        "def killed(storage, name, table):\n"
        "    real(storage, name, table)\n"
        "    if '00001' in name: os.kill(os.getpid(), signal.SIGKILL)\n"
        "export._write_part = killed\n"
        "from upr_backup.cli.entry import main\n"
        "main()\n"
    )
    arguments = [str(made.repository), "export", "--format", "parquet", "--to", str(to)]
    killed = subprocess.run([sys.executable, "-c", program, *arguments], timeout=100)
    assert killed.returncode == -signal.SIGKILL
    (litter,) = tmp_path.iterdir()
    assert not to.exists()
    # It may be somebody's who is still at it; later it is removed.
    assert export(made, "parquet", to).exit_code == 0
    assert litter.exists()
    age = litter.stat().st_mtime - LITTER_AGE
    os.utime(litter, (age, age))
    to.rename(tmp_path / "elsewhere")
    assert export(made, "parquet", to).exit_code == 0
    assert not litter.exists()
    assert read("parquet", to).num_rows == len(made.points[1])


def test_a_missing_package_is_one_line(
    made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    done = export(made, "delta", tmp_path / "table")
    assert (done.exit_code, "pip install 'upr-stream[delta]'" in done.stderr) == (2, True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    """An object store in memory, which every export goes to."""
    opened = MemoryStore()
    storage = ObjectStorage("memory", lambda _: opened)
    monkeypatch.setattr(export_module, "open_storage", lambda _: storage)
    return storage


def in_store(made: Source) -> Any:
    """Export into it."""
    return export(made, "parquet", Path("ignored"))


def emptied(store: ObjectStorage, *names: str) -> None:
    """Have it hold these objects only."""
    for name in store.names(""):
        store.delete(name)
    for name in names:
        assert store.put_if_absent(name, b"?")


def test_an_object_store_says_when_it_is_whole(made: Source, store: ObjectStorage) -> None:
    done = in_store(made)
    assert done.exit_code == 0, done.stderr
    names = store.names("")
    parts = [name for name in names if name.endswith(".parquet")]
    assert len(parts) == document(done)["files"] > 1
    assert sorted(set(names) - set(parts)) == ["_SUCCESS"]
    tables = [pq.read_table(pa.BufferReader(store.read(name))) for name in parts]
    assert sum(table.num_rows for table in tables) == len(made.points[1])
    assert in_store(made).exit_code == 4
    # What a killed one left is replaced; what anybody else left is not.
    left = ("_unfinished-0", "part-00000.parquet", "part-00099.parquet")
    emptied(store, *left, "mine")
    assert in_store(made).exit_code == 4
    emptied(store, *left)
    assert in_store(made).exit_code == 0
    assert store.names("") == names


def test_an_export_to_an_object_store_that_fails_takes_its_own_away(
    made: Source, store: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = export_module._write_part

    def failing(storage: Any, name: str, table: Any) -> None:
        real(storage, name, table)
        if name == "part-00002.parquet":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def overtaken(storage: Any, name: str, table: Any) -> None:
        real(storage, name, table)
        for mark in storage.names(""):
            if mark.startswith("_unfinished"):
                storage.delete(mark)

    with monkeypatch.context() as patched:
        patched.setattr(export_module, "_write_part", failing)
        assert in_store(made).exit_code == 2
    assert store.names("") == []
    with monkeypatch.context() as patched:
        patched.setattr(export_module, "_write_part", overtaken)
        done = in_store(made)
    assert (done.exit_code, "another export" in done.stderr) == (2, True)
    assert "_SUCCESS" not in store.names("")
