"""``upr-cat load``: mutations from a file of JSON lines, CSV or Parquet, or from a git repository's history."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from upr.cli.cat_commands.keys import Durability, durability_option, open_bucket
from upr_cli_kit.options import FILE, NamedPath, server_options
from upr_cli_kit.output import Progress, json_option, note, print_json, verbose_option
from upr_cli_kit.times import duration
from upr_protocol.errors import InvalidArgumentError

_F = TypeVar("_F", bound=Callable[..., Any])

Row = tuple[bytes, bytes | None]

_PORTION_BYTES = 8 * 2**20
_PORTION_ROWS = 20_000
_SKIPS_SHOWN = 100


def _load_options(function: _F) -> _F:
    retry = click.option(
        "--retry-seconds",
        type=duration(bare=True),
        help="Give up when the server acknowledges nothing for this long. [default: never]",
    )
    return verbose_option(json_option(server_options(durability_option(retry(function)))))


@click.group("load")
def load() -> None:
    """Write mutations, and wait until each is acknowledged, also over restarts of the server."""


@dataclass
class Loader:
    """Writes rows in portions, and counts them; ``write`` returns when a portion is acknowledged.

    Where the server refuses a row, what stands before it is written, and the error says which of ``name`` it is.
    """

    write: Callable[[list[Row]], object]
    name: str = ""
    sets: int = 0
    deletes: int = 0
    _rows: list[Row] = field(default_factory=list)
    _bytes: int = 0

    @property
    def rows(self) -> int:
        return self.sets + self.deletes

    def add(self, row: Row) -> bool:
        """Take a row; returns whether a portion was written."""
        key, value = row
        self._rows.append(row)
        self._bytes += len(key) + len(value or b"")
        if self._bytes < _PORTION_BYTES and len(self._rows) < _PORTION_ROWS:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            self._write(rows)

    def _write(self, rows: list[Row]) -> None:
        try:
            self.write(rows)
        except InvalidArgumentError as error:
            if len(rows) == 1:
                place = f"{self.name}: row {self.rows + 1}: " if self.name else ""
                raise InvalidArgumentError(f"{place}{error.message}", hint=error.hint) from None
            # Halves find the first one in a few writes. What is written again is so in its order.
            half = len(rows) // 2
            self._write(rows[:half])
            self._write(rows[half:])
            return
        deletes = sum(value is None for _, value in rows)
        self.deletes += deletes
        self.sets += len(rows) - deletes


@contextmanager
def _loader(
    target: str,
    bucket: str,
    durability: Durability,
    retry_seconds: float | None,
    name: str = "",
) -> Iterator[Loader]:
    log = logging.getLogger("upr_client")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("upr-cat: %(message)s"))
    log.addHandler(handler)
    # The writer says at this level that it lost the server and tries again.
    log.setLevel(logging.INFO)
    try:
        with open_bucket(target, bucket, retry_seconds=retry_seconds) as written:
            yield Loader(lambda rows: written.write_many(rows, durability), name)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


_FILE = NamedPath(allow_dash=True, dir_okay=False)


_key_field_option = click.option(
    "--key-field",
    help="Take the key from this field; the value is then the whole row, as a JSON object.",
)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], str]]:
    """Open a file, or stdin for -, and give it with the name for errors."""
    with click.open_file(str(file), "rb") as stream:
        yield stream, "stdin" if str(file) == "-" else str(file)


@load.command("jsonl")
@click.argument("file", type=_FILE)
@_key_field_option
@_load_options
def load_jsonl(file: Path, key_field: str | None, **options: Any) -> None:
    """Load {"key": ..., "value": ...} lines from FILE, or - for stdin.

    A null value deletes the key; an object or list is stored as JSON. key_base64 and value_base64 hold what is not UTF-8.
    With --key-field a line may be any object, and is the value as it stands. At a bad line the command ends with status 2;
    what stands before it is written.
    """
    from upr.cli.cat_commands.row_formats import parse_line, parse_record, read_rows

    parse = parse_line if key_field is None else partial(parse_record, key_field=key_field)
    with _opened(file) as (stream, name):
        _load(read_rows(stream, name, parse), name, **options)


@load.command("csv")
@click.argument("file", type=_FILE)
@_key_field_option
@_load_options
def load_csv(file: Path, key_field: str | None, **options: Any) -> None:
    """Load CSV from FILE, or - for stdin; its first line names the columns.

    Without --key-field they are those of 'upr-cat follow -f csv': key and value, and op, which may say delete.
    Bytes stand as they are. At a bad row the command ends with status 2; what stands before it is written.
    """
    from upr.cli.cat_commands.row_formats import read_csv

    with _opened(file) as (stream, name):
        _load(read_csv(stream, name, key_field), name, **options)


@load.command("parquet")
@click.argument("file", type=FILE)
@_key_field_option
@_load_options
def load_parquet(file: Path, key_field: str | None, **options: Any) -> None:
    """Load the rows of a Parquet FILE; needs pyarrow, of the extra upr-stream[arrow].

    Without --key-field the columns are those of 'upr-backup export': key and value, where null deletes the key. At a bad
    row the command ends with status 2; what stands before it is written.
    """
    from upr.cli.cat_commands.row_formats import read_parquet

    _load(read_parquet(file, key_field), str(file), **options)


def _load(
    portions: Iterator[list[Row]],
    name: str,
    durability: Durability,
    retry_seconds: float | None,
    target: str,
    bucket: str,
    as_json: bool,
) -> None:
    """Write portions of rows of a file, and print how many there were."""
    with (
        _loader(target, bucket, durability, retry_seconds, name) as loader,
        closing(Progress("rows")) as progress,
    ):
        for rows in portions:
            for row in rows:
                loader.add(row)
            # Per portion of input, because a pipe may pause here for long.
            loader.flush()
            progress.update(loader.rows)
    _report({"rows": loader.rows, "sets": loader.sets, "deletes": loader.deletes}, as_json)


@load.command("git")
@click.argument("repo", type=NamedPath(file_okay=False))
@_load_options
def load_git(
    repo: Path,
    durability: Durability,
    retry_seconds: float | None,
    target: str,
    bucket: str,
    as_json: bool,
) -> None:
    """Load the first-parent history of REPO's HEAD, from the root commit: key the path, value the blob.

    Each commit is compared with its first parent, without rename detection. Gitlinks are skipped. So are blobs and
    paths above the limits, which are named on stderr; such a path is deleted if it was there before. REPO may be
    bare.
    """
    from upr.cli.cat_commands.git_history import GitHistory, Skipped

    skipped = 0

    def on_skip(what: Skipped) -> None:
        nonlocal skipped
        skipped += 1
        if skipped <= _SKIPS_SHOWN:
            note(f"skipped {what}")

    with (
        closing(GitHistory(repo, on_skip)) as history,
        _loader(target, bucket, durability, retry_seconds) as loader,
        closing(Progress("commits", len(history.commits))) as progress,
    ):
        for change in history.changes():
            if loader.add((change.path, change.blob)):
                progress.update(change.commit, f"{loader.rows} rows")
        loader.flush()
    summary = {
        "commits": len(history.commits),
        "sets": loader.sets,
        "deletes": loader.deletes,
        "skipped": skipped,
    }
    if skipped > _SKIPS_SHOWN:
        note(f"skipped {skipped - _SKIPS_SHOWN} more")
    _report(summary, as_json)


def _report(summary: dict[str, int], as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        note("loaded: " + ", ".join(f"{count} {what}" for what, count in summary.items()))
