"""What a user may do wrong or meet at a shell: one line that says it, the right exit status, and nothing half done."""

import errno
import glob
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from click.testing import CliRunner
from obstore.store import MemoryStore

from tests.spark.restoring import Source, upr_backup
from upr_backup import export as export_module
from upr_backup import rows as point_module
from upr_backup.cli import entry
from upr_backup.cli.commands import main
from upr_backup.cli.shared import restore_point
from upr_backup.errors import StorageNotFoundError, StorageUnreachableError, is_damage
from upr_backup.export import _delta_failure
from upr_backup.repository import LocalStorage, open_storage
from upr_backup.repository.object_store import ObjectStorage, interruptible
from upr_backup.rows import in_order, takeable
from upr_cli_kit import exit_codes
from upr_cli_kit.output import Progress, note
from upr_client import Client
from upr_protocol.errors import InvalidArgumentError, UprError


def unlistable(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """Have the operating system refuse to list a folder."""
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path) == folder:
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_folder_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.put_if_absent("chain/0000000001.json", b"")
    with monkeypatch.context() as patched:
        unlistable(patched, tmp_path / "chain", errno.EACCES)
        for prefix in ("chain/", ""):
            with pytest.raises(PermissionError, match="chain"):
                storage.names(prefix)
    with monkeypatch.context() as patched:
        # Another process removed it after it was found.
        unlistable(patched, tmp_path / "chain", errno.ENOENT)
        assert storage.names("") == []
    assert storage.names("") == ["chain/0000000001.json"]


