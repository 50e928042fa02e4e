"""``upr-cat follow``: changes as JSON lines, as CSV or in a format, and the position file of ``--position``."""

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from upr.cli.cat_commands.keys import Durability, open_bucket
from upr_cli_kit.options import FILE, Parsed, partitions_option, server_options
from upr_cli_kit.output import note, verbose_option
from upr_cli_kit.times import duration, parse_time
from upr_protocol.errors import InvalidArgumentError

if TYPE_CHECKING:
    from upr_client import Change, ChangeBatch, FilePositions, Position, Rollback
    from upr_client.types import Changes


class StartAnew:
    """A position file whose content is passed over and replaced by the first save."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: FilePositions | None = None

    def load(self, partitions: Iterable[int]) -> "dict[int, Position]":
        """Return no positions, whatever the file holds."""
        return {}

    def save(self, positions: "Mapping[int, Position]") -> None:
        """Replace the file at the first call, and write to it like any other from then on."""
        from upr_client import FilePositions

        if self._store is None:
            self._path.unlink(missing_ok=True)
            self._store = FilePositions(self._path)
        self._store.save(positions)


@contextmanager
def position_store(
    path: Path | None, from_start: bool
) -> "Iterator[FilePositions | StartAnew | None]":
    """Hold where positions are kept, None for nowhere; the file is locked, for which its folder must be writable.

    Raises:
        UprError: the folder is not, the file is no plain one, or another follower holds it.
    """
    from upr_client import FilePositions
    from upr_client.errors import PositionStoreError

    if path is None:
        yield None
        return
    if path.exists() and not path.is_file():
        # To open a FIFO would wait for its other end.
        raise PositionStoreError(f"the position file {path} is no plain file", hint="name another")
    if path.is_symlink():
        # The file that it leads to is replaced by a save, and may be used under its own name.
        path = Path(os.path.realpath(path))
    with _locked(path):
        yield StartAnew(path) if from_start else FilePositions(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file as long as it is used; the lock is on one beside it, because each save replaces the file itself."""
    from upr_client.errors import PositionBusyError, PositionStoreError

    lock = path.with_name(f"{path.name}.lock")
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise PositionStoreError(
                f"the position file {path} cannot be used: {lock}: {error.strerror}",
                hint="it needs an existing folder, and permission to write there",
            ) from None
        try:
            # A file system without locks: the second one to save is told, only later.
            with suppress(OSError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise PositionBusyError(
                        f"the position file {path} is used by another follower",
                        hint="give each one a file of its own",
                    ) from None
            # Whoever had the lock before removes the file, so that this may be one that is not there any more.
            if _is(lock, descriptor):
                try:
                    yield
                    return
                finally:
                    lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


Layout = Callable[["Change"], bytes]

_PARTS: Final[dict[str, Layout]] = {
    "p": lambda change: b"%d" % change.partition,
    "s": lambda change: b"%d" % change.seqno,
    "o": lambda change: change.op.encode(),
    "k": lambda change: change.key,
    "v": lambda change: change.value or b"",
}
_ESCAPES: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}


def layout_of(text: str) -> Layout | None:
    """Return the function that lays a change out as a format says, None for JSON lines.

    A format is ``jsonl``, ``csv``, ``raw`` (the values and nothing else), or a text with %p, %s, %o, %k, %v, %%, and \\n, \\r, \\t,
    \\0, \\\\.

    Raises:
        InvalidArgumentError: it is another word, or something else follows % or a backslash.
    """
    from upr.cli.cat_commands.row_formats import csv_line

    named: dict[str, Layout | None] = {"jsonl": None, "csv": csv_line, "raw": _PARTS["v"]}
    if text in named:
        return named[text]
    if "%" not in text:
        raise InvalidArgumentError(
            f"format is {text!r}; must be {', '.join(named)}, or have a %",
            hint=r"for example '%k=%v\n'",
        )
    parts: list[bytes | Layout] = []
    characters = iter(text)
    for character in characters:
        if character not in "%\\":
            parts.append(os.fsencode(character))
            continue
        name = next(characters, "")
        known: Mapping[str, bytes | Layout] = (
            {**_PARTS, "%": b"%"} if character == "%" else _ESCAPES
        )
        if name not in known:
            raise InvalidArgumentError(
                f"{character + name!r} in the format is not known",
                hint=f"known are {', '.join(character + one for one in known)}",
            )
        parts.append(known[name])
    return lambda change: b"".join(p if isinstance(p, bytes) else p(change) for p in parts)


