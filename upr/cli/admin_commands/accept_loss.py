"""``upr-admin accept-loss``: have a dead partition go on without what is missing of it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upr.cli.admin_commands.restore_copy import open_directory, recovered
from upr_cli_kit.options import NamedPath, partitions_argument
from upr_cli_kit.output import confirm, note, output_options, print_done, print_json
from upr_cli_kit.times import format_micros
from upr_protocol.errors import BucketNotFoundError, InvalidArgumentError, UprError
from upr_protocol.failover import format_failover_id
from upr_protocol.limits import FAILOVER_LOG_MAX

if TYPE_CHECKING:
    from upr.engine.recovery import Recovered
    from upr.storage.keyspace import CutRow
    from upr.storage.store import Store


_QUESTION = (
    "What is missing and what is discarded is lost for good; clients that have it will be rolled back. "
    "If the missing part can still be found, in a copy of the disk say, do not go on. Go on?"
)
Range = tuple[int, int]
"""The seqnos above the first number, up to the second."""


def _joined(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for above, end in sorted(ranges):
        if found and above <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((above, end))
    return found


def _missing(whole: int, aside: Sequence[Range], known_high: int) -> list[Range]:
    """Return the gaps between what is whole, what is kept aside, and the highest seqno there was."""
    gaps: list[Range] = []
    at = whole
    for above, end in [*aside, (known_high, known_high)]:
        if above > at:
            gaps.append((at, above))
        at = max(at, end)
    return gaps


def _loss(store: "Store", result: "Recovered", partition: int, ends: Range) -> dict[str, Any]:
    """Return what a dead partition loses when it is made active, as JSON has it.

    Ranges are as ``Range``: above the first number, up to the second. ``since`` is None where it is not known.
    It is kept up to the last complete marker before the gap. Of what is missing nothing is there, as far as is known; what is
    discarded is there, behind it.

    Args:
        ends: the end and the last complete marker of its stored blocks.
    """
    from upr_protocol.wire.codec import decode_block

    table = result.partitions
    whole, kept = ends
    if whole == table.stored[partition]:
        whole, kept = int(result.highs[partition]), int(result.complete[partition])
    known = max(int(table.known_high[partition]), int(table.stored[partition]))
    rows, aside = 0, list[Range]()
    for data in store.aside(partition):
        for run in decode_block(data).runs:
            aside.append((int(run["start_seqno"]), int(run["end_seqno"])))
            rows += int(run["count"])
    for entry in result.entries:
        own = entry.runs[entry.runs["partition"] == partition]
        rows += int(own["count"][own["end_seqno"] > kept].sum())
    ranges = _joined(aside)
    unfinished = [(kept, whole)] if kept < whole else []
    return {
        "partition": partition,
        "reason": table.reasons.get(partition, ""),
        "since": format_micros(int(table.since[partition])),
        "kept": kept,
        "missing": _missing(whole, ranges, known),
        "discarded": _joined([*unfinished, *ranges]),
        "discarded_rows": rows,
    }


def _look(
    folder: Path, store: "Store", partitions: Sequence[int]
) -> "tuple[Recovered, dict[int, Range], list[dict[str, Any]]]":
    """Recover a bucket as a start would, in memory; return that, the ends of what is stored of dead partitions, and what is lost.

    Raises:
        InvalidArgumentError: a partition is not dead.
    """
    from upr.engine.partitions import DEAD, STATE_NAMES
    from upr.storage.blocks import last_complete

    identity, proof = store.identity(), store.proof()
    assert identity is not None
    result, _ = recovered(
        folder, store, identity, None if proof is None else proof.highs, needed=proof is None
    )
    state = result.partitions.state
    for partition in partitions:
        if state[partition] != DEAD:
            raise InvalidArgumentError(
                f"partition {partition} of bucket {identity.name!r} is {STATE_NAMES[int(state[partition])]}, "
                "not dead; nothing was changed",
                hint="'upr-admin partitions' and 'upr-admin check' name those that are dead",
            )
    # As a start does it; it changes nothing of what there is.
    store.put_aside(result.aside)
    ends: dict[int, Range] = {}
    for partition in partitions:
        heads, _ = store.heads_until_damage(partition)
        ends[partition] = heads[-1].end if heads else 0, last_complete(heads)
    return result, ends, [_loss(store, result, p, end) for p, end in ends.items()]


def _accept(
    store: "Store",
    result: "Recovered",
    ends: Mapping[int, Range],
    losses: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Make the partitions active, in one transaction; returns what was done."""
    from upr import failpoints
    from upr.engine import recovery
    from upr.service.buckets.bucket_service import new_id

    recovery.accept_loss(result, ends, new_id, FAILOVER_LOG_MAX)
    kept = {loss["partition"]: loss["kept"] for loss in losses}
    released = _cuts_above(store.cuts(), kept)
    failpoints.hit("accept.before_commit")
    store.write_recovery(
        result.rows,
        result.blocks,
        result.cut_off,
        result.highs,
        result.producers,
        accepted=ends,
        released=released,
    )
    failpoints.hit("accept.after_commit")
    identity, logs = store.identity(), result.partitions.logs
    assert identity is not None
    return {
        "bucket": identity.name,
        "bucket_version": f"{identity.version:016x}",
        "partitions": [
            {**loss, "failover_id": format_failover_id(logs[loss["partition"]].newest.failover_id)}
            for loss in losses
        ],
        "released_cuts": [name.decode(errors="replace") for name in released],
    }