def test_a_chain_that_cannot_be_listed_does_not_count_as_none(
    made: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlistable(monkeypatch, made.repository / "chain", errno.EACCES)
    for arguments in (["list"], ["verify"], ["backup"]):
        done = upr_backup(made.repository, *arguments)
        assert (done.exit_code, "chain: Permission denied" in done.stderr) == (2, True), arguments


READ_ERRORS = [
    (errno.EACCES, 2),
    (errno.EMFILE, 2),
    (errno.ETIMEDOUT, 6),
    (errno.ENOTCONN, 5),
    (errno.EIO, 11),
]


@pytest.mark.parametrize(("number", "code"), READ_ERRORS)
def test_what_cannot_be_reached_is_not_damaged(
    made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    real = LocalStorage.open
    late = [False]

    def opened(self: LocalStorage, name: str) -> Any:
        calls.append(name)
        # Looking for damage comes first, reading the rows later.
        if not late[0] or calls.count(name) > 1:
            raise OSError(number, os.strerror(number), str(self.root / name))
        return real(self, name)

    monkeypatch.setattr(LocalStorage, "open", opened)
    export = ["export", "--format", "parquet", "--to", str(tmp_path / "table")]
    for late[0] in (False, True):
        for arguments in (["verify", "--full"], export):
            calls: list[str] = []
            done = upr_backup(made.repository, *arguments)
            assert done.exit_code == code, (arguments, done.stderr)
            assert os.strerror(number) in done.stderr
            assert ("damage: " in done.stderr) == (code == 11 and arguments != export)
    assert list(tmp_path.iterdir()) == []


def test_no_memory_is_no_damage() -> None:
    assert not is_damage(pa.ArrowMemoryError("malloc of size 1 failed"))
    assert is_damage(pa.ArrowInvalid("no Parquet"))
    assert is_damage(OSError("the bytes make no sense"))


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    sink = LocalStorage(tmp_path).create("data/1/a")
    sink.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        sink._file = cast(Any, full)
        with pytest.raises(OSError, match="data/1/a") as refused:
            sink.write(bytes(2**20))
    assert refused.value.errno == errno.ENOSPC


def test_an_empty_argument_is_refused(made: Source) -> None:
    target = made.server.target
    with pytest.raises(InvalidArgumentError, match="is empty"):
        open_storage("")
    with Client(target) as client:
        known = [one.version for one in client.admin.buckets()]
        for arguments in (
            ["", "init", "--target", target],
            ["", "list"],
            [str(made.repository), "export", "--format", "parquet", "--to", ""],
            [str(made.repository), "export", "--format", "delta", "--to", ""],
            [str(made.repository), "restore", "--target", target, "--bucket", ""],
            [str(made.repository), "restore", "--target", ""],
            [str(made.repository), "restore", "--target", target, "--at", ""],
            [str(made.repository), "restore", "--target", target, "--partitions", ""],
        ):
            done = upr_backup(arguments[0], *arguments[1:])
            assert done.exit_code == 2, (arguments, done.stderr)
        assert [one.version for one in client.admin.buckets()] == known


def test_a_time_outside_of_the_calendar_is_refused(made: Source) -> None:
    for text in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "999999999d ago"):
        done = upr_backup(made.repository, "export", "--format=parquet", "--to=x", "--at", text)
        assert (done.exit_code, "nor a time" in done.stderr) == (2, True), done.stderr
    assert restore_point("1970-01-01T01:00:00+01:00") == (0,)


def test_an_interrupt_while_it_loads_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == exit_codes.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_said_does_not_stand_in_the_line_of_the_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = _Terminal()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr("upr_cli_kit.output._TERMINAL_SECONDS", 0.0)
    progress = Progress()
    progress.show("1 of 2 files read")
    note("damage: a file is missing")
    progress.show("2 of 2 files read")
    progress.close()
    progress.close()
    assert said.getvalue() == (
        "\r1 of 2 files read\x1b[K\ndamage: a file is missing\n\r2 of 2 files read\x1b[K\n"
    )


# Exports.


def export(made: Source, to: str) -> Any:
    """Run the command."""
    return upr_backup(made.repository, "export", "--format", "parquet", "--to", to)


def test_a_place_that_cannot_be_replaced_is_refused(
    made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = export(made, str(tmp_path / "loop"))
    assert (done.exit_code, "already" in done.stderr) == (4, True), done.stderr
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    done = export(made, str(tmp_path / "disk"))
    assert (done.exit_code, "is where a disk is mounted" in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "loop"]


def test_only_what_is_left_of_the_same_place_is_removed(made: Source, tmp_path: Path) -> None:
    others = tmp_path / ".mine.0000.unfinished"
    own = tmp_path / ".*.0000.unfinished"
    for litter in (others, own):
        litter.mkdir()
        os.utime(litter, (0, 0))
    assert glob.escape("*") == "[*]"
    assert export(made, str(tmp_path / "*")).exit_code == 0
    assert (others.exists(), own.exists()) == (True, False)


def test_of_two_exports_that_begin_at_once_one_is_refused(
    made: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MemoryStore()
    store = ObjectStorage("memory", lambda _: opened)
    real = ObjectStorage.names
    calls: list[str] = []

    def names(self: ObjectStorage, prefix: str) -> list[str]:
        found = real(self, prefix)
        calls.append(prefix)
        if len(calls) == 1:
            self.put_if_absent("_unfinished-of-another", b"")
            self.put_if_absent("part-00000.parquet", b"of another")
        return found

    monkeypatch.setattr(ObjectStorage, "names", names)
    monkeypatch.setattr(export_module, "open_storage", lambda _: store)
    done = export(made, "ignored")
    assert (done.exit_code, "another export" in done.stderr) == (2, True), done.stderr
    assert store.names("") == ["_unfinished-of-another", "part-00000.parquet"]
    assert store.read("part-00000.parquet") == b"of another"


GET = "Generic S3 error \x1b[31m↳\x1b[0m Error performing GET http://127.0.0.1:1/b/x in 1ms "
CODE = "- Server returned non-2xx status code \x1b[31m↳\x1b[0m %s \x1b[31m↳\x1b[0m <Error><Code>%s</Code>"
DELTA: list[tuple[str, str, Callable[[Exception], bool], str]] = [
    (
        "s3://b/x",
        GET + CODE % ("403 Forbidden", "AccessDenied"),
        lambda error: isinstance(error, PermissionError),
        "403 AccessDenied",
    ),
    (
        "s3://b/x",
        GET + CODE % ("404 Not Found", "NoSuchBucket"),
        lambda error: isinstance(error, StorageNotFoundError),
        "no bucket 'b'",
    ),
    (
        "s3://b/x",
        GET + "- HTTP error \x1b[31m↳\x1b[0m error sending request",
        lambda error: isinstance(error, StorageUnreachableError),
        "cannot be reached",
    ),
    (
        "s3://b/x",
        GET + "- HTTP error \x1b[31m↳\x1b[0m operation timed out",
        lambda error: isinstance(error, UprError) and exit_codes.exit_code_of(error) == 6,
        "did not answer in time",
    ),
    (
        "s3://b/x",
        "Generic error \x1b[31m↳\x1b[0m strange",
        lambda error: isinstance(error, UprError) and exit_codes.exit_code_of(error) == 2,
        "Generic error: strange",
    ),
    (
        "/a/table",
        "HTTP error",
        lambda error: isinstance(error, UprError) and exit_codes.exit_code_of(error) == 2,
        "table /a/table cannot be written",
    ),
]


@pytest.mark.parametrize(("to", "text", "right", "words"), DELTA)
def test_what_deltalake_says_is_understood(
    to: str, text: str, right: Callable[[Exception], bool], words: str
) -> None:
    error = _delta_failure(OSError(text), to)
    assert right(error), repr(error)
    assert words in str(error)
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("offsets", [10, 2**31 - 1])
def test_rows_are_taken_of_tables_beyond_the_reach_of_offsets(
    monkeypatch: pytest.MonkeyPatch, offsets: int
) -> None:
    monkeypatch.setattr("upr_backup.rows._OFFSETS_BYTES", offsets)
    monkeypatch.setattr("upr_backup.rows._TAKEN_BYTES", 20)
    values = [None, *(b"%07d" % n for n in range(9)), b"x" * 50, b"y"]
    columns = {"value": pa.chunked_array([values[:4], values[4:]], pa.binary())}
    table = pa.table({**columns, "further": pa.nulls(len(values), pa.binary())})
    assert takeable(table).schema.field("value").type == (
        pa.large_binary() if offsets == 10 else pa.binary()
    )
    order = pa.array(range(len(values))[::-1], pa.uint64())
    parts = list(in_order(table, order, 5))
    assert [part.num_rows for part in parts] == [1, 1, 2, 2, 2, 2, 2]
    assert pa.concat_tables(parts).column("value").to_pylist() == values[::-1]
    assert {part.schema for part in parts} == {table.schema}
    by_rows = list(in_order(table.slice(0, 3), pa.array([2, 1, 0], pa.uint64()), 1))
    assert [part.num_rows for part in by_rows] == [1, 1, 1]
    assert list(in_order(table.slice(0, 0), order.slice(0, 0), 1)) == []


def test_an_interrupted_delta_export_ends_and_commits_nothing(
    made: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = export_module.Export._shaped
    calls: list[int] = []
    halted = threading.Event()

    def shaped(self: Any, table: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert halted.wait(20)
        return real(self, table)

    def watched(call: Callable[[], None], halt: Callable[[], None]) -> None:
        def told() -> None:
            halt()
            halted.set()

        interruptible(call, told)

    monkeypatch.setattr(export_module.Export, "_shaped", shaped)
    monkeypatch.setattr(export_module, "interruptible", watched)
    small = point_module.grouped
    monkeypatch.setattr(point_module, "grouped", lambda sizes, _: small(sizes, 10_000))
    to = tmp_path / "table"
    arguments = [str(made.repository), "export", "--format", "delta", "--to", str(to)]
    done = CliRunner().invoke(main, arguments, prog_name="upr-backup")
    assert (done.exit_code, done.stderr.split()) == (130, ["interrupted"])
    assert len(calls) == 2
    assert not (to / "_delta_log").exists() or list((to / "_delta_log").iterdir()) == []
