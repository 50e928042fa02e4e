"""The command ``upr-backup``, and those below it that take backups, look at them and check them.

Each command imports what it needs when it runs, so that ``--help`` and the usual mistakes are quick.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from upr_backup.cli.retrieval import export, find, restore
from upr_backup.cli.shared import (
    Far,
    given_key,
    open_repository,
    progress_option,
    summary,
    target_of,
    with_key,
)
from upr_backup.cli.upkeep import expire, merge, prune, repair, tag, unlock
from upr_backup.errors import BackupNotFoundError, RepositoryError
from upr_backup.repository import Storage, check_storage, open_storage
from upr_backup.repository.chain import Chain, Link
from upr_backup.repository.documents import Json, Manifest, now_micros, time_text
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Repository
from upr_cli_kit import exit_codes
from upr_cli_kit.options import TARGET, Parsed, login, login_options, open_client, required_target
from upr_cli_kit.output import (
    Group,
    add_examples,
    columns,
    note,
    output_options,
    print_done,
    print_json,
)
from upr_cli_kit.times import duration
from upr_protocol.errors import AlreadyExistsError, InvalidArgumentError, UprError

if TYPE_CHECKING:
    from upr_backup.engines.engine import Engine
    from upr_backup.verify import Comparison


@click.command("init")
@click.option("--target", type=TARGET, envvar="UPR_TARGET", help="HOST:PORT of the server.")
@login_options
@click.option("--bucket", default="default", show_default=True, help="The bucket's name.")
@output_options
@click.pass_obj
def init(storage: Storage, target: str | None, bucket: str, as_json: bool) -> None:
    """Make a repository for a bucket; with a key everything that it is to hold is encrypted."""
    target = required_target(target)
    key = given_key()
    if not storage.is_empty():
        if Repository.is_at(storage):
            raise AlreadyExistsError(f"there is a repository in {storage.location} already")
        raise RepositoryError(
            f"{storage.location} is not empty", hint="a repository has a place of its own"
        )
    from upr_backup.source import go_to_active

    with open_client(target) as client:
        go_to_active(client, bucket)
        found = [info for info in client.admin.buckets() if info.name == bucket]
    if not found:
        raise BackupNotFoundError(
            f"there is no bucket {bucket!r} at {target}", hint="'upr-admin bucket' shows them"
        )
    check_storage(storage)
    made = Repository.create(storage, bucket, found[0].version, target, now_micros(), key)
    kind = "" if key is None else ", encrypted"
    place = f"for bucket {bucket!r} in {storage.location}{kind}"
    print_done(as_json, "created", made.id, place, bucket=bucket, location=storage.location)


_SHOWN = 5
_PROCESSES_MAX = 64


def _settings(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    settings = {}
    for value in values:
        name, separator, content = value.partition("=")
        if not separator or not name.startswith("spark."):
            raise click.BadParameter(f"{value!r} is not spark.NAME=VALUE")
        settings[name] = content
    return settings


_TARGET_OPTION = click.option(
    "--target",
    type=TARGET,
    envvar="UPR_TARGET",
    help="HOST:PORT; else as with init, without credentials.",
)


@click.command("backup")
@click.option("--full", is_flag=True, help="Read everything anew.")
@click.option("--restart", is_flag=True, help="Give up what an unfinished run left.")
@click.option(
    "--skip-unchanged", is_flag=True, help="Take none when nothing changed since the last one."
)
@_TARGET_OPTION
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
@progress_option
@output_options
@click.pass_obj
def backup(
    storage: Storage,
    full: bool,
    restart: bool,
    skip_unchanged: bool,
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
        repository = open_repository(storage)
        return _take(
            repository,
            reader,
            target_of(repository, target),
            every,
            as_json,
            full=full,
            restart=restart,
            skip_unchanged=skip_unchanged,
            group_seqnos=group_seqnos,
            patience=retry_seconds,
        )
    finally:
        reader.close()


def _take(
    repository: Repository,
    engine: "Engine",
    target: str,
    every: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Take a backup with these options of ``Run``, or one each ``every`` seconds; returns the exit status."""
    from upr_backup.backup import Run
    from upr_backup.source import ServerSource, go_to_active

    far = Far()
    rows_read = 0

    def show(rows: int, done: int, total: int) -> None:
        nonlocal rows_read
        rows_read += rows
        words = f"{rows_read} rows read, {done} of {total} groups done"
        far.show("groups read", done, total, words, rows=rows_read)

    with open_client(target) as client:
        go_to_active(client, repository.bucket)
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
            with closing(far), lock:
                manifest = run.backup()
            return _show(manifest, as_json, run.skipped)

        return once() if every is None else _repeat(once, every)


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


def _show(manifest: Manifest, as_json: bool, skipped: bool) -> int:
    """Say what was committed; returns the exit status."""
    if skipped:
        if as_json:
            print_json({**summary(manifest), "skipped": True})
        else:
            click.echo(f"nothing changed since backup {manifest.number}")
        return exit_codes.OK
    if as_json:
        left_out = [
            {"partition": p, "seqno": manifest.entries[p].end, "why": words}
            for p, words in manifest.left_out.items()
        ]
        print_json({**summary(manifest), "left_out": left_out, "skipped": False})
    else:
        click.echo(
            f"backup {manifest.number}: {manifest.kind}, {manifest.rows} rows, {manifest.file_bytes} bytes, "
            f"as of {time_text(manifest.cut_time)}"
        )
    _warn(
        [
            f"partition {p} was left out, the backup has it up to {manifest.entries[p].end}: {words}"
            for p, words in manifest.left_out.items()
        ],
        "were left out, see 'info'",
    )
    _warn(
        [
            f"partition {one.partition} was rolled back from {one.from_seqno} to {one.seqno}: {one.words}"
            for one in manifest.rollbacks
        ],
        "were, see 'info'",
    )
    return exit_codes.WARNINGS if manifest.left_out or manifest.rollbacks else exit_codes.OK


