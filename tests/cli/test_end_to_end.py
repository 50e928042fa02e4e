"""The commands against a real server."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.git_repos import RepoBuilder
from tests.harness import RunningServer
from upr.cli import admin, cat
from upr_client import Client
from upr_protocol.partitioning import partition_of

StartServer = Callable[..., RunningServer]


def run_cat(target: str, *arguments: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(cat.main, [*arguments, "--target", target], input=stdin)
    assert "Traceback" not in result.output
    return result


def follow(target: str, *arguments: str) -> list[dict[str, Any]]:
    """Return what ``upr-cat follow --until-now`` prints."""
    result = run_cat(target, "follow", "--until-now", *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def state(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Return the view that the lines lead to."""
    view: dict[str, str] = {}
    for line in lines:
        if line["op"] == "set":
            view[line["key"]] = line["value"]
        elif line["op"] == "delete":
            view.pop(line["key"], None)
    return view


def jsonl(*rows: tuple[str, str | None]) -> str:
    return "".join(json.dumps({"key": key, "value": value}) + "\n" for key, value in rows)


def popen_cat(target: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "upr.cli", "cat", *arguments, "--target", target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_load_jsonl_and_follow(target: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(jsonl(("a", "1"), ("b", "2"), ("a", "3"), ("b", None)))
    loaded = run_cat(target, "load", "jsonl", str(file), "--json")
    assert loaded.exit_code == 0
    assert json.loads(loaded.stdout) == {"rows": 4, "sets": 3, "deletes": 1}
    lines = follow(target)
    assert state(lines) == {"a": "3"}
    partition = partition_of(b"a")
    of_a = [line for line in lines if line["partition"] == partition]
    assert of_a == [
        {"partition": partition, "seqno": 1, "op": "set", "key": "a", "value": "1"},
        {"partition": partition, "seqno": 2, "op": "set", "key": "a", "value": "3"},
        {"partition": partition, "op": "marker", "seqno": 2},
    ]


def test_follow_options(target: str, tmp_path: Path) -> None:
    position = tmp_path / "position"
    run_cat(target, "load", "jsonl", "-", stdin=jsonl(("a", "1"), ("b", "2")))
    of_a = str(partition_of(b"a"))
    assert state(follow(target, "--partitions", of_a)) == {"a": "1"}
    assert state(follow(target, "--position", str(position), "--stability", "memory")) == {
        "a": "1",
        "b": "2",
    }
    assert follow(target, "--position", str(position)) == []
    run_cat(target, "load", "jsonl", "-", stdin=jsonl(("a", "4")))
    assert state(follow(target, "--position", str(position))) == {"a": "4"}
    again = follow(target, "--position", str(position), "--from-start", "--keys-only")
    assert {line["key"] for line in again if line["op"] == "set"} == {"a", "b"}
    assert not any("value" in line for line in again)
    assert follow(target, "--position", str(position)) == []


def test_from_start_passes_over_a_damaged_position(target: str, tmp_path: Path) -> None:
    position = tmp_path / "position"
    position.write_text("nonsense")
    run_cat(target, "load", "jsonl", "-", stdin=jsonl(("a", "1")))
    assert state(follow(target, "--position", str(position), "--from-start")) == {"a": "1"}
    assert follow(target, "--position", str(position)) == []


def test_a_bad_line_ends_the_load_and_what_precedes_it_is_written(
    target: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(jsonl(("a", "1")) + '{"key": ""}\n' + jsonl(("b", "2")))
    result = run_cat(target, "load", "jsonl", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f'error: {file}:2: "value" is missing')
    assert state(follow(target)) == {"a": "1"}


@pytest.mark.parametrize("bare", [False, True])
def test_load_git(target: str, tmp_path: Path, bare: bool) -> None:
    repo = RepoBuilder(tmp_path / "repo", bare)
    repo.commit({b"a": b"1", b"b": b"2", b"sub": ("160000", b"1" * 40)})
    for number in range(300):
        repo.commit({b"a": b"%d" % number, b"f%d" % (number % 7): b"%d" % number})
    repo.commit({b"b": None})
    repo.make()
    result = run_cat(target, "load", "git", str(repo.folder), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"commits": 302, "sets": 602, "deletes": 1, "skipped": 1}
    assert "gitlink" in result.stderr
    tree = {path.decode(): blob.decode() for path, blob in repo.tree().items()}
    assert state(follow(target)) == tree


@pytest.mark.crash
def test_the_loader_survives_a_restart_of_the_server(server_process: StartServer) -> None:
    server = server_process()
    loader = popen_cat(server.target, "load", "jsonl", "-", "--json")
    assert loader.stdin is not None
    with Client(server.target) as client:
        changes = client.bucket("default").changes()
        loader.stdin.write(jsonl(("before", "1")).encode())
        loader.stdin.flush()
        with changes:
            assert next(iter(changes.batches())).changes[0].key == b"before"
    server.kill()
    loader.stdin.write(jsonl(("after", "2")).encode())
    loader.stdin.flush()
    server.start()
    out, errors = loader.communicate(timeout=60)
    assert loader.returncode == 0, errors
    assert json.loads(out) == {"rows": 2, "sets": 2, "deletes": 0}
    assert state(follow(server.target)) == {"before": "1", "after": "2"}


@pytest.mark.crash
def test_follow_prints_a_rollback_and_what_came_instead(
    server_process: StartServer, tmp_path: Path
) -> None:
    """The journal is held, so the second write is in memory only when the server is killed."""
    hold = tmp_path / "hold"
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"})
    partition = partition_of(b"a")
    run_cat(server.target, "load", "jsonl", "-", stdin=jsonl(("a", "1")))
    follower = popen_cat(
        server.target, "follow", "--stability", "memory", "--partitions", str(partition)
    )
    assert follower.stdout is not None

    def next_line() -> dict[str, Any]:
        assert follower.stdout is not None
        document: dict[str, Any] = json.loads(follower.stdout.readline())
        return document

    try:
        assert next_line()["value"] == "1"
        assert next_line()["op"] == "marker"
        hold.touch()
        arguments = ("load", "jsonl", "-", "--durability", "memory")
        assert run_cat(server.target, *arguments, stdin=jsonl(("a", "lost"))).exit_code == 0
        assert next_line()["value"] == "lost"
        assert next_line()["seqno"] == 2
        server.kill()
        hold.unlink()
        server.start()
        rollback = next_line()
        assert rollback["op"] == "rollback"
        assert (rollback["partition"], rollback["from_seqno"]) == (partition, 2)
        # The record is at 1, and the marker is taken from before it.
        assert rollback["seqno"] == 0
        assert rollback["rule"] == "next_record"
        assert next_line() == {
            "partition": partition,
            "seqno": 1,
            "op": "set",
            "key": "a",
            "value": "1",
        }
    finally:
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate(timeout=60)
    assert follower.returncode == 130, errors
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("number", "ended"),
    [(signal.SIGINT, (130, b"interrupted")), (signal.SIGTERM, (143, b""))],
    ids=["SIGINT", "SIGTERM"],
)
def test_an_interrupted_follow_keeps_its_position(
    target: str, tmp_path: Path, number: int, ended: tuple[int, bytes]
) -> None:
    position = tmp_path / "position"
    run_cat(target, "load", "jsonl", "-", stdin=jsonl(("a", "1")))
    follower = popen_cat(target, "follow", "--position", str(position))
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["op"] == "set"
    assert json.loads(follower.stdout.readline())["op"] == "marker"
    follower.send_signal(number)
    _, errors = follower.communicate(timeout=60)
    assert (follower.returncode, errors.strip()) == ended
    # What was written right before the interrupt may come again, but nothing may be missing.
    run_cat(target, "load", "jsonl", "-", stdin=jsonl(("a", "2")))
    values = [line.get("value") for line in follow(target, "--position", str(position))]
    assert "2" in values


def test_a_closed_pipe_ends_follow_quietly(target: str) -> None:
    run_cat(target, "load", "jsonl", "-", stdin=jsonl(("a", "1")))
    follower = popen_cat(target, "follow")
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["key"] == "a"
    follower.stdout.close()
    # Written one by one until the follower notices; it is the write after the one that broke the pipe that fails.
    with Client(target) as client:
        bucket = client.bucket("default")
        while follower.poll() is None:
            bucket.set(b"a", b"2")
    assert follower.stderr is not None
    errors = follower.stderr.read()
    follower.stderr.close()
    assert follower.stdin is not None
    follower.stdin.close()
    assert (follower.returncode, errors) == (0, b"")


def test_admin_formats(target: str) -> None:
    run_cat(target, "load", "jsonl", "-", stdin=jsonl(("a", "1"), ("a", "2")))
    partition = partition_of(b"a")

    def run_admin(*arguments: str) -> Result:
        result = CliRunner().invoke(admin.main, [*arguments, "--target", target])
        assert result.exit_code == 0, result.output
        return result

    (log,) = json.loads(run_admin("failover-log", str(partition), "--json").stdout)
    assert list(log) == ["partition", "failover_log"]
    (record,) = log["failover_log"]
    assert record["seqno"] == 0
    assert len(record["failover_id"]) == 16
    infos = json.loads(run_admin("partitions", "--json").stdout)
    assert [info["partition"] for info in infos] == list(range(1024))
    assert infos[partition] == {
        "partition": partition,
        "state": "active",
        "high_seqno": 2,
        "durable_seqno": 2,
        "purge_seqno": 0,
        "failover_id": record["failover_id"],
        "problem": None,
        "dead_since": None,
    }
    assert len(json.loads(run_admin("failover-log", "0-3,9", "7", "--json").stdout)) == 6
    text = run_admin("failover-log", str(partition)).stdout
    assert record["failover_id"] in text
    assert len(run_admin("partitions").stdout.splitlines()) == 1025
    arguments = ("explain", str(partition), "--id", record["failover_id"], "--seqno")
    explained = json.loads(run_admin(*arguments, "1", "--json").stdout)
    assert explained["start"]["answer"] == "started"
    above = json.loads(run_admin(*arguments, "3", "--json").stdout)
    assert above["start"]["alarm"] is True
