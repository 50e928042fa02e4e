"""Options, output and exit statuses that the commands share."""

import io
import subprocess
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from upr.cli import entry
from upr_cli_kit import exit_codes
from upr_cli_kit.options import split_address
from upr_cli_kit.output import Group, Progress, columns, verbose_option
from upr_protocol.errors import (
    BucketNotFoundError,
    DataDamagedError,
    DataDirectoryError,
    InvalidArgumentError,
    NoRoomError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.limits import parse_partitions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", [5]),
        ("0-3,512", [0, 1, 2, 3, 512]),
        ("7, 3,3,2-4", [2, 3, 4, 7]),
        ("1023-1023", [1023]),
    ],
)
def test_partitions_are_numbers_and_ranges(text: str, expected: list[int]) -> None:
    assert parse_partitions(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1024", "partition is 1024, it must be from 0 to 1023"),
        ("0-5000", "partition is 5000"),
        ("5-3", "the range 5-3 ends before it begins"),
        ("", "'' is not a partition"),
        ("1,,2", "'' is not a partition"),
        ("a", "'a' is not a partition"),
        ("-1", "'-1' is not a partition"),
        ("1-2-3", "'1-2-3' is not a partition"),
        ("²", "is not a partition"),
    ],
)
def test_what_is_no_partition_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        parse_partitions(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:7711", ("127.0.0.1", 7711)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "host:a", "::1:1", "host:65536", "h:-1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        split_address(text)


def test_columns_are_aligned_and_never_cut() -> None:
    text = columns(("n", "id"), [(5, "x" * 300), (1023, "y")])
    assert text.splitlines() == ["   n  id", f"   5  {'x' * 300}", "1023  y"]
    assert columns(("a", "b"), []) == "a  b"
    assert columns(("lag", "b"), [(-7, "-"), ("-", "y")]) == "lag  b\n -7  -\n  -  y"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def at_times(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Have the commands' kit look at its clock at these times."""
    clock = SimpleNamespace(monotonic=iter(times).__next__)
    monkeypatch.setattr("upr_cli_kit.output.time", clock)


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    at_times(monkeypatch, 0.0, 0.05, 0.2)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress("commits", 4)
    progress.update(1)
    progress.update(2, "9 rows")
    progress.close()
    assert stream.getvalue() == f"\r[{'#' * 15}{'.' * 15}] 2/4 commits, 9 rows\x1b[K\n"


def test_progress_is_a_line_every_few_seconds_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    at_times(monkeypatch, 0.0, 1.0, 5.5, 6.0)
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress("rows")
    for done in (10, 20, 30):
        progress.update(done)
    progress.close()
    assert stream.getvalue() == "20 rows\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgumentError("x"), 2),
        (DataDirectoryError("x"), 2),
        (DataDamagedError("x"), 1),
        (BucketNotFoundError("x"), 3),
        (NoRoomError("x"), 4),
        (UprError("x"), 4),
        (UnavailableError("UNAVAILABLE: x"), 5),
        (UnavailableError("DEADLINE_EXCEEDED: x"), 6),
        (UnknownOutcomeError("x"), 6),
    ],
)
def test_each_error_has_its_status(error: UprError, code: int) -> None:
    assert exit_codes.exit_code_of(error) == code


def run_failing(error: BaseException, *arguments: str) -> tuple[int, str]:
    """Return status and stderr of a command that raises the error."""

    @click.group(cls=Group)
    def group() -> None:
        pass

    @group.command()
    @verbose_option
    def fail() -> None:
        raise error

    result = CliRunner().invoke(group, ["fail", *arguments])
    assert not result.stdout
    return result.exit_code, result.stderr


def test_an_error_is_one_line() -> None:
    error = NoRoomError("no room:\n the disk is full", hint="free some")
    assert run_failing(error) == (4, "error: no room: the disk is full (free some)\n")
    assert run_failing(PermissionError(13, "Permission denied", "/x"))[1] == (
        "error: /x: Permission denied\n"
    )
    code, text = run_failing(KeyError("a bug"))
    assert code == 1
    assert text.startswith("error: internal error: KeyError")
    assert text.count("\n") == 1


def test_verbose_adds_the_trace() -> None:
    code, text = run_failing(NoRoomError("no room"), "--verbose")
    assert code == 4
    assert text.startswith("Traceback")
    assert text.endswith("error: no room\n")


def test_interrupted_is_130_and_a_closed_pipe_is_fine() -> None:
    code, text = run_failing(KeyboardInterrupt())
    assert code == 130
    assert text.strip() == "interrupted"
    assert run_failing(BrokenPipeError()) == (0, "")


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(entry.EXTRAS, "server", ("server", ("click", "no_such_module")))
    with pytest.raises(SystemExit) as left:
        entry.server()
    assert left.value.code == 2
    text = capsys.readouterr().err
    assert "no_such_module" in text
    assert "pip install 'upr-stream[server]'" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("command", ["server", "admin", "cat"])
def test_help_does_not_import_grpc(command: str) -> None:
    line = [sys.executable, "-X", "importtime", "-m", "upr.cli", command, "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "Usage: upr-" in done.stdout
    imported = {words.rpartition("|")[2].strip() for words in done.stderr.splitlines()}
    assert imported & {"click", "grpc", "numpy", "lmdb"} == {"click"}


def test_an_unknown_command_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "upr.cli", "dance"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: 'dance' is not one of server, admin, cat\n"
