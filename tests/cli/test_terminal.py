"""What the commands do on a terminal, with a closed stdout, and again and again: ``top`` and ``--watch``."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS
from upr.cli.admin import main
from upr.service.access.identities import read_identities
from upr_cli_kit.output import Command
from upr_cli_kit.screen import fitting, watch_option
from upr_client import Client, MemoryPositions
from upr_protocol.errors import InvalidArgumentError, UnavailableError

LEFT = b"\x1b[?1049l"


class Terminal:
    """A program on a terminal of its own.

    Args:
        arguments: of ``upr-admin``.
        lines, columns: the terminal's size.
    """

    def __init__(self, *arguments: str, lines: int, columns: int) -> None:
        self._screen, self._program = pty.openpty()
        self.resize(lines, columns)
        self._before = termios.tcgetattr(self._program)
        self._shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "upr.cli", "admin", *arguments],
            stdin=self._program,
            stdout=self._program,
            stderr=self._program,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._program, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def wait_for(self, pattern: bytes) -> None:
        """Wait until something is shown that was not shown before."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := re.search(pattern, self._shown, re.DOTALL)):
            assert time.monotonic() < deadline, self._shown[-2000:]
            if select.select([self._screen], [], [], 1)[0]:
                self._shown += os.read(self._screen, 65536)
        self._shown = self._shown[found.end() :]

    def press(self, keys: bytes) -> None:
        os.write(self._screen, keys)

    def end(self) -> int:
        """Wait for the end, with the terminal as it was before; return the status."""
        self.wait_for(re.escape(LEFT))
        status = self.process.wait(WAIT_SECONDS)
        assert termios.tcgetattr(self._program) == self._before
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)
        os.close(self._program)


def test_top_shows_writes_and_consumers_as_they_go(target: str) -> None:
    with Client(target) as client:
        bucket = client.bucket()
        bucket.write_many([(b"key %d" % i, b"v") for i in range(500)])
        with bucket.changes(resume=MemoryPositions(), until="now", consumer="indexer") as changes:
            assert sum(batch.rows for batch in changes.batches()) == 500
        terminal = Terminal("top", "--every", "0.3", "--target", target, lines=14, columns=50)
        try:
            terminal.wait_for(rb"upr-admin top.*server \d")
            terminal.wait_for(rb"default +- +500 ")
            terminal.wait_for(rb"default +0 +500 ")
            bucket.write_many([(b"key %d" % i, b"w") for i in range(300)])
            terminal.wait_for(rb"default +[1-9]\d* +800 ")
            terminal.wait_for(rb"indexer +300 ")
            # What does not fit is counted, and the size may change while it runs.
            terminal.resize(5, 50)
            terminal.process.send_signal(signal.SIGWINCH)
            terminal.wait_for(rb"\.\.\. and \d+ lines more\x1b\[K\x1b\[J")
            terminal.press(b"xq")
            assert terminal.end() == 0
        finally:
            terminal.close()


