"""Where positions are kept, and what a crash leaves."""

import errno
import fcntl
import json
import os
import random
import resource
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz import Target, damaged, fuzz
from upr_client import FilePositions, MemoryPositions, Position
from upr_client import positions as positions_module
from upr_client.errors import (
    InvalidArgumentError,
    PositionBusyError,
    PositionDamagedError,
    PositionStoreError,
)
from upr_client.testing.positions import positions_to_keep
from upr_protocol.failover import FailoverLog
from upr_protocol.position_table import PositionTable


def at(seqno: int) -> Position:
    return Position(2**63 + 1, 2**64 - 1, 7, seqno, seqno + 2, (1,), FailoverLog.born(2**64 - 1))


def test_positions_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    store = FilePositions(path)
    assert store.load(range(1024)) == {}
    store.save({3: at(10), 1023: at(11)})
    store.save({3: at(12)})
    assert FilePositions(path).load(range(1024)) == {3: at(12), 1023: at(11)}
    assert FilePositions(str(path)).load([1023, 5]) == {1023: at(11)}
    assert os.listdir(tmp_path) == ["positions"]


def test_a_file_holds_the_largest_positions_of_all_partitions(tmp_path: Path) -> None:
    largest = dict.fromkeys(range(1024), positions_to_keep()["the largest of everything"])
    FilePositions(tmp_path / "p").save(largest)
    found = FilePositions(tmp_path / "p").load([0, 1023])
    assert found == {partition: largest[partition] for partition in (0, 1023)}


def test_a_link_stays_one_and_its_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept/positions")
    monkeypatch.chdir(tmp_path)
    store = FilePositions("link")
    # Where the program goes then changes nothing.
    monkeypatch.chdir(tmp_path / "kept")
    store.save({3: at(10)})
    assert (tmp_path / "link").is_symlink()
    assert FilePositions(tmp_path / "kept" / "positions").load([3]) == {3: at(10)}


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
        with pytest.raises(PositionStoreError, match="no power") as caught:
            store.save({1: at(2)})
    assert str(path) in caught.value.message
    assert "room on the disk" in caught.value.hint
    assert os.listdir(tmp_path) == ["p"]
    assert FilePositions(path).load([1]) == {1: at(1)}
    # The same object goes on.
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


def test_after_a_failure_to_sync_the_folder_the_same_object_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FilePositions(tmp_path / "p")
    store.save({1: at(1)})
    real = os.fsync
    calls = []

    def second_fails(file: int) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.EIO, "input/output error")
        real(file)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(PositionStoreError, match="folder"):
        store.save({1: at(2)})
    store.save({2: at(3)})
    assert FilePositions(tmp_path / "p").load([1, 2]) == {1: at(2), 2: at(3)}


def damage_told(path: Path) -> str:
    with pytest.raises(PositionDamagedError) as caught:
        FilePositions(path).load([1])
    assert "start from zero" in caught.value.hint
    assert str(path) in caught.value.message
    return caught.value.message


def test_every_flipped_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "p"
    FilePositions(path).save({1: at(1), 2: at(2)})
    whole = path.read_bytes()
    for index in range(len(whole)):
        changed = bytearray(whole)
        # The number of a newer format is told in another way.
        changed[index] ^= 2 if index == 6 else 1
        path.write_bytes(bytes(changed))
        damage_told(path)
        path.write_bytes(whole[:index])
        damage_told(path)


def test_nobody_is_told_to_delete_a_file_of_a_newer_format(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"UPRPOS\x03\n" + bytes(20))
    store = FilePositions(path)
    for call in (lambda: store.load([1]), lambda: store.save({1: at(1)})):
        with pytest.raises(PositionDamagedError) as caught:
            call()
        assert caught.value.message == f"{path} has format 3; must be at most 2"
        assert caught.value.hint == "use the program that wrote it, or a newer one"
    assert path.read_bytes() == b"UPRPOS\x03\n" + bytes(20)


def as_json(texts: dict[int, str]) -> str:
    """A file of the format before."""
    body = ",\n".join(f'"{partition}":{texts[partition]}' for partition in sorted(texts))
    crc = f"{zlib.crc32(body.encode()):08x}"
    return f'{{"format":1,"crc32":"{crc}","positions":{{\n{body}\n}}}}\n'


OF_THE_FORMAT_BEFORE = (
    '{"format":1,"crc32":"464b9c04","positions":{\n'
    '"3":{"bucket":"","bucket_version":"8000000000000001","data_id":"0000000000000007",'
    '"failover_id":"ffffffffffffffff","format":1,"horizon":12,"log":[["ffffffffffffffff",0]],'
    '"markers":[1],"seqno":10},\n'
    '"10":{"bucket":"","bucket_version":"8000000000000001","data_id":null,"failover_id":null,'
    '"format":1,"horizon":null,"log":null,"markers":[],"seqno":5}\n}}\n'
)
"""What a program of that time wrote."""


