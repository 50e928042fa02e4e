"""Output of the commands: columns, JSON, progress; and errors, as one line.

stdout is data; progress, warnings and errors go to stderr.
"""

import contextlib
import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TextIO, TypeVar

import click

from upr_cli_kit import exit_codes
from upr_protocol.errors import UprError

_F = TypeVar("_F", bound=Callable[..., Any])
_VERBOSE = "upr.verbose"
_BAR_WIDTH = 30
_TERMINAL_SECONDS = 0.1
_LOG_SECONDS = 5.0
_HELP = {"-h", "--help"}


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the rows as aligned columns, numbers to the right, also where "-" stands for some; nothing is ever cut."""
    table = [tuple(row) for row in rows]
    texts = [tuple(header), *(tuple(map(str, row)) for row in table)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [
        any(isinstance(row[index], int) for row in table)
        and all(isinstance(row[index], int) or row[index] == "-" for row in table)
        for index in range(len(header))
    ]
    lines = []
    for text in texts:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(text, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size_text(count: int) -> str:
    """Return a number of bytes for people."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def print_json(document: object) -> None:
    """Print one JSON document on stdout; in it may be errors that are told as data."""
    click.echo(json.dumps(document, indent=2, default=problem_document))


def not_found(what: str, listing: str) -> UprError:
    """Return the error of a name that is not among those that a command of ``upr-admin`` lists."""
    hint = f"'upr-admin {listing}' shows them"
    return UprError(f"there is no {what}", reason="NOT_FOUND", hint=hint)


def problem_document(problem: UprError) -> dict[str, str]:
    return {"reason": problem.reason, "message": problem.message, "hint": problem.hint}


def note(text: str) -> None:
    """Print a line for people on stderr."""
    Progress.end_line()
    click.echo(text, err=True)


class Progress:
    """How far a command is: a line that changes on a terminal, else a line every few seconds.

    Args:
        unit: what ``update`` counts, in the plural.
        total: how many there will be, None when it is not known.
    """

    _open: ClassVar[TextIO | None] = None

    def __init__(self, unit: str = "", total: int | None = None) -> None:
        self._unit = unit
        self._total = total
        self._stream = sys.stderr
        self._terminal = self._stream.isatty()
        self._shown = time.monotonic()

    def update(self, done: int, detail: str = "") -> None:
        """Say that ``done`` of the total are done, on a terminal with a bar; ``detail`` is shown behind."""
        of = "" if self._total is None else f"/{self._total}"
        text = f"{done}{of} {self._unit}{', ' if detail else ''}{detail}"
        if self._terminal and self._total:
            filled = _BAR_WIDTH * min(done, self._total) // self._total
            text = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {text}"
        self.show(text)

    def show(self, text: str) -> None:
        """Say how far it is, unless that was said just now."""
        now = time.monotonic()
        if now - self._shown < (_TERMINAL_SECONDS if self._terminal else _LOG_SECONDS):
            return
        self._shown = now
        if self._terminal:
            # Erases to the end of the line, because a later text may be shorter.
            print(f"\r{text}\x1b[K", end="", file=self._stream, flush=True)
            Progress._open = self._stream
        else:
            print(text, file=self._stream, flush=True)

    @staticmethod
    def end_line() -> None:
        """End the line that one of them has left open, so that what comes next begins a line of its own."""
        stream, Progress._open = Progress._open, None
        if stream is not None:
            print(file=stream, flush=True)

    close = end_line


def _as_click_error(error: Exception) -> click.ClickException:
    """Return an error with what happened and, in brackets, what to do, and one of ``exit_codes``."""
    code = exit_codes.BAD_ANSWER
    words = (
        f"internal error: {type(error).__name__}: {error} (--verbose shows where; please report it)"
    )
    if isinstance(error, UprError | OSError):
        words, code = str(error), exit_codes.exit_code_of(error)
    if isinstance(error, OSError):
        words = error.strerror or words
        if error.errno == errno.EBADF:
            words = "stdin or stdout is closed"
        elif error.filename:
            words = f"{error.filename}: {words}"
    shown = click.ClickException(words)
    shown.exit_code = code  # type: ignore[misc]
    return shown