def test_a_listing_is_watched_until_ctrl_c_also_while_the_server_is_away(
    server_process: StartServer,
) -> None:
    server = server_process()
    terminal = Terminal("bucket", "--watch", "0.2", "--target", server.target, lines=24, columns=80)
    try:
        terminal.wait_for(rb"upr-admin bucket list, \d\d:\d\d:\d\d \(q ends it\)")
        server.kill()
        terminal.wait_for(rb"error: .*default ")
        server.start()
        terminal.wait_for(rb"ends it\)\x1b\[K\r\n\x1b\[K\r\nname .*default ")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_without_a_terminal_a_listing_is_printed_again_and_top_is_refused(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("upr_cli_kit.screen.time.sleep", sleep)
    there = ("--target", target)
    done = CliRunner().invoke(main, ["bucket", "--watch", "1.5", *there])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.count("name     version") == 3
    assert pauses == [1.5] * 3
    refused = CliRunner().invoke(main, ["top", *there])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "'upr-admin status --watch 1'" in refused.stderr


def test_nothing_that_is_shown_moves_the_cursor() -> None:
    wide = 80
    assert fitting("a\x1b[2J\tb\nc\n", os.terminal_size((wide, 2))) == ["a?[2J?b", "c"]
    three = os.terminal_size((wide, 3))
    assert fitting("1\n2\n3\n4", three) == ["1", "2", "... and 2 lines more"]
    assert fitting("1\n2\n3", os.terminal_size((wide, 1))) == ["... and 3 lines more"]


def test_a_number_that_does_not_fit_is_seen_to_be_cut() -> None:
    assert fitting("lag 12345\nlag 123", os.terminal_size((7, 9))) == ["lag 12>", "lag 123"]
    # A terminal that does not tell its size has 24 lines of 80.
    shown = fitting("\n".join(["x" * 81] * 25), os.terminal_size((0, 0)))
    assert shown == ["x" * 79 + ">"] * 23 + ["... and 2 lines more"]


def test_watching_without_a_terminal_goes_on_after_what_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [None, UnavailableError("away"), None, InvalidArgumentError("wrong")]

    @click.command("look", cls=Command)
    @watch_option
    def look() -> None:
        if (error := errors.pop(0)) is not None:
            raise error
        click.echo("seen")

    monkeypatch.setattr("upr_cli_kit.screen.time.sleep", lambda _: None)
    done = CliRunner().invoke(look, ["--watch", "1"])
    assert (done.exit_code, done.stdout.split()) == (2, ["seen", "seen"])
    assert done.stderr == "error: away\nerror: wrong\n"
    # The first one is not waited for.
    errors[:] = [UnavailableError("away")]
    assert CliRunner().invoke(look, ["--watch", "1"]).exit_code == 5


@pytest.mark.long
def test_closed_streams_and_a_full_disk_are_a_line(target: str, tmp_path: Path) -> None:
    closed, full = "stdin or stdout is closed", "stdout: No space left on device"
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Client(target) as client:
        client.bucket().set(b"key", b"value")
        for command, words in (
            ("cat get key >&-", closed),
            ("cat get key > /dev/full", full),
            ("admin --help > /dev/full", full),
            ("server --version > /dev/full", full),
            ("server --help >&-", closed),
            ("cat set key - <&-", closed),
            ("admin token add a --role read --tokens identities --json >&-", closed),
        ):
            line = f"{sys.executable} -m upr.cli {command}"
            done = subprocess.run(
                ["bash", "-c", line],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env={**buffered, "UPR_TARGET": target},
            )
            assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {words}\n")
        assert client.bucket().get(b"key") == b"value"
    # An identity whose token nobody has seen is not there.
    assert read_identities(tmp_path / "identities").all == []


@pytest.mark.parametrize("line", ["server --help", "admin --version"])
def test_who_closes_the_pipe_of_a_help_has_seen_enough(line: str) -> None:
    # The other end is gone before anything is written.
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "upr.cli", *line.split()], stdout=writes, stderr=subprocess.PIPE
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")


ENDING = """
import atexit, sys
from upr_cli_kit.entry import run

class Kept:
    def __del__(self):
        open("taken apart", "w")

class Main:
    def main(self, prog_name):
        sys.modules["kept"].kept = Kept()
        atexit.register(open, "done", "w")
        sys.stdout.write("said")
        sys.exit(int(sys.argv[1]))

module = type(sys)("kept")
module.main = Main()
sys.modules["kept"] = module
run("upr-x", "x", [], "kept")
"""


@pytest.mark.parametrize("status", [0, 4])
def test_a_command_ends_before_the_interpreter_is_taken_apart(tmp_path: Path, status: int) -> None:
    """A thread of Arrow that asks for the interpreter then would abort the process."""
    command = [sys.executable, "-c", ENDING, str(status)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (status, "said", "")
    assert [path.name for path in tmp_path.iterdir()] == ["done"]
