"""The commands of OPERATORS.md: those in blocks run as they are printed but for folders and ports, and all names are there."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.cli.test_help import PROGRAMS
from tests.harness import WAIT_SECONDS, wait_until
from upr_cli_kit import exit_codes
from upr_cli_kit.output import Group

GUIDE = (Path(__file__).parents[2] / "upr" / "OPERATORS.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
STUBS = ("chown", "install", "podman", "python3", "systemctl", "useradd")
"""Programs that would change this machine or need a registry."""
FOLDERS = ("/srv/upr/", "/backups/")
"""What the guides take for folders of the machine."""
OF_A_SHELL = re.compile(r"[|&;<>()$`*?\n]")
"""What a shell makes more of than words."""
RETRIED = ("upr-admin promote", "upr-admin takeover")
"""Commands that are refused until the servers are in step; people try again too."""


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block, and what each prints as far as that is shown: then all have a prompt.

    Lines that were continued, and what goes into a file, are one.
    """
    if block.startswith("$ "):
        for typed in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = typed.partition("\n")
            yield command, printed
        return
    lines = iter(block.replace("\\\n", " ").splitlines())
    for line in lines:
        if "<<END" in line:
            line = "\n".join([line, *iter(lambda: next(lines), "END"), "END"])
        yield line, ""


class Shell:
    """A shell on a machine of its own, as far as the commands see: its folders, ports and environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "srv").mkdir()
        (folder / "deploy" / "secrets").mkdir(parents=True)
        stubs = folder / "stubs"
        stubs.mkdir()
        for name in STUBS:
            (stubs / name).write_text("#!/bin/sh\nexit 0\n")
            (stubs / name).chmod(0o755)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": f"{stubs}:{path}", "HOME": str(folder)}
        self.environment["UPR_CONTEXTS"] = str(folder / "contexts.json")
        self.ports: dict[str, str] = {}
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def _here(self, command: str) -> str:
        """Return a command with the folders and ports of this machine."""
        for folder in FOLDERS:
            command = command.replace(folder, f"{self.folder}/srv/")
        command = command.replace("/opt/upr/bin/pip", "true")
        return re.sub(
            r"127\.0\.0\.1:77\d\d", lambda found: self.ports.get(found[0], found[0]), command
        )

    def is_as(self, told: str, shown: str) -> bool:
        """Return whether a command prints what the guide shows, where it shows something.

        Ids, times, sizes and the widths of columns differ from run to run, and so does the order of addresses.
        """
        for address, port in self.ports.items():
            told = told.replace(port, address)

        def lines(text: str) -> list[str]:
            for folder in (*FOLDERS, f"{self.folder}/srv/"):
                text = text.replace(folder, "FOLDER/")
            text = re.sub(r"\b([0-9a-f]{32}|[0-9a-f]{16})\b", "ID", text)
            # Of a backup of one row, which is compressed with its time.
            text = re.sub(r"\b1[67]\d\d\b", "SIZE", text)
            text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", "TIME", text)
            return sorted(" ".join(line.split()) for line in text.splitlines())

        return not shown.strip() or lines(told) == lines(shown)

    def run(self, command: str) -> str:
        """Run a command, or start a server and wait until it is ready; returns stdout.

        One of ours alone runs in this process, with the words and the environment that a shell would give it: to start
        an interpreter takes longer than what most of them do.
        """
        if command.startswith("export "):
            self.environment |= dict(
                pair.split("=") for pair in shlex.split(self._here(command))[1:]
            )
            return ""
        if command.startswith("upr-server "):
            self._serve(command)
            return ""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            status, stdout, stderr = self._outcome(self._here(command))
            retried = command.startswith(RETRIED) and time.monotonic() < deadline
            if status != 4 or not retried:
                break
        assert status == 0, (command, stdout, stderr)
        return stdout

    def _outcome(self, command: str) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr of a command."""
        program = PROGRAMS.get(command.partition(" ")[0])
        if program is not None and not OF_A_SHELL.search(command):
            name, *words = shlex.split(command, comments=True)
            with contextlib.chdir(self.folder):
                ran = CliRunner().invoke(program, words, prog_name=name, env=self.environment)
            return ran.exit_code, ran.stdout, ran.stderr
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    def _serve(self, command: str) -> None:
        words = shlex.split(self._here(command))
        address = "127.0.0.1:7711"
        if "--listen" in command:
            address = shlex.split(command)[shlex.split(command).index("--listen") + 1]
        if address in self.servers:
            self.servers[address].terminate()
            self.servers[address].wait(WAIT_SECONDS)
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        words += ["--listen", self.ports.get(address, "127.0.0.1:0"), "--ready-file", str(ready)]
        with (self.folder / "server.log").open("ab") as log:
            started = subprocess.Popen(words, env=self.environment, stderr=log)
        self.servers[address] = started
        wait_until(lambda: ready.exists() or started.poll() is not None, "a server")
        assert ready.exists(), (self.folder / "server.log").read_text()
        self.ports[address] = ready.read_text().strip()

    def lose(self, address: str) -> None:
        """Kill the active server, once the others are in step, and counted in its place."""

        def replaceable() -> bool:
            found = json.loads(self.run(f"upr-admin topology --json --target {address}"))
            members = found["members"]
            return all(one["in_step"] and one["counted"] is not one["active"] for one in members)

        wait_until(replaceable, lambda: self.run(f"upr-admin topology --target {address}"))
        self.servers[address].kill()
        self.servers[address].wait()

    def close(self) -> None:
        for one in self.servers.values():
            one.kill()
            one.wait()


