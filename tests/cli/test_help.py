"""Help, examples and completion of all commands, and commands that are left out."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from upr.cli.admin import main as admin
from upr.cli.cat import main as cat
from upr.cli.server import main as server
from upr_backup.cli.commands import main as backup
from upr_cli_kit.output import ELSEWHERE
from upr_client import Client

PROGRAMS: dict[str, click.Command] = {
    "upr-admin": admin,
    "upr-backup": backup,
    "upr-cat": cat,
    "upr-server": server,
}


def commands(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and those below it, with their names."""
    yield " ".join(names), command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, *names, name)


ALL = [pair for name, program in PROGRAMS.items() for pair in commands(program, name)]


def parse(words: list[str]) -> list[str]:
    """Parse a command line as the program would, and run nothing; return the commands that it names."""
    command, rest, context = PROGRAMS[words[0]], words[1:], None
    named = [words[0]]
    while True:
        context = command.make_context(named[-1], rest, parent=context)
        if not isinstance(command, click.Group):
            return named
        left = [*context._protected_args, *context.args]
        name, below, rest = command.resolve_command(context, left)
        assert name is not None
        assert below is not None
        named.append(name)
        command = below


def test_a_name_from_elsewhere_leads_to_a_command() -> None:
    groups = [command.commands.keys() for _, command in ALL if isinstance(command, click.Group)]
    for name, meant in ELSEWHERE.items():
        assert any(name not in group and group & set(meant) for group in groups), name


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_every_help_ends_with_examples_that_can_be_run(
    name: str, command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = name.split()[0]
    place = ["/srv/backup"] if program == "upr-backup" and name != program else []
    shown = CliRunner().invoke(
        PROGRAMS[program], [*place, *name.split()[1:], "--help"], prog_name=program
    )
    assert (shown.exit_code, shown.stderr) == (0, "")
    _, found, examples = shown.stdout.partition("Examples:\n")
    assert found, f"{name} has no examples: see add_examples beside it"
    lines = [line.strip() for line in examples.splitlines()]
    assert lines
    monkeypatch.chdir(tmp_path)
    for file in ("log.json", "FILE"):
        (tmp_path / file).touch()
    for line in lines:
        assert len(line) < 100
        words = shlex.split(
            line.replace("/var/lib/upr/undone/", "").partition(" > ")[0].partition(" < ")[0]
        )
        if isinstance(command, click.Group):
            assert parse(words)[0] == program
        else:
            assert " ".join(parse(words)) == name
    if not isinstance(command, click.Group):
        assert "--verbose" in shown.stdout
        with_json = program in ("upr-admin", "upr-backup") and name != "upr-admin top"
        assert "--json" in shown.stdout or not with_json


def test_a_family_of_commands_alone_is_its_listing(target: str) -> None:
    with Client(target) as client:
        client.bucket().cut("now")
    there = ("--target", target, "--json")
    for name, listing in (
        ("bucket", "list"),
        ("cut", "list"),
        ("consumers", "list"),
        ("topology", "show"),
    ):
        alone = CliRunner().invoke(admin, [name, *there])
        spelled = CliRunner().invoke(admin, [name, listing, *there])
        assert (alone.exit_code, alone.stderr) == (0, "")
        told, again = json.loads(alone.stdout), json.loads(spelled.stdout)
        if name == "topology":
            # It tells times.
            assert told.pop("part").keys() == again.pop("part").keys()
        assert told == again
    assert "release" in CliRunner().invoke(admin, ["cut", "--help"]).stdout
    listing = CliRunner().invoke(admin, ["cut", "--bucket", "b", "--help"]).stdout
    assert listing.startswith("Usage: upr-admin cut list ")
    # A bucket may be named like a command.
    found = CliRunner().invoke(admin, ["cut", "--bucket", "list", *there])
    assert (found.exit_code, "'list'" in found.stderr) == (3, True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_alone_shows_its_help(program: str) -> None:
    shown = CliRunner().invoke(PROGRAMS[program], [], prog_name=program)
    assert (shown.exit_code, shown.stdout) == (2, "")
    if isinstance(PROGRAMS[program], click.Group):
        asked = CliRunner().invoke(PROGRAMS[program], ["--help"], prog_name=program)
        assert shown.stderr == asked.stdout
        assert "\n\nCommands:\n" in shown.stderr


def test_the_help_of_a_backup_command_needs_no_repository() -> None:
    shown = CliRunner().invoke(backup, ["restore", "--help"], prog_name="upr-backup")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("Usage: upr-backup REPOSITORY restore [OPTIONS]\n")


def test_a_shell_completes_commands_and_options() -> None:
    asked = {
        "_UPR_ADMIN_COMPLETE": "bash_complete",
        "COMP_WORDS": "upr-admin cut re",
        "COMP_CWORD": "2",
    }
    done = CliRunner().invoke(admin, [], prog_name="upr-admin", env=asked)
    assert done.stdout.split() == ["plain,release", "plain,renew"]
    script = CliRunner().invoke(
        admin, [], prog_name="upr-admin", env={"_UPR_ADMIN_COMPLETE": "bash_source"}
    )
    assert "complete -o nosort" in script.stdout
