"""Keys on the command line, and what ``upr-cat follow`` can choose, against a real server."""

import io
import json
import os
import signal
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cli.test_end_to_end import StartServer, follow, jsonl, popen_cat, run_cat, state
from tests.harness import wait_until
from upr.cli import cat
from upr.cli.cat_commands.follow import layout_of
from upr.cli.cat_commands.keys import values_of
from upr.cli.cat_commands.row_formats import read_rows
from upr_client import Change, ChangeBatch, Client, Rollback, WriteToken
from upr_client.types import Bucket
from upr_protocol.errors import InvalidArgumentError, UnavailableError
from upr_protocol.partitioning import partition_of


def said(target: str, *arguments: str, stdin: str | None = None) -> str:
    """Return what a command that succeeds prints."""
    result = run_cat(target, *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_key_is_set_read_and_deleted(target: str) -> None:
    partition = partition_of(b"k")
    assert said(target, "set", "k", "v") == f"partition {partition}, seqno 1\n"
    assert said(target, "get", "k") == "v\n"
    assert (
        said(target, "set", "k", "-", stdin="two\nlines\n") == f"partition {partition}, seqno 2\n"
    )
    assert said(target, "get", "--raw", "k") == "two\nlines\n"
    document = json.loads(said(target, "delete", "k", "--json", "--durability", "memory"))
    assert (document["partition"], document["seqno"]) == (partition, 3)
    assert [one.seqno for one in WriteToken.parse(document["token"]).writes] == [3]
    behind = CliRunner().invoke(cat.main, ["set", "--target", target, "--", "k", "-5"])
    assert behind.stdout == f"partition {partition}, seqno 4\n"
    assert said(target, "get", "k") == "-5\n"
    said(target, "delete", "k")
    missing = run_cat(target, "get", "--any", "k")
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert missing.stderr == "error: there is no key 'k' (it was never set, or is deleted)\n"


def test_a_replica_without_the_bucket_does_not_answer_for_the_set(
    server_process: StartServer, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    rows.write_text('{"key": "a", "value": "b"}\n')
    empty = tmp_path / "empty"
    empty.write_text("")
    active = server_process()
    # It has no bucket: nobody is there whom it could follow.
    replica = server_process("--replicate-from", "127.0.0.1:1")
    both = f"{replica.target},{active.target}"
    said(both, "set", "k", "v")
    said(both, "load", "jsonl", str(rows))
    assert (
        len(said(both, "dump").splitlines()) == len(said(active.target, "dump").splitlines()) == 2
    )
    assert said(both, "follow", "--until-now").count("set") == 2
    for target in (both, active.target):
        for command in (["set", "k", "v"], ["load", "jsonl", str(rows)], ["follow"]):
            result = run_cat(target, *command, "--bucket", "other")
            assert result.exit_code == 3, result.output
            assert "error: there is no bucket 'other'" in result.stderr
    assert run_cat(active.target, "load", "jsonl", str(empty), "--bucket", "other").exit_code == 3


def test_bytes_that_are_no_text_come_back_as_they_are(target: str) -> None:
    value = bytes(range(256))
    with popen_cat(target, "set", "\udcff", "-") as process:
        _, words = process.communicate(value)
    assert process.returncode == 0, words
    with Client(target) as client:
        assert client.bucket().get(b"\xff") == value
    with popen_cat(target, "get", "--raw", "\udcff") as process:
        assert process.communicate()[0] == value


def test_a_dump_is_what_load_takes(target: str) -> None:
    rows: dict[bytes, bytes] = {b"user:%d" % i: b"%d" % i for i in range(2500)}
    rows |= {b"\xff": b"\xfe", b"empty": b""}
    with Client(target) as client:
        client.bucket().write_many([*rows.items(), (b"gone", b"1"), (b"user:7", b"old")])
        client.bucket().write_many([(b"user:7", b"7"), (b"gone", None)])
    dumped = io.BytesIO(said(target, "dump").encode())
    assert dict(row for part in read_rows(dumped, "dump") for row in part) == rows
    assert (
        said(target, "dump", "--key-prefix", "user:1", "--partitions", "0-1023").count("\n") == 1111
    )
    assert said(target, "dump", "--key-prefix", "nobody") == ""


def test_a_dump_is_whole_however_long_its_lines_wait(server_process: StartServer) -> None:
    server = server_process()
    # More than a pipe takes.
    rows = [(b"%d" % i, b"v" * 1000) for i in range(2000)]
    with Client(server.target) as client:
        client.bucket().write_many(rows)
        with popen_cat(server.target, "dump") as process:
            assert process.stdout is not None
            assert process.stdout.peek(1)  # type: ignore[attr-defined]
            # So nothing that happens there changes what is still to be printed.
            wait_until(lambda: not client.admin.status().follow_calls, "the call is open")
            server.kill()
            assert len(process.stdout.readlines()) == len(rows)
        assert process.returncode == 0


def test_what_was_rolled_back_is_not_dumped() -> None:
    def batch(*changes: Change) -> ChangeBatch:
        made = ChangeBatch([])
        made._changes = list(changes)
        return made

    undone = Rollback(5, 2, 0, 1, 2, "", "")
    taken = values_of(
        [
            batch(Change(5, 1, "set", b"old", b"1"), Change(6, 1, "set", b"k", b"1")),
            undone,
            batch(Change(5, 1, "set", b"new", b"2"), Change(6, 2, "delete", b"k", None)),
        ]
    )
    assert taken == {5: {b"new": b"2"}, 6: {}}


@pytest.mark.parametrize("words", [("set", "k", "v"), ("delete", "k"), ("get", "k"), ("dump",)])
def test_a_wrong_address_is_told_at_once(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr.cli.cat_commands.keys._RETRY_SECONDS", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        target = f"127.0.0.1:{gone.getsockname()[1]}"
    result = run_cat(target, *words)
    assert (result.exit_code, result.stdout) == (5, "")
    assert "nothing listens there" in result.stderr


def test_follow_by_prefix_from_now_and_from_a_time(target: str, tmp_path: Path) -> None:
    said(target, "load", "jsonl", "-", stdin=jsonl(("user:1", "a"), ("order:1", "b")))
    assert state(follow(target, "--key-prefix", "user:")) == {"user:1": "a"}
    assert follow(target, "--from-now") == []
    position = str(tmp_path / "position")
    assert follow(target, "--from-now", "--position", position) == []
    between = datetime.now(UTC).isoformat()
    said(target, "set", "user:2", "c")
    # From where it stood, and not from now.
    assert state(follow(target, "--from-now", "--position", position)) == {"user:2": "c"}
    later = state(
        follow(target, "--from-time", between, "--partitions", f"{partition_of(b'user:2')}")
    )
    assert later["user:2"] == "c"
    assert follow(target, "--from-time", "2999-01-01T00:00:00Z") == []


def test_a_count_ends_it_and_the_position_is_behind_what_was_printed(
    target: str, tmp_path: Path
) -> None:
    position = str(tmp_path / "position")
    keys = [f"k{i}" for i in range(10)]
    said(target, "load", "jsonl", "-", stdin=jsonl(*((key, "v") for key in keys)))

    def next_ones(count: int) -> list[dict[str, Any]]:
        printed = said(target, "follow", "-n", f"{count}", "--position", position)
        lines = [json.loads(line) for line in printed.splitlines()]
        return [line for line in lines if line["op"] != "marker"]

    seen = [*next_ones(3), *next_ones(1), *next_ones(6)]
    assert sorted(line["key"] for line in seen) == keys
    # Fewer than asked for are there.
    assert follow(target, "-n", "5", "--position", position) == []
    said(target, "set", "one more", "v")
    assert [line["key"] for line in next_ones(1)] == ["one more"]


def test_a_format_lays_changes_out(target: str) -> None:
    said(target, "set", "k", "v")
    said(target, "delete", "k")
    partition = partition_of(b"k")
    only = ("--until-now", "--partitions", f"{partition}")
    printed = said(target, "follow", *only, "-f", r"%p %s %o\t%k=%v\n")
    assert printed == f"{partition} 1 set\tk=v\n{partition} 2 delete\tk=\n"
    assert said(target, "follow", *only, "--format", "%v", "--keys-only") == ""
    assert said(target, "follow", *only, "-f", "jsonl") == said(target, "follow", *only)


@pytest.mark.parametrize(
    ("text", "laid_out"),
    [
        ("100%% of %k", b"100% of \xff"),
        (r"%p\0%s\\%o", b"5\x007\\set"),
        ("\u00e9%v", "\u00e9".encode() + b'v,"\n'),
        ("raw", b'v,"\n'),
        ("csv", b'5,7,set,\xff,"v,""\n"\n'),
    ],
)
def test_formats(text: str, laid_out: bytes) -> None:
    layout = layout_of(text)
    assert layout is not None
    assert layout(Change(5, 7, "set", b"\xff", b'v,"\n')) == laid_out


@pytest.mark.parametrize("text", ["%", "%x", "%\\", r"%\q", "%k%", "", "json", "CSV"])
def test_formats_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"in the format is not known|or have a %"):
        layout_of(text)


def test_changes_come_back_through_csv(target: str, tmp_path: Path) -> None:
    rows = {b"user:1": b'a,b\r\n"c"', b"\xff": b"\x00\xfe", b"empty": b"", b"gone": b"1"}
    with Client(target) as client:
        client.bucket().write_many([*rows.items()])
        client.bucket().delete(b"gone")
    printed = run_cat(target, "follow", "--until-now", "-f", "csv").stdout_bytes
    file = tmp_path / "changes.csv"
    file.write_bytes(printed)
    keys = tmp_path / "keys.csv"
    keys.write_text(
        said(target, "follow", "--until-now", "-f", "csv", "--keys-only", "--key-prefix", "e")
    )
    assert keys.read_text() == f"partition,seqno,op,key\n{partition_of(b'empty')},1,set,empty\n"
    # Without a value it is none, and not an empty one.
    assert run_cat(target, "load", "csv", str(keys)).exit_code == 2
    with Client(target) as client:
        client.bucket().write_many([(key, None) for key in rows])
    loaded = json.loads(said(target, "load", "csv", str(file), "--json"))
    # Of a key that was written twice, the stream may have the newest only.
    assert loaded["deletes"] == 1
    with Client(target) as client:
        assert client.bucket().get_many(rows) == {k: v for k, v in rows.items() if k != b"gone"}


def test_rows_of_tables_become_objects(target: str, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table, plain = tmp_path / "people.parquet", tmp_path / "plain.parquet"
    day = datetime(1906, 12, 9, tzinfo=UTC).date()
    parquet.write_table(pa.table({"id": [7], "name": ["Grace"], "born": [day]}), table)
    parquet.write_table(pa.table({"key": [b"\xff", b"k"], "value": [b"\xfe", None]}), plain)
    lines = '{"id": 8, "name": "Ada",  "pi": 3.140}\n'
    assert json.loads(said(target, "load", "parquet", str(plain), "--json"))["deletes"] == 1
    said(target, "load", "parquet", str(table), "--key-field", "id")
    said(target, "load", "jsonl", "-", "--key-field", "id", stdin=lines)
    said(target, "load", "csv", "-", "--key-field", "name", stdin='name,n\n"Lin, X",9\n')
    with Client(target) as client:
        assert client.bucket().get_many([b"7", b"8", b"Lin, X", b"\xff", b"k"]) == {
            b"7": b'{"id":7,"name":"Grace","born":"1906-12-09"}',
            # As it stands.
            b"8": lines.strip().encode(),
            b"Lin, X": b'{"name":"Lin, X","n":"9"}',
            b"\xff": b"\xfe",
        }


def test_members_of_a_group_go_on_where_the_group_stood(target: str) -> None:
    keys = [f"k{i}" for i in range(6)]
    said(target, "load", "jsonl", "-", stdin=jsonl(*((key, "v") for key in keys)))
    shared = ("follow", "--group", "g", "-f", r"%k\n", "-n")
    first = said(target, *shared, "2", "--member", "a").split()
    second = said(target, *shared, "4").split()
    assert (len(first), len(second), sorted(first + second)) == (2, 4, keys)


def test_a_bench_leaves_no_key_behind(target: str) -> None:
    told = json.loads(said(target, "bench", "--rows", "300", "--value-bytes", "50", "--json"))
    assert all(told[name] > 0 for name in ("rows_written", "rows_followed"))
    assert all(0 < told[name]["median"] <= told[name]["p99"] for name in ("set_ms", "get_ms"))
    assert "rows written a second" in said(target, "bench", "--rows", "1")
    assert said(target, "dump") == ""


def test_a_bench_that_ends_early_deletes_what_it_wrote(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write_many = Bucket.write_many

    def noted(self: Bucket, rows: Iterable[Any], *arguments: Any, **options: Any) -> Any:
        if len(written) == 2:
            written.append(0)
            raise UnavailableError("gone")
        taken = list(rows)
        written.append(len(taken))
        return write_many(self, taken, *arguments, **options)

    monkeypatch.setattr(Bucket, "write_many", noted)
    ended = run_cat(target, "bench", "--rows", "90000000", "--value-bytes", "20000")
    assert ended.exit_code == 5
    assert ended.stderr.endswith("error: gone\n")
    # Two portions and the one that failed; first those of single keys.
    assert written[3:] == [200, written[0], written[0], written[0]]
    assert said(target, "dump") == ""


def test_load_writes_what_stands_before_a_value_that_is_too_large(
    server_process: StartServer,
) -> None:
    target = server_process("--max-value-bytes", "1000").target
    rows = [(f"k{i}", "x" * (2000 if i in (200, 250) else 10)) for i in range(300)]
    ended = run_cat(target, "load", "jsonl", "-", stdin=jsonl(*rows))
    assert ended.exit_code == 2
    assert ended.stderr.endswith(
        "error: stdin: row 201: value of the key 'k200' is 2000 bytes; must be at most 1000 on this server"
        " (store it elsewhere, or in parts; --max-value-bytes sets the limit)\n"
    )
    with Client(target) as client:
        found = client.bucket().get_many([key.encode() for key, _ in rows])
    assert {b"k%d" % i for i in range(200)} <= found.keys()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_bench_that_is_ended_by_a_signal_deletes_what_it_wrote(target: str, number: int) -> None:
    # nohup may have started pytest.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        bench = popen_cat(target, "bench", "--rows", "90000000", "--value-bytes", "5000")
    finally:
        signal.signal(number, before)
    with Client(target) as client:
        bucket = client.bucket()
        wait_until(
            lambda: any(one.high_seqno for one in client.admin.partitions(bucket)),
            "nothing was written",
        )
    bench.send_signal(number)
    _, errors = bench.communicate(timeout=60)
    assert (bench.returncode, errors.split()[-1:]) == (130, [b"interrupted"])
    assert said(target, "dump") == ""


def test_a_link_to_a_position_file_stands_for_the_file(target: str, tmp_path: Path) -> None:
    said(target, "set", "a", "b")
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "position", tmp_path / "link"
    link.symlink_to(file)
    assert state(follow(target, "--position", str(link))) == {"a": "b"}
    said(target, "set", "a", "c")
    assert state(follow(target, "--from-start", "--position", str(link))) == {"a": "c"}
    assert link.is_symlink()
    assert follow(target, "--position", str(file)) == []
    # Under whichever name one uses it.
    said(target, "set", "a", "d")
    follower = popen_cat(target, "follow", "--position", str(file))
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["value"] == "d"
    refused = run_cat(target, "follow", "--until-now", "--position", str(link))
    assert refused.exit_code == 2
    assert "is used by another follower" in refused.stderr
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=60)
    assert follower.returncode == 130


def test_a_position_file_is_looked_at_first_and_used_by_one(target: str, tmp_path: Path) -> None:
    said(target, "set", "k", "v")
    file, damaged, other = (tmp_path / name for name in ("position", "damaged", "other"))
    damaged.write_text("nonsense")
    os.mkfifo(tmp_path / "fifo")
    with Client(target) as client:
        client.admin.create_bucket("another")
    assert follow(target, "--bucket", "another", "--position", str(other)) == []
    follower = popen_cat(target, "follow", "--position", str(file))
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["key"] == "k"
    for path, words in (
        (file, "is used by another follower"),
        (damaged, f"{damaged} is damaged"),
        (tmp_path / "none" / "position", "No such file or directory"),
        (tmp_path / "fifo", "is no plain file"),
        (other, "'another'; must be 'default'"),
    ):
        refused = run_cat(target, "follow", "-f", "csv", "--position", str(path))
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=60)
    assert follower.returncode == 130
    # One that ended, also in a hurry, holds nobody up.
    (tmp_path / "position.lock").touch()
    assert follow(target, "--position", str(file)) == []
    assert not (tmp_path / "position.lock").exists()