def test_a_file_of_the_format_before_is_read_and_brought_over(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text(OF_THE_FORMAT_BEFORE)
    kept = {3: at(10), 10: Position(2**63 + 1, None, None, 5, None, (), None)}
    store = FilePositions(path)
    assert store.load([3, 4]) == {3: at(10)}
    store.save({4: at(2)})
    assert path.read_bytes()[:1] != b"{"
    assert FilePositions(path).load(range(1024)) == {**kept, 4: at(2)}


def test_a_damaged_file_of_the_format_before_is_told(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for index in range(1, len(OF_THE_FORMAT_BEFORE) - 2):
        path.write_text(OF_THE_FORMAT_BEFORE[:index])
        damage_told(path)
        changed = bytearray(OF_THE_FORMAT_BEFORE.encode())
        changed[index] ^= 1
        path.write_bytes(bytes(changed))
        if json_or_none(bytes(changed)) != json.loads(OF_THE_FORMAT_BEFORE):
            damage_told(path)


def json_or_none(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table of positions"),
        ("[]", "no table of positions"),
        ("{}", "not a file of positions"),
        ('{"format":1,"crc32":"0","positions":[]}', "not a file of positions"),
        ('{"format":2,"crc32":"0","positions":{}}', "format 2"),
        ('{"format":1,"crc32":"0","positions":{}}', "CRC32"),
        ('{"format":true,"crc32":"00000000","positions":{}}', "format True"),
        ('{"format":1,"crc32":"%s","positions":{"1024":1}}', "partition that does not exist"),
        ('{"format":1,"crc32":"%s","positions":{"-1":1}}', "partition that does not exist"),
        ('{"format":1,"crc32":"%s","positions":{"1":1}}', "partition 1"),
        ('{"format":1,"crc32":"%s","positions":{"1":{"format":1}}}', "bucket_version is missing"),
        ('{"format":1,"crc32":"%s","positions":{"1":{"format":9}}}', "stored position is 9"),
        ('{"":' * 100_000, "not a file of positions"),
        ('{"format":' + "9" * 5000 + "}", "not a file of positions"),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p"
    if "%s" in text:
        text = as_json(texts_of(text))
    path.write_text(text)
    assert words in damage_told(path)
    if (
        "stored position is 9" not in words
        and "partition 1" not in words
        and "bucket_version" not in words
    ):
        with pytest.raises(PositionDamagedError):
            FilePositions(path).save({1: at(1)})
        assert path.read_text() == text


def texts_of(text: str | bytes) -> dict[int, str]:
    return {
        int(p): json.dumps(value, sort_keys=True, separators=(",", ":"))
        for p, value in json.loads(text)["positions"].items()
    }


def test_memory_positions_keep_what_they_were_given() -> None:
    store = MemoryPositions({1: at(1)})
    store.save({2: at(2)})
    assert store.load([1, 2, 3]) == {1: at(1), 2: at(2)}


def test_consumers_that_share_an_object_in_memory_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryPositions()
    joined = PositionTable.updated

    def slowly(table: PositionTable, newer: PositionTable) -> PositionTable:
        time.sleep(0.02)
        return joined(table, newer)

    monkeypatch.setattr(PositionTable, "updated", slowly)
    threads = [threading.Thread(target=store.save, args=({p: at(1)},)) for p in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(store.load(range(1024))) == [0, 1, 2, 3]


def test_partitions_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    for store in (FilePositions(tmp_path / "p"), MemoryPositions()):
        for partition in (-1, 1024):
            with pytest.raises(InvalidArgumentError, match="partition"):
                store.save({0: at(1), partition: at(1)})
        assert store.load(range(1024)) == {}


def test_a_position_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    huge = Position(1, 7, 7, 10**9, 10**9, tuple(range(10**8, 10**8 + 8200)), None)
    with pytest.raises(InvalidArgumentError, match="must be at most 65536"):
        FilePositions(tmp_path / "p").save({1: huge})
    assert not (tmp_path / "p").exists()


def mended(data: bytes) -> bytes:
    """The bytes with a CRC32 that fits, if they are a file of positions at all."""
    if data[:1] != b"{":
        return data[:8] + struct.pack("<I", zlib.crc32(data[12:])) + data[12:]
    try:
        return as_json(texts_of(data)).encode()
    except Exception:
        return data


def test_any_bytes_give_positions_or_the_declared_error(tmp_path: Path) -> None:
    path = tmp_path / "p"
    FilePositions(path).save(dict(enumerate(positions_to_keep().values())))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        FilePositions(path).load(range(1024))

    files = (path.read_bytes(), OF_THE_FORMAT_BEFORE.encode())
    fuzz(Target("a file of positions", read, files, mend=mended), 1, 400)


def test_a_damaged_file_is_never_read_as_other_positions(tmp_path: Path) -> None:
    path = tmp_path / "p"
    kept = dict(enumerate(positions_to_keep().values()))
    FilePositions(path).save(kept)
    whole = path.read_bytes()
    rng = random.Random(5)
    noticed = 0
    for _ in range(500):
        path.write_bytes(damaged(whole, rng))
        try:
            assert FilePositions(path).load(range(1024)) == kept
        except PositionDamagedError:
            noticed += 1
    assert noticed > 375


def test_a_file_that_is_too_large_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions_module, "_FILE_BYTES_MAX", 1000)
    (tmp_path / "p").write_bytes(b" " * 1001)
    assert "more than 1000 bytes" in damage_told(tmp_path / "p")


def told(call: Callable[[], object], path: Path) -> str:
    with pytest.raises(PositionStoreError) as caught:
        call()
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert not caught.value.retriable
    return caught.value.message


def test_a_folder_that_is_missing_or_no_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "p"
    assert "No such file" in told(lambda: FilePositions(path).load([1]), path)
    assert "No such file" in told(lambda: FilePositions(path).save({1: at(1)}), path)
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "p"
    told(lambda: FilePositions(path).load([1]), path)
    told(lambda: FilePositions(path).save({1: at(1)}), path)
    told(lambda: FilePositions(tmp_path).load([1]), tmp_path)
    told(lambda: FilePositions(tmp_path).save({1: at(1)}), tmp_path)


def test_a_missing_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p"
    store = FilePositions(path)
    store.save({1: at(1)})

    def denied(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Root may do everything, so the system is asked to refuse here.
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", denied)
        assert "Permission denied" in told(lambda: FilePositions(path).load([1]), path)
        told(lambda: store.save({1: at(2)}), path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "its folder cannot be written" in told(lambda: FilePositions(path).load([1]), path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", denied)
        assert "Permission denied" in told(lambda: store.save({1: at(2)}), path)
    assert FilePositions(path).load([1]) == {1: at(1)}


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files may not grow beyond it, which is what a full disk is to a program: part of a write succeeds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "p"
    store = FilePositions(path)
    before = {partition: at(5) for partition in range(64)}
    store.save(before)
    with file_size_limit(path.stat().st_size // 2):
        told(lambda: store.save({1: at(6)}), path)
    assert os.listdir(tmp_path) == ["p"]
    assert FilePositions(path).load(range(1024)) == before
    store.save({1: at(6)})
    assert FilePositions(path).load(range(1024)) == {**before, 1: at(6)}


def test_the_second_of_two_consumers_on_one_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "p"
    first, second = FilePositions(path), FilePositions(path)
    assert first.load([1]) == second.load([1]) == {}
    first.save({1: at(1)})
    first.save({1: at(2)})
    for _ in range(2):
        with pytest.raises(PositionBusyError) as caught:
            second.save({1: at(9)})
        assert not caught.value.retriable
        assert str(path) in caught.value.message
        assert "a file of its own" in caught.value.hint
    first.save({2: at(3)})
    assert FilePositions(path).load([1, 2]) == {1: at(2), 2: at(3)}
    # Loading takes it over.
    assert second.load([1]) == {1: at(2)}
    second.save({1: at(4)})
    with pytest.raises(PositionBusyError):
        first.save({1: at(5)})


def test_a_file_that_was_removed_under_a_consumer_is_told(tmp_path: Path) -> None:
    store = FilePositions(tmp_path / "p")
    store.save({1: at(1)})
    (tmp_path / "p").unlink()
    with pytest.raises(PositionBusyError):
        store.save({1: at(2)})
    assert not (tmp_path / "p").exists()


def test_a_lock_that_stays_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions_module, "_LOCK_SECONDS", 0.05)
    store = FilePositions(tmp_path / "p")
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(PositionBusyError) as caught:
        store.save({1: at(1)})
    assert caught.value.retriable
    os.close(folder)
    store.save({1: at(1)})
    assert store.load([1]) == {1: at(1)}


def test_a_file_system_without_locks_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    store = FilePositions(tmp_path / "p")
    store.save({1: at(1)})
    assert store.load([1]) == {1: at(1)}


@pytest.mark.long
def test_processes_that_share_a_file_leave_it_whole(tmp_path: Path) -> None:
    """Each saves until it is told that it is not alone; then it loads again."""
    path = tmp_path / "p"
    code = """
import sys
from upr_client import FilePositions, Position
from upr_client.errors import PositionBusyError
path, own = sys.argv[1], int(sys.argv[2])
saved = 0
store = FilePositions(path)
while saved < 20:
    try:
        found = store.load(range(1024))
        assert len({p: at for p, at in found.items() if p % 3 == own}) == saved, found
        store.save({3 * saved + own: Position(1, 7, 7, 5, 5, (), None)})
        saved += 1
    except PositionBusyError:
        pass
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(own)], stderr=subprocess.PIPE)
        for own in range(3)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert len(FilePositions(path).load(range(1024))) == 60
    assert os.listdir(tmp_path) == ["p"]


def test_threads_may_share_an_object(tmp_path: Path) -> None:
    """A save that was cancelled in the asyncio flavour goes on in its thread while the last one is begun."""
    store = FilePositions(tmp_path / "p")
    errors: list[BaseException] = []

    def save(own: int) -> None:
        try:
            for number in range(20):
                store.save({20 * own + number: at(number + 1)})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(store.load(range(1024))) == 80
