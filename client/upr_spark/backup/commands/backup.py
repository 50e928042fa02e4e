"""``upr-backup backup``."""

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from upr_protocol.errors import UprError
from upr_spark.backup import exit_codes
from upr_spark.backup.commands.common import open_client, summary
from upr_spark.backup.manifest import Manifest
from upr_spark.backup.options import Address, Span
from upr_spark.backup.output import (
    Command,
    Progress,
    json_option,
    note,
    print_json,
    time_text,
    verbose_option,
)
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage

if TYPE_CHECKING:
    from upr_spark.backup.engines import Engine

_SHOWN_ROLLBACKS = 5
_PROCESSES_MAX = 64
_SHORTEST_MICROS = 1_000_000
_INTERRUPT_AGAIN_SECONDS = 0.05


def _settings(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    settings = {}
    for value in values:
        name, separator, content = value.partition("=")
        if not separator or not name.startswith("spark."):
            raise click.BadParameter(f"{value!r} is not spark.NAME=VALUE")
        settings[name] = content
    return settings


@click.command("backup", cls=Command)
@click.option("--full", is_flag=True, help="Read everything anew.")
@click.option("--restart", is_flag=True, help="Give up what an unfinished run left.")
@click.option("--target", type=Address(), envvar="UPR_TARGET", help="HOST:PORT; else as with init.")
@click.option(
    "--engine",
    type=click.Choice(["local", "spark"]),
    default="local",
    show_default=True,
    help="Who reads: processes of this machine, or Spark.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, _PROCESSES_MAX),
    help="Of the engine local; 1 reads in this process.  [default: one a CPU, at most 4]",
)
@click.option("--master", help="Of Spark.  [default: local[*,4]]")
@click.option(
    "--conf", multiple=True, callback=_settings, help="A setting of Spark, spark.NAME=VALUE."
)
@click.option(
    "--group-seqnos",
    type=click.IntRange(min=1),
    help="About how many seqnos a data file spans.  [default: by how much there is]",
)
@click.option(
    "--retry-seconds",
    type=click.IntRange(0, 86_400),
    default=60,
    show_default=True,
    help="Give up when the server is away for this long.",
)
@click.option("--every", type=Span(), help="Go on taking backups, one each 60s, 5m or 1h.")
@json_option
@verbose_option
@click.pass_obj
def backup(
    storage: Storage,
    full: bool,
    restart: bool,
    target: str | None,
    engine: str,
    processes: int | None,
    master: str | None,
    conf: dict[str, str],
    group_seqnos: int | None,
    retry_seconds: int,
    every: int | None,
    as_json: bool,
) -> int:
    """Take a backup: of what is new, or of everything when there is none yet.

    An interrupted run is gone on with while its cut holds, which is 15 minutes.
    """
    if every is not None and every < _SHORTEST_MICROS:
        raise click.UsageError("--every is at least 1s")
    if full and every is not None:
        raise click.UsageError(
            "--full and --every do not go together: each turn would read everything"
        )
    reader = _engine(engine, processes, master, conf)
    try:
        repository = Repository.open(storage)
        return _take(
            repository,
            reader,
            target or repository.target,
            every,
            as_json,
            full=full,
            restart=restart,
            group_seqnos=group_seqnos,
            patience=retry_seconds,
        )
    finally:
        reader.close()


def _take(
    repository: Repository,
    engine: "Engine",
    target: str,
    every: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Take a backup, or one each ``every`` microseconds; returns the exit status.

    Args:
        options: of ``Run``.
    """
    from upr_spark.backup.lock import Lock
    from upr_spark.backup.run import Run
    from upr_spark.backup.server import ServerSource

    progress = Progress()
    rows_read = 0

    def show(rows: int, done: int, total: int) -> None:
        nonlocal rows_read
        rows_read += rows
        progress.show(f"{rows_read} rows read, {done} of {total} groups done")

    with open_client(target) as client:
        source = ServerSource(client.bucket(repository.bucket), repository)
        lock = Lock(repository.storage)
        run = Run(repository, source, engine, lock, target, say=note, progress=show, **options)

        def once() -> int:
            nonlocal rows_read
            rows_read = 0
            repository.storage.sweep()
            try:
                with lock:
                    manifest = run.backup()
            finally:
                progress.close()
            return _show(manifest, as_json)

        with _no_interrupt_lost():
            return once() if every is None else _repeat(once, every / 1e6)


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Repeat a Ctrl-C that came in the middle of a callback of the interpreter, which nothing can be raised out of."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(_INTERRUPT_AGAIN_SECONDS, _thread.interrupt_main).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _engine(
    engine: str, processes: int | None, master: str | None, settings: dict[str, str]
) -> "Engine":
    if engine == "spark":
        if processes is not None:
            raise click.UsageError(
                "--processes is of the engine local; Spark takes --master local[N]"
            )
        from upr_spark.backup.engines.spark import SparkEngine

        return SparkEngine(master, settings)
    if master is not None or settings:
        raise click.UsageError("--master and --conf are of Spark: add --engine spark")
    from upr_spark.backup.engines.local import LocalEngine

    return LocalEngine(processes or min(4, os.cpu_count() or 1))


def _repeat(once: Callable[[], int], seconds: float) -> int:
    """Take backups until it is interrupted. What may be over at the next turn is said, and does not end it."""
    while True:
        began = time.monotonic()
        try:
            once()
        except (UprError, OSError) as error:
            if isinstance(error, UprError) and not error.retriable:
                raise
            note(f"error: {error}; trying again in {seconds:.0f} s")
        time.sleep(max(0.0, began + seconds - time.monotonic()))


def _show(manifest: Manifest, as_json: bool) -> int:
    """Say what was committed; returns the exit status."""
    if as_json:
        print_json(summary(manifest))
    else:
        click.echo(
            f"backup {manifest.number}: {manifest.kind}, {manifest.rows} rows, {manifest.file_bytes} bytes, "
            f"as of {time_text(manifest.cut_time)}"
        )
    if not manifest.rollbacks:
        return exit_codes.OK
    for rollback in manifest.rollbacks[:_SHOWN_ROLLBACKS]:
        note(
            f"warning: partition {rollback.partition} was rolled back from {rollback.from_seqno} to "
            f"{rollback.seqno}: {rollback.words}"
        )
    if len(manifest.rollbacks) > _SHOWN_ROLLBACKS:
        note(f"warning: {len(manifest.rollbacks)} partitions in all were, see 'info'")
    return exit_codes.WARNINGS