def _invoked(invoke: Callable[[click.Context], Any], ctx: click.Context) -> Any:
    """Run a command and turn what it raises into an error of click's."""
    try:
        result = invoke(ctx)
        # Here and not at the interpreter's end, where a closed pipe would be a complaint and status 120.
        sys.stdout.flush()
        return result
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except BrokenPipeError as error:
        # Whoever reads has seen enough: `upr-cat follow | head`.
        _drop_output(error)
        ctx.exit(exit_codes.OK)
    except Exception as error:
        if isinstance(error, OSError):
            _drop_output(error)
        if ctx.meta.get(_VERBOSE):
            traceback.print_exc()
        raise _as_click_error(error) from error


def _parsed(parse: Callable[[], click.Context]) -> click.Context:
    """Parse a program's arguments; --help and --version are printed there, before anything is run."""
    try:
        return parse()
    except OSError as error:
        _drop_output(error)
        if isinstance(error, BrokenPipeError):
            raise click.exceptions.Exit(exit_codes.OK) from None
        raise _as_click_error(error) from error


def _drop_output(error: OSError) -> None:
    """Have what stdout holds back, and cannot write, go nowhere: it would be tried again at the interpreter's end.

    Then an error that names no file is one of stdout.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.filename is None:
            error.filename = "stdout"


def _left(run: Callable[..., Any], args: tuple[Any, ...], extra: dict[str, Any]) -> Any:
    """Run a command and leave with its status, an error as one line."""
    if not extra.pop("standalone_mode", True):
        return run(*args, standalone_mode=False, **extra)
    try:
        code = run(*args, standalone_mode=False, **extra)
    except click.ClickException as error:
        words = error.format_message()
        if not isinstance(error, click.exceptions.NoArgsIsHelpError):
            words = f"error: {' '.join(words.split())}"
            if isinstance(error, click.UsageError):
                where = f" (see '{error.ctx.command_path} --help')" if error.ctx else ""
                words = words.rstrip(".") + where
        note(words)
        sys.exit(error.exit_code)
    except click.Abort:
        note("interrupted")
        sys.exit(exit_codes.INTERRUPTED)
    sys.exit(code if isinstance(code, int) else exit_codes.OK)


class Command(click.Command):
    """A program of one command, with one-line errors and the statuses of ``exit_codes``."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        return _parsed(partial(super().make_context, *args, **extra))

    def invoke(self, ctx: click.Context) -> Any:
        return _invoked(super().invoke, ctx)

    def main(self, *args: Any, **extra: Any) -> Any:
        return _left(super().main, args, extra)


ELSEWHERE: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("add", "create", "new"), ("create", "add", "backup")),
    **dict.fromkeys(("clients", "groups"), ("consumers",)),
    **dict.fromkeys(("consume", "monitor", "sub", "subscribe", "tail", "watch"), ("follow", "top")),
    **dict.fromkeys(
        ("del", "delete", "remove", "rm"),
        ("delete", "drop", "forget", "release", "remove", "revoke"),
    ),
    **dict.fromkeys(("describe", "health", "ping", "stats"), ("info", "show", "status")),
    **dict.fromkeys(("export", "keys", "list", "ls", "scan"), ("list", "dump")),
    **dict.fromkeys(("import", "produce"), ("load",)),
    **dict.fromkeys(("pub", "put"), ("set",)),
    **dict.fromkeys(("snapshot", "snapshots"), ("list", "cut")),
    "check": ("verify",),
    "failover": ("takeover",),
    "forget": ("expire",),
    "info": ("status",),
    "topics": ("bucket",),
}
"""Names that programs like these have for commands, and what may be meant, the first one that is there."""