@click.command("follow")
@click.option("--until-now", is_flag=True, help="End at what is there when the streams are opened.")
@click.option(
    "-n", "--count", type=click.IntRange(min=1), help="End after so many changes. [default: never]"
)
@click.option("--from-start", is_flag=True, help="Begin at 0 whatever the position file says.")
@click.option("--from-now", is_flag=True, help="Begin at what is written from now on.")
@click.option(
    "--from-time",
    type=Parsed("time", lambda text: parse_time(text, datetime.now(UTC))),
    help="Begin at the first change of then or later: 2026-05-01T12:00:00Z, or '2h ago'.",
)
@click.option(
    "--position",
    "position_file",
    type=FILE,
    help="Go on from the positions in this file, and keep them there.",
)
@partitions_option
@click.option("--key-prefix", default="", help="Only keys that begin with it.")
@click.option(
    "--stability",
    type=click.Choice(get_args(Durability)),
    default="disk",
    show_default=True,
    help="Show rows when they are durable here, before, or when so many replicas have them too.",
)
@click.option("--keys-only", is_flag=True, help="Leave the values out.")
@click.option(
    "-f",
    "--format",
    "layout",
    type=Parsed("format", layout_of),
    help=r"jsonl, csv, raw (values only), or as '%k=%v\n': %p partition, %s seqno, %o set or delete, %k key, %v value, %%.",
)
@click.option(
    "--group",
    help="Share the partitions with the others of this name; the server keeps the positions.",
)
@click.option("--member", help="With --group: a name in it, to keep the share over a restart.")
@click.option(
    "--consumer", default="", help="A name; a second follower of this name ends the first."
)
@click.option(
    "--retry-seconds",
    type=duration(bare=True),
    help="Give up when the server is away for this long. [default: never]",
)
@server_options
@verbose_option
def follow(
    until_now: bool,
    count: int | None,
    from_start: bool,
    from_now: bool,
    from_time: datetime | None,
    position_file: Path | None,
    partitions: list[int] | None,
    key_prefix: str,
    stability: Durability,
    keys_only: bool,
    layout: Layout | None,
    group: str | None,
    member: str | None,
    consumer: str,
    retry_seconds: float | None,
    target: str,
    bucket: str,
) -> None:
    """Print changes, markers and rollbacks as JSON lines, or changes in a format.

    With --position the file moves past a line only after it was written to stdout; --from-now and --from-time count for
    partitions that are not in it.
    """
    if from_start + from_now + (from_time is not None) > 1:
        raise click.UsageError("--from-start, --from-now and --from-time are given together")
    if group is not None and (position_file or from_start):
        raise click.UsageError(
            "--position and --from-start go without --group, whose positions 'upr-admin consumers' shows and resets"
        )
    if keys_only and layout is _PARTS["v"]:
        raise click.UsageError("-f raw prints values, and --keys-only leaves them out")
    if group is not None and until_now:
        raise click.UsageError(
            "--until-now goes without --group, whose partitions change hands, so that no member sees the end"
        )
    if member is not None and group is None:
        raise click.UsageError("--member goes with --group")
    from upr_client import Group, Only, Tuning

    options: dict[str, Any] = {
        "start": from_time or ("now" if from_now else "beginning"),
        "until": "now" if until_now else None,
        "only": Only(
            partitions, stability=stability, keys_only=keys_only, key_prefix=os.fsencode(key_prefix)
        ),
        "tuning": Tuning(retry_seconds=retry_seconds),
        "consumer": consumer,
        "on_rollback": "event",
        "on_status": lambda text: note(f"upr-cat: {text}"),
        # Of a batch some changes are printed, where they are counted.
        "acknowledge": "auto" if count is None else "manual",
    }
    with position_store(position_file, from_start) as store:
        resume = store if group is None else Group(group, member=member)
        _follow(target, bucket, {"resume": resume, **options}, layout, count)


