"""``upr-backup merge``, ``expire`` and ``prune``, against real servers."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cli.test_check import run_admin
from tests.harness import RunningServer
from tests.spark.restoring import State, content, restored, taken, write
from tests.spark.s3 import BUCKET, s3_server
from tests.spark.test_backup import later, upr_backup
from upr_backup import retention, rows
from upr_backup.cli.commands import main
from upr_backup.repository import LocalStorage
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Repository
from upr_backup.retention import FileFold, Merge
from upr_client import Client
from upr_protocol.limits import ADMIN_SOCKET


def said(repository: Path, *arguments: str) -> Any:
    """Run a command that must do well, with --json, and return its document."""
    done = upr_backup(repository, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def whole(repository: Path) -> bool:
    """Return whether every file and row is right."""
    done = upr_backup(repository, "verify", "--full")
    return (done.exit_code, done.stdout) == (0, "all is well\n")


def numbers(repository: Path) -> list[int]:
    return [backup["id"] for backup in said(repository, "list")]


def backed_up(repository: Path, *options: str, code: int = 0) -> dict[str, object]:
    return taken(repository, "--processes", "1", *options, code=code)


@pytest.mark.long
def test_old_points_go_and_the_rest_stays(
    server_process: Callable[..., RunningServer], tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    server = server_process()
    assert upr_backup(repository, "init", "--target", server.target).exit_code == 0
    assert said(repository, "merge") == {"merged": None}
    assert said(repository, "expire", "--keep-last", "1") == {"first": 1, "expired": 0}
    points: dict[int, State] = {}
    state: State = {}
    write(server, state, [(b"key:%d" % n, b"first %d" % n) for n in range(1_500)])
    copy = tmp_path / "copy"
    for number in range(1, 6):
        backed_up(repository)
        points[number] = dict(state)
        if number == 2:
            assert server.terminate() == 0
            shutil.copytree(server.data, copy, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
            server.start()
        write(server, state, later(state, number, 5 + number))
    merged = said(repository, "merge")["merged"]
    assert (merged["id"], merged["kind"], merged["rows"]) == (3, "merged", len(points[3]))
    assert said(repository, "merge") == {"merged": None}
    assert said(repository, "merge", "--to", "1") == {"merged": None}
    info = said(repository, "info", "4")
    assert (info["base"], info["needs"]) == ("merged 3", [3, 4])
    assert [one["merged"] is not None for one in said(repository, "list")] == [
        number == 3 for number in points
    ]
    assert whole(repository)
    assert said(repository, "expire", "--keep-last", "2") == {"first": 3, "expired": 2}
    assert numbers(repository) == [3, 4, 5]
    assert whole(repository)
    gone = upr_backup(repository, "restore", "--target", server.target, "--at", "2")
    assert (gone.exit_code, "backup 2 has expired (there are 3 to 5)" in gone.stderr) == (3, True)
    # A run that did not know may still be under way.
    waiting = upr_backup(repository, "prune", "--grace", "0", "--json")
    assert "goes after one more backup" in waiting.stderr
    assert json.loads(waiting.stdout)["documents"] == {"objects": 0, "bytes": 0}
    # The server loses all since the second backup: its marker is not to be gone back to any more.
    server.kill()
    shutil.rmtree(server.data)
    copy.rename(server.data)
    assert run_admin("restore-copy", "--yes", server.data).exit_code == 0
    server.start()
    state = dict(points[2])
    write(server, state, later(state, 9, 4))
    backed_up(repository, code=10)
    points[6] = dict(state)
    ends = {p["partition"]: p["to"] for p in said(repository, "info", "3")["partitions"]}
    cuts = {
        p["partition"]: p["cut"]
        for p in said(repository, "info", "6")["partitions"]
        if p["cut"] is not None
    }
    assert len(cuts) > 100
    assert {p for p, cut in cuts.items() if 0 < cut < ends[p]} == set()
    dry = said(repository, "prune", "--grace", "0", "--dry-run")
    before = {path for path in repository.rglob("*") if path.is_file()}
    assert (dry["first"], dry["documents"]["objects"]) == (3, 2)
    done = said(repository, "prune", "--grace", "0")
    assert {name: done[name] for name in ("documents", "data_files", "leftovers")} == {
        name: dry[name] for name in ("documents", "data_files", "leftovers")
    }
    after = {path for path in repository.rglob("*") if path.is_file()}
    listed = {repository / one["name"] for one in dry["objects"]}
    assert {path for path in before - after if not {"locks", "index"} & {*path.parts}} == listed
    assert sorted(path.name for path in (repository / "chain").iterdir())[0] == "0000000003.json"
    assert {path.name for path in (repository / "data").iterdir()} == {
        f"{number:010d}" for number in (4, 5, 6)
    }
    assert whole(repository)
    assert backed_up(repository)["rows"] == 0
    points[7] = dict(state)
    assert numbers(repository) == [3, 4, 5, 6, 7]
    for number in (3, 5, 7):
        assert restored(repository, server.target, number) == points[number]
    # Nothing but the newest: with a full backup as the base nothing has to be waited for.
    backed_up(repository, "--full")
    assert said(repository, "expire", "--keep-within", "0") == {"first": 8, "expired": 5}
    assert said(repository, "prune")["documents"]["objects"] == 0, "24 hours have not passed"
    assert said(repository, "prune", "--grace", "0")["first"] == 8
    assert {path.name for path in (repository / "data").iterdir()} == {f"{8:010d}"}
    assert list((repository / "merged").rglob("*.*")) == []
    assert whole(repository)
    assert restored(repository, server.target, 8, "--partitions", "0-1023") == state


@pytest.fixture
def chain_of_six(
    shared_server: RunningServer, target: str, tmp_path: Path
) -> tuple[Path, RunningServer, State]:
    """A repository of six backups, its server, and the state at all but the first."""
    repository = tmp_path / "repository"
    upr_backup(repository, "init", "--target", target)
    state: State = {}
    write(shared_server, state, [(b"gone:%d" % n, b"") for n in range(400)])
    backed_up(repository)
    write(shared_server, state, [(key, None) for key in state])
    write(shared_server, state, [(b"key:%d" % n, b"%d" % n * 9) for n in range(500)])
    for _ in range(5):
        backed_up(repository)
    return repository, shared_server, state


@pytest.mark.long
def test_damage_to_what_was_merged_and_expired_is_found(
    chain_of_six: tuple[Path, RunningServer, State],
) -> None:
    repository, _, _ = chain_of_six
    for number in ("2", "3"):
        said(repository, "merge", "--to", number)
    said(repository, "expire", "--keep-last", "4")
    assert whole(repository)

    def found(*options: str) -> bool:
        return upr_backup(repository, "verify", *options).exit_code == 11

    files = [path for name in ("merged", "expired") for path in (repository / name).rglob("*.*")]
    ours = [path for path in files if "0000000003" in str(path)]
    assert len(ours) == 3
    for path in ours:
        data = path.read_bytes()
        for at in (0, len(data) // 2):
            flipped = bytearray(data)
            flipped[at] ^= 1
            path.write_bytes(flipped)
            assert found("--full"), (path.name, at)
        path.write_bytes(data[:-1])
        assert found(), path
        if path.parent.name != "expired":
            path.unlink()
            assert found(), path
        path.write_bytes(data)
    second, third = sorted(path for path in files if path.parent.name == "merged")
    data, other = third.read_bytes(), second.read_bytes()
    third.write_bytes(other)
    assert found()
    third.write_bytes(data)
    assert whole(repository)
    # A damaged file is never folded.
    parquet = next((repository / "data" / f"{1:010d}").iterdir())
    (repository / "expired" / f"{3:010d}.json").unlink()
    third.unlink()
    second.unlink()
    flipped = bytearray(parquet.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    parquet.write_bytes(flipped)
    done = upr_backup(repository, "merge")
    assert (done.exit_code, "its SHA-256" in done.stderr) == (11, True)
    assert list((repository / "merged").glob("*.json")) == []


KILLED = (
    "import os, signal, sys\n"
    "from upr_backup import retention as fold, retention as prune\n"
    "from upr_backup.repository import LocalStorage\n"
    "step = int(sys.argv.pop(1))\n"
    "def counted(real):\n"
    "    def then(*arguments):\n"
    "        global step\n"
    "        done = real(*arguments)\n"
    "        step -= 1\n"
    "        if not step: os.kill(os.getpid(), signal.SIGKILL)\n"
    "        return done\n"
    "    return then\n"
    "if 'merge' in sys.argv: fold.FileFold.__call__ = counted(fold.FileFold.__call__)\n"
    "if 'prune' in sys.argv: LocalStorage.delete = counted(LocalStorage.delete)\n"
    "from upr_backup.cli.entry import main\n"
    "main()\n"
)


def killed(repository: Path, step: int, *arguments: str) -> None:
    """Run a command in a process that is killed at a step."""
    command = [sys.executable, "-c", KILLED, str(step), str(repository), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.long
def test_kills_lose_nothing(chain_of_six: tuple[Path, RunningServer, State]) -> None:
    repository, server, state = chain_of_six
    foreign = [f"data/{1:010d}/notes.txt", "merged/notes.txt", "chain/1.json", "expired/x.json"]
    for name in foreign:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b"?")
    killed(repository, 1, "merge")
    assert said(repository, "list")[3]["merged"] is None
    assert len(list((repository / "merged").rglob("*.parquet"))) == 1
    assert whole(repository)
    assert said(repository, "merge")["merged"]["id"] == 4
    assert said(repository, "prune")["leftovers"]["objects"] == 0, "24 hours have not passed"
    assert said(repository, "prune", "--grace", "0")["leftovers"]["objects"] == 1
    assert len(list((repository / "merged").rglob("*.parquet"))) == 1
    assert said(repository, "expire", "--keep-last", "3")["first"] == 4
    backed_up(repository)
    killed(repository, 2, "prune", "--grace", "0")
    assert whole(repository)
    assert numbers(repository) == [4, 5, 6, 7]
    said(repository, "prune", "--grace", "0")
    assert [path.name for path in sorted((repository / "chain").glob("0*"))] == [
        f"{number:010d}.json" for number in (4, 5, 6, 7)
    ]
    assert all((repository / name).exists() for name in foreign)
    assert said(repository, "prune", "--grace", "0")["data_files"]["objects"] == 0
    assert backed_up(repository)["id"] == 8
    for number in (4, 8):
        assert restored(repository, server.target, number) == state
    abandoned = repository / "journal" / ("0" * 32) / ("1" * 16) / "plan.json"
    abandoned.parent.mkdir(parents=True)
    abandoned.write_bytes(b"of a restore that was interrupted and not gone on with")
    assert said(repository, "prune")["leftovers"]["objects"] == 0
    assert said(repository, "prune", "--grace", "0")["leftovers"]["objects"] == 1
    assert not abandoned.exists()


@pytest.mark.long
def test_a_merge_in_small_portions_is_the_same(
    chain_of_six: tuple[Path, RunningServer, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, server, state = chain_of_six
    monkeypatch.setattr(retention, "_GROUP_BYTES", 2_000)
    monkeypatch.setattr(rows, "_FOLD_BYTES", 100)
    storage = LocalStorage(repository)
    opened = Repository.open(storage)
    with Lock(storage) as lock:
        work = Merge(opened, FileFold(storage, lock.keep), lock, file_bytes=20_000)
        base = work.merge(opened.chain(), 4)
    assert len(base.files) > 3
    # Tombstones are left out.
    assert base.rows == len(state)
    assert whole(repository)
    assert restored(repository, server.target, 4) == state


@pytest.mark.long
def test_what_cannot_be_merged_or_expired_is_said(
    chain_of_six: tuple[Path, RunningServer, State],
) -> None:
    repository, server, _ = chain_of_six
    done = upr_backup(repository, "merge", "--to", "7")
    assert (done.exit_code, "there are 1 to 6" in done.stderr) == (3, True), done.stderr
    for command in (["merge"], ["expire", "--keep-last", "1"], ["prune"]):
        with Lock(LocalStorage(repository)):
            assert upr_backup(repository, *command).exit_code == 12
    done = upr_backup(repository, "expire", "--keep-last", "2")
    assert (done.exit_code, done.stdout) == (0, "nothing expires\n")
    assert "'merge --to 5'" in done.stderr
    # A repository with damage is not pruned.
    next((repository / "data" / f"{1:010d}").iterdir()).unlink()
    (repository / "chain" / f"{3:010d}.json").unlink()
    for command in (["merge"], ["expire", "--keep-last", "1"], ["prune", "--grace", "0"]):
        assert upr_backup(repository, *command).exit_code == 11, command
    with Client(server.target) as client:
        assert client.admin.cuts("default") == []


def test_the_same_on_an_object_store(
    shared_server: RunningServer, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = f"s3://{BUCKET}/r"

    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(main, [location, *arguments])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    with s3_server() as s3, Client(target) as client:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        run("init", "--target", target)
        state: State = {}
        for salt in range(5):
            write(shared_server, state, [(b"%d" % n, b"%d" % salt) for n in range(salt, 200)])
            run("backup", "--processes", "1")
        run("merge")
        run("expire", "--keep-last", "2")
        run("backup", "--processes", "1")
        assert json.loads(run("prune", "--grace", "0", "--json"))["data_files"]["objects"] == 3
        assert run("verify", "--full") == "all is well\n"
        parquet = [name for name in s3.objects if name.endswith(".parquet")]
        assert sorted(name.split("/")[1] for name in parquet) == ["data", "data", "merged"]
        client.admin.create_bucket("restored")
        run("restore", "--target", target, "--bucket", "restored")
        assert content(client.target, "restored") == state
