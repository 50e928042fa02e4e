"""``upr-backup`` as a process, against real servers."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.test_check import run_admin
from tests.harness import RunningServer
from tests.service import test_dead_partitions as dead
from tests.spark import restoring
from tests.spark.restoring import State, content, restored, taken, write
from upr_backup.errors import LockedError
from upr_backup.repository import LocalStorage
from upr_backup.repository.lock import Lock
from upr_backup.repository.storage import LocalSink
from upr_client import Client
from upr_protocol.partitioning import partition_of


def upr_backup(repository: Path, *arguments: str) -> Result:
    """Run the command in this process, and return how it ended; nothing is said before an error."""
    done = restoring.upr_backup(repository, *arguments)
    if done.exit_code not in (0, 10, 11):
        assert done.stderr.count("\n") == 1, done.stderr
    return done


def later(state: State, salt: int, step: int) -> list[tuple[bytes, bytes | None]]:
    """Return rows that overwrite some keys, delete some, and add some."""
    rows: list[tuple[bytes, bytes | None]] = []
    for number, key in enumerate(sorted(state)):
        if number % step == 0:
            rows.append((key, b"%d of %d" % (number, salt)))
        elif number % step == 1:
            rows.append((key, None))
    return rows + [(b"new:%d:%d" % (salt, n), b"") for n in range(50)]


@pytest.mark.long
def test_every_point_of_a_chain_is_restored(
    server_process: Callable[..., RunningServer], tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    server, other = server_process(), server_process()
    assert upr_backup(repository, "init", "--target", server.target).exit_code == 0
    points: list[State] = []
    state: State = {}
    write(server, state, [(b"key:%d" % n, b"first %d" % n) for n in range(2_000)])
    assert taken(repository)["kind"] == "full"
    points.append(dict(state))
    write(server, state, later(state, 1, 7))
    second = taken(repository)
    assert second["kind"] == "incremental"
    # Only what is new was read.
    assert second["rows"] == len(later(points[0], 1, 7))
    points.append(dict(state))
    server.kill()
    server.start()
    write(server, state, later(state, 2, 11))
    taken(repository)
    points.append(dict(state))
    # A server that is put back to an older copy of its directory: what the third backup has did not happen.
    assert server.terminate() == 0
    copy = tmp_path / "copy"
    shutil.copytree(server.data, copy)
    server.start()
    old = dict(state)
    write(server, state, later(state, 3, 3))
    taken(repository)
    points.append(dict(state))
    server.terminate()
    shutil.rmtree(server.data)
    copy.rename(server.data)
    assert run_admin("restore-copy", "--yes", server.data).exit_code == 0
    server.start()
    state = old
    write(server, state, later(state, 4, 5))
    fifth = taken(repository, code=10)
    assert isinstance(fifth["rollbacks"], int)
    assert fifth["rollbacks"] > 100
    points.append(dict(state))
    # Behind the crash, of the history that is no more, and the newest.
    for number in (3, 4, 5):
        assert restored(repository, other.target, number) == points[number - 1]
    chosen = restored(
        repository, other.target, 5, "--partitions", "0-511", "--key-prefix", "new:4:"
    )
    with Client(other.target) as client:
        whole = content(client.target, "restored-5-0")
    assert chosen == {
        key: value
        for key, value in whole.items()
        if key.startswith(b"new:4:") and partition_of(key) < 512
    }
    assert chosen
    assert upr_backup(repository, "verify", "--full").stdout == "all is well\n"
    assert [m["id"] for m in json.loads(upr_backup(repository, "list", "--json").stdout)] == [
        *range(1, 6)
    ]
    info = json.loads(upr_backup(repository, "info", "5", "--json").stdout)
    assert info["needs"] == [1, 2, 3, 4, 5]
    assert len(info["partitions"]) == 1024
    again = upr_backup(
        repository, "restore", "--target", other.target, "--bucket", "restored-3-0", "--at", "3"
    )
    assert again.exit_code == 4
    assert "holds data" in again.stderr
    assert restored_over(repository, other.target, "restored-3-0", 5) == points[4], (
        "a key that a later backup deleted is deleted"
    )


def restored_over(repository: Path, target: str, name: str, number: int) -> State:
    """Restore into a bucket that holds data, and return what it then holds."""
    options = ["--target", target, "--bucket", name, "--at", str(number), "--into-non-empty"]
    assert upr_backup(repository, "restore", *options).exit_code == 0
    with Client(target) as client:
        return content(client.target, name)


@pytest.fixture
def small(shared_server: RunningServer, target: str, tmp_path: Path) -> tuple[Path, RunningServer]:
    """A repository of three backups, and its server."""
    repository = tmp_path / "repository"
    upr_backup(repository, "init", "--target", target)
    with Client(target) as client:
        for salt in range(3):
            client.bucket().write_many((b"%d" % n, b"%d" % salt) for n in range(100))
            taken(repository)
    return repository, shared_server


def test_damage_is_found(small: tuple[Path, RunningServer]) -> None:
    repository, server = small
    files = sorted(p for p in repository.rglob("*") if p.is_file() and "locks" not in p.parts)
    assert len(files) == 7

    def verify(*options: str) -> int:
        return upr_backup(repository, "verify", *options).exit_code

    assert verify("--full") == 0
    for path in files:
        data = path.read_bytes()
        for at in (0, len(data) // 2):
            flipped = bytearray(data)
            flipped[at] ^= 1
            path.write_bytes(flipped)
            assert verify("--full") == 11, (path.name, at)
        path.write_bytes(data[:-1])
        assert verify() == 11, path
        path.unlink()
        assert verify() == 11, path
        path.write_bytes(data)
    first, second, third = (path for path in files if path.parent.name == "chain")
    for one, other in ((first, second), (second, third)):
        one_data, other_data = one.read_bytes(), other.read_bytes()
        one.write_bytes(other_data)
        assert verify() == 11
        other.write_bytes(one_data)
        assert verify() == 11
        one.write_bytes(one_data)
        other.write_bytes(other_data)
    assert verify("--full") == 0
    # Below a gap restoring goes on, when it is asked for by number.
    second_data = second.read_bytes()
    second.unlink()
    options = ("restore", "--target", server.target, "--into-non-empty")
    assert upr_backup(repository, *options, "--at", "1").exit_code == 0
    for point in ((), ("--at", "2"), ("--at", "0s ago")):
        assert upr_backup(repository, *options, *point).exit_code == 11, point
    second.write_bytes(second_data)
    # A damaged file is never restored, and a damaged chain is not continued.
    data_file = next(path for path in files if path.suffix == ".parquet")
    with data_file.open("r+b") as file:
        file.seek(40)
        file.write(b"\xff\xff")
    assert upr_backup(repository, *options).exit_code == 11
    third.write_bytes(third.read_bytes()[:-9] + bytes(9))
    done = upr_backup(repository, "backup")
    assert done.exit_code == 11
    assert done.stderr.startswith("error: chain/0000000003.json is damaged")


def test_what_does_not_fit_the_repository_is_said(small: tuple[Path, RunningServer]) -> None:
    repository, server = small
    for at, words in (("4", "there are 1 to 3"), ("2000-01-01T00:00:00Z", "no backup from")):
        done = upr_backup(repository, "restore", "--target", server.target, "--at", at)
        assert (done.exit_code, words in done.stderr) == (3, True), done.stderr
    done = upr_backup(repository, "backup", "--target", "127.0.0.1:1")
    assert (done.exit_code, "is the server running" in done.stderr) == (5, True), done.stderr
    with Lock(LocalStorage(repository)):
        done = upr_backup(repository, "backup")
    assert (done.exit_code, f"process {os.getpid()}" in done.stderr) == (12, True)
    with Client(server.target) as client:
        client.admin.drop_bucket("default")
        client.admin.create_bucket("default")
    done = upr_backup(repository, "backup")
    assert done.exit_code == 2
    assert "is not the one of this repository" in done.stderr
    own = repository / "repository.json"
    own.write_bytes(b'{"content":{},"format":1,"sha256":""}\n')
    done = upr_backup(repository, "list")
    assert (done.exit_code, "has format 1, this program reads 2" in done.stderr) == (2, True)


def test_a_lock_is_taken_over_when_it_has_expired(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    now = [1000.0]
    first = Lock(storage, 60, lambda: now[0])
    second = Lock(storage, 60, lambda: now[0])
    with first:
        with pytest.raises(LockedError, match="is locked by process"):
            second.__enter__()
        now[0] += 40
        first.keep()
        now[0] += 40
        with pytest.raises(LockedError):
            second.__enter__()
        now[0] += 40
        with second:
            now[0] += 30
            with pytest.raises(LockedError, match="took the repository over"):
                first.keep()
            second.keep(now=True)
    with Lock(storage):
        pass
    # One stays, which nobody holds: numbers do not begin again.
    assert len(storage.names("locks/")) == 1
    with Lock(storage):
        pass
    assert len(storage.names("locks/")) == 1


def test_no_room_loses_nothing(
    small: tuple[Path, RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, server = small
    with Client(server.target) as client:
        client.bucket().set(b"new", b"value")
    for where in (LocalSink, LocalStorage):
        method = "write" if where is LocalSink else "put_if_absent"

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(where, method, full)
            done = upr_backup(repository, "backup")
        assert (done.exit_code, "No space left" in done.stderr) == (2, True)
        if where is LocalSink:
            assert not LocalStorage(repository).names("data/0000000004/")
    assert taken(repository)["rows"] == 1
    assert upr_backup(repository, "verify", "--full").exit_code == 0


def test_what_cannot_be_cleaned_is_left_to_the_next_run(
    small: tuple[Path, RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, server = small
    with Client(server.target) as client:
        client.bucket().set(b"new", b"value")
    with monkeypatch.context() as patched:
        delete = LocalStorage.delete

        def refuse(storage: LocalStorage, name: str) -> None:
            if name.startswith("staging/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            delete(storage, name)

        patched.setattr(LocalStorage, "delete", refuse)
        assert taken(repository)["id"] == 4
    assert list((repository / "staging").rglob("*.json"))
    assert taken(repository)["id"] == 5
    assert not list((repository / "staging").rglob("*.json"))
    assert upr_backup(repository, "verify", "--full").exit_code == 0


def test_foreign_files_do_no_harm(small: tuple[Path, RunningServer]) -> None:
    repository, _ = small
    for folder in ("chain", "data", "staging", "locks"):
        (repository / folder).mkdir(exist_ok=True)
        (repository / folder / ".DS_Store").write_bytes(b"?")
        (repository / folder / "zzz").write_bytes(b"?")
    assert taken(repository)["id"] == 4
    assert upr_backup(repository, "verify", "--full").exit_code == 0


@pytest.mark.long
def test_partitions_whose_deletions_are_gone_are_read_anew(
    server_process: Callable[..., RunningServer], tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    server = server_process("--tombstone-age", "0", "--purge-hold", "0")
    upr_backup(repository, "init", "--target", server.target)
    state: State = {}
    write(server, state, [(b"%d" % n, b"") for n in range(3000)])
    taken(repository)
    write(server, state, [(b"%d" % n, None) for n in range(0, 3000, 2)])
    server.terminate()
    # Only what is stored is purged, and stopping stores everything.
    server.start()
    with Client(server.target) as client:
        assert sum(one.purged for one in client.admin.purge("default")) > 100
    write(server, state, [(b"%d" % n, b"more") for n in range(3000, 3100)])
    backup = taken(repository, code=10)
    assert backup["kind"] == "incremental"
    assert restored(repository, server.target, 2) == state


def test_a_missing_package_is_one_line() -> None:
    program = "from upr_backup.cli import entry; entry.MODULES = ('nowhere',); entry.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: upr-backup needs nowhere, not installed (pip install 'upr-stream[backup]')\n"
    )


def test_a_dead_partition_is_left_out_and_named_and_gone_on_with_later(
    server_process: Callable[..., RunningServer], tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    server = server_process("--flush-seconds", "3600")
    upr_backup(repository, "init", "--target", server.target)
    dead.write(server, 0, 3)
    taken(repository)
    assert server.terminate() == 0
    server.start()
    dead.write(server, 3, 2)
    server.kill()
    dead.lose_what_is_stored(server)
    server.start()
    document = taken(repository, code=10)
    why = f"partition {dead.P}: the journal goes on at seqno 3, the store ends at 0"
    assert document["left_out"] == [{"partition": dead.P, "seqno": 3, "why": why}]
    assert (document["kind"], document["rows"]) == ("incremental", 2)
    shown = upr_backup(repository, "info")
    assert why in shown.stdout
    assert upr_backup(repository, "verify", "--full").exit_code == 0
    against = upr_backup(repository, "verify", "--against-server")
    assert f"{dead.P}" in against.stdout + against.stderr
    # A restore has of the partition what the first backup had, and says so.
    with Client(server.target) as client:
        client.admin.create_bucket("a")
    point = upr_backup(repository, "restore", "--target", server.target, "--bucket", "a")
    older = f"partition {dead.P} is older than backup 2"
    assert older in point.stderr
    alone = upr_backup(repository, "find", dead.KEY.decode(), "--at", "2")
    assert (alone.stdout, older in alone.stderr) == ("2", True)
    assert upr_backup(repository, "find", dead.OTHER.decode(), "--at", "2").stderr == ""
    assert server.terminate() == 0
    assert run_admin("accept-loss", server.data, dead.P, "--yes").exit_code == 0
    server.start()
    with Client(server.target) as client:
        assert client.bucket("a").get(dead.KEY) == b"2"
        assert client.bucket("a").get(dead.OTHER) == b"4"
    dead.write(server, 9, 1)
    later = taken(repository, code=10)
    assert (later["left_out"], later["rollbacks"]) == ([], 1)
    state = restored(repository, server.target, 3)
    assert state == {dead.KEY: b"9", dead.OTHER: b"9"}