def _cuts_above(cuts: Mapping[bytes, "CutRow"], kept: Mapping[int, int]) -> list[bytes]:
    """Return the cuts that pin what is given up: they are not exact any more."""
    return sorted(
        name
        for name, row in cuts.items()
        if any(p in kept and pin.seqno > kept[p] for p, pin in row.pins.items())
    )


def _spelled(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{above + 1}-{end}" for above, end in ranges) or "none that is known"


def _words(loss: Mapping[str, Any]) -> str:
    rows, ranges = loss["discarded_rows"], loss["discarded"]
    discarded = f"{rows} rows are discarded, of seqnos {_spelled(ranges)}"
    return (
        f"partition {loss['partition']}: kept up to {loss['kept']}; missing seqnos: {_spelled(loss['missing'])}; "
        f"{discarded if ranges else 'nothing is discarded'}"
    )


@click.command("accept-loss")
@click.argument("directory", type=NamedPath(), metavar="DIR")
@partitions_argument(required=True, metavar="PARTITION ...")
@click.option("--bucket", default="default", show_default=True, help="The bucket's name.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def accept_loss(
    directory: Path, partitions: list[int], bucket: str, yes: bool, as_json: bool
) -> None:
    """Have dead partitions (5, or 0-63,512) of DIR, whose server is stopped, go on without what is missing of them.

    Says which seqnos are missing, as far as is known, and what is discarded because it lies behind them. Each partition
    gets a new failover record at the last complete marker before the gap, so that clients that have more roll back to
    there, and is active again at the next start. Cuts that pin what is given up are released. Without a terminal, --yes
    is needed.
    """
    with closing(open_directory(directory)) as data:
        folder, store = _find(data.buckets(), bucket)
        with closing(store):
            result, ends, losses = _look(folder, store, partitions)
            words = "\n".join(map(_words, losses))
            if yes:
                note(words)
            else:
                confirm(_QUESTION, "accept the loss", words)
            document = _accept(store, result, ends, losses)
    if as_json:
        print_json(document)
        return
    for told in document["partitions"]:
        click.echo(
            f"partition {told['partition']}: active again, with a new failover record at {told['kept']}"
        )
    for cut in document["released_cuts"]:
        print_done(False, "released", cut, f"a cut of bucket {bucket}")


def _find(folders: Iterable[Path], name: str) -> "tuple[Path, Store]":
    """Return the folder of a bucket, and its store, open."""
    from upr.storage.store import Store

    unreadable: UprError | None = None
    for folder in folders:
        store: Store | None = None
        try:
            store = Store(folder / "store")
            identity = store.identity()
            if identity is not None and identity.name == name:
                return folder, store
        except UprError as error:
            unreadable = error
        if store is not None:
            store.close()
    if unreadable is not None:
        # Its name is not known: it may be the one.
        raise unreadable
    raise BucketNotFoundError(f"there is no bucket {name!r} in the directory")
