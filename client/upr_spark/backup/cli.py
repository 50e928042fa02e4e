"""``upr-backup``: take, look at, check and restore incremental backups of a bucket."""

import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upr_spark.backup import exit_codes
from upr_spark.backup.chain import Manifest, needed
from upr_spark.backup.documents import Json
from upr_spark.backup.errors import (
    BackupNotFoundError,
    NotEmptyError,
    RepositoryDamagedError,
    RepositoryError,
)
from upr_spark.backup.options import Address, KeyPrefix, PartitionSet, RestorePoint
from upr_spark.backup.output import (
    CommandError,
    Group,
    Progress,
    columns,
    json_option,
    note,
    print_json,
    time_text,
    verbose_option,
)
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import LocalStorage

if TYPE_CHECKING:
    from upr_client import Client

_SHOWN_ROLLBACKS = 5


def _client(target: str) -> "Client":
    from upr_client import Client

    return Client(target, retry_seconds=60.0)


def _version() -> str:
    try:
        return version("upr-stream")
    except PackageNotFoundError:
        return "unknown"


@click.group("upr-backup", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="upr-backup %(version)s")
@click.argument("repository", type=click.Path(path_type=Path, file_okay=False))
@verbose_option
@click.pass_context
def main(ctx: click.Context, repository: Path) -> None:
    """Take, look at, check and restore incremental backups of a bucket. REPOSITORY is a folder."""
    ctx.obj = LocalStorage(repository)


@main.command("init")
@click.option(
    "--target", type=Address(), required=True, envvar="UPR_TARGET", help="HOST:PORT of the server."
)
@click.option("--bucket", default="default", show_default=True, help="The bucket's name.")
@verbose_option
@click.pass_obj
def init(storage: LocalStorage, target: str, bucket: str) -> None:
    """Make a repository for a bucket."""
    if storage.names("chain/"):
        raise RepositoryError(f"there is a repository in {storage.root} already")
    with _client(target) as client:
        found = [info for info in client.buckets() if info.name == bucket]
    if not found:
        raise BackupNotFoundError(
            f"there is no bucket {bucket!r} at {target}", hint="upr-admin bucket list shows all"
        )
    made = Repository.create(
        storage, bucket, found[0].version, target, created=round(time.time() * 1e6)
    )
    note(f"made repository {made.id} for bucket {bucket!r} in {storage.root}")


@main.command("backup")
@click.option("--full", is_flag=True, help="Read everything anew.")
@click.option("--target", type=Address(), envvar="UPR_TARGET", help="HOST:PORT; else as with init.")
@json_option
@verbose_option
@click.pass_obj
def backup(storage: LocalStorage, full: bool, target: str | None, as_json: bool) -> int:
    """Take a backup: of what is new, or of everything when there is none yet.

    An interrupted run is gone on with while its cut holds, which is 15 minutes.
    """
    from upr_spark.backup.lock import Lock
    from upr_spark.backup.run import Run
    from upr_spark.backup.server import ServerSource

    repository = Repository.open(storage)
    storage.sweep()
    progress = Progress()
    read = [0, 0, 0]

    lock = Lock(storage)

    def rows(count: int) -> None:
        lock.keep()
        read[0] += count
        progress.show(f"{read[0]} rows read, {read[1]} of {read[2]} groups done")

    def groups(done: int, total: int) -> None:
        read[1:] = [done, total]

    with lock, _client(target or repository.target) as client:
        source = ServerSource(client.bucket(repository.bucket), repository, rows)
        run = Run(repository, source, lock, full, say=note, progress=groups)
        try:
            manifest = run.backup()
        finally:
            progress.close()
    if as_json:
        print_json(_summary(manifest))
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


@main.command("list")
@json_option
@verbose_option
@click.pass_obj
def list_command(storage: LocalStorage, as_json: bool) -> None:
    """Show all backups, oldest first."""
    chain = Repository.open(storage).chain()
    if as_json:
        print_json([_summary(manifest) for manifest in chain])
        return
    rows = [
        (m.number, m.kind, time_text(m.cut_time), m.rows, m.file_bytes, len(m.rollbacks))
        for m in chain
    ]
    click.echo(columns(("id", "kind", "as of", "rows", "bytes", "rollbacks"), rows))


