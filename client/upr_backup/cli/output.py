"""Output of ``upr-backup``: data on stdout; progress and errors, as one line, on stderr."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import click

from upr_backup.cli import exit_codes
from upr_protocol.errors import UprError

_F = TypeVar("_F", bound=Callable[..., Any])
_VERBOSE = "upr_backup.verbose"
_TERMINAL_SECONDS = 0.1
_LOG_SECONDS = 5.0


def note(text: str) -> None:
    """Print a line for people on stderr."""
    Progress.end_line()
    click.echo(text, err=True)


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(document, indent=2))


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the rows as aligned columns, numbers to the right; nothing is ever cut."""
    table = [tuple(row) for row in rows]
    texts = [tuple(header), *(tuple(map(str, row)) for row in table)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [
        bool(table) and all(isinstance(row[at], int) for row in table) for at in range(len(header))
    ]
    lines = []
    for text in texts:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(text, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class Progress:
    """How far a command is: one line that changes on a terminal, else a line every few seconds."""

    _open: ClassVar[bool] = False

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = time.monotonic()

    def show(self, text: str) -> None:
        """Say how far it is, unless that was said just now."""
        now = time.monotonic()
        if now - self._shown < (_TERMINAL_SECONDS if self._terminal else _LOG_SECONDS):
            return
        self._shown = now
        if self._terminal:
            # Erases to the end of the line, because a later text may be shorter.
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
            Progress._open = True
        else:
            note(text)

    def close(self) -> None:
        """End the line."""
        self.end_line()

    @staticmethod
    def end_line() -> None:
        """End the line that one of them has left open, so that what comes next begins one of its own."""
        if Progress._open:
            Progress._open = False
            print(file=sys.stderr, flush=True)


class CommandError(Exception):
    """An error that is shown as one line and ends the command with a status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _as_command_error(error: Exception) -> CommandError:
    if isinstance(error, UprError):
        return CommandError(str(error), exit_codes.exit_code_of(error))
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return CommandError(
            f"{where}{error.strerror or error}", exit_codes.exit_code_of_system(error)
        )
    return CommandError(
        f"internal error: {type(error).__name__}: {error} (--verbose shows where; please report it)",
        exit_codes.INTERNAL,
    )


def _run(run: Callable[[click.Context], Any], ctx: click.Context) -> Any:
    """Run a command and turn what it raises into a CommandError."""
    try:
        result = run(ctx)
        # It is None where the command was started with a closed one.
        if sys.stdout is not None:
            sys.stdout.flush()
        return result
    except (CommandError, click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if ctx.meta.get(_VERBOSE):
            traceback.print_exc()
        raise _as_command_error(error) from error


def _run_and_leave(run: Callable[..., Any], args: tuple[Any, ...], extra: dict[str, Any]) -> Any:
    """Run a command and leave with its status."""
    if not extra.pop("standalone_mode", True):
        return run(*args, standalone_mode=False, **extra)
    try:
        code = run(*args, standalone_mode=False, **extra)
    except click.exceptions.NoArgsIsHelpError as error:
        note(error.format_message())
        sys.exit(error.exit_code)
    except click.UsageError as error:
        note(f"error: {_one_line(error.format_message()).rstrip('.')} (-h shows the usage)")
        sys.exit(error.exit_code)
    except click.ClickException as error:
        note(f"error: {_one_line(error.format_message())}")
        sys.exit(error.exit_code)
    except CommandError as error:
        note(f"error: {_one_line(str(error))}")
        sys.exit(error.exit_code)
    except click.Abort:
        note("interrupted")
        sys.exit(exit_codes.INTERRUPTED)
    sys.exit(code if isinstance(code, int) else exit_codes.OK)


class Command(click.Command):
    """A command with one-line errors."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        return _run(super().invoke, ctx)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run it and leave with its status."""
        return _run_and_leave(super().main, args, extra)


class Group(click.Group):
    """A command with subcommands, with one-line errors."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        return _run(super().invoke, ctx)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run it and leave with its status."""
        return _run_and_leave(super().main, args, extra)


def _remember_verbose(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_VERBOSE] = True


def verbose_option(function: _F) -> _F:
    """Add --verbose, which shows the trace of an error too."""
    return click.option(
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_remember_verbose,
        help="Show the trace of an error.",
    )(function)


def json_option(function: _F) -> _F:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(
        function
    )
