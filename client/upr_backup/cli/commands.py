"""Commands of ``upr-backup``: take, look at, check and restore incremental backups of a bucket.

Each command imports what it needs when it runs, so that ``--help`` and the usual mistakes are quick.
"""

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

import click

from upr_backup.errors import BackupNotFoundError
from upr_backup.repository import Storage, check_storage, open_storage
from upr_backup.repository.chain import Chain, Keep, Link
from upr_backup.repository.documents import Json, Manifest, now_micros, time_text
from upr_backup.repository.repository import Repository
from upr_cli_kit import exit_codes
from upr_cli_kit.options import PARTITION_SET, TARGET, Parsed, login, login_options, open_client
from upr_cli_kit.output import (
    Group,
    Progress,
    add_examples,
    columns,
    json_option,
    note,
    print_done,
    print_json,
    verbose_option,
)
from upr_cli_kit.times import duration, parse_time
from upr_protocol.errors import AlreadyExistsError, InvalidArgumentError, UprError
from upr_protocol.limits import KEY_BYTES_MAX, parse_duration

if TYPE_CHECKING:
    from upr_backup.engines.engine import Engine
    from upr_backup.rows import Point
    from upr_backup.verify import Comparison


_F = TypeVar("_F", bound=Callable[..., Any])


def restore_point(text: str) -> int | tuple[int]:
    """Return a backup's number, or of a time the microseconds since the epoch in a tuple.

    Raises:
        InvalidArgumentError: it is neither.
    """
    words = text.strip()
    if words.isascii() and words.isdigit() and len(words) <= 10:
        return int(words)
    try:
        return (round(parse_time(text, datetime.now(UTC)).timestamp() * 1e6),)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"{text!r} is neither a backup's number nor a time with its offset from UTC",
            hint="for example 12, 2026-05-01T12:00:00Z or '2h ago'",
        ) from None


def _key_prefix(text: str) -> bytes:
    data = text.encode(errors="surrogateescape")
    if len(data) > KEY_BYTES_MAX:
        raise InvalidArgumentError(
            f"the prefix has {len(data)} bytes; it must have 0 to {KEY_BYTES_MAX}"
        )
    return data


RESTORE_POINT = Parsed("id|time", restore_point)
MICROS = Parsed("duration", lambda text: round(parse_duration(text) * 1e6))
KEY_PREFIX = Parsed("text", _key_prefix)


def keep_options(function: _F) -> _F:
    """Add --keep-last and --keep-within."""
    last = click.option(
        "--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep so many of the newest."
    )
    within = click.option("--keep-within", type=MICROS, help="Keep what is not older, as 30d.")
    return last(within(function))


def keep_or_none(last: int | None, within: int | None) -> Keep | None:
    """Return what the two options say; None when neither was given."""
    return None if last is None and within is None else Keep(last, within)


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


@click.command("init")
@click.option(
    "--target", type=TARGET, required=True, envvar="UPR_TARGET", help="HOST:PORT of the server."
)
@login_options
@click.option("--bucket", default="default", show_default=True, help="The bucket's name.")
@json_option
@verbose_option
@click.pass_obj
def init(storage: Storage, target: str, bucket: str, as_json: bool) -> None:
    """Make a repository for a bucket."""
    if storage.names("chain/"):
        raise AlreadyExistsError(f"there is a repository in {storage.location} already")
    with open_client(target) as client:
        found = [info for info in client.admin.buckets() if info.name == bucket]
    if not found:
        raise BackupNotFoundError(
            f"there is no bucket {bucket!r} at {target}", hint="'upr-admin bucket' shows them"
        )
    check_storage(storage)
    made = Repository.create(storage, bucket, found[0].version, target, created=now_micros())
    place = f"for bucket {bucket!r} in {storage.location}"
    print_done(as_json, "created", made.id, place, bucket=bucket, location=storage.location)


_SHOWN = 5
_PROCESSES_MAX = 64
_INTERRUPT_AGAIN_SECONDS = 0.05