@pytest.mark.long
def test_the_blocks_are_commands_that_work(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    seen: list[str] = []
    compared = 0
    # Security comes first: it makes what the others use.
    first = next(block for block in BLOCKS if block.startswith("openssl"))
    try:
        for block in [first, *(block for block in BLOCKS if block != first)]:
            if "upr-admin promote" in block:
                shell.lose("127.0.0.1:7711")
            for command, printed in commands(block):
                deadline = time.monotonic() + WAIT_SECONDS
                told = shell.run(command)
                while command.startswith("upr-admin topology") and not shell.is_as(told, printed):
                    # Servers hear of each other a moment later.
                    assert time.monotonic() < deadline, told
                    told = shell.run(command)
                seen.append(command)
                assert shell.is_as(told, printed), (command, told)
                compared += bool(printed)
        found = shell.run(
            "upr-cat follow --until-now --bucket orders-restored --target 127.0.0.1:7711"
        )
        assert '"a chair"' in found
        assert (tmp_path / "srv" / "indexer.token").stat().st_mode & 0o777 == 0o600
        indexer = "--tls-ca /srv/upr/cert.pem --token-file /srv/upr/indexer.token"
        assert "a chair" in shell.run(
            f"upr-cat follow --until-now --target 127.0.0.1:7711 --bucket orders {indexer}"
        )
    finally:
        shell.close()
    assert len(BLOCKS) == 11
    assert len(seen) >= 40
    assert compared >= 11


def words_of(text: str) -> list[str]:
    """Return the words of a command in the text, without the marks for what may be left out."""
    return re.sub(r"[\[\]]|\.\.\.", "", text).split()


def inline() -> list[str]:
    prose = re.sub(r"```.*?```", "", GUIDE, flags=re.DOTALL).replace("\n", " ")
    found = re.findall(r"`((?:upr-admin|upr-cat|upr-backup|upr-server) [^`]*)`", prose)
    return sorted(set(found))


@pytest.mark.parametrize("text", [*inline(), *(c for b in BLOCKS for c, _ in commands(b))])
def test_every_name_in_a_command_is_there(text: str) -> None:
    program, *words = words_of(text)
    if program not in PROGRAMS:
        return
    command = PROGRAMS[program]
    options = {name for parameter in command.params for name in parameter.opts}
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("--"):
            assert word in options, (text, word)
        elif before.startswith("--"):
            continue
        elif isinstance(command, click.Group) and re.fullmatch(r"[a-z|-]+", word):
            for name in word.split("|"):
                assert name in command.commands, (text, name)
            command = command.commands[word.partition("|")[0]]
            # Alone a family of commands is its listing.
            parameters = [*command.params]
            if isinstance(command, Group) and command.bare:
                parameters += command.commands[command.bare].params
            options |= {name for parameter in parameters for name in parameter.opts}


def test_every_exit_status_is_told() -> None:
    table = GUIDE.partition("| exit status | |\n|---|---|\n")[2].partition("\n\n")[0]
    told = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert told == sorted(
        n for name, n in vars(exit_codes).items() if name.isupper() and name[0] != "_"
    )


def test_every_option_that_is_named_is_there() -> None:
    known: set[str] = set()
    waiting = list(PROGRAMS.values())
    while waiting:
        command = waiting.pop()
        known |= {name for parameter in command.params for name in parameter.opts}
        waiting += command.commands.values() if isinstance(command, click.Group) else ()
    prose = re.sub(r"```.*?```", "", GUIDE, flags=re.DOTALL)
    named = set(re.findall(r"`(--[a-z][a-z-]+)", prose))
    assert len(named) > 40
    assert named - known == set()
