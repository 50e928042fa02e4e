"""Options that commands of ``upr-backup`` share, the repository that they open, and how far they are."""

import functools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from upr_backup.repository import Storage
from upr_backup.repository.chain import PERIODS, Chain, Keep, Link
from upr_backup.repository.documents import Json, Manifest, time_text
from upr_backup.repository.encryption import parse_key
from upr_backup.repository.repository import TAG, Repository
from upr_cli_kit.options import FILE, Parsed, login
from upr_cli_kit.output import Progress, note
from upr_cli_kit.times import parse_time
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import KEY_BYTES_MAX, parse_duration

if TYPE_CHECKING:
    from upr_backup.rows import Point

_F = TypeVar("_F", bound=Callable[..., Any])


def restore_point(text: str) -> int | str | tuple[int]:
    """Return a backup's number; of a time the microseconds since the epoch in a tuple; of a tag its name."""
    words = text.strip()
    if words.isascii() and words.isdigit() and len(words) <= 10:
        return int(words)
    if words.startswith("tag:"):
        return tag_name(words.removeprefix("tag:"))
    try:
        return (round(parse_time(text, datetime.now(UTC)).timestamp() * 1e6),)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"{text!r} is neither a backup's number nor a time with its offset from UTC",
            hint="for example 12, tag:release-7, 2026-05-01T12:00:00Z or '2h ago'",
        ) from None


def tag_name(text: str) -> str:
    if not TAG.fullmatch(text):
        raise InvalidArgumentError(
            f"the tag is {text[:80]!r}; must be 1 to 64 letters, digits and any of '._-', a letter or digit first"
        )
    return text


def key_bytes(text: str) -> bytes:
    """Return a key, or the beginning of keys, as a shell gives it."""
    data = text.encode(errors="surrogateescape")
    if len(data) > KEY_BYTES_MAX:
        raise InvalidArgumentError(
            f"the key, or its prefix, has {len(data)} bytes; must be at most {KEY_BYTES_MAX}"
        )
    return data


RESTORE_POINT = Parsed("id|time", restore_point)
MICROS = Parsed("duration", lambda text: round(parse_duration(text) * 1e6))
KEY = Parsed("text", key_bytes)
TAG_NAME = Parsed("name", tag_name)
AT_HELP: Final = "A backup's ID, a tag:NAME, or a time: the last one before it."