def _warn(lines: list[str], in_all: str) -> None:
    """Warn of the first few partitions, and say how many there are."""
    for line in lines[:_SHOWN]:
        note(f"warning: {line}")
    if len(lines) > _SHOWN:
        note(f"warning: {len(lines)} partitions in all {in_all}")


@click.command("list")
@output_options
@click.pass_obj
def list_command(storage: Storage, as_json: bool) -> int:
    """Show all backups that have not expired, oldest first.

    It looks at most manifests for their size only; 'verify' reads them.
    """
    repository = open_repository(storage)
    damage: list[str] = []
    chain = repository.chain(damage.append, indexed=True)
    tags: dict[int, list[str]] = {}
    for name, one in repository.tags(chain, damage.append).items():
        tags.setdefault(one.number, []).append(f"{name} (pinned)" if one.pin else name)
    for words in damage:
        note(f"damage: {words}")
    status = exit_codes.DAMAGED if damage else exit_codes.OK
    if as_json:
        print_json([{**_listed(chain, k), "tags": tags.get(k.number, [])} for k in chain.links])
        return status
    rows = [
        (
            link.number,
            link.kind + (", merged" if link.number in chain.merged else ""),
            time_text(link.cut_time),
            link.rows,
            link.file_bytes,
            link.rollbacks,
            ", ".join(tags.get(link.number, [])),
        )
        for link in chain.links
    ]
    click.echo(columns(("id", "kind", "as of", "rows", "bytes", "rollbacks", "tags"), rows))
    return status


def _listed(chain: Chain, link: Link) -> Json:
    base = chain.merged.get(link.number)
    merged = None if base is None else {"rows": base.rows, "bytes": base.file_bytes}
    return {**summary(link), "merged": merged}


@click.command("info")
@click.argument("number", metavar="[ID]", type=click.IntRange(min=1), required=False)
@output_options
@click.pass_obj
def info(storage: Storage, number: int | None, as_json: bool) -> None:
    """Show one backup, the newest unless ID says which."""
    repository = open_repository(storage)
    chain = repository.usable(number, indexed=True)
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


def _percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise InvalidArgumentError(f"the share is {text!r}; must be above 0% and at most 100%")
    return percent / 100


PERCENT = Parsed("percent", _percent)


@click.command("verify")
@click.option("--full", is_flag=True, help="Read every data file, and check each row.")
@click.option(
    "--read-data",
    "share",
    type=PERCENT,
    help="The same for this share of the files, as 5%, chosen anew each time.",
)
@click.option("--against-server", is_flag=True, help="Compare the newest backup with the server.")
@_TARGET_OPTION
@login_options
@progress_option
@output_options
@click.pass_obj
def verify_command(
    storage: Storage,
    full: bool,
    share: float | None,
    against_server: bool,
    target: str | None,
    as_json: bool,
) -> int:
    """Look for damage: in the chain, and for files that are missing or of another size.

    With --against-server, also compare each row of the newest backup with the server's, which is read whole.
    """
    from upr_backup.verify import verify

    if full and share is not None:
        raise click.UsageError("--full reads all; --read-data a share")
    share = 1.0 if full else share or 0.0
    far = Far()
    problems = []
    repository = open_repository(storage)
    for problem in verify(repository, share, partial(far.show, "files looked at")):
        problems.append(problem)
        note(f"damage: {problem}")
    far.close()
    document: dict[str, Any] = {"full": full, "read_share": share, "problems": problems}
    comparison = None
    # What is damaged cannot be compared.
    if against_server and not problems:
        comparison = _against_server(repository, target_of(repository, target))
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


def _against_server(repository: Repository, target: str) -> "Comparison":
    from upr_backup.rows import open_point
    from upr_backup.source import go_to_active
    from upr_backup.verify import AgainstServer

    point = open_point(repository)
    with open_client(target) as client, closing(Far()) as far:
        go_to_active(client, repository.bucket)
        work = AgainstServer(point, client, partial(far.show, "partitions compared"))
        comparison = work.run()
    for line in comparison.differences:
        note(f"different: {line}")
    _warn(
        [f"partition {p} is not comparable: {why}" for p, why in comparison.not_comparable.items()],
        "are not comparable",
    )
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
    if not comparison.partitions:
        return f"backup {comparison.number}: nothing was compared with the server"
    words = f"backup {comparison.number}: {comparison.keys} keys in {comparison.partitions} partitions are as at the server"
    if comparison.undecided:
        words += f", or were deleted later, which is not known any more of {comparison.undecided} of them"
    return words


def _version() -> str:
    try:
        return version("upr-stream")
    except PackageNotFoundError:
        return "unknown"


@click.group("upr-backup", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="upr-backup %(version)s")
@click.argument("repository")
@click.pass_context
def main(ctx: click.Context, repository: str) -> None:
    """Take, look at, check and restore incremental backups of a bucket.

    REPOSITORY is a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; credentials and
    endpoint of an object store come from the environment or the machine's role.
    """
    ctx.obj = open_storage(repository)


for command in (
    *(init, backup, list_command, info, verify_command, restore, export, find),
    *(merge, expire, prune, tag, repair, unlock),
):
    main.add_command(with_key(command))
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
        "find": ("/srv/backup find user:1", "/srv/backup find user:1 --at 12"),
        "tag": ("/srv/backup tag release-7 12 --pin", "/srv/backup tag release-7 --remove"),
        "repair": ("/srv/backup repair", "/srv/backup repair --yes"),
        "unlock": ("/srv/backup unlock",),
    },
)
