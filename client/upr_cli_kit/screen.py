"""Screen that shows a text which changes, on a terminal, and the option --watch of listings.

A screen is the terminal's second one: what stood there before is back at the end. It ends with q or Ctrl-C.
"""

import contextlib
import functools
import io
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Self, TypeVar, cast

import click

from upr_cli_kit.output import json_option, note, verbose_option
from upr_cli_kit.times import duration
from upr_protocol.errors import UprError

_F = TypeVar("_F", bound=Callable[..., Any])

WATCH_SECONDS_MIN: Final = 0.1
WATCH_SECONDS_MAX: Final = 3600.0
_LINES, _COLUMNS = 24, 80
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""To the second screen, no cursor, and nothing that is wider than the screen, as some letters are, is continued below."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDS = b"qQ"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def interval(**options: Any) -> Any:
    """Return the attributes of an option that is a pause between two looks, in seconds."""
    kind = duration(WATCH_SECONDS_MIN, WATCH_SECONDS_MAX, bare=True)
    return {"type": kind, "metavar": "SECONDS", **options}


def has_screen() -> bool:
    """Whether stdout is a terminal that can show a screen."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def fitting(text: str, size: os.terminal_size) -> list[str]:
    """Return what fits of a text: its first lines, and how many more there are; nothing in them moves the cursor.

    Args:
        size: of the screen; 0 where the terminal does not tell.
    """
    lines, width = size.lines or _LINES, size.columns or _COLUMNS
    shown = ["".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines()]
    if len(shown) > lines:
        shown = [*shown[: lines - 1], f"... and {len(shown) - lines + 1} lines more"]
    # Terminals write what is too wide over their last column: half a number would look like a whole one.
    return [line if len(line) <= width else f"{line[: width - 1]}>" for line in shown]


class Screen:
    """A terminal's second screen, and the keys that are pressed meanwhile. A signal that ends it is a Ctrl-C."""

    def __init__(self) -> None:
        self._text = ""
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._resized, self._resize = os.pipe()

    def __enter__(self) -> Self:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
            now = termios.tcgetattr(self._keys)
            # Stopped in the background it would leave the terminal as it is here.
            now[6][termios.VSUSP] = b"\0"
            termios.tcsetattr(self._keys, termios.TCSANOW, now)
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, signal.default_int_handler)
        self._handlers[signal.SIGWINCH] = signal.signal(
            signal.SIGWINCH, lambda *_: os.write(self._resize, b"\0")
        )
        self._write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._resized)
        os.close(self._resize)
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        if self._keys is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(self, text: str) -> None:
        self._text = text
        lines = fitting(text, os.get_terminal_size(sys.stdout.fileno()))
        # Each line is erased behind its end, and the screen below: emptied as a whole it would flicker.
        self._write("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J")

    def rest(self, seconds: float) -> bool:
        """Wait; return whether to go on, and not to end. A terminal of another size shows the text anew."""
        until = time.monotonic() + seconds
        sources = [self._resized] if self._keys is None else [self._resized, self._keys]
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select(sources, [], [], left)
            if self._resized in ready:
                os.read(self._resized, 4096)
                self.show(self._text)
            if self._keys in ready:
                pressed = os.read(self._keys, 64)
                if not pressed or any(key in _ENDS for key in pressed):
                    return False
        return True


def watch(seconds: float, text: Callable[[], str]) -> None:
    """Show a text on a screen, made anew each so many seconds, until q or Ctrl-C.

    Raises:
        UprError: the first one failed, or a later one for good. A later error that may pass is shown above the last text.
    """
    last = ""
    with contextlib.suppress(KeyboardInterrupt), Screen() as screen:
        while True:
            try:
                last = shown = text()
            except UprError as error:
                if not last or not error.retriable:
                    raise
                shown = f"error: {error}\n\n{last}"
            screen.show(shown)
            if not screen.rest(seconds):
                return


def _printed(print_it: Callable[[], object]) -> str:
    """Return what a function prints, on stdout and on stderr."""
    with (
        io.StringIO() as text,
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
    ):
        print_it()
        return text.getvalue()


def watch_option(function: _F) -> _F:
    """Add --watch, which does again and again what the command does: on a screen, elsewhere one output below the other."""

    @functools.wraps(function)
    def command(*arguments: Any, watch_seconds: float | None, **options: Any) -> Any:
        once = functools.partial(function, *arguments, **options)
        if watch_seconds is None:
            return once()
        if has_screen():
            title = click.get_current_context().command_path
            watch(
                watch_seconds,
                lambda: f"{title}, {datetime.now():%H:%M:%S} (q ends it)\n\n{_printed(once)}",
            )
            return None
        with contextlib.suppress(KeyboardInterrupt):
            once()
            while True:
                if not options.get("as_json"):
                    print()
                sys.stdout.flush()
                time.sleep(watch_seconds)
                try:
                    once()
                except UprError as error:
                    if not error.retriable:
                        raise
                    note(f"error: {error}")

    add = click.option(
        "--watch",
        "watch_seconds",
        **interval(help="Show it again each so many seconds, until q or Ctrl-C."),
    )
    return cast("_F", add(command))


def watched_output_options(function: _F) -> _F:
    return json_option(watch_option(verbose_option(function)))
