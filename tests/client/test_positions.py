"""Where positions are kept, and what a crash leaves."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from upr_client import FilePositions, MemoryPositions, Position, PositionDamagedError
from upr_protocol.failover import FailoverLog


def at(seqno: int) -> Position:
    return Position(2**63 + 1, 2**64 - 1, 7, seqno, seqno + 2, (1,), FailoverLog.born(2**64 - 1))


def test_positions_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    store = FilePositions(path)
    assert store.load(range(1024)) == {}
    store.save({3: at(10), 1023: at(11)})
    store.save({3: at(12)})
    assert FilePositions(path).load(range(1024)) == {3: at(12), 1023: at(11)}
    assert FilePositions(str(path)).load([1023, 5]) == {1023: at(11)}
    assert os.listdir(tmp_path) == ["positions.json"]


def test_saving_without_loading_keeps_the_others(tmp_path: Path) -> None:
    FilePositions(tmp_path / "p").save({1: at(1)})
    FilePositions(tmp_path / "p").save({2: at(2)})
    assert FilePositions(tmp_path / "p").load([1, 2]) == {1: at(1), 2: at(2)}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_crash_before_the_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "p"
    store = FilePositions(path)
    store.save({1: at(1)})

    def crash(*arguments: object) -> None:
        raise OSError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, crash)
        with pytest.raises(OSError, match="no power"):
            store.save({1: at(2)})
    assert FilePositions(path).load([1]) == {1: at(1)}
    # What is left of the temporary file harms nobody, and the same object goes on.
    store.save({2: at(3)})
    assert FilePositions(path).load([1, 2]) == {1: at(1), 2: at(3)}


def test_the_bytes_are_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*arguments: object, name: str = name, real: Callable[..., None] = real) -> None:
            calls.append(name)
            real(*arguments)

        monkeypatch.setattr(os, name, noted)
    FilePositions(tmp_path / "p").save({1: at(1)})
    assert calls == ["fsync", "replace", "fsync"]


def damaged(path: Path) -> str:
    with pytest.raises(PositionDamagedError) as caught:
        FilePositions(path).load([1])
    assert "start from zero" in caught.value.hint
    return caught.value.message


def test_every_flipped_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "p"
    FilePositions(path).save({1: at(1), 2: at(2)})
    whole = path.read_bytes()
    for index in range(len(whole)):
        # Not the last line end, and no change of a space: those carry nothing.
        changed = bytearray(whole)
        changed[index] ^= 1
        path.write_bytes(bytes(changed))
        if json_or_none(bytes(changed)) != json_or_none(whole):
            damaged(path)
        path.write_bytes(whole[:index])
        if index < len(whole) - 1:
            damaged(path)


def json_or_none(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a file of positions"),
        ("[]", "not a file of positions"),
        ("{}", "not a file of positions"),
        ('{"format":1,"crc32":"0","positions":[]}', "not a file of positions"),
        ('{"format":2,"crc32":"0","positions":{}}', "format 2"),
        ('{"format":1,"crc32":"0","positions":{}}', "CRC32"),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p"
    path.write_text(text)
    assert words in damaged(path)
    with pytest.raises(PositionDamagedError):
        FilePositions(path).save({1: at(1)})
    assert path.read_text() == text


def test_memory_positions_keep_what_they_were_given() -> None:
    store = MemoryPositions({1: at(1)})
    store.save({2: at(2)})
    assert store.load([1, 2, 3]) == {1: at(1), 2: at(2)}
