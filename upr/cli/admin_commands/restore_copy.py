"""``upr-admin restore-copy``: make an old copy of a data directory fit to be served."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upr_cli_kit.options import NamedPath
from upr_cli_kit.output import confirm, note, output_options, print_done, print_json
from upr_protocol.errors import DataDirectoryError, UprError
from upr_protocol.failover import format_failover_id
from upr_protocol.limits import FAILOVER_LOG_MAX

if TYPE_CHECKING:
    from upr.engine.recovery import Recovered
    from upr.storage.directory import DataDirectory
    from upr.storage.store import Identity, Store
    from upr_protocol.block import U64


_QUESTION = (
    "Every client of this copy will be rolled back to what the copy holds. "
    "This must be a copy, and the original must not be served any more. Go on?"
)


def recovered(
    folder: Path, store: "Store", identity: "Identity", proven: "U64 | None", *, needed: bool
) -> "tuple[Recovered, int]":
    """Recover a bucket in memory; return that, and how many bytes of its journal were torn. See ``recover`` and ``replay``."""
    from upr.engine.recovery import recover
    from upr.service.buckets.bucket_service import new_id
    from upr.service.clock import Clock
    from upr.storage.journal import Journal

    with closing(Journal(folder / "journal", identity.version)) as journal:
        result = recover(
            store.partitions(),
            store.heads,
            journal.replay(needed=needed),
            proven=proven,
            new_id=new_id,
            now=Clock().now(),
            # How many the server is told to keep is not known here: it drops the oldest when it adds one itself.
            log_records=FAILOVER_LOG_MAX,
        )
        return result, journal.torn_bytes


def _restore(folder: Path) -> dict[str, Any]:
    """Recover one bucket as after an unclean stop; everything is durable when it returns.

    A run that is cut short leaves a bucket as it was, or done; running again adds another record.
    """
    from upr import failpoints
    from upr.engine.partitions import ACTIVE
    from upr.storage.store import Store
    from upr.storage.undone import forget_future

    with closing(Store(folder / "store")) as store:
        identity = store.identity()
        if identity is None:
            raise DataDirectoryError(f"{folder} holds a store without an identity")
        result, torn_bytes = recovered(folder, store, identity, None, needed=False)
        table = result.partitions
        active = [p for p in result.rows if table.state[p] == ACTIVE]
        records = {p: table.logs[p].newest for p in active}
        failpoints.hit("restore.before_forget")
        store.put_aside(result.aside)
        # First what speaks of the lost future, then the records: cut short in between, the next run does the rest.
        forgotten = forget_future(store, {p: r.seqno for p, r in records.items()})
        failpoints.hit("restore.before_records")
        store.write_recovery(
            result.rows, result.blocks, result.cut_off, result.highs, result.producers
        )
        failpoints.hit("restore.after_records")
    return {
        "bucket": identity.name,
        "bucket_version": f"{identity.version:016x}",
        "records": [
            {
                "partition": p,
                "failover_id": format_failover_id(r.failover_id),
                "seqno": r.seqno,
                "records": len(table.logs[p]),
            }
            for p, r in records.items()
        ],
        "not_active": len(result.rows) - len(active),
        "torn_bytes": torn_bytes,
        "released_cuts": list(forgotten.cuts),
        "removed_positions": [
            {"consumer": name, "partition": p, "seqno": seqno}
            for name, p, seqno in forgotten.consumers
        ],
        "problems": [problem.message for problem in table.problems.values()],
    }


def open_directory(path: Path) -> "DataDirectory":
    """Open the directory of a stopped server, which must be there."""
    from upr.storage.check.directory import closed_directory
    from upr.storage.directory import DataDirectory

    # A server makes a directory that is not there; here that would be a slip of the pen.
    with closed_directory(path):
        pass
    return DataDirectory(path)


@click.command("restore-copy")
@click.argument("directory", type=NamedPath(), metavar="DIR")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def restore_copy(directory: Path, yes: bool, as_json: bool) -> None:
    """Prepare DIR, a copy of an older state of a data directory, for being served.

    Every active partition of every bucket gets a new failover record at the last complete marker of the copy, and what
    lies above it is cut off, as after an unclean stop. So clients that are ahead of the copy learn that it is
    another history, and roll back to the record. Cuts are released, and acknowledged positions above the copy
    are removed. Running it again adds another record; no harm, but nothing is gained. A bucket that cannot be read is
    named, and the others are restored. Without a terminal, --yes is needed.
    """
    import lmdb

    with closing(open_directory(directory)) as data:
        if not yes:
            confirm(_QUESTION, "change the copy")
        data.is_another()
        documents: list[dict[str, Any]] = []
        errors: list[Exception] = []
        for folder in data.buckets():
            # The others are of use without it.
            try:
                documents.append(_restore(folder))
            except (UprError, OSError, lmdb.Error) as error:
                errors.append(error)
                note(f"not restored: bucket {folder.name}")
    _print(documents, as_json)
    for one in errors[:-1]:
        note(f"error: {one}")
    if errors:
        raise errors[-1]


def _print(documents: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(documents)
        return
    for document in documents:
        name = document["bucket"]
        click.echo(
            f"bucket {name}: new failover records in {len(document['records'])} partitions, "
            f"{document['not_active']} are not active and keep theirs"
        )
        for cut in document["released_cuts"]:
            print_done(False, "released", cut, f"a cut of bucket {name}")
        for position in document["removed_positions"]:
            click.echo(
                f"bucket {name}: consumer {position['consumer']!r} was at {position['seqno']} "
                f"in partition {position['partition']}, which the copy does not have: removed"
            )
        for problem in document["problems"]:
            note(f"warning: bucket {name}: {problem}")
