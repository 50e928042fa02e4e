"""Files of what was undone: only whole ones are listed, and only rows that the upstream has not are told."""

import base64
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.model import Row
from tests.raw import cells_for, with_cells
from upr.storage.directory import DataDirectory
from upr.storage.store import Identity
from upr.storage.undone import (
    UndoneFile,
    forget_undone,
    read_undone,
    undone_files,
    write_undone,
)
from upr_client.testing.memory import run_block
from upr_protocol.block import Block
from upr_protocol.errors import DataDamagedError

P, TIME = 7, 100
IDENTITY = Identity("b", 1)


def block(first: int, *keys: bytes) -> Block:
    rows = [Row(first + i, key, None if key == b"gone" else b"v") for i, key in enumerate(keys)]
    end = first + len(keys) - 1
    return run_block(P, rows, first - 1, end, end, TIME)


def test_what_the_upstream_has_too_is_not_told(tmp_path: Path) -> None:
    # The upstream has all up to 3, which lies within a block.
    blocks = [block(1, b"a", b"b"), with_cells(block(3, b"c", b"gone", b"e", b"f", b"g"))]
    assert write_undone(tmp_path, IDENTITY, blocks, {P: 3}, TIME) == 4
    (file,) = undone_files(tmp_path)
    assert (file.bucket, file.version, file.time, file.markers) == ("b", 1, TIME, {P: 3})
    told = [(row["seqno"], base64.b64decode(row["key"]), row["op"]) for row in file.rows()]
    assert told == [(4, b"gone", "delete"), (5, b"e", "set"), (6, b"f", "set"), (7, b"g", "set")]
    cells = [
        {int(id_): base64.b64decode(cell) for id_, cell in row.get("further", {}).items()}
        for row in file.rows()
    ]
    assert cells == [
        cells_for(b"gone", None),
        *(cells_for(key, b"v") for key in (b"e", b"f", b"g")),
    ]
    assert {bool(of_row) for of_row in cells} == {False, True}


def test_no_file_is_left_of_nothing(tmp_path: Path) -> None:
    assert write_undone(tmp_path, IDENTITY, [block(1, b"a")], {P: 1}, TIME) == 0
    assert not (tmp_path / "undone").exists()


def test_what_a_crash_left_of_a_file_goes_at_the_next_start(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "data")
    write_undone(directory.path, IDENTITY, [block(1, b"a")], {P: 0}, TIME)
    (directory.path / "undone" / "b-7.jsonl.new").write_text("{")
    assert directory.remove_leftovers() == []
    assert [file.name for file in (directory.path / "undone").iterdir()] == [f"b-{TIME}.jsonl"]
    directory.close()


def test_a_file_that_was_not_written_to_its_end_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no room"):
        write_undone(tmp_path, IDENTITY, [block(1, b"a")], {P: 0}, TIME)
    assert list((tmp_path / "undone").iterdir()) == []
    monkeypatch.setattr(os, "fsync", sync)
    assert write_undone(tmp_path, IDENTITY, [block(1, b"a")], {P: 0}, TIME + 1) == 1
    (file,) = undone_files(tmp_path)
    assert file.time == TIME + 1
    assert [row["seqno"] for row in file.rows()] == [1]


@pytest.mark.parametrize("line", [b"", b"\xff\xfe\n", b"{\n", b"[" * 100_000])
def test_what_is_no_file_of_undone_mutations_is_damaged(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataDamagedError, match="line 1 cannot be read"):
        read_undone(path)
    one = UndoneFile(path, "default", 1, 1, {})
    path.write_bytes(b"{}\n" + line)
    if line:
        with pytest.raises(DataDamagedError, match="line 2 cannot be read"):
            list(one.rows())


def test_what_was_not_undone_after_all_is_forgotten_and_nothing_else(tmp_path: Path) -> None:
    for time in (TIME - 1, TIME):
        write_undone(tmp_path, IDENTITY, [block(1, b"a")], {P: 0}, time)
    write_undone(tmp_path, Identity("c", 2), [block(1, b"a")], {P: 0}, TIME)
    (tmp_path / "undone" / "torn.jsonl").write_text("{")
    forget_undone(tmp_path, 1, TIME)
    left = sorted(file.name for file in (tmp_path / "undone").iterdir())
    assert left == [f"b-{TIME - 1}.jsonl", f"c-{TIME}.jsonl", "torn.jsonl"]
    forget_undone(tmp_path / "elsewhere", 1, TIME)


@pytest.mark.parametrize(
    "change",
    [
        {"op": "st"},
        {"op": "delete"},
        {"value": None},
        {"key": None},
        {"key": "a"},
        {"key": 5},
        {"partition": 1024},
        {"partition": "7"},
        {"seqno": None},
        {"further": 5},
        {"further": {"a": ""}},
        {"further": {"1": "!"}},
        {"further": {"-1": ""}},
        {"further": {"17": ""}},
    ],
    ids=str,
)
def test_a_line_that_was_edited_and_is_no_mutation_is_named(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    write_undone(tmp_path, IDENTITY, [block(1, b"a", b"b")], {P: 0}, TIME)
    (file,) = undone_files(tmp_path)
    first, whole, last = file.path.read_text().splitlines()
    row = json.loads(last) | change
    edited = json.dumps({name: told for name, told in row.items() if told is not None})
    file.path.write_text(f"{first}\n{whole}\n{edited}\n")
    rows = file.rows()
    assert next(rows) == json.loads(whole)
    with pytest.raises(DataDamagedError, match="line 3 is no mutation"):
        next(rows)