def keep_options(function: _F) -> _F:
    """Add --keep-last, --keep-within and those of the grid, for ``keep_or_none``."""

    def kept(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            context.meta.setdefault(_KEEP, {})[parameter.name] = value

    options: list[tuple[str, Any, str | None, str]] = [
        ("--keep-last", click.IntRange(min=1), "N", "Keep so many of the newest."),
        ("--keep-within", MICROS, None, "Keep what is not older, as 30d."),
    ]
    for unit in PERIODS:
        period = {"daily": "day"}.get(unit, unit.removesuffix("ly"))
        words = f"Keep the last one of each of the newest {period}s that have one, so many of them."
        options.append((f"--keep-{unit}", click.IntRange(1, 100_000), "N", words))
    for name, kind, metavar, words in reversed(options):
        function = click.option(
            name, type=kind, metavar=metavar, expose_value=False, callback=kept, help=words
        )(function)
    return function


_KEEP: Final = "upr_backup.keep"


def keep_or_none(repository: Repository, chain: Chain) -> Keep | None:
    """Return what the options say that is to stay, and what is pinned; None when none was given."""
    given: dict[str, int] = dict(click.get_current_context().meta.get(_KEEP, {}))
    if not given:
        return None
    last, within = given.pop("keep_last", None), given.pop("keep_within", None)
    grid = {name.removeprefix("keep_"): count for name, count in given.items()}
    pinned = {tag.number for tag in repository.tags(chain).values() if tag.pin}
    return Keep(last, within, grid, pinned)


def is_keep_given() -> bool:
    return bool(click.get_current_context().meta.get(_KEEP))


_KEY_BYTES_READ: Final = 1024
_KEY_SECONDS: Final = 60.0

KEY_OPTIONS: Final = (
    click.Option(
        ["--key-file"],
        type=FILE,
        envvar="UPR_BACKUP_KEY_FILE",
        help="File of the repository's key, 64 hex digits.",
    ),
    click.Option(
        ["--key-command"],
        envvar="UPR_BACKUP_KEY_COMMAND",
        help="Command that prints the key; it is run without a shell.",
    ),
)
"""Options of every command. They are taken out of what the command is called with by ``with_key``."""


def with_key(command: click.Command) -> click.Command:
    """Add KEY_OPTIONS to a command, for ``given_key``."""
    called = command.callback
    assert called is not None

    def kept(
        *arguments: Any, key_file: Path | None, key_command: str | None, **options: Any
    ) -> Any:
        click.get_current_context().meta[_KEY] = key_file, key_command
        return called(*arguments, **options)

    command.callback = functools.wraps(called)(kept)
    command.params.extend(KEY_OPTIONS)
    return command


_KEY: Final = "upr_backup.key"


def given_key() -> bytes | None:
    """Return the key that the command was given; None without.

    Raises:
        InvalidArgumentError: it is no key, or the command that prints it failed.
        OSError: its file cannot be read.
    """
    context = click.get_current_context()
    path, command = context.meta[_KEY]
    if path and command:
        # What is typed counts before what is in the environment.
        typed = [context.get_parameter_source(name) for name in ("key_file", "key_command")]
        if typed[0] == typed[1]:
            raise click.UsageError("--key-file and --key-command do not go together")
        path, command = (path, None) if typed[0] is ParameterSource.COMMANDLINE else (None, command)
    if path:
        with path.open("rb") as file:
            return parse_key(file.read(_KEY_BYTES_READ), str(path))
    if not command:
        return None
    try:
        done = subprocess.run(
            shlex.split(command),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            timeout=_KEY_SECONDS,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise InvalidArgumentError(f"the command of the key failed: {error}") from error
    if done.returncode:
        raise InvalidArgumentError(f"the command of the key ended with status {done.returncode}")
    return parse_key(done.stdout[:_KEY_BYTES_READ], "the command")


def open_repository(storage: Storage) -> Repository:
    """Open the repository that the command was given, with the key that it was given."""
    return Repository.open(storage, given_key())


def target_of(repository: Repository, target: str | None) -> str:
    """Return the target that was given, else that of the repository, which others may have written."""
    if target is None and login().is_secret:
        raise click.UsageError(
            f"a token or a certificate needs --target or --context; that of the repository is {repository.target}"
        )
    return target or repository.target


_PROGRESS: Final = "upr_backup.progress"
_JSON_SECONDS: Final = 1.0


def progress_option(function: _F) -> _F:

    def remember(context: click.Context, _: click.Parameter, value: str) -> None:
        context.meta[_PROGRESS] = value

    return click.option(
        "--progress",
        type=click.Choice(["text", "json", "none"]),
        default="text",
        show_default=True,
        expose_value=False,
        callback=remember,
        help="How stderr tells how far it is; json: a line about each second.",
    )(function)


class Far:
    """How far a command is, and about how long it still takes."""

    def __init__(self) -> None:
        context = click.get_current_context(silent=True)
        self._form = context.meta.get(_PROGRESS, "text") if context else "text"
        self._lines = Progress()
        self._began: tuple[str, int, float] | None = None
        self._told = time.monotonic()

    def show(self, what: str, done: int, total: int, words: str = "", **more: int) -> None:
        """Say how far it is.

        Args:
            what: is done with them, as "partitions restored".
            words: what a line says of it instead.
            more: what a line of JSON has besides.
        """
        if self._form == "none":
            return
        now = time.monotonic()
        if self._began is None or self._began[0] != what:
            # What was done before it began says nothing of how fast it is.
            self._began = what, done, now
        seconds = now - self._began[2]
        rate = (done - self._began[1]) / seconds if seconds > 0 else 0.0
        left = (total - done) / rate if rate > 0 else None
        if self._form == "text":
            text = words or f"{done} of {total} {what}"
            self._lines.show(text if left is None else f"{text}, about {_time_left(left)} left")
        elif now - self._told >= _JSON_SECONDS or done == total:
            self._told = now
            document = {"progress": what, "done": done, "total": total, **more}
            document["seconds"] = round(seconds, 1)
            document["seconds_left"] = None if left is None else round(left, 1)
            print(json.dumps(document), file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line of a terminal; what is shown next is something else."""
        self._began = None
        self._lines.close()


def _time_left(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def told_left_out(point: "Point") -> list[Json]:
    """Say which partitions of a restore point are older than it, and return them as JSON."""
    number = point.manifest.number
    for partition, end in point.left_out.items():
        note(
            f"warning: partition {partition} is older than backup {number}, which was taken without it: "
            f"it is there up to seqno {end}"
        )
    return [{"partition": p, "seqno": end} for p, end in point.left_out.items()]


def summary(backup: Manifest | Link) -> Json:
    """Return what is shown of a backup in listings."""
    link = Link.of(backup) if isinstance(backup, Manifest) else backup
    return {
        "id": link.number,
        "kind": link.kind,
        "as_of": time_text(link.cut_time),
        "started": time_text(link.started),
        "finished": time_text(link.finished),
        "rows": link.rows,
        "files": link.files,
        "bytes": link.file_bytes,
        "rollbacks": link.rollbacks,
    }
