"""Restoring: killed and gone on with, refused where the bucket holds anything else, and compared by content."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from tests.harness import RunningServer
from tests.spark.restoring import Source, State, content, document, small_groups, upr_backup
from upr_backup import restore as restore_module
from upr_backup.cli import retrieval as command
from upr_backup.repository import LocalStorage
from upr_backup.restore import Journal, Restore
from upr_backup.rows import differences
from upr_client import Client
from upr_client.arrow import blocks as real_blocks
from upr_client.types import Bucket
from upr_protocol.partitioning import partition_of

Start = Callable[..., RunningServer]


@pytest.fixture(autouse=True)
def without_journals(made: Source) -> Iterator[None]:
    """Leave nothing to other tests of what one broke off."""
    yield
    shutil.rmtree(made.repository / "journal", ignore_errors=True)


def restore(made: Source, target: str, *options: str) -> Any:
    """Run the command, with what it says as JSON."""
    return upr_backup(made.repository, "restore", "--target", target, "--json", *options)


def journal_files(made: Source) -> list[Path]:
    return [path for path in (made.repository / "journal").rglob("*") if path.is_file()]


class Broken(BaseException):
    """The restoring process is gone."""


def broken_off(made: Source, target: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Restore until three groups are written and recorded, and half of a fourth is written."""
    real = Bucket._write_blocks
    calls = []

    def write_blocks(self: Bucket, blocks: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            block = next(iter(blocks))
            real(self, [block], *arguments)
            raise Broken
        return real(self, blocks, *arguments)

    with monkeypatch.context() as patched:
        small_groups(patched, 40_000)
        patched.setattr(
            restore_module, "blocks", lambda keys, values: real_blocks(keys, values, block_rows=100)
        )
        patched.setattr(Bucket, "_write_blocks", write_blocks)
        with pytest.raises(Broken):
            upr_backup_raising(made, target, *options)
    assert len(journal_files(made)) == 4


def upr_backup_raising(made: Source, target: str, *options: str) -> None:
    """Run the command as Python runs it; what is no error of its own comes through."""
    from upr_backup.cli.commands import main

    main.main(
        [str(made.repository), "restore", "--target", target, *options], standalone_mode=False
    )


KILLED = """
import os, signal
from upr_backup import restore as journal, rows as point, restore
grouped = point.grouped
point.grouped = lambda sizes, _: grouped(sizes, 40_000)
calls = []
def killed_at(owner, name, call):
    real = getattr(owner, name)
    def patched(self, *arguments, **named):
        calls.append(1)
        if len(calls) < call:
            return real(self, *arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, patched)
%s
from upr_backup.cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("where", "rewritten"),
    [
        ("killed_at(journal.Journal, 'record', 3)", True),
        ("killed_at(restore.Restore, '_difference', 2)", False),
    ],
    ids=["before a record", "comparing"],
)
def test_a_killed_restore_is_gone_on_with(
    made: Source, target: str, where: str, rewritten: bool
) -> None:
    arguments = [str(made.repository), "restore", "--target", target]
    killed = subprocess.run([sys.executable, "-c", KILLED % where, *arguments], timeout=100)
    assert killed.returncode == -signal.SIGKILL
    assert journal_files(made)
    # Another restore into the same bucket is refused: it is not that one that was begun.
    for option in ((), ("--dry-run",)):
        assert restore(made, target, "--at", "1", *option).exit_code == 4
    looked = document(restore(made, target, "--dry-run"))
    assert (looked["resumed"], looked["keys"]) == (True, len(made.points[1]))
    done = restore(made, target)
    assert done.exit_code == 0, done.stderr
    assert "going on with an interrupted restore" in done.stderr
    told = document(done)
    assert (told["resumed"], told["verified"]) == (True, "equal")
    assert told["keys"] == len(made.points[1])
    assert content(target) == made.points[1]
    with Client(target) as client:
        written = sum(info.high_seqno for info in client.admin.partitions("default"))
    assert (written > len(made.points[1])) == rewritten
    assert journal_files(made) == []
    again = restore(made, target)
    assert (again.exit_code, "holds data" in again.stderr) == (4, True)


@pytest.mark.long
def test_what_somebody_else_wrote_is_not_overwritten(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is refused unless all it has was written by the interrupted run, and mended it is accepted."""
    broken_off(made, target, monkeypatch)
    state = made.points[1]
    with Client(target) as client:
        bucket = client.bucket()
        used = {info.partition for info in client.admin.partitions(bucket) if info.high_seqno}
        there = content(target)
        done_key = sorted(key for key in there if partition_of(key) == min(used))[0]
        cut_key = sorted(key for key in there if partition_of(key) == max(used))[0]
        free = next(
            b"foreign:%d" % n for n in range(10_000) if partition_of(b"foreign:%d" % n) not in used
        )
        for key in (done_key, cut_key):
            bucket.set(key, b"of somebody else")
            done = restore(made, target)
            assert (done.exit_code, "did not write" in done.stderr) == (4, True), key
            bucket.delete(key)
            assert restore(made, target).exit_code == 4
            bucket.set(key, state[key])
        bucket.set(free, b"")
        assert restore(made, target).exit_code == 4
        assert bucket.get(free) == b""
        bucket.delete(free)
        assert restore(made, target).exit_code == 4
        assert content(target) == there


@pytest.mark.long
def test_the_same_values_written_by_somebody_else_do_no_harm(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(made, target, monkeypatch)
    with Client(target) as client:
        client.bucket().write_many(list(content(target).items()))
    assert restore(made, target).exit_code == 0
    assert content(target) == made.points[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({b"key:0": b"of somebody else"}, "1 with another value"),
        ({b"key:0": None}, "1 missing"),
        ({b"foreign": b""}, "1 that should not be there"),
    ],
)
def test_what_changes_before_the_comparison_is_found(
    made: Source,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[bytes, bytes | None],
    words: str,
) -> None:
    small_groups(monkeypatch, 40_000)
    real = Restore._compare

    def disturbed(self: Restore, journal: Journal) -> None:
        with Client(target) as client:
            client.bucket().write_many(list(change.items()))
        real(self, journal)

    monkeypatch.setattr(Restore, "_compare", disturbed)
    done = restore(made, target)
    assert done.exit_code == 11
    assert words in done.stderr
    assert next(iter(change)).decode() in done.stderr
    # It is over: nothing goes on with what was found wrong.
    assert journal_files(made) == []
    assert restore(made, target).exit_code == 4


def test_partitions_that_the_backup_has_nothing_of_are_looked_at(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Restore._compare
    foreign = next(b"f%d" % n for n in range(10_000) if partition_of(b"f%d" % n) > 9)

    def disturbed(self: Restore, journal: Journal) -> None:
        with Client(target) as client:
            client.bucket().set(foreign, b"")
        real(self, journal)

    with monkeypatch.context() as patched:
        patched.setattr(Restore, "_compare", disturbed)
        done = restore(made, target, "--partitions", "0-9")
    assert (done.exit_code, "that should not be there" in done.stderr) == (11, True)
    with Client(target) as client:
        client.admin.create_bucket("other")
    done = restore(
        made, target, "--bucket", "other", "--partitions", "0-9", "--key-prefix", "key:1"
    )
    assert document(done)["verified"] == "equal"
    assert content(target, "other") == {
        key: value
        for key, value in made.points[1].items()
        if partition_of(key) < 10 and key.startswith(b"key:1")
    }


@pytest.mark.long
def test_into_a_bucket_that_holds_data(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: State = {b"key:%d" % n: b"before" for n in range(3000)} | {b"mine": b"stays"}
    with Client(target) as client:
        client.bucket().write_many(list(before.items()))
    broken_off(made, target, monkeypatch, "--into-non-empty")
    assert restore(made, target).exit_code == 4
    done = restore(made, target, "--into-non-empty")
    assert done.exit_code == 0, done.stderr
    told = document(done)
    assert (told["resumed"], told["verified"]) == (True, "contained")
    assert (told["keys"], told["deletes"]) == (len(made.points[1]), 429)
    expected = made.points[1] | {b"mine": b"stays"}
    assert content(target) == expected
    real = Restore._compare
    for key, value in ((b"key:1", b"back again"), (b"mine", b"newer")):

        def disturbed(self: Restore, journal: Journal, row: Any = (key, value)) -> None:
            with Client(target) as client:
                client.bucket().set(*row)
            real(self, journal)

        with monkeypatch.context() as patched:
            patched.setattr(Restore, "_compare", disturbed)
            done = restore(made, target, "--into-non-empty")
        assert done.exit_code == (0 if key == b"mine" else 11), key
    # What was found wrong does not keep the next one from writing it all again.
    assert document(restore(made, target, "--into-non-empty"))["resumed"] is False
    assert content(target) == expected | {b"mine": b"newer"}


def test_a_server_that_is_killed_meanwhile_is_waited_for(
    made: Source, server_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_groups(monkeypatch, 40_000)
    server = server_process()
    starting: list[threading.Thread] = []

    def killing(name: str, call: int) -> None:
        real = getattr(Restore, name)
        calls = []

        def patched(self: Restore, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                server.kill()
                starting.append(threading.Thread(target=server.start))
                starting[-1].start()
            return real(self, *arguments)

        monkeypatch.setattr(Restore, name, patched)

    killing("_write_group", 3)
    killing("_difference", 2)
    done = restore(made, server.target)
    for thread in starting:
        thread.join()
    assert len(starting) == 2
    assert done.exit_code == 0, done.stderr
    assert content(server.target) == made.points[1]


def test_a_server_that_stays_away_is_one_line(
    made: Source, server_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_process()
    real = Restore._write_group
    calls = []

    def stopped(self: Restore, group: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            server.kill()
        return real(self, group)

    with monkeypatch.context() as patched:
        small_groups(patched, 40_000)
        patched.setattr(Restore, "_write_group", stopped)
        patched.setattr(command, "open_client", lambda to: Client(to, retry_seconds=0.2))
        done = restore(made, server.target)
    assert done.exit_code in (5, 6), done.stderr
    server.start()
    done = restore(made, server.target)
    assert done.exit_code == 0, done.stderr
    assert document(done)["resumed"] is True
    assert content(server.target) == made.points[1]


def test_a_repository_that_cannot_be_written_is_restored(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> bool:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(LocalStorage, "put_if_absent", refused)
    done = restore(made, target, "--no-verify")
    assert done.exit_code == 0, done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert "takes no journal (Permission denied)" in warning
    assert document(done)["verified"] == "not verified"
    assert content(target) == made.points[1]
    assert journal_files(made) == []


def test_where_nothing_may_be_deleted_a_restore_ends_all_the_same(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(LocalStorage, "delete", refused)
    assert restore(made, target).exit_code == 0
    assert any(path.name == "plan.json" for path in journal_files(made))
    again = restore(made, target)
    assert (again.exit_code, "holds data" in again.stderr) == (4, True)
    for _ in range(2):
        done = restore(made, target, "--into-non-empty")
        assert document(done)["resumed"] is False


def test_a_merge_meanwhile_changes_nothing(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = Source(made.server, tmp_path / "copy", points=made.points)
    shutil.copytree(made.repository, copy.repository)
    broken_off(copy, target, monkeypatch)
    merged = upr_backup(copy.repository, "merge", "--to", "2")
    assert merged.exit_code == 0, merged.stderr
    done = restore(copy, target)
    assert done.exit_code == 0, done.stderr
    assert document(done)["resumed"] is True
    assert content(target) == made.points[1]


def test_a_damaged_journal_is_not_believed(
    made: Source, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(made, target, monkeypatch)
    plan, *groups = sorted(journal_files(made), key=lambda path: path.name != "plan.json")
    for path in groups:
        path.write_bytes(path.read_bytes()[:-3])
    done = restore(made, target)
    assert done.exit_code == 0, done.stderr
    assert "0 of " in done.stderr
    assert content(target) == made.points[1]
    assert not plan.exists()


def test_differences_are_those_of_dictionaries() -> None:
    random = Random(7)
    found = 0
    for _ in range(300):
        keys = [b"k%d" % n for n in range(random.randrange(9))]
        expected = {key: b"v%d" % random.randrange(2) for key in keys if random.random() < 0.8}
        actual = {key: b"v%d" % random.randrange(2) for key in keys if random.random() < 0.8}
        told = differences(_table(expected, random), _table(actual, random))
        assert told[:3] == (
            len(set(expected) - set(actual)),
            sum(expected[key] != actual[key] for key in set(expected) & set(actual)),
            len(set(actual) - set(expected)),
        )
        assert bool(told) == (expected != actual)
        found += bool(told)
    assert 0 < found < 300


def _table(of: State, random: Random) -> Any:
    """Return a dictionary as a table of shuffled rows, in chunks."""
    rows = random.sample(sorted(of.items()), len(of))
    at = random.randint(0, len(rows))
    parts = [rows[:at], rows[at:]]
    columns = {
        name: pa.chunked_array([[row[index] for row in part] for part in parts], pa.binary())
        for index, name in enumerate(("key", "value"))
    }
    columns["further"] = pa.nulls(len(rows), pa.binary())
    return pa.table(columns)
