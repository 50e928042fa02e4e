"""Cells of further columns through backups: written, merged and restored beside their rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness import RunningServer
from tests.raw import cells_for, check_cells, with_cells
from tests.spark.restoring import Rows, State, taken, upr_backup
from upr_backup import restore, retention, source
from upr_backup import rows as rows_module
from upr_backup.rows import RowsWriter
from upr_client import Client
from upr_client.lowlevel import build_block, write_blocks
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.cells import pack_cells, unpack_cells


def value_of(key: bytes, turn: int, *, plain: bool, size: int = 0) -> bytes:
    """Return a value with which a key has no cells, or some, in tests."""
    found = (b"%d %d" % (turn, number) + bytes(size) for number in range(1000))
    return next(value for value in found if plain == (not cells_for(key, value)))


def written(target: str, state: State, rows: Rows) -> None:
    """Write rows with their cells in tests, and keep what is there then."""
    block = with_cells(build_block([k for k, _ in rows], [v for _, v in rows]))
    with Client(target) as client:
        write_blocks(client.bucket(), [block])
    for key, value in rows:
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value


def held(target: str, name: str) -> tuple[State, int]:
    """Return what a bucket holds, and how many cells; each row must have its own."""
    state: dict[bytes, Any] = {}
    cells = 0
    with Client(target) as client, client.bucket(name).changes(until="now") as changes:
        for batch in changes.batches():
            cells += sum(map(check_cells, batch.blocks))
            state.update(batch.items())
    return state, cells


def columns(repository: Path) -> list[int]:
    """Return how many columns the data files have, oldest first."""
    files = sorted(repository.glob("data/*/*.parquet"))
    return [len(pq.read_schema(file).names) for file in files]


def test_rows_without_cells_are_written_from_where_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = pa.nulls(2, pa.binary())
    keys, values = pa.array([b"a", b"b"]), pa.array([b"v", None], pa.binary())
    rows = pa.table({"key": keys, "value": values, "further": cells})
    given: list[int] = []

    def blocks(*columns: Any) -> Iterator[Any]:
        given.extend(column.chunk(0).buffers()[2].address for column in columns)
        yield from ()

    monkeypatch.setattr(restore, "blocks", blocks)
    assert list(restore._blocks(rows)) == []
    assert given == [column.buffers()[2].address for column in (keys, values)]


@pytest.mark.long
def test_other_cells_are_a_difference(
    server_process: Callable[..., RunningServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_process()
    repository = tmp_path / "repository"
    assert upr_backup(repository, "init", "--target", server.target).exit_code == 0
    rows: Rows = [(key, value_of(key, 0, plain=False)) for key in (b"a", b"b", b"c")]
    rows.append((b"d", value_of(b"d", 0, plain=True)))
    written(server.target, {}, rows)
    taken(repository, "--processes", "1")
    against = upr_backup(repository, "verify", "--against-server")
    assert against.exit_code == 0, against.stderr
    told = ["restore", "--target", server.target, "--create-bucket", "--bucket"]
    assert upr_backup(repository, *told, "right").exit_code == 0
    monkeypatch.setattr(restore, "unpack_cells", lambda data: {**unpack_cells(data), 16: b"x"})
    wrong = upr_backup(repository, *told, "wrong")
    assert wrong.exit_code == 11
    assert "are keys 3 with another value or other further cells" in wrong.stderr
    monkeypatch.setattr(rows_module, "pack_cells", lambda cells: pack_cells({**cells, 16: b"x"}))
    against = upr_backup(repository, "verify", "--against-server")
    assert "4 keys have other further cells" in against.stdout + against.stderr


@pytest.mark.parametrize("late", [False, True])
def test_cells_are_restored_beside_their_rows(
    server_process: Callable[..., RunningServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
) -> None:
    begun: list[bool] = []

    def writer(*arguments: Any, wide: bool) -> RowsWriter:
        begun.append(wide)
        return RowsWriter(*arguments, wide=wide)

    monkeypatch.setattr(retention, "RowsWriter", writer)
    monkeypatch.setattr(source, "RowsWriter", writer)
    if late:
        # Files are begun before the rows with cells come.
        monkeypatch.setattr(rows_module, "_FLUSH_BYTES", 1)
        monkeypatch.setattr(retention, "_TAKE_ROWS", 10)
    server = server_process()
    repository = tmp_path / "repository"
    assert upr_backup(repository, "init", "--target", server.target).exit_code == 0
    state: State = {}
    keys = sorted([b"key %d" % n for n in range(400)], key=partition_of)
    plain, others = keys[:300], keys[300:]
    written(server.target, state, [(key, value_of(key, 0, plain=True)) for key in keys])
    taken(repository, "--processes", "1")
    # A file without cells is as it always was: earlier releases read it.
    assert columns(repository) == [6]
    for part in (plain[:150], plain[150:]):
        rows: Rows = [(key, value_of(key, 1, plain=True, size=5000)) for key in part]
        written(server.target, state, rows)
    written(server.target, state, [(key, value_of(key, 1, plain=False)) for key in others])
    taken(repository, "--processes", "1")
    assert columns(repository) == [6, 7]
    assert begun == [False, False, True] if late else [False, False]
    written(server.target, state, [(key, None) for key in keys[::9]])
    written(server.target, state, [(key, value_of(key, 2, plain=False)) for key in others[1::9]])
    taken(repository, "--processes", "1")
    for number, merge in enumerate((False, True)):
        if merge:
            begun.clear()
            assert upr_backup(repository, "merge", "--to", "3").exit_code == 0
            assert begun == [False, True] if late else [False]
            assert (upr_backup(repository, "verify", "--full")).exit_code == 0
        name = f"restored {number}"
        with Client(server.target) as client:
            client.admin.create_bucket(name)
        done = upr_backup(repository, "restore", "--target", server.target, "--bucket", name)
        assert done.exit_code == 0, done.stderr
        found, cells = held(server.target, name)
        assert {key: value for key, value in found.items() if value is not None} == state
        assert cells == sum(len(cells_for(*row)) for row in state.items()) > 100