def _settings(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    settings = {}
    for value in values:
        name, separator, content = value.partition("=")
        if not separator or not name.startswith("spark."):
            raise click.BadParameter(f"{value!r} is not spark.NAME=VALUE")
        settings[name] = content
    return settings


@click.command("backup")
@click.option("--full", is_flag=True, help="Read everything anew.")
@click.option("--restart", is_flag=True, help="Give up what an unfinished run left.")
@click.option(
    "--target",
    type=TARGET,
    envvar="UPR_TARGET",
    help="HOST:PORT; else as with init, without credentials.",
)
@login_options
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
    type=duration(0, 86_400, bare=True),
    default="1m",
    show_default=True,
    help="Give up when the server is away for this long.",
)
@click.option("--every", type=duration(low=1), help="Go on taking backups, one each 60s, 5m or 1h.")
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
    retry_seconds: float,
    every: float | None,
    as_json: bool,
) -> int:
    """Take a backup: of what is new, or of everything when there is none yet.

    An interrupted run is gone on with while its cut holds, which is 15 minutes.
    """
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
            _target(repository, target),
            every,
            as_json,
            full=full,
            restart=restart,
            group_seqnos=group_seqnos,
            patience=retry_seconds,
        )
    finally:
        reader.close()


def _target(repository: Repository, target: str | None) -> str:
    """Return the target that was given, else that of the repository, which others may have written."""
    if target is None and login().is_secret:
        raise click.UsageError(
            f"a token or a certificate needs --target; that of the repository is {repository.target}"
        )
    return target or repository.target