@main.command("info")
@click.argument("number", metavar="[ID]", type=click.IntRange(min=1), required=False)
@json_option
@verbose_option
@click.pass_obj
def info(storage: LocalStorage, number: int | None, as_json: bool) -> None:
    """Show one backup, the newest unless ID says which."""
    repository = Repository.open(storage)
    chain = repository.chain()
    wanted = needed(chain, number or len(chain))
    manifest = wanted[-1]
    document = {
        "repository": repository.id,
        "bucket": repository.bucket,
        "bucket_version": repository.bucket_version,
        **_summary(manifest),
        "needs": [m.number for m in wanted],
    }
    if as_json:
        document["rollback_list"] = [rollback._asdict() for rollback in manifest.rollbacks]
        document["partitions"] = [_partition(manifest, p) for p in manifest.entries]
        print_json(document)
        return
    document["needs"] = ", ".join(str(m.number) for m in wanted)
    click.echo(columns(("field", "value"), ((k, str(v)) for k, v in document.items())))
    if manifest.rollbacks:
        rows = [(r.partition, r.from_seqno, r.seqno, r.words) for r in manifest.rollbacks]
        click.echo("\n" + columns(("partition", "had", "kept", "why"), rows))


@main.command("verify")
@click.option("--full", is_flag=True, help="Read every data file, and check each row.")
@json_option
@verbose_option
@click.pass_obj
def verify_command(storage: LocalStorage, full: bool, as_json: bool) -> int:
    """Look for damage: in the chain, and for files that are missing or of another size."""
    from upr_spark.backup.verify import verify

    progress = Progress()
    problems = []
    repository = Repository.open(storage)
    for problem in verify(
        repository, full, lambda done, total: progress.show(f"{done} of {total} files read")
    ):
        problems.append(problem)
        note(f"damage: {problem}")
    progress.close()
    if as_json:
        print_json({"full": full, "problems": problems})
    else:
        click.echo(f"{len(problems)} problems" if problems else "all is well")
    return exit_codes.DAMAGED if problems else exit_codes.OK


@main.command("restore")
@click.option(
    "--target", type=Address(), required=True, envvar="UPR_TARGET", help="HOST:PORT to write to."
)
@click.option("--bucket", help="The bucket to write into; else of the name that was backed up.")
@click.option("--at", type=RestorePoint(), help="A backup's ID, or a time: the last one before it.")
@click.option("--partitions", type=PartitionSet(), help="Only these, as 0-63,512.")
@click.option("--key-prefix", type=KeyPrefix(), default=b"", help="Only keys that begin with it.")
@click.option("--into-non-empty", is_flag=True, help="Write also when the bucket holds data.")
@json_option
@verbose_option
@click.pass_obj
def restore(
    storage: LocalStorage,
    target: str,
    bucket: str | None,
    at: Any,
    partitions: list[int] | None,
    key_prefix: bytes,
    into_non_empty: bool,
    as_json: bool,
) -> None:
    """Write the state at a backup, the newest unless --at says which, into an empty bucket."""
    from upr_spark.backup.restore import Restore
    from upr_spark.backup.verify import check_files

    repository = Repository.open(storage)
    damage: list[str] = []
    chain = repository.chain(damage.append)
    number = _number(chain, at)
    if damage and (not isinstance(at, int) or number > len(chain)):
        raise RepositoryDamagedError(
            damage[0], hint=f"backups 1 to {len(chain)} can be restored, with --at ID"
        )
    wanted = needed(chain, number)
    check_files(storage, {file for manifest in wanted for file in manifest.files})
    progress = Progress()
    with _client(target) as client:
        work = Restore(
            storage,
            client.bucket(bucket or repository.bucket),
            into_non_empty,
            lambda done, total: progress.show(f"{done} of {total} partitions restored"),
        )
        try:
            done = work.run(chain, number, partitions, key_prefix)
        except NotEmptyError as error:
            raise CommandError(str(error), exit_codes.REFUSED) from error
        finally:
            progress.close()
    if as_json:
        print_json({"id": number, **done._asdict()})
    else:
        click.echo(f"restored backup {number}: {done.keys} keys, {done.data_bytes} bytes")


def _number(chain: list[Manifest], at: Any) -> int:
    if at is None:
        return len(chain)
    if isinstance(at, int):
        return at
    before = [manifest.number for manifest in chain if manifest.cut_time <= at[0]]
    if not before:
        raise BackupNotFoundError(
            f"there is no backup from {time_text(at[0])} or before", hint="'list' shows all"
        )
    return max(before)


def _summary(manifest: Manifest) -> Json:
    return {
        "id": manifest.number,
        "kind": manifest.kind,
        "as_of": time_text(manifest.cut_time),
        "started": time_text(manifest.started),
        "finished": time_text(manifest.finished),
        "rows": manifest.rows,
        "files": len(manifest.files),
        "bytes": manifest.file_bytes,
        "rollbacks": len(manifest.rollbacks),
    }


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