class Group(click.Group):
    """A program of several commands, or some of them; errors are one line, and end in the statuses of ``exit_codes``.

    It has --verbose, as its commands have.

    Args:
        bare: the command that is meant where none is named.
    """

    def __init__(self, *arguments: Any, bare: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        verbose_option(self)
        self.bare = bare

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and args is not None:
            args = self._with_bare(ctx, args) if self.bare else self._with_place(ctx, args)
        return super().parse_args(ctx, args)

    def _with_bare(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments with the command that they leave out, and refuse options that stand before one."""
        if args and not args[0].startswith("-"):
            return args
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        takes = {
            name
            for option in self.commands[self.bare].params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        before = ["", *args]
        named = [
            a for a, b in zip(args, before, strict=False) if a in self.commands and b not in takes
        ]
        if not named:
            # The help of all of them, where nothing is said that only the listing knows.
            return args if _HELP & set(args) and own >= set(args) else [self.bare, *args]
        for argument in args[: args.index(named[0])]:
            if argument.startswith("-") and argument not in own:
                raise click.UsageError(f"{argument} goes behind {named[0]!r}", ctx)
        return args

    def _with_place(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse a command in the place of what goes before it, or show its help, if that is asked for."""
        place = next((one for one in self.params if isinstance(one, click.Argument)), None)
        words = [argument for argument in args if not argument.startswith("-")]
        if place is None or not words or words[0] not in self.commands:
            return args
        if len(words) > 1 and words[1] in self.commands:
            return args
        name = place.make_metavar(ctx)
        if _HELP & set(args):
            return [name, *args]
        raise click.UsageError(
            f"{name} goes before {words[0]!r}: {ctx.command_path} {name} {words[0]}", ctx
        )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        meant = [one for one in ELSEWHERE.get(name, ()) if one in self.commands]
        if meant and name not in self.commands and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {name!r}. Did you mean {meant[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        return _parsed(partial(super().make_context, *args, **extra))

    def invoke(self, ctx: click.Context) -> Any:
        return _invoked(super().invoke, ctx)

    def main(self, *args: Any, **extra: Any) -> Any:
        return _left(super().main, args, extra)


def add_examples(program: click.Command, examples: Mapping[str, Sequence[str]]) -> None:
    """Show examples at the end of the help of commands.

    Args:
        examples: of each command, named by the words behind the program's name, what follows the program's name.
    """
    for words, lines in examples.items():
        command: click.Command = program
        for word in words.split():
            assert isinstance(command, click.Group)
            command = command.commands[word]
        shown = (f"  {program.name} {line}".rstrip() for line in lines)
        # click leaves the lines of a paragraph behind \b as they are.
        command.epilog = "\n".join(("\b", "Examples:", *shown))


def confirm(question: str, to: str, about: str = "") -> None:
    """Ask on the terminal whether to go on, and end the command where the answer is no.

    Args:
        to: what --yes does without asking.
        about: what the question is about, in a line of its own.

    Raises:
        UsageError: nobody can be asked.
        Exit: the answer is no.
    """
    if not can_ask():
        raise click.UsageError(f"nobody can be asked here: give --yes to {to}")
    if about:
        note(about)
    if not click.confirm(question, err=True):
        note("nothing was changed")
        raise click.exceptions.Exit(exit_codes.REFUSED)


def can_ask() -> bool:
    """Whether there is somebody who can answer a question."""
    return sys.stdin.isatty()


def print_result(as_json: bool, document: object, text: str) -> None:
    """Print what a command found, as one JSON document or for people."""
    if as_json:
        print_json(document)
    else:
        click.echo(text)


def print_done(as_json: bool, did: str, name: str, details: str = "", **fields: object) -> None:
    """Print what a command did, as ``dropped: orders, version 5`` or as one JSON document.

    Args:
        did: a participle, and the JSON document's field of the name.
        name: of what it did that to.
        details: for people, behind the name.
        fields: further ones of the JSON document.
    """
    text = f"{did}: {name}{details and ', '}{details}"
    print_result(as_json, {did: name, **fields}, text)


def _remember_verbose(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_VERBOSE] = True


verbose_option = click.option(
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_remember_verbose,
    help="Show the trace of an error.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def output_options(function: _F) -> _F:
    return json_option(verbose_option(function))