def _take(
    repository: Repository,
    engine: "Engine",
    target: str,
    every: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Take a backup, or one each ``every`` seconds; returns the exit status.

    Args:
        options: of ``Run``.
    """
    from upr_backup.backup import Run
    from upr_backup.repository.lock import Lock
    from upr_backup.source import ServerSource

    progress = Progress()
    rows_read = 0

    def show(rows: int, done: int, total: int) -> None:
        nonlocal rows_read
        rows_read += rows
        progress.show(f"{rows_read} rows read, {done} of {total} groups done")

    with open_client(target) as client:
        source = ServerSource(client, repository)
        lock = Lock(repository.storage)
        # The servers of the set, which tasks need as well: the one that was given may go away meanwhile.
        with suppress(UprError):
            client.admin.topology()
        target = ",".join(client.endpoints)
        run = Run(
            repository,
            source,
            engine,
            lock,
            target,
            login().packed(),
            say=note,
            progress=show,
            **options,
        )

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
            return once() if every is None else _repeat(once, every)


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
        from upr_backup.engines.spark import SparkEngine

        return SparkEngine(master, settings)
    if master is not None or settings:
        raise click.UsageError("--master and --conf are of Spark: add --engine spark")
    from upr_backup.engines.local import LocalEngine

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
        left_out = [
            {"partition": p, "seqno": manifest.entries[p].end, "why": words}
            for p, words in manifest.left_out.items()
        ]
        print_json({**summary(manifest), "left_out": left_out})
    else:
        click.echo(
            f"backup {manifest.number}: {manifest.kind}, {manifest.rows} rows, {manifest.file_bytes} bytes, "
            f"as of {time_text(manifest.cut_time)}"
        )
    for partition, words in list(manifest.left_out.items())[:_SHOWN]:
        end = manifest.entries[partition].end
        note(f"warning: partition {partition} was left out, the backup has it up to {end}: {words}")
    if len(manifest.left_out) > _SHOWN:
        note(f"warning: {len(manifest.left_out)} partitions in all were left out, see 'info'")
    if not manifest.rollbacks:
        return exit_codes.WARNINGS if manifest.left_out else exit_codes.OK
    for rollback in manifest.rollbacks[:_SHOWN]:
        note(
            f"warning: partition {rollback.partition} was rolled back from {rollback.from_seqno} to "
            f"{rollback.seqno}: {rollback.words}"
        )
    if len(manifest.rollbacks) > _SHOWN:
        note(f"warning: {len(manifest.rollbacks)} partitions in all were, see 'info'")
    return exit_codes.WARNINGS


@click.command("list")
@json_option
@verbose_option
@click.pass_obj
def list_command(storage: Storage, as_json: bool) -> None:
    """Show all backups that have not expired, oldest first."""
    chain = Repository.open(storage).chain()
    if as_json:
        print_json([_listed(chain, link) for link in chain.links])
        return
    rows = [
        (
            link.number,
            link.kind + (", merged" if link.number in chain.merged else ""),
            time_text(link.cut_time),
            link.rows,
            link.file_bytes,
            link.rollbacks,
        )
        for link in chain.links
    ]
    click.echo(columns(("id", "kind", "as of", "rows", "bytes", "rollbacks"), rows))


def _listed(chain: Chain, link: Link) -> Json:
    base = chain.merged.get(link.number)
    merged = None if base is None else {"rows": base.rows, "bytes": base.file_bytes}
    return {**summary(link), "merged": merged}


@click.command("info")
@click.argument("number", metavar="[ID]", type=click.IntRange(min=1), required=False)
@json_option
@verbose_option
@click.pass_obj
def info(storage: Storage, number: int | None, as_json: bool) -> None:
    """Show one backup, the newest unless ID says which."""
    repository = Repository.open(storage)
    chain = repository.chain()
    manifest = chain.by_number(number or chain.last)
    base = chain.base(manifest.number)
    document = {
        "repository": repository.id,
        "bucket": repository.bucket,
        "bucket_version": repository.bucket_version,
        **_listed(chain, chain.link(manifest.number)),
        "base": f"{base.kind} {base.number}",
        "needs": [*range(base.number, manifest.number + 1)],
    }
    if as_json:
        document["left_out"] = {str(p): words for p, words in manifest.left_out.items()}
        document["rollback_list"] = [rollback._asdict() for rollback in manifest.rollbacks]
        document["partitions"] = [_partition(manifest, p) for p in manifest.entries]
        print_json(document)
        return
    document["merged"] = "no" if manifest.number not in chain.merged else "yes"
    alone = base.number == manifest.number
    document["needs"] = str(base.number) if alone else f"{base.number} to {manifest.number}"
    click.echo(columns(("field", "value"), ((k, str(v)) for k, v in document.items())))
    if manifest.rollbacks:
        rows = [(r.partition, r.from_seqno, r.seqno, r.words) for r in manifest.rollbacks]
        click.echo("\n" + columns(("partition", "had", "kept", "why"), rows))
    if manifest.left_out:
        left = [(p, manifest.entries[p].end, words) for p, words in manifest.left_out.items()]
        click.echo("\n" + columns(("left out", "is there up to", "why"), left))


def _partition(manifest: Manifest, partition: int) -> Json:
    entry = manifest.entries[partition]
    failover_id = entry.position["failover_id"] if entry.position else None
    return {
        "partition": partition,
        "from": entry.start,
        "to": entry.end,
        "cut": entry.cut,
        "rows": entry.rows,
        "failover_id": failover_id,
    }


@click.command("verify")
@click.option("--full", is_flag=True, help="Read every data file, and check each row.")
@click.option("--against-server", is_flag=True, help="Compare the newest backup with the server.")
@click.option(
    "--target",
    type=TARGET,
    envvar="UPR_TARGET",
    help="HOST:PORT; else as with init, without credentials.",
)
@login_options
@json_option
@verbose_option
@click.pass_obj
def verify_command(
    storage: Storage, full: bool, against_server: bool, target: str | None, as_json: bool
) -> int:
    """Look for damage: in the chain, and for files that are missing or of another size.

    With --against-server, also compare each row of the newest backup with the server's, which is read whole.
    """
    from upr_backup.verify import verify

    progress = Progress()
    problems = []
    repository = Repository.open(storage)
    for problem in verify(
        repository, full, lambda done, total: progress.show(f"{done} of {total} files read")
    ):
        problems.append(problem)
        note(f"damage: {problem}")
    progress.close()
    document: dict[str, Any] = {"full": full, "problems": problems}
    comparison = None
    # What is damaged cannot be compared.
    if against_server and not problems:
        comparison = _against_server(storage, _target(repository, target))
        problems += comparison.differences
        document["against_server"] = _document(comparison)
    if as_json:
        print_json(document)
    elif problems:
        click.echo(f"{len(problems)} problems")
    else:
        click.echo("all is well" if comparison is None else _words(comparison))
    if problems:
        return exit_codes.DAMAGED
    return exit_codes.WARNINGS if comparison and comparison.not_comparable else exit_codes.OK


def _against_server(storage: Storage, target: str) -> "Comparison":
    from upr_backup.rows import open_point
    from upr_backup.verify import AgainstServer, not_comparable_lines

    point = open_point(storage)
    progress = Progress()
    with open_client(target) as client:
        work = AgainstServer(
            point,
            client,
            lambda done, total: progress.show(f"{done} of {total} partitions compared"),
        )
        try:
            comparison = work.run()
        finally:
            progress.close()
    for line in comparison.differences:
        note(f"different: {line}")
    for line in not_comparable_lines(comparison.not_comparable):
        note(f"warning: {line}")
    return comparison


def _document(comparison: "Comparison") -> dict[str, Any]:
    return {
        "id": comparison.number,
        "partitions": comparison.partitions,
        "keys": comparison.keys,
        "undecided": comparison.undecided,
        "differences": comparison.differences,
        "not_comparable": [
            {"partition": p, "why": why} for p, why in comparison.not_comparable.items()
        ],
    }


def _words(comparison: "Comparison") -> str:
    words = f"backup {comparison.number}: {comparison.keys} keys in {comparison.partitions} partitions are as at the server"
    if comparison.undecided:
        words += f", or were deleted later, which is not known any more of {comparison.undecided} of them"
    return words


_VERIFIED = {
    "equal": "read back, and equal",
    "contained": "read back, and all there",
    "not verified": "not read back",
}


@click.command("restore")
@click.option(
    "--target", type=TARGET, required=True, envvar="UPR_TARGET", help="HOST:PORT to write to."
)
@login_options
@click.option("--bucket", help="The bucket to write into; else of the name that was backed up.")
@click.option("--at", type=RESTORE_POINT, help="A backup's ID, or a time: the last one before it.")
@click.option("--partitions", type=PARTITION_SET, help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KEY_PREFIX, default=b"", help="Only keys that begin with it.")
@click.option("--into-non-empty", is_flag=True, help="Write also when the bucket holds data.")
@click.option("--no-verify", is_flag=True, help="Do not read the bucket back to compare.")
@json_option
@verbose_option
@click.pass_obj
def restore(
    storage: Storage,
    target: str,
    bucket: str | None,
    at: Any,
    partitions: list[int] | None,
    key_prefix: bytes,
    into_non_empty: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Write the state at a backup, the newest unless --at says which, into an empty bucket.

    Then the bucket is read back and compared, key by key. One that was interrupted is gone on with when it is started
    with the same options.
    """
    from upr_backup.restore import Restore
    from upr_backup.rows import open_point

    point = open_point(storage, at, partitions)
    progress = Progress()
    with open_client(target) as client:
        work = Restore(
            point,
            client,
            client.bucket(point.repository.bucket if bucket is None else bucket),
            key_prefix,
            into_non_empty,
            verify=not no_verify,
            say=note,
            progress=lambda what, done, total: progress.show(
                f"{done} of {total} partitions {what}"
            ),
        )
        try:
            done = work.run()
        finally:
            progress.close()
    number, left_out = point.manifest.number, told_left_out(point)
    if as_json:
        document = {"id": number, **done.written._asdict()}
        print_json(
            {
                **document,
                "resumed": done.resumed,
                "verified": done.verified,
                "left_out": left_out,
            }
        )
    else:
        click.echo(
            f"restored backup {number}: {done.written.keys} keys, {done.written.data_bytes} bytes; "
            f"{_VERIFIED[done.verified]}"
        )


@click.command("export")
@click.option(
    "--format", "kind", type=click.Choice(["parquet", "delta"]), required=True, help="Of the table."
)
@click.option("--to", required=True, metavar="PATH|URL", help="Where it is made.")
@click.option("--at", type=RESTORE_POINT, help="A backup's ID, or a time: the last one before it.")
@click.option("--partitions", type=PARTITION_SET, help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KEY_PREFIX, default=b"", help="Only keys that begin with it.")
@click.option("--with-deletes", is_flag=True, help="Also deleted keys; they have no value.")
@click.option("--utf8", is_flag=True, help="Keys and values as strings, which all must be UTF-8.")
@click.option("--overwrite", is_flag=True, help="Replace a Delta table that is there.")
@json_option
@verbose_option
@click.pass_obj
def export(
    storage: Storage,
    kind: str,
    to: str,
    at: Any,
    partitions: list[int] | None,
    key_prefix: bytes,
    with_deletes: bool,
    utf8: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the state at a backup, the newest unless --at says which, as a table: key, value, partition, seqno, time."""
    if overwrite and kind != "delta":
        raise click.UsageError("--overwrite is for --format delta; give a place that is empty")
    from upr_backup.export import Export, to_delta, to_parquet
    from upr_backup.rows import open_point

    point = open_point(storage, at, partitions)
    progress = Progress()
    work = Export(
        point,
        key_prefix,
        with_deletes,
        utf8,
        lambda done, total: progress.show(f"{done} of {total} partitions written"),
    )
    try:
        done = to_parquet(work, to) if kind == "parquet" else to_delta(work, to, overwrite)
    finally:
        progress.close()
    number, left_out = point.manifest.number, told_left_out(point)
    if as_json:
        document = {"id": number, "format": kind, "to": to, **done._asdict()}
        print_json({**document, "left_out": left_out})
    else:
        click.echo(f"exported backup {number} to {to}: {done.rows} keys, {done.data_bytes} bytes")


@click.command("merge")
@click.option("--to", type=click.IntRange(min=1), metavar="ID", help="Fold everything up to this.")
@keep_options
@json_option
@verbose_option
@click.pass_obj
def merge(
    storage: Storage,
    to: int | None,
    keep_last: int | None,
    keep_within: int | None,
    as_json: bool,
) -> None:
    """Fold all backups up to one into a base, from which it and later ones are restored faster.

    Without --to it is the newest possible one, but for the newest two; with --keep-last or --keep-within the newest
    possible one that lets 'expire' with the same options drop what is before. Nothing is removed or replaced.
    """
    from upr_backup.repository.lock import Lock
    from upr_backup.retention import FileFold, Merge, chosen

    keep = keep_or_none(keep_last, keep_within)
    if to is not None and keep is not None:
        raise click.UsageError("--to does not go together with --keep-last and --keep-within")
    repository = Repository.open(storage)
    storage.sweep()
    progress = Progress()
    with Lock(storage) as lock:
        chain = repository.chain()
        number = chosen(chain, to, keep, now_micros())
        base = None
        if number is not None:
            work = Merge(
                repository,
                FileFold(storage, lock.keep),
                lock,
                lambda done, total: progress.show(f"{done} of {total} partitions merged"),
            )
            try:
                base = work.merge(chain, number)
            finally:
                progress.close()
    if as_json:
        print_json({"merged": None if base is None else summary(base)})
    elif base is not None:
        click.echo(f"merged backup {number}: {base.rows} rows, {base.file_bytes} bytes")
    else:
        click.echo("there is nothing to merge" if to is None else f"backup {to} is a base already")


@click.command("expire")
@keep_options
@json_option
@verbose_option
@click.pass_obj
def expire(storage: Storage, keep_last: int | None, keep_within: int | None, as_json: bool) -> None:
    """Let old restore points go: those that neither --keep-last nor --keep-within keeps; the newest stays always.

    The ones between the oldest that is kept and the base beneath it, a full backup or a merged one, stay with it.
    Nothing is removed from the storage; 'prune' does that.
    """
    from upr_backup.repository.lock import Lock
    from upr_backup.retention import beginning
    from upr_backup.retention import expire as decide

    keep = keep_or_none(keep_last, keep_within)
    if keep is None:
        raise click.UsageError("say what stays: --keep-last N or --keep-within 30d, or both")
    repository = Repository.open(storage)
    now = now_micros()
    with Lock(storage):
        chain = repository.chain()
        begun = chain.first
        if chain.links:
            oldest = keep.oldest(chain, now)
            first = beginning(chain, oldest) or begun
            if first > begun:
                decide(repository, chain, first, now)
        else:
            oldest = first = begun
    if first < oldest:
        note(
            f"backup {oldest} is the oldest to be kept, and rests on {first}: more can go after "
            f"'merge --to {oldest}', or with the next full backup"
        )
    if as_json:
        print_json({"first": first, "expired": first - begun})
    elif first > begun:
        click.echo(f"expired: {_range(begun, first - 1)}; there are {first} to {chain.last}")
    else:
        click.echo("nothing expires")


def _range(low: int, high: int) -> str:
    return f"backup {low}" if low == high else f"backups {low} to {high}"


@click.command("prune")
@click.option(
    "--grace",
    type=MICROS,
    default="24h",
    show_default=True,
    help="How long what expired, and what killed runs left, stays.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@verbose_option
@click.pass_obj
def prune(storage: Storage, grace: int, dry_run: bool, as_json: bool) -> None:
    """Remove from the storage what has expired, and what killed runs and merges left.

    After an expiry that left a merged base it takes one more backup before anything of that can be removed.
    """
    from upr_backup.repository.lock import Lock
    from upr_backup.retention import plan
    from upr_backup.retention import prune as remove

    repository = Repository.open(storage)
    storage.sweep()
    progress = Progress()
    with Lock(storage) as lock:
        made = plan(repository, repository.chain(), grace, now_micros())
        if not dry_run:
            try:
                for done, _ in enumerate(remove(repository, made), 1):
                    lock.keep()
                    progress.show(f"{done} of {len(made.doomed)} objects removed")
            finally:
                progress.close()
    if made.waiting:
        note(
            f"what is before backup {made.waiting} goes after one more backup: "
            "a run that began before the expiry may still rest on it"
        )
    totals = made.totals()
    if as_json:
        listed = [one._asdict() for one in made.doomed] if dry_run else []
        print_json({"dry_run": dry_run, "first": made.first or None, **totals, "objects": listed})
        return
    if dry_run:
        for one in made.doomed:
            click.echo(one.name)
    words = ", ".join(
        f"{total['objects']} {what.replace('_', ' ')} of {total['bytes']} bytes"
        for what, total in totals.items()
        if total["objects"]
    )
    said = "would remove" if dry_run else "removed"
    note(f"{said} {words}" if words else "there is nothing to remove")


def _version() -> str:
    try:
        return version("upr-stream")
    except PackageNotFoundError:
        return "unknown"


@click.group("upr-backup", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="upr-backup %(version)s")
@click.argument("repository")
@verbose_option
@click.pass_context
def main(ctx: click.Context, repository: str) -> None:
    """Take, look at, check and restore incremental backups of a bucket.

    REPOSITORY is a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; credentials and
    endpoint of an object store come from the environment or the machine's role.
    """
    ctx.obj = open_storage(repository)


main.add_command(init)
main.add_command(backup)
main.add_command(list_command)
main.add_command(info)
main.add_command(verify_command)
main.add_command(restore)
main.add_command(export)
main.add_command(merge)
main.add_command(expire)
main.add_command(prune)
add_examples(
    main,
    {
        "": ("/srv/backup init --target 127.0.0.1:7711", "/srv/backup backup", "/srv/backup list"),
        "init": (
            "/srv/backup init --target 127.0.0.1:7711 --bucket orders",
            "s3://backups/orders init --target 127.0.0.1:7711 --bucket orders",
        ),
        "backup": ("/srv/backup backup", "/srv/backup backup --every 5m"),
        "list": ("/srv/backup list", "/srv/backup list --json"),
        "info": ("/srv/backup info", "/srv/backup info 12"),
        "verify": (
            "/srv/backup verify --full",
            "/srv/backup verify --against-server --target 127.0.0.1:7711",
        ),
        "restore": (
            "/srv/backup restore --target 127.0.0.1:7711 --bucket orders-restored",
            "/srv/backup restore --target 127.0.0.1:7711 --bucket before --at '2h ago'",
        ),
        "export": (
            "/srv/backup export --format parquet --to /srv/table --at 12",
            "/srv/backup export --format delta --to /srv/table --utf8 --overwrite",
        ),
        "merge": ("/srv/backup merge", "/srv/backup merge --to 12"),
        "expire": ("/srv/backup expire --keep-last 100 --keep-within 30d",),
        "prune": ("/srv/backup prune --dry-run", "/srv/backup prune"),
    },
)