def _follow(
    target: str, bucket: str, options: dict[str, Any], layout: Layout | None, count: int | None
) -> None:
    from upr.cli.cat_commands.row_formats import csv_key_line, csv_line

    header = b""
    if layout is csv_line:
        header = b"partition,seqno,op,key,value\n"
        if options["only"].keys_only:
            layout, header = csv_key_line, b"partition,seqno,op,key\n"
    with (
        open_bucket(target, bucket) as followed,
        followed.changes(**options) as changes,
        _stopped_by_interrupts(changes) as receiving,
    ):
        _print_all(receiving, changes, layout, count, header)


@contextmanager
def _stopped_by_interrupts(changes: "Changes") -> "Iterator[Iterator[ChangeBatch | Rollback]]":
    """Yield what ``batches`` gives, with a Ctrl-C, or SIGTERM, as the end of it.

    A KeyboardInterrupt there would come anywhere in it. It is raised while something is printed, which may take for ever,
    for the second Ctrl-C, and at the end. After SIGTERM it is SystemExit.
    """
    stopped = receives = False
    end: BaseException = KeyboardInterrupt()

    def stop(number: int, _: object) -> None:
        nonlocal stopped, end
        end = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        if stopped or not receives:
            raise end
        stopped = True
        changes.stop()

    def receiving() -> "Iterator[ChangeBatch | Rollback]":
        nonlocal receives
        batches = changes.batches()
        while True:
            receives = True
            item = next(batches, None)
            receives = False
            if item is None or stopped:
                return
            yield item

    # SIGINT is ignored in the background of a shell without job control.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = {number: was for number, was in usual.items() if signal.getsignal(number) is was}
    for number in taken:
        signal.signal(number, stop)
    try:
        yield receiving()
        if stopped:
            raise end
    finally:
        for number, was in taken.items():
            signal.signal(number, was)


def _print_all(
    receiving: "Iterator[ChangeBatch | Rollback]",
    changes: "Changes",
    layout: Layout | None,
    count: int | None,
    header: bytes,
) -> None:
    from upr_client import Rollback

    for batch in receiving:
        # Not before: the server may refuse the positions.
        sys.stdout.buffer.write(header)
        header = b""
        if isinstance(batch, Rollback):
            _print_rollback(batch, layout)
        elif count is None:
            _print_changes(batch.changes, batch, layout)
        else:
            some = batch.changes[:count]
            count -= len(some)
            _print_changes(some, batch if count else None, layout)
            for change in some:
                changes.ack(change)
            if not count:
                return
    sys.stdout.buffer.write(header)


def _print_changes(
    changes: "list[Change]", batch: "ChangeBatch | None", layout: Layout | None
) -> None:
    """Print changes, and the markers of the batch of which they are all."""
    from upr.cli.cat_commands.row_formats import batch_lines

    if layout is None:
        _print_lines(batch_lines(changes, batch.markers if batch is not None else ()))
    else:
        sys.stdout.buffer.write(b"".join(map(layout, changes)))
        sys.stdout.buffer.flush()


def _print_rollback(rollback: "Rollback", layout: Layout | None) -> None:
    from upr.cli.cat_commands.row_formats import rollback_line

    if layout is None:
        _print_lines([rollback_line(rollback)])
    else:
        note(
            f"upr-cat: partition {rollback.partition} was rolled back: what was printed of it above seqno {rollback.seqno} is undone"
        )


def _print_lines(lines: Iterable[str]) -> None:
    text = "\n".join(lines)
    if text:
        # Flushed before the next batch is asked for: asking is what makes the position move past this one.
        print(text, flush=True, file=sys.stdout)
