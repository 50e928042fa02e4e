"""Options of ``upr-admin`` that must not be taken for something else than the user meant; no server is asked."""

import pytest
from click.testing import CliRunner

from upr.cli import entry
from upr.cli.admin import main

NOBODY = ("--target", "127.0.0.1:1")
MANY_DIGITS = "9" * 5000
NO_TEXT = "\udcff"
"""What Python makes of an argument of the byte 255."""


@pytest.mark.parametrize(
    "before", [("--bucket", "orders"), NOBODY, ("--json",), ("--partitions",)], ids=str
)
def test_options_before_a_subcommand_are_not_passed_over(before: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["consumers", *before, "forget", "name"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {before[0]} goes behind 'forget'")


@pytest.mark.parametrize(
    "arguments",
    [
        ("bucket", "create", NO_TEXT),
        ("bucket", "drop", "--yes", NO_TEXT),
        ("partitions", "--bucket", NO_TEXT),
        ("storage", "--bucket", NO_TEXT),
        ("consumers", "forget", NO_TEXT),
        ("cut", "create", NO_TEXT),
        ("cut", "renew", NO_TEXT),
        ("cut", "release", NO_TEXT),
    ],
    ids=str,
)
def test_a_name_that_is_not_utf_8(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*arguments, *NOBODY])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not UTF-8" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("partitions", MANY_DIGITS), "partition"),
        (("cut", "create", "name", "--partitions", f"0-{MANY_DIGITS}"), "partition"),
        (("status", "--target", f"127.0.0.1:{MANY_DIGITS}"), "port"),
    ],
)
def test_thousands_of_digits_are_a_number_that_is_too_large(
    arguments: tuple[str, ...], name: str
) -> None:
    result = CliRunner().invoke(main, [*arguments])
    assert result.exit_code == 2
    assert f"{name} is 99999999999999999999..., it must be from 0 to" in result.stderr
    assert len(result.stderr) < 300


def test_every_group_and_command_can_show_traces() -> None:
    commands = [main, *main.commands.values()]
    commands += [sub for group in commands[1:] for sub in getattr(group, "commands", {}).values()]
    for command in commands:
        names = {name for parameter in command.params for name in parameter.opts}
        assert "--verbose" in names, command.name


def test_what_the_server_needs_to_compress_is_missed_by_name() -> None:
    assert "zstandard" in entry.EXTRAS["server"][1]
